"""Routing of tokens to experts: the experts of each token and their weights.

    llama4       the k largest logits; weight sigmoid(logit), applied to the expert's *input*
    deepseek_v3  score s = sigmoid(logit), choice c = s + bias; of G groups of experts the ``top_groups`` best by the
                 sum of their two largest c remain; the k largest c among them; weight s, renormalised, scaled
    softmax      score s = softmax(logits); the k largest; weight s, renormalised on request
    softplus     score s = sqrt(log(1 + exp(logit))), DeepSeek-V4's; choice s + bias; weight s

FlashInfer's fused layers name their methods (:data:`METHODS`): the k largest scores or logits, their scores as weights,
divided by their sum or not; a softmax of the chosen logits is that of all logits, renormalised.

``exp`` is torch's in float64, whose libraries state an error of at most one ulp; the intervals here allow 2^-48
relative, which the tests check against decimal arithmetic and which is 2^-24 of the float32 error allowed to a kernel.
A kernel may evaluate a sigmoid with ``ex2.approx`` and ``rcp.approx``: relative error 2^-20 + 2^-22 |x|, and 0 below
2^-126 (PTX ISA). As ``0.5 tanh(0.5 x) + 0.5`` it has an absolute error: 2 ulps of tanh below 1 (CUDA's table of
functions), halved, and the rounding of the sum: 2^-24 + 2^-25. ``log(1 + exp(x))`` in float32 errs by the rounding of
the sum and by 2^-21.41 of ``__logf`` between 0.5 and 2, elsewhere 3 ulps (the same table): 2^-20 (1 + its value).
Where two choices differ by less than their errors, either order is right.
Sources: vLLM fused_moe grouped_topk_router.py and Llama-4's custom routing; DeepSeek-V3 inference/model.py.
Not covered: which order the k experts of a token are listed in (any is right), NaN logits, load balancing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor

from oracle.errors import OptionError, ShapeError
from oracle.numbers.formats import Format, decode
from oracle.numbers.rounding import Overflow, Rounding, round_to

EXP_ERROR = 2.0**-48
MOST_CHOICES = 12
"""Choices of experts that are tried for one token."""
DEVICE_ERROR, DEVICE_SLOPE, FLUSH = 2.0**-20, 2.0**-22, 2.0**-126
TANH_ERROR = 2.0**-24 + 2.0**-25
FAST_TANH = 2.0**-11
"""Largest relative error of ``tanh.approx.f32`` (PTX ISA), which nvcc's ``-use_fast_math`` takes for ``tanhf``."""
LOG_ERROR = 2.0**-20
LINEAR = 20.0
"""The logit above which a softplus is the logit."""


class Scoring(StrEnum):
    """How a logit becomes a score."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    LOGIT = "the logit itself"
    SOFTPLUS = "the square root of the softplus"


@dataclass(frozen=True, kw_only=True)
class Router:
    """Every choice of a routing method.

    Attributes
    ----------
    choose_by_logit : experts are chosen by the logits, before the score (Llama-4).
    groups, top_groups : experts in groups of equal size, of which the best remain; 1 and 1 for no groups.
    renormalise : weights of a token are divided by their sum.
    scaling : factor of all weights.
    epsilon : added to the sum that weights are divided by.
    on_input : the weight multiplies the expert's input, not its output.
    by_tanh : a sigmoid may be computed by tanh, whose error is absolute.
    fast_tanh : with ``by_tanh``, by ``tanh.approx.f32``, as FlashInfer's build has it.
    nan_is_zero : a score that is NaN is 0, and a sum of weights that is 0 divides as 1.
    kept : scores, biases and choices are rounded to this format, one after the other; None: float32.
    """

    top_k: int
    scoring: Scoring = Scoring.SIGMOID
    choose_by_logit: bool = False
    groups: int = 1
    top_groups: int = 1
    renormalise: bool = False
    scaling: float = 1.0
    epsilon: float = 0.0
    on_input: bool = False
    by_tanh: bool = False
    fast_tanh: bool = False
    nan_is_zero: bool = False
    kept: Format | None = None


def llama4(top_k: int = 1) -> Router:
    """Top-k on the logits, sigmoid weights on the input."""
    return Router(top_k=top_k, choose_by_logit=True, on_input=True)


# RoutingMethodType of FlashInfer's fused layers (flashinfer/tllm_enums.py), with what each takes beside the logits.
_LOGITS: dict[str, Any] = {"choose_by_logit": True}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "Default": {"scoring": Scoring.SOFTMAX},
    "Renormalize": {"scoring": Scoring.SOFTMAX, "renormalise": True} | _LOGITS,
    "DeepSeekV3": {"renormalise": True, "epsilon": 1e-20},
    "Llama4": {"on_input": True} | _LOGITS,
    "RenormalizeNaive": {"scoring": Scoring.SOFTMAX, "renormalise": True},
    "TopK": {"scoring": Scoring.LOGIT} | _LOGITS,
    "SigmoidRenorm": {"renormalise": True},
    "MiniMax2": {"renormalise": True, "epsilon": 1e-20},
    "Sigmoid": {},
    "TopKSigmoid": dict(_LOGITS),
}
BIASED = ("DeepSeekV3", "MiniMax2")
"""Methods that add a bias to the choices."""


@dataclass(frozen=True)
class Span:
    """An interval that holds a value, float64."""

    low: Tensor
    high: Tensor


@dataclass(frozen=True)
class Scores:
    """Scores and choices ``[T, E]`` with the intervals that hold a kernel's."""

    score: Tensor
    choice: Tensor
    score_span: Span
    choice_span: Span


