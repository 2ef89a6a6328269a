"""What a failing output shows where no known fault explains it: which values its failing elements have, and where.

    values    NaN, infinities, zeros, one value, one unit in the last place (towards zero, away from it, away at even
              ones), the right result rounded to 16 bits, 16-bit values, a constant ratio, nothing of the right ones
    places    rows or columns from one on, every second or n-th block of rows or columns
    moved     rows or columns that are the right ones of others; an axis whose indices are mistaken for others
    K         only its last blocks

A sentence is said where it holds for every failing element, and for those alone; a place only where chance would seldom
put as many failing elements into as few of its rows or columns; of a coin's two sides (nearer to zero,
an even result, 16 bits that are 0) only where ``CERTAIN`` elements show the same. A ratio is constant when it varies by
no more than two roundings of the output and two of the right result make it vary: each quotient lies within ``2 u`` of
the ratio, to first order, and so within ``4 u`` of another one; ``u`` is half a unit in the last place over the value.

Failing elements that are NaN are said to be NaN; elsewhere NaN and infinities take no part. Source: derived here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from oracle.diagnosis.candidates import correlates
from oracle.diagnosis.least_squares import Factors
from oracle.numbers.formats import codes_of, decode, of_dtype
from oracle.verdict.sets import bits_of

BY_CHANCE = 1 / 80  # of the outputs that fail by none of the candidates, the share of which one may be named
SEVERAL = 4  # elements that a ratio must hold for
MANY = 64  # elements below which nothing is said of a correlation
CERTAIN = 24  # elements that all show one of two equally likely sides once in 10 million draws
FEW = 16  # failing elements that are looked at first
LOOKED_AT = 1 << 22  # elements of an output up to which moved rows and columns are looked for
UNLIKE = "the failing elements do not correlate with the right results"
CLOSE = 2.0**-7  # of a value: no two of several right results that differ are all as near
CUTS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)  # steps at which a loop or a tile may end
BLOCKS = (256, 128, 64, 32, 16, 8, 4, 2, 1)


def needed(tried: int) -> float:
    """The bits of evidence at which one of so many candidates has them by chance in :data:`BY_CHANCE` of the outputs:
    one that knows nothing of the output reproduces ``b`` bits with the probability ``2**-b``, all of them together
    ``tried * 2**-b`` at most. Source: derived here."""
    return math.log2(max(1, tried) / BY_CHANCE)


def observed(output: Tensor, right: Tensor, bad: Tensor, *, near: bool = False, paged: bool = False) -> list[str]:
    """Sentences about the elements ``bad`` (bool) of ``output``, compared with ``right``, of one shape ``[..., N]``; of
    tensors of integers, or of two dtypes, only where they lie. ``near``: ``right`` may itself be some units in the last
    place off. ``paged``: the first axis holds pages or slots, whose order says nothing. NaN as the head of this file
    says; source: derived there."""
    if not bool(bad.any()):
        return []
    elsewhere = list(other_index(output, right, bad, near=near)) if output.dtype == right.dtype else []
    axes = list(_axes(bad, paged=paged))
    output, right, bad = (x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1) for x in (output, right, bad))
    moved = list(moved_lines(output, right, bad)) if not near and output.dtype == right.dtype else []
    numbers = output.is_floating_point() and output.dtype == right.dtype
    values = list(_values(output, right, bad, near=near) if numbers else _integers(output, bad))
    if elsewhere or moved:
        values = [text for text in values if not text.startswith(UNLIKE)]
    return [*values, *elsewhere, *_places(bad, paged=paged), *axes, *moved]


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
        steps = (rank(output)[bad] - rank(right)[bad]).abs()
        if int(steps.max()) <= 1:
            yield "every failing element is one unit in the last place off"
            yield from _side(y, due, rank(right)[bad])
            return
    if output.dtype == torch.float32 and (text := narrower(output[bad], right[bad], near=near)) is not None:
        yield text
        return
    if (ratio := constant_ratio(y, due, 0.5 * 2.0 ** -of_dtype(output.dtype).fraction_bits)) is not None:
        yield times_right(ratio, f"{ratio:.4g}")
    elif int((torch.isfinite(y) & torch.isfinite(due)).sum()) >= MANY and not correlates(output, right, bad):
        yield f"{UNLIKE}: other operands, or old memory"


def times_right(ratio: float, said: str) -> str:
    """The sentence of a constant ratio, ``said`` in digits; a power of two other than 1 is named."""
    mantissa, exponent = math.frexp(abs(ratio))
    power = f" (2^{exponent - 1})" if mantissa == 0.5 and exponent != 1 else ""
    return f"every failing element is {said} times the right result{power}"


def _side(y: Tensor, due: Tensor, ranks: Tensor) -> Iterator[str]:
    """To which side elements lie that are one unit in the last place off, ``ranks`` those of the right results."""
    if len(y) < CERTAIN or not bool((due != 0).all()):
        return
    if where := at_one_side(y, due):
        even = "; where each right result is even, as at ties" if bool((ranks % 2 == 0).all()) else ""
        yield f"every failing element is {where} zero than the right result{even}"


def at_one_side(y: Tensor, due: Tensor) -> str:
    """At which side of the right values ``due`` all of the values ``y`` lie, float64 of one shape (any): "nearer to"
    zero or "farther from" it; nothing where some lie at each, or where one is NaN. Source: derived here."""
    nearer, farther = y.abs() < due.abs(), y.abs() > due.abs()
    return "nearer to" if bool(nearer.all()) else "farther from" if bool(farther.all()) else ""


def narrower(y: Tensor, due: Tensor, *, near: bool) -> str | None:
    """That float32 elements ``y`` ``[E]`` are values of 16 bits, of which the right ones ``due`` ``[E]`` are none.

    Zeros, which every format has, and what is no number (NaN, infinities) tell nothing. ``near`` as :func:`observed`
    has it. Source: derived here."""
    if not bool(torch.isfinite(y).all() and torch.isfinite(due).all()) or int((y != 0).sum()) < CERTAIN:
        return None
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        rounded = due.to(dtype).to(due.dtype)
        if bool((y == y.to(dtype).to(y.dtype)).all()) and int((due != rounded).sum()) >= CERTAIN:
            exact = not near and bool((y == rounded).all())
            return f"every failing element is {'the right result rounded to ' if exact else 'a value of '}{name}"
    return None


def rank(x: Tensor) -> Tensor:
    """Floating-point ``x`` (any shape) as int64 in the order of its values, one unit in the last place apart; both
    zeros are 0, NaN lies behind infinity. Source: IEEE 754-2019, 5.10."""
    bits = 8 * x.dtype.itemsize
    raw = codes_of(x).to(torch.int64) & ((1 << bits) - 1)
    magnitude = raw & ((1 << bits - 1) - 1)
    return torch.where(raw >> bits - 1 == 1, -magnitude, magnitude)


def constant_ratio(y: Tensor, due: Tensor, u: float) -> float | None:
    """By what all of the right values ``due`` (float64 ``[E]``) are multiplied in ``y`` (``[E]``), rounded by ``u``.

    None where no one number does, or it may be 1. NaN and infinities have no ratio. Source: derived in the head of this
    file."""
    some = due != 0
    if int(some.sum()) < SEVERAL or not bool((y[~some] == 0).all()):
        return None
    quotient = y[some] / due[some]
    middle = float(quotient.median())
    alike = middle != 0 and abs(middle - 1) > 4 * u and bool((due[some] != due[some][0]).any())
    return middle if alike and bool(((quotient / middle - 1).abs() <= 4 * u / (1 - 4 * u)).all()) else None


def by_chance(failing: int, lines: int, of: int) -> bool:
    """Whether so many elements, each wherever chance puts it, may well lie in ``lines`` given ones ``of`` so many: as
    many sets of lines are looked for as there are first or last ones."""
    return failing * math.log2(of / lines) < needed(of)


def _places(bad: Tensor, *, paged: bool) -> Iterator[str]:
    for name, lines in (("row", bad.any(dim=1)), ("column", bad.any(dim=0))):
        at = torch.nonzero(lines)[:, 0]
        first, count = int(at[0]), len(lines)
        if (paged and name == "row") or by_chance(int(bad.sum()), len(at), count):
            continue
        if first > 0 and len(at) == count - first and len(at) > 1:
            yield f"{name}s from {first:,} on"
            continue
        for size in BLOCKS:
            block = torch.arange(count, device=lines.device) // size
            failing = torch.unique(block[lines])
            step = int(failing[1] - failing[0]) if len(failing) > 1 else 0
            every = torch.arange(int(failing[0]), int(block[-1]) + 1, max(1, step), device=lines.device)
            regular = step > 1 and int(failing[0]) < step and torch.equal(failing, every)
            if regular and len(failing) > (1 if step == 2 else 2) and torch.equal(lines, torch.isin(block, failing)):
                what = f"block of {size} {name}s" if size > 1 else name
                yield f"every {_ordinal(step)} {what}, the first at {name} {int(failing[0]) * size}"
                break


def _axes(bad: Tensor, *, paged: bool) -> Iterator[str]:
    """Of a tensor of more than two axes, from which index on of the others it fails, where it fails to the end."""
    for axis in range(int(paged), bad.dim() - 1) if bad.dim() > 2 else ():
        at = torch.nonzero(bad.transpose(0, axis).flatten(1).any(dim=1))[:, 0].tolist()
        if by_chance(int(bad.sum()), len(at), bad.shape[axis]):
            continue
        if at[0] > 0 and at == list(range(at[0], bad.shape[axis])):
            yield f"from index {at[0]} on along axis {axis}"


def _integers(output: Tensor, bad: Tensor) -> Iterator[str]:
    """That failing integers, or codes of another dtype than is due, are all the same."""
    if output.is_floating_point():
        return
    values = output[bad]
    if len(values) > 1 and bool((values == values[0]).all()):
        yield f"every failing element is {int(values[0])}"


def picks(n: int) -> Iterator[tuple[str, Tensor]]:
    """How the ``n`` indices of an axis are mistaken for others: what is said, and int64 ``[n]``. Source: derived here,
    from loops and tables that end early."""
    at = torch.arange(n, device="cpu")
    if n > 1:
        yield "taken to be its first", at * 0
        yield "taken once for two neighbours", at // 2 * 2
        yield "taken from the next index", (at + 1).clamp(max=n - 1)
        yield "taken from the index before", (at - 1).clamp(min=0)
        yield "taken backwards", n - 1 - at
    if n > 2:
        yield "of the last index taken from the one before", at.clamp(max=n - 2)
        yield "taken for groups twice as long", at // 2
        yield "taken for groups four times as long", at // 4


def late_picks(n: int, more: Sequence[int] = ()) -> Iterator[tuple[str, Tensor]]:
    """As :func:`picks`, int64 ``[n]``, where the indices are mistaken from some one on alone, the usual ones or one of
    ``more``; they have no NaN. Source: derived here, from loops that end early."""
    at = torch.arange(n, device="cpu")
    for cut in (*(cut for cut in more if cut < n), *cuts(n)):
        yield f"from index {cut} on taken from index 0 on", at % cut
        yield f"from index {cut} on taken to be the last before", at.clamp(max=cut - 1)
        yield f"from index {cut} on taken to be its first", torch.where(at >= cut, 0, at)
        yield f"from index {cut} on taken from the index before", at - (at >= cut).long()


def cuts(n: int) -> list[int]:
    """Where a loop over ``n`` indices may end early: at a whole number of steps, or at its last whole one; the largest
    first, which says least where several explain the same."""
    return sorted({c for size in CUTS for c in (size, n // size * size) if 0 < c < n}, reverse=True)


def picked(x: Tensor, axis: int, at: Tensor) -> Tensor:
    """``x``, of any shape and dtype, with other indices ``at`` (int64 ``[n]``) along an axis; NaN is moved as any
    value is. Source: derived here."""
    at = at.to(x.device)
    if x.element_size() > 1:
        return x.index_select(axis, at)
    return x.view(torch.uint8).index_select(axis, at).view(x.dtype)


def made_nan(x: Tensor) -> Tensor:
    """Elements that are a NaN as arithmetic gives it, whose fraction is its first bit alone or all ones, bool in the
    shape of ``x``; none of FP8, whose few codes of NaN tell nothing. Poison and old memory hold others. Source: IEEE
    754-2019, 6.2.1; the PTX ISA, cvt."""
    if not x.is_floating_point() or x.element_size() == 1:
        return torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    bits = of_dtype(x.dtype).fraction_bits if x.dtype != torch.float64 else 52
    fraction = bits_of(x).to(torch.int64) & ((1 << bits) - 1)
    return torch.isnan(x) & ((fraction == 1 << (bits - 1)) | (fraction == (1 << bits) - 1))


def other_index(output: Tensor, right: Tensor, bad: Tensor, *, near: bool) -> Iterator[str]:
    """Which other index of an axis all elements ``bad`` (bool) of ``output`` are the ``right`` results of, of one
    shape; ``near`` as :func:`observed` has it. NaN and infinities count as their bits. Source: derived here."""
    if output.numel() > LOOKED_AT:
        return
    varied = _differs(bits_of(output)[bad])
    result = decode(output) if near and output.is_floating_point() else bits_of(output)
    due = decode(right) if near and output.is_floating_point() else bits_of(right)
    loose, few = None, torch.nonzero(bad)[:: max(1, int(bad.sum()) // FEW)].unbind(dim=1)
    for axis in range(output.dim()):
        for text, at in (*picks(output.shape[axis]), *late_picks(output.shape[axis], (2,))):
            source = (*few[:axis], at.to(few[axis].device)[few[axis]], *few[axis + 1 :])
            if not bool(_as_good_as(result[few], due[source]).all()):
                continue
            same = _as_good_as(result, picked(due, axis, at))
            moved = picked(bits_of(right), axis, at) != bits_of(right)
            if not bool((moved & same)[bad].all()) or not (varied or _only_there(right, bad, axis, at)):
                continue
            sentence = f"{text} along axis {axis}" if output.dim() > 1 else text
            if near or bool(same[moved].all()):
                yield sentence
                return
            loose = loose or sentence
    if loose is not None and int(bad.sum()) >= CERTAIN:
        yield f"in the failing elements alone {loose}"


def _as_good_as(actual: Tensor, wanted: Tensor) -> Tensor:
    """Elements of ``actual`` that are ``wanted``: equal integers, or numbers about as large."""
    same = actual == wanted
    if actual.is_floating_point():
        same |= torch.isfinite(wanted) & ((actual - wanted).abs() <= CLOSE * wanted.abs())
    return same


def _only_there(right: Tensor, bad: Tensor, axis: int, at: Tensor) -> bool:
    """Whether the values that several failing elements would have from other indices of an axis are wide ones, not 0,
    that the right output has at those places alone."""
    if right.element_size() < 4 or int(bad.sum()) < SEVERAL or not bool(picked(right, axis, at)[bad].all()):
        return False
    bits, place = bits_of(right), torch.arange(right.numel(), device=right.device).reshape(right.shape)
    source = picked(place, axis, at)
    sources = torch.unique(source[bad])
    elsewhere = ~torch.isin(source, sources) & ~torch.isin(place, sources)
    return not bool(torch.isin(bits[elsewhere], bits.flatten()[sources]).any())


def _differs(bits: Tensor) -> bool:
    """Whether several elements hold more than two different values, by their bits."""
    return len(bits) >= SEVERAL and len(torch.unique(bits)) > 2


def _ordinal(n: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"} if n // 10 % 10 != 1 else {}
    return {2: "second", 3: "third", 4: "fourth"}.get(n, f"{n}{ends.get(n % 10, 'th')}")


def moved_lines(output: Tensor, right: Tensor, bad: Tensor) -> Iterator[str]:
    """That every row, or column, of ``output`` ``[R, N]`` that is ``bad`` (bool) has the bits of another one of
    ``right`` ``[R, N]``; of several failing ones, each of several values, where no two right ones are alike.

    NaN is compared by its bits. Source: derived here."""
    if output.numel() > LOOKED_AT:
        return
    for name, result, due, lines in (
        ("row", output, right, bad.any(dim=1)),
        ("column", output.T, right.T, bad.any(dim=0)),
    ):
        at = torch.nonzero(lines)[:, 0].tolist()
        if len(at) < 2 or result.shape[1] < 2:
            continue
        place = {_bits(line): i for i, line in enumerate(due)}
        if _bits(result[at[0]]) not in place:
            continue
        moves = [(i, place.get(_bits(result[i]))) for i in at]
        if len(place) < len(due) or any(j is None for _, j in moves):
            continue
        steps = {i - j for i, j in moves if j is not None}
        by = (
            f", {abs(step)} {'before' if step > 0 else 'behind'} it" if len(steps) == 1 and (step := min(steps)) else ""
        )
        yield f"every failing {name} is the right one of another {name}{by}"


def _bits(line: Tensor) -> bytes:
    return bytes(bits_of(line.contiguous()).cpu().numpy().tobytes())
