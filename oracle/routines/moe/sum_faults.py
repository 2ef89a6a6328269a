"""Faults of sums over slots: a slot, weight, row or factor that is another's, and sums in fewer bits.

The right kernel is the reference; a fault changes what it reads (READ), its options (OPTIONS) or its output (WRITE).

Source: the threads that each declaration names (``seen``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.routines.base import Call
from oracle.routines.fault import ARITHMETIC, CAST, INDEX, MOVEMENT, VALUE, Faults, entry, need, ones, way
from oracle.routines.ideas import option, rolled
from oracle.routines.moe.sums import MoeUnpermute, SlotSum, Terms, ZeroExperts
from oracle.routines.traits import of_class, takes
from oracle.truth.moe import running_sum
from oracle.verdict.sets import rounded_to

SUMS = of_class(SlotSum)
FAULTS = Faults(SUMS)
fault = FAULTS.declare
MINE = "no public thread: "
EQUAL, CLOSE = "it changes nothing", "it lies within the roundings of float32"


def terms_of(call: Call) -> Terms:
    """The terms of a right kernel."""
    assert isinstance(call.contract, SlotSum)
    return call.contract.terms(call.inputs, call.resolved)


def _again(call: Call, value: Tensor) -> dict[str, Tensor]:
    """The output of another sum."""
    assert isinstance(call.contract, SlotSum)
    return {"out": rounded_to(value, call.inputs[call.contract.rows].dtype)}


several = need(lambda call: len(terms_of(call).of) > 1, "a token has one slot")
fault(
    "sum over slots: {}",
    MOVEMENT,
    needs=several,
    over=(
        way("last slot left out", lambda of: of[:-1], seen="vllm 48895"),
        way("first slot left out", lambda of: of[1:], seen=MINE + "a loop that begins at 1"),
        way("last slot counted twice", lambda of: torch.cat([of, of[-1:]]), seen=MINE + "a tail read again"),
        way("the last slot alone", lambda of: of[-1:], seen=MINE + "a store for an addition"),
    ),
    write=lambda change: (
        lambda call, outputs: _again(call, change(terms_of(call).of).sum(dim=0) * terms_of(call).factor)
    ),
    same_if=EQUAL,
    admissible_if=CLOSE,
)
fault(
    "sum over slots: {}",
    ARITHMETIC,
    needs=several,
    over=(
        way("products and sums in bfloat16", torch.bfloat16, seen="vllm PR 12293: a sum in the dtype of rows"),
        way("products and sums in float16", torch.float16, seen=MINE + "the other half format"),
    ),
    write=lambda dtype: (
        lambda call, outputs: _again(
            call, running_sum(decode(rounded_to(terms_of(call).of, dtype)), dtype) * terms_of(call).factor
        )
    ),
    same_if=EQUAL,
    admissible_if="the sum of slots may be rounded so, or it lies within the roundings of float32",
)
fault(
    "sum over slots: the mean of the slots",
    VALUE,
    seen=MINE + "a reduction of another kind",
    needs=several,
    write=lambda call, outputs: _again(call, terms_of(call).of.mean(dim=0) * terms_of(call).factor),
    same_if=EQUAL,
    admissible_if=CLOSE,
)
fault(
    "sum over slots: rows of the next token",
    INDEX,
    seen="flashinfer 3547",
    write=entry("out", rolled(-1)),
    needs=need(lambda call: terms_of(call).of.shape[1] > 1, "one token"),
    same_if=EQUAL,
)
fault(
    "sum over slots: factor left out",
    VALUE,
    seen="vllm PR 23123",
    on=SUMS & takes("routed_scaling_factor"),
    options=option(routed_scaling_factor=1.0),
    needs=need(lambda call: terms_of(call).factor != 1.0, "the factor is 1"),
    same_if=EQUAL,
)
fault(
    "sum over slots: {}",
    INDEX,
    on=SUMS & (takes("topk_weights") | takes("expert_scales")),
    over=(
        way("weights of the next slot", rolled(-1, 1), seen="flashinfer 3547", needs=several),
        way("weights of the next token", rolled(-1), seen="vllm 48895"),
        way("weights left out", ones, seen="triton 6527", family=VALUE),
        way("weights in bfloat16", lambda w: w.to(torch.bfloat16).to(w.dtype), seen="flashinfer 2330", family=CAST),
    ),
    read=lambda change: (
        lambda call, inputs: (
            inputs | {name: change(inputs[name]) for name in ("topk_weights", "expert_scales") if name in inputs}
        )
    ),
    same_if=EQUAL,
    admissible_if="it lies within the rounding of the output",
)
mapped = need(lambda call: "expert_map" in call.inputs, "there is no map")
fault(
    "sum over slots: slots of other ranks added",
    VALUE,
    seen="vllm 42118",
    on=SUMS & takes("expert_map"),
    needs=mapped,
    read=entry("expert_map", lambda known: known.clamp(min=0)),
    same_if="every expert is of this rank",
)
fault(
    "sum over slots: map of experts off by one",
    INDEX,
    seen="flashinfer 3547",
    on=SUMS & takes("expert_map"),
    needs=mapped,
    read=entry("expert_map", rolled(1)),
    same_if=EQUAL,
)


def _by_column(call: Call, at: Tensor) -> Tensor:
    """Places that are read as those of ``[k, T]``."""
    tokens, slots = call.inputs["topk_weights"].shape
    return at.view(slots, tokens).t().flatten()


fault(
    "sum over slots: {}",
    INDEX,
    on=of_class(MoeUnpermute),
    over=(
        way("places of pairs by slot, then token", _by_column, seen=MINE + "the order of TensorRT-LLM"),
        way("the place of the next pair", lambda call, at: at.roll(-1), seen="flashinfer 3547"),
        way("the order read backwards", lambda call, at: torch.argsort(at).to(at.dtype), seen=MINE + "the inverse map"),
    ),
    read=lambda change: entry("inv_permuted_idx", change),
    same_if=EQUAL,
)
fault(
    "sum over slots: rows of no expert added",
    VALUE,
    seen="vllm 42118",
    on=of_class(MoeUnpermute),
    read=lambda call, inputs: {name: x for name, x in inputs.items() if name != "expert_first_token_offset"},
    needs=need(lambda call: "expert_first_token_offset" in call.inputs, "every row is of an expert"),
    same_if="every row is in use",
)
fault(
    "sum over slots: the identity from {} on",
    INDEX,
    on=of_class(ZeroExperts),
    over=(
        way("the next expert", lambda count: count + 1, seen=MINE + "a comparison without its equality"),
        way("the previous expert", lambda count: count - 1, seen=MINE + "an expert counted from 1"),
    ),
    options=lambda change: lambda call, options: options | {"num_experts": change(int(options["num_experts"]))},
    same_if="no token has that expert",
)
