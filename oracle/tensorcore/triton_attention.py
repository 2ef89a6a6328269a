"""Attention of a device as Triton kernels: the softmax of rows, and both products of problems with few rows. They
import triton, so import them lazily.

``softmax`` walks over the tiles of a row with four lanes, each of which has two of every eight keys; an exponential is
the integer arithmetic of :mod:`oracle.numbers.mufu` on its tables. ``chains`` gives dot products of codes, ``weighted``
the sums of P V of all tiles, both by the fused sum of :mod:`oracle.tensorcore.triton_fused` on the codes themselves.
Every float32 operation that the pipeline names rounds once; the sources run in Triton's interpreter too. Launch with
``enable_fp_fusion=False``.

NaN codes make their row or column NaN. Source: derived from :mod:`oracle.tensorcore.attention`, whose bits they give.
Not covered: formats other than E4M3, pipelines that are faults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from oracle.tensorcore.triton_fused import _fma

jit: Callable[..., Any] = triton.jit  # typed by hand

NOTHING = tl.constexpr(-300)
"""Exponent of a zero: a product with it has one below that of every accumulator."""


@jit
def softmax(  # type: ignore[no-untyped-def]  # triton reads annotations: only constexpr may stand there
    scores,
    start,
    stop,
    c,
    spans,
    table,
    squares,
    x,
    codes,
    factors,
    lanes,
    top,
    rows,
    keys,
    n_tiles,
    LIFT: tl.constexpr,
    GAIN: tl.constexpr,
    BIAS: tl.constexpr,
    BR: tl.constexpr,
):
    """Writes ``x`` float32 and ``codes`` uint8 ``[rows, keys]``, ``factors`` ``[n_tiles, rows]``, ``lanes`` ``[rows,
    4]`` and ``top`` ``[rows]``, float32, of ``scores`` ``[rows, keys]``, float32; ``spans`` int64 ``[n_tiles, 2]``."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    own = row < rows
    pair = 2 * tl.arange(0, 4)
    of_c = tl.load(c + row, mask=own, other=0.0)
    first = tl.load(start + row, mask=own, other=0)
    last = tl.load(stop + row, mask=own, other=0)
    most = tl.full([BR], float("-inf"), tl.float32)
    sums = tl.zeros([BR, 4], tl.float32)
    t = 0
    while t < n_tiles:
        begin = tl.load(spans + 2 * t)
        end = tl.load(spans + 2 * t + 1)
        low = tl.maximum(first, begin)[:, None]
        high = tl.minimum(last, end)[:, None]
        largest = tl.full([BR, 4], float("-inf"), tl.float32)
        j = begin
        while j < end:
            for p in tl.static_range(2):
                at = (j + pair + p)[None, :]
                s = tl.load(scores + row[:, None] * keys + at, mask=(at >= low) & (at < high), other=float("-inf"))
                largest = tl.where(s > largest, s, largest)
            j += 8
        grown = tl.maximum(most, tl.max(largest, axis=1))
        none = grown == float("-inf")
        level = tl.where(none, 0.0, grown)
        offset = _fma(level, of_c, tl.full([BR], -LIFT, tl.float32))  # without a lift of one rounding as well
        a = _exp2((most - level) * of_c, table, squares, BIAS)
        a = tl.where(most == float("-inf"), 0.0, a)
        if t == 0:
            a = tl.full([BR], 1.0, tl.float32)
        tl.store(factors + t * rows + row, a, mask=own)
        j = begin
        while j < end:
            once = tl.where(j == begin, a, 1.0)[:, None]
            for p in tl.static_range(2):
                at = (j + pair + p)[None, :]
                s = tl.load(scores + row[:, None] * keys + at, mask=(at >= low) & (at < high), other=float("-inf"))
                value = _exp2(_fma(s, of_c[:, None], -offset[:, None]), table, squares, BIAS)
                value = tl.where(s == float("-inf"), 0.0, value)
                inside = own[:, None] & (at < end)
                tl.store(x + row[:, None] * keys + at, value, mask=inside)
                tl.store(codes + row[:, None] * keys + at, _code(value * GAIN), mask=inside)
                sums = _fma(once, sums, value) if p == 0 else sums + value
            j += 8
        most = grown
        t += 1
    lane = tl.arange(0, 4)[None, :]
    tl.store(lanes + row[:, None] * 4 + lane, sums, mask=own[:, None] & (lane < 4))
    tl.store(top + row, most, mask=own)


