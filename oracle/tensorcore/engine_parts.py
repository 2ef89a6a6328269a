"""What the compiled engines share: the order in which packed products are consumed, and what follows the sum.

:func:`plan` flattens a schedule into *tiles* over packed positions of K. Position ``p`` holds product ``source[p]``
(-1: padding, a zero); positions are grouped by ``group``; at the end of a tile the chain may be folded (added to
nearest into the instruction's accumulator) or promoted. So one kernel serves every fused instruction: interleaved
orders are a permutation, short groups and ragged intervals are padding.

:func:`finish` is the epilogue and the bias, in the operations of :class:`~oracle.tensorcore.schedules.Epilogue`.
Not covered: the sums themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.tensorcore.fused import float32_scale, fma32
from oracle.tensorcore.instructions import FP8, Instruction, Order, Sum
from oracle.tensorcore.schedules import Epilogue, Promotion, Scales, Schedule
from oracle.truth.gemm import ScaledProduct

FOLD, PROMOTE = 1, 2  # what happens at the end of a tile: c = fl(c + chain); total = promotion of c
ADD, FMA, MULTIPLY_ADD, A_THEN_B, INSIDE = range(5)  # how scales enter: by promotion, or INSIDE the sum
UNROLL = 8  # groups are padded to a multiple
TILE = 128  # longest tile: what is unpacked at once

_MODES = {
    Promotion.NONE: ADD,  # 0 + part is part: a part is never -0
    Promotion.ADD: ADD,
    Promotion.FMA: FMA,
    Promotion.MUL_ADD: MULTIPLY_ADD,
    Promotion.ROW_COL_ADD: A_THEN_B,
}


@dataclass(frozen=True)
class Plan:
    """Packed order of one product.

    Attributes
    ----------
    source : Tensor
        int64 ``[Kp]``: the k of each packed position, -1 for padding.
    tiles : Tensor
        int64 ``[T, 4]``: first position, end position, scale block, ``FOLD | PROMOTE``.
    group : int
        Positions of one fused step.
    mode : int
        How scales enter.
    """

    source: Tensor
    tiles: Tensor
    group: int
    mode: int

    @property
    def ragged(self) -> bool:
        """Whether packing moves or pads anything."""
        return not torch.equal(self.source, torch.arange(self.source.numel(), device="cpu"))


def supported(product: ScaledProduct, schedule: Schedule) -> bool:
    """Whether a compiled engine can evaluate this schedule: fused sums of 8- or 16-bit operands into float32."""
    i = schedule.instruction
    return (
        i.sum in (Sum.FUSED, Sum.FUSED_THEN_ADD)
        and i.round_toward_zero
        and not i.flush_subnormals
        and i.min_exponent == -126
        and i.align_bits is not None
        and i.align_bits <= 40
        and i.group <= 64
        and all(x.is_floating_point() and x.element_size() <= 2 for x in (product.a, product.b))
    )


def narrow_lanes(instruction: Instruction) -> bool:
    """Whether float32 holds every term and sum exactly: ``2^(t+2) (group + 1) <= 2^24`` for 8-bit operands."""
    return (
        instruction.sum is Sum.FUSED
        and instruction.scale_block is None
        and set(instruction.operands) <= set(FP8)
        and instruction.align_bits is not None
        and (instruction.group + 1) << (instruction.align_bits + 2) <= 1 << 24
    )


def plan(product: ScaledProduct, schedule: Schedule) -> Plan:
    """The packed order of ``product`` under ``schedule``."""
    i = schedule.instruction
    inside = schedule.scales is Scales.OPERANDS
    group = -(-i.group // UNROLL) * UNROLL
    fold = FOLD if i.sum is Sum.FUSED_THEN_ADD else 0
    unit = i.k if fold or inside else max(i.k, TILE // i.k * i.k)  # products of one tile
    interval = schedule.interval or max(product.K, 1)
    source: list[int] = []
    tiles: list[tuple[int, int, int, int]] = []
    for start in range(0, product.K, interval):
        stop = min(start + interval, product.K)
        for first in range(start, stop, unit):
            end = min(first + unit, stop)
            begin = len(source)
            for k in range(first, end, i.k):
                for members in _groups(k, min(k + i.k, end), i):
                    source += members + [-1] * (group - len(members))
            block = first // product.block if product.B > 1 else 0
            tiles.append((begin, len(source), block, fold | (PROMOTE if end == stop else 0)))
    return Plan(
        torch.tensor(source, dtype=torch.int64, device="cpu"),
        torch.tensor(tiles, dtype=torch.int64, device="cpu").reshape(-1, 4),
        group,
        INSIDE if inside else _MODES[schedule.promotion],
    )


def _groups(first: int, end: int, instruction: Instruction) -> list[list[int]]:
    """The fused groups of the products ``first..end-1`` of one instruction, in order."""
    ks = range(first, end)
    if instruction.order is Order.INTERLEAVED:
        halves = [[k for k in ks if (k - first) % 4 < 2], [k for k in ks if (k - first) % 4 >= 2]]
        return [half for half in halves if half]
    return [list(ks[g : g + instruction.group]) for g in range(0, len(ks), instruction.group)]


def finish(acc: Tensor, product: ScaledProduct, schedule: Schedule) -> Tensor:
    """Scales that the sum did not use, then the bias; ``acc`` float32 ``[M, N]`` of the whole ``product``."""
    bias = None if product.bias is None else product.bias.to(torch.float32)
    kind = schedule.epilogue
    if kind is Epilogue.NONE:
        return acc if bias is None else acc + bias
    sa = float32_scale(product.a_scale)[:, 0, None]
    columns = torch.arange(product.N, device=acc.device) // product.b_rows
    sb = float32_scale(product.b_scale)[columns, 0][None, :]
    if kind is Epilogue.COL_THEN_ROW:
        inner, outer = sb * acc, sa
    elif kind is Epilogue.ROW_THEN_COL:
        inner, outer = acc * sa, sb
    else:
        inner, outer = acc, sa * sb
    if bias is None:
        return inner * outer
    return fma32(outer, inner, bias) if schedule.fused_bias else inner * outer + bias
