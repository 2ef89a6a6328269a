"""Cases of whole layers and what belongs to them: quantised linear, routing, experts, activation, the difference
measure, the unit scale."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oracle.errors import CaseError
from oracle.routines import data
from oracle.routines.case import BLOCK, DTYPES, Case, Grammar, no_options, out_dtype

FAR = 30.0  # logits of this spread have sigmoids from 2**-100 to 1
QUANTISED = ("randn", "codes", "zeros", "outlier")  # families of experts whose input is quantised already
WEIGHT_FAMILIES = ("codes", "zeros")  # those of a high-precision input that name the weights' data as well
STATIC_GAIN = 16.0  # brings a stream's scales (around 2**-8) to where ordinary values fill the range of E4M3


def _linear(case: Case) -> dict[str, Tensor]:
    """``static`` gives the scale of the input, ``tensor`` and ``token`` leave it to the layer."""
    m, n, k = case["m"], case["n"], case["k"]
    wide, narrow = case.operand_dtypes
    of_a, of_b = case.granularity
    inputs = {
        "input": data.activations(case.label("input"), case.family, m, k, dtype=wide),
        "weight": data.operand(case.label("weight"), "randn", n, k, dtype=narrow, side="b").t(),
        "weight_scale": data.scales(case.label("weight_scale"), "randn", (n,) if of_b == "channel" else (1,)),
    }
    if of_a == "static":
        inputs["input_scale"] = _given_scale(case, "input_scale")
    if (bias := case.option("bias")) is not None:
        inputs["bias"] = data.normal(case.label("bias"), (n,), dtype=DTYPES[bias])
    return inputs


def _linear_options(case: Case) -> dict[str, object]:
    return out_dtype(case) | {"use_per_token_if_dynamic": case.granularity[0] == "token"}


def _routing(case: Case) -> dict[str, Tensor]:
    (dtype,) = case.operand_dtypes
    inputs = {"logits": data.normal(case.label("logits"), (case["t"], case["e"]), dtype=dtype)}
    if case.option("bias") == "1":
        inputs["bias"] = data.normal(case.label("bias"), (case["e"],), dtype=torch.float32)
    return inputs


def _routing_options(case: Case) -> dict[str, object]:
    groups = int(case.option("groups") or 1)
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
        shape = (e, -(-rows // BLOCK), -(-cols // BLOCK)) if blocks else (e,)
        return data.scales(case.label(name), "randn", shape)

    def weight(name: str, rows: int, cols: int) -> Tensor:
        return data.operand(case.label(name), family, e * rows, cols, dtype=of_b, side="b").reshape(e, rows, cols)

    steps = 1 << 24 if wide else 256  # every significand of float32, or bfloat16 values only
    inputs = {
        **(_wide_tokens(case, blocks) if wide else _quantised_tokens(case, blocks)),
        "w13": weight("w13", 2 * i, h),
        "w13_scale": scales("w13_scale", 2 * i, h),
        "w2": weight("w2", h, i),
        "w2_scale": scales("w2_scale", h, i),
        "topk_ids": _chosen(case, t, e, k),
        "topk_weights": torch.from_numpy(case.stream("topk_weights").integers(1, steps + 1, (t, k)) / steps).float(),
    }
    return inputs if blocks else inputs | {"a2_scale": _given_scale(case, "a2_scale")}


def _quantised_tokens(case: Case, blocks: bool) -> dict[str, Tensor]:
    t, h = case["t"], case["h"]
    if case.family not in QUANTISED:
        raise CaseError(
            f"family={case.family} is of high-precision inputs; {case.dtypes} has {', '.join(QUANTISED)}, or take "
            "bf16xe4m3-bf16"
        )
    shape = (t, -(-h // BLOCK)) if blocks else (1,)
    return {
        "a": data.operand(case.label("a"), case.family, t, h, dtype=case.operand_dtypes[0], side="a"),
        "a_scale": data.scales(case.label("a_scale"), "randn", shape),
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
    return {"x": x} if blocks else {"x": x, "a_scale": _given_scale(case, "a_scale")}


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
        "w13_input_scale": _given_scale(case, "w13_input_scale"),
        "w2": weight("w2", h, i),
        "w2_scale": data.scales(case.label("w2_scale"), "randn", (e,)),
        "w2_input_scale": _given_scale(case, "w2_input_scale"),
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
    kept = case.option("weight")
    return options if kept is None else options | {"weight_dtype": DTYPES[kept]}


def _gate_and_up(case: Case) -> dict[str, Tensor]:
    (dtype,) = case.operand_dtypes
    return {"x": data.activations(case.label("x"), case.family, case["m"], 2 * case["i"], dtype=dtype)}


def _gate_and_up_options(case: Case) -> dict[str, object]:
    options: dict[str, object] = {"round_silu": case.option("each") == "1"}
    limit = case.option("limit")
    return options if limit is None else options | {"limit": float(limit)}


def _anything(case: Case) -> dict[str, Tensor]:
    (dtype,) = case.operand_dtypes
    return {"x": data.activations(case.label("x"), case.family, case["m"], case["k"], dtype=dtype)}


def _given_scale(case: Case, name: str) -> Tensor:
    return data.scales(case.label(name), "randn", (1,)) * STATIC_GAIN


def _two(case: Case) -> dict[str, Tensor]:
    """``y`` is ``x`` with a small error in every element, and a tenth of the elements unrelated."""
    (dtype,) = case.operand_dtypes
    m, k = case["m"], case["k"]
    x = data.activations(case.label("x"), case.family, m, k, dtype=dtype)
    other = data.activations(case.label("y"), case.family, m, k, dtype=dtype)
    apart = torch.from_numpy(case.stream("apart").integers(0, 10, (m, k)) == 0)
    return {"x": x, "y": torch.where(apart, other, x)}


def _flags(case: Case) -> dict[str, Tensor]:
    """Row ``i`` holds the six lowest bits of ``i``: 64 rows are the whole table. Only ROCm has a row-wise kernel."""
    names = (
        "cutlass_fp8_supported",
        "per_tensor_weights",
        "per_tensor_activations",
        "use_per_token_if_dynamic",
        "rocm",
        "rowwise",
    )
    rows = torch.arange(case["r"], device="cpu")
    flags = {name: (rows >> bit) & 1 for bit, name in enumerate(names)}
    return flags | {"rowwise": flags["rowwise"] & flags["rocm"]}


GRAMMARS: Mapping[str, Grammar] = {
    "Fp8LinearOp": Grammar(
        ("m", "n", "k"),
        ("bf16xe4m3-bf16", "f16xe4m3-f16", "f32xe4m3-f32"),
        ("static:tensor", "tensor:tensor", "token:channel", "tensor:channel"),
        tuple(data.ACTIVATION_FAMILIES),
        _linear,
        _linear_options,
        {"bias": ("bf16", "f32")},
    ),
    "moe_routing": Grammar(
        ("t", "e", "k"),
        ("f32", "bf16"),
        ("-",),
        ("randn",),
        _routing,
        _routing_options,
        {"router": ("llama4", "softmax"), "groups": ("4",), "bias": ("1",), "renormalize": ("1",)},
    ),
    "moe_fp8": Grammar(
        ("t", "e", "h", "i", "k"),
        ("e4m3xe4m3-bf16", "bf16xe4m3-bf16"),
        ("1x128:128x128", "tensor:tensor"),
        (*QUANTISED, *(family for family in data.ACTIVATION_FAMILIES if family not in QUANTISED)),
        _experts,
        _experts_options,
        {"rounding": ("PRODUCT", "NONE"), "limit": ("0.5", "7"), "first": ("2",), "on_input": ("1",)},
    ),
    "apply_fi_trtllm_fp8_per_tensor_moe": Grammar(
        ("t", "g", "e", "h", "i"),
        ("bf16xe4m3-bf16",),
        ("tensor:tensor",),
        ("randn", "codes", "outlier", "amax", "ties", "special", "nan"),
        _tensor_experts,
        _tensor_experts_options,
        {"rank": ("1", "2"), "logits": ("bf16", "f16", "ties", "far"), "weight": ("f32", "bf16")},
    ),
    "silu_and_mul": Grammar(
        ("m", "i"),
        ("bf16", "f16", "f32"),
        ("-",),
        tuple(data.ACTIVATION_FAMILIES),
        _gate_and_up,
        _gate_and_up_options,
        {"limit": ("0.5", "7"), "each": ("1",)},
    ),
    "maybe_create_device_identity": Grammar(("m", "k"), ("bf16", "f32"), ("-",), ("randn",), _anything, no_options),
    "calc_diff": Grammar(("m", "k"), ("f32", "bf16"), ("-",), ("randn", "heavy"), _two, no_options),
    "dispatch_w8a8_scaled_mm": Grammar(("r",), ("i64",), ("-",), ("integers",), _flags, no_options),
}
