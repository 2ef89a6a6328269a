"""Imports while the garbage collector rests.

An import makes hundreds of thousands of objects that live as long as the process. Collections during it visit all of
torch's objects and free none; they took a quarter of the time until the first verdict.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
