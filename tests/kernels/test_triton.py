"""The Triton quantisers: bits equal to plain torch (interpreter), and what they compile to for sm90."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed (no build for this platform)")

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def checks() -> dict[str, bool]:
    """Results of ``interpreted_quantisers.py``: the interpreter must be chosen before Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "interpreted_quantisers.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, bool] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_bits_equal_plain_torch(checks: dict[str, bool]) -> None:
    """Scales, codes and strides of every kernel, dtype, layout and special value."""
    wrong = [name for name, good in checks.items() if not good and not name.startswith("sabotaged")]
    assert not wrong
    assert len(checks) > 60


def test_another_formula_is_seen(checks: dict[str, bool]) -> None:
    """Sabotaged twin: a different floor gives different bits."""
    assert [good for name, good in checks.items() if name.startswith("sabotaged")] == [False]


@pytest.mark.parametrize("transposed", [False, True])
def test_compiles_for_sm90_with_true_division(transposed: bool) -> None:
    """The 1x128 kernel becomes IEEE division, saturating conversion and wide loads; nothing approximate."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels.backends import _triton_kernels as kernels

    kernel = kernels.group_kernel
    constants = {"GROUP": 128, "LANES": 128, "BLOCK": 32, "TRANSPOSED": transposed, "UE8M0": False, "NATIVE": True}
    types = {"x": "*bf16", "q": "*u8", "s": "*fp32"}
    signature = {n: types.get(n, "constexpr" if n in constants else "i32") for n in kernel.arg_names}
    aligned = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in ("x", "q", "s", "x_stride")}
    indexed = {(kernel.arg_names.index(n),): v for n, v in constants.items()}
    source = ASTSource(kernel, signature, constexprs=indexed, attrs=aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    assert "div.rn.f32" in ptx and not re.search(r"div\.(full|approx)", ptx)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "ld.global.v4" in ptx
