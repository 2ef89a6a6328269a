"""A contract whose outputs depend on the call: a kernel returns those of the call, in any of the documented forms."""

from __future__ import annotations

import pytest

from oracle.harness.validation import validate

NAME = "scaled_int8_quant"
KERNEL, FORMS = f"tests.support.subjects.references:{NAME}", "tests.support.subjects.returned"
CASES = {  # the outputs that each has
    f"{NAME}/bf16/-/m=7,k=96/family=randn/seed=1": ("q", "scale"),
    f"{NAME}/bf16/-/m=7,k=96/mode=row/family=randn/seed=1": ("q", "scale", "azp"),
    f"{NAME}/bf16/-/m=7,k=96/mode=static/family=randn/seed=1": ("q",),
}
pytestmark = pytest.mark.usefixtures("in_process", "unexplained")


@pytest.mark.parametrize("form", ["as_dict", "as_tuple", "with_none"])
@pytest.mark.parametrize("case", CASES)
def test_the_outputs_of_the_call(case: str, form: str) -> None:
    report = validate(KERNEL, NAME, adapter=f"{FORMS}:{form}", case=case, limit=60)
    assert report.conforms or report.untested, [finding.verdict.summary for finding in report.findings]
    assert not any(finding.fails for finding in report.findings)


@pytest.mark.parametrize("case", [case for case, outputs in CASES.items() if len(outputs) > 1])
def test_one_output_less_is_refused(case: str) -> None:
    report = validate(KERNEL, NAME, adapter=f"{FORMS}:one_less", case=case, limit=60)
    assert not report.conforms and any(finding.fails for finding in report.findings)
