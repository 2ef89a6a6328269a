"""Codes, exact values and one rounding, in Python integers and fractions.

A value is a ``Fraction``, or a float that is NaN or infinite; the sign of a zero lives in its code only.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

Value = Fraction | float
# exponent bits, fraction bits, bias, how the top of the range is used
FORMATS = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "bfloat16": (8, 7, 127, "ieee"),
    "float16": (5, 10, 15, "ieee"),
    "float32": (8, 23, 127, "ieee"),
    "float64": (11, 52, 1023, "ieee"),
}
STORED = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "U8": "uint8",
    "BOOL": "bool",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
}
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "float64": 8, "int64": 8}


@dataclass(frozen=True)
class Array:
    """Row-major codes (floats) or integers."""

    dtype: str
    shape: tuple[int, ...]
    codes: list[int]

    def values(self) -> list[Value]:
        table: dict[int, Value] = {}
        for code in self.codes:
            if code not in table:
                table[code] = decode(code, self.dtype)
        return [table[code] for code in self.codes]

    def rows(self) -> list[list[Value]]:
        width, values = self.shape[-1], self.values()
        return [values[i : i + width] for i in range(0, len(values), width)]

    def code_rows(self) -> list[list[int]]:
        width = self.shape[-1]
        return [self.codes[i : i + width] for i in range(0, len(self.codes), width)]


def read(path: Path) -> dict[str, Array]:
    """The tensors of a safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            begin, end = (start + offset for offset in entry["data_offsets"])
            found[name] = array(STORED[entry["dtype"]], tuple(entry["shape"]), content[begin:end])
    return found


def array(dtype: str, shape: tuple[int, ...], raw: bytes) -> Array:
    size = SIZES.get(dtype, 1)
    signed = dtype.startswith("int")
    codes = [int.from_bytes(raw[i : i + size], "little", signed=signed) for i in range(0, len(raw), size)]
    return Array(dtype, shape, codes)


def decode(code: int, dtype: str) -> Value:
    """The value of a code; integers are their own."""
    if dtype not in FORMATS:
        return Fraction(code)
    exponent_bits, fraction_bits, bias, kind = FORMATS[dtype]
    sign = code >> (exponent_bits + fraction_bits)
    exponent = code >> fraction_bits & ((1 << exponent_bits) - 1)
    fraction = code & ((1 << fraction_bits) - 1)
    top = exponent == (1 << exponent_bits) - 1
    if kind == "ieee" and top:
        return math.nan if fraction else -math.inf if sign else math.inf
    if kind == "fn" and top and fraction == (1 << fraction_bits) - 1:
        return math.nan
    if kind == "fnuz" and sign and not exponent and not fraction:
        return math.nan
    significand = fraction if exponent == 0 else fraction + (1 << fraction_bits)
    power = max(exponent, 1) - bias - fraction_bits
    value = Fraction(significand) * Fraction(2) ** power
    return -value if sign else value


def encode(x: Value, dtype: str, *, negative_zero: bool = False) -> int:
    """The nearest code, ties to even; beyond the range 8-bit formats saturate and IEEE ones are infinite."""
    exponent_bits, fraction_bits, bias, kind = FORMATS[dtype]
    sign_bit = 1 << (exponent_bits + fraction_bits)
    top = (1 << exponent_bits) - 1
    # IEEE: infinity; fn: the code below NaN; fnuz: the last code, as NaN is what -0 would be
    limit = {"ieee": top << fraction_bits, "fn": sign_bit - 2, "fnuz": sign_bit - 1}[kind]
    if isinstance(x, float):
        if math.isnan(x):
            return {"ieee": limit | 1 << (fraction_bits - 1), "fn": sign_bit - 1, "fnuz": sign_bit}[kind]
        return limit | (sign_bit if x < 0 else 0)
    if x == 0:
        return sign_bit if negative_zero else 0
    magnitude = abs(x)
    emin = 1 - bias
    exponent = max(floor_log2(magnitude), emin)
    steps = magnitude / Fraction(2) ** (exponent - fraction_bits)
    whole, rest = divmod(steps.numerator, steps.denominator)
    twice = 2 * rest
    whole += twice > steps.denominator or (twice == steps.denominator and whole % 2 == 1)
    # A carry into the next binade, and a subnormal that becomes normal, are the same integer addition.
    code = whole + ((exponent - emin) << fraction_bits)
    code = min(code, limit)
    return code | (sign_bit if x < 0 else 0)


