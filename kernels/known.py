"""Weights that a verb has met: what was checked of them, and how to multiply by them, without keeping them alive.

A weight is known when it is the same object in the same memory, of the same shape and dtype: that takes a microsecond
to see, and a check takes four. What a context knows ends with it, and with the weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from kernels.checks import FP8
from kernels.context import current

PLAIN = (Tensor, torch.nn.Parameter)
"""Classes of tensors that own memory."""


class Known(NamedTuple):
    """An E4M3 weight, its float32 scale, and the product decided for them."""

    weight: ReferenceType[Tensor]
    scale: ReferenceType[Tensor]
    memory: tuple[int, int]
    shapes: tuple[torch.Size, torch.Size]
    run: Any

    @classmethod
    def keep(cls, key: object, weight: Tensor, scale: Tensor, run: Any) -> None:
        """Remember a pair, unless a mode gave it no memory."""
        if type(weight) in PLAIN and type(scale) in PLAIN:
            memory, shapes = (weight.data_ptr(), scale.data_ptr()), (weight.shape, scale.shape)
            current().weights.keep((key, id(weight), id(scale)), cls(ref(weight), ref(scale), memory, shapes, run))

    @classmethod
    def find(cls, key: object, weight: object, scale: object) -> Any:
        """What :meth:`keep` was given for this pair, or None."""
        known: Known | None = current().weights.get((key, id(weight), id(scale)))
        if known is None:
            return None
        w, s = known.weight(), known.scale()
        if w is None or s is None or w is not weight or s is not scale:
            return None
        if (w.data_ptr(), s.data_ptr()) != known.memory or w.dtype is not FP8 or s.dtype is not torch.float32:
            return None
        return known.run if w.shape == known.shapes[0] and s.shape == known.shapes[1] else None
