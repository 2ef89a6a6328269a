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

from .. import fast
from ..config import current_config
from ..context import Memo
from ..fast import modes
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
    rows_of_scales,
    size_of,
)
from ._host import allocator, is_other_device
from ._launch import ALIGNMENT, HIP, Launch, bits, imported, power_of_two
from .declaration import Allocate, Blocks, Matrices, Pair
from .triton_fused import PER_THREAD, ROUNDINGS

ELEMENTS, WARPS = 4096, 4
"""Elements of one program, and its warps."""
COLUMNS = 512
"""Columns of a row that a program takes: of 8 rows, of which 8 sectors of scale bytes are whole in tiles."""


@functools.cache
def library() -> tuple[ModuleType, bool]:
    """The kernel, and whether it runs natively (not under the interpreter)."""
    return imported("._triton_mx_quant", "block_kernel")


def _constants(how: Blocks, two_levels: bool, block: int) -> dict[str, object]:
    """What the kernels have in common, in their order."""
    top, emax, fraction, _ = FP8_ELEMENTS.get(how.element, (FP4_MAX, FP4_EMAX, FP4_FRACTION, torch.uint8))
    return {
        "ELEMENT": 3 if two_levels else [*FP8_ELEMENTS, "e2m1"].index(how.element),
        "WIDTH": NVFP4_BLOCK if two_levels else MX_BLOCK,
        "BLOCK": block,
        "HEIGHT": HEIGHTS.get(how.layout, 0),
        "RCEIL": how.rounding == "rceil",
        "EVEN": 1 << (22 - fraction) if how.rounding in ("even", EVEN_OF_FINITE) else 0,
        "FINITE": how.rounding == EVEN_OF_FINITE,
        "STEP": int(how.rounding == "ceil"),
        "INVERSE": bits(1.0 / top),
        "EMAX": emax,
        "INVERSED": how.inversed,
        "GATED": how.gated,
    }


