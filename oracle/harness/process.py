"""A kernel in a worker process: requests with a time limit, and the cause when the process is lost.

What the kernel prints is read all the time, and its tail is kept. A worker that hangs is ended, and all it started
with it (:mod:`oracle.harness.launcher`); for one that dies the reply has the signal or status, and the next request
starts another. A message that is no reply to the request (:mod:`oracle.harness.protocol`) ends the worker too. While a
worker runs, SIGTERM and SIGHUP interrupt this process as SIGINT does, so that nothing is left behind; when this process
is killed, the launcher ends the worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from oracle.harness import program, sandbox, starting
from oracle.harness.memory import Shared, exported
from oracle.harness.protocol import NONCE, SIZE, GarbledError, Reply, printable, unpack

KEPT = 1 << 16  # bytes of the kernel's own output that are kept
DRAINED = 1.0  # seconds that the rest of a dead worker's output may take
DYING = 15.0  # seconds that a process may take from the loss of its channel to its end: a trace, a GPU's memory
ENDED = 5.0  # seconds in which a launcher must have ended everything
LOADING = 120.0  # seconds in which a process must have started and imported the kernel, on a busy machine too
FATAL = ("device", "exit", "memory", "uncapturable", "lost", "forged", "hang")  # after these the process is replaced


class Worker:
    """One kernel in a worker process; a context manager. ``untrusted``: in a sandbox without the oracle. ``loading``:
    seconds for importing the kernel, once the process has started (None: ``LOADING`` for both together)."""

    def __init__(
        self,
        kernel: str,
        *,
        adapter: str | None,
        device: str,
        limit: float,
        path: tuple[str, ...] = (),
        untrusted: bool = False,
        loading: float | None = None,
    ) -> None:
        self._loading = loading
        self._means = sandbox.required() if untrusted else None
        entries = (os.getcwd(), *path, *filter(os.path.exists, sys.path))
        self._search = tuple(dict.fromkeys(map(os.path.abspath, entries)))
        first, rest = self._search[:1], self._search[1:]
        self._load = {"op": "load", "kernel": kernel, "adapter": adapter, "device": device, "first": first}
        self._load |= {"path": rest, "hidden": program.names_of_the_judge()}
        self._load |= {"absent": program.PACKAGE.name if untrusted else ""}
        self.limit, self.starts = limit, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._drainer: threading.Thread | None = None
        self._tail = bytearray()
        self._shared: Shared | None = None
        self.place = "cpu"
        """The device on whose memory the tensors of a call lie, this process's and the worker's."""
        self._probed = True  # whether a process is asked first if it can open memory of this one on the GPU
        self._told: Shared | None = None  # the memory that the process of now has
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(interrupted_by_every_end())
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        self._stack.close()

    @property
    def output(self) -> str:
        """The tail of what the kernel printed."""
        return printable(bytes(self._tail).decode(errors="replace"))

    def memory(self, size: int) -> Shared:
        """Memory of at least this many bytes that the worker has too: the same one until a larger one is asked for."""
        if self._shared is None or self._shared.size < size:
            if self._shared is not None:
                self._shared.close()
            self._shared = Shared(max(size, 0 if self._shared is None else 2 * self._shared.size))
        return self._shared

    def ask(self, request: Mapping[str, Any]) -> Reply:
        """The reply to one request; starts a worker if there is none. A lost worker gives a reply too."""
        if self._process is None:
            loaded = self._start()
            if not loaded.ok:
                self.stop()
                return loaded if loaded.kind == "forged" else replace(loaded, kind="load")
        reply = self._exchange(request, self.limit)
        if reply.kind in FATAL:
            self.stop()
        return reply

    def stop(self) -> None:
        """End the worker and everything that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        assert self._drainer is not None and process.stdout is not None and process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the worker has ended, and a request was still in the buffer
            process.stdin.close()
        try:
            process.wait(ENDED)
        except subprocess.TimeoutExpired:  # the kernel has stopped it, or a process cannot be killed
            with contextlib.suppress(ProcessLookupError):  # it ended after the time was over
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._drainer.join(DRAINED)
        if not self._drainer.is_alive():  # else a process that escaped still holds the other end
            process.stdout.close()
        self._channel.close()
        os.close(self._status)
        self._root.cleanup()

    def _start(self) -> Reply:
        self.starts += 1
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status, status = os.pipe()
        self._told = None
        self._root = tempfile.TemporaryDirectory()
        folder, tree = (os.path.join(self._root.name, name) for name in ("program", "tree"))
        os.mkdir(tree)
        with theirs:
            program.write(Path(folder), () if self._means is None else self._search)
            if self._means is None:
                place, variables, shown = folder, program.environment(), []
            else:
                place, variables = sandbox.PLACE, sandbox.environment()
                shown = sandbox.steps(self._search, str(self._load["kernel"]), str(self._load["device"]), folder)
            command = program.worker(place, theirs.fileno())
            plan = sandbox.plan(command, variables, os.getcwd(), self._means, shown, tree)
            try:
                with starting.process("a worker"):
                    self._process = subprocess.Popen(
                        program.launcher(folder),
                        env=sandbox.environment(sandbox.LAUNCHED),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        pass_fds=(theirs.fileno(), status),
                        start_new_session=True,
                    )
                assert self._process.stdout is not None and self._process.stdin is not None
                drainer = threading.Thread(target=self._drain, args=(self._process.stdout.fileno(),), daemon=True)
                starting.thread("the reader of a worker's output", drainer)
            except BaseException:
                self._unstarted()
                raise
            finally:
                os.close(status)
            self._drainer = drainer
            with contextlib.suppress(BrokenPipeError):  # what follows finds that the launcher is gone
                line = json.dumps(plan | {"channel": theirs.fileno(), "status": status}) + "\n"
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
        if self._load["device"] != "cpu" and self._probed:
            ours = torch.ones(1 << 21, dtype=torch.uint8, device=str(self._load["device"]))
            torch.cuda.synchronize()
            opened = self._exchange({"op": "probe", "handle": exported(ours)}, max(self.limit, LOADING))
            if opened.kind in FATAL and opened.kind != "device":  # before the kernel is imported: the driver's fault
                self._probed = False
                self.stop()
                return self._start()
            self.place = str(self._load["device"]) if opened.ok else "cpu"
        if self._loading is not None:
            started = self._exchange({"op": "start"}, max(self.limit, LOADING))
            return self._exchange(self._load, self._loading) if started.ok else started
        return self._exchange(self._load, max(self.limit, LOADING))

    def _unstarted(self) -> None:
        """Give back what belongs to a worker that did not start, the launcher included."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # it waits for its plan, and has started nothing
            process.communicate()
        self._channel.close()
        os.close(self._status)
        self._root.cleanup()

    def _exchange(self, request: Mapping[str, Any], limit: float) -> Reply:
        assert self._process is not None
        if select.select([self._channel], [], [], 0)[0] and self._channel.recv(1):
            return Reply("forged", "the kernel wrote to the channel of the worker; it was killed")
        nonce, start = secrets.token_bytes(NONCE), time.monotonic()
        message = json.dumps({**request, "nonce": nonce.hex()}).encode()
        memory = [self._shared.descriptor] if self._shared is not None and self._told is not self._shared else []
        try:
            socket.send_fds(self._channel, [message], memory)
        except (BrokenPipeError, ConnectionResetError):
            return self._lost()
        self._told = self._shared
        left = limit
        ends: tuple[socket.socket | int, ...] = (self._channel, self._status)
        while not select.select(ends, [], [], max(0.0, left))[0]:
            left = start + limit - time.monotonic()
            if left <= 0:
                return Reply("hang", f"no answer within {limit:g} s; the worker was killed")
        try:
            answer = self._channel.recv(SIZE + 1, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):
            answer = b""
        if not answer:
            return self._lost()
        try:
            return replace(unpack(answer, nonce), seconds=time.monotonic() - start)
        except GarbledError as error:
            return Reply("forged", f"the kernel wrote to the channel of the worker: {error}; it was killed")

    def _lost(self) -> Reply:
        assert self._process is not None
        written = os.read(self._status, 4) if select.select([self._status], [], [], DYING)[0] else None
        if written is None:
            return Reply("lost", "the worker closed its channel and runs on; it was killed")
        if len(written) < 4:
            return Reply("lost", f"the worker could not be started, or was ended from outside: {self._last_words()}")
        status = os.waitstatus_to_exitcode(struct.unpack("i", written)[0])
        if self._means == "bwrap" and status > 128:
            status = 128 - status  # how it passes a signal on
        if status >= 0:
            return Reply("lost", f"the kernel ended the process with status {status}")
        name = signal.Signals(-status).name
        self._drainer.join(DRAINED)  # type: ignore[union-attr]
        thrown = re.findall(r"what\(\): +(.{1,200})", self.output)[-1:] if name == "SIGABRT" else []
        causes = {"SIGKILL": " (killed from outside, or out of memory)", "SIGSEGV": " (invalid memory access)"}
        cause = f": {thrown[0]}" if thrown else causes.get(name, "")
        return Reply("lost", f"the worker died by {name}{cause}")

    def _last_words(self) -> str:
        assert self._process is not None and self._drainer is not None
        self._drainer.join(DRAINED)
        return self.output.strip().rpartition("\n")[2][:500] or "it said nothing"

    def _drain(self, descriptor: int) -> None:
        while chunk := os.read(descriptor, 1 << 16):
            self._tail += chunk
            del self._tail[:-KEPT]


@contextlib.contextmanager
def interrupted_by_every_end() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt here, unless this is no main thread or somebody handles them."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        ends = (signal.SIGTERM, signal.SIGHUP)
        free = [end for end in ends if signal.getsignal(end) is signal.SIG_DFL]
        before = {end: signal.signal(end, signal.default_int_handler) for end in free}
    try:
        yield
    finally:
        for end, handler in before.items():
            signal.signal(end, handler)
