"""Elements that no admitted arithmetic rounds: there only one value before the store is right.

Let every product be a multiple of ``q = q_a q_b`` (powers of two that divide all elements of ``a`` and of ``b``),
``T_c = sum |a| |b|`` over one chain ``c``, ``e`` the largest nominal product exponent, all scales powers of two, and
``sigma_c`` the scale of the chain. Nothing is rounded before the store when

    2**(e - t) <= q,   T_c < 2**(min(t, to) + 1) q for every chain      (an aligner of t bits, result to + 1 bits)
    T_c < 2**24 q for every chain                                       (sums without an aligner)
    sum_c sigma_c T_c + |bias| < 2**24 min(q min_c sigma_c, q_bias)     (float32: promotion, scales, bias)

and no float32 intermediate leaves the normal range; where subnormals are flushed, no operand may be one. Proof: every
partial sum, in any order, is a multiple of the quantum and below the stated multiple of it, so it is representable,
and an aligner keeps it (an accumulator has an exponent of at most ``log2 T_c``, also where it is floored or dropped
below 25 binades); a product with a power of two is exact. Without an accumulator (float32 in any order) the last line
alone is needed. Source: derived here; this is the theorem behind "first exact, then close". Not covered: scales inside
the instruction.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oracle.bounds.accumulator import Accumulator
from oracle.bounds.interval import Interval
from oracle.numbers.formats import decode, of_dtype
from oracle.tensorcore.instructions import Sum
from oracle.truth.gemm import ScaledProduct, quantum_of

UNALIGNED = (Sum.EXACT, Sum.TREE_FLUSH)
FLOAT32 = 2.0**24
LEAST, MOST = 2.0**-126, 2.0**127


def collapsed(product: ScaledProduct, interval: Interval, acc: Accumulator | None) -> Interval:
    """``interval`` with width zero wherever no admitted arithmetic rounds anything."""
    mask = unrounded(product, acc)
    if mask is None:
        return interval
    zero = torch.zeros((), dtype=interval.lo.dtype, device=interval.lo.device)
    return replace(interval, lo=torch.where(mask, zero, interval.lo), hi=torch.where(mask, zero, interval.hi))


def unrounded(product: ScaledProduct, acc: Accumulator | None) -> Tensor | None:
    """Bool ``[M, N]``: elements whose float32 sum is exact in every admitted arithmetic; None when there are none."""
    if acc is not None and acc.scales_inside:
        return None
    sa, sb = decode(product.a_scale), decode(product.b_scale)
    if not (_powers(sa) and _powers(sb)):
        return None
    a, b = _finite(decode(product.a)), _finite(decode(product.b))
    qa, qb = quantum_of(a), quantum_of(b)
    q = qa * qb
    low, high = float(sa.min()), float(sb.min())
    if min(q * low, q * high, q * low * high, low * high) < LEAST:
        return None
    limit = torch.inf
    if acc is not None:
        if acc.kind is Sum.TREE_FLUSH and (q < LEAST or _has_subnormal(a, product.a) or _has_subnormal(b, product.b)):
            return None
        limit = FLOAT32 * q
        if acc.kind not in UNALIGNED:
            top = _largest_exponent(a, product.a) + _largest_exponent(b, product.b)
            if 2.0 ** (top - acc.align) > q:
                return None
            limit = min(limit, 2.0 ** (min(acc.align, acc.out) + 1) * q)
    return _within(product, a.abs(), b.abs(), q, limit, acc)


def _within(
    product: ScaledProduct, a: Tensor, b: Tensor, q: float, limit: float, acc: Accumulator | None
) -> Tensor | None:
    like = torch.zeros((product.M, product.N), dtype=torch.float64, device=a.device)
    ok = torch.ones_like(like, dtype=torch.bool)
    total, least = torch.zeros_like(like), torch.full_like(like, torch.inf)
    for block in range(product.B):
        first, end = block * product.block, min(product.K, (block + 1) * product.block)
        sigma = product.sigma(block).expand_as(like)
        least = torch.minimum(least, sigma * q)
        length = end - first if acc is None or acc.promotion is None else acc.promotion
        for start in range(first, end, length):
            k = slice(start, min(start + length, end))
            size = a[:, k] @ b[:, k].T
            ok &= size < limit
            total = total + sigma * size
    if product.bias is not None:
        bias = decode(product.bias)
        if not bool(torch.isfinite(bias).all()):
            return None
        total = total + bias.abs()[None, :]
        least = torch.minimum(least, torch.full_like(least, quantum_of(bias)))
    largest = max(1.0, float(product.a_scale.max())) * max(1.0, float(product.b_scale.max()))
    ok &= (total < FLOAT32 * least) & (total * largest < MOST)
    return ok if bool(ok.any()) else None


def _has_subnormal(value: Tensor, codes: Tensor) -> bool:
    size = value.abs()
    return bool(((size > 0) & (size < 2.0 ** of_dtype(codes.dtype).emin)).any())


def _powers(scale: Tensor) -> bool:
    finite = bool(torch.isfinite(scale).all()) and bool((scale > 0).all())
    return finite and bool((torch.frexp(scale)[0] == 0.5).all())


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, 0.0, 0.0, 0.0)


def _largest_exponent(value: Tensor, codes: Tensor) -> int:
    nonzero = value[value != 0]
    if nonzero.numel() == 0:
        return 0
    exponent = int(torch.frexp(nonzero)[1].max()) - 1
    return max(exponent, of_dtype(codes.dtype).emin)
