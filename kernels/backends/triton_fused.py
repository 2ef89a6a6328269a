"""Fused quantisers in Triton: silu-and-mul and RMS norm, with the quantisers of :mod:`kernels.backends.triton_quant`.

The quantiser's bits are those of plain torch for the value that it gets; the value itself errs as the device's
exponential and reciprocal square root do. Under ``TRITON_INTERPRET=1`` they run on the CPU.
"""

from __future__ import annotations

import functools
import struct
from types import ModuleType

import torch
from torch import Tensor

from kernels.backends._launch import Launch, imported
from kernels.checks import FP8
from kernels.support import BLOCK

ELEMENTS, WARPS = 2048, 4
"""Elements of one program of the gated kernel, and its warps."""
PART, PART_WARPS = 1024, 4
"""Columns of a row that the norm reads at once, and the warps that share a row."""
ROUNDINGS = {"none": 0, "product": 1, "each": 2, "plain": 3}
SCALE_FLOOR = 1.0 / (448.0 * 512.0)


@functools.cache
def library() -> tuple[ModuleType, bool]:
    """The kernels, and whether they run natively (not under the interpreter)."""
    return imported("kernels.backends._triton_fused", "gated_kernel")


@functools.lru_cache(maxsize=256)
def _prepared(kernel: str, num_warps: int, **constants: object) -> Launch:
    return Launch(getattr(library()[0], kernel), constants, num_warps=num_warps)


def gated_static(x: Tensor, scale: Tensor, rounding: str) -> Tensor:
    """``q = sat(value / scale)``."""
    return _gated(x, BLOCK, rounding, 3, scale=scale)[0]


