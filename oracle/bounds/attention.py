"""Bounds of FP8 attention: of float32 arithmetic with an unrounded P, and of a pipeline whose codes of P are known.

Float32, any order and any tiles. With ``d_j`` the error of the exponent ``y_j`` of a key and ``e = 2^-21`` that of an
exponential (``ex2.approx``: 2 ulp; CUDA's ``expf``: 2 ulp), a weight is right within ``eps_j = expm1(d_j + T (e + 6 u
Y))``, where at most ``T = N / 8 + 1`` times a new maximum rescales what is summed and ``Y`` is the largest ``|y|`` of
the row::

    d_j  = |c| gamma_D sum_k |q_k| |k_jk| + 6 u (|y_j| + Y)
    L    = (sum eps_j w_j |v_j| + |o*| sum eps_j w_j) / sum (1 - eps_j) w_j
    |out - out*| <= v_scale (L + gamma sum w_j |v_j| / sum w_j)

with ``gamma = gamma_(N + 2 T + 16)`` for both sums, the rescalings, the division and the scale of the values. ``d_j``
contains six roundings of the products that make the exponent, whatever their order.

A soft cap ``C tanh(y / C)`` passes on no more of an error than it has, and adds that of the tangent: in float32, of
exponentials or a library's, ``C 2^-20``; ``tanh.approx`` is within ``2^-10.9`` of it, relative, which a pipeline is
taken to use: its scores are known that far, and no bits follow.

Of 16-bit operands the products go through tensor cores. One instruction adds at most 17 terms, each cut below 2^-24 of
the largest and the sum cut once more, so that D products lose at most ``4 (D + 16) u`` of the sum of their magnitudes;
so do the N of the output. P may be rounded to the 16-bit dtype before it is multiplied: ``2^-(p + 1)`` of a weight with
``p`` fraction bits, and half of the dtype's least subnormal relative to the row's maximum. The row sum is of either.

A pipeline. The dot products are predicted, so ``x``, the codes of P and the factors ``a`` are known. The exact value of
what remains, ``sum_t A_t P_t V_t / sum_t A_t sum x``, with ``A_t`` the product of the later factors, is computed in
float64; each tile's sum may lie in the interval of the chain (:func:`oracle.bounds.product.residue_bound`), and float32
adds::

    gamma_(2 T + 2) sum_t A_t max |P_t V_t|       rescalings and additions of the output
    gamma_(N + 2 T)                               row sum in any order, relative: its summands are positive
    3 u + 2^-22                                   reciprocal, two products

Of one chain over all tiles the sums are those of the walk, bit for bit: in another order each step may lose a part of
the largest magnitude in it, which over a long row is as much as the output. Only the row sum and what follows it vary.

Keys that blocks share: :func:`split_bound`; two states as one: :func:`merged_bound`.

A pipeline with other arithmetic around its codes (:func:`codes_bound`): the exponential, the order of the products that
make the exponent, and the sums may be any, and the scores those of the instruction or of any accumulator. A score is
within ``E_j`` of the exact one: 0 where it is the instruction's; else the larger of the chain's residue and ``gamma_D
sum_k |q_k| |k_jk|``. So is each running maximum within the largest ``E`` of the row. In powers of two, with ``Y`` the
largest ``|y|`` and F that of the lift or gain::

    dy_j = |c| (E_j + max E) + 6 u (|y_j| + Y + F)        x_j within expm1(ln2 dy_j + 2^-21 + 2 u)
    P_j  between the roundings of both ends of x_j: rounding is monotone, saturation too
    A_t  within eps_A = expm1(2 ln2 |c| max E + T (2^-21 + 12 u Y))

    f = (1 + eps_A) (1 + gamma_(N + 2 T + 2))
    |O - O*| <= sum_t A_t (rad P_t) |V_t| + f lost + (f - 1) (sum_t A_t max P_t |V_t| + lost) + 448 2^-126 sum |V|
    |l - l*| <= f (l* + sum_j eps_j A_t x_j) - l*

``O*`` is of the middles of P, ``rad`` half of their distance. ``lost`` is what the accumulator cuts: a step of 32
products aligns 33 addends to 2^-13 of the largest of them (its exponent may be that of the accumulator, at most the sum
so far and what was lost, or that of a product, at most the largest P times the largest V of the step, a subnormal
counting as the least normal number), and its result to 2^-13 of itself. Every other accumulator in use cuts less than
that and ``gamma_N`` of the magnitudes. The division is that of intervals.

Of any pipeline (:data:`oracle.tensorcore.attention.ANY`) a code is within half a step of P, ``x_j (1 +- 2^-4)`` or
``x_j +- 2^-10`` with a lift of 2^8 above the largest maximum; the accumulator is in every step at most the sum of all
magnitudes, and ``T = N / 8 + 1``.

The log-sum-exp: ``max eps_j`` and the rounding of the sum, of a product and of a logarithm of 2^-21, relative to
``|lse| + 1``.
Where a row's scores are NaN, or float32 may overflow, nothing is claimed.
Source: derived in this file; Higham, "Accuracy and Stability of Numerical Algorithms", 3.1, for ``gamma_n``; CUDA
programming guide, "Intrinsic functions", for the exponentials; PTX ISA, "tanh", for ``tanh.approx.f32`` (2^-10.987).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oracle import loading
from oracle.bounds.accumulator import of_schedule
from oracle.bounds.engines import residue_bound
from oracle.bounds.product import ETA, FLOAT32_MAX, U
from oracle.numbers.formats import E4M3FN, decode, of_dtype
from oracle.numbers.rounding import Overflow, Rounding, encode
from oracle.tensorcore.attention import CHAIN, Pipeline, Walk, blocks, scores, tiles
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.attention import Attention, exact, merged, softmax, values
from oracle.truth.gemm import ScaledProduct, zero_nonfinite

EXPONENTIAL = 2.0**-21
TANGENT, APPROXIMATE = 2.0**-20, 2.0**-10.9
"""Errors of a hyperbolic tangent: absolute in float32, and relative of ``tanh.approx``."""
LEAST_TILE = 8
ROOM = 1 + 2.0**-30
"""For the float64 roundings of the bounds themselves."""
ACCUMULATOR = of_schedule(get_schedule(CHAIN))
FLUSHED = 448 * 2.0**-126
"""The largest P times what an exponential flushes to 0."""


@dataclass(frozen=True)
class Edges:
    """Real edges of the results before their store: ``low``, ``high`` ``[R, Dv]`` and ``[R]`` of the log-sum-exp;
    ``open`` bool ``[R, Dv]`` where nothing is claimed."""

    low: Tensor
    high: Tensor
    lse_low: Tensor
    lse_high: Tensor
    open: Tensor


def gamma(n: float) -> float:
    """``n u / (1 - n u)`` of float32."""
    return n * U / (1 - n * U)


def float32_bound(problem: Attention, p: torch.dtype | None = None) -> Edges:
    """The edges of a kernel of float32 arithmetic in any order that rounds no P, or with the dtype ``p`` may round it
    to that and multiply on tensor cores."""
    parts = [_float32(tile, p) for tile in problem.tiles()]
    return Edges(*(torch.cat([getattr(part, name) for part in parts]) for name in Edges.__dataclass_fields__))


def _float32(problem: Attention, p: torch.dtype | None) -> Edges:
    if not problem.k.shape[0]:
        return _without_keys(problem)
    value, soft = exact(problem), softmax(problem)
    n, depth = problem.k.shape
    tiles = n // LEAST_TILE + 1
    weights, v = soft.weights.nan_to_num(nan=0.0), zero_nonfinite(values(problem.v)).abs()
    eps = _errors(problem, soft.scores, tiles, wide=p is not None)
    moved, size = weights * eps, weights @ v
    total = weights.sum(dim=1) + soft.sink
    least = torch.where(total == 0, torch.ones_like(total), total - moved.sum(dim=1)).clamp(min=0.0)
    scale = problem.v_scale.to(torch.float64).abs()
    magnitude = value.out.abs().nan_to_num(nan=0.0)
    terms, shrunk, of_sum = n + 2 * tiles + 16, moved, moved.sum(dim=1)
    if p is not None:
        fmt = of_dtype(p)
        rounded = 2.0 ** -(fmt.fraction_bits + 1) * (weights + moved)
        rounded = (rounded + fmt.min_subnormal / 2).masked_fill(~problem.window(), 0.0)
        terms, shrunk, of_sum = 4 * terms, moved + rounded, of_sum + rounded.sum(dim=1)
        least = (least - rounded.sum(dim=1)).clamp(min=0.0)
    lost = (shrunk @ v) / least[:, None] * scale + magnitude * (of_sum / least)[:, None]
    lost = lost + gamma(terms) * size / least[:, None] * scale + magnitude * gamma(terms)
    lost = (lost + value.out_slack) * ROOM + ETA * (n + 8) * (1 + scale)
    # the row's maximum is among the weights: the sum is at least 1, and an error beyond half of it is no bound
    unbounded = (eps * (weights > 0)).amax(dim=1) > 0.5
    out = value.out.masked_fill(
        (~torch.isfinite(values(problem.v))).any(dim=0), torch.nan
    )  # 0 times NaN, or no product
    return _edges(problem, out, lost, value.lse, _lse_error(eps, weights, value.lse, n + 2 * tiles), unbounded)


def _errors(problem: Attention, scores: Tensor, tiles: int, *, wide: bool) -> Tensor:
    """``eps`` of each key, float64 ``[R, N]``, 0 outside the window; ``wide``: of products on tensor cores."""
    window, depth = problem.window(), problem.q.shape[1]
    terms, sizes = 4 * (depth + 16) if wide else depth, problem.score_sizes()
    c = problem.factor.abs()[:, None]
    y = problem.logits(scores).abs().nan_to_num(nan=0.0).masked_fill(~window, 0.0)
    most = y.amax(dim=1, keepdim=True)
    if problem.sink is not None:
        most = torch.maximum(most, problem.sink.abs()[:, None])
    exponent = c * gamma(terms) * sizes + 6 * U * (y + most) + tiles * (EXPONENTIAL + 6 * U * most)
    if problem.cap is not None:  # that of the row's maximum, too
        exponent = exponent + 2 * problem.cap * TANGENT + 8 * U * problem.cap
    return torch.expm1(exponent).masked_fill(~window, 0.0)


def _lse_error(eps: Tensor, weights: Tensor, lse: Tensor, terms: int) -> Tensor:
    most = (eps * (weights > 0)).amax(dim=1) if eps.shape[1] else torch.zeros_like(lse)
    size = lse.abs().nan_to_num(posinf=0.0)
    return (2 * most + gamma(terms + 8) + 2 * EXPONENTIAL * (size + 1) + 8 * U * (size + 1)) * ROOM


def pipeline_bound(walk: Walk, pipeline: Pipeline) -> Edges:
    """The edges of a kernel with the scores and codes of P of ``walk``: its sums in any legal order."""
    problem = walk.problem
    assert isinstance(problem, Attention), "a stack has no interval of its output"
    if not problem.k.shape[0]:
        return _without_keys(problem)
    n, v, tiles = problem.k.shape[0], zero_nonfinite(decode(problem.v)), max(1, len(walk.steps))
    acc = ACCUMULATOR
    total, lse, lse_lost = _sums(walk, pipeline)
    out = torch.zeros((len(total), v.shape[1]), dtype=torch.float64, device=v.device)
    low, high, size = (torch.zeros_like(out) for _ in range(3))
    for step in walk.steps:
        p, part = decode(step.codes).nan_to_num(nan=0.0), v[step.keys]
        a = torch.ones_like(total) if step.factor is None else step.factor
        out, size = out * a[:, None] + p @ part, size * a[:, None] + p @ part.abs()
        low, high = low * a[:, None], high * a[:, None]
        if pipeline.promoted:
            interval = residue_bound(_product(step.codes, problem.v[step.keys]), acc)
            low, high = low + interval.lo, high + interval.hi
    around = gamma(2 * tiles + 2) * size
    low, high = out + low - around, out + high + around
    if not pipeline.promoted:
        low = high = walk.sums
    scale = pipeline.value_scale(problem) / torch.where(total == 0, torch.ones_like(total), total)
    below, above = torch.minimum(low * scale[:, None], high * scale[:, None]), high * scale[:, None]
    above = torch.maximum(above, low * scale[:, None])
    summed = gamma(2 * n + 4 * tiles)
    spread = (summed + 3 * U + 2.0**-22) * torch.maximum(below.abs(), above.abs()) * ROOM + 8 * ETA
    nan = torch.isnan(walk.total)[:, None] | (~torch.isfinite(decode(problem.v))).any(dim=0)[None, :]
    middle, lost = (below + above) / 2, (above - below) / 2 + spread
    return _edges(problem, middle.masked_fill(nan, torch.nan), lost, lse, lse_lost, torch.zeros_like(nan[:, 0]))


def lse_bound(walk: Walk, pipeline: Pipeline) -> tuple[Tensor, Tensor]:
    """The log-sum-exp's part of :func:`pipeline_bound` alone: low and high, float64 ``[R]``; NaN where a score is."""
    seen, none = walk.problem.seen(), torch.full_like(walk.total, -torch.inf)
    if not walk.problem.keys:
        return none, none
    _, lse, lost = _sums(walk, pipeline)
    lse = torch.where(seen, lse, none)
    lost = torch.where(seen & ~torch.isnan(lse), lost, torch.zeros_like(lost))
    return lse - lost, lse + lost


