"""Argument checks shared by the public verbs: each raises a typed error that names the value and a remedy.

They run before any kernel is launched and read metadata only, never values, so that they never wait for a device and
trace through ``torch.compile``. Checks of values are with their verbs.

NaN and infinity: no check of metadata reads a value.
Source: PyTorch's tensor metadata; the published signatures of the libraries.
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .config import current_config
from .errors import DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError, ValueRangeError, shown

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite E4M3 value (OCP OFP8 1.0, table 1)."""
WIDE = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that a quantiser takes and a GEMM can write."""
INTEGER = (int, torch.SymInt)
"""Integers, symbolic ones of ``torch.compile`` included. A tuple, because torch 2.9 cannot trace a union of types."""


P = ParamSpec("P")
R = TypeVar("R")
CPU, STRIDED = torch.device("cpu"), torch.strided
LONGEST = 1 << 63
"""The first integer beyond those that torch and a kernel count with."""


@overload
def checked(function: Callable[P, R]) -> Callable[P, R]: ...
@overload
def checked(*, gradients: bool = ..., name: str | None = ...) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def checked(
    function: Callable[..., Any] | None = None, *, gradients: bool = False, name: str | None = None
) -> Callable[..., Any]:
    """A public routine whose arguments are of the kinds that its annotations name, in memory that they own.

    What a kind cannot say (ranks, dtypes, ranges) is checked by the routine. Costs some hundred nanoseconds for each
    tensor; under ``torch.compile``, which traces the kinds, nothing. ``gradients``: the routine is of torch's own
    operations, or detaches what it is given; of any other a gradient is refused, as the operators refuse it. ``name``
    in messages is that of the function where none is given.

    Raises
    ------
    InputError, LayoutError, OptionError
        An argument is of another kind; a tensor's memory was freed, its values are yet to be negated, it requires a
        gradient, or is one of ``torch.vmap`` or another transform.
    """
    if function is None:
        return lambda routine: _checked(routine, gradients, name or routine.__name__)
    return _checked(function, gradients, name or function.__name__)


def _checked(function: Callable[P, R], gradients: bool, called: str) -> Callable[P, R]:
    kinds: dict[str, tuple[Any, ...]] = {}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal kinds
        if is_compiling():
            return function(*args, **kwargs)
        if not kinds:  # at the first call, when every name of the module is known; in the order of the parameters
            hints = typing.get_type_hints(function)
            kinds = {name: _kinds(hints.get(name, object)) for name in signature(function).parameters}
        for (name, kind), value in zip(kinds.items(), args, strict=False):
            _check(name, value, kind)
        for name, value in kwargs.items():
            _check(name, value, kinds.get(name, (object,)))
        if not gradients and torch.is_grad_enabled():
            without_gradient(called, *args, *kwargs.values())
        return function(*args, **kwargs)

    return call


def without_gradient(routine: str, *values: object) -> None:
    """Refuse tensors, in pairs too, that require a gradient of a routine without one: codes have none."""
    for value in values:
        if isinstance(value, tuple):
            without_gradient(routine, *value)
        elif isinstance(value, Tensor) and value.requires_grad:
            raise OptionError(
                f"{routine} has no gradient: call it under torch.no_grad() or torch.inference_mode(), or detach the "
                "operands that require one"
            )


def _kinds(hint: Any) -> tuple[object, ...]:
    """The classes of an annotation; of a generic one, its origin."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(typing.get_origin(part) or (object if part is Any else part) for part in parts)


def _check(name: str, value: object, kinds: tuple[Any, ...]) -> None:
    if isinstance(value, Tensor):
        if kinds[0] is Tensor or Tensor in kinds or object in kinds:
            memory(name, value)
            return
    elif isinstance(value, tuple) and tuple in kinds:
        for inner in value:
            if isinstance(inner, Tensor):
                memory(name, inner)
        return
    elif value is True or value is False:
        if bool in kinds or object in kinds:
            return
    elif isinstance(value, INTEGER):
        if (int in kinds or float in kinds) and -LONGEST < value < LONGEST or object in kinds:
            return
    elif isinstance(value, kinds) and not (isinstance(value, str) and str not in kinds and object not in kinds):
        return
    if kinds in ((Tensor,), (Tensor, type(None))):
        tensor(name, value)
    wanted = " or ".join("None" if k is type(None) else getattr(k, "__name__", str(k)) for k in kinds)
    got = f"a {type(value).__name__}" if isinstance(value, Tensor) else f"{value!r:.80}"
    raise OptionError(f"{name} must be {wanted}, got {got}")