def rounded(x: Value, dtype: str) -> Value:
    return decode(encode(x, dtype), dtype)


def floor_log2(x: Fraction) -> int:
    """The exponent of a positive fraction."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def divide(x: Value, y: Value) -> Value:
    """IEEE division without rounding; x/0 is infinite of the sign of x, 0/0 NaN."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        if y == 0:
            return math.nan if x == 0 else math.inf if x > 0 else -math.inf
        return x / y
    if isinstance(y, float) and math.isinf(y) and isinstance(x, Fraction):
        return Fraction(0)
    return _float(x) / (1.0 if isinstance(y, Fraction) and y > 0 else _float(y))


def multiply(x: Value, y: Value) -> Value:
    """IEEE multiplication without rounding."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x * y
    signs = [v if isinstance(v, float) else float((v > 0) - (v < 0)) for v in (x, y)]
    return signs[0] * signs[1]


def add(x: Value, y: Value) -> Value:
    """IEEE addition without rounding."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x + y
    return (x if isinstance(x, float) else 0.0) + (y if isinstance(y, float) else 0.0)


def same(found: int, wanted: int, dtype: str, *, signed_zero: bool = False) -> bool:
    """Equal codes; any NaN is any NaN, and -0 is +0 unless its sign counts."""
    if found == wanted:
        return True
    x, y = decode(found, dtype), decode(wanted, dtype)
    if isinstance(x, float) and isinstance(y, float):
        return math.isnan(x) and math.isnan(y) or x == y
    return not signed_zero and x == y


def _float(x: Value) -> float:
    return x if isinstance(x, float) else float((x > 0) - (x < 0))


# --- exponential --------------------------------------------------------------------------------------------

BITS = 200


def exp_bounds(x: Fraction) -> tuple[Fraction, Fraction]:
    """Two fractions that hold ``exp(x)`` between them, 150 bits apart or better.

    Taylor's series of ``r = x / 2^m``, ``|r| <= 2^-8``, whose rest after n terms is below twice the next one, squared m
    times with both ends rounded outwards.
    """
    halvings = max(0, floor_log2(abs(x)) + 9) if x else 0
    r = x / 2**halvings
    total, term, n = Fraction(1), Fraction(1), 0
    while abs(term) > Fraction(1, 2 ** (BITS + 16)):
        n += 1
        term = term * r / n
        total += term
    low, high = total - 2 * abs(term), total + 2 * abs(term)
    for _ in range(halvings):
        low, high = _outwards(low, -1), _outwards(high, 1)
        low, high = low * low, high * high
    return low, high


def sigmoid_bounds(x: Fraction) -> tuple[Fraction, Fraction]:
    """``1 / (1 + exp(-x))`` between two fractions."""
    low, high = exp_bounds(-x)
    return 1 / (1 + high), 1 / (1 + low)


def decided(low: Fraction, high: Fraction, dtype: str) -> int:
    """The code that both ends round to; ArithmeticError when they differ."""
    codes = encode(low, dtype), encode(high, dtype)
    if codes[0] != codes[1]:
        raise ArithmeticError(f"{float(low)} .. {float(high)} rounds to two values of {dtype}")
    return codes[0]


def _outwards(x: Fraction, direction: int) -> Fraction:
    shift = BITS + 32 - floor_log2(x)
    scaled = x.numerator * 2**shift if shift >= 0 else x.numerator
    denominator = x.denominator if shift >= 0 else x.denominator * 2**-shift
    whole = scaled // denominator if direction < 0 else -(-scaled // denominator)
    return Fraction(whole, 1) / Fraction(2) ** shift
