"""The records of which a contract, a call and a fault consist: outputs, operands, stages of a right kernel.

They know neither a contract nor a call (:mod:`oracle.routines.base` has those).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

import torch
from torch import Tensor

from oracle.numbers.recipes import Recipe
from oracle.verdict.products import Part


@dataclass(frozen=True)
class Out:
    """One output of a call: its shape, the dtypes that it may have, and which elements are specified (None: all).

    ``shape=None`` leaves the shape to the admissible sets of the contract. ``optional``: a kernel need not return it;
    such outputs are the last ones.
    """

    shape: tuple[int, ...] | None
    dtypes: tuple[torch.dtype, ...]
    specified: Tensor | None = None
    optional: bool = False


class Beyond(Enum):
    """The value of an out-of-bounds read of a mutant, or of a region that it should have written."""

    WRAP = "other live data"
    UNKNOWN = "nothing that could be predicted"


@dataclass(frozen=True)
class Operands:
    """Which input of a call plays which part, and what is computed from them.

    Attributes
    ----------
    roles : input names by part: ``a``, ``b``, ``a_scale``, ``b_scale`` of a product, ``x`` of a quantiser. Empty where
        faults have no operands to rewrite.
    shape : of the output of a product, of the values of a quantiser.
    parts : the scaled products that fill the output; empty for a quantiser.
    recipes : the recipes that a quantiser admits, its reference first; empty for a product.
    given : codes and scales are the inputs themselves, so that a doubled scale doubles every result.
    b_columns : ``b`` is given as ``[K, N]``.
    laid_out : operands lie otherwise than as ``a [..., M, K]``, ``b [..., N, K]`` and their scales, which only the
        contract itself knows (:attr:`Contract.laid_out`).
    groups : the input that says which rows belong to which group, or None; ``group_of_row`` when it has an entry for
        each row (else one for each group).
    row_unit : rows can only be left out in multiples of this.
    decoded : the weight ``[N, K]`` of a group as it is multiplied, where another form of it is stored; None elsewhere.
    """

    roles: Mapping[str, str]
    shape: tuple[int, ...]
    parts: Sequence[Part] = ()
    recipes: Sequence[Recipe] = ()
    given: bool = False
    b_columns: bool = False
    laid_out: bool = False
    groups: str | None = None
    group_of_row: bool = False
    row_unit: int = 1
    decoded: Callable[[int], Tensor] | None = None

    @property
    def by_row(self) -> bool:
        """Whether row ``i`` of ``a`` gives row ``i`` of the output, by weights that all rows share."""
        return self.groups is None and not self.laid_out

    @property
    def rows(self) -> int:
        """Rows of the output, flattened to a matrix."""
        return torch.Size(self.shape[:-1]).numel()

    def specified(self) -> Tensor | None:
        """Bool ``[rows]``: rows that some product fills, with NaN too; None when all are. Source: derived in
        :mod:`oracle.routines.records`."""
        if not self.parts or all(part.rows is None for part in self.parts):
            return None
        filled = torch.zeros(self.rows, dtype=torch.bool, device=self.parts[0].product.a.device)
        for part in self.parts:
            filled[part.place] = True
        return None if bool(filled.all()) else filled


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
