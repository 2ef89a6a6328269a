"""Cases of attention logits, plain and paged, and of the split of their work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from oracle.errors import CaseError
from oracle.routines import data
from oracle.routines.case import Case, Grammar, no_options, seeds
from oracle.routines.mx_products.cases import E8M0_BYTES, ORDINARY, codes
from oracle.routines.mx_products.contract import UE8M0
from oracle.truth import layout

PAGE = 64  # keys of a block of the paged cache


def _mqa_logits(case: Case) -> dict[str, Tensor]:
    """Queries of H heads against N keys; windows [ks, ke) of every kind: empty, full, ragged."""
    m, n, h, d = case["m"], case["n"], case["h"], case["d"]
    of_q, of_k = case.operand_dtypes
    return {
        "q": data.operand(case.label("q"), case.family, m * h, d, dtype=of_q, side="a").reshape(m, h, d),
        "k": data.operand(case.label("k"), case.family, n, d, dtype=of_k, side="b"),
        "k_scale": data.scales(case.label("k_scale"), case.family, (n,)),
        "weights": _weights(case, m, h),
        **_windows(case, m, n),
    }


def _windows(case: Case, m: int, n: int) -> dict[str, Tensor]:
    ends = case.stream("windows").integers(0, n + 1, (2, m))
    start, stop = ends.min(axis=0), ends.max(axis=0)
    start[0], stop[0] = 0, n
    inputs = {"cu_seqlen_ks": start, "cu_seqlen_ke": stop}
    return {name: torch.from_numpy(x).to(torch.int32) for name, x in inputs.items()}


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


def _words(case: Case, name: str, rows: int, blocks: int) -> Tensor:
    """int32 ``[rows]`` of E8M0 bytes, poison in those of no block; of family ``nan`` one scale of the keys is NaN."""
    stream, part = case.stream(name), int(name != "q_sf")
    low, high = E8M0_BYTES.get(case.family, ORDINARY[UE8M0])[part]
    words = torch.full((rows, 4), 0xFF, dtype=torch.uint8, device="cpu")
    words[:, :blocks] = torch.from_numpy(stream.integers(low, high, (rows, blocks))).to(torch.uint8)
    if case.family == "nan" and part:
        words[int(stream.integers(0, rows, (1,))[0]), blocks - 1] = 0xFF
    return words.view(torch.int32)[:, 0]


def _fp4_queries(case: Case, rows: int) -> dict[str, Tensor]:
    """``q [rows * H, D / 2]`` and its words, flat."""
    h, d = case["h"], case["d"]
    if d % 32 or d > 128:
        raise CaseError(f"d={d} of {case.contract}: blocks of 32, at most four of them")
    if case.option("weights") and case.out_dtype is not torch.bfloat16:
        raise CaseError(f"{case.dtypes} with bf16 weights; the output is bf16 too")
    return {"q": codes(case, "q", 0, rows * h, d), "q_sf": _words(case, "q_sf", rows * h, d // 32)}


def _fp4_logits(case: Case) -> dict[str, Tensor]:
    """The windows and weights of the FP8 form; E2M1 codes with words of scales."""
    m, n, h, d = (case[name] for name in "mnhd")
    inputs = _fp4_queries(case, m)
    windows = _windows(case, m, n)
    return {
        "q": inputs["q"].reshape(m, h, d // 2),
        "q_sf": inputs["q_sf"].reshape(m, h),
        "k": codes(case, "k", 1, n, d),
        "k_sf": _words(case, "k_sf", n, d // 32),
        "weights": _fp4_weights(case, m, h),
        **windows,
    }


def _fp4_paged(case: Case) -> dict[str, Tensor]:
    """Pages in a shuffled order, each the codes of its keys, then their words."""
    b, t, n, h, d = (case[name] for name in "btnhd")
    inputs, page = _fp4_queries(case, b * t), int(case.option("page") or PAGE)
    pages = -(-n // page)
    k, words = codes(case, "k", 1, b * pages * page, d), _words(case, "k_sf", b * pages * page, d // 32)
    parts = (x.view(torch.uint8).reshape(b * pages, -1) for x in (k, words))
    return {
        "q": inputs["q"].reshape(b, t, h, d // 2),
        "q_sf": inputs["q_sf"].reshape(b, t, h),
        "kv_cache": torch.cat([*parts], dim=1).reshape(b * pages, page, 1, d // 2 + 4),
        "weights": _fp4_weights(case, b * t, h),
        "context_lens": _contexts(case, b, n, least=t),
        "block_tables": torch.from_numpy(case.stream("tables").order(b * pages)).to(torch.int32).reshape(b, pages),
    }


def _fp4_weights(case: Case, rows: int, heads: int) -> Tensor:
    weights = _weights(case, rows, heads)
    return weights.to(torch.bfloat16) if case.option("weights") else weights


def _fp4_options(case: Case) -> dict[str, object]:
    compact = {"max_seqlen_k": case["n"]} if case.option("compact") else {}
    return _clean(case) | {"out_dtype": case.out_dtype} | compact


def _clean(case: Case) -> dict[str, object]:
    return {"clean_logits": case.option("clean") == "1"}


def _weights(case: Case, rows: int, heads: int) -> Tensor:
    """Small integers keep an exact case exact."""
    label = case.label("weights")
    if case.family in ("exact", "ties"):
        return data.small_integers(label, (rows, heads), bound=8, dtype=torch.float32)
    return data.normal(label, (rows, heads), dtype=torch.float32)


def _ids(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    head = f"{contract}/{grammar.dtypes[0]}/{grammar.schemes[0]}"
    first, *shapes = grammar.shapes
    for shape in shapes:
        yield f"{head}/{shape}/family=randn/seed=1"
        yield f"{head}/{shape}/clean=1/family=randn/seed=1"
    for option in (f"{key}={value}" for key, values in grammar.options.items() for value in values if key != "clean"):
        half = head.replace("-f32", "-bf16") if option.startswith("weights") else head
        yield f"{half}/{first}/{option}/family=randn/seed=1"
        yield f"{half}/{first}/{option}/family=exact/seed=1"
    for dtypes in grammar.dtypes[1:]:
        yield f"{head.replace(grammar.dtypes[0], dtypes)}/{first}/family=randn/seed=1"
    for family in grammar.families:
        for seed in seeds(profile):
            yield f"{head}/{first}/family={family}/seed={seed}"


_KIND = (("e4m3xe4m3-f32",), ("tensor:token",), tuple(data.OPERAND_FAMILIES))
_EDGES = ("small", "large")
_CLEAN = {"clean": ("1",)}
_FP4 = (("e2m1xe2m1-f32", "e2m1xe2m1-bf16"), ("1x32",), ("randn", "exact", "codes", "zeros", "cancel", "wide", "nan"))
_OPTIONS = _CLEAN | {"weights": ("bf16",)}

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
    "fp8_fp4_mqa_logits": Grammar(
        ("m", "n", "h", "d"), *_FP4, _fp4_logits, _fp4_options, _OPTIONS | {"compact": ("1",)}, listed=_ids,
        shapes=("m=4,n=40,h=8,d=128", "m=1,n=33,h=32,d=64", "m=2,n=40,h=64,d=128"),
    ),
    "fp8_fp4_paged_mqa_logits": Grammar(
        ("b", "t", "n", "h", "d"), *_FP4, _fp4_paged, _fp4_options, _OPTIONS | {"page": ("32",)}, listed=_ids,
        shapes=("b=2,t=2,n=70,h=8,d=128", "b=1,t=1,n=64,h=32,d=64", "b=2,t=1,n=70,h=64,d=128"),
    ),
    "get_paged_mqa_logits_metadata": Grammar(
        ("b", "n"), ("i32",), ("-",), ("integers",),
        lambda case: {"context_lens": _contexts(case, case["b"], case["n"], least=0)}, no_options,
        shapes=("b=1,n=64", "b=7,n=5000", "b=200,n=900"),
    ),
}  # fmt: skip  # a table, one row a line
