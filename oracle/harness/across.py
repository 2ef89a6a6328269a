"""Which calls are compared across architectures, and the comparison of each: cases, and captured calls.

By default a routine with numerics is compared on a few cases of profile ``quick``: of every scheme of scales the
ordinary data, the deepest of these, data whose sums cancel, and data with outliers. Where an arch's usual arithmetic
takes powers of two as scales and a case has others, the call with its scales rounded up to powers of two is compared
too. A captured call stands for its arch with the bits that the hardware gave, where a schedule has all of them.

Of a routine without numerics for each arch the right kernel is run and judged once for every arch: one result must be
right on all of them.

Not covered: the comparison of one call (:mod:`oracle.diagnosis.across`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from oracle.diagnosis.across import POWERS, Compared, Same, across
from oracle.errors import NumericsError
from oracle.fixtures import captures
from oracle.harness.jobs import Lost, divided, in_order
from oracle.numbers.formats import decode, same_bits
from oracle.numbers.rounding import power_of_two
from oracle.routines import cases, get, profiles, registered
from oracle.routines.base import Call, Contract
from oracle.routines.cases import Case
from oracle.tensorcore.logits import LOGITS
from oracle.tensorcore.schedules import schedules

ARCHES = ("sm80", "sm89", "sm90", "sm100", "sm120", "cpu")
FAMILIES = (("cancel",), ("outlier", "heavy"))
"""Beside ordinary data, the first of each that a routine has: sums that lose leading bits, products far apart."""
ORDINARY = cases.DEFAULT_FAMILY
TRIED = 4  # captures of a routine of which one is compared: the first that a schedule reproduces


@dataclass(frozen=True)
class Task:
    """One thing to compare: a case by its id, the captures of a contract (by their ids), or a contract without
    numerics."""

    contract: str
    case: str = ""
    captures: tuple[str, ...] = ()


Found = list["Compared | Same | str"]
"""What a task gives: comparisons, or a line that says why there is none."""


def tasks(
    arches: Sequence[str], *, contract: str | None, profile: str | None, case: str | None, folder: Path | None
) -> list[Task]:
    """What is to be compared, cases of a routine first, then its captures.

    Parameters
    ----------
    profile : every case of it; None: the few of :func:`chosen`.
    folder : of captures; None replays none.
    """
    if case is not None:
        parsed = cases.parse(case)
        return [Task(parsed.contract, str(parsed))]
    names = list(registered()) if contract is None else [get(contract).name]
    recorded: dict[str, list[str]] = {}
    for captured in [] if folder is None else captures.load(folder / "captures"):
        if captured.recording.arch in arches and captured.unsupported is None and not captured.again:
            recorded.setdefault(captured.contract, []).append(captured.id)
    tasks_made: list[Task] = []
    for name in names:
        listed = chosen(name) if profile is None else profiles.cases(name, profile)
        if not get(name).numerics:
            tasks_made += [Task(name, str(one)) for one in listed[:1]]
            continue
        tasks_made += [Task(name, str(one)) for one in listed]
        if name in recorded:
            tasks_made.append(Task(name, captures=tuple(recorded[name][:TRIED])))
    return tasks_made


def chosen(contract: str) -> list[Case]:
    """The few cases on which a routine is compared by default."""
    every = profiles.cases(contract, "quick")
    first = {case.scheme: case for case in reversed(every) if case.family == ORDINARY}
    ordinary = [case for case in every if case.family == ORDINARY and first[case.scheme].dtypes == case.dtypes]
    plain = [case for case in ordinary if not case.options] or ordinary
    deepest = [max((c for c in plain if c.scheme == scheme), key=_depth, default=None) for scheme in reversed(first)]
    rest = [next((c for c in every if c.family in names), None) for names in FAMILIES]
    wide = next((c for c in every if c.family == ORDINARY and c.dtypes.endswith("-f32")), None)
    ids = dict.fromkeys(str(c) for c in (*deepest, wide, *rest) if c is not None)
    return [cases.parse(text) for text in ids] or every[:1]


def _depth(case: Case) -> int:
    """The products of one sum, as far as the extents of a case say it."""
    named = dict(case.extents)
    return named.get("k", named.get("d", 0))


def run(
    wanted: Sequence[Task], arches: Sequence[str], folder: Path | None, *, jobs: int, started: Callable[[int], None]
) -> Generator[Found]:
    """What every task gives, in order."""
    make = partial(_carrying_out, tuple(wanted), tuple(arches), folder)
    for task, result in zip(
        wanted,
        in_order(make, range(len(wanted)), jobs=jobs, threads=divided(jobs, None), started=started),
        strict=True,
    ):
        yield [f"{task.contract}: {result.cause}"] if isinstance(result, Lost) else result


@contextmanager
def _carrying_out(
    wanted: Sequence[Task], arches: Sequence[str], folder: Path | None
) -> Iterator[Callable[[int], Found]]:
    yield lambda number: compared(wanted[number], arches, folder)


def compared(task: Task, arches: Sequence[str], folder: Path | None) -> Found:
    """What one task gives."""
    contract = get(task.contract)
    if task.captures:
        assert folder is not None
        return [_captured(contract, task.captures, arches, folder)]
    case = cases.parse(task.case)
    options = case.call_options()
    dtype = options.get("out_dtype")
    if not isinstance(dtype, torch.dtype):
        dtype = case.out_dtype if "-" in case.dtypes and contract.numerics else torch.bfloat16
    call = _call(contract, case.inputs(), options, dtype)
    if not contract.numerics:
        return [same(call, arches, id=task.case)]
    rows: Found = [across(call, arches, id=task.case, captured={})]
    if case.family == ORDINARY and (rounded := _with_powers(call, arches)) is not None:
        rows.append(across(rounded, arches, id=f"{task.case}{POWERS}", captured={}))
    return rows


def same(call: Call, arches: Sequence[str], *, id: str) -> Same:
    """Whether one result is right on every arch: what the right kernel gives is the same for all, and passes on all."""
    contract, result = call.contract, {arch: call.contract.kernel(call.on(arch)) for arch in arches}
    first = result[arches[0]]
    differs = [a for a in arches if any(not _alike(result[a][name], first[name]) for name in first)]
    refused = [a for a in arches if contract.judged(call.on(a), first).status.is_failure]
    operands = call.optional_operands
    recipes = () if operands is None else tuple(recipe.name for recipe in operands.recipes)
    return Same(contract.name, id, recipes, tuple(dict.fromkeys((*differs, *refused))))


def _alike(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not x.is_floating_point() or x.dtype is torch.float64:
        return bool(((x == y) | (x != x) & (y != y)).all())
    return bool(same_bits(x, y).all())


def _call(contract: Contract, inputs: Mapping[str, Tensor], options: Mapping[str, object], dtype: torch.dtype) -> Call:
    """The checked call, whose options name the dtype where they leave it open."""
    call = Call(contract, inputs, options, out_dtype=dtype).checked()
    if call.resolved.get("out_dtype", dtype) is None:
        call = Call(contract, inputs, {**options, "out_dtype": dtype}, out_dtype=dtype).checked()
    return call


def _with_powers(call: Call, arches: Sequence[str]) -> Call | None:
    """The call with float32 scales rounded up to powers of two, where an arch's usual arithmetic asks for such."""
    table, operands = call.contract.numerics_of(call), call.optional_operands
    names = [] if operands is None else [operands.roles.get(part, "") for part in ("a_scale", "b_scale")]
    if not names or any(
        call.inputs.get(name, call.inputs[next(iter(call.inputs))]).dtype != torch.float32 for name in names
    ):
        return None
    inputs = {name: _up(x) if name in names else x for name, x in call.inputs.items()}
    rounded = replace(call, inputs=inputs).checked()
    for arch in arches:
        usual = table.get(arch, ("",))[0]
        if usual and call.contract.why_not(call, usual) and not call.contract.why_not(rounded, usual):
            return rounded
    return None


