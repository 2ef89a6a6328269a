"""Cases of whole layers and what belongs to them: quantised linear, routing, experts, activation, the difference
measure, the unit scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from oracle.errors import CaseError
from oracle.routines import data
from oracle.routines.case import DTYPES, Case, Grammar, every_shape, given_scale, out_dtype, seeds
from oracle.routines.moe.routers import GROUPED, ROWS, Row
from oracle.truth.routing import METHODS

DEAD = 2.0**-76  # block scales of dead experts lie near 1e-23 (FlashInfer issue 2595, vLLM issue 31394)
FAR = 30.0  # logits of this spread have sigmoids from 2**-100 to 1
LOW = 40.0  # logits below it have sigmoids of which a tanh in float32 leaves 0
BELOW = 3.0  # biases below it make every choice less than -1
QUANTISED = ("randn", "codes", "zeros", "outlier")  # families of experts whose input is quantised already
WEIGHT_FAMILIES = ("codes", "zeros")  # those of a high-precision input that name the weights' data as well


def _routing(case: Case) -> dict[str, Tensor]:
    (dtype,) = case.operand_dtypes
    inputs = {"logits": data.normal(case.label("logits"), (case["t"], case["e"]), dtype=dtype)}
    if case.option("bias") == "1":
        inputs["bias"] = data.normal(case.label("bias"), (case["e"],), dtype=torch.float32)
    return inputs


def _model_routing(case: Case) -> dict[str, Tensor]:
    """Logits that are equal, all negative, or far apart; Phi's lie close together, so that several share a weight."""
    logits = data.normal(case.label("logits"), (case["t"], case["e"]), dtype=torch.float32)
    if case.option("logits") == "ties":
        logits = logits.round()
    if case.option("logits") == "low":
        logits = logits - LOW
    if case.contract == "phimoe_routing_function":
        return {"gating_output": logits / 50 + 3 if case.option("logits") is None else logits}
    scale = data.scales(case.label("scale"), "randn", (case["e"],)) * 16
    return {"logits": logits, "per_expert_scale": scale.to(torch.bfloat16) if case.option("scale") == "bf16" else scale}


