"""How a library's routine is called, written once as the call itself, and read in both directions.

    bind("deep_gemm:fp8_gemm_nt", "fp8_gemm_nt", "((a, a_scale), (b, b_scale), out, c=None, disable_ue8m0_cast=True)")

From contract inputs to a call (``validate``): a name of the pattern is the input, option or output of the contract of
that name; an output is allocated and written. From a call that was made to contract inputs (a watched model): the same
pattern is matched with the arguments. The words of a pattern:

    a, out_dtype, out       an input, option or output of the contract; an optional input that is absent is None
    None, 128, True, torch.bfloat16     a constant: what the argument must be
    (a, a_scale), [q, scale]            tuples and lists
    b.t(), q.view(torch.uint8), ...     a change that has an inverse (``CHANGES``)
    not use_ue8m0                       the opposite of an option
    lanes(a_scale), words(b, k)         one of the binding's own ``functions``, which has an inverse
    a.shape[1], len(b)                  any other expression: computed for a call, and compared when one is read
    -> q, scale.t(), ...                what the routine returns, where it does not only write (``...``: and more); by
                                        default the outputs that the arguments do not hold, in the contract's order

An output that is an input too is updated in place, unless it stands after the arrow. ``takes`` and ``where`` say which
calls the routine takes: a contract call outside of them is not made, a library call outside of them does not bind.

Not covered: state that a routine keeps between calls; a routine whose arguments depend on their values.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oracle.errors import OptionError, OracleError
from oracle.routines import get
from oracle.routines.base import Call, Contract

NAMES: dict[str, Any] = {"torch": torch, "len": len, "max": max, "min": min}
"""What an expression of a pattern may use beside the call."""


class UnboundError(OracleError):
    """A call that a binding does not describe; the message is one sentence that says which argument and why."""


class Bound(NamedTuple):
    """A library call in the contract's words; ``outputs`` has those that the call held or returned."""

    inputs: dict[str, Tensor]
    options: dict[str, object]
    outputs: dict[str, Tensor]


def _same(x: Tensor, *_: object) -> Tensor:
    return x


def _reciprocal(x: Tensor) -> Tensor:
    """``1 / x`` where the division is exact. Raises UnboundError elsewhere: no inverse has the same bits."""
    inverse = x.reciprocal()
    if not torch.equal(inverse.reciprocal(), x) or bool((torch.frexp(x).mantissa != 0.5).any()):
        raise UnboundError("the inverse of a scale that is no power of two is rounded, so that it cannot be read back")
    return inverse


CHANGES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "t": (Tensor.t, Tensor.t),
    "mT": (lambda x: x.mT, lambda x: x.mT),
    "contiguous": (Tensor.contiguous, _same),
    "unsqueeze": (Tensor.unsqueeze, Tensor.squeeze),
    "squeeze": (Tensor.squeeze, Tensor.unsqueeze),
    "transpose": (Tensor.transpose, Tensor.transpose),
    "reciprocal": (_reciprocal, _reciprocal),
}
"""Changes of a tensor and their inverses, by the name of the method; ``view(dtype)`` is apart."""


class _Own(str):
    """A name of the library that stands for itself, with its attributes."""

    def __getattr__(self, name: str) -> _Own:
        return _Own(f"{self}.{name}")


# --- the words of a pattern ---------------------------------------------------------------------------------


