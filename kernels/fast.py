"""Direct calls below public functions of torch, Triton and FlashInfer, each of releases that were read.

Every way has a table of its releases and gives None, or the public function, for any other.
``FP8_KERNELS_FAST_PATHS=0`` takes the public way everywhere. What each saves a call, by ``tests/hardware/measure.py``
(family ``fast``, on an H200 machine): torch 1.5 us an allocation, of which a layer makes three a call; Triton 18 us a
group quantiser, of which two allocations are 3; FlashInfer 18 us.

torch       Allocation, current device and stream. ``torch._C._dynamo.guards._empty_strided_cuda`` and
            ``torch._C._cuda_getCurrentRawStream`` are what the code calls that TorchInductor generates, as a test reads
            in the installed release. The first reaches the allocator of ``torch.empty`` (streams, pools and graph
            captures as there) but no torch mode, which may count, guard or fake tensors: it is used while none is
            active. On the device, with torch 2.11, the layer's bits are the same with and without them, eager and in a
            captured graph; the other releases ran on none here. ``torch._C._cuda_getDevice`` is the body of
            ``torch.cuda.current_device``, which also looks whether CUDA has begun.
            ``TensorGuards`` is what a compiled graph asks of its inputs, of every release that passes
            :func:`_discerning`; a test changes each property of a tensor that it stands for. By public names
            it is 2 us more a call of three operands.
Triton      ``triton/backends/nvidia/driver.py`` and ``driver.c`` of the wheels were read: the launcher only allocates
            scratch memory before it calls this function, so that a kernel without scratch memory may be started by it.
            Up to 3.6 a launcher is compiled for each kernel; from 3.7 on one launcher takes the parameters as a tuple
            behind two descriptions of them, and up to 3.9.0 the function is the same text. A test holds the order of
            the arguments against the table of each release, and against the launcher of the installed one. 3.7 and
            later ran on no device here.
            The function takes an integer for the address of a pointer. Of a tensor it asks the driver whether a kernel
            can read it; the verbs refuse operands on different devices themselves, which a test asks of each.
            On the device the quantisers give the bits of plain torch, eager and in a captured graph.
FlashInfer  The runner of the SM90 block-scaled product. Its public function was read: it checks shapes and dtypes,
            which the layer does itself, gives the process's one runner a workspace and calls it. So was the runner:
            for E4M3 operands it asks that there be a workspace and never touches it
            (csrc/fp8_blockscale_gemm_sm90_binding.cu, ``runGemm``), so that one is given once, of any size. On the
            device every call of ``verify`` gives the bits of the public function; tests compare both by their operands.
            Its log and trace see the public function only: where they are on, it is called.

NaN and infinity: no value is read.
Source: derived from the code of the releases above, as it was read.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends.declaration import Allocate

RELEASES: Mapping[str, tuple[str, ...]] = {
    "torch": ("2.9.", "2.11.", "2.13.", "2.15."),
    "triton": ("3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0"),
    "flashinfer": ("0.6.18", "0.6.18.post1"),
}
"""Which were read, of torch by their beginning."""

# --- torch ---------------------------------------------------------------------------------------------------------

KNOWN = torch.__version__.startswith(RELEASES["torch"]) and torch.version.cuda is not None


def _entry(*path: str) -> Any:
    entry: Any = torch._C
    for name in path:
        entry = getattr(entry, name, None)
    return entry


def public_stream(index: int) -> int:
    """:data:`STREAM` of a release that is not known."""
    return torch.cuda.current_stream(index).cuda_stream


EMPTY: Allocate | None = _entry("_dynamo", "guards", "_empty_strided_cuda") if KNOWN else None
"""From shape, strides and dtype to a tensor on the current CUDA device."""
STREAM: Callable[[int], int] = _entry("_cuda_getCurrentRawStream") if KNOWN else public_stream
"""The current stream of a device by its index, as a number."""
DEVICE: Callable[[], int] = _entry("_cuda_getDevice") if KNOWN else torch.cuda.current_device
"""The index of the current device, of a process that has a tensor on one."""
FUNCTION_MODES: Callable[[], int] = torch._C._len_torch_function_stack
DISPATCH_MODES: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many torch modes of either kind are active; asked on known releases only."""


