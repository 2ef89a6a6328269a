"""One call on several architectures: where right outputs differ, by how much, by which step, and who accepts them.

Every arch's usual arithmetic predicts the output (:meth:`~oracle.routines.base.Contract.by_schedule`). Where an arch
names no schedule, as float32 in any order does, it has no one right output: the exact value, rounded once, stands for
it. Of each pair of arches (:class:`Pair`)

    equal       elements with equal bits (any NaN equals any NaN, -0 differs from +0)
    ulps        largest |x - y| / ulp, the ulp of the output's dtype at the larger of both
    intervals   largest |x - y| / (high - low + ulp), for the interval [low, high] of either arch
    steps       which step of the arithmetic makes the difference
    accepted    whether the output of the one passes when it is judged under the other

A step is a group of fields of the schedule or of its instruction (:func:`changes`). It is proved to be a cause by
computing the call again: the one arch's schedule with that step of the other. ``alone`` counts the differing elements
that get the other's bits so. The steps of a pair are found one after the other, each time the one that makes most bits
equal, until all are; with every step replaced the schedule is the other one.

Not covered: routines whose bits no schedule alone gives (layers of experts); the other schedules that an arch admits
beside its usual one, for which the judgement stands.

Source: derived in this file from the schedules of :mod:`oracle.tensorcore.schedules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum

import torch
from torch import Tensor

from oracle.errors import NumericsError
from oracle.numbers.formats import decode, of_dtype, same_bits
from oracle.numbers.rounding import power_of_two
from oracle.routines.base import Call
from oracle.tensorcore.instructions import Instruction, Sum
from oracle.tensorcore.logits import LOGITS
from oracle.tensorcore.schedules import Promotion, Schedule, get, is_class
from oracle.verdict.ranges import values_of

POWERS = " with scales rounded up to powers of two"
"""Behind the id of a case whose scales were."""
EXACT = "the exact value, rounded once"
IDEAL_BITS = 36
"""Alignment bits of the accumulator that leads from a schedule to the exact value."""

_WIDTH, _ALIGNMENT, _OPERANDS = "instruction width", "alignment bits", "operand format"
_PROMOTION, _SCALES, _EPILOGUE = "promotion interval", "place of the scales", "epilogue"
_HEADS, _REST, _UNKNOWN = "sum over heads", "other roundings to float32", "not explained"
_JOINED = "promotion and place of the scales"

_Fields = tuple[tuple[str, ...], tuple[str, ...]]
"""Fields of a schedule, and of its instruction."""
# What each step replaces. Every other field that says how a sum is computed is a step of its own.
_STEPS: Mapping[str, _Fields] = {
    _OPERANDS: (("dequantises", "widens"), ("operands", "flush_subnormals", "float16_out")),
    _WIDTH: ((), ("k", "group", "order", "sum", "summed")),
    _ALIGNMENT: ((), ("align_bits", "out_bits", "wide_out_bits", "round_toward_zero")),
    _PROMOTION: (("interval", "promotion"), ()),
    _SCALES: (("scales_inside",), ("scale_block", "scale_format")),
    _EPILOGUE: (("epilogue", "fused_bias", "bias_after_cast", "flushes"), ()),
}
_WHAT_IT_TAKES = {"operands", "float16_out", "scale_block", "scale_format"}
"""What an instruction accepts: no sum depends on it while the operands of a call are the same."""
_ABOUT = {"name", "arch", "source", "status", "unshown", "seen_in", "instruction", "nan_float32", "nan_float16"}


@dataclass(frozen=True)
class Change:
    """One step that two schedules have differently.

    ``said`` has both values; ``of_schedule`` and ``of_instruction`` are what the other schedule has there.
    """

    name: str
    said: str
    of_schedule: Mapping[str, object]
    of_instruction: Mapping[str, object]

    def made(self, schedule: Schedule) -> Schedule:
        """``schedule`` with this step of the other one."""
        inst = replace(schedule.instruction, **self.of_instruction)  # type: ignore[arg-type]
        name = f"{schedule.name}, {self.name} {self.said}"
        return replace(schedule, **{**self.of_schedule, "name": name, "instruction": inst})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Step:
    """A step and what it explains.

    Attributes
    ----------
    name, said : as ``alignment bits`` and ``13 to 25``.
    alone : differing elements that get the other arch's bits when this step alone is replaced; None where it cannot be
        replaced alone, for the reason ``why``.
    together : the same for this step and those before it.
    """

    name: str
    said: str
    alone: int | None
    together: int
    why: str = ""


@dataclass(frozen=True)
class Judged:
    """The judgement of one arch's output under another: its status, how many elements are outside, what it rests on."""

    status: str
    passes: bool
    outside: int
    basis: str


