"""Intervals through a mixture-of-experts layer: sound although a code of the intermediate may flip.

    1  first product    the interval of its accumulator, rounded to the stored dtype: ``[low, high]`` on that grid
    2  silu * up        silu falls to its minimum at x = -1.27846 and rises after it; a kernel's is within
                        2^-20 (2^-20 + 2^-22 |x| for negative x) of it, relative; every rounding is monotone
    3  quantiser        intervals of scales and codes (:mod:`oracle.bounds.code_boxes`)
    4  second product   :func:`oracle.bounds.boxed.boxed_product` over those alternatives
    5  combination      STORED: rounded to the stored dtype, weighted; else weighted as float32 and, for WEIGHTED and
                        RUNNING, rounded to the stored dtype then. The weight may meet the accumulator before its scales
                        do: one rounding in another place, and 2^-149 times the scales where that underflows.
                        Then the sum of intervals, plus (k + 2) u of its magnitudes for float32 sums in any order; of
                        RUNNING the same roundings of both ends, slot by slot: they are monotone

Every step maps an interval to one that holds all its images, so a right kernel is never refused. A token reached by
NaN, infinity or a possible float32 overflow is open, the others are not. Not covered: recipes that code_boxes does not
cover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.bounds import admissible
from oracle.bounds.accumulator import Accumulator
from oracle.bounds.boxed import Box, Range, boxed_product
from oracle.bounds.code_boxes import code_boxes
from oracle.bounds.engines import exact
from oracle.bounds.product import ETA, U
from oracle.numbers.formats import FP32, decode, of_dtype
from oracle.truth.gemm import ScaledProduct, rounded
from oracle.truth.moe import Activation, Combine, Experts, Steps, Tokens, nearest, running_sum
from oracle.truth.routing import DEVICE_ERROR, DEVICE_SLOPE, FLUSH, Span, sigmoid
from oracle.verdict.products import interval_of

SILU_ARGMIN = -1.2784645427610738
SILU_MIN = -0.27846454276107385


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
    tokens: Tokens,
    experts: Experts,
    steps: Steps,
    *,
    numerics: str,
    acc: Accumulator | None,
    x: Tensor | None = None,
    given: Tensor | None = None,
) -> Shares:
    """The intervals of the second products, whatever combines them.

    ``numerics`` names the arithmetic of the products (:func:`oracle.verdict.products.interval_of`) and ``acc`` is its
    accumulator, None for float32 in any order. With ``x [T, H]`` the layer quantises its input itself (with the scale
    ``given``, where the recipe wants one) and only its intervals of codes are used, not ``tokens.codes``.
    """
    made, basis, flips, count = list[Share](), numerics, 0, 0
    none = torch.zeros(tokens.codes.shape[0], dtype=torch.bool, device=tokens.codes.device)
    inputs, unknown = ([], none) if x is None else _input_boxes(x, steps, given)
    between = FP32 if steps.activation is Activation.NONE else of_dtype(steps.store)
    for expert, token, slot in tokens.slots(experts):
        if x is None:
            h, lost = stored_span(experts.product("w13", expert, *tokens.rows(token)), steps.store, numerics)
        else:
            taken = [box.taken(token) for box in inputs]
            h, lost, _ = boxed_span(taken, experts, "w13", expert, steps.store, acc)
            lost = lost | unknown[token]
        act, burst = _finite(act_span(h, steps))
        boxes, flipped = code_boxes(act, steps.recipe, between, experts.intermediate_scale)
        found = boxed_range(boxes, experts, "w2", expert, acc)
        flips, count, basis = flips + flipped, count + boxes[0].low.numel(), found.name
        scales = max(float(b.scale_high.max()) for b in boxes), float(experts.w2_scale[expert].abs().max())
        made.append(Share(token, slot, found, lost | burst, max(1.0, scales[0]) * max(1.0, scales[1])))
    return Shares(made, basis, flips, count)


def outcome(tokens: Tokens, experts: Experts, steps: Steps, found: Shares) -> Outcome:
    """The interval of a layer's output by ``steps.combine``."""
    combine, weights, fmt = steps.combine, tokens.output_weights(), of_dtype(steps.store)
    shape = (tokens.codes.shape[0], experts.w2.shape[1])
    low, high, size = (torch.zeros(shape, dtype=torch.float64, device=tokens.codes.device) for _ in range(3))
    open_ = torch.zeros(shape[0], dtype=torch.bool, device=low.device)
    running = combine is Combine.RUNNING
    ends = [torch.zeros((tokens.ids.shape[1] if running else 0, *shape), dtype=torch.float64, device=low.device)
            for _ in range(2)]  # fmt: skip
    for share in found.of:
        token, slot = share.token, share.slot
        y, overflow = rounded_span(share.found, steps.store if combine is Combine.STORED else torch.float32)
        w = weights[token, slot, None]
        left, right = torch.minimum(w * y.low, w * y.high), torch.maximum(w * y.low, w * y.high)
        if combine is not Combine.STORED:
            width = 2 * U * torch.maximum(left.abs(), right.abs()) + 2 * ETA * share.largest_scale
            left, right = left - width, right + width
        if combine in (Combine.WEIGHTED, Combine.RUNNING):
            left, right = nearest(left, fmt), nearest(right, fmt)
        gone = share.lost | overflow | ~torch.isfinite(left).all(dim=1) | ~torch.isfinite(right).all(dim=1)
        open_[token] |= gone
        left, right = (torch.where(gone[:, None], 0.0, end) for end in (left, right))
        if running:
            ends[0][slot, token], ends[1][slot, token] = left, right
            continue
        low.index_add_(0, token, left)
        high.index_add_(0, token, right)
        size.index_add_(0, token, torch.maximum(left.abs(), right.abs()))
    if running:
        low, high = (running_sum(end, steps.store) for end in ends)
        open_ |= ~(torch.isfinite(low) & torch.isfinite(high)).all(dim=1)
        span = Span(low, high)
    else:
        n = tokens.ids.shape[1] + 2
        slack = n * U / (1 - n * U) * (1 + 2.0**-20) * size + n * ETA
        span = Span(low - slack, high + slack)
    basis = found.basis if combine is Combine.STORED else f"{found.basis}, combine {combine.name}"
    return Outcome(span, open_[:, None].expand(shape), basis, found.flips, found.intermediates)


