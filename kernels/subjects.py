"""The layer's routines as subjects for a conformance tool, found by name through an entry point.

:func:`subjects` lists what can be run: one record per contract, backend and device, with the accumulation it
declares. Nothing is imported from the tool; the records are plain, inputs and options carry the contracts' names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import (
    blockscaled,
    calc,
    checks,
    grouped,
    layout,
    linear,
    logits,
    moe,
    moe_layer,
    platform,
    quantize,
    routes,
)
from kernels.config import current_config
from kernels.decisions import DECISIONS
from kernels.errors import DtypeError, OptionError
from kernels.plan import TABLE, Problem, backend_module

Inputs = Mapping[str, Tensor]
Options = Mapping[str, object]
Outputs = Tensor | dict[str, Tensor]
Runner = Callable[[Inputs, Options], Outputs]

NUMERICS = {
    # (backend, operation) on sm90: how the kernel accumulates
    ("cutlass", "linear"): "sm90.chain",
    ("cutlass", "block_linear"): "sm90.promote128",
    ("torch", "linear"): "sm90.promote128.scale_after",
    ("torch", "torch_linear"): "sm90.promote128.scale_after",
    ("torch", "block_linear"): "sm90.promote128",
    ("deep_gemm", "fp8_gemm_nt"): "sm90.promote128",
    ("deep_gemm", "grouped_contiguous"): "sm90.promote128",
    ("deep_gemm", "grouped_masked"): "sm90.promote128",
    ("deep_gemm", "mqa_logits"): "sm90.mqa_logits",
    ("flashinfer", "blockscale_sm90"): "sm90.promote128",
}
SUMS = frozenset(op for _, op in NUMERICS) | {"paged_mqa_logits", "grouped_scaled", "dynamic_blockscale"}
"""Operations that accumulate: on a CPU in float32, any order."""


@dataclass(frozen=True)
class Subject:
    """One routine on one backend.

    Attributes
    ----------
    name
        The backend.
    contract
        The routine's public name.
    arch
        ``cpu``, or ``sm90`` and the like.
    numerics
        Declared accumulation (``ieee32.any``: float32 in any order), or None where no sum is taken or none is known.
    device
        Where the inputs must lie.
    """

    name: str
    contract: str
    arch: str
    numerics: str | None
    device: str
    runner: Runner
    reason: str | None = None

    def why_not(self) -> str | None:
        """Why this subject cannot run on this machine; None when it can."""
        return self.reason

    def run(self, inputs: Inputs, options: Options) -> Outputs:
        """Run the routine on fresh outputs; inputs are never written to.

        Raises
        ------
        NotImplementedError
            The backend does not offer this call (a dtype or an option outside its contract).
        """
        with routes.only(self.name):
            try:
                return self.runner(inputs, {k: v for k, v in options.items() if v is not None})
            except (DtypeError, OptionError) as error:
                raise NotImplementedError(str(error)) from error


def subjects() -> list[Subject]:
    """Every subject of this machine: CPU paths, and on a GPU its libraries, with reasons where they cannot run."""
    machine = platform.current_machine()
    devices = ["cpu"] if machine.vendor == "cpu" else ["cpu", "cuda"]
    found = []
    for contract, (op, runner) in CONTRACTS.items():
        for device in devices:
            for backend in TABLE[op]:
                why = backend_module(backend).why_not(_typical(op, contract, device), machine, current_config())
                if device == "cpu" and why is not None:
                    continue  # GPU libraries are no candidates for CPU tensors
                arch = "cpu" if device == "cpu" else machine.arch
                found.append(Subject(backend, contract, arch, _numerics(backend, op, arch), device, runner, why))
    return found


def _typical(op: str, contract: str, device: str) -> Problem:
    kind = {"torch_per_token_w8a8_scaled_mm": "rowwise", "torch_channelwise_w8a8_scaled_mm": "unfused"}.get(contract)
    scales = ("token", "channel") if op == "grouped_scaled" else ("tensor", "tensor")
    return Problem(op, device=device, kernel=kind, a_scale=scales[0], b_scale=scales[1])


def _numerics(backend: str, op: str, arch: str) -> str | None:
    if op not in SUMS:
        return None
    return "ieee32.any" if arch == "cpu" else NUMERICS.get((backend, op)) if arch == "sm90" else None


def _torch(verb: Callable[..., Tensor]) -> Runner:
    def run(inputs: Inputs, options: Options) -> Tensor:
        return verb(**inputs, **{"out_dtype": torch.bfloat16, **options})

    return run


def _cutlass(inputs: Inputs, options: Options) -> Tensor:
    a_scale, b_scale = inputs["a_scale"], inputs["b_scale"]
    n, k = inputs["b"].shape
    nb, kb = -(-n // 128), -(-k // 128)
    stored = tuple(b_scale.shape) == (nb, kb)
    block = stored and (a_scale.dim() == 2 and a_scale.shape[1] == kb > 1 or (kb == 1 and nb not in (1, n)))
    scale = b_scale.t() if block else b_scale
    return linear.cutlass_scaled_mm(inputs["a"], inputs["b"].t(), a_scale, scale, _dtype(options), inputs.get("bias"))


def _dtype(options: Options) -> torch.dtype:
    dtype = options.get("out_dtype", torch.bfloat16)
    if not isinstance(dtype, torch.dtype):
        raise OptionError(f"out_dtype must be a torch dtype, got {dtype!r}")
    return dtype


def _gemm(inputs: Inputs, options: Options) -> Tensor:
    a, b = inputs["a"], inputs["b"]
    out = torch.empty(a.shape[0], b.shape[0], dtype=_dtype(options), device=a.device)
    blockscaled.fp8_gemm_nt((a, inputs["a_scale"]), (b, inputs["b_scale"]), out, c=inputs.get("c"))
    return out


def _sm90(inputs: Inputs, options: Options) -> Tensor:
    scale = inputs.get("weight_scale")
    if scale is not None and scale.shape[0] != -(-inputs["weight"].shape[0] // 128):
        raise NotImplementedError("weight_scale [N, K/128]: the kernel indexes it per 128x128 block; it is refused")
    return blockscaled.fp8_blockscale_gemm_sm90(**inputs, out_dtype=_dtype(options))


def _wide_input(verb: Callable[..., Tensor]) -> Runner:
    """Routines with a bf16 input, which give bf16 and take no output dtype."""

    def run(inputs: Inputs, options: Options) -> Tensor:
        if _dtype(options) != torch.bfloat16:
            raise OptionError(f"out_dtype={_dtype(options)}: the routine gives bfloat16")
        return verb(inputs["input"], inputs["weight"], inputs["weight_scale"])

    return run


def _block_scaled_layer(input: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    kernel = blockscaled.FlashInferFp8DeepGEMMDynamicBlockScaledKernel(use_deep_gemm_e8m0=False)
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale_inv = (
        torch.nn.Parameter(t, requires_grad=False) for t in (weight, weight_scale)
    )
    kernel.process_weights_after_loading(layer)
    weight = checks.tensor("weight", layer.weight)
    return kernel.apply_block_scaled_mm(input, weight, None, checks.tensor("weight_scale_inv", layer.weight_scale_inv))


def _contiguous(inputs: Inputs, options: Options) -> Tensor:
    a, b = inputs["a"], inputs["b"]
    out = torch.zeros(a.shape[0], b.shape[1], dtype=_dtype(options), device=a.device)
    indices = inputs["m_indices"].to(torch.int32)
    grouped.m_grouped_fp8_gemm_nt_contiguous((a, inputs["a_scale"]), (b, inputs["b_scale"]), out, indices)
    return out


def _masked(inputs: Inputs, options: Options) -> Tensor:
    a, b = inputs["a"], inputs["b"]
    out = torch.zeros(*a.shape[:2], b.shape[1], dtype=_dtype(options), device=a.device)
    rows = inputs["masked_m"].to(torch.int32)
    expected = options.get("expected_m", a.shape[1])
    left, right = (a, inputs["a_scale"]), (b, inputs["b_scale"])
    grouped.fp8_m_grouped_gemm_nt_masked(left, right, out, rows, expected)  # type: ignore[arg-type]  # checked there
    return out


def _grouped_scaled(inputs: Inputs, options: Options) -> Tensor:
    a, b, scale_a, scale_b, offsets = (inputs[n] for n in ("a", "b", "scale_a", "scale_b", "offsets"))
    return grouped.scaled_grouped_mm(a, b, scale_a, scale_b, offsets.to(torch.int32), _dtype(options))


def _mqa(inputs: Inputs, options: Options) -> Tensor:
    names = ("q", "k", "k_scale", "weights", "cu_seqlen_ks", "cu_seqlen_ke")
    q, k, k_scale, weights, ks, ke = (inputs[n] for n in names)
    clean = bool(options.get("clean_logits", True))
    return logits.fp8_mqa_logits(q, (k, k_scale), weights, ks.to(torch.int32), ke.to(torch.int32), clean)


def _paged(inputs: Inputs, options: Options) -> Tensor:
    cache, lens = inputs["kv_cache"], inputs["context_lens"].to(torch.int32)
    sms = 132 if cache.device.type == "cpu" else None
    schedule = logits.get_paged_mqa_logits_metadata(lens, cache.shape[1], sms)
    tables = inputs["block_tables"].to(torch.int32)
    longest = options.get("max_model_len", tables.shape[1] * cache.shape[1])
    return logits.fp8_paged_mqa_logits(
        inputs["q"], cache, inputs["weights"], lens, tables, schedule, longest,  # type: ignore[arg-type]  # checked there
        bool(options.get("clean_logits", True)),
    )  # fmt: skip


def _pair(verb: Callable[..., tuple[Tensor, Tensor]], first: str = "x") -> Runner:
    def run(inputs: Inputs, options: Options) -> dict[str, Tensor]:
        named = {first if name == "x" else name: t for name, t in inputs.items()}
        q, scale = verb(**named, **options)
        return {"q": q, "scale": scale}

    return run


def _one(verb: Callable[..., Tensor]) -> Runner:
    def run(inputs: Inputs, options: Options) -> Tensor:
        return verb(**inputs, **options)

    return run


def _several(verb: Callable[..., tuple[Tensor | None, ...]], *names: str) -> Runner:
    def run(inputs: Inputs, options: Options) -> dict[str, Tensor]:
        made = verb(**inputs, **options)
        return {name: t for name, t in zip(names, made, strict=True) if t is not None}

    return run


def _widths(verb: Callable[..., object]) -> Callable[..., object]:
    """The contract's integer tensor ``logical_widths`` as the list that engines pass."""

    def call(logical_widths: Tensor, **rest: object) -> object:
        return verb(logical_widths=logical_widths.tolist(), **rest)

    return call


