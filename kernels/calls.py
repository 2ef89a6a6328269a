"""Adapters from the named inputs and options of a contract to one call of a routine.

Every function here (or what it returns) is a runner: it takes a contract's inputs and options, allocates outputs where
the routine writes into one, and never writes into an input. :mod:`kernels.subjects` lists which runner serves which
contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernels import (
    batched,
    blockscaled,
    checks,
    grouped,
    layout,
    linear,
    logits,
    moe,
    moe_layer,
    moe_pipelines,
    mx_logits,
    mx_products,
    platform,
    tiles,
)
from kernels.errors import OptionError

T = TypeVar("T")
Inputs = Mapping[str, Tensor]
Options = Mapping[str, Any]
Outputs = Tensor | dict[str, Tensor]
Runner = Callable[[Inputs, Options], Outputs]
"""A routine on the inputs and options of its contract."""


def with_out_dtype(verb: Callable[..., Tensor]) -> Callable[[Inputs, Options], Tensor]:
    """torch's linear routines, which take their inputs by the contract's names; bf16 where no dtype is asked for."""

    def run(inputs: Inputs, options: Options) -> Tensor:
        return verb(**inputs, **{"out_dtype": torch.bfloat16, **options})

    return run


def cutlass_scaled_mm(inputs: Inputs, options: Options) -> Tensor:
    """``b`` is stored ``[N, K]``; a block scale is stored ``[N/128, K/128]``, recognised by both shapes."""
    a_scale, b_scale = inputs["a_scale"], inputs["b_scale"]
    n, k = inputs["b"].shape
    nb, kb = -(-n // 128), -(-k // 128)
    stored = tuple(b_scale.shape) == (nb, kb)
    block = stored and (a_scale.dim() == 2 and a_scale.shape[1] == kb > 1 or (kb == 1 and nb not in (1, n)))
    scale = b_scale.t() if block else b_scale
    a, b, bias = inputs["a"], inputs["b"].t(), inputs.get("bias")
    return linear.cutlass_scaled_mm(a, b, a_scale, scale, out_dtype_of(options), bias)


def out_dtype_of(options: Options) -> torch.dtype:
    """The output dtype of a call, bf16 when none is named; OptionError when it is no dtype."""
    dtype = options.get("out_dtype", torch.bfloat16)
    if not isinstance(dtype, torch.dtype):
        raise OptionError(f"out_dtype must be a torch dtype, got {dtype!r}")
    return dtype


def gemm(inputs: Inputs, options: Options) -> Tensor:
    """DeepGEMM's dense product into a fresh output."""
    a, b = inputs["a"], inputs["b"]
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype_of(options), device=a.device)
    blockscaled.fp8_gemm_nt((a, inputs["a_scale"]), (b, inputs["b_scale"]), out, c=inputs.get("c"))
    return out


