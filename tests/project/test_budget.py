"""A test that has an instance for every contract grows with them: it is listed here, or a sample of it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import pytest

from oracle.routines import registered
from tests.support import cpu, full
from tests.support.full import FEW, argument, left_out

pytest_plugins = ["pytester"]

MOST = 40  # contracts of which a test may have an instance each


def over_budget(ids: Iterable[str], contracts: Collection[str]) -> list[str]:
    """Test functions whose instances name more than ``MOST`` contracts."""
    named: dict[str, set[str]] = {}
    for name in ids:
        function, _, parameters = name.partition("[")
        words = parameters.replace("]", "-").replace("/", "-").split("-")
        named.setdefault(function, set()).update(set(words) & set(contracts))
    return sorted(function for function, found in named.items() if len(found) > MOST)


def test_a_test_of_every_contract_is_sampled(request: pytest.FixtureRequest) -> None:
    """The way out: ``@pytest.mark.whole`` at the test, with what an instance costs."""
    items: Sequence[pytest.Item] = request.session.items
    out = left_out(items, []) if request.config.getoption("--full") else set()
    kept = (item.nodeid for item in items if item not in out and argument(item, "whole") is None)
    assert over_budget(kept, registered()) == []


def test_one_that_is_not_is_named() -> None:
    """The negative test."""
    ids = [f"tests/a.py::test_{kind}[{name}-x]" for name in registered() for kind in ("every", "few")]
    few = [name for name in ids if "few" not in name or name < f"tests/a.py::test_few[{sorted(registered())[MOST]}"]
    assert over_budget(few, registered()) == ["tests/a.py::test_every"]


MARKED = """
import pytest
twenty = pytest.mark.parametrize("i", range(20))
@twenty
def test_plain(i): pass
@twenty
@pytest.mark.sampled(3)
def test_sampled(i): pass
@twenty
@pytest.mark.whole("nothing each")
def test_whole(i): pass
@twenty
@pytest.mark.repeats("test_pl")
def test_repeats(i): pass
@pytest.mark.turns(3)
class TestTurning:
    def test_check(self): pass
    def test_negative(self): pass
@pytest.mark.turns(4)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("i", range(8))
def test_seldom(i): pass
"""
TURNING = {"TestTurning::test_check", "TestTurning::test_negative"}


@pytest.fixture
def items(pytester: pytest.Pytester) -> list[pytest.Item]:
    found, _ = pytester.inline_genitems(pytester.makepyfile(MARKED))
    return found


def kept(items: Sequence[pytest.Item], **how: int | None) -> Counter[str]:
    """How many instances of each test run."""
    out = left_out(items, [], **how)  # type: ignore[arg-type]  # most is a number
    names = (item.nodeid.partition("::")[2].partition("[")[0] for item in items if item not in out)
    return Counter(name for name in names if name != "test_seldom")


def test_what_runs_follows_from_the_markers(items: list[pytest.Item]) -> None:
    shared = dict.fromkeys(TURNING, 1)
    found = [kept(items, turn=turn) - Counter(shared) for turn in (0, 1)]
    assert found[0] == found[1] == {"test_plain": FEW, "test_sampled": 3, "test_whole": 20}
    assert left_out(items, ["a.py::test_repeats"]) == set()
    assert kept(items, most=2) - Counter(shared) == {"test_plain": FEW, "test_sampled": 2, "test_whole": 20}


def test_instances_take_turns(items: list[pytest.Item]) -> None:
    """Every instance of a test runs in one of the turns; a run without turns has always the same."""
    runs = [{item.name for item in items if item not in left_out(items, [], turn=turn)} for turn in range(20)]
    for test, number in (("test_plain", FEW), ("test_sampled", 3)):
        taken = [{name for name in run if name.startswith(test)} for run in runs]
        assert all(len(names) == number for names in taken) and len(set.union(*taken)) == 20
    seldom = [{name for name in run if name.startswith("test_seldom")} for run in runs]
    assert sorted(map(len, seldom)) == [0] * 15 + [2] * 5 and len(set.union(*seldom)) == 8
    assert left_out(items, []) == left_out(items, [])


def test_what_is_marked_together_runs_in_the_same_turn(items: list[pytest.Item]) -> None:
    """A class in one of three turns, with its negative test; all of them where every turn is asked for."""
    runs = [{test for test in kept(items, turn=turn) if test in TURNING} for turn in range(6)]
    assert sorted(map(len, runs)) == [0, 0, 0, 0, 2, 2] and runs[:3] == runs[3:]
    every = kept(items, turn=None)
    assert {*every} >= TURNING and every["test_plain"] == full.MOST


@pytest.mark.parametrize("other", ["test_gone", "test_repeats"])
def test_a_test_repeats_one_that_runs(pytester: pytest.Pytester, other: str) -> None:
    items, _ = pytester.inline_genitems(pytester.makepyfile(MARKED.replace('"test_pl"', f'"{other}"')))
    with pytest.raises(pytest.UsageError, match=f"test_repeats repeats .*::{other}, and no such test was collected"):
        left_out(items, [])


def test_the_table_of_costs(pytester: pytest.Pytester, tmp_path: Path) -> None:
    """Every test is listed, the dearest first."""
    pytester.makepyfile("def test_cheap(): pass\ndef test_dear(): sum(i * i for i in range(400_000))")
    costs = cpu.Costs(tmp_path / "costs.tsv")
    assert pytester.inline_run(plugins=[costs]).ret == 0
    lines = [line.split("\t") for line in (tmp_path / "costs.tsv").read_text().splitlines()]
    assert {name.rpartition("::")[2] for _, name in lines} == {"test_cheap", "test_dear"}
    assert sorted(lines, key=lambda line: -float(line[0])) == lines and float(lines[0][0]) > 0


def test_a_test_is_no_place_for_the_table() -> None:
    with pytest.raises(pytest.UsageError, match="--cpu tests/a.py would write its report over a test"):
        cpu.Costs(Path("tests/a.py"))
