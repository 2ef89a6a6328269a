"""Scales that are powers of two: every way in use to round a float32 scale to one, by exponent bits.

``s = 2^k S`` with ``1 <= S < 2`` becomes ``2^k`` or ``2^(k+1)``. The modes differ only in the significand
at which they step to the next power:

* CEIL steps at once (``S > 1``); AMAX_* look at the amax instead of ``s`` and subtract the exponent of the largest
  value of the element format (8 for E4M3);
* EXP2_CEIL_LOG2 and EXP2_ROUND_LOG2 go through a *rounded* logarithm, so they step late or early; the step is
  computed here for a correctly rounded logarithm, and :func:`log2_window` bounds it for one that is off by an ulp;
* INVERSE_FLOOR clears the fraction of ``q = 448 / a``.

Sources: OCP Microscaling Formats 1.0, 6.3 (AMAX_FLOOR); CUDA ``cvt.rp.satfinite.ue8m0`` (CEIL); torchao
``to_mx`` (AMAX_CEIL, AMAX_EVEN); the records of :mod:`oracle.numbers.recipes` name the users of each.
Not covered: packing of exponent bytes (:mod:`oracle.truth.layout`).
"""

from __future__ import annotations

from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from oracle.errors import DtypeError
from oracle.numbers.formats import FP32, Format, decode
from oracle.numbers.recipes import PowerOfTwo, Recipe
from oracle.numbers.rounding import Overflow, Rounding, exponent_of, power_of_two, to_dtype

LOG2_MODES = (PowerOfTwo.EXP2_CEIL_LOG2, PowerOfTwo.EXP2_ROUND_LOG2)
BIAS = 127
_LOWEST, _HIGHEST = -149, 127  # exponents of positive float32 values


