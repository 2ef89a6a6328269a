"""What is wrong with an output: where it fails, since which K block, and which known faults reproduce it.

An output of scaled products is compared with each arithmetic that may have computed it: the bits of every admitted
schedule and, where none is declared, float32 in any order (the interval around exact sums). Candidates are tried in
this order, up to the first that reproduces everything that fails:

    1. every fault of the catalogue that applies, put into the right kernel
    2. placements: rows, tiles, experts and K blocks, found on the output     :mod:`oracle.diagnosis.localise`
    3. pairs of a fault and a wrong store, where no single fault explains half of the failing elements
    4. scales read beyond their buffer, where nothing yet explains half       :mod:`oracle.diagnosis.least_squares`

Each candidate is counted on the output: how many failing elements it explains, how many elements it contradicts, what
it leaves unknown; all are ranked by these counts (:mod:`oracle.diagnosis.candidates`). A placement is judged by the
interval that refused the output, that of the first admitted numerics, or by one of the wider classes.

Findings need no candidate: groups that fail or have another group's weights, failing rows that hold the right result of
other rows, failing elements that all hold one value, and the scale factors that the kernel really used.
Quantisers, logits and contracts of any other kind: every fault is run on the whole call and counted the same way.

Not covered: three faults at once; judging (a diagnosis changes no status).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oracle.bounds import admissible
from oracle.bounds.engines import exact
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.diagnosis import sampled
from oracle.diagnosis.candidates import (
    LISTED,
    PAIR_SAMPLE,
    SAMPLE,
    Explanation,
    FailingOutput,
    FailingRows,
    Sample,
    half_failing,
    other_groups,
    ranked,
    speaks,
    spread,
)
from oracle.diagnosis.least_squares import Factors, effective_factors, read_beyond_buffer
from oracle.diagnosis.level import Explain, explain_level
from oracle.diagnosis.localise import groups_in_use, placements
from oracle.diagnosis.measured import measured
from oracle.diagnosis.mutated import Mutated
from oracle.diagnosis.observed import UNLIKE, needed, observed, tail_of_k, times_right
from oracle.diagnosis.other_calls import TRIED as TRIED_CALLS
from oracle.diagnosis.other_calls import rows_by_ids, taken_otherwise
from oracle.errors import NumericsError, counted
from oracle.numbers.formats import codes_of, decode, of_dtype, same_bits
from oracle.numbers.recipe_table import recipes
from oracle.numbers.recipes import Recipe
from oracle.numbers.threads import one_thread
from oracle.routines import get
from oracle.routines.base import Beyond, Call, Output, by_name
from oracle.routines.catalogue import Family, Fault, Stage, agree, faults_of, run
from oracle.routines.fault import named
from oracle.routines.mutants import accumulated, fitting, stored
from oracle.routines.products.roles import quantised
from oracle.routines.traits import Kind
from oracle.tensorcore.identify import subset
from oracle.tensorcore.schedules import Schedule, of_class
from oracle.truth.gemm import rounded
from oracle.verdict import heatmap
from oracle.verdict.compare import Failing, Status, Verdict, compare
from oracle.verdict.notebook import card
from oracle.verdict.pattern import count, describe, places, ranges
from oracle.verdict.plot import Blocks, Place, blocks, draw_diagnosis, place
from oracle.verdict.products import LARGE, Part, interval_of, wider_classes, work
from oracle.verdict.sets import Bits, Bounds, bits_of, bounds_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANY = 32  # products of a call up to which all of them are looked at
FEW_PARTS, CONFIRMED = 8, 3  # of more, those on which explanations are looked for, and explanations tried on all
TOLD_APART = 8  # elements on which arithmetics are compared with the first
TILE = 128  # columns of which the factors of the K blocks are found together
MOST = 4  # findings about K blocks
TRIED = 3  # admitted schedules that faults are put into, beside exact sums
SMALL = 1 << 20  # elements of a call without products that is searched whole by default
MEASURED = 1 << 23  # elements of outputs without products of which what fails is looked at by default
SHOWN = 12  # explanations in a diagnosis
CHEAP = LARGE  # products of one candidate up to which a judgement diagnoses by itself
WIDE = 8  # bits that the fraction of a value tells at most
# Of what fails, the share that a fault reproduces within the bound and moves far from it. Above one half no two faults
# that move an element to places far apart both have it; the tenth above is a margin, which nothing derives.
EXACT = 0.6
NEARLY_ALL = (
    0.9375  # of what fails by one arithmetic, the share that fails by all: the few that a fault of half explains
)
FAR = 4.0  # times as far as right results lie apart


@dataclass(frozen=True)
class Diagnosis:
    """What was found of the ``failing`` of ``total`` specified elements, which lie at ``where``.

    ``explanations``, best first; ``findings``, general observations in words; ``first_block``, the first K block that
    enters with a wrong factor, where the factors are known; ``places`` and ``blocks``, what :meth:`plot` draws;
    ``observed``, what the failing elements show beside that (:mod:`oracle.diagnosis.observed`); ``measured``, a name
    that they give themselves (:mod:`oracle.diagnosis.measured`); ``evidence``, the bits that a candidate must know to
    reproduce what fails."""

    failing: int
    total: int
    where: str
    explanations: tuple[Explanation, ...] = ()
    findings: tuple[str, ...] = ()
    first_block: int | None = None
    places: tuple[Place, ...] = field(default=(), compare=False, repr=False)
    blocks: Blocks | None = field(default=None, compare=False, repr=False)
    observed: tuple[str, ...] = ()
    measured: str | None = None
    evidence: float = field(default=math.inf, compare=False, repr=False)

    def plot(self, path: str | os.PathLike[str] | None = None, *, dark: bool = False) -> Figure:
        """Draw where the output fails and what explains it.

        A heat map of rows by columns in at most 512 cells a side, where a cell shows the share of its elements that
        fails (NaN and infinities fail where a number is due); where they are known, the factors by which the K blocks
        enter its rows, 1 where they are right; the share of the failing elements that each of the first explanations
        reproduces; and the findings.

        Parameters
        ----------
        path : a file to write, as ``"diagnosis.png"`` or ``"diagnosis.svg"``; None writes none.
        dark : light ink on dark paper.

        Returns
        -------
        Figure
            Of matplotlib, in no window; a notebook shows it. An output without a failing element has an empty one.

        Raises
        ------
        OptionError
            matplotlib (the extra ``plot``) is not installed; ``path`` cannot be written or is neither PNG nor SVG.
        """
        counts = [e.said for e in self.explanations]
        shares = [max(e.share, e.placed / max(1, e.failing)) for e in self.explanations]
        bars = list(zip(map(str, self.explanations), shares, counts, strict=True))
        text = f"Diagnosis: {self._said()}"
        return draw_diagnosis(self.places, self.blocks, bars, self.words, text, path=path, dark=dark)

    @property
    def words(self) -> tuple[str, ...]:
        """What was seen, each line once.

        The findings; ``observed``, where no explanation names the cause; and of how many elements explanations speak,
        where these are not all that fail."""
        text = (*self.findings, *(() if self.names else self.observed))
        for best in self.explanations[:1]:
            if best.failing != self.failing:
                on = counted(best.failing, "element")
                text = (*text, f"explanations are weighed on {on}, wrong by {best.numerics}, too")
        return tuple(dict.fromkeys(text))

    def _said(self) -> str:
        return f"{self.failing} of {self.total} elements fail; {self.where}".rstrip("; ")

    @property
    def names(self) -> tuple[str, ...]:
        """What ``Verdict.explained_by`` says.

        Every complete explanation, else those that act in the failing elements only, else those by position: each
        reproduces all that fails. What reproduces a part of it is listed in ``explanations`` alone. Where there is none
        of these, what is ``measured``."""
        result = self.explanations
        chosen = [e for e in result if e.complete] or [e for e in result if e.local]
        chosen = chosen or [e for e in result if e.placed]
        return tuple(map(str, chosen)) or (() if self.measured is None else (self.measured,))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        counts = [e.said for e in self.explanations]
        rows = [(str(e), text) for e, text in zip(self.explanations, counts, strict=True)]
        rows += [("finding", text) for text in self.words]
        return card("Diagnosis", self._said(), rows)


def diagnose(
    contract: str,
    inputs: Mapping[str, Tensor],
    output: Output,
    *,
    arch: str = "sm90",
    numerics: str | None = None,
    **options: object,
) -> Diagnosis:
    """Explain a failing output, with the same arguments as :func:`oracle.judge`.

    Returns
    -------
    Diagnosis
        Without explanations when no fault of the catalogue reproduces half of the failing elements; empty when the
        output does not fail.

    Raises
    ------
    OracleError
        The call is wrong, the output has another shape or dtype, or the contract has no catalogue of faults.
    """
    result = get(contract)
    call = result.asked(inputs, output, arch=arch, **options)
    judged = result.judged(call, output, numerics)
    if call.optional_operands is None and not faults_of(contract):
        raise NumericsError(f"{contract} has no catalogue of faults to explain an output with")
    seen = _diagnosis(judged, call, result.validate_output(call.checked(), output), numerics)
    if seen.failing == judged.outside or not judged.outside:
        return seen
    return replace(seen, failing=judged.outside, where=judged.pattern or seen.where)


def explain_verdict(
    verdict: Verdict, call: Call, output: Output, *, numerics: str | None, explain: str | None = None
) -> Verdict:
    """``verdict`` on ``output`` of the call with ``explained_by`` filled in, where it failed and says nothing yet;
    ``explain`` is an :class:`Explain` or its name. What the judgement has computed of the call is computed once."""
    level, failing = explain_level(explain), verdict.failing
    verdict = replace(verdict, failing=None)
    if level is Explain.OFF or verdict.status is not Status.FAILED or verdict.explained_by:
        return verdict
    little = cheap(call)
    with one_thread() if little or level is not Explain.FULL else nullcontext():
        if little or level is Explain.FULL:
            supplied = call.contract.validate_output(call.checked(), output)
            result = _diagnosis(verdict, call, supplied, numerics)
            names, shown = result.names, (*result.observed, *result.findings)
            complete = any(e.complete and e.name not in recipes() or e.local for e in result.explanations)
            if not complete and result.evidence >= needed(TRIED_CALLS):
                names = _or_other_call(call, supplied, verdict, numerics, names)
            return replace(verdict, explained_by=names, observed=() if names else tuple(dict.fromkeys(shown)))
        if failing is not None:
            names = _of_sample(call, by_name(output)["out"], numerics, failing)
            flat = by_name(output)["out"].reshape(failing.bad.shape)
            shown = () if names else tuple(observed(flat, failing.near, failing.bad, near=True))
            return replace(verdict, explained_by=names, observed=shown)
        if call.optional_operands is None and verdict.total <= MEASURED:
            named = _of_large_outputs(call, call.contract.validate_output(call.checked(), output), numerics)
            return replace(verdict, explained_by=() if named is None else (named,))
    return verdict


def _of_large_outputs(call: Call, outputs: Mapping[str, Tensor], numerics: str | None) -> str | None:
    """What outputs of a call that is too large to be searched show by themselves, at the price of a judgement."""
    right = by_name(run(call))
    bad, _, bounds = _refused(call, outputs, right, numerics)
    return _measured(call, outputs, right, bad, bounds)


def _or_other_call(
    call: Call, outputs: Mapping[str, Tensor], verdict: Verdict, numerics: str | None, names: tuple[str, ...]
) -> tuple[str, ...]:
    """The change of the call for which the output is right, before the ``names`` of what may be another reason."""
    text = taken_otherwise(call, outputs, verdict, numerics)
    return names if text is None else (text,)


def _of_sample(asked: Call, output: Tensor, numerics: str | None, failing: Failing) -> tuple[str, ...]:
    base = _base(asked, output)
    names = base.contract.arithmetics(base, numerics)
    classes = (names[0], *(wider_classes(names) if numerics is None else ()))
    schedules: list[Schedule | None] = list(dict.fromkeys(of_class(name) for name in names if name != IEEE32))
    if not schedules or numerics is None:
        schedules.append(None)
    flat = output.reshape(-1, output.shape[-1])
    return sampled.names(base, flat, failing, classes, schedules, faults_of(base.contract.name))


def _base(asked: Call, output: Tensor) -> Call:
    """The call with what the routine quantised its operands to, in the output's dtype."""
    return asked.in_search(quantised(asked), output.dtype)


