"""The contract of TensorRT-LLM's per-tensor FP8 mixture of experts with Llama-4 routing, from the checkpoint's weights.

For a token with logits ``l`` over all experts, ``e = argmax l`` (one of this rank's, else the row is zero) ::

    q     = sat(x / s1)                             s1 = w13_input_scale, the static scale of the input
    w     = sigmoid(l[e])                           kept in float32, or rounded to bfloat16 by the routing kernel
    gate, up = w * s1 * w13_scale[e] * (q @ w13[e].T)            "on the input": before the activation, not after w2
    c     = sat(silu(gate) * up / s2)               s2 = w2_input_scale; float32 up to here
    out   = bf16(s2 * w2_scale[e] * (c @ w2[e].T))

The kernel is handed prepared weights (padded, halves exchanged, rows permuted) and ``g1 = w13_scale s1``, ``g1 / s2``,
``w2_scale s2``; the truth knows nothing of either, so a wrong preparation is a wrong result. Intervals as in
:mod:`oracle.routines.moe.moe_ranges`: the weight widens the scale of the first product, a code of either quantiser may
flip. The up half is multiplied by ``fl(g1 / s2)`` before it meets silu: at most ``8 u`` beside the ideal order (two
products, a quotient of 2 ulp), added in :func:`_rescaled`. Of equal largest logits either expert is right.

Sources: vLLM flashinfer_utils.apply_fi_trtllm_fp8_per_tensor_moe; FlashInfer trtllm_fp8_per_tensor_scale_moe, its
routing kernel (trtllm_fused_moe_routing_llama4.cu: the weight is stored in bfloat16) and its reference (the weight
multiplies the first product). Not covered: tokens whose largest logit is NaN or infinite, other routings, ungated
experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from oracle.bounds.accumulator import of_schedule
from oracle.bounds.code_boxes import code_boxes
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.bounds.product import U
from oracle.errors import InputError, OptionError, ShapeError
from oracle.numbers.formats import BF16, FP32, decode, of_dtype
from oracle.numbers.quantize import WIDE, quantize
from oracle.numbers.recipes import TORCH_STATIC
from oracle.routines.base import E4M3, F32, Call, Contract, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.moe.contract import TENSOR_NUMERICS, no_boxes, why_mistrust
from oracle.routines.moe.moe_ranges import act_span, boxed_span
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth import routing
from oracle.truth.moe import Activation, Experts, Steps, Tokens, layer, nearest
from oracle.truth.routing import Span
from oracle.verdict.compare import Admissible, Verdict, compare, verdict
from oracle.verdict.sets import Found, Range, Sets, ranged, rounded_to, with_float32

NUMERICS = {**TENSOR_NUMERICS, "sm100": ("sm100.chain",)}
"""TensorRT-LLM's kernel is sm100's; the others are for kernels that compute the same elsewhere."""
STEPS = Steps(store=torch.float32, activation=Activation.NONE, recipe=TORCH_STATIC)
"""Nothing is stored between the products but codes."""
KEPT = (torch.float32, torch.bfloat16)
"""Dtypes in which the routing weight may be kept."""


@dataclass(frozen=True)
class Choice:
    """One way to route: experts ``[T]`` (global; -1 for none), tokens about which nothing is claimed, its number."""

    ids: Tensor
    lost: Tensor
    number: int


@register
class TensorMoe(Contract):
    """An output is right when one dtype of the routing weight explains all of it."""

    name = "apply_fi_trtllm_fp8_per_tensor_moe"
    section = "MoE"
    summary = "experts with one scale for each weight and static inputs; Llama-4 routing, its weight on the input"
    source = "vLLM flashinfer_utils.apply_fi_trtllm_fp8_per_tensor_moe; FlashInfer trtllm_fp8_per_tensor_scale_moe"
    inputs = (
        TensorSpec("hidden_states", WIDE, ("T", "H"), "input, quantised by the layer"),
        TensorSpec("router_logits", WIDE, ("T", "X"), "logits of the experts of all ranks"),
        TensorSpec("w13", E4M3, ("E", "R", "H"), "gate rows, then up rows, as the checkpoint has them"),
        TensorSpec("w13_scale", F32, ("E",), "scale of each expert's w13"),
        TensorSpec("w13_input_scale", F32, None, "one value: static scale of the input"),
        TensorSpec("w2", E4M3, ("E", "H", "I"), "down projection, as the checkpoint has it"),
        TensorSpec("w2_scale", F32, ("E",), "scale of each expert's w2"),
        TensorSpec("w2_input_scale", F32, None, "one value: static scale of the intermediate"),
    )
    options = (
        OptionSpec("ep_rank", 0, None, "this rank; its first expert is ep_rank * E"),
        OptionSpec("weight_dtype", None, (None, *KEPT), "dtype in which the routing weight is kept; None: either"),
    )
    numerics = NUMERICS
    golden_arches = ("cpu", "sm100")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        rank = options["ep_rank"]
        experts, everywhere = inputs["w13"].shape[0], inputs["router_logits"].shape[1]
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < max(1, everywhere // experts):
            raise OptionError(f"ep_rank={rank!r}; {everywhere} experts in ranks of {experts} have ranks from 0")
        for name in ("w13_input_scale", "w2_input_scale"):
            if inputs[name].numel() != 1:
                raise ShapeError(f"{name} has shape {list(inputs[name].shape)}; the kernel is static: pass one value")
            value = float(inputs[name].reshape(()))
            if not 0 < value < float("inf"):
                raise InputError(f"{name} is {value}; a static scale is positive and finite")

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        """``[T, H]`` bfloat16; of equal logits the first expert, the weight in ``weight_dtype`` (None: float32)."""
        resolved = self.check(inputs, options)
        kept = resolved["weight_dtype"] or torch.float32
        return _truth(inputs, experts_of(inputs, resolved), choices(inputs["router_logits"])[0], kept)

    def outputs(self, call: Call) -> dict[str, Out]:
        return {"out": Out(tuple(call.inputs["hidden_states"].shape), (torch.bfloat16,))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        name, kept = self.arithmetics(call, numerics)[0], call.resolved["weight_dtype"]
        dtypes = [kept] if isinstance(kept, torch.dtype) else KEPT
        alone, declared = isinstance(kept, torch.dtype), numerics is not None
        found = [with_float32(partial(RoutedSets, call, k, alone), name, declared=declared) for k in dtypes]
        return [sets for alike in zip(*found, strict=True) for sets in alike]

    def why_not(self, call: Call, numerics: str) -> str | None:
        return no_boxes(self.name, numerics)


@dataclass(frozen=True)
class RoutedSets(Sets):
    """The right outputs when the routing weight is kept in ``kept``; of equal logits each token by the choice of
    experts that admits its row. ``alone``: no other dtype is admitted."""

    call: Call
    kept: torch.dtype
    alone: bool
    numerics: str
    wider: bool

    def judge(self, found: Found) -> Verdict:
        out, inputs = found["out"], self.call.inputs
        ways = choices(inputs["router_logits"])
        sets, basis = self._admissible(ways[0])
        ids = ways[0].ids
        for choice in ways[1:]:
            wrong = compare(out, sets).bad.any(dim=1)
            if not bool(wrong.any()):
                break
            other, _ = self._admissible(choice)
            better = wrong & ~compare(out, other).bad.any(dim=1)
            sets, ids = taken(sets, other, better), torch.where(better, choice.ids, ids)
        one = out.new_ones((1, 1), dtype=torch.float32)
        tokens = Tokens(out, one, ids[:, None], one.expand(ids.shape[0], 1), on_input=True)
        basis = f"{basis}, routing weight in {str(self.kept).removeprefix('torch.')}"
        mistrust = why_mistrust(tokens, experts_of(inputs, self.call.resolved), out)
        return verdict(compare(out, sets), basis=basis, mistrust=mistrust)

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        """None where it is no single interval: a choice of experts or of the weight's dtype."""
        ways = choices(self.call.inputs["router_logits"])
        if len(ways) > 1 or not self.alone:
            return None
        return {"out": ranged(self._admissible(ways[0])[0], torch.bfloat16)}

    def _admissible(self, choice: Choice) -> tuple[Admissible, str]:
        """Computed once for a call."""
        experts = experts_of(self.call.inputs, self.call.resolved)
        made = partial(_admissible, self.call.inputs, experts, choice, self.kept, self.numerics)
        return self.call.once(f"admissible {choice.number} by {self.kept} and {self.numerics}", made)


