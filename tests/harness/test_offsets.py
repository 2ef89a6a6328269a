"""Calls beyond a limit of elements: a kernel whose offsets wrap is caught, a right one conforms."""

from __future__ import annotations

import pytest
import torch

from oracle.harness import offsets
from oracle.harness.report import LARGE
from oracle.harness.validation import validate
from tests.support.subjects import broken

GEMM = "fp8_gemm_nt"
QUANT = "per_token_group_quant_fp8"
CASE = [f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=33,n=64,k=256/family=randn/seed=1"]
WANTED = (LARGE,)


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of the broken subject, so that the test takes no gigabytes."""
    monkeypatch.setattr(offsets, "LIMIT", broken.OFFSET_LIMIT)


@pytest.mark.usefixtures("small_limit")
class TestWatch:
    """Rows on both sides of the limit and at the end."""

    def test_right(self) -> None:
        report = validate("tests.support.subjects.right:gemm", GEMM, case=CASE, require=WANTED, limit=60)
        assert report.conforms and report.watches()[LARGE] == (1, 0)

    def test_wrapping_offsets(self) -> None:
        plain = validate("tests.support.subjects.broken:wraps", GEMM, case=CASE, limit=60)
        assert plain.conforms and LARGE not in plain.watches()
        report = validate("tests.support.subjects.broken:wraps", GEMM, case=CASE, require=WANTED, limit=60)
        assert [f.watch for f in report.failures] == [LARGE]

    def test_quantiser(self) -> None:
        case = [f"{QUANT}/bf16-e4m3/1x128/m=31,k=256/family=randn/seed=1"]
        report = validate("kernels.quantize:per_token_group_quant_fp8", QUANT, case=case, require=WANTED, limit=60,
                          adapter="tests.support.subjects.right:adapt_quantiser")  # fmt: skip
        assert report.conforms and report.watches()[LARGE] == (1, 0)


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the memory says so and does not fail."""
    monkeypatch.setattr(offsets, "_memory", lambda device: 1 << 30)
    report = validate("tests.support.subjects.right:gemm", GEMM, case=CASE, require=WANTED, limit=60)
    assert report.conforms and any("not tried" in note and "GiB are free" in note for note in report.notes)


def test_rows_next_to_every_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each multiple of the limit lies in or between judged rows."""
    monkeypatch.setattr(offsets, "LIMIT", 1000)
    rows = offsets._rows(70, {48, 7})
    assert {20, 19, 21, 62, 0, 69} <= set(rows.tolist()) and rows.max() == 69


def test_no_power_of_two_is_a_multiple_of_the_period() -> None:
    """Else an offset that wraps would land on the same data."""
    for rows in range(3, 200):
        period = min(offsets.PERIOD, rows - 1) | 1
        assert 3 <= period <= rows and all(2**e % period for e in range(40))
    assert torch.iinfo(torch.int32).max + 1 == offsets.LIMIT
