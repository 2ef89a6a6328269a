"""Scales laid out along MN for TMA: float32 columns at 16-byte strides, and four exponents in one int32.

    column-major TMA-aligned    element (m, c) at offset c * align(M, 4) + m, in float32
    packed UE8M0                byte j of word (m, c) is the exponent byte of scale (m, 4c + j), little endian;
                                words laid out as above; bytes past the last column are 0

The logical shape stays; ``G`` groups stand one after the other. ``C`` is the number of K blocks.
Sources: DeepGEMM deep_gemm/utils/layout.py and smxx_layout.cuh; strides measured on an H200 (``[31, 7]`` float32
becomes int32 ``[31, 2]`` with strides ``(1, 32)``). Not covered: K-grouped layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.errors import DtypeError, InputError, LayoutError, OptionError, ShapeError
from oracle.numbers.formats import codes_of, decode
from oracle.numbers.rounding import exponent_of, power_of_two
from oracle.truth.layout.tokens import align, ceil_div, tma_aligned

BLOCK = 128
PACK = 4
BIAS = 127
ARCHES = ("sm90", "sm100")


def get_col_major_tma_aligned_tensor(scale: Tensor) -> Tensor:
    """Float32 scales as columns at strides of ``align(M, 4)``.

    Parameters
    ----------
    scale : Tensor ``[M, C]`` or ``[G, M, C]``, float32, any strides

    Returns
    -------
    Tensor
        Same shape and bits, strides ``([C * L,] 1, L)`` with ``L = align(M, 4)``; lanes ``M..L-1`` are zero.

    Raises
    ------
    DtypeError, ShapeError
    """
    _matrix_or_group("scale", scale, torch.float32)
    return _columns(scale)


def row_major(x: Tensor) -> Tensor:
    """The inverse of every strided layout here: the logical elements, contiguous; padding is not read."""
    return x.contiguous()


def pad_lanes(x: Tensor) -> Tensor:
    """The padding of a column-major TMA-aligned tensor ``[..., M, C]`` as a view ``[..., L - M, C]``.

    Raises
    ------
    LayoutError
        The memory behind ``x`` ends before the last column's padding does.
    """
    if not has_pad_lanes(x):
        raise LayoutError(f"the memory of x {list(x.shape)} ends before its last column's padding; lay it out again")
    rows = x.shape[-2]
    view = [*x.shape[:-2], tma_aligned(rows, x.element_size()) - rows, x.shape[-1]]
    return x.as_strided(view, x.stride(), x.storage_offset() + rows * x.stride(-2))


def has_pad_lanes(x: Tensor) -> bool:
    """Whether the memory behind a column-major tensor holds the padding of its last column."""
    missing = tma_aligned(x.shape[-2], x.element_size()) - x.shape[-2]
    last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (last + missing + 1) * x.element_size() <= x.untyped_storage().nbytes()


def get_mn_major_tma_aligned_packed_ue8m0_tensor(scale: Tensor) -> Tensor:
    """Exponent bytes of four consecutive K blocks in one int32, words in columns at strides of ``align(M, 4)``.

    Parameters
    ----------
    scale : Tensor ``[M, C]`` or ``[G, M, C]``, float32
        Powers of two from 2^-127 (byte 0) to 2^127 (byte 254).

    Returns
    -------
    Tensor
        int32 ``[..., M, ceil(C / 4)]``, strides ``([...,] 1, align(M, 4))``; padding bytes and lanes are zero.

    Raises
    ------
    DtypeError, ShapeError
    InputError
        An element is no such power of two: any other bit would bleed into a neighbour's byte.
    """
    _matrix_or_group("scale", scale, torch.float32)
    value = decode(scale)
    exponent = exponent_of(value)
    admitted = (value == power_of_two(exponent)) & (exponent >= -BIAS) & (exponent <= BIAS)
    if not bool(admitted.all()):
        index = tuple(torch.nonzero(~admitted)[0].tolist())
        raise InputError(
            f"scale{list(index)} = {float(value[index]):.9g} is no power of two from 2^-127 to 2^127; round the scale "
            "up with ceil_to_ue8m0 and requantise the payload with it before packing"
        )
    columns = scale.shape[-1]
    byte = torch.nn.functional.pad(exponent + BIAS, (0, align(columns, PACK) - columns))
    byte = byte.reshape(*byte.shape[:-1], -1, PACK)
    word = sum((byte[..., j] << (8 * j) for j in range(PACK)), torch.zeros_like(byte[..., 0]))
    # a word above 2**31 is the int32 with the same bits
    signed = torch.where(word >= 1 << 31, word - (1 << 32), word)
    return _columns(signed.to(torch.int32))


def unpack_ue8m0(packed: Tensor, columns: int) -> Tensor:
    """The inverse of packing: float32 powers of two ``[..., M, columns]``, contiguous.

    Raises
    ------
    DtypeError, ShapeError
    InputError
        A byte is 255, which is NaN.
    """
    _matrix_or_group("packed", packed, torch.int32)
    if packed.shape[-1] != ceil_div(columns, PACK):
        raise ShapeError(f"packed has {packed.shape[-1]} words a row; {columns} columns take {ceil_div(columns, PACK)}")
    word = packed.to(torch.int64)
    byte = torch.stack([(word >> (8 * j)) & 0xFF for j in range(PACK)], dim=-1).flatten(-2)[..., :columns]
    if bool((byte == 0xFF).any()):
        raise InputError("packed holds exponent byte 255, which is NaN; the scales were not finite")
    return power_of_two(byte - BIAS).to(torch.float32)  # exact: a power of two in the range of float32


def transform_sf_into_required_layout(
    scale: Tensor, *, mn: int, k: int, gran_mn: int, arch: str, gran_k: int = BLOCK
) -> Tensor:
    """The layout in which DeepGEMM takes a scale on an arch.

    ============ ==================== =====================================================
    arch         ``gran_mn``          result
    ============ ==================== =====================================================
    sm90         1                    float32, column-major TMA-aligned
    sm90         128                  float32, unchanged
    sm100        1                    packed UE8M0
    sm100        128                  packed UE8M0 of the rows repeated 128 times (to ``mn``)
    ============ ==================== =====================================================

    Parameters
    ----------
    scale : Tensor ``[ceil(mn / gran_mn), ceil(k / gran_k)]`` float32, or with a leading ``G``

    Raises
    ------
    OptionError
        An arch or granularity that has no row above.
    ShapeError, DtypeError, InputError
        As the layouts themselves.
    """
    if arch not in ARCHES or gran_mn not in (1, BLOCK) or gran_k != BLOCK:
        raise OptionError(
            f"no layout is required for arch={arch!r}, granularity {gran_mn}x{gran_k}; arches {', '.join(ARCHES)}, "
            f"granularities 1x{BLOCK} and {BLOCK}x{BLOCK}"
        )
    _matrix_or_group("scale", scale, torch.float32)
    expected = (ceil_div(mn, gran_mn), ceil_div(k, gran_k))
    if tuple(scale.shape[-2:]) != expected:
        raise ShapeError(
            f"scale has shape {list(scale.shape)}; mn={mn}, k={k} at {gran_mn}x{gran_k} take {list(expected)}, with a "
            "leading G for groups"
        )
    if arch == "sm90":
        return scale if gran_mn == BLOCK else get_col_major_tma_aligned_tensor(scale)
    row = torch.arange(mn, device=scale.device) // gran_mn
    return get_mn_major_tma_aligned_packed_ue8m0_tensor(scale.index_select(-2, row))


def _columns(x: Tensor) -> Tensor:
    """The elements of ``[..., M, C]`` placed at ``(g C + c) L + m`` of zeroed memory."""
    *groups, rows, columns = x.shape
    lanes = tma_aligned(rows, x.element_size())
    memory = torch.zeros((*groups, columns, lanes), dtype=x.dtype, device=x.device)
    target = codes_of(memory) if memory.is_floating_point() else memory
    source = codes_of(x) if x.is_floating_point() else x
    target[..., :rows] = source.transpose(-1, -2)
    return memory.transpose(-1, -2)[..., :rows, :]


def _matrix_or_group(name: str, x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype is not dtype:
        raise DtypeError(f"{name} has dtype {x.dtype}; this layout takes {dtype}")
    if x.dim() not in (2, 3):
        raise ShapeError(f"{name} has shape {list(x.shape)}; pass [M, C] or [G, M, C]")
