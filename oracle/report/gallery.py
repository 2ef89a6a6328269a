"""What runs of a gallery found: a file of rows, a page of them, and two runs beside each other."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from oracle.errors import FixtureError, counted
from oracle.fixtures import files as fixtures
from oracle.fixtures.kinds import kind_of

SCHEMA = "fp8-oracle.gallery/1"
ORDER = ("FAILED", "CRASHED", "UNTESTED", "CONFORMS", "UNSUPPORTED")
HEAD = ("verdict", "kernel", "what was found")
WHY = 200  # characters of a reason in a brief row
SHOWN = 3  # cases of a moved kernel that are named


@dataclass(frozen=True)
class Row:
    """What one run found of one kernel.

    ``verdict`` is CONFORMS, FAILED, UNTESTED, CRASHED or UNSUPPORTED, ``why`` the first reason where it does not
    conform. Of the cases with a verdict on numbers: ``judged`` how many, ``identified`` how many of them equal in
    every bit a named schedule or recipe, or the exact values, ``matches`` how often each name, ``classes`` how often
    each class of evidence, ``ulps`` the largest finite error, ``sqnr`` the least finite ratio in dB. ``explained``
    counts the faults that explain failures. ``batch`` and ``reruns`` say whether results depend on the batch and on the
    run: "same", "differ", or "" where it was not tried. ``covered`` is what was reached. ``cases`` has, for each case,
    its status and what it matches. ``exempt`` are watches that the project excludes, each with what it says.
    ``recorded`` is where and when it was run, where that is not what its record says of all.
    """

    project: str
    kernel: str
    contract: str
    verdict: str
    why: str = ""
    judged: int = 0
    identified: int = 0
    matches: Mapping[str, int] = field(default_factory=dict)
    classes: Mapping[str, int] = field(default_factory=dict)
    explained: Mapping[str, int] = field(default_factory=dict)
    ulps: float | None = None
    sqnr: float | None = None
    batch: str = ""
    reruns: str = ""
    covered: tuple[str, ...] = ()
    pinned: str = ""
    command: str = ""
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    cases: Mapping[str, str] = field(default_factory=dict)
    exempt: tuple[str, ...] = ()
    recorded: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.project}.{self.kernel}/{self.contract}"

    def brief(self) -> Row:
        """What its line of a page needs, the reason cut short: for a record that is kept in a repository."""
        why = textwrap.shorten(self.why, WHY, placeholder=" ...")
        return replace(self, cases={}, command="", classes=dict([*self.classes.items()][:1]), why=why)


@dataclass(frozen=True)
class Run:
    """One run: where and when, and its rows."""

    machine: Mapping[str, str]
    rows: tuple[Row, ...]

    def write(self, path: Path) -> None:
        left: tuple[object, ...] = ("", None, {}, ())
        rows = [{name: value for name, value in asdict(row).items() if value not in left} for row in self.rows]
        head = json.dumps({"schema": SCHEMA, "machine": dict(self.machine)})[:-1]
        listed = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)  # a line for each
        fixtures.write_bytes(path, f'{head}, "rows": [\n{listed}\n]}}\n'.encode())


def read(path: Path) -> Run:
    """The run that a file holds; FixtureError where it is no such file."""
    content = fixtures.read_bytes(path)
    try:
        record = json.loads(content)
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        what = kind_of(path) or f"no run of a gallery ({SCHEMA})"
        raise FixtureError(f"{path}: this is {what}; `fp8-oracle gallery run` writes what is read here")
    known, needed = {f.name for f in fields(Row)}, {"project", "kernel", "contract", "verdict"}
    rows = []
    for number, row in enumerate(record.get("rows", [])):
        if not isinstance(row, dict) or not needed <= set(row) or set(row) - known:
            raise FixtureError(f"{path}: row {number} is not one of {SCHEMA}")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}
        rows.append(Row(**values))
    return Run(record.get("machine", {}), tuple(rows))


def stored(old: Run, new: Run) -> Run:
    """The rows of ``old`` with those of ``new`` instead, brief, for a record that is kept in a repository.

    A row of a kernel that ran replaces every row of its project and contract, whatever they call the kernel; rows of
    kernels that did not run (UNSUPPORTED) replace none, and are left out. The record is that of the new run; a row that
    stays says where it was recorded, if elsewhere.
    """
    fresh: dict[tuple[str, str], list[Row]] = {}
    for row in new.rows:
        if row.verdict != "UNSUPPORTED":
            fresh.setdefault((row.project, row.contract), []).append(row.brief())
    rows: list[Row] = []
    for row in old.rows:
        if (place := (row.project, row.contract)) in fresh:
            rows += fresh[place]  # where the first of the old ones stood
            fresh[place] = []
        else:
            elsewhere = dict(old.machine) if old.machine != new.machine else {}
            rows.append(replace(row, recorded=row.recorded or elsewhere))
    rows += [row for left in fresh.values() for row in left]
    return Run(
        new.machine, tuple(replace(row, recorded={} if row.recorded == new.machine else row.recorded) for row in rows)
    )


def page(run: Run) -> str:
    """The rows as Markdown: how many, how they ended, and a table with what is wrong first."""
    rows = sorted(run.rows, key=lambda row: (ORDER.index(row.verdict), row.key))
    tried = [row for row in rows if row.verdict != "UNSUPPORTED"]
    judged = sum(row.judged for row in tried)
    identified = sum(row.identified for row in tried)
    projects = counted(len({row.project for row in tried}), "project")
    lines = [f"{counted(len(tried), 'kernel')} of {projects}, {counted(judged, 'output')} judged."]
    if judged:
        share = f"{identified} of them ({identified / judged:.0%})"
        lines[0] += f" {share} equal in every bit a named schedule or recipe, or the exact values."
    ends = Counter(row.verdict for row in tried)
    lines += ["", f"**{', '.join(f'{count} {verdict}' for verdict, count in ends.items())}**", "", *table(tried)]
    if excluded := [row for row in tried if row.exempt]:
        lines += ["", "Not asked, since the project excludes it:", ""]
        lines += [f"- {row.project} {code(row.kernel)}: {'; '.join(row.exempt)}" for row in excluded]
    left = [row for row in rows if row.verdict == "UNSUPPORTED"]
    if left:
        lines += ["", "Not run here:", ""]
        lines += [f"- {row.project} {code(row.kernel)} under {code(row.contract)}: {row.why}" for row in left]
    places: dict[str, list[Row]] = {}
    for row in sorted(tried, key=lambda row: bool(row.recorded)):  # the run's own first
        machine = row.recorded or run.machine
        places.setdefault(", ".join(f"{name} {value}" for name, value in machine.items()), []).append(row)
    for place, those in (places or {"": []}).items():
        versions = sorted({f"{name} {value}" for row in those for name, value in row.versions.items()})
        which = "Recorded" if len(places) < 2 else f"{counted(len(those), 'kernel')} recorded"
        lines += ["", f"{which} with {', '.join(filter(None, dict.fromkeys((*place.split(', '), *versions))))}."]
    return "\n".join(lines) + "\n"


def table(rows: Iterable[Row]) -> Iterator[str]:
    """A table that fits a page: verdict, kernel, what was found; the figures of a row fold in its last cell."""
    yield from ('<div class="rows" markdown>', "", f"| {' | '.join(HEAD)} |", "|:--|:--|---|")
    yield from map(_line, rows)
    yield from ("", "</div>")


def code(text: str) -> str:
    return f"`{text}`"


def _line(row: Row) -> str:
    kernel = f"**{row.project}** {code(row.kernel)}" + (f" ({row.pinned})" if row.pinned else "")
    kernel += f"<br>under {code(row.contract)}" if row.contract != row.kernel else ""
    result = f"{row.why.rstrip('.')}." if row.why else _identity(row)
    result += f" Explained by: {', '.join(row.explained)}." if row.explained else ""
    figures = [
        _identity(row) if row.why else "",
        f"Strongest evidence of most outputs: {next(iter(row.classes))}." if row.classes else "",
        "" if row.ulps is None else f"Largest error {row.ulps:.3g} ulps.",
        "" if row.sqnr is None else f"Least SQNR {row.sqnr:.1f} dB.",
        f"Rows in other batches: {row.batch} bits." if row.batch else "",
        f"Reruns: {row.reruns} bits." if row.reruns else "",
        f"Covered: {'; '.join(row.covered).removeprefix('covered ')}." if row.covered else "",
        f"Again: {code(row.command)}" if row.command else "",
    ]
    if text := [figure for figure in figures if figure]:
        result += f" <details><summary>figures</summary>{'<br>'.join(text)}</details>"
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (row.verdict, kernel, result)) + " |"


def _identity(row: Row) -> str:
    """What the outputs of a row are, and how many of them."""
    if not row.judged:
        return ""
    if not row.matches:
        return f"{counted(row.judged, 'output')}, none with the bits of a named schedule or recipe."
    name, *more = row.matches
    others = f" or of {counted(len(more), 'other')}" if more else ""
    have = "have" if row.judged > 1 else "has"
    return f"{row.identified} of {counted(row.judged, 'output')} {have} the bits of {code(name)}{others}."


def verdicts_beside(rows: Iterable[Row], kept: Iterable[Row]) -> tuple[list[str], int]:
    """A line for each of the ``rows``, and how many have a verdict that no kept row of the same kernel has: one of its
    project, contract and name, or of its project and contract where none has the name."""
    pages: dict[tuple[str, str], list[Row]] = {}
    for row in kept:
        pages.setdefault((row.project, row.contract), []).append(row)
    lines, count = [], Counter[str]()
    for row in rows:
        page = pages.get((row.project, row.contract), [])
        named = [one for one in page if one.kernel.partition(" ")[0] == row.kernel]
        known = sorted({one.verdict for one in named or page})
        word = "not on the page" if not known else "same" if row.verdict in known else "MOVED"
        word = "not run" if row.verdict == "UNSUPPORTED" else word
        why = "" if row.verdict == "CONFORMS" else row.why[:WHY]
        count[word] += 1
        lines.append(f"{word:<16} {row.verdict:<11} page {','.join(known) or '-':<11} {row.key} {why}".rstrip())
    others = count["not run"] + count["not on the page"]
    lines.append(f"{count['same']} verdicts as on the page, {count['MOVED']} others, {others} not compared")
    return lines, count["MOVED"]


def beside(old: Run, new: Run) -> Iterator[str]:
    """What changed from one run to another: lines, what broke first; nothing where nothing changed.

    Cases are compared where both runs met them, which runs with one seed do.
    """
    before, after = ({row.key: row for row in run.rows} for run in (old, new))
    lines: list[tuple[int, str]] = []
    for key in sorted(before.keys() | after.keys()):
        a, b = before.get(key), after.get(key)
        if a is None or b is None:
            lines.append((3, f"{key}: {'new' if a is None else 'gone'}"))
            continue
        moved = _versions(a, b)
        if a.verdict != b.verdict:
            order = 0 if a.verdict == "CONFORMS" else 1 if b.verdict == "CONFORMS" else 2
            word = ("broke", "healed", "changed")[order]
            why = f": {b.why}" if b.why else ""
            lines.append((order, f"{key} {word}: {a.verdict} to {b.verdict}{moved}{why}"))
        other = [case for case, text in a.cases.items() if b.cases.get(case, text) != text]
        if other:
            named = "; ".join(f"{case}: {a.cases[case]} to {b.cases[case]}" for case in other[:SHOWN])
            lines.append((2, f"{key}: {len(other)} of {len(a.cases)} cases changed{moved}: {named}"))
    return (text for _, text in sorted(lines))


def _versions(a: Row, b: Row) -> str:
    names = [name for name in a.versions if b.versions.get(name, a.versions[name]) != a.versions[name]]
    return f" ({', '.join(f'{name} {a.versions[name]} to {b.versions[name]}' for name in names)})" if names else ""
