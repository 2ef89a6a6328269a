"""The compiled start function of a Triton kernel, without Triton's own dispatch of every launch.

Releases    triton 3.5.1, 3.6.0, 3.7.0, 3.7.1, 3.8.0 and 3.9.0. Up to 3.6 a launcher is compiled for each kernel; from
            3.7 on one launcher takes the parameters as a tuple behind two descriptions of them.
Checked     ``triton/backends/nvidia/driver.py`` and ``driver.c`` of the wheels were read: the launcher only allocates
            scratch memory before it calls this function, so that a kernel without scratch memory may be started by it.
            From 3.7.0 to 3.9.0 the function is the same text. A test holds the order of the arguments against the table
            of each release, and against the launcher of the installed one. 3.7 and later ran on no device here.
            The function takes an integer for the address of a pointer. Of a tensor it asks the driver whether a kernel
            can read it; the verbs refuse operands on different devices themselves, which a test asks of each.
            On the device the quantisers give the bits of plain torch, eager and in a captured graph.
Public way  18 us a group quantiser more, of which two allocations are 3 (``tests/hardware/measure.py``, family
            ``fast``, on an H200 machine).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

RELEASES = ("3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
COMPILED = ("3.5.1", "3.6.0")
"""Releases that compile a launcher for each kernel."""


class Start(NamedTuple):
    """How to start a compiled kernel: ``call(programs, 1, 1, stream, *fixed, *parameters)``, addresses for pointers."""

    call: Callable[..., None]
    fixed: tuple[object, ...]


def starter(ready: Any) -> Start | None:
    """How to start ``ready``, what a launch returned; None for a release or a kernel that only Triton starts."""
    release = importlib.import_module("triton").__version__
    if release not in RELEASES:
        return None
    run, function, metadata = ready.run, ready.function, ready.packed_metadata
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    how = function, run.launch_cooperative_grid, run.launch_pdl
    if release in COMPILED:
        return Start(run.launch, (*how, None, None, metadata, None, None, None))
    if getattr(run, "gsan_enabled", False):  # the launcher appends parameters of its own
        return None
    launch, no_hooks, no_scratch = run.launch, (None, None, None), (None, None)
    fixed = *how, metadata, *no_hooks, *no_scratch, run.arg_annotations, run.kernel_signature

    def call(x: int, y: int, z: int, stream: int, *parameters: object) -> None:
        launch(x, y, z, stream, *fixed, parameters)

    return Start(call, ())


def modes() -> tuple[object, object] | None:
    """Debugging and instrumentation as the process sets them, which are compiled in; from the environment they are
    read once. None where a profiler is attached, which sees the launches of Triton's own dispatch only."""
    runtime, compilation = _knobs()
    hook = runtime.launch_enter_hook  # none, one, or a chain that may be empty
    if hook is not None and getattr(hook, "calls", True):
        return None
    hook = runtime.launch_exit_hook
    if hook is not None and getattr(hook, "calls", True):
        return None
    return runtime.debug, compilation.get("instrumentation_mode")


@functools.cache
def _knobs() -> tuple[Any, dict[str, object]]:
    knobs = importlib.import_module("triton").knobs
    return knobs.runtime, knobs.compilation.__dict__
