"""Custom operators in the namespace ``fp8_kernels``: what a verb is to ``torch.compile``, one opaque call.

The schema is that of the function that runs, flat: codes with their scales are two tensors, every argument may be
passed by position, and a result that may be None is an empty tensor. (``torch.library.custom_op`` would register the
same with 16 us of host time a call instead of 4.) Nothing is decided here.

Autocast       leaves operands as they are: a scale is float32 whatever the region says.
Compilation    outputs written into are named in the schema, and made functional by torch.
CUDA graphs    no operator waits for the device, or reads a value.
Autograd, vmap refused with a sentence: codes have no gradient, and rows are batched by the operators themselves.

NaN and infinity: no value is read.
Source: PyTorch (``torch.library``).
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .checks import without_gradient
from .errors import DeviceError, OptionError

NAMESPACE = "fp8_kernels"
"""Namespace of the custom operators: ``torch.ops.fp8_kernels``."""
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
PAIR = tuple[Tensor, Tensor]
_torch: Any = torch  # torch.library has no types
_library = _torch.library.Library(NAMESPACE, "FRAGMENT")


def register(
    name: str,
    real: Callable[..., Any],
    fake: Callable[..., Any],
    writes: tuple[str, ...] = (),
    fast_path: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> None:
    """Make ``real`` the operator ``name``; ``fake`` makes its outputs without values, ``writes`` are written into.

    ``fast_path`` is an optional fast-path wrapper of the function, for repeated calls.
    """
    with_gradients = torch.is_grad_enabled

    def with_refusal(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if with_gradients():
                without_gradient(f"{NAMESPACE}::{name}", *args, *kwargs.values())
            return function(*args, **kwargs)

        return run

    def on_one_device(*args: Any, **kwargs: Any) -> Any:
        """Torch runs the fake of real operands too, where one of them is on meta: its output would have no values."""
        devices = {x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        if len(devices) > 1 and "meta" in devices:
            raise DeviceError(
                f"operands of {NAMESPACE}::{name} are on {' and '.join(sorted(devices))}; load the weight"
            )
        return with_refusal(fake)(*args, **kwargs)

    def no_vmap(*_: Any) -> Any:
        raise OptionError(f"{NAMESPACE}::{name} has no vmap: it takes every row in one call; flatten the batch")

    real = flat(real)
    schema = _torch.library.infer_schema(inspect.unwrap(real), mutates_args=writes)
    _library.define(name + schema, tags=TAGS)
    run = with_refusal(real)
    _library.impl(name, run if fast_path is None else fast_path(run), "CompositeExplicitAutograd")
    _torch.library.register_fake(f"{NAMESPACE}::{name}", on_one_device, lib=_library)
    _torch.library.register_vmap(f"{NAMESPACE}::{name}", no_vmap, lib=_library)


def flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the arguments of an operator that makes this call; the function itself where it has them.

    A pair ``a`` becomes ``a`` and ``a_scale``, a tuple of integers a list, a result that is None an empty tensor like
    the first argument; no argument has a default then, since the verb passes each.
    """
    hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    kinds = {name: _kind(hints[name]) for name in parameters}
    results = typing.get_args(hints["return"])
    optional = any(type(None) in typing.get_args(part) for part in results)
    named = any(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    if not (named or optional) and all(kinds[name] is hints[name] for name in parameters):
        return function
    arguments, passed, annotations = list[str](), list[str](), dict[str, Any]()
    for name, parameter in parameters.items():
        value = name
        if kinds[name] is PAIR:
            arguments += [name, f"{name}_scale"]
            annotations |= dict.fromkeys(arguments[-2:], Tensor)
            value = f"({name}, {name}_scale)"
        else:
            arguments.append(name)
            annotations[name] = kinds[name]
            value = f"tuple({name})" if kinds[name] == list[int] else name
        passed.append(f"{name}={value}" if parameter.kind is parameter.KEYWORD_ONLY else value)
    call = f"call({', '.join(passed)})"
    if optional:
        call = f"tuple({arguments[0]}.new_empty(0) if made is None else made for made in {call})"
    # written out, as dataclasses writes out __init__: a call that looks at names would cost host time
    flattened: Callable[..., Any] = eval(f"lambda {', '.join(arguments)}: {call}", {"call": function})
    result = _kind(hints["return"])
    flattened.__annotations__ = annotations | {"return": None if result is type(None) else result}
    return flattened


def _kind(hint: Any) -> Any:
    """The type of an argument or a result in a schema; the same object where the hint is one."""
    if hint == PAIR:
        return PAIR
    parts = typing.get_args(hint)
    if isinstance(hint, types.UnionType) and all(typing.get_origin(part) in (tuple, list) for part in parts):
        return list[int]
    if typing.get_origin(hint) is tuple:
        if set(parts) - {Ellipsis} == {int}:
            return list[int]
        if any(type(None) in typing.get_args(part) for part in parts):
            whole: Any = tuple
            return whole[tuple(Tensor if type(None) in typing.get_args(part) else part for part in parts)]
    return hint


# --- outputs without values -----------------------------------------------------------------------------------------


def nothing(*_: object, **__: object) -> None:
    """Of an operator that writes into its arguments."""
    return None


def empty(*shape: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """An output ``shape`` of this dtype on the device of ``like``."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def lanes(x: Tensor, columns: int, align: int, dtype: torch.dtype) -> Tensor:
    """Scales of ``x`` by column, the leading stride a multiple of ``align``.

    ``x`` ``[..., M, K]``; returns ``dtype`` ``[..., M, columns]``, without values.
    """
    *groups, m, _ = x.shape
    lead = (m + align - 1) // align * align
    shape, strides, step = [*groups, m, columns], [1, lead], columns * lead
    for extent in reversed(groups):
        strides.insert(0, step)
        step *= extent
    # not cut out of wider lanes: torch.export would take m <= lead for a condition on m
    return torch.empty_strided(shape, strides, dtype=dtype, device=x.device)


def matrix(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> Tensor:
    """``[M, N]`` of ``a [M, K]`` and ``b [K, N]`` in the one dtype among the arguments."""
    (dtype,) = (x for x in (*rest, *named.values()) if isinstance(x, torch.dtype))
    return empty(a.shape[0], b.shape[1], like=a, dtype=dtype)
