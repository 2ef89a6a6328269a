"""torch's own FP8 products: ``_scaled_mm``, block-scaled ``F.scaled_mm`` and ``_scaled_grouped_mm``.

Per tensor they are cuBLASLt's (oneDNN's on a CPU), row-wise and grouped CUTLASS's.

Products that no fused kernel covers (mixed scale kinds, a bias with float32 output) run unfused: a unit-scale
product to float32, then scales and bias in float32, then the cast.

Block-scaled codes (MXFP8, NVFP4) on Blackwell go to ``F.scaled_mm`` with scales in 128x4 tiles; this has not run on
hardware here.

Not covered: fast accumulation (``use_fast_accum`` stays off: one chain over K loses digits); MXFP4, whose fake function
in torch 2.13 counts the scales of packed codes by half, so that no compiled graph takes them.

Source: PyTorch (ATen ``_scaled_mm``, ``_scaled_grouped_mm``; ``torch.nn.functional.scaled_mm``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..platform import Machine, current_machine
from ..records import Problem
from ..support import BLACKWELL, DENSE_MX, ROWWISE_CPU, TIGHT_MX, rowwise_cublas
from ._host import dense, no_autocast_no_grad, pitched
from .declaration import Backend, Product

SCALE_MULTIPLE = 4
"""The block-scaled product takes scales for a multiple of 4 rows and a multiple of 4 blocks of K: torch checks the
weight's, and cuBLASLt has no kernel for other numbers of rows (both seen with torch 2.11)."""


def kernel(p: Problem, machine: Machine) -> str:
    """The routine torch would run."""
    if p.op == "block_linear" or p.op in DENSE_MX:
        return "torch.nn.functional.scaled_mm"
    if p.op in TIGHT_MX:
        return "torch.nn.functional.scaled_grouped_mm"
    return "torch._scaled_grouped_mm" if p.op == "grouped_scaled" else f"torch._scaled_mm ({_mode(p, machine)})"


def steps(p: Problem, machine: Machine) -> tuple[str, ...]:
    """How the operands are prepared."""
    if p.op == "block_linear":
        return (f"M and K/128 to multiples of {SCALE_MULTIPLE}, cropped afterwards", "scales to column-major")
    if p.op == "linear" and _mode(p, machine) == "unfused":
        return ("unit-scale product to float32, scales and bias afterwards",)
    return ()


def _mode(p: Problem, machine: Machine) -> str:
    if p.kernel is not None:
        return p.kernel
    on_cpu = machine.vendor == "cpu" or p.device == "cpu"
    fused_bias = p.bias is None or (p.bias == p.out_dtype and p.out_dtype != "float32") or on_cpu
    kinds = {("tensor", "tensor"): "tensorwise"}
    if machine.torch >= ROWWISE_CPU if on_cpu else p.out_dtype == "bfloat16" or rowwise_cublas(machine):
        kinds["token", "channel"] = "rowwise"
    return kinds.get((p.a_scale, p.b_scale), "unfused") if fused_bias else "unfused"


@no_autocast_no_grad
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``torch._scaled_mm`` on operands in the layout it wants; old torch's ``(output, amax)`` is unwrapped.

    It reads row pitches, but has no kernel for one that is no multiple of 16, and it assumes that a bias is dense. On a
    CPU with AVX512-BF16 it stores subnormal bfloat16 results as 0 (VCVTNEPS2BF16 flushes), so the cast is made here.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    stored = torch.float32 if a.device.type == "cpu" and out_dtype == torch.bfloat16 else out_dtype
    y = torch._scaled_mm(
        pitched(a),
        pitched(b.t()).t(),
        out_dtype=stored,
        scale_a=scale_a,
        scale_b=scale_b,
        bias=None if bias is None else bias.contiguous(),
    )
    return (y[0] if isinstance(y, tuple) else y).to(out_dtype)