def cheap(call: Call) -> bool:
    """Whether every candidate for this call costs little."""
    operands = call.optional_operands
    if next(iter(call.inputs.values())).is_cuda:
        return False
    if operands is None:
        return sum(x.numel() for x in (*call.inputs.values(), *call.truth.values())) <= SMALL
    if operands.parts:
        return work(operands.parts) <= CHEAP
    return torch.Size(operands.shape).numel() <= CHEAP >> 6


def _diagnosis(verdict: Verdict, call: Call, output: Mapping[str, Tensor], numerics: str | None) -> Diagnosis:
    if not verdict.status.is_failure:
        return Diagnosis(0, verdict.total, "")
    operands = call.optional_operands
    if operands is not None and operands.parts:
        return _of_products(call, output["out"], numerics, refuted=bool(verdict.explained_by))
    return _of_whole_outputs(call, output, numerics)


# --- scaled products ----------------------------------------------------------------------------------------


def _of_products(asked: Call, output: Tensor, numerics: str | None, *, refuted: bool) -> Diagnosis:
    """``refuted``: the output has the bits of a known fault of accumulation, so all of it fails."""
    contract, base = asked.contract, _base(asked, output)
    flat = output.reshape(-1, output.shape[-1])
    names = contract.arithmetics(base, numerics)
    outside = torch.ones_like(flat, dtype=torch.bool) if refuted else _outside(base.parts, flat, names[0])
    real = dict.fromkeys(of_class(name) for name in names if name != IEEE32)
    schedules: list[Schedule | None] = [*real]
    if not schedules or (numerics is None and not refuted):
        schedules.append(None)  # exact sums, for float32 in any order
    classes = () if refuted else (names[0], *(wider_classes(names) if numerics is None else ()))
    if len(base.parts) > MANY:
        return _of_many(base, flat, outside, schedules)
    return _searched(base, flat, outside, schedules, classes)


