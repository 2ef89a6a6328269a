"""How much a judgement explains: a level, given to it or chosen for everything inside a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum

from oracle.errors import OptionError, among


class Explain(StrEnum):
    """How much a judgement says of why an output fails: nothing; what a budget of about the judgement's own price
    allows (everything for a small call on the CPU); or everything (:mod:`oracle.diagnosis.explain`)."""

    OFF = "off"
    QUICK = "quick"
    FULL = "full"


_chosen: ContextVar[Explain] = ContextVar("explain", default=Explain.QUICK)


def explain_level(name: str | None) -> Explain:
    """The level of this name; None is the one chosen by :func:`explaining`, quick where none is.

    Raises
    ------
    OptionError
        There is no such level.
    """
    if name is None:
        return _chosen.get()
    try:
        return Explain(name)
    except ValueError:
        raise OptionError(f"explain={name!r} is no level; {among(name, Explain)}") from None


@contextmanager
def explaining(name: str | None) -> Iterator[None]:
    """The level of every explanation inside that names none of its own; None changes nothing."""
    token = _chosen.set(explain_level(name))
    try:
        yield
    finally:
        _chosen.reset(token)
