"""Shapes as docstrings of the verbs declare them: ``name`` ``[M, K]``, ``(codes [M, K], scale [M, K/128])``.

A shape stands behind the name of its operand, or under the name in a section of parameters. What a docstring leaves
out it takes from the functions that it names (``:func:``).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import kernels

Shape = tuple[str, ...]
_SHAPE = r"\[([^\[\]`]*)\]"
_NAMED = re.compile(rf"\b(\w+)(?:``\s+``|\s){_SHAPE}")
_OR = re.compile(r"\]``[^`]*\bor\b[^`]*``\[")
_ENTRY = re.compile(r"^(\w+(?:, \w+)*)\n((?:[ ]{4}.*\n|\n)+)", re.MULTILINE)
_PARAMETERS = re.compile(r"^Parameters\n-+\n(.*?)(?=^\w+\n-+$|\Z)", re.MULTILINE | re.DOTALL)


def shapes(function: Callable[..., Any]) -> Mapping[str, tuple[Shape, ...]]:
    """By the name of each operand, and of each part of a pair, the shapes that the docstring admits."""
    return _shapes(inspect.unwrap(function), 3)


@functools.cache
def _shapes(function: Callable[..., Any], depth: int) -> dict[str, tuple[Shape, ...]]:
    text = (inspect.getdoc(function) or "") + "\n"
    found: dict[str, list[Shape]] = {}
    for name, dims in _NAMED.findall(text):
        found.setdefault(name, []).append(_split(dims))
    for section in _PARAMETERS.findall(text):
        for names, body in _ENTRY.findall(section):
            each = [_split(dims) for dims in re.findall(rf"``{_SHAPE}``", body)]
            own = [name for name in names.split(", ") if name not in found]
            if own and each:
                one = len(each) == len(own) and not _OR.search(body)
                for i, name in enumerate(own):
                    found[name] = [each[i]] if one else each
    result = {name: tuple(dict.fromkeys(dims)) for name, dims in found.items()}
    if depth:
        for name in re.findall(r":func:`(?:kernels\.)?(\w+)`", text):
            other = getattr(kernels, name, None)
            if inspect.isfunction(other) and other is not function:
                result = {**_shapes(inspect.unwrap(other), depth - 1), **result}
    return result


def _split(dims: str) -> Shape:
    """Extents, cut at the commas outside of parentheses."""
    return tuple(part.strip() for part in re.split(r",(?![^()]*\))", dims) if part.strip())


def symbols(extent: str) -> frozenset[str]:
    """The symbols of an extent: ``ceil(K/128)`` has ``K``."""
    return frozenset(re.findall(r"[A-Za-z_]\w*", extent)) - {"ceil", "align", "sum", "floor", "or"}
