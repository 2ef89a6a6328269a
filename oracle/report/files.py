"""A report as JSON (schema ``fp8-oracle.report/1``), as JUnit XML, and as Markdown.

JUnit: FAILED is a ``failure``; CRASHED and UNTESTED are an ``error``; SKIPPED, UNSUPPORTED and known failures are
``skipped`` with their reason; MISTRUSTED passes, with its summary in ``system-out``. A ledger complaint is the
failure of a test case.

Markdown is for a pull request or a job summary: the verdict, what fails and why, then the table folded. It has at most
``LIMIT`` characters, because hosts refuse longer comments; what is left out is counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from xml.etree import ElementTree as ET

from oracle.errors import counted
from oracle.report.outcome import LOSS, LOSS_COLUMNS, Cause, Outcome, Report, causes, losses, printable
from oracle.verdict.compare import Status

LIMIT = 60_000
QUOTED = 600  # characters of one message in Markdown
_NOT_XML = re.compile(r"[\ufffe\uffff]")  # beside what is not printable


def to_json(report: Report) -> str:
    """The report as indented JSON; non-finite numbers are strings (see ``Verdict.to_json``)."""
    return json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n"


def to_junit(report: Report) -> str:
    """The report as JUnit XML: one suite for each contract, subject and arch."""
    root = ET.Element("testsuites", name="fp8-oracle")
    for group in report.groups():
        name = f"{group.contract} [{group.subject}, {group.arch}]"
        cases = [_test_case(outcome, name) for outcome in group.outcomes]
        _suite(root, name, cases, sum(outcome.seconds for outcome in group.outcomes))
    for suite, problems in (("known failures", report.complaints), ("record", report.gaps)):
        cases = []
        for number, problem in enumerate(problems):
            cases.append(ET.Element("testcase", classname=suite, name=f"entry {number}", time="0"))
            ET.SubElement(cases[-1], "failure", message=_clean(problem))
        if cases:
            _suite(root, suite, cases, 0.0)
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    root.set("time", f"{report.seconds:.3f}")
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(root: ET.Element, name: str, cases: list[ET.Element], seconds: float) -> None:
    suite = ET.SubElement(root, "testsuite", name=_clean(name), tests=str(len(cases)), time=f"{seconds:.3f}")
    for count, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(sum(case.find(tag) is not None for case in cases)))
    suite.extend(cases)


def _test_case(outcome: Outcome, classname: str) -> ET.Element:
    case = ET.Element("testcase", classname=_clean(classname), name=_clean(outcome.id), time=f"{outcome.seconds:.3f}")
    verdict = outcome.verdict
    summary = _clean(verdict.summary)
    if outcome.known is not None:
        ET.SubElement(case, "skipped", message=_clean(f"known failure: {outcome.known} | {summary}"))
    elif verdict.status.is_failure:
        kind = "failure" if verdict.status is Status.FAILED else "error"
        lines = (*(f"at {frame}" for frame in verdict.frames), *verdict.because, outcome.repro)
        ET.SubElement(case, kind, message=summary).text = "\n".join(_clean(line) for line in lines)
    elif verdict.status in (Status.SKIPPED, Status.UNSUPPORTED):
        ET.SubElement(case, "skipped", message=_clean(f"{verdict.status}: {verdict.reason}"))
    else:
        ET.SubElement(case, "system-out").text = summary
    return case


def _clean(text: str) -> str:
    return _NOT_XML.sub("?", printable(text))


# --- Markdown -----------------------------------------------------------------------------------------------


def to_markdown(report: Report) -> str:
    """The report as GitHub-flavoured Markdown."""
    ranked = causes(report)
    sign, word = ("✅", "all as it must be") if report.ok else ("❌", "not as it must be")
    head = [f"### {sign} fp8-oracle: {word}", "", f"{report.words}; {report.seconds:.1f} s", ""]
    if report.unfinished:
        head += [f"**Interrupted: {counted(report.unfinished, 'case')} did not run.**", ""]
    head += [f"- **problem**: {one_line(problem)}" for problem in report.problems]
    for title, known in (("What fails", False), ("Known failures", True)):
        chosen = [cause for cause in ranked if (cause.known is not None) == known]
        if chosen:
            head += ["", f"#### {title}", ""]
            head += [text for cause in chosen for text in _cause(cause)]
    facts = ", ".join(f"{name} {value}" for name, value in sorted({**report.machine, **report.versions}.items()))
    fold = ("<details><summary>machine and versions</summary>", "", one_line(facts, longest=4000), "", "</details>", "")
    return printable(within([*head, "", *_table(report), "", *_losses(report), *fold]))


def _cause(cause: Cause) -> Iterator[str]:
    first = cause.outcomes[0]
    yield f"- **{one_line(cause.title)}**: {one_line(cause.where)}  "
    yield f"  why: {one_line(cause.why)}  "
    if cause.known is not None and cause.explained_by:
        yield f"  reproduced by: {one_line('; or '.join(cause.explained_by))}  "
    if first.verdict.total:
        yield f"  {one_line(first.verdict.summary)}  "
    if not cause.explained_by:
        yield from (f"  {one_line(why)}  " for why in first.verdict.because)
    for frame in first.verdict.frames:
        yield f"  at {code(frame)}  "
    if first.repro:
        yield f"  {code(first.repro)}"


def _table(report: Report) -> list[str]:
    rows = []
    for group in report.groups():
        detail = group.failing or group.others
        detail = f" ({detail})" if detail else ""
        margin = "" if group.margin is None else f"{group.margin:.3g}"
        cells = (group.contract, group.subject, group.arch, str(group.judged or ""), f"{group.word}{detail}", margin)
        rows.append("| " + " | ".join(map(one_line, cells)) + " |")
    head = ("| routine | subject | arch | cases | verdict | worst margin |", "|---|---|---|--:|---|--:|")
    text = f"<details><summary>{counted(len(rows), 'row')}: routine by subject and arch</summary>"
    return [text, "", *head, *rows, "", "</details>"]


def _losses(report: Report) -> list[str]:
    """The loss of quantisers, folded; nothing where there are none."""
    rows = ["| " + " | ".join(map(one_line, cells)) + " |" for cells in losses(report)]
    if not rows:
        return []
    head = ("| " + " | ".join(LOSS_COLUMNS) + " |", "|---|---|---|--:|--:|--:|--:|--:|")
    return [f"<details><summary>{LOSS}</summary>", "", *head, *rows, "", "</details>", ""]


def within(lines: list[str]) -> str:
    """As many lines as the limit allows; an open fold is closed."""
    if sum(len(line) + 1 for line in lines) <= LIMIT:
        return "\n".join(lines)
    fitting: list[str] = []
    length = 200
    for line in lines:
        length += len(line) + 1
        if length > LIMIT:
            break
        fitting.append(line)
    folds = sum(line.startswith("<details>") for line in fitting) - sum(line == "</details>" for line in fitting)
    left = counted(len(lines) - len(fitting), "more line")
    return "\n".join([*fitting, *["", "</details>"] * folds, "", f"({left} left out)", ""])


def code(text: str) -> str:
    """Text as code in a line of Markdown, whatever backticks it holds."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    apart = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{apart}{' '.join(text.splitlines())}{apart}{fence}"


def one_line(text: str, longest: int = QUOTED) -> str:
    """Text in one line, cut, with what Markdown would take for markup made harmless.

    A space of no width follows each @: a comment of a pull request notifies nobody whose name a message holds.
    """
    short = " ".join(text.split())
    short = short if len(short) <= longest else f"{short[:longest]}…"
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", short).replace("@", "@&#8203;")
