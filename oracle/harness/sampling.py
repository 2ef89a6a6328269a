"""Recorded calls of a running engine: :func:`sample` writes one call in N into a folder, ``fp8-oracle judge`` reads it.

What a recorded call costs the engine: a copy of its tensors (:mod:`oracle.harness.recorder`), of inputs before the call
and of outputs after it. A call that is not recorded costs the increment of a counter. Nothing is recorded, and nothing
copied,

    while a CUDA graph is captured (the replays of a graph run no Python),
    while torch.compile, torch.export or torch.jit trace,
    while ``PENDING`` calls or ``max_bytes`` wait for the disk,
    once the folder holds ``max_bytes``, or ``seconds`` are over.

Not covered: calls that a compiled graph makes inside (sample the compiled function instead), and gradients.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from oracle.errors import OptionError
from oracle.harness.recorder import Recorder, Taken, copied

if TYPE_CHECKING:
    from torch import Tensor

SWITCH = "FP8_ORACLE_SAMPLE"
"""A variable of the environment that replaces ``every``: 0 turns every sampler of a process off."""
_F = TypeVar("_F", bound=Callable[..., Any])
Named = Mapping[str, str] | Callable[..., Mapping[str, object]] | None


@overload
def sample(
    routine: _F,
    *,
    every: int,
    to: str | Path,
    contract: str,
    inputs: Named = None,
    out: str | Mapping[str, str] = "out",
    numerics: str | None = None,
    max_bytes: int = 1 << 30,
    seconds: float | None = None,
    name: str | None = None,
) -> _F: ...


@overload
def sample(
    routine: None = None,
    *,
    every: int,
    to: str | Path,
    contract: str,
    inputs: Named = None,
    out: str | Mapping[str, str] = "out",
    numerics: str | None = None,
    max_bytes: int = 1 << 30,
    seconds: float | None = None,
    name: str | None = None,
) -> Callable[[_F], _F]: ...


def sample(
    routine: Callable[..., Any] | None = None,
    *,
    every: int,
    to: str | Path,
    contract: str,
    inputs: Named = None,
    out: str | Mapping[str, str] = "out",
    numerics: str | None = None,
    max_bytes: int = 1 << 30,
    seconds: float | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Record the first call of ``routine`` and then one in ``every``, for ``fp8-oracle judge DIR``.

    Parameters
    ----------
    routine
        The function of the engine; without it ``sample(...)`` is a decorator.
    every
        One call in so many; 0 returns ``routine`` itself. ``FP8_ORACLE_SAMPLE`` in the environment replaces it.
    to
        The folder of the files, which is made; several processes may share it.
    contract
        A name of :func:`oracle.contracts`.
    inputs
        Which argument is which input or option of the contract: None, parameters of the same names; a mapping from the
        contract's names to those of parameters; or a function of the same arguments that returns inputs and options by
        the contract's names.
    out
        Where the routine returns None, the parameter that holds the output, or a mapping from the contract's outputs to
        parameters. An output with the name of an input is that parameter.
    numerics
        The declared schedule, as for :func:`oracle.judge`.
    max_bytes
        Of all files in the folder, and of the calls that wait to be written; recording ends with a call that would pass
        it. A larger call is dropped.
    seconds
        Recording ends so long after this call of ``sample``; None never.
    name
        The subject in reports (default: module and name of the routine).

    Returns
    -------
    callable
        The routine, wrapped. Its attribute ``sampler`` counts (``recorded``, ``dropped``), says what went wrong
        (``problems``) and waits for the disk (``flush()``). A routine never raises because of its recording: the first
        problem is logged.

    Raises
    ------
    OptionError
        A number is negative, or a required input of the contract is no parameter of the routine.
    ContractError, FixtureError
        There is no such contract; the folder cannot be made.
    """
    supplied = os.environ.get(SWITCH, "")
    if supplied and not supplied.isdecimal():
        raise OptionError(f"{SWITCH}={supplied!r} is no number of calls; 0 turns sampling off")
    every = int(supplied) if supplied else every
    if every < 0 or max_bytes < 0:
        raise OptionError(f"every={every}, max_bytes={max_bytes}: neither is negative")
    if routine is None:
        asked: dict[str, Any] = {"every": every, "to": to, "contract": contract, "inputs": inputs, "out": out}
        asked |= {"numerics": numerics, "max_bytes": max_bytes, "seconds": seconds, "name": name}
        return lambda result: sample(result, **asked)
    if every == 0:
        return routine
    return _wrapped(Sampler(routine, every, Path(to), contract, inputs, out, numerics, max_bytes, seconds, name))


def _wrapped(sampler: Sampler) -> Callable[..., Any]:
    import torch

    routine, compiling = sampler.routine, torch.compiler.is_compiling

    @functools.wraps(routine)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling() or not sampler.due():  # the first is a constant to a compiler, which inlines the routine
            return routine(*args, **kwargs)
        return sampler.call(args, kwargs)

    wrapper.sampler = sampler  # type: ignore[attr-defined]
    return wrapper


