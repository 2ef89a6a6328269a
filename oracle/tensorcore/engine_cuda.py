"""The CUDA engine of :func:`oracle.tensorcore.predict.predict_product`: two kernels, the same bits.

Operands are unpacked in chunks of rows and columns, and a kernel sums and promotes. Memory beyond operands and result
stays below 1 GiB for any shape.
NaN and infinities: rows of ``a`` and columns of ``b`` that hold one are computed by the definition.
Source: derived from :mod:`oracle.tensorcore.fused`, whose bits it gives.

Fused sums of E4M3 operands are computed by CUDA C++ (:mod:`oracle.tensorcore.cuda_sums`), which scales and stores too;
those of wider exponents by Triton (:mod:`oracle.tensorcore.triton_fused`), slower, with epilogue and store as torch
operations. ``FP8_ORACLE_CUDA_SUMS=0`` in the environment leaves all of them to Triton.

With ``TRITON_INTERPRET=1`` in the environment before triton is imported, the Triton kernel runs on CPU tensors.
Not covered, and answered by :func:`supports`: operands wider than 8 bits, scales inside the instruction, and what the
CPU engine does not cover either. Triton is optional: without it nothing is supported here.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from oracle.numbers.formats import of_dtype
from oracle.tensorcore import cuda_sums
from oracle.tensorcore.fused import float32_scale
from oracle.tensorcore.instructions import Instruction, Sum
from oracle.tensorcore.packing import INSIDE, OF_TOTAL, PROMOTE, UNROLL, Packed, code_table, plan, scale_mode, supported
from oracle.tensorcore.predict import finish, predict_product, store
from oracle.tensorcore.schedules import Promotion, Scales, Schedule
from oracle.truth.gemm import ScaledProduct

BM, BN = 64, 128  # output tile of a program: fewer rows or columns than its 256 threads, so vectors stay in registers
ZERO_EXPONENT = -64  # of a zero operand: any sum with it lies below every exponent of two nonzero ones
CHUNK = 1 << 25  # packed elements of one operand held at once: 160 MiB
CHUNK_RESULT = 1 << 23  # elements of one float32 chunk of the result; the epilogue takes a few float64 copies


def supports(product: ScaledProduct, schedule: Schedule) -> bool:
    """Whether this engine computes ``product`` by ``schedule``."""
    where = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    return (
        importlib.util.find_spec("triton") is not None
        and product.a.device.type == where
        and product.a.element_size() == product.b.element_size() == 1
        and schedule.scales is not Scales.OPERANDS
        and schedule.promotion is not Promotion.RESCALE
        and schedule.accumulator is torch.float32
        and supported(product, schedule)
        and schedule.instruction.align_bits is not None
        and schedule.instruction.align_bits + 2 <= 30  # a scaled product, below 2^(t+2), converts to int32
    )


def predict(product: ScaledProduct, schedule: Schedule, *, out_dtype: torch.dtype) -> Tensor:
    """The bits of :func:`~oracle.tensorcore.predict.predict_product`, ``[M, N]`` of ``out_dtype``."""
    out = torch.empty((product.M, product.N), dtype=out_dtype, device=product.a.device)
    order = plan(product, schedule)
    kernels = cuda_sums.kernels(product, schedule, order.group)
    if kernels is not None:
        kernels.store(product, schedule, *_uniform(order, product.a.device), out)
    else:
        for rows, columns, part, acc in sums(product, schedule):
            out[rows, columns] = store(finish(acc, part, schedule), out_dtype)
    for side, dim in ((product.left, 0), (product.right, 1)):
        if not side.finite:
            index = torch.nonzero(~side.finite_rows)[:, 0]
            part = product.take(index) if dim == 0 else product.take_columns(index)
            out.index_copy_(dim, index, predict_product(part, schedule, out_dtype=out_dtype, engine="torch"))
    return out


def decaying(product: ScaledProduct, schedule: Schedule) -> Tensor | None:
    """Float32 ``[M, N]``: the chains of all K blocks, of which each is added to ``fl(total a_scale)`` with the scale of
    its row and block; None where no kernel gives them, or a code is NaN. ``b_scale`` is not read."""
    order = plan(product, schedule)
    kernels = cuda_sums.kernels(product, schedule, order.group, OF_TOTAL)
    if kernels is None or not (product.left.finite and product.right.finite):
        return None
    out = torch.empty((product.M, product.N), dtype=torch.float32, device=product.a.device)
    kernels.store(product, schedule, *_uniform(order, product.a.device), out)
    return out


def sums(product: ScaledProduct, schedule: Schedule) -> Iterator[tuple[slice, slice, ScaledProduct, Tensor]]:
    """Rows, columns, the product restricted to them, and its promoted sums before the epilogue, float32 ``[rows,
    columns]``."""
    order, mode = plan(product, schedule), scale_mode(schedule)
    assert mode != INSIDE
    source, tiles, length, _ = _uniform(order, product.a.device)
    longest = max(BN, CHUNK // max(1, source.numel()))
    width = min(product.N, longest // BN * BN)
    height = min(product.M, longest // BM * BM, max(BM, CHUNK_RESULT // width // BM * BM))
    for j in range(0, product.N, width):
        columns = slice(j, min(j + width, product.N))
        right = product.columns(columns.start, columns.stop)
        b = _packed(right.b, source, BN)
        sb = _padded(float32_scale(right.b_scale).t(), BN)
        for i in range(0, product.M, height):
            rows = slice(i, min(i + height, product.M))
            part = right.rows(rows.start, rows.stop)
            a = _packed(part.a, source, BM)
            sa = _padded(float32_scale(part.a_scale).expand(part.M, -1).t(), BM)
            acc = _launch(a, sa, b, sb, tiles, length, order.group, mode, schedule.instruction)
            yield rows, columns, part, acc[: part.M, : part.N]


def _launch(
    a: tuple[Tensor, Tensor],
    sa: Tensor,
    b: tuple[Tensor, Tensor],
    sb: Tensor,
    tiles: Tensor,
    length: int,
    group: int,
    mode: int,
    instruction: Instruction,
) -> Tensor:
    from oracle.tensorcore.triton_fused import fused  # triton is optional

    rows, columns = a[0].shape[1], b[0].shape[1]
    out = torch.empty((rows, columns), dtype=torch.float32, device=sa.device)
    assert instruction.align_bits is not None
    # else the sum fits int32 and, before it is cut to ``to`` bits, float32
    wide = (instruction.group + 1) << (instruction.align_bits + 2) > 1 << 24
    fused[(rows // BM, columns // BN)](
        a[0],
        a[1],
        sa,
        b[0],
        b[1],
        sb,
        tiles,
        out,
        rows,
        columns,
        tiles.shape[0],
        LENGTH=length,
        GROUP=group,
        T=instruction.align_bits,
        TO=instruction.out_bits,
        MODE=mode,
        FOLDS=instruction.sum is Sum.FUSED_THEN_ADD,
        WIDE=wide,
        BM=BM,
        BN=BN,
        UNROLL=UNROLL,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return out


@lru_cache(maxsize=64)
def _uniform(order: Packed, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Source int32, ``(scale block, flags)`` int32 and length of tiles of one length, and how many promote.

    Padding leaves a chain as it is.

    One answer for one ``order``, which :func:`~oracle.tensorcore.packing.plan` keeps; do not write to it.
    """
    starts, ends = order.tiles[:, 0].tolist(), order.tiles[:, 1].tolist()
    length = max((e - s for s, e in zip(starts, ends, strict=True)), default=order.group)
    source = torch.full((len(starts), length), -1, dtype=torch.int64, device="cpu")
    for row, s, e in zip(source, starts, ends, strict=True):
        row[: e - s] = order.source[s:e]
    tiles = order.tiles[:, 2:].to(torch.int32).contiguous()
    promotions = int((tiles[:, 1] & PROMOTE).count_nonzero())
    return source.reshape(-1).to(torch.int32).to(device), tiles.to(device), length, promotions