def plain(x: Tensor) -> bool:
    """Whether a tensor is strided, in memory that holds its values; False too where only :func:`memory` knows.

    ``x`` of any shape and dtype.
    """
    if x.layout is not STRIDED or x.is_nested or x.is_neg() or x.is_quantized or type(x) is not Tensor and _is_fake(x):
        return False
    try:
        return x.nbytes <= x.untyped_storage().nbytes()
    except NotImplementedError:  # a transform's: :func:`memory` says so
        return False


def memory(name: str, x: Tensor) -> None:
    """Refuse a tensor whose memory does not hold its values; a kernel would read what it is not.

    ``x`` of any shape and dtype.

    Raises
    ------
    LayoutError
        It is not strided, yet to be negated, or quantised by torch.
    InputError
        Its memory was freed.
    OptionError
        It is one of ``torch.vmap``, or of another transform of ``torch.func``.
    """
    if plain(x):
        return
    if x.layout is not STRIDED or x.is_nested:
        raise LayoutError(f"{name} must be a strided tensor, got layout {x.layout}; call .to_dense() first")
    if x.is_neg() or x.is_quantized:
        raise LayoutError(f"{name} is a negative view, or quantised by torch; pass a tensor of its values in memory")
    if type(x) is not Tensor and _is_fake(x) and _fake_mode() is None:
        raise InputError(f"{name} is a {type(x).__name__} outside of its mode, and has no values; pass a plain tensor")
    try:
        has = x.untyped_storage().nbytes()  # it repeats elements, or reaches beyond its storage
    except NotImplementedError:
        raise OptionError(
            f"{name} is inside of torch.vmap or another transform of torch.func, which have no rule for this routine: "
            "it takes every row in one call; flatten the batch"
        ) from None
    last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    if has < (needs := (last + 1) * x.element_size()):
        raise InputError(f"{name} {list(x.shape)} needs {needs} bytes and its storage has {has}: its memory was freed")


def _is_fake(x: Tensor) -> bool:
    return hasattr(x, "fake_mode")


def _fake_mode() -> object:
    """The fake mode that is active, None without one."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def tensor(name: str, x: object) -> Tensor:
    """Return ``x`` when it is a strided tensor; else raise :class:`InputError`.

    Returns ``x`` unchanged, of the same shape and dtype.

    Raises LayoutError.
    """
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise LayoutError(f"{name} must be a strided tensor, got layout {x.layout}; call .to_dense() first")
    return x


def rank(name: str, x: object, *ranks: int) -> Tensor:
    """Return ``x`` when its rank is one of ``ranks``.

    Returns ``x`` unchanged, of the same shape and dtype.

    Raises InputError, LayoutError, ShapeError.
    """
    t = tensor(name, x)
    if t.dim() not in ranks:
        wanted = " or ".join(str(r) for r in ranks)
        raise ShapeError(f"{name} must have {wanted} dimensions, got shape {list(t.shape)}")
    return t


def dtype(name: str, x: Tensor, *dtypes: torch.dtype) -> Tensor:
    """Return ``x`` when its dtype is one of ``dtypes``.

    ``x`` of any shape; returns ``x`` unchanged, of the same shape and dtype.

    Raises DtypeError.
    """
    if x.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise DtypeError(f"{name} must be {wanted}, got {str(x.dtype).removeprefix('torch.')}")
    return x


def shape(name: str, x: Tensor, expected: tuple[int, ...], meaning: str) -> Tensor:
    """Return ``x`` when its shape is ``expected``; ``meaning`` spells the shape in symbols.

    Returns ``x`` unchanged, of the same shape and dtype.

    Raises ShapeError.
    """
    if tuple(x.shape) != expected:
        raise ShapeError(f"{name} must be {meaning} = {list(expected)}, got {list(x.shape)}")
    return x


def operand(name: str, x: object, expected: tuple[int, ...], meaning: str, *dtypes: torch.dtype) -> Tensor:
    """Return ``x`` when it is a tensor of one of the dtypes and of the shape, in that order.

    Returns ``x`` unchanged, of that shape and dtype.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    return shape(name, dtype(name, tensor(name, x), *dtypes), expected, meaning)


