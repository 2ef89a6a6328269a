"""vLLM's compiled operators, ``torch.ops._C``, ``torch.ops._C_cache_ops`` and FlashAttention-3, and its Triton kernels:
products, fused quantisers, KV caches, attention.

Parameters of operators are those of the schemas inside the libraries of the release.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oracle.bindings.binding import Binding, bind
from oracle.routines.products.mixed import encoded, nibbles, packed, reordered, words

STABLE = ("vllm._C_stable_libtorch",)
CACHES = "_C_cache_ops"
E4M3, HALVES = torch.float8_e4m3fn, (torch.bfloat16, torch.float16)
SLOTS = {"slot_mapping": torch.int64}


def _operator(
    name: str, pattern: str, signature: str, *, contract: str = "", library: str = "_C", **stated: Any
) -> Binding:
    stated = {"loads": ("vllm._C",), "release": "vllm 0.20.2", "dense": ("*",)} | stated
    return bind(f"torch:ops.{library}.{name}", contract or name, pattern, signature, **stated)


def _router(name: str, factor: str = "", more: str = "", **stated: Any) -> Binding:
    """A router, which writes what no contract has as well: the place of each pair of token and expert."""
    scaled = f"{factor}, " if factor else ""
    return _operator(
        name,
        f"(topk_weights, topk_ids, torch.empty_like(topk_ids), logits, renormalize, {scaled}bias{more})",
        f"(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize, {scaled}bias"
        f"{', input_ids, tid2eid' if more else ''})",
        library="_moe_C",
        loads=("vllm._moe_C",),
        derived={"top_k": "topk_ids.shape[1]"},
        ignores=("token_expert_indices",),
        **stated,
    )


MARLIN_UTILS = "vllm.model_executor.layers.quantization.utils.marlin_utils"
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
F16, NO_ROWS = torch.float16, "torch.empty(0, dtype=torch.int32, device={}.device)"


def _order(name: str, pattern: str, signature: str, *, module: str = MARLIN_UTILS, **stated: Any) -> Binding:
    """A function of Marlin's preparation, in Python."""
    stated = {"release": "vllm 0.20.2", "dense": ("*",)} | stated
    return bind(f"{module}:{name}", name, pattern, signature, **stated)


PLACES = (
    "topk_ids.numel() + num_experts * (block_size - 1) if topk_ids.numel() >= num_experts "
    "else min(topk_ids.numel() + num_experts * (block_size - 1), topk_ids.numel() * block_size)"
)
"""Places of pairs that the caller of ``moe_align_block_size`` allocates."""
COMPILED = "e in (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 576)"
"""Experts for which a router of powers of two and multiples of 64 is compiled."""
UNPADDED: dict[str, object] = {"is_padding": None}
UNSCALED = UNPADDED | {"routed_scaling_factor": 1.0}


def _turned(sizes: Tensor) -> Tensor:
    """Problem sizes ``[G, 3]`` with rows and columns in exchange."""
    return torch.stack([sizes[:, 1], sizes[:, 0], sizes[:, 2]], dim=1)


def _exchanged(sizes: Tensor, a: Tensor) -> Tensor:
    """Problem sizes ``[G, 3]`` as the operator reads them: up to 64 rows it multiplies the operands in exchange."""
    return sizes if len(a) > 64 else _turned(sizes)


def _encoded(b_q: Tensor) -> Tensor:
    """Weights ``[N, K]`` of -8..7 as the operator reads them, which ``cutlass_encode_and_reorder_int4b`` gives."""
    return reordered(words((b_q & 15).to(torch.uint8)).t())


