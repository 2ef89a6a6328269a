"""Many runs in one SQLite file: what was counted in each, and every outcome's status, margin and numerics.

Tables ``runs`` and ``outcomes``; ``PRAGMA user_version`` is the version of the layout. A run is added once: its digest
is unique. Not covered: pictures (:mod:`oracle.report`), comparing two runs in detail (:mod:`oracle.report.changes`).
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from oracle.errors import FixtureError
from oracle.report.outcome import Report

VERSION = 1
_TABLES = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, started TEXT NOT NULL, label TEXT NOT NULL,
    ok INTEGER NOT NULL, unfinished INTEGER NOT NULL, seconds REAL NOT NULL,
    machine TEXT NOT NULL, versions TEXT NOT NULL, counts TEXT NOT NULL
);
CREATE TABLE outcomes (
    run INTEGER NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
    id TEXT NOT NULL, contract TEXT NOT NULL, subject TEXT NOT NULL, arch TEXT NOT NULL, status TEXT NOT NULL,
    known INTEGER NOT NULL, fails INTEGER NOT NULL, outside INTEGER NOT NULL, total INTEGER NOT NULL, margin REAL,
    matches TEXT, seconds REAL NOT NULL
);
CREATE INDEX outcomes_of_run ON outcomes(run, contract, subject);
"""


@dataclass(frozen=True)
class Point:
    """One run as the history shows it; ``margin`` is the largest one of the passing outcomes."""

    number: int
    started: str
    label: str
    ok: bool
    passed: int
    failing: int
    known: int
    margin: float | None
    seconds: float
    version: str


def add(path: Path, report: Report, *, label: str = "") -> tuple[int, bool]:
    """Add a run; returns its number and whether it is new.

    Raises
    ------
    FixtureError
        The file is no history, is of another version, or cannot be written.
    """
    digest = hashlib.sha256(json.dumps(report.to_json(), sort_keys=True).encode()).hexdigest()
    with closing(_open(path, create=True)) as base, base:
        known = base.execute("SELECT id FROM runs WHERE digest = ?", (digest,)).fetchone()
        if known is not None:
            return int(known[0]), False
        row = base.execute(
            "INSERT INTO runs (digest, started, label, ok, unfinished, seconds, machine, versions, counts)"
            " VALUES (?,?,?,?,?,?,?,?,?)",
            (
                digest, report.started, label, int(report.ok), report.unfinished, report.seconds,
                json.dumps(report.machine), json.dumps(report.versions), json.dumps(report.counts()),
            ),
        )  # fmt: skip
        number = int(row.lastrowid or 0)
        base.executemany(
            "INSERT INTO outcomes VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)",
            [
                (
                    number, o.id, o.contract, o.subject, o.arch, str(o.status), int(o.known is not None), int(o.fails),
                    o.verdict.outside, o.verdict.total, o.verdict.margin, o.verdict.matches, o.seconds,
                )
                for o in report.outcomes
            ],
        )  # fmt: skip
    return number, True


def points(
    path: Path, *, contract: str | None = None, subject: str | None = None, last: int | None = None
) -> list[Point]:
    """The runs in the order in which they were added, counted over all outcomes or those of a contract and subject.

    Raises
    ------
    FixtureError
        The file is missing, is no history, or is of another version.
    """
    where, given = _where(contract, subject)
    query = f"""
        SELECT runs.id, started, label, ok, runs.seconds, versions,
            COALESCE(SUM(status IN ('PASSED', 'MISTRUSTED')), 0), COALESCE(SUM(fails), 0), COALESCE(SUM(known), 0),
            MAX(CASE WHEN status IN ('PASSED', 'MISTRUSTED') THEN margin END)
        FROM runs LEFT JOIN outcomes ON outcomes.run = runs.id {where}
        GROUP BY runs.id ORDER BY runs.id"""
    with closing(_open(path, create=False)) as base:
        rows = base.execute(query, given).fetchall()
    found = [
        Point(number, started, label, bool(ok), passed, failing, known, margin, seconds, _version(versions))
        for number, started, label, ok, seconds, versions, passed, failing, known, margin in rows
    ]
    return found if last is None else found[-last:]


def _where(contract: str | None, subject: str | None) -> tuple[str, Sequence[str]]:
    asked = [(name, value) for name, value in (("contract", contract), ("subject", subject)) if value is not None]
    return "".join(f" AND outcomes.{name} = ?" for name, _ in asked), [value for _, value in asked]


def _version(versions: str) -> str:
    return str(json.loads(versions).get("fp8-oracle", ""))


def _open(path: Path, *, create: bool) -> sqlite3.Connection:
    if not create and not path.is_file():
        raise FixtureError(f"{path}: no such history; make one with `fp8-oracle history add RECORD --db {path}`")
    try:
        base = sqlite3.connect(path)
        version = base.execute("PRAGMA user_version").fetchone()[0]
        empty = not base.execute("SELECT name FROM sqlite_master").fetchall()
        if version == 0 and empty and create:
            base.executescript(f"{_TABLES} PRAGMA user_version = {VERSION};")
            version = VERSION
    except sqlite3.Error as error:
        raise FixtureError(f"{path}: cannot be used as a history ({error}); name another file") from None
    if version != VERSION:
        base.close()
        raise FixtureError(f"{path}: is no history of version {VERSION} (it says {version}); name another file")
    return base
