"""Imports while the garbage collector rests.

Importing makes objects by the hundred thousand that stay as long as the process, and at each of so many new ones the
collector walks through all of torch's to find that nothing went: a quarter of the time until the first verdict.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """No collection until the block ends; what is freed by its count does not wait.

    Afterwards all objects are among the oldest, as if they had been looked at, unless somebody has frozen some."""
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
