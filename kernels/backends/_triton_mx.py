"""The Triton kernel of the block-scaled products (imported only when a plan chooses it).

::

    y[m, n] = alpha * sum_k (value(a[m, k]) sa[m, k // w]) (value(b[n, k]) sb[n, k // w])  (+ bias[n])

Codes and scales are multiplied in float32 and rounded to bfloat16, which loses nothing from 2^-133 to 2^127 (a code has
at most four significant bits, an E4M3 scale as many). One ``tl.dot`` chain over K in ascending order, so that no bit
depends on the tile or on M. Scale bytes are read where they lie; no byte of their padding is.
"""

# Triton's language has no Python types: arguments are pointers and tiles that only its compiler knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _values(codes, FORMAT: tl.constexpr):
    """Codes (uint8) as float32: the fields move to those of float16, and a power of two makes up for the bias of 15.

    ``FORMAT`` 0: E4M3, 1: E5M2, 2: E2M1.
    """
    code = codes.to(tl.int16)
    if FORMAT == 0:
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    if FORMAT == 1:
        return (code << 8).to(tl.float16, bitcast=True).to(tl.float32)
    bits = ((code & 0x8) << 12) | ((code & 0x7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _codes(at, lane, left, PACKED: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    """``[ROWS, BK]`` codes from the first of each row ``at [ROWS, 1]``, zeros from ``left`` on."""
    if PACKED:
        half = tl.arange(0, BK // 2)
        pairs = tl.load(at + half[None, :], mask=(half < left // 2)[None, :], other=0)
        return tl.interleave(pairs & 0xF, pairs >> 4)
    return tl.load(at + lane[None, :], mask=(lane < left)[None, :], other=0)


@triton.jit
def _scales(memory, row, first, columns, KIND: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
            ROWS: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """``[ROWS, BK]`` float32 scales of these rows from column ``first`` on.

    ``KIND`` 0: E8M0 bytes, 1: E4M3 bytes, 2: float32. ``TILE``: rows of a tile, 0 for a matrix.
    """
    COUNT: tl.constexpr = BK // WIDTH
    c = first + tl.arange(0, COUNT)[None, :]
    r = row[:, None]
    if TILE == 0:
        at = r * columns + c
    elif TILE == 8:
        at = (r // 8 * tl.cdiv(columns, 4) + c // 4) * 32 + r % 8 * 4 + c % 4
    else:
        at = (r // 128 * tl.cdiv(columns, 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    raw = tl.load(memory + at, mask=c < columns, other=0)
    if KIND == 0:
        byte = raw.to(tl.int32)
        bits = tl.where(byte == 0, 0x400000, byte << 23)
        scale = tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    elif KIND == 1:
        scale = _values(raw, 0)
    else:
        scale = raw
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, COUNT, WIDTH)), (ROWS, BK))


@triton.jit
def mx_kernel(
    a, sa, b, sb, out, table, alpha, bias, m, n, k, groups,
    MODE: tl.constexpr, A: tl.constexpr, B: tl.constexpr, A_KIND: tl.constexpr, B_KIND: tl.constexpr,
    A_TILE: tl.constexpr, B_TILE: tl.constexpr, A_WIDTH: tl.constexpr, B_WIDTH: tl.constexpr, ALPHA: tl.constexpr,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """One tile ``[BM, BN]`` of ``out [m, n]``.

    ``MODE`` 0: one product. 1: ``table [m]`` is the group of every row, one group a tile, -1 for rows that are left
    alone. 2: ``table [4, groups]``: first row, end, and rows of the scales of ``a`` and of the weight. ``A``, ``B``:
    formats of the codes; ``ALPHA`` 0: none, 1: one, 2: one for each group.
    """
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(n, BN)
    col0, tile = pid % tiles_n * BN, pid // tiles_n
    group, row0, end, shift, weight = 0, tile * BM, m, 0, 0
    if MODE == 1:
        group = tl.load(table + row0)
        weight = group * n
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
    blocks = tl.where(group < 0, 0, tl.cdiv(k, BK))
    lane = tl.arange(0, BK)
    row, col = row0 + tl.arange(0, BM), col0 + tl.arange(0, BN)
    x_row, w_row = tl.minimum(row, end - 1), tl.minimum(col, n - 1)
    PACK_A: tl.constexpr = 2 if A == 2 else 1
    PACK_B: tl.constexpr = 2 if B == 2 else 1
    x_at = a + x_row.to(tl.int64)[:, None] * (k // PACK_A)
    w_at = b + (tl.cast(group, tl.int64) * n + w_row)[:, None] * (k // PACK_B)
    total = tl.zeros([BM, BN], tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        left = k - block * BK
        x = _values(_codes(x_at + block * (BK // PACK_A), lane, left, A == 2, BM, BK), A)
        w = _values(_codes(w_at + block * (BK // PACK_B), lane, left, B == 2, BN, BK), B)
        c, d = block * (BK // A_WIDTH), block * (BK // B_WIDTH)
        x = x * _scales(sa, x_row + shift, c, tl.cdiv(k, A_WIDTH), A_KIND, A_TILE, A_WIDTH, BM, BK)
        w = w * _scales(sb, w_row + weight, d, tl.cdiv(k, B_WIDTH), B_KIND, B_TILE, B_WIDTH, BN, BK)
        if NATIVE:  # the interpreter multiplies the bits of bfloat16 as integers
            x, w = x.to(tl.bfloat16), w.to(tl.bfloat16)
        total = tl.dot(x, w.T, total)
    if ALPHA == 1:
        total = tl.load(alpha) * total
    if ALPHA == 2:
        total = tl.load(alpha + tl.maximum(group, 0)) * total
    if BIAS:
        total = total + tl.load(bias + w_row).to(tl.float32)[None, :]
    keep = (row < end) & (group >= 0)
    if MODE == 1:
        keep = keep & (tl.load(table + row, mask=keep, other=-1) == group)
    at = out + row.to(tl.int64)[:, None] * n + col[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=keep[:, None] & (col < n)[None, :])
