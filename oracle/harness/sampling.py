"""Recorded calls of a running engine: :func:`sample` writes one call in N into a folder, ``fp8-oracle judge`` reads it.

What a recorded call costs the engine: a copy of its tensors. On a GPU the copies go into pinned memory on the stream
that is current, before the call for inputs and after it for outputs; a byte that the stream copies last tells the
thread that writes the files, which makes no CUDA call. A call that is not recorded costs the increment of a counter.
Nothing is recorded, and nothing copied,

    while a CUDA graph is captured (the replays of a graph run no Python),
    while torch.compile, torch.export or torch.jit trace,
    while ``PENDING`` calls or ``max_bytes`` wait for the disk,
    once the folder holds ``max_bytes``, or ``seconds`` are over.

Not covered: calls that a compiled graph makes inside (sample the compiled function instead), and gradients.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import inspect
import itertools
import logging
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from oracle.errors import OptionError
from oracle.harness import starting

if TYPE_CHECKING:
    from torch import Tensor

SWITCH = "FP8_ORACLE_SAMPLE"
"""A variable of the environment that replaces ``every``: 0 turns every sampler of a process off."""
PENDING = 4  # calls that may wait to be written
ENDING = 10.0  # seconds for what is still to be written when the process ends
LATE = 600.0  # seconds after which the copies of a GPU are given up
LOCKED = 60.0  # seconds that a call waits while another process or sampler writes into the folder
_F = TypeVar("_F", bound=Callable[..., Any])
Named = Mapping[str, str] | Callable[..., Mapping[str, object]] | None
_log = logging.getLogger(__name__)


@overload
def sample(
    routine: _F,
    *,
    every: int,
    to: str | Path,
    contract: str,
    inputs: Named = None,
    out: str | Mapping[str, str] = "out",
    numerics: str | None = None,
    max_bytes: int = 1 << 30,
    seconds: float | None = None,
    name: str | None = None,
) -> _F: ...


@overload
def sample(
    routine: None = None,
    *,
    every: int,
    to: str | Path,
    contract: str,
    inputs: Named = None,
    out: str | Mapping[str, str] = "out",
    numerics: str | None = None,
    max_bytes: int = 1 << 30,
    seconds: float | None = None,
    name: str | None = None,
) -> Callable[[_F], _F]: ...


def sample(
    routine: Callable[..., Any] | None = None,
    *,
    every: int,
    to: str | Path,
    contract: str,
    inputs: Named = None,
    out: str | Mapping[str, str] = "out",
    numerics: str | None = None,
    max_bytes: int = 1 << 30,
    seconds: float | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Record the first call of ``routine`` and then one in ``every``, for ``fp8-oracle judge DIR``.

    Parameters
    ----------
    routine
        The function of the engine; without it ``sample(...)`` is a decorator.
    every
        One call in so many; 0 returns ``routine`` itself. ``FP8_ORACLE_SAMPLE`` in the environment replaces it.
    to
        The folder of the files, which is made; several processes may share it.
    contract
        A name of :func:`oracle.contracts`.
    inputs
        Which argument is which input or option of the contract: None, parameters of the same names; a mapping from the
        contract's names to those of parameters; or a function of the same arguments that returns inputs and options by
        the contract's names.
    out
        Where the routine returns None, the parameter that holds the output, or a mapping from the contract's outputs to
        parameters. An output with the name of an input is that parameter.
    numerics
        The declared schedule, as for :func:`oracle.judge`.
    max_bytes
        Of all files in the folder, and of the calls that wait to be written; recording ends with a call that would pass
        it. A larger call is dropped.
    seconds
        Recording ends so long after this call of ``sample``; None never.
    name
        The subject in reports (default: module and name of the routine).

    Returns
    -------
    callable
        The routine, wrapped. Its attribute ``sampler`` counts (``recorded``, ``dropped``), says what went wrong
        (``problems``) and waits for the disk (``flush()``). A routine never raises because of its recording: the first
        problem is logged.

    Raises
    ------
    OptionError
        A number is negative, or a required input of the contract is no parameter of the routine.
    ContractError, FixtureError
        There is no such contract; the folder cannot be made.
    """
    given = os.environ.get(SWITCH, "")
    if given and not given.isdecimal():
        raise OptionError(f"{SWITCH}={given!r} is no number of calls; 0 turns sampling off")
    every = int(given) if given else every
    if every < 0 or max_bytes < 0:
        raise OptionError(f"every={every}, max_bytes={max_bytes}: neither is negative")
    if routine is None:
        asked: dict[str, Any] = {"every": every, "to": to, "contract": contract, "inputs": inputs, "out": out}
        asked |= {"numerics": numerics, "max_bytes": max_bytes, "seconds": seconds, "name": name}
        return lambda found: sample(found, **asked)
    if every == 0:
        return routine
    return _wrapped(Sampler(routine, every, Path(to), contract, inputs, out, numerics, max_bytes, seconds, name))


