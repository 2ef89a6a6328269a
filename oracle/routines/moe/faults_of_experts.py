"""Faults of what experts are made of: rows in runs, the activation, TensorRT-LLM's per-tensor layer; size of a grid.

The grouped product is mutated as the other products are; the right kernel of the others is their reference, as in
:mod:`oracle.routines.moe.faults`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines.fault import Call, Change, Family, Fault, Stage, WhyNot, always
from oracle.routines.layouts.faults import fault_of
from oracle.routines.moe.moe_tensor import STEPS, choices, experts_of, tokens_of
from oracle.routines.products.roles import SCALED
from oracle.truth import decisions as platforms
from oracle.truth import layout
from oracle.truth.moe import activated, quantised, stored
from oracle.truth.routing import sigmoid

ACTIVATION, LAYER, GRID = "silu_and_mul", "apply_fi_trtllm_fp8_per_tensor_moe", "get_num_sms"
CONTRACTS = frozenset({ACTIVATION, LAYER, GRID})
CERTAIN = 64.0  # a logit whose sigmoid is 1 in float32


# --- reading ------------------------------------------------------------------------------------------------


def _input(name: str, change: Callable[[Call, Tensor], Tensor]) -> Change:
    return lambda call, inputs: inputs | {name: change(call, inputs[name])}


def _halves(x: Tensor, axis: int) -> Tensor:
    """The two halves of an axis exchanged."""
    raw = x.view(torch.uint8) if x.element_size() == 1 else x
    return torch.cat(raw.chunk(2, dim=axis)[::-1], dim=axis).contiguous().view(x.dtype)


def _next_expert(call: Call, scale: Tensor) -> Tensor:
    return torch.roll(scale, -1, dims=0)


def _ends_late(call: Call, offsets: Tensor) -> Tensor:
    """Every group but the last in use takes the first row of the group behind it."""
    return torch.minimum(offsets + 1, offsets[-1]).to(offsets.dtype)


def _weights_of_next_group(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    b = inputs["b"]
    turned = torch.roll(b.view(torch.uint8), -1, dims=0).view(b.dtype)
    return inputs | {"b": turned, "scale_b": torch.roll(inputs["scale_b"], -1, dims=0)}


def _certain(call: Call, logits: Tensor) -> Tensor:
    """Logits with the same expert in front, whose weight is 1."""
    x = decode(logits).to(torch.float32)
    return torch.zeros_like(x).scatter_(1, x.argmax(dim=1, keepdim=True), CERTAIN)


def _by_softmax(call: Call, logits: Tensor) -> Tensor:
    """Logits with the same expert in front, whose sigmoid is its softmax."""
    x = decode(logits)
    p = torch.softmax(x, dim=1).amax(dim=1, keepdim=True).clamp(2.0**-40, 1 - 2.0**-24)
    own = torch.log(p / (1 - p))
    front = torch.zeros_like(x).scatter_(1, x.argmax(dim=1, keepdim=True), 1.0)
    return (own - 1 + front).to(torch.float32)


def _as_published(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    w13, w2, _ = layout.align_fp8_moe_weights_for_fi_published(inputs["w13"], inputs["w2"], True)
    return inputs | {"w13": w13, "w2": w2}


def _not_rotated(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a kernel reads out of weights that are in the order of the checkpoint but for their halves."""
    w13, w2, _ = layout.align_fp8_moe_weights_for_fi(inputs["w13"], inputs["w2"], True)
    first, second = layout.unrotate_weights(layout.swap_w13_to_w31(w13), w2)
    return inputs | {"w13": layout.swap_w13_to_w31(first), "w2": second}


