"""Cases of the integers of a layer of experts: experts without rows, one with all, maps, and ids of no expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from oracle.routines import data
from oracle.routines.case import Case, Grammar

FAMILIES = ("randn", "one")
"""Experts at random, and the same for every token."""


def _ids(case: Case, absent: bool = False) -> Tensor:
    """Experts ``[T, k]`` of the dtype of the case; ``absent``: one in eight is -1."""
    shape, e = (case["t"], case["k"]), case["e"]
    ids = torch.from_numpy(case.stream("topk_ids").integers(0, e, shape))
    if case.family == "one":
        ids = torch.full_like(ids, e - 1)
    if absent:
        ids = ids.masked_fill(torch.from_numpy(case.stream("absent").integers(0, 8, shape) == 0), -1)
    return ids.to(case.operand_dtypes[0])


def _routed(absent: bool) -> Callable[[Case], dict[str, Tensor]]:
    """With ``map=1`` every second of the experts is of this rank, in descending order."""

    def inputs(case: Case) -> dict[str, Tensor]:
        routed = {"topk_ids": _ids(case, absent)}
        if case.option("map") == "1":
            place = torch.arange(case["e"], dtype=torch.int32, device="cpu")
            routed["expert_map"] = torch.where(place % 2 == 1, (case["e"] - place) // 2, -1)
        return routed

    return inputs


def _local(case: Case) -> int:
    return case["e"] // 2 + 1 if case.option("map") == "1" else case["e"]


def _blocks(case: Case) -> dict[str, object]:
    return {"num_experts": _local(case), "block_size": int(case.option("block") or 16)}


def _offsets(case: Case) -> dict[str, Tensor]:
    counts = case.stream("rows").integers(0, 40, (case["e"],))
    ends = torch.from_numpy(counts).cumsum(0)
    return {"expert_first_token_offset": torch.cat([ends.new_zeros(1), ends])}


def _sizes(case: Case) -> dict[str, object]:
    return {"n": 48, "k": 80, "swap_ab": case.option("swap") == "1"}


def _pairs(case: Case) -> dict[str, Tensor]:
    weights = data.scales(case.label("topk_weights"), "randn", (case["t"], case["k"])).abs()
    return {"topk_ids": _ids(case), "topk_weights": weights.to(case.operand_dtypes[1])}


def _local_ids(case: Case) -> dict[str, Tensor]:
    return {"topk_ids": _ids(case, absent=True)}


def _problem(case: Case) -> dict[str, object]:
    return {"num_experts": case["e"], "n": 48, "k": 80}


def _data(case: Case) -> dict[str, object]:
    options = _problem(case)
    return options | {"blockscale": case.option("scales") == "1", "is_gated": case.option("gate") != "0"}


def _counts(case: Case) -> dict[str, Tensor]:
    counts = torch.from_numpy(case.stream("rows").integers(0, case["m"] + 1, (case["e"],)))
    return {"expert_num_tokens": counts.to(torch.int32)}


def _batched(case: Case) -> dict[str, object]:
    return {"padded_m": case["m"], "n": 48, "k": 80}


def _batches(case: Case) -> dict[str, object]:
    return {"max_tokens_per_batch": case["m"], "block_size": int(case.option("block") or 16)}


def _moved(rows: str, scales: str) -> Callable[[Case], dict[str, Tensor]]:
    """Rows of tokens and their scales; with ``scales=0`` no scales."""

    def inputs(case: Case) -> dict[str, Tensor]:
        t, h, codes = case["t"], case["h"], case.operand_dtypes[1]
        routed = _routed(True)(case)
        moved = {rows: data.normal(case.label(rows), (t, h), dtype=codes)}
        if case.option("scales") != "0":
            moved[scales] = data.scales(case.label(scales), "randn", (t, max(1, h // 128)))
        return moved | routed

    return inputs


def _distinct(case: Case) -> dict[str, Tensor]:
    """Experts of each token, all of them different, one in eight none; of family ``one`` the same for every token."""
    t, e, k = (case[name] for name in "tek")
    rows = case.stream("topk_ids").integers(0, 1 << 30, (1 if case.family == "one" else t, e)).argsort(1)[:, :k]
    ids = torch.from_numpy(rows.copy()).expand(t, k)
    ids = ids.masked_fill(torch.from_numpy(case.stream("absent").integers(0, 8, (t, k)) == 0), -1)
    weights = data.scales(case.label("topk_weights"), "randn", (t, k))
    return {"topk_ids": ids.to(case.operand_dtypes[0]), "topk_weights": weights.to(case.operand_dtypes[1])}


_TEK, _SHAPES = ("t", "e", "k"), ("t=7,e=12,k=4", "t=1,e=3,k=1", "t=70,e=5,k=8")
_TEKH, _CODES = (*_TEK, "h"), ("i32xe4m3", "i64xe4m3", "i32xbf16", "i32xf16", "i32xe5m2")
_ROWS = ("t=7,e=12,k=4,h=32", "t=1,e=3,k=1,h=16", "t=40,e=5,k=3,h=256")
GRAMMARS: Mapping[str, Grammar] = {
    "moe_align_block_size": Grammar(
        _TEK, ("i32", "i64"), ("-",), FAMILIES, _routed(False), _blocks, {"map": ("1",), "block": ("1", "64")},
        shapes=_SHAPES,
    ),
    "count_expert_num_tokens": Grammar(
        _TEK, ("i32", "i64"), ("-",), FAMILIES, _routed(True), lambda case: {"num_local_experts": _local(case)},
        {"map": ("1",)}, shapes=_SHAPES,
    ),
    "get_cutlass_moe_mm_problem_sizes_from_expert_offsets": Grammar(
        ("e",), ("i64",), ("-",), ("randn",), _offsets, _sizes, {"swap": ("1",)}, shapes=("e=5", "e=1"),
    ),
    "trtllm_moe_pack_topk_ids_weights": Grammar(
        _TEK, ("i32xf32", "i64xf32", "i32xbf16", "i32xf16"), ("-",), FAMILIES, _pairs, lambda case: {}, shapes=_SHAPES,
    ),
    "make_routing_data": Grammar(
        _TEK, ("i32xf32", "i64xf32", "i32xbf16"), ("-",), FAMILIES, _distinct,
        lambda case: {"num_local_experts": case["e"]}, shapes=("t=7,e=12,k=4", "t=1,e=3,k=1", "t=70,e=40,k=8"),
        domain="k <= e",
    ),
    "get_cutlass_moe_mm_data": Grammar(
        _TEK, ("i32",), ("-",), FAMILIES, _local_ids, _data, {"scales": ("1",), "gate": ("0",)}, shapes=_SHAPES,
    ),
    "get_cutlass_w4a8_moe_mm_data": Grammar(_TEK, ("i32",), ("-",), FAMILIES, _local_ids, _problem, shapes=_SHAPES),
    "get_cutlass_batched_moe_mm_data": Grammar(
        ("e", "m"), ("i32",), ("-",), ("randn",), _counts, _batched, shapes=("e=5,m=40", "e=1,m=3", "e=2,m=32"),
    ),
    "batched_moe_align_block_size": Grammar(
        ("e", "m"), ("i32",), ("-",), ("randn",), _counts, _batches, {"block": ("1", "64")},
        shapes=("e=5,m=40", "e=1,m=3", "e=3,m=64"),
    ),
    "expert_num_tokens_round_up_and_sum": Grammar(
        ("e", "m"), ("i32",), ("-",), ("randn",), _counts,
        lambda case: {"alignment": int(case.option("alignment") or 128)}, {"alignment": ("1", "24")},
        shapes=("e=5,m=300", "e=1,m=3"),
    ),
    "moe_permute": Grammar(
        _TEKH, _CODES, ("-",), FAMILIES, _moved("hidden_states", "a1q_scale"),
        lambda case: {"n_local_expert": _local(case)}, {"map": ("1",), "scales": ("0",)}, shapes=_ROWS,
        domain="h % 16 == 0",
    ),
    "deepgemm_moe_permute": Grammar(
        _TEKH, _CODES, ("-",), FAMILIES, _moved("aq", "aq_scale"),
        lambda case: {"local_num_experts": _local(case), "alignment": int(case.option("alignment") or 128)},
        {"map": ("1",), "alignment": ("8",)}, shapes=_ROWS,
    ),
}  # fmt: skip  # a table, one row a line
