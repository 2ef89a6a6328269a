"""The import contract, read off the syntax trees: nothing is imported to check it.

`oracle` and `kernels` never import each other, and inside `oracle` a room knows only the rooms before it in
``ROOMS`` (:mod:`tests.support.figures`).
Inside a room, and inside `kernels`, no two files import each other on whichever way. Every import statement counts:
those of a function and of a type checker too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.docstrings import module_of
from tests.support.figures import RANK, circles, circles_in_rooms, file_arrows, parsed

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = {
    "report": (("torch", "numpy", "numba"), "a report is text; nothing of it touches a tensor"),
    "numbers": (("ml_dtypes", "gfloat"), "a witness is not a definition"),
}
"""Rooms that must do without these packages, with the reason."""


def imported(module: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """``(line, dotted module)`` of every import statement, wherever it stands; relative ones made absolute."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module_of(node, package)
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def violations(top_package: str, path: Path, module: ast.Module) -> list[str]:
    """One sentence for each import of a module that is not allowed; ``path`` is relative to ``top_package``."""
    room = path.parts[0].removesuffix(".py")
    other = {"oracle": "kernels", "kernels": "oracle"}[top_package]
    package = ".".join([top_package, *path.parent.parts])
    found = []
    for line, name in imported(module, package):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == other:
            found.append(f"{top_package}/{path}:{line} imports {name}: the two packages never import each other")
        if top_package != "oracle":
            continue
        if top == "oracle" and target in RANK and RANK[target] > RANK.get(room, -1):
            found.append(f"oracle/{path}:{line} imports {name}, which stands to the right of {room}")
        forbidden, why = WITHOUT.get(room, ((), ""))
        if top in forbidden:
            found.append(f"oracle/{path}:{line} imports {name}: {why}")
    return found


def names_the_layer(module: ast.Module) -> bool:
    """Whether a module asks the import machinery for the layer by a name that it states."""
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    named = {
        str(argument.value).partition(".")[0]
        for node in calls
        if getattr(node.func, "id", getattr(node.func, "attr", "")) in ("import_module", "__import__", "find_spec")
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    return bool(named & {"kernels", "fp8_oracle_kernels"})


def files(top_package: str) -> list[Path]:
    """Python files of a package, relative to it."""
    return sorted(path.relative_to(ROOT / top_package) for path in (ROOT / top_package).rglob("*.py"))


def rooms_of(top_package: Path) -> set[str]:
    """The folders with Python files and the Python files at the root of a package."""
    return {path.relative_to(top_package).parts[0].removesuffix(".py") for path in top_package.rglob("*.py")}


@pytest.mark.turns(2)
class TestImportContract:
    """A file knows only what stands to its left; `kernels` and `oracle` never import each other."""

    @pytest.mark.parametrize("top_package", ["oracle", "kernels"])
    def test_no_forbidden_import(self, top_package: str) -> None:
        found = [
            v for path in files(top_package) for v in violations(top_package, path, parsed(ROOT / top_package / path))
        ]
        assert not found, "\n".join(found)

    def test_the_rooms_are_those_that_exist(self) -> None:
        assert rooms_of(ROOT / "oracle") == set(RANK)

    def test_no_circle_of_files(self) -> None:
        assert circles_in_rooms(ROOT) == set()

    def test_subjects_are_reached_by_entry_points_only(self) -> None:
        """No file of `oracle` gives the import machinery the name of the layer, which an entry point says."""
        assert not [path for path in files("oracle") if names_the_layer(parsed(ROOT / "oracle" / path))]


class TestTheCheckItself:
    """Negative tests: each of these must be found."""

    @pytest.mark.parametrize(
        ("top_package", "path", "source"),
        [
            ("oracle", "truth/gemm.py", "import kernels"),
            ("oracle", "truth/gemm.py", "def f():\n    from kernels.linear import cutlass_scaled_mm"),
            ("kernels", "linear.py", "from oracle.numbers.formats import decode"),
            ("kernels", "backends/eager.py", "import oracle.truth.gemm as g"),
            ("oracle", "numbers/formats.py", "from oracle.truth import gemm"),
            ("oracle", "truth/gemm.py", "from oracle import bounds"),
            ("oracle", "tensorcore/predict.py", "from ..bounds import interval"),
            ("oracle", "verdict/compare.py", "import oracle.report.console"),
            ("oracle", "report/console.py", "import torch"),
            ("oracle", "numbers/formats.py", "from ml_dtypes import bfloat16"),
            ("oracle", "attic/gemm.py", "from oracle import errors"),
        ],
    )
    def test_a_forbidden_import_is_found(self, top_package: str, path: str, source: str) -> None:
        assert len(violations(top_package, Path(path), ast.parse(source))) >= 1

    def test_a_stated_name_is_found(self) -> None:
        assert names_the_layer(ast.parse("import_module('kernels.plan')"))
        assert not names_the_layer(ast.parse("import_module(f'{layer}.plan')"))

    @pytest.mark.parametrize(
        ("top_package", "path", "source"),
        [
            ("oracle", "numbers/rounding.py", "from oracle.numbers.formats import decode\nimport torch"),
            ("oracle", "bounds/chain.py", "from .interval import Interval\nfrom oracle.truth.gemm import exact"),
            ("kernels", "linear.py", "from kernels.errors import ShapeError"),
        ],
    )
    def test_an_allowed_import_is_not(self, top_package: str, path: str, source: str) -> None:
        assert violations(top_package, Path(path), ast.parse(source)) == []

    @pytest.mark.parametrize(
        "back",
        [
            "from kernels.config import Config",
            "import kernels.config",
            "def f():\n    from kernels import config",
            "from ..config import Config",
            "from .. import config",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kernels.config import Config",
        ],
    )
    def test_a_circle_of_files_is_found(self, back: str) -> None:
        """Of three files; without the last import there is none."""
        sources = {"config": "from kernels import plan", "plan": "from kernels.backends.one import A"}
        for last, expected in (
            ("", set()),
            (back, {frozenset({"kernels.config", "kernels.plan", "kernels.backends.one"})}),
        ):
            trees = {Path(f"{name}.py"): ast.parse(text) for name, text in (sources | {"backends/one": last}).items()}
            assert circles(file_arrows(trees, "kernels")) == expected

    def test_a_room_that_does_not_exist_is_found(self, tmp_path: Path) -> None:
        for name in ("numbers/formats.py", "attic/gemm.py"):
            (tmp_path / name).parent.mkdir()
            (tmp_path / name).write_text("")
        assert rooms_of(tmp_path) - set(RANK) == {"attic"}
        assert "truth" in set(RANK) - rooms_of(tmp_path)
