"""An option that declares what a kernel does is no demand on a kernel that has no parameter for it."""

from __future__ import annotations

import pytest

from oracle.harness.validation import validate
from oracle.verdict.compare import Status
from tests.support.subjects import declaring

CASE = "cutlass_moe_fp8/bf16xe4m3-bf16/tensor:tensor/t=4,e=3,h=64,i=32,k=3/first=2,combine=STORED/family=randn/seed=1"


@pytest.mark.usefixtures("in_process", "unexplained")
@pytest.mark.parametrize(
    ("kernel", "status"),
    [("without_the_parameter", Status.PASSED), ("with_the_parameter", Status.FAILED)],
)
def test_combine(kernel: str, status: Status) -> None:
    """Under None both ways are right. Negative: a kernel that takes the option and computes the other way."""
    report = validate(f"{declaring.__name__}:{kernel}", declaring.CONTRACT, case=CASE, arch="cpu")
    numbers = [finding.verdict.status for finding in report.findings if finding.watch == "numbers"]
    assert numbers and set(numbers) == {status}
