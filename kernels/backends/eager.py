"""Plain torch: every operation that works with torch alone.

GEMMs widen the codes to float32, which is exact, and accumulate in float32 (any order inside a K block, blocks
ascending). They serve CPU tensors; on a GPU they are never chosen, and a missing library is an error there.

Quantisers serve every device (:mod:`kernels.formulas`); their payloads are contiguous whatever the input's strides.

Source: the formulas of :mod:`kernels.quantize`, :mod:`kernels.fused` and the verbs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FP8, FP8_MAX
from ..errors import ValueRangeError
from ..formulas import ceil_to_ue8m0, divide_and_saturate, flashinfer_blocks, fp8_max, pack_ue8m0, saturate
from ..layout import swizzle_scale
from ..mx_blocks import (
    EVEN_OF_FINITE,
    FP4_EMAX,
    FP4_FRACTION,
    FP4_MAX,
    FP8_ELEMENTS,
    LINEAR,
    MX_BLOCK,
    NAN_BYTE,
    NVFP4_BLOCK,
    block_amax,
    expert_places,
    pack_nearest,
    power,
    scattered_scales,
    shared_exponent,
    silu_product,
    split_blocks,
    store_scale,
    two_levels,
)
from ..records import Machine, Problem
from ..support import BLOCK
from . import eager_attention, eager_cache
from ._host import column_major, lane_major, no_autocast_no_grad, take
from .declaration import Allocate, Backend, Blocks, Matrices, Product, Quantiser, Rows, Scales, WideLinear

SPLIT_KV = 256
"""Cached tokens in one unit of work of the paged kernel's schedule."""


def kernel(p: Problem, machine: Machine) -> str:
    """The name of what runs."""
    return "plain torch, float32"


# --- quantisers, on every device ---------------------------------------------------------------------------------


@no_autocast_no_grad
def quant_static(x: Tensor, scale: Tensor) -> Tensor:
    """``q = sat(x / scale)``, ``scale`` a scalar or a row of one.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    return divide_and_saturate(x.contiguous(), scale.reshape(()))


@no_autocast_no_grad
def quant_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic per tensor: ``scale [1] = amax / 448``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    x = x.contiguous()
    if x.numel() == 0:
        return x.to(FP8), torch.zeros(1, dtype=torch.float32, device=x.device)
    scale = x.abs().amax().to(torch.float32) / fp8_max(x)
    return divide_and_saturate(x, scale), scale.reshape(1)


@no_autocast_no_grad
def quant_token(x: Tensor, scale_ub: Tensor | None) -> tuple[Tensor, Tensor]:
    """Dynamic per token: ``scale [M,1] = max(min(amax, scale_ub) / 448, 1 / (448 * 512))``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    x = x.contiguous()
    amax = x.abs().amax(dim=-1, keepdim=True).to(torch.float32)
    if scale_ub is not None:
        amax = torch.minimum(amax, scale_ub.reshape(()).to(torch.float32))
    top = fp8_max(x)
    scale = torch.maximum(amax / top, (top * 512).reciprocal())
    return divide_and_saturate(x, scale), scale


