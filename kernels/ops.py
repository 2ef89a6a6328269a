"""The layer's verbs as custom operators in the namespace ``fp8_kernels``.

``torch.compile`` sees each as one opaque call; the real implementation is the verb. Each operator is declared once: its
schema is inferred from the annotations of the function that runs. (``torch.library.custom_op`` would do the same with
16 us of host time a call instead of 4.) Nothing is decided here; importing :mod:`kernels` registers them.

Autocast       leaves operands as they are: a scale is float32 whatever the region says.
Compilation    outputs written into are named in the schema, and made functional by torch.
CUDA graphs    no operator waits for the device, or reads a value.
Autograd, vmap refused with a sentence: codes have no gradient, and rows are batched by the operators themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernels import (
    batched,
    blockscaled,
    fused,
    grouped,
    kv_cache,
    linear,
    logits,
    moe_pipelines,
    mx,
    mx_columns,
    mx_experts,
    mx_forms,
    mx_products,
    quantize,
)
from kernels.checks import FP8
from kernels.errors import OptionError
from kernels.mx_blocks import FP8_ELEMENTS, LINEAR, MX_BLOCK, NVFP4_BLOCK
from kernels.support import BLOCK

NAMESPACE = "fp8_kernels"
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
F = TypeVar("F", bound=Callable[..., Any])
_torch: Any = torch  # torch.library and the symbolic functions have no types
_library = _torch.library.Library(NAMESPACE, "FRAGMENT")


def _operator(
    fake: Callable[..., Any], *writes: str, known: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda run: run
) -> Callable[[F], F]:
    """Register a function under its name; ``fake`` makes the outputs without values, ``writes`` are written into.

    ``known`` makes of the function another one, that takes calls like an earlier one in less time.
    """

    with_gradients = torch.is_grad_enabled

    def register(real: F) -> F:
        name = real.__name__.removeprefix("_")

        def with_refusal(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                if with_gradients():
                    for x in (*args, *kwargs.values()) if kwargs else args:
                        if isinstance(x, Tensor) and x.requires_grad:
                            raise OptionError(
                                f"{NAMESPACE}::{name} has no gradient: call it under torch.no_grad() or "
                                "torch.inference_mode(), or detach the operands that require one"
                            )
                return function(*args, **kwargs)

            return run

        def no_vmap(*_: Any) -> Any:
            raise OptionError(f"{NAMESPACE}::{name} has no vmap: it takes every row in one call; flatten the batch")

        schema = _torch.library.infer_schema(inspect.unwrap(real), mutates_args=writes)
        _library.define(name + schema, tags=TAGS)
        _library.impl(name, known(with_refusal(real)), "CompositeExplicitAutograd")
        _torch.library.register_fake(f"{NAMESPACE}::{name}", with_refusal(fake), lib=_library)
        _torch.library.register_vmap(f"{NAMESPACE}::{name}", no_vmap, lib=_library)
        return real

    return register


def _nothing(*_: object, **__: object) -> None:
    return None


def _empty(*shape: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _lanes(x: Tensor, columns: int, align: int, dtype: torch.dtype) -> Tensor:
    """Scales of ``x`` by column, the leading stride a multiple of ``align``."""
    m = x.shape[-2]
    return _empty(*x.shape[:-2], columns, (m + align - 1) // align * align, like=x, dtype=dtype)[..., :m].mT


# --- quantisation ------------------------------------------------------------------------------------------------


def _scaled_fp8_quant_fake(
    x: Tensor, scale: Tensor | None, padding: int | None, scale_ub: Tensor | None, per_token: bool
) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] if padding is None else _torch.sym_max(x.shape[0], padding)
    q = _empty(rows, x.shape[1], like=x, dtype=torch.float8_e4m3fn)
    if scale is not None:
        return q, torch.empty_like(scale)
    return q, _empty(*((rows, 1) if per_token else (1,)), like=x, dtype=torch.float32)


@_operator(_scaled_fp8_quant_fake)
def _scaled_fp8_quant(
    x: Tensor,
    scale: Tensor | None,
    num_token_padding: int | None,
    scale_ub: Tensor | None,
    use_per_token_if_dynamic: bool,
) -> tuple[Tensor, Tensor]:
    q, s = quantize.scaled_fp8_quant(
        x,
        scale,
        num_token_padding=num_token_padding,
        scale_ub=scale_ub,
        use_per_token_if_dynamic=use_per_token_if_dynamic,
    )
    return q, s if scale is None else s.clone()  # an operator's result may not be its argument


def _group_quant_fake(x: Tensor, group_size: int, eps: float, layout: str, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    q, groups = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device), x.shape[-1] // group_size
    if layout == "row":
        return q, _empty(*x.shape[:-1], groups, like=x, dtype=torch.float32)
    return q, _lanes(x, groups, 4 if layout == "tma" else 1, torch.float32)


@_operator(_group_quant_fake)
def _per_token_group_quant_fp8(
    x: Tensor, group_size: int, eps: float, layout: str, use_ue8m0: bool
) -> tuple[Tensor, Tensor]:
    return quantize.per_token_group_quant_fp8(
        x,
        group_size,
        eps=eps,
        column_major_scales=layout != "row",
        tma_aligned_scales=layout == "tma",
        use_ue8m0=use_ue8m0,
    )


def _packed_quant_fake(x: Tensor, group_size: int, eps: float) -> tuple[Tensor, Tensor]:
    words = (x.shape[1] // group_size + 3) // 4
    return torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device), _lanes(x, words, 4, torch.int32)


@_operator(_packed_quant_fake)
def _per_token_group_quant_fp8_packed(x: Tensor, group_size: int, eps: float) -> tuple[Tensor, Tensor]:
    return quantize.per_token_group_quant_fp8_packed(x, group_size, eps=eps)


# --- fused quantisers --------------------------------------------------------------------------------------------


def _gated_codes(x: Tensor) -> Tensor:
    return _empty(*x.shape[:-1], x.shape[-1] // 2, like=x, dtype=torch.float8_e4m3fn)


def _gated_scales(x: Tensor, group: int) -> Tensor:
    return _empty(*x.shape[:-1], x.shape[-1] // 2 // group, like=x, dtype=torch.float32)


@_operator(lambda x, *_: _gated_codes(x))
def _silu_and_mul_quant(x: Tensor, scale: Tensor, rounding: str) -> Tensor:
    return fused.silu_and_mul_quant(x, scale, rounding=rounding)


def _per_block_fake(
    x: Tensor, group_size: int, scale_ub: Tensor | None, is_scale_transposed: bool, rounding: str
) -> tuple[Tensor, Tensor]:
    if is_scale_transposed:
        return _gated_codes(x), _lanes(x, x.shape[-1] // 2 // group_size, 1, torch.float32)
    return _gated_codes(x), _gated_scales(x, group_size)


@_operator(_per_block_fake)
def _silu_and_mul_per_block_quant(
    x: Tensor, group_size: int, scale_ub: Tensor | None, is_scale_transposed: bool, rounding: str
) -> tuple[Tensor, Tensor]:
    return fused.silu_and_mul_per_block_quant(
        x, group_size, scale_ub=scale_ub, is_scale_transposed=is_scale_transposed, rounding=rounding
    )


@_operator(lambda x, masked_m, group_size, *_: (_gated_codes(x), _gated_scales(x, group_size)))
def _silu_and_mul_masked_post_quant(
    x: Tensor, masked_m: Tensor, group_size: int, use_ue8m0: bool, rounding: str
) -> tuple[Tensor, Tensor]:
    return fused.silu_and_mul_masked_post_quant(
        x, masked_m, group_size=group_size, use_ue8m0=use_ue8m0, rounding=rounding
    )


def _masked_groups_fake(x: Tensor, masked_m: Tensor, group_size: int, *_: object) -> tuple[Tensor, Tensor]:
    return _codes_like(x), _empty(*x.shape[:-1], x.shape[-1] // group_size, like=x, dtype=torch.float32)


@_operator(_masked_groups_fake)
def _per_token_group_quant_fp8_masked(
    x: Tensor, masked_m: Tensor, group_size: int, eps: float, use_ue8m0: bool
) -> tuple[Tensor, Tensor]:
    return fused.per_token_group_quant_fp8_masked(x, masked_m, group_size, eps=eps, use_ue8m0=use_ue8m0)


@_operator(lambda x, masked_m: (_gated_codes(x), _gated_scales(x, 128)))
def _persistent_masked_m_silu_mul_quant(x: Tensor, masked_m: Tensor) -> tuple[Tensor, Tensor]:
    return fused.persistent_masked_m_silu_mul_quant(x, masked_m)


def _codes_like(x: Tensor) -> Tensor:
    return _empty(*x.shape, like=x, dtype=torch.float8_e4m3fn)


def _sum_like(x: Tensor, residual: Tensor | None) -> Tensor:
    """The sum with a residual; an operator returns a tensor, so an empty one without."""
    return _empty(*(x.shape if residual is not None else (0,)), like=x, dtype=x.dtype)


def _without_none(x: Tensor, z: Tensor | None) -> Tensor:
    return x.new_empty(0) if z is None else z


@_operator(lambda x, *_: _codes_like(x))
def _rms_norm_static_fp8_quant(x: Tensor, weight: Tensor, scale: Tensor, epsilon: float, rounding: str) -> Tensor:
    return fused.rms_norm_static_fp8_quant(x, weight, scale, epsilon, rounding=rounding)


@_operator(lambda x, *_: _codes_like(x))
def _rmsnorm_quant(x: Tensor, weight: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    return fused.rmsnorm_quant(x, weight, scale, epsilon)


@_operator(lambda x, residual, *_: (_codes_like(x), _sum_like(x, residual)))
def _fused_add_rms_norm_static_fp8_quant(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float, rounding: str
) -> tuple[Tensor, Tensor]:
    return fused.fused_add_rms_norm_static_fp8_quant(x, residual, weight, scale, epsilon, rounding=rounding)


@_operator(lambda x, residual, *_: (_codes_like(x), _sum_like(x, residual)))
def _fused_add_rmsnorm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    return fused.fused_add_rmsnorm_quant(x, residual, weight, scale, epsilon)


def _token_fake(
    x: Tensor, weight: Tensor, epsilon: float, scale_ub: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _codes_like(x), _empty(x.shape[0], 1, like=x, dtype=torch.float32), _sum_like(x, residual)


@_operator(_token_fake)
def _rms_norm_dynamic_per_token_quant(
    x: Tensor, weight: Tensor, epsilon: float, scale_ub: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, scale, z = fused.rms_norm_dynamic_per_token_quant(x, weight, epsilon, scale_ub=scale_ub, residual=residual)
    return q, scale, _without_none(x, z)


def _block_fake(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    group_size: int,
    scale_ub: Tensor | None,
    residual: Tensor | None,
    is_scale_transposed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = x.shape[1] // group_size
    plain = _empty(x.shape[0], groups, like=x, dtype=torch.float32)
    return _codes_like(x), _lanes(x, groups, 1, torch.float32) if is_scale_transposed else plain, _sum_like(x, residual)


@_operator(_block_fake)
def _rms_norm_per_block_quant(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    group_size: int,
    scale_ub: Tensor | None,
    residual: Tensor | None,
    is_scale_transposed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    q, scale, z = fused.rms_norm_per_block_quant(
        x, weight, epsilon, group_size, scale_ub=scale_ub, residual=residual, is_scale_transposed=is_scale_transposed
    )
    return q, scale, _without_none(x, z)


def _rope_fake(
    q_rope: Tensor, k_rope: Tensor, q_nope: Tensor, k_nope: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _codes_like(q_rope), _codes_like(k_rope), _codes_like(q_nope), _codes_like(k_nope)


@_operator(_rope_fake)
def _rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor,
    k_nope: Tensor,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool,
    quant_scale_q: float,
    quant_scale_kv: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fused.rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quant_scale_q, quant_scale_kv
    )


# --- MX and NVFP4 ------------------------------------------------------------------------------------------------


def _scale_bytes(x: Tensor, width: int, layout: str) -> Tensor:
    m, c = x.shape[0], x.shape[1] // width
    if layout == LINEAR:
        return _empty(m, c, like=x, dtype=torch.uint8)
    return _empty(mx_products.size_of(m, c, layout), like=x, dtype=torch.uint8)


def _mxfp8_fake(
    x: Tensor, layout: str = "128x4", rounding: str = "rceil", element: str = "e4m3", alignment: int = MX_BLOCK
) -> tuple[Tensor, Tensor]:
    *lead, k = x.shape
    q = _empty(*lead, k + -k % alignment, like=x, dtype=FP8_ELEMENTS[element][3])
    return q, _scale_bytes(q, MX_BLOCK, layout)


def _mxfp4_fake(x: Tensor, layout: str = "128x4", rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    return _empty(x.shape[0], x.shape[1] // 2, like=x, dtype=torch.uint8), _scale_bytes(x, MX_BLOCK, layout)


def _nvfp4_fake(
    x: Tensor, global_scale: Tensor, layout: str = "128x4", is_global_scale_inversed: bool = False
) -> tuple[Tensor, Tensor]:
    return _empty(x.shape[0], x.shape[1] // 2, like=x, dtype=torch.uint8), _scale_bytes(x, NVFP4_BLOCK, layout)


def _one_a_byte_fake(x: Tensor, layout: str = "128x4", *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return _empty(*x.shape, like=x, dtype=torch.uint8), _scale_bytes(x, MX_BLOCK, layout)


def _two_levels_fake(
    x: Tensor, global_scale: Tensor, layout: str = "128x4", *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    return _nvfp4_fake(x, global_scale, layout)


def _per_token_fake(x: Tensor, global_scale: Tensor, layout: str = "128x4") -> tuple[Tensor, Tensor, Tensor]:
    return *_nvfp4_fake(x, global_scale, layout), _empty(x.shape[0], like=x, dtype=torch.float32)


def _columns_fake(
    x: Tensor, layout: str = "128x4", rounding: str = "rceil", element: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    q = _empty(k, m, like=x, dtype=FP8_ELEMENTS[element][3])
    if layout == mx_columns.COMPACT:
        return q.t(), _empty(m // MX_BLOCK, k, like=x, dtype=torch.uint8)
    return q.t(), _scale_bytes(q, MX_BLOCK, layout)


def _squares_fake(
    x: Tensor, layout: str = "128x4", direction: str = "rowwise", element: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    q = _empty(*x.shape, like=x, dtype=FP8_ELEMENTS[element][3])
    if direction == mx_columns.DIRECTIONS[0]:
        return q, _scale_bytes(x, MX_BLOCK, LINEAR if layout == mx_columns.COMPACT else layout)
    return q, _columns_fake(x, layout)[1]


def _weights_fake(
    x: Tensor, layout: str = "128x4", rounding: str = "rceil", element: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    e, n, k = x.shape
    q = _empty(e, k, n, like=x, dtype=FP8_ELEMENTS[element][3])
    if layout == mx_columns.COMPACT:
        return q.mT, _empty(e, n // MX_BLOCK, k, like=x, dtype=torch.uint8)
    return q.mT, _empty(e, _scale_bytes(q[0], MX_BLOCK, layout).shape[0], like=x, dtype=torch.uint8)


def _batched_fake(x: Tensor, global_scale: Tensor, layout: str = "128x4") -> tuple[Tensor, Tensor]:
    b, m, k = x.shape
    scale = _scale_bytes(x[0], NVFP4_BLOCK, layout)
    return _empty(b, m, k // 2, like=x, dtype=torch.uint8), _empty(b, scale.shape[0], like=x, dtype=torch.uint8)


def _silu_fake(x: Tensor, global_scale: Tensor, layout: str = "128x4") -> tuple[Tensor, Tensor]:
    return _nvfp4_fake(_empty(x.shape[0], x.shape[1] // 2, like=x, dtype=x.dtype), global_scale, layout)


def _fp4_cast_fake(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    each, dtype = (4 * gran_k, torch.int32) if use_packed_ue8m0 else (gran_k, torch.float32)
    groups = _empty(m, (k + each - 1) // each, like=x, dtype=dtype)
    return _empty(m, k // 2, like=x, dtype=torch.int8), groups


def _requantised_fake(
    x: Tensor, block_scale: Tensor, layout: str = "128x4", dtype: str = "bfloat16"
) -> tuple[Tensor, Tensor]:
    return _mxfp8_fake(x, layout)


def _blocks_fake(x: Tensor, mx_scale: Tensor, layout: str = "128x4", dtype: str = "bfloat16") -> tuple[Tensor, Tensor]:
    m, k = ((extent + BLOCK - 1) // BLOCK for extent in x.shape)
    return _empty(*x.shape, like=x, dtype=torch.float8_e4m3fn), _empty(m, k, like=x, dtype=torch.float32)


def _masked_fake(x: Tensor, mask: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    (g, m, k), four = x.shape, global_scale is not None
    width, dtype = (NVFP4_BLOCK, torch.uint8) if four else (MX_BLOCK, torch.float8_e4m3fn)
    down, across = (m + mx_experts.HEIGHT - 1) // mx_experts.HEIGHT, (k // width + 3) // 4
    q = _empty(g, m, k // 2 if four else k, like=x, dtype=dtype).permute(1, 2, 0)
    return q, _empty(g, down, across, 32, 4, 4, like=x, dtype=torch.uint8).permute(3, 4, 1, 5, 2, 0)


def _masked_silu_fake(x: Tensor, mask: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    return _masked_fake(_empty(*x.shape[:2], x.shape[2] // 2, like=x, dtype=x.dtype), mask, global_scale)


def _experts_fake(
    x: Tensor, global_scale: Tensor, expert_offsets: Tensor, placement: str = "tight"
) -> tuple[Tensor, Tensor]:
    rows = mx_experts.rows_of_scales(x.shape[0], expert_offsets.shape[0] - 1)
    scale = _empty(rows * ((x.shape[1] // NVFP4_BLOCK + 3) // 4 * 4), like=x, dtype=torch.uint8)
    return _empty(x.shape[0], x.shape[1] // 2, like=x, dtype=torch.uint8), scale


def _mxfp8_experts_fake(x: Tensor, expert_offsets: Tensor, placement: str = "tight") -> tuple[Tensor, Tensor]:
    rows = mx_experts.rows_of_scales(x.shape[0], expert_offsets.shape[0] - 1)
    scale = _empty(rows * ((x.shape[1] // MX_BLOCK + 3) // 4 * 4), like=x, dtype=torch.uint8)
    return _empty(*x.shape, like=x, dtype=torch.float8_e4m3fn), scale


_operator(_mxfp8_fake)(mx.mxfp8_quantize)
_operator(_mxfp4_fake)(mx.mxfp4_quantize)
_operator(_nvfp4_fake)(mx.nvfp4_quantize)
_operator(_columns_fake)(mx_columns.mxfp8_quantize_columnwise)
_operator(_weights_fake)(mx_columns.mxfp8_quantize_3d)
_operator(_squares_fake)(mx_columns.mxfp8_quantize_2d)
_operator(_one_a_byte_fake)(mx_forms.mxfp6_quantize)
_operator(_one_a_byte_fake)(mx_forms.mxint8_quantize)
_operator(_fp4_cast_fake)(mx_forms.per_token_cast_to_fp4)
_operator(_batched_fake)(mx_forms.nvfp4_batched_quantize)
_operator(_two_levels_fake)(mx_forms.nvfp4_quantize_shuffled)
_operator(_silu_fake)(mx_forms.silu_and_mul_nvfp4_quantize)
_operator(_two_levels_fake)(mx_forms.nvfp4_quantize_stochastic)
_operator(_two_levels_fake)(mx_forms.nvfp4_quantize_2d)
_operator(_two_levels_fake)(mx_forms.nvfp4_quantize_4over6)
_operator(_two_levels_fake)(mx_forms.nvfp4_quantize_rht)
_operator(_two_levels_fake)(mx_forms.nvfp4_quantize_of_fp8)
_operator(_per_token_fake)(mx_forms.nvfp4_quantize_per_token)
_operator(_mxfp4_fake)(mx_forms.mxfp4_quantize_of_fp8)
_operator(_requantised_fake)(mx_forms.fp8_block_to_mxfp8)
_operator(_blocks_fake)(mx_forms.mxfp8_to_fp8_block)
_operator(_masked_fake)(mx_experts.scaled_fp4_grouped_quantize)
_operator(_masked_silu_fake)(mx_experts.silu_and_mul_scaled_nvfp4_experts_quantize)
_operator(_masked_fake)(mx_experts.mxfp8_grouped_quantize)
_operator(_experts_fake)(mx_experts.scaled_fp4_experts_quant)
_operator(_mxfp8_experts_fake)(mx_experts.mxfp8_experts_quant)


# --- KV caches ---------------------------------------------------------------------------------------------------

_operator(_nothing, "key_cache", "value_cache")(kv_cache.reshape_and_cache_flash)
_operator(_nothing, "key_cache", "value_cache")(kv_cache.reshape_and_cache)
_operator(_nothing, "kv_cache")(kv_cache.concat_and_cache_mla)
_operator(_nothing, "kv_buffer")(kv_cache.set_mla_kv_buffer)
_operator(_nothing, "k_cache", "v_cache")(kv_cache.append_paged_kv_cache)
_operator(_nothing, "ckv_cache", "kpe_cache")(kv_cache.append_paged_mla_kv_cache)
_operator(_nothing, "kv_cache")(kv_cache.concat_and_cache_ds_mla)
_operator(_nothing, "kv_cache")(kv_cache.indexer_k_quant_and_cache)
_operator(_nothing, "k_cache", "v_cache", "k_scale_cache", "v_scale_cache")(
    kv_cache.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
)
_operator(_nothing, "dst")(kv_cache.gather_and_maybe_dequant_cache)
_operator(_nothing, "dst")(kv_cache.cp_gather_cache)
_operator(_nothing, "dst")(kv_cache.cp_gather_and_upconvert_fp8_kv_cache)
_operator(_nothing, "dst_k", "dst_scale")(kv_cache.cp_gather_indexer_k_quant_cache)
_operator(lambda src, scale=1.0, out_dtype=FP8: torch.empty_like(src, dtype=out_dtype))(kv_cache.convert_fp8)
_operator(lambda x: _empty(*x.shape[:3], kv_cache.ROW, like=x, dtype=torch.uint8))(kv_cache.quantize_k_cache)
_operator(lambda x: _empty(*x.shape[:3], kv_cache.RANK + kv_cache.ROPE, like=x, dtype=torch.bfloat16))(
    kv_cache.dequantize_k_cache
)


# --- products ----------------------------------------------------------------------------------------------------


def _matrix_fake(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> Tensor:
    """``[M, N]`` of ``a [M, K]`` and ``b [K, N]`` in the one dtype among the arguments."""
    (dtype,) = (x for x in (*rest, *named.values()) if isinstance(x, torch.dtype))
    return _empty(a.shape[0], b.shape[1], like=a, dtype=dtype)


def _linear_fake(input: Tensor, weight: Tensor, *_: object, **__: object) -> Tensor:
    return _empty(input.shape[0], weight.shape[0], like=input, dtype=torch.bfloat16)


_operator(_matrix_fake)(linear.cutlass_scaled_mm)
_operator(_linear_fake)(blockscaled.flashinfer_fp8_blockscale_gemm)
_operator(_linear_fake, known=blockscaled.linear_operator({e8m0: ("deepgemm", e8m0) for e8m0 in (False, True)}))(
    blockscaled.deepgemm_blockscale_linear
)
_operator(_linear_fake, known=blockscaled.linear_operator({e8m0: e8m0 for e8m0 in (False, True)}))(
    blockscaled.dynamic_flashinfer_deepgemm_blockscale_gemm
)


@_operator(lambda input, weight, _: _empty(input.shape[0], weight.shape[0], like=input, dtype=input.dtype))
def _few_rows_blockscale_linear(input: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    return blockscaled.few_rows_blockscale_linear(input, weight, weight_scale)


@_operator(_matrix_fake)
def _torch_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, mode: str
) -> Tensor:
    return linear.TORCH_ROUTINES[mode](
        qinput=a, weight=b, out_dtype=out_dtype, scale_a=scale_a, scale_b=scale_b, bias=bias
    )


_operator(_nothing, "out")(mx_products.mx_product)


@_operator(_nothing, "out", known=blockscaled.gemm_operator)
def _fp8_gemm_nt(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None, disable_ue8m0_cast: bool
) -> None:
    blockscaled.fp8_gemm_nt((a, a_scale), (b, b_scale), out, c=c, disable_ue8m0_cast=disable_ue8m0_cast)


@_operator(_linear_fake)
def _fp8_blockscale_gemm_sm90(
    input: Tensor, weight: Tensor, input_scale: Tensor | None, weight_scale: Tensor | None
) -> Tensor:
    return blockscaled.fp8_blockscale_gemm_sm90(input, weight, input_scale, weight_scale)


# --- groups and logits -------------------------------------------------------------------------------------------


@_operator(_nothing, "out")
def _m_grouped_fp8_gemm_nt_contiguous(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    m_indices: Tensor,
    disable_ue8m0_cast: bool,
    check: bool | None,
) -> None:
    left, right = (a, a_scale), (b, b_scale)
    grouped.m_grouped_fp8_gemm_nt_contiguous(
        left, right, out, m_indices, disable_ue8m0_cast=disable_ue8m0_cast, check=check
    )


@_operator(_nothing, "out")
def _fp8_m_grouped_gemm_nt_masked(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    masked_m: Tensor,
    expected_m: int,
    disable_ue8m0_cast: bool,
    check: bool | None,
) -> None:
    left, right = (a, a_scale), (b, b_scale)
    grouped.fp8_m_grouped_gemm_nt_masked(
        left, right, out, masked_m, expected_m, disable_ue8m0_cast=disable_ue8m0_cast, check=check
    )


@_operator(_matrix_fake)
def _scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    check: bool | None,
) -> Tensor:
    return grouped.scaled_grouped_mm(a, b, scale_a, scale_b, offsets, out_dtype, check=check)


@_operator(_nothing, "out")
def _fp8_gemm_nt_1d1d(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None) -> None:
    batched.fp8_gemm_nt_1d1d((a, a_scale), (b, b_scale), out, c=c)


@_operator(_nothing, "out")
def _k_grouped_fp8_gemm_nt_contiguous(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    ks: list[int],
    ks_tensor: Tensor,
    c: Tensor | None,
) -> None:
    batched.k_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), out, ks, ks_tensor, c=c)


@_operator(_nothing, "out")
def _fp8_gemm_nt_skip_head_mid(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    head_splits: list[int],
    disable_ue8m0_cast: bool,
) -> None:
    left, mid, right = head_splits
    pairs = (a, a_scale), (b, b_scale)
    batched.fp8_gemm_nt_skip_head_mid(*pairs, out, (left, mid, right), disable_ue8m0_cast=disable_ue8m0_cast)


@_operator(_nothing, "out")
def _fp8_einsum(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    batched.fp8_einsum("bhr,hdr->bhd", (a, a_scale), (b, b_scale), out)


def _bmm_fake(A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _empty(A.shape[0], A.shape[1], B.shape[2], like=A, dtype=dtype)


_operator(_bmm_fake)(batched.bmm_fp8)


def _layer_fake(x: Tensor, *_: object, **__: object) -> Tensor:
    return _empty(*x.shape, like=x, dtype=torch.bfloat16)


_operator(_layer_fake)(moe_pipelines.moe_experts)


def _mqa_fake(q: Tensor, k: Tensor, *_: object) -> Tensor:
    return _empty(q.shape[0], k.shape[0], like=q, dtype=torch.float32)


@_operator(_mqa_fake)
def _fp8_mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    clean_logits: bool,
    check: bool | None,
) -> Tensor:
    operands = q, (k, k_scale), weights, cu_seqlen_ks, cu_seqlen_ke
    return logits.fp8_mqa_logits(*operands, clean_logits, check=check).contiguous()


def _paged_fake(q: Tensor, kv_cache: Tensor, *rest: Any) -> Tensor:
    return _empty(q.shape[0] * q.shape[1], rest[4], like=q, dtype=torch.float32)


@_operator(_paged_fake)
def _fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: Tensor,
    max_model_len: int,
    clean_logits: bool,
    check: bool | None,
) -> Tensor:
    operands = q, kv_cache, weights, context_lens, block_tables, schedule_metadata
    return logits.fp8_paged_mqa_logits(*operands, max_model_len, clean_logits, check=check).contiguous()
