# ruff: noqa: E501
"""Sixty wrong kernels of ``fp8_gemm_nt`` in plain torch, each right but for one line.

``CATALOGUED`` are wrong in ways that the catalogue of faults names; ``OTHERS`` in ways that it does not. Every one is
called as ``name(a, a_scale, b, b_scale, out_dtype)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BF16 = torch.bfloat16
Kernel = Callable[..., Tensor]


def blocks(k: int) -> list[slice]:
    return [slice(start, min(k, start + 128)) for start in range(0, k, 128)]


def columns(b: Tensor) -> Tensor:
    return torch.arange(b.shape[0]) // 128


def sums(
    a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, *, join: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Tensor:
    """Float32 sums; ``sa [M, B]``, ``sb [N, B]``; ``join`` adds a scaled block to the sum."""
    total = torch.zeros(a.shape[0], b.shape[0])
    for n, at in enumerate(blocks(a.shape[1])):
        part = (a[:, at].float() @ b[:, at].float().T) * sa[:, n, None] * sb[None, :, n]
        total = total + part if join is None else join(total, part)
    return total


def right(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor) -> Tensor:
    return sums(a, b, sa, sb[columns(b)])


def codes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def recoded(x: Tensor, table: Callable[[Tensor], Tensor]) -> Tensor:
    return table(codes(x).clone()).view(x.dtype)


def truncated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Toward zero."""
    if dtype == torch.float32:
        return (x.view(torch.int32) & ~1).view(torch.float32)
    if dtype == BF16:
        return (x.view(torch.int32) & ~0xFFFF).view(torch.float32).to(BF16)
    near = x.to(dtype)
    return torch.where(near.float().abs() > x.abs(), torch.nextafter(near.float(), torch.zeros_like(x)).to(dtype), near)


def put(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


def swap(x: Tensor, i: int, j: int, dim: int) -> Tensor:
    if x.shape[dim] <= max(i, j):
        return x
    order = list(range(x.shape[dim]))
    order[i], order[j] = order[j], order[i]
    return (
        codes(x).index_select(dim, torch.tensor(order)).view(x.dtype)
        if x.element_size() == 1
        else x.index_select(dim, torch.tensor(order))
    )


def of_operands(change: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]) -> Kernel:
    """Wrong before the sum; ``change`` takes and gives ``a, a_scale [M, B], b, b_scale [N, B]``."""

    def kernel(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype = BF16) -> Tensor:
        a, sa, b, sb = change(a, a_scale, b, b_scale[columns(b)])
        return sums(a, b, sa, sb).to(out_dtype)

    return kernel


def of_sum(join: Callable[[Tensor, Tensor], Tensor]) -> Kernel:
    """Wrong where a block joins the sum."""

    def kernel(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype = BF16) -> Tensor:
        return sums(a, b, a_scale, b_scale[columns(b)], join=join).to(out_dtype)

    return kernel


def of_output(store: Callable[[Tensor, torch.dtype, Tensor], Tensor]) -> Kernel:
    """Wrong after the sum; ``store`` takes the float32 sum, the output dtype and ``a``."""

    def kernel(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype = BF16) -> Tensor:
        return store(right(a, a_scale, b, b_scale), out_dtype, a)

    return kernel


