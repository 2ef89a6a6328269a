"""Subjects that end, damage or leave their process, each in one way, and right ones before and after them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

import torch
from example_subjects import Example, Inputs, Options, _right
from torch import Tensor


class Mine(KeyboardInterrupt):
    """An interrupt of the subject's own."""


class Unreadable(Exception):
    """An error whose message raises."""

    def __str__(self) -> str:
        raise SystemExit


def exits(inputs: Inputs, options: Options) -> Tensor:
    sys.exit(0)


def interrupts(inputs: Inputs, options: Options) -> Tensor:
    raise Mine("of my own")


def interrupts_plainly(inputs: Inputs, options: Options) -> Tensor:
    raise KeyboardInterrupt


def stops_a_generator(inputs: Inputs, options: Options) -> Tensor:
    raise GeneratorExit


def raises_unreadably(inputs: Inputs, options: Options) -> Tensor:
    raise Unreadable


def ends(inputs: Inputs, options: Options) -> Tensor:
    os._exit(0)


def reads_address_0(inputs: Inputs, options: Options) -> Tensor:
    ctypes.string_at(0)
    return _right(inputs, options)


def is_killed(inputs: Inputs, options: Options) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return _right(inputs, options)


def hangs(inputs: Inputs, options: Options) -> Tensor:
    """With a child that would outlive it."""
    os.fork()
    while True:
        time.sleep(1)


def writes_to_every_file(inputs: Inputs, options: Options) -> Tensor:
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\xff" * 64)
        except OSError:  # not open, or not for writing
            continue
    return _right(inputs, options)


def gives_nothing(inputs: Inputs, options: Options) -> None:
    return None


def gives_no_values(inputs: Inputs, options: Options) -> Tensor:
    return _right(inputs, options).to("meta")


def gives_freed_memory(inputs: Inputs, options: Options) -> Tensor:
    out = _right(inputs, options)
    out.untyped_storage().resize_(0)
    return out


def comes_back_twice(inputs: Inputs, options: Options) -> Tensor:
    os.fork()
    return _right(inputs, options)


def talks(inputs: Inputs, options: Options) -> Tensor:
    print("\x1b[2Jall is well\x9b")
    return _right(inputs, options)


def gives_a_view(inputs: Inputs, options: Options) -> Tensor:
    """Padded, transposed, yet to be negated."""
    right = -_right(inputs, options)
    padded = torch.empty(right.shape[1], right.shape[0] + 3, dtype=right.dtype)[:, : right.shape[0]].t()
    return torch._neg_view(padded.copy_(right))


def right(inputs: Inputs, options: Options) -> Tensor:
    return _right(inputs, options)


CRASHED: dict[Callable[..., object], str] = {
    exits: "SystemExit: 0",
    interrupts: "Mine: of my own",
    interrupts_plainly: "KeyboardInterrupt: no message",
    stops_a_generator: "GeneratorExit: no message",
    raises_unreadably: "Unreadable: its message cannot be read",
    ends: "ended the process with status 0",
    reads_address_0: "died by SIGSEGV (invalid memory access)",
    is_killed: "died by SIGKILL",
    hangs: "hangs: no answer within 2 s",
    writes_to_every_file: "its process sent no sound reply",
    gives_nothing: "out is a NoneType",
    gives_no_values: "on meta",
    gives_freed_memory: "the output cannot be judged",
}
PASSED: tuple[Callable[..., object], ...] = (comes_back_twice, talks, gives_a_view, right)


def subjects() -> list[Example]:
    return [Example(work.__name__, work) for work in (*CRASHED, *PASSED)]


def hanging() -> list[Example]:
    return [Example("hangs", hangs)]


def exiting() -> list[Example]:
    sys.exit(0)


def dying() -> list[Example]:
    os._exit(0)


def nameless() -> list[Example]:
    return [Example(3, right)]  # type: ignore[arg-type]


def no_subjects() -> int:
    return 3
