"""The server that the processes of ``--jobs`` are forked from, and its start.

It loads :mod:`oracle.harness.preload` once, and every process starts with that. This module loads nothing itself, so
the command line starts the server first and loads torch beside it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

PRELOADED = ["oracle.harness.preload"]


def context() -> ForkServerContext:
    """How processes are started."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(PRELOADED)
    return forkserver


def start_if_asked(words: Sequence[str]) -> None:
    """Start the server where the words of a command ask for more than one process."""
    numbers = [word.removeprefix("--jobs=") for word in words if word.startswith("--jobs=")]
    numbers += [after for word, after in zip(words, words[1:], strict=False) if word == "--jobs"]
    if any(number.isdecimal() and int(number) > 1 for number in numbers):
        context()
        forkserver.ensure_running()
