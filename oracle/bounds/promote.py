"""From the accumulators' bounds to the bound of the whole scaled sum.

With ``sigma_b`` the exact product of the scales of block ``b``, ``u = 2**-24`` and ``e_b = max(-l_b, h_b)``:

    lo = sum_b sigma_b l_b - Phi,   hi = sum_b sigma_b h_b + Phi,   y_b = sum_{i <= b} sigma_i x_i
    Phi += 3 u |sigma_b| (|x_b| + e_b) + u (max(|y_b + lo_b|, |y_b + hi_b|) + Phi) + eta (1 + |x_b| + e_b + |sa| + |sb|)

The three roundings cover every epilogue in use: ``fma(fl(sa sb), acc, sum)``, ``(acc sa) sb``, ``sa (sb acc)``, a
separate multiply and add, and scales applied once after the promoted sum. ``eta = 2**-149`` is the absolute error of
an underflowing float32 operation (gradual underflow). Blocks that are exactly zero cost nothing: adding 0 is exact.
``Phi`` is finally multiplied by ``1 + 2**-20``, which covers second-order terms and the float64 evaluation: both are
below ``2**-26`` of its first-order part for fewer than ``2**24`` blocks.

Where a float32 intermediate may exceed the largest float32, nothing is claimed: the element is ``open``.
Source: standard rounding-error analysis (Higham, Accuracy and Stability, ch. 2 and 3); derived here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.bounds.interval import Interval

U = 2.0**-24
ETA = 2.0**-149
FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127


class Promotion:
    """Running bound of a promoted sum; feed the blocks in ascending order, then read :meth:`interval`."""

    def __init__(self, like: Tensor) -> None:
        self._y, self._lo, self._hi, self._phi = (torch.zeros_like(like) for _ in range(4))
        self._open = torch.zeros(like.shape, dtype=torch.bool, device=like.device)

    def only(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        """The one chain of a kernel that scales inside the instruction: it is the sum, and nothing is rounded."""
        self._y, self._lo, self._hi = x, low, high
        self._open |= ~(torch.maximum((x + low).abs(), (x + high).abs()) < FLOAT32_MAX * (1 - 2.0**-20))

    def add(self, a_scale: Tensor, b_scale: Tensor, x: Tensor, low: Tensor, high: Tensor) -> None:
        """Add one block: ``a_scale [M or 1, 1]``, ``b_scale [1, N]`` float64, ``x, low, high [M, N]``."""
        sigma = a_scale * b_scale
        size = x.abs() + torch.maximum(-low, high)
        left, right = sigma * low, sigma * high
        self._y = self._y + sigma * x
        self._lo = self._lo + torch.minimum(left, right)
        self._hi = self._hi + torch.maximum(left, right)
        total = torch.maximum((self._y + self._lo).abs(), (self._y + self._hi).abs()) + self._phi
        rounding = 3 * U * sigma.abs() * size + U * total + ETA * (1 + size + a_scale.abs() + b_scale.abs())
        self._phi = torch.where(size > 0, self._phi + rounding, self._phi)
        largest = torch.maximum(torch.maximum(a_scale.abs(), b_scale.abs()), sigma.abs()) * size
        reach = torch.maximum(torch.maximum(largest, sigma.abs()), total + rounding)
        self._open |= ~(reach < FLOAT32_MAX * (1 - 2.0**-20))

    def interval(self, bias: Tensor | None, *, name: str, weak: bool = False) -> Interval:
        """The bound of the whole sum, the bias included (one more float32 addition)."""
        phi = self._phi
        if bias is not None:
            y = self._y + bias
            total = torch.maximum((y + self._lo).abs(), (y + self._hi).abs()) + phi
            phi = phi + U * total + ETA
            self._open |= ~(total < FLOAT32_MAX * (1 - 2.0**-20))
        phi = phi * (1 + 2.0**-20)
        return Interval(self._lo - phi, self._hi + phi, name, weak, self._open)
