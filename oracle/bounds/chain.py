"""Bounds of one chain of fused steps, before any scale: the error of the accumulator of one promotion interval.

Notation: ``p = a*b`` exact products, ``e = E(a) + E(b)`` their nominal exponents (``E`` is the exponent of a normal,
``emin`` of a subnormal; zeros take no part), ``x`` the exact prefix after a step and ``c`` the computed one, ``t``
the alignment bits, ``to`` the output bits, ``pw(v) = 2**floor(log2 v)``. Lemmas, all from the definition of a step:

L1  truncation of ``p`` to a multiple of ``q`` loses ``|p| mod q``, toward zero.
L2  if ``q`` divides ``q'`` then ``|p| mod q <= |p| mod q'``: an upper bound of the alignment exponent bounds each loss.
L3  truncating the sum ``S`` to ``to`` bits loses less than ``2**-to pw(S)``, and nothing if
    ``|S| < 2**(m + 1 + to - t)``, as ``S`` is a multiple of ``2**(m - t)``.
L4  ``c`` itself is truncated only in steps whose largest product exponent exceeds ``E(c)``.

Exponents of the alignment, of ``c`` and of a result are at least -126, so in L1 to L4 ``m``, and ``pw`` of a non-zero
value, are at least those of ``2**-126``. Once a prefix may exceed float32 nothing is claimed: the bound is infinite.

Every quantity is dyadic and within 53 bits for FP8 operands, so float64 evaluates the recursions exactly. For wider
operands a prefix of ``n`` products may miss the exact one by ``2**-51 n sum |p|``; that *slack* is added wherever a
prefix is looked at, and to the result.
Plain PyTorch, the readable definition; :mod:`oracle.bounds.cpu_kernels` has the same numbers faster. Not covered:
scales, promotion, output rounding (:mod:`oracle.bounds.product`).
Source: derived here from the step's definition; Blanchard, Higham, Lopez, Mary, Pranesh (SISC 42(3), 2020) is the
classical form that these sharpen.
NaN and infinities count as zeros in an operand: the comparison overlays the results that they enter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from oracle.bounds.accumulator import Accumulator
from oracle.numbers.formats import Format
from oracle.tensorcore.instructions import Order
from oracle.truth.gemm import NO_EXPONENT, exponents

NONE = NO_EXPONENT
EMIN32 = -126  # a float32 accumulator is never aligned below this exponent
LEAST = 2.0**EMIN32
OVERFLOW = (2.0 - 2.0**-23) * 2.0**127
TILES = (32, 64, 128, 256)  # products of a tile of K in published kernels
MOST_STRIDE = 16  # partial sums over which the tiles of K are distributed round-robin


@dataclass(frozen=True)
class Operand:
    """Decoded values ``[R, K]`` (float64) and their nominal exponents (int64, ``NONE`` for zeros); or those of several
    chains, ``[C, R, K]``, which are computed together.

    ``counted``: exponents in which zeros have one too, where they may take part in the alignment; else None.
    """

    value: Tensor
    exponent: Tensor
    counted: Tensor | None = None

    def steps(self, start: int, stop: int) -> Operand:
        counted = None if self.counted is None else self.counted[..., start:stop]
        return Operand(self.value[..., start:stop], self.exponent[..., start:stop], counted)

    def together(self, spans: Sequence[tuple[int, int]]) -> Operand:
        """Columns of one length, each span after the one before, as chains of their own."""
        whole, shape = self.steps(spans[0][0], spans[-1][1]), (len(spans), spans[0][1] - spans[0][0])

        def apart(x: Tensor) -> Tensor:
            return x.reshape(*x.shape[:-1], *shape).movedim(-2, 0).contiguous()

        counted = None if whole.counted is None else apart(whole.counted)
        return Operand(apart(whole.value), apart(whole.exponent), counted)


def operand(value: Tensor, fmt: Format) -> Operand:
    """Finite float64 ``value`` of any shape, drawn from ``fmt``, with its nominal exponents."""
    return Operand(value, exponents(value, fmt))


def residue(a: Operand, b: Operand, acc: Accumulator) -> tuple[Tensor, Tensor, Tensor]:
    """B2: ``x, l, h`` with ``l <= c - x <= h``, float64 ``[M, N]`` or ``[C, M, N]``, sign-aware and attained; needs
    every product.

    With ``mg`` the largest product exponent of the step and ``mbar = max(mg, floor(log2 max|x + [l, h]|))``, the
    products lose at most their residues modulo ``2**(mbar - t)``, the accumulator at most ``2**(mg - t)`` where its
    exponent may lie below ``mg``, and the output truncation ``2**-to pw`` of the largest possible sum (L1 to L4). Where
    zeros may be counted, ``mg`` lies between the exponent without them and that with them.
    """
    a, b = _ordered(a, acc), _ordered(b, acc)
    x = zeros(a, b)
    low, high, slack = (torch.zeros_like(x) for _ in range(3))
    for start, stop in _steps(a, acc):
        sa, sb = a.steps(start, stop), b.steps(start, stop)
        slack = slack + float64_slack(sa, sb, a.value.shape[-1], acc)
        p = sa.value[..., :, None, :] * sb.value[..., None, :, :]
        top, least = (sa.exponent[..., :, None, :] + sb.exponent[..., None, :, :]).amax(dim=-1), None
        if sa.counted is not None and sb.counted is not None:
            counted = (sa.counted[..., :, None, :] + sb.counted[..., None, :, :]).amax(dim=-1)
            top, least = torch.maximum(counted, top), top
        x, low, high = residue_step(x, low, high, slack, p, top, acc, least)
    return x, low - slack, high + slack


def _ordered(x: Operand, acc: Accumulator) -> Operand:
    """Columns in the order in which the groups of each instruction take them; a short half is filled with zeros."""
    if acc.order is not Order.INTERLEAVED:
        return x
    reordered: list[tuple[Tensor, Tensor]] = []
    for start in range(0, x.value.shape[-1], acc.length):
        part = x.steps(start, start + acc.length)
        first = torch.arange(part.value.shape[-1], device=x.value.device) % 4 < 2
        short = acc.length // 2 - int(first.sum())
        filled = (torch.nn.functional.pad(part.value[..., first], (0, short)), part.value[..., ~first])
        top = torch.nn.functional.pad(part.exponent[..., first], (0, short), value=NONE)
        reordered.append((torch.cat(filled, dim=-1), torch.cat([top, part.exponent[..., ~first]], dim=-1)))
    return Operand(*(torch.cat(parts, dim=-1) for parts in zip(*reordered, strict=True)))


def residue_step(
    x: Tensor,
    low: Tensor,
    high: Tensor,
    slack: Tensor,
    p: Tensor,
    top: Tensor,
    acc: Accumulator,
    least: Tensor | None = None,
    merged: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of :func:`residue`: addends ``p [M, N, G]`` (float64) whose largest exponent is ``top [M, N]`` (int64).

    ``x``, ``low``, ``high`` and ``slack`` are float64 ``[M, N]``; the first three are returned as they are after the
    step, of the same shape. ``slack`` bounds what ``x``, before and after the step, may miss.

    ``merged`` ``[M, N, G']``: sums of these addends, of which each may be cut as one; what either way loses is allowed.
    ``least`` ``[M, N]``: the largest exponent is not known; it lies between ``least`` (``NONE``: no addend aligns
    anything, and then the sum is the accumulator's own) and ``top``. L1, L2 and L4 take its upper bound, L3 its lower
    one.
    """
    live = top > NONE // 2
    sure = top if least is None else least
    added = sure > NONE // 2
    sure = torch.where(added, sure.clamp(min=EMIN32), sure)
    magnitude = torch.maximum((x + low).abs(), (x + high).abs()) + slack
    top = torch.where(live, top.clamp(min=EMIN32), top)
    quantum = power(torch.maximum(top, exponent_floor(magnitude)) - acc.align)
    positive, negative = residues(p, quantum)
    if merged is not None:
        positive, negative = map(torch.maximum, (positive, negative), residues(merged, quantum))
    lost = torch.where(_may_be_below(x, low - slack, high + slack, top), power(top - acc.align), torch.zeros_like(x))
    after = x + p.sum(dim=-1)
    l1 = low - positive - torch.where(x + high + slack > 0, lost, torch.zeros_like(x))
    h1 = high + negative + torch.where(x + low - slack < 0, lost, torch.zeros_like(x))
    exact_below = power(torch.where(sure - acc.align < EMIN32 - acc.out, NONE, sure + 1 + acc.out - acc.align))
    cut_down, cut_up = (_truncation(e + slack, exact_below, acc) for e in (after + h1, -(after + l1)))
    l2, h2 = l1 - torch.where(added, cut_down, 0.0), h1 + torch.where(added, cut_up, 0.0)
    over = torch.maximum((after + l2).abs(), (after + h2).abs()) > OVERFLOW
    l2, h2 = torch.where(over, -torch.inf, l2), torch.where(over, torch.inf, h2)
    return after, torch.where(live, l2, low), torch.where(live, h2, high)