def _packed(x: Tensor, source: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """Values float32 and exponents int8 of ``x [R, K]`` as ``[Kp, R']``, R padded; NaN and infinities as zeros."""
    value, exponent = (table.to(x.device) for table in code_table(of_dtype(x.dtype), ZERO_EXPONENT, special=False))
    exponent = exponent.to(torch.int8)
    codes = x.view(torch.uint8).t()
    zero = int((value == 0).nonzero()[0])
    rows = -(-x.shape[0] // multiple) * multiple
    packed = torch.full((source.numel(), rows), zero, dtype=torch.uint8, device=x.device)
    packed[:, : x.shape[0]] = torch.where(source[:, None] >= 0, codes[source.clamp(min=0)], zero)
    table = value.to(torch.float32)
    values = torch.empty(packed.shape, dtype=torch.float32, device=x.device)
    exponents = torch.empty(packed.shape, dtype=torch.int8, device=x.device)
    step = max(1, (1 << 22) // rows)
    for k in range(0, packed.shape[0], step):  # int32 indices a slice at a time
        index = packed[k : k + step].int()
        values[k : k + step], exponents[k : k + step] = table[index], exponent[index]
    return values, exponents


def _padded(scale: Tensor, multiple: int) -> Tensor:
    """``[B, R]`` with R padded to a multiple, contiguous."""
    return torch.nn.functional.pad(scale, (0, -scale.shape[1] % multiple)).contiguous()
