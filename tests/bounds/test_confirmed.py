"""A bound of CUDA C++ that is wrong in few elements decides nothing: a sample is computed by the definition.

Here the definition itself stands for CUDA C++, with some elements changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.bounds import Interval, admissible, cuda_residue, engines, of_schedule
from oracle.bounds import product as definition
from oracle.tensorcore.schedules import get
from oracle.truth import gemm
from oracle.truth.gemm import ScaledProduct, rounded
from oracle.verdict.products import Part, _judge_interval
from tests.support.schedule_products import product_of

pytestmark = pytest.mark.turns(2)

NAME = "sm90.promote128"
ACC = of_schedule(get(NAME))
M, N = 300, 140
BOUNDS = {
    "residue_bound": engines._on_device,
    "any_order_bound": engines.any_order_bound,
    "split_bound": engines.split_bound,
}
Change = Callable[[Interval], Interval]


@pytest.fixture(scope="module")
def product() -> ScaledProduct:
    return product_of(get(NAME), M, N, 16, seed=3)


@pytest.fixture(scope="module")
def right(product: ScaledProduct) -> dict[str, Interval]:
    return {name: getattr(definition, name)(product, ACC) for name in BOUNDS}


def at(*places: tuple[int, int]) -> Tensor:
    mask = torch.zeros(M, N, dtype=torch.bool)
    for i, j in places:
        mask[i, j] = True
    return mask


def changed(where: Tensor) -> Change:
    """The interval a bit wider there."""
    return lambda x: replace(x, hi=torch.where(where, x.hi.nextafter(torch.full_like(x.hi, torch.inf)), x.hi))


@contextmanager
def computed(monkeypatch: pytest.MonkeyPatch, right: dict[str, Interval], change: Change) -> Iterator[None]:
    """CUDA C++ gives the definition's bounds of all, changed; nothing is kept."""
    monkeypatch.setattr(engines, "why_not_on_device", lambda *_: None)
    monkeypatch.setattr(gemm, "RESULT", 0)
    for name, interval in right.items():
        monkeypatch.setattr(cuda_residue, name, lambda *_, interval=interval: change(interval))
    yield


@contextmanager
def noticed(*, whether: bool) -> Iterator[None]:
    if whether:
        with pytest.warns(RuntimeWarning, match="differs from its definition"):
            yield
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield


@pytest.mark.parametrize("name", BOUNDS)
def test_a_place_of_a_tile(
    name: str, product: ScaledProduct, right: dict[str, Interval], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong wherever one thread computes one of its results."""
    place = (torch.arange(M)[:, None] % 64 == 37) & (torch.arange(N)[None, :] % 64 == 11)
    for where, wrong in ((at(), False), (place, True), (at((M - 1, N - 1)), True)):
        with computed(monkeypatch, right, changed(where)), noticed(whether=wrong):
            found = BOUNDS[name](product, ACC)
        assert torch.equal(found.hi, right[name].hi) and torch.equal(found.open, right[name].open)


@pytest.mark.parametrize("name", BOUNDS)
def test_an_element_that_decides(
    name: str, product: ScaledProduct, right: dict[str, Interval], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the sample does not hold is noticed where a verdict rests on it, and there alone."""
    lone = (100, 100)
    for deciding, wrong in ((None, False), (at((7, 7)), False), (at((7, 7), lone), True)):
        with computed(monkeypatch, right, changed(at(lone))), noticed(whether=wrong):
            found = BOUNDS[name](product, ACC, None if deciding is None else lambda deciding=deciding: deciding)
        assert torch.equal(found.hi, right[name].hi) is wrong


def test_openness(product: ScaledProduct, right: dict[str, Interval], monkeypatch: pytest.MonkeyPatch) -> None:
    """An element that is wrongly open would pass whatever it holds."""
    opened = {"residue_bound": replace(right["residue_bound"], open=at((M - 1, N - 1)))}
    with computed(monkeypatch, opened, lambda x: x), noticed(whether=True):
        assert not bool(engines._on_device(product, ACC).open.any())


@pytest.fixture(scope="module")
def exact(product: ScaledProduct) -> Tensor:
    return rounded(product, engines.exact(product), torch.float32)


class TestVerdicts:
    """What is confirmed is what a verdict rests on."""

    def judged(self, product: ScaledProduct, output: Tensor) -> str:
        return _judge_interval([Part(product)], output, NAME, (), None).status.name

    def test_a_pass(
        self, product: ScaledProduct, right: dict[str, Interval], exact: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The only wrong element, where CUDA C++ claims that anything may be."""
        output = exact.clone()
        output[100, 100] *= 2
        assert self.judged(product, output) == "FAILED"
        residue = right["residue_bound"]
        wide = replace(residue, hi=residue.hi + at((100, 100)) * 1e6, lo=residue.lo - at((100, 100)) * 1e6)
        with computed(monkeypatch, {"residue_bound": wide}, lambda x: x):
            with noticed(whether=True):
                assert self.judged(product, output) == "FAILED"
            with noticed(whether=False):  # nothing rests on it
                assert self.judged(product, exact) == "PASSED"
            monkeypatch.setattr(engines, "DECIDING", 0)
            with noticed(whether=False):
                assert self.judged(product, output) == "PASSED"

    def test_a_failure(
        self, product: ScaledProduct, right: dict[str, Interval], exact: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An output that differs in most elements, as it may, and fails in one by what CUDA C++ says alone."""
        residue = right["residue_bound"]
        value = admissible(engines.exact(product), exact, residue)
        output = value.low.to(torch.float32)
        assert self.judged(product, output) == "PASSED"
        moved = torch.nonzero(output != exact)
        assert len(moved) > M * N // 4
        lone = at(tuple(moved[len(moved) // 2].tolist()))
        narrow = replace(residue, lo=residue.lo.masked_fill(lone, 0.0), hi=residue.hi.masked_fill(lone, 0.0))
        with computed(monkeypatch, {"residue_bound": narrow}, lambda x: x), noticed(whether=True):
            assert self.judged(product, output) == "PASSED"

    def test_one_bound_serves_a_failure(
        self, product: ScaledProduct, right: dict[str, Interval], exact: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its elements are confirmed on the interval at hand; where they are not, all is computed again."""
        asked = list[Interval]()

        def counted(x: Interval) -> Interval:
            asked.append(x)
            return x

        def refused(*given: Callable[[], Tensor], everywhere: bool = False) -> bool:
            given[-1]()
            return everywhere

        output = exact.clone()
        output[100, 100] *= 2
        with computed(monkeypatch, {"residue_bound": right["residue_bound"]}, counted), noticed(whether=False):
            assert self.judged(product, output) == "FAILED" and len(asked) == 1
            monkeypatch.setattr(engines, "_agrees", refused)
            assert self.judged(product, output) == "FAILED" and len(asked) == 3
