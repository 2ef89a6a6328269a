"""Calls like one that was checked: for a weight and its scale, what their operands were, and the product decided.

A call is like an earlier one when its weight and scale lie in the same memory, and every operand has the class,
dispatch keys, dtype, device, extents and strides of that call, the number of rows apart. torch sees all
but the memory in one compiled call (:func:`kernels.fast.torch.guard`); the checks of a verb read each of them from
Python, one at a time. Of a torch release whose guard is not known, no call is like another: every one is checked.
What a context knows ends with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from kernels.backends._host import ALIGNMENT, packed
from kernels.config import current_config
from kernels.context import current
from kernels.fast import torch as fast

Run = TypeVar("Run")


def _never(*operands: Tensor) -> bool:
    return False


class Kept(Generic[Run]):
    """The product decided for a weight that the caller keeps as it is, and the operands of its last checked call."""

    __slots__ = ("_guard", "_pitches", "run")

    def __init__(self, run: Run) -> None:
        self.run = run
        self._guard: Callable[..., bool] = _never
        self._pitches: tuple[int, ...] = (1,)

    def learn(self, *rows: Tensor, weight: tuple[Tensor, ...] = ()) -> None:
        """Remember the operands of a checked call, unless a library could not take them as they are.

        The first and the last of ``rows`` are dense; scales of rows may be column-major, at any distance.
        """
        m, good = rows[0].shape[0], packed(rows[0]) and packed(rows[-1])
        if m and good and all(packed(x) or x.stride(0) == 1 for x in rows) and current_config().fast_paths:
            self._pitches = tuple(x.nbytes // m for x in rows)
            self._guard = fast.guard(weight, rows) or _never

    def rows(self, first: Any, *rest: Any) -> int:
        """The number of rows of a call that is like the last checked one, each operand on 16 bytes; else 0."""
        return self._extent(first, rest) if self._guard(first, *rest) else 0

    def _extent(self, first: Tensor, rest: tuple[Tensor, ...]) -> int:
        m = first.nbytes // self._pitches[0]
        if first.data_ptr() % ALIGNMENT:
            return 0
        if rest:
            for x, pitch in zip(rest, self._pitches[1:], strict=True):
                if x.nbytes != m * pitch or x.data_ptr() % ALIGNMENT:
                    return 0
        return m


class Known(Kept[Run]):
    """The same for a weight that anybody may change between two calls; memory of any operand may have been freed."""

    __slots__ = ("_memory",)

    def learn(self, *rows: Tensor, weight: tuple[Tensor, ...] = ()) -> None:
        """As :meth:`Kept.learn`, with the weight and its scale."""
        w, s = weight
        self._guard, self._memory = _never, (w.data_ptr(), s.data_ptr())
        super().learn(*rows, weight=weight)

    def rows(self, weight: Any, scale: Any, *rows: Any) -> int:
        """As :meth:`Kept.rows`, after the weight and its scale."""
        if not self._guard(weight, scale, *rows) or (weight.data_ptr(), scale.data_ptr()) != self._memory:
            return 0
        for x in rows:
            if x.untyped_storage().nbytes() < x.nbytes:
                return 0
        return self._extent(rows[0], rows[1:])


def find(key: object, weight: object, scale: object) -> Known[Any] | None:
    """What the context knows of a pair."""
    return current().weights.get((key, id(weight), id(scale)))


def keep(key: object, weight: Tensor, scale: Tensor, run: Run) -> Known[Run]:
    """What the context knows of a pair for which ``run`` is decided now."""
    found: Known[Run] | None = find(key, weight, scale)
    if found is not None and found.run is run:
        return found
    made: Known[Run] = current().weights.keep((key, id(weight), id(scale)), Known(run))
    return made
