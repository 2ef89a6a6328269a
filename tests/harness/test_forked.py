"""Children of the test's process end by the signals that end an interpreter, whatever handlers that process has."""

from __future__ import annotations

import ctypes
import faulthandler
import signal
from collections.abc import Callable

import pytest

from oracle.harness import process
from oracle.harness.validation import validate
from tests.support import forked, forked_worker

GEMM = "fp8_gemm_nt"
CASE = f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=2,n=128,k=128/family=randn/seed=2"


def child() -> int:
    """The signal that ends a child which reads address 0; SIGPROF where it faults for ever."""

    def action() -> int:
        signal.setitimer(signal.ITIMER_PROF, 0.2)
        ctypes.string_at(0)
        return 0

    return -forked.forked(action, stdout=1, stderr=2).wait()


def worker() -> int:
    """The signal that a worker is said to end by; 0 where it does not answer."""
    setattr(process, "subprocess", forked_worker.SHIM)  # noqa: B010  # mypy refuses the assignment
    (failure,) = validate("tests.support.subjects.broken:dies", GEMM, case=[CASE], limit=1).failures
    return signal.SIGSEGV if "died by SIGSEGV" in failure.verdict.summary else 0


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("started", "sabotaged", "ends"),
    [
        (child, False, signal.SIGSEGV),
        (child, True, signal.SIGPROF),
        (worker, False, signal.SIGSEGV),
        (worker, True, 0),
    ],
)
@pytest.mark.usefixtures("unexplained")
def test_handlers_set_in_c(started: Callable[[], int], sabotaged: bool, ends: int) -> None:
    """Under a handler that returns, which faulthandler calls after its own: the instruction faults again."""

    def action() -> int:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
        libc.signal(signal.SIGSEGV, ctypes.cast(libc.getpid, ctypes.c_void_p))
        faulthandler.enable()
        if sabotaged:
            for module in (forked, forked_worker):
                module.default_signals = lambda: None
        return started()

    assert forked.forked(action, stdout=1, stderr=2).wait() == ends
