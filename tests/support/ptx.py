"""What a Triton kernel becomes for sm90. Importing this file imports Triton."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.backends import _launch


def ptx_of(kernel: Any, constants: dict[str, object], types: dict[str, str]) -> str:
    """What the kernel becomes for sm90, its pointers, row strides and extents multiples of 16."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    whole = ("x", "q", "s", "x_stride", "cols", "total")
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in whole if n in names}
    indexed = {(names.index(n),): v for n, v in constants.items()}
    source = ASTSource(kernel, signature, constexprs=indexed, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **_launch.EXACT})
    ptx: str = compiled.asm["ptx"]
    return ptx


def divides_truly(ptx: str) -> bool:
    """Every float division is IEEE's, subnormals included: none approximate, none flushing, no reciprocal."""
    return set(re.findall(r"\b(?:div|rcp)\.[\w.]*f(?:16|32|64)", ptx)) == {"div.rn.f32"}
