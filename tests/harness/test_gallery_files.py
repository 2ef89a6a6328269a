"""The gallery of the bindings, without its libraries: projects, archives that hold what is needed, scripts."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import oracle
from oracle.bindings.binding import Binding
from oracle.bindings.known import bindings, find
from oracle.errors import FixtureError, OptionError
from oracle.harness import bound, finding_scripts, gallery, subjects
from oracle.harness.finding_scripts import About, about
from oracle.report.gallery import Row, Run
from oracle.routines import cases
from tests.support import watched_kernels
from tests.support.commandline import Cli

sys.path.append(str(Path(__file__).resolve().parents[1]))
HARDWARE = Path(__file__).resolve().parents[1] / "hardware"
SCRIPTS = sorted((HARDWARE / "findings").glob("*.py"))
LIBRARIES = {
    "deep_gemm",
    "fbgemm_gpu",
    "flashinfer",
    "lmdeploy",
    "sgl_kernel",
    "sglang",
    "torch",
    "torchao",
    "triton",
    "vllm",
}


class TestOfBindings:
    """The gallery of the bindings, for whatever is installed."""

    def test_projects(self) -> None:
        found = {project.name: project for project in gallery.of_bindings()}
        assert {"deep_gemm", "flashinfer", "torch", "vllm"} <= found.keys()
        assert sum(len(project.kernels) for project in found.values()) == len(bindings())
        assert found["vllm"].distributions == ("vllm",) and found["torch"].devices == ("cpu", "cuda")
        assert gallery.key_of(found["torch"], found["torch"].kernels[0]).startswith("torch._scaled_mm/torch_per_tensor")

    def test_outside_of_a_checkout(self, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        """No folder is needed."""
        monkeypatch.chdir(tmp_path)
        assert "fp8_m_grouped_gemm_nt_masked" in cli("gallery", "list").out

    def test_beside_the_record_that_is_kept(self, tmp_path: Path, cli: Cli) -> None:
        """The same verdict, another one, and a kernel that the record lacks; of several kernels the one of the name."""
        rows = (Row("p", "f", "c", "CONFORMS"), Row("p", "g", "d", "CONFORMS"), Row("p", "k (pinned)", "d", "FAILED"))
        Run({}, rows).write(tmp_path / "kept.json")
        moved = Row("p", "g", "d", "FAILED", why="wrong")
        rows = (Row("p", "x", "c", "CONFORMS"), moved, Row("p", "h", "e", "FAILED"), Row("p", "i", "c", "UNSUPPORTED"))
        Run({}, rows).write(tmp_path / "new.json")
        done = cli("gallery", "beside", str(tmp_path / "new.json"), "--of", str(tmp_path / "kept.json"))
        assert done.status == 1 and [line.split()[0] for line in done.out.splitlines()][:4] == [
            "same",
            "MOVED",
            "not",
            "not",
        ]
        assert "1 verdicts as on the page, 1 others, 2 not compared" in done.out
        assert cli("gallery", "beside", str(tmp_path / "kept.json"), "--of", str(tmp_path / "kept.json")).status == 0


class TestBound:
    """Bindings as subjects of ``verify``."""

    def test_subjects(self, cli: Cli) -> None:
        found = subjects.provider("oracle.harness.bound:subjects").subjects
        assert len(found) == len(bindings()) and len({(one.name, one.contract) for one in found}) == len(found)
        assert all(isinstance(one, bound.Bound) for one in found)
        reasons = {one.name: one.why_not() for one in found if one.name.startswith(("torch.", "lmdeploy."))}
        assert reasons["torch._scaled_mm"] is None and "lmdeploy" in (reasons["lmdeploy.quant_fp8"] or "")
        case = "torch_per_tensor_w8a8_scaled_mm/e4m3xe4m3-bf16/tensor:tensor/m=16,n=128,k=256/family=randn/seed=1"
        words = ("--provider", "oracle.harness.bound:subjects", "--subject", "torch._scaled_mm", "--fixtures", "none")
        assert "1 passed" in cli("verify", "--case", case, *words).out

    def test_a_call_that_is_laid_out(self) -> None:
        """It writes into the same memory each time; a routine without a binding is refused."""
        name = "torch_per_tensor_w8a8_scaled_mm"
        case = cases.parse(f"{name}/e4m3xe4m3-bf16/tensor:tensor/m=16,n=128,k=256/family=randn/seed=1")
        call = bound.call_of("torch:_scaled_mm", name, case.inputs(), case.call_options())
        assert torch.equal(call(), call()) and oracle.judge(name, case.inputs(), call(), arch="cpu")
        inputs = {"x": torch.randn(4, 32), "scale": torch.ones(1)}
        with pytest.raises(OptionError, match="no binding under scaled_fp8_quant"):
            bound.call_of("torch:_scaled_mm", "scaled_fp8_quant", inputs, {})
        with pytest.raises(ImportError):
            bound.call_of("torch:ops._C.static_scaled_fp8_quant", "scaled_fp8_quant", inputs, {})


class TestPack:
    @pytest.fixture
    def wheels(self, tmp_path: Path) -> Path:
        for name, files in {
            "vllm-1.0-py3-none-any.whl": (
                "vllm/__init__.py",
                "vllm/_C.abi3.so",
                "vllm/third_party/deep_gemm/a.py",
                "vllm-1.0.dist-info/METADATA",
                "vllm-1.0.dist-info/RECORD",
            ),
            "other-2-py3-none-any.whl": ("other/a.py", "other/a.bin", "other/cake_1.py", "other-2.dist-info/METADATA"),
        }.items():
            with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as made:
                for file in files:
                    made.writestr(file, "x" * (400_000 if "cake" in file else 3))
        return tmp_path

    def test_packed(self, wheels: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from hardware import pack

        out = wheels / "out.tar.xz"
        assert pack.main([str(wheels), str(out)]) == 0 and "64 at most" in capsys.readouterr().out
        with tarfile.open(out) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
            made = archive.extractfile("gallery_site/vllm/__init__.py")
            shell = archive.extractfile("gallery_site/env.sh")
            assert made is not None and made.read() == b"" and shell is not None
            assert re.findall(rb"export (\w+)", shell.read()) == [b"PYTHONPATH"]
        assert {"vllm/third_party/deep_gemm/a.py", "vllm-1.0.dist-info/METADATA", "other/a.py"} <= names
        assert not {"other/a.bin", "other/cake_1.py", "vllm-1.0.dist-info/RECORD"} & names
        assert pack.main([str(wheels), str(out), "--limit", "0"]) == 1

    def test_a_package_without_its_engine(self, tmp_path: Path) -> None:
        """Its kernels import, what they read of the engine is there, and every file that is put beside is Python."""
        from hardware import pack

        for files in pack.BESIDE.values():
            for name, text in files.items():
                compile(text, name, "exec")
        with zipfile.ZipFile(tmp_path / "lmdeploy-1.0-py3-none-any.whl", "w") as made:
            made.writestr("lmdeploy/__init__.py", "raise ImportError('an engine')")
            made.writestr("lmdeploy/utils.py", "raise ImportError('an engine')")
            made.writestr("lmdeploy/pytorch/kernels/__init__.py", "raise ImportError('an engine')")
            made.writestr(
                "lmdeploy/pytorch/kernels/one.py",
                "from lmdeploy.utils import get_logger\n\nNO = get_logger('x').info(1)\n",
            )
        assert pack.main([str(tmp_path), str(tmp_path / "out.tar.xz")]) == 0
        with tarfile.open(tmp_path / "out.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
        code = "import lmdeploy.pytorch.kernels.one as one; print(one.NO)"
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path / pack.TOP, capture_output=True, text=True, check=False
        )
        assert ran.stdout == "False\n", ran.stderr

    def test_refused(self, wheels: Path) -> None:
        from hardware import pack

        with pytest.raises(FileNotFoundError, match="absent"):
            pack.pack(wheels, wheels / "out.tar.xz", ["absent"])


def by_binding(path: Path) -> bool:
    return "finding_scripts import again" in path.read_text()


@pytest.mark.parametrize("path", [path for path in SCRIPTS if not by_binding(path)], ids=lambda path: path.stem)
def test_a_finding_stands_alone(path: Path) -> None:
    """At most 25 lines; torch, its library and the standard library; ends with a status; says what it shows."""
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 25 and "sys.exit(" in text and about(path).matters
    froms = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    whole = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    used = {name.partition(".")[0] for name in froms | whole if name} | set(re.findall(r'find_spec\("(\w+)"\)', text))
    own = 0 if about(path).project.startswith("PyTorch") else 1
    assert used <= LIBRARIES | sys.stdlib_module_names and len(used & (LIBRARIES - {"torch"})) == own


@pytest.mark.parametrize("path", [path for path in SCRIPTS if by_binding(path)], ids=lambda path: path.stem)
def test_a_finding_by_binding(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 25 lines: a binding, a case that it takes with other inputs or its own, and what is expected."""
    asked: list[tuple[str | Binding, str, str, dict[str, torch.Tensor]]] = []
    monkeypatch.setattr(
        finding_scripts, "again", lambda *given, device="cuda", **changed: asked.append((*given, changed))
    )
    runpy.run_path(str(path))
    assert len(path.read_text().splitlines()) <= 25 and about(path).matters
    ((binding, case, expected, changed),) = asked
    one = cases.parse(case)
    known = find(binding, one.contract) if isinstance(binding, str) else binding
    assert known is not None and expected and str(one) == case
    assert changed.keys() <= one.inputs().keys()
    dataclasses.replace(known, dense=()).arguments({**one.inputs(), **changed}, one.call_options())


