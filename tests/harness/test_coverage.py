"""The coverage table is computed, and the README shows what is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import Cli

from kernels.platform import Machine, use_machine
from oracle.errors import FixtureError
from oracle.harness import coverage
from oracle.routines import registered
from oracle.routines.table import ROUTINES, Routine


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


@pytest.fixture
def a_cpu() -> Iterator[None]:
    """A CPU with the pinned torch, of which the README speaks: an older torch lacks the row-wise product."""
    with use_machine(Machine.described("cpu")):
        yield


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

    def test_a_routine_without_a_contract_shows(self, fixtures_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One more sabotaged twin: exposed and run, but nobody judges it and nothing of it is stored."""
        monkeypatch.setattr(coverage, "ROUTINES", (Routine("no_such_routine", "GEMM"),))
        assert row("no_such_routine", [Stand("no_such_routine")], fixtures_folder).missing == "RDG"

    @pytest.mark.usefixtures("a_cpu")
    def test_no_leg_is_missing_but_hardware(self, cli: Cli) -> None:
        """Every routine is exposed, judged, tried on this machine and stored."""
        block = cli("list", "--coverage", "--markdown").out
        rows = [line.split("|")[1:-1] for line in block.splitlines() if line.startswith("| `")]
        assert len(rows) == len(ROUTINES)
        assert not [cells[0] for cells in rows if not all(cell.strip() for cell in cells[:5])]

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

    @pytest.mark.usefixtures("a_cpu")
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
