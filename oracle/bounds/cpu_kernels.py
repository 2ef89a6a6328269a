"""The exact value and the residue bound B2 of a scaled product, in compiled lanes.

Every float64 operation is the definition's (:func:`oracle.truth.gemm.exact`, :func:`oracle.bounds.chain.residue`,
:class:`oracle.bounds.product.Promotion`), in its order, so results agree bit for bit wherever the definition's matrix
product is exact (the caller tests that).

    step   V, R, A, D+, D-, l', h' as below, x' = x + V q;  or, where only the exact value is asked for, x += sum a b
    chain  y, lo, hi, Phi, open as in oracle.bounds.product;  X += x;  x = 0
    block  (p, pe) = TwoProd(sigma, X);  (hi, lo, slack) += p + pe  (TwoSum cascade);  X = 0

A step of ``group`` products, with ``mg`` their largest exponent and ``mbar = max(mg, E(max |x + [l, h]|))``:

    v = a_k b_k 2^(t - mbar),  r = v - trunc(v);   V = sum v,  R = sum r,  A = sum |r|
    D+ = (A + R) / 2 * q,  D- = (A - R) / 2 * q,  q = 2^(mbar - t)
    l' = (l - D+) - a,  h' = (h + D-) + a,  l = l' - o(x' + h'),  h = h' + o(-(x' + l'))

``r`` has the sign of its product, so two plain sums give both residues; all of it is exact in float64 where the caller
admits the product. ``x`` is exact, so its order of summation is free, and :func:`exact_value` takes rows in pairs.

The state of an output row is one flat float64 row: quantity ``q`` of column ``j`` is ``state[i, q + j]``, so that
quantities lie at constant distances and the compiler vectorises without aliasing tests.

NaN and infinities are not covered: the caller leaves those elements to the definition. Nor are scales inside the
instruction; for B2, operands beyond 8 bits.
Source: derived from the definitions named above.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.bounds.product import ETA, REACH, U
from oracle.tensorcore.cpu_jit import fma, jit, piece
from oracle.tensorcore.packing import UNROLL

LANES = 128  # columns of one panel
CHAIN_END, BLOCK_END = 1, 2  # what a tile ends

# quantities of one element: prefix and interval of the chain, the promoted sum, the exact sum, sums of one step
X, LOW, HIGH, Y, DOWN, UP, PHI, OPEN, BLOCK, HI, LO, SLACK, V, R, A, SHIFT, STATE = (LANES * q for q in range(17))

POWER = 0x7FF0_0000_0000_0000
ABSENT = -64  # exponent of a zero; a sum with it lies below every exponent of two nonzero operands
LEAST = -40  # start of the maximum: below every product of two nonzero 8-bit operands, above all that hold a zero
f64, i8, i64 = np.float64, np.int8, np.int64


@jit
def exact_value(
    a: NDArray[np.float64],
    sa: NDArray[np.float64],
    b: NDArray[np.unsignedinteger],
    b_value: NDArray[np.float64],
    sb: NDArray[np.float64],
    b_rows: int,
    source: NDArray[np.int64],
    tiles: NDArray[np.int64],
    bias: NDArray[np.float64],
    has_bias: bool,
    out: NDArray[np.float64],
    origin: int,
    row0: int,
    row1: int,
    panel0: int,
    panel1: int,
) -> None:
    """Fill ``out[:, origin + row0 : origin + row1, panel0 * LANES : panel1 * LANES]`` with hi, lo and slack: ``out``
    ``[3, M, N]`` float64.

    ``a`` ``[M + 1, Kp]`` packed values, the last row zero; ``b`` ``[N, K]`` codes, unsigned, with the table ``b_value``
    ``[codes]``; ``sa [M + 1, B]``, ``sb [ceil(N / b_rows), B]`` scales; ``source`` ``[Kp]`` and ``tiles`` ``[tiles,
    4]`` of :func:`oracle.tensorcore.packing.pack`, a chain a block; ``bias`` ``[N]``, or ``[1]`` without one.
    """
    longest = (tiles[:, 1] - tiles[:, 0]).max()
    value = np.zeros((longest, LANES))
    scale = np.zeros(LANES)
    state = np.zeros((row1 - row0 + 1, STATE))
    for panel in range(panel0, panel1):
        first = panel * LANES
        width = min(LANES, b.shape[0] - first)
        state[:, :] = 0.0
        for tile in tiles:
            k0, length, at, flags = tile[0], tile[1] - tile[0], tile[2], tile[3]
            _unpack_values(b, first, width, source[k0 : k0 + length], b_value, value)
            for j in range(width):
                scale[j] = sb[(first + j) // b_rows, at]
            for i in range(0, row1 - row0, 2):
                s0, s1 = state[i], state[i + 1]
                i0, i1 = row0 + i, row0 + i + 1  # of an odd number of rows the last has one more beside it
                for k in range(0, length, UNROLL):
                    _dot(a[i0], a[i1], k0 + k, value, k, s0, s1)
                if flags & BLOCK_END:
                    _join_block(s0)
                    _join_block(s1)
                    _close_block(s0, sa[i0, at], scale)
                    _close_block(s1, sa[i1, at], scale)
        for j in range(width):
            scale[j] = bias[first + j] if has_bias else 0.0
        for i in range(row1 - row0):
            _normalise(state[i], scale, has_bias)
            for j in range(width):
                out[0, origin + row0 + i, first + j] = state[i, HI + j]
                out[1, origin + row0 + i, first + j] = state[i, LO + j]
                out[2, origin + row0 + i, first + j] = state[i, SLACK + j]


@jit
def residue(
    a: NDArray[np.float64],
    a_exponent: NDArray[np.int8],
    sa: NDArray[np.float64],
    b: NDArray[np.uint8],
    b_value: NDArray[np.float64],
    b_exponent: NDArray[np.int8],
    sb: NDArray[np.float64],
    b_rows: int,
    source: NDArray[np.int64],
    tiles: NDArray[np.int64],
    group: int,
    t: int,
    to: int,
    bias: NDArray[np.float64],
    has_bias: bool,
    out: NDArray[np.float64],
    origin: int,
    row0: int,
    row1: int,
    panel0: int,
    panel1: int,
) -> None:
    """Fill ``out[:, origin + row0 : origin + row1, panel0 * LANES : panel1 * LANES]``: ``out`` ``[6, M, N]`` float64
    holds hi, lo, slack, interval lo, interval hi, open.

    ``a``, ``a_exponent`` ``[M, Kp]`` packed; ``b`` ``[N, K]`` codes, uint8, with the tables ``b_value``, ``b_exponent``
    ``[codes]``; ``sa [M, B]``, ``sb [ceil(N / b_rows), B]`` scales; ``source`` ``[Kp]`` and ``tiles`` ``[tiles, 4]`` of
    :func:`oracle.tensorcore.packing.pack`; ``bias`` ``[N]``, or ``[1]`` without one.
    """
    longest = (tiles[:, 1] - tiles[:, 0]).max()
    value = np.zeros((longest, LANES))
    exponent = np.zeros((longest, LANES), np.int8)
    top = np.zeros(LANES, np.int8)
    scale = np.zeros(LANES)
    state = np.zeros((row1 - row0, STATE))
    for panel in range(panel0, panel1):
        first = panel * LANES
        width = min(LANES, b.shape[0] - first)
        state[:, :] = 0.0
        for tile in tiles:
            k0, length, at = tile[0], tile[1] - tile[0], tile[2]
            _unpack(b, first, width, source[k0 : k0 + length], b_value, b_exponent, value, exponent)
            for j in range(width):
                scale[j] = sb[(first + j) // b_rows, at]
            for i in range(row1 - row0):
                s, a_row, e_row = state[i], a[row0 + i], a_exponent[row0 + i]
                for g in range(0, length, group):
                    for j in range(LANES):
                        top[j] = i8(LEAST)
                    for k in range(g, g + group, UNROLL):
                        _raise_top(e_row, k0 + k, exponent, k, top)
                    _shift(s, top, t)
                    for k in range(g, g + group, UNROLL):
                        _add_products(a_row, k0 + k, value, k, s)
                    _step(s, top, t, to)
                if tile[3] & CHAIN_END:
                    _join_block(s)
                    _promote(s, sa[row0 + i, at], scale)
                if tile[3] & BLOCK_END:
                    _close_block(s, sa[row0 + i, at], scale)
        for j in range(width):
            scale[j] = bias[first + j] if has_bias else 0.0
        for i in range(row1 - row0):
            _normalise(state[i], scale, has_bias)
            _close(state[i], scale, has_bias)
            for j in range(width):
                out[0, origin + row0 + i, first + j] = state[i, HI + j]
                out[1, origin + row0 + i, first + j] = state[i, LO + j]
                out[2, origin + row0 + i, first + j] = state[i, SLACK + j]
                out[3, origin + row0 + i, first + j] = state[i, DOWN + j]
                out[4, origin + row0 + i, first + j] = state[i, UP + j]
                out[5, origin + row0 + i, first + j] = state[i, OPEN + j]


@piece
def _unpack_values(
    b: NDArray[np.unsignedinteger],
    first: int,
    width: int,
    source: NDArray[np.int64],
    b_value: NDArray[np.float64],
    value: NDArray[np.float64],
) -> None:
    """One tile of ``b``, transposed; whole cache lines are written at a time."""
    for j0 in range(0, width, 8):
        j1 = min(j0 + 8, width)
        for k in range(len(source)):
            origin = max(source[k], 0)  # where there is none, ``a`` has a zero
            for j in range(j0, j1):
                value[k, j] = b_value[b[first + j, origin]]


@piece
def _dot(
    a0: NDArray[np.float64],
    a1: NDArray[np.float64],
    ka: int,
    b: NDArray[np.float64],
    kb: int,
    s0: NDArray[np.float64],
    s1: NDArray[np.float64],
) -> None:
    """``x += a[k] * b[k, j]`` over ``UNROLL`` products, for two rows; exact."""
    p0, p1, p2, p3, p4, p5, p6, p7 = (
        a0[ka],
        a0[ka + 1],
        a0[ka + 2],
        a0[ka + 3],
        a0[ka + 4],
        a0[ka + 5],
        a0[ka + 6],
        a0[ka + 7],
    )
    q0, q1, q2, q3, q4, q5, q6, q7 = (
        a1[ka],
        a1[ka + 1],
        a1[ka + 2],
        a1[ka + 3],
        a1[ka + 4],
        a1[ka + 5],
        a1[ka + 6],
        a1[ka + 7],
    )
    b0, b1, b2, b3 = b[kb], b[kb + 1], b[kb + 2], b[kb + 3]
    b4, b5, b6, b7 = b[kb + 4], b[kb + 5], b[kb + 6], b[kb + 7]
    for j in range(LANES):
        x = fma(p0, b0[j], fma(p1, b1[j], fma(p2, b2[j], p3 * b3[j])))
        x += fma(p4, b4[j], fma(p5, b5[j], fma(p6, b6[j], fma(p7, b7[j], s0[X + j]))))
        s0[X + j] = x
        x = fma(q0, b0[j], fma(q1, b1[j], fma(q2, b2[j], q3 * b3[j])))
        x += fma(q4, b4[j], fma(q5, b5[j], fma(q6, b6[j], fma(q7, b7[j], s1[X + j]))))
        s1[X + j] = x


@piece
def _unpack(
    b: NDArray[np.uint8],
    first: int,
    width: int,
    source: NDArray[np.int64],
    b_value: NDArray[np.float64],
    b_exponent: NDArray[np.int8],
    value: NDArray[np.float64],
    exponent: NDArray[np.int8],
) -> None:
    """One tile of ``b``, transposed; whole cache lines are written at a time."""
    for j0 in range(0, width, 8):
        j1 = min(j0 + 8, width)
        for k in range(len(source)):
            origin = max(source[k], 0)  # where there is none, ``a`` has a zero
            for j in range(j0, j1):
                code = b[first + j, origin]
                value[k, j], exponent[k, j] = b_value[code], b_exponent[code]


@piece
def _raise_top(a: NDArray[np.int8], ka: int, b: NDArray[np.int8], kb: int, top: NDArray[np.int8]) -> None:
    """``top[j] = max(top[j], a[k] + b[k, j])`` over ``UNROLL`` products."""
    a0, a1, a2, a3 = a[ka], a[ka + 1], a[ka + 2], a[ka + 3]
    a4, a5, a6, a7 = a[ka + 4], a[ka + 5], a[ka + 6], a[ka + 7]
    b0, b1, b2, b3 = b[kb], b[kb + 1], b[kb + 2], b[kb + 3]
    b4, b5, b6, b7 = b[kb + 4], b[kb + 5], b[kb + 6], b[kb + 7]
    for j in range(LANES):
        e = max(max(top[j], i8(a0 + b0[j])), i8(a1 + b1[j]))
        e = max(max(e, i8(a2 + b2[j])), i8(a3 + b3[j]))
        e = max(max(e, i8(a4 + b4[j])), i8(a5 + b5[j]))
        top[j] = max(max(e, i8(a6 + b6[j])), i8(a7 + b7[j]))


@piece
def _power(e: Any) -> float:
    """``2.0**e`` of a normal exponent."""
    return i64((i64(e) + i64(1023)) << i64(52)).view(np.float64)


@piece
def _shift(s: NDArray[np.float64], top: NDArray[np.int8], t: int) -> None:
    """``SHIFT = 2^(t - mbar)``; the sums of the step start at 0."""
    for j in range(LANES):
        held = max(abs(s[X + j] + s[LOW + j]), abs(s[X + j] + s[HIGH + j]))
        of_held = (f64(held).view(np.int64) >> i64(52)) - i64(1023)  # 0: below every other; none is below 2**-126
        s[SHIFT + j] = _power(i64(t) - max(i64(top[j]), of_held))
        s[V + j] = 0.0
        s[R + j] = 0.0
        s[A + j] = 0.0


@piece
def _add_products(a: NDArray[np.float64], ka: int, b: NDArray[np.float64], kb: int, s: NDArray[np.float64]) -> None:
    """``V, R, A`` over ``UNROLL`` products."""
    a0, a1, a2, a3 = a[ka], a[ka + 1], a[ka + 2], a[ka + 3]
    a4, a5, a6, a7 = a[ka + 4], a[ka + 5], a[ka + 6], a[ka + 7]
    b0, b1, b2, b3 = b[kb], b[kb + 1], b[kb + 2], b[kb + 3]
    b4, b5, b6, b7 = b[kb + 4], b[kb + 5], b[kb + 6], b[kb + 7]
    for j in range(LANES):
        up = s[SHIFT + j]
        v0, v1, v2, v3 = (a0 * b0[j]) * up, (a1 * b1[j]) * up, (a2 * b2[j]) * up, (a3 * b3[j]) * up
        v4, v5, v6, v7 = (a4 * b4[j]) * up, (a5 * b5[j]) * up, (a6 * b6[j]) * up, (a7 * b7[j]) * up
        r0, r1, r2, r3 = v0 - np.trunc(v0), v1 - np.trunc(v1), v2 - np.trunc(v2), v3 - np.trunc(v3)
        r4, r5, r6, r7 = v4 - np.trunc(v4), v5 - np.trunc(v5), v6 - np.trunc(v6), v7 - np.trunc(v7)
        s[V + j] += ((v0 + v1) + (v2 + v3)) + ((v4 + v5) + (v6 + v7))
        s[R + j] += ((r0 + r1) + (r2 + r3)) + ((r4 + r5) + (r6 + r7))
        s[A + j] += ((abs(r0) + abs(r1)) + (abs(r2) + abs(r3))) + ((abs(r4) + abs(r5)) + (abs(r6) + abs(r7)))


@piece
def _step(s: NDArray[np.float64], top: NDArray[np.int8], t: int, to: int) -> None:
    """The interval after the step; nothing changes where every product is zero."""
    ulp = 2.0**-to
    for j in range(LANES):
        mg = i64(top[j])
        live = mg > LEAST
        q = 1.0 / s[SHIFT + j]
        x, low, high = s[X + j], s[LOW + j], s[HIGH + j]
        left, right = x + low, x + high
        nearest = 0.0 if (left <= 0.0) & (right >= 0.0) else min(abs(left), abs(right))
        lost = _power(mg - i64(t)) if nearest < _power(mg) else 0.0
        after = x + s[V + j] * q
        l1 = low - 0.5 * (s[A + j] + s[R + j]) * q - (lost if right > 0.0 else 0.0)
        h1 = high + 0.5 * (s[A + j] - s[R + j]) * q + (lost if left < 0.0 else 0.0)
        exact_below = _power(mg + i64(1 + to - t))
        above, under = after + h1, -(after + l1)
        s[LOW + j] = l1 - (0.0 if above < exact_below else ulp * _floor_power(above)) if live else low
        s[HIGH + j] = h1 + (0.0 if under < exact_below else ulp * _floor_power(under)) if live else high
        s[X + j] = after


@piece
def _floor_power(x: float) -> float:
    """``2^floor(log2 x)`` of a non-negative float64, 0 for 0."""
    return i64(f64(x).view(np.int64) & i64(POWER)).view(np.float64)


@piece
def _promote(s: NDArray[np.float64], sa: float, sb: NDArray[np.float64]) -> None:
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


@piece
def _close(s: NDArray[np.float64], bias: NDArray[np.float64], has_bias: bool) -> None:
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


@piece
def _join_block(s: NDArray[np.float64]) -> None:
    """The finished chain joins the exact sum of its block."""
    for j in range(LANES):
        s[BLOCK + j] += s[X + j]


@piece
def _close_block(s: NDArray[np.float64], sa: float, sb: NDArray[np.float64]) -> None:
    """``hi + lo += sigma * X`` and what that misses, as :func:`oracle.truth.gemm.exact` does."""
    for j in range(LANES):
        x = s[BLOCK + j]
        sigma = sa * sb[j]
        p = sigma * x
        _add_pair(s, j, p, fma(sigma, x, -p))
        s[BLOCK + j] = 0.0
        s[X + j] = 0.0


@piece
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


@piece
def _normalise(s: NDArray[np.float64], bias: NDArray[np.float64], has_bias: bool) -> None:
    """The bias, then ``|lo| <= ulp(hi) / 2``."""
    for j in range(LANES):
        if has_bias:
            _add_pair(s, j, bias[j], 0.0)
        h = s[HI + j] + s[LO + j]
        s[LO + j] = s[LO + j] - (h - s[HI + j])
        s[HI + j] = h
