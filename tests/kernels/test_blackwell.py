"""Products of MX and NVFP4 on machines with Blackwell's instructions: planned, prepared, called and judged.

The libraries are fakes that multiply with the oracle from the operands as they lie in memory
(:mod:`tests.support.fake_blackwell`). What the layer gives back must be right by the contract and by the schedule that
the plan names; every argument of every call (:mod:`tests.support.blackwell_rows`) is changed, and no change may pass.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import oracle
from kernels.platform import Machine
from kernels.verbs import SERVED
from oracle.routines import cases
from oracle.verdict.compare import Status
from tests.support.blackwell_rows import (
    FI,
    FREE,
    ROWS,
    ROWS8,
    Planned,
    Row,
    changes,
    claimed,
    named,
    of_libraries,
    planned,
    serve,
    verdict,
)
from tests.support.fake_blackwell import simulated


@pytest.mark.sampled(6)
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_right_by_the_schedule_that_the_plan_names(row: Row) -> None:
    """The planned backend is called by its name, and gives what is right: bit for bit where one chain is named."""
    served = serve(row)
    assert served.decision.backend == row.backend
    named_in_call = served.call.arguments.get("backend")
    assert "backend=" not in served.decision.kernel or f'(backend="{named_in_call}")' in served.decision.kernel
    assert served.call.name in served.decision.kernel or served.call.name == "scaled_mm"
    assert served.decision.numerics
    assert verdict(served, served.out, row.arch, claimed(served.decision)) is Status.PASSED
    excluded = any("excluded from tuning" in step for step in served.decision.steps)
    assert bool(served.call.excluded) == (excluded and not row.config.split_k)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_every_changed_argument_is_seen(row: Row) -> None:
    """No argument can be another one: the library refuses it, the plan names another kernel, or the verdict fails."""
    served = serve(row)
    made = list(changes(served, row.arch))
    assert not [(name, how) for name, how, seen in made if not seen]
    unchanged = set(served.call.arguments) - {name for name, _, _ in made} - FREE
    assert unchanged <= {name for name in unchanged if served.call.arguments[name] is None}


UNJUDGED = {
    "dynamic_flashinfer_deepgemm_blockscale_gemm (M=32)": "DeepGEMM's dense product of an input that it quantises",
    "torch_per_tensor_w8a8_scaled_mm": "on a CPU the layer rounds the sums of torch._scaled_mm itself",
    "torch_per_token_w8a8_scaled_mm": "on a CPU the layer rounds the sums of torch._scaled_mm itself",
    "apply_fi_trtllm_fp8_per_tensor_moe": "no fake reads the order of rows of its weights",
    "fp8_mqa_logits": "no fake of it computes",
    "fp8_paged_mqa_logits": "no fake of it computes",
}
"""Routines of the plan without a row here on some machine, and why."""


@functools.cache
def judged() -> frozenset[Planned]:
    return frozenset(planned(row) for row in ROWS)


def lacking(arch: str, rows: frozenset[Planned]) -> set[str]:
    """Routines that a library serves on a machine, which no row is about."""
    return {routine for routine, plan in of_libraries(Machine.described(arch)).items() if plan not in rows}


@pytest.mark.parametrize("arch", ["sm100", "sm103", "sm120", "sm121"])
def test_every_library_that_the_plan_names_is_judged(arch: str) -> None:
    """No library is named without a row here, but for the routines above; the twin: without the rows of a backend its
    routines lack one."""
    unjudged = lacking(arch, judged())
    assert unjudged <= set(UNJUDGED), unjudged - set(UNJUDGED)
    without = frozenset(plan for plan in judged() if plan.backend != "torch")
    assert "scaled_mm" in lacking(arch, without) - unjudged


def test_no_reason_outlives_its_gap() -> None:
    """Every routine that is excused lacks a row on some machine."""
    assert set(UNJUDGED) == set().union(*(lacking(arch, judged()) for arch in ("sm100", "sm103", "sm120", "sm121")))


@pytest.mark.parametrize("arch", ["sm100", "sm120"])
def test_a_layer_by_grouped_products(arch: str) -> None:
    """vLLM's layer in NVFP4 is two of its grouped products, and right as a whole (the twin: with the scales of another
    expert it is not)."""
    case = cases.parse("cutlass_moe_fp4/bf16xe2m1-bf16/1x16:1x16/t=4,e=3,h=64,i=64,k=2/map=1/family=randn/seed=3")
    inputs, options = case.inputs(), dict(case.call_options())
    with simulated(Machine.described(arch)) as libraries:
        out = SERVED[case.contract](inputs, options)
        wrong = SERVED[case.contract]({**inputs, "w2_scale": inputs["w2_scale"].roll(1, 0)}, options)
    assert [call.name for call in libraries.calls] == ["cutlass_fp4_group_mm"] * 4
    for made, status in ((out, Status.PASSED), (wrong, Status.FAILED)):
        assert isinstance(made, Tensor)
        assert oracle.judge(case.contract, inputs, made, arch=arch, explain="off", **options).status is status


def test_what_is_free_stays_free() -> None:
    """The twin: with another tile the numbers are the same."""
    served = serve(Row(ROWS8, "sm100", (), FI))
    right = served.call.again()
    for other in ({"tile_n": 256}, {"tile_k": 256}, {"mma_sm": 2}, {"swap_ab": False}):
        assert torch.equal(served.call.again(**other), right)
