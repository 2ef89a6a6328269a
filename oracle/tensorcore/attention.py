"""FP8 attention on tensor cores, bit for bit: how a kernel walks over the keys of a row, as a record.

    S      dot products of codes by one chain of the instruction, from zero
    m, M   the running maximum; M = fma(m, c, -lift), or fl(m c)
    x      ex2.approx.ftz(fma(S, c, -M)) for the keys of a tile, of which a lane of four holds keys 8 b + 2 c + {0, 1}
    P      x, or fl(gain x), rounded to E4M3, to nearest even and saturated
    l      fma(a, l, x_0) and one addition for each further key of a lane, then lanes 0 + 2 and 1 + 3, then both
    O      fl(fl(a O) + P V), the tile's product by a chain from zero, or one chain over all tiles that goes on from
           fl(a O)
    a      ex2.approx.ftz(fl(fl(m_before - m) c)), 1 in the first tile
    out    fl(O fl(rcp.approx(l) v_scale)), rounded once to the output's dtype; 0 where l is 0 or NaN

Tiles run from the last key to the first. ``c`` is the softmax scale times log2 e times the scales of queries and keys,
in the order that :class:`Pipeline` names. A sink adds ``ex2(fma(sink, log2 e, -M))`` to ``l`` at the end.

Sources: read in vLLM's flash-attention ``hopper/`` @617264c and in FlashInfer 0.6.18
``attention/hopper/attention_updater.cuh``; what the compiler contracts, in the machine code of vLLM 0.20.2. Seen on an
H100: of 24 calls of vLLM 0.20.2 ``_vllm_fa3_C.fwd`` (head dims 64 to 256, causal, windows, sinks, pages, few rows)
every element that a record computes has its bits; of 10 calls of FlashInfer's single prefill 502,654 of 502,784, of 14
calls over ragged and paged sequences 351,228 of 351,232.
Keys may be shared among several blocks: every part is a walk of its own, and the parts are weighted by the exponentials
of their log-sum-exps, whose logarithm (``lg2.approx``) has no model: their sum is known within an interval.
With a soft cap a score is ``tanh.approx`` of its product with the scales over the cap, and ``c`` the cap times log2 e.
Not covered: transposed values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oracle import loading
from oracle.errors import NumericsError, among
from oracle.extensions import added
from oracle.numbers import mufu
from oracle.numbers.cuda_math import fma
from oracle.numbers.formats import by_name, from_codes
from oracle.numbers.rounding import Overflow, Rounding, encode, f32
from oracle.tensorcore.fused import ABSENT, accumulate, operand
from oracle.tensorcore.instructions import Status, instruction
from oracle.tensorcore.predict import predict_blocks, predict_product
from oracle.tensorcore.schedules import Schedule
from oracle.tensorcore.schedules import get as schedule
from oracle.truth.attention import Attention, at_once
from oracle.truth.gemm import ScaledProduct

E4M3 = by_name("float8_e4m3fn")
INSTRUCTION, CHAIN, PROMOTED = "sm90.wgmma.fp8", "sm90.chain", "sm90.promote128"
LOG2_E = float(np.float32(math.log2(math.e)))
LANES, PAIR = 4, 2
FEW = 64
"""Rows that one group of warps takes: at most so many have tiles of their own (``use_one_mma_wg``)."""
LEAST = 16
"""Problems of fewer rows are counted as if they had so many: their keys and values take memory, too."""


@dataclass(frozen=True)
class Pipeline:
    """How a kernel computes attention.

    Attributes
    ----------
    name : as ``sm90.fa3.tile``.
    seen_in : the kernels that compute so, and where that was seen.
    status : whether hardware showed it.
    keys : ``(largest head dim, keys of a tile)``, ascending; few_keys: the same for at most :data:`FEW` rows, where the
        head dim is in it.
    rows : ``(largest head dim, rows of a block)``: where a window begins depends on the block.
    lift : what is added to the exponent of P, in powers of two; gain : what multiplies P, rounded once more.
    promoted : every tile is summed from zero and added in float32; else one chain goes over all.
    backward : from the last tile to the first.
    scales_first : ``c`` is ``fl(fl(fl(q k) softmax) log2 e)``; else ``fl(fl(softmax log2 e) fl(q k))``.
    sums_codes : the row sum is of the rounded P; a fault.
    lag : the maximum is only raised when it grows by more than so many powers of two; a fault where P saturates.
    framed : the maximum begins at the sink, so that P is relative to it; a fault.
    rescales : O and l are rescaled when the maximum grows; without it, a fault.
    from_window : of a call with a window to the left, tiles are counted from the first key of the block's first row.
    modelled : its products are those of the instruction; without it of any accumulator, so that no bits follow.
    free : nothing is said of its tiles: a code is within half a step of P with a lift of at least 2^8.
    integers : scores are exact sums of INT8 codes, times scales; how these are multiplied is not said, so that no bits
        follow.
    """

    name: str
    seen_in: str
    status: Status
    keys: tuple[tuple[int, int], ...]
    few_keys: tuple[tuple[int, int], ...] = ()
    rows: tuple[tuple[int, int], ...] = ((64, 192), (256, 128))
    lift: float = 8.0
    gain: float = 1.0
    promoted: bool = True
    backward: bool = True
    scales_first: bool = False
    sums_codes: bool = False
    lag: float = 0.0
    framed: bool = False
    rescales: bool = True
    from_window: bool = True
    modelled: bool = True
    free: bool = False
    integers: bool = False

    def tile(self, depth: int, rows: int) -> int:
        """Keys of a tile for this head dim and so many rows of one head of keys."""
        return _of(self.few_keys if self._few(depth, rows) else self.keys, depth)

    def block(self, depth: int, rows: int) -> int:
        """Rows of a block."""
        return FEW if self._few(depth, rows) else _of(self.rows, depth)

    def _few(self, depth: int, rows: int) -> bool:
        return rows <= FEW and any(depth <= most for most, _ in self.few_keys)

    def why_not(self, problem: Attention) -> str | None:
        """The reason for which this pipeline cannot compute a problem, or None."""
        depth = max(problem.q.shape[1], problem.v.shape[1])
        if self.integers:
            coded = not problem.codes and problem.v.dtype.itemsize == 1
            return None if coded else f"{self.name} multiplies INT8 queries and keys, and E4M3 values"
        if not problem.coded:
            return f"{self.name} multiplies E4M3 codes; queries, keys or values are wider"
        if depth > self.keys[-1][0]:
            return f"{self.name} has head dims up to {self.keys[-1][0]}, not {depth}"
        return None

    def factor(self, problem: Attention | Stack) -> Tensor:
        """``c`` of each row, float64 values of float32 ``[R]``; NaN and infinite scales stay what they are. With a soft
        cap what multiplies the tangent."""
        if problem.cap is not None:
            return torch.full_like(problem.q_scale, problem.cap * math.log2(math.e)).to(torch.float64)
        q, k = problem.q_scale.to(torch.float64), problem.k_scale.to(torch.float64)
        softmax = float(np.float32(problem.softmax_scale))
        if self.scales_first:
            return f32(f32(f32(q * k) * softmax) * LOG2_E)
        return f32(f32(q * k) * float(np.float32(softmax * math.log2(math.e))))

    def capped(self, problem: Attention, dots: Tensor) -> Tensor:
        """What is multiplied by :meth:`factor`: dot products ``dots`` ``[R, N]``, float32, or with a soft cap their
        tangents. NaN stays NaN."""
        if problem.cap is None:
            return dots
        scale = float(np.float32(np.float32(problem.softmax_scale) / np.float32(problem.cap)))
        inner = f32(f32(problem.q_scale.to(torch.float64) * problem.k_scale.to(torch.float64)) * scale)
        return mufu.tanh(f32(dots.to(torch.float64) * inner[:, None])).to(torch.float32)

    def value_scale(self, problem: Attention | Stack) -> Tensor:
        """What multiplies the reciprocal of ``l`` at the end, without the gain of P: a float64 value of float32,
        ``[]`` (of a stack ``[Z R]``) or that of each column ``[Dv]``; a NaN scale stays NaN."""
        scale = problem.v_scale.to(torch.float64)
        return scale if self.gain == 1.0 else f32(scale * float(np.float32(1.0 / self.gain)))


def _of(table: tuple[tuple[int, int], ...], depth: int) -> int:
    return next((extent for most, extent in table if depth <= most), table[-1][1])


@dataclass(frozen=True)
class Step:
    """One tile of keys of a walk; float64 but where it says so.

    Attributes
    ----------
    keys : the keys of the tile.
    codes : P as codes ``[R, n]`` of E4M3.
    x : P before its rounding ``[R, n]``, float32.
    factor : ``a`` of the rows ``[R]``; None in the first tile.
    """

    keys: slice
    codes: Tensor
    x: Tensor
    factor: Tensor | None


@dataclass(frozen=True)
class Stack:
    """Problems of the same extents, the rows of one after those of the other, as :class:`Attention` has them: ``q``
    ``[Z, R, D]``, ``k`` ``[Z, N, D]``, ``v`` ``[Z, N, Dv]``, codes; all else ``[Z R]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    start: Tensor
    stop: Tensor
    sink: Tensor | None
    cap: None = None

    @classmethod
    def of(cls, problems: Sequence[Attention]) -> Stack:
        """Those of one shape, device and softmax scale."""
        first, rows = problems[0], problems[0].q.shape[0]
        q, k, v = (torch.stack([getattr(one, name).view(torch.uint8) for one in problems]) for name in "qkv")
        of_k, of_v = (
            torch.stack([getattr(one, name) for one in problems]).repeat_interleave(rows)
            for name in ("k_scale", "v_scale")
        )
        of_q, start, stop = (
            torch.cat([getattr(one, name) for one in problems]) for name in ("q_scale", "start", "stop")
        )
        sink = None if first.sink is None else torch.cat([one.sink for one in problems if one.sink is not None])
        return cls(q, k, v, first.softmax_scale, of_q, of_k, of_v, start, stop, sink)

    @property
    def keys(self) -> int:
        """Those of one problem."""
        return self.k.shape[1]

    def seen(self) -> Tensor:
        """Bool ``[Z R]``: rows that see a key."""
        return self.stop.clamp(max=self.keys) > self.start.clamp(min=0)


