"""The parameters that a binding states, against the files of the library where it is installed; none is imported."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from oracle.bindings.binding import Binding
from oracle.bindings.exemptions import COMPOSED, Composed
from oracle.bindings.known import bindings
from oracle.report.gallery import read
from oracle.routines.moe.pipelines import CONTRACTS

COMPILED = ("torch:", "vllm.third_party.")  # whose functions are no Python: their libraries name the parameters alone
PYTHON = [one for one in bindings() if not one.target.startswith(COMPILED) and "()." not in one.target]


def folder(target: str) -> Path | None:
    """The folder of a library; None where it is not installed."""
    spec = importlib.util.find_spec(target.partition(":")[0].partition(".")[0])
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def installed(name: str) -> str | None:
    """The version of a distribution; None where its metadata are not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def functions(package: Path) -> dict[str, list[str]]:
    """``name: its parameter lists`` of the functions of a package, an alias ``name = other`` as the other."""
    named: dict[str, list[str]] = {}
    aliases: list[tuple[str, str]] = []
    for path in package.rglob("*.py"):
        if "data" not in path.relative_to(package).parts:
            try:
                tree = ast.parse(path.read_bytes())
            except SyntaxError:  # it is of a later version of Python
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    own = "".join(parameters(node.args))
                    named.setdefault(node.name, []).append(own.removeprefix("self, ").removeprefix("cls, "))
                elif isinstance(node, ast.ClassDef):  # a call of it makes an instance
                    named.setdefault(node.name, []).extend(made_by(node))
                elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                    aliases += [(to.id, node.value.id) for to in node.targets if isinstance(to, ast.Name)]
    for name, other in aliases:
        named.setdefault(name, []).extend(named.get(other, []))
    return named


def made_by(of: ast.ClassDef) -> Iterator[str]:
    """The parameters of a class, without the instance."""
    for node in of.body:
        if isinstance(node, ast.FunctionDef) and node.name in ("__new__", "__init__"):
            yield "".join(parameters(node.args)).removeprefix("cls, ").removeprefix("self, ")


def parameters(of: ast.arguments) -> Iterator[str]:
    """Names and defaults, without annotations."""
    positional = [*of.posonlyargs, *of.args]
    defaults = [None] * (len(positional) - len(of.defaults)) + of.defaults
    for argument, default in zip(positional, defaults, strict=True):
        yield argument.arg + ("" if default is None else f"={ast.unparse(default)}") + ", "


def stated(signature: str) -> str:
    function = ast.parse(f"def f{signature}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    return "".join(parameters(function.args))


@pytest.mark.parametrize("binding", PYTHON, ids=lambda binding: binding.name)
def test_as_the_release_has_them(binding: Binding) -> None:
    if (package := folder(binding.target)) is None:
        pytest.skip(f"{binding.target.partition(':')[0]} is not installed; pip install {binding.release.split()[0]}")
    name, _, release = binding.release.partition(" ")
    if (found := installed(name)) is not None and not found.startswith(release):
        pytest.skip(f"{name} {found} is installed, and the call was read in {release}; pip install {name}=={release}")
    assert stated(binding.signature) in functions(package)[binding.target.partition(":")[2].rpartition(".")[2]]


@pytest.mark.parametrize("layer", {one.target: one for one in COMPOSED.values()}.values(), ids=lambda one: one.target)
def test_a_composed_layer_begins_with_codes(layer: Composed) -> None:
    """Why it has no binding: the library's function takes the scale of codes."""
    if (package := folder(layer.target)) is None:
        pytest.skip(f"{layer.target.partition(':')[0]} is not installed; pip install {layer.target.partition('.')[0]}")
    assert takes(functions(package)[layer.target.partition(":")[2]], layer.scale)


def takes(lists: list[str], name: str) -> bool:
    """Whether each of some parameter lists has a name."""
    return bool(lists) and all(name in {one.partition("=")[0] for one in own.split(", ")} for own in lists)


def test_every_stored_kernel_has_a_binding_or_a_reason(root: Path) -> None:
    """A reason stands where no binding is, of a contract that quantises its values; what the layer consists of is
    bound."""
    bound = {(one.shown.partition(".")[0], one.contract) for one in bindings()}
    stored = {(row.project, row.contract) for row in read(root / "fixtures/gallery/gallery.json").rows}
    assert stored - bound == {*COMPOSED}
    targets = {one.target for one in bindings()}
    for (_, contract), layer in COMPOSED.items():
        pipeline = CONTRACTS[contract].row
        assert pipeline.quantise is not None and "x" in {spec.name for spec in CONTRACTS[contract].inputs}
        assert layer.steps and {*layer.steps} <= targets
    assert CONTRACTS["cutlass_fused_moe_tensor"].row.quantise is None, "the negative one: codes are its inputs"


def test_another_release_is_noticed(tmp_path: Path) -> None:
    """The negative test: a parameter less, another default; an alias is followed; a class has those of an instance."""
    text = "def f(a, b: int, c=None): pass\ng = f\nclass C:\n    def __new__(cls, a, b, c=None): pass\n"
    (tmp_path / "lib.py").write_text(text)
    of = functions(tmp_path)
    assert of["g"] == of["f"] == of["C"] == [stated("(a, b, c=None)")]
    assert takes(of["f"], "c") and not takes(of["f"], "d") and not takes([], "c")
    assert stated("(a, b)") not in of["f"] and stated("(a, b, c=0)") not in of["f"]
