"""The record of one case, and the grammar that the ids of one contract follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oracle.routines import data

DTYPES: Mapping[str, torch.dtype] = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
}
BLOCK = 128


@dataclass(frozen=True)
class Grammar:
    """What the ids of one contract may say, how its inputs are made, and which options the call gets.

    ``extents`` are the names of the extents in printing order; ``options`` the admitted values of each option.
    """

    extents: tuple[str, ...]
    dtypes: tuple[str, ...]
    schemes: tuple[str, ...]
    families: tuple[str, ...]
    build: Callable[[Case], dict[str, Tensor]]
    call: Callable[[Case], dict[str, object]]
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A parsed case id; ``str(case)`` is the canonical id and ``parse(str(case)) == case``."""

    contract: str
    dtypes: str
    scheme: str
    extents: tuple[tuple[str, int], ...]
    family: str
    seed: int
    options: tuple[tuple[str, str], ...]
    grammar: Grammar = field(compare=False, repr=False)

    def __str__(self) -> str:
        parts = [self.contract, self.dtypes, self.scheme, _pairs(self.extents)]
        if self.options:
            parts.append(_pairs(self.options))
        return "/".join([*parts, f"family={self.family}", f"seed={self.seed}"])

    def __getitem__(self, extent: str) -> int:
        return dict(self.extents)[extent]

    def option(self, name: str) -> str | None:
        """The value of an option as it stands in the id, or None."""
        return dict(self.options).get(name)

    def label(self, tensor: str) -> str:
        """The stream label of one tensor of the case."""
        return f"{self}#{tensor}"

    def stream(self, tensor: str) -> data.Stream:
        """The stream of one tensor of the case."""
        return data.Stream(self.label(tensor))

    @property
    def operand_dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(DTYPES[name] for name in self.dtypes.partition("-")[0].split("x"))

    @property
    def out_dtype(self) -> torch.dtype:
        return DTYPES[self.dtypes.partition("-")[2]]

    @property
    def granularity(self) -> tuple[str, ...]:
        return tuple(self.scheme.split(":"))

    def inputs(self) -> dict[str, Tensor]:
        """The named inputs of the contract, on the CPU, in logical shapes."""
        return self.grammar.build(self)

    def call_options(self) -> dict[str, object]:
        """The options to call the contract and the subject with."""
        return self.grammar.call(self)


def no_options(case: Case) -> dict[str, object]:
    """The call has no options."""
    return {}


def out_dtype(case: Case) -> dict[str, object]:
    """The call names its output dtype, the one after the dash."""
    return {"out_dtype": case.out_dtype}


def _pairs(items: tuple[tuple[str, int], ...] | tuple[tuple[str, str], ...]) -> str:
    return ",".join(f"{key}={value}" for key, value in items)
