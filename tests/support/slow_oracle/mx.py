"""MX and NVFP4 block by block: shared exponents, E4M3 scales under a scale of the tensor, packed codes, tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from tests.support.slow_oracle.numbers import Array, Value, decode, divide, encode, floor_log2, multiply, rounded
from tests.support.slow_oracle.places import swizzled

F32, E4M3 = "float32", "float8_e4m3fn"
FP4 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
LARGEST = {"e4m3": Fraction(448), "e5m2": Fraction(57344), "e2m1": Fraction(6)}
FRACTION_BITS = {"e4m3": 3, "e5m2": 2, "e2m1": 1}
FLOAT_MAX = Fraction((1 << 24) - 1) * 2**104
Codes = list[int] | list[int | None]


def is_nan(x: Value) -> bool:
    return isinstance(x, float) and math.isnan(x)


def fp4(x: Value, negative: bool) -> int:
    """The nearest of eight magnitudes, ties to the even code; NaN is the largest."""
    if is_nan(x):
        return 7
    sign = 8 if negative else 0
    if isinstance(x, float) or abs(x) >= FP4[-1]:
        return sign | 7
    distances = [abs(abs(x) - v) for v in FP4]
    nearest = [code for code, d in enumerate(distances) if d == min(distances)]
    return sign | next((code for code in nearest if code % 2 == 0), nearest[0])


def shared_byte(values: list[Value], rounding: str, element: str) -> int:
    """The byte of one block."""
    top = LARGEST[element]
    odd = any(isinstance(v, float) for v in values)
    if rounding == "rceil":
        known = [abs(v) for v in values if not is_nan(v)]
        a = max(known, default=Fraction(0))
        t = rounded(multiply(a, rounded(Fraction(1) / top, F32)), F32)
        if isinstance(t, float):
            return 254
        exponent = -200 if t == 0 else floor_log2(t) + (Fraction(2) ** floor_log2(t) < t)
        return min(max(exponent + 127, 0), 254)
    if odd:
        return 255
    a = max(abs(v) for v in values)
    if a == 0:
        return 0
    k = floor_log2(a)
    if rounding == "ceil":
        k += Fraction(2) ** k < a
    if rounding == "even":
        k += a >= (2 - Fraction(1, 2 ** (FRACTION_BITS[element] + 1))) * Fraction(2) ** k
        if k > 127:
            return 255
    return max(k - floor_log2(top) + 127, 0)


def _stored(scale: list[int], shape: tuple[int, int], layout: str) -> list[int]:
    if layout == "linear":
        return scale
    return [code or 0 for code in swizzled(Array("uint8", shape, scale), layout)]


def _packed(codes: Codes) -> Codes:
    pairs = zip(codes[::2], codes[1::2], strict=True)
    return [None if low is None or high is None else low | high << 4 for low, high in pairs]


def _blocks(x: Array, width: int) -> list[tuple[list[int], list[Value]]]:
    values = x.values()
    return [(x.codes[i : i + width], values[i : i + width]) for i in range(0, len(values), width)]


def _negative(code: int, dtype: str) -> bool:
    return bool(code >> (31 if dtype == F32 else 15))


def powers(i: dict[str, Array], o: dict[str, object], element: str) -> dict[str, Codes]:
    """MXFP8 and MXFP4."""
    x, rounding = i["x"], str(o["rounding"])
    scale, codes = list[int](), list[int | None]()
    for raw, values in _blocks(x, 32):
        byte = shared_byte(values, rounding, element)
        scale.append(byte)
        codes += [_code(v, _negative(c, x.dtype), byte, element, rounding) for c, v in zip(raw, values, strict=True)]
    shape = (x.shape[0], x.shape[1] // 32)
    return {"q": _packed(codes) if element == "e2m1" else codes, "scale": _stored(scale, shape, str(o["layout"]))}


def _code(v: Value, negative: bool, byte: int, element: str, rounding: str) -> int | None:
    if byte == 255:
        return None if element == "e2m1" else 0x7F
    power: Value = Fraction(2) ** (127 - byte)
    if element == "e2m1" and rounding == "rceil":  # FlashInfer: 1 under byte 0, a flushed reciprocal under byte 254
        power = Fraction(1) if byte == 0 else Fraction(0) if byte == 254 else power
        if byte == 254 and isinstance(v, float):
            return 7
    scaled = multiply(v, power) if not is_nan(v) else v
    if element == "e2m1":
        return fp4(scaled, negative)
    if isinstance(scaled, float) and math.isinf(scaled):  # a cast that saturates
        scaled = LARGEST[element] * (1 if scaled > 0 else -1)
    return encode(
        _clamped(scaled, LARGEST[element]), f"float8_{element}" + "fn" * (element == "e4m3"), negative_zero=negative
    )


def _clamped(x: Value, top: Fraction) -> Value:
    return x if isinstance(x, float) else max(min(x, top), -top)


def two_levels(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """NVFP4 under ``e = 2688/amax`` or, inversed, under ``amax/2688``."""
    x, given, inversed = i["x"], i["global_scale"].values(), bool(o["is_global_scale_inversed"])
    sixth, scale, codes = rounded(Fraction(1, 6), F32), list[int](), list[int]()
    across = x.shape[1] // 16
    for number, (raw, values) in enumerate(_blocks(x, 16)):
        g = given[number // across if len(given) > 1 else 0]
        a = max((abs(v) for v in values if not is_nan(v)), default=Fraction(0))
        if a == 0:
            t: Value = Fraction(0)
        elif inversed:
            t = rounded(divide(rounded(multiply(a, sixth), F32), g), F32)
        else:
            t = rounded(multiply(a, rounded(multiply(g, sixth), F32)), F32)
        scale.append(encode(_clamped(t if not isinstance(t, float) else Fraction(448), Fraction(448)), E4M3))
        stored = decode(scale[-1], E4M3)
        both = multiply(stored, g) if inversed else multiply(stored, rounded(divide(Fraction(1), g), F32))
        inverse = rounded(divide(Fraction(1), rounded(both, F32)), F32)
        if isinstance(inverse, float) and not inversed:
            inverse = FLOAT_MAX
        for code, v in zip(raw, values, strict=True):
            quotient = v if is_nan(v) else Fraction(0) if a == 0 else rounded(multiply(v, inverse), F32)
            codes.append(fp4(quotient, _negative(code, x.dtype)))
    shape = (x.shape[0], x.shape[1] // 16)
    return {"q": _packed(codes), "scale": _stored(scale, shape, str(o["layout"]))}


def back(i: dict[str, Array], o: dict[str, object], width: int, value: Callable[[int], Value]) -> list[int]:
    """Codes times their scales; ``value`` of a scale byte."""
    q = i["q"]
    if q.dtype == "uint8":
        nibbles = [half for byte in q.codes for half in (byte & 15, byte >> 4)]
        values: list[Value] = [-FP4[c & 7] if c & 8 else FP4[c] for c in nibbles]
    else:
        values = q.values()
    rows = q.shape[0]
    columns = len(values) // rows
    across = columns // width
    places = range(rows * across)
    if str(o["layout"]) != "linear":  # where each place of the matrix comes to lie
        order = swizzled(Array("uint8", (rows, across), list(places)), str(o["layout"]))
        memory = {place: at for at, place in enumerate(order) if place is not None}
        places = [memory[place] for place in places]  # type: ignore[assignment]
    scale = [value(i["scale"].codes[at]) for at in places]
    per = [scale[r * across + c // width] for r in range(rows) for c in range(columns)]
    return [encode(multiply(v, s), F32) for v, s in zip(values, per, strict=True)]


def power(byte: int) -> Value:
    """A scale byte of MX."""
    return math.nan if byte == 255 else Fraction(2) ** (byte - 127)
