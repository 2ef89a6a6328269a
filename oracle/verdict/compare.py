"""Verdicts: is every element of an output admissible?

The test is ``low <= actual <= high`` on the grid of the output dtype, with ``low = RN(exact + lo)`` and
``high = RN(exact + hi)`` computed by :mod:`oracle.bounds`: rounding is monotone, so the test is sound and adds
no slack of its own. It is written as the *passing* condition, so that a NaN fails; an element whose expected
value is NaN passes only as NaN. This file knows no tolerance and chooses no bound.

Source: the bounds of :mod:`oracle.bounds`; rounding is monotone (IEEE 754-2019, 4.3).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from oracle.bounds.interval import Admissible
from oracle.errors import NonconformanceError, OptionError, counted
from oracle.numbers.formats import Format, decode, of_dtype
from oracle.numbers.rounding import power_of_two
from oracle.verdict import heatmap
from oracle.verdict.heatmap import Evidence
from oracle.verdict.loss import Loss, sqnr
from oracle.verdict.notebook import card
from oracle.verdict.pattern import describe
from oracle.verdict.plot import Picture, draw, of_evidence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Admissible", "Comparison", "Error", "Status", "Verdict", "Worst", "compare", "verdict"]


class Status(StrEnum):
    """What a verdict says. ``UNTESTED`` and ``CRASHED`` count as failures; a skip must carry its reason."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"
    UNSUPPORTED = "UNSUPPORTED"
    MISTRUSTED = "MISTRUSTED"
    UNTESTED = "UNTESTED"
    CRASHED = "CRASHED"

    @property
    def is_failure(self) -> bool:
        """Whether it fails a run: FAILED, UNTESTED or CRASHED."""
        return self in (Status.FAILED, Status.UNTESTED, Status.CRASHED)

    @property
    def needs_reason(self) -> bool:
        """Whether a verdict with it must have a ``reason``."""
        return self in (Status.SKIPPED, Status.UNSUPPORTED, Status.MISTRUSTED, Status.UNTESTED, Status.CRASHED)


@dataclass(frozen=True)
class Worst:
    """The element farthest outside its admissible interval or, if none is outside, nearest to its edge.

    ``ratio`` is ``|actual - expected|`` over the distance from the expected value to the edge of the interval
    on that side: 0 is the correctly rounded value, 1 the edge, above 1 outside, inf where the interval is a
    single value (or the element is NaN).
    """

    index: tuple[int, ...]
    actual: float
    low: float
    high: float
    expected: float
    ratio: float
    output: str = "out"


@dataclass(frozen=True)
class Error:
    """What was measured of an output beside the values that it should have.

    ``ulps`` is the largest error in units of the last place of the output's dtype at the value that is due, ``sqnr``
    the ratio of the energies of signal and error in dB. 0 and infinity for an output without error; infinity and minus
    infinity where a number is due and something else stands.
    """

    ulps: float
    sqnr: float

    def __str__(self) -> str:
        return f"largest error {self.ulps:.3g} ulps, SQNR {self.sqnr:.1f} dB"


@dataclass(frozen=True)
class Failing:
    """What a judgement knows of an output ``[R, N]`` that fails, for its explanation: ``bad``, bool; ``near``, in the
    output's dtype, the right result to within a few units in the last place; ``right``, the bits of the first admitted
    schedule, where they were predicted."""

    bad: Tensor
    near: Tensor
    right: Tensor | None = None


@dataclass(frozen=True)
class Tried:
    """A recipe that a failing quantiser's output was compared with: how many of its ``codes`` and ``scales`` are the
    recipe's own (``equal_codes``, ``equal_scales``), by how many codes the farthest lies off (``farthest``), and how
    many of both the recipe refuses (``refused``)."""

    recipe: str
    equal_codes: int
    codes: int
    equal_scales: int
    scales: int
    farthest: int
    refused: int

    def __str__(self) -> str:
        codes, scales = 100 * self.equal_codes / self.codes, 100 * self.equal_scales / self.scales
        off = "" if not self.farthest else f", the farthest {counted(self.farthest, 'code')} off"
        return f"{self.recipe}: {codes:.3g}% of the codes{off}, {scales:.3g}% of the scales; refuses {self.refused}"


