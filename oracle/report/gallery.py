"""What runs of a gallery found: a file of rows, a page of them, and two runs beside each other."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from oracle.errors import FixtureError, counted
from oracle.fixtures import files as fixtures
from oracle.fixtures.kinds import kind_of

SCHEMA = "fp8-oracle.gallery/1"
ORDER = ("FAILED", "CRASHED", "UNTESTED", "CONFORMS", "UNSUPPORTED")
HEAD = (
    *("project", "kernel", "contract", "verdict", "class", "judged", "identified as", "bits", "ulps", "SQNR"),
    *("batch", "reruns", "covered"),
)
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


def page(run: Run) -> str:
    """The rows as Markdown: how many, a table with what is wrong first, and a paragraph for each that is wrong."""
    rows = sorted(run.rows, key=lambda row: (ORDER.index(row.verdict), row.key))
    tried = [row for row in rows if row.verdict != "UNSUPPORTED"]
    judged = sum(row.judged for row in tried)
    identified = sum(row.identified for row in tried)
    projects = counted(len({row.project for row in tried}), "project")
    lines = [f"{counted(len(tried), 'kernel')} of {projects}, {counted(judged, 'output')} judged."]
    if judged:
        share = f"{identified} of them ({identified / judged:.0%})"
        lines[0] += f" {share} equal in every bit a named schedule or recipe, or the exact values."
    lines += ["", f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    lines += [_line(row) for row in rows if row.verdict != "UNSUPPORTED"]
    wrong = [row for row in rows if row.why and row.verdict != "UNSUPPORTED"]
    for row in wrong:
        named = f" Explained by: {', '.join(row.explained)}." if row.explained else ""
        lines += ["", f"**{row.project} {code(row.kernel)}** under {code(row.contract)}: {row.why}.{named}"]
        lines += ["", "```sh", row.command, "```"] if row.command else []
    if excluded := [row for row in tried if row.exempt]:
        lines += ["", "Not asked, since the project excludes it:", ""]
        lines += [f"- {row.project} {code(row.kernel)}: {'; '.join(row.exempt)}" for row in excluded]
    left = [row for row in rows if row.verdict == "UNSUPPORTED"]
    if left:
        lines += ["", "Not run here:", ""]
        lines += [f"- {row.project} {code(row.kernel)} under {code(row.contract)}: {row.why}" for row in left]
    versions = sorted((name, value) for row in tried for name, value in row.versions.items())
    recorded = dict.fromkeys(f"{name} {value}" for name, value in (*run.machine.items(), *versions))
    lines += ["", f"Recorded with {', '.join(recorded)}."]
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    return f"`{text}`"


def _line(row: Row) -> str:
    name = next(iter(row.matches), "")
    more = f" and {len(row.matches) - 1} more" if len(row.matches) > 1 else ""
    bits = f"{row.identified / row.judged:.0%}" if row.judged else ""
    ulps = "" if row.ulps is None else f"{row.ulps:.3g}"
    sqnr = "" if row.sqnr is None else f"{row.sqnr:.1f} dB"
    cells = (
        row.project,
        code(row.kernel) + (f" ({row.pinned})" if row.pinned else ""),
        code(row.contract),
        row.verdict,
        next(iter(row.classes), ""),
        str(row.judged),
        (code(name) if name else "") + more,
        bits,
        ulps,
        sqnr,
        row.batch,
        row.reruns,
        "; ".join(row.covered).removeprefix("covered "),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


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
