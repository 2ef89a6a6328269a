"""The device's approximate division and reciprocal, entry by entry (Triton with inline PTX)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(amax, div, rcp_of_div, rcp, full, N: tl.constexpr):
    index = tl.arange(0, N)
    x = tl.load(amax + index)
    top = tl.full([N], 448.0, tl.float32)
    q = tl.inline_asm_elementwise("div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [top, x], tl.float32, True, 1)
    tl.store(div + index, q)
    s = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [q], tl.float32, True, 1)
    tl.store(rcp_of_div + index, s)
    tl.store(rcp + index, tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1))
    tl.store(
        full + index, tl.inline_asm_elementwise("div.full.f32 $0, $1, $2;", "=f,f,f", [x, top], tl.float32, True, 1)
    )


def tables(amax: Tensor) -> dict[str, Tensor]:
    """``div_approx`` 448/amax, ``rcp_of_div`` its reciprocal, ``rcp`` 1/amax, ``div_full`` amax/448."""
    names = ("div_approx", "rcp_of_div", "rcp", "div_full")
    out = {name: torch.empty_like(amax) for name in names}
    _kernel[(1,)](amax, *(out[name] for name in names), N=amax.numel())
    return out
