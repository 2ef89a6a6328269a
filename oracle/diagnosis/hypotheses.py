"""Hypotheses about a wrong product: the right kernel with a fault in it predicts bits, and is weighed by them.

A hypothesis is worth the failing elements whose bits it reproduces or, where the order of summation is unknown, that
lie in the interval of the mutated product (float32 in any order, stored as the mutant stores). It says nothing about
elements that depend on memory beyond a buffer, and a right result there speaks against it; where that is all that
fails, :mod:`oracle.diagnosis.least_squares` asks whether the output is at least of its form. It is tried on all of a small call. Of a
large one, faults inside the product are tried on a sample of its rows and columns, faults of the output on all of it.
A race may leave any part of what it changes right: it is told by its place. Where no single fault explains half of the
failing elements, pairs of a fault and a wrong store are tried. A fault that leaves elements unwritten predicts no
bits; it explains by place when all that fails lies where it writes nothing and the values there do not follow the
right ones. A fault that reproduces all that fails, where all the rest is right, is at work in that region alone. Not
covered: three faults at once; contracts that are no product
(:mod:`oracle.diagnosis.diagnose` compares whole outputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from oracle.bounds import Interval
from oracle.bounds.engines import exact
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.diagnosis.explanations import LISTED, Explanation, joined, ranked
from oracle.diagnosis.least_squares import beyond_buffer
from oracle.numbers.formats import codes_of, decode, same_bits
from oracle.routines.catalogue import Call, Fault, Stage
from oracle.routines.fault import fold, touches
from oracle.routines.mutants import accumulated, products, stored, write
from oracle.tensorcore.identify import subset
from oracle.tensorcore.schedules import Schedule
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.products import COINCIDENCES, Part, interval_of

WHOLE = 1 << 28  # products of one hypothesis up to which all of the output is predicted
SAMPLE = (96, 192)  # rows and columns of a larger one
PAIR_SAMPLE = (12, 96)  # rows and columns on which pairs of faults are tried first
INNER = (Stage.READ, Stage.PRODUCT, Stage.SCHEDULE, Stage.SUM)  # what the sums before the store depend on
Grid = tuple[Tensor, Tensor]
Sums = tuple[Grid, tuple[Tensor, ...], Tensor | None]
CHANCE = 0.25  # share of right results beyond a buffer above which the hypothesis is contradicted there
DEVIATIONS = 5.0  # values that do not follow others correlate by more standard errors once in a million


@dataclass(frozen=True)
class Predicted:
    """What a hypothesis says of every element: the bits ``value`` or, where the order of summation is unknown, all that
    lies between the ``ends``. ``own`` is what its arithmetic gives without the fault, if that is not the view's."""

    value: Tensor
    ends: tuple[Tensor, Tensor] | None = None
    own: Tensor | None = None

    def agrees(self, output: Tensor) -> Tensor:
        """Elements of ``output`` that may be what it says; any NaN is any NaN."""
        same = same_bits(output, self.value)
        if self.ends is None:
            return same
        actual, (x, y) = decode(output), (decode(end) for end in self.ends)
        return same | ((torch.minimum(x, y) <= actual) & (actual <= torch.maximum(x, y)))


