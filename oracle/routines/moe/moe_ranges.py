"""Intervals through a mixture-of-experts layer: sound although a code of the intermediate may flip.

    1  first product    the interval of its accumulator, rounded to the stored dtype: ``[low, high]`` on that grid;
                        where it is quantised too, codes and scales as in 3, and the hull of their products
    2  activation       :mod:`oracle.bounds.activation`; every rounding is monotone; a multiplier maps the ends, with
                        one rounding
    3  quantiser        intervals of scales and codes (:mod:`oracle.bounds.code_boxes`)
    4  second product   :func:`oracle.bounds.boxed.boxed_product` over those alternatives
    5  combination      :class:`oracle.truth.moe.Ways`: each rounding maps both ends. A weight that meets the
                        accumulator itself may do so before its scales do: one rounding in another place, and 2^-149
                        times the scales where that underflows. Sums in float32: plus (k + 2) u of their magnitudes, in
                        any order. Rounded sums slot by slot: the same roundings of both ends, which are monotone.
                        Rounded sums in any order: :func:`any_order`

Every step maps an interval to one that holds all its images, so a right kernel is never refused. A token reached by
NaN, infinity or a possible float32 overflow is open, the others are not. Not covered: recipes that code_boxes does not
cover.

Source: derived in :mod:`oracle.bounds.boxed` and :mod:`oracle.bounds.code_boxes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations

import torch
from torch import Tensor

from oracle.bounds import admissible
from oracle.bounds.accumulator import Accumulator
from oracle.bounds.activation import curve_span, is_exact, product_span, up_span
from oracle.bounds.boxed import Box, Range, boxed_product
from oracle.bounds.code_boxes import code_boxes
from oracle.bounds.engines import exact
from oracle.bounds.product import ETA, U, may_overflow
from oracle.numbers.formats import FP32, Format, decode, of_dtype
from oracle.numbers.recipes import Recipe
from oracle.truth import moe
from oracle.truth.gemm import ScaledProduct, rounded
from oracle.truth.routing import Span
from oracle.verdict.products import interval_of

MOST_TERMS = 8
"""Terms of a sum in any order whose least and largest values are sought over all orders: 1,024 additions."""


@dataclass(frozen=True)
class Outcome:
    """Sums ``[T, H]`` before their rounding, where nothing is claimed, and how many intermediate codes may flip."""

    span: Span
    open: Tensor
    basis: str
    flips: int
    intermediates: int


@dataclass(frozen=True)
class Share:
    """What one expert gives some tokens in one of their slots: bounds of its second product before any rounding, and
    the rows about which nothing is claimed already."""

    token: Tensor
    slot: Tensor
    found: Range
    lost: Tensor
    largest_scale: float


@dataclass(frozen=True)
class Shares:
    """The shares of every expert of a layer, and how many codes of the intermediate may flip."""

    of: Sequence[Share]
    basis: str
    flips: int
    intermediates: int


def shares(
    tokens: moe.Tokens,
    experts: moe.Experts,
    steps: moe.Steps,
    *,
    numerics: str,
    acc: Accumulator | None,
    boxes: Callable[[int], Sequence[Box]] | None = None,
    unknown: Tensor | None = None,
) -> Shares:
    """The intervals of the second products, whatever combines them.

    ``numerics`` names the arithmetic of the products (:func:`oracle.verdict.products.interval_of`) and ``acc`` is its
    accumulator, None for float32 in any order. Where the input is not known exactly (:func:`input_boxes`) the ``boxes``
    of a local expert are used and not ``tokens.codes``; nothing is claimed of the rows ``unknown [T]``.
    """
    parts, basis, flips, count = list[Share](), numerics, 0, 0
    fmt, first = of_dtype(moe.between(steps)), steps.first or steps.store
    for expert, token, slot in tokens.slots(experts):
        if boxes is None:
            h, lost = stored_span(experts.product("w13", expert, *tokens.rows(token, expert)), first, numerics)
        else:
            h, lost, _ = boxed_span([box.select(token) for box in boxes(expert)], experts, "w13", expert, first, acc)
        if unknown is not None:
            lost = lost | unknown[token]
        if steps.hidden is not None:
            h = _read_back(h, steps.hidden, of_dtype(first))
        value = act_span(h, experts.steps(expert, steps))
        if steps.weighted:
            value = _weighted(value, decode(tokens.weights)[token, slot, None])
        act, burst = _finite(_multiplied(value, experts.multiplier, fmt))
        given = None if experts.globals is None else experts.globals[1][expert]
        codes, flipped = code_boxes(act, steps.recipe, fmt, experts.intermediate_scale, global_scale=given)
        interval = boxed_range(codes, experts, "w2", expert, acc)
        flips, count, basis = flips + flipped, count + codes[0].low.numel(), interval.name
        scales = max(float(b.scale_high.max()) for b in codes), float(experts.w2_scale[expert].abs().max())
        parts.append(Share(token, slot, interval, lost | burst, max(1.0, scales[0]) * max(1.0, scales[1])))
    return Shares(parts, basis, flips, count)


def outcome(
    tokens: moe.Tokens, experts: moe.Experts, steps: moe.Steps, parts: Shares, weights: Span | None = None
) -> Outcome:
    """The interval of a layer's output by ``steps.combine``; with ``weights [T, k]`` the weights lie between bounds."""
    combine, fmt = steps.combine.value, of_dtype(steps.store)
    weights = weights or Span(*(tokens.output_weights(steps),) * 2)
    if combine.weight:
        weights = Span(moe.nearest(weights.low, fmt), moe.nearest(weights.high, fmt))
    shape = (tokens.codes.shape[0], experts.w2.shape[1])
    open_ = torch.zeros(shape[0], dtype=torch.bool, device=tokens.codes.device)
    low, high = (torch.zeros((tokens.ids.shape[1], *shape), dtype=torch.float64, device=open_.device) for _ in range(2))
    for share in parts.of:
        token, slot = share.token, share.slot
        y, overflow = rounded_span(share.found, moe.stored_as(steps))
        ends = [w[token, slot, None] for w in (weights.low, weights.high)]
        corners = torch.stack([w * edge for w in ends for edge in (y.low, y.high)])
        left, right = corners.amin(dim=0), corners.amax(dim=0)
        if not combine.stored:
            width = 2 * U * torch.maximum(left.abs(), right.abs()) + 2 * ETA * share.largest_scale
            left, right = left - width, right + width
        if combine.term:
            left, right = moe.nearest(left, fmt), moe.nearest(right, fmt)
        gone = share.lost | overflow | ~torch.isfinite(left).all(dim=1) | ~torch.isfinite(right).all(dim=1)
        open_[token] |= gone
        low[slot, token], high[slot, token] = (torch.where(gone[:, None], 0.0, end) for end in (left, right))
    if combine.addition is moe.Addition.FLOAT32:
        span = float32_sum(Span(low, high))
    else:
        both = Span(low, high)
        span = any_order(both, steps.store) if combine.addition is moe.Addition.ANY else in_order(both, steps.store)
        open_ |= ~(torch.isfinite(span.low) & torch.isfinite(span.high)).all(dim=1)
    basis = parts.basis if steps.combine is moe.Combine.STORED else f"{parts.basis}, combine {steps.combine.name}"
    return Outcome(span, open_[:, None].expand(shape), basis, parts.flips, parts.intermediates)


