"""Known failures: outputs that are wrong for a known reason, and that must stay exactly as wrong.

``known_failures.json`` (schema ``fp8-oracle.known-failures/1``) lists entries with ``id`` (an outcome id; ``*`` and
``?`` match), ``status``, ``outside`` (how many elements), ``reason`` and ``source``. A failure that an entry
describes does not fail the run. An entry that stops failing, whose count changes, or that matches nothing in a
whole run is a complaint, and a complaint fails the run, so that every entry stays true.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from oracle.errors import FixtureError, counted
from oracle.fixtures import files as fixtures
from oracle.report.outcome import Outcome
from oracle.verdict.compare import Status, Verdict

SCHEMA = "fp8-oracle.known-failures/1"
FILE = "known_failures.json"
_FIELDS = {"id": str, "status": str, "outside": int, "reason": str, "source": str}


@dataclass(frozen=True)
class Entry:
    """One known failure."""

    id: str
    status: Status
    outside: int
    reason: str
    source: str

    def matches(self, outcome: Outcome) -> bool:
        return fnmatchcase(outcome.id, self.id)

    def contradiction(self, outcome: Outcome) -> str | None:
        """Why this outcome is not the known failure, or None when it is."""
        verdict = outcome.verdict
        if verdict.status != self.status:
            return f"is {verdict.status} now, not {self.status}"
        if verdict.outside != self.outside:
            return f"has {counted(verdict.outside, 'element')} outside now, not {self.outside}"
        return None


def load(path: Path) -> list[Entry]:
    """The entries of a ledger file.

    Raises FixtureError: the file is missing or of another schema, or an entry lacks a field, has another type, or names
    a status that is no failure.
    """
    record = fixtures.read_json(path, schema=SCHEMA)
    entries = record.get("entries")
    if not isinstance(entries, list):
        raise FixtureError(f"{path}: has no list 'entries'")
    return [_entry(path, number, entry) for number, entry in enumerate(entries)]


def documents(entries: Iterable[Entry], identity: str, verdict: Verdict) -> bool:
    """Whether an entry describes exactly this verdict on the outcome of this id."""
    outcome = Outcome(identity, "", "", "", verdict)
    return any(entry.matches(outcome) and entry.contradiction(outcome) is None for entry in entries)


def apply(
    outcomes: Iterable[Outcome], entries: Iterable[Entry], *, whole: bool
) -> tuple[tuple[Outcome, ...], tuple[str, ...]]:
    """Mark the known failures and list the complaints.

    ``whole`` is True when nothing was filtered out, so that an entry which matches nothing is a complaint.
    """
    marked = list(outcomes)
    complaints: list[str] = []
    for entry in entries:
        at = [i for i, outcome in enumerate(marked) if entry.matches(outcome)]
        if not at and whole:
            complaints.append(f"known failure {entry.id!r} matches nothing that was run; remove it or correct its id")
        for i in at:
            contradiction = entry.contradiction(marked[i])
            if contradiction is None:
                marked[i] = replace(marked[i], known=entry.reason)
            else:
                complaints.append(
                    f"known failure {entry.id!r}: {marked[i].id} {contradiction}; look at what changed, then "
                    f"correct or remove the entry in {FILE}"
                )
    return tuple(marked), tuple(complaints)


def _entry(path: Path, number: int, entry: object) -> Entry:
    if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
        raise FixtureError(f"{path}: entry {number} must have exactly {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if type(entry[name]) is not kind or entry[name] == "":
            raise FixtureError(f"{path}: entry {number}: {name}={entry[name]!r} is no {kind.__name__} with content")
    failing = [str(status) for status in Status if status.is_failure]
    if entry["status"] not in failing:
        raise FixtureError(f"{path}: entry {number}: status {entry['status']!r} is not one of {', '.join(failing)}")
    return Entry(entry["id"], Status(entry["status"]), entry["outside"], entry["reason"], entry["source"])
