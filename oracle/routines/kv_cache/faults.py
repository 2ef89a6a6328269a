"""Faults of KV caches: scales, casts, slots, pages, what is stored beside the codes, memory that must not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from oracle.numbers.formats import E4M3FN, codes_of, decode, from_codes, of_dtype
from oracle.numbers.rounding import Overflow, Rounding, encode, f32, round_to
from oracle.routines.fault import (
    ARITHMETIC,
    CAST,
    INDEX,
    MOVEMENT,
    VALUE,
    Call,
    Faults,
    always,
    both,
    entry,
    need,
    ones,
    way,
)
from oracle.routines.ideas import (
    FLUSHED,
    HALF_AWAY,
    NAN_AS_MAXIMUM,
    OVERFLOW_NAN,
    SATURATED,
    THROUGH_BF16,
    TIRX,
    TRUNCATED,
    UNSIGNED,
    OfTensor,
    bf16_of,
    first_for_all,
    inverted,
    itself,
    nibbles_swapped,
    option,
    pairs_swapped,
    rolled,
    squared,
    through_bf16,
)
from oracle.routines.kv_cache.contract import (
    FILLS,
    INDEX_PAGES,
    ROWS_READ,
    SCALE_OF_HEADS,
    SIDE_BY_SIDE,
    CacheContract,
    Coded,
    Copied,
    Piece,
    Products,
    Quantised,
    flat,
    put,
    puts,
)
from oracle.routines.kv_cache.readers import Gather
from oracle.routines.kv_cache.rotated import RopeQuantizeFp8AppendPagedKvCache
from oracle.routines.kv_cache.writers import RANK, ROPE, ROPE_AT, ROW, SCALES_AT, TILE, RowsOfTiles, columns
from oracle.routines.quantisers.contract import FOUR_BITS, Amax
from oracle.routines.quantisers.inside import Inside
from oracle.routines.traits import Trait, of_class, takes
from oracle.verdict.sets import rounded_to

CACHES, ROWS, GATHERED = of_class(CacheContract), of_class(RowsOfTiles), of_class(Gather)
CODED, QUANTISED, READ = puts(Coded), puts(Quantised), puts(Products)
SCALED = CACHES & (takes("scale") | takes("k_scale"))
"""Contracts that are given a scale."""
SLOTTED, PAIRED = CACHES & takes("slot_mapping"), CACHES & takes("v_scale")
APPENDED, LAID_OUT = CACHES & takes("kv_indptr"), CACHES & takes("kv_layout")
TILED = QUANTISED - FOUR_BITS
HEADED = CACHES & Trait("has heads", lambda contract: "H" in (contract.inputs[0].dims or ()))
PADDED = SLOTTED & Trait("takes tokens of padding", lambda contract: "N" in (contract.inputs[0].dims or ()))
IN_FLOAT16 = Trait("takes float16", lambda contract: torch.float16 in contract.inputs[0].dtypes)
KEPT = CACHES & Trait("is given memory", lambda contract: bool(getattr(contract, "memory", ()))) - FILLS
"""Contracts that leave elements of their output unwritten."""
MINE = "no public thread: "
PREFIX = "cache: "
BYTES = "vllm PR 54563, byte offsets"
Tensors = dict[str, Tensor]
Pieces = list[Piece]
P = TypeVar("P", Copied, Coded, Quantised, Products)
# A fault is a row: what is wrong and where it was met; the change; when it shows.
FAULTS = Faults(CACHES)
fault = FAULTS.declare


# --- what a call must have ----------------------------------------------------------------------------------


def _work(call: Call) -> Pieces:
    pieces: Pieces = call.contract.work(call)  # type: ignore[attr-defined]  # these contracts have pieces
    return pieces


def _pieces(call: Call, kind: type[P]) -> list[P]:
    return [piece for piece in _work(call) if isinstance(piece, kind)]


def _each(kind: type[P], pieces: Pieces, change: Callable[[P], Piece]) -> Pieces:
    """The pieces, those of one kind changed."""
    return [change(piece) if isinstance(piece, kind) else piece for piece in pieces]


def _moved(piece: Piece, change: Callable[[Tensor, str], Tensor]) -> Piece:
    """A piece and its scales written to other places: ``change`` maps the right places and the name of the output."""
    if isinstance(piece, Quantised):
        piece = replace(piece, scale_at=change(piece.scale_at, piece.scales))
    return replace(piece, at=change(piece.at, piece.name))


coded = need(lambda call: _pieces(call, Coded), "nothing is divided")
read = need(lambda call: _pieces(call, Products), "nothing is multiplied")
several_scales = need(lambda call: call.inputs["k_scale"].numel() > 1, "there is one scale")
skipped = need(lambda call: bool((call.inputs["slot_mapping"] < 0).any()), "every token has a slot")
several_tokens = need(lambda call: len(call.inputs["slot_mapping"]) > 1, "there is one token")
several_heads = need(lambda call: next(iter(call.inputs.values())).shape[1] > 1, "there is one head")
EQUAL = "the scales are equal"


def page_of(call: Call) -> int:
    """Slots of a page."""
    if "block_size" in call.resolved:
        return int(call.resolved["block_size"])
    memory = "key_cache" if "key_cache" in call.inputs else "kv_cache" if "kv_cache" in call.inputs else "k_cache"
    x = call.inputs[memory]
    if x.dim() == 5:
        return x.shape[3]
    return x.shape[2] if call.resolved.get("kv_layout") == "HND" else x.shape[1]


def room_of(call: Call) -> int:
    """Slots of the cache."""
    memory = "key_cache" if "key_cache" in call.inputs else "kv_cache" if "kv_cache" in call.inputs else "k_cache"
    return call.inputs[memory].shape[0] * page_of(call)


several_slots = need(lambda call: page_of(call) > 1, "a page has one slot")


# --- the scale ----------------------------------------------------------------------------------------------


GIVEN = ("scale", "k_scale", "v_scale")


def _option(change: OfTensor) -> Callable[[dict[str, object]], dict[str, object]]:
    """The scale that is an option, changed."""

    def options(chosen: dict[str, object]) -> dict[str, object]:
        if not isinstance(scale := chosen.get("scale"), int | float):
            return chosen
        return chosen | {"scale": float(change(torch.tensor(float(scale), dtype=torch.float32, device="cpu")))}

    return options


fault(
    "{}",
    VALUE,
    on=SCALED,
    same_if="it is 1",
    over=(
        way("scale of the cache silently 1", ones, seen="flashinfer 4979; sglang 18818, PR 20705, PR 34765"),
        way("inverse of the scale of the cache", inverted, seen="xpu-kernels PR 475", on=SCALED - READ),
        way(
            "scale of the cache rounded to bfloat16",
            through_bf16,
            seen="vllm PR 49435, readers that shorten it",
            same_if="it is a bfloat16 value",
            admissible_if="it moves few codes",
        ),
        way("scale of the cache applied twice", squared, seen="vllm 42580, a descale in the wrong place"),
    ),
    read=lambda change: lambda inputs: inputs | {name: change(inputs[name]) for name in GIVEN if name in inputs},
    options=_option,
)
for mine, other in (("k", "v"), ("v", "k")):
    fault(
        f"{other} scale of the cache used for {mine}",
        VALUE,
        seen="vllm PR 37054",
        on=PAIRED,
        read=lambda inputs, mine=mine, other=other: inputs | {f"{mine}_scale": inputs[f"{other}_scale"]},
        same_if=EQUAL,
    )
fault(
    "scale of the {} head of the cache",
    INDEX,
    seen="pytorch 159940, a scale read as another shape",
    on=SCALE_OF_HEADS,
    needs=several_scales,
    same_if=EQUAL,
    over=(way("first", first_for_all()), way("next", rolled(-1))),
    read=lambda change: lambda inputs: inputs | {name: change(inputs[name]) for name in ("k_scale", "v_scale")},
)


fault(
    "{}",
    VALUE,
    on=CODED & SCALED,
    needs=coded,
    over=(
        way(
            "multiplied by the scale where it divides",
            lambda q: decode(q.x) * q.scale,
            seen="xpu-kernels PR 475",
            same_if="the scale is 1",
        ),
        way(
            "multiplied by the rounded reciprocal of the scale",
            lambda q: decode(q.x) * f32(1.0 / q.scale),
            seen="sglang PR 4362, flashinfer 2441",
            same_if="no quotient lies beside a midpoint",
        ),
        way(
            "value rounded to float16 before the division",
            lambda q: decode(q.x.to(torch.float16)) / q.scale,
            family=CAST,
            seen="H200 mutants: bf16 written into an fp16 buffer",
            same_if="every value is a float16 value",
        ),
    ),
    quotient=lambda value: lambda q: replace(q, quotient=f32(value(q))),
)
fault(
    "divided by the scale where it multiplies",
    VALUE,
    seen="xpu-kernels PR 475",
    on=READ,
    needs=read,
    store=lambda pieces: _each(Products, pieces, lambda p: replace(p, scale=f32(1.0 / p.scale))),
    same_if="the scale is 1",
)


# --- the cast -----------------------------------------------------------------------------------------------


CASTS = Faults(CODED)
CASTS.declare(
    PREFIX + "{}",
    CAST,
    needs=coded,
    over=(
        *SATURATED,
        HALF_AWAY,
        TRUNCATED,
        OVERFLOW_NAN,
        THROUGH_BF16,
        NAN_AS_MAXIMUM,
        FLUSHED,
        UNSIGNED.but(same_if="no value is negative"),
        way("codes exchanged in byte pairs", family=MOVEMENT, seen="pith-train PR 74", codes=pairs_swapped),
    ),
)


INSIDE = Inside(PREFIX + "tile ", TILED, TILED)


@fault(
    "amax of the bits of float16 values",
    VALUE,
    seen="vLLM 0.20.2 concat_and_cache_ds_mla on an H200",
    on=TILED & IN_FLOAT16,
    needs=need(lambda call: next(iter(call.inputs.values())).dtype == torch.float16, "the values are no float16"),
)
def amax_of_bits(amax: Amax) -> Tensor:
    """The largest magnitude of the float16 bits read as uint16, for which the kernel is compiled."""
    bits = (codes_of(amax.x.x).to(torch.float64)) % 65536
    return amax.x.grid(amax.recipe.block).split(bits).amax(dim=(1, 3), keepdim=True)


# --- slots and pages ----------------------------------------------------------------------------------------


def _slots(change: Callable[[Call, Tensor], Tensor]) -> Callable[[Call, Tensor], Tensor]:
    """Other slots of the tokens that have one; a token whose slot lies beyond the cache is not written."""

    def moved(call: Call, slot: Tensor) -> Tensor:
        other = torch.where(slot < 0, slot, change(call, slot))
        return other.masked_fill(other >= room_of(call), -1)

    return moved


def _without_last_used(call: Call, slot: Tensor) -> Tensor:
    page = slot // page_of(call)
    return torch.where(page == slot.max() // page_of(call), -1, slot)


def _one_more(call: Call, slot: Tensor) -> Tensor:
    """The first free slot of the cache for a token behind the mapping."""
    every = columns(room_of(call))
    return torch.cat([slot, every.to(slot.dtype)[~torch.isin(every, slot)][:1]])


PAGE_0 = "all slots lie in page 0"
fault(
    "{}",
    INDEX,
    on=SLOTTED,
    over=(
        way(
            "slot -1 written: the last slot of the cache",
            lambda call, slot: torch.where(slot < 0, room_of(call) - 1, slot),
            seen="DeepGEMM 34, PR 450: -1 taken as an index",
            needs=skipped,
        ),
        way(
            "slot -1 written: slot 0",
            lambda slot: slot.clamp(min=0),
            seen="flashinfer 3547, -1 clamped",
            needs=skipped,
        ),
        way(
            "tokens behind the first one without a slot not written",
            lambda slot: torch.where((slot < 0).cumsum(0) > 0, -1, slot),
            family=MOVEMENT,
            seen=MINE + "break for continue",
            needs=skipped,
        ),
        way(
            "slots counted without the mapping",
            _slots(lambda call, slot: torch.arange(len(slot), dtype=slot.dtype, device=slot.device)),
            seen="vllm PR 6761",
            same_if="the mapping counts",
        ),
        way(
            "offset in the page modulo half of its slots",
            _slots(lambda call, slot: slot - slot % page_of(call) + slot % page_of(call) % (page_of(call) // 2)),
            seen=MINE + "a page size of another cache group",
            needs=several_slots,
            same_if="no offset lies in the second half of a page",
        ),
        way("slot of the next token", rolled(-1), seen="vllm 50084", needs=several_tokens),
        way(
            "page stride of two pages",
            _slots(lambda call, slot: slot + slot // page_of(call) * page_of(call)),
            seen="vllm PR 54563, a cache whose pages hold keys and values",
            same_if=PAGE_0,
        ),
        way(
            "slots of the second half of the cache written into the first",
            _slots(lambda call, slot: slot % max(1, room_of(call) // 2)),
            seen="flash-attention 772: an offset beyond 32 bits",
            needs=need(lambda call: room_of(call) > 1, "there is one slot"),
            same_if="no token lies in the second half",
        ),
        way(
            "page stride one slot short",
            _slots(lambda call, slot: slot - slot // page_of(call)),
            seen=MINE + "a stride of the unpadded page",
            same_if=PAGE_0,
        ),
        way(
            "last page of the cache lost",
            _without_last_used,
            family=MOVEMENT,
            seen="cache of an odd number of pages, aprender 2765",
        ),
        way(
            "only the first slot of each page written",
            lambda call, slot: torch.where(slot % page_of(call) == 0, slot, -1),
            family=MOVEMENT,
            seen="aiter PR 5591",
            needs=several_slots,
            same_if="every token lies in a first slot",
        ),
        way(
            "only the first token written",
            lambda slot: torch.where(torch.arange(len(slot), device=slot.device) > 0, -1, slot),
            family=MOVEMENT,
            seen="1bit-MONSTER/1bit-MONSTER 686",
            needs=several_tokens,
            same_if="no other token has a slot",
        ),
        way(
            "tokens of the second half not written",
            lambda slot: torch.where(torch.arange(len(slot), device=slot.device) >= -(-len(slot) // 2), -1, slot),
            family=MOVEMENT,
            seen="vllm-ascend PR 16775, a mapping cut to the tokens of one rank",
            needs=several_tokens,
            same_if="none of them has a slot",
        ),
        way(
            "token without an entry in the mapping written",
            _one_more,
            family=MOVEMENT,
            seen="vllm 45741, padding of a CUDA graph",
            on=PADDED,
        ),
    ),
    read=lambda change: entry("slot_mapping", change),
)


def _other_layout(call: Call, pieces: Pieces) -> Pieces:
    """Heads and slots of a page exchanged."""

    def moved(at: Tensor, name: str) -> Tensor:
        _, a, b, depth = call.inputs[name].shape
        page, rest = at // (a * b * depth), at % (a * b * depth)
        first, second, column = rest // (b * depth), rest // depth % b, rest % depth
        return ((page * b + second) * a + first) * depth + column

    return [_moved(piece, moved) for piece in pieces]


fault(
    "heads and slots of a page exchanged",
    INDEX,
    seen="flashinfer 1023, strides of the other layout",
    on=LAID_OUT,
    store=_other_layout,
    needs=need(
        lambda call: min(call.inputs["k_cache" if "k_cache" in call.inputs else "key_cache"].shape[1:3]) > 1,
        "a page has one head or one slot",
    ),
)


def _rows(change: Callable[[Call, Tensor], Tensor]) -> Callable[[Call, Pieces], Pieces]:
    """Rows of heads of every piece, changed in their places: ``[tokens, heads, D]``."""

    def store(call: Call, pieces: Pieces) -> Pieces:
        heads = next(iter(call.inputs.values())).shape[1]
        rows = lambda at, _: change(call, at.reshape(-1, heads, at.shape[-1])).reshape(at.shape)  # noqa: E731
        return [_moved(piece, rows) for piece in pieces]

    return store


def _without_last(call: Call, at: Tensor) -> Tensor:
    at = at.clone()
    at[:, -1] = -1
    return at


fault(
    "{}",
    INDEX,
    on=HEADED,
    needs=several_heads,
    over=(
        way(
            "last head of the cache not written",
            _without_last,
            family=MOVEMENT,
            seen="kernels-community 1153, a tail",
            needs=always,
        ),
        way("place of the next head", lambda call, at: at.roll(-1, dims=1), seen="vllm 57016, a head stride"),
        way(
            "head stride of two heads",
            lambda call, at: at + (at[:, 1:2] - at[:, :1]) * columns(at.shape[1]).reshape(1, -1, 1),
            seen="flashinfer 1023, the stride of keys beside values",
        ),
    ),
    store=_rows,
)


def _named(change: Callable[[str], str]) -> Callable[[Pieces], Pieces]:
    def store(pieces: Pieces) -> Pieces:
        return [
            replace(p, name=change(p.name), scales=change(p.scales))
            if isinstance(p, Quantised)
            else replace(p, name=change(p.name))
            for p in pieces
        ]

    return store


def _exchanged(name: str) -> str:
    pairs = {
        "key_cache": "value_cache",
        "k_cache": "v_cache",
        "k_scale_cache": "v_scale_cache",
        "output_k": "output_v",
    }
    both_ways = pairs | {b: a for a, b in pairs.items()}
    return both_ways[name]


fault(
    "{}",
    MOVEMENT,
    on=LAID_OUT,
    over=(
        way("keys and values exchanged", _exchanged, seen="vllm PR 6761"),
        way(
            "keys written over by values",
            lambda name: _exchanged(name) if name.startswith("v") or name.endswith("_v") else name,
            seen=MINE + "one pointer for both",
        ),
    ),
    store=_named,
)
fault(
    "values not written",
    MOVEMENT,
    seen="vllm-omni 5263, memory left as it was",
    on=HEADED,
    store=lambda pieces: pieces[:1],
)


def _cleared(call: Call, outputs: Tensors) -> Tensors:
    """Zeros in every element that the right kernel leaves unwritten."""
    out = {}
    for name, x in outputs.items():
        untouched = torch.zeros(x.numel(), dtype=torch.bool, device="cpu")
        for piece in _work(call):
            if piece.name == name:
                untouched[piece.at] = True
            if isinstance(piece, Quantised) and piece.scales == name:
                untouched[piece.scale_at] = True
        out[name] = put(x, ~untouched, torch.zeros((), dtype=torch.uint8, device="cpu"))
    return out


fault(
    "memory that no token owns cleared",
    MOVEMENT,
    seen="flashinfer 3978, a buffer written whole",
    on=KEPT,
    write=_cleared,
)


def _last_page(call: Call, outputs: Tensors) -> Tensors:
    """One bit changed in the element behind the last one written: an out-of-bounds write."""
    piece = _work(call)[0]
    following = piece.at.max() + 1
    return outputs | {piece.name: put(outputs[piece.name], following, flat(outputs[piece.name])[following] ^ 1)}


def _follows(call: Call) -> bool:
    piece = _work(call)[0]
    return int(piece.at.max()) + 1 < call.truth[piece.name].numel()


fault(
    "one element past the last one written",
    MOVEMENT,
    seen="flashinfer 3978",
    on=KEPT,
    write=_last_page,
    needs=need(_follows, "the last element is written"),
)


# --- MLA: columns that are rotated --------------------------------------------------------------------------


def _unscaled_rope(call: Call, pieces: Pieces) -> Pieces:
    (piece,) = pieces
    assert isinstance(piece, Coded)
    rank = call.inputs["kv_c"].shape[1]
    nope = replace(piece, x=piece.x[:, :rank], at=piece.at[:, :rank])
    rope = replace(piece, x=piece.x[:, rank:], at=piece.at[:, rank:], scale=torch.ones_like(piece.scale))
    return [nope, rope]


def _widths(call: Call) -> tuple[int, int]:
    names = ("kv_c", "k_pe") if "kv_c" in call.inputs else ("cache_k_nope", "cache_k_rope")
    nope, rope = (call.inputs[name].shape[-1] for name in names)
    return nope, rope


def _rope_first(call: Call, pieces: Pieces) -> Pieces:
    (piece,) = pieces
    rank, rope = _widths(call)
    return [replace(piece, at=torch.cat([piece.at[:, rope:], piece.at[:, :rope]], dim=1))]


def _without_rope(call: Call, pieces: Pieces) -> Pieces:
    (piece,) = pieces
    assert isinstance(piece, Coded)
    rank, _ = _widths(call)
    return [replace(piece, x=piece.x[:, :rank], at=piece.at[:, :rank])]


fault(
    "rotated columns {}",
    INDEX,
    on=SIDE_BY_SIDE,
    over=(
        way(
            "not divided by the scale",
            _unscaled_rope,
            family=VALUE,
            seen="vllm 42956, PR 37054",
            on=SIDE_BY_SIDE & SCALED,
            same_if="the scale is 1",
        ),
        way("before the others", _rope_first, seen=MINE + "the order of the two parts"),
        way("not written", _without_rope, family=MOVEMENT, seen="vllm 42956, a part left out"),
    ),
    store=itself,
)
fault(
    "rotated columns of the next token",
    INDEX,
    seen="vllm 50084",
    on=CACHES & takes("k_pe"),
    read=entry("k_pe", lambda x: x.roll(-1, dims=0)),
)


def _over_the_border(inputs: Tensors) -> Tensors:
    """Columns of the block of 128 in which the rotated ones begin are read from before these, of the row before."""
    nope, rope = inputs["kv_c"], inputs["k_pe"].flatten()
    first, rank = nope.shape[1] // 128 * 128, nope.shape[1]
    row = torch.arange(len(nope), device=nope.device)[:, None] * inputs["k_pe"].shape[-1]
    beside = rope[(row + torch.arange(first - rank, 0, device=nope.device)) % len(rope)]
    return inputs | {"kv_c": torch.cat([nope[:, :first], beside], dim=1)}


fault(
    "columns of a block of 128 that the rotated ones begin in read from before these",
    INDEX,
    seen="sglang PR 15522",
    on=CACHES & takes("k_pe") & takes("kv_c"),
    read=_over_the_border,
    needs=need(lambda call: call.inputs["kv_c"].shape[1] % 128, "whole blocks of 128"),
)
fault(
    "reserved slot written",
    INDEX,
    seen="sglang memory pools: slot 0 takes padding",
    on=CACHES & takes("reserved_skip_index"),
    options=option(reserved_skip_index=-1),
    needs=need(lambda call: bool((call.inputs["loc"] == 0).any()), "no token has it"),
)
fault(
    "slot one too far",
    INDEX,
    seen=MINE + "slot 0 is reserved",
    on=CACHES & takes("loc"),
    read=entry("loc", lambda loc: torch.where(loc > 0, loc - 1, loc)),
    needs=need(lambda call: len(call.inputs["loc"]) > 0, ""),
)


# --- rows of 656 bytes, pages of index keys -----------------------------------------------------------------


def _through_fp8(piece: Copied) -> Copied:
    """16-bit values rounded to E4M3 and back."""
    bits = piece.bits.contiguous().view(torch.bfloat16)
    value = decode(bits)
    codes = encode(value.nan_to_num(0.0), E4M3FN, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE)
    once = torch.where(torch.isnan(value), value, decode(from_codes(codes, E4M3FN)))
    stored = codes_of(rounded_to(once, torch.bfloat16))
    return replace(piece, bits=stored.contiguous().view(torch.uint8) if piece.bits.dtype is torch.uint8 else stored)


fault(
    "rotated columns quantised too",
    CAST,
    seen="vllm PR 54563",
    on=ROWS | ROWS_READ,
    store=lambda pieces: _each(Copied, pieces, _through_fp8),
    same_if="every one is a code",
)
fault(
    "rotated columns right behind the codes, the scales at the end",
    INDEX,
    seen=BYTES,
    on=ROWS,
    store=lambda pieces: _each(
        Copied,
        _each(Quantised, pieces, lambda p: replace(p, scale_at=p.scale_at + 2 * ROPE)),
        lambda p: replace(p, at=p.at - 16),
    ),
)
fault(
    "{}",
    INDEX,
    on=ROWS,
    over=(
        way("scales one word too far", lambda p: replace(p, scale_at=p.scale_at + 4), seen=BYTES),
        way(
            "scales of the tiles in the opposite order",
            lambda p: replace(p, scale_at=p.scale_at.reshape(len(p.scale_at), -1, 4).flip(1).flatten(1)),
            seen="sglang PR 25733, bytes of a word",
            same_if="the scales of every row are equal",
        ),
        way(
            "scales of the tiles left as they were",
            lambda p: replace(p, scale_at=torch.full_like(p.scale_at, -1)),
            family=VALUE,
            on=QUANTISED,
            seen="vllm-omni 5263, a sentinel",
        ),
        way(
            "codes left as they were",
            lambda p: replace(p, at=torch.full_like(p.at, -1)),
            family=MOVEMENT,
            on=QUANTISED,
            seen="vllm-omni 5263",
        ),
    ),
    store=lambda change: lambda pieces: _each(Quantised, pieces, change),
)
fault(
    "rotated columns left as they were",
    MOVEMENT,
    seen="vllm-omni 5263",
    on=ROWS,
    store=lambda pieces: [piece for piece in pieces if not isinstance(piece, Copied)],
)


def _float16_bits(piece: Copied) -> Copied:
    """The value stored as float16 where bfloat16 is expected."""
    value = decode(piece.bits.contiguous().view(torch.bfloat16))
    codes = codes_of(rounded_to(value, torch.float16))
    return replace(piece, bits=codes.contiguous().view(torch.uint8))


fault(
    "rotated columns stored as float16",
    CAST,
    seen="H200 mutants: rotated columns in fp16",
    on=ROWS,
    store=lambda pieces: _each(Copied, pieces, _float16_bits),
    same_if="they are zero",
)


def _interleaved(call: Call, piece: Quantised) -> Quantised:
    """Each row of index keys followed by its own scales."""
    _, page, row = call.inputs["kv_cache"].shape
    depth, first = piece.x.shape[1], piece.at[:, :1]
    start = first // (page * row) * (page * row) + first % (page * row) // depth * row
    return replace(piece, at=start + columns(depth), scale_at=start + depth + columns(row - depth))


def _by_elements(call: Call, piece: Quantised) -> Quantised:
    _, page, row = call.inputs["kv_cache"].shape
    start = piece.at[:, :1] // (page * row) * (page * row) + page * piece.x.shape[1]
    return replace(piece, scale_at=start + (piece.scale_at - start) // 4 + columns(piece.scale_at.shape[1]))


fault(
    "scales {}",
    INDEX,
    on=INDEX_PAGES & QUANTISED,
    needs=several_slots,
    over=(
        way("beside the codes of their row", _interleaved, seen="DeepGEMM 433, the layout of a page"),
        way("of a page counted in elements instead of bytes", _by_elements, seen="vllm 50084"),
        way(
            "of a page behind the codes of one slot less",
            lambda call, p: replace(p, scale_at=p.scale_at - p.x.shape[1]),
            seen=MINE + "page size off by one",
        ),
    ),
    store=lambda change: lambda call, pieces: _each(Quantised, pieces, lambda piece: change(call, piece)),
)


# --- NVFP4 --------------------------------------------------------------------------------------------------


def _of_memory(*names: str, change: Callable[[Tensor], Tensor]) -> Callable[[Call, Tensors], Tensors]:
    """Codes that were written, changed."""

    def write(call: Call, outputs: Tensors) -> Tensors:
        out = dict(outputs)
        for piece in _work(call):
            beside = [(piece.scales, piece.scale_at)] if isinstance(piece, Quantised) else []
            for name, at in ((piece.name, piece.at), *beside):
                if name in names:
                    out[name] = put(out[name], at, change(flat(out[name])[at]))
        return out

    return write


SCALES = ("k_scale_cache", "v_scale_cache")
fault(
    "{}",
    INDEX,
    on=QUANTISED & FOUR_BITS,
    over=(
        way(
            "nibbles of the cache exchanged",
            _of_memory("k_cache", "v_cache", change=nibbles_swapped),
            seen="Primus-Turbo 397, packing",
        ),
        way(
            "block scales of the cache of the previous block",
            _of_memory(*SCALES, change=rolled(1, -1)),
            seen=TIRX,
            same_if="neighbours have equal scales",
        ),
        way(
            "block scale for 448 instead of 6",
            _of_memory(*SCALES, change=lambda s: _times(s, 6.0 / 448.0)),
            family=VALUE,
            seen=MINE + "the largest code of the wrong format",
        ),
    ),
    write=itself,
)


def _times(scale: Tensor, factor: float) -> Tensor:
    value = decode(from_codes(scale, E4M3FN)) * factor
    return encode(value, E4M3FN, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE)


# --- FlashInfer: copies -------------------------------------------------------------------------------------


def _page_of_append(call: Call) -> int:
    if "ckv_cache" in call.inputs:
        return call.inputs["ckv_cache"].shape[1]
    return call.inputs["k_cache"].shape[2 if call.resolved["kv_layout"] == "HND" else 1]


several_requests = need(lambda call: len(call.inputs["kv_indptr"]) > 2, "there is one request")
fault(
    "{}",
    INDEX,
    on=APPENDED,
    over=(
        way(
            "pages of the first request for all of them",
            entry("batch_indices", lambda batch: batch * 0),
            seen="vllm 50084, a table of another request",
            needs=several_requests,
        ),
        way(
            "pages in their order without the table",
            entry("kv_indices", lambda table: torch.arange(len(table), dtype=table.dtype, device=table.device)),
            seen="vllm 50084",
            same_if="the pages are in their order",
        ),
        way(
            "positions kept within the first page",
            entry("positions", lambda call, position: position % _page_of_append(call)),
            seen=MINE + "a position among the appended tokens",
            same_if="every request has one page",
        ),
        way(
            "position one too small",
            entry("positions", lambda position: (position - 1).clamp(min=0)),
            seen="flashinfer 1023",
        ),
    ),
    read=itself,
)
fault(
    "rows of the next token appended",
    MOVEMENT,
    seen="flashinfer 4396",
    on=APPENDED,
    read=lambda inputs: (
        inputs
        | {n: flat(x).reshape(x.shape).roll(-1, 0).view(x.dtype) for n, x in inputs.items() if n.startswith("append_")}
    ),
)
fault(
    "last partial page of every request lost",
    MOVEMENT,
    seen="aprender 2765, a tail",
    on=APPENDED,
    store=lambda call, pieces: [_without_last_page(call, piece) for piece in pieces],
)


def _without_last_page(call: Call, piece: Piece) -> Piece:
    page, batch = _page_of_append(call), call.inputs["batch_indices"].long()
    counts = call.inputs["kv_indptr"].long().diff()
    last = call.inputs["positions"].long() // page == counts[batch] - 1
    return replace(piece, at=torch.where(last.reshape(-1, *(1,) * (piece.at.dim() - 1)), -1, piece.at))


# --- readers ------------------------------------------------------------------------------------------------

fault(
    "pages {}",
    INDEX,
    on=GATHERED,
    over=(
        way(
            "of the first request read for all of them",
            lambda table: _usable(table, first=True),
            seen="vllm 50084, a table of another request",
            needs=need(lambda call: len(call.inputs["block_table"]) > 1, "there is one request"),
        ),
        way(
            "read in their order without the table",
            lambda table: columns(table.numel()).to(table.dtype).reshape(table.shape),
            seen="vllm 50084",
            same_if="the pages are in their order",
        ),
    ),
    read=lambda change: entry("block_table", change),
)
fault(
    "pages of the second half of the cache read from the first",
    INDEX,
    seen="vllm 50427: an offset of int32",
    on=GATHERED,
    needs=need(lambda call: len(next(iter(call.inputs.values()))) > 1, "there is one page"),
    read=lambda inputs: inputs | {"block_table": _halved(inputs["block_table"], len(next(iter(inputs.values()))))},
    same_if="no request has such a page",
)
fault(
    "rows of the second half not gathered",
    MOVEMENT,
    seen="vllm PR 51252: a workspace of fewer rows",
    on=GATHERED,
    store=lambda pieces: [replace(piece, at=_kept(piece.at, [*range(-(-len(piece.at) // 2))])) for piece in pieces],
)


def _in_page(inputs: Mapping[str, Tensor]) -> Tensor:
    """Tokens of its page before the first one of each request, int32 ``[B]``; 0 where no starts are given."""
    starts = inputs.get("seq_starts", torch.zeros(1, dtype=torch.int32, device="cpu"))
    return torch.remainder(starts, inputs["src_cache"].shape[1])


def _halved(table: Tensor, pages: int) -> Tensor:
    return torch.where(table < 0, table, table % -(-pages // 2))


fault(
    "first page of every request read throughout",
    INDEX,
    seen="sglang PR 20819, an index that never advances",
    on=GATHERED,
    same_if="every request has one page",
    store=lambda call, pieces: _reread(call, pieces, lambda table: table[:, :1].expand_as(table)),
)
fault(
    "starts of the requests ignored",
    INDEX,
    seen=MINE + "an optional argument not passed on",
    on=GATHERED & takes("seq_starts"),
    needs=need(lambda call: "seq_starts" in call.inputs, "there are none"),
    read=lambda inputs: {name: x for name, x in inputs.items() if name != "seq_starts"},
    same_if="all are 0",
)
fault(
    "starts of the requests rounded down to the first token of a page",
    INDEX,
    seen="vllm PR 51739: releases before it",
    on=GATHERED & takes("seq_starts"),
    needs=need(lambda call: bool((_in_page(call.inputs) > 0).any()), "every start is the first token of a page"),
    read=lambda inputs: inputs | {"seq_starts": inputs["seq_starts"] - _in_page(inputs)},
)
fault(
    "last row of every request not read",
    MOVEMENT,
    seen="aprender 2765, a tail",
    on=GATHERED,
    store=lambda call, pieces: [replace(piece, at=_without_ends(call, piece.at)) for piece in pieces],
)
fault(
    "rows of the page behind the request read too",
    MOVEMENT,
    seen="flashinfer 3978, a page copied whole",
    on=GATHERED - FILLS,
    write=lambda call, outputs: _overrun(call, outputs),
)
fault(
    "only the first row of each page read",
    MOVEMENT,
    seen="aiter PR 5591",
    on=GATHERED,
    store=lambda call, pieces: [replace(piece, at=_firsts(call, piece.at)) for piece in pieces],
)


def _usable(table: Tensor, *, first: bool = False) -> Tensor:
    table = table[:1].expand_as(table) if first else table
    return table.clamp(min=0).contiguous()


def _reread(call: Call, pieces: Pieces, change: Callable[[Tensor], Tensor]) -> Pieces:
    inputs = dict(call.inputs) | {"block_table": _usable(change(call.inputs["block_table"]))}
    return _work(replace(call, inputs=inputs))


def _lengths(call: Call) -> tuple[list[int], list[int]]:
    """First row and rows of each request."""
    if "cu_seq_lens" in call.inputs:
        ends = call.inputs["cu_seq_lens"].tolist()
        return ends[:-1], [b - a for a, b in zip(ends[:-1], ends[1:], strict=True)]
    return call.inputs["workspace_starts"].tolist(), call.inputs["seq_lens"].tolist()


def _kept(at: Tensor, rows: list[int]) -> Tensor:
    """Places of these rows, by their order; the others are not written."""
    keep = torch.zeros(len(at), dtype=torch.bool, device="cpu")
    keep[rows] = True
    return torch.where(keep[:, None], at, -1)


def _without_ends(call: Call, at: Tensor) -> Tensor:
    return _kept(at, [a + i for a, n in zip(*_lengths(call), strict=True) for i in range(n - 1)])


def _firsts(call: Call, at: Tensor) -> Tensor:
    page = next(iter(call.inputs.values())).shape[1]
    return _kept(at, [a + i for a, n in zip(*_lengths(call), strict=True) for i in range(0, n, page)])


def _overrun(call: Call, outputs: Tensors) -> Tensors:
    """The row behind the last one of the last request holds that row once more."""
    first, counts = _lengths(call)
    end = max(a + n for a, n in zip(first, counts, strict=True))
    out = {}
    for name, x in outputs.items():
        raw = flat(x).reshape(x.shape).clone()
        raw[end] = raw[end - 1]
        out[name] = raw.view(x.dtype)
    return out


fault(
    "{}",
    VALUE,
    on=ROWS_READ,
    over=(
        *(
            way(
                f"scale of the {words} tile",
                lambda scale, change=change: change(scale[:, ::TILE]).repeat_interleave(TILE, dim=1),
                family=INDEX,
                seen="mlc-ai/TIRx-kernels PR 5; sglang PR 20819",
                same_if="the scales of a row are equal",
            )
            for words, change in (("previous", rolled(1, 1)), ("first", first_for_all(1)))
        ),
        way("tile scales silently 1", ones, seen="vllm 42580", same_if="they are 1"),
        way("tile scales rounded to bfloat16", bf16_of, seen="vllm PR 49435", same_if="they are bfloat16 values"),
    ),
    store=lambda change: lambda pieces: _each(Products, pieces, lambda p: replace(p, scale=change(p.scale))),
)


def _elsewhere(start: int) -> Callable[[Tensors], Tensors]:
    """Scales taken from another byte of the row."""

    def read(inputs: Tensors) -> Tensors:
        name = "src_cache" if "src_cache" in inputs else "quant_k_cache"
        memory = inputs[name].clone()
        memory[..., SCALES_AT:ROPE_AT] = inputs[name][..., start : start + 16]
        return inputs | {name: memory}

    return read


fault(
    "scales read {}",
    INDEX,
    seen=BYTES,
    on=ROWS_READ,
    over=(way("from the end of the row", ROW - 16), way("one word too early", SCALES_AT - 4)),
    read=_elsewhere,
)
fault(
    "rotated columns taken for codes of the last tile",
    INDEX,
    seen="vllm PR 54563",
    on=ROWS_READ,
    read=lambda inputs: (
        inputs
        | {
            n: torch.cat([x[..., : RANK - ROPE], x[..., ROPE_AT : ROPE_AT + ROPE], x[..., RANK:]], dim=-1)
            for n, x in inputs.items()
            if n in ("src_cache", "quant_k_cache")
        }
    ),
)


def _stored(rounding: Rounding) -> Callable[[Call, Tensors], Tensors]:
    """Products rounded otherwise on their way to the output."""

    def write(call: Call, outputs: Tensors) -> Tensors:
        out = dict(outputs)
        for piece in _pieces(call, Products):
            x, exact = out[piece.name], decode(piece.codes) * piece.scale
            once = round_to(f32(exact), of_dtype(x.dtype), rounding=rounding, overflow=Overflow.INF)
            out[piece.name] = put(x, piece.at, codes_of(rounded_to(once, x.dtype)))
        return out

    return write


narrow = need(lambda call: call.truth[next(iter(call.truth))].dtype != torch.float32, "the output is float32")
fault(
    "read value truncated",
    CAST,
    seen="H200 mutants: a store that truncates",
    on=READ,
    needs=both(read, narrow),
    write=_stored(Rounding.TOWARD_ZERO),
    same_if="every product is a value of the output",
)
fault(
    "read value through bfloat16",
    ARITHMETIC,
    seen="H200 mutants: the wrong 16 bits of a float32",
    on=READ & SCALED,
    needs=both(
        read, need(lambda call: call.truth[next(iter(call.truth))].dtype != torch.bfloat16, "the output is bfloat16")
    ),
    write=lambda call, outputs: {
        n: x.to(torch.bfloat16).to(x.dtype) if torch.isfinite(x.float()).any() else x for n, x in outputs.items()
    },
)
fault(
    "NaN codes read as 480",
    CAST,
    seen="ml_dtypes 400, NaN decoded as a number",
    on=READ,
    needs=read,
    write=lambda call, outputs: _number_for_nan(call, outputs),
    same_if="no code is NaN",
)


def _number_for_nan(call: Call, outputs: Tensors) -> Tensors:
    out = dict(outputs)
    for piece in _pieces(call, Products):
        x, bits = out[piece.name], codes_of(piece.codes)
        value = torch.where((bits & 0x7F) == 0x7F, torch.where(bits > 127, -480.0, 480.0), decode(piece.codes))
        out[piece.name] = put(x, piece.at, codes_of(rounded_to(f32(value * piece.scale), x.dtype)))
    return out


# gathered index keys
fault(
    "index scales {}",
    INDEX,
    on=INDEX_PAGES & GATHERED,
    over=(
        way(
            "of the codes' order in the page",
            lambda codes, scales: (
                [codes, replace(scales, bits=scales.bits.roll(1, 0))] if isinstance(scales, Copied) else [codes, scales]
            ),
            seen="DeepGEMM 433",
        ),
        way("not gathered", lambda codes, scales: [codes], family=MOVEMENT, seen="vllm-omni 5263"),
    ),
    store=lambda change: lambda pieces: change(*pieces),
)


# --- rotated and appended -------------------------------------------------------------------------------------------

ROTATED = Faults(of_class(RopeQuantizeFp8AppendPagedKvCache))
rotated = ROTATED.declare
rotated(
    "{}",
    INDEX,
    over=(
        way("rotated keys: request of the next token", "batch_indices", seen="flashinfer 3547", same_if="one request"),
        way("rotated keys: position of the next token", "positions", seen="vllm 57016", same_if="one token"),
        way("rotated keys: page of the next entry", "kv_indices", seen=MINE + "a table read one off"),
    ),
    read=lambda name: entry(name, lambda x: x.roll(-1)),
    needs=need(lambda call: _stay(call), "tokens would leave their pages"),
)
rotated(
    "rotated keys and values exchanged",
    MOVEMENT,
    seen="vllm PR 6761",
    write=lambda outputs: outputs | {"k_cache": outputs["v_cache"], "v_cache": outputs["k_cache"]},
)
rotated(
    "rotated keys: values not written",
    MOVEMENT,
    seen=MINE + "an early return",
    write=lambda call, outputs: outputs | {"v_cache": call.inputs["v_cache"]},
)
rotated(
    "values coded without their factor",
    VALUE,
    seen="flashinfer 4979",
    needs=need(lambda call: call.resolved["quant_scale_kv"] != 1.0, "it is 1"),
    read=lambda call, inputs: inputs | {"v": _unscaled(inputs["v"], call.resolved["quant_scale_kv"])},
    same_if="all values are 0",
)
rotated(
    "other pages cleared",
    MOVEMENT,
    seen=MINE + "a cache that is allocated anew",
    write=lambda call, outputs: outputs | {"k_cache": _alone(call, outputs)},
)


def _unscaled(x: Tensor, factor: float) -> Tensor:
    return (x.float() / factor).to(x.dtype)


def _stay(call: Call) -> bool:
    """Whether one page more, or the pages of another request, hold every token."""
    return len(call.inputs["kv_indptr"]) == 2 or int(call.inputs["positions"].max()) < _page(call)


def _page(call: Call) -> int:
    return int(call.inputs["k_cache"].shape[1 if call.resolved["kv_layout"] == "NHD" else 2])


def _alone(call: Call, outputs: dict[str, Tensor]) -> Tensor:
    contract = call.contract
    assert isinstance(contract, RopeQuantizeFp8AppendPagedKvCache)
    keys, at = outputs["k_cache"].view(torch.uint8), contract.places(call.inputs, str(call.resolved["kv_layout"]))
    only = torch.zeros_like(keys).flatten()
    only[at.flatten()] = keys.flatten()[at.flatten()]
    return only.reshape(keys.shape).view(outputs["k_cache"].dtype)
