"""Calls that pass the gate where they are made, and those that are raised there."""

from __future__ import annotations

import pytest
import torch

import oracle
from oracle.errors import OptionError
from oracle.harness.gating import gated
from tests.support import watched_kernels

CAST, GEMM = watched_kernels.BINDINGS
X = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
W = torch.randn(128, 256, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)


def product(config: str) -> torch.Tensor:
    a, a_scale = watched_kernels.per_token_cast(X)
    b_scale = W.float().view(1, 128, 2, 128).abs().amax((1, 3)) / 448
    b = (W.float() / b_scale.repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
    return watched_kernels.block_gemm(a, a_scale, b, b_scale, config=config)


class TestGated:
    """Two routines of a library, one of whose configurations is wrong."""

    @pytest.mark.parametrize("config", ["plain", "reversed"])
    def test_right_calls(self, config: str) -> None:
        """Every call is counted, and its result is that of the routine."""
        due = product(config)
        with gated(CAST, GEMM) as seen:
            assert torch.equal(product(config), due)
        assert seen.accepted == 2 and not seen.left

    def test_a_wrong_call(self) -> None:
        """Negative: it raises where it is made, with the fault; outside of the gate it does not."""
        with gated(GEMM) as seen, pytest.raises(AssertionError, match="A scale swapped") as raised:
            product("wrong_scale")
        assert isinstance(raised.value, oracle.NonconformanceError) and seen.accepted == 0
        product("wrong_scale")

    def test_an_operator(self) -> None:
        """Of torch, by name; a call that its binding does not describe is counted with the reason."""
        a, one = X.to(torch.float8_e4m3fn), torch.ones(())
        b = W.to(torch.float8_e4m3fn).t()
        with gated("torch:_scaled_mm") as seen:
            torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
            torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, scale_result=one)
        assert seen.accepted == 1
        ((reason, count),) = seen.left.items()
        assert count == 1 and "scale_result" in reason

    def test_what_is_refused(self) -> None:
        with pytest.raises(OptionError, match="flashinfer.gemm:bmm_fp8"):
            gated("flashinfer.gemm:bmm_fp")
        with pytest.raises(OptionError, match="name a routine"):
            gated()
