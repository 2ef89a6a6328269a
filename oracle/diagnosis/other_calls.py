"""A failing output that is right for another call: which option or input the kernel takes otherwise than it is given.

A kernel is often right for a call that it was not given. So the call is changed as a kernel may misread it, and the
output is judged for the changed call; one that is right for it, in every element, is named by the change:

    options     an option taken as its default, or as another of its few values
    optional    an optional input taken as not given; a bias or a state as 0, factors as 1, a bound as none
    others      an input taken as another one of its kind and shape
    widths      integers of 64 bits read as words of 32; an option that is kept in 8 bits
    formats     E4M3 read as E5M2 and the other way round; float32 factors or a bias rounded to bfloat16 or float16;
                subnormal scale bytes of E4M3 as 0, integers of -8 as -7
    ends        nothing comes from some index on, of values, codes, factors or scores; slots and ids from some index on,
                or ids from some number on, taken as -1, or -1 as 0; counts cut to some number or to whole steps; groups
                from some offset on taken as empty
    memory      a view read as if its memory were packed; a matrix as if it lay transposed; tiles of scale bytes counted
                or filled otherwise
    indices     an axis of scales, factors or indices: the first for all, one for two neighbours, the next, the one
                before, backwards; from some index on the first, the last before it, or those from 0 on again; rows of
                scales or factors by their place in their group

A change is tried only where it changes values, in this order; :data:`TRIED` of them at most are judged, fewer of a
large call. The first that is right is named. It must specify at least as many elements as the call itself, and leave no
more of them open: an output is no evidence where nothing is said of it, nor where the right result of the call itself
is right for the changed one too. A change is judged only where its result lies nearer to the output than the right
result does, for more of the elements than it lies farther from, and where a few elements of a product do not refuse it.
It may specify less where nearly all (:data:`MOST`) of what it leaves out fails, as 0, old memory or a NaN that no
arithmetic gives, for a result that is neither: that was not computed. Of several of these that which leaves out least
is named, and only where no change is right but one that leaves out data too. Where offsets or counts say which rows
there are, no rows of data are left out. Nothing is tried where fewer than one of :data:`SHARE` elements fails, and no
change that brings a NaN into the inputs explains outputs without one.

Not covered: two changes at once; other changes of codes and values, which the catalogue has.

NaN and infinities are judged as the contract judges them. Source: derived here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from oracle.diagnosis.candidates import LISTED, LOST, NEARLY, about_at, float32_loss, spread
from oracle.diagnosis.observed import CUTS, cuts, late_picks, made_nan, picked, picks
from oracle.errors import OracleError
from oracle.numbers.formats import codes_of, decode, is_nan, of_dtype
from oracle.routines.base import FP8, Call, Output, by_name
from oracle.routines.traits import Kind, OptionSpec, TensorSpec
from oracle.truth.layout import HEIGHTS, WIDTH, swizzle_offsets
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.pattern import count, places
from oracle.verdict.sets import bits_of

TRIED = 96  # changed calls that are judged at most
TRIED_LAYERS = 32  # of a layer, which is judged whole
LIGHT = 0.25  # of a changed call that is judged: one whose result is computed alone
WORK = 1 << 25  # elements of the inputs and outputs of all changed calls together
FACTORS = (Kind.SCALES, Kind.ALPHA, Kind.WEIGHTS)
SHARE = 512  # an option or an input enters more than one of so many elements
BYTE = 0xFF
SUBNORMAL = 7  # the largest byte of a subnormal number of E4M3
FEW = 12  # elements of a product of which a changed call must give about the values
COMPARED = 1 << 12  # elements of a changed input that are compared with its own before all are
OPENED = 16  # of what fails, one of so many may be NaN by a changed call that says nothing else there
MOST = 0.95  # of the elements that a changed call leaves out
QUARTER = 32  # rows of a tile that lie one behind the other
STEPS = (4, 8, 16)  # in which rows go, so that the last ones are left out
DROPPED = (Kind.LOGITS, Kind.CODES, Kind.VALUES, Kind.WEIGHTS, Kind.BIAS, Kind.STATE)
INDEXED = (*FACTORS, Kind.BIAS, Kind.PAGES, Kind.SLOTS, Kind.POSITIONS, Kind.IDS)
OTHER = {torch.float8_e4m3fn: torch.float8_e5m2, torch.float8_e5m2: torch.float8_e4m3fn}
LEFT_OUT = "left out"
SMALL = "of 1 to 7 (subnormal numbers of E4M3) taken as 0"
WORDS = "(64 bits) read as words of 32 bits"
Changed = tuple[str, Mapping[str, Tensor], Mapping[str, object]]


def taken_otherwise(call: Call, output: Output, verdict: Verdict, numerics: str | None) -> str | None:
    """The change of the call for which its failing ``output`` is right, in words; None without one.

    ``verdict`` is that of the call itself. NaN as the head of this file says; source: derived there."""
    judged = by_name(output)
    left: float = tries(call, judged)
    if not left or not any(_speaks(x) for x in judged.values()):
        return _idle_words(call, judged)
    if verdict.outside * SHARE < verdict.total:
        return None
    nan = any(map(_has_nan, judged.values()))
    least: tuple[int, str] | None = None
    far = _far(call, judged)
    empty = all(bool(_nothing(x).all()) for x in judged.values())  # much may be left out for such an output
    for text, inputs, options in _changes(call):
        if empty and LEFT_OUT in text:
            continue
        changed, held = replace(call, inputs=inputs, options=options, given=None), None
        left -= LIGHT
        try:
            likely = _may_hold(changed, call, judged, far, numerics) and (nan or not _brings_nan(inputs, call))
            if likely and _nearer(changed, call, judged):
                left -= 1 - LIGHT
                held = call.contract.judged(changed, output, numerics)
        except OracleError:  # the contract takes no such call, or another output belongs to it
            held = None
        if held is not None and _right(held, verdict, changed, judged) and _refuses_right(changed, call, numerics):
            if LEFT_OUT not in text:
                return text
            if not _beyond(call, judged):
                return least[1] if least is not None else text
        if held is not None and _left_out(held, verdict, call, judged) and (least is None or held.total > least[0]):
            least = held.total, text
        if left <= 0:
            break
    return least[1] if least else _idle_words(call, judged)


def _idle_words(call: Call, output: Mapping[str, Tensor]) -> str | None:
    """That counts of 64 bits are read as words of 32, where each group then has nothing and nothing is computed."""
    for spec in call.contract.inputs:
        x = call.inputs.get(spec.name)
        if spec.kind is not Kind.COUNTS or x is None or x.dtype != torch.int64 or not x.numel():
            continue
        groups = x.reshape(len(x), -1)
        words = torch.stack([result for _, result in _words(spec, x)]).reshape(groups.shape)
        busy, read = groups.prod(dim=1) > 0, words.prod(dim=1) > 0
        due = {name: call.truth.get(name) for name in output}
        idle = all(
            y is not None and y.shape == x.shape and bool((_untouched(x, call.inputs.get(name)) | _nothing(y)).all())
            for name, x in output.items()
            for y in (due[name],)
        )
        if bool(busy.any()) and not bool(read.any()) and idle:
            return f"{spec.name} {WORDS}, by which no group has rows"
    return None


def tries(call: Call, output: Mapping[str, Tensor]) -> int:
    """How many changed calls are judged; none on a GPU."""
    tensors = [*call.inputs.values(), *output.values()]
    most = TRIED if call.optional_operands is not None else TRIED_LAYERS
    return 0 if any(x.is_cuda for x in tensors) else min(most, WORK // (1 + sum(x.numel() for x in tensors)))


def _far(call: Call, output: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Elements of a product that lie farther from the right result than roundings move one, bool by name; all of them
    where there is none; nothing of other contracts."""
    results = dict[str, Tensor]()
    operands = call.optional_operands
    for name, x in output.items() if operands is not None and operands.parts else ():
        due = call.truth.get(name)
        if due is not None and due.shape == x.shape and x.is_floating_point() and due.is_floating_point():
            far = _distance(x, due) > NEARLY * decode(x).abs().nan_to_num(nan=0.0, posinf=0.0)
            results[name] = far if bool(far.any()) else torch.ones_like(far)
    return results


