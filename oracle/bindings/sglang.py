"""sglang-kernel's compiled operators, ``torch.ops.sgl_kernel``: products, quantisers, routers, merged attention; and
SGLang's Triton products, quantisers and attention.

Parameters of operators are those of the schemas inside the library of the release.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oracle.bindings.binding import Binding, bind

SGLANG, NEWER = "sglang 0.5.10", "sglang 0.5.23"
OPS = "sglang.kernels.ops"
LOADS = ("sgl_kernel", "sgl_kernel.sm90.common_ops")
"""The package loads the library of the GPU at hand; where only the one of sm90 was unpacked, that is imported."""
E4M3, HALVES = torch.float8_e4m3fn, (torch.bfloat16, torch.float16)


def _operator(name: str, contract: str, pattern: str, signature: str, **stated: Any) -> Binding:
    stated = {"loads": LOADS, "release": "sglang-kernel 0.4.4", "dense": ("*",)} | stated
    return bind(f"torch:ops.sgl_kernel.{name}", contract, pattern, signature, **stated)


def _router(name: str, more: str, parameters: str, **takes: object) -> Binding:
    return _operator(
        name,
        name,
        f"(topk_weights, topk_ids, logits, renormalize, {more}bias)",
        f"(topk_weights, topk_indices, gating_output, renormalize, {parameters}correction_bias)",
        derived={"top_k": "topk_ids.shape[1]"},
        takes={"is_padding": None, "routed_scaling_factor": 1.0} | takes,
    )


GROUPS = "per_token_group_quant_fp8"
V2 = (
    "(input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0, fuse_silu_and_mul, masked_m)",
    "sgl_per_token_group_quant_8bit_v2",
)
OF_V2 = {"x": HALVES, "group_size": (16, 32, 64, 128)}
WORDS = (  # columns of whole words of four rows, zeros behind the last
    "torch.zeros(*x.shape[:-2], x.shape[-1] // {width} // 4, x.shape[-2] + -x.shape[-2] % 4, dtype=torch.int32, "
    "device=x.device)[..., : x.shape[-2]].mT"
)
WHOLE = tuple(
    f"fp8_gemm_nt/e4m3xe4m3-{store}/1x128:128x128/{shape}/family={family}/seed=1"
    for store in ("bf16", "f16")
    for shape in ("m=4,n=128,k=128", "m=32,n=256,k=384", "m=64,n=512,k=640", "m=132,n=128,k=1024", "m=20,n=384,k=256")
    for family in ("randn", "exact", "ties", "outlier")
)
MASKED = tuple(
    f"silu_and_mul_masked_post_quant/{dtype}-e4m3/1x128/{shape}/ue8m0=1/family={family}/seed=1"
    for dtype in ("bf16", "f16")
    for shape in ("e=1,t=1,i=2048", "e=3,t=9,i=2048", "e=4,t=13,i=4096")
    for family in ("randn", "ties", "amax", "outlier", "heavy", "special", "range", "nan")
)
ROUTED = tuple(
    f"moe_routing/f32/-/{shape}/groups=4,bias=1,renormalize=1/family=randn/seed={seed}"
    for shape in ("t=40,e=32,k=4", "t=7,e=128,k=8")
    for seed in (1, 2)
)


def _powers(words: Tensor) -> Tensor:
    """Float32 scales of packed exponent bytes, four in each int32."""
    byte = words.contiguous().view(torch.uint8)
    return (byte.int() << 23).view(torch.float32)


def _packed(scale: Tensor) -> Tensor:
    """:func:`_powers` back."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)


