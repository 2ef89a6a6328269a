"""A test that has an instance for every contract grows with them: it is listed here, or a sample of it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import pytest

from oracle.routines import registered
from tests.support import cpu
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
"""


def test_what_runs_follows_from_the_markers(pytester: pytest.Pytester) -> None:
    items, _ = pytester.inline_genitems(pytester.makepyfile(MARKED))
    out = left_out(items, [])
    kept = Counter(item.nodeid.partition("::")[2].partition("[")[0] for item in items if item not in out)
    assert kept == {"test_plain": 12, "test_sampled": 3, "test_whole": 20}
    assert left_out(items, ["a.py::test_repeats"]) == set()
    fewer = Counter(item.nodeid.partition("::")[2].partition("[")[0] for item in {*items} - left_out(items, [], 2))
    assert fewer == {"test_plain": 2, "test_sampled": 2, "test_whole": 20}


def test_instances_take_turns(pytester: pytest.Pytester) -> None:
    """In a folder whose tests kill no mutant; elsewhere, and where a marker says how many, they are always the same."""
    file = pytester.mkpydir("tests") / "cli" / "test_turns.py"
    file.parent.mkdir()
    file.write_text(MARKED)
    items, _ = pytester.inline_genitems("--rootdir", pytester.path, file)
    assert items[0].nodeid.startswith("tests/cli/")
    runs = [{item.name for item in items if item not in left_out(items, [], turn=turn)} for turn in range(7)]
    plain = [{name for name in run if name.startswith("test_plain")} for run in runs]
    assert all(len(run) == FEW for run in plain) and len(set.union(*plain)) == 20
    assert len({frozenset(run - taken) for run, taken in zip(runs, plain, strict=True)}) == 1


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
