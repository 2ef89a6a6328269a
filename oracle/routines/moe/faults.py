"""Faults of routing, of the activation and of layers of experts, whose input is quantised already or by the layer.

The right kernel of these contracts is their reference; a fault changes what it reads (READ), the options it uses
(OPTIONS) or what it writes (WRITE, a dict of outputs). A fault of the layer's own quantisation does that step wrongly
and leaves the rest to the reference, which then reads codes and scales instead of ``x``. Not covered: wrong quantiser
formulas, which are faults of the quantisers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers import recipe_table
from oracle.numbers.formats import BF16, decode
from oracle.numbers.quantize import quantize
from oracle.numbers.recipes import Recipe
from oracle.routines.base import Call
from oracle.routines.fault import ARITHMETIC, CAST, INDEX, MOVEMENT, VALUE, Faults, WhyNot, both, entry, need, ones, way
from oracle.routines.ideas import bf16_of, halves_swapped, itself, option, rolled, squared, through_bf16
from oracle.routines.moe.contract import (
    STEPS,
    MoeFp8,
    Routing,
    TensorMoe,
    choices,
    experts_of,
    steps_of,
    tokens_of,
)
from oracle.routines.moe.model_routers import GemmaRouting, PhiRouting
from oracle.routines.traits import of_class
from oracle.truth import layout, routing
from oracle.truth.moe import activated, quantised, stored, weighted_input
from oracle.truth.routing import Scoring, sigmoid
from oracle.verdict.sets import rounded_to

MINE = "no public thread: "
ON_INPUT = "apply_router_weight_on_input"
Inputs = dict[str, Tensor]

# A fault is a row: what is wrong and where it was met; the change; when it shows.
ROUTING = Faults(of_class(Routing))
EXPERTS = Faults(of_class(MoeFp8))
LAYER = Faults(of_class(TensorMoe))
CERTAIN = 64.0  # a logit whose sigmoid is 1 in float32


def is_set(name: str, otherwise: str) -> WhyNot:
    """The option has a value that is neither None nor 0."""
    return need(lambda call: call.resolved[name], otherwise)


# --- routing ------------------------------------------------------------------------------------------------

fault = ROUTING.declare


def above_one(name: str, otherwise: str) -> WhyNot:
    """The option is a number above 1."""
    return need(lambda call: isinstance(value := call.resolved[name], int) and value > 1, otherwise)


def router(call: Call) -> routing.Router:
    """The router of a call; the first, where several may explain it."""
    contract = call.contract
    assert isinstance(contract, Routing)
    return contract.forms(call.inputs, call.resolved)[0]


in_groups = need(lambda call: router(call).groups > 1, "experts are not in groups")
SAME_GROUPS = "the best experts lie in the groups that remain"


def _router(name: str) -> WhyNot:
    return need(lambda call: call.resolved.get("router") == name, "the router is another")


fault(
    "{}",
    ARITHMETIC,
    over=(
        way(
            "wrong number of expert groups",
            option(num_expert_group=1, topk_group=1),
            seen="flashinfer PR 1723",
            needs=in_groups,
            same_if=SAME_GROUPS,
        ),
        way("softmax for sigmoid", option(router="softmax"), seen="sglang PR 39920", needs=_router("deepseek_v3")),
        way(
            "sigmoid for softmax",
            option(router="deepseek_v3", num_expert_group=1, topk_group=1),
            seen="sglang PR 39920",
            needs=_router("softmax"),
        ),
        way(
            "routing weights not renormalised",
            option(renormalize=False),
            seen="flashinfer PR 4639",
            needs=need(lambda call: call.resolved.get("renormalize"), "weights are not renormalised"),
        ),
        way(
            "routing scale dropped",
            option(routed_scaling_factor=1.0),
            family=VALUE,
            seen="TensorRT-LLM PR 14199",
            needs=need(lambda call: router(call).scaling != 1.0, "the factor is 1"),
        ),
    ),
    options=itself,
)
fault(
    "second choice listed for the first expert's weight",
    INDEX,
    seen="flashinfer PR 4639",
    write=entry("topk_weights", lambda weights: weights.flip(1)),
    needs=above_one("top_k", "one expert for each token"),
    same_if="all weights of a token are equal",
)


def _routed(
    change: Callable[[routing.Scores], routing.Scores] = lambda scored: scored,
    *,
    biased: bool = True,
    logits: Callable[[Call], Tensor] = lambda call: call.inputs["logits"],
    score: Callable[[Call], Tensor] | None = None,
    routed_by: Callable[[routing.Router], routing.Router] = lambda form: form,
    choose: Callable[..., Tensor] = routing.best_experts,
) -> Callable[[Call, dict[str, Tensor]], dict[str, Tensor]]:
    """WRITE: experts and weights of other logits, scores and choices; groups by their two best where they are
    ``biased``. ``score``: what weights are taken from, in place of the scores of the choice; ``choose``: in place of
    :func:`oracle.truth.routing.best_experts`."""

    def write(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        form, bias = routed_by(router(call)), choice_bias(call)
        scored = change(routing.scores(logits(call), form, bias))
        ids = choose(scored.choice, form, biased=biased and bias is not None)
        of = scored.score if score is None else score(call)
        assert isinstance(call.contract, Routing)
        factor = call.contract.factor(call.inputs, ids)
        weights = routing.weights_of(of, ids, form) * (1.0 if factor is None else factor)
        weights = rounded_to(weights, outputs["topk_weights"].dtype)
        return _written(call, outputs, weights, ids)

    return write


def _masked_with_zero(choice: Tensor, form: routing.Router, *, biased: bool) -> Tensor:
    """The experts of all groups, where those of the groups that do not remain have a choice of 0."""
    allowed = routing.in_best_groups(choice, form, biased=biased)
    return routing.best_experts(torch.where(allowed, choice, 0.0), replace(form, groups=1, top_groups=1), biased=False)


def _written(call: Call, outputs: dict[str, Tensor], weights: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Experts and weights in the dtypes of a right kernel, which leaves rows of padding without experts."""
    kept = torch.where(outputs["topk_ids"] < 0, -1, ids)
    return outputs | {"topk_weights": weights, "topk_ids": kept.to(outputs["topk_ids"].dtype)}