def _of_many(base: Call, flat: Tensor, outside: Tensor, schedules: Sequence[Schedule | None]) -> Diagnosis:
    """Of a call of more than :data:`MANY` products: what explains a few of them is tried on all, which it must
    reproduce; no placements."""
    failing = torch.stack([part.of(outside).any() for part in base.parts])
    few = base.with_only(half_failing(failing, FEW_PARTS).tolist())
    result = _searched(few, flat, outside, schedules, ()).explanations[:CONFIRMED]
    by_name = {fault.name: fault for fault in faults_of(base.contract.name)}
    numerics = result[0].numerics if result else None
    schedule = next((s for s in schedules if s is not None and s.name == numerics), schedules[-1])
    whole, confirmed = FailingOutput(base.with_schedule(schedule), flat, outside), list[Explanation]()
    for explanation in (e for e in result if e.numerics == numerics):
        faults = tuple(by_name[name] for name in explanation.name.split(" and ") if name in by_name)
        if len(faults) == 1:
            confirmed += _single_faults(_Asked.of(whole, faults))
        elif faults:
            confirmed.append(whole.attempt(faults))
    where, seen = describe(whole.refused), (place(whole.refused, output="out", tile=heatmap.TILE),)
    findings = (*_failing_groups(whole), *_one_value(whole))
    words = tuple(observed(whole.output, whole.right, whole.bad))
    good = ranked([e for e in confirmed if e.complete or e.local or e.placed])
    return Diagnosis(count(whole.refused), whole.total, where, good, findings, places=seen, observed=words)


