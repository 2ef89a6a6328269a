"""The verdict on a quantiser's output: which of its scales and codes are inadmissible, and what explains
them.

Each declared recipe is tried; the one that the output follows best is the one it is judged by, as a whole:
a kernel may not take its NaN policy from one library and its floor from another. Knows no tolerance
(:mod:`oracle.bounds.quantiser` holds the sets) and no contract.

NaN codes and scales are compared as the recipe's sets say, any NaN for a NaN.
Source: derived in :mod:`oracle.bounds.quantiser`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oracle.bounds import quantiser
from oracle.errors import InputError
from oracle.numbers.formats import codes_of, decode
from oracle.numbers.quantize import Prepared
from oracle.numbers.recipe_table import recipes
from oracle.numbers.recipes import Recipe
from oracle.verdict.compare import Admissible, Error, Status, Tried, Verdict, Worst
from oracle.verdict.heatmap import Evidence, Piece, gather, gather_pieces, ratio_of
from oracle.verdict.loss import Loss, Tally
from oracle.verdict.pattern import describe


def judge_quantised(x: Prepared, q: Tensor, scale: Tensor, declared: Sequence[Recipe]) -> Verdict:
    """The verdict on codes ``q`` ``[..., K]`` and logical ``scale`` ``[..., G]`` (dtypes of the recipe) against the
    first of ``declared`` that admits them.

    ``matches`` names a recipe that gives the same bits: the declared one, or any other in the registry.
    ``explained_by`` of a failure names every recipe, faulty or not, that reproduces the output bit for bit; ``tried``
    has each of ``declared`` and how near the output came to it.
    """
    judged = []
    for recipe in declared:
        judged.append(quantiser.judge_recipe(x, q, scale, recipe))
        if judged[-1].exact:
            break
    best = min(judged, key=lambda j: (not j.exact, j.outside))
    total = q.numel() + scale.numel()
    if best.outside and not best.exact:
        return _failed(x, q, scale, judged, best, total)
    if best.exact:
        matches: str | None = best.recipe.name
        note = f"all {q.numel()} codes and {scale.numel()} scales equal the bits of {matches}"
        worst, margin = None, 0.0
    else:
        matches = next(iter(quantiser.identify(x, q, scale, among=quantiser.kin(best.recipe))), None)
        worst, margin = _worst(x, q, scale, best)
        note = f"all {q.numel()} codes and {scale.numel()} scales admissible ({_basis(best)})"
        note += f", worst margin {margin:.3g}" if matches is None else f"; bits of {matches}"
    mistrust = quantiser.why_mistrust(decode(scale), x.amax(best.recipe) == 0)
    status = Status.PASSED if mistrust is None else Status.MISTRUSTED
    if mistrust is not None:
        note += f"; but this proves little: {mistrust}"
    error, loss = deferred(x, q, scale, best.recipe)
    return Verdict(
        status,
        note,
        0,
        total,
        worst,
        matches,
        (),
        _basis(best),
        "",
        margin,
        0,
        mistrust,
        error=error,
        loss=loss,
    )


def _failed(
    x: Prepared, q: Tensor, scale: Tensor, judged: Sequence[quantiser.Judged], best: quantiser.Judged, total: int
) -> Verdict:
    scales, codes = int(best.bad_scales.sum()), int(best.bad_codes.sum())
    worst, margin = _worst(x, q, scale, best)
    where = "; ".join(
        f"{name}: {describe(bad)}" for name, bad in (("scale", best.bad_scales), ("q", best.bad_codes)) if bad.any()
    )
    what = f"{scales} of {scale.numel()} scales and {codes} of {q.numel()} codes"
    if scales == 0:
        what = f"{codes} of {q.numel()} codes (every scale is right)"
    elif codes == 0:
        what = f"{scales} of {scale.numel()} scales (the codes are right for the scales published)"
    explained = quantiser.identify(x, q, scale, among=quantiser.kin(best.recipe))
    summary = (
        f"{what} inadmissible ({_basis(best)}); worst {worst.output}{list(worst.index)}: actual {worst.actual:.9g}, "
        f"admissible [{worst.low:.9g}, {worst.high:.9g}]; {where}"
    )
    sound = tuple(name for name in explained if recipes()[name].fault is None)
    if explained:
        summary += f"; every bit is that of {', '.join(explained)}"
    row = int(best.bad_codes.reshape(-1, q.shape[-1]).any(dim=-1).to(torch.uint8).argmax()) if codes else 0
    if not explained and (sound := quantiser.admitting(x, q, scale, best.recipe, row=row)):
        admit = "admits" if len(sound) == 1 else "admit"
        summary += f"; {', '.join(sound)} {admit} every code and scale"
    if sound:
        summary += f": to judge by that recipe declare it (--recipe {sound[0]}, numerics={sound[0]!r})"
    error, loss = deferred(x, q, scale, best.recipe)
    return Verdict(
        Status.FAILED,
        summary,
        scales + codes,
        total,
        worst,
        None,
        explained,
        _basis(best),
        where,
        margin,
        evidence=_evidence(x, q, scale, best),
        error=error,
        loss=loss,
        tried=_tried(x, q, scale, judged),
    )


def _tried(x: Prepared, q: Tensor, scale: Tensor, judged: Sequence[quantiser.Judged]) -> tuple[Tried, ...]:
    """How near the output came to each declared recipe, the fewest refused elements first."""
    results = []
    for each in judged:
        equal_codes, equal_scales, farthest = quantiser.nearness(x, q, scale, each.recipe)
        counts = equal_codes, q.numel(), equal_scales, scale.numel(), farthest, each.outside
        results.append(Tried(each.recipe.name, *counts))
    return tuple(sorted(results, key=lambda t: (t.refused, -t.equal_codes, -t.equal_scales)))


def deferred(x: Prepared, q: Tensor, scale: Tensor, recipe: Recipe) -> tuple[Any, Any]:
    """What gives the error and the loss of :func:`measured` when either is asked for, of codes ``q`` ``[..., K]`` and
    logical ``scale`` ``[..., G]`` (dtypes of the recipe) as they were judged.

    Reading them raises InputError: torch has changed one of the tensors since. A change that torch does not see is not
    noticed.
    """
    tensors = (("x", x.x), ("q", q), ("scale", scale))
    if any(tensor.is_inference() for _, tensor in tensors):  # nothing counts its changes
        return measured(x, q, scale, recipe)
    versions = [tensor._version for _, tensor in tensors]

    @lru_cache(maxsize=1)
    def both() -> tuple[Error | None, Loss | None]:
        for (name, tensor), version in zip(tensors, versions, strict=True):
            if tensor._version != version:
                raise InputError(f"{name} was changed after it was judged; read error and loss before, or judge again")
        return measured(x, q, scale, recipe)

    return lambda: both()[0], lambda: both()[1]


def measured(x: Prepared, q: Tensor, scale: Tensor, recipe: Recipe) -> tuple[Error | None, Loss | None]:
    """The error of the values that codes ``q`` ``[..., K]`` and published ``scale`` ``[..., G]`` (dtypes of the recipe)
    stand for, beside the input: the largest in ulps of a code (of ``x`` over the scale; at most 1/2 for a right code
    below saturation), and the ratio of energies; and the loss (:mod:`oracle.verdict.loss`).

    Of the error, elements that are not finite, or whose scale is 0, say nothing unless a finite one is coded as none;
    None where no element is left.
    """
    fmt, published, tally = recipe.element, decode(scale), Tally(recipe.element)
    codes, columns = codes_of(q, fmt).reshape(-1, q.shape[-1]), q.shape[-1]
    values = decode(torch.arange(fmt.code_mask + 1, dtype=fmt.storage, device="cpu"), fmt)
    for band in x.bands(recipe.block):
        cells, rows = band.x.grid(recipe.block), codes[band.rows]
        s = band.x.both(quantiser.of_band(published, band, x, recipe).reshape(cells.count), recipe)
        of_rows = s.repeat_interleave(cells.block_rows, dim=0)[: cells.rows]
        if not tally.add_rows(band.x.x.reshape(-1, columns), rows, of_rows, values):
            tally.add(band.x.values.reshape(-1, columns), decode(rows, fmt), cells.spread(s).reshape(-1, columns))
    error = tally.error()
    return None if error is None else Error(*error), tally.loss()


def _evidence(x: Prepared, q: Tensor, scale: Tensor, judged: quantiser.Judged) -> Evidence:
    """What a report draws: the scales when one of them is bad, else the codes with the blocks that share a scale."""
    if judged.bad_scales.any():
        scales = Admissible(judged.scales.low, judged.scales.high, judged.scales.expected)
        return gather(scale, scales, ratio_of(decode(scale), scales), judged.bad_scales, output="scale")
    block = judged.recipe.block
    tile = (block.rows or 0, block.columns or 0)
    return gather_pieces(_pieces(x, q, scale, judged), q, output="q", tile=tile, fmt=judged.recipe.element)


def _pieces(x: Prepared, q: Tensor, scale: Tensor, judged: quantiser.Judged) -> Iterator[Piece]:
    matrix, bad = q.reshape(-1, q.shape[-1]), judged.bad_codes.view(-1, q.shape[-1])
    for rows, sets in quantiser.code_bands(x, judged.recipe, decode(scale)):
        low, high, expected = (
            decode(quantiser.code_of_ordinal(t, sets.fmt), sets.fmt) for t in (sets.low, sets.high, sets.expected)
        )
        codes = Admissible(low, high, torch.where(sets.nan, torch.nan, expected))
        yield Piece(matrix[rows], codes, ratio_of(decode(matrix[rows], sets.fmt), codes), bad[rows])


def _basis(judged: quantiser.Judged) -> str:
    return f"admissible set of recipe {judged.recipe.name}"


def _worst(x: Prepared, q: Tensor, scale: Tensor, judged: quantiser.Judged) -> tuple[Worst, float]:
    """The worst scale if one is bad, else the worst code; and the largest ratio of either."""
    of_scale, of_code = _worst_scale(scale, judged), _worst_code(x, q, scale, judged)
    margin = max(of_scale.ratio, of_code.ratio)
    if judged.bad_scales.any():
        return of_scale, margin
    if judged.bad_codes.any():
        return of_code, margin
    return (of_scale if of_scale.ratio >= of_code.ratio else of_code), margin


def _worst_scale(scale: Tensor, judged: quantiser.Judged) -> Worst:
    value, sets = decode(scale), judged.scales
    failing = bool(judged.bad_scales.any())
    flat, _ = _farthest(value, sets.low, sets.high, sets.expected, judged.bad_scales if failing else None)
    index = _index(flat, value)
    low, high, expected = float(sets.low[index]), float(sets.high[index]), float(sets.expected[index])
    actual = float(value[index])
    return Worst(index, actual, low, high, expected, _ratio(actual, low, high, expected), "scale")


def _worst_code(x: Prepared, q: Tensor, scale: Tensor, judged: quantiser.Judged) -> Worst:
    """Ratios are counted in codes: one code inside a set of two is 1."""
    failing = bool(judged.bad_codes.any())
    raw, bad = codes_of(q, judged.recipe.element).reshape(-1, q.shape[-1]), judged.bad_codes.view(-1, q.shape[-1])
    worst, farthest = None, -math.inf
    for rows, sets in quantiser.code_bands(x, judged.recipe, decode(scale)):
        if failing and not bool(bad[rows].any()):
            continue
        place, distance = _worst_of(raw[rows], sets, bad[rows], failing=failing)
        if worst is None or distance > farthest:
            first = (rows.start or 0) * q.shape[-1]
            worst, farthest = replace(place, index=_index(first + place.index[0], q)), distance
    assert worst is not None, "a tensor has elements, and a failing one a band that fails"
    return worst


def _worst_of(raw: Tensor, sets: quantiser.CodeSet, bad: Tensor, *, failing: bool) -> tuple[Worst, float]:
    """The worst code of a band, with its flat index there, and how far it lies off."""
    rank = quantiser.ordinal(raw, sets.fmt)
    low = torch.where(bad, sets.low, torch.minimum(sets.low, rank))
    high = torch.where(bad, sets.high, torch.maximum(sets.high, rank))
    settled = ~bad & (sets.nan | sets.free)
    near = torch.where(settled, rank, sets.expected)
    wide = [t.to(torch.float64) for t in (rank, low, high, near)]
    flat, distance = _farthest(wide[0], wide[1], wide[2], wide[3], bad if failing else None)
    at = _index(flat, raw)
    edges = [float(decode(quantiser.code_of_ordinal(t[at], sets.fmt), sets.fmt)) for t in (low, high, sets.expected)]
    if bool(sets.nan[at]):
        edges = [math.nan] * 3
    ratio = _ratio(*(float(t[at]) for t in (rank, low, high, near)))
    if bool(bad[at]):
        ratio = math.inf if not ratio > 1 else ratio
    return Worst((flat,), float(decode(raw[at], sets.fmt)), edges[0], edges[1], edges[2], ratio, "q"), distance


def _farthest(value: Tensor, low: Tensor, high: Tensor, expected: Tensor, bad: Tensor | None) -> tuple[int, float]:
    """Flat index of the element farthest outside its set or, where none is ``bad``, farthest from the expected value;
    and how far that is."""
    beyond = (value - expected).abs() if bad is None else torch.maximum(low - value, value - high)
    same = (value == expected) | (torch.isnan(value) & torch.isnan(expected))
    beyond = torch.nan_to_num(torch.where(same, torch.zeros_like(beyond), beyond), nan=math.inf, posinf=math.inf)
    if bad is not None:
        beyond = torch.where(bad, beyond, torch.full_like(beyond, -math.inf))
    flat = int(beyond.argmax())
    return flat, float(beyond.flatten()[flat])


def _index(flat: int, like: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, like.shape))


def _ratio(actual: float, low: float, high: float, expected: float) -> float:
    if actual == expected or (math.isnan(actual) and math.isnan(expected)):
        return 0.0
    edge = (high - expected) if actual > expected else (expected - low)
    ratio = abs(actual - expected) / edge if edge > 0 else math.inf
    return math.inf if math.isnan(ratio) else ratio
