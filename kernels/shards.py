"""Weights of fused shards and the scales a checkpoint brings: dequantise, requantise, spread, reinterpret.

Fused projections (QKV, gate and up) arrive as shards with a scalar scale each; kernels want one scale for all, or
one per channel.

Not covered: block scales, biases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import checks
from kernels.backends import eager
from kernels.checks import FP8, WIDE
from kernels.errors import InputError, ShapeError

UNLOADED = torch.finfo(FP8).min
"""Value of a weight scale that no checkpoint has filled (vLLM's sentinel)."""


def per_tensor_dequantize(q: Tensor, inv_scale: float | Tensor) -> Tensor:
    """``float16(q * inv_scale)``: dequantise through float16, as vLLM does (whose name ``inv_scale`` is).

    The product is taken in float32 and rounded once. Products beyond 65504 become infinite and below ``2**-25``
    zero: a weight that needs such a scale cannot take this road.

    Parameters
    ----------
    q
        E4M3, any shape.
    inv_scale
        One float32 value or a Python float.

    Returns
    -------
    Tensor
        float16, the shape of ``q``.
    """
    checks.dtype("q", checks.tensor("q", q), FP8)
    if isinstance(inv_scale, Tensor):
        checks.scalar("inv_scale", inv_scale)
        checks.same_device(q=q, inv_scale=inv_scale)
        factor = inv_scale.reshape(())
    elif isinstance(inv_scale, int | float) and not isinstance(inv_scale, bool):
        factor = torch.tensor(inv_scale, dtype=torch.float32, device=q.device)
    else:
        raise InputError(f"inv_scale must be a float or a tensor of one float32, got {type(inv_scale).__name__}")
    return (q.to(torch.float32) * factor).to(torch.float16)


def all_close_1d(x: Tensor) -> bool:
    """Whether all entries of a vector are close to the first (rtol 1e-5, atol 1e-8; NaN is close to nothing).

    An empty vector is close. Other ranks are a :class:`ShapeError`.
    """
    checks.dtype("x", checks.rank("x", x, 1), *WIDE, torch.float64)
    if checks.concrete("x", x).numel() == 0:
        return True
    return bool(torch.isclose(x, x[:1].expand_as(x)).all())


def convert_to_channelwise(weight_scale: Tensor, logical_widths: Sequence[int]) -> Tensor:
    """Repeat each shard's scalar over its rows.

    Parameters
    ----------
    weight_scale
        ``[shards]`` float32.
    logical_widths
        Rows of each shard.

    Returns
    -------
    Tensor
        ``[sum(widths), 1]`` float32.
    """
    widths = _shards(weight_scale, logical_widths)
    repeats = torch.tensor(widths, dtype=torch.int64, device=weight_scale.device)
    return weight_scale.repeat_interleave(repeats, output_size=sum(widths)).unsqueeze(1)


def requantize_with_max_scale(
    weight: Tensor, weight_scale: Tensor, logical_widths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Bring fused shards (QKV, gate and up) to one scale, their maximum.

    Each shard is dequantised with its own scale (through float16, :func:`per_tensor_dequantize`) and requantised
    with the maximum, only when every shard has a scale of its own: a checkpoint fused on disk leaves the last
    scale at ``finfo(float8_e4m3fn).min``, and then the payload is returned as it is.

    Parameters
    ----------
    weight
        ``[sum(widths), K]`` E4M3. Never written to.
    weight_scale
        ``[shards]`` float32.

    Returns
    -------
    max_scale, weight
        A float32 scalar and E4M3 ``[sum(widths), K]``.
    """
    checks.dtype("weight", checks.rank("weight", weight, 2), FP8)
    widths = _shards(weight_scale, logical_widths)
    checks.same_device(weight=weight, weight_scale=weight_scale)
    if sum(widths) != weight.shape[0]:
        raise ShapeError(f"logical_widths sum to {sum(widths)} but weight has {weight.shape[0]} rows")
    top = checks.concrete("weight_scale", weight_scale).max()
    if not bool(weight_scale[-1] > UNLOADED):
        return top, weight
    shards = [
        eager.quant_static(per_tensor_dequantize(part, own), top)
        for part, own in zip(torch.split(weight, widths), weight_scale.unbind(), strict=True)
    ]
    return top, torch.cat(shards)


def normalize_e4m3fn_to_e4m3fnuz(
    weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Reinterpret E4M3FN codes as E4M3FNUZ (AMD gfx942), doubling the scales: the same bits mean half the value.

    Bit pattern 0x80 (-0 in fn, NaN in fnuz) becomes 0; every other code keeps its bits. The fn NaN codes 0x7F and 0xFF
    are finite in fnuz (+-240): a checkpoint with NaN weights must be refused before. Nothing is written in place.

    Returns
    -------
    weight, weight_scale, input_scale
        ``weight`` float8_e4m3fnuz, ``2 * weight_scale``, ``2 * input_scale`` or None.
    """
    checks.dtype("weight", checks.tensor("weight", weight), FP8)
    checks.tensor("weight_scale", weight_scale)
    codes = weight.view(torch.uint8)
    codes = torch.where(codes == 0x80, torch.zeros_like(codes), codes)
    doubled = None if input_scale is None else checks.tensor("input_scale", input_scale) * 2.0
    return codes.view(torch.float8_e4m3fnuz), weight_scale * 2.0, doubled


def _shards(weight_scale: Tensor, logical_widths: Sequence[int]) -> list[int]:
    checks.dtype("weight_scale", checks.rank("weight_scale", weight_scale, 1), torch.float32)
    widths = [checks.positive("logical_widths", w) for w in checks.integers("logical_widths", logical_widths)]
    if not widths or len(widths) != weight_scale.shape[0]:
        raise ShapeError(f"weight_scale has {weight_scale.shape[0]} entries for {len(widths)} shards")
    return widths