def choices(logits: Tensor) -> list[Choice]:
    """Every way to route: the n-th of the experts that share the largest logit (the first where there are fewer)."""
    x = decode(logits)
    lost = torch.isnan(x).any(dim=1) | ~torch.isfinite(x.amax(dim=1))
    tied = (x == x.amax(dim=1, keepdim=True)) | lost[:, None]
    count, place = tied.sum(dim=1), tied.to(torch.int64).cumsum(dim=1)
    most = int(torch.where(lost, 1, count).max())
    found = []
    for n in range(most):
        wanted = torch.where(lost | (count <= n), 1, n + 1)
        ids = ((place == wanted[:, None]) & tied).to(torch.int64).argmax(dim=1)
        found.append(Choice(ids, lost, n))
    return found


def experts_of(inputs: Inputs, options: Options) -> Experts:
    """This rank's experts of a checked call."""
    w13, w13_scale, w2, w2_scale = (inputs[name] for name in ("w13", "w13_scale", "w2", "w2_scale"))
    return Experts(w13, w13_scale, w2, w2_scale, inputs["w2_input_scale"], options["ep_rank"] * w13.shape[0])


def tokens_of(inputs: Inputs, choice: Choice, kept: torch.dtype) -> Tokens:
    """Quantised tokens and their experts; the routing weight is in the scale of each token."""
    own = decode(inputs["router_logits"]).gather(1, choice.ids[:, None])
    weight, first = nearest(routing.sigmoid(own), of_dtype(kept)), inputs["w13_input_scale"]
    scale = rounded_to(weight * decode(first).reshape(1, 1), torch.float32)
    codes = quantize(inputs["hidden_states"], TORCH_STATIC, scale=first).codes
    return Tokens(codes, scale, choice.ids[:, None], torch.ones_like(scale), on_input=True)