def _scale_not_divided(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The intermediate is quantised as it is and dequantised with its scale."""
    second = inputs["w2_input_scale"]
    return inputs | {"w2_input_scale": torch.ones_like(second), "w2_scale": inputs["w2_scale"] * second.reshape(())}


# --- writing ------------------------------------------------------------------------------------------------


def _output(change: Callable[[Call, Tensor], Tensor]) -> Change:
    return lambda call, out: out | {"out": change(call, out["out"])}


def _times_weight(call: Call, out: Tensor) -> Tensor:
    weight = sigmoid(decode(call.inputs["router_logits"]).amax(dim=1, keepdim=True))
    return _bf16(decode(out) * weight)


def _weight_on_output(call: Call, out: Tensor) -> Tensor:
    logits = _certain(call, call.inputs["router_logits"])
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


def _bf16(x: Tensor) -> Tensor:
    return to_dtype(x, torch.bfloat16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def _as_sxm(call: Call, out: Tensor) -> Tensor:
    """132 for everything that is sm90."""
    numbers = [i for i, (_, capability, _) in enumerate(platforms.GPUS, start=1) if capability == 90]
    hopper = torch.isin(call.inputs["product"], torch.tensor(numbers, dtype=torch.int64, device="cpu"))
    return torch.where(hopper & (out > 0), 132, out)


# --- where they apply ---------------------------------------------------------------------------------------


def _several_groups(call: Call) -> str | None:
    return None if len(call.parts) > 1 else "one expert is used"


def _more_weights(call: Call) -> str | None:
    return None if call.inputs["b"].shape[0] > 1 else "there is one expert"


def _several_experts(call: Call) -> str | None:
    return None if call.inputs["w13"].shape[0] > 1 else "there is one expert"


def _unaligned(call: Call) -> str | None:
    inner = call.inputs["w2"].shape[2]
    return None if inner % 16 else f"I={inner} is aligned"


def _later_rank(call: Call) -> str | None:
    return None if call.resolved["ep_rank"] else "this rank holds the first experts"


def _limited(call: Call) -> str | None:
    return None if call.resolved["limit"] is not None else "there is no limit"


def _rounded(wanted: bool) -> WhyNot:
    def why_not(call: Call) -> str | None:
        if call.inputs["x"].dtype == torch.float32:
            return "float32 holds silu as it is"
        is_rounded = call.resolved["round_silu"]
        return None if is_rounded is wanted else f"silu is {'' if is_rounded else 'not '}rounded already"

    return why_not


def faults() -> list[Fault]:
    """The faults of runs, activation, per-tensor layer and grid."""
    return [*_of_runs(), *_of_activation(), *_of_layer(), *_of_grid()]


def _of_runs() -> list[Fault]:
    move, read = Family.MOVEMENT, Stage.READ
    return [
        fault_of(
            "groups end one row late",
            move,
            "flashinfer 3547",
            SCALED,
            {read: _input("offsets", _ends_late)},
            _several_groups,
        ),
        fault_of(
            "weights of the next group of a run",
            move,
            "DeepGEMM PR 343",
            SCALED,
            {read: _weights_of_next_group},
            _more_weights,
        ),
    ]


def _of_activation() -> list[Fault]:
    option = Stage.OPTIONS
    return [
        fault_of(
            "gate and up swapped in the activation",
            Family.MOVEMENT,
            "sglang PR 11081",
            ACTIVATION,
            {Stage.READ: _input("x", lambda c, x: _halves(x, -1))},
        ),
        fault_of(
            "SiLU limit ignored in the activation",
            Family.ARITHMETIC,
            "sglang PR 39920",
            ACTIVATION,
            {option: lambda c, o: o | {"limit": None}},
            _limited,
            "no operand reaches the limit",
        ),
        fault_of(
            "rounding of silu left out",
            Family.CAST,
            "TensorRT-LLM PR 14464",
            ACTIVATION,
            {option: lambda c, o: o | {"round_silu": False}},
            _rounded(True),
        ),
        fault_of(
            "silu rounded before it is multiplied",
            Family.CAST,
            "flashinfer 5128",
            ACTIVATION,
            {option: lambda c, o: o | {"round_silu": True}},
            _rounded(False),
        ),
    ]


def _of_layer() -> list[Fault]:
    index, value, move, math = Family.SCALE_INDEX, Family.SCALE_VALUE, Family.MOVEMENT, Family.ARITHMETIC
    read, write = Stage.READ, Stage.WRITE
    rows: list[tuple[str, Family, str, dict[Stage, Change], WhyNot]] = [
        ("per-tensor layer: halves left as w13", move, "sglang PR 11081",
         {read: _input("w13", lambda c, w: _halves(w, -2))}, always),
        ("per-tensor layer: rows not permuted", move, "flashinfer 2907", {read: _not_rotated}, always),
        ("per-tensor layer: up half at the unpadded offset", move, "vLLM 0.20.2", {read: _as_published}, _unaligned),
        ("per-tensor layer: rank's first expert not subtracted", index, "flashinfer 3547",
         {Stage.OPTIONS: lambda c, o: o | {"ep_rank": 0}}, _later_rank),
        ("per-tensor layer: first weight scale of the next expert", index, "DeepGEMM PR 343",
         {read: _input("w13_scale", _next_expert)}, _several_experts),
        ("per-tensor layer: second weight scale of the next expert", index, "DeepGEMM PR 343",
         {read: _input("w2_scale", _next_expert)}, _several_experts),
        ("per-tensor layer: output scale not divided out", value, "TensorRT-LLM PR 14199",
         {read: _scale_not_divided}, always),
        ("per-tensor layer: gate scale applied twice", value, "vllm PR 52405",
         {write: _output(_gate_scale_twice)}, always),
        ("per-tensor layer: routing weight dropped", value, "TensorRT-LLM PR 14199",
         {read: _input("router_logits", _certain)}, always),
        ("per-tensor layer: routing weight on the output", math, "flashinfer PR 4639",
         {write: _output(_weight_on_output)}, always),
        ("per-tensor layer: routing weight on input and output", math, "vllm PR 43694",
         {write: _output(_times_weight)}, always),
        ("per-tensor layer: softmax for sigmoid", math, "sglang PR 39920",
         {read: _input("router_logits", _by_softmax)}, always),
    ]  # fmt: skip
    return [fault_of(name, family, met_in, LAYER, changes, why_not) for name, family, met_in, changes, why_not in rows]


def _of_grid() -> list[Fault]:
    return [
        fault_of(
            "132 multiprocessors taken for every Hopper",
            Family.MOVEMENT,
            "osayamenja/FlashMoE 3",
            GRID,
            {Stage.WRITE: _output(_as_sxm)},
        ),
        fault_of(
            "multiprocessors of the product, not of the device",
            Family.MOVEMENT,
            "Neroued/ninfer PR 89",
            GRID,
            {Stage.READ: _input("reported", lambda c, r: torch.full_like(r, -1))},
        ),
    ]
