"""The interval of a kernel's rotation ``y = (x c - x' s) f`` in float32.

Two products, their sum and the factor: with or without fused multiply-adds each product meets at most one rounding and
the sum one, so before the factor ``|computed - exact| <= 2 u (|x c| + |x' s|) + 2^-148`` (a subnormal product or sum
errs by 2^-150 each); the factor adds one rounding, which is the last. A build that flushes subnormal numbers
(FlashInfer's fast math) may take each of x, x', the products, the sum and the result as 0: ``4 * 2^-126`` before the
factor, whose cosines are at most 1, and 2^-126 after it.
Source: Higham, Accuracy and Stability of Numerical Algorithms, ch. 2 and 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.numbers.formats import FP32
from oracle.numbers.rounding import Overflow, Rounding, f32, round_to

U, FLUSHED = 2.0**-24, 2.0**-126


def rotated(x: Tensor, beside: Tensor, cos: Tensor, sin: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Lower end, upper end and usual value (each operation rounded) of ``(x cos - beside sin) factor``, float64 tensors
    of float32 values that broadcast; the three results are float64 of that shape. NaN and infinity as IEEE arithmetic
    gives them."""
    left, right = x * cos, beside * sin
    exact, width = left - right, 2 * U * (left.abs() + right.abs()) * (1 + 2 * U) + 4 * FLUSHED
    ends = (
        round_to(edge * factor + sign * FLUSHED, FP32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
        for sign, edge in ((-1, exact - width), (1, exact + width))
    )
    first, second = ends
    usual = f32(f32(f32(left) - f32(right)) * factor)
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    return torch.fmin(low, usual), torch.fmax(high, usual), usual
