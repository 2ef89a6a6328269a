"""Weights of MoE experts: order of the halves, row orders of TensorRT-LLM's kernel, padding of the intermediate size.

    w13 [E, 2 I, H] holds the gate rows, then the up rows; w2 [E, H, I].
    swap_w13_to_w31   halves exchanged; an involution
    gated order       out[2 i] = gate[i], out[2 i + 1] = up[i]
    shuffle           in every block of 32 rows, out[8 c + d] = in[4 d + c], c < 4 and d < 8 (16 rows: out[8 c + d] =
                      in[2 d + c], c < 2), so that the 8 rows a fragment of the transposed MMA takes are consecutive
    padding           the gate half to rows [0, I_p), the up half to [I_p, 2 I_p), w2 to columns [0, I_p); zeros, and
                      silu(0) * 0 = 0 meets a zero column, so the fused product is unchanged

A row order is an int64 tensor: row ``i`` of the result is row ``order[i]`` of the input.
Sources: vLLM flashinfer_utils.py; TensorRT-LLM shuffleMatrixA and reorderRowsForGatedActGemm, checked index for index
against the pure-torch helpers of flashinfer-python. Not covered: shuffled scale factors, BlockMajorK.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.errors import OptionError, ShapeError
from oracle.truth.layout.tokens import align

INTERMEDIATE_ALIGNMENT = 16
EPILOGUE_TILE_M = 128
FRAGMENT = 8


def swap_w13_to_w31(x: Tensor) -> Tensor:
    """The halves of dim -2 exchanged, for weights ``[..., 2 I, H]`` and for their block scales ``[..., 2 B, C]``.

    Raises
    ------
    ShapeError
        The rows do not split into two halves (block scales: ``2 I / 128`` must be even).
    """
    rows = x.shape[-2] if x.dim() >= 2 else 0
    if rows == 0 or rows % 2:
        raise ShapeError(
            f"x has shape {list(x.shape)}: dim -2 must split into two halves; an odd number of block-scale rows means "
            "that a block spans gate and up, pad the intermediate size to a multiple of 128 first"
        )
    half = rows // 2
    order = torch.cat([torch.arange(half, rows, device="cpu"), torch.arange(half, device="cpu")])
    return _rows(x, order)


def gated_row_order(rows: int) -> Tensor:
    """The order that alternates gate and up rows.

    Raises
    ------
    ShapeError
        ``rows`` is odd.
    """
    if rows % 2:
        raise ShapeError(f"{rows} rows have no gate and up half; pass an even number")
    i = torch.arange(rows, device="cpu")
    return i // 2 + i % 2 * (rows // 2)


def row_order(rows: int, *, epilogue_tile_m: int = EPILOGUE_TILE_M) -> Tensor:
    """The order of ``shuffle_matrix_a``: blocks of 32 rows when the tile is a multiple of 128, else of 16.

    Raises
    ------
    ShapeError
        ``rows`` is no multiple of the block.
    """
    if epilogue_tile_m <= 0:
        raise OptionError(f"epilogue_tile_m={epilogue_tile_m}: pass a positive tile height, usually 128")
    block = 32 if epilogue_tile_m % 128 == 0 else 16
    if rows % block:
        raise ShapeError(f"{rows} rows are no multiple of {block}, the shuffle's block for tiles of {epilogue_tile_m}")
    i = torch.arange(rows, device="cpu")
    fragments = block // FRAGMENT
    within = i % block
    return i - within + within % FRAGMENT * fragments + within // FRAGMENT


def inverse_order(order: Tensor) -> Tensor:
    """The order that undoes ``order``."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


def reorder_rows_for_gated_act_gemm(w: Tensor) -> Tensor:
    """Gate and up rows of ``w [2 I, H]`` alternating; undone by ``undo_rows(w, gated_row_order(2 I))``."""
    _matrix("w", w)
    return _rows(w, gated_row_order(w.shape[0]))


def shuffle_matrix_a(w: Tensor, epilogue_tile_m: int = EPILOGUE_TILE_M) -> Tensor:
    """Rows of ``w [M, K]`` in the order of the transposed MMA; undone by ``undo_rows(w, row_order(M))``."""
    _matrix("w", w)
    return _rows(w, row_order(w.shape[0], epilogue_tile_m=epilogue_tile_m))


def undo_rows(w: Tensor, order: Tensor) -> Tensor:
    """The rows of ``w [..., M, K]`` before ``order`` was applied."""
    if order.numel() != w.shape[-2]:
        raise ShapeError(f"w has {w.shape[-2]} rows, the order {order.numel()}")
    return _rows(w, inverse_order(order))


def rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(
    gemm1_weights: Tensor, gemm2_weights: Tensor, *, is_gated: bool = True
) -> tuple[Tensor, Tensor]:
    """Both weights of every expert in the order of TensorRT-LLM's per-tensor FP8 kernel.

    ``gemm1_weights [E, 2 I, H]`` is gate/up interleaved (when gated) and shuffled, ``gemm2_weights [E, H, I]``
    shuffled. Pure: new tensors are returned. Undone by :func:`unrotate_weights`.

    Raises
    ------
    ShapeError
        No ``[E, rows, columns]``, or rows that are no multiple of 32.
    """
    _experts(gemm1_weights, gemm2_weights)
    order1, order2 = _rotation(gemm1_weights, gemm2_weights, is_gated)
    return _rows(gemm1_weights, order1), _rows(gemm2_weights, order2)


def unrotate_weights(gemm1_weights: Tensor, gemm2_weights: Tensor, *, is_gated: bool = True) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`rotate_weights_for_fi_trtllm_fp8_per_tensor_moe`."""
    _experts(gemm1_weights, gemm2_weights)
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

    Returns
    -------
    (w13, w2, padded intermediate size)
        The same objects when ``I`` is aligned already.

    Raises
    ------
    ShapeError
        The shapes disagree.
    """
    intermediate, padded = _intermediate(w13, w2, is_act_and_mul, min_alignment)
    if padded == intermediate:
        return w13, w2, padded
    starts = (0, padded) if is_act_and_mul else (0,)
    rows = torch.cat([start + torch.arange(intermediate, device="cpu") for start in starts])
    return _placed(w13, rows, -2, padded * len(starts)), _placed(w2, rows[:intermediate], -1, padded), padded


def align_fp8_moe_weights_for_fi_published(
    w13: Tensor, w2: Tensor, is_act_and_mul: bool, *, min_alignment: int = INTERMEDIATE_ALIGNMENT
) -> tuple[Tensor, Tensor, int]:
    """The published placement, a fault for gated weights: rows ``[0, 2 I)`` copied as one run.

    The up half then starts at ``I`` instead of ``I_p``: ``up[0 : I_p - I]`` lies in the gate's padding, and row ``i``
    of the up half that the kernel reads is ``up[i + I_p - I]``. Source: vLLM 0.20.2 flashinfer_utils.py.
    """
    intermediate, padded = _intermediate(w13, w2, is_act_and_mul, min_alignment)
    if padded == intermediate:
        return w13, w2, padded
    halves = 2 if is_act_and_mul else 1
    run = torch.arange(w13.shape[1], device="cpu")
    return _placed(w13, run, -2, padded * halves), _placed(w2, run[:intermediate], -1, padded), padded


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
    """
    if not block_quant:
        w13, w2, _ = align_fp8_moe_weights_for_fi(w13, w2, is_act_and_mul)
    if is_act_and_mul:
        w13 = swap_w13_to_w31(w13)
        w13_scale = swap_w13_to_w31(w13_scale) if block_quant else w13_scale
    if is_trtllm and not block_quant:
        w13, w2 = rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(w13, w2, is_gated=is_act_and_mul)
    return w13, w2, w13_scale, w2_scale


def unalign_fp8_moe_weights(
    w13: Tensor, w2: Tensor, is_act_and_mul: bool, *, intermediate: int
) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`align_fp8_moe_weights_for_fi`; padding is not read."""
    padded = w2.shape[-1]
    if not 0 < intermediate <= padded:
        raise ShapeError(f"intermediate={intermediate} does not fit w2 {list(w2.shape)}")
    starts = (0, padded) if is_act_and_mul else (0,)
    rows = torch.cat([start + torch.arange(intermediate, device="cpu") for start in starts])
    return _rows(w13, rows), w2[..., :intermediate].contiguous()


def _intermediate(w13: Tensor, w2: Tensor, is_act_and_mul: bool, alignment: int) -> tuple[int, int]:
    _experts(w13, w2)
    intermediate = w2.shape[2]
    halves = 2 if is_act_and_mul else 1
    if w13.shape[1] != halves * intermediate or w13.shape[2] != w2.shape[1]:
        raise ShapeError(
            f"w13 {list(w13.shape)} and w2 {list(w2.shape)} disagree; w2 [E, H, I] takes w13 [E, {halves} I, H]"
        )
    return intermediate, align(intermediate, alignment)


def _rotation(gemm1: Tensor, gemm2: Tensor, is_gated: bool) -> tuple[Tensor, Tensor]:
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
