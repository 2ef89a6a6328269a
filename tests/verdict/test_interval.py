"""Bounds before there is a kernel: the judge takes what lies at them and refuses the next value; free elements."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import oracle
from oracle.errors import LayoutError, NumericsError, ShapeError
from oracle.numbers.formats import decode
from oracle.routines import get
from oracle.verdict.compare import Status
from oracle.verdict.sets import Bounds, rounded_to
from tests.support.answers import smallest

GEMM = oracle.cases.parse("fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=5,n=64,k=256/family=randn/seed=1")
QUANT = oracle.cases.parse("per_token_group_quant_fp8/bf16-e4m3/1x128/m=3,k=256/family=randn/seed=1")
MASKED = "fp8_m_grouped_gemm_nt_masked/e4m3xe4m3-bf16/1x128:128x128/g=2,m=4,n=32,k=128/family=randn/seed=1"


def holds(bounds: Bounds, output: Tensor) -> bool:
    value = decode(output)
    nan = torch.isnan(value) & torch.isnan(bounds.low)
    return bool((nan | bounds.free | ((bounds.low <= value) & (value <= bounds.high))).all())


def beyond(edge: Tensor, index: tuple[int, ...]) -> Tensor:
    """A copy whose element at ``index`` is one code further from zero."""
    bits = {1: torch.uint8, 2: torch.int16}[edge.element_size()]
    moved = edge.clone()
    moved.view(bits)[index] += 1
    return moved


class TestProducts:
    """What a schedule computes lies inside, at both edges and one code beyond the judge agrees."""

    def test_edges(self) -> None:
        inputs = GEMM.inputs()
        bounds = oracle.interval("fp8_gemm_nt", inputs)["out"]
        assert bounds.numerics == "sm90.promote128" and not bool(bounds.free.any())
        assert bounds.low.dtype == bounds.high.dtype == torch.float64 and bounds.low.shape == (5, 64)
        low, high = (rounded_to(x, torch.bfloat16) for x in (bounds.low, bounds.high))
        assert torch.equal(decode(low), bounds.low) and torch.equal(decode(high), bounds.high), "on the grid"
        judge = get("fp8_gemm_nt").judge
        for edge, at in ((high, bounds.high.argmax()), (low, bounds.low.argmin())):
            index = (int(at) // 64, int(at) % 64)
            assert judge(inputs, edge, numerics="sm90.promote128").status is Status.PASSED
            assert judge(inputs, beyond(edge, index), numerics="sm90.promote128").outside == 1

    @pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
    def test_prediction(self, dtype: torch.dtype | None) -> None:
        """And the twin: bounds of a doubled scale do not hold the right output."""
        inputs = GEMM.inputs()
        out = oracle.predict("fp8_gemm_nt", inputs, out_dtype=dtype)
        assert isinstance(out, Tensor)
        assert holds(oracle.interval("fp8_gemm_nt", inputs, out_dtype=dtype)["out"], out)
        doubled = inputs | {"a_scale": inputs["a_scale"] * 2}
        assert not holds(oracle.interval("fp8_gemm_nt", doubled, out_dtype=dtype)["out"], out)

    def test_arch_and_numerics(self) -> None:
        """A wider class has wider bounds."""
        inputs = GEMM.inputs()
        usual, any_order, cpu = (
            oracle.interval("fp8_gemm_nt", inputs, out_dtype=torch.float32, **said)["out"]
            for said in ({}, {"numerics": "sm90.promote128.any"}, {"arch": "cpu"})
        )
        assert float((any_order.high - any_order.low).sum()) > float((usual.high - usual.low).sum())
        assert (any_order.numerics, cpu.numerics) == ("sm90.promote128.any", "ieee32.any")

    def test_nan(self) -> None:
        inputs = GEMM.inputs()
        inputs["a"].view(torch.uint8)[2, 5] = 0x7F
        bounds = oracle.interval("fp8_gemm_nt", inputs)["out"]
        due = torch.isnan(bounds.low).all(dim=1)
        assert due.tolist() == [False, False, True, False, False] and torch.equal(due, torch.isnan(bounds.high[:, 0]))


class TestFree:
    """Elements of which nothing is said: rows that nobody fills, padding of a layout."""

    def test_rows(self) -> None:
        case = oracle.cases.parse(MASKED)
        inputs = case.inputs()
        bounds = oracle.interval(case.contract, inputs, **case.call_options())["out"]  # type: ignore[arg-type]
        counts = inputs["masked_m"].tolist()
        due = torch.stack([(torch.arange(4) >= n)[:, None].expand(4, 32) for n in counts])
        assert torch.equal(bounds.free, due) and bool(due.any()) and not bool(due.all())
        assert set(bounds.low[due].tolist()) == {-math.inf} and set(bounds.high[due].tolist()) == {math.inf}
        assert bool(torch.isfinite(bounds.low[~due]).all())

    def test_padding(self) -> None:
        scale = torch.arange(1, 7, dtype=torch.uint8).reshape(2, 3).view(torch.float8_e8m0fnu)
        bounds = oracle.interval("swizzle_scale", {"scale": scale})["out"]
        assert int((~bounds.free).sum()) == 6 and torch.equal(bounds.low[~bounds.free], bounds.high[~bounds.free])


class TestQuantisers:
    """Codes as values, for the scale that is due."""

    def test_edges(self) -> None:
        inputs = QUANT.inputs()
        bounds, due = oracle.interval(QUANT.contract, inputs), oracle.reference(QUANT.contract, inputs)
        assert isinstance(due, dict) and set(bounds) == {"q", "scale"}
        assert all(holds(bounds[name], due[name]) for name in due)
        assert not holds(bounds["q"], rounded_to(-decode(due["q"]), due["q"].dtype)), "the twin"
        low, high = (rounded_to(x, due["q"].dtype) for x in (bounds["q"].low, bounds["q"].high))
        judge = get(QUANT.contract).judge
        assert judge(inputs, due | {"q": low}) and judge(inputs, due | {"q": high})
        index = next((int(r), int(c)) for r, c in torch.nonzero((bounds["q"].high > 1) & (bounds["q"].high < 448)))
        assert judge(inputs, due | {"q": beyond(high, index)}).status is Status.FAILED


class TestOthers:
    """Integers and float64 stand for themselves; what has no interval is one typed error."""

    @pytest.mark.parametrize("name", ["calc_diff", "get_col_major_tma_aligned_tensor", "to_blocked"])
    def test_values(self, name: str) -> None:
        inputs, options = smallest(name)
        found = oracle.interval(name, inputs, **options)  # type: ignore[arg-type]
        assert found and all(bool((b.free | (b.low <= b.high) | torch.isnan(b.low)).all()) for b in found.values())

    def test_refused(self) -> None:
        inputs, options = smallest("nvfp4_quantize")
        with pytest.raises(NumericsError, match="nvfp4_quantize: right outputs are no interval"):
            oracle.interval("nvfp4_quantize", inputs, **options)  # type: ignore[arg-type]
        gemm = GEMM.inputs()
        with pytest.raises(NumericsError, match="no numerics model for arch 'sm1'"):
            oracle.interval("fp8_gemm_nt", gemm, arch="sm1")
        with pytest.raises(NumericsError, match="calc_diff has one numerics"):
            oracle.interval("calc_diff", smallest("calc_diff")[0], numerics="sm90.promote128")
        with pytest.raises(ShapeError):
            oracle.interval("fp8_gemm_nt", gemm | {"a": gemm["a"][:, :128]})
        with pytest.raises(LayoutError, match="a is on meta"):
            oracle.interval("fp8_gemm_nt", gemm | {"a": torch.empty_like(gemm["a"], device="meta")})
