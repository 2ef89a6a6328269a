"""Plain torch: the path of every operation that works with torch alone.

GEMMs widen the codes to float32, which is exact, and accumulate in float32 (any order inside a K block, blocks
ascending). They serve CPU tensors; on a GPU they are never chosen, a missing library is an error there. Quantisers
and layout changes in plain torch serve every device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.backends._ambient import as_written
from kernels.backends._eager_logits import mqa_logits, paged_metadata, paged_mqa_logits
from kernels.backends._eager_moe import moe_trtllm
from kernels.backends._eager_quant import (
    cast_blocks,
    ceil_to_ue8m0,
    column_major,
    flashinfer_blocks,
    pack_ue8m0,
    quant_group,
    quant_group_packed,
    quant_static,
    quant_tensor,
    quant_token,
)
from kernels.backends._rows import take
from kernels.config import Config

if TYPE_CHECKING:
    from kernels.plan import Problem
    from kernels.platform import Machine

__all__ = [
    "block_linear", "blockscale_sm90", "cast_blocks", "ceil_to_ue8m0", "column_major", "flashinfer_blocks",
    "fp8_gemm_nt", "grouped_contiguous", "grouped_masked", "grouped_scaled", "linear", "moe_trtllm", "mqa_logits",
    "pack_ue8m0",
    "paged_metadata", "paged_mqa_logits", "quant_group", "quant_group_packed", "quant_static", "quant_tensor",
    "quant_token",
]  # fmt: skip

BLOCK = 128
EVERYWHERE = ("quant_tensor", "quant_token", "quant_group", "quant_group_packed", "cast", "layout")


def why_not(p: Problem, machine: Machine, config: Config) -> str | None:
    """Reasons against plain torch; see :mod:`kernels.plan`."""
    if p.op in EVERYWHERE or machine.vendor == "cpu" or p.device == "cpu":
        return None
    return "plain torch serves CPU tensors only; on a GPU it would hide a missing library"


def kernel(p: Problem, machine: Machine) -> str:
    """What runs."""
    return "plain torch, float32"


def steps(p: Problem, machine: Machine) -> tuple[str, ...]:
    """Nothing happens to the operands first."""
    return ()


@as_written
def linear(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``scale_a * (scale_b * (a @ b)) + bias`` in float32, then the cast; ``b [K,N]``, scales broadcast."""
    acc = a.to(torch.float32) @ b.to(torch.float32)
    acc = scale_a * (scale_b * acc)
    if bias is not None:
        acc = acc + bias.to(torch.float32)
    return acc.to(out_dtype)


@as_written
def block_linear(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``[M, N]``: ``b [K, N]``, ``scale_a [M, K/128]``, ``scale_b [K/128, N/128]``, ``bias [N]``."""
    acc = block_product(a, scale_a, b.t(), scale_b.t())
    return (acc if bias is None else acc + bias.to(torch.float32)).to(out_dtype)


def block_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """``sum_kb a_scale[m,kb] b_scale[n//128,kb] <a, b>_kb`` in float32, K blocks ascending.

    ``a [M,K]``, ``a_scale [M, ceil(K/128)]``, ``b [N,K]``, ``b_scale [ceil(N/128), ceil(K/128)]``.
    """
    n, k = b.shape
    per_row = b_scale.repeat_interleave(BLOCK, dim=0)[:n]
    acc = torch.zeros(a.shape[0], n, dtype=torch.float32, device=a.device)
    for kb, start in enumerate(range(0, k, BLOCK)):
        stop = min(start + BLOCK, k)
        part = a[:, start:stop].to(torch.float32) @ b[:, start:stop].to(torch.float32).t()
        acc += part * (a_scale[:, kb : kb + 1] * per_row[:, kb])
    return acc


@as_written
def fp8_gemm_nt(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None, disable_ue8m0_cast: bool
) -> None:
    """Dense product into ``out``; ``c`` is added in float32 before the cast."""
    acc = block_product(a, a_scale, b, b_scale)
    out.copy_(acc if c is None else acc + c.to(torch.float32))


fresh_gemm_nt = fp8_gemm_nt
"""Where all but the weight was made for it; plain torch takes any strides."""


@as_written
def blockscale_sm90(a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor, out: Tensor | None = None) -> Tensor:
    """As the FlashInfer kernel: a bf16 ``a`` is quantised first (448/amax, scale its reciprocal)."""
    if a_scale is None:
        a, a_scale = flashinfer_blocks(a, 1)
    y = block_product(a, a_scale, b, b_scale)
    return y.to(torch.bfloat16) if out is None else out.copy_(y)


@as_written
def grouped_contiguous(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, m_indices: Tensor, disable_ue8m0_cast: bool
) -> None:
    """Each row against its expert's weight, into ``out``; rows with index -1 are left alone."""
    for group in range(b.shape[0]):
        rows = (m_indices == group).nonzero().squeeze(1)
        if len(rows):
            out[rows] = block_product(take(a, rows), a_scale[rows], b[group], b_scale[group]).to(out.dtype)


@as_written
def grouped_masked(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    masked_m: Tensor,
    expected_m: int,
    disable_ue8m0_cast: bool,
) -> None:
    """The first ``masked_m[g]`` rows of each group, into ``out``; the other rows are left alone."""
    for group, rows in enumerate(masked_m.tolist()):
        if rows:
            y = block_product(a[group, :rows], a_scale[group, :rows], b[group], b_scale[group])
            out[group, :rows] = y.to(out.dtype)


@as_written
def grouped_scaled(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``(acc * scale_a) * scale_b`` per group; see :func:`kernels.grouped.scaled_grouped_mm`."""
    out = torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    start = 0
    for group, end in enumerate(offsets.tolist()):
        acc = a[start:end].to(torch.float32) @ b[group].to(torch.float32).t()
        out[start:end] = ((acc * scale_a[start:end]) * scale_b[group]).to(out_dtype)
        start = end
    return out
