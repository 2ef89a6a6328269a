"""Scaling as data: which elements of a tensor share a scale, and in which formats values and scales are stored.

    x[i, j] ~= global_scale * scale[i // rows, j // columns] * value(codes[i, j])

A tensor ``[..., K]`` is seen as the matrix of its last axis by all others together. Blocks of ``r x c`` elements cut a
matrix ``[R, K]`` into ``ceil(R/r) x ceil(K/c)`` blocks; ragged blocks are padded for reductions and cropped afterwards.
How a scale is computed is a matter of recipes (:mod:`oracle.numbers.recipes`), packed scales one of
:mod:`oracle.truth.layout`.

NaN and infinities are moved like every other value; nothing here computes.
Sources: the scale layouts of DeepGEMM (``per_token_cast_to_fp8``, ``per_block_cast_to_fp8``) and vLLM
(``scaled_fp8_quant``); OCP Microscaling Formats 1.0 (blocks of 32); NVFP4: PTX ISA, block scaling of ``mma``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import torch
from torch import Tensor

from oracle.errors import OptionError, ShapeError
from oracle.numbers.formats import E4M3FN, E8M0, FP32, Format


@dataclass(frozen=True)
class Block:
    """Extent of the elements that share a scale; None means the whole extent of that axis."""

    rows: int | None
    columns: int | None

    def __str__(self) -> str:
        return f"{self.rows or 'M'}x{self.columns or 'K'}"


TENSOR: Final = Block(None, None)
TOKEN: Final = Block(1, None)
GROUP_128: Final = Block(1, 128)
GROUP_32: Final = Block(1, 32)
GROUP_16: Final = Block(1, 16)
TILE_128: Final = Block(128, 128)
COLUMN_128: Final = Block(128, 1)


class ScaleFormat(StrEnum):
    """Format of the published scale. INPUT is the dtype of ``x`` (bfloat16 for a bfloat16 input)."""

    FLOAT32 = "float32"
    INPUT = "input"
    UE8M0 = "ue8m0"
    E4M3 = "e4m3"

    def number_format(self, of_input: Format) -> Format:
        """The number format of the scales of an input of that format."""
        formats = {ScaleFormat.FLOAT32: FP32, ScaleFormat.UE8M0: E8M0, ScaleFormat.E4M3: E4M3FN}
        return formats.get(self, of_input)


class Layout(StrEnum):
    """Where the scale of block ``[i, j]`` lies."""

    ROW_MAJOR = "at [i, j]"
    TRANSPOSED = "at [j, i]"

    def place(self, scale: Tensor) -> Tensor:
        """``scale`` ``[blocks down, blocks across]`` of any dtype as this layout stores it, a view of the same dtype:
        ``[blocks across, blocks down]`` where TRANSPOSED. Its own inverse."""
        return scale.mT if self is Layout.TRANSPOSED else scale


@dataclass(frozen=True)
class Grid:
    """The blocks of one tensor shape (:func:`grid`)."""

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
        """``x`` of ``shape``, any dtype, as ``[blocks down, r, blocks across, c]``; ``fill`` fills ragged blocks."""
        down, across = self.count
        pad = (0, across * self.block_columns - self.columns, 0, down * self.block_rows - self.rows)
        matrix = x.reshape(self.rows, self.columns)
        if any(pad):
            matrix = torch.nn.functional.pad(matrix, pad, value=fill)
        return matrix.reshape(down, self.block_rows, across, self.block_columns)

    def join(self, blocks: Tensor) -> Tensor:
        """The inverse of :meth:`split`: ``blocks`` ``[blocks down, r, blocks across, c]`` of any dtype as a contiguous
        tensor of ``shape``."""
        down, across = self.count
        matrix = blocks.reshape(down * self.block_rows, across * self.block_columns)
        return matrix[: self.rows, : self.columns].reshape(self.shape).contiguous()

    def over(self, scale: Tensor) -> Tensor:
        """A ``scale`` of ``scale_shape``, any dtype, as ``[blocks down, 1, blocks across, 1]``, to broadcast against
        blocks."""
        down, across = self.count
        return scale.reshape(down, 1, across, 1)

    def spread(self, scale: Tensor) -> Tensor:
        """A ``scale`` of ``scale_shape``, any dtype, repeated over its elements: of ``shape``, contiguous."""
        down, across = self.count
        return self.join(self.over(scale).expand(down, self.block_rows, across, self.block_columns))


def grid(shape: tuple[int, ...] | torch.Size, block: Block) -> Grid:
    """The blocks of a tensor shape.

    The scale of a block of one row has the shape of the tensor with K replaced by ``ceil(K / c)``; of the
    whole tensor ``[1]``; of any other block ``[ceil(N/r), ceil(K/c)]``, for matrices only.

    Raises ShapeError: the tensor is empty or a scalar, or a block of several rows is asked of a tensor that is no
    matrix.
    """
    shape = tuple(shape)
    if not shape or math.prod(shape) == 0:
        raise ShapeError(f"shape {list(shape)} has no elements along K; pass a tensor [..., K]")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    down, across = block.rows or rows, block.columns or columns
    if block == TENSOR:
        scale_shape: tuple[int, ...] = (1,)
    elif block.rows == 1:
        scale_shape = (*shape[:-1], -(-columns // across))
    elif len(shape) == 2:
        scale_shape = (-(-rows // down), -(-columns // across))
    else:
        raise ShapeError(f"blocks of {block} need a matrix, got shape {list(shape)}; reshape it to [N, K]")
    return Grid(shape, rows, columns, down, across, scale_shape)


_NAMES: Final[Mapping[str, tuple[Block, Layout]]] = {
    "tensor": (TENSOR, Layout.ROW_MAJOR),
    "token": (TOKEN, Layout.ROW_MAJOR),
    "channel": (TOKEN, Layout.TRANSPOSED),
}


@dataclass(frozen=True)
class Scaling:
    """One scaling scheme.

    Attributes
    ----------
    element : format of the codes.
    block : the elements that share a scale.
    scale_format : format of the scales.
    global_scale : whether a float32 scale of the whole tensor multiplies as well (NVFP4).
    layout : where the scale of a block lies in the published tensor.
    """

    element: Format
    block: Block
    scale_format: ScaleFormat = ScaleFormat.FLOAT32
    global_scale: bool = False
    layout: Layout = Layout.ROW_MAJOR

    @property
    def name(self) -> str:
        """How it is called in case ids.

        ``tensor``, ``token`` (a scale for each row, ``[M, 1]``), ``channel`` (the same, stored ``[1, N]``), or the
        block, such as ``1x128``."""
        names = [name for name, pair in _NAMES.items() if pair == (self.block, self.layout)]
        return names[0] if names else str(self.block)

    def named(self, name: str) -> Scaling:
        """The same formats with the blocks (and layout) of that name.

        Raises OptionError: the name is none that :attr:`name` gives.
        """
        if name in _NAMES:
            block, layout = _NAMES[name]
            return replace(self, block=block, layout=layout)
        parts = re.fullmatch(r"(M|[1-9]\d*)x(K|[1-9]\d*)", name)
        if parts is None:
            raise OptionError(f"no scaling is named {name!r}; take {', '.join(_NAMES)} or a block such as 1x128")
        rows, columns = (int(part) if part.isdigit() else None for part in parts.groups())
        return replace(self, block=Block(rows, columns), layout=Layout.ROW_MAJOR)

    def with_scales(self, scale_format: ScaleFormat) -> Scaling:
        """The same blocks with scales of another format."""
        return replace(self, scale_format=scale_format)

    def grid(self, shape: tuple[int, ...] | torch.Size) -> Grid:
        """The blocks of a tensor shape."""
        return grid(shape, self.block)

    def scale_shape(self, shape: tuple[int, ...] | torch.Size) -> tuple[int, ...]:
        """Shape of the published scales of a tensor of that shape."""
        scale = torch.empty(self.grid(shape).scale_shape, dtype=torch.float32, device="meta")
        return tuple(self.layout.place(scale).shape)

    def expand(self, scale: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
        """Published ``scale`` of any dtype repeated over the elements of a tensor of ``shape``; same dtype.

        Raises ShapeError: the scale does not have the shape that this scheme gives (:meth:`scale_shape`).
        """
        if tuple(scale.shape) != self.scale_shape(shape):
            raise ShapeError(
                f"scale has shape {list(scale.shape)}; {self.name} scales of a tensor {list(shape)} have shape "
                f"{list(self.scale_shape(shape))}"
            )
        return self.grid(shape).spread(self.layout.place(scale))


E4M3_TENSOR: Final = Scaling(E4M3FN, TENSOR)
E4M3_TOKEN: Final = Scaling(E4M3FN, TOKEN)
E4M3_1X128: Final = Scaling(E4M3FN, GROUP_128)
E4M3_128X128: Final = Scaling(E4M3FN, TILE_128)
E4M3_128X1: Final = Scaling(E4M3FN, COLUMN_128)
E4M3_1X32_UE8M0: Final = Scaling(E4M3FN, GROUP_32, ScaleFormat.UE8M0)
E4M3_1X128_UE8M0: Final = E4M3_1X128.with_scales(ScaleFormat.UE8M0)
E4M3_128X128_UE8M0: Final = E4M3_128X128.with_scales(ScaleFormat.UE8M0)
E4M3_128X1_UE8M0: Final = E4M3_128X1.with_scales(ScaleFormat.UE8M0)
