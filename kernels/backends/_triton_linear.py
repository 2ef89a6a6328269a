"""The Triton kernel of a linear layer with few rows: the input is quantised inside the product.

::

    inv[m, kb] = min(448 / amax, largest value of x's dtype), q = sat(x * inv), scale = 1 / inv
    y[m, n] = sum_kb (scale[m, kb] * sb[n // 128, kb]) * <q[m], w[n]>_kb

The quantiser is that of ``group_kernel`` with a limit (:mod:`kernels.backends._triton_kernels`), in every bit that
reaches the product. One
``tl.dot`` from zero for each block of 128 along K, then ``sum = fma(fl(scale * sb), part, sum)`` in float32, blocks
ascending, as in :mod:`kernels.backends._triton_gemm`. The weight is the left operand: on sm90 its 64 rows are those of
one wgmma instruction, and the rows of ``x`` its columns, of which there may be 8.

Every program quantises all of ``x`` that it multiplies. That is more work with every row, and saves the way of the
codes through memory: with few rows the weight is read in the same time.

Where the columns are too few for every multiprocessor, K is cut into ``PARTS`` sums, and a second kernel adds them in
their order: nothing depends on which program ends first, and nothing on M.

Not covered: more than 32 rows; a sum of parts within the launch, whose counters launches on two streams would share.
"""

# Triton's language has no Python types: arguments are pointers and tiles, typed by its compiler.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from ._triton_gemm import _wide
from ._triton_kernels import _encode

LEAST = tl.constexpr(0x03E06A8D)
"""Bits of 1.319e-36, of which 448 is the 3.3965e38-fold: beyond bfloat16, within float32."""


@triton.jit
def _approximate(y):
    """1 / y within 1 ulp, for y of 2^-120 to 2^120."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, is_pure=True, pack=1)


@triton.jit
def _inverse(amax, LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    """min(448 / amax, limit), the quotient rounded to nearest even.

    ``div.rn`` branches, which keeps the groups that are quantised together from overlapping. One step of Newton from an
    approximation within 2 ulp rounds right here, since amax has 11 significant bits at most (a test tries every one).
    Below ``LEAST`` the quotient is beyond every limit, and finite.
    """
    limit = tl.full(amax.shape, LIMIT, tl.int32).to(tl.float32, bitcast=True)
    if not NATIVE:
        return tl.minimum(tl.div_rn(tl.full(amax.shape, 448.0, tl.float32), amax), limit)
    least = tl.full(amax.shape, LEAST, tl.int32).to(tl.float32, bitcast=True)
    down = tl.where(amax > 1.329227995784916e36, 0.0009765625, 1.0)  # 2^120, 2^-10: subnormals are flushed
    x = tl.maximum(amax, least) * down
    y = _approximate(x)
    quotient = 448.0 * y
    quotient = tl.fma(tl.fma(-x, quotient, 448.0), y, quotient)
    return tl.where(amax == float("inf"), 0.0, tl.minimum(quotient * down, limit))


@triton.jit
def _reciprocal(inv, NATIVE: tl.constexpr):
    """1 / inv rounded to nearest even, of what :func:`_inverse` gives; infinity for 0.

    Likewise, for inv has a significand of at most 1026. A subnormal result (inv above 2^126) is rounded twice, and may
    be off by 2^-149.
    """
    if not NATIVE:
        return tl.div_rn(inv * 0.0 + 1.0, inv)
    down = tl.where(inv > 1.329227995784916e36, 0.0009765625, 1.0)
    x = inv * down
    y = _approximate(x)
    y = tl.fma(tl.fma(-x, y, 1.0), y, y)
    return tl.where(inv == 0.0, float("inf"), y * down)


@triton.jit
def _quantise(x, LIMIT: tl.constexpr, NATIVE: tl.constexpr, DECODE: tl.constexpr):
    """One group of 128 of each row: codes, as the product takes them, and the scale of each row.

    The scale of a group of zeros is the inverse of the limit, not 1: its products are 0 all the same. A NaN is left out
    of the amax, and its code makes every element of its row NaN, whatever the scale.
    """
    wide = x.to(tl.float32)
    inv = _inverse(tl.max(tl.abs(wide), axis=1), LIMIT, NATIVE)
    codes = _encode(wide * inv[:, None], not DECODE)
    return _wide(codes) if DECODE else codes, _reciprocal(inv, NATIVE)


@triton.jit(do_not_specialize=["m"])
def linear_kernel(
    x,
    w,
    sb,
    out,
    m,
    n,
    k,
    x_row,
    w_row,
    sb_row,
    sb_block,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
    DECODE: tl.constexpr,
):
    """``COLUMNS`` columns of one part of ``out [PARTS, m, n]``, m at most ``ROWS``; ``x [m, k]``, codes ``w [n, k]``.

    Each part sums an equal share of K, ``TOGETHER`` blocks of which are quantised, then multiplied; that many go into a
    share without remainder. ``LIMIT`` holds the bits of the largest ``inv``.
    """
    tiles = tl.cdiv(n, COLUMNS)
    col0 = tl.program_id(0) % tiles * COLUMNS
    share = tl.program_id(0) // tiles
    steps = k // (128 * TOGETHER * PARTS)
    lane = tl.arange(0, 128)
    row = tl.arange(0, ROWS)
    col = col0 + tl.arange(0, COLUMNS)
    keep = row < m
    x_at = x + row.to(tl.int64)[:, None] * x_row + lane[None, :]
    w_at = w + tl.minimum(col, n - 1).to(tl.int64)[:, None] * w_row + lane[None, :]
    sb_at = sb + col0 // 128 * sb_row
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        first = (share * steps + step) * TOGETHER
        ready = ()
        for each in tl.static_range(TOGETHER):
            block = first + each
            values = tl.load(x_at + block * 128, mask=keep[:, None], other=0.0)
            codes, scale = _quantise(values, LIMIT, NATIVE, DECODE)
            ready = ready + (codes, scale * tl.load(sb_at + block * sb_block))
        for each in tl.static_range(TOGETHER):
            weight = tl.load(w_at + (first + each) * 128)
            weight = _wide(weight) if DECODE else weight
            total = tl.fma(tl.dot(weight, ready[2 * each].T), ready[2 * each + 1][None, :], total)
    at = out + (share * m + row).to(tl.int64)[:, None] * n + col[None, :]
    tl.store(at, total.T.to(out.dtype.element_ty), mask=keep[:, None] & (col < n)[None, :])


@triton.jit
def sum_kernel(parts, out, total, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """``out [total]``: the sum of ``parts [PARTS, total]`` in float32, in their order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < total
    value = tl.load(parts + at, mask=keep)
    for part in tl.static_range(1, PARTS):
        value = value + tl.load(parts + part * total + at, mask=keep)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=keep)
