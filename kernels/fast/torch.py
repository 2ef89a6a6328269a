"""torch's allocation on a GPU, and its current stream, without the dispatcher and without Python objects.

Releases    torch 2.11.
Checked     ``torch._C._dynamo.guards._empty_strided_cuda`` and ``torch._C._cuda_getCurrentRawStream`` are what the code
            calls that TorchInductor generates. The first reaches the allocator of ``torch.empty`` (streams, pools and
            graph captures as there) but no torch mode, which may count, guard or fake tensors: it is used while none is
            active. On the device the layer's bits are the same with and without them, eager and in a captured graph.
Public way  2.4 us an allocation more, of which a layer makes three a call (``tests/hardware/measure.py``, family
            ``fast``, on an H200 machine).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.backends.declaration import Allocate

RELEASES = ("2.11.",)
KNOWN = torch.__version__.startswith(RELEASES) and torch.version.cuda is not None


def _entry(*path: str) -> Any:
    found: Any = torch._C
    for name in path:
        found = getattr(found, name, None)
    return found


EMPTY: Allocate | None = _entry("_dynamo", "guards", "_empty_strided_cuda") if KNOWN else None
"""From shape, strides and dtype to a tensor on the current CUDA device."""
STREAM: Callable[[int], int] | None = _entry("_cuda_getCurrentRawStream") if KNOWN else None
"""The current stream of a device by its index, as a number."""


def unwatched() -> bool:
    """Whether no torch mode is active; asked on known releases only."""
    return torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
