"""A tensor together with the memory between its elements: what lies in the padding of a strided layout is data too.

Copying a tensor to another device, or saving it, keeps its logical values and drops the rest. Here the run of memory
from the first element to the end of the last row or column is kept whole, padding included, and the tensor laid out
over it again. Not covered: tensors with negative strides (torch has none).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from oracle.errors import LayoutError


def run_of(x: Tensor) -> Tensor:
    """The memory that ``x`` stands in as a vector: ``max(n_i * stride_i)`` elements, fewer where its storage ends.

    A view where ``x`` has elements; the same device and dtype.
    """
    if x.numel() == 0:
        return x.reshape(-1)
    spans = list(zip(x.shape, x.stride(), strict=True))
    least = 1 + sum((n - 1) * s for n, s in spans)
    wanted = max([least, *(n * s for n, s in spans)])
    there = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x.as_strided((min(wanted, there),), (1,), x.storage_offset())


def laid_out(run: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The tensor of this shape and these strides over a vector of memory.

    Raises
    ------
    LayoutError
        The vector is too short for it, or a stride is negative.
    """
    least = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if run.dim() != 1 or any(s < 0 for s in strides) or least > run.numel():
        raise LayoutError(
            f"shape {list(shape)} with strides {list(strides)} needs {least} elements; the memory has "
            f"{list(run.shape)}"
        )
    return run.as_strided(tuple(shape), tuple(strides))


def on_host(x: Tensor) -> Tensor:
    """``x`` on the CPU with the strides and the padding it has; itself when it is there."""
    return x if x.device.type == "cpu" else laid_out(run_of(x).cpu(), x.shape, x.stride())
