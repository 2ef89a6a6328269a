"""torch's allocation on a GPU, its current device and stream, and its guard of tensors, without the ways around them.

Releases    torch 2.9, 2.11, 2.13 and 2.15; the guard every release whose ``TensorGuards`` passes :func:`_discerning`
            (these were seen to).
Checked     ``torch._C._dynamo.guards._empty_strided_cuda`` and ``torch._C._cuda_getCurrentRawStream`` are what the code
            calls that TorchInductor generates, as a test reads in the installed release. The first reaches the
            allocator of ``torch.empty`` (streams, pools and graph captures as there) but no torch mode, which may
            count, guard or fake tensors: it is used while none is active. On the device, with torch 2.11, the layer's
            bits are the same with and without them, eager and in a captured graph; the other releases ran on none here.
            ``torch._C._cuda_getDevice`` is the body of ``torch.cuda.current_device``, which also looks whether CUDA has
            begun. ``TensorGuards`` is what a compiled graph asks of its inputs; a test changes each property of a
            tensor that it stands for.
Public way  1.5 us an allocation more, of which a layer makes three a call (``tests/hardware/measure.py``, family
            ``fast``, on an H200 machine). The guard by public names is 2 us more a call of three operands.

NaN and infinity: no value is read.
Source: derived from torch's own code, as the releases above were read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.declaration import Allocate

RELEASES = ("2.9.", "2.11.", "2.13.", "2.15.")
KNOWN = torch.__version__.startswith(RELEASES) and torch.version.cuda is not None


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
