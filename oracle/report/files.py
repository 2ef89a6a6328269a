"""A report as JSON (schema ``fp8-oracle.report/1``) and as JUnit XML.

JUnit: FAILED is a ``failure``; CRASHED and UNTESTED are an ``error``; SKIPPED, UNSUPPORTED and known failures are
``skipped`` with their reason; MISTRUSTED passes and says so in ``system-out``. Ledger complaints are failures of a
test case of their own.
"""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

from oracle.report.outcome import Outcome, Report
from oracle.verdict.compare import Status

_CONTROL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_json(report: Report) -> str:
    """The report as indented JSON; non-finite numbers are strings (see ``Verdict.to_json``)."""
    return json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n"


def to_junit(report: Report) -> str:
    """The report as JUnit XML: one suite for each contract, subject and arch."""
    root = ET.Element("testsuites", name="fp8-oracle verify")
    for group in report.groups():
        name = f"{group.contract} [{group.subject}, {group.arch}]"
        cases = [_test_case(outcome, name) for outcome in group.outcomes]
        _suite(root, name, cases, sum(outcome.seconds for outcome in group.outcomes))
    complaints = []
    for number, complaint in enumerate(report.complaints):
        case = ET.Element("testcase", classname="known failures", name=f"entry {number}", time="0")
        ET.SubElement(case, "failure", message=_clean(complaint))
        complaints.append(case)
    if complaints:
        _suite(root, "known failures", complaints, 0.0)
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
    said = _clean(verdict.summary)
    if outcome.known is not None:
        ET.SubElement(case, "skipped", message=_clean(f"known failure: {outcome.known} | {said}"))
    elif verdict.status is Status.FAILED:
        ET.SubElement(case, "failure", message=said).text = _clean(outcome.repro)
    elif verdict.status.is_failure:
        ET.SubElement(case, "error", message=said).text = _clean(outcome.repro)
    elif verdict.status in (Status.SKIPPED, Status.UNSUPPORTED):
        ET.SubElement(case, "skipped", message=_clean(f"{verdict.status}: {verdict.reason}"))
    else:
        ET.SubElement(case, "system-out").text = said
    return case


def _clean(text: str) -> str:
    return _CONTROL.sub("?", text)
