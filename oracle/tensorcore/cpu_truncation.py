"""Fused sums of FP8 products on a CPU that rounds toward zero itself: two additions a product, and nothing else.

A fused sum drops what of every product lies below ``u = 2^(m - t)``, ``m`` the largest exponent of the step and of the
accumulator ``c``, and adds the rest exactly (:mod:`oracle.tensorcore.engine_cpu`). In float32, rounding toward zero,

    P = 2^23 u + max(c, 0);   P = fma(a_k, b_k, P)    for every product above zero
    N = min(c, 0) - 2^23 u;   N = fma(a_k, b_k, N)    for every product below zero
    S = (P - 2^23 u) + (N + 2^23 u)

``P`` and ``-N`` stay in ``[2^23 u, 2^24 u)`` while ``(group + 1) 2^(t + 2) <= 2^23``, where the last place of a float32
is ``u``: so each fma drops just what lies below ``u`` of its product, toward zero, and both differences and their sum
are exact. ``b`` is kept twice, its positive and its negative elements with zeros for the others, which add nothing; the
sign of ``a_k`` says which of the two goes to ``P``.

The rounding direction is a register of the thread (MXCSR of x86). It is set for the steps of one tile alone, between
two barriers that no load and no store crosses, and every operand is read after it; promotions round to nearest.

Not covered (:func:`why_not`): machines without x86's FMA, operands with NaN or infinity (the kernel stops at the first
one of ``b``), longer groups and wider aligners.
Source: IEEE 754-2019, 4.3.2, for the rounding; Intel SDM vol. 1, 10.2.3, for MXCSR; the identity is derived here.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from oracle.tensorcore.cpu_jit import fma, jit, piece
from oracle.tensorcore.instructions import Instruction
from oracle.tensorcore.packing import A_THEN_B, A_THEN_FMA, ADD, B_THEN_FMA, CONTINUE, FMA, MULTIPLY_ADD, PROMOTE

LANES = 128  # columns of one panel
SUBTILE = 32  # products of one pass over the rows: both halves of b, 32 KiB, stay in the first-level cache
TOWARD_ZERO = 0x6000  # rounding control of MXCSR
ZERO_EXPONENT = -64  # of a zero FP8 operand, as of :mod:`oracle.tensorcore.engine_cpu`
LOWEST = -60  # start of the maximum: above every sum with a zero, below all others
FLOAT, INT, BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(8)

f32, i8, i32, u32 = np.float32, np.int8, np.int32, np.uint32


@cache
def features() -> frozenset[str]:
    """What this machine's processor has, by LLVM's names."""
    return frozenset(name for name, there in binding.get_host_cpu_features().items() if there)


def rounds_toward_zero() -> bool:
    """Whether this machine has the register and the fma."""
    return platform.machine().lower() in ("x86_64", "amd64") and {"avx2", "fma"} <= features()


def why_not(instruction: Instruction) -> str | None:
    """Reason for which this machine cannot add products of float32 lanes this way, or None."""
    if not rounds_toward_zero():
        return "the machine has not x86's FMA"
    if instruction.align_bits is None or (instruction.group + 1) << (instruction.align_bits + 2) > 1 << 23:
        return f"a sum of {instruction.group} products of {instruction.align_bits} bits leaves 23"
    return None


def _llvm(builder: Any, name: str, function: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}")


def _barrier(builder: Any) -> None:
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


def _register(builder: Any, name: str, slot: Any) -> None:
    function = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer()])
    _barrier(builder)
    builder.call(_llvm(builder, f"x86.sse.{name}", function), [builder.bitcast(slot, BYTE.as_pointer())])
    _barrier(builder)


def _read_control(typing_context: Any) -> Any:
    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        slot = cgutils.alloca_once(builder, INT)
        _register(builder, "stmxcsr", slot)
        return builder.load(slot)

    return types.uint32(), lower


def _write_control(typing_context: Any, value: Any) -> Any:
    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        slot = cgutils.alloca_once(builder, INT)
        builder.store(arguments[0], slot)
        _register(builder, "ldmxcsr", slot)
        return context.get_dummy_value()

    return types.void(types.uint32), lower


def _step(
    typing_context: Any,
    a: Any,
    e: Any,
    k: Any,
    b: Any,
    be: Any,
    kb: Any,
    group: Any,
    c: Any,
    mask: Any,
    up: Any,
    width: Any,
) -> Any:
    """One fused step of a row and ``width`` columns, added into ``c``.

    ``a``, ``e`` values and exponents of a row, from ``k`` on; ``b [., 2, LANES]``, ``be [., LANES]`` from ``kb`` on;
    ``mask`` masks the fraction bits that stay, ``up`` is ``23 - t`` in the place of a float32's exponent. Columns after
    ``width``, up to ``LANES``, may be computed too. The rounding must be toward zero.
    """
    count = 16 if "avx512f" in features() else 8
    vector, bits = ir.VectorType(FLOAT, count), ir.VectorType(INT, count)
    lanes = min(LANES, 4 * count)  # four accumulators of each sign hide the latency of an fma

    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        arrays = dict(zip(("a", "e", "b", "be", "c"), (0, 1, 3, 4, 7), strict=True))
        data = {
            name: context.make_array(signature.args[at])(context, builder, values[at]).data
            for name, at in arrays.items()
        }
        k, kb, group, mask, up, columns = (values[at] for at in (2, 5, 6, 8, 9, 10))
        size = k.type
        fma = _llvm(builder, f"fma.v{count}f32", ir.FunctionType(vector, [vector] * 3))
        most = ir.FunctionType(ir.VectorType(BYTE, lanes), [ir.VectorType(BYTE, lanes)] * 2)
        larger = _llvm(builder, f"smax.v{lanes}i8", most)

        def splat(scalar: Any, count: int) -> Any:
            kind = ir.VectorType(scalar.type, count)
            one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, INT(0))
            return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT, count), [0] * count))

        def place(name: str, index: Any, kind: Any) -> Any:
            return builder.bitcast(builder.gep(data[name], [index]), kind.as_pointer())

        def load(name: str, index: Any, kind: Any) -> Any:
            return builder.load(place(name, index, kind), align=1 if name in ("e", "be") else 4)

        def chunk(first: int) -> None:
            top = cgutils.alloca_once_value(builder, splat(BYTE(LOWEST), lanes))
            with cgutils.for_range(builder, group) as loop:
                row = builder.mul(builder.add(kb, loop.index), size(LANES))
                own = load("be", builder.add(row, size(first)), most.return_type)
                e = splat(load("e", builder.add(k, loop.index), BYTE), lanes)
                builder.store(builder.call(larger, [builder.load(top), builder.add(own, e)]), top)
            exponents, zero = builder.load(top), ir.Constant(vector, [0.0] * count)
            accumulators = []
            for v in range(lanes // count):
                at = ir.Constant(ir.VectorType(INT, count), list(range(v * count, (v + 1) * count)))
                e = builder.sext(builder.shuffle_vector(exponents, exponents, at), bits)
                of_products = builder.shl(builder.add(e, splat(INT(127), count)), splat(INT(23), count))
                c = load("c", size(first + v * count), vector)
                of_c = builder.and_(builder.bitcast(c, bits), splat(INT(0x7F800000), count))
                m = builder.select(builder.icmp_signed(">", of_products, of_c), of_products, of_c)
                magic = builder.bitcast(builder.add(m, splat(up, count)), vector)
                above = builder.fcmp_ordered(">", c, zero)
                plus = builder.fadd(magic, builder.select(above, c, zero))
                minus = builder.fsub(builder.select(above, zero, c), magic)
                pair = (cgutils.alloca_once_value(builder, x) for x in (plus, minus))
                accumulators.append((v * count, magic, *pair))
            with cgutils.for_range(builder, group) as loop:
                position = builder.add(k, loop.index)
                a = splat(load("a", position, FLOAT), count)
                negative = builder.lshr(load("a", position, INT), INT(31))
                other = builder.mul(builder.zext(negative, size), size(LANES))
                row = builder.add(builder.mul(builder.add(kb, loop.index), size(2 * LANES)), size(first))
                upper, lower_ = builder.add(row, other), builder.sub(builder.add(row, size(LANES)), other)
                for offset, _, plus, minus in accumulators:
                    for start, total in ((upper, plus), (lower_, minus)):
                        b = load("b", builder.add(start, size(offset)), vector)
                        builder.store(builder.call(fma, [a, b, builder.load(total)]), total)
            for offset, magic, plus, minus in accumulators:
                above, below = builder.fsub(builder.load(plus), magic), builder.fadd(builder.load(minus), magic)
                sum_ = builder.and_(builder.bitcast(builder.fadd(above, below), bits), splat(mask, count))
                builder.store(sum_, place("c", size(first + offset), bits), align=4)

        for first in range(0, LANES, lanes):
            with builder.if_then(builder.icmp_signed("<", size(first), columns)):
                chunk(first)
        return context.get_dummy_value()

    return types.void(a, e, k, b, be, kb, group, c, mask, up, width), lower


read_control, write_control, step = intrinsic(_read_control), intrinsic(_write_control), intrinsic(_step)


@piece
def _unpack(
    b: NDArray[np.uint8],
    first: int,
    width: int,
    source: NDArray[np.int64],
    bv: NDArray[np.float32],
    be: NDArray[np.int8],
    values: NDArray[np.float32],
    exponents: NDArray[np.int8],
) -> bool:
    """One tile of ``b``, transposed: elements above zero, elements below, exponents. Whether all are finite.

    Sixteen columns at a time; those past the last one repeat it, and their results are not used.
    """
    finite = True
    last = first + width - 1
    for j0 in range(0, width, 16):
        for k in range(len(source)):
            origin = source[k]
            above, below, exponent = values[k, 0, j0 : j0 + 16], values[k, 1, j0 : j0 + 16], exponents[k, j0 : j0 + 16]
            if origin < 0:
                for j in range(16):
                    above[j], below[j], exponent[j] = f32(0), f32(0), i8(ZERO_EXPONENT)
                continue
            for j in range(16):
                code = b[min(first + j0 + j, last), origin]
                value = bv[code]
                finite &= np.isfinite(value)
                above[j] = max(value, f32(0))
                below[j] = min(value, f32(0))
                exponent[j] = be[code]
    return finite


@piece
def promote(
    c: NDArray[Any], total: NDArray[np.float32], a_scale: float, b_scale: NDArray[np.float32], mode: int
) -> None:
    """Add the scaled ``c [LANES]`` (float32 or float64) into ``total`` ``[LANES]``, float32, and clear it; every
    operation rounds once to float32.

    ``a_scale``: float32, of the row; ``b_scale`` ``[LANES]``: of the columns. NaN and infinities as IEEE 754.
    """
    if mode == FMA:
        for j in range(LANES):
            total[j] = fma(f32(a_scale * b_scale[j]), f32(c[j]), total[j])
    elif mode == MULTIPLY_ADD:
        for j in range(LANES):
            total[j] += f32(f32(a_scale * b_scale[j]) * f32(c[j]))
    elif mode == A_THEN_B:
        for j in range(LANES):
            total[j] += f32(f32(f32(c[j]) * a_scale) * b_scale[j])
    elif mode == A_THEN_FMA:
        for j in range(LANES):
            total[j] = fma(f32(f32(c[j]) * a_scale), b_scale[j], total[j])
    elif mode == B_THEN_FMA:
        for j in range(LANES):
            total[j] = fma(f32(f32(c[j]) * b_scale[j]), f32(a_scale), total[j])
    elif mode == CONTINUE:
        for j in range(LANES):
            total[j] = f32(c[j])
    else:
        for j in range(LANES):
            total[j] += f32(c[j])
    for j in range(LANES):
        c[j] = 0


@jit
def truncating(
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
) -> bool:
    """The sums of ``narrow``, with its arguments: False, and nothing is done, where ``b`` has NaN or infinity.

    Arguments as of :func:`oracle.tensorcore.engine_cpu.narrow`.
    """
    columns = b.shape[0]
    rows = row1 - row0
    longest = 0
    for tile in tiles:
        longest = max(longest, tile[1] - tile[0])
    values = np.zeros((longest, 2, LANES), np.float32)
    exponents = np.zeros((longest, LANES), np.int8)
    chain = np.zeros((rows, LANES), np.float32)
    total = np.zeros((rows, LANES), np.float32)
    scale = np.ones(LANES, np.float32)
    mask, up = i32(-(1 << (23 - to))), i32((23 - t) << 23)
    part = max(group, SUBTILE // group * group)
    nearest = read_control()
    for panel in range(panel0, panel1):
        first = panel * LANES
        width = min(LANES, columns - first)
        chain[:, :] = f32(0)
        total[:, :] = f32(0)
        for tile in tiles:
            k0, length, at, end = tile[0], tile[1] - tile[0], tile[2], tile[3]
            if not _unpack(b, first, width, source[k0 : k0 + length], bv, be, values, exponents):
                return False
            if mode != ADD:
                for j in range(width):
                    scale[j] = sb[(first + j) // b_rows, at]
            write_control(u32(nearest | u32(TOWARD_ZERO)))
            for g0 in range(0, length, part):
                for i in range(rows):
                    for g in range(g0, min(g0 + part, length), group):
                        step(av[row0 + i], ae[row0 + i], k0 + g, values, exponents, g, group, chain[i], mask, up, width)
            write_control(nearest)
            if end & PROMOTE:
                for i in range(rows):
                    promote(chain[i], total[i], sa[row0 + i, at], scale, mode)
        for i in range(rows):
            for j in range(width):
                out[row0 + i, first + j] = total[i, j]
    return True
