"""The explanation of a large failing output on a sample of it, confirmed on the whole, on the device of the data.

The budget is a number of evaluations, so that the same call has the same answer on every machine:

    1. rows and tiles that stand elsewhere, guessed on a few failing ones (:mod:`oracle.diagnosis.localise`)
    2. faults before the last stage, each on ``FEW`` rows and columns of which half fail; what explains all of them is
       compared with the whole at once, else the ``CONFIRMED`` best that explain half
    3. faults of the last stage: on the output near the right one, then on the right one
    4. other operands in some rows, columns or K blocks, guessed on a few failing ones

The arithmetic is the admitted one with the most equal bits in the few rows and columns, exact sums among them where
none is declared. The first candidate that reproduces the whole output ends it; else the best one that reproduces all
that fails is named, with what it leaves open (:class:`oracle.diagnosis.candidates.Explanation`).

Not covered: pairs of a fault and a wrong store, scales from beyond a buffer, findings in words, other candidates that
explain the output as well: :func:`oracle.diagnosis.explain.diagnose` has all of these, without a budget.

NaN is treated as of a small output (:mod:`oracle.diagnosis.candidates`).
Source: derived in this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from oracle.diagnosis.candidates import (
    LISTED,
    Explanation,
    FailingOutput,
    Piece,
    Prediction,
    Sample,
    View,
    evenly,
    ranked,
    rows_of_output,
    speaks,
)
from oracle.diagnosis.localise import moved, replaced
from oracle.numbers.formats import decode, same_bits
from oracle.routines.catalogue import Call, Fault, Stage
from oracle.routines.mutants import accumulated, stored
from oracle.tensorcore.identify import subset
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Schedule
from oracle.verdict.compare import Failing
from oracle.verdict.pattern import count, places
from oracle.verdict.products import COINCIDENCES

FEW = (8, 16)  # rows and columns on which every fault is tried
TOLD_APART = (8, 128)  # those on which arithmetics are compared, some of which differ in few bits
BAND, BAND_ON_DEVICE = 1 << 19, 1 << 25  # elements of the whole that are compared at a time
ERRORS = 4.0  # standard errors of a count, above which it is no chance
CONFIRMED = 2  # candidates that are compared with the whole
CLOSELY = 1 << 26  # products of a placement whose intervals are computed; a larger one must have the predicted bits
PLACES = 4096  # failing elements that a fault of the last stage must half explain before it is weighed
APART = 2.0**-8  # of the size of a right result: what two arithmetics may differ by, and more
CLOSE = 2.0**-6  # of a value: what the near result may be off by, and more


class LargeOutput(FailingOutput):
    """A failing output of which the right result is known near, and its bits where they are asked for."""

    def __init__(self, call: Call, output: Tensor, failing: Failing, *, first: bool) -> None:
        self._begin(call, output)
        self.bad, self.failing = failing.bad, count(failing.bad)
        self._near = failing.near
        if first and failing.right is not None:
            vars(self)["right"] = failing.right

    @property
    def near(self) -> Tensor:
        """As of a small output, ``[R, N]`` in the output's dtype; not the right bits everywhere."""
        return self._near

    @property
    def small(self) -> bool:
        return False

    def holds(self, piece: Piece, numerics: str, most: tuple[int, int] | None) -> bool:
        """As of a small output; all of the piece by the bits of this arithmetic, or where its interval costs little."""
        if most is not None or piece.product.M * piece.product.N * piece.product.K <= CLOSELY:
            return super().holds(piece, numerics, most)
        if self.call.schedule is None or numerics != self.numerics:
            return False
        grid = piece.rows[:, None], piece.columns[None, :]
        predicted = predict_product(piece.product, self.call.schedule, out_dtype=self.output.dtype)
        return not bool((self.bad[grid] & ~same_bits(predicted, self.output[grid])).any())

    def view(self, part: int, rows: Tensor, columns: Tensor) -> View:
        """As of a small output, for ``rows [m]`` and ``columns [n]`` (int64); only their right result is computed."""
        whole = self.call.parts[part]
        grid = rows_of_output(whole, rows)[:, None], columns[None, :]
        if "right" in vars(self):
            right = self.right[grid]
        else:
            product = subset(whole.product, rows, columns)
            right = stored(self.call, accumulated(self.call, product, self.call.schedule, ()), ())
        return View(self.output[grid], right, self.bad[grid], self.specified[grid])


