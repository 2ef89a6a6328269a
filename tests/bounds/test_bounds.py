"""Bounds: never violated, attained, and each shown to notice a narrower one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.bounds import Accumulator, Interval, any_order_bound, ieee32_bound, of_schedule, residue_bound, split_bound
from oracle.bounds.chain import NONE, exponent_floor, floor_power, power
from oracle.errors import NumericsError
from oracle.numbers.formats import codes_of, decode
from oracle.tensorcore.instructions import Sum
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Schedule, get, schedules
from oracle.truth.gemm import ScaledProduct, exact
from tests.support.products import KINDS, at_the_edge, block_scaled, operand, row_scaled

pytestmark = pytest.mark.emulated

BOUNDED = [
    s
    for s in schedules()
    if s.instruction.operands[0] not in ("tfloat32", "float4_e2m1fn")  # no torch dtype
    and s.instruction.name.count(".") <= 2  # no other reading (``….counted``)
    and s.fault is None
]
ARCHES = st.sampled_from(("sm90", "sm89", "sm100"))
FUSED = [s for s in BOUNDED if s.instruction.sum is Sum.FUSED]
PLAIN = [s for s in FUSED if s.name.endswith(("chain", "promote128", "ue8m0"))]  # epilogues change no accumulator


def product_for(schedule: Schedule, kind: str, *, seed: int, m: int = 3, n: int = 2, k: int = 256) -> ScaledProduct:
    fmt = schedule.instruction.operands[0]
    if schedule.scales_inside or schedule.dequantises:
        return block_scaled(kind, m, n, k, seed=seed, fmt=fmt, powers=True)
    if schedule.scales.name == "PROMOTION":
        return block_scaled(kind, m, n, k, seed=seed, fmt=fmt)
    return row_scaled(kind, m, n, k, seed=seed, fmt=fmt)


def ratios(product: ScaledProduct, schedule: Schedule, interval: Interval) -> Tensor:
    """Error of the predicted float32 output over the bound on its side; above 1 is a violation."""
    out = decode(predict_product(product, schedule, out_dtype=torch.float32, engine="torch"))
    value = exact(product)
    error = (out - value.hi) - value.lo
    edge = torch.where(error > 0, interval.hi, -interval.lo)
    return torch.where(error == 0, torch.zeros_like(error), error.abs() / edge)


@pytest.mark.turns(4)
class TestSoundness:
    """computed - exact lies in [lo, hi] for every model, whatever the data."""

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("schedule", BOUNDED, ids=lambda s: s.name)
    def test_residue(self, schedule: Schedule) -> None:
        for kind in KINDS:
            product = product_for(schedule, kind, seed=1)
            assert float(ratios(product, schedule, residue_bound(product, of_schedule(schedule))).max()) <= 1

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("schedule", PLAIN, ids=lambda s: s.name)
    def test_any_order(self, schedule: Schedule) -> None:
        for kind in KINDS:
            product = product_for(schedule, kind, seed=2)
            assert float(ratios(product, schedule, any_order_bound(product, of_schedule(schedule))).max()) <= 1

    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 2**31), st.sampled_from(KINDS), st.integers(1, 300), ARCHES)
    def test_hypothesis(self, seed: int, kind: str, k: int, arch: str) -> None:
        schedule = get(f"{arch}.chain")
        product = row_scaled(kind, 3, 4, k, seed=seed)
        for bound in (residue_bound, any_order_bound):
            assert float(ratios(product, schedule, bound(product, of_schedule(schedule))).max()) <= 1

    def test_permuted_k_stays_in_any_order(self) -> None:
        """The weak bound holds for every order of the products inside a promotion interval; B2 need not."""
        schedule, product = get("sm90.promote128"), block_scaled("codes", 8, 8, 256, seed=3)
        interval = any_order_bound(product, of_schedule(schedule))
        g = torch.Generator().manual_seed(0)
        for _ in range(5):
            order = torch.cat([block * 128 + torch.randperm(128, generator=g) for block in range(2)])
            codes = [x.view(torch.uint8)[:, order].contiguous().view(x.dtype) for x in (product.a, product.b)]
            shuffled = replace(product, a=codes[0], b=codes[1])
            assert float(ratios(shuffled, schedule, interval).max()) <= 1

    @pytest.mark.parametrize("bound", [any_order_bound, split_bound])
    def test_rows_have_their_own_bounds(self, bound: Callable[..., Interval]) -> None:
        """An error that grows on, in few bits and long chains, leaves the rows computed with it as they are."""
        product, few = row_scaled("codes", 3, 2, 600, seed=4), Accumulator("few bits", 8, 4, 3, None)
        codes_of(product.a)[1] = 0
        whole = bound(product, few)
        assert whole.open is not None and whole.open.all(dim=1).tolist() == [True, False, True]
        own = bound(product.rows(1, 2), few)
        assert torch.equal(own.lo, whole.lo[1:2]) and torch.equal(own.hi, whole.hi[1:2])

    @pytest.mark.parametrize("name", ["sm90.promote128", "sm89.promote128", "sm100.promote128"])
    def test_a_narrower_accumulator_violates(self, name: str) -> None:
        """Sabotage: one alignment bit fewer must leave the interval on adversarial data."""
        schedule = get(name)
        i = schedule.instruction
        assert i.align_bits is not None
        narrow = replace(i, align_bits=i.align_bits - 1, out_bits=min(i.out_bits, i.align_bits - 1))
        product = at_the_edge(i.align_bits, 4, 4, 384)
        interval = residue_bound(product, of_schedule(schedule))
        assert float(ratios(product, replace(schedule, instruction=narrow), interval).max()) > 1


class TestTightness:
    """B2 is attained: a bound twice as wide would not be."""

    @pytest.mark.parametrize("name", ["sm90.promote128", "sm90.chain", "sm89.chain"])
    def test_worst_ratio(self, name: str) -> None:
        schedule = get(name)
        worst = max(
            float(ratios(p, schedule, residue_bound(p, of_schedule(schedule))).max())
            for p in (product_for(schedule, KINDS[3], seed=s, m=24, n=24, k=256) for s in range(3))
        )
        assert 0.9 <= worst <= 1


class TestIeee32:
    """Any float32 evaluation in any order lies inside."""

    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 2**31), st.sampled_from(KINDS), st.booleans())
    def test_torch_float32(self, seed: int, kind: str, dequantise_first: bool) -> None:
        product = row_scaled(kind, 4, 5, 200, seed=seed)
        a, b = product.a.to(torch.float32), product.b.to(torch.float32)
        if dequantise_first:
            y = (a * product.a_scale) @ (b * product.b_scale).T
        else:
            y = (a @ b.T) * product.a_scale * product.b_scale.T
        assert product.bias is not None
        y = y + product.bias.to(torch.float32)
        value, interval = exact(product), ieee32_bound(product)
        error = (decode(y) - value.hi) - value.lo
        assert bool(((interval.lo <= error) & (error <= interval.hi)).all())

    def test_a_bfloat16_sum_violates(self) -> None:
        product = row_scaled("randn", 8, 8, 512, seed=9)
        total = torch.zeros(8, 8, dtype=torch.bfloat16)
        a, b = product.a.to(torch.float32), product.b.to(torch.float32)
        for k in range(512):
            total = (total.float() + a[:, k, None] * b[None, :, k]).to(torch.bfloat16)
        assert product.bias is not None
        y = total.float() * product.a_scale * product.b_scale.T + product.bias.float()
        value, interval = exact(product), ieee32_bound(product)
        assert bool((decode(y) - value.hi > interval.hi).any())


class TestHelpers:
    """floor_power, exponent_floor and power are exact at powers of two and their neighbours."""

    def test_powers(self) -> None:
        e = torch.arange(-120, 120)
        p = power(e)
        assert torch.equal(p, torch.tensor([2.0**i for i in e.tolist()], dtype=torch.float64))
        below = torch.nextafter(p, torch.zeros_like(p))
        assert torch.equal(floor_power(p), p) and torch.equal(floor_power(below), p / 2)
        assert torch.equal(exponent_floor(p), e) and torch.equal(exponent_floor(below), e - 1)
        zero = torch.zeros(1, dtype=torch.float64)
        assert float(floor_power(zero)) == 0 and int(exponent_floor(zero)) == NONE


class TestRefusals:
    """A bound that does not apply says so."""

    def test_chain_with_block_scales(self) -> None:
        with pytest.raises(NumericsError, match="promoted schedule"):
            residue_bound(block_scaled("randn", 2, 2, 256, seed=0), of_schedule(get("sm90.chain")))

    def test_ue8m0(self) -> None:
        with pytest.raises(NumericsError, match="power of two"):
            residue_bound(block_scaled("randn", 2, 2, 256, seed=0), of_schedule(get("sm100.chain_ue8m0")))

    def test_overflowing_intermediate_is_open(self) -> None:
        a = operand("positive", 2, 128, seed=0)
        huge = ScaledProduct(a, a, torch.full((1, 1), 2.0**100), torch.full((1, 1), 2.0**100), 128, 2)
        assert bool(residue_bound(huge, of_schedule(get("sm90.promote128"))).open.all())  # type: ignore[union-attr]
        assert bool(ieee32_bound(huge).open.all())  # type: ignore[union-attr]

    def test_unknown_any_order(self) -> None:
        product = row_scaled("randn", 2, 2, 64, seed=0)
        with pytest.raises(NumericsError, match="fused truncating"):
            any_order_bound(product, of_schedule(get("sm90.mma_sync.chain")))


class TestSpecialScales:
    """An infinite scale leaves its row open (NaN or infinity, as the order has it); a NaN scale must give NaN."""

    @pytest.mark.parametrize("bound", ["ieee32", "residue"])
    def test_rows(self, bound: str) -> None:
        p = row_scaled("randn", 4, 3, 64, seed=1)
        scale = p.a_scale.clone()
        scale[1], scale[2] = torch.inf, torch.nan
        p = replace(p, a_scale=scale)
        interval = ieee32_bound(p) if bound == "ieee32" else residue_bound(p, of_schedule(get("sm90.chain")))
        assert interval.open is not None
        assert interval.open.any(dim=1).tolist() == [False, True, False, False]