def any_order(a: Operand, b: Operand, acc: Accumulator) -> tuple[Tensor, Tensor, Tensor]:
    """B3: ``x, l, h``, float64 ``[M, N]`` or ``[C, M, N]``, for any order and grouping of the products in at most
    ``ceil(K / acc.group)`` steps.

    Every partial sum lies in ``[-T, T]``, ``T = max(P+, P-) + E``; all residues are taken at its exponent. The fixed
    point is reached by iterating upward until the alignment exponent no longer grows. Where nothing is promoted, the
    steps may form any number of chains whose results are added in float32: as many additions as steps at most, each of
    which errs by ``2**-24 pw(T)``.
    """
    p = a.value[..., :, None, :] * b.value[..., None, :, :]
    top = (a.exponent[..., :, None, :] + b.exponent[..., None, :, :]).amax(dim=-1)
    live = top > NONE // 2
    positive, negative = p.clamp(min=0).sum(dim=-1), (-p).clamp(min=0).sum(dim=-1)
    slack = float64_slack(a, b, a.value.shape[-1], acc)
    top = torch.where(live, top.clamp(min=EMIN32), top)
    steps = len(_steps(a, acc))
    relative = 2.0**-acc.out + (2.0**-24 if acc.promotion is None else 0.0)
    largest = torch.maximum(positive, negative) + slack

    def once(error: Tensor) -> tuple[Tensor, Tensor]:
        total = largest + error
        plus, minus = residues(p, power(torch.maximum(top, exponent_floor(total)) - acc.align))
        drift = (steps - 1) * power(top - acc.align) + steps * relative * floor_power(total).clamp(min=LEAST)
        return torch.where(live, -(plus + drift), 0.0), torch.where(live, minus + drift, 0.0)

    low, high = fixed_point(once, largest)
    return p.sum(dim=-1), low - slack, high + slack


