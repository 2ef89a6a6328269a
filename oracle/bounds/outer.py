"""An interval that holds every result of a sequential accumulator, for the price of one float64 matrix product.

The residue bound (:func:`oracle.bounds.product.residue_bound`) looks at every product; this one at norms alone, so it
is wide: an output outside it is wrong, one inside need not be right. In a chain of steps of ``group`` products let
``P_s`` bound the exact prefix after step ``s``, ``g_s`` every product of the step (a power of two at least the nominal
one of each factor), and ``E_s`` the error so far. By the lemmas L1 to L4 of :mod:`oracle.bounds.chain` the exponent of
an alignment is at most that of ``max(g, P + E)``, and each addend loses less than ``2^-t`` of its power:

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

from collections.abc import Iterator

import torch
from torch import Tensor

from oracle.bounds.accumulator import Accumulator
from oracle.bounds.chain import floor_power
from oracle.bounds.product import ETA, FLOAT32_MAX, U, check_fit
from oracle.numbers.formats import codes_of, decode
from oracle.numbers.threads import all_threads
from oracle.tensorcore.instructions import Order, Sum
from oracle.truth.gemm import Decoded, ScaledProduct

LEAST = 2.0**-126
BAND, BAND_ON_DEVICE = 1 << 20, 1 << 24  # elements of b that are looked at together: 8 MiB of float64, 128 MiB
LEAST_BAND = 64  # columns of b that are looked at together at least


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
    if left.fmt.complement or right.fmt.complement:
        return "codes of an operand do not rise with its magnitude"
    scales = [side.scales.abs().max() for side in (left, right)]
    if not (left.finite and right.finite and all(bool(torch.isfinite(s)) for s in scales)):
        return "an operand or a scale is no number"
    sa, sb = (max(1.0, float(s)) for s in scales)
    if 4 * product.K * left.fmt.max_finite * right.fmt.max_finite * sa * sb >= FLOAT32_MAX:
        return "an intermediate may exceed float32"
    return None


def outer_bands(product: ScaledProduct, acc: Accumulator) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """``y`` and ``width``, float64 ``[M, columns]``, and these columns, some at a time: the exact value, and every
    result of ``acc``, lie within ``width`` of ``y``.

    What is computed from a band next finds it in the cache. Finite and without overflow, where :func:`why_not` is None;
    of NaN and infinity nothing holds. Raises NumericsError: no kernel with ``acc`` can compute the product.
    """
    check_fit(product, acc)
    length = min(acc.promotion or product.block, product.block)
    count, steps = product.K // length, length // acc.group
    left, right = product.left, product.right
    most = product.K * left.fmt.max_finite * right.fmt.max_finite
    sa, sb = (float(side.scales.abs().max()) for side in (left, right))
    c1, c2, rounding = (acc.group + 1) * 2.0**-acc.align, 2.0**-acc.out, (count + 3) * U
    grown = ((1 + c1) * (1 + c2)) ** steps * (1 + rounding)
    tiny = count * (ETA * (1 + 2 * most + sa + sb) + grown * steps * LEAST * max(1.0, sa * sb))
    rows = _Side(left, product.block, length, acc)
    weighted = rows.factors(c1 * grown, c1 * grown, c2 * grown, rounding, 2.0**-50 * (product.K + 2))
    band = max(LEAST_BAND, (BAND_ON_DEVICE if product.a.is_cuda else BAND) // product.K)
    for start in range(0, product.N, band):
        columns = product.columns(start, min(product.N, start + band))
        own = _Side(columns.right, product.block, length, acc)
        with all_threads():
            y, width = rows.scaled @ own.scaled.T, weighted @ own.factors(1.0, 1.0, 1.0, 1.0, 1.0).T
        yield slice(start, start + columns.N), y, width.add_(tiny).mul_(1 + 2.0**-20)


class _Side:
    """One operand ``[R, K]`` times its scales ``[R or 1, B]``, and its factor of each term: a column for each step or
    chain."""

    def __init__(self, x: Decoded, block: int, length: int, acc: Accumulator) -> None:
        value, count = x.number(), len(x.codes)
        scales = x.scales.expand(count, -1)
        steps = (count, -1, length // acc.group, acc.group)
        of_chain = scales.abs().repeat_interleave(block // length, dim=1)[:, :, None]
        magnitudes = codes_of(x.codes, x.fmt).bitwise_and(x.fmt.magnitude_mask)  # larger codes, larger numbers
        top = decode(magnitudes.view(steps).amax(dim=3), x.fmt)
        squares = torch.linalg.vector_norm(value.view(steps), dim=3).square_()
        for step in range(1, squares.shape[2]):  # a cumulative sum, which a device takes its time for
            squares[:, :, step] += squares[:, :, step - 1]
        norm = squares.sqrt_().mul_(of_chain)
        power = torch.where(top == 0, 0.0, floor_power(top).clamp(min=2.0**x.fmt.emin)) * of_chain
        ends = norm[:, :, -1]
        self._terms = (power.flatten(1), norm[:, :, :-1].flatten(1), norm.flatten(1), ends)
        self._size = ends.norm(dim=1, keepdim=True)
        self.scaled = (value.view(count, -1, block) * scales[:, :, None]).view(count, -1)

    def factors(self, largest: float, before: float, after: float, ends: float, size: float) -> Tensor:
        """``[R, .]``: the largest of each step, norms before and after it, at the end of a chain, of the row; each kind
        times its weight."""
        weights = (largest, before, after, ends, size)
        return torch.cat([w * t for w, t in zip(weights, (*self._terms, self._size), strict=True)], dim=1)