def matrix(name: str, x: object, *dtypes: torch.dtype) -> tuple[int, int]:
    """The extents of an operand of a product, of one of the dtypes (E4M3 where none is named); no extent of a weight
    (``b``, ``weight``) is 0, and of an input only the number of rows may be."""
    rows, columns = dtype(name, rank(name, x, 2), *(dtypes or (FP8,))).shape
    if columns == 0 or (rows == 0 and name in ("b", "weight")):
        raise ShapeError(f"{name} has an empty dimension: shape {[rows, columns]}")
    return rows, columns


def column_major(name: str, x: Tensor) -> Tensor:
    """Return ``x`` ``[..., K, N]`` unless its rows are contiguous: the libraries read it column by column.

    Returns ``x`` unchanged, of the same shape and dtype.

    A row-major tensor is nearly always a weight ``[N, K]`` whose transpose was forgotten, which a square shape hides.

    Raises
    ------
    LayoutError
        The distance of columns is the shorter one, and both extents are above 1.
    """
    rows, columns = x.stride()[-2:]
    if 0 < columns < rows and x.shape[-1] > 1 and x.shape[-2] > 1:
        raise LayoutError(
            f"{name} {list(x.shape)} is row-major (strides {tuple(x.stride())}); pass it column-major, as the "
            "transpose weight.mT of a contiguous [..., N, K]"
        )
    return x


def pair(name: str, value: object) -> tuple[Tensor, Tensor]:
    """Return ``value`` when it is a tuple of codes and scales.

    Returns two tensors of any shape and dtype, unchanged.

    Raises InputError.
    """
    if not isinstance(value, tuple) or len(value) != 2:
        raise InputError(f"{name} must be a tuple (codes, scale), got {type(value).__name__}")
    return value


