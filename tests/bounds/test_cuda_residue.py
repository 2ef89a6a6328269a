"""The bounds in CUDA C++, run on the CPU thread by thread: the definitions' bits, from any operands.

What a GPU alone can show, its instructions and its speed, is in ``tests/hardware``.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.bounds import Accumulator, Interval, cuda_residue, engines, of_schedule
from oracle.bounds import product as definition
from oracle.numbers.formats import codes_of
from oracle.tensorcore.cuda_source import Source
from oracle.tensorcore.schedules import get
from oracle.truth.gemm import ScaledProduct
from tests.support.cuda_on_host import launcher
from tests.support.schedule_products import product_of

SHAPES = [(1, 5, 7), (3, 70, 96), (66, 9, 300)]  # ragged in M, N (tiles of 64), K (steps and chains)
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
ODD = Accumulator("odd group", 5, 13, 13, 64)
ACCUMULATORS = [
    *(of_schedule(get(name)) for name in ("sm90.promote128", "sm90.chain", "sm89.promote128", "sm100.chain")),
    ODD,
]
PROMOTED = of_schedule(get("sm90.promote128"))

pytestmark = [pytest.mark.needs_tools("g++"), pytest.mark.usefixtures("cuda_on_host"), pytest.mark.turns(4)]


def same(x: Interval, y: Interval) -> bool:
    """Equal ends, NaN equal to NaN, equal openness and name."""
    assert x.open is not None and y.open is not None
    return _equal(x.lo, y.lo) and _equal(x.hi, y.hi) and torch.equal(x.open, y.open) and x.name == y.name


def _equal(x: Tensor, y: Tensor) -> bool:
    return torch.equal(torch.isnan(x), torch.isnan(y)) and torch.equal(x.nan_to_num(0.125), y.nan_to_num(0.125))


def same_at(product: ScaledProduct, acc: Accumulator, due: Interval, at: Tensor) -> bool:
    """Whether the bounds at these places are those of ``due``."""
    assert due.open is not None
    few = replace(due, **{name: getattr(due, name).flatten()[at] for name in ("lo", "hi", "open")})
    return same(cuda_residue.residue_at(product, acc, at), few)


def check(product: ScaledProduct, acc: Accumulator = PROMOTED) -> None:
    """Every bound has the bits of its definition, also of elements one by one."""
    due = definition.residue_bound(product, acc)
    assert same(cuda_residue.residue_bound(product, acc), due)
    assert same_at(product, acc, due, torch.arange(product.M * product.N).flip(0))
    found = cuda_residue.any_order_bound(product, acc)
    assert found is not None and found.weak and same(found, definition.any_order_bound(product, acc))
    if acc.promotion is not None:
        assert same(cuda_residue.split_bound(product, acc), definition.split_bound(product, acc))


def e4m3(m: int, n: int, k: int, *, seed: int, data: str = "bell", bias: bool = False) -> ScaledProduct:
    return product_of(get("sm90.promote128"), m, n, k, seed=seed, data=data, bias=bias)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("acc", ACCUMULATORS, ids=lambda a: a.name)
@pytest.mark.parametrize("data", ["bell", "finite", "special"])
def test_equal(acc: Accumulator, data: str) -> None:
    """Bell-shaped codes, any finite ones (subnormals and zeros among them), NaN and infinities too."""
    schedule = get("sm90.chain" if acc.promotion is None else "sm90.promote128")
    for seed, (m, n, k) in enumerate(SHAPES):
        product = product_of(schedule, m, n, k, seed=seed, data=data, bias=seed == 1)
        check(product, acc)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("formats", [(E5M2, E5M2), (E5M2, E4M3), (E4M3, E5M2)], ids="-".join)
@pytest.mark.parametrize("name", ["sm90.promote128", "sm100.promote128"])
def test_wide_exponents(formats: tuple[str, str], name: str) -> None:
    """E5M2 whose sums fit float64: its subnormals and numbers of some binades above."""
    acc = of_schedule(get(name))
    product = product_of(get("sm90.promote128"), 5, 9, 300, seed=11, formats=formats)
    check(replace(product, a=(product.a.float() * 2.0**-7).to(product.a.dtype)), acc)


WIDTHS = st.tuples(st.integers(1, 32), st.integers(2, 38), st.integers(2, 27), st.sampled_from([None, 32, 64, 128]))
"""Products of a step, alignment bits, output bits, products of a chain."""


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**31), WIDTHS, st.integers(1, 300), st.sampled_from([(E4M3, E4M3), (E5M2, E4M3)]))
def test_any_accumulator(seed: int, widths: tuple[int, int, int, int | None], k: int, formats: tuple[str, str]) -> None:
    """Any widths, scales of many binades, signs and zeros among them."""
    acc = Accumulator("any", *widths)
    schedule = get("sm90.chain" if acc.promotion is None else "sm90.promote128")
    p = product_of(schedule, 5, 7, k, seed=seed, formats=formats, data="finite", bias=True)
    g = torch.Generator().manual_seed(seed)
    wide = torch.ldexp(p.a_scale, torch.randint(-40, 40, p.a_scale.shape, generator=g))
    a = (p.a.float() * 2.0**-7).to(p.a.dtype) if E5M2 in formats else p.a
    p = replace(p, a=a, a_scale=wide * torch.randint(-1, 3, wide.shape, generator=g))
    assume(cuda_residue._source(acc) is not None and engines._unfit(p, acc) is None)
    assert same(cuda_residue.residue_bound(p, acc), definition.residue_bound(p, acc))
    found = cuda_residue.any_order_bound(p, acc)
    assert found is None or same(found, definition.any_order_bound(p, acc))
    if acc.promotion is not None:
        assert same(cuda_residue.split_bound(p, acc), definition.split_bound(p, acc))


class TestOperands:
    """What the operands, and what follows the sum, may be."""

    @pytest.mark.parametrize("acc", [PROMOTED, ODD], ids=lambda a: a.name)
    def test_cancellation_and_extremes(self, acc: Accumulator) -> None:
        """Chains that end at 0, the largest products, the least ones, and rows of zeros."""
        product = e4m3(6, 8, 256, seed=1, data="finite")
        a, b = codes_of(product.a), codes_of(product.b)
        a[0, 1::2], b[:4, 1::2] = a[0, ::2] ^ 0x80, b[:4, ::2]
        a[1], a[2], a[3, 100:], a[4] = 0x7E, 0x01, 0x00, 0x80
        b[5], b[6], b[7] = 0xFE, 0x81, 0x00
        check(product, acc)

    def test_zeros_after_large_products(self) -> None:
        product = e4m3(3, 5, 65, seed=14)
        codes_of(product.a)[:, 64:], codes_of(product.b)[:, 64:] = 0, 0x7B
        check(product)

    @pytest.mark.parametrize("special", [float("nan"), float("inf"), 2.0**120, 0.0])
    def test_scales(self, special: float) -> None:
        product = e4m3(3, 5, 256, seed=4)
        product.a_scale[1, 1], product.b_scale[2, 0] = special, -special
        check(product)

    @pytest.mark.parametrize("size", [0.5, 2.0**110])
    def test_one_scale(self, size: float) -> None:
        """Of a tensor, in one block that chains divide; the sum may leave float32 before it is scaled."""
        product, one = e4m3(4, 70, 300, seed=5, data="finite"), torch.tensor([[size]])
        whole = replace(product, a_scale=one, b_scale=one, block=300, b_rows=70)
        made = definition.scaled_at_the_end(
            whole,
            PROMOTED,
            cuda_residue.residue_bound(whole, PROMOTED),
            lambda part: (engines.exact(part), cuda_residue.residue_bound(part, PROMOTED)),
        )
        assert same(made, definition.residue_bound(whole, PROMOTED))

    def test_what_follows_the_sum(self) -> None:
        product, g = e4m3(4, 7, 256, seed=6, bias=True), torch.Generator().manual_seed(1)
        check(replace(product, c=torch.randn(4, 7, generator=g), alpha=torch.tensor([0.3, 5.0])))

    def test_strides(self) -> None:
        """Rows that begin anywhere, and columns that are not contiguous."""
        product = e4m3(5, 6, 263, seed=7)
        a, b = product.a[:, 3:259], product.b.t().contiguous().t()[:, 3:259]
        check(replace(product, a=a, b=b, a_scale=product.a_scale[:, 1:], b_scale=product.b_scale[:, 1:]))

    def test_bands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_residue, "BAND", 64 * 64)
        check(e4m3(130, 3, 40, seed=8, bias=True))


def test_an_error_that_grows_on() -> None:
    """Few bits and no promotion: nothing is found where the definition leaves every result open."""
    product = product_of(get("sm90.chain"), 2, 3, 300, seed=3)
    coarse = Accumulator("few bits", 8, 4, 3, None)
    assert cuda_residue.any_order_bound(product, coarse) is None
    due = definition.any_order_bound(product, coarse)
    assert due.open is not None and bool(due.open.all())


@pytest.mark.parametrize(
    "change",
    [
        ("low = low - lost", "low = low"),
        ("add_floor(value_of(a[1][i]), value_of(b[1][j]), f)", "f"),
        ("p[i] > 0 ? (Sum)one : (Sum)0", "(Sum)0"),
        ("a_scale_stride + now.block", "a_scale_stride"),
    ],
    ids=[
        "the accumulator loses nothing",
        "products of two negative numbers are no positive ones",
        "residue_at: no product is positive",
        "residue_at: the first scale of a row",
    ],
)
def test_notices(
    change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A changed line of the source changes a bound."""
    monkeypatch.setattr(Source, "launch", launcher(tmp_path, change))
    product = e4m3(3, 5, 300, seed=9)
    if "residue_at" in request.node.callspec.id:
        assert not same_at(product, PROMOTED, definition.residue_bound(product, PROMOTED), torch.arange(15))
        return
    assert not same(cuda_residue.residue_bound(product, PROMOTED), definition.residue_bound(product, PROMOTED))