def float32_sum(terms: Span) -> Span:
    """Bounds of the sum of ``k`` terms, float64 ``[k, T, H]``, in float32 and any order, each term a product, and
    the sum scaled, or not: ``k + 2`` roundings at most in the way of each."""
    n, size = len(terms.low) + 2, torch.maximum(terms.low.abs(), terms.high.abs()).sum(dim=0)
    slack = n * U / (1 - n * U) * (1 + 2.0**-20) * size + n * ETA
    return Span(terms.low.sum(dim=0) - slack, terms.high.sum(dim=0) + slack)


def in_order(terms: Span, dtype: torch.dtype) -> Span:
    """Bounds of the sum over the first axis, slot by slot, each sum rounded to ``dtype``."""
    return Span(moe.running_sum(terms.low, dtype), moe.running_sum(terms.high, dtype))


def any_order(terms: Span, dtype: torch.dtype) -> Span:
    """Bounds of ``dtype`` sums over the first axis, one term after the other in any order, each sum rounded.

    Of one order the sum is monotone in each term, so the least over all orders and terms is that of the lower ends.
    With ``f(S)`` the least sum of the terms ``S``: ``f(S) = min over its last term j of RN(f(S - j) + t_j)``, since
    ``RN(a + t_j)`` is monotone in ``a``: exact, in ``k 2^(k-1)`` additions. Above :data:`MOST_TERMS` terms the bound of
    Higham (4.4) holds every order, each of whose ``k - 1`` roundings errs by ``u`` of its sum (or half a subnormal)::

        |sum - exact| <= (k - 1) u / (1 - (k - 1) u) sum |t| + (k - 1) eta / 2

    Terms that are 0 (experts of other ranks) change nothing.
    """
    nothing = (terms.low == 0) & (terms.high == 0)
    present = [slot for slot in range(len(nothing)) if not bool(nothing[slot].all())]
    low, high = terms.low[present], terms.high[present]
    count = len(present)
    if count > MOST_TERMS:
        fmt = of_dtype(dtype)
        u, eta = 2.0 ** -(fmt.fraction_bits + 1), fmt.min_subnormal
        gamma = (count - 1) * u / (1 - (count - 1) * u) * (1 + 2.0**-40)
        slack = gamma * torch.maximum(low.abs(), high.abs()).sum(dim=0) + count * eta
        return Span(moe.nearest(low.sum(dim=0) - slack, fmt), moe.nearest(high.sum(dim=0) + slack, fmt))
    return Span(_extreme(low, dtype, torch.minimum), _extreme(high, dtype, torch.maximum))


