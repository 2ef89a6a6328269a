"""The softmax of rows on a device, and whole walks of problems with few rows, many at once: Triton kernels that give
the bits of :mod:`oracle.tensorcore.attention`.

A decode has a few rows for each of hundreds of heads of keys; each alone would start dozens of operations.

NaN and infinities are those of :mod:`oracle.tensorcore.triton_attention`. Source: derived from
:mod:`oracle.tensorcore.attention`. Needs triton. Not covered, and answered by :func:`supports`: pipelines that are
faults.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oracle.numbers import mufu
from oracle.tensorcore import triton_attention as kernels
from oracle.tensorcore.instructions import instruction

if TYPE_CHECKING:
    from oracle.tensorcore.attention import Pipeline

INSTRUCTION = "sm90.wgmma.fp8"
ROWS, COLUMNS, KEYS = 32, 64, 128
"""Rows of a program of the softmax, columns of one of the sums of P V, and keys of one of the scores."""
SQUARES = 19
"""``square(n)`` has no lower bits."""
WARPS = 4
_INSTRUCTION = (instruction(INSTRUCTION).group, instruction(INSTRUCTION).out_bits)
"""Products of a fused sum; fraction bits of its addends and of its result."""


def supports(scores: Tensor, pipeline: Pipeline) -> bool:
    """Whether the kernels compute ``scores`` ``[R, N]``, float32, by ``pipeline``."""
    plain = pipeline.rescales and not (pipeline.lag or pipeline.sums_codes or pipeline.framed)
    return plain and runs_on(scores.device)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels are meant for it; Triton's interpreter runs them on CPU tensors too, for tests."""
    return device.type == "cuda"


def softmax_rows(
    scores: Tensor, start: Tensor, stop: Tensor, c: Tensor, tiles: list[slice], pipeline: Pipeline
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``x`` and codes of P ``[R, N]``, the factors ``a`` ``[T, R]`` (1 in the first tile), lanes ``[R, 4]`` and the
    last maximum ``[R]``: float32, codes uint8.

    ``scores`` ``[R, N]`` and ``c`` ``[R]`` are float32, ``start`` and ``stop`` ``[R]`` int64; ``tiles`` in the order of
    the walk. A NaN score makes its row sum NaN and has the code 0x7F."""
    (rows, keys), device = scores.shape, scores.device
    x = torch.empty((rows, keys), dtype=torch.float32, device=device)
    codes = torch.empty((rows, keys), dtype=torch.uint8, device=device)
    factors, lanes, top = (
        torch.empty(extent, dtype=torch.float32, device=device) for extent in ((len(tiles), rows), (rows, 4), (rows,))
    )
    kernels.softmax[(-(-rows // ROWS),)](
        scores.contiguous(), start.contiguous(), stop.contiguous(), c.contiguous(), _spans(tiles, device),
        *_tables(device), x, codes, factors, lanes, top, rows, keys, len(tiles), LIFT=pipeline.lift, GAIN=pipeline.gain,
        BIAS=mufu.BIAS[mufu.POWER], BR=ROWS, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip  # the tensors, then the extents, then the constants
    return x, codes, factors, lanes, top


def scores(q: Tensor, k: Tensor) -> Tensor:
    """The chains over the products of codes ``q`` ``[Z, R, D]`` and ``k`` ``[Z, N, D]``, E4M3 or their bytes: float32
    ``[Z, R, N]``, NaN where a code is."""
    (several, rows, depth), keys = q.shape, k.shape[1]
    out = torch.empty((several, rows, keys), dtype=torch.float32, device=q.device)
    height = _height(rows)
    kernels.chains[(several, -(-rows // height), -(-keys // KEYS))](
        _bytes(q), _bytes(k), out, rows, keys, depth, *_INSTRUCTION, BM=height, BN=KEYS,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip  # the tensors, then the extents, then the constants
    return out


def sums(codes: Tensor, v: Tensor, factors: Tensor, tiles: list[slice], *, promoted: bool) -> Tensor:
    """``O`` before it is divided, float32 ``[Z, R, Dv]``, of P, ``codes`` ``[Z, R, N]``, and ``v`` ``[Z, N, Dv]``, E4M3
    or their bytes, and ``factors`` ``[T, Z R]``, float32; NaN where a code is."""
    (several, rows, keys), width = codes.shape, v.shape[2]
    out = torch.empty((several, rows, width), dtype=torch.float32, device=v.device)
    height = _height(rows)
    kernels.weighted[(several, -(-rows // height), -(-width // COLUMNS))](
        _bytes(codes), _bytes(v), factors, _spans(tiles, v.device), out, rows, keys, width, len(tiles),
        promoted, *_INSTRUCTION, BM=height, BN=COLUMNS, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip  # the tensors, then the extents, then the constants
    return out


def _height(rows: int) -> int:
    """Rows of a program: at most 16, a power of two."""
    return min(16, 1 << max(0, rows - 1).bit_length())


def _bytes(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


def _spans(tiles: list[slice], device: torch.device) -> Tensor:
    return torch.tensor([(tile.start, tile.stop) for tile in tiles], dtype=torch.int64, device=device)


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows of ``ex2`` int64 ``[3, 64]``, and the squares ``[2^17]`` without their lower bits, int32."""
    squares = (mufu.power_squares() >> SQUARES).to(torch.int32)
    return mufu.power_rows().to(device), squares.to(device)
