"""A process of its own that has torch loaded already: a child of the test's process.

Its standard output and error are the file descriptors that it is given, buffered and encoded as an interpreter would;
what cannot be flushed at the end gives status 120, an exception status 1 and its traceback. The start of an
interpreter is not part of it: ``test_a_full_disk`` and others start one.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Any


@dataclass
class Forked:
    """A child; ``wait`` gives its status, negative for the signal that ended it."""

    pid: int

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def running(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def forked(action: Callable[[], int], *, stdout: int | None, stderr: int, **environment: str) -> Forked:
    """Run ``action`` in a child, whose exit status it returns; ``stdout`` None: closed."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return Forked(pid)
    status = 1
    try:
        os.dup2(stderr, 2)
        os.close(1) if stdout is None else os.dup2(stdout, 1)
        os.closerange(3, 1024)  # as of a new process: a pipe that only a child holds open is never closed
        for server in (forkserver._forkserver, resource_tracker._resource_tracker):  # whose wires are closed now
            type(server).__init__(server)
        os.environ.update(environment)
        default_signals()
        sys.stdout = sys.__stdout__ = stream(1)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = stream(2)  # type: ignore[misc]
        status = _status(action)
    finally:
        os._exit(status)


def default_signals() -> None:
    """The dispositions of an interpreter that has just started: what was ignored still is, no other handler is left.

    Handlers set in C too, which :func:`signal.getsignal` does not know. One of those that returns from SIGSEGV lets the
    instruction fault again, for ever.
    """
    faulthandler.disable()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


LOADED_AGAIN = {"oracle", "generate", "blocks", "figures", "gallery", "hardware"}
"""The package, and what holds its classes: an instance of a class of before is none of the class of now."""


def load_again(*folders: str) -> None:
    """In a child: forget all of ``oracle`` and of what makes the pages, and look for modules in these folders first."""
    sys.path[:0] = folders
    for name in [name for name in sys.modules if name.partition(".")[0] in LOADED_AGAIN]:
        del sys.modules[name]
    importlib.invalidate_caches()


def _status(action: Callable[[], int]) -> int:
    try:
        status = action()
    except SystemExit as stop:
        status = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in filter(None, (sys.stderr, sys.stdout)):
        try:
            stream.flush()
        except OSError:
            status = 120
    return status


def stream(descriptor: int) -> Any:
    """What an interpreter makes of a standard stream; None where it is closed."""
    try:
        os.fstat(descriptor)
    except OSError:
        return None
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    binary = open(descriptor, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115  # open as long as the child
    encoding = os.environ.get("PYTHONIOENCODING") or "utf-8"
    return io.TextIOWrapper(binary, encoding, write_through=unbuffered, line_buffering=os.isatty(descriptor))
