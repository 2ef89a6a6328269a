"""The files of the gallery, without its libraries: wrong adapters are named, archives hold what is needed, scripts."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
import runpy
import sys
import tarfile
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import oracle
from oracle.bindings.binding import Binding
from oracle.bindings.known import bindings, find
from oracle.errors import FixtureError
from oracle.harness import finding_scripts, gallery
from oracle.harness.finding_scripts import About, about
from oracle.report.gallery import Row
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


@pytest.fixture(scope="module", autouse=True)  # loading puts tests/ on the path, for `hardware.NAME`
def broken() -> dict[str, gallery.Kernel]:
    return {kernel.named: kernel for p in gallery.load(HARDWARE / "gallery_broken") for kernel in p.kernels}


def judged(kernel: gallery.Kernel, calls: int = 1) -> list[oracle.Verdict]:
    """Verdicts of calls with the same operands, the adapter as the worker calls it."""
    module, _, name = kernel.call.partition(":")
    called = getattr(importlib.import_module(module), name)
    case = cases.parse(kernel.case[0])
    assert kernel.adapter is not None
    outputs = [kernel.adapter(called, case.inputs(), case.call_options()) for _ in range(calls)]
    return [oracle.judge(kernel.contract, case.inputs(), out, arch="cpu", **case.call_options()) for out in outputs]


@pytest.mark.turns(4)
class TestBrokenAdapters:
    @pytest.mark.parametrize(
        ("name", "fault"),
        [("neighbouring scale", "A scale of the previous K block"), ("K tail", "last K block dropped")],
    )
    def test_named(self, broken: dict[str, gallery.Kernel], name: str, fault: str) -> None:
        (verdict,) = judged(broken[name])
        assert verdict.status.is_failure and fault in verdict.explained_by

    def test_stale_workspace(self, broken: dict[str, gallery.Kernel]) -> None:
        """Right at first, wrong again and again; `gallery run` says it of the rerun."""
        first, second = judged(broken["stale workspace"], calls=2)
        assert not first.status.is_failure and second.status.is_failure

    def test_what_is_wrapped_is_right(self, broken: dict[str, gallery.Kernel]) -> None:
        from hardware.gallery import _products, lmdeploy, sglang  # type: ignore[import-not-found]

        right = {"neighbouring scale": sglang.plain, "K tail": lmdeploy.gluon, "stale workspace": _products.block_pairs}
        for name, adapter in right.items():
            kernel = broken[name]
            whole = gallery.Kernel(kernel.contract, kernel.call, adapter, case=kernel.case)
            assert not judged(whole)[0].status.is_failure, name


class TestAlone:
    """A package whose ``__init__`` would fail, and a part of it that is not there."""

    @pytest.fixture
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
        alone = importlib.import_module("hardware.alone")
        inner = tmp_path / "heavy" / "deep"
        inner.mkdir(parents=True)
        (tmp_path / "heavy" / "__init__.py").write_text("raise ImportError('an engine')")
        (inner / "__init__.py").write_text("raise ImportError('an engine')")
        (inner / "kernel.py").write_text("from heavy.engine import setting\n\ndef call():\n    return setting()\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(alone, "BARE", alone.BARE | {"heavy"})
        monkeypatch.setattr(alone, "OPENED", set())
        monkeypatch.setattr(alone, "STUBS", {"heavy.engine": {"setting": lambda: 7}})
        monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
        yield alone
        for name in [name for name in sys.modules if name.partition(".")[0] == "heavy"]:
            del sys.modules[name]

    def test_called_by_its_path(self, package: types.ModuleType) -> None:
        assert package.heavy.deep.kernel.call() == 7

    def test_others_are_imported_whole(self, package: types.ModuleType) -> None:
        with pytest.raises(ImportError, match="an engine"):
            importlib.import_module("heavy.deep.kernel")

    def test_what_is_not_there(self, package: types.ModuleType) -> None:
        with pytest.raises(NotImplementedError, match=r"heavy\.deep\.other"):
            package.module("heavy.deep.other")
        with pytest.raises(NotImplementedError, match="no package lmdeploy"):
            package.module("lmdeploy.nothing")


class TestOfBindings:
    """The gallery of the bindings, for whatever is installed."""

    def test_projects(self) -> None:
        found = {project.name: project for project in gallery.of_bindings()}
        assert {"deep_gemm", "flashinfer", "torch", "vllm"} <= found.keys()
        assert sum(len(project.kernels) for project in found.values()) == len(bindings())
        assert found["vllm"].distributions == ("vllm",) and found["torch"].devices == ("cpu", "cuda")
        assert gallery.key_of(found["torch"], found["torch"].kernels[0]).startswith("torch._scaled_mm/torch_per_tensor")

    def test_outside_of_a_checkout(self, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a folder these are the gallery; two galleries at once are refused."""
        monkeypatch.chdir(tmp_path)
        assert "fp8_m_grouped_gemm_nt_masked" in cli("gallery", "list").out
        assert "give one" in cli("gallery", "list", "--bindings", "--folder", ".").err

    def test_beside_the_stored_page(self) -> None:
        """The same verdict, another one, and a kernel that the page lacks."""
        beside = importlib.import_module("hardware.gallery_by_bindings").beside
        page = (Row("p", "f", "c", "CONFORMS"), Row("p", "g", "d", "CONFORMS"))
        new = (Row("p", "x", "c", "CONFORMS"), Row("p", "g", "d", "FAILED", why="wrong"), Row("p", "h", "e", "FAILED"))
        lines, moved = beside(new, page)
        assert [line.split()[0] for line in lines] == ["same", "MOVED", "not", "1"] and moved == 1


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
        pack = importlib.import_module("hardware.pack")
        out = wheels / "out.tar.xz"
        assert pack.main([str(wheels), str(out)]) == 0 and "64 at most" in capsys.readouterr().out
        with tarfile.open(out) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
            made = archive.extractfile("gallery_site/vllm/__init__.py")
            shell = archive.extractfile("gallery_site/env.sh")
            assert made is not None and made.read() == b"" and shell is not None
            assert b'FP8_KERNELS_VLLM_C="$here/vllm/_C.abi3.so"' in shell.read()
        assert {"vllm/third_party/deep_gemm/a.py", "vllm-1.0.dist-info/METADATA", "other/a.py"} <= names
        assert not {"other/a.bin", "other/cake_1.py", "vllm-1.0.dist-info/RECORD"} & names
        assert pack.main([str(wheels), str(out), "--limit", "0"]) == 1

    def test_refused(self, wheels: Path) -> None:
        pack = importlib.import_module("hardware.pack")
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
    """At most 25 lines: a binding, a case that it takes, and what is expected."""
    asked: list[tuple[str | Binding, str, str]] = []
    monkeypatch.setattr(finding_scripts, "again", lambda *given: asked.append(given))
    runpy.run_path(str(path))
    assert len(path.read_text().splitlines()) <= 25 and about(path).matters
    ((binding, case, expected),) = asked
    one = cases.parse(case)
    known = find(binding, one.contract) if isinstance(binding, str) else binding
    assert known is not None and expected and str(one) == case
    dataclasses.replace(known, dense=()).arguments(one.inputs(), one.call_options())


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

    def test_what_a_head_says(self, tmp_path: Path) -> None:
        one = tmp_path / "one.py"
        one.write_text('"""A B 1.0 and 2.0, f with (1, 2): wrong: much.\n\nAll is\nlost.\n"""')
        assert about(one) == About("A B 1.0 and 2.0", "f with (1, 2)", "wrong: much.", "All is lost.")
        one.write_text('"""A 1.0, f: wrong."""')
        with pytest.raises(FixtureError, match="one.py"):
            about(one)
