"""Imports: modules that need an optional package, and imports while the garbage collector rests.

An import makes hundreds of thousands of objects that live as long as the process. Collections during it visit all of
torch's objects and free none; they took a quarter of the time until the first verdict.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

OPTIONAL = ("numba", "triton")  # neither exists for every machine


def compiled(module: str) -> ModuleType | None:
    """A module of this package whose functions numba or triton compiles; None where that package is not installed.

    Raises ModuleNotFoundError: another module is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in OPTIONAL:
            raise
        return None


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """No cyclic collection until the block ends; reference counts free objects as always.

    Afterwards all objects are in the oldest generation, unless some were frozen before."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