@jit
def _exp2(x, table, squares, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """``ex2.approx.ftz`` of float32: :func:`oracle.numbers.mufu.exp2`."""
    bounded = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -1024.0), 1024.0)
    cut = (tl.abs(bounded) * 8388608.0).to(tl.int64)
    inverted = tl.where((cut & 0x7FFFFF) == 0, -cut, ~cut)  # 0, or an integer: from 1 on float32 has no further bits
    whole = tl.where(bounded < 0, inverted, cut)
    power = (whole >> 23).to(tl.int32)
    fraction = (whole & 0x7FFFFF).to(tl.int32)
    row = fraction >> 17
    rest = fraction & 0x1FFFF
    c0 = tl.load(table + row)
    c1 = tl.load(table + 64 + row)
    c2 = tl.load(table + 128 + row)
    square = tl.load(squares + rest).to(tl.int64) << 19
    total = (c0 << 32) + ((c1 * rest.to(tl.int64)) << 17) + c2 * square + BIAS
    one = (total >> 34).to(tl.float32) * 1.1920928955078125e-07
    within = tl.minimum(tl.maximum(power, -126), 127)
    value = one * ((within + 127) << 23).to(tl.float32, bitcast=True)
    value = tl.where(power < -126, 0.0, tl.where(power > 127, float("inf"), value))
    return tl.where(x == x, value, x)


