"""A second derivation of the recipes in exact rationals, slow and element by element; shares no arithmetic
with the oracle.

``quantise_group(values, dtype, recipe)`` takes finite float values of one block and returns (scale, codes).
Only the recipe *record* is shared, of the formats only their names; every formula is written out again here.
"""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction

from oracle.numbers.recipes import CodeFormula, PowerOfTwo, Recipe, ScaleFormula
from oracle.numbers.scaling import ScaleFormat

INF = "inf"
Number = Fraction | str
PRECISION = {
    "float32": (24, -126, 127),
    "bfloat16": (8, -126, 127),
    "float16": (11, -14, 15),
    "float64": (53, -1022, 1023),
}


def magnitudes(exponent_bits: int, fraction_bits: int, bias: int, *, unused: int) -> list[Fraction]:
    """The finite magnitudes of a format by code; its last ``unused`` codes are infinity or NaN."""
    f = 1 << fraction_bits
    fields = [(e, m) for e in range(1 << exponent_bits) for m in range(f)]
    values = [Fraction(m + (f if e else 0), f) * Fraction(2) ** (max(e, 1) - bias) for e, m in fields]
    return values[: len(values) - unused]


MAGNITUDES = {
    "float8_e4m3fn": magnitudes(4, 3, 7, unused=1),
    "float8_e5m2": magnitudes(5, 2, 15, unused=4),
    "float4_e2m1fn": magnitudes(2, 1, 1, unused=0),
}
SIGN = {"float8_e4m3fn": 0x80, "float8_e5m2": 0x80, "float4_e2m1fn": 0x8}
E4M3 = MAGNITUDES["float8_e4m3fn"]


def rne(x: Fraction, fmt: str = "float32") -> Number:
    """Nearest value of a binary format, ties to even; INF beyond the largest."""
    precision, emin, emax = PRECISION[fmt]
    if x == 0:
        return x
    magnitude = abs(x)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, emin) - precision + 1)
    steps = magnitude / quantum
    whole = steps.numerator // steps.denominator
    rest = steps - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    value = whole * quantum
    if value >= Fraction(2) ** (emax + 1):
        return INF
    return value if x > 0 else -value


def code_of(x: Number, negative: bool, fmt: str = "float8_e4m3fn") -> int:
    """Nearest code of a magnitude, ties to the even code, saturating."""
    values, sign = MAGNITUDES[fmt], SIGN[fmt] if negative else 0
    if x == INF or abs(Fraction(x)) > values[-1]:
        return (len(values) - 1) | sign
    magnitude = abs(Fraction(x))
    low = bisect_right(values, magnitude) - 1
    code = low
    if values[low] != magnitude:
        below, above = magnitude - values[low], values[low + 1] - magnitude
        code = low if below < above or (below == above and low % 2 == 0) else low + 1
    return code | sign


def power_ceil(s: Fraction) -> Fraction:
    k = -200
    while Fraction(2) ** k < s:
        k += 1
    return Fraction(2) ** k


def power_floor(s: Fraction) -> Fraction:
    return power_ceil(s) if power_ceil(s) == s else power_ceil(s) / 2


def quantise_group(
    values: list[float], dtype: str, recipe: Recipe, global_scale: float | None = None
) -> tuple[Fraction, list[int]]:
    """Scale and codes of one block with a non-zero amax or a floor, whose float32 arithmetic does not overflow."""
    element = recipe.scaling.element.name
    top = MAGNITUDES[element][-1]
    emax = max(e for e in range(20) if 2**e <= top)
    exact = [Fraction(v) for v in values]
    a = max(abs(v) for v in exact)
    wide = recipe.formula is ScaleFormula.INVERSE_FLOAT64
    floor = Fraction(recipe.amax_floor)
    a = max(a, floor if wide else _finite(rne(floor)))
    a = _finite(rne(a + _finite(rne(Fraction(recipe.amax_added)))))
    q = _finite(rne(_finite(rne(top / a, "float64")) if wide else top / a))
    if recipe.formula is ScaleFormula.DIVIDE:
        s = _finite(rne(a / top))
    elif recipe.formula is ScaleFormula.MULTIPLY:
        s = _finite(rne(a * _finite(rne(1 / top))))
    elif recipe.formula is ScaleFormula.INPUT_DTYPE:
        s = _finite(rne(_finite(rne(a / top)), dtype))
    else:
        s = _finite(rne(1 / q))
    if recipe.scale_floor:
        s = max(s, _finite(rne(Fraction(recipe.scale_floor))))
    if global_scale is not None:
        s = _finite(rne(s / Fraction(global_scale)))
    if recipe.scaling.scale_format is ScaleFormat.E4M3:
        s = E4M3[code_of(s, False)]
    mode = recipe.power_of_two
    if mode is PowerOfTwo.CEIL:
        s = max(power_ceil(s), Fraction(2) ** (recipe.byte_low - 127))
    elif mode is PowerOfTwo.AMAX_FLOOR:
        s = power_floor(a) / 2**emax
    elif mode is PowerOfTwo.AMAX_CEIL:
        s = power_ceil(a) / 2**emax
    elif mode is PowerOfTwo.AMAX_EVEN:
        fraction = a / power_floor(a)
        # the midpoint of the largest significand of the format and 2
        last = MAGNITUDES[element][-1] if element != "float8_e4m3fn" else Fraction(480)
        s = power_floor(a) / 2**emax * (2 if fraction >= (last / 2**emax + 2) / 2 else 1)
    elif mode is PowerOfTwo.INVERSE_FLOOR:
        q = power_floor(q)
        s = 1 / q
    elif mode is not None:
        raise NotImplementedError(mode)
    total = s if global_scale is None else _finite(rne(s * Fraction(global_scale)))
    if recipe.code is CodeFormula.DIVIDE:
        quotients = [rne(v / total) for v in exact]
    elif recipe.code is CodeFormula.RECIPROCAL:
        inverse = _finite(rne(1 / total))
        quotients = [rne(v * inverse) for v in exact]
    else:
        quotients = [rne(v * q) for v in exact]
    negative = [str(v).startswith("-") for v in values]
    return s, [code_of(x, sign, element) for x, sign in zip(quotients, negative, strict=True)]


def _finite(x: Number) -> Fraction:
    assert isinstance(x, Fraction), "overflow: outside the range of this derivation"
    return x
