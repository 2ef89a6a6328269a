"""Calls like one that was checked: for a weight and its scale, what their operands were, and the product decided.

A call is like an earlier one when its weight and scale lie in the same memory, and every operand has the class,
dispatch keys, dtype, device, extents and strides of that call, the number of rows apart; so is one without a weight
(:func:`remembered`). torch sees all but the memory in one compiled call (:func:`kernels.fast.torch.guard`); the checks
of a verb read each of them from Python, one at a time. Of a torch release whose guard is not known, no call is like
another: every one is checked.
What a context knows ends with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from inspect import signature
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor
from torch.compiler import is_compiling

from kernels.backends._host import ALIGNMENT, packed
from kernels.config import current_config
from kernels.context import current
from kernels.fast import torch as fast

Run = TypeVar("Run")
P = ParamSpec("P")
R = TypeVar("R")


def _never(*operands: Tensor) -> bool:
    return False


class Kept(Generic[Run]):
    """The product decided for a weight that the caller keeps as it is, and the operands of its last checked call.

    ``rows(first, *others)`` of operands gives the number of rows of a call that is like that one, each on 16 bytes;
    else 0. It is made anew for each call that is learnt: one operand with rows, or three.
    """

    __slots__ = ("rows", "run")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rows: Callable[..., int] = _never

    def learn(self, *rows: Tensor, weight: tuple[Tensor, ...] = ()) -> None:
        """Remember the operands of a checked call, unless a library could not take them as they are.

        The first and the last of ``rows`` are dense; scales of rows may be column-major, at any distance.
        """
        m, good = rows[0].shape[0], packed(rows[0]) and packed(rows[-1])
        if m and good and all(packed(x) or x.stride(0) == 1 for x in rows) and current_config().fast_paths:
            guard = fast.guard(weight, rows)
            self.rows = _never if guard is None else self._look(guard, [x.nbytes // m for x in rows], weight)

    @staticmethod
    def _look(guard: Callable[..., bool], pitches: list[int], weight: tuple[Tensor, ...]) -> Callable[..., int]:
        first, *others = pitches
        if not others:
            return lambda x: 0 if not guard(x) or x.data_ptr() % ALIGNMENT else x.nbytes // first
        second, third = others

        def three(x: Tensor, y: Tensor, z: Tensor) -> int:
            if not guard(x, y, z) or (x.data_ptr() | y.data_ptr() | z.data_ptr()) % ALIGNMENT:
                return 0
            m: int = x.nbytes // first
            return m if y.nbytes == m * second and z.nbytes == m * third else 0

        return three


class Known(Kept[Run]):
    """The same for a weight that anybody may change between two calls; memory of any operand may have been freed.

    ``rows(weight, weight_scale, first, *others)``.
    """

    __slots__ = ()

    def learn(self, *rows: Tensor, weight: tuple[Tensor, ...] = ()) -> None:
        """As :meth:`Kept.learn`, with the weight and its scale."""
        self.rows = _never
        super().learn(*rows, weight=weight)

    @staticmethod
    def _look(guard: Callable[..., bool], pitches: list[int], weight: tuple[Tensor, ...]) -> Callable[..., int]:
        (first, *others), (at, scale_at) = pitches, (x.data_ptr() for x in weight)

        def one(w: Tensor, s: Tensor, x: Tensor) -> int:
            if not guard(w, s, x) or w.data_ptr() != at or s.data_ptr() != scale_at or x.data_ptr() % ALIGNMENT:
                return 0
            held: int = x.nbytes
            return held // first if x.untyped_storage().nbytes() >= held else 0

        if not others:
            return one
        second, third = others

        def three(w: Tensor, s: Tensor, x: Tensor, y: Tensor, z: Tensor) -> int:
            if (
                not guard(w, s, x, y, z)
                or w.data_ptr() != at
                or s.data_ptr() != scale_at
                or (x.data_ptr() | y.data_ptr() | z.data_ptr()) % ALIGNMENT
            ):
                return 0
            held, next_held, last_held = x.nbytes, y.nbytes, z.nbytes
            m: int = held // first
            if (
                next_held != m * second
                or last_held != m * third
                or x.untyped_storage().nbytes() < held
                or y.untyped_storage().nbytes() < next_held
                or z.untyped_storage().nbytes() < last_held
            ):
                return 0
            return m

        return three


class Met:
    """A checked call of dense tensors: whether those of another one are like its own, some with any rows."""

    __slots__ = ("_guard", "_order", "_rows")

    def __init__(self, tensors: list[Tensor], rows: Sequence[int], free: Sequence[int] = ()) -> None:
        """``rows``: which have one number of rows that may be another next time; ``free``: each any number."""
        same = [i for i in range(len(tensors)) if i not in rows and i not in free]
        found = fast.guard([tensors[i] for i in same], [tensors[i] for i in (*rows, *free)])
        self._guard, self._order, self._rows = found or _never, (*same, *rows, *free), tuple(rows)

    def takes(self, tensors: list[Tensor]) -> bool:
        """Whether these are like the first ones, in memory that holds them, with one number of rows."""
        if not self._guard(*[tensors[i] for i in self._order]):
            return False
        for x in tensors:
            if x.untyped_storage().nbytes() < x.nbytes:
                return False
        return len(self._rows) < 2 or len({tensors[i].shape[0] for i in self._rows}) == 1


PLAIN = (int, float, str, bool, type(None))


def remembered(
    run: Callable[P, R], *, rows: Collection[str] | None = None, free: Collection[str] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A verb whose calls like one that was checked go straight to ``run``, which takes the same arguments.

    Like means: equal options, and tensors that torch's guard takes for those of the checked call (:class:`Met`). Of the
    parameters ``rows`` (None: of every matrix) the number of rows may be another one, of each of ``free`` its own.
    """

    def of(verb: Callable[P, R]) -> Callable[P, R]:
        parameters = tuple(signature(verb).parameters)

        def learnt(tensors: list[Tensor], names: list[str]) -> Met:
            where = range(len(tensors))
            dynamic = [i for i in where if (tensors[i].dim() == 2 if rows is None else names[i] in rows)]
            return Met(tensors, dynamic, [i for i in where if names[i] in free])

        @wraps(verb)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if is_compiling():
                return verb(*args, **kwargs)
            tensors: list[Tensor] = []
            key: list[object] = [verb]
            for value in args:
                if isinstance(value, Tensor):
                    tensors.append(value)
                    key.append(Tensor)
                elif type(value) in PLAIN:
                    key.append(value)
                else:
                    return verb(*args, **kwargs)
            for name, value in kwargs.items():
                if isinstance(value, Tensor):
                    tensors.append(value)
                    value = Tensor
                elif type(value) not in PLAIN:
                    return verb(*args, **kwargs)
                key += (name, value)
            if not tensors:
                return verb(*args, **kwargs)
            first, memo = tensors[0], current().weights
            try:
                whole = (*key, first.dtype, first.shape[-1:])
            except RuntimeError:  # a nested tensor has no shape; the verb refuses it
                return verb(*args, **kwargs)
            met = memo.get(whole)
            if met is not None and met.takes(tensors):
                return run(*args, **kwargs)
            made = verb(*args, **kwargs)
            once = len({id(x) for x in tensors}) == len(tensors)  # the guard takes no tensor twice
            if once and current_config().fast_paths and all(x.is_contiguous() for x in tensors):
                given = {**dict(zip(parameters, args, strict=False)), **kwargs}
                memo.keep(whole, learnt(tensors, [name for name, x in given.items() if isinstance(x, Tensor)]))
            return made

        return call

    return of


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


def keep_for(key: object, weight: Tensor, scale: Tensor, found: Known[Run]) -> None:
    """Keep what is known of a pair under another key too, for calls like the last one that was learnt."""
    made: Known[Run] = Known(found.run)
    made.rows = found.rows
    current().weights.keep((key, id(weight), id(scale)), made)
