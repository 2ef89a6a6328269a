"""Repeated launches of a Triton kernel without Triton's own dispatch, which takes longer than a small kernel.

The first launch of a class of arguments goes through Triton and yields the compiled kernel; later launches of that
class start it directly, where the release is known (:mod:`kernels.fast`). A class is everything on which Triton
specialises: dtype and 16-byte alignment of every pointer; whether an integer is 1, a multiple of 16, wider than 32
bits; the constants; the warps; the device; Triton's debug and instrumentation modes.

Any other release, a profiler, ROCm (where Triton also specialises on the extent of a pointer's memory) and
``FP8_KERNELS_FAST_PATHS=0``: Triton does every launch.
"""

from __future__ import annotations

import functools
import importlib
import struct
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import fast
from ..config import current_config
from ..context import Memo
from ..errors import MissingPackageError
from ..fast import Start
from ..records import Machine, Problem
from ._host import is_other_device

ALIGNMENT = 16
"""Bytes of a pointer, and the divisor of an integer, on which Triton specialises."""
HIP = torch.version.hip is not None
EXACT = {"enable_fp_fusion": False}
"""Options of every launch: products and sums are never fused into one rounding, whatever Triton's default is."""


def imported(module: str, kernel: str) -> tuple[ModuleType, bool]:
    """A module of Triton kernels (``"._triton_mx"``: of this folder), and whether ``kernel`` of it runs natively.

    Under Triton's interpreter it does not.

    Raises MissingPackageError: Triton, or what it needs, cannot be imported.
    """
    try:
        triton = importlib.import_module("triton")
        kernels = importlib.import_module(module, __package__)
    except ImportError as error:
        raise MissingPackageError("Triton; install `triton`", {"triton": str(error)}) from error
    return kernels, isinstance(getattr(kernels, kernel), triton.JITFunction)


def loads(library: Callable[[], object]) -> Callable[[Problem, Machine], None]:
    """``missing`` of a backend in Triton, which may be installed and not load: its :func:`imported` then raises."""

    def missing(p: Problem, machine: Machine) -> None:
        library()

    return missing


def bits(value: float) -> int:
    """The bits of a float32 as an int32, by which kernels get constants that are no integers."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def power_of_two(n: int) -> int:
    """The smallest that is at least ``n``, and 1."""
    return 1 << max(n - 1, 0).bit_length()


class Ready(NamedTuple):
    """A start with its programs and all parameters but the pointers: ``begin(stream, *fixed, *addresses, *after)``."""

    begin: Callable[..., None]
    fixed: tuple[object, ...]
    after: tuple[object, ...]


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
        self._compiled: Memo[tuple[object, ...], Start | None] = Memo()
        self._launches: Memo[tuple[object, ...], Ready] = Memo()  # by exact integers, which is quicker to look up

    def __call__(self, programs: int, pointers: tuple[Tensor, ...], integers: tuple[int, ...]) -> None:
        """Start ``programs`` programs on the current stream of the first pointer's device."""
        if is_other_device(device := pointers[0].device):
            with torch.cuda.device(device):
                self.here(programs, pointers, integers)
        else:
            self.here(programs, pointers, integers)

    def here(
        self, programs: int, inputs: tuple[Tensor, ...], integers: tuple[int, ...], outputs: tuple[Tensor, ...] = ()
    ) -> None:
        """As a call on the pointers ``given`` and ``made``, where the first one's device is the current one already.

        Those ``made`` are to memory that was allocated for this launch: on 16 bytes, of dtypes that those of the other
        pointers and the constants decide.
        """
        index = inputs[0].device.index
        if index is None or HIP or not current_config().fast_paths or (modes := fast.modes()) is None:
            self._by_triton(programs, (*inputs, *outputs), integers)  # without an index: the interpreter's CPU
            return
        bits, signature, addresses = 0, [index, modes, programs, integers], []
        for pointer in inputs:
            address = pointer.data_ptr()
            bits |= address
            addresses.append(address)
            signature.append(pointer.dtype)
        for pointer in outputs:
            addresses.append(pointer.data_ptr())
        key, aligned = tuple(signature), bits % ALIGNMENT == 0
        ready = self._launches.get(key) if aligned else None
        if ready is None:
            ready = self._ready(key, aligned, programs, (*inputs, *outputs), integers)
        if ready is not None:
            ready.begin(fast.STREAM(index), *ready.fixed, *addresses, *ready.after)

    def ready(self, *signature: object) -> Ready | None:
        """How to start it again: of a device by its index, modes of Triton, programs, integers, and dtypes of aligned
        pointers that were given before."""
        return self._launches.get(signature)

    def _ready(
        self,
        signature: tuple[object, ...],
        aligned: bool,
        programs: int,
        pointers: tuple[Tensor, ...],
        integers: tuple[int, ...],
    ) -> Ready | None:
        """How to start the kernel of a class that is compiled already; None when this call went through Triton."""
        key = (*signature[:2], *map(class_of, pointers), *map(class_of, integers))
        start = self._compiled.get(key)
        if start is None:
            launched = self._by_triton(programs, pointers, integers)
            if launched is not None and key not in self._compiled:
                self._compiled.keep(key, fast.starter(launched))
            return None
        ready = Ready(functools.partial(start.call, programs, 1, 1), start.fixed, (*integers, *self._values))
        if aligned:  # an unaligned call does not say which pointer is unaligned; its key does
            self._launches.keep(signature, ready)
        return ready

    def _by_triton(self, programs: int, pointers: tuple[Tensor, ...], integers: tuple[int, ...]) -> Any:
        return self.kernel[(programs,)](*pointers, *integers, **self.constants, num_warps=self.num_warps, **EXACT)


def class_of(argument: Tensor | int) -> object:
    """On what Triton specialises for one argument; integers beyond 32 bits are split further than Triton does."""
    if isinstance(argument, int):
        return 2 if argument == 1 else (argument % ALIGNMENT == 0) + (argument >> 31 << 2)
    return argument.dtype if argument.data_ptr() % ALIGNMENT == 0 else (argument.dtype, "unaligned")
