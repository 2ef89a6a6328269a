"""Cases of the few operations of torch: groups of any extents, ties, special values, blocks that are cut."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oracle.routines import data
from oracle.routines.case import DTYPES, Case, Grammar

FAMILIES = ("randn", "ties", "heavy", "special", "nan", "outlier")
_GROUPS = {"block": (128, 128), "row": (1, 64), "column": (32, 1)}


def _values(case: Case) -> dict[str, Tensor]:
    (dtype,) = case.operand_dtypes
    x = data.activations(case.label("x"), case.family, case["m"], case["k"], dtype=dtype)
    if "scales_to" in case.contract:
        return {"scales": x.abs().clamp(min=2.0**-12)}
    return {"x": x}


def _group(case: Case) -> dict[str, object]:
    rows, columns = _GROUPS.get(case.option("group") or "", (1, 128))
    options: dict[str, object] = {"group_rows": rows, "group_columns": columns}
    return options | ({"compute_dtype": torch.float32} if case.option("compute") == "f32" else {})


def _codes(case: Case) -> dict[str, Tensor]:
    m, k = case["m"], case["k"]
    if case.contract == "block_dequant":
        block = int(case.option("block") or 128)
        codes = torch.from_numpy(case.stream("q").integers(-128, 128, (m, k))).to(torch.int8)
        return {"x_q_block": codes, "x_s": data.scales(case.label("s"), "randn", (-(-m // block), -(-k // block)))}
    shape = {"tensor": (1, 1), "row": (m, 1)}.get(case.option("scales") or "", (m, max(1, k // 128)))
    codes = data.operand(case.label("q"), "codes", m, k, dtype=case.operand_dtypes[0], side="b")
    return {"x_q": codes, "x_s": data.scales(case.label("s"), "randn", shape)}


def _blocks(case: Case) -> dict[str, object]:
    return {name: int(case.option("block") or 128) for name in ("block_n", "block_k")}


_MK, _WIDE = ("m", "k"), ("bf16", "f32")
GRAMMARS: Mapping[str, Grammar] = {
    "scaled_quantize": Grammar(
        _MK, _WIDE, ("-",), FAMILIES, _values, _group, {"group": tuple(_GROUPS), "compute": ("f32",)},
        shapes=("m=128,k=256",), domain="m % 128 == 0, k % 128 == 0",
    ),
    "dynamic_per_batched_tensor_quant": Grammar(
        _MK, _WIDE, ("-",), FAMILIES, _values, lambda case: {}, shapes=("m=7,k=96", "m=1,k=33"),
    ),
    "convert_bf16_scales_to_fp8": Grammar(
        _MK, ("bf16",), ("-",), ("randn", "ties", "heavy", "outlier"), _values, lambda case: {},
        shapes=("m=7,k=32", "m=1,k=8"),
    ),
    "scaled_dequantize": Grammar(
        _MK, ("e4m3-f32", "e4m3-bf16", "e4m3-f16", "e5m2-f32"), ("-",), ("codes",), _codes,
        lambda case: {"out_dtype": DTYPES[case.dtypes.partition("-")[2]]}, {"scales": ("tensor", "row")},
        shapes=("m=5,k=256", "m=1,k=128"), domain="k % 128 == 0",
    ),
    "block_dequant": Grammar(
        _MK, ("i8",), ("-",), ("codes",), _codes, _blocks, {"block": ("32",)}, shapes=("m=130,k=200", "m=3,k=64"),
    ),
}  # fmt: skip  # a table, one row a line
