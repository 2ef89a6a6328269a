"""An interval that holds every result of a sequential accumulator, for the price of one float64 matrix product.

The residue bound (:func:`oracle.bounds.product.residue_bound`) looks at every product; this one at norms alone, so it
is wide: it tells what is surely wrong, and proves nothing right. In a chain of steps of ``group`` products let ``P_s``
bound the exact prefix after step ``s``, ``g_s`` every product of the step (a power of two at least the nominal one of
each factor), and ``E_s`` the error so far. By the lemmas L1 to L4 of :mod:`oracle.bounds.chain` the exponent of an
alignment is at most that of ``max(g, P + E)``, and each addend loses less than ``2^-t`` of its power:

    d = c1 (g_s + P_(s-1) + E_(s-1)),   c1 = (group + 1) 2^-t          products and accumulator, aligned
    E_s <= E_(s-1) + d + c2 (P_s + E_(s-1) + d),   c2 = 2^-to           the truncation of the sum
    E   <= (1 + c1)^S (1 + c2)^S  sum_s [c1 (g_s + P_(s-1)) + c2 P_s + 2^-126],   S steps

``P_s`` is the product of the norms of both rows over the first ``s`` steps (Cauchy and Schwarz). Times the scales of
its chain every term is a product of a number of the row and one of the column, so the sum over all chains is a matrix
product too. Promotion adds, with ``c`` chains and ``T`` the sum of their ``P_S`` and ``E`` times the scales,

    (c + 3) 2^-24 T + 2^-149 sum (1 + P_S + E + |sa| + |sb|)           (:mod:`oracle.bounds.product`)

``y`` is the float64 product of operands times scales, which errs by ``2^-50 (K + 2)`` norm times norm at most.

Not covered (:func:`why_not`): other orders, chains that end within a step, scales inside the instruction, split sums, a
bias or a summand, NaN and infinity among the operands, intermediates that may exceed float32.
Source: derived here; the classical form is Blanchard, Higham, Lopez, Mary, Pranesh (SISC 42(3), 2020).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.bounds.accumulator import Accumulator
from oracle.bounds.chain import floor_power
from oracle.bounds.product import ETA, FLOAT32_MAX, U, check_fit
from oracle.tensorcore.instructions import Order, Sum
from oracle.truth.gemm import Decoded, ScaledProduct

LEAST = 2.0**-126


def why_not(product: ScaledProduct, acc: Accumulator) -> str | None:
    """The reason for which there is no outer interval of this product, or None."""
    if acc.kind is not Sum.FUSED or acc.order is not Order.SEQUENTIAL:
        return f"{acc.name} does not add by fused truncating steps in ascending order"
    if acc.scales_inside or acc.split is not None or acc.flushes or acc.truncates:
        return f"{acc.name} scales, splits or changes its operands"
    if product.bias is not None or product.c is not None:
        return "a bias or a summand is added"
    if max(product.a.element_size(), product.b.element_size()) > 1:
        return "an operand is wider than 8 bits"
    length = min(acc.promotion or product.block, product.block)
    if product.K % length or length % acc.group or product.K % product.block:
        return f"K={product.K} is no whole number of chains of whole steps"
    left, right = product.left, product.right
    scales = [side.scales.abs().max() for side in (left, right)]
    if not (left.finite and right.finite and all(bool(torch.isfinite(s)) for s in scales)):
        return "an operand or a scale is no number"
    sa, sb = (max(1.0, float(s)) for s in scales)
    if 4 * product.K * left.fmt.max_finite * right.fmt.max_finite * sa * sb >= FLOAT32_MAX:
        return "an intermediate may exceed float32"
    return None


def outer(product: ScaledProduct, acc: Accumulator) -> tuple[Tensor, Tensor]:
    """``y, width``, float64 ``[M, N]``: the exact value, and every result of ``acc``, lie within ``width`` of ``y``.

    Finite and without overflow, where :func:`why_not` is None.
    """
    check_fit(product, acc)
    length = min(acc.promotion or product.block, product.block)
    count, steps = product.K // length, length // acc.group
    sides = ((product.left, 1), (product.right, product.b_rows))
    left, right = (_Side(side, rows, product, length, acc) for side, rows in sides)
    c1, c2, rounding = (acc.group + 1) * 2.0**-acc.align, 2.0**-acc.out, (count + 3) * U
    grown = ((1 + c1) * (1 + c2)) ** steps * (1 + rounding)
    weighted = [c1 * grown * left.largest, c1 * grown * left.before, c2 * grown * left.after, rounding * left.ends]
    width = torch.cat(weighted, dim=1) @ torch.cat([right.largest, right.before, right.after, right.ends], dim=1).T
    most = product.K * product.left.fmt.max_finite * product.right.fmt.max_finite
    sa, sb = (float(side.scales.abs().max()) for side in (product.left, product.right))
    tiny = count * (ETA * (1 + 2 * most + sa + sb) + grown * steps * LEAST * max(1.0, sa * sb))
    width.addmm_(left.size, right.size.T, alpha=2.0**-50 * (product.K + 2))
    return left.scaled @ right.scaled.T, width.add_(tiny).mul_(1 + 2.0**-20)


class _Side:
    """One operand ``[R, K]`` times its scales, and its factor of each term: a column for each step or chain."""

    def __init__(self, x: Decoded, rows: int, product: ScaledProduct, length: int, acc: Accumulator) -> None:
        value, count = x.number(), len(x.codes)
        scales = x.scales.repeat_interleave(rows, dim=0)[:count].expand(count, -1)
        steps = value.view(count, -1, length // acc.group, acc.group)
        of_chain = scales.abs().repeat_interleave(product.block // length, dim=1)[:, :, None]
        top = steps.abs().amax(dim=3)
        norm = torch.linalg.vector_norm(steps, dim=3).square().cumsum(dim=2).sqrt() * of_chain
        power = torch.where(top == 0, 0.0, floor_power(top).clamp(min=2.0**x.fmt.emin)) * of_chain
        self.largest, self.before, self.after = (t.flatten(1) for t in (power, norm[:, :, :-1], norm))
        self.ends = norm[:, :, -1]
        self.size = self.ends.norm(dim=1, keepdim=True)
        self.scaled = (value.view(count, -1, product.block) * scales[:, :, None]).view(count, -1)
