"""The CPU engine of :func:`oracle.tensorcore.predict.predict_product`: compiled, threaded, the same bits.

For every ``(i, j)`` and every group of ``group`` products, with ``E`` the exponent of a value (``emin`` for
subnormals), zeros excluded, and ``c`` the accumulator,

    m = max(max_k E(a_k) + E(b_k), E(c))
    S = trunc(c * 2^(t-m)) + sum_k trunc(a_k * b_k * 2^(t-m))        (every operation exact)
    c = S toward zero to ``to`` fraction bits, * 2^(m-t)

which is :mod:`oracle.tensorcore.fused` in floating-point lanes: a product of two FP8 significands has 8 bits, a power
of two scales it exactly, and the integers ``S < 2^(t+2) (G+1)`` fit float32 for t = 13, float64 for t <= 35.
``narrow`` runs float32 lanes with int8 exponents (where the machine and the data allow it,
:mod:`oracle.tensorcore.cpu_truncation` in its place), ``wide`` float64 lanes with int16 ones and, where scales belong
to the instruction, adds their exponents to ``m`` and multiplies the products by them, a power of two.

Rows of ``a`` are unpacked in chunks; ``b`` is unpacked inside the kernel, one K tile and ``LANES`` columns at a time,
into the first-level cache; every thread takes panels of columns and rows of a chunk. Tiles and modes:
:mod:`oracle.tensorcore.packing`. Memory beyond operands and result stays below 256 MiB for any shape.

NaN and infinities follow IEEE 754, as in the definition; every NaN that is stored is canonical.
Source: derived from :mod:`oracle.tensorcore.fused`, whose bits it gives.

Needs numba (no compiler on the user's machine). Not covered, and answered by :func:`supports`: TF32 and FP4 operands,
AMD's instructions; the plain definition computes those.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oracle.numbers.formats import CPU_BLOCK, Format, of_dtype
from oracle.tensorcore.cpu_jit import jit, piece, run_tasks, task_pieces, workers_for
from oracle.tensorcore.cpu_truncation import LANES, ZERO_EXPONENT, promote, truncating, why_not
from oracle.tensorcore.fused import float32_scale
from oracle.tensorcore.packing import (
    ADD,
    CONTINUE,
    FOLD,
    INSIDE,
    PROMOTE,
    UNROLL,
    code_table,
    codes_array,
    narrow_lanes,
    packed_rows,
    plan,
    scale_mode,
    supported,
)
from oracle.tensorcore.predict import canonical_nan, finish, rescale, store
from oracle.tensorcore.schedules import Epilogue, Promotion, Schedule
from oracle.truth.gemm import ScaledProduct

CHUNK_BYTES = 1 << 26  # of unpacked rows of a
CHUNK_RESULT = 1 << 23  # elements of one float32 chunk of the result
WIDE_ZERO_EXPONENT = -1000  # the same for 16-bit formats
HALF = -10  # fraction bits of a float16 accumulator, which rounds to nearest even

f32, f64, i8, i16, i32, i64 = np.float32, np.float64, np.int8, np.int16, np.int32, np.int64


def supports(product: ScaledProduct, schedule: Schedule) -> bool:
    """Whether this engine computes ``product`` by ``schedule``."""
    return product.a.device.type == "cpu" and supported(product, schedule)


def predict(product: ScaledProduct, schedule: Schedule, *, out_dtype: torch.dtype) -> Tensor:
    """The bits of :func:`~oracle.tensorcore.predict.predict_product`, ``[M, N]`` of ``out_dtype``."""
    n = product.N
    out = torch.empty((product.M, n), dtype=out_dtype, device="cpu")
    step = max(1, CPU_BLOCK // max(1, n))
    for start, acc in sums(product, schedule):
        for first in range(0, acc.shape[0], step):
            part = acc[first : first + step]
            rows = slice(start + first, start + first + part.shape[0])
            out[rows] = store(finish(part, product.rows(rows.start, rows.stop), schedule), out_dtype)
    return out


def blocks(product: ScaledProduct, schedule: Schedule) -> Tensor | None:
    """Float32 ``[B, M, N]``: what the kernel gives of each K block alone; None where a chain is no K block, or a factor
    is applied to the whole sum."""
    plain = product.bias is None and product.c is None and product.alpha is None and schedule.epilogue is Epilogue.NONE
    if not plain or schedule.interval != product.block or not supports(product, schedule):
        return None
    if schedule.promotion is Promotion.RESCALE:
        return None
    if int((plan(product, schedule).tiles[:, 3] & PROMOTE).count_nonzero()) != product.B:
        return None
    return torch.cat([canonical_nan(acc) for _, acc in sums(product, schedule, apart=True)], dim=1)


def sums(product: ScaledProduct, schedule: Schedule, *, apart: bool = False) -> Iterator[tuple[int, Tensor]]:
    """``(first row, float32 [rows, N])``: the promoted sums before the epilogue, in chunks of rows; ``apart``: those of
    every chain, float32 ``[chains, rows, N]``."""
    order, mode = plan(product, schedule), scale_mode(schedule)
    m, n, k = product.M, product.N, product.K
    rescales = schedule.promotion is Promotion.RESCALE  # from sums of any exponent
    half = schedule.accumulator is torch.float16
    in_float32 = narrow_lanes(schedule.instruction) and not rescales and not half
    truncates = in_float32 and why_not(schedule.instruction) is None
    kernel, absent = (narrow, ZERO_EXPONENT) if in_float32 else (wide, WIDE_ZERO_EXPONENT)
    a_values, a_exponents = _tables(of_dtype(product.a.dtype), in_float32)
    b_values, b_exponents = _tables(of_dtype(product.b.dtype), in_float32)
    b = codes_array(product.b)
    a_scale = float32_scale(product.a_scale).expand(m, -1)
    b_scale = np.ascontiguousarray(float32_scale(product.b_scale).numpy())
    source, tiles = order.source.numpy(), order.tiles.numpy()
    intervals = np.split(tiles, np.nonzero(tiles[:-1, 3] & PROMOTE)[0] + 1) if apart or rescales else [tiles]
    pieces = intervals if apart else [tiles]
    t, to = schedule.instruction.align_bits or 0, HALF if half else schedule.instruction.out_bits
    width = a_values.itemsize + a_exponents.itemsize
    step = max(1, min(CHUNK_BYTES // (width * max(1, len(source))), CHUNK_RESULT // max(1, n)))
    for start in range(0, m, step):
        stop = min(m, start + step)
        values, exponents = packed_rows(product.a[start:stop], order, a_values, a_exponents, absent)
        scale = np.ascontiguousarray(a_scale[start:stop].numpy())
        partial_sums = np.empty((len(pieces), stop - start, n), np.float32)
        finite = truncates and bool(np.isfinite(values).all())

        def task(
            row0: int,
            row1: int,
            panel0: int,
            panel1: int,
            values: NDArray[Any] = values,
            exponents: NDArray[Any] = exponents,
            scale: NDArray[np.float32] = scale,
            partial_sums: NDArray[np.float32] = partial_sums,
            finite: bool = finite,
            pieces: list[NDArray[np.int64]] = pieces,
        ) -> None:
            for some, out in zip(pieces, partial_sums, strict=True):
                packed = (
                    values,
                    exponents,
                    scale,
                    b,
                    b_values,
                    b_exponents,
                    b_scale,
                    product.b_rows,
                    source,
                    some,
                    order.group,
                    t,
                    to,
                    mode,
                    out,
                    row0,
                    row1,
                    panel0,
                    panel1,
                )
                if not (finite and truncating(*packed)):
                    kernel(*packed)

        workers = workers_for((stop - start) * n * k)
        calls = task_pieces(stop - start, n, lanes=LANES, workers=workers)
        if rescales:
            total = torch.from_numpy(partial_sums[0]).zero_()
            before = torch.ones_like(total)
            for some in intervals:
                now = _factors(product.rows(start, stop), int(some[0, 2]))
                total.mul_(rescale(now, before))
                before = now
                run_tasks(partial(task, pieces=[some]), calls, workers)
            total.mul_(before)
        else:
            run_tasks(task, calls, workers)
        yield start, torch.from_numpy(partial_sums if apart else partial_sums[0])


def continued(product: ScaledProduct, schedule: Schedule, first: Tensor) -> Tensor:
    """One chain over all products of K that goes on from ``first``, float32 ``[M, N]`` as the result; the caller sees
    to it that :func:`supports` holds and that nothing is scaled. NaN and infinities as in the definition."""
    order, m, n = plan(product, schedule), product.M, product.N
    a_values, a_exponents = _tables(of_dtype(product.a.dtype), False)
    b_values, b_exponents = _tables(of_dtype(product.b.dtype), False)
    values, exponents = packed_rows(product.a, order, a_values, a_exponents, WIDE_ZERO_EXPONENT)
    out, b, one = first.contiguous().numpy().copy(), codes_array(product.b), np.ones((m, 1), np.float32)
    t, to = schedule.instruction.align_bits or 0, schedule.instruction.out_bits
    source, tiles = order.source.numpy(), order.tiles.numpy()

    def task(*piece: int) -> None:
        own = (values, exponents, one, b, b_values, b_exponents, one[:1], n, source, tiles, order.group)
        wide(*own, t, to, CONTINUE, out, *piece)

    workers = workers_for(m * n * product.K)
    run_tasks(task, task_pieces(m, n, lanes=LANES, workers=workers), workers)
    return torch.from_numpy(out)


def _factors(product: ScaledProduct, block: int) -> Tensor:
    """The product of the scales of a K block, float32 ``[M, N]``."""
    columns = torch.arange(product.N, device="cpu") // product.b_rows
    a_scale = float32_scale(product.a_scale).expand(product.M, -1)
    return a_scale[:, block, None] * float32_scale(product.b_scale)[columns, block][None, :]


@lru_cache(maxsize=16)
def _tables(fmt: Format, in_float32: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Value and exponent of every code, in the lane types."""
    value, exponent = code_table(fmt, ZERO_EXPONENT if in_float32 else WIDE_ZERO_EXPONENT, special=True)
    if in_float32:
        return value.to(torch.float32).numpy(), exponent.to(torch.int8).numpy()
    return value.numpy(), exponent.numpy()