def _sums(walk: Walk, pipeline: Pipeline) -> tuple[Tensor, Tensor, Tensor]:
    """The exact row sum of a walk with keys, its log-sum-exp, and how far a kernel's may be from that, float64
    ``[R]``."""
    total = torch.zeros_like(walk.total)
    for step in walk.steps:
        added = step.x.sum(dim=1, dtype=torch.float64)
        total = added if step.factor is None else total * step.factor + added
    if walk.problem.sink is not None:  # its exponential is that of the walk
        total = total + (walk.total - total).clamp(min=0.0)
    summed = gamma(2 * walk.problem.keys + 4 * max(1, len(walk.steps)))
    exponent = walk.top.nan_to_num(neginf=0.0) * walk.factor
    lse = exponent * math.log(2.0) + torch.log(total.clamp(min=2.0**-1000)) - pipeline.lift * math.log(2.0)
    lost = summed + EXPONENTIAL * 2 + 8 * U * (exponent.abs() + lse.abs() + 16)
    return total, lse, lost * ROOM


def codes_bound(
    problem: Attention, pipeline: Pipeline, *, predicted: bool, known: Scores | None = None, column: int | None = None
) -> Edges:
    """The edges of a kernel that rounds P as ``pipeline`` says, tile by tile, and computes all else in any way; with
    ``predicted`` its scores are those of the instruction, bit for bit. ``known``: of its rows alone; and of one
    ``column`` of one row ``[1, 1]``, a little wider than among the others, because its sums have another order."""
    parts, first = [], 0
    for part, width in blocks(problem, pipeline, None if known is None else known.rows):
        if known is None:
            parts.append(_codes(part, width, pipeline, *_scores(part, predicted)))
            continue
        own, skipped = part.near(), problem.k.shape[0] - part.k.shape[0]
        rows, first = slice(first, first + len(part.q)), first + len(part.q)
        scores = (x[rows, skipped:].to(own.q.device) for x in (known.values, known.errors))
        if column is not None:
            own = own.columns(slice(column, column + 1))
        parts.append(_codes(own, width, pipeline, *scores, alone=column is not None))
    return Edges(*(torch.cat([getattr(part, name) for part in parts]) for name in Edges.__dataclass_fields__))