def ceil_to_ue8m0(x: Tensor) -> Tensor:
    """The smallest power of two that is not below ``|x|``, within the exponents of DeepGEMM's routine.

    Parameters
    ----------
    x : Tensor, float32, any shape.

    Notes
    -----
    Source: DeepGEMM deep_gemm/utils/math.py ``ceil_to_ue8m0``, which clamps the byte to 1..254.

    Returns float32 powers of two, same shape. Exact powers stay. Zero, subnormals and everything up to 2^-126 give
    2^-126 (byte 1), everything above 2^127, infinity and NaN give 2^127 (byte 254).
    Raises DtypeError: ``x`` is not float32.
    """
    if x.dtype is not torch.float32:
        raise DtypeError(f"ceil_to_ue8m0 takes float32, not {x.dtype}; convert the scale first")
    value = ceil_power(decode(x).abs(), byte_low=1, inf_byte=254, nan_byte=254)
    return to_dtype(value, torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def ceil_power(s: Tensor, *, byte_low: int, inf_byte: int | None, nan_byte: int) -> Tensor:
    """Smallest ``2^(byte - 127) >= s`` with ``byte_low <= byte <= 254``, for float64 ``s >= 0`` of any shape; float64
    of the same shape. An infinite ``s`` gives ``inf_byte`` (None: it stays infinite) and NaN ``nan_byte``; byte 255 is
    NaN."""
    return _from_exponent(_ceil_exponent(s), s, byte_low, inf_byte, nan_byte)


def round_scale(s: Tensor, amax: Tensor, inverse: Tensor, recipe: Recipe, fmt: Format) -> Tensor:
    """The power of two that a UE8M0 recipe publishes.

    Parameters
    ----------
    s, amax, inverse : Tensor
        float64, one shape: the scale before rounding, the floored amax it came from, and ``q`` (only read by
        INVERSE_FLOOR), all float32 values.
    fmt : Format, format in which the library computes the logarithm (EXP2_* modes): float32, or the input's.

    Returns float64 powers of two of that shape; 0, inf and NaN where the mode lets them through.
    """
    mode, element = recipe.power_of_two, recipe.element
    limits = (recipe.byte_low, recipe.inf_byte, recipe.nan_byte)
    if mode in LOG2_MODES:
        return _through_log2(s, recipe, fmt)
    if mode is PowerOfTwo.INVERSE_FLOOR:
        floor = torch.where(torch.isfinite(inverse) & (inverse > 0), power_of_two(exponent_of(inverse)), inverse)
        return torch.ones_like(floor) / floor
    if mode is PowerOfTwo.CEIL:
        return _from_exponent(_ceil_exponent(s), s, *limits)
    exponent, source = exponent_of(amax), amax
    if mode is PowerOfTwo.AMAX_CEIL:
        exponent = _ceil_exponent(amax)
    if mode is PowerOfTwo.AMAX_EVEN:
        # Adding half an ulp of the element's significand and truncating moves to the next power from 2 - ulp/2 on.
        step = 2.0 - 2.0 ** -(element.fraction_bits + 1)
        exponent = exponent + (amax >= step * power_of_two(exponent)).to(exponent.dtype)
        source = torch.where((exponent > _HIGHEST) & ~amax.isnan(), torch.full_like(amax, torch.inf), amax)
    return _from_exponent(exponent - element.emax, source, *limits)


def log2_window(s: Tensor, recipe: Recipe, fmt: Format) -> tuple[Tensor, Tensor]:
    """Smallest and largest power of two that a mode through log2 may give when its log2 is off by one ulp.

    ``s``: float64 values of float32 of any shape; both results are float64 of the same shape, equal to each other
    wherever the logarithm is not within 1.5 ulp of the step. 0 and NaN stay, infinity is the recipe's. The approximate
    ``lg2.approx`` of the device is covered too: its error is below 2^-22 absolute for arguments in [1/2, 2], and below
    2^-22 relative elsewhere (PTX ISA, lg2). Raises ValueError: the recipe has another mode.
    """
    if recipe.power_of_two not in LOG2_MODES:
        raise ValueError(f"{recipe.power_of_two} does not go through a logarithm")
    return _through_log2(s, recipe, fmt, slack=1), _through_log2(s, recipe, fmt, slack=-1)


def _ceil_exponent(x: Tensor) -> Tensor:
    exponent = exponent_of(x)
    return exponent + (power_of_two(exponent) != x).to(exponent.dtype)


def _from_exponent(exponent: Tensor, source: Tensor, low: int, inf_byte: int | None, nan_byte: int) -> Tensor:
    value = power_of_two(exponent.clamp(low - BIAS, 254 - BIAS))
    inf = torch.inf if inf_byte is None else _byte(inf_byte)
    value = torch.where(torch.isinf(source), torch.full_like(value, inf), value)
    return torch.where(torch.isnan(source), torch.full_like(value, _byte(nan_byte)), value)


def _byte(byte: int) -> float:
    return float("nan") if byte == 255 else 2.0 ** (byte - BIAS)


def _through_log2(s: Tensor, recipe: Recipe, fmt: Format, slack: int = 0) -> Tensor:
    """``2^k`` or ``2^(k+1)`` by the significand of ``s`` against the step of its exponent; 0 and NaN stay, infinity is
    the recipe's."""
    regular = torch.isfinite(s) & (s > 0)
    safe = torch.where(regular, s, torch.ones_like(s))
    k = exponent_of(safe)
    step = torch.tensor(_steps(recipe.power_of_two, fmt.precision, slack), dtype=torch.float64, device=s.device)
    significand = safe * power_of_two(FP32.fraction_bits - k)
    up = (significand >= step[k - _LOWEST]) & (significand > power_of_two(torch.full_like(k, FP32.fraction_bits)))
    value = torch.where(regular, power_of_two(k + up.to(k.dtype)), s)
    return value if recipe.inf_byte is None else torch.where(torch.isinf(s), _byte(recipe.inf_byte), value)


@lru_cache(maxsize=32)
def _steps(mode: PowerOfTwo | None, precision: int, slack: int) -> tuple[float, ...]:
    """For each exponent k, the smallest integer significand (24 bits) whose rounded log2 leads to ``k + 1``.

    ``slack = 0`` is a correctly rounded logarithm; +1 and -1 move the step by 1.5 ulp of the logarithm (one
    ulp of error and its own half), and by the error of ``lg2.approx``, up and down.
    """
    context = Context(prec=50)
    steps = []
    for k in range(_LOWEST, _HIGHEST + 1):
        boundary = _boundary(k, mode, precision)
        if slack:
            ulp = _spacing(max(abs(Fraction(k)), Fraction(1)), precision)
            boundary += slack * max(Fraction(3, 2) * ulp, Fraction(1, 1 << 22) * max(1, abs(k)))
        if boundary <= 0:
            steps.append(float((1 << 23) + 1))
            continue
        exponent = context.add(23, context.divide(Decimal(boundary.numerator), Decimal(boundary.denominator)))
        steps.append(float(int(context.power(Decimal(2), exponent)) + 1))
    return tuple(steps)


def _boundary(k: int, mode: PowerOfTwo | None, precision: int) -> Fraction:
    """The real number above which ``log2(S)`` leads to ``k + 1``: a midpoint of two logarithms, minus ``k``."""
    if mode is PowerOfTwo.EXP2_CEIL_LOG2:
        return _spacing(Fraction(k), precision, toward_zero=k < 0) / 2 if k else Fraction(0)
    half = Fraction(2 * k + 1, 2)
    spacing = _spacing(half, precision)
    if half % spacing == 0:
        # k + 1/2 is representable and rounds to the even neighbour.
        return Fraction(1, 2) + (-spacing / 2 if k % 2 else spacing / 2)
    return Fraction(1, 2)


def _spacing(x: Fraction, precision: int, *, toward_zero: bool = False) -> Fraction:
    """Distance from ``x`` to its neighbour of that precision, away from zero or towards it."""
    magnitude = abs(x)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    if toward_zero and Fraction(2) ** exponent == magnitude:
        exponent -= 1
    return Fraction(2) ** (exponent - precision + 1)
