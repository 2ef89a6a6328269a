"""Block-scaled products on GPUs without block-scaled instructions: dequantised to bfloat16 in registers (sm80 to sm90).

Any M and N, dense, batched and grouped; see :mod:`kernels.backends._triton_mx`. An operand below 2^-133 or above 2^127
(a code times its scale) is rounded as bfloat16 is, and nothing says so. Under ``TRITON_INTERPRET=1`` the kernel runs on
the CPU. Not covered: tiles tuned for a GPU; Blackwell, whose instructions take the scales themselves.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.backends._launch import Launch, imported
from kernels.backends.declaration import Backend, Rows, Scales

if TYPE_CHECKING:
    from kernels.plan import Problem
    from kernels.platform import Machine

ROWS, COLUMNS, DEPTH = 64, 64, 128
"""Rows, columns and K of a tile; a run of an expert begins at a multiple of the rows."""
FORMATS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.uint8: 2}
KINDS = {torch.float8_e8m0fnu: 0, torch.float8_e4m3fn: 1, torch.float32: 2}
HEIGHTS = {"128x4": 128, "8x4": 8, "linear": 0}


def kernel(p: Problem, machine: Machine) -> str:
    """The kernel that runs."""
    return "mx_kernel"


@functools.cache
def library() -> tuple[ModuleType, bool]:
    """The kernel's module, and whether it runs natively (not under the interpreter)."""
    return imported("kernels.backends._triton_mx", "mx_kernel")


@functools.lru_cache(maxsize=256)
def _prepared(*values: int) -> Launch:
    names = ("MODE", "A", "B", "A_KIND", "B_KIND", "A_TILE", "B_TILE", "A_WIDTH", "B_WIDTH", "ALPHA", "BIAS")
    constants = dict(zip(names, values, strict=True)) | {"BM": ROWS, "BN": COLUMNS, "BK": DEPTH, "STAGES": 2}
    constants["NATIVE"] = library()[1]
    return Launch(library()[0].mx_kernel, constants, num_warps=4)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def mx_product(
    a: Tensor, left: Scales, b: Tensor, right: Scales, out: Tensor, rows: Rows | None, alpha: Tensor | None,
    bias: Tensor | None,
) -> None:  # fmt: skip
    """The product into ``out [R, N]``; rows of no group are left alone."""
    (groups, n, _), m = b.shape, a.shape[0]
    k = a.shape[1] * (2 if a.dtype is torch.uint8 else 1)
    mode, table, tiles = 0, out, -(-m // ROWS)
    if rows is not None and rows.expert is not None:
        mode, table = 1, rows.expert
    elif rows is not None and rows.table is not None:
        mode, table, tiles = 2, rows.table.contiguous(), tiles + groups
    of_alpha = 0 if alpha is None else 1 if alpha.numel() == 1 else 2
    start = _prepared(
        mode, FORMATS[a.dtype], FORMATS[b.dtype], KINDS[left.memory.dtype], KINDS[right.memory.dtype],
        HEIGHTS[left.tile], HEIGHTS[right.tile], left.width, right.width, of_alpha, int(bias is not None),
    )  # fmt: skip
    pointers = (
        _bytes(a), _bytes(left.memory), _bytes(b), _bytes(right.memory), out, table,
        out if alpha is None else alpha, out if bias is None else bias,
    )  # fmt: skip
    start(tiles * -(-n // COLUMNS), pointers, (m, n, k, groups))


def missing(p: Problem, machine: Machine) -> str | None:
    """Triton may be installed and not load."""
    library()
    return None


BACKEND = Backend(name="triton_mx", kernel=kernel, missing=missing, mx_product=mx_product)
