"""The fused Triton kernels: judged by their contracts in the interpreter, and what they compile to for sm90."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed; the tox factor `interpreter` has it")

from ptx import FUSED_TYPES as TYPES  # noqa: E402
from ptx import GATED, divides_truly, ptx_of  # noqa: E402

from kernels import fused  # noqa: E402
from kernels.backends import _launch, _triton_fused, triton_fused  # noqa: E402

pytestmark = pytest.mark.interpreter

HERE = Path(__file__).resolve().parent
NORM = {
    "COLS": 896,
    "GROUP": 128,
    "LANES": 128,
    "GROUPS": 8,
    "ROUNDING": 2,
    "SUM": 1,
    "GIVEN": False,
    "BOUNDED": False,
    "TRANSPOSED": False,
    "EPSILON": 0x358637BD,
    "FLOOR": 0x36924925,
    "NATIVE": True,
}
ROPE = {
    "DEPTH": 64,
    "LANES": 64,
    "WIDTH": 512,
    "OTHERS": 512,
    "BLOCK": 4,
    "NEOX": True,
    "FACTOR": 0x3F800000,
    "NATIVE": True,
}
KERNELS = {
    "gated": ("gated_kernel", GATED),
    "gated masked": ("gated_kernel", GATED | {"ROUNDING": 2, "MODE": 1, "MASKED": True, "BOUNDED": False}),
    "gated bf16": ("gated_kernel", GATED | {"ROUNDING": 2, "MODE": 2, "MASKED": True, "BOUNDED": False}),
    "norm": ("norm_kernel", NORM),
    "norm static": ("norm_kernel", NORM | {"GIVEN": True, "SUM": 0, "GROUP": 896, "LANES": 1024, "GROUPS": 1}),
    "rope": ("rope_kernel", ROPE),
}


@pytest.mark.turns(4)
def test_every_case_passes_in_the_interpreter() -> None:
    """``interpreted_fused.py``: the interpreter must be chosen before Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "interpreted_fused.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    assert set(found.values()) <= {"PASSED", "MISTRUSTED"} and len(found) > 100
    assert list(found.values()).count("PASSED") > 0.8 * len(found)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_sm90(name: str) -> None:
    """The quantiser divides truly; the value's own division, exponential and root are the device's; loads are wide.

    Both divisions of the device are within 2 ulp where the divisor lies between 2^-126 and 2^126 (PTX ISA, ``div``), as
    a number of columns does: from Triton 3.9 on such a division is ``div.approx``.
    """
    kernel, constants = KERNELS[name]
    ptx = ptx_of(getattr(_triton_fused, kernel), constants, TYPES)
    divisions = set(re.findall(r"\b(?:div|rcp|rsqrt)\.[\w.]*f(?:16|32|64)", ptx))
    root = {"div.full.f32", "div.approx.f32", "rsqrt.approx.ftz.f32"}
    own = {"gated_kernel": {"div.full.f32"}, "norm_kernel": root, "rope_kernel": set()}
    assert divisions - own[kernel] <= {"div.rn.f32"}
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert re.search(r"ld\.global[\w:.]*\.v4", ptx) or kernel == "rope_kernel"
    if name == "norm":  # of the scale and of its inverse, whatever the number of values
        assert ptx.count("div.rn.f32") == 2


def test_another_division_is_seen() -> None:
    """The negative test: the value's own division is not IEEE's."""
    assert not divides_truly(ptx_of(_triton_fused.gated_kernel, GATED, TYPES))


def test_every_start_gives_every_parameter_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled kernel takes its constants by position, behind the arguments."""
    seen = []

    def look(
        self: _launch.Launch,
        programs: int,
        given: tuple[object, ...],
        integers: tuple[int, ...],
        made: tuple[object, ...] = (),
    ) -> None:
        seen.append(self.kernel.__name__)
        assert self.kernel.arg_names[len(given) + len(made) + len(integers) :] == list(self.constants)

    monkeypatch.setattr(_launch.Launch, "here", look)
    monkeypatch.setattr(triton_fused, "library", lambda: (_triton_fused, True))
    x, one = torch.zeros(6, 256, dtype=torch.bfloat16), torch.ones(1)
    triton_fused.gated_static(x, one, "each")
    triton_fused.gated_group(x, 64, "none", 0.0, fused.SCALE_FLOOR, one, False, True, None)
    triton_fused.gated_group_bf16(x.view(2, 3, 256), 1e-10, torch.ones(2, dtype=torch.int32))
    triton_fused.norm_static(x, x[0], None, one, 1e-6, "each", True)
    triton_fused.norm_group(x, x[0], x, 1e-6, 128, one, False)
    triton_fused.rope(x.view(6, 4, 64), x.view(6, 4, 64), torch.ones(6, 64), torch.zeros(6).int(), True, 2.0)
    assert set(seen) == {kernel for kernel, _ in KERNELS.values()}