def _may_hold(
    changed: Call, call: Call, output: Mapping[str, Tensor], far: Mapping[str, Tensor], numerics: str | None
) -> bool:
    """Whether an output may be right for the changed call, by a few of its elements, which cost less than all: more
    than half of some have about the value (:func:`~oracle.diagnosis.candidates.about`), and a few lie in the bounds."""
    if not far:
        return True
    contract = changed.contract
    result = contract.validate_output(changed.checked(), output)
    for part, own in zip(changed.parts, call.parts, strict=False):
        own.product.decode_once()
        part.product.learn(own.product)
    for part in changed.parts:
        out, mask = (part.of(x["out"].reshape(-1, x["out"].shape[-1])) for x in (result, far))
        at = spread(places(mask), FEW)
        rows, columns = at // mask.shape[1], at % mask.shape[1]
        if len(at) and part.product.bias is None and part.product.c is None:
            loss = max(float32_loss(part.product.K), LOST)
            if count(about_at(part.product, rows, columns, out[rows, columns], loss)) <= LISTED * len(at):
                return False
    return any(sets.may_hold(result, far) for sets in contract.admissible(changed, numerics))


def _nearer(changed: Call, call: Call, output: Mapping[str, Tensor]) -> bool:
    """Whether the result of the changed call, rounded to the output, lies nearer to more elements of the output than it
    lies farther from; True where outputs are no floating-point numbers of one shape, of which several may be right."""
    nearer = farther = 0
    for name, x in output.items():
        result, due = changed.truth.get(name), call.truth.get(name)
        if result is None or due is None or not x.shape == result.shape == due.shape:
            return True
        if not all(y.is_floating_point() for y in (x, result, due)):
            return True
        away, own = _distance(x, result, open_=_nothing(x)), _distance(x, due)
        nearer, farther = nearer + int((away < own).sum()), farther + int((away > own).sum())
    return nearer > farther