class Deferred:
    """A field that may be given as a function without arguments: it is called once, when the field is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        if instance is None:
            return None
        value = vars(instance)[self.name]
        if callable(value):
            value = vars(instance)[self.name] = value()
        return value

    def __set__(self, instance: object, value: Any) -> None:
        vars(instance)[self.name] = None if value is self else value

    def __repr__(self) -> str:
        """What a signature shows: the field is None where it is not given."""
        return "None"


@dataclass(frozen=True)
class Verdict:
    """The judgement of one output.

    It is true (``if verdict:``, ``assert verdict``) when its status is PASSED, and then only: MISTRUSTED, UNTESTED and
    all others are false. Two verdicts that differ in the attributes from ``evidence`` on alone are equal.

    Attributes
    ----------
    status, summary : what it says, as a word and as a sentence.
    outside, total : how many of the specified elements are inadmissible.
    worst : the element farthest outside its interval or, without one, nearest to its edge; None where none was looked
        for, as where all bits are equal.
    matches : the declared or identified numerics that reproduces every bit, or None.
    explained_by : the known faults that reproduce what fails, as text.
    basis : the proof that the verdict rests on.
    pattern : where the inadmissible elements lie, in words.
    margin : the largest :class:`Worst` ``ratio`` of all elements: 0 is the right value correctly rounded, 1 the edge.
    unconstrained : elements of which the interval says nothing, because an intermediate may overflow.
    reason : why it is not PASSED, for every status that needs it.
    evidence : of a failure, what a report draws.
    error : what was measured; None where nothing was (a layout, or a product proved by its bits that is too large to be
        computed exactly beside them). It changes no verdict.
    loss : what a quantisation loses by its recipe, right or wrong; None for everything else. It changes no verdict.
        Both figures of a quantiser are computed when one of them is first read.
    failing : kept of a large failure until it is explained.
    pictures : makes what :meth:`plot` draws, by output; it is not pickled.
    frames : those of the routine's own traceback, where it raised.
    tried : of a quantiser that fails, the recipes that were tried, the nearest first.
    observed : of a failure that no known fault explains, what its elements show, as text.
    """

    status: Status
    summary: str
    outside: int = 0
    total: int = 0
    worst: Worst | None = None
    matches: str | None = None
    explained_by: tuple[str, ...] = ()
    basis: str = ""
    pattern: str = ""
    margin: float = 0.0
    unconstrained: int = 0
    reason: str | None = None
    evidence: Evidence | None = field(default=None, compare=False, repr=False)
    error: Error | None = field(default=cast(Any, Deferred()), compare=False, repr=False)
    loss: Loss | None = field(default=cast(Any, Deferred()), compare=False, repr=False)
    failing: Failing | None = field(default=None, compare=False, repr=False)
    pictures: Callable[[], Mapping[str, Picture]] | None = field(default=None, compare=False, repr=False)
    frames: tuple[str, ...] = field(default=(), compare=False, repr=False)
    tried: tuple[Tried, ...] = field(default=(), compare=False, repr=False)
    observed: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __bool__(self) -> bool:
        return self.status is Status.PASSED

    @property
    def because(self) -> tuple[str, ...]:
        """What explains a failure, a line each: known faults or what its elements show, and the recipes tried."""
        names = (f"explained by: {'; or '.join(self.explained_by)}",) if self.explained_by else ()
        shown = (f"no known fault explains it: {'; '.join(self.observed)}",) if self.observed else ()
        return *names, *shown, *(f"tried {recipe}" for recipe in self.tried)

    def settled(self) -> Verdict:
        """This verdict, whose figures are computed by now: they hold no tensor that was judged any longer."""
        _ = self.error, self.loss
        return self

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self.settled()), "pictures": None}

    def raise_for_status(self, repro: str = "") -> None:
        """Do nothing where the verdict is PASSED.

        Parameters
        ----------
        repro : lines that repeat the judgement, which the message ends with.

        Raises
        ------
        NonconformanceError
            It is anything else; the message is the status, the summary and the known faults that explain it.
        """
        if not self:
            text = "\n  ".join((self._said(), *self.because))
            raise NonconformanceError(f"{text}\nrepro: {repro}" if repro else text, self)

    def plot(self, path: str | os.PathLike[str] | None = None, *, dark: bool = False) -> Figure:
        """Draw the outputs beside their admissible values.

        A heat map of rows by columns, coloured by how far the elements lie from their intervals, and a histogram of
        their errors in ulps of the output's dtype beside the errors that the intervals admit; a row for each output.
        Outputs of any rank are drawn as rows of the last axis, in at most 512 cells a side; a cell shows the worst of
        its elements. NaN and infinities where a number is due, and elements of which nothing is said, have colours and
        bars of their own.

        The verdict of :func:`oracle.judge` keeps the tensors for this where they have at most 64 MiB together. Keep
        larger ones yourself, unwritten, until the picture is drawn. A failure whose tensors are gone is drawn from what
        the verdict kept of it, in at most 64 cells a side.

        Parameters
        ----------
        path : a file to write, as ``"verdict.png"`` or ``"verdict.svg"``; None writes none.
        dark : light ink on dark paper.

        Returns
        -------
        Figure
            Of matplotlib, in no window; a notebook shows it.

        Raises
        ------
        OptionError
            matplotlib (the extra ``plot``) is not installed; ``path`` cannot be written or is neither PNG nor SVG; or
            there is nothing to draw: the tensors are gone or were written since, or right outputs of the contract are
            no interval for each element and the verdict is no failure.
        """
        result = dict(self.pictures()) if self.pictures is not None else {}
        if (seen := self.evidence) is not None:
            drawn = result.get(seen.output)
            same = drawn is not None and drawn.failing == seen.failing  # it counts values, a layout is judged by bits
            result = result if any(picture.failing for picture in result.values()) else {}
            result[seen.output] = replace(drawn, tile=seen.tile) if drawn is not None and same else of_evidence(seen)
        if not result:
            raise OptionError(
                "this verdict has nothing to draw: judge() gives one that has, while the tensors that it judged exist, "
                "for a contract whose right outputs are an interval for each element (interval() says so)"
            )
        return draw(list(result.values()), self._said(), path=path, dark=dark)

    def _said(self) -> str:
        """The status and the summary."""
        return self.summary if self.summary.startswith(str(self.status)) else f"{self.status}: {self.summary}"

    def __post_init__(self) -> None:
        if self.status.needs_reason and not self.reason:
            raise ValueError(f"a verdict {self.status} must carry its reason")

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        measured = "" if self.error is None else str(self.error)
        loss = "" if self.loss is None else str(self.loss)
        tried = "; ".join(map(str, self.tried))
        rows = (
            ("explained by", "; or ".join(self.explained_by)),
            ("tried", tried),
            ("measured", measured),
            ("loss", loss),
        )
        return card(str(self.status), self.summary.removeprefix(f"{self.status}: "), rows)

    def to_json(self) -> dict[str, object]:
        """A JSON-ready dict; non-finite numbers become the strings ``"nan"``, ``"inf"``, ``"-inf"``."""
        record = asdict(replace(self, evidence=None, failing=None, pictures=None))
        del record["failing"], record["pictures"]
        added = {name: list(record.pop(name)) for name in ("frames", "tried", "observed")}
        record["status"] = str(self.status)
        if record["worst"] is not None:
            record["worst"]["index"] = list(record["worst"]["index"])
            record["worst"] = {key: _jsonable(value) for key, value in record["worst"].items()}
        record["margin"] = _jsonable(record["margin"])
        for name in ("error", "loss"):
            if record[name] is not None:
                record[name] = {key: _jsonable(value) for key, value in record[name].items()}
        record["explained_by"] = list(self.explained_by)
        record["evidence"] = None if self.evidence is None else self.evidence.to_json()
        return record | {name: values for name, values in added.items() if values}


@dataclass(frozen=True)
class Comparison:
    """The counts of one comparison; :func:`verdict` turns them into a sentence."""

    outside: int
    total: int
    unconstrained: int
    margin: float
    worst: Worst | None
    bad: Tensor
    picture: Callable[[], Evidence | None] = lambda: None
    measure: Callable[[], Error | None] = lambda: None

    @cached_property
    def evidence(self) -> Evidence | None:
        """What a report draws of a failure, made when it is first asked for."""
        return self.picture()


def compare(actual: Tensor, admissible: Admissible, *, output: str = "out") -> Comparison:
    """Test every specified element of ``actual`` against its interval.

    ``actual`` has any shape, that of the interval, and any float dtype of :mod:`oracle.numbers.formats`; it is decoded
    from its bits. -0 equals +0; a NaN fails, unless NaN is expected.
    """
    value = decode(actual)
    low, high, expected = admissible.low, admissible.high, admissible.expected
    ok = torch.where(torch.isnan(expected), torch.isnan(value), (low <= value) & (value <= high))
    specified = torch.ones_like(ok) if admissible.specified is None else admissible.specified
    unconstrained = torch.zeros_like(ok) if admissible.open is None else admissible.open & specified
    bad = specified & ~ok & ~unconstrained
    ratio = heatmap.ratio_of(value, admissible)
    ratio = torch.where(specified & ~unconstrained, ratio, torch.full_like(ratio, -1.0))
    outside, total = int(bad.sum()), int(specified.sum())
    worst = None
    if total and value.numel():
        beyond = heatmap.overshoot(value, low, high)
        rank = torch.where(bad, beyond, torch.full_like(ratio, -1.0)) if outside else ratio
        worst = _worst(int(rank.argmax()), value, admissible, ratio, output)
    margin = max(0.0, float(ratio.max())) if ratio.numel() else 0.0
    fmt = of_dtype(actual.dtype)

    def picture() -> Evidence | None:
        return heatmap.gather(actual, admissible, ratio, bad, output=output) if outside else None

    def measure() -> Error | None:
        counted = specified & ~unconstrained
        return measured(value[counted], expected[counted], fmt)

    return Comparison(outside, total, int(unconstrained.sum()), margin, worst, bad, picture, measure)


def measured(value: Tensor, expected: Tensor, fmt: Format) -> Error | None:
    """The error of ``value`` beside ``expected`` (float64, one shape), which is rounded into ``fmt``; None without any
    element.

    An ulp is that of ``expected``: ``2**(E - f)``, ``E`` its exponent, at least the least of a normal, and ``f`` the
    fraction bits. Elements that are NaN, or one infinity, in both say nothing.
    """
    if not value.numel():
        return None
    same = (value == expected) | (torch.isnan(value) & torch.isnan(expected))
    finite = torch.isfinite(value) & torch.isfinite(expected)
    if bool((~finite & ~same).any()):
        return Error(math.inf, -math.inf)
    value, expected = (torch.where(finite, x, 0.0) for x in (value, expected))
    error = (value - expected).abs()
    exponent = torch.where(expected == 0, fmt.emin, (torch.frexp(expected)[1] - 1).clamp(min=fmt.emin))
    ulps = float((error * power_of_two(fmt.fraction_bits - exponent)).max())
    return Error(ulps, sqnr(float(expected.square().sum()), float(error.square().sum())))


def _every(total: int) -> str:
    """``all 8 elements``."""
    return "the only element" if total == 1 else f"all {total} elements"


def verdict(
    comparison: Comparison,
    *,
    basis: str,
    matches: str | None = None,
    mistrust: str | None = None,
    tiles: tuple[int, int] = (128, 128),
) -> Verdict:
    """Put a comparison into a verdict of one sentence.

    ``mistrust`` is the reason why a pass would prove little; it never changes a failure.
    """
    c = comparison
    if c.outside:
        where = describe(c.bad, tiles=tiles)
        assert c.worst is not None
        w = c.worst
        summary = (
            f"{c.outside} of {counted(c.total, 'element')} outside the bound ({basis}); worst "
            f"{w.output}{list(w.index)}: actual {w.actual:.9g}, admissible [{w.low:.9g}, {w.high:.9g}]; {where}"
        )
        seen = None if c.evidence is None else replace(c.evidence, tile=tiles)
        return Verdict(
            Status.FAILED,
            summary,
            c.outside,
            c.total,
            w,
            None,
            (),
            basis,
            where,
            c.margin,
            c.unconstrained,
            evidence=seen,
            error=c.measure(),
        )
    text = f"{_every(c.total)} admissible ({basis}), worst margin {c.margin:.3g}"
    if matches is not None:
        text = f"{_every(c.total)} {'equals' if c.total == 1 else 'equal'} the bits of {matches}"
    if c.unconstrained:
        text += f"; {c.unconstrained} not constrained (an intermediate may overflow)"
    if mistrust is None and 2 * c.unconstrained > c.total:
        mistrust = "an intermediate may overflow in most elements, so the interval says nothing about them"
    status = Status.PASSED if mistrust is None else Status.MISTRUSTED
    if mistrust is not None:
        text += f"; but this proves little: {mistrust}"
    return Verdict(
        status,
        text,
        0,
        c.total,
        c.worst,
        matches,
        (),
        basis,
        "",
        c.margin,
        c.unconstrained,
        mistrust,
        error=c.measure(),
    )


def _worst(flat: int, value: Tensor, admissible: Admissible, ratio: Tensor, output: str) -> Worst:
    index = tuple(int(i) for i in np.unravel_index(flat, value.shape))
    tensors = (value, admissible.low, admissible.high, admissible.expected, ratio)
    actual, low, high, expected, by = (float(x[index]) for x in tensors)
    return Worst(index, actual, low, high, expected, by, output)


def _jsonable(value: object) -> object:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
