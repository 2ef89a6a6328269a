"""Shared memory on a GPU: the parent's own reading of guard zones, inputs and outputs, with CUDA IPC and without."""

from __future__ import annotations

import pytest
import torch

from oracle.harness import launches
from oracle.harness.memory import Guarded
from oracle.harness.process import Worker
from oracle.harness.session import Session
from oracle.harness.validation import arch_of, validate
from oracle.routines import cases, get

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

GEMM = "fp8_gemm_nt"
CASE = f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=33,n=192,k=384/family=exact/seed=1"
KERNELS = "tests.support.subjects.on_device:"


@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_every_way(place: str) -> None:
    """A right kernel, one that writes behind its output, one that changes an input; each as it should be."""
    case = cases.parse(CASE)
    for name, guards, changed in (("right", False, ()), ("beyond", True, ()), ("in_place", False, ("a_scale",))):
        with Worker(KERNELS + name, adapter=None, device="cuda", limit=120) as worker:
            session = Session(worker, get(GEMM), device="cuda", arch=arch_of("cuda"), numerics=None)
            session.call(case.inputs(), case.call_options())
            assert worker.place == "cuda", "the driver of this machine shares no memory"
            worker.place = place
            answer = session.call(case.inputs(), case.call_options())
            assert answer.problem is None and bool(answer.guards) is guards and answer.changed == changed
            assert not session.judge(case.inputs(), case.call_options(), answer).status.is_failure


def test_a_slow_snapshot_is_of_the_inputs_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker puts other inputs in their place before it calls: a copy made late would be of those."""
    case, other = cases.parse(CASE), cases.parse(CASE.replace("exact", "ties"))
    snapshot = Guarded.snapshot

    def slow(made: Guarded) -> torch.Tensor:
        torch.cuda._sleep(200_000_000)  # a tenth of a second on this stream
        return snapshot(made)

    monkeypatch.setattr(Guarded, "snapshot", slow)
    with Worker(KERNELS + "right", adapter=None, device="cuda", limit=120) as worker:
        session = Session(worker, get(GEMM), device="cuda", arch=arch_of("cuda"), numerics=None)
        answer = session.call(case.inputs(), case.call_options(), mode=launches.LATE, beside=other.inputs())
        assert answer.problem is None and answer.changed == ()


def test_a_whole_run() -> None:
    """Every watch, in the default mode."""
    report = validate(KERNELS + "right", GEMM, device="cuda", case=CASE.replace("exact", "randn"))
    assert [f.verdict.summary for f in report.failures] == [] and report.conforms, report.printed
