"""Faults of what is made of weights and scales before a product: layouts, shards, conversions.

The right kernel of these contracts is their reference; a fault changes what it reads (READ) or what it writes (WRITE,
a dict of outputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.routines.fault import CAST, INDEX, MOVEMENT, VALUE, Call, Change, Faults, both, entry, need, ones

ALIGN = "align_fp8_moe_weights_for_fi"
REQUANTISE, FNUZ, CHANNELWISE = "requantize_with_max_scale", "normalize_e4m3fn_to_e4m3fnuz", "convert_to_channelwise"
REORDER, SHUFFLE = "reorder_rows_for_gated_act_gemm", "shuffle_matrix_a"
CONTRACTS = frozenset({
    ALIGN, REQUANTISE, FNUZ, CHANNELWISE, REORDER, SHUFFLE, "per_tensor_dequantize", "ceil_to_ue8m0", "swap_w13_to_w31",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor", "make_fp8_moe_alpha_scales_for_fi",
    "register_scales_for_trtllm_fp8_per_tensor_moe", "swizzle_scale",
})  # fmt: skip
# A fault is a row: what is wrong and where it was met; the change; when it shows.
# fmt: off
FAULTS = Faults(CONTRACTS)
fault = FAULTS.declare


def bits_of(x: Tensor) -> Tensor:
    """Codes as uint8, anything wider as it is."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _given(name: str) -> Change:
    """The input of this name, unchanged."""
    return lambda call, out: call.inputs[name]


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
    """The permutation of the rows applied the other way round; it is read off row numbers, six bits at a time."""
    given, made = bits_of(call.inputs["w"]), torch.arange(out.shape[0], device="cpu")
    numbers = made[:, None].expand(out.shape).to(torch.int64)
    order = torch.zeros_like(made)
    for shift in (0, 6, 12):
        digits = (numbers >> shift & 0x3F).to(torch.uint8).view(torch.float8_e4m3fn)
        moved = call.contract.reference({"w": digits}, **call.options)
        order |= bits_of(moved if isinstance(moved, Tensor) else moved["out"])[:, 0].to(torch.int64) << shift
    return given[torch.argsort(order)].view(out.dtype)


def _truncated_scale(call: Call, out: Tensor) -> Tensor:
    bits = out.contiguous().view(torch.int32)
    down = call.inputs["x"].contiguous().view(torch.int32) & 0x7F80_0000
    return torch.where((bits & 0x7F80_0000) == 0x7F80_0000, bits, down).view(torch.float32)


def _word_order(out: Tensor) -> Tensor:
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


gated = need(lambda call: call.resolved["is_act_and_mul"], "the weights are not gated")
ragged = need(lambda c: c.inputs["w2"].shape[2] % 16, lambda c: f"I={c.inputs['w2'].shape[2]} is aligned")
fault("gated weights padded as one run (up half at the unpadded offset)", MOVEMENT, seen="vLLM 0.20.2",
      contracts={ALIGN}, write=entry("w13", _one_run), needs=both(gated, ragged))
fault("padded intermediate not neutral", MOVEMENT, seen="flashinfer 2907",
      contracts={ALIGN}, write=entry("w2", _padding_stale),
      needs=need(lambda call: call.inputs["w2"].shape[2] % 16, "the intermediate is aligned"))
fault("gate and up halves left in place", MOVEMENT, seen="sglang PR 11081",
      contracts={"swap_w13_to_w31"}, write=entry("out", _given("x")), same_if="both halves are equal")
fault("rows of gated weights not reordered", MOVEMENT, seen="sglang PR 32430",
      contracts={REORDER}, write=entry("out", _given("w")), same_if="one row of each half")
fault("rows of gated weights reordered backwards", MOVEMENT, seen="sglang PR 32430",
      contracts={REORDER}, write=entry("out", _inverse_rows), same_if="the order is its own inverse")
fault("weight rows not shuffled", MOVEMENT, seen="flashinfer 2907",
      contracts={SHUFFLE}, write=entry("out", _given("w")))
fault("weight rows shuffled backwards", MOVEMENT, seen="flashinfer 2907",
      contracts={SHUFFLE}, write=entry("out", _inverse_rows), same_if="the order is its own inverse")
fault("packed exponents in reverse byte order", INDEX, seen="TransformerEngine PR 2589",
      contracts={"get_mn_major_tma_aligned_packed_ue8m0_tensor"}, write=entry("out", _word_order),
      same_if="every word reads the same in both orders")
fault("128x4 swizzle omitted in the layout", INDEX, seen="triton PR 10382",
      contracts={"swizzle_scale"}, write=entry("out", _plain_layout), same_if="both layouts are the same memory")
fault("shard scale overwritten by the next shard's", INDEX, seen="Megatron-LM PR 6045, vllm 52997",
      contracts={CHANNELWISE}, read=entry("weight_scale", lambda scale: torch.cat([scale[1:], scale[-1:]])),
      needs=need(lambda call: call.inputs["weight_scale"].numel() > 1, "one shard"))
fault(
    "shards given the largest scale without requantising", VALUE, seen="vllm PR 41021", contracts={REQUANTISE},
    write=entry("weight", _given("weight")),
    needs=need(lambda c: bool((c.inputs["weight_scale"] != c.inputs["weight_scale"].flatten()[0]).any()), "one scale"),
    same_if="every shard has the largest scale",
)
fault("unloaded sentinel taken for a scale", VALUE, seen="vllm-omni 5263",
      contracts={REQUANTISE}, write=entry("max_scale", lambda scale: torch.full_like(scale, -448.0)))
fault("scale not doubled for E4M3FNUZ", CAST, seen="vllm PR 12134",
      contracts={FNUZ}, write=entry("weight_scale", _given("weight_scale")))
fault("code 0x80 left in E4M3FNUZ weights", CAST, seen="vllm PR 12134",
      contracts={FNUZ},
      write=entry("weight", lambda call, out: call.inputs["weight"].view(torch.uint8).view(out.dtype)),
      needs=need(lambda call: bool((call.inputs["weight"].view(torch.uint8) == 0x80).any()), "no code is 0x80"))
fault("dequantised with the inverse scale", VALUE, seen="vllm PR 36297",
      contracts={"per_tensor_dequantize"}, read=entry("inv_scale", lambda scale: torch.ones_like(scale) / scale),
      same_if="the scale is 1")
fault("scale rounded down to UE8M0", VALUE, seen="vllm PR 22399",
      contracts={"ceil_to_ue8m0"}, write=entry("out", _truncated_scale), same_if="every value is a power of two")
for name, contract, scale in (
    ("weight scale dropped from the first alpha", "make_fp8_moe_alpha_scales_for_fi", "w13_scale"),
    ("intermediate's scale not divided out", "register_scales_for_trtllm_fp8_per_tensor_moe", "w2_input_scale"),
):
    fault(name, VALUE, seen="TensorRT-LLM PR 14199", contracts={contract}, read=entry(scale, ones))
