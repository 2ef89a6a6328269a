"""Block-scaled products on GPUs without block-scaled instructions: dequantised to bfloat16 (sm80 to sm90).

Any M and N, dense, batched and grouped by rows or by K; see :mod:`kernels.backends._triton_mx`. The rows of ``a``, and
the weight of a dense product of many, are written as bfloat16 once, so that a tile decodes no operand that others
decode too; values and sums are the same either way. An operand below 2^-133 or above 2^127 (a scale, or a code times
its scale) is rounded as bfloat16 is, and nothing says so. Under ``TRITON_INTERPRET=1`` the kernels run on the CPU. Not
covered: Blackwell, whose instructions take the scales themselves.

Source: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import functools
from math import inf
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..platform import current_machine
from ..records import Machine, Problem
from ..support import SPARE, shared_memory
from ._launch import Launch, imported, loads
from .declaration import Backend, Product, Scales


class Tile(NamedTuple):
    """How a product is cut and compiled.

    Attributes
    ----------
    rows, columns, depth : of a tile of the output, and K of a step.
    stages : steps in flight, as many as fit the shared memory.
    warps : int
    """

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int = 4


class Cut(NamedTuple):
    """The tile of products up to so many rows, and which operands are written as bfloat16 first."""

    most: float
    tile: Tile
    wide_a: bool
    wide_b: bool


CUTS = (
    Cut(16, Tile(16, 64, 256, 4), True, False),
    Cut(128, Tile(64, 64, 128, 3), True, False),
    Cut(1024, Tile(128, 128, 64, 4, 8), True, True),
    Cut(inf, Tile(256, 128, 64, 4, 8), True, True),
)
"""By the rows of a product, or of a group on average; ``tests/hardware/mx_products.py --tune`` times tiles on an H200.

No tile has fewer than 64 columns: those of 32 become mma.sync instead of wgmma, and one of some thousand outputs on an
H200 had other bits than ``sm90.bf16.dequantised`` says. All others had those.
"""
GROUPED, BY_DEPTH = Cut(inf, Tile(128, 128, 128, 3, 8), True, False), Cut(inf, Tile(16, 64, 128, 4), False, False)
"""For many rows of groups, whose weights stay codes; for groups of K."""
WIDENED = Tile(32, 0, 256, 1)
FORMATS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.uint8: 2, torch.bfloat16: 3}
KINDS = {torch.float8_e8m0fnu: 0, torch.float8_e4m3fn: 1, torch.float32: 2}
LINEAR = "linear"
HEIGHTS = {"128x4": 128, "8x4": 8, LINEAR: 0}
BYTES = (1.0, 1.0, 0.5, 2.0)
"""Of a code, by its format."""
DENSE, LISTED, TABLED, DEEP = range(4)
"""Modes of the kernels."""


def kernel(p: Problem, machine: Machine) -> str:
    """The kernel that runs."""
    return "mx_kernel"


@functools.cache
def library() -> tuple[ModuleType, bool]:
    """The kernel's module, and whether it runs natively (not under the interpreter)."""
    return imported("._triton_mx", "mx_kernel")


def cut_for(m: int, groups: int, mode: int) -> Cut:
    """The entry of :data:`CUTS` for ``m`` rows in so many groups."""
    if mode == DEEP:
        return BY_DEPTH
    cut = next(cut for cut in CUTS if m <= cut.most * (groups if mode else 1))
    return GROUPED if mode != DENSE and cut.wide_b else cut


@functools.lru_cache(maxsize=256)
def _prepared(kernel: str, tile: Tile, sm: int, *values: int) -> Launch:
    """The kernel of this name with the constants that its own ones follow."""
    module, native = library()
    names: tuple[str, ...] = ("MODE", "FORMAT", "KIND", "TILE", "WIDTH")
    cut = {"BM": tile.rows, "BK": tile.depth}
    if kernel == "mx_kernel":
        names = ("MODE", "A", "B", "A_KIND", "B_KIND", "A_TILE", "B_TILE", "A_WIDTH", "B_WIDTH", "ALPHA", "BIAS", "ADD")
        stages = _stages(tile, sm, values[1], values[2])
        cut = {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "STAGES": stages}
    constants = dict(zip(names, values, strict=True)) | cut | {"NATIVE": native}
    return Launch(getattr(module, kernel), constants, num_warps=tile.warps)


