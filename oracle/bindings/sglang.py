"""sglang-kernel's compiled operators, ``torch.ops.sgl_kernel``: products, quantisers, routers, merged attention; and
SGLang's Triton attention.

Parameters of operators are those of the schemas inside the library of the release.
"""

from __future__ import annotations

from typing import Any

import torch

from oracle.bindings.binding import Binding, bind

SGLANG = "sglang 0.5.10"
LOADS = ("sgl_kernel", "sgl_kernel.sm90.common_ops")
"""The package loads the library of the GPU at hand; where only the one of sm90 was unpacked, that is imported."""
E4M3, HALVES = torch.float8_e4m3fn, (torch.bfloat16, torch.float16)


def _operator(name: str, contract: str, pattern: str, signature: str, **stated: Any) -> Binding:
    stated = {"loads": LOADS, "release": "sglang-kernel 0.4.4", "dense": ("*",)} | stated
    return bind(f"torch:ops.sgl_kernel.{name}", contract, pattern, signature, **stated)


def _router(name: str, more: str, parameters: str) -> Binding:
    return _operator(
        name,
        name,
        f"(topk_weights, topk_ids, logits, renormalize, {more}bias)",
        f"(topk_weights, topk_indices, gating_output, renormalize, {parameters}correction_bias)",
        derived={"top_k": "topk_ids.shape[1]"},
        takes={"is_padding": None, "routed_scaling_factor": 1.0},
    )


BINDINGS = (
    _operator(
        "fp8_scaled_mm",
        "cutlass_scaled_mm",
        "(a, b.t(), a_scale, b_scale, out_dtype, bias)",
        "(mat_a, mat_b, scales_a, scales_b, out_dtype, bias)",
        takes={"a": E4M3, "b": E4M3, "out_dtype": HALVES},
        where="a_scale.shape == (a.shape[0], 1) and b_scale.shape == (1, b.shape[0]) "
        "and (bias is None or bias.dtype == out_dtype)",
        domain="n % 16 == 0, k % 16 == 0",
    ),
    _operator(
        "sgl_per_token_group_quant_8bit",
        "per_token_group_quant_fp8",
        "(x, q, scale, group_size, eps, -448.0, 448.0, False)",
        "(input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0)",
        takes={"column_major_scales": False, "tma_aligned_scales": False, "use_ue8m0": False},
        shapes={"scale": "(*x.shape[:-1], x.shape[-1] // group_size)"},
    ),
    _operator(
        "awq_dequantize",
        "awq_dequantize",
        "(qweight, scales, zeros)",
        "(qweight, scales, qzeros)",
    ),
    _operator(
        "gptq_gemm",
        "gptq_gemm",
        "(a, b_q_weight, b_gptq_qzeros, b_gptq_scales, g_idx, False, bit)",
        "(a, b_q_weight, b_gptq_qzeros, b_gptq_scales, b_g_idx, use_shuffle, bit)",
        takes={"g_idx": torch.int32, "use_v2_format": False},
        absent={
            "g_idx": "torch.arange(a.shape[1], dtype=torch.int32, device=a.device) "
            "// (a.shape[1] // b_gptq_scales.shape[0])"
        },
        domain="n % 32 == 0, k % 32 == 0",
    ),
    _operator(
        "gptq_shuffle",
        "gptq_shuffle",
        "(q_weight, q_perm, bit)",
        "(q_weight, q_perm, bit)",
        takes={"q_perm": torch.int32},
        absent={"q_perm": "torch.empty(0, dtype=torch.int32, device=q_weight.device)"},
    ),
    _router("topk_softmax", "0.0, ", "moe_softcapping, "),
    _router("topk_sigmoid", "", ""),
    _operator(
        "merge_state_v2",
        "merge_state_v2",
        "(v_a, s_a, v_b, s_b, v_merged, s_merged)",
        "(v_a, s_a, v_b, s_b, v_merged, s_merged)",
    ),
    bind(
        "sglang.srt.layers.attention.triton_ops.decode_attention:decode_attention_fwd",
        "decode_attention_fwd",
        "(q, k_buffer, v_buffer, out, kv_indptr, kv_indices, "
        "torch.zeros(*q.shape[:2], 1, v_buffer.shape[2], device=q.device), "
        "torch.zeros(*q.shape[:2], 1, device=q.device), "
        "torch.ones(len(q), dtype=torch.int32, device=q.device), 1, sm_scale, k_scale, v_scale, sinks=sinks)",
        "(q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits, max_kv_splits, "
        "sm_scale, k_scale, v_scale, logit_cap=0.0, sinks=None, xai_temperature_len=-1)",
        absent={"sm_scale": "q.shape[2] ** -0.5"},
        ignores=("attn_logits", "attn_lse", "num_kv_splits", "max_kv_splits"),  # blocks that share the keys
        dense=("*",),
        release=SGLANG,
    ),
    bind(
        "sglang.srt.layers.attention.triton_ops.extend_attention:extend_attention_fwd",
        "extend_attention_fwd",
        "(q, k_extend, v_extend, out, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, None, True, None, "
        "qo_indptr.diff().max().item(), k_scale, v_scale, sm_scale=sm_scale, sliding_window_size=sliding_window_size, "
        "sinks=sinks)",
        "(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask, "
        "is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None, logit_cap=0.0, "
        "skip_prefix_custom_mask=True, sliding_window_size=-1, sinks=None, window_kv_offsets=None, "
        "xai_temperature_len=-1)",
        ignores=("max_len_extend", "skip_prefix_custom_mask"),
        dense=("*",),
        release=SGLANG,
    ),
)
