"""The production dispatch layer for FP8 GEMMs, grouped GEMMs, MoE, attention logits and quantisation.

An inference engine imports the verbs of this package. Each verb checks its arguments, looks the decision up in a
plan (:mod:`kernels.plan`) and makes one call. Importing the package imports torch and nothing else: GPU libraries
are loaded when a plan first chooses them.
"""

from __future__ import annotations

from kernels import ops as _ops  # registers the operators
from kernels.blockscaled import (
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
    deepgemm_blockscale_linear,
    dynamic_flashinfer_deepgemm_blockscale_gemm,
    flashinfer_fp8_blockscale_gemm,
    fp8_blockscale_gemm_sm90,
    fp8_gemm_nt,
    prepare_blockscale_linear,
    prepare_fp8_gemm_nt,
)
from kernels.calc import calc_diff
from kernels.grouped import (
    fp8_m_grouped_gemm_nt_masked,
    get_mk_alignment_for_contiguous_layout,
    m_grouped_fp8_gemm_nt_contiguous,
    scaled_grouped_mm,
)
from kernels.layout import (
    align,
    align_fp8_moe_weights_for_fi,
    calculate_tile_tokens_dim,
    ceil_div,
    get_col_major_tma_aligned_tensor,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    reorder_rows_for_gated_act_gemm,
    rotate_weights_for_fi_trtllm_fp8_per_tensor_moe,
    shuffle_matrix_a,
    swap_w13_to_w31,
    swizzle_scale,
    transform_sf_into_required_layout,
)
from kernels.linear import (
    Fp8LinearOp,
    cutlass_scaled_mm,
    cutlass_w8a8_scaled_mm,
    dispatch_w8a8_scaled_mm,
    maybe_create_device_identity,
    rocm_per_tensor_w8a8_scaled_mm,
    torch_channelwise_w8a8_scaled_mm,
    torch_per_tensor_w8a8_scaled_mm,
    torch_per_token_w8a8_scaled_mm,
)
from kernels.logits import fp8_mqa_logits, fp8_paged_mqa_logits, get_paged_mqa_logits_metadata
from kernels.moe import (
    FlashinferMoeBackend,
    apply_fi_trtllm_fp8_per_tensor_moe,
    build_flashinfer_fp8_cutlass_moe_prepare_finalize,
    get_flashinfer_moe_backend,
    is_flashinfer_supporting_global_sf,
    make_fp8_moe_alpha_scales_for_fi,
    prepare_fp8_moe_layer_for_fi,
    register_scales_for_trtllm_fp8_per_tensor_moe,
    select_cutlass_fp8_gemm_impl,
)
from kernels.platform import (
    cutlass_block_fp8_supported,
    cutlass_fp8_supported,
    cutlass_group_gemm_supported,
    get_num_sms,
    is_deep_gemm_e8m0_used,
    is_deep_gemm_supported,
    should_use_deepgemm_for_fp8_linear,
    sparse_cutlass_supported,
    use_rowwise_torch_scaled_mm,
)
from kernels.quantize import (
    all_close_1d,
    ceil_to_ue8m0,
    convert_to_channelwise,
    flashinfer_quantize_1x128,
    flashinfer_quantize_128x128,
    normalize_e4m3fn_to_e4m3fnuz,
    per_block_cast_to_fp8,
    per_channel_cast_to_fp8,
    per_tensor_dequantize,
    per_token_cast_to_fp8,
    per_token_group_quant_fp8,
    per_token_group_quant_fp8_packed,
    requantize_with_max_scale,
    scaled_fp8_quant,
)
from kernels.routes import explain

NAMESPACE = _ops.NAMESPACE
"""Namespace of the custom operators: ``torch.ops.fp8_kernels``."""

__all__ = [
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
    "FlashinferMoeBackend",
    "Fp8LinearOp",
    "NAMESPACE",
    "align",
    "align_fp8_moe_weights_for_fi",
    "all_close_1d",
    "apply_fi_trtllm_fp8_per_tensor_moe",
    "build_flashinfer_fp8_cutlass_moe_prepare_finalize",
    "calc_diff",
    "calculate_tile_tokens_dim",
    "ceil_div",
    "ceil_to_ue8m0",
    "convert_to_channelwise",
    "cutlass_block_fp8_supported",
    "cutlass_fp8_supported",
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm",
    "cutlass_w8a8_scaled_mm",
    "deepgemm_blockscale_linear",
    "dispatch_w8a8_scaled_mm",
    "dynamic_flashinfer_deepgemm_blockscale_gemm",
    "explain",
    "flashinfer_fp8_blockscale_gemm",
    "flashinfer_quantize_128x128",
    "flashinfer_quantize_1x128",
    "fp8_blockscale_gemm_sm90",
    "fp8_gemm_nt",
    "fp8_m_grouped_gemm_nt_masked",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_col_major_tma_aligned_tensor",
    "get_flashinfer_moe_backend",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "is_deep_gemm_e8m0_used",
    "is_deep_gemm_supported",
    "is_flashinfer_supporting_global_sf",
    "m_grouped_fp8_gemm_nt_contiguous",
    "make_fp8_moe_alpha_scales_for_fi",
    "maybe_create_device_identity",
    "normalize_e4m3fn_to_e4m3fnuz",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_tensor_dequantize",
    "per_token_cast_to_fp8",
    "per_token_group_quant_fp8",
    "per_token_group_quant_fp8_packed",
    "prepare_blockscale_linear",
    "prepare_fp8_gemm_nt",
    "prepare_fp8_moe_layer_for_fi",
    "register_scales_for_trtllm_fp8_per_tensor_moe",
    "reorder_rows_for_gated_act_gemm",
    "requantize_with_max_scale",
    "rocm_per_tensor_w8a8_scaled_mm",
    "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe",
    "scaled_fp8_quant",
    "scaled_grouped_mm",
    "select_cutlass_fp8_gemm_impl",
    "should_use_deepgemm_for_fp8_linear",
    "shuffle_matrix_a",
    "sparse_cutlass_supported",
    "swap_w13_to_w31",
    "swizzle_scale",
    "torch_channelwise_w8a8_scaled_mm",
    "torch_per_tensor_w8a8_scaled_mm",
    "torch_per_token_w8a8_scaled_mm",
    "transform_sf_into_required_layout",
    "use_rowwise_torch_scaled_mm",
]
