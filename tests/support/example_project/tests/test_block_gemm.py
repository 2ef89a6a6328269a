"""The kernel against every case of a profile, and one call of our own."""

from __future__ import annotations

import pytest
import torch
from example_kernels import block_gemm


@pytest.mark.oracle_cases("fp8_gemm_nt", where=lambda case: case["k"] <= 640)
def test_cases(oracle_case, assert_conforms):
    out = block_gemm(**oracle_case.inputs(), **oracle_case.call_options())
    assert_conforms(out, oracle_case, arch="cpu")


def test_our_shape(assert_conforms):
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "a": torch.randn(3, 256, generator=generator).to(torch.float8_e4m3fn),
        "a_scale": torch.rand(3, 2, generator=generator) + 0.5,
        "b": torch.randn(192, 256, generator=generator).to(torch.float8_e4m3fn),
        "b_scale": torch.rand(2, 2, generator=generator) + 0.5,
    }
    out = block_gemm(**inputs, out_dtype=torch.bfloat16)
    verdict = assert_conforms(out, "fp8_gemm_nt", inputs, arch="cpu")
    assert verdict.outside == 0
