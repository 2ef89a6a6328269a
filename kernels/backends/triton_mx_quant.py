"""MXFP8, MXFP4 and NVFP4 quantisers in Triton, one kernel each; a part of the backend ``triton``.

Codes and scale bytes equal those of plain torch; of silu they are those of the device's ``exp`` and a division within
2 ulp (:mod:`kernels.backends._triton_fused`). Under ``TRITON_INTERPRET=1`` they run on the CPU.

Source: the formulas of :mod:`kernels.mx_blocks`.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..config import current_config
from ..context import Memo
from ..fast import torch as fast_torch
from ..fast.triton import modes
from ..mx_blocks import (
    EVEN_OF_FINITE,
    FP4_EMAX,
    FP4_FRACTION,
    FP4_MAX,
    FP8_ELEMENTS,
    HEIGHTS,
    LINEAR,
    MX_BLOCK,
    NVFP4_BLOCK,
    size_of,
)
from ._host import allocator, is_other_device
from ._launch import ALIGNMENT, HIP, Launch, bits, imported
from .declaration import Allocate, Blocks, Pair

ELEMENTS = 4096
"""Elements of one program."""


@functools.cache
def library() -> tuple[ModuleType, bool]:
    """The kernel, and whether it runs natively (not under the interpreter)."""
    return imported("._triton_mx_quant", "block_kernel")


class Prepared:
    """The kernel of a way to quantise, and what depends on it alone."""

    def __init__(self, how: Blocks, two_levels: bool, native: bool) -> None:
        top, emax, fraction, self.dtype = FP8_ELEMENTS.get(how.element, (FP4_MAX, FP4_EMAX, FP4_FRACTION, torch.uint8))
        self.width, self.layout = NVFP4_BLOCK if two_levels else MX_BLOCK, how.layout
        self.packed, self.gated = 2 if how.element == "e2m1" else 1, how.gated
        self.as_bytes = how.element == "e5m2" or (how.element == "e4m3" and not native)
        self.start = Launch(
            library()[0].block_kernel,
            {
                "ELEMENT": 3 if two_levels else [*FP8_ELEMENTS, "e2m1"].index(how.element),
                "WIDTH": self.width,
                "BLOCK": ELEMENTS // self.width,
                "HEIGHT": HEIGHTS.get(how.layout, 0),
                "RCEIL": how.rounding == "rceil",
                "EVEN": 1 << (22 - fraction) if how.rounding in ("even", EVEN_OF_FINITE) else 0,
                "FINITE": how.rounding == EVEN_OF_FINITE,
                "STEP": int(how.rounding == "ceil"),
                "TOP": bits(top),
                "INVERSE": bits(1.0 / top),
                "EMAX": emax,
                "INVERSED": how.inversed,
                "GATED": how.gated,
                "NATIVE": native,
            },
            num_warps=4,
        )
        self.launches: Memo[tuple[object, ...], tuple[Any, ...]] = Memo()

    def shapes(self, m: int, columns: int) -> tuple[tuple[int, int], tuple[int, ...]]:
        """Of codes and of scales."""
        blocks = columns // self.width
        scale = (m, blocks) if self.layout == LINEAR else (size_of(m, blocks, self.layout),)
        return (m, columns // self.packed), scale

    def __call__(self, x: Tensor, columns: int, factor: Tensor | None, step: int, allocate: Allocate) -> Pair:
        """Codes and scale bytes of ``x``, whose rows are dense; ``step`` from a row's factor to the next one's."""
        (m, width), (of_codes, of_scales) = x.shape, self.shapes(x.shape[0], columns)
        q, scale = allocate(of_codes, (of_codes[1], 1), self.dtype), _dense(allocate, of_scales)
        integers = m, columns // self.width, (width >> self.gated) // self.width, x.stride(0), step
        codes = q.view(torch.uint8) if self.as_bytes else q
        inputs = x, x if factor is None else factor
        self.start.here(-(-scale.numel() // (ELEMENTS // self.width)), inputs, integers, (codes, scale))
        return q, scale

    def _again(self, x: Tensor, columns: int, factor: Tensor | None, step: int, allocate: Allocate) -> Pair:
        """As a call, in less host time for extents and strides of an earlier one."""
        index, now, m = x.device.index, modes(), x.shape[0]
        key = index, now, x.dtype, x.shape, x.stride(0), columns, step, None if factor is None else factor.shape
        launch, at = self.launches.get(key), x.data_ptr()
        beside = at if factor is None else factor.data_ptr()
        if launch is None or (at | beside) % ALIGNMENT:
            q, scale = self(x, columns, factor, step, allocate)
            integers = m, columns // self.width, (x.shape[1] >> self.gated) // self.width, x.stride(0), step
            programs, beside_dtype = -(-scale.numel() // (ELEMENTS // self.width)), x if factor is None else factor
            ready = self.start.ready(index, now, programs, integers, x.dtype, beside_dtype.dtype)
            if ready is not None:
                self.launches.keep(key, (q.shape, q.stride(), scale.shape, scale.stride(), *ready))
            return q, scale
        of_codes, strides, of_scales, scale_strides, begin, fixed, after = launch
        q = allocate(tuple(of_codes), strides, self.dtype)
        scale = allocate(tuple(of_scales), scale_strides, torch.uint8)
        begin(fast_torch.STREAM(index), *fixed, at, beside, q.data_ptr(), scale.data_ptr(), *after)
        return q, scale


def _dense(allocate: Allocate, shape: tuple[int, ...]) -> Tensor:
    return allocate(shape, (shape[1], 1) if len(shape) == 2 else (1,), torch.uint8)


@functools.lru_cache(maxsize=64)
def _prepared(how: Blocks, two_levels: bool) -> Prepared:
    return Prepared(how, two_levels, library()[1])


def quant_blocks(x: Tensor, how: Blocks, columns: int, global_scale: Tensor | None) -> Pair:
    """One kernel for codes and scale bytes.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    device = x.device
    if is_other_device(device):
        with torch.cuda.device(device):
            return quant_blocks(x, how, columns, global_scale)
    prepared = _prepared(how, global_scale is not None)
    x = x if x.stride(1) == 1 else x.contiguous()
    step = 0 if global_scale is None or global_scale.numel() == 1 else global_scale.stride(0)
    direct = device.index is not None and not HIP and current_config().fast_paths
    return (prepared._again if direct else prepared)(x, columns, global_scale, step, allocator(device))
