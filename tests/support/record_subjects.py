"""Subjects for the tests of records: they count their calls, and may be slow or interrupted at the third one."""

from __future__ import annotations

import os
import time

from example_subjects import Example, Inputs, Options, _right
from torch import Tensor

calls: list[int] = []


def _counted(inputs: Inputs, options: Options) -> Tensor:
    calls.append(len(calls))
    return _right(inputs, options)


def _interrupted(inputs: Inputs, options: Options) -> Tensor:
    if len(calls) == 2:
        raise KeyboardInterrupt
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
