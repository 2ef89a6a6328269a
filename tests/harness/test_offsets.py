"""Calls beyond a limit of elements: a kernel whose offsets wrap is caught, a right one conforms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oracle.harness import offsets
from oracle.harness.report import LARGE
from oracle.harness.session import Answer, failed
from oracle.harness.validation import validate
from oracle.harness.watches import Calls
from oracle.routines import get
from tests.support.subjects import broken

pytestmark = pytest.mark.turns(4)

GEMM = "fp8_gemm_nt"
E4M3 = torch.float8_e4m3fn
QUANT = "per_token_group_quant_fp8"
CASE = [f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=33,n=64,k=256/family=randn/seed=1"]
WANTED = (LARGE,)


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of the broken subject, so that the test takes no gigabytes."""
    monkeypatch.setattr(offsets, "LIMIT", broken.OFFSET_LIMIT)


@pytest.mark.usefixtures("small_limit", "in_process")
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
        report = validate(
            "kernels.quantize:per_token_group_quant_fp8",
            QUANT,
            case=case,
            require=WANTED,
            limit=60,
            adapter="tests.support.subjects.right:adapt_quantiser",
        )
        assert report.conforms and report.watches()[LARGE] == (1, 0)


@pytest.mark.usefixtures("in_process")
def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the memory says so and does not fail."""
    monkeypatch.setattr(offsets, "_memory", lambda device: 1 << 30)
    report = validate("tests.support.subjects.right:gemm", GEMM, case=CASE, require=WANTED, limit=60)
    assert report.conforms and any("not tried" in note and "GiB are free" in note for note in report.notes)


def test_rows_next_to_every_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: element 1000 of 48 columns is in row 20, 2000 in 41, 3000 in 62; 70 rows of 7 columns reach none."""
    monkeypatch.setattr(offsets, "LIMIT", 1000)
    wanted = [*range(4), *range(16, 24), *range(37, 45), *range(58, 66), *range(66, 70)]
    assert offsets._rows(70, {48, 7}).tolist() == wanted
    assert offsets._rows(70, {7}).tolist() == [0, 1, 2, 3, 66, 67, 68, 69]


class Recorder:
    """In place of a session: keeps the large call and answers that the kernel refused it."""

    device = "cpu"

    def __init__(self) -> None:
        self.contract, self.inputs = get(GEMM), dict[str, Tensor]()

    def takes(self, case: str, **extents: int) -> bool:
        return True

    def call(self, inputs: dict[str, Tensor], options: object) -> Answer:
        self.inputs = inputs
        return Answer(problem=failed("recorded"))


@pytest.mark.parametrize("rows", [3, 4, 5, 32, 33, 61, 62, 63, 64, 100])
def test_no_power_of_two_is_a_multiple_of_the_period(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A row that many rows away has other data: seen in the operand itself, whose scales name the row repeated."""
    monkeypatch.setattr(offsets, "LIMIT", 128 * 300)
    monkeypatch.setattr(offsets, "_memory", lambda device: 1 << 40)
    codes = (torch.arange(rows * 128) % 120).to(torch.uint8).view(rows, 128)
    scale, weight = torch.arange(1.0, rows + 1)[:, None], torch.zeros(16, 128, dtype=torch.uint8)
    inputs = {"a": codes.view(E4M3), "b": weight.view(E4M3), "a_scale": scale, "b_scale": torch.ones(1, 1)}
    session = Recorder()
    calls = Calls(session, "case")  # type: ignore[arg-type]
    assert len(list(offsets.large_offsets(calls, inputs, {}, scheme="1x128"))) == 1
    source = session.inputs["a_scale"][:, 0].long() - 1
    assert torch.equal(session.inputs["a"].view(torch.uint8), codes[source])
    assert source.numel() > 300 + 61 and len(source.unique()) >= min(3, rows)
    for step in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        assert bool((source[step:] != source[:-step]).all()), step


def test_the_limit_is_what_32_bits_with_a_sign_hold() -> None:
    assert torch.iinfo(torch.int32).max + 1 == offsets.LIMIT == 2_147_483_648