class TestFindings:
    """Scripts run by themselves, and what is kept of them."""

    CASE = "fp8_gemm_nt/e4m3xe4m3-f32/1x128:128x128/m=8,n=128,k=256/family=randn/seed=1"

    @pytest.mark.parametrize(("config", "status"), [("plain", 0), ("reversed", 0), ("wrong_scale", 1)])
    def test_one_call(self, config: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
        """Its status, and the fault that explains it; a failure of another kind is no such finding."""
        gemm = watched_kernels.BINDINGS[1]
        called = dataclasses.replace(gemm, pattern=f"(a, a_scale, b, b_scale, config={config!r})", ignores=())
        with pytest.raises(SystemExit) as ended:
            finding_scripts.again(called, self.CASE, "A scale swapped", device="cpu")
        assert ended.value.code == status and ("A scale swapped" in capsys.readouterr().out) == bool(status)
        if status:
            with pytest.raises(FixtureError, match="another failure than 'a lost row'"):
                finding_scripts.again(called, self.CASE, "a lost row", device="cpu")

    def test_inputs_of_its_own(self, capsys: pytest.CaptureFixture[str]) -> None:
        """They take the place of the case's: with equal scales a swapped one is no fault."""
        gemm = watched_kernels.BINDINGS[1]
        called = dataclasses.replace(gemm, pattern="(a, a_scale, b, b_scale, config='wrong_scale')", ignores=())
        with pytest.raises(SystemExit) as ended:
            finding_scripts.again(called, self.CASE, "A scale", device="cpu", a_scale=torch.full((8, 2), 0.5))
        assert ended.value.code == 0 and "all values of a_scale are equal" in capsys.readouterr().out

    def test_of_a_fault_a_healed_one_and_one_that_does_not_run(self, tmp_path: Path, cli: Cli) -> None:
        for name, end in (
            ("there", "print('got 3, right 4'); sys.exit(True)"),
            ("healed", "sys.exit(False)"),
            ("broken", "print('loading'); import no_such_library"),
        ):
            (tmp_path / f"{name}.py").write_text(f'"""A 1.0, f: wrong.\n\nMuch is lost.\n"""\nimport sys\n{end}\n')
        done = cli("findings", "--folder", str(tmp_path), "--out", str(tmp_path / "out"), "--jobs", "3")
        assert done.status == 1 and "3 findings: 1 there, 1 healed, 1 did not run" in done.out
        assert cli("findings", "--folder", str(tmp_path), "--only", "healed").status == 0
        assert cli("findings", "--folder", str(tmp_path), "--only", "broken").status == 2
        assert "--only heeled: did you mean" in cli("findings", "--folder", str(tmp_path), "--only", "heeled").err
        assert "no script of a finding" in cli("findings", "--folder", str(tmp_path / "out")).err
        found = json.loads((tmp_path / "out" / "findings.json").read_text())
        assert [(name, one["status"]) for name, one in found["scripts"].items()] == [
            ("broken", "did not run"),
            ("healed", "healed"),
            ("there", "there"),
        ]
        assert found["scripts"]["there"]["said"] == "got 3, right 4" and "torch" in found["machine"]
        assert "no_such_library" in found["scripts"]["broken"]["said"]
        (tmp_path / "healed.py").write_text("raise SystemExit('it is not run again')")
        (tmp_path / "broken.py").write_text("import sys\nsys.exit(False)\n")
        again = cli("findings", "--folder", str(tmp_path), "--out", str(tmp_path / "out"), "--resume")
        assert "3 findings: 1 there, 2 healed, 0 did not run" in again.out and "there       " not in again.out
        assert "needs the --out" in cli("findings", "--folder", str(tmp_path), "--resume").err
        (tmp_path / "out" / "findings.json").write_text("{}")
        again = cli("findings", "--folder", str(tmp_path), "--out", str(tmp_path / "out"), "--resume")
        assert again.status == 2 and "is no record of findings" in again.err

    def test_what_a_head_says(self, tmp_path: Path) -> None:
        one = tmp_path / "one.py"
        one.write_text('"""A B 1.0 and 2.0, f with (1, 2): wrong: much.\n\nAll is\nlost.\n"""')
        assert about(one) == About("A B 1.0 and 2.0", "f with (1, 2)", "wrong: much.", "All is lost.")
        one.write_text('"""A 1.0, f: wrong."""')
        with pytest.raises(FixtureError, match="one.py"):
            about(one)