def _distance(x: Tensor, due: Tensor, open_: Tensor | None = None) -> Tensor:
    """How far elements of ``x`` lie from ``due`` in the dtype of ``x``, float64: 0 for two NaN, and where an ``open_``
    one meets a NaN that stands for nothing."""
    rounded = due if due.dtype == x.dtype or x.dtype in FP8 else due.to(x.dtype)
    value, wanted = decode(x), decode(rounded)
    away = torch.where(value == wanted, 0.0, (value - wanted).abs()).nan_to_num(nan=torch.inf)
    alike = torch.isnan(wanted) & (torch.isnan(value) if open_ is None else open_ | torch.isnan(value))
    return away.masked_fill(alike, 0.0)


def _right(held: Verdict, verdict: Verdict, changed: Call, output: Mapping[str, Tensor]) -> bool:
    """Whether the output is right for the changed call, which leaves no more open; but a few NaN, where the output has
    NaN as well."""
    if held.status not in (Status.PASSED, Status.MISTRUSTED) or not held.total >= verdict.total > 0:
        return False
    more = held.unconstrained - verdict.unconstrained
    if more <= 0 or more * OPENED > verdict.outside:
        return more <= 0
    results = changed.truth
    return all(
        name in results and results[name].shape == x.shape and torch.equal(_nan(results[name]), _nan(x))
        for name, x in output.items()
    )


def _refuses_right(changed: Call, call: Call, numerics: str | None) -> bool:
    """Whether the right result of the call is wrong for the changed one, which else takes outputs of both; True where
    it is no output of that."""
    try:
        held = changed.contract.judged(changed, call.contract.reference(call.inputs, **call.options), numerics)
    except OracleError:  # it is no output of the changed call
        return True
    return held.status is Status.FAILED