class View:
    """One output seen against one arithmetic: the right prediction, what fails, and what a hypothesis explains.

    ``outside`` are the elements that the judgement refuses; those of them that are right by this arithmetic do not fail
    (all of ``outside``, where that would leave none).
    """

    def __init__(self, call: Call, output: Tensor, outside: Tensor) -> None:
        self.call, self.output = call, output
        self.widths: dict[int, Interval] = {}
        right = self.predict(())
        self.right = right.value
        self.specified = self._specified()
        agrees = right.agrees(output)
        self.equal = int((same_bits(output, self.right) & self.specified).sum())
        outside = outside & self.specified
        self.bad = outside & ~agrees if bool((outside & ~agrees).any()) else outside
        self.failing, self.total = int(self.bad.sum()), int(self.specified.sum())

    @cached_property
    def exactly(self) -> View:
        """The same output seen against exact sums."""
        return self if self.call.schedule is None else View(replace(self.call, schedule=None), self.output, self.bad)

    def predict(self, faults: tuple[Fault, ...]) -> Predicted:
        """The whole output of a kernel with these faults."""
        call, computed = self.call, products(self.call, faults)
        if call.schedule is not None:
            fallen = any(schedule is None for _, schedule in computed)
            return Predicted(write(call, computed, faults), own=self.exactly.right if fallen else None)
        made = self._gathered(computed, faults) if touches(faults, *INNER, Stage.STORE) else self.gathered
        value, low, high = (fold(call, faults, Stage.WRITE, out) for out in made)
        return Predicted(value, (low, high))

    @cached_property
    def gathered(self) -> list[Tensor]:
        """By exact sums, the right output ``[R, N]`` before the last stage and the ends of what right sums give."""
        return self._gathered(products(self.call, ()), ())

    def _gathered(self, computed: Sequence[tuple[Part, Schedule | None]], faults: tuple[Fault, ...]) -> list[Tensor]:
        call, first = self.call, computed[0][0].product
        made = [
            torch.full((call.rows, first.N), torch.nan, dtype=call.out_dtype, device=first.a.device) for _ in range(3)
        ]
        for i, (part, schedule) in enumerate(computed):
            for out, acc in zip(made, self.sums(i, part.product, schedule, faults), strict=True):
                out[part.place] = stored(call, acc, faults)
        return made

    def sums(
        self, i: int | None, product: ScaledProduct, schedule: Schedule | None, faults: tuple[Fault, ...]
    ) -> tuple[Tensor, ...]:
        """Float32 results of one product before the store; by exact sums also the ends of what right sums give.

        ``i`` numbers the part, whose interval is kept where no fault changes the product; None keeps nothing.
        """
        acc = accumulated(self.call, product, schedule, faults)
        if self.call.schedule is not None:
            return (acc,)
        if i is None or touches(faults, Stage.READ, Stage.PRODUCT):
            width = interval_of(product, IEEE32)
        else:
            if i not in self.widths:
                self.widths[i] = interval_of(product, IEEE32)
            width = self.widths[i]
        infinity = torch.tensor(torch.inf, dtype=torch.float32, device=acc.device)
        low, high = ((decode(acc) + end).to(torch.float32) for end in (width.lo, width.hi))
        return acc, torch.nextafter(low, -infinity), torch.nextafter(high, infinity)

    def rank(self, faults: Sequence[Fault]) -> tuple[Explanation, ...]:
        """Explanations of at least one failing element that contradict less than they explain, best first.

        A fault that only leaves elements unwritten explains by place.
        """
        fitting = [fault for fault in faults if fault.applies(self.call) is None]
        small = work(self.call.parts) <= WHOLE
        sample = None if small else Sample(self, SAMPLE)
        found = []
        for fault in fitting:
            at_end = set(fault.changes) <= {Stage.WRITE}
            explanation = (
                self._try((fault,)) if small or at_end else None if sample is None else sample.attempt((fault,))
            )
            if explanation is not None and at_end and explanation.explained == 0:
                explanation = self._by_place(fault, explanation)
            if explanation is not None and (
                explanation.local or explanation.explained + explanation.placed > explanation.contradicted
            ):
                found.append(explanation)
        return ranked(found)

    def further(self, faults: Sequence[Fault], known: Sequence[Explanation]) -> tuple[Explanation, ...]:
        """The ``known`` with pairs of faults and scales from beyond a buffer, where none of them covers half."""
        fitting = [fault for fault in faults if fault.applies(self.call) is None]
        small, found = work(self.call.parts) <= WHOLE, list(known)
        if not any(e.share >= LISTED or e.placed for e in found):
            found += self._pairs(fitting, None if small else Sample(self, SAMPLE))
        if small and not any(e.share >= LISTED or e.placed for e in found):
            name = self.call.schedule.name if self.call.schedule is not None else "exact sums"
            found += [
                Explanation(f.name, name, 0, self.failing, 0, 0, f.met_in, placed=self.failing, beyond=True)
                for f in beyond_buffer(self.call, self.output, self.bad, fitting)
            ]
        return ranked(found)

    def _pairs(self, faults: Sequence[Fault], sample: Sample | None) -> list[Explanation]:
        """Pairs of a fault and a wrong store: a few elements first, then what explains those."""
        stores = [fault for fault in faults if set(fault.changes) == {Stage.STORE}]
        inner = [fault for fault in faults if not set(fault.changes) & {Stage.STORE, Stage.WRITE}]
        few, found = Sample(self, PAIR_SAMPLE), []
        for first in inner:
            pieces = few.sums((first,))
            for second in stores:
                guess = few.weigh((first, second), pieces)
                if guess is not None and guess.share > LISTED:
                    whole = self._try((first, second)) if sample is None else sample.attempt((first, second))
                    if whole is not None and whole.explained > whole.contradicted:
                        found.append(whole)
        return found

    def _try(self, faults: tuple[Fault, ...]) -> Explanation:
        if self.call.schedule is not None and len(faults) == 1 and set(faults[0].changes) <= {Stage.WRITE}:
            predicted = Predicted(faults[0].changes[Stage.WRITE](self.call, self.right))
        else:
            predicted = self.predict(faults)
        return self.weigh(faults, predicted, self.output, self.right, self.bad, self.specified)

    def _by_place(self, fault: Fault, explanation: Explanation) -> Explanation:
        """With the failing elements counted where a fault of the store writes nothing, if they are just those and hold
        nothing that follows the right values."""
        unwritten = torch.isnan(decode(fault.changes[Stage.WRITE](self.call, self.right))) & self.specified
        unwritten &= ~torch.isnan(decode(self.right))
        count = int(unwritten.sum())
        beside, right_there = int((self.bad & ~unwritten).sum()), int((unwritten & ~self.bad).sum())
        if beside or explanation.contradicted or not 0 < count < self.total or right_there > CHANCE * count:
            return explanation
        if follows(self.output, self.right, self.bad) or other_groups(self):
            return explanation
        return replace(explanation, placed=self.failing)

    def weigh(
        self,
        faults: tuple[Fault, ...],
        predicted: Predicted,
        output: Tensor,
        right: Tensor,
        bad: Tensor,
        specified: Tensor,
    ) -> Explanation:
        """How well a prediction does on the elements that it speaks of."""
        unknown = torch.isnan(decode(predicted.value)) & ~torch.isnan(decode(right)) & ~torch.isnan(decode(output))
        unknown &= specified
        right_there = unknown & ~bad  # other data would seldom give the right bits
        known = specified & ~unknown
        if int(right_there.sum()) > CHANCE * int(unknown.sum()):
            known |= right_there
        agrees = predicted.agrees(output)
        said = agrees & ~same_bits(predicted.value, right if predicted.own is None else predicted.own)
        name = self.call.schedule.name if self.call.schedule is not None else "exact sums"
        contradicted = known & ~agrees
        explained, failing = int((bad & known & said).sum()), int((bad & known).sum())
        told = all(f.race for f in faults) and bool((specified & same_bits(predicted.value, right)).any())  # by place
        beside = bool(contradicted.any()) and not bool((contradicted & ~same_bits(output, right)).any())
        return Explanation(
            " and ".join(fault.name for fault in faults),
            name,
            explained,
            failing,
            int(known.sum()),
            int(contradicted.sum()),
            "; ".join(fault.met_in for fault in faults),
            local=beside and explained == failing > 0 and (told or telling(predicted.value[bad & known])),
        )

    def _specified(self) -> Tensor:
        inside = torch.zeros(self.output.shape, dtype=torch.bool, device=self.output.device)
        for part in self.call.parts:
            inside[slice(None) if part.rows is None else part.rows] = True
        return inside


