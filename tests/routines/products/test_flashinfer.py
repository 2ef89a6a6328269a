"""FlashInfer's GEMM with bfloat16 operands: the quantiser inside the kernel is judged with the product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oracle
from oracle import errors
from oracle.numbers.quantize import quantize
from oracle.numbers.recipes import FLASHINFER_1X128, FLASHINFER_128X128, FLASHINFER_128X128_AMAX_FAULT, Recipe
from oracle.routines.products.contract import block_scaled
from oracle.tensorcore.predict import predict_product
from oracle.verdict.compare import Status

NAME = "fp8_blockscale_gemm_sm90"
M, N, K = 5, 192, 384


def operands(*, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    spread = torch.tensor([1.0, 30.0, 0.02]).repeat_interleave(128)
    return {
        "input": (torch.randn(M, K, generator=g) * spread).to(torch.bfloat16),
        "weight": (torch.randn(N, K, generator=g) * spread).to(torch.bfloat16),
    }


def kernel(
    inputs: dict[str, Tensor],
    weight_recipe: Recipe = FLASHINFER_128X128,
    *,
    ulps: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The kernel as the model has it; ``ulps`` moves every multiplier, as an approximate division may."""
    made = [quantize(inputs["input"], FLASHINFER_1X128), quantize(inputs["weight"], weight_recipe)]
    scales = [m.scale.clone() for m in made]
    for scale in scales:
        scale.view(torch.int32).add_(ulps)
    product = block_scaled(made[0].codes, made[1].codes, scales[0], scales[1])
    return predict_product(product, "sm90.promote128", out_dtype=dtype)


@pytest.mark.turns(4)
class TestVerdicts:
    """Every admissible quantisation passes; the shipped amax scan fails and is named."""

    def test_nominal_bits(self) -> None:
        inputs = operands()
        verdict = oracle.judge(NAME, inputs, kernel(inputs))
        assert verdict.status is Status.PASSED and verdict.matches == "flashinfer_1x128 and sm90.promote128"

    @pytest.mark.parametrize("ulps", [-2, 2])
    def test_approximate_scales(self, ulps: int) -> None:
        inputs = operands()
        verdict = oracle.judge(NAME, inputs, kernel(inputs, ulps=ulps, dtype=torch.float32))
        assert verdict.status is Status.PASSED and "codes that may flip" in verdict.basis

    @pytest.mark.usefixtures("unexplained")
    def test_quantised_weight(self) -> None:
        inputs = operands()
        out = kernel(inputs)
        made = quantize(inputs["weight"], FLASHINFER_128X128)
        given = {"input": inputs["input"], "weight": made.codes, "weight_scale": made.scale}
        assert oracle.judge(NAME, given, out).status is Status.PASSED
        wrong = {**given, "weight_scale": made.scale.roll(1, 1).contiguous()}
        assert oracle.judge(NAME, wrong, out).status is Status.FAILED

    def test_amax_scan(self) -> None:
        inputs = operands()
        inputs["weight"][100, 3] = 900.0  # in a row that the scan leaves out
        verdict = oracle.judge(NAME, inputs, kernel(inputs, FLASHINFER_128X128_AMAX_FAULT))
        assert verdict.status is Status.FAILED and verdict.explained_by == ("flashinfer_128x128_amax_fault",)
        assert verdict.unconstrained == 0

    def test_other_failures_are_not_called_that(self) -> None:
        inputs = operands()
        out = kernel(inputs)
        out[3] = 0
        verdict = oracle.judge(NAME, inputs, out)
        assert verdict.status is Status.FAILED and verdict.explained_by == () and verdict.pattern == "row 3 only"

    def test_reference_and_cpu(self) -> None:
        inputs = operands()
        truth = oracle.reference(NAME, inputs, out_dtype=torch.bfloat16)
        assert isinstance(truth, Tensor)
        for arch in ("sm90", "cpu"):
            assert oracle.judge(NAME, inputs, truth, arch=arch).status is Status.PASSED


class TestRefusals:
    """Pairs that the routine does not take, and scales where none belong."""

    def test_pairs(self) -> None:
        inputs = operands()
        made = quantize(inputs["input"], FLASHINFER_1X128)
        with pytest.raises(errors.DtypeError, match="quantise the weight"):
            oracle.reference(NAME, {**inputs, "input": made.codes, "input_scale": made.scale})
        with pytest.raises(errors.InputError, match="takes no input_scale"):
            oracle.reference(NAME, {**inputs, "input_scale": made.scale})
        with pytest.raises(errors.InputError, match="needs its weight_scale"):
            weight = quantize(inputs["weight"], FLASHINFER_128X128).codes
            oracle.reference(NAME, {"input": inputs["input"], "weight": weight})

    def test_values(self) -> None:
        inputs = operands()
        out = kernel(inputs)
        inputs["input"][0, 0] = torch.nan
        with pytest.raises(errors.InputError, match="NaN or infinity"):
            oracle.judge(NAME, inputs, out)
        short = {name: x[:, :200].contiguous() for name, x in operands().items()}
        with pytest.raises(errors.ShapeError, match="multiple of 128"):
            oracle.reference(NAME, short)
