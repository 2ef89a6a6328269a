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


_TEK, _SHAPES = ("t", "e", "k"), ("t=7,e=12,k=4", "t=1,e=3,k=1", "t=70,e=5,k=8")
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
}  # fmt: skip  # a table, one row a line
GOLDENS = (
    "moe_align_block_size/i32/-/t=3,e=4,k=2/block=1/family=randn/seed=7",
    "count_expert_num_tokens/i32/-/t=3,e=4,k=2/family=randn/seed=7",
    "get_cutlass_moe_mm_problem_sizes_from_expert_offsets/i64/-/e=3/family=randn/seed=7",
    "trtllm_moe_pack_topk_ids_weights/i32xf32/-/t=3,e=4,k=2/family=randn/seed=7",
)
