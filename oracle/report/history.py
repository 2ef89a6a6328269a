"""Many runs in one SQLite file: what was counted in each, and every outcome's status, margin and numerics.

Tables ``runs`` and ``outcomes``; ``PRAGMA user_version`` is the version of the layout. A run is added once: its digest
is unique. A history is shown as a table with sparklines on the console, or as one self-contained HTML file with plots.
Not covered: comparing two runs in detail (:mod:`oracle.report.changes`).
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oracle.errors import FixtureError, OracleError, counted
from oracle.fixtures.kinds import kind_of
from oracle.report.markup import badge, page, scrolling, table, theme_button
from oracle.report.outcome import Report, printable
from oracle.report.picture import series

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
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"
_SERIES = (
    ("passed", "verdicts that pass"),
    ("failing", "verdicts that fail"),
    ("known", "known failures"),
    ("margin", "largest margin of what passes"),
    ("seconds", "seconds"),
)


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

    Raises FixtureError: the file is no history, is of another version, or cannot be written.
    """
    digest = hashlib.sha256(json.dumps(report.to_json(), sort_keys=True).encode()).hexdigest()
    facts = (report.started, label, int(report.ok), report.unfinished, report.seconds)
    texts = (json.dumps(report.machine), json.dumps(report.versions), json.dumps(report.counts()))
    outcomes = [
        (
            o.id,
            o.contract,
            o.subject,
            o.arch,
            str(o.status),
            int(o.known is not None),
            int(o.fails),
            o.verdict.outside,
            o.verdict.total,
            o.verdict.margin,
            o.verdict.matches,
            o.seconds,
        )
        for o in report.outcomes
    ]
    with _opened(path, create=True) as base:
        stored_row = base.execute("SELECT id FROM runs WHERE digest = ?", (digest,)).fetchone()
        if stored_row is not None:
            return _natural(stored_row[0]), False
        row = base.execute(
            "INSERT INTO runs (digest, started, label, ok, unfinished, seconds, machine, versions, counts)"
            f" VALUES ({_places(9)})",
            _storable((digest, *facts, *texts)),
        )
        number = int(row.lastrowid or 0)
        base.executemany(
            f"INSERT INTO outcomes VALUES ({_places(13)})", [_storable((number, *outcome)) for outcome in outcomes]
        )
    return number, True


def _places(count: int) -> str:
    return ",".join("?" * count)


def _storable(row: Sequence[object]) -> tuple[object, ...]:
    """A row as SQLite takes it: text that is text; NaN would become NULL, and is none of the numbers."""
    return tuple(printable(x) if isinstance(x, str) else x for x in row)


def points(
    path: Path, *, contract: str | None = None, subject: str | None = None, last: int | None = None
) -> list[Point]:
    """The runs in the order in which they were added, counted over all outcomes or those of a contract and subject.

    Raises FixtureError: the file is missing, is no history, or is of another version.
    """
    asked = {name: value for name, value in (("contract", contract), ("subject", subject)) if value is not None}
    where = "".join(f" AND outcomes.{name} = ?" for name in asked)
    query = f"""
        SELECT runs.id, started, label, ok, runs.seconds, versions,
            COALESCE(SUM(status IN ('PASSED', 'MISTRUSTED')), 0), COALESCE(SUM(fails), 0), COALESCE(SUM(known), 0),
            MAX(CASE WHEN status IN ('PASSED', 'MISTRUSTED') THEN margin END)
        FROM runs LEFT JOIN outcomes ON outcomes.run = runs.id {where}
        GROUP BY runs.id ORDER BY runs.id"""
    with _opened(path, create=False) as base:
        rows = [_point(row) for row in base.execute(query, list(asked.values()))]
    return rows if last is None else rows[-last:]


@contextmanager
def _opened(path: Path, *, create: bool) -> Iterator[sqlite3.Connection]:
    """A history in one transaction, which an error undoes; a file that is made for nothing is removed.

    Raises FixtureError: the file is no history, whatever SQLite or a value in it says.
    """
    present = path.exists()
    if not present and not create:
        raise FixtureError(f"{path}: no such history; make one with `fp8-oracle history add RECORD --db {path}`")
    if present and not path.is_file():
        raise FixtureError(f"{path}: is no file; name another one")
    try:
        with closing(sqlite3.connect(path)) as base, base:
            _prepare(base, path, create=create)
            yield base
    # The last three: a value that is no text, number or JSON of ours, and one beyond what a machine type holds.
    except (sqlite3.Error, sqlite3.Warning, ValueError, TypeError, OverflowError) as error:
        if isinstance(error, OracleError):
            raise
        what = kind_of(path)
        other = f"is {what}; a history is an SQLite file" if what else f"cannot be used as a history ({error})"
        raise FixtureError(f"{path}: {other}; name another file") from None
    finally:
        if not present and path.is_file() and not path.stat().st_size:
            path.unlink()


