"""The layer's own block-scaled products in Triton, where no library serves them: dense, contiguous, masked.

NVIDIA GPUs from sm80; any M, N and K; bf16, f16 and float32 out. On sm90 the bits are DeepGEMM's
(:mod:`kernels.backends._triton_gemm` says how it adds).

Tiles come from a table, :data:`TILES`, that ``tests/hardware/products.py --tune`` measured on an H200; nothing is tuned
at run time. Under ``TRITON_INTERPRET=1`` the kernel runs on the CPU, where tests judge it.

Not covered: AMD GPUs; a further summand ``c``; rates on other GPUs than the H200 (they were compiled for, not run).

Source: DeepGEMM's sm90 product (sums of 128 products promoted to float32).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..platform import current_machine
from ..records import Machine, Problem
from ..support import BLOCK, E4M3_SM, F16_SM, SPARE, shared_memory
from ._launch import Launch, imported, loads
from .declaration import Backend

DENSE, CONTIGUOUS, MASKED = 0, 1, 2
"""Modes of the kernel."""
ROWS = 64
"""Rows of one dot: those of one wgmma instruction."""
WARPS = 4


class Tile(NamedTuple):
    """How a product is cut and compiled.

    Attributes
    ----------
    columns : int, at most 128, so that a tile has one row of weight scales.
    stages : int, blocks of K in flight.
    pair : bool, two tiles below each other share the weight's tile.
    width : int, tiles of N that are taken for all of M before the next.
    """

    columns: int
    stages: int
    pair: bool = False
    width: int = 8

    @property
    def rows(self) -> int:
        """Rows of the output."""
        return ROWS << self.pair

    def of(self, m: int, n: int) -> int:
        """Tiles of an output ``[m, n]``."""
        return -(-m // self.rows) * -(-n // self.columns)


class Cost(NamedTuple):
    """Microseconds of a launch with one program on every multiprocessor, and with two (None: they do not fit)."""

    one: float
    two: float | None
    sms: range

    def of(self, tiles: int, multiprocessors: int) -> float:
        """Of so many programs: whole waves, then what is left."""
        whole = self.one if self.two is None else self.two
        waves, rest = divmod(tiles, multiprocessors * (1 if self.two is None else 2))
        return waves * whole + (0.0 if rest == 0 else self.one if rest <= multiprocessors else whole)


HOPPER, E4M3, EVERY = range(90, 91), range(E4M3_SM, 1000), range(F16_SM, 1000)
TILES: Mapping[Tile, Cost] = {
    Tile(32, 8): Cost(19.2, 23.8, EVERY),
    Tile(64, 8): Cost(20.9, None, EVERY),
    Tile(64, 6, width=2): Cost(22.4, 25.7, EVERY),
    Tile(128, 4, width=2): Cost(30.4, 36.0, E4M3),
    Tile(64, 4, pair=True, width=2): Cost(30.2, 38.8, E4M3),
    Tile(128, 3, pair=True, width=16): Cost(45.0, 61.0, HOPPER),
}
"""Tiles, their costs on an H200 with K = 7168, and the capabilities whose registers hold their sums."""


def kernel(p: Problem, machine: Machine) -> str:
    """The kernel that runs."""
    return "gemm_kernel"


def steps(p: Problem, machine: Machine) -> tuple[str, ...]:
    """No preparation of operands whose rows are dense: the kernel takes strides."""
    first = ("quantise the input 1x128",) if p.op == "dynamic_blockscale" else ()
    return (*first, "codes to float16 in registers") if machine.sm < E4M3_SM else first


@functools.cache
def library() -> tuple[ModuleType, bool]:
    """The kernel's module, and whether it runs natively (not under the interpreter)."""
    return imported("._triton_gemm", "gemm_kernel")


@functools.lru_cache(maxsize=1024)
def tile_for(m: int, n: int, groups: int, multiprocessors: int, sm: int) -> Tile:
    """The tile of :data:`TILES` that costs least for ``groups`` outputs ``[m, n]``."""
    fits = [tile for tile, cost in TILES.items() if sm in cost.sms]
    return min(fits, key=lambda tile: TILES[tile].of(tile.of(m, n) * groups, max(multiprocessors, 1)))