def _forms(call: Call) -> list[routing.Router]:
    contract = call.contract
    assert isinstance(contract, Routing)
    return contract.forms(call.inputs, call.resolved)


def _raw(call: Call) -> Tensor:
    """Scores as they come, NaN among them."""
    return routing.scores(call.inputs["logits"], replace(router(call), nan_is_zero=False), choice_bias(call)).score


def _choices(call: Call) -> Tensor:
    """What experts are chosen by."""
    return routing.scores(call.inputs["logits"], router(call), choice_bias(call)).choice


def choice_bias(call: Call) -> Tensor | None:
    """What a right kernel adds to the choices: as of :meth:`Routing.bias`, ``[E]`` of its dtype or None; NaN stays NaN.
    Source: the contract of the call."""
    contract = call.contract
    assert isinstance(contract, Routing)
    return contract.bias(call.inputs, call.resolved)


def _twice(options: dict[str, object]) -> dict[str, object]:
    return options | {"routed_scaling_factor": float(str(options["routed_scaling_factor"])) ** 2}


CHOICES = "the choices lie further apart"
with_bias = need(lambda call: "bias" in call.inputs, "there is no bias")
of_scores = need(lambda call: not router(call).choose_by_logit, "the router takes logits")
of_softmax = need(lambda call: router(call).scoring is Scoring.SOFTMAX, "the router has no softmax")


def _below_zero(call: Call) -> bool:
    """An expert is chosen by less than 0: those of other groups have more where they are masked with 0."""
    choice = _choices(call)
    ids = routing.best_experts(choice, router(call), biased=choice_bias(call) is not None)
    return bool((choice.gather(1, ids) < 0).any())


