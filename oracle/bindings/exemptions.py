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
        "vllm.model_executor.layers.quantization.utils.*_emulation_utils:*": TRIED,
        "vllm.model_executor.models.*:fast_topk": PICKS,
        "vllm.model_executor.models.*:transformers_moe_forward": RECORD,
        "vllm.model_executor.layers.fla.*:*": RECURRENT,
        "vllm.v1.worker.*:*": PICKS,
        "*:router_gemm_bf16_fp32": PLAIN,
        "*:dsv3_router_gemm": PLAIN,
    },
    "sglang": {
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
