"""A quotient by a scale that many values share gives the E4M3 code of the float32 quotient: a proof by enumeration.

Significands ``a in [1, 4)``, ``b in [1, 2)``, ``a/b in [1, 2)`` of 24 bits. ``y = RN(1/b)`` errs by 2^-25 at most,
``near = RN(a y)`` so by ``2^-24 + a 2^-25 < 3 * 2^-24``, and ``near - (near b - a) y`` before its last rounding by
``3 * 2^-24 * b * 2^-25`` plus what rounding the bracket adds (2^-24 of ``3 * 2^-24 * b``): below ``2^-45`` in all. The
code changes at values ``t`` of at most 5 bits, so it can differ only where ``a/b`` lies within 2^-45 of the middle
``m`` between ``t`` and a float32 neighbour: ``|a - b m| < 2^-44``. In units of 2^-48 that is
``|A 2^25 - (T 2^21 +- h) B| < 16``, ``h`` 2 or (below a power of two) 1: ``B`` lies within 16 of a multiple of 2^20.
All such pairs are few and tried here.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest

BITS = 24
Step = tuple[int, int, Fraction]


def rn(x: Fraction) -> Fraction:
    """To nearest even in 24 bits, no limit to exponents."""
    if not x:
        return x
    size, exponent = abs(x), 0
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    unit = Fraction(2) ** (exponent - BITS + 1)
    return round(x / unit) * unit


def near(a: Fraction, b: Fraction) -> Fraction:
    return rn(a * rn(1 / b))


def shared(a: Fraction, b: Fraction) -> Fraction:
    """As ``_shared_quotient`` computes it."""
    first, y = near(a, b), rn(1 / b)
    return rn(first - rn(first * b - a) * y)


def pairs() -> Iterator[tuple[Fraction, Fraction, Fraction]]:
    """Every ``(a, b, t)`` whose quotient lies so near to a float32 neighbour's middle of a code's boundary ``t``."""
    for multiple in range(8, 17):
        for b in range((multiple << 20) - 16, (multiple << 20) + 17):
            if 1 << 23 <= b < 1 << 24:
                for t in range(16, 33):
                    for h in (2, -2 if t & (t - 1) else -1):
                        middle = ((t << 21) + h) * b  # in units of 2^-48
                        for step in (25, 26):  # of a below 2, and from 2 on
                            a = (middle + (1 << step - 1)) >> step
                            if abs((a << step) - middle) < 16:
                                yield Fraction(a << step - 25, 1 << 23), Fraction(b, 1 << 23), Fraction(t, 16)


def side(x: Fraction, t: Fraction) -> int:
    return (x > t) - (x < t)


def wrong(quotient: object) -> int:
    return sum(side(quotient(a, b), t) != side(rn(a / b), t) for a, b, t in pairs())  # type: ignore[operator]


def test_every_close_quotient_has_the_code_of_the_division() -> None:
    found = list(pairs())
    assert len(found) > 100 and any(b.denominator > 1 for _, b, _ in found)
    assert wrong(shared) == 0


def test_ties_stay_ties() -> None:
    """A quotient that is ``t`` itself: the product with the inverse alone misses some (the negative test)."""
    exact = [
        (Fraction(b * t, 16 << 10), Fraction(b, 1 << 10), Fraction(t, 16))
        for b in range(1 << 10, 1 << 11, 7)
        for t in range(17, 32, 2)
    ]
    assert all(shared(a, b) == t for a, b, t in exact)
    assert any(near(a, b) != t for a, b, t in exact)


@pytest.mark.parametrize("x, due", [(Fraction(1) + Fraction(1, 1 << 24), 1), (Fraction(3), 3)])
def test_rounding_is_to_even(x: Fraction, due: int) -> None:
    assert rn(x) == due
