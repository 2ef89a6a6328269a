"""Fast path for repeated calls: the operands of a call that was checked, and the product decided for its weight.

A call repeats an earlier one when its weight and scale lie in the same memory, and every operand has the class,
dispatch keys, dtype, device, extents and strides of that call, except for the number of rows. What runs then takes the
weight that is passed, and no value is kept: a weight that is written, assigned or reallocated between two calls is
followed, and one that no longer fits is checked and refused. torch compares all but
the memory in one compiled call (:func:`kernels.fast.guard`), where the checks of a verb read each property from
Python. Cached calls belong to a context and end with it.

NaN and infinity: no value is read.
Source: derived in this package from torch's ``TensorGuards``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from inspect import signature
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from torch import Tensor
from torch.compiler import is_compiling

from . import fast
from .backends._host import ALIGNMENT, packed
from .config import current_config
from .context import current
from .errors import InputError

Run = TypeVar("Run")
P = ParamSpec("P")
R = TypeVar("R")


Rows = Callable[..., int]
"""``(weight, weight_scale, first, *others)`` to the number of rows of operands that repeat a call, else 0."""


def _never(*operands: Tensor) -> int:
    return 0


class GuardedCall(Generic[Run]):
    """What runs for a weight, and :data:`Rows` of a call that it may repeat."""

    __slots__ = ("_of", "rows", "run")

    def __init__(self, run: Run, rows: Rows = _never, of: Callable[[int, int], Rows] | None = None) -> None:
        self.run, self.rows, self._of = run, rows, of

    def at(self, weight: Tensor, weight_scale: Tensor) -> GuardedCall[Run]:
        """The same of ``weight`` and ``weight_scale`` of the same shapes and dtypes: all but their addresses may be
        shared."""
        if self._of is None:
            return self
        return GuardedCall(self.run, self._of(weight.data_ptr(), weight_scale.data_ptr()))


def guarded(run: Run, weight: tuple[Tensor, Tensor], rows: tuple[Tensor, ...], *, owned: bool) -> GuardedCall[Run]:
    """The call of these checked operands, of any address (:meth:`GuardedCall.at`).

    It has no rows where a library could not take them without a copy. ``weight`` and its scale, and ``rows``
    ``[M, ...]``, one operand or three: the first and the last are dense, scales of rows may be column-major, at any
    distance. ``owned``: whether each call looks at the memory of the rows too, which may have been freed. Dtypes are
    those of the call.
    """
    m, dense = rows[0].shape[0], packed(rows[0]) and packed(rows[-1])
    if not (m and dense and all(packed(x) or x.stride(0) == 1 for x in rows) and current_config().fast_paths):
        return GuardedCall(run)
    look = _one if len(rows) == 1 else _three
    return GuardedCall(run, of=look(fast.guard(weight, rows), owned, *(x.nbytes // m for x in rows)))


def _one(guard: Callable[..., bool], owned: bool, pitch: int) -> Callable[[int, int], Rows]:
    def of(at: int, scale_at: int) -> Rows:
        def rows(w: Tensor, s: Tensor, x: Tensor) -> int:
            try:
                nested = x.is_nested
            except AttributeError:  # no tensor: the checks of the verb refuse it by name
                return 0
            if (
                nested  # the guard ends the process at one
                or not guard(w, s, x)
                or w.data_ptr() != at
                or s.data_ptr() != scale_at
                or x.data_ptr() % ALIGNMENT
            ):
                return 0
            size: int = x.nbytes
            return size // pitch if not owned or x.untyped_storage().nbytes() >= size else 0

        return rows

    return of


def _three(
    guard: Callable[..., bool], owned: bool, pitch: int, next_pitch: int, last_pitch: int
) -> Callable[[int, int], Rows]:
    repeats = _Repeats(0, 0, _never, 0)

    def learn(size: int, *operands: Tensor) -> int:
        """The number of rows of operands that the guard admits; for a size that keeps coming a guard is made."""
        nonlocal repeats
        m = size // pitch
        if not guard(*operands) or operands[3].nbytes != m * next_pitch or operands[4].nbytes != m * last_pitch:
            return 0
        before = repeats.calls if repeats.size == size and repeats.exact is _never else 0
        exact = fast.guard(operands, ()) if before == WORTH else _never
        repeats = _Repeats(size, m, exact, before + 1)
        return m

    def of(at: int, scale_at: int) -> Rows:
        def rows(w: Tensor, s: Tensor, x: Tensor, y: Tensor, z: Tensor) -> int:
            try:
                if x.is_nested or y.is_nested or z.is_nested:  # the guard ends the process at one
                    return 0
            except AttributeError:  # no tensor: the checks of the verb refuse it by name
                return 0
            size, m, exact, _ = repeats
            if (size != x.nbytes or not exact(w, s, x, y, z)) and not (m := learn(x.nbytes, w, s, x, y, z)):
                return 0
            if (
                w.data_ptr() != at
                or s.data_ptr() != scale_at
                or (x.data_ptr() | y.data_ptr() | z.data_ptr()) % ALIGNMENT
            ):
                return 0
            if owned and (
                x.untyped_storage().nbytes() < m * pitch
                or y.untyped_storage().nbytes() < m * next_pitch
                or z.untyped_storage().nbytes() < m * last_pitch
            ):
                return 0
            return m

        return rows

    return of


WORTH = 64
"""Calls of one size for which a guard of their own is worth its making: 11 us, of which each call saves 0.2."""


class _Repeats(NamedTuple):
    """The last call of a class of weights: bytes of its first operand, its rows, and the guard of its very extents,
    beside which the numbers of bytes need no look; it admits nothing until the size came in :data:`WORTH` calls."""

    size: int
    m: int
    exact: Callable[..., bool | int]
    calls: int


def gone(name: str) -> InputError:
    """The error of a kept plan whose weight no longer is."""
    return InputError(
        f"the {name} of this plan was replaced or released by its owner, as load_state_dict(assign=True) does; prepare "
        "a plan of the new one, and keep the tensor while the plan is used"
    )


class CallSignature:
    """The guard of a checked call of dense tensors, of which some may have another number of rows next time."""

    __slots__ = ("_guard", "_order", "_rows")

    def __init__(self, tensors: list[Tensor], rows: Sequence[int], free: Sequence[int] = ()) -> None:
        """``rows``: which have one number of rows that may be another next time; ``free``: each any number."""
        same = [i for i in range(len(tensors)) if i not in rows and i not in free]
        self._guard = fast.guard([tensors[i] for i in same], [tensors[i] for i in (*rows, *free)])
        self._order, self._rows = (*same, *rows, *free), tuple(rows)

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
    """The cached call of a weight and its scale in this context; None without one.

    Both are known by their identity, which may be that of tensors that are gone: the call looks at everything else.
    """
    return current().weights.get((key, id(weight), id(scale)))


def store(key: object, weight: Tensor, scale: Tensor, run: Any, *rows: Tensor) -> None:
    """Let calls with this weight and scale repeat a checked one.

    ``weight`` and ``scale`` of any shape and dtype, ``rows`` ``[M, ...]``.
    """
    call = of_class(key, weight, scale, run, *rows, owned=True)
    current().weights.keep((key, id(weight), id(scale)), call)


def of_class(key: object, weight: Tensor, scale: Tensor, run: Any, *rows: Tensor, owned: bool) -> GuardedCall[Any]:
    """:func:`guarded` operands of a checked call; weights of one class share what is kept, but for their addresses.

    ``weight`` and ``scale`` of any shape and dtype, ``rows`` ``[M, ...]``.
    """
    now, whole = current(), (key, owned, *map(_whole, (weight, scale)), *map(_but_rows, rows))
    call: GuardedCall[Any] | None = now.decisions.get(whole)
    here = None if call is None or call.run is not run else call.at(weight, scale)
    if here is None or not here.rows(weight, scale, *rows):  # another operator, or inference mode
        call = now.decisions.keep(whole, guarded(run, (weight, scale), rows, owned=owned))
        here = call.at(weight, scale)
    return here


def store_as(key: object, weight: Tensor, scale: Tensor, call: GuardedCall[Any]) -> None:
    """Store a cached call under another key too.

    ``weight`` and ``scale`` of any shape and dtype.
    """
    current().weights.keep((key, id(weight), id(scale)), call)


def _whole(x: Tensor) -> tuple[object, ...]:
    return type(x), x.dtype, x.device, x.requires_grad, x.shape, x.stride()


def _but_rows(x: Tensor) -> tuple[object, ...]:
    """The same for every number of rows: column-major scales have another pitch for each."""
    return type(x), x.dtype, x.device, x.requires_grad, x.shape[1:], x.is_contiguous() or x.stride(0)
