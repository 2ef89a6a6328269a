"""The promotion of :mod:`oracle.bounds.product` in compiled lanes, and the layout of a row's state.

One flat float64 row per output row: quantity ``q`` of column ``j`` is ``state[i, q + j]``, so that quantities lie at
constant distances and the compiler vectorises without aliasing tests. Every operation is the definition's, in its
order. Not covered: NaN and infinities (the caller leaves those elements to the definition).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.tensorcore.cpu_jit import jit

LANES = 128  # columns of one panel
UNROLL = 8  # products per pass over a panel; steps are padded to a multiple
CHAIN_START, CHAIN_END, BLOCK_END = 1, 2, 4  # what a tile begins or ends

# quantities of one element: prefix and interval of the chain, then the promoted sum
X, LOW, HIGH, Y, DOWN, UP, PHI, OPEN, FREE = (LANES * quantity for quantity in range(9))

U, ETA = 2.0**-24, 2.0**-149
REACH = (2.0 - 2.0**-23) * 2.0**127 * (1 - 2.0**-20)
POWER = 0x7FF0_0000_0000_0000
f64, i64 = np.float64, np.int64


@jit
def floor_power(x: float) -> float:
    """``2^floor(log2 x)`` of a non-negative float64, 0 for 0."""
    return i64(f64(x).view(np.int64) & i64(POWER)).view(np.float64)


@jit
def promote(s: NDArray[np.float64], sa: float, sb: NDArray[np.float64]) -> None:
    """:meth:`oracle.bounds.product.Promotion.add` of ``X, LOW, HIGH``, which start again at 0."""
    for j in range(LANES):
        x, low, high = s[X + j], s[LOW + j], s[HIGH + j]
        sigma = sa * sb[j]
        size = abs(x) + max(-low, high)
        left, right = sigma * low, sigma * high
        y = s[Y + j] + sigma * x
        down, up = s[DOWN + j] + min(left, right), s[UP + j] + max(left, right)
        total = max(abs(y + down), abs(y + up)) + s[PHI + j]
        rounding = 3 * U * abs(sigma) * size + U * total + ETA * (1 + size + abs(sa) + abs(sb[j]))
        s[Y + j], s[DOWN + j], s[UP + j] = y, down, up
        s[PHI + j] = s[PHI + j] + rounding if size > 0 else s[PHI + j]
        largest = max(max(abs(sa), abs(sb[j])), abs(sigma)) * size
        inside = max(max(largest, abs(sigma)), total + rounding) < REACH
        s[OPEN + j] = s[OPEN + j] if inside else 1.0
        s[X + j] = 0.0
        s[LOW + j] = 0.0
        s[HIGH + j] = 0.0


@jit
def close(s: NDArray[np.float64], bias: NDArray[np.float64], has_bias: bool) -> None:
    """:meth:`oracle.bounds.product.Promotion.interval`: ``DOWN`` and ``UP`` become the interval."""
    for j in range(LANES):
        phi = s[PHI + j]
        if has_bias:
            y = s[Y + j] + bias[j]
            total = max(abs(y + s[DOWN + j]), abs(y + s[UP + j])) + phi
            phi = phi + U * total + ETA
            s[OPEN + j] = s[OPEN + j] if total < REACH else 1.0
        phi = phi * (1 + 2.0**-20)
        s[DOWN + j] -= phi
        s[UP + j] += phi
