"""Faults of the activation and of TensorRT-LLM's layer of experts with per-tensor scales.

The right kernel of these contracts is their reference, as in :mod:`oracle.routines.moe.faults`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines.fault import (
    ARITHMETIC,
    CAST,
    INDEX,
    MOVEMENT,
    VALUE,
    Call,
    Faults,
    WhyNot,
    both,
    entry,
    need,
    ones,
)
from oracle.routines.moe.faults import halves_swapped, is_set, option
from oracle.routines.moe.moe_tensor import STEPS, choices, experts_of, tokens_of
from oracle.truth import layout
from oracle.truth.moe import activated, quantised, stored
from oracle.truth.routing import sigmoid

# A fault is a row: what is wrong and where it was met; the change; when it shows.
# fmt: off
ACTIVATION = Faults({"silu_and_mul"})
LAYER = Faults({"apply_fi_trtllm_fp8_per_tensor_moe"})
CERTAIN = 64.0  # a logit whose sigmoid is 1 in float32


# --- the activation -----------------------------------------------------------------------------------------

fault = ACTIVATION.declare
narrow = need(lambda call: call.inputs["x"].dtype != torch.float32, "float32 holds silu as it is")

fault("gate and up swapped in the activation", MOVEMENT, seen="sglang PR 11081",
      read=entry("x", lambda x: halves_swapped(x, -1)))
fault("SiLU limit ignored in the activation", ARITHMETIC, seen="sglang PR 39920",
      options=option(limit=None), needs=need(lambda call: call.resolved["limit"] is not None, "there is no limit"),
      same_if="no operand reaches the limit")
fault("rounding of silu left out", CAST, seen="TensorRT-LLM PR 14464",
      options=option(round_silu=False),
      needs=both(narrow, need(lambda call: call.resolved["round_silu"] is True, "silu is not rounded already")))
fault("silu rounded before it is multiplied", CAST, seen="flashinfer 5128",
      options=option(round_silu=True),
      needs=both(narrow, need(lambda call: call.resolved["round_silu"] is False, "silu is rounded already")))


# --- the layer: what it reads -------------------------------------------------------------------------------


def _certain(logits: Tensor) -> Tensor:
    """Logits with the same expert in front, whose weight is 1."""
    x = decode(logits).to(torch.float32)
    return torch.zeros_like(x).scatter_(1, x.argmax(dim=1, keepdim=True), CERTAIN)


def _by_softmax(logits: Tensor) -> Tensor:
    """Logits with the same expert in front, whose sigmoid is its softmax."""
    x = decode(logits)
    p = torch.softmax(x, dim=1).amax(dim=1, keepdim=True).clamp(2.0**-40, 1 - 2.0**-24)
    own = torch.log(p / (1 - p))
    front = torch.zeros_like(x).scatter_(1, x.argmax(dim=1, keepdim=True), 1.0)
    return (own - 1 + front).to(torch.float32)


def _as_published(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    w13, w2, _ = layout.align_fp8_moe_weights_for_fi_published(inputs["w13"], inputs["w2"], True)
    return inputs | {"w13": w13, "w2": w2}


def _not_rotated(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a kernel reads out of weights that are in the order of the checkpoint but for their halves."""
    w13, w2, _ = layout.align_fp8_moe_weights_for_fi(inputs["w13"], inputs["w2"], True)
    first, second = layout.unrotate_weights(layout.swap_w13_to_w31(w13), w2)
    return inputs | {"w13": layout.swap_w13_to_w31(first), "w2": second}


def _scale_not_divided(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The intermediate is quantised as it is and dequantised with its scale."""
    second = inputs["w2_input_scale"]
    return inputs | {"w2_input_scale": ones(second), "w2_scale": inputs["w2_scale"] * second.reshape(())}


# --- the layer: what it writes ------------------------------------------------------------------------------


def _bf16(x: Tensor) -> Tensor:
    return to_dtype(x, torch.bfloat16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def _times_weight(call: Call, out: Tensor) -> Tensor:
    weight = sigmoid(decode(call.inputs["router_logits"]).amax(dim=1, keepdim=True))
    return _bf16(decode(out) * weight)


def _weight_on_output(call: Call, out: Tensor) -> Tensor:
    logits = _certain(call.inputs["router_logits"])
    unweighted = call.contract.reference({**call.inputs, "router_logits": logits}, **call.options)
    assert isinstance(unweighted, Tensor)
    return _times_weight(call, unweighted)


def _gate_scale_twice(call: Call, out: Tensor) -> Tensor:
    """The output scale of the first product holds the gate's scale, which the kernel applies once more."""
    experts = experts_of(call.inputs, call.resolved)
    tokens = tokens_of(call.inputs, choices(call.inputs["router_logits"])[0], torch.float32)
    made = torch.zeros(out.shape, dtype=torch.float64, device="cpu")
    once_more = decode(call.inputs["w13_scale"]) * decode(call.inputs["w13_input_scale"]).reshape(())
    for expert, token, _ in tokens.slots(experts):
        h = decode(stored(experts.product("w13", expert, *tokens.rows(token)), torch.float32))
        gate, up = h.chunk(2, dim=1)
        act = activated(torch.cat([gate, up * once_more[expert]], dim=1), STEPS)
        made[token] = decode(stored(experts.product("w2", expert, *quantised(act, experts, STEPS)), torch.float32))
    return _bf16(made)


fault = LAYER.declare
unaligned = need(lambda c: c.inputs["w2"].shape[2] % 16, lambda c: f"I={c.inputs['w2'].shape[2]} is aligned")
several_experts: WhyNot = need(lambda call: call.inputs["w13"].shape[0] > 1, "there is one expert")
fault("per-tensor layer: halves left as w13", MOVEMENT, seen="sglang PR 11081", read=entry("w13", halves_swapped))
fault("per-tensor layer: rows not permuted", MOVEMENT, seen="flashinfer 2907", read=_not_rotated)
fault("per-tensor layer: up half at the unpadded offset", MOVEMENT, seen="vLLM 0.20.2",
      read=_as_published, needs=unaligned)
fault("per-tensor layer: rank's first expert not subtracted", INDEX, seen="flashinfer 3547",
      options=option(ep_rank=0), needs=is_set("ep_rank", "this rank holds the first experts"))
for which, scale in (("first", "w13_scale"), ("second", "w2_scale")):
    fault(f"per-tensor layer: {which} weight scale of the next expert", INDEX, seen="DeepGEMM PR 343",
          read=entry(scale, lambda scale: torch.roll(scale, -1, dims=0)), needs=several_experts)
fault("per-tensor layer: output scale not divided out", VALUE, seen="TensorRT-LLM PR 14199", read=_scale_not_divided)
fault("per-tensor layer: gate scale applied twice", VALUE, seen="vllm PR 52405", write=entry("out", _gate_scale_twice))
fault("per-tensor layer: routing weight dropped", VALUE, seen="TensorRT-LLM PR 14199",
      read=entry("router_logits", _certain))
fault("per-tensor layer: routing weight on the output", ARITHMETIC, seen="flashinfer PR 4639",
      write=entry("out", _weight_on_output))
fault("per-tensor layer: routing weight on input and output", ARITHMETIC, seen="vllm PR 43694",
      write=entry("out", _times_weight))
fault("per-tensor layer: softmax for sigmoid", ARITHMETIC, seen="sglang PR 39920",
      read=entry("router_logits", _by_softmax))
