"""The sets of right outputs of one call, as alternatives of which one must hold the whole output.

    Bits       these bits and no others (layouts)
    Elements   an interval for each element, after the bits of named predictions (products, layers, logits)
    Property   a predicate, where right outputs are no interval around one value (an order of experts, a split of work)

Contracts make alternatives (:meth:`oracle.routines.base.Contract.admissible`); :func:`judge_alternatives` tries them
in order. :meth:`Sets.ranges` states the same sets as tensors, so that a reader without this package can judge:
an element is right when it is free; or when the expected value is NaN and it is NaN; or when
``low <= element <= high`` (-0 equals +0).

NaN counts as any other bits where bits decide, and passes elsewhere only where NaN is due.
Source: derived in this file; the bounds are those of :mod:`oracle.bounds`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.bounds.interval import Admissible
from oracle.numbers.formats import codes_of, decode, same_bits
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.verdict import heatmap
from oracle.verdict.compare import Comparison, Error, Status, Verdict, Worst, compare, verdict
from oracle.verdict.notebook import card
from oracle.verdict.ranges import Range as Range
from oracle.verdict.ranges import values_of

EVERYWHERE = "the same on every machine"
ZERO_TRUST = 0.30  # above this share of zero results a pass proves little (oneDNN benchdnn's default zero trust)
Found = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Bounds:
    """The admissible values of one output.

    ``low`` and ``high``, both included, are float64 in the shape of the output, and both NaN where a NaN is due.
    ``free``, bool, marks the elements of which nothing is said (``-inf`` to ``inf`` there). ``numerics`` names the
    arithmetic that is admitted.
    """

    low: Tensor
    high: Tensor
    free: Tensor
    numerics: str

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        widest = torch.where(self.free, 0.0, self.high - self.low).nan_to_num(nan=0.0)
        rows = (
            ("numerics", self.numerics),
            ("one value", f"{int((widest == 0).sum()) - int(self.free.sum())} of {self.free.numel()} elements"),
            ("widest", f"{float(widest.max()) if widest.numel() else 0.0:.6g}"),
            ("nothing is said of", f"{int(self.free.sum())} elements"),
        )
        return card("Bounds", str(list(self.low.shape)), rows)


class Sets(ABC):
    """One alternative. ``numerics`` names the arithmetic that it admits. ``wider``: the call did not declare it, so an
    element that it leaves unconstrained does not pass by it if the declared arithmetic refused that element."""

    numerics: str = EVERYWHERE
    wider: bool = False

    @abstractmethod
    def judge(self, outputs: Found) -> Verdict:
        """The verdict on outputs whose names, shapes, dtypes and device have been checked."""

    def holds(self, outputs: Found) -> bool:
        """Whether it holds the outputs, for a caller that asks for no reason; what :meth:`judge` says, or less strict
        where a subclass says so."""
        return not self.judge(outputs).status.is_failure

    def may_hold(self, outputs: Found, among: Found) -> bool:
        """Whether it may hold the outputs, by a few of the elements ``among`` (bool, the shapes of ``outputs``), where
        these cost less than all; True where nothing is known. What it refuses is refused by :meth:`judge`."""
        return True

    def may_hold_worst(self, outputs: Found, worst: Worst) -> bool:
        """Whether it may hold the outputs, by the element that another alternative refused most, where that costs less
        than all of them; True where nothing is known. What it refuses is refused by :meth:`judge`."""
        return True

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        """The admissible values around ``expected``, the outputs of the reference; None where they are no interval."""
        return None

    def each(self) -> Iterator[Sets]:
        """Every arithmetic that this alternative admits, as one that admits no other; the first is that of
        :meth:`ranges`."""
        yield self


def judge_alternatives(alternatives: Sequence[Sets], outputs: Found) -> Verdict:
    """The verdict by the first alternative that holds the whole output, else the failure of the first one."""
    first, *others = alternatives
    judged = first.judge(outputs)
    for other in others:
        if judged.status is not Status.FAILED:
            break
        if judged.worst is not None and not other.may_hold_worst(outputs, judged.worst):
            continue
        held = other.judge(outputs)
        if not held.status.is_failure:
            if not other.wider:
                return held
            if held.unconstrained <= judged.unconstrained:
                return undeclared(held, judged)
    return judged


def undeclared(held: Verdict, refused: Verdict) -> Verdict:
    """A pass by a class that is not declared; its basis names the usual class too, which ``refused`` the output."""
    leave = "element leaves" if refused.outside == 1 else "elements leave"
    text = f"{held.basis}; {refused.outside} {leave} the {refused.basis}, which is not declared"
    return replace(held, basis=text, summary=held.summary.replace(held.basis, text, 1))


def alternatives_hold(alternatives: Sequence[Sets], outputs: Found) -> bool:
    """Whether one of the alternatives holds the whole output."""
    if len(alternatives) == 1:
        return alternatives[0].holds(outputs)
    return not judge_alternatives(alternatives, outputs).status.is_failure


# --- bits ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bits(Sets):
    """``expected`` bit for bit (NaN payloads and the sign of zero included); with ``strided`` also its strides.

    ``computed``: its elements are results of arithmetic and no copies, so where NaN is due any NaN is right."""

    expected: Found
    mistrust: str | None = None
    strided: bool = False
    computed: bool = False

    def judge(self, outputs: Found) -> Verdict:
        verdicts = []
        for name, expected in self.expected.items():
            actual = outputs[name]
            judged = judge_bits(actual, expected, output=name, mistrust=self.mistrust, computed=self.computed)
            verdicts.append(judged)
            if self.strided and _significant_strides(actual) != _significant_strides(expected):
                text = f"{name} has strides {tuple(actual.stride())} for shape {list(actual.shape)}; this layout has "
                verdicts.append(wrong_strides(f"{text}{tuple(expected.stride())}", actual.numel()))
        return worst_of(verdicts)

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        return {n: Range(x, x, torch.zeros(x.shape, dtype=torch.uint8, device="cpu")) for n, x in expected.items()}


def judge_bits(
    actual: Tensor, expected: Tensor, *, output: str, mistrust: str | None = None, computed: bool = False
) -> Verdict:
    """The verdict on ``actual``, which must have the bits of ``expected`` (any one shape and dtype; NaN payloads and
    the sign of zero included; of ``computed`` ones any NaN where NaN is due)."""
    bad = bits_of(actual) != bits_of(expected)
    if computed and expected.is_floating_point():
        bad &= ~same_bits(actual, expected)
    outside = int(bad.sum())
    worst, seen = None, None
    if outside:
        index = tuple(torch.nonzero(bad)[0].tolist())
        first = (x[index] for x in (actual, expected))
        value, right = (float(decode(x)) if x.is_floating_point() else float(x) for x in first)
        worst = Worst(index, value, right, right, right, math.inf, output)
        seen = heatmap.of_bits(actual, expected, bad, output=output)
    result = Comparison(outside, bad.numel(), 0, math.inf if outside else 0.0, worst, bad, lambda: seen)
    return verdict(result, basis="every bit in its place", matches="the layout", mistrust=mistrust)


def bits_of(x: Tensor) -> Tensor:
    """``x``, of any shape and dtype, as integers of its shape: the bits of a floating-point one, of a NaN too."""
    return codes_of(x) if x.is_floating_point() else x


def worst_of(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict for several outputs: the first failure, else the first that is no pass, else the first one.

    The counts add.
    """
    not_passed = next((v for v in verdicts if v.status is not Status.PASSED), verdicts[0])
    first = next((v for v in verdicts if v.status is Status.FAILED), not_passed)
    return replace(first, outside=sum(v.outside for v in verdicts), total=sum(v.total for v in verdicts))


