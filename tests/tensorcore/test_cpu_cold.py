"""Definitions compute until a kernel is worth its compilation, with the same bits; what is on disk is used at once."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import oracle
from oracle.bounds import engines
from oracle.harness.compiling import kernels
from oracle.tensorcore import cpu_cold, predict
from tests.support.wrong_outputs import GEMM, outputs

CODE = """
import sys
from oracle.routines import cases, get
case = cases.parse("fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=5,n=128,k=256/family=randn/seed=1")
contract = get(case.contract)
out = contract.reference(case.inputs(), out_dtype=case.out_dtype)
print(contract.judge(case.inputs(), out).status.name, "numba" in sys.modules)
"""


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """No kernel is on disk, and none has been computed otherwise yet."""
    counts = Counter[str]()
    monkeypatch.setattr(cpu_cold, "_at_once", [False])
    monkeypatch.setattr(cpu_cold, "on_disk", lambda kernel: False)
    monkeypatch.setattr(cpu_cold, "computed", lambda: counts)
    return counts


def test_a_kernel_is_compiled_after_so_many_products(cold: Counter[str]) -> None:
    rows = cpu_cold.LIMITS["residue"] // 2 // 4096
    assert cpu_cold.waits("residue", rows, 4, 1024) and cpu_cold.waits("residue", rows, 4, 1024)
    assert not cpu_cold.waits("residue", 1, 1, 1024) and not cpu_cold.waits("residue", 1, 1, 1)
    assert cpu_cold.waits("wide", 1, 1, 1024) and cold["wide"] == 1024 * cpu_cold.EACH
    assert not cpu_cold.waits("wide", 1 << 10, 1 << 10, 1 << 10)


def test_what_is_on_disk_is_used(cold: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_cold, "on_disk", lambda kernel: kernel == "wide")
    assert not cpu_cold.waits("wide", 1, 1, 1) and cpu_cold.waits("residue", 1, 1, 1)
    with cpu_cold.compiled_at_once():
        assert not cpu_cold.waits("residue", 1, 1, 1)
    assert cpu_cold.waits("residue", 1, 1, 1)


@pytest.mark.parametrize("name", cpu_cold.LIMITS)
def test_where_numba_keeps_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder, and the name of its index, are those that numba chooses; another kernel's file is no sign of it."""
    pytest.importorskip("numba")
    kernel = kernels()[name]
    folder, index = Path(kernel._cache.cache_path), kernel._cache._cache_file._index_name
    source = Path(kernel.py_func.__code__.co_filename)
    assert folder in cpu_cold._folders(source)
    monkeypatch.setattr(cpu_cold, "_folders", lambda source: [tmp_path])
    (tmp_path / index.replace(name, "other")).touch()
    assert not cpu_cold.on_disk.__wrapped__(name)
    (tmp_path / index).touch()
    assert cpu_cold.on_disk.__wrapped__(name) and fnmatch.fnmatch(index, f"*{name}*.nbi")


@pytest.mark.parametrize("name", ["one element", "garbage", "no known bits"])
def test_the_same_verdict(name: str, cold: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, found = outputs(16, 128, 256)
    asked = []
    verdicts = []
    for answer in (True, False):
        for module in (predict, engines):
            monkeypatch.setattr(module, "waits", lambda kernel, *_, answer=answer: asked.append(kernel) or answer)
        verdicts.append(oracle.judge(GEMM, inputs, found[name]).to_json())
    assert verdicts[0] == verdicts[1] and {"truncating", "exact_value"} <= set(asked)


def test_a_process_that_compiles_nothing(tmp_path: Path) -> None:
    """It judges without numba, and the next one goes on counting where it ended."""
    own = {"NUMBA_CACHE_DIR": str(tmp_path / "kernels"), "XDG_CACHE_HOME": str(tmp_path)}
    counts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env={**os.environ, **own}
        )
        assert done.stdout.split() == ["PASSED", "False"]
        (kept,) = (tmp_path / "fp8-oracle").glob("cold-*.txt")
        counts.append(int(dict(line.split() for line in kept.read_text().splitlines())["truncating"]))
    assert counts[1] == 2 * counts[0] > 0
