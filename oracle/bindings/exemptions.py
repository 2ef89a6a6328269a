"""Routines of libraries that no contract describes, each with its reason; see :mod:`oracle.bindings.missing`.

A row is ``WHERE:NAME``, in which ``*`` stands for anything. What a row names is not judged: it computes nothing, or in
no low precision, belongs to hardware without numerics here, or is a part of a routine that is counted itself. That a
contract is still to be written is no reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
STATE = "keeps a recurrent state of linear attention, in bfloat16 or float32, where others keep keys and values"
FORWARDS = "hands its tensors to routines that are counted themselves; no arithmetic of its own"
BIASED = "hands its tensors to routines that are counted themselves, and adds a bias in 16 bits"
LOW_RANK = "hands its tensors to routines that are counted themselves, and multiplies the low-rank part in bfloat16"
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
        "flashinfer.cudnn.decode:cudnn_batch_decode_with_kv_cache": PLAIN,  # it takes no scale
        "flashinfer.cascade:MultiLevelCascadeAttentionWrapper": FORWARDS,
        "flashinfer.gemm.gemm_svdquant:svdquant_linear": LOW_RANK,
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
        "vllm.model_executor.layers.fused_moe.flashinfer_cutlass_moe:is_valid_*": RECORD,
        "vllm.model_executor.layers.fused_moe.fused_moe:dispatch_fused_moe_kernel": RECORD,
        "vllm.model_executor.layers.fused_moe.fused_moe:fused_experts_impl": INSIDE,
        "vllm.model_executor.layers.fused_moe.fused_moe:*place_fused_experts": INSIDE,
        "vllm.model_executor.layers.fused_moe.fused_moe:invoke_fused_moe_triton_kernel": INSIDE,
        "vllm.model_executor.layers.fused_moe.fused_batched_moe:invoke_moe_batched_triton_kernel": INSIDE,
        "vllm.model_executor.layers.fused_moe.activation:apply_moe_activation": FORWARDS,
        "vllm.model_executor.layers.fused_moe.oracle.fp8:convert_to_fp8_moe_kernel_format": FORWARDS,
        "vllm.model_executor.layers.fused_moe.utils:normalize_*scales_shape": VIEWS,
        "vllm.model_executor.layers.quantization.bitsandbytes:calculate_quant_ratio": RECORD,
        "vllm.model_executor.layers.quantization.humming:prepare_moe_param": RECORD,
        "vllm.model_executor.layers.quantization.fp_quant:fused_quantize_*": FORWARDS,
        "vllm._custom_ops:fusedQuantizeMx": FORWARDS,
        "vllm.model_executor.layers.quantization.utils.fp8_utils:deepgemm_post_process_*": FORWARDS,
        "vllm.model_executor.layers.quantization.quark.*:gemm_with_dynamic_quant": ELSEWHERE,
        "vllm.model_executor.layers.quantization.quark.utils:quark_quantize_weight_to_mxfp4": ELSEWHERE,
        "vllm.model_executor.layers.fused_moe.experts.*:triton_kernel_fused_mxfp4_w4a8_experts": ELSEWHERE,
        "vllm.model_executor.layers.mamba.linear_attn:*": STATE,
        "vllm.model_executor.layers.attention.*:unified_*": FORWARDS,
        "vllm.model_executor.layers.sparse_attn_indexer:kv_cache_as_quant_view": VIEWS,
        "vllm.model_executor.models.extract_hidden_states:basic_cache": MOVES,
        "vllm.v1.attention.backends.flash_attn:cascade_attention": FORWARDS,
        "vllm.v1.attention.backends.mla.flashmla_sparse:build_c128a_topk_metadata": PICKS,
        "vllm.v1.attention.ops.deepseek_v4_ops.cache_utils:*_indices*": PICKS,
        "*:persistent_topk": PICKS,
        "*:get_mla_*metadata_dense_fp8": RECORD,
        "vllm.v1.attention.ops.triton_decode_attention:decode_attention_fwd_*": INSIDE,
        "*:moe_lora_align_block_size": ADAPTERS,
        "vllm.vllm_flash_attn.cute.utils:compute_softmax_scale_log2": PLAIN,
        "torch.ops._C:convert_weight_packed_scale_zp": HOST,
        "torch.ops._C:int8_scaled_mm_with_quant": HOST,
        "*:nvfp4_kv_cache_split_views": VIEWS,
        "*:prep_scale_for_group_broadcast": VIEWS,
        "*:sparse_attn_func": PLAIN,
        "*:sparse_attn_varlen_func": PLAIN,
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so:fwd_kvcache": PLAIN,
        "*:convert_moe_weights_to_flashinfer_trtllm_block_layout": PLAIN,
        "*:sparse_attn_indexer": FORWARDS,
        "vllm.compilation.passes.fusion.allreduce_rms_fusion:call_trtllm_fused_allreduce_norm": FORWARDS,
        "*:flashinfer_cutedsl_moe_masked": FORWARDS,
        "*:flashinfer_trtllm_mxint4_moe": FORWARDS,
        "*:cutlass_moe_w4a8_fp8": FORWARDS,
        "*:run_cutlass_moe_w4a8_fp8": FORWARDS,
        "*:prepare_fp8_moe_layer_for_deepgemm": FORWARDS,
        "*:humming_moe_align": FORWARDS,
        "*:quant_dequant_mxfp6": ELSEWHERE,
        "*:apply_w8a8_block_int8_linear": BIASED,
        # signed codes, exchanged halves, rows in the order of fragments, scales in tiles, blocks of columns
        "*:prepare_static_weights_for_trtllm_mxint4_moe": FORWARDS,
        "vllm.model_executor.layers.quantization.fp_quant:quantized_forward": BIASED,
        "vllm.v1.attention.ops.triton_turboquant_*:*": CODEBOOK,
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
        "*:get_mla_*metadata_dense_fp8": RECORD,
        "*:fast_topk*": PICKS,
        "*:deepseek_v4_topk_transform_512": PICKS,
        "*:dsv3_router_gemm": PLAIN,
        "*:sparse_attn_func": PLAIN,
        "*:sparse_attn_varlen_func": PLAIN,
        "sgl_kernel/flashmla_ops.abi3.so:dense_decode_fwd": PLAIN,
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
        # codes of K and V; the scale bytes of V are interleaved by four tokens in the order of a tile
        "nvfp4_quantize_paged_kv_cache": "nvfp4_quantize",
        # without is_gated; scales of rows in words
        "moe_gemm_mxfp8_nt_groupwise": "scaled_grouped_mm_mx",
        "rms_norm": "rms_norm_scaled",
        "rms_norm_add_residual": "rms_norm_add_residual_scaled",
        "trtllm_allreduce_fusion": "allreduce_fusion",
        "trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant": "allreduce_fusion",  # whose squares are rounded to T first
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
        "nvfp4_kv_quantize": "nvfp4_quantize",  # the scale multiplies on dequantisation, scale bytes without tiles
        "e2m1_and_ufp8sf_scale_to_float": "nvfp4_dequantize",
        "swizzle_sf": "swizzle_scale",
        "reswizzle_sf": "swizzle_scale",
        "unswizzle_sf": "from_blocked",
        "trtllm_low_latency_gemm": "cutlass_scaled_mm",
        # of queries, keys and values of E4M3; others are in 16 bits
        "BatchPrefillPagedTSWrapper": "BatchPrefillWithPagedKVCacheWrapper",
        "batch_prefill_with_paged_kv_cache": "BatchPrefillWithPagedKVCacheWrapper",
        "trtllm_batch_context_with_kv_cache": "BatchPrefillWithPagedKVCacheWrapper",
        "trtllm_batch_decode_with_kv_cache": "BatchPrefillWithPagedKVCacheWrapper",  # one query a sequence, or a few
        "cudnn_batch_prefill_with_kv_cache": "BatchPrefillWithRaggedKVCacheWrapper",
        # rows of blocks are sequences, blocks of columns their pages
        "BlockSparseAttentionWrapper": "BatchPrefillWithPagedKVCacheWrapper",
        # sequences of one length, heads whose values are narrower than their keys
        "fmha_v2_prefill_deepseek": "mha_fwd",
        "fmha_v2_prefill_sm120": "mha_fwd",
        "trtllm_ragged_attention_deepseek": "mha_fwd",
        "xqa_batch_decode_with_kv_cache": "decode_attention_fwd",
        "BatchDecodeWithPagedKVCacheWrapper": "decode_attention_fwd",
        "BatchAttention": "unified_attention",
        # one head of keys, whose first columns are the values
        "BatchDecodeMlaWithPagedKVCacheWrapper": "mha_fwd",
        "BatchMLADecodePagedTSWrapper": "mha_fwd",
        "BatchMLAPagedAttentionWrapper": "mha_fwd",
        "batch_decode_mla_with_paged_kv_cache": "mha_fwd",
        "prims_ts_batch_decode_with_kv_cache_mla": "mha_fwd",
        "trtllm_batch_decode_with_kv_cache_mla": "mha_fwd",
        "xqa_batch_decode_with_kv_cache_mla": "mha_fwd",
        "xqa_mla": "mha_fwd",
        "batch_decode_sparse_mla_dsv4": "trtllm_batch_decode_sparse_mla_dsv4",
        # of queries and keys less their means, and of values transposed; without a global scale
        "nvfp4_attention_sm120_quantize_qkv": "nvfp4_quantize",
        "sparse_mla_sm120_decode_dsv4": "trtllm_batch_decode_sparse_mla_dsv4",
        "msa_sparse_decode_attention": "msa_sparse_attention",
        # ids and weights given, packed in one word
        "trtllm_mxint4_block_scale_routed_moe": "trtllm_mxint4_block_scale_moe",
        "sparse_mla_sm120_decode_dsv3_2": "flash_mla_with_kvcache",  # whose queries are coded in blocks first
        # codes in groups of 256 with a floor of 1e-12, of what a rank has and again of the sum in float32
        "quantized_all_reduce": "per_token_group_quant_fp8",
    },
    "deep_gemm": {
        # the quantiser of both; ids and weights are moved, and padded with -1 and 0
        "mega_moe_pre_dispatch": "per_token_cast_to_fp4",
        "mega_moe_pre_dispatch_sm90": "per_token_group_quant_fp8",
        "per_custom_dims_cast_to_fp8": "per_token_cast_to_fp8",  # rows are all but the axes that are kept
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
        "swizzle_mxfp4_scales": "swizzle_scale",
        "swizzle_mxfp8_scale": "swizzle_scale",
        "dequant_mxfp8_to_bf16": "mxfp8_dequantize",
        "deepseek_v4_fp8_einsum": "fp8_einsum",
        "run_cutlass_moe_fp4": "cutlass_moe_fp4",
        "run_cutlass_moe_mxfp4": "cutlass_moe_mxfp4",
        "fused_experts": "fused_experts_block",
        "silu_mul_fp8_baseline": "silu_and_mul_quant",
        "w8a8_triton_block_scaled_mm": "fp8_gemm_nt",
        "matmul_ada_mxf4_bf16_tn": "mm_fp4",
        "triton_reshape_and_cache_flash": "reshape_and_cache_flash",
        "triton_reshape_and_cache_flash_diffkv": "reshape_and_cache_flash",
        "cutlass_fp4_group_mm": "group_gemm_nvfp4_nt_groupwise",
        "cutlass_fp4_moe_mm": "group_gemm_nvfp4_nt_groupwise",
        "cutlass_mxfp4_group_mm": "scaled_grouped_mm_mx",
        "cutlass_mxfp4_moe_mm": "scaled_grouped_mm_mx",
        "cutlass_mxfp8_grouped_mm": "scaled_grouped_mm_mx",
        "reorder_w1w3_to_w3w1": "swap_w13_to_w31",
        "flashinfer_quant_nvfp4_8x4_sf_layout": "nvfp4_quantize",
        "dequant_mxfp6": "mxfp6_dequantize",
        "silu_mul_fp8": "silu_and_mul_quant",
        # one expert, all of whose rows are in use
        "silu_mul_per_token_group_quant_fp8_colmajor": "silu_and_mul_masked_post_quant",
        "process_fp8_weight_tensor_strategy_moe": "requantize_with_max_scale",
        # of the codes times their old scales in float32
        "requant_weight_ue8m0_inplace": "per_block_cast_to_fp8",
        "context_attention_fwd": "extend_attention_fwd",
        # one query a sequence, keys in pieces of 16 bytes
        "paged_attention_v1": "decode_attention_fwd",
        "paged_attention_v2": "decode_attention_fwd",
        "topk_hash_softplus_sqrt": "topk_softplus_sqrt",
        "dequant_fp8": "scaled_dequantize",
        # rows in batches of experts, one slot a row
        "batched_fused_marlin_moe": "fused_marlin_moe",
        # after a router, whose ids and weights the layer is given
        "triton_kernel_moe_forward": "triton_kernel_fused_experts",
        "gemma4_fused_routing_kernel_triton": "gemma4_routing_function_torch",
        # one head of keys, whose first columns are the values
        "flash_mla_with_kvcache_fp8": "mha_fwd",
        "select_experts": "moe_routing",
        # of the backend of Marlin; others are permutations of rows and tiles of scales
        "convert_to_nvfp4_moe_kernel_format": "prepare_nvfp4_moe_layer_for_marlin",
        "convert_weight_to_mxfp4_moe_kernel_format": "prepare_moe_mxfp4_layer_for_marlin",
        "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format": "prepare_moe_mxfp4_layer_for_marlin",
        "convert_to_wna16_moe_kernel_format": "gptq_marlin_repack",
        # of a key whose last columns were rotated; queries are normalised and rotated in 16 bits
        "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": "quantize_and_insert_k_cache",
        # of a head that was rotated; its scale goes into the weight, or its codes are those of per_token_cast_to_fp4
        "fused_indexer_q_rope_quant": "indexer_k_quant_and_cache",
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
        "kimi_k2_moe_fused_gate": "moe_routing",
        "fp8_blockwise_scaled_grouped_mm": "cutlass_blockwise_scaled_grouped_mm",
        "es_fp8_blockwise_scaled_grouped_mm": "cutlass_blockwise_scaled_grouped_mm",
        "es_sm100_mxfp8_blockscaled_grouped_quant": "mxfp8_experts_quant",
        "sgl_per_token_group_quant_fp8": "per_token_group_quant_fp8",
        "sgl_per_token_group_quant_int8": "per_token_group_quant_int8",
        "int8_scaled_mm": "cutlass_scaled_mm_azp",  # without a zero point
        "es_sm100_mxfp8_blockscaled_grouped_mm": "scaled_grouped_mm_mx",
        "flash_attn_varlen_func": "mha_fwd",
        "flash_attn_with_kvcache": "mha_fwd",
        "fwd_kvcache_mla": "flash_mla_with_kvcache",
        # of a key that was normalised, and whose last columns were rotated
        "dsv4_fused_k_norm_rope_flashmla": "quantize_and_insert_k_cache",
        # of a head that was rotated, then transformed by Hadamard's matrix; its scale goes into the weight
        "dsv4_fused_q_indexer_rope_hadamard_quant": "indexer_k_quant_and_cache",
        # one head of keys, whose first columns are the values
        "fwd_kvcache_mla_fp8": "mha_fwd",
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


@dataclass(frozen=True)
class Composed:
    """A layer of a contract that no call of a library computes: it begins with values, and the library's function with
    their codes, from which the values of a call cannot be read back.

    ``target`` is that function, ``scale`` its parameter for the scale of the codes, ``steps`` the routines of which the
    layer is put together; each has a binding and is judged by itself.
    """

    target: str
    scale: str
    steps: tuple[str, ...]


_VLLM_LAYER = "vllm.model_executor.layers.fused_moe.experts.cutlass_moe:run_cutlass_moe_fp8"
_LMDEPLOY = "lmdeploy.pytorch.kernels.cuda"
COMPOSED: Mapping[tuple[str, str], Composed] = {
    **{
        ("vllm", name): Composed(
            _VLLM_LAYER,
            "a1q_scale",
            tuple(f"torch:ops._C.{step}" for step in (quantiser, "cutlass_moe_mm", "silu_and_mul")),
        )
        for name, quantiser in (
            ("cutlass_moe_fp8", "static_scaled_fp8_quant"),
            ("cutlass_moe_fp8_channel", "dynamic_per_token_scaled_fp8_quant"),
        )
    },
    ("lmdeploy", "fused_experts_block"): Composed(
        f"{_LMDEPLOY}.moe.blocked_fp8:fused_moe_blocked_fp8",
        "input_scale",
        (f"{_LMDEPLOY}.blocked_gemm_fp8:quant_fp8",),
    ),
}
"""By project and contract the layers that have no binding, since none can read a call of theirs."""
