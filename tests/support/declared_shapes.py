"""Shapes as docstrings of the verbs declare them: ``name`` ``[M, K]``, ``(codes [M, K], scale [M, K/128])``.

A shape stands behind the name of its operand, with others behind "or", or under the name in a section of parameters.
What a docstring leaves out it takes from the functions that it names (``:func:``).
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
_NAMED = re.compile(rf"\b(\w+(?:``(?:,? and|,)\s``\w+)*)(?:``\s+``|\s){_SHAPE}")
_ALTERNATIVE = re.compile(rf"(?:``)?,?[^`.;]*?\bor\b[^`.;]*``{_SHAPE}")
_OR = re.compile(r"\]``[^`]*\bor\b[^`]*``\[")
_ENTRY = re.compile(r"^(\w+(?:, \w+)*)\n((?:[ ]{4}.*\n|\n)+)", re.MULTILINE)
_PARAMETERS = re.compile(r"^Parameters\n-+\n(.*?)(?=^\w+\n-+$|\Z)", re.MULTILINE | re.DOTALL)


def shapes(function: Callable[..., Any]) -> Mapping[str, tuple[Shape, ...]]:
    """By the name of each operand, and of each part of a pair, the shapes that the docstring admits."""
    return _shapes(inspect.unwrap(function), 3)


@functools.cache
def _shapes(function: Callable[..., Any], depth: int) -> dict[str, tuple[Shape, ...]]:
    text = (inspect.getdoc(function) or "") + "\n"
    declared: dict[str, list[Shape]] = {}
    for match in _NAMED.finditer(text):
        each, end = [_split(match[2])], match.end()
        while further := _ALTERNATIVE.match(text, end):
            each, end = [*each, _split(further[1])], further.end()
        for name in re.split(r"``(?:,? and|,)\s``", match[1]):
            declared.setdefault(name, []).extend(each)
    for section in _PARAMETERS.findall(text):
        for names, body in _ENTRY.findall(section):
            each = [_split(dims) for dims in re.findall(rf"``{_SHAPE}``", body)]
            undeclared = [name for name in names.split(", ") if name not in declared]
            one_each = len(each) == len(undeclared) and not _OR.search(body)
            for i, name in enumerate(undeclared if each else ()):
                declared[name] = [each[i]] if one_each else each
    result = {name: tuple(dict.fromkeys(dims)) for name, dims in declared.items()}
    if depth:
        for name in re.findall(r":func:`(?:[\w.]*\.)?(\w+)`", text):
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
