"""Calls on their way into a folder: copies of their tensors, a thread that writes one file for each call, and limits.

On a GPU the copies go into pinned memory on the stream that is current; a byte that the stream copies last tells the
thread that writes the files, which makes no CUDA call. Processes and recorders share a folder and its limit.

Not covered: what a call is (:mod:`oracle.harness.sampling`, :mod:`oracle.harness.watching`).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import logging
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from oracle.harness import starting

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PENDING = 4  # calls that may wait to be written
ENDING = 10.0  # seconds for what is still to be written when the process ends
LATE = 600.0  # seconds after which the copies of a GPU are given up
LOCKED = 60.0  # seconds that a call waits while another process or recorder writes into the folder
_log = logging.getLogger(__name__)


@dataclass
class Taken:
    """A call on its way to the disk: copies on the host, of a GPU complete once the byte ``done`` is 1.

    ``about`` are further facts as text. ``inputs`` and ``output`` have the shapes, dtypes, strides and values, NaN
    included, of the call.
    """

    number: int
    contract: str
    kernel: str
    inputs: dict[str, Tensor]
    options: dict[str, object]
    numerics: str | None = None
    output: dict[str, Tensor] = field(default_factory=dict)
    arch: str = ""
    done: Tensor | None = None
    about: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(x.nbytes for x in (*self.inputs.values(), *self.output.values()))

    def finish(self, output: Mapping[str, Tensor], arch: str = "") -> None:
        """Copy the outputs; on a GPU ``done`` becomes 1 behind all copies."""
        import torch

        self.output = {name: copied(x, name) for name, x in output.items()}
        device = next(iter(output.values())).device
        self.arch = arch or arch_of(device)
        if device.type == "cuda":
            self.done = torch.zeros(1, dtype=torch.uint8, device="cpu", pin_memory=True)
            self.done.copy_(torch.ones(1, dtype=torch.uint8, device=device), non_blocking=True)
        self.about |= {"time": datetime.now(UTC).isoformat(), "process": str(os.getpid()), "device": str(device)}


class Recorder:
    """A folder that takes calls until ``max_bytes``; ``name`` is what messages call it."""

    _queue: queue.Queue[Taken]
    _thread: threading.Thread | None
    _lock: threading.Lock
    _lock_file: int | None = None

    def __init__(self, to: Path, max_bytes: int, name: str) -> None:
        from oracle.fixtures.files import make_folder

        self.to, self.max_bytes = to, max_bytes
        self.recorded = self.dropped = 0
        self.problems: list[str] = []
        self._name = name
        make_folder(to)
        self._open = True
        self._versions: dict[str, str] | None = None
        self._fresh()
        itself = weakref.ref(self)

        def in_child() -> None:
            if (recorder := itself()) is not None:
                recorder._fresh()

        def at_end() -> None:
            if (recorder := itself()) is not None:
                recorder.flush(ENDING)

        os.register_at_fork(after_in_child=in_child)
        atexit.register(at_end)

    # --- in the engine --------------------------------------------------------------------------------------

    def room(self, size: int) -> bool:
        """Whether the calls that wait leave room for ``size`` bytes; a call that has none is dropped, and counted."""
        if self._held + size > self.max_bytes:
            self._drop()
            return False
        return True

    def put(self, taken: Taken, *, wait: bool = False) -> None:
        """Give a call to the thread that writes. Where ``PENDING`` wait already, ``wait`` for one of them, or drop."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._write_all, args=(self._queue,), daemon=True)
                starting.thread("the thread that writes calls", thread)
                self._thread = thread  # only now: what is queued for a thread that never ran is waited for in vain
            self._held += taken.size
        try:
            self._queue.put(taken, block=wait)
        except queue.Full:  # other threads were faster
            self._let_go(taken)
            self._drop()

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until every recorded call is written, ``seconds`` at most; whether it is."""
        waiting = self._queue
        with waiting.all_tasks_done:
            return waiting.all_tasks_done.wait_for(lambda: not waiting.unfinished_tasks, seconds)

    # --- in the thread that writes --------------------------------------------------------------------------

    def _write_all(self, waiting: queue.Queue[Taken]) -> None:
        while True:
            taken = waiting.get()
            try:
                self._write(taken)
            except Exception as error:  # a full disk, an option that no file can hold
                self._problem(error)
            finally:
                self._let_go(taken)
                waiting.task_done()

    def _write(self, taken: Taken) -> None:
        from oracle.fixtures import call_file
        from oracle.fixtures.files import write_bytes
        from oracle.harness import provenance

        late = time.monotonic() + LATE
        while taken.done is not None and not bool(taken.done[0]):
            if time.monotonic() > late:
                raise TimeoutError(f"the GPU has not copied a call within {LATE:g} s")
            time.sleep(1e-3)
        if self._versions is None:
            self._versions = provenance.versions(())
        output = taken.output["out"] if tuple(taken.output) == ("out",) else taken.output
        about = {**taken.about, **self._versions}
        head = (taken.contract, taken.inputs, output, taken.options, taken.arch, taken.numerics, taken.kernel, "")
        content = call_file.content(call_file.CallFile(*head, about))
        path = self.to / f"{taken.contract}-{os.getpid()}-{self._token}-{taken.number:06d}{call_file.SUFFIX}"
        with self._alone():
            if _size(self.to) + len(content) > self.max_bytes:
                self._close(f"{self.to} holds max_bytes={self.max_bytes}")
                return
            write_bytes(path, content)
        self.recorded += 1

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process or recorder measures the folder or writes into it; TimeoutError after ``LOCKED`` seconds.

        A lock of flock is shared with the children of a fork. So it is taken back here, not left to the closing of the
        descriptor, and a child closes its copy (:meth:`_fresh`).
        """
        path = self.to / ".lock"
        descriptor = self._lock_file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            late = time.monotonic() + LOCKED
            while not _locked(descriptor):
                if time.monotonic() > late:
                    raise TimeoutError(f"another process holds {path} for {LOCKED:g} s; end it, or record elsewhere")
                time.sleep(1e-3)
            yield
        finally:
            if self._lock_file is not None:  # a child of a fork has closed it
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                self._lock_file = None  # before the end, so that a child never closes a descriptor that is used anew
                os.close(descriptor)

    # --- both -----------------------------------------------------------------------------------------------

    def _fresh(self) -> None:
        """What a process has of its own; a child that was forked begins anew."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None
        self._queue = queue.Queue[Taken](PENDING)
        self._thread = None
        self._lock = threading.Lock()
        self._token, self._numbers = secrets.token_hex(4), itertools.count()
        self.recorded = self.dropped = self._held = 0

    def _let_go(self, taken: Taken) -> None:
        with self._lock:
            self._held -= taken.size

    def _drop(self) -> None:
        with self._lock:
            self.dropped += 1

    def _problem(self, error: BaseException) -> None:
        if not self.problems:
            _log.warning("a call of %s was not recorded: %s", self._name, error)
        if len(self.problems) < 100:
            self.problems.append(f"{type(error).__name__}: {error}")

    def _close(self, why: str) -> None:
        if self._open:
            _log.warning("recording of %s ends: %s", self._name, why)
        self._open = False


def _locked(descriptor: int) -> bool:
    """Whether the lock of a file could be taken at once."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another process has it
        return False
    return True


def _size(folder: Path) -> int:
    """Bytes of the entries of a folder. A link counts as itself, and what another process takes away not at all."""
    size = 0
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # taken away since the folder was listed
            size += entry.stat(follow_symlinks=False).st_size
    return size


def arch_of(device: torch.device) -> str:
    """``"cpu"``, or ``"sm90"`` of a GPU of compute capability 9.0."""
    import torch

    return "sm{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else "cpu"


def copied(x: Tensor, name: str) -> Tensor:
    """A copy on the host of ``x`` (any shape, any dtype, NaN included) with its strides and padding; of a GPU one that
    its stream is still to make.

    Raises InputError, DtypeError, LayoutError: ``x`` has no memory of its own, no plain dtype or no strides. Source:
    the values of ``x``."""
    import torch

    from oracle.fixtures.strides import laid_out, padded_memory
    from oracle.routines.base import plain

    tensor = plain(x, name).detach()
    memory = padded_memory(tensor)
    source = tensor if memory is None else memory
    copy = torch.empty_like(source, device="cpu", pin_memory=tensor.is_cuda)
    copy.copy_(source, non_blocking=tensor.is_cuda)
    return copy if memory is None else laid_out(copy, tensor.shape, tensor.stride())
