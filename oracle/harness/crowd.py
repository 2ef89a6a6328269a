"""One kernel called from several threads at once, half of them with other data, each on a stream of its own.

What a kernel keeps between its calls (a workspace, a table, a pointer to either) is one more input that no signature
names: two threads that share it get each other's numbers, or a mixture, in a call now and then. Engines that overlap
two batches call so. The threads run until the time is over or an answer has other bits than the same call alone.

Not covered: several processes on one device; a kernel that is wrong in fewer calls than the time allows.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

THREADS = 4
SECONDS = 0.3
BATCH = 16
"""Calls of a thread between two looks at its answers: a look waits for the device."""
SWITCH = 1e-5
"""Seconds after which Python offers the interpreter to another thread (5 ms by default: longer than a call)."""

Call = Callable[[], Mapping[str, Tensor]]


def crowded(call: Call, other: Call, device: str) -> Mapping[str, Tensor]:
    """The first answer of ``call`` with other bits than its answer alone, or that one when every answer has them.

    ``call`` and ``other`` return outputs by name, new ones at each call. What either raises is raised here.
    """
    _wait(device)
    alone = call()
    _wait(device)
    found: list[Mapping[str, Tensor]] = []
    raised: list[BaseException] = []
    start, deadline = threading.Barrier(THREADS), time.perf_counter() + SECONDS

    def body(mine: Call) -> None:
        try:
            start.wait()
            with _own_stream(device):
                while not (found or raised) and time.perf_counter() < deadline:
                    answers = [mine() for _ in range(BATCH if device != "cpu" else 1)]
                    if device != "cpu":
                        torch.cuda.current_stream().synchronize()
                    if mine is call:
                        found.extend(a for a in answers if not all(_same(a[name], alone[name]) for name in alone))
        except BaseException as error:  # foreign code may raise anything; it is raised again below
            raised.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        threads = [threading.Thread(target=body, args=(other if i % 2 else call,)) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if raised:
        raise raised[0]
    return found[0] if found else alone


def _own_stream(device: str) -> contextlib.AbstractContextManager[object]:
    if device == "cpu":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def _same(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
