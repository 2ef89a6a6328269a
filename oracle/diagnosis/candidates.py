"""How a candidate for what went wrong is compared with a failing output, and which of several candidates comes first.

A candidate predicts elements: their bits or, where the order of summation is unknown, an interval. Two kinds exist:

    fault      the right kernel with a fault of the catalogue in it, or with a fault and a wrong store
    placement  failing rows and columns that would be right results of other operands (:mod:`oracle.diagnosis.localise`)

Of the elements that a candidate speaks of, each is counted as

    explained      it fails and has the predicted value, which is not the right one
    contradicted   it does not have the predicted value
    neither        it is right as predicted; or the prediction depends on memory beyond a buffer and is unknown

:func:`ranked` orders candidates by these counts. A fault predicts all of a small call. Of a large one, faults inside
the product are tried on a sample of rows and columns, faults of the last stage on all. A placement speaks of the
failing elements only, and must explain all of them; a few rows and columns are compared first.
Five rules cover what bits cannot decide:

- A right result in an element of unknown content speaks against the candidate, because other data would seldom give it.
- A fault that reproduces all that fails, while everything else is right, acts in that region alone (``local``).
- A NaN of the output is no evidence for a candidate that does not know what it reads or leaves there: NaN reproduces
  NaN where a candidate predicts it for exactly the elements that are NaN, and for no other.
- An output without two different finite values other than 0 (all NaN, zeros, infinities, one value) is evidence for no
  candidate (:func:`speaks`); failing elements without them are none for one that acts there alone.
- A fault that leaves elements unwritten is named by position (``placed``) where exactly those elements fail, their
  values do not correlate with the right ones, and most of their rows and columns are no sums of the K blocks under
  other scales.

Not covered: which candidates are tried, and in which order (:mod:`oracle.diagnosis.explain`).

NaN is no evidence, except as the rules above say.
Source: derived in this file from the stages of a right kernel (:mod:`oracle.routines.fault`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice

import torch
from torch import Tensor

from oracle.bounds import Interval, admissible
from oracle.bounds.engines import exact
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.diagnosis.least_squares import effective_factors
from oracle.diagnosis.mutated import Mutated
from oracle.numbers.formats import codes_of, decode, of_dtype, same_bits
from oracle.routines.catalogue import Call, Fault, Stage
from oracle.routines.fault import fold, touches
from oracle.routines.mutants import accumulated, fitting, stored, write
from oracle.tensorcore.identify import subset
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Schedule
from oracle.truth.gemm import (
    NEARBY,
    Decoded,
    Exact,
    ScaledProduct,
    magnitudes,
    rounded,
    same_memory,
    scaled_codes,
    scaled_operands,
    scaled_side,
    take_rows,
)
from oracle.verdict.pattern import count, grid, lines, places
from oracle.verdict.products import (
    COINCIDENCES,
    FEWEST,
    TRIAL,
    Part,
    exact_and_interval,
    interval_of,
    specified_of,
    work,
)

LISTED = 0.5  # an explanation that covers less than half of the failing elements is not named
WHOLE = 1 << 28  # products of one candidate up to which all of the output is predicted
SAMPLE = (96, 192)  # rows and columns of a larger one
PAIR_SAMPLE = (12, 96)  # rows and columns on which pairs of faults are tried first
PAIRED = 32  # groups whose operands are exchanged in pairs
FEW_ROWS = 12  # failing rows on which a fault of a small output is tried first
ENOUGH = 24  # failing elements, of which a fault of half of them explains none once in 10 million draws
FEW_COLUMNS = 16  # columns of these on which faults that are computed together are tried before
FEWEST_ROWS = 3  # of these for faults of the sum, where as many elements fail there as below
FEW_PLACES = 64  # failing elements on which faults of the last stage are tried before
NEARLY = 2.0**-6  # of a value: above what the roundings of a store change
LOST = 2.0**-9  # of the sum of all magnitudes: above what an accumulator loses of data that is not made for it
TINY = 2.0**-20  # above every subnormal number of an output
TOGETHER = (16, 64)  # faults that are computed together at most: the first ones, since one may end the search; others
GOLDEN = 0.6180339887  # multiples of it, modulo 1, spread over rows in no regular step
HOPELESS = 0.125  # share of what fails there; of 12 rows a fault of half of them explains so few once in 300 draws
CHANCE = 0.25  # share of right results beyond a buffer above which the candidate is contradicted there
DEVIATIONS = 5.0  # independent values correlate by more standard errors once in a million
BEFORE_STORE = (Stage.READ, Stage.PRODUCT, Stage.SCHEDULE, Stage.SUM)
EXACT_SUMS = "exact sums"


@dataclass(frozen=True)
class Explanation:
    """One candidate for what went wrong, counted on the output.

    Of ``failing`` elements that it predicts, it reproduces ``explained``; of all it predicts ``known``, and contradicts
    ``contradicted``. ``placed``: the elements that fail, where they are those that it leaves
    unwritten or, ``beyond``, sums with scales from beyond a buffer. ``local``: what it contradicts is right without it.
    ``where``: rows, columns, experts or K blocks of a placement, which reproduces all that fails.
    """

    name: str
    numerics: str
    explained: int
    failing: int
    known: int
    contradicted: int
    met_in: str = ""
    placed: int = 0
    local: bool = False
    beyond: bool = False
    where: str = ""

    @property
    def share(self) -> float:
        """Part of the failing elements that it reproduces."""
        return self.explained / self.failing if self.failing else 0.0

    @property
    def complete(self) -> bool:
        """It reproduces every element that it predicts."""
        return self.contradicted == 0 and self.explained == self.failing > 0

    @property
    def said(self) -> str:
        """What was counted, in words."""
        if self.beyond:
            return f"all {self.placed} failing elements are its sums, some with scales from beyond the buffer"
        if self.placed:
            return f"all {self.placed} failing elements lie where it writes nothing, and whatever it writes is right"
        if self.where:
            return f"{self.where}: all {self.explained} failing elements are right results of that"
        if self.local:
            return f"all {self.explained} failing elements, and the rest is right without it"
        return f"{self.explained} of {self.failing} failing elements, {self.contradicted} contradicted"

    def joined(self, other: Explanation) -> Explanation:
        """The same candidate on two parts of an output; local where each part is, or has nothing to explain."""
        return replace(
            self,
            explained=self.explained + other.explained,
            failing=self.failing + other.failing,
            known=self.known + other.known,
            contradicted=self.contradicted + other.contradicted,
            local=(self.local or other.local)
            and all(e.local or e.failing == e.contradicted == 0 for e in (self, other)),
        )

    def __str__(self) -> str:
        if self.complete:
            return f"{self.name} ({self.where})" if self.where else self.name
        if self.local:
            return f"{self.name} (in the failing elements only, all of which it reproduces)"
        if self.beyond:
            return f"{self.name} (every failing row is such a sum, with scales from beyond the buffer)"
        if self.placed:
            return f"{self.name} (by place: every failing element, and nothing else, lies there)"
        return f"{self.name} ({100 * self.share:.3g}% of the failing elements)"


def ranked(found: Sequence[Explanation]) -> tuple[Explanation, ...]:
    """Complete explanations, those of half of what fails, those by position, the rest; within each the local ones
    first, then by the elements explained less those contradicted; ties as they came."""

    def rank(e: Explanation) -> tuple[int, bool, int]:
        tier = 0 if e.complete else 1 if e.local or e.share >= LISTED else 2 if e.placed else 3
        return tier, not e.local, e.contradicted - e.explained

    return tuple(sorted(found, key=rank))


@dataclass(frozen=True)
class Piece:
    """Rows and columns of the output, and the product ``[rows, columns]`` of which they would be the right result."""

    rows: Tensor
    columns: Tensor
    product: ScaledProduct


@dataclass(frozen=True)
class Placement:
    """A candidate whose position was found on the output: the failing elements are right results of ``pieces``."""

    name: str
    where: str
    pieces: Sequence[Piece]
    met_in: str = ""


@dataclass(frozen=True)
class Prediction:
    """What a candidate says of every element: the bits ``value`` or, where the order of summation is unknown, anything
    from ``low`` to ``high`` (float64) that is not ``open``.

    ``unfaulted``: the bits that its arithmetic gives without the fault, if they are not those of the
    :class:`FailingOutput`. ``placement``: every element is changed and none is unknown.
    """

    value: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    open: Tensor | None = None
    unfaulted: Tensor | None = None
    placement: bool = False

    @classmethod
    def between(cls, value: Tensor, *ends: Tensor, unfaulted: Tensor | None = None) -> Prediction:
        """The ``value`` (any shape) or all between two tensors of its dtype and shape, in either order; the bits alone
        without ``ends``. ``unfaulted`` and ``ends`` have the shape of ``value``; a NaN end holds nothing."""
        if not ends:
            return cls(value, unfaulted=unfaulted)
        x, y = (decode(end) for end in ends)
        return cls(value, torch.minimum(x, y), torch.maximum(x, y), unfaulted=unfaulted)

    def agrees(self, output: Tensor) -> Tensor:
        """Elements of ``output`` (the shape and dtype of ``value``) that may be what it says, bool of its shape; any
        NaN is any NaN."""
        same = same_bits(output, self.value)
        if self.low is not None and self.high is not None:
            actual = decode(output)
            same = same | (self.low <= actual) & (actual <= self.high)
        return same if self.open is None else same & ~self.open

    def at(self, places: Tensor) -> Prediction:
        """What it says of the elements at the flat indices ``places`` ``[n]`` (int64)."""
        low, high, open_, unfaulted = (
            None if x is None else x.flatten()[places] for x in (self.low, self.high, self.open, self.unfaulted)
        )
        return Prediction(self.value.flatten()[places], low, high, open_, unfaulted, self.placement)

    def changed(self, right: Tensor) -> Tensor:
        """Elements that are not what its arithmetic gives without the fault (``right``, the shape and dtype of
        ``value``), bool of its shape."""
        return ~same_bits(self.value, right if self.unfaulted is None else self.unfaulted)


@dataclass(frozen=True)
class View:
    """Some elements of an output, alike in shape: their bits, the right ones, whether they fail, whether a candidate
    speaks of them."""

    output: Tensor
    right: Tensor
    bad: Tensor
    specified: Tensor

    def to(self, device: torch.device | str) -> View:
        """The same elements on ``device``."""
        return View(*(x.to(device) for x in (self.output, self.right, self.bad, self.specified)))

    @cached_property
    def failing(self) -> Tensor:
        """The elements that fail and that a candidate speaks of, bool in the shape of the output."""
        return self.bad & self.specified


Sums = tuple[View, tuple[Tensor, ...], Tensor | None]
"""Some elements, float32 sums there (and the ends of their interval), the right result by exact sums if needed."""


class FailingOutput:
    """An output ``[R, N]`` compared with the right result by one arithmetic, and the comparison of candidates with it.

    ``outside`` are the elements that the judgement refuses; those of them that are right by this arithmetic do not fail
    (all of ``outside``, where that would leave none). The arithmetic is ``call.schedule`` or, without one, float32 in
    any order: exact sums, with the interval of :mod:`oracle.bounds.ieee32` around them. ``mutated``: the products of
    faults, shared by the arithmetics of one call (None: its own).
    """

    def __init__(self, call: Call, output: Tensor, outside: Tensor, mutated: Mutated | None = None) -> None:
        self._begin(call, output, mutated)
        right = self.predict(())
        self.right = right.value
        self.refused = outside & self.specified
        wrong = self.refused & ~right.agrees(output)
        self.bad = wrong if bool(wrong.any()) else self.refused
        self.failing = int(self.bad.sum())

    def _begin(self, call: Call, output: Tensor, mutated: Mutated | None = None) -> None:
        self.call, self.output = call, output
        self.mutated = Mutated(call) if mutated is None else mutated
        self.numerics = EXACT_SUMS if call.schedule is None else call.schedule.name
        self.widths: dict[int, Interval] = {}
        self._held: tuple[Piece | None, dict[tuple[int, int] | None, tuple[Exact, Tensor]]] = (None, {})
        specified = specified_of(call.parts, output)
        whole = torch.ones((), dtype=torch.bool, device=output.device).expand(output.shape)
        self.specified = whole if specified is None else specified
        self.total = output.numel() if specified is None else count(specified)

    @cached_property
    def right(self) -> Tensor:
        """The right result by this arithmetic, in the shape of the output and its dtype."""
        return self.predict(()).value

    @cached_property
    def equal(self) -> int:
        """How many elements are right by this arithmetic."""
        return int((same_bits(self.output, self.right) & self.specified).sum())

    @cached_property
    def failing_places(self) -> Tensor:
        """The failing elements, as flat indices ``[failing]``, int64."""
        return places(self.bad)

    @property
    def near(self) -> Tensor:
        """The right result, or what lies within a few units in the last place of it, in the shape of the output and its
        dtype."""
        return self.right

    @property
    def small(self) -> bool:
        """Whether a candidate can be computed for all of it."""
        return work(self.call.parts) <= WHOLE

    @cached_property
    def by_exact_sums(self) -> FailingOutput:
        """The same output compared with exact sums."""
        return FailingOutput(self.call.with_schedule(None), self.output, self.bad, self.mutated)

    # --- faults -------------------------------------------------------------------------------------------------

    def rounds(self, fault: Fault) -> bool:
        """Whether a fault is one of the store that gives about the value (:func:`rounds`)."""
        known = self.mutated.rounding
        if fault.name not in known:
            known[fault.name] = set(fault.changes) == {Stage.STORE} and rounds(self.call, fault)
        return known[fault.name]

    def attempt(self, faults: tuple[Fault, ...]) -> Explanation:
        """What the kernel with these faults explains of the whole output."""
        return self.weigh(faults, self.predict(faults))

    def predict(self, faults: tuple[Fault, ...]) -> Prediction:
        """The whole output of a kernel with these faults."""
        call = self.call
        if call.schedule is not None and faults and all(set(fault.changes) <= {Stage.WRITE} for fault in faults):
            return Prediction(fold(call, faults, Stage.WRITE, self.right))
        computed = self.mutated.computed(call, faults)
        if call.schedule is not None:
            fallen = any(schedule is None for _, schedule in computed)
            return Prediction(write(call, computed, faults), unfaulted=self.by_exact_sums.right if fallen else None)
        changed = touches(faults, *BEFORE_STORE, Stage.STORE)
        result = self._gathered(computed, faults) if changed else self._right_sums
        return Prediction.between(*(fold(call, faults, Stage.WRITE, out) for out in result))

    @cached_property
    def _right_sums(self) -> list[Tensor]:
        """By exact sums, the right output ``[R, N]`` before the last stage and the ends of what right sums give."""
        return self._gathered(self.mutated.computed(self.call, ()), ())

    def _gathered(self, computed: Sequence[tuple[Part, Schedule | None]], faults: tuple[Fault, ...]) -> list[Tensor]:
        call, first = self.call, computed[0][0].product
        blank = torch.full((call.rows, first.N), torch.nan, dtype=call.out_dtype, device=first.a.device)
        result = [blank.clone() for _ in range(3)]
        for i, (part, schedule) in enumerate(computed):
            for out, acc in zip(result, self.sums(i, part.product, schedule, faults), strict=True):
                out[part.place] = stored(call, acc, faults)
        return result

    def sums(
        self, i: int | None, product: ScaledProduct, schedule: Schedule | None, faults: tuple[Fault, ...]
    ) -> tuple[Tensor, ...]:
        """Float32 results ``[M, N]`` of one product before the store; by exact sums also the ends of what right sums
        give.

        ``i`` numbers the part, whose interval is cached where no fault changes the product; None caches nothing.
        """
        acc = accumulated(self.call, product, schedule, faults)
        if self.call.schedule is not None:
            return (acc,)
        remaining = None if i is None or touches(faults, Stage.READ, Stage.PRODUCT) else self.widths.get(i)
        width = interval_of(product, IEEE32) if remaining is None else remaining
        if i is not None and not touches(faults, Stage.READ, Stage.PRODUCT):
            self.widths[i] = width
        infinity = torch.tensor(torch.inf, dtype=torch.float32, device=acc.device)
        low, high = ((decode(acc) + end).to(torch.float32) for end in (width.lo, width.hi))
        return acc, torch.nextafter(low, -infinity), torch.nextafter(high, infinity)

    def named_by_position(self, fault: Fault, explanation: Explanation) -> Explanation:
        """``explanation`` with the failing elements as ``placed``, if they are just those that the fault leaves
        unwritten and hold nothing that correlates with the right values."""
        unwritten = torch.isnan(decode(fault.changes[Stage.WRITE](self.call, self.right))) & self.specified
        unwritten &= ~torch.isnan(decode(self.right))
        count, right_there = int(unwritten.sum()), int((unwritten & ~self.bad).sum())
        if bool((self.bad & ~unwritten).any()) or explanation.contradicted:
            return explanation
        if not 0 < count < self.total or right_there > CHANCE * count:
            return explanation
        if correlates(self.output, self.right, self.bad) or other_groups(self) or self.computed:
            return explanation
        return replace(explanation, placed=self.failing)

    @cached_property
    def computed(self) -> bool:
        """Whether most failing rows, or columns, of some product are sums of its K blocks under other scales: they were
        written."""
        if not self.small:
            return False
        for part in self.call.parts:
            rows, columns = grid(part.of(self.bad))
            if not len(rows):
                continue
            product, result = subset(part.product, rows, columns), part.of(self.output)[rows[:, None], columns[None, :]]
            match = (effective_factors(product, result, of_columns=axis) for axis in (False, True))
            if any(used is not None and used.known > LISTED for used in match):
                return True
        return False

    # --- placements ---------------------------------------------------------------------------------------------

    def attempt_placement(self, candidate: Placement, numerics: Sequence[str]) -> Explanation | None:
        """The candidate by the first of the ``numerics`` in whose interval all that fails lies; None without one.

        The interval is that of the *mutated* products, as the judgement would compute it.
        """
        uncovered = self.bad.clone()
        for piece in candidate.pieces:
            uncovered[piece.rows[:, None], piece.columns[None, :]] = False
        if bool(uncovered.any()):
            return None
        failing = [self._failing(piece) for piece in candidate.pieces]
        for name in numerics:
            if all(self.holds(piece, name, most) for most in (FEWEST, TRIAL, None) for piece in failing):
                n = self.failing  # pieces may overlap
                return Explanation(candidate.name, name, n, n, n, 0, candidate.met_in, where=candidate.where)
        return None

    def _failing(self, piece: Piece) -> Piece:
        """The rows and columns of a piece that hold a failing element."""
        bad = self.bad.index_select(0, piece.rows).index_select(1, piece.columns)
        rows, columns = torch.nonzero(bad.any(dim=1))[:, 0], torch.nonzero(bad.any(dim=0))[:, 0]
        if (len(rows), len(columns)) == tuple(bad.shape):
            return piece
        return Piece(piece.rows[rows], piece.columns[columns], subset(piece.product, rows, columns))

    def holds(self, piece: Piece, numerics: str, most: tuple[int, int] | None) -> bool:
        """Whether all failing elements of the piece, or of at most so many rows and columns of it, are explained."""
        product, rows, columns = piece.product, piece.rows, piece.columns
        if most is not None:
            of_rows, of_columns = (
                evenly(torch.arange(len(at), device=at.device), m) for at, m in zip((rows, columns), most, strict=True)
            )
            product, rows, columns = subset(product, of_rows, of_columns), rows[of_rows], columns[of_columns]
        grid = rows[:, None], columns[None, :]
        output, bad = self.output[grid], self.bad[grid]
        if not bool(bad.any()):
            return True
        if piece is not self._held[0]:
            self._held = piece, {}
        value, interval = exact_and_interval(product, numerics)
        if most not in self._held[1]:  # one value for all numerics
            value = exact(product) if value is None else value
            self._held[1][most] = value, rounded(product, value, self.output.dtype)
        value, expected = self._held[1][most]
        sets = admissible(value, expected, interval)
        predicted = Prediction(expected, sets.low, sets.high, sets.open, placement=True)
        return self.weigh((), predicted, View(output, output, bad, bad)).complete  # it changes every element

    # --- counting -----------------------------------------------------------------------------------------------

    def view(self, part: int, rows: Tensor, columns: Tensor) -> View:
        """Some ``rows [m]`` of a part, and some ``columns [n]`` (int64): what a candidate for them is compared with."""
        grid = rows_of_output(self.call.parts[part], rows)[:, None], columns[None, :]
        return View(self.output[grid], self.right[grid], self.bad[grid], self.specified[grid])

    def weigh(self, faults: tuple[Fault, ...], predicted: Prediction, view: View | None = None) -> Explanation:
        """How many elements a prediction explains and contradicts, of those that it speaks of.

        ``view``: the elements that it predicts (None: the whole output), and which of them it speaks of.
        """
        seen = View(self.output, self.right, self.bad, self.specified) if view is None else view
        output, right, bad, specified = seen.output, seen.right, seen.bad, seen.specified
        known, nan = specified, torch.isnan(predicted.value)
        if not predicted.placement and bool(nan.any()):
            nan, result = nan & ~torch.isnan(right), torch.isnan(output) & ~torch.isnan(right)
            exactly = bool((nan & specified == result & specified).all())
            unknown = (nan & ~result if exactly else nan) & specified
            right_there = unknown & ~bad
            known = specified & ~unknown
            if int(right_there.sum()) > CHANCE * int(unknown.sum()):
                known |= right_there
        agrees = predicted.agrees(output)
        text = agrees if predicted.placement else agrees & predicted.changed(right)
        contradicted, failed = known & ~agrees, bad & known
        explained, failing = int((failed & text).sum()), int(failed.sum())
        return Explanation(
            " and ".join(fault.name for fault in faults),
            self.numerics,
            explained,
            failing,
            int(known.sum()),
            int(contradicted.sum()),
            "; ".join(fault.seen for fault in faults),
            local=explained == failing > 0 and self._acts_there(faults, predicted, seen, contradicted, failed),
        )

    def _acts_there(
        self, faults: tuple[Fault, ...], predicted: Prediction, seen: View, contradicted: Tensor, failed: Tensor
    ) -> bool:
        """Whether a candidate that reproduces all that ``failed`` acts in that region alone."""
        if not bool(contradicted.any()) or bool((contradicted & ~same_bits(seen.output, seen.right)).any()):
            return False
        # A race may leave any part of what it changes right, so it is recognised by where it fails.
        race = all(f.race for f in faults) and bool((seen.specified & same_bits(predicted.value, seen.right)).any())
        return race or (varied(predicted.value[failed]) and speaks(seen.output[failed]))


class Sample:
    """Some rows of each part of an output, and some columns, on which faults are computed: on the CPU where that is
    sooner (:data:`oracle.truth.gemm.NEARBY`), else on the device of the output."""

    def __init__(
        self, failure: FailingOutput, rows: Sequence[Tensor], columns: Tensor, views: Sequence[View] | None = None
    ) -> None:
        self.failure, self.rows, self.columns = failure, rows, columns
        self.unfaulted: dict[int, Tensor] = {}
        self.right_sums: dict[int, tuple[Tensor, ...]] = {}
        self.pieces: dict[int, ScaledProduct] = {}
        size = max(len(own) * part.product.K for own, part in zip(rows, failure.call.parts, strict=True)) * len(columns)
        self.device = torch.device("cpu") if size <= NEARBY else failure.output.device
        views = [failure.view(i, own, columns) for i, own in enumerate(rows)] if views is None else views
        self.views = [view.to(self.device) for view in views]

    @classmethod
    def half_failing(cls, failure: FailingOutput, size: tuple[int, int]) -> Sample:
        """Rows and columns of which up to half fail, at most ``size`` of them."""
        failing, columns = lines(failure.bad)
        rows = [half_failing(part.of(failing), size[0]) for part in failure.call.parts]
        return cls(failure, rows, half_failing(columns, size[1]))

    def attempt(self, faults: tuple[Fault, ...]) -> Explanation | None:
        """What the kernel with these faults explains of the sample; None for faults that regroup the rows."""
        return self.weigh(faults, self.sums(faults))

    def likely(self, faults: Iterable[Fault]) -> Iterator[Fault]:
        """The ``faults``, in their order, without most of those whose share is below ``LISTED``: those that leave one
        operand as it is are computed together, as rows or columns of one product. None where nothing fails here."""
        if not any(count(view.failing) for view in self.views):
            return
        failing, nan = self.failing_alone(), any(bool(torch.isnan(view.output).any()) for view in self.views)
        fewer = failing.every_other()
        few = sum(count(view.failing) for view in fewer.views)
        for some in batches(faults):
            at_most = {} if fewer is failing else fewer.at_most(some)
            none = {name for name, result in at_most.items() if result == (0, few)}
            remaining = [fault for fault in some if fault.name not in none]
            at_most = failing.at_most(remaining)
            hopeless = {n for n, (agrees, known) in at_most.items() if agrees < LISTED * known or not (known or nan)}
            yield from (fault for fault in remaining if fault.name not in hopeless)

    def far(self, faults: Sequence[Fault]) -> set[str]:
        """Names of faults that give about the value of at most ``LISTED`` of what fails."""
        failing, result = sum(count(view.failing) for view in self.views), set[str]()
        for some in batches(faults):
            at_most = self.at_most(some, near=True)
            result |= {n for n, (agrees, known) in at_most.items() if known == failing and agrees <= LISTED * failing}
        return result

    def failing_alone(self) -> Sample:
        """Of one part, the rows and columns of the sample in which something fails; else the sample."""
        if len(self.views) != 1:
            return self
        return self._part(*grid(self.views[0].failing))

    def every_other(self) -> Sample:
        """Of one part, every other row and column of the sample, where at least ``ENOUGH`` elements fail there; else
        the sample."""
        if len(self.views) != 1:
            return self
        rows, columns = (torch.arange(0, size, 2, device=self.device) for size in self.views[0].failing.shape)
        enough = count(self.views[0].failing[::2, ::2]) >= ENOUGH
        return self._part(rows, columns) if enough else self

    def _part(self, rows: Tensor, columns: Tensor) -> Sample:
        """Some rows and columns of the sample of one part."""
        (view,), (own,) = self.views, self.rows
        if (len(rows), len(columns)) == tuple(view.failing.shape):
            return self
        at = rows[:, None], columns[None, :]
        seen = View(*(x[at] for x in (view.output, view.right, view.bad, view.specified)))
        part = Sample(self.failure, [own[rows.to(own.device)]], self.columns[columns.to(own.device)], [seen])
        product = self.failure.call.parts[0].product
        part.pieces[0] = subset(self.piece(0, product), rows, columns).to(part.device)
        return part

    def at_most(self, faults: Sequence[Fault], *, near: bool = False) -> dict[str, tuple[int, int]]:
        """Of the failing elements how many agree with each of these faults, and how many it predicts no NaN for, where
        that costs little: no more is explained, and no other is known (unless the output has a NaN there).

        ``near``: whatever the arithmetic and the store are, if they give about the exact value; so the arithmetics of
        one call share what was counted of one sample. Of a fault of the store that rounds, that is the right value.
        """
        if not near:
            return self._at_most(faults, near=False)
        known = self.failure.mutated.near.setdefault(self.seen, {})
        asked = [fault for fault in faults if fault.name not in known]
        result = self._at_most(asked, near=True)
        known.update({fault.name: result.get(fault.name) for fault in asked})
        return {fault.name: match for fault in faults if (match := known[fault.name]) is not None}

    @cached_property
    def seen(self) -> tuple[object, ...]:
        """What :meth:`at_most` depends on beside the faults, for values near the exact ones."""
        places = (x.cpu().numpy().tobytes() for x in (*self.rows, self.columns))
        values = (
            codes_of(x).cpu().numpy().tobytes() if x.is_floating_point() else x.cpu().numpy().tobytes()
            for view in self.views
            for x in (view.output, view.failing)
        )
        return (*places, *values)

    def _at_most(self, faults: Sequence[Fault], *, near: bool) -> dict[str, tuple[int, int]]:
        own = self.failure.call.parts[0].product
        if len(self.failure.call.parts) != 1 or not len(self.rows[0]) or own.bias is not None or own.c is not None:
            return {}
        stores = [fault.name for fault in faults if near and self.failure.rounds(fault)]
        sides, scaled = list[tuple[str, bool, Decoded]](), list[tuple[str, bool, Tensor]]()
        alone = [("", self.piece(0, own))] if stores else []
        early = {Stage.READ, Stage.PRODUCT, Stage.SCHEDULE} if near else {Stage.READ, Stage.PRODUCT}
        for fault in faults:
            if {Stage.READ, Stage.PRODUCT} & {*fault.changes} and {*fault.changes} <= early:
                result = self._changed(fault, near=near)
                if isinstance(result, ScaledProduct):
                    alone.append((fault.name, result))
                elif result is not None:
                    of_left, side = result
                    if isinstance(side, Tensor):
                        scaled.append((fault.name, of_left, side))
                    else:
                        sides.append((fault.name, of_left, side))
        match = self._near(scaled) if near else self._together(sides)
        for name, product in alone:
            value, agrees = self._agreeing(product, self.views[0].output, near=near)
            match[name] = self._counted(agrees, ~torch.isnan(value), each=1, of_rows=True)[0]
        right = match.pop("", (0, 0))
        return match | dict.fromkeys(stores, right)

    def _changed(self, fault: Fault, *, near: bool) -> tuple[bool, Decoded | Tensor] | ScaledProduct | None:
        """What the sample of one product has of the fault: its left operand (True) or the other one (``near``, times
        its scales), or a product where not one of both alone is changed; None where rows or columns are others."""
        own = self.failure.call.parts[0].product
        if fault.by_code:
            piece = self.piece(0, own)
            product = fold(self.failure.call, (fault,), Stage.PRODUCT, piece)
            changed = piece.operands_changed(product)
            if changed is None or sum(changed) != 1:
                return product if changed is not None and any(changed) else None
            side = product.left if changed[0] else product.right
            return changed[0], scaled_side(product, side) if near else side
        if (one := self.failure.mutated.operand(fault)) is None:
            whole = self.failure.mutated.alone(fault)
            return None if whole is None else subset(whole, self.rows[0], self.columns).to(self.device)
        of_left, side = one
        at, of_scale = (self.rows[0], 1) if of_left else (self.columns, own.b_rows)
        if near and side.codes.device == self.device:
            scales = side.scales if len(side.scales) == 1 else side.scales[at // of_scale]
            return of_left, scaled_codes(side.value_of(at), scales, own.block)
        piece, rows = self.piece(0, own), at if of_scale == 1 else at // of_scale
        codes, few = (own.a, piece.a) if of_left else (own.b, piece.b)
        scale = take_rows(side.scale, rows) if len(side.scale) > 1 else side.scale
        few = few if same_memory(side.codes, codes) else take_rows(side.codes, at).to(self.device)
        some = Decoded(few, scale.to(self.device))
        return of_left, scaled_codes(some.value(), some.scales, own.block) if near else some

    def _near(self, sides: Sequence[tuple[str, bool, Tensor]]) -> dict[str, tuple[int, int]]:
        """:meth:`at_most` of faults of one operand, ``near``: their operands times scales are rows of one matrix."""
        product, output = self.piece(0, self.failure.call.parts[0].product), self.views[0].output
        results = dict[str, tuple[int, int]]()
        rest, loss = self._scaled, max(float32_loss(product.K), LOST)
        for of_rows in (True, False):
            names = [name for name, of_left, _ in sides if of_left is of_rows]
            if not names:
                continue
            each = len(names)
            changed = torch.cat([side for _, of_left, side in sides if of_left is of_rows])
            value, size = changed @ rest[of_rows].T, changed.abs() @ rest[of_rows].abs().T
            if not of_rows:
                value, size = value.T, size.T
            value, size = value * product.factor, size * abs(product.factor)
            agrees = around(value, size, output.repeat((each, 1) if of_rows else (1, each)), loss)
            counts = self._counted(agrees, ~torch.isnan(value), each=each, of_rows=of_rows)
            results |= dict(zip(names, counts, strict=True))
        return results

    @cached_property
    def _scaled(self) -> tuple[Tensor, Tensor]:
        """Both operands of the sample of one product times their scales, float64 ``[m, K]`` and ``[n, K]``."""
        return scaled_operands(self.piece(0, self.failure.call.parts[0].product))

    def _together(self, sides: Sequence[tuple[str, bool, Decoded]]) -> dict[str, tuple[int, int]]:
        """:meth:`at_most` of faults of one operand by the call's arithmetic: those of one dtype are one product."""
        piece, output = self.piece(0, self.failure.call.parts[0].product), self.views[0].output
        results = dict[str, tuple[int, int]]()
        stacks = dict[tuple[bool, torch.dtype, torch.dtype], list[tuple[str, Decoded]]]()
        for name, of_left, side in sides:
            stacks.setdefault((of_left, side.codes.dtype, side.scale.dtype), []).append((name, side))
        for (of_rows, *_), stack in stacks.items():
            codes = stacked([side.codes for _, side in stack])
            scale = stacked([side.scale.expand(len(side.codes), -1) for _, side in stack])
            a, b = ((codes, scale), (piece.b, piece.b_scale)) if of_rows else ((piece.a, piece.a_scale), (codes, scale))
            product, each = replace(piece, a=a[0], a_scale=a[1], b=b[0], b_scale=b[1]), len(stack)
            value, agrees = self._agreeing(product, output.repeat((each, 1) if of_rows else (1, each)), near=False)
            counts = self._counted(agrees, ~torch.isnan(value), each=each, of_rows=of_rows)
            results |= dict(zip((name for name, _ in stack), counts, strict=True))
        return results

    def _counted(self, agrees: Tensor, known: Tensor, *, each: int, of_rows: bool) -> list[tuple[int, int]]:
        """Of what fails in the sample how many elements agree with each of several products, which lie one under the
        other (``of_rows``) or side by side, and how many are known."""
        m, n = self.views[0].output.shape
        masks = torch.stack([agrees, known])
        masks = masks.view(2, each, m, n) if of_rows else masks.view(2, m, each, n).transpose(1, 2)
        counts = (masks & self.views[0].failing).sum(dim=(2, 3)).tolist()
        return list(zip(*counts, strict=True))

    def _agreeing(self, product: ScaledProduct, output: Tensor, *, near: bool) -> tuple[Tensor, Tensor]:
        """What the kernel gives of this product, or a value near it, and which of ``output`` may be it.

        By exact sums the kernel's is within two roundings of a float64 sum, itself within ``2^-40`` of all magnitudes,
        or in the interval of float32 in any order (:mod:`oracle.bounds.ieee32`), of which this is the double. ``near``,
        an accumulator may lose more, and an overflow may be stored as any number.
        """
        if near:
            return about(product, output, max(float32_loss(product.K), LOST))
        schedule = fitting(product, self.failure.call.schedule)
        if schedule is not None:
            value = predict_product(product, schedule, out_dtype=output.dtype)
            return value, same_bits(value, output)
        loss = 2.0**-40 if self.failure.call.schedule is not None else float32_loss(product.K)
        return about(product, output, loss, largest=torch.inf)

    def right_near(self) -> tuple[int, int]:
        """As :meth:`at_most`, ``near``, of the right result of one product."""
        value, agrees = self._agreeing(
            self.piece(0, self.failure.call.parts[0].product), self.views[0].output, near=True
        )
        return self._counted(agrees, ~torch.isnan(value), each=1, of_rows=True)[0]

    def sums_near(self, faults: Sequence[Fault]) -> dict[str, tuple[int, int]]:
        """As :meth:`at_most`, ``near``, of faults of the sum or of the schedule, by the arithmetic that is asked first;
        of the schedule by the first of one instruction and interval."""
        call, result = self.failure.call, dict[str, tuple[int, int]]()
        if len(call.parts) != 1 or not len(self.rows[0]) or not faults:
            return result
        product, view, own = self.piece(0, call.parts[0].product), self.views[0], call.schedule
        size = product.cached("magnitudes", lambda: magnitudes(product))
        for fault in faults:
            by = () if own is None or Stage.SCHEDULE not in fault.changes else (own.instruction, own.interval)
            known = self.failure.mutated.near.setdefault((*self.seen, "sums", *by), {})
            if fault.name not in known:
                schedule = fitting(product, fold(call, (fault,), Stage.SCHEDULE, own))
                value = decode(accumulated(call, product, schedule, (fault,)))
                agrees = around(value, size, view.output, max(float32_loss(product.K), LOST)) & view.failing
                known[fault.name] = count(agrees), count(~torch.isnan(value) & view.failing)
            if (counts := known[fault.name]) is not None:
                result[fault.name] = counts
        return result

    def sums(self, faults: tuple[Fault, ...]) -> list[Sums] | None:
        """Float32 results before the store on the sample of each part, as :meth:`FailingOutput.sums`; with the right
        results by exact sums where the mutant leaves the schedule."""
        call = self.failure.call
        if not all(fault.by_code for fault in faults):
            computed = self.failure.mutated.computed(call, faults)[: len(call.parts)]
            if any(part.product.M != own.product.M for (part, _), own in zip(computed, call.parts, strict=False)):
                return None
            return self.sums_of(computed, faults)
        results = list[tuple[ScaledProduct, Schedule | None]]()
        for i, part in enumerate(call.parts):
            piece = fold(call, faults, Stage.PRODUCT, self.piece(i, part.product))
            results.append((piece, fitting(piece, call.schedule)))
        return self._accumulated(results, faults)

    def sums_of(self, computed: Sequence[tuple[Part, Schedule | None]], faults: tuple[Fault, ...]) -> list[Sums]:
        """:meth:`sums` of the products that the kernel with these faults computes."""
        return self._accumulated([(self.piece(i, p.product), s) for i, (p, s) in enumerate(computed)], faults)

    def _accumulated(
        self, pieces: Sequence[tuple[ScaledProduct, Schedule | None]], faults: tuple[Fault, ...]
    ) -> list[Sums]:
        """:meth:`sums` of the samples of these products."""
        call, result, late = self.failure.call, list[Sums](), not touches(faults, *BEFORE_STORE)
        for i, (piece, schedule) in enumerate(pieces):
            if not len(self.rows[i]):
                continue
            accs = self.right_sums.get(i) if late else None
            if accs is None:
                accs = self.failure.sums(None, piece, schedule, faults)
            if late:
                self.right_sums[i] = accs
            fallen = call.schedule is not None and schedule is None
            if fallen and i not in self.unfaulted:
                own = self.piece(i, call.parts[i].product)
                self.unfaulted[i] = stored(call, accumulated(call, own, None, ()), ())
            result.append((self.views[i], accs, self.unfaulted[i] if fallen else None))
        return result

    def piece(self, i: int, product: ScaledProduct) -> ScaledProduct:
        """The sample of a product that stands for part ``i``; that of the part itself is kept."""
        if i in self.pieces and product is self.failure.call.parts[i].product:
            return self.pieces[i]
        piece = subset(product, self.rows[i], self.columns)
        piece = piece if piece.a.device == self.device else piece.to(self.device)
        if product is self.failure.call.parts[i].product:
            self.pieces[i] = piece
        return piece

    def weigh(self, faults: tuple[Fault, ...], pieces: list[Sums] | None) -> Explanation | None:
        """The explanation that these sums give once stored."""
        return self.weigh_stored(faults, self.stored(faults, pieces))

    def about(self, pieces: list[Sums]) -> bool:
        """Whether more than ``LISTED`` of what fails is about one of these sums, as a store that rounds gives it."""
        agreeing = failing = 0
        for view, (acc, *ends), _ in pieces:
            value, exact_ = decode(acc), torch.zeros((), dtype=torch.float64, device=acc.device)
            agrees = around(value, exact_, view.output, 0.0)
            if ends:
                low, high = (decode(end) for end in ends)
                actual = decode(view.output)
                agrees |= (low - NEARLY * low.abs() <= actual) & (actual <= high + NEARLY * high.abs())
            agreeing += int(((agrees | torch.isnan(value)) & view.failing).sum())
            failing += count(view.failing)
        return agreeing > LISTED * failing

    def covers(self, faults: tuple[Fault, ...], pieces: list[Sums] | None) -> bool:
        """Whether the share of :meth:`weigh` is above ``LISTED``; most often no agrees so rarely that none is counted.

        What is explained agrees, and what fails is known where the prediction is not NaN.
        """
        predictions = self.stored(faults, pieces)
        agreeing = sum(int((view.failing & p.agrees(view.output)).sum()) for view, p in predictions)
        known = sum(int((view.failing & ~torch.isnan(p.value)).sum()) for view, p in predictions)
        if agreeing <= LISTED * known:
            return False
        result = self.weigh_stored(faults, predictions)
        return result is not None and result.share > LISTED

    def stored(self, faults: tuple[Fault, ...], pieces: list[Sums] | None) -> list[tuple[View, Prediction]]:
        """What these sums predict."""
        results = []
        for view, accs, unfaulted in pieces or ():
            values = (stored(self.failure.call, acc, faults) for acc in accs)
            results.append((view, Prediction.between(*values, unfaulted=unfaulted)))
        return results

    def weigh_stored(
        self, faults: tuple[Fault, ...], predictions: Sequence[tuple[View, Prediction]]
    ) -> Explanation | None:
        """The explanation that these predictions give together."""
        total: Explanation | None = None
        for view, predicted in predictions:
            one = self.failure.weigh(faults, predicted, view)
            total = one if total is None else total.joined(one)
        return total


