"""Every named recipe, and its look-up by name or element format; the rows stand in the files of their scales.

:mod:`oracle.numbers.recipes` has FP8 groups, tokens and tensors, :mod:`oracle.numbers.mx_recipes` MX and NVFP4,
:mod:`oracle.numbers.kv_recipes` KV caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from oracle.errors import NumericsError, among
from oracle.numbers import kv_recipes, mx_recipes
from oracle.numbers import recipes as group_recipes
from oracle.numbers.formats import Format
from oracle.numbers.recipes import Recipe


@lru_cache(maxsize=1)
def recipes() -> Mapping[str, Recipe]:
    """Every named recipe, by name; the faulty ones (``fault`` is not None) included."""
    own = (v for v in vars(group_recipes).values() if isinstance(v, Recipe))
    rows = [*own, *group_recipes.TRITON, *mx_recipes.ROWS, *kv_recipes.ROWS]
    return MappingProxyType({row.name: row for row in rows})


def of_element(element: Format) -> tuple[Recipe, ...]:
    """The named recipes of one element format: codes of several are stored alike (uint8)."""
    return tuple(row for row in recipes().values() if row.element == element)


def get(name: str) -> Recipe:
    """The recipe of this name.

    Raises NumericsError: no recipe has this name; the message lists those that exist.
    """
    if name not in recipes():
        raise NumericsError(f"no recipe {name!r}; {among(name, sorted(recipes()))}")
    return recipes()[name]
