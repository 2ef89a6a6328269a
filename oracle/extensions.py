"""Records that other distributions add, by entry point.

    fp8_oracle.families     a RoutineFamily: contracts, cases, faults, goldens     (oracle.routines.family)
    fp8_oracle.formats      an iterable of Format records                          (oracle.numbers.formats)
    fp8_oracle.schedules    an iterable of Schedule records                        (oracle.tensorcore.schedules)
    fp8_oracle.bindings     an iterable of Binding records                         (oracle.bindings.binding)
    fp8_oracle.subjects     a function that returns subjects                       (oracle.harness.subjects)

A group is read when something of it is asked for that is not built in. An entry point that cannot be loaded, or not in
``LOADING`` seconds, or gives something else, is one :class:`~oracle.errors.ExtensionError` that names it: what it
should have added is missing, and nothing stands in for it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from oracle.errors import ExtensionError

Record = TypeVar("Record")
LOADING = 120.0
"""Seconds in which foreign code must have been imported, on a busy machine too."""


class Expired(BaseException):
    """Foreign code did not end in time; no ``except Exception`` of that code takes this."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise Expired in a block that runs longer.

    A block has no limit outside of the main thread, or where somebody else's alarm is set.
    """
    if threading.current_thread() is not threading.main_thread() or any(signal.getitimer(signal.ITIMER_REAL)):
        yield
        return

    def expire(*_: object) -> None:
        raise Expired(f"it did not load within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def added(group: str, kind: type[Record], *, known: Iterable[str], many: bool) -> tuple[Record, ...]:
    """The records of a group, ordered by the names of their entry points.

    Parameters
    ----------
    kind : the class of a record; each has a ``name``.
    known : names that are taken.
    many : an entry point gives an iterable of records, else one record.

    Raises
    ------
    ExtensionError
        An entry point cannot be loaded, gives no such record, or a name that is taken.
    """
    taken = dict.fromkeys(known, "fp8-oracle")
    results: list[Record] = []
    for point in sorted({(p.name, p.value): p for p in entry_points(group=group)}.values(), key=lambda p: p.name):
        loaded = _load(point, lambda value: list(value) if many else [value])
        for record in loaded:
            if not isinstance(record, kind):
                raise ExtensionError(f"{_said(point)} gives a {type(record).__name__}; it must give {kind.__name__}")
            name = str(getattr(record, "name", ""))
            if name in taken:
                raise ExtensionError(f"{_said(point)} adds {name!r}, which {taken[name]} has already")
            taken[name] = _said(point)
            results.append(record)
    return tuple(results)


def _load(point: EntryPoint, records: Callable[[Any], list[Any]]) -> list[Any]:
    # Whatever foreign code raises while it loads is the finding, so it is caught whole and said.
    try:
        with within(LOADING):
            return records(point.load())
    except (Exception, SystemExit, Expired) as error:
        text = f"{type(error).__name__}: {error}"
        raise ExtensionError(f"{_said(point)} cannot be loaded: {text}; repair or uninstall it") from error


def _said(point: EntryPoint) -> str:
    return f"entry point {point.name!r} of {point.group} ({point.value})"
