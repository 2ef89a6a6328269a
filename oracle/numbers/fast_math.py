"""The quotients and scales of a quantiser under sm90's approximate division, bit for bit.

    rcp(y)            rcp.approx: the correctly rounded reciprocal of a float32, or a float32 neighbour of it
    div.full(x, y)    RN(x rcp(y)); both times 1/4 first where |y| > 2^126, times 2^24 where |y| < 2^-126
    div.approx.ftz    ftz(RN(ftz(x) ftz(rcp(ftz(y))))), likewise mul.ftz and rcp.approx.ftz

``ftz`` replaces a subnormal float32 by a zero of its sign. Triton's ``/`` on float32 is ``div.full``, nvcc's under
``-use_fast_math`` is ``div.approx.ftz``; by a constant both multiply by its rounded reciprocal. Both instruction
sequences were read in the machine code of ptxas 13.0 for sm_90a: ``MUFU.RCP`` and one ``FMUL``.

:mod:`oracle.numbers.mufu` has ``rcp`` bit for bit.

A quantiser by ``q = 448 / a``, ``s = 1 / q``, ``x q`` under fast math loses finite values:

    0 < a < 2^-126             a and x are flushed, q = 448/0 = inf, s = 0, every code is 0 * inf = NaN
    2^-126 <= a <= 448 2^-128  q overflows, s = 0, a normal x becomes +-448, a zero or a subnormal x NaN
    below 448 2^-126           q is finite, the codes are right, s is flushed to 0
    2^126 < a < inf            r is flushed, q = 0, s = 1/0 = inf, every code is 0, which a product takes as 0 * inf

Source: recorded for every one of the 32,641 bfloat16 values from 0 to infinity (the rows beside the limits are in
``fixtures/division``); the instructions: PTX ISA, ``div``, ``rcp``.
NaN gives NaN in every function of values here, 0 times infinity too. ``a = 0`` is the caller's to treat apart. Not
covered: other architectures.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from oracle.numbers.mufu import SMALLEST_NORMAL, flush, reciprocal
from oracle.numbers.rounding import f32

DIVIDEND: Final = 448.0
LOW: Final = DIVIDEND * SMALLEST_NORMAL
"""Smallest amax whose scale is not flushed to 0."""
HIGH: Final = 2.0**126
"""Largest finite amax whose reciprocal is not flushed to 0."""


def product(x: Tensor, q: Tensor) -> Tensor:
    """``mul.ftz(x, q)`` of float64 values of float32 whose shapes broadcast; float64 of that shape. 0 times infinity is
    NaN."""
    return flush(f32(flush(x) * q))


def divide(x: Tensor, y: Tensor, *, flushed: bool) -> Tensor:
    """``div.approx.ftz(x, y)`` where ``flushed``, else ``div.full(x, y)``, of float64 values of float32 that broadcast;
    float64 of that shape."""
    if flushed:
        return product(x, reciprocal(flush(y)))
    magnitude = y.abs()
    up, down = torch.full_like(y, 2.0**24), torch.full_like(y, 0.25)
    factor = torch.where(magnitude > HIGH, down, torch.where(magnitude < SMALLEST_NORMAL, up, torch.ones_like(y)))
    return f32(f32(x * factor) * reciprocal(y * factor))


def outside(amax: Tensor) -> Tensor:
    """Where finite values do not survive: ``amax`` (float64 values of float32, any shape) above 2^126, or so small that
    its scale is flushed; bool of its shape. False for 0, infinity and NaN."""
    return torch.isfinite(amax) & ((amax > HIGH) | ((amax < LOW) & (amax > 0)))