@dataclass(frozen=True)
class Scores:
    """Those ``[S, N]`` of the rows ``rows``, int64 ``[S]``, ascending: exact, and how far a score of any accumulator
    may be from them, or with ``predicted`` those of the instruction; the same for every pipeline."""

    rows: Tensor
    values: Tensor
    errors: Tensor

    @classmethod
    def of(cls, problem: Attention, rows: Tensor, *, predicted: bool = False) -> Scores:
        """Those of some ``rows`` of ``problem``, int64 ``[S]``, ascending; NaN where a NaN enters a score."""
        return cls(rows, *_scores(problem.rows(rows).near(), predicted))


def _scores(problem: Attention, predicted: bool) -> tuple[Tensor, Tensor]:
    """Scores ``[R, N]``, NaN where a NaN enters, and how far a kernel's may be from them."""
    if not problem.codes:
        return problem.scores(), problem.score_errors() + torch.zeros_like(problem.q[:, :1] @ problem.k[:, :1].t())
    if predicted or not problem.k.shape[0]:
        return (s := scores(problem) if predicted else problem.scores()), torch.zeros_like(s)
    one = torch.ones((1, 1), dtype=torch.float32, device=problem.q.device)
    product = ScaledProduct(problem.q, problem.k, one, one, block=problem.q.shape[1], b_rows=problem.k.shape[0])
    interval = residue_bound(product, ACCUMULATOR)
    chain = torch.maximum(interval.lo.abs(), interval.hi.abs()).nan_to_num(nan=0.0)
    return problem.scores(), torch.maximum(chain, gamma(problem.q.shape[1]) * problem.score_sizes())


