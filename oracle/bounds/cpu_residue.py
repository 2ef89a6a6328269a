"""The residue bound B2 in one compiled pass, and the exact value, whose prefixes it needs anyway.

The recursion of :func:`oracle.bounds.chain.residue`, promoted; the exact value is :func:`oracle.truth.gemm.exact`'s.
Per step of ``group`` products, with ``mg`` their largest exponent and ``mbar = max(mg, E(max |x + [l, h]|))``:

    v = a_k b_k 2^(t - mbar),  r = v - trunc(v);   V = sum v,  R = sum r,  A = sum |r|
    D+ = (A + R) / 2 * q,  D- = (A - R) / 2 * q,  x' = x + V q,   q = 2^(mbar - t)

``r`` has the sign of its product, so two plain sums give both residues; all of it is exact in float64 where the
caller admits the product. The interval's own steps are the definition's operations in its order:
``l' = (l - D+) - a``, ``h' = (h + D-) + a``, ``l = l' - o(x' + h')``, ``h = h' + o(-(x' + l'))``.

Not covered: NaN and infinities, scales inside the instruction, operands beyond 8 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.bounds.cpu_exact import HI, LO, SLACK, close_block, into_block, normalise
from oracle.bounds.cpu_exact import STATE as OWN
from oracle.bounds.cpu_promote import (
    BLOCK_END,
    CHAIN_END,
    DOWN,
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
from oracle.tensorcore.cpu_jit import jit

V, R, A, SHIFT, STATE = (OWN + LANES * quantity for quantity in range(5))
ABSENT = -64  # exponent of a zero; a sum with it lies below every exponent of two nonzero operands
LEAST = -40  # start of the maximum: below every product of two nonzero 8-bit operands, above all that hold a zero
f64, i8, i64 = np.float64, np.int8, np.int64


@jit
def residue(
    a: NDArray[np.float64], a_exponent: NDArray[np.int8], sa: NDArray[np.float64],
    b: NDArray[np.uint8], b_value: NDArray[np.float64], b_exponent: NDArray[np.int8], sb: NDArray[np.float64],
    b_rows: int, source: NDArray[np.int64], tiles: NDArray[np.int64], group: int, t: int, to: int,
    bias: NDArray[np.float64], has_bias: bool, out: NDArray[np.float64], origin: int,
    row0: int, row1: int, panel0: int, panel1: int,
) -> None:  # fmt: skip
    """Fill ``out[:, origin + row0 : origin + row1, panel0 * LANES : panel1 * LANES]``.

    ``out`` holds hi, lo, slack, interval lo, interval hi, open.
    ``a``, ``a_exponent`` ``[M, Kp]`` packed; ``b`` ``[N, K]`` codes with tables; scales float64; ``tiles`` as in
    :mod:`oracle.bounds.cpu`.
    """
    longest = 0
    for tile in tiles:
        longest = max(longest, tile[1] - tile[0])
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
                    into_block(s)
                    promote(s, sa[row0 + i, at], scale)
                if tile[3] & BLOCK_END:
                    close_block(s, sa[row0 + i, at], scale)
        for j in range(width):
            scale[j] = bias[first + j] if has_bias else 0.0
        for i in range(row1 - row0):
            normalise(state[i], scale, has_bias)
            close(state[i], scale, has_bias)
            for j in range(width):
                out[0, origin + row0 + i, first + j] = state[i, HI + j]
                out[1, origin + row0 + i, first + j] = state[i, LO + j]
                out[2, origin + row0 + i, first + j] = state[i, SLACK + j]
                out[3, origin + row0 + i, first + j] = state[i, DOWN + j]
                out[4, origin + row0 + i, first + j] = state[i, UP + j]
                out[5, origin + row0 + i, first + j] = state[i, OPEN + j]


@jit
def _unpack(
    b: NDArray[np.uint8], first: int, width: int, source: NDArray[np.int64],
    b_value: NDArray[np.float64], b_exponent: NDArray[np.int8],
    value: NDArray[np.float64], exponent: NDArray[np.int8],
) -> None:  # fmt: skip
    """One tile of ``b``, transposed; whole cache lines are written at a time."""
    for j0 in range(0, width, 8):
        j1 = min(j0 + 8, width)
        for k in range(len(source)):
            origin = source[k]
            for j in range(j0, j1):
                code = b[first + j, max(origin, 0)]
                value[k, j] = b_value[code] if origin >= 0 else 0.0
                exponent[k, j] = b_exponent[code] if origin >= 0 else i8(ABSENT)


@jit
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


@jit
def _power(e: Any) -> float:
    """``2.0**e`` of a normal exponent."""
    return i64((i64(e) + i64(1023)) << i64(52)).view(np.float64)


@jit
def _shift(s: NDArray[np.float64], top: NDArray[np.int8], t: int) -> None:
    """``SHIFT = 2^(t - mbar)``; the sums of the step start at 0."""
    for j in range(LANES):
        held = max(abs(s[X + j] + s[LOW + j]), abs(s[X + j] + s[HIGH + j]))
        of_held = max((f64(held).view(np.int64) >> i64(52)) - i64(1023), i64(-126))
        of_held = i64(LEAST) if held == 0.0 else of_held
        s[SHIFT + j] = _power(i64(t) - max(i64(top[j]), of_held))
        s[V + j] = 0.0
        s[R + j] = 0.0
        s[A + j] = 0.0


@jit
def _add_products(
    a: NDArray[np.float64], ka: int, b: NDArray[np.float64], kb: int, s: NDArray[np.float64]
) -> None:
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


@jit
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
        below = (nearest < _power(mg)) & ((left != 0.0) | (right != 0.0))
        lost = _power(mg - i64(t)) if below else 0.0
        after = x + s[V + j] * q
        l1 = low - 0.5 * (s[A + j] + s[R + j]) * q - (lost if right > 0.0 else 0.0)
        h1 = high + 0.5 * (s[A + j] - s[R + j]) * q + (lost if left < 0.0 else 0.0)
        exact_below = _power(mg + i64(1 + to - t))
        above, under = max(after + h1, 0.0), max(-(after + l1), 0.0)
        s[LOW + j] = l1 - (0.0 if above < exact_below else ulp * floor_power(above)) if live else low
        s[HIGH + j] = h1 + (0.0 if under < exact_below else ulp * floor_power(under)) if live else high
        s[X + j] = after
