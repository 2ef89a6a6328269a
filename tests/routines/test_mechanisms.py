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
    "experts: first product rounded to bfloat16": "trtllm_fp8_per_tensor_scale_moe/"
    "e4m3xe4m3-bf16/tensor:tensor/t=4,e=3,h=64,i=32,k=2/family=randn/seed=1",
    "experts: sum kept in float32": "ep_moe_masked/"
    "bf16xe4m3-bf16/1x128:128x128/t=4,e=5,h=128,i=128,k=4/combine=REORDERED/family=randn/seed=1",
    "experts: weight on the input and on the output": "cutlass_moe_fp8/"
    "bf16xe4m3-bf16/tensor:tensor/t=4,e=3,h=64,i=32,k=1/on_input=1/family=randn/seed=1",
    "rows of scale tiles C // 4 tiles apart": "mxint8_quantize/bf16/1x32/m=17,k=192/layout=8x4/family=randn/seed=1",
    "rows of scale tiles of an expert C // 4 tiles apart": "mxfp8_experts_quant/bf16/1x32/g=2,m=300,k=192"
    "/family=randn/seed=1",
    "an expert without rows takes a tile": "mxfp8_experts_quant/bf16/1x32/g=4,m=140,k=192/family=randn/seed=1",
    "rows of tiles C // 4 tiles apart": "swizzle_scale/u8/-/m=31,c=7,g=1/tile=8x4/family=randn/seed=1",
    "matrices of a batch begin behind unpadded rows": "swizzle_scale/u8/-/m=130,c=21,g=3/family=randn/seed=1",
    "8x4 tiles written column by column": "swizzle_scale/u8/-/m=31,c=7,g=1/tile=8x4/family=randn/seed=1",
    "matrices of a batch read behind unpadded rows": "from_blocked/u8/-/m=130,c=21,g=3/family=randn/seed=1",
    "norm times its weight rounded before it is quantised": "rmsnorm_quant/bf16-e4m3/tensor/m=3,h=384"
    "/family=randn/seed=1",
    "amax scan leaves out the columns behind the last whole 4": "scaled_fp8_quant/bf16-e4m3/token/m=129,k=127"
    "/family=randn/seed=11",
    "amax scan leaves out the columns behind the last whole 16": "scaled_fp8_quant/bf16-e4m3/token/m=129,k=127"
    "/family=randn/seed=11",
    "scale rounded to bfloat16": "scaled_fp8_quant/bf16-e4m3/tensor/m=1,k=128/family=randn/seed=1",
    "reciprocal of the scale rounded to bfloat16": "scaled_fp8_quant/bf16-e4m3/tensor/m=1,k=128/family=randn/seed=1",
    "amax floor missing, scale of zeros 0": "per_token_group_quant_fp8/bf16-e4m3/1x128/m=3,k=384/family=special/seed=1",
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
    "bias of the choice in the softmax too": "moe_routing/f32/-/t=5,e=8,k=2/router=softmax,bias=1/family=randn/seed=2",
    "A: words of exponents in columns of the rows that are not padded": "fp8_fp4_gemm_nt/e4m3xe4m3-bf16/1x32:1x32"
    "/m=9,n=33,k=288/scales=words/family=randn/seed=1",
    "B: words of exponents in columns of the rows that are not padded": "fp8_fp4_gemm_nt/e4m3xe4m3-bf16/1x32:1x32"
    "/m=9,n=33,k=288/scales=words/family=randn/seed=1",
    "A codes of the first K block for all of K": "cutlass_w4a8_mm/e4m3xi4-bf16/token:channel"
    "/m=9,n=136,k=200/family=randn/seed=1",
    "A: block scales counted by four": "mm_mxfp8/e4m3xe4m3-bf16/1x32/m=1,n=128,k=256/family=randn/seed=1",
    "A: bytes of block scales multiplied as integers": "bmm_mxfp8/e4m3xe4m3-bf16/1x32"
    "/m=1,n=128,k=128,g=1/family=randn/seed=1",
    "A: codes of the second half of K from the middle of the first": "group_gemm_nvfp4_nt_groupwise/e2m1xe2m1-bf16/1x16"
    "/m=4,n=128,k=128,g=1/family=randn/seed=1",
    "B scale of every second N block for two": "k_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-f32/1x128:1x128"
    "/m=1,n=8,k=128,g=1/family=randn/seed=1",
    "B scale of the first of 16 columns for all of them": "k_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-f32/1x128:1x128"
    "/m=1,n=8,k=128,g=1/family=randn/seed=1",
    "B scales of blocks as long as N over their number": "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128"
    "/m=9,n=136,k=200/family=randn/seed=1",
    "B: block scales counted by four": "fp8_fp4_gemm_nt/e4m3xe2m1-bf16/1x128:1x32/m=1,n=128,k=256/family=randn/seed=1",
    "B: bytes of block scales multiplied as integers": "bmm_mxfp8/e4m3xe4m3-bf16/1x32"
    "/m=1,n=128,k=128,g=1/family=randn/seed=1",
    "B: codes of the second half of K from the middle of the first": "fp8_fp4_gemm_tt/e4m3xe2m1-bf16/1x128:1x32"
    "/m=2,n=128,k=256/scales=words/family=exact/seed=2",
    "K runs on into the next row by a tile of 128": "fp8_fp4_gemm_tt/e4m3xe2m1-bf16/1x128:1x32"
    "/m=2,n=128,k=256/scales=words/family=exact/seed=2",
    "NaN left out of the amax": "mxfp8_to_fp8_block/e4m3/128x128/m=130,k=160/scale=nan/family=randn/seed=1",
    "UE8M0 scale rounded to the nearest power of two": "per_block_cast_to_fp8/bf16-e4m3/128x128"
    "/m=130,k=384/ue8m0=1/family=randn/seed=1",
    "UE8M0 scale that needs no rounding doubled": "per_block_cast_to_fp8/bf16-e4m3/128x128"
    "/m=130,k=384/ue8m0=1/family=ties/seed=1",
    "amax of the first 8,192 elements of a tensor": "scaled_fp8_quant/bf16-e4m3/tensor/m=6,k=2688/family=randn/seed=1",
    "bias of 16 bits read as float32": "cutlass_w8a8_scaled_mm/e4m3xe4m3-bf16/tensor:tensor"
    "/m=33,n=256,k=384/bias=bf16/family=randn/seed=1",
    "block scale above 448 coded NaN": "scaled_fp4_quant/bf16/1x16/m=3,k=32/global=stale/family=randn/seed=1",
    "block scales of a and b exchanged": "bmm_mxfp8/e4m3xe4m3-bf16/1x32/m=128,n=128,k=160,g=2/family=randn/seed=1",
    "block-scaled result zero": "bmm_mxfp8/e4m3xe4m3-bf16/1x32/m=1,n=128,k=128,g=1/family=randn/seed=1",
    "c of eight rows on in every second group of eight rows": "fp8_gemm_nt_1d1d/e4m3xe4m3-f32/1x128:1x128"
    "/m=9,n=136,k=200/c=f32/family=randn/seed=1",
    "cache: logits of pages of the second half 0": "fp8_paged_mqa_logits/e4m3xe4m3-f32/tensor:token"
    "/b=3,t=1,n=150,h=32,d=128/family=exact/seed=1",
    "cache: pages of the second half read from the first": "fp8_paged_mqa_logits/e4m3xe4m3-f32/tensor:token"
    "/b=3,t=1,n=150,h=32,d=128/family=exact/seed=1",
    "columns of a block of 128 that the rotated ones begin in read from before these": "concat_and_cache_ml"
    "a/bf16-e4m3/tensor/t=1,r=16,e=8,p=4/family=randn/seed=1",
    "cosines and sines rounded to bfloat16": "mla_rope_quantize_fp8/bf16-e4m3/tensor"
    "/t=1,h=1,d=16,n=16/family=randn/seed=1",
    "epsilon added to the scale that quotients are taken by": "flashinfer_quantize_128x128/bf16-e4m3/128x128"
    "/m=130,k=384/family=nan/seed=1",
    "epsilon below 1e-4 taken for 1e-4": "fused_add_rms_norm_static_fp8_quant/bf16-e4m3/tensor"
    "/m=1,h=128/family=randn/seed=1",
    "experts: gate and up taken from neighbouring columns": "cutlass_fused_moe_tensor/e4m3xe4m3-bf16/tensor:tensor"
    "/t=1,e=2,h=64,i=32,k=1/family=randn/seed=1",
    "experts: intermediate's scales never written: 0": "fused_experts_channel/bf16xe4m3-bf16/token:channel"
    "/t=1,e=2,h=64,i=32,k=1/family=randn/seed=1",
    "experts: outputs of the second half of the tokens those of the first": "cutlass_moe_fp8/bf1"
    "6xe4m3-bf16/tensor:tensor/t=4,e=3,h=64,i=32,k=1/on_input=1/family=randn/seed=1",
    "experts: routing weights rounded to bfloat16": "trtllm_fp8_per_tensor_scale_moe/e4m3xe4m3-bf16/tensor:tensor"
    "/t=4,e=3,h=64,i=32,k=2/kept=f32/family=randn/seed=1",
    "experts: second product rounded before its routing weight": "fused_experts_channel/bf16xe4m3-bf16/token:channel"
    "/t=1,e=2,h=64,i=32,k=1/family=randn/seed=1",
    "exponent of amax over the largest code rounded down": "mxint8_quantize/bf16/1x32/m=1,k=160/family=randn/seed=1",
    "float32 weight read as bfloat16": "fused_add_rmsnorm_quant/f32-e4m3/tensor/m=33,h=640/family=randn/seed=1",
    "gate and up taken from neighbouring columns in the activation": "silu_and_mul/bf16/-"
    "/m=3,i=1000/family=randn/seed=1",
    "gate and up taken from neighbouring columns in the fused activation": "persistent_masked_m"
    "_silu_mul_quant/bf16-e4m3/1x128/e=1,t=1,i=128/family=randn/seed=1",
    "groups behind the first not computed": "cutlass_w4a8_moe_mm/e4m3xi4-bf16/token:channel"
    "/m=33,n=64,k=16,g=2/family=subnormal/seed=1",
    "inverse of the largest shared scale taken for 0": "mxfp8_quantize_columnwise/bf16-e4m3/32x1"
    "/m=96,k=18/family=nan/seed=1",
    "logits for weights that are not renormalised": "moe_routing/f32/-/t=1,e=8,k=1/family=randn/seed=1",
    "logits in the windows of a whole tile of rows": "fp8_fp4_mqa_logits/e2m1xe2m1-f32/1x32"
    "/m=4,n=40,h=8,d=128/compact=1/family=randn/seed=1",
    "matrices of a batch behind the first not quantised": "nvfp4_batched_quantize/bf16/1x16"
    "/g=3,m=9,k=160/family=randn/seed=1",
    "mean square of the row times the weight": "rms_norm_static_fp8_quant/bf16-e4m3/tensor"
    "/m=1,h=128/family=randn/seed=1",
    "negative exponents of the shared scale truncated": "mxfp8_quantize_columnwise/bf16-e4m3/32x1"
    "/m=96,k=18/rounding=floor/family=randn/seed=1",
    "output of exchanged operands written as [N, M]": "cutlass_w4a8_mm/e4m3xi4-bf16/token:channel"
    "/m=33,n=64,k=16/family=subnormal/seed=1",
    "padding of the scales filled with the byte of 1": "mxfp8_quantize/bf16-e4m3/1x32/m=3,k=32/family=randn/seed=1",
    "pages of the second half of the cache read from the first": "cp_gather_and_upconvert_fp8_kv_cache/u8-bf16/1x128"
    "/b=1,p=4/family=codes/seed=1",
    "rows behind the first left out": "cutlass_moe_fp8/bf16xe4m3-bf16/tensor:tensor"
    "/t=4,e=3,h=64,i=32,k=1/on_input=1/family=randn/seed=1",
    "rows of each group behind its first 128 not written": "cutlass_moe_mm/e4m3xe4m3-bf16/token:channel"
    "/m=160,n=64,k=128,g=1/family=randn/seed=1",
    "rows of the second half hold the bias alone": "cutlass_w8a8_scaled_mm/e4m3xe4m3-bf16/tensor:tensor"
    "/m=33,n=256,k=384/bias=bf16/family=randn/seed=1",
    "rows of the second half not gathered": "cp_gather_and_upconvert_fp8_kv_cache/u8-bf16/1x128"
    "/b=1,p=4/family=codes/seed=1",
    "scale column advances once per BLOCK_K = 32": "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128"
    "/m=9,n=136,k=200/family=randn/seed=1",
    "scale of a block of zeros 1 before it is divided": "nvfp4_quantize_per_token/bf16/1x16"
    "/m=17,k=192/family=randn/seed=1",
    "scales of neighbouring columns whole tiles of rows apart": "mxfp8_quantize_columnwise/bf16-e4m3/32x1"
    "/m=160,k=130/family=randn/seed=1",
    "scales of the second split of K from the first": "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128"
    "/m=9,n=136,k=200/family=randn/seed=1",
    "second half of a split K missing in the last columns of a tile": "cutlass_w4a8_mm/e4m3xi4-bf16/token:channel"
    "/m=9,n=136,k=200/family=randn/seed=1",
    "second half of every row not quantised": "scaled_fp4_quant/bf16/1x16/m=3,k=32/family=randn/seed=1",
    "slots of the second half of the cache written into the first": "concat_and_cache_ds_mla/bf16-u8/1x128"
    "/t=3,p=1/family=randn/seed=1",
    "sums of a split K stored in the output dtype before they are added": "cutlass_w4a8_mm/e4m3xi4-bf16/token:channel"
    "/m=9,n=136,k=200/family=randn/seed=1",
    "weights of the second half of the groups read from the first": "cutlass_w4a8_moe_mm/e4m3xi4-bf16/token:channel"
    "/m=33,n=64,k=16,g=2/family=subnormal/seed=1",
}


@pytest.mark.turns(4)
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