def test_few_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device computes them one by one as the CPU does, unless they are many or a sample has other bits."""
    product = e4m3(9, 70, 300, seed=12, bias=True)
    wanted = torch.rand(9, 70, generator=torch.Generator().manual_seed(1)) < 0.08
    due = engines.residue_at(product, PROMOTED, wanted)
    monkeypatch.setattr(engines, "why_not_on_device", lambda *_: None)
    found = engines.residue_at(product, PROMOTED, wanted)
    assert due is not None and found is not None and len(due[0]) == int(wanted.sum())
    assert torch.equal(due[0], found[0]) and torch.equal(due[1], found[1])
    assert engines.residue_at(product, PROMOTED, wanted.logical_not()) is None
    right = cuda_residue.residue_at
    for name in ("lo", "hi"):

        def moved(*asked: Any, name: str = name) -> Interval:
            found = right(*asked)
            return replace(found, **{name: getattr(found, name) * 1.5})

        monkeypatch.setattr(cuda_residue, "residue_at", moved)
        assert engines.residue_at(product, PROMOTED, wanted) is None


def test_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on a GPU, and for steps whose sums it holds; the engines ask."""
    product = e4m3(2, 3, 128, seed=10)
    assert "cpu" in str(cuda_residue.why_not(product, PROMOTED))
    monkeypatch.setattr(cuda_residue.cuda_source, "why_not", lambda device: None)
    for other in (replace(PROMOTED, group=64), replace(PROMOTED, align=46)):
        assert "a step" in str(cuda_residue.why_not(product, other))
    assert "nothing" in str(cuda_residue.why_not(product.rows(0, 0), PROMOTED))
    monkeypatch.setattr(cuda_residue, "why_not", lambda product, acc: None)
    assert "inside" in str(engines.why_not_on_device(product, replace(PROMOTED, scales_inside=True)))
    for change in ({"truncates": True}, {"flushes": True}):
        assert "converts" in str(engines.why_not_on_device(product, replace(PROMOTED, **change)))
    value, interval = engines.exact_and_residue(product, PROMOTED)
    assert value is None and same(interval, definition.residue_bound(product, PROMOTED))
    assert same(engines.residue_bound(product, PROMOTED), interval)
    for name in ("any_order_bound", "split_bound"):
        assert same(getattr(engines, name)(product, PROMOTED), getattr(definition, name)(product, PROMOTED))


BOUNDS = {
    "residue_bound": engines._on_device,
    "any_order_bound": engines.any_order_bound,
    "split_bound": engines.split_bound,
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_device_that_computes_another_bound_decides_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows and columns are computed by the definition; where they differ it is asked for all."""
    product, due = e4m3(9, 70, 300, seed=3), getattr(definition, name)
    monkeypatch.setattr(engines, "why_not_on_device", lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(BOUNDS[name](product, PROMOTED), due(product, PROMOTED))
    right = getattr(cuda_residue, name)

    def moved(p: ScaledProduct, acc: Accumulator) -> Interval:
        found = right(p, acc)
        assert found is not None
        return replace(found, hi=found.hi.nextafter(torch.tensor(torch.inf, dtype=torch.float64)))

    monkeypatch.setattr(cuda_residue, name, moved)
    with pytest.warns(RuntimeWarning, match="differs from its definition"):
        assert same(BOUNDS[name](product, PROMOTED), due(product, PROMOTED))
