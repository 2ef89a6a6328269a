"""How an output that consists of scaled products is judged.

The order of judgement:

1. *Equality.* Each admitted schedule predicts the bits; when one reproduces all of them the output is proved right.
2. *Known faults of accumulation.* When no admitted schedule does, nor one that differs from it in the epilogue alone,
   but a schedule that is known to be wrong for this contract reproduces every bit, the output is called wrong,
   however small the difference. Two exceptions: every element is the exact value correctly rounded, which is the best
   possible result; or, when no numerics is declared, all but a few are, which other arithmetic may give by chance.
3. *Interval.* Otherwise every element must lie in the sound interval of the declared accumulator.
4. *Wider classes.* When no numerics is declared, a kernel may also use another accumulator of its arch, float32
   arithmetic in any order, or partial sums over K (split-K, stream-K): a truncating accumulator's one-sided interval
   need not hold these although they err less. Then the *whole* output must lie in the interval of one of these classes,
   and the verdict says in which, and names the partition where one reproduces every bit. Products in any order have a
   bound (``<schedule>.any``) that is wide enough to hold many wrong outputs; so it must be declared, and a failure says
   where it would hold.

Nothing here is tuned: a schedule either reproduces the bits or does not, and the interval is a theorem about the
declared accumulator (:mod:`oracle.bounds`). A failure is always reported against the accumulator of point 3.

NaN is right where the exact value is NaN, and fails elsewhere.
Source: the bounds and predictions that it asks (:mod:`oracle.bounds`, :mod:`oracle.tensorcore.predict`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial

import torch
from torch import Tensor

from oracle.bounds import Accumulator, Interval, admissible, of_schedule
from oracle.bounds.engines import exact
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.bounds.ieee32 import float64_and_bound, near
from oracle.bounds.screen import Outside, Screen
from oracle.numbers.formats import decode, of_dtype, same_bits
from oracle.numbers.threads import one_thread
from oracle.tensorcore.identify import Search, subset
from oracle.tensorcore.instructions import Sum
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import ANY, SPLIT, Promotion, Scales, Schedule, is_class, of_class, schedules
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.gemm import nearest, rounded
from oracle.verdict.compare import Admissible, Comparison, Error, Verdict, compare, measured, verdict
from oracle.verdict.large import examined
from oracle.verdict.parts import (
    FEWEST,
    LARGE,
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
    reaching,
    samples,
    specified_of,
    within_reach,
    work,
)
from oracle.verdict.sets import Found, Range, Sets, all_equal, mostly_zero, ranged, verdict_of_equality

__all__ = [
    "COINCIDENCES",
    "FEWEST",
    "LARGE",
    "TRIAL",
    "Bands",
    "ExactPart",
    "Part",
    "ProductSets",
    "accumulation_faults",
    "accumulators",
    "exact_and_interval",
    "few_failing",
    "held_by",
    "interval_of",
    "predict_parts",
    "reproducing",
    "samples",
    "specified_of",
    "truth",
    "why_mistrust",
    "wider_classes",
    "work",
]

MEASURED = 1 << 26  # products up to which an output that is proved by its bits is compared with the exact values too
COINCIDENCES = 20
"""Elements in which another arithmetic may have the bits of a fault by chance. Where these are neither those of the
schedule without the fault nor of the exact value, which lies on the other side of a midpoint, an unbiased kernel has
them less than every other time; all of 20 elements agree in fewer than one of a million outputs."""


@dataclass(frozen=True)
class ProductSets(Sets):
    """The right outputs ``[..., N]`` that consist of scaled products.

    Attributes
    ----------
    parts : the products.
    names : the admitted numerics, the declared (or the contract's own) one first: schedules of
        :mod:`oracle.tensorcore.schedules`, ``ieee32.any``, or ``<schedule>.any`` for its accumulator in unknown order.
    classes : the classes of which one may hold the whole output where the first of ``names`` does not
        (:func:`wider_classes`; none when a numerics is declared).
    faults : schedules that the contract excludes.
    cut : whether the kernels may cut K into partial sums: where no numerics is declared, these are right by their bits.
    """

    parts: Sequence[Part]
    names: Sequence[str]
    classes: Sequence[str] = ()
    faults: Sequence[Schedule] = ()
    cut: bool = False

    @property
    def numerics(self) -> str:  # type: ignore[override]
        return self.names[0]

    def judge(self, outputs: Found) -> Verdict:
        output = outputs["out"].reshape(-1, outputs["out"].shape[-1])
        with one_thread():
            mistrust, bits = why_mistrust(self.parts, output), Bands(self.parts, output)
        admitted = [get_schedule(name) for name in self.names if not is_class(name)]
        matched = reproducing(self.parts, output, admitted, bits)
        if matched is None and self.cut and self.classes:
            matched = _split_among(self.parts, output, admitted, bits)
        if matched is not None:
            total = sum(part.of(output).numel() for part in self.parts)
            error = _measured(self.parts, output)
            return verdict_of_equality(f"bits of {matched.name}", matched.name, total, mistrust, error)
        wrong = reproducing(self.parts, output, self.faults, bits)
        undeclared = IEEE32 in self.classes
        if wrong is not None and admitted and not _excused(self.parts, output, admitted[0], undeclared=undeclared):
            return _refuted(self.parts, output, admitted[0], wrong)
        if work(self.parts) > LARGE:
            early = examined(bits, self.names[0], self.classes, mistrust)
            if early is not None:
                return early
        return _judge_interval(self.parts, output, self.names[0], self.classes, mistrust)

    def holds(self, outputs: Found) -> bool:
        """Whether one of the classes holds every element (points 1, 3 and 4).

        What it refuses is refused by :meth:`judge`. Float32 in any order is asked first, mostly by one float64 matrix
        product (:mod:`oracle.bounds.screen`); then the other classes of the element that lies farthest outside of it,
        and of a few more; then the bits of the schedules, and last the intervals.
        """
        output = outputs["out"].reshape(-1, outputs["out"].shape[-1])
        names = (self.numerics, *self.classes)
        if IEEE32 in names:
            left = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
            for part, screen in zip(self.parts, self._screens, strict=True):
                own = part.of(output)
                if screen is None:
                    left[part.place] = ~near(own, *self._around(part))
                elif (outside := screen.outside(own)) is not None:
                    if not self._reached(part, own, screen, outside, names):
                        return False
                    bad = torch.zeros(own.shape, dtype=torch.bool, device=own.device)
                    bad[outside.rows, outside.columns] = True
                    left[part.place] = bad
            if not bool(left.any()):
                return True
            if not self._may_hold(output, left, names):
                return False
        admitted = [get_schedule(name) for name in self.names if not is_class(name)]
        if reproducing(self.parts, output, admitted) is not None:
            return True
        return not _judge_interval(self.parts, output, self.numerics, self.classes, None).status.is_failure

    def _reached(self, part: Part, own: Tensor, screen: Screen, outside: Outside, names: Sequence[str]) -> bool:
        """Whether one of the classes, float32 apart, may hold the worst element ``outside``; ``own [M, N]`` has the
        output's dtype."""
        if not (others := reaching(screen, outside, names)):
            return False
        product = subset(part.product, outside.rows[:1], outside.columns[:1]).on_cpu()
        value = own[outside.rows[0], outside.columns[0]].reshape(1, 1).cpu()
        known = None
        for name in others:
            truth, interval = exact_and_interval(product, name)
            if known is None:
                known = ExactPart.of(Part(product), exact(product) if truth is None else truth, own.dtype)
            if not compared([known], [interval], value).outside:
                return True
        return False

    def may_hold(self, outputs: Found, among: Found) -> bool:
        """Whether one of the classes, which hold what any of the schedules gives, holds a few of the elements."""
        if len(self.names) > 1 and not self.classes:  # the schedules beside the first have no class
            return True
        output, left = (x["out"].reshape(-1, x["out"].shape[-1]) for x in (outputs, among))
        if not any(bool(part.of(left).any()) for part in self.parts):
            return True
        return self._may_hold(output, left, (self.numerics, *self.classes))

    @cached_property
    def _screens(self) -> list[Screen | None]:
        return [Screen.of(part.product) for part in self.parts]

    def _around(self, part: Part) -> tuple[Tensor, Tensor]:
        if id(part) not in self._bounded:
            self._bounded[id(part)] = float64_and_bound(part.product)
        return self._bounded[id(part)]

    @cached_property
    def _bounded(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    def _may_hold(self, output: Tensor, left: Tensor, names: Sequence[str]) -> bool:
        """Whether one of these classes holds a few of the elements ``left`` (bool ``[R, N]``) of ``output [R, N]``, any
        float dtype. They are computed on the CPU, where so few cost less than launches on a GPU."""
        part = max(self.parts, key=lambda part: int(part.of(left).sum()))
        bad = part.of(left)

        @cache
        def few(rows: int, columns: int) -> tuple[ExactPart, Tensor]:
            at = torch.nonzero(bad.any(dim=1))[:rows, 0]
            across = torch.nonzero(bad[at].any(dim=0))[:columns, 0]
            product = subset(part.product, at, across).on_cpu()
            return ExactPart.of(Part(product), exact(product), output.dtype), part.of(output)[at][:, across].cpu()

        def held(size: tuple[int, int], name: str) -> bool:
            known, own = few(*size)
            return not compared([known], [interval_of(known.part.product, name)], own).outside

        return any(all(held(size, name) for size in (FEWEST, TRIAL)) for name in names)

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        """The interval of the first of ``names``; rows that no part fills are free."""
        out = expected["out"]
        flat = out.reshape(-1, out.shape[-1])
        low = torch.full(flat.shape, torch.nan, dtype=torch.float64, device="cpu")
        high, open_ = low.clone(), torch.ones(flat.shape, dtype=torch.bool, device="cpu")
        for part in self.parts:
            value = exact(part.product)
            sets = admissible(value, rounded(part.product, value, out.dtype), interval_of(part.product, self.names[0]))
            low[part.place], high[part.place] = sets.low, sets.high
            open_[part.place] = False if sets.open is None else sets.open
        return {"out": ranged(Admissible(low, high, decode(flat), open=open_), out.dtype, out.shape)}

    def each(self) -> Iterator[Sets]:
        return (replace(self, names=(name,), classes=()) for name in (*self.names, *self.classes))


def truth(parts: Sequence[Part], rows: int, dtype: torch.dtype | None) -> Tensor:
    """The exact result ``[rows, N]``: float64 nearest to it, or correctly rounded into ``dtype``.

    Rows that no part fills are unspecified and hold NaN.
    """
    first = parts[0].product
    out_dtype = torch.float64 if dtype is None else dtype
    result = torch.full((rows, first.N), torch.nan, dtype=out_dtype, device=first.a.device)
    for part in parts:
        value = exact(part.product)
        result[part.place] = nearest(part.product, value) if dtype is None else rounded(part.product, value, dtype)
    return result


def predict_parts(parts: Sequence[Part], rows: int, schedule: Schedule, dtype: torch.dtype) -> Tensor:
    """The bits ``[rows, N]`` in ``dtype`` that ``schedule`` produces; unspecified rows hold NaN."""
    first = parts[0].product
    result = torch.full((rows, first.N), torch.nan, dtype=dtype, device=first.a.device)
    for part in parts:
        result[part.place] = predict_product(part.product, schedule, out_dtype=dtype)
    return result


def wider_classes(numerics: Sequence[str]) -> tuple[str, ...]:
    """What an undeclared kernel of an arch may compute by instead of the first of its admitted ``numerics``.

    Float32 in any order; one name for each other accumulator among them (schedules that differ in the epilogue alone
    have one accumulator, whose bound holds for all of them); each accumulator with K split anywhere, where a bound is
    derived for it. Empty where the first is float32 in any order.
    """
    return () if numerics[0] == IEEE32 else _wider(numerics[0], tuple(map(of_class, numerics)))


@lru_cache(maxsize=256)
def _wider(name: str, schedules: tuple[Schedule, ...]) -> tuple[str, ...]:
    """The classes of these schedules beside the one of this name."""
    first = accumulators(schedules)
    splits = [name + SPLIT for acc, name in first.items() if not acc.scales_inside and acc.split is None]
    return tuple(one for one in (IEEE32, *first.values(), *splits) if one != name)


def accumulators(schedules: Iterable[Schedule]) -> dict[Accumulator, str]:
    """Each accumulator of ``schedules`` once, with the name of the first schedule that has it."""
    first: dict[Accumulator, str] = {}
    for schedule in schedules:
        first.setdefault(replace(of_schedule(schedule), name=""), schedule.name)
    return first


def why_mistrust(parts: Sequence[Part], output: Tensor) -> str | None:
    """Reason for which a pass of ``output [R, N]`` (its own dtype) on these inputs would prove little, or None."""
    for name in ("a_scale", "b_scale"):
        if reason := all_equal(name, [getattr(part.product, name) for part in parts]):
            return reason
    return mostly_zero(*(part.of(output) for part in parts))


@lru_cache(maxsize=256)
def accumulation_faults(schedule: Schedule) -> tuple[Schedule, ...]:
    """Ways to accumulate that a contract which promises ``schedule`` excludes."""
    i = schedule.instruction
    results = []
    if schedule.interval is not None and schedule.promotion is Promotion.ADD:
        results.append(replace(schedule, name="promotion at twice the interval", interval=2 * schedule.interval))
        results.append(replace(schedule, name="no promotion", interval=None, promotion=Promotion.NONE))
    if i.align_bits is not None:
        narrow = replace(i, align_bits=i.align_bits - 1, out_bits=min(i.out_bits, i.align_bits - 1))
        results.append(replace(schedule, name=f"alignment to {i.align_bits - 1} bits", instruction=narrow))
        aligner = replace(i, align_bits=i.align_bits - 1)
        results.append(replace(schedule, name=f"products aligned to {i.align_bits - 1} bits", instruction=aligner))
    return tuple(results)


def _measured(parts: Sequence[Part], output: Tensor) -> Error | None:
    """The error of an output whose bits are proved, where the exact values cost little; None for large calls."""
    if output.is_cuda or work(parts) > MEASURED:
        return None
    due = [rounded(p.product, exact(p.product), output.dtype) for p in parts]
    value, expected = (
        torch.cat([decode(x).flatten() for x in tensors]) for tensors in ([p.of(output) for p in parts], due)
    )
    return measured(value, expected, of_dtype(output.dtype))


def reproducing(
    parts: Sequence[Part], output: Tensor, schedules: Iterable[Schedule], bits: Bands | None = None
) -> Schedule | None:
    """The first of ``schedules`` that reproduces every bit of ``output [R, N]`` in its dtype; None when none does.
    ``bits``: what was learned of this output before."""
    bits = Bands(parts, output) if bits is None else bits
    for schedule in schedules:
        if any(schedule.why_not(part.product, out_dtype=output.dtype) for part in parts):
            continue
        if bits.reproduced(schedule):
            return schedule
    return None


def _excused(parts: Sequence[Part], output: Tensor, promised: Schedule, *, undeclared: bool) -> bool:
    """Whether an output with the bits of a fault may be right all the same.

    It is, when another epilogue of the promised schedule gives them too, or when it is the exact value correctly
    rounded. Undeclared, it may be when it is that, or has the bits of the promised schedule, but in a few elements.
    """
    i = promised.instruction  # schedules that differ in the epilogue alone are as right, if not as declared
    siblings = [s for s in schedules(i.arch) if s.instruction == i and s.interval == promised.interval]
    if reproducing(parts, output, siblings) is not None:
        return True
    other = [~same_bits(rounded(p.product, exact(p.product), output.dtype), p.of(output)) for p in parts]
    if undeclared:
        due = predict_parts(parts, output.shape[0], promised, output.dtype)
        other = [x & ~same_bits(p.of(due), p.of(output)) for p, x in zip(parts, other, strict=True)]
    return sum(int(x.sum()) for x in other) < (COINCIDENCES if undeclared else 1)


def _refuted(parts: Sequence[Part], output: Tensor, promised: Schedule, wrong: Schedule) -> Verdict:
    fixed = decode(predict_parts(parts, output.shape[0], promised, output.dtype))
    admitted = Admissible(fixed, fixed, fixed, specified=specified_of(parts, output))
    basis = f"bits of {promised.name}; every element equals the bits of a known fault: {wrong.name}"
    return replace(banded(parts, verdict(compare(output, admitted), basis=basis)), explained_by=(wrong.name,))


def _judge_interval(
    parts: Sequence[Part], output: Tensor, name: str, wider: Sequence[str], mistrust: str | None
) -> Verdict:
    found_of = [_known(part, output, name) for part in parts]
    known, intervals = [k for k, _, _ in found_of], [interval for _, interval, _ in found_of]
    result = compared(known, intervals, output)
    if result.outside and any(confirmed for _, _, confirmed in found_of):  # a failure rests on other elements
        failing = [partial(k.part.of, result.bad) for k in known]
        if not all(x.confirm is None or x.confirm(f) for x, f in zip(intervals, failing, strict=True)):
            intervals = [exact_and_interval(k.part.product, name, f)[1] for k, f in zip(known, failing, strict=True)]
            result = compared(known, intervals, output)
    if result.outside:
        few, fewer = (few_failing(known, output, result.bad, *most) for most in (TRIAL, FEWEST))
        loose = "" if is_class(name) or not wider else name + ANY
        able = _able(parts, output, result, [*wider, *filter(None, [loose])])
        for other in (other for other in wider if other in able):
            if held_by(*fewer, other) is None or held_by(*few, other) is None:
                continue
            if (held := held_by(known, output, result.bad, other)) is None:
                continue
            comparison, basis = held
            leave = "element leaves" if result.outside == 1 else "elements leave"
            text = f"{basis}; {result.outside} {leave} the {intervals[0].name}, which is not declared"
            cut = other if other.endswith(SPLIT) else name + SPLIT
            may_be_cut = (
                cut in wider and cut in able and held_by(*fewer, cut) is not None and held_by(*few, cut) is not None
            )
            if may_be_cut and (split := _split_of(parts, output, cut)) is not None:
                text, matched = f"bits of {split.name}", split.name
                return verdict_of_equality(text, matched, comparison.total, mistrust)
            return verdict(comparison, basis=text, mistrust=mistrust)
        failed = banded(parts, verdict(result, basis=intervals[0].name))
        fused = loose in able and of_schedule(get_schedule(name)).kind is Sum.FUSED
        if fused and held_by(*fewer, loose) and held_by(*few, loose):
            text = f"; those looked at lie within {loose}: declare it if products are summed in no fixed order"
            return replace(failed, summary=failed.summary + text)
        return failed
    return banded(parts, verdict(result, basis=intervals[0].name, mistrust=mistrust))


def _able(parts: Sequence[Part], output: Tensor, result: Comparison, classes: Sequence[str]) -> Sequence[str]:
    """Those of the classes that may give the element that lies farthest outside of its interval."""
    assert result.worst is not None
    row, column = result.worst.index
    part = part_of(parts, row)
    at = (torch.tensor([i], dtype=torch.int64, device=output.device) for i in (part.row(row), column))
    one = subset(part.product, *at)
    return within_reach(one.on_cpu() if output.is_cuda else one, output[row, column].reshape(1, 1).cpu(), classes)


def _known(part: Part, output: Tensor, name: str) -> tuple[ExactPart, Interval, bool]:
    """The part with its exact value, its interval, and whether that was confirmed where ``output`` rests on it."""
    due: list[ExactPart] = []

    def deciding() -> Tensor:
        due.append(ExactPart.of(part, exact(part.product), output.dtype))
        return due[0].inexact(output)

    value, interval = exact_and_interval(part.product, name, deciding)
    if due:
        return due[0], interval, True
    value = exact(part.product) if value is None else value
    return ExactPart.of(part, value, output.dtype), interval, False


def _split_of(parts: Sequence[Part], output: Tensor, name: str) -> Schedule | None:
    """The split of the class's accumulator that reproduces every bit, with any of its epilogues; None if none does."""
    base = of_class(name)
    same = [s for s in schedules(base.instruction.arch) if s.instruction == base.instruction and s.fault is None]
    return _split_among(parts, output, [s for s in same if s.interval == base.interval])


def _split_among(
    parts: Sequence[Part], output: Tensor, bases: Iterable[Schedule], bits: Bands | None = None
) -> Schedule | None:
    """The first split of one of ``bases`` that reproduces every bit of ``output [R, N]``; None if none does."""
    first = parts[0]
    search = Search(first.product, first.of(output))
    for base in bases:
        if base.scales is Scales.OPERANDS or base.why_not(first.product, out_dtype=output.dtype):
            continue
        split = search.split(base)
        if split is not None and reproducing(parts, output, [split], bits) is not None:
            return split
    return None


def few_failing(
    known: Sequence[ExactPart], output: Tensor, outside: Tensor, most_rows: int, most_columns: int
) -> tuple[list[ExactPart], Tensor, Tensor]:
    """A few failing rows and columns of the part that fails most, as a judgement of their own.

    ``output [R, N]`` has its own dtype, ``outside [R, N]`` is bool. Returns the part, and of these rows and columns
    ``[r, c]`` the output in its dtype and what fails there, bool."""
    k, bad = max(((k, k.part.of(outside)) for k in known), key=lambda pair: int(pair[1].sum()))
    rows = _some(bad.any(dim=1), most_rows)
    columns = _some(bad[rows].any(dim=0), most_columns)
    return [k.subset(rows, columns)], k.part.of(output)[rows][:, columns], bad[rows][:, columns]


def _some(wanted: Tensor, most: int) -> Tensor:
    """At most ``most`` of the places where ``wanted`` is True, evenly."""
    at = torch.nonzero(wanted)[:, 0]
    return at[:: -(-len(at) // most)]
