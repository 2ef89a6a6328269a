"""Faults of an expert layer that quantises its input itself (``moe_fp8`` with ``x``).

Each fault does the first step of the layer wrongly and leaves the rest to the reference, which then reads codes and
scales instead of ``x``. Not covered: wrong quantiser formulas, which are faults of the quantisers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.numbers import recipes
from oracle.numbers.formats import decode
from oracle.numbers.quantize import quantize
from oracle.numbers.recipes import Recipe
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines.fault import Call, Change, Family, Fault, Stage, WhyNot
from oracle.routines.layouts.faults import fault_of
from oracle.routines.moe.contract import steps_of
from oracle.truth.moe import weighted_input

EXPERTS = "moe_fp8"
ON_INPUT = "apply_router_weight_on_input"
Inputs = dict[str, Tensor]


def _made(
    call: Call, inputs: Inputs, *, recipe: Recipe | None = None, scale: Tensor | None = None, weighted: bool = True
) -> Inputs:
    """The inputs with codes and scales in place of ``x``, quantised rightly but for what is named."""
    on_input = weighted and bool(call.resolved[ON_INPUT])
    x = weighted_input(inputs["x"], inputs["topk_weights"], on_input=on_input)
    given = inputs.get("a_scale") if scale is None else scale
    made = quantize(x, recipe or steps_of(inputs, call.resolved).recipe, scale=given)
    rest = {name: value for name, value in inputs.items() if name != "x"}
    return rest | {"a": made.codes, "a_scale": made.scale}


def _scales(change: Callable[[Tensor], Tensor]) -> Change:
    """The scales changed after the codes were made."""

    def apply(call: Call, inputs: Inputs) -> Inputs:
        made = _made(call, inputs)
        return made | {"a_scale": change(made["a_scale"])}

    return apply


def _for_each_token(call: Call, inputs: Inputs) -> Inputs:
    return _made(call, inputs, recipe=recipes.get("vllm_token"))


def _weighted_later(call: Call, inputs: Inputs) -> Inputs:
    """The codes of the plain input; the weight, in its dtype, in the scales."""
    made = _made(call, inputs, weighted=False)
    w = decode(_rounded(decode(inputs["topk_weights"]), inputs["x"].dtype))
    return made | {"a_scale": _rounded(decode(made["a_scale"]) * w, torch.float32)}


def _weighted_twice(call: Call, inputs: Inputs) -> Inputs:
    """The input has its weight already, and the output gets it too."""
    return _made(call, inputs)


def _by_the_other_scale(call: Call, inputs: Inputs) -> Inputs:
    """Codes of the intermediate's given scale, read with the input's."""
    return _made(call, inputs, scale=inputs["a2_scale"]) | {"a_scale": inputs["a_scale"]}


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return to_dtype(x, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def _wide(*, given: bool = False, groups: int = 1, tokens: int = 1, on_input: bool = False) -> WhyNot:
    """Why a call has no input to quantise, or not of the kind that shows the fault."""

    def why_not(call: Call) -> str | None:
        x = call.inputs.get("x")
        if x is None:
            return "the input is quantised already"
        if given != ("a_scale" in call.inputs):
            return "the layer computes the scales" if given else "the scale is given"
        if x.shape[1] <= 128 * (groups - 1):
            return "one group of 128"
        if x.shape[0] < tokens:
            return "one token"
        return None if call.resolved[ON_INPUT] or not on_input else "the weight is on the output"

    return why_not


def faults() -> list[Fault]:
    """The faults of the layer's own quantisation, in the order of its families."""
    index, value, math = Family.SCALE_INDEX, Family.SCALE_VALUE, Family.ARITHMETIC

    def reads(name: str, family: Family, met_in: str, change: Change, why_not: WhyNot) -> Fault:
        return fault_of(name, family, met_in, EXPERTS, {Stage.READ: change}, why_not)

    return [
        reads(
            "layer input: scales of the next group",
            index,
            "mlc-ai/TIRx-kernels PR 5",
            _scales(lambda s: torch.roll(s, -1, dims=1)),
            _wide(groups=2),
        ),
        reads(
            "layer input: scale of the first group for all groups",
            index,
            "vllm PR 33019",
            _scales(lambda s: s[:, :1].expand_as(s).contiguous()),
            _wide(groups=2),
        ),
        reads(
            "layer input: scales left behind when rows are sorted by expert",
            index,
            "sglang PR 31429",
            _scales(lambda s: torch.roll(s, 1, dims=0)),
            _wide(tokens=2),
        ),
        reads(
            "layer input: scales of the first token for all tokens",
            value,
            "vllm PR 54683",
            _scales(lambda s: s[:1].expand_as(s).contiguous()),
            _wide(tokens=2),
        ),
        reads(
            "layer input: one scale for a token instead of one for each group",
            value,
            "flashinfer PR 4836",
            _for_each_token,
            _wide(groups=2),
        ),
        reads(
            "layer input: quantised with the intermediate's scale",
            value,
            "vllm PR 41021",
            _by_the_other_scale,
            _wide(given=True),
        ),
        reads(
            "layer input: quantised before its routing weight",
            math,
            "vllm PR 16744",
            _weighted_later,
            _wide(on_input=True),
        ),
        fault_of(
            "layer input: routing weight on input and output",
            math,
            "vllm PR 43694",
            EXPERTS,
            {Stage.READ: _weighted_twice, Stage.OPTIONS: lambda call, options: options | {ON_INPUT: False}},
            _wide(on_input=True),
        ),
    ]
