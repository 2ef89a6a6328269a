"""The process that runs a foreign kernel; :mod:`oracle.harness.program` says how it is started.

Takes one JSON request a message from a socket and sends one message of fixed form back
(:mod:`oracle.harness.protocol`). Tensors lie in memory that the parent owns (:mod:`oracle.harness.memory`); standard
output and error are the kernel's. The worker judges nothing: it calls the kernel and says where the result lies. What
the kernel raises is caught and reported; what else it does to the process is found by the parent
(:mod:`oracle.harness.process`), and so is what it does to shared memory.

The files of the worker need nothing but torch and each other, and are loaded under another name; no module of the
judge is on the module table when the kernel is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import json
import mmap
import os
import socket
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle.errors import ProcessError, among
from oracle.fixtures.strides import padded_memory
from oracle.harness import launches
from oracle.harness.concurrency import Made, bytes_of, run_concurrently
from oracle.harness.memory import ALIGNED, GUARD, Guarded, Poisoning, carried, guarded, imported, opened
from oracle.harness.protocol import AXES, DTYPES, REQUEST, Claim, Reply, frames_of, pack


class Refused(Exception):
    """What the kernel returned is no result; ``kind`` goes into the reply."""

    kind = "result"


class Mismatch(Refused):
    """The kernel's signature does not take this call."""

    kind = "signature"


def main(channel: socket.socket) -> None:
    """Serve until the requests end."""
    server = Server()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, REQUEST, 1)
        if not message:
            return
        request = json.loads(message)
        reply = server.answer(request, *descriptors)
        if os.getpid() != server.owner:
            os._exit(0)  # importing the kernel forked
        channel.send(pack(bytes.fromhex(request["nonce"]), reply))


