"""Int8 codes and products in the order of their float32 operations, in float64.

    symmetric     s = max(amax, floor) / 127            q = round(x / s)          by one of three rules, saturated
    asymmetric    s = (max - min) / 255,  z = rne(-128 - min / s),                q = sat(rne(x / s) + z)
    product       t = a @ b - azp * adj  in int32, exact;  y = fma(s_a, f32(f32(t) * s_b), bias), rounded once

Every operation is rounded to float32 on its own. Where a kernel multiplies by a reciprocal in place of a division, the
quotients are alternatives of each other (:func:`quotients`).

NaN gives the code 0, as a saturating conversion does; infinities saturate. Sources: vLLM
csrc/quantization/w8a8/int8/scaled_quant.cu, per_token_group_quant_8bit, Triton per_token_quant_int8,
cutlass_w8a8/scaled_mm_epilogues. Not covered: strides, packed weights.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.numbers.rounding import Overflow, Rounding, f32, pair_to_dtype, two_sum

TOP, LOW = 127.0, -128.0
WRAP = 1 << 32


class Rule(StrEnum):
    """How a quotient becomes an integer."""

    EVEN = "to nearest, ties to even"
    AWAY = "to nearest, ties away from zero"
    ZERO = "toward zero"


def integers(x: Tensor, rule: Rule) -> Tensor:
    """Float64 ``x`` of any shape as integers in float64 of that shape; NaN as 0, infinities as they are."""
    x = torch.nan_to_num(x, 0.0, torch.inf, -torch.inf)
    if rule is Rule.EVEN:
        return torch.round(x)
    return torch.trunc(x) if rule is Rule.ZERO else torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x))


def saturated(x: Tensor) -> Tensor:
    """Integers of any shape within -128 and 127; NaN stays NaN."""
    return x.clamp(LOW, TOP)


def quotients(x: Tensor, scale: Tensor, inverse: Tensor) -> list[Tensor]:
    """``x / s``, ``x * (1 / s)`` and ``x * inverse`` in float32: float64 of the shape of ``x``; NaN where 0 meets
    infinity."""
    return [f32(x / scale), f32(x * f32(1.0 / scale)), f32(x * inverse)]


def wrapped(x: Tensor) -> Tensor:
    """Float64 integers of any shape below 2^53 as int32 arithmetic leaves them: float64 of that shape; no NaN."""
    whole = x.to(torch.int64)
    return (((whole + (WRAP >> 1)) % WRAP) - (WRAP >> 1)).to(torch.float64)


def scaled(total: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """``s_a * (s_b * f32(total)) + bias`` with the last product fused into the sum, and with it rounded on its own:
    float64 ``[M, N]`` each, of int32 ``total`` ``[M, N]`` as float64; NaN and infinities of the scales as IEEE
    arithmetic has them."""
    part = f32(f32(total) * b_scale)
    if bias is None:
        return f32(a_scale * part), f32(a_scale * part)
    high, low = two_sum(a_scale * part, bias.expand(part.shape))
    low = torch.where(torch.isfinite(high), low, 0.0)
    fused = pair_to_dtype(high, low, torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
    return decode(fused), f32(f32(a_scale * part) + bias)
