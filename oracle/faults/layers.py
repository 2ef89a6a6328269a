"""Faults of what surrounds a product: weight layouts, shards, routing, the expert layer.

The right kernel of these contracts is their reference; a fault changes what it reads (READ), the options it believes
(OPTIONS) or what it writes (WRITE, a dict of outputs).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.faults.base import Call, Change, Family, Fault, Stage, WhyNot, always

ALIGN, ROUTING, EXPERTS = "align_fp8_moe_weights_for_fi", "moe_routing", "moe_fp8"
REQUANTISE, FNUZ, CHANNELWISE = "requantize_with_max_scale", "normalize_e4m3fn_to_e4m3fnuz", "convert_to_channelwise"
DEQUANTISE, CEIL, SWAP = "per_tensor_dequantize", "ceil_to_ue8m0", "swap_w13_to_w31"
REORDER, SHUFFLE, PACKED = (
    "reorder_rows_for_gated_act_gemm",
    "shuffle_matrix_a",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
)
ALPHAS, REGISTER, SWIZZLE = (
    "make_fp8_moe_alpha_scales_for_fi",
    "register_scales_for_trtllm_fp8_per_tensor_moe",
    "swizzle_scale",
)
CONTRACTS = frozenset(
    {
        ALIGN,
        ROUTING,
        EXPERTS,
        REQUANTISE,
        FNUZ,
        CHANNELWISE,
        DEQUANTISE,
        CEIL,
        SWAP,
        REORDER,
        SHUFFLE,
        PACKED,
        ALPHAS,
        REGISTER,
        SWIZZLE,
    }
)


def _input(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    def apply(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return inputs | {name: change(inputs[name])}

    return apply


def _output(name: str, change: Callable[[Call, Tensor], Tensor]) -> Change:
    def apply(call: Call, out: dict[str, Tensor]) -> dict[str, Tensor]:
        return out | {name: change(call, out[name])}

    return apply


def _option(**values: object) -> Change:
    def apply(call: Call, options: dict[str, object]) -> dict[str, object]:
        return options | values

    return apply


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _padded(call: Call) -> str | None:
    if not call.resolved["is_act_and_mul"]:
        return "the weights are not gated"
    inner = call.inputs["w2"].shape[2]
    return None if inner % 16 else f"I={inner} is aligned"


def _one_run(call: Call, w13: Tensor) -> Tensor:
    """Rows [0, 2I) copied as one run, the padding behind them."""
    given = _bits(call.inputs["w13"])
    out = torch.zeros_like(_bits(w13))
    out[:, : given.shape[1]] = given
    return out.view(w13.dtype)


def _padding_stale(call: Call, w2: Tensor) -> Tensor:
    out = _bits(w2).clone()
    inner = call.inputs["w2"].shape[2]
    out[:, :, inner:] = out[:, :, : out.shape[2] - inner]
    return out.view(w2.dtype)


def _swap_rows(x: Tensor) -> Tensor:
    raw = _bits(x)
    half = raw.shape[-2] // 2
    return torch.cat([raw[..., half:, :], raw[..., :half, :]], dim=-2).contiguous().view(x.dtype)


def _swap_scales(x: Tensor) -> Tensor:
    return _swap_rows(x) if x.dim() == 3 else x


def _inverse_rows(call: Call, out: Tensor) -> Tensor:
    """The permutation of the rows applied the other way round."""
    given, made = _bits(call.inputs["w"]), torch.arange(out.shape[0])
    probe = made[:, None].expand(out.shape).to(torch.int64)
    order = _order(call, probe)
    return given[torch.argsort(order)].view(out.dtype)


def _order(call: Call, probe: Tensor) -> Tensor:
    """Which input row stands in each output row, read off float32 row numbers."""
    width = min(probe.shape[1], 32)
    digits = [
        _bits(_made(call, (probe >> shift & 0x3F).to(torch.uint8).view(torch.float8_e4m3fn)))[:, :width].to(torch.int64)
        for shift in (0, 6, 12)
    ]
    return (digits[0] | digits[1] << 6 | digits[2] << 12)[:, 0]


def _made(call: Call, w: Tensor) -> Tensor:
    made = call.contract.reference({"w": w}, **call.options)
    return made if isinstance(made, Tensor) else made["out"]


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


def _differ(scale: Tensor) -> bool:
    return bool((scale != scale.flatten()[0]).any())


def _limited(call: Call) -> str | None:
    return None if call.resolved["limit"] is not None else "there is no limit"


def _truncated_scale(call: Call, out: Tensor) -> Tensor:
    bits = out.contiguous().view(torch.int32)
    down = call.inputs["x"].contiguous().view(torch.int32) & 0x7F80_0000
    return torch.where((bits & 0x7F80_0000) == 0x7F80_0000, bits, down).view(torch.float32)


def _word_order(call: Call, out: Tensor) -> Tensor:
    bits = out.to(torch.int64) & 0xFFFF_FFFF
    turned = bits >> 24 | bits >> 8 & 0xFF00 | (bits & 0xFF00) << 8 | (bits & 0xFF) << 24
    signed = torch.where(turned >= 1 << 31, turned - (1 << 32), turned)
    kept = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype)
    kept.copy_(signed.to(out.dtype))
    return kept


def _fault(
    name: str,
    family: Family,
    met_in: str,
    contract: str,
    changes: dict[Stage, Change],
    why_not: WhyNot = always,
    equivalent: str = "",
    tolerated: str = "",
) -> Fault:
    return Fault(name, family, met_in, changes, frozenset({contract}), why_not, equivalent, tolerated)


def faults() -> list[Fault]:
    """The faults of layouts, shards, routing and experts."""
    index, value, cast = Family.SCALE_INDEX, Family.SCALE_VALUE, Family.CAST
    move, math = Family.MOVEMENT, Family.ARITHMETIC
    read, option, write = Stage.READ, Stage.OPTIONS, Stage.WRITE
    return [
        _fault(
            "gated weights padded as one run (up half at the unpadded offset)",
            move,
            "vLLM 0.20.2",
            ALIGN,
            {write: _output("w13", _one_run)},
            _padded,
        ),
        _fault(
            "padded intermediate not neutral",
            move,
            "flashinfer 2907",
            ALIGN,
            {write: _output("w2", _padding_stale)},
            lambda c: None if c.inputs["w2"].shape[2] % 16 else "the intermediate is aligned",
        ),
        _fault(
            "gate and up halves left in place",
            move,
            "sglang PR 11081",
            SWAP,
            {write: _output("out", lambda c, out: c.inputs["x"])},
            always,
            "both halves are equal",
        ),
        _fault(
            "rows of gated weights not reordered",
            move,
            "sglang PR 32430",
            REORDER,
            {write: _output("out", lambda c, out: c.inputs["w"])},
            always,
            "one row of each half",
        ),
        _fault(
            "rows of gated weights reordered backwards",
            move,
            "sglang PR 32430",
            REORDER,
            {write: _output("out", _inverse_rows)},
            always,
            "the order is its own inverse",
        ),
        _fault(
            "weight rows not shuffled",
            move,
            "flashinfer 2907",
            SHUFFLE,
            {write: _output("out", lambda c, out: c.inputs["w"])},
        ),
        _fault(
            "weight rows shuffled backwards",
            move,
            "flashinfer 2907",
            SHUFFLE,
            {write: _output("out", _inverse_rows)},
            always,
            "the order is its own inverse",
        ),
        _fault(
            "packed exponents in reverse byte order",
            index,
            "TransformerEngine PR 2589",
            PACKED,
            {write: _output("out", _word_order)},
            always,
            "every word reads the same in both orders",
        ),
        _fault(
            "128x4 swizzle omitted in the layout",
            index,
            "triton PR 10382",
            SWIZZLE,
            {write: _output("out", lambda c, out: _plain_layout(c, out))},
            always,
            "both layouts are the same memory",
        ),
        _fault(
            "shard scale overwritten by the next shard's",
            index,
            "Megatron-LM PR 6045, vllm 52997",
            CHANNELWISE,
            {read: _input("weight_scale", lambda s: torch.cat([s[1:], s[-1:]]))},
            lambda c: None if c.inputs["weight_scale"].numel() > 1 else "one shard",
        ),
        _fault(
            "shards given the largest scale without requantising",
            value,
            "vllm PR 41021",
            REQUANTISE,
            {write: _output("weight", lambda c, out: c.inputs["weight"])},
            lambda c: None if _differ(c.inputs["weight_scale"]) else "one scale",
            "every shard has the largest scale",
        ),
        _fault(
            "unloaded sentinel taken for a scale",
            value,
            "vllm-omni 5263",
            REQUANTISE,
            {write: _output("max_scale", lambda c, out: torch.full_like(out, -448.0))},
        ),
        _fault(
            "scale not doubled for E4M3FNUZ",
            cast,
            "vllm PR 12134",
            FNUZ,
            {write: _output("weight_scale", lambda c, out: c.inputs["weight_scale"])},
        ),
        _fault(
            "code 0x80 left in E4M3FNUZ weights",
            cast,
            "vllm PR 12134",
            FNUZ,
            {write: _output("weight", lambda c, out: c.inputs["weight"].view(torch.uint8).view(out.dtype))},
            lambda c: None if bool((c.inputs["weight"].view(torch.uint8) == 0x80).any()) else "no code is 0x80",
        ),
        _fault(
            "dequantised with the inverse scale",
            value,
            "vllm PR 36297",
            DEQUANTISE,
            {read: _input("inv_scale", lambda s: torch.ones_like(s) / s)},
            always,
            "the scale is 1",
        ),
        _fault(
            "scale rounded down to UE8M0",
            value,
            "vllm PR 22399",
            CEIL,
            {write: _output("out", _truncated_scale)},
            always,
            "every value is a power of two",
        ),
        _fault(
            "weight scale dropped from the first alpha",
            value,
            "TensorRT-LLM PR 14199",
            ALPHAS,
            {read: _input("w13_scale", torch.ones_like)},
        ),
        _fault(
            "intermediate's scale not divided out",
            value,
            "TensorRT-LLM PR 14199",
            REGISTER,
            {read: _input("w2_input_scale", torch.ones_like)},
        ),
        _fault(
            "masked expert groups compete with 0, not -inf",
            math,
            "flashinfer PR 4639",
            ROUTING,
            {read: _masked_with_zero, option: _option(num_expert_group=1, topk_group=1)},
            lambda c: _gated_groups(c) or _has("bias")(c),
            "the best experts lie in the groups that remain",
        ),
        _fault(
            "wrong number of expert groups",
            math,
            "flashinfer PR 1723",
            ROUTING,
            {option: _option(num_expert_group=1, topk_group=1)},
            _gated_groups,
            "the best experts lie in the groups that remain",
        ),
        _fault(
            "softmax for sigmoid",
            math,
            "sglang PR 39920",
            ROUTING,
            {option: _option(router="softmax")},
            _is("router", "deepseek_v3", "the router is another"),
        ),
        _fault(
            "sigmoid for softmax",
            math,
            "sglang PR 39920",
            ROUTING,
            {option: _option(router="deepseek_v3", num_expert_group=1, topk_group=1)},
            _is("router", "softmax", "the router is another"),
        ),
        _fault(
            "routing weights not renormalised",
            math,
            "flashinfer PR 4639",
            ROUTING,
            {option: _option(renormalize=False)},
            _is("renormalize", True, "weights are not renormalised"),
        ),
        _fault(
            "routing scale dropped",
            value,
            "TensorRT-LLM PR 14199",
            ROUTING,
            {option: _option(routed_scaling_factor=1.0)},
            lambda c: None if c.resolved["routed_scaling_factor"] != 1.0 else "the factor is 1",
        ),
        _fault(
            "second choice listed for the first expert's weight",
            index,
            "flashinfer PR 4639",
            ROUTING,
            {write: _output("topk_weights", lambda c, out: out.flip(1))},
            _top_two,
            "all weights of a token are equal",
        ),
        _fault(
            "routing weight dropped",
            value,
            "TensorRT-LLM PR 14199",
            EXPERTS,
            {read: _input("topk_weights", torch.ones_like)},
            always,
            "every weight is 1",
        ),
        _fault(
            "gate and up swapped in the layer",
            move,
            "sglang PR 11081",
            EXPERTS,
            {read: lambda c, i: i | {"w13": _swap_rows(i["w13"]), "w13_scale": _swap_scales(i["w13_scale"])}},
        ),
        _fault(
            "gate and up swapped without their scales in the layer",
            move,
            "sglang PR 32430",
            EXPERTS,
            {read: _input("w13_scale", _swap_scales)},
            lambda c: None if c.inputs["w13_scale"].dim() == 3 else "one scale for both",
            "both halves have equal scales",
        ),
        _fault(
            "SiLU limit ignored",
            math,
            "sglang PR 39920",
            EXPERTS,
            {option: _option(limit=None)},
            _limited,
            "no activation reaches the limit",
        ),
        _fault(
            "rank's first expert not subtracted",
            index,
            "flashinfer 3547",
            EXPERTS,
            {option: _option(first_expert=0)},
            _first,
        ),
        _fault(
            "routing weight on the output instead of the input",
            math,
            "flashinfer PR 4639",
            EXPERTS,
            {option: _option(apply_router_weight_on_input=False)},
            _is("apply_router_weight_on_input", True, "the weight is on the output"),
        ),
        _fault(
            "weight scales of the next expert",
            index,
            "DeepGEMM PR 343",
            EXPERTS,
            {read: _input("w2_scale", lambda s: torch.roll(s, -1, dims=0))},
            lambda c: None if c.inputs["w2_scale"].shape[0] > 1 else "one expert",
        ),
    ]


def _plain_layout(call: Call, out: Tensor) -> Tensor:
    """The scales row-major, in a buffer of the swizzled size."""
    scale = _bits(call.inputs["scale"]).flatten()
    buffer = torch.zeros(out.numel(), dtype=torch.uint8)
    buffer[: scale.numel()] = scale
    return buffer.view(out.dtype).reshape(out.shape)