def _codes(
    problem: Attention, width: int, pipeline: Pipeline, s: Tensor, error: Tensor, *, alone: bool = False
) -> Edges:
    n, keys = problem.k.shape[0], problem.window()
    if not n:
        return _without_keys(problem)
    c = problem.factor.abs()[:, None] * math.log2(math.e)
    nan = (torch.isnan(s) & keys).any(dim=1)
    y = (problem.logits(s) * math.log2(math.e)).nan_to_num(nan=0.0).masked_fill(~keys, 0.0)
    error = (c * error).masked_fill(~keys, 0.0)
    if problem.cap is not None:
        error = error + APPROXIMATE * y.abs()
    most, moved = y.abs().amax(dim=1, keepdim=True), error.amax(dim=1, keepdim=True)
    walked, raised = tiles(n, width, pipeline), pipeline.lift + math.log2(pipeline.gain)
    count = n // LEAST_TILE + 1 if pipeline.free else len(walked)
    dy = error + moved + 6 * U * (y.abs() + most + raised)
    eps = torch.expm1(math.log(2.0) * dy + EXPONENTIAL + 2 * U) * ROOM
    eps_a = torch.expm1(2 * math.log(2.0) * moved + count * (EXPONENTIAL + 12 * U * most)) * ROOM
    v = zero_nonfinite(decode(problem.v))
    compiled = _compiled() if alone and not pipeline.free else None
    summed = compiled(problem, y, eps, v, walked, pipeline) if compiled else _summed(y, eps, v, keys, walked, pipeline)
    middle, radius, lost, size, total, of_sum, top = summed
    level = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    if problem.sink is not None:
        sink = problem.sink[:, None] * math.log2(math.e)
        added = torch.exp2(sink - level + raised)
        of_one = math.log(2.0) * (moved + 6 * U * (sink.abs() + most + raised)) + EXPONENTIAL
        total, of_sum = total + added, of_sum + added * torch.expm1(of_one)
    factor = (1 + eps_a) * (1 + gamma(n + 2 * count + 2))
    spread = (radius + factor * lost + (factor - 1) * (size + lost)) * ROOM + FLUSHED * v.abs().sum(dim=0)
    of_sum = (factor * (total + of_sum) - total) * ROOM
    least, largest = (total - of_sum).clamp(min=0.0), total + of_sum
    scale = problem.v_scale.to(torch.float64).abs()
    quotients = [end / of_l for end in (middle - spread, middle + spread) for of_l in (least, largest)]
    low, high = torch.stack(quotients).amin(dim=0) * scale, torch.stack(quotients).amax(dim=0) * scale
    rounded = (4 * U + 2.0**-22) * torch.maximum(low.abs(), high.abs()) * ROOM + 8 * ETA
    bad = nan[:, None] | (~torch.isfinite(decode(problem.v))).any(dim=0)[None, :]
    unbounded = ((eps.masked_fill(~keys, 0.0).amax(dim=1, keepdim=True) > 0.5) | (eps_a > 0.5))[:, 0]
    lse = (level[:, 0] - raised) * math.log(2.0) + torch.log(total[:, 0].clamp(min=2.0**-1000))
    relative = (of_sum / total.clamp(min=2.0**-1000))[:, 0] + math.log(2.0) * moved[:, 0]
    lse_lost = 2 * relative + 2 * EXPONENTIAL * (lse.abs() + 1) + 8 * U * (most[:, 0] + lse.abs() + 16)
    middle, lost = (low + high) / 2, (high - low) / 2 + rounded
    return _edges(
        problem, middle.masked_fill(bad, torch.nan), lost, lse.masked_fill(nan, torch.nan), lse_lost * ROOM, unbounded
    )


