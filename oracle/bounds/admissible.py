"""The admissible values of an output: what a bound hands to the comparison."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
