"""Contracts of NVFP4 under a scale of each row, and of FP4 of FP8 values.

*Per token.* ``p = amax of the row * a_global_sf`` (``a_global_sf`` about 1/2688) is published beside codes and scales,
``x ~= value(q) * e4m3(byte) * p``. One multiplication or two divisions make it, so it lies within four roundings; codes
and scales are judged under the ``p`` that was published. A row of zeros has scales 0 and codes 0, and any of the values
of ``p`` that libraries give.

*FP8 input.* ``x8`` stands for ``x8 amax / 448``: it is dequantised to ``h = float16(x8 * (6 / global_scale))`` by an
approximate reciprocal, within three roundings and so to one float16 value or two, and ``h`` is quantised. Under E8M0
scales there is no global scale: ``x8`` itself is quantised.

Sources: FlashInfer quantization.cuh nvfp4QuantAndPerTokenScaleKernel, quantization_utils.cuh cvt_warp_fp8_to_fp4
@fb28d7242; TransformerEngine row-scaled NVFP4. Not covered: expanded_idx_to_permuted_idx.

NaN and infinities are as the recipe has them; bytes that are only moved keep them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oracle.bounds.quantiser import APPROXIMATE_WIDTH, U
from oracle.numbers import mx_recipes
from oracle.numbers.formats import FP32, decode
from oracle.numbers.quantize import WIDE, Ends, Prepared, prepare
from oracle.numbers.recipes import Recipe
from oracle.numbers.rounding import Overflow, Rounding, f32, to_dtype
from oracle.routines.base import E4M3, F32, Call, Inputs, Options, Out, TensorSpec, register
from oracle.routines.mx.contract import (
    GLOBAL,
    LAYOUT,
    BlockQuantiser,
    BlockSets,
    Nvfp4Quantize,
)
from oracle.routines.quantisers.verdict import judge_quantised
from oracle.routines.traits import Kind
from oracle.verdict.compare import Admissible, Verdict, compare, verdict
from oracle.verdict.sets import Found, Sets, worst_of

ROW_SCALE = "row_scale"
ZERO_ROW = (0.0, 2.0**-128, 1.0)
"""The scale of a row of zeros: 0 (fast), 1/FLT_MAX (exact), 1 (a guarded encode scale)."""


def row_scales(x: Tensor, a_global_sf: Tensor) -> Tensor:
    """``RN(amax of the row * a_global_sf)``, float64 ``[M]``, of ``x`` ``[M, K]`` and ``a_global_sf`` ``[1]``; NaN
    elements are left out."""
    magnitude = decode(x).abs()
    return f32(torch.where(torch.isnan(magnitude), 0.0, magnitude).amax(dim=1) * decode(a_global_sf))


@register
class Nvfp4QuantizePerToken(Nvfp4Quantize):
    """``p = amax of the row * global_scale`` is returned as ``row_scale``: ``x ~= value(q) * e4m3(byte) * p``. One
    multiplication or two divisions make it, so it lies within four roundings; codes and scales are judged under the
    ``p`` that was published. NaN elements are left out of the amax of a row. A row of zeros has scales 0 and codes 0,
    and a ``p`` of 0, 2^-128 or 1."""

    name = "nvfp4_quantize_per_token"
    gpu = False  # its libraries compile it for sm100 and later alone, and no capture is of one
    summary = "NVFP4 under a float32 scale of each row, which is returned as well"
    source = "FlashInfer nvfp4_quantize(per_token_activation=True)"
    inputs = (
        TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "values to quantise, K a multiple of 16"),
        TensorSpec(
            "global_scale", Kind.SCALES, F32, ("1",), "about 1/2688; times the amax of a row it is the row's scale"
        ),
    )
    options = (LAYOUT,)
    returns = ("q", "scale", ROW_SCALE)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return (mx_recipes.FLASHINFER_NVFP4_INVERSED,)

    def prepared_of(self, inputs: Inputs, options: Options) -> Prepared:
        return self.under(inputs, row_scales(inputs["x"], inputs["global_scale"]))

    def under(self, inputs: Inputs, rows: Tensor) -> Prepared:
        """The values to quantise under these scales ``rows`` ``[M]``, float64, of rows."""
        scale = to_dtype(rows, torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
        return prepare(inputs["x"], global_scale=scale)

    def outputs(self, call: Call) -> dict[str, Out]:
        return super().outputs(call) | {ROW_SCALE: Out((call.inputs["x"].shape[0],), F32)}

    def published(self, outputs: Mapping[str, Tensor], call: Call) -> dict[str, Tensor]:
        rows = row_scales(call.inputs["x"], call.inputs["global_scale"])
        stored = to_dtype(rows, torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
        return super().published(outputs, call) | {ROW_SCALE: stored}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [PerTokenSets(self, call, self.recipes(call, numerics))]

    def refused(
        self, call: Call, outputs: Mapping[str, Tensor], right: Mapping[str, Tensor]
    ) -> dict[str, Tensor] | None:
        bad = super().refused(call, outputs, right)
        return None if bad is None else bad | {ROW_SCALE: outputs[ROW_SCALE] != right[ROW_SCALE]}


class PerTokenSets(BlockSets):
    """Row scales within four roundings of theirs, then codes and scales under those that were published."""

    def judge(self, outputs: Found) -> Verdict:
        contract, inputs = self.contract, self.call.inputs
        assert isinstance(contract, Nvfp4QuantizePerToken)
        due, scales = row_scales(inputs["x"], inputs["global_scale"]), decode(outputs[ROW_SCALE])
        slack = torch.where(due < 2 * FP32.min_normal, FP32.min_normal, 0.0)
        low, high = due * (1 - 4 * U) - slack, due * (1 + 4 * U) + slack
        zero = sum((scales == value).to(torch.float64) for value in ZERO_ROW) > 0
        low, high = (torch.where((due == 0) & zero, scales, edge) for edge in (low.clamp(min=0.0), high))
        compared = compare(outputs[ROW_SCALE], Admissible(low, high, due), output=ROW_SCALE)
        rows = verdict(compared, basis="the amax of a row times global_scale, within four roundings")
        if rows.status.is_failure:
            return rows
        q, scale = contract.split(outputs, self.call, self.recipes)
        judged = judge_quantised(contract.under(inputs, scales), q, scale, self.recipes)
        return worst_of([judged if judged.status.is_failure else self.with_padding(judged, outputs), rows])


class OfFp8Quantiser(BlockQuantiser):
    """A quantiser of E4M3 values."""

    packed = True
    gpu = False  # its libraries compile it for sm100 and later alone, and no capture is of one

    def prepared_of(self, inputs: Inputs, options: Options) -> Prepared:
        x, *ends = halves(inputs["x"], inputs.get("global_scale"))
        scale = inputs.get("global_scale")
        return prepare(x, global_scale=scale, ends=Ends(ends[0], ends[1]))


def halves(x8: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``float16(x8 * (6 / global_scale))`` of ``x8`` ``[M, K]``, float8_e4m3fn, and ``global_scale`` ``[1]``, and the
    least and the largest value that an approximate reciprocal and two rounded products can make of it: three of float16
    ``[M, K]``; ``x8`` itself without a global scale."""
    values = decode(x8)
    if global_scale is None:
        h = to_dtype(values, torch.float16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
        return h, h, h
    g = decode(global_scale)
    factor, own, width = 6.0 / g, f32(6.0 * f32(torch.ones_like(g) / g)), APPROXIMATE_WIDTH
    exact = f32(values * own), values * factor * (1 - width), values * factor * (1 + width)
    low_high = (exact[0], torch.minimum(exact[1], exact[2]), torch.maximum(exact[1], exact[2]))
    ends = [to_dtype(y, torch.float16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF) for y in low_high]
    return ends[0], ends[1], ends[2]


@register
class Nvfp4QuantizeOfFp8(OfFp8Quantiser, Nvfp4Quantize):
    """``x8`` is dequantised to ``h = float16(x8 * (6 / global_scale))`` by an approximate reciprocal, within three
    roundings and so to one float16 value or two, and ``h`` is quantised under ``global_scale``."""

    name = "nvfp4_quantize_of_fp8"
    summary = "NVFP4 of E4M3 values x8, which stand for x8 amax / 448"
    source = "FlashInfer fp4_quantize of a float8_e4m3fn tensor; quantization_utils.cuh cvt_warp_fp8_to_fp4"
    inputs = (TensorSpec("x", Kind.VALUES, E4M3, ("M", "K"), "values times 448/amax, K a multiple of 16"), GLOBAL)
    options = (LAYOUT,)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return mx_recipes.FLASHINFER_NVFP4_EXACT, mx_recipes.FLASHINFER_NVFP4_OF_FP8


@register
class Mxfp4QuantizeOfFp8(OfFp8Quantiser):
    """FlashInfer's kernel without a global scale quantises 6 times the values."""

    name = "mxfp4_quantize_of_fp8"
    summary = "MXFP4 of E4M3 values"
    source = "FlashInfer fp4_quantize(sf_vec_size=32, sf_use_ue8m0=True) of a float8_e4m3fn tensor"
    inputs = (TensorSpec("x", Kind.VALUES, E4M3, ("M", "K"), "values to quantise, K a multiple of 32"),)
    options = (LAYOUT,)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return mx_recipes.FLASHINFER_MXFP4, mx_recipes.FLASHINFER_CUTE_MXFP4
