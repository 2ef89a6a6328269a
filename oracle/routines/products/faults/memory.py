"""Reading a scale matrix through the wrong layout: what stands at each place of a buffer, and past its end.

All functions take and return matrices ``[M, B]``. ``buffer`` is the memory as the caller wrote it; the index says
where the kernel looks for element ``(m, b)``. A look past the end finds what :class:`~oracle.routines.fault.Beyond` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.routines.base import Beyond
from oracle.routines.fault import Call


def look(call: Call, buffer: Tensor, index: Tensor) -> Tensor:
    """Elements of the flat ``buffer`` at ``index``; past the end, other live data or NaN."""
    length = buffer.numel()
    found = buffer.flatten()[index % length]
    if call.beyond is Beyond.UNKNOWN:
        found = torch.where(index < length, found, torch.full_like(found, torch.nan))
    return found


def places(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column numbers of a matrix, as ``[M, 1]`` and ``[1, B]``."""
    rows = torch.arange(scale.shape[0], device=scale.device)[:, None]
    return rows, torch.arange(scale.shape[1], device=scale.device)[None, :]


def align(extent: int, unit: int) -> int:
    """``extent`` rounded up to a multiple of ``unit``."""
    return -(-extent // unit) * unit


def row_major(scale: Tensor, *, lead: int | None = None) -> Tensor:
    """The matrix in memory, rows of ``lead`` elements, the rest zero."""
    lead = scale.shape[1] if lead is None else lead
    return torch.nn.functional.pad(scale, (0, lead - scale.shape[1])).flatten()


def column_major(scale: Tensor, *, lead: int | None = None) -> Tensor:
    """The transpose in memory, columns of ``lead`` elements, the rest zero."""
    return row_major(scale.t(), lead=lead)


def swizzled_index(scale: Tensor, *, tile_rows: int) -> Tensor:
    """Where element (m, b) lies in tiles of ``tile_rows`` x 4 (128: the 32x4x4 interleave; 8: plain rows)."""
    rows, columns = places(scale)
    tiles = align(scale.shape[1], 4) // 4
    tile = (rows // tile_rows) * tiles + columns // 4
    if tile_rows == 128:
        inner = (rows % 32) * 16 + (rows % 128) // 32 * 4 + columns % 4
    else:
        inner = (rows % tile_rows) * 4 + columns % 4
    return tile * tile_rows * 4 + inner


def swizzled(scale: Tensor, *, tile_rows: int) -> Tensor:
    """The matrix in memory in the tiled layout, padding zero."""
    size = align(scale.shape[0], tile_rows) * align(scale.shape[1], 4)
    buffer = torch.zeros(size, dtype=scale.dtype, device=scale.device)
    buffer[swizzled_index(scale, tile_rows=tile_rows).flatten()] = scale.flatten()
    return buffer
