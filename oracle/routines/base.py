"""What a routine promises: its inputs, options and outputs, its truth, and which outputs are right.

A contract is a record of specifications and four verbs, from which everything else follows:

    outputs(call)                what the routine returns: shapes, dtypes, which elements are specified
    admissible(call, numerics)   the sets of right outputs, as alternatives of which one must hold the whole output
    kernel(call, faults)         a right kernel as named stages, of which faults replace some
    operands(call)               which input plays which part: what is multiplied, or quantised

:meth:`Contract.judge` is final: it checks the call and the output, then asks the alternatives in their order. What can
be wrong with a *call* is refused with one typed error that names the value and the way out; what can be wrong with a
*kernel* is a verdict. Nothing outside this room asks which class a contract is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, final

import torch
from torch import Tensor

from oracle.errors import (
    ContractError,
    DeviceError,
    DtypeError,
    InputError,
    LayoutError,
    NumericsError,
    OptionError,
    ShapeError,
    among,
)
from oracle.numbers.recipes import Recipe
from oracle.routines.traits import Kind, Trait
from oracle.tensorcore.identify import Match
from oracle.tensorcore.instructions import ALIKE
from oracle.tensorcore.schedules import Schedule
from oracle.verdict.compare import Verdict
from oracle.verdict.notebook import card
from oracle.verdict.plot import Picture, picture
from oracle.verdict.products import Part
from oracle.verdict.sets import Bounds, Sets, bounds_of, judge_alternatives

if TYPE_CHECKING:
    from oracle.routines.fault import Fault

E4M3 = (torch.float8_e4m3fn,)
FP8 = (*E4M3, torch.float8_e5m2)
F32 = (torch.float32,)
INTEGERS = (torch.int32, torch.int64)
Output = Tensor | Mapping[str, Tensor]
Inputs = Mapping[str, Tensor]
Options = Mapping[str, Any]
T = TypeVar("T")


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
    """One option: its default and, where they are few, the values it admits (``None``: any)."""

    name: str
    default: object
    choices: tuple[object, ...] | None
    doc: str


@dataclass(frozen=True)
class Out:
    """One output of a call: its shape, the dtypes that it may have, and which elements are specified (None: all).

    ``shape=None`` leaves the shape to the admissible sets of the contract.
    """

    shape: tuple[int, ...] | None
    dtypes: tuple[torch.dtype, ...]
    specified: Tensor | None = None


class Beyond(Enum):
    """What a mutant finds behind the end of a buffer, or in a region that it should have written."""

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

    @property
    def by_row(self) -> bool:
        """Whether row ``i`` of ``a`` gives row ``i`` of the output, by weights that all rows share."""
        return self.groups is None and not self.laid_out

    @property
    def rows(self) -> int:
        """Rows of the output, flattened to a matrix."""
        return torch.Size(self.shape[:-1]).numel()

    def specified(self) -> Tensor | None:
        """Bool ``[rows]``: rows that some product fills; None when all are."""
        if not self.parts or all(part.rows is None for part in self.parts):
            return None
        filled = torch.zeros(self.rows, dtype=torch.bool, device=self.parts[0].product.a.device)
        for part in self.parts:
            filled[part.place] = True
        return None if bool(filled.all()) else filled


@dataclass(frozen=True)
class Call:
    """One call of a contract: what it is given, and how the kernel in question computes.

    ``arch`` says whose arithmetic is admitted. ``schedule`` is the arithmetic of a right kernel that faults are put
    into; None stands for float32 arithmetic without error (the exact sum, rounded to float32, then stored).
    ``given`` are the caller's inputs where ``inputs`` are what the routine quantised them to.
    """

    contract: Contract
    inputs: Inputs
    options: Options = field(default_factory=dict)
    schedule: Schedule | None = None
    out_dtype: torch.dtype = torch.bfloat16
    beyond: Beyond = Beyond.WRAP
    given: Mapping[str, Tensor] | None = None
    arch: str = "sm90"

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """The options with their defaults; refuses a bad call (:meth:`Contract.check`)."""
        return self.contract.check(self.inputs, self.options)

    def with_schedule(self, schedule: Schedule | None) -> Call:
        """The same call by another arithmetic, with the operands that this one has decoded."""
        return self._with(schedule=schedule)

    def on(self, arch: str) -> Call:
        """The same call where the arithmetic of another arch is admitted, with the operands that this one has."""
        return self._with(arch=arch)

    def _with(self, **changed: Any) -> Call:
        call, known = replace(self, **changed), vars(self)
        vars(call).update({name: known[name] for name in ("resolved", "optional_operands") if name in known})
        return call

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook, and hypothesis for a failing example, shows."""
        given = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in self.inputs.items()]
        chosen = [f"{name}={value}" for name, value in self.options.items()]
        printer.text(f"Call of {self.contract.name}: {', '.join([*given, *chosen])}")

    def checked(self) -> Call:
        """This call, which is not refused."""
        _ = self.resolved
        return self

    def cached(self, key: str, make: Callable[[], T]) -> T:
        """What ``make`` gives, computed once for this call under a name of the contract's own."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    @cached_property
    def _made(self) -> dict[str, Any]:
        return {}

    @cached_property
    def truth(self) -> dict[str, Tensor]:
        """The outputs of the reference by name, computed once."""
        return by_name(self.contract.reference(self.inputs, **self.options))

    @cached_property
    def optional_operands(self) -> Operands | None:
        """The operands of a product or a quantiser; None for other contracts."""
        return self.contract.operands(self)

    @property
    def operands(self) -> Operands:
        """The operands of a product or a quantiser; NumericsError where the contract has neither."""
        if self.optional_operands is None:
            raise NumericsError(f"{self.contract.name} has no scaled product and no quantiser of its own")
        return self.optional_operands

    @property
    def parts(self) -> Sequence[Part]:
        """The products of the right kernel."""
        return self.operands.parts

    @property
    def recipe(self) -> Recipe:
        """The recipe of the right quantiser."""
        return self.operands.recipes[0]

    @property
    def rows(self) -> int:
        """Rows of the flattened output of a product."""
        return self.operands.rows


class Contract(ABC):
    """One routine of the suite. Subclasses are stateless; one instance is registered per name.

    Attributes
    ----------
    name, summary, source : what it is called, what it computes, where it is published.
    inputs, options : what a call takes.
    returns : names of the outputs.
    roles, b_columns, laid_out, groups : see :class:`Operands`; ``multiplies``: every call has scaled products.
    numerics : by arch, the names of the arithmetics that the routine's kernels use, the usual one first; empty where
        there is one right result and nothing to choose.
    probed : scale blocks along K (None: one) and rows of ``b`` that share a scale, where a kernel of the contract can
        be fingerprinted from calls of one shape.
    section : the heading under which coverage and the reference pages list the routine; ``also``: rows beside its own,
        as ``heading: name``, for promises that engines name by themselves.
    gpu : a GPU library computes it on an arch that captures are taken of, so that one is due.
    loses : its verdicts carry the loss of a quantisation.
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
    production: ClassVar[str] = ""
    also: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[frozenset[Trait]] = frozenset()

    @cached_property
    def all_traits(self) -> frozenset[Trait]:
        """The traits that its classes state."""
        return frozenset().union(*(vars(kind).get("traits", ()) for kind in type(self).__mro__))

    # --- the verbs ------------------------------------------------------------------------------------------

    @abstractmethod
    def reference(self, inputs: Inputs, **options: object) -> Tensor | dict[str, Tensor]:
        """The truth for checked inputs; see :func:`oracle.reference`."""

    def outputs(self, call: Call) -> dict[str, Out]:
        """What the routine returns for a checked call, by output name: by default the like of the reference's."""
        return {name: Out(tuple(x.shape), (x.dtype,)) for name, x in call.truth.items()}

    @abstractmethod
    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        """The alternatives for a checked call; an output is right when one of them holds all of it.

        The first is the declared or usual one, and a failure is reported against it.

        Raises NumericsError: ``numerics`` is unknown or cannot compute this call, or ``call.arch`` has no model.
        """

    def expected(self, call: Call) -> dict[str, Tensor]:
        """The outputs of the reference in the dtypes that a kernel returns; NaN where nothing is specified."""
        return call.truth

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        """The output of a right kernel into which ``faults`` were put.

        By default the right kernel is the reference, in ``call.out_dtype`` where the options leave the dtype open, with
        the stages READ, OPTIONS and WRITE.
        """
        from oracle.routines.fault import Stage, fold

        given = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        if "out_dtype" in options:
            options["out_dtype"] = call.out_dtype
        made: dict[str, Tensor] = fold(call, faults, Stage.WRITE, by_name(self.reference(given, **options)))
        return made

    def operands(self, call: Call) -> Operands | None:
        """The operands of a product or a quantiser, for a checked call; None where there are neither."""
        return None

    def matrices(self, call: Call, role: str, given: Tensor) -> list[Tensor]:
        """Views ``[rows, K]`` or ``[rows, blocks]`` of the operand ``given`` for ``role``, where it is laid out."""
        raise NotImplementedError

    def refused(self, call: Call, given: Inputs, right: Inputs) -> dict[str, Tensor] | None:
        """The elements of ``given`` that a judgement refuses, where fewer than those that differ from ``right``.

        None where they are the same."""
        return None

    # --- what follows from them -----------------------------------------------------------------------------

    @final
    def judge(
        self,
        inputs: Inputs,
        output: Output,
        *,
        arch: str = "sm90",
        numerics: str | None = None,
        **options: object,
    ) -> Verdict:
        """The verdict on ``output``; see :func:`oracle.judge`."""
        out = output.get("out") if isinstance(output, Mapping) else output
        dtype = out.dtype if isinstance(out, Tensor) else torch.bfloat16
        return self.judged(Call(self, inputs, options, out_dtype=dtype, arch=arch), output, numerics)

    @final
    def judged(self, call: Call, output: Output, numerics: str | None = None) -> Verdict:
        """The verdict on ``output`` of a call, in the dtype of the output, that may be asked of several outputs."""
        self.check_numerics(numerics)
        found = self.validate_output(call.checked(), output)
        return judge_alternatives(self.admissible(call, numerics), found)

    @final
    def bounds(
        self, inputs: Inputs, *, arch: str = "sm90", numerics: str | None = None, **options: object
    ) -> dict[str, Bounds]:
        """The bounds of every output; see :func:`oracle.interval`."""
        self.check_numerics(numerics)
        given = Call(self, inputs, options, arch=arch).checked()
        device = next(iter(inputs.values())).device
        out = self.outputs(given).get("out")
        dtype = torch.bfloat16 if out is None else out.dtypes[0]
        call = self._in_dtype(inputs, options, dtype, arch)
        sets = self.admissible(call, numerics)[0]
        if (found := sets.ranges(self.expected(call))) is None:
            raise NumericsError(f"{self.name}: right outputs are no interval for each element; judge() decides them")
        return {name: bounds_of(each, sets.numerics, device) for name, each in found.items()}

    @final
    def pictures(
        self,
        inputs: Inputs,
        output: Output,
        *,
        arch: str,
        numerics: str | None,
        passed: bool,
        **options: object,
    ) -> dict[str, Picture]:
        """Every output beside the admissible values that refused it or, where it ``passed``, that held it.

        Empty where they are no interval for each element, or hold it no longer."""
        given = {name: x.cpu() for name, x in by_name(output).items()}
        dtype = given["out"].dtype if "out" in given else torch.bfloat16
        call = self._in_dtype(inputs, options, dtype, arch)
        found, expected = self.validate_output(call, given), self.expected(call)
        for sets in (one for alternative in self.admissible(call, numerics) for one in alternative.each()):
            ranges = sets.ranges(expected) or {}
            made = {name: picture(found[name], due, expected[name], output=name) for name, due in ranges.items()}
            if not passed or (made and not any(one.failing for one in made.values())):
                return made
        return {}

    def _in_dtype(self, inputs: Inputs, options: Options, dtype: torch.dtype, arch: str) -> Call:
        """The checked call on the CPU, in this output dtype where the options leave it open."""
        given = {name: x.cpu() for name, x in inputs.items()}
        if self.check(given, options).get("out_dtype", dtype) is None:
            options = {**options, "out_dtype": dtype}
        return Call(self, given, options, out_dtype=dtype, arch=arch).checked()

    def check_numerics(self, numerics: str | None) -> None:
        """Refuse declared numerics where there are none to choose."""
        if numerics is not None and not self.takes_numerics:
            raise NumericsError(f"{self.name} has one numerics; pass none, not {numerics!r}")

    @property
    def takes_numerics(self) -> bool:
        """Whether a judgement can declare numerics."""
        return bool(self.numerics)

    def arithmetics(self, call: Call, numerics: str | None = None) -> tuple[str, ...]:
        """The admitted numerics of a checked call: the declared one, or all that ``call.arch`` has for it.

        The usual one is the first.

        Raises NumericsError: the declared one cannot compute this call, or the arch has no model of it.
        """
        if numerics is not None:
            if (reason := self.why_not(call, numerics)) is not None:
                raise NumericsError(reason)
            return (numerics,)
        table = self.numerics_of(call)
        arch = call.arch if call.arch in table else ALIKE.get(call.arch, call.arch)
        if arch not in table:
            known = ", ".join(table)
            raise NumericsError(
                f"{self.name} has no numerics model for arch {call.arch!r}; known: {known}; or declare numerics="
            )
        reasons = {name: self.why_not(call, name) for name in table[arch]}
        fitting = tuple(name for name, reason in reasons.items() if reason is None)
        if not fitting:
            raise NumericsError(
                f"no model of {call.arch} fits {self.name}: {'; '.join(filter(None, reasons.values()))}"
            )
        return fitting

    def numerics_of(self, call: Call) -> Mapping[str, tuple[str, ...]]:
        """``numerics`` where it depends on the call."""
        return self.numerics

    def why_not(self, call: Call, numerics: str) -> str | None:
        """The reason for which named numerics cannot compute a checked call, or None.

        Raises NumericsError: the name is unknown.
        """
        return None

    def validate_output(self, call: Call, output: Output) -> Mapping[str, Tensor]:
        """The outputs by name, for a checked call.

        Raises InputError, DtypeError, ShapeError, DeviceError, LayoutError: another set of outputs, or one that cannot
        be compared with what the call gives.
        """
        promised = self.outputs(call)
        if isinstance(output, Tensor):
            output = {"out": output}
        if not isinstance(output, Mapping) or set(output) != set(promised):
            have = ", ".join(map(str, output)) if isinstance(output, Mapping) else type(output).__name__
            hint = "; it has one output: pass the tensor or {'out': tensor}" if set(promised) == {"out"} else ""
            raise InputError(f"{self.name} returns {', '.join(promised)}; the output is {have or 'empty'}{hint}")
        device = next(iter(call.inputs.values())).device
        for name, due in promised.items():
            check_output(output[name], name=name, shape=due.shape, dtypes=due.dtypes, device=device)
        return output

    def predict(self, inputs: Inputs, *, numerics: str | None, **options: object) -> Tensor | dict[str, Tensor]:
        """The exact bits under named numerics; see :func:`oracle.predict`."""
        raise NumericsError(f"{self.name} has one right result and no numerics to choose; reference() gives its bits")

    def by_schedule(self, call: Call, schedule: Schedule, numerics: str) -> dict[str, Tensor]:
        """The outputs of a checked call by a schedule, registered or not.

        What is no product follows the named ``numerics``. Elements that nothing specifies hold anything.

        Raises NumericsError: the schedule cannot compute the call, or no schedule alone gives the outputs.
        """
        raise NumericsError(f"no schedule alone gives the bits of {self.name}; compare the products inside it")

    def identify(self, inputs: Inputs, output: Output, *, arch: str | None, **options: object) -> list[Match]:
        """Known arithmetic ranked by equal bits; see :func:`oracle.identify`."""
        raise NumericsError(f"{self.name} has one right result and no numerics to identify; judge() compares with it")

    def __repr__(self) -> str:
        return f"<{self.name}({', '.join(spec.name for spec in self.inputs)}) -> {', '.join(self.returns)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        takes = ", ".join(f"{spec.name}{' (optional)' if spec.optional else ''}" for spec in self.inputs)
        options = ", ".join(spec.name for spec in self.options)
        rows = (("inputs", takes), ("options", options), ("returns", ", ".join(self.returns)), ("source", self.source))
        return card(self.name, self.summary, rows)

    # --- checking a call ------------------------------------------------------------------------------------

    def check(self, inputs: Inputs, options: Options) -> dict[str, Any]:
        """Refuse a bad call; return the options with their defaults filled in.

        Raises InputError, DtypeError, ShapeError, LayoutError, DeviceError, OptionError.
        """
        resolved = self._check_options(options)
        self._check_names(inputs)
        for spec in self.inputs:
            if spec.name in inputs:
                _check_tensor(spec, inputs[spec.name])
        devices = {name: str(t.device) for name, t in inputs.items()}
        if len(set(devices.values())) > 1:
            raise DeviceError(
                f"{self.name}: inputs lie on different devices ({devices}); move them to one with .to(device)"
            )
        for kind in reversed(type(self).__mro__):
            if issubclass(kind, Contract) and "refuse" in vars(kind):
                kind.refuse(self, inputs, resolved)
        return resolved

    def refuse(self, inputs: Inputs, options: Options) -> None:
        """Refuse a call whose tensors and options are right one by one: here, for extents that differ.

        Every class of a contract may have its own, which calls no other: bases first, with the options and defaults.
        """
        self.extents(inputs)

    def extents(self, inputs: Inputs) -> dict[str, int]:
        """Bind the symbols of the specs (``M``, ``N``, ``K``...) and check every dim against them."""
        bound: dict[str, int] = {}
        present = [s for s in self.inputs if s.name in inputs and s.dims is not None]
        for spec in present:
            for axis, dim in enumerate(spec.dims or ()):
                if dim.isidentifier():
                    extent = inputs[spec.name].shape[axis]
                    if bound.setdefault(dim, extent) != extent:
                        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in inputs.items())
                        raise ShapeError(
                            f"{spec.name} has {dim}={extent} in axis {axis}, but {dim}={bound[dim]} elsewhere; "
                            f"shapes: {shapes}"
                        )
        for spec in present:
            for axis, dim in enumerate(spec.dims or ()):
                extent = inputs[spec.name].shape[axis]
                admitted = [_evaluate(alternative, bound) for alternative in dim.split("|")]
                if extent not in admitted:
                    due, known = " or ".join(map(str, admitted)), ", ".join(f"{k}={v}" for k, v in bound.items())
                    raise ShapeError(
                        f"{spec.name} has extent {extent} in axis {axis}, but {dim} = {due} for {known}; "
                        f"pass {spec.name} [{', '.join(spec.dims or ())}]"
                    )
        return bound

    def _check_options(self, options: Options) -> dict[str, Any]:
        known = {spec.name: spec for spec in self.options}
        for name, value in options.items():
            if name not in known:
                raise OptionError(f"{self.name} has no option {name!r}; {among(name, known)}")
            if isinstance(value, Tensor):  # whose values, and so its words, may be gone
                raise OptionError(f"{self.name}: {name} is a {type(value).__name__}; an option is a plain value")
            choices = known[name].choices
            try:
                admitted = choices is None or value in choices
            except (TypeError, ValueError, RuntimeError):  # an array or a tensor has no one truth value
                admitted = False
            if choices is not None and not admitted:
                raise OptionError(f"{self.name}: {name}={quoted(value)} is not one of {', '.join(map(repr, choices))}")
        return {name: options.get(name, spec.default) for name, spec in known.items()}

    def _check_names(self, inputs: Inputs) -> None:
        known = [spec.name for spec in self.inputs]
        missing = [s.name for s in self.inputs if not s.optional and s.name not in inputs]
        unexpected = [str(name) for name in inputs if name not in known]
        if missing or unexpected:
            what = f"missing {', '.join(missing)}" if missing else f"unexpected {', '.join(unexpected)}"
            raise InputError(f"{self.name}: {what}; it takes {', '.join(known)}")


