"""What a notebook shows of contracts, verdicts and diagnoses: well-formed, short, and every text escaped."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

from oracle.diagnosis.baselines import compare_close
from oracle.diagnosis.candidates import Explanation
from oracle.diagnosis.explain import Diagnosis
from oracle.routines import registered
from oracle.verdict import notebook
from oracle.verdict.compare import Error, Status, Verdict
from oracle.verdict.sets import Bounds

HOSTILE = "<script>alert('&')</script>"
VERDICT = Verdict(Status.FAILED, f"FAILED: {HOSTILE}", 1, 2, explained_by=(HOSTILE,), error=Error(3.0, 20.0))
EXPLANATION = Explanation(HOSTILE, "sm90.promote128", 3, 3, 3, 0, where=HOSTILE)
DIAGNOSIS = Diagnosis(3, 9, HOSTILE, (EXPLANATION,), (HOSTILE,))


def texts(html: str) -> str:
    """The text of well-formed HTML of these elements only."""
    tree = ElementTree.fromstring(html)
    assert {node.tag for node in tree.iter()} <= {"div", "b", "table", "tr", "th", "td"}
    return " ".join(tree.itertext())


@pytest.mark.parametrize(("shown", "times"), [(VERDICT, 2), (DIAGNOSIS, 5)], ids=["verdict", "diagnosis"])
def test_escaped(shown: Verdict | Diagnosis, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the twin: without the escape the text is an element."""
    html = shown._repr_html_()
    assert texts(html).count(HOSTILE) == times and "<script" not in html and len(html) < 1000
    monkeypatch.setattr(notebook, "escape", str)
    with pytest.raises((AssertionError, ElementTree.ParseError)):
        texts(shown._repr_html_())


def test_what_is_said() -> None:
    html = texts(VERDICT._repr_html_())
    assert html.startswith("FAILED") and html.count("FAILED") == 1 and str(VERDICT.error) in html
    assert "table" not in replace(VERDICT, explained_by=(), error=None)._repr_html_()
    assert "3 of 9 elements fail" in texts(DIAGNOSIS._repr_html_())
    assert " ".join(texts(Diagnosis(0, 9, "")._repr_html_()).split()) == "Diagnosis 0 of 9 elements fail"


def test_bounds_and_closeness() -> None:
    free = torch.tensor([False, False, True, False])
    low = torch.tensor([1.0, 2.0, -torch.inf, torch.nan], dtype=torch.float64)
    high = torch.tensor([1.0, 2.5, torch.inf, torch.nan], dtype=torch.float64)
    said = " ".join(texts(Bounds(low, high, free, HOSTILE)._repr_html_()).split())
    parts = ("Bounds [4]", HOSTILE, "2 of 4 elements", "widest 0.5", "nothing is said of 1 elements")
    assert all(part in said for part in parts)
    right = torch.ones(4)
    said = texts(compare_close(right, right)._repr_html_())
    assert said.startswith("6 of 6 pass") and "torch assert_close passed: 0 <= 1" in " ".join(said.split())
    assert texts(compare_close(2 * right, right)._repr_html_()).startswith("1 of 6 pass")


def test_contracts() -> None:
    """Every contract names what it takes."""
    for contract in registered().values():
        said = texts(contract._repr_html_())
        names = contract.name, *(i.name for i in contract.inputs), *(o.name for o in contract.options)
        assert all(name in said for name in names)
