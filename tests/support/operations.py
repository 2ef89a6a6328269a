"""Counts the operations of torch that a call makes, views included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """``seen``: every operation by its name, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(call: Callable[[], object]) -> int:
    """How many operations a call makes."""
    with Operations() as counted:
        call()
    return sum(counted.seen.values())
