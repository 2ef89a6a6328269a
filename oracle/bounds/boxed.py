"""Scaled products whose left operand is known up to a box: codes that may have flipped, scales within an interval.

A requantised intermediate is not known exactly: rounding intervals before the quantiser become intervals of codes. With
``low <= a <= high`` element by element (both values of the format) and ``b`` exact, the accumulator of a chain lies in
``[L, H]``, by the recursion of :func:`oracle.bounds.chain.residue` with every term replaced by its worst case:

    p in [min, max](low b, high b);   a product that may differ loses at most min(|p|, quantum), a fixed one |p| mod q
    the quantum comes from the largest exponent that the box admits, the output truncation is exact only below what
    the smallest certain exponent allows
    L' = L + sum min p - D+ - lost,   H' = H + sum max p + D- + lost,   then the truncation of the output

so a box of a single point gives the interval of B2. ``rank1`` needs matrix products only (for large shapes): with
``x`` the hull of the exact prefix, at its largest, and ``g = 2**(max E(a) + max E(b))`` over the step, the error ``E``
grows by ``n 2**-t max(g, pw(|x| + E))``, then by ``2**-to pw(|x'| + E)``, with ``n = group`` (+ 1 after the first step,
for the accumulator).
Promotion is interval arithmetic with the roundings of :mod:`oracle.bounds.product`. Several boxes for one row (a scale
that may take a few values) are alternatives: the hull over them is taken block by block.

Where scales are inside the instruction a step of ``n`` products, aligned to ``t`` bits of the largest term and stored
with ``to``, loses ``(n + 1) 2^-t + 2^-to`` of the sum of magnitudes at most; where that is below ``n u``, the bound of
float32 additions in any order holds it.

Source: derived here from the step's definition. Not covered: other accumulators that do not add by fused truncating
steps.
NaN and infinities are not covered either: operands and scales are finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from oracle.bounds.accumulator import Accumulator
from oracle.bounds.chain import NONE, exponent_floor, floor_power, power
from oracle.bounds.product import ETA, U, may_overflow
from oracle.errors import NumericsError
from oracle.numbers.formats import E2M1, Format, decode, of_dtype
from oracle.tensorcore.instructions import Order, Sum
from oracle.truth.gemm import exponents

CUBE = 1 << 21  # products of one step held at a time
MOST = 1 << 26  # products above which the rank-1 recursion is used


@dataclass(frozen=True)
class Box:
    """What a left operand may be: float64 values ``[R, K]`` and positive scales ``[R, B]``, both with bounds."""

    low: Tensor
    high: Tensor
    scale_low: Tensor
    scale_high: Tensor
    fmt: Format

    def rows(self, start: int, stop: int) -> Box:
        """The same box restricted to rows ``start..stop-1``."""
        r = slice(start, stop)
        return Box(self.low[r], self.high[r], self.scale_low[r], self.scale_high[r], self.fmt)

    def select(self, index: Tensor) -> Box:
        """The same box with the rows that ``index`` (int64 ``[rows]``) names, in its order; values are copied
        unchanged."""
        return Box(self.low[index], self.high[index], self.scale_low[index], self.scale_high[index], self.fmt)


@dataclass(frozen=True)
class Range:
    """``low <= computed <= high`` per element, float64, before the output is rounded; ``open``: nothing is claimed."""

    low: Tensor
    high: Tensor
    open: Tensor
    name: str


def boxed_product(
    boxes: Sequence[Box],
    b: Tensor,
    b_scale: Tensor,
    *,
    block: int,
    b_rows: int,
    acc: Accumulator | None,
    b_ends: tuple[Tensor, Tensor] | None = None,
) -> Range:
    """The range of ``a @ b.T`` with block scales for every ``a`` of one of the boxes.

    Parameters
    ----------
    boxes : alternatives for the same rows; each row, in each block, is in one of them.
    b : Tensor ``[N, K]`` codes; ``b_scale [ceil(N / b_rows), B]`` float32; as :class:`oracle.truth.gemm.ScaledProduct`.
    acc : the accumulator, or None for float32 arithmetic in any order.
    b_ends : bounds ``[N, K]`` (float64 values of the format) of ``b`` where its codes may flip too.

    Raises NumericsError: the accumulator is of a kind that is not covered.
    """
    if acc is not None and acc.scales_inside and (acc.group + 1) * 2.0**-acc.align + 2.0**-acc.out <= acc.group * U:
        acc = None  # a step loses less than float32 additions of its products, in any order
    plain = acc is None or (acc.kind is Sum.FUSED and acc.order is Order.SEQUENTIAL)
    if acc is not None and (not plain or acc.scales_inside):
        raise NumericsError(f"{acc.name} does not add by fused truncating steps; no bound for flipped codes is derived")
    rows, k = boxes[0].low.shape
    tight = rows * b.shape[0] * k * len(boxes) <= MOST
    step = max(1, CUBE // (b.shape[0] * (acc.group if acc is not None else 1)))
    parts = []
    for start in range(0, rows, step):
        tile = [box.rows(start, min(rows, start + step)) for box in boxes]
        parts.append(_tile(tile, b_ends or (_values(b),) * 2, b_scale, block, b_rows, acc, tight, _format(b)))
    name = "any-order float32" if acc is None else f"{'residue' if tight else 'rank-1'} bound of {acc.name}"
    low, high, open_ = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    scales = b_scale.repeat_interleave(b_rows, dim=0)[: b.shape[0]]
    finite = [torch.isfinite(x).all(dim=1) for x in (*(b_ends or (_values(b),)), decode(scales))]
    lost = ~torch.stack(finite).all(dim=0)  # zero times NaN is NaN, which no interval around zero holds
    return Range(low, high, open_ | lost, f"{name}, codes that may flip")


def _format(b: Tensor) -> Format:
    """The format of codes; uint8 holds one code of E2M1 each."""
    return E2M1 if b.dtype is torch.uint8 else of_dtype(b.dtype)


def _values(b: Tensor) -> Tensor:
    return decode(b, _format(b))


def chain(
    low: Tensor, high: Tensor, b: Tensor, acc: Accumulator, fmt: Format, b_fmt: Format, b_high: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The accumulator's interval, float64 ``[R, N]``, after one chain over float64 values ``low, high [R, k]`` and ``b
    [N, k]``.

    With ``b_high`` ``[N, k]`` the second operand lies in ``[b, b_high]``.
    """
    down = torch.zeros((low.shape[0], b.shape[0]), dtype=torch.float64, device=b.device)
    up = torch.zeros_like(down)
    b2 = b if b_high is None else b_high
    (e_most, e_least), (eb_most, eb_least) = _exponents(low, high, fmt), _exponents(b, b2, b_fmt)
    a_ends, b_ends = _Ends(low, high, low != high, e_least), _Ends(b, b2, b != b2, eb_least)
    widened = b_high is not None or bool(b_ends.free.any())
    for start in range(0, b.shape[1], acc.group):
        s = slice(start, start + acc.group)
        top = _most(e_most[:, s], eb_most[:, s])
        quantum = power(torch.maximum(top, exponent_floor(torch.maximum(down.abs(), up.abs()))) - acc.align)
        moving = torch.nonzero(a_ends.free[:, s].any(dim=1) | widened)[:, 0]  # rows of which a product may be another
        known = len(moving) < max(1, len(low))  # of some rows, or of none where there are none
        parts = (top, *_still(low[:, s], b[:, s], quantum)) if known else ()
        if len(moving):
            tile = a_ends.at(moving, s), b_ends.at(slice(None), s)
            moved = _moving(*tile, quantum[moving], corners=b_high is not None)
            parts = tuple(x.index_copy(0, moving, y) for x, y in zip(parts, moved, strict=True)) if parts else moved
        certain, least, most, positive, negative = parts
        nearest = torch.where((down <= 0) & (up >= 0), torch.zeros_like(up), torch.minimum(down.abs(), up.abs()))
        lost = torch.where(nearest < power(top), power(top - acc.align), torch.zeros_like(up))
        zero = torch.zeros_like(up)
        d1 = down + least - positive - torch.where(up > 0, lost, zero)
        u1 = up + most + negative + torch.where(down < 0, lost, zero)
        exact_below = power(certain + 1 + acc.out - acc.align)
        live = top > NONE // 2
        cut_down, cut_up = (_truncation(x, exact_below, acc) for x in (u1, -d1))
        down, up = torch.where(live, d1 - cut_down, down), torch.where(live, u1 + cut_up, up)
    return down, up


