"""What stands between the two products of an expert, as one formula with its parameters, in float64.

    gate, up    the halves of a row, or its even and odd columns (``interleaved``); up first where ``up_first``
    gate        min(gate, limit)                              up    min(max(up, -limit), limit)
    y           curve(gate)                                   up    linear * tanh(up / linear), where linear is given
    value       y * (up + beta)                               without ``gated`` the whole row is the gate: value = y
    ``late``    the limit clamps ``y`` from above, not the gate

Where a step is rounded is the caller's (:class:`oracle.truth.moe.Steps`). Every parameter is a float32 number, as
kernels take it.

NaN and infinities as IEEE arithmetic gives them in this order; a clamp of NaN is NaN here, where a device minimum drops
it. Sources: vLLM csrc/libtorch_stable/activation_kernels.cu, layers/fused_moe/activation.py, utils.py
(swiglu_limit_func); FlashInfer ActivationType; OpenAI triton_kernels swiglu.py. Not covered: which values a device may
give (:mod:`oracle.bounds.activation`), ``gelu_new``, ``gelu_fast``, ``fatrelu``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import torch
from torch import Tensor

from oracle.truth.routing import sigmoid

KAPPA = 0.044715
SILU_ARGMIN = -1.2784645427610738
SILU_MIN = -0.27846454276107385


class Curve(StrEnum):
    """What becomes of the gate ``g``."""

    SILU = "g / (1 + exp(-alpha g))"
    GELU = "g (1 + erf(g / sqrt(2))) / 2"
    GELU_TANH = "g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) / 2"
    RELU2 = "max(g, 0)^2"
    SITU = "alpha tanh(g / alpha) / (1 + exp(-g))"


@dataclass(frozen=True, kw_only=True)
class Formula:
    """One activation; see the module's text.

    Attributes
    ----------
    curve, alpha : what becomes of the gate, and the parameter of the curve.
    beta : is added to up.
    linear : bounds up smoothly; 0 leaves it as it is.
    gated : rows have two halves.
    interleaved : gates are the even columns, ups the odd ones.
    up_first : the first half, or the even columns, are ups.
    late : the limit clamps what the curve gives.
    narrow : the clamped gate is rounded to the dtype of the input; clamped up may be, too.
    """

    curve: Curve = Curve.SILU
    alpha: float = 1.0
    beta: float = 0.0
    linear: float = 0.0
    gated: bool = True
    interleaved: bool = False
    up_first: bool = False
    late: bool = False
    narrow: bool = False


SWIGLU = Formula()


def halves(h: Tensor, formula: Formula) -> tuple[Tensor, Tensor | None]:
    """Gate and up of ``h`` ``[..., 2 I]`` as views ``[..., I]`` of its dtype, bit for bit; all of it and None where
    there is no up."""
    if not formula.gated:
        return h, None
    first, second = (h[..., ::2], h[..., 1::2]) if formula.interleaved else h.chunk(2, dim=-1)
    return (second, first) if formula.up_first else (first, second)


def curved(x: Tensor, formula: Formula) -> Tensor:
    """The curve of float64 ``x`` of any shape: float64 of that shape, relative error below 2^-44, or 2^-53 of ``x``.
    NaN stays NaN; of -inf the curves but RELU2 (0) and SITU (-0) give NaN."""
    match formula.curve:
        case Curve.SILU:
            return x * sigmoid(formula.alpha * x)
        case Curve.GELU:
            tail: Tensor = torch.special.erfc(-x * math.sqrt(0.5))
            return x * tail / 2
        case Curve.GELU_TANH:  # (1 + tanh z) / 2 is the sigmoid of 2 z
            return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + KAPPA * x**3))
        case Curve.RELU2:
            return x.clamp(min=0).square()
    return formula.alpha * torch.tanh(x / formula.alpha) * sigmoid(x)


def bounded(up: Tensor, formula: Formula) -> Tensor:
    """``up`` (float64, any shape) as it meets the gate, before ``beta``: float64 of that shape; NaN stays NaN."""
    return formula.linear * torch.tanh(up / formula.linear) if formula.linear else up


@lru_cache
def lowest(formula: Formula) -> tuple[float, float]:
    """Where the curve has its minimum, and the minimum: it falls before and rises after. RELU2 has none: -inf, 0.

    SILU's are those of alpha 1, scaled. Others by cutting thirds off an interval that holds it, to 2^-26 of the place;
    the minimum, where the slope is 0, is then right to 2^-50.
    """
    if formula.curve is Curve.RELU2:
        return -math.inf, 0.0
    if formula.curve is Curve.SILU:
        return SILU_ARGMIN / formula.alpha, SILU_MIN / formula.alpha
    low, high = -4.0, 0.0
    for _ in range(100):
        third = (high - low) / 3
        ends = curved(torch.tensor([low + third, high - third], dtype=torch.float64, device="cpu"), formula)
        low, high = (low, high - third) if bool(ends[0] < ends[1]) else (low + third, high)
    place = torch.tensor((low + high) / 2, dtype=torch.float64, device="cpu")
    return float(place), float(curved(place, formula))
