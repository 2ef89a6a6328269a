"""Checks of arguments at their limits: the last that passes and the first that does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import checks
from kernels.errors import LayoutError, OptionError, ShapeError, ValueRangeError


@pytest.mark.parametrize(
    ("shape", "stride", "shared"),
    [
        ((2, 2), (1, 1), True),
        ((2, 3), (1, 1), True),
        ((3, 2), (1, 2), True),
        ((3, 2), (1, 3), False),
        ((3, 1, 2), (1, 1, 3), False),
        ((2, 3), (4, 2), True),
        ((2, 3), (5, 2), False),
        ((2, 0), (1, 1), False),
    ],
)
def test_elements_at_one_address(shape: tuple[int, ...], stride: tuple[int, ...], shared: bool) -> None:
    """A row that begins at the last element of the one before shares it; one that begins behind it does not."""
    x = torch.empty(32).as_strided(shape, stride)
    if shared:
        with pytest.raises(LayoutError, match="share memory"):
            checks.output("out", x, shape, "[M, N]", torch.float32)
    else:
        assert checks.output("out", x, shape, "[M, N]", torch.float32) is x


@pytest.mark.parametrize(("low", "high", "good"), [(0, 5, True), (-1, 5, False), (0, 6, False), (2, 3, True)])
def test_both_ends_are_within(low: int, high: int, good: bool) -> None:
    def run() -> None:
        checks.within("x", True, torch.tensor([low, 2]), torch.tensor([3, high]), (0, 5), "[0, 5]")

    if good:
        run()
    else:
        with pytest.raises(ValueRangeError, match=f"x runs from {low} to {high}; it must stay within"):
            run()


@pytest.mark.parametrize(("spare", "quick"), [(0, True), (1, True)])
def test_memory_that_holds_the_values(spare: int, quick: bool) -> None:
    """Of just as many bytes as there are values, and of more: neither needs the slower look."""
    x = torch.zeros(4 + spare)[:4]
    assert checks.plain(x) is quick
    checks.memory("x", x)


def test_repeated_elements_need_no_memory_of_their_own() -> None:
    """More values than bytes, all of which are there."""
    x = torch.zeros(4).expand(3, 4)
    assert not checks.plain(x)
    checks.memory("x", x)


@pytest.mark.parametrize(("value", "good"), [(1, True), (0, False), (-1, False), (True, False), (2.0, False)])
def test_positive(value: object, good: bool) -> None:
    if good:
        assert checks.positive("n", value) == value
    else:
        with pytest.raises(OptionError, match="n must be a positive integer"):
            checks.positive("n", value)


@pytest.mark.parametrize(("rows", "columns", "name", "good"), [
    (0, 4, "a", True), (0, 4, "b", False), (0, 4, "weight", False), (4, 0, "a", False), (4, 4, "b", True),
])  # fmt: skip  # a table
def test_empty_operands(rows: int, columns: int, name: str, good: bool) -> None:
    """An input of no rows is a product of none; a weight has no empty extent."""
    x: Tensor = torch.empty(rows, columns, dtype=checks.FP8)
    if good:
        assert checks.matrix(name, x) == (rows, columns)
    else:
        with pytest.raises(ShapeError, match="empty dimension"):
            checks.matrix(name, x)


@checks.verb
def _counted(n: int) -> int:
    return n


def test_integers_that_a_kernel_can_count_with() -> None:
    """Between -2^63 and 2^63, both excluded."""
    for good in (checks.LONGEST - 1, 1 - checks.LONGEST):
        assert _counted(good) == good
    for bad in (checks.LONGEST, -checks.LONGEST):
        with pytest.raises(OptionError, match="n must be int"):
            _counted(bad)
    assert torch.iinfo(torch.int64).max + 1 == checks.LONGEST
