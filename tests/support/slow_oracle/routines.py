"""The outputs of every routine, derived a second time from its inputs: codes, with None where nothing is specified."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

from tests.support.slow_oracle import (
    activations,
    attention,
    block_layers,
    caches,
    decisions,
    experts,
    forms,
    fused,
    hashed,
    int8,
    layers,
    mx,
    mx_forms,
    mx_products,
    newer,
    norms,
    pipelines,
    places,
    products,
    quantisers,
    recent,
    sums,
    weight_only,
)
from tests.support.slow_oracle.numbers import Array, decode, divide, encode, multiply, rounded

Inputs = dict[str, Array]
Options = dict[str, object]
Codes = list[int] | list[int | None]
Outputs = Mapping[str, Codes]
NEGATIVE_INFINITY = 0xFF800000


def derive(contract: str, inputs: Inputs, options: Options) -> Outputs:
    """The codes of every output; KeyError for a routine without a second derivation."""
    made = ROUTINES[contract](inputs, options)
    return made if isinstance(made, Mapping) else {"out": made}


def _dtype(options: Options) -> str:
    return str(options["out_dtype"])


def _block(i: Inputs, o: Options) -> Codes:
    a, b, sa, sb = (
        i.get(n) or i[m]
        for n, m in (("a", "input"), ("b", "weight"), ("a_scale", "input_scale"), ("b_scale", "weight_scale"))
    )
    rows = 1 if sb.shape[0] == b.shape[0] > -(-b.shape[0] // 128) else 128
    return products.scaled(a.rows(), b.rows(), sa.rows(), sb.rows(), block=128, b_rows=rows, bias=None, dtype=_dtype(o))


def _wide(i: Inputs, o: Options) -> Codes:
    """A bfloat16 operand is quantised first, as FlashInfer's kernel does with correctly rounded divisions."""
    rows = {"input": 1, "weight": 128}
    for name, height in rows.items():
        x = i[name]
        if x.dtype == "bfloat16":
            q, scale = quantisers.blocks(x, height, 128, quantisers.RULES["flashinfer"])
            shape = (-(-x.shape[0] // height), -(-x.shape[1] // 128))
            i = {**i, name: Array("float8_e4m3fn", x.shape, q), f"{name}_scale": Array("float32", shape, scale)}
    return _block(i, o)


def _torch(i: Inputs, o: Options) -> Codes:
    weight = products.transposed(i["weight"])
    return products.by_shape(i["qinput"], weight, i["scale_a"], i["scale_b"], i.get("bias"), _dtype(o))


def _logits(i: Inputs, o: Options) -> Codes:
    outside = NEGATIVE_INFINITY if o.get("clean_logits") else None
    start, stop = i["cu_seqlen_ks"].codes, i["cu_seqlen_ke"].codes
    return products.logits(i["q"], i["k"], i["k_scale"].values(), i["weights"], start, stop, outside)


def _paged(i: Inputs, o: Options) -> Codes:
    outside = NEGATIVE_INFINITY if o.get("clean_logits") else None
    return products.paged(i["q"], i["kv_cache"], i["weights"], i["context_lens"], i["block_tables"], outside)


def _quantiser(rule: str, rows: int, columns: int) -> Callable[[Inputs, Options], Outputs]:
    def run(i: Inputs, o: Options) -> Outputs:
        wide = int(str(o.get("group_size", columns)))
        q, scale = quantisers.blocks(i["x"], rows, wide, quantisers.RULES[rule], power=bool(o.get("use_ue8m0")))
        return {"q": q, "scale": scale}

    return run


def _dynamic(i: Inputs, o: Options) -> Outputs:
    x = i["x"]
    token = bool(o.get("use_per_token_if_dynamic")) and "scale" not in i
    given = i["scale"].values()[0] if "scale" in i else None
    rule = quantisers.RULES["token" if token else "tensor"]
    q, scale = quantisers.blocks(x, 1 if token else x.shape[0], x.shape[1], rule, scale=given)
    return {"q": q, "scale": scale}


def _flashinfer_rows(i: Inputs, o: Options) -> Outputs:
    """Scales stored transposed with the rows padded to a multiple of 4 by zeros."""
    made = _quantiser("flashinfer", 1, 128)(i, o)
    rows, groups = i["x"].shape[0], i["x"].shape[1] // 128
    lanes = -(-rows // 4) * 4
    stored = [made["scale"][m * groups + g] if m < rows else 0 for g in range(groups) for m in range(lanes)]
    return {"q": made["q"], "scale": stored}


def _rows(function: Callable[..., int]) -> Callable[[Inputs, Options], Codes]:
    def run(i: Inputs, o: Options) -> Codes:
        return [function(*row) for row in zip(*(x.codes for x in i.values()), strict=True)]

    return run


def _records(function: Callable[..., dict[str, int]], *names: str) -> Callable[[Inputs, Options], Outputs]:
    """A function that gives a record, row by row: one output for each field."""

    def run(i: Inputs, o: Options) -> Outputs:
        made = [function(*row) for row in zip(*(i[name].codes for name in names), strict=True)]
        return {field: [record[field] for record in made] for field in made[0]}

    return run


def _named(function: Callable[..., int], *names: str) -> Callable[[Inputs, Options], Codes]:
    return lambda i, o: _rows(function)({name: i[name] for name in names}, o)


def _register(i: Inputs, o: Options) -> Outputs:
    made = layers.scale_products(i)
    g1, g2 = ([encode(v, "float32") for v in made[n]] for n in ("g1", "g2"))
    second = i["w2_input_scale"].values()[0]
    quotients = [encode(divide(v, second), "float32") for v in made["g1"]]
    return {"output1_scales_gate_scalar": g1, "output1_scales_scalar": quotients, "output2_scales_scalar": g2}


def _alpha(i: Inputs, o: Options) -> Outputs:
    made = layers.scale_products(i)
    return {f"{n}_alphas": [encode(v, "float32") for v in made[n]] for n in ("g1", "g2")}


def _normed_blocks(i: Inputs, o: Options, quantise: Callable[[Inputs], Outputs]) -> Outputs:
    """An RMS norm, its blocks, and the sum that it is of."""
    value, sums = fused.norm(i, o, sum_in_dtype=False, rounding="each")
    return {**quantise({**i, "x": value}), "residual": sums}


def _prepared(i: Inputs, o: Options) -> Outputs:
    flags = {"block": "block_quant", "gated": "is_act_and_mul", "trtllm": "is_trtllm"}
    switches = {name: bool(o[flag]) for name, flag in flags.items()}
    return places.prepared(i["w13"], i["w2"], i["w13_scale"], i["w2_scale"], **switches)


def _aligned(i: Inputs, o: Options) -> Outputs:
    return {name: x.codes for name, x in places.padded(i["w13"], i["w2"], bool(o["is_act_and_mul"])).items()}


def _two_levels_back(i: Inputs, o: Options) -> Codes:
    g = i["global_scale"].values()[0]
    return mx.back(i, o, 16, lambda byte: rounded(multiply(decode(byte, mx.E4M3), g), mx.F32))


def _two_levels_to_halves(i: Inputs, o: Options) -> Codes:
    """Code times scale, which float32 holds, times the global scale in float32, then in 16 bits."""
    g, dtype = i["global_scale"].values()[0], str(o["out_dtype"]).removeprefix("torch.")
    exact = (decode(code, mx.F32) for code in mx.back(i, {"layout": "linear"}, 16, lambda b: decode(b, mx.E4M3)))
    return [encode(rounded(multiply(value, g), mx.F32), dtype) for value in exact]


def _mxfp4(i: Inputs, o: Options) -> Outputs:
    return mx.powers(i, {**o, "rounding": "rceil"}, "e2m1")


_SWITCHES = ("package", "use_deep_gemm", "use_flashinfer_moe_fp8")
_CUDA = ("arch", "cuda_major", "cuda_minor")
ROUTINES: Mapping[str, Callable[[Inputs, Options], Codes | Outputs]] = {
    **caches.ROUTINES,
    "fp8_gemm_nt": _block,
    "fp8_blockscale_gemm_sm90": _wide,
    "flashinfer_fp8_blockscale_gemm": _wide,
    "dynamic_flashinfer_deepgemm_blockscale_gemm": _wide,
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": _wide,
    "cutlass_scaled_mm": lambda i, o: products.by_shape(
        i["a"], i["b"], i["a_scale"], i["b_scale"], i.get("bias"), _dtype(o)
    ),
    "cutlass_w8a8_scaled_mm": _torch,
    "rocm_per_tensor_w8a8_scaled_mm": _torch,
    "torch_per_tensor_w8a8_scaled_mm": _torch,
    "torch_per_token_w8a8_scaled_mm": _torch,
    "torch_channelwise_w8a8_scaled_mm": _torch,
    "m_grouped_fp8_gemm_nt_contiguous": lambda i, o: products.contiguous(
        i["a"], i["a_scale"], i["b"], i["b_scale"], i["m_indices"].codes, _dtype(o)
    ),
    "fp8_m_grouped_gemm_nt_masked": lambda i, o: products.masked(
        i["a"], i["a_scale"], i["b"], i["b_scale"], i["masked_m"].codes, _dtype(o)
    ),
    "scaled_grouped_mm": lambda i, o: products.runs(
        i["a"], i["b"], i["scale_a"], i["scale_b"], i["offsets"].codes, _dtype(o)
    ),
    "fp8_gemm_nn": lambda i, o: _block(forms.turned(i, ("b", "b_scale")), o),
    "fp8_gemm_tn": lambda i, o: _block(forms.turned(i, ("a", "a_scale", "b", "b_scale")), o),
    "fp8_gemm_tt": lambda i, o: _block(forms.turned(i, ("a", "a_scale")), o),
    "m_grouped_fp8_gemm_nn_contiguous": lambda i, o: ROUTINES["m_grouped_fp8_gemm_nt_contiguous"](
        forms.turned(i, ("b", "b_scale")), o
    ),
    "fp8_gemm_nt_1d1d": forms.one_by_one,
    "k_grouped_fp8_gemm_nt_contiguous": forms.k_grouped,
    "fp8_gemm_nt_skip_head_mid": forms.with_gaps,
    "fp8_einsum": forms.heads,
    "bmm_fp8": forms.batches,
    "gemm_fp8_nt_groupwise": forms.groupwise,
    "batch_deepgemm_fp8_nt_groupwise": lambda i, o: ROUTINES["fp8_m_grouped_gemm_nt_masked"](i, o),
    **{
        name: forms.runs
        for name in (
            "grouped_mm_fp8",
            "group_gemm_fp8_nt_groupwise",
            "cutlass_blockwise_scaled_grouped_mm",
            "cutlass_moe_mm",
            "cutlass_w4a8_moe_mm",
        )
    },
    "cutlass_w4a8_mm": forms.mixed,
    "unified_encode_int4b": lambda i, o: [forms.NIBBLES[c >> 4] << 4 | forms.NIBBLES[c & 15] for c in i["b"].codes],
    "cutlass_encode_and_reorder_int4b": forms.reordered_int4,
    "cutlass_pack_scale_fp8": lambda i, o: [
        encode(multiply(Fraction(-n), v), forms.E4M3) for v in i["scales"].values() for n in range(8, 0, -1)
    ],
    "fp8_mqa_logits": _logits,
    "fp8_paged_mqa_logits": _paged,
    "mha_fwd": attention.flash,
    "single_prefill_with_kv_cache": attention.prefill,
    "BatchPrefillWithRaggedKVCacheWrapper": attention.batch,
    "BatchPrefillWithPagedKVCacheWrapper": attention.batch,
    "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf": attention.sage,
    "unified_attention": attention.unified,
    "decode_attention_fwd": attention.triton,
    "extend_attention_fwd": attention.triton,
    "flash_mla_with_kvcache": attention.latent,
    "merge_attn_states": attention.merge,
    "merge_state_v2": attention.merge,
    "merge_state": lambda i, o: attention.merge(i, {**o, "base": 2}),
    "Fp8LinearOp": layers.linear,
    "moe_fp8": layers.experts,
    **{name: lambda i, o, name=name: pipelines.experts(name, i, o) for name in pipelines.ROWS},
    **{name: lambda i, o, name=name: block_layers.layer(name, i, o) for name in block_layers.ROWS},
    "apply_fi_trtllm_fp8_per_tensor_moe": layers.tensor_experts,
    "silu_and_mul": lambda i, o: layers.silu_and_mul(i["x"], o),
    **{name: lambda i, o, name=name: activations.activation(name, i, o) for name in activations.ROWS},
    **experts.ROUTINES,
    **sums.ROUTINES,
    **newer.ROUTINES,
    "remap_topk_to_local": lambda i, o: [i["expert_map"].codes[c] if c >= 0 else -1 for c in i["topk_ids"].codes],
    "quant_per_block_int8_cuda": int8.heads,
    "quant_per_block_int8_fuse_sub_mean_cuda": int8.heads,
    "quant_per_warp_int8_cuda": int8.heads,
    "per_channel_fp8": int8.channels,
    "scaled_int8_quant": int8.quantised,
    "per_token_quant_int8": lambda i, o: int8.grouped(i, i["x"].shape[1], "away", 1e-10),
    "per_token_group_quant_int8": lambda i, o: int8.grouped(i, int(str(o["group_size"])), "zero", 1e-10),
    "cutlass_scaled_mm_azp": int8.product,
    **weight_only.ROUTINES,
    "maybe_create_device_identity": lambda i, o: [encode(Fraction(1), "float32")],
    "moe_routing": lambda i, o: layers.routing(i["logits"], i.get("bias"), o),
    **{name: lambda i, o, name=name: layers.library_routing(name, i, o) for name in layers.ROUTERS},
    "scaled_fp8_quant": _dynamic,
    "per_token_group_quant_fp8": _quantiser("group", 1, 128),
    "per_token_cast_to_fp8": _quantiser("cast", 1, 128),
    "per_block_cast_to_fp8": _quantiser("cast", 128, 128),
    "per_channel_cast_to_fp8": _quantiser("cast", 128, 1),
    "flashinfer_quantize_1x128": _flashinfer_rows,
    "flashinfer_quantize_128x128": _quantiser("flashinfer", 128, 128),
    "silu_and_mul_quant": fused.silu_static,
    "silu_and_mul_per_block_quant": fused.silu_blocks,
    "silu_and_mul_masked_post_quant": fused.silu_masked,
    "persistent_masked_m_silu_mul_quant": fused.silu_in_bfloat16,
    "per_token_group_quant_fp8_masked": fused.masked_groups,
    "per_token_group_quant_fp8_packed": fused.packed_groups,
    "rms_norm_static_fp8_quant": fused.norm_static(),
    "fused_add_rms_norm_static_fp8_quant": fused.norm_static(sum_in_dtype=True),
    "rmsnorm_quant": fused.norm_static(rounding="none"),
    "fused_add_rmsnorm_quant": fused.norm_static(rounding="none"),
    "allreduce_fusion": fused.reduced,
    "allreduce_fusion_dynamic": fused.reduced,
    "rms_norm_scaled": fused.norm_scaled(),
    "rms_norm_add_residual_scaled": fused.norm_scaled(root_of_sum=True),
    "fused_rmsnorm_silu": fused.norm_scaled(silu=True),
    "hash_topk": hashed.weights,
    "layernorm_quant": fused.layer_norm,
    "rms_norm_dynamic_per_token_quant": fused.norm_groups,
    "rms_norm_per_block_quant": fused.norm_groups,
    "rope_quantize_fp8": fused.rope,
    "mla_rope_quantize_fp8": fused.rope,
    "mxfp8_quantize": lambda i, o: mx.powers(i, o, str(o["element"])),
    "mxfp4_quantize": lambda i, o: mx.powers(i, o, "e2m1"),
    "nvfp4_quantize": mx.two_levels,
    "scaled_fp4_quant": lambda i, o: mx.two_levels(i, {"layout": "128x4", "is_global_scale_inversed": False}),
    "mxfp8_dequantize": lambda i, o: mx.back(i, o, 32, mx.power),
    "mxfp4_dequantize": lambda i, o: mx.back(i, o, 32, mx.power),
    "nvfp4_dequantize": _two_levels_back,
    "nvfp4_kv_dequantize": _two_levels_to_halves,
    "mxfp8_quantize_columnwise": mx_forms.columns,
    "mxfp8_quantize_3d": mx_forms.columns_of_weights,
    "mxfp8_quantize_2d": mx_forms.squares,
    "mxfp8_dequantize_columnwise": mx_forms.columns_back,
    "transpose_packed_fp4": mx_forms.nibbles_turned,
    "nvfp4_batched_quantize": mx_forms.batch,
    "silu_and_mul_scaled_nvfp4_experts_quantize": lambda i, o: mx_forms.masked(
        {**i, "x": fused.gated(mx_forms.finite(i["x"]), "product")}, o
    ),
    "nvfp4_quantize_shuffled": mx_forms.shuffled_rows_of,
    **dict.fromkeys(("rmsnorm_fp4quant", "add_rmsnorm_fp4quant"), norms.fp4(mx_forms.levels)),
    **dict.fromkeys(("rmsnorm_mxfp4quant", "add_rmsnorm_mxfp4quant"), norms.fp4(_mxfp4)),
    "allreduce_fusion_fp4": norms.fp4(mx_forms.levels, weight_first=False),
    "trtllm_moe_allreduce_fusion": norms.fp4(mx_forms.levels, weight_first=False, reduced=norms.of_experts),
    "trtllm_moe_finalize_allreduce_fusion": norms.fp4(mx_forms.levels, weight_first=False, reduced=norms.of_slots),
    "silu_and_mul_nvfp4_quantize": lambda i, o: mx_forms.levels({**i, "x": fused.gated(i["x"], "product")}, o),
    "silu_and_mul_mxfp8_quantize": lambda i, o: mx.powers(
        {"x": fused.gated(i["x"], "product")}, {**o, "rounding": "rceil"}, "e4m3"
    ),
    "silu_and_mul_mxfp4_quantize": lambda i, o: mx.powers(
        {"x": fused.gated(i["x"], "product")}, {**o, "rounding": "rceil"}, "e2m1"
    ),
    "rms_norm_mxfp8_quantize": lambda i, o: _normed_blocks(
        i, o, lambda x: mx.powers(x, {**o, "rounding": "rceil"}, "e4m3")
    ),
    "rms_norm_mxfp4_quantize": lambda i, o: _normed_blocks(
        i, o, lambda x: mx.powers(x, {**o, "rounding": "rceil"}, "e2m1")
    ),
    "rms_norm_nvfp4_quantize": lambda i, o: _normed_blocks(i, o, lambda x: mx_forms.levels(x, o)),
    "mxfp6_quantize": mx_forms.six,
    "mxfp6_dequantize": lambda i, o: mx_forms.back(i, o, mx_forms.six_value(str(o.get("element", "e3m2")))),
    "mxint8_quantize": mx_forms.int8,
    "mxint8_dequantize": lambda i, o: mx_forms.back(i, o, mx_forms.int8_value),
    "per_token_cast_to_fp4": mx_forms.fp4_cast,
    "cast_back_from_fp4": mx_forms.fp4_back,
    "nvfp4_quantize_stochastic": mx_forms.stochastic,
    "nvfp4_quantize_2d": mx_forms.square,
    "nvfp4_quantize_4over6": mx_forms.four_over_six,
    "hadamard_transform": mx_forms.hadamard,
    "nvfp4_quantize_rht": mx_forms.transformed,
    "nvfp4_quantize_per_token": mx_forms.per_token,
    "nvfp4_quantize_of_fp8": mx_forms.of_fp8,
    "mxfp4_quantize_of_fp8": mx_forms.mxfp4_of_fp8,
    "scaled_fp4_grouped_quantize": mx_forms.masked,
    "mxfp8_grouped_quantize": mx_forms.masked,
    "scaled_fp4_experts_quant": mx_forms.contiguous,
    "mxfp8_experts_quant": mx_forms.contiguous,
    "mxfp4_experts_quant": lambda i, o: mx_forms.contiguous(i, {**o, "four": True}),
    "silu_and_mul_scaled_fp4_experts_quant": lambda i, o: mx_forms.contiguous(
        {**i, "x": fused.gated(mx_forms.finite(i["x"]), "product")}, o
    ),
    "silu_and_mul_mxfp4_experts_quant": lambda i, o: mx_forms.contiguous(
        {**i, "x": fused.gated(mx_forms.finite(i["x"]), "product")}, {**o, "four": True}
    ),
    "block_scales_to_mxfp8": mx_forms.relabelled,
    "fp8_block_to_mxfp8": mx_forms.requantised,
    "mxfp8_to_fp8_block": mx_forms.to_blocks,
    "mm_mxfp8": mx_products.mm,
    "mm_fp4": mx_products.mm,
    "scaled_mm": mx_products.scaled_mm,
    "bmm_mxfp8": mx_products.batched,
    "group_gemm_mxfp8_mxfp4_nt_groupwise": lambda i, o: mx_products.pointed(i, o, 32, "e8m0"),
    "group_gemm_nvfp4_nt_groupwise": lambda i, o: mx_products.pointed(i, o, 16, mx_products.E4M3),
    "scaled_grouped_mm_mx": mx_products.ended,
    "fp8_fp4_mqa_logits": mx_products.fp4_logits,
    "fp8_fp4_paged_mqa_logits": mx_products.fp4_paged,
    "scaled_grouped_mm_mx_k_groups": mx_products.k_groups,
    "fp8_fp4_gemm_nt": mx_products.deep,
    **{
        f"fp8_fp4_gemm_{form}": mx_products.deep_turned(names)
        for form, names in (("nn", "b"), ("tn", "ab"), ("tt", "a"))
    },
    "k_grouped_fp8_gemm_tn_contiguous": mx_products.k_groups_turned,
    "m_grouped_fp8_fp4_gemm_nn_contiguous": mx_products.deep,
    "m_grouped_fp8_fp4_gemm_nt_psum": mx_products.deep,
    "m_grouped_fp8_fp4_gemm_nt_contiguous": mx_products.deep,
    "m_grouped_fp8_fp4_gemm_nt_masked": mx_products.deep,
    "per_tensor_dequantize": lambda i, o: layers.dequantised(i["q"], i["inv_scale"].values()[0]),
    "ceil_to_ue8m0": lambda i, o: quantisers.ceil_to_power(i["x"]),
    "requantize_with_max_scale": lambda i, o: layers.requantised(i["weight"], i["weight_scale"], i["logical_widths"]),
    "convert_to_channelwise": lambda i, o: places.repeated(i["weight_scale"], i["logical_widths"]),
    "normalize_e4m3fn_to_e4m3fnuz": lambda i, o: places.fnuz(i),
    "all_close_1d": lambda i, o: [places.close(i["x"])],
    "make_fp8_moe_alpha_scales_for_fi": _alpha,
    "register_scales_for_trtllm_fp8_per_tensor_moe": _register,
    "calc_diff": lambda i, o: [layers.difference(i["x"], i["y"])],
    "get_col_major_tma_aligned_tensor": lambda i, o: i["scale"].codes,
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": lambda i, o: places.packed_exponents(i["scale"]),
    "transform_sf_into_required_layout": lambda i, o: places.required(
        i["scale"], int(str(o["mn"])), int(str(o["gran_mn"])), str(o["target"])
    ),
    "swizzle_scale": lambda i, o: places.swizzled(i["scale"], str(o["tile"])),
    "to_blocked": lambda i, o: places.blocked(i["scale"]),
    "from_blocked": lambda i, o: places.from_blocked(
        i["memory"], int(str(o["rows"])), int(str(o["columns"])), str(o["tile"])
    ),
    "swizzle_scale_experts": lambda i, o: places.of_experts(
        i["scale"], i["first"].codes, i["rows"].codes, str(o["placement"]), int(str(o["capacity"]))
    ),
    "pad_token_groups": lambda i, o: places.padded_tokens(
        i["x"], i["group_end_offsets"].codes, int(str(o["alignment_size"]))
    ),
    "unpad_token_groups": lambda i, o: places.unpadded_tokens(
        i["padded"], i["group_end_offsets"].codes, i["padded_group_start_offsets"].codes
    ),
    "to_blocked_k_groups": lambda i, o: places.of_column_groups(i["scale"], i["ends"].codes),
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": lambda i, o: places.packed_groups(
        i["scale"], i["ks"].codes, int(str(o["gran_k"]))
    ),
    "swap_w13_to_w31": lambda i, o: places.take(i["x"], places.exchanged(i["x"].shape[-2])),
    "reorder_rows_for_gated_act_gemm": lambda i, o: places.take(i["w"], places.alternating(i["w"].shape[0])),
    "shuffle_matrix_a": lambda i, o: places.take(i["w"], places.fragments(i["w"].shape[0])),
    "shuffle_matrix_sf_a": lambda i, o: places.blocked_in_order(i["scale"], places.fragments(i["scale"].shape[0])),
    "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe": lambda i, o: places.rotated(
        i["gemm1_weights"], i["gemm2_weights"], bool(o["is_gated"])
    ),
    "transform_weights_for_mega_moe": lambda i, o: places.fused_experts(i["l1"], i["l1_sf"], i["l2"], i["l2_sf"], True),
    "transform_weights_for_mega_moe_sm90": lambda i, o: places.fused_experts(
        i["l1"], i["l1_sf"], i["l2"], i["l2_sf"], False
    ),
    "make_routing_data": recent.pairs,
    "interleave_moe_weights_for_sm90_mixed_gemm": recent.interleaved,
    "preprocess_moe_weights_for_sm90_mixed_gemm_humming": recent.humming,
    "make_nvfp4_global_scale": recent.global_scale,
    "mm_nvfp4_svdquant": recent.svdquant,
    "trtllm_mxint4_block_scale_moe": recent.mxint4,
    "trtllm_batch_decode_sparse_mla_dsv4": recent.pools,
    "msa_sparse_attention": recent.blocks,
    "cute_dsl_fmha_blockscaled_prefill": recent.blockscaled,
    "interleave_for_tma_wgmma_up": lambda i, o: {"l1": places.take(i["l1"], places.eights(i["l1"].shape[1]))},
    "interleave_moe_scales_for_sm90_mixed_gemm": lambda i, o: places.lines(i["scale"], int(str(o["group_size"]))),
    "convert_sf_from_mma_layout": lambda i, o: places.from_six_axes(i["sf_6d"]),
    "pack_ue8m0_to_int": lambda i, o: places.packed_exponents(i["x"]),
    "unpack_ue8m0_from_int": lambda i, o: [
        (word >> 8 * byte & 0xFF) << 23 for word in i["packed_sf"].codes for byte in range(4)
    ],
    "align_fp8_moe_weights_for_fi": _aligned,
    "prepare_fp8_moe_layer_for_fi": _prepared,
    "align": _named(lambda x, y: min(v for v in range(x, x + y) if v % y == 0), "x", "y"),
    "ceil_div": _named(lambda x, y: int(-(Fraction(-x, y) // 1)), "x", "y"),
    "calculate_tile_tokens_dim": _named(places.tile_tokens, "num_tokens", "top_k", "num_experts"),
    "is_deep_gemm_supported": _named(decisions.deep_gemm, "arch", *_SWITCHES),
    "is_deep_gemm_e8m0_used": _named(
        decisions.deep_gemm_e8m0, "arch", *_SWITCHES, "use_deep_gemm_e8m0", "use_deep_gemm_e8m0_hopper"
    ),
    "should_use_deepgemm_for_fp8_linear": _named(
        decisions.deep_gemm_linear, "arch", *_SWITCHES, "bfloat16_out", "n", "k"
    ),
    "cutlass_fp8_supported": _named(decisions.cutlass, *_CUDA),
    "cutlass_block_fp8_supported": _named(decisions.cutlass_block, *_CUDA),
    "cutlass_group_gemm_supported": _named(decisions.cutlass_group, *_CUDA),
    "sparse_cutlass_supported": _named(decisions.sparse, *_CUDA),
    "use_rowwise_torch_scaled_mm": _named(
        decisions.rowwise, "rocm", "capability_major", "capability_minor", "torch_major", "torch_minor"
    ),
    "get_flashinfer_moe_backend": _named(decisions.moe_backend, "arch", "choice"),
    "is_flashinfer_supporting_global_sf": _named(decisions.global_scale, "backend"),
    "get_num_sms": _named(decisions.num_sms, "product", "reported"),
    "select_cutlass_fp8_gemm_impl": _records(
        decisions.experts_record,
        *("config", "in_dtype", "dp_size", "ep_rank", "ep_size", "tp_rank", "tp_size", "out_dtype", "quant_config"),
        "use_deepseek_fp8_block_scale",
    ),
    "build_flashinfer_fp8_cutlass_moe_prepare_finalize": _records(
        decisions.prepare_finalize, "config", "dp_size", "ep_size", "tp_size", "use_deepseek_fp8_block_scale"
    ),
    "dispatch_w8a8_scaled_mm": _named(
        places.route_number,
        "cutlass_fp8_supported",
        "per_tensor_weights",
        "per_tensor_activations",
        "use_per_token_if_dynamic",
        "rocm",
        "rowwise",
    ),
}
PROPERTIES: Mapping[str, Callable[[Inputs, Options, Mapping[str, Array]], str | None]] = {
    "get_paged_mqa_logits_metadata": lambda i, o, out: places.partition_fault(
        out["out"], i["context_lens"].codes, int(str(o.get("block_size", 64)))
    ),
}
"""Routines with several right answers: what is wrong with one, or None."""
