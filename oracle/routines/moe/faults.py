"""Faults of routing and of the expert layer.

The right kernel of these contracts is their reference; a fault changes what it reads (READ), the options it believes
(OPTIONS) or what it writes (WRITE, a dict of outputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.routines.fault import Call, Change, Family, Fault, Stage, WhyNot, always
from oracle.routines.layouts import faults as weights
from oracle.routines.layouts.faults import bits_of, fault_of, input_changed, output_changed

ROUTING, EXPERTS = "moe_routing", "moe_fp8"
CONTRACTS = weights.CONTRACTS | {ROUTING, EXPERTS}


def _option(**values: object) -> Change:
    def apply(call: Call, options: dict[str, object]) -> dict[str, object]:
        return options | values

    return apply


def _swap_rows(x: Tensor) -> Tensor:
    raw = bits_of(x)
    half = raw.shape[-2] // 2
    return torch.cat([raw[..., half:, :], raw[..., :half, :]], dim=-2).contiguous().view(x.dtype)


def _swap_scales(x: Tensor) -> Tensor:
    return _swap_rows(x) if x.dim() == 3 else x


def _gated_groups(call: Call) -> str | None:
    groups = call.resolved["num_expert_group"]
    return None if isinstance(groups, int) and groups > 1 else "experts are not in groups"


def _is(option: str, value: object, otherwise: str) -> WhyNot:
    return lambda call: None if call.resolved[option] == value else otherwise


def _masked_with_zero(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Groups that fell out compete with 0 instead of -inf: a bias this low lets them win."""
    return inputs | {"bias": inputs["bias"] - inputs["bias"].amax() - 2.0}


def _has(name: str) -> WhyNot:
    return lambda call: None if name in call.inputs else f"there is no {name}"


def _top_two(call: Call) -> str | None:
    top = call.resolved["top_k"]
    return None if isinstance(top, int) and top > 1 else "one expert for each token"


def _first(call: Call) -> str | None:
    return None if call.resolved["first_expert"] else "this rank holds the first experts"


def _limited(call: Call) -> str | None:
    return None if call.resolved["limit"] is not None else "there is no limit"


def faults() -> list[Fault]:
    """The faults of weights and scales, then those of routing and experts."""
    index, value, move, math = Family.SCALE_INDEX, Family.SCALE_VALUE, Family.MOVEMENT, Family.ARITHMETIC
    read, option, write = Stage.READ, Stage.OPTIONS, Stage.WRITE
    return [
        *weights.faults(),
        fault_of(
            "masked expert groups compete with 0, not -inf",
            math,
            "flashinfer PR 4639",
            ROUTING,
            {read: _masked_with_zero, option: _option(num_expert_group=1, topk_group=1)},
            lambda c: _gated_groups(c) or _has("bias")(c),
            "the best experts lie in the groups that remain",
        ),
        fault_of(
            "wrong number of expert groups",
            math,
            "flashinfer PR 1723",
            ROUTING,
            {option: _option(num_expert_group=1, topk_group=1)},
            _gated_groups,
            "the best experts lie in the groups that remain",
        ),
        fault_of(
            "softmax for sigmoid",
            math,
            "sglang PR 39920",
            ROUTING,
            {option: _option(router="softmax")},
            _is("router", "deepseek_v3", "the router is another"),
        ),
        fault_of(
            "sigmoid for softmax",
            math,
            "sglang PR 39920",
            ROUTING,
            {option: _option(router="deepseek_v3", num_expert_group=1, topk_group=1)},
            _is("router", "softmax", "the router is another"),
        ),
        fault_of(
            "routing weights not renormalised",
            math,
            "flashinfer PR 4639",
            ROUTING,
            {option: _option(renormalize=False)},
            _is("renormalize", True, "weights are not renormalised"),
        ),
        fault_of(
            "routing scale dropped",
            value,
            "TensorRT-LLM PR 14199",
            ROUTING,
            {option: _option(routed_scaling_factor=1.0)},
            lambda c: None if c.resolved["routed_scaling_factor"] != 1.0 else "the factor is 1",
        ),
        fault_of(
            "second choice listed for the first expert's weight",
            index,
            "flashinfer PR 4639",
            ROUTING,
            {write: output_changed("topk_weights", lambda c, out: out.flip(1))},
            _top_two,
            "all weights of a token are equal",
        ),
        fault_of(
            "routing weight dropped",
            value,
            "TensorRT-LLM PR 14199",
            EXPERTS,
            {read: input_changed("topk_weights", torch.ones_like)},
            always,
            "every weight is 1",
        ),
        fault_of(
            "gate and up swapped in the layer",
            move,
            "sglang PR 11081",
            EXPERTS,
            {read: lambda c, i: i | {"w13": _swap_rows(i["w13"]), "w13_scale": _swap_scales(i["w13_scale"])}},
        ),
        fault_of(
            "gate and up swapped without their scales in the layer",
            move,
            "sglang PR 32430",
            EXPERTS,
            {read: input_changed("w13_scale", _swap_scales)},
            lambda c: None if c.inputs["w13_scale"].dim() == 3 else "one scale for both",
            "both halves have equal scales",
        ),
        fault_of(
            "SiLU limit ignored",
            math,
            "sglang PR 39920",
            EXPERTS,
            {option: _option(limit=None)},
            _limited,
            "no activation reaches the limit",
        ),
        fault_of(
            "rank's first expert not subtracted",
            index,
            "flashinfer 3547",
            EXPERTS,
            {option: _option(first_expert=0)},
            _first,
        ),
        fault_of(
            "routing weight on the output instead of the input",
            math,
            "flashinfer PR 4639",
            EXPERTS,
            {option: _option(apply_router_weight_on_input=False)},
            _is("apply_router_weight_on_input", True, "the weight is on the output"),
        ),
        fault_of(
            "weight scales of the next expert",
            index,
            "DeepGEMM PR 343",
            EXPERTS,
            {read: input_changed("w2_scale", lambda s: torch.roll(s, -1, dims=0))},
            lambda c: None if c.inputs["w2_scale"].shape[0] > 1 else "one expert",
        ),
    ]
