"""The record of a run: what was judged is on the disk, survives a kill, and is not judged twice."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import record_subjects
from reports import every_status, many, outcome, read_outcome
from rich.console import Console

from oracle.cli import main, runs
from oracle.errors import FixtureError, OptionError
from oracle.harness import provenance
from oracle.harness.runner import Item
from oracle.report import record
from oracle.report.files import to_json
from oracle.report.outcome import Report
from oracle.report.record import Run
from oracle.routines import cases
from oracle.verdict.compare import Status, Verdict
from tests.support.commandline import Cli
from tests.support.forked import forked
from tests.support.paths import ROOT

CASES = [f"fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=5,n=256,k=256/family=randn/seed={s}" for s in range(1, 6)]
SCHEMA = json.loads((ROOT / "oracle" / "report" / "schema.json").read_text())


def run_of(**change: object) -> Run:
    facts = {"started": "2026-01-02", "machine": {}, "versions": {"a": "1"}, "selection": {}, "planned": 9}
    return Run(**{**facts, **change})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def five_cases(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every profile is five small cases; the counting subject starts at none."""
    monkeypatch.setattr("oracle.routines.profiles.cases", lambda contract, profile: [*map(cases.parse, CASES)])
    record_subjects.calls.set(0)
    yield


def provide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    points = [EntryPoint("ours", f"record_subjects:{name}", "fp8_oracle.subjects")]
    monkeypatch.setattr("oracle.harness.subjects.entry_points", lambda group: points)