def _left_out(held: Verdict, verdict: Verdict, call: Call, output: Mapping[str, Tensor]) -> bool:
    """Whether the changed call, for which the output is right, leaves out what fails because it was not computed."""
    dropped = verdict.total - held.total
    if held.status is not Status.PASSED or not 0 < MOST * dropped <= verdict.outside:
        return False
    due = by_name(call.contract.reference(call.inputs, **call.options))
    if any(due[name].shape != x.shape for name, x in output.items()):
        return False
    idle = sum(int((_untouched(x, call.inputs.get(name)) & ~_nothing(due[name])).sum()) for name, x in output.items())
    return idle >= MOST * dropped and not _beyond(call, output)


def _beyond(call: Call, output: Mapping[str, Tensor]) -> bool:
    """Whether different values, or NaN of arithmetic, lie where nothing is specified: what is missing may lie there."""
    for name, due in call.contract.outputs(call).items():
        if due.specified is not None and name in output:
            rest = ~due.specified.reshape(due.specified.shape + (1,) * (output[name].dim() - due.specified.dim()))
            rest = rest.expand(output[name].shape).to(output[name].device)
            written = rest & ~_untouched(output[name], call.inputs.get(name))
            result = output[name][written]
            if len(torch.unique(bits_of(result))) > 1 or bool(made_nan(result).any()):
                return True
    return False


def _untouched(x: Tensor, before: Tensor | None) -> Tensor:
    """Elements that are 0 or a NaN that no arithmetic gives, or what a state of that name held ``before``, bool."""
    idle = _nothing(x) & ~made_nan(x)
    if before is None or (before.shape, before.dtype) != (x.shape, x.dtype):
        return idle
    return idle | (bits_of(x) == bits_of(before))


def _nothing(x: Tensor) -> Tensor:
    """Elements that are 0 or NaN, bool."""
    value = decode(x) if x.dtype in FP8 else x
    return (value == 0) | torch.isnan(value)


def _nan(x: Tensor) -> Tensor:
    """Elements that are NaN, bool."""
    return is_nan(codes_of(x), of_dtype(x.dtype)) if x.dtype in FP8 else torch.isnan(x)


def _has_nan(x: Tensor) -> bool:
    return bool(_nan(x).any())


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
        own = resolved[option.name]
        if isinstance(own, int) and own > BYTE:
            yield f"{option.name} kept in 8 bits", inputs, {**call.options, option.name: own & BYTE}
    supplied = [spec for spec in contract.inputs if spec.name in inputs]
    for spec in (spec for spec in supplied if spec.optional):
        remaining = {name: x for name, x in inputs.items() if name != spec.name}
        yield f"{spec.name} taken as not given", remaining, call.options
    for spec, other in ((spec, other) for spec in supplied for other in supplied if spec is not other):
        own, result = inputs[spec.name], inputs[other.name]
        if (
            spec.kind is other.kind
            and (own.shape, own.dtype) == (result.shape, result.dtype)
            and not _same(result, own)
        ):
            yield f"{spec.name} taken as {other.name}", {**inputs, spec.name: result}, call.options
    early, late = partial(_indices, late=False), partial(_indices, late=True)
    small = {
        spec.name: result for spec in supplied for text, result in _formats(spec, inputs[spec.name]) if text == SMALL
    }
    if sum(not _same(result, inputs[name]) for name, result in small.items()) > 1:
        yield f"{' and '.join(small)} {SMALL}", {**inputs, **small}, call.options
    left_out, in_groups = partial(_dropped, call), partial(_in_groups, call)
    orders = (_constants, _words, _memory, _tiles, _formats, _ended, early, in_groups, left_out, late)
    for order in orders:
        for spec in supplied:
            own = inputs[spec.name]
            for text, result in order(spec, own):
                if not _same(result, own):
                    yield f"{spec.name} {text}", {**inputs, spec.name: result}, call.options


def _values(spec: OptionSpec, value: object) -> Iterator[object]:
    """Other values of an option than this ``value``: its default, what is declared, no effect."""
    results: list[object] = [spec.default, *(spec.choices or ())]
    results.sort(key=lambda other: other is None)  # None admits any, most often
    if isinstance(value, bool):
        results.append(not value)
    elif isinstance(value, int | float):
        results += [type(value)(1), type(value)(0)]
        results += [value + 1, value - 1] if isinstance(value, int) else []
    seen = [value]
    for other in results:
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
        flat = x.clone(memory_format=torch.contiguous_format).flatten().view(torch.int32)[: x.numel()]
        result = flat.to(torch.int64).reshape(x.shape)
        yield (WORDS, result)
        if spec.kind is Kind.SLOTS and x.dim() == 1:
            yield (WORDS, _written_last(result))
        if spec.kind is Kind.OFFSETS and x.dim() == 1 and (rising := _rising(result, spec)) is not None:
            yield (WORDS, rising)