def wrong_strides(said: str, elements: int) -> Verdict:
    """A failure of the memory layout of an output."""
    return Verdict(Status.FAILED, said, elements, elements, basis="strides of the layout", pattern=said)


def _significant_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of the axes that have more than one element: the others say nothing about memory."""
    return tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)


# --- intervals ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """Bits that prove an output right: ``reproduces`` says whether all ``total`` specified elements have them.

    ``basis`` says whose bits they are, ``name`` which numerics.
    """

    basis: str
    name: str
    total: int
    reproduces: Callable[[Found], bool]


@dataclass(frozen=True)
class Elements(Sets):
    """Bits first, then an interval for each element of each output.

    Attributes
    ----------
    make : the admissible elements by output and what they rest on; called when no prediction reproduces the output.
    predictions : tried in their order.
    mistrust : the reason for which a pass would prove little, from the outputs.
    matrix : outputs are compared as matrices ``[rows, last axis]``, and ``make`` gives them so.
    worst : :meth:`may_hold_worst`.
    among : ``make`` for the outputs at hand, where an element that is known to be right may stand for its interval.
    """

    make: Callable[[], tuple[Mapping[str, Admissible], str]]
    numerics: str = EVERYWHERE
    wider: bool = False
    predictions: Callable[[], Iterator[Prediction]] = lambda: iter(())
    mistrust: Callable[[Found], str | None] = lambda outputs: None
    matrix: bool = False
    worst: Callable[[Found, Worst], bool] = lambda outputs, worst: True
    among: Callable[[Found], tuple[Mapping[str, Admissible], str]] | None = None

    def may_hold_worst(self, outputs: Found, worst: Worst) -> bool:
        return self.worst(outputs, worst)

    def judge(self, outputs: Found) -> Verdict:
        if self.matrix:
            outputs = {name: x.reshape(-1, x.shape[-1]) for name, x in outputs.items()}
        mistrust = self.mistrust(outputs)
        for bits in self.predictions():
            if bits.reproduces(outputs):
                return verdict_of_equality(bits.basis, bits.name, bits.total, mistrust)
        sets, basis = self.make() if self.among is None else self.among(outputs)
        compared = [compare(outputs[name], admitted, output=name) for name, admitted in sets.items()]
        return worst_of([verdict(comparison, basis=basis, mistrust=mistrust) for comparison in compared])

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        return {name: ranged(sets, expected[name].dtype, expected[name].shape) for name, sets in self.make()[0].items()}


def bounds_of(admitted: Range, numerics: str, device: torch.device) -> Bounds:
    """The values of a range; integers stand for themselves."""
    free = admitted.free.to(torch.bool).expand(admitted.low.shape)
    low = torch.where(free, -torch.inf, values_of(admitted.low))
    high = torch.where(free, torch.inf, values_of(admitted.high))
    return Bounds(low.to(device), high.to(device), free.to(device), numerics)


def verdict_of_equality(basis: str, name: str, total: int, mistrust: str | None, error: Error | None = None) -> Verdict:
    """A pass by equality of every bit with a named prediction; ``error`` where it was measured."""
    text = f"{'the only element equals' if total == 1 else f'all {total} elements equal'} the bits of {name}"
    if mistrust is not None:
        text += f"; but this proves little: {mistrust}"
    status = Status.PASSED if mistrust is None else Status.MISTRUSTED
    return Verdict(status, text, 0, total, None, name, (), basis, "", 0.0, 0, mistrust, error=error)


def with_float32(make: Callable[[str, bool], Sets], name: str, *, declared: bool) -> list[Sets]:
    """The alternatives of an arithmetic whose intervals are a contract's own: the named numerics and, where none is
    declared, float32 in any order, which a truncating accumulator's one-sided interval need not hold.

    ``make(numerics, wider)`` gives one of them.
    """
    return [make(name, False)] if declared or name == IEEE32 else [make(name, False), make(IEEE32, True)]


def all_equal(name: str, tensors: Sequence[Tensor]) -> str | None:
    """The reason for mistrust when each of these ``tensors`` of scales or weights (any shape and dtype) holds one
    value, which hides a wrong index."""
    if max(t.numel() for t in tensors) > 1 and all(bool((t == t.flatten()[0]).all()) for t in tensors):
        return f"all values of {name} are equal, so a wrong scale index changes nothing"
    return None


def mostly_zero(*values: Tensor) -> str | None:
    """The reason for mistrust when more than ``ZERO_TRUST`` of the ``values`` (any shape and dtype) are zero."""
    total = sum(x.numel() for x in values)
    share = 1.0 - sum(int(torch.count_nonzero(x)) for x in values) / total if total else math.nan
    return f"{100 * share:.0f}% of the results are zero" if share > ZERO_TRUST else None


def ranged(sets: Admissible, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Range:
    """Edges in the output's dtype, on whose grid they lie already; a NaN that is due stays NaN at both."""
    hidden = torch.zeros(sets.expected.shape, dtype=torch.bool, device="cpu")
    if sets.open is not None:
        hidden |= sets.open
    if sets.specified is not None:
        hidden |= ~sets.specified
    due = torch.isnan(sets.expected)
    low = torch.where(hidden, -torch.inf, torch.where(due, torch.nan, sets.low))
    high = torch.where(hidden, torch.inf, torch.where(due, torch.nan, sets.high))
    result = (rounded_to(low, dtype), rounded_to(high, dtype), hidden.to(torch.uint8))
    return Range(*result) if shape is None else Range(*(x.reshape(tuple(shape)) for x in result))


def rounded_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` (float64, any shape) correctly rounded into ``dtype``, in its shape; one-byte formats saturate, wider
    ones overflow to infinity, and NaN stays NaN."""
    overflow = Overflow.SATURATE if dtype.itemsize == 1 else Overflow.INF
    return to_dtype(value, dtype, rounding=Rounding.NEAREST_EVEN, overflow=overflow)


# --- predicates ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Property(Sets):
    """What only a predicate over all outputs decides; no interval states it."""

    decide: Callable[[Found], Verdict]
    wider: bool = False

    def judge(self, outputs: Found) -> Verdict:
        return self.decide(outputs)