def _most(a: Tensor, b: Tensor) -> Tensor:
    """The largest of ``a [R, k] + b [N, k]`` over k, ``[R, N]``."""
    return (a[:, None, :] + b[None, :, :]).amax(dim=2)


def _still(a: Tensor, b: Tensor, quantum: Tensor) -> tuple[Tensor, ...]:
    """As :func:`_moving` without the exponent, of products that are known."""
    p, q = a[:, None, :] * b[None, :, :], quantum[..., None]
    rest = torch.div(p, q).trunc_().mul_(q).neg_().add_(p)  # of the sign of p
    total = p.sum(dim=2)
    return total, total, rest.clamp(min=0).sum(dim=-1), rest.neg_().clamp_(min=0).sum(dim=-1)


class _Ends(NamedTuple):
    """The values ``[R, k]`` that an operand may have: the least and the most, where they differ, and the least exponent
    that a value must have."""

    low: Tensor
    high: Tensor
    free: Tensor
    least: Tensor

    def at(self, rows: Tensor | slice, columns: slice) -> _Ends:
        return _Ends(*(x[rows, columns] for x in self))


def _moving(a: _Ends, b: _Ends, quantum: Tensor, *, corners: bool) -> tuple[Tensor, ...]:
    """Of the products of one group ``[R, N]``: the least exponent of the largest, the least and the greatest sum, and
    the most that truncation takes from the positive ones and from the negative ones."""
    p1, p2 = a.low[:, None, :] * b.low[None, :, :], a.high[:, None, :] * b.low[None, :, :]
    if corners:
        p3, p4 = a.low[:, None, :] * b.high[None, :, :], a.high[:, None, :] * b.high[None, :, :]
        every = torch.stack([p1, p2, p3, p4])
        p1, p2 = every.amin(dim=0), every.amax(dim=0)
    positive, negative = _losses(p1, p2, a.free[:, None, :] | b.free[None, :, :], quantum)
    sums = torch.minimum(p1, p2).sum(dim=2), torch.maximum(p1, p2).sum(dim=2)
    return _most(a.least, b.least), *sums, positive, negative


