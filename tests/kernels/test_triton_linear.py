"""The linear layer of few rows in one Triton kernel: judged under the interpreter, compiled, cut, launched."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.backends import triton_linear
from kernels.backends.triton_linear import CUTS, Cut, parts_of
from kernels.errors import NoBackendError, ShapeError
from kernels.platform import Machine, use_machine
from kernels.support import shared_memory

pytestmark = [pytest.mark.interpreter, pytest.mark.turns(4)]

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def checks() -> dict[str, bool]:
    """Results of ``interpreted_linear.py``: the interpreter must be chosen before Triton is imported."""
    pytest.importorskip("triton", reason="Triton is not installed; the tox factor `interpreter` has it")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "interpreted_linear.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, bool] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_the_oracle_passes_it(checks: dict[str, bool]) -> None:
    """Both numbers of rows, tails of N, pitches, several blocks and several sums; each bit of the quantiser."""
    wrong = [name for name, good in checks.items() if not good and not name.startswith("sabotaged")]
    assert not wrong and len(checks) == 15


def test_every_fault_is_seen(checks: dict[str, bool]) -> None:
    """Negative tests: the kernel with one expression replaced."""
    faults = {name: good for name, good in checks.items() if name.startswith("sabotaged")}
    assert len(faults) == 9 and not any(faults.values())


INSTRUCTIONS = {
    80: "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    90: "wgmma.mma_async.sync.aligned.m64n{}k32.f32.e4m3.e4m3",
    100: "tcgen05.mma.cta_group::1.kind::f8f6f4",
    120: "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
}
"""By capability: what the products become; the oracle's schedules are named after them."""


@pytest.mark.parametrize("sm", INSTRUCTIONS)
def test_compiles_with_the_tensor_cores_of(sm: int, rows: int = 16) -> None:
    """The matrix instruction; one rounding of each step of the sum; no division, which would branch; copies ahead."""
    pytest.importorskip("triton", reason="Triton is not installed; the tox factor `interpreter` has it")
    from tests.support.ptx import ptx_of_launch

    start = triton_linear._prepared(rows, CUTS[rows], 56, 1, torch.bfloat16, sm, True)
    types = {"x": "*bf16", "w": "*u8" if sm < 89 else "*fp8e4nv", "sb": "*fp32", "out": "*bf16"}
    ptx = ptx_of_launch(start, sm, types, free=("m",))
    wide = rows * CUTS[rows].columns // 64 * 4 // start.num_warps
    assert INSTRUCTIONS[sm].format(wide) in ptx and "cp.async" in ptx
    operations = set(re.findall(r"\b((?:fma|mul|add|sub|div|rcp)\.(?:\w+\.)*f32)", ptx))
    assert operations <= {"fma.rn.f32", "mul.f32", "mul.rn.f32", "sub.f32", "sub.rn.f32", "rcp.approx.ftz.f32"} | (
        {"add.f32", "add.rn.f32"} if sm < 89 else set()  # of the conversion to codes
    ), operations


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Float64 values rounded to float32, as float64."""
    return x.to(torch.float32).double()


class TestInverse:
    """The kernel's inverses from every approximation within 2 ulp.

    In float64, whose error of 2^-29 of a float32's ulp decides nothing: 448 / amax is 2^-12 of an ulp away from the
    middle of two floats at least, and 1 / inv 2^-25.
    """

    @pytest.mark.parametrize("steps", [1, 0], ids=["one step", "none: the twin"])
    def test_one_step_of_newton_rounds_right(self, steps: int) -> None:
        """448 / amax for every significand of bfloat16 and float16, and 1 / inv for every inv that comes of it."""
        around = torch.arange(-2, 3, dtype=torch.float64)[:, None] * 2.0**-24
        amax = 1 + torch.arange(1 << 10, dtype=torch.float64) / (1 << 10)
        y = nearest(nearest(1 / amax) + around)
        q = nearest(448 * y)
        for _ in range(steps):
            q = nearest(q + (448 - amax * q) * y)
        right = nearest(448 / amax)
        assert bool((q == right).all()) == bool(steps)
        limits = torch.tensor([torch.finfo(d).max for d in (torch.bfloat16, torch.float16)], dtype=torch.float64)
        inv = torch.cat([right, limits])
        inv = inv / torch.exp2(inv.log2().floor())
        z = y = nearest(nearest(1 / inv) + around)
        for _ in range(steps):
            z = nearest(z + z * nearest(1 - inv * y))
        assert bool((z == nearest(1 / inv)).all()) == bool(steps)

    def test_the_least(self) -> None:
        """448 over it is a finite float32 beyond what bfloat16 holds, so that the limit is taken."""
        kernels = pytest.importorskip("kernels.backends._triton_linear", reason="Triton is not installed")
        (least,) = struct.unpack("<f", struct.pack("<I", kernels.LEAST.value))
        assert torch.finfo(torch.bfloat16).max < 448 / least < torch.finfo(torch.float32).max * (1 - 2**-12)


class TestCuts:
    """How a product is cut."""

    def test_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As many sums as give each multiprocessor one program, of equal length, none of them short."""
        monkeypatch.setattr(triton_linear, "MOST_PARTS", 4)
        assert [parts_of(n, 7168, 64, 132) for n in (4096, 2112, 7168, 576)] == [2, 4, 1, 4]
        assert parts_of(2112, 1024, 64, 132) == 1 and parts_of(2112, 2176, 64, 132) == 1
        assert parts_of(2112, 7168, 64, 0) == 1, "a machine that does not say how many it has"

    @pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 103, 120])
    @pytest.mark.parametrize("blocks", [1, 2, 12, 16, 56, 57])
    def test_fit_the_shared_memory(self, monkeypatch: pytest.MonkeyPatch, sm: int, blocks: int) -> None:
        """Of every architecture; blocks taken together go into K without remainder."""
        monkeypatch.setattr(triton_linear, "library", lambda: (NoKernels, True))
        for rows, cut in CUTS.items():
            made = triton_linear._prepared.__wrapped__(rows, cut, blocks, 1, torch.bfloat16, sm, True).constants
            assert blocks % made["TOGETHER"] == 0 and 128 % cut.columns == 0
            step = made["TOGETHER"] * 128 * (cut.columns + 2 * rows)
            assert made["STAGES"] >= 2 and made["STAGES"] * step < shared_memory(sm)


