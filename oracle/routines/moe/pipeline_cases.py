"""Cases of the layers of :mod:`oracle.routines.moe.pipelines`: one grammar, whose inputs are those of the row.

``ids`` says who gets tokens: ``one`` gives the first expert none, the second one row and the last all others; ``map=1``
names experts by a map that exchanges them and leaves some to other ranks; ``first`` holds experts of other ranks on
both sides. Absent experts are -1. The family ``nan`` has NaN and infinity in the input of some tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from oracle.errors import CaseError
from oracle.routines import data
from oracle.routines.case import DTYPES, Case, Grammar, given_scale, seeds, with_corners
from oracle.routines.moe.pipelines import CONTRACTS, Pipeline, Sharing
from oracle.truth.layout import ceil_div

DEAD = 2.0**-76  # block scales of dead experts lie near 1e-23 (FlashInfer issue 2595, vLLM issue 31394)
MULTIPLIER = 4096.0  # brings a stream's scales (around 2**-8) to where ordinary values fill the range of E4M3
UNSCALED = 256.0  # the scales of a weight hold those of an input that has none


def _inputs(case: Case) -> dict[str, Tensor]:
    row = CONTRACTS[case.contract].row
    t, e, h, i = (case[name] for name in "tehi")
    inputs = _tokens(case, row, t, h)
    for name, rows, columns in (("w13", 2 * i, h), ("w2", h, i)):
        inputs[name] = _weight(case, row, name, (e, rows, columns))
        inputs[f"{name}_scale"] = data.scales(case.label(f"{name}_scale"), "randn", _scale_shape(row, e, rows, columns))
    if row.quantise is None and "a_scale" not in inputs:
        inputs["w13_scale"] /= UNSCALED
    if case.option("dead") == "1":
        inputs["w13_scale"][-1] *= DEAD
        inputs["w2_scale"][::2] *= DEAD
    inputs |= _given(case, row, e, h, i)
    return inputs | (_routed(case) if row.routed else chosen(case))


def _tokens(case: Case, row: Pipeline, t: int, h: int) -> dict[str, Tensor]:
    if row.quantise is not None:
        return {"x": data.activations(case.label("x"), case.family, t, h, dtype=torch.bfloat16)}
    family = case.family if case.family in ("randn", "outlier", "nan") else "codes"
    inputs = {"a": data.operand(case.label("a"), family, t, h, dtype=torch.float8_e4m3fn, side="a")}
    if row.weights is Sharing.BLOCK:
        inputs["a_scale"] = data.scales(case.label("a_scale"), "randn", (t, ceil_div(h, 128)))
    return inputs


def _weight(case: Case, row: Pipeline, name: str, shape: tuple[int, int, int]) -> Tensor:
    if row.weights is Sharing.GROUP:
        return torch.from_numpy(case.stream(name).integers(-8, 8, shape)).to(torch.int8)
    e, rows, columns = shape
    codes = data.operand(case.label(name), "randn", e * rows, columns, dtype=torch.float8_e4m3fn, side="b")
    return codes.reshape(shape)


def _scale_shape(row: Pipeline, e: int, rows: int, columns: int) -> tuple[int, ...]:
    return {
        Sharing.EXPERT: (e,),
        Sharing.CHANNEL: (e, rows),
        Sharing.GROUP: (e, rows, ceil_div(columns, 128)),
        Sharing.BLOCK: (e, ceil_div(rows, 128), ceil_div(columns, 128)),
    }[row.weights]


def _given(case: Case, row: Pipeline, e: int, h: int, i: int) -> dict[str, Tensor]:
    """Static scales and multipliers, such that ordinary values fill the range of E4M3."""
    if row.weights is Sharing.GROUP:
        inputs = {}
        for n, size in ((1, h), (2, i)):
            multiplier = data.scales(case.label(f"prequant{n}"), "randn", (size,)) * MULTIPLIER
            inputs[f"prequant{n}"] = multiplier.to(torch.bfloat16)
            inputs[f"alpha{n}"] = data.scales(case.label(f"alpha{n}"), "randn", (e,)) * 64
        return inputs
    if row.static:
        return {name: given_scale(case, name) for name in ("a1_scale", "a2_scale")}
    if row.multiplied:
        return {"fc2_act_scale": given_scale(case, "fc2_act_scale") * 256}
    return {"up_scale": data.scales(case.label("up_scale"), "randn", (e,)) / 16} if row.apart else {}


def _routed(case: Case) -> dict[str, Tensor]:
    """Logits of all experts; ``logits=ties`` has equal ones."""
    count, t = _everywhere(case), case["t"]
    if case["k"] > count:
        raise CaseError(f"k={case['k']}: there are {count} experts; use k={count} or less")
    kind = case.option("logits") or "f32"
    if kind == "ties":
        logits = data.small_integers(case.label("logits"), (t, count), bound=2, dtype=torch.bfloat16)
    else:
        logits = data.normal(case.label("logits"), (t, count), dtype=DTYPES[kind])
    if case.option("bias") != "1":
        return {"logits": logits}
    return {"logits": logits, "bias": data.normal(case.label("bias"), (count,), dtype=torch.float32)}


def _everywhere(case: Case) -> int:
    """Experts of all ranks."""
    first = int(case.option("first") or 0)
    return 2 * first + case["e"]


def chosen(case: Case) -> dict[str, Tensor]:
    t, e, k, stream = case["t"], case["e"], case["k"], case.stream("topk_ids")
    count = 2 * e if case.option("map") == "1" else _everywhere(case)
    if k > count:
        raise CaseError(f"k={k}: there are {count} experts; use k={count} or less")
    ids = torch.stack([torch.from_numpy(stream.order(count)[:k]) for _ in range(t)])
    absent = torch.from_numpy(stream.integers(0, 8, (t, k)) == 0)
    absent[0, 0] = False
    first = int(case.option("first") or 0)
    ids[0] = (ids[0] - ids[0, 0] + first) % count  # the first token has work here
    inputs = {}
    if case.option("ids") == "one":
        ids = torch.full((t, k), -1, dtype=torch.int64, device="cpu")
        ids[:, 0] = e - 1
        ids[0, 0] = 1
    elif case.option("map") == "1":
        known = torch.full((count,), -1, dtype=torch.int32, device="cpu")
        here = torch.from_numpy(case.stream("expert_map").order(count)[:e])
        known[here] = torch.arange(e, dtype=torch.int32, device="cpu").flip(0)
        ids[0] = (ids[0] - ids[0, 0] + here[0]) % count
        inputs["expert_map"] = known
    weights = torch.from_numpy(case.stream("topk_weights").integers(1, 257, (t, k)) / 256).float()
    return inputs | {"topk_ids": ids.masked_fill(absent, -1).to(torch.int32), "topk_weights": weights}


def layer_options(case: Case) -> dict[str, object]:
    options: dict[str, object] = {}
    if (first := case.option("first")) is not None:
        options["first_expert"] = int(first)
    if case.option("on_input") is not None:
        options["apply_router_weight_on_input"] = True
    if (combine := case.option("combine")) is not None:
        options["combine"] = combine
    if case.contract in CONTRACTS and CONTRACTS[case.contract].row.routed:
        method = case.option("method") or "DeepSeekV3"
        options |= {"routing_method": method, "top_k": case["k"], "weight_dtype": DTYPES[case.option("kept") or "bf16"]}
        if method == "DeepSeekV3":
            groups = int(case.option("groups") or 1)
            options |= {"n_group": groups, "topk_group": max(1, groups // 2), "routed_scaling_factor": 2.5}
    return options


METHODS = (
    "Default",
    "Renormalize",
    "Llama4",
    "RenormalizeNaive",
    "TopK",
    "SigmoidRenorm",
    "MiniMax2",
    "Sigmoid",
    "TopKSigmoid",
)


SCHEMES = {
    Sharing.EXPERT: "tensor:tensor",
    Sharing.CHANNEL: "token:channel",
    Sharing.BLOCK: "1x128:128x128",
    Sharing.GROUP: "tensor:1x128",
}


def _listed(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """Few quick cases, since a layer is large: ordinary data, NaN and experts of other ranks, uneven experts. The rest
    is of the full profile, and of faults."""
    row, head = CONTRACTS[contract].row, _head(contract, grammar)
    for shape, options, family in _quick(row):
        yield f"{head}/{shape}/{options}family={family}/seed=1"
    if profile == "full":
        yield from (f"{contract}/{rest}" for rest in grammar.extra)
        for seed in seeds(profile)[1:]:
            for family in grammar.families:
                yield f"{head}/{_shape(row)}/family={family}/seed={seed}"


def _head(contract: str, grammar: Grammar) -> str:
    return f"{contract}/{grammar.dtypes[0]}/{grammar.schemes[0]}"


def _shape(row: Pipeline, *, k: int = 2, e: int = 3) -> str:
    """Whole groups of 128 where scales have groups."""
    h, i = (128, 128) if row.weights in (Sharing.BLOCK, Sharing.GROUP) else (64, 32)
    return f"t=4,e={e},h={h},i={i},k={k}"


def _quick(row: Pipeline) -> Iterable[tuple[str, str, str]]:
    usual = _shape(row)
    yield usual, "", "randn"
    yield usual, "first=2/", "nan"
    if row.routed:
        yield _shape(row, e=4), "groups=2,bias=1/", "randn"
    else:
        yield usual, "ids=one/", "randn"


def _extra(row: Pipeline, head: str) -> Iterable[str]:
    """What the full profile has beside: one row, every option, every routing method."""
    usual, one = _shape(row), _shape(row, k=1)
    small = usual.replace("t=4,e=3", "t=1,e=2").replace("k=2", "k=1")
    words = [small, f"{usual}/first=2", usual.replace("h=128", "h=256").replace("h=64", "h=80")]
    if row.routed:
        words += [f"{usual}/kept=f32", f"{usual}/method=Renormalize,logits=ties", f"{usual}/method=MiniMax2,bias=1"]
        words += [f"{one if method == 'Llama4' else usual}/method={method}" for method in METHODS]
    if row.mapped:
        words += [f"{usual}/map=1", f"{one}/on_input=1"]
    if row.weights is Sharing.BLOCK:
        words.append(f"{usual}/dead=1")
    words += [f"{_shape(row, k=4, e=5)}/combine={way.name}" for way in row.ways if len(row.ways) > 1]
    yield from (f"{head}/{rest}/family=randn/seed=1" for rest in words)
    if row.quantise is None:
        yield f"{head}/{usual.replace('t=4', 't=16')}/family=nan/seed=1"


def _grammar(row: Pipeline) -> Grammar:
    options: dict[str, tuple[str, ...]] = {"first": ("2",), "dead": ("1",)}
    if row.routed:
        options |= {"method": METHODS, "groups": ("2",), "bias": ("1",), "logits": ("bf16", "ties"), "kept": ("f32",)}
    else:
        options |= {"ids": ("one",)}
    if row.mapped:
        options |= {"map": ("1",), "on_input": ("1",)}
    if len(row.ways) > 1:
        options |= {"combine": tuple(way.name for way in row.ways)}
    wide = ("randn", "outlier", "nan") if row.quantise is None else ("randn", "ties", "special", "nan")
    first = "e4m3" if row.quantise is None else "bf16"
    second = "i4" if row.weights is Sharing.GROUP else "e4m3"
    dtypes, scheme = f"{first}x{second}-bf16", SCHEMES[row.weights]
    step = 128 if row.weights in (Sharing.BLOCK, Sharing.GROUP) else 16
    return Grammar(
        ("t", "e", "h", "i", "k"),
        (dtypes,),
        (scheme,),
        wide,
        _inputs,
        layer_options,
        options,
        listed=_listed,
        domain=f"h % {step} == 0, i % {step} == 0, h <= 512, i <= 256, t <= 256",
        extra=tuple(_extra(row, f"{dtypes}/{scheme}")),
    )


_PLAIN: Mapping[str, Grammar] = {name: _grammar(contract.row) for name, contract in CONTRACTS.items()}


def _corners(grammar: Grammar) -> tuple[str, ...]:
    """Experts of two blocks, a rank whose first expert is not 0, and a map of experts."""
    blocks = "128" in grammar.schemes[0]
    small = "t=4,e=3,h=128,i=128,k=2" if blocks else "t=4,e=3,h=64,i=32,k=2"
    several = ("t=3,e=2,h=256,i=128,k=2",) if blocks else ()
    return (*several, f"{small}/first=2", *((f"{small}/map=1",) if "map" in grammar.options else ()))


GRAMMARS = with_corners(
    _PLAIN, {name: _corners(g) for name, g in _PLAIN.items() if g.extents == ("t", "e", "h", "i", "k")}
)


MANY = tuple(
    f"{_head(name, grammar)}/{_shape(contract.row, k=8, e=256)}/family=randn/seed=1"
    for (name, grammar), contract in zip(GRAMMARS.items(), CONTRACTS.values(), strict=True)
)
"""256 experts, eight for each token: in no profile, since their weights take seconds to make."""
