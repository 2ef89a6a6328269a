"""Chains of FP8 fused sums in float32 lanes: the same bits as :mod:`oracle.tensorcore.fused`, faster, in
plain torch.

An FP8 product has at most 8 significant bits and, scaled by ``2^(t-m)`` with ``t = 13``, lies below ``2^15``;
a sum of 33 such integers lies below ``2^21``. So float32 holds every term and every sum exactly, and int8
holds every exponent. Rounding the sum toward zero to 13 fraction bits is clearing the 10 low bits of a
float32.

Source: derived above; tests compare with ``fused`` bit
by bit. Not covered: NaN and infinite operands (the caller settles them), ``t > 16``, an accumulator other
than 0 at the start.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.tensorcore.instructions import FP8, Instruction, Order, Sum

_ZERO = -64  # exponent of a zero operand: any sum with it is below -28, the least exponent of an E5M2 product
_MAX_ALIGN_BITS = 16  # (1 + 32) * 2^(16 + 2) < 2^24


def fits(instruction: Instruction) -> bool:
    """Whether float32 lanes are exact for this instruction."""
    return (
        instruction.sum is Sum.FUSED
        and instruction.order is Order.SEQUENTIAL
        and instruction.round_toward_zero
        and not instruction.flush_subnormals
        and instruction.scale_block is None
        and set(instruction.operands) <= set(FP8)
        and instruction.align_bits is not None
        and instruction.align_bits <= _MAX_ALIGN_BITS
        and instruction.group <= 32
    )


def lanes(values: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Decoded operand ``[R, K]`` as k-major lanes: float32 ``[K, R]`` and int8 ``[K, R]``."""
    return (
        values.to(torch.float32).t().contiguous(),
        exponents.clamp(min=_ZERO).to(torch.int8).t().contiguous(),
    )


def chain(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], instruction: Instruction) -> Tensor:
    """One chain from 0 over all K rows of the lanes.

    Parameters
    ----------
    a, b : (Tensor, Tensor)
        Lanes of :func:`lanes`, ``[K, M]`` and ``[K, N]``; finite values.
    instruction : Instruction
        One that :func:`fits`.

    Returns
    -------
    Tensor
        float32 ``[M, N]``.
    """
    (a_values, a_exponents), (b_values, b_exponents) = a, b
    assert instruction.align_bits is not None
    t, drop = instruction.align_bits, 23 - instruction.out_bits
    shape = (a_values.shape[1], b_values.shape[1])
    acc = torch.zeros(shape, dtype=torch.float32, device=a_values.device)
    top, one_exponent = torch.empty_like(acc, dtype=torch.int8), torch.empty_like(acc, dtype=torch.int8)
    term, total = torch.empty_like(acc), torch.empty_like(acc)
    for start in range(0, a_values.shape[0], instruction.group):
        ks = range(start, min(start + instruction.group, a_values.shape[0]))
        top.copy_(_exponents(acc))
        for k in ks:
            torch.add(a_exponents[k].unsqueeze(1), b_exponents[k], out=one_exponent)
            torch.maximum(top, one_exponent, out=top)
        biased = top.to(torch.int32)
        inverse_quantum = ((127 + t) - biased).bitwise_left_shift_(23).view(torch.float32)
        torch.mul(acc, inverse_quantum, out=total).trunc_()
        for k in ks:
            torch.mul(a_values[k].unsqueeze(1), b_values[k], out=term).mul_(inverse_quantum).trunc_()
            total.add_(term)
        total.view(torch.int32).bitwise_and_(-1 << drop)
        quantum = biased.add_(127 - t).bitwise_left_shift_(23).view(torch.float32)
        torch.mul(total, quantum, out=acc)
        acc.add_(0.0)  # an all-zero sum is +0
    return acc


def _exponents(acc: Tensor) -> Tensor:
    """Exponents of float32 accumulators as int8, zeros (and nothing else) at ``_ZERO``."""
    return (((acc.view(torch.int32) >> 23) & 0xFF) - 127).clamp_(min=_ZERO).to(torch.int8)
