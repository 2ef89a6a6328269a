"""Where numbers lie in memory: padding, packing, swizzling and permuting, each with its inverse.

A layout moves bits and never computes with values. Every map is injective, so unpacking what was packed gives the same
bits back; memory that no number maps to is padding, zero when written here, and never read by an inverse. Logical
shapes stay; ``G`` groups follow one another; ``C`` is the number of K blocks.
NaN, infinities and -0 are moved like every other value, except where a function refuses them.

Integers            ceil_div(x, y) = ceil(x / y); align(x, y) = y ceil(x / y);
                    tile = clamp(next power of two >= floor(1.3 floor(T top_k / E)), 8, 64)
Column-major, TMA   element (m, c) at offset c * align(M, 4) + m, in float32
Packed UE8M0        byte j of word (m, c) is the exponent byte of scale (m, 4c + j), little endian; words as above;
                    bytes past the last column are 0
128x4 tiles         element (m, c) at ((m // 128) T + c // 4) 512 + (m % 32) 16 + (m % 128 // 32) 4 + c % 4
8x4 tiles           element (m, c) at ((m // 8) T + c // 4) 32 + (m % 8) 4 + c % 4, with T = ceil(C / 4) tiles across;
                    rows are padded to the tile's height and columns to 4
Experts             w13 [E, 2 I, H] holds the gate rows, then the up rows; w2 [E, H, I]. A row order is an int64 tensor:
                    row i of the result is row order[i] of the input
  swap              halves exchanged; an involution
  gated order       out[2 i] = gate[i], out[2 i + 1] = up[i]
  shuffle           in every block of 32 rows, out[8 c + d] = in[4 d + c], c < 4 and d < 8 (16 rows: out[8 c + d] =
                    in[2 d + c], c < 2), so that the 8 rows that a fragment of the transposed MMA takes are consecutive
  padding           the gate half to rows [0, I_p), the up half to [I_p, 2 I_p), w2 to columns [0, I_p); zeros, and
                    silu(0) * 0 = 0 meets a zero column, so the fused product is unchanged
Paged keys          kv_cache [blocks, P, 1, D + 4] uint8, P tokens a block (64). Flat bytes of a block: [t D, (t + 1) D)
                    the E4M3 codes of token t, [P D + 4 t, P D + 4 t + 4) its float32 scale, little endian. The shape
                    suggests that a token's scale follows its codes; it does not

Sources: DeepGEMM deep_gemm/utils/math.py, layout.py, smxx_layout.cuh and tests/test_attention.py (strides and the cache
measured on an H200: ``[31, 7]`` float32 becomes int32 ``[31, 2]`` with strides ``(1, 32)``); NVIDIA cuBLAS
documentation, "1D block scaling factors layout" (128x4); TensorRT-LLM quantization_utils.cuh
``get_sf_out_offset_8x4``, shuffleMatrixA and reorderRowsForGatedActGemm, the latter two checked index for index against
the pure-torch helpers of flashinfer-python; vLLM flashinfer_utils. Not covered: K-grouped
layouts, shuffled scale factors, BlockMajorK, requantisation and scale arithmetic (:mod:`oracle.truth.shards`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.errors import DtypeError, InputError, LayoutError, OptionError, ShapeError
from oracle.numbers.formats import codes_of, decode
from oracle.numbers.rounding import exponent_of, power_of_two

TMA_BYTES = 16
SMALLEST_TILE, LARGEST_TILE = 8, 64
BLOCK = 128
PACK = 4
"""Exponent bytes of one int32."""
BIAS = 127
ARCHES = ("sm90", "sm100")
HEIGHTS = {"128x4": 128, "8x4": 8}
"""Rows of a tile of scales."""
WIDTH = 4
"""Columns of a tile of scales."""
INTERMEDIATE_ALIGNMENT = 16
EPILOGUE_TILE_M = 128
FRAGMENT = 8
SCALE_BYTES = 4


def ceil_div(x: int, y: int) -> int:
    """``ceil(x / y)``. Raises OptionError unless ``x >= 0`` and ``y > 0``."""
    if x < 0 or y <= 0:
        raise OptionError(f"ceil_div({x}, {y}): takes x >= 0 and y > 0")
    whole, rest = divmod(x, y)
    return whole + (rest > 0)


def align(x: int, y: int) -> int:
    """The smallest multiple of ``y`` that is not below ``x``; arguments as :func:`ceil_div`."""
    return y * ceil_div(x, y)


def tma_aligned(mn: int, element_size: int) -> int:
    """Leading stride, in elements, of a matrix whose columns start at multiples of 16 bytes.

    Raises OptionError when 16 is no multiple of ``element_size``.
    """
    if element_size <= 0 or TMA_BYTES % element_size:
        raise OptionError(f"element_size={element_size} does not divide {TMA_BYTES} bytes")
    return align(mn, TMA_BYTES // element_size)


def calculate_tile_tokens_dim(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Tokens of one tile of the TensorRT-LLM MoE kernel, with 30 % added for imbalance.

    Raises OptionError when a count is negative or there is no expert.
    """
    if num_tokens < 0 or top_k < 0 or num_experts <= 0:
        raise OptionError(f"num_tokens={num_tokens}, top_k={top_k}, num_experts={num_experts}: counts, experts > 0")
    expected = num_tokens * top_k // num_experts
    # floor(1.3 n): the float64 nearest to 1.3 is above it, so the float product has the same floor below 2**49.
    needed = 13 * expected // 10
    tile = SMALLEST_TILE
    while tile < needed and tile < LARGEST_TILE:
        tile *= 2
    return tile


