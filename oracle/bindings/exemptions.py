"""Routines of libraries that no contract describes, each with its reason; see :mod:`oracle.bindings.missing`.

A row is ``WHERE:NAME``, in which ``*`` stands for anything. What a row names is not judged: it computes nothing, or in
no low precision, belongs to hardware without numerics here, or is a part of a routine that is counted itself. That a
contract is still to be written is no reason.
"""

from __future__ import annotations

from collections.abc import Mapping

ANY = "*"
"""Rows of all projects."""

SHAPES = "says the shapes of an operator; computes nothing"
INSIDE = "called or launched by a public routine of the library, which is counted itself"
RECORD = "makes a record or chooses a kernel; computes nothing"
PLAIN = "computes in bfloat16, float16 or float32 alone"
INTEGERS = "integer quantisation of the eager mode, by scales and zero points for CPUs"
ELSEWHERE = "for an accelerator whose numerics are not described here"
HOST = "computed on a CPU by the library of its vendor"
MOVES = "moves rows between processes or buffers; their bytes are unchanged"
PLACES = "decides where experts are kept; no tensor of the model is computed"
MODULATES = "scale and shift of a diffusion model, in the dtype of the activations"
RECURRENT = "a gate of a recurrent state, in bfloat16 and float32"
PICKS = "picks tokens or samples; no expert is chosen"
TRIED = "a reference of the library for its own tests"
ADAPTERS = "a low-rank adapter in bfloat16"
CODEBOOK = "codes of a codebook, of 1-bit weights or of an optimizer's state; no format of OCP or NVIDIA"
GGUF = "blocks of llama.cpp's file format, which has its own reference"
JAX = "the same kernels behind JAX, whose arrays the judge does not take"
ONNX = "writes a graph for another runtime"
VIEWS = "a view that names the axes of tiles as they lie; no byte is moved"
RANDOM = "makes random operands of an example of a kernel"
PAGES = "rewrites indices of pages; no value of the model is computed"
CALIBRATES = "calibrates weights over a data set"