class Sample:
    """Some rows and columns of each part of a large call, failing ones among them."""

    def __init__(self, view: View, size: tuple[int, int]) -> None:
        self.view = view
        self.own: dict[int, Tensor] = {}
        self.right: dict[int, tuple[Tensor, ...]] = {}
        self.columns = _some(view.bad.any(dim=0), size[1])
        self.rows = []
        for part in view.call.parts:
            own = view.bad if part.rows is None else view.bad[part.rows]
            self.rows.append(_some(own.any(dim=1), size[0]))

    def attempt(self, faults: tuple[Fault, ...]) -> Explanation | None:
        """The faults' explanation on the sample; None for faults that regroup the rows."""
        return self.weigh(faults, self.sums(faults))

    def sums(self, faults: tuple[Fault, ...]) -> list[Sums] | None:
        """Float32 results before the store on the sample of each part, as :meth:`View.sums`, with their places in the
        output and, where the mutant leaves the schedule, the right results by exact sums."""
        call, found, late = self.view.call, [], not touches(faults, *INNER)
        for i, (part, schedule) in enumerate(products(call, faults)[: len(call.parts)]):
            original, rows = call.parts[i], self.rows[i]
            if part.product.M != original.product.M:
                return None
            at = rows if original.rows is None else original.rows[rows]
            accs = self.right.get(i) if late else None
            if accs is None:
                accs = self.view.sums(None, subset(part.product, rows, self.columns), schedule, faults)
            if late:
                self.right[i] = accs
            own = self._right(i) if call.schedule is not None and schedule is None else None
            found.append(((at[:, None], self.columns[None, :]), accs, own))
        return found

    def _right(self, i: int) -> Tensor:
        """The right results of part ``i`` by exact sums."""
        if i not in self.own:
            product = subset(self.view.call.parts[i].product, self.rows[i], self.columns)
            self.own[i] = stored(self.view.call, accumulated(self.view.call, product, None, ()), ())
        return self.own[i]

    def weigh(self, faults: tuple[Fault, ...], pieces: list[Sums] | None) -> Explanation | None:
        """The explanation that these sums give once stored."""
        view, total = self.view, None
        for grid, accs, own in pieces or ():
            value, *ends = (stored(view.call, acc, faults) for acc in accs)
            predicted = Predicted(value, (ends[0], ends[1]) if ends else None, own)
            cut = (view.output[grid], view.right[grid], view.bad[grid], view.specified[grid])
            one = view.weigh(faults, predicted, *cut)
            total = one if total is None else joined(total, one)
        return total


