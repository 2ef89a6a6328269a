"""What a call depends on beside its operands: the machine, the configuration, and the decisions made for both.

One :class:`Context` serves the process until a block replaces it (:func:`kernels.config.use_config`,
:func:`kernels.platform.use_machine`). It is a context variable: a block is seen by its own thread and task only, and a
new thread starts with the process's. Whatever is kept between calls is a :class:`Memo` or a :class:`Once`.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

from .errors import Failed
from .records import Config, Machine, Plan, Problem

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
P = ParamSpec("P")
R = TypeVar("R")
Calls = Counter[tuple[str, str]]
"""Calls of libraries by backend and function."""
MOST = 4096
"""Entries of a memo. A model has some hundred classes of problems."""
MOST_WEIGHTS = 1 << 17
"""Entries by weight: a number and a reference each."""


class Memo(dict[K, V], Generic[K, V]):
    """A dictionary that threads share: reads need no lock, :meth:`keep` takes one and never exceeds ``most``."""

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self._lock, self._most = threading.Lock(), most

    def keep(self, key: K, value: V) -> V:
        """Store ``value``; of two threads that made one, the last stays. A full memo forgets its older half."""
        with self._lock:
            if len(self) >= self._most:
                for old in list(itertools.islice(self, self._most // 2)):
                    del self[old]
            self[key] = value
        return value


Failures = Memo[tuple[Problem, str], Failed]
"""Why a backend, by its name, failed for a problem."""


class Once(Generic[V]):
    """A value that is given, or made once at first use, whatever the number of threads."""

    def __init__(self, value: V | None = None) -> None:
        self.value = value
        self._lock = threading.RLock()

    def get(self, make: Callable[[], V]) -> V:
        """The value, made by ``make`` when there is none yet."""
        with self._lock:
            if self.value is None:
                self.value = make()
            return self.value


class Context:
    """A machine, a configuration, what is decided for them, and the plans and calls of observers (None without one).

    Decisions belong to classes of problems, ``weights`` to tensors of earlier calls (:mod:`kernels.repeated`).
    ``failures``: backends that failed for a problem on this machine (:mod:`kernels.warming`).
    """

    __slots__ = ("calls", "config", "decisions", "failures", "machine", "observed", "weights")

    def __init__(
        self,
        machine: Once[Machine],
        config: Once[Config],
        observed: list[Plan] | None = None,
        calls: Calls | None = None,
        failures: Failures | None = None,
    ) -> None:
        self.machine, self.config, self.observed, self.calls = machine, config, observed, calls
        self.failures: Failures = Memo() if failures is None else failures
        self.decisions: Memo[tuple[object, ...], Any] = Memo()
        self.weights: Memo[tuple[object, ...], Any] = Memo(MOST_WEIGHTS)

    def forget(self) -> None:
        """Decide anew, for instance once a backend has failed."""
        self.decisions.clear()
        self.weights.clear()


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose result ``torch.compile`` takes for a constant of the graph: it cannot trace a context.

    The mark is that of ``torch.compiler.assume_constant_result``, which would import the compiler, and Triton with it.
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010  # functions have no such attribute for mypy
    return function


_PROCESS = Context(Once(), Once())
_variable: ContextVar[Context] = ContextVar("fp8_kernels", default=_PROCESS)
current = _variable.get
"""The context of the caller."""


@contextmanager
def entered(kept: Context) -> Iterator[None]:
    """Within the block a context that was made before, with the decisions that it has."""
    token = _variable.set(kept)
    try:
        yield
    finally:
        _variable.reset(token)


@contextmanager
def use(
    machine: Once[Machine] | None = None,
    config: Once[Config] | None = None,
    observed: list[Plan] | None = None,
    calls: Calls | None = None,
) -> Iterator[None]:
    """Within the block, a context with what is given and the rest of the current one; its decisions are new."""
    now = current()
    plans = now.observed if observed is None else observed
    counted = now.calls if calls is None else calls
    failures = now.failures if machine is None else None
    token = _variable.set(Context(machine or now.machine, config or now.config, plans, counted, failures))
    try:
        yield
    finally:
        _variable.reset(token)
