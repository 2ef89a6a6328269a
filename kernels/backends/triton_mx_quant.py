"""MXFP8, MXFP4 and NVFP4 quantisers in Triton, one kernel each; a part of the backend ``triton``.

Codes and scale bytes equal those of plain torch. Under ``TRITON_INTERPRET=1`` they run on the CPU.

Source: the formulas of :mod:`kernels.mx_blocks`.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from ..mx_blocks import FP4_EMAX, FP4_FRACTION, FP4_MAX, FP8_ELEMENTS, HEIGHTS, LINEAR, MX_BLOCK, NVFP4_BLOCK, size_of
from ._launch import Launch, bits, imported

ELEMENTS = 4096
"""Elements of one program."""


@functools.cache
def library() -> tuple[ModuleType, bool]:
    """The kernel, and whether it runs natively (not under the interpreter)."""
    return imported("._triton_mx_quant", "block_kernel")


@functools.lru_cache(maxsize=64)
def _prepared(element: str, rounding: str, layout: str, two_levels: bool, inversed: bool) -> Launch:
    kernels, native = library()
    top, emax, fraction = (
        (FP4_MAX, FP4_EMAX, FP4_FRACTION) if element not in FP8_ELEMENTS else FP8_ELEMENTS[element][:3]
    )
    width = NVFP4_BLOCK if two_levels else MX_BLOCK
    constants = {
        "ELEMENT": 3 if two_levels else [*FP8_ELEMENTS, "e2m1"].index(element),
        "WIDTH": width,
        "BLOCK": ELEMENTS // width,
        "HEIGHT": HEIGHTS.get(layout, 0),
        "RCEIL": rounding == "rceil",
        "EVEN": 1 << (22 - fraction) if rounding == "even" else 0,
        "STEP": int(rounding == "ceil"),
        "TOP": bits(top),
        "INVERSE": bits(1.0 / top),
        "EMAX": emax,
        "INVERSED": inversed,
        "NATIVE": native,
    }
    return Launch(kernels.block_kernel, constants, num_warps=4)


def quant_blocks(
    x: Tensor, element: str, rounding: str, layout: str, columns: int, global_scale: Tensor | None, inversed: bool
) -> tuple[Tensor, Tensor]:
    """One kernel for codes and scale bytes.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    m, k = x.shape
    width = MX_BLOCK if global_scale is None else NVFP4_BLOCK
    blocks, device = columns // width, x.device
    scale = torch.empty(
        (m, blocks) if layout == LINEAR else size_of(m, blocks, layout), dtype=torch.uint8, device=device
    )
    if element in FP8_ELEMENTS:
        q = torch.empty(m, columns, dtype=FP8_ELEMENTS[element][3], device=device)
    else:
        q = torch.empty(m, columns // 2, dtype=torch.uint8, device=device)
    start = _prepared(element, rounding, layout, global_scale is not None, inversed)
    factor = scale if global_scale is None else global_scale
    stride = 0 if global_scale is None or global_scale.numel() == 1 else global_scale.stride(0)
    stored = q if element == "e4m3" and library()[1] else q.view(torch.uint8)
    start(
        -(-scale.numel() // (ELEMENTS // width)),
        (x, stored, scale, factor),
        (m, blocks, k // width, x.stride(0), stride),
    )
    return q, scale