def float32_loss(k: int) -> float:
    """What a float32 sum of ``k`` products in any order loses at most, of the sum of all magnitudes."""
    return 2.0**-23 * (k + 8)


def about(
    product: ScaledProduct, output: Tensor, loss: float, *, largest: float | None = None
) -> tuple[Tensor, Tensor]:
    """The value of a product without bias and summand, float64 ``[M, N]``, and which of ``output`` (its dtype, the same
    shape) have about it, bool (:func:`around`)."""
    left, right = scaled_operands(product)
    value = left @ right.T * product.factor
    return value, around(value, left.abs() @ right.abs().T * abs(product.factor), output, loss, largest=largest)


def about_at(product: ScaledProduct, rows: Tensor, columns: Tensor, output: Tensor, loss: float) -> Tensor:
    """Which of ``output [n]`` (any float dtype) have about the values of the elements of a product at these ``rows``
    and ``columns`` (int64 ``[n]``), without bias and summand, bool (:func:`around`)."""
    left, right, factor = product.left, product.right, product.factor
    of_rows = left.scales if len(left.scales) == 1 else left.scales[rows]
    terms = scaled_codes(left.value_of(rows), of_rows, product.block)
    terms *= scaled_codes(right.value_of(columns), right.scales[columns // product.b_rows], product.block)
    return around(terms.sum(dim=1) * factor, terms.abs_().sum(dim=1) * abs(factor), output, loss)


def around(value: Tensor, size: Tensor, output: Tensor, loss: float, *, largest: float | None = None) -> Tensor:
    """Which of ``output`` (any float dtype) have about a ``value`` (float64, the same shape), bool: up to the roundings
    of a store and this ``loss`` of the sum of all magnitudes, ``size`` (float64). Values of at least the magnitude
    ``largest`` (None: nearly the largest number of the output's dtype) may be stored as numbers of such a magnitude or,
    by way of a NaN, as 0; infinities and NaN of ``output`` are about any."""
    actual = decode(output)
    limit = (1 - NEARLY) * of_dtype(output.dtype).max_finite if largest is None else largest
    away = NEARLY * value.abs() + loss * size + TINY
    over = (value.abs() >= limit) & ((actual.abs() >= limit) | (actual == 0))
    return ((value - actual).abs() <= away) | over | ~actual.isfinite()


class FailingRows:
    """Some failing rows of an output, which refuse most faults that all of it would refuse.

    A fault is kept that acts in the failing elements alone, all of which it explains, or that explains more than it
    contradicts: of the failing elements that it predicts more than half, since it contradicts those that it does not
    explain. So at most half is too little where the sample has all failing rows, and ``HOPELESS`` elsewhere; nothing
    is too little where the sample has all that fails. Not refused here: what predicts NaN for most of it, regroups
    rows, or changes both what comes after the sum and what comes before.

    ``bad``: elements that fail by every arithmetic of a call, most of those of each (None: those of this one). What is
    far from these by one arithmetic is by all, and only asked once.
    """

    def __init__(self, failure: FailingOutput, bad: Tensor | None = None) -> None:
        self.failure, self.bad = failure, failure.bad if bad is None else bad
        bad = self.bad
        at = torch.nonzero(bad.any(dim=1))[:, 0]
        self.enough = LISTED if len(at) <= FEW_ROWS else HOPELESS
        chosen = torch.zeros(len(bad), dtype=torch.bool, device=at.device)
        chosen[at[scattered(len(at))[:FEW_ROWS].to(at.device)]] = True
        rows = [torch.nonzero(part.of(chosen[:, None])[:, 0])[:, 0] for part in failure.call.parts]
        failing = torch.nonzero(bad[chosen].any(dim=0))[:, 0]
        few = spread(failing, FEW_COLUMNS)
        self.sample = self._sample(rows, torch.arange(bad.shape[1], device=at.device), bad)
        self.narrow, self.every = self._sample(rows, few, bad), len(few) == len(failing)
        self.sums = self._with_next(rows)
        self.fewest = self._fewest(at, bad)
        self.all = sum(count(view.failing) for view in self.narrow.views)
        self.complete = self.all == count(bad) and not bool((failure.bad & ~bad).any())
        self.places = spread(places(bad), FEW_PLACES)

    def _sample(self, rows: Sequence[Tensor], columns: Tensor, bad: Tensor) -> Sample:
        views = [self.failure.view(i, own, columns) for i, own in enumerate(rows)]
        if bad is not self.failure.bad:
            wrong = [part.of(bad)[own][:, columns] for part, own in zip(self.failure.call.parts, rows, strict=True)]
            views = [replace(view, bad=mask) for view, mask in zip(views, wrong, strict=True)]
        return Sample(self.failure, rows, columns, views)

    def _fewest(self, at: Tensor, bad: Tensor) -> Sample:
        """Of one product so few of the rows ``at`` that fail, and all columns, that enough elements fail there."""
        order = at[scattered(len(at))[:FEW_ROWS].to(at.device)]
        failing = bad[order].sum(dim=1).cumsum(dim=0)
        most = int((failing < FEW_PLACES).sum()) + 1
        if len(self.failure.call.parts) != 1 or most >= len(order):
            return self.sums
        chosen = torch.zeros(len(bad), dtype=torch.bool, device=at.device)
        chosen[order[: max(most, FEWEST_ROWS)]] = True
        rows = torch.nonzero(self.failure.call.parts[0].of(chosen[:, None])[:, 0])[:, 0]
        return self._with_next([rows])

    def _with_next(self, rows: Sequence[Tensor]) -> Sample:
        """Some rows of each part and, since a sum may run on into it, the row behind each, of which nothing counts."""
        columns = self.sample.columns
        both = [torch.unique(torch.cat([own, own + 1])) for own in rows]
        both = [own[own < part.product.M] for own, part in zip(both, self.failure.call.parts, strict=True)]
        result = self._sample(both, columns, self.bad)
        counted = [torch.isin(every, own)[:, None] for every, own in zip(both, rows, strict=True)]
        result.views = [
            replace(v, bad=v.bad & of.to(result.device)) for v, of in zip(result.views, counted, strict=True)
        ]
        return result

    def kept(self, faults: Iterable[Fault]) -> Iterator[Fault]:
        """The ``faults``, in their order, that are not refused: first those that are computed together, on some of the
        columns in which these rows fail."""
        for some in batches(faults):
            far = self.far(some)
            left = [fault for fault in some if fault.name not in far]
            hopeless = {n for n, counts in self.narrow.at_most(left).items() if self._too_few(*counts)}
            yield from (fault for fault in left if fault.name not in hopeless and not self.refuse(fault))

    def far(self, faults: Sequence[Fault]) -> set[str]:
        """Names of those whose values are far from what fails, by any arithmetic."""
        result, of = self.narrow.at_most(faults, near=True), dict[str, int]()
        for sample, stage in ((self.fewest, Stage.SUM), (self.narrow, Stage.SCHEDULE)):
            sums = sample.sums_near([fault for fault in faults if set(fault.changes) == {stage}])
            result |= sums
            of |= dict.fromkeys(sums, sum(count(view.failing) for view in sample.views))
        far = {name for name, counts in result.items() if self._too_few(*counts, of.get(name, self.all))}
        unknown = (fault for fault in faults if fault.name in result and fault.name not in far)
        return far | {
            fault.name for fault in unknown if result[fault.name][1] < self.all and self._far_where_known(fault)
        }

    def settles(self, faults: Sequence[Fault], others: Sequence[Schedule | None]) -> bool:
        """Whether by none of these ``others`` the arithmetic, with one of these ``faults`` of the call and a store that
        rounds or without, gives what fails: each gives something far from it."""
        own = self.failure.call.schedule
        if own is None or len(self.failure.call.parts) != 1 or not self._too_few(*self.narrow.right_near()):
            return False
        if any(s is not None and (s.instruction, s.interval) != (own.instruction, own.interval) for s in others):
            return False
        stores = (fault for fault in faults if set(fault.changes) == {Stage.STORE})
        if not all(map(self.failure.rounds, stores)):
            return False
        far = self.far(faults)
        rest = (fault for fault in faults if fault.name not in far)
        return all(set(fault.changes) == {Stage.WRITE} and self._refuse_written(fault, near=True) for fault in rest)

    def _far_where_known(self, fault: Fault) -> bool:
        """The same of a fault that leaves some of what fails unknown: asked of some of the rest of it, if any."""
        known = self.failure.mutated.far
        key = fault.name, self.narrow.seen
        if key not in known:
            known[key] = not set(fault.changes) & {Stage.SUM, Stage.STORE} and self._far_elsewhere(fault)
        return known[key]

    def _far_elsewhere(self, fault: Fault) -> bool:
        (part,), output = self.failure.call.parts, self.failure.output
        bad, product = part.of(self.bad), self.failure.mutated.alone(fault)
        if product is None or bool(torch.isnan(part.of(output)[bad]).any()):
            return False
        rows, columns = (~(torch.isnan(x.scales).any(dim=1)) for x in (product.left, product.right))
        rows = rows.expand(product.M) & ~_nan_rows(product.left)
        columns = columns.repeat_interleave(product.b_rows)[: product.N] & ~_nan_rows(product.right)
        rest = places(bad & rows[:, None] & columns[None, :])
        at = spread(rest, FEW_PLACES)
        if not len(at):
            return True
        places_of = at // product.N, at % product.N
        actual = part.of(output)[places_of]
        agrees = count(about_at(product, *places_of, actual, max(float32_loss(product.K), LOST)))
        return agrees <= HOPELESS * len(at) if len(rest) >= ENOUGH else not agrees

    def _too_few(self, agrees: int, known: int, of: int | None = None) -> bool:
        """Whether so many failing elements of those that are known, of these few (None: of ``narrow``), are no more
        than chance explains."""
        few = (known == (self.all if of is None else of) or known >= ENOUGH) and agrees <= HOPELESS * known
        return few or self.complete and not agrees

    def refuse(self, fault: Fault) -> bool:
        """Whether so little of what fails in these rows is explained that the fault is none of those that are kept."""
        if set(fault.changes) == {Stage.WRITE}:
            return self._refuse_written(fault)
        if not set(fault.changes) <= set(BEFORE_STORE):
            return False
        if not fault.by_code and self.failure.mutated.products((fault,)).regrouped:
            return False
        if touches((fault,), Stage.SUM):  # it may mix columns
            return self._explains(fault, self.sums, self.enough) is False
        if self.every:
            return self._explains(fault, self.narrow, self.enough) is False
        few = self._explains(fault, self.narrow, HOPELESS)
        return few is False or few is True and self._explains(fault, self.sample, self.enough) is False

    def _refuse_written(self, fault: Fault, *, near: bool = False) -> bool:
        """The same of the last stage, on some of the failing elements. Where it writes none of these it may be named by
        position. ``near``: by any arithmetic."""
        predicted = self.failure.predict((fault,)).at(self.places)
        known, output = ~torch.isnan(predicted.value), self.failure.output.flatten()[self.places]
        agrees = predicted.agrees(output) & known
        if near:
            agrees = around(decode(predicted.value), self._largest, output, LOST) & known
        n, all_known = int(known.sum()), bool(known.all())
        if not n:
            return False
        complete = len(self.places) == self.failure.failing
        enough = all_known or n >= ENOUGH
        return (enough and int(agrees.sum()) <= HOPELESS * n) or (complete and not bool(agrees.any()))

    @cached_property
    def _largest(self) -> Tensor:
        """Above the sum of the magnitudes of all terms of any element: both largest norms multiplied (Cauchy)."""
        norms = (x.norm(dim=1).max() for x in scaled_operands(self.failure.call.parts[0].product))
        return torch.stack(list(norms)).prod().nan_to_num(nan=torch.inf) * abs(
            self.failure.call.parts[0].product.factor
        )

    def _explains(self, fault: Fault, sample: Sample, enough: float) -> bool | None:
        """Whether a fault explains more than this share of what fails in a sample; None where it predicts a NaN there,
        or nothing fails."""
        faults = (fault,)
        if fault.by_code:
            sums = sample.sums(faults)
        else:
            sums = sample.sums_of(self.failure.mutated.computed(self.failure.call, faults), faults)
        predictions = sample.stored(faults, sums)
        if any(bool(torch.isnan(predicted.value).any()) for _, predicted in predictions):
            return None
        result = sample.weigh_stored(faults, predictions)
        return None if result is None else result.share > enough


def batches(faults: Iterable[Fault]) -> Iterator[list[Fault]]:
    """The faults in their order, as many as are computed together."""
    rest, size = iter(faults), TOGETHER[0]
    while some := list(islice(rest, size)):
        yield some
        size = TOGETHER[1]


def _nan_rows(side: Decoded) -> Tensor:
    """Rows of codes with a NaN, bool ``[R]``."""
    if bool(side.finite_rows.all()):
        return ~side.finite_rows
    return torch.isnan(side.value()).any(dim=1)


def rounds(call: Call, store: Fault) -> bool:
    """Whether a fault of the store gives about the value (:func:`around`), as a rounding does."""
    acc = torch.logspace(-30, 40, 141, base=2.0, dtype=torch.float32, device="cpu")
    acc = torch.cat([acc, -acc, acc.new_tensor([0.0, -0.0])])[None]
    return bool(around(decode(acc), torch.zeros_like(acc), stored(call, acc, (store,)), 0.0).all())


def correlates(output: Tensor, wanted: Tensor, where: Tensor) -> bool:
    """Whether the values of ``output`` at ``where`` correlate with those of ``wanted``, row by row.

    ``output``, ``wanted`` (floating) and ``where`` (bool) are ``[M, N]``; NaN and infinite elements of either are left
    out, and rows of fewer than three. Under independence the sum of ``(n - 1) r`` over rows of ``n`` elements has the
    variance of the sum of ``n - 1`` (Pearson's ``r``). Where all rows are too short for that, columns are compared.
    """
    x, y = (t if t.dtype == torch.float64 else decode(t) for t in (output, wanted))
    inside = where & torch.isfinite(x) & torch.isfinite(y)
    if not bool((inside.sum(dim=1) > 2).any()):
        x, y, inside = x.t(), y.t(), inside.t()
    count = inside.sum(dim=1, keepdim=True)

    def centred(values: Tensor) -> Tensor:
        remaining = torch.where(inside, values, torch.zeros_like(values))
        remaining = torch.where(
            inside, remaining - remaining.sum(dim=1, keepdim=True) / count.clamp(min=1), torch.zeros_like(remaining)
        )
        return remaining / remaining.abs().amax(dim=1, keepdim=True).clamp(min=2.0**-1000)

    x, y, free = centred(x), centred(y), (count[:, 0] - 1).to(torch.float64)
    size = x.norm(dim=1) * y.norm(dim=1)
    usable = (free > 1) & (size > 0)
    r = (x * y).sum(dim=1)[usable] / size[usable]
    return bool((r * free[usable]).sum().abs() > DEVIATIONS * free[usable].sum().sqrt())


def other_groups(failure: FailingOutput) -> list[tuple[int, int, str]]:
    """Parts that fail and correlate with a product with operands of another part: ``(part, other, which operands)``.

    A part counts when its failing values correlate with that product and not with the right one. Of more than
    :data:`PAIRED` parts as many are asked, evenly spaced.
    """
    parts, result = failure.call.parts, []
    asked = evenly(torch.arange(len(parts), device="cpu"), PAIRED).tolist()
    for i, part in ((i, parts[i]) for i in asked):
        bad, output = part.of(failure.bad), part.of(failure.output)
        if not bool(bad.any()) or correlates(output, part.of(failure.right), bad):
            continue
        for j, other in ((j, parts[j]) for j in asked):
            p, q = part.product, other.product
            if i == j or (p.N, p.K, p.b_rows) != (q.N, q.K, q.b_rows):
                continue
            for text, b, scale in (("codes", q.b, p.b_scale), ("codes and scales", q.b, q.b_scale)):
                if correlates(output, exact(replace(p, b=b, b_scale=scale)).hi, bad):
                    result.append((i, j, text))
                    break
    return result


def speaks(values: Tensor) -> bool:
    """Whether ``values``, an output of any shape and dtype, holds two different finite values other than 0; one that
    does not is evidence for nothing."""
    numbers = decode(values) if values.is_floating_point() else values.to(torch.float64)
    numbers = numbers[torch.isfinite(numbers) & (numbers != 0)]
    return bool((numbers != numbers[0]).any()) if len(numbers) else False


def varied(values: Tensor) -> bool:
    """Whether so many bits of ``values`` (any shape and dtype) differ from the most frequent ones that no wrong
    candidate has them by chance, nor one that predicts a constant for an output that is constant."""
    counts = torch.unique(codes_of(values), return_counts=True)[1]
    return len(counts) > 0 and int(counts.sum() - counts.max()) >= COINCIDENCES


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """``torch.cat`` of ``tensors`` of any one dtype, ``[m, ...]`` each, for float8 too, which torch cannot join on
    every device. Returns ``[sum of m, ...]`` in their dtype; no values are read."""
    if tensors[0].element_size() > 1:
        return torch.cat(list(tensors))
    return torch.cat([x.view(torch.uint8) for x in tensors]).view(tensors[0].dtype)


def evenly(at: Tensor, most: int) -> Tensor:
    """At most ``most`` of the entries of ``at [n]`` (int64), evenly spaced, int64 in their order."""
    return at[:: max(1, -(-len(at) // most))]


def scattered(n: int) -> Tensor:
    """The numbers up to ``n`` in an order of no regular step, of which the first ones lie everywhere; int64 ``[n]``."""
    return torch.frac(torch.arange(1, n + 1, dtype=torch.float64, device="cpu") * GOLDEN).argsort()


def spread(at: Tensor, most: int) -> Tensor:
    """At most ``most`` of the entries of ``at [n]`` (int64), in no regular step, int64 in their order. Multiples of the
    golden ratio lie at least ``1 / (3 most)`` apart, so that no entry is taken twice."""
    if len(at) <= 3 * most:
        return evenly(at, most)
    return at[(_steps(most) * len(at)).long().to(at.device)]


@lru_cache(maxsize=8)
def _steps(most: int) -> Tensor:
    """So many multiples of the golden ratio modulo 1, in their order, float64 ``[most]``."""
    return torch.frac(torch.arange(1, most + 1, dtype=torch.float64, device="cpu") * GOLDEN).sort().values


def rows_of_output(part: Part, rows: Tensor) -> Tensor:
    """``rows [m]`` of a part as rows of the output, both int64."""
    return rows if part.rows is None else part.rows[rows]


def half_failing(failing: Tensor, count: int) -> Tensor:
    """At most ``count`` indices ``[n]``, int64 and rising, of a mask ``failing [M]``, bool: up to half of them of True
    ones, each half evenly spaced."""
    chosen = [evenly(torch.nonzero(mask)[:, 0], count // 2) for mask in (failing, ~failing)]
    return torch.cat(chosen).sort().values