def blockscale_sm90(inputs: Inputs, options: Options) -> Tensor:
    """FlashInfer's product; a weight scale per token is not offered."""
    scale = inputs.get("weight_scale")
    if scale is not None and scale.shape[0] != -(-inputs["weight"].shape[0] // 128):
        raise NotImplementedError("weight_scale [N, K/128]: the kernel indexes it per 128x128 block; it is refused")
    operands = (inputs["input"], inputs["weight"], inputs.get("input_scale"), scale)
    return blockscaled.fp8_blockscale_gemm_sm90(*operands, out_dtype=out_dtype_of(options))


def wide_input(verb: Callable[..., Tensor]) -> Runner:
    """Routines with a bf16 input, which give bf16 and take no output dtype."""

    def run(inputs: Inputs, options: Options) -> Tensor:
        if out_dtype_of(options) != torch.bfloat16:
            raise OptionError(f"out_dtype={out_dtype_of(options)}: the routine gives bfloat16")
        return verb(inputs["input"], inputs["weight"], inputs["weight_scale"])

    return run


def block_scaled_layer(input: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """The layer object: weights after loading, then the product."""
    kernel = blockscaled.FlashInferFp8DeepGEMMDynamicBlockScaledKernel(use_deep_gemm_e8m0=False)
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale_inv = (torch.nn.Parameter(t, requires_grad=False) for t in (weight, weight_scale))
    kernel.process_weights_after_loading(layer)
    weight = checks.tensor("weight", layer.weight)
    return kernel.apply_block_scaled_mm(input, weight, None, checks.tensor("weight_scale_inv", layer.weight_scale_inv))


def contiguous(inputs: Inputs, options: Options) -> Tensor:
    """The contiguous grouped product; padding rows stay zero."""
    a, b = inputs["a"], inputs["b"]
    out = torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype_of(options), device=a.device)
    indices = inputs["m_indices"].to(torch.int32)
    grouped.m_grouped_fp8_gemm_nt_contiguous((a, inputs["a_scale"]), (b, inputs["b_scale"]), out, indices)
    return out


def masked(inputs: Inputs, options: Options) -> Tensor:
    """The masked grouped product; rows past a group's count stay zero."""
    a, b = inputs["a"], inputs["b"]
    out = torch.zeros(*a.shape[:2], b.shape[1], dtype=out_dtype_of(options), device=a.device)
    rows = inputs["masked_m"].to(torch.int32)
    expected = options.get("expected_m", a.shape[1])
    left, right = (a, inputs["a_scale"]), (b, inputs["b_scale"])
    grouped.fp8_m_grouped_gemm_nt_masked(left, right, out, rows, expected)
    return out


def grouped_scaled(inputs: Inputs, options: Options) -> Tensor:
    """The grouped product with scales per token and per channel."""
    a, b, scale_a, scale_b, offsets = (inputs[n] for n in ("a", "b", "scale_a", "scale_b", "offsets"))
    return grouped.scaled_grouped_mm(a, b, scale_a, scale_b, offsets.to(torch.int32), out_dtype_of(options))


def paired(verb: Callable[..., None], shape: Callable[[Inputs], tuple[int, ...]], *more: str) -> Runner:
    """DeepGEMM's routines ``(a, scale), (b, scale), out``, into a fresh output of zeros; ``more``: further inputs."""

    def run(inputs: Inputs, options: Options) -> Tensor:
        pairs = [(inputs[side], inputs[f"{side}_scale"]) for side in "ab"]
        dtype = options.get("out_dtype", torch.float32 if "c" in more else torch.bfloat16)
        out = torch.zeros(shape(inputs), dtype=dtype, device=inputs["a"].device)
        named = {name: inputs[name] for name in more if name in inputs}
        verb(*pairs, out, **{name: x.to(torch.int32) if name == "m_indices" else x for name, x in named.items()})
        return out

    return run


def extents(*places: tuple[str, int]) -> Callable[[Inputs], tuple[int, ...]]:
    """The shape that these axes of these inputs make."""
    return lambda inputs: tuple(inputs[name].shape[axis] for name, axis in places)


def k_grouped(inputs: Inputs, options: Options) -> Tensor:
    """The product of every group of K, into a fresh output."""
    c, ks = inputs["c"], inputs["ks"]
    out = torch.zeros_like(c, memory_format=torch.contiguous_format)
    left, right = (inputs["a"], inputs["a_scale"]), (inputs["b"], inputs["b_scale"])
    batched.k_grouped_fp8_gemm_nt_contiguous(left, right, out, ks.tolist(), ks.to(torch.int32), c=c)
    return out


def skip_head_mid(inputs: Inputs, options: Options) -> Tensor:
    """The product in heads; gaps stay zero."""
    splits = (int(options.get("left", 128)), int(options.get("mid", 64)), int(options.get("right", 128)))
    n = inputs["b"].shape[0]
    out = torch.zeros(
        inputs["a"].shape[0],
        n + n // (splits[0] + splits[2]) * splits[1],
        dtype=out_dtype_of(options),
        device=inputs["a"].device,
    )
    left, right = (inputs["a"], inputs["a_scale"]), (inputs["b"], inputs["b_scale"])
    batched.fp8_gemm_nt_skip_head_mid(left, right, out, splits)
    return out


def bmm(inputs: Inputs, options: Options) -> Tensor:
    """The batched product."""
    return batched.bmm_fp8(**inputs, dtype=out_dtype_of(options))


def batched_masked(inputs: Inputs, options: Options) -> Tensor:
    """The masked product under FlashInfer's name."""
    given = {**inputs, "masked_m": inputs["masked_m"].to(torch.int32)}
    m = inputs["a"].shape[1]
    return batched.batch_deepgemm_fp8_nt_groupwise(**given, expected_m=m, out_dtype=out_dtype_of(options))


def runs(verb: Callable[..., Tensor]) -> Runner:
    """Products of runs of rows, whose integers a contract may give as int64."""

    def run(inputs: Inputs, options: Options) -> Tensor:
        whole = ("m_indptr", "expert_offsets", "problem_sizes")
        given = {name: x.to(torch.int32) if name in whole else x for name, x in inputs.items()}
        return verb(**given, out_dtype=out_dtype_of(options))

    return run


def mqa_logits(inputs: Inputs, options: Options) -> Tensor:
    """Attention logits of a contiguous cache."""
    names = ("q", "k", "k_scale", "weights", "cu_seqlen_ks", "cu_seqlen_ke")
    q, k, k_scale, weights, ks, ke = (inputs[n] for n in names)
    clean = bool(options.get("clean_logits", True))
    return logits.fp8_mqa_logits(q, (k, k_scale), weights, ks.to(torch.int32), ke.to(torch.int32), clean)


def paged_logits(inputs: Inputs, options: Options) -> Tensor:
    """Attention logits of a paged cache, with its own schedule."""
    cache, lens = inputs["kv_cache"], inputs["context_lens"].to(torch.int32)
    sms = 132 if cache.device.type == "cpu" else None
    schedule = logits.get_paged_mqa_logits_metadata(lens, cache.shape[1], sms)
    tables = inputs["block_tables"].to(torch.int32)
    longest = options.get("max_model_len", tables.shape[1] * cache.shape[1])
    return logits.fp8_paged_mqa_logits(
        inputs["q"],
        cache,
        inputs["weights"],
        lens,
        tables,
        schedule,
        longest,
        bool(options.get("clean_logits", True)),
    )


def fp4_logits(inputs: Inputs, options: Options) -> Tensor:
    """FP4 attention logits of a contiguous cache."""
    names = ("q", "q_sf", "k", "k_sf", "weights", "cu_seqlen_ks", "cu_seqlen_ke")
    q, q_sf, k, k_sf, weights, ks, ke = (inputs[n] for n in names)
    return mx_logits.fp8_fp4_mqa_logits(
        (q, q_sf),
        (k, k_sf),
        weights,
        ks.to(torch.int32),
        ke.to(torch.int32),
        bool(options.get("clean_logits", True)),
        options.get("max_seqlen_k", 0),
        out_dtype_of(options),
    )


def fp4_paged_logits(inputs: Inputs, options: Options) -> Tensor:
    """FP4 attention logits of a paged cache, which need no schedule."""
    cache, lens = inputs["kv_cache"], inputs["context_lens"].to(torch.int32)
    tables = inputs["block_tables"].to(torch.int32)
    longest = options.get("max_model_len") or tables.shape[1] * cache.shape[1]
    return mx_logits.fp8_fp4_paged_mqa_logits(
        (inputs["q"], inputs["q_sf"]),
        cache,
        inputs["weights"],
        lens,
        tables,
        tables,
        longest,
        bool(options.get("clean_logits", True)),
        out_dtype_of(options),
    )


def codes_and_scale(verb: Callable[..., tuple[Tensor, Tensor]], first: str = "x") -> Runner:
    """Quantisers, which give codes and a scale; ``first`` is the routine's name for the contract's ``x``."""

    def run(inputs: Inputs, options: Options) -> dict[str, Tensor]:
        named = {first if name == "x" else name: t for name, t in inputs.items()}
        q, scale = verb(**named, **options)
        return {"q": q, "scale": scale}

    return run


GATED = (
    "silu_and_mul_quant",
    "silu_and_mul_per_block_quant",
    "silu_and_mul_masked_post_quant",
    "persistent_masked_m_silu_mul_quant",
    "per_token_group_quant_fp8_masked",
)
NORMS = (
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rmsnorm_quant",
    "fused_add_rmsnorm_quant",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
)


ROTARY = ("rope_quantize_fp8", "mla_rope_quantize_fp8")


def fused(verb: Callable[..., Any]) -> Runner:
    """Fused quantisers: codes, or codes and a scale, or these and the sum with a residual (x without one)."""

    def run(inputs: Inputs, options: Options) -> dict[str, Tensor]:
        made = verb(**inputs, **options)
        if isinstance(made, Tensor):
            return {"q": made}
        names = ("q", "residual") if "scale" in inputs else ("q", "scale", "residual")
        return {name: inputs["x"].clone() if t is None else t for name, t in zip(names, made, strict=False)}

    return run


CACHES: dict[str, tuple[str, ...]] = {
    # routines of kernels.kv_cache that write in place: what they write
    "reshape_and_cache_flash": ("key_cache", "value_cache"),
    "reshape_and_cache": ("key_cache", "value_cache"),
    "concat_and_cache_mla": ("kv_cache",),
    "set_mla_kv_buffer": ("kv_buffer",),
    "append_paged_kv_cache": ("k_cache", "v_cache"),
    "append_paged_mla_kv_cache": ("ckv_cache", "kpe_cache"),
    "concat_and_cache_ds_mla": ("kv_cache",),
    "indexer_k_quant_and_cache": ("kv_cache",),
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": ("k_cache", "v_cache", "k_scale_cache", "v_scale_cache"),
    "gather_and_maybe_dequant_cache": ("dst",),
    "cp_gather_cache": ("dst",),
    "cp_gather_and_upconvert_fp8_kv_cache": ("dst",),
    "cp_gather_indexer_k_quant_cache": ("dst_k", "dst_scale"),
}


def in_place(verb: Callable[..., None], *written: str) -> Runner:
    """Routines that write into inputs: copies of these, as the routine left them."""

    def run(inputs: Inputs, options: Options) -> dict[str, Tensor]:
        made = {name: torch.empty_like(inputs[name]).copy_(inputs[name]) for name in written}
        verb(**{**inputs, **made}, **options)
        return made

    return run


def tensor(verb: Callable[..., Tensor]) -> Runner:
    """Routines of one output that take the contract's names."""

    def run(inputs: Inputs, options: Options) -> Tensor:
        return verb(**inputs, **options)

    return run


def fp8_fp4(verb: Callable[..., None], last: str = "", turned: str = "") -> Runner:
    """DeepGEMM's products of mixed codes into a fresh output; ``last`` names what says which rows belong to whom, and
    ``turned`` the operands that are given as ``[K, ..]``."""

    def run(inputs: Inputs, options: Options) -> Tensor:
        a, b = inputs["a"], inputs["b"]
        m, n = (_rows_of_codes(x, name in turned) for name, x in (("a", a), ("b", b)))
        lead = a.shape[:-2]
        out = torch.empty(*lead, m, n, dtype=out_dtype_of(options), device=a.device)
        left, right = (a, inputs["a_scale"]), (b, inputs["b_scale"])
        of_a = 1, options.get("gran_k_a", 128)
        of_b = options.get("gran_n", 1), options.get("gran_k_b", 32)
        given = [inputs[last]] if last else [inputs["c"]] if "c" in inputs else []
        verb(left, right, out, *given, recipe_a=of_a, recipe_b=of_b)
        return out

    return run


def _rows_of_codes(x: Tensor, turned: bool) -> int:
    """Rows of codes ``[.., R, K]``, or ``[.., K, R]`` where they are turned, then of four bits two a byte."""
    if not turned:
        return x.shape[-2]
    return x.shape[-1] * (1 if x.is_floating_point() else 2)


def k_groups_of_powers(inputs: Inputs, options: Options) -> Tensor:
    """The product of every group of K under power-of-two scales, into a fresh output."""
    left, right = (inputs["a"], inputs["a_scale"]), (inputs["b"], inputs["b_scale"])
    out = torch.empty_like(inputs["c"], memory_format=torch.contiguous_format)
    recipe = (1, 1, options.get("gran_k", 128))
    mx_products.k_grouped_fp8_gemm_tn_contiguous(left, right, out, inputs["ks"].tolist(), c=inputs["c"], recipe=recipe)
    return out


def named(verb: Callable[..., tuple[Tensor | None, ...]], *names: str) -> Runner:
    """Routines of several outputs, named in order; those that are None are left out."""

    def run(inputs: Inputs, options: Options) -> dict[str, Tensor]:
        made = verb(**inputs, **options)
        return {name: t for name, t in zip(names, made, strict=True) if t is not None}

    return run


def with_widths(verb: Callable[..., T]) -> Callable[..., T]:
    """The contract's integer tensor ``logical_widths`` as the list that engines pass."""

    def call(logical_widths: Tensor, **rest: object) -> T:
        return verb(logical_widths=logical_widths.tolist(), **rest)

    return call


def by_row(verb: Callable[..., int]) -> Runner:
    """Integer routines, called once for each row of the input columns."""

    def run(inputs: Inputs, options: Options) -> Tensor:
        return _rows(verb, inputs)

    return run


def by_row_named(verb: Callable[..., tuple[int, ...]], *names: str) -> Runner:
    """As :func:`by_row`, for routines that return a record: one output for each field."""

    def run(inputs: Inputs, options: Options) -> dict[str, Tensor]:
        made = _rows(verb, inputs)
        return {name: made[:, i].contiguous() for i, name in enumerate(names)}

    return run


def _rows(verb: Callable[..., int | tuple[int, ...]], inputs: Inputs) -> Tensor:
    columns = {name: t.tolist() for name, t in inputs.items()}
    rows = [verb(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    return torch.tensor(rows, dtype=next(iter(inputs.values())).dtype, device="cpu")


def device_identity(inputs: Inputs, options: Options) -> Tensor:
    """The unit scale on the device of the input."""
    return linear.maybe_create_device_identity(inputs["x"].device)


def linear_op(inputs: Inputs, options: Options) -> Tensor:
    """The layer of an engine."""
    layer = linear.Fp8LinearOp(
        cutlass_supported=bool(options.get("cutlass_fp8_supported", False)),
        use_per_token_if_dynamic=bool(options.get("use_per_token_if_dynamic", False)),
    )
    given: dict[str, Any] = {**inputs, "out_dtype": options.get("out_dtype")}
    return layer.apply(**given)


def w8a8(inputs: Inputs, options: Options) -> Tensor:
    """The CUTLASS linear routine."""
    return with_out_dtype(linear.cutlass_w8a8_scaled_mm)(inputs, {"out_dtype": out_dtype_of(options)})


def paged_metadata(inputs: Inputs, options: Options) -> Tensor:
    """The schedule of the paged kernel, for an H100's 132 multiprocessors unless told otherwise."""
    given = {"block_size": 64, "num_sms": 132, **options}
    return logits.get_paged_mqa_logits_metadata(inputs["context_lens"].to(torch.int32), **given)


# --- mixture of experts; layers are plain modules made for one call ------------------------------------------------


def registered_scales(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """The three scales that a layer registers."""
    layer = torch.nn.Module()
    moe.register_scales_for_trtllm_fp8_per_tensor_moe(layer, **inputs)
    names = ("output1_scales_gate_scalar", "output1_scales_scalar", "output2_scales_scalar")
    return {name: checks.tensor(name, getattr(layer, name)) for name in names}


def padded_weights(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """Both weights with the intermediate size padded."""
    gated = bool(options.get("is_act_and_mul", True))
    w13, w2, _ = layout.align_fp8_moe_weights_for_fi(inputs["w13"], inputs["w2"], gated)
    return {"w13": w13, "w2": w2}


def rotated_weights(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """Both weights in TensorRT-LLM's row order."""
    first, second = inputs["gemm1_weights"], inputs["gemm2_weights"]
    made = layout.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(first, second, bool(options.get("is_gated", True)))
    return dict(zip(("gemm1_weights", "gemm2_weights"), made, strict=True))


def prepared_layer(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """Weights and scales as FlashInfer's kernels take them."""
    layer, one = torch.nn.Module(), torch.ones(1, device=inputs["w13"].device, dtype=torch.float32)
    settings = {
        "is_act_and_mul": bool(options.get("is_act_and_mul", True)),
        "weight_block_size": [128, 128] if options.get("block_quant") else None,
    }
    for name, value in settings.items():
        setattr(layer, name, value)
    w13, w2, w13_scale = moe.prepare_fp8_moe_layer_for_fi(
        layer,
        inputs["w13"],
        inputs["w2"],
        inputs["w13_scale"],
        one,
        inputs["w2_scale"],
        one,
        bool(options.get("is_trtllm", False)),
    )
    return {"w13": w13, "w2": w2, "w13_scale": w13_scale, "w2_scale": inputs["w2_scale"]}


def required_layout(inputs: Inputs, options: Options) -> Tensor:
    """Scales in the layout of the ``target`` architecture."""
    machine = platform.Machine.described(str(options.get("target", "sm90")))
    groups = inputs["scale"].shape[0] if inputs["scale"].dim() == 3 else None
    recipe = options.get("gran_mn", 1), 128, options.get("gran_k", 128)
    return layout.transform_sf_into_required_layout(
        inputs["scale"], options["mn"], options["k"], recipe, groups, machine=machine
    )


def packed_groups(inputs: Inputs, options: Options) -> Tensor:
    """Packed exponents of groups along K, whose sizes lie on the host."""
    ks = inputs["ks"].tolist()
    return tiles.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(inputs["scale"], ks, options.get("gran_k", 128))


def routing(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """Experts and weights of every token."""
    top_k, router = options.get("top_k", 8), options.get("router", "deepseek_v3")
    renormalize, factor = bool(options.get("renormalize", False)), options.get("routed_scaling_factor", 1.0)
    if router == "deepseek_v3":
        weights, ids = moe_layer.route_deepseek_v3(
            inputs["logits"],
            inputs.get("bias"),
            top_k,
            n_group=options.get("num_expert_group", 1),
            topk_group=options.get("topk_group", 1),
            renormalize=renormalize,
            routed_scaling_factor=factor,
        )
    elif inputs.get("bias") is not None or factor != 1.0 or (router == "llama4" and renormalize):
        raise OptionError(f"{router} routing takes no bias, no scaling factor and, for llama4, no renormalisation")
    elif router == "llama4":
        weights, ids = moe_layer.route_llama4(inputs["logits"], top_k)
    else:
        weights, ids = moe_layer.route_softmax(inputs["logits"], top_k, renormalize=renormalize)
    return {"topk_weights": weights, "topk_ids": ids}


def moe_layer_of(inputs: Inputs, options: Options) -> Tensor:
    """The block-scaled layer, which quantises its own input."""
    blocks = inputs["w13_scale"].dim() == 3
    if "x" not in inputs or not blocks or "a2_scale" in inputs or "a_scale" in inputs or options.get("recipe"):
        raise OptionError("this layer quantises x itself, in groups of 128, against block-scaled weights")
    rounding = options.get("activation_rounding", "EACH")
    if rounding not in ("EACH", "PRODUCT") or options.get("out_dtype", torch.bfloat16) != torch.bfloat16:
        raise OptionError(f"activation_rounding={rounding}: the intermediate is bf16, and so is the output")
    names = ("x", "w13", "w13_scale", "w2", "w2_scale", "topk_weights", "topk_ids")
    return moe_layer.moe_block_scaled(
        *(inputs[n] for n in names),
        limit=options.get("limit"),
        expert_offset=int(str(options.get("first_expert", 0))),
        weight_on_input=bool(options.get("apply_router_weight_on_input", False)),
        round_silu=rounding == "EACH",
    )


RENAMED = {
    "a": "x",
    "a_scale": "x_scale",
    "fc2_act_scale": "a2_scale",
    "prequant1": "a1_scale",
    "prequant2": "a2_scale",
    "first_expert": "expert_offset",
    "apply_router_weight_on_input": "weight_on_input",
}
"""Arguments of :func:`kernels.moe_experts` whose contract calls them otherwise."""


def experts(name: str) -> Runner:
    """One pipeline of experts; where the layer routes by itself, its routing before."""

    def run(inputs: Inputs, options: Options) -> Tensor:
        given: dict[str, Any] = {RENAMED.get(key, key): value for key, value in {**inputs, **options}.items()}
        if "logits" in given:
            kept = given.pop("weight_dtype", torch.float32)
            names = ("top_k", "n_group", "topk_group", "routed_scaling_factor")
            asked = {key: given.pop(key) for key in names if key in given}
            method = given.pop("routing_method", "DeepSeekV3")
            logits, bias, top_k = given.pop("logits"), given.pop("bias", None), asked.pop("top_k", 8)
            weights, ids = moe_pipelines.route_by_method(logits, method, top_k, bias, **asked)
            given |= {"topk_weights": weights.to(kept).to(torch.float32), "topk_ids": ids}
            given["weight_on_input"] = method == "Llama4" and "up_scale" in given
        elif "combine" in given:
            given["combine"] = given["combine"].lower()
        return moe_pipelines.moe_experts(**given, pipeline=name)

    return run


def trtllm_layer(inputs: Inputs, options: Options) -> Tensor:
    """The TensorRT-LLM per-tensor layer from weights as a checkpoint stores them: prepared, then called once.

    ``weight_dtype`` asks for a routing weight kept in that dtype: float32 on a CPU, bf16 in the library's routing
    kernel. The other one is not offered.
    """
    kept = torch.float32 if inputs["w13"].device.type == "cpu" else torch.bfloat16
    if options.get("weight_dtype", kept) != kept:
        raise OptionError(f"weight_dtype={options['weight_dtype']}: routing weights are kept in {kept} here")
    layer = torch.nn.Module()
    w13, w2, _ = moe.prepare_fp8_moe_layer_for_fi(
        layer,
        inputs["w13"],
        inputs["w2"],
        inputs["w13_scale"],
        inputs["w13_input_scale"],
        inputs["w2_scale"],
        inputs["w2_input_scale"],
        is_trtllm=True,
    )
    settings = {
        "w13_weight": torch.nn.Parameter(w13, requires_grad=False),
        "w2_weight": torch.nn.Parameter(w2, requires_grad=False),
        "ep_rank": options.get("ep_rank", 0),
        "routing_method_type": moe.LLAMA4,
    }
    for name, value in settings.items():
        setattr(layer, name, value)
    logits = inputs["router_logits"]
    return moe.apply_fi_trtllm_fp8_per_tensor_moe(
        layer, inputs["hidden_states"], logits, None, 1, None, None, logits.shape[1], True
    )
