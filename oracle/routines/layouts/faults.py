"""Faults of what is made of weights and scales before a product: layouts, shards, conversions.

The right kernel of these contracts is their reference; a fault changes what it reads (READ) or what it writes (WRITE,
a dict of outputs).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.routines.fault import Call, Change, Family, Fault, Stage, WhyNot, always

ALIGN = "align_fp8_moe_weights_for_fi"
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


def input_changed(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """A READ change of one input."""

    def apply(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return inputs | {name: change(inputs[name])}

    return apply


def output_changed(name: str, change: Callable[[Call, Tensor], Tensor]) -> Change:
    """A WRITE change of one output."""

    def apply(call: Call, out: dict[str, Tensor]) -> dict[str, Tensor]:
        return out | {name: change(call, out[name])}

    return apply


def bits_of(x: Tensor) -> Tensor:
    """Codes as uint8, anything wider as it is."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def fault_of(
    name: str,
    family: Family,
    met_in: str,
    contract: str,
    changes: dict[Stage, Change],
    why_not: WhyNot = always,
    equivalent: str = "",
    tolerated: str = "",
) -> Fault:
    """A fault of one contract."""
    return Fault(name, family, met_in, changes, frozenset({contract}), why_not, equivalent, tolerated)


def _padded(call: Call) -> str | None:
    if not call.resolved["is_act_and_mul"]:
        return "the weights are not gated"
    inner = call.inputs["w2"].shape[2]
    return None if inner % 16 else f"I={inner} is aligned"


def _one_run(call: Call, w13: Tensor) -> Tensor:
    """Rows [0, 2I) copied as one run, the padding behind them."""
    given = bits_of(call.inputs["w13"])
    out = torch.zeros_like(bits_of(w13))
    out[:, : given.shape[1]] = given
    return out.view(w13.dtype)


def _padding_stale(call: Call, w2: Tensor) -> Tensor:
    out = bits_of(w2).clone()
    inner = call.inputs["w2"].shape[2]
    out[:, :, inner:] = out[:, :, : out.shape[2] - inner]
    return out.view(w2.dtype)


def _inverse_rows(call: Call, out: Tensor) -> Tensor:
    """The permutation of the rows applied the other way round."""
    given, made = bits_of(call.inputs["w"]), torch.arange(out.shape[0], device="cpu")
    probe = made[:, None].expand(out.shape).to(torch.int64)
    order = _order(call, probe)
    return given[torch.argsort(order)].view(out.dtype)


def _order(call: Call, probe: Tensor) -> Tensor:
    """Which input row stands in each output row, read off float32 row numbers."""
    width = min(probe.shape[1], 32)
    digits = [
        bits_of(_made(call, (probe >> shift & 0x3F).to(torch.uint8).view(torch.float8_e4m3fn)))[:, :width].to(
            torch.int64
        )
        for shift in (0, 6, 12)
    ]
    return (digits[0] | digits[1] << 6 | digits[2] << 12)[:, 0]


def _made(call: Call, w: Tensor) -> Tensor:
    made = call.contract.reference({"w": w}, **call.options)
    return made if isinstance(made, Tensor) else made["out"]


def _differ(scale: Tensor) -> bool:
    return bool((scale != scale.flatten()[0]).any())


def _truncated_scale(call: Call, out: Tensor) -> Tensor:
    bits = out.contiguous().view(torch.int32)
    down = call.inputs["x"].contiguous().view(torch.int32) & 0x7F80_0000
    return torch.where((bits & 0x7F80_0000) == 0x7F80_0000, bits, down).view(torch.float32)


def _word_order(call: Call, out: Tensor) -> Tensor:
    bits = out.to(torch.int64) & 0xFFFF_FFFF
    turned = bits >> 24 | bits >> 8 & 0xFF00 | (bits & 0xFF00) << 8 | (bits & 0xFF) << 24
    signed = torch.where(turned >= 1 << 31, turned - (1 << 32), turned)
    kept = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="cpu")
    kept.copy_(signed.to(out.dtype))
    return kept


def _plain_layout(call: Call, out: Tensor) -> Tensor:
    """The scales row-major, in a buffer of the swizzled size."""
    scale = bits_of(call.inputs["scale"]).flatten()
    buffer = torch.zeros(out.numel(), dtype=torch.uint8, device="cpu")
    buffer[: scale.numel()] = scale
    return buffer.view(out.dtype).reshape(out.shape)


