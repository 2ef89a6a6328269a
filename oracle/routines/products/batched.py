"""Contracts of batched and grouped products of FlashInfer, vLLM and SGLang.

    bmm_fp8                               one scale for each operand, a product for every batch
    grouped_mm_fp8                        rows in runs, one factor for the whole output
    gemm_fp8_nt_groupwise                 block scales of ``a`` for one row or for 128
    group_gemm_fp8_nt_groupwise           rows in runs whose borders are multiples of 4, block scales
    batch_deepgemm_fp8_nt_groupwise       DeepGEMM's masked product under FlashInfer's name
    cutlass_blockwise_scaled_grouped_mm   rows in runs, block scales, starts and sizes as CUTLASS takes them
    cutlass_moe_mm                        the same with scales for tensors, or for tokens and channels

Scales are the logical ones, whatever layout a kernel wants them in. Sources: flashinfer-ai/flashinfer fb28d72,
flashinfer/gemm/gemm_base.py and grouped_mm/core.py; vLLM csrc/quantization/w8a8/cutlass/moe; sgl-kernel csrc/moe.
Not covered: FP4 and MX operands; sizes whose first two extents are exchanged (:mod:`oracle.routines.products.grouped`
says who does that; a kernel's wrapper undoes it).

NaN codes and scales stay NaN, and make NaN of every sum that they enter; placing them reads no value.
Sources: flashinfer-ai/flashinfer fb28d72; vLLM csrc/quantization/w8a8/cutlass/moe; sgl-kernel csrc/moe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, ShapeError
from oracle.routines.base import F32, FP8, INTEGERS, Call, Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.products.contract import (
    BLOCK_NUMERICS,
    BLOCKS,
    EXPERTS,
    OUT_DTYPES,
    PLAIN_ROLES,
    ROW_NUMERICS,
    A,
    Fp8GemmNt,
    ProductContract,
    scale_input,
    transposed,
)
from oracle.routines.products.grouped import GroupedMasked, Runs
from oracle.routines.traits import Kind
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.products import Part

NARROW = OUT_DTYPES[:2]
NARROW_OUT = OptionSpec(
    "out_dtype", None, (None, *NARROW), "dtype of the output; None: any of those of the output below is right"
)
PER_TENSOR = "sm90.chain.product"
"""What cuBLASLt computes with one scale for each operand (:data:`oracle.tensorcore.schedules.schedules` says where)."""
TENSOR_NUMERICS: Mapping[str, tuple[str, ...]] = {
    **ROW_NUMERICS,
    "sm90": (PER_TENSOR, *(name for name in ROW_NUMERICS["sm90"] if name != PER_TENSOR)),
}
OFFSETS = TensorSpec("expert_offsets", Kind.OFFSETS, INTEGERS, ("G",), "first row of each expert")
SIZES = TensorSpec("problem_sizes", Kind.COUNTS, INTEGERS, ("G", "3"), "rows, N and K of each expert's product")


@register
class BmmFp8(ProductContract):
    name = "bmm_fp8"
    summary = "a [G, M, K] times b [G, K, N] for every batch; one scale for each operand"
    source = "flashinfer.gemm.bmm_fp8 (cuBLASLt)"
    numerics = TENSOR_NUMERICS
    roles = {"a": "A", "b": "B", "a_scale": "A_scale", "b_scale": "B_scale"}
    laid_out = True
    out_dtypes = NARROW
    options = (NARROW_OUT,)
    inputs = (
        TensorSpec("A", Kind.CODES, FP8, ("G", "M", "K"), "activation codes"),
        TensorSpec("B", Kind.CODES, FP8, ("G", "K", "N"), "weight codes, logical [K, N] for every batch"),
        TensorSpec("A_scale", Kind.SCALES, F32, ("1",), "scale of A"),
        TensorSpec("B_scale", Kind.SCALES, F32, ("1",), "scale of B"),
    )

    def matrices(self, call: Call, role: str, tensor: Tensor) -> list[Tensor]:
        return list(tensor.mT if role == "b" else tensor) if tensor.dim() == 3 else [tensor[:, None]]

    def parts(self, inputs: Inputs) -> list[Part]:
        (groups, m, k), n = inputs["A"].shape, inputs["B"].shape[2]
        rows, scales = torch.arange(m, device=inputs["A"].device), (inputs["A_scale"][None], inputs["B_scale"][None])
        return [
            Part(ScaledProduct(inputs["A"][g], transposed(inputs["B"][g]), *scales, block=k, b_rows=n), rows + g * m, g)
            for g in range(groups)
        ]

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        return *inputs["A"].shape[:2], inputs["B"].shape[2]


@register
class GroupedMmFp8(Runs):
    """``m_indptr [G + 1]``: expert ``g`` has the rows from ``m_indptr[g]`` to ``m_indptr[g + 1]``, excluded."""

    name = "grouped_mm_fp8"
    summary = "rows sorted by expert, runs of any length; the sum times alpha"
    source = "flashinfer.grouped_mm.grouped_mm_fp8 (cuDNN)"
    numerics = TENSOR_NUMERICS
    roles = {"a": "a", "b": "b", "a_scale": "alpha"}
    groups = "m_indptr"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        A,
        EXPERTS,
        TensorSpec(
            "m_indptr", Kind.OFFSETS, INTEGERS, ("P",), "first row of each expert, 0 first, and the end of the last"
        ),
        TensorSpec("alpha", Kind.ALPHA, F32, ("1",), "factor of the whole output"),
    )
    unit: ClassVar[int] = 1

    def spans(self, inputs: Inputs) -> list[tuple[int, int]]:
        borders = inputs["m_indptr"].tolist()
        return list(zip(borders, borders[1:], strict=False))

    def extents(self, inputs: Inputs) -> dict[str, int]:
        groups, borders = inputs["b"].shape[0], inputs["m_indptr"].tolist()
        if len(borders) != groups + 1:
            raise ShapeError(f"m_indptr has {len(borders)} entries; {groups} experts take {groups + 1}")
        if odd := [border for border in borders if border % self.unit]:
            raise InputError(f"m_indptr holds {odd[0]}; every border is a multiple of {self.unit}")
        return super().extents(inputs)


@register
class GroupGemmGroupwise(GroupedMmFp8):
    name = "group_gemm_fp8_nt_groupwise"
    summary = "rows sorted by expert, borders of runs at multiples of 4; 1x128 and 128x128 scales"
    source = "flashinfer.gemm.group_gemm_fp8_nt_groupwise"
    numerics = BLOCK_NUMERICS
    roles = PLAIN_ROLES
    out_dtypes = NARROW
    options = (NARROW_OUT,)
    row_unit = unit = 4
    inputs = (
        A,
        scale_input("a_scale", BLOCKS[0], "M", "K", doc="logical 1x128 scales"),
        EXPERTS,
        scale_input("b_scale", BLOCKS[1], "G", "N", "K", doc="128x128 scales"),
        GroupedMmFp8.inputs[2],
    )


@register
class GemmGroupwise(Fp8GemmNt):
    """With ``a_scale [ceil(M/128), ceil(K/128)]`` a scale serves 128 rows of ``a``."""

    name = "gemm_fp8_nt_groupwise"
    probed = None
    summary = "a [M, K] times b [N, K] transposed; 1x128 or 128x128 scales on a, 128x128 scales on b"
    source = "flashinfer.gemm.gemm_fp8_nt_groupwise"
    out_dtypes = NARROW
    options = (NARROW_OUT,)
    inputs = (
        A,
        TensorSpec(
            "a_scale", Kind.SCALES, F32, ("M|M/128", "K/128"), "logical 1x128 or 128x128 scales", contiguous=True
        ),
        *Fp8GemmNt.inputs[2:],
    )

    def parts(self, inputs: Inputs) -> list[Part]:
        m, scale = inputs["a"].shape[0], inputs["a_scale"]
        scale = scale if scale.shape[0] == m else scale.repeat_interleave(128, dim=0)[:m]
        return super().parts({**inputs, "a_scale": scale})


@register
class BatchDeepGemm(GroupedMasked):
    name = "batch_deepgemm_fp8_nt_groupwise"
    source = "flashinfer.gemm.batch_deepgemm_fp8_nt_groupwise"


@register
class CutlassBlockwiseGrouped(Runs):
    """Expert ``g`` has the rows from ``expert_offsets[g]`` on, ``problem_sizes[g, 0]`` of them; ``problem_sizes[g,
    1:]`` are N and K of ``b``, of every expert alike. The offset of an expert without rows is from the end of the one
    before it to the start of the next."""

    name = "cutlass_blockwise_scaled_grouped_mm"
    summary = "rows sorted by expert, runs of any length, starts and sizes given; 1x128 and 128x128 scales"
    source = "vLLM csrc cutlass_blockwise_scaled_grouped_mm; sgl-kernel fp8_blockwise_scaled_grouped_mm and es_..."
    roles: ClassVar[Mapping[str, str]] = {"a": "a", "b": "b", "a_scale": "scales_a", "b_scale": "scales_b"}
    groups = "expert_offsets"
    out_dtypes = NARROW
    options = (NARROW_OUT,)
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        A,
        EXPERTS,
        scale_input("scales_a", BLOCKS[0], "M", "K", doc="logical 1x128 scales"),
        scale_input("scales_b", BLOCKS[1], "G", "N", "K", doc="128x128 scales"),
        OFFSETS,
        SIZES,
    )

    def spans(self, inputs: Inputs) -> list[tuple[int, int]]:
        starts, counts = inputs["expert_offsets"].tolist(), inputs["problem_sizes"][:, 0].tolist()
        return [(start, start + count) for start, count in zip(starts, counts, strict=True)]

    def refuse(self, inputs: Inputs, options: Options) -> None:
        bound = self.extents(inputs)
        due = bound["N"], bound["K"]
        if odd := [sizes for sizes in inputs["problem_sizes"].tolist() if tuple(sizes[1:]) != due]:
            raise ShapeError(f"problem_sizes holds {odd[0]}; N and K are {due[0]} and {due[1]}")


@register
class CutlassMoeMm(CutlassBlockwiseGrouped):
    name = "cutlass_moe_mm"
    summary = "rows sorted by expert, runs of any length, starts and sizes given; scales as vectors or of tensors"
    source = "vLLM csrc/quantization/w8a8/cutlass/moe (cutlass_moe_mm)"
    numerics = ROW_NUMERICS
    inputs = (
        *CutlassBlockwiseGrouped.inputs[:2],
        TensorSpec(
            "scales_a", Kind.SCALES, F32, ("M|1", "1"), "one scale for each row, or one for all", contiguous=True
        ),
        TensorSpec(
            "scales_b",
            Kind.SCALES,
            F32,
            ("G", "N|1"),
            "one scale for each channel, or for each expert",
            contiguous=True,
        ),
        OFFSETS,
        SIZES,
    )
