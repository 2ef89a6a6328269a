"""torch's own FP8 products: ``_scaled_mm``, block-scaled ``F.scaled_mm`` and ``_scaled_grouped_mm``.

Per tensor they are cuBLASLt's (oneDNN's on a CPU), row-wise and grouped CUTLASS's.

Products that no fused kernel covers (mixed scale kinds, a bias with float32 output) run unfused: a unit-scale
product to float32, then scales and bias in float32, then the cast.

Not covered: fast accumulation (``use_fast_accum`` stays off: one chain over K loses digits), microscaling formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.backends import _needs
from kernels.backends._ambient import as_written
from kernels.backends._dense import dense, pitched
from kernels.config import Config
from kernels.platform import Machine, current_machine, use_rowwise_torch_scaled_mm

if TYPE_CHECKING:
    from kernels.plan import Problem

IN_FOURS = 4
"""Rows, and blocks of K, in whose multiples the block-scaled product takes its scales: torch checks those of the
weight, and cuBLASLt has no kernel for a number of rows that is no multiple of 4 (both seen with torch 2.11)."""
CPU_ROWWISE = (2, 12)
"""The first torch whose ``_scaled_mm`` takes row-wise scales on a CPU: 2.11.0 refused them, 2.12.0 took them."""


CUBLAS_ROWWISE = (12, 9)
"""The first CUDA whose cuBLASLt has row-wise scales, on sm90 only; elsewhere torch takes CUTLASS's, which writes bf16
(torch's ScaledBlas.cpp; the newest writes f16 too)."""


def why_not(p: Problem, machine: Machine, config: Config) -> str | None:
    """Reasons against torch's products; see :mod:`kernels.plan`."""
    if p.op in ("linear", "torch_linear"):
        if _on_cpu(p, machine):
            old = None if machine.torch >= (2, 6) else "torch._scaled_mm on a CPU needs torch 2.6"
            return _needs.first(old, _rowwise(p, machine))
        return _needs.first(
            _fp8_hardware(machine), _needs.multiples(p, k=16, n=16), _rowwise(p, machine), _fused_bias(p)
        )
    reason = _needs.gpu(p, machine, None)
    if reason is not None:
        return reason
    if machine.sm // 10 != 9:
        return f"the kernel is Hopper's; this is {machine.arch}"
    if p.op == "block_linear":
        return _needs.first(
            None if machine.torch >= (2, 10) else "torch.nn.functional.scaled_mm needs torch 2.10",
            None if (machine.cuda or (0,)) >= (12, 9) else "block-scaled cuBLASLt needs CUDA 12.9",
            "block scales take no bias here" if p.bias is not None else None,
            _needs.multiples(p, k=128, n=128),
            _needs.dtypes(p, "out_dtype", "bfloat16", "float32"),
        )
    return _needs.first(
        None if machine.torch >= (2, 8) else "torch._scaled_grouped_mm needs torch 2.8",
        _needs.multiples(p, k=16, n=16),
        _needs.dtypes(p, "out_dtype", "bfloat16"),
        None if (p.a_scale, p.b_scale) == ("token", "channel") else "it takes scales per token and per channel",
    )


def _fp8_hardware(machine: Machine) -> str | None:
    if machine.vendor == "amd":
        wanted = (machine.capability or (0, 0)) >= (9, 4)
        return None if wanted else f"FP8 needs gfx942 or newer; this is {machine.arch}"
    return None if machine.sm >= 89 else f"FP8 needs sm89 or newer; this is {machine.arch}"


def _on_cpu(p: Problem, machine: Machine) -> bool:
    return machine.vendor == "cpu" or p.device == "cpu"


def _rowwise(p: Problem, machine: Machine) -> str | None:
    if p.op != "torch_linear" or p.kernel != "rowwise":
        return None
    if _on_cpu(p, machine):
        if machine.torch >= CPU_ROWWISE:
            return None
        return "row-wise scales on a CPU need torch 2.12; use torch_channelwise_w8a8_scaled_mm"
    if machine.sm < 89 and not use_rowwise_torch_scaled_mm(machine):
        return "row-wise scaling needs sm89 or newer, or ROCm with torch 2.7 on gfx942 or newer"
    if _rowwise_writes(p.out_dtype == "bfloat16", machine):
        return None
    return (
        f"out_dtype={p.out_dtype}: row-wise products write bfloat16, others only on Hopper with CUDA 12.9; use "
        "torch_channelwise_w8a8_scaled_mm"
    )


def _rowwise_writes(bf16: bool, machine: Machine) -> bool:
    """Whether a GPU's row-wise product writes bf16, or another dtype: of the three libraries only cuBLASLt does."""
    return bf16 or (machine.sm // 10 == 9 and (machine.cuda or (0,)) >= CUBLAS_ROWWISE)


def _fused_bias(p: Problem) -> str | None:
    if p.op != "torch_linear" or p.bias is None:
        return None
    if p.out_dtype == "float32":
        return "a fused bias needs bf16 or f16 output; use torch_channelwise_w8a8_scaled_mm"
    return None if p.bias == p.out_dtype else f"bias={p.bias}; it takes the output dtype {p.out_dtype}"


def kernel(p: Problem, machine: Machine) -> str:
    """The routine torch would run."""
    if p.op == "block_linear":
        return "torch.nn.functional.scaled_mm"
    return "torch._scaled_grouped_mm" if p.op == "grouped_scaled" else f"torch._scaled_mm ({_mode(p, machine)})"


def steps(p: Problem, machine: Machine) -> tuple[str, ...]:
    """What happens to the operands first."""
    if p.op == "block_linear":
        return (f"M and K/128 to multiples of {IN_FOURS}, cropped afterwards", "scales to column-major")
    if p.op == "linear" and _mode(p, machine) == "unfused":
        return ("unit-scale product to float32, scales and bias afterwards",)
    return ()


def _mode(p: Problem, machine: Machine) -> str:
    if p.kernel is not None:
        return p.kernel
    on_cpu = _on_cpu(p, machine)
    fused_bias = p.bias is None or (p.bias == p.out_dtype and p.out_dtype != "float32") or on_cpu
    kinds = {("tensor", "tensor"): "tensorwise"}
    if machine.torch >= CPU_ROWWISE if on_cpu else _rowwise_writes(p.out_dtype == "bfloat16", machine):
        kinds["token", "channel"] = "rowwise"
    return kinds.get((p.a_scale, p.b_scale), "unfused") if fused_bias else "unfused"


@as_written
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``torch._scaled_mm`` on operands in the layout it wants; old torch's ``(output, amax)`` is unwrapped.

    It reads row pitches, but has no kernel for those that are no multiple of 16, and takes a bias for dense memory.
    """
    y = torch._scaled_mm(
        pitched(a),
        pitched(b.t()).t(),
        out_dtype=out_dtype,
        scale_a=scale_a,
        scale_b=scale_b,
        bias=None if bias is None else bias.contiguous(),
    )
    return y[0] if isinstance(y, tuple) else y


@as_written
def unfused(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, one: Tensor
) -> Tensor:
    """``(a @ b) * scale_a * scale_b + bias``, the product at unit scale in float32; scales broadcast."""
    y = scaled_mm(a, b, one, one, None, torch.float32) * scale_a * scale_b
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(out_dtype)


@as_written
def linear(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``[M, N]`` for any mix of scale kinds; ``scale_a`` ``[M or 1, 1]``, ``scale_b`` ``[1, N or 1]``."""
    per_tensor = scale_a.numel() == 1 and scale_b.numel() == 1
    on_cpu = a.device.type == "cpu"
    per_row = scale_a.shape[0] == a.shape[0] and scale_b.shape[1] == b.shape[1]
    if per_row and not per_tensor:
        machine = current_machine()
        per_row = machine.torch >= CPU_ROWWISE if on_cpu else _rowwise_writes(out_dtype is torch.bfloat16, machine)
    fused_bias = bias is None or on_cpu or (bias.dtype == out_dtype and out_dtype != torch.float32)
    if fused_bias and (per_tensor or per_row):
        return scaled_mm(a, b, scale_a.contiguous(), scale_b.contiguous(), bias, out_dtype)
    return unfused(a, b, scale_a, scale_b, bias, out_dtype, torch.ones(1, dtype=torch.float32, device=a.device))


@as_written
def block_linear(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``[M, N]``: ``scale_a [M, K/128]``, ``scale_b [K/128, N/128]``; cuBLASLt, promotion every 128."""
    from torch.nn import functional

    recipe, m = functional.ScalingType, a.shape[0]
    left, lead = dense(a), m + (-m % IN_FOURS)
    if lead != m:
        left = torch.cat([left, left.new_zeros(lead - m, left.shape[1])])
    y: Tensor = functional.scaled_mm(
        left,
        dense(b.t()).t(),
        _in_fours(scale_a),
        recipe.BlockWise1x128,
        _in_fours(scale_b),
        recipe.BlockWise128x128,
        output_dtype=out_dtype,
    )
    return y[:m]


def _in_fours(scale: Tensor) -> Tensor:
    """``[R, C]`` column-major with R a multiple of 4; added rows hold 1. Itself when it is so."""
    rows, columns = scale.shape
    lead = rows + (-rows % IN_FOURS)
    if lead == rows:
        return scale if scale.stride() == (1, rows) else scale.t().contiguous().t()
    ready = scale.new_ones(columns, lead)
    ready[:, :rows] = scale.t()
    return ready.t()


@as_written
def grouped_scaled(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``torch._scaled_grouped_mm``; see :func:`kernels.grouped.scaled_grouped_mm`."""
    y: Tensor = torch._scaled_grouped_mm(
        a.contiguous(),
        b.contiguous().transpose(1, 2),
        scale_a.reshape(-1).contiguous(),
        scale_b.contiguous(),
        offs=offsets.to(torch.int32),
        out_dtype=out_dtype,
    )
    return y