def _summed(
    y: Tensor, eps: Tensor, v: Tensor, keys: Tensor, walked: list[slice], pipeline: Pipeline
) -> tuple[Tensor, ...]:
    """Middle, radius, what the accumulator lost and the size of all products, ``[R, Dv]``; the row sum, its error and
    the last maximum, ``[R, 1]``."""
    raised = pipeline.lift + math.log2(pipeline.gain)
    total = torch.zeros_like(y[:, :1])
    middle, radius, size, lost = (torch.zeros((len(y), v.shape[1]), dtype=v.dtype, device=v.device) for _ in range(4))
    top, of_sum = torch.full_like(total, -torch.inf), torch.zeros_like(total)
    for tile in walked:
        hidden = ~keys[:, tile]
        part = y[:, tile].masked_fill(hidden, -torch.inf)
        grown = torch.maximum(top, part.amax(dim=1, keepdim=True))
        level = torch.where(torch.isneginf(grown), torch.zeros_like(grown), grown)
        a = torch.exp2(top - level)
        x = torch.exp2(part - level + raised)
        low, high = (_coded(x * (1 + sign * eps[:, tile]), sign if pipeline.free else 0.0) for sign in (-1.0, 1.0))
        if pipeline.promoted:
            begun = (torch.zeros_like(middle), torch.zeros_like(middle), torch.zeros_like(middle))
            ends = _added(*begun, low, high, v[tile])
            middle, radius, lost = (old * a + new for old, new in zip((middle, radius, lost), ends, strict=True))
        elif pipeline.free:
            whole = high @ v[tile].abs()
            middle, radius, lost = _added(whole, torch.zeros_like(whole), lost, low, high, v[tile])
            middle, radius = (low + high) / 2 @ v[tile], (high - low) / 2 @ v[tile].abs()
        else:
            middle, radius, lost = _added(middle * a, radius * a, lost * a, low, high, v[tile])
        size = size * a + high @ v[tile].abs()
        total, of_sum = total * a + x.sum(dim=1, keepdim=True), of_sum * a + (x * eps[:, tile]).sum(dim=1, keepdim=True)
        top = grown
    return middle, radius, lost, size, total, of_sum, top