def chain_rank1(
    low: Tensor, high: Tensor, b: Tensor, acc: Accumulator, fmt: Format, b_fmt: Format, b_high: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A wider interval of the same chain by matrix products alone: arguments and result as of :func:`chain`."""
    x1 = torch.zeros((low.shape[0], b.shape[0]), dtype=torch.float64, device=b.device)
    x2, error = torch.zeros_like(x1), torch.zeros_like(x1)
    b2 = b if b_high is None else b_high
    ea, eb = _exponents(low, high, fmt)[0], _exponents(b, b2, b_fmt)[0]
    for step, start in enumerate(range(0, b.shape[1], acc.group)):
        s = slice(start, start + acc.group)
        top = ea[:, s].amax(dim=1)[:, None] + eb[:, s].amax(dim=1)[None, :]
        largest = torch.maximum(power(top), floor_power(torch.maximum(x1.abs(), x2.abs()) + error))
        error = error + (acc.group + (1 if step else 0)) * 2.0**-acc.align * largest
        d1, d2 = _hull(low[:, s], high[:, s], b[:, s], b2[:, s])
        x1, x2 = x1 + d1, x2 + d2
        error = error + 2.0**-acc.out * floor_power(torch.maximum(x1.abs(), x2.abs()) + error)
    return x1 - error, x2 + error


def _tile(
    boxes: Sequence[Box],
    b_ends: tuple[Tensor, Tensor],
    b_scale: Tensor,
    block: int,
    b_rows: int,
    acc: Accumulator | None,
    tight: bool,
    b_fmt: Format,
) -> tuple[Tensor, Tensor, Tensor]:
    (b, b2), k = b_ends, b_ends[0].shape[1]
    shape = (boxes[0].low.shape[0], b.shape[0])
    down, up, size = (torch.zeros(shape, dtype=torch.float64, device=b.device) for _ in range(3))
    open_ = torch.zeros(down.shape, dtype=torch.bool, device=b.device)
    whole = (torch.zeros_like(down), torch.zeros_like(down))  # the unscaled sum, which one pair of scales may multiply
    for start, stop, at in _spans(k, block, acc):
        columns = decode(b_scale[:, at]).repeat_interleave(b_rows)[None, : b.shape[0]]
        part, part2 = b[:, start:stop], b2[:, start:stop]
        most, largest_sum = torch.zeros_like(down), torch.zeros_like(down)
        (p1, p2), (least, greatest) = ([torch.full_like(down, x) for x in (torch.inf, -torch.inf)] for _ in range(2))
        for j, box in enumerate(boxes):
            rows = _differing(boxes, j, slice(start, stop), at)
            low, high = box.low[rows, start:stop], box.high[rows, start:stop]
            s1, s2 = box.scale_low[rows, at, None], box.scale_high[rows, at, None]
            if acc is None:
                ends = _hull(low, high, part, part2)
                both = torch.maximum(low.abs(), high.abs()) @ torch.maximum(part.abs(), part2.abs()).T
                most[rows] = torch.maximum(most[rows], both * s2 * columns.abs())
            else:
                b_high = None if b is b2 else part2
                ends = (chain if tight else chain_rank1)(low, high, part, acc, box.fmt, b_fmt, b_high)
            largest_sum[rows] = torch.maximum(largest_sum[rows], torch.maximum(ends[0].abs(), ends[1].abs()))
            least[rows] = torch.minimum(least[rows], ends[0])
            greatest[rows] = torch.maximum(greatest[rows], ends[1])
            corners = torch.stack([s * columns * end for s in (s1, s2) for end in ends])
            p1[rows] = torch.minimum(p1[rows], corners.amin(dim=0))
            p2[rows] = torch.maximum(p2[rows], corners.amax(dim=0))
        size = size + most
        largest = torch.stack([box.scale_high[:, at] for box in boxes]).amax(dim=0).clamp(min=1.0)
        scales = largest[:, None] * columns.abs().clamp(min=1.0)
        down, up, reach = _promoted(down, up, p1, p2, tiny=ETA * (largest_sum + scales), rounded=acc is not None)
        if at == 0:
            whole = (whole[0] + least, whole[1] + greatest)
            summed = torch.maximum(whole[0].abs(), whole[1].abs()) * (1 + 2 * U * k)
            largest_sum = torch.maximum(
                largest_sum, summed
            )  # one block of scales: they may multiply the promoted sum of its chains
        reach = torch.maximum(reach, scales * largest_sum.clamp(min=1.0))
        open_ |= may_overflow(reach)
    if acc is None:
        n = k + 4
        gamma = n * U / (1 - n * U) * (1 + 2.0**-20)
        largest_product = boxes[0].fmt.max_finite * b_fmt.max_finite
        of_rows = torch.stack([box.scale_high.amax(dim=1) for box in boxes]).amax(dim=0)
        most_scale = of_rows.clamp(min=max(1.0, float(b_scale.abs().max())))[:, None]
        width = gamma * size + ETA * n * largest_product * most_scale
        down, up = down - width, up + width
    return down, up, open_


def _promoted(
    down: Tensor, up: Tensor, p1: Tensor, p2: Tensor, *, tiny: Tensor, rounded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The running sum's interval after a block in ``[p1, p2]``: roundings of the scales and of the sum.

    ``tiny`` is what an underflowing product of scales, times the accumulator, may be off by.
    """
    part = torch.maximum(p1.abs(), p2.abs())
    d, u = down + p1, up + p2
    total = torch.maximum(d.abs(), u.abs())
    error = (3 * U * part + U * total) * (1 + 2.0**-16) + 4 * tiny
    error = torch.where(part > 0, error, torch.zeros_like(error))
    if not rounded:  # float32 in any order: counted once, at the end; here only the float64 evaluation
        error = 2.0**-49 * (part + total)
    return d - error, u + error, total + part + error


def _differing(boxes: Sequence[Box], j: int, k: slice, at: int) -> Tensor:
    """Rows for which alternative ``j`` is not the one before it, in one block; all rows for the first."""
    box, before = boxes[j], boxes[max(0, j - 1)]
    differs = (box.scale_low[:, at] != before.scale_low[:, at]) | (box.scale_high[:, at] != before.scale_high[:, at])
    differs |= ((box.low[:, k] != before.low[:, k]) | (box.high[:, k] != before.high[:, k])).any(dim=1)
    return torch.nonzero(differs | (j == 0))[:, 0]


def _hull(low: Tensor, high: Tensor, b: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
    """An interval of ``a @ b.T``; where ``b`` is an interval, by its middle and radius."""
    middle = b if b is b2 else (b + b2) / 2
    plus, minus = middle.clamp(min=0), middle.clamp(max=0)
    down, up = low @ plus.T + high @ minus.T, high @ plus.T + low @ minus.T
    if b is not b2:
        radius = torch.maximum(low.abs(), high.abs()) @ ((b2 - b) / 2).T
        down, up = down - radius, up + radius
    return down, up


def _losses(p1: Tensor, p2: Tensor, free: Tensor, quantum: Tensor) -> tuple[Tensor, Tensor]:
    """Most that truncation takes from the positive products, and from the negative ones."""
    q = quantum[..., None]
    rest = p1 - torch.trunc(p1 / q) * q  # of the sign of p1
    positive = torch.where(free, torch.maximum(p1, p2).minimum(q), rest).clamp(min=0)
    negative = torch.where(free, torch.maximum(-p1, -p2).minimum(q), -rest).clamp(min=0)
    return positive.sum(dim=-1), negative.sum(dim=-1)


def _truncation(largest: Tensor, exact_below: Tensor, acc: Accumulator) -> Tensor:
    loss = 2.0**-acc.out * floor_power(largest)
    return torch.where(largest < exact_below, torch.zeros_like(loss), loss)


def _exponents(low: Tensor, high: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Largest exponent that values in ``[low, high]`` may have, and the least they must have (``NONE``: maybe zero)."""
    e1, e2 = exponents(low, fmt), exponents(high, fmt)
    sure = (low > 0) | (high < 0)
    return torch.maximum(e1, e2), torch.where(sure, torch.minimum(e1, e2), NONE)


def _spans(k: int, block: int, acc: Accumulator | None) -> list[tuple[int, int, int]]:
    """(first k, end k, scale block) of every chain."""
    spans = []
    for at, first in enumerate(range(0, k, block)):
        end = min(k, first + block)
        length = end - first if acc is None or acc.promotion is None else acc.promotion
        spans += [(start, min(end, start + length), at) for start in range(first, end, length)]
    return spans
