"""Any-order bound of an IEEE float32 evaluation of a scaled product.

    |computed - exact| <= ((1 + u)**n - 1) * (sum_k |a sa| |b sb| + |bias|),   n = K + 4, u = 2**-24

Each term of the sum meets at most ``K - 1`` additions in any order and any grouping, one rounding of the product (none
is needed for FP8 codes), at most three of the scales (``fl(a sa)``, ``fl(b sb)``, or one multiplication of a partial
sum by each scale and by their rounded product) and one of the bias. ``(1 + u)**n - 1 <= n u / (1 - n u)``.
For pure summation Jeannerod and Rump give ``(K - 1) u`` without the denominator; the difference is below ``n**2 u**2``.
An underflowing operation adds at most ``eta = 2**-149``, times the magnitude by which it is later multiplied.

Covers dequantise-then-multiply as well as multiply-then-scale, fused multiply-adds, split K and bf16 *outputs*; not
covered: lower-precision partial sums. Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.1;
Jeannerod and Rump, SIMAX 34(2), 2013.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.bounds.interval import Interval
from oracle.bounds.promote import ETA, FLOAT32_MAX, U
from oracle.formats import decode
from oracle.gemm import ScaledProduct

NAME = "ieee32.any"


def ieee32_bound(product: ScaledProduct) -> Interval:
    """The interval of ``product`` under float32 arithmetic in any order; float64 ``[M, N]``, symmetric."""
    size = _magnitudes(product)
    n = product.K + 4
    gamma = n * U / (1 - n * U)
    if product.bias is not None:
        size = size + torch.nan_to_num(decode(product.bias), 0.0, 0.0, 0.0).abs()[None, :]
    largest_scale = max(1.0, _largest(product.a_scale), _largest(product.b_scale))
    largest_code = max(1.0, _largest(product.a)) * max(1.0, _largest(product.b))
    absolute = ETA * n * largest_code * largest_scale
    width = gamma * size * (1 + 2.0**-20) + absolute
    sigma = _largest(product.a_scale) * _largest(product.b_scale)
    open_ = (size + width >= FLOAT32_MAX * (1 - 2.0**-20)) | _reached_by_infinity(product)
    if max(sigma, largest_scale * largest_code * product.K) >= FLOAT32_MAX / 2:
        open_ |= _reach(product) * (1 + gamma) >= FLOAT32_MAX * (1 - 2.0**-20)
    return Interval(-width, width, "any-order float32 bound", weak=True, open=open_)


def _magnitudes(product: ScaledProduct) -> Tensor:
    a = torch.nan_to_num(decode(product.a), 0.0, 0.0, 0.0).abs() * _expand(product.a_scale, product, 1)
    b = torch.nan_to_num(decode(product.b), 0.0, 0.0, 0.0).abs() * _expand(product.b_scale, product, product.b_rows)
    return (a @ b.T) * (1 + product.K * 2.0**-52)


def _reach(product: ScaledProduct) -> Tensor:
    """The largest intermediate before the last scale: ``sa sb``, ``a sa``, ``b sb``, a sum with one of its scales."""
    a = torch.nan_to_num(decode(product.a), 0.0, 0.0, 0.0).abs()
    b = torch.nan_to_num(decode(product.b), 0.0, 0.0, 0.0).abs()
    rows = (a * _expand(product.a_scale, product, 1)).amax(dim=1)[:, None]
    columns = (b * _expand(product.b_scale, product, product.b_rows)).amax(dim=1)[None, :]
    largest = torch.maximum(rows, columns)
    sums = torch.zeros_like(largest)
    for block in range(product.B):
        k = slice(block * product.block, min(product.K, (block + 1) * product.block))
        sa = torch.nan_to_num(decode(product.a_scale[:, block]), 0.0, 0.0, 0.0).abs()[:, None]
        sb = torch.nan_to_num(decode(product.b_scale[:, block]), 0.0, 0.0, 0.0).abs()
        sb = sb.repeat_interleave(product.b_rows)[None, : product.N]
        largest = torch.maximum(largest, sa * sb)
        sums = sums + torch.maximum(sa, sb) * (a[:, k] @ b[:, k].T)
    return torch.maximum(largest, sums)


def _reached_by_infinity(product: ScaledProduct) -> Tensor:
    """Elements with an infinite scale: NaN or infinity, depending on whether codes or partial sums meet it; and those
    with an infinite code whose scales float32 may round to zero first."""
    rows = torch.isinf(decode(product.a_scale)).any(dim=1)[:, None]
    columns = torch.isinf(decode(product.b_scale)).any(dim=1).repeat_interleave(product.b_rows)[None, : product.N]
    sa, sb = _least(product.a_scale), _least(product.b_scale)
    if min(sa * sb, _least(product.a) * sa, _least(product.b) * sb) < ETA:
        rows = rows | torch.isinf(decode(product.a)).any(dim=1)[:, None]
        columns = columns | torch.isinf(decode(product.b)).any(dim=1)[None, :]
    return (rows | columns).expand(product.M, product.N)


def _expand(scale: Tensor, product: ScaledProduct, rows: int) -> Tensor:
    value = torch.nan_to_num(decode(scale), 0.0, 0.0, 0.0).abs()
    value = value.repeat_interleave(product.block, dim=1)[:, : product.K]
    return value if rows == 1 or value.shape[0] == 1 else value.repeat_interleave(rows, dim=0)[: product.N]


def _least(x: Tensor) -> float:
    """The smallest non-zero magnitude; infinity when there is none."""
    size = decode(x).abs()
    return float(torch.where(size > 0, size, torch.inf).min())


def _largest(x: Tensor) -> float:
    return float(torch.nan_to_num(decode(x), 0.0, 0.0, 0.0).abs().max())
