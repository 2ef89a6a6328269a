"""Scales and codes of weights as a checkpoint stores them: fused shards, channel scales, FNUZ.

    convert_to_channelwise      scale of shard i repeated widths[i] times, float32 [sum(widths), 1]
    requantize_with_max_scale   s = max(scales); codes of shard i = quantise(dequantise(codes, s_i), s)
    normalize to FNUZ           the same bits, -0 (NaN in FNUZ) replaced by 0, scales doubled

E4M3FN and E4M3FNUZ differ by one in the exponent bias, so the value of every code but NaN and -0 halves. The NaN codes
of FN, 0x7F and 0xFF, are 240 and -240 in FNUZ (480 and -480 with the doubled scale): NaN becomes finite.
Sources: vLLM quantization/utils/w8a8_utils.py; OCP OFP8 1.0; arXiv 2206.02915. Not covered: layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from oracle.errors import DtypeError, ShapeError
from oracle.numbers.formats import E4M3FN, codes_of, decode, from_codes
from oracle.numbers.quantize import f32, per_tensor_dequantize, quantize
from oracle.numbers.recipes import TORCH_STATIC, Recipe
from oracle.numbers.rounding import Overflow, Rounding, to_dtype

UNLOADED = -448.0
"""A shard's scale as initialised, ``finfo(float8_e4m3fn).min``: there was one scale on disk for all shards."""


def convert_to_channelwise(weight_scale: Tensor, logical_widths: Sequence[int]) -> Tensor:
    """The scale of each shard repeated over its rows, float32 ``[sum(logical_widths), 1]``; values, NaN too, are
    copied.

    ``weight_scale [shards]`` float32. Raises DtypeError: another dtype; ShapeError when it does not hold one scale for
    each shard.
    """
    widths = _widths(weight_scale, logical_widths)
    counts = torch.tensor(widths, dtype=torch.int64, device=weight_scale.device)
    return weight_scale.reshape(-1).repeat_interleave(counts)[:, None].contiguous()


def requantize_with_max_scale(
    weight: Tensor, weight_scale: Tensor, logical_widths: Sequence[int], *, recipe: Recipe = TORCH_STATIC
) -> tuple[Tensor, Tensor]:
    """Fused shards requantised with one scale, the largest.

    Parameters
    ----------
    weight : Tensor ``[N, K]``, float8_e4m3fn, ``N >= sum(logical_widths)``
    weight_scale : Tensor ``[shards]``, float32
    recipe : a static one: how a shard is quantised with the given scale.

    Notes
    -----
    Dequantisation goes through float16 (:func:`oracle.numbers.quantize.per_tensor_dequantize`): a shard whose values
    exceed 65504 saturates at 448 times the maximum scale. NaN codes follow the recipe; a NaN scale makes the
    maximum and every code NaN.

    Returns (max scale, a float32 scalar; weight ``[N, K]`` float8_e4m3fn): the weight is a new tensor, or the given one
    where the last scale is -448 or less (:data:`UNLOADED`, the initial value): then the checkpoint was fused, with one
    scale for all shards, the maximum of which is returned all the same.
    Raises DtypeError, ShapeError: the weight or the scales have another dtype or shape.
    """
    widths = _widths(weight_scale, logical_widths)
    if weight.dtype is not torch.float8_e4m3fn:
        raise DtypeError(f"weight has dtype {weight.dtype}; pass float8_e4m3fn codes")
    if weight.dim() != 2 or weight.shape[0] < sum(widths):
        raise ShapeError(f"weight has shape {list(weight.shape)}; {sum(widths)} rows of shards need [N, K], N >= that")
    scales = weight_scale.reshape(-1)
    largest = scales.max()
    if bool(decode(scales)[-1] <= UNLOADED):
        return largest, weight
    codes = codes_of(weight).clone()
    starts = itertools.accumulate(widths, initial=0)
    for start, width, scale in zip(starts, widths, scales, strict=False):
        rows = slice(start, start + width)
        if width:
            wide = per_tensor_dequantize(weight[rows], scale)
            codes[rows] = codes_of(quantize(wide, recipe, scale=largest).codes)
    return largest, from_codes(codes, E4M3FN)


def all_close_1d(x: Tensor) -> bool:
    """Whether every entry of ``x [S]``, of any float dtype, is close to the first: ``|x_i - x_0| <= 1e-8 + 1e-5
    |x_i|``.

    The tolerances of ``torch.allclose``, which defines the routine, with the first entry as the *input* and each entry
    as the *other*. NaN is close to nothing, an infinity to itself only. Raises ShapeError when ``x`` is no vector.
    """
    if x.dim() != 1:
        raise ShapeError(f"x has shape {list(x.shape)}; all_close_1d takes a vector")
    value = decode(x)
    distance = (value - value[:1]).abs()
    close = torch.isfinite(distance) & (distance <= 1e-8 + 1e-5 * value.abs())
    return bool(((value == value[:1]) | close).all())


def normalize_e4m3fn_to_e4m3fnuz(
    weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """E4M3FN codes read as E4M3FNUZ: the same bits except -0, and doubled scales.

    Parameters
    ----------
    weight : Tensor, float8_e4m3fn, any shape
    weight_scale, input_scale : Tensor, float32, any shape

    Returns
    -------
    (weight as float8_e4m3fnuz, weight scale, input scale or None), each of the same shape
        ``scale * value`` is unchanged for every code but 0x7F and 0xFF: NaN becomes 480 and -480 times the scale.
        A scale above half the largest float32 becomes infinite.

    Raises DtypeError.
    """
    if weight.dtype is not torch.float8_e4m3fn:
        raise DtypeError(f"weight has dtype {weight.dtype}; pass float8_e4m3fn codes")
    bits = codes_of(weight)
    codes = torch.where(bits == 0x80, torch.zeros_like(bits), bits)
    doubled = None if input_scale is None else _doubled("input_scale", input_scale)
    return codes.view(torch.float8_e4m3fnuz), _doubled("weight_scale", weight_scale), doubled


def _doubled(name: str, scale: Tensor) -> Tensor:
    if scale.dtype is not torch.float32:
        raise DtypeError(f"{name} has dtype {scale.dtype}; pass float32")
    return to_dtype(f32(decode(scale) * 2.0), torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def _widths(weight_scale: Tensor, logical_widths: Sequence[int]) -> list[int]:
    widths = [int(width) for width in logical_widths]
    if weight_scale.dtype is not torch.float32:
        raise DtypeError(f"weight_scale has dtype {weight_scale.dtype}; pass float32")
    if not widths or min(widths) < 0:
        raise ShapeError(f"logical_widths={widths}: pass the row count of each shard")
    if weight_scale.numel() != len(widths):
        raise ShapeError(f"weight_scale holds {weight_scale.numel()} scales, logical_widths {len(widths)} shards")
    return widths
