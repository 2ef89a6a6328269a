"""An FP8 GEMM in Triton with blockwise promotion, and three copies of it that are broken in one place each.

    out[i, j] = sum over K blocks of (sum over k of a[i, k] b[j, k]) * a_scale[i, block] * b_scale[j // 128, block]

One program takes a tile of rows and columns; products and their sum over a block are float32 (no ``tl.dot``), the sum
over the blocks is scaled block by block. Runs on the CPU under ``TRITON_INTERPRET=1``, which must stand in the
environment before Triton is imported. Codes are decoded and results rounded on their integer bits: the interpreter's
own conversions take the NaN codes of E4M3 for 480 and lose the carry when they round. Not covered: float16 outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support.interpreter import repair

repair()
ROWS, COLUMNS = 32, 32


@triton.jit
def _decode(code):
    """E4M3 codes (uint8) to float32."""
    bits = code.to(tl.int32)
    exponent = (bits >> 3) & 15
    fraction = bits & 7
    normal = (((exponent + 120) << 23) | (fraction << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, fraction.to(tl.float32) * 0.001953125, normal)  # 2^-9
    size = tl.where((bits & 127) == 127, float("nan"), size)
    return tl.where(bits > 127, -size, size)


@triton.jit
def _bfloat16(x):
    """float32 to the bits of bfloat16 (int16), nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(nan, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def _kernel(
    a,
    a_scale,
    b,
    b_scale,
    out,
    m,
    n,
    k,
    blocks,
    a_stride,
    as_row,
    as_block,
    b_stride,
    bs_row,
    bs_block,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ODD_TILE: tl.constexpr,
    ROWS_BEHIND: tl.constexpr,
    BLOCKS_AHEAD: tl.constexpr,
    BFLOAT16: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, 128)
    scale_row = (row + m - ROWS_BEHIND) % m
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    last = blocks
    if not ODD_TILE:
        last = tl.maximum(1, blocks // 2 * 2)
    block = 0
    while block < last:  # the interpreter takes no range() up to a runtime value
        at = block * 128 + lane
        inside = (at < k)[None, :]
        x = tl.load(a + row[:, None] * a_stride + at[None, :], mask=(row < m)[:, None] & inside, other=0)
        y = tl.load(b + column[:, None] * b_stride + at[None, :], mask=(column < n)[:, None] & inside, other=0)
        part = tl.sum(_decode(x)[:, None, :] * _decode(y)[None, :, :], axis=2)
        of = tl.minimum(block + BLOCKS_AHEAD, blocks - 1)
        left = tl.load(a_scale + scale_row * as_row + of * as_block, mask=row < m, other=0.0)
        right = tl.load(b_scale + column // 128 * bs_row + block * bs_block, mask=column < n, other=0.0)
        total += part * left[:, None] * right[None, :]
        block += 1
    stored = total
    if BFLOAT16:
        stored = _bfloat16(total)
    tl.store(out + row[:, None] * n + column[None, :], stored, mask=(row < m)[:, None] & (column < n)[None, :])


def _run(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    *,
    odd_tile: bool = True,
    rows_behind: int = 0,
    blocks_ahead: int = 0,
) -> None:
    m, n = out.shape
    half = out.dtype == torch.bfloat16
    a, b = a.contiguous(), b.contiguous()  # the kernel has no stride of K
    _kernel[(triton.cdiv(m, ROWS), triton.cdiv(n, COLUMNS))](
        a.view(torch.uint8),
        a_scale,
        b.view(torch.uint8),
        b_scale,
        out.view(torch.int16) if half else out,
        m,
        n,
        a.shape[1],
        a_scale.shape[1],
        a.stride(0),
        *a_scale.stride(),
        b.stride(0),
        *b_scale.stride(),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        ODD_TILE=odd_tile,
        ROWS_BEHIND=rows_behind,
        BLOCKS_AHEAD=blocks_ahead,
        BFLOAT16=half,
    )


def gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """The right one."""
    _run(a, a_scale, b, b_scale, out)


def drops_odd_tile(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Unrolled by two without a tail: the last K tile of an odd number of them is not multiplied."""
    _run(a, a_scale, b, b_scale, out, odd_tile=False)


def scale_of_previous_row(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """The row of the scale lags one behind, modulo M."""
    _run(a, a_scale, b, b_scale, out, rows_behind=1)


def scale_of_next_block(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """The scale is that of the block being prefetched."""
    _run(a, a_scale, b, b_scale, out, blocks_ahead=1)