def _library_routing(case: Case) -> dict[str, Tensor]:
    """Of a router of a library: logits that are all negative, some NaN, equal, or far apart; a bias in their dtype."""
    (dtype,) = case.operand_dtypes
    shape = (case["t"], case["e"])
    logits = data.normal(case.label("logits"), shape, dtype=torch.float32)
    if case.option("logits") == "far":
        logits = logits * FAR - FAR
    elif case.option("logits") == "low":
        logits = logits - LOW
    elif case.option("logits") == "nan":
        logits[::2, :: max(1, case["e"] // 3)] = torch.nan
    elif case.option("logits") == "inf":
        logits[0], logits[-1, -1] = -torch.inf, torch.inf
    elif case.option("logits") == "ties":
        logits = logits.round()
    inputs = {"logits": logits.to(dtype)}
    if case.option("bias") == "1" or ROUTERS[case.contract].given:
        below = BELOW if case.option("bias") == "1" else 0.0
        bias = data.normal(case.label("bias"), (case["e"],), dtype=torch.float32) - below
        inputs["bias"] = bias.to(dtype if dtype in ROUTERS[case.contract].bias else torch.float32)
    if case.option("padding") == "1":
        inputs["is_padding"] = (torch.arange(case["t"], device="cpu") >= (case["t"] + 1) // 2).to(torch.uint8)
    return inputs


def _library_options(case: Case) -> dict[str, object]:
    row, groups = ROUTERS[case.contract], math.gcd(int(case.option("groups") or 1), case["e"])
    found: dict[str, object] = {"top_k": case["k"]}
    if row.methods:
        found["routing_method"] = case.option("method") or GROUPED
    if row.groups:
        found |= {"num_expert_group": groups, "topk_group": max(1, groups // 2)}
    if row.asks:
        found["renormalize"] = case.option("renormalize") == "1"
    if row.scales and case.option("factor"):
        found["routed_scaling_factor"] = float(case.option("factor") or 1)
    return found


def _library_grammar(row: Row) -> Grammar:
    options: dict[str, tuple[str, ...]] = {"logits": ("far", "low", "nan", "inf", "ties"), "bias": ("1",)}
    if row.padded:
        options["padding"] = ("1",)
    if row.groups:
        options["groups"] = ("4", "16")
    if row.methods:
        options["method"] = tuple(name for name in METHODS if name != GROUPED)
    if row.asks:
        options["renormalize"] = ("1",)
    if row.scales:
        options["factor"] = ("2.5",)
    return Grammar(
        ("t", "e", "k"),
        ("f32", "bf16", "f16"),
        ("-",),
        ("randn",),
        _library_routing,
        _library_options,
        options,
        listed=_library_ids,
        shapes=("t=5,e=8,k=2", "t=40,e=32,k=4"),
    )


def _library_ids(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """Every option alone; 512 experts of which 22 are chosen, and 160, which is no power of two."""
    yield from every_shape(contract, grammar, profile)
    row = ROUTERS[contract]
    for shape in ("t=9,e=512,k=22", "t=9,e=160,k=8"):
        for dtypes, option in (("bf16", ""), ("f32", "bias=1/"), ("bf16", "bias=1/")):
            yield f"{contract}/{dtypes}/-/{shape}/{option}family=randn/seed=1"
    yield f"{contract}/f32/-/t=40,e=32,k=4/logits=far,bias=1/family=randn/seed=1"
    if row.groups:
        for dtypes in ("f32", "bf16"):
            yield f"{contract}/{dtypes}/-/t=40,e=32,k=4/bias=1,groups=4,factor=2.5/family=randn/seed=1"
    if row.padded:
        yield f"{contract}/f32/-/t=40,e=32,k=4/bias=1,padding=1,renormalize=1,factor=2.5/family=randn/seed=1"
        yield f"{contract}/f32/-/t=40,e=32,k=4/logits=inf,renormalize=1/family=randn/seed=1"
        yield f"{contract}/f32/-/t=40,e=32,k=4/logits=low,renormalize=1/family=randn/seed=1"


def _routing_options(case: Case) -> dict[str, object]:
    groups = math.gcd(int(case.option("groups") or 1), case["e"])
    return {
        "router": case.option("router") or "deepseek_v3",
        "top_k": case["k"],
        "num_expert_group": groups,
        "topk_group": max(1, groups // 2),
        "renormalize": case.option("renormalize") == "1",
    }


def _experts(case: Case) -> dict[str, Tensor]:
    """Block scales and an intermediate quantised on the way, or one scale per expert and a given one between."""
    t, e, h, i, k = (case[name] for name in "tehik")
    wide, of_b = case.operand_dtypes[0] == torch.bfloat16, case.operand_dtypes[1]
    blocks = case.granularity[0] == "1x128"
    family = "randn" if wide and case.family not in WEIGHT_FAMILIES else case.family

    def scales(name: str, rows: int, cols: int) -> Tensor:
        shape = (e, *case.scaling(1).scale_shape((rows, cols))) if blocks else (e,)
        return data.scales(case.label(name), "randn", shape)

    def weight(name: str, rows: int, cols: int) -> Tensor:
        return data.operand(case.label(name), family, e * rows, cols, dtype=of_b, side="b").reshape(e, rows, cols)

    steps = 1 << 24 if wide else 256  # every significand of float32, or bfloat16 values only
    w2_scale = scales("w2_scale", h, i)
    if case.option("dead") == "1":
        w2_scale[::2] *= DEAD
    inputs = {
        **(_wide_tokens(case, blocks) if wide else _quantised_tokens(case)),
        "w13": weight("w13", 2 * i, h),
        "w13_scale": scales("w13_scale", 2 * i, h),
        "w2": weight("w2", h, i),
        "w2_scale": w2_scale,
        "topk_ids": _chosen(case, t, e, k),
        "topk_weights": torch.from_numpy(case.stream("topk_weights").integers(1, steps + 1, (t, k)) / steps).float(),
    }
    return inputs if blocks else inputs | {"a2_scale": given_scale(case, "a2_scale")}


def _quantised_tokens(case: Case) -> dict[str, Tensor]:
    t, h = case["t"], case["h"]
    if case.family not in QUANTISED:
        raise CaseError(
            f"family={case.family} is of high-precision inputs; {case.dtypes} has {', '.join(QUANTISED)}, or take "
            "bf16xe4m3-bf16"
        )
    return {
        "a": data.operand(case.label("a"), case.family, t, h, dtype=case.operand_dtypes[0], side="a"),
        "a_scale": data.scales(case.label("a_scale"), "randn", case.scaling().scale_shape((t, h))),
    }


def _wide_tokens(case: Case, blocks: bool) -> dict[str, Tensor]:
    """The layer quantises ``x`` itself: in groups, or with a given scale."""
    t, h, label, dtype = case["t"], case["h"], case.label("x"), case.operand_dtypes[0]
    if case.option("on_input") and case["k"] != 1:
        raise CaseError(f"k={case['k']}: weights on the input need one expert for each token; use k=1")
    if case.family == "zeros":
        x = data.operand(label, "zeros", t, h, dtype=dtype, side="a")
    else:
        x = data.activations(label, "randn" if case.family == "codes" else case.family, t, h, dtype=dtype)
    return {"x": x} if blocks else {"x": x, "a_scale": given_scale(case, "a_scale")}


def _chosen(case: Case, t: int, e: int, k: int) -> Tensor:
    """k different experts for each token; one choice in eight is -1, an expert that is not there.

    With ``first`` this rank's ``e`` experts are some of more: as many before them as it says and one after them.
    """
    stream, first = case.stream("topk_ids"), int(case.option("first") or 0)
    count = first + e + 1 if first else e
    ids = torch.stack([torch.from_numpy(stream.order(count)[:k]) for _ in range(t)])
    absent = torch.from_numpy(stream.integers(0, 8, (t, k)) == 0)
    absent[0, 0] = False
    if first:
        ids[0] = (ids[0] - ids[0, 0] + first) % count  # the first token has work here
    return ids.masked_fill(absent, -1).to(torch.int32)


def _experts_options(case: Case) -> dict[str, object]:
    """What the id says besides: rounding of the activation, its clamp, this rank's first expert, where weights go."""
    options = out_dtype(case)
    if (rounding := case.option("rounding")) is not None:
        options["activation_rounding"] = rounding
    if (limit := case.option("limit")) is not None:
        options["limit"] = float(limit)
    if (first := case.option("first")) is not None:
        options["first_expert"] = int(first)
    if case.option("on_input") is not None:
        options["apply_router_weight_on_input"] = True
    return options


def _tensor_experts(case: Case) -> dict[str, Tensor]:
    """``g`` experts in all, ``e`` of them here; every scale another. ``logits=ties`` has equal largest ones, ``far``
    such that weights are 0, tiny and 1."""
    t, g, e, h, i = (case[name] for name in "tgehi")
    wide, narrow = case.operand_dtypes
    codes = case.family == "codes"

    def weight(name: str, rows: int, cols: int) -> Tensor:
        family = "codes" if codes else "randn"
        return data.operand(case.label(name), family, e * rows, cols, dtype=narrow, side="b").reshape(e, rows, cols)

    return {
        "hidden_states": data.activations(case.label("x"), "randn" if codes else case.family, t, h, dtype=wide),
        "router_logits": _logits(case, t, g),
        "w13": weight("w13", 2 * i, h),
        "w13_scale": data.scales(case.label("w13_scale"), "randn", (e,)),
        "w13_input_scale": given_scale(case, "w13_input_scale"),
        "w2": weight("w2", h, i),
        "w2_scale": data.scales(case.label("w2_scale"), "randn", (e,)),
        "w2_input_scale": given_scale(case, "w2_input_scale"),
    }


def _logits(case: Case, t: int, g: int) -> Tensor:
    kind = case.option("logits")
    if kind == "ties":
        return data.small_integers(case.label("router_logits"), (t, g), bound=1, dtype=torch.bfloat16)
    if kind == "far":
        return data.normal(case.label("router_logits"), (t, g), dtype=torch.float32) * FAR - FAR
    return data.normal(case.label("router_logits"), (t, g), dtype=DTYPES[kind or "f32"])


def _tensor_experts_options(case: Case) -> dict[str, object]:
    options: dict[str, object] = {"ep_rank": int(case.option("rank") or 0)}
    return options | (
        {"weight_dtype": DTYPES[weight_dtype]} if (weight_dtype := case.option("weight")) is not None else {}
    )


def _gate_and_up(case: Case) -> dict[str, Tensor]:
    (dtype,) = case.operand_dtypes
    return {"x": data.activations(case.label("x"), case.family, case["m"], 2 * case["i"], dtype=dtype)}


def _gate_and_up_options(case: Case) -> dict[str, object]:
    options: dict[str, object] = {"round_silu": case.option("each") == "1"}
    limit = case.option("limit")
    return options if limit is None else options | {"limit": float(limit)}


# --- ids of a profile -------------------------------------------------------------------------------------

# Tokens, experts, H, I, experts of a token, of a layer that quantises its input; what each is for stands beside it.
EXPERT_SHAPES = (
    "t=1,e=2,h=128,i=128,k=1",  # one row, one block
    "t=3,e=7,h=384,i=256,k=2",  # experts with one row and with none; the input's scales are square (3 x 3)
    "t=160,e=1,h=128,i=128,k=1",  # an expert whose rows end inside a second tile of 128
)
EXPERT_FAMILY_SHAPE = "t=9,e=5,h=256,i=128,k=3"
EXPERT_OPTIONS = (
    (EXPERT_FAMILY_SHAPE, "rounding=PRODUCT"),
    (EXPERT_FAMILY_SHAPE, "first=2"),  # experts of other ranks on both sides
    (EXPERT_FAMILY_SHAPE, "limit=7"),
    (EXPERT_FAMILY_SHAPE, "out_dtype:float32,combine:WEIGHTED"),  # the two are one for a token of one expert
    (EXPERT_FAMILY_SHAPE, "out_dtype:float32,combine:RUNNING"),
    ("t=9,e=3,h=256,i=128,k=1", "dead=1"),
    ("t=9,e=3,h=256,i=128,k=1", "on_input=1"),
    ("t=9,e=3,h=256,i=128,k=1", "rounding=PRODUCT,limit=0.5,first=2,on_input=1"),
)
EXPERT_ELSEWHERE = "t=17,e=2,h=128,i=128,k=1/first=2"  # most tokens go to other ranks, NaN among them


def _layer_ids(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """Input that is quantised already, then input that the layer quantises."""
    quantised, wide = grammar.dtypes
    for scheme in grammar.schemes:
        head = f"{contract}/{quantised}/{scheme}"
        for shape in ("t=1,e=2,h=128,i=128,k=1", "t=9,e=5,h=256,i=128,k=3"):
            for family in ("randn", "codes", "zeros", "outlier"):
                for seed in seeds(profile):
                    yield f"{head}/{shape}/family={family}/seed={seed}"
    yield from _wide_ids(f"{contract}/{wide}", grammar, profile)


def _wide_ids(head: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """Shapes; every option, alone and together; every family. With a given scale: one shape and every family."""
    blocks, tensor = grammar.schemes
    for shape in EXPERT_SHAPES:
        yield f"{head}/{blocks}/{shape}/family=randn/seed=1"
    for shape, options in EXPERT_OPTIONS:
        for seed in seeds(profile):
            yield f"{head}/{blocks}/{shape}/{options}/family=randn/seed={seed}"
    for scheme in (blocks, tensor):
        for family in grammar.families:
            for seed in seeds(profile):
                yield f"{head}/{scheme}/{EXPERT_FAMILY_SHAPE}/family={family}/seed={seed}"
    yield f"{head}/{blocks}/{EXPERT_ELSEWHERE}/family=nan/seed=1"


def _tensor_layer_ids(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """An aligned and a padded intermediate size, one rank of several, every kind of logits."""
    head = f"{contract}/{grammar.dtypes[0]}/tensor:tensor"
    small, ranks, padded = "t=1,g=2,e=2,h=128,i=128", "t=33,g=9,e=3,h=128,i=64", "t=17,g=6,e=3,h=160,i=72"
    for family in grammar.families:
        for seed in seeds(profile):
            yield f"{head}/{padded}/family={family}/seed={seed}"
    yield f"{head}/{small}/family=randn/seed=1"
    for option in ("rank=1", "rank=2", "logits=bf16", "logits=f16", "logits=ties", "logits=far", "rank=1,logits=ties"):
        for seed in seeds(profile):
            yield f"{head}/{ranks}/{option}/family=randn/seed={seed}"


def _activation_ids(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """The first dtype on every family, clamped or not, rounded once or twice; the others on what rounds hardest."""
    for dtypes in grammar.dtypes:
        first = dtypes == grammar.dtypes[0]
        for option in ("", "each=1/", "limit=0.5/", "limit=7,each=1/"):
            for family in grammar.families if first else ("randn", "ties", "special", "nan"):
                for seed in seeds(profile):
                    yield f"{contract}/{dtypes}/-/m=33,i=96/{option}family={family}/seed={seed}"
    for shape in ("m=1,i=1", "m=3,i=1000"):
        yield f"{contract}/{grammar.dtypes[0]}/-/{shape}/family=randn/seed=1"


ROUTERS = {row.name: row for row in ROWS}
GRAMMARS: Mapping[str, Grammar] = {
    "moe_routing": Grammar(
        ("t", "e", "k"),
        ("f32", "bf16"),
        ("-",),
        ("randn",),
        _routing,
        _routing_options,
        {"router": ("llama4", "softmax"), "groups": ("4", "16"), "bias": ("1",), "renormalize": ("1",)},
        shapes=("t=1,e=8,k=1", "t=40,e=32,k=4"),
        extra_options=({"routed_scaling_factor": 2.5}, {"num_expert_group": 4, "topk_group": 2, "top_k": 2}),
    ),
    **{row.name: _library_grammar(row) for row in ROWS},
    "gemma4_routing_function_torch": Grammar(
        ("t", "e", "k"),
        ("f32",),
        ("-",),
        ("randn",),
        _model_routing,
        lambda case: {"top_k": case["k"]},
        {"logits": ("ties", "low"), "scale": ("bf16",)},
        shapes=("t=5,e=8,k=2", "t=40,e=32,k=4"),
    ),
    "phimoe_routing_function": Grammar(
        ("t", "e"),
        ("f32",),
        ("-",),
        ("randn",),
        _model_routing,
        lambda case: {},
        {"logits": ("ties", "low")},
        shapes=("t=5,e=8", "t=40,e=16"),
        domain="e >= 2",
    ),
    "moe_fp8": Grammar(
        ("t", "e", "h", "i", "k"),
        ("e4m3xe4m3-bf16", "bf16xe4m3-bf16"),
        ("1x128:128x128", "tensor:tensor"),
        (*QUANTISED, *(family for family in data.ACTIVATION_FAMILIES if family not in QUANTISED)),
        _experts,
        _experts_options,
        {"rounding": ("PRODUCT", "NONE"), "limit": ("0.5", "7"), "first": ("2",), "on_input": ("1",), "dead": ("1",)},
        domain="h % 128 == 0, i % 128 == 0",  # the layer quantises both in whole groups
        listed=_layer_ids,
        extra_options=({"limit": 0.05}, {"first_expert": 1}, {"apply_router_weight_on_input": True}),
    ),
    "apply_fi_trtllm_fp8_per_tensor_moe": Grammar(
        ("t", "g", "e", "h", "i"),
        ("bf16xe4m3-bf16",),
        ("tensor:tensor",),
        ("randn", "codes", "outlier", "amax", "ties", "special", "nan"),
        _tensor_experts,
        _tensor_experts_options,
        {"rank": ("1", "2"), "logits": ("bf16", "f16", "ties", "far"), "weight": ("f32", "bf16")},
        listed=_tensor_layer_ids,
        domain="h % 32 == 0",  # the kernel's row order takes whole blocks of 32 rows
    ),
    "silu_and_mul": Grammar(
        ("m", "i"),
        ("bf16", "f16", "f32"),
        ("-",),
        tuple(data.ACTIVATION_FAMILIES),
        _gate_and_up,
        _gate_and_up_options,
        {"limit": ("0.5", "7"), "each": ("1",)},
        listed=_activation_ids,
    ),
}
