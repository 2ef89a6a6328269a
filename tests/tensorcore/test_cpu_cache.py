"""No compiled kernel is taken from the disk after a change of anything that it was compiled from."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from oracle.bounds import cpu_kernels  # noqa: E402
from oracle.tensorcore import cpu_attention, cpu_cache, cpu_elements, cpu_jit, cpu_truncation, engine_cpu  # noqa: E402
from oracle.verdict import loss_jit  # noqa: E402

OTHER_FILE = """
from numba.extending import intrinsic
from oracle.tensorcore.cpu_jit import piece

STEP = 3

def _twice(typing_context, x):
    def lower(context, builder, signature, arguments):
        return builder.add(arguments[0], arguments[0])
    return x(x), lower

twice = intrinsic(_twice)

@piece
def moved(x):
    return x + 10
"""
KERNEL = """
from oracle.tensorcore.cpu_jit import jit
from {package}.other import STEP, moved, twice

@jit
def kernel(x):
    return twice(moved(x)) + STEP
"""
EDITS = {  # (what stands in the other file, what replaces it, the kernel of 1)
    "constant": ("STEP = 3", "STEP = 4", 26),
    "piece": ("x + 10", "x + 20", 45),
    "intrinsic": ("builder.add(arguments[0], arguments[0])", "builder.mul(arguments[0], arguments[0])", 124),
}
ENTRIES = {
    "_rows": cpu_attention._rows,
    "narrow": engine_cpu.narrow,
    "wide": engine_cpu.wide,
    "truncating": cpu_truncation.truncating,
    "chains": cpu_elements.chains,
    "exact_value": cpu_kernels.exact_value,
    "residue": cpu_kernels.residue,
    "figures": loss_jit.figures,
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of two files, of which one has a kernel, and the other what it is compiled from."""
    folder = tmp_path / "kernels_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "other.py").write_text(OTHER_FILE)
    (folder / "own.py").write_text(KERNEL.format(package=folder.name))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    yield folder
    forget(folder.name)


def forget(name: str) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def loaded(package: Path) -> Any:
    """The kernel, as a process that begins now loads it."""
    forget(package.name)
    importlib.invalidate_caches()
    return importlib.import_module(f"{package.name}.own").kernel


def edit(path: Path, old: str, new: str) -> None:
    """Another text under the same time, as a copy or an archive may leave it; Python's own bytecode goes."""
    text, seen = path.read_text(), path.stat()
    assert old in text
    path.write_text(text.replace(old, new))
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


class TestStaleKernels:
    """numba freezes the value of every global that a kernel names."""

    def test_unchanged(self, package: Path) -> None:
        first, again = loaded(package), None
        assert first(1) == 25 and sum(first.stats.cache_misses.values()) == 1
        again = loaded(package)
        assert again(1) == 25 and sum(again.stats.cache_hits.values()) == 1

    @pytest.mark.parametrize("what", EDITS)
    def test_change_of_another_file(self, package: Path, what: str) -> None:
        old, new, expected = EDITS[what]
        assert loaded(package)(1) == 25
        edit(package / "other.py", old, new)
        changed = loaded(package)
        assert changed(1) == expected and not changed.stats.cache_hits

    def test_numba_alone_misses_it(self, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without the digest the old kernel answers."""
        monkeypatch.setattr(cpu_cache, "digest", lambda *_: "")
        assert loaded(package)(1) == 25
        edit(package / "other.py", *EDITS["piece"][:2])
        assert loaded(package)(1) == 25

    def test_options(self) -> None:
        options = cpu_jit.OPTIONS
        assert cpu_cache.digest(engine_cpu.narrow, options) != cpu_cache.digest(
            engine_cpu.narrow, options | {"fastmath": True}
        )

    def test_unknown_value(self) -> None:
        """A global whose value the key does not cover is an error, no silent gap."""
        unknown = object()
        with pytest.raises(TypeError, match="names a object, which"):
            cpu_cache.digest(lambda: unknown, {})

    @pytest.mark.parametrize("name", ENTRIES)
    def test_every_global_of_the_engines_counts(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = ENTRIES[name]
        before = cpu_cache.digest(kernel, {})
        scope = kernel.py_func.__globals__
        for word in {*kernel.py_func.__code__.co_names} & scope.keys():
            if not isinstance(scope[word], type(np)):
                with monkeypatch.context() as patch:
                    patch.setitem(scope, word, 1 << 40)
                    assert cpu_cache.digest(kernel, {}) != before, word
        assert cpu_cache.digest(kernel, {}) == before
