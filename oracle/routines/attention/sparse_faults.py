"""Faults of attention over chosen keys, and of scales of blocks: slots, scales and blocks that are another's.

Source: the threads that each declaration names (``seen``); what a fault replaces is a stage of the right kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.routines.attention.blockscaled import CuteDslFmhaBlockscaledPrefill
from oracle.routines.attention.sparse import MsaSparseAttention, SparseMlaDsv4
from oracle.routines.base import Call
from oracle.routines.fault import INDEX, MOVEMENT, VALUE, Faults, entry, need, way
from oracle.routines.ideas import OfTensor, first_for_all, itself, option, rolled
from oracle.routines.kv_cache.contract import flat
from oracle.routines.kv_cache.newer import NOPE, TILE, v4_places
from oracle.routines.kv_cache.writers import columns, rows
from oracle.routines.traits import of_class

V4, MSA, SCALED = of_class(SparseMlaDsv4), of_class(MsaSparseAttention), of_class(CuteDslFmhaBlockscaledPrefill)
FAULTS = Faults(V4 | MSA | SCALED)
fault = FAULTS.declare
MINE = "no public thread: "
ALIKE = "it changes nothing"
Tensors = dict[str, Tensor]
POOLS = need(lambda call: "compressed_kv_cache" in call.inputs, "there is one pool")


def _exponents(change: OfTensor) -> Callable[[Call, Tensors], Tensors]:
    """The exponents of all tokens, uint8 ``[tokens, 7]``, changed in every pool."""

    def changed(call: Call, inputs: Tensors) -> Tensors:
        page, pools = int(call.resolved["block_size"]), {}
        for cache, _ in SparseMlaDsv4.pools(inputs):
            pools[cache] = inputs[cache].clone()
            raw, tokens = flat(pools[cache]), columns(len(pools[cache]) * page)
            at = rows(v4_places(tokens, page, pools[cache].shape[1])[1], columns(NOPE // TILE))
            raw[at] = change(raw[at])
        return inputs | pools

    return changed


def _absent(inputs: Tensors) -> Tensors:
    return inputs | {slots: inputs[slots].clamp(min=0) for _, slots in SparseMlaDsv4.pools(inputs)}


def _without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda inputs: {name: x for name, x in inputs.items() if name not in names}


def _multiplied(options: dict[str, object]) -> dict[str, object]:
    scale = options["scale_o"]
    return options | {"scale_o": None if scale is None else 1 / float(str(scale))}


fault(
    "{}",
    INDEX,
    on=V4,
    over=(
        way("exponents of the next 64 columns", _exponents(rolled(1, 1)), seen=MINE + "a tile off"),
        way("codes without their exponents", _exponents(lambda x: torch.full_like(x, 127)), seen="vllm 54563"),
        way("absent slots of the pools read as slot 0", _absent, seen=MINE + "an absent slot is not masked"),
        way("slots of the rest looked up in the window", _without("compressed_kv_cache", "extra_sparse_indices"),
            seen=MINE + "one pool alone", needs=POOLS),
        way("pool left without its sink", _without("sinks"), seen="flashinfer 1566",
            needs=need(lambda call: "sinks" in call.inputs, "there is no sink")),
    ),
    read=itself,
    same_if=ALIKE,
)  # fmt: skip  # a table, one row a line
fault(
    "values without their rotated columns",
    MOVEMENT,
    seen=MINE + "as DeepSeek-V3's values, 448 of the key",
    on=V4,
    product=lambda p: replace(p, v=torch.cat([p.v[:, :NOPE], torch.zeros_like(p.v[:, NOPE:])], dim=1)),
    same_if=ALIKE,
)
fault(
    "{}",
    INDEX,
    on=MSA,
    over=(
        way("blocks of the first KV head for all", ("q2k_indices", first_for_all()),
            seen=MINE + "a head's index left out"),
        way("blocks of the first query for all", ("q2k_indices", first_for_all(1)),
            seen="FlashInfer msa_ops/sparse_prefill.py: tiles of tokens see the union of their blocks"),
        way("pages of the next sequence", ("page_table", rolled(-1)), seen=MINE + "a table's row off"),
    ),
    read=lambda change: entry(*change),
    same_if=ALIKE,
)  # fmt: skip  # a table, one row a line
fault(
    "{}",
    VALUE,
    on=MSA,
    over=(
        way("factor of the output left out", option(v_global_scale=None), seen="sglang 20705"),
        way("blocks without the causal mask", option(causal=False), seen=MINE + "the last block seen whole"),
    ),
    options=itself,
    same_if=ALIKE,
)  # fmt: skip  # a table, one row a line
fault(
    "{}",
    INDEX,
    on=SCALED,
    over=(
        way("scales of queries of the next block", ("q_sf", rolled(-1, -1)), seen=MINE + "a block off"),
        way("scales of keys of the next block", ("k_sf", rolled(-1, -1)), seen=MINE + "a block off"),
        way("scales of the next query of blocks", ("q_sf", rolled(-1, 1)), seen="vllm 42118"),
        way("scales of the next key of blocks", ("k_sf", rolled(-1, 1)), seen="vllm 42118"),
        way("keys of one scale", ("k_sf", first_for_all(-1)), seen=MINE + "a tensor's"),
    ),
    read=lambda change: entry(*change),
    same_if=ALIKE,
)  # fmt: skip  # a table, one row a line
fault(
    "{}",
    VALUE,
    on=SCALED,
    over=(
        way("scale of the whole output multiplied", _multiplied, seen=MINE + "scale_v * scale_o"),
        way("scale of all values left out", option(scale_v=None), seen="sglang 20705"),
        way("scale of all queries left out", option(scale_q=None), seen="sglang 20705"),
    ),
    options=itself,
    same_if=ALIKE,
)  # fmt: skip  # a table, one row a line
