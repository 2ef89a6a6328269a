"""The softmax of one block of rows on the CPU: compiled, threaded, the bits of :mod:`oracle.tensorcore.attention`.

Every operation is the float32 one that the pipeline names, with a true fma; ``ex2.approx`` is the integer arithmetic of
:mod:`oracle.numbers.mufu` on its tables. A task takes some rows over all tiles.

NaN and infinities follow IEEE 754 and that model: a NaN score leaves the maximum alone, makes the row sum NaN and has
the code 0x7F. Source: derived from :mod:`oracle.tensorcore.attention`, whose bits it gives.
Needs numba. Not covered, and answered by :func:`supports`: pipelines that are faults.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oracle.numbers import mufu
from oracle.tensorcore.cpu_jit import fma, jit, piece, run_tasks, workers_for

if TYPE_CHECKING:
    from oracle.tensorcore.attention import Pipeline

LANES = 4
UNIT = 8
"""Keys of which each of four lanes has a pair."""
STEP = 16
"""Exponentials that are worth a product of :func:`workers_for`."""
BIAS = mufu.BIAS[mufu.POWER]
f32, f64, i32, i64, u8 = np.float32, np.float64, np.int32, np.int64, np.uint8


def supports(scores: Tensor, pipeline: Pipeline) -> bool:
    """Whether the compiled rows compute ``scores`` ``[R, N]``, float32, by ``pipeline``."""
    plain = pipeline.rescales and not (pipeline.lag or pipeline.sums_codes or pipeline.framed)
    return scores.device.type == "cpu" and plain


def softmax_rows(
    scores: Tensor, start: Tensor, stop: Tensor, c: Tensor, tiles: list[slice], pipeline: Pipeline
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``x`` and codes of P ``[R, N]``, the factors ``a`` ``[T, R]`` (1 in the first tile), lanes ``[R, 4]`` and the
    last maximum ``[R]``: float32, codes uint8.

    ``scores`` ``[R, N]`` and ``c`` ``[R]`` are float32, ``start`` and ``stop`` ``[R]`` int64; ``tiles`` in the order of
    the walk."""
    rows, keys = scores.shape
    x, codes = np.zeros((rows, keys), f32), np.zeros((rows, keys), u8)
    factors, lanes = np.ones((len(tiles), rows), f32), np.zeros((rows, LANES), f32)
    top = np.full(rows, -np.inf, f32)
    spans = np.array([(tile.start, tile.stop) for tile in tiles], np.int64).reshape(-1, 2)
    s, begin, end, factor = (t.contiguous().numpy() for t in (scores, start, stop, c))
    table, squares = _tables()
    own = (s, begin, end, factor, spans, table, squares)

    def task(first: int, last: int) -> None:
        results = (x, codes, factors, lanes, top)
        _rows(*own, pipeline.lift, pipeline.gain, *results, first, last)

    workers = workers_for(rows * keys * STEP)
    step = max(1, -(-rows // (4 * workers)))
    run_tasks(task, [(i, min(i + step, rows)) for i in range(0, rows, step)], workers)
    return tuple(torch.from_numpy(array) for array in (x, codes, factors, lanes, top))  # type: ignore[return-value]


@lru_cache(maxsize=1)
def _tables() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows of ``ex2`` ``[3, 64]`` and the squares ``[2^17]``."""
    return mufu.power_rows().numpy(), mufu.power_squares().numpy()


@piece
def _exp2(x: Any, table: NDArray[np.int64], squares: NDArray[np.int64]) -> Any:
    """:func:`oracle.numbers.mufu.exp2` of one float32."""
    if x != x:
        return f32(x)
    bounded = min(max(f64(x), -1024.0), 1024.0)
    cut = i64(np.floor(abs(bounded) * 8388608.0))
    whole = cut
    if bounded < 0:
        whole = -cut if bounded == np.floor(bounded) or cut == 0 else ~cut
    power, fraction = whole >> i64(23), whole & i64(0x7FFFFF)
    if power < -126:
        return f32(0.0)
    if power > 127:
        return f32(np.inf)
    row, rest = fraction >> i64(17), fraction & i64(0x1FFFF)
    total = (table[0, row] << i64(32)) + ((table[1, row] * rest) << i64(17)) + table[2, row] * squares[rest]
    significand = (total + i64(BIAS)) >> i64(34)
    return f32(f64(significand) * i64((power + i64(1000)) << i64(52)).view(np.float64))


@piece
def _code(x: Any) -> Any:
    """The E4M3 code of a float32 that is not negative, to nearest even, saturated; NaN gives 0x7F."""
    if x != x:
        return u8(0x7F)
    if x >= f32(448.0):
        return u8(0x7E)
    if x < f32(0.015625):
        return u8(np.rint(x * f32(512.0)))
    bits = i32(f32(x).view(np.int32))
    return u8(((bits + i32(0x7FFFF) + ((bits >> i32(20)) & i32(1))) >> i32(20)) - i32(960))


@jit
def _rows(
    scores: NDArray[np.float32],
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
    c: NDArray[np.float32],
    spans: NDArray[np.int64],
    table: NDArray[np.int64],
    squares: NDArray[np.int64],
    lift: float,
    gain: float,
    x: NDArray[np.float32],
    codes: NDArray[np.uint8],
    factors: NDArray[np.float32],
    lanes: NDArray[np.float32],
    top: NDArray[np.float32],
    first: int,
    last: int,
) -> None:
    """:func:`softmax_rows` of the rows ``first`` to ``last``, the latter excluded: ``x`` and ``codes`` ``[R, N]``,
    ``factors`` ``[T, R]``, ``lanes`` ``[R, 4]`` and ``top`` ``[R]`` are written."""
    nothing = f32(-np.inf)
    for i in range(first, last):
        of_c, sums = c[i], lanes[i]
        for t in range(len(spans)):
            begin, end = spans[t, 0], spans[t, 1]
            low, high = max(begin, start[i]), min(end, stop[i])
            grown = top[i]
            for j in range(low, high):
                s = scores[i, j]
                if s > grown:
                    grown = s
            level = f32(0.0) if grown == nothing else grown
            offset = fma(level, of_c, f32(-lift)) if lift != 0.0 else f32(level * of_c)
            for j in range(low, high):
                value: Any = f32(0.0)
                if scores[i, j] != nothing:
                    value = _exp2(fma(scores[i, j], of_c, f32(-offset)), table, squares)
                x[i, j] = value
                codes[i, j] = _code(value if gain == 1.0 else f32(value * f32(gain)))
            a: Any = f32(1.0)
            if t:
                a = f32(0.0)
                if top[i] != nothing:
                    a = _exp2(f32(f32(top[i] - level) * of_c), table, squares)
                factors[t, i] = a
                for lane in range(LANES):
                    value = x[i, begin + 2 * lane] if begin + 2 * lane < end else f32(0.0)
                    sums[lane] = fma(a, sums[lane], value)
            else:
                for lane in range(LANES):
                    sums[lane] = x[i, begin + 2 * lane] if begin + 2 * lane < end else f32(0.0)
            for j in range(begin, min(begin + UNIT, end)):
                if (j - begin) & 1:
                    sums[(j - begin) >> 1] += x[i, j]
            for j in range(begin + UNIT, end):
                sums[((j - begin) >> 1) & 3] += x[i, j]
            top[i] = grown
