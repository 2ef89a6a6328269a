"""The walk through one judgement in CONTRIBUTING.md is what a judgement does, step by step."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.support.paths import ROOT
from tests.support.walk import Walk, judgement, right, walk, wrong

STEP = re.compile(r"^ +\|? +\d+  (\S+) +(\S+\.py)$", re.MULTILINE)


MOVES = (370, 11_820)
"""Moves of a passing and of a failing judgement at most: 336 and 10,745 when they were counted, and a tenth. The second
grows with the catalogue."""


def figure() -> list[tuple[str, str]]:
    """``(function, file)`` of every step, as the figure has them."""
    return STEP.findall((ROOT / "CONTRIBUTING.md").read_text())


def missing(steps: Sequence[tuple[str, str]], called: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Steps that are not called for the first time after the step before them."""
    first = {call: place for place, call in reversed(list(enumerate(called)))}
    places = [first.get(step, -1) for step in steps]
    return [step for step, before, place in zip(steps, [-1, *places], places, strict=False) if place <= before]


@pytest.fixture(scope="module")
def failing() -> Walk:
    judge, verdicts = judgement(wrong()), []
    found = walk(lambda: verdicts.append(judge()))
    assert all(verdict.explained_by for verdict in verdicts)
    return found


@pytest.fixture(scope="module")
def passing() -> Walk:
    return walk(judgement(right()))


@pytest.mark.turns(2)
class TestTheFigure:
    """Every step is called, after the step above it."""

    def test_is_true(self, failing: Walk) -> None:
        assert len(figure()) == 15
        assert missing(figure(), failing.called) == []

    def test_each_step_has_its_sentence(self) -> None:
        text = (ROOT / "CONTRIBUTING.md").read_text()
        assert re.findall(r"^(\d+)\. ", text, re.MULTILINE) == [str(n) for n in range(1, 16)]

    @pytest.mark.parametrize("change", ["swapped", "renamed"])
    def test_a_wrong_figure_is_found(self, change: str) -> None:
        """The negative tests, of a walk that is the figure: two steps in the wrong order, and a function that does not
        exist."""
        steps, called = figure(), figure()
        assert missing(steps, called) == []
        if change == "swapped":
            steps[3], steps[9] = steps[9], steps[3]
        else:
            steps[6] = ("ProductSets.decide", steps[6][1])
        assert missing(steps, called)

    def test_where_it_passes(self, passing: Walk) -> None:
        """A right output takes the steps up to its bits; no candidate is tried."""
        assert missing(figure()[:8], passing.called) == [] and not set(figure()[11:]) & set(passing.called)


class TestMoves:
    """A judgement moves between files about as often as it did when this was written; ``tests/support/walk.py``."""

    def test_of_a_passing_one(self, passing: Walk) -> None:
        assert 0 < passing.climbs < passing.moves <= MOVES[0]

    def test_of_a_failing_one(self, passing: Walk, failing: Walk) -> None:
        assert passing.moves < failing.moves <= MOVES[1]

    def test_are_counted(self) -> None:
        """The negative test: two files that call one another again and again are seen."""
        once, thrice = walk(right), walk(lambda: [right() for _ in range(3)])
        assert thrice.moves == 3 * once.moves and thrice.climbs == 3 * once.climbs
