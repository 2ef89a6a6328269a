"""Cases of weights after loading: experts of whole tiles, each scheme of scales, words along either axis."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oracle.routines import data
from oracle.routines.case import DTYPES, Case, Grammar

HALVES, ONE = ("bf16", "f16"), ("1",)


def _bytes(case: Case, name: str, low: int, high: int, *shape: int) -> Tensor:
    return torch.from_numpy(case.stream(name).integers(low, high, shape)).to(torch.uint8)


def _experts(case: Case) -> dict[str, Tensor]:
    """``scales`` of FP8: one of an expert, ``row``, ``block``; MX and NVFP4 have those of their format."""
    e, i, h = (case[name] for name in "eih")
    kind, inputs = case.contract, dict[str, Tensor]()
    for name, n, k in (("w13", 2 * i, h), ("w2", h, i)):
        if "fp4" in kind:
            inputs[name] = _bytes(case, name, 0, 256, e, n, k // 2)
        else:
            inputs[name] = _bytes(case, name, 0, 256, e, n, k).view(torch.float8_e4m3fn)
    for name, n, k in (("w13", 2 * i, h), ("w2", h, i)):
        label = f"{name}_scale"
        if "nvfp4" in kind:
            inputs[label] = _bytes(case, label, 1, 0x60, e, n, k // 16).view(torch.float8_e4m3fn)
        elif "mx" in kind:
            inputs[label] = _bytes(case, label, 115, 140, e, n, k // 32)
            if case.option("bytes") != "1":
                inputs[label] = inputs[label].view(torch.float8_e8m0fnu)
        else:
            shape = {"row": (e, n), "block": (e, -(-n // 128), -(-k // 128))}.get(case.option("scales") or "", (e,))
            inputs[label] = data.scales(case.label(label), "randn", shape)
    if "nvfp4" in kind:
        inputs |= {
            f"{name}_scale_2": data.scales(case.label(f"{name}_scale_2"), "randn", (e,)) for name in ("w13", "w2")
        }
    return inputs


def _layer(case: Case) -> dict[str, object]:
    options: dict[str, object] = {"params_dtype": DTYPES[case.dtypes]}
    return options | ({"block": case.option("scales") == "block"} if "prepare_fp8" in case.contract else {})


def _allspark(case: Case) -> dict[str, Tensor]:
    k, n = case["k"], case["n"]
    (dtype,) = case.operand_dtypes
    inputs = {"qweight": _bytes(case, "q", 0, 256, k, n), "scale": data.normal(case.label("s"), (1, n), dtype=dtype)}
    if case.option("zeros") == "1":
        inputs["zero_point"] = data.normal(case.label("z"), (1, n), dtype=dtype)
    return inputs


def _integers(case: Case) -> dict[str, Tensor]:
    name = "t" if "uint4b8" in case.contract else "w_q"
    shape = (case["k"], case["n"])
    return {name: torch.from_numpy(case.stream("q").integers(-(1 << 31), 1 << 31, shape)).to(torch.int32)}


def _words(case: Case) -> dict[str, object]:
    return {"num_bits": int(case.option("bits") or 4), "packed_dim": int(case.option("dim") or 0)}


def _shares(case: Case) -> dict[str, Tensor]:
    (dtype,) = case.operand_dtypes
    return {"s": (data.scales(case.label("s"), "randn", (case["k"], case["n"])).abs() + 2.0**-10).to(dtype)}


def _marlin(**options: tuple[str, ...]) -> Grammar:
    return Grammar(
        ("e", "i", "h"), HALVES, ("-",), ("randn",), _experts, _layer, options,
        shapes=("e=3,i=128,h=128", "e=1,i=64,h=128"), fixed=True,
    )  # fmt: skip  # one row


_KN, _FIELDS = ("k", "n"), {"bits": ("2", "8", "16"), "dim": ("1",)}
GRAMMARS: Mapping[str, Grammar] = {
    "prepare_fp8_moe_layer_for_marlin": Grammar(
        ("e", "i", "h"), HALVES, ("-",), ("randn",), _experts, _layer, {"scales": ("row", "block")},
        shapes=("e=3,i=128,h=128", "e=1,i=128,h=256"), fixed=True,
    ),
    "prepare_mxfp8_moe_layer_for_marlin": _marlin(bytes=ONE),
    "prepare_moe_mxfp4_layer_for_marlin": _marlin(bytes=ONE),
    "prepare_nvfp4_moe_layer_for_marlin": _marlin(),
    "allspark_repack_weight": Grammar(
        _KN, HALVES, ("-",), ("randn",), _allspark, lambda case: {}, {"zeros": ONE},
        shapes=("k=32,n=48", "k=16,n=160"), domain="k % 16 == 0, n % 16 == 0",
    ),
    "pack_quantized_values_into_int32": Grammar(
        _KN, ("i32",), ("-",), ("randn",), _integers, _words, _FIELDS, shapes=("k=32,n=16", "k=16,n=48"),
        domain="k % 16 == 0, n % 16 == 0",
    ),
    "unpack_quantized_values_into_int32": Grammar(
        _KN, ("i32",), ("-",), ("randn",), _integers, _words, _FIELDS, shapes=("k=3,n=5", "k=4,n=1"),
    ),
    "convert_packed_uint4b8_to_signed_int4_inplace": Grammar(
        _KN, ("i32",), ("-",), ("randn",), _integers, lambda case: {}, shapes=("k=3,n=5", "k=4,n=1"),
    ),
    "marlin_act_int8_process_scales": Grammar(
        _KN, HALVES, ("-",), ("randn",), _shares, lambda case: {}, shapes=("k=3,n=32", "k=1,n=64"),
    ),
}  # fmt: skip  # a table, one row a line
