"""Quantisers in plain torch, on any device.

Payloads are contiguous whatever the strides of the input, as those of the compiled quantisers are.

They compute in float32 with true division (a division by a device tensor: torch on CUDA turns a division by a
Python number into a multiplication by its rounded reciprocal).

NaN policy of every quantiser here unless it says otherwise: a NaN poisons the amax, hence the scale and all codes
of its group; an infinity gives an infinite scale, finite members the code 0 and infinite members NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backends._ambient import as_written
from kernels.checks import FP8, FP8_MAX

BLOCK = 128


def fp8_max(like: Tensor) -> Tensor:
    """448 as a float32 scalar on the device of ``like``, so that dividing by it is a true division."""
    return torch.full((), FP8_MAX, dtype=torch.float32, device=like.device)


def saturate(x: Tensor) -> Tensor:
    """Float32 values to E4M3 codes: clamp to +-448 (NaN stays NaN), then round to nearest, ties to even."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def divide_and_saturate(x: Tensor, scale: Tensor) -> Tensor:
    """``sat(x / scale)`` in float32; where the scale is 0 the code is 0 (a group of zeros, or one that underflows)."""
    wide = x.to(torch.float32)
    return saturate(torch.where(scale == 0, torch.zeros_like(wide), wide / scale))


def ceil_to_ue8m0(x: Tensor) -> Tensor:
    """See :func:`kernels.quantize.ceil_to_ue8m0`."""
    bits = x.abs().view(torch.int32)
    up = (bits + 0x7FFFFF) & 0x7F800000
    up = torch.where(bits > 0x7F800000, bits, up)  # NaN keeps its payload
    tiny = torch.where(bits <= 0x00400000, 0x00400000, 0x00800000).to(torch.int32)  # 2**-127 or 2**-126
    return torch.where(bits <= 0x00800000, tiny, up).view(torch.float32)


@as_written
def quant_static(x: Tensor, scale: Tensor) -> Tensor:
    """``q = sat(x / scale)``, ``scale`` a scalar or a row of one."""
    return divide_and_saturate(x.contiguous(), scale.reshape(()))


@as_written
def quant_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic per tensor: ``scale [1] = amax / 448``."""
    x = x.contiguous()
    if x.numel() == 0:
        return x.to(FP8), torch.zeros(1, dtype=torch.float32, device=x.device)
    scale = x.abs().amax().to(torch.float32) / fp8_max(x)
    return divide_and_saturate(x, scale), scale.reshape(1)


@as_written
def quant_token(x: Tensor, scale_ub: Tensor | None) -> tuple[Tensor, Tensor]:
    """Dynamic per token: ``scale [M,1] = max(min(amax, scale_ub) / 448, 1 / (448 * 512))``."""
    x = x.contiguous()
    amax = x.abs().amax(dim=-1, keepdim=True).to(torch.float32)
    if scale_ub is not None:
        amax = torch.minimum(amax, scale_ub.reshape(()).to(torch.float32))
    top = fp8_max(x)
    scale = torch.maximum(amax / top, (top * 512).reciprocal())
    return divide_and_saturate(x, scale), scale


@as_written
def quant_group(
    x: Tensor, group: int, eps: float, ue8m0: bool, layout: str = "row", out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Per row and group of the last axis: ``scale = max(amax, eps) / 448``; ``layout`` row, col or tma."""
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    amax = parts.abs().amax(dim=-1).to(torch.float32).clamp(min=eps)
    scale = amax / fp8_max(x)
    if ue8m0:
        scale = ceil_to_ue8m0(scale)
    q = divide_and_saturate(parts, scale.unsqueeze(-1)).flatten(-2).contiguous()
    if layout != "row":
        scale = column_major(scale, 4 if layout == "tma" else 1)
    return (q if out is None else out.copy_(q)), scale


@as_written
def quant_group_packed(x: Tensor, group: int, eps: float) -> tuple[Tensor, Tensor]:
    """As :func:`quant_group` with UE8M0 scales, four exponents an int32, strides ``(1, align(M, 4))``."""
    q, scale = quant_group(x, group, eps, True)
    return q, pack_ue8m0(scale)


def column_major(scale: Tensor, align: int) -> Tensor:
    """The last two axes exchanged in memory, the leading stride a multiple of ``align``, pad lanes 0."""
    m = scale.shape[-2]
    lanes = scale.new_zeros(*scale.shape[:-2], scale.shape[-1], m + (-m % align))
    view = lanes[..., :m].transpose(-1, -2)
    view.copy_(scale)
    return view


def pack_ue8m0(scale: Tensor) -> Tensor:
    """Exponent bytes of powers of two, four an int32 along the last axis (lowest first), column-major, aligned."""
    exponents = (scale.contiguous().view(torch.int32) >> 23) & 0xFF
    padded = torch.nn.functional.pad(exponents, (0, -scale.shape[-1] % 4))
    words = padded.to(torch.uint8).view(torch.int32)
    return column_major(words, 4)


def cast_blocks(x: Tensor, rows: int, cols: int, floor: float, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """DeepGEMM's cast over ``rows x cols`` blocks: ``scale = max(amax, floor) / 448``, ``q = sat(x * (1/scale))``."""
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

    NaN is left out of the amax (the device takes ``max`` of bf16 with NaN dropped) and keeps its NaN code. Where
    448/amax overflows, ``inv`` is the largest finite value of the dtype of ``x``: a zero beside tiny values is no
    0 * inf.
    """
    m, k = x.shape
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, 0, 0, -m % rows))
    view = padded.view(padded.shape[0] // rows, rows, k // BLOCK, BLOCK)
    magnitude = view.abs()
    amax = torch.where(magnitude.isnan(), torch.zeros_like(magnitude), magnitude).amax(dim=(1, 3), keepdim=True)
    inv = torch.where(amax == 0, torch.ones_like(amax), fp8_max(x) / amax).clamp(max=torch.finfo(x.dtype).max)
    codes = saturate(view * inv).view(padded.shape)[:m].contiguous()
    return codes, inv.reciprocal().view(view.shape[0], view.shape[2])
