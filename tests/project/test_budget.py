"""A test that has an instance for every contract grows with them: it is listed here, or a sample of it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import pytest

from oracle.routines import registered
from tests.support import cpu
from tests.support.full import left_out

pytest_plugins = ["pytester"]

MOST = 40  # contracts of which a test may have an instance each
EVERY = {
    "tests/kernels/test_no_sync.py::test_no_call_waits": "a call of 10 ms each",
    "tests/kernels/test_ops.py::test_opcheck": "every operator of the layer",
    "tests/kernels/test_ops.py::test_gradients_and_vmap_are_refused": "every operator of the layer",
    "tests/kernels/test_ops.py::test_autocast_changes_no_bit": "every operator of the layer",
}


def over_budget(ids: Iterable[str], contracts: Collection[str]) -> list[str]:
    """Test functions whose instances name more than ``MOST`` contracts, but for those of ``EVERY``."""
    named: dict[str, set[str]] = {}
    for name in ids:
        function, _, parameters = name.partition("[")
        words = parameters.replace("]", "-").replace("/", "-").split("-")
        named.setdefault(function, set()).update(set(words) & set(contracts))
    return sorted(function for function, found in named.items() if len(found) > MOST and function not in EVERY)


def test_a_test_of_every_contract_is_sampled(request: pytest.FixtureRequest) -> None:
    """The way out: a line in ``KEPT`` of tests/support/full.py, or one in ``EVERY`` with what an instance costs."""
    items: Sequence[pytest.Item] = request.session.items
    out = left_out(items, []) if request.config.getoption("--full") else set()
    assert over_budget((item.nodeid for item in items if item not in out), registered()) == []


def test_one_that_is_not_is_named() -> None:
    """The sabotaged twin."""
    ids = [f"tests/a.py::test_{kind}[{name}-x]" for name in registered() for kind in ("every", "few")]
    few = [name for name in ids if "few" not in name or name < f"tests/a.py::test_few[{sorted(registered())[MOST]}"]
    assert over_budget(few, registered()) == ["tests/a.py::test_every"]


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