def split(a: Operand, b: Operand, acc: Accumulator) -> tuple[Tensor, Tensor, Tensor]:
    """B2 over splits: ``x, l, h``, float64 ``[M, N]`` or ``[C, M, N]``, when K is cut into partial sums, no matter
    where.

    Every chain sums consecutive steps, or those that share a residue of their tile's number modulo up to
    ``MOST_STRIDE`` (tiles of ``TILES`` products), in ascending order; its result joins the others in float32, in any
    order. With ``R`` the largest exact sum of consecutive steps of any such subsequence (:func:`reach`) and ``E`` the
    error, an accumulator never exceeds ``R + E``. So a step loses at most its products' residues modulo ``2**(mbar -
    t)``, ``mbar = max(mg, floor(log2(R + E)))``, the accumulator's ``2**(mg - t)`` and ``2**-to`` times ``pw(R + E)``
    (L1 to L4), and an addition ``2**-24 pw(T)``, ``T`` the largest sum of products of one sign and ``E``.
    """
    a, b = _ordered(a, acc), _ordered(b, acc)
    steps = [(a.steps(*k), b.steps(*k)) for k in _steps(a, acc)]
    slack = float64_slack(a, b, a.value.shape[-1], acc)
    x, largest, one_sign = partial_sums(steps, acc.group, slack)

    def once(error: Tensor) -> tuple[Tensor, Tensor]:
        magnitude = largest + error
        high = (len(steps) - 1) * 2.0**-24 * floor_power(one_sign + error)
        low = -high
        for sa, sb in steps:
            p = sa.value[..., :, None, :] * sb.value[..., None, :, :]
            top = (sa.exponent[..., :, None, :] + sb.exponent[..., None, :, :]).amax(dim=-1)
            live = top > NONE // 2
            top = torch.where(live, top.clamp(min=EMIN32), top)
            plus, minus = residues(p, power(torch.maximum(top, exponent_floor(magnitude)) - acc.align))
            lost = power(top - acc.align) + 2.0**-acc.out * floor_power(magnitude).clamp(min=LEAST)
            low = torch.where(live, low - plus - lost, low)
            high = torch.where(live, high + minus + lost, high)
        return low, high

    low, high = fixed_point(once, largest, one_sign)
    return x, low - slack, high + slack


