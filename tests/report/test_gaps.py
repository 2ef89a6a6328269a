"""A record that lacks outcomes, or has two of one case, is not good: ``report``, ``merge`` and ``compare`` say why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from reports import outcome

from oracle.report import history, merge, record
from oracle.report.outcome import Outcome
from oracle.report.record import Run
from oracle.verdict.compare import Status
from tests.support.commandline import Cli

PLANNED = [outcome(f"c/case{i}/seed=1") for i in range(18)]


def write(path: Path, outcomes: list[Outcome] = PLANNED, *, planned: int = 18, **selection: str) -> Path:
    """The record of a whole run."""
    run = Run("2026-01-02", {}, {"a": "1"}, selection, planned)
    recorder = record.start(path, run, resume=False)
    for one in outcomes:
        recorder.append(record.key_of(one.id, one.subject, one.arch, "", run), one)
    recorder.end((), 1.0, 0)
    return path


def edited(path: Path, change: Callable[[list[str]], list[str]]) -> Path:
    """The record with other lines."""
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    return path


def uncounted(lines: list[str]) -> list[str]:
    """Without the count of the last line, which older records lack."""
    end = {name: value for name, value in json.loads(lines[-1]).items() if name != "outcomes"}
    return [*lines[:-1], json.dumps(end) + "\n"]


LOST = "17 of 18 outcomes of the run of 2026-01-02 are missing from its record"
TWICE = "c/case3/seed=1 [s]: the record has 2 outcomes of it; the worst one counts"
GAPS: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "17 lines lost": (lambda lines: [*lines[:2], lines[-1]], LOST),
    "lost, and no count": (lambda lines: uncounted([*lines[:2], lines[-1]]), LOST),
    "the count lies": (lambda lines: [*lines[:2], lines[-1].replace('"outcomes":18', '"outcomes":1')], LOST),
    "one line lost": (
        lambda lines: [*lines[:5], *lines[6:]],
        "1 of 18 outcomes of the run of 2026-01-02 is missing from its record",
    ),
    "a line twice": (lambda lines: [*lines[:-1], lines[4], lines[-1]], TWICE),
    "no last line": (
        lambda lines: lines[:-1],
        "the record of the run of 2026-01-02 has no last line: the run was killed, or the file was cut",
    ),
}


@pytest.mark.parametrize("name", GAPS)
def test_every_command_says_so(cli: Cli, tmp_path: Path, name: str) -> None:
    """Status 1 and the sentence; of the whole record 0 (the negative test)."""
    change, said = GAPS[name]
    whole, cut = write(tmp_path / "whole.jsonl"), edited(write(tmp_path / "cut.jsonl"), change)
    for words in (("report", cut), ("merge", cut), ("compare", whole, cut), ("compare", cut, whole)):
        ran = cli(*words)
        assert ran.status == 1 and said in ran.out and "NOT OK" in ran.out, ran.out
    for words in (("report", whole), ("merge", whole), ("compare", whole, whole)):
        ran = cli(*words)
        assert ran.status == 0 and "PROBLEM" not in ran.out
    assert cli("compare", cut, cut).status == 1
    files = [word for kind in ("json", "junit", "markdown", "html") for word in (f"--{kind}", tmp_path / kind)]
    assert cli("report", cut, *files).status == 1
    assert cli("report", tmp_path / "json").status == 1 and json.loads((tmp_path / "json").read_text())["ok"] is False
    assert all("case3" in (tmp_path / kind).read_text() for kind in ("junit", "html") if said is TWICE)
    assert said.partition(" [")[0] in (tmp_path / "markdown").read_text().replace("\\", "")
    number, _ = history.add(tmp_path / "db", record.read(cut).report())
    assert number == 1 and not history.points(tmp_path / "db")[0].ok


def test_of_two_outcomes_the_worse_one_counts(tmp_path: Path) -> None:
    """In either order: the last one does not hide what came before."""
    bad = outcome(PLANNED[3].id, Status.FAILED)
    for order in ([PLANNED[3], bad], [bad, PLANNED[3]]):
        path = write(tmp_path / f"{order[0].status}.jsonl", [*PLANNED[:3], *order, *PLANNED[4:]])
        report = record.read(path).report()
        assert [o.status for o in report.outcomes if o.id == bad.id] == [Status.FAILED]
        assert report.gaps == (TWICE,) and len(report.outcomes) == 18


def test_what_may_be_recorded_again(tmp_path: Path) -> None:
    """A watch of which more is known, and a fact about the machine of a run that is resumed: the last one counts."""
    watch = replace(outcome("c/guard zones", Status.FAILED), watch="guard zones")
    again = replace(watch, verdict=outcome().verdict)
    path = write(tmp_path / "a.jsonl", [*PLANNED, watch, again, outcome("c"), outcome("c")])
    report = record.read(path).report()
    assert report.gaps == () and report.ok and len(report.outcomes) == 20


def test_a_validation_may_have_fewer_outcomes_than_planned(tmp_path: Path) -> None:
    """A planned call outside of the domain is never made; a line that is lost is missed all the same."""
    path = write(tmp_path / "a.jsonl", PLANNED[:9], kernel="m:k")
    assert record.read(path).report().ok
    assert record.read(edited(path, lambda lines: [*lines[:3], *lines[4:]])).report().gaps == (
        "1 of 9 outcomes of the run of 2026-01-02 is missing from its record",
    )


def test_watches_are_no_cases(tmp_path: Path) -> None:
    """A validation that was killed after one of its three cases, with twelve watches: two are left."""
    watches = [replace(outcome(f"c/watch {i}"), watch=f"watch {i}") for i in range(12)]
    path = write(tmp_path / "a.jsonl", [PLANNED[0], *watches], planned=3, kernel="m:k")
    report = record.read(edited(path, lambda lines: lines[:-1])).report()
    assert (report.unfinished, report.ok) == (2, False)


def test_a_gap_stays_when_records_are_merged(tmp_path: Path) -> None:
    """Merged once or twice, in any order, the sentence is there."""
    cut = edited(write(tmp_path / "cut.jsonl"), GAPS["17 lines lost"][0])
    made = tmp_path / "made.jsonl"
    made.write_bytes(merge.to_bytes(merge.merged([cut])))
    for paths in ([made], [made, cut], [cut, made]):
        assert merge.merged(paths).report().complaints == (LOST,)
