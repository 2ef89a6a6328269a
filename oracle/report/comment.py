"""A comparison of two runs as the comment of a pull request: Markdown, what broke first, the rest folded.

The first line is a hidden marker with the title, by which a bot finds the comment of an earlier push and replaces it.
The text stays below the 65,536 characters that GitHub takes (:data:`oracle.report.files.LIMIT`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from oracle.errors import OptionError
from oracle.report.changes import BROKEN, Change, Comparison, Kind
from oracle.report.files import code, one_line, within
from oracle.report.outcome import printable

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


def to_markdown(found: Comparison, title: str = TITLE) -> str:
    """The comment; the same comparison gives the same text."""
    counted = [f"{count} {kind}" for kind in Kind if (count := len(found.of(kind)))]
    counts = ", ".join([*counted, f"{found.same} the same"])
    lines = [marker(title), f"### {'✅' if found.ok else '❌'} {one_line(title)}: {counts}", ""]
    lines += [f"- **ledger**: {one_line(complaint)}" for complaint in found.complaints]
    if found.unfinished:
        lines.append(f"- the new run is unfinished: {found.unfinished} cases did not run")
    groups = _groups([change for kind in BROKEN for change in found.of(kind)])
    for group in groups[:GROUPS]:
        lines += _open(group)
    if len(groups) > GROUPS:
        lines.append(f"- and {len(groups) - GROUPS} more, in the table below")
    for kind in Kind:
        lines += _folded(kind, found.of(kind))
    if found.versions:
        rows = [tuple(map(one_line, row)) for row in found.versions]
        lines += _table(f"versions ({len(rows)})", ("of", "old", "new"), rows)
    return printable(within([*lines, ""]))


def _groups(changes: Sequence[Change]) -> list[list[Change]]:
    """Changes of one kind, routine, subject and arch together, in order of first appearance."""
    found: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        o = change.outcome
        found.setdefault((change.kind, o.contract, o.subject, o.arch), []).append(change)
    return list(found.values())


def _open(group: Sequence[Change]) -> Iterator[str]:
    """What broke: where, how, why, and the command that repeats the first case."""
    first, o = group[0], group[0].outcome
    count = f"{len(group)} case" + "s" * (len(group) > 1)
    yield f"- **{one_line(o.subject)}** {first.kind}: {one_line(o.contract)} on {one_line(o.arch)}, {count}  "
    yield f"  {one_line(first.words)}  "
    if names := dict.fromkeys(name for change in group for name in change.outcome.verdict.explained_by):
        yield f"  explained by: {one_line(', '.join(names))}  "
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


def _table(said: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows[:ROWS])]
    more = [] if len(rows) <= ROWS else ["", f"and {len(rows) - ROWS} more"]
    return ["", f"<details><summary>{said}</summary>", "", *lines, *more, "", "</details>"]