def partial_sums(steps: Sequence[tuple[Operand, Operand]], group: int, slack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The exact sum, the largest one of any chain of ``steps`` (:func:`reach`), and that of products of one sign:
    float64 ``[M, N]`` or ``[C, M, N]``.

    The last two include ``slack``, of the same shape.
    """
    sums = torch.stack([sa.value @ sb.value.mT for sa, sb in steps], dim=-1)
    one_sign = torch.maximum(sums.clamp(min=0).sum(dim=-1), (-sums).clamp(min=0).sum(dim=-1)) + slack
    return sums.sum(dim=-1), reach(sums, group) + slack, one_sign


def fixed_point(once: Callable[[Tensor], tuple[Tensor, Tensor]], *held: Tensor) -> tuple[Tensor, Tensor]:
    """``l, h`` of an error that depends on itself through the exponents of ``held + error``; infinite where none is.

    ``held``: float64 tensors of one shape, that of both results. ``once`` gives ``l, h`` for an error of at most its
    argument, of which it looks at those exponents alone. So an element whose error no longer grows stays as it is while
    others are computed with it.
    """
    error = torch.zeros_like(held[0])
    while True:  # an exponent grows each time, up to that of OVERFLOW
        low, high = once(error)
        grown = torch.maximum(-low, high)
        over = held[0] + grown > OVERFLOW
        moves = torch.stack([floor_power(x + grown) > floor_power(x + error) for x in held]).any(dim=0) & ~over
        if not bool(moves.any()):
            return low.masked_fill(over, -torch.inf), high.masked_fill(over, torch.inf)
        error = torch.where(moves, grown, error)


def reach(sums: Tensor, group: int) -> Tensor:
    """The largest magnitude of a sum of consecutive steps, of all or of those of every n-th tile: float64 ``[M, N]`` of
    ``sums [M, N, S]``.

    A sum of consecutive steps is a difference of two prefixes, so the largest is the range of the prefixes and 0.
    """
    largest = torch.zeros_like(sums[..., 0])
    for of in subsequences(sums.shape[-1], group):
        prefix = torch.cumsum(sums[..., torch.tensor(of, dtype=torch.int64, device=sums.device)], dim=-1)
        largest = torch.maximum(largest, prefix.amax(dim=-1).clamp(min=0) - prefix.amin(dim=-1).clamp(max=0))
    return largest


@lru_cache(maxsize=64)
def subsequences(steps: int, group: int) -> tuple[tuple[int, ...], ...]:
    """The steps, of so many of ``group`` products, that one chain may sum without a gap: all, or those of every n-th
    tile, each list once."""
    every = dict[tuple[int, ...], None]()
    for tile in TILES:
        number = [step // max(1, tile // group) for step in range(steps)]
        for stride in range(1, min(MOST_STRIDE, number[-1] + 1) + 1):
            for first in range(stride):
                every[tuple(step for step, of in enumerate(number) if of % stride == first)] = None
    return tuple(every)


def floor_power(x: Tensor) -> Tensor:
    """``pw(x) = 2**floor(log2 |x|)`` of float64 ``x`` of any shape (0 for 0), float64 of the same shape, from the
    exponent bits. NaN and infinity give infinity."""
    return (x.view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)


def exponent_floor(x: Tensor) -> Tensor:
    """``max(floor(log2 x), -126)`` for finite non-negative float64 ``x`` of any shape, int64 of the same shape;
    ``NONE`` for 0."""
    exponent = (torch.frexp(x)[1].to(torch.int64) - 1).clamp(min=EMIN32)
    return torch.where(x == 0, torch.full_like(exponent, NONE), exponent)


def power(exponent: Tensor) -> Tensor:
    """``2.0**exponent`` of int64 ``exponent`` of any shape as float64 of the same shape, from its bits; 0 below the
    normal range."""
    return ((exponent + 1023).clamp(0, 2046) << 52).view(torch.float64)


def _steps(a: Operand, acc: Accumulator) -> list[tuple[int, int]]:
    length = a.value.shape[-1]
    return [(k, min(length, k + acc.group)) for k in range(0, length, acc.group)]


def zeros(a: Operand, b: Operand) -> Tensor:
    """A zero for every result of these operands, float64 ``[M, N]`` or ``[C, M, N]``."""
    shape = (*a.value.shape[:-1], b.value.shape[-2])
    return torch.zeros(shape, dtype=torch.float64, device=a.value.device)


def float64_slack(a: Operand, b: Operand, length: int, acc: Accumulator) -> Tensor:
    """What float64 may miss of sums over these columns, which are part of a chain of ``length`` products: float64 ``[M,
    N]`` or ``[C, M, N]``."""
    return zeros(a, b) if acc.exact else length * 2.0**-51 * (a.value.abs() @ b.value.abs().mT)


def residues(p: Tensor, quantum: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the last axis of ``|p| mod quantum`` for the positive and for the negative products: float64 ``[M, N]``
    each.

    ``p``: float64 ``[M, N, G]``; ``quantum``: float64 ``[M, N]``, powers of two, or 0, which gives NaN.
    """
    q = quantum[..., None]
    rest = p - torch.trunc(p / q) * q  # of the sign of p
    return rest.clamp(min=0).sum(dim=-1), (-rest).clamp(min=0).sum(dim=-1)


def _may_be_below(x: Tensor, low: Tensor, high: Tensor, top: Tensor) -> Tensor:
    """Whether ``[x + low, x + high]`` holds 0 or a value of exponent below ``top``."""
    left, right = x + low, x + high
    nearest = torch.where((left <= 0) & (right >= 0), torch.zeros_like(x), torch.minimum(left.abs(), right.abs()))
    return nearest < power(top)


def _truncation(largest: Tensor, exact_below: Tensor, acc: Accumulator) -> Tensor:
    """Most that truncating a sum of at most ``largest`` loses; 0 where it is negative, or small enough to be exact."""
    loss = 2.0**-acc.out * floor_power(largest).clamp(min=LEAST)
    return torch.where(largest < exact_below, torch.zeros_like(loss), loss)
