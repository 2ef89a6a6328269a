"""Faults of the quantiser inside another routine: those of the group quantiser, under a name of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from oracle.routines.base import Call
from oracle.routines.fault import CAST, MOVEMENT, Fault, WhyNot
from oracle.routines.quantisers.contract import PerTokenGroupQuantFp8, QuantiserContract
from oracle.routines.quantisers.faults import FAULTS
from oracle.routines.traits import Trait

GROUPS = PerTokenGroupQuantFp8()


@dataclass(frozen=True)
class Inside:
    """Every fault of the group quantiser for the quantiser inside contracts of a trait, its name behind a prefix.

    Attributes
    ----------
    prefix : what stands before the name of the fault.
    on : the trait of the contracts; each has ``inner``, which gives the call of its quantiser.
    computes : the trait of those that compute their scale. The others have no fault of a scale: it is given.
    """

    prefix: str
    on: Trait
    computes: Trait

    def __iter__(self) -> Iterator[Fault]:
        for fault in FAULTS:
            if fault.on.holds(GROUPS):
                on = self.on if fault.family in (CAST, MOVEMENT) else self.on & self.computes
                yield replace(fault, name=self.prefix + fault.name, on=on, needs=asked_inside(fault.needs))


def asked_inside(why_not: WhyNot) -> WhyNot:
    """A need of a quantiser, for the call of the quantiser inside another routine."""

    def asked(call: Call) -> str | None:
        contract: Any = call.contract
        return why_not(call if isinstance(contract, QuantiserContract) else contract.inner(call))

    return asked
