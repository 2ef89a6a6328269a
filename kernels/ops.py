"""The layer's verbs as custom operators in the namespace ``fp8_kernels``, with fake implementations.

``torch.compile`` sees each as one opaque call; the real implementation is the verb itself. Importing this module
registers them (importing :mod:`kernels` does). Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from kernels import blockscaled, grouped, linear, logits, quantize

NAMESPACE = "fp8_kernels"
_library = Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch.library is untyped
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def _operator(schema: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.split("(")[0]
    _library.define(schema, tags=TAGS)  # type: ignore[no-untyped-call]  # torch.library is untyped
    _library.impl(name, real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _nothing(*_: object) -> None:
    return None


# --- quantisation ------------------------------------------------------------------------------------------------


def _scaled_fp8_quant(
    x: Tensor, scale: Tensor | None, padding: int | None, scale_ub: Tensor | None, per_token: bool
) -> tuple[Tensor, Tensor]:
    q, s = quantize.scaled_fp8_quant(
        x, scale, num_token_padding=padding, scale_ub=scale_ub, use_per_token_if_dynamic=per_token
    )
    return q, s if scale is None else s.clone()  # an operator's result may not be its argument


def _scaled_fp8_quant_fake(
    x: Tensor, scale: Tensor | None, padding: int | None, scale_ub: Tensor | None, per_token: bool
) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] if padding is None else torch.sym_max(x.shape[0], padding)  # type: ignore[no-untyped-call]
    q = torch.empty(rows, x.shape[1], dtype=torch.float8_e4m3fn, device=x.device)
    if scale is not None:
        return q, torch.empty_like(scale)
    shape = (rows, 1) if per_token else (1,)
    return q, torch.empty(shape, dtype=torch.float32, device=x.device)


def _group_quant(x: Tensor, group_size: int, eps: float, layout: str, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    return quantize.per_token_group_quant_fp8(
        x,
        group_size,
        eps=eps,
        column_major_scales=layout != "row",
        tma_aligned_scales=layout == "tma",
        use_ue8m0=use_ue8m0,
    )


def _group_quant_fake(x: Tensor, group_size: int, eps: float, layout: str, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    groups = x.shape[-1] // group_size
    if layout == "row":
        return q, torch.empty(*x.shape[:-1], groups, dtype=torch.float32, device=x.device)
    m = x.shape[-2]
    lead = (m + 3) // 4 * 4 if layout == "tma" else m
    lanes = torch.empty(*x.shape[:-2], groups, lead, dtype=torch.float32, device=x.device)
    return q, lanes[..., :m].transpose(-1, -2)


def _packed_quant(x: Tensor, group_size: int, eps: float) -> tuple[Tensor, Tensor]:
    return quantize.per_token_group_quant_fp8_packed(x, group_size, eps=eps)


def _packed_quant_fake(x: Tensor, group_size: int, eps: float) -> tuple[Tensor, Tensor]:
    m, words = x.shape[0], (x.shape[1] // group_size + 3) // 4
    lanes = torch.empty(words, (m + 3) // 4 * 4, dtype=torch.int32, device=x.device)
    return torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device), lanes[:, :m].t()


_operator(
    "scaled_fp8_quant(Tensor x, Tensor? scale, int? num_token_padding, Tensor? scale_ub, bool use_per_token_if_dynamic)"
    " -> (Tensor, Tensor)",
    _scaled_fp8_quant,
    _scaled_fp8_quant_fake,
)
_operator(
    "per_token_group_quant_fp8(Tensor x, int group_size, float eps, str layout, bool use_ue8m0) -> (Tensor, Tensor)",
    _group_quant,
    _group_quant_fake,
)
_operator(
    "per_token_group_quant_fp8_packed(Tensor x, int group_size, float eps) -> (Tensor, Tensor)",
    _packed_quant,
    _packed_quant_fake,
)


# --- products ----------------------------------------------------------------------------------------------------


def _cutlass_fake(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)


def _torch_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, mode: str
) -> Tensor:
    return linear.TORCH_ROUTINES[mode](
        qinput=a, weight=b, out_dtype=out_dtype, scale_a=scale_a, scale_b=scale_b, bias=bias
    )


def _torch_fake(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, mode: str
) -> Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)


def _gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None, disable_ue8m0_cast: bool
) -> None:
    blockscaled.fp8_gemm_nt((a, a_scale), (b, b_scale), out, c=c, disable_ue8m0_cast=disable_ue8m0_cast)


def _blockscale(
    input: Tensor, weight: Tensor, input_scale: Tensor | None, weight_scale: Tensor | None, check: bool
) -> Tensor:
    return blockscaled.fp8_blockscale_gemm_sm90(input, weight, input_scale, weight_scale, check=check)


def _linear_fake(input: Tensor, weight: Tensor, *_: object) -> Tensor:
    return torch.empty(input.shape[0], weight.shape[0], dtype=torch.bfloat16, device=input.device)


_operator(
    "cutlass_scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType out_dtype, Tensor? bias)"
    " -> Tensor",
    linear.cutlass_scaled_mm,
    _cutlass_fake,
)
_operator(
    "torch_scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype, str mode)"
    " -> Tensor",
    _torch_mm,
    _torch_fake,
)
_operator(
    "fp8_gemm_nt(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(a!) out, Tensor? c,"
    " bool disable_ue8m0_cast) -> ()",
    _gemm,
    _nothing,
)
_operator(
    "fp8_blockscale_gemm_sm90(Tensor input, Tensor weight, Tensor? input_scale, Tensor? weight_scale, bool check)"
    " -> Tensor",
    _blockscale,
    _linear_fake,
)
_operator(
    "flashinfer_fp8_blockscale_gemm(Tensor input, Tensor weight, Tensor weight_scale) -> Tensor",
    blockscaled.flashinfer_fp8_blockscale_gemm,
    _linear_fake,
)
_operator(
    "deepgemm_blockscale_linear(Tensor input, Tensor weight, Tensor weight_scale, int group_size,"
    " bool use_deep_gemm_e8m0) -> Tensor",
    blockscaled.deepgemm_blockscale_linear,
    _linear_fake,
)
_operator(
    "dynamic_flashinfer_deepgemm_blockscale_gemm(Tensor input, Tensor weight, Tensor weight_scale, int group_size,"
    " bool use_deep_gemm_e8m0) -> Tensor",
    blockscaled.dynamic_flashinfer_deepgemm_blockscale_gemm,
    _linear_fake,
)


# --- groups and logits -------------------------------------------------------------------------------------------


def _contiguous(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, m_indices: Tensor, no_cast: bool, check: bool
) -> None:
    grouped.m_grouped_fp8_gemm_nt_contiguous(
        (a, a_scale), (b, b_scale), out, m_indices, disable_ue8m0_cast=no_cast, check=check
    )


def _masked(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    masked_m: Tensor,
    expected_m: int,
    no_cast: bool,
    check: bool,
) -> None:
    grouped.fp8_m_grouped_gemm_nt_masked(
        (a, a_scale), (b, b_scale), out, masked_m, expected_m, disable_ue8m0_cast=no_cast, check=check
    )


def _scaled(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, out_dtype: torch.dtype, check: bool
) -> Tensor:
    return grouped.scaled_grouped_mm(a, b, scale_a, scale_b, offsets, out_dtype, check=check)


def _scaled_fake(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, out_dtype: torch.dtype, check: bool
) -> Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)


def _mqa(
    q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, clean: bool, check: bool
) -> Tensor:
    return logits.fp8_mqa_logits(q, (k, k_scale), weights, ks, ke, clean, check=check).contiguous()


def _mqa_fake(q: Tensor, k: Tensor, *_: object) -> Tensor:
    return torch.empty(q.shape[0], k.shape[0], dtype=torch.float32, device=q.device)


def _paged(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: Tensor,
    max_model_len: int,
    clean: bool,
    check: bool,
) -> Tensor:
    operands = q, kv_cache, weights, context_lens, block_tables, schedule_metadata
    return logits.fp8_paged_mqa_logits(*operands, max_model_len, clean, check=check).contiguous()


def _paged_fake(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    lens: Tensor,
    tables: Tensor,
    schedule: Tensor,
    longest: int,
    *_: object,
) -> Tensor:
    return torch.empty(q.shape[0] * q.shape[1], longest, dtype=torch.float32, device=q.device)


_operator(
    "m_grouped_fp8_gemm_nt_contiguous(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(a!) out,"
    " Tensor m_indices, bool disable_ue8m0_cast, bool check) -> ()",
    _contiguous,
    _nothing,
)
_operator(
    "fp8_m_grouped_gemm_nt_masked(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(a!) out, Tensor masked_m,"
    " int expected_m, bool disable_ue8m0_cast, bool check) -> ()",
    _masked,
    _nothing,
)
_operator(
    "scaled_grouped_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offsets, ScalarType out_dtype,"
    " bool check) -> Tensor",
    _scaled,
    _scaled_fake,
)
_operator(
    "fp8_paged_mqa_logits(Tensor q, Tensor kv_cache, Tensor weights, Tensor context_lens, Tensor block_tables,"
    " Tensor schedule_metadata, int max_model_len, bool clean_logits, bool check) -> Tensor",
    _paged,
    _paged_fake,
)
_operator(
    "fp8_mqa_logits(Tensor q, Tensor k, Tensor k_scale, Tensor weights, Tensor cu_seqlen_ks, Tensor cu_seqlen_ke,"
    " bool clean_logits, bool check) -> Tensor",
    _mqa,
    _mqa_fake,
)