EXEMPT: Mapping[str, Mapping[str, str]] = {
    ANY: {
        "*:get_*_config": RECORD,
        "*:add_*_choices": RECORD,
        "*:*_fake": SHAPES,
        "*:*_fake_out*": SHAPES,
        "*:fake_apply_*": SHAPES,
        "*:fake_unified_*": SHAPES,
        "*:*rocm*": ELSEWHERE,
        "*rocm*:*": ELSEWHERE,
        "*:*aiter*": ELSEWHERE,
        "*:*npu*": ELSEWHERE,
        "*:*xpu*": ELSEWHERE,
        "*xpu*:*": ELSEWHERE,
        "*musa*:*": ELSEWHERE,
        "*:*_cpu": HOST,
        "*:cpu_*": HOST,
        "*:*onednn*": HOST,
        "*:ggml_*": GGUF,
        "*:*_gguf": GGUF,
        "*:*gating_delta_rule*": RECURRENT,
        "*:*sigmoid_gating_kda*": RECURRENT,
        "*:*_gdn_gating": RECURRENT,
        "*:*rebalance_experts*": PLACES,
    },
    "deep_gemm": {
        "deep_gemm.mega:bf16_mega_moe": PLAIN,
    },
    "flashinfer": {
        "flashinfer.moe_ep.kernel_src.*:*": INSIDE,
        "flashinfer.moe_ep.backends.*:*": INSIDE,
        "flashinfer.fused_moe.cute_dsl.blackwell*:*": INSIDE,
        "flashinfer.*.kernels.*:*": INSIDE,
        "flashinfer.cute_dsl.attention.*:*": INSIDE,
        "flashinfer.deep_gemm:*_kwargs_gen": INSIDE,
        "flashinfer.deep_gemm:*_sm10x": INSIDE,
        "flashinfer.deep_gemm:check_sf_layout": RECORD,
        "flashinfer.fused_moe.core:*routing_metadata*": RECORD,
        "flashinfer.fused_moe.core:*moe_canonical_routing": RECORD,
        "flashinfer.fused_moe.core:canonicalize_*": RECORD,
        "flashinfer.fused_moe.core:trtllm_bf16_*": PLAIN,
        "flashinfer.fused_moe.bgmv_moe:*": ADAPTERS,
        "flashinfer.fused_moe.moe_lora_delta:*": ADAPTERS,
        "flashinfer.fused_moe.cute_dsl.moe_utils:*": INSIDE,
        "torch.ops.flashinfer:w4a16_*": INSIDE,
        "torch.ops.flashinfer:rope_quantize*": INSIDE,
        "flashinfer.comm.trtllm_alltoall:*": MOVES,
        "flashinfer.comm.trtllm_moe_alltoall:*": MOVES,
        "flashinfer.trace.*:*": TRIED,
        "flashinfer.msa_ops.sparse_topk_select:*": PICKS,
        "flashinfer.gemm.gemm_base:*_gemm_sm100": INSIDE,
        "flashinfer.norm:fused_dit_*": MODULATES,
        "flashinfer.gemm.gemm_base:build_cudnn_gemm_*_graph": RECORD,
        "flashinfer.gemm.gemm_base:execute_cudnn_gemm_*": INSIDE,
        "flashinfer.gemm.gemm_mm_fp4_cute_dsl:precompile_*": RECORD,
        "flashinfer.fused_moe.cute_dsl.blockscaled_contiguous_*:*": INSIDE,
        "flashinfer.topk:can_use_clusters_topk": RECORD,
        "flashinfer.topk:get_num_cached_for_topk": RECORD,
        "flashinfer.topk:topk*": PICKS,
        "flashinfer.cute_dsl.utils:convert_sf_to_mma_layout": VIEWS,
        "flashinfer.fused_moe.cute_dsl.rubin.*:create_*": RANDOM,
        "flashinfer.cute_dsl.sparse.*:compute_softmax_scale_log2": PLAIN,
        "flashinfer.mla._core:convert_compressed_page_aligned_*": PAGES,
    },
    "vllm": {
        "vllm.model_executor.layers.fused_moe.oracle.*:make_*": RECORD,
        "vllm.model_executor.layers.fused_moe.config:*": RECORD,
        "vllm.model_executor.layers.fused_moe.router.router_factory:*": RECORD,
        "vllm.model_executor.layers.fused_moe.layer:get_compressed_expert_map": PLACES,
        "vllm.distributed.*:*expert*": PLACES,
        "vllm.distributed.parallel_state:*": MOVES,
        "vllm.model_executor.layers.quantization.utils.marlin_utils_test:*": TRIED,
        "vllm.model_executor.layers.quantization.utils.marlin_utils:marlin_moe_intermediate_size": RECORD,
        "vllm.model_executor.layers.quantization.torchao:*": RECORD,
        "vllm.model_executor.layers.quantization.utils.quant_utils:*quantize_weights": TRIED,
        "vllm.model_executor.layers.quantization.utils.quant_utils:*_pack": TRIED,
        "vllm.model_executor.layers.quantization.utils.marlin_utils_fp8:marlin_quant_fp8_torch": TRIED,
        "vllm.model_executor.layers.quantization.utils.*_emulation_utils:*": TRIED,
        "vllm.model_executor.models.*:fast_topk": PICKS,
        "vllm.model_executor.models.*:transformers_moe_forward": RECORD,
        "vllm.model_executor.layers.fla.*:*": RECURRENT,
        "vllm.v1.worker.*:*": PICKS,
        "*:router_gemm_bf16_fp32": PLAIN,
        "*:dsv3_router_gemm": PLAIN,
    },
    "sglang": {
        "sglang.srt.layers.quantization.utils:gptq_quantize_weights": TRIED,
        "sglang.srt.layers.quantization.marlin_utils_fp8:marlin_quant_fp8_torch": TRIED,
        "sglang.srt.eplb.*:*": PLACES,
        "sglang.jit_kernel.diffusion.*:*": MODULATES,
        "sglang.multimodal_gen.*:flash_attn_*": PLAIN,
        "sglang.srt.layers.attention.fla.*:*": RECURRENT,
        "sglang.srt.distributed.*:*": MOVES,
        "*:*dsv3_router_gemm": PLAIN,
        "sglang.srt.models.*:load_*": MOVES,
        "sglang.srt.models.*:moe_impl": RECORD,
        "sglang.srt.layers.moe.kt_ep_wrapper:*": PLACES,
        "sglang.jit_kernel.moe_lora_align:*": ADAPTERS,
        "sglang.srt.layers.moe.*:*piecewise_cuda_graph*": INSIDE,
    },
    "sglang-kernel": {
        "*:fast_topk*": PICKS,
        "*:deepseek_v4_topk_transform_512": PICKS,
        "*:dsv3_router_gemm": PLAIN,
    },
    "torch": {
        "torch._vendor.*:*": INSIDE,
        "torch._inductor.*:*": INSIDE,
        "torch._meta_registrations:*": SHAPES,
        "torch._export.*:*": INSIDE,
        "torch.ao.*:*": INTEGERS,
        "torch.ops.quantized:*": INTEGERS,
        "torch.ops._quantized:*": INTEGERS,
        "torch.ops.onednn:*": HOST,
        "torch.ops.static_runtime:*": INTEGERS,
        "torch.ops.prim:*": RECORD,
        "torch.onnx.*:*": ONNX,
        "torch.distributed.*:*": MOVES,
        "*:fbgemm_*": INTEGERS,
        "*:*fake_quant*": INTEGERS,
        "*:*quantized_*": INTEGERS,
        "*:quantize_per_*": INTEGERS,
        "*:dequantize*": INTEGERS,
        "*:*_affine_quantized": INTEGERS,
        "*:empty_quantized": RECORD,
        "*:*int4pack*": HOST,
        "torch/lib/libtorch_cpu.so:*dyn_quant_*": HOST,
        "*:*topk": PICKS,
    },
    "torchao": {
        "torchao.prototype.parq.*:*": CODEBOOK,
        "torchao.prototype.quantization.codebook*:*": CODEBOOK,
        "torchao.prototype.quantized_training.bitnet:*": CODEBOOK,
        "torchao.optim.*:*": CODEBOOK,
        "torchao.prototype.gptq.*:*": CALIBRATES,
        "torchao.quantization.pt2e.*:*": INTEGERS,
        "*:custom_sharding_for_*": RECORD,
        "*:custom_mxfp8_quantize_*_sharding": RECORD,
        "torchao.prototype.moe_training.nvfp4_training.nvfp4_tensor_parallel:*": MOVES,
        "*:tensor_already_casted_to_fp8": RECORD,
    },
    "transformer_engine": {
        "transformer_engine.jax.*:*": JAX,
        "transformer_engine.pytorch.onnx_extensions:*": ONNX,
        "torch.ops.tex:*": ONNX,
        "transformer_engine.debug.*:*": TRIED,
        "transformer_engine.pytorch.ops._common:*": RECORD,
        "*:*moe_aux_loss": PLAIN,
    },
}
"""By project: the routine and the reason."""

