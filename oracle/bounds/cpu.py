"""Fast CPU twins of the exact reference and of the bounds B1 and B2: compiled, threaded, the same bits.

``exact_value`` is :func:`oracle.truth.gemm.exact`; ``exact_and_rank1`` and ``exact_and_residue`` add B1 or B2 in the same
pass. Each equals its plain definition in every bit. Elements whose row of ``a`` or column of ``b`` holds a NaN or an
infinity (or a scale that does) are computed by the definition itself.

``why_not`` says what this file does not cover: products whose float64 sums are not exact without splitting, scales
inside the instruction, operands wider than 16 bits, tensors that are not on the CPU.
Needs numba. Memory beyond operands and results: below 300 MiB for any shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oracle.bounds import cpu_exact, cpu_residue
from oracle.bounds import product as definition
from oracle.bounds.accumulator import Accumulator
from oracle.bounds.cpu_promote import BLOCK_END, CHAIN_END, CHAIN_START, LANES, POWER, UNROLL
from oracle.bounds.interval import Interval
from oracle.errors import NumericsError
from oracle.numbers.formats import decode, of_dtype
from oracle.tensorcore.cpu_jit import codes_array, run_tasks, task_pieces
from oracle.tensorcore.instructions import Order, Sum
from oracle.truth import gemm
from oracle.truth.gemm import Exact, ScaledProduct

CHUNK_BYTES = 1 << 26  # of unpacked rows of a
TILE = 128  # products unpacked at once
NO_CHAIN = Accumulator("exact", 1 << 30, 0, 0, None)


def why_not(product: ScaledProduct, acc: Accumulator | None = None) -> str | None:
    """Reason for which the compiled pass cannot take this product, or None."""
    if product.a.device.type != "cpu":
        return f"the operands are on {product.a.device}"
    if product.a.element_size() > 2 or product.b.element_size() > 2:
        return "an operand is wider than 16 bits"
    if acc is not None:
        if acc.scales_inside:
            return f"{acc.name} applies scales inside the instruction"
        if acc.kind is not Sum.FUSED or acc.order is not Order.SEQUENTIAL:
            return f"{acc.name} does not add by fused truncating steps in ascending order"
        if product.a.element_size() > 1 or product.b.element_size() > 1:
            return "the bound's recursion is exact in float64 for 8-bit operands only"
    formats = of_dtype(product.a.dtype), of_dtype(product.b.dtype)
    quantum = formats[0].min_subnormal * formats[1].min_subnormal
    length = min(product.block, product.K)
    if length * formats[0].max_finite * formats[1].max_finite <= 2.0**53 * quantum:
        return None  # whatever the codes are
    largest = _largest(product.a) * _largest(product.b)
    if length * largest > 2.0**53 * quantum:
        return f"sums of {product.block} products up to {largest} over a quantum of {quantum} leave float64"
    return None


def exact_value(product: ScaledProduct) -> Exact:
    """:func:`oracle.truth.gemm.exact`, bit for bit."""
    refused = why_not(product)
    if refused is not None:
        raise NumericsError(f"no compiled exact value: {refused}; use oracle.truth.gemm.exact")
    out = _overlay(product, _exact_pass(product, None), lambda part: _stack(gemm.exact(part), None))
    return Exact(out[0], out[1], out[2])


def exact_and_rank1(product: ScaledProduct, acc: Accumulator) -> tuple[Exact, Interval]:
    """:func:`oracle.truth.gemm.exact` and :func:`oracle.bounds.rank1_bound`, bit for bit, in one pass."""
    return _in_one_pass(product, acc, "rank-1", _exact_pass, definition.rank1_bound)


def exact_and_residue(product: ScaledProduct, acc: Accumulator) -> tuple[Exact, Interval]:
    """:func:`oracle.truth.gemm.exact` and :func:`oracle.bounds.residue_bound`, bit for bit, in one pass."""
    return _in_one_pass(product, acc, "residue", _residue_pass, definition.residue_bound)


def _in_one_pass(
    product: ScaledProduct,
    acc: Accumulator,
    name: str,
    compiled: Callable[[ScaledProduct, Accumulator], Tensor],
    bound: Callable[[ScaledProduct, Accumulator], Interval],
) -> tuple[Exact, Interval]:
    refused = why_not(product, acc)
    if refused is not None:
        raise NumericsError(f"no compiled {name} bound: {refused}; use oracle.bounds.{bound.__name__}")
    definition.check_fit(product, acc)
    out = _overlay(product, compiled(product, acc), lambda part: _stack(gemm.exact(part), bound(part, acc)))
    interval = Interval(out[3], out[4], f"{name} bound of {acc.name}", False, out[5] != 0)
    return Exact(out[0], out[1], out[2]), interval


@dataclass(frozen=True)
class _Packed:
    """Packed positions of K: their k (-1: padding), and tiles ``[T, 4]``: first, end, scale block, flags."""

    source: NDArray[np.int64]
    tiles: NDArray[np.int64]


def _pack(product: ScaledProduct, acc: Accumulator) -> tuple[_Packed, int]:
    """Chains that never cross a scale block, cut into steps of ``acc.group`` padded to a multiple of ``UNROLL``."""
    group = min(acc.group, TILE)
    padded = -(-group // UNROLL) * UNROLL
    source: list[NDArray[np.int64]] = []
    tiles: list[tuple[int, int, int, int]] = []
    position = 0
    unit = max(1, TILE // padded) * group
    for block in range(product.B):
        first, end = block * product.block, min(product.K, (block + 1) * product.block)
        length = acc.promotion or max(1, end - first)
        for start in range(first, end, length):
            stop = min(end, start + length)
            for k in range(start, stop, unit):
                last = min(stop, k + unit)
                steps = -(-(last - k) // group)
                ks = np.full((steps, padded), -1, np.int64)
                grid = k + np.arange(steps * group).reshape(steps, group)
                ks[:, :group] = np.where(grid < last, grid, -1)
                flags = CHAIN_START * (k == start) + CHAIN_END * (last == stop)
                flags += BLOCK_END * (last == end)
                source.append(ks.reshape(-1))
                tiles.append((position, position + ks.size, block, flags))
                position += ks.size
    return _Packed(np.concatenate(source), np.array(tiles, np.int64)), padded


def _exact_pass(product: ScaledProduct, acc: Accumulator | None) -> Tensor:
    """Run the kernel over row chunks; float64 ``[3 or 6, M, N]``."""
    packed, group = _pack(product, acc or NO_CHAIN)
    used = acc or NO_CHAIN
    b_value, b_power = _tables(product.b)
    b = codes_array(product.b)
    sb = decode(product.b_scale).numpy()
    bias = _bias(product)
    out = np.empty((3 if acc is None else 6, product.M, product.N))
    step = max(1, CHUNK_BYTES // (8 * max(1, packed.source.size)))
    for start in range(0, product.M, step):
        rows = product.rows(start, min(product.M, start + step))
        a, top = _unpacked(rows, packed, group)
        sa = _one_more_row(decode(rows.a_scale).expand(rows.M, -1).numpy())

        def task(
            row0: int, row1: int, panel0: int, panel1: int,
            a: NDArray[np.float64] = a, top: NDArray[np.float64] = top, sa: NDArray[np.float64] = sa,
            origin: int = start,
        ) -> None:  # fmt: skip
            cpu_exact.exact_rank1(
                a, top, sa, b, b_value, b_power, sb, product.b_rows, packed.source, packed.tiles, group,
                used.group, used.align, used.out, acc is not None, bias, product.bias is not None, out, origin,
                row0, row1, panel0, panel1,
            )  # fmt: skip

        run_tasks(task, task_pieces(rows.M, product.N, lanes=LANES))
    return torch.from_numpy(out)


def _residue_pass(product: ScaledProduct, acc: Accumulator) -> Tensor:
    """Run the kernel over row chunks; float64 ``[6, M, N]``."""
    packed, group = _pack(product, acc)
    a_value, a_exponent = _exponents(product.a)
    b_value, b_exponent = _exponents(product.b)
    b, sb, bias = codes_array(product.b), decode(product.b_scale).numpy(), _bias(product)
    out = np.empty((6, product.M, product.N))
    step = max(1, CHUNK_BYTES // (9 * max(1, packed.source.size)))
    for start in range(0, product.M, step):
        rows = product.rows(start, min(product.M, start + step))
        codes = np.take(codes_array(rows.a), packed.source, axis=1)
        a, e = np.take(a_value, codes), np.take(a_exponent, codes)
        a[:, packed.source < 0] = 0.0
        e[:, packed.source < 0] = cpu_residue.ABSENT
        sa = np.ascontiguousarray(decode(rows.a_scale).expand(rows.M, -1).numpy())

        def task(
            row0: int, row1: int, panel0: int, panel1: int,
            a: NDArray[np.float64] = a, e: NDArray[np.int8] = e, sa: NDArray[np.float64] = sa, origin: int = start,
        ) -> None:  # fmt: skip
            cpu_residue.residue(
                a, e, sa, b, b_value, b_exponent, sb, product.b_rows, packed.source, packed.tiles, group,
                acc.align, acc.out, bias, product.bias is not None, out, origin, row0, row1, panel0, panel1,
            )  # fmt: skip

        run_tasks(task, task_pieces(rows.M, product.N, lanes=LANES))
    return torch.from_numpy(out)


def _bias(product: ScaledProduct) -> NDArray[np.float64]:
    return np.zeros(1) if product.bias is None else torch.nan_to_num(decode(product.bias), 0.0, 0.0, 0.0).numpy()


def _unpacked(rows: ScaledProduct, packed: _Packed, group: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Packed values of ``a`` and the power of two of the largest exponent of each step, with a zero row at the end."""
    value, power = _tables(rows.a)
    codes = np.take(codes_array(rows.a), packed.source, axis=1)
    values, powers = np.take(value, codes), np.take(power, codes)
    values[:, packed.source < 0] = 0.0
    powers[:, packed.source < 0] = 0.0
    top = powers.reshape(rows.M, -1, group).max(axis=2)
    return _one_more_row(values), _one_more_row(top)