def _searched(
    base: Call, flat: Tensor, outside: Tensor, schedules: Sequence[Schedule | None], classes: Sequence[str]
) -> Diagnosis:
    """The search for what explains the ``outside`` elements; placements are judged by ``classes``, if there are any."""
    mutated = Mutated(base)

    @cache
    def by(schedule: Schedule | None) -> FailingOutput:
        return FailingOutput(base.with_schedule(schedule), flat, outside, mutated)

    own = _closest(by, outside, schedules)
    closest = by(own)
    if not speaks(flat[closest.specified]):
        found_in = describe(closest.refused)
        text, seen = tuple(_one_value(closest)), (place(closest.refused, output="out", tile=heatmap.TILE),)
        return Diagnosis(count(closest.refused), closest.total, found_in, findings=text, places=seen)
    faults = faults_of(base.contract.name)
    asked = {closest: _Asked.of(closest, faults)}
    results = {closest: _single_faults(asked[closest])}
    if _complete(results[closest]):
        return _described(closest, results[closest])
    scheduled = [schedule for schedule in schedules if schedule is not None][:TRIED]
    others = [schedule for schedule in dict.fromkeys([*scheduled, schedules[-1]]) if schedule != own]
    for failure in map(by, () if asked[closest].settles(faults, others) else others):
        asked[failure] = _Asked.of(failure, faults, _alike(closest, failure))
        results[failure] = _single_faults(asked[failure])
        if _complete(results[failure]):
            return _described(failure, results[failure])
    if classes:
        fewest, known = min(results, key=lambda failure: failure.failing), results[_best(results)]
        if placed := placements(fewest, classes, known):
            return _described(fewest, ranked([*placed, *known]))
    for failure in results:
        results[failure] = _pairs_and_scales(asked[failure], results[failure])
        if _complete(results[failure]):
            return _described(failure, results[failure])
    best = _best(results)
    return _described(best, results[best])


def _closest(
    by: Callable[[Schedule | None], FailingOutput], outside: Tensor, schedules: Sequence[Schedule | None]
) -> Schedule | None:
    """The arithmetic by which most elements are right.

    The first, where all are that do not fail, or where no other is right in more than half of some that are not."""
    first = by(schedules[0])
    missing = first.specified & ~outside & ~same_bits(first.output, first.right)
    part = max(first.call.parts, key=lambda part: count(part.of(missing)))
    at = spread(places(part.of(missing)), TOLD_APART)
    rows, columns = at // missing.shape[1], at % missing.shape[1]
    few, actual = subset(part.product, rows, columns), part.of(first.output)[rows, columns]

    def right_in_some(schedule: Schedule | None) -> bool:
        result = stored(first.call, accumulated(first.call, few, fitting(few, schedule), ()), ())
        return count(same_bits(result.diagonal(), actual)) > LISTED * len(at)

    others = [schedule for schedule in schedules[1:] if len(at) and right_in_some(schedule)]
    return max([schedules[0], *others], key=lambda schedule: by(schedule).equal)


def _alike(closest: FailingOutput, failure: FailingOutput) -> Tensor | None:
    """The elements that fail by the closest arithmetic, if these are nearly all that fail by either."""
    both = count(closest.bad & failure.bad)
    return closest.bad if both >= NEARLY_ALL * max(closest.failing, failure.failing) else None


def _outside(parts: Sequence[Part], output: Tensor, name: str) -> Tensor:
    """Elements of ``output [R, N]`` outside the interval of this numerics, bool."""
    result = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
    for part in parts:
        value, own = exact(part.product), part.of(output)
        admitted = admissible(value, rounded(part.product, value, output.dtype), interval_of(part.product, name))
        result[part.place] = compare(own, admitted).bad
    return result


@dataclass(frozen=True)
class _Asked:
    """A failing output and the ``faults`` that its call can show; the ``few`` rows that refuse most, if it is small."""

    failure: FailingOutput
    faults: Sequence[Fault]
    few: FailingRows | None

    @classmethod
    def of(cls, failure: FailingOutput, faults: Sequence[Fault], bad: Tensor | None = None) -> _Asked:
        """Of the contract's ``faults``; ``bad``: of :class:`FailingRows`."""
        applicable = [fault for fault in faults if fault.needs(failure.call) is None]
        return cls(failure, applicable, FailingRows(failure, bad) if failure.small else None)

    def settles(self, faults: Sequence[Fault], others: Sequence[Schedule | None]) -> bool:
        """Whether none of the ``others``, arithmetics of the call, explains anything by one of the contract's
        ``faults``."""
        if self.few is None or not self.few.settles(self.faults, others):
            return False
        calls = [self.failure.call.with_schedule(schedule) for schedule in others]
        rest = [fault for fault in faults if fault not in self.faults]
        return all(fault.needs(call) is not None for call in calls for fault in rest)