def _rowwise(verb: Callable[..., int]) -> Runner:
    """Integer routines on columns of arguments."""

    def run(inputs: Inputs, options: Options) -> Tensor:
        columns = {name: t.tolist() for name, t in inputs.items()}
        rows = [verb(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        return torch.tensor(rows, dtype=next(iter(inputs.values())).dtype)

    return run


def _linear_op(inputs: Inputs, options: Options) -> Tensor:
    layer = linear.Fp8LinearOp(
        cutlass_supported=bool(options.get("cutlass_fp8_supported", False)),
        use_per_token_if_dynamic=bool(options.get("use_per_token_if_dynamic", False)),
    )
    return layer.apply(**inputs, out_dtype=options.get("out_dtype"))  # type: ignore[arg-type]  # checked there


def _w8a8(inputs: Inputs, options: Options) -> Tensor:
    return _torch(linear.cutlass_w8a8_scaled_mm)(inputs, {"out_dtype": _dtype(options)})  # type: ignore[return-value]


def _registered(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    layer = torch.nn.Module()
    moe.register_scales_for_trtllm_fp8_per_tensor_moe(layer, **inputs)
    names = ("output1_scales_gate_scalar", "output1_scales_scalar", "output2_scales_scalar")
    return {name: checks.tensor(name, getattr(layer, name)) for name in names}


def _padded(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    gated = bool(options.get("is_act_and_mul", True))
    w13, w2, _ = layout.align_fp8_moe_weights_for_fi(inputs["w13"], inputs["w2"], gated)
    return {"w13": w13, "w2": w2}


def _rotated(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    first, second = inputs["gemm1_weights"], inputs["gemm2_weights"]
    made = layout.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(first, second, bool(options.get("is_gated", True)))
    return dict(zip(("gemm1_weights", "gemm2_weights"), made, strict=True))


def _prepared(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    layer, one = torch.nn.Module(), torch.ones(1)
    settings = {
        "is_act_and_mul": bool(options.get("is_act_and_mul", True)),
        "weight_block_size": [128, 128] if options.get("block_quant") else None,
    }
    for name, value in settings.items():
        setattr(layer, name, value)
    w13, w2, w13_scale = moe.prepare_fp8_moe_layer_for_fi(
        layer, inputs["w13"], inputs["w2"], inputs["w13_scale"], one, inputs["w2_scale"], one,
        bool(options.get("is_trtllm", False)),
    )  # fmt: skip
    return {"w13": w13, "w2": w2, "w13_scale": w13_scale, "w2_scale": inputs["w2_scale"]}


def _required(inputs: Inputs, options: Options) -> Tensor:
    machine = platform.Machine.described(str(options.get("target", "sm90")))
    rows, mn, k = (options.get(n) for n in ("gran_mn", "mn", "k"))
    groups = inputs["scale"].shape[0] if inputs["scale"].dim() == 3 else None
    recipe = (1 if rows is None else rows, 128, 128)
    return layout.transform_sf_into_required_layout(
        inputs["scale"], mn, k, recipe, groups, machine=machine  # type: ignore[arg-type]  # checked there
    )  # fmt: skip


def _metadata(inputs: Inputs, options: Options) -> Tensor:
    given = {"block_size": 64, "num_sms": 132, **options}
    return logits.get_paged_mqa_logits_metadata(inputs["context_lens"].to(torch.int32), **given)  # type: ignore[arg-type]


def _routing(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    top_k, router = options.get("top_k", 8), options.get("router", "deepseek_v3")
    renormalize, factor = bool(options.get("renormalize", False)), options.get("routed_scaling_factor", 1.0)
    if router == "deepseek_v3":
        weights, ids = moe_layer.route_deepseek_v3(
            inputs["logits"], inputs.get("bias"), top_k,  # type: ignore[arg-type]  # checked there
            n_group=options.get("num_expert_group", 1), topk_group=options.get("topk_group", 1),  # type: ignore[arg-type]
            renormalize=renormalize, routed_scaling_factor=factor,  # type: ignore[arg-type]
        )  # fmt: skip
    elif inputs.get("bias") is not None or factor != 1.0 or (router == "llama4" and renormalize):
        raise OptionError(f"{router} routing takes no bias, no scaling factor and, for llama4, no renormalisation")
    elif router == "llama4":
        weights, ids = moe_layer.route_llama4(inputs["logits"], top_k)  # type: ignore[arg-type]  # checked there
    else:
        weights, ids = moe_layer.route_softmax(inputs["logits"], top_k, renormalize=renormalize)  # type: ignore[arg-type]
    return {"topk_weights": weights, "topk_ids": ids}


def _moe(inputs: Inputs, options: Options) -> Tensor:
    blocks = inputs["w13_scale"].dim() == 3
    if "x" not in inputs or not blocks or "a2_scale" in inputs or "a_scale" in inputs or options.get("recipe"):
        raise OptionError("this layer quantises x itself, in groups of 128, against block-scaled weights")
    rounding = options.get("activation_rounding", "EACH")
    if rounding not in ("EACH", "PRODUCT") or options.get("out_dtype", torch.bfloat16) != torch.bfloat16:
        raise OptionError(f"activation_rounding={rounding}: the intermediate is bf16, and so is the output")
    names = ("x", "w13", "w13_scale", "w2", "w2_scale", "topk_weights", "topk_ids")
    return moe_layer.moe_block_scaled(
        *(inputs[n] for n in names),
        limit=options.get("limit"),  # type: ignore[arg-type]  # a number or None
        expert_offset=int(str(options.get("first_expert", 0))),
        weight_on_input=bool(options.get("apply_router_weight_on_input", False)),
        round_silu=rounding == "EACH",
    )


CONTRACTS: dict[str, tuple[str, Runner]] = {
    # contract: (operation of the plan, how inputs and options become a call)
    "cutlass_scaled_mm": ("linear", _cutlass),
    "torch_per_tensor_w8a8_scaled_mm": ("torch_linear", _torch(linear.torch_per_tensor_w8a8_scaled_mm)),
    "torch_per_token_w8a8_scaled_mm": ("torch_linear", _torch(linear.torch_per_token_w8a8_scaled_mm)),
    "torch_channelwise_w8a8_scaled_mm": ("torch_linear", _torch(linear.torch_channelwise_w8a8_scaled_mm)),
    "fp8_gemm_nt": ("fp8_gemm_nt", _gemm),
    "fp8_blockscale_gemm_sm90": ("blockscale_sm90", _sm90),
    "flashinfer_fp8_blockscale_gemm": ("blockscale_sm90", _wide_input(blockscaled.flashinfer_fp8_blockscale_gemm)),
    "dynamic_flashinfer_deepgemm_blockscale_gemm": (
        "dynamic_blockscale",
        _wide_input(blockscaled.dynamic_flashinfer_deepgemm_blockscale_gemm),
    ),
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": ("dynamic_blockscale", _wide_input(_block_scaled_layer)),
    "m_grouped_fp8_gemm_nt_contiguous": ("grouped_contiguous", _contiguous),
    "fp8_m_grouped_gemm_nt_masked": ("grouped_masked", _masked),
    "scaled_grouped_mm": ("grouped_scaled", _grouped_scaled),
    "fp8_mqa_logits": ("mqa_logits", _mqa),
    "fp8_paged_mqa_logits": ("paged_mqa_logits", _paged),
    "scaled_fp8_quant": ("quant_tensor", _pair(quantize.scaled_fp8_quant)),
    "per_token_group_quant_fp8": ("quant_group", _pair(quantize.per_token_group_quant_fp8)),
    "per_block_cast_to_fp8": ("cast", _pair(quantize.per_block_cast_to_fp8)),
    "per_token_cast_to_fp8": ("cast", _pair(quantize.per_token_cast_to_fp8)),
    "per_channel_cast_to_fp8": ("cast", _pair(quantize.per_channel_cast_to_fp8)),
    "flashinfer_quantize_1x128": ("cast", _pair(quantize.flashinfer_quantize_1x128)),
    "flashinfer_quantize_128x128": ("cast", _pair(quantize.flashinfer_quantize_128x128, "w")),
    "ceil_to_ue8m0": ("cast", _one(quantize.ceil_to_ue8m0)),
    "per_tensor_dequantize": ("cast", _one(quantize.per_tensor_dequantize)),
    "get_col_major_tma_aligned_tensor": ("layout", _one(layout.get_col_major_tma_aligned_tensor)),
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": (
        "layout",
        _one(layout.get_mn_major_tma_aligned_packed_ue8m0_tensor),
    ),
    "swap_w13_to_w31": ("layout", _one(layout.swap_w13_to_w31)),
    "reorder_rows_for_gated_act_gemm": ("layout", _one(layout.reorder_rows_for_gated_act_gemm)),
    "shuffle_matrix_a": ("layout", _one(layout.shuffle_matrix_a)),
    "Fp8LinearOp": ("linear", _linear_op),
    "cutlass_w8a8_scaled_mm": ("linear", _w8a8),
    "rocm_per_tensor_w8a8_scaled_mm": ("torch_linear", _torch(linear.rocm_per_tensor_w8a8_scaled_mm)),
    "get_paged_mqa_logits_metadata": ("paged_metadata", _metadata),
    "align": ("layout", _rowwise(layout.align)),
    **{name: ("layout", _rowwise(verb)) for name, verb in DECISIONS.items()},
    "swizzle_scale": ("layout", _one(layout.swizzle_scale)),
    "prepare_fp8_moe_layer_for_fi": ("layout", _prepared),
    "ceil_div": ("layout", _rowwise(layout.ceil_div)),
    "calculate_tile_tokens_dim": ("layout", _rowwise(layout.calculate_tile_tokens_dim)),
    "align_fp8_moe_weights_for_fi": ("layout", _padded),
    "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe": ("layout", _rotated),
    "transform_sf_into_required_layout": ("layout", _required),
    "convert_to_channelwise": ("cast", _one(_widths(quantize.convert_to_channelwise))),  # type: ignore[arg-type]
    "requantize_with_max_scale": (
        "cast",
        _several(_widths(quantize.requantize_with_max_scale), "max_scale", "weight"),  # type: ignore[arg-type]
    ),
    "normalize_e4m3fn_to_e4m3fnuz": (
        "cast",
        _several(quantize.normalize_e4m3fn_to_e4m3fnuz, "weight", "weight_scale", "input_scale"),
    ),
    "all_close_1d": ("cast", lambda inputs, options: torch.tensor(quantize.all_close_1d(**inputs))),
    "calc_diff": ("cast", _one(calc.calc_diff)),
    "make_fp8_moe_alpha_scales_for_fi": (
        "cast",
        _several(moe.make_fp8_moe_alpha_scales_for_fi, "g1_alphas", "g2_alphas"),
    ),
    "register_scales_for_trtllm_fp8_per_tensor_moe": ("cast", _registered),
    "moe_routing": ("cast", _routing),
    "moe_fp8": ("grouped_contiguous", _moe),
    "silu_and_mul": ("cast", _one(moe_layer.silu_and_mul)),
}
