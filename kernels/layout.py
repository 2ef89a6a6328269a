"""Padding and layout of operands in memory. An operand that has the layout already is returned itself.

Nothing here changes a value except by adding zeros. Row permutations follow FlashInfer's TensorRT-LLM weight
layout; block-scale layouts follow DeepGEMM (MN-major with a leading stride of whole 16 bytes; UE8M0 exponents four
an int32).

Not covered: scale factors of FP4 weights in the row order of the transposed MMA.

NaN and infinity: values are moved; an exponent that is packed must be that of a finite power of two.
Source: DeepGEMM (csrc/utils/layout.hpp), FlashInfer (``shuffle_matrix_a``, ``reorder_rows_for_gated_act_gemm``),
cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import checks
from . import platform as machines
from .adapters import Inputs, Options, by_row
from .backends._host import column_major, take
from .checks import FP8
from .errors import OptionError, ShapeError, shown
from .formulas import pack_ue8m0
from .records import Machine
from .verbs import verb

TMA_LANES = 4
"""float32 or int32 values in the 16 bytes to which TMA aligns a leading stride."""


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _required(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """In the layout of the ``target`` architecture."""
    machine = Machine.described(str(options.get("target", "sm90")))
    groups = inputs["scale"].shape[0] if inputs["scale"].dim() == 3 else None
    recipe = options.get("gran_mn", 1), 128, options.get("gran_k", 128)
    return verb(inputs["scale"], options["mn"], options["k"], recipe, groups, machine=machine)


def _padded(verb: Callable[..., Any], inputs: Inputs, options: Options) -> dict[str, Tensor]:
    w13, w2, _ = verb(inputs["w13"], inputs["w2"], bool(options.get("is_act_and_mul", True)))
    return {"w13": w13, "w2": w2}


def _rotated(verb: Callable[..., Any], inputs: Inputs, options: Options) -> dict[str, Tensor]:
    names = ("gemm1_weights", "gemm2_weights")
    weights = verb(*(inputs[name] for name in names), bool(options.get("is_gated", True)))
    return dict(zip(names, weights, strict=True))


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb("layout", adapter=by_row())
def ceil_div(x: int, y: int) -> int:
    """``ceil(x / y)`` for ``x >= 0`` and ``y > 0``.

    Raises
    ------
    OptionError
        A negative ``x`` or a ``y`` below 1.
    """
    if y < 1 or x < 0:
        raise OptionError(f"ceil_div needs x >= 0 and y >= 1, got {x} and {y}")
    return -(-x // y)


@verb("layout", adapter=by_row())
def align(x: int, y: int) -> int:
    """The smallest multiple of ``y`` that is >= ``x``."""
    return ceil_div(x, y) * y


def pad_k(x: Tensor, multiple: int = 128) -> Tensor:
    """``x`` with its last axis padded with zeros to a multiple; ``x`` itself when it is one already.

    ``x`` ``[..., K]`` of any dtype; returns ``[..., align(K, multiple)]`` of the dtype of ``x``.

    Raises InputError, LayoutError, OptionError.
    """
    missing = -checks.tensor("x", x).shape[-1] % checks.positive("multiple", multiple)
    if missing == 0:
        return x
    if x.dtype == FP8:  # torch pads no float8: the code 0 is the value 0
        return torch.nn.functional.pad(x.view(torch.uint8), (0, missing)).view(FP8)
    return torch.nn.functional.pad(x, (0, missing))


@verb("layout")
def get_col_major_tma_aligned_tensor(scale: Tensor) -> Tensor:
    """MN-major scales: strides ``(1, align(M, 4))``, logical shape unchanged, pad lanes 0.

    Parameters
    ----------
    scale
        ``[M, C]`` or ``[G, M, C]`` float32.

    Returns
    -------
    Tensor
        The same values; ``scale`` itself when its strides are already so.
        Float32 of the same shape.

    Raises
    ------
    DtypeError, InputError, LayoutError, ShapeError
    """
    checks.dtype("scale", checks.rank("scale", scale, 2, 3), torch.float32)
    m, c = scale.shape[-2:]
    lead = align(m, TMA_LANES)
    if scale.stride()[-2:] == (1, lead) and (scale.dim() == 2 or scale.stride(0) == lead * c):
        return scale
    return column_major(scale, TMA_LANES)


@verb("layout")
def get_mn_major_tma_aligned_packed_ue8m0_tensor(scale: Tensor, *, check: bool | None = None) -> Tensor:
    """Four UE8M0 exponents an int32 along K (the first in the lowest byte), MN-major, TMA-aligned.

    Parameters
    ----------
    scale
        ``[M, C]`` or ``[G, M, C]`` float32, exact powers of two from ``2**-127`` to ``2**127``.
    check
        Verify that they are; see :func:`kernels.checks.values`. By default a GPU's scales are verified too, without
        waiting; switch it off for scales that a UE8M0 quantiser computed.

    Returns
    -------
    Tensor
        int32 ``[M, ceil(C/4)]`` (or with G), strides ``(1, align(M, 4))``; K padding and pad lanes 0.

    Raises
    ------
    ValueRangeError, DtypeError, InputError, LayoutError, ShapeError
        A scale is no power of two (its mantissa would be lost), or zero, negative, infinite or NaN.
    """
    checks.dtype("scale", checks.rank("scale", scale, 2, 3), torch.float32)
    checks.nonempty("scale", scale, -1)
    powers_of_two(scale, check)
    return pack_ue8m0(scale)


def powers_of_two(scale: Tensor, check: bool | None) -> None:
    """Refuse float32 scales that UE8M0 does not hold; ``check`` as for :func:`kernels.checks.values`, False: none.

    ``scale`` of any shape.

    Raises DeviceError.
    """
    if check is False:
        return
    bits = checks.concrete("scale", scale).contiguous().view(torch.int32)
    whole = ((bits & 0x7FFFFF) == 0) & (bits > 0) & (bits < 0x7F800000)
    good = whole | (bits == 0x00400000)  # 2**-127 is a float32 subnormal
    checks.values(
        "scale",
        check,
        good.all(),
        lambda: (
            f"scale {scale.contiguous()[~good].flatten()[0].item()!r} is no power of two in [2**-127, 2**127]; "
            "quantise with use_ue8m0=True (rounding a finished scale changes every value)"
        ),
    )


@verb("layout", adapter=_required)
def transform_sf_into_required_layout(
    sf: Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, int, int],
    num_groups: int | None = None,
    is_sfa: bool = True,
    disable_ue8m0_cast: bool = False,
    *,
    machine: machines.Machine | None = None,
) -> Tensor:
    """Scales in the layout that DeepGEMM's kernels read on a machine.

    Returns float32 of the shape of ``sf``, or int32 ``[..., mn, ceil(k / gran_k / 4)]``.

    sm90 (and the CPU path): scales of one row float32, MN-major and TMA-aligned; scales of 128 rows unchanged.
    sm100, sm103, sm120, sm121: packed UE8M0, one scale for each row (a 128-row scale is repeated), for 128 or 32
    elements of K; float32 MN-major with ``disable_ue8m0_cast``, which no product there reads.

    Parameters
    ----------
    sf
        ``[ceil(mn/g), ceil(k/gran_k)]`` float32, with a leading ``num_groups`` when given.
    recipe
        Rows of A a scale, rows of B a scale, K a scale: ``(1, 128, 128)``; K is 32 on Blackwell alone.
    is_sfa
        Whether ``sf`` belongs to A (first entry of the recipe) or B (second).

    Raises
    ------
    DtypeError, InputError, LayoutError, OptionError, ShapeError
    """
    machine = machine or machines.current_machine()
    plain = not machines.packs_ue8m0(machine) or disable_ue8m0_cast
    granularities = (128,) if plain else (32, 128)
    if len(recipe) != 3 or recipe[2] not in granularities or recipe[0 if is_sfa else 1] not in (1, 128):
        choices = " or ".join(map(str, granularities))
        raise OptionError(f"recipe {recipe} is not (1 or 128, 1 or 128, {choices})")
    rows = recipe[0 if is_sfa else 1]
    groups = () if num_groups is None else (num_groups,)
    expected = (*groups, ceil_div(mn, rows), ceil_div(k, recipe[2]))
    checks.operand("sf", sf, expected, "[..., ceil(mn/g), ceil(k/gran_k)]", torch.float32)
    if plain:
        return get_col_major_tma_aligned_tensor(sf) if rows == 1 else sf.contiguous()
    if rows == 128:
        sf = sf.repeat_interleave(128, dim=-2).narrow(-2, 0, mn)
    return get_mn_major_tma_aligned_packed_ue8m0_tensor(sf)


@verb("layout", adapter=_padded)
def align_fp8_moe_weights_for_fi(
    w13: Tensor, w2: Tensor, is_act_and_mul: bool, multiple: int = 16
) -> tuple[Tensor, Tensor, int]:
    """Pad the intermediate size (K of ``w2``) to a multiple of 16 with zeros.

    Each half of a gated ``w13`` is padded by itself, so that the up half starts at the padded size and the fused
    product is unchanged. (Routines that copy both halves as one run leave the up half at the unpadded offset.)

    Parameters
    ----------
    w13
        ``[E, 2I, K]`` when ``is_act_and_mul``, else ``[E, I, K]``, of any dtype.
    w2
        ``[E, H, I]`` of any dtype.

    Returns
    -------
    w13, w2, padded
        The padded weights and size; the same objects when the size is aligned.
        ``w13`` ``[E, 2P, K]`` or ``[E, P, K]`` and ``w2`` ``[E, H, P]`` of their dtypes, P the padded size.

    Raises
    ------
    DeviceError, InputError, LayoutError, OptionError, ShapeError
    """
    checks.rank("w13", w13, 3)
    experts, _, inner = checks.rank("w2", w2, 3).shape
    checks.same_device(w13=w13, w2=w2)
    halves = 2 if is_act_and_mul else 1
    checks.positive("multiple", multiple)
    if w13.shape[0] != experts or w13.shape[1] != halves * inner:
        raise ShapeError(f"w13 {list(w13.shape)} must be [E, {halves}*I, K] for w2 [E, H, I] = {list(w2.shape)}")
    padded = align(inner, multiple)
    if padded == inner:
        return w13, w2, inner
    checks.room("multiple", multiple, experts * padded * (halves * w13.shape[2] + w2.shape[1]) * w13.element_size())
    tall = w13.new_zeros(experts, halves, padded, w13.shape[2], dtype=torch.uint8) if w13.dtype == FP8 else None
    tall = w13.new_zeros(experts, halves, padded, w13.shape[2]) if tall is None else tall.view(FP8)
    tall[:, :, :inner] = w13.reshape(experts, halves, inner, w13.shape[2])
    return tall.view(experts, halves * padded, w13.shape[2]), pad_k(w2, multiple), padded


@verb("layout")
def swap_w13_to_w31(x: Tensor) -> Tensor:
    """Exchange the halves of dimension -2 (gate and up) of every expert; its own inverse.

    Returns the same shape and dtype.

    ``x`` ``[..., N, K]`` of any dtype, N even (ShapeError); a new tensor of the same shape. Values are moved, NaN
    included. Block scales are exchanged the same way, which needs the block boundary between the halves.

    Raises InputError, LayoutError.
    """
    if checks.tensor("x", x).dim() < 2:
        raise ShapeError(f"x must have at least two dimensions, got shape {list(x.shape)}")
    if x.shape[-2] % 2:
        raise ShapeError(
            f"x has shape {list(x.shape)}: dimension -2 is odd and does not split into halves (N/128 for block scales)"
        )
    first, second = x.chunk(2, dim=-2)
    return torch.cat([second, first], dim=-2)


@verb("layout")
def reorder_rows_for_gated_act_gemm(w: Tensor) -> Tensor:
    """Interleave the rows of the two halves: ``0, N/2, 1, N/2+1, ...``.

    Returns the same shape and dtype.

    ``w`` ``[N, K]`` of any dtype, N even (ShapeError); a new tensor of the same shape. Values are moved, NaN included.

    Raises InputError, LayoutError.
    """
    n = checks.nonempty("w", checks.rank("w", w, 2), 1).shape[0]
    if n % 2:
        raise ShapeError(f"w has {n} rows; gated weights have an even number")
    return take(w, gated_rows(n, w.device))


@verb("layout")
def shuffle_matrix_a(w: Tensor, epilogue_tile_m: int = 128) -> Tensor:
    """Permute rows within blocks of 32 (16 when the tile is no multiple of 128) for the transposed MMA output.

    Returns the same shape and dtype.

    ``w`` ``[N, K]`` of any dtype, N a multiple of the block (ShapeError); a new tensor of the same shape. Values are
    moved, NaN included.

    Raises InputError, LayoutError.
    """
    n = checks.rank("w", w, 2).shape[0]
    return take(w, shuffled_rows(n, epilogue_tile_m, w.device))


@verb()
def unshuffle_matrix_a(w: Tensor, epilogue_tile_m: int = 128) -> Tensor:
    """The inverse of :func:`shuffle_matrix_a`, for a loader that meets a weight which a kernel's layout has already.

    Returns the same shape and dtype.

    ``w`` ``[N, K]`` of any dtype, N a multiple of the block (ShapeError); a new tensor. Values are moved, NaN included.

    Raises InputError, LayoutError.
    """
    n = checks.rank("w", w, 2).shape[0]
    return take(w, torch.argsort(shuffled_rows(n, epilogue_tile_m, w.device)))


@verb()
def restore_rows_of_gated_act_gemm(w: Tensor) -> Tensor:
    """The inverse of :func:`reorder_rows_for_gated_act_gemm`: even rows, then odd ones.

    Returns the same shape and dtype.

    ``w`` ``[N, K]`` of any dtype, N even (ShapeError); a new tensor. Values are moved, NaN included.

    Raises InputError, LayoutError.
    """
    n = checks.nonempty("w", checks.rank("w", w, 2), 1).shape[0]
    return take(w, torch.argsort(gated_rows(n, w.device)))


@verb("layout", adapter=_rotated)
def rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(
    gemm1: Tensor, gemm2: Tensor, is_gated_activation: bool = True
) -> tuple[Tensor, Tensor]:
    """Both weights of a TensorRT-LLM per-tensor MoE: interleave gate and up rows, then shuffle.

    Parameters
    ----------
    gemm1, gemm2
        ``[E, 2I, H]`` (or ``[E, I, H]`` without gating) and ``[E, H, I]``, any dtype of one byte or more.

    Returns
    -------
    gemm1, gemm2
        New tensors of the same shapes.
        Of the same dtypes.

    Raises
    ------
    DeviceError, InputError, LayoutError, ShapeError
    """
    first, second = _rows_of_experts(gemm1, gemm2, is_gated_activation)
    return take(gemm1, first, 1), take(gemm2, second, 1)


@verb()
def unrotate_weights_of_fi_trtllm_fp8_per_tensor_moe(
    gemm1: Tensor, gemm2: Tensor, is_gated_activation: bool = True
) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`rotate_weights_for_fi_trtllm_fp8_per_tensor_moe`.

    Parameters
    ----------
    gemm1, gemm2
        ``[E, 2I, H]`` (or ``[E, I, H]`` without gating) and ``[E, H, I]``, any dtype of one byte or more.

    Returns
    -------
    gemm1, gemm2
        New tensors of the same shapes.
        Of the same dtypes.

    Raises
    ------
    DeviceError, InputError, LayoutError, ShapeError
    """
    first, second = _rows_of_experts(gemm1, gemm2, is_gated_activation)
    return take(gemm1, torch.argsort(first), 1), take(gemm2, torch.argsort(second), 1)


