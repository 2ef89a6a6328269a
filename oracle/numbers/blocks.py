"""Blocks of a matrix that share a scale: cutting a tensor into them, and laying a scale over its elements.

A tensor ``[..., K]`` is seen as the matrix of its last axis by all others together, and a block of ``r x c``
elements cuts that matrix into ``ceil(R/r) x ceil(K/c)`` blocks; the ragged ones are filled up for
reductions and cropped afterwards. Not covered: memory layouts of scales (:mod:`oracle.truth.layout`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.errors import ShapeError
from oracle.numbers.recipes import Block


@dataclass(frozen=True)
class Grid:
    """The blocks of one tensor shape."""

    shape: tuple[int, ...]
    rows: int
    columns: int
    block_rows: int
    block_columns: int
    scale_shape: tuple[int, ...]

    @property
    def count(self) -> tuple[int, int]:
        """Blocks down and across."""
        return -(-self.rows // self.block_rows), -(-self.columns // self.block_columns)

    def split(self, x: Tensor, *, fill: float = 0.0) -> Tensor:
        """``x`` of ``shape`` as ``[blocks down, r, blocks across, c]``, ragged blocks filled with ``fill``."""
        down, across = self.count
        pad = (0, across * self.block_columns - self.columns, 0, down * self.block_rows - self.rows)
        matrix = x.reshape(self.rows, self.columns)
        if any(pad):
            matrix = torch.nn.functional.pad(matrix, pad, value=fill)
        return matrix.reshape(down, self.block_rows, across, self.block_columns)

    def join(self, blocks: Tensor) -> Tensor:
        """The inverse of :meth:`split`: contiguous, of ``shape``."""
        down, across = self.count
        matrix = blocks.reshape(down * self.block_rows, across * self.block_columns)
        return matrix[: self.rows, : self.columns].reshape(self.shape).contiguous()

    def over(self, scale: Tensor) -> Tensor:
        """A scale of ``scale_shape`` as ``[blocks down, 1, blocks across, 1]``, to broadcast against blocks."""
        down, across = self.count
        return scale.reshape(down, 1, across, 1)

    def spread(self, scale: Tensor) -> Tensor:
        """A scale of ``scale_shape`` repeated over its elements: ``shape``."""
        down, across = self.count
        return self.join(self.over(scale).expand(down, self.block_rows, across, self.block_columns))


def grid(shape: tuple[int, ...] | torch.Size, block: Block) -> Grid:
    """The blocks of a tensor shape.

    The scale of a block of one row has the shape of the tensor with K replaced by ``ceil(K / c)``; of the
    whole tensor ``[1]``; of any other block ``[ceil(N/r), ceil(K/c)]``, for matrices only.

    Raises
    ------
    ShapeError
        The tensor is empty or a scalar, or a block of several rows is asked of a tensor that is no matrix.
    """
    shape = tuple(shape)
    if not shape or math.prod(shape) == 0:
        raise ShapeError(f"shape {list(shape)} has no elements along K; pass a tensor [..., K]")
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    if block.rows is None and block.columns is None:
        return Grid(shape, rows, columns, rows, columns, (1,))
    across = block.columns or columns
    if block.rows == 1:
        return Grid(shape, rows, columns, 1, across, (*shape[:-1], -(-columns // across)))
    if len(shape) != 2:
        raise ShapeError(f"blocks of {block} need a matrix, got shape {list(shape)}; reshape it to [N, K]")
    down = block.rows or rows
    return Grid(shape, rows, columns, down, across, (-(-rows // down), -(-columns // across)))
