"""A kernel in a worker process: requests with a time limit, and the cause when the process is lost.

What the kernel prints is read all the time, and its tail is kept. A worker that hangs is killed with its whole process
group; for one that dies the reply has the signal or status, and the next request starts another.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from oracle.harness.worker import Reply, failure

KEPT = 1 << 16  # bytes of the kernel's own output that are kept
DRAINED = 1.0  # seconds that the rest of a dead worker's output may take
LOADING = 120.0  # seconds in which a process must have started and imported the kernel, on a busy machine too
FATAL = ("device", "exit", "memory", "uncapturable")  # after these the process is replaced


class Worker:
    """One kernel in a worker process; a context manager."""

    def __init__(
        self, kernel: str, *, adapter: str | None, device: str, limit: float, path: tuple[str, ...] = ()
    ) -> None:
        folders = [os.getcwd(), *path, *(p for p in sys.path if p)]
        self._load = {"op": "load", "kernel": kernel, "adapter": adapter, "device": device, "path": folders}
        self.limit, self.starts = limit, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._drainer: threading.Thread | None = None
        self._reply = self._request = -1
        self._tail = bytearray()
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def output(self) -> str:
        """The tail of what the kernel printed."""
        return bytes(self._tail).decode(errors="replace")

    def ask(self, request: Mapping[str, Any]) -> Reply:
        """The reply to one request; starts a worker if there is none. A lost worker gives a reply too."""
        if self._process is None:
            loaded = self._start()
            if not loaded["ok"]:
                self.stop()
                return loaded | {"kind": "load"}
        reply = self._exchange(request, self.limit)
        if not reply["ok"] and reply["kind"] in (*FATAL, "lost", "hang"):
            self.stop()
        return reply

    def stop(self) -> None:
        """Kill the worker and everything that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # already gone, children included
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert self._drainer is not None and process.stdout is not None
        self._drainer.join(DRAINED)
        if not self._drainer.is_alive():  # else a process that left the group still holds the other end
            process.stdout.close()
        for descriptor in (self._reply, self._request):
            os.close(descriptor)

    def _start(self) -> Reply:
        self.starts += 1
        take, self._request = os.pipe()
        self._reply, give = os.pipe()
        self._buffer = b""
        path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"MALLOC_PERTURB_": "128", "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "oracle.harness.worker", str(take), str(give)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(take, give),
            start_new_session=True,
            env=environment,
        )
        os.close(take)
        os.close(give)
        assert self._process.stdout is not None
        self._drainer = threading.Thread(target=self._drain, args=(self._process.stdout.fileno(),), daemon=True)
        self._drainer.start()
        return self._exchange(self._load, max(self.limit, LOADING))

    def _exchange(self, request: Mapping[str, Any], limit: float) -> Reply:
        assert self._process is not None
        try:
            os.write(self._request, (json.dumps(request) + "\n").encode())
        except BrokenPipeError:
            return self._lost()
        deadline = time.monotonic() + limit
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                return failure("hang", f"no answer within {limit:g} s; the worker was killed")
            ready, _, _ = select.select([self._reply], [], [], min(left, 0.2))
            if ready:
                chunk = os.read(self._reply, 1 << 16)
                if not chunk:
                    return self._lost()
                self._buffer += chunk
            elif self._process.poll() is not None:
                return self._lost()
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: Reply = json.loads(line)
        return reply

    def _lost(self) -> Reply:
        assert self._process is not None
        try:
            status = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return failure("lost", "the worker closed its channel and runs on; it was killed")
        if status >= 0:
            return failure("lost", f"the kernel ended the process with status {status}")
        name = signal.Signals(-status).name
        causes = {"SIGKILL": " (killed from outside, or out of memory)", "SIGSEGV": " (invalid memory access)"}
        return failure("lost", f"the worker died by {name}{causes.get(name, '')}")

    def _drain(self, descriptor: int) -> None:
        while chunk := os.read(descriptor, 1 << 16):
            self._tail += chunk
            del self._tail[:-KEPT]