@functools.lru_cache(maxsize=256)
def _prepared(tile: Tile, mode: int, even: bool, sm: int, native: bool) -> Launch:
    constants = {
        "MODE": mode, "BM": ROWS, "BN": tile.columns, "PAIR": tile.pair, "WIDTH": tile.width,
        "STAGES": _stages(tile, sm), "EVEN": even, "DECODE": sm < E4M3_SM or not native,
    }  # fmt: skip  # the interpreter loads no E4M3
    return Launch(library()[0].gemm_kernel, constants, num_warps=WARPS)


def _stages(tile: Tile, sm: int) -> int:
    """The tile's, or as many as fit the shared memory."""
    return min(tile.stages, (shared_memory(sm) - SPARE) // ((tile.rows + tile.columns) * BLOCK))


def product(mode: int, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, out: Tensor, rows: Tensor, tile: Tile) -> None:
    """The kernel: ``a [M, K]`` or ``[G, M, K]``, ``b [G, N, K]``, ``out`` dense; ``rows`` as ``mode`` says.

    ``sa`` ``[M, K/128]`` and ``sb`` ``[N/128, K/128]`` float32, of groups with G first.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    a, b = _dense_rows(a), _dense_rows(b)
    m, k = a.shape[-2:]
    groups, n = b.shape[:2]
    start = _prepared(tile, mode, k % BLOCK == 0, current_machine().sm, library()[1])
    if start.constants["DECODE"]:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    grouped = sa.stride(0) if mode == MASKED else 0
    strides = a.stride(-2), b.stride(-2), grouped, sa.stride(-2), sa.stride(-1), *sb.stride()
    programs = tile.of(m, n) * (groups if mode == MASKED else 1)
    start(programs, (a, sa, b, sb, out, rows), (m, n, k, *strides))


def _dense_rows(x: Tensor) -> Tensor:
    """``x`` itself when its rows are dense and equally far apart, in all groups; else a copy."""
    whole = x.dim() == 2 or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if x.stride(-1) == 1 and whole else x.clone(memory_format=torch.contiguous_format)


def _tile(m: int, n: int, groups: int) -> Tile:
    machine = current_machine()
    return tile_for(m, n, groups, machine.sms, machine.sm)


def gemm_nt(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None, float_scales: bool
) -> None:
    """Dense product into ``out``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    product(DENSE, a, a_scale, b[None], b_scale[None], out, out, _tile(a.shape[0], b.shape[0], 1))


def block_linear(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``[M, N]``: ``b [K, N]``, ``scale_a [M, K/128]``, ``scale_b [K/128, N/128]``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    gemm_nt(a, scale_a, b.t(), scale_b.t(), out, None, True)
    return out


def grouped_contiguous(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, m_indices: Tensor, float_scales: bool
) -> None:
    """Each row against its expert's weight, into ``out``; rows with index -1 are left alone.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    product(CONTIGUOUS, a, a_scale, b, b_scale, out, m_indices, _tile(a.shape[0], b.shape[1], 1))


def grouped_masked(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    masked_m: Tensor,
    expected_m: int,
    float_scales: bool,
) -> None:
    """The first ``masked_m[g]`` rows of each group, into ``out``; the other rows are left alone.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    product(MASKED, a, a_scale, b, b_scale, out, masked_m, _tile(expected_m, b.shape[1], b.shape[0]))


def alignment() -> int:
    """Rows to which each expert's run is aligned: those of the largest tile."""
    return max(tile.rows for tile in TILES)


BACKEND = Backend(
    name="triton_gemm",
    kernel=kernel,
    steps=steps,
    missing=loads(library),
    gemm_nt=gemm_nt,
    aligned_gemm_nt=gemm_nt,
    block_linear=block_linear,
    grouped_contiguous=grouped_contiguous,
    grouped_masked=grouped_masked,
    alignment=alignment,
)
