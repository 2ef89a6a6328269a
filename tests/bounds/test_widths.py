"""Widths of bounds are those of their docstrings, evaluated here in fractions: no less, and little more.

tests/bounds/test_edges.py compares the same functions with numbers that they gave; here the numbers are derived apart
from the code. What a width may have above the formula is its float64 evaluation and terms of second order.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.bounds.ieee32 import ieee32_bound
from oracle.bounds.interval import Interval
from oracle.bounds.logits import logits_bound
from oracle.bounds.norm import reciprocal_norm
from oracle.bounds.outer import outer_bands
from oracle.bounds.product import Promotion, stored_before, with_summand
from oracle.bounds.rotary import rotated
from oracle.numbers.formats import decode
from oracle.truth.gemm import Exact, ScaledProduct
from oracle.truth.logits import Logits
from tests.support.edges import accumulator, codes, grid, scales, small

U, ETA, LEAST = Fraction(1, 2**24), Fraction(1, 2**149), Fraction(1, 2**126)
MORE = 1 + Fraction(1, 2**15)  # float64, and terms of second order


def fractions(x: Tensor) -> list[list[Fraction]]:
    """A matrix of any float dtype."""
    value = x if x.dtype is torch.float64 else decode(x)
    return [[Fraction(v) for v in row] for row in value.tolist()]


def assert_just(found: float, due: Fraction) -> None:
    """No less than due, but for the rounding of what is compared, and little more."""
    assert due * (1 - Fraction(1, 2**30)) <= Fraction(found) <= due * MORE, (found, float(due))


def operands(product: ScaledProduct) -> tuple[list[list[Fraction]], list[list[Fraction]]]:
    """Codes times scales, ``[M, K]`` and ``[N, K]``."""
    sides = []
    for x, scale, rows in ((product.a, product.a_scale, 1), (product.b, product.b_scale, product.b_rows)):
        factor = fractions(scale)
        at = [min(i // rows, len(factor) - 1) for i in range(len(x))]
        sides.append(
            [[v * factor[at[i]][k // product.block] for k, v in enumerate(row)] for i, row in enumerate(fractions(x))]
        )
    return sides[0], sides[1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": scales(5, 3)},
        {"bias": scales(5, 3), "c": scales(6, 2, 3)},
        {"alpha": torch.tensor([0.3])},
        {"alpha": torch.tensor([-0.7, 3.0]), "c": scales(6, 2, 3)},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_float32_in_any_order(changes: dict[str, Any]) -> None:
    """``((1 + u)^n - 1) (|alpha| sum |a sa| |b sb| + |bias| + |c|)``; ``eta`` is far below it here."""
    product = small(2, b_rows=2, **changes)
    n = product.K + 4 + ("c" in changes) + 2 * ("alpha" in changes)
    a, b = operands(product)
    found = ieee32_bound(product)
    for i, row in enumerate(a):
        for j, column in enumerate(b):
            size = abs(Fraction(product.factor)) * sum(abs(x * y) for x, y in zip(row, column, strict=True))
            size += Fraction(float(product.bias[j])) if product.bias is not None else 0
            size += Fraction(float(product.c[i, j])) if product.c is not None else 0
            assert_just(float(found.hi[i, j]), ((1 + U) ** n - 1) * size)
            assert found.lo[i, j] == -found.hi[i, j]


@pytest.mark.parametrize("unit", [1.0, 2.0**-129])
def test_one_more_summand(unit: float) -> None:
    """``u |y + c + e|`` and what a flush may take; stored in bfloat16 before, ``2^-8`` of ``|y| + |e|``."""
    hi, low, high, c = (grid(i, 1, 8, unit=unit) for i in range(4))
    low, high = -low.abs() / 16, high.abs() / 16
    zero = torch.zeros_like(hi)
    after = with_summand(Exact(hi, zero, zero), Interval(low, high, ""), c.float())
    before = stored_before(Exact(hi, zero, zero), Interval(low, high, ""), c.float())
    for j, (y, down, up, s) in enumerate(zip(*(fractions(t)[0] for t in (hi, low, high, c)), strict=True)):
        assert_just(float(after.hi[0, j]), up + U * max(abs(y + s + down), abs(y + s + up)) + 3 * LEAST)
        stored = Fraction(1, 2**8) * (abs(y - s) + max(abs(down), abs(up))) + Fraction(1, 2**134)
        assert_just(float(before.hi[0, j]), up + stored)
        assert_just(-float(before.lo[0, j]), -down + stored)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("unit", [1.0, 2.0**-140])
def test_promotion(ordered: bool, unit: float) -> None:
    """The recurrence of ``Phi`` over three blocks; without an order, its closed form."""
    x, low, high = (grid(i, 3, 1, 4, unit=unit, zeros=0.0) for i in range(3))
    low, high = -low.abs() / 64, high.abs() / 64
    sa, sb = scales(1, 3, 1, 1).double(), scales(2, 3, 1, 4).double()
    promotion = Promotion(torch.zeros(1, 4, dtype=torch.float64), ordered=ordered)
    promotion.add(sa, sb, x, low, high)
    found = promotion.interval(name="", alpha=None)
    for j in range(4):
        y = lo = hi = phi = plus = minus = Fraction(0)
        for b in range(3):
            one, other = Fraction(float(sa[b, 0, 0])), Fraction(float(sb[b, 0, j]))
            xb, lb, hb = (Fraction(float(t[b, 0, j])) for t in (x, low, high))
            sigma, size = one * other, abs(xb) + max(-lb, hb)
            y, lo, hi = y + sigma * xb, lo + sigma * lb, hi + sigma * hb
            plus, minus = plus + max(sigma * (xb + hb), Fraction(0)), minus + max(-sigma * (xb + lb), Fraction(0))
            phi += 3 * U * sigma * size + ETA * (1 + size + one + other)
            phi += U * (max(abs(y + lo), abs(y + hi)) + phi) if ordered else 0
        if not ordered:
            phi = (phi + 2 * (U * max(plus, minus) + ETA)) / (1 - 3 * U)
        assert abs(Fraction(float(found.hi[0, j])) - (hi + phi)) <= phi / 2**15
        assert abs(Fraction(float(found.lo[0, j])) - (lo - phi)) <= phi / 2**15


@pytest.mark.parametrize("unit", [1.0, 2.0**-62])
def test_a_norm(unit: float) -> None:
    """``d = n u / (1 - n u) + 2^-21`` and ``2^-126`` of the mean; the reciprocal square root errs by ``2^-21``."""
    z = grid(1, 3, 6, unit=unit, zeros=0.0)
    found = reciprocal_norm(z, 0.0)
    n = 8
    for i, row in enumerate(fractions(z)):
        mean = sum((v * v for v in row), Fraction(0)) / 6
        d = n * U / (1 - n * U) + Fraction(1, 2**21) + LEAST / mean
        exact = Fraction(float(found.exact[i, 0]))
        assert abs(exact * exact * mean - 1) < Fraction(1, 2**50)
        low, high = (Fraction(float(end[i, 0])) / exact for end in (found.low, found.high))
        assert_just(float(high - 1), (1 + d) * (1 + Fraction(1, 2**21)) - 1)
        assert_just(float(1 - low), 1 - (1 - d) * (1 - Fraction(1, 2**21)))


@pytest.mark.parametrize("unit", [1.0, 2.0**-126])
def test_a_rotation(unit: float) -> None:
    """``(2 u (|x c| + |x' s|) + 4 2^-126) f + 2^-126`` on both sides, then one rounding to float32."""
    x, beside = (grid(i, 1, 8, unit=unit) for i in (1, 2))
    cos, sin = (grid(i, 1, 8, unit=2.0**-6) for i in (3, 4))
    low, high, _ = rotated(x, beside, cos, sin, 0.75)
    for j, (p, q, c, s) in enumerate(zip(*(fractions(t)[0] for t in (x, beside, cos, sin)), strict=True)):
        width = (2 * U * (abs(p * c) + abs(q * s)) + 4 * LEAST) * Fraction(3, 4) + LEAST
        exact = (p * c - q * s) * Fraction(3, 4)
        for end, due in ((float(low[0, j]), exact - width), (float(high[0, j]), exact + width)):
            rounding = abs(due) * U * MORE + ETA / 2
            assert abs(Fraction(end) - due) <= rounding + width / 2**15


def test_an_outer_interval() -> None:
    """Zero operands leave ``c (2^-149 (1 + 2 K max max + sa + sb) + (1 + c1)^S (1 + c2)^S S 2^-126)``."""
    acc = accumulator(promotion=8)
    product = small(1, a=torch.zeros(2, 32).to(torch.float8_e4m3fn))
    ((_, _, width),) = outer_bands(product, acc)
    count, steps, sa, sb = 4, 2, *(Fraction(float(s.max())) for s in (product.a_scale, product.b_scale))
    c1, c2 = Fraction(acc.group + 1, 2**acc.align), Fraction(1, 2**acc.out)
    grown = ((1 + c1) * (1 + c2)) ** steps * (1 + (count + 3) * U)
    tiny = ETA * (1 + 2 * 32 * 448 * 448 + sa + sb) + grown * steps * LEAST * max(Fraction(1), sa * sb)
    assert len(set(width.flatten().tolist())) == 1
    assert_just(float(width[0, 0]), count * tiny)


def test_logits() -> None:
    """``s sum w d + |s| R``, ``R = n u / (1 - n u) sum |w| (relu(x) + |d|)``, ``n = H + 3``."""
    q, k, k_scale, weights = codes(1, 3, 2, 32), codes(2, 4, 32), scales(1, 4), grid(3, 3, 2).float()
    low, high = -grid(5, 6, 4).abs() / 8, grid(6, 6, 4).abs() / 8
    ends = torch.zeros(3, dtype=torch.int64), torch.full((3,), 4)
    found = logits_bound(Logits(q, k, k_scale, weights, *ends), lambda _: Interval(low, high, ""))
    n, keys = 5, fractions(k)
    for i in range(3):
        for j in range(4):
            s, up, size = Fraction(float(k_scale[j])), Fraction(0), Fraction(0)
            for h, row in enumerate(fractions(q[i])):
                w = Fraction(float(weights[i, h]))
                x = sum(a * b for a, b in zip(row, keys[j], strict=True))
                ends_of = [
                    max(x + Fraction(float(t[2 * i + h, j])), Fraction(0)) - max(x, Fraction(0)) for t in (low, high)
                ]
                up += max(w * d for d in ends_of)
                size += abs(w) * (max(x, Fraction(0)) + max(-ends_of[0], ends_of[1]))
            rounding = s * n * U / (1 - n * U) * size
            assert (
                up * s + rounding
                <= Fraction(float(found.hi[i, j]))
                <= up * s + rounding * MORE + up / 2**45 + 2**9 * ETA
            )


@pytest.mark.parametrize("found", [1 - 2.0**-20, 1 + 2.0**-14])
def test_another_width_is_noticed(found: float) -> None:
    """The negative test."""
    with pytest.raises(AssertionError):
        assert_just(found, Fraction(1))
