"""The compiled CPU kernels on disk: kept by what was compiled, so that none outlives a change of what it came from.

numba keeps a kernel by its bytecode, its types and the machine, and drops it when its own file changes. A kernel is
compiled from more than that: constants of its code, and everything that it names elsewhere (numbers of
:mod:`oracle.tensorcore.packing`, pieces and intrinsics of other files), whose values numba freezes. :func:`digest`
covers those too: code, constants and defaults of a function, the value of every global that its code names, and of
functions among these the same again. It adds no file: :class:`KernelCache` makes it a part of numba's own key.

What belongs to another distribution counts by its name and version. A value of a kind that is not known here is a
TypeError at the first call: one that were left out could change unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core.caching import FunctionCache
from numba.core.runtime import rtsys
from numba.core.types import Type

from oracle.loading import collector_at_rest

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), np.generic, np.dtype)


class KernelCache(FunctionCache):  # type: ignore[misc]  # numba carries no types
    """numba's cache of one function, whose keys have the digest of what is compiled with these ``options``."""

    def __init__(self, function: Any, options: dict[str, Any]) -> None:
        super().__init__(function)
        self._options = options

    @cached_property
    def _digest(self) -> str:  # at the first call: pieces may stand below the kernel that names them
        return digest(self._py_func, self._options)

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), self._digest)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What is kept is machine code, which needs numba's runtime alone: what it can type and lower, which takes a
        third of a second to import and to register, is loaded where a kernel must be compiled."""
        with collector_at_rest(), self._guard_against_spurious_io_errors():
            rtsys.initialize(target_context)
            return self._load_overload(sig, target_context)


def digest(function: Any, options: dict[str, Any]) -> str:
    """SHA-256 of what numba compiles of ``function``, hexadecimal. TypeError: it names a value of an unknown kind."""
    text = hashlib.sha256()
    for line in (repr(sorted(options.items(), key=str)), *_lines(function, function.__module__.partition(".")[0], {})):
        text.update(line.encode() + b"\n")
    return text.hexdigest()


def _lines(value: Any, package: str, seen: dict[int, str]) -> Iterator[str]:
    """A value that code names, in lines of text."""
    value = getattr(value, "py_func", getattr(value, "_defn", value))  # of a piece; of an intrinsic
    value = getattr(value, "__wrapped__", value)
    if isinstance(value, FunctionType) and value.__module__.partition(".")[0] == package:
        if id(value) in seen:
            yield seen[id(value)]
            return
        seen[id(value)] = f"function {len(seen)}"
        yield repr(value.__defaults__)
        codes = list(_codes(value.__code__))
        for code in codes:
            yield f"{code.co_code.hex()} {code.co_varnames} {code.co_names}"
        for constant in (x for code in codes for x in code.co_consts if not isinstance(x, CodeType)):
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)
        names = sorted({name for code in codes for name in code.co_names} & value.__globals__.keys())
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        for name, part in [(name, value.__globals__[name]) for name in names] + [
            (n, x.cell_contents) for n, x in cells
        ]:
            yield name
            yield from _lines(part, package, seen)
    elif isinstance(value, ModuleType):
        yield f"{value.__name__} {getattr(value, '__version__', '')}"
    elif isinstance(value, type | FunctionType | BuiltinFunctionType):
        yield f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _lines(part, package, seen)
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape} {value.tobytes().hex()}"
    elif isinstance(value, (*PLAIN, Type, ir.Type)):
        yield str(value) if isinstance(value, ir.Type) else repr(value)
    else:
        raise TypeError(f"a compiled kernel names a {type(value).__name__}, which its key on disk does not cover")


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
