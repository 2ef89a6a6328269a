"""Cases of batched, grouped and mixed products, and of DeepGEMM's other forms.

Edges by construction: of several groups one is empty, one has a single row (of K: a single block), one ends a row
before, at and behind a tile, and rows of no group stand last where the routine has such; K has tails where the routine
takes them; a square weight, whose transpose has the same shape; heads whose halves differ. A scale matrix that is
square, overflow and underflow of a store, and NaN in codes and scales come as in :mod:`oracle.routines.products.cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from oracle.errors import CaseError
from oracle.numbers.formats import decode
from oracle.routines import data
from oracle.routines.case import Case, Grammar, no_options, out_dtype, seeds, with_corners
from oracle.routines.products import cases
from oracle.routines.products.cases import GRAMMARS as PLAIN

HEADS = (128, 64, 64)
"""Columns of a head before its gap, in it and behind it; multiples of 64, as DeepGEMM stores them."""
BLOCK, ROW = "1x128:128x128", "token:channel"


# --- inputs -----------------------------------------------------------------------------------------------------


def _turned(build: Callable[[Case], dict[str, Tensor]], *names: str) -> Callable[[Case], dict[str, Tensor]]:
    """Operands with their last two axes exchanged: codes as views whose K is dense, scales contiguous."""

    def made(case: Case) -> dict[str, Tensor]:
        inputs = build(case)
        for name in names:
            inputs[name] = inputs[name].mT if name in ("a", "b") else inputs[name].mT.contiguous()
        return inputs

    return made


def _summand(case: Case, *shape: int) -> Tensor:
    """A float32 summand of the size of the sums; small integers where the sums are exact."""
    if case.family in ("exact", "ties"):
        return data.small_integers(case.label("c"), shape, bound=8, dtype=torch.float32)
    return data.normal(case.label("c"), shape, dtype=torch.float32)


def _with_summand(case: Case) -> dict[str, Tensor]:
    inputs = cases.product(case)
    return inputs if case.option("c") is None else inputs | {"c": _summand(case, case["m"], case["n"])}


def _k_grouped(case: Case) -> dict[str, Tensor]:
    """Groups of K (cut into whole blocks), 0, 128 and then any number of steps."""
    m, n, k, g = case["m"], case["n"], -(-case["k"] // 128) * 128, case["g"]
    drawn = (128 * case.stream("ks").integers(0, k // 128 + 1, (g,))).tolist()
    ks = [k, 0, 128, *drawn][:g]
    codes = {
        side: data.operand(case.label(side), case.family, rows, sum(ks), dtype=dtype, side=side)
        for side, rows, dtype in zip("ab", (m, n), case.operand_dtypes, strict=True)
    }
    scales = {
        f"{side}_scale": cases.scale(case, f"{side}_scale", part, rows, sum(ks))
        for part, (side, rows) in enumerate((("a", m), ("b", n)))
    }
    flat = {
        side: torch.cat([part.flatten() for part in x.view(torch.uint8).split_with_sizes(ks, dim=1)]).view(x.dtype)
        for side, x in codes.items()
    }
    return {**flat, **scales, "ks": torch.tensor(ks, dtype=torch.int32, device="cpu"), "c": _summand(case, g, m, n)}


def _einsum(case: Case) -> dict[str, Tensor]:
    m, n, k, h = case["m"], case["n"], case["k"], case["g"]
    inputs = cases.operands(case, m * h, h * n, k)
    return {
        "a": inputs["a"].reshape(m, h, k),
        "a_scale": cases.scale(case, "a_scale", 0, m * h, k).reshape(m, h, -1),
        "b": inputs["b"].reshape(h, n, k),
        "b_scale": cases.scale(case, "b_scale", 1, n, k, h),
    }


def _batched(case: Case) -> dict[str, Tensor]:
    """``B`` is the column-major view that the library takes."""
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    inputs = cases.operands(case, g * m, g * n, k)
    scales = {f"{side}_scale": cases.scale(case, f"{side}_scale", 0, m, k).flatten() for side in "AB"}
    return {"A": inputs["a"].reshape(g, m, k), "B": inputs["b"].reshape(g, n, k).mT, **scales}


def _spans(case: Case, unit: int = 1) -> list[tuple[int, int]]:
    """Runs of ``unit`` rows or multiples of it: of several experts the first has none and the second the fewest rows;
    the last eighth of the rows, where it has a unit, belongs to no expert."""
    m, g = case["m"], case["g"]
    if m < unit:
        raise CaseError(f"m={m} of {case.contract} leaves no run of {unit} rows")
    used = max(unit, m - m // 8) // unit
    ends = case.stream("runs").integers(min(1, used), used + 1, (g,))
    ends.sort()
    ends[-1] = used
    if g > 2:
        ends[:2] = 0, 1
    borders = [0, *(unit * ends).tolist()]
    return list(zip(borders, borders[1:], strict=False))


def _int32(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def _borders(case: Case, unit: int = 1) -> Tensor:
    return _int32([0, *(end for _, end in _spans(case, unit))])


def _sizes(case: Case) -> dict[str, Tensor]:
    spans = _spans(case)
    sizes = [[end - start, case["n"], case["k"]] for start, end in spans]
    return {"expert_offsets": _int32([start for start, _ in spans]), "problem_sizes": _int32(sizes)}


def _experts(case: Case) -> dict[str, Tensor]:
    """Codes of rows and of every expert's weight."""
    inputs = cases.operands(case, case["m"], case["g"] * case["n"], case["k"])
    return {"a": inputs["a"], "b": inputs["b"].reshape(case["g"], case["n"], case["k"])}