def _single_faults(asked: _Asked) -> tuple[Explanation, ...]:
    """Explanations of at least one failing element that contradict less than they explain, best first."""
    failure, result = asked.failure, []
    sample = None if failure.small else Sample.half_failing(failure, SAMPLE)
    for fault in asked.faults if asked.few is None else asked.few.kept(asked.faults):
        last_stage_only = set(fault.changes) <= {Stage.WRITE}
        whole = sample is None or last_stage_only
        explanation = failure.attempt((fault,)) if whole else sample.attempt((fault,)) if sample is not None else None
        if explanation is not None and last_stage_only and explanation.explained == 0:
            explanation = failure.named_by_position(fault, explanation)
        if explanation is not None:
            result.append(explanation)
    return ranked([e for e in result if e.local or e.explained + e.placed > e.contradicted])


def _pairs_and_scales(asked: _Asked, known: Sequence[Explanation]) -> tuple[Explanation, ...]:
    """The ``known`` with pairs of faults and scales from beyond a buffer, where none of them covers half."""
    failure, result = asked.failure, list(known)
    if not any(e.share >= LISTED or e.placed for e in result):
        result += _pairs(asked)
    if failure.small and not any(e.share >= LISTED or e.placed for e in result):
        count = failure.failing
        result += [
            Explanation(f.name, failure.numerics, 0, count, 0, 0, f.seen, placed=count, beyond=True)
            for f in read_beyond_buffer(failure.mutated, failure.output, failure.bad, asked.faults)
        ]
    return ranked(result)


def _pairs(asked: _Asked) -> list[Explanation]:
    """Pairs of a fault and a wrong store: a few elements first, then what explains those. A store that rounds makes
    nothing of faults whose values are far from what fails."""
    failure, faults = asked.failure, asked.faults
    stores = [fault for fault in faults if set(fault.changes) == {Stage.STORE}]
    firsts = [fault for fault in faults if not set(fault.changes) & {Stage.STORE, Stage.WRITE}]
    few = Sample.half_failing(failure, PAIR_SAMPLE)
    fewer = few.failing_alone()
    sample = None if failure.small else Sample.half_failing(failure, SAMPLE)
    others = [store for store in stores if not failure.rounds(store)]
    far, result = asked.few.far(firsts) if asked.few is not None else set(), list[Explanation]()
    far |= fewer.far([first for first in firsts if first.name not in far])
    for first in firsts:
        seconds = others if first.name in far else stores
        fewest = fewer.sums((first,)) if seconds else None
        if fewest and seconds is not others and not fewer.about(fewest):
            seconds = others
        pieces = fewest if fewer is few else None
        for second in seconds:
            if not fewer.covers((first, second), fewest):
                continue
            pieces = few.sums((first,)) if pieces is None else pieces
            if few.covers((first, second), pieces):
                whole = failure.attempt((first, second)) if sample is None else sample.attempt((first, second))
                if whole is not None and whole.explained > whole.contradicted:
                    result.append(whole)
    return result


def _complete(results: Sequence[Explanation]) -> bool:
    return bool(results) and results[0].complete


def _best(results: Mapping[FailingOutput, Sequence[Explanation]]) -> FailingOutput:
    """The arithmetic with the best first explanation; of equal ones the first."""

    def worth(failure: FailingOutput) -> tuple[bool, bool, bool, int]:
        if not results[failure]:
            return False, False, False, 0
        first = results[failure][0]
        return True, first.complete, first.local, first.explained - first.contradicted

    return max(results, key=worth)


# --- findings -----------------------------------------------------------------------------------------------


def _described(failure: FailingOutput, explanations: tuple[Explanation, ...]) -> Diagnosis:
    factors = _factors_by_tile(failure)
    first = min((block for _, used in factors if (block := used.first_block()) is not None), default=None)
    findings = [*_groups(failure), *_other_rows(failure), *_one_value(failure), *_k_blocks(factors)[:MOST]]
    where, shown = describe(failure.refused), explanations[:SHOWN]
    used = _farthest(failure, factors) if first is not None else None
    seen = (place(failure.refused, output="out", tile=heatmap.TILE),)
    words = list[str]()
    if not _complete(explanations):
        words = [*observed(failure.output, failure.right, failure.bad), *tail_of_k([used for _, used in factors])]
    counts = count(failure.refused), failure.total
    by_ids = rows_by_ids(failure.call, failure.output)
    text = next(measured(failure.output, failure.right, failure.bad, near=True, paged=by_ids), None)
    return Diagnosis(*counts, where, shown, tuple(findings), first, seen, used, tuple(words), text)


def _farthest(failure: FailingOutput, results: Sequence[tuple[Tensor, Factors]]) -> Blocks:
    """Of the N tiles' factors that are surely not 1 the farthest from it, by row and K block; 1 where there is none."""
    first = results[0][1]
    farthest = torch.ones_like(first.factor)
    known = torch.zeros_like(first.factor, dtype=torch.bool)
    for _, used in results:
        known |= ~torch.isnan(used.factor)
        factor = torch.where(used.wrong(), used.factor, 1.0)
        farthest = torch.where((factor - 1).abs() > (farthest - 1).abs(), factor, farthest)
    bad = failure.call.parts[0].of(failure.bad).any(dim=1, keepdim=True)
    return blocks(torch.where(known | ~bad, farthest, torch.nan), first.block)


