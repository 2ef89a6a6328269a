"""A pool of processes gives what one process gives, in its order; what is lost costs one task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import job_tasks
import pytest

from oracle.errors import OptionError
from oracle.harness import jobs as jobs_module
from oracle.harness import server
from oracle.harness.jobs import Lost, divided, in_order
from tests.support.paths import ROOT

DIED = Lost("the process that judged it died by SIGKILL")


def test_results_come_in_order_and_a_process_that_dies_costs_its_task() -> None:
    started: list[int] = []
    found = list(in_order(job_tasks.tasks, range(6), jobs=2, threads=1, started=started.append))
    assert [f[0] if isinstance(f, tuple) else f for f in found] == [
        0,
        1,
        2,
        DIED,
        4,
        5,
    ]
    assert sorted(started) == list(range(6)) and {f[1] for f in found if isinstance(f, tuple)} == {1}


def test_an_error_is_raised_at_its_turn() -> None:
    results = in_order(job_tasks.tasks, [0, 2, job_tasks.RAISES, 4], jobs=2)
    assert [next(results), next(results)] == [(0, 1), (2, 1)]
    with pytest.raises(OptionError, match="give a smaller one"):
        next(results)


def test_processes_end_with_the_reader() -> None:
    """What a caller does not read is not computed on: closing the results kills the processes."""
    results = in_order(_pids, range(8), jobs=2)
    pids = {pid for pid in (next(results), next(results)) if not isinstance(pid, Lost)}
    results.close()
    assert pids and os.getpid() not in pids
    assert not list(takewhile(lambda pid: os.path.exists(f"/proc/{pid}/stat") and _state(pid) != "Z", pids))


def test_a_group_is_one_process_and_a_death_in_it_costs_its_task() -> None:
    """Results in the order of the tasks, whatever the order of the groups; a member that dies takes no other along."""
    groups = [(4, 3, 2), (1, 0)]
    found = list(in_order(job_tasks.tasks, range(5), jobs=2, together=groups))
    assert [f if isinstance(f, Lost) else f[0] for f in found] == [0, 1, 2, DIED, 4]
    pids = dict(zip(range(5), in_order(_pids, range(5), jobs=2, together=groups), strict=True))
    assert pids[4] == pids[3] == pids[2] and pids[1] == pids[0]


def test_an_error_in_a_group_is_raised_at_its_turn() -> None:
    results = in_order(job_tasks.tasks, [0, job_tasks.RAISES, 2], jobs=2, together=[(0, job_tasks.RAISES), (2,)])
    assert next(results) == (0, 1)
    with pytest.raises(OptionError, match="give a smaller one"):
        next(results)


def test_the_last_groups_are_carried_out_here_until_the_processes_have_started() -> None:
    """A start that takes its time leaves them to this process; without ``meanwhile`` it waits."""
    here: list[int] = []

    def meanwhile(task: int) -> int:
        time.sleep(0.01)
        here.append(task)
        return os.getpid()

    found = list(in_order(_pids, range(200), jobs=2, meanwhile=meanwhile))
    assert here and here == list(range(199, 199 - len(here), -1))
    assert [task for task, pid in enumerate(found) if pid == os.getpid()] == sorted(here)
    assert os.getpid() not in list(in_order(_pids, range(4), jobs=2))


def test_a_start_that_is_refused_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OptionError("no process today")

    monkeypatch.setattr("oracle.harness.jobs._Worker", refuse)
    with pytest.raises(OptionError, match="no process today"):
        list(in_order(_pids, range(2), jobs=2, meanwhile=lambda task: task))


@pytest.mark.parametrize("by", ["time", "interrupt"])
def test_what_was_behind_the_first_that_is_missing_is_left(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """A task that takes its time costs no result of the others, where the results end before it does."""
    left: dict[int, int | Lost] = {}
    clock, waits = [0.0], jobs_module.Pool._wait

    def wait(pool: jobs_module.Pool[int], seconds: float | None) -> None:
        waits(pool, None)
        if len(pool._done) == 3:
            clock[0] = 100.0
            if by == "interrupt":
                raise KeyboardInterrupt

    monkeypatch.setattr(jobs_module.Pool, "_wait", wait)
    monkeypatch.setattr(jobs_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    results = in_order(job_tasks.first_never, range(4), jobs=2, until=100.0, left=left)
    with pytest.raises(StopIteration if by == "time" else KeyboardInterrupt):
        next(results)
    assert left == {1: 1, 2: 2, 3: 3}


def test_one_process_begins_nothing_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "time", SimpleNamespace(monotonic=iter((0.0, 1.0, 2.0)).__next__))
    assert list(in_order(job_tasks.numbers, range(4), jobs=1, until=2.0)) == [0, 1]


def test_one_job_needs_no_process() -> None:
    assert list(in_order(_pids, range(2), jobs=1)) == [os.getpid()] * 2


def test_threads_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oracle.harness.jobs.cores", lambda: 8)
    assert (divided(1, None), divided(2, None), divided(3, None), divided(2, 1), divided(4, 16)) == (8, 4, 2, 1, 2)
    assert divided(16, None) == 1
    for wrong in ((0, None), (1, 0)):
        with pytest.raises(OptionError, match="at least 1"):
            divided(*wrong)


@contextmanager
def _pids() -> Iterator[Callable[[int], int]]:
    yield lambda number: os.getpid()


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    ("words", "started"),
    [
        (["verify", "--jobs", "2"], 1),
        (["mutate", "--jobs=3"], 1),
        (["verify", "--jobs", "1"], 0),
        (["list"], 0),
        (["verify", "--jobs", "many"], 0),
        (["verify", "--jobs"], 0),
        (["verify", "--html", "x.html", "-q"], 1),
        (["verify", "--contract", "ceil_div"], 0),
        (["verify", "--list"], 0),
    ],
)
def test_a_command_of_several_processes_starts_their_server_first(
    words: list[str], started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(server.forkserver, "ensure_running", lambda: asked.append(words))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    server.start_if_asked(words)
    assert len(asked) == started


@pytest.mark.parametrize(("first", "traces"), [(server.PRELOADED[0], 0), ("unblocked", 1)])
def test_an_interrupt_while_the_server_loads_prints_nothing(tmp_path: Path, first: str, traces: int) -> None:
    """A server whose modules take their time; negative: one that does without ``oracle.harness.interrupts``."""
    (tmp_path / "slow.py").write_text("import os, time\nos.write(1, b'x')\ntime.sleep(60)\n")
    (tmp_path / "unblocked.py").write_text("import signal\nsignal.pthread_sigmask(signal.SIG_UNBLOCK, {2})\n")
    asks = "from oracle.harness import server\n"
    asks += f"server.PRELOADED[:] = [{first!r}, 'slow']\nserver.start()\ninput()\n"
    search = os.pathsep.join([str(tmp_path), str(ROOT)])
    with subprocess.Popen(
        [sys.executable, "-c", asks],
        env={**os.environ, "PYTHONPATH": search},
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as asking:
        assert asking.stdout is not None and asking.stderr is not None
        assert asking.stdout.read(1) == b"x"
        os.killpg(asking.pid, signal.SIGINT)
        assert asking.stderr.read().count(b"__import__(modname)") == traces
