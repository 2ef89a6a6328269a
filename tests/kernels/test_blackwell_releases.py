"""What the layer passes to FlashInfer and DeepGEMM, against the files of the release where it is installed.

Nothing is imported: signatures and claims of capabilities are read off the source, schemas off the compiled module.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from kernels.backends.deep_gemm import SYMBOLS
from kernels.backends.flashinfer_mx import BACKENDS, NAMES, ROUTINES
from kernels.config import Config
from kernels.platform import Machine
from kernels.support import BLACKWELL
from tests.support.fake_blackwell import CLAIMS, Libraries, grid

INSTALL = {"flashinfer": "flashinfer-python==0.7.2.post1", "deep_gemm": "sgl-deep-gemm==0.2.3.post2"}


def folder(package: str) -> Path:
    """The folder of a library; the test is left out, with the command, where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed; pip install --no-deps {INSTALL[package]}")
    return Path(spec.submodule_search_locations[0])


@cache
def functions(package: Path) -> dict[str, ast.FunctionDef]:
    """The functions of FlashInfer's products by name."""
    trees = [ast.parse(path.read_bytes()) for path in sorted((package / "gemm").glob("*.py"))]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}


def named(arguments: ast.arguments) -> list[str]:
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def capabilities(function: ast.FunctionDef) -> set[int]:
    """What ``supported_compute_capability([...])`` above a function says."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "supported_compute_capability":
            return set(ast.literal_eval(decorator.args[0]))
    return set()


def claims(of: dict[str, ast.FunctionDef], routine: str) -> dict[str, set[int]]:
    """Capabilities by backend, as ``backend_requirement({...}, common_check=...)`` above a routine says."""
    (required,) = (
        decorator
        for decorator in of[routine].decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "backend_requirement"
    )
    checks = required.args[0]
    assert isinstance(checks, ast.Dict)
    pairs = zip(checks.keys, checks.values, strict=True)
    found = {
        ast.literal_eval(key): capabilities(of[ast.unparse(check)])
        for key, check in pairs
        if key is not None and ast.unparse(check) in of  # experimental ones stand elsewhere
    }
    common = next(word.value for word in required.keywords if word.arg == "common_check")
    return found or {"": capabilities(of[ast.unparse(common)])}


@pytest.mark.whole("a look into a file that is parsed once")
@pytest.mark.parametrize("routine", dict.fromkeys(ROUTINES.values()))
def test_parameters_of_flashinfer(routine: str) -> None:
    """The fake, whose calls are judged, has the names, the order and the defaults of the release."""
    theirs = functions(folder("flashinfer"))[routine].args
    ours = inspect.signature(getattr(Libraries, routine)).parameters
    assert [name for name in ours if name != "self"] == named(theirs)
    defaults = [ast.unparse(value) for value in theirs.defaults]
    spoken = [p.default for p in ours.values() if p.default is not inspect.Parameter.empty]
    assert [str(value) if not isinstance(value, str) else repr(value) for value in spoken] == defaults


@pytest.mark.whole("a look into a file that is parsed once")
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_arch_is_planned_that_flashinfer_does_not_claim(backend: str) -> None:
    of = functions(folder("flashinfer"))
    for op, routine in ROUTINES.items():
        if not BACKENDS[backend].declares(op):
            continue
        claimed = claims(of, routine)
        capable = claimed[NAMES[backend] if "" not in claimed else ""]
        for sm in BLACKWELL:
            machine, switches = Machine.described(f"sm{sm}"), Config(split_k=True)
            planned = any(BACKENDS[backend].why_not(p, machine, switches) is None for p in grid(op))
            assert not planned or sm in capable, (op, sm)
            named_here = "" if "" in claimed else NAMES[backend]
            assert not planned or sm in CLAIMS[routine, named_here], "the fake claims less"


def test_a_renamed_parameter_is_noticed(tmp_path: Path) -> None:
    """The negative test: another name, another claim."""
    gemm = tmp_path / "gemm"
    gemm.mkdir()
    (gemm / "one.py").write_text(
        "@supported_compute_capability([100])\ndef _check(a): pass\n"
        "@backend_requirement({'cutlass': _check}, common_check=_check)\ndef mm_mxfp8(x, b): pass\n"
        "@backend_requirement({}, common_check=_check)\ndef grouped(a): pass\n"
    )
    of = functions(tmp_path)
    assert named(of["mm_mxfp8"].args) == ["x", "b"]
    assert claims(of, "mm_mxfp8") == {"cutlass": {100}} and claims(of, "grouped") == {"": {100}}


def test_names_of_deep_gemm() -> None:
    """Every routine has a name that the layer knows, but for those that a row refuses of some releases."""
    package = folder("deep_gemm")
    tree = ast.parse((package / "__init__.py").read_bytes())
    have = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    have |= {t.id for node in ast.walk(tree) if isinstance(node, ast.Assign) for t in node.targets
             if isinstance(t, ast.Name)}  # fmt: skip
    lacks = {name for name, names in SYMBOLS.items() if not have & set(names)}
    assert lacks <= {"skip_head_mid", "mqa_logits", "paged_mqa_logits"}
    compiled = b"".join(path.read_bytes() for path in package.glob("_C*.so"))
    schemas = set(re.findall(rb"([a-z0-9_]+)\([A-Z][^\n\x00]*\) -> ", compiled))
    assert not schemas or {b"fp8_fp4_gemm_nt", b"m_grouped_fp8_fp4_gemm_nt_masked"} <= schemas