@no_autocast_no_grad
def unfused(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, one: Tensor
) -> Tensor:
    """``(a @ b) * scale_a * scale_b + bias``, the product at unit scale in float32; scales broadcast.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    y = scaled_mm(a, b, one, one, None, torch.float32) * scale_a * scale_b
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(out_dtype)


@no_autocast_no_grad
def linear(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``[M, N]`` for any mix of scale kinds; ``scale_a`` ``[M or 1, 1]``, ``scale_b`` ``[1, N or 1]``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    per_tensor = scale_a.numel() == 1 and scale_b.numel() == 1
    on_cpu = a.device.type == "cpu"
    per_row = scale_a.shape[0] == a.shape[0] and scale_b.shape[1] == b.shape[1]
    if per_row and not per_tensor:
        machine = current_machine()
        per_row = machine.torch >= ROWWISE_CPU if on_cpu else out_dtype is torch.bfloat16 or rowwise_cublas(machine)
    fused_bias = bias is None or on_cpu or (bias.dtype == out_dtype and out_dtype != torch.float32)
    if fused_bias and (per_tensor or per_row):
        return scaled_mm(a, b, scale_a.contiguous(), scale_b.contiguous(), bias, out_dtype)
    return unfused(a, b, scale_a, scale_b, bias, out_dtype, torch.ones(1, dtype=torch.float32, device=a.device))


@no_autocast_no_grad
def block_linear(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``[M, N]``: ``scale_a [M, K/128]``, ``scale_b [K/128, N/128]``; cuBLASLt, promotion every 128.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    from torch.nn import functional

    recipe, m = functional.ScalingType, a.shape[0]
    left, lead = dense(a), m + (-m % SCALE_MULTIPLE)
    if lead != m:
        left = torch.cat([left, left.new_zeros(lead - m, left.shape[1])])
    y: Tensor = functional.scaled_mm(
        left,
        dense(b.t()).t(),
        _padded_scale(scale_a),
        recipe.BlockWise1x128,
        _padded_scale(scale_b),
        recipe.BlockWise128x128,
        output_dtype=out_dtype,
    )
    return y[:m]


def _padded_scale(scale: Tensor) -> Tensor:
    """``[R, C]`` column-major with R padded to a multiple of 4 by ones; ``scale`` itself if it is that already."""
    rows, columns = scale.shape
    lead = rows + (-rows % SCALE_MULTIPLE)
    if lead == rows:
        return scale if scale.stride() == (1, rows) else scale.t().contiguous().t()
    ready = scale.new_ones(columns, lead)
    ready[:, :rows] = scale.t()
    return ready.t()


@no_autocast_no_grad
def grouped_scaled(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``torch._scaled_grouped_mm``; see :func:`kernels.grouped.scaled_grouped_mm`.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    y: Tensor = torch._scaled_grouped_mm(
        a.contiguous(),
        b.contiguous().transpose(1, 2),
        scale_a.reshape(-1).contiguous(),
        scale_b.contiguous(),
        offs=offsets.to(torch.int32),
        out_dtype=out_dtype,
    )
    return y


def _of_tiles(recipe: str, codes: torch.dtype | None, p: Product, *factors: Tensor) -> None:
    """``F.scaled_mm`` of codes whose scales lie in 128x4 tiles, with a second scale of each operand or none."""
    from torch.nn import functional

    kinds, orders = functional.ScalingType, functional.SwizzleType
    scales = [dense(side.memory) for side in (p.left, p.right)]
    if factors:
        sides = [[scale, factor] for scale, factor in zip(scales, factors, strict=True)]
        named: list[Any] = [[getattr(kinds, recipe), kinds.TensorWise], [orders.SWIZZLE_32_4_4, orders.NO_SWIZZLE]]
    else:
        sides, named = [[scale] for scale in scales], [[getattr(kinds, recipe)], [orders.SWIZZLE_32_4_4]]
    x, w = dense(p.a), dense(p.b[0])
    if codes is not None:
        x, w = x.view(codes), w.view(codes)
    y = functional.scaled_mm(
        x,
        w.t(),
        sides[0],
        named[0],
        sides[1],
        named[0],
        swizzle_a=named[1],
        swizzle_b=named[1],
        bias=None if p.bias is None else p.bias.contiguous(),
        output_dtype=p.out.dtype,
    )
    p.out.copy_(y)


@no_autocast_no_grad
def mxfp8_product(p: Product) -> None:
    """FP8 codes with E8M0 scales of 32.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    _of_tiles("BlockWise1x32", None, p)


@no_autocast_no_grad
def nvfp4_product(p: Product) -> None:
    """E2M1 codes with E4M3 scales of 16; torch multiplies the sum by the product of both second scales, alpha and 1.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    factors = () if p.alpha is None else (p.alpha, torch.ones_like(p.alpha))
    _of_tiles("BlockWise1x16", torch.float4_e2m1fn_x2, p, *factors)


@no_autocast_no_grad
def tight(p: Product) -> None:
    """``F.scaled_grouped_mm`` of the rows of each expert: MXFP8, or NVFP4 without second scales.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    from torch.nn import functional

    a, left, b, right, out, rows, *_ = p
    assert rows is not None and rows.table is not None, "the operation is that of a table of rows"
    four = not a.is_floating_point()
    kind = functional.ScalingType.BlockWise1x16 if four else functional.ScalingType.BlockWise1x32
    x, w = dense(a), dense(b)
    columns = -(-(x.shape[1] * (1 + four) // left.width) // 4) * 4
    whole = left.memory.numel() // columns
    if four:
        x, w = x.view(torch.float4_e2m1fn_x2), w.view(torch.float4_e2m1fn_x2)
    tiles = functional.SwizzleType.SWIZZLE_32_4_4
    grouped: Any = functional  # whose stubs lack it
    y = grouped.scaled_grouped_mm(
        x,
        w.mT,
        [dense(left.memory[: whole * columns]).view(whole, columns)],
        [kind],
        [dense(right.memory).view(b.shape[0], -1)],
        [kind],
        swizzle_a=[tiles],
        swizzle_b=[tiles],
        offs=rows.table[1].contiguous(),
        output_dtype=out.dtype,
    )
    out.copy_(y)


def numerics(p: Problem, machine: Machine) -> str:
    """On Blackwell: neither cuBLASLt, nor MSLK, nor torch's own CUTLASS kernels state an order of sums."""
    if p.op in TIGHT_MX:
        return "bounds only: MSLK's order of sums is not stated"
    if p.op in DENSE_MX or p.op == "block_linear" and machine.sm in BLACKWELL:
        return "bounds only: cuBLASLt's order of sums is not stated"
    return "bounds only: the order of its sums is not stated" if machine.sm in BLACKWELL else ""


BACKEND = Backend(
    name="torch",
    kernel=kernel,
    steps=steps,
    linear=linear,
    block_linear=block_linear,
    scaled_mm=scaled_mm,
    unfused=unfused,
    grouped_scaled=grouped_scaled,
    mxfp8_product=mxfp8_product,
    nvfp4_product=nvfp4_product,
    mxfp8_tight=tight,
    nvfp4_tight=tight,
    numerics=numerics,
)
