"""The server that the processes of ``--jobs`` are forked from, and its start.

It loads :mod:`oracle.harness.preload` once, and every process starts with that. This module loads nothing itself, so
the command line starts the server first and loads torch beside it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

from oracle.harness import starting

PRELOADED = ["oracle.harness.interrupts", "oracle.harness.preload"]


def context() -> ForkServerContext:
    """How processes are started."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(PRELOADED)
    return forkserver


def start() -> ForkServerContext:
    """How processes are started, once their server is: an interrupt while it loads ends it without a traceback.

    Raises ProcessError: the system starts no process.
    """
    with starting.process("the server of --jobs"):
        return _started()


def _started() -> ForkServerContext:
    resource_tracker.ensure_running()  # first, as its own start ends with SIGINT unblocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        started = context()
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return started


WHOLE = (
    "--html",
    "--json",
    "--junit",
    "--markdown",
    "--sarif",
    "--record",
    "--profile",
    "--quiet",
    "--verbose",
    "-q",
    "-v",
)
"""Flags with which ``verify`` still judges all that there is."""


def start_if_asked(words: Sequence[str]) -> None:
    """Start the server where the words of a command ask for more than one process, or for a whole run on several
    cores."""
    flags = [word.partition("=")[0] for word in words[1:] if word.startswith("-") and word != "-"]
    if words[:1] == ["verify"] and set(flags) <= set(WHOLE) and len(os.sched_getaffinity(0)) > 1:
        start()
        return
    numbers = [word.removeprefix("--jobs=") for word in words if word.startswith("--jobs=")]
    numbers += [after for word, after in zip(words, words[1:], strict=False) if word == "--jobs"]
    if any(number.isdecimal() and int(number) > 1 for number in numbers):
        start()
