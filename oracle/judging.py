"""How an output that consists of scaled products is judged.

The order of judgement:

1. *Equality.* Each admitted schedule predicts the bits; when one reproduces all of them the output is proved right.
2. *Known faults of accumulation.* When no admitted schedule does, nor one that differs from it in the epilogue alone,
   but a schedule that is known to be wrong for this contract reproduces every bit, the output is called wrong,
   however small the difference.
3. *Interval.* Otherwise every element must lie in the sound interval of the declared accumulator.

Nothing here is tuned: a schedule either reproduces the bits or does not, and the interval is a theorem about the
declared accumulator (:mod:`oracle.bounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.bounds import (
    Interval,
    admissible,
    any_order_bound,
    ieee32_bound,
    of_schedule,
)
from oracle.bounds.exactly import collapsed
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.compare import Admissible, Status, Verdict, compare, verdict
from oracle.engines import exact, residue_bound
from oracle.formats import decode, same_bits
from oracle.gemm import ScaledProduct, nearest, rounded
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Promotion, Schedule, schedules
from oracle.tensorcore.schedules import get as get_schedule

SAMPLE_ROWS = 4  # rows of a part that a schedule must reproduce before the whole part is predicted
ZERO_TRUST = 0.30  # above this share of zero results a pass proves little (oneDNN benchdnn's default zero trust)


@dataclass(frozen=True)
class Part:
    """One product and the rows of the flattened output ``[R, N]`` that it fills (None: all, in order)."""

    product: ScaledProduct
    rows: Tensor | None = None

    def of(self, output: Tensor) -> Tensor:
        """This part's rows of ``output [R, N]``."""
        return output if self.rows is None else output.index_select(0, self.rows)


def truth(parts: Sequence[Part], rows: int, dtype: torch.dtype | None) -> Tensor:
    """The exact result ``[rows, N]``: float64 nearest to it, or correctly rounded into ``dtype``.

    Rows that no part fills are unspecified and hold NaN.
    """
    first = parts[0].product
    out_dtype = torch.float64 if dtype is None else dtype
    result = torch.full((rows, first.N), torch.nan, dtype=out_dtype, device=first.a.device)
    for part in parts:
        value = exact(part.product)
        tensor = nearest(part.product, value) if dtype is None else rounded(part.product, value, dtype)
        if part.rows is None:
            result.copy_(tensor)
        else:
            result[part.rows] = tensor
    return result


def predict_parts(parts: Sequence[Part], rows: int, schedule: Schedule, dtype: torch.dtype) -> Tensor:
    """The bits ``[rows, N]`` that ``schedule`` produces; unspecified rows hold NaN."""
    first = parts[0].product
    result = torch.full((rows, first.N), torch.nan, dtype=dtype, device=first.a.device)
    for part in parts:
        tensor = predict_product(part.product, schedule, out_dtype=dtype)
        if part.rows is None:
            result.copy_(tensor)
        else:
            result[part.rows] = tensor
    return result


def judge_parts(
    parts: Sequence[Part], output: Tensor, *, numerics: Sequence[str], faults: Sequence[Schedule] = ()
) -> Verdict:
    """The verdict on ``output [R, N]``.

    ``numerics`` are the admitted names, the declared (or the contract's own) one first: schedules of
    :mod:`oracle.tensorcore.schedules`, ``ieee32.any``, or ``<schedule>.any`` for its accumulator in unknown order.
    ``faults`` are schedules that this contract excludes.
    """
    mistrust = why_mistrust(parts, output)
    total = sum(part.of(output).numel() for part in parts)
    admitted = [get_schedule(name) for name in numerics if not name.endswith(".any")]
    matched = _reproducing(parts, output, admitted)
    if matched is not None:
        said = f"bits of {matched.name}"
        return verdict_of_equality(said, matched.name, total, mistrust)
    wrong = _reproducing(parts, output, faults)
    if wrong is not None and admitted and _reproducing(parts, output, _siblings(admitted[0])) is None:
        return _refuted(parts, output, admitted[0], wrong)
    return _judge_interval(parts, output, numerics[0], mistrust)


def verdict_of_equality(basis: str, name: str, total: int, mistrust: str | None) -> Verdict:
    """A pass by equality of every bit with a named prediction."""
    said = f"all {total} elements equal the bits of {name}"
    if mistrust is not None:
        said += f"; but this proves little: {mistrust}"
    status = Status.PASSED if mistrust is None else Status.MISTRUSTED
    return Verdict(status, said, 0, total, None, name, (), basis, "", 0.0, 0, mistrust)


def why_mistrust(parts: Sequence[Part], output: Tensor) -> str | None:
    """Reason for which a pass on these inputs would prove little, or None."""
    for name in ("a_scale", "b_scale"):
        scales = [getattr(part.product, name) for part in parts]
        if all(bool((s == s.flatten()[0]).all()) for s in scales) and max(s.numel() for s in scales) > 1:
            return f"all values of {name} are equal, so a wrong scale index changes nothing"
    values = torch.cat([decode(part.of(output)).flatten() for part in parts])
    share = float((values == 0).to(torch.float64).mean())
    if share > ZERO_TRUST:
        return f"{100 * share:.0f}% of the results are zero"
    return None


