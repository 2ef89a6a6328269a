"""The catalogue of faults that FP8 kernels have really had, each as a mutation of a right kernel.

    catalogue()                     every fault, by name
    faults_of(contract)             those that apply to a contract
    run(call, *faults)              the output of a right kernel with these faults in it

Used three ways: as mutants (:mod:`oracle.mutate`), as hypotheses (:mod:`oracle.diagnose`), as documentation. Not
covered: attention beyond the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from oracle.errors import OptionError
from oracle.faults import (
    arithmetic,
    cast,
    experts,
    internal,
    layer_inputs,
    layers,
    logits,
    movement,
    movement_grouped,
    quantiser,
    scale_index,
    scale_layout,
    scale_value,
)
from oracle.faults.base import Beyond, Call, Family, Fault, Stage, agree
from oracle.faults.behaviour import BEHAVIOURS, Behaviour
from oracle.faults.engine import run

__all__ = [
    "BEHAVIOURS",
    "Behaviour",
    "Beyond",
    "Call",
    "Family",
    "Fault",
    "Stage",
    "agree",
    "catalogue",
    "faults_of",
    "get",
    "run",
]


FAMILIES = (
    scale_index,
    scale_layout,
    scale_value,
    cast,
    movement,
    movement_grouped,
    arithmetic,
    quantiser,
    internal,
    logits,
    layers,
    layer_inputs,
    experts,
)


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, Fault]:
    """Every fault by name, in the order of the families."""
    found: dict[str, Fault] = {}
    for module in FAMILIES:
        for fault in module.faults():
            if fault.name in found:
                raise ValueError(f"fault {fault.name!r} stands twice in the catalogue")
            found[fault.name] = fault
    return MappingProxyType(found)


def faults_of(contract: str) -> tuple[Fault, ...]:
    """The faults that apply to a contract, by its name."""
    return tuple(fault for fault in catalogue().values() if contract in fault.contracts)


def get(name: str) -> Fault:
    """The fault of this name; OptionError lists those that share a word with it."""
    if name not in catalogue():
        words = set(name.lower().split())
        shared = {known: len(words & set(known.lower().split())) for known in catalogue()}
        near = sorted((known for known in shared if shared[known]), key=lambda known: -shared[known])
        raise OptionError(
            f"no fault {name!r}; near it: {'; '.join(near[:8]) or 'none, see `fp8-oracle mutate --list`'}"
        )
    return catalogue()[name]
