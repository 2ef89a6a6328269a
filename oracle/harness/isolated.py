"""Subjects in a process of their own: one that exits, dies or hangs costs the case it was called for, not the run.

    this process  --fork-->  starter  --fork-->  worker: imports the providers, runs their subjects

The starter is forked before anything is computed here and computes nothing itself, so no worker inherits a thread pool
or a CUDA context. It reports how a worker ended, starts another one, and kills the worker when this process
ends, in whatever way. A worker is the leader of its session, so whatever it started is killed with it.

A message is the length of a header (8 bytes), the header (JSON), and the memory of the tensors that it lists; strides
and padding arrive as they were. Nothing is unpickled. What a subject prints goes to the standard error, without
control characters.

Source: Linux manual pages fork(2), setsid(2) and socketpair(2).

Not covered: judging (:mod:`oracle.harness.runner`); guard zones and reruns (:mod:`oracle.harness.validation`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from math import inf
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from oracle.errors import InputError, LayoutError, OracleError, SubjectError
from oracle.fixtures import strides as memory
from oracle.harness import provenance, sources, starting, subjects
from oracle.harness.process import LOADING
from oracle.harness.protocol import frames_of
from oracle.harness.subjects import Provider, Subject
from oracle.report.outcome import printable
from oracle.routines.base import plain

HANGS = 3  # times that a subject may hang before it is not called again, where nobody says another number
LONGEST_HEADER = 1 << 26  # bytes; a header holds names, options, and a line for each subject or tensor
PIECE = 1 << 20  # bytes read at once
PR_SET_PDEATHSIG = 1  # prctl(2)
_START, _KILL = b"s", b"k"
_UNSTARTED = b"\xff" * 4  # in the place of a wait status: the system refused to start a worker
T = TypeVar("T")


class Crash(Exception):
    """A subject gave no output; the message is the reason of a CRASHED verdict, ``frames`` where it raised."""

    def __init__(self, reason: str, frames: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.frames = tuple(frames)


@dataclass(frozen=True)
class Isolated:
    """A subject of a worker: what it said of itself when its provider was loaded; :meth:`run` asks the worker."""

    host: Host = field(compare=False, repr=False)
    at: tuple[int, int]
    name: str
    contract: str
    arch: str
    numerics: str | None
    device: str
    reason: str | None
    source: str

    def why_not(self) -> str | None:
        return self.reason

    def run(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> Tensor | dict[str, Tensor]:
        """A copy of the output on the CPU, of any shape and dtype, with its strides and padding.

        Raises NotImplementedError: the backend does not offer the call. Crash: the subject raised, ended its process,
        or hung.
        """
        return self.host.run(self, inputs, options)


class Host:
    """The processes that run the subjects of ``points``; a context manager.

    ``limit`` is the seconds that one call may take, ``threads`` the CPU threads of a worker (None: as many as here),
    ``folder`` where modules are looked for first, ``hangs`` how often a subject may exceed the limit: in all hosts that
    share the folder ``told``, where one is named.
    """

    def __init__(
        self,
        points: Sequence[EntryPoint],
        *,
        limit: float,
        threads: int | None = None,
        folder: str | None = None,
        hangs: int = HANGS,
        told: Path | None = None,
    ) -> None:
        self.points, self.limit, self.threads, self.hangs, self._told = tuple(points), limit, threads, hangs, told
        self.workers = 0
        self._hangs: dict[tuple[int, int], int] = {}
        self._loaded: set[int] = set()  # providers that the worker has loaded
        self._worker: socket.socket | None = None
        self._control, theirs = socket.socketpair()
        self._printed, printing = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else the child would hold, and might write, what is buffered here
        with warnings.catch_warnings():
            # Python 3.12 warns of threads that a child lacks; those are numpy's, which makes new ones after a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                with starting.process("the process that runs subjects"):
                    self._starter = os.fork()
            except BaseException:
                self._control.close()
                theirs.close()
                os.close(self._printed)
                os.close(printing)
                raise
        if not self._starter:
            with _child():
                sys.path[:0] = [] if folder is None else [folder]
                self._control.close()
                os.close(self._printed)
                _start_workers(theirs, printing, self.points, threads)
        theirs.close()
        os.close(printing)
        self._drainer = threading.Thread(target=_drain, args=(self._printed,), daemon=True)
        try:
            starting.thread("the reader of what subjects print", self._drainer)
        except BaseException:
            self._control.close()
            os.waitpid(self._starter, 0)
            os.close(self._printed)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End every process; what one of them prints as its last words is still read."""
        self._control.close()
        if self._worker is not None:
            self._worker.close()
        os.waitpid(self._starter, 0)
        self._drainer.join(1.0)  # a process that left the session may hold the other end for ever

    def providers(self) -> list[Provider]:
        """Every provider, loaded in the worker; one that cannot be loaded there carries its problem."""
        return [self._provider(number, point) for number, point in enumerate(self.points)]

    def run(
        self, subject: Isolated, inputs: Mapping[str, Tensor], options: Mapping[str, object]
    ) -> Tensor | dict[str, Tensor]:
        """What a subject returns, as of :meth:`Isolated.run`.

        Raises NotImplementedError, Crash. ProcessError: the system starts no process for it.
        """
        if self._hung(subject) >= self.hangs:
            times = "once" if self.hangs == 1 else f"{self.hangs} times"
            raise Crash(f"not called: it hung {times} before")
        number = subject.at[0]
        if number not in self._loaded and (why := self._provider(number, self.points[number]).problem) is not None:
            raise Crash(why)
        request = {"op": "run", "at": subject.at, "options": {n: _word(value) for n, value in options.items()}}

        def taken(reply: Mapping[str, Any], outputs: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
            if reply["unsupported"]:
                raise NotImplementedError(str(reply["problem"]))
            if reply["problem"] is not None:
                raise Crash(str(reply["problem"]), [str(frame) for frame in reply.get("frames", ())])
            return outputs["out"] if reply["alone"] else outputs

        try:
            return self._ask(request, self.limit, inputs, taken)
        except TimeoutError:
            self._hangs[subject.at] = self._hangs.get(subject.at, 0) + 1
            if self._told is not None:
                mine = f"{_hangs_of(subject)}.{os.getpid()}.{self._hangs[subject.at]}"
                (self._told / mine).touch()
            raise Crash(f"hangs: no answer within {self.limit:g} s; its process was killed") from None

    def _hung(self, subject: Isolated) -> int:
        """How often a subject has exceeded the limit."""
        if self._told is None:
            return self._hangs.get(subject.at, 0)
        return sum(1 for _ in self._told.glob(f"{_hangs_of(subject)}.*"))

    def _provider(self, number: int, point: EntryPoint) -> Provider:
        def taken(reply: Mapping[str, Any], _: object) -> Provider:
            self._loaded.add(number)
            if reply["problem"] is not None:
                return Provider(point.name, point.value, problem=str(reply["problem"]))
            isolated = tuple(Isolated(self, (number, i), **facts) for i, facts in enumerate(reply["subjects"]))
            return Provider(point.name, point.value, isolated, code=str(reply["code"]))

        try:
            return self._ask({"op": "load", "at": number}, LOADING, {}, taken)
        except TimeoutError:
            return subjects.broken(point, f"hangs: no answer within {LOADING:g} s; its process was killed")
        except Crash as error:
            return subjects.broken(point, str(error))

    def _ask(
        self,
        request: Mapping[str, object],
        limit: float,
        tensors: Mapping[str, Tensor],
        taken: Callable[[Mapping[str, Any], dict[str, Tensor]], T],
    ) -> T:
        """What ``taken`` makes of the reply of the worker, which is started if there is none.

        Raises TimeoutError: there was none in time; Crash: the worker is lost, or replied nonsense. Then it has ended.
        """
        if self._worker is None:
            self._worker = self._started()
        deadline = time.monotonic() + limit
        try:
            _send(self._worker, request, tensors, deadline)
            return taken(*_received(self._worker, deadline))
        except (Crash, NotImplementedError):
            raise  # a sound reply
        except TimeoutError:
            self._ended()
            raise
        except (EOFError, ConnectionError):
            if (status := self._ended()) == _UNSTARTED:
                raise starting.refused("a worker", "fork was refused") from None
            raise Crash(_cause(status)) from None
        except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, MemoryError, OracleError) as error:
            self._ended()
            raise Crash(f"its process sent no sound reply ({subjects.described(error)})") from None
        except BaseException:  # interrupted: what is on the wire belongs to no later question
            self._ended()
            raise

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [_START], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise Crash(f"no process can be started for it ({error.strerror})") from None
        self.workers += 1
        return ours

    def _ended(self) -> bytes:
        """End the worker; its wait status, empty where the starter was killed too."""
        assert self._worker is not None
        self._worker.close()
        self._worker = None
        self._loaded.clear()
        try:
            self._control.send(_KILL)
            return self._control.recv(4)
        except OSError:  # the server is gone, and with it every status
            return b""


