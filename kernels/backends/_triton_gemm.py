"""The Triton kernel of the block-scaled products (imported only when a plan chooses it): dense, contiguous, masked.

::

    y[m, n] = sum_kb (sa[m, kb] * sb[n // 128, kb]) * <a[m], b[n]>_kb

One ``tl.dot`` from zero for each block of 128 along K, then ``sum = fma(fl(sa * sb), part, sum)`` in float32, blocks
ascending: the order of DeepGEMM's kernels, and the same for every tile, so that no bit depends on the tile or on M.
From sm89 the operands are multiplied as E4M3. Before it, :func:`_wide` turns codes into float16, which is exact.

Not covered: K cut into several sums (a second launch, other bits for other M); Triton's warp specialisation, which gave
wrong sums at some depths (Triton 3.6 on an H200); descriptors of the copy engine, which were no faster here.
"""

# Triton's language has no Python types: arguments are pointers and tiles, typed by its compiler.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _wide(codes):
    """E4M3 codes (uint8) to float16: the fields move, and 2**8 makes up for the exponents' bias of 15 instead of 7."""
    code = codes.to(tl.int16)
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _load(at, inside, EVEN: tl.constexpr, DECODE: tl.constexpr):
    """128 codes a row, zeros past K."""
    x = tl.load(at) if EVEN else tl.load(at, mask=inside[None, :], other=0.0)
    return _wide(x) if DECODE else x


@triton.jit
def _store(out, total, rows, group, row, end, col, n, MODE: tl.constexpr):
    """The rows below ``end`` (with ``MODE`` 1, those of this group, none of -1) and the columns below ``n``."""
    keep = row < end
    if MODE == 1:
        keep = keep & (group >= 0) & (tl.load(rows + row, mask=keep, other=-1) == group)
    at = out + row.to(tl.int64)[:, None] * n + col[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=keep[:, None] & (col < n)[None, :])


@triton.jit
def gemm_kernel(
    a,
    sa,
    b,
    sb,
    out,
    rows,
    m,
    n,
    k,
    a_row,
    b_row,
    sa_group,
    sa_row,
    sa_block,
    sb_group,
    sb_row,
    sb_block,
    MODE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PAIR: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    DECODE: tl.constexpr,
):
    """One tile ``[BM, BN]`` of the output, or with ``PAIR`` two, one below the other, that share the weight's tile.

    ``MODE`` 0: one product, ``rows`` unused. 1: ``rows [m]`` is the group of every row, one group a tile, -1 for rows
    that are left alone. 2: ``rows [G]`` is the number of rows of each group of ``a [G, m, k]``. ``WIDTH`` tiles of N
    are taken for all of M before the next ones, so that a weight stays in the cache. ``EVEN``: k is a multiple of 128.
    """
    TILE: tl.constexpr = 2 * BM if PAIR else BM
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, TILE), tl.cdiv(n, BN)
    group = 0
    if MODE == 2:
        group = pid // (tiles_m * tiles_n)
        pid = pid % (tiles_m * tiles_n)
    first = pid // (WIDTH * tiles_m) * WIDTH
    width = tl.minimum(tiles_n - first, WIDTH)
    row0 = (pid % (WIDTH * tiles_m)) // width * TILE
    col0 = (first + (pid % (WIDTH * tiles_m)) % width) * BN
    end = m
    blocks = tl.cdiv(k, 128)
    if MODE == 1:
        group = tl.load(rows + row0)
        blocks = tl.where(group < 0, 0, blocks)
    if MODE == 2:
        end = tl.load(rows + group)
        blocks = tl.where(row0 < end, blocks, 0)
        a += tl.cast(group, tl.int64) * m * a_row
        sa += tl.cast(group, tl.int64) * sa_group
        out += tl.cast(group, tl.int64) * m * n
    lane = tl.arange(0, 128)
    row = row0 + tl.arange(0, BM)
    col = col0 + tl.arange(0, BN)
    x_row = tl.minimum(row, m - 1)
    y_row = tl.minimum(row + BM, m - 1)
    w_row = tl.cast(group, tl.int64) * n + tl.minimum(col, n - 1)
    x_at = a + x_row.to(tl.int64)[:, None] * a_row + lane[None, :]
    y_at = a + y_row.to(tl.int64)[:, None] * a_row + lane[None, :]
    w_at = b + w_row[:, None] * b_row + lane[None, :]
    sb_at = sb + group * sb_group + col0 // 128 * sb_row
    total = tl.zeros([BM, BN], tl.float32)
    below = tl.zeros([BM, BN], tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        inside = lane < k - block * 128
        weight = tl.load(sb_at + block * sb_block)
        scale = tl.load(sa + x_row * sa_row + block * sa_block) * weight
        x = _load(x_at + block * 128, inside, EVEN, DECODE)
        w = _load(w_at + block * 128, inside, EVEN, DECODE)
        total = tl.fma(tl.dot(x, w.T), scale[:, None], total)
        if PAIR:
            scale = tl.load(sa + y_row * sa_row + block * sa_block) * weight
            y = _load(y_at + block * 128, inside, EVEN, DECODE)
            below = tl.fma(tl.dot(y, w.T), scale[:, None], below)
    _store(out, total, rows, group, row, end, col, n, MODE)
    if PAIR:
        _store(out, below, rows, group, row + BM, end, col, n, MODE)
