"""The kernels of products are compiled by one command, and no judgement of a product compiles another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oracle.errors import OracleError
from oracle.harness import compiling
from oracle.tensorcore import cpu_jit

JUDGED = """
import sys
import oracle
from oracle.harness import compiling
from tests.support.wrong_outputs import GEMM, outputs
inputs, found = outputs(64, 256, 2048)
for name in sys.argv[1:]:
    oracle.judge(GEMM, inputs, found[name])
    oracle.identify(GEMM, inputs, found[name])
print(sorted(name for name, kernel in compiling.kernels().items() if kernel.stats.cache_misses))
"""
BARE = """
import sys
sys.modules["numba"] = None
import torch
import oracle
a, one = torch.ones(2, 128).to(torch.float8_e4m3fn), torch.ones(2, 1)
inputs = {"a": a, "a_scale": one, "b": torch.ones(128, 128).to(torch.float8_e4m3fn), "b_scale": torch.ones(1, 1)}
print(oracle.judge("fp8_gemm_nt", inputs, torch.zeros(2, 128, dtype=torch.bfloat16)).status.name)
"""


def run(program: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program], capture_output=True, text=True, check=False, env=os.environ | variables
    )


@pytest.mark.turns(4)
class TestCompileKernels:
    """``doctor --compile`` leaves nothing to compile."""

    def test_all_kernels_are_reached(self) -> None:
        done = compiling.compile_kernels()
        assert sorted((*done.compiled, *done.loaded)) == sorted(compiling.kernels())
        assert all(kernel.signatures for kernel in compiling.kernels().values()), "one that is not called"

    @pytest.mark.turns(8)
    def test_no_judgement_compiles_after_it(self, tmp_path: Path) -> None:
        kept = {"NUMBA_CACHE_DIR": str(tmp_path)}
        before = run(["-c", JUDGED, "NaN"], **kept)
        assert before.stdout.strip() not in ("", "[]"), f"nothing was on disk: {before.stderr}"
        other = {"NUMBA_CACHE_DIR": str(tmp_path / "other")}
        done = run(["-m", "oracle", "doctor", "--compile"], **other)
        assert "compiled kernels" in done.stdout, done.stderr
        after = run(["-c", JUDGED, "right", "one element", "moved row", "garbage", "NaN", "no known bits"], **other)
        assert after.stdout.strip() == "[]", after.stderr

    def test_a_folder_that_cannot_be_written_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def kernel() -> None: ...

        def refused(*unused: object) -> None:
            raise RuntimeError("no locator")

        monkeypatch.setattr(cpu_jit, "KernelCache", refused)
        monkeypatch.setattr(compiling, "kernels", lambda: {"kernel": cpu_jit.jit(kernel)})
        with pytest.raises(OracleError, match="set NUMBA_CACHE_DIR"):
            compiling.compile_kernels()


def test_numba_may_be_absent() -> None:
    """Everything is judged by the definitions where numba is not installed."""
    bare = run(["-c", BARE])
    assert bare.stdout.strip() == "FAILED", bare.stderr
