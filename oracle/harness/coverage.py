"""Which legs each judged routine has, computed from what is registered, stored and tried, never written down.

    P  the production package exposes it
    D  a subject runs it in the cases of ``verify``: the arches of those subjects
    G  stored golden fixtures of its contract
    H  captures of real hardware that its contract judges: their arches

``-`` in H: no library computes it on a GPU that captures are of. Not covered: how good a leg is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oracle.errors import FixtureError
from oracle.fixtures import captures, golden
from oracle.fixtures import files as fixtures
from oracle.harness.subjects import Subject
from oracle.routines import Contract, profiles, registered

BEGIN, END = "<!-- coverage:begin -->", "<!-- coverage:end -->"
LEGEND = (
    "P: exposed by the production package. D: arches on which a subject runs in `verify`. "
    "G: stored golden fixtures. H: arches with captures of real hardware (`-`: no library computes it on a GPU that "
    "captures are of)."
)
LEGS = "PDGH"
WORDS = {
    "in the layer": "whether the production package exposes it",
    "judged live on": "the arches on which a subject runs it in `verify`; here those of a CPU",
    "goldens": "how many stored calls with expected bits and intervals it has",
    "captured on": "the arches of recorded outputs of real hardware; `-`: no library computes it on such a GPU",
}
"""What a page calls the ``LEGS``, and what each says."""
SECTIONS = ("Quantisation", "Padding and layout", "GEMM", "MoE", "Attention", "Attention logits", "Platform decisions")
"""The order of the headings; those of other families come after them."""


@dataclass(frozen=True)
class Routine:
    """One row: its name, its heading, and the contract that judges it."""

    name: str
    section: str
    contract: Contract


@dataclass(frozen=True)
class Row:
    """The legs of one routine; an empty cell is a leg that is missing."""

    routine: Routine
    exposed: bool
    arches: tuple[str, ...]
    goldens: int
    captured: tuple[str, ...]

    def cells(self) -> tuple[str, ...]:
        """The ``LEGS`` as they are printed."""
        hardware = ", ".join(self.captured) or ("" if self.routine.contract.gpu else "-")
        return ("yes" if self.exposed else "", ", ".join(self.arches), str(self.goldens or ""), hardware)

    @property
    def missing(self) -> str:
        """Letters of the empty cells."""
        return "".join(letter for letter, cell in zip(LEGS, self.cells(), strict=True) if not cell)


def routines() -> list[Routine]:
    """Every registered contract, and the rows that it has beside its own, by heading and name."""
    rows = []
    for contract in registered().values():
        rows.append(Routine(contract.name, contract.section, contract))
        for row in contract.also:
            section, _, name = row.partition(": ")
            rows.append(Routine(name, section, contract))
    sections = dict.fromkeys((*SECTIONS, *(routine.section for routine in rows)))
    order = {section: rank for rank, section in enumerate(sections)}
    return sorted(rows, key=lambda routine: (order[routine.section], routine.name))


def rows(subjects: Iterable[Subject], folder: Path, exposes: Callable[[str], bool]) -> list[Row]:
    """The table for these subjects and a fixtures folder; ``exposes`` looks a name up in the production package."""
    arches: dict[str, set[str]] = {}
    for subject in subjects:
        if subject.why_not() is None:
            arches.setdefault(subject.contract, set()).add(subject.arch)
    stored: dict[str, int] = {}
    for entry in golden.load(folder / golden.FOLDER)["cases"]:
        stored[entry["contract"]] = stored.get(entry["contract"], 0) + bool(entry["file"])
    captured: dict[str, set[str]] = {}
    for capture in captures.load(folder / "captures"):
        if capture.unsupported is None:
            captured.setdefault(capture.contract, set()).add(capture.recording.arch)
    lines = []
    for routine in routines():
        name, exposed = routine.contract.name, exposes(routine.contract.production or routine.contract.name)
        tried = tuple(sorted(arches.get(name, ()))) if profiles.cases(name, "quick") else ()
        lines.append(Row(routine, exposed, tried, stored.get(name, 0), tuple(sorted(captured.get(name, ())))))
    return lines


def markdown(table: Sequence[Row]) -> str:
    """How many routines have each leg, what the columns say, and the table, one under a heading for each section."""
    have = [sum(letter not in row.missing for row in table) for letter in LEGS[:-1]]
    seen = sum(bool(row.captured) for row in table)
    text = f"{have[0]} in the layer, {have[1]} judged live, {have[2]} with goldens, {seen} with captures of a GPU"
    lines = [f"**{len(table)} routines:** {text}.", "", "| column | says |", "|:--|---|"]
    lines += [f"| {column} | {means} |" for column, means in WORDS.items()]
    section = ""
    for row in table:
        if row.routine.section != section:
            lines += ["", "</div>"] if section else []
            section = row.routine.section
            head = (f"| routine | {' | '.join(WORDS)} |", "|:--|:--|:--|--:|:--|")
            lines += ["", f"## {section}", "", '<div class="rows" markdown>', "", *head]
        lines.append(f"| `{row.routine.name}` | {' | '.join(row.cells())} |")
    return "\n".join([*lines, "", "</div>"]) + "\n"


def placed(text: str, block: str, path: Path) -> str:
    """``text`` with the block between the markers replaced.

    Raises FixtureError: the markers do not stand there once each, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise FixtureError(f"{path}: needs one {BEGIN} and, after it, one {END}")
    return f"{before}{BEGIN}\n{block}{END}{after}"


def place(path: Path, block: str) -> bool:
    """Write the block into a file; True when it changed."""
    try:
        text = fixtures.read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FixtureError(f"{path}: is no UTF-8 text ({error.reason} at byte {error.start})") from None
    page = placed(text, block, path)
    if page != text:
        fixtures.write_bytes(path, page.encode("utf-8"))
    return page != text
