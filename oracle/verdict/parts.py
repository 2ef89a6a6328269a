"""The products that make up an output: their intervals, their exact values, and the bits that schedules predict.

NaN is right where the exact value is NaN, and fails elsewhere.
Source: the bounds and predictions that it asks (:mod:`oracle.bounds`, :mod:`oracle.tensorcore.predict`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from oracle.bounds import Interval, admissible, ieee32_bound, of_schedule
from oracle.bounds.engines import Deciding, any_order_bound, exact, exact_and_residue, split_bound
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.bounds.product import collapsed, stored_before
from oracle.bounds.screen import Outside, Screen
from oracle.numbers.formats import codes_of, decode, of_dtype, same_bits, share
from oracle.tensorcore.elements import MOST, Elements
from oracle.tensorcore.identify import off_midpoint, subset
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import ANY, Schedule, is_class, of_class
from oracle.truth.gemm import Exact, ScaledProduct, rounded
from oracle.verdict.compare import Admissible, Comparison, Verdict, compare
from oracle.verdict.pattern import places

TRIAL = (4, 256)  # rows and columns that a schedule or a class must explain before the whole part is computed
MORE = (16, 1024)  # those that it must explain next where the output is more than LARGER times as large
LARGER = 32
LARGE = 1 << 27  # products above which a few elements are asked before all are computed
FEWEST = (1, 4)  # those that reject most classes of a wrong output
EXACT, EXACT_ON_DEVICE = 1 << 23, 1 << 25
"""Elements of an output whose exact values are kept for the rest of its judgement: 256 MiB, and 1 GiB of a GPU."""
BAND, BAND_ON_DEVICE = 256, 2048
"""Rows predicted at a time: a schedule that is not the kernel's is rejected at its first wrong band."""


@dataclass(frozen=True)
class Part:
    """One product and the rows of the flattened output ``[R, N]`` that it fills (None: all, in order); ``group``: the
    number of its weight, where there are several."""

    product: ScaledProduct
    rows: Tensor | None = None
    group: int = 0

    @property
    def place(self) -> Tensor | slice:
        """The rows, as an index of the output: int64 ``[M]``, or all."""
        return slice(None) if self.rows is None else self.rows

    def row(self, row: int) -> int:
        """Which row of the product fills this ``row`` of the output."""
        return row if self.rows is None else int(torch.nonzero(self.rows == row)[0, 0])

    def of(self, output: Tensor) -> Tensor:
        """This part's rows ``[M, N]`` of ``output [R, N]``, of its dtype."""
        return output if self.rows is None else output.index_select(0, self.rows)


def part_of(parts: Sequence[Part], row: int) -> Part:
    """The part that fills a ``row`` of the output."""
    return next(part for part in parts if part.rows is None or bool((part.rows == row).any()))


def work(parts: Sequence[Part]) -> int:
    """Multiplications of all parts."""
    return sum(part.product.M * part.product.N * part.product.K for part in parts)


def interval_of(product: ScaledProduct, name: str) -> Interval:
    """The sound interval of ``product`` under the named numerics; of width zero where none of them rounds."""
    return exact_and_interval(product, name)[1]


def exact_and_interval(
    product: ScaledProduct, name: str, deciding: Deciding | None = None
) -> tuple[Exact | None, Interval]:
    """The interval and, where one pass gives both, the exact value; ``deciding`` of :mod:`oracle.bounds.engines`."""
    if deciding is not None and product.a.is_cuda and product.nearby is None:  # another output asks for others
        return _exact_and_interval(product, name, deciding)
    return product.cached(("interval", name), lambda: _exact_and_interval(product, name, deciding))


def _exact_and_interval(product: ScaledProduct, name: str, deciding: Deciding | None) -> tuple[Exact | None, Interval]:
    if product.nearby is not None:
        value, interval = exact_and_interval(product.nearby, name)
        return None if value is None else value.to(product.a.device), interval.to(product.a.device)
    value, interval = _of_float32(product, name, deciding)
    if product.c is not None and product.c.dtype is torch.bfloat16:
        value = exact(product) if value is None else value
        interval = stored_before(value, interval, product.c)
    return value, interval


