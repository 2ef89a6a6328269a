"""Forms of memory that several libraries want or give, for the functions of bindings."""

from __future__ import annotations

import torch
from torch import Tensor


def columns(scale: Tensor) -> Tensor:
    """``scale [R, B]`` float32 in columns of whole groups of four rows, zeros behind the last one.

    Returns ``[R + -R % 4, B]`` float32 of strides ``(1, R + -R % 4)``; values are moved, NaN and infinities too.
    Source: torch's ``scaled_mm``, which refuses other shapes of a scale of 128x128 blocks.
    """
    rows, blocks = scale.shape
    whole = torch.zeros(blocks, rows + -rows % 4, dtype=scale.dtype, device=scale.device)
    whole[:, :rows] = scale.t()
    return whole.t()


def lanes(scale: Tensor) -> Tensor:
    """The rows of ``scale [R, B]`` float32 in :func:`columns`.

    A tile's rows behind a group of K are added to the next one, so that their scales must be numbers. Returns
    ``[R, B]`` float32 of strides ``(1, R + -R % 4)``; values are moved, NaN and infinities too. Source: DeepGEMM's
    ``get_mn_major_tma_aligned_tensor``, and torch's ``scaled_mm``, which refuses other strides.
    """
    return columns(scale)[: scale.shape[0]]


def flat(tiles: Tensor) -> Tensor:
    """The bytes of ``tiles`` of scales, of any shape and a dtype of one byte, one after another: uint8 ``[bytes]``.
    They are moved, NaN too. Source: the contracts of layouts, whose outputs are flat."""
    return tiles.view(torch.uint8).reshape(-1)


LANES = {"lanes": (lanes, lambda scale: scale)}
FLAT = {"flat": (flat, flat)}
