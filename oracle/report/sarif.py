"""What fails, at the line of the kernel: SARIF 2.1.0 for code scanning, and the annotations of GitHub Actions.

Both have one entry for each cause (:func:`oracle.report.outcome.causes`), not one for each case: hosts show a few
entries only. A cause stands at ``Outcome.source`` of its first outcome.

SARIF: FAILED, CRASHED and UNTESTED are rules; a known failure is a result with a suppression. Code hosts refuse results
without a file, so a cause without one, a complaint of the ledger and cases that did not run are notifications of the
run. A file with an absolute path lies outside of the repository; its result is written with a ``file:`` address, its
annotation without a file.

Source: OASIS, Static Analysis Results Interchange Format 2.1.0; GitHub, workflow commands.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import PurePosixPath
from urllib.parse import quote

from oracle.errors import counted
from oracle.report.outcome import Cause, Report, causes, printable
from oracle.verdict.compare import Status

VERSION = "2.1.0"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ANNOTATIONS = 10  # that GitHub shows of one step
LONGEST = 1000  # characters of a message
RULES = {
    Status.FAILED: ("wrong-result", "An output is outside what its contract admits."),
    Status.CRASHED: ("no-result", "The kernel crashed, hung, raised, or returned what cannot be judged."),
    Status.UNTESTED: ("untested", "No subject and no capture exercises the routine, or too little could be tried."),
}


def to_sarif(report: Report) -> str:
    """The failures of a report as a SARIF log of one run."""
    groups = causes(report)
    order = list(RULES)
    rules = [
        {"id": name, "shortDescription": {"text": description}, "defaultConfiguration": {"level": "error"}}
        for name, description in RULES.values()
    ]
    results = [_result(cause, order.index(cause.status)) for cause in groups if cause.outcomes[0].source]
    messages = [_message(cause) for cause in groups if not cause.outcomes[0].source and cause.known is None]
    messages += _of_the_run(report)
    invocation: dict[str, object] = {"executionSuccessful": not report.unfinished}
    if report.started:
        invocation["startTimeUtc"] = report.started.replace("+00:00", "Z")
    if messages:
        invocation["toolExecutionNotifications"] = [{"level": "error", "message": {"text": text}} for text in messages]
    version = report.versions.get("fp8-oracle", "0")
    run = {
        "tool": {"driver": {"name": "fp8-oracle", "semanticVersion": version, "rules": rules}},
        "originalUriBaseIds": {"%SRCROOT%": {"description": {"text": "The root of the repository."}}},
        "invocations": [invocation],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return json.dumps({"$schema": SCHEMA, "version": VERSION, "runs": [run]}, indent=2) + "\n"


def to_annotations(report: Report) -> str:
    """The failures of a report as workflow commands, which GitHub shows at the line of the kernel in a pull request.

    Known failures are left out. At most ``ANNOTATIONS`` lines; the last one counts what is left out.
    """
    messages = [(_message(cause), cause) for cause in causes(report) if cause.known is None]
    lines = [_command(f"{cause.word}: {cause.title}", text, cause.outcomes[0].source) for text, cause in messages]
    lines += [_command("fp8-oracle", text) for text in _of_the_run(report)]
    if not report.outcomes:
        lines.append(_command("fp8-oracle", "nothing was judged"))
    if len(lines) > ANNOTATIONS:
        left = len(lines) - ANNOTATIONS + 1
        lines[ANNOTATIONS - 1 :] = [_command("fp8-oracle", f"{left} more; the summary of the job has all")]
    return "".join(f"{line}\n" for line in lines)


def _of_the_run(report: Report) -> Iterator[str]:
    """What is wrong with no kernel in particular."""
    yield from map(printable, report.problems)
    if report.unfinished:
        yield f"interrupted: {counted(report.unfinished, 'case')} did not run"


def _result(cause: Cause, rule: int) -> dict[str, object]:
    first = cause.outcomes[0]
    file, _, line = first.source.rpartition(":")
    artifact = {"uri": quote(file), "uriBaseId": "%SRCROOT%"}
    if PurePosixPath(file).is_absolute():
        artifact = {"uri": f"file://{quote(file)}"}
    place = {"artifactLocation": artifact, "region": {"startLine": int(line)}}
    named = {"fullyQualifiedName": printable(first.subject), "kind": "function"}
    same = hashlib.sha256("\0".join((first.contract, first.subject, first.arch, first.status)).encode()).hexdigest()
    suppressions = [] if cause.known is None else [{"kind": "external", "justification": printable(cause.known)}]
    return {
        "ruleId": RULES[cause.status][0],
        "ruleIndex": rule,
        "level": "error",
        "message": {"text": _message(cause)},
        "locations": [{"physicalLocation": place, "logicalLocations": [named]}],
        "partialFingerprints": {"fp8OracleCause/v1": same},
        "occurrenceCount": len(cause.outcomes),
        "suppressions": suppressions,
    }


def _message(cause: Cause) -> str:
    """Where, why, the first verdict, where it was raised, and its command, a line each."""
    first = cause.outcomes[0]
    texts = (cause.where, cause.why, first.verdict.summary if first.verdict.total else "")
    lines = [text if len(text) <= LONGEST else f"{text[:LONGEST]}…" for text in map(printable, texts) if text]
    lines += map(printable, first.verdict.frames)
    return "\n".join([*lines, *([f"repro: {printable(first.repro)}"] if first.repro else [])])


def _command(title: str, text: str, source: str = "") -> str:
    """One workflow command; what it would take for syntax is escaped."""
    file, _, line = source.rpartition(":")
    fields = {"title": printable(title)}
    if file and not PurePosixPath(file).is_absolute():
        fields = {"file": file, "line": line, **fields}
    escaped = (f"{name}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}" for name, value in fields.items())
    return f"::error {','.join(escaped)}::{_escaped(text)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
