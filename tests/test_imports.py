"""The import contract, read off the syntax trees: nothing is imported to check it.

`oracle` and `kernels` never import each other, and inside `oracle` a file knows only what stands to its left in
``LAYERS``. Files of one layer may know each other unless ``APART`` names the layer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Left to right: a file may import from its own layer and from every layer before it. Folders stand for all they hold.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("elementwise", "memory"),
    ("formats",),
    ("rounding_scalar", "rounding"),
    ("doubledouble",),
    ("ue8m0", "fast_math", "blocks", "recipe_record", "recipes"),
    ("quantize",),
    ("layout", "shards", "platforms", "moe_records"),
    ("gemm", "grouped", "moe", "logits", "linear", "routing", "effective_scales"),
    ("tensorcore",),
    ("bounds", "quantize_admissible"),
    ("engines",),
    ("pattern", "evidence", "compare"),
    ("judging",),
    ("contracts",),
    ("faults",),
    ("spans", "explanations", "hypotheses", "places", "diagnose", "minimise"),
    ("api", "intervals"),
    ("data", "options"),
    ("cases",),
    ("profiles",),
    ("rules", "mutate"),
    ("legal",),
    ("fixtures", "strides"),
    ("failing_case",),
    ("captures", "golden_cases", "golden", "golden_text", "seal", "routines"),
    ("outcome",),
    ("ledger", "subjects", "record"),
    ("keeping",),
    ("changes", "history"),
    ("runner", "harness", "provenance"),
    ("golden_export", "coverage"),
    ("report",),
    ("doctor",),
    ("pytest_outcome",),
    ("pytest_plugin",),
    ("cli",),
    ("__main__", "__init__"),
)
# Rooms that must do without these packages, with the reason.
WITHOUT = {
    "report": (("torch", "numpy", "numba"), "nothing right of compare touches a tensor"),
    "outcome": (("torch", "numpy", "numba"), "nothing right of compare touches a tensor"),
    "ledger": (("torch", "numpy", "numba"), "nothing right of compare touches a tensor"),
    "record": (("torch", "numpy", "numba"), "nothing right of compare touches a tensor"),
    "changes": (("torch", "numpy", "numba"), "nothing right of compare touches a tensor"),
    "history": (("torch", "numpy", "numba"), "nothing right of compare touches a tensor"),
    "formats": (("ml_dtypes", "gfloat"), "a witness is not a definition"),
    "rounding": (("ml_dtypes", "gfloat"), "a witness is not a definition"),
}
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """``(line, dotted module)`` of every import statement, wherever it stands; relative ones made absolute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, *([base] if base else [])])
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def violations(house: str, path: Path, source: str) -> list[str]:
    """One sentence for each import of ``source`` (the file ``path`` relative to its house) that is not allowed."""
    room = path.parts[0].removesuffix(".py")
    other = {"oracle": "kernels", "kernels": "oracle"}[house]
    package = ".".join([house, *path.parent.parts])
    found = []
    for line, module in imported(source, package):
        top, _, rest = module.partition(".")
        target = rest.partition(".")[0]
        if top == other:
            found.append(f"{house}/{path}:{line} imports {module}: the two houses never import each other")
        if house != "oracle":
            continue
        if top == "oracle" and target in RANK and RANK[target] > RANK.get(room, len(LAYERS)):
            found.append(f"oracle/{path}:{line} imports {module}, which stands to the right of {room}")
        forbidden, why = WITHOUT.get(room, ((), ""))
        if top in forbidden:
            found.append(f"oracle/{path}:{line} imports {module}: {why}")
    return found


def files(house: str) -> list[Path]:
    """Python files of a house, relative to it."""
    return sorted(path.relative_to(ROOT / house) for path in (ROOT / house).rglob("*.py"))


class TestImportContract:
    """A file knows only what stands to its left; `kernels` and `oracle` never import each other."""

    @pytest.mark.parametrize("house", ["oracle", "kernels"])
    def test_no_forbidden_import(self, house: str) -> None:
        found = [v for path in files(house) for v in violations(house, path, (ROOT / house / path).read_text())]
        assert not found, "\n".join(found)

    def test_every_file_has_a_layer(self) -> None:
        rooms = {path.parts[0].removesuffix(".py") for path in files("oracle")}
        assert not rooms - set(RANK), f"give these a place in LAYERS: {sorted(rooms - set(RANK))}"

    def test_subjects_are_reached_by_name_only(self) -> None:
        """Only the command line and the doctor may say the word `kernels` to the import machinery."""
        speakers = [
            str(path)
            for path in files("oracle")
            if any(
                isinstance(node, ast.Call)
                and getattr(node.func, "id", getattr(node.func, "attr", ""))
                in ("import_module", "__import__", "find_spec")
                and any(isinstance(a, ast.Constant) and str(a.value).startswith("kernels") for a in node.args)
                for node in ast.walk(ast.parse((ROOT / "oracle" / path).read_text()))
            )
        ]
        assert all(path.startswith(("cli", "doctor")) for path in speakers), speakers


class TestTheCheckItself:
    """Sabotaged twins: each of these must be found."""

    @pytest.mark.parametrize(
        ("house", "path", "source"),
        [
            ("oracle", "gemm.py", "import kernels"),
            ("oracle", "gemm.py", "def f():\n    from kernels.linear import cutlass_scaled_mm"),
            ("kernels", "linear.py", "from oracle.formats import decode"),
            ("kernels", "backends/eager.py", "import oracle.gemm as g"),
            ("oracle", "formats.py", "from oracle.rounding import encode"),
            ("oracle", "gemm.py", "from oracle import bounds"),
            ("oracle", "tensorcore/predict.py", "from ..bounds import interval"),
            ("oracle", "compare.py", "import oracle.report.console"),
            ("oracle", "report/console.py", "import torch"),
            ("oracle", "formats.py", "from ml_dtypes import bfloat16"),
        ],
    )
    def test_a_forbidden_import_is_found(self, house: str, path: str, source: str) -> None:
        assert len(violations(house, Path(path), source)) >= 1

    @pytest.mark.parametrize(
        ("house", "path", "source"),
        [
            ("oracle", "rounding.py", "from oracle.formats import decode\nimport torch"),
            ("oracle", "bounds/chain.py", "from .interval import Interval\nfrom oracle.gemm import exact"),
            ("kernels", "linear.py", "from kernels.errors import ShapeError"),
        ],
    )
    def test_an_allowed_import_is_not(self, house: str, path: str, source: str) -> None:
        assert violations(house, Path(path), source) == []
