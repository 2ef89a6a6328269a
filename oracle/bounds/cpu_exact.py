"""One compiled pass over a scaled product: its exact value and the bound B1 of its accumulator.

Per element, in the order of the definitions (:func:`oracle.truth.gemm.exact`, :func:`oracle.bounds.product.rank1_bound`):

    step   Q = max(2^(max E(a) + max E(b)), pw(|x| + E));  E += n 2^-t Q;  x += sum a b;  E += 2^-to pw(|x| + E)
    chain  y, lo, hi, Phi, open as in oracle.bounds.product;  X += x;  x = E = 0
    block  (p, pe) = TwoProd(sigma, X);  (hi, lo, slack) += p + pe  (TwoSum cascade);  X = 0

Every float64 operation is the definition's, so results agree bit for bit wherever the definition's matrix product is
exact (the caller tests that). ``x`` is exact, so its order of summation is free and the rows are paired for speed.

Not covered: NaN and infinities, scales inside the instruction.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.bounds.cpu_promote import (
    BLOCK_END,
    CHAIN_END,
    CHAIN_START,
    DOWN,
    FREE,
    HIGH,
    LANES,
    LOW,
    OPEN,
    UNROLL,
    UP,
    X,
    close,
    floor_power,
    promote,
)
from oracle.tensorcore.cpu_jit import fma, jit

BLOCK, HI, LO, SLACK, STATE = (FREE + LANES * quantity for quantity in range(5))
SPLITTER = 2.0**27 + 1.0


@jit
def exact_rank1(
    a: NDArray[np.float64], a_top: NDArray[np.float64], sa: NDArray[np.float64],
    b: NDArray[np.uint8], b_value: NDArray[np.float64], b_power: NDArray[np.float64], sb: NDArray[np.float64],
    b_rows: int, source: NDArray[np.int64], tiles: NDArray[np.int64], group: int, addends: int, t: int, to: int,
    bound: bool, bias: NDArray[np.float64], has_bias: bool, out: NDArray[np.float64], origin: int,
    row0: int, row1: int, panel0: int, panel1: int,
) -> None:  # fmt: skip
    """Fill ``out[:, origin + row0 : origin + row1, panel0 * LANES : panel1 * LANES]``.

    ``out`` holds hi, lo, slack and, with ``bound``, interval lo, interval hi, open.
    ``a`` ``[M + 1, Kp]`` packed values, the last row zero; ``a_top`` ``[M + 1, steps]``: ``2^(max E)`` of each step, 0
    where all are zero; ``b`` ``[N, K]`` codes with tables of values and of ``2^E`` (0 for zeros);
    ``sa [M + 1, B]``, ``sb [ceil(N / b_rows), B]`` scales; ``tiles`` as in the caller.
    """
    columns = b.shape[0]
    longest = 0
    for tile in tiles:
        longest = max(longest, tile[1] - tile[0])
    value = np.zeros((longest, LANES))
    top = np.zeros((longest // group + 1, LANES))
    scale = np.zeros(LANES)
    state = np.zeros((row1 - row0 + 1, STATE))
    unit = 2.0**-t
    ulp = 2.0**-to
    for panel in range(panel0, panel1):
        first = panel * LANES
        width = min(LANES, columns - first)
        state[:, :] = 0.0
        for tile in tiles:
            k0, length, at, flags = tile[0], tile[1] - tile[0], tile[2], tile[3]
            _unpack(b, first, width, source[k0 : k0 + length], b_value, b_power, group, value, top)
            for j in range(width):
                scale[j] = sb[(first + j) // b_rows, at]
            for i in range(0, row1 - row0, 2):
                s0, s1 = state[i], state[i + 1]
                i0, i1 = row0 + i, min(row0 + i + 1, a.shape[0] - 1)
                a0, a1 = a[i0], a[i1]
                for g in range(0, length, group):
                    step = (k0 + g) // group
                    n = addends if flags & CHAIN_START and g == 0 else addends + 1
                    if bound:
                        _before(s0, a_top[i0, step], top[g // group], n * unit)
                        _before(s1, a_top[i1, step], top[g // group], n * unit)
                    for k in range(g, g + group, UNROLL):
                        _dot(a0, a1, k0 + k, value, k, s0, s1)
                    if bound:
                        _after(s0, ulp)
                        _after(s1, ulp)
                if flags & CHAIN_END:
                    into_block(s0)
                    into_block(s1)
                    if bound:
                        _mirror(s0)
                        _mirror(s1)
                        promote(s0, sa[i0, at], scale)
                        promote(s1, sa[i1, at], scale)
                    else:
                        _restart(s0)
                        _restart(s1)
                if flags & BLOCK_END:
                    close_block(s0, sa[i0, at], scale)
                    close_block(s1, sa[i1, at], scale)
        for j in range(width):
            scale[j] = bias[first + j] if has_bias else 0.0
        for i in range(row1 - row0):
            normalise(state[i], scale, has_bias)
            if bound:
                close(state[i], scale, has_bias)
            for j in range(width):
                out[0, origin + row0 + i, first + j] = state[i, HI + j]
                out[1, origin + row0 + i, first + j] = state[i, LO + j]
                out[2, origin + row0 + i, first + j] = state[i, SLACK + j]
                if bound:
                    out[3, origin + row0 + i, first + j] = state[i, DOWN + j]
                    out[4, origin + row0 + i, first + j] = state[i, UP + j]
                    out[5, origin + row0 + i, first + j] = state[i, OPEN + j]


@jit
def _unpack(
    b: NDArray[np.uint8], first: int, width: int, source: NDArray[np.int64],
    b_value: NDArray[np.float64], b_power: NDArray[np.float64], group: int,
    value: NDArray[np.float64], top: NDArray[np.float64],
) -> None:  # fmt: skip
    """One tile of ``b``, transposed, and its largest powers of two; whole cache lines are written at a time."""
    top[:, :] = 0.0
    for j0 in range(0, width, 8):
        j1 = min(j0 + 8, width)
        for k in range(len(source)):
            origin = source[k]
            for j in range(j0, j1):
                code = b[first + j, max(origin, 0)]
                value[k, j] = b_value[code] if origin >= 0 else 0.0
                if origin >= 0:
                    top[k // group, j] = max(top[k // group, j], b_power[code])


@jit
def _dot(
    a0: NDArray[np.float64], a1: NDArray[np.float64], ka: int, b: NDArray[np.float64], kb: int,
    s0: NDArray[np.float64], s1: NDArray[np.float64],
) -> None:  # fmt: skip
    """``x += a[k] * b[k, j]`` over ``UNROLL`` products, for two rows; exact."""
    p0, p1, p2, p3, p4, p5, p6, p7 = (
        a0[ka], a0[ka + 1], a0[ka + 2], a0[ka + 3], a0[ka + 4], a0[ka + 5], a0[ka + 6], a0[ka + 7]
    )  # fmt: skip
    q0, q1, q2, q3, q4, q5, q6, q7 = (
        a1[ka], a1[ka + 1], a1[ka + 2], a1[ka + 3], a1[ka + 4], a1[ka + 5], a1[ka + 6], a1[ka + 7]
    )  # fmt: skip
    b0, b1, b2, b3 = b[kb], b[kb + 1], b[kb + 2], b[kb + 3]
    b4, b5, b6, b7 = b[kb + 4], b[kb + 5], b[kb + 6], b[kb + 7]
    for j in range(LANES):
        x = fma(p0, b0[j], fma(p1, b1[j], fma(p2, b2[j], p3 * b3[j])))
        x += fma(p4, b4[j], fma(p5, b5[j], fma(p6, b6[j], fma(p7, b7[j], s0[X + j]))))
        s0[X + j] = x
        x = fma(q0, b0[j], fma(q1, b1[j], fma(q2, b2[j], q3 * b3[j])))
        x += fma(q4, b4[j], fma(q5, b5[j], fma(q6, b6[j], fma(q7, b7[j], s1[X + j]))))
        s1[X + j] = x


@jit
def _before(s: NDArray[np.float64], a_top: float, b_top: NDArray[np.float64], unit: float) -> None:
    """Truncation of the addends of one step."""
    for j in range(LANES):
        largest = max(a_top * b_top[j], floor_power(abs(s[X + j]) + s[HIGH + j]))
        s[HIGH + j] += unit * largest


@jit
def _after(s: NDArray[np.float64], ulp: float) -> None:
    """Truncation of the sum of one step."""
    for j in range(LANES):
        s[HIGH + j] += ulp * floor_power(abs(s[X + j]) + s[HIGH + j])


@jit
def into_block(s: NDArray[np.float64]) -> None:
    """The finished chain joins the exact sum of its block."""
    for j in range(LANES):
        s[BLOCK + j] += s[X + j]


@jit
def _mirror(s: NDArray[np.float64]) -> None:
    """B1 is symmetric."""
    for j in range(LANES):
        s[LOW + j] = -s[HIGH + j]


@jit
def _restart(s: NDArray[np.float64]) -> None:
    for j in range(LANES):
        s[X + j] = 0.0


@jit
def close_block(s: NDArray[np.float64], sa: float, sb: NDArray[np.float64]) -> None:
    """``hi + lo += sigma * X`` and what that misses, as :func:`oracle.truth.gemm.exact` does."""
    for j in range(LANES):
        x = s[BLOCK + j]
        sigma = sa * sb[j]
        p = sigma * x
        c = sigma * SPLITTER
        ah = c - (c - sigma)
        al = sigma - ah
        c = x * SPLITTER
        bh = c - (c - x)
        bl = x - bh
        _add_pair(s, j, p, ((ah * bh - p) + ah * bl + al * bh) + al * bl)
        s[BLOCK + j] = 0.0


@jit
def _add_pair(s: NDArray[np.float64], j: int, p: float, pe: float) -> None:
    hi = s[HI + j]
    h = hi + p
    v = h - hi
    e = (hi - (h - v)) + (p - v)
    r = e + pe
    v = r - e
    e1 = (e - (r - v)) + (pe - v)
    lo = s[LO + j]
    w = lo + r
    v = w - lo
    e2 = (lo - (w - v)) + (r - v)
    s[HI + j] = h
    s[LO + j] = w
    s[SLACK + j] += (abs(e1) + abs(e2)) * (1.0 + 2.0**-50)


@jit
def normalise(s: NDArray[np.float64], bias: NDArray[np.float64], has_bias: bool) -> None:
    """The bias, then ``|lo| <= ulp(hi) / 2``."""
    for j in range(LANES):
        if has_bias:
            _add_pair(s, j, bias[j], 0.0)
        h = s[HI + j] + s[LO + j]
        s[LO + j] = s[LO + j] - (h - s[HI + j])
        s[HI + j] = h
