"""The fused sums of :mod:`oracle.tensorcore.engine_cpu` as one Triton kernel; imports triton, so import it lazily.

A program computes a ``[BM, BN]`` tile of promoted sums. For every group: ``m`` from int exponents, then

    S = trunc(c * 2^(t-m)) + sum_k trunc((a_k * b_k) * 2^(t-m))

with products and power-of-two scalings exact in float32, truncation by the conversion to int32 (toward zero), sums in
int32 or int64. The promotion's single rounding is float64 with round-to-odd, so the same source runs in Triton's
interpreter on the CPU. Launch with ``enable_fp_fusion=False``: promotions that round twice must not be contracted.

Not covered: NaN and infinite operands (the caller replaces those rows and columns), scales inside the instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

jit: Callable[..., Any] = triton.jit  # typed by hand

PROMOTE = tl.constexpr(2)
FMA = tl.constexpr(1)
MULTIPLY_ADD = tl.constexpr(2)
A_THEN_B = tl.constexpr(3)
A_THEN_FMA = tl.constexpr(4)
B_THEN_FMA = tl.constexpr(5)


@jit
def fused(  # type: ignore[no-untyped-def]  # triton reads annotations: only constexpr may stand there
    a,
    a_exponent,
    a_scale,
    b,
    b_exponent,
    b_scale,
    tiles,
    out,
    rows,
    columns,
    n_tiles,
    LENGTH: tl.constexpr,
    GROUP: tl.constexpr,
    T: tl.constexpr,
    TO: tl.constexpr,
    MODE: tl.constexpr,
    FOLDS: tl.constexpr,
    WIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """``out[rows, columns]`` float32; ``a [Kp, rows]``, ``b [Kp, columns]`` packed k-major, padded to the tile.

    Scales ``[B, rows]`` and ``[B, columns]``; tile ``i`` covers ``LENGTH`` packed positions from ``i * LENGTH``, and
    ``tiles[i] = (scale block, FOLD | PROMOTE)``, int32.
    """
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    chain = tl.zeros([BM, BN], tl.float32)
    folded = tl.zeros([BM, BN], tl.float32)
    total = tl.zeros([BM, BN], tl.float32)
    tile = 0
    while tile < n_tiles:  # the interpreter takes no range() up to a runtime value
        block = tl.load(tiles + tile * 2)
        flags = tl.load(tiles + tile * 2 + 1)
        for g in range(0, LENGTH, GROUP):
            top = tl.full([BM, BN], -60, tl.int32)
            for k in range(g, g + GROUP, UNROLL):
                for u in tl.static_range(UNROLL):
                    at = tile * LENGTH + k + u
                    ea = tl.load(a_exponent + at * rows + i).to(tl.int32)
                    eb = tl.load(b_exponent + at * columns + j).to(tl.int32)
                    top = tl.maximum(top, ea[:, None] + eb[None, :])
            of_chain = ((chain.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
            m = tl.maximum(top, of_chain)
            up = ((127 + T - m) << 23).to(tl.float32, bitcast=True)
            down = ((127 - T + m) << 23).to(tl.float32, bitcast=True)
            whole = (chain * up).to(tl.int32)
            if WIDE:
                whole = whole.to(tl.int64)
            for k in range(g, g + GROUP, UNROLL):
                for u in tl.static_range(UNROLL):
                    at = tile * LENGTH + k + u
                    va = tl.load(a + at * rows + i)
                    vb = tl.load(b + at * columns + j)
                    whole += ((va[:, None] * vb[None, :]) * up).to(tl.int32)
            if WIDE:
                bits = whole.to(tl.float64).to(tl.int64, bitcast=True)
                truncated = ((bits >> (52 - TO)) << (52 - TO)).to(tl.float64, bitcast=True).to(tl.float32)
            else:
                bits = whole.to(tl.float32).to(tl.int32, bitcast=True)
                truncated = ((bits >> (23 - TO)) << (23 - TO)).to(tl.float32, bitcast=True)
            chain = truncated * down
        if FOLDS:
            folded = folded + chain
            chain = tl.zeros([BM, BN], tl.float32)
        if flags & PROMOTE:
            part = folded if FOLDS else chain
            sa = tl.load(a_scale + block * rows + i)[:, None]
            sb = tl.load(b_scale + block * columns + j)[None, :]
            if MODE == FMA:
                total = _fma(sa * sb, part, total)
            elif MODE == MULTIPLY_ADD:
                total = total + (sa * sb) * part
            elif MODE == A_THEN_B:
                total = total + (part * sa) * sb
            elif MODE == A_THEN_FMA:
                total = _fma(part * sa, sb, total)
            elif MODE == B_THEN_FMA:
                total = _fma(part * sb, sa, total)
            else:
                total = total + part
            chain = tl.zeros([BM, BN], tl.float32)
            folded = tl.zeros([BM, BN], tl.float32)
        tile += 1
    tl.store(out + i[:, None] * columns + j[None, :], total)


@jit
def _fma(x, y, z):  # type: ignore[no-untyped-def]
    """``fl32(x * y + z)`` with one rounding: an exact product, TwoSum, round to odd, then to float32."""
    p = x.to(tl.float64) * y.to(tl.float64)
    c = z.to(tl.float64)
    high = p + c
    v = high - p
    low = (p - (high - v)) + (c - v)
    bits = high.to(tl.int64, bitcast=True)
    toward = tl.where((low > 0) == (high > 0), 1, -1)
    fix = (low != 0) & ((bits & 1) == 0) & (tl.abs(high) < float("inf"))
    return tl.where(fix, bits + toward, bits).to(tl.float64, bitcast=True).to(tl.float32)
