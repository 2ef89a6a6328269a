"""Rounding to a format, once: the definition for one number, and its forms for tensors and for pairs ``hi + lo``; the
error-free sums and products of float64 that make such pairs.

The magnitude ``|x|`` lies between two neighbours ``n q <= |x| < (n + 1) q`` where
``q = 2^(max(floor(log2|x|), emin) - fraction_bits)`` is the spacing of the format at ``|x|``, taken as if its
exponents went on for ever above. :class:`Rounding` picks one of the two; if the pick exceeds ``max_finite``,
:class:`Overflow` says what becomes of it. :func:`encode_scalar` is this definition in exact integers and fractions;
every function of tensors equals it element by element. Their method, for a magnitude ``a`` in float64::

    s = a + 2^52 q                  IEEE addition: a rounded to a multiple of q, ties to even
    bits(s) += -1, 0 or +1          where the rounding asked for picks the other neighbour
    value = s - 2^52 q              exact;  code = bits(s) - bits(2^52 q) + the binade's first code

The one addition is correctly rounded and everything else is exact, so the bits are the same on every device.
A pair is first rounded to odd in float64 [1]: truncated, with the last bit set if anything was lost. Rounding
that to any format of at most 51 bits is the rounding of the exact sum.

``two_sum`` (Knuth) and ``two_prod`` (Dekker, with Veltkamp's splitting) return ``(s, e)`` with ``s + e`` equal to the
exact result when nothing overflows or underflows [2]; both use only additions and multiplications that every device
rounds identically, never a fused one. Infinities and NaN give a NaN error term, which callers overlay.

Sources: IEEE 754-2019, 4.3 (roundings) and 7.4 (overflow); OCP OFP8 1.0, 5.2.1 (saturating and not).
[1] S. Boldo and G. Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using
rounding to odd", IEEE Trans. Computers 57(4), 2008.
[2] Muller et al., Handbook of Floating-Point Arithmetic, 2nd ed., 4.3 and 4.4.

Not covered: scales, flags, stochastic rounding, NaN payloads (every NaN becomes ``fmt.nan_code``); a CPU thread that
was told to round otherwise or to flush subnormals (``torch.set_flush_denormal``).
"""

from __future__ import annotations

import math
from enum import Enum
from fractions import Fraction

import torch
from torch import Tensor

from oracle.errors import DeviceError, DtypeError, InputError, OptionError, ShapeError
from oracle.numbers.formats import FP32, Format, from_codes, in_blocks, keeps_subnormals, of_dtype


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

    Raises OptionError: ``INF`` for a format without infinity (E4M3FN, FNUZ, E8M0, MX elements), ``NAN`` for one without
    NaN (4 and 6 bits, INT8).
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
    x : float or Fraction, any float (-0.0, infinities and NaN included) or any rational number (of which 0 is +0).
    rounding, overflow : see :class:`Rounding` and :class:`Overflow`.

    Returns int: ``0 <= code < 2**fmt.bits``. NaN becomes ``fmt.nan_code``. A result of zero keeps the sign of ``x``,
    except in the FNUZ formats, which have one zero. E8M0 holds powers of two from 2^-127: a value in [0, 2^-127), -0
    included, becomes 2^-127 under every rounding, and a negative value or -infinity becomes NaN under every policy. Its
    ties ``1.5 * 2^k`` go to the even byte; torch's cast of float32 takes all of them up, and so everything between
    2^-127 and 2^-126, gives NaN from ``1.5 * 2^127`` on and drops signs (c10/util/Float8_e8m0fnu.h).
    Raises OptionError: the format cannot hold what ``overflow`` asks for; InputError: ``x`` is NaN and the format has
    none (E2M1).
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
        toward = direction is Rounding.TOWARD_ZERO
        return _signed(fmt.max_code, sign, fmt) if toward else _overflowed(fmt, sign, overflow)
    return 0 if magnitude == 0 and not fmt.has_negative_zero else _signed(magnitude, sign, fmt)


