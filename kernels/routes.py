"""The backend module that a plan chooses, cached per class of problems.

The cache belongs to one machine and one configuration and is cleared when either is replaced. A verb passes only what
its decision depends on, so that a changing number of tokens does not grow the cache.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from kernels import config as config_module
from kernels import platform as platform_module
from kernels.errors import OptionError
from kernels.plan import MODULES, Plan, Problem, plan

_cache: dict[tuple[object, ...], Any] = {}
_owner: tuple[object, object] = (None, None)
_only: str | None = None


@contextmanager
def only(backend: str) -> Iterator[None]:
    """Within the block, plan this backend only, for the operations that list it (conformance runs of one backend).

    Where it cannot serve a problem, the plan's error says why.
    """
    global _only
    if backend not in MODULES:
        raise OptionError(f"unknown backend {backend!r}; known: {', '.join(MODULES)}")
    before, _only = _only, backend
    _cache.clear()
    try:
        yield
    finally:
        _only = before
        _cache.clear()


def route(op: str, device: torch.device, *key: tuple[str, object]) -> ModuleType:
    """The backend module that serves ``op`` for the given fields of :class:`~kernels.plan.Problem`."""
    return routed(op, device, *key)[0]


def routed(op: str, device: torch.device, *key: tuple[str, object]) -> tuple[ModuleType, Plan]:
    """As :func:`route`, with the plan."""
    return cached(_decide, op, device.type, *key)  # type: ignore[no-any-return]


def cached(make: Callable[..., Any], *key: object) -> Any:
    """``make(*key)``, computed once for this machine and configuration."""
    found = lookup((make, *key))
    return store((make, *key), make(*key)) if found is None else found


def lookup(key: tuple[object, ...]) -> Any:
    """The value stored under ``key`` for this machine and configuration, or None."""
    global _owner
    machine, config = platform_module.current_machine(), config_module.current_config()
    if _owner[0] is not machine or _owner[1] is not config:
        _cache.clear()
        _owner = (machine, config)
    return _cache.get(key)


def store(key: tuple[object, ...], value: Any) -> Any:
    """Store ``value`` under ``key`` until the machine or the configuration is replaced."""
    _cache[key] = value
    return value


def _decide(op: str, device: str, *key: tuple[str, object]) -> tuple[ModuleType, Plan]:
    problem = Problem(op, device=device, **dict(key))  # type: ignore[arg-type]  # fields named by the verbs
    chosen = plan(problem, platform_module.current_machine(), config_module.current_config(), only=_only)
    return importlib.import_module(MODULES[chosen.backend]), chosen


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
