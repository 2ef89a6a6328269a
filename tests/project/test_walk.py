"""The walk through one judgement in CONTRIBUTING.md is what a judgement does, step by step."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch

import oracle
from oracle import cases
from tests.support.paths import ROOT

CASE = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=9,n=136,k=256/family=randn/seed=1"
STEP = re.compile(r"^ +\|? +\d+  (\S+) +(\S+\.py)$", re.MULTILINE)


def figure() -> list[tuple[str, str]]:
    """``(function, file)`` of every step, as the figure has them."""
    return STEP.findall((ROOT / "CONTRIBUTING.md").read_text())


def missing(steps: Sequence[tuple[str, str]], called: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Steps that are not called for the first time after the step before them."""
    first = {call: place for place, call in reversed(list(enumerate(called)))}
    places = [first.get(step, -1) for step in steps]
    return [step for step, before, place in zip(steps, [-1, *places], places, strict=False) if place <= before]


@pytest.fixture(scope="module")
def called() -> list[tuple[str, str]]:
    """Functions of `oracle` that one failing judgement calls, in the order of their first calls."""
    inputs, folder, seen = cases.parse(CASE).inputs(), ROOT / "oracle", dict[CodeType, tuple[str, str]]()
    out = oracle.reference("fp8_gemm_nt", inputs, out_dtype=torch.bfloat16).clone()
    out[3] = out[2]
    oracle.judge("fp8_gemm_nt", inputs, out)  # compiles: no step of the figure, and slow where every call is noted

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code not in seen:
            seen[code] = (code.co_qualname, code.co_filename)

    sys.setprofile(note)
    try:
        verdict = oracle.judge("fp8_gemm_nt", inputs, out)
    finally:
        sys.setprofile(None)
    assert verdict.explained_by
    calls = [(function, Path(file)) for function, file in seen.values()]
    return [(function, path.relative_to(folder).as_posix()) for function, path in calls if path.is_relative_to(folder)]


class TestTheFigure:
    """Every step is called, after the step above it."""

    def test_is_true(self, called: list[tuple[str, str]]) -> None:
        assert len(figure()) == 12
        assert missing(figure(), called) == []

    def test_each_step_has_its_sentence(self) -> None:
        text = (ROOT / "CONTRIBUTING.md").read_text()
        assert re.findall(r"^(\d+)\. ", text, re.MULTILINE) == [str(n) for n in range(1, 13)]

    @pytest.mark.parametrize("change", ["swapped", "renamed"])
    def test_a_wrong_figure_is_found(self, called: list[tuple[str, str]], change: str) -> None:
        """The negative tests: two steps in the wrong order, and a function that does not exist."""
        steps = figure()
        if change == "swapped":
            steps[3], steps[9] = steps[9], steps[3]
        else:
            steps[6] = ("ProductSets.decide", steps[6][1])
        assert missing(steps, called)
