"""The Triton quantisers: bits equal to plain torch (interpreter), and what they compile to for sm90."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed (no build for this platform)")

import triton.language as tl  # noqa: E402  # only where Triton is installed
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kernels.backends import _triton_kernels, triton_quant  # noqa: E402

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


TILE = {"GROUP": 128, "LANES": 128, "BLOCK": 32, "NATIVE": True}
TYPES = {"x": "*bf16", "q": "*u8", "s": "*fp32", "bound": "*fp32", "amax": "*i32"}
KERNELS = {
    "group": ("group_kernel", TILE | {"TRANSPOSED": False, "UE8M0": False}),
    "group transposed": ("group_kernel", TILE | {"TRANSPOSED": True, "UE8M0": False}),
    "group ue8m0": ("group_kernel", TILE | {"TRANSPOSED": True, "UE8M0": True}),
    "packed": ("packed_kernel", TILE),
    "token": ("token_kernel", {"BLOCK": 4096, "PARTS": 2, "BOUNDED": True, "NATIVE": True}),
    "tensor": ("tensor_kernel", {"BLOCK": 4096, "STATIC": False, "NATIVE": True}),
}


@triton.jit
def flushing_kernel(x, s, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    v = tl.load(x + lane).to(tl.float32)
    tl.store(s + lane, tl.inline_asm_elementwise("div.rn.ftz.f32 $0, $1, $1;", "=f,f", [v], tl.float32, True, 1))


@triton.jit
def approximate_kernel(x, s, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    v = tl.load(x + lane).to(tl.float32)
    tl.store(s + lane, v / (v + 1.0))


def ptx_of(kernel: Any, constants: dict[str, object], types: dict[str, str]) -> str:
    """What the kernel becomes for sm90, its pointers, row strides and extents multiples of 16."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    whole = ("x", "q", "s", "x_stride", "cols", "total")
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in whole if n in names}
    indexed = {(names.index(n),): v for n, v in constants.items()}
    source = ASTSource(kernel, signature, constexprs=indexed, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **triton_quant.EXACT})
    ptx: str = compiled.asm["ptx"]
    return ptx


def divides_truly(ptx: str) -> bool:
    """Every float division is IEEE's, subnormals included: none approximate, none flushing, no reciprocal."""
    return set(re.findall(r"\b(?:div|rcp)\.[\w.]*f(?:16|32|64)", ptx)) == {"div.rn.f32"}


@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_sm90_with_true_division(name: str) -> None:
    """IEEE division whatever the Triton, saturating conversion and, on aligned rows, wide loads."""
    kernel, constants = KERNELS[name]
    types = TYPES | ({"s": "*i32"} if name == "packed" else {})
    ptx = ptx_of(getattr(_triton_kernels, kernel), constants, types)
    assert divides_truly(ptx)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "ld.global.v4" in ptx


@pytest.mark.parametrize("kernel", [flushing_kernel, approximate_kernel], ids=["flushing", "approximate"])
def test_another_division_is_seen(kernel: Any) -> None:
    """Sabotaged twins: a division that flushes subnormals, and Triton's own ``/``."""
    assert not divides_truly(ptx_of(kernel, {"BLOCK": 128}, TYPES))
