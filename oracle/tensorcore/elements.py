"""Some elements of a product by many schedules at once: what rejects a schedule before anything is computed whole.

An element is a row of ``a`` with a row of ``b``. The chains of one instruction over them are computed once; promotions,
scales, the store and partial sums over K follow for each schedule and each partition of K, in float32, by the very
functions of :mod:`oracle.tensorcore.predict`. ``Elements.bits(schedule)`` equals the diagonal of that prediction.

    Elements.where(product, rows, columns)      the elements ``(rows[i], columns[i])``
    elements.bits(schedule, dtype)              ``[P]``
    elements.of_splits(schedule, splits, dtype) ``[S, P]``, of the schedule with K cut by each split

NaN and infinities as of predictions. Source: derived from :mod:`oracle.tensorcore.fused`.
Memory: below 64 MiB for a K of 32,768. Not covered: choosing the elements (:mod:`oracle.tensorcore.identify`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oracle.tensorcore.fused import ABSENT, Operand, accumulate, float32_scale, operand, scaled_addends
from oracle.tensorcore.instructions import Instruction, Order, Status, Sum
from oracle.tensorcore.packing import Packed, code_table, pack, packed_rows, supported
from oracle.tensorcore.predict import finished, joined, rescale, store
from oracle.tensorcore.schedules import Promotion, Scales, Schedule, Split
from oracle.truth.gemm import Decoded, ScaledProduct

MOST = 128  # elements of one record: the lanes of the compiled chains
WHOLE = Split(1)
"""K in one part."""

Ranges = tuple[tuple[int, int], ...]
"""Products that a chain adds, in this order: first k, end k."""


@dataclass(frozen=True)
class Elements:
    """At most ``MOST`` elements of a product, on the CPU.

    Attributes
    ----------
    product : ``[P, P]``, of which the diagonal is meant. ``c`` is ``[P]`` here, apart from it.
    """

    product: ScaledProduct
    c: Tensor | None = None

    @classmethod
    def where(cls, product: ScaledProduct, rows: Tensor, columns: Tensor) -> Elements:
        """The elements ``(rows[i], columns[i])`` of ``product``; both int64 ``[P]``, at most ``MOST``."""
        c = None if product.c is None else product.c[rows, columns].cpu()
        own = replace(product, c=None) if product.c is not None else product
        return cls(own.take(rows).take_columns(columns).to("cpu"), c)

    def __len__(self) -> int:
        return self.product.M

    def bits(self, schedule: Schedule, dtype: torch.dtype) -> Tensor:
        """``[P]`` of ``dtype``: what ``schedule`` gives of each element, as
        :func:`~oracle.tensorcore.predict.predict_product` does. It must fit the product (:meth:`Schedule.why_not`)."""
        plain, split = replace(schedule, split=None), schedule.split or WHOLE
        return self.of_splits(plain, [split], dtype)[0]

    def of_splits(self, schedule: Schedule, splits: Sequence[Split], dtype: torch.dtype) -> Tensor:
        """``[S, P]`` of ``dtype``: what ``schedule`` gives of each element with K cut by each of the ``splits``; the
        schedule is an unsplit one, and each split must fit."""
        if self.c is not None:
            sums = replace(self, c=None).of_splits(schedule, splits, torch.float32)
            if self.c.dtype is torch.bfloat16:
                sums = store(sums, torch.bfloat16).to(torch.float32)
            return store(self.c.to(torch.float32) + sums, dtype)
        product, bias = self.product, self.product.bias
        if schedule.dequantises or schedule.widens:
            product = self._lowered(schedule)
        sums = product.cached(_key(schedule, splits), lambda: _sums(product, schedule, splits))
        sa, sb = (x[:, 0] for x in _scales(product))
        if not schedule.bias_after_cast:
            return store(finished(sums, sa, sb, bias, product.alpha, schedule), dtype)
        stored = store(finished(sums, sa, sb, None, product.alpha, schedule), dtype)
        assert bias is not None, "checked"
        return store(stored.to(torch.float32) + bias.to(torch.float32), dtype)

    def _lowered(self, schedule: Schedule) -> ScaledProduct:
        def make() -> ScaledProduct:
            seen = schedule.lowered(self.product)
            assert seen is not None, "checked"
            return seen

        return self.product.cached(("lowered", schedule.instruction.operands[0], schedule.dequantises), make)


def alike(instruction: Instruction) -> Instruction:
    """The instruction without its name: equal for two that compute the same."""
    return replace(
        instruction, name="", arch="", operands=(), source="", status=Status.LITERATURE, float16_out=False, unshown=""
    )


def _key(schedule: Schedule, splits: Sequence[Split]) -> Any:
    """Of sums before the epilogue."""
    return "sums", alike(schedule.instruction), schedule.interval, schedule.promotion, schedule.accumulator, *splits


def _scales(product: ScaledProduct) -> tuple[Tensor, Tensor]:
    """The scales of each element, float32 ``[P, B]`` both."""
    columns = torch.arange(product.N, device="cpu") // product.b_rows
    return float32_scale(product.a_scale).expand(product.M, -1), float32_scale(product.b_scale)[columns]


def _sums(product: ScaledProduct, schedule: Schedule, splits: Sequence[Split]) -> Tensor:
    """Float32 ``[S, P]``: the promoted sums with K cut by each split, before the epilogue."""
    if schedule.promotion is Promotion.RESCALE:
        assert list(splits) == [WHOLE], "a rescaled sum is not cut"
        return _rescaled(product, schedule)[None]
    orders = [[_chains(part, schedule.interval) for part in split.pieces(product.K)] for split in splits]
    unique = {ranges: None for parts in orders for part in parts for ranges in part}
    index = {ranges: i for i, ranges in enumerate(unique)}
    results = product.cached(
        ("chains", alike(schedule.instruction), schedule.accumulator, tuple(unique)),
        lambda: _Chains(product, schedule).of(list(unique)),
    )
    firsts = [ranges[0][0] // product.block for ranges in unique]
    blocks = torch.tensor(firsts, dtype=torch.int64, device="cpu") if product.B > 1 else None
    places = [[[index[x] for x in part] for part in parts] for parts in orders]
    return _promoted(product, schedule, results, blocks, places)


def _chains(part: Sequence[tuple[int, int]], interval: int | None) -> list[Ranges]:
    """The chains of one part of K, of ``interval`` products each."""
    if interval is None:
        return [tuple(part)] if part else []
    result, open_, left = list[Ranges](), list[tuple[int, int]](), interval
    for first, end in part:
        while first < end:
            stop = min(end, first + left)
            open_.append((first, stop))
            left -= stop - first
            first = stop
            if left == 0:
                result.append(tuple(open_))
                open_, left = [], interval
    return [*result, tuple(open_)] if open_ else result


def _promoted(
    product: ScaledProduct,
    schedule: Schedule,
    results: Tensor,
    blocks: Tensor | None,
    orders: Sequence[Sequence[Sequence[int]]],
) -> Tensor:
    """Float32 ``[S, P]``: chains ``results`` ``[C, P]``, whose scales are those of ``blocks`` ``[C]`` where there are
    several, joined part by part and the parts added, for each of the ``orders``; all of them a step at a time."""
    sa, sb = _scales(product)
    steps = max(sum(map(len, parts)) for parts in orders)
    chain = np.zeros((steps, len(orders)), np.int64)
    starts, ends, there = (np.zeros((steps, len(orders)), bool) for _ in range(3))
    for s, parts in enumerate(orders):
        begin = 0
        for members in parts:
            if members:
                stop = begin + len(members)
                chain[begin:stop, s], there[begin:stop, s] = members, True
                starts[begin, s] = ends[stop - 1, s] = True
                begin = stop
    total = torch.zeros((len(orders), product.M), dtype=torch.float32, device="cpu")
    whole = torch.zeros_like(total)
    many, seen = len(orders) > 1, np.zeros(len(orders), bool)
    for step in range(steps):
        at = torch.from_numpy(chain[step])
        if starts[step].any():
            total = total.masked_fill(torch.from_numpy(starts[step])[:, None], 0.0)
        block = torch.zeros_like(at) if blocks is None else blocks[at]
        part = joined(schedule.promotion, total, results[at], sa.t()[block], sb.t()[block])
        total = torch.where(torch.from_numpy(there[step])[:, None], part, total) if many else part
        if ends[step].any():
            first, later = (torch.from_numpy(ends[step] & x)[:, None] for x in (~seen, seen))
            whole = torch.where(first, total, torch.where(later, whole + total, whole))
            seen |= ends[step]
    return whole


def _rescaled(product: ScaledProduct, schedule: Schedule) -> Tensor:
    """Float32 ``[P]``: one chain, multiplied between the blocks by the ratio of their scales."""
    run, (sa, sb) = _Chains(product, schedule), _scales(product)
    interval = schedule.interval or max(product.K, 1)
    starts = range(0, product.K, interval)
    scales = torch.stack([(sa * sb)[:, start // product.block if product.B > 1 else 0] for start in starts])
    before = torch.cat([torch.ones_like(scales[:1]), scales[:-1]])
    ratios = product.cached(("ratios", interval), lambda: rescale(scales, before))
    total = torch.zeros(product.M, dtype=torch.float32, device="cpu")
    for start, ratio in zip(starts, ratios, strict=True):
        total = run.of([((start, min(start + interval, product.K)),)], total * ratio)[0]
    return total * scales[-1]


class _Chains:
    """The chains of one schedule's instruction over the elements of a product: compiled where a kernel takes them, else
    by the definition."""

    def __init__(self, product: ScaledProduct, schedule: Schedule) -> None:
        self.product, self.schedule = product, schedule
        self.instruction = schedule.instruction
        self.compiled = importlib.util.find_spec("numba") is not None and supported(product, schedule)

    def of(self, chains: Sequence[Ranges], first: Tensor | None = None) -> Tensor:
        """Float32 ``[C, P]``: each chain from 0, or from ``first`` ``[P]``, float32."""
        k = self.instruction.k
        whole = all(
            x % k == 0 for ranges in chains for i, ends in enumerate(ranges) for x in ends if x < self.product.K
        )
        if self.compiled and whole:
            return self._by_kernel(chains, first)
        begin = (
            torch.zeros(self.product.M, dtype=torch.float64, device="cpu") if first is None else first.to(torch.float64)
        )
        return torch.stack([self._by_definition(ranges, begin) for ranges in chains]).to(torch.float32)

    def _by_kernel(self, chains: Sequence[Ranges], first: Tensor | None) -> Tensor:
        from oracle.tensorcore.cpu_elements import chains as run  # numba is optional
        from oracle.tensorcore.engine_cpu import HALF

        order, av, ae, bv, be, sigma = self._packed
        i, count = self.instruction, self.product.M
        visits = [np.concatenate([np.arange(x // i.k, -(-y // i.k)) for x, y in ranges]) for ranges in chains]
        ends = np.cumsum([0, *map(len, visits)])
        out = np.zeros((len(chains), MOST), np.float32)
        begin = np.zeros(MOST, np.float32)
        if first is not None:
            begin[:count] = first.numpy()
        tiles, folds = order.tiles.numpy(), i.sum is Sum.FUSED_THEN_ADD
        joined_visits = np.concatenate(visits).astype(np.int64)
        to = HALF if self.schedule.accumulator is torch.float16 else i.out_bits
        args = (tiles, joined_visits, ends, order.group, i.align_bits or 0, to, folds, begin, out)
        run(av, ae, bv, be, sigma, *args)
        return torch.from_numpy(out)[:, :count]

    @cached_property
    def _packed(self) -> tuple[Packed, Any, Any, Any, Any, Any]:
        i, product, inside = self.instruction, self.product, self.schedule.scales is Scales.OPERANDS
        order = _order(i.k, i.group, i.order is Order.INTERLEAVED, product.K, product.block if inside else product.K)
        sides = (side for x in (product.left, product.right) for side in _in_lanes(x, order))
        packed = product.cached(("lanes", order), lambda: tuple(sides))
        sigma = np.ones((max(1, product.B if inside else 1), MOST), np.float64)
        if inside:
            sa, sb = (x.to(torch.float64).t().numpy() for x in _scales(product))
            sigma[:, : product.M] = sa * sb
        return order, *packed, sigma

    def _by_definition(self, ranges: Ranges, first: Tensor) -> Tensor:
        inst, product = self.instruction, self.product
        ks = torch.cat([torch.arange(*ends, device="cpu") for ends in ranges])
        a, b = (Operand(x.values[:, ks], x.exponents[:, ks]) for x in self._operands)
        if self.schedule.scales is not Scales.OPERANDS:
            p = a.values * b.values
            e = torch.where(p == 0, ABSENT, a.exponents + b.exponents)
        else:
            blocks = ks // product.block
            blocks = blocks[::16] if inst.sum is Sum.BLOCK_SCALED_GROUPS else blocks
            sa, sb = (x.to(torch.float64)[:, blocks] for x in _scales(product))
            p, e = scaled_addends(a, b, sa, sb, inst)
        return accumulate(p, e, first, inst, out=self.schedule.accumulator)

    @cached_property
    def _operands(self) -> tuple[Operand, Operand]:
        inst, sides = self.instruction, (self.product.left, self.product.right)
        a, b = (
            operand(side.codes, inst)
            if side.codes.dtype == torch.float32 or not side.codes.is_floating_point()
            else operand(side.value(), inst, format=side.fmt.name)
            for side in sides
        )
        return a, b


@lru_cache(maxsize=16)
def _order(k: int, group: int, interleaved: bool, length: int, block: int) -> Packed:
    """The packed order of single instructions of ``k`` products over ``length``, each in its scale block."""
    starts = [(at, min(at + k, length), at // max(1, block), 0) for at in range(0, length, k)]
    return pack(starts, group=group, unit=k, piece=k, interleaved=interleaved)


def _in_lanes(side: Decoded, order: Packed) -> tuple[Any, Any]:
    """Values, float32, and exponents, int16, ``[Kp, MOST]`` of the rows of an operand in packed order."""
    from oracle.tensorcore.engine_cpu import WIDE_ZERO_EXPONENT as absent

    value, exponent = (x.numpy() for x in code_table(side.fmt, absent, special=True))
    values, exponents = packed_rows(side.codes, order, value.astype(np.float32), exponent, absent)
    lanes = np.zeros((values.shape[1], MOST), np.float32), np.full((values.shape[1], MOST), absent, np.int16)
    lanes[0][:, : len(values)], lanes[1][:, : len(values)] = values.T, exponents.T
    return lanes
