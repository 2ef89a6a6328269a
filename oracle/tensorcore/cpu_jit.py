"""What every compiled CPU kernel shares: the compiler with its options, a true fma, and the worker threads.

``jit`` compiles an entry, ``piece`` what entries call, with numba: no fast-math (nothing may be contracted or
reassociated: the bits must be those of the definition), IEEE division, no GIL. An entry is kept on disk by what it was
compiled from (:mod:`oracle.tensorcore.cpu_cache`): under ``NUMBA_CACHE_DIR``, or beside its source in ``__pycache__``,
or in the user's cache folder where that cannot be written. ``fma`` is one rounding of ``x*y + z``: LLVM's intrinsic, a
vector instruction where the CPU has one and the C library's ``fmaf`` elsewhere.
``run_tasks`` spreads independent calls over threads, of which there are :func:`oracle.numbers.threads.threads`.

Kernels loop over row views (``row = matrix[k]``; ``row[j]``) with a constant trip count: an index that numba cannot
prove non-negative costs a wrap-around test and turns vector loads into gathers.

Not covered: numerics; each kernel file states its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numba
from numba.core import types
from numba.extending import intrinsic

from oracle.numbers.threads import threads
from oracle.tensorcore.cpu_cache import KernelCache

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}
LEAST = 1 << 21  # products whose time is a few times that of starting and ending a thread
FEWEST_ROWS = 2  # of a task, for which it unpacks its columns
TASK_ROWS = 256  # rows whose accumulators stay in the second-level cache

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(function: Function, **other: Any) -> Function:
    """Compile ``function`` at its first call, with ``other`` options. Typed by hand because numba carries no types."""
    compiled = numba.njit(cache=False, **(OPTIONS | other))(function)
    with suppress(RuntimeError):  # numba finds no directory it may write its cache to
        compiled._cache = KernelCache(function, OPTIONS | other)
    return compiled  # type: ignore[no-any-return]


def piece(function: Function) -> Function:
    """A part of compiled kernels, which alone call it: no entry from Python and no cache of its own, which took a fifth
    of the time to compile."""
    compiled = numba.njit(cache=False, no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)
    return compiled  # type: ignore[no-any-return]


def _fma(typing_context: Any, x: Any, y: Any, z: Any) -> Any:
    if not (x == y == z and x in (types.float32, types.float64)):
        return None  # numba reports a typing error

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return x(x, x, x), lower


fma: Callable[..., Any] = intrinsic(_fma)
"""``x * y + z`` with one rounding, in the type of ``x``: float32 or float64. For compiled code only."""


def workers_for(products: int) -> int:
    """Threads that so many products are worth: none starts for fewer than ``LEAST`` of them."""
    return max(1, min(threads(), products // LEAST))


def run_tasks(task: Callable[..., None], arguments: Iterable[tuple[int, ...]], workers: int) -> None:
    """Call ``task(*a)`` for every ``a`` on so many threads at most; calls may run at the same time and must write apart
    from each other."""
    calls = list(arguments)
    workers = min(workers, len(calls))
    if workers <= 1:
        for call in calls:
            task(*call)
        return
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(task, *call) for call in calls]:
            done.result()


def task_pieces(rows: int, columns: int, *, lanes: int, workers: int) -> list[tuple[int, int, int, int]]:
    """Row ranges times panel ranges, some eight to a thread: ``(row0, row1, panel0, panel1)``."""
    panels = -(-columns // lanes)
    height = TASK_ROWS if panels >= workers else max(FEWEST_ROWS, min(TASK_ROWS, -(-rows // workers)))
    bands = -(-rows // height)
    wide = max(1, panels * bands // (8 * workers))
    return [
        (r, min(r + height, rows), p, min(p + wide, panels))
        for r in range(0, rows, height)
        for p in range(0, panels, wide)
    ]