def output(name: str, x: object, expected: tuple[int, ...], meaning: str, *dtypes: torch.dtype) -> Tensor:
    """Return ``x`` when a kernel can write it: dtype, shape, and no two elements at one address.

    Returns ``x`` unchanged, of that shape and dtype.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    return disjoint(name, writable(name, operand(name, x, expected, meaning, *dtypes)))


def disjoint(name: str, x: Tensor) -> Tensor:
    """Return ``x`` of any shape when no two of its elements share memory; else raise :class:`LayoutError`.

    Returns ``x`` unchanged, of the same shape and dtype.
    """
    if x.is_contiguous():  # no graph of a changing number of rows can sort symbolic strides
        return x
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride <= reach:
            raise LayoutError(f"{name} has elements that share memory (strides {x.stride()}); pass a tensor of its own")
        reach += stride * (size - 1)
    return x


def writable(name: str, x: Tensor) -> Tensor:
    """Return ``x`` when torch lets it be written here.

    ``x`` of any shape; returns ``x`` unchanged, of the same shape and dtype.

    Raises LayoutError.
    """
    if not is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled():
        raise LayoutError(f"{name} was made in inference mode and cannot be written outside of it; pass another tensor")
    return x


def same_device(**tensors: Tensor | None) -> torch.device:
    """Return the one device of all given tensors.

    ``tensors`` of any shape and dtype, by name.

    Raises DeviceError, InputError.
    """
    first: tuple[str, torch.device] | None = None
    for name, t in tensors.items():
        if t is None:
            continue
        if first is None:
            first = (name, t.device)
        elif t.device != first[1]:
            raise DeviceError(f"{name} is on {t.device} but {first[0]} is on {first[1]}; move one of them")
    if first is None:
        raise InputError("no tensor was given")
    return first[1]


def out_dtype(value: object, *admitted: torch.dtype, name: str = "out_dtype") -> torch.dtype:
    """Return ``value`` when it is one of the ``admitted`` output dtypes."""
    admitted = admitted or WIDE
    if not isinstance(value, torch.dtype) or value not in admitted:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in admitted)
        raise OptionError(f"{name} must be one of {wanted}, got {value}")
    return value


def positive(name: str, value: object) -> int:
    """Return ``value`` when it is an integer of at least 1 (a bool is not an integer here)."""
    if isinstance(value, bool) or not isinstance(value, INTEGER):
        raise OptionError(f"{name} must be a positive integer, got {shown(value)}")
    if value < 1:
        raise OptionError(f"{name} must be a positive integer, got {value}")
    whole: Any = value  # a SymInt acts as int
    return int(whole) if isinstance(whole, int) else whole


def number(name: str, value: float) -> float:
    """Return ``value`` when it is positive and finite."""
    if not 0.0 < value < float("inf"):
        raise OptionError(f"{name} must be a positive finite number, got {shown(value)}")
    return value


def not_negative(name: str, value: int | None) -> int | None:
    """Return ``value`` when it is None, 0 or above."""
    if value is not None and value < 0:
        raise OptionError(f"{name} must be 0 or above, got {value}")
    return value


def room(name: str, value: int, size: int) -> int:
    """Return ``value``, which asks for ``size`` bytes, when this machine has them."""
    if is_compiling():
        return value
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > have:
        raise OptionError(f"{name}={value} asks for {size} bytes, and this machine has {have}; pass a smaller one")
    return value


def scalar(name: str, value: object) -> None:
    """None, or a tensor that holds one float32 value."""
    if value is None:
        return
    t = dtype(name, tensor(name, value), torch.float32)
    if t.numel() != 1:
        raise ShapeError(f"{name} must hold one value, got shape {list(t.shape)}")


def integers(name: str, value: object, count: int | None = None) -> list[int]:
    """Return ``value`` as a list when it is a sequence of integers (``count`` of them when given)."""
    if not isinstance(value, (list, tuple)) or (count is not None and len(value) != count):
        wanted = "integers" if count is None else f"{count} integers"
        raise OptionError(f"{name} must be a sequence of {wanted}, got {shown(value)}")
    for v in value:
        if isinstance(v, bool) or not isinstance(v, INTEGER):
            raise OptionError(f"{name} must be a sequence of integers, got {shown(value)}")
    return list(value)


def concrete(name: str, x: Tensor) -> Tensor:
    """Return ``x`` when it has values; a routine that reads them cannot take a meta or a fake tensor.

    ``x`` of any shape; returns ``x`` unchanged, of the same shape and dtype.

    Raises DeviceError.
    """
    if x.device.type == "meta" or type(x) is not Tensor and _is_fake(x):
        raise DeviceError(f"{name} is on the meta device, or fake, and has no values to look at")
    return x


def multiple(name: str, value: int, of: int, way_out: str) -> int:
    """Return ``value`` when it is a multiple of ``of``."""
    if value % of != 0:
        raise ShapeError(f"{name}={value} is not a multiple of {of}; {way_out}")
    return value


def nonempty(name: str, x: Tensor, *dims: int) -> Tensor:
    """Return ``x`` when none of its ``dims`` has extent 0.

    ``x`` of any shape; returns ``x`` unchanged, of the same shape and dtype.

    Raises ShapeError.
    """
    for d in dims:
        if x.shape[d] == 0:
            raise ShapeError(f"{name} has an empty dimension {d}: shape {list(x.shape)}")
    return x


def wanted(check: bool | None, device: torch.device) -> bool:
    """Whether a call looks at values: as ``check`` says; by default at a CPU's, and at a GPU's where a switch asks."""
    return device == CPU or current_config().check_values if check is None else check


def values(name: str, check: bool | None, good: Tensor, explain: Callable[[], str]) -> None:
    """Refuse values for which ``good``, one bool, is False.

    ``good`` is a scalar.

    A ``check`` of None checks what lies on the CPU, and never waits for a GPU: there it looks at values only where
    ``FP8_KERNELS_CHECK`` is set, and hands the device a flag that fails the next synchronisation. True waits for the
    GPU, and says which value it is; while a graph is captured it hands over the flag, which is read at every replay. In
    a compiled graph it is such a flag on the CPU too, a RuntimeError of torch. False looks at nothing.

    Raises
    ------
    ValueRangeError
        With what ``explain`` says.
    """
    on_gpu = good.device.type == "cuda"
    if is_compiling() or on_gpu and (check is None or torch.cuda.is_current_stream_capturing()):
        torch._assert_async(good, f"{name} has values outside of its contract; call with check=True to see which")
    elif not bool(good):
        raise ValueRangeError(explain())


def within(name: str, check: bool | None, low: Tensor, high: Tensor, ends: tuple[int, int], interval: str) -> None:
    """Values from the least of ``low`` to the largest of ``high``, within ``ends``; see :func:`values`.

    ``low`` and ``high`` integers of any shape.

    Raises ValueRangeError.
    """
    first, last = low.min(), high.max()
    values(
        name,
        check,
        (first >= ends[0]) & (last <= ends[1]),
        lambda: f"{name} runs from {first.item()} to {last.item()}; it must stay within {interval}",
    )


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, during which no value can be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
