"""A public routine is declared once, where it is written: :func:`verb`.

From the declaration follow its name in ``kernels.__all__``, the check of its arguments' kinds, the fast path for
repeated calls, the custom operator with its fake, the contracts it serves, which :mod:`kernels.subjects` lists for each
backend, and the tables of the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from . import checks, operators
from .adapters import Adapter, Inputs, Options, Outputs, by_name, in_place
from .repeated import with_fast_path

F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E")


@dataclass(frozen=True)
class Verb:
    """One public routine; ``writes`` are the arguments that its operator writes into, None where it has no operator."""

    name: str
    function: Callable[..., Any]
    writes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Served:
    """A contract: the verb that serves it, the operation of the plan, and how inputs and options become a call.

    ``native``: the operations that calls become where the machine has block-scaled instructions.
    """

    verb: Callable[..., Any]
    operation: str
    adapter: Adapter
    native: tuple[str, ...] = ()

    def __call__(self, inputs: Inputs, options: Options) -> Outputs:
        """The verb on the inputs and options of the contract."""
        return self.adapter(self.verb, inputs, options)


PUBLIC: list[str] = []
"""The public names of the package, as they are declared."""
VERBS: dict[str, Verb] = {}
"""Every verb, by its name."""
SERVED: dict[str, Served] = {}
"""What serves a contract, by the name of the contract."""


def verb(
    operation: str | None = None,
    *,
    contracts: tuple[str, ...] | None = None,
    outputs: tuple[str, ...] = (),
    adapter: Adapter | None = None,
    writes: tuple[str, ...] = (),
    fake: Callable[..., Any] | None = None,
    operator: Callable[..., Any] | None = None,
    fast_path: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    run: Callable[..., Any] | None = None,
    rows: Collection[str] | None = None,
    free: Collection[str] = (),
    kinds: bool = True,
    native: tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Declare a public routine.

    Parameters
    ----------
    operation
        Of the plan (:data:`kernels.plan.TABLE`), where the routine serves contracts: that of its own name, or those of
        ``contracts``.
    outputs
        Names of the contract's outputs, where it has several.
    adapter
        From the contract's inputs and options to the call; default: all by name.
    writes
        Arguments that an operator writes into.
    fake
        The operator's outputs without values, from the operator's arguments; no operator without this or ``writes``.
    operator
        The function that the operator runs, where its arguments are not those of the verb (:mod:`kernels.operators`).
    fast_path
        Optional fast-path wrapper of the operator, for repeated calls.
    run, rows, free
        What runs on the fast path for repeated calls (:func:`kernels.repeated.with_fast_path`).
    kinds
        False where the routine checks kinds itself, after its own fast path for repeated calls.
    native
        As of :class:`Served`.
    """

    def declare(function: F) -> F:
        name, has_operator = function.__name__, bool(writes) or fake is not None
        of_torch = not has_operator and operation in (None, "cast", "layout")
        routine: Any = checks.checked(gradients=of_torch)(function) if kinds else function
        if run is not None:
            routine = with_fast_path(run, rows=rows, free=free)(routine)
        if has_operator:
            operators.register(name, operator or routine, fake or operators.nothing, writes, fast_path)
        VERBS[name] = Verb(name, exported(routine), writes if has_operator else None)
        if operation is not None:
            for contract in contracts or (name,):
                how = adapter or (in_place(*writes) if writes else by_name(*outputs))
                serve(contract, operation, routine, how, native)
        whole: F = routine
        return whole

    return declare


def serve(
    contract: str, operation: str, function: Callable[..., Any], adapter: Adapter, native: tuple[str, ...] = ()
) -> None:
    """Let a function serve a contract beside, or instead of, the one of its name."""
    SERVED[contract] = Served(function, operation, adapter, native)


def exported(thing: E) -> E:
    """Put a function or a class into the ``__all__`` of its module, and so into that of the package."""
    named: Any = thing
    PUBLIC.append(named.__name__)
    sys.modules[named.__module__].__dict__.setdefault("__all__", []).append(named.__name__)
    return thing
