"""A second derivation of the instruction models: one output element, Python integers and Fractions only.

Shares nothing with ``oracle.tensorcore.fused`` but the table of facts: exponents come from comparing Fractions with
powers of two, truncation from integer division, rounding from explicit quotients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from oracle.tensorcore.instructions import Instruction, Order, Sum

Number = Fraction


def two_to(e: int) -> Fraction:
    return Fraction(2) ** e


def exponent(x: Fraction, emin: int) -> int:
    """max(floor(log2|x|), emin) by counting."""
    e = emin
    while abs(x) >= two_to(e + 1):
        e += 1
    return e


def toward_zero(x: Fraction, quantum: Fraction) -> Fraction:
    steps = abs(x) // quantum
    return (steps if x >= 0 else -steps) * quantum


def down(x: Fraction, quantum: Fraction) -> Fraction:
    return (x // quantum) * quantum


def nearest_even(x: Fraction, quantum: Fraction) -> Fraction:
    steps = x // quantum
    rest = x / quantum - steps
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and steps % 2):
        steps += 1
    return steps * quantum


def rounded(x: Fraction, fraction_bits: int, emin: int, emax: int, *, nearest: bool) -> Fraction | float:
    quantum = two_to(exponent(x, emin) - fraction_bits)
    out = nearest_even(x, quantum) if nearest else toward_zero(x, quantum)
    if abs(out) >= two_to(emax + 1):
        return math.inf if out > 0 else -math.inf
    return out


def to_float32(x: Fraction) -> Fraction | float:
    return rounded(x, 23, -126, 127, nearest=True)


class Product:
    """One product: its value and the exponent that alignment sees (None for a zero)."""

    def __init__(self, a: float, b: float, emin_a: int, emin_b: int) -> None:
        self.value = Fraction(a) * Fraction(b)
        zero = self.value == 0
        self.e = None if zero else exponent(Fraction(a), emin_a) + exponent(Fraction(b), emin_b)


def aligned_sum(addends: Sequence[tuple[Fraction, int | None]], t: int, floor: int) -> tuple[Fraction, int]:
    """All addends truncated toward zero below the largest exponent; the sum, and that exponent."""
    m = max([e for _, e in addends if e is not None] + [floor])
    q = two_to(m - t)
    return sum((toward_zero(v, q) for v, _ in addends), Fraction(0)), m


def dot(inst: Instruction, products: Sequence[Product], c: Fraction, *, half: bool = False) -> Fraction | float:
    """``d = sum of products + c`` by the instruction, chained when the products are more than its ``k``."""
    value: Fraction | float = c
    for start in range(0, len(products), inst.k):
        if isinstance(value, float):
            return value
        value = _one(inst, products[start : start + inst.k], value, half)
    return value


def _one(inst: Instruction, products: Sequence[Product], c: Fraction, half: bool) -> Fraction | float:
    after = inst.sum is Sum.FUSED_THEN_ADD
    value: Fraction | float = Fraction(0) if after else c
    index = list(range(len(products)))
    if inst.order is Order.INTERLEAVED:
        index = [i for i in index if i % 4 < 2] + [i for i in index if i % 4 >= 2]
    for start in range(0, len(index), inst.group):
        if isinstance(value, float):
            return value
        members = [products[i] for i in index[start : start + inst.group]]
        value = _group(inst, members, value, half)
    if after and not isinstance(value, float):
        total = value + c
        return rounded(total, 10, -14, 15, nearest=True) if half else to_float32(total)
    return value


def _group(inst: Instruction, members: Sequence[Product], c: Fraction, half: bool) -> Fraction | float:
    if inst.sum is Sum.EXACT:
        return to_float32(sum((p.value for p in members), c))
    if inst.sum is Sum.TREE_FLUSH:
        return _tree(members, c)
    if inst.sum in (Sum.LATE_FLOOR, Sum.LATE_FLOOR_ODD_EVEN):
        return _late_floor(inst, members, c)
    c_exponent = None if c == 0 else exponent(c, -14 if half else -126)
    addends = [(p.value, p.e) for p in members] + [(c, c_exponent)]
    assert inst.align_bits is not None
    total, _ = aligned_sum(addends, inst.align_bits, -126)
    if half:
        return rounded(total, 10, -14, 15, nearest=True)
    return rounded(total, inst.out_bits, -126, 127, nearest=not inst.round_toward_zero)


def _flush(x: Fraction | float) -> Fraction | float:
    return Fraction(0) if not isinstance(x, float) and abs(x) < two_to(-126) else x


def _tree(members: Sequence[Product], c: Fraction) -> Fraction | float:
    layer: list[Fraction | float] = [_flush(p.value) for p in members]
    while len(layer) > 1:
        layer = [_flush(_add(layer[i], layer[i + 1])) for i in range(0, len(layer), 2)]
    return _flush(_add(_flush(c), layer[0]))


def _add(x: Fraction | float, y: Fraction | float) -> Fraction | float:
    if isinstance(x, float) or isinstance(y, float):
        return float(x) + float(y)
    return to_float32(x + y)


def _late_floor(inst: Instruction, members: Sequence[Product], c: Fraction) -> Fraction | float:
    t, wide = inst.align_bits, inst.wide_out_bits
    assert t is not None and wide is not None
    odd_even = inst.sum is Sum.LATE_FLOOR_ODD_EVEN
    parts = [members[0::2], members[1::2]] if odd_even else [members]
    sums = []
    for part in parts:
        live = [(p.value, p.e) for p in part]
        real = [e for _, e in live if e is not None]
        sums.append(aligned_sum(live, t, max(real) if real else -126))
    top = max(m for _, m in sums)
    total = sum((down(s, two_to(top - t)) for s, _ in sums), Fraction(0)) if odd_even else sums[0][0]
    c_exponent = exponent(c, -126)
    common = max(top, c_exponent)
    kept = down(c, two_to(common - t))
    if odd_even and c_exponent < common - 25:
        kept = Fraction(0)
    return to_float32(down(total, two_to(common - wide)) + kept)
