"""B2 and B3 of a whole scaled product: chains of :mod:`oracle.bounds.chain`, promoted block by block.

A chain runs over ``min(promotion, scale block)`` products. Scales that enter as exponents inside the instruction
(UE8M0) are multiplied into the operands first, which is exact, and the chain runs over all of K; block-scaled FP4 adds
sums of 16 products times their scales instead (:func:`oracle.bounds.steps.scaled_groups`). Operands may be of any
dtype that holds their values: FP4 has no torch dtype of one value per element, and E4M3 holds every FP4 value.

Where an instruction changes its operands (TF32 drops 13 bits of a float32, CDNA2 flushes subnormals), the bound is that
of the changed ones, moved by the difference of the two exact sums.

From the accumulators' bounds to the bound of the whole scaled sum.

With ``sigma_b`` the exact product of the scales of block ``b``, ``u = 2**-24`` and ``e_b = max(-l_b, h_b)``:

    lo = sum_b sigma_b l_b - Phi,   hi = sum_b sigma_b h_b + Phi,   y_b = sum_{i <= b} sigma_i x_i
    Phi += 3 u |sigma_b| (|x_b| + e_b) + u (max(|y_b + lo_b|, |y_b + hi_b|) + Phi) + eta (1 + |x_b| + e_b + |sa| + |sb|)

The three roundings cover every epilogue in use: ``fma(fl(sa sb), acc, sum)``, ``(acc sa) sb``, ``sa (sb acc)``, a
separate multiply and add, and scales applied once after the promoted sum. ``eta = 2**-149`` is the absolute error of
an underflowing float32 operation (gradual underflow). Blocks that are exactly zero cost nothing: adding 0 is exact.
``Phi`` is finally multiplied by ``1 + 2**-20``, which covers second-order terms and the float64 evaluation: both are
below ``2**-26`` of its first-order part for fewer than ``2**24`` blocks. No tensor is divided by a number here: torch
multiplies by the rounded reciprocal on a GPU and divides on the CPU, so the bits would depend on the device.

Where a float32 intermediate may exceed the largest float32, nothing is claimed: the element is ``open``. A kernel that
promotes unscaled chains and scales their sum once, at its end, meets ``sb acc`` or ``sa acc`` with ``acc`` the whole
sum, which no single chain reaches (:func:`scaled_at_the_end`); which of the two it computes is the epilogue's, and one
bound serves them all: either counts. Underflow needs no case of its own: gradual underflow errs by ``eta`` at most, an
inner product's is multiplied by the outer scale, that of ``fl(sa sb)`` by the accumulator, and ``Phi`` has all three.
Source: standard rounding-error analysis (Higham, Accuracy and Stability, ch. 2 and 3); derived here.

Elements that no admitted arithmetic rounds (:func:`unrounded`): there only one value before the store is right.

Let every product be a multiple of ``q = q_a q_b`` (powers of two that divide all elements of ``a`` and of ``b``),
``T_c = sum |a| |b|`` over one chain ``c``, ``e`` the largest nominal product exponent, all scales powers of two, and
``sigma_c`` the scale of the chain. Nothing is rounded before the store when

    2**(e - t) <= q,   T_c < 2**(min(t, to) + 1) q for every chain      (an aligner of t bits, result to + 1 bits)
    T_c < 2**24 q for every chain                                       (sums without an aligner)
    sum_c sigma_c T_c + |bias| + |c| < 2**24 min(q min_c sigma_c, q_bias, q_c)  (float32: promotion, scales, bias, c)

and no float32 intermediate leaves the normal range; where subnormals are flushed, no operand may be one. Proof: every
partial sum, in any order, is a multiple of the quantum and below the stated multiple of it, so it is representable,
and an aligner keeps it (an accumulator has an exponent of at most ``log2 T_c``, also where it is floored or dropped
below 25 binades); a product with a power of two is exact. Without an accumulator (float32 in any order) the last line
alone is needed. Source: derived here; the theorem behind "first exact, then close". Not covered: scales inside the
instruction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from oracle.bounds.accumulator import Accumulator, chains
from oracle.bounds.chain import EMIN32, Operand, any_order, operand, residue, split
from oracle.bounds.interval import Interval
from oracle.bounds.steps import scaled_groups, stepwise
from oracle.bounds.steps import split as stepwise_split
from oracle.errors import NumericsError
from oracle.numbers.formats import by_name, decode
from oracle.numbers.rounding import Overflow, Rounding, round_to
from oracle.tensorcore.instructions import Sum
from oracle.truth.gemm import Decoded, Exact, ScaledProduct, exact, quantum_of, zero_nonfinite

INF = torch.inf
U = 2.0**-24
ETA = 2.0**-149
FLUSHED = 3 * 2.0**-126
"""An addition in memory may take either addend and its sum for zero where they are subnormal (PTX ISA 9.0, ``red``:
``.add.f32`` on global memory)."""
FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
BF16_MAX = (2.0 - 2.0**-7) * 2.0**127
REACH = FLOAT32_MAX * (1 - 2.0**-20)
"""No float32 intermediate that is below this, but for terms of second order and a float64 evaluation, overflows."""


def may_overflow(x: Tensor) -> Tensor:
    """Bool of the shape of float64 ``x``: which magnitudes float32 may not hold. NaN and infinity are among them."""
    return ~(x < REACH)


class Promotion:
    """Running bound of a promoted sum; feed the blocks in ascending order, then read :meth:`interval`.

    Unordered, the blocks may be added in any order and through any number of partial sums: ``B`` blocks take fewer than
    ``B`` additions that round, and every partial sum lies in ``[-T, T]``, ``T`` the sum of the blocks' ends of one sign
    plus ``Phi``. So ``Phi = (Phi' + (B - 1)(u T + eta)) / (1 - B u)``, ``Phi'`` without the additions. A scale that is
    applied to a partial sum errs by ``u`` of it, no more than ``u`` of each of its blocks.
    NaN and infinite bounds make an element open.
    """

    def __init__(self, like: Tensor, *, ordered: bool = True) -> None:
        self._y, self._lo, self._hi, self._phi = (torch.zeros_like(like) for _ in range(4))
        self._plus, self._minus, self._reach = (torch.zeros_like(like) for _ in range(3))
        self._ordered, self._added = ordered, 0
        self._open = torch.zeros(like.shape, dtype=torch.bool, device=like.device)

    @classmethod
    def from_sums(cls, sums: Sequence[Tensor], opened: Tensor, unordered: int | None) -> Promotion:
        """The state that an engine computed of ``unordered`` chains, or of ordered ones (None); the tensors are used as
        they are.

        ``sums``: float64 ``[M, N]`` each, four of ordered chains, seven of unordered ones; ``opened``: bool ``[M, N]``.
        """
        promotion = cls(sums[0], ordered=unordered is None)
        promotion._y, promotion._lo, promotion._hi, promotion._phi = sums[:4]
        if unordered is not None:
            promotion._added, (promotion._plus, promotion._minus, promotion._reach) = unordered, sums[4:]
        promotion._open = opened
        return promotion

    @property
    def rows(self) -> int:
        return self._y.shape[0]

    def only(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        """The one chain of a kernel that scales inside the instruction, ``x, low, high`` float64 ``[M, N]``: it is the
        sum, and nothing is rounded."""
        self._y, self._lo, self._hi = x, low, high
        self._open |= may_overflow(torch.maximum((x + low).abs(), (x + high).abs()))

    def add(self, a_scale: Tensor, b_scale: Tensor, x: Tensor, low: Tensor, high: Tensor) -> None:
        """Add chains in their order: ``a_scale [C, M or 1, 1]``, ``b_scale [C, 1, N]`` float64, ``x, low, high
        [C, M, N]``."""
        sigma, a_size, b_size = a_scale * b_scale, a_scale.abs(), b_scale.abs()
        sigma_size = sigma.abs()
        size = x.abs() + torch.maximum(-low, high)
        left, right = sigma * low, sigma * high
        low, high, y = torch.minimum(left, right), torch.maximum(left, right), sigma * x
        rounding, tiny = 3 * U * sigma_size * size, ETA * (1 + size + a_size + b_size)
        largest, live = torch.maximum(torch.maximum(a_size, b_size), sigma_size) * size, size > 0
        if self._ordered:
            total = self._after(y, low, high)
            reach = []
            for i in range(len(x)):
                magnitude = total[i] + self._phi
                more = rounding[i] + U * magnitude + tiny[i]
                reach.append(magnitude + more)
                self._phi = torch.where(live[i], self._phi + more, self._phi)
            reached = torch.maximum(largest, torch.stack(reach))
        else:  # the additions' roundings are added at the end
            self._added += len(x)
            rounding = rounding + tiny
            self._y, self._lo, self._hi = _added(self._y, y), _added(self._lo, low), _added(self._hi, high)
            self._plus = _added(self._plus, (y + high).clamp(min=0))
            self._minus = _added(self._minus, (-y - low).clamp(min=0))
            self._reach = _added(self._reach, torch.maximum(largest, size))  # it never falls: the last is the largest
            self._phi = _added(self._phi, torch.where(live, rounding, 0.0))
            self._open |= may_overflow(self._reach)
            reached = rounding
        reached = torch.maximum(reached, sigma_size)
        self._open |= may_overflow(reached).any(dim=0)

    def _after(self, y: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Add these and give the largest magnitude of the sum after each, ``[C, M, N]``."""
        ends = []
        for one, least, most in zip(y, low, high, strict=True):
            self._y, self._lo, self._hi = self._y + one, self._lo + least, self._hi + most
            ends.append(torch.maximum((self._y + self._lo).abs(), (self._y + self._hi).abs()))
        return torch.stack(ends)

    def interval(self, *summands: tuple[Tensor, float], name: str, alpha: float | None, weak: bool = False) -> Interval:
        """The bound of the whole sum times ``alpha`` (the product of its factors and one with the sum, each rounded)
        and of ``summands`` added to it, float64 that broadcast against ``[M, N]``, each by one more float32 addition,
        whose absolute error at underflow stands beside it."""
        phi = self._phi
        if not self._ordered:
            total = torch.maximum(self._plus, self._minus)
            phi = (phi + (self._added - 1) * (U * total + ETA)) * (1 / (1 - self._added * U))
            self._open |= may_overflow(total + phi)
        if alpha is not None:
            size = torch.maximum((self._y + self._lo).abs(), (self._y + self._hi).abs()) + phi
            ends = alpha * self._lo, alpha * self._hi
            self._y, self._lo, self._hi = alpha * self._y, torch.minimum(*ends), torch.maximum(*ends)
            phi = abs(alpha) * (phi + 2 * U * (1 + U) * size) + ETA * (2 + size)
            self._open |= may_overflow(max(1.0, abs(alpha)) * size)
        for summand, least in summands:
            self._y = self._y + summand
            total = torch.maximum((self._y + self._lo).abs(), (self._y + self._hi).abs()) + phi
            phi = phi + U * total + least
            self._open |= may_overflow(total)
        phi = phi * (1 + 2.0**-20)
        return Interval(self._lo - phi, self._hi + phi, name, weak, self._open)


Chain = Callable[[Operand, Operand, Accumulator], tuple[Tensor, Tensor, Tensor]]
KEPT = 1 << 12  # chains of a product that are cached for another bound of it
CUBE, CUBE_ON_DEVICE = 1 << 22, 1 << 26  # products of one step held at a time by the definition


def residue_bound(product: ScaledProduct, acc: Accumulator) -> Interval:
    """B2 of ``product``: known grouping, every product's residue; attained, so it cannot be improved.

    Accumulators that do not add by fused truncating steps take the bound of :mod:`oracle.bounds.steps` instead. That of
    a split one adds the partial sums in any order.
    """
    chain = residue if acc.kind is Sum.FUSED else stepwise

    def bound(part: ScaledProduct) -> Interval:
        return _bound(part, acc, chain, acc.length, f"residue bound of {acc.name}", ordered=acc.split is None)

    return scaled_at_the_end(product, acc, bound(product), lambda part: (exact(part), bound(part)))


def split_bound(product: ScaledProduct, acc: Accumulator) -> Interval:
    """B2 of ``product`` when K is cut into partial sums, no matter where (:func:`oracle.bounds.chain.split`).

    The chains of a promoted accumulator stay as they are (cuts lie between them), and their results are added in any
    order.
    """
    if acc.scales_inside or acc.kind is Sum.BLOCK_SCALED_GROUPS:
        raise NumericsError(f"{acc.name} applies scales inside the instruction; no bound over splits is derived for it")
    if acc.promotion is not None:
        chain = residue if acc.kind is Sum.FUSED else stepwise
    else:
        chain = split if acc.kind is Sum.FUSED else stepwise_split
    depth = max(acc.length, -(-product.K // acc.group))
    return _bound(product, acc, chain, depth, f"residue bound of {acc.name}, K split anywhere", ordered=False)


def any_order_bound(product: ScaledProduct, acc: Accumulator) -> Interval:
    """B3 of ``product``: order and grouping inside a promotion interval unknown; weak.

    The promoted chains may be added in any order, and the steps of a chain over all of K may form any number of chains.
    """
    if acc.kind is not Sum.FUSED:
        raise NumericsError(f"{acc.name} does not add by fused truncating steps; no any-order bound is derived for it")
    depth = acc.promotion or product.block
    return _bound(product, acc, any_order, depth, f"any-order bound of {acc.name} (weak)", weak=True, ordered=False)


def scaled_at_the_end(
    product: ScaledProduct,
    acc: Accumulator,
    interval: Interval,
    bounded: Callable[[ScaledProduct], tuple[Exact, Interval]],
) -> Interval:
    """``interval``, open also where the whole promoted sum times one of its scales may exceed float32.

    With ``[x + lo, x + hi]`` the interval that ``bounded`` gives the product with unit scales and no bias, the computed
    sum satisfies ``|acc| <= S = max(|x + lo|, |x + hi|)``. Neither ``sa acc``, ``sb acc`` nor a partial sum overflows
    where ``S max(1, |sa|, |sb|)`` is below the largest float32. That of each single chain is in ``interval`` already,
    and so is that of partial sums in any order, of which :class:`Promotion` bounds the sum of all magnitudes.
    """
    if acc.split is not None or acc.promotion is None or acc.scales_inside:
        return interval
    if product.B > 1 or acc.promotion >= product.K:
        return interval
    left, right = product.left, product.right
    a_scale, b_scale = (zero_nonfinite(x.scales).abs() for x in (left, right))
    most = max(1.0, float(a_scale.max()), float(b_scale.max())) * 2 * product.K
    if most * left.fmt.max_finite * right.fmt.max_finite < FLOAT32_MAX:
        return interval  # whatever the codes are
    if most * left.facts.largest * right.facts.largest < FLOAT32_MAX:
        return interval
    one = torch.ones((1, 1), dtype=torch.float32, device=product.a.device)
    value, width = bounded(replace(product, a_scale=one, b_scale=one, b_rows=product.N, bias=None, c=None, alpha=None))
    whole = torch.maximum((value.hi + width.lo).abs(), (value.hi + width.hi).abs()) + value.slack
    columns = b_scale.repeat_interleave(product.b_rows, dim=0)[: product.N, 0]
    reach = whole * torch.maximum(a_scale, columns[None, :]).clamp(min=1.0)
    # NaN and infinite operands decide the result themselves
    opened = torch.isfinite(value.hi) & may_overflow(reach)
    return replace(interval, open=opened if interval.open is None else interval.open | opened)


def with_summand(value: Exact, interval: Interval, c: Tensor) -> Interval:
    """``interval`` around ``value`` once ``c [M, N]`` (float32 or bfloat16) is added to the float32 sum: one more
    rounding, of ``c + y + e`` for every ``e`` of the interval. A NaN or infinite ``y + c`` decides the result itself.
    """
    y = value.hi + decode(c)
    total = torch.maximum((y + interval.lo).abs(), (y + interval.hi).abs()) + value.slack
    total = torch.where(torch.isfinite(y), total, 0.0)  # NaN and infinity decide the result themselves
    phi = (U * total + FLUSHED) * (1 + 2.0**-20)
    opened = may_overflow(total)
    opened = opened if interval.open is None else interval.open | opened
    return replace(interval, lo=interval.lo - phi, hi=interval.hi + phi, open=opened)


def stored_before(value: Exact, interval: Interval, c: Tensor) -> Interval:
    """``interval`` around ``value = y + c`` where ``y`` is rounded to bfloat16, or is not, before ``c [M, N]`` (float32
    or bfloat16) is added.

    ``|y + e| <= |y| + max(|lo|, |hi|)`` moves by half a unit of bfloat16 at most, or half its least subnormal. A NaN or
    infinite ``y`` decides the result itself.
    """
    y = (value.hi - decode(c)).abs() + value.slack + torch.maximum(interval.lo.abs(), interval.hi.abs())
    y = torch.where(torch.isfinite(y), y, 0.0)  # NaN and infinity decide the result themselves
    phi = (2.0**-8 * y + 2.0**-134) * (1 + 2.0**-20)
    opened = ~(y < BF16_MAX * (1 - 2.0**-8))
    opened = opened if interval.open is None else interval.open | opened
    return replace(interval, lo=interval.lo - phi, hi=interval.hi + phi, open=opened)


def check_fit(product: ScaledProduct, acc: Accumulator) -> None:
    """Refuse an accumulator that cannot compute this product at all."""
    if acc.scales_inside:
        for name, scale in (("a_scale", product.left.scales), ("b_scale", product.right.scales)):
            value = scale[~torch.isnan(scale)]  # a NaN makes its results NaN, which are judged as such
            if acc.scale_format == "float8_e8m0fnu":
                if not bool((torch.frexp(value)[0] == 0.5).all()):
                    raise NumericsError(f"{acc.name} takes UE8M0 scales; {name} holds a value that is no power of two")
            elif not bool((_in_format(value, acc.scale_format) & (value >= 0)).all()):
                raise NumericsError(f"{acc.name} takes {acc.scale_format} scales; {name} holds another value")
    elif acc.promotion is None and product.B > 1:
        raise NumericsError(
            f"{acc.name} is one chain over K and cannot apply {product.B} block scales; declare a promoted schedule"
        )
    elif acc.promotion is not None and product.B > 1 and product.block % acc.promotion:
        raise NumericsError(f"{acc.name} promotes every {acc.promotion}, no divisor of blocks of {product.block}")


def _bound(
    product: ScaledProduct, acc: Accumulator, chain: Chain, depth: int, name: str, *, ordered: bool, weak: bool = False
) -> Interval:
    product, acc = acc.lowered(product)
    check_fit(product, acc)
    acc = replace(acc, exact=not acc.scales_inside and _sums_fit(product))
    pieces = [product]
    if acc.split is not None:
        pieces = [product.over(ranges) for ranges in acc.split.pieces(product.K) if ranges]
    right = [(piece, _Side.of(piece.right, piece.b_rows, piece, acc)) for piece in pieces]
    cube = CUBE_ON_DEVICE if product.a.is_cuda else CUBE
    step = max(1, cube // (product.N * depth))
    parts: list[Interval] = []
    for start in range(0, product.M, step):
        stop = min(product.M, start + step)
        like = torch.zeros((stop - start, product.N), dtype=torch.float64, device=product.a.device)
        promotion = Promotion(like, ordered=ordered)
        for piece, b in right:
            tile = piece.rows(start, stop)
            most = max(1, cube // (tile.M * tile.N * depth))
            _tile(tile, _Side.of(tile.left, 1, tile, acc), b, acc, chain, promotion, most)
        parts.append(finished(product, start, promotion, name, weak=weak))
    return joined(parts)


def finished(product: ScaledProduct, start: int, promotion: Promotion, name: str, *, weak: bool = False) -> Interval:
    """The bound of some rows, from ``start`` on, with what follows their promoted sums."""
    bias = [] if product.bias is None else [(decode(product.bias)[None, :], ETA)]
    c = [] if product.c is None else [(decode(product.c[start : start + promotion.rows]), FLUSHED)]
    return promotion.interval(*bias, *c, name=name, alpha=None if product.alpha is None else product.factor, weak=weak)


def joined(parts: list[Interval]) -> Interval:
    """Intervals of consecutive rows as one."""
    opened = [part.open for part in parts if part.open is not None]
    low, high = (torch.cat(edges) for edges in zip(*((part.lo, part.hi) for part in parts), strict=True))
    return Interval(low, high, parts[0].name, parts[0].weak, torch.cat(opened))


def _sums_fit(product: ScaledProduct) -> bool:
    """Whether float64 holds every sum of products of one scale block: ``K max|a| max|b| <= 2**53 q_a q_b``."""
    left, right = product.left, product.right
    room = 2.0**53 * left.fmt.min_subnormal * right.fmt.min_subnormal
    length = min(product.block, product.K)
    if length * left.fmt.max_finite * right.fmt.max_finite <= room:
        return True
    return max(left.fmt.bits, right.fmt.bits) <= 8 and length * left.facts.largest * right.facts.largest <= room


@dataclass(frozen=True)
class _Side:
    """One operand as stored, and as the instruction converts it (None: unchanged)."""

    stored: Operand
    converted: Operand | None

    @classmethod
    def of(cls, x: Decoded, rows: int, product: ScaledProduct, acc: Accumulator) -> _Side:
        stored = Operand(x.number(), x.exponent())  # the comparison overlays NaN and infinity
        if acc.scales_inside:  # the block scales, powers of two, multiplied in
            factor = _spread(x.scales.nan_to_num(nan=1.0), rows, x.codes.shape[0])
            factor = factor.repeat_interleave(product.block, dim=1)[:, : product.K]
            shift = torch.frexp(factor)[1].to(torch.int64) - 1
            zeros = stored.exponent.clamp(min=EMIN32) + shift  # of an instruction that counts them (Zeros.COUNTED)
            stored = Operand(stored.value * factor, stored.exponent + shift, zeros)
        if not (acc.flushes or acc.truncates):
            return cls(stored, None)
        value = stored.value
        if acc.truncates:  # float32 to TF32, which has not its 13 low bits
            bits = value.to(torch.float32).view(torch.int32) & ~0x1FFF
            value = bits.view(torch.float32).to(torch.float64)
        if acc.flushes:
            value = torch.where(value.abs() < 2.0**x.fmt.emin, torch.zeros_like(value), value)
        return cls(stored, operand(value, x.fmt))


def _tile(
    tile: ScaledProduct, a: _Side, b: _Side, acc: Accumulator, chain: Chain, promotion: Promotion, most: int
) -> None:
    """Add every chain of ``tile`` to ``promotion``; at most ``most`` chains are computed together."""
    if acc.kind is Sum.BLOCK_SCALED_GROUPS:
        left, right = (Operand(side.number(), side.exponent()) for side in (tile.left, tile.right))
        promotion.only(*scaled_groups(left, right, _scales(tile), acc))
        return
    # a NaN scale counts as 0, since its results must be NaN and are judged as such; infinities stay (open)
    a_scales, b_scales = (torch.nan_to_num(side.scales, 0.0, INF, -INF) for side in (tile.left, tile.right))
    b_scales = b_scales.repeat_interleave(tile.b_rows, dim=0)[: tile.N].t()

    def computed() -> Iterator[tuple[list[int], tuple[Tensor, Tensor, Tensor]]]:
        for chains_ in _alike([(0, 0, tile.K)] if acc.scales_inside else list(chains(tile, acc.promotion)), most):
            spans = [(start, stop) for _, start, stop in chains_]
            sa, sb = a.stored.together(spans), b.stored.together(spans)
            if a.converted is None or b.converted is None:
                x, low, high = chain(sa, sb, acc)
            else:
                total, low, high = chain(a.converted.together(spans), b.converted.together(spans), acc)
                length = spans[0][1] - spans[0][0]
                x, drift = sa.value @ sb.value.mT, length * 2.0**-51 * (sa.value.abs() @ sb.value.abs().mT)
                low, high = low + (total - x) - drift, high + (total - x) + drift
            yield [block for block, _, _ in chains_], (x, low, high)

    every: Iterable[tuple[list[int], tuple[Tensor, Tensor, Tensor]]] = computed()
    if tile.M * tile.N * tile.B <= KEPT:  # an accumulator and its splits have the same chains
        every = tile.cached(("chains", chain.__name__, replace(acc, name="")), lambda: list(computed()))
    for of, some in every:
        if acc.scales_inside:
            promotion.only(*(x[0] for x in some))
        else:
            promotion.add(a_scales[:, of].t()[:, :, None], b_scales[of][:, None], *some)


def _added(total: Tensor, some: Tensor) -> Tensor:
    """``total`` and each of ``some``, in their order."""
    for one in some:
        total = total + one
    return total


def _alike(spans: list[tuple[int, int, int]], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """The chains in their order, at most so many of one length at a time."""
    for _, alike in groupby(spans, key=lambda span: span[2] - span[1]):
        spans_of_length = list(alike)
        yield from (spans_of_length[i : i + most] for i in range(0, len(spans_of_length), most))


def _scales(product: ScaledProduct) -> tuple[Tensor, Tensor]:
    """Scales of every 16 products, ``[M, K / 16]`` and ``[N, K / 16]``."""
    if product.K % 16:
        raise NumericsError(f"K={product.K} is no multiple of 16; block-scaled FP4 sums 16 products first: pad with 0")
    blocks = torch.arange(0, product.K, 16, device=product.a.device) // product.block
    a, b = _spread(product.left.scales, 1, product.M), _spread(product.right.scales, product.b_rows, product.N)
    return a[:, blocks].nan_to_num(nan=1.0), b[:, blocks].nan_to_num(nan=1.0)


def _spread(scale: Tensor, rows: int, count: int) -> Tensor:
    return scale.repeat_interleave(rows, dim=0)[:count].expand(count, -1)


def _in_format(value: Tensor, name: str) -> Tensor:
    return round_to(value, by_name(name), rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE) == value


UNALIGNED = (Sum.EXACT, Sum.TREE_FLUSH)
FLOAT32 = 2.0**24
LEAST, MOST = 2.0**-126, 2.0**127


def collapsed(product: ScaledProduct, interval: Interval, acc: Accumulator | None) -> Interval:
    """``interval`` with width zero wherever no admitted arithmetic rounds anything."""
    mask = unrounded(product, acc)
    if mask is None:
        return interval
    zero = torch.zeros((), dtype=interval.lo.dtype, device=interval.lo.device)
    return replace(interval, lo=torch.where(mask, zero, interval.lo), hi=torch.where(mask, zero, interval.hi))


def unrounded(product: ScaledProduct, acc: Accumulator | None) -> Tensor | None:
    """Bool ``[M, N]``: elements whose float32 sum is exact in every admitted arithmetic; None when there are none, and
    where a scale or a summand is NaN or infinite. Such codes count as zeros."""
    if acc is not None and acc.scales_inside:
        return None
    if acc is not None:
        product, acc = acc.lowered(product)
    if product.alpha is not None:  # exact where a scale that holds it is, and where it comes last
        if math.frexp(product.factor)[0] != 0.5:
            return None
        plain = replace(product, alpha=None)
        masks = [
            unrounded(x, acc)
            for x in (replace(plain, a_scale=(product.left.scales * product.factor).float()), replace(plain, bias=None))
        ]
        return None if masks[0] is None or masks[1] is None else masks[0] & masks[1]
    left, right = product.left, product.right
    if not (_powers(left.scales) and _powers(right.scales)):
        return None
    q = left.facts.quantum * right.facts.quantum
    low, high = float(left.scales.min()), float(right.scales.min())
    if min(q * low, q * high, q * low * high, low * high) < LEAST:
        return None
    limit = torch.inf
    if acc is not None:
        if acc.kind is Sum.TREE_FLUSH and (q < LEAST or any(x.facts.least < 2.0**x.fmt.emin for x in (left, right))):
            return None
        limit = FLOAT32 * q
        if acc.kind not in UNALIGNED:
            if 2.0 ** (_largest_exponent(left) + _largest_exponent(right) - acc.align) > q:
                return None
            limit = min(limit, 2.0 ** (min(acc.align, acc.out) + 1) * q)
    return _within(product, q, limit, acc)


def _within(product: ScaledProduct, q: float, limit: float, acc: Accumulator | None) -> Tensor | None:
    like = torch.zeros((product.M, product.N), dtype=torch.float64, device=product.a.device)
    ok = torch.ones_like(like, dtype=torch.bool)
    total, whole, least = torch.zeros_like(like), torch.zeros_like(like), torch.full_like(like, torch.inf)
    for block, start, stop in chains(product, None if acc is None else acc.promotion):
        sigma = product.sigma(block).expand_as(like)
        least = torch.minimum(least, sigma * q)
        k = slice(start, stop)
        size = product.left.number(k).abs() @ product.right.number(k).abs().T
        ok &= size < limit
        total, whole = total + sigma * size, whole + size
    for summand in (product.bias, product.c):
        if summand is not None:
            value = decode(summand)
            if not bool(torch.isfinite(value).all()) or quantum_of(value) < LEAST:
                return None
            total = total + value.abs()
            least = torch.minimum(least, torch.full_like(least, quantum_of(value)))
    largest = max(1.0, float(product.left.scales.max())) * max(1.0, float(product.right.scales.max()))
    ok &= (total < FLOAT32 * least) & (torch.maximum(total, whole) * largest < MOST)
    return ok if bool(ok.any()) else None


def _powers(scale: Tensor) -> bool:
    """Whether all are positive powers of two: no other number has the significand 1/2, nor have NaN and infinity."""
    return bool((torch.frexp(scale)[0] == 0.5).all())


def _largest_exponent(x: Decoded) -> int:
    largest = x.facts.largest
    return max(math.frexp(largest)[1] - 1, x.fmt.emin) if largest else 0
