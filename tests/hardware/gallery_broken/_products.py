"""Products in float32, called as three projects call theirs: right by themselves."""

from __future__ import annotations

import torch
from torch import Tensor

CASES = tuple(
    f"fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/{shape}/family=randn/seed=1"
    for shape in ("m=5,n=128,k=384", "m=33,n=256,k=512")
)
Pair = tuple[Tensor, Tensor]


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, block: list[int], dtype: torch.dtype) -> Tensor:
    """``[M, K]`` by ``[N, K]``, a sum for each 128 steps of K."""
    total = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for number, start in enumerate(range(0, a.shape[1], 128)):
        part = a[:, start : start + 128].float() @ b[:, start : start + 128].float().t()
        total += part * a_scale[:, number, None] * b_scale[:, number].repeat_interleave(128)[: b.shape[0]]
    return total.to(dtype)


def into(a: Pair, b: Pair, out: Tensor, c: None) -> None:
    """As LMDeploy's ``fp8_gemm_nt``."""
    out.copy_(product(a[0], b[0], a[1], b[1], [128, 128], out.dtype))


def by_pairs(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """As FlagGems' ``fp8_matmul``."""
    return product(a, b, a_scale, b_scale, [128, 128], torch.bfloat16)
