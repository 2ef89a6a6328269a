"""Kernels of a small engine, as its library exports them: a quantiser and a block-scaled product with configurations.

``CONFIGURATIONS`` are those that an autotuner may choose between. Each of them computes ``fp8_gemm_nt``: ``plain`` and
``reversed`` in float32, in two orders, ``wrong_scale`` with the scale of the previous block along K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.bindings.binding import bind

CONFIGURATIONS = ("plain", "reversed", "wrong_scale")
BLOCK, LARGEST = 128, 448.0


def per_token_cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of every 128 elements of a row."""
    groups = x.float().view(x.shape[0], -1, BLOCK)
    amax = groups.abs().amax(2, keepdim=True).clamp(1e-4)
    codes = (groups * (LARGEST / amax)).to(torch.float8_e4m3fn).view(x.shape)
    return codes, (amax / LARGEST).squeeze(2)


def block_gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, config: str = "plain") -> Tensor:
    """``[M, N]`` in float32."""
    if config == "wrong_scale":
        a_scale = a_scale.roll(1, 1)
    x = a.float() * a_scale.repeat_interleave(BLOCK, 1)
    w = b.float() * b_scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    order = slice(None) if config != "reversed" else torch.arange(x.shape[1] - 1, -1, -1)
    return x[:, order] @ w[:, order].T


BINDINGS = (
    bind(f"{__name__}:per_token_cast", "per_token_cast_to_fp8", "(x)", "(x)"),
    bind(
        f"{__name__}:block_gemm",
        "fp8_gemm_nt",
        "(a, a_scale, b, b_scale)",
        "(a, a_scale, b, b_scale, config='plain')",
        takes={"out_dtype": torch.float32},
        ignores=("config",),
    ),
)
