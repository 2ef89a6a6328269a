"""Whole-tensor measures that engines' own tests use.

Source: DeepGEMM's ``calc_diff`` (deep_gemm/testing).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .errors import DtypeError, ShapeError
from .verbs import verb


@verb("cast")
def calc_diff(x: Tensor, y: Tensor) -> Tensor:
    """``1 - 2<x,y> / (<x,x> + <y,y>)`` in float64: 0 for equal tensors, 2 for opposite ones, NaN when either has one.

    Two tensors of zeros (or without elements) are equal: 0. One number for a whole tensor hides single wrong
    elements; it is here because engines publish it.

    Parameters
    ----------
    x, y
        Of any shape, the same for both, and of any real dtype.

    Returns
    -------
    Tensor
        A float64 scalar; NaN where a sum is NaN or infinite.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, InputError, LayoutError
        Two shapes, a complex dtype, or two devices.
    """
    left, right = checks.tensor("x", x), checks.tensor("y", y)
    if left.shape != right.shape:
        raise ShapeError(f"x {list(left.shape)} and y {list(right.shape)} must have one shape")
    checks.same_device(x=left, y=right)
    if left.is_complex() or right.is_complex():
        raise DtypeError(f"x is {left.dtype} and y {right.dtype}; pass real numbers, as torch.view_as_real gives them")
    a, b = left.to(torch.float64), right.to(torch.float64)
    norms = (a * a + b * b).sum()
    diff = 1 - 2 * (a * b).sum() / norms
    return torch.where(norms == 0, torch.zeros_like(diff), diff)
