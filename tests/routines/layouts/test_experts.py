"""Integers of a layer of experts: what order is free, what is not, and calls that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oracle
from oracle.errors import InputError
from oracle.routines import cases, get
from oracle.routines.base import Call
from oracle.verdict.compare import Status

ALIGN = "moe_align_block_size"


def call_of(text: str) -> Call:
    case = cases.parse(f"{ALIGN}/i32/-/{text}/family=randn/seed=3")
    return Call(get(ALIGN), case.inputs(), case.call_options())


def judged(call: Call, **changed: Tensor) -> Status:
    outputs = {name: x.clone() for name, x in call.truth.items()} | changed
    return oracle.judge(ALIGN, call.inputs, outputs, **call.resolved).status


class TestBlocks:
    """The order of an expert's pairs is that of atomic counters."""

    call = call_of("t=9,e=3,k=2")

    def test_pairs_of_one_expert_in_any_order(self) -> None:
        own = int((self.call.truth["sorted_token_ids"][:16] != 18).sum())
        assert own > 1
        places = self.call.truth["sorted_token_ids"].clone()
        places[:own] = places[:own].flip(0)
        assert judged(self.call, sorted_token_ids=places) is Status.PASSED

    def test_what_lies_behind_the_last_block_is_free(self) -> None:
        total = int(self.call.truth["num_tokens_post_pad"])
        places, owners = self.call.truth["sorted_token_ids"].clone(), self.call.truth["expert_ids"].clone()
        assert total < len(places)
        places[total:], owners[total // 16 :] = -7, -7
        assert judged(self.call, sorted_token_ids=places, expert_ids=owners) is Status.PASSED

    @pytest.mark.parametrize(("at", "value"), [(0, 18), (15, 0), (0, 17)])
    def test_a_pair_lost_doubled_or_of_another_expert_fails(self, at: int, value: int, unexplained: None) -> None:
        places = self.call.truth["sorted_token_ids"].clone()
        value = value if value != int(places[at]) else 16
        places[at] = value
        assert judged(self.call, sorted_token_ids=places) is Status.FAILED

    def test_padding_before_a_pair_fails(self, unexplained: None) -> None:
        places = self.call.truth["sorted_token_ids"].clone()
        places[:16] = places[:16].flip(0)
        assert int(places[0]) == 18
        assert judged(self.call, sorted_token_ids=places) is Status.FAILED


@pytest.mark.parametrize(
    ("name", "ids", "options"),
    [
        (ALIGN, [[0, 4]], {"num_experts": 4, "block_size": 16}),
        (ALIGN, [[0, -1]], {"num_experts": 4, "block_size": 16}),
        ("count_expert_num_tokens", [[0, -2]], {"num_local_experts": 4}),
    ],
)
def test_ids_of_no_expert_are_refused(name: str, ids: list[list[int]], options: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"topk_ids reach from .* pass"):
        get(name).reference({"topk_ids": torch.tensor(ids, dtype=torch.int32)}, **options)


def test_a_map_beyond_the_experts_is_refused() -> None:
    inputs = {"topk_ids": torch.zeros(1, 1, dtype=torch.int32), "expert_map": torch.tensor([4], dtype=torch.int32)}
    with pytest.raises(InputError, match=r"expert_map reaches from 4 to 4; there are 2 experts"):
        get("count_expert_num_tokens").reference(inputs, num_local_experts=2)


def test_offsets_that_fall_are_refused() -> None:
    with pytest.raises(InputError, match="offsets that never fall"):
        get("get_cutlass_moe_mm_problem_sizes_from_expert_offsets").reference(
            {"expert_first_token_offset": torch.tensor([0, 4, 2])}, n=8, k=8
        )


@pytest.mark.parametrize(("identity", "weight"), [(1 << 15, 0.5), (0, -0.5), (0, float("nan"))])
def test_a_pair_that_does_not_fit_is_refused(identity: int, weight: float) -> None:
    inputs = {"topk_ids": torch.tensor([[identity]], dtype=torch.int32), "topk_weights": torch.tensor([[weight]])}
    with pytest.raises(InputError, match=r"15 bits|hold a sign"):
        get("trtllm_moe_pack_topk_ids_weights").reference(inputs)