class NoKernels:
    """In place of the module that Triton compiles."""

    linear_kernel = sum_kernel = None


def test_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for each tile and sum, strides as given, rows and weights that are not dense copied, sums added."""
    seen: list[Any] = []

    class Start:
        def __init__(self, *constants: object) -> None:
            self.constants = {"DECODE": True}

        def here(self, *arguments: object) -> None:
            seen.append(arguments)

    monkeypatch.setattr(triton_linear, "library", lambda: (NoKernels, True))
    monkeypatch.setattr(triton_linear, "_prepared", Start)
    monkeypatch.setattr(triton_linear, "_sum", Start)
    monkeypatch.setattr(triton_linear, "MOST_PARTS", 2)
    monkeypatch.setattr(triton_linear, "CUTS", dict.fromkeys((16, 32), Cut(64, 1, 2, 4)))
    x, w = torch.zeros(31, 4096).bfloat16(), torch.zeros(96, 4096, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.ones(16, 1).t()
    with use_machine(Machine.described("sm80", sms=108)):
        layer = triton_linear.few_rows(torch.bfloat16, 96, 2048)
    y = layer(x[:, :2048], w[:, :2048], scale)
    assert y.shape == (31, 96) and y.dtype == torch.bfloat16
    (programs, (left, right, third), integers, (sums,)), added = seen
    assert programs == 4 and sums.shape == (2, 31, 96) and sums.dtype == torch.float32 and third is scale
    assert left.data_ptr() == x.data_ptr() and right.dtype == torch.uint8 and right.data_ptr() == w.data_ptr()
    assert integers == (31, 96, 2048, 4096, 4096, 1, 1) and added == (3, (sums, y), (31 * 96,))
    seen.clear()
    layer(x[:3, ::2], w[:, ::2], scale)
    assert seen[0][1][0].is_contiguous() and seen[0][1][1].is_contiguous() and seen[0][2][3:5] == (2048, 2048)
    seen.clear()
    assert layer(x[:0, :2048], w[:, :2048], scale).shape == (0, 96) and not seen


class TestVerb:
    """``few_rows_blockscale_linear``."""

    def test_rows(self, make) -> None:
        from kernels import few_rows_blockscale_linear as layer
        from kernels import flashinfer_fp8_blockscale_gemm

        x, w, s = torch.randn(32, 256).bfloat16(), make.codes(128, 256), make.scales(1, 2)
        for m in (0, 1, 31):
            assert torch.equal(layer(x[:m], w, s), flashinfer_fp8_blockscale_gemm(x[:m], w, s))
        half = layer(x[:5].half(), w, s)
        assert half.dtype == torch.float16 and not torch.equal(half.bfloat16(), layer(x[:4].repeat(2, 1)[:5], w, s))
        with pytest.raises(ShapeError, match="32 rows; from 32 use dynamic_flashinfer"):
            layer(x, w, s)

    def test_elsewhere(self, make) -> None:
        """Without Triton no GPU serves it, and the reasons are said."""
        from kernels.plan import Problem, plan

        bare = Machine.described("sm90").with_package("triton", "not installed")
        with pytest.raises(NoBackendError, match="triton_linear: not installed"):
            plan(Problem("few_rows", m=3, n=128, k=256), bare)


def test_a_cut_has_one_row_of_weight_scales() -> None:
    assert all(128 % cut.columns == 0 and isinstance(cut, Cut) for cut in CUTS.values())