def _compiled() -> Callable[..., tuple[Tensor, ...]] | None:
    """:func:`_summed` of one row and one column, with ``ROOM`` for its order of the sums; None without numba."""
    if (codes := loading.compiled("oracle.bounds.cpu_codes")) is None:
        return None
    column_sums = codes.column_sums

    def summed(
        problem: Attention, y: Tensor, eps: Tensor, v: Tensor, walked: list[slice], pipeline: Pipeline
    ) -> tuple[Tensor, ...]:
        spans = np.array([(tile.start, tile.stop) for tile in walked], np.int64)
        raised, sums = pipeline.lift + math.log2(pipeline.gain), np.zeros(7)
        ends = max(0, int(problem.start[0])), min(len(v), int(problem.stop[0]))
        of_row = (y[0].numpy(), eps[0].numpy(), *ends, v[:, 0].contiguous().numpy(), spans, raised, pipeline.promoted)
        cut, least = 2.0**-ACCUMULATOR.align, 2.0**E4M3FN.emin
        column_sums(*of_row, ACCUMULATOR.length, cut, least, ROOM, sums)
        sums[2:6:3] *= ROOM
        sums[1] = sums[1] * ROOM + (ROOM - 1) * sums[3]
        return tuple(torch.from_numpy(sums).reshape(7, 1, 1))

    return summed


