"""A name that a failing output gives itself, each beside an output that does not have it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oracle import judge
from oracle.diagnosis.measured import measured
from oracle.routines import cases, get
from oracle.routines.base import by_name
from oracle.verdict.compare import Status
from oracle.verdict.sets import Bounds, bits_of

RIGHT = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).abs().add(0.5).bfloat16()
HELD = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
Change = Callable[[Tensor], object]


def name(change: Change, right: Tensor = RIGHT, *, held: str = "not written", near: bool = False) -> str | None:
    """The first name of a changed output whose differing elements fail."""
    output = right.clone()
    change(output)
    bad = bits_of(output) != bits_of(right)
    before = [(held, HELD)] if HELD.shape == right.shape and HELD.dtype == right.dtype else []
    return next(measured(output, right, bad, held=before, near=near), None)


def down(every: int) -> Change:
    """Every n-th element one unit in the last place nearer to zero."""
    return lambda x: x.view(torch.int16).flatten()[::every].sub_(1)


def both_ways(x: Tensor) -> None:
    x.view(torch.int16).flatten()[::2].sub_(1)
    x.view(torch.int16).flatten()[1::2].add_(1)


def but_one(change: Change) -> Change:
    def changed(x: Tensor) -> None:
        change(x)
        x[2, 3] += 1

    return changed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x[:, 80:].zero_(), "from index 80 on along axis 1 not written"),
        (lambda x: x[33:].zero_(), "from index 33 on along axis 0 not written"),
        (lambda x: x[33:].copy_(HELD[33:]), "from index 33 on along axis 0 not written"),
        (lambda x: x[:, 10:20].zero_(), None),  # what lies behind is written
        (but_one(lambda x: x[:, 80:].zero_()), None),
        (lambda x: x[63:, 95:].zero_(), None),  # one element lies anywhere
        (lambda x: x.zero_(), None),  # nothing tells where it ends
        (down(4), "one unit in the last place nearer to zero (as what is rounded toward zero)"),
        (down(64), None),  # as rarely as ties
        (both_ways, None),
        (lambda x: x.mul_(1.5), "every failing element is 1.5 times the right result"),
        (but_one(lambda x: x.mul_(1.5)), None),
        (lambda x: x[:32].mul_(1.5), None),  # a factor of some rows says nothing of the rest
        (lambda x: x.copy_(x.roll(1, 0)), "every failing row is the right one of another row"),
    ],
)
def test_names(change: Change, said: str | None) -> None:
    assert name(change) == said or (said is not None and (name(change) or "").startswith(said))


def test_an_end_keeps_what_the_memory_held_or_an_input_holds() -> None:
    copied = name(lambda x: x[33:].copy_(HELD[33:]), held="is w, as it is")
    assert copied == "from index 33 on along axis 0 is w, as it is"


def test_a_place_that_is_right_by_chance_is_part_of_the_end() -> None:
    """Where the right result is what the memory held, the end is that of the state, at a usual step; and nothing is
    named where an element behind it is neither."""
    right = RIGHT.clone()
    right[32] = HELD[32]
    assert name(lambda x: x[33:].copy_(HELD[33:]), right) == "from index 32 on along axis 0 not written"
    assert name(but_one(lambda x: x[1:].copy_(HELD[1:])), right) is None


def test_wide_values_of_a_narrow_format() -> None:
    right = torch.randn(64, 96, generator=torch.Generator().manual_seed(3))
    assert "rounded to bfloat16" in (name(lambda x: x.copy_(x.bfloat16().float()), right) or "")
    assert name(lambda x: x.add_(torch.randn(64, 96) * 0.01), right) is None


def test_one_value_where_zero_is_due() -> None:
    right = RIGHT.clone()
    right[5:40, 3:50] = 0.0
    assert name(lambda x: x[5:40, 3:50].fill_(1.0), right) == "1 where 0 is due"
    assert name(lambda x: x[5:41, 3:50].fill_(1.0), right) is None


def test_a_side_is_that_of_what_is_admitted() -> None:
    """With an interval a unit wide the nearest end counts, not the one result in it."""
    output, low = RIGHT.clone(), RIGHT.clone()
    down(1)(low)
    low_end = low.double()
    down(1)(output), down(1)(output)
    bounds = Bounds(low_end, RIGHT.double(), torch.zeros(RIGHT.shape, dtype=torch.bool), "")
    bad = torch.ones(RIGHT.shape, dtype=torch.bool)
    named = next(measured(output, RIGHT, bad, bounds=bounds, near=True), None)
    assert named == "one unit in the last place nearer to zero (as what is rounded toward zero)"
    assert next(measured(output, RIGHT, bad, near=True), None) is None


def test_values_of_one_dimension_and_failures_without_a_wrong_element() -> None:
    """A list of numbers has one axis; where a layout alone is wrong there is no name."""
    line = RIGHT[0]
    assert name(lambda x: x[48:].zero_(), line) == "from index 48 on not written"
    case = cases.parse("get_col_major_tma_aligned_tensor/f32/-/m=31,c=7,g=1/family=randn/seed=1")
    right = by_name(get(case.contract).reference(case.inputs()))["out"]
    short = torch.empty(6 * 32 + 31).as_strided(right.shape, right.stride()).copy_(right)
    verdict = judge(case.contract, case.inputs(), short, arch="cpu")
    assert verdict.status is Status.FAILED and "memory" in verdict.summary and verdict.explained_by == ()