@jit
def _code(x):  # type: ignore[no-untyped-def]
    """The E4M3 code, uint8, of a float32 that is not negative, to nearest even, saturated; NaN gives 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = tl.where(x < 0.015625, x, 0.0) * 512.0
    subnormal = ((small + 8388608.0) - 8388608.0).to(tl.int32)
    code = tl.where(x >= 448.0, 0x7E, tl.where(x < 0.015625, subnormal, normal))
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


@jit
def chains(  # type: ignore[no-untyped-def]
    a, b, out, rows, columns, depth, GROUP: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """``out`` float32 ``[Z, rows, columns]``: one chain over the products of codes ``a`` ``[Z, rows, depth]`` and ``b``
    ``[Z, columns, depth]``, uint8, in fused sums of GROUP products with ALIGN fraction bits."""
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    j = tl.program_id(2) * BN + tl.arange(0, BN)
    z = tl.program_id(0).to(tl.int64)
    a += z * rows * depth
    b += z * columns * depth
    chain = tl.zeros([BM, BN], tl.float32)
    bad_a = tl.zeros([BM], tl.int32)
    bad_b = tl.zeros([BN], tl.int32)
    k = 0
    while k < depth:
        chain, bad_a, bad_b = _step(
            chain,
            bad_a,
            bad_b,
            a + i * depth,
            1,
            b + j * depth,
            1,
            i < rows,
            j < columns,
            k,
            depth,
            GROUP,
            ALIGN,
            BM,
            BN,
        )
        k += GROUP
    bad = (bad_a[:, None] > 0) | (bad_b[None, :] > 0)
    chain = tl.where(bad, float("nan"), chain)
    at = z * rows * columns + i[:, None].to(tl.int64) * columns + j[None, :]
    tl.store(out + at, chain, mask=(i < rows)[:, None] & (j < columns)[None, :])


@jit
def weighted(  # type: ignore[no-untyped-def]
    codes,
    v,
    factors,
    spans,
    out,
    rows,
    keys,
    columns,
    n_tiles,
    PROMOTED: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """``out`` float32 ``[Z, rows, columns]``: the sums over all tiles of P, ``codes`` ``[Z, rows, keys]``, and ``v``
    ``[Z, keys, columns]``, uint8, rescaled by ``factors`` ``[n_tiles, Z rows]``; ``spans`` int64 ``[n_tiles, 2]``."""
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    j = tl.program_id(2) * BN + tl.arange(0, BN)
    z = tl.program_id(0).to(tl.int64)
    every = tl.num_programs(0) * rows
    codes += z * rows * keys
    v += z * keys * columns
    sums = tl.zeros([BM, BN], tl.float32)
    bad_p = tl.zeros([BM], tl.int32)
    bad_v = tl.zeros([BN], tl.int32)
    t = 0
    while t < n_tiles:
        k = tl.load(spans + 2 * t)
        end = tl.load(spans + 2 * t + 1)
        a = tl.load(factors + t * every + z * rows + i, mask=i < rows, other=1.0)
        bad_p = bad_p | (a != a).to(tl.int32)
        kept = sums * tl.where(a == a, a, 1.0)[:, None]
        chain = tl.zeros([BM, BN], tl.float32) if PROMOTED else kept
        while k < end:
            chain, bad_p, bad_v = _step(
                chain,
                bad_p,
                bad_v,
                codes + i * keys,
                1,
                v + j,
                columns,
                i < rows,
                j < columns,
                k,
                end,
                GROUP,
                ALIGN,
                BM,
                BN,
            )
            k += GROUP
        sums = kept + chain if PROMOTED else chain
        t += 1
    bad = (bad_p[:, None] > 0) | (bad_v[None, :] > 0)
    sums = tl.where(bad, float("nan"), sums)
    at = z * rows * columns + i[:, None] * columns + j[None, :]
    tl.store(out + at, sums, mask=(i < rows)[:, None] & (j < columns)[None, :])


@jit
def _step(  # type: ignore[no-untyped-def]
    chain,
    bad_a,
    bad_b,
    a,
    a_step,
    b,
    b_step,
    has_a,
    has_b,
    k,
    end,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One fused sum over ``k`` to ``k + GROUP``, of which what lies from ``end`` on is 0; a NaN code counts as 0 and
    marks its row or column."""
    m = tl.full([BM, BN], -126, tl.int32)
    for g in range(0, GROUP, 8):
        for u in tl.static_range(8):
            at = k + g + u
            ca = tl.load(a + at * a_step, mask=has_a & (at < end), other=0).to(tl.int32)
            cb = tl.load(b + at * b_step, mask=has_b & (at < end), other=0).to(tl.int32)
            bad_a = bad_a | ((ca & 0x7F) == 0x7F).to(tl.int32)
            bad_b = bad_b | ((cb & 0x7F) == 0x7F).to(tl.int32)
            m = tl.maximum(m, _exponent(ca)[:, None] + _exponent(cb)[None, :])
    m = tl.maximum(m, ((chain.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127)
    half = (ALIGN - m) >> 1
    up = ((127 + half) << 23).to(tl.float32, bitcast=True)
    further = ((127 + ALIGN - m - half) << 23).to(tl.float32, bitcast=True)
    whole = (chain * up * further).to(tl.int32)
    for g in range(0, GROUP, 8):
        for u in tl.static_range(8):
            at = k + g + u
            va = _value(tl.load(a + at * a_step, mask=has_a & (at < end), other=0).to(tl.int32))
            vb = _value(tl.load(b + at * b_step, mask=has_b & (at < end), other=0).to(tl.int32))
            whole += ((va[:, None] * vb[None, :]) * up * further).to(tl.int32)
    bits = whole.to(tl.float32).to(tl.int32, bitcast=True)
    cut = ((bits >> (23 - ALIGN)) << (23 - ALIGN)).to(tl.float32, bitcast=True)
    down = ((127 - half) << 23).to(tl.float32, bitcast=True)
    return cut * down * ((127 - ALIGN + m + half) << 23).to(tl.float32, bitcast=True), bad_a, bad_b


@jit
def _value(code):  # type: ignore[no-untyped-def]
    """The float32 of an E4M3 code; of NaN 0."""
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, 0.0, value)
    return tl.where(code > 0x7F, -value, value)


@jit
def _exponent(code):  # type: ignore[no-untyped-def]
    """The exponent of an E4M3 code in an alignment; of 0 and NaN :data:`NOTHING`."""
    size = code & 0x7F
    return tl.where((size == 0) | (size == 0x7F), NOTHING, tl.maximum(size >> 3, 1) - 7)
