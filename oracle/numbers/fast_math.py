"""What nvcc's ``-use_fast_math`` makes of a quantiser's divisions by a bfloat16 amax ``a``, bit for bit on sm90.

    r = rcp.approx.ftz(a);   q = 448 / a = ftz(RN(448 r));   s = rcp.approx.ftz(q);   x q = ftz(RN(ftz(x) q))

``ftz`` replaces a subnormal float32 by a zero of its sign. ``rcp.approx`` is the correctly rounded reciprocal or a
float32 neighbour of it, and the step depends on the significand alone: 128 significands of bfloat16, and the 128 of
their ``q``, so two tables of 128 steps say all. ``div.approx(448, a)`` is ``448 r`` rounded, nothing else. Hence

    0 < a < 2^-126             a and x are flushed, q = 448/0 = inf, s = 0, every code is 0 * inf = NaN
    2^-126 <= a <= 448 2^-128  q overflows, s = 0, a normal x becomes +-448, a zero or a subnormal x NaN
    below 448 2^-126           q is finite, the codes are right, s is flushed to 0
    2^126 < a < inf            r is flushed, q = 0, s = 1/0 = inf, every code is 0, which a product takes as 0 * inf

Source: recorded on an H200 for every one of the 32,641 bfloat16 values from 0 to infinity (the rows beside the limits
are in ``fixtures/division``); the instructions: PTX ISA, ``div``, ``rcp``. ``a = 0`` is the caller's to treat apart.
Not covered: other dividends than 448, amax that are no bfloat16 values, other architectures.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from oracle.errors import NumericsError
from oracle.numbers.formats import BF16, decode
from oracle.numbers.rounding import Overflow, Rounding, f32, to_dtype

DIVIDEND: Final = 448.0
SMALLEST_NORMAL: Final = 2.0**-126
LOW: Final = DIVIDEND * SMALLEST_NORMAL
"""Smallest amax whose scale is not flushed to 0."""
HIGH: Final = 2.0**126
"""Largest finite amax whose reciprocal is not flushed to 0."""
RECIPROCAL: Final = (
    "0000-0+0000-0+000000-0-00000000000000++000000000000+000000000+00"
    "0++00000000000000+000000000+00000000000000000+00000++0+00+00000-"
)
"""Float32 steps of ``rcp.approx(1 + i/128)`` from the correctly rounded reciprocal, by ``i``."""
RECIPROCAL_OF_QUOTIENT: Final = (
    "000000000+00000000000000000000000000000000000000000000+000000000"
    "0000000000000000-000000+00-00000000000000+00000-000+00000000+000"
)
"""The same of ``rcp.approx(q)``, ``q`` the approximate 448 / (1 + i/128)."""


def quotient(amax: Tensor) -> Tensor:
    """``div.approx.ftz(448, amax)``, float64 values of float32.

    Parameters
    ----------
    amax : Tensor, float64, bfloat16 values that are not negative; 0 gives infinity, infinity 0, NaN NaN.

    Raises NumericsError: a value is no bfloat16 value: the tables do not speak of it.
    """
    return flush(f32(DIVIDEND * _reciprocal(flush(amax), _steps(amax, RECIPROCAL))))


def scale(amax: Tensor, q: Tensor) -> Tensor:
    """``rcp.approx.ftz(q)`` for ``q`` the :func:`quotient` of ``amax``; infinity for 0, 0 for infinity."""
    return _reciprocal(q, _steps(amax, RECIPROCAL_OF_QUOTIENT))


def product(x: Tensor, q: Tensor) -> Tensor:
    """``mul.ftz(x, q)``: float64 values of float32; 0 times infinity is NaN."""
    return flush(f32(flush(x) * q))


def outside(amax: Tensor) -> Tensor:
    """Where finite values do not survive: amax above 2^126, or so small that its scale is flushed. Bool."""
    return torch.isfinite(amax) & ((amax > HIGH) | ((amax < LOW) & (amax > 0)))


def flush(x: Tensor) -> Tensor:
    """Float32 subnormals (as float64) become zeros of their sign."""
    return torch.where(x.abs() < SMALLEST_NORMAL, torch.copysign(torch.zeros_like(x), x), x)


def _reciprocal(x: Tensor, steps: Tensor) -> Tensor:
    right = f32(torch.ones_like(x) / x)
    bits = to_dtype(right, torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF).view(torch.int32)
    moved = decode((bits + steps).view(torch.float32))
    return flush(torch.where(torch.isfinite(right) & (right != 0), moved, right))


def _steps(amax: Tensor, table: str) -> Tensor:
    """The entry of every amax, int32."""
    codes = to_dtype(amax, torch.bfloat16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
    if not bool(((decode(codes) == amax) | torch.isnan(amax)).all()):
        raise NumericsError("an amax is no bfloat16 value; approximate division is known for those alone")
    entries = torch.tensor(["-0+".index(c) - 1 for c in table], dtype=torch.int32, device=amax.device)
    fraction = codes.view(torch.int16).to(torch.int64) & ((1 << BF16.fraction_bits) - 1)
    return entries[fraction]
