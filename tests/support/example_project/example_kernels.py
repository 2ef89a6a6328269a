"""A block-scaled GEMM of another project: float32 arithmetic, one K block of 128 at a time."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def block_gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """``a [M, K]`` times ``b [N, K]`` transposed; scales per 1x128 of ``a`` and per 128x128 of ``b``."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32)
    rows = torch.arange(b.shape[0]) // BLOCK
    for block in range(a_scale.shape[1]):
        k = slice(block * BLOCK, (block + 1) * BLOCK)
        part = a[:, k].float() @ b[:, k].float().T
        total += part * a_scale[:, block, None] * b_scale[rows, block]
    return total.to(out_dtype)
