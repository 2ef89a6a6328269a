"""What a whole layer equals: vLLM's CUTLASS layers on an H200 in every bit, and ways to go wrong that have no name."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from oracle.routines import cases, get
from oracle.routines.base import Call
from oracle.routines.moe.pipeline_bits import Outputs, added, outputs
from oracle.routines.moe.pipelines import PipelineContract, steps_by
from oracle.tensorcore.schedules import get as schedule
from oracle.truth.moe import Combine, Steps

CASE = "cutlass_moe_fp8/bf16xe4m3-bf16/tensor:tensor/{}"
SEEN = {  # vLLM 0.20.2, torch 2.11.0: the case, and the digest of the output's bytes
    "t=4,e=3,h=64,i=32,k=2/family=randn/seed=1": "d0f3e9b14fe00ab0ff8723ec5206cac989122d7457070e78e839b5621912f22a",
    "t=64,e=3,h=256,i=16,k=2/family=randn/seed=0": "e8c31973ad54df607e624b232a91726e0daa182657801ecd3b29199e641ac5b5",
}


def made(text: str, names: tuple[str, str], combine: Combine) -> list[Tensor]:
    """The outputs of a case by two schedules and a way to combine, one for each order of the sums."""
    case = cases.parse(text)
    contract, inputs = get(case.contract), case.inputs()
    assert isinstance(contract, PipelineContract)
    options = Call(contract, inputs, case.call_options()).checked().resolved
    parts = contract.parts(inputs, options, contract.routes(inputs, options, torch.float32)[0])
    steps = steps_by(contract.row, combine)
    found = outputs(parts.tokens, parts.experts, steps, *map(schedule, names))
    assert found is not None
    return list(added(found, steps))


def digest(out: Tensor) -> str:
    return hashlib.sha256(out.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def names_of(text: str, out: Tensor) -> dict[str, float]:
    case = cases.parse(text)
    matches = get(case.contract).identify(case.inputs(), out, arch="sm90", **case.call_options())
    return {match.schedule: match.equal for match in matches}


@pytest.mark.parametrize("shape", SEEN)
def test_every_bit_of_a_layer(shape: str) -> None:
    out = made(CASE.format(shape), ("sm90.chain", "sm90.chain"), Combine.STORED)[0]
    assert digest(out) == SEEN[shape]
    assert digest(made(CASE.format(shape), ("sm90.chain", "sm90.chain"), Combine.SCALED)[0]) != SEEN[shape]


@pytest.mark.turns(4)
def test_a_layer_is_named() -> None:
    text = CASE.format(next(iter(SEEN)))
    out = made(text, ("sm90.chain", "sm90.chain"), Combine.STORED)[0]
    assert next(iter(names_of(text, out).items())) == ("sm90.chain and STORED", 1.0)
    out.view(torch.int16)[1, 2] += 1
    assert max(names_of(text, out).values()) == 1 - 1 / out.numel()


def test_two_instructions_and_weights_of_the_stored_dtype() -> None:
    """As LMDeploy's layer: the second product by mma.sync, weights and sums in bfloat16; its first product is seen in
    what it makes of the codes alone."""
    text = "fused_experts_block/bf16xe4m3-bf16/1x128:128x128/t=4,e=3,h=128,i=128,k=2/family=randn/seed=1"
    names = "sm90.promote128", "sm90.mma_f16.promote128"
    out = made(text, names, Combine.FUSED)[1]
    found = names_of(text, out)
    assert found.get("sm90.promote128, sm90.mma_f16.promote128 and FUSED") == 1 or max(found.values()) == 1
    assert found["sm90.promote128 and WEIGHTED"] < 1
    assert not torch.equal(*made(text, names, Combine.FUSED))


def test_three_orders_of_a_float32_sum() -> None:
    """Term by term, with each term joined by one fma, and in four partial sums of every fourth term."""
    generator = torch.Generator().manual_seed(1)
    found = Outputs(torch.randn(6, 256, 256, generator=generator), torch.rand(6, 256, generator=generator))
    assert len({digest(way) for way in added(found, Steps(combine=Combine.FLOAT32))}) == 3
    few = Outputs(found.sums[:4], found.weights[:4])
    assert len(list(added(few, Steps(combine=Combine.FLOAT32)))) == 2
