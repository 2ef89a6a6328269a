"""Admissible values as tensors in the dtype of an output, and the values of such tensors.

Source: derived in this file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.numbers.formats import decode


@dataclass(frozen=True)
class Range:
    """Admissible elements of one output: ``low`` and ``high`` in its dtype and shape, ``free`` uint8."""

    low: Tensor
    high: Tensor
    free: Tensor


def values_of(x: Tensor) -> Tensor:
    """The values of an output ``x`` (any shape) as float64 of its shape; integers and float64 stand for themselves, NaN
    for NaN."""
    return decode(x) if x.is_floating_point() and x.dtype is not torch.float64 else x.to(torch.float64)
