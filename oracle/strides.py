"""Strides and padding of a tensor, which a file of logical elements loses.

    element (i, j, ...) of a tensor lies at memory[i * stride_0 + j * stride_1 + ...]

The memory of a tensor reaches from its first element to the end of the padding behind its last one, ``max(n * stride)``
over its axes. Dense layouts (a transposed weight) need their strides only. Not covered: layouts that take more than 16
times the elements (the widest padding of any layout here aligns one-byte columns to the 16 bytes of a TMA load), and
elements that share memory; both come back contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TMA_BYTES = 16


def padded_memory(x: Tensor, *, end: int | None = None) -> Tensor | None:
    """The memory ``[L]`` of a tensor with padding, as a view; None where it has none, or where it is not covered.

    Parameters
    ----------
    x : any strided tensor.
    end : bytes of its storage that may be looked at, where not all of it is the tensor's (guard zones).
    """
    length = _length(x.shape, x.stride())
    if length is None or length == x.numel():
        return None
    size = x.untyped_storage().nbytes() if end is None else end
    there = size // x.element_size() - x.storage_offset()
    return x.as_strided((min(length, there),), (1,))


def restored(x: Tensor, stride: Sequence[int], memory: Tensor | None = None) -> Tensor:
    """The tensor with the logical elements ``x``, its strides, and the memory it had (None: zero between elements)."""
    length = _length(x.shape, stride)
    if length is None or tuple(stride) == x.stride():
        return x
    if memory is not None and memory.dim() == 1 and memory.dtype == x.dtype and len(memory) >= _reach(x.shape, stride):
        return memory.as_strided(x.shape, tuple(stride))
    return torch.zeros(length, dtype=x.dtype, device=x.device).as_strided(x.shape, tuple(stride)).copy_(x)


def _length(shape: Sequence[int], stride: Sequence[int]) -> int | None:
    """Elements of the memory, or None for a layout that is not covered."""
    inner = count = 1
    for step, n in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1):
        if step < inner:
            return None  # elements share memory, or there are none
        inner, count = step * (n - 1) + inner, count * n
    length = max([1, *(n * s for n, s in zip(shape, stride, strict=True))])
    return length if count > 0 and length <= TMA_BYTES * count else None


def _reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