def faults() -> list[Fault]:
    """The faults of layouts, shards and conversions."""
    index, value, cast, move = Family.SCALE_INDEX, Family.SCALE_VALUE, Family.CAST, Family.MOVEMENT
    read, write = Stage.READ, Stage.WRITE
    return [
        fault_of(
            "gated weights padded as one run (up half at the unpadded offset)",
            move,
            "vLLM 0.20.2",
            ALIGN,
            {write: output_changed("w13", _one_run)},
            _padded,
        ),
        fault_of(
            "padded intermediate not neutral",
            move,
            "flashinfer 2907",
            ALIGN,
            {write: output_changed("w2", _padding_stale)},
            lambda c: None if c.inputs["w2"].shape[2] % 16 else "the intermediate is aligned",
        ),
        fault_of(
            "gate and up halves left in place",
            move,
            "sglang PR 11081",
            SWAP,
            {write: output_changed("out", lambda c, out: c.inputs["x"])},
            always,
            "both halves are equal",
        ),
        fault_of(
            "rows of gated weights not reordered",
            move,
            "sglang PR 32430",
            REORDER,
            {write: output_changed("out", lambda c, out: c.inputs["w"])},
            always,
            "one row of each half",
        ),
        fault_of(
            "rows of gated weights reordered backwards",
            move,
            "sglang PR 32430",
            REORDER,
            {write: output_changed("out", _inverse_rows)},
            always,
            "the order is its own inverse",
        ),
        fault_of(
            "weight rows not shuffled",
            move,
            "flashinfer 2907",
            SHUFFLE,
            {write: output_changed("out", lambda c, out: c.inputs["w"])},
        ),
        fault_of(
            "weight rows shuffled backwards",
            move,
            "flashinfer 2907",
            SHUFFLE,
            {write: output_changed("out", _inverse_rows)},
            always,
            "the order is its own inverse",
        ),
        fault_of(
            "packed exponents in reverse byte order",
            index,
            "TransformerEngine PR 2589",
            PACKED,
            {write: output_changed("out", _word_order)},
            always,
            "every word reads the same in both orders",
        ),
        fault_of(
            "128x4 swizzle omitted in the layout",
            index,
            "triton PR 10382",
            SWIZZLE,
            {write: output_changed("out", lambda c, out: _plain_layout(c, out))},
            always,
            "both layouts are the same memory",
        ),
        fault_of(
            "shard scale overwritten by the next shard's",
            index,
            "Megatron-LM PR 6045, vllm 52997",
            CHANNELWISE,
            {read: input_changed("weight_scale", lambda s: torch.cat([s[1:], s[-1:]]))},
            lambda c: None if c.inputs["weight_scale"].numel() > 1 else "one shard",
        ),
        fault_of(
            "shards given the largest scale without requantising",
            value,
            "vllm PR 41021",
            REQUANTISE,
            {write: output_changed("weight", lambda c, out: c.inputs["weight"])},
            lambda c: None if _differ(c.inputs["weight_scale"]) else "one scale",
            "every shard has the largest scale",
        ),
        fault_of(
            "unloaded sentinel taken for a scale",
            value,
            "vllm-omni 5263",
            REQUANTISE,
            {write: output_changed("max_scale", lambda c, out: torch.full_like(out, -448.0))},
        ),
        fault_of(
            "scale not doubled for E4M3FNUZ",
            cast,
            "vllm PR 12134",
            FNUZ,
            {write: output_changed("weight_scale", lambda c, out: c.inputs["weight_scale"])},
        ),
        fault_of(
            "code 0x80 left in E4M3FNUZ weights",
            cast,
            "vllm PR 12134",
            FNUZ,
            {write: output_changed("weight", lambda c, out: c.inputs["weight"].view(torch.uint8).view(out.dtype))},
            lambda c: None if bool((c.inputs["weight"].view(torch.uint8) == 0x80).any()) else "no code is 0x80",
        ),
        fault_of(
            "dequantised with the inverse scale",
            value,
            "vllm PR 36297",
            DEQUANTISE,
            {read: input_changed("inv_scale", lambda s: torch.ones_like(s) / s)},
            always,
            "the scale is 1",
        ),
        fault_of(
            "scale rounded down to UE8M0",
            value,
            "vllm PR 22399",
            CEIL,
            {write: output_changed("out", _truncated_scale)},
            always,
            "every value is a power of two",
        ),
        fault_of(
            "weight scale dropped from the first alpha",
            value,
            "TensorRT-LLM PR 14199",
            ALPHAS,
            {read: input_changed("w13_scale", torch.ones_like)},
        ),
        fault_of(
            "intermediate's scale not divided out",
            value,
            "TensorRT-LLM PR 14199",
            REGISTER,
            {read: input_changed("w2_input_scale", torch.ones_like)},
        ),
    ]
