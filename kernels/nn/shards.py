"""Pieces of quantised weights, cut for a rank and placed on the grid of their scales.

A weight ``[N, K]`` has one scale for all of it (``tensor``), for each row (``channel``) or for each 128x128 block
(``block``). A kernel counts blocks from the first row and column of what it is given. A piece that starts inside a
block is therefore placed behind as many rows (columns) of zero codes as lie before it in its first block: the local
grid is the global one, and every element keeps its scale. Zero codes add exactly zero to a product.

    global columns   0 ........ 128 ........ 256 ........ 384      rank 1 of 2 holds [192, 384)
    local columns               0 0 0 0 x x x|x x x x x x x        64 zeros, then 192 columns; blocks 1 and 2

Fused projections (qkv, gate and up) are pieces of one weight, each on its own grid: a piece that does not fill its last
block is followed by zeros up to the next.

Not covered: zero points, groups along K only, blocks of another size.

NaN and infinity: codes and scales are moved; a scale that is not finite is refused where it is read.
Source: vLLM's parallel linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..checks import FP8
from ..errors import DtypeError, OptionError, ShapeError, ValueRangeError, shown
from ..layout import align, ceil_div
from ..routes import dtype_name
from ..support import BLOCK

KINDS = ("tensor", "channel", "block")
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
"""Dtypes of stored scales; float32 holds all their values (E8M0: 2^-127 to 2^127 and NaN, OCP MX 1.0, 5.4.1)."""
GEMM_ROWS = {"tensor": 16, "channel": 16, "block": 64}
"""Multiple of the rows that every library's product takes (rows of ``kernels.support.NEEDS``)."""
GEMM_COLUMNS = {"tensor": 16, "channel": 16, "block": BLOCK}
"""The same for the columns."""
Span = tuple[int, int]
"""``[start, stop)`` along an axis."""


class Source(Protocol):
    """A tensor, or one that is read from a file when it is indexed."""

    @property
    def shape(self) -> Sequence[int]:
        """The whole extents."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in store."""

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """A part of it."""


@dataclass(frozen=True)
class Shard:
    """A whole stored weight with its scale, and the part of it that is wanted."""

    name: str
    weight: Source
    scale: Source
    rows: Span
    columns: Span


