"""Operands as the compiled engines take them: products of K in packed order, and what every code stands for.

:func:`pack` flattens chains over K into *tiles* of packed positions. Position ``p`` holds product ``source[p]`` (-1:
padding, a zero); a fused step takes ``group`` positions, and a tile ends with flags that say what becomes of its chain.
So one kernel serves every fused instruction: interleaved orders are a permutation, short groups and ragged chains are
padding. The predictions (:mod:`oracle.tensorcore.engine_cpu`, :mod:`oracle.tensorcore.engine_cuda`) and the compiled
bounds (:mod:`oracle.bounds.engines`) use the same packing. Not covered: the sums themselves.
Source: derived from the orders of :class:`oracle.tensorcore.instructions.Order`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oracle.numbers.formats import Format, codes_of, decode
from oracle.tensorcore.instructions import FP8, Instruction, Order, Sum, Zeros
from oracle.tensorcore.schedules import Promotion, Scales, Schedule
from oracle.truth.gemm import ScaledProduct

UNROLL = 8  # products per pass of a kernel; groups are padded to a multiple
TILE = 128  # longest tile, but for a longer group: what a kernel unpacks of b at once

Chain = tuple[int, int, int, int]
"""First k, end k, scale block, and the flags of the chain's last tile."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Packed order of the products of one sum.

    Attributes
    ----------
    source : Tensor, int64 ``[Kp]``: the k of each packed position, -1 for padding.
    tiles : Tensor, int64 ``[T, 4]``: first position, end position, scale block, flags.
    group : int, positions of one fused step, a multiple of ``UNROLL``.
    """

    source: Tensor
    tiles: Tensor
    group: int

    @cached_property
    def ragged(self) -> bool:
        """Whether packing moves or pads anything."""
        return not torch.equal(self.source, torch.arange(self.source.numel(), device="cpu"))


def pack(
    chains: Iterable[Chain],
    *,
    group: int,
    unit: int,
    piece: int | None = None,
    interleaved: bool = False,
    flags: int = 0,
) -> Packed:
    """The packed order of ``chains``.

    Parameters
    ----------
    chains : in the order in which they are summed.
    group : products of one fused step.
    unit : products of one tile, a multiple of ``piece``.
    piece : products of one instruction, which no group crosses; None: as many as a tile has.
    interleaved : whether a piece is two halves, ``k mod 4`` in {0, 1} and then the others, each in groups.
    flags : of every tile, added to those of a chain's last one.
    """
    padded = -(-group // UNROLL) * UNROLL
    source: list[int] = []
    tiles: list[tuple[int, int, int, int]] = []
    for start, stop, block, last in chains:
        for first in range(start, stop, unit):
            end, begin = min(first + unit, stop), len(source)
            for k in range(first, end, piece or unit):
                ks = range(k, min(k + (piece or unit), end))
                if interleaved:
                    halves = [[i for i in ks if (i - k) % 4 < 2], [i for i in ks if (i - k) % 4 >= 2]]
                else:
                    halves = [list(ks)]
                groups = [half[g : g + group] for half in halves for g in range(0, len(half), group)]
                for members in groups:
                    if members:
                        source += members + [-1] * (padded - len(members))
            tiles.append((begin, len(source), block, flags | (last if end == stop else 0)))
    return Packed(
        torch.tensor(source, dtype=torch.int64, device="cpu"),
        torch.tensor(tiles, dtype=torch.int64, device="cpu").reshape(-1, 4),
        padded,
    )


FOLD, PROMOTE = 1, 2  # flags of predictions: c = fl(c + chain); total = promotion of c
ADD, FMA, MULTIPLY_ADD, A_THEN_B, A_THEN_FMA, B_THEN_FMA, INSIDE, CONTINUE, OF_TOTAL = range(9)
"""How scales enter: by promotion, or INSIDE the sum; or not, and the chain continues from what the result holds. Those
of ``a`` multiply the total before a chain is added, OF_TOTAL."""

_MODES = {
    Promotion.NONE: ADD,  # 0 + part is part: a part is never -0
    Promotion.ADD: ADD,
    Promotion.FMA: FMA,
    Promotion.MUL_ADD: MULTIPLY_ADD,
    Promotion.ROW_COL_ADD: A_THEN_B,
    Promotion.ROW_COL_FMA: A_THEN_FMA,
    Promotion.COL_ROW_FMA: B_THEN_FMA,
    Promotion.RESCALE: CONTINUE,
}


def scale_mode(schedule: Schedule) -> int:
    """How the scales enter the sum of a compiled engine."""
    return INSIDE if schedule.scales is Scales.OPERANDS else _MODES[schedule.promotion]


def plan(product: ScaledProduct, schedule: Schedule) -> Packed:
    """The packed order of ``product`` under ``schedule``, with the flags ``FOLD`` and ``PROMOTE``."""
    return _plan(product.K, product.block if product.B > 1 else max(product.K, 1), schedule)


@lru_cache(maxsize=64)
def _plan(length: int, block: int, schedule: Schedule) -> Packed:
    i = schedule.instruction
    fold = FOLD if i.sum is Sum.FUSED_THEN_ADD else 0
    unit = i.k if fold or schedule.scales is Scales.OPERANDS else max(i.k, TILE // i.k * i.k)
    # a chain inside the instruction meets several scale blocks, of which no tile meets two
    interval, chains = schedule.interval or max(length, 1), []
    for start in range(0, length, interval):
        stop = min(start + interval, length)
        firsts = range(start, stop, unit)
        chains += [(k, min(k + unit, stop), k // block, PROMOTE if k + unit >= stop else 0) for k in firsts]
    return pack(chains, group=i.group, unit=unit, piece=i.k, interleaved=i.order is Order.INTERLEAVED, flags=fold)


def supported(product: ScaledProduct, schedule: Schedule) -> bool:
    """Whether a compiled engine can evaluate this schedule: fused sums of 8- or 16-bit operands into float32, or into
    float16 where the codes are finite (an infinite code counts more than an overflow there)."""
    i = schedule.instruction
    return (
        i.sum in (Sum.FUSED, Sum.FUSED_THEN_ADD)
        and (schedule.accumulator == torch.float32 or i.float16_out and product.left.finite and product.right.finite)
        and i.round_toward_zero
        and not i.flush_subnormals
        and i.zeros is not Zeros.COUNTED
        and not i.saturates
        and (i.min_exponent == -126 or _least_exponent(product, schedule) >= -126)
        and i.align_bits is not None
        and i.align_bits <= 40
        and i.group <= 64
        and all(x.is_floating_point() and x.element_size() <= 2 for x in (product.a, product.b))
    )


def _least_exponent(product: ScaledProduct, schedule: Schedule) -> int:
    """No product that is not 0 is aligned below this exponent, so that a least one up to it changes nothing."""
    least = product.left.fmt.emin + product.right.fmt.emin
    if schedule.scales is Scales.OPERANDS:
        scales = (x.scales.nan_to_num(nan=1.0) for x in (product.left, product.right))
        least += sum(math.frexp(float(s.min()))[1] - 1 for s in scales if s.numel())
    return least


def narrow_lanes(instruction: Instruction) -> bool:
    """Whether float32 holds every term and sum exactly: ``2^(t+2) (group + 1) <= 2^24`` for 8-bit operands."""
    return (
        instruction.sum is Sum.FUSED
        and instruction.scale_block is None
        and set(instruction.operands) <= set(FP8)
        and instruction.align_bits is not None
        and (instruction.group + 1) << (instruction.align_bits + 2) <= 1 << 24
    )


@lru_cache(maxsize=32)
def code_table(fmt: Format, absent: int, *, special: bool) -> tuple[Tensor, Tensor]:
    """Value (float64) and exponent ``max(floor(log2 |x|), emin)`` (int16) of every code of a format of up to 16 bits,
    both ``[codes]``.

    Zeros have the exponent ``absent``. NaN and infinities keep their value where ``special`` (and have any exponent),
    else they stand for zeros. The tensors are shared: do not write to them.
    """
    value = decode(torch.arange(1 << fmt.bits, device="cpu"), fmt)
    if not special:
        value = torch.nan_to_num(value, 0.0, 0.0, 0.0)
    exponent = (torch.frexp(torch.nan_to_num(value, 1.0, 1.0, 1.0))[1].to(torch.int16) - 1).clamp(min=fmt.emin)
    return value, torch.where(value == 0, absent, exponent).to(torch.int16)


def codes_array(x: Tensor) -> NDArray[np.unsignedinteger]:
    """The codes of an 8- or 16-bit tensor ``x`` of any shape as contiguous uint8 or uint16 of the same shape, which
    index tables; NaN codes too."""
    x = x.contiguous()
    bits = (x if x.dtype is torch.uint8 else codes_of(x)).numpy()
    return bits if bits.itemsize == 1 else bits.view(np.uint16)


def packed_rows(
    x: Tensor, order: Packed, values: NDArray[Any], exponents: NDArray[Any], absent: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Values and exponents ``[R, Kp]`` of the codes ``x [R, K]`` (8 or 16 bits) in packed order, of the dtypes of the
    tables ``values`` and ``exponents`` ``[codes]``; padding is zeros, NaN what the table has."""
    codes, source = codes_array(x), order.source.numpy()
    if order.ragged:
        codes = np.take(codes, source, axis=1)  # padding takes the last column, and is overwritten
    value, exponent = np.take(values, codes), np.take(exponents, codes)
    if order.ragged:
        value[:, source < 0] = 0
        exponent[:, source < 0] = absent
    return value, exponent