@dataclass(frozen=True)
class Walk:
    """One block of rows over its keys.

    Attributes
    ----------
    problem : the rows, and the keys from which the tiles are counted; several of :func:`walk_together`.
    out : float32 ``[R, Dv]``, the result before its store.
    sums : float64 ``[R, Dv]``, ``O`` before it is divided.
    steps : its tiles, in the order of the walk.
    top, factor : the last maximum of the scores and ``c``, float64 ``[R]``.
    total : the row sum with the sink, times ``2^lift``, float64 ``[R]``.
    """

    problem: Attention | Stack
    out: Tensor
    sums: Tensor
    steps: tuple[Step, ...]
    top: Tensor
    factor: Tensor
    total: Tensor


def predict_attention(problem: Attention, pipeline: Pipeline) -> Tensor:
    """The float32 result ``[R, Dv]`` of every row before its store.

    Rows without keys give 0; a NaN score makes ``l`` NaN and the output ``0 O``. Source: :attr:`Pipeline.seen_in`.
    Raises NumericsError: the pipeline cannot compute it.
    """
    return torch.cat([walk.out for walk in walks(problem, pipeline)])


def walks(problem: Attention, pipeline: Pipeline, some: Tensor | None = None) -> Iterator[Walk]:
    """The walk of every block of rows, in the order of the rows; see :func:`predict_attention`. ``some``: of these rows
    alone, int64 ``[S]``, ascending, over the tiles that they have among the others.

    Raises NumericsError: the pipeline cannot compute it, or says nothing of its products."""
    for part, width in blocks(problem, pipeline, some):
        yield _walk(part, pipeline, width)


