"""Streams and graphs of :mod:`torch.cuda` on the CPU, for tests of what a caller sees.

Work is given to the current stream as a function and runs at once, unless something before it on that stream still
waits for a sleep; then it runs when the stream, or the device, is synchronised. A stream that waits for another waits
for what that one has not done yet. During a capture work is recorded, and runs on every replay of the graph.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

from oracle.harness.launches import POOL, PRIORITIES

Work = Callable[[], object]


class FakeCuda:
    """What :mod:`oracle.harness.launches` uses of :mod:`torch.cuda`, and :meth:`work` for a kernel."""

    def __init__(self) -> None:
        self.recorded: list[Work] | None = None
        self._current = FakeStream(self)
        self._pools = {priority: [FakeStream(self) for _ in range(POOL)] for priority in PRIORITIES}
        self._next = dict.fromkeys(PRIORITIES, 0)

    def Stream(self, priority: int = 0) -> FakeStream:
        """The next one of the pool of this priority."""
        self._next[priority] += 1
        return self._pools[priority][self._next[priority] % POOL]

    def current_stream(self) -> FakeStream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def work(self, work: Work) -> None:
        """Give work to the current stream."""
        if self.recorded is not None:
            self.recorded.append(work)
        else:
            self._current.take(work)

    def _sleep(self, cycles: int) -> None:
        assert cycles > 0
        self._current.waits = True

    def synchronize(self) -> None:
        for pool in self._pools.values():
            for stream in pool:
                stream.synchronize()
        self._current.synchronize()

    def is_current_stream_capturing(self) -> bool:
        return self.recorded is not None

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    @contextlib.contextmanager
    def graph(self, graph: FakeGraph) -> Iterator[None]:
        self.recorded = graph.recorded
        try:
            yield
        finally:
            self.recorded = None


class FakeStream:
    """Work in order; ``waits`` while a sleep, or a stream that it waits for, keeps the rest from running."""

    _numbers = itertools.count()

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda_stream, self.waits = next(self._numbers), False
        self.held: list[Work] = []
        self._cuda = cuda

    def take(self, work: Work) -> None:
        if self.waits:
            self.held.append(work)
        else:
            work()

    def wait_stream(self, other: FakeStream) -> None:
        """What comes next runs after what ``other`` holds now."""
        if other.waits and self._cuda.recorded is None:
            self.waits = True
            self.held.append(other.synchronize)

    def synchronize(self) -> None:
        if self._cuda.recorded is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.waits = False
        while self.held:
            self.held.pop(0)()


class FakeGraph:
    """Recorded work."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.recorded: list[Work] = []
        self._cuda = cuda

    def replay(self) -> None:
        for work in self.recorded:
            self._cuda.work(work)
