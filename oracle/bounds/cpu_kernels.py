"""The exact value and the bounds B2, B2 over splits and B3 of a scaled product, in compiled lanes.

Every float64 operation is the definition's (:func:`oracle.truth.gemm.exact`, :func:`oracle.bounds.chain.residue`,
``split`` and ``any_order``, :class:`oracle.bounds.product.Promotion`), in its order, or exact, so results agree bit for
bit wherever the definition's matrix product is exact (the caller tests that).

    step   P+, P-, F+, F-, l', h' as below, x' = x + (P+ - P-);  or, where only the exact value is asked for, X += a b
    chain  y, lo, hi, Phi, open as in oracle.bounds.product;  X += x;  x = 0
    block  (p, pe) = TwoProd(sigma, X);  (hi, lo, slack) += p + pe  (TwoSum cascade);  X = 0

A step of ``group`` products, with ``mg`` their largest exponent, ``mbar = max(mg, E(max |x + [l, h]|))`` and
``q = 2^(mbar - t)``:

    P+ = sum of the products above zero, P- = -(sum of those below)
    F+ = C + sum floor(p / q) q  of those above zero, F- of the magnitudes of those below,  C = 2^52 q
    D+ = P+ - (F+ - C),  D- = P- - (F- - C)                        (what both lose when each is cut to a multiple of q)
    l' = (l - D+) - a,  h' = (h + D-) + a,  l = l' - o(x' + h'),  h = h' + o(-(x' + l'))

In ``[C, 2 C)`` the last place of a float64 is ``q``: so an fma that rounds toward zero drops just what lies below ``q``
of its product, which is less than ``4 2^t q``, and sums of them stay there. Where the machine cannot be told to round
that way (:mod:`oracle.tensorcore.cpu_truncation`), each product is cut apart. All of it is exact in float64 where the
caller admits the product. ``x`` is exact, so its order of summation is free, and :func:`exact_value` takes rows in
pairs. B3 needs these sums of a whole chain, F+ and F- for a ``q`` that grows with the error that they give; B2 over
splits of one chain needs them of every step, and the largest sum of steps that some partial chain adds.

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

from oracle.bounds.cpu_lanes import LANES, add_floors, add_products
from oracle.bounds.product import ETA, REACH, U
from oracle.tensorcore.cpu_jit import fma, jit, piece
from oracle.tensorcore.packing import UNROLL

CHAIN_END, BLOCK_END = 1, 2  # what a tile ends
TURNS = 64  # after which an error grows on

# quantities of one element: of the promoted sum and the exact one, results but for the exact sum of the block; prefix
# and interval of its chain; sums of a step, or of a chain in any order and its error
HI, LO, SLACK, Y, DOWN, UP, PHI, OPEN, PLUS, MINUS, REACHED, BLOCK, STATE = (LANES * q for q in range(13))
X, LOW, HIGH, CHAIN = (LANES * q for q in range(4))
ABOVE, BELOW, CUT, CUT_BELOW, START, ERROR, SUMS = (LANES * q for q in range(7))
LARGEST, ONE_SIGN, GROWN, PREFIX, LOWEST, HIGHEST, HELD = (LANES * q for q in range(7))
AT_ONCE = 16  # rows whose sums of every step are kept
ORDERED, UNORDERED = 8, 11  # results of :func:`residue` and :func:`any_order`

POWER = 0x7FF0_0000_0000_0000
ABSENT = -64  # exponent of a zero; a sum with it lies below every exponent of two nonzero operands
SMALLEST = 2.0**-126  # power of two of an accumulator
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
    columns: NDArray[np.int64],
    source: NDArray[np.int64],
    tiles: NDArray[np.int64],
    group: int,
    t: int,
    to: int,
    bias: NDArray[np.float64],
    has_bias: bool,
    out: NDArray[np.float64],
    row0: int,
    row1: int,
    panel0: int,
    panel1: int,
) -> None:
    """Fill ``out[:, row0 : row1, panel0 * LANES : panel1 * LANES]``: ``out`` ``[ORDERED or UNORDERED, M, N]`` float64
    holds hi, lo, slack of the exact value; y, lo, hi, Phi and open of the promoted sum; with ``UNORDERED`` the chains
    are added in any order, and the sums of both signs and the reach follow.

    ``a``, ``a_exponent`` ``[M, Kp]`` packed; ``b`` ``[R, K]`` codes, uint8, with the tables ``b_value``, ``b_exponent``
    ``[codes]``, of whose rows ``columns`` ``[N]`` are the columns of the result; ``sa [M, B]``, ``sb [ceil(R / b_rows),
    B]`` scales; ``source`` ``[Kp]`` and ``tiles`` ``[tiles, 4]`` of :func:`oracle.tensorcore.packing.pack`; ``bias``
    ``[R]``, or ``[1]`` without one, is added to the exact value alone.
    """
    longest = (tiles[:, 1] - tiles[:, 0]).max()
    value = np.zeros((longest, 2, LANES))
    exponent = np.zeros((longest, LANES), np.int8)
    top = np.zeros(LANES, np.int8)
    scale = np.zeros(LANES)
    sums = np.zeros(SUMS)
    chain = np.zeros((row1 - row0, CHAIN))
    state = np.zeros((row1 - row0, STATE))
    for panel in range(panel0, panel1):
        first = panel * LANES
        of_panel = columns[first : first + LANES]
        width = len(of_panel)
        state[:, :] = 0.0
        for tile in tiles:
            k0, length, at = tile[0], tile[1] - tile[0], tile[2]
            _unpack(b, of_panel, source[k0 : k0 + length], b_value, b_exponent, value, exponent)
            for j in range(width):
                scale[j] = sb[of_panel[j] // b_rows, at]
            for g in range(0, length, group):  # its part of ``b`` stays in the first-level cache while all rows meet it
                for i in range(row1 - row0):
                    for j in range(LANES):
                        top[j] = i8(LEAST)
                    for k in range(g, g + group, UNROLL):
                        _raise_top(a_exponent[row0 + i], k0 + k, exponent, k, top)
                    _start(chain[i], sums, top, t)
                    add_products(a[row0 + i], k0 + g, value, g, group, sums, ABOVE)
                    add_floors(a[row0 + i], k0 + g, value, g, group, sums, CUT)
                    _step(chain[i], sums, top, t, to)
            for i in range(row1 - row0):
                if tile[3] & CHAIN_END:
                    for j in range(LANES):
                        state[i, BLOCK + j] += chain[i, X + j]
                    _promote(state[i], chain[i], sa[row0 + i, at], scale, len(out) == UNORDERED)
                if tile[3] & BLOCK_END:
                    _close_block(state[i], sa[row0 + i, at], scale)
        for j in range(width):
            scale[j] = bias[of_panel[j]] if has_bias else 0.0
        for i in range(row1 - row0):
            _normalise(state[i], scale, has_bias)
            for q in range(len(out)):
                for j in range(width):
                    out[q, row0 + i, first + j] = state[i, q * LANES + j]


@jit
def any_order(
    a: NDArray[np.float64],
    a_exponent: NDArray[np.int8],
    sa: NDArray[np.float64],
    b: NDArray[np.uint8],
    b_value: NDArray[np.float64],
    b_exponent: NDArray[np.int8],
    sb: NDArray[np.float64],
    b_rows: int,
    columns: NDArray[np.int64],
    source: NDArray[np.int64],
    tiles: NDArray[np.int64],
    group: int,
    t: int,
    relative: float,
    out: NDArray[np.float64],
    row0: int,
    row1: int,
    panel0: int,
    panel1: int,
) -> bool:
    """B3 instead: ``out`` ``[UNORDERED, M, N]`` as of :func:`residue`, whose first three quantities stay 0. Whether
    every error came to rest.

    ``a``, ``a_exponent`` ``[M, Kp]``, ``sa [M, B]``, ``b [R, K]``, ``b_value``, ``b_exponent`` ``[codes]``, ``sb
    [ceil(R / b_rows), B]``, ``columns [N]``, ``source [Kp]`` and ``tiles [tiles, 4]`` as there; ``relative``: what a
    step and an addition of chains may lose of the sum.
    """
    longest = (tiles[:, 1] - tiles[:, 0]).max()
    value = np.zeros((longest, 2, LANES))
    exponent = np.zeros((longest, LANES), np.int8)
    tops = np.zeros((row1 - row0, LANES), np.int8)
    moves = np.zeros(row1 - row0, np.bool_)
    scale = np.zeros(LANES)
    sums = np.zeros((row1 - row0, SUMS))
    chain = np.zeros((row1 - row0, CHAIN))
    state = np.zeros((row1 - row0, STATE))
    rests = True
    for panel in range(panel0, panel1):
        first = panel * LANES
        of_panel = columns[first : first + LANES]
        width = len(of_panel)
        state[:, :] = 0.0
        begin = 0
        while begin < len(tiles):
            end, steps = begin, 0
            while True:
                steps += (tiles[end, 1] - tiles[end, 0]) // group
                end += 1
                if tiles[end - 1, 3] & CHAIN_END:
                    break
            at = tiles[begin, 2]
            for j in range(width):
                scale[j] = sb[of_panel[j] // b_rows, at]
            for i in range(row1 - row0):
                for j in range(LANES):
                    tops[i, j] = i8(LEAST)
            sums[:, :] = 0.0
            for tile in tiles[begin:end]:
                k0, length = tile[0], tile[1] - tile[0]
                _unpack(b, of_panel, source[k0 : k0 + length], b_value, b_exponent, value, exponent)
                for i in range(row1 - row0):
                    for k in range(0, length, UNROLL):
                        _raise_top(a_exponent[row0 + i], k0 + k, exponent, k, tops[i])
                    add_products(a[row0 + i], k0, value, 0, length, sums[i], ABOVE)
            moves[:] = True
            turn = 0
            while turn < TURNS and moves.any():
                turn += 1
                for i in range(row1 - row0):
                    if moves[i]:
                        _start_chain(sums[i], tops[i], t)
                for tile in tiles[begin:end]:
                    k0, length = tile[0], tile[1] - tile[0]
                    if end > begin + 1:
                        _unpack(b, of_panel, source[k0 : k0 + length], b_value, b_exponent, value, exponent)
                    for i in range(row1 - row0):
                        if moves[i]:
                            add_floors(a[row0 + i], k0, value, 0, length, sums[i], CUT)
                for i in range(row1 - row0):
                    if moves[i]:
                        moves[i] = _grows(chain[i], sums[i], tops[i], t, steps, relative)
            rests &= not moves.any()
            for i in range(row1 - row0):
                for j in range(LANES):
                    chain[i, X + j] = sums[i, ABOVE + j] - sums[i, BELOW + j]
                _promote(state[i], chain[i], sa[row0 + i, at], scale, True)
            begin = end
        for i in range(row1 - row0):
            for q in range(3, UNORDERED):
                for j in range(width):
                    out[q, row0 + i, first + j] = state[i, q * LANES + j]
    return rests


@jit
def split(
    a: NDArray[np.float64],
    a_exponent: NDArray[np.int8],
    sa: NDArray[np.float64],
    b: NDArray[np.uint8],
    b_value: NDArray[np.float64],
    b_exponent: NDArray[np.int8],
    sb: NDArray[np.float64],
    b_rows: int,
    columns: NDArray[np.int64],
    source: NDArray[np.int64],
    tiles: NDArray[np.int64],
    group: int,
    t: int,
    to: int,
    chosen: NDArray[np.int64],
    ends: NDArray[np.int64],
    out: NDArray[np.float64],
    row0: int,
    row1: int,
    panel0: int,
    panel1: int,
) -> bool:
    """B2 over splits of one chain over all of K: ``out`` and the result as of :func:`any_order`.

    ``a``, ``a_exponent`` ``[M, Kp]``, ``sa [M, 1]``, ``b [R, K]``, ``b_value``, ``b_exponent`` ``[codes]``, ``sb
    [ceil(R / b_rows), 1]``, ``columns [N]``, ``source [Kp]`` and ``tiles [tiles, 4]`` as there, the tiles those of one
    chain; ``chosen`` from ``ends[i]`` to ``ends[i + 1]``: steps that a partial chain may add, of all such chains.
    """
    longest = (tiles[:, 1] - tiles[:, 0]).max()
    steps = 0
    for tile in tiles:
        steps += (tile[1] - tile[0]) // group
    value = np.zeros((longest, 2, LANES))
    exponent = np.zeros((longest, LANES), np.int8)
    tops = np.zeros((AT_ONCE, steps, LANES), np.int8)
    parts = np.zeros((AT_ONCE, steps, 2 * LANES))
    moves = np.zeros(AT_ONCE, np.bool_)
    scale = np.zeros(LANES)
    sums = np.zeros(SUMS)
    held = np.zeros((AT_ONCE, HELD))
    chain = np.zeros((AT_ONCE, CHAIN))
    state = np.zeros((AT_ONCE, STATE))
    rests = True
    for panel in range(panel0, panel1):
        first = panel * LANES
        of_panel = columns[first : first + LANES]
        width = len(of_panel)
        for j in range(width):
            scale[j] = sb[of_panel[j] // b_rows, 0]
        for begin in range(row0, row1, AT_ONCE):
            rows = min(AT_ONCE, row1 - begin)
            state[:, :] = 0.0
            held[:, :] = 0.0
            parts[:, :, :] = 0.0
            step = 0
            for tile in tiles:
                k0, length = tile[0], tile[1] - tile[0]
                _unpack(b, of_panel, source[k0 : k0 + length], b_value, b_exponent, value, exponent)
                for g in range(0, length, group):
                    for i in range(rows):
                        for j in range(LANES):
                            tops[i, step, j] = i8(LEAST)
                        for k in range(g, g + group, UNROLL):
                            _raise_top(a_exponent[begin + i], k0 + k, exponent, k, tops[i, step])
                        add_products(a[begin + i], k0 + g, value, g, group, parts[i, step], 0)
                    step += 1
            for i in range(rows):
                _reach(parts[i], chosen, ends, chain[i], held[i])
            moves[:] = False
            moves[:rows] = True
            turn = 0
            while turn < TURNS and moves.any():
                turn += 1
                for i in range(rows):
                    if moves[i]:
                        _start_parts(chain[i], held[i], steps)
                step = 0
                for tile in tiles:
                    k0, length = tile[0], tile[1] - tile[0]
                    if len(tiles) > 1:
                        _unpack(b, of_panel, source[k0 : k0 + length], b_value, b_exponent, value, exponent)
                    for g in range(0, length, group):
                        for i in range(rows):
                            if moves[i]:
                                _start_part(sums, tops[i, step], held[i], t)
                                add_floors(a[begin + i], k0 + g, value, g, group, sums, CUT)
                                _lose(chain[i], sums, parts[i, step], tops[i, step], held[i], t, to)
                        step += 1
                for i in range(rows):
                    if moves[i]:
                        moves[i] = _parts_grow(chain[i], held[i])
            rests &= not moves.any()
            for i in range(rows):
                _promote(state[i], chain[i], sa[begin + i, 0], scale, True)
                for q in range(3, UNORDERED):
                    for j in range(width):
                        out[q, begin + i, first + j] = state[i, q * LANES + j]
    return rests


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
        x += fma(p4, b4[j], fma(p5, b5[j], fma(p6, b6[j], fma(p7, b7[j], s0[BLOCK + j]))))
        s0[BLOCK + j] = x
        x = fma(q0, b0[j], fma(q1, b1[j], fma(q2, b2[j], q3 * b3[j])))
        x += fma(q4, b4[j], fma(q5, b5[j], fma(q6, b6[j], fma(q7, b7[j], s1[BLOCK + j]))))
        s1[BLOCK + j] = x


@piece
def _unpack(
    b: NDArray[np.uint8],
    columns: NDArray[np.int64],
    source: NDArray[np.int64],
    b_value: NDArray[np.float64],
    b_exponent: NDArray[np.int8],
    value: NDArray[np.float64],
    exponent: NDArray[np.int8],
) -> None:
    """One tile of ``b``, transposed: elements above zero, magnitudes of those below, exponents; whole cache lines are
    written at a time."""
    for j0 in range(0, len(columns), 8):
        j1 = min(j0 + 8, len(columns))
        for k in range(len(source)):
            origin = max(source[k], 0)  # where there is none, ``a`` has a zero
            for j in range(j0, j1):
                code = b[columns[j], origin]
                v = b_value[code]
                value[k, 0, j], value[k, 1, j], exponent[k, j] = max(v, 0.0), max(-v, 0.0), b_exponent[code]


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
def _start(c: NDArray[np.float64], s: NDArray[np.float64], top: NDArray[np.int8], t: int) -> None:
    """``C = 2^52 q`` of a step, at which its sums of multiples of ``q`` start; those of its products start at 0."""
    for j in range(LANES):
        held = max(abs(c[X + j] + c[LOW + j]), abs(c[X + j] + c[HIGH + j]))
        of_held = (f64(held).view(np.int64) >> i64(52)) - i64(1023)  # 0: below every other; none is below 2**-126
        start = _power(max(i64(top[j]), of_held) - i64(t) + i64(52))
        s[START + j], s[CUT + j], s[CUT_BELOW + j] = start, start, start
        s[ABOVE + j], s[BELOW + j] = 0.0, 0.0


@piece
def _start_chain(s: NDArray[np.float64], top: NDArray[np.int8], t: int) -> None:
    """``C`` of a whole chain in any order, by the largest sum that it may hold."""
    for j in range(LANES):
        total = max(s[ABOVE + j], s[BELOW + j]) + s[ERROR + j]
        of_total = (f64(total).view(np.int64) >> i64(52)) - i64(1023)
        start = _power(max(i64(top[j]), of_total) - i64(t) + i64(52))
        s[START + j], s[CUT + j], s[CUT_BELOW + j] = start, start, start


@piece
def _grows(
    c: NDArray[np.float64], s: NDArray[np.float64], top: NDArray[np.int8], t: int, steps: int, relative: float
) -> bool:
    """``LOW`` and ``HIGH`` of a chain in any order, and whether the error of a lane moves its exponents, which must
    then be asked again."""
    grows = False
    for j in range(LANES):
        mg = i64(top[j])
        live = mg > LEAST
        largest = max(s[ABOVE + j], s[BELOW + j])
        total = largest + s[ERROR + j]
        drift = (steps - 1) * _power(mg - i64(t)) + steps * relative * _floor_power(total)
        plus = s[ABOVE + j] - (s[CUT + j] - s[START + j])
        minus = s[BELOW + j] - (s[CUT_BELOW + j] - s[START + j])
        low, high = (-(plus + drift), minus + drift) if live else (0.0, 0.0)
        grown = max(-low, high)
        moves = _floor_power(largest + grown) > _floor_power(total)
        c[LOW + j], c[HIGH + j] = low, high
        s[ERROR + j] = grown if moves else s[ERROR + j]
        grows |= moves
    return grows


@piece
def _reach(
    parts: NDArray[np.float64],
    chosen: NDArray[np.int64],
    ends: NDArray[np.int64],
    c: NDArray[np.float64],
    h: NDArray[np.float64],
) -> None:
    """``X`` of a chain of steps with the sums ``parts [steps, 2 LANES]``, the largest magnitude of consecutive ones of
    a partial chain, and of those of one sign."""
    for j in range(LANES):
        c[X + j], h[PREFIX + j], h[LOWEST + j] = 0.0, 0.0, 0.0
    for step in range(len(parts)):
        own = parts[step]
        for j in range(LANES):
            part = own[j] - own[LANES + j]
            c[X + j] += part
            h[PREFIX + j] += max(part, 0.0)
            h[LOWEST + j] += max(-part, 0.0)
    for j in range(LANES):
        h[ONE_SIGN + j], h[LARGEST + j] = max(h[PREFIX + j], h[LOWEST + j]), 0.0
    for number in range(len(ends) - 1):
        for j in range(LANES):
            h[PREFIX + j], h[LOWEST + j], h[HIGHEST + j] = 0.0, 0.0, 0.0
        for at in range(ends[number], ends[number + 1]):
            own = parts[chosen[at]]
            for j in range(LANES):
                prefix = h[PREFIX + j] + (own[j] - own[LANES + j])
                h[PREFIX + j] = prefix
                h[LOWEST + j] = min(h[LOWEST + j], prefix)
                h[HIGHEST + j] = max(h[HIGHEST + j], prefix)
        for j in range(LANES):
            h[LARGEST + j] = max(h[LARGEST + j], h[HIGHEST + j] - h[LOWEST + j])


@piece
def _start_parts(c: NDArray[np.float64], h: NDArray[np.float64], steps: int) -> None:
    """The interval of the additions of all partial chains."""
    for j in range(LANES):
        high = (steps - 1) * 2.0**-24 * _floor_power(h[ONE_SIGN + j] + h[GROWN + j])
        c[LOW + j], c[HIGH + j] = -high, high


@piece
def _start_part(s: NDArray[np.float64], top: NDArray[np.int8], h: NDArray[np.float64], t: int) -> None:
    """``C`` of a step, by the largest accumulator that a partial chain may have before it."""
    for j in range(LANES):
        magnitude = h[LARGEST + j] + h[GROWN + j]
        of_held = (f64(magnitude).view(np.int64) >> i64(52)) - i64(1023)
        start = _power(max(i64(top[j]), of_held) - i64(t) + i64(52))
        s[START + j], s[CUT + j], s[CUT_BELOW + j] = start, start, start


@piece
def _lose(
    c: NDArray[np.float64],
    s: NDArray[np.float64],
    parts: NDArray[np.float64],
    top: NDArray[np.int8],
    h: NDArray[np.float64],
    t: int,
    to: int,
) -> None:
    """The interval after a step of some partial chain; nothing changes where every product is zero."""
    ulp = 2.0**-to
    for j in range(LANES):
        mg = i64(top[j])
        live = mg > LEAST
        lost = _power(mg - i64(t)) + ulp * max(_floor_power(h[LARGEST + j] + h[GROWN + j]), SMALLEST)
        low = c[LOW + j] - (parts[j] - (s[CUT + j] - s[START + j])) - lost
        high = c[HIGH + j] + (parts[LANES + j] - (s[CUT_BELOW + j] - s[START + j])) + lost
        c[LOW + j] = low if live else c[LOW + j]
        c[HIGH + j] = high if live else c[HIGH + j]


@piece
def _parts_grow(c: NDArray[np.float64], h: NDArray[np.float64]) -> bool:
    """Whether the error of a lane moves its exponents, as of :func:`_grows`."""
    grows = False
    for j in range(LANES):
        grown, error = max(-c[LOW + j], c[HIGH + j]), h[GROWN + j]
        largest, one_sign = h[LARGEST + j], h[ONE_SIGN + j]
        moves = _floor_power(largest + grown) > _floor_power(largest + error)
        moves |= _floor_power(one_sign + grown) > _floor_power(one_sign + error)
        h[GROWN + j] = grown if moves else error
        grows |= moves
    return grows


@piece
def _step(c: NDArray[np.float64], s: NDArray[np.float64], top: NDArray[np.int8], t: int, to: int) -> None:
    """The interval after the step; nothing changes where every product is zero."""
    ulp = 2.0**-to
    for j in range(LANES):
        mg = i64(top[j])
        live = mg > LEAST
        x, low, high = c[X + j], c[LOW + j], c[HIGH + j]
        left, right = x + low, x + high
        nearest = 0.0 if (left <= 0.0) & (right >= 0.0) else min(abs(left), abs(right))
        lost = _power(mg - i64(t)) if nearest < _power(mg) else 0.0
        after = x + (s[ABOVE + j] - s[BELOW + j])
        l1 = low - (s[ABOVE + j] - (s[CUT + j] - s[START + j])) - (lost if right > 0.0 else 0.0)
        h1 = high + (s[BELOW + j] - (s[CUT_BELOW + j] - s[START + j])) + (lost if left < 0.0 else 0.0)
        exact_below = _power(mg + i64(1 + to - t))
        above, under = after + h1, -(after + l1)
        c[LOW + j] = l1 - (0.0 if above < exact_below else ulp * _floor_power(above)) if live else low
        c[HIGH + j] = h1 + (0.0 if under < exact_below else ulp * _floor_power(under)) if live else high
        c[X + j] = after


@piece
def _floor_power(x: float) -> float:
    """``2^floor(log2 x)`` of a non-negative float64, 0 for 0."""
    return i64(f64(x).view(np.int64) & i64(POWER)).view(np.float64)


@piece
def _promote(
    s: NDArray[np.float64], c: NDArray[np.float64], sa: float, sb: NDArray[np.float64], unordered: bool
) -> None:
    """:meth:`oracle.bounds.product.Promotion.add` of ``X, LOW, HIGH``, which start again at 0."""
    for j in range(LANES):
        x, low, high = c[X + j], c[LOW + j], c[HIGH + j]
        sigma = sa * sb[j]
        size = abs(x) + max(-low, high)
        left, right = sigma * low, sigma * high
        of, least, most = sigma * x, min(left, right), max(left, right)
        y, down, up = s[Y + j] + of, s[DOWN + j] + least, s[UP + j] + most
        largest = max(max(abs(sa), abs(sb[j])), abs(sigma)) * size
        rounding, tiny = 3 * U * abs(sigma) * size, ETA * (1 + size + abs(sa) + abs(sb[j]))
        if unordered:
            s[PLUS + j] += max(of + most, 0.0)
            s[MINUS + j] += max(-of - least, 0.0)
            s[REACHED + j] += max(largest, size)
            rounding = rounding + tiny
            reach = max(s[REACHED + j], rounding)
        else:
            total = max(abs(y + down), abs(y + up)) + s[PHI + j]
            rounding = rounding + U * total + tiny
            reach = max(largest, total + rounding)
        s[Y + j], s[DOWN + j], s[UP + j] = y, down, up
        s[PHI + j] = s[PHI + j] + rounding if size > 0 else s[PHI + j]
        s[OPEN + j] = s[OPEN + j] if max(reach, abs(sigma)) < REACH else 1.0
        c[X + j], c[LOW + j], c[HIGH + j] = 0.0, 0.0, 0.0


@piece
def _close_block(s: NDArray[np.float64], sa: float, sb: NDArray[np.float64]) -> None:
    """``hi + lo += sigma * X`` and what that misses, as :func:`oracle.truth.gemm.exact` does."""
    for j in range(LANES):
        x = s[BLOCK + j]
        sigma = sa * sb[j]
        p = sigma * x
        _add_pair(s, j, p, fma(sigma, x, -p))
        s[BLOCK + j] = 0.0


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
