"""What changed between two reports: broke, healed, other numerics, moved margins, gained and lost.

Outcomes are paired by id, subject and arch; what is left over by id and subject, so that two machines can be compared.
No difference is too small: a kernel's bits and margins are deterministic.

:func:`to_markdown` makes the comment of a pull request: what broke first, the rest folded. Its first line is a hidden
marker with the title, by which a bot finds the comment of an earlier push and replaces it; the text stays below the
65,536 characters that GitHub takes (:data:`oracle.report.files.LIMIT`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite

from rich.console import Console
from rich.text import Text

from oracle.errors import OptionError, counted
from oracle.report.files import code, one_line, within
from oracle.report.outcome import JUDGED, Outcome, Report, printable

SCHEMA = "fp8-oracle.changes/1"
MOST = 20  # changes of one kind that are printed; ``--verbose`` prints all


class Kind(StrEnum):
    """How one outcome changed, the first kind that fits; ``BROKE`` and ``NEW_FAILURE`` make a comparison fail."""

    BROKE = "broke"
    NEW_FAILURE = "new and failing"
    HEALED = "healed"
    FAILS_DIFFERENTLY = "fails differently"
    LOST = "no longer judged"
    GAINED = "judged now"
    NUMERICS = "other numerics"
    MARGIN = "margin moved"
    STATUS = "other status"
    GONE = "not in the new run"
    NEW = "only in the new run"


BROKEN = (Kind.BROKE, Kind.NEW_FAILURE)
STYLES: Mapping[Kind, str] = {
    **dict.fromkeys(BROKEN, "bold red"),
    Kind.HEALED: "green",
    **dict.fromkeys((Kind.FAILS_DIFFERENTLY, Kind.LOST), "yellow"),
}


@dataclass(frozen=True)
class Change:
    """One difference; ``old`` or ``new`` is None where the outcome is in one report only."""

    kind: Kind
    old: Outcome | None
    new: Outcome | None

    @property
    def outcome(self) -> Outcome:
        outcome = self.new or self.old
        assert outcome is not None, "a change has at least one side"
        return outcome

    @property
    def words(self) -> str:
        """Old and new in one phrase, in the terms of the kind."""
        old, new = self.old, self.new
        if old is None or new is None:
            return self.outcome.verdict.summary
        if self.kind is Kind.MARGIN:
            return f"margin {old.verdict.margin:.4g} -> {new.verdict.margin:.4g}"
        if self.kind is Kind.NUMERICS:
            sides = [
                f"bits of {o.verdict.matches}" if o.verdict.matches else o.verdict.basis or "nothing identified"
                for o in (old, new)
            ]
            return " -> ".join(sides)
        if self.kind is Kind.FAILS_DIFFERENTLY:
            return " -> ".join(f"{o.word}, {o.verdict.outside} of {o.verdict.total} outside" for o in (old, new))
        return f"{old.word} -> {new.word}: {new.verdict.summary}"

    @property
    def moved(self) -> float:
        """How far the margin moved, upwards positive; infinite from or to no number."""
        if self.old is None or self.new is None:
            return 0.0
        return self.new.verdict.margin - self.old.verdict.margin

    def to_json(self) -> dict[str, object]:
        named = {name: getattr(self.outcome, name) for name in ("id", "contract", "subject", "arch")}
        sides = {name: None if o is None else _side(o) for name, o in (("old", self.old), ("new", self.new))}
        return {"kind": str(self.kind), **named, "words": self.words, **sides}


@dataclass(frozen=True)
class Comparison:
    """Two reports side by side."""

    changes: tuple[Change, ...]
    same: int
    versions: tuple[tuple[str, str, str], ...]
    complaints: tuple[str, ...] = ()
    unfinished: int = 0
    gaps: tuple[str, ...] = ()
    old_unfinished: int = 0

    @property
    def ok(self) -> bool:
        """Nothing broke, no record lost outcomes, and the new run is whole.

        An old run that was stopped on purpose is no fault of the new one: what it did not run is new.
        """
        whole = not self.problems and not self.unfinished
        return whole and not any(change.kind in BROKEN for change in self.changes)

    @property
    def problems(self) -> tuple[str, ...]:
        """Complaints that the old run has not, and what either run lacks."""
        return (*self.complaints, *self.gaps)

    def of(self, kind: Kind) -> list[Change]:
        """The changes of one kind; moved margins largest first."""
        chosen = [change for change in self.changes if change.kind is kind]
        return sorted(chosen, key=lambda change: -abs(change.moved)) if kind is Kind.MARGIN else chosen

    def to_json(self) -> dict[str, object]:
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "counts": {str(kind): len(self.of(kind)) for kind in Kind} | {"same": self.same},
            "complaints": list(self.problems),
            "unfinished": self.unfinished,
            "versions": [{"name": name, "old": old, "new": new} for name, old, new in self.versions],
            "changes": [change.to_json() for change in self.changes],
        }


def between(old: Report, new: Report, *, renamed: Mapping[str, str] | None = None) -> Comparison:
    """Compare two reports; ``renamed`` maps subjects of the old one to those of the new one they are compared with.

    With ``renamed`` only the named subjects are compared.
    """
    names_of = renamed or {}
    before = [
        _renamed(o, names_of.get(o.subject, o.subject)) for o in old.outcomes if renamed is None or o.subject in renamed
    ]
    wanted = None if renamed is None else set(renamed.values())
    after = [o for o in new.outcomes if wanted is None or o.subject in wanted]
    pairs, only_old, only_new = _pairs(before, after)
    changes = [Change(kind, a, b) for a, b in pairs if (kind := _kind(a, b)) is not None]
    changes += [Change(Kind.NEW_FAILURE if o.fails else Kind.NEW, None, o) for o in only_new]
    changes += [Change(Kind.GONE, o, None) for o in only_old]
    names = sorted({*old.versions, *new.versions})
    versions = [(n, old.versions.get(n, "none"), new.versions.get(n, "none")) for n in names]
    order = list(Kind)
    return Comparison(
        tuple(sorted(changes, key=lambda change: order.index(change.kind))),
        len(pairs) - sum(change.old is not None and change.new is not None for change in changes),
        tuple(v for v in versions if v[1] != v[2]),
        tuple(c for c in new.complaints if c not in old.complaints),
        new.unfinished,
        tuple(f"{which} run: {gap}" for which, run in (("old", old), ("new", new)) for gap in run.gaps),
        old.unfinished,
    )


def _renamed(o: Outcome, subject: str) -> Outcome:
    """The outcome by another subject; the id of a test that takes no case is the subject."""
    prefix = f"pytest/{o.subject}"
    return replace(o, subject=subject, id=f"pytest/{subject}{o.id[len(prefix) :]}" if o.id.startswith(prefix) else o.id)


def print_comparison(comparison: Comparison, console: Console, *, verbose: bool = False, quiet: bool = False) -> None:
    """Versions, then the changes by kind, then one closing line; ``quiet`` leaves the closing line and what broke."""
    if not quiet:
        for name, old, new in comparison.versions:
            console.print(Text(f"{name}: {old} -> {new}", style="dim"), soft_wrap=True)
    for kind in Kind:
        changes = comparison.of(kind)
        if not changes or (quiet and kind not in BROKEN):
            continue
        console.print(Text(f"{kind} ({len(changes)})", style=STYLES.get(kind, "bold")))
        for change in changes if verbose else changes[:MOST]:
            o = change.outcome
            lines = [f"  {o.id} [{o.subject}, {o.arch}]", f"    {change.words}"]
            if kind in BROKEN and o.verdict.explained_by:
                lines.append(f"    explained by: {'; or '.join(o.verdict.explained_by)}")
            if kind in BROKEN and o.repro:
                lines.append(f"    repro: {o.repro}")
            console.print(Text("\n".join(lines)), soft_wrap=True)
        if not verbose and len(changes) > MOST:
            console.print(Text(f"  ... and {len(changes) - MOST} more; --verbose prints all", style="dim"))
    for problem in comparison.problems:
        console.print(Text.assemble(("PROBLEM ", "bold red"), problem), soft_wrap=True)
    for which, left in (("old", comparison.old_unfinished), ("new", comparison.unfinished)):
        if left:
            text = f"the {which} run is unfinished: {counted(left, 'case')} did not run"
            console.print(Text(text, style="yellow"))
    each = [f"{count} {kind}" for kind in Kind if (count := len(comparison.of(kind)))]
    word = ("OK", "bold green") if comparison.ok else ("NOT OK", "bold red")
    counts = ", ".join([*each, f"{comparison.same} the same"])
    console.print(Text.assemble(word, f"  {counts}"), soft_wrap=True)


def _pairs(
    before: Iterable[Outcome], after: Iterable[Outcome]
) -> tuple[list[tuple[Outcome, Outcome]], list[Outcome], list[Outcome]]:
    """Outcomes that belong together, in the new order, and those without a partner."""
    pairs: list[tuple[Outcome, Outcome]] = []
    old, new = list(before), list(after)
    for names in (("id", "subject", "arch"), ("id", "subject")):
        waiting: dict[tuple[str, ...], list[Outcome]] = {}
        for o in old:
            waiting.setdefault(tuple(getattr(o, name) for name in names), []).append(o)
        left = []
        for o in new:
            if partners := waiting.get(tuple(getattr(o, name) for name in names)):
                pairs.append((partners.pop(0), o))
            else:
                left.append(o)
        old, new = [o for partners in waiting.values() for o in partners], left
    return pairs, old, new


def _kind(old: Outcome, new: Outcome) -> Kind | None:
    if new.fails and not old.fails:
        return Kind.BROKE
    if not new.status.is_failure and old.status.is_failure:
        return Kind.HEALED
    if new.status.is_failure and old.status.is_failure:
        same = (old.status, old.verdict.outside, old.known) == (new.status, new.verdict.outside, new.known)
        # as text: a NaN that is there twice is the same
        return None if same and repr(old.verdict.worst) == repr(new.verdict.worst) else Kind.FAILS_DIFFERENTLY
    if (old.status in JUDGED) != (new.status in JUDGED):
        return Kind.LOST if old.status in JUDGED else Kind.GAINED
    if (old.verdict.matches, old.verdict.basis) != (new.verdict.matches, new.verdict.basis):
        return Kind.NUMERICS
    if old.verdict.margin != new.verdict.margin:
        return Kind.MARGIN
    return None if old.status is new.status else Kind.STATUS


def _side(o: Outcome) -> dict[str, object]:
    margin = o.verdict.margin
    return {
        "status": o.word,
        "arch": o.arch,
        "outside": o.verdict.outside,
        "margin": margin if isfinite(margin) else repr(margin),
        "matches": o.verdict.matches,
        "explained_by": list(o.verdict.explained_by),
    }


# --- the comment of a pull request --------------------------------------------------------------------------


TITLE = "fp8-oracle"
GROUPS, ROWS = 10, 50  # causes in the open part, rows of a folded table
CELL = 160  # characters of a cell


def marker(title: str) -> str:
    """The hidden line at the head of every comment of this title.

    Raises OptionError: a title that would end the line or the HTML comment.
    """
    if not re.fullmatch(r"[\w .,:/+()@=-]{1,100}", title) or "--" in title:
        raise OptionError(f"--title {title!r}: at most 100 letters, digits, spaces and . , : / + ( ) @ = -, no '--'")
    return f"<!-- fp8-oracle compare: {title} -->"


def to_markdown(comparison: Comparison, title: str = TITLE) -> str:
    """The comment; the same comparison gives the same text."""
    each = [f"{count} {kind}" for kind in Kind if (count := len(comparison.of(kind)))]
    counts = ", ".join([*each, f"{comparison.same} the same"])
    lines = [marker(title), f"### {'✅' if comparison.ok else '❌'} {one_line(title)}: {counts}", ""]
    lines += [f"- **problem**: {one_line(problem)}" for problem in comparison.problems]
    for which, left in (("old", comparison.old_unfinished), ("new", comparison.unfinished)):
        if left:
            lines.append(f"- the {which} run is unfinished: {counted(left, 'case')} did not run")
    groups = _groups([change for kind in BROKEN for change in comparison.of(kind)])
    for group in groups[:GROUPS]:
        lines += _open(group)
    if len(groups) > GROUPS:
        lines.append(f"- and {len(groups) - GROUPS} more, in the table below")
    for kind in Kind:
        lines += _folded(kind, comparison.of(kind))
    if comparison.versions:
        rows = [tuple(map(one_line, row)) for row in comparison.versions]
        lines += _table(f"versions ({len(rows)})", ("of", "old", "new"), rows)
    return printable(within([*lines, ""]))


def _groups(changes: Sequence[Change]) -> list[list[Change]]:
    """Changes of one kind, routine, subject and arch together, in order of first appearance."""
    groups: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        o = change.outcome
        groups.setdefault((change.kind, o.contract, o.subject, o.arch), []).append(change)
    return list(groups.values())


def _open(group: Sequence[Change]) -> Iterator[str]:
    """What broke: where, how, why, and the command that repeats the first case."""
    first, o = group[0], group[0].outcome
    count = f"{len(group)} case" + "s" * (len(group) > 1)
    yield f"- **{one_line(o.subject)}** {first.kind}: {one_line(o.contract)} on {one_line(o.arch)}, {count}  "
    yield f"  {one_line(first.words)}  "
    if names := dict.fromkeys(name for change in group for name in change.outcome.verdict.explained_by):
        yield f"  explained by: {one_line('; or '.join(names))}  "
    if o.source:
        yield f"  at {code(o.source)}  "
    if o.repro:
        yield f"  {code(o.repro)}"


def _folded(kind: Kind, changes: Sequence[Change]) -> list[str]:
    rows = [
        (*map(one_line, (c.outcome.id, c.outcome.subject, c.outcome.arch)), one_line(c.words, longest=CELL))
        for c in changes
    ]
    return _table(f"{kind} ({len(rows)})", ("case", "subject", "arch", "old -> new"), rows) if rows else []


def _table(summary: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows[:ROWS])]
    more = [] if len(rows) <= ROWS else ["", f"and {len(rows) - ROWS} more"]
    return ["", f"<details><summary>{summary}</summary>", "", *lines, *more, "", "</details>"]
