"""Every row of ``tests/validate_rows.toml`` has a test that exists, whose parameter, if it names one, is a kernel."""

from __future__ import annotations

import ast
import re
import tomllib
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest

from kernels.subjects import BY_CONTRACT
from oracle.harness.soak import drawn
from tests.support.subjects.rows import KERNELS

ROOT = Path(__file__).resolve().parents[2]
ROWS = tomllib.loads((ROOT / "tests" / "validate_rows.toml").read_text())["row"]


def lacks(node: str) -> str:
    """What of a test's name does not exist; empty where all does."""
    path, *names = re.sub(r"\[.*\]$", "", node).split("::")
    if not (ROOT / path).is_file():
        return path
    body = ast.parse((ROOT / path).read_text()).body
    for name in names:
        found = [x for x in body if isinstance(x, ast.ClassDef | ast.FunctionDef) and x.name == name]
        if not found:
            return name
        body = found[0].body
    parameter = re.search(r"\[(.*)\]$", node)
    return parameter[1] if parameter and parameter[1] not in KERNELS else ""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["test"])
def test_every_row_has_a_test(row: dict[str, str]) -> None:
    """And says what was before and what is now."""
    assert row.keys() == {"point", "what", "before", "now", "test", "command"} and all(row.values())
    assert row["before"] != row["now"] and not lacks(row["test"])


@pytest.mark.parametrize("end", ["::no_such_test", "[no_such_kernel]"])
def test_a_row_without_a_test_is_refused(end: str) -> None:
    """A name that the file has not, and a kernel that there is not."""
    here = f"{Path(__file__).relative_to(ROOT)}::test_every_row_has_a_test"
    assert not lacks(here) and lacks(here + end) == end.strip(":[]")
    assert lacks("tests/harness/no_such_file.py::test") == "tests/harness/no_such_file.py"


def test_a_soak_draws_routers_that_can_be_served() -> None:
    """The layer answers a drawn call of ``moe_routing`` or says that it does not take it, and answers most; a router
    that there is not is refused."""
    answered = 0
    for case in islice(drawn("moe_routing", 0), 60):
        given = {**case.inputs(), **case.call_options()}
        with suppress(NotImplementedError):
            answered += len(BY_CONTRACT.moe_routing(**given)) > 0
    assert answered > 30
    with pytest.raises(NotImplementedError, match="no such router"):
        BY_CONTRACT.moe_routing(**given | {"router": "no such router"})