def _rows_of_experts(gemm1: Tensor, gemm2: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """The order of the rows of both weights of a TensorRT-LLM per-tensor MoE, int64 ``[N]`` each."""
    n1, n2 = checks.rank("gemm1", gemm1, 3).shape[1], checks.rank("gemm2", gemm2, 3).shape[1]
    checks.same_device(gemm1=gemm1, gemm2=gemm2)
    rows = shuffled_rows(n1, 128, gemm1.device, "rows of gemm1 (w13)")
    first = gated_rows(n1, gemm1.device)[rows] if gated else rows
    return first, shuffled_rows(n2, 128, gemm2.device, "rows of gemm2 (w2)")


def gated_rows(n: int, device: torch.device | str = "cpu") -> Tensor:
    """Source row of each destination row of :func:`reorder_rows_for_gated_act_gemm`.

    Returns int64 ``[n]``.

    Raises ShapeError.
    """
    if n % 2:
        raise ShapeError(f"{n} rows; gated weights have an even number")
    return torch.arange(n, device=device).view(2, n // 2).t().flatten()


def shuffled_rows(n: int, epilogue_tile_m: int = 128, device: torch.device | str = "cpu", name: str = "rows") -> Tensor:
    """Source row of each destination row of :func:`shuffle_matrix_a`.

    Returns int64 ``[n]``.

    Raises OptionError, ShapeError.
    """
    block = 32 if checks.positive("epilogue_tile_m", epilogue_tile_m) % 128 == 0 else 16
    checks.multiple(name, n, block, "pad the weight rows")
    return torch.arange(n, device=device).view(-1, 8, block // 8).transpose(1, 2).flatten()


@verb("layout")
def swizzle_scale(scale: Tensor, tile: str = "128x4") -> Tensor:
    """One-byte block scales in the tiles that block-scaled MMA instructions read (cuBLAS; ``8x4``: TensorRT-LLM).

    Parameters
    ----------
    scale
        ``[M, C]`` or ``[G, M, C]`` of a one-byte dtype.
    tile
        ``128x4`` or ``8x4``: rows are padded to the tile's height, columns to 4, with zeros.

    Returns
    -------
    Tensor
        Flat for each group, same dtype, ``[align(M, height) * align(C, 4)]``.

    Raises
    ------
    InputError, LayoutError, OptionError, ShapeError
    """
    height = {"128x4": 128, "8x4": 8}.get(tile)
    if height is None:
        raise OptionError(f"tile={shown(tile)}: there are 128x4 and 8x4")
    if checks.tensor("scale", scale).element_size() != 1 or scale.dim() not in (2, 3):
        raise ShapeError(f"scale is {scale.dtype} {list(scale.shape)}; pass [M, C] or [G, M, C] of a one-byte dtype")
    m, c = scale.shape[-2:]
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, -c % 4, 0, -m % height))
    *groups, rows, columns = padded.shape
    row = min(32, height)
    lanes = padded.reshape(*groups, rows // height, height // row, row, columns // 4, 4)
    # [..., tile, group of 32 rows, row, tile across, column] -> a tile is rows x groups x columns
    tiles: Tensor = lanes.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1)).flatten(-5).contiguous()
    return tiles.view(scale.dtype)


