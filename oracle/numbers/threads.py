"""How many threads an operation on the CPU takes.

After an operation that torch spreads over threads, those threads wait for the next one without sleeping, some 10 ms
each. A judgement that fails is a hundred short operations with other work between them: on one thread they take as
long, and leave the other processors free. What is worth all threads asks for them (:func:`all_threads`).

Not covered: devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_ALL: ContextVar[int | None] = ContextVar("all threads", default=None)


def threads() -> int:
    """The number of threads that the user gave torch."""
    return _ALL.get() or torch.get_num_threads()


@contextmanager
def one_thread() -> Iterator[None]:
    """Operations of torch in this thread start no other one."""
    given = threads()
    token = _ALL.set(given)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(given)
        _ALL.reset(token)


@contextmanager
def all_threads() -> Iterator[None]:
    """Operations of torch take all threads, also inside :func:`one_thread`."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)