class Prepared:
    """The kernel of a way to quantise, and what depends on it alone."""

    def __init__(self, how: Blocks, two_levels: bool, factors: int, native: bool, across: int) -> None:
        self.width, self.layout = NVFP4_BLOCK if two_levels else MX_BLOCK, how.layout
        self.packed, self.gated = 2 if how.element == "e2m1" else 1, how.gated
        self.dtype = FP8_ELEMENTS[how.element][3] if how.element in FP8_ELEMENTS else torch.uint8
        self.as_bytes = how.element == "e5m2" or (how.element == "e4m3" and not native)
        self.across, self.rows = across, ELEMENTS // self.width // across
        constants = _constants(how, two_levels, ELEMENTS // self.width)
        more = {"ACROSS": across, "FACTORS": factors, "NATIVE": native}
        self.start = Launch(library()[0].block_kernel, {**constants, **more}, num_warps=WARPS)
        self.launches: Memo[tuple[object, ...], tuple[Any, ...]] = Memo()

    def shapes(self, m: int, columns: int, count: int = 1) -> tuple[tuple[int, int], tuple[int, ...]]:
        """Of codes and of scales."""
        blocks = columns // self.width
        scale = (m, blocks) if self.layout == LINEAR else (count * size_of(m // count, blocks, self.layout),)
        return (m, columns // self.packed), scale

    def programs(self, m: int, columns: int, count: int = 1) -> int:
        """Of matrices of ``m`` rows in all: padded to tiles, so many rows and blocks of a row each."""
        height, blocks = HEIGHTS.get(self.layout, 1), columns // self.width
        rows, wide = m // count, blocks if self.layout == LINEAR else blocks + -blocks % 4
        return count * -(-(rows + -rows % height) // self.rows) * -(-wide // self.across)

    def __call__(
        self, x: Tensor, columns: int, factor: Tensor | None, step: int, allocate: Allocate, count: int = 1
    ) -> Pair:
        """Codes and scale bytes of ``x``, whose rows are dense; ``step`` from a factor to the next one."""
        of_codes, of_scales = self.shapes(x.shape[0], columns, count)
        q, scale = allocate(of_codes, (of_codes[1], 1), self.dtype), _dense(allocate, of_scales)
        codes = q.view(torch.uint8) if self.as_bytes else q
        inputs = x, x if factor is None else factor
        programs = self.programs(x.shape[0], columns, count)
        self.start.here(programs, inputs, self._integers(x, columns, step, count), (codes, scale))
        return q, scale

    def _integers(self, x: Tensor, columns: int, step: int, count: int = 1) -> tuple[int, ...]:
        """Of the kernel's parameters."""
        m, width = x.shape
        return m // count, columns // self.width, (width >> self.gated) // self.width, x.stride(0), step, count

    def _again(self, x: Tensor, columns: int, factor: Tensor | None, step: int, allocate: Allocate) -> Pair:
        """As a call, in less host time for extents and strides of an earlier one."""
        index, now = x.device.index, modes()
        key = index, now, x.dtype, x.shape, x.stride(0), columns, step, None if factor is None else factor.shape
        launch, at = self.launches.get(key), x.data_ptr()
        beside = at if factor is None else factor.data_ptr()
        if launch is None or (at | beside) % ALIGNMENT:
            q, scale = self(x, columns, factor, step, allocate)
            programs, beside_dtype = self.programs(x.shape[0], columns), x if factor is None else factor
            ready = self.start.ready(
                index, now, programs, self._integers(x, columns, step), x.dtype, beside_dtype.dtype
            )
            if ready is not None:
                self.launches.keep(key, (q.shape, q.stride(), scale.shape, scale.stride(), *ready))
            return q, scale
        of_codes, strides, of_scales, scale_strides, begin, fixed, after = launch
        q = allocate(tuple(of_codes), strides, self.dtype)
        scale = allocate(tuple(of_scales), scale_strides, torch.uint8)
        begin(fast.STREAM(index), *fixed, at, beside, q.data_ptr(), scale.data_ptr(), *after)
        return q, scale


class OfExperts:
    """The kernel of rows that lie expert by expert, for a number of experts up to a power of two and a row's blocks."""

    def __init__(self, how: Blocks, two_levels: bool, tight: bool, groups: int, native: bool, across: int) -> None:
        self.layout = of = Prepared(how, two_levels, 2 if two_levels else 0, native, across)
        constants = _constants(how, two_levels, ELEMENTS // of.width)
        more = {"ACROSS": across, "TIGHT": tight, "GROUPS": groups, "NATIVE": native}
        self.start = Launch(library()[0].expert_kernel, {**constants, **more}, num_warps=WARPS)

    def __call__(
        self, x: Tensor, columns: int, factor: Tensor | None, step: int, offsets: Tensor, allocate: Allocate
    ) -> Pair:
        """Codes and scale bytes of ``x``, whose rows are dense."""
        of, (m, _), experts = self.layout, x.shape, len(offsets) - 1
        (rows, wide), blocks = of.shapes(m, columns)[0], columns // of.width
        height = rows_of_scales(m, experts)
        q = allocate((rows, wide), (wide, 1), of.dtype)
        scale = _dense(allocate, (size_of(height, blocks, of.layout),))
        codes = q.view(torch.uint8) if of.as_bytes else q
        programs = -(-m // of.rows) * -(-(blocks + -blocks % 4) // of.across) + height // HEIGHTS[of.layout]
        inputs = x, x if factor is None else factor, offsets
        self.start.here(programs, inputs, (*of._integers(x, columns, step)[:5], experts), (codes, scale))
        return q, scale


class OfNorm:
    """The kernel of the RMS norm of rows of a width."""

    def __init__(
        self, how: Blocks, two_levels: bool, cols: int, rounding: str, summed: bool, epsilon: float, native: bool
    ) -> None:
        self.layout = of = Prepared(how, two_levels, 0, native, 1)
        block = power_of_two(cols // of.width + -(cols // of.width) % 4)
        more = {
            "COLS": cols,
            "ROUNDING": ROUNDINGS[rounding],
            "SUM": summed,
            "EPSILON": bits(epsilon),
            "NATIVE": native,
        }
        warps = min(16, max(1, block * of.width // (32 * PER_THREAD)))
        constants = _constants(how, two_levels, block)
        self.start = Launch(library()[0].norm_kernel, {**constants, **more}, num_warps=warps)

    def __call__(
        self, x: Tensor, weight: Tensor, residual: Tensor | None, factor: Tensor | None, allocate: Allocate
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes, scale bytes and the sum of matrices whose rows are dense."""
        of, (m, cols) = self.layout, x.shape
        of_codes, of_scales = of.shapes(m, cols)
        q, scale = allocate(of_codes, (of_codes[1], 1), of.dtype), _dense(allocate, of_scales)
        z = None if residual is None else allocate((m, cols), (cols, 1), x.dtype)
        other = x if residual is None else residual
        inputs = x, weight, other, weight if factor is None else factor
        outputs = q.view(torch.uint8) if of.as_bytes else q, scale, x if z is None else z
        height = HEIGHTS.get(of.layout, 1)
        self.start.here(-(-m // height) * height, inputs, (m, x.stride(0), other.stride(0)), outputs)
        return q, scale, z


def _dense(allocate: Allocate, shape: tuple[int, ...]) -> Tensor:
    return allocate(shape, (shape[1], 1) if len(shape) == 2 else (1,), torch.uint8)


@functools.lru_cache(maxsize=64)
def _prepared(how: Blocks, two_levels: bool, across: int, factors: int = 0) -> Prepared:
    return Prepared(how, two_levels, factors, library()[1], across)


@functools.lru_cache(maxsize=64)
def _of_experts(how: Blocks, two_levels: bool, tight: bool, groups: int, across: int) -> OfExperts:
    return OfExperts(how, two_levels, tight, groups, library()[1], across)


def quant_blocks(
    x: Tensor, how: Blocks, columns: int, global_scale: Tensor | None, matrices: Matrices | None = None
) -> Pair:
    """One kernel for codes and scale bytes.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    device = x.device
    if is_other_device(device):
        with torch.cuda.device(device):
            return quant_blocks(x, how, columns, global_scale, matrices)
    two_levels, allocate = global_scale is not None, allocator(device)
    x = x if x.stride(1) == 1 else x.contiguous()
    step = 0 if global_scale is None or global_scale.numel() == 1 else global_scale.stride(0)
    width = NVFP4_BLOCK if two_levels else MX_BLOCK
    across = power_of_two(
        min(columns // width + (0 if how.layout == LINEAR else -(columns // width) % 4), COLUMNS // width)
    )
    if matrices is None:
        prepared = _prepared(how, two_levels, across, int(step > 0))
        direct = device.index is not None and not HIP and current_config().fast_paths
        return (prepared._again if direct else prepared)(x, columns, global_scale, step, allocate)
    count, offsets, placement = matrices
    if offsets is None:
        return _prepared(how, two_levels, across, 2 * (step > 0))(x, columns, global_scale, step, allocate, count)
    start = _of_experts(how, two_levels, placement == "tight", power_of_two(count), across)
    return start(x, columns, global_scale, step, offsets.contiguous(), allocate)


@functools.lru_cache(maxsize=64)
def _of_norm(how: Blocks, two_levels: bool, cols: int, rounding: str, summed: bool, epsilon: float) -> OfNorm:
    return OfNorm(how, two_levels, cols, rounding, summed, epsilon, library()[1])


def norm_blocks(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    epsilon: float,
    rounding: str,
    how: Blocks,
    global_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One kernel for the norm of each row, its codes and its scale bytes, and the sum.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    if is_other_device(x.device):
        with torch.cuda.device(x.device):
            return norm_blocks(x, weight, residual, epsilon, rounding, how, global_scale)
    x = x if x.stride(1) == 1 else x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    start = _of_norm(how, global_scale is not None, x.shape[1], rounding, residual is not None, epsilon)
    return start(x, weight.contiguous(), residual, global_scale, allocator(x.device))