def route(logits: Tensor, router: Router, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The weights (float64 ``[T, top_k]``) and experts (int64), largest choice first, lower index first on a tie.

    ``logits [T, E]`` float32, bfloat16 or float16; ``bias [E]`` float32 or None, added to the choices only. A NaN
    choice counts as the largest; its weight is NaN, and a softmax or renormalised weight is NaN in its whole row.
    Raises ShapeError, OptionError.
    """
    scored = scores(logits, router, bias)
    ids = best_experts(scored.choice, router, biased=bias is not None)
    return weights_of(scored.score, ids, router), ids


def best_experts(choice: Tensor, router: Router, *, biased: bool) -> Tensor:
    """The experts, int64 ``[T, top_k]``, of the largest choices, largest first, lower index first on a tie.

    ``choice``: float64 ``[T, E]``. ``biased``: a group of experts counts by its two largest choices, not by its
    largest. A NaN choice counts as the largest.
    """
    allowed = in_best_groups(choice, router, biased=biased)
    masked = torch.where(allowed, choice, torch.full_like(choice, -torch.inf))
    return torch.sort(masked, dim=1, descending=True, stable=True).indices[:, : router.top_k]


def in_best_groups(choice: Tensor, router: Router, *, biased: bool) -> Tensor:
    """The experts of the groups that remain, bool ``[T, E]``; ``choice`` and ``biased`` as for :func:`best_experts`, a
    NaN choice makes its group the best."""
    groups = _group_scores(choice, router, biased)
    best = torch.sort(groups, dim=1, descending=True, stable=True).indices[:, : router.top_groups]
    best_groups = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, best, True)
    return best_groups.repeat_interleave(choice.shape[1] // router.groups, dim=1)


def weights_of(score: Tensor, ids: Tensor, router: Router) -> Tensor:
    """The weights of chosen experts, float64 ``[T, k]``, from all scores.

    ``score``: float64 ``[T, E]``; ``ids``: integers ``[T, k]``. A NaN score makes its weight NaN, renormalised all of
    its row.
    """
    w = score.gather(1, ids.to(torch.int64))
    if router.renormalise:
        total = w.sum(dim=1, keepdim=True) + router.epsilon
        w = w / (total.masked_fill(total == 0, 1.0) if router.nan_is_zero else total)
    return w * router.scaling


def weight_span(scored: Scores, ids: Tensor, router: Router) -> Span:
    """The interval, float64 ``[T, k]``, of a kernel's float32 weights for the experts ``ids`` (integers ``[T, k]``)
    that it returned. NaN where a score of these experts is NaN."""
    k = router.top_k
    rounding = (k + 4) * 2.0**-24
    low, high = (span.gather(1, ids.to(torch.int64)) for span in (scored.score_span.low, scored.score_span.high))
    if router.renormalise:
        # w / (w + others): largest with the others smallest, and the other way round
        others_high = high.sum(dim=1, keepdim=True) - high
        others_low = (low.sum(dim=1, keepdim=True) - low).clamp(min=0)
        low, high = low / (low + others_high + router.epsilon), high / (high + others_low).clamp(min=FLUSH)
        if router.nan_is_zero:
            low = low.nan_to_num(nan=0.0)
    if router.scoring is Scoring.LOGIT:
        return Span(low, high)
    return Span(low * (1 - rounding) * router.scaling - FLUSH, high * (1 + rounding) * router.scaling + FLUSH)


def check(router: Router, experts: int) -> None:
    """Refuse a router that does not fit this many experts (OptionError)."""
    if not 0 < router.top_k <= experts or experts % router.groups or not 0 < router.top_groups <= router.groups:
        raise OptionError(f"{router} does not fit {experts} experts; groups divide them, top_k and top_groups fit")
    if router.top_k > experts // router.groups * router.top_groups:
        raise OptionError(f"{router.top_groups} groups of {experts // router.groups} experts hold no {router.top_k}")


def scores(logits: Tensor, router: Router, bias: Tensor | None = None) -> Scores:
    """Scores, choices and their intervals; arguments, NaN and errors as of :func:`route`."""
    if logits.dim() != 2 or (bias is not None and tuple(bias.shape) != (logits.shape[1],)):
        shapes = f"logits {list(logits.shape)}, bias {None if bias is None else list(bias.shape)}"
        raise ShapeError(f"{shapes}: pass [T, E] and [E]")
    experts = logits.shape[1]
    check(router, experts)
    x = decode(logits)
    if router.scoring is Scoring.SIGMOID:
        score = sigmoid(x)
        relative = DEVICE_ERROR + DEVICE_SLOPE * x.abs() + EXP_ERROR
        relative = relative.masked_fill(torch.isinf(x), 0.0)  # 0 and 1 on every device
    elif router.scoring is Scoring.LOGIT:
        score, relative = x, torch.zeros_like(x)
    elif router.scoring is Scoring.SOFTPLUS:
        return _of_softplus(x, router, bias)
    else:
        score = torch.softmax(x, dim=1)
        depth = (x.amax(dim=1, keepdim=True) - x).abs()
        relative = 2 * (DEVICE_ERROR + DEVICE_SLOPE * depth) + (experts + 2) * 2.0**-24 + EXP_ERROR
        relative = relative.masked_fill(torch.isinf(depth), 0.0)  # 0 on every device, NaN below +inf
    flushed = torch.where(relative > 0, FLUSH, 0.0)
    span = Span(score * (1 - relative) - flushed, score * (1 + relative) + flushed)
    if router.by_tanh and router.scoring is Scoring.SIGMOID:
        error = TANH_ERROR + (2 * score - 1).abs() * (FAST_TANH / 2 if router.fast_tanh else 0.0)
        span = Span((span.low - error).clamp(min=0.0), span.high + error)
    return _chosen(x, score, span, router, bias)


def _of_softplus(x: Tensor, router: Router, bias: Tensor | None) -> Scores:
    """Scores of the square root of a softplus, whose logarithm has an absolute error."""
    value = torch.where(x > LINEAR, x, torch.log1p(torch.exp(x.clamp(max=LINEAR))))
    error = torch.where(x > LINEAR, 0.0, LOG_ERROR * (1 + value))
    low, high = (value - error).clamp(min=0.0).sqrt(), (value + error).sqrt()
    return _chosen(x, value.sqrt(), Span(low * (1 - 2.0**-22), high * (1 + 2.0**-22)), router, bias)


def _chosen(x: Tensor, score: Tensor, span: Span, router: Router, bias: Tensor | None) -> Scores:
    """Choices and their intervals from scores and theirs."""
    if router.nan_is_zero:
        score, low, high = (torch.where(torch.isnan(score), 0.0, v) for v in (score, span.low, span.high))
        span = Span(low, high)
    if router.kept is not None:
        # in float32 first, whose rounding moves an end by 2^-24 of it
        span = Span(_kept(span.low * (1 - 2.0**-23), router), _kept(span.high * (1 + 2.0**-23), router))
        score = _kept(score, router)
    if router.choose_by_logit:
        return Scores(score, x, span, Span(x, x))
    shift = torch.zeros_like(x[:1]) if bias is None else _kept(decode(bias)[None, :], router)
    rounding = 0.0 if bias is None else 2.0**-24
    choice = score + shift
    slack = rounding * (choice.abs() + (span.high - span.low))
    low, high = span.low + shift - slack, span.high + shift + slack
    return Scores(score, _kept(choice, router), span, Span(_kept(low, router), _kept(high, router)))


def _kept(x: Tensor, router: Router) -> Tensor:
    """Values in the format that a router keeps them in."""
    if router.kept is None:
        return x
    return round_to(x, router.kept, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def misrouted(ids: Tensor, scored: Scores, router: Router, *, biased: bool) -> Tensor:
    """Bool ``[T]``: rows whose experts ``ids`` (integers ``[T, k]``) follow from no choices within the intervals.

    A kept group must possibly be among the best. In a group that is certainly kept, an expert that was not chosen must
    not certainly exceed one that was. A NaN choice exceeds nothing.
    """
    low, high = scored.choice_span.low, scored.choice_span.high
    tokens, experts = low.shape
    ids = ids.to(torch.int64)
    inside = (ids >= 0) & (ids < experts)
    safe = torch.where(inside, ids, torch.zeros_like(ids))
    chosen = torch.zeros(tokens, experts, dtype=torch.int64, device=low.device)
    chosen.scatter_add_(1, safe, inside.to(torch.int64))
    bad = ~inside.all(dim=1) | (chosen > 1).any(dim=1)
    g_low, g_high = group_spans(scored, router, biased)
    chosen_groups = chosen.reshape(tokens, router.groups, -1).any(dim=2)
    possible = (g_low[:, None, :] > g_high[:, :, None]).sum(dim=2) < router.top_groups
    sure = (g_high[:, None, :] >= g_low[:, :, None]).sum(dim=2) <= router.top_groups  # itself included
    bad |= (chosen_groups & ~possible).any(dim=1)
    settled = sure | (chosen_groups.sum(dim=1, keepdim=True) == router.top_groups) & chosen_groups
    spread = settled.repeat_interleave(experts // router.groups, dim=1)
    weakest = torch.where(chosen > 0, high, torch.full_like(high, torch.inf)).amin(dim=1)
    left_out = torch.where((chosen == 0) & spread, low, torch.full_like(low, -torch.inf)).amax(dim=1)
    return bad | (left_out > weakest)


def alternatives(scored: Scores, router: Router, ids: Tensor, *, biased: bool) -> tuple[list[Tensor], Tensor]:
    """Every choice of experts that right kernels may make, as int64 tensors ``[T, k]`` of which the first is ``ids``
    ``[T, k]``.

    A token with fewer choices repeats its first. The second result is bool ``[T]``: tokens whose choices are not
    determined, because one of their logits is NaN or infinite, two groups of experts may change places, or they have
    more than :data:`MOST_CHOICES` choices.
    """
    low, high = scored.choice_span.low, scored.choice_span.high
    lost = ~(torch.isfinite(low) & torch.isfinite(high)).all(dim=1)
    g_low, g_high = group_spans(scored, router, biased)
    possible = (g_low[:, None, :] > g_high[:, :, None]).sum(dim=2) < router.top_groups
    lost = lost | (possible.sum(dim=1) > router.top_groups)
    allowed = possible.repeat_interleave(low.shape[1] // router.groups, dim=1)
    floor = torch.where(allowed, low, -torch.inf).topk(router.top_k, dim=1).values[:, -1:]
    maybe = allowed & (high >= floor)
    lost = lost | (maybe.sum(dim=1) > router.top_k + MOST_CHOICES)
    choices: list[list[Tensor]] = [[] for _ in range(len(ids))]
    for token in torch.nonzero((maybe.sum(dim=1) > router.top_k) & ~lost)[:, 0].tolist():
        sets = combinations(torch.nonzero(maybe[token])[:, 0].tolist(), router.top_k)
        rows = torch.tensor(list(islice(sets, MOST_CHOICES**2 + 1)), dtype=torch.int64, device=ids.device)
        span = Span(*(t[token : token + 1].expand(len(rows), -1) for t in (low, high)))
        fits = ~misrouted(rows, replace(scored, choice_span=span), router, biased=biased)
        fits &= (rows != ids[token].sort().values).any(dim=1)
        choices[token] = list(rows[fits])
        if len(rows) > MOST_CHOICES**2 or len(choices[token]) >= MOST_CHOICES:
            lost[token], choices[token] = True, []
    ways = [ids]
    for n in range(max((len(c) for c in choices), default=0)):
        ways.append(torch.stack([c[n] if n < len(c) else ids[t] for t, c in enumerate(choices)]))
    return ways, lost


def group_spans(scored: Scores, router: Router, biased: bool) -> tuple[Tensor, Tensor]:
    """Bounds, float64 ``[T, groups]``, of a kernel's scores of groups of experts; NaN where a choice of the group is
    NaN."""
    ends = scored.choice_span.low, scored.choice_span.high
    low, high = (_group_scores(edge, router, biased) for edge in ends)
    slack = 2.0**-23 * (low.abs() + high.abs())  # the float32 sum of two
    low, high = low - slack, high + slack
    return torch.minimum(low, _kept(low, router)), torch.maximum(high, _kept(high, router))  # or a sum that is kept


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))`` of float64 ``x`` of any shape, without overflow: float64 of the same shape, relative error
    below 2^-48. NaN stays NaN."""
    e = torch.exp(-x.abs())
    return torch.where(x >= 0, torch.ones_like(e), e) / (1 + e)


def _group_scores(choice: Tensor, router: Router, biased: bool) -> Tensor:
    """``[T, groups]``: the sum of the two largest choices of a group with a bias, the largest without (vLLM)."""
    grouped = choice.reshape(choice.shape[0], router.groups, -1)
    count = min(2, grouped.shape[2]) if biased else 1
    return grouped.topk(count, dim=2).values.sum(dim=2)
