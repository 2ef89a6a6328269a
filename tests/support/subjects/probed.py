"""Kernels to probe: Hopper's arithmetic under the names of every contract that can be probed."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from oracle.tensorcore.fused import operand
from oracle.tensorcore.instructions import instruction
from oracle.tensorcore.predict import predict_product, scaled_mma
from oracle.truth.gemm import ScaledProduct

_calls = 0


def promoting(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``fp8_gemm_nt``: promotion every 128."""
    product = ScaledProduct(a, b, a_scale, b_scale, 128, 128)
    return predict_product(product, "sm90.promote128", out_dtype=out_dtype)


def flashinfer(
    *, input: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``fp8_blockscale_gemm_sm90``."""
    return promoting(input, weight, input_scale, weight_scale, out_dtype)


def chained(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """``cutlass_scaled_mm``: one chain over K, written into ``out``."""
    product = ScaledProduct(a, b, a_scale, b_scale, a.shape[1], 1)
    out.copy_(predict_product(product, "sm90.chain", out_dtype=out.dtype))


def torch_names(qinput: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The two of torch; the weight is the column-major [K, N], its scale [1, N]."""
    assert weight.stride(0) == 1 and weight.shape[0] == qinput.shape[1] and scale_b.shape == (1, weight.shape[1])
    product = ScaledProduct(qinput, weight.t(), scale_a, scale_b.t(), qinput.shape[1], 1)
    return predict_product(product, "sm90.chain", out_dtype=out_dtype)


def nvf4_counted(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Block-scaled FP4 by one reading; the diagonal alone, which is all that the probes look at."""
    inst = instruction("sm120.mma.nvf4.counted")
    codes = [torch.stack([x & 15, x >> 4], dim=2).flatten(1) for x in (a, b)]
    left, right = (operand(x, inst) for x in codes)
    return torch.diag(scaled_mma(inst, left, right, a_scale, b_scale, torch.zeros(len(a)))).to(out_dtype)


def scales_in_place(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Right, and leaves its scales doubled."""
    out = promoting(a, b, a_scale, b_scale, out_dtype)
    a_scale.mul_(2)
    return out


def noisy(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Right, prints a megabyte a call, and leaves a child that comes back as well."""
    out = promoting(a, b, a_scale, b_scale, out_dtype)
    os.write(1, b"x" * (1 << 20))
    os.fork()
    return out


def dies_later(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Right three times, then the process is gone."""
    global _calls
    _calls += 1
    if _calls > 3:
        os.abort()
    return promoting(a, b, a_scale, b_scale, out_dtype)


def unpacked(kernel: Callable[..., Tensor], inputs: dict[str, Tensor], options: dict[str, torch.dtype]) -> Tensor:
    """Adapter for a kernel of ``(a, b, a_scale, b_scale, out_dtype)`` by place."""
    return kernel(*(inputs[name] for name in ("a", "b", "a_scale", "b_scale")), options["out_dtype"])


def by_place(*operands: object) -> Tensor:
    """:func:`promoting` without names."""
    return promoting(*operands)  # type: ignore[arg-type]
