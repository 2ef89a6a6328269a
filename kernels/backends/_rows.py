"""Picking rows of a tensor: the one place where this layer indexes a tensor by another.

Not covered: masks and several indices at once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def take(x: Tensor, rows: Tensor, dim: int = 0) -> Tensor:
    """``x.index_select(dim, rows)`` for float8 too: torch before 2.10 has no ``index`` kernel for it on a CPU.

    Parameters
    ----------
    x
        Any dtype and shape; one byte an element goes through its bits, so that NaN codes and -0 stay as they are.
    rows
        ``[R]`` integers within the extent of ``dim``, on any device.
    """
    index = rows.to(x.device)
    if x.element_size() == 1:
        return x.view(torch.uint8).index_select(dim, index).view(x.dtype)
    return x.index_select(dim, index)
