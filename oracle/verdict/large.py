"""Which elements of a large output fail, at the price of a right one.

The sound interval of every element costs several times what the prediction of its bits does, and where the definitions
compute it on a device a thousand times. So a large output that no schedule reproduces is asked in this order, by its
first admitted schedule:

    1  an element with the bits of the schedule lies in the interval, which holds whatever the schedule computes
    2  where the others fill few rows and columns of a product, their intervals are computed (:data:`SHARE`; of a device
       what the CPU computes sooner)
    3  else they are compared with the outer interval (:mod:`oracle.bounds.outer`): what leaves that one fails; the
       others stay *undecided*, and if nothing has failed by then the intervals of a few of them are computed: of those
       nearest to leaving the outer one, then of some evenly

The verdict is FAILED where an element leaves its interval and that of every class that an undeclared kernel may use. It
counts the elements that surely fail, says how many are undecided beside them, and describes where both lie; the worst
element and those listed have their own intervals, every other one the distance from its centre alone. Where nothing is
seen to fail, or a class holds what does, nothing is said here and every interval is computed: such an output may be
right.

Not covered: contracts whose first admitted numerics is a class; what :func:`oracle.bounds.outer.why_not` names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from oracle.bounds import Accumulator, of_schedule
from oracle.bounds.engines import exact, residue_at
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.bounds.interval import Interval, admissible
from oracle.bounds.outer import outer_bands, why_not
from oracle.bounds.product import REACH, unrounded
from oracle.numbers.formats import decode, in_blocks, of_dtype, same_bits
from oracle.numbers.threads import all_threads, one_thread
from oracle.tensorcore.identify import subset
from oracle.tensorcore.instructions import Sum
from oracle.tensorcore.schedules import ANY, SPLIT, get, is_class, of_class
from oracle.truth.gemm import NEARBY, Exact, ScaledProduct, rounded
from oracle.verdict import heatmap
from oracle.verdict.compare import Comparison, Error, Failing, Verdict, Worst, compare, measured, verdict
from oracle.verdict.heatmap import Element
from oracle.verdict.parts import (
    TRIAL,
    Bands,
    ExactPart,
    Part,
    banded,
    compared,
    exact_and_interval,
    held_by,
    interval_of,
    part_of,
    specified_of,
    within_reach,
    work,
)
from oracle.verdict.pattern import count, grid, places

SHARE = 32  # a part of the products of a call whose intervals cost no more than the prediction of all bits
FEW = 16  # failing elements of a row that a class must hold before every interval is computed
SUSPECTS = 16  # elements nearest to leaving the outer interval
FARTHEST = 2.0**1000  # of an element that is no number
SPLIT_GAIN = 4  # full rows are looked at apart from the others where that is at least so many times less
LANES = 64  # columns that an engine of the CPU computes together
GAIN = 2  # intervals of so many times fewer elements, a row at a time, cost less than those of all
ALIKE = 0.5  # share of equal bits in a few rows and columns above which the whole is predicted


@dataclass(frozen=True)
class _Seen:
    """Rows and columns of a part whose intervals are known, and what was found there."""

    known: ExactPart
    output: Tensor
    found: Comparison
    rows: Tensor
    columns: Tensor

    def index(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """An element here as one of the output."""
        return int(self.rows[at[0]]), int(self.columns[at[1]])


def failure(bits: Bands, name: str, wider: Sequence[str]) -> Verdict | None:
    """The failure of the output of ``bits`` against the schedule ``name``; None where it may be right."""
    parts, output = bits.parts, bits.output
    if is_class(name):
        return None
    schedule = get(name)
    acc = of_schedule(schedule)
    if any(why_not(part.product, acc) for part in parts):
        return None
    with all_threads():
        right = bits.right(schedule) if bits.alike(schedule) >= ALIKE else None
    specified = specified_of(parts, output)
    total = output.numel() if specified is None else count(specified)
    if right is not None:
        unknown = ~same_bits(output, right)
        unknown = unknown if specified is None else unknown & specified
    else:
        unknown = torch.ones(output.shape, dtype=torch.bool, device=output.device) if specified is None else specified
    centre = torch.zeros(output.shape, dtype=torch.float64, device=output.device) if right is None else decode(right)
    bad, undecided, seen = _decided(parts, output, unknown, acc, name, centre)
    failing = count(bad)
    if not failing:
        return None
    seen += _most(parts, output, bad, centre, name)
    worst, elements = _worst(seen)
    if _may_hold(seen, worst, wider):
        return None
    interval = exact_and_interval(worst.known.part.product, name)[1].name
    open_ = count(undecided)
    basis = interval + (f"; {open_} more elements are undecided" if open_ else "")
    listed = [element for _, element in elements[: heatmap.LISTED]]
    near = centre.to(output.dtype) if right is None else right
    picture = heatmap.of_values(output, near, bad, listed, output="out")
    margin = max(one.found.margin for one in seen)
    first = worst.found.worst
    assert first is not None
    place = replace(first, index=worst.index(first.index))
    result = Comparison(failing, total, 0, margin, place, bad | undecided if open_ else bad, lambda: picture)
    text = banded(parts, verdict(result, basis=basis))
    return replace(text, failing=Failing(bad, near, right))


def examined(bits: Bands, name: str, wider: Sequence[str], mistrust: str | None) -> Verdict | None:
    """The failure of the output of ``bits`` against ``name``, or its pass where few intervals show it; None where every
    interval must be computed. Asked first is what a few rows and columns suggest."""

    def failed() -> Verdict | None:
        with one_thread():
            return failure(bits, name, wider)

    def held() -> Verdict | None:
        result = nearly_exact(bits, name)
        return None if result is None else banded(bits.parts, verdict(result[0], basis=result[1], mistrust=mistrust))

    unasked = is_class(name) or any(get(name).why_not(part.product, out_dtype=bits.output.dtype) for part in bits.parts)
    wrong = unasked or bits.alike(get(name)) == 1.0 and not bits.close(get(name))
    first, then = (failed, held) if wrong else (held, failed)
    text = first()
    return then() if text is None else text


def nearly_exact(bits: Bands, name: str) -> tuple[Comparison, str] | None:
    """The comparison of an output that the intervals of ``name`` hold, and their name; None where another way costs
    less, or they may not hold it.

    The exact value rounded lies in the interval of every chain that converts no operand, since its bounds begin at 0
    and only widen. So the intervals of the other elements alone are computed and compared, where an output has it in
    most places of a few rows and columns, and these lie in their intervals. Where an intermediate may overflow
    (:func:`_never_open`), every interval is computed.
    """
    parts, output = bits.parts, bits.output
    if is_class(name) or not _may_be_held(bits, name):
        return None
    acc = of_schedule(get(name))
    if acc.kind is not Sum.FUSED or acc.scales_inside or acc.flushes or acc.truncates:
        return None
    every, margin, at = list[ExactPart](), 0.0, None
    for number, part in enumerate(parts):
        product = part.product
        if product.c is not None or not _never_open(product, acc):  # a sum stored before c is added rounds twice
            return None
        every.append(known := bits.exact(number))
        left = known.inexact(output)
        if not output.is_cuda and GAIN * int((-(-left.sum(dim=1) // LANES)).sum()) * LANES > left.numel():
            return None
        if (ends := residue_at(product, acc, left)) is None:
            return None
        if not len(ends[0]):
            continue
        low, high = ends
        if (sure := unrounded(product, acc)) is not None:
            low, high = (x.masked_fill(sure[left], 0.0) for x in ends)
        value = Exact(known.value.hi[left], known.value.lo[left], known.value.slack[left])
        within = admissible(value, known.expected[left], Interval(low, high, ""))
        result = compare(part.of(output)[left], within)
        if result.outside:
            return None
        if result.margin > margin and result.worst is not None:
            place = int(torch.nonzero(left.flatten())[result.worst.index[0], 0])
            margin, at = result.margin, (part, *divmod(place, product.N))
    specified = specified_of(parts, output)
    if at is None:  # an exact element: its interval is asked like any other's
        row, column = (0, 0) if specified is None else torch.nonzero(specified)[0].tolist()
        part = part_of(parts, row)
        at = part, part.row(row), column
    part, row, column = at
    one = _closely(part, _index(row, output.device), _index(column, output.device), output, name)
    assert one.found.worst is not None
    worst = replace(one.found.worst, index=(row if part.rows is None else int(part.rows[row]), column))
    total = output.numel() if specified is None else count(specified)
    none = torch.zeros_like(output, dtype=torch.bool)
    held = Comparison(0, total, 0, margin, worst, none, measure=partial(_error, every, output, specified))
    return held, exact_and_interval(one.known.part.product, name)[1].name


def _index(i: int, device: torch.device) -> Tensor:
    return torch.tensor([i], dtype=torch.int64, device=device)


def _error(known: Sequence[ExactPart], output: Tensor, specified: Tensor | None) -> Error | None:
    """The error of every specified element of ``output [R, N]``, its own dtype, of these parts."""
    value, expected = decode(output), torch.full(output.shape, torch.nan, dtype=torch.float64, device=output.device)
    for one in known:
        expected[one.part.place] = decode(one.expected)
    if specified is not None:
        value, expected = value[specified], expected[specified]
    return measured(value, expected, of_dtype(output.dtype))


def _may_be_held(bits: Bands, name: str) -> bool:
    """Whether a few rows and columns lie in their intervals and have the exact value rounded in most places."""
    exact_, total = 0, 0
    for few, own in bits.samples:
        few, own = (few.on_cpu(), own.cpu()) if own.is_cuda else (few, own)
        known = ExactPart.of(Part(few), exact(few), own.dtype)
        if compared([known], [interval_of(few, name)], own).outside:
            return False
        exact_, total = exact_ + own.numel() - count(known.inexact(own)), total + own.numel()
    return exact_ * GAIN > total


def _never_open(product: ScaledProduct, acc: Accumulator) -> bool:
    """Whether no float32 intermediate of any element may overflow, by the largest codes, scales and summands.

    Let ``P`` be the largest product, of which each factor counts as at least the least normal one, and ``T = K P``. A
    step of a fused chain widens its interval by the residues, which all steps together leave below ``T``, by ``2^-t P``
    and by ``2^-to`` of the sum: ``n <= 2^to`` of them leave the sum below ``(2 T + n 2^-t P) (1 + 2^-to)^n < 7 T``, so
    the magnitudes of a chain and its error are below ``9 T``. A promotion multiplies by one scale, by the other and by
    both, at most ``s >= 1``, and errs by ``2^-22`` of the total for each of fewer than ``2^20`` chains: below ``16 s
    T``. The factor of the sum and the summands follow. Twice that is asked, which leaves room for what underflows.
    Source: derived here from :mod:`oracle.bounds.chain` and :mod:`oracle.bounds.product`.
    """
    if -(-product.K // acc.group) > 1 << min(acc.out, 20):
        return False
    left, right = product.left, product.right
    scales = torch.cat([left.scales.flatten(), right.scales.flatten()]).abs()
    if not bool(torch.isfinite(scales).all()):
        return False
    a, b = float(left.scales.abs().max()), float(right.scales.abs().max())
    largest = [max(x.facts.largest, 2.0**x.fmt.emin) for x in (left, right)]
    total = max(1.0, product.K * largest[0] * largest[1]) * max(1.0, a, b, a * b)
    bias = 0.0 if product.bias is None else float(decode(product.bias).abs().max())
    return 32 * max(1.0, abs(product.factor)) * total + 2 * bias < REACH  # NaN is not


def _decided(
    parts: Sequence[Part], output: Tensor, unknown: Tensor, acc: Accumulator, name: str, centre: Tensor
) -> tuple[Tensor, Tensor, list[_Seen]]:
    """Of the ``unknown`` elements those that fail, those that are undecided, and what was looked at closely.

    ``centre`` is filled with exact values where the outer interval was computed.
    """
    bad, undecided = torch.zeros_like(unknown), torch.zeros_like(unknown)
    grids = [(part, *some) for part in parts for some in _grids(part.of(unknown))]
    room = NEARBY if output.is_cuda else work(parts) // SHARE
    seen = list[_Seen]()
    if sum(len(rows) * len(columns) * part.product.K for part, rows, columns in grids) <= room:
        seen = [_closely(*some, output, name) for some in grids]
        for one in seen:
            bad[one.rows[:, None], one.columns[None, :]] = one.found.bad.to(bad.device)
        return bad & unknown, undecided, seen
    suspects, surely = torch.zeros_like(unknown), 0
    for part, rows, columns in grids:
        whole = (len(rows), len(columns)) == (part.product.M, part.product.N)
        near = list[Tensor]()
        for some, y, width in outer_bands(part.product if whole else subset(part.product, rows, columns), acc):
            at = (part.place, some) if whole else (_place(part, rows)[:, None], columns[None, some])
            centre[at] = y
            of_band, asked = _beyond(output[at], y, width), unknown[at]
            outside = asked & (of_band > 1.0)
            bad[at], undecided[at] = outside, asked ^ outside
            surely += count(outside)
            if not surely:
                near.append(of_band.masked_fill_(~asked, -1.0))
        if not surely:
            most = torch.topk(torch.cat(near, dim=1).flatten(), min(SUSPECTS, len(rows) * len(columns))).indices
            suspects[_place(part, rows[most // len(columns)]), columns[most % len(columns)]] = True
    if not surely:
        part, own = max(((p, p.of(undecided)) for p in parts), key=lambda pair: count(pair[1]))
        rows, columns = grid(own)
        for few in (grid(part.of(suspects)), (_evenly(rows, TRIAL[0]), _evenly(columns, TRIAL[1]))):
            one = _closely(part, *few, output, name)
            at = one.rows[:, None], one.columns[None, :]
            bad[at] = one.found.bad.to(bad.device) & unknown[at]
            undecided[at] = False
            seen.append(one)
            if bool(bad.any()):
                break
    return bad, undecided, seen


def _beyond(output: Tensor, y: Tensor, width: Tensor) -> Tensor:
    """How far each element lies from ``y``, beyond what its rounding may have moved it, as a multiple of ``width``: no
    value within ``width`` of ``y`` is rounded to an element above 1. ``FARTHEST`` for NaN; 0 where nothing is known.

    A rounding moves a value by half a unit in the last place at most, which is below ``2^-(f + 1)`` of it, or the least
    subnormal; NaN and infinity are the rounding of nothing that lies below the largest number.
    """
    fmt = of_dtype(output.dtype)
    size = y.abs().add_(width)
    moved = (size * 2.0 ** -(fmt.fraction_bits + 1)).add_(fmt.min_subnormal)
    far = decode(output).sub_(y).abs_().sub_(moved).div_(width)
    known = size.add_(moved).add_(width) < fmt.max_finite
    return torch.nan_to_num_(far, nan=FARTHEST, posinf=FARTHEST).mul_(known)


def _closely(part: Part, rows: Tensor, columns: Tensor, output: Tensor, name: str) -> _Seen:
    """The intervals of some rows and columns of a part; on the CPU where these are few."""
    product = subset(part.product, rows, columns)
    product = product if product.nearby is None else product.nearby
    own = part.of(output)[rows][:, columns].to(product.a.device)
    value, interval = exact_and_interval(product, name)
    value = exact(product) if value is None else value
    known = ExactPart(Part(product), value, rounded(product, value, output.dtype))
    return _Seen(known, own, compared([known], [interval], own), _place(part, rows), columns)


def _most(parts: Sequence[Part], output: Tensor, bad: Tensor, centre: Tensor, name: str) -> list[_Seen]:
    """The failing elements farthest from their ``centre``, and others in their rows and columns."""
    at = places(bad)

    def distance(actual: Tensor, y: Tensor) -> Tensor:
        return decode(actual).sub_(y).abs_().nan_to_num_(nan=torch.inf, posinf=torch.inf)

    away = in_blocks(distance, *(x.flatten().index_select(0, at) for x in (output, centre)), dtype=torch.float64)
    few = torch.zeros_like(bad)
    few.view(-1)[at[torch.topk(away, min(heatmap.LISTED, len(at))).indices]] = True
    grids = [(part, *grid(part.of(few))) for part in parts]
    return [_closely(*some, output, name) for some in grids if len(some[1])]


def _worst(seen: Sequence[_Seen]) -> tuple[_Seen, list[tuple[float, Element]]]:
    """The closely seen part that has the element farthest outside, and all listed elements, worst first."""
    elements = dict[tuple[int, ...], tuple[float, Element]]()

    def beyond(worst: Worst | Element) -> float:
        value = torch.tensor(worst.actual, dtype=torch.float64, device="cpu")
        return float(heatmap.overshoot(value, value.new_tensor(worst.low), value.new_tensor(worst.high)))

    failing = [one for one in seen if one.found.outside]
    for one in failing:
        assert one.found.evidence is not None
        for element in one.found.evidence.elements:
            at = one.index(element.index)
            elements[at] = beyond(element), replace(element, index=at)
    first = max(failing, key=lambda one: -1.0 if one.found.worst is None else beyond(one.found.worst))
    return first, sorted(elements.values(), key=lambda pair: -pair[0])


def _may_hold(seen: Sequence[_Seen], worst: _Seen, classes: Sequence[str]) -> bool:
    """Whether one of these classes may hold the output: its accumulator in any order (which is asked first, as it costs
    little) or float32 in any order the worst element of what was seen, the class itself some failing ones of its row,
    then all that was seen to fail."""
    known, output, result = worst.known, worst.output, worst.found
    assert result.worst is not None
    if math.isnan(result.worst.actual):
        return False  # no interval holds it
    row, column = (torch.tensor([i], dtype=torch.int64, device=output.device) for i in result.worst.index)
    some = torch.nonzero(result.bad[row[0]])[:FEW, 0]
    one, few = (([known.subset(row, at)], output[row][:, at], result.bad[row][:, at]) for at in (column, some))

    classes = within_reach(one[0][0].part.product, one[1], classes)

    def may(other: str) -> bool:
        if other != IEEE32:
            acc = of_schedule(of_class(other))
            loose = other.removesuffix(SPLIT).removesuffix(ANY) + ANY
            if acc.kind is Sum.FUSED and not acc.scales_inside and acc.split is None and held_by(*one, loose) is None:
                return False
        if held_by(*one, other) is None or held_by(*few, other) is None:
            return False
        return all(held_by([each.known], each.output, each.found.bad, other) for each in seen if each.found.outside)

    return any(map(may, classes))


def _grids(wanted: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Rows and columns that hold every True: those of all rows or, where they are fewer elements, those of the rows
    that are full of it and those of the others."""
    rows, columns = grid(wanted)
    if len(rows) < 2 or len(columns) < 2:
        return [(rows, columns)] if len(rows) else []
    full = wanted.sum(dim=1) * 2 > len(columns)
    some, others = torch.nonzero(full)[:, 0], grid(wanted & ~full[:, None])
    if SPLIT_GAIN * (len(some) * len(columns) + len(others[0]) * len(others[1])) > len(rows) * len(columns):
        return [(rows, columns)]
    return [(some, columns), others] if len(some) else [others]


def _place(part: Part, rows: Tensor) -> Tensor:
    return rows if part.rows is None else part.rows[rows]


def _evenly(at: Tensor, most: int) -> Tensor:
    return at[:: max(1, -(-len(at) // most))]
