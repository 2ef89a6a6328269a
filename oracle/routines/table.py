"""The routines of the suite, section by section, and where each of its legs is looked for.

A table and nothing else. ``contract`` names the contract that judges a routine when it is not the routine's own name;
``production`` the attribute of the production package; ``gpu`` says that a GPU library computes it, so that a capture
is due. Not covered: whether a leg exists (:mod:`oracle.harness.coverage`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Routine:
    """One row: its public name and section; see the module for the rest."""

    name: str
    section: str
    gpu: bool = False
    contract: str = ""
    production: str = ""

    @property
    def judged_as(self) -> str:
        return self.contract or self.name

    @property
    def attribute(self) -> str:
        return self.production or self.name


def _section(name: str, *plain: str, gpu: tuple[str, ...] = ()) -> tuple[Routine, ...]:
    return tuple(Routine(routine, name, routine in gpu) for routine in plain)


QUANTISATION = _section(
    "Quantisation",
    *("scaled_fp8_quant", "per_token_group_quant_fp8", "per_block_cast_to_fp8", "per_token_cast_to_fp8"),
    *("per_channel_cast_to_fp8", "flashinfer_quantize_1x128", "flashinfer_quantize_128x128", "per_tensor_dequantize"),
    *("requantize_with_max_scale", "convert_to_channelwise", "all_close_1d", "normalize_e4m3fn_to_e4m3fnuz"),
    "ceil_to_ue8m0",
    gpu=("scaled_fp8_quant", "per_token_group_quant_fp8"),
)
LAYOUT = (
    *_section(
        "Padding and layout",
        *("align", "ceil_div", "get_col_major_tma_aligned_tensor", "get_mn_major_tma_aligned_packed_ue8m0_tensor"),
        *("transform_sf_into_required_layout", "align_fp8_moe_weights_for_fi", "swap_w13_to_w31"),
        *("reorder_rows_for_gated_act_gemm", "shuffle_matrix_a", "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe"),
        *("calculate_tile_tokens_dim", "swizzle_scale"),
        gpu=("get_col_major_tma_aligned_tensor", "get_mn_major_tma_aligned_packed_ue8m0_tensor"),
    ),
    Routine("output padding", "Padding and layout", contract="Fp8LinearOp", production="Fp8LinearOp"),
)
GEMM = (
    *_section(
        "GEMM",
        *("fp8_gemm_nt", "fp8_blockscale_gemm_sm90", "m_grouped_fp8_gemm_nt_contiguous"),
        *("fp8_m_grouped_gemm_nt_masked", "scaled_grouped_mm", "cutlass_scaled_mm", "cutlass_w8a8_scaled_mm"),
        *("torch_per_tensor_w8a8_scaled_mm", "torch_per_token_w8a8_scaled_mm", "torch_channelwise_w8a8_scaled_mm"),
        *("rocm_per_tensor_w8a8_scaled_mm", "dispatch_w8a8_scaled_mm", "Fp8LinearOp", "calc_diff"),
        gpu=("fp8_gemm_nt", "fp8_blockscale_gemm_sm90", "m_grouped_fp8_gemm_nt_contiguous",
             "fp8_m_grouped_gemm_nt_masked", "scaled_grouped_mm", "cutlass_scaled_mm", "cutlass_w8a8_scaled_mm",
             "torch_per_tensor_w8a8_scaled_mm", "torch_per_token_w8a8_scaled_mm", "torch_channelwise_w8a8_scaled_mm"),
    ),
    *_section(
        "GEMM",
        *("dynamic_flashinfer_deepgemm_blockscale_gemm", "flashinfer_fp8_blockscale_gemm"),
        *("FlashInferFp8DeepGEMMDynamicBlockScaledKernel", "maybe_create_device_identity", "get_num_sms"),
        gpu=("dynamic_flashinfer_deepgemm_blockscale_gemm", "flashinfer_fp8_blockscale_gemm"),
    ),
)  # fmt: skip
MOE = (
    *_section(
        "MoE",
        *("get_flashinfer_moe_backend", "is_flashinfer_supporting_global_sf", "make_fp8_moe_alpha_scales_for_fi"),
        *("register_scales_for_trtllm_fp8_per_tensor_moe", "prepare_fp8_moe_layer_for_fi"),
        *("select_cutlass_fp8_gemm_impl", "build_flashinfer_fp8_cutlass_moe_prepare_finalize"),
        "apply_fi_trtllm_fp8_per_tensor_moe",
    ),
    Routine("silu_and_mul", "MoE", production="moe_layer.silu_and_mul"),
    Routine("moe_routing", "MoE", production="moe_layer.route_deepseek_v3"),
    Routine("moe_fp8", "MoE", gpu=True, production="moe_layer.moe_block_scaled"),
)
LOGITS = _section(
    "Attention logits",
    *("fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"),
    gpu=("fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"),
)
PLATFORM = _section(
    "Platform decisions",
    *("is_deep_gemm_supported", "is_deep_gemm_e8m0_used", "should_use_deepgemm_for_fp8_linear"),
    *("cutlass_fp8_supported", "cutlass_block_fp8_supported", "cutlass_group_gemm_supported"),
    *("sparse_cutlass_supported", "use_rowwise_torch_scaled_mm"),
)
ROUTINES: tuple[Routine, ...] = (*QUANTISATION, *LAYOUT, *GEMM, *MOE, *LOGITS, *PLATFORM)