def stored_span(product: ScaledProduct, dtype: torch.dtype, numerics: str) -> tuple[Span, Tensor]:
    """Bounds of a stored product whose operands are known, and the rows ``[R]`` about which nothing is claimed."""
    value = exact(product)
    found = admissible(value, rounded(product, value, dtype), interval_of(product, numerics))
    open_ = ~torch.isfinite(found.low) | ~torch.isfinite(found.high)
    if found.open is not None:
        open_ = open_ | found.open
    rows = open_.any(dim=1)
    edges = (torch.nan_to_num(edge, 0.0, 0.0, 0.0) for edge in (found.low, found.high))
    return Span(*edges), rows


def boxed_span(
    boxes: Sequence[Box], experts: Experts, which: str, expert: int, store: torch.dtype, acc: Accumulator | None
) -> tuple[Span, Tensor, str]:
    """Bounds of a stored product of boxes with a weight, rows about which nothing is claimed, and the bound's name."""
    found = boxed_range(boxes, experts, which, expert, acc)
    return *rounded_span(found, store), found.name


def boxed_range(
    boxes: Sequence[Box], experts: Experts, which: str, expert: int, acc: Accumulator | None
) -> Range:
    """Bounds of a product of boxes with a weight, before it is stored."""
    weight, scale = getattr(experts, which)[expert], getattr(experts, f"{which}_scale")[expert]
    rows, columns = weight.shape
    if scale.dim() == 0:
        return boxed_product(boxes, weight, scale.reshape(1, 1), block=columns, b_rows=rows, acc=acc)
    return boxed_product([_by_block(box, scale) for box in boxes], weight, scale, block=128, b_rows=128, acc=acc)


def rounded_span(found: Range, store: torch.dtype) -> tuple[Span, Tensor]:
    """A range rounded to the stored dtype, and the rows about which nothing is claimed."""
    fmt = of_dtype(store)
    low, high = nearest(found.low, fmt), nearest(found.high, fmt)
    open_ = found.open | ~torch.isfinite(low) | ~torch.isfinite(high)
    finite = Span(torch.nan_to_num(low, 0.0, 0.0, 0.0), torch.nan_to_num(high, 0.0, 0.0, 0.0))
    return finite, open_.any(dim=1)


def act_span(h: Span, steps: Steps) -> Span:
    """Bounds of ``silu(gate) * up`` as the quantiser sees it."""
    (g1, u1), (g2, u2) = h.low.chunk(2, dim=1), h.high.chunk(2, dim=1)
    if steps.limit is not None:
        g1, g2 = g1.clamp(max=steps.limit), g2.clamp(max=steps.limit)
        u1, u2 = u1.clamp(-steps.limit, steps.limit), u2.clamp(-steps.limit, steps.limit)
    fmt = of_dtype(steps.store)
    s = silu_span(Span(g1, g2))
    if steps.activation is Activation.EACH:
        s = Span(nearest(s.low, fmt), nearest(s.high, fmt))
    corners = torch.stack([s.low * u1, s.low * u2, s.high * u1, s.high * u2])
    low, high = corners.amin(dim=0), corners.amax(dim=0)
    low, high = low - 2 * U * low.abs() - 2.0**-148, high + 2 * U * high.abs() + 2.0**-148
    if steps.activation is Activation.EACH:  # a product of two stored values is exact before it is rounded
        low, high = corners.amin(dim=0), corners.amax(dim=0)
    into = FP32 if steps.activation is Activation.NONE else fmt
    return Span(nearest(low, into), nearest(high, into))


def silu_span(x: Span) -> Span:
    """Bounds of a kernel's float32 ``x / (1 + exp(-x))`` over an interval."""
    ends = [edge * sigmoid(edge) for edge in (x.low, x.high)]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    low = torch.where((x.low <= SILU_ARGMIN) & (x.high >= SILU_ARGMIN), torch.full_like(low, SILU_MIN), low)
    error = DEVICE_ERROR + DEVICE_SLOPE * (-x.low).clamp(0.0, 128.0)
    return Span(low - error * low.abs() - 128 * FLUSH, high + error * high.abs() + 128 * FLUSH)


def _input_boxes(x: Tensor, steps: Steps, given: Tensor | None) -> tuple[list[Box], Tensor]:
    """Boxes of the quantised input, and its rows ``[T]`` with NaN or infinity, of which nothing is claimed."""
    rows = decode(x)
    known, unknown = _finite(Span(rows, rows))
    boxes, _ = code_boxes(known, steps.recipe, of_dtype(x.dtype), given)
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