def gated_group(
    x: Tensor, group: int, rounding: str, amax_floor: float, scale_floor: float, scale_ub: Tensor | None, ue8m0: bool,
    transposed: bool, masked_m: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``scale = max(min(max(amax, amax_floor) / 448, scale_ub), scale_floor)`` of each group; rows in use only."""
    return _gated(
        x, group, rounding, int(ue8m0), amax_floor=amax_floor, scale_floor=scale_floor, scale_ub=scale_ub,
        transposed=transposed, masked_m=masked_m,
    )  # fmt: skip


def gated_group_bf16(x: Tensor, amax_floor: float, masked_m: Tensor) -> tuple[Tensor, Tensor]:
    """Every step in bfloat16: ``scale = amax * (1/448)``, codes of ``value * (1/scale)``."""
    floor = float(torch.tensor(amax_floor, dtype=torch.bfloat16, device="cpu"))
    return _gated(x, BLOCK, "each", 2, amax_floor=floor, masked_m=masked_m)


def _gated(
    x: Tensor, group: int, rounding: str, mode: int, *, scale: Tensor | None = None, amax_floor: float = 0.0,
    scale_floor: float = 0.0, scale_ub: Tensor | None = None, transposed: bool = False, masked_m: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    native, width = library()[1], x.shape[-1] if rounding == "plain" else x.shape[-1] // 2
    tokens, matrix = x.shape[-2], x.reshape(-1, x.shape[-1])
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    rows, groups = matrix.shape[0], -(-width // group)
    q = torch.empty(*x.shape[:-1], width, dtype=FP8, device=x.device)
    if scale is None:
        scale = torch.empty((groups, rows) if transposed else (rows, groups), dtype=torch.float32, device=x.device)
    if rows:
        lanes = _power_of_two(group)
        block = max(1, ELEMENTS // lanes)
        start = _prepared(
            "gated_kernel", WARPS, GROUP=group, LANES=lanes, BLOCK=block, ROUNDING=ROUNDINGS[rounding], MODE=mode,
            BOUNDED=scale_ub is not None, MASKED=masked_m is not None, TRANSPOSED=transposed, EPS=_bits(amax_floor),
            FLOOR=_bits(scale_floor), NATIVE=native,
        )  # fmt: skip
        bound, used = scale if scale_ub is None else scale_ub.reshape(1), scale if masked_m is None else masked_m
        pointers = matrix, q if native else q.view(torch.uint8), scale, bound, used
        start(-(-rows * groups // block), pointers, (rows, width, matrix.stride(0), tokens))
    return q, scale.t() if transposed else scale.view(*x.shape[:-1], -1) if mode < 3 else scale


def norm_static(
    x: Tensor, weight: Tensor, residual: Tensor | None, scale: Tensor, epsilon: float, rounding: str, rounded_sum: bool
) -> tuple[Tensor, Tensor | None]:
    """``q = sat(norm / scale)``, and the sum."""
    q, _, z = _norm(x, weight, residual, epsilon, x.shape[1], rounding == "each", rounded_sum, scale, None, False)
    return q, z


def norm_group(
    x: Tensor, weight: Tensor, residual: Tensor | None, epsilon: float, group: int, scale_ub: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """``scale = max(min(amax, scale_ub) / 448, 1 / (448 * 512))`` of each group, and the sum."""
    return _norm(x, weight, residual, epsilon, group, True, False, None, scale_ub, transposed)


def _norm(
    x: Tensor, weight: Tensor, residual: Tensor | None, epsilon: float, group: int, rounded: bool, rounded_sum: bool,
    given: Tensor | None, scale_ub: Tensor | None, transposed: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    native, (rows, cols) = library()[1], x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    groups = -(-cols // group)
    q, z = torch.empty(rows, cols, dtype=FP8, device=x.device), None
    scale = given
    if scale is None:
        scale = torch.empty((groups, rows) if transposed else (rows, groups), dtype=torch.float32, device=x.device)
    if residual is not None:
        residual = residual if residual.stride(1) == 1 else residual.contiguous()
        z = torch.empty(rows, cols, dtype=x.dtype, device=x.device)
    if rows:
        whole = given is not None or groups == 1  # one scale: parts need not be groups
        width = PART if whole else group
        lanes = _power_of_two(width)
        start = _prepared(
            "norm_kernel", PART_WARPS, GROUP=width, LANES=lanes, GROUPS=(down := max(1, PART // lanes)),
            PARTS=-(-cols // (width * down)), ROUNDED=rounded,
            SUM=0 if residual is None else 1 + rounded_sum, MODE=3 if given is not None else int(whole),
            BOUNDED=scale_ub is not None, TRANSPOSED=transposed, EPSILON=_bits(epsilon), FLOOR=_bits(SCALE_FLOOR),
            NATIVE=native,
        )  # fmt: skip
        other, kept = (x, x) if residual is None or z is None else (residual, z)
        bound = scale if scale_ub is None else scale_ub.reshape(1)
        pointers = x, weight.contiguous(), other, kept, q if native else q.view(torch.uint8), scale, bound
        start(rows, pointers, (rows, cols, x.stride(0), other.stride(0)))
    return q, scale.t() if transposed else scale, z


def rope(
    rotated: Tensor, other: Tensor, cos_sin_cache: Tensor, pos_ids: Tensor, is_neox: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """``sat((x cos - partner sin) * factor)`` and ``sat(other * factor)``."""
    native = library()[1]
    x, y = (t if t.dim() == 3 else t.unsqueeze(1) for t in (rotated, other))
    x, y = (t if t.stride(2) == 1 else t.contiguous() for t in (x, y))
    tokens, heads, depth, width = *x.shape, y.shape[2]
    q, p = (torch.empty(t.shape, dtype=FP8, device=t.device) for t in (rotated, other))
    if tokens * heads:
        lanes, others = _power_of_two(depth), _power_of_two(max(width, 1))
        block = max(1, ELEMENTS // 2 // max(lanes, others))
        start = _prepared(
            "rope_kernel", 4, DEPTH=depth, LANES=lanes, WIDTH=width, OTHERS=others, BLOCK=block, NEOX=is_neox,
            FACTOR=_bits(factor), NATIVE=native,
        )  # fmt: skip
        codes = (q, p) if native else (q.view(torch.uint8), p.view(torch.uint8))
        pointers = x, y, cos_sin_cache.contiguous(), pos_ids.contiguous(), *codes
        strides = x.stride(0), x.stride(1), y.stride(0), y.stride(1)
        start(-(-tokens * heads // block), pointers, (tokens * heads, heads, *strides))
    return q, p


def _bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
