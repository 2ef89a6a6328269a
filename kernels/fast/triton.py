"""The compiled start function of a Triton kernel, without Triton's own dispatch of every launch.

Releases    triton 3.5.1 and 3.6.0.
Checked     ``triton/backends/nvidia/driver.py`` of both wheels was read: the launcher only allocates scratch memory
            before it calls this function, so that a kernel without scratch memory may be started by it. A test holds
            the order of the arguments against the table of each release, and against the launcher of the installed one.
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

RELEASES = ("3.5.1", "3.6.0")


class Start(NamedTuple):
    """How to start a compiled kernel: ``call(programs, 1, 1, stream, *fixed, *parameters)``, addresses for pointers."""

    call: Callable[..., None]
    fixed: tuple[object, ...]


def starter(ready: Any) -> Start | None:
    """How to start ``ready``, what a launch returned; None for a release or a kernel that only Triton starts."""
    if importlib.import_module("triton").__version__ not in RELEASES:
        return None
    run, function, metadata = ready.run, ready.function, ready.packed_metadata
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    modes = run.launch_cooperative_grid, run.launch_pdl
    return Start(run.launch, (function, *modes, None, None, metadata, None, None, None))


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