unscaled_sum = need(lambda call: not router(call).renormalise, "weights are renormalised")
fault(
    "{}",
    ARITHMETIC,
    over=(
        way(
            "bias of the choice added to the weights too",
            _routed(lambda scored: replace(scored, score=scored.choice)),
            seen="vllm PR 12002, transformers PR 39581",
            needs=both(with_bias, of_scores),
        ),
        way(
            "group of experts scored by its best choice alone",
            _routed(biased=False),
            seen="vllm PR 13474",
            needs=both(with_bias, in_groups),
            same_if="the groups of the best choices are those of the best pairs",
        ),
        way(
            "masked expert groups compete with 0, not -inf",
            _routed(choose=_masked_with_zero),
            seen="flashinfer PR 4639",
            needs=both(in_groups, need(_below_zero, "every chosen expert has a choice of 0 or more")),
        ),
        way(
            "choices rounded to bfloat16 before they are ranked",
            _routed(lambda scored: replace(scored, choice=bf16_of(scored.choice))),
            seen="ViperEkura/AstrAI PR 57",
            same_if=CHOICES,
            admissible_if=CHOICES,
        ),
        way(
            "logits for weights that are not renormalised",
            _routed(score=lambda call: decode(call.inputs["logits"])),
            seen="sglang PR 35160: softmax only where they are",
            needs=both(of_scores, unscaled_sum),
        ),
        way(
            "bias of the choice in the softmax too",
            _routed(logits=lambda call: (decode(call.inputs["logits"]) + decode(call.inputs["bias"])).float()),
            seen="aiter PR 4247: added where the logits are loaded",
            needs=both(with_bias, of_softmax),
            same_if="all biases are equal",
        ),
    ),
    write=itself,
)
fault(
    "bias of the choice rounded to bfloat16",
    CAST,
    seen="sglang PR 31213, TensorRT-LLM PR 13328",
    needs=with_bias,
    read=entry("bias", through_bf16),
    same_if=CHOICES,
    admissible_if=CHOICES,
)
fault(
    "logits rounded to bfloat16",
    CAST,
    seen="sglang PR 40149",
    needs=need(lambda call: call.inputs["logits"].dtype != torch.bfloat16, "the logits are bfloat16"),
    read=entry("logits", lambda logits: logits.to(torch.bfloat16).to(logits.dtype)),
    same_if="every logit is a bfloat16 value",
)
fault(
    "weights of a softmax of the chosen experts alone",
    ARITHMETIC,
    seen="HabanaAI/vllm-fork PR 1852",
    options=option(renormalize=True),
    needs=both(of_softmax, need(lambda call: call.resolved.get("renormalize") is False, "weights are renormalised")),
)
fault(
    "routing scale applied twice",
    VALUE,
    seen="kvcache-ai/sglang PR 86",
    options=_twice,
    needs=need(lambda call: router(call).scaling != 1.0, "the factor is 1"),
)


def _scoring(name: Scoring) -> WhyNot:
    """Scores are of another function, which no option names."""
    other = need(lambda call: router(call).scoring not in (name, Scoring.LOGIT), f"scores are {name}")
    return both(other, need(lambda call: "router" not in call.resolved, "an option names the function"))


def _score_by_tanh(scored: routing.Scores) -> routing.Scores:
    """``0.5 tanh(0.5 x) + 0.5`` in float32, for the sigmoid of x."""
    x = torch.logit(scored.score)
    return replace(scored, score=(0.5 * torch.tanh(0.5 * x.float()) + 0.5).double())


def _without_bias(call: Call) -> Tensor:
    """Scores as float32 choices less the bias."""
    scored, bias = routing.scores(call.inputs["logits"], router(call), choice_bias(call)), choice_bias(call)
    assert bias is not None
    return ((scored.score.float() + bias.float()) - bias.float()).double()


