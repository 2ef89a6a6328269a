"""Contracts of the grouped products of MoE layers: rows of ``a`` meet the weight of their expert.

Sources: DeepGEMM @54e2261; torch._scaled_grouped_mm; vLLM csrc cutlass_moe_mm.

NaN codes and scales stay NaN, and make NaN of every sum that they enter; placing them reads no value.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError
from oracle.routines.base import F32, FP8, INTEGERS, Inputs, Options, TensorSpec, register
from oracle.routines.products.contract import (
    BLOCKS,
    EXPERTS,
    ROW_NUMERICS,
    A,
    ProductContract,
    block_scaled,
    scale_input,
)
from oracle.routines.products.traits import BY_ENDS
from oracle.routines.traits import Kind
from oracle.truth.gemm import ScaledProduct, take_rows
from oracle.verdict.products import Part

RUN = 128  # rows of an expert are aligned to this in DeepGEMM (get_mk_alignment_for_contiguous_layout)


@register
class GroupedContiguous(ProductContract):
    """Row ``r`` is multiplied by ``b[m_indices[r]]``; -1 marks a padding row, whose output may hold anything. Ids are
    below ``G`` and need not be sorted; an expert may have no row, but one row is real. DeepGEMM aligns the rows of an
    expert to 128 (``get_mk_alignment_for_contiguous_layout``); here any row may belong to any expert.
    """

    name = "m_grouped_fp8_gemm_nt_contiguous"
    summary = "rows sorted by expert in one matrix; -1 marks padding rows"
    source = "DeepGEMM m_grouped_fp8_gemm_nt_contiguous"
    groups = "m_indices"
    row_unit = RUN
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        A,
        scale_input("a_scale", BLOCKS[0], "M", "K", doc="logical 1x128 scales"),
        EXPERTS,
        scale_input("b_scale", BLOCKS[1], "G", "N", "K", doc="128x128 scales"),
        TensorSpec("m_indices", Kind.IDS, INTEGERS, ("M",), "expert of each row, -1 for padding"),
    )

    def parts(self, inputs: Inputs) -> list[Part]:
        parts = []
        for g in torch.unique(inputs["m_indices"]).tolist():
            if g >= 0:
                rows = torch.nonzero(inputs["m_indices"] == g)[:, 0]
                a, scale = take_rows(inputs["a"], rows), inputs["a_scale"].index_select(0, rows)
                parts.append(Part(block_scaled(a, inputs["b"][g], scale, inputs["b_scale"][g], self.scaling), rows, g))
        return parts

    def refuse(self, inputs: Inputs, options: Options) -> None:
        bound = self.extents(inputs)
        indices = inputs["m_indices"]
        low, high = int(indices.min()), int(indices.max())
        if low < -1 or high >= bound["G"]:
            bad = low if low < -1 else high
            raise InputError(f"m_indices holds {bad}; experts are 0..{bound['G'] - 1}, padding -1")
        if high < 0:
            raise InputError("m_indices holds only -1: every row is padding and there is nothing to judge")


@register
class GroupedMasked(ProductContract):
    """The first ``masked_m[g]`` rows of group ``g`` (0 to M) are real. Rows past them hold anything, NaN too, in ``a``,
    ``a_scale`` and the output; not all counts are 0."""

    name = "fp8_m_grouped_gemm_nt_masked"
    summary = "one matrix for each expert, of which the first masked_m[g] rows are real"
    source = "DeepGEMM fp8_m_grouped_gemm_nt_masked"
    groups = "masked_m"
    inputs = (
        TensorSpec("a", Kind.CODES, FP8, ("G", "M", "K"), "activation codes"),
        scale_input("a_scale", BLOCKS[0], "G", "M", "K", doc="logical 1x128 scales"),
        EXPERTS,
        scale_input("b_scale", BLOCKS[1], "G", "N", "K", doc="128x128 scales"),
        TensorSpec("masked_m", Kind.COUNTS, INTEGERS, ("G",), "number of real rows of each group"),
    )

    def parts(self, inputs: Inputs) -> list[Part]:
        m = inputs["a"].shape[1]
        parts = []
        for g, count in enumerate(inputs["masked_m"].tolist()):
            if count:
                rows = torch.arange(g * m, g * m + count, device=inputs["a"].device)
                a, scale = inputs["a"][g, :count], inputs["a_scale"][g, :count].contiguous()
                parts.append(Part(block_scaled(a, inputs["b"][g], scale, inputs["b_scale"][g], self.scaling), rows, g))
        return parts

    def refuse(self, inputs: Inputs, options: Options) -> None:
        bound = self.extents(inputs)
        counts = inputs["masked_m"].tolist()
        bad = [c for c in counts if not 0 <= c <= bound["M"]]
        if bad:
            raise InputError(f"masked_m holds {bad[0]}; a group has 0..{bound['M']} real rows")
        if not any(counts):
            raise InputError("masked_m is all zero: no row is real and there is nothing to judge")


SEEN = "sm90.chain.row_then_col"
"""torch._scaled_grouped_mm on an H200: one chain over K, then ``(sum * scale_a) * scale_b``."""


class Runs(ProductContract):
    """Rows of ``a [M, K]`` in runs of any length, an expert each: a run may be empty, of one row, and start anywhere.
    Runs begin at row 0 or later, end at M or before, and follow one another in the order of the experts; one has a row.
    Rows of no run may hold anything, in ``a``, its scales and the output."""

    @abstractmethod
    def spans(self, inputs: Inputs) -> list[tuple[int, int]]:
        """First row and end of every expert's run."""

    def product(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> ScaledProduct:
        """Of one run, codes ``a`` ``[m, K]`` and ``b`` ``[N, K]`` (FP8): scales in blocks, ``a_scale`` ``[m, B]`` and
        ``b_scale`` ``[blocks, B]``, or, of ``b`` as a vector, for rows and channels (or one for all of them)."""
        if b_scale.dim() == 2:
            return block_scaled(a, b, a_scale, b_scale, self.scaling)
        rows = b.shape[0] if b_scale.numel() == 1 else 1
        return ScaledProduct(a, b, a_scale.reshape(-1, 1), b_scale[:, None], block=a.shape[1], b_rows=rows)

    def operand(self, inputs: Inputs, g: int) -> Tensor:
        """Codes ``[N, K]`` of an expert's weight, of its dtype."""
        return inputs[self.roles["b"]][g]

    def parts(self, inputs: Inputs) -> list[Part]:
        parts = []
        one = torch.ones(1, 1, dtype=torch.float32, device=inputs["a"].device)
        for g, (start, end) in enumerate(self.spans(inputs)):
            if end > start:
                rows = torch.arange(start, end, device=inputs["a"].device)
                a_scale = inputs[self.roles["a_scale"]]
                a_scale = a_scale if a_scale.numel() == 1 else a_scale[start:end]
                b_scale = inputs[self.roles["b_scale"]][g] if "b_scale" in self.roles else one[0]
                product = self.product(take_rows(inputs["a"], rows), self.operand(inputs, g), a_scale, b_scale)
                parts.append(Part(product, rows, g))
        return parts

    def refuse(self, inputs: Inputs, options: Options) -> None:
        bound = self.extents(inputs)
        spans, last = self.spans(inputs), 0
        for start, end in spans:
            if not last <= start <= end <= bound["M"]:
                raise InputError(
                    f"{self.groups} gives the runs {spans}; they run from 0 to at most {bound['M']} and never back"
                )
            last = end
        if all(start == end for start, end in spans):
            raise InputError(f"{self.groups} gives empty runs only: no row is real and there is nothing to judge")


@register
class ScaledGroupedMm(Runs):
    """``offsets[g]`` is the row behind the last of expert ``g``; expert 0 begins at row 0, each other one where the one
    before it ends. Scales are applied after the whole sum."""

    name = "scaled_grouped_mm"
    traits = frozenset({BY_ENDS})
    summary = "rows sorted by expert, runs of any length; (sum * scale_a) * scale_b with a scale per token and channel"
    source = "torch._scaled_grouped_mm; vLLM csrc cutlass_moe_mm"
    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **ROW_NUMERICS,
        "sm90": (SEEN, *(name for name in ROW_NUMERICS["sm90"] if name != SEEN)),
    }
    roles = {"a": "a", "b": "b", "a_scale": "scale_a", "b_scale": "scale_b"}
    groups = "offsets"
    inputs = (
        TensorSpec("a", Kind.CODES, FP8, ("M", "K"), "activation codes, rows sorted by expert"),
        EXPERTS,
        TensorSpec("scale_a", Kind.SCALES, F32, ("M", "1"), "one scale for each row", contiguous=True),
        TensorSpec("scale_b", Kind.SCALES, F32, ("G", "N"), "one scale for each channel", contiguous=True),
        TensorSpec("offsets", Kind.OFFSETS, INTEGERS, ("G",), "where the rows of each expert end"),
    )

    def spans(self, inputs: Inputs) -> list[tuple[int, int]]:
        ends = inputs["offsets"].tolist()
        return list(zip([0, *ends], ends, strict=False))
