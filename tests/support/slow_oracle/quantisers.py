"""Quantisers: amax, scale and codes of each block, every float32 operation rounded on its own.

What each library does with NaN, infinity and zero blocks stands in :data:`RULES`, read off its source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from tests.support.slow_oracle.numbers import Array, Value, decode, divide, encode, floor_log2, multiply, rounded

E4M3 = "float8_e4m3fn"
F32 = "float32"
BF16_MAX = (2**8 - 1) << 120
"""What a multiplier that overflows becomes: the largest finite value of the bfloat16 input."""


@dataclass(frozen=True)
class Rule:
    """``floor`` of the amax; floor of the ``scale``; how codes come; what NaN does."""

    floor: float = 0.0
    scale_floor: float = 0.0
    code: str = "x / s"
    nan_in_amax: bool = False
    nan_code: int = 0x7F
    zero_block_is_one: bool = False
    zero_scale_gives_zero: bool = False
    smallest_power: int = -127
    nan_power: int | None = None


RULES = {
    "group": Rule(floor=1e-10, nan_code=0xFE),
    "cast": Rule(floor=1e-4, code="x * (1 / s)", nan_in_amax=True, smallest_power=-126, nan_power=127),
    "flashinfer": Rule(code="x * (448 / a)", zero_block_is_one=True),
    "tensor": Rule(nan_in_amax=True, zero_scale_gives_zero=True),
    "token": Rule(scale_floor=1 / (448 * 512), nan_code=0x7E),
}


def blocks(
    x: Array, rows: int, columns: int, rule: Rule, *, power: bool = False, scale: Value | None = None
) -> tuple[list[int], list[int]]:
    """Codes of ``x`` and of its float32 scales, block by block; a given ``scale`` serves every block."""
    height, width = x.shape[0] if len(x.shape) > 1 else 1, x.shape[-1]
    codes, scales = [0] * len(x.codes), []
    for top in range(0, height, rows):
        for left in range(0, width, columns):
            at = [
                r * width + c
                for r in range(top, min(top + rows, height))
                for c in range(left, min(left + columns, width))
            ]
            block = [x.codes[i] for i in at]
            s, inverse = block_scale(block, x.dtype, rule, power) if scale is None else (scale, None)
            scales.append(encode(s, F32))
            for i in at:
                codes[i] = code(x.codes[i], x.dtype, s, inverse, rule)
    return codes, scales


def block_scale(raw: list[int], dtype: str, rule: Rule, power: bool) -> tuple[Value, Value | None]:
    """The scale of one block and, where codes are products, what they are multiplied by."""
    values = [decode(c, dtype) for c in raw]
    nan = any(isinstance(v, float) and math.isnan(v) for v in values)
    known = [abs(v) for v in values if not (isinstance(v, float) and math.isnan(v))]
    a: Value = math.nan if nan and rule.nan_in_amax else max([*known, Fraction(0)])
    if not (isinstance(a, float) and math.isnan(a)):
        a = max(a, rounded(Fraction(rule.floor), F32))
    if a == 0 and rule.zero_block_is_one:
        return Fraction(1), Fraction(1)
    if rule.code == "x * (448 / a)":
        quotient = rounded(divide(Fraction(448), a), F32)
        if isinstance(quotient, float) and math.isinf(quotient):
            quotient = Fraction(BF16_MAX)
        return rounded(divide(Fraction(1), quotient), F32), quotient
    s = rounded(divide(a, Fraction(448)), F32)
    if rule.scale_floor and not (isinstance(s, float) and math.isnan(s)):
        s = max(s, rounded(Fraction(rule.scale_floor), F32))
    if power:
        s = power_above(s, rule)
    return s, rounded(divide(Fraction(1), s), F32) if rule.code == "x * (1 / s)" else None


def power_above(s: Value, rule: Rule) -> Value:
    """The smallest power of two that is not below ``s``, between the ends of the rule and 2^127."""
    if isinstance(s, float):
        return s if math.isnan(s) and rule.nan_power is None else Fraction(2) ** 127
    if s == 0:
        return Fraction(2) ** rule.smallest_power
    exponent = floor_log2(s)
    exponent += Fraction(2) ** exponent < s
    return Fraction(2) ** min(max(exponent, rule.smallest_power), 127)


def code(raw: int, dtype: str, s: Value, inverse: Value | None, rule: Rule) -> int:
    """The code of one element."""
    x = decode(raw, dtype)
    negative = bool(raw >> (8 * {"float32": 4}.get(dtype, 2) - 1))
    if rule.zero_scale_gives_zero and s == 0 and not (isinstance(x, float) and math.isnan(x)):
        return 0x80 if negative else 0
    quotient = divide(x, s) if inverse is None else multiply(x, inverse)
    wide = rounded(quotient, F32)
    if isinstance(wide, float) and math.isnan(wide):
        return rule.nan_code
    return encode(wide, E4M3, negative_zero=negative)


def ceil_to_power(x: Array) -> list[int | None]:
    """``ceil_to_ue8m0`` of every element, as float32 codes; NaN is left open."""
    found: list[int | None] = []
    for value in x.values():
        if isinstance(value, float):
            found.append(None if math.isnan(value) else encode(Fraction(2) ** 127, F32))
            continue
        found.append(encode(power_above(abs(value), Rule(smallest_power=-126)), F32))
    return found
