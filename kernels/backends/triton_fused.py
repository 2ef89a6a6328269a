"""Fused quantisers in Triton: silu-and-mul and RMS norm, with the quantisers of :mod:`kernels.backends.triton_quant`.

The quantiser's bits are those of plain torch for the value that it gets; the value itself errs as the device's
exponential and reciprocal square root do. Under ``TRITON_INTERPRET=1`` they run on the CPU.

Source: the formulas of :mod:`kernels.fused`.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from ..checks import FP8
from ..support import BLOCK
from ._host import allocator, is_other_device
from ._launch import Launch, bits, imported, power_of_two

ELEMENTS, WARPS = 2048, 4
"""Elements of one program of the gated kernel, and its warps."""
PER_THREAD = 32
"""Columns of a row that a thread of the norm holds; at most 16 warps share a row."""
ROUNDINGS = {"none": 0, "product": 1, "each": 2, "plain": 3}
SCALE_FLOOR = 1.0 / (448.0 * 512.0)
LEAST_SHARED = 2.0**-90
"""The least scale that ``_shared_quotient`` takes."""


@functools.cache
def library() -> tuple[ModuleType, bool]:
    """The kernels, and whether they run natively (not under the interpreter)."""
    return imported("._triton_fused", "gated_kernel")


@functools.lru_cache(maxsize=256)
def _prepared(kernel: str, num_warps: int, **constants: object) -> Launch:
    return Launch(getattr(library()[0], kernel), constants, num_warps=num_warps)


def gated_static(x: Tensor, scale: Tensor, rounding: str) -> Tensor:
    """``q = sat(value / scale)``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    return _gated(x, BLOCK, rounding, 3, scale=scale)[0]