# --- scales along MN for TMA -----------------------------------------------------------------------------------------


def get_col_major_tma_aligned_tensor(scale: Tensor) -> Tensor:
    """Float32 scales as columns at strides of ``align(M, 4)``.

    ``scale [M, C]`` or ``[G, M, C]``, any strides. The result has its shape, dtype and bits, strides ``([C * L,] 1,
    L)`` with ``L = align(M, 4)``; lanes ``M..L-1`` are zero.

    Raises DtypeError, ShapeError.
    """
    _matrix_or_group("scale", scale, torch.float32)
    return _columns(scale)


def pad_lanes(x: Tensor) -> Tensor:
    """The padding of a column-major TMA-aligned tensor ``x [..., M, C]`` as a view ``[..., L - M, C]`` of the same
    dtype.

    Raises LayoutError when the memory behind ``x`` ends before the last column's padding does.
    """
    if not has_pad_lanes(x):
        raise LayoutError(f"the memory of x {list(x.shape)} ends before its last column's padding; lay it out again")
    rows = x.shape[-2]
    view = [*x.shape[:-2], tma_aligned(rows, x.element_size()) - rows, x.shape[-1]]
    return x.as_strided(view, x.stride(), x.storage_offset() + rows * x.stride(-2))


def has_pad_lanes(x: Tensor) -> bool:
    """Whether the memory behind a column-major ``x [..., M, C]`` of any dtype holds the padding of its last column."""
    missing = tma_aligned(x.shape[-2], x.element_size()) - x.shape[-2]
    last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (last + missing + 1) * x.element_size() <= x.untyped_storage().nbytes()


