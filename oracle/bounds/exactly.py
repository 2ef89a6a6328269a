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

import math
from dataclasses import replace

import torch
from torch import Tensor

from oracle.bounds.accumulator import Accumulator, chains
from oracle.bounds.interval import Interval
from oracle.numbers.formats import decode
from oracle.tensorcore.instructions import Sum
from oracle.truth.gemm import Decoded, ScaledProduct, quantum_of

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
    left, right = product.left, product.right
    if not (_powers(left.scales) and _powers(right.scales)):
        return None
    q = left.facts.quantum * right.facts.quantum
    low, high = float(left.scales.min()), float(right.scales.min())
    if min(q * low, q * high, q * low * high, low * high) < LEAST:
        return None
    limit = torch.inf
    if acc is not None:
        if acc.kind is Sum.TREE_FLUSH and (q < LEAST or any(x.facts.least < 2.0**x.fmt.emin for x in (left, right))):
            return None
        limit = FLOAT32 * q
        if acc.kind not in UNALIGNED:
            if 2.0 ** (_largest_exponent(left) + _largest_exponent(right) - acc.align) > q:
                return None
            limit = min(limit, 2.0 ** (min(acc.align, acc.out) + 1) * q)
    return _within(product, q, limit, acc)


def _within(product: ScaledProduct, q: float, limit: float, acc: Accumulator | None) -> Tensor | None:
    like = torch.zeros((product.M, product.N), dtype=torch.float64, device=product.a.device)
    ok = torch.ones_like(like, dtype=torch.bool)
    total, least = torch.zeros_like(like), torch.full_like(like, torch.inf)
    for block, start, stop in chains(product, None if acc is None else acc.promotion):
        sigma = product.sigma(block).expand_as(like)
        least = torch.minimum(least, sigma * q)
        k = slice(start, stop)
        size = product.left.number(k).abs() @ product.right.number(k).abs().T
        ok &= size < limit
        total = total + sigma * size
    if product.bias is not None:
        bias = decode(product.bias)
        if not bool(torch.isfinite(bias).all()):
            return None
        total = total + bias.abs()[None, :]
        least = torch.minimum(least, torch.full_like(least, quantum_of(bias)))
    largest = max(1.0, float(product.left.scales.max())) * max(1.0, float(product.right.scales.max()))
    ok &= (total < FLOAT32 * least) & (total * largest < MOST)
    return ok if bool(ok.any()) else None


def _powers(scale: Tensor) -> bool:
    finite = bool(torch.isfinite(scale).all()) and bool((scale > 0).all())
    return finite and bool((torch.frexp(scale)[0] == 0.5).all())


def _largest_exponent(x: Decoded) -> int:
    largest = x.facts.largest
    return max(math.frexp(largest)[1] - 1, x.fmt.emin) if largest else 0
