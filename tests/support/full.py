"""Tests that repeat, on more cases or through more processes, what others of their kind show.

They run with ``--full`` (``tox run -e full``), or when one is named on the command line; ``--last-failed`` takes what
failed, whichever it is. Of a test with parameters every run takes ``SOME`` instances, evenly spread, in the folders
``DECIDING``, whose code decides about an output, and ``FEW`` elsewhere; ``--most N`` takes fewer. The instances take
turns: ``FP8_ORACLE_TURN``, in CI the number of commits, moves them by so many places (0 where it is not set): each one
runs in one of the commits that follow each other. Those of a test that runs in one of n turns move by one at each of
its own: places and turns with a common factor would leave some of them out for ever.
A marker at a test says otherwise:

``sampled(n)``       so many instances
``whole(reason)``    all of them: each is cheap and shows something of its own, as those of ``tests/project`` do
``repeats(other)``   none: the test of that name in its file shows the same sooner
``turns(n)``         in one of n turns: the test, class or file that has the marker, a check and its negative test too.
                     It is for what others show by a shorter way, as a journey or every fault of a routine

``--every-turn`` takes the tests of every turn, and ``MOST`` instances in each folder: ``tests/support/mutation.py``.
``--part I/N`` takes the files of part I of N: cells of the matrix share out the tests.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import pytest

from tests.support.matrix import in_part

MOST, SOME, FEW = 6, 3, 1
DECIDING = tuple(f"tests/{room}/" for room in ("numbers", "truth", "bounds", "verdict", "kernels"))
EVEN = "2094"  # any word gives each test its turn; with this one the four turns cost about the same, as measured
TURN = int(os.environ.get("FP8_ORACLE_TURN", "0"))
WHOLE = "tests/project/"
MARKERS = ("sampled(n)", "whole(reason)", "repeats(other)", "turns(n)")


def left_out(
    items: Sequence[pytest.Item], named: Sequence[str], most: int = MOST, turn: int | None = TURN, part: str = "0/1"
) -> set[pytest.Item]:
    """The items that a run without ``--full`` leaves out; ``named`` are the arguments of the command line, ``most`` the
    instances of a test, ``turn`` the places by which they move, None for every turn, ``part`` which files are taken.

    Raises pytest.UsageError: a file was collected whole, and the test that another repeats is not in it; ``part`` is no
    part.
    """
    try:
        elsewhere = {item for item in items if not in_part(item.nodeid, part)}
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.config.getoption("keyword") and not any("::" in name for name in named):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    others = {name: argument(instances[0], "repeats") for name, instances in tests.items()}
    out: set[pytest.Item] = set()
    for name, instances in tests.items():
        if other := others[name]:
            shown = f"{name.partition('::')[0]}::{other}"
            if not any(test.startswith(shown) and others[test] is None for test in tests):
                raise pytest.UsageError(f"{name} repeats {shown}, and no such test was collected")
            out |= {*instances}
            continue
        if instances[0] in elsewhere or (turn is not None and not has_its_turn(instances[0], turn)):
            out |= {*instances}
            continue
        sampled = argument(instances[0], "sampled")
        if sampled is None and (name.startswith(WHOLE) or argument(instances[0], "whole")):
            continue
        usual = MOST if turn is None else SOME if name.startswith(DECIDING) else FEW
        kept = min(int(sampled or usual), most, len(instances))
        own = (turn or 0) // int(argument(instances[0], "turns") or 1)
        taken = {(i * len(instances) // kept + own) % len(instances) for i in range(kept)}
        out |= {item for i, item in enumerate(instances) if i not in taken}
    return out


def has_its_turn(item: pytest.Item, turn: int) -> bool:
    """Whether a test runs in this turn; all that have one marker ``turns`` run together."""
    if (number := argument(item, "turns")) is None:
        return True
    marked = next(node for node, mark in item.iter_markers_with_node("turns"))
    return (zlib.crc32((EVEN + marked.nodeid.partition("[")[0]).encode()) + turn) % int(number) == 0


def argument(item: pytest.Item, marker: str) -> str | int | None:
    """What the nearest marker of this name says, which has one argument; None without one."""
    mark = item.get_closest_marker(marker)
    if mark is None:
        return None
    (value,) = mark.args
    assert value, f"{item.nodeid}: {marker} says nothing"
    return value  # type: ignore[no-any-return]
