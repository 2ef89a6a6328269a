"""One record of several: shards of one run, or runs of one selection on several machines.

The result depends on the set of outcomes alone: records in any order, given twice, or merged before, give the same
bytes. So outcomes are sorted by id, subject and arch; the time is that of the outcomes together; facts of machines that
differ are listed. What a killed run did not judge is a complaint, and so is a shard that is missing. A case that was
judged twice with different results keeps the worse one, and a complaint names it: a subject whose result changes from
run to run is not right. What a file lacks (:class:`oracle.report.record.Record`) is a complaint too.

Refused are records of different versions of anything that a verdict depends on, or of different selections, since
together they would describe no run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from oracle.errors import FixtureError, counted
from oracle.report.outcome import SEVERITY, Outcome
from oracle.report.record import Record, Run, end_line, lines_of, read

SHARD = "shard"
Keyed = tuple[str, Outcome]


def merged(paths: Sequence[Path]) -> Record:
    """The records in ``paths`` as one.

    Raises FixtureError: a file is no sound record; or two of them are of different versions or selections: the first
    difference.
    """
    records = [read(path) for path in paths]
    first = records[0]
    for path, other in zip(paths[1:], records[1:], strict=True):
        _same("version", paths[0], first.run.versions, path, other.run.versions)
        _same("selection", paths[0], _asked(first), path, _asked(other))
    complaints = {str(c) for record in records for c in (*(record.ended or {}).get("complaints", ()), *record.gaps)}
    outcomes: dict[str, Outcome] = {}
    for key, outcome in sorted((pair for record in records for pair in record.outcomes.items()), key=_order):
        worst = outcomes.setdefault(key, outcome)
        if _said(worst) != _said(outcome):
            statuses = sorted({str(worst.status), str(outcome.status)})
            complaints.add(
                f"{outcome.id} [{outcome.subject}]: judged more than once, with different results "
                f"({', '.join(statuses)}); the worst one counts"
            )
    selection, missing = _shards(records)
    complaints |= {f"shard {name} is missing" for name in missing}
    for record in records:
        if left := record.unfinished:
            which = f"shard {record.run.selection[SHARD]}" if SHARD in record.run.selection else "the run"
            were = "was" if left == 1 else "were"
            complaints.add(f"{counted(left, 'case')} of {which} of {record.run.started} {were} not judged")
    runs = [record.run for record in records]
    names = sorted({name for run in runs for name in run.machine})
    machine = {name: _joined([run.machine.get(name) for run in runs]) for name in names}
    run = Run(min(run.started for run in runs), machine, runs[0].versions, selection, len(outcomes))
    seconds = round(sum(outcome.seconds for outcome in outcomes.values()), 3)
    end = end_line(sorted(complaints), seconds, 0, len(outcomes))
    return Record(run, outcomes, end, tuple(note for record in records for note in record.notes))


def to_bytes(record: Record) -> bytes:
    """The record as a file holds it."""
    return b"".join(lines_of(record))


def _order(pair: Keyed) -> tuple[object, ...]:
    """By what was judged; of one case the worst result first, then the text."""
    key, outcome = pair
    worst = SEVERITY.index(outcome.status)
    return outcome.id, outcome.subject, outcome.arch, key, worst, json.dumps(outcome.to_json(), sort_keys=True)


def _said(outcome: Outcome) -> dict[str, object]:
    return {name: value for name, value in outcome.to_json().items() if name != "seconds"}


def _asked(record: Record) -> dict[str, str]:
    return {name: value for name, value in record.run.selection.items() if name != SHARD}


def _same(what: str, first: Path, mine: Mapping[str, str], second: Path, theirs: Mapping[str, str]) -> None:
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            raise FixtureError(
                f"{second}: {what} of {name} is {theirs.get(name, 'none')}, that of {first} is "
                f"{mine.get(name, 'none')}; merge records of one version and one selection"
            )


def _shards(records: Sequence[Record]) -> tuple[dict[str, str], list[str]]:
    """The selection of the whole, and the shards that are missing from it."""
    named = {name for r in records for name in r.run.selection.get(SHARD, "").split(", ") if name}
    selection = _asked(records[0])
    if not named or any(SHARD not in record.run.selection for record in records):
        return selection, []  # a whole run is among them
    parts = {tuple(map(int, re.findall("[0-9]+", name))) for name in named}
    totals = {total for _, total in parts}
    if len(totals) > 1:
        raise FixtureError(f"shards of {' and of '.join(map(str, sorted(totals)))} cannot be merged: the parts overlap")
    (total,) = totals
    missing = [f"{number}/{total}" for number in range(1, total + 1) if (number, total) not in parts]
    if not missing:
        return selection, []
    return selection | {SHARD: ", ".join(f"{number}/{total}" for number, _ in sorted(parts))}, missing


def _joined(facts: Sequence[str | None]) -> str:
    """One fact, or those of all machines; a joined one is taken apart again."""
    return " | ".join(sorted({part for fact in facts if fact is not None for part in fact.split(" | ")}))
