"""Bounds of chains whose steps are not the fused truncating sum: each step adds a symmetric error.

    E' = E + delta(step),   |c - x| <= E

with ``u = 2**-24``, ``top`` the largest product exponent of the step, ``G`` its products and ``S = |x'| + E``:

FUSED_THEN_ADD   the residue bound of the groups, chained from zero, then one float32 addition: ``u (S + losses)``
EXACT            one rounding of an exact sum: ``u S``
TREE_FLUSH       ``ceil(log2 G)`` float32 additions: ``ceil(log2 G) u sum|p| (1 + u)**G``, then ``u S``; flushing of
                 subnormals costs at most ``2**-126`` for each of the ``2 G + 2`` intermediate values
LATE_FLOOR       ``(G + 2) 2**(top - t)`` for the products (truncation, and the floor of the two halves), then on the
                 common grid ``2**(common - wide) + 2**(common - t)`` for sum and accumulator, then ``u S``

Source: the definitions in :mod:`oracle.tensorcore.fused`; standard error analysis (Higham, ch. 2 to 4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.bounds.accumulator import Accumulator
from oracle.bounds.chain import Operand, exponent_floor, power, residue
from oracle.tensorcore.instructions import Order, Sum

U = 2.0**-24
FLUSHED = 2.0**-126


def stepwise(a: Operand, b: Operand, acc: Accumulator) -> tuple[Tensor, Tensor, Tensor]:
    """``x, -E, E`` (FUSED_THEN_ADD: ``x, l, h``) of one chain over all columns of ``a`` and ``b``."""
    x = torch.zeros((a.value.shape[0], b.value.shape[0]), dtype=torch.float64, device=a.value.device)
    low, high = torch.zeros_like(x), torch.zeros_like(x)
    width = acc.length if acc.kind is Sum.FUSED_THEN_ADD else acc.group
    for start in range(0, a.value.shape[1], width):
        sa, sb = a.steps(start, start + width), b.steps(start, start + width)
        if acc.kind is Sum.FUSED_THEN_ADD:
            dx, dl, dh = residue(_ordered(sa, acc), _ordered(sb, acc), acc)
        else:
            dx = sa.value @ sb.value.T
            dh = _loss(sa, sb, x.abs() + torch.maximum(-low, high), acc)
            dl = -dh
        x, low, high = x + dx, low + dl, high + dh
        reach = torch.maximum((x + low).abs(), (x + high).abs())
        rounding = U * reach * (1 + 2.0**-40)
        if acc.kind is Sum.TREE_FLUSH:
            rounding = rounding + 2 * FLUSHED
        low, high = low - rounding, high + rounding
    return x, low, high


def _loss(a: Operand, b: Operand, held: Tensor, acc: Accumulator) -> Tensor:
    """What one step may lose before its final rounding; ``held`` bounds the accumulator's magnitude."""
    if acc.kind is Sum.EXACT:
        return torch.zeros_like(held)
    if acc.kind is Sum.TREE_FLUSH:
        depth = (acc.group - 1).bit_length()
        return depth * U * (a.value.abs() @ b.value.abs().T) * (1 + 2.0**-18) + 2 * acc.group * FLUSHED
    top = (a.exponent[:, None, :] + b.exponent[None, :, :]).amax(dim=2).clamp(min=-1000)
    common = torch.maximum(top, exponent_floor(held)).clamp(min=-126)
    own = (acc.group + 2) * power(top.clamp(min=-126) - acc.align)
    return own + power(common - acc.wide) + power(common - acc.align)


def _ordered(x: Operand, acc: Accumulator) -> Operand:
    """Columns in the order in which the instruction's groups take them, so that groups are consecutive."""
    if acc.order is not Order.INTERLEAVED:
        return x
    index = torch.arange(x.value.shape[1], device=x.value.device)
    first = index % 4 < 2
    chosen = torch.cat([index[first], index[~first]])
    return Operand(x.value[:, chosen], x.exponent[:, chosen])