def gated_group(
    x: Tensor,
    group: int,
    rounding: str,
    amax_floor: float,
    scale_floor: float,
    scale_ub: Tensor | None,
    ue8m0: bool,
    transposed: bool,
    masked_m: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``scale = max(min(max(amax, amax_floor) / 448, scale_ub), scale_floor)`` of each group; rows in use only.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    return _gated(
        x,
        group,
        rounding,
        int(ue8m0),
        amax_floor=amax_floor,
        scale_floor=scale_floor,
        scale_ub=scale_ub,
        transposed=transposed,
        masked_m=masked_m,
    )


def gated_group_bf16(x: Tensor, amax_floor: float, masked_m: Tensor) -> tuple[Tensor, Tensor]:
    """Every step in bfloat16: ``scale = amax * (1/448)``, codes of ``value * (1/scale)``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    floor = float(torch.tensor(amax_floor, dtype=torch.bfloat16, device="cpu"))
    return _gated(x, BLOCK, "each", 2, amax_floor=floor, masked_m=masked_m)


def _gated(
    x: Tensor,
    group: int,
    rounding: str,
    mode: int,
    *,
    scale: Tensor | None = None,
    amax_floor: float = 0.0,
    scale_floor: float = 0.0,
    scale_ub: Tensor | None = None,
    transposed: bool = False,
    masked_m: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if is_other_device(x.device):
        with torch.cuda.device(x.device):
            return _gated(
                x,
                group,
                rounding,
                mode,
                scale=scale,
                amax_floor=amax_floor,
                scale_floor=scale_floor,
                scale_ub=scale_ub,
                transposed=transposed,
                masked_m=masked_m,
            )
    native, allocate, last, tokens = library()[1], allocator(x.device), x.shape[-1], x.shape[-2]
    matrix = x if x.dim() == 2 else x.reshape(-1, last)
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    width = last if rounding == "plain" else last // 2
    rows, groups = matrix.shape[0], -(-width // group)
    q = allocate((rows, width), (width, 1), FP8)
    if scale is None:
        extents = (groups, rows) if transposed else (rows, groups)
        scale = allocate(extents, (extents[1], 1), torch.float32)
    if rows:
        start = _gated_launch(
            group,
            rounding,
            mode,
            scale_ub is not None,
            masked_m is not None,
            transposed,
            amax_floor,
            scale_floor,
            native,
            ELEMENTS,
            WARPS,
        )
        bound, used = scale if scale_ub is None else scale_ub.reshape(1), scale if masked_m is None else masked_m
        outputs = (q if native else q.view(torch.uint8),)
        programs = -(-rows * groups // max(1, ELEMENTS // power_of_two(group)))
        start.here(programs, (matrix, scale, bound, used), (rows, width, matrix.stride(0), tokens), outputs)
    if x.dim() > 2:
        q = q.view(*x.shape[:-1], width)
        scale = scale.view(*x.shape[:-1], -1) if mode < 3 else scale
    return q, scale.t() if transposed else scale


@functools.lru_cache(maxsize=256)
def _gated_launch(
    group: int,
    rounding: str,
    mode: int,
    bounded: bool,
    masked: bool,
    transposed: bool,
    amax_floor: float,
    scale_floor: float,
    native: bool,
    elements: int,
    warps: int,
) -> Launch:
    lanes = power_of_two(group)
    return _prepared(
        "gated_kernel",
        warps,
        GROUP=group,
        LANES=lanes,
        BLOCK=max(1, elements // lanes),
        ROUNDING=ROUNDINGS[rounding],
        MODE=mode,
        BOUNDED=bounded,
        MASKED=masked,
        TRANSPOSED=transposed,
        EPS=bits(amax_floor),
        FLOOR=bits(scale_floor),
        SHARED=max(amax_floor / 448.0, scale_floor) > LEAST_SHARED,
        NATIVE=native,
    )


def norm_static(
    x: Tensor, weight: Tensor, residual: Tensor | None, scale: Tensor, epsilon: float, rounding: str, rounded_sum: bool
) -> tuple[Tensor, Tensor | None]:
    """``q = sat(norm / scale)``, and the sum.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    q, _, z = _norm(x, weight, residual, epsilon, x.shape[1], rounding, rounded_sum, scale, None, False)
    return q, z


def norm_group(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    epsilon: float,
    group: int,
    scale_ub: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``scale = max(min(amax, scale_ub) / 448, 1 / (448 * 512))`` of each group, and the sum.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    return _norm(x, weight, residual, epsilon, group, "each", False, None, scale_ub, transposed)


def _norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    epsilon: float,
    group: int,
    rounding: str,
    rounded_sum: bool,
    static_scale: Tensor | None,
    scale_ub: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    if is_other_device(x.device):
        with torch.cuda.device(x.device):
            return _norm(x, weight, residual, epsilon, group, rounding, rounded_sum, static_scale, scale_ub, transposed)
    native, (rows, cols), allocate = library()[1], x.shape, allocator(x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    q, scale, z = allocate((rows, cols), (cols, 1), FP8), static_scale, None
    if scale is None:
        groups = -(-cols // group)
        extents = (groups, rows) if transposed else (rows, groups)
        scale = allocate(extents, (extents[1], 1), torch.float32)
    if residual is not None:
        residual = residual if residual.stride(1) == 1 else residual.contiguous()
        z = allocate((rows, cols), (cols, 1), x.dtype)
    if rows:
        start = _norm_launch(
            cols,
            group,
            rounding,
            0 if residual is None else 1 + rounded_sum,
            static_scale is not None,
            scale_ub is not None,
            transposed,
            epsilon,
            native,
            PER_THREAD,
        )
        other, sum_out = (x, x) if residual is None or z is None else (residual, z)
        bound = scale if scale_ub is None else scale_ub.reshape(1)
        read, outputs = (x, weight.contiguous(), other, bound, scale), (sum_out, q if native else q.view(torch.uint8))
        start.here(rows, read, (rows, x.stride(0), other.stride(0)), outputs)
    return q, scale.t() if transposed else scale, z


@functools.lru_cache(maxsize=256)
def _norm_launch(
    cols: int,
    group: int,
    rounding: str,
    summed: int,
    static: bool,
    bounded: bool,
    transposed: bool,
    epsilon: float,
    native: bool,
    per_thread: int,
) -> Launch:
    width = cols if static else group
    lanes, down = power_of_two(width), power_of_two(-(-cols // width))
    return _prepared(
        "norm_kernel",
        min(16, max(1, lanes * down // (32 * per_thread))),
        COLS=cols,
        GROUP=width,
        LANES=lanes,
        GROUPS=down,
        ROUNDING=ROUNDINGS[rounding],
        SUM=summed,
        GIVEN=static,
        BOUNDED=bounded,
        TRANSPOSED=transposed,
        EPSILON=bits(epsilon),
        FLOOR=bits(SCALE_FLOOR),
        NATIVE=native,
    )


def rope(
    rotated: Tensor, other: Tensor, cos_sin_cache: Tensor, pos_ids: Tensor, is_neox: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """``sat((x cos - partner sin) * factor)`` and ``sat(other * factor)``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    native = library()[1]
    x, y = (t if t.dim() == 3 else t.unsqueeze(1) for t in (rotated, other))
    x, y = (t if t.stride(2) == 1 else t.contiguous() for t in (x, y))
    tokens, heads, depth, width = *x.shape, y.shape[2]
    q, p = (torch.empty(t.shape, dtype=FP8, device=t.device) for t in (rotated, other))
    if tokens * heads:
        lanes, others = power_of_two(depth), power_of_two(max(width, 1))
        block = max(1, ELEMENTS // 2 // max(lanes, others))
        start = _prepared(
            "rope_kernel",
            4,
            DEPTH=depth,
            LANES=lanes,
            WIDTH=width,
            OTHERS=others,
            BLOCK=block,
            NEOX=is_neox,
            FACTOR=bits(factor),
            NATIVE=native,
        )
        codes = (q, p) if native else (q.view(torch.uint8), p.view(torch.uint8))
        pointers = x, y, cos_sin_cache.contiguous(), pos_ids.contiguous(), *codes
        strides = x.stride(0), x.stride(1), y.stride(0), y.stride(1)
        start(-(-tokens * heads // block), pointers, (tokens * heads, heads, *strides))
    return q, p
