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
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes of a pointer, and the divisor of an integer, on which Triton specialises."""
REMEMBERED = 4096
"""Exact arguments (a number of rows each, say) whose class is looked up once, before they are forgotten."""
EXACT = {"enable_fp_fusion": False}
"""Of every launch: no product and sum become one rounding, whatever this Triton's default is."""


Start = Callable[[int, tuple[object, ...]], None]
"""Starts that many programs with those parameters, constants included."""


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

        The dtypes of the other pointers belong to the kernel: they are those of the first call.
        """
        device, bits = pointers[0].device, 0
        if device.type != "cuda" or torch.version.hip is not None:
            self._by_triton(programs, pointers, integers)
        elif device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(programs, pointers, integers)
        else:
            for pointer in pointers:
                bits |= pointer.data_ptr()
            met = device.index, pointers[0].dtype, bits % ALIGNMENT == 0, integers
            start = self._met.get(met) or self._start(met, programs, pointers, integers)
            if start is not None:
                start(programs, (*pointers, *integers, *self._values))

    def _start(
        self, met: tuple[object, ...], programs: int, pointers: tuple[Tensor, ...], integers: tuple[int, ...]
    ) -> Start | None:
        """How to start the compiled kernel of a class met before; None when Triton has just compiled and started it."""
        key = (met[0], *map(class_of, pointers), *map(class_of, integers))
        start = self._compiled.get(key)
        if start is None:
            made = self._by_triton(programs, pointers, integers)
            if made is not None:  # the interpreter compiles nothing
                self._compiled[key] = starter(made, int(met[0]))  # type: ignore[call-overload]  # the device's index
            return None
        if len(self._met) >= REMEMBERED:
            self._met.clear()
        if met[2]:  # which of the pointers is unaligned is in the key alone
            self._met[met] = start
        return start

    def _by_triton(self, programs: int, pointers: tuple[Tensor, ...], integers: tuple[int, ...]) -> Any:
        return self.kernel[(programs,)](*pointers, *integers, **self.constants, num_warps=self.num_warps, **EXACT)


def starter(ready: Any, device: int) -> Start:
    """As ``ready[(programs, 1, 1)](*parameters)``, which calls hooks in Python whether there are any or not."""
    runtime, stream = triton_runtime(), torch._C._cuda_getCurrentRawStream
    run, function, metadata = ready.run, ready.function, ready.packed_metadata

    def start(programs: int, parameters: tuple[object, ...]) -> None:
        if _quiet(runtime.launch_enter_hook) and _quiet(runtime.launch_exit_hook):
            run(programs, 1, 1, stream(device), function, metadata, None, None, None, *parameters)
        else:
            ready[(programs, 1, 1)](*parameters)

    return start


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