class Server:
    """The loaded kernel and how it is called."""

    def __init__(self) -> None:
        self.kernel: Callable[..., Any] | None = None
        self.adapter: Callable[..., Any] | None = None
        self.device = "cpu"
        self.owner = os.getpid()
        self.shared: mmap.mmap | None = None

    def answer(self, request: Mapping[str, Any], memory: int | None = None) -> Reply:
        """One reply; everything that the kernel raises becomes its text. ``memory`` replaces the shared memory."""
        if memory is not None:
            self.shared = mmap.mmap(memory, os.fstat(memory).st_size)
            os.close(memory)
        try:
            operations = {
                "start": lambda request: Reply("ok"),
                "probe": self.probe,
                "load": self.load,
                "code": self.code,
                "lacks": self.lacks,
                "call": self.call,
            }
            return operations[request["op"]](request)
        except Refused as error:
            return Reply(error.kind, str(error))
        except launches.Uncapturable as error:
            return Reply("uncapturable", str(error))
        except ProcessError as error:
            return Reply("untested", f"not tried: {error}")
        except MemoryError as error:
            return Reply("memory", f"out of memory: {error or 'MemoryError'}")
        except NotImplementedError as error:
            return Reply("unsupported", _text(error))
        except BaseException as error:  # foreign code may raise anything, KeyboardInterrupt and SystemExit included
            text = "\n".join((_text(error), *frames_of(error)))
            if type(error).__name__ == "OutOfMemoryError":
                return Reply("memory", text)
            if isinstance(error, SystemExit):
                return Reply("exit", f"the kernel called exit({error.code})")
            device = "CUDA" in str(error) or type(error).__name__ == "AcceleratorError"
            return Reply("device" if device else "raised", text)

    def probe(self, request: Mapping[str, Any]) -> Reply:
        """Whether this process can open memory of the parent on the GPU; asked before the kernel is imported."""
        return Reply("ok" if bool((imported(request["handle"]) == 1).all()) else "device")

    def load(self, request: Mapping[str, Any]) -> Reply:
        """Import the kernel and its adapter."""
        for name in request["hidden"]:
            sys.modules.pop(name, None)
        sys.path[:] = [entry for entry in sys.path if entry not in request["hidden"]]
        if request["absent"]:
            absent(request["absent"])
        sys.path[:] = [*request["first"], *(folder for folder in sys.path if folder not in request["first"])]
        sys.path += [folder for folder in request["path"] if folder not in sys.path]
        self.device = request["device"]
        # the adapter first: that of a binding registers the operators of its library
        self.adapter = _import(request["adapter"]) if request["adapter"] else None
        self.kernel = _import(request["kernel"])
        return Reply("ok")

    def code(self, request: Mapping[str, Any]) -> Reply:
        """A digest of the code that importing the kernel reached."""
        return Reply("ok", code_reached(request["targets"], request["but"]))

    def lacks(self, request: Mapping[str, Any]) -> Reply:
        """The names that the kernel has no parameter for, one a line; none where an adapter calls it."""
        assert self.kernel is not None
        return Reply("ok", "\n".join(n for n in request["names"] if self.adapter is None and not takes(self.kernel, n)))

    def call(self, request: Mapping[str, Any]) -> Reply:
        """One call between guard zones; a result that does not lie in an output of the parent goes into the room."""
        assert self.kernel is not None and self.shared is not None
        laid = {index: opened(s["name"], s, self.shared) for index, s in enumerate(request["slots"])}
        here = self.device == "cpu"
        slots = {i: g if here or g.buffer.is_cuda else carried(g, self.device) for i, g in laid.items()}
        inputs, beside, outputs = (
            {slots[i].name: slots[i] for i in request[part]} for part in ("inputs", "beside", "outputs")
        )
        options = {name: _option(value) for name, value in request["options"].items()}
        mode, poison = request["mode"], int(request["poison"])
        supplied = {g.buffer.untyped_storage().data_ptr(): i for i, g in slots.items()}
        allocations, outside, disturbed = Poisoning(poison), list[str](), False
        named: Mapping[str, Tensor]

        def read(named: Mapping[str, Tensor]) -> dict[str, _Seen]:
            """What lies in the outputs now; on a GPU a copy, which the current stream makes."""
            own = {g.buffer.untyped_storage().data_ptr(): g for g in (*slots.values(), *allocations.made)}
            return {name: _seen(name, x, supplied, own) for name, x in named.items()}

        with contextlib.nullcontext() if mode in launches.UNPOISONED else allocations:
            if mode == "plain":
                named = self._invoke(inputs, options, outputs, request)
                if self.device != "cpu":  # a user waits for the stream of the call, and for no other
                    torch.cuda.current_stream().synchronize()
                seen = read(named)
            elif mode == "threads":
                result, outside, disturbed = self._concurrently(inputs, beside, options, request)
                named, seen = result, read(result)
            else:
                fresh = self._fresh(request)
                own, theirs = ({n: g.inside().clone() for n, g in part.items()} for part in (inputs, beside))
                call = self._launched(inputs, own, theirs, options, outputs, request)
                other = self._launched(beside, theirs, own, options, fresh, request)
                named, seen = launches.launch(mode, call, other, read, poison=poison)
                outside = [d for g in fresh.values() if (d := g.damage())]
            late: list[int] = []
            if self.device != "cpu":
                torch.cuda.synchronize()
                after = {} if mode == "threads" else read(named)
                late = [i for i, name in enumerate(after) if not torch.equal(after[name].source, seen[name].source)]
        for index, g in laid.items():
            if g is not slots[index]:  # for the parent to look at
                g.buffer.copy_(slots[index].buffer)
        damaged = outside + [d for g in allocations.made if (d := g.damage())]
        claims, at = [], request["room"]
        for name, one in seen.items():
            claim, at = (one.claim, at) if one.claim.slot >= 0 else self._kept(name, one, at)
            claims.append(claim)
        return Reply("ok", "\n".join(damaged), tuple(claims), tuple(late), disturbed)

    def _kept(self, name: str, seen: _Seen, at: int) -> tuple[Claim, int]:
        """A result copied into the room at this byte; its claim, and where the room goes on."""
        assert self.shared is not None
        source = seen.source
        if at + source.numel() > len(self.shared):
            raise Refused(f"the result {name} takes {source.numel()} bytes, more than any output of these inputs")
        if source.numel():
            torch.frombuffer(self.shared, dtype=torch.uint8, count=source.numel(), offset=at).copy_(source)
        return replace(seen.claim, offset=at), at + -(-source.numel() // ALIGNED) * ALIGNED

    def _fresh(self, request: Mapping[str, Any]) -> dict[str, Guarded]:
        """New poisoned outputs between guard zones, in memory of this process."""
        due = [request["slots"][i] for i in request["outputs"]]
        return {
            s["name"]: guarded(s["name"], s["shape"], _option(s["dtype"]), self.device, poison=int(request["poison"]))  # type: ignore[arg-type]
            for s in due
        }

    def _concurrently(
        self,
        inputs: Mapping[str, Guarded],
        beside: Mapping[str, Guarded],
        options: Mapping[str, object],
        request: Mapping[str, Any],
    ) -> tuple[Mapping[str, Tensor], list[str], bool]:
        """What :func:`~oracle.harness.concurrency.run_concurrently` finds of calls on these inputs and on those."""

        def caller(given: Mapping[str, Guarded]) -> Callable[[], Made]:
            def call() -> Made:
                fresh = self._fresh(request)
                return Made(self._invoke(given, options, fresh, request), tuple(fresh.values()))

            return call

        return run_concurrently(caller(inputs), caller(beside), self.device)

    def _launched(
        self,
        inputs: Mapping[str, Guarded],
        own: Mapping[str, Tensor],
        theirs: Mapping[str, Tensor],
        options: Mapping[str, object],
        outputs: Mapping[str, Guarded],
        request: Mapping[str, Any],
    ) -> launches.Call:
        """One call on these inputs, whose bytes are ``own``; ``theirs`` are bytes of other inputs of these shapes."""

        def put(data: Mapping[str, Tensor]) -> None:
            for name, g in inputs.items():
                g.inside().copy_(data[name])

        run = partial(self._invoke, inputs, options, outputs, request)
        return launches.Call(run, partial(put, own), partial(put, theirs))

    def _invoke(
        self,
        inputs: Mapping[str, Guarded],
        options: Mapping[str, object],
        outputs: Mapping[str, Guarded],
        request: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """The outputs of one call by name."""
        tensors = {name: g.tensor for name, g in inputs.items()}
        return _named(
            self._run(tensors, options, outputs, request["must"]),
            outputs,
            request["names"],
            request["optional"],
            request["others"],
        )

    def _run(
        self,
        given: Mapping[str, Tensor],
        options: Mapping[str, object],
        outputs: Mapping[str, Guarded],
        must: Sequence[str] | None,
    ) -> Any:
        assert self.kernel is not None
        try:
            if self.adapter is not None:
                return self.adapter(self.kernel, dict(given), dict(options))
            out = outputs["out"].tensor if "out" in outputs else None
            return self.kernel(**by_name(self.kernel, given, options, out=out, must=must))
        finally:
            if os.getpid() != self.owner:
                os._exit(0)  # a child that the kernel forked: it must not reply or write a file


def by_name(
    kernel: Callable[..., Any],
    given: Mapping[str, Tensor],
    options: Mapping[str, object],
    *,
    out: Tensor | None = None,
    must: Sequence[str] | None = None,
) -> dict[str, object]:
    """How a kernel is called: every input by its name, options, and ``out`` (any shape and dtype) if it takes that.

    No values are read. Source: Python ``inspect.signature``.

    Raises Mismatch: its signature has other names. NotImplementedError: that is so where the call is one that a kernel
    may refuse, or it does not take one of the arguments ``must``. A builtin without a signature is not checked.
    """
    if untaken := [name for name in must or () if not takes(kernel, name)]:
        raise NotImplementedError(f"it takes no {', '.join(untaken)}")
    arguments: dict[str, object] = {**given, **{k: v for k, v in options.items() if takes(kernel, k)}}
    if out is not None and takes(kernel, "out"):
        arguments["out"] = out
    try:
        signature = inspect.signature(kernel)
    except (TypeError, ValueError):  # a builtin without a signature
        return arguments
    try:
        signature.bind(**arguments)
    except TypeError as error:
        if must is not None:
            raise NotImplementedError(str(error)) from None
        raise Mismatch(
            f"the kernel cannot be called with {', '.join(arguments)}: {error}; pass an adapter "
            "MODULE:CALLABLE that takes (kernel, inputs, options) and returns the output"
        ) from None
    return arguments


def _import(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    try:
        target: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):  # itself, and no module that it imports
            text = f"{error} in the current folder or among what is installed; run where {error.name}.py is"
            raise ModuleNotFoundError(text, name=error.name) from None
        raise
    for name_of in path.split("."):
        part = name_of.removesuffix("()")
        if not hasattr(target, part):
            offered = [name for name, value in vars(target).items() if callable(value) and not name.startswith("_")]
            raise Refused(f"{module} has no {path!r}; {among(part, offered)}")
        target = getattr(target, part)
        target = target() if name_of.endswith("()") else target  # a handle, whose function is meant
    if not callable(target):
        raise Refused(f"{name} is a {type(target).__name__}, not callable")
    return target  # type: ignore[no-any-return]


def code_reached(targets: Sequence[str], but: str) -> str:
    """Digest of the files that this process has imported or mapped from elsewhere than an installed distribution, the
    folder ``but`` or the system, and of all of the packages of functions ``MODULE:CALLABLE``."""
    installed = [os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    apart = tuple(f"{folder}/" for folder in (but, "/usr", "/lib", "/lib64", *installed))
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    paths = {fields[5] for fields in maps if len(fields) > 5 and ".so" in fields[5]}
    paths |= {str(getattr(module, "__file__", "")) for module in list(sys.modules.values())}
    for target in targets:
        top = sys.modules.get(target.partition(":")[0].partition(".")[0])
        paths |= {str(path) for folder in getattr(top, "__path__", ()) for path in Path(folder).rglob("*.py")}
    folder_of = cache(os.path.realpath)  # files are many, their folders few
    places = {os.path.join(folder_of(path.parent), path.name) for path in map(Path, paths) if path.is_absolute()}
    files = {os.path.realpath(place) if os.path.islink(place) else place for place in places}
    digest = hashlib.sha256()
    for path in sorted(Path(file) for file in files if not file.startswith(apart)):
        if path.is_file():
            digest.update(os.fsencode(path.name) + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def takes(kernel: Callable[..., Any], name: str) -> bool:
    """Whether a kernel has a parameter of this name; ``**kwargs`` take every option, and never ``out``."""
    try:
        parameters = inspect.signature(kernel).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature: gets nothing that it may not take
        return False
    return any(p.name == name or (name != "out" and p.kind is p.VAR_KEYWORD) for p in parameters)


def _named(
    result: Any, outputs: Mapping[str, Guarded], names: list[str], optional: Sequence[str], others: int
) -> dict[str, Tensor]:
    """The outputs of a call by name, in the order of ``names``; without the ``optional`` ones that it does not return,
    or returns as None. A tuple may have a None for each of the ``others``, outputs of other calls of the contract."""
    if result is None and outputs:
        return {name: g.tensor for name, g in outputs.items()}
    if isinstance(result, Tensor):
        result = (result,)
    if isinstance(result, Mapping):
        names = [name for name in names if name in result or name not in optional]
        missing = [name for name in names if name not in result]
        if missing:
            raise Refused(f"the result lacks {', '.join(missing)}; it holds {', '.join(map(str, result)) or 'nothing'}")
        result = tuple(result[name] for name in names)
    if isinstance(result, tuple | list) and others and len(result) == len(names) + others:
        given = tuple(x for x in result if x is not None)
        result = given if len(given) == len(names) else result
    if isinstance(result, tuple | list) and len(result) == len(names):
        left = [(n, x) for n, x in zip(names, result, strict=True) if x is not None or n not in optional]
        names, result = [n for n, _ in left], tuple(x for _, x in left)
    if isinstance(result, tuple | list) and len(result) == len(names) - len(optional):
        names = [name for name in names if name not in optional]
    if not isinstance(result, tuple | list) or len(result) != len(names):
        what = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        raise Refused(f"the kernel returned {what}; the contract's outputs are {', '.join(names)}")
    for name, value in zip(names, result, strict=True):
        if not isinstance(value, Tensor):
            raise Refused(f"the result {name} is a {type(value).__name__}, not a tensor")
        if type(value) not in (Tensor, torch.nn.Parameter):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise Refused(f"the result {name} is a {kind}, which computes what is read; return a plain torch.Tensor")
        if value.layout != torch.strided or value.device.type == "meta":
            raise Refused(f"the result {name} is {value.layout} on {value.device}, no dense tensor with data")
    plain = [value.detach().resolve_conj().resolve_neg() for value in result]
    return dict(zip(names, plain, strict=True))


@dataclass(frozen=True)
class _Seen:
    """An output as it was at one time: what is said of it, and its bytes (with the padding where it has some)."""

    claim: Claim
    source: Tensor


def _seen(name: str, x: Tensor, given: Mapping[int, int], own: Mapping[int, Guarded]) -> _Seen:
    """An output: on the CPU one of those ``given`` by the parent is left where it lies, for the parent to read."""
    if x.dtype not in DTYPES or x.dim() > AXES:
        raise Refused(f"the result {name} has dtype {x.dtype} and {x.dim()} axes")
    device = x.device.type if x.device.type in ("cpu", "cuda") else "another device"
    claim = Claim(x.dtype, tuple(x.shape), x.stride(), device)
    storage = x.untyped_storage().data_ptr()
    if device == "cpu" and storage in given:
        claim = replace(claim, slot=given[storage], offset=int(x.storage_offset()) * x.element_size())
        return _Seen(claim, torch.empty(0, dtype=torch.uint8, device="cpu"))
    owner = own.get(storage)
    memory = padded_memory(x, end=None if owner is None else GUARD + owner.inside().numel())
    source = bytes_of((x if memory is None else memory).cpu())
    return _Seen(replace(claim, length=source.numel() // x.element_size(), padded=memory is not None), source)


def _option(value: object) -> object:
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return tuple(value) if isinstance(value, list) else value


def _text(error: BaseException) -> str:
    first = next(iter(str(error).splitlines()), "") or "no message"
    return f"{type(error).__name__}: {first[:500]}"


def absent(name: str) -> None:
    """Raises Refused: the kernel could import this module."""
    importlib.invalidate_caches()
    if (spec := importlib.util.find_spec(name)) is not None:
        where = spec.origin or list(spec.submodule_search_locations or ())
        raise Refused(f"{name} is visible to the kernel, at {where}; validate from a folder that does not hold it")
