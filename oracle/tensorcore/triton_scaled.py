"""A product by Triton's ``tl.dot_scaled``, for the probes of block-scaled instructions (Triton, any GPU).

On sm100 and sm120 Triton compiles it to the block-scaled instruction itself; on older GPUs it decodes the operands and
multiplies them in bfloat16, which the probes then report as none of the named readings. It is asked by

    fp8-oracle fingerprint oracle.tensorcore.triton_scaled:dot_scaled --block-scaled nvf4 --device cuda

Source: Triton 3.6, ``triton.language.dot_scaled``. Not covered: FP6 (Triton has no such operands), speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

jit: Callable[..., Any] = triton.jit  # typed by hand

EDGE = 128
FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.uint8: "e2m1"}


@jit
def _kernel(  # type: ignore[no-untyped-def]  # triton reads annotations: only constexpr may stand there
    a,
    b,
    sa,
    sb,
    out,
    K: tl.constexpr,
    PA: tl.constexpr,
    PB: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    FA: tl.constexpr,
    FB: tl.constexpr,
    EDGE: tl.constexpr,
):
    """One tile of EDGE x EDGE; PA and PB are codes a byte."""
    rows = tl.arange(0, EDGE)
    acc = tl.zeros((EDGE, EDGE), tl.float32)
    for k in range(0, K, STEP):
        in_a, in_b = k // PA + tl.arange(0, STEP // PA), k // PB + tl.arange(0, STEP // PB)
        blocks = k // BLOCK + tl.arange(0, STEP // BLOCK)
        x = tl.load(a + rows[:, None] * (K // PA) + in_a[None, :])
        y = tl.load(b + rows[None, :] * (K // PB) + in_b[:, None])
        u = tl.load(sa + rows[:, None] * (K // BLOCK) + blocks[None, :])
        v = tl.load(sb + rows[:, None] * (K // BLOCK) + blocks[None, :])
        acc = tl.dot_scaled(x, u, FA, y, v, FB, acc)
    tl.store(out + rows[:, None] * EDGE + rows[None, :], acc.to(out.dtype.element_ty))


def dot_scaled(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The product ``[128, 128]`` of dtype ``out_dtype``, of operands as :class:`oracle.tensorcore.block_probes.Inputs`
    lays them out.

    ``a``, ``b``: codes ``[128, K]``, two a byte of E2M1 ``[128, K / 2]``; ``a_scale``, ``b_scale`` ``[128, K /
    block]``. E8M0 scales go to Triton as their bytes, E4M3 ones as they are; NaN as the GPU has it. Raises what Triton
    raises for a GPU or a format that it does not offer.
    """
    packed = [2 if x.dtype == torch.uint8 else 1 for x in (a, b)]
    k = a.shape[1] * packed[0]
    out = torch.empty((EDGE, EDGE), dtype=out_dtype, device=a.device)
    scales = [s.view(torch.uint8) if s.dtype == torch.float8_e8m0fnu else s for s in (a_scale, b_scale)]
    _kernel[1,](
        a,
        b,
        *scales,
        out,
        k,
        *packed,
        k // a_scale.shape[1],
        128,
        FORMATS[a.dtype],
        FORMATS[b.dtype],
        EDGE,
        num_warps=4,
    )
    return out
