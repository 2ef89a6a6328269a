"""Where a kernel's code stands: by name without importing it, and by the callable itself."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from oracle.harness import sources

PACKAGE = {
    "mine/__init__.py": "raise SystemExit('never imported')\n",
    "mine/ops.py": "import os\n\n\n@decorated\ndef gemm(a):\n    def inner(): ...\n\n\nif os:\n    made = fast = 1\n",
    "mine/api.py": "from .ops import gemm as matmul\nfrom mine.ops import fast\nfrom missing import other\n",
    "mine/wrong.py": "x = 1\ndef f(:\n",
    "folder/inner/deep.py": "def f(): ...\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("mine.ops:gemm", "mine/ops.py:5"),
        ("mine.ops:made.attribute", "mine/ops.py:10"),
        ("mine.ops:inner", "mine/ops.py:1"),
        ("mine.api:matmul", "mine/ops.py:5"),
        ("mine.api:fast", "mine/ops.py:10"),
        ("mine.api:other", "mine/api.py:3"),
        ("mine.wrong:f", "mine/wrong.py:2"),
        ("mine.none:f", ""),
        ("folder.inner.deep:f", "folder/inner/deep.py:1"),
        ("folder.other.deep:f", ""),
        ("itertools:chain", ""),
    ],
)
def test_by_name(package: Path, target: str, place: str) -> None:
    assert sources.of_name(target) == place


def test_of_a_package_that_was_installed_for_editing() -> None:
    """Its folder is on no path; a finder of the import system knows it."""
    assert sources.of_name("oracle.harness.sources:place").startswith("oracle/harness/sources.py:")


def test_by_callable() -> None:
    @functools.wraps(test_by_name)
    def wrapped() -> None: ...

    here = f"tests/harness/test_sources.py:{test_by_callable.__code__.co_firstlineno}"
    assert sources.of(functools.partial(test_by_callable)) == here
    assert sources.of(wrapped) == sources.of(test_by_name)
    assert sources.of(pytest.MonkeyPatch().setenv).rpartition(":")[0].endswith("monkeypatch.py")
    assert sources.of(len) == ""


def test_relative_to_the_repository(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the folder with .git; without one to the current folder; else absolute."""
    file = package / "mine" / "ops.py"
    assert sources.place(file, 3) == "mine/ops.py:3"
    monkeypatch.chdir(package / "mine")
    assert sources.place(package / "x.py", 3) == f"{package}/x.py:3"
    (package / ".git").mkdir()
    assert sources.place(file, 3) == "mine/ops.py:3"