BINDINGS = (
    _operator(
        "fp8_blockwise_scaled_mm",
        "fp8_gemm_nt",
        "(a, b.t(), a_scale.t().contiguous().t(), b_scale.t(), out_dtype)",
        "(mat_a, mat_b, scales_a, scales_b, out_dtype)",
        takes={"a": E4M3, "b": E4M3, "c": None, "out_dtype": HALVES},
        where="a.shape[0] % 4 == 0",
        domain="n % 128 == 0, k % 128 == 0",
        cases=WHOLE,
    ),
    _operator(
        "sgl_per_token_quant_fp8",
        "scaled_fp8_quant",
        "(x, q, scale)",
        "(input, output_q, output_s)",
        takes={"scale": None, "scale_ub": None, "use_per_token_if_dynamic": True, "num_token_padding": None},
        where="x.shape[1] % 8 == 0",
        shapes={"scale": "(x.shape[0], 1)"},
        numerics="sglang_token",
    ),
    _operator(
        V2[1],
        GROUPS,
        "(x, q, scale, group_size, eps, -448.0, 448.0, False, False, None)",
        V2[0],
        takes=OF_V2 | {"eps": 1e-10, "column_major_scales": False, "tma_aligned_scales": False, "use_ue8m0": False},
        where="x.dim() == 2",
        shapes={"scale": "(*x.shape[:-1], x.shape[-1] // group_size)"},
    ),
    _operator(
        V2[1],
        f"{GROUPS}_packed",
        "(x, q, scale, group_size, eps, -448.0, 448.0, True, False, None)",
        V2[0],
        takes=OF_V2 | {"eps": 1e-10},
        where="x.shape[1] // group_size % 4 == 0",
        shapes={"scale": WORDS.format(width="group_size")},
    ),
    _operator(
        V2[1],
        "silu_and_mul_masked_post_quant",
        "(x, q, packed(scale), group_size, 1e-10, -448.0, 448.0, True, True, masked_m)",
        V2[0],
        takes=OF_V2
        | {
            "masked_m": torch.int32,
            "use_ue8m0": True,
            "rounding": "each",
            "gemm1_alpha": None,
            "gemm1_clamp_limit": None,
        },
        # rows in use are honoured with the activation alone: without it v2 quantises every row, with the wrong strides
        where="x.shape[2] // 2 // group_size % 16 == 0",
        shapes={"scale": WORDS.format(width="(2 * group_size)")},
        functions={"packed": (_packed, _powers)},
        cases=MASKED,
    ),
    _operator(
        "moe_fused_gate",
        "moe_routing",
        "(logits, bias, num_expert_group, topk_group, top_k, 0, 1.0, False) -> topk_weights, topk_ids",
        "(input, bias, num_expert_group, topk_group, topk, num_fused_shared_experts, routed_scaling_factor, "
        "apply_routed_scaling_factor_on_output)",
        takes={"router": "deepseek_v3", "renormalize": True, "routed_scaling_factor": 1.0},
        where="bias is not None and logits.shape[1] <= 32 * num_expert_group",
        cases=ROUTED,
    ),
    bind(
        f"{OPS}.quantization.dsa_quant_k_cache:quantize_k_cache",
        "quantize_k_cache",
        "(cache_k) -> out.view(torch.float8_e4m3fn)",
        "(cache_k)",
        takes={"out": torch.uint8},
        dense=("*",),
        release=NEWER,
    ),
    bind(
        f"{OPS}.attention.dsa.dequant_k_cache:dequantize_k_cache",
        "dequantize_k_cache",
        "(quant_k_cache.view(torch.float8_e4m3fn))",
        "(quant_k_cache)",
        dense=("*",),
        release=NEWER,
    ),
    bind(
        f"{OPS}.kvcache.mla_buffer:set_mla_kv_buffer_triton_fp8_quant",
        "set_mla_kv_buffer",
        "(kv_buffer, loc, cache_k_nope, cache_k_rope, torch.float8_e4m3fn, reserved_skip_index=reserved_skip_index)",
        "(kv_buffer, loc, cache_k_nope, cache_k_rope, fp8_dtype, *, reserved_skip_index=0)",
        dense=("*",),
        release=NEWER,
    ),
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
        where="x.dim() == 2",
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
        # threads beyond N write as well where 4 or 8 bits meet up to 8 rows: docs/findings.md
        domain="n % 128 == 0, k % 32 == 0",
    ),
    _operator(
        "gptq_shuffle",
        "gptq_shuffle",
        "(q_weight, q_perm, bit)",
        "(q_weight, q_perm, bit)",
        takes={"q_perm": torch.int32},
        where="q_perm is None or q_perm.numel() == 0 or q_weight.shape[1] % 2 == 0",  # it moves two words at a time
        absent={"q_perm": "torch.empty(0, dtype=torch.int32, device=q_weight.device)"},
    ),
    _router("topk_softmax", "0.0, ", "moe_softcapping, ", bias=None),  # it adds the bias to the logits
    _router("topk_sigmoid", "", ""),
    *(
        _operator(name, name, "(out, x)", "(out, input)", takes={"x": (torch.bfloat16, torch.float16)})
        for name in ("gelu_and_mul", "gelu_tanh_and_mul")
    ),
    _operator(
        "silu_and_mul",
        "silu_and_mul",
        "(out, x)",
        "(out, input)",
        takes={"x": (torch.bfloat16, torch.float16), "limit": None, "round_silu": False},
    ),
    _operator("moe_sum", "moe_sum", "(x, out)", "(input, output)"),
    _operator(
        "moe_sum_reduce", "moe_sum_reduce", "(x, out, routed_scaling_factor)", "(input, output, routed_scaling_factor)"
    ),
    _operator(
        "qserve_w4a8_per_chn_gemm",
        "qserve_w4a8_per_chn_gemm",
        "(in_feats, kernel, wscales, ascales, w_szs, a_ssums, out)",
        "(_in_feats, _kernel, _wscales, _ascales, _w_szs, _a_ssums, _out_feats)",
        domain="n % 64 == 0, k % 64 == 0",
    ),
    _operator(
        "qserve_w4a8_per_group_gemm",
        "qserve_w4a8_per_group_gemm",
        "(in_feats, kernel, zeros, scales_i8, wscales, ascales, out)",
        "(_in_feats, _kernel, _zeros, _scales_i8, _wscales, _ascales, _out_feats)",
        domain="n % 64 == 0, k % 128 == 0",
    ),
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
        "torch.ones(len(q), dtype=torch.int32, device=q.device), 1, sm_scale, k_scale, v_scale, "
        "logit_cap=logit_cap, sinks=sinks)",
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
        "qo_indptr.diff().max().item(), k_scale, v_scale, sm_scale=sm_scale, logit_cap=logit_cap, "
        "sliding_window_size=sliding_window_size, sinks=sinks)",
        "(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask, "
        "is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None, logit_cap=0.0, "
        "skip_prefix_custom_mask=True, sliding_window_size=-1, sinks=None, window_kv_offsets=None, "
        "xai_temperature_len=-1)",
        ignores=("max_len_extend", "skip_prefix_custom_mask"),
        dense=("*",),
        release=SGLANG,
    ),
    bind(
        f"{OPS}.gemm.fp8_kernel:w8a8_block_fp8_matmul_triton",
        "fp8_gemm_nt",
        "(a, b, a_scale, b_scale, [128, 128], out_dtype)",
        "(A, B, As, Bs, block_size, output_dtype=torch.float16)",
        takes={"a": E4M3, "b": E4M3, "c": None},
        dense=("*",),
        release=NEWER,
    ),
    bind(
        f"{OPS}.gemm.fp8_kernel:triton_scaled_mm",
        "cutlass_scaled_mm",
        "(a, b.t(), a_scale, b_scale.t(), out_dtype, bias)",
        "(input, weight, scale_a, scale_b, out_dtype, bias=None, block_size_m=32, block_size_n=32, block_size_k=32, "
        "use_heuristic=True, num_warps=None, num_stages=None)",
        takes={"a": E4M3, "b": E4M3},
        where="a_scale.shape == (a.shape[0], 1) and b_scale.shape == (1, b.shape[0]) "
        "and (bias is None or bias.dtype == out_dtype)",
        ignores=("block_size_m", "block_size_n", "block_size_k", "use_heuristic", "num_warps", "num_stages"),
        dense=("*",),
        release=NEWER,
    ),
    bind(
        f"{OPS}.quantization.fp8_kernel:_per_token_group_quant_8bit_raw",
        "per_token_group_quant_fp8",
        "(x, group_size, eps, torch.float8_e4m3fn, column_major_scales)",
        "(x, group_size, eps=1e-10, dtype=fp8_dtype, column_major_scales=False, scale_tma_aligned=False, "
        "scale_ue8m0=False, *, output_q=None, output_s=None)",
        takes={"tma_aligned_scales": False, "use_ue8m0": False},
        ignores=("output_q", "output_s"),
        dense=("*",),
        release=NEWER,
    ),
    bind(
        f"{OPS}.quantization.fp8_kernel:static_quant_fp8",
        "scaled_fp8_quant",
        "(x, scale) -> q, ...",
        "(x, x_s, repeat_scale=False)",
        takes={"scale_ub": None, "num_token_padding": None, "use_per_token_if_dynamic": False},
        where="scale is not None",
        numerics="sglang_static",
        dense=("*",),
        release=NEWER,
    ),
    bind(
        f"{OPS}.quantization.act_quant_triton:act_quant",
        "per_token_group_quant_fp8",
        "(x, group_size)",
        "(x, block_size=128, scale_fmt=None)",
        takes={"column_major_scales": False, "tma_aligned_scales": False, "use_ue8m0": False, "eps": 1e-10},
        numerics="sglang_act_quant_triton",
        dense=("*",),
        release=NEWER,
    ),
    bind(
        f"{OPS}.moe.ep_moe_kernels:silu_and_mul_masked_post_quant_fwd",
        "silu_and_mul_masked_post_quant",
        "(x, q, scale, group_size, masked_m)",
        "(input, output, output_scale, quant_group_size, masked_m, scale_ue8m0=False, gemm1_alpha=0.0, "
        "gemm1_clamp_limit=0.0, num_real_tokens=None, topk=None)",
        takes={
            "x": HALVES,
            "masked_m": torch.int32,
            "rounding": "each",
            "use_ue8m0": False,
            "gemm1_alpha": None,
            "gemm1_clamp_limit": None,
        },
        dense=("*",),
        release=NEWER,
    ),
)
