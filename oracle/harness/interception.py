"""Calls of bound routines, taken where they are made, in every thread of this process.

An operator of torch (``torch._scaled_mm``, ``torch.ops._C.cutlass_scaled_mm``) gets a kernel of the dispatch key
``BackendSelect``, which the dispatcher reaches just before the kernel of the device: calls of C++ and of compiled
graphs pass there too, in inference mode as well, and no other operator costs anything. A Python function is replaced
by a wrapper in every module that has it, now or when its module is imported. :meth:`Interception.remove` takes all of
it back.

Not covered: a reference to a Python function that is kept elsewhere than in a module (a default argument, an attribute
of an object); methods, functions of handles and classes; kernels that are launched by a grid, as Triton's; a Python
function that torch.compile has inlined; an operator that was compiled into a fused kernel.

Source: torch ``c10/core/DispatchKey.h`` (the order of the keys).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from oracle.harness.after_import import AfterImport

Run = Callable[[], Any]
"""The call itself, without arguments."""


class Around(Protocol):
    """Is given every call of a routine: makes it by ``run``, once, and returns what that returns."""

    def __call__(self, target: str, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...


class Interception:
    """All calls of ``targets`` (``"MODULE:CALLABLE"``) go to ``around``, until :meth:`remove`.

    ``loads`` are modules whose import registers operators. A target whose module is not imported is waited for.
    """

    def __init__(self, targets: Iterable[str], loads: Iterable[str], around: Around) -> None:
        self._waiting, self._around = list(dict.fromkeys(targets)), around
        self._libraries: list[Any] = []
        self._wrappers: dict[int, tuple[Any, Any]] = {}  # by the id of either: original and wrapper
        modules = {target.partition(":")[0] for target in self._waiting}
        self._later = AfterImport({*modules, *loads}, self.install)
        try:
            self.install()
        except BaseException:  # raised again: no routine stays replaced
            self.remove()
            raise

    def install(self) -> None:
        """Intercept the targets that are there by now."""
        originals = {}
        for target in list(self._waiting):
            if (packet := operator_of(target)) is not None:
                self._register(target, packet)
            elif (export := _export_of(target)) is not None:
                originals[id(export)] = target, export
            else:
                continue
            self._waiting.remove(target)
        for target, original in originals.values():
            wrapper = self._wrapper(target, original)
            self._wrappers[id(original)] = self._wrappers[id(wrapper)] = (original, wrapper)
        if originals:
            self._replace({key: self._wrappers[key][1] for key in originals})

    def remove(self) -> None:
        """Put everything back, in modules too that were imported since."""
        self._later.end()
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()
        self._replace({id(wrapper): original for original, wrapper in self._wrappers.values()})

    def _register(self, target: str, packet: Any) -> None:
        namespace, _, name = packet._qualified_op_name.partition("::")
        library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        self._libraries.append(library)
        for overload in packet.overloads():
            operator = getattr(packet, overload)
            full = name if overload == "default" else f"{name}.{overload}"
            library.impl(full, self._kernel(target, operator), "BackendSelect", with_keyset=True)

    def _kernel(self, target: str, operator: Any) -> Callable[..., Any]:
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        written = {argument.name for argument in operator._schema.arguments if argument.is_out}

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            def run() -> Any:
                return operator.redispatch(keyset & below, *args, **kwargs)

            if any(isinstance(x, Tensor) and (x.device.type == "meta" or isinstance(x, FakeTensor)) for x in args):
                return run()  # the shapes of a call are asked, which has no numbers
            supplied = {name: value for name, value in kwargs.items() if name not in written}  # they are returned, too
            return self._around(target, run, args, supplied)

        return kernel

    def _wrapper(self, target: str, original: Callable[..., Any]) -> Callable[..., Any]:
        compiling, around = torch.compiler.is_compiling, self._around

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if compiling():  # a constant to a compiler, which inlines the routine
                return original(*args, **kwargs)
            return around(target, functools.partial(original, *args, **kwargs), args, kwargs)

        return wrapper

    def _replace(self, by_id: Mapping[int, Any]) -> None:
        """In every module, one object for another."""
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType):
                for name, value in list(vars(module).items()):
                    if id(value) in by_id:
                        vars(module)[name] = by_id[id(value)]  # past what a lazy module does when it is set


def operator_of(target: str) -> Any | None:
    """The operator that a target names, all its overloads; None for a Python function, and where none is registered."""
    module, _, path = target.partition(":")
    if module != "torch":
        return None
    name = path.removeprefix("ops.") if path.startswith("ops.") else f"aten.{path}"
    result: Any = torch.ops
    for part in name.split("."):
        result = getattr(result, part, None)
    return result if isinstance(result, torch._ops.OpOverloadPacket) else None


def _export_of(target: str) -> Callable[..., Any] | None:
    """The function that a target names; None where its module is not imported, or has no such function."""
    module, _, name = target.partition(":")
    export: Any = vars(sys.modules[module]).get(name) if module in sys.modules else None
    launched = hasattr(type(export), "__getitem__")  # by kernel[grid](...), which a wrapper has not
    instances = isinstance(export, type)  # are asked for by isinstance, which takes no wrapper
    return export if callable(export) and not launched and not instances else None