@dataclass(frozen=True)
class Side:
    """What one arch has for a call: the usual ``numerics``, or why it has none; ``captured``: whose output was recorded
    on that arch and stands here for the prediction."""

    arch: str
    numerics: str = ""
    exact: bool = False
    captured: str = ""
    why: str = ""


@dataclass(frozen=True)
class Pair:
    """Two arches and one call; ``accepted`` is how each output is judged under the other arch."""

    one: str
    other: str
    elements: int
    equal: int
    ulps: float
    intervals: tuple[float | None, float | None]
    steps: tuple[Step, ...]
    accepted: tuple[Judged, Judged]

    @property
    def differing(self) -> int:
        """Elements whose bits differ."""
        return self.elements - self.equal


@dataclass(frozen=True)
class Compared:
    """One call on every arch."""

    contract: str
    id: str
    shape: str
    dtype: str
    sides: tuple[Side, ...]
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Same:
    """A routine without numerics by arch: ``recipes`` that it admits, if any, and the arches on which the result of the
    first one is not the right one (none: all arches share one right result)."""

    contract: str
    id: str
    recipes: tuple[str, ...]
    otherwise: tuple[str, ...]


@dataclass(frozen=True)
class _Way:
    """How an arch computes: its schedule, and the name that says what becomes of the products."""

    schedule: Schedule
    numerics: str


def across(call: Call, arches: Sequence[str], *, id: str, captured: Mapping[str, tuple[str, Tensor, str]]) -> Compared:
    """The call on each of ``arches``, pair by pair.

    Parameters
    ----------
    call : a checked call, whose options name the output's dtype where they can.
    captured : by arch, whose output it is, the output that the hardware gave, and the schedule that has all its bits;
        no step is named where it has not.
    """
    contract, exact = call.contract, call.contract.expected(call)["out"]
    due = contract.outputs(call)["out"].specified
    specified = torch.ones(exact.shape, dtype=torch.bool, device=exact.device) if due is None else due
    sides, ways, outputs = list[Side](), dict[str, _Way | None](), dict[str, Tensor]()
    for arch in arches:
        side, ways[arch], result = _side(call.on(arch), captured.get(arch))
        sides.append(side)
        if not side.why:
            outputs[arch] = exact if result is None else result
    asked = _Asked(call, specified, exact, outputs)
    known = [arch for arch in arches if arch in outputs]
    pairs = [asked.pair(x, y, ways[x], ways[y]) for i, x in enumerate(known) for y in known[i + 1 :]]
    shape = ", ".join(f"{name} {list(x.shape)}" for name, x in call.inputs.items())
    dtype = str(exact.dtype).removeprefix("torch.")
    return Compared(contract.name, id, shape, dtype, tuple(sides), tuple(pairs))


def changes(a: Schedule, b: Schedule) -> list[Change]:
    """The steps in which ``b`` computes otherwise than ``a``; empty where they compute alike.

    Where the scales enter at another place, promotion and epilogue change with it and are one step; so are the operands
    where one of the two dequantises them.
    """
    known = {name for pair in _STEPS.values() for group in pair for name in group} | _ABOUT
    outer: dict[str, _Fields] = {f.name: ((f.name,), ()) for f in fields(Schedule) if f.name not in known}
    inner: dict[str, _Fields] = {f.name: ((), (f.name,)) for f in fields(Instruction) if f.name not in known}
    groups = {**_STEPS, **outer, **inner}
    differ = [name for name, group in groups.items() if _differ(a, b, *group)]

    def change(name: str, *steps: str) -> Change:
        text = "; ".join(_said(a, b, groups[step]) for step in steps if step in differ)
        own, of_instruction = (tuple(field for step in steps for field in groups[step][i]) for i in (0, 1))
        chosen = {field: getattr(b, field) for field in own}
        return Change(name, text, chosen, {field: getattr(b.instruction, field) for field in of_instruction})

    together: list[str] = []
    if a.scales is not b.scales or a.dequantises != b.dequantises:
        together = [_PROMOTION, _SCALES, _EPILOGUE]
        if a.dequantises != b.dequantises:
            together.append(_OPERANDS)
        if Sum.BLOCK_SCALED_GROUPS in (a.instruction.sum, b.instruction.sum):
            together.append(_WIDTH)
    result = [change(_OPERANDS if _OPERANDS in together else _JOINED, *together)] if together else []
    for name in (name for name in differ if name not in together):
        same_interval = name == _PROMOTION and a.interval == b.interval
        result.append(change("promotion arithmetic" if same_interval else name.replace("_", " "), name))
    return result