CATALOGUED: dict[str, Kernel] = {
    "a_scale_of_next_block": of_operands(lambda a, sa, b, sb: (a, sa.roll(-1, 1), b, sb)),
    "b_scale_of_previous_block": of_operands(lambda a, sa, b, sb: (a, sa, b, sb.roll(1, 1))),
    "a_scale_missing": of_operands(lambda a, sa, b, sb: (a, torch.ones_like(sa), b, sb)),
    "b_scale_missing": of_operands(lambda a, sa, b, sb: (a, sa, b, torch.ones_like(sb))),
    "a_scale_of_first_row": of_operands(lambda a, sa, b, sb: (a, sa[:1].expand_as(sa), b, sb)),
    "b_scale_of_first_row": of_operands(lambda a, sa, b, sb: (a, sa, b, sb[:1].expand_as(sb))),
    "a_scale_per_tile": of_operands(lambda a, sa, b, sb: (a, sa[torch.arange(len(sa)) // 16 * 16], b, sb)),
    "a_scale_in_bfloat16": of_operands(lambda a, sa, b, sb: (a, sa.to(BF16).float(), b, sb)),
    "b_scale_in_bfloat16": of_operands(lambda a, sa, b, sb: (a, sa, b, sb.to(BF16).float())),
    "a_scale_as_power_of_two": of_operands(lambda a, sa, b, sb: (a, torch.exp2(sa.log2().round()), b, sb)),
    "a_scale_inverted": of_operands(lambda a, sa, b, sb: (a, 1 / sa, b, sb)),
    "a_scale_transposed": of_operands(lambda a, sa, b, sb: (a, sa.T.reshape(sa.shape), b, sb)),
    "a_subnormals_flushed": of_operands(lambda a, sa, b, sb: (recoded(a, lambda c: c * ((c & 0x78) != 0)), sa, b, sb)),
    "b_subnormals_flushed": of_operands(lambda a, sa, b, sb: (a, sa, recoded(b, lambda c: c * ((c & 0x78) != 0)), sb)),
    "a_codes_as_fnuz": of_operands(lambda a, sa, b, sb: (codes(a).view(torch.float8_e4m3fnuz), sa, b, sb)),
    "a_saturates_at_240": of_operands(lambda a, sa, b, sb: (a.float().clamp(-240, 240).to(a.dtype), sa, b, sb)),
    "last_k_missing": of_operands(lambda a, sa, b, sb: (recoded(a, lambda c: put(c, (..., -1), 0)), sa, b, sb)),
    "k_tail_of_32_missing": of_operands(
        lambda a, sa, b, sb: (recoded(a, lambda c: put(c, (..., slice(-32, None)), 0)), sa, b, sb)
    ),
    "rows_swapped": of_operands(lambda a, sa, b, sb: (swap(a, 0, 1, 0), swap(sa, 0, 1, 0), b, sb)),
    "row_of_codes_swapped": of_operands(lambda a, sa, b, sb: (swap(a, 0, 1, 0), sa, b, sb)),
    "k_swapped_in_a": of_operands(lambda a, sa, b, sb: (swap(a, 0, 1, 1), sa, b, sb)),
    "negative_zero_as_nan": of_operands(
        lambda a, sa, b, sb: (recoded(a, lambda c: torch.where(c == 0x80, 0x7F, c)), sa, b, sb)
    ),
    "sum_in_bfloat16": of_sum(lambda total, part: (total + part).to(BF16).float()),
    "sum_in_float16": of_sum(lambda total, part: (total + part).half().float()),
    "blocks_in_bfloat16": of_sum(lambda total, part: total + part.to(BF16).float()),
    "first_block_overwritten": of_sum(lambda total, part: part),
    "store_toward_zero": of_output(lambda x, dtype, a: truncated(x, dtype)),
    "store_through_float16": of_output(lambda x, dtype, a: x.half().to(dtype)),
    "last_row_missing": of_output(lambda x, dtype, a: put(x, -1, 0).to(dtype)),
    "last_column_missing": of_output(lambda x, dtype, a: put(x, (..., -1), 0).to(dtype)),
}
OTHERS: dict[str, Kernel] = {
    "third_row_of_four": of_output(lambda x, dtype, a: put(x, slice(2, None, 4), x[1::4][: len(x[2::4])]).to(dtype)),
    "one_per_mille_too_large": of_output(lambda x, dtype, a: (x * 1.004).to(dtype)),
    "one_element_an_ulp_off": of_output(lambda x, dtype, a: put(x.to(dtype), (0, 0), x.to(dtype)[0, 0] * 1.01)),
    "clamped_at_1000": of_output(lambda x, dtype, a: x.clamp(-1000, 1000).to(dtype)),
    "clamped_at_60000": of_output(lambda x, dtype, a: x.clamp(-6e4, 6e4).to(dtype)),
    "relu": of_output(lambda x, dtype, a: x.relu().to(dtype)),
    "negative_zero_and_below_lost": of_output(lambda x, dtype, a: torch.where(x.abs() < 1e-3, 0, x).to(dtype)),
    "subnormal_results_flushed": of_output(lambda x, dtype, a: torch.where(x.abs() < 2.0**-126, 0, x).to(dtype)),
    "infinity_as_largest": of_output(lambda x, dtype, a: x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)),
    "nan_as_zero": of_output(lambda x, dtype, a: x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).to(dtype)),
    "double_rounding_through_e8m9": of_output(
        lambda x, dtype, a: ((x.view(torch.int32) + 0x1FFF + ((x.view(torch.int32) >> 14) & 1) & ~0x3FFF).view(torch.float32)).to(dtype)
    ),
    "noise_of_an_ulp": of_output(lambda x, dtype, a: (x * (1 + 0.008 * torch.rand(x.shape))).to(dtype)),
    "wrong_beyond_128_rows": of_output(lambda x, dtype, a: torch.cat([x[:128], x[128:] * 1.5]).to(dtype)),
    "wrong_for_one_row": of_output(lambda x, dtype, a: (x * (1.02 if len(x) == 1 else 1)).to(dtype)),
    "wrong_where_m_is_odd": of_output(lambda x, dtype, a: (put(x, -1, x[0]) if len(x) % 2 and len(x) > 1 else x).to(dtype)),
    "wrong_beyond_512_columns": of_output(lambda x, dtype, a: torch.cat([x[:, :512], x[:, 512:] * 2], dim=1).to(dtype)),
    "wrong_where_n_is_ragged": of_output(
        lambda x, dtype, a: (put(x, (..., -1), x[:, 0]) if x.shape[1] % 128 == 1 and x.shape[1] > 1 else x).to(dtype)
    ),
    "wrong_where_k_is_ragged": of_output(lambda x, dtype, a: (x * (0.97 if a.shape[1] % 128 == 16 else 1)).to(dtype)),
    "wrong_where_k_is_200": of_output(lambda x, dtype, a: (x * (0.97 if a.shape[1] % 128 == 72 else 1)).to(dtype)),
    "wrong_below_one_block": of_output(lambda x, dtype, a: (x * (1.03 if a.shape[1] < 128 else 1)).to(dtype)),
    "wrong_beyond_k_2048": of_output(lambda x, dtype, a: (x * (0.98 if a.shape[1] > 2048 else 1)).to(dtype)),
    "large_scales_saturate": of_operands(lambda a, sa, b, sb: (a, sa.clamp(max=1e30), b, sb)),
    "small_scales_vanish": of_operands(lambda a, sa, b, sb: (a, torch.where(sa < 1e-30, 0, sa), b, sb)),
    "dead_experts_scale": of_operands(lambda a, sa, b, sb: (a, sa.clamp(min=1e-20), b, sb)),
    "scale_loses_3_bits": of_operands(lambda a, sa, b, sb: (a, (sa.view(torch.int32) & ~0xFFFF).view(torch.float32), b, sb)),
    "largest_code_lowered": of_operands(lambda a, sa, b, sb: (recoded(a, lambda c: torch.where(c == 0x7E, 0x7D, c)), sa, b, sb)),
    "smallest_code_lost": of_operands(lambda a, sa, b, sb: (recoded(a, lambda c: torch.where(c & 0x7F == 1, 0, c)), sa, b, sb)),
    "blocks_compensated_wrongly": of_sum(lambda total, part: total + (part + (total - total.to(BF16).float()) * 2.0**-6)),
    "small_blocks_skipped": of_sum(lambda total, part: torch.where(part.abs() < 1e-2, total, total + part)),
    "sum_with_ten_bits": of_sum(
        lambda total, part: ((total + part).view(torch.int32) & ~0x1FFF).view(torch.float32)
    ),
}  # fmt: skip  # a table, one row a line

globals().update(CATALOGUED | OTHERS)


def noise(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Numbers that have nothing to do with the operands, the same at every call."""
    out.copy_(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