def _factors_by_tile(failure: FailingOutput) -> list[tuple[Tensor, Factors]]:
    """The factors of each N tile's failing columns (the others hold no evidence), with these columns."""
    if len(failure.call.parts) != 1 or not failure.small:
        return []
    (part,) = failure.call.parts
    bad, output, result = part.of(failure.bad), part.of(failure.output), []
    rows = torch.arange(part.product.M, device=bad.device)
    for start in range(0, part.product.N, TILE):
        columns = start + torch.nonzero(bad[:, start : start + TILE].any(dim=0))[:, 0]
        used = effective_factors(subset(part.product, rows, columns), output[:, columns]) if len(columns) else None
        if used is not None and used.first_block() is not None:
            result.append((columns, used))
    return result


def _k_blocks(results: Sequence[tuple[Tensor, Factors]]) -> list[str]:
    """Which K blocks of which rows and columns enter with a wrong weight; tiles alike are joined."""
    joined: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[Tensor, Factors]]] = {}
    for at, used in results:
        wrong = used.wrong()
        rows, blocks = (tuple(torch.nonzero(wrong.any(dim=axis))[:, 0].tolist()) for axis in (1, 0))
        joined.setdefault((rows, blocks), []).append((at, used))
    text = []
    for (rows, blocks), tiles in joined.items():
        values = torch.cat([used.factor[used.wrong()] for _, used in tiles])
        low, high = f"{float(values.min()):.4g}", f"{float(values.max()):.4g}"
        columns = [int(c) for at, _ in tiles for c in at]
        text.append(
            f"the accumulation leaves the right path at K block {blocks[0]} (k = {blocks[0] * tiles[0][1].block}); "
            f"blocks {ranges(list(blocks))} of rows {ranges(list(rows))} and failing columns {min(columns)} to "
            f"{max(columns)} enter with {f'{low} to {high}' if len(values) > 1 else low} times their right weight"
        )
    return text


def _groups(failure: FailingOutput) -> list[str]:
    """Which groups fail, where there are several, and which of them have another group's weights."""
    if len(failure.call.parts) < 2:
        return []
    names = groups_in_use(failure.call)
    others = [
        f"expert {names[i]} follows a product with the weight {what} of expert {names[j]}"
        for i, j, what in other_groups(failure)
    ]
    return _failing_groups(failure) + others[:4]


def _failing_groups(failure: FailingOutput) -> list[str]:
    """Which groups fail, where there are several and not all do."""
    parts = failure.call.parts
    failing = [i for i, part in enumerate(parts) if bool(part.of(failure.bad).any())]
    if len(parts) < 2 or len(failing) == len(parts):
        return []
    names = groups_in_use(failure.call)
    return [f"experts {ranges([names[i] for i in failing])} only, of {len(parts)} in use"]


def _other_rows(failure: FailingOutput) -> list[str]:
    """Failing rows whose bits are the right result of another row."""

    def key(row: Tensor) -> bytes:
        return bytes(codes_of(row).cpu().numpy().tobytes())

    first_with = {key(row): i for i, row in reversed(list(enumerate(failure.right)))}
    moved = []
    for i in torch.nonzero(failure.bad.any(dim=1))[:, 0].tolist():
        j = first_with.get(key(failure.output[i]))
        if j is not None and j != i:
            moved.append((i, j))
    if not moved:
        return []
    shown = ", ".join(f"{i} that of row {j}" for i, j in moved[:6]) + (", ..." if len(moved) > 6 else "")
    return [f"{len(moved)} failing rows hold the right result of another row: {shown}"]


def _one_value(failure: FailingOutput) -> list[str]:
    values = decode(failure.output)[failure.bad]
    if bool(torch.isnan(values).all()):
        return ["every failing element is NaN"]
    if len(values) > 1 and bool((values == values[0]).all()):
        return [f"every failing element is {float(values[0]):.9g}"]
    ratio = values / decode(failure.right)[failure.bad]
    if len(ratio) > 3 and bool((ratio == ratio[0]).all()):
        return [times_right(float(ratio[0]), f"{float(ratio[0]):.9g}")]
    return []


# --- quantisers, logits and other whole outputs -------------------------------------------------------------


