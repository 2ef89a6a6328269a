"""Bound of a product whose partial sums pass through the dtype of its output, in any order.

    |computed - exact| <= ((1 + u)**n (1 + u32)**(K + 4) - 1) * sum_k |a w|  +  n K eta

Each term meets at most ``n`` roundings to a format of ``u = 2**-p`` (a partial sum that is stored, an addition in
memory, a fused multiply-add) and ``K + 4`` of float32 (:mod:`oracle.bounds.ieee32`); an operation whose result is
subnormal errs by ``eta``, half the least subnormal, at most. A width of zero where nothing is rounded: every term is a
multiple of ``q``, which the format holds, and ``sum |a w| <= 2**p q``, so that every partial sum in any order is a
value of it. Where a partial sum may leave the range of the format, nothing is claimed.

NaN and infinities count as zeros here; the exact value decides there.
Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.1; derived here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.bounds.interval import Interval
from oracle.bounds.product import U
from oracle.numbers.formats import decode_scalar, of_dtype
from oracle.truth.gemm import ScaledProduct


def roundings_of(count: int, dtype: torch.dtype) -> float:
    """``(1 + u)**count - 1``: the relative error of so many roundings to ``dtype``. No tensor, so no NaN. Source: the
    formula of this file."""
    return float((1 + 2.0 ** -of_dtype(dtype).precision) ** count - 1)


def narrow_bound(product: ScaledProduct, dtype: torch.dtype, roundings: int, reach: Tensor | None = None) -> Interval:
    """The interval of ``product``, without scales, whose terms meet at most ``roundings`` roundings to ``dtype``.

    ``reach``: what a partial sum may reach that is scaled later, float64 ``[M, N]``. Float64 ``[M, N]``, symmetric; NaN
    and infinities as zeros."""
    fmt = of_dtype(dtype)
    left, right = product.left, product.right
    size = (left.number().abs() @ right.number().abs().T) * (1 + product.K * 2.0**-52)
    gamma = (1 + roundings_of(roundings, dtype)) * (1 + U) ** (product.K + 4) - 1
    least = 2.0 ** (fmt.emin - fmt.fraction_bits)
    width = gamma * size + roundings * product.K * least / 2
    q = left.facts.quantum * right.facts.quantum
    exact = (size <= 2.0**fmt.precision * q) & torch.tensor(q >= least, dtype=torch.bool, device=size.device)
    width = torch.where(exact, 0.0, width)
    most = size if reach is None else torch.maximum(size, reach)
    open_ = most + width >= float(decode_scalar(fmt.max_code, fmt)) * (1 - 2.0 ** -(fmt.precision + 2))
    return Interval(-width, width, f"any-order bound of sums in {fmt.name}", weak=True, open=open_)
