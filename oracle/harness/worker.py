"""The process that runs a foreign kernel: ``python -m oracle.harness.worker REQUESTS REPLIES``.

Reads one JSON request a line from one file descriptor and writes one JSON reply a line to another; tensors are passed
in safetensors files. Standard output and error are the kernel's. The worker judges nothing: it replies what the kernel
returned and what happened to the memory around it. What the kernel raises is caught and reported; what else it does to
the process is found by the parent (:mod:`oracle.harness.process`).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from oracle.fixtures.strides import padded_memory
from oracle.harness import launches
from oracle.harness.concurrency import Made, bytes_of, run_concurrently
from oracle.harness.memory import GUARD, Guarded, Poisoning, guarded, placed

Reply = dict[str, Any]


def failure(kind: str, error: str) -> Reply:
    """The reply to a request that has no result."""
    return {"ok": False, "kind": kind, "error": error}


class Refused(Exception):
    """What the kernel returned is no result; ``kind`` goes into the reply."""

    kind = "result"


class Mismatch(Refused):
    """The kernel's signature does not take this call."""

    kind = "signature"


def main(requests: int, replies: int) -> None:
    """Serve until the requests end."""
    server = Server()
    with os.fdopen(requests, "r", encoding="utf-8") as incoming:
        for line in incoming:
            reply = server.answer(json.loads(line))
            if os.getpid() != server.owner:
                os._exit(0)  # importing the kernel forked
            os.write(replies, (json.dumps(reply) + "\n").encode())


