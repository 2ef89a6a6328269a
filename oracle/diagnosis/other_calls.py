"""A failing output that is right for another call: which option or input the kernel takes otherwise than it is given.

A kernel is often right for a call that it was not given. So the call is changed as a kernel may misread it, and the
output is judged for the changed call; one that is right for it, in every element, is named by the change:

    options     an option taken as its default, or as another of its few values
    optional    an optional input taken as not given; a bias or a state as 0, factors as 1, a bound as none
    widths      integers of 64 bits read as words of 32
    ends        nothing comes from some index on, of values, codes, factors or scores
    memory      a view read as if its memory were packed; a matrix as if it lay transposed
    indices     an axis of scales, factors or indices: the first for all, one for two neighbours, the next, the one
                before, backwards; from some index on the first, the last before it, or those from 0 on again

A change is tried only where it changes values, and :data:`TRIED` of them at most, in this order; the first that is
right is named. It must specify at least as many elements as the call itself, and leave no more of them open: an output
is no evidence where nothing is said of it. Nothing is tried where fewer than one of :data:`SHARE` elements fails.

Not covered: two changes at once; other changes of codes and values, which the catalogue has.

NaN and infinities are judged as the contract judges them. Source: derived here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from oracle.diagnosis.observed import cuts, late_picks, picked, picks
from oracle.errors import OracleError
from oracle.numbers.formats import decode
from oracle.routines.base import FP8, Call, Output, by_name
from oracle.routines.traits import Kind, OptionSpec, TensorSpec
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.sets import bits_of

TRIED = 64  # changed calls that are judged at most
SMALL = 1 << 17  # elements of all inputs and outputs together up to which they are judged
FACTORS = (Kind.SCALES, Kind.ALPHA, Kind.WEIGHTS)
SHARE = 256  # an option or an input enters more than one of so many elements
DROPPED = (Kind.LOGITS, Kind.CODES, Kind.VALUES, Kind.WEIGHTS, Kind.BIAS)
INDEXED = (*FACTORS, Kind.BIAS, Kind.PAGES, Kind.SLOTS, Kind.POSITIONS, Kind.IDS)
Changed = tuple[str, Mapping[str, Tensor], Mapping[str, object]]


def taken_otherwise(call: Call, output: Output, verdict: Verdict, numerics: str | None) -> str | None:
    """The change of the call for which its failing ``output`` is right, in words; None without one.

    ``verdict`` is that of the call itself. NaN as the head of this file says; source: derived there."""
    judged = by_name(output)
    if not small(call, judged) or not any(_speaks(x) for x in judged.values()):
        return None
    if verdict.outside * SHARE < verdict.total:
        return None
    left = TRIED
    for said, inputs, options in _changes(call):
        changed = replace(call, inputs=inputs, options=options, given=None)
        left -= 1
        try:
            held = call.contract.judged(changed, output, numerics)
        except OracleError:  # the contract takes no such call, or another output belongs to it
            held = None
        if held is not None and _right(held, verdict):
            return said
        if left == 0:
            return None
    return None


def small(call: Call, output: Mapping[str, Tensor]) -> bool:
    """Whether a judgement of the call costs little."""
    tensors = [*call.inputs.values(), *output.values()]
    return not any(x.is_cuda for x in tensors) and sum(x.numel() for x in tensors) <= SMALL


def _right(held: Verdict, verdict: Verdict) -> bool:
    passed = held.status in (Status.PASSED, Status.MISTRUSTED)
    return passed and held.total >= verdict.total > 0 and held.unconstrained <= verdict.unconstrained


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
    orders = (_constants, _words, _memory, partial(_indices, late=False), _dropped, partial(_indices, late=True))
    for order in orders:
        for spec in given:
            own = inputs[spec.name]
            for said, made in order(spec, own):
                if not _same(made, own):
                    yield f"{spec.name} {said}", {**inputs, spec.name: made}, call.options


def _values(spec: OptionSpec, value: object) -> Iterator[object]:
    """Other values of an option than this ``value``: its default, what is declared, no effect."""
    found: list[object] = [spec.default, *(spec.choices or ())]
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