def _of_float32(product: ScaledProduct, name: str, deciding: Deciding | None) -> tuple[Exact | None, Interval]:
    """Of a product whose sum stays in float32 until it is finished."""
    if name == IEEE32:
        return None, collapsed(product, ieee32_bound(product), None)
    accumulator = of_schedule(of_class(name))
    if is_class(name):
        bound = any_order_bound if name.endswith(ANY) else split_bound
        return None, collapsed(product, bound(product, accumulator, deciding), accumulator)
    value, interval = exact_and_residue(product, accumulator, deciding)
    return value, collapsed(product, interval, accumulator)


class Bands:
    """The bits of an output beside those that schedules predict, some rows at a time.

    What refuses one schedule is asked of the next one first, so that two are seldom computed on the whole; the band
    that refused a schedule is kept.
    """

    def __init__(self, parts: Sequence[Part], output: Tensor) -> None:
        self.parts, self.output = parts, output
        self.samples = list(samples(parts, output))
        self._witnesses: list[tuple[ScaledProduct, Tensor]] = []
        self._refused: dict[str, tuple[int, int, Tensor]] = {}
        self._exact: dict[int, ExactPart] = {}
        self._first: Schedule | None = None

    def reproduced(self, schedule: Schedule) -> bool:
        """Whether ``schedule`` gives every bit."""
        self._first = self._first or schedule
        if any(self._differs(self._bits(*few, schedule), *few) for few in [*self._witnesses, *self.samples]):
            return False
        if any(self._differs(self._bits(*more, schedule), *more) for more in self._more):
            return False
        if schedule != self._first and not all(self._has_bits(*few, schedule) for few in self._near_midpoints):
            return False
        for i, own, start, band in self._all():
            predicted = self._bits(band, own, schedule)
            if self._differs(predicted, band, own):
                self._refused[schedule.name] = i, start, predicted
                return False
        return True

    @cached_property
    def _more(self) -> list[tuple[ScaledProduct, Tensor]]:
        """More rows and columns of a large output; what is nearly right is seldom computed on the whole."""
        large = self.output.numel() > LARGER * MORE[0] * MORE[1]
        return list(samples(self.parts, self.output, MORE)) if large else []

    @cached_property
    def _near_midpoints(self) -> list[tuple[Elements, Tensor]]:
        """Of a large output the elements whose exact values lie nearest to a midpoint: where they have the bits of one
        arithmetic, as those of a right kernel do, they refuse most others before these are computed whole."""
        if self.output.is_cuda or work(self.parts) <= LARGE:
            return []
        at_most = max(range(len(self.parts)), key=lambda i: self.parts[i].product.M)
        part = self.parts[at_most]
        away, unit = off_midpoint(self.exact(at_most).value.hi, self.output.dtype)
        away = (away * unit).flatten()  # errors of sums of one size are alike whatever is left of the sum
        at = torch.topk(away, min(MOST, len(away)), largest=False).indices
        rows, columns = at // part.product.N, at % part.product.N
        return [(Elements.where(part.product, rows, columns), part.of(self.output)[rows, columns])]

    def exact(self, number: int) -> ExactPart:
        """A part with its exact value, which a judgement may ask for several times; it is kept unless it is large."""
        if number not in self._exact:
            part = self.parts[number]
            known = ExactPart.of(part, exact(part.product), self.output.dtype)
            if self.output.numel() > (EXACT_ON_DEVICE if self.output.is_cuda else EXACT):
                return known
            self._exact[number] = known
        return self._exact[number]

    def _has_bits(self, elements: Elements, own: Tensor, schedule: Schedule) -> bool:
        return bool(same_bits(elements.bits(schedule, own.dtype), own).all())

    def _differs(self, predicted: Tensor, product: ScaledProduct, own: Tensor) -> bool:
        """Whether a bit of ``own`` is not the predicted one; a few that are not refuse the next schedule sooner."""
        if torch.equal(codes_of(predicted), codes_of(own)) or not len(at := places(~same_bits(predicted, own))):
            return False
        if own.numel() > FEWEST[1]:
            row = at[:1] // product.N
            columns = at[: FEWEST[1]][at[: FEWEST[1]] // product.N == row] % product.N
            self._witnesses.append((subset(product, row, columns), own[row][:, columns]))
        return True

    def alike(self, schedule: Schedule) -> float:
        """The share of equal bits in a few rows and columns."""
        same = [same_bits(self._bits(*few, schedule), few[1]).flatten() for few in self.samples]
        return share(torch.cat(same))

    def close(self, schedule: Schedule) -> bool:
        """Whether a few elements of the band that refused ``schedule`` are within four units in the last place of its
        bits, as those of another right arithmetic are; False where no band did."""
        if schedule.name not in self._refused:
            return False
        i, start, predicted = self._refused[schedule.name]
        own = self.parts[i].of(self.output)[start : start + len(predicted)]
        at = places(~same_bits(predicted, own))
        x, y = (decode(t.flatten()[at[:: -(-len(at) // LARGER)]]) for t in (own, predicted))
        return bool(((x - y).abs() <= 2.0 ** (1 - of_dtype(own.dtype).fraction_bits) * y.abs()).all())

    def right(self, schedule: Schedule) -> Tensor:
        """What ``schedule`` gives, in the shape of the output and its dtype; NaN in rows that no part fills."""
        result = torch.full_like(self.output, torch.nan)
        at = self._refused.get(schedule.name)
        for i, own, start, band in self._all():
            if at is not None and (i, start) < at[:2]:
                predicted = own  # seen to be equal
            else:
                predicted = at[2] if at is not None and (i, start) == at[:2] else self._bits(band, own, schedule)
            rows = self.parts[i].rows
            result[slice(start, start + band.M) if rows is None else rows[start : start + band.M]] = predicted
        return result

    def _bits(self, product: ScaledProduct, own: Tensor, schedule: Schedule) -> Tensor:
        bits = partial(predict_product, product, schedule, out_dtype=own.dtype)
        return product.cached((schedule, own.dtype), bits)

    def _all(self) -> Iterator[tuple[int, Tensor, int, ScaledProduct]]:
        """Every band: the number of its part, the output there, its first row, and its product."""
        for i, part in enumerate(self.parts):
            own, height = part.of(self.output), BAND_ON_DEVICE if self.output.is_cuda else BAND
            for start in range(0, part.product.M, height):
                stop = min(part.product.M, start + height)
                yield i, own[start:stop], start, part.product.rows(start, stop)


def samples(
    parts: Sequence[Part], output: Tensor, extents: tuple[int, int] = TRIAL
) -> Iterator[tuple[ScaledProduct, Tensor]]:
    """A few rows and columns ``[m, n]`` of every part, with what ``output [R, N]`` has there, in the output's dtype."""
    for part in parts:
        rows, columns = (
            torch.arange(0, extent, max(1, extent // most), device=output.device)
            for extent, most in zip((part.product.M, part.product.N), extents, strict=True)
        )
        yield subset(part.product, rows, columns), part.of(output)[rows][:, columns]


@dataclass(frozen=True)
class ExactPart:
    """A part whose exact value is known: ``value``, and ``expected``, that value rounded into the output's dtype."""

    part: Part
    value: Exact
    expected: Tensor

    @classmethod
    def of(cls, part: Part, value: Exact, dtype: torch.dtype) -> ExactPart:
        return cls(part, value, rounded(part.product, value, dtype))

    def inexact(self, output: Tensor) -> Tensor:
        """The elements of the part in ``output [R, N]`` (the output's dtype), bool ``[M, N]``, that are not the exact
        value rounded: what a pass by a bound rests on."""
        return ~same_bits(self.expected, self.part.of(output))

    def subset(self, rows: Tensor, columns: Tensor) -> ExactPart:
        """Some ``rows [m]`` and ``columns [n]`` (int64), as a part that fills an output of its own."""
        parts = (self.value.hi, self.value.lo, self.value.slack, self.expected)
        hi, lo, slack, expected = (x[rows][:, columns] for x in parts)
        return ExactPart(Part(subset(self.part.product, rows, columns)), Exact(hi, lo, slack), expected)


def held_by(known: Sequence[ExactPart], output: Tensor, outside: Tensor, name: str) -> tuple[Comparison, str] | None:
    """The comparison with a class that holds every element of ``output [R, N]``, and its name; None when it does not.

    An element that was ``outside`` (bool ``[R, N]``) must lie in the interval: one that the class leaves unconstrained
    is not held.
    """
    intervals = [exact_and_interval(k.part.product, name, partial(k.inexact, output))[1] for k in known]
    within = compared(known, intervals, output)
    open_ = torch.zeros_like(outside)
    for k, interval in zip(known, intervals, strict=True):
        if interval.open is not None:
            open_[k.part.place] = interval.open
    held = within.outside == 0 and not bool((open_ & outside).any())
    return (within, intervals[0].name) if held else None


def within_reach(product: ScaledProduct, output: Tensor, classes: Sequence[str]) -> Sequence[str]:
    """Those of the classes that may give one element, ``output [1, 1]`` (any float dtype), by how far it lies from the
    value of its ``product`` (:mod:`oracle.bounds.screen`); of the others no interval need be computed."""
    screen = Screen.of(product)
    outside = None if screen is None else screen.outside(output)
    return classes if screen is None or outside is None else reaching(screen, outside, classes)


def reaching(screen: Screen, outside: Outside, classes: Sequence[str]) -> list[str]:
    """Those of the classes, float32 apart, whose results may lie as far from the value as the first element
    ``outside``; all of these where it is NaN or infinite."""
    far, size = torch.stack([outside.excess[0], outside.size[0]]).tolist()
    others = [name for name in classes if name != IEEE32]
    return [name for name in others if not far > screen.reach(size, of_schedule(of_class(name)))]


def compared(known: Sequence[ExactPart], intervals: Sequence[Interval], output: Tensor) -> Comparison:
    """The comparison of ``output [R, N]``, of any float dtype, with these intervals around the exact values."""
    low = torch.full(output.shape, torch.nan, dtype=torch.float64, device=output.device)
    high, expected = low.clone(), low.clone()
    open_ = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
    for k, interval in zip(known, intervals, strict=True):
        result, rows = admissible(k.value, k.expected, interval), k.part.place
        low[rows], high[rows], expected[rows] = result.low, result.high, result.expected
        if result.open is not None:
            open_[rows] = result.open
    specified = specified_of([k.part for k in known], output)
    return compare(output, Admissible(low, high, expected, specified=specified, open=open_))


def banded(parts: Sequence[Part], verdict: Verdict) -> Verdict:
    """The verdict with the rows at which each part begins, for the lines of a picture."""
    starts = sorted(int(part.rows[0]) for part in parts if part.rows is not None and part.rows.numel())
    if verdict.evidence is None or len(starts) < 2:
        return verdict
    return replace(verdict, evidence=replace(verdict.evidence, bands=tuple(starts)))


def specified_of(parts: Sequence[Part], output: Tensor) -> Tensor | None:
    """The elements of ``output [R, N]`` (any dtype) that some part fills, bool ``[R, N]``; None where that is all."""
    if all(part.rows is None for part in parts):
        return None
    specified = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
    for part in parts:
        specified[part.place] = True
    return specified
