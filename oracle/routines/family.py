"""Families of routines: one folder or one foreign distribution each, and what all of them bring together.

A family is a :class:`RoutineFamily`: its contracts (registered when their module is imported), the grammars of their
cases, their faults, and perhaps goldens that a new fixtures folder begins with; a folder that exists names its own.
Built-in ones are the folders of :data:`BUILT_IN`, each with a module ``family``. Another distribution adds one under
the entry point group ``fp8_oracle.families``; the entry point names the record::

    [project.entry-points."fp8_oracle.families"]
    mine = "my_package.family:FAMILY"

Every table of the suite follows from the families: contracts, cases, profiles, the fault catalogue, goldens, coverage
and the reference pages. Nothing is loaded before it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from types import ModuleType

from oracle.errors import ContractError
from oracle.extensions import added
from oracle.loading import collector_at_rest
from oracle.routines import base
from oracle.routines.base import Contract
from oracle.routines.case import Grammar
from oracle.routines.fault import Fault

GROUP = "fp8_oracle.families"
BUILT_IN = (
    *("products", "quantisers", "mx", "mx_products", "logits", "attention", "moe", "fused", "kv_cache", "layouts"),
    "decisions",
    "int8",
    "weight_only",
    "common",
)


@dataclass(frozen=True)
class RoutineFamily:
    """What one folder of routines brings.

    Attributes
    ----------
    name : unique among the families.
    contracts : the modules whose import registers its contracts.
    grammars : of the cases of each contract, by its name.
    faults : the tables of its faults (:class:`oracle.routines.fault.Faults`), in the order of the catalogue.
    goldens : case ids that a new fixtures folder begins with; contracts that have none get some that are chosen from
        the quick profile.
    """

    name: str
    contracts: tuple[ModuleType, ...] = ()
    grammars: Mapping[str, Grammar] = field(default_factory=dict)
    faults: tuple[Iterable[Fault], ...] = ()
    goldens: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def families() -> tuple[RoutineFamily, ...]:
    """Every family, the built-in ones first, then those of other distributions by name.

    Raises ExtensionError: an entry point cannot be loaded or names no family. ContractError: a family brings cases of a
    contract that another family has.
    """
    with collector_at_rest():
        built_in = tuple(import_module(f"oracle.routines.{name}.family").FAMILY for name in BUILT_IN)
    registered_families = (*built_in, *added(GROUP, RoutineFamily, known=BUILT_IN, many=False))
    seen: dict[str, str] = {}
    for family in registered_families:
        for name in family.grammars:
            if name in seen:
                other = seen[name]
                raise ContractError(f"family {family.name!r} has cases of {name!r}, which family {other!r} has too")
            seen[name] = family.name
    return registered_families


def registered() -> Mapping[str, Contract]:
    """Every contract by name."""
    families()
    return base.registered()


def get(name: str) -> Contract:
    """The contract of this name; ContractError lists what exists."""
    families()
    return base.get(name)


@lru_cache(maxsize=1)
def grammars() -> Mapping[str, Grammar]:
    """The grammar of every contract that cases exist for."""
    return {name: grammar for family in families() for name, grammar in family.grammars.items()}