def _extreme(terms: Tensor, dtype: torch.dtype, pick: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The least or largest sum of all terms over every order: one set of terms after the other, by its number."""
    sums = {0: torch.zeros(terms.shape[1:], dtype=torch.float64, device=terms.device)}
    count = terms.shape[0]
    for size in range(1, count + 1):
        subsets = {}
        for members in combinations(range(count), size):
            ends = [moe.added(sums[sum(1 << m for m in members if m != j)], terms[j], dtype) for j in members]
            subsets[sum(1 << m for m in members)] = reduce(pick, ends)
        sums = subsets
    return sums[(1 << count) - 1]


def stored_span(product: ScaledProduct, dtype: torch.dtype, numerics: str) -> tuple[Span, Tensor]:
    """Bounds ``[R, N]`` of a stored product in ``dtype`` whose operands are known, and the rows, bool ``[R]``, about
    which nothing is claimed."""
    value = exact(product)
    interval = admissible(value, rounded(product, value, dtype), interval_of(product, numerics))
    open_ = ~torch.isfinite(interval.low) | ~torch.isfinite(interval.high)
    if interval.open is not None:
        open_ = open_ | interval.open
    rows = open_.any(dim=1)
    edges = (torch.nan_to_num(edge, 0.0, 0.0, 0.0) for edge in (interval.low, interval.high))
    return Span(*edges), rows


def boxed_span(
    boxes: Sequence[Box], experts: moe.Experts, which: str, expert: int, store: torch.dtype, acc: Accumulator | None
) -> tuple[Span, Tensor, str]:
    """Bounds ``[R, N]`` of a product of boxes with a weight, stored in the dtype ``store``, rows (bool ``[R]``) about
    which nothing is claimed, and the bound's name."""
    interval = boxed_range(boxes, experts, which, expert, acc)
    return *rounded_span(interval, store), interval.name


def boxed_range(boxes: Sequence[Box], experts: moe.Experts, which: str, expert: int, acc: Accumulator | None) -> Range:
    """Bounds of a product of boxes with a weight, before it is stored."""
    scale, block, b_rows = experts.scale(which, expert)
    if experts.alpha is not None:
        alpha = decode(experts.alpha[which == "w2"][expert]).reshape(1, 1).expand(boxes[0].low.shape[0], 1)
        boxes = [replace(box, scale_low=alpha, scale_high=alpha) for box in boxes]
    fitting = [_by_block(box, scale) for box in boxes]
    interval = boxed_product(fitting, getattr(experts, which)[expert], scale, block=block, b_rows=b_rows, acc=acc)
    return _affine(interval, *experts.affine(which, expert))


def _affine(interval: Range, factor: Tensor | None, bias: Tensor | None) -> Range:
    """A range times a factor, plus a bias: a rounding of each, and what either may underflow by."""
    low, high, open_ = interval.low, interval.high, interval.open
    for rounds, change in ((factor, torch.Tensor.mul), (bias, torch.Tensor.add)):
        if rounds is not None:
            ends = [change(end, decode(rounds)[None, :]) for end in (low, high)]
            low, high = torch.minimum(*ends), torch.maximum(*ends)
            low, high = low - 2 * U * low.abs() - 2 * ETA, high + 2 * U * high.abs() + 2 * ETA
            open_ = open_ | may_overflow(torch.maximum(low.abs(), high.abs()))
    return replace(interval, low=low, high=high, open=open_)


def rounded_span(interval: Range, store: torch.dtype) -> tuple[Span, Tensor]:
    """A range ``[R, N]`` rounded to the stored dtype, and the rows, bool ``[R]``, about which nothing is claimed."""
    fmt = of_dtype(store)
    low, high = moe.nearest(interval.low, fmt), moe.nearest(interval.high, fmt)
    open_ = interval.open | ~torch.isfinite(low) | ~torch.isfinite(high)
    finite = Span(torch.nan_to_num(low, 0.0, 0.0, 0.0), torch.nan_to_num(high, 0.0, 0.0, 0.0))
    return finite, open_.any(dim=1)


def act_span(h: Span, steps: moe.Steps) -> Span:
    """Bounds of the activation as the quantiser sees it."""
    (g1, u1), (g2, u2) = moe.clamped(h.low, steps), moe.clamped(h.high, steps)
    return gated_span(Span(g1, g2), None if u1 is None or u2 is None else Span(u1, u2), steps)


def gated_span(gate: Span, up: Span | None, steps: moe.Steps) -> Span:
    """Bounds ``[..., I]`` of the activation of a clamped gate and up, rounded as the steps have it."""
    formula, fmt, into = steps.formula, of_dtype(steps.store), of_dtype(moe.between(steps))
    s, each = curve_span(gate, formula), steps.activation is moe.Activation.EACH
    if steps.limit is not None and formula.late:
        s = Span(s.low.clamp(max=steps.limit), s.high.clamp(max=steps.limit))
    if each:
        s = Span(moe.nearest(s.low, fmt), moe.nearest(s.high, fmt))
    if up is not None:
        if formula.narrow:
            up = Span(
                torch.minimum(up.low, moe.nearest(up.low, fmt)), torch.maximum(up.high, moe.nearest(up.high, fmt))
            )
        # a product of two stored values is exact before it is rounded; a limit may be no stored value
        stored = steps.limit is None or float(moe.nearest(up.low.new_tensor(steps.limit), fmt)) == steps.limit
        s = product_span(s, up_span(up, formula), exact=each and stored and is_exact(formula))
    return Span(moe.nearest(s.low, into), moe.nearest(s.high, into))


def _weighted(act: Span, weight: Tensor) -> Span:
    """Bounds of the activation times its routing weight, wherever among its factors that is multiplied in float32."""
    ends = act.low * weight, act.high * weight
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    low, high = (end + s * (4 * U * end.abs() + 4 * ETA) for end, s in ((low, -1), (high, 1)))
    return Span(moe.nearest(low, FP32), moe.nearest(high, FP32))


def _multiplied(act: Span, multiplier: Tensor | None, fmt: Format) -> Span:
    """Bounds of the activation times its multiplier, rounded once."""
    if multiplier is None:
        return act
    ends = act.low * decode(multiplier), act.high * decode(multiplier)
    return Span(moe.nearest(torch.minimum(*ends), fmt), moe.nearest(torch.maximum(*ends), fmt))


def _read_back(h: Span, recipe: Recipe, fmt: Format) -> Span:
    """The hull of codes times scale over the boxes of a quantised first product, each product rounded to float32."""
    group = recipe.block.columns or h.low.shape[1]
    ends = []
    for box in code_boxes(h, recipe, fmt, None)[0]:
        scales = [s.repeat_interleave(group, dim=1)[:, : h.low.shape[1]] for s in (box.scale_low, box.scale_high)]
        corners = torch.stack([end * scale for end in (box.low, box.high) for scale in scales])
        ends.append((corners.amin(dim=0), corners.amax(dim=0)))
    low, high = (torch.stack(e) for e in zip(*ends, strict=True))
    return Span(moe.nearest(low.amin(dim=0), FP32), moe.nearest(high.amax(dim=0), FP32))


def input_boxes(
    x: Tensor, recipe: Recipe, scale: Tensor | None, global_scale: Tensor | None = None
) -> tuple[list[Box], Tensor]:
    """Boxes ``[T, K]`` of the input ``x`` ``[T, K]`` (any dtype of :data:`oracle.numbers.quantize.WIDE`), quantised
    under ``scale`` ``[1]`` or ``global_scale`` (one value) where the recipe takes one, and its rows ``[T]``, bool, with
    NaN or infinity, of which nothing is claimed."""
    rows = decode(x)
    known, unknown = _finite(Span(rows, rows))
    boxes, _ = code_boxes(known, recipe, of_dtype(x.dtype), scale, global_scale=global_scale)
    return boxes, unknown


def _finite(x: Span) -> tuple[Span, Tensor]:
    """Rows of zeros for those with NaN or infinity, which would spread to the bounds of all, and which these are."""
    unknown = ~(torch.isfinite(x.low) & torch.isfinite(x.high)).all(dim=1)
    return Span(*(edge.masked_fill(unknown[:, None], 0.0) for edge in (x.low, x.high))), unknown


def _by_block(box: Box, scale: Tensor) -> Box:
    """A box whose rows have one scale, as one with a scale for each block of the weight's ``scale``."""
    if box.scale_low.shape[1] != 1:
        return box
    across = scale.shape[1]
    return replace(box, scale_low=box.scale_low.expand(-1, across), scale_high=box.scale_high.expand(-1, across))
