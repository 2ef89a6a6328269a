"""Mixture of experts on FlashInfer: the choice of a kernel family, its weights and scales, and the call.

``g1 = w13_scale * w13_input_scale`` and ``g2 = w2_scale * w2_input_scale`` turn integer-like accumulators back into
values; the TensorRT-LLM kernel takes ``output1_scales_gate = g1``, ``output1_scales = g1 / w2_input_scale`` (its
first product leaves in the scale of the second's input) and ``output2_scales = g2``.

Not covered: FP4 experts, all-to-all dispatch itself (the prepare/finalize record only says which one an engine
needs). The layer from routing to combination on other libraries is :mod:`kernels.moe_layer`.

NaN and infinity: weights are moved; a NaN scale stays NaN.
Source: FlashInfer (fused_moe) and vLLM (flashinfer_utils).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from . import checks
from . import platform as machines
from .adapters import Inputs, Options
from .checks import FP8
from .config import current_config
from .errors import ConfigError, InputError, OptionError, ShapeError
from .layout import (
    align_fp8_moe_weights_for_fi,
    rotate_weights_for_fi_trtllm_fp8_per_tensor_moe,
    swap_w13_to_w31,
)
from .quantize import scaled_fp8_quant
from .records import MOE_BACKENDS, Config
from .routes import route
from .support import MOE_FAMILIES
from .verbs import exported, verb

log = logging.getLogger(__name__)
LLAMA4 = 3
"""``RoutingMethodType.Llama4`` of FlashInfer."""


@exported
class FlashinferMoeBackend(Enum):
    """FlashInfer's MoE kernel families."""

    CUTLASS = "CUTLASS"
    TENSORRT_LLM = "TensorRT-LLM"
    CUTEDSL = "CUTEDSL"

    @classmethod
    def _missing_(cls, value: object) -> FlashinferMoeBackend:
        got = "a tensor" if isinstance(value, Tensor) else f"{value!r:.80}"
        raise OptionError(f"{got} is no kernel family; there are {', '.join(family.value for family in cls)}")


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _registered(verb: Callable[..., None], inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """The three scales that a layer registers."""
    layer = torch.nn.Module()
    verb(layer, **inputs)
    names = ("output1_scales_gate_scalar", "output1_scales_scalar", "output2_scales_scalar")
    return {name: checks.tensor(name, getattr(layer, name)) for name in names}


def _prepared(verb: Callable[..., Any], inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """Weights and scales as FlashInfer's kernels take them."""
    layer, one = torch.nn.Module(), torch.ones(1, device=inputs["w13"].device, dtype=torch.float32)
    settings = {
        "is_act_and_mul": bool(options.get("is_act_and_mul", True)),
        "weight_block_size": [128, 128] if options.get("block_quant") else None,
    }
    for name, value in settings.items():
        setattr(layer, name, value)
    scales = (inputs["w13_scale"], one, inputs["w2_scale"], one)
    w13, w2, w13_scale = verb(layer, inputs["w13"], inputs["w2"], *scales, bool(options.get("is_trtllm", False)))
    return {"w13": w13, "w2": w2, "w13_scale": w13_scale, "w2_scale": inputs["w2_scale"]}


def _whole_layer(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """The TensorRT-LLM per-tensor layer from weights as a checkpoint stores them: prepared, then called once.

    ``weight_dtype`` asks for a routing weight kept in that dtype: float32 on a CPU, bf16 in the library's routing
    kernel. The other one is not offered.
    """
    admitted = torch.float32 if inputs["w13"].device.type == "cpu" else torch.bfloat16
    if options.get("weight_dtype", admitted) != admitted:
        raise OptionError(f"weight_dtype={options['weight_dtype']}: routing weights are kept in {admitted} here")
    layer = torch.nn.Module()
    names = ("w13", "w2", "w13_scale", "w13_input_scale", "w2_scale", "w2_input_scale")
    w13, w2, _ = prepare_fp8_moe_layer_for_fi(layer, **{name: inputs[name] for name in names}, is_trtllm=True)
    settings = {
        "w13_weight": torch.nn.Parameter(w13, requires_grad=False),
        "w2_weight": torch.nn.Parameter(w2, requires_grad=False),
        "ep_rank": options.get("ep_rank", 0),
        "routing_method_type": LLAMA4,
    }
    for name, value in settings.items():
        setattr(layer, name, value)
    logits = inputs["router_logits"]
    return verb(layer, inputs["hidden_states"], logits, None, 1, None, None, logits.shape[1], True)


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb()
def get_flashinfer_moe_backend(
    machine: machines.Machine | None = None, config: Config | None = None
) -> FlashinferMoeBackend:
    """The kernel family that ``VLLM_FLASHINFER_MOE_BACKEND`` asks for.

    ``throughput`` CUTLASS; ``latency`` TensorRT-LLM on the sm100 family, elsewhere CUTLASS with a message;
    ``masked_gemm`` CUTEDSL; unset: CUTLASS on sm90.

    Raises
    ------
    ConfigError
        Unset anywhere else; the message lists the choices.
    """
    machine, config = machine or machines.current_machine(), config or current_config()
    choice = config.flashinfer_moe_backend
    for setting, capabilities, family in MOE_FAMILIES:
        if choice == setting and (capabilities is None or machine.sm in capabilities):
            if choice == "latency" and family == "CUTLASS":
                log.info("FlashInfer's TensorRT-LLM MoE needs the sm100 family; using CUTLASS on %s", machine.arch)
            return FlashinferMoeBackend(family)
    raise ConfigError(
        f"VLLM_FLASHINFER_MOE_BACKEND={choice!r} on {machine.arch}; set it to one of {', '.join(MOE_BACKENDS)}"
    )


@verb()
def is_flashinfer_supporting_global_sf(backend: FlashinferMoeBackend | None) -> bool:
    """Whether the family takes a global scale: all three do; None does not."""
    return isinstance(backend, FlashinferMoeBackend)


@verb("cast", outputs=("g1_alphas", "g2_alphas"))
def make_fp8_moe_alpha_scales_for_fi(
    w13_scale: Tensor, w13_input_scale: Tensor, w2_scale: Tensor, w2_input_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """``g1 = w13_scale * w13_input_scale`` and ``g2 = w2_scale * w2_input_scale`` as vectors over experts.

    ``w13_input_scale`` and ``w2_input_scale`` ``[1]`` or ``[E]``. Returns float32 ``[E]`` twice.

    Parameters
    ----------
    w13_scale, w2_scale
        ``[E]`` (or ``[E, 1]``...) float32.
    w13_input_scale, w2_input_scale
        One float32 value, or one per expert.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, ShapeError
    """
    names = ("w13_scale", "w13_input_scale", "w2_scale", "w2_input_scale")
    scales = (w13_scale, w13_input_scale, w2_scale, w2_input_scale)
    a, b, c, d = (
        checks.dtype(name, checks.tensor(name, t), torch.float32).reshape(-1)
        for name, t in zip(names, scales, strict=True)
    )
    checks.same_device(**dict(zip(names, scales, strict=True)))
    if a.shape != c.shape or any(t.numel() not in (1, a.numel()) for t in (b, d)):
        shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in zip(names, scales, strict=True))
        raise ShapeError(f"scales must agree in the number of experts: {shapes}")
    return a * b, c * d


@verb("cast", adapter=_registered)
def register_scales_for_trtllm_fp8_per_tensor_moe(
    layer: torch.nn.Module, w13_scale: Tensor, w13_input_scale: Tensor, w2_scale: Tensor, w2_input_scale: Tensor
) -> None:
    """Set the layer's ``output1_scales_gate_scalar``, ``output1_scales_scalar`` and ``output2_scales_scalar``.

    Float32 scales as of :func:`make_fp8_moe_alpha_scales_for_fi`.

    They are ``g1``, ``g1 / w2_input_scale`` and ``g2``; see the module's formula.
    """
    g1, g2 = make_fp8_moe_alpha_scales_for_fi(w13_scale, w13_input_scale, w2_scale, w2_input_scale)
    layer.output1_scales_gate_scalar = g1
    layer.output1_scales_scalar = g1 / w2_input_scale.reshape(-1)
    layer.output2_scales_scalar = g2
    layer.w13_input_scale_scalar = w13_input_scale.reshape(-1)


@verb("layout", adapter=_prepared)
def prepare_fp8_moe_layer_for_fi(
    layer: torch.nn.Module,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w13_input_scale: Tensor | None,
    w2_scale: Tensor,
    w2_input_scale: Tensor | None,
    is_trtllm: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert expert weights to FlashInfer's format, in this order.

    ``w13_input_scale`` and ``w2_input_scale`` float32, ``[1]`` or ``[E]``.

    Pad the intermediate size (not for block scales) and record it as ``layer.intermediate_size_per_partition``;
    exchange w13 to w31 (with the scales for block scales) when the activation is gated; for TensorRT-LLM per tensor
    permute the rows and register the scales on the layer.

    Parameters
    ----------
    layer
        Has ``is_act_and_mul`` (default True) and ``weight_block_size`` (None or two integers; default None).
    w13, w2
        ``[E, 2I, H]`` (``[E, I, H]`` ungated) and ``[E, H, I]`` E4M3.
    w13_scale, w2_scale
        ``[E]`` per tensor, or ``[E, 2I/128, H/128]`` and ``[E, H/128, I/128]`` per block.

    Returns
    -------
    w13, w2, w13_scale
        What the kernel takes.
        E4M3 ``[E, 2P, H]`` and ``[E, H, P]`` with the padded size P, and the float32 scales of the same shape.

    Raises
    ------
    DtypeError, InputError, LayoutError, ShapeError
    """
    checks.dtype("w13", checks.rank("w13", w13, 3), FP8)
    checks.dtype("w2", checks.rank("w2", w2, 3), FP8)
    gated = bool(getattr(layer, "is_act_and_mul", True))
    block = getattr(layer, "weight_block_size", None) is not None
    if is_trtllm and not block and (w13_input_scale is None or w2_input_scale is None):
        raise InputError(
            "the TensorRT-LLM per-tensor kernel is static: w13_input_scale and w2_input_scale are required"
        )
    if not block:
        w13, w2, size = align_fp8_moe_weights_for_fi(w13, w2, gated)
        setattr(layer, "intermediate_size_per_partition", size)  # noqa: B010  # a module types its attributes as tensors
    if gated:
        w13 = swap_w13_to_w31(w13)
        w13_scale = swap_w13_to_w31(w13_scale) if block else w13_scale
    if is_trtllm and not block and w13_input_scale is not None and w2_input_scale is not None:
        w13, w2 = rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(w13, w2, gated)
        register_scales_for_trtllm_fp8_per_tensor_moe(layer, w13_scale, w13_input_scale, w2_scale, w2_input_scale)
    return w13, w2, w13_scale


@dataclass(frozen=True)
class MoeConfig:
    """An engine's configuration of a MoE layer: input dtype, parallel ranks and sizes."""

    in_dtype: torch.dtype = torch.bfloat16
    dp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1


@dataclass(frozen=True)
class FlashInferExperts:
    """Arguments of the CUTLASS experts kernel."""

    out_dtype: torch.dtype
    quant_config: object
    ep_rank: int = 0
    ep_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    use_deepseek_fp8_block_scale: bool = False


@dataclass(frozen=True)
class PrepareFinalize:
    """Communication of tokens; with block scales the input is not quantised before it."""

    use_dp: bool
    use_deepseek_fp8_block_scale: bool = False


@verb()
def select_cutlass_fp8_gemm_impl(
    moe: MoeConfig | None,
    quant_config: object,
    out_dtype: torch.dtype | None = None,
    use_deepseek_fp8_block_scale: bool = False,
) -> FlashInferExperts:
    """The experts record; without a ``moe`` config ``out_dtype`` must be given.

    Raises
    ------
    OptionError
        Neither is given.
    """
    if moe is None:
        if out_dtype is None:
            raise OptionError("out_dtype is required when there is no moe config")
        return FlashInferExperts(out_dtype, quant_config, use_deepseek_fp8_block_scale=use_deepseek_fp8_block_scale)
    return FlashInferExperts(
        moe.in_dtype, quant_config, moe.ep_rank, moe.ep_size, moe.tp_rank, moe.tp_size, use_deepseek_fp8_block_scale
    )


@verb()
def build_flashinfer_fp8_cutlass_moe_prepare_finalize(
    moe: MoeConfig | None, use_deepseek_fp8_block_scale: bool = False
) -> PrepareFinalize:
    """The prepare/finalize record: data-parallel when the config has more than one rank."""
    return PrepareFinalize(moe is not None and moe.dp_size > 1, use_deepseek_fp8_block_scale)


@verb("moe_trtllm", adapter=_whole_layer)
def apply_fi_trtllm_fp8_per_tensor_moe(
    layer: torch.nn.Module,
    hidden_states: Tensor,
    router_logits: Tensor,
    routing_bias: Tensor | None,
    top_k: int,
    num_expert_group: int | None,
    topk_group: int | None,
    global_num_experts: int,
    apply_router_weight_on_input: bool,
) -> Tensor:
    """The TensorRT-LLM per-tensor MoE with Llama-4 routing (top-1 on the logits, sigmoid weight on the input).

    ``routing_bias`` ``[E_global]`` or None.

    Parameters
    ----------
    layer
        Prepared by :func:`prepare_fp8_moe_layer_for_fi` with ``is_trtllm``; holds ``w13_weight``, ``w2_weight``,
        ``routing_method_type`` (3), ``intermediate_size_per_partition`` and optionally ``ep_rank``,
        ``local_num_experts``.
    hidden_states
        ``[T, H]`` bf16.
    router_logits
        ``[T, E_global]``.

    Returns
    -------
    Tensor
        ``[T, H]`` bf16.

    Raises
    ------
    OptionError, DeviceError, DtypeError, LayoutError, ShapeError
        Another routing, another ``top_k`` than 1, or the weight not on the input.
    InputError
        The layer was not prepared.
    """
    if getattr(layer, "routing_method_type", None) != LLAMA4 or not apply_router_weight_on_input or top_k != 1:
        raise OptionError(
            f"only Llama-4 routing (routing_method_type {LLAMA4}, top_k 1, weight on the input) is supported; got "
            f"{getattr(layer, 'routing_method_type', None)!r}, top_k {top_k}, on input {apply_router_weight_on_input}"
        )
    missing = [
        n
        for n in ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar")
        if not hasattr(layer, n)
    ]
    if missing:
        raise InputError(
            f"the layer lacks {', '.join(missing)}; call prepare_fp8_moe_layer_for_fi(..., is_trtllm=True)"
        )
    checks.positive("global_num_experts", global_num_experts)
    checks.not_negative("num_expert_group", num_expert_group)
    checks.not_negative("topk_group", topk_group)
    tokens, width = checks.dtype("hidden_states", checks.rank("hidden_states", hidden_states, 2), *checks.WIDE).shape
    checks.operand("router_logits", router_logits, (tokens, global_num_experts), "[T, E]", *checks.WIDE)
    w13, w2 = checks.rank("w13_weight", layer.w13_weight, 3), checks.rank("w2_weight", layer.w2_weight, 3)
    if w13.shape[2] != width:
        raise ShapeError(f"hidden_states {list(hidden_states.shape)} and w13_weight {list(w13.shape)} disagree in H")
    first_scale = checks.tensor("w13_input_scale_scalar", layer.w13_input_scale_scalar)
    device = checks.same_device(hidden_states=hidden_states, router_logits=router_logits, w13=w13, w2=w2)
    run = route("moe_trtllm", device, ("groups", global_num_experts))
    codes, _ = scaled_fp8_quant(hidden_states, first_scale[:1])
    local = w13.shape[0]
    arguments = {
        "routing_logits": router_logits,
        "routing_bias": routing_bias,
        "hidden_states": codes,
        "gemm1_weights": w13,
        "output1_scales_scalar": layer.output1_scales_scalar,
        "output1_scales_gate_scalar": layer.output1_scales_gate_scalar,
        "gemm2_weights": w2,
        "output2_scales_scalar": layer.output2_scales_scalar,
        "num_experts": global_num_experts,
        "top_k": top_k,
        "n_group": num_expert_group,
        "topk_group": topk_group,
        "intermediate_size": layer.intermediate_size_per_partition,
        "local_expert_offset": int(getattr(layer, "ep_rank", 0)) * local,
        "local_num_experts": local,
        "routed_scaling_factor": None,
        "use_routing_scales_on_input": apply_router_weight_on_input,
        "routing_method_type": LLAMA4,
    }
    return run.moe_trtllm(**arguments)
