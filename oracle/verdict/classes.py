"""The tightest class of arithmetic that holds a whole output of scaled products.

From the tightest to the loosest: the bits of a schedule, plain or with K split; those of a chain with a float16
accumulator; the interval of an accumulator of the arch; that with K split anywhere; float32 in any order; an
accumulator with products in any order. Of several intervals the narrowest that holds the output is named. A class is
no verdict: a contract may exclude it (a chain over K where promotion is due is fast accumulation), and a wide one holds
wrong outputs.

NaN in an output is held by a class that gives NaN there, and by no other.
Source: the schedules and bounds that it asks (:mod:`oracle.tensorcore.schedules`, :mod:`oracle.bounds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.bounds import admissible
from oracle.bounds.engines import exact
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import NumericsError, counted
from oracle.tensorcore.identify import Search
from oracle.tensorcore.instructions import Sum
from oracle.tensorcore.schedules import ANY, SPLIT, Promotion, Scales, Schedule, is_class, schedules
from oracle.truth.gemm import ScaledProduct, rounded
from oracle.verdict.compare import compare
from oracle.verdict.products import Part, accumulators, interval_of, reproducing, samples

CPU = "cpu"  # an arch without matrix instructions: float32 in any order is all that is known of it
WHOLE = 1 << 26  # products up to which an interval is computed for the whole output


@dataclass(frozen=True)
class Class:
    """What holds an output.

    Attributes
    ----------
    name : the schedule or class; ``"none"`` where nothing known holds the output.
    bits : whether every bit is reproduced, rather than every element lies in the interval.
    elements : how many elements were compared; fewer than the output has where an interval was tried on a sample.
    """

    name: str
    bits: bool
    elements: int

    def __str__(self) -> str:
        if self.name == "none":
            return "no known class holds the output"
        how = "bit-equal to" if self.bits else "within"
        return f"{how} {_said(self.name)} ({counted(self.elements, 'element')})"


def tightest_class(parts: Sequence[Part], output: Tensor, arch: str) -> Class:
    """The tightest class of ``arch`` that holds ``output [R, N]`` (the output's dtype); its text says "within X" or
    "bit-equal to X".

    Raises NumericsError: no schedule of the arch can compute the parts.
    """
    known = () if arch == CPU else schedules(arch)
    fitting = [s for s in known if not any(s.why_not(p.product, out_dtype=output.dtype) for p in parts)]
    if not fitting and arch != CPU:
        raise NumericsError(f"no schedule of {arch} computes these products; `fp8-oracle list` shows what exists")
    total = sum(part.of(output).numel() for part in parts)
    for candidates in (fitting, _splits(parts, output, fitting), _float16(fitting)):
        if (result := reproducing(parts, output, candidates)) is not None:
            return Class(result.name, True, total)
    first = accumulators(s for s in fitting if s.fault is None)
    plain = [acc for acc in first if not acc.scales_inside]
    names = [*first.values(), *(first[acc] + SPLIT for acc in plain), IEEE32]
    names += [first[acc] + ANY for acc in plain if acc.kind is Sum.FUSED]
    small = sum(p.product.M * p.product.N * p.product.K for p in parts) <= WHOLE
    sample = list(samples(parts, output))
    widths = sorted((width, name) for name in names if (width := _width(sample, name)) is not None)
    whole = [(part.product, part.of(output)) for part in parts]
    for _, name in widths:
        if not small:
            return Class(name, False, sum(wanted.numel() for _, wanted in sample))
        if _width(whole, name) is not None:
            return Class(name, False, total)
    return Class("none", False, total)


def _splits(parts: Sequence[Part], output: Tensor, fitting: Sequence[Schedule]) -> Iterator[Schedule]:
    search = Search(parts[0].product, parts[0].of(output))
    for schedule in fitting:
        if schedule.scales is not Scales.OPERANDS and (split := search.split(schedule)) is not None:
            yield split


def _float16(fitting: Sequence[Schedule]) -> Iterator[Schedule]:
    """The chains with a float16 accumulator."""
    for schedule in fitting:
        if schedule.instruction.float16_out and schedule.promotion is Promotion.NONE:
            yield replace(schedule, name=f"{schedule.name} with a float16 accumulator", accumulator=torch.float16)


def _width(pairs: Sequence[tuple[ScaledProduct, Tensor]], name: str) -> float | None:
    """The mean width of the intervals where they hold every element and leave none open; None where they do not."""
    widths = []
    for product, wanted in pairs:
        value, interval = exact(product), interval_of(product, name)
        admitted = admissible(value, rounded(product, value, wanted.dtype), interval)
        if interval.open is not None and bool(interval.open.any()):
            return None
        if compare(wanted, admitted).outside:
            return None
        widths.append(float((interval.hi - interval.lo).mean()))
    return sum(widths) / len(widths) if widths else None


def _said(name: str) -> str:
    if name == IEEE32:
        return f"{name}, float32 in any order"
    if not is_class(name):
        return name
    plain = name.removesuffix(ANY).removesuffix(SPLIT)
    return f"{name}, {plain} " + ("in any order" if name.endswith(ANY) else "with K split anywhere")