def verify(cli: Cli, path: Path, *more: object) -> int:
    return cli("verify", "--contract", "fp8_gemm_nt", "--fixtures", "none", "--record", path, *more).status


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.turns(4)
class TestResume:
    """--resume repeats nothing that is finished; a changed version, numerics or selection is another matter."""

    def test_interrupted_then_resumed(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        path, page = tmp_path / "run.jsonl", tmp_path / "page.html"
        provide(monkeypatch, "interrupting")
        ran = cli("verify", "--contract", "fp8_gemm_nt", "--fixtures", "none", "--record", path, "--html", page)
        assert ran.status == 130
        assert "interrupted, 3 not run" in ran.out
        assert "3 cases not run" in page.read_text()
        partial = record.read(path).report()
        assert (len(partial.outcomes), partial.unfinished, partial.ok) == (2, 3, False)
        provide(monkeypatch, "counting")
        assert verify(cli, path, "--resume") == 0
        assert len(record_subjects.calls) == 5
        assert verify(cli, path, "--resume") == 0
        assert len(record_subjects.calls) == 5
        assert record.read(path).report().ok

    def test_the_time_is_up(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """What was judged is reported and goes on; no number of seconds is one that has passed."""
        path = tmp_path / "run.jsonl"
        provide(monkeypatch, "slow")
        monkeypatch.setenv("SLOW_SUBJECT", "1.5")
        words = ("verify", "--contract", "fp8_gemm_nt", "--subject", "slow", "--fixtures", "none", "--record", path)
        ran = cli(*words, "--seconds", 2)
        partial = record.read(path).report()
        assert ran.status == 130 and partial.unfinished == 5 - len(partial.outcomes) > 0
        assert f"not judged in 2 s: {partial.unfinished} case" in ran.err
        monkeypatch.setenv("SLOW_SUBJECT", "0")
        assert cli(*words, "--resume").status == 0
        assert len(record.read(path).outcomes) == 5
        assert "--seconds 0: give" in cli(*words, "--resume", "--seconds", 0).err

    def test_what_was_judged_behind_the_first_that_is_missing(self) -> None:
        """It is recorded and reported where the run ends, beside what an earlier run had judged."""
        verdict = Verdict(Status.PASSED, "PASSED")
        items = [Item(f"c/{name}", "c", "s", "cpu", lambda: verdict) for name in "abcd"]
        recorded: list[str] = []
        recorder = SimpleNamespace(append=lambda key, _: recorded.append(key))
        asked = (items, "abcd", (None, None, items[2].outcome(), None), Console(quiet=True), (), recorder)
        pool, left = lambda tasks, started: (items[number].outcome() for number in tasks[:1]), {3: items[3].outcome()}
        done = runs._judge(*asked, pool, left, verbose=False)  # type: ignore[arg-type]  # stand-ins
        assert [one.id for one in done] == ["c/a", "c/c", "c/d"] and recorded == ["a", "d"]

    def test_one_case_of_each_routine_comes_first(self) -> None:
        items = [Item(f"{name}/{at}", name, "s", "cpu", list, call=f"{name}{at}") for name in "ab" for at in range(2)]
        assert runs._together(items, range(4)) == [[0], [1], [2], [3]]
        assert runs._together(items, range(4), each=True) == [[0], [2], [1], [3]]

    def test_only_the_rest_runs(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        provide(monkeypatch, "counting")
        assert verify(cli, path) == 0
        whole = record.read(path).report()
        kept = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(kept[:3]) + kept[3][:40])
        record_subjects.calls.set(0)
        ran = cli("verify", "--contract", "fp8_gemm_nt", "--fixtures", "none", "--record", path, "--resume")
        assert ran.status == 0
        assert "cut short (40 bytes)" in ran.err
        assert len(record_subjects.calls) == 3
        again = record.read(path).report()
        assert [o.id for o in again.outcomes] == [o.id for o in whole.outcomes]
        keys = [line["key"] for line in lines(path) if line["kind"] == "outcome"]
        assert len(keys) == len(set(keys)) == 5

    def test_a_changed_version_invalidates(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        provide(monkeypatch, "counting")
        assert verify(cli, path) == 0
        real = provenance.versions
        monkeypatch.setattr("oracle.harness.provenance.versions", lambda p: real(p) | {"torch": "99"})
        ran = cli("verify", "--contract", "fp8_gemm_nt", "--fixtures", "none", "--record", path, "--resume")
        assert "5 recorded outcomes are of other versions (torch " in ran.err
        assert len(record_subjects.calls) == 10
        assert len(record.read(path).outcomes) == 5, "what the old version found is no part of the report"

    def test_changed_numerics_invalidate(self) -> None:
        one, other = (record.key_of("id", "s", "sm90", stamp, run_of()) for stamp in ("a on cpu", "b on cpu"))
        assert one != other

    def test_another_selection_is_refused(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        provide(monkeypatch, "counting")
        assert verify(cli, path) == 0
        ran = cli("verify", "--profile", "full", "--fixtures", "none", "--record", path, "--resume")
        assert (ran.status, ran.err.count("\n")) == (2, 1)
        assert "profile=brief, contract=fp8_gemm_nt" in ran.err

    def test_an_existing_record_is_not_overwritten(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "run.jsonl"
        provide(monkeypatch, "counting")
        assert verify(cli, path) == 0
        before = path.read_bytes()
        assert verify(cli, path) == 2
        assert path.read_bytes() == before

    def test_resume_needs_a_record(self, cli: Cli) -> None:
        assert "--record" in cli("verify", "--resume").err


class TestKilled:
    """A real process, really killed."""

    def stopped(self, monkeypatch: pytest.MonkeyPatch, path: Path, how: signal.Signals) -> tuple[int, str]:
        """Start it, wait until three cases are on the disk, stop it."""
        provide(monkeypatch, "slow")
        words = ["verify", "--contract", "fp8_gemm_nt", "--subject", "slow", "-q", "--fixtures", "none"]
        words += ["--record", str(path), "--resume"]
        with tempfile.TemporaryFile() as said, open(os.devnull, "wb") as nowhere:
            child = forked(lambda: main(words), stdout=nowhere.fileno(), stderr=said.fileno(), SLOW_SUBJECT="0.1")
            deadline = time.monotonic() + 60
            while not path.exists() or path.read_bytes().count(b"\n") < 4:
                assert time.monotonic() < deadline
                assert child.running()
                time.sleep(0.02)
            os.kill(child.pid, how)
            status = child.wait()
            said.seek(0)
            return status, said.read().decode()

    def test_killed_and_resumed(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        assert self.stopped(monkeypatch, path, signal.SIGKILL) == (-9, "")
        done = [line["key"] for line in lines(path) if line["kind"] == "outcome"]
        assert len(done) >= 3
        assert verify(cli, path, "--subject", "slow", "--resume") == 0
        keys = [line["key"] for line in lines(path) if line["kind"] == "outcome"]
        assert keys[: len(done)] == done
        assert len(keys) == len(set(keys)) > len(done)

    def test_interrupted_by_hand(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        status, said = self.stopped(monkeypatch, path, signal.SIGINT)
        assert (status, said) == (130, "fp8-oracle: interrupted\n")
        assert lines(path)[-1]["kind"] == "end"
        assert record.read(path).report().unfinished > 0


class TestFile:
    """What is read: whole, cut short, damaged, of another schema, being written."""

    def write(self, path: Path, report: Report) -> None:
        recorder = record.start(path, run_of(), resume=False)
        for i, found in enumerate(report.outcomes):
            recorder.append(f"{i:032x}", found)
        recorder.end(report.complaints, report.seconds, report.unfinished)

    def test_there_and_back(self, tmp_path: Path) -> None:
        report = every_status()
        self.write(tmp_path / "a.jsonl", report)
        found = record.read(tmp_path / "a.jsonl").report()
        assert [o.to_json() for o in found.outcomes] == [o.to_json() for o in report.outcomes]
        assert (found.complaints, found.unfinished) == (report.complaints, report.unfinished)

    def test_the_command_is_the_recorded_one(self) -> None:
        """A test runner writes another command than ``verify --case``; reading keeps it."""
        written = {**outcome().to_json(), "repro": "pytest tests/test_x.py::test_y", "test": "tests/test_x.py::test_y"}
        assert read_outcome(written).repro == "pytest tests/test_x.py::test_y"

    def test_the_json_report_reads_the_same(self, tmp_path: Path) -> None:
        (tmp_path / "r.json").write_text(to_json(every_status()))
        found, notes = record.read_report(tmp_path / "r.json")
        assert notes == ()
        assert to_json(found) == to_json(every_status())

    def test_both_follow_the_schema(self, tmp_path: Path) -> None:
        """The checked-in schema names every field; a sabotaged record is refused by it."""
        validator = jsonschema.Draft202012Validator
        validator.check_schema(SCHEMA)
        whole = every_status().to_json()
        validator(SCHEMA).validate(whole)
        line = validator({"$ref": "#/$defs/line", "$defs": SCHEMA["$defs"]})
        self.write(tmp_path / "a.jsonl", every_status())
        for found in lines(tmp_path / "a.jsonl"):
            line.validate(found)
            assert not line.is_valid({**found, "more": 1})
            assert not line.is_valid({**found, "kind": "odd"})
        assert not validator(SCHEMA).is_valid({**whole, "unfinished": -1})
        statuses = SCHEMA["$defs"]["status"]["enum"]
        assert statuses == [str(status) for status in Status]

    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (lambda t: t.replace(b'"kind":"outcome"', b'"kind":"odd"', 1), ":2: no sound line"),
            (lambda t: t.replace(b'"verdict"', b'"sentence"', 1), ":2: no sound line"),
            (lambda t: t.replace(b'{"kind":"outcome"', b'"kind":"outcome"', 1), ":2: no line of a record"),
            (lambda t: t.replace(b"record/1", b"record/9", 1), "schema is 'fp8-oracle.record/9'"),
            (lambda t: b"", "holds no run"),
            (lambda t: b"PK\x03\x04\n", ":1: no line"),
        ],
    )
    def test_a_damaged_record_is_refused(self, tmp_path: Path, spoil: object, said: str) -> None:
        assert callable(spoil)
        path = tmp_path / "a.jsonl"
        self.write(path, many(5, failing=False))
        path.write_bytes(spoil(path.read_bytes()))
        with pytest.raises(FixtureError, match=said):
            record.read(path)

    @pytest.mark.parametrize("cut", [1, 17, 300])
    def test_a_torn_last_line_is_left_out(self, tmp_path: Path, cut: int) -> None:
        path = tmp_path / "a.jsonl"
        self.write(path, many(5, failing=False))
        whole = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(whole[:4]) + whole[4][:cut])
        found = record.read(path)
        assert len(found.outcomes) == 3
        assert f"({cut} bytes)" in found.notes[0]
        assert found.report().unfinished == 9 - 3

    def test_two_runs_do_not_share_a_record(self, tmp_path: Path) -> None:
        recorder = record.start(tmp_path / "a.jsonl", run_of(), resume=False)
        with pytest.raises(FixtureError, match="another run is writing it"):
            record.start(tmp_path / "a.jsonl", run_of(), resume=True)
        recorder.end((), 0.0, 0)
        record.start(tmp_path / "a.jsonl", run_of(), resume=True).end((), 0.0, 0)
        with pytest.raises(OptionError):
            record.start(tmp_path / "a.jsonl", run_of(), resume=False)

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(FixtureError, match="cannot be written"):
            record.start(tmp_path / "none" / "a.jsonl", run_of(), resume=False)


class TestVersions:
    """An edited source is another version, although its number stands still."""

    def test_sources_count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from oracle.harness.subjects import Provider

        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / "somebodys.py").write_text("x = 1\n")
        provider = Provider("theirs", "somebodys:subjects")
        before = provenance.versions([provider])
        assert provenance.versions([provider]) == before
        (tmp_path / "somebodys.py").write_text("x = 2\n")
        after = provenance.versions([provider])
        assert {name for name in after if after[name] != before[name]} == {"subjects theirs"}
        assert {"fp8-oracle", "torch", "python"} <= set(before)

    def test_a_provider_that_is_not_there(self) -> None:
        from oracle.harness.subjects import Provider

        assert provenance.versions([Provider("x", "no_such_package:f")])["subjects x"] == "no_such_package+absent"