def follows(output: Tensor, wanted: Tensor, where: Tensor) -> bool:
    """Whether the values of ``output`` at ``where`` correlate with those of ``wanted``, row by row.

    ``[M, N]`` each, floating; elements that are not finite in both are left out, and rows of fewer than three. Under
    independence the sum of ``(n - 1) r`` over rows of ``n`` elements has the variance of the sum of ``n - 1``
    (Pearson's ``r``). Of rows too short for that the columns are asked.
    """
    x, y = (t if t.dtype == torch.float64 else decode(t) for t in (output, wanted))
    inside = where & torch.isfinite(x) & torch.isfinite(y)
    count = inside.sum(dim=1, keepdim=True)
    if not bool((count > 2).any()):
        if not bool((inside.sum(dim=0) > 2).any()):
            return False
        x, y, inside = x.t(), y.t(), inside.t()
        count = inside.sum(dim=1, keepdim=True)

    def centred(values: Tensor) -> Tensor:
        kept = torch.where(inside, values, torch.zeros_like(values))
        kept = torch.where(inside, kept - kept.sum(dim=1, keepdim=True) / count.clamp(min=1), torch.zeros_like(kept))
        return kept / kept.abs().amax(dim=1, keepdim=True).clamp(min=2.0**-1000)

    x, y, free = centred(x), centred(y), (count[:, 0] - 1).to(torch.float64)
    size = x.norm(dim=1) * y.norm(dim=1)
    usable = (free > 1) & (size > 0)
    r = (x * y).sum(dim=1)[usable] / size[usable]
    return bool((r * free[usable]).sum().abs() > DEVIATIONS * free[usable].sum().sqrt())


def other_groups(view: View) -> list[tuple[int, int, str]]:
    """Parts that fail and follow a product with operands of another part: ``(part, other, which operands)``.

    A part counts when its failing values follow that product and not the right one.
    """
    parts, found = view.call.parts, []
    for i, part in enumerate(parts):
        bad, output = part.of(view.bad), part.of(view.output)
        if not bool(bad.any()) or follows(output, part.of(view.right), bad):
            continue
        for j, other in enumerate(parts):
            p, q = part.product, other.product
            if i == j or p.N != q.N or p.b_rows != q.b_rows:
                continue
            for said, b, scale in (("codes", q.b, p.b_scale), ("codes and scales", q.b, q.b_scale)):
                if follows(output, exact(replace(p, b=b, b_scale=scale)).hi, bad):
                    found.append((i, j, said))
                    break
    return found


def telling(values: Tensor) -> bool:
    """Whether so many of the predicted bits differ from the most frequent ones that no wrong hypothesis has them by
    chance, nor one that predicts a constant where a constant stands."""
    counts = torch.unique(codes_of(values), return_counts=True)[1]
    return len(counts) > 0 and int(counts.sum() - counts.max()) >= COINCIDENCES


def _some(wanted: Tensor, count: int) -> Tensor:
    """At most ``count`` places: wanted ones evenly, and as many of the others."""
    chosen = []
    for mask in (wanted, ~wanted):
        at = torch.nonzero(mask)[:, 0]
        step = max(1, -(-len(at) // (count // 2)))
        chosen.append(at[::step])
    return torch.cat(chosen).sort().values


def work(parts: Sequence[Part]) -> int:
    """Products of all parts."""
    return sum(part.product.M * part.product.N * part.product.K for part in parts)
