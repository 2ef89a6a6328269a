"""The device's approximate division and reciprocal, entry by entry (Triton with inline PTX)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(amax, quotient, scale, rcp, full, top, zero, N: tl.constexpr):
    index = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(amax + index)
    high = tl.full([N], 448.0, tl.float32)
    nothing = x * 0.0
    q = tl.inline_asm_elementwise("div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [high, x], tl.float32, True, 1)
    tl.store(quotient + index, q)
    s = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [q], tl.float32, True, 1)
    tl.store(scale + index, s)
    tl.store(rcp + index, tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1))
    f = tl.inline_asm_elementwise("div.full.f32 $0, $1, $2;", "=f,f,f", [x, high], tl.float32, True, 1)
    tl.store(full + index, f)
    t = tl.inline_asm_elementwise("mul.ftz.f32 $0, $1, $2;", "=f,f,f", [x, q], tl.float32, True, 1)
    tl.store(top + index, t)
    z = tl.inline_asm_elementwise("mul.ftz.f32 $0, $1, $2;", "=f,f,f", [nothing, q], tl.float32, True, 1)
    tl.store(zero + index, z)


def tables(amax: Tensor) -> dict[str, Tensor]:
    """``quotient`` 448/amax, ``scale`` its reciprocal, ``rcp`` 1/amax, ``div_full`` amax/448, and what the quotient
    makes of amax itself and of 0; ``amax`` finite float32 ``[rows, 128]``."""
    names = ("quotient", "scale", "rcp", "div_full", "amax_times_quotient", "zero_times_quotient")
    out = {name: torch.empty_like(amax) for name in names}
    _kernel[(amax.shape[0],)](amax, *(out[name] for name in names), N=amax.shape[1])
    return out
