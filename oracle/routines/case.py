"""The record of one case, and the grammar that the ids of one contract follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from oracle.numbers.scaling import E4M3_TENSOR, Scaling
from oracle.routines import base, changes, data

DTYPES: Mapping[str, torch.dtype] = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "i4": torch.int8,
    "i8": torch.int8,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}
MATRICES = ("m=128,k=128", "m=256,k=256", "m=512,k=64")
TABLE_ROWS = ("r=1", "r=64", "r=500")
# Contracts with these extents take any of the ones named; the rest comes from a listed case.
FREE = {
    ("m", "n", "k"): ("m", "n", "k"),
    ("m", "n", "k", "g"): ("m", "n", "k"),
    ("m", "k"): ("m", "k"),
    ("m", "i"): ("m", "i"),
    ("m", "h"): ("m", "h"),
    ("e", "t", "i"): ("t", "i"),
    ("e", "t", "k"): ("t", "k"),
    ("t", "h", "d", "n"): ("t", "h"),
    ("m", "n", "h", "d"): ("m", "n"),
    ("b", "t", "n", "h", "d"): ("n",),
    ("b", "s", "n", "h", "g", "d", "v"): ("s", "n"),
    ("m", "n", "h", "g", "d"): ("m", "n"),
    ("t", "e", "h", "i", "k"): ("t", "h", "i"),
    ("t", "g", "e", "h", "i"): ("t", "h", "i"),
    ("t", "e", "k"): ("t",),
    ("m", "c", "g"): ("m", "c"),
    ("m", "k", "g"): ("m", "k"),
    ("r",): ("r",),
}


@dataclass(frozen=True)
class Grammar:
    """What the ids of one contract may say, how its inputs are made, and which cases a profile has.

    Attributes
    ----------
    extents : names of the extents in printing order.
    dtypes, schemes, families : what the parts of an id may be, the usual one first.
    build : the inputs of a case.
    call : the options of its call.
    options : admitted values of each option of an id.
    listed : ids of a profile (``quick`` or ``full``), from the contract's name, its grammar and the profile; None lists
        every one of ``shapes`` with every single option and family.
    shapes : extents of the listed ids, where ``listed`` reads them.
    fixed : extents are those of the listed ids only; no others are drawn.
    kept : extents that no random variant of a case changes: the size of a group must divide them.
    domain : conditions on the extents that the routine documents beside what its contract checks
        (:mod:`oracle.routines.domain`); no case beside the listed ones leaves it.
    edge_families : families of :data:`oracle.routines.data.EDGE_FAMILIES` that :mod:`oracle.routines.corners` takes.
    extra : further ids, without the contract's name, on which faults show that the profile's data hide.
    corners : small ids, without the contract's name, that an export for vendors adds to the stored goldens: on them the
        faults of an index or of a movement show that live in shapes (a tail of K, a last block of N, a second tile of
        M, a square matrix of scales).
    also_dtypes, also_schemes : what further ids may say, which no profile lists; cases are drawn of them.
    extra_options : options that a fault needs and no id carries; tried on every case that admits them.
    """

    extents: tuple[str, ...]
    dtypes: tuple[str, ...]
    schemes: tuple[str, ...]
    families: tuple[str, ...]
    build: Callable[[Case], dict[str, Tensor]]
    call: Callable[[Case], dict[str, object]]
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    listed: Listed | None = None
    shapes: tuple[str, ...] = ()
    fixed: bool = False
    kept: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    corners: tuple[str, ...] = ()
    extra_options: tuple[Mapping[str, object], ...] = ()
    edge_families: tuple[str, ...] = ()
    domain: str = ""
    also_dtypes: tuple[str, ...] = ()
    also_schemes: tuple[str, ...] = ()

    @property
    def free(self) -> tuple[str, ...]:
        """The extents that may be drawn independently of the others; the rest is taken from listed ids."""
        return () if self.fixed else FREE.get(self.extents, ())

    def ids(self, contract: str, profile: str) -> Iterable[str]:
        """The ids of a profile, ``quick`` or ``full``."""
        return (self.listed or every_shape)(contract, self, profile)


Listed = Callable[[str, Grammar, str], Iterable[str]]


def every_shape(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """Every listed shape with every single option and family."""
    options = ["", *(f"{key}={value}/" for key, values in grammar.options.items() for value in values)]
    head = f"{contract}/{grammar.dtypes[0]}/{grammar.schemes[0]}"
    for shape in grammar.shapes:
        for option in options:
            for family in grammar.families:
                for seed in seeds(profile):
                    yield f"{head}/{shape}/{option}family={family}/seed={seed}"


def with_corners(grammars: Mapping[str, Grammar], extents: Mapping[str, Sequence[str]]) -> dict[str, Grammar]:
    """The grammars with :attr:`Grammar.corners` on ordinary data, from their ``extents``, as ``m=9,n=144,k=144``.

    ``scheme/m=...`` names another scheme than the first; options may follow the extents.
    """

    def corner(grammar: Grammar, text: str) -> str:
        named = "=" not in text.partition("/")[0]
        return f"{grammar.dtypes[0]}/{text if named else f'{grammar.schemes[0]}/{text}'}/family=randn/seed=7"

    return {
        name: replace(grammar, corners=tuple(corner(grammar, text) for text in extents.get(name, ())))
        for name, grammar in grammars.items()
    }


def seeds(profile: str) -> tuple[int, ...]:
    """The seeds of a profile's families."""
    return (1, 2, 3) if profile == "full" else (1,)