@jit
def narrow(
    av: NDArray[np.float32],
    ae: NDArray[np.int8],
    sa: NDArray[np.float32],
    b: NDArray[np.uint8],
    bv: NDArray[np.float32],
    be: NDArray[np.int8],
    sb: NDArray[np.float32],
    b_rows: int,
    source: NDArray[np.int64],
    tiles: NDArray[np.int64],
    group: int,
    t: int,
    to: int,
    mode: int,
    out: NDArray[np.float32],
    row0: int,
    row1: int,
    panel0: int,
    panel1: int,
) -> None:
    """``out[row0:row1, panel0*LANES : panel1*LANES]`` with float32 lanes, ``out`` ``[M, N]`` float32; ``t <= 16``.

    ``av``, ``ae`` ``[M, Kp]`` are the packed values and exponents of ``a``; ``b`` ``[N, K]`` are codes, uint8, with
    tables ``bv``, ``be`` ``[codes]``; ``sa`` ``[M, B]`` and ``sb`` ``[ceil(N / b_rows), B]`` are scales; ``source``
    ``[Kp]`` is the column of ``b`` at each packed position, or -1 for padding; ``tiles`` ``[T, 4]`` as
    :class:`oracle.tensorcore.packing.Packed` has them.
    """
    columns = b.shape[0]
    rows = row1 - row0
    longest = 0
    for tile in tiles:
        longest = max(longest, tile[1] - tile[0])
    values = np.zeros((longest, LANES), np.float32)
    exponents = np.zeros((longest, LANES), np.int8)
    chain = np.zeros((rows, LANES), np.float32)
    total = np.zeros((rows, LANES), np.float32)
    top = np.zeros(LANES, np.int8)
    shift = np.zeros(LANES, np.float32)
    scale = np.ones(LANES, np.float32)
    mask = i32(-(1 << (23 - to)))
    t_bits = i32(t << 23)
    for panel in range(panel0, panel1):
        first = panel * LANES
        width = min(LANES, columns - first)
        chain[:, :] = f32(0)
        total[:, :] = f32(0)
        for tile in tiles:
            k0, length, at, end = tile[0], tile[1] - tile[0], tile[2], tile[3]
            _unpack(b, first, width, source[k0 : k0 + length], bv, be, i8(ZERO_EXPONENT), values, exponents)
            if mode != ADD:
                for j in range(width):
                    scale[j] = sb[(first + j) // b_rows, at]
            for i in range(rows):
                a_values = av[row0 + i]
                a_exponents = ae[row0 + i]
                c = chain[i]
                for g in range(0, length, group):
                    for j in range(LANES):
                        top[j] = i8(-60)
                    for k in range(g, g + group, UNROLL):
                        _raise_top(a_exponents, k0 + k, exponents, k, top)
                    for j in range(LANES):
                        of_products = i32(i32(i32(top[j]) + i32(127)) << i32(23))
                        of_c = i32(f32(c[j]).view(np.int32) & i32(0x7F800000))
                        up = i32(i32(0x7F000000) - max(of_products, of_c) + t_bits).view(np.float32)
                        shift[j] = up
                        c[j] = np.trunc(c[j] * up)
                    for k in range(g, g + group, UNROLL):
                        _add_products(a_values, k0 + k, values, k, shift, c)
                    for j in range(LANES):
                        s = i32(f32(c[j]).view(np.int32) & mask).view(np.float32)
                        c[j] = s * i32(i32(0x7F000000) - f32(shift[j]).view(np.int32)).view(np.float32)
                if end & PROMOTE:
                    promote(c, total[i], sa[row0 + i, at], scale, mode)
        for i in range(rows):
            for j in range(width):
                out[row0 + i, first + j] = total[i, j]


@jit
def wide(
    av: NDArray[np.float64],
    ae: NDArray[np.int16],
    sa: NDArray[np.float32],
    b: NDArray[Any],
    bv: NDArray[np.float64],
    be: NDArray[np.int16],
    sb: NDArray[np.float32],
    b_rows: int,
    source: NDArray[np.int64],
    tiles: NDArray[np.int64],
    group: int,
    t: int,
    to: int,
    mode: int,
    out: NDArray[np.float32],
    row0: int,
    row1: int,
    panel0: int,
    panel1: int,
) -> None:
    """The sums of ``narrow`` with float64 lanes: ``t + 2 + log2(group + 1) <= 52``, any 8- or 16-bit operands.

    The result of a group is rounded toward zero into float32 (``to`` fraction bits) or to nearest even into float16
    (``HALF``): gradual underflow, infinity beyond its range. A tile may end in ``FOLD``: the chain is added, to
    nearest, into an accumulator of its own and starts again at 0. Arguments as of :func:`narrow`; by ``CONTINUE`` the
    chain starts at what ``out`` holds.
    """
    columns = b.shape[0]
    rows = row1 - row0
    longest = 0
    for tile in tiles:
        longest = max(longest, tile[1] - tile[0])
    values = np.zeros((longest, LANES), np.float64)
    exponents = np.zeros((longest, LANES), np.int16)
    chain = np.zeros((rows, LANES), np.float64)
    folded = np.zeros((rows, LANES), np.float32)
    total = np.zeros((rows, LANES), np.float32)
    top = np.zeros(LANES, np.int16)
    shift = np.zeros(LANES, np.float64)
    back = np.zeros(LANES, np.float64)
    sigma = np.ones(LANES, np.float64)
    scale = np.ones(LANES, np.float32)
    for panel in range(panel0, panel1):
        first = panel * LANES
        width = min(LANES, columns - first)
        chain[:, :] = f64(0)
        folded[:, :] = f32(0)
        total[:, :] = f32(0)
        if mode == CONTINUE:
            for i in range(rows):
                for j in range(width):
                    folded[i, j] = out[row0 + i, first + j]
                    chain[i, j] = 0.0 if tiles[0, 3] & FOLD else f64(folded[i, j]) + 0.0
        for tile in tiles:
            k0, length, at, end = tile[0], tile[1] - tile[0], tile[2], tile[3]
            _unpack(b, first, width, source[k0 : k0 + length], bv, be, i16(WIDE_ZERO_EXPONENT), values, exponents)
            if mode != ADD and mode != CONTINUE:
                for j in range(width):
                    scale[j] = sb[(first + j) // b_rows, at]
            for i in range(rows):
                a_values = av[row0 + i]
                a_exponents = ae[row0 + i]
                c = chain[i]
                if mode == INSIDE:
                    for j in range(LANES):
                        sigma[j] = f64(sa[row0 + i, at]) * f64(scale[j])
                for g in range(0, length, group):
                    for j in range(LANES):
                        top[j] = i16(2 * WIDE_ZERO_EXPONENT)
                    for k in range(g, g + group, UNROLL):
                        _raise_top(a_exponents, k0 + k, exponents, k, top)
                    shift_wide(c, top, sigma, t, to, shift, back)
                    for k in range(g, g + group, UNROLL):
                        _add_products(a_values, k0 + k, values, k, shift, c)
                    round_wide(c, back, to)
                if end & FOLD:
                    fold_wide(folded[i], c, back, to)
                    if end & PROMOTE:
                        promote(folded[i], total[i], sa[row0 + i, at], scale, mode)
                elif end & PROMOTE:
                    promote(c, total[i], sa[row0 + i, at], scale, mode)
        for i in range(rows):
            for j in range(width):
                out[row0 + i, first + j] = total[i, j]


@piece
def shift_wide(
    c: NDArray[np.float64],
    top: NDArray[np.int16],
    sigma: NDArray[np.float64],
    t: int,
    to: int,
    shift: NDArray[np.float64],
    back: NDArray[np.float64],
) -> None:
    """``c = trunc(c * 2^(t-m))``, ``shift = sigma * 2^(t-m)``, ``back = 2^(m-t)``; float32 exponents end at -126, those
    of a float16 ``c`` at -14.

    ``c`` ``[LANES]``, ``sigma`` ``[LANES]``, ``shift`` ``[LANES]`` and ``back`` ``[LANES]`` are float64, ``top``
    ``[LANES]`` int16."""
    least = i64(-14 if to == HALF else -1023)
    for j in range(LANES):
        of_sigma = ((f64(sigma[j]).view(np.int64) >> i64(52)) & i64(0x7FF)) - i64(1023)
        of_c = ((f64(c[j]).view(np.int64) >> i64(52)) & i64(0x7FF)) - i64(1023)
        of_c = max(of_c, least) if c[j] != 0 else of_c
        m = max(max(i64(top[j]) + of_sigma, of_c), i64(-126))
        up = i64((i64(1023 + t) - m) << i64(52)).view(np.float64)
        back[j] = i64((i64(1023 - t) + m) << i64(52)).view(np.float64)
        shift[j] = up * sigma[j]
        c[j] = np.trunc(c[j] * up) + 0.0


@piece
def fold_wide(folded: NDArray[np.float32], c: NDArray[np.float64], back: NDArray[np.float64], to: int) -> None:
    """``folded + c`` to nearest into the accumulator's format; ``c`` becomes 0.

    ``folded`` ``[LANES]`` is float32, ``c`` ``[LANES]`` and ``back`` ``[LANES]`` float64; infinities stay."""
    if to == HALF:
        for j in range(LANES):
            c[j] = f64(folded[j]) if np.isinf(folded[j]) else c[j] + f64(folded[j])  # an overflow stays
            back[j] = 1.0
        round_wide(c, back, to)
        for j in range(LANES):
            folded[j] = f32(0)
    for j in range(LANES):
        folded[j] += f32(c[j])
        c[j] = 0.0


@piece
def round_wide(c: NDArray[np.float64], back: NDArray[np.float64], to: int) -> None:
    """``c * back`` toward zero to a float32 of ``to`` fraction bits, infinity from ``2^128`` on; by ``HALF`` to nearest
    even to a float16, infinity from ``2^16`` on. ``c`` ``[LANES]`` and ``back`` ``[LANES]`` are float64."""
    if to == HALF:
        for j in range(LANES):
            s = c[j] * back[j]
            e = max(((f64(s).view(np.int64) >> i64(52)) & i64(0x7FF)) - i64(1023), i64(-14))
            up = i64((i64(1033) - e) << i64(52)).view(np.float64)
            down = i64((i64(1013) + e) << i64(52)).view(np.float64)
            r = np.rint(s * up) * down
            c[j] = r if np.abs(r) < 2.0**16 else s * np.inf
        return
    for j in range(LANES):
        s = c[j] * back[j]
        e = max(((f64(s).view(np.int64) >> i64(52)) & i64(0x7FF)) - i64(1023), i64(-126))
        up = i64((i64(1023 + to) - e) << i64(52)).view(np.float64)
        down = i64((i64(1023 - to) + e) << i64(52)).view(np.float64)
        r = np.trunc(s * up) * down
        c[j] = r if np.abs(r) < 2.0**128 else s * np.inf


@piece
def _unpack(
    b: NDArray[Any],
    first: int,
    width: int,
    source: NDArray[np.int64],
    bv: NDArray[Any],
    be: NDArray[Any],
    zero_exponent: Any,
    values: NDArray[Any],
    exponents: NDArray[Any],
) -> None:
    """One tile of ``b``, transposed; whole cache lines are written at a time."""
    for j0 in range(0, width, 16):
        j1 = min(j0 + 16, width)
        for k in range(len(source)):
            origin = source[k]
            for j in range(j0, j1):
                code = b[first + j, max(origin, 0)]
                values[k, j] = bv[code] if origin >= 0 else 0.0
                exponents[k, j] = be[code] if origin >= 0 else zero_exponent


@piece
def _raise_top(a: NDArray[Any], ka: int, b: NDArray[Any], kb: int, top: NDArray[Any]) -> None:
    """``top[j] = max(top[j], a[k] + b[k, j])`` over ``UNROLL`` products."""
    a0, a1, a2, a3 = a[ka], a[ka + 1], a[ka + 2], a[ka + 3]
    a4, a5, a6, a7 = a[ka + 4], a[ka + 5], a[ka + 6], a[ka + 7]
    b0, b1, b2, b3 = b[kb], b[kb + 1], b[kb + 2], b[kb + 3]
    b4, b5, b6, b7 = b[kb + 4], b[kb + 5], b[kb + 6], b[kb + 7]
    for j in range(LANES):
        e = max(max(top[j], top.dtype.type(a0 + b0[j])), top.dtype.type(a1 + b1[j]))
        e = max(max(e, top.dtype.type(a2 + b2[j])), top.dtype.type(a3 + b3[j]))
        e = max(max(e, top.dtype.type(a4 + b4[j])), top.dtype.type(a5 + b5[j]))
        top[j] = max(max(e, top.dtype.type(a6 + b6[j])), top.dtype.type(a7 + b7[j]))


@piece
def _add_products(a: NDArray[Any], ka: int, b: NDArray[Any], kb: int, shift: NDArray[Any], total: NDArray[Any]) -> None:
    """``total[j] += trunc(a[k] * b[k, j] * shift[j])`` over ``UNROLL`` products; exact in either lane type."""
    a0, a1, a2, a3 = a[ka], a[ka + 1], a[ka + 2], a[ka + 3]
    a4, a5, a6, a7 = a[ka + 4], a[ka + 5], a[ka + 6], a[ka + 7]
    b0, b1, b2, b3 = b[kb], b[kb + 1], b[kb + 2], b[kb + 3]
    b4, b5, b6, b7 = b[kb + 4], b[kb + 5], b[kb + 6], b[kb + 7]
    for j in range(LANES):
        up, s = shift[j], total[j]
        s += np.trunc((a0 * b0[j]) * up)
        s += np.trunc((a1 * b1[j]) * up)
        s += np.trunc((a2 * b2[j]) * up)
        s += np.trunc((a3 * b3[j]) * up)
        s += np.trunc((a4 * b4[j]) * up)
        s += np.trunc((a5 * b5[j]) * up)
        s += np.trunc((a6 * b6[j]) * up)
        s += np.trunc((a7 * b7[j]) * up)
        total[j] = s
