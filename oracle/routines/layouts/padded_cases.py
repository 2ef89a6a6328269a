"""Cases of padded NVFP4 weights: sizes that are multiples already, and that are not; rows that all differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oracle.routines import data
from oracle.routines.case import Case, Grammar


def _bytes(case: Case, name: str, *shape: int) -> Tensor:
    return torch.from_numpy(case.stream(name).integers(1, 255, shape)).to(torch.uint8)


def _experts(case: Case) -> dict[str, Tensor]:
    e, i, h = (case[name] for name in "eih")
    rows = i if case.option("gate") == "0" else 2 * i
    inputs = {"w13": _bytes(case, "w13", e, rows, h // 2), "w2": _bytes(case, "w2", e, h, i // 2)}
    for name, n, k in (("w13_scale", rows, h), ("w2_scale", h, i)):
        inputs[name] = (_bytes(case, name, e, n, k // 16) % 127).view(torch.float8_e4m3fn)
    if "prepare" in case.contract:
        inputs["a13_scale"] = data.scales(case.label("a13"), "randn", (e, 1 if case.option("one") == "1" else 2))
        inputs["a2_scale"] = data.scales(case.label("a2"), "randn", (e,))
    return inputs


def _aligned(case: Case) -> dict[str, object]:
    least: dict[str, object] = {
        "min_alignment": int(case.option("least") or ("128" if "intermediate" in case.contract else "256"))
    }
    if "hidden" in case.contract:
        return least
    return {"min_alignment": int(case.option("least") or 64), "is_act_and_mul": case.option("gate") != "0"}


_EIH, _FP4 = ("e", "i", "h"), ("e2m1",)
GRAMMARS: Mapping[str, Grammar] = {
    "align_fp4_moe_weights_for_fi": Grammar(
        _EIH, _FP4, ("-",), ("randn",), _experts, _aligned, {"gate": ("0",), "least": ("16", "128")},
        shapes=("e=2,i=48,h=32", "e=1,i=64,h=16"), domain="i % 16 == 0, h % 16 == 0",
    ),
    "align_trtllm_fp4_moe_hidden_dim_for_fi": Grammar(
        _EIH, _FP4, ("-",), ("randn",), _experts, _aligned, {"least": ("16", "64")},
        shapes=("e=2,i=32,h=48", "e=1,i=16,h=256"), domain="i % 16 == 0, h % 16 == 0",
    ),
    "pad_nvfp4_weight_for_cutlass": Grammar(
        ("m", "k"), _FP4, ("-",), ("randn",), lambda case: {"weight": _bytes(case, "w", case["m"], case["k"] // 2)},
        lambda case: {"alignment": int(case.option("alignment") or 32)}, {"alignment": ("64",)},
        shapes=("m=33,k=48", "m=64,k=64", "m=5,k=2"), domain="k % 2 == 0",
    ),
    "pad_nvfp4_activation_for_cutlass": Grammar(
        ("m", "k"), _FP4, ("-",), ("randn",), lambda case: {"x_fp4": _bytes(case, "x", case["m"], case["k"] // 2)},
        lambda case: {"weights_padding_bytes": int(case.option("more") or 0)}, {"more": ("8", "3")},
        shapes=("m=7,k=48", "m=1,k=32"), domain="k % 2 == 0",
    ),
    "prepare_nvfp4_moe_layer_for_fi_or_cutlass": Grammar(
        _EIH, _FP4, ("-",), ("randn",), _experts, lambda case: {"shared": case.option("shared") == "1"},
        {"shared": ("1",), "one": ("1",)}, shapes=("e=3,i=64,h=48", "e=1,i=128,h=128"), fixed=True,
    ),
    "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl": Grammar(
        _EIH, _FP4, ("-",), ("randn",), _experts, lambda case: {}, {"one": ("1",)},
        shapes=("e=3,i=128,h=48", "e=1,i=64,h=128"), fixed=True,
    ),
}  # fmt: skip  # a table, one row a line
