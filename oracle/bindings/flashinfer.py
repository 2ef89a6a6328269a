"""FlashInfer's Python functions: block-scaled and batched products, attention, quantised RoPE, paged KV caches."""

from __future__ import annotations

import torch

from oracle.bindings.binding import bind
from oracle.bindings.forms import FLAT

E4M3, HALVES = torch.float8_e4m3fn, (torch.bfloat16, torch.float16)
RELEASE = "flashinfer-python 0.6.18.post1"
ROPE = (
    "(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox=True, quantize_dtype=None, quant_scale_q=1.0, "
    "quant_scale_kv=1.0, q_rope_out=None, k_rope_out=None, q_nope_out=None, k_nope_out=None, enable_pdl=False"
)
"""The parameters that both have."""

BYTES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
QUANTISED = {"x": HALVES, "layout": "128x4"}

BINDINGS = (
    *(
        bind(
            f"flashinfer:{name}",
            name,
            f"(w{tile})",
            "(x)" if not tile else "(input_tensor, epilogue_tile_m)",
            takes={"w": BYTES},
            where="w.dim() == 2",
            dense=("*",),
            release=RELEASE,
        )
        for name, tile in (("reorder_rows_for_gated_act_gemm", ""), ("shuffle_matrix_a", ", epilogue_tile_m"))
    ),
    *(
        bind(
            f"flashinfer.norm:{name}",
            name,
            f"(q, x, {more}weight, scale, epsilon)",
            f"(out, input, {more}weight, scale, eps=1e-06, enable_pdl=None)",
            takes={"x": HALVES},
            ignores=("enable_pdl",),
            dense=("*",),
            release=RELEASE,
        )
        for name, more in (("rmsnorm_quant", ""), ("fused_add_rmsnorm_quant", "residual, "))
    ),
    *(
        bind(
            "flashinfer:block_scale_interleave",
            name,
            "(scale) -> flat(out)",
            "(unswizzled_sf)",
            takes={"scale": torch.uint8},
            where="scale.dim() == 2",
            functions=FLAT,
            dense=("*",),
            release=RELEASE,
        )
        for name in ("to_blocked", "swizzle_scale")
    ),
    bind(
        "flashinfer:shuffle_matrix_sf_a",
        "shuffle_matrix_sf_a",
        "(scale, epilogue_tile_m) -> flat(out)",
        "(input_tensor, epilogue_tile_m, num_elts_per_sf=16)",
        takes={"scale": torch.uint8},
        functions=FLAT,
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.page:nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
        "(append_key, append_value, slot_mapping, (k_cache, v_cache), (k_scale_cache, v_scale_cache), k_scale, "
        "v_scale, kv_layout)",
        "(append_key, append_value, slot_mapping, paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout='NHD')",
        where="append_key.shape[2] in (64, 128, 256, 512)",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer:mxfp8_quantize",
        "mxfp8_quantize",
        "(x, True, alignment) -> q, flat(scale)",
        "(input, is_sf_swizzled_layout=True, alignment=32, enable_pdl=None, backend='cuda', sf_swizzle_layout=None)",
        takes=QUANTISED | {"element": "e4m3", "rounding": "rceil"},
        functions=FLAT,
        ignores=("enable_pdl", "backend"),
        domain="k % 32 == 0",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer:fp4_quantize",
        "nvfp4_quantize",
        "(x, global_scale, 16, False, True, False) -> q, flat(scale)",
        "(input, global_scale=None, sf_vec_size=16, sf_use_ue8m0=False, is_sf_swizzled_layout=True, "
        "is_sf_8x4_layout=False, is_global_scale_inversed=False, enable_pdl=None, backend='cuda')",
        takes=QUANTISED | {"is_global_scale_inversed": False},
        functions=FLAT,
        ignores=("enable_pdl", "backend"),
        domain="k % 16 == 0",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.fused_moe:cutlass_fused_moe",
        "cutlass_fused_moe_block",
        "(x, topk_ids, topk_weights, w13, w2, torch.bfloat16, [w13_scale, w2_scale], "
        "use_deepseek_fp8_block_scale=True)",
        "(input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output_dtype, "
        "quant_scales, fc1_expert_biases=None, fc2_expert_biases=None, input_sf=None, swiglu_alpha=None, "
        "swiglu_beta=None, swiglu_limit=None, tp_size=1, tp_rank=0, ep_size=1, ep_rank=0, cluster_size=1, "
        "cluster_rank=0, output=None, enable_alltoall=False, use_deepseek_fp8_block_scale=False, "
        "use_w4_group_scaling=False, use_mxfp8_act_scaling=False, min_latency_mode=False, use_packed_weights=False, "
        "use_wfp4afp8_humming=False, tune_max_num_tokens=8192, enable_pdl=None, "
        "activation_type=ActivationType.Swiglu, swizzled_input_sf=True, use_fused_finalize=True, profile_ids=None, "
        "workspace_buffer=None)",
        takes={"topk_ids": torch.int32},
        where="topk_ids.min() >= 0",
        ignores=(
            "output",
            "tune_max_num_tokens",
            "enable_pdl",
            "use_fused_finalize",
            "profile_ids",
            "workspace_buffer",
        ),
        numerics="sm90.promote128",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.gemm:fp8_blockscale_gemm_sm90",
        "fp8_blockscale_gemm_sm90",
        "(input, weight, input_scale.t().contiguous(), weight_scale, out_dtype=out_dtype)",
        "(input, weight, input_scale=None, weight_scale=None, out=None, out_dtype=None)",
        takes={"input": (E4M3, torch.bfloat16), "weight": E4M3, "out_dtype": torch.bfloat16},
        where="weight_scale is not None and weight_scale.shape[0] == (weight.shape[0] + 127) // 128 "
        "and (input_scale is None or input.shape[0] % 4 == 0)",
        ignores=("out",),
        domain="m % 4 == 0, n % 64 == 0, k % 128 == 0",
        numerics="sm90.promote128",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.gemm.gemm_base:get_fp8_blockscale_gemm_runner_sm90().fp8_quantize_1x128",
        "flashinfer_quantize_1x128",
        "(x, q, scale, False)",
        "(input, valueE4M3, scaleFP8SF, use_ue8m0)",
        takes={"scale": torch.float32},
        shapes={"scale": "torch.zeros(x.shape[1] // 128, x.shape[0] + -x.shape[0] % 4, device=x.device)"},
        arches=("sm90",),
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.prefill:single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache",
        "(q, k, v, scale_q, scale_k, scale_v, o_dtype, causal=causal, sm_scale=sm_scale, backend='fa3', "
        "return_lse=True) -> out, lse",
        "(q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None, "
        "causal=False, kv_layout='NHD', pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, "
        "window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, backend='auto', return_lse=False, "
        "kv_cache_sf=None, k_scale=None, v_scale=None)",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.cascade:merge_state",
        "merge_state",
        "(v_a, s_a, v_b, s_b)",
        "(v_a, s_a, v_b, s_b)",
        takes={"v_a": HALVES},
        # a row of all heads is one block of at most 1024 threads, each of which has 16 bytes or a 32nd of a head
        where="v_a.shape[1] * v_a.shape[2] <= 1024 * max(8, v_a.shape[2] // 32)",
        domain="d in (64, 128, 256), h <= 64",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.gemm:bmm_fp8",
        "bmm_fp8",
        "(A, B.mT().contiguous().mT(), A_scale, B_scale, out_dtype)",  # it reads every B as column-major
        "(A, B, A_scale, B_scale, dtype, out=None, backend='cublas')",
        takes={"out_dtype": HALVES},
        where="not (A.dtype == B.dtype == torch.float8_e5m2)",
        # of two formats cuBLASLt has no kernel for rows of the result that are no multiple of 16 bytes
        domain="n % 8 == 0, k % 4 == 0",
        ignores=("backend", "out"),  # which it returns, too
        dense=("*",),
        release=RELEASE,
    ),
    *(
        bind(
            f"flashinfer.rope:{name}",
            name,
            "(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, torch.float8_e4m3fn, quant_scale_q, "
            "quant_scale_kv) -> q_rope, k_rope, q_nope, k_nope",
            f"{ROPE}{more})",
            ignores=("enable_pdl", "backend"),
            # a thread rotates 16 values, half of 32; of 16 rotated columns the second half is wrong (docs/findings.md)
            domain="d % 32 == 0",
            dense=("*",),
            release=RELEASE,
        )
        for name, more in (("rope_quantize_fp8", ", backend='cuda'"), ("mla_rope_quantize_fp8", ""))
    ),
    bind(
        "flashinfer.page:append_paged_kv_cache",
        "append_paged_kv_cache",
        "(append_key, append_value, batch_indices, positions, (k_cache, v_cache), kv_indices, kv_indptr, "
        "kv_last_page_len, kv_layout)",
        "(append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, "
        "kv_last_page_len, kv_layout='NHD')",
        # a token is copied by one block of at most 1024 threads, each of which has 16 bytes or a 32nd of a head
        where="append_key.shape[2] in (64, 128, 256, 512) and append_key.shape[1] * append_key.shape[2] <= "
        "1024 * max(16 // append_key.element_size(), append_key.shape[2] // 32)",
        domain="h <= 32, d % 64 == 0",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.page:append_paged_mla_kv_cache",
        "append_paged_mla_kv_cache",
        "(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, "
        "kv_last_page_len)",
        "(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, "
        "kv_last_page_len)",
        where="(append_ckv.shape[1], append_kpe.shape[1]) == (512, 64)",
        domain="r % 512 == 0, r <= 512, e % 64 == 0, e <= 64",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.fused_moe.fused_routing_dsv3:fused_topk_deepseek",
        "fused_topk_deepseek",
        "(logits, bias, num_expert_group, topk_group, top_k, routed_scaling_factor, topk_weights, topk_ids)",
        "(scores, bias, n_group, topk_group, topk, routed_scaling_factor, topk_values, topk_indices, "
        "launch_with_pdl=True, routing_replay_out=None)",
        # what the release checks: of groups the experts of one, and of those that remain
        where="bias.dtype == logits.dtype and top_k <= 8 and topk_group <= num_expert_group "
        "and topk_group * num_expert_group >= top_k and (logits.shape[1] <= 384 if num_expert_group == 1 else "
        "logits.shape[1] <= 32 * num_expert_group and logits.shape[1] * topk_group <= 128 * num_expert_group)",
        ignores=("launch_with_pdl",),
        domain="e <= 384",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.gemm:gemm_fp8_nt_blockscaled",
        "gemm_fp8_nt_groupwise",
        "(a, b, a_scale, b_scale, 'K', out_dtype=out_dtype)",
        "(a, b, a_scale, b_scale, scale_major_mode='MN', mma_sm=1, out=None, out_dtype=None)",
        takes={"a": E4M3, "b": E4M3, "out_dtype": HALVES},
        where="a_scale.shape[0] == (a.shape[0] + 127) // 128",
        ignores=("mma_sm", "out"),
        arches=("sm100", "sm103", "sm107", "sm120", "sm121"),
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.quantization.fp4_quantization:nvfp4_kv_dequantize",
        "nvfp4_kv_dequantize",
        "(q, scale, global_scale, out_dtype)",
        "(fp4_data, block_scales, global_scale, output_dtype=torch.bfloat16)",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.quantization.fp4_quantization:nvfp4_kv_dequantize_paged",
        "nvfp4_kv_dequantize_paged",
        "((k_cache, v_cache), (k_scale_cache, v_scale_cache), block_table, seq_lens, k_scale, v_scale, output_k, "
        "output_v, kv_layout)",
        "(paged_kv_cache, kv_cache_sf, block_tables, seq_lens, k_scale, v_scale, output_k, output_v, kv_layout='NHD')",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.fused_moe.monomoe:interleave_for_tma_wgmma_up",
        "interleave_for_tma_wgmma_up",
        "(l1)",
        "(w_fp8)",
        release=RELEASE,
    ),
    bind(
        "flashinfer.fused_moe.prepare:interleave_moe_scales_for_sm90_mixed_gemm",
        "interleave_moe_scales_for_sm90_mixed_gemm",
        "(scale, group_size)",
        "(scales, group_size=32)",
        release=RELEASE,
    ),
    bind(
        "flashinfer.norm:layernorm_quant",
        "layernorm_quant",
        "(q, x, gamma, beta, scale, epsilon)",
        "(out, input, gemma, beta, scale, eps=1e-06)",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.norm:fused_rmsnorm_silu",
        "fused_rmsnorm_silu",
        "(x, weight, epsilon, q)",
        "(input, weight, eps=1e-06, out=None, block_scale=None)",
        dense=("*",),
        domain="h % 64 == 0",
        release=RELEASE,
    ),
    bind(
        "flashinfer.triton.norm:rms_norm",
        "rms_norm_scaled",
        "(x, weight, q, epsilon, in_scale, out_scale)",
        "(x, weight, out, eps, in_scale=None, out_scale=None)",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.triton.norm:rms_norm_add_residual",
        "rms_norm_add_residual_scaled",
        "(x, residual, weight, epsilon, q, None, out_scale)",
        "(x, residual, weight, eps, x_out=None, x_in_scale=None, x_out_scale=None)",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "flashinfer.cute_dsl.utils:convert_sf_from_mma_layout",
        "convert_sf_from_mma_layout",
        "(sf_6d, 128 * sf_6d.shape[2], 64 * sf_6d.shape[4], sf_6d.shape[5])",
        "(sf_6d, m, k, num_groups=1, sf_vec_size=16)",
        release=RELEASE,
    ),
)
