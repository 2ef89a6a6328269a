"""Right kernels of ``fp8_gemm_nt`` in plain torch, in the calling conventions that the harness knows."""

from __future__ import annotations

import time

import torch
from torch import Tensor


def gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns a tensor of its own."""
    return _product(a, a_scale, b, b_scale).to(out_dtype)


def gemm_out(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """The same, written into ``out``."""
    out.copy_(_product(a, a_scale, b, b_scale))


def slow(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """A twentieth of a second a call."""
    time.sleep(0.05)
    out.copy_(_product(a, a_scale, b, b_scale))


def gemm_pair(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Another convention: (codes, scale) pairs."""
    out.copy_(_product(left[0], left[1], right[0], right[1]))


def adapt_pair(kernel, inputs, options):  # type: ignore[no-untyped-def]
    """Adapter for :func:`gemm_pair`."""
    a, b = inputs["a"], inputs["b"]
    out = torch.empty(a.shape[0], b.shape[0], dtype=options["out_dtype"])
    kernel((a, inputs["a_scale"]), (b, inputs["b_scale"]), out)
    return out


def dequantising(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Scales the operands first; for finite scales as right as the others."""
    k = a.shape[1]
    left = a.float() * a_scale.repeat_interleave(128, dim=1)[:, :k]
    right = b.float() * b_scale.repeat_interleave(128, dim=0)[: b.shape[0]].repeat_interleave(128, dim=1)[:, :k]
    out.copy_(left @ right.T)


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """One block of K after the other, scaled as it joins the sum."""
    m, k = a.shape
    total = torch.zeros(m, b.shape[0], device=a.device)
    columns = torch.arange(b.shape[0], device=a.device) // 128
    for block in range(a_scale.shape[1]):
        at = slice(block * 128, min(k, (block + 1) * 128))
        part = a[:, at].float() @ b[:, at].float().T
        total += part * a_scale[:, block, None] * b_scale[columns, block][None, :]
    return total


def adapt_quantiser(kernel, inputs, options):  # type: ignore[no-untyped-def]
    """Adapter for quantisers that return codes and scales."""
    q, scale = kernel(**inputs, **options)
    return {"q": q, "scale": scale}