def _from_minus_one(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A search that starts at expert 0 with the value -1: no choice below that replaces it."""
    scored = routing.scores(call.inputs["logits"], router(call), choice_bias(call))
    ids = outputs["topk_ids"].long().clamp(min=0)
    ids = torch.where(scored.choice.gather(1, ids) > -1.0, ids, 0)
    weights = rounded_to(routing.weights_of(scored.score, ids, router(call)), outputs["topk_weights"].dtype)
    return _written(call, outputs, weights, ids)


def _first_experts(count: int) -> Callable[[routing.Scores], routing.Scores]:
    def change(scored: routing.Scores) -> routing.Scores:
        beyond = torch.arange(scored.choice.shape[1], device=scored.choice.device) >= count
        return replace(scored, choice=scored.choice.masked_fill(beyond, -torch.inf))

    return change


def _over_zero(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a sum without its guard: NaN where every score is 0, or is 0 by a tanh in float32."""
    scored = routing.scores(call.inputs["logits"], router(call), choice_bias(call))
    least = routing.TANH_ERROR if router(call).by_tanh else 0.0
    ids = outputs["topk_ids"].long().clamp(min=0)
    lost = (scored.score.gather(1, ids) <= least / 4).all(dim=1, keepdim=True)
    weights = outputs["topk_weights"]
    return outputs | {"topk_weights": torch.where(lost, torch.full_like(weights, torch.nan), weights)}


def _least_logit(call: Call) -> float:
    return float(decode(call.inputs["logits"]).nan_to_num(nan=0.0).amax(dim=1).min())


GUARDED = need(lambda call: router(call).epsilon > 0 or router(call).nan_is_zero, "a sum of 0 has no guard")
BELOW_TANH = -18.0  # logits of which 0.5 tanh(0.5 x) + 0.5 is 0 in float32
fault(
    "{}",
    ARITHMETIC,
    over=(
        way(
            "scored by a softmax",
            _routed(routed_by=lambda form: replace(form, scoring=Scoring.SOFTMAX)),
            seen="sglang PR 39920",
            needs=_scoring(Scoring.SOFTMAX),
        ),
        way(
            "scored by a sigmoid",
            _routed(routed_by=lambda form: replace(form, scoring=Scoring.SIGMOID)),
            seen="sglang PR 39920",
            needs=_scoring(Scoring.SIGMOID),
        ),
        way(
            "method read as TopKSigmoid",
            _routed(
                routed_by=lambda form: replace(
                    form, scoring=Scoring.SIGMOID, choose_by_logit=True, renormalise=False, epsilon=0.0
                )
            ),
            seen="vLLM's RoutingMethodType has 9 for a method without name, FlashInfer's for TopKSigmoid",
            needs=need(
                lambda call: (
                    "routing_method" in call.resolved
                    and call.resolved["routing_method"] not in ("TopKSigmoid", "Llama4")
                ),
                "the method is that one",
            ),
            same_if="the choice and the weights of both methods are equal",
        ),
        way(
            "scores that are NaN kept",
            _routed(routed_by=lambda form: replace(form, nan_is_zero=False)),
            seen="vllm PR 39391",
            needs=both(
                need(lambda call: router(call).nan_is_zero, "NaN is not replaced"),
                need(lambda call: bool(torch.isnan(_raw(call)).any()), "no score is NaN"),
            ),
        ),
        way(
            "sigmoid by tanh: 0 below -17.5",
            _routed(_score_by_tanh),
            seen="flashinfer PR 3803, flashinfer PR 3946, sglang issue 30989",
            needs=both(
                need(
                    lambda call: router(call).scoring is Scoring.SIGMOID and not router(call).by_tanh,
                    "the error of a tanh is admissible",
                ),
                need(lambda call: _least_logit(call) < BELOW_TANH, "every token has a larger logit"),
            ),
            same_if="weights are divided by a sum that a larger logit decides",
            admissible_if="weights are divided by a sum that a larger logit decides",
        ),
        way(
            "weights are choices less the bias",
            _routed(score=_without_bias),
            seen="flashinfer PR 3875: small scores are lost",
            needs=both(with_bias, of_scores),
            same_if="the scores are large beside the bias",
            admissible_if="the scores are large beside the bias",
        ),
        way(
            "experts behind the first 256 never chosen",
            _routed(_first_experts(256)),
            seen="no public thread: a tier of experts for which no kernel was compiled",
            needs=need(lambda call: call.inputs["logits"].shape[1] > 256, "there are no more experts"),
            same_if="the best experts are among them",
        ),
        way(
            "weights divided by the sum over all experts",
            _routed(lambda scored: replace(scored, score=scored.score / scored.score.sum(dim=1, keepdim=True))),
            seen="no public thread: the sum before the choice",
            needs=both(unscaled_sum, of_scores, need(lambda call: router(call).scoring is not Scoring.SOFTMAX, "1")),
        ),
        way(
            "scores and choices kept in bfloat16",
            _routed(routed_by=lambda form: replace(form, kept=BF16)),
            seen="vllm grouped_topk: the general kernel rounds to the dtype of the logits",
            needs=need(
                lambda call: (
                    BF16 not in [form.kept for form in _forms(call)]
                    and call.resolved.get("routing_method", "") not in ("TopK",)
                ),
                "so may right kernels",
            ),
            same_if="scores are values of bfloat16",
            admissible_if="weights are rounded to bfloat16 in any case",
        ),
    ),
    write=itself,
)
fault(
    "a search that starts at expert 0 with -1",
    INDEX,
    seen="vllm topk_softmax: numbers of experts without a compiled kernel",
    write=_from_minus_one,
    needs=need(lambda call: bool((_choices(call).amax(dim=1) <= -1.0).any()), "some choice is above -1"),
    same_if="the best expert is the first and only one",
)
fault(
    "weights divided by a sum of 0",
    ARITHMETIC,
    seen="flashinfer PR 3803: all logits are negative",
    write=_over_zero,
    needs=both(
        GUARDED,
        need(lambda call: router(call).renormalise, "weights are not renormalised"),
        need(
            lambda call: (
                bool((_raw(call).nan_to_num(nan=0.0).amax(dim=1) <= routing.TANH_ERROR / 4).any())
                and (router(call).by_tanh or bool((_raw(call).nan_to_num(nan=0.0) == 0).all(dim=1).any()))
            ),
            "every token has a score above 0",
        ),
    ),
)
fault(
    "experts for rows of padding",
    INDEX,
    seen="vllm topk_softmax: is_padding",
    read=lambda call, inputs: {name: x for name, x in inputs.items() if name != "is_padding"},
    needs=need(
        lambda call: "is_padding" in call.inputs and bool(call.inputs["is_padding"].any()), "there are no such rows"
    ),
)
fault(
    "softplus without its square root",
    ARITHMETIC,
    seen="no public thread: DeepSeek-V4's score is the root",
    write=_routed(lambda scored: replace(scored, score=scored.score**2)),
    needs=need(lambda call: router(call).scoring is Scoring.SOFTPLUS, "scores are of another function"),
)

MODEL = Faults(of_class(GemmaRouting, PhiRouting))
fault = MODEL.declare
GEMMA, PHI = of_class(GemmaRouting), of_class(PhiRouting)
fault(
    "router of a model: {}",
    VALUE,
    on=GEMMA,
    over=(
        way("factor of an expert left out", ones, seen="sglang 26052"),
        way("factor of the next expert", rolled(-1), seen="flashinfer 3547", family=INDEX),
        way("factor applied twice", squared, seen="unsloth PR 6978"),
    ),
    read=lambda change: entry("per_expert_scale", lambda scale: change(scale)),
    same_if="the factors are 1, or equal",
)
fault(
    "router of a model: {}",
    ARITHMETIC,
    on=PHI,
    over=(
        way("softmax over all experts", lambda x: torch.softmax(x.double(), dim=1), seen=MINE + "no threshold"),
        way("a threshold of one jitter", lambda x: _within(x, 0.01), seen=MINE + "a factor lost"),
        way(
            "logits that are not divided by their size",
            lambda x: _within(x * 1.0, 0.02, absolute=True),
            seen=MINE + "an absolute distance",
        ),
    ),
    write=lambda change: (
        lambda call, outputs: (
            outputs
            | {
                "topk_weights": torch.cat(
                    [
                        change(call.inputs["gating_output"])
                        .gather(1, outputs["topk_ids"][:, :1].long())
                        .to(torch.float32),
                        outputs["topk_weights"][:, 1:],
                    ],
                    dim=1,
                )
            }
        )
    ),
    same_if="no other logit is close",
    admissible_if="the shares lie within their roundings",
)
fault(
    "router of a model: {}",
    INDEX,
    on=PHI,
    over=(
        way(
            "second expert with the first one's weight",
            ("topk_weights", lambda w: w[:, :1].expand(w.shape).contiguous()),
            seen=MINE + "one column written twice",
        ),
        way("experts exchanged", ("topk_ids", lambda ids: ids.flip(1)), seen="flashinfer PR 4639"),
        way(
            "the first expert twice",
            ("topk_ids", lambda ids: ids[:, :1].expand(ids.shape).contiguous()),
            seen=MINE + "no mask of the first",
        ),
        way("rows of the next token", ("topk_ids", rolled(-1)), seen="flashinfer 3547"),
    ),
    write=lambda change: entry(change[0], lambda x: change[1](x)),
    same_if="both are equal",
)


def _within(x: Tensor, share: float, *, absolute: bool = False) -> Tensor:
    """The share of each logit among those within a distance of the largest."""
    v = x.double()
    m = v.amax(dim=1, keepdim=True)
    size = torch.ones_like(v) if absolute else torch.maximum(v.abs(), m)
    terms = torch.where((m - v) / size <= share, torch.exp(v - m), 0.0)
    return terms / terms.sum(dim=1, keepdim=True)


# --- the expert layer ---------------------------------------------------------------------------------------

fault = EXPERTS.declare


def _scales_swapped(scale: Tensor) -> Tensor:
    return halves_swapped(-2)(scale) if scale.dim() == 3 else scale


fault(
    "routing weight dropped",
    VALUE,
    seen="TensorRT-LLM PR 14199",
    read=entry("topk_weights", ones),
    same_if="every weight is 1",
)
fault(
    "gate and up swapped in the layer",
    MOVEMENT,
    seen="sglang PR 11081",
    read=lambda i: i | {"w13": halves_swapped(-2)(i["w13"]), "w13_scale": _scales_swapped(i["w13_scale"])},
)
fault(
    "gate and up swapped without their scales in the layer",
    MOVEMENT,
    seen="sglang PR 32430",
    read=entry("w13_scale", _scales_swapped),
    needs=need(lambda call: call.inputs["w13_scale"].dim() == 3, "one scale for both"),
    same_if="both halves have equal scales",
)
fault(
    "SiLU limit ignored",
    ARITHMETIC,
    seen="sglang PR 39920",
    options=option(limit=None),
    needs=need(lambda call: call.resolved["limit"] is not None, "there is no limit"),
    same_if="no activation reaches the limit",
)
fault(
    "rank's first expert not subtracted",
    INDEX,
    seen="flashinfer 3547",
    options=option(first_expert=0),
    needs=is_set("first_expert", "this rank holds the first experts"),
)
fault(
    "routing weight on the output instead of the input",
    ARITHMETIC,
    seen="flashinfer PR 4639",
    options=option(**{ON_INPUT: False}),
    needs=is_set(ON_INPUT, "the weight is on the output"),
)
fault(
    "weight scales of the next expert",
    INDEX,
    seen="DeepGEMM PR 343",
    read=entry("w2_scale", lambda scale: torch.roll(scale, -1, dims=0)),
    needs=need(lambda call: call.inputs["w2_scale"].shape[0] > 1, "one expert"),
)


# --- the layer's quantisation of its input ------------------------------------------------------------------


def _wide(*, given: bool = False, groups: int = 1, tokens: int = 1) -> WhyNot:
    """The call has an input to quantise, by a given scale or not, of so many groups and tokens at least."""
    return both(
        need(lambda call: "x" in call.inputs, "the input is quantised already"),
        need(
            lambda call: given == ("a_scale" in call.inputs),
            "the layer computes the scales" if given else "the scale is given",
        ),
        need(lambda call: call.inputs["x"].shape[1] > 128 * (groups - 1), "one group of 128"),
        need(lambda call: call.inputs["x"].shape[0] >= tokens, "one token"),
    )


def _made(
    call: Call, inputs: Inputs, *, recipe: Recipe | None = None, scale: Tensor | None = None, weighted: bool = True
) -> Inputs:
    """The inputs with codes and scales in place of ``x``, quantised rightly but for what is named."""
    on_input = weighted and bool(call.resolved[ON_INPUT])
    x = weighted_input(inputs["x"], inputs["topk_weights"], on_input=on_input)
    static_scale = inputs.get("a_scale") if scale is None else scale
    operand = quantize(x, recipe or steps_of(inputs, call.resolved).recipe, scale=static_scale)
    rest = {name: value for name, value in inputs.items() if name != "x"}
    return rest | {"a": operand.codes, "a_scale": operand.scale}


def _scales(change: Callable[[Tensor], Tensor]) -> Callable[[Call, Inputs], Inputs]:
    """The scales changed after the codes were made."""

    def apply(call: Call, inputs: Inputs) -> Inputs:
        operand = _made(call, inputs)
        return operand | {"a_scale": change(operand["a_scale"])}

    return apply


def _weighted_later(call: Call, inputs: Inputs) -> Inputs:
    """The codes of the plain input; the weight, in its dtype, in the scales."""
    operand = _made(call, inputs, weighted=False)
    w = decode(rounded_to(decode(inputs["topk_weights"]), inputs["x"].dtype))
    return operand | {"a_scale": rounded_to(decode(operand["a_scale"]) * w, torch.float32)}


weight_on_input = both(_wide(), is_set(ON_INPUT, "the weight is on the output"))
for words, family, seen, change, needs in (
    (
        "scales of the next group",
        INDEX,
        "mlc-ai/TIRx-kernels PR 5",
        _scales(lambda scale: torch.roll(scale, -1, dims=1)),
        _wide(groups=2),
    ),
    (
        "scale of the first group for all groups",
        INDEX,
        "vllm PR 33019",
        _scales(lambda scale: scale[:, :1].expand_as(scale).contiguous()),
        _wide(groups=2),
    ),
    (
        "scales left behind when rows are sorted by expert",
        INDEX,
        "sglang PR 31429",
        _scales(lambda scale: torch.roll(scale, 1, dims=0)),
        _wide(tokens=2),
    ),
    (
        "scales of the first token for all tokens",
        VALUE,
        "vllm PR 54683",
        _scales(lambda scale: scale[:1].expand_as(scale).contiguous()),
        _wide(tokens=2),
    ),
    (
        "one scale for a token instead of one for each group",
        VALUE,
        "flashinfer PR 4836",
        lambda call, inputs: _made(call, inputs, recipe=recipe_table.get("vllm_token")),
        _wide(groups=2),
    ),
    # codes of the intermediate's given scale, read with the input's
    (
        "quantised with the intermediate's scale",
        VALUE,
        "vllm PR 41021",
        lambda call, inputs: _made(call, inputs, scale=inputs["a2_scale"]) | {"a_scale": inputs["a_scale"]},
        _wide(given=True),
    ),
    ("quantised before its routing weight", ARITHMETIC, "vllm PR 16744", _weighted_later, weight_on_input),
):
    fault(f"layer input: {words}", family, seen=seen, read=change, needs=needs)
# the input has its weight already, and the output gets it too
fault(
    "layer input: routing weight on input and output",
    ARITHMETIC,
    seen="vllm PR 43694",
    read=_made,
    options=option(**{ON_INPUT: False}),
    needs=weight_on_input,
)


# --- the layer with per-tensor scales: what it reads --------------------------------------------------------


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


def _as_published(inputs: Inputs) -> Inputs:
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


# --- the layer with per-tensor scales: what it writes -------------------------------------------------------


def _times_weight(call: Call, out: Tensor) -> Tensor:
    weight = sigmoid(decode(call.inputs["router_logits"]).amax(dim=1, keepdim=True))
    return rounded_to(decode(out) * weight, torch.bfloat16)


def _weight_on_output(call: Call, out: Tensor) -> Tensor:
    logits = _certain(call.inputs["router_logits"])
    unweighted = call.contract.reference({**call.inputs, "router_logits": logits}, **call.options)
    assert isinstance(unweighted, Tensor)
    return _times_weight(call, unweighted)


def _gate_scale_twice(call: Call, out: Tensor) -> Tensor:
    """The output scale of the first product holds the gate's scale, which the kernel applies once more."""
    experts = experts_of(call.inputs, call.resolved)
    tokens = tokens_of(call.inputs, choices(call.inputs["router_logits"])[0], torch.float32)
    sums = torch.zeros(out.shape, dtype=torch.float64, device="cpu")
    once_more = decode(call.inputs["w13_scale"]) * decode(call.inputs["w13_input_scale"]).reshape(())
    for expert, token, _ in tokens.slots(experts):
        h = decode(stored(experts.product("w13", expert, *tokens.rows(token)), torch.float32))
        gate, up = h.chunk(2, dim=1)
        act = activated(torch.cat([gate, up * once_more[expert]], dim=1), STEPS)
        sums[token] = decode(stored(experts.product("w2", expert, *quantised(act, experts, STEPS)), torch.float32))
    return rounded_to(sums, torch.bfloat16)


fault = LAYER.declare
unaligned = need(lambda c: c.inputs["w2"].shape[2] % 16, lambda c: f"I={c.inputs['w2'].shape[2]} is aligned")
several_experts: WhyNot = need(lambda call: call.inputs["w13"].shape[0] > 1, "there is one expert")
fault("per-tensor layer: halves left as w13", MOVEMENT, seen="sglang PR 11081", read=entry("w13", halves_swapped(-2)))
fault(
    "{}",
    MOVEMENT,
    over=(
        way("per-tensor layer: rows not permuted", _not_rotated, seen="flashinfer 2907"),
        way("per-tensor layer: up half at the unpadded offset", _as_published, seen="vLLM 0.20.2", needs=unaligned),
    ),
    read=itself,
)
fault(
    "per-tensor layer: rank's first expert not subtracted",
    INDEX,
    seen="flashinfer 3547",
    options=option(ep_rank=0),
    needs=is_set("ep_rank", "this rank holds the first experts"),
)

for which, scale in (("first", "w13_scale"), ("second", "w2_scale")):
    fault(
        f"per-tensor layer: {which} weight scale of the next expert",
        INDEX,
        seen="DeepGEMM PR 343",
        read=entry(scale, lambda scale: torch.roll(scale, -1, dims=0)),
        needs=several_experts,
    )
fault("per-tensor layer: output scale not divided out", VALUE, seen="TensorRT-LLM PR 14199", read=_scale_not_divided)
fault("per-tensor layer: gate scale applied twice", VALUE, seen="vllm PR 52405", write=entry("out", _gate_scale_twice))
fault(
    "per-tensor layer: routing weight dropped",
    VALUE,
    seen="TensorRT-LLM PR 14199",
    read=entry("router_logits", _certain),
)
fault(
    "{}",
    ARITHMETIC,
    over=(
        way("per-tensor layer: routing weight on the output", _weight_on_output, seen="flashinfer PR 4639"),
        way("per-tensor layer: routing weight on input and output", _times_weight, seen="vllm PR 43694"),
    ),
    write=lambda change: entry("out", change),
)
fault(
    "per-tensor layer: softmax for sigmoid",
    ARITHMETIC,
    seen="sglang PR 39920",
    read=entry("router_logits", _by_softmax),
)
