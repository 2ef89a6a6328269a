"""Processes and threads that the system refuses to start: one typed error.

A limit of processes (``RLIMIT_NPROC``, ``pids.max`` of a control group) or of memory refuses both. Source: Linux manual
pages fork(2) and pthread_create(3): EAGAIN, ENOMEM.

Not covered: what a kernel starts by itself; a refusal there is what it raises.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator

from oracle.errors import ProcessError

REFUSED = (errno.EAGAIN, errno.ENOMEM)


@contextlib.contextmanager
def process(what: str) -> Iterator[None]:
    """Around the start of ``what``, and of nothing else. Raises ProcessError where the system refuses it."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        raise refused(what, error.strerror or str(error)) from None


def thread(what: str, thread: threading.Thread) -> None:
    """Start a thread. Raises ProcessError where the system refuses it."""
    try:
        thread.start()
    except RuntimeError as error:  # "can't start new thread"; nothing else of a thread that is new
        raise refused(what, str(error)) from None


def refused(what: str, reason: str) -> ProcessError:
    """The error."""
    way_out = "end other processes of this user, or raise the limit (`ulimit -u`, pids.max)"
    return ProcessError(f"{what} cannot be started ({reason}); {way_out}")
