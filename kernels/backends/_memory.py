"""Memory for outputs and temporaries, without torch's dispatcher where nobody listens to it.

A small ``torch.empty`` takes 2.2 us of an H200's host and a layer makes three a call; half of it is the way to the
allocator. Code that TorchInductor writes takes a shorter one to the same allocator (its streams, pools and graph
captures are those of ``torch.empty``), and so does this. Modes, which may count, guard or fake tensors, are heard.

Not covered: memory of a GPU that is not the current one; the caller makes it current (:mod:`kernels.backends._device`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""From shape, strides and dtype to an uninitialised tensor."""


def _shortest() -> Any:
    return getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)


SHORTEST: Allocate | None = _shortest()
"""TorchInductor's entry, which allocates on the current CUDA device; None where this torch has none."""


def allocator(device: torch.device) -> Allocate:
    """How to allocate on ``device`` now, for the few allocations of one call; a GPU must be the current one."""
    if (
        SHORTEST is not None
        and device.type == "cuda"
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
    ):
        return SHORTEST
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