def encode(x: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    """The codes of a float64 tensor, each element rounded once.

    Parameters
    ----------
    x : Tensor, float64, any shape, strides and device.
    fmt, rounding, overflow
        As for :func:`encode_scalar`, which says what becomes of NaN, infinities,
        zeros, and of negative values in an unsigned format.

    Returns ``fmt.storage`` bits, contiguous, same shape and device.
    Raises DtypeError: ``x`` is not float64; OptionError: the format cannot hold what ``overflow`` asks for; InputError:
    ``x`` holds NaN and the format has none (E2M1).
    """
    _check(fmt, overflow, x)
    if _by_conversion(x, fmt, rounding, overflow):
        return in_blocks(lambda part: _narrowed(part).view(torch.int32), x, dtype=fmt.storage)
    return in_blocks(lambda part: _codes(part, fmt, rounding, overflow), x, dtype=fmt.storage)


def round_to(x: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    """The values of :func:`encode`, float64 of the same shape: ``decode(encode(x, ...), fmt)`` without the detour.

    Arguments, NaN, infinities, zeros and errors as of :func:`encode`.
    """
    _check(fmt, overflow, x)
    if _by_conversion(x, fmt, rounding, overflow):
        return in_blocks(lambda part: _narrowed(part).to(torch.float64), x, dtype=torch.float64)
    return in_blocks(lambda part: _values(part, fmt, rounding, overflow), x, dtype=torch.float64)


def f32(x: Tensor) -> Tensor:
    """Float64 ``x`` of any shape rounded to float32 values, to nearest even; float64 of the same shape.

    Infinite beyond the largest; NaN stays NaN, a zero keeps its sign. Raises DtypeError: ``x`` is not float64.
    """
    return round_to(x, FP32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def encode_pair(hi: Tensor, lo: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    """The codes of the unevaluated sums ``hi + lo``, each rounded once.

    Parameters
    ----------
    hi, lo : Tensor
        float64, one shape and device. Any two numbers make a pair; one with ``hi == fl(hi + lo)`` is the
        fastest. Where ``hi`` is infinite or NaN ``lo`` is not looked at; a NaN or infinite ``lo`` beside a
        finite ``hi`` is the result. A sum of exactly zero has the sign of ``hi``.
    fmt, rounding, overflow : as for :func:`encode`.

    Returns ``fmt.storage`` bits, contiguous, same shape and device.
    Raises DtypeError, OptionError, InputError: as :func:`encode`; ShapeError, DeviceError: ``hi`` and ``lo`` differ.
    """
    _check_pair(fmt, overflow, hi, lo)
    return in_blocks(lambda head, tail: _codes(_to_odd(head, tail), fmt, rounding, overflow), hi, lo, dtype=fmt.storage)


def round_pair(hi: Tensor, lo: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    """The values of :func:`encode_pair`, float64 of the same shape; arguments, NaN and errors as of
    :func:`encode_pair`."""
    _check_pair(fmt, overflow, hi, lo)
    return in_blocks(
        lambda head, tail: _values(_to_odd(head, tail), fmt, rounding, overflow), hi, lo, dtype=torch.float64
    )


def to_dtype(x: Tensor, dtype: torch.dtype, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    """Float64 ``x`` of any shape as a tensor of ``dtype``, same shape: :func:`encode` for the format of a torch dtype.

    NaN, infinities and zeros as for :func:`encode_scalar`. Raises DtypeError: the dtype has no format
    (:func:`oracle.numbers.formats.of_dtype`); errors as of :func:`encode`.
    """
    fmt = of_dtype(dtype)
    return from_codes(encode(x, fmt, rounding=rounding, overflow=overflow), fmt)


def pair_to_dtype(hi: Tensor, lo: Tensor, dtype: torch.dtype, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    """Sums ``hi + lo`` as a tensor of ``dtype``, same shape: :func:`encode_pair` for the format of a torch dtype.

    Arguments, NaN and errors as of :func:`encode_pair`. Raises DtypeError too: the dtype has no format.
    """
    fmt = of_dtype(dtype)
    return from_codes(encode_pair(hi, lo, fmt, rounding=rounding, overflow=overflow), fmt)


def power_of_two(e: Tensor) -> Tensor:
    """``2**e`` for a tensor of integers of any shape, exactly, from the exponent bits.

    Returns float64, same shape and device: subnormal for -1074 <= e < -1022, 0 below, infinity above 1023.
    Raises DtypeError: ``e`` is not an integer tensor.
    """
    if e.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise DtypeError(f"power_of_two takes integer exponents, not {e.dtype}")
    wide = e.to(torch.int64)
    normal = wide.clamp(-1023, 1024).add_(1023).bitwise_left_shift_(52)
    tiny = torch.ones_like(wide).bitwise_left_shift_((wide + 1074).clamp_(0, 52))
    return torch.where(wide >= -1022, normal, torch.where(wide >= -1074, tiny, 0)).view(torch.float64)


def exponent_of(x: Tensor) -> Tensor:
    """``floor(log2(|x|))`` of a float64 tensor of any shape, exactly, from its bits.

    Returns int64, same shape and device. Subnormals are counted down to -1074; zero gives -1075 and infinity and NaN
    give 1024, which is each what :func:`power_of_two` turns into 0 and inf: the caller decides what they mean.
    Raises DtypeError: ``x`` is not float64.
    """
    if x.dtype is not torch.float64:
        raise DtypeError(f"exponent_of takes float64, not {x.dtype}; formats.decode(x) widens exactly")
    magnitude = x.detach().contiguous().view(torch.int64) & _MAGNITUDE
    field = magnitude >> 52
    # Below 2^-1022 the bits are the integer |x| * 2^1074, whose exponent as a float64 is known.
    tiny = (magnitude.to(torch.float64).view(torch.int64) >> 52) - (1023 + 1074)
    return torch.where(field > 0, field - 1023, tiny.clamp_(min=-1075))


SPLITTER = 2.0**27 + 1.0  # Veltkamp's constant for p = 53: 2**ceil(53/2) + 1


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``a + b`` exactly, as ``(rounded, error)``, of float64 tensors of any magnitudes whose shapes broadcast; float64
    of that shape. The error beside an infinite or NaN sum is NaN."""
    s = a + b
    v = s - a
    return s, (a - (s - v)) + (b - v)


def fast_two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``a + b`` as :func:`two_sum`, exactly when ``|a| >= |b|`` or ``a == 0``; float64 of that shape."""
    s = a + b
    return s, b - (s - a)


def two_prod(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``a * b`` exactly, as ``(rounded, error)``, of float64 tensors whose shapes broadcast; float64 of that shape.

    For ``|a|, |b| < 2**996`` and no underflow of the error. The error beside an infinite or NaN product is NaN.
    """
    p = a * b
    ah, al = _split(a)
    bh, bl = _split(b)
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def _split(a: Tensor) -> tuple[Tensor, Tensor]:
    c = a * SPLITTER
    high = c - (c - a)
    return high, a - high


_MAGNITUDE = (1 << 63) - 1
_EXPONENT_FIELD = 0x7FF << 52
_HUGE = 2.0**1000  # overflows in every format; far enough below the largest float64 for TwoSum


def _check(fmt: Format, overflow: Overflow, *operands: Tensor) -> None:
    """Refuse what cannot be rounded, before anything is allocated."""
    check_policy(fmt, overflow)
    for operand in operands:
        if operand.dtype is not torch.float64:
            raise DtypeError(f"rounding takes float64, not {operand.dtype}; formats.decode(x) widens exactly")


def _check_pair(fmt: Format, overflow: Overflow, hi: Tensor, lo: Tensor) -> None:
    _check(fmt, overflow, hi, lo)
    if hi.shape != lo.shape:
        raise ShapeError(f"hi is {tuple(hi.shape)}, lo {tuple(lo.shape)}; a pair has one shape")
    if hi.device != lo.device:
        raise DeviceError(f"hi is on {hi.device} and lo on {lo.device}; move one of them")


def _by_conversion(x: Tensor, fmt: Format, rounding: Rounding, overflow: Overflow) -> bool:
    """Whether the CPU's own conversion from float64 is what is asked for."""
    asked = fmt is FP32 and rounding is Rounding.NEAREST_EVEN and overflow is Overflow.INF
    return asked and keeps_subnormals(x.device)


def _narrowed(x: Tensor) -> Tensor:
    value = x.to(torch.float32)
    return value.masked_fill_(value.isnan(), math.nan)


def _bits_of_power(exponent: int) -> int:
    """Bits of the float64 ``2**exponent``, a normal number."""
    return (exponent + 1023) << 52


def _round(x: Tensor, fmt: Format, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Bits of ``s`` and of ``2^52 q`` (module docstring) for the magnitudes of ``x``.

    Magnitudes are cut at ``2^(emax + 1)``, which is beyond the largest value as all above it are, and at the
    smallest value of a format without zero.
    """
    if not fmt.has_nan and bool(x.isnan().any()):
        raise InputError(f"the input holds NaN and {fmt} has no NaN; replace it before rounding")
    bits = x.view(torch.int64)
    lowest = 0 if fmt.has_zero else _bits_of_power(fmt.emin)
    a = (bits & _MAGNITUDE).clamp_(lowest, _bits_of_power(fmt.emax + 1))
    anchor = (a & _EXPONENT_FIELD).clamp_(min=_bits_of_power(fmt.emin)).add_((52 - fmt.fraction_bits) << 52)
    s = (a.view(torch.float64) + anchor.view(torch.float64)).view(torch.int64)
    if rounding is Rounding.NEAREST_EVEN and fmt.fraction_bits > 0:
        return s, anchor
    value = (s.view(torch.float64) - anchor.view(torch.float64)).view(torch.int64)
    if rounding in (Rounding.NEAREST_AWAY, Rounding.NEAREST_EVEN):
        half = (anchor - (53 << 52)).view(torch.float64)
        rest = a.view(torch.float64) - value.view(torch.float64)
        if rounding is Rounding.NEAREST_AWAY:
            s += rest == half
        else:
            # Without fraction bits the significand is always 1, and "even" is a property of the code.
            s -= (rest == -half) & (_to_code(s, anchor, fmt) & 1)
        return s, anchor
    outward = (value - a) >> 63  # -1 where s is below a, else 0
    inward = (a - value) >> 63  # -1 where s is above a, else 0
    if rounding is Rounding.AWAY:
        s -= outward
    elif rounding is Rounding.TOWARD_ZERO:
        s += inward
    else:
        shrinks = bits >> 63 if rounding is Rounding.UP else ~(bits >> 63)
        s -= outward & ~shrinks
        s += inward & shrinks
    return s, anchor


def _to_code(s: Tensor, anchor: Tensor, fmt: Format) -> Tensor:
    """The code continued without end above the largest value."""
    first = _bits_of_power(fmt.emin + 52 - fmt.fraction_bits)
    hidden = 0 if fmt.has_subnormals else 1 << fmt.fraction_bits
    return (s - anchor).add_((anchor - first) >> (52 - fmt.fraction_bits)).sub_(hidden)


def _exceeding(over: Tensor, x: Tensor, rounding: Rounding) -> Tensor:
    """Of the elements above the largest value, those that are not rounded back to it (:class:`Overflow`)."""
    bits = x.view(torch.int64)
    if rounding is Rounding.TOWARD_ZERO:
        return over & x.isinf()
    if rounding is Rounding.UP:
        return over & ((bits >= 0) | x.isinf())
    if rounding is Rounding.DOWN:
        return over & ((bits < 0) | x.isinf())
    return over


def _codes(x: Tensor, fmt: Format, rounding: Rounding, overflow: Overflow) -> Tensor:
    """:func:`encode` of one contiguous block."""
    bits = x.view(torch.int64)
    code = _to_code(*_round(x, fmt, rounding), fmt)
    over = None if overflow is Overflow.SATURATE else _exceeding(code > fmt.max_code, x, rounding)
    code.clamp_(max=fmt.max_code)
    if overflow is Overflow.INF and over is not None and fmt.inf_code is not None:
        code.masked_fill_(over, fmt.inf_code)
    if fmt.complement:
        negative = bits >> 63
        code = ((code ^ negative) - negative) & fmt.code_mask
    elif fmt.signed:
        code |= (bits >> 63) & fmt.sign_mask
    if fmt.has_zero and not fmt.has_negative_zero and not fmt.complement:
        code.masked_fill_(code == fmt.sign_mask, 0)
    if fmt.nan_code is not None:
        code.masked_fill_(_is_nan(x, fmt, over if overflow is Overflow.NAN else None), fmt.nan_code)
    return code.to(fmt.storage)


def _values(x: Tensor, fmt: Format, rounding: Rounding, overflow: Overflow) -> Tensor:
    """:func:`round_to` of one contiguous block."""
    s, anchor = _round(x, fmt, rounding)
    value = s.view(torch.float64) - anchor.view(torch.float64)
    over = None if overflow is Overflow.SATURATE else _exceeding(value > fmt.max_finite, x, rounding)
    value.clamp_(max=fmt.max_finite)
    if overflow is Overflow.INF and over is not None:
        value.masked_fill_(over, math.inf)
    if fmt.signed:
        value = torch.copysign(value, x)
    if fmt.has_zero and not fmt.has_negative_zero:
        value.masked_fill_(value == 0.0, 0.0)
    if fmt.has_nan:
        value.masked_fill_(_is_nan(x, fmt, over if overflow is Overflow.NAN else None), math.nan)
    return value


def _is_nan(x: Tensor, fmt: Format, over: Tensor | None) -> Tensor:
    nan = x.isnan() if over is None else x.isnan() | over
    return nan if fmt.signed else nan | (x < 0)


def _to_odd(hi: Tensor, lo: Tensor) -> Tensor:
    """``hi + lo`` rounded to odd: truncated to 53 bits, the last one set if the truncation lost anything."""
    hi, lo = _normalised(hi, lo)
    high, low = hi.view(torch.int64), lo.view(torch.int64)
    inexact = (lo != 0).to(torch.int64)
    opposed = ((high ^ low) >> 63).mul_(inexact)
    return opposed.add_(high).bitwise_or_(inexact).view(torch.float64)


def _normalised(hi: Tensor, lo: Tensor) -> tuple[Tensor, Tensor]:
    """The same sums with ``hi == fl(hi + lo)`` and ``lo == 0`` wherever ``hi`` is not finite."""
    total = hi + lo
    if bool(torch.all((total == hi) & (hi.abs() < math.inf))):
        return hi, lo
    total, error = two_sum(hi, lo)  # exact unless the addition overflows
    error.masked_fill_(~(total.abs() < _HUGE), 0.0)
    total = torch.where(hi.isfinite() & lo.isfinite(), total.clamp(-_HUGE, _HUGE), total)
    total = torch.where(total == 0, torch.copysign(total, hi), total)
    return torch.where(hi.isfinite(), total, hi), error


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
        return _signed(fmt.max_code, sign, fmt)
    assert fmt.inf_code is not None, "check_policy has refused this"
    return sign | fmt.inf_code


def _signed(magnitude: int, sign: int, fmt: Format) -> int:
    """The code of a magnitude under the sign bit ``sign`` (0: positive)."""
    return (fmt.code_mask + 1 - magnitude) & fmt.code_mask if fmt.complement and sign else sign | magnitude


def _nan(fmt: Format) -> int:
    if fmt.nan_code is None:
        raise InputError(f"the input holds NaN and {fmt} has no NaN; replace it before rounding")
    return fmt.nan_code
