"""Edges of bounds before they are rounded, against the file that ``python tests/support/edges.py`` writes.

The soundness of these bounds is tested elsewhere, against results of the definitions. Here a summand that is lost, or a
threshold that has moved, is noticed although no kernel at hand would leave the interval for it.
"""

from __future__ import annotations

import json
import math

import pytest

from tests.support import edges

WRITTEN = json.loads(edges.FILE.read_text())
RELATIVE = 2.0**-48  # a few float64 roundings; the least factor of a width is 1 + 2^-20, and widths begin at 2^-24


def same(actual: float, written: float) -> bool:
    """Equal within a few roundings; NaN is equal to NaN."""
    return math.isnan(actual) and math.isnan(written) or math.isclose(actual, written, rel_tol=RELATIVE, abs_tol=0.0)


def differing(actual: list[list[float] | str], written: list[list[float] | str]) -> list[object]:
    """What differs between two results."""
    if [len(x) for x in actual] != [len(x) for x in written]:
        return [(actual, written)]
    return [
        (x, y)
        for one, other in zip(actual, written, strict=True)
        for x, y in zip(one, other, strict=True)
        if x != y and not (isinstance(x, float) and isinstance(y, float) and same(x, y))
    ]


@pytest.mark.turns(4)
@pytest.mark.whole("a family of functions each, 0.3 s")
@pytest.mark.parametrize("family", edges.FAMILIES, ids=lambda family: family.__name__)
def test_edges_are_those_written(family: edges.Family) -> None:
    for name, call in family():
        assert differing(edges.numbers(call()), WRITTEN[name]) == [], name


def test_the_file_has_these_calls_and_no_others() -> None:
    assert list(WRITTEN) == [name for family in edges.FAMILIES for name, _ in family()]


def test_a_term_less_is_noticed() -> None:
    """The negative test: an edge that moves by 2^-20 of a width of 2^-24, an open element, a result less."""
    due = WRITTEN["ieee32 plain"]
    moved = [[due[0][0] * (1 - 2.0**-44), *due[0][1:]], *due[1:]]
    opened = [*due[:-1], due[-1].replace("0", "1", 1)]
    assert all(len(differing(wrong, due)) == 1 for wrong in (moved, opened, due[1:]))
