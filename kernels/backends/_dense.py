"""Operands as libraries address them: rows next to each other, the first on 16 bytes, strides that say so.

TMA and vector loads address 16 bytes. ``Tensor.is_contiguous`` passes over the stride of an axis of extent 1, which
some libraries read: the one row of a slice may carry the pitch of the buffer it was cut from.

Every call of a product comes through here, so the common case is asked for first.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes on which TMA and vector loads begin."""


def dense(x: Tensor) -> Tensor:
    """``x`` itself when it is contiguous on 16 bytes, else a copy: for libraries that look at no stride."""
    good = x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
    return x if good else x.clone(memory_format=torch.contiguous_format)


def packed(x: Tensor) -> bool:
    """Whether the strides of ``[M, N]`` or ``[G, M, N]`` are those of dense memory, axes of extent 1 included."""
    if not x.is_contiguous():
        return False
    shape = x.shape
    return 1 not in shape or x.stride() == (*((shape[1] * shape[2],) if len(shape) == 3 else ()), shape[-1], 1)


def pitched(x: Tensor) -> Tensor:
    """A matrix of one-byte codes itself when it is packed, or its rows lie a multiple of 16 apart; else a copy."""
    step, unit = x.stride()
    if unit == 1 and x.data_ptr() % ALIGNMENT == 0:
        width = x.shape[1]
        if step == width or (step > width and step % ALIGNMENT == 0):
            return x
    return x.clone(memory_format=torch.contiguous_format)
