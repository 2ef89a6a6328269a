"""What a routine promises: its outputs, its truth, and which outputs are right; a call of it, and a fault in a call.

A contract is a record of specifications and four verbs, from which everything else follows:

    outputs(call)                what the routine returns: shapes, dtypes, which elements are specified
    admissible(call, numerics)   the sets of right outputs, as alternatives of which one must hold the whole output
    kernel(call, faults)         a right kernel as named stages, of which faults replace some
    operands(call)               which input plays which part: what is multiplied, or quantised

:meth:`Contract.judge` is final: it checks the call and the output, then asks the alternatives in their order. What can
be wrong with a *call* is refused with one typed error that names the value and the way out; what can be wrong with a
*kernel* is a verdict. Nothing outside this room asks which class a contract is.

A :class:`Call` names its contract, a contract's kernel takes :class:`Fault` records, and a fault changes the values of
a call: the three stand in one file. What they consist of stands in :mod:`oracle.routines.records`, what a contract
states of itself in :mod:`oracle.routines.traits`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from oracle.errors import ContractError, DeviceError, InputError, NumericsError, OptionError, ShapeError, among
from oracle.numbers.recipes import Recipe
from oracle.routines.checks import check_output as check_output
from oracle.routines.checks import check_tensor, quoted
from oracle.routines.checks import is_positive as is_positive
from oracle.routines.checks import plain as plain
from oracle.routines.checks import positive as positive
from oracle.routines.records import Beyond as Beyond
from oracle.routines.records import Family as Family
from oracle.routines.records import Operands as Operands
from oracle.routines.records import Out as Out
from oracle.routines.records import Stage as Stage
from oracle.routines.traits import OptionSpec as OptionSpec
from oracle.routines.traits import Stated, Trait
from oracle.routines.traits import TensorSpec as TensorSpec
from oracle.tensorcore.identify import Match
from oracle.tensorcore.instructions import ALIKE
from oracle.tensorcore.schedules import Schedule
from oracle.verdict.compare import Verdict
from oracle.verdict.notebook import card
from oracle.verdict.plot import Picture, picture
from oracle.verdict.products import Part
from oracle.verdict.sets import Bounds, Sets, alternatives_hold, bounds_of, judge_alternatives

E4M3 = (torch.float8_e4m3fn,)
FP8 = (*E4M3, torch.float8_e5m2)
F32 = (torch.float32,)
INTEGERS = (torch.int32, torch.int64)
Output = Tensor | Mapping[str, Tensor]
Inputs = Mapping[str, Tensor]
Options = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call of a contract: what it is given, and how the kernel in question computes.

    ``arch`` says whose arithmetic is admitted. ``schedule`` is the arithmetic of a right kernel that faults are put
    into; None stands for float32 arithmetic without error (the exact sum, rounded to float32, then stored).
    ``given`` are the caller's inputs where ``inputs`` are what the routine quantised them to. ``only``: the numbers of
    the products that are looked at, where not all are.
    """

    contract: Contract
    inputs: Inputs
    options: Options = field(default_factory=dict)
    schedule: Schedule | None = None
    out_dtype: torch.dtype = torch.bfloat16
    beyond: Beyond = Beyond.WRAP
    given: Mapping[str, Tensor] | None = None
    arch: str = "sm90"
    only: tuple[int, ...] | None = None

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

    def in_search(self, inputs: Inputs, out_dtype: torch.dtype) -> Call:
        """The same call as the search for faults takes it.

        Of ``inputs``, what the routine quantised its own to, in this output dtype; what lies beyond a buffer is
        unknown."""
        changed: dict[str, Any] = {"out_dtype": out_dtype, "beyond": Beyond.UNKNOWN, "given": self.inputs}
        return self._with(**changed) if inputs is self.inputs else replace(self, inputs=inputs, **changed)

    def with_only(self, only: Sequence[int]) -> Call:
        """The same call of which some products alone are looked at, by their numbers in :attr:`parts`."""
        return self._with(only=tuple(only))

    def _with(self, **changed: Any) -> Call:
        call, known = replace(self, **changed), vars(self)
        vars(call).update({name: known[name] for name in ("resolved", "optional_operands") if name in known})
        return call

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook, and hypothesis for a failing example, shows."""
        shown = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in self.inputs.items()]
        chosen = [f"{name}={value}" for name, value in self.options.items()]
        printer.text(f"Call of {self.contract.name}: {', '.join([*shown, *chosen])}")

    def checked(self) -> Call:
        """This call, which is not refused."""
        _ = self.resolved
        return self

    def cached(self, key: str, make: Callable[[], T]) -> T:
        """What ``make`` gives, computed once for this call under a name of the contract's own."""
        if key not in self._made:
            self._made[key] = make()
        value: T = self._made[key]
        return value

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
        """The products of the right kernel that are looked at."""
        parts = self.operands.parts
        return parts if self.only is None else [parts[i] for i in self.only if i < len(parts)]

    @property
    def recipe(self) -> Recipe:
        """The recipe of the right quantiser."""
        return self.operands.recipes[0]

    @property
    def rows(self) -> int:
        """Rows of the flattened output of a product."""
        return self.operands.rows


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
    seen : the source: an issue or a pull request, or the run that measured it; where there is none, "no public thread:"
        and the mechanism.
    changes : the mutation, by stage.
    on : the trait of the contracts that it applies to.
    needs : the reason for which a given call cannot show it, or None; see :func:`need` and :func:`both`.
    same_if : the argument for which a mutant may give the right bits ("" if there is none).
    admissible_if : the argument for which its wrong bits may be admissible ("" if there is none).
    race : whether it is the order of two stores, so that any subset of the changed elements may be right.
    by_code : whether it changes the codes of a product's operands one by one, and nothing else: put into some rows and
        columns of a product, it gives these rows and columns of what it gives of the whole.
    """

    name: str
    family: Family
    seen: str
    changes: Mapping[Stage, Change]
    on: Trait
    needs: WhyNot = always
    same_if: str = ""
    admissible_if: str = ""
    race: bool = False
    by_code: bool = False

    @property
    def contracts(self) -> frozenset[str]:
        """Names of the registered contracts that it applies to."""
        return frozenset(name for name, contract in registered().items() if self.on.holds(contract))

    def applies(self, call: Call) -> str | None:
        """Why this fault cannot be put into ``call``, or None when it can."""
        if not self.on.holds(call.contract):
            return f"{self.name}: not a fault of {call.contract.name}"
        return self.needs(call)


class Contract(Stated, ABC):
    """One routine of the suite: what it states (:class:`oracle.routines.traits.Stated`), and its verbs.

    Subclasses are stateless; one instance is registered for each name.
    """

    # --- the verbs ------------------------------------------------------------------------------------------

    @abstractmethod
    def reference(self, inputs: Inputs, **options: object) -> Tensor | dict[str, Tensor]:
        """The truth for checked inputs; see :func:`oracle.reference`.

        Returns the output, or the outputs by name, in their shape and dtype (:meth:`outputs`). NaN and infinity in the
        inputs follow the formula; an element that the routine leaves open is NaN. Source: :attr:`source`.
        """

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
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        if "out_dtype" in options:
            options["out_dtype"] = call.out_dtype
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, by_name(self.reference(inputs, **options)))
        return outputs

    def operands(self, call: Call) -> Operands | None:
        """The operands of a product or a quantiser, for a checked call; None where there are neither."""
        return None

    def matrices(self, call: Call, role: str, tensor: Tensor) -> list[Tensor]:
        """Views ``[rows, K]`` or ``[rows, blocks]`` of the operand ``tensor`` for ``role``, where it is laid out.

        ``tensor`` may have any shape and dtype. Returns views of its dtype; no values are read. Source: :attr:`source`.
        """
        raise NotImplementedError

    def refused(self, call: Call, outputs: Inputs, right: Inputs) -> dict[str, Tensor] | None:
        """The inadmissible elements of ``outputs`` as masks, if they are fewer than those that differ from ``right``.

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
        return self.judged(self.asked(inputs, output, arch=arch, **options), output, numerics)

    @final
    def asked(self, inputs: Inputs, output: Output, *, arch: str = "sm90", **options: object) -> Call:
        """The call that :meth:`judge` makes, in the dtype of the output, for who asks more of it than a verdict."""
        out = output.get("out") if isinstance(output, Mapping) else output
        dtype = out.dtype if isinstance(out, Tensor) else torch.bfloat16
        return Call(self, inputs, options, out_dtype=dtype, arch=arch)

    @final
    def judged(self, call: Call, output: Output, numerics: str | None = None) -> Verdict:
        """The verdict on ``output`` of a call, in the dtype of the output, that may be asked of several outputs."""
        self.check_numerics(numerics)
        outputs = self.validate_output(call.checked(), output)
        return judge_alternatives(self.admissible(call, numerics), outputs)

    @final
    def accepting(self, call: Call, numerics: str | None = None) -> Callable[[Output], bool]:
        """Whether an output of a call is admissible by intervals, as a function; see :func:`oracle.gate`."""
        self.check_numerics(numerics)
        checked, alternatives = call.checked(), self.admissible(call, numerics)
        return lambda output: alternatives_hold(alternatives, self.validate_output(checked, output))

    @final
    def bounds(
        self, inputs: Inputs, *, arch: str = "sm90", numerics: str | None = None, **options: object
    ) -> dict[str, Bounds]:
        """The bounds of every output; see :func:`oracle.interval`."""
        self.check_numerics(numerics)
        checked = Call(self, inputs, options, arch=arch).checked()
        device = next(iter(inputs.values())).device
        out = self.outputs(checked).get("out")
        dtype = torch.bfloat16 if out is None else out.dtypes[0]
        call = self._in_dtype(inputs, options, dtype, arch)
        sets = self.admissible(call, numerics)[0]
        if (ranges := sets.ranges(self.expected(call))) is None:
            raise NumericsError(f"{self.name}: right outputs are no interval for each element; judge() decides them")
        return {name: bounds_of(each, sets.numerics, device) for name, each in ranges.items()}

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
        on_cpu = {name: x.cpu() for name, x in by_name(output).items()}
        dtype = on_cpu["out"].dtype if "out" in on_cpu else torch.bfloat16
        call = self._in_dtype(inputs, options, dtype, arch)
        outputs, expected = self.validate_output(call, on_cpu), self.expected(call)
        for sets in (one for alternative in self.admissible(call, numerics) for one in alternative.each()):
            ranges = sets.ranges(expected) or {}
            drawn = {name: picture(outputs[name], due, expected[name], output=name) for name, due in ranges.items()}
            if not passed or (drawn and not any(one.failing for one in drawn.values())):
                return drawn
        return {}

    def _in_dtype(self, inputs: Inputs, options: Options, dtype: torch.dtype, arch: str) -> Call:
        """The checked call on the CPU, in this output dtype where the options leave it open."""
        on_cpu = {name: x.cpu() for name, x in inputs.items()}
        if self.check(on_cpu, options).get("out_dtype", dtype) is None:
            options = {**options, "out_dtype": dtype}
        return Call(self, on_cpu, options, out_dtype=dtype, arch=arch).checked()

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
        """The outputs by name, for a checked call; an optional one that was not returned is the reference's.

        Raises InputError, DtypeError, ShapeError, DeviceError, LayoutError: another set of outputs, or one that cannot
        be compared with what the call gives.
        """
        promised = self.outputs(call)
        if isinstance(output, Tensor):
            output = {"out": output}
        optional = {name for name, due in promised.items() if due.optional}
        if not isinstance(output, Mapping) or not set(promised) - optional <= set(output) <= set(promised):
            have = ", ".join(map(str, output)) if isinstance(output, Mapping) else type(output).__name__
            hint = "; it has one output: pass the tensor or {'out': tensor}" if set(promised) == {"out"} else ""
            raise InputError(f"{self.name} returns {', '.join(promised)}; the output is {have or 'empty'}{hint}")
        device = next(iter(call.inputs.values())).device
        for name, due in promised.items():
            if name in output:
                check_output(output[name], name=name, shape=due.shape, dtypes=due.dtypes, device=device)
        absent = {name: self.expected(call)[name].to(device) for name in promised if name not in output}
        return {**output, **absent} if absent else output

    def in_order(self, call: Call, name: str, x: Tensor) -> Tensor:
        """An output ``x``, or a bool of its shape, by rows and columns, each element once.

        Only an output of this ``name`` whose memory has another order, or holds things twice, differs from ``x``.
        Source: :attr:`source`."""
        return x

    def paged(self, name: str) -> bool:
        """Whether the first axis of the output of this ``name`` holds pages or slots, whose order says nothing."""
        return False

    def predict(self, inputs: Inputs, *, numerics: str | None, **options: object) -> Tensor | dict[str, Tensor]:
        """The exact bits under named numerics; see :func:`oracle.predict`.

        Returns the output, or the outputs by name, in their shape and dtype (:meth:`outputs`). NaN is any NaN of the
        dtype. Source: the schedule of that name. Raises NumericsError: there is one right result.
        """
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
                check_tensor(spec, inputs[spec.name])
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
                # True is no number: it equals 1, and a contract would read it as another word
                admitted = choices is None or any(
                    value == one and (not isinstance(value, bool) or isinstance(one, bool)) for one in choices
                )
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


def fold(call: Call, faults: tuple[Fault, ...], stage: Stage, value: Any) -> Any:
    """``value`` after the changes of this stage."""
    for fault in faults:
        if stage in fault.changes:
            value = fault.changes[stage](call, value)
    return value


def touches(faults: tuple[Fault, ...], *stages: Stage) -> bool:
    """Whether any fault changes one of these stages."""
    return any(stage in fault.changes for fault in faults for stage in stages)


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


def by_name(output: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs by name: a lone ``output`` (any shape and dtype) is ``out``. No values are read.

    Source: derived in this file."""
    return {"out": output} if isinstance(output, Tensor) else dict(output)


def _evaluate(dim: str, bound: Mapping[str, int]) -> int:
    if dim.isdigit():
        return int(dim)
    symbol, _, divisor = dim.partition("/")
    value = bound[symbol]
    return -(-value // int(divisor)) if divisor else value