class Sampler(Recorder):
    """The recording of one routine; see :func:`sample`."""

    def __init__(
        self,
        routine: Callable[..., Any],
        every: int,
        to: Path,
        contract: str,
        inputs: Named,
        out: str | Mapping[str, str],
        numerics: str | None,
        max_bytes: int,
        seconds: float | None,
        name: str | None,
    ) -> None:
        from oracle.routines import get

        self.routine, self.every = routine, every
        self._contract, self._numerics = get(contract), numerics
        of, what = getattr(routine, "__module__", ""), getattr(routine, "__qualname__", type(routine).__name__)
        self._name = name or f"{of}:{what}"
        self._inputs, self._out = inputs, out
        self._signature = self._checked_signature()
        self._ends = None if seconds is None else time.monotonic() + seconds
        self._calls = itertools.count()
        super().__init__(to, max_bytes, self._name)

    # --- in the engine --------------------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether the call that is about to be made is recorded; counts it."""
        return next(self._calls) % self.every == 0 and self._open

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call and record it."""
        taken = None
        if self._may_record():
            try:
                taken = self._before(args, kwargs)
            except (Exception, SystemExit) as error:  # of inputs=, too; the engine goes on
                self._problem(error)
        result = self.routine(*args, **kwargs)
        if taken is not None:
            try:
                self._after(taken, args, kwargs, result)
            except (Exception, SystemExit) as error:
                self._problem(error)
        return result

    def _may_record(self) -> bool:
        import torch

        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if begun and torch.cuda.is_current_stream_capturing():
            return False
        if self._ends is not None and time.monotonic() >= self._ends:
            self._open = False
        if self._open and self._queue.full():
            self._drop()
            return False
        return self._open

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken | None:
        """Copies of the inputs as they are before the call; None where the folder has no room for them."""
        from torch import Tensor

        named = self._named(args, kwargs)
        option_names = {spec.name for spec in self._contract.options}
        options = {name: value for name, value in named.items() if name in option_names}
        inputs = {}
        for spec in self._contract.inputs:
            value = named.get(spec.name)
            if isinstance(value, Tensor):
                inputs[spec.name] = value
            elif value is not None or not spec.optional:
                raise TypeError(f"{spec.name} is a {type(value).__name__}, no tensor")
        if not self.room(sum(x.nbytes for x in inputs.values())):
            return None
        result = {name: copied(x, name) for name, x in inputs.items()}
        return Taken(next(self._numbers), self._contract.name, self._name, result, options, self._numerics)

    def _after(self, taken: Taken, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Copies of the outputs; the call goes to the thread that writes."""
        taken.finish(self._outputs(args, kwargs, result))
        self.put(taken)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, object]:
        """Inputs and options by the contract's names."""
        if callable(self._inputs):
            return self._inputs(*args, **kwargs)
        arguments = self._bound(args, kwargs)
        renamed = self._inputs or {}
        known = [*(spec.name for spec in self._contract.inputs), *(spec.name for spec in self._contract.options)]
        names = {name: renamed.get(name, name) for name in known}
        return {name: arguments[parameter] for name, parameter in names.items() if parameter in arguments}

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by the names of parameters, defaults included."""
        assert self._signature is not None
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        more = [p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        return {**bound.arguments, **(bound.arguments[more[0]] if more else {})}

    def _outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Tensor]:
        """The outputs by name: what the call returned, or the parameters that it wrote."""
        from torch import Tensor

        names, results = self._contract.returns, result
        if result is None:
            arguments = self._bound(args, kwargs)
            named = {"out": self._out} if isinstance(self._out, str) else self._out
            results = {name: arguments.get(named.get(name, name)) for name in names}
        elif isinstance(result, Tensor):
            results = {names[0]: result} if len(names) == 1 else {}
        elif isinstance(result, tuple | list):
            results = dict(zip(names, result, strict=True))
        if missing := [name for name in names if not isinstance(results.get(name), Tensor)]:
            raise TypeError(f"{self._name} gave a {type(result).__name__} without {', '.join(missing)}")
        return {name: results[name] for name in names}

    def _checked_signature(self) -> inspect.Signature | None:
        """The signature of the routine, None where nothing needs it; OptionError where it lacks an input."""
        try:
            signature = inspect.signature(self.routine)
        except (TypeError, ValueError):
            if callable(self._inputs):
                return None  # then it returns what it computes
            raise OptionError(f"{self._name} has no signature; pass inputs= as a function of its arguments") from None
        parameters = signature.parameters.values()
        if callable(self._inputs) or any(p.kind is p.VAR_KEYWORD for p in parameters):
            return signature
        renamed = self._inputs or {}
        due = [renamed.get(spec.name, spec.name) for spec in self._contract.inputs if not spec.optional]
        if missing := [name for name in due if name not in signature.parameters]:
            raise OptionError(
                f"{self._name} has no parameter {missing[0]!r}, an input of {self._contract.name}; pass "
                f"inputs={{{missing[0]!r}: its parameter}}, or a function of its arguments"
            )
        return signature
