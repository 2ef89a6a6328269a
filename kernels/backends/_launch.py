"""Launching a Triton kernel again without Triton's own dispatch, which costs more than a small kernel runs.

The first launch of a class of arguments goes through Triton and yields the compiled kernel; later ones of that class
start it directly. A class is everything that Triton compiles in: dtype and 16-byte alignment of pointers; of
integers whether they are 1, multiples of 16, wider than 32 bits; the constants; the warps; the device.

Not covered: ROCm, where Triton also compiles in the extent of a pointer's memory (there every launch is Triton's own).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes of a pointer, and the divisor of an integer, on which Triton specialises."""
REMEMBERED = 4096
"""Exact arguments (a number of rows each, say) whose class is looked up once, before they are forgotten."""
EXACT = {"enable_fp_fusion": False}
"""Of every launch: no product and sum become one rounding, whatever this Triton's default is."""


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
        self._compiled: dict[tuple[object, ...], Any] = {}
        self._met: dict[tuple[object, ...], Any] = {}

    def __call__(self, programs: int, pointers: tuple[Tensor, ...], integers: tuple[int, ...]) -> None:
        """Start ``programs`` programs on the current stream of the first pointer's device."""
        device = pointers[0].device
        if device.type != "cuda" or torch.version.hip is not None:
            self._by_triton(programs, pointers, integers)
        elif device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(programs, pointers, integers)
        else:
            met = (device.index, integers, *[(t.dtype, t.data_ptr() % ALIGNMENT == 0) for t in pointers])
            ready = self._met.get(met) or self._ready(met, programs, pointers, integers)
            if ready is not None:
                _start(ready, programs, device.index, (*pointers, *integers, *self._values))

    def _ready(
        self, met: tuple[object, ...], programs: int, pointers: tuple[Tensor, ...], integers: tuple[int, ...]
    ) -> Any:
        """The compiled kernel of a class met before; None when Triton compiled it, and started it, just now."""
        key = (met[0], *map(class_of, pointers), *map(class_of, integers))
        ready = self._compiled.get(key)
        if ready is None:
            made = self._by_triton(programs, pointers, integers)
            if made is not None:  # the interpreter compiles nothing
                self._compiled[key] = made
            return None
        if len(self._met) >= REMEMBERED:
            self._met.clear()
        self._met[met] = ready
        return ready

    def _by_triton(self, programs: int, pointers: tuple[Tensor, ...], integers: tuple[int, ...]) -> Any:
        return self.kernel[(programs,)](*pointers, *integers, **self.constants, num_warps=self.num_warps, **EXACT)


def _start(ready: Any, programs: int, device: int, parameters: tuple[object, ...]) -> None:
    """As ``ready[(programs, 1, 1)](*parameters)``, which calls hooks in Python whether there are any or not."""
    runtime = triton_runtime()
    if _quiet(runtime.launch_enter_hook) and _quiet(runtime.launch_exit_hook):
        stream = torch._C._cuda_getCurrentRawStream(device)
        ready.run(programs, 1, 1, stream, ready.function, ready.packed_metadata, None, None, None, *parameters)
    else:
        ready[(programs, 1, 1)](*parameters)


def _quiet(hook: Any) -> bool:
    """Whether no profiler listens: no hook, or a chain of none."""
    return hook is None or not getattr(hook, "calls", True)


@functools.cache
def triton_runtime() -> Any:
    """Triton's runtime switches, which hold the hooks of profilers."""
    return importlib.import_module("triton").knobs.runtime


def class_of(argument: Tensor | int) -> object:
    """What Triton compiles in of one argument; integers beyond 32 bits are told apart further than it does."""
    if isinstance(argument, int):
        return 2 if argument == 1 else (argument % ALIGNMENT == 0) + (argument >> 31 << 2)
    return argument.dtype if argument.data_ptr() % ALIGNMENT == 0 else (argument.dtype, "unaligned")
