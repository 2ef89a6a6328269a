"""Experts by a table of token ids, DeepSeek-V4's first layers: weights of the experts that the table names.

    s = sqrt(max(l, 0) + log(1 + exp(-|l|)))         l the logit of an expert that tid2eid names for the token
    w = s / sum of s over the token's experts

A shared expert has the id E and the weight 1 / routed_scaling_factor.

*Admitted.* The exponential errs as in :mod:`oracle.truth.routing`, and so, relative to itself, does the softplus; its
root errs by half of that. Sum, root and quotient round ``k + 8`` times.

A NaN logit makes the weights of its token NaN, an infinite one 0 and NaN; a token whose scores may all be 0 is open.
Source: FlashInfer include/flashinfer/fused_moe/hash_topk.cuh (0.6.18.post1), after SGLang's jit_kernel of that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.norm import U
from oracle.errors import InputError, OptionError
from oracle.numbers.formats import decode
from oracle.routines import data
from oracle.routines.base import F32, Call, Contract, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.case import Case, Grammar, seeds
from oracle.routines.fault import ARITHMETIC, INDEX, VALUE, Fault, Faults, Stage, entry, fold, need, way
from oracle.routines.ideas import option
from oracle.routines.traits import Kind, of_class
from oracle.truth.routing import DEVICE_ERROR, DEVICE_SLOPE, FLUSH
from oracle.verdict.compare import Admissible, Verdict, compare, verdict
from oracle.verdict.sets import Found, Sets, judge_bits, rounded_to, worst_of


@register
class HashTopk(Contract):
    """``topk_ids`` are those of the table's row of the token, in its order, and E for a shared expert behind them;
    ``topk_weights`` beside them. Ids of tokens are below V, experts of the table from 0 to E - 1."""

    name = "hash_topk"
    section = "MoE"
    summary = "experts of a token by a table of token ids, weights of the root of a softplus that sum to 1"
    source = "FlashInfer flashinfer/fused_moe/hash_topk.py hash_topk"
    gpu = True
    dispatched = False
    returns = ("topk_weights", "topk_ids")
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("logits", Kind.LOGITS, F32, ("T", "E"), "router logits"),
        TensorSpec("input_ids", Kind.POSITIONS, (torch.int64,), ("T",), "id of each token"),
        TensorSpec("tid2eid", Kind.IDS, (torch.int32,), ("V", "k"), "experts of each token id"),
    )
    options: ClassVar[tuple[OptionSpec, ...]] = (
        OptionSpec("num_fused_shared_experts", 0, (0, 1), "shared experts that are appended"),
        OptionSpec("routed_scaling_factor", 1.0, None, "of the weight of a shared expert the inverse"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name, count in (("input_ids", inputs["tid2eid"].shape[0]), ("tid2eid", inputs["logits"].shape[1])):
            if bool((inputs[name] < 0).any()) or bool((inputs[name] >= count).any()):
                raise InputError(f"{name} reach from {int(inputs[name].min())} to {int(inputs[name].max())} of {count}")
        factor = options["routed_scaling_factor"]
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 2.0**-10 <= factor <= 2.0**10:
            raise OptionError(f"routed_scaling_factor={factor!r} is no number within 2^-10 and 2^10")

    def outputs(self, call: Call) -> dict[str, Out]:
        shape = len(call.inputs["logits"]), self._slots(call.inputs, call.resolved)
        return {"topk_weights": Out(shape, F32), "topk_ids": Out(shape, (torch.int32,))}

    @staticmethod
    def _slots(inputs: Inputs, options: Options) -> int:
        return inputs["tid2eid"].shape[1] + int(str(options["num_fused_shared_experts"]))

    def reference(self, inputs: Inputs, **options: object) -> dict[str, Tensor]:
        return self.kernel(Call(self, inputs, options).checked())

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        experts, score = chosen(inputs)
        score = fold(call, faults, Stage.STORE, score)
        weights = score / score.sum(dim=1, keepdim=True)
        shared = torch.full_like(weights[:, :1], 1 / float(options["routed_scaling_factor"]))
        weights = torch.cat([weights, shared], dim=1) if options["num_fused_shared_experts"] else weights
        made = {"topk_weights": rounded_to(weights, torch.float32), "topk_ids": self._ids(inputs, options, experts)}
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, made)
        return outputs

    @staticmethod
    def _ids(inputs: Inputs, options: Options, experts: Tensor) -> Tensor:
        behind = (0, int(str(options["num_fused_shared_experts"])))
        return torch.nn.functional.pad(experts, behind, value=inputs["logits"].shape[1]).to(torch.int32)

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [HashSets(self, call)]


def chosen(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Experts ``[T, k]``, int64, and their scores, float64; NaN stays. Source: as of the module."""
    experts = inputs["tid2eid"].long()[inputs["input_ids"]]
    return experts, _softplus(decode(inputs["logits"]).gather(1, experts)).sqrt()


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))


