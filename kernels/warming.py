"""Warm-up before serving: calls with so many rows that every kernel is compiled, and tuned where a library tunes.

A kernel is compiled for more than its shapes. Triton specialises on integers that are 1 or multiples of 16, and the
tile of a product follows from its rows; DeepGEMM compiles a kernel for each tile, whose rows are multiples of 16. So a
specialisation depends on the number of rows M by what it is below 16, by ``ceil(M / 16)``, and by which of M, its
multiples and ``align(M, 4)`` are divisible by 16.
:func:`rows_to_warm_up` has one number of rows of each. :func:`compilations` says what was compiled in a block: nothing,
in serving.

A backend that fails in a warm-up, where its kernel does not compile or start, is passed over from then on in this
process, or ends it, as ``FP8_KERNELS_FALLBACK`` or ``fallback`` of a layer says. A failure in serving stays an error of
the call: what failed may have written, so nothing repeats it.

Not covered: kernels that depend on values (how many rows an expert has), and those of other dtypes than the calls have.

NaN and infinity: no value is read.
Source: Triton's ``runtime/jit.py`` (specialisation, hooks); vLLM's warm-up of DeepGEMM, which calls every number.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from . import checks, context
from .errors import KernelError, OptionError, shown
from .platform import current_machine
from .verbs import exported

STEP = 16
"""Rows of the smallest tile of a product, and the divisor on which Triton specialises."""
RESIDUES = (1, 2, 4, 8, 13, 14, 16)
"""Rows modulo :data:`STEP`, one of each class: of 13 and 14, which differ in their multiples, ``align(M, 4)`` is 16."""
MOST = 1 << 20
"""Rows: sixteen times the 65,536 tokens that engines batch at most."""


@exported
def rows_to_warm_up(most: int) -> tuple[int, ...]:
    """Numbers of rows up to ``most`` whose calls compile what any call with 1 to ``most`` rows needs.

    Raises OptionError: ``most`` is no positive integer, or above 2^20, sixteen times the largest batch of an engine.
    """
    if checks.positive("most", most) > MOST:
        raise OptionError(f"most={most} is above {MOST}; pass the numbers of rows that occur")
    classes = (start + rows for start in range(0, most, STEP) for rows in (range(1, 17) if start == 0 else RESIDUES))
    return tuple(dict.fromkeys((*(rows for rows in classes if rows <= most), most)))


@exported
@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The kernels that Triton compiles in a block, or loads from its cache on disk, as it describes them.

    ``with kernels.compilations() as compiled: serve()``, then ``assert not compiled``. It listens to Triton's own hook
    (``knobs.runtime.jit_post_compile_hook``), so that other kernels of the process are listed too. What other libraries
    compile is not seen. Blocks of several threads must be nested.
    """
    compiled: list[str] = []
    if importlib.util.find_spec("triton") is None:  # nothing compiles
        yield compiled
        return
    runtime: Any = importlib.import_module("triton").knobs.runtime
    before = runtime.jit_post_compile_hook

    def listen(**compilation: Any) -> Any:
        compiled.append(str(compilation["repr"]))
        return None if before is None else before(**compilation)

    runtime.jit_post_compile_hook = listen
    try:
        yield compiled
    finally:
        runtime.jit_post_compile_hook = before


@exported
def warm_up(call: Callable[[int], object], rows: int | Iterable[int], *, tune: bool = False) -> list[str]:
    """Call ``call(M)`` for numbers of rows M, so that no call like these compiles afterwards; then wait for the device.

    Parameters
    ----------
    call
        Makes operands of M rows, of the dtypes and strides of serving, and calls verbs or a layer with them.
    rows
        The most rows of a call, of which follow those of :func:`rows_to_warm_up`, or the numbers themselves.
    tune
        Let FlashInfer try its kernels and remember the fastest, where a plan takes FlashInfer and its tuning changes no
        bits (``flashinfer.autotuner.autotune``).

    Returns
    -------
    list of str
        What was compiled, as :func:`compilations` has it.

    Raises
    ------
    OptionError
        ``call`` is no function, ``rows`` are no positive integers, or a CUDA graph is being captured.
    NoBackendError
        A backend failed and nothing may take its place, or nothing else serves; the reason is among those it lists.
    Exception
        What ``call`` raises where no backend failed.
    """
    if not callable(call):
        raise OptionError(f"call must be a function of a number of rows, not {shown(call)}")
    if not isinstance(rows, Iterable | int):
        raise OptionError(f"rows must be a positive integer or several of them, not {shown(rows)}")
    numbers = rows_to_warm_up(rows) if isinstance(rows, int) else tuple(checks.positive("rows", m) for m in rows)
    on_gpu = torch.cuda.is_available()
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise OptionError("a CUDA graph is being captured: warm up before the capture")
    with compilations() as compiled, _tuning(tune):
        for m in numbers:
            _attempt(call, m)
    if on_gpu:
        torch.cuda.synchronize()
    return compiled


def _attempt(call: Callable[[int], object], m: int) -> None:
    """A call; one that fails is repeated, without the backend that failed."""
    now = context.current()
    while True:
        try:
            call(m)
            return
        except (KernelError, torch.OutOfMemoryError):
            raise
        except Exception:  # a library raises classes of its own; raised below unless a backend is to blame
            known = len(now.failures)
            with context.use(calls=Counter()), contextlib.suppress(Exception):  # the same error again
                call(m)  # traced, to learn which backend it is that fails
            if len(now.failures) == known:
                raise
            now.forget()


def _tuning(tune: bool) -> contextlib.AbstractContextManager[Any]:
    if not isinstance(tune, bool):
        raise OptionError(f"tune={shown(tune)}; it is True or False")
    if not tune or current_machine().package("flashinfer").why_not is not None:
        return contextlib.nullcontext()
    tuning: contextlib.AbstractContextManager[Any] = importlib.import_module("flashinfer.autotuner").autotune(True)
    return tuning
