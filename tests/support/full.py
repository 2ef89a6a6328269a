"""Tests that repeat, on more cases or through more processes, what others of their kind show.

They run with ``--full`` (``tox run -e full``), or when one is named on the command line. Of a test with parameters
every run takes ``MOST`` instances, evenly spread, and ``FEW`` in the folders ``ELSEWHERE``, whose tests kill no mutant
of ``tests/support/mutation.py``; ``--most N`` takes fewer. A marker at a test says otherwise:

``sampled(n)``       so many instances
``whole(reason)``    all of them: each is cheap and shows something of its own, as those of ``tests/project`` do
``repeats(other)``   none: the test of that name in its file shows the same sooner
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

MOST, FEW = 12, 6
ELSEWHERE = tuple(f"tests/{room}/" for room in ("benchmarks", "cli", "diagnosis", "fixtures", "harness", "report"))
WHOLE = "tests/project/"
MARKERS = ("sampled(n)", "whole(reason)", "repeats(other)")


def left_out(items: Sequence[pytest.Item], named: Sequence[str], most: int = MOST) -> set[pytest.Item]:
    """The items that a run without ``--full`` leaves out; ``named`` are the arguments of the command line, ``most`` the
    instances of a test.

    Raises pytest.UsageError: a file was collected whole, and the test that another repeats is not in it.
    """
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
        sampled = argument(instances[0], "sampled")
        if sampled is None and (name.startswith(WHOLE) or argument(instances[0], "whole")):
            continue
        kept = min(int(sampled or (FEW if name.startswith(ELSEWHERE) else MOST)), most, len(instances))
        taken = {i * len(instances) // kept for i in range(kept)}
        out |= {item for i, item in enumerate(instances) if i not in taken}
    return out


def argument(item: pytest.Item, marker: str) -> str | int | None:
    """What the nearest marker of this name says, which has one argument; None without one."""
    mark = item.get_closest_marker(marker)
    if mark is None:
        return None
    (value,) = mark.args
    assert value, f"{item.nodeid}: {marker} says nothing"
    return value  # type: ignore[no-any-return]
