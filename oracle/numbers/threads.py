"""How many threads an operation on the CPU takes.

After an operation that torch spreads over threads, those threads wait for the next one without sleeping, some 10 ms
each. A judgement that fails is a hundred short operations with other work between them: on one thread they take as
long, and leave the other processors free. What is worth all threads asks for them (:func:`all_threads`).

Not covered: devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch

_ALL: ContextVar[int | None] = ContextVar("all threads", default=None)


def threads() -> int:
    """The number of threads that the user gave torch."""
    return _ALL.get() or torch.get_num_threads()


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before, token = torch.get_num_threads(), _ALL.set(threads())
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _ALL.reset(token)


def one_thread() -> AbstractContextManager[None]:
    """A scope in which operations of torch in this thread start no other one."""
    return _torch_threads(1)


def all_threads() -> AbstractContextManager[None]:
    """A scope in which they take all threads, also inside :func:`one_thread`."""
    return _torch_threads(threads())
