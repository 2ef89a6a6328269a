"""What torch computes otherwise on a GPU than on the CPU, done on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_PRODUCT = {_aten.div.Tensor: _aten.mul.Tensor, _aten.div_.Tensor: _aten.mul_.Tensor}


class ReciprocalDivision(TorchDispatchMode):
    """A tensor over a number is the tensor times the rounded reciprocal of the number, as in torch's CUDA kernel for
    divisions (``div_true_kernel_cuda``); the two may differ in the last bit."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCT and isinstance(args[1], int | float):
            func, args = _PRODUCT[func], (args[0], 1.0 / args[1])
        return func(*args, **(kwargs or {}))
