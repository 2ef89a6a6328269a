"""The Triton kernels of the block-scaled products (imported only when a plan chooses them).

::

    y[m, n] = alpha * sum_k (value(a[m, k]) sa[m, k // w]) (value(b[n, k]) sb[n, k // w])  (+ bias[n])

Codes become bfloat16 two at a time, in the lanes of 32 bits: their fields are shifted to those of bfloat16, a power of
two makes up for the bias, and the block's scale multiplies; both products are exact from 2^-133 to 2^127 (a code has
at most four significant bits, an E4M3 scale as many). One ``tl.dot`` chain over K in ascending order, so that no bit
depends on the tile or on M. The weight stands first in it: its tile is made in registers, and a few rows are enough
on the other side. Scale bytes are read where they lie, four at once in tiles; no byte of their padding is used.
"""

# Triton's language has no Python types: arguments are pointers and tiles, typed by its compiler.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _times(x, y, NATIVE: tl.constexpr):
    """Products of the bfloat16 pairs in the lanes of int32, each rounded once."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
            "=r,r,r",
            [x, y],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = (x << 16).to(tl.float32, bitcast=True) * (y << 16).to(tl.float32, bitcast=True)
        high = (x & -65536).to(tl.float32, bitcast=True) * (y & -65536).to(tl.float32, bitcast=True)
        return ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def _eight_bits(x, shift: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes 1 and 3 of ``x << shift`` as bfloat16 in the lanes: E4M3 (0) or E5M2 (1).

    A code whose exponent says NaN or infinity gets a bfloat16's: one unit more would carry out of its fields.
    """
    DOWN: tl.constexpr = 4 if FORMAT == 0 else 3
    MASK: tl.constexpr = 0x07F007F0 if FORMAT == 0 else 0x0FE00FE0
    UNIT: tl.constexpr = 0x00100010 if FORMAT == 0 else 0x00800080
    CARRY: tl.constexpr = 0x08000800 if FORMAT == 0 else 0x10001000
    FILL: tl.constexpr = 15 if FORMAT == 0 else 7
    POWER: tl.constexpr = 0x7B807B80 if FORMAT == 0 else 0x77807780  # 2^120, 2^112
    fields = ((x << (shift - DOWN)) if shift > DOWN else (x >> (DOWN - shift))) & MASK
    fields = fields + ((fields + UNIT) & CARRY) * FILL
    return _times(fields | ((x << shift) & -2147450880), tl.full(x.shape, POWER, tl.int32), NATIVE)


@triton.jit
def _four_bits(x, at: tl.constexpr, NATIVE: tl.constexpr):
    """Nibbles ``at`` and ``at + 4`` of a word as bfloat16 in the lanes: E2M1."""
    sign = (x << (12 - 4 * at)) & -2147450880
    fields = ((x << (6 - 4 * at)) if at < 2 else (x >> (4 * at - 6))) & 0x01C001C0
    return _times(fields | sign, tl.full(x.shape, 0x7E807E80, tl.int32), NATIVE)  # 2^126