def _written_last(slots: Tensor) -> Tensor:
    """Slots of which each keeps the last token that goes there."""
    later = torch.ones((len(slots), len(slots)), dtype=torch.bool, device=slots.device).triu(1)
    return slots.masked_fill(((slots[:, None] == slots[None, :]) & later).any(dim=1), -1)


def _rising(bounds: Tensor, spec: TensorSpec) -> Tensor | None:
    """Offsets by which each row has the last of the groups that hold it; None where those do not follow each other from
    row 0 on."""
    ends = spec.dims == ("G",)
    border = [*([0] if ends else []), *bounds.tolist()]
    owner = torch.full((max(0, *border),), -1, dtype=torch.int64, device=bounds.device)
    for group, (begin, end) in enumerate(pairwise(border)):
        owner[max(0, begin) : max(0, end)] = group
    if not len(owner) or bool((owner.diff() < 0).any()) or int(owner[0]) < 0:
        return None
    groups = torch.arange(len(border) - 1, device=bounds.device)
    upto = (owner[None, :] <= groups[:, None]).sum(dim=1)
    result = upto if ends else torch.cat([upto.new_zeros(1), upto])
    return result.to(bounds)


def _memory(spec: TensorSpec, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not x.is_contiguous() and x.storage_offset() + x.numel() <= x.untyped_storage().nbytes() // x.element_size():
        strides = torch.empty(x.shape, dtype=x.dtype, device="meta").stride()
        yield ("read as if its memory were packed", x.as_strided(x.shape, strides))
    if spec.kind is Kind.SCALES and x.dim() > 1:
        flat = bits_of(x)
        for i in range(x.dim() - 1):
            turned = flat.contiguous().reshape(flat.transpose(i, i + 1).shape).transpose(i, i + 1).contiguous()
            yield ("read as if it lay transposed", turned.view(x.dtype))


def _tiles(spec: TensorSpec, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Scale bytes in tiles of 128x4 or 8x4 (:func:`oracle.truth.layout.swizzle_offsets`), whose matrix may have any
    number of tiles in a row that divides their number."""
    if spec.kind is not Kind.SCALES or x.element_size() != 1 or not x.is_contiguous():
        return
    flat = x.view(torch.uint8).flatten()
    for of, height in ((of, n) for of, n in HEIGHTS.items() if x.numel() and not x.numel() % (n * WIDTH)):
        tiles = flat.reshape(-1, height * WIDTH)
        count = len(tiles)
        if height > QUARTER:
            quarter = tiles.reshape(count, QUARTER, -1, WIDTH)[:, :, :1].expand(-1, -1, height // QUARTER, -1)
            yield f"of the rows of a {of} tile taken to be those of its first {QUARTER}", _like(x, quarter)
        for wide in (wide for wide in range(1, count) if count % wide == 0):
            at = torch.arange(count, device=x.device)
            if wide == 1:
                yield f"of later {of} tiles taken to be those of the first", _like(x, tiles[at % wide])
                continue
            yield f"with {of} tiles in a row counted one too few", _like(x, tiles[at - at // wide])
            yield f"of later rows of {of} tiles taken to be those of the first", _like(x, tiles[at % wide])
            yield f"of later columns of {of} tiles taken to be those of the first", _like(x, tiles[at // wide * wide])
        for wide in (wide for wide in range(1, count + 1) if count % wide == 0):
            for columns in range(wide * WIDTH, max(0, (wide - 1) * WIDTH), -1):
                yield f"in {of} tiles read as rows one behind the other", _like(x, _untiled(flat, of, wide, columns))


def _untiled(flat: Tensor, tile: str, wide: int, columns: int) -> Tensor:
    """The tiles ``[T]`` of a matrix, ``wide`` of them in a row, whose elements are those that its memory ``flat`` has
    where rows of so many ``columns`` lie one behind the other; padding stays as it is."""
    offsets = swizzle_offsets(len(flat) // (wide * WIDTH), wide * WIDTH, tile=tile).to(flat.device)[:, :columns]
    result = flat.clone()
    result[offsets.flatten()] = flat[: offsets.numel()]
    return result


def _like(x: Tensor, made: Tensor) -> Tensor:
    return made.reshape(x.shape).contiguous().view(x.dtype)


def _formats(spec: TensorSpec, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    if spec.kind is Kind.CODES and x.dtype in OTHER:
        yield (f"read as {_word(OTHER[x.dtype])}", x.view(OTHER[x.dtype]))
    if spec.kind in (*FACTORS, Kind.BIAS) and x.dtype in (torch.float32, torch.float16):
        for narrow in (torch.bfloat16, torch.float16):
            yield (f"rounded to {_word(narrow)}", x.to(narrow).to(x.dtype))
    if spec.kind is Kind.CODES and x.dtype == torch.int8:
        yield ("of -8 taken as -7", x.masked_fill(x == -8, -7))
    if spec.kind is Kind.SCALES and x.dtype in (torch.uint8, torch.float8_e4m3fn):
        flat = x.view(torch.uint8)
        small = flat.masked_fill((flat & 0x7F) <= SUBNORMAL, 0)
        yield (SMALL, small.view(x.dtype))


def _ended(spec: TensorSpec, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Slots, ids, counts and groups of which some are not looked at."""
    at = torch.arange(x.shape[0] if x.dim() else 0, device=x.device)
    if spec.kind is Kind.COUNTS and x.dim() == 1:
        yield from _alike(
            ("behind its first 0 taken as 0", x.masked_fill((x == 0).cummax(0).values, 0)),
            *((f"cut to {most}", x.clamp(max=most)) for most in CUTS),
            *((f"taken in whole {step}s", x // step * step) for step in STEPS),
        )
    if spec.kind is Kind.OFFSETS and x.dim() == 1 and len(x):
        yield ("taken to begin at 0", x.masked_fill(at == 0, 0))
        empty = torch.nonzero(x.diff() <= 0).flatten()
        if len(empty):
            yield ("behind the first empty group taken to name empty ones", x[at.clamp(max=int(empty[0]))])
        for cut in cuts(len(x)):
            yield (f"from index {cut} on taken to name empty groups", x[at.clamp(max=cut)])
    if spec.kind not in (Kind.IDS, Kind.SLOTS) or not x.numel():
        return
    yield ("of -1 taken as 0", x.clamp(min=0))
    if x.dim() == 1:
        yield ("behind the first -1 taken as -1", x.masked_fill((x < 0).cummax(0).values, -1))
    for axis in range(x.dim()):
        for cut in cuts(x.shape[axis]):
            late = (torch.arange(x.shape[axis], device=x.device) >= cut).reshape(-1, *[1] * (x.dim() - axis - 1))
            of = f" along axis {axis}" if x.dim() > 1 else ""
            yield f"from index {cut} on taken as -1{of}", x.masked_fill(late, -1)
    if spec.kind is Kind.IDS:
        yield from ((f"from {cut} on taken as -1", x.masked_fill(x >= cut, -1)) for cut in CUTS)


def _in_groups(call: Call, spec: TensorSpec, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Rows of factors at their place in their group, where offsets say at which row a group begins."""
    if spec.kind not in FACTORS or not x.dim() or x.shape[0] < 2:
        return
    for other in call.contract.inputs:
        offsets = call.inputs.get(other.name)
        if other.kind is not Kind.OFFSETS or offsets is None or offsets.dim() != 1 or not len(offsets):
            continue
        begins = torch.cat([offsets.new_zeros(1), offsets]).to(torch.int64)
        at = torch.arange(x.shape[0], device=x.device)
        begin = torch.where(begins[:, None] <= at, begins[:, None], 0).amax(dim=0)
        if int(begins.max()) <= x.shape[0]:
            yield f"taken by the place in the group of {other.name}", picked(x, 0, at - begin)


def _alike(*ways: tuple[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The ways, those that give the same values as one."""
    for i, (_, result) in enumerate(ways):
        if not any(torch.equal(result, other) for _, other in ways[:i]):
            yield " or ".join(text for text, other in ways[i:] if torch.equal(result, other)), result


def _counted(call: Call) -> bool:
    """Whether an input says which rows belong to which group, or how many there are."""
    return any(spec.kind in (Kind.OFFSETS, Kind.COUNTS) and spec.name in call.inputs for spec in call.contract.inputs)


def rows_by_ids(call: Call, x: Tensor) -> bool:
    """Whether each row of ``x`` (any shape, any dtype) has an id, so that which rows are missing may follow from those.

    Source: derived here, from the kinds of the inputs."""
    ids = [
        call.inputs[spec.name] for spec in call.contract.inputs if spec.kind is Kind.IDS and spec.name in call.inputs
    ]
    return x.dim() > 0 and any(one.dim() > 0 and one.shape[0] == x.shape[0] for one in ids)


def _dropped(call: Call, spec: TensorSpec, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """An axis whose end is left out: nothing comes from there; of data that of rows too, where no input says which rows
    there are."""
    rows = not _counted(call) and not rows_by_ids(call, x)
    if spec.kind not in DROPPED or x.dtype not in (torch.float32, torch.float16, torch.bfloat16, *FP8):
        return
    if spec.kind is Kind.STATE and x.dtype in FP8:
        return
    nothing = -torch.inf if spec.kind is Kind.LOGITS else 0.0
    for axis in range(x.dim()):
        n = x.shape[axis]
        if spec.kind in (Kind.CODES, Kind.VALUES) and not rows and (axis, x.dim()) in ((0, 2), (1, 3)):
            continue
        for cut in dict.fromkeys((*([n - 1] if n > 1 else []), *cuts(n))):
            late = (torch.arange(n, device=x.device) >= cut).reshape(-1, *[1] * (x.dim() - axis - 1))
            of = f" along axis {axis}" if x.dim() > 1 else ""
            coded = x.dtype in FP8 and nothing == 0
            result = zeroed(x, late) if coded else x.float().masked_fill(late, nothing).to(x.dtype)
            yield f"from index {cut} on {LEFT_OUT}{of}", result


def zeroed(x: Tensor, mask: Tensor) -> Tensor:
    """Codes ``x`` of FP8 (any shape) with those of 0 where ``mask`` (bool, of a shape that broadcasts) is True; others
    as they are, NaN too. Source: OCP OFP8 1.0, whose code of 0 has no bit set."""
    return x.view(torch.uint8).masked_fill(mask, 0).view(x.dtype)


def _indices(spec: TensorSpec, x: Tensor, *, late: bool) -> Iterator[tuple[str, Tensor]]:
    if spec.kind not in INDEXED:
        return
    for axis in range(x.dim()):
        of = f" along axis {axis}" if x.dim() > 1 else ""
        for text, at in late_picks(x.shape[axis]) if late else picks(x.shape[axis]):
            yield f"{text}{of}", picked(x, axis, at)


def _same(other: Tensor, own: Tensor) -> bool:
    """Whether two tensors have one shape and the same values."""
    if other.shape != own.shape:
        return False
    if other.dtype != own.dtype:
        return _same_values(other, own)
    other, own = other.flatten(), own.flatten()
    for start, end in ((0, COMPARED), (COMPARED, None)):
        pair = other[start:end], own[start:end]
        at = places(torch.ne(*map(bits_of, pair)))
        if any(not _same_values(*(picked(x, 0, some) for x in pair)) for some in (at[:FEW], at[FEW:]) if len(some)):
            return False
    return True


def _same_values(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape have the same values; NaN is like infinity."""
    pair = (decode(z).nan_to_num(nan=torch.inf) if z.is_floating_point() else z for z in (x, y))
    return bool(torch.equal(*pair))
