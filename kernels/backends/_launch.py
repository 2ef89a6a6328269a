"""Repeated launches of a Triton kernel without Triton's own dispatch, which takes longer than a small kernel.

The first launch of a class of arguments goes through Triton and yields the compiled kernel; later launches of that
class start it directly. A class is everything on which Triton specialises: dtype and 16-byte alignment of pointers;
whether an integer is 1, a multiple of 16, wider than 32 bits; the constants; the warps; the device.

Not covered: ROCm, where Triton also specialises on the extent of a pointer's memory (Triton does every launch there).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes of a pointer, and the divisor of an integer, on which Triton specialises."""
CACHED = 4096
"""Exact arguments (such as numbers of rows) whose class is cached; the cache is cleared when it is full."""
EXACT = {"enable_fp_fusion": False}
"""Options of every launch: products and sums are never fused into one rounding, whatever Triton's default is."""


class Start(NamedTuple):
    """How to start a compiled kernel: ``call(programs, 1, 1, stream, *fixed, *parameters)``."""

    call: Callable[..., None]
    fixed: tuple[object, ...]
    ready: Any
    """The compiled kernel; ``ready[(programs, 1, 1)](*parameters)`` does the same and calls profilers."""


class Launch:
    """A ``triton.jit`` function with its constants and number of warps, callable on its other arguments.

    Parameters
    ----------
    kernel
        A function (native or interpreted) whose parameters are pointers, integers, then ``constants``.
    constants
        Its ``constexpr`` parameters, in its order.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, object], *, num_warps: int = 4) -> None:
        self.kernel, self.constants, self.num_warps = kernel, dict(constants), num_warps
        self._values = tuple(constants.values())
        self._compiled: dict[tuple[object, ...], Start] = {}
        self._met: dict[tuple[object, ...], Start] = {}

    def __call__(self, programs: int, pointers: tuple[Tensor, ...], integers: tuple[int, ...]) -> None:
        """Start ``programs`` programs on the current stream of the first pointer's device.

        Only the first pointer's dtype is part of the cache key: the caller never changes the dtypes of the others.
        """
        device, bits = pointers[0].device, 0
        if device.type != "cuda" or torch.version.hip is not None:
            self._by_triton(programs, pointers, integers)
            return
        index = device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(programs, pointers, integers)
            return
        for pointer in pointers:
            bits |= pointer.data_ptr()
        met = index, pointers[0].dtype, bits % ALIGNMENT == 0, integers
        start = self._met.get(met) or self._start(met, programs, pointers, integers)
        if start is None:
            return
        runtime = triton_runtime()
        if _quiet(runtime.launch_enter_hook) and _quiet(runtime.launch_exit_hook):
            stream = torch._C._cuda_getCurrentRawStream(index)
            start.call(programs, 1, 1, stream, *start.fixed, *pointers, *integers, *self._values)
        else:
            start.ready[(programs, 1, 1)](*pointers, *integers, *self._values)

    def _start(
        self, met: tuple[object, ...], programs: int, pointers: tuple[Tensor, ...], integers: tuple[int, ...]
    ) -> Start | None:
        """How to start the kernel of a class that is compiled already; None when this call compiled and started it."""
        key = (met[0], *map(class_of, pointers), *map(class_of, integers))
        start = self._compiled.get(key)
        if start is None:
            made = self._by_triton(programs, pointers, integers)
            if made is not None:  # the interpreter compiles nothing
                self._compiled[key] = starter(made)
            return None
        if len(self._met) >= CACHED:
            self._met.clear()
        if met[2]:  # `met` does not say which pointer is unaligned; `key` does
            self._met[met] = start
        return start

    def _by_triton(self, programs: int, pointers: tuple[Tensor, ...], integers: tuple[int, ...]) -> Any:
        return self.kernel[(programs,)](*pointers, *integers, **self.constants, num_warps=self.num_warps, **EXACT)


def _quiet(hook: Any) -> bool:
    """Whether no profiler is attached: no hook, or an empty chain of hooks."""
    return hook is None or not getattr(hook, "calls", True)


LAUNCHERS = ("3.5.", "3.6.")
"""Releases of Triton whose launcher only allocates scratch memory before the compiled start function is called."""


def starter(ready: Any) -> Start:
    """How to start ``ready``: by the compiled start function where its parameters are known, else by its launcher."""
    run, function, metadata = ready.run, ready.function, ready.packed_metadata
    release = importlib.import_module("triton").__version__
    if release.startswith(LAUNCHERS) and run.global_scratch_size == run.profile_scratch_size == 0:
        modes = run.launch_cooperative_grid, run.launch_pdl
        return Start(run.launch, (function, *modes, None, None, metadata, None, None, None), ready)
    return Start(run, (function, metadata, None, None, None), ready)


@functools.cache
def triton_runtime() -> Any:
    """Triton's runtime settings, which hold the profilers' hooks."""
    return importlib.import_module("triton").knobs.runtime


def class_of(argument: Tensor | int) -> object:
    """On what Triton specialises for one argument; integers beyond 32 bits are split further than Triton does."""
    if isinstance(argument, int):
        return 2 if argument == 1 else (argument % ALIGNMENT == 0) + (argument >> 31 << 2)
    return argument.dtype if argument.data_ptr() % ALIGNMENT == 0 else (argument.dtype, "unaligned")
