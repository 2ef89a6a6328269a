"""Cases of int8: quantisers on every family, products whose sums pass 2^24, and wrap where they are made to.

``large`` products have codes of one sign, so that int32 sums pass 2^24 and float32 rounds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from oracle.routines import data
from oracle.routines.case import DTYPES, Case, Grammar

FAMILIES = ("randn", "ties", "heavy", "special", "nan", "outlier")


def _values(case: Case) -> dict[str, Tensor]:
    """``mode``: ``static`` has a scale of a power of two (ties), ``azp`` and a zero point."""
    (dtype,), mode = case.operand_dtypes, case.option("mode")
    x = data.activations(case.label("x"), case.family, case["m"], case["k"], dtype=dtype)
    if case.family == "ties" or mode == "row":
        x = x + 0.75  # least and largest of a row are not opposite
    inputs = {"x": x}
    if mode in ("static", "azp"):
        inputs["scale"] = torch.tensor([2.0**-4 if case.family == "ties" else 0.037], dtype=torch.float32, device="cpu")
    if mode == "azp":
        inputs["azp"] = torch.tensor([-17], dtype=torch.int32, device="cpu")
    return inputs


def _symmetric(case: Case) -> dict[str, object]:
    return {"symmetric": case.option("mode") not in ("azp", "row")}


def _group(case: Case) -> dict[str, object]:
    return {"group_size": int(case.option("group") or 128)}


def _product(case: Case) -> dict[str, Tensor]:
    m, n, k = (case[name] for name in "mnk")
    low = 90 if case.family == "large" else -128
    a, b = (
        torch.from_numpy(case.stream(name).integers(low, 128, shape)).to(torch.int8)
        for name, shape in (("a", (m, k)), ("b", (k, n)))
    )
    rows, columns = case.granularity
    inputs = {"a": a, "b": b}
    inputs["scale_a"] = data.scales(case.label("scale_a"), "randn", (m if rows == "token" else 1, 1))
    inputs["scale_b"] = data.scales(case.label("scale_b"), "randn", (1, n if columns == "channel" else 1))
    sums = b.to(torch.int32).sum(dim=0, dtype=torch.int32)
    if case.option("azp") == "token":
        inputs["azp"] = torch.from_numpy(case.stream("azp").integers(-128, 128, (m,))).to(torch.int32)
        inputs["azp_adj"] = sums
    else:
        inputs["azp_adj"] = sums * 11
    if case.option("bias") == "1":
        inputs["bias"] = data.normal(case.label("bias"), (n,), dtype=case.out_dtype)
    return inputs


def _codes(case: Case, name: str, low: int, high: int, *shape: int) -> Tensor:
    return torch.from_numpy(case.stream(name).integers(low, high, shape)).to(torch.int8)


def _of_blocks(case: Case) -> dict[str, Tensor]:
    m, n, k, block = *(case[name] for name in "mnk"), int(case.option("block") or 128)
    low = 90 if case.family == "large" else -128
    return {
        "A": _codes(case, "a", low, 128, m, k),
        "B": _codes(case, "b", low, 128, n, k),
        "As": data.scales(case.label("As"), "randn", (m, -(-k // block))),
        "Bs": data.scales(case.label("Bs"), "randn", (-(-n // block), -(-k // block))),
    }


def _blocks(case: Case) -> dict[str, object]:
    block = int(case.option("block") or 128)
    return {"block_n": block, "block_k": block, "output_dtype": DTYPES[case.dtypes.partition("-")[2]]}


def _qserve(case: Case) -> dict[str, Tensor]:
    """Scales and zero points keep every weight within int8."""
    m, n, k = (case[name] for name in "mnk")
    inputs = {"in_feats": _codes(case, "a", 90 if case.family == "large" else -128, 128, m, k)}
    inputs["kernel"] = _codes(case, "b", -128, 128, n, k // 2)
    if "group" in case.contract:
        inputs["zeros"] = _codes(case, "z", -60, 8, k // 128, n)
        inputs["scales_i8"] = _codes(case, "s", 1, 8, k // 128, n)
    sizes = {"wscales": n, "ascales": m} | ({} if "group" in case.contract else {"w_szs": n, "a_ssums": m})
    return inputs | {
        name: (data.scales(case.label(name), "randn", (size,)) * 2.0**-4).to(torch.float16)
        for name, size in sizes.items()
    }


def _heads(case: Case, name: str) -> Tensor:
    """``[b, s, h, d]`` of the family; ``edge=zero`` has zeros in the first element of every row."""
    (dtype,), shape = case.operand_dtypes, tuple(dict(case.extents).values())
    x = data.activations(case.label(name), case.family, math.prod(shape[:-1]), shape[-1], dtype=dtype).view(shape)
    if case.option("edge") == "zero":
        x[..., 0] = 0.0
    return x


def _smoothed(case: Case) -> dict[str, Tensor]:
    (dtype,) = case.operand_dtypes
    return {"x": _heads(case, "x"), "mean": data.normal(case.label("mean"), tuple(case[n] for n in "bhd"), dtype=dtype)}


def _block(case: Case) -> dict[str, object]:
    words = {"block_size": int(case.option("block") or 64)}
    if case.contract == "quant_per_warp_int8_cuda":
        words["warp_block_size"] = int(case.option("warp") or 16)
    scale = {"sm_scale": 0.18033688} if case.option("sm") else {}
    return {**words, **scale}


SHAPES = ("b=2,s=150,h=3,d=64", "b=1,s=130,h=2,d=128", "b=1,s=1,h=1,d=8")
GRAMMARS: Mapping[str, Grammar] = {
    "quant_per_block_int8_cuda": Grammar(
        ("b", "s", "h", "d"), ("bf16", "f16"), ("-",), FAMILIES, lambda case: {"x": _heads(case, "x")}, _block,
        {"block": ("128",), "sm": ("1",)}, shapes=SHAPES, domain="d % 8 == 0, d <= 128",
    ),
    "quant_per_block_int8_fuse_sub_mean_cuda": Grammar(
        ("b", "s", "h", "d"), ("bf16", "f16"), ("-",), FAMILIES, _smoothed, _block,
        {"block": ("128",)}, shapes=SHAPES, domain="d % 8 == 0, d <= 128",
    ),
    "quant_per_warp_int8_cuda": Grammar(
        ("b", "s", "h", "d"), ("bf16", "f16"), ("-",), FAMILIES, lambda case: {"x": _heads(case, "x")}, _block,
        {"block": ("128",), "warp": ("32",)}, shapes=SHAPES, domain="d % 8 == 0, d <= 128",
    ),
    "per_channel_fp8": Grammar(
        ("b", "s", "g", "d"), ("bf16", "f16"), ("-",), FAMILIES, lambda case: {"v": _heads(case, "v")},
        lambda case: {"scale_max": float(case.option("most") or 448)}, {"most": ("2.25",), "edge": ("zero",)},
        shapes=("b=2,s=150,g=3,d=64", "b=1,s=64,g=2,d=128", "b=1,s=1,g=1,d=8"), domain="d % 8 == 0, d <= 128",
    ),
    "w8a8_block_int8_matmul": Grammar(
        ("m", "n", "k"), ("i8xi8-f16", "i8xi8-bf16", "i8xi8-f32"), ("-",), ("randn", "large"), _of_blocks, _blocks,
        {"block": ("64",)}, shapes=("m=5,n=192,k=256", "m=3,n=16,k=96"),
    ),
    "qserve_w4a8_per_chn_gemm": Grammar(
        ("m", "n", "k"), ("i8xi8-f16",), ("-",), ("randn", "large"), _qserve, lambda case: {},
        shapes=("m=5,n=64,k=128", "m=3,n=32,k=96"), domain="n % 32 == 0, k % 32 == 0",
    ),
    "qserve_w4a8_per_group_gemm": Grammar(
        ("m", "n", "k"), ("i8xi8-f16",), ("-",), ("randn", "large"), _qserve, lambda case: {},
        shapes=("m=5,n=64,k=256", "m=3,n=32,k=128"), domain="n % 32 == 0, k % 128 == 0",
    ),
    "scaled_int8_quant": Grammar(
        ("m", "k"), ("bf16", "f16", "f32"), ("-",), FAMILIES, _values, _symmetric,
        {"mode": ("static", "azp", "row")}, shapes=("m=7,k=96", "m=1,k=33"),
    ),
    "per_token_quant_int8": Grammar(
        ("m", "k"), ("bf16", "f16", "f32"), ("-",), FAMILIES, _values, lambda case: {}, shapes=("m=7,k=96", "m=1,k=33"),
    ),
    "per_token_group_quant_int8": Grammar(
        ("m", "k"), ("bf16", "f16", "f32"), ("-",), FAMILIES, _values, _group, {"group": ("64",)},
        shapes=("m=5,k=256",), domain="k % 128 == 0",
    ),
    "cutlass_scaled_mm_azp": Grammar(
        ("m", "n", "k"), ("i8xi8-bf16", "i8xi8-f16"), ("token:channel", "tensor:tensor"), ("randn", "large"), _product,
        lambda case: {"out_dtype": DTYPES[case.dtypes.partition("-")[2]]}, {"azp": ("token",), "bias": ("1",)},
        shapes=("m=5,n=24,k=64", "m=3,n=16,k=2048"),
    ),
}  # fmt: skip  # a table, one row a line
