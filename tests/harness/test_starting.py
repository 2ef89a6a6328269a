"""Where the system starts no process or no thread: one line and status 2, nothing left behind, no kernel blamed.

A limit of processes is of a user, and root has none; so what starts them refuses here as it would.
"""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch

import oracle
from oracle.errors import ProcessError
from oracle.harness import jobs, recorder, starting, validation
from oracle.harness.validation import validate
from oracle.routines import cases
from oracle.verdict.compare import Status
from tests.support.commandline import Cli
from tests.support.subjects import right

GEMM = "fp8_gemm_nt"
CASE = f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=5,n=128,k=128/family=randn/seed=7"
RIGHT = "tests.support.subjects.right:gemm"
VALIDATE = ("validate", RIGHT, "--contract", GEMM, "--case", CASE)
VERIFY = ("verify", "--contract", "ceil_div", "--fixtures", "none")
fork = os.fork


def refuse(*_: object, **__: object) -> None:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def refuse_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def refuse_below(owner: int) -> Callable[[], int]:
    """A fork that only this process may do."""
    return lambda: fork() if os.getpid() == owner else refuse()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("command", "place", "name", "what"),
    [
        (VALIDATE, subprocess, "Popen", "a worker"),
        (VALIDATE, threading.Thread, "start", "the reader of a worker's output"),
        (VERIFY, os, "fork", "the process that runs subjects"),
        (VERIFY, threading.Thread, "start", "the reader of what subjects print"),
        ((*VERIFY, "--jobs", "2"), resource_tracker, "ensure_running", "the server of --jobs"),
    ],
)
def test_one_line(
    command: tuple[str, ...], place: object, name: str, what: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that were open before, and no child of this process, are all that is there afterwards."""
    monkeypatch.setattr(place, name, refuse_thread if name == "start" else refuse)
    before = os.listdir("/proc/self/fd")
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    alive = children.read_text()
    ran = cli(*command)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1), ran
    assert ran.err.startswith(f"fp8-oracle: error: {what} cannot be started (") and "ulimit -u" in ran.err
    assert len(os.listdir("/proc/self/fd")) == len(before) and children.read_text() == alive


def test_a_worker_of_the_starter(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that forks workers lives on and says so: no subject is left out, none is CRASHED."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", refuse_below(os.getpid()))
        ran = cli(*VERIFY)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1) and "a worker cannot be started" in ran.err, ran
    assert cli(*VERIFY).status == 0  # the twin


def test_a_process_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's server of processes ends where fork is refused, and its client reads nothing."""
    monkeypatch.setattr(jobs, "start", lambda: Served)
    with pytest.raises(ProcessError, match="a process of --jobs cannot be started"):
        jobs.Pool(int, 1)  # type: ignore[arg-type]


class Served:
    """What :func:`oracle.harness.server.start` gives, with a server that has ended."""

    Pipe = staticmethod(os.pipe)

    class Process:
        def __init__(self, **_: object) -> None: ...

        def start(self) -> None:
            raise EOFError("unexpected EOF")


@pytest.mark.usefixtures("in_process")
def test_threads_that_call_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch was not tried: a note, and a failure where it is required. The kernel did nothing wrong."""
    monkeypatch.setattr(validation, "WATCHED", dict.fromkeys(validation.PROFILES, 2))
    monkeypatch.setattr(threading.Thread, "start", refuse_thread)
    plain = validate(RIGHT, GEMM, case=CASE, limit=60)
    assert plain.conforms and any("threads: not tried: can't start new thread" in note for note in plain.notes)
    strict = validate(RIGHT, GEMM, case=CASE, limit=60, require=("threads",))
    assert [f.verdict.status for f in strict.failures] == [Status.UNTESTED]


def test_the_thread_that_writes_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on, a flush does not wait for a thread that never ran, and the next call tries again."""
    inputs = cases.parse(CASE).inputs()
    sampled = oracle.sample(right.gemm, every=1, to=tmp_path, contract=GEMM)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse_thread)
        for _ in range(2):
            sampled(**inputs, out_dtype=torch.bfloat16)
        assert sampled.sampler.flush(0.0) and sampled.sampler.recorded == 0
    sampled(**inputs, out_dtype=torch.bfloat16)
    assert sampled.sampler.flush(recorder.ENDING) and sampled.sampler.recorded == 1


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(FileNotFoundError), starting.process("x"):
        raise FileNotFoundError(errno.ENOENT, "no such file")
    with pytest.raises(ProcessError, match=r"x cannot be started \(Cannot allocate memory\)"), starting.process("x"):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