@no_autocast_no_grad
def quant_group(
    x: Tensor, group: int, eps: float, ue8m0: bool, layout: str = "row", out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Per row and group of the last axis: ``scale = max(amax, eps) / 448``; ``layout`` row, col or tma.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    amax = parts.abs().amax(dim=-1).to(torch.float32).clamp(min=eps)
    scale = amax / fp8_max(x)
    if ue8m0:
        scale = ceil_to_ue8m0(scale)
    q = divide_and_saturate(parts, scale.unsqueeze(-1)).flatten(-2).contiguous()
    if layout != "row":
        scale = column_major(scale, 4 if layout == "tma" else 1)
    return (q if out is None else out.copy_(q)), scale


@no_autocast_no_grad
def quant_group_packed(x: Tensor, group: int, eps: float) -> tuple[Tensor, Tensor]:
    """As :func:`quant_group` with UE8M0 scales, four exponents an int32, strides ``(1, align(M, 4))``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    q, scale = quant_group(x, group, eps, True)
    return q, pack_ue8m0(scale)


def reciprocal_quantiser(dtype: torch.dtype) -> Quantiser:
    """Groups of 128 by :func:`kernels.formulas.flashinfer_blocks`, the scale ``[K/128, align(M, 4)]``."""
    return _reciprocal


@no_autocast_no_grad
def _reciprocal(x: Tensor, out: Tensor | None, allocate: Allocate) -> tuple[Tensor, Tensor]:
    q, scale = flashinfer_blocks(x, 1)
    return (q if out is None else out.copy_(q)), lane_major(scale)


# --- fused quantisers, on every device ---------------------------------------------------------------------------


def gated(x: Tensor, rounding: str) -> Tensor:
    """``silu(gate) * up`` of ``x [..., 2I]``, in the dtype of ``x`` or, with ``none``, in float32; ``plain``: ``x``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    if rounding == "plain":
        return x
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    active = torch.nn.functional.silu(gate)
    if rounding == "each":
        active = active.to(x.dtype).to(torch.float32)
    return active * up if rounding == "none" else (active * up).to(x.dtype)


@no_autocast_no_grad
def gated_static(x: Tensor, scale: Tensor, rounding: str) -> Tensor:
    """``q = sat(value / scale)``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    return divide_and_saturate(gated(x, rounding), scale.reshape(()))


@no_autocast_no_grad
def gated_group(
    x: Tensor,
    group: int,
    rounding: str,
    amax_floor: float,
    scale_floor: float,
    scale_ub: Tensor | None,
    ue8m0: bool,
    transposed: bool,
    masked_m: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``scale = max(min(max(amax, amax_floor) / 448, scale_ub), scale_floor)`` of each group; every row is written.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    return _groups(gated(x, rounding), group, amax_floor, scale_floor, None, scale_ub, ue8m0, transposed)


def _groups(
    value: Tensor,
    group: int,
    amax_floor: float,
    scale_floor: float,
    amax_ub: Tensor | None,
    scale_ub: Tensor | None,
    ue8m0: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    parts = value.reshape(*value.shape[:-1], value.shape[-1] // group, group)
    amax = parts.abs().amax(dim=-1).to(torch.float32).clamp(min=amax_floor)
    if amax_ub is not None:
        amax = torch.minimum(amax, amax_ub.reshape(()))
    scale = amax / fp8_max(value)
    if scale_ub is not None:
        scale = torch.minimum(scale, scale_ub.reshape(()))
    if scale_floor:  # the double quotient rounds to the float32 one
        scale = scale.clamp(min=scale_floor)
    if ue8m0:
        scale = ceil_to_ue8m0(scale)
    q = divide_and_saturate(parts, scale.unsqueeze(-1)).flatten(-2).contiguous()
    return q, column_major(scale, 1) if transposed else scale


@no_autocast_no_grad
def gated_group_bf16(x: Tensor, amax_floor: float, masked_m: Tensor) -> tuple[Tensor, Tensor]:
    """Every step in bfloat16: ``scale = amax * (1/448)``, codes of ``value * (1/scale)``; every row is written.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    value = gated(x, "each")
    parts = value.reshape(*value.shape[:-1], value.shape[-1] // BLOCK, BLOCK)
    amax = torch.maximum(parts.abs().amax(dim=-1), torch.full((), amax_floor, dtype=x.dtype, device=x.device))
    one = torch.ones((), dtype=torch.float32, device=x.device)
    scale = (amax.float() * (one / fp8_max(x)).bfloat16().float()).bfloat16().float()
    inverse = (one / scale).bfloat16().float()
    codes = saturate((parts.float() * inverse.unsqueeze(-1)).bfloat16().float())
    return codes.flatten(-2).contiguous(), scale


def normed(
    x: Tensor, weight: Tensor, residual: Tensor | None, epsilon: float, rounding: str, rounded_sum: bool
) -> tuple[Tensor, Tensor | None]:
    """The norm of ``x [+ residual]``, and the sum in the dtype of ``x``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    z = x.to(torch.float32) if residual is None else x.to(torch.float32) + residual.to(torch.float32)
    summed = None if residual is None else z.to(x.dtype)
    if summed is not None and rounded_sum:
        z = summed.to(torch.float32)
    value = z * torch.rsqrt(z.square().mean(dim=-1, keepdim=True) + epsilon)
    if rounding == "each":
        value = value.to(x.dtype).to(torch.float32)
    value = value * weight.to(torch.float32)
    return value if rounding == "none" else value.to(x.dtype), summed


@no_autocast_no_grad
def norm_static(
    x: Tensor, weight: Tensor, residual: Tensor | None, scale: Tensor, epsilon: float, rounding: str, rounded_sum: bool
) -> tuple[Tensor, Tensor | None]:
    """``q = sat(norm / scale)``, and the sum.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    value, summed = normed(x, weight, residual, epsilon, rounding, rounded_sum)
    return divide_and_saturate(value, scale.reshape(())), summed


@no_autocast_no_grad
def norm_group(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    epsilon: float,
    group: int,
    scale_ub: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``scale = max(min(amax, scale_ub) / 448, 1 / (448 * 512))`` of each group, and the sum.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    value, summed = normed(x, weight, residual, epsilon, "each", False)
    return *_groups(value, group, 0.0, 1.0 / (FP8_MAX * 512), scale_ub, None, False, transposed), summed


@no_autocast_no_grad
def norm_blocks(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    epsilon: float,
    rounding: str,
    how: Blocks,
    global_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Blocks of the norm that share a scale byte, and the sum.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    value, summed = normed(x, weight, residual, epsilon, rounding, False)
    return *quant_blocks(value, how, value.shape[1], global_scale), summed


@no_autocast_no_grad
def rope(
    rotated: Tensor, other: Tensor, cos_sin_cache: Tensor, pos_ids: Tensor, is_neox: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """``sat((x cos - partner sin) * factor)`` and ``sat(other * factor)``, each operation in float32.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.

    Raises ValueRangeError.
    """
    x, half = rotated.to(torch.float32), rotated.shape[-1] // 2
    if pos_ids.device.type == "cpu" and pos_ids.numel() and (last := int(pos_ids.max())) >= len(cos_sin_cache):
        raise ValueRangeError(f"pos_ids holds {last}, and cos_sin_cache has {len(cos_sin_cache)} positions")
    cos, sin = cos_sin_cache.index_select(0, pos_ids).chunk(2, dim=-1)
    if is_neox:
        partner = torch.cat([x[..., half:], -x[..., :half]], dim=-1)
        cos, sin = (torch.cat([t, t], dim=-1) for t in (cos, sin))
    else:
        partner = torch.stack([x[..., 1::2], -x[..., ::2]], dim=-1).flatten(-2)
        cos, sin = (t.repeat_interleave(2, dim=-1) for t in (cos, sin))
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return saturate((x * cos - partner * sin) * factor), saturate(other.to(torch.float32) * factor)


# --- products, on CPU tensors ----------------------------------------------------------------------------------------


@no_autocast_no_grad
def linear(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``scale_a * (scale_b * (a @ b)) + bias`` in float32, then the cast; ``b [K,N]``, scales broadcast.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    acc = a.to(torch.float32) @ b.to(torch.float32)
    acc = scale_a * (scale_b * acc)
    if bias is not None:
        acc = acc + bias.to(torch.float32)
    return acc.to(out_dtype)


@no_autocast_no_grad
def block_linear(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``[M, N]``: ``b [K, N]``, ``scale_a [M, K/128]``, ``scale_b [K/128, N/128]``, ``bias [N]``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    acc = block_product(a, scale_a, b.t(), scale_b.t())
    return (acc if bias is None else acc + bias.to(torch.float32)).to(out_dtype)


def block_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, rows: int = BLOCK) -> Tensor:
    """``sum_kb a_scale[m,kb] b_scale[n//rows,kb] <a, b>_kb`` in float32, K blocks ascending.

    ``a [M,K]``, ``a_scale [M, ceil(K/128)]``, ``b [N,K]``, ``b_scale [ceil(N/rows), ceil(K/128)]``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    n, k = b.shape
    per_row = b_scale.repeat_interleave(rows, dim=0)[:n] if rows > 1 else b_scale
    acc = torch.zeros(a.shape[0], n, dtype=torch.float32, device=a.device)
    for kb, start in enumerate(range(0, k, BLOCK)):
        stop = min(start + BLOCK, k)
        part = a[:, start:stop].to(torch.float32) @ b[:, start:stop].to(torch.float32).t()
        acc += part * (a_scale[:, kb : kb + 1] * per_row[:, kb])
    return acc


@no_autocast_no_grad
def gemm_nt(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None, float_scales: bool
) -> None:
    """Dense product into ``out``; ``c`` is added in float32 before the cast.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    acc = block_product(a, a_scale, b, b_scale)
    out.copy_(acc if c is None else acc + c.to(torch.float32))


@no_autocast_no_grad
def blockscale_sm90(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor | None = None) -> Tensor:
    """``[M, N]`` bf16, as the FlashInfer kernel: ``a_scale [K/128, align(M, 4)]``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    y = block_product(a, a_scale[:, : a.shape[0]].t(), b, b_scale)
    return y.to(torch.bfloat16) if out is None else out.copy_(y)


def few_rows(dtype: torch.dtype, n: int, k: int) -> WideLinear:
    """The input quantised by FlashInfer's formula, then the product in float32."""
    return _few_rows


@no_autocast_no_grad
def _few_rows(x: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    q, scale = flashinfer_blocks(x, 1)
    return block_product(q, scale, w, w_scale).to(x.dtype)


@no_autocast_no_grad
def grouped_contiguous(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, m_indices: Tensor, float_scales: bool
) -> None:
    """Each row against its expert's weight, into ``out``; rows with index -1 are left alone.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    for group in range(b.shape[0]):
        rows = (m_indices == group).nonzero().squeeze(1)
        if len(rows):
            out[rows] = block_product(take(a, rows), a_scale[rows], b[group], b_scale[group]).to(out.dtype)


@no_autocast_no_grad
def grouped_masked(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    masked_m: Tensor,
    expected_m: int,
    float_scales: bool,
) -> None:
    """The first ``masked_m[g]`` rows of each group, into ``out``; the other rows are left alone.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    for group, rows in enumerate(masked_m.tolist()):
        if rows:
            y = block_product(a[group, :rows], a_scale[group, :rows], b[group], b_scale[group])
            out[group, :rows] = y.to(out.dtype)


@no_autocast_no_grad
def grouped_scaled(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``(acc * scale_a) * scale_b`` per group; see :func:`kernels.grouped.scaled_grouped_mm`.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    out = torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    start = 0
    for group, end in enumerate(offsets.tolist()):
        acc = a[start:end].to(torch.float32) @ b[group].to(torch.float32).t()
        out[start:end] = ((acc * scale_a[start:end]) * scale_b[group]).to(out_dtype)
        start = end
    return out


@no_autocast_no_grad
def gemm_1d1d(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None) -> None:
    """``c`` plus the product with a scale for every row of both operands, in float32, into ``out``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    acc = block_product(a, a_scale, b, b_scale, 1)
    out.copy_(acc if c is None else c + acc)


@no_autocast_no_grad
def k_grouped(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, ks: list[int], ks_tensor: Tensor, c: Tensor
) -> None:
    """:func:`gemm_1d1d` for every group of K, into ``out``; one without steps takes ``c``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    _, m, n = out.shape
    start = 0
    for group, k in enumerate(ks):
        if k:
            left, right = (x[rows * start : rows * (start + k)].view(rows, k) for x, rows in ((a, m), (b, n)))
            blocks = slice(start // BLOCK, (start + k) // BLOCK)
            gemm_1d1d(left, a_scale[:, blocks], right, b_scale[:, blocks], out[group], c[group])
        elif out is not c:
            out[group] = c[group]
        start += k


@no_autocast_no_grad
def skip_head_mid(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    splits: tuple[int, int, int],
    float_scales: bool,
) -> None:
    """Dense product into the columns of ``out`` outside of the heads' gaps.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    left, mid, right = splits
    acc = block_product(a, a_scale, b, b_scale).to(out.dtype).view(len(a), -1, left + right)
    heads = out.as_strided(
        (len(a), acc.shape[1], left + mid + right), (out.stride(0), (left + mid + right) * out.stride(1), out.stride(1))
    )
    heads[..., :left], heads[..., left + mid :] = acc[..., :left], acc[..., left:]


@no_autocast_no_grad
def einsum(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """A dense product for every head, into ``out [B, H, D]``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    for head in range(b.shape[0]):
        out[:, head] = block_product(a[:, head], a_scale[:, head], b[head], b_scale[head]).to(out.dtype)


@no_autocast_no_grad
def bmm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``(scale_a * scale_b) * (a @ b)`` in float32 for every batch.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    return ((scale_a * scale_b) * (a.to(torch.float32) @ b.to(torch.float32))).to(out_dtype)


# --- MX and NVFP4 ----------------------------------------------------------------------------------------------------

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes of four bits (OCP Microscaling Formats 1.0)."""
TILE_HEIGHTS = {"128x4": 128, "8x4": 8}


@no_autocast_no_grad
def mx_product(p: Product) -> None:
    """Dequantised to float32 group by group, multiplied in float32; alpha, bias, what is there, one rounding.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    a, left, b, right, out, rows, alpha, bias, accumulate = p
    n = b.shape[1]
    if rows is not None and rows.depth is not None:
        each = 2 if a.dtype is torch.uint8 else 1
        for group, (first, end, column) in enumerate(rows.depth.t().tolist()):
            part = out[group * a.shape[0] : (group + 1) * a.shape[0]]
            sides = []
            for codes, scales in ((a, left), (b[0], right)):
                memory = scales.memory[-(-codes.shape[0] // 128) * 128 * column :]
                every = torch.arange(codes.shape[0], device=a.device)
                columns = codes[:, first // each : end // each].contiguous()
                sides.append(_dequantised(columns, scales._replace(memory=memory), every))
            part.copy_(sides[0] @ sides[1].t())
        return
    for group in range(b.shape[0]):
        selected, first, weight = _own_rows(rows, group, a.shape[0], n, a.device)
        if not selected.numel():
            continue
        x = _dequantised(take(a, selected), left, first)
        w = _dequantised(b[group], right, weight + torch.arange(n, device=b.device))
        y = x @ w.t()
        if alpha is not None:
            of_rows = alpha.numel() > 1 and (rows is None or rows.table is rows.expert is None)
            y = y * (alpha[:, None] if of_rows else alpha.reshape(-1)[group if alpha.numel() > 1 else 0])
        y = y if bias is None else y + bias.to(torch.float32)
        out[selected] = (out[selected].to(torch.float32) + y if accumulate else y).to(out.dtype)


def _own_rows(rows: Rows | None, group: int, m: int, n: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """The rows of a group, the rows where their scales lie, and the first row of its weight's."""
    if rows is None or rows.table is None:
        every = torch.arange(m, device=device)
        selected = every if rows is None or rows.expert is None else (rows.expert == group).nonzero().squeeze(1)
        return selected, selected, group * n
    start, end, scale, weight = rows.table[:, group].tolist()
    selected = torch.arange(start, end, device=device)
    return selected, selected - start + scale, weight


def _dequantised(codes: Tensor, scales: Scales, rows: Tensor) -> Tensor:
    """Float32 values of codes ``[R, K]``, or packed ``[R, K/2]``, whose scales stand in these rows."""
    if codes.dtype is torch.uint8:
        nibbles = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(1).long()
        table = torch.tensor(E2M1, dtype=torch.float32, device=codes.device)
        values = torch.where(nibbles > 7, -table[nibbles & 7], table[nibbles & 7])
    else:
        values = codes.to(torch.float32)
    at = _places(scales, rows, -(-values.shape[1] // scales.width))
    if scales.memory.dtype is torch.float32:
        scale = scales.memory[at]
    else:
        scale = scales.memory.view(torch.uint8)[at].view(scales.memory.dtype).to(torch.float32)
    return values * scale.repeat_interleave(scales.width, dim=1)[:, : values.shape[1]]


def _places(scales: Scales, rows: Tensor, columns: int) -> Tensor:
    """Where the scales of these rows lie, ``[R, C]``."""
    m, c = rows[:, None], torch.arange(columns, device=rows.device)[None, :]
    if scales.tile not in TILE_HEIGHTS:
        return m * columns + c
    height = TILE_HEIGHTS[scales.tile]
    inside = m % 8 * 4 if height == 8 else m % 32 * 16 + m % 128 // 32 * 4
    return (m // height * -(-columns // 4) + c // 4) * height * 4 + inside + c % 4


# --- mixture of experts ----------------------------------------------------------------------------------------------


@no_autocast_no_grad
def moe_trtllm(
    *,
    routing_logits: Tensor,
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    output1_scales_scalar: Tensor,
    output1_scales_gate_scalar: Tensor,
    gemm2_weights: Tensor,
    output2_scales_scalar: Tensor,
    top_k: int,
    local_expert_offset: int,
    local_num_experts: int,
    **_: object,
) -> Tensor:
    """``[T, H]`` bf16 of the TensorRT-LLM per-tensor MoE with Llama-4 routing; arguments as FlashInfer publishes them.

    The row permutations of the weights are undone. Products are taken in float32; the intermediate is quantised to E4M3
    with the scale of the second input, as the kernel does.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    n1, n2 = gemm1_weights.shape[1], gemm2_weights.shape[1]
    interleaved = torch.arange(n1, device="cpu").view(2, n1 // 2).t().flatten()
    rows1, rows2 = torch.argsort(interleaved[_shuffled(n1)]), torch.argsort(_shuffled(n2))
    logits, expert = routing_logits.to(torch.float32).max(dim=-1)
    weight = logits.sigmoid()
    out = torch.zeros(hidden_states.shape[0], n2, dtype=torch.float32, device=hidden_states.device)
    for local in range(local_num_experts):
        tokens = (expert == local + local_expert_offset).nonzero().squeeze(1)
        if len(tokens) == 0:
            continue
        w31 = gemm1_weights[local].to(torch.float32)[rows1]
        acc = (take(hidden_states, tokens).to(torch.float32) @ w31.t()) * weight[tokens].unsqueeze(1)
        up, gate = acc.chunk(2, dim=-1)
        gate = torch.nn.functional.silu(gate * output1_scales_gate_scalar[local])
        codes = saturate(gate * (up * output1_scales_scalar[local]))
        w2 = gemm2_weights[local].to(torch.float32)[rows2]
        out[tokens] = (codes.to(torch.float32) @ w2.t()) * output2_scales_scalar[local]
    return out.to(torch.bfloat16)


def _shuffled(n: int) -> Tensor:
    return torch.arange(n, device="cpu").view(-1, 8, 4).transpose(1, 2).flatten()


# --- indexer logits --------------------------------------------------------------------------------------------------


@no_autocast_no_grad
def mqa_logits(q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, clean: bool) -> Tensor:
    """``logits[m,n] = k_scale[n] * sum_h weights[m,h] * relu(<q[m,h], k[n]>)``, ``[M, N]`` float32.

    Outside ``ks[m] <= n < ke[m]`` it is -inf with ``clean``, else the plain formula.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    logits = score(q, k, weights) * k_scale
    if clean:
        n = torch.arange(k.shape[0], device=q.device)
        logits.masked_fill_((n < ks.unsqueeze(1)) | (n >= ke.unsqueeze(1)), float("-inf"))
    return logits


def score(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """``sum_h weights[m,h] * relu(<q[m,h], k[n]>)`` for ``q [M,H,D]``, ``k [N,D]``: ``[M, N]`` float32.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    right = k.to(torch.float32).t()
    total = torch.zeros(q.shape[0], k.shape[0], dtype=torch.float32, device=q.device)
    for head in range(q.shape[1]):
        total += weights[:, head : head + 1] * (q[:, head].to(torch.float32) @ right).relu()
    return total


@no_autocast_no_grad
def paged_mqa_logits(
    q: Tensor, cache: Tensor, weights: Tensor, lens: Tensor, tables: Tensor, schedule: Tensor, longest: int, clean: bool
) -> Tensor:
    """``[B * next_n, longest]`` float32; token t of sequence b sees ``lens[b, t]`` cached tokens, the rest is -inf.

    A block of the cache holds first the codes of all its tokens, then their float32 scales.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    batch, next_n, _, depth = q.shape
    block = cache.shape[1]
    flat = cache.view(cache.shape[0], -1)
    codes = flat[:, : block * depth].view(torch.float8_e4m3fn).view(-1, block, depth)
    scales = flat[:, block * depth :].view(torch.float32)
    logits = torch.full((batch * next_n, longest), float("-inf"), dtype=torch.float32, device=q.device)
    for b, row in enumerate(lens.tolist()):
        pages = tables[b, : -(-max(row) // block)].long()
        k, k_scale = take(codes, pages).view(-1, depth), scales[pages].view(-1)
        for t, length in enumerate(row):
            at = b * next_n + t
            logits[at, :length] = (score(q[b, t : t + 1], k[:length], weights[at : at + 1]) * k_scale[:length])[0]
    return logits


def paged_metadata(lens: Tensor, block_size: int, num_sms: int) -> Tensor:
    """Even split of the work: row i says at which sequence and which 256-token piece multiprocessor i starts.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    pieces = (lens[:, -1].cpu().long() + SPLIT_KV - 1) // SPLIT_KV
    ends = pieces.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    at = torch.arange(num_sms + 1, device="cpu")
    starts = at * (total // num_sms) + at.clamp(max=total % num_sms)
    sequence = torch.searchsorted(ends, starts, right=True)
    before = torch.cat([ends.new_zeros(1), ends])[sequence]
    return torch.stack([sequence, starts - before], dim=1).to(torch.int32).to(lens.device)


def alignment() -> int:
    """Rows to which a run is aligned; plain torch takes any, and is prepared as the kernels are."""
    return BLOCK


@no_autocast_no_grad
def quant_blocks(
    x: Tensor, how: Blocks, columns: int, global_scale: Tensor | None, matrices: Matrices | None = None
) -> tuple[Tensor, Tensor]:
    """Blocks that share a scale byte, by the formulas of :mod:`kernels.mx_blocks`.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    if matrices is not None:
        return _of_matrices(x, how, columns, global_scale, matrices)
    x = silu_product(x) if how.gated else x
    x = torch.nn.functional.pad(x, (0, columns - x.shape[1]))
    if global_scale is not None:
        blocks, g = split_blocks(x, NVFP4_BLOCK), global_scale.reshape(-1, 1)
        scale, inverse = two_levels(block_amax(blocks), g, how.inversed)
        return pack_nearest(blocks * inverse[..., None]), store_scale(scale, how.layout)
    blocks = split_blocks(x, MX_BLOCK)
    if how.rounding == EVEN_OF_FINITE:
        known = torch.where(blocks.isnan(), 0.0, blocks)
        byte = shared_exponent(known, "even", FP4_MAX, FP4_EMAX, FP4_FRACTION).clamp(max=254)
        scaled = blocks * torch.where(byte == 0, 0.0, power(254 - byte))[..., None]
        return pack_nearest(scaled), store_scale(byte, how.layout)
    if how.element not in FP8_ELEMENTS:
        byte = shared_exponent(blocks, how.rounding, FP4_MAX, FP4_EMAX, FP4_FRACTION)
        return pack_nearest(blocks * power(254 - byte)[..., None]), store_scale(byte, how.layout)
    top, emax, fraction, dtype = FP8_ELEMENTS[how.element]
    byte = shared_exponent(blocks, how.rounding, top, emax, fraction)
    scaled = (blocks * power(254 - byte)[..., None]).clamp(-top, top)
    q = scaled.masked_fill((byte == NAN_BYTE)[..., None], torch.nan).to(dtype)
    return q.flatten(1), store_scale(byte, how.layout)


def _of_matrices(
    x: Tensor, how: Blocks, columns: int, global_scale: Tensor | None, matrices: Matrices
) -> tuple[Tensor, Tensor]:
    m, count = x.shape[0], matrices.number
    each = global_scale is not None and global_scale.numel() > 1
    if matrices.offsets is None:
        factor = global_scale.repeat_interleave(m // count) if global_scale is not None and each else global_scale
        q, scale = quant_blocks(x, how._replace(layout=LINEAR), columns, factor)
        return q, swizzle_scale(scale.reshape(count, m // count, -1), how.layout).flatten()
    matrix, row = expert_places(m, matrices)
    factor = global_scale[matrix.clamp(max=count - 1)] if global_scale is not None and each else global_scale
    q, scale = quant_blocks(x, how._replace(layout=LINEAR), columns, factor)
    return q, scattered_scales(scale, row, count)


BACKEND = Backend(
    name="eager",
    kernel=kernel,
    quant_static=quant_static,
    quant_tensor=quant_tensor,
    quant_token=quant_token,
    quant_group=quant_group,
    quant_group_packed=quant_group_packed,
    quant_blocks=quant_blocks,
    reciprocal_quantiser=reciprocal_quantiser,
    gated_static=gated_static,
    gated_group=gated_group,
    gated_group_bf16=gated_group_bf16,
    norm_static=norm_static,
    norm_group=norm_group,
    norm_blocks=norm_blocks,
    rope=rope,
    cache_store=eager_cache.store,
    cache_tiles=eager_cache.tiles,
    cache_nvfp4=eager_cache.nvfp4,
    cache_gather=eager_cache.gather,
    linear=linear,
    block_linear=block_linear,
    gemm_nt=gemm_nt,
    aligned_gemm_nt=gemm_nt,
    blockscale_sm90=blockscale_sm90,
    few_rows=few_rows,
    grouped_contiguous=grouped_contiguous,
    grouped_masked=grouped_masked,
    alignment=alignment,
    grouped_scaled=grouped_scaled,
    gemm_1d1d=gemm_1d1d,
    k_grouped=k_grouped,
    skip_head_mid=skip_head_mid,
    einsum=einsum,
    bmm=bmm,
    mx_product=mx_product,
    moe_trtllm=moe_trtllm,
    mqa_logits=mqa_logits,
    paged_mqa_logits=paged_mqa_logits,
    paged_metadata=paged_metadata,
    attention=eager_attention.attention,
    attention_prefill=eager_attention.prefill,
    attention_ragged=eager_attention.batch,
    attention_paged=eager_attention.batch,
    attention_latent=eager_attention.latent,
)