def _times_alpha(case: Case) -> dict[str, Tensor]:
    alpha = data.scales(case.label("alpha"), case.family, (1,))
    return {**_experts(case), "m_indptr": _borders(case), "alpha": alpha}


def _groupwise(case: Case) -> dict[str, Tensor]:
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    scales = {"a_scale": cases.scale(case, "a_scale", 0, m, k), "b_scale": cases.scale(case, "b_scale", 1, n, k, g)}
    return {**_experts(case), **scales, "m_indptr": _borders(case, 4)}


def _cutlass_grouped(case: Case) -> dict[str, Tensor]:
    """Scales in blocks, as vectors, or one for the rows and one for each expert."""
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    a, b = cases.scale(case, "scales_a", 0, m, k), cases.scale(case, "scales_b", 1, n, k, g)
    return {
        **_experts(case),
        "scales_a": a.reshape(-1, a.shape[-1]) if a.dim() > 1 else a[:, None],
        "scales_b": b if case.scheme == BLOCK else b.reshape(g, -1),
        **_sizes(case),
    }


def _int4(case: Case, rows: int, k: int, groups: int = 1) -> dict[str, Tensor]:
    """Every weight -8..7 equally often, scales of four binades that a second rounding moves; 0 to 4 and 1 where the
    sums are exact; products beyond 448 in the family of all codes."""
    values = case.stream("b_q").integers(-8, 8, (rows * groups, k))
    scales = torch.from_numpy(case.stream("b_group_scales").integers(0x28, 0x48, (groups, -(-k // 128), rows)))
    if case.family in ("exact", "ties"):
        exact = data.operand(case.label("b_q"), case.family, rows * groups, k, dtype=torch.float8_e4m3fn, side="b")
        q, scales = decode(exact).to(torch.int8), torch.full_like(scales, 0x38)
    else:
        q = torch.from_numpy(values).to(torch.int8)
    if case.family == "codes":
        scales = torch.from_numpy(case.stream("b_group_scales").integers(0x01, 0x7F, tuple(scales.shape)))
    return {"b_q": q.reshape(groups, rows, k), "b_group_scales": scales.to(torch.uint8).view(torch.float8_e4m3fn)}


def _mixed(case: Case) -> dict[str, Tensor]:
    m, n, k = case["m"], case["n"], case["k"]
    a = data.operand(case.label("a"), case.family, m, k, dtype=case.operand_dtypes[0], side="a")
    weight = {name: x[0] for name, x in _int4(case, n, k).items()}
    scales = {
        name: data.scales(case.label(name), case.family, (rows, 1))
        for name, rows in (("b_channel_scales", n), ("a_token_scales", m))
    }
    return {"a": a, **weight, **scales}


def _mixed_grouped(case: Case) -> dict[str, Tensor]:
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    a = data.operand(case.label("a"), case.family, m, k, dtype=case.operand_dtypes[0], side="a")
    channels = data.scales(case.label("b_channel_scales"), case.family, (g, n))
    tokens = data.scales(case.label("a_token_scales"), case.family, (m, 1))
    return {"a": a, **_int4(case, n, k, g), "b_channel_scales": channels, "a_token_scales": tokens, **_sizes(case)}


def _nibbles(case: Case) -> dict[str, Tensor]:
    """Every byte equally often."""
    return {"b": torch.from_numpy(case.stream("b").integers(0, 256, (case["m"], case["k"]))).to(torch.uint8)}


def _words(case: Case) -> dict[str, Tensor]:
    """Eight weights a word, the words of a row side by side."""
    if case["k"] % 8:
        raise CaseError(f"k={case['k']}: eight weights make a word; use a multiple of 8")
    byte = torch.from_numpy(case.stream("b").integers(0, 256, (case["n"], case["k"] // 2))).to(torch.uint8)
    return {"b": byte.view(torch.int32).t()}


def _scales(case: Case) -> dict[str, Tensor]:
    """Every code, of both signs; in its family a NaN."""
    x = data.operand(case.label("scales"), case.family, case["m"], case["k"], dtype=torch.float8_e4m3fn, side="a")
    return {"scales": x}


# --- ids of a profile -------------------------------------------------------------------------------------------


def _listed(
    contract: str, grammar: Grammar, profile: str, *, sizes: tuple[str, ...], of_families: str, option: str = ""
) -> Iterable[str]:
    """Ordinary data at ``sizes`` for every scheme; every family, with ``option``, and dtype at ``of_families``."""
    first = grammar.dtypes[0]
    for scheme in grammar.schemes:
        for size in sizes:
            yield f"{contract}/{first}/{scheme}/{size}/family=randn/seed=1"
    for family in grammar.families:
        for seed in seeds(profile):
            yield f"{contract}/{first}/{grammar.schemes[0]}/{of_families}/{option}family={family}/seed={seed}"
    for dtypes in grammar.dtypes[1:]:
        yield f"{contract}/{dtypes}/{grammar.schemes[0]}/{of_families}/family=randn/seed=2"


def _grammar(
    extents: tuple[str, ...],
    schemes: tuple[str, ...],
    build: Callable[[Case], dict[str, Tensor]],
    sizes: tuple[str, ...],
    of_families: str,
    *,
    out: tuple[str, ...] = ("bf16", "f16"),
    operands: tuple[str, ...] = ("e4m3xe4m3",),
    extra: tuple[str, ...] = (),
    option: str = "",
    **more: object,
) -> Grammar:
    dtypes = tuple(f"{pair}-{store}" for pair in operands[:1] for store in out)
    dtypes += tuple(f"{pair}-{out[0]}" for pair in operands[1:])
    head = f"{dtypes[0]}/{schemes[0]}"
    options = {"options": {option.partition("=")[0]: (option.rstrip("/").partition("=")[2],)}} if option else {}
    listed = partial(_listed, sizes=sizes, of_families=of_families, option=option)
    return Grammar(
        extents,
        dtypes,
        schemes,
        cases.FAMILIES,
        build,
        out_dtype,
        listed=listed,
        extra=tuple(text if "/" in text.partition("m=")[0] else f"{head}/{text}/family=randn/seed=1" for text in extra),
        edge_families=cases.EDGES,
        **{**options, **more},  # type: ignore[arg-type]
    )


MNK, MNKG = ("m", "n", "k"), ("m", "n", "k", "g")
BOTH = ("e4m3xe4m3", "e5m2xe4m3", "e4m3xe5m2")
DENSE = ("m=1,n=128,k=128", "m=33,n=192,k=640", "m=129,n=64,k=256", "m=5,n=640,k=640")
RUNS = ("m=8,n=64,k=128,g=1", "m=72,n=192,k=256,g=4", "m=148,n=128,k=640,g=3")
SMALL = "m=40,n=128,k=256,g=4"
RAGGED = ("m=72,n=136,k=208,g=3", "m=160,n=64,k=128,g=1")
WIDE = "e4m3xe4m3-f16/{}/m=9,n=136,k=256,g=2/family=wide/seed=1"
WIDE_TENSOR = (WIDE.format("tensor:tensor").replace("seed=1", "seed=4"),)
TINY = "e4m3xi4-bf16/token:channel/m=33,n=64,k=16{}/family=subnormal/seed=1"
"""So few steps of K that some rows have subnormal codes only."""

_PLAIN: Mapping[str, Grammar] = {
    **{
        f"fp8_gemm_{name}": _grammar(
            MNK, (BLOCK,), _turned(cases.product, *turned), DENSE, "m=17,n=256,k=256", out=("bf16", "f32"),
            extra=("m=9,n=136,k=200", "m=64,n=64,k=256", "m=128,n=64,k=128"),
        )
        for name, turned in (
            ("nn", ("b", "b_scale")), ("tn", ("a", "a_scale", "b", "b_scale")), ("tt", ("a", "a_scale")),
        )
    },
    "fp8_gemm_nt_1d1d": _grammar(
        MNK, ("1x128:1x128",), _with_summand, DENSE, "m=17,n=136,k=384", out=("f32",), operands=BOTH, option="c=f32/",
        extra=("m=9,n=136,k=200", "m=64,n=64,k=256", "m=9,n=136,k=200/c=f32"),
    ),
    "k_grouped_fp8_gemm_nt_contiguous": _grammar(
        MNKG, ("1x128:1x128",), _k_grouped,
        ("m=1,n=8,k=128,g=1", "m=64,n=72,k=256,g=4", "m=130,n=64,k=128,g=3", "m=33,n=200,k=640,g=5"),
        "m=17,n=72,k=384,g=3", out=("f32",), operands=BOTH,
    ),
    "m_grouped_fp8_gemm_nn_contiguous": replace(
        _grammar(MNKG, (BLOCK,), _turned(cases.grouped, "b", "b_scale"),
                 ("m=128,n=128,k=128,g=1", "m=384,n=192,k=256,g=4"), "m=384,n=128,k=256,g=3"),
        extra=("e4m3xe4m3-bf16/1x128:128x128/m=128,n=136,k=200,g=2/family=randn/seed=1",),
    ),
    "fp8_gemm_nt_skip_head_mid": replace(
        _grammar(MNK, (BLOCK,), cases.product, ("m=1,n=192,k=128", "m=33,n=192,k=384"), "m=17,n=384,k=256"),
        call=lambda case: out_dtype(case) | dict(zip(("left", "mid", "right"), HEADS, strict=True)),
        domain="n % 192 == 0",
    ),
    "fp8_einsum": _grammar(
        MNKG, (BLOCK,), _einsum, ("m=1,n=128,k=128,g=1", "m=33,n=136,k=384,g=3"), "m=17,n=128,k=256,g=2",
        out=("bf16",), extra=("m=9,n=136,k=200,g=2", "m=32,n=64,k=256,g=2"),
    ),
    "bmm_fp8": _grammar(
        MNKG, ("tensor:tensor",), _batched, ("m=1,n=64,k=128,g=1", "m=33,n=136,k=384,g=3", "m=130,n=64,k=640,g=2"),
        "m=17,n=128,k=256,g=2", operands=(*BOTH, "e5m2xe5m2"),
        extra=("m=9,n=136,k=200,g=2", "m=32,n=32,k=32,g=2", *WIDE_TENSOR),
    ),
    "grouped_mm_fp8": _grammar(
        MNKG, ("tensor:tensor",), _times_alpha, RUNS, SMALL, out=("bf16", "f16", "f32"),
        extra=(*RAGGED, *WIDE_TENSOR),
    ),
    "gemm_fp8_nt_groupwise": _grammar(
        MNK, (BLOCK, "128x128:128x128"), cases.product, DENSE, "m=17,n=256,k=384", operands=BOTH,
        extra=("m=9,n=136,k=200", "m=64,n=64,k=256", WIDE.format(BLOCK).replace(",g=2", ""),
               "e4m3xe4m3-bf16/128x128:128x128/m=260,n=64,k=384/family=randn/seed=1"),
    ),
    "group_gemm_fp8_nt_groupwise": _grammar(
        MNKG, (BLOCK,), _groupwise, RUNS, SMALL, operands=BOTH,
        extra=(*RAGGED, WIDE.format(BLOCK).replace("m=9", "m=12")),
    ),
    "batch_deepgemm_fp8_nt_groupwise": replace(
        PLAIN["fp8_m_grouped_gemm_nt_masked"],
        listed=partial(
            _listed, sizes=("m=5,n=192,k=256,g=4", "m=130,n=64,k=256,g=3"), of_families="m=17,n=128,k=256,g=4"
        ),
    ),
    "cutlass_blockwise_scaled_grouped_mm": _grammar(
        MNKG, (BLOCK,), _cutlass_grouped, RUNS, SMALL, extra=(*RAGGED, WIDE.format(BLOCK)),
    ),
    "cutlass_moe_mm": _grammar(
        MNKG, (ROW, "tensor:tensor"), _cutlass_grouped, RUNS, SMALL, extra=(*RAGGED, WIDE.format(ROW)),
    ),
    "cutlass_w4a8_mm": _grammar(
        MNK, (ROW,), _mixed, ("m=1,n=64,k=128", "m=33,n=136,k=384", "m=129,n=64,k=256"), "m=17,n=128,k=256",
        operands=("e4m3xi4",), domain="k % 128 == 0",
        extra=("m=64,n=64,k=256", "m=9,n=136,k=200", WIDE.format(ROW).replace(",g=2", "").replace("xe4m3", "xi4"),
               TINY.format("")),
    ),
    "cutlass_w4a8_moe_mm": _grammar(
        MNKG, (ROW,), _mixed_grouped, RUNS, SMALL, operands=("e4m3xi4",), domain="k % 128 == 0",
        extra=(*RAGGED, WIDE.format(ROW).replace("xe4m3", "xi4"), TINY.format(",g=2")),
    ),
    "unified_encode_int4b": Grammar(
        ("m", "k"), ("i4",), ("-",), ("codes",), _nibbles, no_options, shapes=("m=1,k=1", "m=16,k=32", "m=33,k=64"),
    ),
    "cutlass_encode_and_reorder_int4b": Grammar(
        ("n", "k"), ("i4",), ("-",), ("codes",), _words, no_options, shapes=("n=16,k=32", "n=48,k=96", "n=64,k=256"),
        domain="n % 16 == 0, k % 32 == 0",
    ),
    "cutlass_pack_scale_fp8": Grammar(
        ("m", "k"), ("e4m3",), ("-",), ("codes", "nan"), _scales, no_options,
        shapes=("m=1,k=1", "m=4,k=64", "m=3,k=130"),
    ),
}  # fmt: skip  # a table, one row a line

GRAMMARS = with_corners(
    _PLAIN,
    {
        **dict.fromkeys(("fp8_gemm_nn", "fp8_gemm_tn", "fp8_gemm_tt"), cases.CORNERS),
        "fp8_gemm_nt_1d1d": cases.CORNERS,
        "k_grouped_fp8_gemm_nt_contiguous": cases.RUN_CORNERS,
        "m_grouped_fp8_gemm_nn_contiguous": ("m=128,n=144,k=144,g=2", "m=128,n=16,k=528,g=2", "m=384,n=16,k=144,g=3"),
        "fp8_gemm_nt_skip_head_mid": ("m=9,n=384,k=144",),
        "gemm_fp8_nt_groupwise": (*cases.CORNERS, "128x128:128x128/m=144,n=16,k=144"),
        "fp8_einsum": (*cases.RUN_CORNERS, "m=16,n=32,k=144,g=2"),
        "cutlass_w4a8_mm": ("m=9,n=144,k=128", "m=16,n=16,k=128", "m=144,n=16,k=128"),
        "cutlass_w4a8_moe_mm": ("m=5,n=16,k=640,g=2", "m=144,n=16,k=128,g=2"),
        **dict.fromkeys(
            ("bmm_fp8", "grouped_mm_fp8", "group_gemm_fp8_nt_groupwise", "cutlass_moe_mm",
             "batch_deepgemm_fp8_nt_groupwise", "cutlass_blockwise_scaled_grouped_mm"), cases.RUN_CORNERS,
        ),
    },
)  # fmt: skip  # a table, one row a line