def ulps_apart(x: Tensor, y: Tensor) -> Tensor:
    """``|x - y|`` of two tensors of any one shape, in ulps of their dtype at the larger of both.

    Returns float64 of their shape: infinity where one alone is finite, 0 for equal values and for two NaN.
    """
    fmt, a, b = of_dtype(x.dtype), decode(x), decode(y)
    finite, same = torch.isfinite(a) & torch.isfinite(b), (a == b) | (torch.isnan(a) & torch.isnan(b))
    apart = torch.where(finite, a - b, 0.0).abs() / _ulp(torch.maximum(a.abs(), b.abs()), fmt.emin, fmt.fraction_bits)
    return torch.where(same, 0.0, torch.where(finite, apart, math.inf))


# --- a call -------------------------------------------------------------------------------------------------


def _side(call: Call, recorded: tuple[str, Tensor, str] | None) -> tuple[Side, _Way | None, Tensor | None]:
    """What an arch has for the call, how it computes (None: by no one schedule), and what it gives."""
    if recorded is not None:
        whose, output, name = recorded
        return Side(call.arch, name, captured=whose), _way(name), output
    try:
        name = call.contract.arithmetics(call)[0]
        if is_class(name):
            return Side(call.arch, name, exact=True), None, None
        way = _way(name)
        return Side(call.arch, name), way, _bits(call, way)
    except NumericsError as error:
        return Side(call.arch, why=str(error)), None, None


def _bits(call: Call, way: _Way) -> Tensor:
    return call.contract.by_schedule(call, way.schedule, way.numerics)["out"]


def _way(name: str) -> _Way:
    return _Way(get(LOGITS[name].chain if name in LOGITS else name), name)


