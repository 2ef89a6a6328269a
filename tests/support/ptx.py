"""What a Triton kernel compiles to for an architecture; no GPU is needed. Importing this file imports Triton."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.backends import _launch

WHOLE = ("x", "q", "s", "weight", "residual", "z", "x_stride", "r_stride", "cols", "total")
"""Parameters of the quantisers that are multiples of 16: pointers, row strides, extents."""

FUSED_TYPES = {
    "x": "*bf16",
    "q": "*fp8e4nv",
    "p": "*fp8e4nv",
    "s": "*fp32",
    "bound": "*fp32",
    "masked": "*i32",
    "weight": "*bf16",
    "residual": "*bf16",
    "z": "*bf16",
    "other": "*bf16",
    "cache": "*fp32",
    "positions": "*i32",
}
GATED = {
    "GROUP": 128,
    "LANES": 128,
    "BLOCK": 32,
    "ROUNDING": 0,
    "MODE": 0,
    "BOUNDED": True,
    "MASKED": False,
    "TRANSPOSED": False,
    "EPS": 0,
    "FLOOR": 0x36924925,
    "SHARED": True,
    "NATIVE": True,
}
"""Constants of the gated kernel of the fused quantisers, and the types of pointers of all their kernels."""


def ptx_of(
    kernel: Any,
    constants: dict[str, object],
    types: dict[str, str],
    *,
    sm: int = 90,
    num_warps: int = 4,
    whole: tuple[str, ...] = WHOLE,
) -> str:
    """The PTX of a kernel; ``types`` of its pointers, the rest int32, those in ``whole`` multiples of 16."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in whole if n in names}
    indexed = {(names.index(n),): v for n, v in constants.items()}
    source = ASTSource(kernel, signature, constexprs=indexed, attrs=aligned)
    options = {"num_warps": num_warps, **_launch.EXACT}
    ptx: str = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options).asm["ptx"]
    return ptx


def ptx_of_launch(start: Any, sm: int, types: dict[str, str], *, free: tuple[str, ...] = ()) -> str:
    """The PTX of a :class:`~kernels.backends._launch.Launch`, its integers multiples of 16 but those in ``free``."""
    whole = tuple(n for n in start.kernel.arg_names if n not in (*start.constants, *free))
    return ptx_of(start.kernel, start.constants, types, sm=sm, num_warps=start.num_warps, whole=whole)


def divides_truly(ptx: str) -> bool:
    """Every float division is IEEE's, subnormals included: none approximate, none flushing, no reciprocal."""
    return set(re.findall(r"\b(?:div|rcp)\.[\w.]*f(?:16|32|64)", ptx)) == {"div.rn.f32"}
