"""Scales in tiles, as block-scaled MMA instructions read them: 128x4 and 8x4.

    128x4   element (m, c) at ((m // 128) T + c // 4) 512 + (m % 32) 16 + (m % 128 // 32) 4 + c % 4
    8x4     element (m, c) at ((m // 8) T + c // 4) 32 + (m % 8) 4 + c % 4

with ``T = ceil(C / 4)`` tiles across; rows are padded to the tile's height and columns to 4.
Sources: NVIDIA cuBLAS documentation, "1D block scaling factors layout" (128x4); TensorRT-LLM
quantization_utils.cuh ``get_sf_out_offset_8x4``. Not covered: what the scales mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.errors import OptionError, ShapeError
from oracle.truth.layout.tokens import align, ceil_div

HEIGHTS = {"128x4": 128, "8x4": 8}
WIDTH = 4


def swizzle_offsets(rows: int, columns: int, *, tile: str) -> Tensor:
    """Offset of every element, int64 ``[rows, columns]``; injective.

    Raises
    ------
    OptionError
        No tile has this name.
    """
    if tile not in HEIGHTS:
        raise OptionError(f"no tile {tile!r}; there are {', '.join(HEIGHTS)}")
    height = HEIGHTS[tile]
    m = torch.arange(rows, device="cpu")[:, None]
    c = torch.arange(columns, device="cpu")[None, :]
    first = (m // height * ceil_div(columns, WIDTH) + c // WIDTH) * (height * WIDTH)
    if height == 8:
        return first + m % 8 * 4 + c % 4
    return first + m % 32 * 16 + m % 128 // 32 * 4 + c % 4


def swizzle_scale(scale: Tensor, *, tile: str = "128x4", fill: int = 0) -> Tensor:
    """Scales ``[M, C]`` or ``[G, M, C]`` in tiles, flat per group.

    Parameters
    ----------
    scale : Tensor of a 1-byte dtype (uint8, E8M0, E4M3)
    fill : int
        Byte written to the padding.

    Returns
    -------
    Tensor
        Same dtype, ``[align(M, 128 or 8) * align(C, 4)]``, with a leading ``G`` for groups.
    """
    _bytes("scale", scale)
    rows, columns = scale.shape[-2:]
    offsets = swizzle_offsets(rows, columns, tile=tile).flatten().to(scale.device)
    size = align(rows, HEIGHTS[tile]) * align(columns, WIDTH)
    memory = torch.full((*scale.shape[:-2], size), fill, dtype=torch.uint8, device=scale.device)
    memory[..., offsets] = scale.view(torch.uint8).flatten(-2)
    return memory.view(scale.dtype)


def unswizzle_scale(memory: Tensor, rows: int, columns: int, *, tile: str = "128x4") -> Tensor:
    """The inverse: ``[rows, columns]`` (``[G, rows, columns]``), contiguous; padding is not read.

    Raises
    ------
    ShapeError
        The memory is not that of ``rows x columns`` scales.
    """
    offsets = swizzle_offsets(rows, columns, tile=tile).flatten().to(memory.device)
    size = align(rows, HEIGHTS[tile]) * align(columns, WIDTH)
    if memory.element_size() != 1 or memory.dim() not in (1, 2) or memory.shape[-1] != size:
        raise ShapeError(
            f"the {tile} layout of {rows} x {columns} scales is [{size}] bytes (with a leading G for groups), not "
            f"{list(memory.shape)} of {memory.dtype}"
        )
    flat = memory.view(torch.uint8)[..., offsets]
    return flat.reshape(*memory.shape[:-1], rows, columns).view(memory.dtype)


def _bytes(name: str, x: Tensor) -> None:
    if x.element_size() != 1 or x.dim() not in (2, 3):
        raise ShapeError(f"{name} is {x.dtype} {list(x.shape)}; pass [M, C] or [G, M, C] of a 1-byte dtype")