class _Asked:
    """One call with its outputs by arch; a judgement is asked for once."""

    def __init__(self, call: Call, specified: Tensor, exact: Tensor, outputs: Mapping[str, Tensor]) -> None:
        self.call, self.specified, self.exact, self.outputs = call, specified, exact, outputs
        self._calls = {arch: call.on(arch) for arch in outputs}
        self._widths: dict[str, Tensor | None] = {}
        self._known: dict[str, list[tuple[Tensor, Judged]]] = {arch: [] for arch in outputs}

    def pair(self, one: str, other: str, by_one: _Way | None, by_other: _Way | None) -> Pair:
        x, y = self.outputs[one], self.outputs[other]
        equal = self._equal(x, y)
        apart = torch.where(self.specified, ulps_apart(x, y), 0.0)
        steps: tuple[Step, ...] = ()
        if int(equal.sum()) < int(self.specified.sum()):
            steps = self._causes(by_one, by_other, x, y)
        return Pair(
            one,
            other,
            int(self.specified.sum()),
            int(equal.sum()),
            float(apart.max()) if apart.numel() else 0.0,
            (self._in_intervals(one, x, y), self._in_intervals(other, x, y)),
            steps,
            (self._judged(one, other), self._judged(other, one)),
        )

    def _equal(self, x: Tensor, y: Tensor) -> Tensor:
        """Specified elements with equal bits."""
        return same_bits(x, y) & self.specified

    def _same(self, x: Tensor, y: Tensor) -> bool:
        """Whether every specified element has equal bits."""
        return bool((same_bits(x, y) | ~self.specified).all())

    def _judged(self, of: str, under: str) -> Judged:
        """The output of an arch, judged under another; one with the same bits is judged once."""
        output = self.outputs[of]
        for bits, judged in self._known[under]:
            if self._same(bits, output):
                return judged
        result = self.call.contract.judged(self._calls[under], {"out": output})
        judged = Judged(
            str(result.status), not result.status.is_failure, result.outside, result.basis or result.summary
        )
        self._known[under].append((output, judged))
        return judged

    def _in_intervals(self, arch: str, x: Tensor, y: Tensor) -> float | None:
        """The largest distance in intervals of an arch; None where right outputs are no interval for each element."""
        if arch not in self._widths:
            sets = self.call.contract.admissible(self._calls[arch], None)[0]
            ranges = sets.ranges({"out": self.exact})
            width = None
            if ranges is not None:
                due = ranges["out"]
                width = torch.where(due.free.to(torch.bool), math.inf, values_of(due.high) - values_of(due.low))
            self._widths[arch] = width
        if (width := self._widths[arch]) is None:
            return None
        fmt, a, b = of_dtype(x.dtype), decode(x), decode(y)
        counted = self.specified & torch.isfinite(a) & torch.isfinite(b) & ~torch.isnan(width)
        ulp = _ulp(torch.maximum(a.abs(), b.abs()), fmt.emin, fmt.fraction_bits)
        apart = torch.where(counted, (a - b).abs() / (width + ulp), 0.0)
        return float(apart.max()) if apart.numel() else 0.0

    # --- causes ---------------------------------------------------------------------------------------------

    def _causes(self, one: _Way | None, other: _Way | None, x: Tensor, y: Tensor) -> tuple[Step, ...]:
        for way, supplied in ((one, x), (other, y)):
            if way is not None and not self._same(_bits(self.call, way), supplied):
                why = f"the captured output has not the bits of {way.numerics}"
                return (Step(_UNKNOWN, "", None, 0, why),)
        if one is None and other is None:
            return ()
        if one is None:  # the way to the exact value is one that leaves a schedule
            assert other is not None
            return self._to_exact(other, y, x)
        if other is None:
            return self._to_exact(one, x, y)
        steps = changes(one.schedule, other.schedule)
        if _heads(one.numerics) != _heads(other.numerics):
            steps.append(Change(_HEADS, f"{one.numerics} to {other.numerics}", {}, {}))

        def run(chosen: Sequence[Change]) -> Tensor:
            schedule, numerics = one.schedule, one.numerics
            for change in chosen:
                schedule = change.made(schedule)
                numerics = other.numerics if change.name == _HEADS else numerics
            return _bits(self.call, _Way(schedule, numerics))

        return self._attributed(steps, run, x, y)

    def _to_exact(self, way: _Way, x: Tensor, y: Tensor) -> tuple[Step, ...]:
        """From a schedule to the exact value: its accumulator made wide, then all that is left."""
        inst, differing = way.schedule.instruction, self.specified & ~same_bits(x, y)
        total, steps = int(differing.sum()), []
        if inst.align_bits is not None and inst.align_bits < IDEAL_BITS:
            wide = {"align_bits": IDEAL_BITS, "out_bits": 23}
            text = _said(way.schedule, replace(way.schedule, instruction=replace(inst, **wide)), _STEPS[_ALIGNMENT])  # type: ignore[arg-type]
            change = Change(_ALIGNMENT, text, {}, wide)
            result = _bits(self.call, _Way(change.made(way.schedule), way.numerics))
            explained = int((same_bits(result, y) & differing).sum())
            steps.append(Step(_ALIGNMENT, text, explained, explained))
            if self._same(result, y):
                return tuple(steps)
        why = "no schedule is without these roundings"
        return (*steps, Step(_REST, f"of sums, promotions and scales, to {EXACT}", None, total, why))

    def _attributed(
        self, steps: Sequence[Change], run: Callable[[Sequence[Change]], Tensor], x: Tensor, y: Tensor
    ) -> tuple[Step, ...]:
        """The steps that lead from the bits of ``x`` to those of ``y``, the one that makes most bits equal first; none
        that could be left out."""
        differing, taken, left = self.specified & ~same_bits(x, y), list[tuple[Change, ...]](), list(steps)
        alone: dict[str, int] = {}
        refused: dict[str, str] = {}
        current = x
        while left and not self._same(current, y):
            tried: list[tuple[int, tuple[Change, ...], Tensor]] = []
            for change in left:
                try:
                    result = run([*_flat(taken), change])
                except NumericsError as error:  # told where the step is named: it cannot be replaced alone
                    refused.setdefault(change.name, str(error))
                    continue
                tried.append((int(self._equal(result, y).sum()), (change,), result))
                if not taken:
                    alone[change.name] = int((same_bits(result, y) & differing).sum())
            if not tried:  # no one of them can be replaced without another
                tried = [(0, tuple(left), run([*_flat(taken), *left]))]
            _, chosen, current = max(tried, key=lambda each: each[0])
            taken, left = [*taken, chosen], [change for change in left if change not in chosen]
        assert self._same(current, y), "every field that differs is in a step"
        for chosen in list(taken) if len(taken) > 1 else ():
            rest = [each for each in taken if each is not chosen]
            taken = rest if self._same(run(_flat(rest)), y) else taken
        results = []
        for count, chosen in enumerate(taken, 1):
            together = int((same_bits(run(_flat(taken[:count])), y) & differing).sum())
            name, text = ", ".join(c.name for c in chosen), "; ".join(c.said for c in chosen)
            results.append(Step(name, text, alone.get(name), together, refused.get(chosen[0].name, "")))
        return tuple(results)