@dataclass(frozen=True)
class Layout:
    """Where the pieces of a weight lie: ``pieces`` along the rows, ``columns`` real ones behind ``lead`` zeros."""

    kind: str
    pieces: tuple[Span, ...]
    height: int
    lead: int
    columns: int
    width: int

    @property
    def blocks(self) -> tuple[int, int]:
        """The shape of the scale."""
        scales = {
            "tensor": (1, 1),
            "channel": (self.height, 1),
            "block": (ceil_div(self.height, BLOCK), self.width // BLOCK),
        }
        return scales[self.kind]

    @property
    def gapless(self) -> bool:
        """No padding among the rows."""
        ends = (0, *(stop for _, stop in self.pieces))
        return ends == (*(start for start, _ in self.pieces), self.height)

    @property
    def plain(self) -> bool:
        """No padding at all."""
        return self.gapless and self.columns == self.width

    def describe(self) -> str:
        """For messages."""
        rows = " + ".join(f"[{start}, {stop})" for start, stop in self.pieces)
        return f"{self.kind} scales, rows {rows} of {self.height}, {self.columns} columns behind {self.lead}"


def lay_out(kind: str, shards: Sequence[Shard], *, rows: int | None = None, every: int | None = None) -> Layout:
    """The layout of some pieces; ``rows`` and ``every`` are multiples for the last piece and for those before it.

    Raises
    ------
    ShapeError
        The pieces have different columns, or none.
    """
    step = BLOCK if kind == "block" else 1
    columns = shards[0].columns
    for shard in shards:
        if shard.columns != columns:
            raise ShapeError(
                f"{shard.name} has columns {shard.columns}, {shards[0].name} has {columns}; fuse equal ones"
            )
    pieces, at = [], 0
    for shard in shards:
        at = align(at, every or step)
        start = at + shard.rows[0] % step
        at = start + shard.rows[1] - shard.rows[0]
        pieces.append((start, at))
    lead = columns[0] % step
    width = align(lead + columns[1] - columns[0], GEMM_COLUMNS[kind])
    return Layout(kind, tuple(pieces), align(at, rows or GEMM_ROWS[kind]), lead, columns[1] - columns[0], width)


def fill(layout: Layout, shards: Sequence[Shard], weight: Tensor | None, scale: Tensor) -> None:
    """Write the pieces into ``weight [height, width]`` (zeros) and ``scale`` (ones, of the shape ``layout.blocks``).

    Codes E4M3, scales float32.
    """
    across = slice(layout.lead, layout.lead + layout.columns)
    for shard, (start, stop) in zip(shards, layout.pieces, strict=True):
        if weight is not None:
            part = shard.weight[slice(*shard.rows), slice(*shard.columns)]
            weight.view(torch.uint8)[start:stop, across] = part.contiguous().view(torch.uint8).to(weight.device)
        part = read_scale(shard, layout.kind)
        if layout.kind == "block":
            first, blocks = start // BLOCK, part.shape[0]
            scale[first : first + blocks] = part.to(scale.device)
        elif layout.kind == "channel":
            scale[start:stop] = part.to(scale.device)
        else:
            scale.copy_(part)


def read_scale(shard: Shard, kind: str) -> Tensor:
    """The shard's scales in float32: ``[blocks, blocks]``, ``[rows, 1]`` (a scalar is repeated) or ``[1, 1]``.

    Raises
    ------
    ValueRangeError
        One is negative, infinite or NaN: no quantiser writes such a scale; it was read with a wrong dtype.
    """
    shape = tuple(shard.scale.shape)
    if kind == "block":
        blocks = tuple(slice(start // BLOCK, ceil_div(stop, BLOCK)) for start, stop in (shard.rows, shard.columns))
        index = blocks if len(shape) == 2 else (blocks[0], slice(None), blocks[1], slice(None))
        part = shard.scale[index].reshape(blocks[0].stop - blocks[0].start, -1)
    elif scalar(shape):
        part = whole(shard.scale).reshape(1, 1)
        part = part.expand(shard.rows[1] - shard.rows[0], 1) if kind == "channel" else part
    else:
        part = shard.scale[(slice(*shard.rows),)].reshape(-1, 1)
    return finite(f"the scale of {shard.name}", part.to(torch.float32))


def finite(name: str, scale: Tensor) -> Tensor:
    """``scale``, when every value is finite and not negative; on meta it has none.

    ``scale`` float32 of any shape; returns ``scale`` unchanged, of the same shape.

    Raises ValueRangeError.
    """
    if scale.is_meta:
        return scale
    good = torch.isfinite(scale) & (scale >= 0)
    if not bool(good.all()):
        at = (~good).nonzero()[0].tolist()
        raise ValueRangeError(
            f"{name} holds {scale[tuple(at)].item()} at {at}, and {int((~good).sum())} such values of {scale.numel()}; "
            f"a scale is finite and positive: read it with the dtype it was stored in"
        )
    return scale


def check(shard: Shard, kind: str) -> Shard:
    """The shard, when its weight and its scale fit each other and ``kind``.

    Raises
    ------
    DtypeError, ShapeError, OptionError
    """
    if kind not in KINDS:
        raise OptionError(f"kind={shown(kind)}; scales are per {', '.join(KINDS)}")
    name, shape, scales = shard.name, tuple(shard.weight.shape), tuple(shard.scale.shape)
    if shard.weight.dtype != FP8:
        raise DtypeError(
            f"the weight of {name} is {dtype_name(shard.weight.dtype)}, not float8_e4m3fn; "
            "an unquantised weight belongs in torch.nn.Linear"
        )
    if shard.scale.dtype not in SCALES:
        wanted = ", ".join(dtype_name(dtype) for dtype in SCALES)
        bytes_ = "; view bytes of E8M0 as torch.float8_e8m0fnu" if shard.scale.dtype == torch.uint8 else ""
        raise DtypeError(f"the scale of {name} is {dtype_name(shard.scale.dtype)}; it is one of {wanted}{bytes_}")
    if len(shape) != 2 or 0 in shape:
        raise ShapeError(f"the weight of {name} has shape {list(shape)}; it is [N, K], neither of them 0")
    for axis, (start, stop), extent in zip(("rows", "columns"), (shard.rows, shard.columns), shape, strict=True):
        if not 0 <= start < stop <= extent:
            raise ShapeError(f"{axis} [{start}, {stop}) of {name} are not within its {extent}")
    n, k = shape
    blocks = (ceil_div(n, BLOCK), ceil_div(k, BLOCK))
    fits = {
        "tensor": scalar(scales),
        "channel": scales in ((n,), (n, 1)) or scalar(scales),
        "block": scales in (blocks, (blocks[0], 1, blocks[1], 1)),
    }
    if not fits[kind]:
        wanted = {"tensor": "one value", "channel": f"[{n}] or [{n}, 1]", "block": f"{list(blocks)}"}[kind]
        turned = "; it is transposed" if kind == "block" and scales == blocks[::-1] else ""
        raise ShapeError(
            f"the scale of {name} has shape {list(scales)}; per {kind} of {list(shape)} it is {wanted}{turned}"
        )
    return shard


def kind_of(name: str, weight: Source, scale: Source) -> str:
    """The kind that the shapes say.

    Raises
    ------
    OptionError
        They say two: a weight of one block, or of one row, with one scale.
    """
    scales = tuple(scale.shape)
    n, k = tuple(weight.shape) if len(weight.shape) == 2 else (0, 0)
    blocks = (ceil_div(n, BLOCK), ceil_div(k, BLOCK))
    fitting = {
        "tensor": scalar(scales),
        "channel": scales in ((n,), (n, 1)),
        "block": scales in (blocks, (blocks[0], 1, blocks[1], 1)),
    }
    kinds = [kind for kind, fits in fitting.items() if fits]
    if len(kinds) > 1:
        raise OptionError(
            f"the scale {list(scales)} of {name} {[n, k]} can be per {' or per '.join(kinds)}; say which with kind="
        )
    return kinds[0] if kinds else "block"  # check() says what a block scale would be


def share(name: str, axis: str, size: int, rank: int, world: int) -> Span:
    """The part of an axis that belongs to a rank, all parts being equal.

    Raises
    ------
    ShapeError, OptionError
        The axis does not divide by the number of ranks, or there is no such rank.
    """
    for option, value in (("rank", rank), ("world", world)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise OptionError(f"{option} must be an integer, got {shown(value)}")
    if world < 1 or not 0 <= rank < world:
        raise OptionError(f"rank={rank} of world={world}; ranks run from 0 to world - 1")
    if size % world:
        raise ShapeError(f"the {size} {axis} of {name} do not divide by world={world}; choose a divisor of {size}")
    return rank * (size // world), (rank + 1) * (size // world)


def scalar(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape holds one value."""
    return all(extent == 1 for extent in shape)


def whole(source: Source) -> Tensor:
    """Everything that a source holds.

    Returns E4M3 codes and float32 scales of the shape of the whole weight.
    """
    return source[(slice(None),) * len(source.shape)]
