"""The routers of vLLM, sglang-kernel and FlashInfer in torch, one verb: scores, choices, weights.

Scores are those of a softmax, a sigmoid, the square root of a softplus, or the logits. Experts are chosen by score plus
bias, or by logit, within the best groups; weights are scores, divided by their sum and scaled on request.

Not covered: experts by a table of token ids, softcapping of logits, shared experts that are appended.
Source: vLLM csrc/moe, FlashInfer fused_routing_dsv3.py and tllm_enums.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import checks
from .adapters import Inputs, Options
from .errors import OptionError
from .verbs import serve, verb

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "softplus_sqrt": lambda x: torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20)))).sqrt(),
    "logit": lambda x: x,
}
SUM = 1e-20
"""What FlashInfer and vLLM's grouped router add to a sum of weights."""
ROUTERS: dict[str, dict[str, object]] = {
    "topk_softmax": {"scoring": "softmax", "nan_is_zero": True},
    "topk_sigmoid": {"nan_is_zero": True},
    "topk_softplus_sqrt": {"scoring": "softplus_sqrt", "nan_is_zero": True},
    "grouped_topk": {"epsilon": SUM},
    "fused_topk_deepseek": {"epsilon": SUM, "renormalize": True},
}
"""By contract what no option of it changes."""
ROUTING_METHODS: dict[str, dict[str, object]] = {
    "Default": {"scoring": "softmax"},
    "Renormalize": {"scoring": "softmax", "by_logit": True, "renormalize": True},
    "DeepSeekV3": {"renormalize": True, "epsilon": SUM},
    "Llama4": {"by_logit": True},
    "RenormalizeNaive": {"scoring": "softmax", "renormalize": True},
    "TopK": {"scoring": "logit", "by_logit": True},
    "SigmoidRenorm": {"renormalize": True},
    "MiniMax2": {"renormalize": True, "epsilon": SUM},
    "Sigmoid": {},
    "TopKSigmoid": {"by_logit": True},
}
"""FlashInfer's routing methods."""


def _routed(contract: str) -> Callable[..., dict[str, Tensor]]:
    def adapter(verb: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, options: Options) -> dict[str, Tensor]:
        """Experts and weights, in the dtype that the routine gives them in; -1 for rows of padding."""
        logits, bias, asked = inputs["logits"], inputs.get("bias"), dict(options)
        method = asked.pop("routing_method", "DeepSeekV3")
        facts = ROUTING_METHODS[str(method)] if contract == METHOD else ROUTERS[contract]
        named = {"num_expert_group": "n_group"}
        given = {named.get(name, name): value for name, value in asked.items() if name != "top_k"}
        if contract == METHOD and bias is not None and given.get("n_group", 1) != 1:
            bias = bias.to(torch.bfloat16)
        weights, ids = verb(logits, int(str(asked.get("top_k", 8))), bias=bias, **facts, **given)
        if "is_padding" in inputs:
            ids = ids.masked_fill(inputs["is_padding"][:, None] != 0, -1)
        kept = {METHOD: torch.bfloat16, "fused_topk_deepseek": logits.dtype}.get(contract, torch.float32)
        return {"topk_weights": weights.to(kept), "topk_ids": ids}

    return adapter


METHOD = "trtllm_moe_routing"


@verb()
def route_experts(
    logits: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    scoring: str = "sigmoid",
    by_logit: bool = False,
    n_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = False,
    epsilon: float | None = None,
    nan_is_zero: bool = False,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Scores of ``logits``; the ``top_k`` best experts by score plus bias, or by logit, within the best groups.

    ``logits`` ``[T, E]`` bf16, f16 or f32, ``bias`` ``[E]``. ``scoring`` is softmax, sigmoid, softplus_sqrt or logit.
    Groups are ranked by the sum of their best two choices (without a bias: by their best). With ``renormalize`` weights
    are divided by their sum, plus ``epsilon``. With ``nan_is_zero`` a score that is NaN is 0, and a sum of 0 divides as
    1; else a NaN is chosen first.

    Returns
    -------
    weights, ids
        float32 and int64 ``[T, top_k]``.

    Raises
    ------
    DeviceError, DtypeError, InputError, OptionError, ShapeError
    """
    checks.dtype("logits", checks.rank("logits", logits, 2), *checks.WIDE)
    tokens, experts = logits.shape
    if scoring not in SCORES:
        raise OptionError(f"scoring={scoring!r}; pass one of {', '.join(SCORES)}")
    checks.positive("top_k", top_k)
    checks.positive("n_group", n_group)
    checks.positive("topk_group", topk_group)
    checks.number("routed_scaling_factor", routed_scaling_factor)
    if epsilon is not None:
        checks.number("epsilon", epsilon)
    if bias is not None:
        checks.shape("bias", checks.dtype("bias", checks.rank("bias", bias, 1), *checks.WIDE), (experts,), "[E]")
    checks.same_device(logits=logits, bias=bias)
    if experts % n_group or topk_group > n_group:
        raise OptionError(f"{experts} experts do not form {n_group} groups of which {topk_group} are chosen")
    if top_k > experts // n_group * topk_group:
        raise OptionError(f"top_k={top_k} exceeds the {experts // n_group * topk_group} experts of {topk_group} groups")
    x = logits.to(torch.float32)
    scores = SCORES[scoring](x)
    if nan_is_zero:
        scores = scores.masked_fill(torch.isnan(scores), 0.0)
    choice = x if by_logit else scores if bias is None else scores + bias.to(torch.float32)
    if n_group > 1:
        grouped = choice.view(tokens, n_group, experts // n_group)
        best = grouped.topk(min(2, experts // n_group) if bias is not None else 1, dim=-1)[0].sum(dim=-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(topk_group, dim=-1)[1], True)
        choice = choice.masked_fill(~kept.repeat_interleave(experts // n_group, dim=1), float("-inf"))
    ids = choice.topk(top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    if renormalize:
        total = weights.sum(dim=-1, keepdim=True) + (epsilon or 0.0)
        weights = weights / (total.masked_fill(total == 0, 1.0) if nan_is_zero else total)
    return weights * routed_scaling_factor, ids


SERVED_HERE = (*ROUTERS, METHOD)
for name in SERVED_HERE:
    serve(name, "cast", route_experts, _routed(name))