ALIASES: Mapping[str, Mapping[str, str]] = {
    "flashinfer": {
        "group_gemm_mxfp4_nt_groupwise": "group_gemm_mxfp8_mxfp4_nt_groupwise",
        "m_grouped_fp8_gemm_nt_masked": "fp8_m_grouped_gemm_nt_masked",
        "group_deepgemm_fp8_nt_groupwise": "m_grouped_fp8_gemm_nt_contiguous",
        "trtllm_fp8_block_scale_routed_moe": "trtllm_fp8_block_scale_moe",
        "trtllm_fp8_per_tensor_scale_routed_moe": "trtllm_fp8_per_tensor_scale_moe",
        "fp4_quantize": "nvfp4_quantize",
        "mm_fp8": "cutlass_scaled_mm",
        "block_scale_interleave": "swizzle_scale",
        "nvfp4_block_scale_interleave": "swizzle_scale",
        "mxfp4_dequantize_host": "mxfp4_dequantize",
        "mxfp8_dequantize_host": "mxfp8_dequantize",
        "cutlass_fused_moe": "cutlass_fused_moe_nvfp4",
        # routing is trtllm_moe_routing, whose ids and weights the layer is given
        "trtllm_fp4_block_scale_moe": "trtllm_fp4_block_scale_moe_nvfp4",
        "trtllm_fp4_block_scale_routed_moe": "trtllm_fp4_block_scale_moe_nvfp4",
        "grouped_mm_fp4": "group_gemm_nvfp4_nt_groupwise",
        "grouped_mm_mxfp8": "scaled_grouped_mm_mx",
        "moe_gemm_fp8_nt_groupwise": "cutlass_blockwise_scaled_grouped_mm",
        "per_token_group_quant_8bit": "per_token_group_quant_fp8",
        "nvfp4_quantize_smooth": "nvfp4_quantize",
        "e2m1_and_ufp8sf_scale_to_float": "nvfp4_dequantize",
        "swizzle_sf": "swizzle_scale",
        "reswizzle_sf": "swizzle_scale",
        "unswizzle_sf": "from_blocked",
        "trtllm_low_latency_gemm": "cutlass_scaled_mm",
    },
    "vllm": {
        "cutlass_scaled_fp4_mm": "mm_fp4",
        "flashinfer_mm_fp4": "mm_fp4",
        "flashinfer_scaled_fp4_mm": "mm_fp4",
        "matmul_mxf4_bf16_tn": "mm_fp4",
        "matmul_nvf4_bf16_tn": "mm_fp4",
        "flashinfer_mm_mxfp8": "mm_mxfp8",
        "flashinfer_scaled_fp8_mm": "bmm_fp8",
        "flashinfer_nvfp4_quantize": "nvfp4_quantize",
        "silu_and_mul_nvfp4_quant": "silu_and_mul_nvfp4_quantize",
        "mxfp8_e4m3_quantize": "mxfp8_quantize",
        "per_token_group_fp8_quant_packed": "per_token_group_quant_fp8_packed",
        "per_token_group_quant_fp8_packed_for_deepgemm": "per_token_group_quant_fp8_packed",
        "run_cutlass_moe_fp8": "cutlass_moe_fp8",
        "swizzle_blockscale": "swizzle_scale",
        "vllm_topk_softmax": "topk_softmax",
        "vllm_topk_sigmoid": "topk_sigmoid",
        "vllm_topk_softplus_sqrt": "topk_softplus_sqrt",
        "fused_topk": "moe_routing",
        "fused_topk_bias": "topk_sigmoid",
        "fused_grouped_topk": "grouped_topk",
        "awq_marlin_moe_repack": "awq_marlin_repack",
        "gptq_marlin_moe_repack": "gptq_marlin_repack",
        "marlin_moe_permute_scales": "marlin_permute_scales",
        "moe_awq_to_marlin_zero_points": "awq_to_marlin_zero_points",
        "apply_awq_marlin_linear": "marlin_gemm",
        "apply_gptq_marlin_linear": "marlin_gemm",
        "apply_fp8_marlin_linear": "marlin_gemm",
        "awq_dequantize_triton": "awq_dequantize",
        "awq_gemm_triton": "awq_gemm",
        "apply_fp4_marlin_linear": "marlin_gemm",
        "apply_mxfp8_marlin_linear": "marlin_gemm",
        "mxfp8_marlin_process_scales": "mxfp4_marlin_process_scales",
        "cutlass_encode_and_reorder_int4b_grouped": "cutlass_encode_and_reorder_int4b",
        "marlin_gemm_moe": "moe_wna16_marlin_gemm",
        "invoke_fused_moe_wna16_cuda_kernel": "moe_wna16_gemm",
        "invoke_fused_moe_wna16_triton_kernel": "moe_wna16_gemm",
    },
    "sglang": {
        "cutlass_scaled_fp4_mm": "mm_fp4",
        "fp4_gemm": "mm_fp4",
        "flashinfer_mm_mxfp8": "mm_mxfp8",
        "flashinfer_mxfp8_quantize": "mxfp8_quantize",
        "deep_gemm_fp8_fp8_bf16_nt": "fp8_gemm_nt",
        "w8a8_block_fp8_matmul_deepgemm": "fp8_gemm_nt",
        "sglang_per_token_group_quant_fp8": "per_token_group_quant_fp8",
        "scaled_fp4_grouped_quant": "scaled_fp4_grouped_quantize",
        "silu_and_mul_masked_post_quant_fwd": "silu_and_mul_masked_post_quant",
        "swizzle_blockscale": "swizzle_scale",
        "fused_topk": "moe_routing",
        "grouped_topk_gpu": "moe_routing",
        "biased_grouped_topk": "moe_routing",
        "biased_grouped_topk_gpu": "moe_routing",
        "biased_grouped_topk_impl": "moe_routing",
        "fused_topk_torch_native": "moe_routing",
        "fused_topk_native": "moe_routing",
        "kimi_k2_biased_topk_impl": "moe_routing",
        "awq_marlin_moe_repack": "awq_marlin_repack",
        "gptq_marlin_moe_repack": "gptq_marlin_repack",
        "marlin_moe_permute_scales": "marlin_permute_scales",
        "moe_awq_to_marlin_zero_points": "awq_to_marlin_zero_points",
        "apply_awq_marlin_linear": "marlin_gemm",
        "apply_gptq_marlin_linear": "marlin_gemm",
        "apply_fp8_marlin_linear": "marlin_gemm",
        "awq_dequantize_triton": "awq_dequantize",
        "awq_gemm_triton": "awq_gemm",
        "awq_dequantize_decomposition": "awq_dequantize",
        "gptq_marlin_gemm": "marlin_gemm",
        "unified_apply_gptq_marlin_gemm": "marlin_gemm",
        "unified_apply_gptq_marlin_gemm_with_wtype": "marlin_gemm",
    },
    "sglang-kernel": {
        "moe_fused_gate": "moe_routing",
        "kimi_k2_moe_fused_gate": "moe_routing",
    },
    "torch": {
        "scaled_mm_v2": "scaled_mm",
        "scaled_grouped_mm_v2": "scaled_grouped_mm_mx",
    },
    "torchao": {
        "triton_to_mxfp8_dim0": "mxfp8_quantize",
        "triton_to_mxfp8_dim1": "mxfp8_quantize_columnwise",
        "triton_mxfp8_dequant_dim0": "mxfp8_dequantize",
        "torch_to_blocked_2d_K_groups": "to_blocked_k_groups",
        "mxfp8_quantize_2d_1x32_cutedsl": "mxfp8_quantize",
        "mxfp8_quantize_2d_32x1_cutedsl": "mxfp8_quantize_columnwise",
        "mxfp8_quantize_3d_cutedsl": "mxfp8_quantize_3d",
        "mxfp8_quantize_cuda_3d": "mxfp8_quantize_3d",
    },
}
"""By project the routines whose mathematics a contract has under another name, where no binding states the call: scales
lie in another shape, an argument is computed from several inputs, or a class calls it."""
