"""The coverage table is computed, and the page of coverage shows what is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import kernels
from kernels.platform import Machine, use_machine
from oracle.errors import FixtureError
from oracle.harness import coverage
from oracle.routines import registered
from tests.support.commandline import Cli

# Exported without a contract of its own: why.
NOT_IN_THE_LAYER = {name for name, contract in registered().items() if not contract.dispatched}
"""What says of itself that the layer does not dispatch it: judged by captures and beside its libraries."""
INVERSE = "the inverse of an order of weights, compared in tests/kernels/test_blackwell_layouts.py"

NOT_ROUTINES = {
    "FlashinferMoeBackend": "an enumeration",
    "NAMESPACE": "a name",
    "get_mk_alignment_for_contiguous_layout": "a constant of a library, compared in tests/kernels/test_grouped.py",
    "deepgemm_blockscale_linear": "one branch of dynamic_flashinfer_deepgemm_blockscale_gemm, which is judged",
    "few_rows_blockscale_linear": "the other branch",
    "prepare_fp8_gemm_nt": "bits compared with fp8_gemm_nt in tests/kernels/test_blockscaled.py",
    "prepare_blockscale_linear": "bits compared with dynamic_flashinfer_deepgemm_blockscale_gemm there",
    "explain": "the decisions of a layer, in words",
    **dict.fromkeys(("warm_up", "rows_to_warm_up", "compilations"), "calls others; tests/kernels/test_warming.py"),
    "trace": "counts of calls, compared in tests/kernels/test_nn_loading.py",
    "moe_per_token": "compared with float64 in tests/kernels/test_moe.py",
    "route_by_method": "judged inside trtllm_fp8_block_scale_moe and its per-tensor twin",
    "route_llama4": "judged as moe_routing",
    "route_softmax": "judged as moe_routing",
    "restore_rows_of_gated_act_gemm": INVERSE,
    "unrotate_weights_of_fi_trtllm_fp8_per_tensor_moe": INVERSE,
    "unshuffle_matrix_a": INVERSE,
    "unshuffle_matrix_sf_a": INVERSE,
}


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
    """A CPU with the pinned torch, of which the page speaks: an older torch lacks the row-wise product."""
    with use_machine(Machine.described("cpu")):
        yield


def row(name: str, subjects: list[Stand], folder: Path, exposes: bool = True) -> coverage.Row:
    rows = coverage.rows(subjects, folder, lambda attribute: exposes)  # type: ignore[arg-type]  # run is never called
    return next(r for r in rows if r.routine.name == name)


class TestLegs:
    """A leg counts when it is there: exposed, judged, tried, stored, captured."""

    def test_all(self, fixtures_folder: Path) -> None:
        found = row("fp8_gemm_nt", [Stand("fp8_gemm_nt")], fixtures_folder)
        assert found.cells()[:2] == ("yes", "cpu")
        assert found.goldens > 1 and found.captured == ("sm90",) and found.missing == ""

    def test_each_missing_leg_shows(self, fixtures_folder: Path) -> None:
        """The negative tests: no subject, one that cannot run, nothing exposed."""
        assert row("fp8_gemm_nt", [], fixtures_folder).missing == "D"
        assert row("fp8_gemm_nt", [Stand("fp8_gemm_nt", "no GPU")], fixtures_folder).missing == "D"
        assert row("fp8_gemm_nt", [Stand("fp8_gemm_nt")], fixtures_folder, exposes=False).missing == "P"

    @pytest.mark.usefixtures("a_cpu")
    def test_no_leg_is_missing_but_hardware(self, cli: Cli) -> None:
        """Every routine is exposed, judged, tried on this machine and stored."""
        block = cli("list", "--coverage", "--markdown").out
        rows = [line.split("|")[1:-1] for line in block.splitlines() if line.startswith("| `")]
        assert len(rows) == len(coverage.routines())
        missing = {cells[0].strip(" `") for cells in rows if not all(cell.strip() for cell in cells[:4])}
        assert missing == NOT_IN_THE_LAYER
        assert all(cells[3].strip() for cells in rows)

    def test_every_contract_is_in_the_table_once(self) -> None:
        names = [routine.name for routine in coverage.routines()]
        assert len(set(names)) == len(names)
        assert set(registered()) <= set(names)

    def test_every_production_routine_is_judged(self) -> None:
        """What the production package exports and computes with tensors has a contract; the rest is named here."""
        assert unjudged(kernels.__all__) == set(NOT_ROUTINES)

    def test_a_routine_without_a_contract_is_found(self) -> None:
        assert "fp8_gemm_xx" in unjudged([*kernels.__all__, "fp8_gemm_xx"])


def unjudged(exported: Iterable[str]) -> set[str]:
    """Exported names that no row of the table computes."""
    rows = coverage.routines()
    computed = {(r.contract.production or r.name).rpartition(".")[2] for r in rows} | {r.name for r in rows}
    return set(exported) - computed


class TestCommand:
    """``fp8-oracle list --coverage``."""

    def test_table(self, cli: Cli) -> None:
        ran = cli("list", "--coverage")
        assert ran.status == 0, ran.err
        assert "fp8_gemm_nt" in ran.out and "Platform decisions" in ran.out
        header = next(line for line in ran.out.splitlines() if "routine" in line)
        assert "".join(x.strip() for x in header.split("┃")[3:-2]) == coverage.LEGS

    def test_markdown_is_only_for_the_table(self, cli: Cli) -> None:
        ran = cli("list", "--markdown")
        assert (ran.status, "--coverage" in ran.err) == (2, True)


class TestPage:
    """The block between the markers is what the command computes now; run it when this fails."""

    @pytest.mark.usefixtures("a_cpu")
    def test_the_block_is_true(self, cli: Cli, root: Path) -> None:
        page = root / "docs" / "reference" / "coverage.md"
        block = cli("list", "--coverage", "--markdown").out
        assert coverage.placed(page.read_text(), block, page) == page.read_text(), (
            "run `fp8-oracle list --coverage --update docs/reference/coverage.md`"
        )

    def test_update(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "page.md"
        path.write_text(f"before\n{coverage.BEGIN}\nstale\n{coverage.END}\nafter\n")
        assert "written" in cli("list", "--coverage", "--update", path).out
        text = path.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "stale" not in text
        assert "as it was" in cli("list", "--coverage", "--update", path).out

    @pytest.mark.parametrize(
        "text", ["", coverage.BEGIN, f"{coverage.END}{coverage.BEGIN}", f"{coverage.BEGIN}{coverage.END}" * 2]
    )
    def test_markers_are_needed(self, text: str) -> None:
        with pytest.raises(FixtureError, match="coverage:begin"):
            coverage.placed(text, "x", Path("page.md"))
