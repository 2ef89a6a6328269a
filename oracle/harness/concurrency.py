"""One kernel called from several threads at once, half of them with other data, each on a stream of its own.

What a kernel keeps between its calls (a workspace, a table, a pointer to either) is one more input, which no signature
names: two threads that share it get each other's numbers, or a mixture, in some of the calls. An engine that overlaps
two batches calls its kernels so. Every answer of every thread is compared with that of the same call alone, until the
time is over. One with the same bits is proved by them. Of the answers with other bits the one that is farthest from the
call alone is returned, for the contract to judge: another order of a sum moves the last bits, another call's data more.

Source: CUDA C++ Programming Guide, "Streams": work on different streams may run at the same time.

Not covered: several processes on one device; a kernel that is wrong in fewer calls than the time allows; poison in what
a kernel allocates in these threads.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.errors import ProcessError
from oracle.harness.memory import Guarded

THREADS = 4
"""Two for each of the two inputs: calls on the same data must not disturb each other either."""
SECONDS = 0.3
"""Enough for thousands of short calls on a GPU; the first race that was found spoiled one call in 200."""
BATCH = 16
"""Most calls of a thread between two comparisons of its answers: a comparison waits for the device."""
SWITCH = 1e-5
"""Seconds after which Python offers the interpreter to another thread (5 ms by default: longer than a call)."""


@dataclass(frozen=True)
class Made:
    """Outputs by name, and the buffers among them that have guard zones."""

    outputs: Mapping[str, Tensor]
    guards: tuple[Guarded, ...] = ()


Call = Callable[[], Made]


def run_concurrently(call: Call, other: Call, device: str) -> tuple[Mapping[str, Tensor], list[str], bool]:
    """Call ``call`` and ``other`` from ``THREADS`` threads; both make new outputs at each call.

    Returns
    -------
    The answer that is farthest from that of the same call alone, or the answer of ``call`` alone when all have the same
    bits; what was written outside of the outputs of any thread; whether the answer is one of ``other``. What either
    raises is raised here.

    Raises ProcessError: the system starts no thread.
    """
    alone = {call: call().outputs, other: other().outputs}
    if device != "cpu":
        torch.cuda.synchronize(device)
    farthest: tuple[float, Mapping[str, Tensor], bool] = (-1.0, alone[call], False)
    lock = threading.Lock()
    damage: list[str] = []
    raised: list[BaseException] = []
    deadline = 0.0

    def begin() -> None:
        nonlocal deadline
        deadline = time.perf_counter() + SECONDS

    start = threading.Barrier(THREADS, action=begin)

    def compare(outputs: Mapping[str, Tensor], called: Call) -> None:
        nonlocal farthest
        if not _same(outputs, alone[called]) and (distance := _distance(outputs, alone[called])) > farthest[0]:
            with lock:
                farthest = max(farthest, (distance, outputs, called is other), key=lambda result: result[0])

    def repeat(called: Call) -> None:
        try:
            start.wait()
            count = 1
            stream = None if device == "cpu" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                while not (raised or damage):
                    answers = [called() for _ in range(count)]
                    if device != "cpu":
                        torch.cuda.current_stream(device).synchronize()
                    damage.extend(d for a in answers for g in a.guards if (d := g.damage()))
                    for a in answers:
                        compare(a.outputs, called)
                    count = min(2 * count, BATCH)
                    if time.perf_counter() >= deadline:
                        break
        except BaseException as error:  # foreign code may raise anything; it is raised again below
            raised.append(error)

    threads = [threading.Thread(target=repeat, args=(other if i % 2 else call,), daemon=True) for i in range(THREADS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        for thread in threads:
            _start(thread)
        for thread in threads:
            thread.join()
    except BaseException:  # a thread that does not start, or an interrupt
        start.abort()  # the other threads wait at the barrier
        raise
    finally:
        sys.setswitchinterval(interval)
    if raised:
        raise raised[0]
    return farthest[1], damage, farthest[2]


def _start(thread: threading.Thread) -> None:
    """Raises ProcessError: the system refuses it (:mod:`oracle.harness.starting`, which a sandbox lacks)."""
    try:
        thread.start()
    except RuntimeError as error:
        raise ProcessError(str(error)) from None


def _same(outputs: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> bool:
    """Whether all outputs have the same bits."""
    return all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(bytes_of(x), bytes_of(y))
        for x, y in ((outputs[name], alone[name]) for name in alone)
    )


def bytes_of(x: Tensor) -> Tensor:
    """A copy of the bytes of the elements of ``x`` (any shape, any dtype) in row-major order, uint8 ``[L]``; an axis of
    one element may have any stride."""
    return x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _distance(outputs: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> float:
    """The largest difference of two elements; inf where one of them is NaN, or where shapes or dtypes differ."""
    largest = 0.0
    for name, y in alone.items():
        x = outputs[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            return math.inf
        left, right = x.to(torch.float64), y.to(torch.float64)
        same = (left == right) | (torch.isnan(left) & torch.isnan(right))
        apart = torch.where(same, 0.0, (left - right).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        largest = max(largest, float(apart.max())) if apart.numel() else largest
    return largest
