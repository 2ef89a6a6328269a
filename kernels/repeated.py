"""Fast path for repeated calls: the operands of a call that was checked, and the product decided for its weight.

A call repeats an earlier one when its weight and scale lie in the same memory, and every operand has the class,
dispatch keys, dtype, device, extents and strides of that call, except for the number of rows; a call without a weight
does too (:func:`with_fast_path`). torch compares all but the memory in one compiled call
(:func:`kernels.fast.torch.guard`), where the checks of a verb read each property from Python. On a torch release whose
guard is not known, caching is off: every call is checked. Cached calls belong to a context and end with it.

NaN and infinity: no value is read.
Source: derived in this package from torch's ``TensorGuards``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from inspect import signature
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor
from torch.compiler import is_compiling

from .backends._host import ALIGNMENT, packed
from .config import current_config
from .context import current
from .fast import torch as fast

Run = TypeVar("Run")
P = ParamSpec("P")
R = TypeVar("R")


def _never(*operands: Tensor) -> bool:
    return False


class CachedCall(Generic[Run]):
    """The product decided for a weight that the caller holds unchanged, and the operands of its last checked call.

    ``rows(first, *others)`` gives the number of rows of operands that repeat that call, each on 16 bytes; else 0. It is
    replaced by each call that is learnt: of one operand with rows, or of three.
    """

    __slots__ = ("rows", "run")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rows: Callable[..., int] = _never

    def learn(self, *rows: Tensor, weight: tuple[Tensor, ...] = ()) -> None:
        """Remember the operands of a checked call, unless a library could not take them without a copy.

        ``rows`` ``[M, ...]`` and ``weight`` of any shape and dtype.

        The first and the last of ``rows`` are dense; scales of rows may be column-major, at any distance.
        """
        m, dense = rows[0].shape[0], packed(rows[0]) and packed(rows[-1])
        if m and dense and all(packed(x) or x.stride(0) == 1 for x in rows) and current_config().fast_paths:
            guard = fast.guard(weight, rows)
            self.rows = _never if guard is None else self._look(guard, [x.nbytes // m for x in rows], weight)

    @staticmethod
    def _look(guard: Callable[..., bool], pitches: list[int], weight: tuple[Tensor, ...]) -> Callable[..., int]:
        first, *others = pitches
        if not others:

            def alone(x: Tensor) -> int:
                try:
                    nested = x.is_nested
                except AttributeError:  # no tensor: the checks of the verb refuse it by name
                    return 0
                return 0 if nested or not guard(x) or x.data_ptr() % ALIGNMENT else x.nbytes // first

            return alone
        second, third = others

        def three(x: Tensor, y: Tensor, z: Tensor) -> int:
            try:
                nested = x.is_nested or y.is_nested or z.is_nested
            except AttributeError:  # no tensor: the checks of the verb refuse it by name
                return 0
            if nested or not guard(x, y, z):
                return 0
            if (x.data_ptr() | y.data_ptr() | z.data_ptr()) % ALIGNMENT:
                return 0
            m: int = x.nbytes // first
            return m if y.nbytes == m * second and z.nbytes == m * third else 0

        return three


class GuardedCall(CachedCall[Run]):
    """A cached call for a weight that anybody may change between two calls; memory of any operand may have been freed.

    ``rows(weight, weight_scale, first, *others)``.
    """

    __slots__ = ()

    def learn(self, *rows: Tensor, weight: tuple[Tensor, ...] = ()) -> None:
        """As :meth:`CachedCall.learn`, with the weight and its scale.

        ``rows`` ``[M, ...]`` and ``weight`` of any shape and dtype.
        """
        self.rows = _never
        super().learn(*rows, weight=weight)

    @staticmethod
    def _look(guard: Callable[..., bool], pitches: list[int], weight: tuple[Tensor, ...]) -> Callable[..., int]:
        (first, *others), (at, scale_at) = pitches, (x.data_ptr() for x in weight)

        def one(w: Tensor, s: Tensor, x: Tensor) -> int:
            try:
                nested = x.is_nested
            except AttributeError:  # no tensor: the checks of the verb refuse it by name
                return 0
            if (
                nested
                or not guard(w, s, x)
                or w.data_ptr() != at
                or s.data_ptr() != scale_at
                or x.data_ptr() % ALIGNMENT
            ):
                return 0
            size: int = x.nbytes
            return size // first if x.untyped_storage().nbytes() >= size else 0

        if not others:
            return one
        second, third = others

        def three(w: Tensor, s: Tensor, x: Tensor, y: Tensor, z: Tensor) -> int:
            try:
                nested = x.is_nested or y.is_nested or z.is_nested
            except AttributeError:  # no tensor: the checks of the verb refuse it by name
                return 0
            if (
                nested
                or not guard(w, s, x, y, z)
                or w.data_ptr() != at
                or s.data_ptr() != scale_at
                or (x.data_ptr() | y.data_ptr() | z.data_ptr()) % ALIGNMENT
            ):
                return 0
            size, next_size, last_size = x.nbytes, y.nbytes, z.nbytes
            m: int = size // first
            if (
                next_size != m * second
                or last_size != m * third
                or x.untyped_storage().nbytes() < size
                or y.untyped_storage().nbytes() < next_size
                or z.untyped_storage().nbytes() < last_size
            ):
                return 0
            return m

        return three


class CallSignature:
    """The guard of a checked call of dense tensors, of which some may have another number of rows next time."""

    __slots__ = ("_guard", "_order", "_rows")

    def __init__(self, tensors: list[Tensor], rows: Sequence[int], free: Sequence[int] = ()) -> None:
        """``rows``: which have one number of rows that may be another next time; ``free``: each any number."""
        same = [i for i in range(len(tensors)) if i not in rows and i not in free]
        guard = fast.guard([tensors[i] for i in same], [tensors[i] for i in (*rows, *free)])
        self._guard, self._order, self._rows = guard or _never, (*same, *rows, *free), tuple(rows)

    def matches(self, tensors: list[Tensor]) -> bool:
        """Whether the guard admits these tensors, their storage holds them, and ``rows`` have one number of rows.

        ``tensors`` of any shape and dtype.
        """
        if not self._guard(*[tensors[i] for i in self._order]):
            return False
        for x in tensors:
            if x.untyped_storage().nbytes() < x.nbytes:
                return False
        return len(self._rows) < 2 or len({tensors[i].shape[0] for i in self._rows}) == 1


PLAIN = frozenset({int, float, str, bool, type(None)})
"""Types of options; a key holds the type too, because 1 equals True."""


def with_fast_path(
    run: Callable[P, R], *, rows: Collection[str] | None = None, free: Collection[str] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of a verb: a repeated call goes to ``run``, which takes the same arguments, without the checks.

    A call repeats another when its options are equal and torch's guard admits its tensors (:class:`CallSignature`). Of
    the parameters ``rows`` (None: of every matrix) the number of rows may differ, of each of ``free`` independently.
    """

    def of(verb: Callable[P, R]) -> Callable[P, R]:
        parameters = tuple(signature(verb).parameters)

        def learnt(tensors: list[Tensor], names: list[str]) -> CallSignature:
            where = range(len(tensors))
            dynamic = [i for i in where if (tensors[i].dim() == 2 if rows is None else names[i] in rows)]
            return CallSignature(tensors, dynamic, [i for i in where if names[i] in free])

        @wraps(verb)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if is_compiling():
                return verb(*args, **kwargs)
            tensors: list[Tensor] = []
            key: list[object] = [verb]
            for value in args:
                if isinstance(value, Tensor):
                    if value.is_nested:  # torch's guard ends the process at one
                        return verb(*args, **kwargs)
                    tensors.append(value)
                    key.append(Tensor)
                elif (kind := type(value)) in PLAIN:
                    key += (kind, value)
                else:
                    return verb(*args, **kwargs)
            for name, value in kwargs.items():
                if isinstance(value, Tensor):
                    if value.is_nested:
                        return verb(*args, **kwargs)
                    tensors.append(value)
                    value = Tensor
                    key += (name, value)
                elif (kind := type(value)) in PLAIN:
                    key += (name, kind, value)
                else:
                    return verb(*args, **kwargs)
            if not tensors:
                return verb(*args, **kwargs)
            first, memo = tensors[0], current().weights
            whole = (*key, first.dtype, first.shape[-1:])
            checked_call = memo.get(whole)
            if checked_call is not None and checked_call.matches(tensors):
                return run(*args, **kwargs)
            result = verb(*args, **kwargs)
            distinct = len({id(x) for x in tensors}) == len(tensors)  # the guard takes no tensor twice
            if distinct and current_config().fast_paths and all(x.is_contiguous() for x in tensors):
                arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
                names = [name for name, x in arguments.items() if isinstance(x, Tensor)]
                memo.keep(whole, learnt(tensors, names))
            return result

        return call

    return of


def find(key: object, weight: object, scale: object) -> GuardedCall[Any] | None:
    """The cached call of a weight and its scale in this context; None without one."""
    return current().weights.get((key, id(weight), id(scale)))


def store(key: object, weight: Tensor, scale: Tensor, run: Run) -> GuardedCall[Run]:
    """The cached call of a weight and its scale for which ``run`` is decided now; a new one where ``run`` changed.

    ``weight`` and ``scale`` of any shape and dtype.
    """
    call: GuardedCall[Run] | None = find(key, weight, scale)
    if call is not None and call.run is run:
        return call
    fresh: GuardedCall[Run] = current().weights.keep((key, id(weight), id(scale)), GuardedCall(run))
    return fresh


def store_as(key: object, weight: Tensor, scale: Tensor, call: GuardedCall[Run]) -> None:
    """Store a cached call under another key too, with the operands that it learnt last.

    ``weight`` and ``scale`` of any shape and dtype.
    """
    copy: GuardedCall[Run] = GuardedCall(call.run)
    copy.rows = call.rows
    current().weights.keep((key, id(weight), id(scale)), copy)