READY, KEPT = "_ready", 1 << 21  # bytes of inputs that a case may wait with


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
    changes: changes.Changes = ()

    def __str__(self) -> str:
        parts = [self.contract, self.dtypes, self.scheme, _pairs(self.extents)]
        if self.options:
            parts.append(_pairs(self.options))
        if self.changes:
            parts.append(",".join(f"{name}:{value}" for name, value in self.changes))
        return "/".join([*parts, f"family={self.family}", f"seed={self.seed}"])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook, and hypothesis for a failing example, shows."""
        printer.text(f"cases.parse({str(self)!r})")

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
        """The dtypes before the dash of the id."""
        return tuple(DTYPES[name] for name in self.dtypes.partition("-")[0].split("x"))

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype after the dash of the id."""
        return DTYPES[self.dtypes.partition("-")[2]]

    @property
    def granularity(self) -> tuple[str, ...]:
        """The parts of the scheme, one for each operand: ``("1x128", "128x128")``."""
        return tuple(self.scheme.split(":"))

    def scaling(self, part: int = 0) -> Scaling:
        """How the scales of an operand lie (the first of the scheme, or another)."""
        return E4M3_TENSOR.named(self.granularity[part])

    def inputs(self) -> dict[str, Tensor]:
        """The named inputs of the contract, on the CPU, in logical shapes; no call gives tensors of an earlier one."""
        if (ready := vars(self).pop(READY, None)) is not None:
            return dict(ready)
        if not self.changes:
            return self.grammar.build(self)
        tensors = self.grammar.build(replace(self, changes=()))
        return changes.changed(base.get(self.contract), tensors, self.call_options(), self.changes, str(self))

    def prepare(self, inputs: dict[str, Tensor]) -> None:
        """Give the next :meth:`inputs` of this object these, which are its own: drawing them took longer than a call.
        Large ones are not kept (:data:`KEPT`)."""
        if sum(x.nbytes for x in inputs.values()) <= KEPT:
            vars(self)[READY] = inputs

    def call(self, kernel: Callable[..., Any]) -> Any:
        """What ``kernel`` returns for this case: it is called with new inputs and every option, by name."""
        return kernel(**self.inputs(), **self.call_options())

    @property
    def changed(self) -> tuple[str, ...]:
        """The inputs and options that differ from those of the case without changes."""
        return tuple(dict.fromkeys(name for name, _ in self.changes))

    @property
    def leaves_out(self) -> bool:
        """Whether an option of the case without changes is left to its default."""
        return any(value == str(None) for _, value in self.changes)

    @property
    def pitches(self) -> dict[str, int]:
        """Elements behind each row of the inputs that are views of memory with longer rows."""
        return {name: changes.BEHIND for name, value in self.changes if value == changes.PITCH}

    def call_options(self) -> dict[str, object]:
        """The options to call the contract and the subject with."""
        if not self.changes:
            return self.grammar.call(self)
        options = self.grammar.call(replace(self, changes=()))
        return changes.changed_options(base.get(self.contract), options, self.changes)


STATIC_GAIN = 16.0  # brings a stream's scales (around 2**-8) to where ordinary values fill the range of E4M3


def given_scale(case: Case, name: str) -> Tensor:
    """A static scale of ordinary values, ``[1]`` float32, never NaN. Source: derived in :mod:`oracle.routines.data`."""
    return data.scales(case.label(name), "randn", (1,)) * STATIC_GAIN


def no_options(case: Case) -> dict[str, object]:
    """The call has no options."""
    return {}


def out_dtype(case: Case) -> dict[str, object]:
    """The call names its output dtype, the one after the dash."""
    return {"out_dtype": case.out_dtype}


def _pairs(items: tuple[tuple[str, int], ...] | tuple[tuple[str, str], ...]) -> str:
    return ",".join(f"{key}={value}" for key, value in items)
