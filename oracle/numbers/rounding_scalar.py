"""Rounding one number to a format: the definition, in exact integers and fractions.

The magnitude ``|x|`` lies between two neighbours ``n q <= |x| < (n + 1) q`` where
``q = 2^(max(floor(log2|x|), emin) - fraction_bits)`` is the spacing of the format at ``|x|``, taken as if its
exponents went on for ever above. :class:`Rounding` picks one of the two; if the pick exceeds ``max_finite``,
:class:`Overflow` says what becomes of it.

Sources: IEEE 754-2019, 4.3 (roundings) and 7.4 (overflow); OCP OFP8 1.0, 5.2.1 (saturating and not).

Not covered: flags, stochastic rounding, NaN payloads (every NaN becomes ``fmt.nan_code``).
:mod:`oracle.numbers.rounding` is the vectorised twin.
"""

from __future__ import annotations

import math
from enum import Enum
from fractions import Fraction

from oracle.errors import InputError, OptionError
from oracle.numbers.formats import Format


class Rounding(Enum):
    """Which neighbour an inexact value becomes."""

    NEAREST_EVEN = "the nearer; of two equally near, the one with the even code"
    NEAREST_AWAY = "the nearer; of two equally near, the one away from zero"
    TOWARD_ZERO = "the one toward zero"
    UP = "the one toward +infinity"
    DOWN = "the one toward -infinity"
    AWAY = "the one away from zero"


class Overflow(Enum):
    """What a magnitude becomes that exceeds the largest finite value after rounding.

    Rounding comes first, as in IEEE 754: a finite value that is rounded toward zero (TOWARD_ZERO, DOWN if
    positive, UP if negative) becomes the largest finite value under every policy. An infinite input is not
    rounded: it follows the policy.
    """

    SATURATE = "the largest finite value, with the sign"
    NAN = "NaN"
    INF = "infinity, with the sign"


def check_policy(fmt: Format, overflow: Overflow) -> None:
    """Refuse an overflow policy whose result the format cannot hold.

    Raises
    ------
    OptionError
        ``INF`` for a format without infinity (E4M3FN, FNUZ, E8M0, E2M1), ``NAN`` for one without NaN (E2M1).
    """
    if overflow is Overflow.INF and not fmt.has_inf:
        ways_out = "SATURATE or NAN" if fmt.has_nan else "SATURATE"
        raise OptionError(f"{fmt} has no infinity; Overflow.INF is impossible, use {ways_out}")
    if overflow is Overflow.NAN and not fmt.has_nan:
        raise OptionError(f"{fmt} has no NaN; Overflow.NAN is impossible, use SATURATE")


def encode_scalar(x: float | Fraction, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> int:
    """The code of one number, rounded once: the definition.

    Parameters
    ----------
    x : float or Fraction
        Any float (-0.0, infinities and NaN included) or any rational number (of which 0 is +0).
    rounding, overflow
        See :class:`Rounding` and :class:`Overflow`.

    Returns
    -------
    int
        ``0 <= code < 2**fmt.bits``. NaN becomes ``fmt.nan_code``. A result of zero keeps the sign of ``x``,
        except in the FNUZ formats, which have one zero. E8M0 holds powers of two from 2^-127: a value in [0,
        2^-127), -0 included, becomes 2^-127 under every rounding, and a negative value or -infinity becomes
        NaN under every policy.

    Raises
    ------
    OptionError
        The format cannot hold what ``overflow`` asks for.
    InputError
        ``x`` is NaN and the format has none (E2M1).
    """
    check_policy(fmt, overflow)
    if x != x:
        return _nan(fmt)
    negative = math.copysign(1.0, x) < 0 if isinstance(x, float) else x < 0
    if not fmt.signed and x < 0:
        return _nan(fmt)
    sign = fmt.sign_mask if negative else 0
    if isinstance(x, float) and math.isinf(x):
        return _overflowed(fmt, sign, overflow)
    direction = _for_magnitude(rounding, negative)
    magnitude = _round_magnitude(*(-x if negative else x).as_integer_ratio(), fmt, direction)
    if magnitude > fmt.max_code:
        if direction is Rounding.TOWARD_ZERO:
            return sign | fmt.max_code
        return _overflowed(fmt, sign, overflow)
    if magnitude == 0 and not fmt.has_negative_zero:
        return 0
    return sign | magnitude


def _round_magnitude(numerator: int, denominator: int, fmt: Format, direction: Rounding) -> int:
    """The code of ``numerator / denominator >= 0``, the exponents of the format continued without end."""
    if numerator == 0:
        return 0
    exponent = _floor_log2(numerator, denominator)
    if exponent < fmt.emin and not fmt.has_subnormals:
        return 0
    exponent = max(exponent, fmt.emin)
    spacing = exponent - fmt.fraction_bits
    n, rest = divmod(numerator << max(-spacing, 0), denominator << max(spacing, 0))
    hidden = 0 if fmt.has_subnormals else 1 << fmt.fraction_bits
    below = n + ((exponent - fmt.emin) << fmt.fraction_bits) - hidden
    to_half = 2 * rest - (denominator << max(spacing, 0))
    if direction is Rounding.NEAREST_EVEN:
        return below + (to_half > 0 or (to_half == 0 and below % 2 == 1))
    if direction is Rounding.NEAREST_AWAY:
        return below + (to_half >= 0)
    return below + (direction is Rounding.AWAY and rest > 0)


def _floor_log2(numerator: int, denominator: int) -> int:
    """``floor(log2(numerator / denominator))`` of a positive fraction, in integers."""
    estimate = numerator.bit_length() - denominator.bit_length()
    reached = numerator << max(-estimate, 0) >= denominator << max(estimate, 0)
    return estimate if reached else estimate - 1


def _for_magnitude(rounding: Rounding, negative: bool) -> Rounding:
    """UP and DOWN as what they do to the magnitude."""
    if rounding is Rounding.UP:
        return Rounding.TOWARD_ZERO if negative else Rounding.AWAY
    if rounding is Rounding.DOWN:
        return Rounding.AWAY if negative else Rounding.TOWARD_ZERO
    return rounding


def _overflowed(fmt: Format, sign: int, overflow: Overflow) -> int:
    if overflow is Overflow.NAN:
        return _nan(fmt)
    if overflow is Overflow.SATURATE:
        return sign | fmt.max_code
    assert fmt.inf_code is not None, "check_policy has refused this"
    return sign | fmt.inf_code


def _nan(fmt: Format) -> int:
    if fmt.nan_code is None:
        raise InputError(f"the input holds NaN and {fmt} has no NaN; replace it before rounding")
    return fmt.nan_code
