"""Routers of single models: Gemma 4's weights with a factor of each expert, Phi's two experts of a sparse mixer.

NaN logits: those of each class.
Source: vLLM 0.20.2 model_executor/models/gemma4.py, phimoe.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.bounds.product import U
from oracle.errors import InputError, ShapeError
from oracle.numbers.formats import decode
from oracle.routines.base import F32, INTEGERS, Call, Contract, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.moe.contract import Routing
from oracle.routines.traits import Kind
from oracle.truth.routing import Router, Scoring
from oracle.verdict.compare import Admissible, Verdict, compare, verdict
from oracle.verdict.sets import Found, Property, Sets, judge_bits, rounded_to, worst_of

JITTER = 0.01
"""Experts whose logits lie further from the largest than twice this share of it have no part in its weight."""
MIXED = 2
"""Experts of a sparse mixer."""


@register
class GemmaRouting(Routing):
    """The ``topk`` largest logits; weights are their softmax, divided by the sum of the chosen ones and multiplied by
    ``per_expert_scale`` of the expert. A row with a NaN logit may choose any experts."""

    name = "gemma4_routing_function_torch"
    dispatched = False
    summary = "the k largest logits, a softmax over them, and a factor of each expert"
    source = "vLLM 0.20.2 models/gemma4.py gemma4_routing_function_torch, gemma4_fused_routing_kernel_triton"
    inputs = (
        TensorSpec("logits", Kind.LOGITS, F32, ("T", "E"), "router logits"),
        TensorSpec("per_expert_scale", Kind.ALPHA, (*F32, torch.bfloat16), ("E",), "factor of the expert's weight"),
    )
    options = (OptionSpec("top_k", 8, None, "experts of a token"),)

    def forms(self, inputs: Inputs, options: Options) -> list[Router]:
        return [Router(top_k=int(options["top_k"]), scoring=Scoring.SOFTMAX, renormalise=True)]

    def factor(self, inputs: Inputs, ids: Tensor) -> Tensor:
        """As of :meth:`Routing.factor`."""
        return decode(inputs["per_expert_scale"])[ids.long()]


@register
class PhiRouting(Contract):
    """Twice the largest logit ``m`` of those that remain, the first being the lowest of equal ones, or any: its weight
    is ``1 / sum of exp(l - m)`` over the remaining ``l`` with ``(m - l) / max(|l|, m) <= 0.02``, and those of 0 where
    ``m`` is 0. Each operation is float32; a logit within a rounding of the border may count or not. Logits are finite.
    """

    name = "phimoe_routing_function"
    section = "MoE"
    dispatched = False
    summary = "two experts, each with its share among the logits that lie close to it"
    source = "vLLM 0.20.2 models/phimoe.py phimoe_routing_function, sparsemixer"
    inputs = (TensorSpec("gating_output", Kind.LOGITS, F32, ("T", "E"), "router logits"),)
    returns = ("topk_weights", "topk_ids")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        x = inputs["gating_output"]
        if x.shape[1] < MIXED:
            raise ShapeError(f"gating_output has {x.shape[1]} experts; a token takes {MIXED}")
        if not bool(torch.isfinite(decode(x)).all()):
            raise InputError("gating_output holds NaN or infinity; pass finite logits")

    def outputs(self, call: Call) -> dict[str, Out]:
        shape = (call.inputs["gating_output"].shape[0], MIXED)
        return {"topk_weights": Out(shape, F32), "topk_ids": Out(shape, INTEGERS)}

    def reference(self, inputs: Inputs, **options: object) -> dict[str, Tensor]:
        """The lowest of equal experts, weights rounded once."""
        self.check(inputs, options)
        x = decode(inputs["gating_output"])
        first = x.argmax(dim=1)
        second = x.scatter(1, first[:, None], -torch.inf).argmax(dim=1)
        ids = torch.stack([first, second], dim=1)
        return {"topk_weights": rounded_to(shares(x, ids)[0], torch.float32), "topk_ids": ids}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [Property(lambda outputs: self._judge(call, outputs))]

    def _judge(self, call: Call, outputs: Found) -> Verdict:
        x, given = decode(call.inputs["gating_output"]), outputs["topk_ids"].long()
        inside = ((given >= 0) & (given < x.shape[1])).all(dim=1) & (given[:, 0] != given[:, 1])
        ids = torch.where(inside[:, None], given, call.truth["topk_ids"])
        left = x.scatter(1, ids[:, :1], -torch.inf)
        best = torch.stack([x.amax(dim=1), left.amax(dim=1)], dim=1)
        right = inside[:, None] & (x.gather(1, ids) == best)
        due = torch.where(right, given, call.truth["topk_ids"])
        usual, low, high = shares(x, ids)
        n = x.shape[1] + 8
        sets = Admissible(
            low * (1 - n * U), high * (1 + n * U), usual, open=~right.all(dim=1, keepdim=True).expand(low.shape)
        )
        weights = compare(outputs["topk_weights"], sets, output="topk_weights")
        return worst_of([judge_bits(given, due, output="topk_ids"), verdict(weights, basis="float32 shares")])


def shares(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the experts ``ids`` ``[T, 2]`` for float64 logits ``x`` ``[T, E]``, the least and the largest:
    float64 ``[T, 2]`` each, with logits on the border counted and not. No NaN."""
    found = []
    remaining = x
    for slot in range(MIXED):
        at = ids[:, slot : slot + 1]
        m = x.gather(1, at)
        # of the logits as they were; the first expert itself is gone from the sum of the second
        distance = (m - x) / torch.maximum(x.abs(), m)
        terms = torch.exp(remaining - m)
        # 0 / 0, of a logit of 0 beside a largest of 0, lies beyond no border
        wide, narrow = (~(distance > 2 * JITTER * (1 + side * 8 * U)) for side in (1, -1))
        usual = ~(distance > 2 * JITTER)
        found.append([1 / torch.where(mask, terms, 0.0).sum(dim=1) for mask in (usual, wide, narrow)])
        remaining = x.scatter(1, at, -torch.inf)
    usual, low, high = (torch.stack(column, dim=1) for column in zip(*found, strict=True))
    return usual, low, high
