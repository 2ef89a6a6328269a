"""Bad calls of a verb, derived from one right call, the verb's signature and the shapes that its docstring declares.

Each tensor is replaced: by what is no tensor, by another kind of numbers, by one of another rank, of another extent of
every axis, on another device; each option by values that no option of its type may have; each output that a verb
writes by one whose elements share memory. A bad call must raise one typed error that names an argument. What is
accepted must be right: the result has another shape with it, or the same bits, or the extent is the operand's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.errors import KernelError, ValueRangeError
from tests.support.declared_shapes import shapes, symbols
from tests.support.verb_calls import fresh

Verb = Callable[..., Any]
NOT_A_NUMBER = (float("nan"), float("inf"), -1.0)
NO_INTEGER = (1.5, 1 << 70)
PARTS = {"q": ("q", "q_sf"), "kv": ("k", "k_scale", "k_sf")}
"""Names of the parts of a pair in errors, where they are not the name itself and ``.._scale``."""


@dataclass(frozen=True)
class Bad:
    """One argument in place of a right one. ``may_show``: accepted where the result shows it."""

    argument: str
    part: int | None
    how: str
    value: Any
    may_show: bool = False
    own_extent: bool = False

    def __str__(self) -> str:
        """The argument and what is wrong with it."""
        return f"{self.argument}{'' if self.part is None else [self.part]}: {self.how}"


def problems(verb: Verb, arguments: dict[str, Any], writes: Sequence[str] = ()) -> list[str]:
    """What is wrong with the checks of a verb: bad calls that it accepts, or refuses by an error of another kind."""
    right = verb(**fresh(arguments))
    shortcomings = []
    for bad in bad_calls(verb, arguments, writes):
        call = {name: fresh(value) for name, value in arguments.items()}
        call[bad.argument] = _put(call.get(bad.argument), bad.part, bad.value)
        try:
            result = verb(**call)
        except KernelError as error:
            if not _explains(error, bad, verb, call):
                shortcomings.append(f"{bad} is refused without a name: {error}")
        except Exception as error:  # any other class is the finding
            shortcomings.append(f"{bad} raises {type(error).__name__}: {str(error)[:80]}")
        else:
            if not (bad.own_extent or bad.may_show and (_shape(result) != _shape(right) or _same(result, right))):
                shortcomings.append(f"{bad} is accepted")
    return shortcomings


def bad_calls(verb: Verb, arguments: dict[str, Any], writes: Sequence[str] = ()) -> Iterator[Bad]:
    """Every bad call of a verb, beside a right one."""
    declared, text = shapes(verb), inspect.getdoc(verb) or ""
    tensors = list(_tensors(arguments))
    for name, part, x in tensors:
        for value in ("text", [1.0]):
            yield Bad(name, part, f"{value!r} for a tensor", value)
        if "any dtype" not in text:
            yield Bad(name, part, "complex", x.float().to(torch.complex64))
        if "any dtype" not in text and "any real dtype" not in text:
            other = x.float().nan_to_num(0, 0, 0).to(torch.int16) if x.is_floating_point() else x.float()
            yield Bad(name, part, f"{other.dtype} for {x.dtype}", other)
        if len(tensors) > 1:
            yield Bad(name, part, "on another device", x.to("meta"))
        ranks = {len(dims) for n in _part_names(name, part) for dims in declared.get(n, ())}
        yield Bad(name, part, "an axis more", x[None], True, x.dim() + 1 in ranks)
        if x.numel() > 1:
            yield Bad(name, part, "no axis", x.flatten()[0], True, 0 in ranks)
        if x.dim() > 1:
            yield Bad(name, part, "one axis", x.reshape(-1), True, 1 in ranks)
        own = _own_axes(declared, _part_names(name, part), x) if len(tensors) > 1 else set(range(x.dim()))
        own |= set(range(x.dim())) if "Callable" in str(inspect.signature(verb).return_annotation) else set()
        raw = x.view(torch.uint8) if x.element_size() == 1 else x
        for axis in range(x.dim()):
            if x.shape[axis]:
                longer = torch.cat([raw, raw.narrow(axis, 0, 1)], axis).view(x.dtype)
                yield Bad(name, part, f"axis {axis} longer", longer, True, axis in own)
                yield Bad(
                    name,
                    part,
                    f"axis {axis} shorter",
                    raw.narrow(axis, 0, x.shape[axis] - 1).clone().view(x.dtype),
                    True,
                    axis in own,
                )
        if name in writes and x.dim() and x.shape[0] > 1:
            yield Bad(name, part, "elements at one address", x[:1].expand_as(x))
    yield from _bad_options(verb, arguments)


def _bad_options(verb: Verb, arguments: dict[str, Any]) -> Iterator[Bad]:
    for name, parameter in inspect.signature(verb).parameters.items():
        hint, value = str(parameter.annotation), arguments.get(name, parameter.default)
        if "Tensor" in hint:
            if value is None:
                yield Bad(name, None, "'text' for a tensor", "text")
            continue
        values: list[Any] = ["no such"] if hint != "object" else []
        values += NOT_A_NUMBER if "float" in hint else ()
        values += NO_INTEGER if hint.startswith("int") else ()
        values += (torch.int64,) if "dtype" in hint else ()
        values += (1,) if hint.startswith("bool") else ()
        for bad in values:
            yield Bad(name, None, f"{bad!r}", bad)


def _tensors(arguments: dict[str, Any]) -> Iterator[tuple[str, int | None, Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, None, value
        elif isinstance(value, tuple):
            yield from ((name, i, x) for i, x in enumerate(value) if isinstance(x, Tensor))


def _put(value: Any, part: int | None, bad: Any) -> Any:
    return bad if part is None else tuple(bad if i == part else x for i, x in enumerate(value))


def _part_names(name: str, part: int | None) -> tuple[str, ...]:
    if part is None:
        return (name,)
    names = PARTS.get(name, (name, f"{name}_scale"))
    return names[:1] if part == 0 else names[1:]


def _own_axes(declared: Any, names: tuple[str, ...], x: Tensor) -> set[int]:
    """Axes whose declared extent has a symbol that no other operand has."""
    elsewhere = {
        s for name, each in declared.items() if name not in names for dims in each for d in dims for s in symbols(d)
    }
    return {
        axis
        for name in names
        for dims in declared.get(name, ())
        if len(dims) == x.dim()
        for axis, extent in enumerate(dims)
        if symbols(extent) - elsewhere
    }


def _explains(error: KernelError, bad: Bad, verb: Verb, call: dict[str, Any]) -> bool:
    """One sentence with the argument's name (of an extent: that of any operand, or of a dimension), or the value."""
    text = str(error)
    names = {*_part_names(bad.argument, bad.part), bad.argument}
    if bad.may_show:
        names |= {part for n in call for i in (None, 0, 1) for part in _part_names(n, i)}
        names |= {f"{s}=" for dims in shapes(verb).values() for d in dims for extent in d for s in symbols(extent)}
    return len(text) > 15 and (any(name in text for name in names) or isinstance(error, ValueRangeError))


def _parts(result: Any) -> list[Tensor]:
    return [x for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, Tensor)]


def _shape(result: Any) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in _parts(result)]


def _same(result: Any, right: Any) -> bool:
    pairs = zip(_parts(result), _parts(right), strict=True)
    return all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs)
