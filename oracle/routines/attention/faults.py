"""Faults of FP8 attention: what P, its sums and its scales become, and which keys a query sees."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import E4M3FN, decode
from oracle.numbers.rounding import Overflow, Rounding, encode
from oracle.routines.attention.contract import AttentionContract, Place
from oracle.routines.attention.merge import FlashInferMergeState, MergeAttnStates, MergeContract
from oracle.routines.attention.prefill import BatchPrefillWithRaggedKVCacheWrapper, FlashInferPrefill, MhaFwd
from oracle.routines.attention.sage import QkInt8SvF8, slots
from oracle.routines.attention.wide import (
    ExtendAttentionFwd,
    FlashMlaWithKvcache,
    TritonAttention,
    UnifiedAttention,
    WideAttention,
)
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
from oracle.routines.kv_cache.writers import RANK, ROPE_AT, SCALES_AT
from oracle.routines.traits import of_class, takes
from oracle.tensorcore.attention import TILE_SUMS, Pipeline, pipeline
from oracle.truth.attention import Attention, exact, softmax, values
from oracle.verdict.sets import rounded_to

ATTENTION = of_class(AttentionContract)
FAULTS = Faults(ATTENTION)
fault = FAULTS.declare

CODED = of_class(MhaFwd) | of_class(FlashInferPrefill) | of_class(QkInt8SvF8)
FIT = "no key lies so far below the maximum, or all that do have values that cancel"
ROUNDED = need(lambda call: call.arch != "cpu", "P is not rounded")


def _contract(call: Call) -> AttentionContract:
    contract = call.contract
    assert isinstance(contract, AttentionContract)
    return contract


def _problems(call: Call) -> list[Attention]:
    """The attentions of a call."""
    return [place.problem for place in _contract(call).places(call.inputs, call.resolved)]


def _longest(call: Call) -> int:
    """The keys of its longest sequence."""
    return call.cached("longest", lambda: max((p.k.shape[0] for p in _problems(call)), default=0))


TILES = need(lambda call: _longest(call) > 256, "the keys are one tile: nothing is rescaled")


def _changed(**changes: object) -> Callable[[Pipeline], Pipeline]:
    return lambda pipeline: replace(pipeline, **changes)  # type: ignore[arg-type]  # fields of the record by name


# --- P and its sums ---------------------------------------------------------------------------------------------

fault(
    "P is cast to FP8 without a lift",
    CAST,
    on=CODED,
    seen="flashinfer 5020; ROCm/FlyDSL 1020",
    needs=ROUNDED,
    schedule=_changed(lift=0.0, gain=1.0),
    same_if="every P is a power of two above 2^-9, or one key has it all",
    admissible_if=FIT,
)
fault(
    "P is lifted so far that it saturates",
    CAST,
    on=CODED,
    seen="flash-attention 2717, 2131: a maximum that is not raised lets P reach 2^12",
    needs=ROUNDED,
    schedule=_changed(lift=12.0, gain=1.0),
)
fault(
    "row sum of the rounded P",
    ARITHMETIC,
    on=CODED,
    seen="cudnn-frontend 1059 (review)",
    needs=ROUNDED,
    schedule=_changed(sums_codes=True),
    same_if="every P is a value of E4M3",
    admissible_if="the roundings of a row cancel",
)
fault(
    "output and row sum not rescaled at a new maximum",
    ARITHMETIC,
    on=CODED,
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
"""What has a scale, the words of ``AttentionContract.scales``."""


def _name(call: Call, part: str) -> str:
    return _contract(call).scales.get(part, "")


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


CAUSAL = need(lambda call: _contract(call).masked(call.resolved), "every query sees the last key")
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
        need(lambda call: _causal(call), "the call is not causal"),
        need(lambda call: not isinstance(call.contract, QkInt8SvF8), "it begins there"),
        need(lambda call: any(_queries(p) != p.k.shape[0] for p in _problems(call)), "as many queries as keys"),
    ),
    product=_seen(lambda p: (p.start, p.stop - p.k.shape[0] + _queries(p))),
)


fault(
    "causal mask from the bottom right",
    INDEX,
    on=of_class(QkInt8SvF8),
    seen="FlashAttention's mask, with which SageAttention's is exchanged",
    needs=both(
        need(lambda call: _causal(call), "the call is not causal"),
        need(lambda call: any(_queries(p) != p.k.shape[0] for p in _problems(call)), "as many queries as keys"),
    ),
    product=_seen(lambda p: (p.start, p.stop + p.k.shape[0] - _queries(p))),
)
fault(
    "values in the order of the keys",
    MOVEMENT,
    on=of_class(QkInt8SvF8),
    seen="SageAttention 2.2 csrc/fused/fused.cu: sm100 takes values that are not swapped",
    needs=need(lambda call: _longest(call) > 2, "no key changes its place"),
    read=lambda inputs: inputs | {"value": _unswapped(inputs["value"])},
    same_if="all values are alike",
)


def _unswapped(value: Tensor) -> Tensor:
    """Values ``[.., P]`` that a reader of swapped ones takes for those of the slot of their key, in its dtype."""
    raw, at = value.view(torch.uint8), slots(value.shape[-1], value.device)
    taken = torch.empty_like(raw)
    taken[..., at] = raw
    return taken.view(value.dtype)


def _causal(call: Call) -> bool:
    return _contract(call).masked(call.resolved) and call.resolved.get("window_size_right", -1) in (-1, 0)


def _queries(problem: Attention) -> int:
    """Queries of a causal problem: the last row sees every key, the first one so many fewer."""
    return int(problem.stop[-1] - problem.stop[0]) + 1 if len(problem.stop) else 0


CAPS = ("softcap", "logit_cap")
CAPPED = need(lambda call: any(call.resolved.get(name) for name in CAPS), "there is no soft cap")
NEAR = "every score is far below the cap"
fault(
    "soft cap {}",
    VALUE,
    needs=CAPPED,
    over=(
        way(
            "left out",
            lambda p: replace(p, cap=None),
            seen="no public thread: a backend that has no soft cap takes the call",
        ),
        way(
            "before the softmax scale",
            lambda p: replace(p, cap=p.cap and p.cap * p.softmax_scale),
            seen="no public thread: Gemma 2 caps the scaled score",
        ),
    ),
    product=lambda change: change,
    same_if=NEAR,
    admissible_if=NEAR,
)
LEFT = ("window_size_left", "window_left", "sliding_window_size")


def _windowed(call: Call) -> bool:
    return any(int(str(call.resolved.get(name, -1))) >= 0 for name in LEFT)


fault(
    "window to the left begins one key {}",
    INDEX,
    seen="flashinfer 3864",
    needs=need(_windowed, "there is no window to the left"),
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
    needs=need(lambda call: _longest(call) > 1, "there is one key"),
    admissible_if="the key has next to no weight",
)
fault(
    "seqused_k not read",
    MOVEMENT,
    on=of_class(MhaFwd),
    seen="flash-attention 1745, 2374; vllm 53856: what lies in unused slots is read",
    needs=need(_has("seqused_k"), "seqused_k is not given"),
    read=lambda inputs: {name: x for name, x in inputs.items() if name != "seqused_k"},
    same_if="every slot is used",
)


@fault(
    "P of 0 multiplied with NaN of unused values",
    MOVEMENT,
    seen="flash-attention 1745, 2374; vllm 53856; vLLM 0.20.2 _vllm_fa3_C.fwd on an H100",
    on=of_class(MhaFwd),
    needs=both(
        need(_has("seqused_k"), "seqused_k is not given"),
        need(lambda call: "page_table" not in call.inputs, "the keys lie in pages"),
    ),
    same_if="no unused slot of a last tile holds NaN",
)
def write_unused(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The slots behind ``seqused_k``."""
    used = call.inputs["seqused_k"].tolist()
    return _tails(call, outputs, TILE_SUMS, lambda b: (call.inputs["v"][b], used[b]))


