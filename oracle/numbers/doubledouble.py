"""Error-free transformations in float64: a sum or product as an unevaluated pair.

``two_sum`` (Knuth) and ``two_prod`` (Dekker, with Veltkamp's splitting) return ``(s, e)`` with ``s + e`` equal to
the exact result when nothing overflows or underflows; both use only additions and multiplications that every
device rounds identically, never a fused one. Source: Muller et al., Handbook of Floating-Point Arithmetic,
2nd ed., 4.3 and 4.4. Not covered: infinities and NaN (the error term is NaN there; callers overlay them).
"""

from __future__ import annotations

from torch import Tensor

SPLITTER = 2.0**27 + 1.0  # Veltkamp's constant for p = 53: 2**ceil(53/2) + 1


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``a + b`` exactly, as ``(rounded, error)``; any magnitudes."""
    s = a + b
    v = s - a
    return s, (a - (s - v)) + (b - v)


def fast_two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``a + b`` exactly when ``|a| >= |b|`` or ``a == 0``."""
    s = a + b
    return s, b - (s - a)


def two_prod(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``a * b`` exactly, as ``(rounded, error)``, for ``|a|, |b| < 2**996`` and no underflow of the error."""
    p = a * b
    ah, al = _split(a)
    bh, bl = _split(b)
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def _split(a: Tensor) -> tuple[Tensor, Tensor]:
    c = a * SPLITTER
    high = c - (c - a)
    return high, a - high