def _hangs_of(subject: Isolated) -> str:
    """The beginning of the names of files, each of which says that a subject exceeded the limit once."""
    return "{}-{}".format(*subject.at)


def _cause(ended: bytes) -> str:
    """The end of a worker in words."""
    if not ended:
        return "killed the processes that run subjects"
    status = int.from_bytes(ended, "little")
    if os.WIFEXITED(status):
        return f"ended the process with status {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    more = {"SIGKILL": " (killed from outside, or out of memory)", "SIGSEGV": " (invalid memory access)"}
    return f"its process died by {name}{more.get(name, '')}"


def _drain(descriptor: int) -> None:
    while piece := os.read(descriptor, 1 << 16):
        with contextlib.suppress(OSError, ValueError):  # nobody reads the standard error, or it is closed
            print(printable(piece.decode(errors="replace")), end="", file=sys.stderr, flush=True)
    os.close(descriptor)


# --- the children -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _child() -> Iterator[None]:
    """In a forked process: the end of it is the end of the process, without exit handlers and buffers of the parent."""
    try:
        yield
    except BaseException as error:  # there is nobody to raise it to
        os.write(2, f"{subjects.described(error)}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(0)


def _start_workers(control: socket.socket, printing: int, points: Sequence[EntryPoint], threads: int | None) -> None:
    """Start a worker for each descriptor that arrives, one at a time, and tell the wait status of each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the user interrupts the run, which then closes the connection
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in (1, 2):
        os.dup2(printing, descriptor)
    for name in os.listdir("/proc/self/fd"):  # files of the run are no business of a subject
        if int(name) not in (0, 1, 2, control.fileno()):
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, errors="backslashreplace", closefd=False) for n in (1, 2))  # noqa: SIM115
    while True:
        word, descriptors, *_ = socket.recv_fds(control, 1, 1)
        if not word:
            return
        if word == _KILL:
            continue  # it had ended already
        try:
            worker = os.fork()
        except OSError:  # by a limit of processes, or of memory
            os.close(descriptors[0])
            control.send(_UNSTARTED)
            continue
        if not worker:
            with _child():
                os.setsid()
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # where the starter is killed
                control.close()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _serve(socket.socket(fileno=descriptors[0]), points, threads)
        os.close(descriptors[0])
        watch = os.pidfd_open(worker)
        ends: tuple[int | socket.socket, ...] = (watch, control)
        select.select(ends, [], [])
        for kill in (os.killpg, os.kill):  # the second one where it has no session yet
            with contextlib.suppress(ProcessLookupError):  # it has ended, as both are to make sure
                kill(worker, signal.SIGKILL)
        status = os.waitpid(worker, 0)[1]
        os.close(watch)
        with contextlib.suppress(OSError):  # this process' parent is gone, as the next word will say
            control.send(status.to_bytes(4, "little"))


def _serve(wire: socket.socket, points: Sequence[EntryPoint], threads: int | None) -> None:
    """Answer until the connection is closed."""
    sys.path.append(os.getcwd())  # where `--provider` names a file of the user; what is installed comes first
    if threads is not None:
        torch.set_num_threads(threads)
    loaded, owner, watch = dict[int, Sequence[Subject]](), os.getpid(), provenance.Watch()
    with contextlib.suppress(EOFError, OSError):  # the run has ended, or does not wait any more
        while True:
            request, inputs = _received(wire, inf)
            outputs: dict[str, Tensor] = {}
            reply: dict[str, object] = {"problem": None, "unsupported": False}
            try:
                if request["op"] == "load":
                    number = request["at"]
                    reply |= _loaded(points[number], loaded, number, watch)
                else:
                    provider, number = request["at"]
                    options = {name: _value(word) for name, word in request["options"].items()}
                    result = subjects.called(loaded[provider][number], inputs, options)
                    outputs, reply["alone"] = _outputs(result), not isinstance(result, Mapping)
            except NotImplementedError as error:
                reply |= {"problem": subjects.one_line(error), "unsupported": True}
            except Crash as error:
                reply["problem"] = str(error)
            except BaseException as error:  # foreign code may raise anything, KeyboardInterrupt and SystemExit included
                reply |= {"problem": subjects.described(error), "frames": frames_of(error)}
            if os.getpid() != owner:
                return  # a child that the subject forked, and that came back
            _send(wire, reply, outputs, inf)


def _loaded(
    point: EntryPoint, loaded: dict[int, Sequence[Subject]], number: int, watch: provenance.Watch
) -> dict[str, object]:
    """The subjects of a provider as JSON, and the digest of the code behind them."""
    with watch:
        subjects_loaded, facts = subjects.load(point), []
        try:
            facts = [_facts(subject) for subject in subjects_loaded.subjects]
        except BaseException as error:  # a record of foreign code is foreign code
            subjects_loaded = subjects.broken(point, subjects.described(error))
    loaded[number] = subjects_loaded.subjects
    return {"problem": subjects_loaded.problem, "subjects": facts, "code": watch.code_of(point.value)}


def _facts(subject: Subject) -> dict[str, object]:
    """What a subject says of itself; SubjectError when it is no record of a subject."""
    facts: dict[str, object] = {}
    for name in ("name", "contract", "arch", "numerics", "device"):
        facts[name] = value = getattr(subject, name)
        if not isinstance(value, str) and not (name == "numerics" and value is None):
            raise SubjectError(f"{type(subject).__name__}.{name} is {type(value).__name__}, not a name")
    facts["reason"] = reason = subject.why_not()
    if not isinstance(reason, str | None):
        raise SubjectError(f"{type(subject).__name__}.why_not() gave {type(reason).__name__}, not a reason or None")
    facts["source"] = sources.of(getattr(subject, "source", subject.run))
    return facts


def _outputs(result: Any) -> dict[str, Tensor]:
    """What a subject returned, by name, as plain tensors; Crash for what nobody can judge."""
    try:
        named = dict(result) if isinstance(result, Mapping) else {"out": result}
        return {str(name): _plain(x, str(name)) for name, x in named.items()}
    except OracleError as error:
        raise Crash(f"the output cannot be judged: {error}") from None


def _plain(x: Any, name: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise InputError(f"{name} is a {type(x).__name__}, not a torch.Tensor")
    tensor = plain(x, name)
    if tensor.is_nested or tensor.layout != torch.strided or tensor.device.type == "meta":
        raise LayoutError(
            f"{name} is {tensor.dtype}, {tensor.layout} on {tensor.device}; return a dense tensor with data"
        )
    return tensor


# --- messages -----------------------------------------------------------------------------------------------


def _word(value: object) -> object:
    """An option as JSON; what JSON does not have is an object with its kind."""
    if isinstance(value, tuple):
        return {"tuple": [_word(x) for x in value]}
    return {"dtype": str(value).removeprefix("torch.")} if isinstance(value, torch.dtype) else value


def _value(word: Any) -> object:
    """The inverse of :func:`_word`."""
    if not isinstance(word, dict):
        return word
    return getattr(torch, word["dtype"]) if "dtype" in word else tuple(_value(x) for x in word["tuple"])


def _send(wire: socket.socket, record: Mapping[str, object], tensors: Mapping[str, Tensor], deadline: float) -> None:
    """Write one message; TimeoutError at the deadline."""
    runs = {name: memory.run_of(t).cpu().contiguous().view(torch.uint8) for name, t in tensors.items()}
    listed = [
        (name, str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride()), runs[name].numel())
        for name, t in tensors.items()
    ]
    header = json.dumps({**record, "tensors": listed}).encode()
    content: list[Any] = [run.numpy() for run in runs.values()]  # buffers, sent without a copy
    for part in (len(header).to_bytes(8, "little") + header, *content):
        wire.settimeout(_left(deadline))
        wire.sendall(part)


def _received(wire: socket.socket, deadline: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read one message: its record and its tensors.

    Raises TimeoutError at the deadline, EOFError when the other side is gone, ValueError, TypeError, KeyError or
    LayoutError for what is no message.
    """
    length = int.from_bytes(_read(wire, 8, deadline), "little")
    if length > LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    record: dict[str, Any] = json.loads(bytes(_read(wire, length, deadline)))
    tensors: dict[str, Tensor] = {}
    for name, word, shape, strides, size in record.pop("tensors"):
        dtype = getattr(torch, word, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{word!r} is no dtype")
        content = _read(wire, size, deadline)
        run = torch.frombuffer(content, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8, device="cpu")
        tensors[name] = memory.laid_out(run.view(dtype), shape, strides)
    return record, tensors


def _read(wire: socket.socket, size: int, deadline: float) -> bytearray:
    content = bytearray()
    while len(content) < size:
        wire.settimeout(_left(deadline))
        piece = wire.recv(min(PIECE, size - len(content)))
        if not piece:
            raise EOFError
        content += piece
    return content


def _left(deadline: float) -> float | None:
    """Seconds until the deadline, None without one; TimeoutError after it."""
    if deadline == inf:
        return None
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left