def _prepare(base: sqlite3.Connection, path: Path, *, create: bool) -> None:
    """Make the tables in a new file; refuse a file of another layout or version."""
    version = base.execute("PRAGMA user_version").fetchone()[0]
    tables = dict(base.execute("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'").fetchall())
    if version == 0 and not tables and create:
        base.execute("BEGIN")
        for statement in _TABLES.split(";")[:-1]:
            base.execute(statement)
        base.execute(f"PRAGMA user_version = {VERSION}")
        return
    if version != VERSION:
        raise FixtureError(f"{path}: is no history of version {VERSION} (it says {version}); name another file")
    due = [" ".join(statement.split()) for statement in _TABLES.split(";")[:-1]]
    if sorted(" ".join(str(sql).split()) for sql in tables.values()) != sorted(due):
        raise FixtureError(f"{path}: has other tables than a history of version {VERSION}; name another file")
    if (text := base.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        first = " ".join(str(text).split())
        raise FixtureError(f"{path}: is damaged ({first}); restore it, or add the records to a new file")


def _point(row: Sequence[Any]) -> Point:
    """A row of the query; TypeError or ValueError where a value is of another type, which SQLite does not prevent."""
    number, started, label, ok, seconds, versions, passed, failing, known, margin = row
    read = json.loads(_text(versions))
    version = read.get("fp8-oracle", "") if isinstance(read, dict) else ""
    counts = (_natural(passed), _natural(failing), _natural(known), None if margin is None else _number(margin))
    named = (_natural(number), _text(started), _text(label), bool(_natural(ok)))
    return Point(*named, *counts, _number(seconds), str(version))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value


def _natural(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r:.60} is no count")
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float) or not value >= 0:
        raise TypeError(f"{value!r:.60} is no number from 0")
    return float(value)


# --- showing it ---------------------------------------------------------------------------------------------


def print_history(points: Sequence[Point], console: Console) -> None:
    """One row for each run, then one sparkline for each count."""
    shown_runs = Table(title="history", title_justify="left", header_style="bold")
    for name in ("run", "started", "label", "fp8-oracle"):
        shown_runs.add_column(name, overflow="fold")
    for name in ("passed", "failing", "known", "margin", "s"):
        shown_runs.add_column(name, justify="right")
    for p in points:
        style = "green" if p.ok else "bold red"
        margin = "" if p.margin is None else f"{p.margin:.3g}"
        numbers = (str(p.passed), str(p.failing), str(p.known), margin, f"{p.seconds:.1f}")
        shown_runs.add_row(Text(str(p.number), style=style), p.started, p.label, p.version, *numbers)
    console.print(shown_runs)
    blocks = BLOCKS if console.encoding.startswith("utf") else ASCII
    for name, title in _SERIES:
        values = [getattr(p, name) for p in points]
        if shown := sparkline(values, blocks):
            console.print(Text(f"{title:<30} {shown}  {_range(values)}"))


def sparkline(values: Sequence[float | None], blocks: str = BLOCKS) -> str:
    """One character for each value between the smallest and the largest; a blank for None, ``!`` for no number."""
    numbers = [v for v in values if v is not None and math.isfinite(v)]
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    span = high - low
    return "".join(
        " "
        if v is None
        else "!"
        if not math.isfinite(v)
        else blocks[round((v - low) / span * (len(blocks) - 1)) if span else 0]
        for v in values
    )


def to_html(points: Sequence[Point], title: str) -> str:
    """The history as one HTML document: a plot for each count, then the table."""
    plots = "".join(_plot(points, name, caption) for name, caption in _SERIES)
    rows = [
        f"<tr><td class=n>{p.number}</td><td>{escape(p.started)}</td><td>{escape(p.label)}</td>"
        f"<td>{escape(p.version)}</td><td>{badge('PASSED' if p.ok else 'FAILED')}</td>"
        f"<td class=n>{p.passed}</td><td class=n>{p.failing}</td><td class=n>{p.known}</td>"
        f"<td class=n>{'' if p.margin is None else f'{p.margin:.3g}'}</td><td class=n>{p.seconds:.1f}</td></tr>"
        for p in reversed(points)
    ]
    names = ("run#", "started", "label", "fp8-oracle", "verdict", "passed#", "failing#", "known#", "margin#", "s#")
    body = (
        f'<header><div class="top"><h1>fp8-oracle history</h1>{theme_button()}</div>'
        f'<p class="verdict {"good" if points[-1].ok else "bad"}">{_last(points)}</p>'
        f'<p class="soft">{escape(title)}; a red diamond is a run that failed; margin 1 is the edge of the admissible '
        f'interval</p></header><main><h2>Run by run</h2><div class="plots">{plots}</div><h2>Runs, newest first</h2>'
        f"{scrolling(table(names, rows, kind='runs'), 'runs')}</main>"
    )
    return page("fp8-oracle: history", body)


def _last(points: Sequence[Point]) -> str:
    last = points[-1]
    text = "✓ All as it must be" if last.ok else "✗ Not all as it must be"
    return f"{text} in run {last.number}, the last of {counted(len(points), 'run')}"


def _plot(points: Sequence[Point], name: str, title: str) -> str:
    """One series from 0 to its largest value, or to 1: the least count, and the edge of the bound for a margin."""
    values, ends = [getattr(p, name) for p in points], (f"run {points[0].number}", f"run {points[-1].number}")
    labels, good = list(map(_named, points)), [p.ok for p in points]
    return series(title, values, labels, good, ends, counts=name not in ("margin", "seconds"), said=_range(values))


def _named(point: Point) -> str:
    return f"run {point.number}, {point.label or point.started}"


def _range(values: Sequence[float | None]) -> str:
    numbers = [v for v in values if v is not None]
    first, last = ("-" if v is None else v for v in (values[0], values[-1]))
    return f"{first} ... {last}" + (f" (least {min(numbers):.4g}, most {max(numbers):.4g})" if numbers else "")
