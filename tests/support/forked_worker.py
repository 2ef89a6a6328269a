"""Workers of the harness with torch loaded already: the launcher and the worker are children of the test's process.

Requests, limits, signals, memory and the end of descendants are as of any worker. Not part of it: the start of the two
interpreters and their program, which names nobody, and the sandbox; tests of those start real ones.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from oracle.harness import launcher, program, worker
from tests.support.forked import Forked, default_signals, stream


class Launcher:
    """What ``subprocess.Popen`` of the launcher offers to :class:`oracle.harness.process.Worker`."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: object) -> None:
        assert command[-1].endswith(program.LAUNCHER)
        ours, theirs = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os.dup2(ours[0], 0)
                os.dup2(theirs[1], 1)
                os.dup2(theirs[1], 2)
                for descriptor in range(3, 1024):
                    if descriptor not in pass_fds:
                        _close(descriptor)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                sys.stdout, sys.stderr = stream(1), stream(2)
                os._exit(launched())
            finally:
                os._exit(1)
        os.close(ours[0])
        os.close(theirs[1])
        self.stdin, self.stdout = open(ours[1], "wb"), open(theirs[0], "rb")  # noqa: SIM115  # as long as the launcher
        self._ended = False

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 0)
        while timeout is not None and Forked(self.pid).running():
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("launcher", timeout)
            time.sleep(0.005)
        return Forked(self.pid).wait()


SHIM = SimpleNamespace(
    Popen=Launcher, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
)


def launched() -> int:
    """The launcher, whose worker does not become another program."""
    line = launcher._line(0)
    launcher._exec = _worker
    return launcher.main(json.loads(line)) if line else 1


def _worker(plan: dict[str, Any]) -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in range(3, 1024):
        if descriptor != plan["channel"]:
            _close(descriptor)
    os.chdir(plan["folder"])
    os.environ.clear()
    os.environ.update(plan["environment"])
    for name in [name for name in sys.modules if name.startswith("tests.support.subjects")]:
        del sys.modules[name]  # a kernel that counts its calls begins at none
    signal.set_wakeup_fd(-1)
    default_signals()
    sys.stdout, sys.stderr = stream(1), stream(2)
    torch.set_num_threads(torch.get_num_threads())  # a pool of its own, before several threads ask for one at once
    load = worker.Server.load
    worker.Server.load = lambda self, request: load(self, {**request, "hidden": []})  # type: ignore[method-assign]
    worker.main(socket.socket(fileno=plan["channel"]))
    for out in (sys.stdout, sys.stderr):
        assert isinstance(out, io.TextIOWrapper)
        out.flush()
    os._exit(0)


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:  # it is not open
        return
