"""Cases of FP8 attention: data whose softmax shows what a pipeline does to P."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oracle.routines import data
from oracle.routines.attention.sage import BLOCK, WARP, slots
from oracle.routines.attention.sage import TILE as KEYS
from oracle.routines.case import Case, Grammar, seeds
from oracle.routines.kv_cache.writers import RANK, ROPE, ROPE_AT, ROW, SCALES_AT, TILE

NATS = 16.0
"""From the first key of a ramp to the last: P passes every underflow of E4M3, with a lift and without."""
LN2 = 0.6931472
"""With it as the softmax scale of unit scales ``c`` is 1 in float32: of integer scores P is a power of two."""
UNIT_SCORES = 2.0**7.5
"""Brings the product of two scales of :func:`oracle.routines.data.scales` to about 2."""
HOT = 7.5
"""What one key of family ``hot`` has above the others, in nats: P = 2^-10.8 of these, which only a lift keeps."""


def _operands(case: Case, queries: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...]) -> list[Tensor]:
    """``q`` ``[.., H, D]``, ``k`` and ``v`` ``[.., N, G, ..]``, codes of E4M3, of :func:`_drawn`."""
    return _coded(case, *_drawn(case, queries, keys, values))


def _drawn(
    case: Case, queries: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """``q``, ``k`` and ``v``, float64; a ramp rises for the first KV head and falls for the next, ``fall`` the other
    way round."""
    q, k, v = (case.stream(name).normals(shape) for name, shape in zip("qkv", (queries, keys, values), strict=True))
    (*_, n, of_keys, depth), family = keys, case.family
    along = np.where(case.stream("direction").integers(0, 2, (depth,)) == 1, 1.0, -1.0) / depth**0.5
    level = np.zeros((n, of_keys))
    if family in ("ramp", "fall"):
        level = np.linspace(0.0, NATS, n)[:, None].repeat(of_keys, axis=1)
        falling = slice(1, None, 2) if family == "ramp" else slice(0, None, 2)
        level[:, falling] = level[::-1, falling]
    if family == "hot":
        level[case.stream("hot").integers(0, n, (of_keys,)), np.arange(of_keys)] = HOT
    if family in ("ramp", "fall", "hot"):
        k, q = 0.25 * k + level[..., None] * along, 0.05 * q + along * depth**0.5
    if family == "exact":
        q, k, v = (np.clip(np.rint(x), -2, 2) for x in (q, k, v))
        q[..., 16:] = 0.0
    if family in ("randn", "codes", "nan"):
        q = 1.5 * q
    if family == "ones":
        q, v = 2.0 * q, np.ones_like(v)
    return q, k, v


def _coded(case: Case, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> list[Tensor]:
    """Codes of E4M3, but for queries of another dtype of the case; every code for the values of family ``codes``."""
    family, codes = case.family, [data.encoded(x, torch.float8_e4m3fn) for x in (q, k, v)]
    if case.operand_dtypes[0].itemsize > 1:
        codes[0] = torch.from_numpy(q).to(case.operand_dtypes[0])
    if family == "codes":
        rows = codes[2].numel() // v.shape[-1]
        drawn = data.operand(case.label("v"), "codes", rows, v.shape[-1], dtype=torch.float8_e4m3fn, side="b")
        codes[2] = drawn.reshape(v.shape)
    if family == "nan":
        for name, x in zip("qkv", codes, strict=True):
            at = int(case.stream(f"nan of {name}").integers(0, x.numel(), (1,))[0])
            x.view(-1)[at] = (
                torch.nan
                if x.dtype.itemsize > 1
                else torch.tensor(torch.nan, dtype=torch.float32, device="cpu").to(x.dtype)
            )
    return codes


def _scales(case: Case, name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    if case.option("scales") == "none" or case.family == "exact":
        return {}
    return {name: data.scales(case.label(name), "randn", shape) * UNIT_SCORES}


def _mha(case: Case) -> dict[str, Tensor]:
    b, s, n, h, g, d, v = (case[name] for name in "bsnhgdv")
    q, k, values = _operands(case, (b, s, h, d), (b, n, g, d), (b, n, g, v))
    inputs = {"q": q, "k": k, "v": values}
    for name in ("q_descale", "k_descale", "v_descale"):
        inputs |= _scales(case, name, (b, g))
    if case.option("used"):
        used = case.stream("used").integers(0, n + 1, (b,))
        used[0] = max(1, n - n // 3)
        inputs["seqused_k"] = torch.from_numpy(used).to(torch.int32)
        for row, keys in enumerate(used.tolist()):  # NaN in slots that nothing uses
            for x in (k, values):
                x.view(torch.uint8)[row, keys:] = 0x7F
    if case.option("pages"):
        size = int(str(case.option("pages")))
        table, places = _table(case, [n] * b, size)
        inputs["page_table"] = table
        inputs.setdefault("seqused_k", torch.full((b,), n, dtype=torch.int32, device="cpu"))
        for name in "kv":
            inputs[name] = _scattered(inputs[name].flatten(0, 1), places, size)
    if case.option("sink"):
        inputs["s_aux"] = _sink(case, torch.bfloat16)
    return inputs


def _sink(case: Case, dtype: torch.dtype) -> Tensor:
    """A score for each head, from far below the others to far above."""
    h = case["h"]
    return torch.from_numpy(np.linspace(-2.0, 6.0, h) + 0.1 * case.stream("sink").normals((h,))).to(dtype)


def _lengths(case: Case, name: str, sequences: int, longest: int, least: int = 0) -> list[int]:
    """The first is the longest."""
    drawn: list[int] = case.stream(name).integers(min(least, longest), longest + 1, (sequences,)).tolist()
    return [longest, *drawn[1:]]


def _ends(lengths: Iterable[int]) -> Tensor:
    """0 and the running sums, int32."""
    return torch.tensor([0, *np.cumsum(list(lengths)).tolist()], dtype=torch.int32, device="cpu")


def _table(case: Case, lengths: list[int], size: int, spare: int = 2) -> tuple[Tensor, Tensor]:
    """Pages of ``size`` in a shuffled order, int32 ``[B, L]`` (0 where there is none), and the slot of every key of all
    sequences."""
    pages = [-(-n // size) for n in lengths]
    order = torch.from_numpy(case.stream("pages").order(sum(pages) + spare)).to(torch.int32)
    table, slots, at = torch.zeros((len(lengths), max(pages)), dtype=torch.int32, device="cpu"), [], 0
    for b, (n, count) in enumerate(zip(lengths, pages, strict=True)):
        table[b, :count] = order[at : at + count]
        key = torch.arange(n, device="cpu")
        slots.append(order[at + key // size].to(torch.int64) * size + key % size)
        at += count
    return table, torch.cat(slots)


def _scattered(x: Tensor, slots: Tensor, size: int, spare: int = 2) -> Tensor:
    """The rows of ``x`` in their slots of a cache ``[P, size, ..]``, NaN in the others."""
    pages = int(slots.max()) // size + 1 + spare if len(slots) else spare
    cache = torch.full((pages * size, *x.shape[1:]), 0x7F, dtype=torch.uint8, device="cpu")
    if x.dtype.itemsize > 1:
        whole = torch.full((pages * size, *x.shape[1:]), torch.nan, dtype=x.dtype, device="cpu")
        whole[slots] = x
        return whole.reshape(pages, size, *x.shape[1:])
    cache[slots] = x.view(torch.uint8)
    return cache.view(x.dtype).reshape(pages, size, *x.shape[1:])


def _mha_options(case: Case) -> dict[str, object]:
    options: dict[str, object] = {"is_causal": True} if case.option("causal") else {}
    if case.option("window"):
        left, _, right = str(case.option("window")).partition("_")
        options |= {"window_size_left": int(left), "window_size_right": int(right)}
    if case.option("splits"):
        options["num_splits"] = int(str(case.option("splits")))
    if case.option("cap"):
        options["softcap"] = float(str(case.option("cap")))
    return options | ({"softmax_scale": LN2} if case.family == "exact" else {})


def _prefill(case: Case) -> dict[str, Tensor]:
    m, n, h, g, d = (case[name] for name in "mnhgd")
    q, k, v = _operands(case, (m, h, d), (n, g, d), (n, g, d))
    return {"q": q, "k": k, "v": v} | _head_scales(case)


def _prefill_options(case: Case) -> dict[str, object]:
    options: dict[str, object] = {"o_dtype": case.out_dtype}
    options |= {"causal": True} if case.option("causal") else {}
    return options | ({"sm_scale": LN2} if case.family == "exact" else {})


def _ragged(case: Case) -> tuple[list[int], list[int]]:
    """Queries and keys of each sequence; no sequence has fewer keys than queries."""
    b, m, n = case["b"], case["m"], case["n"]
    queries = _lengths(case, "queries", b, m)
    keys = _lengths(case, "keys", b, n)
    return queries, [max(q, k) for q, k in zip(queries, keys, strict=True)]


def _head_scales(case: Case) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    for name, extent in (("scale_q", "h"), ("scale_k", "g"), ("scale_v", "g")):
        inputs |= _scales(case, name, (case[extent],))
    return inputs


def _batch(case: Case) -> dict[str, Tensor]:
    queries, keys = _ragged(case)
    h, g, d = case["h"], case["g"], case["d"]
    q, k, v = _operands(case, (sum(queries), h, d), (sum(keys), g, d), (sum(keys), g, d))
    inputs = {"q": q, "qo_indptr": _ends(queries)}
    if case.contract == "BatchPrefillWithRaggedKVCacheWrapper":
        inputs |= {"k": k, "v": v, "kv_indptr": _ends(keys)}
    else:
        size = int(str(case.option("page") or 16))
        table, slots = _table(case, keys, size)
        pages = [-(-n // size) for n in keys]
        inputs |= {
            "k_cache": _scattered(k, slots, size),
            "v_cache": _scattered(v, slots, size),
            "paged_kv_indptr": _ends(pages),
            "paged_kv_indices": torch.cat([row[:count] for row, count in zip(table, pages, strict=True)]),
            "paged_kv_last_page_len": torch.tensor(
                [n and (n - 1) % size + 1 for n in keys], dtype=torch.int32, device="cpu"
            ),
        }
    return inputs | _head_scales(case)


def _batch_options(case: Case) -> dict[str, object]:
    window = {"window_left": int(str(case.option("window")))} if case.option("window") else {}
    return _prefill_options(case) | window


def _unified(case: Case) -> dict[str, Tensor]:
    queries, keys = _ragged(case)
    h, g, d, size = case["h"], case["g"], case["d"], int(str(case.option("page") or 16))
    q, k, v = _operands(case, (sum(queries), h, d), (sum(keys), g, d), (sum(keys), g, d))
    table, slots = _table(case, keys, size)
    inputs = {
        "q": q,
        "k": _scattered(k, slots, size),
        "v": _scattered(v, slots, size),
        "cu_seqlens_q": _ends(queries),
        "seqused_k": torch.tensor(keys, dtype=torch.int32, device="cpu"),
        "block_table": table,
    }
    of_keys = {"k_descale": (1,), "v_descale": (1,)}
    if case.option("scales") == "token":
        of_keys = {}
        for name in ("k_scale_cache", "v_scale_cache"):
            each = data.scales(case.label(name), "randn", (sum(keys), g)) * UNIT_SCORES
            inputs[name] = _scattered(each, slots, size)
    for name, shape in of_keys.items():
        inputs |= _scales(case, name, shape)
    return inputs | ({"sinks": _sink(case, torch.bfloat16)} if case.option("sink") else {})


def _unified_options(case: Case) -> dict[str, object]:
    options: dict[str, object] = {"softmax_scale": LN2} if case.family == "exact" else {}
    options |= {"softcap": float(str(case.option("cap")))} if case.option("cap") else {}
    return options | ({"window_size_left": int(str(case.option("window")))} if case.option("window") else {})


def _triton(case: Case) -> dict[str, Tensor]:
    """Decode, or with the extent ``m`` extend: the new tokens have keys and values of their own."""
    b, n, h, g, d, v = (case[name] for name in "bnhgdv")
    extends = case.contract == "extend_attention_fwd"
    keys = _lengths(case, "keys", b, n, least=0 if extends else 1)
    new = _lengths(case, "new", b, case["m"]) if extends else [1] * b
    total = sum(keys) + (sum(new) if extends else 0)
    q, k, values = _operands(case, (sum(new), h, d), (total, g, d), (total, g, v))
    _, slots = _table(case, keys, 1, spare=3)
    cached = sum(keys)
    inputs = {
        "q": q,
        "k_buffer": _scattered(k[:cached], slots, 1, 3)[:, 0],
        "v_buffer": _scattered(values[:cached], slots, 1, 3)[:, 0],
        "kv_indptr": _ends(keys),
        "kv_indices": slots.to(torch.int64),
    }
    if extends:
        for name, x in (("k_extend", k), ("v_extend", values)):
            inputs[name] = x[cached:].to(torch.float32).to(q.dtype)
        inputs["qo_indptr"] = _ends(new)
    return inputs | ({"sinks": _sink(case, torch.float32)} if case.option("sink") else {})


def _triton_options(case: Case) -> dict[str, object]:
    options: dict[str, object] = {"sm_scale": LN2} if case.family == "exact" else {}
    if case.option("scales") != "none" and case.family != "exact":
        options |= {"k_scale": 0.37, "v_scale": 1.7}
    options |= {"logit_cap": float(str(case.option("cap")))} if case.option("cap") else {}
    return options | ({"sliding_window_size": int(str(case.option("window")))} if case.option("window") else {})


def _mla(case: Case) -> dict[str, Tensor]:
    """A cache of pages of 64 slots, or of option ``page``, and scales that are no powers of two. A tenth of the slots
    is absent; of option ``absent`` none, or all of the last token."""
    b, s, h, t, n = (case[name] for name in "bshtn")
    q, k, v = _operands(case, (b, s, h, RANK + ROPE), (n, 1, RANK + ROPE), (n, 1, RANK))
    size = int(str(case.option("page") or 64))
    cache = torch.full((-(-n // size) * size, ROW), 0x7F, dtype=torch.uint8, device="cpu")
    scales = data.scales(case.label("scales"), "randn", (n, RANK // TILE)) * UNIT_SCORES
    if case.family == "exact":
        scales = torch.ones_like(scales)
    cache[:n, :RANK] = k[:, 0, :RANK].view(torch.uint8)
    cache[:n, SCALES_AT:ROPE_AT] = scales.contiguous().view(torch.uint8)
    rope = k[:, 0, RANK:].to(torch.float32).to(torch.bfloat16)
    cache[:n, ROPE_AT:] = rope.contiguous().view(torch.uint8)
    indices = torch.from_numpy(case.stream("indices").integers(0, n, (b, s, t))).to(torch.int32)
    if case.option("absent") != "none":
        indices[torch.from_numpy(case.stream("absent").integers(0, 10, (b, s, t)) == 0)] = -1
    if case.option("absent") == "all":
        indices[-1, -1] = -1
    inputs = {"q": q, "k_cache": cache.reshape(-1, size, 1, ROW), "indices": indices}
    return inputs | ({"attn_sink": _sink(case, torch.float32)} if case.option("sink") else {})


def _mla_options(case: Case) -> dict[str, object]:
    return {"softmax_scale": LN2} if case.family == "exact" else {}


def _sage(case: Case) -> dict[str, Tensor]:
    """Codes of INT8 with a scale for every 16 queries and 128 keys; scales of values that are no powers of two."""
    b, s, n, h, g, d = (case[name] for name in "bsnhgd")
    q, k, v = _drawn(case, (b, s, h, d), (b, n, g, d), (b, n, g, d))
    exact = case.family == "exact"
    query, of_q = _int8(q, WARP, -(-s // BLOCK) * (BLOCK // WARP), exact)
    key, of_k = _int8(k, KEYS, -(-n // KEYS), exact)
    padded = np.zeros((b, -(-n // KEYS) * KEYS, g, d))
    padded[:, slots(n, torch.device("cpu")).numpy()] = v
    codes = data.encoded(np.ascontiguousarray(padded.transpose(0, 3, 2, 1)), torch.float8_e4m3fn)
    of_v = torch.ones(b, g, d, dtype=torch.float32, device="cpu")
    if not exact and case.option("scales") != "none":
        of_v = data.scales(case.label("value_scale"), "randn", (b, g, d)) * UNIT_SCORES
    scales = {"query_scale": of_q, "key_scale": of_k, "value_scale": of_v}
    return {"query": query, "key": key, "value": codes} | scales


def _int8(x: NDArray[Any], size: int, count: int, exact: bool) -> tuple[Tensor, Tensor]:
    """Codes of ``x`` ``[B, S, H, D]`` with a scale for every ``size`` rows, float32 ``[B, H, count]``; of integers with
    the scale 1."""
    batch, rows, heads, depth = x.shape
    padded = np.zeros((batch, count * size, heads, depth))
    padded[:, :rows] = x
    blocks = padded.reshape(batch, count, size, heads, depth)
    scale = np.maximum(np.abs(blocks).max(axis=(2, 4)), 1e-7) / 127.0
    scale = np.ones_like(scale) if exact else scale.astype(np.float32).astype(np.float64)
    codes = np.clip(np.rint(blocks / scale[:, :, None, :, None]), -127, 127)
    codes = codes.reshape(padded.shape)[:, :rows].astype(np.int8)
    return torch.from_numpy(codes), torch.from_numpy(scale.transpose(0, 2, 1).astype(np.float32).copy())


def _sage_options(case: Case) -> dict[str, object]:
    options: dict[str, object] = {"out_dtype": case.out_dtype}
    options |= {"is_causal": True} if case.option("causal") else {}
    return options | ({"sm_scale": LN2} if case.family == "exact" else {})


def _merge(case: Case) -> dict[str, Tensor]:
    """Log-sum-exps around each other; of option ``none`` some rows have no keys in one state or both: -inf, and
    inf in the second state, or the first."""
    m, h, d = case["m"], case["h"], case["d"]
    names, heads_first = MERGED[case.contract]
    inputs: dict[str, Tensor] = {}
    for number, (output, lse) in enumerate(zip(names[::2], names[1::2], strict=True)):
        drawn = case.stream(output).normals((m, h, d))
        x = torch.from_numpy(np.ones((m, h, d)) * (number + 1) if case.family == "ones" else drawn)
        sums = 3.0 * case.stream(lse).normals((m, h))
        if case.family == "far":
            sums += 90.0 * (2 * number - 1) * np.linspace(-1.0, 1.0, m)[:, None]
        inputs[output] = x.to(case.operand_dtypes[0])
        s = torch.from_numpy(sums).to(torch.float32)
        if case.option("none"):
            above = 0 if case.option("none") == "first" else 1  # the state that has +inf too
            rows = torch.from_numpy(case.stream(f"none of {lse}").integers(0, 4, (m, h)))
            s = s.masked_fill(rows == 0, -torch.inf).masked_fill(
                rows == 1, torch.inf if number == above else -torch.inf
            )
            inputs[output][torch.isinf(s)] = 7.0
        inputs[lse] = s.t().contiguous() if heads_first else s
    if case.out_dtype is torch.float8_e4m3fn:
        inputs["output_scale"] = torch.tensor([0.013], dtype=torch.float32, device="cpu")
    return inputs


def _merge_options(case: Case) -> dict[str, object]:
    return {"prefill_tokens_with_context": int(str(case.option("context")))} if case.option("context") else {}


MERGED = {
    "merge_attn_states": (("prefix_output", "prefix_lse", "suffix_output", "suffix_lse"), True),
    "merge_state_v2": (("v_a", "s_a", "v_b", "s_b"), False),
    "merge_state": (("v_a", "s_a", "v_b", "s_b"), False),
}
"""The inputs of each contract, and whether a log-sum-exp is ``[H, M]``."""


def _ids(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    head = f"{contract}/{grammar.dtypes[0]}/{grammar.schemes[0]}"
    first, *others = grammar.shapes
    for shape in others:
        yield f"{head}/{shape}/family=randn/seed=1"
    for key, values in grammar.options.items():
        for value in values:
            yield f"{head}/{first}/{key}={value}/family=randn/seed=1"
            yield f"{head}/{first}/{key}={value}/family={grammar.families[1]}/seed=1"
    for dtypes in grammar.dtypes[1:]:
        yield f"{contract}/{dtypes}/{grammar.schemes[0]}/{first}/family=randn/seed=1"
    for family in grammar.families:
        for seed in seeds(profile):
            yield f"{head}/{first}/family={family}/seed={seed}"


def _mha_ids(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """Parts of the keys in several tiles, and queries that see none of the keys, as well."""
    yield from _ids(contract, grammar, profile)
    head = f"{contract}/{grammar.dtypes[0]}/{grammar.schemes[0]}"
    yield f"{head}/b=1,s=4,n=450,h=2,g=1,d=64,v=64/splits=3/family=randn/seed=1"
    yield f"{head}/b=1,s=24,n=9,h=2,g=1,d=32,v=32/causal=1/family=randn/seed=1"


FAMILIES = ("randn", "ramp", "fall", "hot", "ones", "exact", "codes", "nan")

GRAMMARS = {
    "mha_fwd": Grammar(
        ("b", "s", "n", "h", "g", "d", "v"), ("e4m3xe4m3-bf16",), ("head",), FAMILIES, _mha, _mha_options,
        {"causal": ("1",), "window": ("40_0", "9_30"), "sink": ("1",), "used": ("1",), "scales": ("none",),
         "pages": ("16",), "splits": ("2", "3"), "cap": ("2",)},
        listed=_mha_ids,
        shapes=(
            "b=2,s=12,n=150,h=6,g=2,d=64,v=64", "b=1,s=1,n=300,h=8,g=2,d=128,v=128",
            "b=1,s=70,n=400,h=2,g=1,d=128,v=128", "b=1,s=33,n=130,h=3,g=3,d=96,v=96",
            "b=1,s=70,n=100,h=2,g=2,d=192,v=128", "b=1,s=65,n=129,h=1,g=1,d=256,v=256",
        ),
    ),
    "BatchPrefillWithRaggedKVCacheWrapper": Grammar(
        ("b", "m", "n", "h", "g", "d"), ("e4m3xe4m3-bf16", "e4m3xe4m3-f16"), ("head",), FAMILIES, _batch,
        _batch_options, {"causal": ("1",), "window": ("9",), "scales": ("none",)},
        listed=_ids,
        shapes=("b=2,m=12,n=150,h=4,g=2,d=64", "b=3,m=9,n=200,h=2,g=1,d=128", "b=1,m=17,n=140,h=2,g=2,d=256"),
    ),
    "BatchPrefillWithPagedKVCacheWrapper": Grammar(
        ("b", "m", "n", "h", "g", "d"), ("e4m3xe4m3-bf16", "e4m3xe4m3-f16"), ("head",), FAMILIES, _batch,
        _batch_options, {"causal": ("1",), "window": ("9",), "scales": ("none",), "page": ("1", "64")},
        listed=_ids,
        shapes=("b=2,m=12,n=150,h=4,g=2,d=64", "b=3,m=9,n=200,h=2,g=1,d=128", "b=1,m=17,n=140,h=2,g=2,d=256"),
    ),
    "unified_attention": Grammar(
        ("b", "m", "n", "h", "g", "d"), ("bf16xe4m3-bf16", "f16xe4m3-f16", "e4m3xe4m3-bf16"), ("tensor",), FAMILIES,
        _unified, _unified_options,
        {"window": ("9",), "sink": ("1",), "scales": ("none", "token"), "page": ("32",), "cap": ("2",)},
        listed=_ids, shapes=("b=2,m=5,n=130,h=6,g=2,d=64", "b=3,m=1,n=300,h=4,g=1,d=128", "b=1,m=9,n=40,h=2,g=2,d=96"),
    ),
    "decode_attention_fwd": Grammar(
        ("b", "n", "h", "g", "d", "v"), ("bf16xe4m3-bf16", "f16xe4m3-f16"), ("tensor",), FAMILIES, _triton,
        _triton_options, {"sink": ("1",), "scales": ("none",), "cap": ("2",)},
        listed=_ids,
        shapes=("b=2,n=150,h=6,g=2,d=64,v=64", "b=3,n=300,h=4,g=4,d=64,v=64", "b=1,n=70,h=16,g=1,d=288,v=256"),
    ),
    "extend_attention_fwd": Grammar(
        ("b", "m", "n", "h", "g", "d", "v"), ("bf16xe4m3-bf16", "f16xe4m3-f16"), ("tensor",), FAMILIES, _triton,
        _triton_options, {"window": ("9",), "sink": ("1",), "scales": ("none",), "cap": ("2",)},
        listed=_ids, shapes=("b=2,m=9,n=150,h=6,g=2,d=64,v=64", "b=3,m=1,n=60,h=4,g=4,d=64,v=64"),
    ),
    "flash_mla_with_kvcache": Grammar(
        ("b", "s", "h", "t", "n"), ("bf16xe4m3-bf16",), ("1x128",), FAMILIES, _mla, _mla_options,
        {"sink": ("1",), "absent": ("none", "all"), "page": ("16",)},
        listed=_ids, shapes=("b=1,s=3,h=64,t=64,n=100", "b=2,s=1,h=64,t=128,n=200", "b=1,s=1,h=128,t=64,n=64"),
    ),
    "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf": Grammar(
        ("b", "s", "n", "h", "g", "d"), ("i8xe4m3-bf16", "i8xe4m3-f16"), ("warp",), FAMILIES[:6], _sage, _sage_options,
        {"causal": ("1",), "scales": ("none",)},
        listed=_ids,
        shapes=("b=2,s=20,n=150,h=4,g=2,d=64", "b=1,s=70,n=300,h=2,g=1,d=128", "b=1,s=40,n=40,h=3,g=3,d=64"),
    ),
    "merge_attn_states": Grammar(
        ("m", "h", "d"), ("bf16xbf16-bf16", "f16xf16-f16", "f32xf32-f32", "bf16xbf16-e4m3"), ("row",),
        ("randn", "far", "ones"), _merge, _merge_options, {"none": ("1", "first"), "context": ("7", "3", "0")},
        listed=_ids, shapes=("m=9,h=4,d=64", "m=1,h=3,d=128", "m=33,h=2,d=40"),
    ),
    **{
        name: Grammar(
            ("m", "h", "d"), ("bf16xbf16-bf16", "f16xf16-f16", "f32xf32-f32"), ("row",), ("randn", "far", "ones"),
            _merge, _merge_options, {"none": ("1", "first")},
            listed=_ids, shapes=("m=9,h=4,d=64", "m=1,h=3,d=128", "m=33,h=2,d=40"),
        )
        for name in ("merge_state_v2", "merge_state")
    },
    "single_prefill_with_kv_cache": Grammar(
        ("m", "n", "h", "g", "d"), ("e4m3xe4m3-bf16", "e4m3xe4m3-f16"), ("head",), FAMILIES, _prefill, _prefill_options,
        {"causal": ("1",), "scales": ("none",)},
        listed=_ids,
        shapes=("m=40,n=150,h=4,g=2,d=64", "m=20,n=200,h=2,g=1,d=128", "m=17,n=140,h=1,g=1,d=256"),
    ),
}  # fmt: skip  # a table, one row a line
