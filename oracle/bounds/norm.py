"""The interval of a kernel's ``r = 1 / sqrt(mean(z^2) + epsilon)`` over rows of ``z [R, H]``, sums in any order.

Every square, sum and quotient is a float32 operation. Each term of the sum meets one rounding of its square and at most
``H - 1`` of additions in whatever order; all terms are positive, so the sum is within ``(1 +- u)**H`` of the exact one.
Then come the division by H (two roundings at most, of ``1/H`` and of the product; within 2^-21 where it is approximate)
and the addition of epsilon (one). So the mean ``m`` plus epsilon is within ``1 +- d``, ``d = n u / (1 - n u) + 2^-21``,
``n = H + 2``, of the exact one, and the root of its inverse within ``1 +- d`` as well (``(1 - d)^-1/2 <= 1 + d`` for
``d <= 1/2``); the reciprocal square root itself errs by 2 ulp (CUDA) or 2^-22.9 (``rsqrt.approx``, PTX ISA), below
2^-21. A square below 2^-126 may be flushed: ``H 2^-126`` of the sum, at most.

Where the sum reaches 2^127 float32 may overflow on the way and ``r`` be 0: such rows are ``open``, unless the sum
exceeds 2^129, where a float32 sum does and ``r`` is 0. A kernel that sums in float64 has the exact ``r`` there: the
interval reaches from 0 to it, and 0 is what is expected.
Source: Higham, Accuracy and Stability of Numerical Algorithms, ch. 3; PTX ISA, ``rsqrt``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

U = 2.0**-24
FLUSHED = 2.0**-126
APPROXIMATE = 2.0**-21
OVERFLOW = 2.0**128


@dataclass(frozen=True)
class Norm:
    """``[R, 1]`` float64 bounds of ``r`` around the ``exact`` one; ``open``: rows of which nothing is claimed."""

    low: Tensor
    high: Tensor
    exact: Tensor
    open: Tensor


def reciprocal_norm(z: Tensor, epsilon: float) -> Norm:
    """The interval for float64 ``z [R, H]``; NaN and infinities of a row as IEEE arithmetic gives them (NaN; 0)."""
    width = z.shape[1]
    total = z.square().sum(dim=1, keepdim=True)
    mean = total / width + epsilon
    n = width + 2
    flushed = torch.where(mean > 0, FLUSHED / mean, 0.0)
    d = flushed + (n * U / (1 - n * U) + APPROXIMATE + width * 2.0**-52)
    root = mean.rsqrt()
    over = total > 2 * OVERFLOW
    exact = torch.where(over, torch.zeros_like(root), root)
    low, high = exact * (1 - d) * (1 - APPROXIMATE), root * (1 + d) * (1 + APPROXIMATE)
    unclear = torch.isfinite(total) & (total >= OVERFLOW / 2) & ~over
    return Norm(low, high, exact, unclear)


def layer_norm(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Norm]:
    """``x - mean`` of float64 ``x [R, H]``, how far a kernel's may lie from it, both ``[R, H]``, and the bounds of its
    ``r = 1 / sqrt(var + epsilon)``.

    The mean, a float32 sum in any order over H, errs by ``e``: ``n u / (1 - n u) + 2^-21`` of the mean of ``|x|``, and
    ``n 2^-126`` where terms are flushed. A difference from it errs by ``e`` and by its own rounding. Squares of
    differences from a mean that is ``e`` off sum to ``H (var + e^2)``; each has two roundings more than a square of
    :func:`reciprocal_norm`. Rows whose sum of ``|x|`` or of squares reaches 2^127 are open. A NaN or an infinity makes
    its row NaN. Not covered: the variance as a difference of squares. Source: derived; as of the module.
    """
    width = x.shape[1]
    n = width + 6
    d = n * U / (1 - n * U) + APPROXIMATE + width * 2.0**-52
    e = d * x.abs().mean(dim=1, keepdim=True) + n * FLUSHED
    centred = x - x.mean(dim=1, keepdim=True)
    total = centred.square().sum(dim=1, keepdim=True)
    var = total / width
    flushed = torch.where(var + epsilon > 0, FLUSHED / (var + epsilon), 0.0)
    root = (var + epsilon).rsqrt()
    low = (var + e.square() + epsilon).rsqrt() * (1 - d - flushed) * (1 - APPROXIMATE)
    high = root * (1 + d + flushed) * (1 + APPROXIMATE)
    unclear = (total >= OVERFLOW / 2) | (x.abs().sum(dim=1, keepdim=True) >= OVERFLOW / 2)
    return centred, e + U * (centred.abs() + e) + FLUSHED, Norm(low, high, root, unclear & torch.isfinite(total))