def _one_more_row(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([x, np.zeros((1, x.shape[1]))])


def _tables(x: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Value of every code (0 for NaN and infinity) and ``2^E`` (0 for zeros)."""
    fmt = of_dtype(x.dtype)
    value = torch.nan_to_num(decode(torch.arange(1 << fmt.bits, device="cpu"), fmt), 0.0, 0.0, 0.0)
    power = (value.abs().view(torch.int64) & POWER).view(torch.float64).clamp(min=2.0**fmt.emin)
    return value.numpy(), torch.where(value == 0, 0.0, power).numpy()


def _exponents(x: Tensor) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
    """Value of every code of an 8-bit format (0 for NaN and infinity) and its exponent."""
    value, power = _tables(x)
    exponent = np.frexp(power)[1] - 1
    return value, np.where(value == 0, cpu_residue.ABSENT, exponent).astype(np.int8)


def _largest(x: Tensor) -> float:
    """Largest finite magnitude among the codes present."""
    value, _ = _tables(x)
    present = np.bincount(codes_array(x).reshape(-1), minlength=value.size) > 0
    return float(np.abs(value[present]).max(initial=0.0))


def _stack(value: Exact, interval: Interval | None) -> Tensor:
    parts = [value.hi, value.lo, value.slack]
    if interval is not None:
        assert interval.open is not None
        parts += [interval.lo, interval.hi, interval.open.to(torch.float64)]
    return torch.stack(parts)


def _overlay(product: ScaledProduct, out: Tensor, plain: Callable[[ScaledProduct], Tensor]) -> Tensor:
    """Replace rows and columns with a NaN or an infinity among their inputs by the definition's."""
    rows = ~(_finite(product.a) & _finite(product.a_scale).expand(product.M))
    groups = torch.arange(product.N, device="cpu") // product.b_rows
    columns = ~(_finite(product.b) & _finite(product.b_scale)[groups])
    if product.bias is not None:
        columns |= ~torch.isfinite(decode(product.bias))
    if bool(rows.any()):
        index = torch.nonzero(rows)[:, 0]
        out[:, index] = plain(product.take(index))
    if bool(columns.any()):
        index = torch.nonzero(columns)[:, 0]
        out[:, :, index] = plain(_columns(product, index, groups[index]))
    return out


def _finite(x: Tensor) -> Tensor:
    """Per row, whether all elements are finite."""
    if x.element_size() <= 2:
        fmt = of_dtype(x.dtype)
        finite = torch.isfinite(decode(torch.arange(1 << fmt.bits, device="cpu"), fmt)).numpy()
        return torch.from_numpy(finite[codes_array(x)].all(axis=1))
    return torch.isfinite(x).all(dim=1)


def _columns(product: ScaledProduct, index: Tensor, groups: Tensor) -> ScaledProduct:
    """The product restricted to columns ``index``, each with a scale row of its own."""
    return replace(
        product,
        b=gemm.take_rows(product.b, index),
        b_scale=product.b_scale[groups],
        b_rows=1,
        bias=None if product.bias is None else product.bias[index],
    )
