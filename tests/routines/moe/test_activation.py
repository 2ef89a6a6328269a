"""silu and mul by itself: every right float32 evaluation passes, special values are what IEEE arithmetic gives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oracle.errors import NumericsError, OptionError, ShapeError
from oracle.routines import Call, get
from oracle.verdict.compare import Status, Verdict

NAME = "silu_and_mul"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INF, NAN = math.inf, math.nan


def judge(x: Tensor, out: Tensor, **options: object) -> Verdict:
    return get(NAME).judge({"x": x}, out, arch="cpu", numerics=None, **options)


def values(seed: int, dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    return (torch.randn(7, 64, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def kernel(x: Tensor, *, variant: int = 0, limit: float | None = None, each: bool = False) -> Tensor:
    """A kernel of its own in float32: the variant picks among right evaluations of silu."""
    gate, up = x.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    silu = {
        0: lambda: gate / (1 + torch.exp(-gate)),
        1: lambda: gate * torch.sigmoid(gate),
        2: lambda: gate * (1 / (1 + torch.exp(-gate) * (1 + 2.0**-22))),
    }[variant]()
    return ((silu.to(x.dtype).float() if each else silu) * up).to(x.dtype)


class TestRightKernels:
    """Whatever formula, within the errors of a device's exponential and reciprocal."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @given(
        seed=st.integers(0, 10**6),
        variant=st.integers(0, 2),
        each=st.booleans(),
        limit=st.sampled_from([None, 0.5, 7.0]),
        spread=st.sampled_from([0.01, 3.0, 40.0]),
    )
    def test_pass(
        self, dtype: torch.dtype, seed: int, variant: int, each: bool, limit: float | None, spread: float
    ) -> None:
        x = values(seed, dtype, spread)
        verdict = judge(x, kernel(x, variant=variant, limit=limit, each=each), limit=limit, round_silu=each)
        assert not verdict.status.is_failure and verdict.unconstrained == 0, verdict.summary

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 3, 4, 2)])
    def test_any_rank(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        x = values(1, dtype).flatten()[: math.prod(shape)].reshape(shape)
        made = get(NAME).reference({"x": x})
        assert isinstance(made, Tensor) and made.dtype == dtype and made.shape == (*shape[:-1], shape[-1] // 2)
        assert judge(x, made).status is Status.PASSED

    def test_the_interval_is_one_value_nearly_everywhere(self) -> None:
        x = values(2, torch.bfloat16)
        (sets,) = get(NAME).admissible(Call(get(NAME), {"x": x}), None)
        ranges = sets.ranges({"out": get(NAME).reference({"x": x})})
        assert ranges is not None
        assert float((ranges["out"].low != ranges["out"].high).double().mean()) < 0.05


class TestFaults:
    """Another function, another half, another rounding."""

    @pytest.mark.parametrize(
        "fault",
        ["gelu", "halves", "no silu", "no up", "limit ignored", "limit on both sides of the gate", "row before"],
    )
    def test_fail(self, fault: str) -> None:
        x, limit = values(3, torch.bfloat16), 1.5
        gate, up = x.float().clamp(max=limit).chunk(2, dim=-1)[0], x.float().chunk(2, dim=-1)[1].clamp(-limit, limit)
        wrong = {
            "gelu": lambda: (torch.nn.functional.gelu(gate) * up).to(x.dtype),
            "halves": lambda: kernel(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1), limit=limit),
            "no silu": lambda: (gate * up).to(x.dtype),
            "no up": lambda: torch.nn.functional.silu(gate).to(x.dtype),
            "limit ignored": lambda: kernel(x),
            "limit on both sides of the gate": lambda: kernel(x.clamp(-limit, limit)),
            "row before": lambda: kernel(x, limit=limit).roll(1, dims=0),
        }[fault]()
        assert judge(x, wrong, limit=limit).status is Status.FAILED
        assert judge(x, kernel(x, limit=limit), limit=limit).status is Status.PASSED

    def test_a_rounding_of_silu_is_seen_both_ways(self) -> None:
        x = values(4, torch.bfloat16)
        for each in (False, True):
            assert judge(x, kernel(x, each=each), round_silu=each).status is Status.PASSED
            assert judge(x, kernel(x, each=each), round_silu=not each).status is Status.FAILED


class TestSpecialValues:
    """NaN in, NaN out; an infinite gate above is an infinity; the rest is open or follows from the sign."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("gate", "up", "due"),
        [
            (NAN, 1.0, NAN),
            (1.0, NAN, NAN),
            (INF, 2.0, INF),
            (INF, -2.0, -INF),
            (INF, 0.0, NAN),
            (1.0, INF, INF),
            (-1.0, INF, -INF),
            (0.0, INF, NAN),
            (INF, -INF, -INF),
            (0.0, 3.0, 0.0),
            (-0.0, 3.0, 0.0),
        ],
    )
    def test_determined(self, dtype: torch.dtype, gate: float, up: float, due: float) -> None:
        x = torch.tensor([[gate, 1.0, up, 2.0]], dtype=dtype)
        out = kernel(x)
        assert (math.isnan(float(out[0, 0])) and math.isnan(due)) or float(out[0, 0]) == due
        assert not judge(x, out).status.is_failure
        for wrong in (1.0, NAN, INF, -INF):
            if wrong != due and not (math.isnan(wrong) and math.isnan(due)):
                spoiled = out.clone()
                spoiled[0, 0] = wrong
                assert judge(x, spoiled).status is Status.FAILED, wrong

    @pytest.mark.parametrize(("gate", "up"), [(-INF, 1.0), (-1e4, INF)])
    def test_undetermined(self, gate: float, up: float) -> None:
        x = torch.tensor([[gate, 1.0, 1.0, up, 2.0, 3.0]])
        for answer in (NAN, 0.0, -INF):
            out = kernel(x)
            out[0, 0] = answer
            verdict = judge(x, out)
            assert not verdict.status.is_failure and verdict.unconstrained == 1
            out[0, 1] += 1
            assert judge(x, out).status is Status.FAILED

    def test_a_limit_makes_infinities_ordinary_and_opens_nan(self) -> None:
        """A device minimum drops NaN; a clamped infinity is the limit."""
        x = torch.tensor([[INF, NAN, 1.0, 1.0, INF, 2.0, 1.0, -INF]])
        out = kernel(x, limit=2.0)
        assert judge(x, out, limit=2.0).status is Status.PASSED
        for index, wrong, failed in ((0, 3.0, True), (1, 3.0, False), (3, 3.0, True)):
            spoiled = out.clone()
            spoiled[0, index] = wrong
            assert judge(x, spoiled, limit=2.0).status.is_failure is failed


class TestCalls:
    """Bad calls are named."""

    def test_named(self) -> None:
        x = values(5, torch.bfloat16)
        with pytest.raises(ShapeError, match="gate and up"):
            judge(x[:, :-1].contiguous(), x)
        for limit in (0, -1.0, True, "7"):
            with pytest.raises(OptionError, match="limit"):
                judge(x, kernel(x), limit=limit)
        with pytest.raises(NumericsError, match="one numerics"):
            get(NAME).judge({"x": x}, kernel(x), arch="cpu", numerics="ieee32.any")
