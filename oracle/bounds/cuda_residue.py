"""Bounds of a scaled product on a GPU, in CUDA C++: one pass over K for a tile of results, or for single ones.

``residue_sums.cu`` says how it sums and why its values are those of the definitions in :mod:`oracle.bounds.product` bit
for bit. It leaves the running bound of the promoted sum, which the definitions' own code finishes. :func:`why_not` says
what it does not take; :mod:`oracle.bounds.engines` asks it.

Memory beyond operands and result: below 2 GiB for up to 2^17 columns.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle.bounds.accumulator import Accumulator, chains
from oracle.bounds.interval import Interval
from oracle.bounds.product import ETA, FLUSHED, Promotion, check_fit, finished, joined
from oracle.numbers.formats import codes_of, decode
from oracle.tensorcore import cuda_source
from oracle.tensorcore.cuda_source import Source
from oracle.tensorcore.packing import code_table
from oracle.truth.gemm import Decoded, ScaledProduct

TILE, THREADS = (64, 64), 256  # rows and columns of a block, and its threads: as in the source
STEP = 32  # most products of a step
TABLES = 2 * 256 * 4  # bytes of the values of all codes
MEMORY = 2 * sum(TILE) * 4 * (3 * STEP + STEP // 2 + STEP + 4) + TABLES  # two buffers, and the tables
BAND = 1 << 23  # results of a launch: 64 MiB for each quantity
RESTLESS = 2  # flag of a result whose error grows on


def why_not(product: ScaledProduct, acc: Accumulator) -> str | None:
    """Reason for which the device or the accumulator's step is not supported, or None.

    Whether the sums fit float64 is checked by :mod:`oracle.bounds.engines`.
    """
    if (reason := cuda_source.why_not(product.a.device)) is not None:
        return reason
    if not product.M * product.N * product.K:
        return "there is nothing to sum"
    if acc.group > STEP or _source(acc) is None:
        return f"{acc.name} adds {acc.group} products of {acc.align} bits a step"
    room = getattr(torch.cuda.get_device_properties(product.a.device), "shared_memory_per_block_optin", 0)
    return None if room >= MEMORY else f"a block has {room} bytes of shared memory, of which this takes {MEMORY}"


def residue_bound(product: ScaledProduct, acc: Accumulator) -> Interval:
    """:func:`oracle.bounds.product.residue_bound` before ``scaled_at_the_end``, bit for bit.

    Raises NumericsError: no kernel with ``acc`` can compute it.
    """
    interval = _bound(product, acc, "residue", f"residue bound of {acc.name}", ordered=True)
    assert interval is not None
    return interval


def residue_at(product: ScaledProduct, acc: Accumulator, at: Tensor) -> Interval:
    """:func:`residue_bound` of single elements, bit for bit: ``at`` int64 ``[P]``, their places in ``[M, N]`` row by
    row. Its tensors are ``[P]``; NaN and infinite codes count as zeros. Source: the definition, whose operations are
    done in its order.

    Raises NumericsError: no kernel with ``acc`` can compute it.
    """
    check_fit(product, acc)
    (source, operands, scales), device = _arguments(product, acc), product.a.device
    made = torch.zeros((4, len(at)), dtype=torch.float64, device=device)
    flags = torch.zeros(len(at), dtype=torch.uint8, device=device)
    if len(at):
        grid, extents = (-(-len(at) // THREADS), 1), (product.M, product.N, *_extents(product, acc))
        source.launch("residue_at", grid, THREADS, *operands, *scales, *extents, at, len(at), made, flags)
    rows, columns = torch.div(at, product.N, rounding_mode="floor"), at % product.N
    bias = [] if product.bias is None else [(decode(product.bias)[columns], ETA)]
    c = [] if product.c is None else [(decode(product.c[rows, columns]), FLUSHED)]
    alpha = None if product.alpha is None else product.factor
    sums = Promotion.from_sums(tuple(made), flags != 0, None)
    return sums.interval(*bias, *c, name=f"residue bound of {acc.name}", alpha=alpha)


def split_bound(product: ScaledProduct, acc: Accumulator) -> Interval:
    """:func:`oracle.bounds.product.split_bound` of a promoted ``acc``, bit for bit; raises as that does."""
    assert acc.promotion is not None
    interval = _bound(product, acc, "residue", f"residue bound of {acc.name}, K split anywhere", ordered=False)
    assert interval is not None
    return interval


def any_order_bound(product: ScaledProduct, acc: Accumulator) -> Interval | None:
    """:func:`oracle.bounds.product.any_order_bound`, bit for bit; None where an error keeps growing, for which the
    definition iterates further. Raises as that does."""
    return _bound(product, acc, "any_order", f"any-order bound of {acc.name} (weak)", ordered=False, weak=True)


def _bound(
    product: ScaledProduct, acc: Accumulator, function: str, name: str, *, ordered: bool, weak: bool = False
) -> Interval | None:
    check_fit(product, acc)
    (source, (a, a_pitch, *of_b), (sa, a_blocks, *of_scales)), device = _arguments(product, acc), product.a.device
    added = sum(1 for _ in chains(product, acc.promotion))
    tall, wide = TILE
    width = -(-product.N // wide) * wide
    step = max(tall, BAND // width // tall * tall)
    parts = []
    for start in range(0, product.M, step):
        rows = min(product.M - start, step)
        height = -(-rows // tall) * tall
        sums_out = torch.zeros((4 if ordered else 7, height, width), dtype=torch.float64, device=device)
        flags = torch.zeros((height, width), dtype=torch.uint8, device=device)
        source.launch(
            function,
            (width // wide, height // tall),
            THREADS,
            a[start : start + rows],
            a_pitch,
            *of_b,
            sa if sa.shape[0] == 1 else sa[start : start + rows],
            a_blocks,
            *of_scales,
            rows,
            product.N,
            *_extents(product, acc),
            int(not ordered),
            sums_out,
            flags,
        )
        sums_out, flags = sums_out[:, :rows, : product.N], flags[:rows, : product.N]
        if function == "any_order" and bool((flags & RESTLESS).any()):
            return None
        sums = Promotion.from_sums(tuple(sums_out), flags != 0, None if ordered else added)
        parts.append(finished(product, start, sums, name, weak=weak))
    return joined(parts)


def _arguments(product: ScaledProduct, acc: Accumulator) -> tuple[Source, tuple[Any, ...], tuple[Any, ...]]:
    """The source, and the operands and scales with their strides, as the functions take them; a NaN scale counts as 0,
    since its results must be NaN and are judged as such."""
    source = _source(acc, min(acc.promotion or product.block, product.K))
    assert source is not None
    a, b = (_rows(x) for x in (product.a, product.b))
    sa, sb = (torch.where(torch.isnan(x.scales), 0.0, x.scales).contiguous() for x in (product.left, product.right))
    tables = torch.stack([_table(x) for x in (product.left, product.right)]).to(product.a.device)
    operands = a, _long(a.stride(0)), b, _long(b.stride(0)), tables
    return source, operands, (sa, 0 if sa.shape[0] == 1 else product.B, sb, product.B, product.b_rows)


def _extents(product: ScaledProduct, acc: Accumulator) -> tuple[int, ...]:
    """K, the products of a scale block and of a chain, the steps' widths, and the least exponents of the operands."""
    widths = acc.group, acc.align, acc.out
    return product.K, product.block, acc.promotion or 0, *widths, product.left.fmt.emin, product.right.fmt.emin


def _source(acc: Accumulator, chain: int = 0) -> Source | None:
    """The source whose sums of one step are exact: float32 or float64 ones. They hold ``STEP * 2^(align + 2)`` units,
    and what a ``chain`` of so many products adds to them is counted in 32 bits beside float32."""
    step, whole = STEP << (acc.align + 2), chain << (acc.align + 2)
    if step > 1 << 52:
        return None
    functions = (("residue", MEMORY), ("any_order", MEMORY), ("residue_at", TABLES))
    wide = step > 1 << 23 or whole > 1 << 32
    return Source(Path(__file__).with_name("residue_sums.cu"), (("WIDE", int(wide)), ("MEMORY", MEMORY)), functions)


def _rows(x: Tensor) -> Tensor:
    codes = x if x.dtype is torch.uint8 else codes_of(x)
    return codes if codes.stride(1) == 1 else codes.contiguous()


def _table(x: Decoded) -> Tensor:
    """The value of every code, as float32 ``[256]``; NaN and infinities as zeros."""
    value = code_table(x.fmt, 0, special=False)[0].to(torch.float32)
    return torch.nn.functional.pad(value, (0, 256 - len(value)))


def _long(x: int) -> ctypes.c_longlong:
    return ctypes.c_longlong(x)
