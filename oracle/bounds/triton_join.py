"""The Triton kernel of :mod:`oracle.bounds.triton_sums`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

jit: Callable[..., Any] = triton.jit  # typed by hand

LITTLE = tl.constexpr(2.0**-50)
HALF = tl.constexpr(-(1 << 27))  # keeps 26 bits of a float64


@jit
def _two_sum(a, b):  # type: ignore[no-untyped-def]  # Triton reads annotations: only constexpr may stand there
    """Knuth's error-free sum, as :func:`oracle.numbers.rounding.two_sum`."""
    s = a + b
    v = s - a
    return s, (a - (s - v)) + (b - v)


@jit
def _two_prod_error(a, b, p):  # type: ignore[no-untyped-def]
    """``a b - p`` exactly, for ``p = fl(a b)`` and an ``a`` of at most 48 bits: Dekker's, halves cut from the bits.

    Without a fused multiply-add, which Triton's interpreter rounds twice.
    """
    ah = (a.to(tl.int64, bitcast=True) & HALF).to(tl.float64, bitcast=True)
    bh = (b.to(tl.int64, bitcast=True) & HALF).to(tl.float64, bitcast=True)
    al, bl = a - ah, b - bh
    return ((ah * bh - p) + ah * bl + al * bh) + al * bl


@jit
def join(  # type: ignore[no-untyped-def]
    sums,
    a_scale,
    b_scale,
    hi,
    lo,
    slack,
    rows,
    columns,
    blocks,
    first,
    count,
    b_rows,
    BLOCK: tl.constexpr,
):
    """Add ``sigma x`` of ``count`` blocks, from ``first`` on, to the pairs of one row and ``BLOCK`` columns.

    ``sums [count, rows, columns]``, ``a_scale [rows, blocks]``, ``b_scale [., blocks]``, all float64.
    """
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = row * columns + column
    h = tl.load(hi + at, mask=inside, other=0.0)
    w = tl.load(lo + at, mask=inside, other=0.0)
    s = tl.load(slack + at, mask=inside, other=0.0)
    area = (row * 0 + rows) * columns  # int64, as row is
    i = 0
    while i < count:  # the interpreter takes no range() up to a runtime value
        x = tl.load(sums + i * area + at, mask=inside, other=0.0)
        sa = tl.load(a_scale + row * blocks + first + i)
        sigma = sa * tl.load(b_scale + (column // b_rows) * blocks + first + i, mask=inside, other=0.0)
        p = sigma * x
        e = _two_prod_error(sigma, x, p)
        h, rest = _two_sum(h, p)
        t, e1 = _two_sum(rest, e)
        w, e2 = _two_sum(w, t)
        missed = tl.abs(e1) + tl.abs(e2)
        i += 1
        s = s + (missed + missed * LITTLE)  # a product with 1 + 2^-50, which is no float32, rounded once as it is
    tl.store(hi + at, h, mask=inside)
    tl.store(lo + at, w, mask=inside)
    tl.store(slack + at, s, mask=inside)
