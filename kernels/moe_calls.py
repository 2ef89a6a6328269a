"""How the inputs and options of a contract become one call of a routine: expert weights, routing, whole MoE layers.

As :mod:`kernels.calls`, whose runners these are. Layers are plain modules made for one call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import checks, layout, moe, moe_layer, platform
from kernels.calls import Inputs, Options
from kernels.errors import OptionError


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
        layer, inputs["w13"], inputs["w2"], inputs["w13_scale"], one, inputs["w2_scale"], one,
        bool(options.get("is_trtllm", False)),
    )  # fmt: skip
    return {"w13": w13, "w2": w2, "w13_scale": w13_scale, "w2_scale": inputs["w2_scale"]}


def required_layout(inputs: Inputs, options: Options) -> Tensor:
    """Scales in the layout of the ``target`` architecture."""
    machine = platform.Machine.described(str(options.get("target", "sm90")))
    rows, mn, k = (options.get(n) for n in ("gran_mn", "mn", "k"))
    groups = inputs["scale"].shape[0] if inputs["scale"].dim() == 3 else None
    recipe = (1 if rows is None else rows, 128, 128)
    return layout.transform_sf_into_required_layout(
        inputs["scale"], mn, k, recipe, groups, machine=machine  # type: ignore[arg-type]  # checked there
    )  # fmt: skip


def routing(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """Experts and weights of every token."""
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
        limit=options.get("limit"),  # type: ignore[arg-type]  # a number or None
        expert_offset=int(str(options.get("first_expert", 0))),
        weight_on_input=bool(options.get("apply_router_weight_on_input", False)),
        round_silu=rounding == "EACH",
    )


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
        layer, inputs["w13"], inputs["w2"], inputs["w13_scale"], inputs["w13_input_scale"], inputs["w2_scale"],
        inputs["w2_input_scale"], is_trtllm=True,
    )  # fmt: skip
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
