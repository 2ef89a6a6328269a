"""What the project declares, pins and promises agrees with itself and with the README."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import oracle
from oracle.cli import tool
from oracle.harness import subjects
from tests.support import typed_user
from tests.support.matrix import CELLS


@pytest.fixture
def project(root: Path) -> dict[str, object]:
    table = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert isinstance(table, dict)
    return table


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class TestDeclaration:
    """Distribution, packages, script, extras and entry point as the documentation says."""

    def test_names(self, project: dict[str, object], root: Path) -> None:
        assert project["name"] == "fp8-oracle"
        assert project["scripts"] == {"fp8-oracle": "oracle.cli:main"}
        assert project["entry-points"] == {"pytest11": {"fp8_oracle": "oracle.pytest_plugin"}}
        layer = tomllib.loads((root / "kernels" / "pyproject.toml").read_text())["project"]["entry-points"]
        assert layer == {subjects.GROUP: {"production": "fp8_oracle_kernels.subjects:subjects"}}
        assert subjects.layers() == ["kernels"]  # what an editable install registers
        for package in ("oracle", "kernels"):
            assert (root / package / "py.typed").is_file()
            assert (root / package / "__init__.py").is_file()

    def test_every_dependency_of_the_checks_is_pinned(self, project: dict[str, object], root: Path) -> None:
        """What `make verify` and `make test` install has one exact version; the GPU extra is not installed there."""
        lines = [line for line in (root / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
        pins = {canonical(line.partition("==")[0]): line.partition("==")[2].partition(" ;")[0] for line in lines}
        assert all(pins.values()), "every line is name==version"
        extras = project["optional-dependencies"]
        assert isinstance(extras, dict)
        declared = [Requirement(text) for text in [*project["dependencies"], *extras["dev"]]]  # type: ignore[misc]
        missing = [r.name for r in declared if canonical(r.name) not in pins]
        assert not missing
        wrong = [r for r in declared if not r.specifier.contains(pins[canonical(r.name)])]
        assert not wrong, "the pins satisfy the declared ranges"

    def test_the_unofficial_deep_gemm_is_not_asked_for(self, project: dict[str, object]) -> None:
        extras = project["optional-dependencies"]
        assert isinstance(extras, dict)
        names = [canonical(Requirement(text).name) for text in extras["gpu"]]
        assert "sgl-deep-gemm" in names
        assert "deep-gemm" not in names

    def test_installed_here(self) -> None:
        """The tests run against an installed distribution, so subjects and the script are registered."""
        assert "production" in {point.name for point in entry_points(group=subjects.GROUP)}
        assert "fp8-oracle" in {point.name for point in entry_points(group="console_scripts")}


def test_no_test_module_imports_another(root: Path) -> None:
    """What tests share is in tests/support; a file that is collected twice runs its tests twice."""
    pattern = re.compile(r"^\s*(?:from|import) (?:tests\.)?(?!support)\w*\.?(?:test_\w+|conftest)\b", re.MULTILINE)
    assert pattern.search("from tests.bounds.test_engines import x") and pattern.search("from conftest import Cli")
    files = sorted((root / "tests").rglob("*.py"))
    assert len(files) > 100
    assert [str(path) for path in files if pattern.search(path.read_text())] == []


def expanded(text: str) -> list[str]:
    """``a{1,2}-b`` is ``a1-b`` and ``a2-b``."""
    parts = [part.split(",") for part in re.split("[{}]", text)]
    return ["".join(choice) for choice in itertools.product(*parts)]


class TestCommands:
    """Every pip command is constrained; CI runs the README's test command."""

    @pytest.mark.parametrize("name", ["Makefile", "README.md", "CONTRIBUTING.md", ".ci/run"])
    def test_pip_is_constrained(self, root: Path, name: str) -> None:
        for line in (root / name).read_text().splitlines():
            if "pip install " in line and not line.lstrip().startswith("#"):
                assert "-c constraints.txt" in line, f"{name}: {line}"

    def test_tox_is_constrained(self, root: Path) -> None:
        assert (root / "tox.ini").read_text().count("UV_CONSTRAINT = {tox_root}{/}constraints.txt") == 2

    @pytest.mark.parametrize("broken", [False, True])
    def test_tox_takes_every_environment_by_name(self, root: Path, tmp_path: Path, broken: bool) -> None:
        """``tox run -e NAME`` refuses a name with a factor that no line of the file asks about."""
        text = (root / "tox.ini").read_text()
        labels = [line.partition(" = ")[2] for line in text.splitlines() if re.match("    (matrix|gpu) = ", line)]
        names = [name for label in labels for name in expanded(label)]
        assert {cell.environment for cell in CELLS} < {*names}
        names += map(str, CELLS)
        assert len(names) == len(set(names)) > 60
        if broken:
            text = re.sub("^    cpu: .*\n", "", text, flags=re.MULTILINE)
        (tmp_path / "tox.ini").write_text(text)
        asked_for = [str(CELLS[0])] if broken else names
        command = [sys.executable, "-m", "tox", "config", "-e", ",".join(asked_for), "-k", "description"]
        asked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        refused = "not found in configuration file" in asked.stdout + asked.stderr
        assert (asked.returncode != 0, refused) == (broken, broken), asked.stdout + asked.stderr

    def test_ci_runs_the_documented_command(self, root: Path) -> None:
        script = root / ".ci" / "run"
        assert os.access(script, os.X_OK)
        assert "make test" in script.read_text()
        for command in ("make verify", "make test"):
            assert command in (root / "README.md").read_text()

    @pytest.mark.parametrize("name", ["cpu.yml", "gpu.yml"])
    def test_workflows_run_what_exists(self, root: Path, name: str) -> None:
        """Every step is a target of the Makefile or a command of its environment, or puts that environment on the PATH,
        or keeps the record that the action made; pip is constrained."""
        targets = [line.partition(":")[0] for line in (root / "Makefile").read_text().splitlines() if ":" in line]
        text = (root / ".github" / "workflows" / name).read_text()
        steps = [line.partition(" run: ")[2] for line in text.splitlines() if " run: " in line]
        assert "make verify" in steps
        for step in steps:
            program, _, rest = step.partition(" ")
            known = (program == "make" and rest in targets) or program.startswith(".venv/bin/")
            assert known or "$PWD/.venv/bin" in step or "steps.oracle.outputs.record" in step, step
            assert "pip install" not in step or "-c constraints.txt" in step

    def test_importing_loads_no_gpu_library(self) -> None:
        """The command line starts without torch too; the last import is the negative test: a library that is loaded is
        seen. (Nor does `kernels` load one: `tests/kernels/test_import.py`.)"""
        heavy = ("torch", "numba", "flashinfer", "deep_gemm", "vllm", "triton", "wave")
        code = f"import sys, oracle, oracle.cli, wave; print([m for m in {heavy} if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "['wave']"

    def test_python_dash_m(self) -> None:
        done = subprocess.run([sys.executable, "-m", "oracle", "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("fp8-oracle ")


class TestPublicNames:
    """`import oracle` loads no torch; `dir(oracle)` has every public name before any is loaded, and no helper."""

    @pytest.mark.parametrize(
        ("statement", "torch", "offered"),
        [("pass", False, True), ("del oracle.__dir__", False, False)],
    )
    def test_names_are_offered_before_they_are_loaded(self, statement: str, torch: bool, offered: bool) -> None:
        """The second statement removes the names: the check sees it."""
        seen = "'torch' in sys.modules, {n for n in dir(oracle) if n[0] != '_'} == {'errors', *oracle.__all__}"
        code = f"import sys, oracle; {statement}; print({seen})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(torch), str(offered)]

    @pytest.mark.turns(2)
    def test_types_that_a_user_sees(self, root: Path, tmp_path: Path) -> None:
        """CI has mypy check a user's file, in the call that checks the packages; what the file does is right too."""
        assert '"mypy -p oracle -p kernels -m tests.support.typed_user"' in (root / "tox.ini").read_text()
        case = oracle.cases.parse("fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=5,n=32,k=128/family=randn/seed=1")
        out = oracle.predict(typed_user.NAME, case.inputs())
        assert typed_user.use(case.inputs(), out, tmp_path) and (tmp_path / "verdict.png").is_file()

    @pytest.mark.parametrize(("added", "hidden"), [((), set()), (("judge",), {"judge"})])
    def test_no_module_hides_a_public_name(self, root: Path, added: tuple[str, ...], hidden: set[str]) -> None:
        """The import system binds a submodule as an attribute of its package, over a verb of the same name."""
        modules = {path.stem for path in (root / "oracle").iterdir()} | set(added)
        assert modules & set(oracle.__all__) == hidden


def shadow(folder: Path) -> Path:
    """Another package named kernels, as Hugging Face's on PyPI."""
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text("")
    return folder


class TestDoctor:
    """doctor says what is here, and notices another package named kernels."""

    def test_ours(self) -> None:
        assert tool.our_kernels().state == "ok"

    def test_another_one(self, tmp_path: Path) -> None:
        finding = tool.our_kernels([str(shadow(tmp_path))])
        assert finding.state == "problem"
        assert str(tmp_path / "kernels") in finding.said
        assert "Hugging Face" in finding.said

    @pytest.mark.parametrize(
        ("names", "state", "said"),
        [
            ([], "absent", "pip install fp8-oracle-kernels"),
            (["fp8_oracle_kernels"], "problem", "fp8_oracle_kernels is registered and not importable"),
            (["fp8_oracle_kernels", "kernels"], "problem", "register the same operators"),
        ],
    )
    def test_installed(self, monkeypatch: pytest.MonkeyPatch, names: list[str], state: str, said: str) -> None:
        """The oracle alone; the wheel of the layer, damaged; that wheel beside a checkout."""
        monkeypatch.setattr(tool.subjects, "layers", lambda: names)
        finding = tool.our_kernels([])
        assert finding.state == state and said in finding.said

    def test_none(self, tmp_path: Path) -> None:
        assert tool.our_kernels([str(tmp_path)]).state == "problem"

    @pytest.mark.repeats("TestDoctor::test_another")
    def test_the_command_in_a_process_where_it_is_shadowed(self, tmp_path: Path, fixtures_folder: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(shadow(tmp_path)), "FP8_ORACLE_FIXTURES": str(fixtures_folder)}
        done = subprocess.run(
            [sys.executable, "-m", "oracle", "doctor"],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            cwd=tmp_path,
        )
        assert done.returncode == 1, done.stderr
        assert "another package named kernels" in done.stdout

    def test_examination(self, fixtures_folder: Path) -> None:
        findings = {finding.what: finding for finding in tool.examine(str(fixtures_folder))}
        assert {"python", "torch", "layer", "fixtures", "flashinfer", "deep_gemm"} <= set(findings)
        assert findings["fixtures"].state == "ok"
        assert all(finding.said for finding in findings.values())

    def test_a_library_whose_import_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "deep_gemm.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        assert importlib.util.find_spec("deep_gemm") is not None
        (found,) = [f for f in tool.examine("none") if f.what == "deep_gemm"]
        assert found.state == "problem"
        assert "libcudart.so.13" in found.said
