"""Faults of attention over chosen keys, and of scales of blocks: slots, scales and blocks that are another's.

Source: the threads that each declaration names (``seen``); what a fault replaces is a stage of the right kernel.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oracle.routines.attention.blockscaled import CuteDslFmhaBlockscaledPrefill
from oracle.routines.attention.sparse import MsaSparseAttention, SparseMlaDsv4
from oracle.routines.base import Call
from oracle.routines.fault import INDEX, MOVEMENT, VALUE, Faults, need, way
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


def _exponents(call: Call, inputs: Tensors, change: str) -> Tensors:
    """The exponents of each token, changed."""
    page, changed = int(call.resolved["block_size"]), dict(inputs)
    for cache, _ in SparseMlaDsv4.pools(inputs):
        memory = inputs[cache].clone()
        raw, tokens = flat(memory), columns(memory.shape[0] * page)
        at = rows(v4_places(tokens, page, memory.shape[1])[1], columns(NOPE // TILE))
        raw[at] = torch.full_like(raw[at], 127) if change == "one" else raw[at].roll(1 if change == "next" else 0, 1)
        changed[cache] = memory
    return changed


def _absent(call: Call, inputs: Tensors) -> Tensors:
    return inputs | {slots: inputs[slots].clamp(min=0) for _, slots in SparseMlaDsv4.pools(inputs)}


fault(
    "{}",
    INDEX,
    on=V4,
    over=(
        way("exponents of the next 64 columns", lambda call, x: _exponents(call, x, "next"), seen=MINE + "a tile off"),
        way("codes without their exponents", lambda call, x: _exponents(call, x, "one"), seen="vllm 54563"),
        way("absent slots of the pools read as slot 0", _absent, seen=MINE + "an absent slot is not masked"),
        way("slots of the rest looked up in the window", lambda call, x: {
            name: tensor for name, tensor in x.items() if "extra" not in name and "compressed" not in name
        }, seen=MINE + "one pool alone", needs=POOLS),
        way("pool left without its sink", lambda call, x: {n: t for n, t in x.items() if n != "sinks"},
            seen="flashinfer 1566", needs=need(lambda call: "sinks" in call.inputs, "there is no sink")),
    ),
    read=lambda change: change,
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
        way("blocks of the first KV head for all", ("q2k_indices", lambda x: x[:1].expand(x.shape).contiguous()),
            seen=MINE + "a head's index left out"),
        way("blocks of the first query for all", ("q2k_indices", lambda x: x[:, :1].expand(x.shape).contiguous()),
            seen="FlashInfer msa_ops/sparse_prefill.py: tiles of tokens see the union of their blocks"),
        way("pages of the next sequence", ("page_table", lambda x: x.roll(-1, 0)), seen=MINE + "a table's row off"),
    ),
    read=lambda made: lambda inputs: inputs | {made[0]: made[1](inputs[made[0]])},
    same_if=ALIKE,
)  # fmt: skip  # a table, one row a line
fault(
    "{}",
    VALUE,
    on=MSA,
    over=(
        way("factor of the output left out", {"v_global_scale": None}, seen="sglang 20705"),
        way("blocks without the causal mask", {"causal": False}, seen=MINE + "the last block seen whole"),
    ),
    options=lambda made: lambda options: options | made,
    same_if=ALIKE,
)  # fmt: skip  # a table, one row a line
fault(
    "{}",
    INDEX,
    on=SCALED,
    over=(
        way("scales of queries of the next block", ("q_sf", lambda x: x.roll(-1, -1)), seen=MINE + "a block off"),
        way("scales of keys of the next block", ("k_sf", lambda x: x.roll(-1, -1)), seen=MINE + "a block off"),
        way("scales of the next query of blocks", ("q_sf", lambda x: x.roll(-1, 1)), seen="vllm 42118"),
        way("scales of the next key of blocks", ("k_sf", lambda x: x.roll(-1, 1)), seen="vllm 42118"),
        way("keys of one scale", ("k_sf", lambda x: x[..., :1].expand(x.shape).contiguous()), seen=MINE + "a tensor's"),
    ),
    read=lambda made: lambda inputs: inputs | {made[0]: made[1](inputs[made[0]])},
    same_if=ALIKE,
)  # fmt: skip  # a table, one row a line
fault(
    "{}",
    VALUE,
    on=SCALED,
    over=(
        way("scale of the whole output multiplied", "scale_o", seen=MINE + "scale_v * scale_o"),
        way("scale of all values left out", "scale_v", seen="sglang 20705"),
        way("scale of all queries left out", "scale_q", seen="sglang 20705"),
    ),
    options=lambda name: lambda options: options | {
        name: None if name != "scale_o" or options[name] is None else 1 / float(str(options[name]))
    },
    same_if=ALIKE,
)  # fmt: skip  # a table, one row a line
