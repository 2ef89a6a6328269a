"""Hypotheses about a wrong product: the right kernel with a fault in it predicts bits, and is weighed by them.

A hypothesis is worth the failing elements whose bits it reproduces. It says nothing about elements that depend on
memory beyond a buffer, and a right result there speaks against it. It is tried on all of a small call. Of a large one,
faults inside the product are tried on a sample of its rows and columns, faults of the output on all of it. Where no
single fault explains half of the failing elements, pairs of a fault and a wrong store are tried. A fault that leaves
elements unwritten predicts no bits; it explains by place when all that fails lies where it writes nothing. Not covered:
three faults at once; contracts that are no product (:mod:`oracle.diagnose` compares whole outputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.faults import Call, Fault, Stage
from oracle.faults.engine import accumulated, products, stored, write
from oracle.formats import codes_of, decode, same_bits
from oracle.judging import Part

WHOLE = 1 << 28  # products of one hypothesis up to which all of the output is predicted
SAMPLE = (96, 192)  # rows and columns of a larger one
PAIR_SAMPLE = (12, 96)  # rows and columns on which pairs of faults are tried first
Grid = tuple[Tensor, Tensor]
CHANCE = 0.25  # share of right results beyond a buffer above which the hypothesis is contradicted there
LISTED = 0.5  # an explanation that covers less than half of the failing elements is not named


@dataclass(frozen=True)
class Explanation:
    """One hypothesis: of ``failing`` elements that it predicts, it reproduces ``explained``; of all it predicts
    ``known``, and contradicts ``contradicted``. ``placed``: the elements that fail, where they are those that it leaves
    unwritten."""

    name: str
    numerics: str
    explained: int
    failing: int
    known: int
    contradicted: int
    met_in: str = ""
    placed: int = 0

    @property
    def share(self) -> float:
        """Part of the failing elements whose bits it reproduces."""
        return self.explained / self.failing if self.failing else 0.0

    @property
    def complete(self) -> bool:
        """It reproduces every element that it predicts."""
        return self.contradicted == 0 and self.explained == self.failing > 0

    def __str__(self) -> str:
        if self.complete:
            return self.name
        if self.placed:
            return f"{self.name} (by place: every failing element, and nothing else, lies there)"
        return f"{self.name} ({100 * self.share:.3g}% of the failing elements)"


class View:
    """One output seen against one arithmetic: the right prediction, what fails, and what a hypothesis explains."""

    def __init__(self, call: Call, output: Tensor) -> None:
        self.call, self.output = call, output
        self.right = write(call, products(call, ()), ())
        self.specified = self._specified()
        self.bad = self.specified & ~self._agree(self.output, self.right)
        self.failing, self.total = int(self.bad.sum()), int(self.specified.sum())

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
            if explanation is not None and explanation.explained + explanation.placed > explanation.contradicted:
                found.append(explanation)
        if not any(e.share >= LISTED or e.placed for e in found):
            found += self._pairs(fitting, sample)
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
        if len(faults) == 1 and set(faults[0].changes) <= {Stage.WRITE}:
            predicted = faults[0].changes[Stage.WRITE](self.call, self.right)
        else:
            predicted = write(self.call, products(self.call, faults), faults)
        return self.weigh(faults, predicted, self.output, self.right, self.bad, self.specified)

    def _by_place(self, fault: Fault, explanation: Explanation) -> Explanation:
        """With the failing elements counted where a fault of the store writes nothing, if they are just those."""
        unwritten = torch.isnan(decode(fault.changes[Stage.WRITE](self.call, self.right))) & self.specified
        unwritten &= ~torch.isnan(decode(self.right))
        count = int(unwritten.sum())
        beside, right_there = int((self.bad & ~unwritten).sum()), int((unwritten & ~self.bad).sum())
        if beside or explanation.contradicted or not 0 < count < self.total or right_there > CHANCE * count:
            return explanation
        return replace(explanation, placed=self.failing)

    def weigh(
        self,
        faults: tuple[Fault, ...],
        predicted: Tensor,
        output: Tensor,
        right: Tensor,
        bad: Tensor,
        specified: Tensor,
    ) -> Explanation:
        """How well a prediction does on the elements that it speaks of."""
        unknown = torch.isnan(decode(predicted)) & ~torch.isnan(decode(right)) & ~torch.isnan(decode(output))
        unknown &= specified
        right_there = unknown & ~bad  # other data would seldom give the right bits
        known = specified & ~unknown
        if int(right_there.sum()) > CHANCE * int(unknown.sum()):
            known |= right_there
        agrees = self._agree(output, predicted)
        name = self.call.schedule.name if self.call.schedule is not None else "exact sums"
        return Explanation(
            " and ".join(fault.name for fault in faults),
            name,
            int((bad & known & agrees).sum()),
            int((bad & known).sum()),
            int(known.sum()),
            int((known & ~agrees).sum()),
            "; ".join(fault.met_in for fault in faults),
        )

    def _agree(self, output: Tensor, predicted: Tensor) -> Tensor:
        """Equal bits or, where the order of summation is unknown, values nearer than float32 sums differ."""
        if self.call.schedule is not None:
            return same_bits(output, predicted)
        x, y = decode(output), decode(predicted)
        k = self.call.parts[0].product.K
        step = torch.finfo(output.dtype).eps + k * 2.0**-24
        size = torch.maximum(
            y.abs(), decode(self.right).abs() if hasattr(self, "right") and self.right.shape == y.shape else y.abs()
        )
        near = torch.isfinite(x) & torch.isfinite(y) & ((x - y).abs() <= step * size)
        return near | (torch.isnan(x) & torch.isnan(y)) | (x == y)

    def _specified(self) -> Tensor:
        inside = torch.zeros(self.output.shape, dtype=torch.bool, device=self.output.device)
        for part in self.call.parts:
            inside[slice(None) if part.rows is None else part.rows] = True
        return inside


class Sample:
    """Some rows and columns of each part of a large call, failing ones among them."""

    def __init__(self, view: View, size: tuple[int, int]) -> None:
        self.view = view
        self.columns = _some(view.bad.any(dim=0), size[1])
        self.rows = []
        for part in view.call.parts:
            own = view.bad if part.rows is None else view.bad[part.rows]
            self.rows.append(_some(own.any(dim=1), size[0]))

    def attempt(self, faults: tuple[Fault, ...]) -> Explanation | None:
        """The faults' explanation on the sample; None for faults that regroup the rows."""
        return self.weigh(faults, self.sums(faults))

    def sums(self, faults: tuple[Fault, ...]) -> list[tuple[Grid, Tensor]] | None:
        """Float32 results before the store on the sample of each part, with their places in the output."""
        call, found = self.view.call, []
        for (part, schedule), original, rows in zip(products(call, faults), call.parts, self.rows, strict=False):
            if part.product.M != original.product.M:
                return None
            product = part.product.take(rows)
            each = product.b_scale.repeat_interleave(product.b_rows, dim=0)[: product.N]
            b = codes_of(product.b)[self.columns].view(product.b.dtype)
            bias = None if product.bias is None else product.bias[self.columns]
            product = replace(product, b=b, b_scale=each[self.columns], b_rows=1, bias=bias)
            at = rows if original.rows is None else original.rows[rows]
            found.append(((at[:, None], self.columns[None, :]), accumulated(call, product, schedule, faults)))
        return found

    def weigh(self, faults: tuple[Fault, ...], pieces: list[tuple[Grid, Tensor]] | None) -> Explanation | None:
        """The explanation that these sums give once stored."""
        view, total = self.view, None
        for grid, acc in pieces or ():
            predicted = stored(view.call, acc, faults)
            cut = (view.output[grid], view.right[grid], view.bad[grid], view.specified[grid])
            one = view.weigh(faults, predicted, *cut)
            total = one if total is None else _sum(total, one)
        return total


def ranked(found: Sequence[Explanation]) -> tuple[Explanation, ...]:
    """Complete explanations, those of half of what fails, those by place, the rest; within each by the elements
    explained less those contradicted; ties as they came."""

    def rank(e: Explanation) -> tuple[int, int]:
        tier = 0 if e.complete else 1 if e.share >= LISTED else 2 if e.placed else 3
        return tier, e.contradicted - e.explained

    return tuple(sorted(found, key=rank))


def _sum(x: Explanation, y: Explanation) -> Explanation:
    return replace(
        x,
        explained=x.explained + y.explained,
        failing=x.failing + y.failing,
        known=x.known + y.known,
        contradicted=x.contradicted + y.contradicted,
    )


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
