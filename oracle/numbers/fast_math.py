"""What sm90's approximate division makes of a quantiser's quotients, bit for bit.

    rcp(y)            rcp.approx: the correctly rounded reciprocal of a float32, or a float32 neighbour of it
    div.full(x, y)    RN(x rcp(y)); both times 1/4 first where |y| > 2^126, times 2^24 where |y| < 2^-126
    div.approx.ftz    ftz(RN(ftz(x) ftz(rcp(ftz(y))))), likewise mul.ftz and rcp.approx.ftz

``ftz`` replaces a subnormal float32 by a zero of its sign. Triton's ``/`` on float32 is ``div.full``, nvcc's under
``-use_fast_math`` is ``div.approx.ftz``; by a constant both multiply by its rounded reciprocal. Both lists of machine
code were read in what ptxas 13.0 makes of them for sm_90a: ``MUFU.RCP`` and one ``FMUL``.

The step of ``rcp`` depends on the significand alone. Recorded on an H200 are the 128 significands of bfloat16 and
those of the 128 quotients 448/a of them: two tables of steps. Any other significand is taken as correctly rounded, as
nine in ten recorded ones are: no code that a kernel gave contradicts it yet where the divisor is ``a fl(1/448)``.

A quantiser by ``q = 448 / a``, ``s = 1 / q``, ``x q`` under fast math loses finite values:

    0 < a < 2^-126             a and x are flushed, q = 448/0 = inf, s = 0, every code is 0 * inf = NaN
    2^-126 <= a <= 448 2^-128  q overflows, s = 0, a normal x becomes +-448, a zero or a subnormal x NaN
    below 448 2^-126           q is finite, the codes are right, s is flushed to 0
    2^126 < a < inf            r is flushed, q = 0, s = 1/0 = inf, every code is 0, which a product takes as 0 * inf

Source: recorded for every one of the 32,641 bfloat16 values from 0 to infinity (the rows beside the limits are in
``fixtures/division``); the instructions: PTX ISA, ``div``, ``rcp``. ``a = 0`` is the caller's to treat apart. Not
covered: other architectures.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from oracle.numbers.formats import decode
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
FRACTION: Final = (1 << 23) - 1


def quotient(amax: Tensor) -> Tensor:
    """``div.approx.ftz(448, amax)``, float64 values of float32; 0 gives infinity, infinity 0, NaN NaN."""
    return divide(torch.full_like(amax, DIVIDEND), amax, flushed=True)


def scale(q: Tensor) -> Tensor:
    """``rcp.approx.ftz(q)``; infinity for 0, 0 for infinity."""
    return divide(torch.ones_like(q), q, flushed=True)


def product(x: Tensor, q: Tensor) -> Tensor:
    """``mul.ftz(x, q)``: float64 values of float32; 0 times infinity is NaN."""
    return flush(f32(flush(x) * q))


def divide(x: Tensor, y: Tensor, *, flushed: bool) -> Tensor:
    """``div.approx.ftz(x, y)`` where ``flushed``, else ``div.full(x, y)``; float64 values of float32 that broadcast."""
    if flushed:
        return product(x, reciprocal(flush(y)))
    magnitude = y.abs()
    up, down = torch.full_like(y, 2.0**24), torch.full_like(y, 0.25)
    factor = torch.where(magnitude > HIGH, down, torch.where(magnitude < SMALLEST_NORMAL, up, torch.ones_like(y)))
    return f32(f32(x * factor) * reciprocal(y * factor))


def reciprocal(y: Tensor) -> Tensor:
    """``rcp.approx.ftz(y)`` of float64 values of float32 that are not subnormal; infinity for 0, of its sign."""
    right = f32(torch.ones_like(y) / y)
    known, steps = _known(RECIPROCAL, RECIPROCAL_OF_QUOTIENT)
    known, steps = known.to(y.device), steps.to(y.device)
    bits, fraction = _bits(right), _bits(y) & FRACTION
    place = torch.searchsorted(known, fraction).clamp(max=len(known) - 1)
    moved = decode((bits + torch.where(known[place] == fraction, steps[place], 0)).view(torch.float32))
    return flush(torch.where(torch.isfinite(right) & (right != 0), moved, right))


def outside(amax: Tensor) -> Tensor:
    """Where finite values do not survive: amax above 2^126, or so small that its scale is flushed. Bool."""
    return torch.isfinite(amax) & ((amax > HIGH) | ((amax < LOW) & (amax > 0)))


def flush(x: Tensor) -> Tensor:
    """Float32 subnormals (as float64) become zeros of their sign."""
    return torch.where(x.abs() < SMALLEST_NORMAL, torch.copysign(torch.zeros_like(x), x), x)


@lru_cache(maxsize=4)
def _known(reciprocals: str, of_quotients: str) -> tuple[Tensor, Tensor]:
    """The significands whose reciprocal is not the rounded one, sorted, and their steps; both int32."""
    first, second = (
        torch.tensor(["-0+".index(c) - 1 for c in table], dtype=torch.int32, device="cpu")
        for table in (reciprocals, of_quotients)
    )
    amax = 1 + torch.arange(128, dtype=torch.float64, device="cpu") / 128
    rounded = _bits(f32(torch.ones_like(amax) / amax)) + first
    q = f32(DIVIDEND * decode(rounded.view(torch.float32)))
    found = torch.cat([_bits(amax), _bits(q)]) & FRACTION
    steps = torch.cat([first, second])
    found, steps = found[steps != 0], steps[steps != 0]
    order = found.argsort()
    return found[order], steps[order]


def _bits(x: Tensor) -> Tensor:
    """The bits of float64 values of float32, int32."""
    stored = to_dtype(x, torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
    return stored.view(torch.int32)
