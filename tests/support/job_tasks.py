"""Tasks of a pool of processes: some die, raise or take their time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from oracle.errors import OptionError

DIES, RAISES, SLOW = 3, 100, 1


@contextmanager
def tasks() -> Iterator[Callable[[int], tuple[int, int]]]:
    """The number and the threads of the process."""

    def run(number: int) -> tuple[int, int]:
        if number == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == RAISES:
            raise OptionError("task 100: no such number; give a smaller one")
        time.sleep(0.3 if number == SLOW else 0)
        return number, torch.get_num_threads()

    yield run


@contextmanager
def slowly() -> Iterator[Callable[[int], int]]:
    """The square of the number, after two seconds."""

    def run(number: int) -> int:
        time.sleep(2.0)
        return number * number

    yield run


@contextmanager
def numbers() -> Iterator[Callable[[int], int]]:
    """The number itself."""
    yield lambda number: number


@contextmanager
def first_never() -> Iterator[Callable[[int], int]]:
    """The number itself; for the first one after an hour."""

    def run(number: int) -> int:
        time.sleep(0 if number else 3600)
        return number

    yield run
