"""The coverage table is computed, and the README shows what is computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import Cli

from oracle import coverage
from oracle.contracts import registered
from oracle.errors import FixtureError
from oracle.routines import ROUTINES


@dataclass(frozen=True)
class Stand:
    """A subject that can run, or says why not."""

    contract: str
    reason: str | None = None
    name: str = "stand-in"
    arch: str = "cpu"
    numerics: str | None = None
    device: str = "cpu"

    def why_not(self) -> str | None:
        return self.reason

    def run(self, inputs: object, options: object) -> object:
        raise NotImplementedError


def row(name: str, subjects: list[Stand], folder: Path, exposes: bool = True) -> coverage.Row:
    rows = coverage.rows(subjects, folder, lambda attribute: exposes)  # type: ignore[arg-type]  # run is never called
    return next(r for r in rows if r.routine.name == name)


class TestLegs:
    """A leg counts when it is there: exposed, judged, tried, stored, captured."""

    def test_all(self, fixtures_folder: Path) -> None:
        found = row("fp8_gemm_nt", [Stand("fp8_gemm_nt")], fixtures_folder)
        assert found.cells()[:3] == ("yes", "yes", "cpu")
        assert found.goldens > 1 and found.captured == ("sm90",) and found.missing == ""

    def test_each_missing_leg_shows(self, fixtures_folder: Path) -> None:
        """The sabotaged twins: no subject, one that cannot run, nothing exposed, no contract."""
        assert row("fp8_gemm_nt", [], fixtures_folder).missing == "D"
        assert row("fp8_gemm_nt", [Stand("fp8_gemm_nt", "no GPU")], fixtures_folder).missing == "D"
        assert row("fp8_gemm_nt", [Stand("fp8_gemm_nt")], fixtures_folder, exposes=False).missing == "P"
        assert "RDG" in row("get_num_sms", [Stand("get_num_sms")], fixtures_folder).missing

    def test_every_contract_is_in_the_table(self) -> None:
        assert set(registered()) <= {routine.judged_as for routine in ROUTINES}

    def test_no_routine_twice(self) -> None:
        assert len({routine.name for routine in ROUTINES}) == len(ROUTINES)


class TestCommand:
    """``fp8-oracle list --coverage``."""

    def test_table(self, cli: Cli) -> None:
        ran = cli("list", "--coverage")
        assert ran.status == 0, ran.err
        assert "fp8_gemm_nt" in ran.out and "Platform decisions" in ran.out

    def test_markdown_is_only_for_the_table(self, cli: Cli) -> None:
        ran = cli("list", "--markdown")
        assert (ran.status, "--coverage" in ran.err) == (2, True)


class TestReadme:
    """The block between the markers is what the command computes now; run it when this fails."""

    def test_the_block_is_true(self, cli: Cli, root: Path) -> None:
        text = (root / "README.md").read_text()
        block = cli("list", "--coverage", "--markdown").out
        assert coverage.placed(text, block, root / "README.md") == text, (
            "run `fp8-oracle list --coverage --update README.md`"
        )

    def test_update(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "page.md"
        path.write_text(f"before\n{coverage.BEGIN}\nstale\n{coverage.END}\nafter\n")
        assert "written" in cli("list", "--coverage", "--update", path).out
        text = path.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "stale" not in text
        assert "as it was" in cli("list", "--coverage", "--update", path).out

    @pytest.mark.parametrize("text", ["", coverage.BEGIN, f"{coverage.END}{coverage.BEGIN}",
                                      f"{coverage.BEGIN}{coverage.END}" * 2])  # fmt: skip
    def test_markers_are_needed(self, text: str) -> None:
        with pytest.raises(FixtureError, match="coverage:begin"):
            coverage.placed(text, "x", Path("page.md"))