def _truth(inputs: Inputs, experts: Experts, choice: Choice, kept: torch.dtype) -> Tensor:
    """The output with every rounding that is declared, bfloat16."""
    return rounded_to(layer(tokens_of(inputs, choice, kept), experts, STEPS), torch.bfloat16)


def _admissible(
    inputs: Inputs, experts: Experts, choice: Choice, kept: torch.dtype, name: str
) -> tuple[Admissible, str]:
    """The admissible output for one choice of experts and one dtype of the weight, and what it rests on."""
    x, first = inputs["hidden_states"], inputs["w13_input_scale"]
    acc = None if name == IEEE32 else of_schedule(get_schedule(name))
    weight = _weights(inputs["router_logits"], choice, kept)
    low, high = (torch.zeros(tuple(x.shape), dtype=torch.float64, device=x.device) for _ in range(2))
    open_, basis, flips, count = choice.lost.clone(), name, 0, 0
    for expert in range(experts.w13.shape[0]):
        token = torch.nonzero((choice.ids - experts.first == expert) & ~choice.lost)[:, 0]
        if not token.numel():
            continue
        rows = decode(x.index_select(0, token))
        boxes, _ = code_boxes(Span(rows, rows), STEPS.recipe, of_dtype(x.dtype), first)
        weighted = [
            replace(b, scale_low=b.scale_low * weight.low[token], scale_high=b.scale_high * weight.high[token])
            for b in boxes
        ]
        h, lost, _ = boxed_span(weighted, experts, "w13", expert, torch.float32, acc)
        codes, flipped = code_boxes(_rescaled(act_span(h, STEPS)), STEPS.recipe, FP32, experts.intermediate_scale)
        y, over, basis = boxed_span(codes, experts, "w2", expert, torch.float32, acc)
        low[token], high[token] = y.low, y.high
        open_[token] |= lost | over
        flips, count = flips + flipped, count + codes[0].low.numel()
    due = torch.nan_to_num(decode(_truth(inputs, experts, choice, kept)), 0.0)
    sets = Admissible(nearest(low, BF16), nearest(high, BF16), due, open=open_[:, None].expand(low.shape))
    return sets, f"{basis}: {flips} of {count} of the intermediate"


def _weights(logits: Tensor, choice: Choice, kept: torch.dtype) -> Span:
    """Interval ``[T, 1]`` of a kernel's routing weights, not below 0."""
    router = routing.llama4()
    ordinary = torch.where(choice.lost[:, None], torch.zeros_like(logits), logits)
    found = routing.weight_span(routing.scores(ordinary, router), choice.ids[:, None], router)
    low, high = (edge.clamp(min=0.0) for edge in (found.low, found.high))
    return Span(low, high) if kept == torch.float32 else Span(nearest(low, BF16), nearest(high, BF16))


def _rescaled(act: Span) -> Span:
    """The activation with what the other order of its scales may change."""
    return Span(act.low - 8 * U * act.low.abs(), act.high + 8 * U * act.high.abs())


def taken(sets: Admissible, other: Admissible, rows: Tensor) -> Admissible:
    """``sets`` with the given rows of ``other``."""
    pick = rows[:, None]
    low, high, expected = (
        torch.where(pick, getattr(other, name), getattr(sets, name)) for name in ("low", "high", "expected")
    )
    assert sets.open is not None and other.open is not None
    return Admissible(low, high, expected, open=torch.where(pick, other.open, sets.open))
