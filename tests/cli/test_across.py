"""``fp8-oracle across``: its tables, its JSON and its page say the same, and what cannot be compared says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oracle.diagnosis.across import Judged, Pair, Step
from oracle.harness.across import ARCHES, chosen, tasks
from oracle.report.across import Row, share
from oracle.routines import registered
from tests.support.commandline import Cli
from tests.support.paths import FIXTURES

CASE = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=33,n=256,k=384/family=randn/seed=1"


def test_a_case(cli: Cli, tmp_path: Path) -> None:
    """One case on two arches, as a table, JSON and a page that loads nothing."""
    ran = cli("across", "--arches", "sm90,sm100", "--case", CASE, "--json", tmp_path / "a", "--html", tmp_path / "b")
    assert (ran.status, ran.err) == (0, "")
    assert "sm90 to sm100" in ran.out and "alignment bits 100%" in ran.out.replace("\n", " ")
    record = json.loads((tmp_path / "a").read_text())
    assert record["schema"] == "fp8-oracle.across/1" and record["arches"] == ["sm90", "sm100"]
    plain, powers = record["compared"]
    (pair,) = plain["pairs"]
    assert pair["elements"] == 33 * 256 and 0 < pair["equal"] < pair["elements"]
    assert [step["alone"] for step in pair["steps"]] == [pair["elements"] - pair["equal"]]
    assert [judged["passes"] for judged in pair["accepted"]] == [False, True]
    assert [side["numerics"] for side in powers["sides"]] == ["sm90.promote128", "sm100.chain_ue8m0"]
    page = (tmp_path / "b").read_text()
    assert "alignment bits: 13 (result 13) to 25 (result 23)" in page
    assert "https://" not in page and "src=" not in page


def test_what_cannot_be_compared(cli: Cli) -> None:
    """A layer, and a routine with one right result on every arch, have a line each."""
    ran = cli("across", "--arches", "sm90,sm100", "--contract", "deep_gemm_moe", "--fixtures", "none")
    assert ran.status == 0 and "UNSUPPORTED sm90: 1 routine: no schedule alone gives the bits" in ran.out
    ran = cli("across", "--arches", "sm80,sm90", "--contract", "per_token_group_quant_fp8", "--fixtures", "none")
    assert ran.status == 0
    assert "one right result on sm80, sm90, by the same recipes: 1 quantisers: per_token_group_quant_fp8" in ran.out


@pytest.mark.parametrize(
    ("arches", "said"),
    [("sm90,sm91", "no model for arch 'sm91'"), ("sm90", "name two or more"), ("sm90,sm90", "each once")],
)
def test_arches(cli: Cli, arches: str, said: str) -> None:
    ran = cli("across", "--arches", arches, "--case", CASE)
    assert ran.status == 2 and said in ran.err


def test_every_routine_is_compared_or_says_why() -> None:
    """No routine with a case is left out by default, and captures are replayed where there are any."""
    wanted = tasks(ARCHES, contract=None, profile=None, case=None, folder=FIXTURES)
    assert {task.contract for task in wanted} == {name for name in registered() if chosen(name)}
    assert sum(bool(task.captures) for task in wanted) > 30
    assert all(len(chosen(name)) <= 20 for name in registered())


def test_rows_add_up() -> None:
    """A share is 100% only where it is all; an output that does not pass is not counted as one that does."""
    assert [share(*x) for x in ((0, 5), (5, 5), (9999, 10000), (1, 100000), (0, 0))] == [
        "0%", "100%", "99.9%", "0.1%", "100%",
    ]  # fmt: skip  # one list
    failed, passed = Judged("FAILED", False, 1, "bound"), Judged("PASSED", True, 0, "bits")
    step = Step("alignment bits", "13 to 25", 3, 4)
    pair = Pair("sm90", "sm100", 10, 6, 2.0, (0.5, 4.0), (step,), (failed, passed))
    row = Row.of("two", [pair, pair])
    assert row.cells() == ("2", "60.0%", "2", "0.5 | 4", "alignment bits 75.0%", "0 of 2", "2 of 2")
