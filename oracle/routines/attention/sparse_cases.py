"""Cases of attention over chosen keys, one pool of pages or two, absent slots, blocks that lie anywhere; and of queries
and keys with scales of blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oracle.numbers.formats import E2M1
from oracle.numbers.rounding import Overflow, Rounding, encode
from oracle.routines import data
from oracle.routines.attention.cases import LN2, _coded, _drawn, _ends, _lengths, _sink
from oracle.routines.attention.sparse import WIDTH
from oracle.routines.case import Case, Grammar
from oracle.routines.kv_cache.newer import NOPE, ROPE, SCALES, TILE, TOKEN, v4_places
from oracle.routines.kv_cache.writers import columns, rows
from oracle.routines.mx.contract import pack

FAMILIES = ("randn", "ramp", "fall", "hot", "ones", "exact", "nan")


def _pool(case: Case, codes: Tensor, name: str, size: int) -> Tensor:
    """Pages of ``size`` tokens with the keys ``codes`` ``[N, 512]`` of E4M3, the last 64 columns in bfloat16; what
    holds no token is NaN."""
    n = len(codes)
    pages = -(-n // size)
    memory = torch.full((pages, size * (TOKEN + SCALES) + 64), 0x7F, dtype=torch.uint8, device="cpu")
    raw = memory.flatten()
    first, scales = v4_places(columns(n), size, memory.shape[1])
    raw[rows(first, columns(NOPE))] = codes[:, :NOPE].view(torch.uint8)
    rope = codes[:, NOPE:].to(torch.float32).to(torch.bfloat16)
    raw[rows(first, NOPE + columns(2 * ROPE))] = rope.contiguous().view(torch.uint8)
    low, high = (127, 128) if case.family == "exact" else (125, 129)
    exponents = torch.from_numpy(case.stream(f"scales of {name}").integers(low, high, (n, NOPE // TILE)))
    raw[rows(scales, columns(NOPE // TILE))] = exponents.to(torch.uint8)
    return raw.reshape(memory.shape)


def _slots(case: Case, name: str, n: int, count: int) -> Tensor:
    """Slots of each token, int32 ``[t, count]``, below ``n``, a tenth of them -1; with ``absent=none`` none, with
    ``absent=all`` also all of the last token."""
    t, absent = case["t"], case.option("absent")
    slots = torch.from_numpy(case.stream(name).integers(0, n, (t, count))).to(torch.int32)
    if absent != "none":
        slots[torch.from_numpy(case.stream(f"absent of {name}").integers(0, 10, (t, count)) == 0)] = -1
    if absent == "all":
        slots[-1] = -1
    return slots


def _dsv4(case: Case) -> dict[str, Tensor]:
    t, h, c, n = (case[name] for name in "thcn")
    drawn = _drawn(case, (t, h, WIDTH), (n, 1, WIDTH), (n, 1, 16))
    q, k, _ = _coded(case, *drawn)
    size, half = int(case.option("page") or 64), max(n // 2, 1)
    inputs = {"query": q}
    if case.option("pools") == "2":
        window = max(n - half, 1)  # a single token lies in both pools
        inputs |= {"swa_kv_cache": _pool(case, k[:window, 0], "window", size)}
        inputs |= {"sparse_indices": _slots(case, "window", window, c)}
        inputs |= {"compressed_kv_cache": _pool(case, k[n - half :, 0], "rest", size)}
        inputs |= {"extra_sparse_indices": _slots(case, "rest", half, c // 2 + 1)}
    else:
        inputs |= {"swa_kv_cache": _pool(case, k[:, 0], "window", size), "sparse_indices": _slots(case, "window", n, c)}
    return inputs | ({"sinks": _sink(case, torch.float32)} if case.option("sink") else {})


def _msa(case: Case) -> dict[str, Tensor]:
    """Sequences of up to ``n`` keys; every query sees its sequence's first block and, where they lie before its place,
    others."""
    b, s, n, h, g, c = (case[name] for name in "bsnhgc")
    size, depth = case["p"], case["d"]
    lengths, queries = _lengths(case, "keys", b, n, least=s), _lengths(case, "queries", b, s, least=1)
    causal, tokens, longest = case.option("causal") == "1", sum(queries), -(-n // size)
    drawn = _drawn(case, (tokens, h, depth), (b * longest * size, g, depth), (b * longest * size, g, depth))
    q, k, v = _coded(case, *drawn)
    order = torch.from_numpy(case.stream("pages").order(b * longest + 1)).to(torch.int64)
    inputs = {"q": q}
    for name, x in (("k", k), ("v", v)):
        pages = torch.full((b * longest + 1, size, g, depth), 0x7F, dtype=torch.uint8, device="cpu")
        pages[order[:-1]] = x.view(torch.uint8).reshape(-1, size, g, depth)
        inputs[name] = pages.transpose(1, 2).contiguous().view(torch.float8_e4m3fn)
    table, row = order[:-1].reshape(b, longest).to(torch.int32), 0
    blocks = torch.full((g, tokens, c), -1, dtype=torch.int64, device="cpu")
    for keys, count in zip(lengths, queries, strict=True):
        for i in range(count):
            last = (keys - count + i if causal else keys - 1) // size
            for head in range(g):
                others = 1 + case.stream(f"blocks of {row}.{head}").order(last)[: c - 1]
                chosen = torch.tensor([0, *sorted(others.tolist())], dtype=torch.int64, device="cpu")
                blocks[head, row, : len(chosen)] = chosen
            row += 1
    return inputs | {
        "q2k_indices": blocks.to(torch.int32),
        "cu_seqlens_q": _ends(queries),
        "page_table": table,
        "seqused_k": torch.tensor(lengths, dtype=torch.int32, device="cpu"),
    }


def _msa_options(case: Case) -> dict[str, object]:
    options: dict[str, object] = {"causal": True} if case.option("causal") else {}
    options |= {"v_global_scale": 0.75} if case.option("factor") else {}
    return options | ({"softmax_scale": LN2} if case.family == "exact" else {})


def _blockscaled(case: Case) -> dict[str, Tensor]:
    b, s, n, h, g, d = (case[name] for name in "bsnhgd")
    codes, values = case.operand_dtypes
    q, k, v = _drawn(case, (b, s, h, d), (b, n, g, d), (b, n, g, d))
    inputs = {"v": torch.from_numpy(v).to(values)}
    for name, x in (("q", q), ("k", k)):
        if codes is torch.uint8:
            nibbles = data.encoded(x * 2, torch.float8_e4m3fn).to(torch.float32).clamp(-6, 6)
            fours = encode(nibbles.to(torch.float64), E2M1, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE)
            inputs[name] = pack(torch.nn.functional.pad(fours, (0, d % 2)).flatten(0, -2)).reshape(*x.shape[:-1], -1)
            scales = torch.from_numpy(case.stream(f"{name}_sf").integers(0x28, 0x38, (*x.shape[:-1], -(-d // 16))))
            inputs[f"{name}_sf"] = scales.to(torch.uint8).view(torch.float8_e4m3fn)
        else:
            inputs[name] = data.encoded(x, torch.float8_e4m3fn)
            scales = torch.from_numpy(case.stream(f"{name}_sf").integers(125, 129, (*x.shape[:-1], -(-d // 32))))
            inputs[f"{name}_sf"] = scales.to(torch.uint8)
    return inputs


def _blockscaled_options(case: Case) -> dict[str, object]:
    options: dict[str, object] = {"is_causal": True} if case.option("causal") else {}
    return options | (
        {"scale_q": 0.5, "scale_k": 1.25, "scale_v": 3.0, "scale_o": 0.7} if case.option("scales") else {}
    )


GRAMMARS: Mapping[str, Grammar] = {
    "trtllm_batch_decode_sparse_mla_dsv4": Grammar(
        ("t", "h", "c", "n"), ("bf16xe4m3-bf16",), ("1x64",), FAMILIES, _dsv4,
        lambda case: {"block_size": int(case.option("page") or 64)}
        | ({"bmm1_scale": LN2} if case.family == "exact" else {}),
        {"sink": ("1",), "absent": ("none", "all"), "pools": ("2",), "page": ("16", "2")},
        shapes=("t=3,h=16,c=64,n=100", "t=1,h=64,c=128,n=200", "t=2,h=8,c=9,n=40"),
    ),
    "cute_dsl_fmha_blockscaled_prefill": Grammar(
        ("b", "s", "n", "h", "g", "d"), ("e4m3xbf16", "e4m3xf16", "u8xbf16"), ("block",),
        ("randn", "ramp", "fall", "hot", "ones"), _blockscaled, _blockscaled_options,
        {"causal": ("1",), "scales": ("1",)},
        shapes=("b=2,s=5,n=40,h=4,g=2,d=64", "b=1,s=1,n=70,h=2,g=1,d=128"), domain="d % 32 == 0, s <= n",
    ),
    "msa_sparse_attention": Grammar(
        ("b", "s", "n", "h", "g", "c", "p", "d"), ("bf16xe4m3-bf16", "f16xe4m3-f16"), ("block",), FAMILIES, _msa,
        _msa_options, {"causal": ("1",), "factor": ("1",)},
        shapes=("b=2,s=3,n=70,h=4,g=2,c=2,p=16,d=64", "b=1,s=1,n=300,h=2,g=1,c=2,p=128,d=128"),
        domain="h % g == 0, s <= n",
    ),
}  # fmt: skip  # a table, one row a line