def _of_whole_outputs(asked: Call, outputs: Mapping[str, Tensor], numerics: str | None) -> Diagnosis:
    """Every fault on the whole call; outputs are compared tensor by tensor."""
    call = replace(asked, beyond=Beyond.UNKNOWN)
    if "out" in outputs and call.resolved.get("out_dtype", outputs["out"].dtype) is None:
        call = replace(call, options={**call.options, "out_dtype": outputs["out"].dtype})
    base, right = _closest_recipe(call, outputs)
    bad, width, bounds = _refused(call, outputs, right, numerics)
    failing, total = sum(int(m.sum()) for m in bad.values()), sum(m.numel() for m in bad.values())
    results, most, tried = list[Explanation](), 0, 0
    for fault in faults_of(call.contract.name):
        if fault.applies(call) is not None:
            continue
        tried += 1
        predicted = by_name(run(call, *base, fault))
        if any(predicted[name].shape != outputs[name].shape for name in outputs):
            continue
        same = {name: agree(outputs[name], predicted[name]) for name in outputs}
        changed = {name: ~agree(predicted[name], right[name]) for name in outputs}
        explained = sum(int((bad[name] & same[name] & changed[name]).sum()) for name in outputs)
        if width is not None:
            near = {name: mask | _within(outputs[name], predicted[name], width[name]) for name, mask in same.items()}
            far = {n: mask | ~_within(predicted[n], right[n], FAR * width[n]) for n, mask in same.items()}
            told = sum(int((bad[name] & near[name] & far[name] & changed[name]).sum()) for name in outputs)
            exact = sum(int(mask.sum()) for mask in same.values())
            if told >= EXACT * failing:
                if exact < most:
                    continue
                most, same = exact, near
                explained = sum(int((bad[name] & same[name]).sum()) for name in outputs)
        contradicted = sum(int((~same[name] & (changed[name] | bad[name])).sum()) for name in outputs)
        counts = explained, failing, total, contradicted
        if explained > contradicted:
            results.append(Explanation(fault.name, "declared recipe", *counts, fault.seen))
    where = "; ".join(f"{name}: {describe(mask)}" for name, mask in bad.items() if bool(mask.any()))
    evidence = _evidence(call, outputs, bad)
    if not any(speaks(x) for x in outputs.values()) or evidence < needed(tried):
        results = []
    drawn = tuple(place(mask, output=name) for name, mask in bad.items())
    several, words = len(bad) > 1, list[str]()
    for name, mask in bad.items():
        ordered = (call.contract.in_order(call, name, x) for x in (outputs[name], right[name], mask))
        copied = _copied(call, outputs[name], mask)
        text = [*copied, *observed(*ordered, near=width is not None, paged=call.contract.paged(name))]
        if copied:
            text = [one for one in text if not one.startswith(UNLIKE)]
        words += [f"{name}: {one}" if several else one for one in text]
    said = _measured(call, outputs, right, bad, bounds)
    best = ranked(results)[:SHOWN]
    shown = tuple(words)
    return Diagnosis(failing, total, where, best, places=drawn, observed=shown, measured=said, evidence=evidence)


def _measured(
    call: Call,
    outputs: Mapping[str, Tensor],
    right: Mapping[str, Tensor],
    bad: Mapping[str, Tensor],
    bounds: Mapping[str, Bounds] | None,
) -> str | None:
    """What the failing elements are (:mod:`oracle.diagnosis.measured`), where something is said of each output that has
    some; ``bounds`` as :func:`_refused` gives them."""
    words = []
    for name in (name for name, mask in bad.items() if bool(mask.any())):
        x, due, mask = (call.contract.in_order(call, name, y) for y in (outputs[name], right[name], bad[name]))
        held = [(text, call.contract.in_order(call, name, y)) for text, y in _alike_inputs(call, outputs[name])]
        own = None if bounds is None or x.shape != outputs[name].shape else bounds.get(name)
        paged = call.contract.paged(name) or rows_by_ids(call, outputs[name])
        text = next(measured(x, due, mask, held=held, bounds=own, near=bounds is not None, paged=paged), None)
        if text is None:
            return None
        words.append(f"{name}: {text}")
    return " and ".join(words) or None


def _alike_inputs(call: Call, x: Tensor) -> list[tuple[str, Tensor]]:
    """Inputs that an output ``x`` may hold as they are, with what is said of it then."""
    state = {spec.name for spec in call.contract.inputs if spec.kind is Kind.STATE}
    alike = [(name, y) for name, y in call.inputs.items() if (y.shape, y.dtype) == (x.shape, x.dtype)]
    return [("not written" if name in state else f"is {name}, as it is", y) for name, y in alike]


def _evidence(call: Call, outputs: Mapping[str, Tensor], bad: Mapping[str, Tensor]) -> float:
    """How much a candidate must know to reproduce what fails, in bits: which elements do, which of the values found
    there each has, and of each of these that is no power of two its fraction, ``WIDE`` bits at most; of the output of
    which that is the least. Codes that fail with their scale tell nothing new."""
    scales = getattr(call.contract, "scale_dtype", torch.uint8)  # of what is published as bytes

    def bits(x: Tensor, mask: Tensor) -> float:
        n, k = mask.numel(), int(mask.sum())
        which = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
        values = torch.unique(bits_of(x)[mask])
        told = which + k * math.log2(len(values))
        if not x.is_floating_point():
            return told
        mantissa, _ = torch.frexp(decode(values.view(x.dtype)).abs())
        fraction = of_dtype(x.dtype).fraction_bits if x.dtype is not torch.float64 else WIDE
        return told + min(WIDE, fraction) * int(((mantissa != 0.5) & (mantissa > 0)).sum())

    results = []
    for name, mask in bad.items():
        if bool(mask.any()):
            x, where = (call.contract.in_order(call, name, y) for y in (outputs[name], mask))
            results.append(bits(x.view(scales) if name == "scale" and x.dtype is torch.uint8 else x, where))
    return min(results, default=0.0)