def _up(scale: Tensor) -> Tensor:
    """Positive float32 scales rounded up to powers of two; others stay as they are."""
    fraction, exponent = torch.frexp(decode(scale))
    up = power_of_two(torch.where(fraction == 0.5, exponent - 1, exponent)).to(torch.float32)
    return torch.where((scale > 0) & torch.isfinite(scale), up, scale)


def _captured(contract: Contract, ids: Sequence[str], arches: Sequence[str], folder: Path) -> Compared | str:
    """The first of some captures that a schedule reproduces, on every arch; or a line that none is."""
    schedule_names = {schedule.name for schedule in schedules()} | set(LOGITS)
    for capture in captures.load(folder / "captures"):
        if capture.id not in ids:
            continue
        output = capture.outputs(contract.returns)
        assert isinstance(output, Tensor), "a routine with numerics has one output"
        call, arch = _call(contract, capture.inputs(), capture.call(), output.dtype), capture.recording.arch
        try:
            matched = contract.judged(call.on(arch), output).matches
            if matched in schedule_names:
                recorded = {arch: (capture.subject, output, str(matched))}
                return across(call, arches, id=capture.id, captured=recorded)
        except NumericsError as error:  # no model of the arch that made it
            return f"{contract.name}: no captured output can be compared: {error}"
    return f"{contract.name}: no schedule alone has every bit of its captured outputs"
