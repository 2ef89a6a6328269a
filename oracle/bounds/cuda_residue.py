"""The residue bound B2 of a scaled product on a GPU, in CUDA C++: one pass over K for a tile of results.

``residue_sums.cu`` says how it sums and why its values are those of the definition
(:func:`oracle.bounds.product.residue_bound`) bit for bit. It leaves the running bound of the promoted sum, which the
definition's own code finishes. :func:`why_not` says what it does not take; :mod:`oracle.bounds.engines` asks it.

Memory beyond operands and result: below 1.5 GiB for any shape.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from oracle.bounds.accumulator import Accumulator
from oracle.bounds.interval import Interval
from oracle.bounds.product import Promotion, check_fit, finished, joined
from oracle.numbers.formats import codes_of
from oracle.tensorcore import cuda_source
from oracle.tensorcore.cuda_source import Source
from oracle.tensorcore.packing import code_table
from oracle.truth.gemm import Decoded, ScaledProduct

TILE, THREADS = 64, 256  # rows and columns of a block, and its threads: as in the source
STEP = 32  # most products of a step
MEMORY = 2 * (2 * (3 * STEP * TILE * 4 + STEP // 2 * TILE * 4 + TILE * (STEP + 4) * 4)) + 2 * 256 * 4
BAND = 1 << 23  # results of a launch: 260 MiB of float64


def why_not(product: ScaledProduct, acc: Accumulator) -> str | None:
    """Reason for which the device, or the step, is not for this source; that its sums fit is not asked here."""
    if (reason := cuda_source.why_not(product.a.device)) is not None:
        return reason
    if acc.group > STEP or not _source(acc):
        return f"{acc.name} adds {acc.group} products of {acc.align} bits a step"
    room = torch.cuda.get_device_properties(product.a.device).shared_memory_per_block_optin
    return None if room >= MEMORY else f"a block has {room} bytes of shared memory, of which this takes {MEMORY}"


def residue_bound(product: ScaledProduct, acc: Accumulator) -> Interval:
    """:func:`oracle.bounds.product.residue_bound` before ``scaled_at_the_end``, bit for bit.

    Raises NumericsError: no kernel with ``acc`` can compute it.
    """
    check_fit(product, acc)
    source, device = _source(acc), product.a.device
    assert source is not None
    a, b = (_rows(x) for x in (product.a, product.b))
    # a NaN scale counts as 0, since its results must be NaN and are judged as such
    sa, sb = (torch.where(torch.isnan(x.scales), 0.0, x.scales).contiguous() for x in (product.left, product.right))
    tables = torch.stack([_table(x) for x in (product.left, product.right)]).to(device)
    width = -(-product.N // TILE) * TILE
    step = max(TILE, BAND // width // TILE * TILE)
    parts = []
    for start in range(0, product.M, step):
        rows = min(product.M - start, step)
        height = -(-rows // TILE) * TILE
        made = torch.zeros((4, height, width), dtype=torch.float64, device=device)
        opened = torch.zeros((height, width), dtype=torch.uint8, device=device)
        scales = sa if sa.shape[0] == 1 else sa[start : start + rows]
        source.launch(
            "residue", (width // TILE, height // TILE), THREADS, a[start : start + rows], _long(a.stride(0)), b,
            _long(b.stride(0)), tables, scales, 0 if sa.shape[0] == 1 else product.B, sb, product.B, product.b_rows,
            rows, product.N, product.K, product.block, acc.promotion or 0, acc.group, acc.align, acc.out,
            product.left.fmt.emin, product.right.fmt.emin, made, opened,
        )  # fmt: skip
        sums = Promotion.known(*made[:, :rows, : product.N], opened[:rows, : product.N].to(torch.bool))
        parts.append(finished(product, start, sums, f"residue bound of {acc.name}"))
    return joined(parts)


def source(wide: bool) -> Source:
    """The source with float32 sums, or with float64 ones."""
    return Source(Path(__file__).with_name("residue_sums.cu"), (("WIDE", int(wide)),), (("residue", MEMORY),))


def _source(acc: Accumulator) -> Source | None:
    """That whose sums of one step are exact: ``STEP * 2^(align + 2)`` units at most."""
    most = STEP << (acc.align + 2)
    return source(most > 1 << 23) if most <= 1 << 52 else None


def _rows(x: Tensor) -> Tensor:
    codes = x if x.dtype is torch.uint8 else codes_of(x)
    return codes if codes.stride(1) == 1 else codes.contiguous()


def _table(x: Decoded) -> Tensor:
    """The value of every code, as float32 ``[256]``; NaN and infinities as zeros."""
    value = code_table(x.fmt, 0, special=False)[0].to(torch.float32)
    return torch.nn.functional.pad(value, (0, 256 - len(value)))


def _long(x: int) -> ctypes.c_longlong:
    return ctypes.c_longlong(x)
