"""Faults of FP8 attention: what P, its sums and its scales become, and which keys a query sees."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.routines.attention.contract import AttentionContract, MhaFwd, SinglePrefillWithKvCache
from oracle.routines.fault import (
    ARITHMETIC,
    CAST,
    INDEX,
    MOVEMENT,
    VALUE,
    Call,
    Change,
    Faults,
    WhyNot,
    both,
    need,
    ones,
    way,
)
from oracle.routines.traits import of_class, takes
from oracle.tensorcore.attention import TILE_SUMS, Pipeline
from oracle.truth.attention import Attention, exact

ATTENTION = of_class(AttentionContract)
FAULTS = Faults(ATTENTION)
fault = FAULTS.declare

FIT = "no key lies so far below the maximum, or all that do have values that cancel"
ROUNDED = need(lambda call: call.arch != "cpu", "P is not rounded")
TILES = need(lambda call: call.inputs["k"].shape[-3] > 256, "the keys are one tile: nothing is rescaled")


def _changed(**changes: object) -> Callable[[Pipeline], Pipeline]:
    return lambda pipeline: replace(pipeline, **changes)  # type: ignore[arg-type]  # fields of the record by name


# --- P and its sums ---------------------------------------------------------------------------------------------

fault(
    "P is cast to FP8 without a lift",
    CAST,
    seen="flashinfer 5020; ROCm/FlyDSL 1020",
    needs=ROUNDED,
    schedule=_changed(lift=0.0, gain=1.0),
    same_if="every P is a power of two above 2^-9, or one key has it all",
    admissible_if=FIT,
)
fault(
    "P is lifted so far that it saturates",
    CAST,
    seen="flash-attention 2717, 2131: a maximum that is not raised lets P reach 2^12",
    needs=ROUNDED,
    schedule=_changed(lift=12.0, gain=1.0),
)
fault(
    "row sum of the rounded P",
    ARITHMETIC,
    seen="cudnn-frontend 1059 (review)",
    needs=ROUNDED,
    schedule=_changed(sums_codes=True),
    same_if="every P is a value of E4M3",
    admissible_if="the roundings of a row cancel",
)
fault(
    "output and row sum not rescaled at a new maximum",
    ARITHMETIC,
    seen="no public thread: the factor of a tile left out",
    needs=both(ROUNDED, TILES),
    schedule=_changed(rescales=False),
    same_if="the first tile of the walk has the maximum",
    admissible_if="what the other tiles add is below the rounding of the output",
)


# --- scales -----------------------------------------------------------------------------------------------------


def _has(name: str) -> Callable[[Call], object]:
    return lambda call: name in call.inputs


PARTS = ("queries", "keys", "values")
"""What has a scale, in the order of ``AttentionContract.scales``."""


def _name(call: Call, part: str) -> str:
    contract = call.contract
    assert isinstance(contract, AttentionContract)
    return contract.scales[PARTS.index(part)]


def _changed_scale(part: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda call, inputs: inputs | {_name(call, part): change(inputs[_name(call, part)])}


def _given(part: str, least: int = 1) -> WhyNot:
    """The scale of a part is an input of so many values."""

    def count(call: Call) -> int:
        return call.inputs[_name(call, part)].numel() if _name(call, part) in call.inputs else 0

    return need(lambda call: count(call) >= least, f"fewer than {least} scales of the {part} are given")


def _first(scale: Tensor) -> Tensor:
    return scale.reshape(-1)[:1].expand(scale.numel()).reshape(scale.shape).contiguous()


fault(
    "scale of the {}",
    VALUE,
    over=tuple(
        way(f"{part} {words}", (part, change), seen=seen, needs=_given(part))
        for part in PARTS
        for words, change, seen in (
            ("left out", ones, "vllm 51363, 42080; flashinfer 4979, 1023; sglang 28144, 34765"),
            ("applied twice", lambda scale: scale * scale, "vllm 48016"),
        )
    ),
    read=lambda made: _changed_scale(*made),
)
fault(
    "scale of the {}",
    INDEX,
    over=tuple(
        way(f"{part} {words}", (part, change), seen=seen, needs=_given(part, 2))
        for part in PARTS
        for words, change, seen in (
            ("of the first head throughout", _first, "sgl-kernel-xpu 252 (review); vllm 42580 (review)"),
            ("of the next head", lambda scale: scale.roll(-1, dims=-1), "rocm-libraries 10474 (review)"),
        )
    ),
    read=lambda made: _changed_scale(*made),
    same_if="the heads of a sequence have one scale",
)
fault(
    "scale of the keys for the values",
    VALUE,
    on=of_class(MhaFwd),
    seen="sglang 26852 (review)",
    needs=both(need(_has("k_descale"), "k_descale is not given"), need(_has("v_descale"), "v_descale is not given")),
    read=lambda inputs: inputs | {"v_descale": inputs["k_descale"]},
)


# --- which keys a query sees ------------------------------------------------------------------------------------


def _seen(change: Callable[[Attention], tuple[Tensor, Tensor]]) -> Callable[[Attention], Attention]:
    def product(problem: Attention) -> Attention:
        start, stop = change(problem)
        return replace(problem, start=start.clamp(min=0), stop=stop.clamp(min=0, max=problem.k.shape[0]))

    return product


def _masked(call: Call) -> bool:
    options = call.resolved
    return bool(options.get("is_causal") or options.get("causal") or options.get("window_size_right", -1) != -1)


CAUSAL = need(_masked, "every query sees the last key")
fault(
    "{}",
    MOVEMENT,
    needs=CAUSAL,
    over=(
        way("one key too many at the diagonal", lambda p: (p.start, p.stop + 1), seen="flashinfer 3864"),
        way("one key too few at the diagonal", lambda p: (p.start, p.stop - 1), seen="flashinfer 3864"),
        way(
            "causal mask left out",
            lambda p: (p.start, torch.full_like(p.stop, p.k.shape[0])),
            seen="no public thread: the mask of the last tiles is not applied",
        ),
    ),
    product=lambda change: _seen(change),
    admissible_if="the key has next to no weight",
)
fault(
    "causal mask from the top left",
    INDEX,
    seen="SageAttention 2 and torch's is_causal align the mask so",
    needs=both(
        need(lambda call: call.resolved.get("is_causal") or call.resolved.get("causal"), "the call is not causal"),
        need(lambda call: call.inputs["q"].shape[-3] != call.inputs["k"].shape[-3], "as many queries as keys"),
    ),
    product=_seen(lambda p: (p.start, p.stop - p.k.shape[0] + _queries(p))),
)


def _queries(problem: Attention) -> int:
    """Queries of a causal problem: the last row sees every key, the first one so many fewer."""
    return int(problem.stop[-1] - problem.stop[0]) + 1


fault(
    "window to the left begins one key {}",
    INDEX,
    on=of_class(MhaFwd),
    seen="flashinfer 3864",
    needs=need(lambda call: call.resolved["window_size_left"] >= 0, "there is no window to the left"),
    over=(way("early", -1), way("late", 1)),
    product=lambda step: _seen(lambda p: (torch.where(p.start > 0, p.start + step, p.start), p.stop)),
    same_if="no query has a key before its window",
    admissible_if="the key has next to no weight",
)
fault(
    "last key left out",
    MOVEMENT,
    seen="flashinfer 4976, 5085: the tail of the keys is cut",
    product=_seen(lambda p: (p.start, torch.where(p.stop == p.k.shape[0], p.stop - 1, p.stop))),
    needs=need(lambda call: call.inputs["k"].shape[-3] > 1, "there is one key"),
    admissible_if="the key has next to no weight",
)
fault(
    "seqused_k not read",
    MOVEMENT,
    on=takes("seqused_k") & ATTENTION,
    seen="flash-attention 1745, 2374; vllm 53856: what lies in unused slots is read",
    needs=need(_has("seqused_k"), "seqused_k is not given"),
    read=lambda inputs: {name: x for name, x in inputs.items() if name != "seqused_k"},
    same_if="every slot is used",
)


@fault(
    "P of 0 multiplied with NaN of unused values",
    MOVEMENT,
    seen="flash-attention 1745, 2374; vllm 53856; vLLM 0.20.2 _vllm_fa3_C.fwd on an H100",
    on=takes("seqused_k") & ATTENTION,
    needs=need(_has("seqused_k"), "seqused_k is not given"),
    same_if="no unused slot of a last tile holds NaN",
)
def write_unused(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The last tile is multiplied whole: the keys behind the sequence are masked, their values are not cleared."""
    contract, v, used = call.contract, call.inputs["v"], call.inputs["seqused_k"]
    assert isinstance(contract, AttentionContract)
    chosen, out = TILE_SUMS, outputs["out"].clone()
    for place in contract.places(call.inputs, call.resolved):
        keys, rows = int(used[place.batch]), place.problem.q.shape[0]
        width = chosen.tile(max(place.problem.q.shape[1], v.shape[-1]), rows)
        head = place.heads.start // (place.heads.stop - place.heads.start)
        rest = decode(v[place.batch, keys : -(-keys // width) * width, :, :][:, head])
        bad = torch.isnan(rest).any(dim=0)
        out[place.batch, :, place.heads][..., bad] = torch.nan
    return outputs | {"out": out}


fault(
    "values of the next page of 64 keys",
    MOVEMENT,
    seen="flashinfer 4976: the loads of K and V go apart",
    needs=need(lambda call: call.inputs["k"].shape[-3] > 64, "there is one page"),
    product=lambda problem: replace(problem, v=_bytes(problem.v, lambda raw: raw.roll(-64, dims=0))),
    same_if="all values are alike",
)


def _bytes(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(x.view(torch.uint8)).view(x.dtype)


def _grouped(call: Call) -> bool:
    heads, of_keys = call.inputs["q"].shape[-2], call.inputs["k"].shape[-2]
    return 1 < of_keys < heads


@fault(
    "query head h reads KV head h mod G",
    INDEX,
    seen="vllm 40792 (review)",
    needs=need(_grouped, "the queries have one KV head, or one each"),
)
def read_head(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every query head gets keys, values and scales of its own: those of KV head h mod G."""
    heads, of_keys = inputs["q"].shape[-2], inputs["k"].shape[-2]
    taken = torch.arange(heads, device=inputs["q"].device) % of_keys
    changed = {name: _bytes(inputs[name], lambda raw: raw.index_select(-2, taken)) for name in "kv"}
    for name, x in inputs.items():
        if name != "scale_q" and x.dtype is torch.float32:
            changed[name] = x.index_select(-1, taken)
    return inputs | changed


# --- sinks, log-sum-exp, stores ---------------------------------------------------------------------------------

SINK = need(_has("s_aux"), "there is no sink")
fault(
    "sink {}",
    ARITHMETIC,
    on=takes("s_aux") & ATTENTION,
    needs=SINK,
    over=(
        way("left out", lambda p: replace(p, sink=None), seen="kekzl/imp 1345"),
        way(
            "added once for each of two splits",
            lambda p: replace(p, sink=None if p.sink is None else p.sink + math.log(2.0)),
            seen="no public thread: every split adds it",
        ),
    ),
    product=lambda change: change,
    same_if="no row has a key",
)


def _lse(change: Callable[[Tensor], Tensor]) -> Callable[[Call, dict[str, Tensor]], dict[str, Tensor]]:
    def write(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        name = call.contract.returns[1]
        return outputs | {name: change(outputs[name].to(torch.float64)).to(torch.float32)}

    return write


fault(
    "log-sum-exp {}",
    ARITHMETIC,
    over=(
        way("to the other base", lambda x: x / math.log(2.0), seen="sglang 40903, 35045", on=of_class(MhaFwd)),
        way(
            "in natural units",
            lambda x: x * math.log(2.0),
            seen="sglang 40903, 35045",
            on=of_class(SinglePrefillWithKvCache),
        ),
        way("keeps the lift of P", lambda x: x + 8 * math.log(2.0), seen="flashinfer 1566; cudnn-frontend 1059"),
    ),
    write=_lse,
    same_if="no row has a key",
)


@fault("output stored before the scale of the values", CAST, seen="flashinfer FA2: out *= v_scale after it")
def write(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    contract = call.contract
    assert isinstance(contract, AttentionContract)
    out = outputs["out"]
    whole = torch.zeros(contract.shape(call.inputs), dtype=out.dtype, device=out.device)
    for place in contract.places(call.inputs, call.resolved):
        plain = exact(replace(place.problem, v_scale=torch.ones_like(place.problem.v_scale))).out
        stored = plain.to(torch.float32).to(out.dtype).to(torch.float32) * place.problem.v_scale
        place.put(stored, whole)
    return outputs | {"out": contract.laid("out", whole)}