def _flat(taken: Sequence[Sequence[Change]]) -> list[Change]:
    return [change for chosen in taken for change in chosen]


def _heads(numerics: str) -> list[object]:
    """How a reduction adds heads; empty where there are none."""
    result = LOGITS.get(numerics)
    return (
        [] if result is None else [getattr(result, f.name) for f in fields(result) if f.name not in (*_ABOUT, "chain")]
    )


def _ulp(value: Tensor, emin: int, fraction_bits: int) -> Tensor:
    """The ulp at float64 values, those of an infinity or a NaN at the least normal."""
    safe = torch.where(torch.isfinite(value) & (value != 0), value, 2.0**emin)
    return power_of_two((torch.frexp(safe)[1] - 1).clamp(min=emin) - fraction_bits)


# --- fields -------------------------------------------------------------------------------------------------


def _differ(a: Schedule, b: Schedule, of_schedule: Sequence[str], of_instruction: Sequence[str]) -> bool:
    """Whether two schedules differ in fields on which a sum depends."""
    counted = [name for name in of_instruction if name not in _WHAT_IT_TAKES]
    if a.scales_inside and b.scales_inside and "scale_format" in of_instruction:
        counted.append("scale_format")
    if (a.dequantises or a.widens) and (b.dequantises or b.widens) and "operands" in of_instruction:
        counted.append("operands")
    if any(getattr(a, name) != getattr(b, name) for name in of_schedule):
        return True
    return any(getattr(a.instruction, name) != getattr(b.instruction, name) for name in counted)


def _said(a: Schedule, b: Schedule, group: _Fields) -> str:
    """Both values of a step in words."""
    (of_schedule, of_instruction), words = group, _WORDS.get(group)
    if words is not None:
        return f"{words(a)} to {words(b)}"
    pairs = [(getattr(a, name), getattr(b, name)) for name in of_schedule]
    pairs += [(getattr(a.instruction, name), getattr(b.instruction, name)) for name in of_instruction]
    return "; ".join(f"{_word(x)} to {_word(y)}" for x, y in pairs if x != y)


def _word(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)


def _operands(s: Schedule) -> str:
    name = s.instruction.operands[0]
    return f"dequantised {name}" if s.dequantises else f"codes as {name}" if s.widens else "the codes"


def _width(s: Schedule) -> str:
    i = s.instruction
    exact = f", exact sums of {i.summed}" if i.sum is Sum.BLOCK_SCALED_GROUPS else ""
    added = ", c added after" if i.sum is Sum.FUSED_THEN_ADD else ""
    return f"{i.k} products in sums of {i.group}{exact}{added}"


def _alignment(s: Schedule) -> str:
    i = s.instruction
    return f"{i.align_bits} (result {i.out_bits})"


def _promotion(s: Schedule) -> str:
    if s.promotion is Promotion.NONE:
        return "one chain over K"
    return f"every {s.interval or 'K'}, {s.promotion.value}"


def _scales(s: Schedule) -> str:
    return f"scales {'inside the instruction' if s.scales_inside else 'outside'}"


_WORDS: Mapping[_Fields, Callable[[Schedule], str]] = {
    _STEPS[_OPERANDS]: _operands,
    _STEPS[_WIDTH]: _width,
    _STEPS[_ALIGNMENT]: _alignment,
    _STEPS[_PROMOTION]: _promotion,
    _STEPS[_SCALES]: _scales,
    _STEPS[_EPILOGUE]: lambda s: s.epilogue.value,
}
