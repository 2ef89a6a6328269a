"""The Triton kernels of :mod:`oracle.bounds.screen`: operands, an output and some sums in one pass each.

What they compute is what the definitions there compute in float64, element by element; a sum is added in another order,
which its bound admits. Codes are read as bytes or as pairs of bytes and looked up in tables of values. With
``TRITON_INTERPRET=1`` in the environment they run on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

jit: Callable[..., Any] = triton.jit  # typed by hand


@jit
def scaled(codes, values, scales, out, pitch, columns, blocks, block, rows_of_scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``out [R, columns]``: of each code its value times the scale of its block; ``scales [., blocks]``, of which one
    row serves ``rows_of_scale`` rows."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(values + tl.load(codes + row * pitch + column, mask=inside, other=0).to(tl.int32))
    scale = tl.load(scales + (row // rows_of_scale) * blocks + column // block, mask=inside, other=0.0)
    tl.store(out + row * columns + column, x * scale, mask=inside)


@jit
def beyond(codes, values, halves, value, least, left, counts, worst, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of one row of 16-bit ``codes``: ``left`` says where ``|out - value| - half <= least`` does not hold, ``counts``
    how often, ``worst`` has the column of the largest quotient of the two among these."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    top = tl.full([BLOCK], -1.0, tl.float64)
    at = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < columns:  # the interpreter takes no range() up to a runtime value
        column = start + lane
        inside = column < columns
        place = row * columns + column
        code = tl.load(codes + place, mask=inside, other=0).to(tl.int32) & 0xFFFF
        right = tl.load(value + place, mask=inside, other=0.0)
        excess = tl.abs(tl.load(values + code) - right) - tl.load(halves + code)
        bound = tl.load(least + place, mask=inside, other=0.0)
        open_ = inside & ((excess <= bound) == 0)  # NaN too
        tl.store(left + place, open_.to(tl.int8), mask=inside)
        total += open_.to(tl.int32)
        quotient = excess / bound
        quotient = tl.where(quotient == quotient, quotient, float("inf"))
        better = open_ & (quotient > top)
        top = tl.where(better, quotient, top)
        at = tl.where(better, column, at)
        start += BLOCK
    tl.store(counts + row, tl.sum(total, 0))
    first = tl.argmax(top, 0)
    tl.store(worst + row, tl.sum(tl.where(lane == first, at, 0), 0).to(tl.int64))


@jit
def sizes(  # type: ignore[no-untyped-def]
    a, b, a_values, b_values, a_scales, b_scales, rows, columns, out,
    a_pitch, b_pitch, k, blocks, block, rows_of_a, rows_of_b, BLOCK: tl.constexpr,
):  # fmt: skip  # operands before extents
    """``sum_k |a sa| |b sb|`` of one pair of a row of ``a`` and a row of ``b``."""
    pair = tl.program_id(0)
    m, n = tl.load(rows + pair), tl.load(columns + pair)
    total = tl.zeros([BLOCK], tl.float64)
    start = 0
    while start < k:
        column = start + tl.arange(0, BLOCK)
        inside = column < k
        x = tl.load(a_values + tl.load(a + m * a_pitch + column, mask=inside, other=0).to(tl.int32))
        y = tl.load(b_values + tl.load(b + n * b_pitch + column, mask=inside, other=0).to(tl.int32))
        sa = tl.load(a_scales + (m // rows_of_a) * blocks + column // block, mask=inside, other=0.0)
        sb = tl.load(b_scales + (n // rows_of_b) * blocks + column // block, mask=inside, other=0.0)
        total += tl.abs((x * sa) * (y * sb))
        start += BLOCK
    tl.store(out + pair, tl.sum(total, 0))
