"""The interval of computed minus exact, and the admissible output values it implies.

    low = RN_T(exact + lo),  high = RN_T(exact + hi)

with the single rounding ``RN_T`` of :func:`oracle.numbers.rounding.pair_to_dtype` into the output dtype ``T``. Rounding
is monotone, so every ``RN_T(exact + d)`` with ``lo <= d <= hi`` lies in ``[low, high]``: no half-ulp slack is added.
Source: derived here from the monotonicity of rounding (IEEE 754-2019, 4.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.numbers.rounding import Overflow, Rounding, fast_two_sum, pair_to_dtype, two_sum
from oracle.truth.gemm import Exact


@dataclass(frozen=True)
class Admissible:
    """Element-wise admissible interval, all float64 of one shape, on the grid of the output dtype.

    ``expected`` is the correctly rounded exact value, NaN where the result must be NaN. ``specified`` (bool)
    is False where the contract leaves the content open. ``open`` (bool) is True where the derivation does not
    constrain the element (an intermediate may overflow); such elements pass and are counted.
    """

    low: Tensor
    high: Tensor
    expected: Tensor
    specified: Tensor | None = None
    open: Tensor | None = None


@dataclass(frozen=True)
class Interval:
    """``lo <= computed - exact <= hi`` per element, float64, before the output is rounded.

    ``open`` (bool or None) marks elements that the derivation does not constrain, because a float32 intermediate
    may overflow there. ``name`` says which bound this is; ``weak`` that it assumes no order of summation. ``confirm``,
    of a bound of which a device computed more than was confirmed: whether elements on which a verdict rests (bool, as a
    function gives them) have the definition's bits too.
    """

    lo: Tensor
    hi: Tensor
    name: str
    weak: bool = False
    open: Tensor | None = None
    confirm: Callable[[Callable[[], Tensor]], bool] | None = field(default=None, compare=False, repr=False)

    def to(self, device: torch.device | str) -> Interval:
        """The same interval with its tensors on ``device``."""
        opened = None if self.open is None else self.open.to(device)
        return replace(self, lo=self.lo.to(device), hi=self.hi.to(device), open=opened)


def admissible(value: Exact, expected: Tensor, interval: Interval) -> Admissible:
    """The closed interval of output values; ``expected`` ``[M, N]`` is the exact value correctly rounded into its
    dtype, the output's. Where that is NaN or infinite, it alone is admissible."""
    dtype = expected.dtype
    low = _edge(value, interval.lo - value.slack, dtype)
    high = _edge(value, interval.hi + value.slack, dtype)
    center = decode(expected)
    special = ~torch.isfinite(value.hi)
    low, high = torch.where(special, center, low), torch.where(special, center, high)
    return Admissible(low, high, center, open=interval.open)


def _edge(value: Exact, offset: Tensor, dtype: torch.dtype) -> Tensor:
    hi, e = two_sum(value.hi, offset)
    hi, lo = fast_two_sum(hi, e + value.lo)
    lo = torch.where(torch.isinf(hi), torch.zeros_like(lo), lo)
    return decode(pair_to_dtype(hi, lo, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF))
