"""Cases of sums over slots: rows that cancel, special values, maps, slots of no expert, and a factor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oracle.routines import data
from oracle.routines.case import Case, Grammar

FAMILIES = ("randn", "heavy", "special", "nan", "outlier")


def _rows(case: Case, rows: int, name: str = "x") -> Tensor:
    return data.activations(case.label(name), case.family, rows, case["h"], dtype=case.operand_dtypes[0])


def _weights(case: Case, dtype: torch.dtype) -> Tensor:
    return data.scales(case.label("weights"), "randn", (case["t"], case["k"])).abs().to(dtype)


def _ids(case: Case, below: int) -> Tensor:
    wide = torch.int64 if case.option("ids") == "64" else torch.int32
    return torch.from_numpy(case.stream("ids").integers(0, below, (case["t"], case["k"]))).to(wide)


def _slots(case: Case) -> dict[str, Tensor]:
    return {"x": _rows(case, case["t"] * case["k"]).reshape(case["t"], case["k"], -1)}


def _weighted(case: Case) -> dict[str, Tensor]:
    """With ``map=1`` every second of 6 experts is of this rank; slots of the others hold NaN."""
    inputs = _slots(case) | {"topk_weights": _weights(case, case.operand_dtypes[1])}
    if case.option("map") == "1":
        place = torch.arange(6, dtype=torch.int32, device="cpu")
        inputs["topk_ids"], inputs["expert_map"] = _ids(case, 6), torch.where(place % 2 == 1, place // 2, -1)
        absent = inputs["expert_map"][inputs["topk_ids"].long()] < 0
        inputs["x"] = inputs["x"].masked_fill(absent[:, :, None], torch.nan)
    return inputs


def _sorted(case: Case) -> dict[str, Tensor]:
    """With ``ends=1`` a quarter of the rows belong to no expert and hold NaN."""
    pairs = case["t"] * case["k"]
    order = torch.from_numpy(case.stream("order").integers(0, 1 << 30, (pairs,))).argsort(stable=True).to(torch.int32)
    inputs = {"x": _rows(case, pairs), "topk_weights": _weights(case, torch.float32), "inv_permuted_idx": order}
    if case.option("ends") == "1":
        ends = torch.tensor([0, pairs // 3, pairs - pairs // 4], dtype=torch.int64, device="cpu")
        inputs["expert_first_token_offset"] = ends
        inputs["x"][int(ends[-1]) :] = torch.nan
    return inputs


def _identity(case: Case) -> dict[str, Tensor]:
    scales = _weights(case, torch.float32)
    return {"expert_indices": _ids(case, 8), "expert_scales": scales, "hidden_states": _rows(case, case["t"])}


def _factor(case: Case) -> dict[str, object]:
    return {"routed_scaling_factor": float(case.option("factor") or 1.0)}


_TKH, _ONE, _TWO = ("t", "k", "h"), ("bf16", "f16", "f32"), ("bf16xf32", "f16xf32", "f32xf32", "bf16xbf16", "f16xf16")
_SHAPES = ("t=5,k=3,h=48", "t=3,k=8,h=16", "t=1,k=1,h=8")
GRAMMARS: Mapping[str, Grammar] = {
    "moe_sum": Grammar(_TKH, _ONE, ("-",), FAMILIES, _slots, lambda case: {}, shapes=_SHAPES),
    "moe_sum_reduce": Grammar(
        _TKH, _ONE, ("-",), FAMILIES, _slots, _factor, {"factor": ("2.5", "0.3")}, shapes=_SHAPES
    ),
    "moe_fused_mul_sum": Grammar(
        _TKH, _TWO, ("-",), FAMILIES, _weighted, lambda case: {}, {"map": ("1",), "ids": ("64",)}, shapes=_SHAPES
    ),
    "moe_unpermute": Grammar(
        _TKH, _ONE, ("-",), FAMILIES, _sorted, lambda case: {}, {"ends": ("1",)}, shapes=_SHAPES
    ),
    "zero_experts_compute_triton": Grammar(
        _TKH, _ONE, ("-",), FAMILIES, _identity, lambda case: {"num_experts": 5}, {"ids": ("64",)},
        shapes=("t=5,k=3,h=256", "t=2,k=8,h=512"),
    ),
}  # fmt: skip  # a table, one row a line
