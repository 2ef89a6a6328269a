"""Formulas of the quantisers in plain torch, on any device: rounding, saturation, scales, published casts.

Computed in float32 with true division (by a device tensor: torch on CUDA turns a division by a Python number into a
multiplication by its rounded reciprocal). A NaN makes the amax NaN, hence the scale and all codes of its group; an
infinity gives an infinite scale, the code 0 for finite members and NaN for infinite ones.

NaN: a NaN makes the codes and the scale of its group NaN unless a function says otherwise.
Source: the libraries that :mod:`kernels.quantize` names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends._host import column_major
from .checks import FP8, FP8_MAX
from .support import BLOCK


def fp8_max(like: Tensor) -> Tensor:
    """448 as a float32 scalar on the device of ``like``, so that dividing by it is a true division."""
    return torch.full((), FP8_MAX, dtype=torch.float32, device=like.device)


def saturate(x: Tensor) -> Tensor:
    """Float32 values to E4M3 codes: clamp to +-448 (NaN stays NaN), then round to nearest, ties to even.

    ``x`` of any shape; returns E4M3 of the same shape.
    """
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def divide_and_saturate(x: Tensor, scale: Tensor) -> Tensor:
    """``sat(x / scale)`` in float32; a scale of 0 (zeros, or an amax that underflows) gives the code 0.

    ``x`` of any shape, ``scale`` float32 of one that it is broadcast with; returns E4M3 of the same shape as ``x``.
    """
    wide = x.to(torch.float32)
    return saturate(torch.where(scale == 0, torch.zeros_like(wide), wide / scale))


def ceil_to_ue8m0(x: Tensor) -> Tensor:
    """See :func:`kernels.quantize.ceil_to_ue8m0`.

    ``x`` float32 of any shape; returns float32 of the same shape.
    """
    bits = x.abs().view(torch.int32)
    up = (bits + 0x7FFFFF) & 0x7F800000
    up = torch.where(bits > 0x7F800000, bits, up)  # NaN keeps its payload
    tiny = torch.where(bits <= 0x00400000, 0x00400000, 0x00800000).to(torch.int32)  # 2**-127 or 2**-126
    return torch.where(bits <= 0x00800000, tiny, up).view(torch.float32)


def pack_ue8m0(scale: Tensor) -> Tensor:
    """Exponent bytes of powers of two, four an int32 along the last axis (lowest first), column-major, aligned.

    ``scale`` ``[..., M, C]`` float32; returns int32 ``[..., M, ceil(C/4)]``.
    """
    exponents = (scale.contiguous().view(torch.int32) >> 23) & 0xFF
    padded = torch.nn.functional.pad(exponents, (0, -scale.shape[-1] % 4))
    words = padded.to(torch.uint8).view(torch.int32)
    return column_major(words, 4)


def unpack_ue8m0(words: Tensor, columns: int) -> Tensor:
    """The float32 scales ``[..., columns]`` of :func:`pack_ue8m0`'s ``words`` ``[..., ceil(columns/4)]`` int32;
    255 is NaN."""
    lanes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)[..., :columns].to(torch.int32)
    bits = torch.where(lanes == 0, 0x00400000, lanes << 23)  # 2**-127 is a float32 subnormal
    return torch.where(lanes == 255, torch.nan, bits.view(torch.float32))


def cast_blocks(x: Tensor, rows: int, cols: int, floor: float, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """DeepGEMM's cast over ``rows x cols`` blocks: ``scale = max(amax, floor) / 448``, ``q = sat(x * (1/scale))``.

    ``x`` ``[M, N]`` bf16, f16 or f32; returns E4M3 ``[M, N]`` and float32 ``[ceil(M/rows), ceil(N/cols)]``.
    """
    m, n = x.shape
    padded = torch.nn.functional.pad(x, (0, -n % cols, 0, -m % rows))
    view = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    amax = view.abs().amax(dim=(1, 3), keepdim=True).to(torch.float32).clamp(min=floor)
    scale = amax / fp8_max(x)
    if ue8m0:
        scale = ceil_to_ue8m0(scale)
    codes = saturate(view.to(torch.float32) * scale.reciprocal())
    return codes.view(padded.shape)[:m, :n].contiguous(), scale.view(view.shape[0], view.shape[2])


def flashinfer_blocks(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """FlashInfer's formula over ``rows x 128`` blocks: ``inv = 448/amax`` (1 for zeros), ``scale = 1/inv``.

    ``x`` ``[M, K]`` bf16, f16 or f32, K a multiple of 128; returns E4M3 ``[M, K]`` and float32 ``[ceil(M/rows),
    K/128]``.

    NaN is left out of the amax (the device's bf16 ``max`` drops it) and keeps its NaN code. Where 448/amax overflows,
    ``inv`` is the largest finite value of the dtype of ``x``, so that a zero beside tiny values gives no 0 * inf.
    """
    m, k = x.shape
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, 0, 0, -m % rows))
    view = padded.view(padded.shape[0] // rows, rows, k // BLOCK, BLOCK)
    magnitude = view.abs()
    amax = torch.where(magnitude.isnan(), torch.zeros_like(magnitude), magnitude).amax(dim=(1, 3), keepdim=True)
    inv = torch.where(amax == 0, torch.ones_like(amax), fp8_max(x) / amax).clamp(max=torch.finfo(x.dtype).max)
    codes = saturate(view * inv).view(padded.shape)[:m].contiguous()
    return codes, inv.reciprocal().view(view.shape[0], view.shape[2])