@triton.jit
def _low(x, NATIVE: tl.constexpr):
    """The lower lanes as values; without NATIVE float32, as the interpreter multiplies bfloat16 as integers."""
    return x.to(tl.int16).to(tl.bfloat16, bitcast=True) if NATIVE else (x << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(x, NATIVE: tl.constexpr):
    """The upper lanes, as :func:`_low`."""
    return (x >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) if NATIVE else (x & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _scale_bits(raw, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Scales as bfloat16 in both lanes: E8M0 bytes (0), E4M3 bytes (1), float32 powers of two (2)."""
    if KIND == 0:
        bits = tl.where(raw == 0, 0x40, tl.where(raw == 255, 0x7FC0, raw << 7))
        return bits | (bits << 16)
    elif KIND == 1:
        return _eight_bits(raw | (raw << 16), 8, 0, NATIVE)
    else:
        bits = raw.to(tl.int32, bitcast=True)
        return ((bits >> 16) & 0xFFFF) | (bits & -65536)


@triton.jit
def _scales(
    memory,
    row,
    first,
    columns,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """``[ROWS, COUNT]`` scales of these rows from column ``first`` on, as :func:`_scale_bits`; 0 past the last.

    ``TILE``: rows of a tile, whose memory is read in words of four scales; 0 for a matrix.
    """
    c = first + tl.arange(0, COUNT)[None, :]
    r = row[:, None]
    if TILE == 0:
        raw = tl.load(memory + r * columns + c, mask=c < columns, other=0)
        raw = raw if KIND == 2 else raw.to(tl.int32)
    else:
        across = tl.cdiv(columns, 4)
        word = first // 4 + tl.arange(0, COUNT // 4)[None, :]
        if TILE == 8:
            at = (r // 8 * across + word) * 8 + r % 8
        else:
            at = (r // 128 * across + word) * 128 + r % 32 * 4 + r % 128 // 32
        four = tl.load(memory + at, mask=word < across, other=0)
        even = tl.join(four & 255, (four >> 16) & 255)
        raw = tl.reshape(tl.join(even, tl.join((four >> 8) & 255, (four >> 24) & 255)), (ROWS, COUNT))
    return tl.where(c < columns, _scale_bits(raw, KIND, NATIVE), 0)


@triton.jit
def _values(
    at,
    scale_memory,
    scale_row,
    block,
    k,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """``[ROWS, BK]`` values of a block of K of the rows that begin at ``at [ROWS, 1]``; zeros from K on.

    ``FORMAT`` 0: E4M3, 1: E5M2, 2: E2M1 (words of four or eight codes); 3: bfloat16 without scales.
    """
    if FORMAT == 3:
        lane = block * BK + tl.arange(0, BK)
        x = tl.load(at + lane[None, :], mask=(lane < k)[None, :], other=0.0)
        return x if NATIVE else x.to(tl.float32)
    else:
        EACH: tl.constexpr = 8 if FORMAT == 2 else 4
        WORDS: tl.constexpr = BK // EACH
        COUNT: tl.constexpr = BK // WIDTH
        lane = block * WORDS + tl.arange(0, WORDS)
        x = tl.load(at + lane[None, :], mask=(lane < k // EACH)[None, :], other=0)
        scale = _scales(scale_memory, scale_row, block * COUNT, tl.cdiv(k, WIDTH), KIND, TILE, COUNT, ROWS, NATIVE)
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, COUNT, WORDS // COUNT)), (ROWS, WORDS))
        if FORMAT == 2:
            p = _times(_four_bits(x, 0, NATIVE), scale, NATIVE)
            q = _times(_four_bits(x, 1, NATIVE), scale, NATIVE)
            r = _times(_four_bits(x, 2, NATIVE), scale, NATIVE)
            s = _times(_four_bits(x, 3, NATIVE), scale, NATIVE)
            even = tl.join(tl.join(_low(p, NATIVE), _high(p, NATIVE)), tl.join(_low(r, NATIVE), _high(r, NATIVE)))
            odd = tl.join(tl.join(_low(q, NATIVE), _high(q, NATIVE)), tl.join(_low(s, NATIVE), _high(s, NATIVE)))
        else:
            p = _times(_eight_bits(x, 8, FORMAT, NATIVE), scale, NATIVE)
            q = _times(_eight_bits(x, 0, FORMAT, NATIVE), scale, NATIVE)
            even, odd = tl.join(_low(p, NATIVE), _high(p, NATIVE)), tl.join(_low(q, NATIVE), _high(q, NATIVE))
        return tl.reshape(tl.join(even, odd), (ROWS, BK))


@triton.jit
def _place(tile, table, m, groups, MODE: tl.constexpr, BM: tl.constexpr):
    """Group, first row, end, and rows to the scales of ``a`` and of the weight, of a tile of rows; group -1: none."""
    group, row0, end, shift, weight = 0, tile * BM, m, 0, 0
    if MODE == 1:
        group = tl.load(table + row0)
    if MODE == 3:
        group = tile // tl.cdiv(m, BM)
        row0 = tile % tl.cdiv(m, BM) * BM
    if MODE == 2:
        group = -1
        row0 = 0
        end = 0
        for g in range(0, groups):
            begin = tl.load(table + g)
            stop = tl.load(table + groups + g)
            tiles = tl.cdiv(stop - begin, BM)
            hit = (group < 0) & (tile < tiles)
            row0 = tl.where(hit, begin + tile * BM, row0)
            end = tl.where(hit, stop, end)
            shift = tl.where(hit, tl.load(table + 2 * groups + g) - begin, shift)
            weight = tl.where(hit, tl.load(table + 3 * groups + g), weight)
            tile = tl.where((group < 0) & (hit == 0), tile - tiles, tile)
            group = tl.where(hit, g, group)
    return group, row0, end, shift, weight


@triton.jit
def mx_values(
    x,
    scale,
    out,
    table,
    m,
    k,
    groups,
    MODE: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One tile ``[BM, BK]`` of the bfloat16 values ``out [m, k]`` of an operand; rows of no group are left alone."""
    blocks = tl.cdiv(k, BK)
    block, tile = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    group, row0, end, shift, _ = _place(tile, table, m, groups, MODE, BM)
    row = row0 + tl.arange(0, BM)
    of = tl.maximum(tl.minimum(row, end - 1), 0)
    at = x + of.to(tl.int64)[:, None] * (k // (8 if FORMAT == 2 else 4))
    value = _values(at, scale, of + shift, block, k, FORMAT, KIND, TILE, WIDTH, BM, BK, NATIVE)
    lane = block * BK + tl.arange(0, BK)
    keep = ((row < end) & (group >= 0))[:, None] & (lane < k)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * k + lane[None, :], value.to(out.dtype.element_ty), mask=keep)


@triton.jit
def mx_kernel(
    a,
    sa,
    b,
    sb,
    out,
    table,
    alpha,
    bias,
    m,
    n,
    k,
    groups,
    MODE: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    A_KIND: tl.constexpr,
    B_KIND: tl.constexpr,
    A_TILE: tl.constexpr,
    B_TILE: tl.constexpr,
    A_WIDTH: tl.constexpr,
    B_WIDTH: tl.constexpr,
    ALPHA: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One tile ``[BM, BN]`` of ``out [m, n]``.

    ``MODE`` 0: one product. 1: ``table [m]`` is the group of every row, one group a tile, -1 for rows that are left
    alone. 2: ``table [4, groups]``: first row, end, and rows of the scales of ``a`` and of the weight. 3: ``table [3,
    groups]``: first k, end, and first column of scales of a group, whose ``[m, n]`` follow one another. ``A``, ``B``:
    formats of :func:`_values`; ``ALPHA`` 0: none, 1: one, 2: one for each group, 3: one for each row. ``ADD``: to
    what is in ``out``.
    """
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(n, BN)
    group, row0, end, shift, weight = _place(pid // tiles_n, table, m, groups, MODE, BM)
    if MODE == 1:
        weight = group * n
    row, col = row0 + tl.arange(0, BM), pid % tiles_n * BN + tl.arange(0, BN)
    x_row, w_row = tl.minimum(row, end - 1), tl.minimum(col, n - 1)
    EACH_A: tl.constexpr = 1 if A == 3 else 8 if A == 2 else 4
    EACH_B: tl.constexpr = 1 if B == 3 else 8 if B == 2 else 4
    x_at = a + x_row.to(tl.int64)[:, None] * (k // EACH_A)
    w_at = b + (tl.cast(group if MODE != 3 else 0, tl.int64) * n + w_row)[:, None] * (k // EACH_B)
    depth = k
    out_row = row.to(tl.int64)
    if MODE == 3:
        first = tl.multiple_of(tl.load(table + group), 32)
        depth = tl.load(table + groups + group) - first
        column = tl.load(table + 2 * groups + group)
        x_at += first // EACH_A
        w_at += first // EACH_B
        sa += tl.cdiv(m, 128) * 32 * column
        sb += tl.cdiv(n, 128) * 32 * column
        out_row += tl.cast(group, tl.int64) * m
    total = tl.zeros([BN, BM], tl.float32)
    for block in tl.range(0, tl.where(group < 0, 0, tl.cdiv(depth, BK)), num_stages=STAGES):
        w = _values(w_at, sb, w_row + weight, block, depth, B, B_KIND, B_TILE, B_WIDTH, BN, BK, NATIVE)
        x = _values(x_at, sa, x_row + shift, block, depth, A, A_KIND, A_TILE, A_WIDTH, BM, BK, NATIVE)
        total = tl.dot(w, x.T, total)
    if ALPHA == 1:
        total = tl.load(alpha) * total
    if ALPHA == 2:
        total = tl.load(alpha + tl.maximum(group, 0)) * total
    if ALPHA == 3:
        total = tl.load(alpha + x_row)[None, :] * total
    if BIAS:
        total = total + tl.load(bias + w_row).to(tl.float32)[:, None]
    keep = (row < end) & (group >= 0)
    if MODE == 1:
        keep = keep & (tl.load(table + row, mask=keep, other=-1) == group)
    at = out + out_row[None, :] * n + col[:, None]
    inside = keep[None, :] & (col < n)[:, None]
    if ADD:
        total = tl.load(at, mask=inside, other=0.0).to(tl.float32) + total
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)