def _tails(
    call: Call, outputs: dict[str, Tensor], chosen: Pipeline, of: Callable[[int], tuple[Tensor, int]]
) -> dict[str, Tensor]:
    """The last tile of keys is multiplied whole: keys behind the sequence are masked, their values are not cleared.
    ``of`` gives the values ``[N, G, Dv]`` from the first key of a sequence on, and its number of keys."""
    name = call.contract.returns[0]
    out = outputs[name].clone()
    rows_of = out.view(_contract(call).shape(call.inputs))
    for place in _contract(call).places(call.inputs, call.resolved):
        v, keys = of(place.batch)
        width = chosen.tile(max(place.problem.q.shape[1], v.shape[-1]), place.problem.q.shape[0])
        head = place.heads.start // (place.heads.stop - place.heads.start)
        behind = decode(v[keys : -(-keys // width) * width, head])
        rows_of[place.rows, place.heads][..., torch.isnan(behind).any(dim=0)] = torch.nan
    return outputs | {name: out}


@fault(
    "P of 0 multiplied with NaN of the next sequence",
    MOVEMENT,
    seen="FlashInfer 0.6.18 BatchPrefillWithRaggedKVCacheWrapper on an H100",
    on=of_class(BatchPrefillWithRaggedKVCacheWrapper),
    same_if="no value behind a sequence in its last tile is NaN",
)
def write_next(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first keys of the next sequence."""
    v, ends = call.inputs["v"], call.inputs["kv_indptr"].tolist()
    chosen = pipeline("sm90.flashinfer.fp8")
    return _tails(call, outputs, chosen, lambda b: (v[ends[b] :], ends[b + 1] - ends[b]))


fault(
    "values of the next page of 64 keys",
    MOVEMENT,
    seen="flashinfer 4976: the loads of K and V go apart",
    needs=need(lambda call: _longest(call) > 64, "there is one page"),
    product=lambda problem: replace(problem, v=_raw(problem.v, lambda raw: raw.roll(-64, dims=0))),
    same_if="all values are alike",
)


def _raw(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Codes by their bytes, so that NaN stays what it is."""
    return change(x.view(torch.uint8)).view(x.dtype) if x.dtype.itemsize == 1 else change(x)


def _grouped(call: Call) -> bool:
    places = list(_contract(call).places(call.inputs, call.resolved))
    return len({place.heads.start for place in places}) > 1 and any(p.heads.stop - p.heads.start > 1 for p in places)


def _of_heads(call: Call) -> dict[str, int]:
    """The inputs with one part for each KV head, and its axis."""
    return {
        spec.name: spec.dims.index("G")
        for spec in call.contract.inputs
        if spec.name in call.inputs and spec.dims is not None and "G" in spec.dims
    }


@fault(
    "query head h reads KV head h mod G",
    INDEX,
    seen="vllm 40792 (review)",
    needs=need(_grouped, "the queries have one KV head, or one each"),
)
def read_head(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every query head gets keys, values and scales of its own: those of KV head h mod G."""
    axes, heads = _of_heads(call), _contract(call).shape(inputs)[1]
    name, axis = next(iter(axes.items()))
    taken = torch.arange(heads, device=inputs[name].device) % inputs[name].shape[axis]
    return inputs | {name: _taken(inputs[name], axis, taken) for name, axis in axes.items()}


def _taken(x: Tensor, axis: int, indices: Tensor) -> Tensor:
    return _raw(x, lambda raw: raw.index_select(axis, indices))


# --- sinks, log-sum-exp, stores ---------------------------------------------------------------------------------

SINK = need(lambda call: _contract(call).sink in call.inputs, "there is no sink")
fault(
    "sink {}",
    ARITHMETIC,
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

fault(
    "P is relative to the sink and has no lift",
    CAST,
    on=CODED,
    seen="ROCm/rocm-libraries 11786: the running maximum begins at a learned sink, below which all keys underflow",
    needs=both(ROUNDED, SINK),
    schedule=_changed(framed=True, lift=0.0, gain=1.0),
    same_if="no sink exceeds the largest score of its rows",
    admissible_if=FIT,
)


@fault(
    "keys of the last split left out",
    MOVEMENT,
    seen="ROCm/aiter 4350: what one of 16 splits gives is lost",
    on=of_class(MhaFwd),
    needs=both(need(lambda call: _splits(call) > 1, "there is one split"), TILES),
    admissible_if="these keys have next to no weight",
)
def product_split(call: Call, problem: Attention) -> Attention:
    """The tiles are shared evenly; the last part's sums never arrive."""
    width = TILE_SUMS.tile(max(problem.q.shape[1], problem.v.shape[1]), problem.q.shape[0])
    each = width * -(-max(1, -(-problem.k.shape[0] // width)) // _splits(call))
    kept = (problem.k.shape[0] - 1) // each * each
    return replace(problem, stop=problem.stop.clamp(max=kept)) if kept else problem


def _splits(call: Call) -> int:
    return _contract(call).splits(call.resolved)


@fault(
    "masked scores are a finite number",
    VALUE,
    seen="flashinfer 4451, 4452: -5e4; SageAttention: -5e6",
    on=of_class(MhaFwd),
    needs=need(lambda call: any(_unseen(p) for p in _problems(call)), "every query sees a key, or there is none"),
)
def write_finite(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A row that sees none of its keys has them all, with equal weights."""
    contract = _contract(call)
    named = {word: outputs[name].clone() for word, name in contract.names.items() if name in outputs}
    shape = contract.shape(call.inputs)
    zero = torch.zeros(shape, dtype=torch.float64, device=next(iter(call.inputs.values())).device)
    whole = {"out": zero, "lse": zero.sum(dim=2)}
    changed = {word: torch.zeros_like(x, dtype=torch.bool) for word, x in whole.items()}
    for place in contract.places(call.inputs, call.resolved):
        problem, keys = place.problem, place.problem.k.shape[0]
        rows = ~problem.seen() if keys else torch.zeros_like(problem.seen())
        mean = values(problem.v).mean(dim=0) * problem.v_scale.to(torch.float64)
        place.put(mean.nan_to_num(nan=0.0).expand(len(rows), -1), whole["out"])
        place.put(torch.full_like(mean[:1], FINITE + math.log(max(keys, 1))).expand(len(rows)), whole["lse"])
        place.put(rows[:, None].expand(-1, shape[2]), changed["out"])
        place.put(rows, changed["lse"])
    laid = {
        word: torch.where(
            contract.laid(word, changed[word], call.inputs),
            rounded_to(contract.laid(word, whole[word], call.inputs).contiguous(), x.dtype),
            x,
        )
        for word, x in named.items()
    }
    return outputs | {contract.names[word]: x for word, x in laid.items()}


FINITE = -5e4
"""The score of a masked key."""


def _unseen(problem: Attention) -> bool:
    return bool(problem.k.shape[0]) and not bool(problem.seen().all())


def _lse(change: Callable[[Tensor], Tensor]) -> Callable[[Call, dict[str, Tensor]], dict[str, Tensor]]:
    def write(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        name = call.contract.returns[1]
        return outputs | {name: change(outputs[name].to(torch.float64)).to(torch.float32)}

    return write


fault(
    "log-sum-exp {}",
    ARITHMETIC,
    over=(
        way(
            "to the other base",
            lambda x: x / math.log(2.0),
            seen="sglang 40903, 35045",
            on=of_class(MhaFwd) | of_class(FlashMlaWithKvcache),
        ),
        way(
            "in natural units",
            lambda x: x * math.log(2.0),
            seen="sglang 40903, 35045",
            on=of_class(FlashInferPrefill),
        ),
        way(
            "keeps the lift of P",
            lambda x: x + 8 * math.log(2.0),
            seen="flashinfer 1566; cudnn-frontend 1059",
            on=of_class(MhaFwd) | of_class(FlashInferPrefill),
        ),
    ),
    write=_lse,
    same_if="no row has a key",
)


@fault(
    "output stored before the scale of the values",
    CAST,
    seen="flashinfer FA2: out *= v_scale after it",
    on=CODED,
)
def write(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    contract, name = _contract(call), call.contract.returns[0]
    out = outputs[name]
    whole = torch.zeros(contract.shape(call.inputs), dtype=out.dtype, device=out.device)
    for place in contract.places(call.inputs, call.resolved):
        plain = exact(replace(place.problem, v_scale=torch.ones_like(place.problem.v_scale))).out
        stored = plain.to(torch.float32).to(out.dtype).to(torch.float32) * place.problem.v_scale
        place.put(stored, whole)
    return outputs | {name: contract.laid("out", whole, call.inputs)}


# --- 16-bit queries ---------------------------------------------------------------------------------------------

WIDE = of_class(WideAttention)


@fault(
    "P is cast to the FP8 of the cache without a lift",
    CAST,
    seen="SGLang 0.5.10 decode_attention_fwd and extend_attention_fwd: p.to(v.dtype); flashinfer 5020",
    on=WIDE,
    same_if="every P is a power of two above 2^-9, or one key has it all",
    admissible_if=FIT,
)
def write_unlifted(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tiles of 32 keys, forward: the codes of P relative to the maximum so far; the row sum is of P itself."""
    return _recomputed(call, outputs, lambda place: _unlifted(place.problem, place.problem.k.shape[0], 32))


def _recomputed(call: Call, outputs: dict[str, Tensor], rows: Callable[[Place], Tensor]) -> dict[str, Tensor]:
    """The output with float64 rows ``[R, Dv]`` of each attention that has keys."""
    contract, name = _contract(call), call.contract.returns[0]
    whole = torch.zeros(contract.shape(call.inputs), dtype=torch.float64, device=outputs[name].device)
    for place in contract.places(call.inputs, call.resolved):
        if place.problem.k.shape[0]:
            place.put(rows(place), whole)
    return outputs | {name: rounded_to(contract.laid("out", whole, call.inputs), outputs[name].dtype)}


def _unlifted(problem: Attention, coded: int, tile: int) -> Tensor:
    """The output ``[R, Dv]`` where P of the first ``coded`` keys is rounded to E4M3 without a lift, tile by tile."""
    soft, v = softmax(problem), values(problem.v).nan_to_num(nan=0.0)
    weights = soft.weights.nan_to_num(nan=0.0)
    top = torch.zeros_like(weights[:, :1])
    out = weights[:, coded:] @ v[coded:]
    for start in range(0, coded, tile):
        part = weights[:, start : min(start + tile, coded)]
        top = torch.maximum(top, part.amax(dim=1, keepdim=True))
        level = torch.where(top == 0, torch.ones_like(top), top)
        codes = encode(part / level, E4M3FN, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE)
        out = out + level * (decode(codes, E4M3FN) @ v[start : start + part.shape[1]])
    total = weights.sum(dim=1) + soft.sink
    total = torch.where(total == 0, torch.ones_like(total), total)
    return out / total[:, None] * problem.v_scale.to(torch.float64)


@fault(
    "queries and P of the cached keys cast to FP8",
    CAST,
    seen="SGLang 0.5.10 extend_attention_fwd: q.to(k.dtype), p.to(v.dtype)",
    on=of_class(ExtendAttentionFwd),
    needs=need(lambda call: call.inputs["kv_indices"].numel() > 0, "no key is cached"),
    same_if="queries and P are values of E4M3",
    admissible_if=FIT,
)
def write_extend(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scores of cached keys are of queries in E4M3, without a scale; tiles of 64 keys."""
    cached = call.inputs["kv_indptr"].diff().tolist()

    def rows(place: Place) -> Tensor:
        problem, first = place.problem, cached[place.batch]
        q, k = values(problem.q), values(problem.k)
        raw = encode(q, E4M3FN, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE)
        kept = torch.arange(len(k), device=k.device)[:, None] < first
        keys = torch.cat([k.masked_fill(~kept, 0.0), k.masked_fill(kept, 0.0)], dim=1)
        both_ways = replace(problem, q=torch.cat([decode(raw, E4M3FN), q], dim=1), k=keys)
        return _unlifted(both_ways, first, 64)

    return _recomputed(call, outputs, rows)


def _not_one(name: str) -> WhyNot:
    return need(lambda call: call.resolved[name] != 1.0, f"{name} is 1")


fault(
    "scale of the {}",
    VALUE,
    on=of_class(TritonAttention),
    over=tuple(
        way(
            f"{part} {words}",
            (name, change),
            seen=seen,
            needs=_not_one(name),
        )
        for part, name in (("keys of the cache", "k_scale"), ("values of the cache", "v_scale"))
        for words, change, seen in (
            ("left out", lambda scale: 1.0, "sglang 20705, 18818: loaded, never handed on"),
            ("applied twice", lambda scale: scale * scale, "vllm 48016"),
        )
    ),
    options=lambda made: lambda options: options | {made[0]: made[1](options[made[0]])},
)

# --- the caches ---------------------------------------------------------------------------------------------------

MLA = of_class(FlashMlaWithKvcache)


def _scales_of(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """The four float32 scales of each slot, changed."""

    def read(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        cache = inputs["k_cache"].clone()
        scales = cache[..., SCALES_AT:ROPE_AT].contiguous().view(torch.float32)
        cache[..., SCALES_AT:ROPE_AT] = change(scales).contiguous().view(torch.uint8)
        return inputs | {"k_cache": cache}

    return read


fault(
    "scale of 128 codes {}",
    VALUE,
    on=MLA,
    over=(
        way(
            "cut to a power of two",
            lambda x: torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1),
            seen="FlashMLA 184; vllm 54563",
        ),
        way("of the next 128", lambda x: x.roll(-1, dims=-1), seen="no public thread: the tile's index is one off"),
    ),
    read=_scales_of,
    same_if="the scales are powers of two, or alike",
)
fault(
    "last 64 values of the key left out",
    MOVEMENT,
    on=MLA,
    seen="no public thread: the rope part of the scores is not added",
    product=lambda p: replace(p, q=torch.cat([p.q[:, :RANK], torch.zeros_like(p.q[:, RANK:])], dim=1)),
    same_if="the scores of these values are alike",
)
fault(
    "slot -1 read as slot 0",
    INDEX,
    on=MLA,
    seen="no public thread: an absent slot is not masked",
    needs=need(lambda call: bool((call.inputs["indices"] < 0).any()), "every slot is named"),
    read=lambda inputs: inputs | {"indices": inputs["indices"].clamp(min=0)},
)
fault(
    "log-sum-exp {}",
    ARITHMETIC,
    on=MLA,
    over=(
        way(
            "with the sink",
            lambda outputs, inputs: torch.logaddexp(outputs, inputs["attn_sink"].double()[None, :, None]),
            seen="FlashMLA: the log-sum-exp leaves the sink out",
            needs=SINK,
        ),
        way(
            "of a token without slots is -inf",
            lambda outputs, inputs: torch.where(torch.isposinf(outputs), -outputs, outputs),
            seen="FlashMLA: +inf",
            needs=need(lambda call: bool((call.inputs["indices"] < 0).all(dim=-1).any()), "every token has a slot"),
        ),
    ),
    write=lambda change: (
        lambda call, outputs: (
            outputs | {"softmax_lse": change(outputs["softmax_lse"].to(torch.float64), call.inputs).to(torch.float32)}
        )
    ),
)
fault(
    "scale of each {}",
    INDEX,
    on=takes("k_scale_cache") & ATTENTION,
    needs=need(_has("k_scale_cache"), "keys have one scale"),
    over=(
        way(
            "key for its value",
            lambda inputs: {"v_scale_cache": inputs["k_scale_cache"]},
            seen="sglang 26852 (review): the scale of the values falls back to that of the keys",
            needs=both(
                need(_has("k_scale_cache"), "keys have one scale"), need(_has("v_scale_cache"), "values have one")
            ),
        ),
        way(
            "key of the next slot",
            lambda inputs: {"k_scale_cache": inputs["k_scale_cache"].roll(-1, dims=1)},
            seen="no public thread: the slot's index is one off",
        ),
        way(
            "key left out",
            lambda inputs: {"k_scale_cache": torch.ones_like(inputs["k_scale_cache"])},
            seen="vllm 42080: the scales are skipped",
        ),
    ),
    read=lambda change: lambda inputs: inputs | change(inputs),
)
fault(
    "scales of the cache ignored with E4M3 queries",
    VALUE,
    on=of_class(UnifiedAttention),
    seen="vllm 42080; vLLM 0.20.2 unified_attention on an H100: k_descale and v_descale change nothing",
    needs=need(
        lambda call: "k_descale" in call.inputs and call.inputs["q"].dtype.itemsize == 1, "the queries are no FP8"
    ),
    read=lambda inputs: {name: x for name, x in inputs.items() if not name.endswith("_descale")},
)


# --- two states as one ------------------------------------------------------------------------------------------

MERGE = of_class(MergeContract)


def _merging(call: Call) -> MergeContract:
    contract = call.contract
    assert isinstance(contract, MergeContract)
    return contract


def _partial(call: Call) -> bool:
    sums = _merging(call).states(call.inputs, call.resolved).sums
    return bool(torch.isneginf(sums).any())


fault(
    "log-sum-exps of the states {}",
    ARITHMETIC,
    on=MERGE,
    over=(
        way(
            "to the other base",
            lambda s: replace(s, sums=s.sums * math.log(2.0)),
            seen="sglang 40903, 35045: base 2 merged as natural",
            on=MERGE & ~of_class(FlashInferMergeState),
        ),
        way(
            "taken as natural",
            lambda s: replace(s, sums=s.sums / math.log(2.0)),
            seen="sglang 40903, 35045: base 2 merged as natural",
            on=of_class(FlashInferMergeState),
        ),
        way(
            "exchanged",
            lambda s: replace(s, sums=s.sums.flip(0)),
            seen="no public thread: each state has the other's weight",
        ),
        way(
            "of the next head",
            lambda s: replace(s, sums=s.sums.roll(-1, dims=-1)),
            seen="no public thread: the head's index is one off",
            needs=need(lambda call: call.inputs[_merging(call).names[0]].shape[1] > 1, "there is one head"),
        ),
        way(
            "alike",
            lambda s: replace(s, sums=torch.zeros_like(s.sums)),
            seen="no public thread: the states are averaged",
        ),
    ),
    product=lambda change: change,
    same_if="both states have one log-sum-exp",
)
fault(
    "state without keys counts as one key",
    ARITHMETIC,
    on=MERGE,
    seen="vllm merge_attn_states: an infinite log-sum-exp is read as -inf, since FlashAttention-2 returns +inf",
    needs=need(_partial, "both states of every row have keys"),
    product=lambda s: replace(s, sums=s.sums.masked_fill(torch.isneginf(s.sums), 0.0)),
)
fault(
    "second state is not weighted",
    ARITHMETIC,
    on=MERGE,
    seen="no public thread: the outputs are added with the weight of the first alone",
    product=lambda s: replace(s, outputs=torch.stack([s.outputs[0], s.outputs[1] * 2])),
)
fault(
    "output scale {}",
    VALUE,
    on=takes("output_scale") & MERGE,
    needs=need(_has("output_scale"), "the output is no FP8"),
    over=(
        way("left out", ones, seen="vllm 55670: the FP8 output is copied without its scale"),
        way("multiplied", torch.reciprocal, seen="no public thread: the scale for its inverse"),
    ),
    read=lambda change: lambda inputs: inputs | {"output_scale": change(inputs["output_scale"])},
)
fault(
    "tokens without a prefix are merged",
    MOVEMENT,
    on=of_class(MergeAttnStates),
    seen="vllm merge_attn_states: prefill_tokens_with_context",
    needs=need(lambda call: call.resolved["prefill_tokens_with_context"] is not None, "every token has a prefix"),
    options=lambda options: options | {"prefill_tokens_with_context": None},
    same_if="no token is without a prefix",
)
