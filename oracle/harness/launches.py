"""The ways in which a user launches a kernel on a GPU, each with its answer read as that user reads it.

    side stream     on a stream that is not the default one
    side work held  the same, while every other stream of torch's pool sleeps
    late inputs     the inputs are written on the caller's stream, behind a sleep, with no host synchronisation
    graph           captured; the output poisoned; replayed
    other inputs    captured on other inputs and replayed; then these inputs in place, the output poisoned, replayed
    first of two    two calls captured in one graph, this one first; both outputs poisoned; replayed twice
    second of two   the same, this one second

The answer is what the caller's stream sees: it is read after a synchronisation of that stream and of no other. Work
that a kernel leaves on a stream of its own, without making the caller's stream wait for it, is not in that answer when
the stream sleeps (*side work held*); a kernel whose stream does not wait for the caller's computes from the data that
were there before (*late inputs*: other inputs of the same shapes). In both, the kernel is called on the other inputs
first, so that memory which the allocator hands out again holds another answer, and nothing that Python allocates is
poisoned: the poison is written on the caller's stream, which a right kernel's stream need not wait for.

Not covered: streams that a library makes by itself with ``cudaStreamCreateWithFlags`` cannot be held; work left on them
is seen only when it loses the race against the copy of the output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from oracle.harness.memory import guarded

SIDE, HELD, LATE = "side stream", "side work held", "late inputs"
GRAPH, REPLACED, FIRST, SECOND = "graph", "other inputs", "first of two", "second of two"
UNPOISONED = (HELD, LATE)
"""Modes during which what Python allocates is not poisoned."""
POOL = 32
"""Streams of each priority in torch's pool, handed out in turn (``kStreamsPerPool``, c10/cuda/CUDAStream.cpp)."""
PRIORITIES = (0, -1)
CLOCK = 2e9
"""Cycles a second of a sleep, at most: an H100 boosts to 1.98 GHz, so that a sleep is never shorter than asked for."""
LEAST, MOST = 0.05, 1.0
"""Seconds of a sleep: four times the call, which is launched and read meanwhile, within these limits."""
CAPTURING = (
    "not permitted when stream is capturing",  # cudaErrorStreamCaptureUnsupported: it waits, or allocates
    "previous error during capture",  # cudaErrorStreamCaptureInvalidated: it did so, and went on
    "during CUDA graph capture",  # torch's own words for a copy between the device and pageable memory
)
"""Messages of what cannot be captured: whoever captures it gets an error, and no wrong number."""

Made = Mapping[str, Tensor]
Read = TypeVar("Read")


class Uncapturable(Exception):
    """The kernel does what CUDA does not permit during a capture."""


@dataclass(frozen=True)
class Call:
    """One call: ``run`` calls the kernel and names its outputs, ``put`` writes its inputs into the buffers that ``run``
    reads and ``put_other`` other inputs of the same shapes, both on the current stream."""

    run: Callable[[], Made]
    put: Callable[[], None]
    put_other: Callable[[], None]


def launch(
    mode: str, call: Call, beside: Call, read: Callable[[Made], Read], *, poison: int, cuda: Any = torch.cuda
) -> tuple[Made, Read]:
    """The outputs of ``call`` launched in this mode, and what ``read`` made of them on the caller's stream.

    ``beside`` is a call of its own on the other inputs. ``cuda`` offers what is used of :mod:`torch.cuda`.

    Raises Uncapturable: the kernel cannot be captured. What else the kernel raises passes through.
    """
    if mode in (SIDE, HELD, LATE):
        return _on_stream(mode, call, read, cuda)
    before, after = {FIRST: (None, beside), SECOND: (beside, None)}.get(mode, (None, None))
    if mode == REPLACED:
        call.put_other()
    calls = [one for one in (before, call, after) if one is not None]
    graph, result = _captured(calls, cuda)
    mine = result[calls.index(call)]

    def replay() -> None:
        for outputs in result:
            _poison(outputs, poison)
        graph.replay()

    replay()
    if mode == REPLACED:
        cuda.current_stream().synchronize()
        call.put()
    if mode != GRAPH:
        replay()
    cuda.current_stream().synchronize()
    return mine, read(mine)


def _on_stream(mode: str, call: Call, read: Callable[[Made], Read], cuda: Any) -> tuple[Made, Read]:
    """The answer on a stream of its own, which the caller's default stream does not wait for."""
    own = cuda.Stream()
    if mode == SIDE:
        own.wait_stream(cuda.current_stream())
    else:
        pool = [cuda.Stream(priority=priority) for priority in PRIORITIES for _ in range(POOL)]
        call.put_other()
        start = time.perf_counter()
        call.run()
        cuda.synchronize()
        seconds = min(MOST, max(LEAST, 4 * (time.perf_counter() - start)))
        if mode == HELD:
            call.put()
            cuda.synchronize()
        sleeping = [own] if mode == LATE else [s for s in pool if s.cuda_stream != own.cuda_stream]
        for stream in sleeping:
            with cuda.stream(stream):
                cuda._sleep(int(seconds * CLOCK))
    with cuda.stream(own):
        if mode == LATE:
            call.put()
        result = call.run()
        own.synchronize()
        return result, read(result)


def _captured(calls: Sequence[Call], cuda: Any) -> tuple[Any, list[Made]]:
    """A graph of these calls, each of which was made before, and their outputs."""
    for call in calls:
        call.run()
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    try:
        with cuda.graph(graph):
            outputs = [call.run() for call in calls]
    except RuntimeError as error:
        cause: BaseException | None = error  # the end of a failed capture raises an error of its own
        while cause is not None:
            if any(message in str(cause) for message in CAPTURING):
                raise Uncapturable(str(cause).partition("\n")[0]) from error
            cause = cause.__context__
        raise
    return graph, outputs


def _poison(made: Made, poison: int) -> None:
    """Every element of the outputs as though nobody had written it."""
    for name, x in made.items():
        once = x.detach()[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())]  # shared elements
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
        fresh = guarded(name, once.shape, x.dtype, x.device, poison=poison).tensor
        once.view(bits).copy_(fresh.view(bits))