def get_mn_major_tma_aligned_packed_ue8m0_tensor(scale: Tensor) -> Tensor:
    """Exponent bytes of four consecutive K blocks in one int32, words in columns at strides of ``align(M, 4)``.

    Parameters
    ----------
    scale : Tensor ``[M, C]`` or ``[G, M, C]``, float32, powers of two from 2^-127 (byte 0) to 2^127 (byte 254).

    Returns int32 ``[..., M, ceil(C / 4)]``, strides ``([...,] 1, align(M, 4))``; the padding
    bytes of a last word are zero, the lanes past M may hold anything.
    Raises DtypeError, ShapeError; InputError: an element is no such power of two: any other bit would bleed into a
    neighbour's byte.
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
    word = (byte << 8 * torch.arange(PACK, device=byte.device)).sum(dim=-1)
    return _columns(word.to(torch.int32))  # which keeps the low 32 bits: all of them


def transform_sf_into_required_layout(
    scale: Tensor, *, mn: int, k: int, gran_mn: int, arch: str, gran_k: int = BLOCK
) -> Tensor:
    """The layout in which DeepGEMM takes a scale on an arch.

        sm90     gran_mn 1      float32 as columns at strides of align(mn, 4), lanes behind mn are zero
        sm90     gran_mn 128    float32, the same elements, contiguous
        sm100    gran_mn 1      int32 words, columns at strides of align(mn, 4): byte b of word w is the exponent byte
                                of column 4 w + b (0 behind the last column)
        sm100    gran_mn 128    the same of the rows repeated 128 times, up to mn

    ``gran_k`` is 128, on sm100 also 32: the columns are K blocks of that many elements.

    Parameters
    ----------
    scale : Tensor ``[ceil(mn / gran_mn), ceil(k / gran_k)]`` float32, or with a leading ``G``

    Returns float32 of the same shape, or int32 ``[([G,] mn, ceil(columns / 4)]``.
    Raises OptionError: an arch or granularity that has no row above; ShapeError, DtypeError, InputError: as the layouts
    themselves.
    """
    if arch not in ARCHES or gran_mn not in (1, BLOCK) or gran_k not in ((32, BLOCK) if arch == "sm100" else (BLOCK,)):
        raise OptionError(
            f"no layout is required for arch={arch!r}, granularity {gran_mn}x{gran_k}; arches {', '.join(ARCHES)}, "
            f"granularities 1x{BLOCK} and {BLOCK}x{BLOCK}, on sm100 1x32 and {BLOCK}x32 too"
        )
    _matrix_or_group("scale", scale, torch.float32)
    expected = (ceil_div(mn, gran_mn), ceil_div(k, gran_k))
    if tuple(scale.shape[-2:]) != expected:
        raise ShapeError(
            f"scale has shape {list(scale.shape)}; mn={mn}, k={k} at {gran_mn}x{gran_k} take {list(expected)}, with a "
            "leading G for groups"
        )
    if arch == "sm90":
        return scale.contiguous() if gran_mn == BLOCK else get_col_major_tma_aligned_tensor(scale)
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


# --- tiles of scales -------------------------------------------------------------------------------------------------


def swizzle_offsets(rows: int, columns: int, *, tile: str) -> Tensor:
    """Offset of every element, int64 ``[rows, columns]``. Raises OptionError when no tile has this name."""
    if tile not in HEIGHTS:
        raise OptionError(f"no tile {tile!r}; there are {', '.join(HEIGHTS)}")
    height = HEIGHTS[tile]
    m, c = torch.arange(rows, device="cpu"), torch.arange(columns, device="cpu")
    inside = m % 8 * 4 if height == 8 else m % 32 * 16 + m % 128 // 32 * 4
    of_row = m // height * ceil_div(columns, WIDTH) * height * WIDTH + inside
    return of_row[:, None] + (c // WIDTH * height * WIDTH + c % WIDTH)


def swizzle_scale(scale: Tensor, *, tile: str = "128x4", fill: int = 0) -> Tensor:
    """Scales ``[M, C]`` or ``[G, M, C]`` in tiles, flat per group.

    Parameters
    ----------
    scale : Tensor ``[M, C]`` or ``[G, M, C]`` of a 1-byte dtype (uint8, E8M0, E4M3)
    fill : int, byte written to the padding.

    Returns same dtype, ``[align(M, 128 or 8) * align(C, 4)]``, with a leading ``G`` for groups.
    Raises ShapeError: another rank or width of elements; OptionError: no tile has this name.
    """
    if scale.element_size() != 1 or scale.dim() not in (2, 3):
        raise ShapeError(f"scale is {scale.dtype} {list(scale.shape)}; pass [M, C] or [G, M, C] of a 1-byte dtype")
    rows, columns = scale.shape[-2:]
    offsets = swizzle_offsets(rows, columns, tile=tile).flatten().to(scale.device)
    size = align(rows, HEIGHTS[tile]) * align(columns, WIDTH)
    memory = torch.full((*scale.shape[:-2], size), fill, dtype=torch.uint8, device=scale.device)
    memory[..., offsets] = scale.view(torch.uint8).flatten(-2)
    return memory.view(scale.dtype)


def unswizzle_scale(memory: Tensor, rows: int, columns: int, *, tile: str = "128x4") -> Tensor:
    """The inverse of :func:`swizzle_scale`: ``memory`` ``[bytes]`` or ``[G, bytes]`` of a 1-byte dtype as ``[rows,
    columns]`` of it (with a leading ``G``), contiguous.

    Raises ShapeError when the memory is not that of ``rows x columns`` scales, OptionError: no tile has this name.
    """
    offsets = swizzle_offsets(rows, columns, tile=tile).flatten().to(memory.device)
    size = align(rows, HEIGHTS[tile]) * align(columns, WIDTH)
    if memory.element_size() != 1 or memory.dim() not in (1, 2) or memory.shape[-1] != size:
        raise ShapeError(
            f"the {tile} layout of {rows} x {columns} scales is [{size}] bytes (with a leading G for groups), not "
            f"{list(memory.shape)} of {memory.dtype}"
        )
    flat = memory.view(torch.uint8)[..., offsets]
    return flat.reshape(*memory.shape[:-1], rows, columns).view(memory.dtype)


# --- weights of experts ----------------------------------------------------------------------------------------------


def swap_w13_to_w31(x: Tensor) -> Tensor:
    """The halves of dim -2 exchanged: weights ``x`` ``[..., 2 I, H]``, or their block scales ``[..., 2 B, C]``, of any
    dtype; the result has the same shape and dtype.

    Raises ShapeError: the rows do not split into two halves (block scales: ``2 I / 128`` must be even).
    """
    rows = x.shape[-2] if x.dim() >= 2 else 0
    if rows == 0 or rows % 2:
        raise ShapeError(
            f"x has shape {list(x.shape)}: dim -2 must split into two halves; an odd number of block-scale rows means "
            "that a block spans gate and up, pad the intermediate size to a multiple of 128 first"
        )
    return _rows(x, torch.arange(rows, device="cpu").roll(rows // 2))


def gated_row_order(rows: int) -> Tensor:
    """The order that alternates gate and up rows, int64 ``[rows]``. Raises ShapeError when ``rows`` is odd."""
    if rows % 2:
        raise ShapeError(f"{rows} rows have no gate and up half; pass an even number")
    i = torch.arange(rows, device="cpu")
    return i // 2 + i % 2 * (rows // 2)


def row_order(rows: int, *, epilogue_tile_m: int = EPILOGUE_TILE_M) -> Tensor:
    """The order of ``shuffle_matrix_a``, int64 ``[rows]``: blocks of 32 rows when the tile is a multiple of 128, else
    of 16.

    Raises ShapeError when ``rows`` is no multiple of the block, OptionError: the tile has no rows.
    """
    if epilogue_tile_m <= 0:
        raise OptionError(f"epilogue_tile_m={epilogue_tile_m}: pass a positive tile height, usually 128")
    block = 32 if epilogue_tile_m % 128 == 0 else 16
    if rows % block:
        raise ShapeError(f"{rows} rows are no multiple of {block}, the shuffle's block for tiles of {epilogue_tile_m}")
    i = torch.arange(rows, device="cpu")
    within = i % block
    return i - within + within % FRAGMENT * (block // FRAGMENT) + within // FRAGMENT


def inverse_order(order: Tensor) -> Tensor:
    """The order that undoes ``order``, both int64 ``[rows]``."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


def reorder_rows_for_gated_act_gemm(w: Tensor) -> Tensor:
    """Gate and up rows of ``w [2 I, H]``, any dtype, alternating, same shape and dtype: row ``2 i`` is row ``i``, row
    ``2 i + 1`` is row ``I + i``; undone by ``undo_rows(w, gated_row_order(2 I))``.

    Raises ShapeError: another rank, or an odd number of rows.
    """
    _matrix("w", w)
    return _rows(w, gated_row_order(w.shape[0]))


def shuffle_matrix_a(w: Tensor, epilogue_tile_m: int = EPILOGUE_TILE_M) -> Tensor:
    """Rows of ``w [M, K]``, any dtype, in the order of the transposed MMA, same shape and dtype; undone by
    ``undo_rows(w, row_order(M))``. Row ``i`` is row ``order[i]`` of ``w``: in each 32 rows ``order`` is 0 4 .. 28
    1 5 .. 29 2 6 .. 30 3 7 .. 31 where epilogue_tile_m is a multiple of 128, else in each 16 rows 0 2 .. 14 1 3 .. 15.

    Raises ShapeError, OptionError: as of :func:`row_order`.
    """
    _matrix("w", w)
    return _rows(w, row_order(w.shape[0], epilogue_tile_m=epilogue_tile_m))


def undo_rows(w: Tensor, order: Tensor) -> Tensor:
    """The rows of ``w [..., M, K]``, any dtype, before ``order [M]`` was applied: of the same shape and dtype. Raises
    ShapeError: the order has another length."""
    if order.numel() != w.shape[-2]:
        raise ShapeError(f"w has {w.shape[-2]} rows, the order {order.numel()}")
    return _rows(w, inverse_order(order))


def rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(
    gemm1_weights: Tensor, gemm2_weights: Tensor, *, is_gated: bool = True
) -> tuple[Tensor, Tensor]:
    """Both weights of every expert in the order of TensorRT-LLM's per-tensor FP8 kernel, as new tensors of the same
    shapes and dtypes.

    ``gemm1_weights [E, 2 I, H]`` is gate/up interleaved (when gated) and shuffled, ``gemm2_weights [E, H, I]``
    shuffled. Undone by :func:`unrotate_weights`. Raises ShapeError for rows that are no multiple of 32.
    """
    order1, order2 = _rotation(gemm1_weights, gemm2_weights, is_gated)
    return _rows(gemm1_weights, order1), _rows(gemm2_weights, order2)


def unrotate_weights(gemm1_weights: Tensor, gemm2_weights: Tensor, *, is_gated: bool = True) -> tuple[Tensor, Tensor]:
    """The inverse of the rotation: arguments, results and errors as of
    :func:`rotate_weights_for_fi_trtllm_fp8_per_tensor_moe`."""
    order1, order2 = _rotation(gemm1_weights, gemm2_weights, is_gated)
    return undo_rows(gemm1_weights, order1), undo_rows(gemm2_weights, order2)


def align_fp8_moe_weights_for_fi(
    w13: Tensor, w2: Tensor, is_act_and_mul: bool, *, min_alignment: int = INTERMEDIATE_ALIGNMENT
) -> tuple[Tensor, Tensor, int]:
    """The intermediate size padded with zeros to a multiple of ``min_alignment``, each half in its own place.

    Parameters
    ----------
    w13 : Tensor ``[E, 2 I, H]`` (``[E, I, H]`` without a gate), any dtype
    w2 : Tensor ``[E, H, I]``

    Returns (w13 ``[E, 2 I_p, H]``, w2 ``[E, H, I_p]``, ``I_p``) of the same dtypes: the same objects when ``I`` is
    aligned already.
    Raises ShapeError: the shapes disagree.
    """
    padded = align(_intermediate(w13, w2, is_act_and_mul), min_alignment)
    return _padded(w13, w2, _half_rows(w2.shape[2], padded, is_act_and_mul), padded)


def align_fp8_moe_weights_for_fi_published(
    w13: Tensor, w2: Tensor, is_act_and_mul: bool, *, min_alignment: int = INTERMEDIATE_ALIGNMENT
) -> tuple[Tensor, Tensor, int]:
    """The published placement, a fault for gated weights: rows ``[0, 2 I)`` copied as one run.

    The up half then starts at ``I`` instead of ``I_p``: ``up[0 : I_p - I]`` lies in the gate's padding, and row ``i``
    of the up half that the kernel reads is ``up[i + I_p - I]``. Arguments, results and errors as of
    :func:`align_fp8_moe_weights_for_fi`. Source: vLLM 0.20.2 flashinfer_utils.py.
    """
    padded = align(_intermediate(w13, w2, is_act_and_mul), min_alignment)
    return _padded(w13, w2, torch.arange(w13.shape[1], device="cpu"), padded)


def prepare_fp8_moe_layer_for_fi(
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    *,
    block_quant: bool,
    is_act_and_mul: bool = True,
    is_trtllm: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights and scales as FlashInfer's MoE kernels take them.

    In this order: the intermediate size is padded (not with block scales, whose blocks cover the rows as they are), the
    halves are exchanged (with their block scales), and TensorRT-LLM's per-tensor kernel gets its row order. Scales are
    not clamped.

    Parameters
    ----------
    w13, w2 : Tensor ``[E, 2 I, H]`` (``[E, I, H]`` without a gate) and ``[E, H, I]``, any dtype
    w13_scale, w2_scale : Tensor, with ``block_quant`` ``[E, 2 I / 128, C]`` and ``[E, H / 128, C]``, else any shape

    Returns the weights, ``[E, 2 I_p, H]`` and ``[E, H, I_p]``, and the scales of the same shapes, all of the dtypes
    that they had.
    Raises ShapeError: as the steps.
    """
    if not block_quant:
        w13, w2, _ = align_fp8_moe_weights_for_fi(w13, w2, is_act_and_mul)
    if is_act_and_mul:
        w13 = swap_w13_to_w31(w13)
        w13_scale = swap_w13_to_w31(w13_scale) if block_quant else w13_scale
    if is_trtllm and not block_quant:
        w13, w2 = rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(w13, w2, is_gated=is_act_and_mul)
    return w13, w2, w13_scale, w2_scale


def _intermediate(w13: Tensor, w2: Tensor, is_act_and_mul: bool) -> int:
    _experts(w13, w2)
    intermediate, halves = w2.shape[2], 2 if is_act_and_mul else 1
    if w13.shape[1] != halves * intermediate or w13.shape[2] != w2.shape[1]:
        raise ShapeError(
            f"w13 {list(w13.shape)} and w2 {list(w2.shape)} disagree; w2 [E, H, I] takes w13 [E, {halves} I, H]"
        )
    return intermediate


def _half_rows(intermediate: int, padded: int, is_act_and_mul: bool) -> Tensor:
    """The row in the padded w13 of each row of the unpadded one."""
    starts = (0, padded) if is_act_and_mul else (0,)
    return torch.cat([start + torch.arange(intermediate, device="cpu") for start in starts])


def _padded(w13: Tensor, w2: Tensor, rows: Tensor, padded: int) -> tuple[Tensor, Tensor, int]:
    """Both weights padded, row ``i`` of w13 in row ``rows[i]``; the same objects when nothing is missing."""
    intermediate = w2.shape[2]
    if padded == intermediate:
        return w13, w2, padded
    extent = padded * (w13.shape[1] // intermediate)
    columns = torch.arange(intermediate, device="cpu")
    return _placed(w13, rows, -2, extent), _placed(w2, columns, -1, padded), padded


def _rotation(gemm1: Tensor, gemm2: Tensor, is_gated: bool) -> tuple[Tensor, Tensor]:
    _experts(gemm1, gemm2)
    order1, order2 = row_order(gemm1.shape[1]), row_order(gemm2.shape[1])
    return (gated_row_order(gemm1.shape[1])[order1] if is_gated else order1), order2


def _rows(x: Tensor, order: Tensor) -> Tensor:
    """Rows of dim -2 by index, as bits."""
    bits = x.view(torch.uint8) if x.element_size() == 1 else x
    return bits.index_select(-2, order.to(x.device)).view(x.dtype)


def _placed(x: Tensor, target: Tensor, dim: int, extent: int) -> Tensor:
    """``x`` with index ``i`` of ``dim`` moved to ``target[i]`` of a zeroed tensor of that extent."""
    shape = list(x.shape)
    shape[dim] = extent
    bits = x.view(torch.uint8) if x.element_size() == 1 else x
    memory = torch.zeros(shape, dtype=bits.dtype, device=x.device)
    return memory.index_copy_(dim, target.to(x.device), bits).view(x.dtype)


def _matrix(name: str, x: Tensor) -> None:
    if x.dim() != 2:
        raise ShapeError(f"{name} has shape {list(x.shape)}; pass one expert's matrix [rows, columns]")


def _experts(w13: Tensor, w2: Tensor) -> None:
    if w13.dim() != 3 or w2.dim() != 3 or w13.shape[0] != w2.shape[0]:
        raise ShapeError(f"w13 {list(w13.shape)} and w2 {list(w2.shape)}: pass [E, 2 I, H] and [E, H, I]")


# --- paged keys ------------------------------------------------------------------------------------------------------


def pack_kv_cache(k: Tensor, k_scale: Tensor) -> Tensor:
    """Codes ``k`` ``[blocks, P, D]`` float8_e4m3fn and ``k_scale`` ``[blocks, P]`` float32 as ``[blocks, P, 1, D + 4]``
    uint8.

    Raises DtypeError, ShapeError.
    """
    if k.dtype is not torch.float8_e4m3fn or k_scale.dtype is not torch.float32:
        raise DtypeError(f"k is {k.dtype} and k_scale {k_scale.dtype}; pass float8_e4m3fn and float32")
    if k.dim() != 3 or tuple(k_scale.shape) != tuple(k.shape[:2]):
        raise ShapeError(f"k {list(k.shape)} and k_scale {list(k_scale.shape)}: pass [blocks, P, D] and [blocks, P]")
    blocks, tokens, d = k.shape
    codes, scales = (x.clone(memory_format=torch.contiguous_format).view(torch.uint8).flatten(1) for x in (k, k_scale))
    return torch.cat([codes, scales], dim=1).reshape(blocks, tokens, 1, d + SCALE_BYTES)


def unpack_kv_cache(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`pack_kv_cache`: ``kv_cache`` ``[blocks, P, 1, D + 4]`` uint8 as codes ``[blocks, P, D]``
    float8_e4m3fn and scales ``[blocks, P]`` float32.

    Raises DtypeError, ShapeError.
    """
    if kv_cache.dtype is not torch.uint8:
        raise DtypeError(f"kv_cache is {kv_cache.dtype}; pass the uint8 bytes")
    if kv_cache.dim() != 4 or kv_cache.shape[2] != 1 or kv_cache.shape[3] <= SCALE_BYTES:
        raise ShapeError(f"kv_cache has shape {list(kv_cache.shape)}; pass [blocks, P, 1, D + 4]")
    blocks, tokens, _, width = kv_cache.shape
    d = width - SCALE_BYTES
    flat = kv_cache.reshape(blocks, tokens * width)
    codes = flat[:, : tokens * d].reshape(blocks, tokens, d).view(torch.float8_e4m3fn)
    scales = flat[:, tokens * d :].reshape(blocks, tokens, SCALE_BYTES).contiguous().view(torch.float32)
    return codes, scales.reshape(blocks, tokens)
