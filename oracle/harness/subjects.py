"""Routines under test, found by name: the entry points of group ``fp8_oracle.subjects``.

An entry point is a function without arguments that returns records with the attributes of :class:`Subject`. The
oracle never imports what it judges; an installed distribution registers itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from torch import Tensor

from oracle.errors import SubjectError

GROUP = "fp8_oracle.subjects"


class Subject(Protocol):
    """One routine on one backend.

    ``numerics`` is the declared accumulation or None; ``why_not`` the reason why it cannot run on this machine;
    ``run`` gets the contract's inputs and options and returns its output (a dict when there are several), or
    raises ``NotImplementedError`` for a call that the backend does not offer.
    """

    @property
    def name(self) -> str: ...
    @property
    def contract(self) -> str: ...
    @property
    def arch(self) -> str: ...
    @property
    def numerics(self) -> str | None: ...
    @property
    def device(self) -> str: ...
    def why_not(self) -> str | None: ...
    def run(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> Tensor | dict[str, Tensor]: ...


@dataclass(frozen=True)
class Provider:
    """One entry point: its subjects, or the reason why there are none."""

    name: str
    target: str
    subjects: tuple[Subject, ...] = ()
    problem: str | None = None


def providers() -> list[Provider]:
    """Every registered entry point, loaded; a broken one carries its problem instead of subjects."""
    unique = {(point.name, point.value): point for point in entry_points(group=GROUP)}
    return [_load(point) for _, point in sorted(unique.items())]


def provider(target: str) -> Provider:
    """The subjects of ``MODULE:CALLABLE``, a function that no distribution has registered.

    Raises SubjectError: it cannot be loaded, or ``target`` is not of that form.
    """
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise SubjectError(f"{target!r} is no provider of subjects; name a function as MODULE:CALLABLE")
    loaded = _load(EntryPoint(name, target, GROUP))
    if loaded.problem is not None:
        raise SubjectError(loaded.problem)
    return loaded


def _load(point: EntryPoint) -> Provider:
    # Third-party code may raise anything while it loads; that is the problem that is reported.
    try:
        subjects = tuple(point.load()())
    except Exception as error:
        why = f"{type(error).__name__}: {error}; `fp8-oracle doctor` says which package was found"
        problem = f"subjects {point.name!r} ({point.value}) cannot be loaded: {why}"
        return Provider(point.name, point.value, problem=problem)
    return Provider(point.name, point.value, subjects)
