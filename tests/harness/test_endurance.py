"""A soak in stretches: a record that continues, rules that stop it, a leak that is seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oracle.errors import FixtureError, OptionError
from oracle.harness import endurance
from oracle.harness.endurance import Soak, soak
from oracle.harness.jobs import Lost
from oracle.harness.report import Report
from oracle.report.record import locked

KERNEL, GEMM = "tests.support.subjects.right:gemm", "fp8_gemm_nt"
BAD = {"case": "-", "watch": "numbers", "verdict": {"status": "FAILED", "summary": "wrong"}}


class Stretches:
    """In the place of a pool: what every stretch gives, in their order, and the tasks that it was handed."""

    def __init__(self, *given: Any) -> None:
        self.given, self.tasks = list(given), list[tuple[int, float]]()

    def __call__(self, *_: object) -> Stretches:
        return self

    def __enter__(self) -> Stretches:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, task: tuple[int, float]) -> int:
        self.tasks.append(task)
        return len(self.tasks)

    def result(self, number: int) -> object:
        if isinstance(self.given[0], Lost):
            return self.given.pop(0)
        return {"seed": self.tasks[number - 1][0], **self.given.pop(0)}


def facts(cases: int = 3, *failures: object, seconds: float = 5.0) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "cases": cases,
        "gmac": 0.5,
        "memory": None,
        "files": None,
        "clock": "",
        "failures": list(failures),
    }


def run(monkeypatch: pytest.MonkeyPatch, *given: Any, **asked: Any) -> tuple[Soak, Stretches]:
    pool = Stretches(*given)
    monkeypatch.setattr(endurance, "Pool", pool)
    return soak(KERNEL, GEMM, **{"seconds": 600, "seed": 1, "most": 2, **asked}), pool


def test_it_stops_after_failures_and_every_stretch_has_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, pool = run(monkeypatch, facts(), facts(3, BAD), facts(), Lost("the process that judged it died by SIGSEGV"))
    assert (found.ended, found.exit_code, found.cases) == ("2 stretches with a failure", 1, 9)
    assert len({seed for seed, _ in pool.tasks}) == 4 and "SIGSEGV" in " ".join(found.lines())


def test_no_failure_and_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(endurance.time, "monotonic", lambda: next(clock))
    found, _ = run(monkeypatch, *[facts() for _ in range(9)], seconds=350)
    assert (found.ended, found.exit_code) == ("its time is over", 0)


def test_little_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endurance, "_free", lambda: 0.03)
    found, _ = run(monkeypatch, facts())
    assert (found.ended, found.exit_code) == ("3% of the host's memory is left", 2), "it was stopped: no 0"


def test_a_stretch_that_was_told_to_end_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends, which the soak reports as a failure; a stretch whose time is over counts."""
    for stopped in ("interrupted", ""):
        report = Report("k", GEMM, "cpu", "cpu", (), stopped=stopped)
        monkeypatch.setattr(endurance, "validate", lambda *_, report=report, **__: report)
        with endurance._stretching(KERNEL, GEMM, "cpu", None, {}) as stretch:
            if stopped:
                with pytest.raises(KeyboardInterrupt):
                    stretch((1, 1.0))
            else:
                assert stretch((1, 1.0))["failures"] == []


class TestRecord:
    def test_continued(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """What is there is not run again, and counts; a line that was cut short is dropped."""
        path = tmp_path / "soak.jsonl"
        run(monkeypatch, facts(3, BAD), facts(), facts(4, BAD), record=path)
        with path.open("a") as stream:
            stream.write('{"kind":"stre')
        found, pool = run(monkeypatch, facts(5, BAD), record=path, resume=True, most=3)
        assert found.cases == 15 and len(pool.tasks) == 1
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line.get("number") for line in lines] == [None, 0, 1, 2, 3]
        assert len({line["seed"] for line in lines[1:]}) == 4

    def test_refused(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        path = tmp_path / "soak.jsonl"
        run(monkeypatch, facts(3, BAD), facts(3, BAD), record=path)
        with pytest.raises(OptionError, match="--resume continues it"):
            run(monkeypatch, facts(), record=path)
        with pytest.raises(OptionError, match="has seed=1, this run 2; name another file"):
            run(monkeypatch, facts(), record=path, resume=True, seed=2)
        path.write_text("nonsense\n")
        with pytest.raises(FixtureError, match="no record of a soak"):
            run(monkeypatch, facts(), record=path, resume=True)

    def test_two_runs(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The second one is refused, and changes nothing; nor is there a file where no folder is."""
        path = tmp_path / "soak.jsonl"
        run(monkeypatch, facts(3, BAD), facts(3, BAD), record=path)
        before = path.read_bytes()
        with locked(path), pytest.raises(FixtureError, match="another run is writing it"):
            run(monkeypatch, facts(), record=path, resume=True)
        assert path.read_bytes() == before
        with pytest.raises(FixtureError, match="cannot be written"):
            run(monkeypatch, facts(), record=tmp_path / "none" / "soak.jsonl")


def test_what_a_process_takes_is_seen() -> None:
    """What this process starts is looked at; of those that lived long the largest is the kernel's."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in endurance._descendants()
        child.communicate(b"\n")
    watched = endurance._Watched()
    big = [(400 << 20, 9)] * 4 + [(900 << 20, 90)] * 4
    watched._seen = {1: [(12 << 20, 7)] * 8, 2: big, 3: [(999 << 20, 7)] * 2}
    assert watched.growth() == (500 << 20, 81) and watched.at(1) == [9, 90]
    watched._seen = {2: big[:3]}
    assert watched.growth() == (0, 0)  # too short to say
