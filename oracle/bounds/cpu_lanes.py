"""Sums of products by their signs in vector registers of a CPU, to nearest or toward zero.

    s[q + j] += sum |a_k| |b_kj| over the products above zero,   s[q + lanes + j] += the same over those below

``b`` is kept twice, its elements above zero and the magnitudes of those below, with zeros for the others, which add
nothing; the sign of ``a_k`` says which of the two counts. Every product is added by one fma, in ascending order.

Not covered: NaN and infinities, of which callers leave what they enter to the definitions; a direction of rounding on
machines without x86's FMA (:func:`~oracle.tensorcore.cpu_truncation.rounds_toward_zero`), where :func:`apart` serves.
Source: IEEE 754-2019, 4.3, for the rounding; :mod:`oracle.tensorcore.cpu_truncation` for the register that sets it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from oracle.tensorcore.cpu_jit import piece
from oracle.tensorcore.cpu_truncation import TOWARD_ZERO, features, read_control, rounds_toward_zero, write_control

LANES = 64  # columns of one panel: what a group of products needs of ``b`` stays in the first-level cache
AT_ONCE = 4  # vectors of each sign whose sums stay in registers: they hide the latency of an fma
DOUBLE, INT, LONG = ir.DoubleType(), ir.IntType(32), ir.IntType(64)

u32 = np.uint32


def _add(typing_context: Any, a: Any, k: Any, b: Any, kb: Any, count: Any, s: Any, q: Any) -> Any:
    """``count`` products of a row ``a [K]`` from ``k`` on and of ``b [., 2, LANES]`` from ``kb`` on, added to ``s`` at
    ``q`` and ``q + LANES``; all float64."""
    width = 8 if "avx512f" in features() else 4
    vector = ir.VectorType(DOUBLE, width)

    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = {
            name: context.make_array(signature.args[at])(context, builder, values[at]).data
            for name, at in (("a", 0), ("b", 2), ("s", 5))
        }
        k, kb, count, q = (values[at] for at in (1, 3, 4, 6))
        size = k.type
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{width}f64"
        )
        size_of = cgutils.get_or_insert_function(builder.module, ir.FunctionType(DOUBLE, [DOUBLE]), "llvm.fabs.f64")

        def place(name: str, index: Any, kind: Any) -> Any:
            return builder.bitcast(builder.gep(data[name], [index]), kind.as_pointer())

        def chunk(first: int) -> None:
            sums = []
            for half in range(2):
                for at in range(first, first + AT_ONCE * width, width):
                    own = place("s", builder.add(q, size(half * LANES + at)), vector)
                    sums.append((half, at, own, cgutils.alloca_once_value(builder, builder.load(own, align=8))))
            with cgutils.for_range(builder, count) as loop:
                position = builder.add(k, loop.index)
                one = builder.insert_element(
                    ir.Constant(vector, ir.Undefined),
                    builder.call(size_of, [builder.load(place("a", position, DOUBLE))]),
                    INT(0),
                )
                one = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT, width), [0] * width))
                negative = builder.mul(builder.lshr(builder.load(place("a", position, LONG)), LONG(63)), LONG(LANES))
                row = builder.mul(builder.add(kb, loop.index), size(2 * LANES))
                starts = builder.add(row, negative), builder.sub(builder.add(row, size(LANES)), negative)
                for half, at, _, total in sums:
                    own = builder.load(place("b", builder.add(starts[half], size(at)), vector), align=8)
                    builder.store(builder.call(fma, [one, own, builder.load(total)]), total)
            for _, _, own, total in sums:
                builder.store(builder.load(total), own, align=8)

        for first in range(0, LANES, AT_ONCE * width):
            chunk(first)
        return context.get_dummy_value()

    return types.void(a, k, b, kb, count, s, q), lower


add_products = intrinsic(_add)


@piece
def toward_zero(
    a: NDArray[np.float64], k: int, b: NDArray[np.float64], kb: int, count: int, s: NDArray[np.float64], q: int
) -> None:
    """:func:`add_products`, each sum rounded toward zero. Float64 ``a [K]``, ``b [., 2, LANES]`` and ``s [Q]``, without
    NaN."""
    nearest = read_control()
    write_control(u32(nearest | u32(TOWARD_ZERO)))
    add_products(a, k, b, kb, count, s, q)
    write_control(nearest)


@piece
def apart(
    a: NDArray[np.float64], k: int, b: NDArray[np.float64], kb: int, count: int, s: NDArray[np.float64], q: int
) -> None:
    """What :func:`toward_zero` gives sums that start at ``2^52 u`` and stay below ``2^53 u``, on any machine: each
    product is cut to a multiple of ``u`` before. Float64 ``a [K]``, ``b [., 2, LANES]`` and ``s [Q]``, without NaN."""
    for i in range(count):
        size = abs(a[k + i])
        negative = u32(a[k + i] < 0)
        above, below = b[kb + i, negative], b[kb + i, 1 - negative]
        for j in range(LANES):
            bits = np.float64(s[q + j]).view(np.int64) & np.int64(0x7FF0_0000_0000_0000)
            unit = np.int64(bits - (np.int64(52) << np.int64(52))).view(np.float64)
            s[q + j] += np.trunc(size * above[j] * (1.0 / unit)) * unit
            s[q + LANES + j] += np.trunc(size * below[j] * (1.0 / unit)) * unit


add_floors = toward_zero if rounds_toward_zero() else apart