def _coded(x: Tensor, way: float) -> Tensor:
    """The values of E4M3 nearest to ``x``, saturated; with ``way`` 1 or -1 half a step beyond an ``x`` above 0."""
    if way:
        step = torch.maximum(x * 2.0 ** -(E4M3FN.fraction_bits + 1), x.new_tensor(E4M3FN.min_subnormal / 2))
        return torch.where(x > 0, (x + way * step).clamp(min=0.0), x)
    return decode(encode(x, E4M3FN, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE), E4M3FN)


def _added(
    middle: Tensor, radius: Tensor, lost: Tensor, low: Tensor, high: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Middle, radius and what the accumulator may have lost, ``[R, Dv]``, after the products of P between ``low`` and
    ``high`` ``[R, n]`` with ``v`` ``[n, Dv]``, 32 at a time."""
    step, cut, least = ACCUMULATOR.length, 2.0**-ACCUMULATOR.align, 2.0**E4M3FN.emin
    for start in range(0, v.shape[0], step):
        part = slice(start, start + step)
        size = v[part].abs()
        one = high[:, part].amax(dim=1, keepdim=True).clamp(min=least) * size.amax(dim=0).clamp(min=least)
        held = middle.abs() + radius + lost
        middle = middle + ((low + high)[:, part] / 2) @ v[part]
        radius = radius + ((high - low)[:, part] / 2) @ size
        lost = lost + cut * ((step + 1) * torch.maximum(one, held) + middle.abs() + radius + lost)
    return middle, radius, lost * ROOM


def split_bound(parts: tuple[Walk, ...], pipeline: Pipeline) -> Edges:
    """The edges of a kernel whose blocks share the keys of these rows: the parts of
    :func:`oracle.tensorcore.attention.split_walks`, each in the edges of :func:`pipeline_bound`, weighted in float32 by
    exponentials of their log-sum-exps. With ``d`` the largest error of these, a weight is right within
    ``expm1(2 d + 2 e + gamma_(2 S + 8))`` for S parts; so is the log-sum-exp of all, and the weights add up to 1."""
    edges = [pipeline_bound(walk, pipeline) for walk in parts]
    if len(parts) == 1:
        return edges[0]
    middles = torch.stack([(one.lse_low + one.lse_high) / 2 for one in edges])
    errors = torch.stack([(one.lse_high - one.lse_low) / 2 for one in edges]).nan_to_num(nan=0.0)
    size = middles.abs().nan_to_num(posinf=0.0).amax(dim=0) + 1
    d = errors.amax(dim=0) + 2.0**-50 * size
    eps = torch.expm1(2 * d + 2 * EXPONENTIAL + 6 * U * size + gamma(2 * len(parts) + 8))
    lse = torch.logsumexp(middles, dim=0)
    weights = torch.exp(middles - lse).masked_fill(torch.isneginf(middles), 0.0)
    low, high, most = (torch.zeros_like(edges[0].low) for _ in range(3))
    for w, one in zip(weights, edges, strict=True):
        w = w[:, None]
        low, high = low + w * one.low, high + w * one.high
        most = most + w * torch.maximum(one.low.abs(), one.high.abs())
    spread = 2 * eps[:, None] * most * ROOM + ETA * (len(parts) + 8)
    opened = torch.stack([one.open for one in edges]).any(dim=0) | torch.isnan(lse)[:, None]
    lse_lost = (d + eps + 8 * U * size) * ROOM
    return Edges(low - spread, high + spread, lse - lse_lost, lse + lse_lost, opened)


def merged_bound(
    outputs: Tensor, sums: Tensor, scale: Tensor | None, base: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Low, high and open edges of two merged states, as :func:`oracle.truth.attention.merged` takes them.

    ``outputs`` ``[2, M, H, D]``, ``sums`` ``[2, M, H]`` and what the output is divided by, ``scale`` ``[]`` or None,
    are float64. Each edge is that of the output ``[M, H, D]`` and that of the log-sum-exp ``[M, H]`` to ``base``,
    float64.

    In float32 a difference ``lse_i - max`` and its product with log2 e have three roundings, and the exponential is
    within 2^-21, so a weight is within ``eps = expm1(2^-21 + 3 u |lse_i - max|)``; sum, quotient and products have at
    most 8 roundings; the division by a scale 3. Weights below the least normal number may be 0. Source: derived in this
    file. Where a log-sum-exp or an output that counts is NaN, or float32 may overflow, nothing is claimed.
    """
    top = sums.amax(dim=0)
    level = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    distance = (sums - level).abs().masked_fill(torch.isneginf(sums), 0.0)
    eps = torch.expm1(EXPONENTIAL + 3 * U * distance).amax(dim=0)
    out, lse = merged(outputs, sums)
    weights = torch.exp(sums - lse.nan_to_num(neginf=0.0)).nan_to_num(nan=0.0)
    size = (weights[..., None] * zero_nonfinite(outputs).abs()).sum(dim=0)
    lost = (2 * eps[..., None] + 11 * U) * size
    lost = lost + 2.0**-125 * zero_nonfinite(outputs).abs().sum(dim=0) + 4 * ETA
    if scale is not None:
        out, lost = out / scale, lost / scale
    lost = lost * ROOM + ETA
    extent = level.abs() + distance.amax(dim=0)
    lse_lost = (2 * eps + 2 * EXPONENTIAL + 8 * U * (extent + 1)) * ROOM / math.log(base)
    of_lse = lse / math.log(base)
    opened = ~torch.isfinite(out) | ~(out.abs() + lost < FLOAT32_MAX / 2)
    held, remaining = out.masked_fill(opened, 0.0), of_lse.nan_to_num(nan=0.0, neginf=0.0)
    nan = torch.isnan(of_lse)
    return (held - lost, remaining - lse_lost), (held + lost, remaining + lse_lost), (opened, nan)


def _without_keys(problem: Attention) -> Edges:
    """0 and -inf."""
    rows, width = problem.q.shape[0], problem.v.shape[1]
    zero = torch.zeros((rows, width), dtype=torch.float64, device=problem.q.device)
    none = torch.full((rows,), -torch.inf, dtype=torch.float64, device=problem.q.device)
    return Edges(zero, zero, none, none, torch.zeros_like(zero, dtype=torch.bool))


def _edges(
    problem: Attention,
    out: Tensor,
    lost: Tensor,
    lse: Tensor,
    lse_lost: Tensor,
    unbounded: Tensor,
) -> Edges:
    seen = problem.seen()
    opened = torch.isnan(out) | unbounded[:, None] | ~(out.abs() + lost < FLOAT32_MAX / 2)
    opened = opened & seen[:, None]
    out, lost = (torch.where(seen[:, None], x.nan_to_num(nan=0.0), torch.zeros_like(x)) for x in (out, lost))
    lse = torch.where(seen, lse, torch.full_like(lse, -torch.inf))
    lse_lost = torch.where(seen & ~torch.isnan(lse), lse_lost, torch.zeros_like(lse_lost))
    return Edges(out - lost, out + lost, lse - lse_lost, lse + lse_lost, opened)


def _product(codes: Tensor, v: Tensor) -> ScaledProduct:
    one = torch.ones((1, 1), dtype=torch.float32, device=codes.device)
    columns = v.view(torch.uint8).t().contiguous().view(v.dtype)
    return ScaledProduct(codes, columns, one, one, block=codes.shape[1], b_rows=columns.shape[0])