_REGISTRY: dict[str, Contract] = {}


def register(contract: type[Contract]) -> type[Contract]:
    """Class decorator: make the contract known under its name."""
    known = type(_REGISTRY.get(contract.name, contract()))
    # a module that is loaded again registers its contracts again
    if (known.__module__, known.__qualname__) != (contract.__module__, contract.__qualname__):
        raise ContractError(f"contract {contract.name!r} of {contract.__module__} is registered by {known.__module__}")
    _REGISTRY[contract.name] = contract()
    return contract


def registered() -> Mapping[str, Contract]:
    return dict(sorted(_REGISTRY.items()))


def get(name: str) -> Contract:
    """The contract of this name; ContractError lists what exists."""
    if not isinstance(name, str):
        raise ContractError(f"a contract is given by its name (see contracts()); this is a {type(name).__name__}")
    if name not in _REGISTRY:
        raise ContractError(f"no contract {name!r}; {among(name, sorted(_REGISTRY), see='fp8-oracle list contracts')}")
    return _REGISTRY[name]


def check_output(
    output: Tensor, *, name: str, shape: tuple[int, ...] | None, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Refuse an output that cannot be judged at all: wrong kind, dtype, shape or device."""
    _check_memory(name, output)
    if output.dtype not in dtypes:
        raise DtypeError(f"{name} has dtype {output.dtype}; expected {' or '.join(map(str, dtypes))}")
    if shape is not None and tuple(output.shape) != shape:
        raise ShapeError(f"{name} has shape {list(output.shape)}; these inputs give {list(shape)}")
    if output.device != device:
        raise DeviceError(f"{name} lies on {output.device}, the inputs on {device}; move one with .to(device)")


def by_name(output: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs by name; a lone tensor is ``out``."""
    return {"out": output} if isinstance(output, Tensor) else dict(output)


def positive(options: Options, name: str) -> int:
    """The value of an option that must be a positive integer; OptionError else."""
    value = options[name]
    if not is_positive(value):
        raise OptionError(f"{name}={quoted(value)} is not a positive integer")
    assert isinstance(value, int)
    return value


def quoted(value: object) -> str:
    """A value in a message; of anything but numbers, texts and lists of them its class: it may hold freed memory."""
    parts = value if isinstance(value, (list, tuple)) else (value,)
    plain = all(isinstance(part, (int, float, str, torch.dtype, type(None))) for part in parts)
    return f"{value!r:.80}" if plain else f"a {type(value).__name__}"


def is_positive(value: object) -> bool:
    """Whether a value is an integer above 0 (``True`` is none)."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def plain(tensor: Tensor, name: str) -> Tensor:
    """The same values as a plain tensor: no gradient, no subclass, no negation or conjugation that is still pending.

    Raises InputError: the tensor is of a subclass without memory of its own (a fake or a distributed one), or its
    memory is gone. DtypeError: it is one of torch's quantised tensors.
    """
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise InputError(f"{name} is a {type(tensor).__name__}, which has no values of its own; pass a plain tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        return tensor  # refused by the contract, under its name there
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.device.type != "meta":
            _check_storage(name, tensor)
        if tensor.is_neg() and tensor.element_size() == 1:
            raise LayoutError(f"{name} is {tensor.dtype} yet to be negated, which torch cannot do; pass its own codes")
        return tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()


def _check_storage(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose memory was freed or cut, which torch would read all the same."""
    if tensor.is_quantized:
        raise DtypeError(f"{name} is quantised by torch ({tensor.dtype}); pass its codes and its scale")
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    needs, has = (last + 1) * tensor.element_size() if tensor.numel() else 0, tensor.untyped_storage().nbytes()
    if has < needs:
        raise InputError(f"{name} needs {needs} bytes of memory and its storage has {has}; it was freed or resized")


def _check_memory(name: str, tensor: Tensor) -> None:
    """Refuse what has no bits to look at as they stand."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise LayoutError(f"{name} is {'nested' if tensor.is_nested else tensor.layout}; pass a dense tensor")
    if tensor.is_neg() or tensor.is_conj():
        raise LayoutError(f"{name} is a view that is yet to be negated or conjugated; pass {name}.resolve_neg()")


def _check_tensor(spec: TensorSpec, tensor: Tensor) -> None:
    _check_memory(spec.name, tensor)
    if tensor.device.type == "meta":
        raise LayoutError(f"{spec.name} is on {tensor.device}; pass a dense tensor with data")
    if tensor.dtype not in spec.dtypes:
        raise DtypeError(f"{spec.name} has dtype {tensor.dtype}; expected {' or '.join(map(str, spec.dtypes))}")
    if spec.dims is not None and tensor.dim() != len(spec.dims):
        raise ShapeError(
            f"{spec.name} has rank {tensor.dim()} (shape {list(tensor.shape)}); expected [{', '.join(spec.dims)}]"
        )
    if tensor.numel() == 0:
        raise ShapeError(f"{spec.name} is empty (shape {list(tensor.shape)}); there is nothing to judge")
    if spec.contiguous and not tensor.is_contiguous():
        raise LayoutError(
            f"{spec.name} is not contiguous (strides {tensor.stride()}); the oracle takes logical values, "
            f"pass {spec.name}.contiguous()"
        )


def _evaluate(dim: str, bound: Mapping[str, int]) -> int:
    if dim.isdigit():
        return int(dim)
    symbol, _, divisor = dim.partition("/")
    value = bound[symbol]
    return -(-value // int(divisor)) if divisor else value
