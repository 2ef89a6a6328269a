"""A failing output that is right for another call: which option or input the kernel takes otherwise than it is given.

A kernel is often right for a call that it was not given. So the call is changed as a kernel may misread it, and the
output is judged for the changed call; one that is right for it, in every element, is named by the change:

    options     an option taken as its default, or as another of its few values
    optional    an optional input taken as not given; a bias or a state as 0, factors as 1, a bound as none
    widths      integers of 64 bits read as words of 32
    formats     E4M3 read as E5M2 and the other way round; float32 factors or a bias rounded to bfloat16 or float16
    ends        nothing comes from some index on, of values, codes, factors or scores; slots and ids from some index on,
                or ids from some number on, taken as -1, or -1 as 0; counts cut to some number or to whole steps; groups
                from some offset on taken as empty
    memory      a view read as if its memory were packed; a matrix as if it lay transposed
    indices     an axis of scales, factors or indices: the first for all, one for two neighbours, the next, the one
                before, backwards; from some index on the first, the last before it, or those from 0 on again

A change is tried only where it changes values, and :data:`TRIED` of them at most, fewer of a large call, in this order;
the first that is right is named. It must specify at least as many elements as the call itself, and leave no more of
them open: an output is no evidence where nothing is said of it. It may specify less where nearly all (:data:`MOST`) of
what it leaves out fails, as 0, NaN or old memory for a result that is neither: that was not computed. Of several of
these that which leaves out least is named, and only where no other change is right. Nothing is tried where fewer than
one of :data:`SHARE` elements fails, and no change that brings a NaN into the inputs explains outputs without one.

Not covered: two changes at once; other changes of codes and values, which the catalogue has.

NaN and infinities are judged as the contract judges them. Source: derived here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from oracle.diagnosis.observed import CUTS, cuts, late_picks, picked, picks
from oracle.errors import OracleError
from oracle.numbers.formats import decode
from oracle.routines.base import FP8, Call, Output, by_name
from oracle.routines.traits import Kind, OptionSpec, TensorSpec
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.sets import bits_of

TRIED = 96  # changed calls that are judged at most
WORK = 1 << 25  # elements of the inputs and outputs of all changed calls together
FACTORS = (Kind.SCALES, Kind.ALPHA, Kind.WEIGHTS)
SHARE = 512  # an option or an input enters more than one of so many elements
MOST = 0.95  # of the elements that a changed call leaves out
STEPS = (4, 8, 16)  # in which rows go, so that the last ones are left out
DROPPED = (Kind.LOGITS, Kind.CODES, Kind.VALUES, Kind.WEIGHTS, Kind.BIAS)
INDEXED = (*FACTORS, Kind.BIAS, Kind.PAGES, Kind.SLOTS, Kind.POSITIONS, Kind.IDS)
OTHER = {torch.float8_e4m3fn: torch.float8_e5m2, torch.float8_e5m2: torch.float8_e4m3fn}
Changed = tuple[str, Mapping[str, Tensor], Mapping[str, object]]


def taken_otherwise(call: Call, output: Output, verdict: Verdict, numerics: str | None) -> str | None:
    """The change of the call for which its failing ``output`` is right, in words; None without one.

    ``verdict`` is that of the call itself. NaN as the head of this file says; source: derived there."""
    judged = by_name(output)
    left = tries(call, judged)
    if not left or not any(_speaks(x) for x in judged.values()):
        return None
    if verdict.outside * SHARE < verdict.total:
        return None
    nan = any(map(_has_nan, judged.values()))
    least: tuple[int, str] | None = None
    for said, inputs, options in _changes(call):
        changed = replace(call, inputs=inputs, options=options, given=None)
        left -= 1
        try:
            held = call.contract.judged(changed, output, numerics) if nan or not _brings_nan(inputs, call) else None
        except OracleError:  # the contract takes no such call, or another output belongs to it
            held = None
        if held is not None and _right(held, verdict):
            return said
        if held is not None and _left_out(held, verdict, call, judged) and (least is None or held.total > least[0]):
            least = held.total, said
        if left == 0:
            break
    return least[1] if least else None


def tries(call: Call, output: Mapping[str, Tensor]) -> int:
    """How many changed calls are judged; none on a GPU."""
    tensors = [*call.inputs.values(), *output.values()]
    return 0 if any(x.is_cuda for x in tensors) else min(TRIED, WORK // (1 + sum(x.numel() for x in tensors)))


def _right(held: Verdict, verdict: Verdict) -> bool:
    passed = held.status in (Status.PASSED, Status.MISTRUSTED)
    return passed and held.total >= verdict.total > 0 and held.unconstrained <= verdict.unconstrained


def _left_out(held: Verdict, verdict: Verdict, call: Call, output: Mapping[str, Tensor]) -> bool:
    """Whether the changed call, for which the output is right, leaves out what fails because it was not computed."""
    dropped = verdict.total - held.total
    if held.status is not Status.PASSED or not 0 < MOST * dropped <= verdict.outside:
        return False
    due = by_name(call.contract.reference(call.inputs, **call.options))
    if any(due[name].shape != x.shape for name, x in output.items()):
        return False
    idle = sum(int((_untouched(x, call.inputs.get(name)) & ~_nothing(due[name])).sum()) for name, x in output.items())
    return idle >= MOST * verdict.outside


def _untouched(x: Tensor, before: Tensor | None) -> Tensor:
    """Elements that are 0 or NaN, or what a state of that name held ``before``, bool."""
    if before is None or (before.shape, before.dtype) != (x.shape, x.dtype):
        return _nothing(x)
    return _nothing(x) | (bits_of(x) == bits_of(before))


def _nothing(x: Tensor) -> Tensor:
    """Elements that are 0 or NaN, bool."""
    value = decode(x) if x.dtype in FP8 else x
    return (value == 0) | torch.isnan(value)


def _has_nan(x: Tensor) -> bool:
    return x.is_floating_point() and bool(torch.isnan(decode(x)).any())


def _brings_nan(inputs: Mapping[str, Tensor], call: Call) -> bool:
    """Whether a changed input has a NaN, and no input of the call."""
    changed = [x for name, x in inputs.items() if x is not call.inputs[name]]
    return any(map(_has_nan, changed)) and not any(map(_has_nan, call.inputs.values()))


def _speaks(x: Tensor) -> bool:
    """Whether an output holds two different values."""
    flat = bits_of(x).flatten()
    return len(flat) > 1 and bool((flat != flat[0]).any())


def _changes(call: Call) -> Iterator[Changed]:
    """The changed calls, the most likely first; none has the values of the call itself."""
    contract, resolved, inputs = call.contract, call.resolved, dict(call.inputs)
    for option in contract.options:
        for value in _values(option, resolved[option.name]):
            yield f"{option.name} taken as {_word(value)}", inputs, {**call.options, option.name: value}
    given = [spec for spec in contract.inputs if spec.name in inputs]
    for spec in (spec for spec in given if spec.optional):
        kept = {name: x for name, x in inputs.items() if name != spec.name}
        yield f"{spec.name} taken as not given", kept, call.options
    early, late = partial(_indices, late=False), partial(_indices, late=True)
    orders = (_constants, _words, _memory, _formats, _ended, early, _dropped, late)
    for order in orders:
        for spec in given:
            own = inputs[spec.name]
            for said, made in order(spec, own):
                if not _same(made, own):
                    yield f"{spec.name} {said}", {**inputs, spec.name: made}, call.options


def _values(spec: OptionSpec, value: object) -> Iterator[object]:
    """Other values of an option than this ``value``: its default, what is declared, no effect."""
    found: list[object] = [spec.default, *(spec.choices or ())]
    found.sort(key=lambda other: other is None)  # None admits any, most often
    if isinstance(value, bool):
        found.append(not value)
    elif isinstance(value, int | float):
        found += [type(value)(1), type(value)(0)]
        found += [value + 1, value - 1] if isinstance(value, int) else []
    seen = [value]
    for other in found:
        if not any(other is known or (type(other) is type(known) and other == known) for known in seen):
            seen.append(other)
            yield other


def _word(value: object) -> str:
    return "not given" if value is None else str(value).removeprefix("torch.")


def _constants(spec: TensorSpec, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    if spec.kind in (*FACTORS, Kind.BOUND) and x.is_floating_point():
        yield ("taken as 1", torch.ones_like(x, dtype=torch.float32).to(x.dtype))
    if spec.kind in (Kind.BIAS, Kind.STATE) and x.is_floating_point():
        yield ("taken as 0", torch.zeros_like(x, dtype=torch.float32).to(x.dtype))
    if spec.kind in (Kind.IDS, Kind.SLOTS, Kind.PAGES, Kind.POSITIONS) and x.dim() == 1:
        yield ("taken as 0, 1, 2, ...", torch.arange(len(x), dtype=x.dtype, device=x.device))
    if spec.kind in (Kind.OFFSETS, Kind.POSITIONS):
        yield ("taken as 0", torch.zeros_like(x))


def _words(spec: TensorSpec, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    if x.dtype == torch.int64 and x.numel() > 0:
        flat = x.contiguous().flatten().view(torch.int32)[: x.numel()]
        yield ("(64 bits) read as words of 32 bits", flat.to(torch.int64).reshape(x.shape))


def _memory(spec: TensorSpec, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not x.is_contiguous() and x.storage_offset() + x.numel() <= x.untyped_storage().nbytes() // x.element_size():
        strides = torch.empty(x.shape, dtype=x.dtype, device="meta").stride()
        yield ("read as if its memory were packed", x.as_strided(x.shape, strides))
    if spec.kind is Kind.SCALES and x.dim() > 1:
        flat = bits_of(x)
        for i in range(x.dim() - 1):
            turned = flat.contiguous().reshape(flat.transpose(i, i + 1).shape).transpose(i, i + 1).contiguous()
            yield ("read as if it lay transposed", turned.view(x.dtype))


def _formats(spec: TensorSpec, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    if spec.kind is Kind.CODES and x.dtype in OTHER:
        yield (f"read as {_word(OTHER[x.dtype])}", x.view(OTHER[x.dtype]))
    if spec.kind in (*FACTORS, Kind.BIAS) and x.dtype in (torch.float32, torch.float16):
        for narrow in (torch.bfloat16, torch.float16):
            yield (f"rounded to {_word(narrow)}", x.to(narrow).to(x.dtype))


def _ended(spec: TensorSpec, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Slots, ids, counts and groups of which some are not looked at."""
    at = torch.arange(x.shape[0] if x.dim() else 0, device=x.device)
    if spec.kind is Kind.COUNTS and x.dim() == 1:
        yield ("behind its first 0 taken as 0", x.masked_fill((x == 0).cummax(0).values, 0))
        yield from ((f"cut to {most}", x.clamp(max=most)) for most in CUTS)
        yield from ((f"taken in whole {step}s", x // step * step) for step in STEPS)
    if spec.kind is Kind.OFFSETS and x.dim() == 1 and len(x):
        empty = torch.nonzero(x.diff() <= 0).flatten()
        if len(empty):
            yield ("behind the first empty group taken to name empty ones", x[at.clamp(max=int(empty[0]))])
        for cut in cuts(len(x)):
            yield (f"from index {cut} on taken to name empty groups", x[at.clamp(max=cut)])
    if spec.kind not in (Kind.IDS, Kind.SLOTS) or not x.numel():
        return
    yield ("of -1 taken as 0", x.clamp(min=0))
    for axis in range(x.dim()):
        for cut in cuts(x.shape[axis]):
            late = (torch.arange(x.shape[axis], device=x.device) >= cut).reshape(-1, *[1] * (x.dim() - axis - 1))
            of = f" along axis {axis}" if x.dim() > 1 else ""
            yield f"from index {cut} on taken as -1{of}", x.masked_fill(late, -1)
    if spec.kind is Kind.IDS:
        yield from ((f"from {cut} on taken as -1", x.masked_fill(x >= cut, -1)) for cut in CUTS)


def _dropped(spec: TensorSpec, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """An axis whose end is left out: nothing comes from there."""
    if spec.kind not in DROPPED or x.dtype not in (torch.float32, torch.float16, torch.bfloat16, *FP8):
        return
    nothing = -torch.inf if spec.kind is Kind.LOGITS else 0.0
    for axis in range(x.dim()):
        n = x.shape[axis]
        for cut in cuts(n):
            late = (torch.arange(n, device=x.device) >= cut).reshape(-1, *[1] * (x.dim() - axis - 1))
            of = f" along axis {axis}" if x.dim() > 1 else ""
            yield f"from index {cut} on left out{of}", x.float().masked_fill(late, nothing).to(x.dtype)


def _indices(spec: TensorSpec, x: Tensor, *, late: bool) -> Iterator[tuple[str, Tensor]]:
    if spec.kind not in INDEXED:
        return
    for axis in range(x.dim()):
        of = f" along axis {axis}" if x.dim() > 1 else ""
        for said, at in late_picks(x.shape[axis]) if late else picks(x.shape[axis]):
            yield f"{said}{of}", picked(x, axis, at)


def _same(made: Tensor, own: Tensor) -> bool:
    """Whether two tensors of a dtype have one shape and the same values."""
    if made.shape != own.shape:
        return False
    pair = (decode(x) if x.is_floating_point() else x for x in (made, own))
    return bool(torch.equal(*(x.nan_to_num(nan=torch.inf) if x.is_floating_point() else x for x in pair)))
