"""Faults of kinds of inputs, and of routing, windows, slots and limits: each is refused in a case that it names."""

from __future__ import annotations

import pytest
import torch

from oracle.diagnosis.mutation import trials_of
from oracle.routines import cases, get, registered
from oracle.routines.catalogue import Call, faults_of, run
from oracle.routines.catalogue import get as fault_of
from oracle.routines.layouts.contract import LayoutContract
from oracle.truth import routing

LAYER = "deep_gemm_moe/bf16xe4m3-bf16/1x128:128x128"
LAYER_OF_3 = f"{LAYER}/t=4,e=3,h=128,i=128,k=2"
LAYER_WIDE = f"{LAYER_OF_3}/first=2,dead=1,ids=one,map=1/topk_ids:i64/family=ties/seed=1"
SOFTMAX = "moe_routing/f32/-/t=1,e=8,k=1/router=softmax/family=randn/seed=2"
MANY = f"{LAYER}/t=16,e=256,h=128,i=128,k=8/family=randn/seed=1"
ROUTED = "trtllm_fp8_block_scale_moe/e4m3xe4m3-bf16/1x128:128x128"
ROUTED_OF_3 = f"{ROUTED}/t=4,e=3,h=128,i=128,k=2"
LLAMA = "moe_routing/bf16/-/t=128,e=8,k=1/router=llama4,groups=4,bias=1,renormalize=1"
LLAMA_4 = f"{LLAMA}/logits:f16,logits:pitch,top_k:4,routed_scaling_factor:2.0/family=randn/seed=1"
BIASED = "moe_routing/bf16/-/t=129,e=8,k=1/groups=4,bias=1/logits:pitch,routed_scaling_factor:2.0/family=randn/seed=1"
SILU = "silu_and_mul/f16/-/m=16,i=129/limit=0.5,each=1/x:pitch/family=ties/seed=1"
PAGED = "fp8_paged_mqa_logits/e4m3xe4m3-f32/tensor:token"
SLOTS = "concat_and_cache_mla/bf16-e4m3/tensor/t=3,r=32,e=16,p=1/family=randn/seed=1"
KILLED = {
    "indices of 64 bits read as words of 32": LAYER_WIDE,
    "rows of experts from 64 on left out": MANY,
    "rows of experts from 128 on left out": MANY,
    "rows of experts behind the largest power of two left out": f"{LAYER_OF_3}/family=randn/seed=2",
    "experts without rows not counted": LAYER_WIDE,
    "rows shifted by the number of those without an expert": f"{LAYER_OF_3}/family=randn/seed=2",
    "last partial tile of every group left out": "fp8_m_grouped_gemm_nt_masked/e4m3xe4m3-bf16/1x128:128x128"
    "/m=130,n=192,k=256,g=3/family=randn/seed=2",
    "bias of the choice added to the weights too": BIASED,
    "group of experts scored by its best choice alone": LLAMA_4,
    "choices rounded to bfloat16 before they are ranked": BIASED,
    "bias of the choice rounded to bfloat16": "moe_routing/bf16/-/t=127,e=8,k=1/groups=4,bias=1"
    "/logits:f16,routed_scaling_factor:2.0/family=randn/seed=1",
    "logits rounded to bfloat16": "moe_routing/f32/-/t=1,e=8,k=1/family=randn/seed=2",
    "weights of a softmax of the chosen experts alone": SOFTMAX,
    "routing scale applied twice": LLAMA_4,
    "SiLU limit clamps the gate from below too": SILU,
    "SiLU limit applied to silu in place of its argument": SILU,
    "SiLU limit 7 whatever was asked for": SILU,
    "no SiLU limit taken for 0": "silu_and_mul/bf16/-/m=33,i=96/family=randn/seed=2",
    "experts: weight of a token's first expert for all of its experts": f"{ROUTED_OF_3}/family=randn/seed=1",
    "experts: routed scaling factor applied twice": f"{ROUTED}/t=1,e=2,h=128,i=128,k=1/family=randn/seed=1",
    "experts: those behind the largest power of two never chosen": f"{ROUTED_OF_3}/family=randn/seed=1",
    "experts: bias of the choice added to the weights too": f"{ROUTED_OF_3}/method=MiniMax2,bias=1/family=randn/seed=1",
    "cache: windows of new tokens in the opposite order": f"{PAGED}/b=4,t=2,n=300,h=64,d=128/family=randn/seed=2",
    "cache: window of the last new token for all of a request": f"{PAGED}/b=4,t=2,n=300,h=64,d=128/clean=1"
    "/family=randn/seed=2",
    "only the first token written": SLOTS,
    "tokens of the second half not written": SLOTS,
    "group without steps has the sums of the group before": "k_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-f32/1x128:1x128"
    "/m=17,n=72,k=384,g=3/family=exact/seed=1",
    "amax scan takes every second column": "per_token_group_quant_fp8/bf16-e4m3/1x128/m=16,k=128/family=randn/seed=2",
    "amax of every second element of a block": "mxfp8_quantize/bf16-e4m3/1x32/m=16,k=160/family=randn/seed=2",
}


class TestMechanisms:
    """Mechanisms of public threads."""

    @pytest.mark.parametrize("name", KILLED)
    def test_each_is_refused_in_its_case(self, name: str) -> None:
        """The right kernel's output differs, and the verdict on the mutant's is a failure."""
        fault, case = fault_of(name), cases.parse(KILLED[name])
        trials = [trial for trial in trials_of(case) if fault.applies(trial.call) is None]
        assert any(not trial.same(run(trial.call, fault)) and trial.fails(run(trial.call, fault)) for trial in trials)

    def test_a_kind_of_input_brings_its_faults(self) -> None:
        """Every contract with an index of either width, but layouts and tables of pages, and no other."""
        words = fault_of("indices of 64 bits read as words of 32")
        for name, contract in registered().items():
            wide = any(torch.int64 in spec.dtypes for spec in contract.inputs if spec.kind.is_integer)
            assert words not in faults_of(name) or (wide and not isinstance(contract, LayoutContract))

    def test_what_is_read_beyond_the_memory_is_no_call(self) -> None:
        """The reason names it, and an index of 32 bits has one width."""
        words = fault_of("indices of 64 bits read as words of 32")
        case = cases.parse(f"{LAYER_OF_3}/family=randn/seed=2")
        call = Call(get(case.contract), case.inputs(), case.call_options())
        assert call.inputs["topk_ids"].dtype is torch.int32
        assert words.applies(call) == "no index has 64 bits, or all are 0"

    def test_best_experts_take_groups_by_two_where_they_are_biased(self) -> None:
        """The group of the best expert against that of the best pair."""
        router = routing.Router(top_k=1, groups=2, top_groups=1)
        choice = torch.tensor([[0.9, 0.0, 0.6, 0.5]], dtype=torch.float64)
        assert [int(routing.best_experts(choice, router, biased=biased)) for biased in (False, True)] == [0, 2]
