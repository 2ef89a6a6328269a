"""Faults of activations: another half, another curve, a parameter or a clamp that is lost, a rounding more or less.

A right kernel has the stages READ, OPTIONS, RECIPE (:class:`oracle.truth.moe.Steps`) and WRITE.

Source: the threads that each declaration names (``seen``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.routines.base import Call
from oracle.routines.fault import ARITHMETIC, CAST, INDEX, MOVEMENT, Change, Faults, WhyNot, both, entry, need, way
from oracle.routines.ideas import fields, itself, option
from oracle.routines.moe.activations import ActivationContract
from oracle.routines.moe.contract import MoeFp8
from oracle.routines.traits import of_class, takes
from oracle.truth.activation import Curve, halves
from oracle.truth.moe import Activation, Steps, activated, clamped
from oracle.verdict.sets import rounded_to

ACTIVATIONS = of_class(ActivationContract)
FAULTS = Faults(ACTIVATIONS)
fault = FAULTS.declare
MINE = "no public thread: "


def steps_of(call: Call) -> Steps:
    """The steps of a right kernel."""
    assert isinstance(call.contract, ActivationContract)
    return call.contract.steps(call.inputs["x"], call.resolved)


def has(holds: Callable[[Steps], object], otherwise: str) -> WhyNot:
    """The steps of the call are of a kind."""
    return need(lambda call: holds(steps_of(call)), otherwise)


def formula(**values: object) -> Change:
    """A RECIPE change of the formula."""
    return lambda call, steps: replace(steps, formula=replace(steps.formula, **values))


def curve(*curves: Curve) -> WhyNot:
    """The curve is one of these."""
    return has(lambda steps: steps.formula.curve in curves, "the curve is another")


gated = has(lambda steps: steps.formula.gated, "there is no up")
in_halves = has(lambda steps: steps.formula.gated and not steps.formula.interleaved, "gate and up are no halves")
interleaved = has(lambda steps: steps.formula.interleaved, "gate and up are halves")
limited = has(lambda steps: steps.limit is not None, "there is no limit")
early = has(lambda steps: steps.limit is not None and not steps.formula.late, "no limit clamps the gate")
late = has(lambda steps: steps.limit is not None and steps.formula.late, "no limit clamps silu")
once = has(lambda steps: steps.formula.gated and steps.activation is Activation.PRODUCT, "silu is rounded already")
twice = has(lambda steps: steps.activation is Activation.EACH, "silu is not rounded by itself")
with_alpha = has(lambda steps: steps.formula.alpha != 1.0, "alpha is 1")
with_beta = has(lambda steps: steps.formula.beta, "beta is 0")
smooth = has(lambda steps: steps.formula.linear, "up is not bounded smoothly")
narrow = need(lambda call: call.inputs["x"].dtype != torch.float32, "float32 holds silu as it is")
UNREACHED, CLOSE = "no operand reaches the limit", "the curves lie within a rounding of each other"

fault(
    "{}",
    MOVEMENT,
    over=(
        way(
            "gate and up swapped in the activation",
            lambda steps: replace(steps, formula=replace(steps.formula, up_first=not steps.formula.up_first)),
            seen="sglang PR 11081",
            needs=gated,
        ),
        way(
            "gate and up taken from neighbouring columns in the activation",
            formula(interleaved=True),
            seen="vllm PR 22951, aiter 5760",
            needs=in_halves,
            same_if="the columns are equal",
        ),
        way(
            "neighbouring gate and up taken from halves in the activation",
            formula(interleaved=False),
            seen="vllm PR 22951, aiter 5760",
            needs=interleaved,
        ),
    ),
    recipe=itself,
)
fault(
    "{}",
    ARITHMETIC,
    same_if=UNREACHED,
    over=(
        way("SiLU limit ignored in the activation", fields(limit=None), seen="sglang PR 39920", needs=limited),
        way(
            "SiLU limit applied to silu in place of its argument",
            formula(late=True),
            seen="sglang-jax PR 1358",
            needs=early,
        ),
        way(
            "SiLU limit applied to the argument in place of silu",
            formula(late=False),
            seen="sglang-jax PR 1358",
            needs=late,
            admissible_if="silu of the limit is the limit within a rounding",
        ),
    ),
    recipe=itself,
)
fault(
    "{}",
    CAST,
    over=(
        way(
            "rounding of silu left out",
            fields(activation=Activation.PRODUCT),
            seen="TensorRT-LLM PR 14464",
            needs=twice,
        ),
        way(
            "silu rounded before it is multiplied",
            fields(activation=Activation.EACH),
            seen="flashinfer 5128",
            needs=once,
        ),
    ),
    needs=narrow,
    recipe=itself,
    same_if="every silu is a value of the dtype",
)


def _of(change: Callable[[Tensor, Tensor | None, Steps], tuple[Tensor, Tensor | None, Steps]]) -> Change:
    """WRITE: the output of another gate and up, and of steps that clamp no more unless they are given back."""

    def write(call: Call, out: Tensor) -> Tensor:
        steps = steps_of(call)
        gate, up = halves(decode(call.inputs["x"]), steps.formula)
        plain = replace(steps.formula, interleaved=False, up_first=False)
        gate, up, steps = change(gate, up, replace(steps, formula=plain))
        return rounded_to(activated(gate if up is None else torch.cat([gate, up], dim=-1), steps), out.dtype)

    return write


def _gate_below(gate: Tensor, up: Tensor, steps: Steps) -> tuple[Tensor, Tensor, Steps]:
    return gate.clamp(min=-(steps.limit or 0.0)), up, steps


def _gate_alone(gate: Tensor, up: Tensor, steps: Steps) -> tuple[Tensor, Tensor, Steps]:
    return clamped(torch.cat([gate, up], dim=-1), steps)[0], up, replace(steps, limit=None)


def _up_alone(gate: Tensor, up: Tensor, steps: Steps) -> tuple[Tensor, Tensor, Steps]:
    return gate, up.clamp(-(steps.limit or 0.0), steps.limit), replace(steps, limit=None)


def _no_up(gate: Tensor, up: Tensor, steps: Steps) -> tuple[Tensor, Tensor, Steps]:
    one = replace(steps.formula, beta=0.0, linear=0.0)
    return (
        clamped(torch.cat([gate, up], dim=-1), steps)[0],
        torch.ones_like(up),
        replace(steps, limit=None, formula=one),
    )


fault(
    "{}",
    ARITHMETIC,
    over=(
        way(
            "SiLU limit clamps the gate from below too",
            _gate_below,
            seen="anthony-chaudhary/fak 4837",
            needs=early,
            same_if=UNREACHED,
        ),
        way("SiLU limit left out of up", _gate_alone, seen="sglang PR 39920", needs=limited, same_if=UNREACHED),
        way("SiLU limit left out of the gate", _up_alone, seen="sglang PR 39920", needs=early, same_if=UNREACHED),
        way(
            "up left out of the activation", _no_up, seen=MINE + "a gated weight taken for an ungated one", needs=gated
        ),
    ),
    write=lambda change: entry("out", _of(change)),
)
LIMITED = (ACTIVATIONS & takes("limit")) | of_class(MoeFp8)
any_limit = need(lambda call: call.resolved["limit"] is not None, "there is no limit")
fault(
    "SiLU limit 7 whatever was asked for",
    ARITHMETIC,
    seen="aiter PR 4526",
    on=LIMITED,
    needs=any_limit,
    options=option(limit=7.0),
    same_if="the limit is 7, or no operand reaches either",
)
fault(
    "no SiLU limit taken for 0",
    ARITHMETIC,
    seen="aiter PR 5271, onnxruntime PR 27221",
    on=LIMITED | takes("swiglu_limit"),
    needs=need(lambda call: not call.resolved.get("limit", call.resolved.get("swiglu_limit")), "there is a limit"),
    write=entry("out", lambda out: torch.zeros_like(out)),
)

# --- curves and parameters ----------------------------------------------------------------------------------

fault(
    "{} in the activation",
    ARITHMETIC,
    over=(
        way("gelu in place of silu", Curve.GELU, seen="sglang PR 22928", needs=curve(Curve.SILU)),
        way("silu in place of gelu", Curve.SILU, seen="sglang PR 22928", needs=curve(Curve.GELU, Curve.GELU_TANH)),
        way(
            "tanh form in place of gelu",
            Curve.GELU_TANH,
            seen="sglang PR 22928",
            needs=curve(Curve.GELU),
            same_if=CLOSE,
            admissible_if=CLOSE,
        ),
        way(
            "gelu in place of its tanh form",
            Curve.GELU,
            seen="sglang PR 22928",
            needs=curve(Curve.GELU_TANH),
            same_if=CLOSE,
            admissible_if=CLOSE,
        ),
        way("relu2 in place of silu", Curve.RELU2, seen="vllm PR 22951", needs=curve(Curve.SILU)),
        way("silu in place of relu2", Curve.SILU, seen="vllm PR 22951", needs=curve(Curve.RELU2)),
        way("silu in place of its bounded form", Curve.SILU, seen="sglang PR 39920", needs=curve(Curve.SITU)),
    ),
    recipe=lambda other: formula(curve=other),
)
fault(
    "{}",
    ARITHMETIC,
    over=(
        way(
            "alpha of the activation ignored",
            formula(alpha=1.0),
            seen="vllm PR 45738, sglang PR 39939",
            needs=both(with_alpha, curve(Curve.SILU)),
        ),
        way(
            "alpha 1.702 whatever was asked for",
            formula(alpha=1.702),
            seen="vllm PR 48929",
            needs=both(has(lambda steps: abs(steps.formula.alpha - 1.702) > 1e-3, "it is 1.702"), curve(Curve.SILU)),
        ),
        way("nothing added to up", formula(beta=0.0), seen="vllm PR 45738, sglang PR 39920", needs=with_beta),
        way(
            "1 added to up",
            formula(beta=1.0),
            seen="vllm PR 48929",
            needs=both(gated, has(lambda steps: steps.formula.beta != 1.0, "it is added")),
        ),
        way("up not bounded smoothly", formula(linear=0.0), seen="sglang PR 39920", needs=smooth),
    ),
    recipe=itself,
    admissible_if="every element is 0, or rounds to the same value",
    same_if="every element is 0",
)
fault(
    "square of the activation left out",
    ARITHMETIC,
    seen="vllm PR 22951",
    needs=curve(Curve.RELU2),
    write=entry("out", lambda call, out: call.inputs["x"].clamp(min=0)),
    same_if="every element is 0 or 1",
)
fault(
    "negative values squared too",
    ARITHMETIC,
    seen=MINE + "a square without its maximum",
    needs=curve(Curve.RELU2),
    read=entry("x", lambda x: x.abs()),
    same_if="no element is negative",
)

# --- rows of experts ----------------------------------------------------------------------------------------

mapped = need(lambda call: "expert_map" in call.inputs, "there is no map")
ROWS = ACTIVATIONS & takes("expert_map")
fault(
    "{}",
    INDEX,
    on=ROWS,
    needs=mapped,
    over=(
        way("rows written by the map of the next expert", lambda known: known.roll(-1), seen="flashinfer 3547"),
        way("rows of experts here left out", lambda known: torch.full_like(known, -1), seen="sglang PR 29055"),
    ),
    read=lambda change: entry("expert_map", change),
)
fault(
    "rows of the first expert taken for absent",
    INDEX,
    seen="SGLang layers/moe/ep_moe/kernels.py post_reorder_triton_kernel, expert_id > 0",
    on=ROWS,
    needs=need(
        lambda call: bool((call.inputs["topk_ids"] == 0).any()) and "expert_map" not in call.inputs, "no row is of it"
    ),
    read=entry("topk_ids", lambda ids: ids.masked_fill(ids == 0, -1)),
)
