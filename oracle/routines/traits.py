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

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oracle.routines.base import Contract


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


@dataclass(frozen=True, eq=False)
class Trait:
    """One property of contracts; stated where ``derived`` is None."""

    name: str
    derived: Callable[[Contract], bool] | None = None

    def holds(self, contract: Contract) -> bool:
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