def _decoded(b: Tensor) -> Tensor:
    """:func:`_encoded` back."""
    each = nibbles(b.t())
    rows, k = each.shape
    tiles = each.view(k // 32, rows // 16, 8, 4, 2, 2, 4).permute(1, 5, 2, 0, 4, 3, 6)
    low, high = encoded(tiles.reshape(rows, k)), 8
    return ((low ^ high).to(torch.int8) - high).contiguous()


def _of_packed(scales: Tensor, a: Tensor) -> Tensor:
    """The group scales ``[K/128, N]`` of eight values each, ``-8 s`` to ``-s``."""
    last = scales.view(torch.uint8).view(-1, 8)[:, 7]
    return (last ^ 128).view(a.shape[1] // 128, -1).view(E4M3)


LANES = (  # columns of whole words of four rows, zeros behind the last
    "torch.zeros(-(-x.shape[1] // group_size // 4), x.shape[0] + -x.shape[0] % 4, dtype=torch.int32, "
    "device=x.device)[:, : x.shape[0]].mT"
)
WORDS = tuple(
    f"cutlass_encode_and_reorder_int4b/i4/-/n={n},k={k}/family=codes/seed={seed}"
    for n, k in ((16, 256), (64, 256), (48, 512), (128, 1024))
    for seed in (1, 2)
)

LEAD = "torch.full_like(expert_offsets, {}, dtype=torch.int64)"
"""The distance of two rows of every expert, as the operators of experts want it."""
TILES = ", ".join(
    f"torch.full_like(expert_offsets, {of}, dtype=torch.int32)"
    for of in ("b_q.shape[1] // 16", "b_q.shape[2] // 32", "b_q.shape[1] * 32")
)
"""What is dynamic in the layout of weights in tiles of 16x32: how many tiles along N and along K, and the codes between
two of the latter."""

BINDINGS = (
    _operator(
        "cutlass_w4a8_moe_mm",
        "(out, a, each(b_q), a_token_scales, b_channel_scales, packed(b_group_scales, a, "
        f"expert_offsets), 128, wide(expert_offsets), exchanged(problem_sizes), {LEAD.format('a.shape[1]')}, "
        f"torch.stack([{TILES}], 1), {LEAD.format('b_q.shape[1]')}, "
        f"torch.stack([{LEAD.format('b_q.shape[1]')}, {LEAD.format('0')}], 1), None)",
        "(out_tensors, a_tensors, b_tensors, a_scales, b_scales, b_group_scales, b_group_size, expert_offsets, "
        "problem_sizes, a_strides, b_strides, c_strides, group_scale_strides, maybe_schedule)",
        loads=STABLE,
        takes={"out_dtype": torch.bfloat16, "expert_offsets": torch.int32, "problem_sizes": torch.int32},
        functions={
            "each": (
                lambda b: torch.stack([_encoded(one).t() for one in b]),
                lambda words: torch.stack([_decoded(one.t()) for one in words]),
            ),
            "packed": (
                lambda scales, *_: packed(scales),
                lambda scales, a, experts: _of_packed(scales, a).view(len(experts), a.shape[1] // 128, -1),
            ),
            "exchanged": (_turned, _turned),
            "wide": (Tensor.long, Tensor.int),
        },
        ignores=("a_strides", "b_strides", "c_strides", "group_scale_strides", "maybe_schedule"),
        domain="n % 16 == 0, k % 256 == 0",
    ),
    _operator(
        "cutlass_w4a8_mm",
        "(a, encoded(b_q), packed(b_group_scales, a), 128, b_channel_scales, a_token_scales, out_dtype, None)",
        "(A, B, group_scales, group_size, channel_scales, token_scales, out_type, maybe_schedule)",
        loads=STABLE,
        takes={"out_dtype": torch.bfloat16},
        functions={"encoded": (_encoded, _decoded), "packed": (lambda scales, _: packed(scales), _of_packed)},
        ignores=("maybe_schedule",),
        domain="n % 16 == 0, k % 256 == 0",
    ),
    _operator(
        "persistent_masked_m_silu_mul_quant",
        "(x, masked_m, q, scale, False)",
        "(input, counts, y_q, y_s, use_ue8m0)",
        shapes={"scale": "(*x.shape[:2], x.shape[2] // 256)"},
    ),
    _operator(
        "per_token_group_fp8_quant_packed",
        "(x, q, scale, group_size, eps, -448.0, 448.0)",
        "(input, output_q, output_s_packed, group_size, eps, fp8_min, fp8_max)",
        contract="per_token_group_quant_fp8_packed",
        loads=STABLE,
        takes={"x": HALVES},
        shapes={"scale": LANES},
        numerics="vllm_group_ue8m0",
    ),
    _operator("silu_and_mul", "(out, x)", "(result, input)", takes={"limit": None, "round_silu": True, "x": HALVES}),
    *(
        _operator(name, "(out, x)", "(out, input)", takes={"x": HALVES})
        for name in ("gelu_and_mul", "gelu_tanh_and_mul", "mul_and_silu")
    ),
    _operator(
        "silu_and_mul_with_clamp",
        "(out, x, limit)",
        "(result, input, limit)",
        takes={"x": HALVES, "alpha": 1.0, "beta": 0.0},
    ),
    _operator(
        "swigluoai_and_mul", "(out, x, alpha, limit)", "(out, input, alpha=1.702, limit=7.0)", takes={"x": HALVES}
    ),
    _operator(
        "static_scaled_int8_quant",
        "(q, x, scale, azp)",
        "(result, input, scale, azp)",
        contract="scaled_int8_quant",
        where="scale is not None and (azp is None) == symmetric",
    ),
    _operator(
        "dynamic_scaled_int8_quant",
        "(q, x, scale, None)",
        "(result, input, scale, azp)",
        contract="scaled_int8_quant",
        takes={"scale": None, "azp": None, "symmetric": True},
    ),
    _operator(
        "per_token_group_quant_int8",
        "(x, q, scale, group_size, 1e-10, -128.0, 127.0)",
        "(input, output_q, output_s, group_size, eps, int8_min, int8_max)",
        loads=STABLE,
    ),
    _operator(
        "cutlass_scaled_mm_azp",
        "(out, a, b.t().contiguous().t(), scale_a, scale_b, azp_adj, azp, bias)",
        "(out, a, b, a_scales, b_scales, azp_adj, azp, bias)",
        loads=STABLE,
        domain="n % 16 == 0, k % 16 == 0",
    ),
    _operator(
        "concat_and_cache_mla_rope_fused",
        "(positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, slot_mapping, kv_cache.view(torch.uint8), 'fp8', scale)",
        "(positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, slot_mapping, kv_cache, kv_cache_dtype, kv_cache_scale)",
        library=CACHES,
        takes=SLOTS,
    ),
    _operator("moe_sum", "(x, out)", "(input, output)", library="_moe_C", loads=("vllm._moe_C",)),
    _operator(
        "moe_unpermute",
        "(x, topk_weights, inv_permuted_idx, expert_first_token_offset, topk_weights.shape[1], out)",
        "(permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset, topk, hidden_states)",
        library="_moe_C",
        loads=("vllm._moe_C",),
    ),
    _operator(
        "batched_moe_align_block_size",
        "(max_tokens_per_batch, block_size, expert_num_tokens, sorted_ids, expert_ids, num_tokens_post_pad)",
        "(max_tokens_per_batch, block_size, expert_num_tokens, sorted_token_ids, experts_ids, num_tokens_post_pad)",
        library="_moe_C",
        loads=("vllm._moe_C",),
    ),
    _operator(
        "get_cutlass_batched_moe_mm_data",
        "(expert_offsets, problem_sizes1, problem_sizes2, expert_num_tokens, len(expert_num_tokens), padded_m, n, k)",
        "(expert_offsets, problem_sizes1, problem_sizes2, expert_num_tokens, num_local_experts, padded_m, n, k)",
        loads=STABLE,
    ),
    _operator(
        "cutlass_moe_mm",
        "(out, a, b.mT(), scales_a, scales_b, wide(expert_offsets), exchanged(problem_sizes, a), "
        f"{LEAD.format('a.shape[1]')}, {LEAD.format('a.shape[1]')}, {LEAD.format('b.shape[1]')}, "
        "scales_a.numel() == a.shape[0], scales_b.shape[1] > 1)",
        "(out_tensors, a_tensors, b_tensors, a_scales, b_scales, expert_offsets, problem_sizes, a_strides, b_strides, "
        "c_strides, per_act_token, per_out_ch)",
        loads=STABLE,
        takes={
            "a": E4M3,
            "b": E4M3,
            "out_dtype": HALVES,
            "expert_offsets": torch.int32,
            "problem_sizes": torch.int32,
        },
        functions={"exchanged": (_exchanged, _exchanged), "wide": (Tensor.long, Tensor.int)},
        ignores=("a_strides", "b_strides", "c_strides"),
        domain="n % 8 == 0, k % 16 == 0",
    ),
    _operator(
        "cutlass_encode_and_reorder_int4b",
        "(b)",
        "(B)",
        loads=STABLE,
        where="b.shape[0] % 32 == 0",  # K in multiples of 256: of others it writes out of bounds
        cases=WORDS,
    ),
    _operator(
        "concat_and_cache_mla",
        "(kv_c, k_pe, kv_cache, slot_mapping, 'fp8_ds_mla', torch.ones(1, device=kv_c.device))",
        "(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)",
        contract="concat_and_cache_ds_mla",
        library=CACHES,
        takes=SLOTS | {"ue8m0": False},
        ignores=("scale",),
    ),
    _operator(
        "gather_and_maybe_dequant_cache",
        "(src_cache, dst, block_table, cu_seq_lens, torch.searchsorted(cu_seq_lens, torch.arange(dst.shape[0], "
        "device=dst.device), right=True).sub(1).clamp(max=len(cu_seq_lens) - 2).to(torch.int32), "
        "cu_seq_lens[-1].item(), 'fp8', scale, seq_starts)",
        "(src_cache, dst, block_table, cu_seq_lens, token_to_seq, num_tokens, kv_cache_dtype, scale, seq_starts)",
        library=CACHES,
        where="dst.shape[1] in (320, 576)",
        ignores=("token_to_seq", "num_tokens"),
    ),
    _operator(
        "convert_fp8",
        "(out, src, scale, 'fp8')",
        "(dst_cache, src_cache, scale, kv_cache_dtype)",
        library=CACHES,
    ),
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
            library=CACHES,
            takes=SLOTS,
            where="k_scale.shape == v_scale.shape",
        )
        for name in ("reshape_and_cache", "reshape_and_cache_flash")
    ),
    _operator(
        "concat_and_cache_mla",
        "(kv_c, k_pe, kv_cache, slot_mapping, 'fp8', scale)",
        "(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)",
        library=CACHES,
        takes=SLOTS,
    ),
    _operator(
        "cp_gather_cache",
        "(src_cache, dst, block_table, cu_seq_lens, len(cu_seq_lens) - 1, seq_starts)",
        "(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts)",
        library=CACHES,
    ),
    _operator(
        "cp_gather_and_upconvert_fp8_kv_cache",
        "(src_cache, dst, block_table, seq_lens, workspace_starts, len(seq_lens))",
        "(src_cache, dst, block_table, seq_lens, workspace_starts, batch_size)",
        library=CACHES,
    ),
    _operator(
        "cp_gather_indexer_k_quant_cache",
        "(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens)",
        "(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens)",
        library=CACHES,
    ),
    _operator(
        "indexer_k_quant_and_cache",
        "(k, kv_cache, slot_mapping, quant_block_size, scale_fmt)",
        "(k, kv_cache, slot_mapping, quant_block_size, kv_cache_dtype)",
        library=CACHES,
        takes=SLOTS,
        dense=("kv_cache", "slot_mapping"),
    ),
    _operator(
        "per_token_group_fp8_quant",
        "(x, q, scale, group_size, eps, -448.0, 448.0, use_ue8m0, False, False)",
        "(input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0, dummy_is_scale_transposed, "
        "dummy_is_tma_aligned)",
        contract="per_token_group_quant_fp8",
        loads=STABLE,
        # powers of two have a second floor, on the scale: the recipe vllm_group_ue8m0
        takes={"column_major_scales": False, "tma_aligned_scales": False, "use_ue8m0": False},
        where="x.dim() == 2 and x.is_contiguous()",
        shapes={"scale": "(*x.shape[:-1], x.shape[-1] // group_size)"},
    ),
    _operator(
        "awq_dequantize",
        "(qweight, scales, zeros, 0, 0, 0)",
        "(qweight, scales, zeros, split_k_iters, thx, thy)",
        takes={"scales": F16},
        where="qweight.shape[0] % 32 == 0",  # a block of threads has 32 rows, and none is begun for fewer
        domain="n % 64 == 0, k % 32 == 0",
    ),
    _operator(
        "awq_gemm",
        "(input, qweight, scales, qzeros, split_k_iters)",
        "(in_feats, kernel, scaling_factors, zeros, split_k_iters)",
        takes={"input": F16, "scales": F16},
        # what it checks: N is a multiple of the rows of a group
        where="scales.shape[1] * scales.shape[0] % input.shape[1] == 0",
        domain="n % 64 == 0, k % 32 == 0",
    ),
    _operator(
        "gptq_gemm",
        "(a, b_q_weight, b_gptq_qzeros, b_gptq_scales, g_idx, False, use_v2_format, bit)",
        "(a, b_q_weight, b_gptq_qzeros, b_gptq_scales, b_g_idx, use_exllama, use_v2_format, bit)",
        takes={"g_idx": torch.int32},
        absent={
            "g_idx": "torch.arange(a.shape[1], dtype=torch.int32, device=a.device) "
            "// (a.shape[1] // b_gptq_scales.shape[0])"
        },
        # threads beyond N write as well where 4 or 8 bits meet up to 8 rows: docs/findings.md
        domain="n % 128 == 0, k % 32 == 0",
    ),
    _operator(
        "gptq_shuffle",
        "(q_weight, q_perm, bit)",
        "(q_weight, q_perm, bit)",
        takes={"q_perm": torch.int32},
        where="q_perm is None or q_perm.numel() == 0 or q_weight.shape[1] % 2 == 0",  # it moves two words at a time
        absent={"q_perm": NO_ROWS.format("q_weight")},
    ),
    _operator(
        "gptq_marlin_repack",
        "(b_q_weight, perm, b_q_weight.shape[0] * 32 // num_bits, b_q_weight.shape[1], num_bits, is_a_8bit)",
        "(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit)",
        takes={"perm": torch.int32},
        where="not is_a_8bit or perm is None or perm.numel() == 0",
        absent={"perm": NO_ROWS.format("b_q_weight")},
    ),
    _operator(
        "awq_marlin_repack",
        "(b_q_weight, b_q_weight.shape[0], b_q_weight.shape[1] * 32 // num_bits, num_bits, is_a_8bit)",
        "(b_q_weight, size_k, size_n, num_bits, is_a_8bit)",
    ),
    _order(
        "marlin_permute_scales",
        "(s, size_k, s.shape[1], group_size, is_a_8bit)",
        "(s, size_k, size_n, group_size, is_a_8bit=False)",
    ),
    _order("marlin_permute_bias", "(s)", "(s)"),
    _operator(
        "moe_align_block_size",
        "(topk_ids, num_experts, block_size, sorted_token_ids, expert_ids, num_tokens_post_pad, expert_map)",
        "(topk_ids, num_experts, block_size, sorted_token_ids, experts_ids, num_tokens_post_pad, maybe_expert_map)",
        library="_moe_C",
        loads=("vllm._moe_C",),
        shapes={"sorted_token_ids": f"({PLACES},)", "expert_ids": f"(-(-({PLACES}) // block_size),)"},
    ),
    _operator(
        "get_cutlass_moe_mm_problem_sizes_from_expert_offsets",
        "(expert_first_token_offset, problem_sizes1, problem_sizes2, n, k, swap_ab)",
        "(expert_first_token_offset, problem_sizes1, problem_sizes2, n, k, swap_ab)",
        loads=STABLE,
    ),
    _order(
        "count_expert_num_tokens",
        "(topk_ids, num_local_experts, expert_map)",
        "(topk_ids, num_local_experts, expert_map)",
        module=f"{FUSED_MOE}.utils",
    ),
    _order(
        "trtllm_moe_pack_topk_ids_weights",
        "(topk_ids, topk_weights)",
        "(topk_ids, topk_weights)",
        module=f"{FUSED_MOE}.utils",
    ),
    _order(
        "marlin_zero_points",
        "(zp, zp.shape[0], zp.shape[1], num_bits, is_a_8bit)",
        "(zp, size_k, size_n, num_bits, is_a_8bit=False)",
    ),
    _order(
        "awq_to_marlin_zero_points",
        "(q_zp_packed, q_zp_packed.shape[0], q_zp_packed.shape[1] * 32 // num_bits, num_bits, is_a_8bit)",
        "(q_zp_packed, size_k, size_n, num_bits, is_a_8bit=False)",
    ),
    _order("fp8_fused_exponent_bias_into_scales", "(scales)", "(scales)", module=f"{MARLIN_UTILS}_fp8"),
    _order(
        "pack_fp8_to_int32",
        "(fp8_tensor, size_k_first)",
        "(fp8_tensor, size_k_first=True)",
        module=f"{MARLIN_UTILS}_fp8",
    ),
    _router("topk_softmax", takes=UNSCALED),
    _router("topk_sigmoid", takes=UNSCALED),
    _router("topk_softplus_sqrt", "routed_scaling_factor", ", None, None", takes=UNPADDED, domain=COMPILED),
    _operator(
        "grouped_topk",
        "(logits, num_expert_group, topk_group, top_k, renormalize, routed_scaling_factor, bias, 1)",
        "(scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func)",
        library="_moe_C",
        loads=("vllm._moe_C",),
        where="top_k <= 32 and num_expert_group <= 32",
    ),
    bind(
        "vllm.model_executor.layers.quantization.compressed_tensors.triton_scaled_mm:triton_scaled_mm",
        "cutlass_scaled_mm",
        "(a, b.t(), a_scale, b_scale.t(), out_dtype)",
        "(input, weight, scale_a, scale_b, out_dtype, bias=None, block_size_m=32, block_size_n=32, "
        "block_size_k=32, use_heuristic=True)",
        takes={"a": E4M3, "b": E4M3, "bias": None, "out_dtype": HALVES},
        where="a_scale.shape in ((1,), (a.shape[0], 1)) and b_scale.numel() in (1, b.shape[0]) "
        "and (b_scale.dim() < 2 or b_scale.numel() > 1 or max(b.shape) > 128)",
        ignores=("block_size_m", "block_size_n", "block_size_k", "use_heuristic"),
        dense=("*",),
        release="vllm 0.20.2",
    ),
    bind(
        "torch:ops._vllm_fa3_C.fwd",
        "mha_fwd",
        "(q, k, v, None, None, None, None, None, None, None, None, seqused_k, None, None, page_table, None, None, "
        "None, None, None, q_descale, k_descale, v_descale, softmax_scale, is_causal, window_size_left, "
        "window_size_right, softcap, True, None, num_splits, None, 0, s_aux, 1, 0, None) -> out, softmax_lse, ...",
        "(q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, "
        "max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, "
        "q_descale, k_descale, v_descale, softmax_scale, is_causal, window_size_left, window_size_right, softcap, "
        "is_rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux, cp_world_size, cp_rank, "
        "cp_tot_seqused_k)",
        loads=("vllm.vllm_flash_attn._vllm_fa3_C",),
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
        loads=("vllm._flashmla_C",),
        release="vllm 0.20.2",
        absent={"softmax_scale": "q.shape[3] ** -0.5"},
        domain="h % 64 == 0, h <= 128, t % 64 == 0",
        dense=("*",),
    ),
    _operator(
        "merge_attn_states",
        "(output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse, prefill_tokens_with_context, "
        "output_scale)",
        "(output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse, prefill_tokens_with_context, "
        "output_scale=None)",
        domain="d % 8 == 0",
    ),
    bind(
        "vllm.v1.attention.ops.triton_unified_attention:unified_attention",
        "unified_attention",
        "(q, k, v, out, cu_seqlens_q, cu_seqlens_q.diff().max().item(), seqused_k, seqused_k.max().item(), "
        "softmax_scale, True, (window_size_left, 0 if window_size_left >= 0 else -1), block_table, softcap, None, "
        "k_descale, v_descale, sinks=sinks, kv_quant_mode=1 if k_scale_cache is None else 3, "
        "k_scale_cache=k_scale_cache, v_scale_cache=v_scale_cache)",
        "(q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size, "
        "block_table, softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None, num_par_softmax_segments=None, "
        "softmax_segm_output=None, softmax_segm_max=None, softmax_segm_expsum=None, alibi_slopes=None, "
        "output_scale=None, qq_bias=None, sinks=None, mm_prefix_range=None, use_alibi_sqrt=False, "
        "kv_quant_mode=KVQuantMode.NONE, k_scale_cache=None, v_scale_cache=None, chunk_lookback=-1)",
        absent={
            "softmax_scale": "q.shape[2] ** -0.5",
            "k_descale": "torch.ones(1, device=q.device)",
            "v_descale": "torch.ones(1, device=q.device)",
        },
        where="(k_scale_cache is None) == (v_scale_cache is None)",
        # how many blocks share the keys, and with the dtype of the cache how its scales lie
        ignores=(
            "max_seqlen_q",
            "max_seqlen_k",
            "seq_threshold_3D",
            "num_par_softmax_segments",
            "softmax_segm_output",
            "softmax_segm_max",
            "softmax_segm_expsum",
            "kv_quant_mode",
        ),
        dense=("*",),
        release="vllm 0.20.2",
    ),
)
