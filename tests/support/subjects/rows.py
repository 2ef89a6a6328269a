# ruff: noqa: E501
"""Wrong kernels, each right but for one habit of shipped ones, by the classes of default cases that are to refuse it.

``tests.support.subjects.rows:NAME`` is what ``validate`` calls, and ``right_NAME`` the right kernel. Each is the
layer's own kernel of a contract with other inputs or options before it, or other numbers behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.subjects import BY_CONTRACT

Given = dict[str, Any]


@dataclass(frozen=True)
class Wrong:
    """A wrong kernel of ``contract``: ``before`` changes what it is called with, ``after`` what it returned."""

    contract: str
    before: Callable[[Given], Given] = lambda given: given
    after: Callable[[Given, Tensor], Tensor] = lambda given, out: out
    right: Callable[[Given], Given] = lambda given: given  # before the right kernel, where that refuses such strides

    def __call__(self, **given: Any) -> Any:
        outputs = getattr(BY_CONTRACT, self.contract)(**self.before(dict(given)))
        if isinstance(outputs, Tensor):
            return self.after(given, outputs)
        if isinstance(outputs, dict):
            return {name: self.after(given, out) for name, out in outputs.items()}
        return tuple(self.after(given, out) for out in outputs)


def never(*names: str) -> Callable[[Given], Given]:
    """Options and optional inputs of these names are not read."""
    return lambda given: {name: value for name, value in given.items() if name not in names}


def each(change: Callable[[Tensor], Tensor], *names: str) -> Callable[[Given], Given]:
    """These inputs changed."""
    return lambda given: given | {name: change(given[name]) for name in names if given.get(name) is not None}


def narrow(x: Tensor) -> Tensor:
    """The first of its 32-bit words, as many as it has elements."""
    return x.contiguous().view(torch.int32).flatten()[: x.numel()].reshape(x.shape)


def packed(x: Tensor) -> Tensor:
    """What lies in memory from the first element on, as if the rows followed each other."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


def until(count: int, dim: int = 0) -> Callable[[Given, Tensor], Tensor]:
    """Zeros behind the first ``count`` of a dimension."""

    def cut(given: Given, out: Tensor) -> Tensor:
        out = out.clone()
        if out.dim() > dim and out.shape[dim] > count:
            bits(out).narrow(dim, count, out.shape[dim] - count).zero_()
        return out

    return cut


def rows_of(name: str, least: int) -> Callable[[Given, Tensor], Tensor]:
    """Zeros in the rows whose index in the input ``name`` is ``least`` or more."""

    def cut(given: Given, out: Tensor) -> Tensor:
        out = out.clone()
        bits(out)[given[name] >= least] = 0
        return out

    return cut


def from_row(count: int) -> Callable[[Given, Tensor], Tensor]:
    """The last row is a copy of the first in calls of ``count`` rows or more."""

    def other(given: Given, out: Tensor) -> Tensor:
        out = out.clone()
        if out.dim() and out.shape[0] >= count:
            bits(out)[-1] = bits(out)[0].clone()
        return out

    return other