@dataclass(frozen=True)
class HashSets(Sets):
    """The ids of the table, and the weights within a device's error."""

    contract: HashTopk
    call: Call

    def judge(self, outputs: Found) -> Verdict:
        ids = judge_bits(outputs["topk_ids"], self.call.truth["topk_ids"], output="topk_ids")
        compared = compare(outputs["topk_weights"], self._weights(), output="topk_weights")
        return worst_of([ids, verdict(compared, basis="the softplus within a device's error, its sum rounded")])

    def _weights(self) -> Admissible:
        inputs, expected = self.call.inputs, decode(self.call.truth["topk_weights"])
        experts, _ = chosen(inputs)
        x = decode(inputs["logits"]).gather(1, experts)
        sure = x.nan_to_num(posinf=0.0, neginf=-200.0).clamp(-200.0, 200.0)
        error = DEVICE_ERROR + DEVICE_SLOPE * sure.abs() + 8 * U
        low, high = ((_softplus(x) * (1 + s * error) + s * FLUSH).clamp(min=0.0).sqrt() for s in (-1, 1))
        k = x.shape[1]
        rest = high.sum(dim=1, keepdim=True) - high, (low.sum(dim=1, keepdim=True) - low).clamp(min=0.0)
        rounding = (k + 8) * U
        low = low / (low + rest[0]) * (1 - rounding) - FLUSH
        high = high / (high + rest[1]).clamp(min=FLUSH) * (1 + rounding) + FLUSH
        open_ = ~torch.isfinite(x).all(dim=1, keepdim=True) & ~torch.isnan(expected[:, :k])
        open_ = open_ | (chosen(inputs)[1].square().sum(dim=1, keepdim=True) < k * 4 * FLUSH)
        if expected.shape[1] > k:
            shared = expected[:, k:]
            low, high = torch.cat([low, shared * (1 - 4 * U)], dim=1), torch.cat([high, shared * (1 + 4 * U)], dim=1)
            open_ = torch.nn.functional.pad(open_, (0, 1), value=False)
        return Admissible(torch.fmin(low, expected), torch.fmax(high, expected), expected, open=open_)


# --- cases ----------------------------------------------------------------------------------------------------------


def _inputs(case: Case) -> dict[str, Tensor]:
    t, e, k, v = (case[name] for name in "tekv")
    logits = data.normal(case.label("logits"), (t, e), dtype=torch.float32)
    logits = {"wide": logits * 24, "negative": -8 - logits.abs() * 12}.get(case.family, logits)
    if case.family == "special":
        logits[0, :], logits[-1, ::3] = torch.nan, -torch.inf
    stream = case.stream("tid2eid")
    table = torch.stack([torch.from_numpy(stream.order(e)[:k]) for _ in range(v)])
    ids = torch.from_numpy(case.stream("input_ids").integers(0, v, (t,)))
    return {"logits": logits, "input_ids": ids.to(torch.int64), "tid2eid": table.to(torch.int32)}


def _options(case: Case) -> dict[str, object]:
    if case.option("shared") is None:
        return {}
    return {"num_fused_shared_experts": 1, "routed_scaling_factor": float(case.option("shared") or 1)}


def _listed(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    head = f"{contract}/f32/tensor"
    for shape in ("t=1,e=8,k=1,v=3", "t=33,e=256,k=6,v=129"):
        for family in grammar.families:
            for seed in seeds(profile):
                yield f"{head}/{shape}/family={family}/seed={seed}"
    yield f"{head}/t=7,e=384,k=8,v=50/shared=2.5/family=randn/seed=1"


GRAMMARS: Mapping[str, Grammar] = {
    "hash_topk": Grammar(
        ("t", "e", "k", "v"), ("f32",), ("tensor",), ("randn", "wide", "negative", "special"), _inputs, _options,
        {"shared": ("2.5", "1")}, listed=_listed, domain="e >= 8, k <= 8", fixed=True,
    ),
}  # fmt: skip  # a table


# --- faults ---------------------------------------------------------------------------------------------------------

FAULTS = Faults(of_class(HashTopk))
fault = FAULTS.declare
MINE = "no public thread: "
several = need(lambda call: call.inputs["tid2eid"].shape[1] > 1, "a token has one expert")
shares = need(lambda call: call.resolved["num_fused_shared_experts"], "no expert is shared")
fault(
    "{}",
    INDEX,
    over=(
        way("experts of the next token id", ("tid2eid", 0), seen=MINE + "an index one off", same_if="rows are equal"),
        way("logits of the next token", ("logits", 0), seen=MINE + "a row one off", same_if="there is one token"),
        way("logits of the next expert", ("logits", 1), seen=MINE + "experts counted from 1", same_if="all are equal"),
    ),
    read=lambda place: entry(place[0], lambda x: x.roll(-1, place[1])),
)
fault(
    "{}",
    ARITHMETIC,
    over=(
        way("softplus without its root", lambda s: s.square(), seen=MINE + "DeepSeek-V4's score without sqrt"),
        way("sigmoid for the root of a softplus", lambda s: 1 - torch.exp(-s.square()), seen="DeepSeek-V3's score"),
        way("score rounded to bfloat16", lambda s: decode(rounded_to(s, torch.bfloat16)), seen="vllm 51321"),
    ),
    needs=several,
    store=lambda change: lambda score: change(score),
    same_if="all scores are equal",
)
fault(
    "weights of experts not divided by their sum",
    ARITHMETIC,
    seen=MINE + "renormalisation left out",
    write=lambda call, outputs: outputs | {"topk_weights": _undivided(call, outputs["topk_weights"])},
    same_if="scores sum to 1",
)
fault("weight of the shared expert 1", VALUE, seen="FlashInfer, other routers", needs=shares,
      options=option(routed_scaling_factor=1.0), same_if="the factor is 1")  # fmt: skip
fault(
    "weight of the shared expert the factor itself",
    VALUE,
    seen=MINE + "a quotient upside down",
    needs=shares,
    options=lambda options: options | {"routed_scaling_factor": 1 / options["routed_scaling_factor"]},
    same_if="the factor is 1",
)


def _undivided(call: Call, weights: Tensor) -> Tensor:
    score = rounded_to(chosen(call.inputs)[1], torch.float32)
    return torch.cat([score, weights[:, score.shape[1] :]], dim=1)
