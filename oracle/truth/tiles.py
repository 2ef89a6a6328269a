"""Where block scales of several matrices lie in tiles: batches, experts, groups along K, and their padding.

A tile is 128 rows by 4 columns (:func:`oracle.truth.layout.swizzle_offsets`). Every map sends a scale to a byte of its
own, and padding is what no scale maps to. With ``p_i`` the row of ``scale`` at which expert ``i`` starts, ``m_i`` its
rows, ``R`` all rows and ``G`` the number of experts, its tiles start at row

    tight        sum of align(m_j, 128), j < i        torchao and PyTorch's scaled_grouped_mm, vLLM's blockscale_offsets
    flashinfer   floor((p_i + 127 i) / 128) 128       FlashInfer's group_gemm_*_nt_groupwise
    masked       i align(capacity, 128)               experts with room for ``capacity`` rows, of which m_i are filled

of a matrix of ``floor((R + 127 G) / 128) 128`` rows (masked: ``G align(capacity, 128)``), which holds any of them. The
three differ as soon as an expert's rows are no multiple of 128. Groups along K have columns of their own: those of
group ``j`` are swizzled by themselves and begin at byte ``align(M, 128) * sum of align(c_i, 4), i < j``, in memory for
``align(M, 128) * (C + 4 G)`` bytes.

Packed UE8M0 by groups along K: word ``(w, m)`` of group ``j`` holds the exponent bytes of its scales ``4 w + i``; no
word holds two groups, and bytes past a group's last scale are 0.
NaN codes are moved like every other byte.

Sources: torchao mx_formats/utils.py to_blocked and from_blocked, moe_training mxfp8_grouped_mm
torch_to_blocked_2d_M_groups and torch_to_blocked_2d_K_groups; FlashInfer block_scale_interleave and
gemm_groupwise_sm100 (@fb28d7242); vLLM csrc blockscale_offsets; DeepGEMM smxx_layout.cuh pack_fp32_into_ue8m0
(@54e2261).
Not covered: the permuted view that FlashInfer's masked quantisers return.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oracle.errors import InputError, OptionError, ShapeError
from oracle.truth.layout import (
    BLOCK,
    PACK,
    WIDTH,
    align,
    ceil_div,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    row_order,
    swizzle_offsets,
    swizzle_scale,
    unswizzle_scale,
)

PLACEMENTS = ("tight", "flashinfer", "masked")
GRANULARITIES = (32, 128)


def to_blocked(scale: Tensor) -> Tensor:
    """``scale`` ``[M, C]`` (or ``[G, M, C]``: each matrix by itself) of one byte in tiles of 128x4, flat, of the same
    dtype; zeros in the padding. Raises ShapeError."""
    return swizzle_scale(scale)


def from_blocked(memory: Tensor, rows: int, columns: int, tile: str = "128x4") -> Tensor:
    """The inverse: ``memory`` ``[bytes]`` (with a leading ``G``) of a 1-byte dtype as ``[rows, columns]`` of it,
    contiguous; padding is not read. Raises ShapeError, OptionError."""
    return unswizzle_scale(memory, rows, columns, tile=tile)


def expert_starts(first: Sequence[int], rows: Sequence[int], placement: str, capacity: int = 0) -> list[int]:
    """The row at which each expert's tiles start. Raises OptionError: there is no such placement."""
    if placement == "tight":
        ends = [0]
        for count in rows:
            ends.append(ends[-1] + align(count, BLOCK))
        return ends[:-1]
    if placement == "flashinfer":
        return [(p + (BLOCK - 1) * i) // BLOCK * BLOCK for i, p in enumerate(first)]
    if placement == "masked":
        return [i * align(capacity, BLOCK) for i in range(len(first))]
    raise OptionError(f"no placement {placement!r}; there are {', '.join(PLACEMENTS)}")


def expert_offsets(
    scale: Tensor, first: Tensor, rows: Tensor, placement: str, capacity: int = 0
) -> tuple[Tensor, Tensor, int]:
    """Rows of ``scale [R, C]`` that belong to an expert (int64 ``[rows]``), the offsets of their bytes (int64 ``[rows,
    C]``), and the bytes in all.

    ``first``, ``rows``: ``[G]`` integers, experts in ascending order, none beyond the next. Raises ShapeError,
    InputError, OptionError.
    """
    if scale.element_size() != 1 or scale.dim() != 2:
        raise ShapeError(f"scale is {scale.dtype} {list(scale.shape)}; pass [R, C] of a 1-byte dtype")
    starts, counts = first.tolist(), rows.tolist()
    if len(starts) != len(counts) or not starts:
        raise ShapeError(f"first has {len(starts)} experts and rows {len(counts)}; pass one entry for each expert")
    for i, (p, m, end) in enumerate(zip(starts, counts, [*starts[1:], scale.shape[0]], strict=True)):
        if p < 0 or m < 0 or p + m > end:
            raise InputError(f"expert {i} has rows [{p}, {p + m}) but the next begins at {end}; none may overlap")
        if placement == "masked" and (m > capacity or p != i * capacity):
            raise InputError(f"expert {i} has {m} rows from {p}; a capacity of {capacity} puts it at {i * capacity}")
    columns = scale.shape[1]
    if placement == "masked":
        height = len(starts) * align(capacity, BLOCK)
    else:
        height = (scale.shape[0] + (BLOCK - 1) * len(starts)) // BLOCK * BLOCK
    everywhere = swizzle_offsets(height, columns, tile="128x4")
    placed = zip(expert_starts(starts, counts, placement, capacity), starts, counts, strict=True)
    pairs = [(torch.arange(p, p + m, device="cpu"), at - p) for at, p, m in placed]
    source, target = torch.cat([row for row, _ in pairs]), torch.cat([row + shift for row, shift in pairs])
    return source, everywhere[target], height * align(columns, WIDTH)


def swizzle_scale_experts(
    scale: Tensor, first: Tensor, rows: Tensor, placement: str = "tight", capacity: int = 0, *, fill: int = 0
) -> Tensor:
    """``scale`` ``[R, C]`` of one byte, each expert in tiles of its own; flat, of the same dtype, ``fill`` in padding
    and gaps.

    ``first``, ``rows``: ``[G]`` integers. Unassigned rows are dropped. Raises ShapeError, InputError, OptionError.
    """
    source, offsets, size = expert_offsets(scale, first, rows, placement, capacity)
    memory = torch.full((size,), fill, dtype=torch.uint8, device=scale.device)
    memory[offsets.to(scale.device)] = scale.view(torch.uint8)[source.to(scale.device)]
    return memory.view(scale.dtype)


def shuffle_matrix_sf_a(scale: Tensor, epilogue_tile_m: int = BLOCK) -> Tensor:
    """``scale`` ``[M, C]`` of one byte with its rows in the order of :func:`oracle.truth.layout.shuffle_matrix_a`, then
    in tiles of 128x4: flat, of the same dtype, zeros behind the last column. Raises ShapeError: M is no multiple of
    128; OptionError."""
    if scale.element_size() != 1 or scale.dim() != 2 or scale.shape[0] % BLOCK:
        raise ShapeError(f"scale is {scale.dtype} {list(scale.shape)}; pass [M, C] of a 1-byte dtype, M % {BLOCK} == 0")
    order = row_order(scale.shape[0], epilogue_tile_m=epilogue_tile_m)
    return swizzle_scale(scale.view(torch.uint8)[order.to(scale.device)]).view(scale.dtype)


def to_blocked_k_groups(scale: Tensor, ends: Tensor) -> Tensor:
    """``scale`` ``[M, C]`` of one byte whose columns belong to groups, ``ends [G]`` the column after each; each group
    in tiles of its own: flat, of the same dtype, zeros in all padding. Raises ShapeError, InputError."""
    if scale.element_size() != 1 or scale.dim() != 2:
        raise ShapeError(f"scale is {scale.dtype} {list(scale.shape)}; pass [M, C] of a 1-byte dtype")
    borders = [0, *ends.tolist()]
    if sorted(borders) != borders or borders[-1] != scale.shape[1]:
        raise InputError(f"ends {borders[1:]} must ascend to the {scale.shape[1]} columns of scale")
    height, codes = align(scale.shape[0], BLOCK), scale.view(torch.uint8)
    memory = torch.zeros(height * (scale.shape[1] + WIDTH * len(ends)), dtype=torch.uint8, device=scale.device)
    at = 0
    for start, stop in zip(borders, borders[1:], strict=False):
        if stop > start:
            part = swizzle_scale(codes[:, start:stop])
            memory[at : at + part.numel()] = part
            at += part.numel()
    return memory.view(scale.dtype)


def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(scale: Tensor, ks: Tensor, gran_k: int = BLOCK) -> Tensor:
    """Exponent bytes of four consecutive K blocks of one group in an int32, row-major.

    Parameters
    ----------
    scale : Tensor ``[S, MN]`` float32 powers of two, the rows of group ``j`` its ``ceil(ks[j] / gran_k)`` K blocks.
    ks : Tensor ``[G]``, K of each group.

    Returns int32 ``[sum of ceil(ks[j] / (4 gran_k)), MN]``, contiguous. Raises ShapeError, OptionError; InputError: a
    scale is no power of two.
    """
    if gran_k not in GRANULARITIES:
        raise OptionError(f"gran_k={gran_k}: DeepGEMM packs scales of {' or '.join(map(str, GRANULARITIES))} elements")
    counts = [ceil_div(k, gran_k) for k in ks.tolist()]
    if scale.dim() != 2 or scale.shape[0] != sum(counts) or scale.shape[1] % PACK:
        raise ShapeError(
            f"scale is {list(scale.shape)}; K of groups {ks.tolist()} in blocks of {gran_k} take "
            f"[{sum(counts)}, MN] with MN a multiple of {PACK}"
        )
    words = [
        get_mn_major_tma_aligned_packed_ue8m0_tensor(part.t().contiguous()).t()
        for part in torch.split(scale, counts)
        if part.shape[0]
    ]
    return torch.cat([torch.empty((0, scale.shape[1]), dtype=torch.int32, device=scale.device), *words]).contiguous()
