"""Launching a Triton kernel again without Triton's own dispatch, which costs more than a small kernel runs.

The first launch of a class of arguments goes through Triton and yields the compiled kernel; later ones of that class
start it directly. A class is everything that Triton compiles in: dtype and 16-byte alignment of pointers; of
integers whether they are 1, multiples of 16, wider than 32 bits; the constants; the warps; the device.

Not covered: ROCm, where Triton also compiles in the extent of a pointer's memory (there every launch is Triton's own).
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
REMEMBERED = 4096
"""Exact arguments (a number of rows each, say) whose class is looked up once, before they are forgotten."""
EXACT = {"enable_fp_fusion": False}
"""Of every launch: no product and sum become one rounding, whatever this Triton's default is."""


class Start(NamedTuple):
    """How to start a compiled kernel: ``call(programs, 1, 1, stream, *fixed, *parameters)``."""

    call: Callable[..., None]
    fixed: tuple[object, ...]
    ready: Any
    """The compiled kernel; ``ready[(programs, 1, 1)](*parameters)`` does the same and calls profilers."""


class Launch:
    """A ``triton.jit`` function with its constants and its warps, to be called on arguments.

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

        The caller keeps the dtypes of the other pointers as they were at the first call: a change is not seen.
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
        """How to start the compiled kernel of a class met before; None when Triton has just compiled and started it."""
        key = (met[0], *map(class_of, pointers), *map(class_of, integers))
        start = self._compiled.get(key)
        if start is None:
            made = self._by_triton(programs, pointers, integers)
            if made is not None:  # the interpreter compiles nothing
                self._compiled[key] = starter(made)
            return None
        if len(self._met) >= REMEMBERED:
            self._met.clear()
        if met[2]:  # which of the pointers is unaligned is in the key alone
            self._met[met] = start
        return start

    def _by_triton(self, programs: int, pointers: tuple[Tensor, ...], integers: tuple[int, ...]) -> Any:
        return self.kernel[(programs,)](*pointers, *integers, **self.constants, num_warps=self.num_warps, **EXACT)


def _quiet(hook: Any) -> bool:
    """Whether no profiler listens: no hook, or a chain of none."""
    return hook is None or not getattr(hook, "calls", True)


LAUNCHERS = ("3.5.", "3.6.")
"""Releases of Triton whose launcher only allocates scratch memory around the compiled start (a sixth of its time)."""


def starter(ready: Any) -> Start:
    """How to start ``ready``: by the compiled start of its launcher where that is known, else by its launcher."""
    run, function, metadata = ready.run, ready.function, ready.packed_metadata
    release = importlib.import_module("triton").__version__
    if release.startswith(LAUNCHERS) and run.global_scratch_size == run.profile_scratch_size == 0:
        modes = run.launch_cooperative_grid, run.launch_pdl
        return Start(run.launch, (function, *modes, None, None, metadata, None, None, None), ready)
    return Start(run, (function, metadata, None, None, None), ready)


@functools.cache
def triton_runtime() -> Any:
    """Triton's runtime switches, which hold the hooks of profilers."""
    return importlib.import_module("triton").knobs.runtime


def class_of(argument: Tensor | int) -> object:
    """What Triton compiles in of one argument; integers beyond 32 bits are told apart further than it does."""
    if isinstance(argument, int):
        return 2 if argument == 1 else (argument % ALIGNMENT == 0) + (argument >> 31 << 2)
    return argument.dtype if argument.data_ptr() % ALIGNMENT == 0 else (argument.dtype, "unaligned")
