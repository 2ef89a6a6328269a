"""The matrix of cells: what each leaves behind, what the page says of differences, and what it must not hide."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from oracle.fixtures import files
from oracle.harness import provenance
from oracle.harness.runner import Item
from oracle.report import record
from oracle.report.outcome import Outcome
from oracle.report.record import Run
from oracle.routines import base, registered
from oracle.verdict.compare import Status, Verdict
from tests.support import matrix, matrix_page
from tests.support.matrix import CELLS, Cell, CellRecord, in_part

CONTRACT = "fp8_gemm_nt"
KEY = f"{1:032x}"
OLD, PIN, NEW = (Cell("3.11", torch, "emulated") for torch in ("2.9", "2.13", "2.15"))


def outcome(case: str, *, status: Status = Status.PASSED, said: str = "all as predicted") -> Outcome:
    return Outcome(case, CONTRACT, "sm90.promote128", "sm90", Verdict(status, said, total=2048))


def bits() -> Tensor:
    return torch.arange(2048, dtype=torch.int16).reshape(32, 64)


def left(
    folder: Path,
    cell: Cell,
    outcomes: Mapping[str, tuple[Outcome, Tensor]],
    *,
    tests: Mapping[str, Any] | None = None,
    facts: Mapping[str, str] | None = None,
    planned: int | None = None,
) -> None:
    """The record of a cell, as the commands of a cell write it."""
    here = folder / str(cell)
    here.mkdir(parents=True)
    machine = {"python": f"{cell.python}.1", "torch": f"{cell.torch}.1"}
    run = Run("", machine, {"fp8-oracle": "0+same", **(facts or {})}, {}, len(outcomes) if planned is None else planned)
    recorder = record.start(here / "run.jsonl", run, resume=False)
    for key, (each, _) in outcomes.items():
        recorder.append(key, each)
    if planned is None:
        recorder.end((), 0.0, 0)
    else:
        recorder.stream.close()
    files.write_tensors(here / "bits.safetensors", {f"{key}/out": x for key, (_, x) in outcomes.items()})
    about = {
        "schema": matrix.TESTS,
        "seconds": 1.0,
        "status": 0,
        "files": {"tests/a.py": 3},
        "passed": {"tests/a.py": 3},
    }
    (here / "tests-1.json").write_text(json.dumps({**about, **(tests or {})}))


def cases(number: int = 3) -> dict[str, tuple[Outcome, Tensor]]:
    return {f"{i:032x}": (outcome(f"{CONTRACT}/case={i}"), bits()) for i in range(number)}


def merged(folder: Path, cells: tuple[Cell, ...] = (OLD, PIN, NEW)) -> matrix.Matrix:
    """The merge of these cells, all others left out."""
    return matrix.merge(record for record in matrix.load(folder) if record.cell in cells)


@pytest.fixture
def same(tmp_path: Path) -> Path:
    """Three cells that say the same."""
    for cell in (OLD, PIN, NEW):
        left(tmp_path, cell, cases())
    return tmp_path


@pytest.fixture
def differing(tmp_path: Path) -> Callable[..., matrix.Matrix]:
    """The merge of three cells, of which the one with torch 2.9 is as given."""

    def make(outcomes: Mapping[str, tuple[Outcome, Tensor]], **more: Any) -> matrix.Matrix:
        left(tmp_path, OLD, outcomes, **more)
        for cell in (PIN, NEW):
            left(tmp_path, cell, cases())
        return merged(tmp_path)

    return make


class TestCells:
    """One table says which cells there are."""

    def test_names(self) -> None:
        assert len({str(cell) for cell in CELLS}) == len(CELLS) == 4 * 3 * 4
        assert all(matrix.cell_of(str(cell)) == cell for cell in CELLS)

    def test_another_name_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no cell of the matrix"):
            matrix.cell_of("py311-torch28-cpu")

    def test_why_not(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The interpreter that runs this is there; one that no place has is not."""
        here = f"{sys.version_info[0]}.{sys.version_info[1]}"
        assert matrix.why_not(Cell(here, "2.13", "cpu")) is None
        for name in ("PATH", "PYENV_ROOT", "HOME"):
            monkeypatch.setenv(name, str(tmp_path))
        assert matrix.why_not(Cell("3.99", "2.13", "cpu")) == "no interpreter of Python 3.99 on this machine"

    def test_each_has_its_turn(self) -> None:
        turns = [matrix.next_cell(1000 + i, CELLS) for i in range(len(CELLS))]
        assert set(turns) == set(CELLS)
        assert len({cell.environment for cell in turns[8:20]}) == 12, "neighbours differ in Python and torch"

    def test_the_workflow_runs_them_all(self, root: Path) -> None:
        jobs = yaml.safe_load((root / ".github/workflows/matrix.yml").read_text())["jobs"]
        strategy = jobs["cell"]["strategy"]["matrix"]
        assert strategy["python"] == list(matrix.PYTHONS)
        assert strategy["torch"] == list(matrix.TORCHES)
        commands = "\n".join(step.get("run", "") for step in jobs["cell"]["steps"])
        assert 'tox run -e "py${PYTHON/./}-torch${TORCH/./}"' in commands, "the environment of all modes"

    def test_which_run_how_much(self, root: Path) -> None:
        """One environment as usual; each Python and each torch in another one that makes every fixture again."""
        assert f"\ntorch=={matrix.PINNED}." in (root / "constraints.txt").read_text()
        cpu = [cell for cell in CELLS if cell.mode == "cpu"]
        assert [cell.environment for cell in cpu if not cell.fewer] == ["py311-torch213"]
        checked = [cell for cell in cpu if matrix.FIXTURES_CHECK in cell.commands]
        assert {cell.python for cell in checked} == {*matrix.PYTHONS}
        assert {cell.torch for cell in checked} == {*matrix.TORCHES}

    def test_every_part_runs_with_each_python_and_each_torch(self) -> None:
        """One part a cell, but for the usual cell, which has all."""
        for part in (f"{i}/{matrix.PARTS}" for i in range(matrix.PARTS)):
            cells = [cell for cell in CELLS if cell.mode == "cpu" and (cell.usual or cell.part == part)]
            assert {cell.python for cell in cells} == {*matrix.PYTHONS}, part
            assert {cell.torch for cell in cells} == {*matrix.TORCHES}, part
            assert all(cell.usual or cell.fewer[2:] == ("--part", part) for cell in cells)
        assert {cell.part for cell in CELLS if cell.mode != "cpu" or cell.usual} == {"0/1"}

    @pytest.mark.parametrize("mode", matrix.MODES[1:])
    def test_marked_tests_are_where_their_mode_runs(self, mode: str, root: Path) -> None:
        """The mode cpu leaves them out."""
        (command,) = matrix.COMMANDS[mode]
        marked = [path for path in (root / "tests").rglob("test_*.py") if f"pytest.mark.{mode}\n" in path.read_text()]
        assert marked and mode in command and f"not {mode}" in matrix.COMMANDS["cpu"][-1][-1]
        assert all(any(path.is_relative_to(root / folder) for folder in command[-4:]) for path in marked)

    @pytest.mark.parametrize("status", [0, 3])
    @pytest.mark.parametrize("name", ["py312-torch29", "py311-torch29-emulated"])
    def test_run(self, name: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Samples first, then pytest into the folder of each cell; one command that fails fails the run."""
        samples: list[str] = []
        tests: list[tuple[str, list[str]]] = []

        def started(command: list[str], **_: Any) -> SimpleNamespace:
            samples.append(Path(command[-1]).name)
            return SimpleNamespace(wait=lambda: 0)

        def done(command: list[str], *, env: Mapping[str, str], **_: Any) -> SimpleNamespace:
            if command[0] == "pytest":
                tests.append((Path(env[matrix.VARIABLE]).name, command))
            return SimpleNamespace(returncode=status if "emulated" in env[matrix.VARIABLE] else 0)

        monkeypatch.setattr(matrix, "subprocess", SimpleNamespace(Popen=started, run=done))
        assert matrix.main(["run", name, "-x"]) == int(bool(status))
        assert samples == [cell for cell, _ in tests] == [str(cell) for cell in CELLS if str(cell).startswith(name)]
        assert all(tuple(words[-1 - len(few := matrix.cell_of(cell).fewer) :]) == (*few, "-x") for cell, words in tests)


class TestSample:
    """A sample of cases is judged, and the bits of every output are kept."""

    @pytest.fixture
    def sampled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Cell], CellRecord]:
        """The record of the schedules of one routine, in a process that passes for another torch."""
        machine = provenance.machine()
        monkeypatch.delenv("FP8_ORACLE_TURN", raising=False)
        monkeypatch.setattr("oracle.routines.registered", lambda: {CONTRACT: registered()[CONTRACT]})

        def run(cell: Cell) -> CellRecord:
            facts = machine | {"torch": f"{cell.torch}.0", "python": f"{cell.python}.0"}
            monkeypatch.setattr(provenance, "machine", lambda: facts)
            matrix.sample(tmp_path / str(cell))
            return replace(matrix._load(tmp_path / str(cell), cell), problems=())

        return run

    def test_every_item_is_in_one_of_the_turns(self) -> None:
        items = list(range(11))
        shares = [matrix.shared(items, str(turn)) for turn in range(1576, 1576 + matrix.SHARES)]
        assert sorted(sum(shares, [])) == items and max(map(len, shares)) == 3
        assert matrix.shared(items, "") == items

    def test_same_code_same_record(self, sampled: Callable[[Cell], CellRecord]) -> None:
        first, second = sampled(OLD), sampled(NEW)
        assert first.facts["torch"] != second.facts["torch"]
        assert {arch for _, arch, _, _ in first.outcomes} >= {"sm89", "sm90", "sm100", "sm120"}
        assert any(name.endswith(".low") for of in first.bits.values() for name in of)
        assert not matrix.merge([first, second]).differences

    def test_three_faults(self, sampled: Callable[[Cell], CellRecord], monkeypatch: pytest.MonkeyPatch) -> None:
        """A flipped bit, a changed verdict and a lost case, each on one arch in torch 2.9 alone: cell and cause."""
        good = [sampled(PIN), sampled(NEW)]
        contract = type(registered()[CONTRACT])
        predict, judge, emulated = contract.predict, base.Contract.judged, matrix.SAMPLES["emulated"]

        def flipped(self: base.Contract, inputs: Any, *, numerics: str | None, **options: Any) -> Any:
            out = predict(self, inputs, numerics=numerics, **options)
            if numerics == "sm90.promote128":
                out.view(torch.int16)[0, 3] ^= 1
            return out

        def judged(self: base.Contract, call: base.Call, output: Any, numerics: str | None = None) -> Verdict:
            found = judge(self, call, output, numerics)
            wrong = call.arch == "sm100"
            return replace(found, status=Status.FAILED, summary="1 element outside") if wrong else found

        def fewer(keep: matrix.Keep) -> list[Item]:
            items = emulated(keep)
            return [item for item in items if item is not next(each for each in items if each.arch == "sm120")]

        monkeypatch.setattr(contract, "predict", flipped)
        monkeypatch.setattr(base.Contract, "judged", judged)
        monkeypatch.setitem(matrix.SAMPLES, "emulated", fewer)  # type: ignore[arg-type]  # a dict
        found = matrix.merge([sampled(OLD), *good])
        of = {(one.kind, one.what.partition(" [")[0]): one for one in found.differences}
        wanted = {
            ("bits", f"{CONTRACT} on sm90"): "1 of 128 elements of out differ, the first at [0, 3]",
            ("verdict", f"{CONTRACT} on sm100"): "FAILED here, PASSED in 2 other cells",
            ("count", f"{CONTRACT} on sm120"): "2 cases here, 3 in 2 other cells",
        }
        for key, words in wanted.items():
            assert words in of[key].words
            assert of[key].cells == (OLD,)
            assert of[key].cause.startswith("Cause: the only cell with torch 2.9 (elsewhere 2.13, 2.15)")
            assert str(OLD) in str(of[key])
        assert not found.ok

    def test_what_the_oracle_raises_is_an_outcome(self, sampled: Callable[[Cell], CellRecord]) -> None:
        """On a torch that lacks an operation, one routine crashes and the others are judged."""

        def raises() -> Verdict:
            raise NotImplementedError('"index_cpu" not implemented')

        items = [Item("a/1", "a", "s", "cpu", raises), Item("b/1", "b", "s", "cpu", lambda: outcome("b/1").verdict)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(matrix.SAMPLES, "cpu", lambda keep: items)  # type: ignore[arg-type]  # a dict
            found = sampled(replace(OLD, mode="cpu"))
        assert [o.status for o in found.outcomes.values()] == [Status.CRASHED, Status.PASSED]
        assert "index_cpu" in found.failing[0].verdict.summary


class TestTestsAndSteps:
    """What pytest did, and how commands ended."""

    def test_plugin(self, tmp_path: Path, root: Path) -> None:
        folder = tmp_path / "record"
        (tmp_path / "conftest.py").write_text(
            "from pathlib import Path\nfrom tests.support.matrix import TestRecord\n"
            f"def pytest_configure(config): config.pluginmanager.register(TestRecord(Path({str(folder)!r})))\n"
        )
        (tmp_path / "test_a.py").write_text(
            "import pytest\n"
            "def test_good(): pass\n"
            "def test_bad(): assert 1 == 2, 'one is not two'\n"
            "@pytest.mark.skip(reason='no device')\ndef test_skipped(): pass\n"
            "@pytest.mark.xfail\ndef test_expected(): assert False\n"
            "def test_broken(missing): pass\n"
        )
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
        subprocess.run(command, cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, check=False)
        found = json.loads((folder / "tests-1.json").read_text())
        assert (found["status"], sum(found["files"].values()), sum(found["passed"].values())) == (1, 5, 1)
        reasons = {kind: [*found[kind].values()] for kind in ("failed", "error", "skipped", "xfailed")}
        assert "one is not two" in reasons["failed"][0]
        assert "missing" in reasons["error"][0]
        assert reasons["skipped"] == ["no device"]
        assert len(reasons["xfailed"]) == 1

    @pytest.mark.parametrize("status", [0, 3])
    def test_step(self, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(matrix.VARIABLE, str(tmp_path / str(NEW)))
        command = [sys.executable, "-c", f"print('the reason'); raise SystemExit({status})"]
        assert matrix.main(["step", *command]) == status
        problems = matrix._load(tmp_path / str(NEW), NEW).problems
        assert any("status 3: the reason" in problem for problem in problems) == bool(status)


class TestMerge:
    """Cells of one mode are compared; what is odd is named, and nothing is left out."""

    def test_same(self, same: Path) -> None:
        found = merged(same)
        assert found.ok
        assert not found.differences

    def test_one_bit(self, differing: Callable[..., matrix.Matrix]) -> None:
        x = bits()
        x[0, 3] ^= 1
        found = differing(cases() | {KEY: (outcome(f"{CONTRACT}/case=1"), x)})
        assert not found.ok
        assert [one.kind for one in found.differences] == ["bits"]
        said = str(found.differences[0])
        assert (
            f"{OLD}: {CONTRACT} on sm90 [sm90.promote128]: {CONTRACT}/case=1: other bits than 2 other cells: " in said
        )
        assert "1 of 2048 elements of out differ" in said
        assert "the first at [0, 3]: 0x0002, not 0x0003" in said
        assert "). Cause: the only cell with torch 2.9 (elsewhere 2.13, 2.15)." in said

    def test_verdict(self, differing: Callable[..., matrix.Matrix]) -> None:
        failing = outcome(f"{CONTRACT}/case=1", status=Status.FAILED, said="3 of 2048 elements outside")
        found = differing(cases() | {KEY: (failing, bits())})
        assert [one.kind for one in found.differences] == ["verdict"]
        assert "FAILED here, PASSED in 2 other cells" in str(found.differences[0])

    def test_count(self, differing: Callable[..., matrix.Matrix]) -> None:
        found = differing(cases(2))
        assert [one.kind for one in found.differences] == ["count"]
        assert f"2 cases here, 3 in 2 other cells: {CONTRACT}/case=2 [sm90.promote128] was not judged" in str(
            found.differences[0]
        )

    def test_a_routine_that_a_subject_does_not_serve_there(self, differing: Callable[..., matrix.Matrix]) -> None:
        """Its cases are not judged, for the reason that its one line gives."""
        reason = "row-wise scales need torch 2.12"
        line = Outcome(CONTRACT, CONTRACT, "sm90.promote128", "sm90", Verdict(Status.SKIPPED, reason, reason=reason))
        found = differing({KEY: (line, bits())})
        assert found.ok and [one.kind for one in found.admitted] == ["count"]
        assert all(f"skipped: {reason}" in one.words for one in found.admitted)

    @pytest.mark.parametrize(("mode", "admitted"), [("cpu", True), ("interpreter", True), ("emulated", False)])
    @pytest.mark.parametrize("matches", [None, "sm90.promote128"])
    def test_admitted(self, mode: str, admitted: bool, matches: str | None, tmp_path: Path) -> None:
        """Bits that differ where a kernel's outputs pass by a set, as sums in any order, are named and no fault."""
        verdict = Verdict(Status.PASSED, "all admissible", matches=matches)
        for cell, x in ((OLD, bits() + 1), (PIN, bits()), (NEW, bits())):
            left(tmp_path, replace(cell, mode=mode), {KEY: (replace(outcome("a/b"), verdict=verdict), x)})
        found = merged(tmp_path, tuple(replace(cell, mode=mode) for cell in (OLD, PIN, NEW)))
        assert [one.kind for one in found.differences] == ["bits"]
        assert found.ok == (admitted and matches is None)

    def test_failing_test(self, differing: Callable[..., matrix.Matrix]) -> None:
        found = differing(cases(), tests={"failed": {"tests/a.py::test_x": "assert nan == 448"}, "status": 1})
        assert "failed here, not in 2 other cells: assert nan == 448" in str(found.differences[0])
        assert not found.ok

    def test_fewer_tests(self, differing: Callable[..., matrix.Matrix]) -> None:
        found = differing(cases(), tests={"files": {"tests/a.py": 2}})
        assert "2 tests here, 3 in 2 other cells" in str(found.differences[0])

    @pytest.mark.parametrize(("most", "differs"), [(12, True), (4, False)])
    def test_fewer_instances(self, most: int, differs: bool, tmp_path: Path) -> None:
        """Tests are compared between cells that ran as many instances of each."""
        left(tmp_path, OLD, cases(), tests={"files": {"tests/a.py": 2}, "most": most})
        for cell in (PIN, NEW):
            left(tmp_path, cell, cases(), tests={"most": 12})
        found = merged(tmp_path)
        assert bool(found.differences) == differs
        assert f"at most {most} instances of a test" in matrix_page.counts(found.records[0])

    @pytest.mark.parametrize("missing", [False, True])
    def test_a_test_of_which_no_instance_ran(self, missing: bool, tmp_path: Path) -> None:
        """Whatever the numbers of instances are: a cell of few has another count, and yet one of each test."""
        few = {"a.py::test_x": 1} | ({} if missing else {"a.py::test_y": 1})
        left(tmp_path, OLD, cases(), tests={"files": {"a.py": len(few)}, "functions": few, "most": 1})
        for cell in (PIN, NEW):
            ran = {"files": {"a.py": 8}, "functions": {"a.py::test_x": 4, "a.py::test_y": 4}, "most": 4}
            left(tmp_path, cell, cases(), tests=ran)
        said = " ".join(str(one) for one in merged(tmp_path).wrong)
        assert (f"{OLD}: a.py::test_y: not run here, run in 2 other cells" in said) == bool(said) == missing

    @pytest.mark.parametrize("part", ["0/3", "1/3", "2/3"])
    def test_a_test_of_another_part_is_not_missed(self, part: str, tmp_path: Path) -> None:
        """Of the part that a cell has it is."""
        left(tmp_path, OLD, cases(), tests={"files": {}, "functions": {}, "part": part})
        for cell in (PIN, NEW):
            left(tmp_path, cell, cases(), tests={"files": {"a.py": 1}, "functions": {"a.py::test_x": 1}})
        assert bool(merged(tmp_path).wrong) == in_part("a.py::test_x", part)

    def test_what_a_cell_ran(self, same: Path) -> None:
        """The commands before the tests stand on the page."""
        about = {"schema": matrix.STEP, "command": "python -m oracle fixtures check", "seconds": 1.0, "status": 0}
        (same / str(NEW) / "step-1.json").write_text(json.dumps(about))
        page = matrix_page.to_html(merged(same))
        assert page.count("ran fixtures check") == 1

    def test_a_test_that_fails_everywhere_is_no_difference_and_no_pass(self, tmp_path: Path) -> None:
        for cell in (OLD, PIN, NEW):
            left(tmp_path, cell, cases(), tests={"failed": {"tests/a.py::test_x": "no"}, "status": 1})
        found = merged(tmp_path)
        assert not found.differences
        assert not found.ok

    def test_cause_is_the_library(self, tmp_path: Path) -> None:
        """Two of four cells differ: neither torch nor Python has just them, a library has."""
        four = [Cell(python, torch, "cpu") for python in ("3.11", "3.12") for torch in ("2.9", "2.15")]
        for cell, numpy in zip(four, ("1", "2", "2", "1"), strict=True):
            left(tmp_path, cell, cases(2 if numpy == "1" else 3), facts={"numpy": numpy})
        (one,) = merged(tmp_path, tuple(four)).differences
        assert one.cause == "Cause: all 2 cells, and no other, with numpy 1 (elsewhere 2)."

    def test_no_cause(self, tmp_path: Path) -> None:
        four = [Cell(python, torch, "cpu") for python in ("3.11", "3.12") for torch in ("2.9", "2.15")]
        for cell in four:
            left(tmp_path, cell, cases(2 if cell in (four[0], four[3]) else 3))
        (one,) = merged(tmp_path, tuple(four)).differences
        assert one.cause == "Cause: no version that these cells share and the others lack."


class TestNothingIsLeftOut:
    """A cell that left no record, an incomplete one or that of another version is an error of the page."""

    def test_no_record(self, same: Path) -> None:
        found = matrix.merge(matrix.load(same))
        assert f"{CELLS[0]}: no record" in found.problems
        assert len(found.problems) == len(CELLS) - 3
        assert not found.ok

    def test_unsupported(self, same: Path) -> None:
        for cell in CELLS:
            if cell not in (OLD, PIN, NEW):
                matrix.main(["unsupported", str(same), "--cell", str(cell), "--reason", "no such wheel"])
        found = matrix.merge(matrix.load(same))
        assert found.ok
        assert "no such wheel" in matrix_page.to_html(found)

    def test_unsupported_and_yet_run(self, same: Path) -> None:
        (same / str(OLD) / "unsupported.json").write_text('{"reason": "no interpreter"}')
        assert not merged(same).ok

    def test_nothing_but_unsupported(self, tmp_path: Path) -> None:
        matrix.unsupported(tmp_path, OLD, "no interpreter")
        assert not merged(tmp_path, (OLD,)).ok

    def test_interrupted(self, tmp_path: Path) -> None:
        left(tmp_path, OLD, cases(), planned=5)
        assert f"{OLD}: the sample ended early: 2 cases without an outcome" in merged(tmp_path, (OLD,)).problems
        left(tmp_path, NEW, cases(5))
        assert not merged(tmp_path, (OLD, NEW)).differences, "the error says it already"

    @pytest.mark.parametrize("name", ["run.jsonl", "bits.safetensors", "tests-1.json"])
    def test_a_part_is_missing(self, name: str, same: Path) -> None:
        (same / str(OLD) / name).unlink()
        assert any(str(OLD) in problem for problem in merged(same).problems)

    def test_another_torch(self, tmp_path: Path) -> None:
        left(tmp_path, NEW, cases())
        (tmp_path / str(NEW)).rename(tmp_path / str(PIN))
        assert merged(tmp_path, (PIN,)).problems == (f"{PIN}: the record is of torch 2.15.1",)

    def test_another_state_of_the_code(self, differing: Callable[..., matrix.Matrix]) -> None:
        found = differing(cases(), facts={"fp8-oracle": "0+other"})
        assert any("2 states of the code" in problem for problem in found.problems)


class TestPage:
    """Differences first, then every cell, then routines; the exit status says the same."""

    def test_html(self, differing: Callable[..., matrix.Matrix]) -> None:
        found = differing(cases(2), tests={"failed": {"tests/a.py::test_x": "<b>nan</b> & 448"}, "status": 1})
        page = matrix_page.to_html(found)
        assert page.index("2 cases here") < page.index('id="cells"')
        assert "&lt;b&gt;nan&lt;/b&gt; &amp; 448" in page
        assert "<b>nan" not in page
        assert 'class="odd"' in page

    def test_markdown(self, differing: Callable[..., matrix.Matrix]) -> None:
        said = matrix_page.to_markdown(differing(cases(2)))
        assert said.startswith("### ❌ fp8-oracle matrix: 3 cells: 3 passed; 1 difference")
        assert "| py311-torch29 | **PASSED** tests: 3 passed; cases: 2 passed |" in said

    @pytest.mark.turns(4)
    def test_command(self, same: Path, tmp_path: Path, root: Path) -> None:
        """As `make matrix` calls it: every cell of a row is there."""
        target = tmp_path / "page.md"
        command = [sys.executable, "-m", "tests.support.matrix", "page", str(same), "--markdown", str(target)]
        assert subprocess.run(command, cwd=root, check=False, capture_output=True).returncode == 1
        assert "| **PASSED** tests: 3 passed; cases: 3 passed |" in target.read_text()

    def test_exit_status(self, same: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        command = ["page", str(same), "--html", str(tmp_path / "page.html"), "--markdown", str(tmp_path / "page.md")]
        assert matrix.main(command) == 1  # the other cells left no record
        assert "no record" in capsys.readouterr().out
        for cell in CELLS:
            if not (same / str(cell)).exists():
                matrix.unsupported(same, cell, "no interpreter")
        assert matrix.main(command) == 0
        assert (tmp_path / "page.html").read_text().count("UNSUPPORTED") >= len(CELLS) - 3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32])
def test_every_nan_has_the_same_bits(dtype: torch.dtype) -> None:
    """A NaN of either sign is one NaN; the sign of a number, zero too, is kept."""
    x = torch.tensor([0.0, 1.0, float("nan")])
    plus, minus = matrix.bits_of(x.to(dtype)), matrix.bits_of((-x).to(dtype))
    assert (plus == minus).tolist() == [False, False, True]
