"""What peers compute by their own releases is not refused; beside each stands what no release computes."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.routines import get
from oracle.routines.mx.contract import pack
from oracle.verdict.compare import Status, Verdict

INF = torch.inf


def buckets(x: Tensor, scale: Tensor, *, nan_code: int) -> Tensor:
    """DeepGEMM's codes of float32 ``x`` ``[M, K]`` under ``scale`` ``[M, 1]``: the boundaries passed, no -0."""
    quotient = x * (1.0 / scale)
    boundaries = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    index = sum((quotient.abs() > boundary).to(torch.uint8) for boundary in boundaries)
    assert isinstance(index, Tensor)
    index = torch.where(quotient.isnan(), nan_code, index).to(torch.uint8)
    return index | ((quotient < 0) & (index != 0)).to(torch.uint8) << 3


class TestDeepGemmFp4:
    """``per_token_cast_to_fp4``: an infinite element makes the scale infinite and its row's quotients NaN, which the
    release of April 2026 codes 7 (``torch.bucketize``) and that of June 0 (comparisons). Codes are int8."""

    X = torch.randn(3, 32, generator=torch.Generator().manual_seed(5))
    X[1, 3], X[1, 4] = INF, -INF

    def judged(self, nan_code: int, dtype: torch.dtype = torch.int8) -> Verdict:
        scale = self.X.abs().amax(dim=1, keepdim=True) / torch.full((1, 1), 6.0)
        q = pack(buckets(self.X, scale, nan_code=nan_code)).view(dtype)
        return get("per_token_cast_to_fp4").judge({"x": self.X}, {"q": q, "scale": scale}, gran_k=32)

    def test_both_releases_pass(self) -> None:
        for code, recipe in ((0, "deepgemm_fp4"), (7, "deepgemm_2604_fp4")):
            for dtype in (torch.int8, torch.uint8):
                verdict = self.judged(code, dtype)
                assert verdict.status is Status.PASSED and verdict.matches == recipe, verdict.summary

    def test_another_code_of_nan_fails(self) -> None:
        for code in (1, 6):
            assert self.judged(code).status is Status.FAILED

    def test_codes_of_both_releases_in_one_output_fail(self) -> None:
        """One recipe admits the whole output."""
        scale = self.X.abs().amax(dim=1, keepdim=True) / torch.full((1, 1), 6.0)
        old, new = (buckets(self.X, scale, nan_code=code) for code in (7, 0))
        mixed = pack(torch.where(torch.arange(32) < 4, old, new))
        verdict = get("per_token_cast_to_fp4").judge({"x": self.X}, {"q": mixed, "scale": scale}, gran_k=32)
        assert verdict.status is Status.FAILED


class TestModelOptimizer:
    """``nvfp4_quantize`` under an inverse global scale: Model-Optimizer 0.47 raises a block scale to 2^-9, the least of
    E4M3; its earlier releases let it round to 0."""

    X = torch.randn(4, 64, generator=torch.Generator().manual_seed(6))
    X[2, :16] *= 2.0**-30
    G = (X.abs().amax() / 2688.0).reshape(1)

    def output(self, recipe: str) -> dict[str, Tensor]:
        made = get("nvfp4_quantize").predict(
            {"x": self.X, "global_scale": self.G}, numerics=recipe, is_global_scale_inversed=True, layout="linear"
        )
        assert isinstance(made, dict)
        return made

    def judged(self, output: dict[str, Tensor]) -> Verdict:
        return get("nvfp4_quantize").judge(
            {"x": self.X, "global_scale": self.G}, output, is_global_scale_inversed=True, layout="linear"
        )

    def test_both_releases_pass(self) -> None:
        for recipe, least in (("modelopt_nvfp4", 0), ("modelopt_0_47_nvfp4", 1)):
            made = self.output(recipe)
            assert int(made["scale"].view(torch.uint8)[2, 0]) == least
            assert self.judged(made).status is Status.PASSED

    def test_a_larger_least_scale_fails(self) -> None:
        made = self.output("modelopt_0_47_nvfp4")
        raw = made["scale"].view(torch.uint8).clone()
        raw[2, 0] = 2
        assert self.judged(made | {"scale": raw}).status is Status.FAILED