def guard(same: Sequence[Tensor], rows: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether other operands, in this order, are like these.

    ``same`` and ``rows`` of any shape; each matrix of ``rows`` has its own number of rows.

    Like means: the same class, dispatch keys (layout, negation, inference, autocast, a transform), ``requires_grad``,
    dtype, device, extents and strides. ``rows`` may have any number of rows, matrices among them any distance of
    columns where these are contiguous.
    """
    return public_guard(same, rows) if GUARDS is None else _compiled_guard(GUARDS, same, rows)


def _compiled_guard(guards: Any, same: Sequence[Tensor], rows: Sequence[Tensor]) -> Callable[..., bool]:
    sizes: list[list[int | None]] = [list(x.shape) for x in same]
    strides: list[list[int | None]] = [list(x.stride()) for x in same]
    for x in rows:
        sizes.append([None, *x.shape[1:]])
        strides.append(list(x.stride()) if x.is_contiguous() else [x.stride(0), None])
    check: Callable[..., bool] = guards(*same, *rows, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def _discerning(guards: Any) -> bool:
    """Whether the compiled guard of this release admits another number of rows and nothing else."""
    weight, x = (
        torch.zeros(2, 8, dtype=torch.float32, device="cpu"),
        torch.zeros(4, 8, dtype=torch.float32, device="cpu"),
    )
    try:
        check = _compiled_guard(guards, [weight], [x])
    except TypeError:  # it is made of other arguments, or is not there
        return False
    likes = (x, x[:1], x.clone())
    others = x.double(), x[:, :4], x.t(), x[0], x.clone().requires_grad_(), torch.nn.Parameter(x), x.to("meta")
    admits = all(check(weight, like) for like in likes)
    refuses = not any(check(weight, other) for other in others)
    return admits and refuses and not any(check(other, x) for other in (weight[:1], weight.double(), None))


def public_guard(same: Sequence[Tensor], rows: Sequence[Tensor]) -> Callable[..., bool]:
    """:func:`guard` by public names, some 0.6 us for each operand; of the modes it sees autocast alone.

    ``same`` and ``rows`` of any shape and dtype.
    """
    operands = *same, *rows
    fixed, alike = [_facts(x) for x in operands], [x.is_contiguous() for x in operands]
    extents = [(x.shape, x.stride()) for x in same]
    free = [(x.shape[1:], x.stride() if x.is_contiguous() else x.stride()[:1]) for x in rows]
    first, autocast, kind = len(extents), torch.is_autocast_enabled, operands[0].device.type

    def check(*others: Tensor) -> bool:
        if autocast(kind):
            return False
        for i, x in enumerate(others):
            if type(x) is not fixed[i][0] or _facts(x) != fixed[i] or not _has_memory(x):
                return False
            if i < first:
                if (x.shape, x.stride()) != extents[i]:
                    return False
            elif (x.shape[1:], x.stride() if alike[i] else x.stride()[:1]) != free[i - first]:
                return False
        return True

    return check


def _facts(x: Tensor) -> tuple[object, ...]:
    gradient = x.requires_grad and torch.is_grad_enabled()
    return type(x), x.dtype, x.layout, x.device, gradient, x.is_neg(), x.is_inference()


def _has_memory(x: Tensor) -> bool:
    try:
        return x.data_ptr() >= 0
    except RuntimeError:  # inside of a transform of torch.func
        return False


_found: Any = _entry("_dynamo", "guards", "TensorGuards")
GUARDS: Any = _found if _discerning(_found) else None
"""torch's compiled guard; None of a release where it is not what is known of it."""


# --- Triton --------------------------------------------------------------------------------------------------------

COMPILED = ("3.5.1", "3.6.0")
"""Releases that compile a launcher for each kernel."""


class Start(NamedTuple):
    """How to start a compiled kernel: ``call(programs, 1, 1, stream, *fixed, *parameters)``, addresses for pointers."""

    call: Callable[..., None]
    fixed: tuple[object, ...]


def starter(ready: Any) -> Start | None:
    """How to start ``ready``, what a launch returned; None for a release or a kernel that only Triton starts."""
    release = importlib.import_module("triton").__version__
    if release not in RELEASES["triton"]:
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


# --- FlashInfer ----------------------------------------------------------------------------------------------------

Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""``(a, b, out, a_scale, b_scale)``, the operands E4M3."""
_workspace = torch.empty(256, dtype=torch.uint8, device="cpu")


def flashinfer_run(package: ModuleType, gemm_base: Callable[[], ModuleType]) -> Run | None:
    """The runner's call in a known release, else None; ``gemm_base`` imports the module that holds it."""
    if getattr(package, "__version__", None) not in RELEASES["flashinfer"]:
        return None
    runner = gemm_base().get_fp8_blockscale_gemm_runner_sm90()
    runner.configure_workspace(_workspace)
    run_gemm: Run = runner.run_gemm
    return run_gemm