def blocks(problem: Attention, pipeline: Pipeline, some: Tensor | None = None) -> Iterator[tuple[Attention, int]]:
    """Blocks of rows over the keys from which their tiles are counted, in the order of the rows, and the keys of a
    tile; with ``some`` of the rows, int64 ``[S]``, ascending, these alone of each block that has one.

    Raises NumericsError: the pipeline cannot compute it."""
    if (reason := pipeline.why_not(problem)) is not None:
        raise NumericsError(reason)
    rows, depth = problem.q.shape[0], max(problem.q.shape[1], problem.v.shape[1])
    width = pipeline.tile(depth, rows)
    windowed = pipeline.from_window and bool((problem.start > 0).any())
    block = pipeline.block(depth, rows) if windowed else problem.at_once
    for first in range(0, rows, block) if some is None else torch.unique(some // block * block).tolist():
        part = problem.rows(slice(first, first + block))
        origin = int(part.start[0]) if windowed else 0
        if some is not None:
            part = part.rows(some[(some >= first) & (some < first + block)] - first)
        yield _of_keys(part, origin, part.k.shape[0]), width


def tiles(keys: int, width: int, pipeline: Pipeline) -> list[slice]:
    """The tiles of so many keys in the order of the walk."""
    forward = [slice(i, min(i + width, keys)) for i in range(0, keys, width)]
    return forward[::-1] if pipeline.backward else forward


def scores(problem: Attention) -> Tensor:
    """The dot products of codes by one chain of the instruction, float64 values of float32 ``[R, N]``; NaN where a NaN
    enters."""
    return _product(problem.q, problem.k).to(torch.float64)


def split_walks(problem: Attention, pipeline: Pipeline, splits: int) -> Iterator[tuple[Walk, ...]]:
    """The walks of every block of rows whose tiles are shared among ``splits`` others: ``ceil(tiles / splits)`` tiles
    each, from the first key that the block's first row sees; parts without a tile are left out, and the first has the
    sink. See :func:`predict_attention`; :func:`combined` adds them.

    Source: vllm-project/flash-attention hopper/block.h @617264c; vLLM 0.20.2 _vllm_fa3_C.fwd on an H100: every bit of
    the partial outputs of 7 calls.
    """
    if (reason := pipeline.why_not(problem)) is not None:
        raise NumericsError(reason)
    rows, depth = problem.q.shape[0], max(problem.q.shape[1], problem.v.shape[1])
    width, block = pipeline.tile(depth, rows), pipeline.block(depth, rows)
    windowed = pipeline.from_window and bool((problem.start > 0).any())
    for first in range(0, rows, block):
        part = problem.rows(slice(first, first + block))
        origin = int(part.start[0]) if windowed else 0
        end = min(part.k.shape[0], max(origin, int(part.stop.max())))
        each = width * -(-max(1, -(-(end - origin) // width)) // splits)
        results = []
        for start in range(origin, max(end, origin + 1), each):
            one = _of_keys(part, start, min(start + each, end))
            results.append(_walk(one if start == origin else replace(one, sink=None), pipeline, width))
        yield tuple(results)


def combined(parts: tuple[Walk, ...], pipeline: Pipeline) -> tuple[Tensor, Tensor]:
    """The float64 output ``[R, Dv]`` and natural log-sum-exp ``[R]`` of all parts of a block: their float32 outputs,
    weighted by the exact exponentials of their exact log-sum-exps, which no model has bit for bit. One part is its own
    output. NaN where a part has NaN."""
    sums = torch.stack([log_sum(walk, pipeline) for walk in parts])
    if len(parts) == 1:
        return parts[0].out.to(torch.float64), sums[0]
    lse = torch.logsumexp(sums, dim=0)
    weights = torch.exp(sums - lse).masked_fill(torch.isneginf(sums), 0.0)
    out = torch.zeros_like(parts[0].out, dtype=torch.float64)
    for w, walk in zip(weights, parts, strict=True):
        out = out + w[:, None] * walk.out
    return out, lse


def log_sum(walk: Walk, pipeline: Pipeline) -> Tensor:
    """The natural log-sum-exp of the rows of a walk, float64 ``[R]``; -inf without keys, NaN where a score is."""
    exponent = walk.top.nan_to_num(neginf=0.0) * walk.factor - pipeline.lift
    lse = (exponent + torch.log2(walk.total)) * math.log(2.0)
    return torch.where(walk.problem.seen(), lse, torch.full_like(lse, -torch.inf))


def _of_keys(problem: Attention, first: int, stop: int) -> Attention:
    """The same rows over keys ``first`` to ``stop``, the latter excluded."""
    if (first, stop) == (0, problem.k.shape[0]):
        return problem
    ends = {name: (getattr(problem, name) - first).clamp(min=0, max=stop - first) for name in ("start", "stop")}
    return replace(problem, k=problem.k[first:stop], v=problem.v[first:stop], **ends)


def _walk(problem: Attention, pipeline: Pipeline, width: int) -> Walk:
    if not pipeline.modelled:
        raise NumericsError(f"{pipeline.name} is of any accumulator, so that no bits follow from it")
    rows, keys = problem.q.shape[0], problem.k.shape[0]
    c = pipeline.factor(problem)
    out = torch.zeros((rows, problem.v.shape[1]), dtype=torch.float32, device=c.device)
    if not keys:
        top = torch.full((rows,), -torch.inf, dtype=torch.float64, device=c.device)
        return Walk(problem, out, out.to(torch.float64), (), top, c, torch.zeros_like(c))
    dots = problem.scores().to(torch.float32) if pipeline.integers else _product(problem.q, problem.k)
    dots, order = pipeline.capped(problem, dots), tiles(keys, width, pipeline)
    lanes, top, steps = _softmax(dots, problem, pipeline, c, order)
    whole = _rescaled(steps, problem.v, width) if pipeline.promoted and dots.is_cuda else None
    if whole is not None:
        return _divided(problem, pipeline, c, whole, lanes, top, steps)
    for step, tile_sum in zip(steps, _tile_sums(steps, problem.v, width, pipeline), strict=True):
        kept = out if step.factor is None else out * step.factor.to(torch.float32)[:, None]
        if tile_sum is None:
            out = _chain(step.codes, problem.v[step.keys], kept)
        else:
            out = tile_sum if step.factor is None else kept + tile_sum
    return _divided(problem, pipeline, c, out, lanes, top, steps)


def _divided(
    problem: Attention | Stack,
    pipeline: Pipeline,
    c: Tensor,
    out: Tensor,
    lanes: Tensor,
    top: Tensor,
    steps: tuple[Step, ...],
) -> Walk:
    """The end of a walk: the sums of P V ``out``, float32 ``[R, Dv]``, divided by the row sum of ``lanes`` ``[R, 4]``
    and the sink."""
    total = f32(f32(lanes[:, 0] + lanes[:, 2]) + f32(lanes[:, 1] + lanes[:, 3]))
    if problem.sink is not None:
        level = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
        offset = fma(level, c, -pipeline.lift) if pipeline.lift else f32(level * c)
        added_ = mufu.exp2(fma(problem.sink, torch.full_like(c, LOG2_E), -offset))
        total = f32(total + torch.where(problem.seen(), added_, torch.zeros_like(added_)))
    inverse = mufu.reciprocal(total)
    inverse = torch.where((total == 0) | torch.isnan(total), torch.zeros_like(inverse), inverse)
    scale = pipeline.value_scale(problem)
    if isinstance(problem, Attention) and scale.dim():  # one for each column
        stored = out * inverse.to(torch.float32)[:, None] * scale.to(torch.float32)
    else:
        stored = out * f32(inverse * scale).to(torch.float32)[:, None]
    return Walk(problem, stored, out.to(torch.float64), steps, top, c, total)


def together(problems: Sequence[Attention], pipeline: Pipeline) -> list[list[int]]:
    """Which of the ``problems`` one walk on their device may take, as :func:`walk_together` does: lists of their
    numbers, of which one alone may be any problem.

    Several have few rows each, and the same extents."""
    groups: dict[object, list[int]] = {}
    for number, one in enumerate(problems):
        few = 0 < one.q.shape[0] <= FEW and one.k.shape[0] > 0 and one.coded and one.cap is None
        few = few and pipeline.why_not(one) is None
        shared = (one.q.shape, one.k.shape, one.v.shape, one.softmax_scale, one.sink is None)
        groups.setdefault(shared if few else number, []).append(number)
    device = _compiled("device_attention")
    lists = []
    for numbers in groups.values():
        first = problems[numbers[0]]
        most = 1
        if device is not None and device.supports(first.q, pipeline) and pipeline.modelled:
            most = max(1, at_once(first.q.device) // (max(first.q.shape[0], LEAST) * max(1, first.k.shape[0])))
        lists += [numbers[i : i + most] for i in range(0, len(numbers), most)]
    return lists


def walk_together(problems: Sequence[Attention], pipeline: Pipeline) -> Walk | None:
    """One walk of problems that :func:`together` names, with their rows one after the other; None where windows move
    the tiles, so that each has its own.

    NaN and rows without keys are those of :func:`predict_attention`."""
    stack = Stack.of(problems)
    if pipeline.from_window and bool((stack.start > 0).any()):
        return None
    device, (several, rows, depth) = _compiled("device_attention"), stack.q.shape
    c, keys = pipeline.factor(stack), stack.k.shape[1]
    order = tiles(keys, pipeline.tile(max(depth, stack.v.shape[2]), rows), pipeline)
    of_rows = (stack.start, stack.stop, c.to(torch.float32))
    dots = device.scores(stack.q, stack.k).view(several * rows, keys)
    x, codes, factors, lanes, top = device.softmax_rows(dots, *of_rows, order, pipeline)
    sums = device.sums(codes.view(several, rows, keys), stack.v, factors, order, promoted=pipeline.promoted)
    steps = _steps(x, codes, factors, order)
    wide = (lanes.to(torch.float64), top.to(torch.float64), steps)
    return _divided(stack, pipeline, c, sums.view(several * rows, -1), *wide)


def _softmax(
    dots: Tensor, problem: Attention, pipeline: Pipeline, c: Tensor, order: list[slice]
) -> tuple[Tensor, Tensor, tuple[Step, ...]]:
    """The lanes' sums ``[R, 4]`` and the last maximum ``[R]``, float64, and every tile, of float32 scores ``[R, N]``;
    by the compiled rows where these cover them."""
    for name in ("cpu_attention", "device_attention"):
        compiled = _compiled(name)
        if compiled is not None and compiled.supports(dots, pipeline):
            of_rows = (problem.start, problem.stop, c.to(torch.float32))
            x, codes, factors, lanes, top = compiled.softmax_rows(dots, *of_rows, order, pipeline)
            return lanes.to(torch.float64), top.to(torch.float64), _steps(x, codes, factors, order)
    return softmax_tiles(dots, problem, pipeline, c, order)


def _steps(x: Tensor, codes: Tensor, factors: Tensor, order: list[slice]) -> tuple[Step, ...]:
    """The tiles ``order`` of P before its cast, ``x``, and as ``codes`` ``[R, N]``, uint8, and ``factors``
    ``[T, R]``."""
    codes, factors = codes.view(torch.float8_e4m3fn), factors.to(torch.float64)
    return tuple(
        Step(tile, codes[:, tile], x[:, tile], factors[number] if number else None) for number, tile in enumerate(order)
    )


def softmax_tiles(
    dots: Tensor, problem: Attention, pipeline: Pipeline, c: Tensor, order: list[slice]
) -> tuple[Tensor, Tensor, tuple[Step, ...]]:
    """The definition of P and of the row sums: the lanes' sums ``[R, 4]`` and the last maximum ``[R]``, float64, and
    the tiles ``order`` one after the other, of float32 scores ``dots`` ``[R, N]`` and ``c`` ``[R]``, float64.

    A NaN score leaves the maximum alone and makes the row sum NaN. Source: the module."""
    rows, wide, steps = len(dots), torch.float64, []
    dots = dots.to(wide).masked_fill(~problem.window(), -torch.inf)
    top = torch.full((rows,), -torch.inf, dtype=wide, device=c.device)
    if pipeline.framed and problem.sink is not None:
        top = torch.where(problem.seen(), f32(f32(problem.sink * LOG2_E) / c), top)
    lanes = torch.zeros((rows, LANES), dtype=wide, device=c.device)
    for number, tile in enumerate(order):
        s = dots[:, tile]
        grown = torch.fmax(top, s.nan_to_num(nan=-torch.inf, neginf=-torch.inf).amax(dim=1))
        if pipeline.lag and number:
            grown = torch.where((grown - top) * c > pipeline.lag, grown, top)
        level = torch.where(torch.isneginf(grown), torch.zeros_like(grown), grown)
        offset = fma(level, c, -pipeline.lift) if pipeline.lift else f32(level * c)
        x = mufu.exp2(fma(s, c[:, None], -offset[:, None]))
        x = torch.where(torch.isneginf(s), torch.zeros_like(x), x)
        raised = x if pipeline.gain == 1.0 else f32(x * pipeline.gain)
        codes = from_codes(encode(raised, E4M3, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE), E4M3)
        a = None
        if number:
            a = mufu.exp2(f32(f32(top - level) * c))
            a = torch.where(torch.isneginf(top), torch.zeros_like(a), a)
            if not pipeline.rescales:
                a = torch.where(torch.isneginf(top), a, torch.ones_like(a))
        summed = codes.to(wide) / pipeline.gain if pipeline.sums_codes else x
        lanes = _row_sums(lanes, summed, a)
        top = grown
        steps.append(Step(tile, codes, x.to(torch.float32), a))
    return lanes, top, tuple(steps)


def _rescaled(steps: tuple[Step, ...], v: Tensor, width: int) -> Tensor | None:
    """The sums of all tiles, each added to what was before times its factor, float32 ``[R, Dv]``, by the engine of a
    device; None where it does not give them."""
    engine = _compiled("engine_cuda")
    if engine is None or len(steps) < 2:
        return None
    codes, columns = [], []
    for step in steps:  # zeros add nothing
        short = (0, width - step.codes.shape[1])
        codes.append(torch.nn.functional.pad(step.codes.view(torch.uint8), short))
        columns.append(torch.nn.functional.pad(v[step.keys].view(torch.uint8).t(), short))
    ones = torch.ones_like(steps[0].x[:, 0])
    factors = torch.stack([ones if step.factor is None else step.factor.to(torch.float32) for step in steps], dim=1)
    a, b = (torch.cat(parts, dim=1).view(v.dtype) for parts in (codes, columns))
    product = ScaledProduct(a, b, factors, torch.ones_like(factors[:1]), block=width, b_rows=len(b))
    sums: Tensor | None = engine.decaying(product, _chains_of(width))
    return sums


def _tile_sums(steps: tuple[Step, ...], v: Tensor, width: int, pipeline: Pipeline) -> Iterator[Tensor | None]:
    """The product of every tile by a chain from zero, float32 ``[R, Dv]``; None where one chain goes over all."""
    if not pipeline.promoted:
        yield from (None for _ in steps)
        return
    columns = v.view(torch.uint8).t().contiguous().view(v.dtype)
    codes = torch.cat([step.codes.view(torch.uint8) for step in sorted(steps, key=_first)], dim=1).view(
        torch.float8_e4m3fn
    )
    own = _whole_tiles(codes, columns, width)
    for step in steps:
        if own is None:
            yield _product(step.codes, columns[:, step.keys])
        else:
            yield own[step.keys.start // width]


def _first(step: Step) -> int:
    return int(step.keys.start)


def _whole_tiles(codes: Tensor, columns: Tensor, width: int) -> Tensor | None:
    """The products of all tiles of ``width`` keys, counted from the first, float32 ``[T, R, Dv]``; None where no engine
    gives them together."""
    if codes.shape[1] <= width:
        return None
    count = -(-codes.shape[1] // width)
    left, right = (torch.ones((n, count), dtype=torch.float32, device=codes.device) for n in (len(codes), 1))
    return predict_blocks(
        ScaledProduct(codes, columns, left, right, block=width, b_rows=len(columns)), _chains_of(width)
    )


def _compiled(name: str) -> Any:
    """A module of this package that needs numba or triton, or None without them."""
    return loading.compiled(f"oracle.tensorcore.{name}")


def _row_sums(lanes: Tensor, x: Tensor, a: Tensor | None) -> Tensor:
    """The four lanes' sums ``[R, 4]`` after one more tile ``x`` ``[R, n]``."""
    unit = LANES * PAIR
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % unit)).view(x.shape[0], -1, LANES, PAIR)
    first = padded[:, 0, :, 0]
    lanes = first if a is None else fma(a[:, None].expand_as(lanes), lanes, first)
    for column in range(1, padded.shape[1] * PAIR):
        lanes = f32(lanes + padded[:, column // PAIR, :, column % PAIR])
    return lanes


def _product(a: Tensor, b: Tensor) -> Tensor:
    """One chain over the products of codes ``a`` ``[M, K]`` and ``b`` ``[N, K]``, float32 ``[M, N]``."""
    one = torch.ones((1, 1), dtype=torch.float32, device=a.device)
    product = ScaledProduct(a, b, one, one, block=a.shape[1], b_rows=b.shape[0])
    return predict_product(product, _chains_of(a.shape[1]), out_dtype=torch.float32)


@cache
def _chains_of(products: int) -> Schedule:
    """One chain for every so many products, added to 0 or to what was before with factors of 1: unlike those of
    ``CHAIN`` its sums go through no epilogue."""
    return replace(schedule(PROMOTED), name=f"{PROMOTED} of {products}", interval=products)


def _chain(codes: Tensor, v: Tensor, first: Tensor) -> Tensor:
    """``first`` ``[R, Dv]`` and the products of ``codes`` ``[R, n]`` and ``v`` ``[n, Dv]``, by a chain that goes on;
    float32 ``[R, Dv]``."""
    inst = instruction(INSTRUCTION)
    compiled = _compiled("engine_cpu") if codes.device.type == "cpu" else None
    if compiled is not None:
        columns = v.view(torch.uint8).t().contiguous().view(v.dtype)
        one = torch.ones((1, 1), dtype=torch.float32, device=codes.device)
        product = ScaledProduct(codes, columns, one, one, block=codes.shape[1], b_rows=len(columns))
        sums: Tensor = compiled.continued(product, schedule(CHAIN), first)
        return sums
    left, right = operand(codes, inst), operand(v, inst)
    total = first.to(torch.float64)
    for start in range(0, codes.shape[1], inst.k):
        part = slice(start, start + inst.k)
        p = left.values[:, None, part] * right.values[part].t()[None]
        e = left.exponents[:, None, part] + right.exponents[part].t()[None]
        total = accumulate(p, torch.where(p == 0, ABSENT, e), total, inst)
    return total.to(torch.float32)


_FA3 = "vLLM 0.20.2 _vllm_fa3_C.fwd on an H100: every bit of 24 calls"
TILE_SUMS = Pipeline(
    "sm90.fa3.tile",
    _FA3,
    Status.SEEN_ON_HARDWARE,
    keys=((64, 128), (96, 128), (128, 192), (192, 96), (256, 128)),
    few_keys=((96, 128), (128, 96)),
)
"""FlashAttention-3 with two levels of sums, as vLLM builds it."""
ANY = replace(
    TILE_SUMS,
    name="sm90.attention.any",
    seen_in="every pipeline that lifts P",
    status=Status.LITERATURE,
    keys=((256, 1 << 30),),
    few_keys=(),
    from_window=False,
    promoted=False,
    modelled=False,
    free=True,
)
"""Whatever a kernel's tiles, direction, lift and sums are; all keys are one tile."""
PIPELINES = MappingProxyType(
    {
        one.name: one
        for one in (
            TILE_SUMS,
            replace(
                TILE_SUMS,
                name="sm90.fa3.chain",
                seen_in="Dao-AILab/flash-attention hopper/ @0251105, read",
                status=Status.LITERATURE,
                keys=((64, 160), (96, 128), (128, 224), (192, 160), (256, 128)),
                rows=((96, 192), (256, 128)),
                promoted=False,
            ),
            replace(
                TILE_SUMS,
                name="sm90.sage",
                seen_in="SageAttention 2.2 csrc/qattn/qk_int_sv_f8_cuda_sm90.cu, read",
                status=Status.LITERATURE,
                keys=((256, 128),),
                few_keys=(),
                lift=float(np.float32(8.807)),
                backward=False,
                from_window=False,
                integers=True,
            ),
            replace(
                TILE_SUMS,
                name="sm90.flashinfer.fp8",
                seen_in="FlashInfer 0.6.18 single_prefill_with_kv_cache, backend fa3, on an H100: 502,654 of 502,784; "
                "rows of two later calls have scales multiplied in another order",
                keys=((64, 128), (128, 192), (256, 128)),
                few_keys=(),
                lift=0.0,
                gain=448.0,
                promoted=False,
                scales_first=True,
                from_window=False,
            ),
            replace(
                TILE_SUMS,
                name="sm90.flashinfer.fp8.paged",
                seen_in="FlashInfer 0.6.18 BatchPrefillWithPagedKVCacheWrapper, backend fa3, on an H100",
                keys=((64, 128), (128, 128), (256, 64)),
                few_keys=(),
                lift=0.0,
                gain=448.0,
                promoted=False,
                scales_first=True,
                from_window=False,
            ),
        )
    }
)
"""By name; another distribution adds its own under the entry point group ``fp8_oracle.pipelines``."""

TILES = (32, 64, 96, 128, 160, 192, 224, 256)
"""Keys of a tile that are tried."""
EVERY_TILE = tuple(range(16, 257, 16))
UNLIFTED, LIFTED = "lift0", ("lift8", "gain448")
"""What is done to P before its cast; without a lift keys are lost."""
_DECLARED = re.compile(
    r"sm90\.attention\.(backward|forward)\.(\d{1,4})\.(lift(\d{1,2})|gain(\d{1,3}))\.(tile|chain|any)"
)


@cache
def pipelines() -> dict[str, Pipeline]:
    """Every pipeline that has a name of its own.

    Raises ExtensionError: another distribution's cannot be loaded."""
    foreign = added("fp8_oracle.pipelines", Pipeline, known=PIPELINES, many=True)
    return {**PIPELINES, **{one.name: one for one in foreign}}


@cache
def pipeline(name: str) -> Pipeline:
    """The pipeline of this name, or the one that ``sm90.attention.forward.64.lift8.tile`` spells out: direction, keys
    of a tile, the lift (a power of two) or gain of P, and whether each tile is summed from zero (``tile``), one chain
    goes over all (``chain``), or nothing is said of the accumulators (``any``).

    Raises NumericsError: the name is unknown, or a tile is no multiple of 8 keys.
    """
    known = pipelines()
    if name in known or name == ANY.name:
        return known.get(name, ANY)
    if (at := _DECLARED.fullmatch(name)) is None:
        spelt = "or spell one out, as sm90.attention.forward.64.lift8.tile"
        raise NumericsError(f"no attention pipeline {name!r}; {among(name, sorted(known))}; {spelt}")
    keys = int(at[2])
    if keys % 8 or not keys:
        raise NumericsError(f"{name}: a tile of {keys} keys; a lane of a tensor core holds pairs of every 8")
    return replace(
        TILE_SUMS,
        name=name,
        seen_in="declared by its name",
        status=Status.LITERATURE,
        keys=((256, keys),),
        few_keys=(),
        lift=float(at[4] or 0),
        gain=float(at[5] or 1),
        promoted=at[6] == "tile",
        modelled=at[6] != "any",
        backward=at[1] == "backward",
    )


def candidates(
    length: int, lifts: tuple[str, ...] = (UNLIFTED, *LIFTED), every: tuple[int, ...] = TILES
) -> Iterator[Pipeline]:
    """The pipelines that an output for ``length`` keys is compared with: those with a name, then spelt ones, of which a
    tile that holds all keys stands for every larger one."""
    yield from pipelines().values()
    fewer = [keys for keys in every if keys < length]
    for keys in (*fewer, *every[len(fewer) : len(fewer) + 1]):
        for way in ("backward", "forward")[: 1 + (keys < length)]:
            for raised in lifts:
                for sums in ("tile", "chain"):
                    yield pipeline(f"sm90.attention.{way}.{keys}.{raised}.{sums}")
