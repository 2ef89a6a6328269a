"""The tightest class that holds an output: bits before intervals, narrow before wide, and none for a wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import oracle
from oracle.errors import NumericsError
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.classes import Class, tightest_class
from oracle.verdict.products import Part

pytestmark = pytest.mark.turns(4)


def product(k: int = 512) -> ScaledProduct:
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn) for rows in (4, 32))
    return ScaledProduct(a, b, torch.full((4, 1), 0.7), torch.full((32, 1), 1.3), k, 1)


def held(p: ScaledProduct, out: Tensor) -> Class:
    return tightest_class([Part(p)], out, "sm90")


@pytest.mark.parametrize(
    "name", ["sm90.chain", "sm90.promote128.scale_after", "sm90.chain.split2", "sm90.mma_sync.chain"]
)
def test_bits_come_first(name: str) -> None:
    """A chain over all of K, fast accumulation, is named as such whatever a contract promises."""
    found = held(product(), predict_product(product(), name, out_dtype=torch.float32))
    assert found == Class(name, True, 128)
    assert str(found) == f"bit-equal to {name} (128 elements)"


def test_a_float16_accumulator_is_named() -> None:
    p = product()
    half = replace(get("sm90.chain"), name="half", accumulator=torch.float16)
    out = predict_product(p, half, out_dtype=torch.float32)
    assert held(p, out).name == "sm90.chain with a float16 accumulator"
    assert not torch.equal(out, predict_product(p, "sm90.chain", out_dtype=torch.float32))


def test_intervals_from_the_narrowest_to_none() -> None:
    p = product(256)
    cuts = [get(f"sm90.chain.cut{64 * (1 + n % 3)}") for n in range(8)]
    tiles = [predict_product(p.columns(4 * n, 4 * n + 4), s, out_dtype=torch.float32) for n, s in enumerate(cuts)]
    out = torch.cat(tiles, dim=1)
    found = held(p, out)
    assert (found.bits, found.elements) == (False, 128)
    assert found.name in ("sm90.chain", "sm90.chain.split")
    out[2, 3] += 0.15
    assert held(p, out).name == "sm90.chain.any"
    out[2, 3] += 100
    found = held(p, out)
    assert (found.name, str(found)) == ("none", "no known class holds the output")


def test_of_a_contract() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(n, 256, generator=generator).to(torch.float8_e4m3fn) for n in (16, 128))
    inputs = {
        "a": a,
        "b": b,
        "a_scale": torch.rand(16, 2, generator=generator),
        "b_scale": torch.rand(1, 2, generator=generator),
    }
    out = oracle.predict("fp8_gemm_nt", inputs, numerics="sm90.promote128")
    assert isinstance(out, Tensor)
    assert oracle.classify("fp8_gemm_nt", inputs, out).name == "sm90.promote128"
    exact = oracle.reference("fp8_gemm_nt", inputs, out_dtype=torch.float32)
    assert isinstance(exact, Tensor)
    assert oracle.classify("fp8_gemm_nt", inputs, exact, arch="cpu") == Class("ieee32.any", False, 16 * 128)
    assert oracle.classify("fp8_gemm_nt", inputs, 2 * exact, arch="cpu").name == "none"
    with pytest.raises(NumericsError, match="no model for arch 'sm61'"):
        oracle.classify("fp8_gemm_nt", inputs, out, arch="sm61")
    with pytest.raises(oracle.OracleError, match="no scaled product"):
        oracle.classify("ceil_to_ue8m0", {"x": torch.ones(4)}, torch.ones(4))
