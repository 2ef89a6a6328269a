"""The backend that a plan chooses, kept per class of problems.

What is kept belongs to one context, that is one machine and one configuration. A verb passes only what its decision
depends on, so that a changing number of tokens adds nothing.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch

from . import context
from .backends.declaration import Backend, traced
from .config import current_config, use_config
from .errors import Failed, OptionError, shown
from .plan import MODULES, backend_of, explanation, plan
from .platform import current_machine
from .records import Machine, Plan, Problem
from .verbs import exported

T = TypeVar("T")
log = logging.getLogger(__name__)
"""Decisions, at level INFO, where ``FP8_KERNELS_LOG`` asks for them, and warnings of backends that failed."""
FAILED = "fp8_kernels: in the call of"
"""The beginning of a note at an error that a backend raised while it was traced."""


@contextmanager
def only(backend: str) -> Iterator[None]:
    """Within the block, plan this backend only, for the operations that list it (conformance runs of one backend).

    Where it cannot serve a problem, the plan's error says why.
    """
    if backend not in MODULES:
        raise OptionError(f"unknown backend {shown(backend)}; known: {', '.join(MODULES)}")
    with use_config(replace(current_config(), backend=backend)):
        yield


def preferring(backends: str | None, fallback: str | None = None) -> context.Context:
    """The current context with other backends, as ``FP8_KERNELS_BACKEND`` names them, and another fallback; kept, so
    that a layer which enters it again plans nothing anew."""
    return cached(_preferring, backends, fallback)


def _preferring(backends: str | None, fallback: str | None) -> context.Context:
    now, config = context.current(), current_config()
    text = ",".join(filter(None, (config.backend, backends)))  # the later part of a text overrules
    own = replace(config, backend=text, fallback=fallback or config.fallback)
    return context.Context(now.machine, context.Once(own), now.observed, now.calls, now.failures)


@contextmanager
def _observed() -> Iterator[list[Plan]]:
    plans: list[Plan] = []
    with context.use(observed=plans):
        yield plans


@overload
def explain() -> AbstractContextManager[list[Plan]]: ...
@overload
def explain(routine: str, *, machine: Machine | str | None = ..., **fields: object) -> str: ...
@exported
def explain(
    routine: str | None = None, *, machine: Machine | str | None = None, **fields: object
) -> AbstractContextManager[list[Plan]] | str:
    """What serves calls, and why nothing else does: of the calls in a block, or of one routine by name.

    ``with kernels.explain() as plans: layer(x)``, then ``print(*plans, sep="\\n")``: the decisions of the calls in the
    block, each once, in the order in which they are made: which backend serves the layer, and why no earlier one does.
    They are made anew for the block; those kept outside are left alone.

    ``print(kernels.explain("mm_mxfp8", machine="sm103", n=4096, k=7168))``: what serves this routine, and of every
    other backend why it does not, or that it would.

    Parameters
    ----------
    routine
        A routine or an operation of the plan.
    machine
        A described machine, or the name of an arch with every package (``sm120``); default: the current one.
    fields
        Fields of :class:`kernels.plan.Problem`.

    Raises
    ------
    OptionError
        The routine, the arch or a field is unknown, or fields are named without a routine.
    """
    if routine is None:
        if machine is not None or fields:
            raise OptionError("name a routine: without one the calls of a block are explained, on the current machine")
        return _observed()
    if isinstance(machine, str):
        machine = Machine.from_record({"arch": machine})
    if machine is not None and not isinstance(machine, Machine):
        raise OptionError(f"machine={shown(machine)}; pass a described machine, or the name of an arch")
    return explanation(routine, current_machine() if machine is None else machine, current_config(), **fields)


@exported
@contextmanager
def trace() -> Iterator[context.Calls]:
    """Counts the calls of libraries in a block, by backend and function, and names them for profilers.

    ``with kernels.trace() as calls: layer(x)``, then ``calls["deep_gemm", "gemm_nt"]``. Each call is a range of
    ``torch.profiler`` and, on a GPU, of NVTX: ``fp8_kernels.deep_gemm.gemm_nt``. Decisions are made anew for the
    block; a plan that was kept before it is not seen, and outside of such a block nothing is counted or costs time.
    """
    calls: context.Calls = Counter()
    with context.use(calls=calls):
        yield calls


def route(op: str, device: torch.device, *key: tuple[str, object]) -> Backend:
    """The backend that serves ``op`` for the given fields of :class:`~kernels.plan.Problem`."""
    return cached(_decide, op, device, *key)


def cached(make: Callable[..., T], *key: object) -> T:
    """``make(*key)``, computed once in this context."""
    decisions, whole = context.current().decisions, (make, *key)
    value: T | None = decisions.get(whole)
    return decisions.keep(whole, make(*key)) if value is None else value


def _decide(op: str, device: torch.device, *key: tuple[str, Any]) -> Backend:
    chosen, now = plan(Problem(op, device=device.type, **dict(key))), context.current()
    if now.observed is not None:
        now.observed.append(chosen)
    config = current_config()
    if config.log_decisions:
        log.setLevel(logging.INFO)
        _log_once(logging.INFO, str(chosen))
    for name, why in chosen.reasons:
        if isinstance(why, Failed) and config.fallback == "warn":
            _log_once(logging.WARNING, f"{chosen.problem}: {name} failed, and {chosen.backend} serves instead: {why}")
    backend = backend_of(chosen.backend)
    if now.calls is None:
        return backend

    def failed(error: Exception) -> None:
        if not any(note.startswith(FAILED) for note in getattr(error, "__notes__", ())):  # one function calls another
            error.add_note(f"{FAILED} {backend.name} for {chosen.problem}")
            now.failures.keep((chosen.problem, backend.name), Failed(f"{type(error).__name__}: {error}"))

    return traced(backend, now.calls, failed)


@functools.lru_cache(maxsize=context.MOST)
def _log_once(level: int, text: str) -> None:
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
    log.log(level, text)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