class _Word:
    """A part of a pattern: ``make`` gives the argument for a call's names, ``read`` puts an argument into them."""

    text: str

    def make(self, names: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def read(self, value: Any, into: _Reading) -> None:
        raise NotImplementedError


@dataclass
class _Reading:
    """What was read of one library call; ``later``: expressions that are compared when all names are known."""

    names: dict[str, Any]
    later: list[tuple[_Expression, Any]]
    known: Mapping[str, Any] = field(default_factory=dict)  # of the call, where only what it returned is read
    applied: list[tuple[_Applied, Any]] = field(default_factory=list)

    def finish(self) -> None:
        """Read what needs other names of the call."""
        for word, value in sorted(self.applied, key=lambda pair: len(pair[0].beside)):
            word.back(value, self)
        self.applied.clear()


@dataclass(frozen=True)
class _Name(_Word):
    text: str

    def make(self, names: Mapping[str, Any]) -> Any:
        return names[self.text]

    def read(self, value: Any, into: _Reading) -> None:
        if self.text in into.names and not _equal(into.names[self.text], value):
            raise UnboundError(f"{self.text} is {_shown(into.names[self.text])} and {_shown(value)} in one call")
        into.names[self.text] = value


@dataclass(frozen=True)
class _Constant(_Word):
    text: str
    value: Any

    def make(self, names: Mapping[str, Any]) -> Any:
        return self.value

    def read(self, value: Any, into: _Reading) -> None:
        if not _equal(value, self.value):
            raise UnboundError(f"it was called with {_shown(value)}, the binding is of calls with {self.text}")


@dataclass(frozen=True)
class _Several(_Word):
    text: str
    words: tuple[_Word, ...]
    kind: type[tuple[Any, ...]] | type[list[Any]]

    def make(self, names: Mapping[str, Any]) -> Any:
        return self.kind(word.make(names) for word in self.words)

    def read(self, value: Any, into: _Reading) -> None:
        if not isinstance(value, tuple | list) or len(value) != len(self.words):
            raise UnboundError(f"{_shown(value)} is not {self.text}")
        for word, one in zip(self.words, value, strict=True):
            word.read(one, into)


@dataclass(frozen=True)
class _Changed(_Word):
    """A tensor after a change that has an inverse; None stays None."""

    text: str
    inner: _Word
    method: str
    arguments: tuple[Any, ...]
    stored: torch.dtype = torch.uint8  # of the input, where the change is of the dtype

    def make(self, names: Mapping[str, Any]) -> Any:
        x = self.inner.make(names)
        if x is None:
            return None
        return x.view(*self.arguments) if self.method == "view" else CHANGES[self.method][0](x, *self.arguments)

    def read(self, value: Any, into: _Reading) -> None:
        if value is None:
            return self.inner.read(None, into)
        if not isinstance(value, Tensor):
            raise UnboundError(f"{_shown(value)} is no tensor; {self.text} is one")
        if self.method == "view":
            if value.dtype is not self.arguments[0]:
                raise UnboundError(f"{self.text} is {value.dtype}, not {self.arguments[0]}")
            return self.inner.read(value.view(self.stored), into)
        try:
            return self.inner.read(CHANGES[self.method][1](value, *self.arguments), into)
        except (RuntimeError, IndexError) as error:
            raise UnboundError(f"{_shown(value)} is not {self.text}: {error}") from None


@dataclass(frozen=True)
class _Applied(_Word):
    """A tensor or an option after a function of the binding; ``written``: an output, which the call has as it is."""

    text: str
    inner: _Word
    functions: tuple[Callable[..., Any], Callable[..., Any]]
    beside: tuple[_Word, ...]
    written: bool

    def make(self, names: Mapping[str, Any]) -> Any:
        x = self.inner.make(names)
        return x if x is None or self.written else self.functions[0](x, *(word.make(names) for word in self.beside))

    def read(self, value: Any, into: _Reading) -> None:
        into.applied.append((self, value))

    def back(self, value: Any, into: _Reading) -> None:
        beside = [word.make({**into.known, **into.names}) for word in self.beside]
        self.inner.read(None if value is None else self.functions[1](value, *beside), into)


@dataclass(frozen=True)
class _Opposite(_Word):
    text: str
    name: str

    def make(self, names: Mapping[str, Any]) -> Any:
        return not names[self.name]

    def read(self, value: Any, into: _Reading) -> None:
        if not isinstance(value, bool):
            raise UnboundError(f"{_shown(value)} is neither True nor False; {self.text} is")
        _Name(self.name).read(not value, into)


@dataclass(frozen=True)
class _Expression(_Word):
    """A value that follows from the call."""

    text: str
    code: CodeType

    def make(self, names: Mapping[str, Any]) -> Any:
        return _value(self.code, names)

    def read(self, value: Any, into: _Reading) -> None:
        into.later.append((self, value))


def _value(code: CodeType, names: Mapping[str, Any]) -> Any:
    """An expression of a binding, which is code of the binding's author."""
    return eval(code, {"__builtins__": {}}, {**NAMES, **names})


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return type(one) is type(other) and bool(one == other)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {list(value.shape)}"
    return repr(value)


# --- a pattern ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Binding:
    """One routine of a library as calls of one contract; made by :func:`bind`.

    Attributes
    ----------
    target : ``"MODULE:CALLABLE"``; an operator of torch is ``"torch:ops.LIBRARY.NAME"``, a function of a handle that a
        library gives ``"MODULE:HANDLE().NAME"``.
    contract : the contract's name.
    pattern : the call, as the module describes.
    signature : the routine's parameters in the release, as ``"(a, b, out=None)"``: an argument of a call that is read
        may stand by position or by keyword, and one that the pattern does not have must have its default.
    takes : by name of an input or option, the dtypes or values that the routine takes; None: an input that is absent.
    where : a condition on the call, as an expression of the contract's names; "" for none.
    shapes : of outputs whose shape the contract leaves open, as expressions of the contract's names; or the memory
        itself, a tensor, where its strides or its dtype are the routine's own.
    absent : what the routine is given for an optional input that a call lacks, or for an option that is None, as
        expressions of the contract's names; a call that is read has it as any other.
    derived : options and inputs that no argument is, as expressions of the names of a call that is read.
    dense : inputs that the routine wants without gaps in their memory, ``"*"`` for all: no other call is made. One that
        is read binds all the same, so that a routine that misreads such memory is seen.
    functions : by a name of the pattern what the pattern cannot say: a function of a tensor or an option, and its
        inverse; both get the values of further arguments.
    ignores : parameters that do not change the numbers, whatever they are in a call that is read.
    domain : extents that it takes, as for :func:`oracle.validate`; "" for any.
    numerics : the schedule that it declares, or None.
    loads : modules of which one registers the operator when it is imported, asked in their order: of a package that was
        cut down to its compiled library the library itself.
    arches : the architectures that the routine serves; empty for any.
    release : the distribution and version in which the call was read.
    exempt : what the library's documentation excludes, as for :func:`oracle.validate`.
    cases : ids of cases to judge, where a profile has too few that the routine takes.
    project : the name of the library on pages; by default that of its package.
    """

    target: str
    contract: str
    pattern: str
    signature: str
    takes: Mapping[str, object] = field(default_factory=dict)
    where: str = ""
    shapes: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    derived: Mapping[str, str] = field(default_factory=dict)
    dense: tuple[str, ...] = ()
    functions: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = field(default_factory=dict)
    ignores: tuple[str, ...] = ()
    domain: str = ""
    numerics: str | None = None
    loads: tuple[str, ...] = ()
    arches: tuple[str, ...] = ()
    release: str = ""
    exempt: Mapping[str, str] = field(default_factory=dict)
    cases: tuple[str, ...] = ()
    project: str = ""

    @property
    def package(self) -> str:
        """The top module of the library."""
        return (*self.loads, self.target.partition(":")[0])[0].partition(".")[0]

    @property
    def shown(self) -> str:
        """``PROJECT.ROUTINE``, as pages and subjects name it."""
        routine = self.target.rpartition(":")[2].rpartition(".")[2]
        return f"{self.project or self.package}.{routine}"

    def load(self) -> None:
        """Import what registers the operator, as far as it is needed.

        Raises ImportError: none of the modules is there; whatever one of them raises.
        """
        missing = None
        for module in self.loads:
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:  # raised below where no other module has it either
                missing = missing or error
            if self.registered():
                return
        if missing is not None:
            raise missing

    def registered(self) -> bool:
        """Whether the operator of torch is there; True for a routine that is none."""
        module, _, name = self.target.partition(":")
        result: Any = sys.modules.get(module)
        for part in name.split(".") if module == "torch" else ():
            result = getattr(result, part, None)
        return result is not None

    def unserved(self, arch: str) -> str | None:
        """Why a GPU of this arch is none that the routine serves, in one sentence; None where it is one."""
        if not self.arches or arch in self.arches:
            return None
        return f"{self.target} serves {', '.join(self.arches)}, not {arch}"

    @property
    def name(self) -> str:
        """The target and the contract, which together are one binding."""
        return f"{self.target} {self.contract}"

    @cached_property
    def parameters(self) -> inspect.Signature:
        """The routine's parameters, by :attr:`signature`; a default by a name of the library, as ``Mode.NONE``, is its
        text."""
        tree = ast.parse(f"lambda {self.signature.strip()[1:-1]}: None", mode="eval")
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {*NAMES}
        own = {name: _Own(name) for name in used}
        return inspect.signature(_value(compile(tree, self.target, "eval"), own))

    @cached_property
    def routine(self) -> Contract:
        """The contract."""
        return get(self.contract)

    @cached_property
    def _words(self) -> tuple[tuple[_Word, ...], dict[str, _Word], tuple[_Word, ...]]:
        """The positional words, those by keyword, and those that are returned."""
        call, arrow, returned = self.pattern.partition(") ->")
        call += ")" if arrow else ""
        try:
            tree = ast.parse(f"call{call.strip()}", mode="eval").body
            after = ast.parse(f"({returned.strip()},)", mode="eval").body if returned.strip() else None
        except SyntaxError as error:
            raise OptionError(f"{self.target}: the pattern {self.pattern!r} is no call: {error.msg}") from None
        if (
            not isinstance(tree, ast.Call)
            or any(isinstance(part, ast.Starred) for part in tree.args)
            or any(keyword.arg is None for keyword in tree.keywords)
        ):
            raise OptionError(f"{self.target}: the pattern {self.pattern!r} is no call")
        positional = tuple(map(self._word, tree.args))
        named = {str(keyword.arg): self._word(keyword.value) for keyword in tree.keywords}
        if isinstance(after, ast.Tuple):
            results = tuple(map(self._word, after.elts))
        else:
            held = {word.id for word in ast.walk(tree) if isinstance(word, ast.Name)}
            results = tuple(_Name(name) for name in self.routine.returns if name not in held)
        return positional, named, results

    def _word(self, node: ast.expr) -> _Word:
        text, routine = ast.unparse(node), self.routine
        known = {*(s.name for s in routine.inputs), *(s.name for s in routine.options), *routine.returns}
        if isinstance(node, ast.Constant):
            return _Constant(text, node.value)
        if isinstance(node, ast.Name) and node.id in known:
            return _Name(node.id)
        if isinstance(node, ast.Tuple | ast.List):
            return _Several(text, tuple(map(self._word, node.elts)), tuple if isinstance(node, ast.Tuple) else list)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions:
            inner, *beside = map(self._word, node.args)
            held = {*(s.name for s in routine.inputs), *(s.name for s in routine.options)}
            written = isinstance(inner, _Name) and inner.text not in held
            return _Applied(text, inner, self.functions[node.func.id], tuple(beside), written)
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        if not names & known and names <= NAMES.keys():
            return _Constant(text, _value(compile(text, self.target, "eval"), {}))
        if unknown := names - known - NAMES.keys():
            raise OptionError(
                f"{self.target}: {min(unknown)!r} of {self.pattern!r} is no input, option or output of "
                f"{self.contract}; it has {', '.join(sorted(known))}"
            )
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Name):
            return _Opposite(text, node.operand.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords:
            method, constants = node.func.attr, [self._word(one) for one in node.args]
            if all(isinstance(one, _Constant) for one in constants) and (method in CHANGES or method == "view"):
                arguments = tuple(one.value for one in constants if isinstance(one, _Constant))
                if method != "view" or (len(arguments) == 1 and isinstance(arguments[0], torch.dtype)):
                    stored = self._stored(node.func.value) if method == "view" else torch.uint8
                    return _Changed(text, self._word(node.func.value), method, arguments, stored)
        return _Expression(text, compile(text, self.target, "eval"))

    @cached_property
    def _condition(self) -> CodeType:
        return compile(self.where, self.target, "eval")

    def _stored(self, node: ast.expr) -> torch.dtype:
        """The one dtype of an input that a pattern views as another. Raises OptionError: it has several."""
        name = node.id if isinstance(node, ast.Name) else ""
        taken = self.takes.get(name)
        dtypes = {s.name: s.dtypes for s in self.routine.inputs}.get(name, ())
        if isinstance(taken, torch.dtype):
            return taken
        if len(dtypes) == 1:
            return dtypes[0]
        raise OptionError(f"{self.target}: say with takes which dtype of {ast.unparse(node)} is viewed")

    def _values(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, Any]:
        """Inputs and options of a call by name: None for an absent input, its default for an option left out."""
        values: dict[str, Any] = {spec.name: inputs.get(spec.name) for spec in self.routine.inputs}
        return values | {spec.name: options.get(spec.name, spec.default) for spec in self.routine.options}

    # --- from the contract to the library -------------------------------------------------------------------

    def refuses(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> str | None:
        """Why the routine does not take a call of the contract, in one sentence; None where it does."""
        for spec in self.routine.inputs:
            admitted, x = self.takes.get(spec.name, ...), inputs.get(spec.name)
            if admitted is None and x is not None:
                return f"{self.target} takes no {spec.name}"
            if x is not None and isinstance(admitted, torch.dtype | tuple) and x.dtype not in _each(admitted):
                return f"{self.target} takes {spec.name} in {_listed(admitted)}, not in {x.dtype}"
        positional, named, results = self._words
        text = {name for word in (*positional, *named.values(), *results) for name in _names(word)}
        text |= {"out_dtype"} & {f"{name}_dtype" for name in text}  # that of an output is the option
        text |= self.derived.keys()
        for option in self.routine.options:
            value = options.get(option.name, option.default)
            if option.name in self.takes:
                if not any(_equal(value, one) for one in _each(self.takes[option.name])):
                    return f"{self.target} takes {option.name} as {_listed(self.takes[option.name])}, not {value!r}"
            elif option.name not in text and not _equal(value, option.default):
                return f"{self.target} has no {option.name}, which is {value!r}"
        present = [name for name in inputs if name not in text]
        if present:
            return f"{self.target} takes no {present[0]}"
        if self.where and not _value(self._condition, self._values(inputs, options)):
            return f"{self.target} takes calls with {self.where}"
        return None

    def arguments(
        self, inputs: Mapping[str, Tensor], options: Mapping[str, object]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Tensor]]:
        """The call for contract inputs: positional arguments, keywords, and the outputs among them, allocated.

        Raises NotImplementedError: :meth:`refuses`, or a gap in what is ``dense``. OracleError: it is no call of the
        contract.
        """
        if why := self.refuses(inputs, options):
            raise NotImplementedError(why)
        for name in inputs if "*" in self.dense else inputs.keys() & self.dense:
            if _spread(inputs[name]) != inputs[name].numel():
                raise NotImplementedError(f"{self.target} takes {name} without gaps in its memory")
        positional, named, results = self._words
        names = self._values(inputs, options)
        for name in [name for name in self.absent if names[name] is None]:
            names[name] = _value(compile(self.absent[name], self.target, "eval"), names)
        written: dict[str, Tensor] = {}
        if self._written:
            outs = self.routine.outputs(Call(self.routine, inputs, options).checked())
            device = next(iter(inputs.values())).device
            supplied = {spec.name for spec in self.routine.inputs if self.takes.get(spec.name, ...) is not None}
            for name in [name for name in self._written if name in outs]:
                if name in supplied:
                    if name in inputs:
                        written[name] = inputs[name].clone()
                    continue
                shape, dtype = outs[name].shape, outs[name].dtypes[0]
                if name in self.shapes:
                    shape = _value(compile(self.shapes[name], self.target, "eval"), names)
                if isinstance(shape, Tensor):
                    written[name] = shape
                    continue
                if shape is None:
                    raise UnboundError(f"{self.contract} leaves the shape of {name} open, so that none is allocated")
                written[name] = torch.empty(shape, dtype=dtype, device=device)
        names |= written
        return (
            tuple(word.make(names) for word in positional),
            {key: word.make(names) for key, word in named.items()},
            written,
        )

    def __call__(
        self, kernel: Callable[..., Any], inputs: Mapping[str, Tensor], options: Mapping[str, object]
    ) -> dict[str, Tensor]:
        """Call the routine for contract inputs, as the adapter of :func:`oracle.validate` does.

        Returns the outputs by the contract's names, in the shapes and dtypes that the routine gave them. Values, NaN
        and infinities are the routine's. Raises as :meth:`arguments`; UnboundError: it returned something else than the
        pattern says. Source: the pattern, read in :attr:`release`.
        """
        positional, named, written = self.arguments(inputs, options)
        known = self._values(inputs, options)
        returned = self._returned(kernel(*positional, **named), known)
        reading = _Reading({}, [], known)
        for word in (*self._words[0], *self._words[1].values()):
            if isinstance(word, _Applied) and word.written and word.inner.text in written:
                word.back(written.pop(word.inner.text), reading)
                written[word.inner.text] = reading.names[word.inner.text]
        return written | returned

    @cached_property
    def _written(self) -> tuple[str, ...]:
        """Outputs that the routine writes into an argument."""
        positional, named, results = self._words
        held = {name for word in (*positional, *named.values()) for name in _names(word)}
        held -= {name for word in results for name in _names(word)}
        return tuple(name for name in self.routine.returns if name in held)

    def _returned(self, value: Any, known: Mapping[str, Any]) -> dict[str, Tensor]:
        results = self._words[2]
        if results and results[-1].text == "...":
            results, value = results[:-1], value[: len(results) - 1]
        if not results:
            return {}
        reading = _Reading({}, [], known)
        if len(results) == 1:
            results[0].read(value[0] if isinstance(value, tuple | list) and len(value) == 1 else value, reading)
        else:
            _Several(self.pattern.partition(") ->")[2].strip(), results, tuple).read(value, reading)
        reading.finish()
        return reading.names

    # --- from the library to the contract -------------------------------------------------------------------

    def read(self, positional: Sequence[Any], named: Mapping[str, Any] | None = None, *, returned: Any = None) -> Bound:
        """A library call in the contract's words.

        Parameters
        ----------
        positional, named : its arguments. Tensors are not copied: those of an output that is updated in place have to
            be taken before the call.
        returned : what it returned.

        Returns
        -------
        Bound
            Inputs and options as :func:`oracle.judge` takes them, and the outputs that were written or returned, with
            the values, NaN and infinities of the arguments. Source: the pattern, read in :attr:`release`.

        Raises
        ------
        UnboundError
            The call is not one that the pattern describes; one sentence says which argument.
        """
        words, values = self._aligned(positional, dict(named or {}))
        reading = _Reading({}, [])
        for key, word in words.items():
            if key not in self.ignores:
                word.read(values[key], reading)
        reading.finish()
        absent = {name for name, admitted in self.takes.items() if admitted is None}
        specs = {spec.name for spec in self.routine.inputs} - absent
        inputs = {name: x for name, x in reading.names.items() if name in specs and x is not None}
        for name, x in inputs.items():
            if not isinstance(x, Tensor):
                raise UnboundError(f"{name} is {_shown(x)}, not a tensor")
        options = {spec.name: reading.names.get(spec.name, spec.default) for spec in self.routine.options}
        for name in options.keys() & self.takes.keys() - reading.names.keys():
            options[name] = _each(self.takes[name])[0]
        outputs = {name: x for name, x in reading.names.items() if name in self._written and isinstance(x, Tensor)}
        if returned is not None:
            outputs |= self._returned(returned, {**options, **inputs})
        for name, text in self.derived.items():
            (inputs if name in specs else options)[name] = _value(compile(text, self.target, "eval"), inputs | outputs)
        if "out_dtype" in options and "out_dtype" not in reading.names and "out" in outputs:
            options["out_dtype"] = outputs["out"].dtype
        if why := self.refuses(inputs, options):
            raise UnboundError(why)
        names = self._values(inputs, options) | outputs
        for expression, value in reading.later:
            if not _equal(computed := expression.make(names), value):
                raise UnboundError(f"{expression.text} is {_shown(computed)}, and the call has {_shown(value)}")
        return Bound(inputs, options, outputs)

    def updated(self, positional: Sequence[Any], named: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Copies of the inputs that the routine updates in place, of a call that is about to be made.

        In their shapes, dtypes and values, NaN and infinities among them, on their device; empty for most routines.
        Raises UnboundError: as :meth:`read`. Source: the pattern, read in :attr:`release`.
        """
        inputs = {spec.name for spec in self.routine.inputs if self.takes.get(spec.name, ...) is not None}
        if not (held := inputs & set(self._written)):
            return {}
        words, values = self._aligned(positional, dict(named or {}))
        reading = _Reading({}, [])
        for key, word in words.items():
            if held & _names(word):
                word.read(values[key], reading)
        reading.finish()
        return {name: x.clone() for name, x in reading.names.items() if name in held and isinstance(x, Tensor)}

    def _aligned(self, positional: Sequence[Any], named: dict[str, Any]) -> tuple[dict[str, _Word], dict[str, Any]]:
        """The words of the pattern and the arguments of a call, both by parameter."""
        parameters = self.parameters
        pattern = parameters.bind(*self._words[0], **self._words[1]).arguments
        try:
            call = parameters.bind(*positional, **named).arguments
        except TypeError as error:
            raise UnboundError(f"{self.target}{self.signature} has no such call: {error}") from None
        for key, value in call.items():
            if key not in pattern and key not in self.ignores and not _equal(value, parameters.parameters[key].default):
                raise UnboundError(f"{key} is {_shown(value)}, which the binding does not have")
        return pattern, {key: call.get(key, parameters.parameters[key].default) for key in pattern}


def _spread(x: Tensor) -> int:
    """Elements from the first to the last one in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def _each(admitted: object) -> tuple[object, ...]:
    return admitted if isinstance(admitted, tuple) else (admitted,)


def _listed(admitted: object) -> str:
    return " or ".join(map(str, _each(admitted)))


def _names(word: _Word) -> set[str]:
    """Names of a call that a word stands for."""
    if isinstance(word, _Several):
        return {name for one in word.words for name in _names(one)}
    if isinstance(word, _Changed | _Applied):
        return _names(word.inner)
    if isinstance(word, _Opposite):
        return {word.name}
    return {word.text} if isinstance(word, _Name) else set()


def bind(target: str, contract: str, pattern: str, signature: str, **stated: Any) -> Binding:
    """A binding: ``target`` as ``"MODULE:CALLABLE"``, the contract's name, the call (see the module), the routine's
    parameters, and what :class:`Binding` states beside. Nothing is imported."""
    return Binding(target, contract, pattern, signature, **stated)
