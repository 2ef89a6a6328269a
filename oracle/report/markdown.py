"""A report as Markdown for a pull request or a job summary: the verdict, what fails and why, then the table folded.

At most ``LIMIT`` characters, because hosts refuse longer comments; what is left out is counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from oracle.report.causes import Cause, causes
from oracle.report.outcome import Group, Report

LIMIT = 60_000
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
QUOTED = 600  # characters of one message


def to_markdown(report: Report) -> str:
    """The report as GitHub-flavoured Markdown."""
    found = causes(report)
    counts = ", ".join(f"{count} {name.lower()}" for name, count in report.counts().items() if count)
    sign, word = ("✅", "all as it must be") if report.ok else ("❌", "not as it must be")
    head = [f"### {sign} fp8-oracle: {word}", "", f"{counts or 'nothing was judged'}; {report.seconds:.1f} s", ""]
    if report.unfinished:
        head += [f"**Interrupted: {report.unfinished} cases did not run.**", ""]
    head += [f"- **ledger**: {_line(complaint)}" for complaint in report.complaints]
    for title, known in (("What fails", False), ("Known failures", True)):
        chosen = [cause for cause in found if (cause.known is not None) == known]
        if chosen:
            head += ["", f"#### {title}", ""]
            head += [text for cause in chosen for text in _cause(cause)]
    return _CONTROL.sub("?", _within([*head, "", *_table(report), "", *_provenance(report)]))


def _cause(cause: Cause) -> Iterable[str]:
    first = cause.outcomes[0]
    yield f"- **{_line(cause.title)}**: {_line(cause.where)}  "
    yield f"  why: {_line(cause.why)}  "
    if cause.known is not None and cause.explained_by:
        yield f"  reproduced by: {_line('; or '.join(cause.explained_by))}  "
    if first.verdict.total:
        yield f"  {_line(first.verdict.summary)}  "
    if first.repro:
        yield f"  {_code(first.repro)}"


def _table(report: Report) -> list[str]:
    rows = [_row(group) for group in report.groups()]
    return [
        f"<details><summary>{len(rows)} routines by subject and arch</summary>",
        "",
        "| routine | subject | arch | cases | verdict | worst margin |",
        "|---|---|---|--:|---|--:|",
        *rows,
        "",
        "</details>",
    ]


def _row(group: Group) -> str:
    known = group.known
    word = "KNOWN FAILURE" if known == len(group.outcomes) else str(group.status)
    failing = sum(o.fails for o in group.outcomes)
    detail = f" ({failing} of {len(group.outcomes)})" if failing else f" ({known} known)" if known else ""
    margin = "" if group.margin is None else f"{group.margin:.3g}"
    cells = (group.contract, group.subject, group.arch, str(group.judged or ""), f"{word}{detail}", margin)
    return "| " + " | ".join(_line(cell) for cell in cells) + " |"


def _provenance(report: Report) -> list[str]:
    facts = {**report.machine, **report.versions}
    said = ", ".join(f"{name} {value}" for name, value in sorted(facts.items()))
    return ["<details><summary>machine and versions</summary>", "", _line(said, longest=4000), "", "</details>", ""]


def _within(lines: list[str]) -> str:
    """As many lines as the limit allows; an open fold is closed."""
    if sum(len(line) + 1 for line in lines) <= LIMIT:
        return "\n".join(lines)
    kept: list[str] = []
    length = 200
    for line in lines:
        length += len(line) + 1
        if length > LIMIT:
            break
        kept.append(line)
    folds = sum(line.startswith("<details>") for line in kept) - sum(line == "</details>" for line in kept)
    return "\n".join([*kept, *["", "</details>"] * folds, "", f"({len(lines) - len(kept)} more lines left out)", ""])


def _line(text: str, longest: int = QUOTED) -> str:
    """Text in one line, cut, with what Markdown would take for markup made harmless."""
    said = " ".join(text.split())
    said = said if len(said) <= longest else f"{said[:longest]}…"
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", said)


def _code(text: str) -> str:
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    apart = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{apart}{text}{apart}{fence}"
