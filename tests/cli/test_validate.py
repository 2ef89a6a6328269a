"""``fp8-oracle validate`` as a run: one model of outcomes with ``verify``, its record, reports and commands."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from oracle.cli.validate import run_of
from oracle.harness import validation
from oracle.harness.endurance import OVER, Soak
from oracle.harness.report import NUMBERS, Told
from oracle.harness.session import Session
from oracle.harness.validation import validate
from oracle.report import record
from tests.support.commandline import Cli
from tests.support.forked import forked

GEMM = "fp8_gemm_nt"
SUBJECTS = "tests.support.subjects"
HEAD = f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128"
CASES = [f"{HEAD}/m={m},n=128,k=256/family=randn/seed={seed}" for m, seed in ((5, 1), (9, 2), (17, 3))]
ASKED = [*(word for case in CASES for word in ("--case", case)), "--explain", "off"]  # which takes most of the time

MINE = """
import torch

def right(a, a_scale, b, b_scale, out_dtype):
    n, k = b.shape
    x = a.double() * a_scale.double().repeat_interleave(128, 1)[:, :k]
    w = b.double() * b_scale.double().repeat_interleave(128, 1)[:, :k].repeat_interleave(128, 0)[:n]
    return (x @ w.T).to(out_dtype)

def wrong(a, a_scale, b, b_scale, out_dtype):
    return right(a, a_scale * 2, b, b_scale, out_dtype) if a.shape[0] > 5 else right(a, a_scale, b, b_scale, out_dtype)

def deep(a, a_scale, b, b_scale, out_dtype):
    return below(a)

def below(a):
    return a.reshape(7, -1)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a new user: one module, and the current folder; the installed command does not search it."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def interrupting(call: Callable[..., Any], end: Callable[[], Any]) -> Callable[..., Any]:
    """``Session.call`` that ends the run, as from outside, once the second case is called."""

    def called(self: Session, inputs: Any, *more: Any, **named: Any) -> Any:
        if inputs["a"].shape[0] == 9 and (error := end()) is not None:
            raise error
        return call(self, inputs, *more, **named)

    return called


def outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """The outcomes of a record by id, the last of each."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["outcome"]["id"]: line["outcome"] for line in lines if line["kind"] == "outcome"}


@pytest.mark.turns(4)
@pytest.mark.usefixtures("in_process")
class TestReports:
    """The writers of ``verify`` take what ``validate`` found."""

    def test_every_report(self, cli: Cli, mine: Path) -> None:
        """One line for each case and one for each watch, the same in every form."""
        files = [word for name in ("html", "junit", "markdown", "json") for word in (f"--{name}", mine / name)]
        ran = cli("validate", "mine:wrong", "--contract", GEMM, *ASKED, *files, "--record", mine / "r.jsonl")
        found = outcomes(mine / "r.jsonl")
        assert ran.status == 1 and [found[case]["fails"] for case in CASES] == [False, True, True]
        assert not any(found[f"{GEMM}/{watch}"]["fails"] for watch in ("guard zones", "rerun determinism"))
        suites = ET.parse(mine / "junit").getroot()
        assert {case.get("name") for case in suites.iter("testcase")} == set(found)
        failed = {case.get("name") for case in suites.iter("testcase") if case.find("failure") is not None}
        assert failed == {*CASES[1:]}
        assert "2 of 3 outputs wrong" in (mine / "markdown").read_text()
        assert CASES[1] in (mine / "html").read_text()
        (read, _), (again, _) = record.read_report(mine / "r.jsonl"), record.read_report(mine / "json")
        assert {(o.id, o.status, o.watch, o.also) for o in read.outcomes} == {
            (o.id, o.status, o.watch, o.also) for o in again.outcomes
        }
        assert cli("report", mine / "r.jsonl").status == 1
        same = cli("compare", mine / "r.jsonl", mine / "json", "--quiet")
        assert same.status == 0 and "fails differently" not in same.out
        healed = cli("validate", "mine:right", "--contract", GEMM, *ASKED, "--record", mine / "new.jsonl")
        assert healed.status == 0
        pair = cli("compare", mine / "r.jsonl", mine / "new.jsonl", "--pair", "mine:wrong=mine:right")
        assert pair.status == 0 and "healed (2)" in pair.out and "1 of" not in pair.out.partition("healed")[0]

    def test_wrong_numbers_have_one_line(self, cli: Cli, mine: Path) -> None:
        """What fails only because of them is named there; other bits on a rerun are a cause of their own (the twin)."""
        ran = cli("validate", "mine:wrong", "--contract", GEMM, *ASKED[2:4], "--explain", "off")
        assert ran.out.count("repro:") == 1
        assert "only because of that: " in ran.out and "scale doubled, sign flipped, rows permuted" in ran.out
        wrong = validate(f"{SUBJECTS}.broken:random", GEMM, case=CASES[0].replace("bf16/", "f32/"))
        assert [f.watch for f in wrong.failures] == ["rerun determinism"]

    def test_a_cause_is_printed_once(self, cli: Cli, mine: Path) -> None:
        """The first case in full, the others counted, in the singular and the plural."""
        ran = cli("validate", "mine:wrong", "--contract", GEMM, *ASKED)
        assert ran.out.count("FAILED fp8_gemm_nt") == 1 and "  1 more case fails; --verbose names each" in ran.out
        assert "3 cases judged on cpu, 1 worker, " in ran.out
        every = cli("validate", "mine:wrong", "--contract", GEMM, *ASKED, "--verbose")
        assert sum(line.startswith("FAILED ") for line in every.out.splitlines()) == 3

    def test_the_first_failure_ends_it(self, cli: Cli, mine: Path) -> None:
        ran = cli("validate", "mine:wrong", "--contract", GEMM, *ASKED, "-x")
        assert ran.status == 1 and "stopped: a case failed; 1 of 3 cases not judged" in ran.out
        assert "2 of 3 cases judged" in ran.out

    def test_the_traceback_is_the_kernels(self, cli: Cli, mine: Path) -> None:
        """Its frames and no other, on the screen and in the record; `verify` says them too."""
        asked = ("--case", CASES[0], "--record", mine / "r.jsonl", "--html", mine / "r.html")
        ran = cli("validate", "mine:deep", "--contract", GEMM, *asked)
        said = ["mine.py:14 in deep: return below(a)", "mine.py:17 in below: return a.reshape(7, -1)"]
        shown = [line.strip() for line in ran.out.splitlines() if line.startswith("    at ")]
        assert shown == [f"at {frame}" for frame in said]
        assert outcomes(mine / "r.jsonl")[CASES[0]]["verdict"]["frames"] == said
        assert all(f"at <code>{frame}" in (mine / "r.html").read_text() for frame in said)

    def test_wrong_files_are_refused_before_a_call(self, cli: Cli, mine: Path) -> None:
        (mine / "r.jsonl").write_text("something\n")
        ran = cli("validate", "mine:right", "--contract", GEMM, *ASKED, "--record", mine / "r.jsonl")
        assert ran.status == 2 and "exists; --resume continues it" in ran.err
        assert (
            "no line of a record"
            in cli("validate", "mine:right", "--contract", GEMM, "--record", mine / "r.jsonl", "--resume").err
        )
        assert "--resume continues a record" in cli("validate", "mine:right", "--contract", GEMM, "--resume").err


@pytest.mark.turns(4)
class TestCommands:
    """The command of a failure repeats exactly it."""

    @pytest.mark.usefixtures("in_process")
    @pytest.mark.parametrize(
        "more",
        [
            (),
            ("--numerics", "ieee32.any", "--explain", "off", "--limit", "60"),
            ("--adapter", f"{SUBJECTS}.right:adapt_pair", "--domain", "m >= 2"),
        ],
    )
    def test_repeats(self, cli: Cli, mine: Path, more: tuple[str, ...]) -> None:
        """Run as it is printed, it gives the same verdict, explanation and command."""
        kernel = f"{SUBJECTS}.broken:drops_last_k"
        first = cli("validate", kernel, "--contract", GEMM, "--case", CASES[0], *more, "--record", mine / "1")
        (failed,) = [o for o in outcomes(mine / "1").values() if o["fails"]]
        again = cli(*shlex.split(failed["repro"])[1:], "--record", mine / "2")
        (repeated,) = [o for o in outcomes(mine / "2").values() if o["fails"]]
        assert (first.status, again.status) == (1, 1)
        assert {**repeated, "seconds": 0} == {**failed, "seconds": 0}

    @pytest.mark.usefixtures("in_process")
    def test_of_the_whole_run(self, cli: Cli, mine: Path) -> None:
        """What no case shows is repeated with the profile and the seed that were drawn."""
        cli("validate", "mine:gone", "--contract", GEMM, "--record", mine / "1")
        (failed,) = outcomes(mine / "1").values()
        assert failed["id"] == f"{GEMM}/load" and "has no 'gone'" in failed["verdict"]["summary"]
        assert "--profile quick --seed " in failed["repro"]
        cli(*shlex.split(failed["repro"])[1:], "--record", mine / "2")
        assert [o["repro"] for o in outcomes(mine / "2").values()] == [failed["repro"]]

    def test_of_a_provider(self, cli: Cli, mine: Path) -> None:
        """`verify` finds it in the current folder, and the command names it, its arch and what else was asked."""
        module = [
            "import oracle",
            "from example_subjects import Example, zero_row",
            "",
            "def two():",
            "    one = zero_row()[0]",
            "    return [one, Example(one.name, one.work, arch='sm89', numerics=None)]",
        ]
        (mine / "provided.py").write_text("\n".join(module))
        sys.path.remove(str(mine))
        asked = ("--provider", "provided:two", "--explain", "off", "--fixtures", "none")
        ran = cli("verify", "--case", CASES[0], "--subject", "zero_row", *asked, "--record", mine / "1")
        assert ran.status == 1, ran.err
        for failed in [json.loads(line)["outcome"] for line in (mine / "1").read_text().splitlines()[1:-1]]:
            assert f"--arch {failed['arch']} --provider provided:two --explain off" in failed["repro"]
            again = cli(*shlex.split(failed["repro"])[1:], "--record", mine / f"of {failed['arch']}")
            (repeated,) = outcomes(mine / f"of {failed['arch']}").values()
            assert again.status == 1 and {**repeated, "seconds": 0} == {**failed, "seconds": 0}


@pytest.mark.turns(4)
class TestResuming:
    """A record is continued with its seed; what the same code has judged is not called again."""

    @pytest.mark.usefixtures("in_process")
    def test_after_an_interrupt(self, cli: Cli, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The summary and a whole record up to there; then the rest, and the whole has what one run has."""
        asked = ("validate", "mine:right", "--contract", GEMM, *ASKED, "--record")
        with monkeypatch.context() as patched:
            patched.setattr(Session, "call", interrupting(Session.call, KeyboardInterrupt))
            whole = cli(*asked, mine / "1", "--json", mine / "json")
        assert (
            whole.status == 130
            and "stopped: interrupted" in whole.out
            and "UNFINISHED  1 of 3 cases judged" in whole.out
        )
        assert json.loads((mine / "1").read_text().splitlines()[-1])["unfinished"] == 2
        said = json.loads((mine / "json").read_text())
        counts = {name: said[name] for name in ("conforms", "exit_code", "judged", "planned", "unfinished", "stopped")}
        assert list(counts.values()) == [False, 130, 1, 3, 2, "interrupted"]
        for written in ("1", "json"):
            again = cli("report", mine / written)
            assert again.status == 1 and "2 not run" in again.out
        rest, one = cli(*asked, mine / "1", "--resume"), cli(*asked, mine / "2")
        assert rest.status == one.status == 0 and "3 cases judged" in rest.out
        both = [{name: {**o, "seconds": 0} for name, o in outcomes(mine / f).items()} for f in "12"]
        assert both[0] == both[1]

    @pytest.mark.usefixtures("in_process")
    def test_what_is_recorded_is_not_called(self, mine: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nor when it failed: the same report, without one call. Edited code is called again (the twin)."""
        asked = ("validate", "mine:wrong", "--contract", GEMM, *ASKED, "--record", mine / "1")
        assert cli(*asked).status == 1
        before = outcomes(mine / "1")
        called = list[int]()
        real = Session.call
        monkeypatch.setattr(Session, "call", lambda self, *a, **k: called.append(1) or real(self, *a, **k))
        again = cli(*asked, "--resume")
        assert again.status == 1 and not called and "1 more case fails" in again.out
        assert outcomes(mine / "1") == before
        (mine / "mine.py").write_text(MINE.replace("a_scale * 2", "a_scale * 4"))
        edited = cli(*asked, "--resume")
        assert called and "are of other versions (kernel mine:wrong+" in edited.err

    @pytest.mark.usefixtures("in_process")
    def test_the_seed_is_that_of_the_record(self, mine: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        few = validation.cases.parse(CASES[0])
        monkeypatch.setattr(validation, "default_cases", lambda contract, seed, profile: [replace(few, seed=seed)])
        asked = ("validate", "mine:right", "--contract", GEMM, "--record", mine / "1")
        assert cli(*asked).status == 0
        first = outcomes(mine / "1")
        assert cli(*asked, "--resume").status == 0 and outcomes(mine / "1") == first
        other = cli(*asked, "--resume", "--seed", "0")
        assert other.status == 2 and "this run is" in other.err and "seed=0" in other.err

    @pytest.mark.usefixtures("forked_workers")
    @pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal(self, mine: Path, end: signal.Signals) -> None:
        """From outside, while the kernel runs in its process: status 130, a whole record, nothing left behind."""
        record_at = mine / "1"

        def run() -> int:
            from oracle.cli import main

            Session.call = interrupting(Session.call, lambda: os.kill(os.getpid(), end))  # type: ignore[method-assign]
            return main(["validate", "mine:right", "--contract", GEMM, *ASKED, "--record", str(record_at)])

        with open(mine / "out", "wb") as out:
            assert forked(run, stdout=out.fileno(), stderr=out.fileno()).wait() == 130
        said = (mine / "out").read_text()
        assert "UNFINISHED  1 of 3 cases judged" in said and said.rstrip().endswith("fp8-oracle: interrupted")
        assert [o["id"] for o in outcomes(record_at).values() if not o.get("watch")] == CASES[:1]
        assert record.read(record_at).report().unfinished == 2


@pytest.mark.turns(4)
@pytest.mark.usefixtures("in_process", "unexplained")
def test_a_caller_is_told(mine: Path) -> None:
    """What runs, and every finding as it is known; a validation is the same when nobody listens."""

    class Listens(Told):
        cases: list[str] = []
        findings: list[object] = []

        def runs(self, case: str) -> None:
            self.cases.append(case)

        def found(self, findings: Any) -> None:
            self.findings += findings

    report = validate("mine:wrong", GEMM, case=CASES, told=Listens())
    assert Listens.cases == CASES and tuple(Listens.findings) == report.findings
    alone = validate("mine:wrong", GEMM, case=CASES)
    assert [(f.case, f.watch, f.verdict, f.follows) for f in alone.findings] == [
        (f.case, f.watch, f.verdict, f.follows) for f in report.findings
    ]
    assert sum(f.watch == NUMBERS for f in report.failures) == 2


def test_a_soak_as_a_run() -> None:
    """An outcome for each stretch and one for each failure, which make the run fail; without them it is good."""
    verdict = {"status": "FAILED", "summary": "3 of 8 elements outside the bound"}
    failures = [{"case": CASES[0], "watch": NUMBERS, "verdict": verdict}]
    good: dict[str, Any] = {"lane": 0, "number": 0, "cases": 7, "seconds": 2.5, "failures": []}
    about = {"kernel": "mine:right", "contract": GEMM}
    run = run_of(Soak(about, [good, {**good, "number": 1, "failures": failures}]), "cpu")
    assert [(str(o.status), o.watch) for o in run.outcomes] == [("PASSED", ""), ("PASSED", ""), ("FAILED", "")]
    assert not run.ok and run.outcomes[0].verdict.summary == "7 cases judged" and run.seconds == 5.0
    assert run_of(Soak(about, [good], OVER), "cpu").ok
    assert run_of(Soak(about, [good], "3% of the host's memory is left"), "cpu").problems == (
        "the soak ended early: 3% of the host's memory is left",
    )
