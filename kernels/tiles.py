"""Block scales of several matrices in tiles of 128x4: torch's blocked form, experts in three placements, K groups.

Padding is zero wherever a routine here writes it, so that no kernel that reads whole tiles meets a NaN. Nothing waits
for a GPU: sizes follow from shapes, rows and columns of experts and groups stay on the device.

Sources: torchao mx_formats (to_blocked, from_blocked) and moe_training (M and K groups), vLLM's blockscale_offsets,
FlashInfer's group_gemm, DeepGEMM's smxx_layout. Not covered: the permuted view of FlashInfer's masked quantisers.

NaN and infinity: bytes are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks
from .adapters import Inputs, Options
from .backends._host import take
from .errors import OptionError, ShapeError, shown
from .layout import align, ceil_div, powers_of_two, shuffled_rows, swizzle_scale
from .verbs import verb

HEIGHT, WIDTH = 128, 4
GROUP_PLACEMENTS = ("tight", "flashinfer", "masked")


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _groups_on_host(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """The sizes of the groups lie on the host."""
    return verb(inputs["scale"], inputs["ks"].tolist(), options.get("gran_k", 128))


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb("layout")
def to_blocked(scale: Tensor) -> Tensor:
    """Scales of one byte in tiles of 128x4, flat for each matrix, zeros in the padding.

    ``scale`` ``[M, C]`` or ``[G, M, C]``; returns the dtype of ``scale``, ``[bytes]`` or ``[G, bytes]``.
    """
    return swizzle_scale(scale)


@verb("layout")
def shuffle_matrix_sf_a(scale: Tensor, epilogue_tile_m: int = 128) -> Tensor:
    """Scales ``[M, C]`` of one byte with the rows of :func:`kernels.shuffle_matrix_a`, then as :func:`to_blocked`.

    ``scale`` ``[M, C]``; returns its dtype, flat ``[bytes]``.

    M must be a multiple of 128 (ShapeError).

    Raises InputError, LayoutError.
    """
    rows = checks.multiple("rows", checks.rank("scale", scale, 2).shape[0], HEIGHT, "pad the rows of the scales")
    return swizzle_scale(take(scale, shuffled_rows(rows, epilogue_tile_m, scale.device)))


@verb()
def unshuffle_matrix_sf_a(memory: Tensor, rows: int, columns: int, epilogue_tile_m: int = 128) -> Tensor:
    """The inverse of :func:`shuffle_matrix_sf_a`: scales ``[rows, columns]`` by row and column; padding is not read.

    ``memory`` ``[bytes]`` of a one-byte dtype; returns its dtype. ``rows`` is a multiple of 128 (ShapeError).

    Raises InputError, LayoutError, OptionError.
    """
    checks.multiple("rows", rows, HEIGHT, "pad the rows of the scales")
    matrix = from_blocked(checks.rank("memory", memory, 1), rows, columns)
    return take(matrix, torch.argsort(shuffled_rows(rows, epilogue_tile_m, matrix.device)))


@verb("layout")
def from_blocked(memory: Tensor, rows: int, columns: int, tile: str = "128x4") -> Tensor:
    """The scales of :func:`to_blocked` by row and column, contiguous; padding is not read.

    Returns ``[rows, columns]``, or with G first, of the dtype of ``memory``.

    Parameters
    ----------
    memory
        ``[bytes]`` or ``[G, bytes]`` of a one-byte dtype.
    rows, columns
        Of one matrix.
    tile
        ``128x4`` or ``8x4``.

    Raises
    ------
    InputError, LayoutError, OptionError, ShapeError
    """
    height = {"128x4": 128, "8x4": 8}.get(tile)
    if height is None:
        raise OptionError(f"tile={shown(tile)}: there are 128x4 and 8x4")
    size = align(checks.positive("rows", rows), height) * align(checks.positive("columns", columns), WIDTH)
    if checks.tensor("memory", memory).element_size() != 1 or memory.dim() not in (1, 2) or memory.shape[-1] != size:
        raise ShapeError(
            f"memory is {memory.dtype} {list(memory.shape)}; {rows} x {columns} scales in tiles of {tile} are "
            f"[{size}] or [G, {size}] bytes"
        )
    row = min(32, height)
    shape = (*memory.shape[:-1], ceil_div(rows, height), ceil_div(columns, WIDTH), row, height // row, WIDTH)
    tiles = memory.view(torch.uint8).view(shape)  # [..., down, across, row, group of rows, column]
    matrix = tiles.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1)).flatten(-5, -3).flatten(-2)
    out: Tensor = matrix[..., :rows, :columns].contiguous().view(memory.dtype)
    return out


@verb("layout")
def swizzle_scale_experts(
    scale: Tensor, first: Tensor, rows: Tensor, placement: str = "tight", capacity: int = 0
) -> Tensor:
    """Scales of experts, each in tiles of its own; flat, zeros in padding and gaps.

    Parameters
    ----------
    scale
        ``[R, C]`` of a one-byte dtype; unassigned rows are dropped.
    first, rows
        ``[G]`` integers: the row at which each expert starts, ascending, and how many it has.
    placement
        Where the tiles of expert ``i`` start: ``tight`` (torchao, PyTorch, vLLM: behind those of the last one),
        ``flashinfer`` (``floor((first[i] + 127 i) / 128) 128``) or ``masked`` (``i align(capacity, 128)``).
    capacity
        With ``masked``: rows of ``scale`` for each expert, ``R = G capacity``.

    Returns
    -------
    Tensor
        ``floor((R + 127 G) / 128) 128`` rows of ``align(C, 4)`` bytes; masked: ``G align(capacity, 128)`` rows.
        ``[bytes]`` of the dtype of ``scale``.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError, ValueRangeError
    """
    if checks.rank("scale", scale, 2).element_size() != 1:
        raise ShapeError(f"scale is {scale.dtype}; pass a one-byte dtype")
    groups = checks.dtype("first", checks.rank("first", first, 1), torch.int32, torch.int64).shape[0]
    checks.operand("rows", rows, (groups,), "[G], as first", torch.int32, torch.int64)
    checks.not_negative("capacity", capacity)
    device = checks.same_device(scale=scale, first=first, rows=rows)
    total, columns = scale.shape
    if groups and not is_compiling() and checks.wanted(None, device):
        checks.within("first", None, first, first, (0, total), f"[0, {total}], the rows of scale")
        checks.within("rows", None, rows, rows.sum(), (0, total), f"[0, {total}], the rows of scale, in all")
    i = torch.arange(groups, device=scale.device)
    padded = (rows + HEIGHT - 1) // HEIGHT * HEIGHT
    if placement == "tight":
        starts = torch.cumsum(padded, 0) - padded
    elif placement == "flashinfer":
        starts = (first + (HEIGHT - 1) * i) // HEIGHT * HEIGHT
    elif placement == "masked":
        if checks.positive("capacity", capacity) * groups != total:
            raise ShapeError(f"scale has {total} rows; {groups} experts of {capacity} rows take {groups * capacity}")
        starts = i * align(capacity, HEIGHT)
    else:
        raise OptionError(f"placement={shown(placement)}: there are {', '.join(GROUP_PLACEMENTS)}")
    masked = placement == "masked"
    height = groups * align(capacity, HEIGHT) if masked else (total + (HEIGHT - 1) * groups) // HEIGHT * HEIGHT
    row = torch.arange(total, device=scale.device)
    expert = (torch.searchsorted(first.contiguous(), row, right=True) - 1).clamp(min=0)
    inside = row - first[expert]
    assigned = (inside >= 0) & (inside < rows[expert])
    target = torch.where(assigned, starts[expert] + inside, height).clamp(max=height)  # else: a tile that is cut off
    matrix = torch.zeros((height + HEIGHT, columns), dtype=torch.uint8, device=scale.device)
    matrix[target] = scale.view(torch.uint8)
    return swizzle_scale(matrix[:height]).view(scale.dtype)


@verb("layout")
def to_blocked_k_groups(scale: Tensor, ends: Tensor) -> Tensor:
    """Scales of one byte whose columns belong to groups, each group in tiles of its own; zeros elsewhere.

    ``ends`` ``[G]`` integers.

    Parameters
    ----------
    scale
        ``[M, C]`` of a one-byte dtype; bytes are moved, NaN included.
    ends
        ``[G]`` integers, ascending: the column after each group's last.

    Returns
    -------
    Tensor
        ``align(M, 128) * (C + 4 G)`` bytes, flat: room for any groups, so that no size waits for the device.
        ``[bytes]`` of the dtype of ``scale``.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, ShapeError
    """
    if checks.rank("scale", scale, 2).element_size() != 1:
        raise ShapeError(f"scale is {scale.dtype}; pass a one-byte dtype")
    groups = checks.dtype("ends", checks.rank("ends", ends, 1), torch.int32, torch.int64).shape[0]
    checks.same_device(scale=scale, ends=ends)
    m, c = scale.shape
    height, wide = align(m, HEIGHT), c + WIDTH * groups
    begins = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    widths = (ends - begins + WIDTH - 1) // WIDTH * WIDTH
    starts = (torch.cumsum(widths, 0) - widths) * height
    column, row = torch.arange(c, device=scale.device), torch.arange(m, device=scale.device)[:, None]
    group = torch.searchsorted(ends.contiguous(), column, right=True).clamp(max=groups - 1)
    inside = column - begins[group]
    tile = row // HEIGHT * (widths[group] // WIDTH) + inside // WIDTH
    place = starts[group] + tile * (HEIGHT * WIDTH) + row % 32 * 16 + row % HEIGHT // 32 * WIDTH + inside % WIDTH
    memory = torch.zeros(height * wide, dtype=torch.uint8, device=scale.device)
    memory[place.flatten()] = scale.view(torch.uint8).flatten()
    return memory.view(scale.dtype)


@verb("layout", adapter=_groups_on_host)
def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
    scale: Tensor, ks: Sequence[int], gran_k: int = 128, *, check: bool | None = None
) -> Tensor:
    """Four UE8M0 exponents of consecutive K blocks of one group an int32 (the first in the lowest byte), row-major.

    Parameters
    ----------
    scale
        ``[S, MN]`` float32 powers of two, MN a multiple of 4; group ``j`` has ``ceil(ks[j] / gran_k)`` rows.
    ks
        K of each group, on the host.
    gran_k
        Elements of K that share a scale: 32 or 128.
    check
        As for :func:`kernels.layout.get_mn_major_tma_aligned_packed_ue8m0_tensor`.

    Returns
    -------
    Tensor
        int32 ``[sum of ceil(ks[j] / (4 gran_k)), MN]``; bytes past the last block of a group are 0.

    Raises
    ------
    DtypeError, InputError, LayoutError, OptionError, ShapeError
    """
    if gran_k not in (32, 128):
        raise OptionError(f"gran_k={gran_k} is neither 32 nor 128")
    checks.dtype("scale", checks.rank("scale", scale, 2), torch.float32)
    counts = [ceil_div(k, gran_k) for k in ks]
    checks.multiple("MN", scale.shape[1], WIDTH, "pad the rows of the operand")
    checks.shape("scale", scale, (sum(counts), scale.shape[1]), "[sum of ceil(ks / gran_k), MN]")
    powers_of_two(scale, check)
    exponents = scale.contiguous().view(torch.int32) >> 23
    groups = torch.split(exponents, counts)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, -count % WIDTH)) for x, count in zip(groups, counts, strict=True)]
    rows = torch.cat([exponents[:0], *padded]).view(-1, WIDTH, scale.shape[1])
    return rows[:, 0] | rows[:, 1] << 8 | rows[:, 2] << 16 | rows[:, 3] << 24
