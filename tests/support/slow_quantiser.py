"""A second derivation of the recipes in exact rationals, slow and element by element; shares no arithmetic
with the oracle.

``quantise_group(values, dtype, recipe)`` takes finite float values of one block and returns (scale, codes).
Only the recipe *record* is shared; every formula is written out again here.
"""

from __future__ import annotations

from fractions import Fraction

from oracle.numbers.recipes import CodeFormula, PowerOfTwo, Recipe, ScaleFormula

INF = "inf"
Number = Fraction | str
PRECISION = {
    "float32": (24, -126, 127),
    "bfloat16": (8, -126, 127),
    "float16": (11, -14, 15),
    "float64": (53, -1022, 1023),
}
E4M3 = [Fraction(m, 512) for m in range(8)] + [
    Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]


def rne(x: Fraction, fmt: str = "float32") -> Number:
    """Nearest value of a binary format, ties to even; INF beyond the largest."""
    precision, emin, emax = PRECISION[fmt]
    if x == 0:
        return x
    magnitude = abs(x)
    exponent = emin
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
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


def e4m3_code(x: Number, negative: bool) -> int:
    """Nearest E4M3 code of a magnitude, ties to the even code, saturating."""
    if x == INF or abs(Fraction(x)) > 448:
        return 0x7E | (0x80 if negative else 0)
    magnitude = abs(Fraction(x))
    low = max(code for code, value in enumerate(E4M3) if value <= magnitude)
    code = low
    if E4M3[low] != magnitude:
        below, above = magnitude - E4M3[low], E4M3[low + 1] - magnitude
        code = low if below < above or (below == above and low % 2 == 0) else low + 1
    return code | (0x80 if negative else 0)


def power_ceil(s: Fraction) -> Fraction:
    k = -200
    while Fraction(2) ** k < s:
        k += 1
    return Fraction(2) ** k


def power_floor(s: Fraction) -> Fraction:
    return power_ceil(s) if power_ceil(s) == s else power_ceil(s) / 2


def quantise_group(values: list[float], dtype: str, recipe: Recipe) -> tuple[Fraction, list[int]]:
    """Scale and codes of one block with a non-zero amax or a floor, whose float32 arithmetic does not overflow."""
    exact = [Fraction(v) for v in values]
    a = max(abs(v) for v in exact)
    wide = recipe.formula is ScaleFormula.INVERSE_FLOAT64
    floor = Fraction(recipe.amax_floor)
    a = max(a, floor if wide else _finite(rne(floor)))
    q = _finite(rne(_finite(rne(448 / a, "float64")) if wide else 448 / a))
    if recipe.formula is ScaleFormula.DIVIDE:
        s = _finite(rne(a / 448))
    elif recipe.formula is ScaleFormula.MULTIPLY:
        s = _finite(rne(a * _finite(rne(Fraction(1, 448)))))
    elif recipe.formula is ScaleFormula.INPUT_DTYPE:
        s = _finite(rne(_finite(rne(a / 448)), dtype))
    else:
        s = _finite(rne(1 / q))
    if recipe.scale_floor:
        s = max(s, _finite(rne(Fraction(recipe.scale_floor))))
    mode = recipe.power_of_two
    if mode is PowerOfTwo.CEIL:
        s = max(power_ceil(s), Fraction(2) ** (recipe.byte_low - 127))
    elif mode is PowerOfTwo.AMAX_FLOOR:
        s = power_floor(a) / 256
    elif mode is PowerOfTwo.AMAX_CEIL:
        s = power_ceil(a) / 256
    elif mode is PowerOfTwo.AMAX_EVEN:
        fraction = a / power_floor(a)
        s = power_floor(a) / 256 * (2 if fraction >= Fraction(31, 16) else 1)
    elif mode is PowerOfTwo.INVERSE_FLOOR:
        q = power_floor(q)
        s = 1 / q
    elif mode is not None:
        raise NotImplementedError(mode)
    if recipe.code is CodeFormula.DIVIDE:
        quotients = [rne(v / s) for v in exact]
    elif recipe.code is CodeFormula.RECIPROCAL:
        inverse = _finite(rne(1 / s))
        quotients = [rne(v * inverse) for v in exact]
    else:
        quotients = [rne(v * q) for v in exact]
    negative = [str(v).startswith("-") for v in values]
    return s, [e4m3_code(x, sign) for x, sign in zip(quotients, negative, strict=True)]


def _finite(x: Number) -> Fraction:
    assert isinstance(x, Fraction), "overflow: outside the range of this derivation"
    return x
