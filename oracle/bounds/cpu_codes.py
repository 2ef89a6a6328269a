"""The sums of one column of one row over the tiles of a pipeline, compiled: what :mod:`oracle.bounds.attention` asks of
every pipeline that may have computed a wrong element.

The formulas are those of its module, in float64 and in the order of the keys; NaN does not enter. Source: derived from
:func:`oracle.bounds.attention.codes_bound`. Needs numba. Not covered: pipelines that say nothing of their tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.tensorcore.cpu_jit import jit, piece


@piece
def _coded(x: Any) -> Any:
    """The value of E4M3 nearest to a float64 that is not negative, ties to even, saturated."""
    if x >= 448.0:
        return 448.0
    if x < 0.015625:
        return np.rint(x * 512.0) / 512.0
    step = 0.001953125
    while x >= 16.0 * step:
        step *= 2.0
    return min(np.rint(x / step) * step, 448.0)


@jit
def column_sums(
    y: NDArray[np.float64],
    eps: NDArray[np.float64],
    first: int,
    last: int,
    v: NDArray[np.float64],
    spans: NDArray[np.int64],
    raised: float,
    promoted: bool,
    step: int,
    cut: float,
    least: float,
    room: float,
    sums: NDArray[np.float64],
) -> None:
    """Writes into ``sums`` ``[7]``: middle, radius, what the accumulator lost, the size of all products, the row sum,
    its error, and the last maximum, of the exponents ``y``, errors ``eps`` and values ``v`` of keys ``[N]``, float64,
    of which the row sees ``first`` to ``last``; ``spans`` int64 ``[T, 2]`` in the order of the walk. NaN does not
    enter."""
    top = -np.inf
    middle = radius = lost = size = total = of_sum = 0.0
    for t in range(len(spans)):
        begin, end = spans[t, 0], spans[t, 1]
        low, high = max(begin, first), min(end, last)
        grown = top
        for j in range(low, high):
            grown = max(grown, y[j])
        level = 0.0 if grown == -np.inf else grown
        a = 2.0 ** (top - level)
        kept = 0.0 if promoted else a
        m, r, gone = middle * kept, radius * kept, lost * kept
        size, total, of_sum = size * a, total * a, of_sum * a
        for k in range(begin, end, step):
            most, widest, held = least, least, abs(m) + r + gone
            for j in range(k, min(k + step, end)):
                w = abs(v[j])
                widest = max(widest, w)
                if low <= j < high:
                    x = 2.0 ** (y[j] - level + raised)
                    below, above = _coded(x * (1.0 - eps[j])), _coded(x * (1.0 + eps[j]))
                    most = max(most, above)
                    m += (below + above) / 2.0 * v[j]
                    r += (above - below) / 2.0 * w
                    size += above * w
                    total += x
                    of_sum += x * eps[j]
            gone += cut * ((step + 1) * max(most * widest, held) + abs(m) + r + gone)
        gone *= room
        if promoted:
            middle, radius, lost = middle * a + m, radius * a + r, lost * a + gone
        else:
            middle, radius, lost = m, r, gone
        top = grown
    sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6] = middle, radius, lost, size, total, of_sum, top