def names(
    base: Call,
    output: Tensor,
    failing: Failing,
    numerics: Sequence[str],
    arithmetics: Sequence[Schedule | None],
    faults: Sequence[Fault],
) -> tuple[str, ...]:
    """What explains ``output [R, N]`` (its own dtype) of the call, as :attr:`oracle.diagnosis.explain.Diagnosis.names`
    says it.

    ``numerics`` are the intervals that a placement is judged by, ``arithmetics`` the schedules of a right kernel, the
    first admitted one first (None: exact sums).
    """
    some = evenly(places(failing.bad), PLACES)
    if not speaks(output.flatten()[some]) and not speaks(output[:: max(1, len(output) // 64)]):
        return ()
    failure = _closest(base, output, failing, arithmetics)
    if placed := moved(failure, numerics):
        return (str(placed[0]),)
    best = list[Explanation]()
    for explanation in _confirmed(failure, Sample.half_failing(failure, FEW), faults):
        if explanation.complete:
            return (str(explanation),)
        best.append(explanation)
    if not any(e.local for e in best) and (placed := replaced(failure, numerics)):
        return (str(placed[0]),)
    listed = [e for e in ranked(best) if e.local or e.placed]
    return tuple(str(e) for e in listed[:1])


def _closest(base: Call, output: Tensor, failing: Failing, arithmetics: Sequence[Schedule | None]) -> LargeOutput:
    """The output by the arithmetic that has the most bits of the right elements in some rows and columns; the first one
    that has more than half of them. Where the first of all has not, the one that has the most must have so many more
    that it is no chance: a fault that changes most elements leaves few by which to tell, and where it leaves too few
    that are near the first one's, no other is asked."""
    first = LargeOutput(replace(base, schedule=arithmetics[0]), output, failing, first=True)
    some = Sample.half_failing(first, TOLD_APART)
    right = [view.specified & ~view.bad for view in some.views]
    compared, match = sum(int(r.sum()) for r in right), list[int]()
    near = sum(int((_alike(view.output, view.right) & r).sum()) for view, r in zip(some.views, right, strict=True))
    for schedule in arithmetics:
        call, equal = replace(base, schedule=schedule), 0
        for i, (view, wanted) in enumerate(zip(some.views, right, strict=True)):
            result = view.right
            if match:
                result = stored(call, accumulated(call, some.piece(i, base.parts[i].product), schedule, ()), ())
            equal += int((same_bits(view.output, result) & wanted).sum())
        match.append(equal)
        if 2 * equal >= compared or len(match) == 1 and near <= equal + ERRORS * math.sqrt(compared):
            break
    most = max(range(len(match)), key=lambda number: match[number])
    if most == 0 or match[most] <= match[0] + ERRORS * math.sqrt(compared):
        return first
    return LargeOutput(replace(base, schedule=arithmetics[most]), output, failing, first=False)


def _alike(output: Tensor, right: Tensor) -> Tensor:
    """Elements that another arithmetic may have where one gives ``right``: they differ by less than this of the value
    and of the root mean square."""
    actual, due = decode(output), decode(right)
    size = torch.where(torch.isfinite(due), due, 0.0).square().mean().sqrt()
    return ~((actual - due).abs() > APART * (2 * due.abs() + size))


def _confirmed(failure: LargeOutput, few: Sample, faults: Sequence[Fault]) -> Iterator[Explanation]:
    """What faults explain of the whole: each that explains all of the few, as it comes; then the best of those that
    explain half of them; then those of the last stage."""
    promising = list[tuple[Explanation, Fault]]()
    last = [fault for fault in faults if set(fault.changes) <= {Stage.WRITE}]
    for fault in few.likely(f for f in faults if f not in last and f.applies(failure.call) is None):
        result = few.attempt((fault,))
        if result is not None and result.complete:
            if (whole := _on_the_whole(failure, fault)) is not None:
                yield whole
        elif result is not None and (result.local or result.share >= LISTED):
            promising.append((result, fault))
    order = {e: i for i, e in enumerate(ranked([e for e, _ in promising]))}
    for _, fault in sorted(promising, key=lambda pair: order[pair[0]])[:CONFIRMED]:
        if (whole := _on_the_whole(failure, fault)) is not None:
            yield whole
    for fault in last:
        if fault.applies(failure.call) is None and (written := _written(failure, fault)) is not None:
            yield written


def _on_the_whole(failure: LargeOutput, fault: Fault) -> Explanation | None:
    """What the kernel with this fault explains of every element, some rows at a time; None where it contradicts more.

    A right result need not be known: an element that fails and has the predicted value is explained.
    """
    explained = failing = known = contradicted = elsewhere = 0
    height = max(1, (BAND_ON_DEVICE if failure.output.is_cuda else BAND) // failure.output.shape[1])
    if failure.mutated.products((fault,)).regrouped:
        return None
    computed = failure.mutated.computed(failure.call, (fault,))
    for i, part in enumerate(failure.call.parts):
        for start in range(0, part.product.M, height):
            band = slice(start, min(part.product.M, start + height))
            product, schedule = computed[i][0].product, computed[i][1]
            at = band if part.rows is None else part.rows[band]
            accs = failure.sums(None, product.rows(band.start, band.stop), schedule, (fault,))
            predicted = Prediction.between(*(stored(failure.call, acc, (fault,)) for acc in accs))
            output, bad = failure.output[at], failure.bad[at]
            unknown = torch.isnan(predicted.value) & ~torch.isnan(output)
            wrong = ~(predicted.agrees(output) | unknown)
            counts = (bad & ~wrong & ~unknown, bad & ~unknown, ~unknown, wrong, wrong & bad)
            result = torch.stack([torch.count_nonzero(x) for x in counts]).tolist()
            explained, failing, known = explained + result[0], failing + result[1], known + result[2]
            contradicted, elsewhere = contradicted + result[3], elsewhere + result[4]
        if 2 * contradicted > known and 2 * explained < failing:
            return None
    local = contradicted > 0 and explained == failing > 0 and not elsewhere and failing >= COINCIDENCES
    return Explanation(fault.name, failure.numerics, explained, failing, known, contradicted, fault.seen, local=local)


def _written(failure: LargeOutput, fault: Fault) -> Explanation | None:
    """What a fault of the last stage explains; on the near result it must explain half of some failing elements, which
    it changes."""
    result = fault.changes[Stage.WRITE](failure.call, failure.near)
    at = evenly(failure.failing_places, PLACES)
    few, near = result.flatten()[at], failure.near.flatten()[at]
    predicted, actual = decode(few), decode(failure.output.flatten()[at])
    unknown = torch.isnan(predicted)
    close = ((predicted - actual).abs() <= CLOSE * predicted.abs()) & ~same_bits(few, near)
    if not bool(unknown.all()) and int(close.sum()) < LISTED * int((~unknown).sum()):
        return None
    if failure.call.schedule is None:
        return None
    match = failure.weigh((fault,), Prediction(fault.changes[Stage.WRITE](failure.call, failure.right)))
    if match.explained == 0 and failure.failing >= COINCIDENCES:
        match = failure.named_by_position(fault, match)
    return match if match.local or match.explained + match.placed > match.contradicted else None