def _stages(tile: Tile, sm: int, a: int, b: int) -> int:
    """The tile's, or as many as fit the shared memory beside what is decoded."""
    parts = ((tile.rows, a), (tile.columns, b))
    each = tile.depth * sum(rows * BYTES[of] for rows, of in parts)
    decoded = tile.depth * sum(rows * BYTES[-1] for rows, of in parts if of < len(BYTES) - 1)
    return max(1, min(tile.stages, int((shared_memory(sm) - SPARE - decoded) / each)))


def _words(x: Tensor) -> Tensor:
    """Codes, or scales in tiles, four bytes each, on an address that words lie on."""
    flat = x.reshape(-1).view(torch.uint8)
    flat = flat[: flat.numel() // 4 * 4]
    return (flat if flat.data_ptr() % 16 == 0 else flat.clone()).view(torch.int32)


def _memory(scales: Scales) -> Tensor:
    """The scales as the kernels read them."""
    if scales.tile != LINEAR:
        return _words(scales.memory)
    return scales.memory if scales.memory.dtype is torch.float32 else scales.memory.view(torch.uint8)


def _constants(x: Tensor, scales: Scales) -> tuple[int, int, int, int]:
    """Format, kind of scales, rows of their tiles, and codes that share one."""
    if x.dtype is torch.bfloat16:
        return FORMATS[x.dtype], 0, 0, 1
    return FORMATS[x.dtype], KINDS[scales.memory.dtype], HEIGHTS[scales.tile], scales.width


def _values(x: Tensor, scales: Scales, k: int, mode: int, table: Tensor, groups: int) -> Tensor:
    """``x [R, K]`` as bfloat16; rows of no group are whatever was there."""
    out = torch.empty(x.shape[0], k, dtype=torch.bfloat16, device=x.device)
    start = _prepared("mx_values", WIDENED, 0, mode, *_constants(x, scales))
    tiles = -(-x.shape[0] // WIDENED.rows) + (groups if mode == TABLED else 0)
    start(tiles * -(-k // WIDENED.depth), (_words(x), _memory(scales), out, table), (x.shape[0], k, groups))
    return out


def mx_product(p: Product) -> None:
    """The product into ``out [R, N]``; rows of no group are left alone.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    a, left, b, right, out, rows, alpha, bias, accumulate = p
    (groups, n, _), m = b.shape, a.shape[0]
    k = a.shape[1] * (2 if a.dtype is torch.uint8 else 1)
    mode, table = DENSE, out
    if rows is not None and rows.expert is not None:
        mode, table = LISTED, rows.expert
    elif rows is not None and rows.table is not None:
        mode, table = TABLED, rows.table.contiguous()
    elif rows is not None and rows.depth is not None:
        mode, table, groups = DEEP, rows.depth.contiguous(), rows.depth.shape[1]
    _, tile, wide_a, wide_b = cut_for(m, groups, mode)
    x = _values(a, left, k, DENSE if mode == LISTED else mode, table, groups) if wide_a else a
    w = _values(b[0], right, k, DENSE, out, 1) if wide_b else b
    of_a, of_b = _constants(x, left), _constants(w, right)
    of_alpha = 0 if alpha is None else 1 if alpha.numel() == 1 else 3 if mode == DENSE else 2
    pairs = (value for pair in zip(of_a, of_b, strict=True) for value in pair)
    flags = of_alpha, int(bias is not None), int(accumulate)
    start = _prepared("mx_kernel", tile, current_machine().sm, mode, *pairs, *flags)
    pointers = (
        x if wide_a else _words(x),
        _memory(left),
        w if wide_b else _words(w),
        _memory(right),
        out,
        table,
        out if alpha is None else alpha,
        out if bias is None else bias,
    )
    tiles = -(-m // tile.rows) * (groups if mode == DEEP else 1) + (groups if mode == TABLED else 0)
    start(tiles * -(-n // tile.columns), pointers, (m, n, k, groups))


BACKEND = Backend(name="triton_mx", kernel=kernel, missing=loads(library), mx_product=mx_product)
