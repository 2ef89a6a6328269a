"""Subjects for the tests of records: they count their calls, and may be slow or interrupted at the third one."""

from __future__ import annotations

import mmap
import os
import signal
import time

from example_subjects import Example, Inputs, Options, _right
from torch import Tensor


class Counter:
    """A count that forked processes share."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 8)

    def __len__(self) -> int:
        return int.from_bytes(self.memory[:8], "little")

    def set(self, count: int) -> None:
        self.memory[:8] = count.to_bytes(8, "little")


calls = Counter()
user = os.getpid()  # who runs `verify`


def _counted(inputs: Inputs, options: Options) -> Tensor:
    calls.set(len(calls) + 1)
    return _right(inputs, options)


def _interrupted(inputs: Inputs, options: Options) -> Tensor:
    """The user's interrupt, in the middle of the third call."""
    if len(calls) == 2:
        os.kill(user, signal.SIGINT)
        time.sleep(60)
    return _counted(inputs, options)


def _slow(inputs: Inputs, options: Options) -> Tensor:
    time.sleep(float(os.environ.get("SLOW_SUBJECT", "0")))
    return _right(inputs, options)


def counting() -> list[Example]:
    return [Example("counting", _counted)]


def interrupting() -> list[Example]:
    return [Example("counting", _interrupted)]


def slow() -> list[Example]:
    return [Example("slow", _slow)]
