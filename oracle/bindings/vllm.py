"""vLLM's compiled operators, ``torch.ops._C``, ``torch.ops._C_cache_ops`` and FlashAttention-3: products, fused
quantisers, KV caches, attention.

Parameters are those of the schemas inside the libraries of the release.
"""

from __future__ import annotations

from typing import Any

import torch

from oracle.bindings.binding import Binding, bind

STABLE = "vllm._C_stable_libtorch"
E4M3, HALVES = torch.float8_e4m3fn, (torch.bfloat16, torch.float16)
SLOTS = {"slot_mapping": torch.int64}


def _operator(
    name: str, pattern: str, signature: str, *, contract: str = "", cache: bool = False, **stated: Any
) -> Binding:
    library = "_C_cache_ops" if cache else "_C"
    stated = {"loads": "vllm._C", "release": "vllm 0.20.2", "dense": ("*",)} | stated
    return bind(f"torch:ops.{library}.{name}", contract or name, pattern, signature, **stated)


BINDINGS = (
    _operator(
        "cutlass_scaled_mm",
        "(out, a, b.t(), a_scale, b_scale, bias)",
        "(out, a, b, a_scales, b_scales, bias)",
        loads=STABLE,
        takes={"a": E4M3, "b": E4M3, "out_dtype": HALVES},
        # no scales of blocks, which lie otherwise in a call; the scale [1, 1] of one whole block is such a one
        where="a_scale.numel() in (1, a.shape[0]) and b_scale.numel() in (1, b.shape[0]) "
        "and (b_scale.dim() < 2 or b_scale.numel() > 1 or max(b.shape) > 128) "
        "and (bias is None or bias.dtype == out_dtype)",
        domain="n % 16 == 0, k % 16 == 0",
    ),
    _operator("cutlass_pack_scale_fp8", "(scales)", "(scales)", loads=STABLE),
    _operator("silu_and_mul_quant", "(q, x, scale)", "(result, input, scale)", dense=()),
    _operator(
        "silu_and_mul_per_block_quant",
        "(q, x, scale, group_size, scale_ub, is_scale_transposed)",
        "(out, input, scales, group_size, scale_ub=None, is_scale_transposed=False)",
        takes={"x": HALVES, "is_scale_transposed": False},
    ),
    _operator(
        "rms_norm_static_fp8_quant",
        "(q, x, weight, scale, epsilon)",
        "(result, input, weight, scale, epsilon)",
        takes={"rounding": "product"},
    ),
    _operator(
        "fused_add_rms_norm_static_fp8_quant",
        "(q, x, residual, weight, scale, epsilon)",
        "(result, input, residual, weight, scale, epsilon)",
        takes={"rounding": "product"},
    ),
    _operator(
        "rms_norm_dynamic_per_token_quant",
        "(q, x, weight, scale, epsilon, scale_ub, residual)",
        "(result, input, weight, scale, epsilon, scale_ub, residual)",
    ),
    _operator(
        "rms_norm_per_block_quant",
        "(q, x, weight, scale, epsilon, scale_ub, residual, group_size, is_scale_transposed)",
        "(result, input, weight, scale, epsilon, scale_ub, residual, group_size, is_scale_transposed)",
        takes={"group_size": (64, 128), "is_scale_transposed": False},
    ),
    _operator(
        "static_scaled_fp8_quant",
        "(q, x, scale)",
        "(result, input, scale, group_shape=None)",
        contract="scaled_fp8_quant",
        takes={"scale_ub": None, "use_per_token_if_dynamic": False, "num_token_padding": None},
        where="scale is not None",
    ),
    _operator(
        "dynamic_scaled_fp8_quant",
        "(q, x, scale)",
        "(result, input, scale)",
        contract="scaled_fp8_quant",
        takes={"scale": None, "scale_ub": None, "use_per_token_if_dynamic": False},
        shapes={"scale": "(1,)"},
    ),
    _operator(
        "dynamic_per_token_scaled_fp8_quant",
        "(q, x, scale, scale_ub)",
        "(result, input, scale, scale_ub)",
        contract="scaled_fp8_quant",
        takes={"scale": None, "use_per_token_if_dynamic": True},
        shapes={"scale": "(x.shape[0], 1)"},
    ),
    *(
        _operator(
            name,
            "(key, value, key_cache, value_cache, slot_mapping, 'fp8', k_scale, v_scale)",
            "(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)",
            cache=True,
            takes=SLOTS,
            where="k_scale.shape == v_scale.shape",
        )
        for name in ("reshape_and_cache", "reshape_and_cache_flash")
    ),
    _operator(
        "concat_and_cache_mla",
        "(kv_c, k_pe, kv_cache, slot_mapping, 'fp8', scale)",
        "(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)",
        cache=True,
        takes=SLOTS,
    ),
    _operator(
        "cp_gather_cache",
        "(src_cache, dst, block_table, cu_seq_lens, len(cu_seq_lens) - 1, seq_starts)",
        "(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts)",
        cache=True,
    ),
    _operator(
        "cp_gather_and_upconvert_fp8_kv_cache",
        "(src_cache, dst, block_table, seq_lens, workspace_starts, len(seq_lens))",
        "(src_cache, dst, block_table, seq_lens, workspace_starts, batch_size)",
        cache=True,
    ),
    _operator(
        "cp_gather_indexer_k_quant_cache",
        "(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens)",
        "(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens)",
        cache=True,
    ),
    _operator(
        "indexer_k_quant_and_cache",
        "(k, kv_cache, slot_mapping, quant_block_size, scale_fmt)",
        "(k, kv_cache, slot_mapping, quant_block_size, kv_cache_dtype)",
        cache=True,
        takes=SLOTS,
        dense=("kv_cache", "slot_mapping"),
    ),
    bind(
        "torch:ops._vllm_fa3_C.fwd",
        "mha_fwd",
        "(q, k, v, None, None, None, None, None, None, None, None, seqused_k, None, None, page_table, None, None, "
        "None, None, None, q_descale, k_descale, v_descale, softmax_scale, is_causal, window_size_left, "
        "window_size_right, 0.0, True, None, num_splits, None, 0, s_aux, 1, 0, None) -> out, softmax_lse, ...",
        "(q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, "
        "max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, "
        "q_descale, k_descale, v_descale, softmax_scale, is_causal, window_size_left, window_size_right, softcap, "
        "is_rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux, cp_world_size, cp_rank, "
        "cp_tot_seqused_k)",
        loads="vllm.vllm_flash_attn._vllm_fa3_C",
        release="vllm 0.20.2",
        absent={  # the build takes sequences of several lengths alone
            "seqused_k": "torch.full((k.shape[0],), k.shape[1], dtype=torch.int32, device=k.device)",
            "softmax_scale": "q.shape[3] ** -0.5",
        },
        dense=("*",),
        ignores=("scheduler_metadata", "pack_gqa", "sm_margin"),
        numerics="sm90.fa3.tile",
    ),
    bind(
        "torch:ops._flashmla_C.sparse_decode_fwd",
        "flash_mla_with_kvcache",
        "(q, k_cache, indices, None, attn_sink, None, None, None, None, None, 512, softmax_scale, None) "
        "-> out, softmax_lse, ...",
        "(q, k_cache, indices, topk_length, attn_sink, tile_scheduler_metadata, num_splits, extra_k_cache, "
        "extra_indices, extra_topk_length, head_dim_v, softmax_scale, out)",
        loads="vllm._flashmla_C",
        release="vllm 0.20.2",
        absent={"softmax_scale": "q.shape[3] ** -0.5"},
        domain="h % 64 == 0, h <= 128, t % 64 == 0",
        dense=("*",),
    ),
)
