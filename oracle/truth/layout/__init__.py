"""Where numbers lie in memory: padding, packing, swizzling and permuting, each with its inverse.

A layout moves bits and never computes with values. Every map here is injective, so unpacking what was packed gives
the same bits back; memory that no number maps to is padding, zero when written here, and never read by an inverse.

``strided``  column-major TMA-aligned scales, packed UE8M0 scales, what DeepGEMM asks for on each arch
``swizzle``  128x4 and 8x4 tiles of scales
``experts``  gate/up order, row orders for TensorRT-LLM, padding of the intermediate size
``cache``    paged keys with their scales
``tokens``   padded row counts and tile sizes

Not here: requantisation and scale arithmetic (:mod:`oracle.truth.shards`).
"""

from oracle.truth.layout.cache import pack_kv_cache, unpack_kv_cache
from oracle.truth.layout.experts import (
    align_fp8_moe_weights_for_fi,
    align_fp8_moe_weights_for_fi_published,
    gated_row_order,
    inverse_order,
    prepare_fp8_moe_layer_for_fi,
    reorder_rows_for_gated_act_gemm,
    rotate_weights_for_fi_trtllm_fp8_per_tensor_moe,
    row_order,
    shuffle_matrix_a,
    swap_w13_to_w31,
    unalign_fp8_moe_weights,
    undo_rows,
    unrotate_weights,
)
from oracle.truth.layout.strided import (
    get_col_major_tma_aligned_tensor,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    has_pad_lanes,
    pad_lanes,
    row_major,
    transform_sf_into_required_layout,
    unpack_ue8m0,
)
from oracle.truth.layout.swizzle import swizzle_offsets, swizzle_scale, unswizzle_scale
from oracle.truth.layout.tokens import (
    OUTPUT_PADDING,
    align,
    calculate_tile_tokens_dim,
    ceil_div,
    padded_rows,
    tma_aligned,
)

__all__ = [
    "OUTPUT_PADDING",
    "align",
    "align_fp8_moe_weights_for_fi",
    "align_fp8_moe_weights_for_fi_published",
    "calculate_tile_tokens_dim",
    "ceil_div",
    "gated_row_order",
    "get_col_major_tma_aligned_tensor",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "has_pad_lanes",
    "inverse_order",
    "pack_kv_cache",
    "pad_lanes",
    "padded_rows",
    "prepare_fp8_moe_layer_for_fi",
    "reorder_rows_for_gated_act_gemm",
    "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe",
    "row_major",
    "row_order",
    "shuffle_matrix_a",
    "swap_w13_to_w31",
    "swizzle_offsets",
    "swizzle_scale",
    "tma_aligned",
    "transform_sf_into_required_layout",
    "unalign_fp8_moe_weights",
    "undo_rows",
    "unpack_kv_cache",
    "unpack_ue8m0",
    "unrotate_weights",
    "unswizzle_scale",
]
