"""What a contract is, as properties by which faults and drawn cases apply to it; nothing names a contract.

An input has a :class:`Kind`: what its numbers stand for. A contract has traits, of two sorts:

*stated*    ``PAIRED = Trait("writes keys and values")``; a contract states it with ``traits = frozenset({PAIRED})``,
            its subclasses have it too;
*derived*   ``Trait("grouped", lambda contract: contract.groups is not None)``, or one of :func:`takes`,
            :func:`returns` and :func:`of_class`.

Traits combine: ``GROUPED & takes("bias")``, ``PAIRED | TILED``, ``GROUPED - RUNS``, ``~GROUPED``. A contract of another
distribution has a trait by stating it, or by being what a derived one asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import ClassVar

import torch


class Kind(StrEnum):
    """What the numbers of an input stand for."""

    VALUES = "values"  #: real numbers that are quantised, multiplied or normalised
    CODES = "codes"  #: encoded values: FP8, packed FP4 or FP6, integers with a scale
    SCALES = "scales"  #: what codes are multiplied with, or values divided by, one for a block, row or tensor
    OFFSETS = "offsets"  #: where a group, sequence or expert begins or ends, the end excluded
    COUNTS = "counts"  #: how many rows or elements a group, sequence or expert has
    IDS = "ids"  #: which expert, group or sequence a row belongs to; -1 where none
    SLOTS = "slots"  #: a place in a cache for each token; -1 where none
    PAGES = "pages"  #: a table of pages, one row a sequence
    POSITIONS = "positions"  #: rows of a table, places in a sequence, or a permutation
    LOGITS = "logits"  #: scores that are ranked or put through a softmax
    MASK = "mask"  #: what counts and what does not
    WEIGHTS = "weights"  #: factors of a sum, a norm, a rotation or a router, not quantised
    BOUND = "bound"  #: an upper limit of amax
    BIAS = "bias"  #: what is added to a result
    ALPHA = "alpha"  #: one factor of the whole result, or one for each group
    STATE = "state"  #: memory that the call goes on from: a cache, an accumulator, running maxima
    RANDOM = "random"  #: random bits or a seed
    PARAMETERS = "parameters"  #: what a decision reads of a device, a build or a call, one for each row of a table

    @property
    def is_integer(self) -> bool:
        """Whether it consists of integers that count, place or name something."""
        return self in INDICES


INDICES = frozenset({Kind.OFFSETS, Kind.COUNTS, Kind.IDS, Kind.SLOTS, Kind.PAGES, Kind.POSITIONS, Kind.PARAMETERS})


@dataclass(frozen=True)
class TensorSpec:
    """One input: its name, what its numbers stand for, dtypes and symbolic dims.

    A dim is a symbol (``"M"``), a number (``"1"``), a ceiling division (``"K/128"``), or alternatives
    separated by ``|`` (``"1|M"``). ``dims=None`` leaves the shape to the contract's own check.
    """

    name: str
    kind: Kind
    dtypes: tuple[torch.dtype, ...]
    dims: tuple[str, ...] | None
    doc: str
    optional: bool = False
    contiguous: bool = False


@dataclass(frozen=True)
class OptionSpec:
    """One option: its default and, where they are few, the values it admits.

    ``choices=None``: any number, or with ``names`` one of these, of which the cases have few. ``declares``: the value
    says which of several right things the kernel does, and None admits all of them; a kernel without the parameter is
    judged under None.
    """

    name: str
    default: object
    choices: tuple[object, ...] | None
    doc: str
    names: tuple[str, ...] = ()
    declares: bool = False


class Stated:
    """What a contract states of itself, as attributes of its class.

    Attributes
    ----------
    name, summary, source : what it is called, what it computes, where it is published.
    inputs, options : what a call takes.
    returns : names of the outputs.
    shapes : by output, the rule of its shape where no short formula of the inputs' dims gives it.
    roles, b_columns, laid_out, groups : see :class:`oracle.routines.records.Operands`.
    multiplies : every call has scaled products.
    numerics : by arch, the names of the arithmetics that the routine's kernels use, the usual one first; empty where
        there is one right result and nothing to choose.
    probed : scale blocks along K (None: one) and rows of ``b`` that share a scale, where a kernel of the contract can
        be fingerprinted from calls of one shape.
    section : the heading under which coverage and the reference pages list the routine; ``also``: rows beside its own,
        as ``heading: name``, for promises that engines name by themselves.
    gpu : a GPU library computes it on an arch that captures are taken of, so that one is due.
    loses : its verdicts carry the loss of a quantisation.
    dispatched : the production package computes it.
    production : the attribute of the production package that computes it ("" for the routine's own name).
    traits : what it states of itself (:mod:`oracle.routines.traits`); a class has those of its bases too.
    golden_arches : arches whose admissible sets are stored with golden fixtures; empty where all arches share one.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    inputs: ClassVar[tuple[TensorSpec, ...]]
    options: ClassVar[tuple[OptionSpec, ...]] = ()
    returns: ClassVar[tuple[str, ...]] = ("out",)
    shapes: ClassVar[Mapping[str, str]] = {}
    roles: ClassVar[Mapping[str, str]] = {}
    b_columns: ClassVar[bool] = False
    laid_out: ClassVar[bool] = False
    groups: ClassVar[str | None] = None
    multiplies: ClassVar[bool] = False
    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    golden_arches: ClassVar[tuple[str, ...]] = ()
    probed: ClassVar[tuple[int | None, int] | None] = None
    section: ClassVar[str] = "Other"
    gpu: ClassVar[bool] = False
    loses: ClassVar[bool] = False
    dispatched: ClassVar[bool] = True
    production: ClassVar[str] = ""
    also: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[frozenset[Trait]] = frozenset()

    @cached_property
    def all_traits(self) -> frozenset[Trait]:
        """The traits that its classes state."""
        return frozenset().union(*(vars(kind).get("traits", ()) for kind in type(self).__mro__))


@dataclass(frozen=True, eq=False)
class Trait:
    """One property of contracts; stated where ``derived`` is None."""

    name: str
    derived: Callable[[Stated], bool] | None = None

    def holds(self, contract: Stated) -> bool:
        """Whether a contract has it."""
        return self in contract.all_traits if self.derived is None else self.derived(contract)

    def called(self, name: str) -> Trait:
        """The same contracts under a shorter name, for one that is made of several."""
        return Trait(name, self.holds)

    def __and__(self, other: Trait) -> Trait:
        return Trait(f"{self.name} and {other.name}", lambda c: self.holds(c) and other.holds(c))

    def __or__(self, other: Trait) -> Trait:
        return Trait(f"{self.name} or {other.name}", lambda c: self.holds(c) or other.holds(c))

    def __sub__(self, other: Trait) -> Trait:
        return Trait(f"{self.name} but not {other.name}", lambda c: self.holds(c) and not other.holds(c))

    def __invert__(self) -> Trait:
        return Trait(f"not {self.name}", lambda c: not self.holds(c))

    def __repr__(self) -> str:
        return f"Trait({self.name!r})"


def takes(name: str) -> Trait:
    """Contracts with an input or an option of this name."""
    return Trait(f"takes {name}", lambda c: name in {*(x.name for x in c.inputs), *(x.name for x in c.options)})


def returns(name: str) -> Trait:
    """Contracts with an output of this name."""
    return Trait(f"returns {name}", lambda c: name in c.returns)


def of_class(*classes: type) -> Trait:
    """Contracts of these classes and of those that derive from them."""
    wanted = frozenset(classes)  # an instance check of abstract classes asks all of their subclasses
    return Trait(" or ".join(one.__name__ for one in classes), lambda c: not wanted.isdisjoint(type(c).__mro__))


def has_role(role: str) -> Trait:
    """Contracts with an input for a part of a product or a quantiser: ``a``, ``b``, ``a_scale``, ``b_scale``, ``x``."""
    return Trait(f"has {role}", lambda c: role in c.roles)


GROUPED = Trait("grouped", lambda c: c.groups is not None)