class Server:
    """The loaded kernel and how it is called."""

    def __init__(self) -> None:
        self.kernel: Callable[..., Any] | None = None
        self.adapter: Callable[..., Any] | None = None
        self.device = "cpu"
        self.owner = os.getpid()

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """One reply; everything that the kernel raises becomes its text."""
        try:
            return self.load(request) if request["op"] == "load" else self.call(request)
        except Refused as error:
            return failure(error.kind, str(error))
        except launches.Uncapturable as error:
            return failure("uncapturable", str(error))
        except MemoryError as error:
            return failure("memory", f"out of memory: {error or 'MemoryError'}")
        except NotImplementedError as error:
            return failure("unsupported", _text(error))
        except BaseException as error:  # foreign code may raise anything, KeyboardInterrupt and SystemExit included
            if type(error).__name__ == "OutOfMemoryError":
                return failure("memory", _text(error))
            if isinstance(error, SystemExit):
                return failure("exit", f"the kernel called exit({error.code})")
            device = "CUDA" in str(error) or type(error).__name__ == "AcceleratorError"
            return failure("device" if device else "raised", _text(error))

    def load(self, request: Mapping[str, Any]) -> Reply:
        """Import the kernel and its adapter."""
        for folder in request["path"]:
            if folder not in sys.path:
                sys.path.append(folder)
        self.device = request["device"]
        self.kernel = _import(request["kernel"])
        self.adapter = _import(request["adapter"]) if request["adapter"] else None
        return {"ok": True, "takes_out": self.adapter is None and takes(self.kernel, "out")}

    def call(self, request: Mapping[str, Any]) -> Reply:
        """One call between guard zones; the result goes to ``request["output"]``."""
        assert self.kernel is not None
        inputs = self._placed(request, request["inputs"])
        before = {name: g.inside().clone() for name, g in inputs.items()}
        options = {name: _option(value) for name, value in request["options"].items()}
        outputs, mode = self._fresh(request), request["mode"]
        beside = None if request["beside"] is None else self._placed(request, request["beside"])
        named: Mapping[str, Tensor]
        outside: list[str] = []
        disturbed = False
        allocations = Poisoning(int(request["poison"]))

        def read(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
            watched = {g.buffer.untyped_storage().data_ptr(): g for g in (*outputs.values(), *allocations.made)}
            return _stored(named, watched)

        start = time.perf_counter()
        with contextlib.nullcontext() if mode in launches.UNPOISONED else allocations:
            if mode == "plain":
                named = self._invoke(inputs, options, outputs, request)
                if self.device != "cpu":  # a user waits for the stream of the call, and for no other
                    torch.cuda.current_stream().synchronize()
                seconds = time.perf_counter() - start
                seen = read(named)
            elif mode == "threads":
                assert beside is not None
                named, outside, disturbed = self._concurrently(inputs, beside, options, request)
                seconds, seen = time.perf_counter() - start, read(named)
            else:
                assert beside is not None
                fresh, theirs = self._fresh(request), {name: g.inside().clone() for name, g in beside.items()}
                call = self._launched(inputs, before, theirs, options, outputs, request)
                other = self._launched(beside, theirs, before, options, fresh, request)
                named, seen = launches.launch(mode, call, other, read, poison=int(request["poison"]))
                seconds, outside = time.perf_counter() - start, [d for g in fresh.values() if (d := g.damage())]
            late: list[str] = []
            if self.device != "cpu":
                torch.cuda.synchronize()
                after = {} if mode == "threads" else read(named)
                late = [name for name, x in after.items() if not torch.equal(bytes_of(x), bytes_of(seen[name]))]
        damaged = outside + [d for g in (*inputs.values(), *outputs.values(), *allocations.made) if (d := g.damage())]
        changed = [name for name, g in inputs.items() if not torch.equal(g.inside(), before[name])]
        facts = {
            name: {"dtype": str(t.dtype), "shape": list(t.shape), "stride": list(t.stride()), "device": str(t.device)}
            for name, t in named.items()
        }
        safetensors.torch.save_file(seen, request["output"])
        seen_by = {"late": late, "disturbed": disturbed}
        return {"ok": True, "outputs": facts, "guards": damaged, "changed": changed, "seconds": seconds, **seen_by}

    def _placed(self, request: Mapping[str, Any], path: str) -> dict[str, Guarded]:
        """The inputs in a file, on the device between guard zones."""
        tensors = safetensors.torch.load_file(path)
        for name in request["transposed"]:
            tensors[name] = tensors[name].view(torch.uint8).t().view(tensors[name].dtype)
        poison, lead = int(request["poison"]), request["lead"]
        return {n: placed(n, t, self.device, poison=poison, lead=int(lead.get(n, 0))) for n, t in tensors.items()}

    def _fresh(self, request: Mapping[str, Any]) -> dict[str, Guarded]:
        """New poisoned outputs between guard zones."""
        poison, due = int(request["poison"]), request["out"].items()
        return {n: guarded(n, shape, getattr(torch, dtype), self.device, poison=poison) for n, (shape, dtype) in due}

    def _concurrently(
        self, inputs: Mapping[str, Guarded], beside: Mapping[str, Guarded], options: Mapping[str, object],
        request: Mapping[str, Any],
    ) -> tuple[Mapping[str, Tensor], list[str], bool]:  # fmt: skip
        """What :func:`~oracle.harness.concurrency.run_concurrently` finds of calls on these inputs and on those."""

        def caller(given: Mapping[str, Guarded]) -> Callable[[], Made]:
            def call() -> Made:
                fresh = self._fresh(request)
                return Made(self._invoke(given, options, fresh, request), tuple(fresh.values()))

            return call

        return run_concurrently(caller(inputs), caller(beside), self.device)

    def _launched(
        self, inputs: Mapping[str, Guarded], own: Mapping[str, Tensor], theirs: Mapping[str, Tensor],
        options: Mapping[str, object], outputs: Mapping[str, Guarded], request: Mapping[str, Any],
    ) -> launches.Call:  # fmt: skip
        """One call on these inputs, whose bytes are ``own``; ``theirs`` are bytes of other inputs of these shapes."""

        def put(data: Mapping[str, Tensor]) -> None:
            for name, g in inputs.items():
                g.inside().copy_(data[name])

        run = partial(self._invoke, inputs, options, outputs, request)
        return launches.Call(run, partial(put, own), partial(put, theirs))

    def _invoke(
        self, inputs: Mapping[str, Guarded], options: Mapping[str, object], outputs: Mapping[str, Guarded],
        request: Mapping[str, Any],
    ) -> dict[str, Tensor]:  # fmt: skip
        """The outputs of one call by name."""
        given = {name: g.tensor for name, g in inputs.items()}
        return _named(self._run(given, options, outputs), outputs, request["names"])

    def _run(self, given: Mapping[str, Tensor], options: Mapping[str, object], outputs: Mapping[str, Guarded]) -> Any:
        assert self.kernel is not None
        try:
            if self.adapter is not None:
                return self.adapter(self.kernel, dict(given), dict(options))
            out = outputs["out"].tensor if "out" in outputs else None
            return self.kernel(**by_name(self.kernel, given, options, out=out))
        finally:
            if os.getpid() != self.owner:
                os._exit(0)  # a child that the kernel forked: it must not reply or write a file


def by_name(
    kernel: Callable[..., Any], given: Mapping[str, Tensor], options: Mapping[str, object], *, out: Tensor | None = None
) -> dict[str, object]:
    """How a kernel is called: every input by its name, options and ``out`` if it takes them.

    Raises Mismatch: its signature has other names. A builtin without a signature is not checked.
    """
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
        raise Mismatch(
            f"the kernel cannot be called with {', '.join(arguments)}: {error}; pass an adapter "
            "MODULE:CALLABLE that takes (kernel, inputs, options) and returns the output"
        ) from None
    return arguments


def _import(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        if not hasattr(found, part):
            raise Refused(f"{module} has no {path!r}")
        found = getattr(found, part)
    if not callable(found):
        raise Refused(f"{name} is a {type(found).__name__}, not callable")
    return found  # type: ignore[no-any-return]


def takes(kernel: Callable[..., Any], name: str) -> bool:
    """Whether a kernel has a parameter of this name; ``**kwargs`` take every option, and never ``out``."""
    try:
        parameters = inspect.signature(kernel).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature: gets nothing that it may not take
        return False
    return any(p.name == name or (name != "out" and p.kind is p.VAR_KEYWORD) for p in parameters)


def _named(result: Any, outputs: Mapping[str, Guarded], names: list[str]) -> dict[str, Tensor]:
    if result is None and outputs:
        return {name: g.tensor for name, g in outputs.items()}
    if isinstance(result, Tensor):
        result = (result,)
    if isinstance(result, Mapping):
        missing = [name for name in names if name not in result]
        if missing:
            raise Refused(f"the result lacks {', '.join(missing)}; it holds {', '.join(map(str, result)) or 'nothing'}")
        result = tuple(result[name] for name in names)
    if not isinstance(result, tuple | list) or len(result) != len(names):
        what = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        raise Refused(f"the kernel returned {what}; the contract's outputs are {', '.join(names)}")
    for name, value in zip(names, result, strict=True):
        if not isinstance(value, Tensor):
            raise Refused(f"the result {name} is a {type(value).__name__}, not a tensor")
        if value.layout != torch.strided or value.device.type == "meta":
            raise Refused(f"the result {name} is {value.layout} on {value.device}, no dense tensor with data")
    return dict(zip(names, result, strict=True))


def _stored(named: Mapping[str, Tensor], watched: Mapping[int, Guarded]) -> dict[str, Tensor]:
    """The logical elements of every output, and the memory of those with padding, guard zones left out."""
    found = {name: _plain(t) for name, t in named.items()}
    for name, t in named.items():
        owner = watched.get(t.untyped_storage().data_ptr())
        end = None if owner is None else GUARD + owner.inside().numel()
        memory = padded_memory(t.detach(), end=end)
        if memory is not None:
            found[f"memory.{name}"] = _plain(memory)
    return found


def _plain(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().clone()


def _option(value: object) -> object:
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return tuple(value) if isinstance(value, list) else value


def _text(error: BaseException) -> str:
    first = next(iter(str(error).splitlines()), "") or "no message"
    return f"{type(error).__name__}: {first[:500]}"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
