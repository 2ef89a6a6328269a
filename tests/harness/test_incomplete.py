"""A run that was stopped, ran out of time, lost a process or left a case never conforms, whatever passed before."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from oracle.harness import jobs, validation
from oracle.harness.report import INTERRUPTED, NUMBERS, Finding, Report
from oracle.harness.session import Session, passed
from oracle.harness.validation import validate
from oracle.verdict.compare import Status

GEMM = "fp8_gemm_nt"
HEAD = f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128"
CASES = [f"{HEAD}/m={m},n=128,k=128/family=randn/seed={m}" for m in (2, 3, 4)]
RIGHT = "tests.support.subjects.right:gemm"
pytestmark = pytest.mark.usefixtures("unexplained")


@pytest.fixture(autouse=True)
def one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the watches that call the kernel again."""
    monkeypatch.setattr(validation, "WATCHED", dict.fromkeys(validation.PROFILES, 0))


def ending(monkeypatch: pytest.MonkeyPatch, rows: int, end: Callable[[], None]) -> None:
    """``end`` is called where the case of so many rows would be."""
    call = Session.call

    def called(self: Session, inputs: Mapping[str, Any], *more: Any, **named: Any) -> Any:
        if inputs["a"].shape[0] == rows:
            end()
        return call(self, inputs, *more, **named)

    monkeypatch.setattr(Session, "call", called)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("in_process")
def test_a_whole_run_conforms() -> None:
    report = validate(RIGHT, GEMM, case=CASES, limit=60)
    assert (report.conforms, report.exit_code, report.judged, report.planned) == (True, 0, 3, 3)
    assert (report.unfinished, report.stopped, report.incomplete) == (0, "", "")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("rows", "judged"), [(2, 0), (3, 1), (4, 2)])
def test_interrupted(monkeypatch: pytest.MonkeyPatch, rows: int, judged: int) -> None:
    """The case that was being called is not judged either, also where it is the last one."""
    ending(monkeypatch, rows, interrupt)
    report = validate(RIGHT, GEMM, case=CASES, limit=60)
    assert (report.conforms, report.exit_code, report.failures) == (False, 130, ())
    assert (report.judged, report.planned, report.unfinished, report.stopped) == (judged, 3, 3 - judged, INTERRUPTED)
    cases = "3 cases"
    assert report.incomplete == f"interrupted; {3 - judged} of {cases} not judged"


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal(monkeypatch: pytest.MonkeyPatch, end: signal.Signals) -> None:
    """From Python too, while a worker runs; afterwards the signal does what it did before."""
    before = signal.getsignal(end)
    ending(monkeypatch, 3, lambda: os.kill(os.getpid(), end))
    report = validate(RIGHT, GEMM, case=CASES, limit=60)
    assert (report.conforms, report.exit_code, report.judged, report.unfinished) == (False, 130, 1, 2)
    assert signal.getsignal(end) is before


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(("kernel", "words"), [("hangs", "no answer within 1 s"), ("dies", "SIGSEGV")])
def test_a_call_without_an_answer(kernel: str, words: str) -> None:
    """The time limit, and a lost worker: the case fails."""
    report = validate(f"tests.support.subjects.broken:{kernel}", GEMM, case=CASES[:1], limit=1)
    assert (report.conforms, report.exit_code, report.judged) == (False, 1, 0)
    assert [(f.verdict.status, words in f.verdict.summary) for f in report.failures] == [(Status.CRASHED, True)]


@pytest.mark.usefixtures("in_process")
def test_a_lost_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of ``jobs`` that dies costs the case it judged, which fails."""
    result = jobs.Pool.result
    given = iter([jobs.Lost("the process that judged it died by SIGKILL")])
    monkeypatch.setattr(jobs.Pool, "result", lambda self, number: next(given, None) or result(self, number))
    report = validate(RIGHT, GEMM, case=CASES, limit=60, jobs=2)
    assert (report.conforms, report.exit_code, report.judged) == (False, 1, 2)
    assert "died by SIGKILL" in report.failures[0].verdict.summary


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("left", [1, 3])
def test_cases_that_are_left(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """For whatever reason, without a word of why: a fault of this harness must not make a kernel conform."""
    run = validation._run

    def cut(*arguments: Any) -> Iterator[Any]:
        for number, group in enumerate(run(*arguments)):
            if number == 3 - left:
                return
            yield group

    monkeypatch.setattr(validation, "_run", cut)
    report = validate(RIGHT, GEMM, case=CASES, limit=60)
    assert (report.conforms, report.judged, report.unfinished, report.stopped) == (False, 3 - left, left, "")
    assert report.exit_code == 2 and report.incomplete == f"{left} of 3 cases not judged"


def test_a_report_by_itself() -> None:
    """One finding that passes: conforms, unless the run was stopped or left a case; the fields decide alone."""
    good = (Finding(CASES[0], NUMBERS, passed("right")),)
    asked = ("k", GEMM, "cpu", "cpu", good)
    assert Report(*asked).conforms and Report(*asked, planned=1).exit_code == 0
    assert Report(*asked, planned=2, unfinished=1).exit_code == 2
    assert Report(*asked, stopped="3 calls in a row gave no answer").exit_code == 2
    assert Report(*asked, stopped=INTERRUPTED).exit_code == 130
    assert Report(*asked, stopped=INTERRUPTED).to_json()["conforms"] is False
