"""What the caller's torch is set to must not change what a backend computes or keeps.

Under ``torch.autocast("cpu")`` a float32 product is rounded to bfloat16; with gradients on, an output that is written
into time and again (a caller's buffer) would keep the history of every call. Compiled libraries know neither.

Not covered: autocast of other devices (plain torch multiplies CPU tensors only).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def as_written(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` without autocast on a CPU and without gradients; nothing is entered where neither is on."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return run(*args, **kwargs)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run