@verb("layout", adapter=by_row())
def calculate_tile_tokens_dim(num_tokens: int, top_k: int, num_experts: int) -> int:
    """``int((T * top_k // E) * 1.3)`` up to the next power of two, clamped to [8, 64]."""
    for name, value in (("num_tokens", num_tokens), ("top_k", top_k)):
        if value < 0:
            raise OptionError(f"{name} must not be negative, got {value}")
    tokens = int((num_tokens * top_k // checks.positive("num_experts", num_experts)) * 1.3)
    return min(max(1 << max(tokens - 1, 0).bit_length(), 8), 64)


@verb("layout", outputs=("out", "starts", "ends"))
def pad_token_groups(x: Tensor, group_end_offsets: Tensor, alignment_size: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sorted by group, each group padded with zeros to a multiple of ``alignment_size`` rows.

    Parameters
    ----------
    x
        ``[M, K]`` bf16, f16 or f32.
    group_end_offsets
        ``[G]`` int32, ascending: where the rows of each group end; rows behind the last are dropped.
    alignment_size
        32 for blocks of MXFP8, 16 for FP8.

    Returns
    -------
    Tensor
        ``align(M + G alignment_size, alignment_size)`` rows, so that no size waits for the device; zeros where no row
        is.
    Tensor, Tensor
        ``[G]`` int32: the row at which each padded group begins, and the one behind it.

    Raises
    ------
    ShapeError, DtypeError, OptionError, DeviceError, InputError, LayoutError
    """
    rows, columns = checks.matrix("x", x, *checks.WIDE)
    groups = checks.rank("group_end_offsets", group_end_offsets, 1).shape[0]
    checks.dtype("group_end_offsets", group_end_offsets, torch.int32)
    checks.same_device(x=x, group_end_offsets=group_end_offsets)
    height = align(rows + groups * checks.positive("alignment_size", alignment_size), alignment_size)
    sizes = torch.diff(group_end_offsets, prepend=group_end_offsets.new_zeros(1))
    padded = (sizes + alignment_size - 1) // alignment_size * alignment_size
    ends = torch.cumsum(padded, 0, dtype=torch.int32)
    row = torch.arange(rows, device=x.device)
    group = torch.searchsorted(group_end_offsets.contiguous(), row, right=True)
    shift = torch.nn.functional.pad(ends - padded - (group_end_offsets - sizes), (0, 1))
    place = torch.where(group < groups, row + shift[group], height)  # rows of no group: one row behind the end
    out = x.new_zeros(height + 1, columns)
    out[place] = x
    return out[:height], ends - padded, ends


@verb("layout")
def unpad_token_groups(
    padded: Tensor,
    group_end_offsets: Tensor,
    padded_group_start_offsets: Tensor,
    num_tokens: int,
    alignment_size: int = 32,
) -> Tensor:
    """The inverse of :func:`pad_token_groups`: ``[num_tokens, K]``, of rows ``padded [R, K]``.

    Returns ``[num_tokens, K]`` of the dtype of ``padded``.

    Padding is not read. ``group_end_offsets`` are those of the rows without padding, the last of them ``num_tokens``;
    ``padded_group_start_offsets`` ``[G]`` int32 say where each group begins in ``padded``.

    Raises
    ------
    ShapeError, DtypeError, OptionError, DeviceError, InputError, LayoutError
    """
    checks.matrix("padded", padded, *checks.WIDE)
    groups = checks.rank("group_end_offsets", group_end_offsets, 1).shape[0]
    checks.dtype("group_end_offsets", group_end_offsets, torch.int32)
    starts = checks.operand("padded_group_start_offsets", padded_group_start_offsets, (groups,), "[G]", torch.int32)
    checks.same_device(padded=padded, group_end_offsets=group_end_offsets, padded_group_start_offsets=starts)
    checks.positive("alignment_size", alignment_size)
    row = torch.arange(checks.positive("num_tokens", num_tokens), device=padded.device)
    group = torch.searchsorted(group_end_offsets.contiguous(), row, right=True).clamp(max=groups - 1)
    begins = torch.nn.functional.pad(group_end_offsets[:-1], (1, 0))
    return padded[row - begins[group] + starts[group]]
