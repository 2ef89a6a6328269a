"""The definitions have the same bits on a GPU as on the CPU, where torch computes the two otherwise.

What torch does on a GPU is done here on the CPU.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from oracle.bounds import Accumulator, Interval, ieee32_bound, of_schedule
from oracle.bounds import product as definition
from oracle.bounds.product import Promotion
from oracle.tensorcore.schedules import get
from oracle.truth.gemm import ScaledProduct
from tests.support.on_a_gpu import ReciprocalDivision
from tests.support.schedule_products import product_of

BOUNDS = {
    "sm90.promote128": ("residue_bound", "split_bound", "any_order_bound"),
    "sm100.promote128": ("residue_bound", "split_bound", "any_order_bound"),
    "gfx942.promote128": ("residue_bound", "split_bound"),
}


def on_both(make: Callable[[], Interval]) -> bool:
    """Whether the bound has the same bits as on a GPU."""
    here = make()
    with ReciprocalDivision():
        there = make()
    return torch.equal(here.lo, there.lo) and torch.equal(here.hi, there.hi)


def products(name: str) -> list[ScaledProduct]:
    """Of many chains, with a bias; and with a factor and a summand too."""
    plain, g = product_of(get(name), 3, 4, 7000, seed=7, data="finite", bias=True), torch.Generator().manual_seed(1)
    return [plain, replace(plain, c=torch.randn(3, 4, generator=g), alpha=torch.tensor([0.3, 5.0]))]


def fresh(bound: Callable[..., Interval], p: ScaledProduct, acc: Accumulator) -> Interval:
    """The bound of a product of which nothing is kept."""
    return bound(replace(p), acc)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", BOUNDS)
def test_definitions(name: str) -> None:
    acc = of_schedule(get(name))
    for p in products(name):
        for bound in BOUNDS[name]:
            assert on_both(partial(fresh, getattr(definition, bound), p, acc))


def test_float32_in_any_order() -> None:
    for p in products("sm90.promote128"):
        assert on_both(partial(ieee32_bound, p))


def sum_of_a_hundred() -> Interval:
    """An unordered sum of which only float32 additions err."""
    g = torch.Generator().manual_seed(2)
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(8, 8, dtype=torch.float64)
    found = Promotion(zero, ordered=False)
    for _ in range(100):
        found.add(one, one, torch.randn(8, 8, generator=g, dtype=torch.float64), zero, zero)
    return found.interval(name="sum", alpha=None)


def test_promotion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times ``1 / (1 - 100 * 2**-24)``; a division by the denominator gives other bits on a GPU."""
    assert on_both(sum_of_a_hundred)
    right = textwrap.dedent(inspect.getsource(Promotion.interval))
    divided = right.replace("* (1 / (1 - self._added * U))", "/ (1 - self._added * U)")
    assert divided != right
    made: dict[str, Callable[..., Interval]] = {}
    exec("from __future__ import annotations\n" + divided, vars(definition), made)
    monkeypatch.setattr(Promotion, "interval", made["interval"])
    assert not on_both(sum_of_a_hundred)