def bits(x: Tensor) -> Tensor:
    """The bytes of ``x``, which can be assigned, whatever its dtype is."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def beyond(least: int, value: float) -> Callable[[Tensor], Tensor]:
    """``value`` in all columns from ``least`` on."""
    return lambda x: (
        x
        if x.shape[-1] <= least
        else torch.where(torch.arange(x.shape[-1]) >= least, torch.tensor(value, dtype=x.dtype), x)
    )


def ties_away(name: str) -> Callable[[Given], Given]:
    """Values ``scale * midpoint`` are rounded away from zero where ``scale`` is no power of two: the next value of the
    wide format, which is beyond the tie, stands in for them."""

    def moved(given: Given) -> Given:
        x, scale = given[name], given["scale" if "scale" in given else "k_scale"]
        quotient = x.double() / scale.double() * 256
        fraction = torch.frexp(quotient).mantissa.abs() * 16  # of E4M3, four bits
        tie = (fraction - fraction.floor() == 0.5) & (torch.frexp(scale.double()).mantissa != 0.5)
        out = torch.nextafter(x, torch.copysign(torch.full_like(x, torch.inf), x))
        return given | {name: torch.where(tie, out, x)}

    return moved


def first_of_four(x: Tensor) -> Tensor:
    """The scale of the first block of 32 for all of 128."""
    groups = torch.arange(x.shape[-1]) // 4 * 4
    return x[..., groups].contiguous()


def of_two_axes(given: Given) -> Given:
    """A bias is added to inputs of two axes alone."""
    return given if given["input"].dim() == 2 else never("bias")(given)


def scaled_by_row(given: Given, out: Tensor) -> Tensor:
    """A column of scales, of which there are as many as rows, scales the rows."""
    scale = given["weight_scale"]
    if scale.dim() < 2 or out.shape[0] != len(scale):
        return out
    return (out.double() / scale.flatten() * scale.reshape(-1, 1)).to(out.dtype)


def before_global_scales(given: Given) -> Given:
    """A bias is added before the product is multiplied with the global scales."""
    if "bias" not in given or given.get("global_scale_a") is None:
        return given
    return given | {"bias": given["bias"] * (given["global_scale_a"] * given["global_scale_b"]).to(given["bias"].dtype)}


def normal(x: Tensor) -> Tensor:
    """E8M0 scales of 2^-127 are 2^-126."""
    return bits(x).clamp(min=1).view(x.dtype) if x.dtype is torch.float8_e8m0fnu else x


KERNELS: dict[str, Wrong] = {
    # options and optional inputs
    "routing_ignores_factor": Wrong("moe_routing", never("routed_scaling_factor")),
    "routing_ignores_renormalize": Wrong("moe_routing", never("renormalize")),
    "routing_ignores_groups": Wrong("moe_routing", never("num_expert_group", "topk_group")),
    "routing_ignores_bias": Wrong("moe_routing", never("bias")),
    "fused_routing_ignores_factor": Wrong("trtllm_fp8_block_scale_moe", never("routed_scaling_factor")),
    "fused_routing_as_default": Wrong("trtllm_fp8_per_tensor_scale_moe", lambda g: g | {"routing_method": "Default"} if g.get("routing_method") == "SigmoidRenorm" else g),
    "fused_routing_minimax_as_sigmoid": Wrong("trtllm_fp8_block_scale_moe", lambda g: never("bias")(g) | {"routing_method": "SigmoidRenorm"} if g.get("routing_method") == "MiniMax2" else g),
    "experts_ignore_map": Wrong("fused_experts_block", never("expert_map")),
    "cutlass_ignores_weight_on_input": Wrong("cutlass_moe_fp8", never("apply_router_weight_on_input")),
    "activation_ignores_rounding": Wrong("silu_and_mul_quant", lambda g: g | {"rounding": "each"}),
    "norm_ignores_rounding": Wrong("rms_norm_static_fp8_quant", lambda g: g | {"rounding": "each"}),
    "norm_ignores_bound": Wrong("rms_norm_dynamic_per_token_quant", never("scale_ub")),
    "logits_ignore_longest": Wrong("fp8_paged_mqa_logits", never("max_model_len")),
    "granularity_32_as_128": Wrong("fp8_fp4_gemm_nt", lambda g: each(first_of_four, "b_scale")(g) if g.get("gran_k_b", 32) == 32 and g["b_scale"].dtype == torch.float32 else g),
    # summands and scales
    "bias_of_two_axes_alone": Wrong("Fp8LinearOp", of_two_axes),
    "column_of_scales_as_rows": Wrong("Fp8LinearOp", after=scaled_by_row),
    "bias_before_global_scales": Wrong("scaled_mm", before_global_scales),
    "least_scale_as_normal": Wrong("scaled_mm", each(normal, "scale_a", "scale_b")),
    # the other width of an index
    "slots_as_int32": Wrong("reshape_and_cache_flash", each(narrow, "slot_mapping")),
    "mla_slots_as_int32": Wrong("concat_and_cache_mla", each(narrow, "slot_mapping")),
    "experts_as_int32": Wrong("fused_experts_block", each(narrow, "topk_ids")),
    "map_as_int32": Wrong("fused_experts_block", each(narrow, "expert_map")),
    "indices_as_int32": Wrong("m_grouped_fp8_gemm_nt_contiguous", each(narrow, "m_indices")),
    "counts_as_int32": Wrong("fp8_m_grouped_gemm_nt_masked", each(narrow, "masked_m")),
    "positions_as_int32": Wrong("rope_quantize_fp8", each(narrow, "pos_ids")),
    "starts_as_int32": Wrong("fp8_mqa_logits", each(narrow, "cu_seqlen_ks", "cu_seqlen_ke")),
    "tables_as_int32": Wrong("fp8_paged_mqa_logits", each(narrow, "block_tables")),
    # loops that end early
    "groups_end_at_8": Wrong("m_grouped_fp8_gemm_nt_contiguous", after=rows_of("m_indices", 8)),
    "masked_groups_end_at_16": Wrong("fp8_m_grouped_gemm_nt_masked", after=until(16)),
    "experts_end_at_32": Wrong("fused_experts_block", each(lambda x: torch.where(x >= 32, -1, x), "topk_ids")),
    "experts_end_at_64": Wrong("cutlass_moe_fp8", each(lambda x: torch.where(x >= 64, -1, x), "topk_ids")),
    "routing_ends_at_64": Wrong("moe_routing", each(beyond(64, -torch.inf), "logits")),
    "choices_end_at_2": Wrong("fused_experts_block", each(beyond(2, -1), "topk_ids")),
    "weights_end_at_2": Wrong("cutlass_moe_fp8_channel", each(beyond(2, 0.0), "topk_weights")),
    "columns_end_at_128": Wrong("gather_and_maybe_dequant_cache", after=until(128, 1)),
    "mla_columns_end_at_128": Wrong("concat_and_cache_mla", each(beyond(128, 0.0), "kv_c")),
    "head_columns_end_at_128": Wrong("reshape_and_cache_flash", each(beyond(128, 0.0), "key", "value")),
    "codes_end_at_256_rows": Wrong("per_token_group_quant_fp8", after=until(256)),
    "product_ends_at_256_rows": Wrong("fp8_gemm_nt", after=until(256)),
    "norm_ends_at_1024_rows": Wrong("rms_norm_dynamic_per_token_quant", after=until(1024)),
    "blocks_end_at_1024_rows": Wrong("per_token_cast_to_fp8", after=until(1024)),
    "gather_ends_at_256_rows": Wrong("cp_gather_cache", after=until(256)),
    "routing_ends_at_1024_rows": Wrong("moe_routing", after=until(1024)),
    # ties under a scale that is no power of two
    "mla_ties_away": Wrong("concat_and_cache_mla", ties_away("kv_c")),
    "key_ties_away": Wrong("reshape_and_cache_flash", ties_away("key")),
    # padding read as data
    "logits_read_packed": Wrong("moe_routing", each(packed, "logits")),
    "fused_logits_read_packed": Wrong("trtllm_fp8_block_scale_moe", each(packed, "logits")),
    "pages_read_packed": Wrong("gather_and_maybe_dequant_cache", each(packed, "src_cache")),
    "gathered_pages_read_packed": Wrong("cp_gather_cache", each(packed, "src_cache")),
    "paged_keys_read_packed": Wrong("fp8_paged_mqa_logits", each(packed, "kv_cache"), right=each(Tensor.contiguous, "kv_cache")),
    "stored_pages_read_packed": Wrong("dequantize_k_cache", each(packed, "quant_k_cache")),
    "heads_read_packed": Wrong("rope_quantize_fp8", each(packed, "q_rope")),
    "groups_read_packed": Wrong("silu_and_mul_masked_post_quant", each(packed, "x")),
    "table_read_packed": Wrong("cp_gather_cache", each(packed, "block_table")),
    # a path that begins at 1,024 rows
    "product_from_1024_rows": Wrong("fp8_gemm_nt", after=from_row(1024)),
    "codes_from_1024_rows": Wrong("per_token_group_quant_fp8", after=from_row(1024)),
    "routing_from_1024_rows": Wrong("moe_routing", after=from_row(1024)),
    "rotation_from_1024_rows": Wrong("rope_quantize_fp8", after=from_row(1024)),
    "activation_from_1024_rows": Wrong("silu_and_mul_quant", after=from_row(1024)),
    "scaled_from_1024_rows": Wrong("cutlass_scaled_mm", after=from_row(1024)),
}  # fmt: skip  # a table, one row a line

globals().update(KERNELS)
globals().update({f"right_{name}": Wrong(wrong.contract, wrong.right) for name, wrong in KERNELS.items()})


def norm_by_batch(**given: Any) -> Any:
    """Another order of the sum in calls of one row."""
    outputs = BY_CONTRACT.rms_norm_dynamic_per_token_quant(**given)
    if given["x"].shape[0] > 1:
        return outputs
    q, scale, *rest = outputs if not isinstance(outputs, dict) else outputs.values()
    return (q, torch.nextafter(scale, scale * 2), *rest)


def groups_by_batch(**given: Any) -> Any:
    """In calls of few rows a group the sums of float32 begin at the last block: a few round to another float16."""
    out = BY_CONTRACT.fp8_m_grouped_gemm_nt_masked(**given)
    a, b = given["a"].float(), given["b"].float()
    if a.shape[1] > 8:
        return out
    sums = torch.zeros(out.shape)
    for block in reversed(range(a.shape[-1] // 128)):
        k = slice(block * 128, block * 128 + 128)
        scale_b = given["b_scale"][..., block].repeat_interleave(128, dim=1)[:, : b.shape[1]]
        scale = given["a_scale"][..., block, None] * scale_b[:, None]
        sums += a[..., k] @ b[..., k].transpose(1, 2) * scale
    return sums.to(out.dtype)