def _closest_recipe(call: Call, outputs: Mapping[str, Tensor]) -> tuple[tuple[Fault, ...], dict[str, Tensor]]:
    """The right output with the most bits of ``outputs``, and what gives it: of a quantiser's admitted recipes, one
    that is not the call's own, as a change of it (nothing for its own and for other contracts)."""

    def equal(predicted: Mapping[str, Tensor]) -> int:
        return sum(int(agree(outputs[name], predicted[name]).sum()) for name in predicted)

    best: tuple[Fault, ...] = ()
    right, name, operands = by_name(run(call)), call.contract.name, call.optional_operands
    for recipe in operands.recipes[1:] if operands is not None else ():
        other = with_recipe(recipe, name)
        predicted = by_name(run(call, other))
        if equal(predicted) > equal(right):
            best, right = (other,), predicted
    return best, right


def with_recipe(recipe: Recipe, contract: str) -> Fault:
    """Another declared recipe, as a change of a quantiser: no fault, but put in the same way."""
    changes = {Stage.RECIPE: lambda call, own: recipe}
    return Fault(f"recipe {recipe.name}", Family.ARITHMETIC, "", changes, named({contract}))


def _refused(
    call: Call, outputs: Mapping[str, Tensor], right: Mapping[str, Tensor], numerics: str | None
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None, dict[str, Bounds] | None]:
    """The elements that fail: those that differ from ``right``. Of a quantiser those that the judgement refuses too,
    a code only where it is wrong for the published scale and for the right one; of a contract without operands those
    outside the ranges of its first alternative, where ``right`` is one of several right results. These come with how
    far right results lie apart, by element, and with the bounds that are known, which are None for the others."""
    wrong = {name: ~agree(outputs[name], right[name]) for name in right}
    bad, width, known = call.contract.refused(call, outputs, right), None, None
    if bad is None and call.optional_operands is None:
        first = call.contract.admissible(call, numerics)[0]
        ranges = first.ranges(call.contract.expected(call)) or {}
        if isinstance(first, Bits):
            return {name: bits_of(outputs[name]) != bits_of(right[name]) for name in right}, None, None
        width, known = {name: _two_steps(right[name]) for name in wrong}, dict[str, Bounds]()
        if set(ranges) >= set(wrong):
            known = {name: bounds_of(ranges[name], "", wrong[name].device) for name in wrong}
            bad = {name: _outside_of(known[name], outputs[name]) for name in wrong}
            width |= {name: _apart(b) for name, b in known.items() if b.low.shape == width[name].shape}
    if bad is None or any(bad[name].numel() != mask.numel() for name, mask in wrong.items()):
        return wrong, width, known
    refused = {name: mask & bad[name].reshape(mask.shape) for name, mask in wrong.items()}
    return refused if any(bool(mask.any()) for mask in refused.values()) else wrong, width, known


def _copied(call: Call, x: Tensor, bad: Tensor) -> list[str]:
    """Which input the failing elements of an output of its shape and dtype are copies of; of memory that the call goes
    on from, that they were not written."""
    alike = {n: y for n, y in call.inputs.items() if (y.shape, y.dtype) == (x.shape, x.dtype)}
    results = [n for n, y in alike.items() if torch.equal(bits_of(x)[bad], bits_of(y)[bad])]
    held = {spec.name for spec in call.contract.inputs if spec.kind is Kind.STATE}
    copied, remaining = (
        "every failing element is that of {}, as it is",
        "the failing elements are not written: they hold what {} held",
    )
    return [(remaining if name in held else copied).format(name) for name in results if speaks(x[bad])]


def _two_steps(x: Tensor) -> Tensor:
    """Two units in the last place of each element, float64; 0 of integers and FP8."""
    if x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return decode(x).abs().nan_to_num(nan=0.0, posinf=0.0) * 2.0 ** (1 - of_dtype(x.dtype).fraction_bits)
    return torch.zeros(x.shape, dtype=torch.float64, device=x.device)


def _apart(bounds: Bounds) -> Tensor:
    """How far the ends of each range lie apart, float64; infinitely far where nothing is said."""
    return torch.where(bounds.free, torch.inf, (bounds.high - bounds.low).nan_to_num(nan=0.0))


def _within(x: Tensor, wanted: Tensor, width: Tensor) -> Tensor:
    """The elements of ``x`` no farther from the ``wanted`` ones than right results lie apart, or two units in the last
    place, bool."""
    value, due = (decode(y) if y.is_floating_point() else y.to(torch.float64) for y in (x, wanted))
    return (value - due).abs() <= torch.maximum(width, _two_steps(wanted))


def _outside_of(bounds: Bounds, x: Tensor) -> Tensor:
    """The elements of ``x`` that these bounds of its shape refuse, bool."""
    value = decode(x) if x.is_floating_point() else x.to(torch.float64)
    inside = (bounds.low <= value) & (value <= bounds.high) | torch.isnan(bounds.low) & torch.isnan(value)
    return ~(inside | bounds.free)
