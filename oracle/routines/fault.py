"""One fault: a small mutation of a right kernel, and how a mutated kernel is run.

A right kernel of a scaled product is a line of stages; a fault replaces the value that passes between two of them::

    READ        the inputs as the kernel reads them (layouts, casts, indices)
    PRODUCT     each ScaledProduct: which scale meets which block
    SCHEDULE    the arithmetic: instruction, interval, promotion, epilogue
    SUM         the float32 result of one product before the store
    STORE       the same, after the store into the output dtype
    WRITE       the whole output [R, N]

A quantiser has the stages READ, RECIPE (its record), AMAX, QUOTIENT (x / s before the cast), CODES and SCALE (what it
publishes); MQA logits have READ and WRITE; contracts
whose right kernel is their reference READ, OPTIONS and WRITE.
Faults compose: :func:`run` applies the changes of several faults, stage by stage, in the order given.

What a kernel reads beyond a buffer and leaves in a region it never writes is not knowable; ``Call.beyond`` says what
the mutant finds there: other live data (``WRAP``), or NaN as the mark of an element that says nothing (``UNKNOWN``).
Not covered: faults of behaviour (crashes, races, writes out of bounds); :mod:`oracle.routines.catalogue` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

import torch
from torch import Tensor

from oracle.numbers.formats import same_bits
from oracle.routines.base import Beyond as Beyond
from oracle.routines.base import Call as Call


class Family(StrEnum):
    """What is wrong, in the order in which a kernel would do it."""

    SCALE_INDEX = "scale index and layout"
    SCALE_VALUE = "scale value"
    CAST = "cast"
    MOVEMENT = "data movement"
    ARITHMETIC = "arithmetic"
    BEHAVIOUR = "behaviour"


class Stage(Enum):
    """Where in the kernel a change acts."""

    READ = "read"
    OPTIONS = "options"
    PRODUCT = "product"
    SCHEDULE = "schedule"
    SUM = "sum"
    STORE = "store"
    WRITE = "write"
    RECIPE = "recipe"
    AMAX = "amax"
    QUOTIENT = "quotient"
    SCALE = "scale"
    CODES = "codes"


Change = Callable[[Call, Any], Any]
WhyNot = Callable[[Call], "str | None"]


def always(call: Call) -> str | None:
    """The fault can be put into every call of its contracts."""
    return None


@dataclass(frozen=True)
class Fault:
    """One way to be wrong.

    Attributes
    ----------
    name : what is wrong, in words; unique.
    family : :class:`Family`.
    met_in : where it was met: a thread, or the section of the facts that measured it.
    changes : the mutation, by stage.
    contracts : names of the contracts it applies to.
    why_not : the reason for which a given call cannot show it, or None.
    equivalent : the argument for which a mutant may give the right bits ("" if there is none).
    tolerated : the argument for which its wrong bits may be admissible ("" if there is none).
    race : whether it is the order of two stores, so that any part of what it changes may be right.
    """

    name: str
    family: Family
    met_in: str
    changes: Mapping[Stage, Change]
    contracts: frozenset[str]
    why_not: WhyNot = always
    equivalent: str = ""
    tolerated: str = ""
    race: bool = False

    def applies(self, call: Call) -> str | None:
        """Why this fault cannot be put into ``call``, or None when it can."""
        if call.contract.name not in self.contracts:
            return f"{self.name}: not a fault of {call.contract.name}"
        return self.why_not(call)


def agree(x: Tensor, y: Tensor) -> Tensor:
    """Elements of two tensors of one shape with equal bits; any NaN equals any NaN. Of other dtypes, equal values."""
    if x.dtype != y.dtype:
        return x.to(torch.float64) == y.to(torch.float64)
    if not x.is_floating_point():
        return x == y
    if x.dtype is torch.float64:  # no format of a kernel, but the output of a contract that measures one
        return (x.view(torch.int64) == y.view(torch.int64)) | (torch.isnan(x) & torch.isnan(y))
    return same_bits(x.contiguous(), y.contiguous())


def fold(call: Call, faults: tuple[Fault, ...], stage: Stage, value: Any) -> Any:
    """``value`` after the changes of this stage."""
    for fault in faults:
        if stage in fault.changes:
            value = fault.changes[stage](call, value)
    return value


def touches(faults: tuple[Fault, ...], *stages: Stage) -> bool:
    """Whether any fault changes one of these stages."""
    return any(stage in fault.changes for fault in faults for stage in stages)
