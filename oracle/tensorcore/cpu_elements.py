"""Chains of single elements on the CPU: the sums of :mod:`oracle.tensorcore.engine_cpu`, where every lane has operands
of its own.

A lane is one element of a product, a row of ``a`` with a row of ``b``; a chain is a list of instructions over it, in
any order and from any start. So one pass gives the partial sums of many ways to cut K. NaN and infinities follow IEEE
754.

Source: derived from :mod:`oracle.tensorcore.fused`, whose bits it gives. Not covered: what the engine does not take.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.tensorcore.cpu_jit import jit, piece
from oracle.tensorcore.cpu_truncation import LANES
from oracle.tensorcore.engine_cpu import WIDE_ZERO_EXPONENT, fold_wide, round_wide, shift_wide

f32, f64, i16 = np.float32, np.float64, np.int16
AT_ONCE = 4  # products of one pass over the lanes; groups are multiples of it


@jit
def chains(
    av: NDArray[np.float32],
    ae: NDArray[np.int16],
    bv: NDArray[np.float32],
    be: NDArray[np.int16],
    sigma: NDArray[np.float64],
    tiles: NDArray[np.int64],
    visits: NDArray[np.int64],
    ends: NDArray[np.int64],
    group: int,
    t: int,
    to: int,
    folds: bool,
    first: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """``out[s]`` ``[LANES]``, float32: the chain over the instructions ``visits[ends[s] : ends[s + 1]]`` from ``first``
    ``[LANES]``.

    ``av``, ``ae``, ``bv``, ``be`` ``[Kp, LANES]`` are values and exponents in packed order, ``sigma`` ``[B, LANES]``
    the scales inside the instruction (else 1), ``tiles`` ``[T, 4]`` the instructions, as
    :class:`oracle.tensorcore.packing.Packed` has them; ``folds``: their sums are added to the accumulator to nearest.
    NaN and infinities go through as in float32 arithmetic.
    """
    c = np.zeros(LANES, np.float64)
    folded = np.zeros(LANES, np.float32)
    top = np.zeros(LANES, np.int16)
    shift = np.zeros(LANES, np.float64)
    back = np.zeros(LANES, np.float64)
    for s in range(len(ends) - 1):
        for j in range(LANES):
            folded[j] = first[j]
            c[j] = 0.0 if folds else f64(first[j]) + 0.0
        for v in range(ends[s], ends[s + 1]):
            tile = tiles[visits[v]]
            k0, length = tile[0], tile[1] - tile[0]
            scale = sigma[tile[2]]
            for g in range(k0, k0 + length, group):
                for j in range(LANES):
                    top[j] = i16(2 * WIDE_ZERO_EXPONENT)
                for k in range(g, g + group, AT_ONCE):
                    _raise_top(ae, be, k, top)
                shift_wide(c, top, scale, t, to, shift, back)
                for k in range(g, g + group, AT_ONCE):
                    _add_products(av, bv, k, shift, c)
                round_wide(c, back, to)
            if folds:
                fold_wide(folded, c, back, to)
        result = out[s]
        for j in range(LANES):
            result[j] = folded[j] if folds else f32(c[j])


@piece
def _raise_top(ae: NDArray[np.int16], be: NDArray[np.int16], k: int, top: NDArray[np.int16]) -> None:
    a0, a1, a2, a3 = ae[k], ae[k + 1], ae[k + 2], ae[k + 3]
    b0, b1, b2, b3 = be[k], be[k + 1], be[k + 2], be[k + 3]
    for j in range(LANES):
        e = max(i16(a0[j] + b0[j]), i16(a1[j] + b1[j]))
        top[j] = max(max(top[j], e), max(i16(a2[j] + b2[j]), i16(a3[j] + b3[j])))


@piece
def _add_products(
    av: NDArray[np.float32], bv: NDArray[np.float32], k: int, shift: NDArray[np.float64], total: NDArray[Any]
) -> None:
    a0, a1, a2, a3 = av[k], av[k + 1], av[k + 2], av[k + 3]
    b0, b1, b2, b3 = bv[k], bv[k + 1], bv[k + 2], bv[k + 3]
    for j in range(LANES):
        up, s = shift[j], total[j]
        s += np.trunc((f64(a0[j]) * f64(b0[j])) * up)
        s += np.trunc((f64(a1[j]) * f64(b1[j])) * up)
        s += np.trunc((f64(a2[j]) * f64(b2[j])) * up)
        s += np.trunc((f64(a3[j]) * f64(b3[j])) * up)
        total[j] = s
