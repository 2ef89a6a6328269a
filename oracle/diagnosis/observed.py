"""What a failing output shows where no known fault explains it: which values its failing elements have, and where.

    values    NaN, infinities, zeros, one value, one unit in the last place, a constant ratio, nothing of the right ones
    places    rows or columns from one on, every second block of rows or columns
    K         only its last blocks

A sentence is said where it holds for every failing element, and for those alone. A ratio is constant when it varies by
no more than two roundings of the output and two of the right result make it vary: each quotient lies within ``2 u`` of
the ratio, to first order, and so within ``4 u`` of another one; ``u`` is half a unit in the last place over the value.

Failing elements that are NaN are said to be NaN; elsewhere NaN and infinities take no part. Source: derived here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from oracle.diagnosis.candidates import correlates
from oracle.diagnosis.least_squares import Factors
from oracle.numbers.formats import codes_of, decode, of_dtype

SEVERAL = 4  # elements that a ratio must hold for
MANY = 64  # elements below which nothing is said of a correlation
BLOCKS = (256, 128, 64, 32, 16, 8, 4, 2, 1)


def observed(output: Tensor, right: Tensor, bad: Tensor, *, near: bool = False) -> list[str]:
    """Sentences about the elements ``bad`` (bool) of ``output``, compared with ``right``, of one shape ``[..., N]``; of
    tensors of integers, or of two dtypes, only where they lie. ``near``: ``right`` may itself be some units in the last
    place off. NaN as the head of this file says; source: derived there."""
    if not bool(bad.any()):
        return []
    output, right, bad = (x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1) for x in (output, right, bad))
    numbers = output.is_floating_point() and output.dtype == right.dtype
    return [*(_values(output, right, bad, near=near) if numbers else ()), *_places(bad)]


def tail_of_k(factors: Sequence[Factors]) -> list[str]:
    """That only the last blocks of K, at most half of them, enter with a wrong weight; of the factors ``[M, B]`` of
    each tile of columns, NaN where unknown. Source: derived in :mod:`oracle.diagnosis.least_squares`."""
    if not factors:
        return []
    wrong = torch.stack([used.wrong().any(dim=0) for used in factors]).any(dim=0)
    at = torch.nonzero(wrong)[:, 0].tolist()
    if not at or at[0] == 0 or at != list(range(at[0], len(wrong))) or 2 * len(at) > len(wrong):
        return []
    return [f"only the tail of K is wrong, from k = {at[0] * factors[0].block} on"]


def _values(output: Tensor, right: Tensor, bad: Tensor, *, near: bool) -> Iterator[str]:
    y, due = decode(output)[bad], decode(right)[bad]
    if bool(torch.isnan(y).all()):
        yield "every failing element is NaN"
        return
    if bool(torch.isinf(y).all()):
        yield "every failing element is infinite"
        return
    if len(y) > 1 and bool((y == y[0]).all()):
        yield f"every failing element is {float(y[0]):.9g}"
        return
    if not near and bool(torch.isfinite(y).all() and torch.isfinite(due).all()):
        steps = (_rank(output)[bad] - _rank(right)[bad]).abs()
        if int(steps.max()) <= 1:
            yield "every failing element is one unit in the last place off"
            return
    if (ratio := _ratio(y, due, 0.5 * 2.0 ** -of_dtype(output.dtype).fraction_bits)) is not None:
        yield f"every failing element is {ratio:.4g} times the right result"
    elif int((torch.isfinite(y) & torch.isfinite(due)).sum()) >= MANY and not correlates(output, right, bad):
        yield "the failing elements do not correlate with the right results: other operands, or old memory"


def _rank(x: Tensor) -> Tensor:
    """Floating-point ``x`` as int64 in the order of its values, one unit in the last place apart; both zeros are 0."""
    bits = 8 * x.dtype.itemsize
    raw = codes_of(x).to(torch.int64) & ((1 << bits) - 1)
    magnitude = raw & ((1 << bits - 1) - 1)
    return torch.where(raw >> bits - 1 == 1, -magnitude, magnitude)


def _ratio(y: Tensor, due: Tensor, u: float) -> float | None:
    """By what all of the right values ``due`` are multiplied; None where no one number does, or it may be 1."""
    some = due != 0
    if int(some.sum()) < SEVERAL or not bool((y[~some] == 0).all()):
        return None
    quotient = y[some] / due[some]
    middle = float(quotient.median())
    alike = middle != 0 and abs(middle - 1) > 4 * u and bool((due[some] != due[some][0]).any())
    return middle if alike and bool(((quotient / middle - 1).abs() <= 4 * u / (1 - 4 * u)).all()) else None


def _places(bad: Tensor) -> Iterator[str]:
    for name, lines in (("row", bad.any(dim=1)), ("column", bad.any(dim=0))):
        at = torch.nonzero(lines)[:, 0]
        first, count = int(at[0]), len(lines)
        if first > 0 and len(at) == count - first and len(at) > 1:
            yield f"{name}s from {first:,} on"
            continue
        for size in BLOCKS:
            block = torch.arange(count, device=lines.device) // size
            failing = torch.unique(block[lines])
            every_second = torch.arange(int(failing[0]), int(block[-1]) + 1, 2, device=lines.device)
            if int(failing[0]) < 2 and len(failing) > 1 and torch.equal(failing, every_second):
                what = f"block of {size} {name}s" if size > 1 else name
                yield f"every second {what}, the first at {name} {int(failing[0]) * size}"
                break
