"""Contracts of the layouts of MoE weights: order of the halves, row orders, padding, and the whole preparation.

Right or wrong bit by bit, as in :mod:`oracle.routines.layouts.contract`. Not covered: shuffled scale factors,
BlockMajorK.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from oracle.routines.base import F32, Call, Inputs, Options, OptionSpec, TensorSpec, positive, register
from oracle.routines.layouts.contract import ONE_BYTE, LayoutContract
from oracle.truth import layout
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.sets import Bits, Found, Sets, bits_of

WEIGHT = (*ONE_BYTE, torch.bfloat16, torch.float16, torch.float32)


# The function, which has the contract's name; what it does, source, input.
for _function, _summary, _source, _input in (
    (layout.swap_w13_to_w31, "the gate and up halves exchanged", "vLLM flashinfer_utils.swap_w13_to_w31",
     TensorSpec("x", WEIGHT, None, "[..., 2 I, H], or block scales [..., 2 B, C]")),
    (layout.reorder_rows_for_gated_act_gemm, "gate and up rows alternating", "TensorRT-LLM reorderRowsForGatedActGemm",
     TensorSpec("w", WEIGHT, ("M", "K"), "one expert's gate rows, then its up rows")),
):  # fmt: skip
    _fields = {"summary": _summary, "source": _source, "inputs": (_input,), "function": staticmethod(_function)}
    register(type(_function.__name__, (LayoutContract,), {"name": _function.__name__, **_fields}))


@register
class ShuffleMatrixA(LayoutContract):
    name = "shuffle_matrix_a"
    summary = "rows in the order of the transposed MMA's fragments"
    source = "TensorRT-LLM shuffleMatrixA"
    inputs = (TensorSpec("w", WEIGHT, ("M", "K"), "one expert's weight"),)
    options = (OptionSpec("epilogue_tile_m", 128, None, "height of the epilogue's tile"),)

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {"out": layout.shuffle_matrix_a(inputs["w"], positive(options, "epilogue_tile_m"))}


@register
class RotateWeights(LayoutContract):
    name = "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe"
    summary = "both expert weights in the row order of TensorRT-LLM's per-tensor FP8 kernel"
    source = "vLLM flashinfer_utils.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe"
    inputs = (
        TensorSpec("gemm1_weights", ONE_BYTE, ("E", "R", "H"), "gate rows, then up rows"),
        TensorSpec("gemm2_weights", ONE_BYTE, ("E", "H", "I"), "down projection"),
    )
    options = (OptionSpec("is_gated", True, (True, False), "gate and up rows are interleaved first"),)
    returns = ("gemm1_weights", "gemm2_weights")
    function = staticmethod(layout.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe)


@register
class AlignMoeWeights(LayoutContract):
    """A failure whose bits are those of the published placement says so."""

    name = "align_fp8_moe_weights_for_fi"
    summary = "the intermediate size padded with zeros to a multiple of 16, gate and up each in its place"
    source = "vLLM flashinfer_utils.align_fp8_moe_weights_for_fi, with the halves placed apart"
    inputs = (
        TensorSpec("w13", WEIGHT, ("E", "R", "H"), "gate rows, then up rows"),
        TensorSpec("w2", WEIGHT, ("E", "H", "I"), "down projection"),
    )
    options = (OptionSpec("is_act_and_mul", True, (True, False), "w13 has a gate and an up half"),)
    returns = ("w13", "w2")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        w13, w2, _ = layout.align_fp8_moe_weights_for_fi(inputs["w13"], inputs["w2"], bool(options["is_act_and_mul"]))
        return {"w13": w13, "w2": w2}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [PublishedPlacement(call.truth, self.why_mistrust(call.inputs), call=call)]


@dataclass(frozen=True)
class PublishedPlacement(Bits):
    """The same bits; a failure with the bits of the published routine is named."""

    call: Call = field(kw_only=True)

    def judge(self, found: Found) -> Verdict:
        judged = super().judge(found)
        if judged.status is not Status.FAILED:
            return judged
        gated = bool(self.call.resolved["is_act_and_mul"])
        w13, w2 = self.call.inputs["w13"], self.call.inputs["w2"]
        published = layout.align_fp8_moe_weights_for_fi_published(w13, w2, gated)[:2]
        pairs = zip((found["w13"], found["w2"]), published, strict=True)
        if all(torch.equal(bits_of(x), bits_of(y)) for x, y in pairs):
            fault = "up half of gated weights left at the unpadded offset"
            return replace(judged, explained_by=(fault,), summary=f"{judged.summary}; every bit is that of: {fault}")
        return judged


@register
class PrepareMoeLayer(LayoutContract):
    """The scales that a per-tensor layer registers are :class:`oracle.routines.layouts.shards.RegisterScales`."""

    name = "prepare_fp8_moe_layer_for_fi"
    section = "MoE"
    summary = "pad (per tensor only), swap w13 to w31 (block scales too), rotate for TensorRT-LLM (per tensor only)"
    source = "vLLM flashinfer_utils.prepare_fp8_moe_layer_for_fi, with the halves placed apart"
    inputs = (
        TensorSpec("w13", ONE_BYTE, ("E", "R", "H"), "gate rows, then up rows"),
        TensorSpec("w2", ONE_BYTE, ("E", "H", "I"), "down projection"),
        TensorSpec("w13_scale", F32, None, "[E], or block scales [E, R/128, H/128]"),
        TensorSpec("w2_scale", F32, None, "[E], or block scales [E, H/128, I/128]"),
    )
    options = (
        OptionSpec("block_quant", False, (False, True), "128x128 block scales"),
        OptionSpec("is_act_and_mul", True, (True, False), "w13 has a gate and an up half"),
        OptionSpec("is_trtllm", False, (False, True), "TensorRT-LLM's kernel, else CUTLASS"),
    )
    returns = ("w13", "w2", "w13_scale", "w2_scale")
    function = staticmethod(layout.prepare_fp8_moe_layer_for_fi)