def _wrapped(sampler: Sampler) -> Callable[..., Any]:
    import torch

    routine, compiling = sampler.routine, torch.compiler.is_compiling

    @functools.wraps(routine)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling() or not sampler.due():  # the first is a constant to a compiler, which inlines the routine
            return routine(*args, **kwargs)
        return sampler.call(args, kwargs)

    wrapper.sampler = sampler  # type: ignore[attr-defined]
    return wrapper


@dataclass
class _Taken:
    """A call on its way to the disk: copies on the host, of a GPU complete once the byte ``done`` is 1."""

    number: int
    inputs: dict[str, Tensor]
    options: dict[str, object]
    output: dict[str, Tensor] = field(default_factory=dict)
    arch: str = ""
    done: Tensor | None = None
    about: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(x.nbytes for x in (*self.inputs.values(), *self.output.values()))


class Sampler:
    """The recording of one routine; see :func:`sample`."""

    _queue: queue.Queue[_Taken]
    _thread: threading.Thread | None
    _lock: threading.Lock
    _lock_file: int | None = None

    def __init__(
        self,
        routine: Callable[..., Any],
        every: int,
        to: Path,
        contract: str,
        inputs: Named,
        out: str | Mapping[str, str],
        numerics: str | None,
        max_bytes: int,
        seconds: float | None,
        name: str | None,
    ) -> None:
        from oracle.fixtures.files import make_folder
        from oracle.routines import get

        self.routine, self.every, self.to, self.max_bytes = routine, every, to, max_bytes
        self.recorded = self.dropped = 0
        self.problems: list[str] = []
        self._contract, self._numerics = get(contract), numerics
        of, what = getattr(routine, "__module__", ""), getattr(routine, "__qualname__", type(routine).__name__)
        self._name = name or f"{of}:{what}"
        self._inputs, self._out = inputs, out
        self._signature = self._checked_signature()
        self._ends = None if seconds is None else time.monotonic() + seconds
        make_folder(to)
        self._open = True
        self._calls = itertools.count()
        self._versions: dict[str, str] | None = None
        self._fresh()
        itself = weakref.ref(self)

        def in_child() -> None:
            if (sampler := itself()) is not None:
                sampler._fresh()

        def at_end() -> None:
            if (sampler := itself()) is not None:
                sampler.flush(ENDING)

        os.register_at_fork(after_in_child=in_child)
        atexit.register(at_end)

    # --- in the engine --------------------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether the call that is about to be made is recorded; counts it."""
        return next(self._calls) % self.every == 0 and self._open

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call and record it."""
        taken = None
        if self._may_record():
            try:
                taken = self._before(args, kwargs)
            except (Exception, SystemExit) as error:  # of inputs=, too; the engine goes on
                self._problem(error)
        result = self.routine(*args, **kwargs)
        if taken is not None:
            try:
                self._after(taken, args, kwargs, result)
            except (Exception, SystemExit) as error:
                self._problem(error)
        return result

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until every recorded call is written, ``seconds`` at most; whether it is."""
        waiting = self._queue
        with waiting.all_tasks_done:
            return waiting.all_tasks_done.wait_for(lambda: not waiting.unfinished_tasks, seconds)

    def _may_record(self) -> bool:
        import torch

        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if begun and torch.cuda.is_current_stream_capturing():
            return False
        if self._ends is not None and time.monotonic() >= self._ends:
            self._open = False
        if self._open and self._queue.full():
            self._drop()
            return False
        return self._open

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Taken | None:
        """Copies of the inputs as they are before the call; None where the folder has no room for them."""
        from torch import Tensor

        named = self._named(args, kwargs)
        option_names = {spec.name for spec in self._contract.options}
        options = {name: value for name, value in named.items() if name in option_names}
        inputs = {}
        for spec in self._contract.inputs:
            value = named.get(spec.name)
            if isinstance(value, Tensor):
                inputs[spec.name] = value
            elif value is not None or not spec.optional:
                raise TypeError(f"{spec.name} is a {type(value).__name__}, no tensor")
        if self._held + sum(x.nbytes for x in inputs.values()) > self.max_bytes:
            self._drop()
            return None
        return _Taken(next(self._numbers), {name: _copied(x, name) for name, x in inputs.items()}, options)

    def _after(self, taken: _Taken, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Copies of the outputs; the call goes to the thread that writes."""
        import torch

        outputs = self._outputs(args, kwargs, result)
        taken.output = {name: _copied(x, name) for name, x in outputs.items()}
        device = next(iter(outputs.values())).device
        taken.arch = "cpu"
        if device.type == "cuda":
            taken.arch = "sm{}{}".format(*torch.cuda.get_device_capability(device))
            taken.done = torch.zeros(1, dtype=torch.uint8, device="cpu", pin_memory=True)
            taken.done.copy_(torch.ones(1, dtype=torch.uint8, device=device), non_blocking=True)
        taken.about = {"time": datetime.now(UTC).isoformat(), "process": str(os.getpid()), "device": str(device)}
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._write_all, args=(self._queue,), daemon=True)
                starting.thread("the thread that writes samples", thread)
                self._thread = thread  # only now: what is queued for a thread that never ran is waited for in vain
            self._held += taken.size
        try:
            self._queue.put_nowait(taken)
        except queue.Full:  # other threads were faster
            self._let_go(taken)
            self._drop()

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, object]:
        """Inputs and options by the contract's names."""
        if callable(self._inputs):
            return self._inputs(*args, **kwargs)
        arguments = self._bound(args, kwargs)
        renamed = self._inputs or {}
        known = [*(spec.name for spec in self._contract.inputs), *(spec.name for spec in self._contract.options)]
        names = {name: renamed.get(name, name) for name in known}
        return {name: arguments[parameter] for name, parameter in names.items() if parameter in arguments}

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by the names of parameters, defaults included."""
        assert self._signature is not None
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        more = [p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        return {**bound.arguments, **(bound.arguments[more[0]] if more else {})}

    def _outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Tensor]:
        """The outputs by name: what the call returned, or the parameters that it wrote."""
        from torch import Tensor

        names, found = self._contract.returns, result
        if result is None:
            arguments = self._bound(args, kwargs)
            named = {"out": self._out} if isinstance(self._out, str) else self._out
            found = {name: arguments.get(named.get(name, name)) for name in names}
        elif isinstance(result, Tensor):
            found = {names[0]: result} if len(names) == 1 else {}
        elif isinstance(result, tuple | list):
            found = dict(zip(names, result, strict=True))
        if missing := [name for name in names if not isinstance(found.get(name), Tensor)]:
            raise TypeError(f"{self._name} gave a {type(result).__name__} without {', '.join(missing)}")
        return {name: found[name] for name in names}

    def _checked_signature(self) -> inspect.Signature | None:
        """The signature of the routine, None where nothing needs it; OptionError where it lacks an input."""
        try:
            signature = inspect.signature(self.routine)
        except (TypeError, ValueError):
            if callable(self._inputs):
                return None  # then it returns what it computes
            raise OptionError(f"{self._name} has no signature; pass inputs= as a function of its arguments") from None
        parameters = signature.parameters.values()
        if callable(self._inputs) or any(p.kind is p.VAR_KEYWORD for p in parameters):
            return signature
        renamed = self._inputs or {}
        due = [renamed.get(spec.name, spec.name) for spec in self._contract.inputs if not spec.optional]
        if missing := [name for name in due if name not in signature.parameters]:
            raise OptionError(
                f"{self._name} has no parameter {missing[0]!r}, an input of {self._contract.name}; pass "
                f"inputs={{{missing[0]!r}: its parameter}}, or a function of its arguments"
            )
        return signature

    # --- in the thread that writes --------------------------------------------------------------------------

    def _write_all(self, waiting: queue.Queue[_Taken]) -> None:
        while True:
            taken = waiting.get()
            try:
                self._write(taken)
            except Exception as error:  # a full disk, an option that no file can hold
                self._problem(error)
            finally:
                self._let_go(taken)
                waiting.task_done()

    def _write(self, taken: _Taken) -> None:
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
        head = (self._contract.name, taken.inputs, output, taken.options, taken.arch, self._numerics, self._name, "")
        content = call_file.content(call_file.CallFile(*head, about))
        path = self.to / f"{self._contract.name}-{os.getpid()}-{self._token}-{taken.number:06d}{call_file.SUFFIX}"
        with self._alone():
            if _size(self.to) + len(content) > self.max_bytes:
                self._close(f"{self.to} holds max_bytes={self.max_bytes}")
                return
            write_bytes(path, content)
        self.recorded += 1

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process or sampler measures the folder or writes into it; TimeoutError after ``LOCKED`` seconds.

        A lock of flock is shared with the children of a fork. So it is taken back here, not left to the closing of the
        descriptor, and a child closes its copy (:meth:`_fresh`).
        """
        path = self.to / ".lock"
        descriptor = self._lock_file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            late = time.monotonic() + LOCKED
            while not _locked(descriptor):
                if time.monotonic() > late:
                    raise TimeoutError(f"another process holds {path} for {LOCKED:g} s; end it, or sample elsewhere")
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
        self._queue = queue.Queue[_Taken](PENDING)
        self._thread = None
        self._lock = threading.Lock()
        self._token, self._numbers = secrets.token_hex(4), itertools.count()
        self.recorded = self.dropped = self._held = 0

    def _let_go(self, taken: _Taken) -> None:
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
    except BlockingIOError:
        return False
    return True


def _size(folder: Path) -> int:
    """Bytes of the entries of a folder. A link counts as itself, and what another process takes away not at all."""
    size = 0
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            size += entry.stat(follow_symlinks=False).st_size
    return size


def _copied(x: Tensor, name: str) -> Tensor:
    """A copy on the host with the strides and the padding of ``x``; of a GPU one that its stream is still to make."""
    import torch

    from oracle.fixtures.strides import laid_out, padded_memory
    from oracle.routines.base import plain

    tensor = plain(x, name).detach()
    memory = padded_memory(tensor)
    source = tensor if memory is None else memory
    copy = torch.empty_like(source, device="cpu", pin_memory=tensor.is_cuda)
    copy.copy_(source, non_blocking=tensor.is_cuda)
    return copy if memory is None else laid_out(copy, tensor.shape, tensor.stride())
