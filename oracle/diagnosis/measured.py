"""Names that a failing output itself gives, where no fault of the catalogue and no other call explains it.

    ended      from some index of an axis on nothing is written: all of it is 0, old memory, or an input as it is
    order      an axis whose indices are mistaken for others; failing rows or columns that are the right ones of others
    rounded    values of a narrower format; every wrong one a unit in the last place nearer to zero, or farther from it
    factor     the right result times one number, everywhere
    padding    one value wherever 0 is due and something else stands

A name is a statement about every failing element that no other element contradicts. An end is named only where every
element behind it is in that state, where none before it fails, and where chance would seldom put what fails there
(:mod:`oracle.diagnosis.observed`). A side is named where ``CERTAIN`` elements have it and no fewer than one of
:data:`SYSTEMATIC` elements fails: what ties alone bring, as a reciprocal does, is rarer. A factor is named where all
elements but zeros fail.

NaN, infinities and zeros are compared by their bits, but in a ratio, where they take no part. Source: derived here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from oracle.diagnosis.observed import (
    CERTAIN,
    at_one_side,
    by_chance,
    constant_ratio,
    cuts,
    made_nan,
    moved_lines,
    narrower,
    other_index,
    rank,
    times_right,
)
from oracle.numbers.formats import decode, of_dtype
from oracle.routines.base import FP8
from oracle.verdict.sets import Bounds, bits_of

SYSTEMATIC = 16


def measured(
    output: Tensor,
    right: Tensor,
    bad: Tensor,
    *,
    held: Sequence[tuple[str, Tensor]] = (),
    bounds: Bounds | None = None,
    near: bool = False,
    paged: bool = False,
) -> Iterator[str]:
    """What the elements ``bad`` (bool) of ``output`` are, compared with ``right``, all of one shape; the first that is
    said is the most specific.

    ``held``: what the memory held before, and inputs that the output may be a copy of, of its shape and dtype, each
    with what is said of it.
    ``bounds``: what is admitted, where that is more than ``right``; ``near``: that it is more. ``paged``: the first
    axis holds pages or slots, whose order says nothing. NaN as the head of this file says; source: derived there."""
    if not bool(bad.any()):
        return
    for text, state in _states(output, held):
        yield from (f"{where} {text}" for where in _ended(state, bad, paged=paged))
    if output.dtype != right.dtype:
        return
    if not near and output.dim():
        yield from moved_lines(*(x.reshape(-1, x.shape[-1]) for x in (output, right, bad)))
    yield from (text for text in other_index(output, right, bad, near=near) if not text.startswith("in the"))
    if not output.is_floating_point():
        return
    y, due = output[bad], right[bad]
    if output.dtype is torch.float32 and (narrow := narrower(y, due, near=near)) is not None:
        yield narrow
    yield from _sided(output, right, bad, bounds)
    value, wanted = decode(output), decode(right)
    if bool((wanted[bad] == 0).all()) and len(y) >= CERTAIN and bool((y == y[0]).all()):
        yield f"{float(decode(y[:1])):.9g} where 0 is due"
    whole = bool((bad | (wanted == 0) & (value == 0)).all())
    step = 0.5 * 2.0 ** -of_dtype(output.dtype).fraction_bits
    if whole and (factor := constant_ratio(value[bad], wanted[bad], step)) is not None:
        yield times_right(factor, f"{factor:.4g}")


def _states(output: Tensor, held: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    value = decode(output) if output.dtype in FP8 else output
    idle = (value == 0) | torch.isnan(value) & ~made_nan(output)
    yield "not written", idle
    for text, x in held:
        yield text, bits_of(output) == bits_of(x)


def _ended(state: Tensor, bad: Tensor, *, paged: bool) -> Iterator[str]:
    """From which index of an axis on everything is in this ``state`` (bool), where all that fails lies there."""
    if not bool(state[bad].all()):
        return
    for axis in reversed(range(int(paged), bad.dim())):
        n = bad.shape[axis]
        first = int(torch.nonzero(bad.movedim(axis, 0).reshape(n, -1).any(dim=1))[0, 0])
        other = torch.nonzero(~state.movedim(axis, 0).reshape(n, -1).all(dim=1))[:, 0]
        since = int(other[-1]) + 1 if len(other) else 0  # all of it is, from here on
        if not 0 < since <= first or by_chance(int(bad.sum()), n - since, n):
            continue
        begin = next((cut for cut in cuts(n) if since <= cut <= first), first)
        yield f"from index {begin} on" + (f" along axis {axis}" if bad.dim() > 1 else "")
        return


def _sided(output: Tensor, right: Tensor, bad: Tensor, bounds: Bounds | None) -> Iterator[str]:
    """That all failing elements lie one unit in the last place at one side of what is admitted."""
    if int(bad.sum()) * SYSTEMATIC < bad.numel() or int(bad.sum()) < CERTAIN:
        return
    due = right
    if bounds is not None and bounds.low.shape == right.shape:
        low, high = (end.to(right.dtype) for end in (bounds.low, bounds.high))
        due = torch.where(decode(output) < bounds.low, low, high)
    y, wanted = output[bad], due[bad]
    if not bool(torch.isfinite(decode(y)).all() and torch.isfinite(decode(wanted)).all()):
        return
    if int((rank(y) - rank(wanted)).abs().max()) == 1 and (side := at_one_side(decode(y), decode(wanted))):
        rounding = "toward zero" if side == "nearer to" else "away from zero"
        yield f"one unit in the last place {side} zero (as what is rounded {rounding})"
