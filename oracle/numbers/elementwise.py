"""Running a chain of elementwise operations block by block, so that its temporaries stay in the cache.

Changes no value: an elementwise chain gives the same bits however its tensor is cut. Not for reductions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Up to 32768 elements torch starts no second thread for an operation. Waiting for threads after every short
# operation of a chain gains a factor of 2 on an idle machine and loses one of 10 on a busy one.
CPU_BLOCK = 1 << 15
DEVICE_BLOCK = 1 << 24


def in_blocks(chain: Callable[..., Tensor], *operands: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply an elementwise chain to tensors of one shape and device.

    Parameters
    ----------
    chain : callable
        Takes one contiguous 1-D block of every operand, returns a tensor of the block's length and of
        ``dtype``. It must not write into its arguments.
    *operands : Tensor
        Any strides.
    dtype : torch.dtype
        Of the result.

    Returns
    -------
    Tensor
        Contiguous, with the operands' shape.
    """
    first = operands[0]
    block = CPU_BLOCK if first.device.type == "cpu" else DEVICE_BLOCK
    flat = [operand.detach().reshape(-1) for operand in operands]
    if first.numel() <= block:
        return chain(*flat).view(first.shape)
    result = torch.empty(first.numel(), dtype=dtype, device=first.device)
    for start in range(0, first.numel(), block):
        end = start + block
        result[start:end] = chain(*(operand[start:end] for operand in flat))
    return result.view(first.shape)
