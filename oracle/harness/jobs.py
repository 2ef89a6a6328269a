"""Many tasks at once in processes of one machine, their results in order.

Every process makes the function that carries tasks out by itself (``make``), so nothing but tasks, often numbers, and
results goes between processes; the function must give the same result in each of them. Processes come from a server
(:mod:`oracle.harness.server`) that has loaded all they need, so they start in a tenth of a second and inherit no thread
pool and no CUDA context. The one that asks hands a task to each process that is idle, and yields results in the order
of the tasks: what is written from them is the same with any number of processes.

A process that dies costs the task it was at (:class:`Lost`); another one takes its place. An interrupt of the user ends
all of them. Each computes with ``threads`` CPU threads: more than cores in all would wait for each other.

Not covered: other machines (:mod:`oracle.harness.on_ray`), tasks that depend on each other.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Self, TypeVar

import torch

from oracle.errors import OptionError
from oracle.harness import starting
from oracle.harness.server import start

GRACE = 1.0  # seconds in which a process that is asked to end may give back what it holds
R = TypeVar("R")
Make = Callable[[], AbstractContextManager[Callable[[Any], R]]]


@dataclass(frozen=True)
class Lost:
    """The result of a task whose process died; ``cause`` in words."""

    cause: str


class _TimeUp(Exception):
    """No result in time."""


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def divided(jobs: int, threads: int | None) -> int:
    """CPU threads of each of ``jobs`` processes: those asked for, but no more than cores in all; 1 at least.

    Raises OptionError: ``jobs`` or ``threads`` is no positive number.
    """
    for what, value in (("--jobs", jobs), ("--threads", threads)):
        if value is not None and value < 1:
            raise OptionError(f"{what} {value}: at least 1")
    share = max(1, cores() // jobs)
    return share if threads is None else min(threads, share)


def in_order(
    make: Make[R],
    tasks: Sequence[int],
    *,
    jobs: int,
    threads: int = 1,
    started: Callable[[int], None] = lambda task: None,
    together: Sequence[Sequence[int]] | None = None,
    meanwhile: Callable[[int], R] | None = None,
    until: float = math.inf,
    left: dict[int, R | Lost] | None = None,
) -> Generator[R | Lost]:
    """The results of ``tasks``, in this order, by ``jobs`` processes; by this one where ``jobs`` is 1.

    Parameters
    ----------
    make : picklable where ``jobs`` is more than 1; called once in every process, it gives a context manager of the
        function that is called with a task. What that function raises is raised here, at its task's turn.
    started : told of every task when it is handed to a process.
    together : the tasks in the order in which several processes take them, those in groups that share what they
        compute: one process carries out a group. None: each alone, in their order.
    meanwhile : carries out groups in this process, the last ones first, until the others have started.
    until : no task is begun or waited for once :func:`time.monotonic` says so; the results end there.
    left : gets the results of tasks behind the first one without a result, where the results end before the last task:
        in time, by the reader, or by an interrupt.
    """
    if jobs == 1:
        with make() as run:
            for task in tasks:
                if time.monotonic() >= until:
                    return
                started(task)
                yield run(task)
        return
    groups = deque([(task,) for task in tasks] if together is None else map(tuple, together))
    done: dict[int, R | Lost | BaseException] = {}
    with _Starting(lambda: Pool(partial(_each, make), min(jobs, len(tasks)), threads)) as starting_pool:
        while meanwhile is not None and groups and not starting_pool.ended.is_set() and time.monotonic() < until:
            for task in groups.pop():
                started(task)
                done[task] = meanwhile(task)
        pool = starting_pool.pool()
        of_task = {task: pool.submit(group, _first(started)) for group in groups for task in group[:1]}
        of_task |= {task: of_task[group[0]] for group in groups for task in group[1:]}
        members = {of_task[group[0]]: group for group in groups}
        try:
            for task in tasks:
                if task not in done:
                    done |= _results(pool, of_task[task], members[of_task[task]], started, until)
                result = done.pop(task)
                if isinstance(result, BaseException):
                    raise result
                yield result
        except _TimeUp:
            return
        finally:
            if left is not None:
                for number, results in pool.taken():
                    if isinstance(results, list):
                        done |= zip(members.get(number, ()), results, strict=False)
                left |= {task: result for task, result in done.items() if not isinstance(result, BaseException)}


def _first(started: Callable[[int], None]) -> Callable[[tuple[int, ...]], None]:
    return lambda group: started(group[0])


def _results(
    pool: Pool[list[R | Lost | BaseException]],
    number: int,
    group: tuple[int, ...],
    started: Callable[[int], None],
    until: float,
) -> dict[int, R | Lost | BaseException]:
    """The results of a group by task. Where a process died of several, each is carried out alone.

    Raises _TimeUp: :func:`time.monotonic` says ``until`` before.
    """
    result = pool.result(number, until)
    if isinstance(result, list):
        return dict(zip(group, result, strict=True))
    if len(group) == 1 or isinstance(result, BaseException):
        return dict.fromkeys(group, result)
    alone = {task: pool.submit((task,), _first(started)) for task in group}
    return {task: match for task, at in alone.items() for match in _results(pool, at, (task,), started, until).values()}


class _Starting(Generic[R]):
    """A pool that a thread starts while this one goes on, until ``ended`` is set; a context manager, whose end ends the
    pool too."""

    def __init__(self, make: Callable[[], Pool[R]]) -> None:
        self.ended, self._make = threading.Event(), make
        self._pool: Pool[R] | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        thread = threading.Thread(target=self._start, daemon=True)
        starting.thread("the thread that starts the processes of --jobs", thread)
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.wait()
        if self._pool is not None:
            self._pool.__exit__()

    def pool(self) -> Pool[R]:
        """The pool, once it has started; raises what its start raised."""
        self.ended.wait()
        if self._error is not None:
            raise self._error
        assert self._pool is not None
        return self._pool

    def _start(self) -> None:
        try:
            self._pool = self._make()
        except BaseException as error:  # raised by :meth:`pool`, in the thread that asked
            self._error = error
        self.ended.set()


@contextmanager
def _each(make: Make[R]) -> Iterator[Callable[[tuple[int, ...]], list[R | Lost | BaseException]]]:
    """Carries out groups of tasks; what a task raises stands in the place of its result, and of those behind it."""
    with make() as run:

        def all_of(group: tuple[int, ...]) -> list[R | Lost | BaseException]:
            results: list[R | Lost | BaseException] = []
            for task in group:
                try:
                    results.append(run(task))
                except Exception as error:
                    return results + [_portable(error)] * (len(group) - len(results))
            return results

        yield all_of


class Pool(Generic[R]):
    """Processes that carry out tasks of any picklable kind; a context manager, whose end ends them.

    ``environments`` are added to the variables, one to each process in turn.
    """

    def __init__(
        self, make: Make[R], jobs: int, threads: int = 1, environments: Sequence[Mapping[str, str]] = ({},)
    ) -> None:
        each = itertools.islice(itertools.cycle(environments), jobs)
        self._workers = [_Worker(make, threads, environment) for environment in each]
        self._left: deque[tuple[int, Any, Callable[[Any], None]]] = deque()
        self._done: dict[int, R | Lost | BaseException] = {}
        self._given = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.terminate()
        end = time.monotonic() + GRACE
        for worker in self._workers:
            worker.end(max(0.0, end - time.monotonic()))

    def submit(self, task: Any, started: Callable[[Any], None] = lambda task: None) -> int:
        """Hand a task in; the number by which :meth:`result` gives what became of it."""
        self._left.append((self._given, task, started))
        self._given += 1
        self._hand_out()
        return self._given - 1

    def result(self, number: int, until: float = math.inf) -> R | Lost | BaseException:
        """The result of a task, once, or what it raised; waits for it.

        Raises _TimeUp: :func:`time.monotonic` says ``until`` before.
        """
        while number not in self._done:
            seconds = until - time.monotonic()
            if seconds <= 0:
                raise _TimeUp
            self._wait(None if seconds == math.inf else seconds)
        return self._done.pop(number)

    def taken(self) -> list[tuple[int, R | Lost | BaseException]]:
        """The numbers and the results of tasks that have ended and were not asked for, once."""
        results = list(self._done.items())
        self._done.clear()
        return results

    def finished(self, until: float = math.inf) -> Iterator[tuple[int, R | Lost | BaseException]]:
        """The number and the result of every task in the order in which they end, until there is none or
        :func:`time.monotonic` says ``until``; what is left then goes on."""
        while self._done or self._left or any(worker.number is not None for worker in self._workers):
            if not self._done:
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._wait(None if left == math.inf else left)
            while self._done:
                yield self._done.popitem()

    def _wait(self, seconds: float | None) -> None:
        """Take what has ended, and hand out what is left."""
        busy = {worker.wire: worker for worker in self._workers if worker.number is not None}
        for wire in wait(list(busy), seconds):
            assert isinstance(wire, Connection)
            self._take(busy[wire])
        self._hand_out()

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.number is None and self._left:
                worker.number, task, started = self._left.popleft()
                started(task)
                with suppress(BrokenPipeError, ConnectionError):  # it has died: the next look at it says so
                    worker.wire.send_bytes(pickle.dumps(task))

    def _take(self, worker: _Worker) -> None:
        """What a process answers; one that has died is replaced."""
        assert worker.number is not None
        try:
            result: R | Lost | BaseException = pickle.loads(worker.wire.recv_bytes())
        except (EOFError, ConnectionError):
            worker.process.join()
            result = Lost(_cause(worker.process.exitcode))
            worker.wire.close()
            self._workers[self._workers.index(worker)] = worker.another()
        self._done[worker.number], worker.number = result, None


class _Worker:
    """One process, and the number of the task it is at."""

    def __init__(self, make: Make[Any], threads: int, environment: Mapping[str, str]) -> None:
        started, self._asked = start(), (make, threads, environment)
        self.number: int | None = None
        self.wire, theirs = started.Pipe()
        arguments = (theirs, make, threads, environment)
        self.process: BaseProcess = started.Process(target=_serve, args=arguments, daemon=True)
        try:
            with starting.process("a process of --jobs"):
                self.process.start()
        except EOFError:  # the server of --jobs forks, and ends where that is refused
            raise starting.refused("a process of --jobs", "fork was refused") from None
        theirs.close()

    def another(self) -> _Worker:
        return _Worker(*self._asked)

    def end(self, seconds: float) -> None:
        """Wait for the end of a process that was asked to end, and kill it when the time is over."""
        self.wire.close()
        self.process.join(seconds)
        self.process.kill()
        self.process.join()


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process that judged it died by {signal.Signals(-code).name}"
    return f"the process that judged it ended with status {code}"


def _serve(wire: Connection, make: Make[R], threads: int, environment: Mapping[str, str]) -> None:
    """Answer until the other side is gone."""
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the user interrupts the run, which then ends this process
    torch.set_num_threads(threads)
    run: Callable[[Any], R] | None = None
    refused: Exception | None = None
    with suppress(EOFError, ConnectionError, KeyboardInterrupt), ExitStack() as stack:  # asked to end, in a task
        try:
            run = stack.enter_context(make())
        except Exception as error:  # raised where the first result is due, as any of a task
            refused = _portable(error)
        while True:
            task = pickle.loads(wire.recv_bytes())
            try:
                result: object = refused if run is None else run(task)
            except Exception as error:
                result = _portable(error)
            wire.send_bytes(pickle.dumps(result))


def _portable(error: Exception) -> Exception:
    """The error, or its words where another process could not read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever foreign classes do
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
