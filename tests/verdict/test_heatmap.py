"""What a report draws: plain bounded data about a failing output, made where the tensors are."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from oracle.bounds.interval import Admissible
from oracle.verdict import heatmap
from oracle.verdict.compare import compare, verdict
from oracle.verdict.heatmap import FIRST_OUTSIDE, LEVELS, NO_NUMBER, OPEN, Evidence


def exactly(expected: Tensor, **given: Tensor) -> Admissible:
    """One admissible value for each element."""
    wide = expected.to(torch.float64)
    return Admissible(wide, wide, wide, **given)


def seen(actual: Tensor, admissible: Admissible) -> Evidence:
    found = verdict(compare(actual, admissible), basis="test").evidence
    assert found is not None
    return found


def red(found: Evidence) -> list[tuple[int, int]]:
    """Cells with something outside."""
    return [
        (r, c)
        for r, row in enumerate(found.levels)
        for c, digit in enumerate(row)
        if digit != OPEN and LEVELS.index(digit) >= FIRST_OUTSIDE
    ]


class TestLevels:
    """Inside an element is seen by its ratio, outside by representable values; nothing else is red."""

    def test_a_pass_has_none(self) -> None:
        right = torch.ones(4, 4, dtype=torch.bfloat16)
        assert verdict(compare(right, exactly(right)), basis="test").evidence is None

    @pytest.mark.parametrize(
        ("steps", "level"), [(1, 5), (2, 6), (4, 6), (5, 7), (16, 7), (17, 8), (65, 9), (1025, 10)]
    )
    @pytest.mark.parametrize("start", [0x3F80, 0xBF80])
    def test_steps(self, steps: int, level: int, start: int) -> None:
        """Neighbouring bfloat16 codes of one sign are neighbouring values."""
        right = torch.full((2, 2), start - 0x10000 * (start >> 15), dtype=torch.int16).view(torch.bfloat16)
        wrong = right.clone()
        wrong[1, 0] = (right.view(torch.int16)[1, 0] + steps).view(torch.bfloat16)
        found = seen(wrong, exactly(right))
        assert [e.steps for e in found.elements] == [steps]
        assert found.levels == ("00", f"{LEVELS[level]}0")
        assert red(found) == [(1, 0)]

    def test_across_zero(self) -> None:
        """-0 and +0 are one value: the smallest subnormals are two steps apart."""
        right = torch.tensor([[1]], dtype=torch.int16).view(torch.bfloat16)
        assert seen(-right, exactly(right)).elements[0].steps == 2

    def test_no_number(self) -> None:
        right = torch.ones(1, 3, dtype=torch.bfloat16)
        wrong = torch.tensor([[math.nan, math.inf, 1.0]], dtype=torch.bfloat16)
        found = seen(wrong, exactly(right))
        assert found.levels == (f"{LEVELS[NO_NUMBER] * 2}0",)
        assert [e.steps for e in found.elements] == [None, None]

    @pytest.mark.parametrize(("value", "level"), [(1.0, 0), (1.25, 1), (1.5, 2), (1.75, 3), (2.0, 4), (2.125, 6)])
    def test_ratios(self, value: float, level: int) -> None:
        wide = torch.ones(1, 2, dtype=torch.float64)
        sets = Admissible(0 * wide, 2 * wide, wide)
        found = seen(torch.tensor([[value, -9.0]], dtype=torch.bfloat16), sets)
        assert found.levels[0][0] == LEVELS[level] if value != 2.125 else red(found) == [(0, 0), (0, 1)]

    def test_open_elements(self) -> None:
        right = torch.ones(1, 3, dtype=torch.bfloat16)
        specified, free = torch.tensor([[True, False, True]]), torch.tensor([[False, False, True]])
        found = seen(right * 3, exactly(right, specified=specified, open=free))
        assert found.levels[0][1:] == OPEN * 2
        assert sum(found.histogram) == 1


class TestGrid:
    """At most 64 x 64 cells, each with the worst of its elements: one wrong element is never lost."""

    @pytest.mark.parametrize("shape", [(300, 500), (1, 4096), (4096, 1), (65, 65), (7, 3), (5, 40, 33), (200,), ()])
    def test_one_wrong_element(self, shape: tuple[int, ...]) -> None:
        right = torch.ones(shape, dtype=torch.bfloat16)
        flat = right.numel() * 2 // 3
        wrong = right.clone().reshape(-1)
        wrong[flat] = 7.0
        found = seen(wrong.view(shape), exactly(right))
        row, column = divmod(flat, shape[-1] if len(shape) > 1 else max(1, right.numel()))
        assert red(found) == [(row // found.cell[0], column // found.cell[1])]
        assert max(len(found.levels), *(len(r) for r in found.levels)) <= heatmap.GRID
        assert sum(found.histogram) == right.numel()
        assert found.shape == shape

    def test_the_worst_element_comes_first(self) -> None:
        right = torch.ones(40, 40, dtype=torch.bfloat16)
        wrong = right.clone()
        wrong[3] = 1.5
        wrong[9, 9] = 100.0
        judged = verdict(compare(wrong, exactly(right)), basis="test")
        assert judged.worst is not None
        assert judged.evidence is not None
        assert judged.evidence.elements[0].index == judged.worst.index == (9, 9)
        assert len(judged.evidence.elements) == heatmap.LISTED


class TestBits:
    """Which bits differ: by element, and in which share of the failing ones."""

    def test_sign(self) -> None:
        right = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float16)
        wrong = right * torch.tensor([1, -1, 1, -1], dtype=torch.float16)
        found = seen(wrong, exactly(right))
        assert found.fields == (1, 5, 10)
        assert found.flips == (1.0, *[0.0] * 15)
        assert {(e.bits, e.expected_bits) for e in found.elements} == {("c000", "4000"), ("c400", "4400")}

    def test_integers_that_have_no_intervals(self) -> None:
        right = torch.arange(12, dtype=torch.int32).view(3, 4)
        wrong = right.clone()
        wrong[2, 1] ^= 1 << 31 - 1
        found = heatmap.of_bits(wrong, right, wrong != right, output="packed")
        assert red(found) == [(2, 1)]
        assert found.elements[0].bits == "40000009"
        assert found.flips.index(1.0) == 1

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn])
    def test_every_dtype_that_a_layout_moves(self, dtype: torch.dtype) -> None:
        codes = torch.tensor([[0, 1, 0, 1]], dtype=torch.uint8)
        right, wrong = (x.bool() if dtype is torch.bool else x.view(dtype) for x in (codes, 1 - codes))
        found = heatmap.of_bits(wrong, right, torch.ones(1, 4, dtype=torch.bool), output="out")
        assert found.levels == (LEVELS[NO_NUMBER] * 4,)


def test_json_there_and_back() -> None:
    """Plain data: JSON keeps every field, infinities and NaN included."""
    right = torch.ones(3, 200, dtype=torch.bfloat16)
    wrong = right.clone()
    wrong[0, 0], wrong[1, 1] = math.nan, 2.0
    found = seen(wrong, exactly(right))
    text = json.dumps(found.to_json(), allow_nan=False)
    assert json.dumps(heatmap.from_json(json.loads(text)).to_json(), allow_nan=False) == text
    assert len(text) < 4000
