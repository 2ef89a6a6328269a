"""Cases of attention logits, plain and paged, and of the split of their work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from oracle.routines import data
from oracle.routines.case import Case, Grammar, no_options, seeds
from oracle.truth import layout

PAGE = 64  # keys of a block of the paged cache


def _mqa_logits(case: Case) -> dict[str, Tensor]:
    """Queries of H heads against N keys; windows [ks, ke) of every kind: empty, full, ragged."""
    m, n, h, d = case["m"], case["n"], case["h"], case["d"]
    of_q, of_k = case.operand_dtypes
    stream = case.stream("windows")
    ends = stream.integers(0, n + 1, (2, m))
    start, stop = ends.min(axis=0), ends.max(axis=0)
    start[0], stop[0] = 0, n
    return {
        "q": data.operand(case.label("q"), case.family, m * h, d, dtype=of_q, side="a").reshape(m, h, d),
        "k": data.operand(case.label("k"), case.family, n, d, dtype=of_k, side="b"),
        "k_scale": data.scales(case.label("k_scale"), case.family, (n,)),
        "weights": _weights(case, m, h),
        "cu_seqlen_ks": torch.from_numpy(start).to(torch.int32),
        "cu_seqlen_ke": torch.from_numpy(stop).to(torch.int32),
    }


def _paged_logits(case: Case) -> dict[str, Tensor]:
    """B requests of T new tokens over pages in a shuffled order; contexts ragged, the first one full."""
    b, t, n, h, d = (case[name] for name in "btnhd")
    of_q, of_k = case.operand_dtypes
    pages = -(-n // PAGE)
    k = data.operand(case.label("k"), case.family, b * pages * PAGE, d, dtype=of_k, side="b")
    scale = data.scales(case.label("k_scale"), case.family, (b * pages, PAGE))
    return {
        "q": data.operand(case.label("q"), case.family, b * t * h, d, dtype=of_q, side="a").reshape(b, t, h, d),
        "kv_cache": layout.pack_kv_cache(k.reshape(b * pages, PAGE, d), scale),
        "weights": _weights(case, b * t, h),
        "context_lens": _contexts(case, b, n, least=t),
        "block_tables": torch.from_numpy(case.stream("tables").order(b * pages)).to(torch.int32).reshape(b, pages),
    }


def _contexts(case: Case, requests: int, longest: int, *, least: int) -> Tensor:
    lens = case.stream("context_lens").integers(min(least, longest), longest + 1, (requests,))
    lens[0] = longest
    return torch.from_numpy(lens).to(torch.int32)


def _clean(case: Case) -> dict[str, object]:
    return {"clean_logits": case.option("clean") == "1"}


def _weights(case: Case, rows: int, heads: int) -> Tensor:
    """Small integers keep an exact case exact."""
    label = case.label("weights")
    if case.family in ("exact", "ties"):
        return data.small_integers(label, (rows, heads), bound=8, dtype=torch.float32)
    return data.normal(label, (rows, heads), dtype=torch.float32)


def _ids(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    head = f"{contract}/e4m3xe4m3-f32/tensor:token"
    first, *shapes = grammar.shapes
    for shape in shapes:
        yield f"{head}/{shape}/family=randn/seed=1"
        yield f"{head}/{shape}/clean=1/family=randn/seed=1"
    for family in grammar.families:
        for seed in seeds(profile):
            yield f"{head}/{first}/family={family}/seed={seed}"


_KIND = (("e4m3xe4m3-f32",), ("tensor:token",), tuple(data.OPERAND_FAMILIES))
_EDGES = ("small", "large")
_CLEAN = {"clean": ("1",)}

GRAMMARS: Mapping[str, Grammar] = {
    "fp8_mqa_logits": Grammar(
        ("m", "n", "h", "d"), *_KIND, _mqa_logits, _clean, _CLEAN, listed=_ids,
        shapes=("m=7,n=128,h=32,d=128", "m=1,n=64,h=32,d=128", "m=5,n=256,h=64,d=128", "m=64,n=192,h=32,d=64"),
        edge_families=_EDGES,
    ),
    "fp8_paged_mqa_logits": Grammar(
        ("b", "t", "n", "h", "d"), *_KIND, _paged_logits, _clean, _CLEAN, listed=_ids,
        shapes=("b=3,t=1,n=150,h=32,d=128", "b=1,t=1,n=64,h=32,d=128", "b=4,t=2,n=300,h=64,d=128"),
        edge_families=_EDGES,
    ),
    "get_paged_mqa_logits_metadata": Grammar(
        ("b", "n"), ("i32",), ("-",), ("integers",),
        lambda case: {"context_lens": _contexts(case, case["b"], case["n"], least=0)}, no_options,
        shapes=("b=1,n=64", "b=7,n=5000", "b=200,n=900"),
    ),
}  # fmt: skip

GOLDENS = (
    "fp8_mqa_logits/e4m3xe4m3-f32/tensor:token/m=3,n=40,h=8,d=64/family=randn/seed=7",
    "fp8_mqa_logits/e4m3xe4m3-f32/tensor:token/m=3,n=40,h=8,d=64/clean=1/family=codes/seed=7",
    "fp8_paged_mqa_logits/e4m3xe4m3-f32/tensor:token/b=2,t=1,n=64,h=8,d=64/family=codes/seed=7",
    "fp8_mqa_logits/e4m3xe4m3-f32/tensor:token/m=64,n=192,h=32,d=64/family=randn/seed=7",  # kept as digests
)
