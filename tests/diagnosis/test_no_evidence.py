"""An output that holds no evidence is explained by nothing; NaN counts where a fault predicts exactly these."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import oracle
from oracle.diagnosis import explain, observed
from oracle.diagnosis.candidates import speaks
from oracle.diagnosis.explain import diagnose
from oracle.routines import cases, get
from oracle.routines.base import Call
from oracle.routines.catalogue import get as get_fault
from oracle.routines.catalogue import run
from oracle.tensorcore.schedules import get as get_schedule
from oracle.verdict.compare import Status

pytestmark = pytest.mark.turns(4)

GEMM = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=5,n=32,k=256/family=randn/seed=1"
ROWS = "cutlass_scaled_mm/e4m3xe4m3-bf16/tensor:tensor/m=1,n=128,k=128/family=randn/seed=1"
QUANT = "per_token_group_quant_fp8/bf16-e4m3/1x128/m=3,k=384/family=randn/seed=1"
MARKED = "row-major A scale read as [K/128, align(M, 4)]"


def filled(text: str, value: float) -> tuple[Call, dict[str, Tensor]]:
    """The call of a case, and its outputs with one value everywhere."""
    case = cases.parse(text)
    call = Call(get(case.contract), case.inputs(), case.call_options())
    return call, {name: torch.full(x.shape, value).to(x.dtype) for name, x in call.contract.expected(call).items()}


@pytest.mark.parametrize("value", [math.nan, 0.0, math.inf, -math.inf, 3.5])
@pytest.mark.parametrize("text", [GEMM, ROWS, QUANT])
def test_one_value_everywhere(text: str, value: float) -> None:
    call, outputs = filled(text, value)
    output = outputs["out"] if tuple(outputs) == ("out",) else outputs
    verdict = oracle.judge(call.contract.name, call.inputs, output, **call.options)
    assert verdict.status is Status.FAILED and verdict.explained_by == ()
    found = diagnose(call.contract.name, call.inputs, output, **call.options)
    assert found.failing and not found.explanations


def test_nan_zeros_and_infinities_together() -> None:
    call, outputs = filled(GEMM, math.nan)
    outputs["out"][::2] = 0.0
    outputs["out"][1, 5:20] = math.inf
    assert not diagnose(call.contract.name, call.inputs, outputs["out"], **call.options).explanations


def test_without_the_rule_they_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative test."""
    monkeypatch.setattr(explain, "speaks", lambda values: True)
    call, outputs = filled(GEMM, math.nan)
    assert diagnose(call.contract.name, call.inputs, outputs["out"], **call.options).explanations


def test_nan_in_other_places_is_no_evidence() -> None:
    """A fault that knows nothing of some elements does not reproduce the NaN of others."""
    case = cases.parse(GEMM)
    call = Call(get(case.contract), case.inputs(), case.call_options(), get_schedule("sm90.promote128"))
    right = run(call)
    assert isinstance(right, Tensor)
    output = right.clone()
    output[torch.rand(output.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = math.nan
    names = diagnose(case.contract, call.inputs, output, **call.options).names
    assert not any(MARKED in name or "swizzled" in name for name in names), names


def test_nan_that_a_fault_predicts_is_named() -> None:
    """The codes that E5M2 reads as NaN make these results NaN and no others."""
    case = cases.parse(GEMM.replace("n=32", "n=48"))
    call = Call(get(case.contract), case.inputs(), case.call_options(), get_schedule("sm90.promote128"))
    fault = get_fault("NaN code of A turned into 448")
    bits = case.inputs()["a"].view(torch.uint8).clone()
    bits[4, 7] = 0x7F
    inputs = {**case.inputs(), "a": bits.view(torch.float8_e4m3fn)}
    call = Call(call.contract, inputs, call.options, call.schedule)
    output = run(call, fault)
    assert diagnose(case.contract, inputs, output, **call.options).names == (fault.name,)  # type: ignore[arg-type]


def test_speaks() -> None:
    assert not speaks(torch.tensor([math.nan, 0.0, -0.0, math.inf, 2.0, 2.0]))
    assert speaks(torch.tensor([2.0, 2.5])) and not speaks(torch.tensor([], dtype=torch.bfloat16))
    assert speaks(torch.tensor([1, 2])) and not speaks(torch.tensor([0, 2]))


SQUARES = "mxfp8_quantize_2d/bf16-e4m3/32x32/m=160,k=160/family=randn/seed=12"


def test_two_scales_of_many_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """An amax without the last rows of a square moves two exponents of 25, and so does one of negative values here: too
    little to tell. The negative test takes the rule away."""
    case = cases.parse(SQUARES)
    call = Call(get(case.contract), case.inputs(), case.call_options())
    short = call.inputs["x"].clone()
    short.unflatten(0, (5, 32))[:, 16:] = 0
    lower = call.contract.expected(Call(call.contract, {"x": short}, call.options))["scale"]
    signed = run(call, get_fault("block amax of signed values"))
    assert isinstance(signed, dict) and torch.equal(signed["scale"], lower)
    assert not diagnose(case.contract, call.inputs, signed, **call.options).explanations
    monkeypatch.setattr(observed, "BY_CHANCE", 1e9)
    assert diagnose(case.contract, call.inputs, signed, **call.options).explanations


def test_the_evidence_needed_follows_from_the_candidates_tried() -> None:
    """35 candidates: 11.5 bits, fifty: 12; a rarer mistake and more candidates need more."""
    assert observed.needed(35) == pytest.approx(math.log2(35 * 80)) and 11.9 < observed.needed(50) < 12
    assert observed.needed(51) > observed.needed(50) and observed.needed(0) == observed.needed(1)


@pytest.mark.turns(4)
def test_two_scales_of_an_amax_without_negative_values_are_enough_among_35() -> None:
    """Two E4M3 scales of six blocks, 11.9 bits: lost while every routine needed the bits of fifty candidates."""
    case = cases.parse("scaled_fp4_quant/bf16/1x16/m=3,k=32/family=randn/seed=12")
    call = Call(get(case.contract), case.inputs(), case.call_options())
    name = "block amax of signed values"
    signed = run(call, get_fault(name))
    assert isinstance(signed, dict)
    assert name in oracle.judge(case.contract, call.inputs, signed, **call.options).explained_by
