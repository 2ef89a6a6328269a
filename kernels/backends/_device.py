"""The device of the operands made current, as compiled libraries expect: what they start lands on the current one.

Seen on two H200: with operands on ``cuda:1`` and device 0 current, vLLM's ``cutlass_moe_mm`` reads memory that is not
its own. torch's operators and this package's Triton launches look after themselves. Calls whose host time counts ask
:func:`elsewhere` by themselves: the wrapper costs one and a half times as much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def elsewhere(device: torch.device) -> bool:
    """Whether ``device`` is a GPU that is not the current one."""
    return device.type == "cuda" and device.index != torch.cuda.current_device()


def on_its_device(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with the device of its first tensor current."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(first, Tensor):
            first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if elsewhere(first.device):
            with torch.cuda.device(first.device):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run