def interval_of(product: ScaledProduct, name: str) -> Interval:
    """The sound interval of ``product`` under the named numerics; of width zero where none of them rounds."""
    if name == IEEE32:
        return collapsed(product, ieee32_bound(product), None)
    weak = name.endswith(".any")
    schedule = get_schedule(name.removesuffix(".any"))
    accumulator = of_schedule(schedule)
    interval = any_order_bound(product, accumulator) if weak else residue_bound(product, accumulator)
    return collapsed(product, interval, accumulator)


def accumulation_faults(schedule: Schedule) -> tuple[Schedule, ...]:
    """Ways to accumulate that a contract which promises ``schedule`` excludes."""
    i = schedule.instruction
    found = []
    if schedule.interval is not None and schedule.promotion is Promotion.ADD:
        found.append(replace(schedule, name="promotion at twice the interval", interval=2 * schedule.interval))
        found.append(replace(schedule, name="no promotion", interval=None, promotion=Promotion.NONE))
    if i.align_bits is not None:
        narrow = replace(i, align_bits=i.align_bits - 1, out_bits=min(i.out_bits, i.align_bits - 1))
        found.append(replace(schedule, name=f"alignment to {i.align_bits - 1} bits", instruction=narrow))
        aligner = replace(i, align_bits=i.align_bits - 1)
        found.append(replace(schedule, name=f"products aligned to {i.align_bits - 1} bits", instruction=aligner))
    return tuple(found)


def _siblings(schedule: Schedule) -> list[Schedule]:
    """Registered schedules that differ from this one in the epilogue alone: as right, if not as declared."""
    i = schedule.instruction
    return [s for s in schedules(i.arch) if s.instruction == i and s.interval == schedule.interval]


def _reproducing(parts: Sequence[Part], output: Tensor, schedules: Iterable[Schedule]) -> Schedule | None:
    dtype = output.dtype
    for schedule in schedules:
        if any(schedule.why_not(part.product, out_dtype=dtype) for part in parts):
            continue
        if _equal(parts, output, schedule, _sampled) and _equal(parts, output, schedule, _whole):
            return schedule
    return None


def _equal(
    parts: Sequence[Part], output: Tensor, schedule: Schedule, choose: Callable[[Part, Tensor], tuple[Part, Tensor]]
) -> bool:
    for part in parts:
        chosen, wanted = choose(part, part.of(output))
        if not bool(same_bits(predict_product(chosen.product, schedule, out_dtype=output.dtype), wanted).all()):
            return False
    return True


def _whole(part: Part, output: Tensor) -> tuple[Part, Tensor]:
    return part, output


def _sampled(part: Part, output: Tensor) -> tuple[Part, Tensor]:
    step = max(1, part.product.M // SAMPLE_ROWS)
    rows = torch.arange(0, part.product.M, step, device=output.device)
    return Part(part.product.take(rows)), output.index_select(0, rows)


def _refuted(parts: Sequence[Part], output: Tensor, promised: Schedule, wrong: Schedule) -> Verdict:
    prediction = predict_parts(parts, output.shape[0], promised, output.dtype)
    fixed = decode(prediction)
    admitted = Admissible(fixed, fixed, fixed, specified=_specified(parts, output))
    basis = f"bits of {promised.name}; every element equals the bits of a known fault: {wrong.name}"
    return replace(_banded(parts, verdict(compare(output, admitted), basis=basis)), explained_by=(wrong.name,))


def _judge_interval(parts: Sequence[Part], output: Tensor, name: str, mistrust: str | None) -> Verdict:
    low = torch.full(output.shape, torch.nan, dtype=torch.float64, device=output.device)
    high, expected = low.clone(), low.clone()
    open_ = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
    basis = ""
    for part in parts:
        interval = interval_of(part.product, name)
        value = exact(part.product)
        found = admissible(value, rounded(part.product, value, output.dtype), interval)
        rows = slice(None) if part.rows is None else part.rows
        low[rows], high[rows], expected[rows] = found.low, found.high, found.expected
        if found.open is not None:
            open_[rows] = found.open
        basis = interval.name
    admitted = Admissible(low, high, expected, specified=_specified(parts, output), open=open_)
    return _banded(parts, verdict(compare(output, admitted), basis=basis, mistrust=mistrust))


def _banded(parts: Sequence[Part], found: Verdict) -> Verdict:
    """The verdict with the rows at which each part begins, for the lines of a picture."""
    starts = sorted(int(part.rows[0]) for part in parts if part.rows is not None and part.rows.numel())
    if found.evidence is None or len(starts) < 2:
        return found
    return replace(found, evidence=replace(found.evidence, bands=tuple(starts)))


def _specified(parts: Sequence[Part], output: Tensor) -> Tensor | None:
    if all(part.rows is None for part in parts):
        return None
    specified = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
    for part in parts:
        specified[slice(None) if part.rows is None else part.rows] = True
    return specified
