"""Experts by pipeline: every row on the CPU is what its contract says, routing by every method, and bad calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernels
from kernels.errors import InputError, OptionError, ShapeError, ValueRangeError
from kernels.moe_pipelines import METHODS, PIPELINES
from kernels.platform import Machine, use_machine
from kernels.subjects import subjects
from oracle.routines import cases, get, profiles
from oracle.routines.moe.pipelines import CONTRACTS
from oracle.truth import routing

with use_machine(Machine.described("cpu")):
    CPU = {s.contract: s for s in subjects() if s.contract in PIPELINES}
SOME = "deep_gemm_moe"


def test_the_rows_are_those_of_the_contracts() -> None:
    assert set(PIPELINES) == {name for name, one in CONTRACTS.items() if one.row.dispatched} == set(CPU)
    for name, row in PIPELINES.items():
        mine = CONTRACTS[name].row
        assert (row.up_first, row.routed, row.multiplied) == (mine.up_first, mine.routed, mine.multiplied), name
        assert row.silu == mine.steps.activation.name.lower() and row.weights == mine.weights.name.lower(), name
        assert {way.upper() for way in row.combine} == {way.name for way in mine.ways} - {"FUSED"}, name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PIPELINES)
def test_right(name: str) -> None:
    """The way that is listed last, of the case that has it, or the first case; experts of other ranks and -1."""
    listed = profiles.cases(name, "full")
    way = PIPELINES[name].combine[-1].upper()
    case = next((c for c in listed if c.option("combine") == way), listed[0])
    inputs, options = case.inputs(), case.call_options()
    out = CPU[name].run({key: x.clone() for key, x in inputs.items()}, options)
    verdict = get(name).judge(inputs, out, arch="cpu", numerics="ieee32.any", **options)
    assert bool(verdict), verdict.summary


def arguments(name: str = SOME) -> dict[str, Tensor]:
    inputs = dict(profiles.cases(name, "quick")[0].inputs())
    return inputs | {"pipeline": name}  # type: ignore[dict-item]


def test_another_row_is_another_result() -> None:
    """The negative test: weights rounded, another quantiser, sums in bfloat16."""
    given = arguments("ep_moe_masked")
    outs = [kernels.moe_experts(**given | {"pipeline": name}) for name in ("ep_moe_masked", SOME)]
    assert not torch.equal(*outs)
    inputs = {key: x for key, x in given.items() if key != "pipeline"}
    assert get("ep_moe_masked").judge(inputs, outs[1], arch="cpu", numerics=None).status.is_failure


def test_no_tokens() -> None:
    given = arguments()
    few = {key: given[key][:0] for key in ("x", "topk_ids", "topk_weights")}
    out = kernels.moe_experts(**given | few)
    assert out.shape == few["x"].shape and out.dtype is torch.bfloat16


@pytest.mark.parametrize("method", METHODS)
def test_routing(method: str) -> None:
    """Weights within the intervals of the contract, for experts that it admits."""
    logits = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(-0.5, 0.5, 16) if method in ("DeepSeekV3", "MiniMax2") else None
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5} if method == "DeepSeekV3" else {}
    weights, ids = kernels.route_by_method(logits, method, 3, bias, **groups)
    router = routing.Router(
        top_k=3,
        groups=groups.get("n_group", 1),
        top_groups=groups.get("topk_group", 1),
        scaling=groups.get("routed_scaling_factor", 1.0),
        **routing.METHODS[method],
    )
    found = routing.scores(logits, router, bias)
    assert not bool(routing.misrouted(ids, found, router, biased=bias is not None).any())
    span = routing.weight_span(found, ids, router)
    assert bool(((span.low <= weights.double()) & (weights.double() <= span.high)).all())
    assert bool(routing.misrouted((ids + 1) % 16, found, router, biased=bias is not None).any()), "the negative test"


BAD = {
    "a row that is none": ({"pipeline": "fused"}, OptionError, "there are"),
    "a way of another row": ({"combine": "atomic"}, OptionError, "this pipeline has stored"),
    "weights of another size": ({"w2": torch.zeros(3, 128, 64).to(torch.float8_e4m3fn)}, ShapeError, "E, H, I"),
    "ids of another shape": ({"topk_ids": torch.zeros(4, 3, dtype=torch.int32)}, ShapeError, "top_k"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_call_is_refused(what: str) -> None:
    change, error, said = BAD[what]
    with pytest.raises(error, match=said):
        kernels.moe_experts(**arguments() | change)


def test_what_else_is_refused() -> None:
    twice = arguments("deepep_moe_masked") | {"topk_ids": torch.zeros(4, 2, dtype=torch.int32)}
    with pytest.raises(ValueRangeError, match="twice"):
        kernels.moe_experts(**twice)
    case = cases.parse("cutlass_fused_moe_w4/bf16xi4-bf16/tensor:1x128/t=2,e=2,h=128,i=128,k=1/family=randn/seed=1")
    names = {"prequant1": "a1_scale", "prequant2": "a2_scale"}
    given = {names.get(key, key): x for key, x in case.inputs().items()}
    del given["alpha2"]
    with pytest.raises(InputError, match="needs alpha"):
        kernels.moe_experts(**given, pipeline=case.contract)
    with pytest.raises(OptionError, match="routing method"):
        kernels.route_by_method(torch.zeros(1, 4), "Hash", 1)
    with pytest.raises(InputError, match="no bias"):
        kernels.route_by_method(torch.zeros(1, 4), "TopK", 1, torch.zeros(4))
    with pytest.raises(OptionError, match="exceeds"):
        kernels.route_by_method(torch.zeros(1, 4), "TopK", 5)
