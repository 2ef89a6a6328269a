"""Routers of libraries, a row each: what is chosen by, what a weight is, and what is rounded on the way.

    row                   score                                 chosen by           weight, before it is scaled
    topk_softmax          softmax(l), 0 where NaN               s + bias            s, divided by the sum where asked
    topk_sigmoid          sigmoid(l), 0 where NaN               s + bias            the same
    topk_softplus_sqrt    sqrt(log(1 + exp(l))), 0 where NaN    s + bias            the same
    grouped_topk          sigmoid(l) by tanh                    s + bias in groups  s, divided by the sum + 1e-20
    fused_topk_deepseek   sigmoid(l) by tanh                    s + bias in groups  s / (sum + 1e-20)
    trtllm_moe_routing    as the method says (``METHODS``)                          in bfloat16

A row of padding has no experts: its ids are -1, nothing is claimed of its weights. All -inf, or one +inf under a
softmax: every score is 0, so that any experts may be chosen, and weights are 0. A sum of 0 divides as 1.
``grouped_topk`` keeps scores, biases and their sums in float32 or, in its general kernel, in the dtype of the logits,
all of a call alike; the score of a group is then a sum in either. The layers of TensorRT-LLM round the bias of grouped
experts to bfloat16. FlashInfer builds its kernels with ``-use_fast_math``, so that its tanh is ``tanh.approx.f32``.

Sources: vLLM csrc/moe (topk_softmax_kernels.cu, grouped_topk_kernels.cu); FlashInfer fused_routing_dsv3.py and
trtllm_fused_moe_routing; :mod:`oracle.truth.routing`.
Not covered: experts by a table of token ids; softcapping of logits; shared experts that are appended; which experts are
taken where a logit is NaN or infinite under groups.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oracle.errors import InputError, OptionError
from oracle.numbers.formats import of_dtype
from oracle.numbers.quantize import WIDE
from oracle.routines.base import F32, Inputs, Options, OptionSpec, TensorSpec, positive, register
from oracle.routines.moe.contract import Routing
from oracle.routines.traits import Kind
from oracle.truth import routing
from oracle.truth.routing import METHODS, Router, Scoring

EPSILON = 1e-20
GROUPED = "DeepSeekV3"
"""The method of TensorRT-LLM that has groups of experts."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One router of a library.

    Attributes
    ----------
    facts : fields of the :class:`~oracle.truth.routing.Router` that no option changes.
    scored : the formula, in words.
    bias : dtypes of a bias; empty for none.
    given : the bias is no optional input.
    padded : rows may be marked as padding.
    groups, asks, scales : options for groups of experts, for renormalised weights, for a factor.
    methods : the option that names one of FlashInfer's methods.
    keeps : scores and choices may be kept in the dtype of the logits too.
    weights : dtypes of weights, the reference's first; empty for that of the logits.
    """

    name: str
    summary: str
    source: str
    scored: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    bias: tuple[torch.dtype, ...] = F32
    given: bool = False
    padded: bool = False
    groups: bool = False
    asks: bool = False
    scales: bool = True
    methods: bool = False
    keeps: bool = False
    weights: tuple[torch.dtype, ...] = F32


_GUARDED = {"nan_is_zero": True}
_GROUPED = {"by_tanh": True, "epsilon": EPSILON}
_VLLM: dict[str, Any] = {"source": "vLLM csrc/moe/topk_softmax_kernels.cu; PR 39391", "padded": True, "asks": True}
ROWS = (
    Row(
        name="topk_softmax", summary="the k best of a softmax and a bias; scores that are NaN are 0",
        scored="softmax(l)", facts={"scoring": Scoring.SOFTMAX, **_GUARDED}, **_VLLM,
    ),
    Row(
        name="topk_sigmoid", summary="the k best of a sigmoid and a bias; scores that are NaN are 0",
        scored="sigmoid(l)", facts=_GUARDED, **_VLLM,
    ),
    Row(
        name="topk_softplus_sqrt", summary="the k best of the square root of a softplus and a bias, DeepSeek-V4's",
        scored="sqrt(log(1 + exp(l))), sqrt(l) above 20", facts={"scoring": Scoring.SOFTPLUS, **_GUARDED}, **_VLLM,
    ),
    Row(
        name="grouped_topk", summary="DeepSeek-V3's router in groups of experts, in float32 or the logits' dtype",
        source="vLLM csrc/moe/grouped_topk_kernels.cu", scored="0.5 tanh(0.5 l) + 0.5", facts=_GROUPED, given=True,
        bias=WIDE, groups=True, asks=True, keeps=True,
    ),
    Row(
        name="fused_topk_deepseek", summary="DeepSeek-V3's router in groups of experts, weights that sum to the factor",
        source="FlashInfer fused_moe/fused_routing_dsv3.py", scored="0.5 tanh(0.5 l) + 0.5",
        facts={"renormalise": True, "fast_tanh": True, **_GROUPED}, given=True, bias=WIDE, groups=True, weights=(),
    ),
    Row(
        name="trtllm_moe_routing", summary="the ten routing methods of TensorRT-LLM's layers of experts",
        source="FlashInfer tllm_enums.py, trtllm_fused_moe_routing; PR 3875, PR 3803", scored="as the method says",
        facts={"by_tanh": True, "fast_tanh": True}, bias=WIDE, groups=True, methods=True,
        weights=(torch.bfloat16, torch.float32),
    ),
)  # fmt: skip  # a table


class LibraryRouting(Routing):
    """A row with a NaN logit whose score is not replaced may choose any experts, whose weights are those of the
    formulas."""

    row: Row
    production = "routers.route_experts"

    def forms(self, inputs: Inputs, options: Options) -> list[Router]:
        row, facts = self.row, dict(self.row.facts)
        if row.methods:
            facts |= METHODS[str(options["routing_method"])]
        if row.asks:
            facts["renormalise"] = bool(options["renormalize"])
        if row.groups and not (row.methods and options["routing_method"] != GROUPED):
            facts |= {"groups": positive(options, "num_expert_group"), "top_groups": positive(options, "topk_group")}
        if row.scales and not (row.methods and options["routing_method"] not in routing.BIASED):
            facts["scaling"] = _number(options["routed_scaling_factor"])
        usual = Router(top_k=positive(options, "top_k"), **facts)
        logits = inputs["logits"].dtype
        if not row.keeps or logits == torch.float32:
            return [usual]
        return [usual, Router(top_k=usual.top_k, **facts, kept=of_dtype(logits))]

    def weights_dtypes(self, inputs: Inputs) -> tuple[torch.dtype, ...]:
        return self.row.weights or tuple(dict.fromkeys((inputs["logits"].dtype, torch.float32)))

    def bias(self, inputs: Inputs, options: Options) -> Tensor | None:
        """As of :meth:`Routing.bias`, ``[E]``; bfloat16 where TensorRT-LLM ranks groups. NaN stays NaN."""
        bias = inputs.get("bias")
        if bias is None or not self.row.methods or options["num_expert_group"] == 1:
            return bias
        return bias.to(torch.bfloat16)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        if not self.row.methods:
            return
        method = options["routing_method"]
        if "bias" in inputs and method not in routing.BIASED:
            raise InputError(f"{method} takes no bias; {' and '.join(routing.BIASED)} do")
        if method != GROUPED and options["num_expert_group"] != 1:
            raise OptionError(f"{method} has no groups of experts; {GROUPED} has")
        if method not in routing.BIASED and options["routed_scaling_factor"] != 1.0:
            raise OptionError(f"{method} has no factor; {' and '.join(routing.BIASED)} have")


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise OptionError(f"routed_scaling_factor={value!r}; pass a number")
    return float(value)


def _inputs(row: Row) -> tuple[TensorSpec, ...]:
    found = [TensorSpec("logits", Kind.LOGITS, WIDE, ("T", "E"), "router logits")]
    if row.bias:
        doc = "correction of the choice, not of the weight"
        found.append(TensorSpec("bias", Kind.BIAS, row.bias, ("E",), doc, optional=not row.given))
    if row.padded:
        doc = "a byte for each row, not 0 for one that has no experts"
        found.append(TensorSpec("is_padding", Kind.MASK, (torch.uint8,), ("T",), doc, optional=True))
    return tuple(found)


def _options(row: Row) -> tuple[OptionSpec, ...]:
    found = [OptionSpec("routing_method", GROUPED, tuple(METHODS), "RoutingMethodType by name")] if row.methods else []
    found.append(OptionSpec("top_k", 8, None, "experts of a token"))
    if row.groups:
        found.append(OptionSpec("num_expert_group", 1, None, "groups of experts"))
        found.append(OptionSpec("topk_group", 1, None, "groups that remain"))
    if row.asks:
        doc = "weights of a token sum to 1, before the scaling factor"
        found.append(OptionSpec("renormalize", False, (False, True), doc))
    if row.scales:
        found.append(OptionSpec("routed_scaling_factor", 1.0, None, "factor of all weights"))
    return tuple(found)


def _method(name: str) -> str:
    """A routing method in words; no tensor, so no NaN."""
    facts = METHODS[name]
    by = "the logit" if facts.get("choose_by_logit") else "score and bias" if name in routing.BIASED else "the score"
    total = "their sum and 1e-20" if facts.get("epsilon") else "their sum"
    divided = f", divided by {total}" if facts.get("renormalise") else ""
    on_input = ", and they multiply the input" if facts.get("on_input") else ""
    score = facts.get("scoring", Scoring.SIGMOID)
    return f"{name}: experts by {by}, weights of the {str(score).removeprefix('the ')}{divided}{on_input}."


def _text(row: Row) -> str:
    """What the page of a row says: score, choice, weight, padding; NaN is named where it is replaced."""
    facts = row.facts
    guarded, epsilon = bool(facts.get("nan_is_zero")), facts.get("epsilon", 0.0)
    lines = [f"The score of a logit l is {row.scored}{', 0 where that is NaN' if guarded else ''}."]
    if row.methods:
        lines = [_method(name) for name in METHODS]
    if row.groups:
        lines.append("A group counts as much as its two largest choices; experts are taken of the groups that remain.")
    if not row.methods:
        lines.append("Experts are those of the largest choices: score and bias.")
        divisor = (
            f"sum of the token's weights and {epsilon:g}"
            if epsilon
            else "sum of the token's weights, by 1 where it is 0"
        )
        when = "with renormalize divided by the" if row.asks else "divided by the"
        lines.append(f"The weight is the score without the bias, {when} {divisor}, then times the factor.")
        lines.append("So weights of a token whose scores are all 0 are 0, not NaN.")
    if row.padded:
        lines.append("A row of padding has the ids -1; nothing is claimed of its weights.")
    return textwrap.fill(" ".join(lines), 116)


def _registered(row: Row) -> type[LibraryRouting]:
    body = {
        "name": row.name,
        "row": row,
        "summary": row.summary,
        "source": row.source,
        "inputs": _inputs(row),
        "options": _options(row),
        "__doc__": _text(row),
        "__module__": __name__,
    }
    contract: type[LibraryRouting] = type(f"Routing_{row.name}", (LibraryRouting,), body)
    register(contract)
    return contract


CONTRACTS = {row.name: _registered(row) for row in ROWS}
