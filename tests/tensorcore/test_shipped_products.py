"""Products of other projects on an H200: the schedule whose every bit each has, and one beside it that has not.

Inputs follow from the id of a case; of an output only the digest of its bytes is kept. The outputs are those of the
first calls that a run of the gallery could not name (torch 2.11.0, Triton 3.6.0, CUDA 13.0).
"""

from __future__ import annotations

import hashlib

import pytest
import torch

from oracle import judge
from oracle.errors import NumericsError
from oracle.harness.gallery import every_bit
from oracle.routines import cases, get
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get as schedule
from oracle.tensorcore.schedules import schedules
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.compare import Status

pytestmark = pytest.mark.turns(4)

BLOCKS = "fp8_gemm_nt/e4m3xe4m3-{}/1x128:128x128/m=33,n={},k={}/family={}"
MM = "cutlass_scaled_mm/e4m3xe4m3-bf16"
SEEN = {  # kernel: case, schedule, digest, a schedule that differs from it in one thing
    "torchao blockwise_fp8_gemm": (
        BLOCKS.format("bf16", 256, 384, "codes/seed=1"), "sm90.mma_f16.promote128.row_then_col.fma",
        "80ab721831a147c260b2cae531d18e3c8c7de76c4013bed40a7df53e2b43d8ec", "sm90.mma_sync.promote128.row_then_col.fma",
    ),
    "torchao triton_fp8_gemm_1x128_128x128": (
        BLOCKS.format("f32", 256, 384, "randn/seed=2"), "sm90.promote128.row_then_col.fma",
        "b0367a82c3208482b1ff85a84c9a37d12c8ae43b048bb2f6b92f9ea22c728ee6", "sm90.promote128.row_then_col",
    ),
    "SGLang w8a8_block_fp8_matmul, a and b exchanged": (
        BLOCKS.format("f32", 256, 384, "randn/seed=2"), "sm90.promote128.col_then_row.fma",
        "d7ca7d9abc2e5a1434b75f8decb50dd926d3f41fef96d91857a597203225b298", "sm90.promote128.row_then_col.fma",
    ),
    "SGLang w8a8_block_fp8_matmul, K in two parts": (
        BLOCKS.format("f32", 256, 384, "randn/seed=2"), "sm90.promote128.row_then_col.fma.split2",
        "04701ab453e3fb1637d228ece4a48256716d7e4145c07a0a79022b9597308a35", "sm90.promote128.row_then_col.fma",
    ),
    "FBGEMM matmul_fp8_row, slow": (
        f"{MM}/tensor:channel/m=32,n=192,k=384/family=randn/seed=1", "sm90.promote32.scale_after.product",
        "c2aac12dd327ff66f419249acb3f45f1959b9ae1a8307901b471eeda401a88d9", "sm90.promote64.scale_after.product",
    ),
    "LMDeploy blocked_gemm_fp8": (
        BLOCKS.format("bf16", 128, 640, "randn/seed=1"), "sm90.rescaled128",
        "185adc70ba8b289901a36177b4dacd46defa861f5c9bd03cdc27c09496f25e6c", "sm90.promote128",
    ),
    "FBGEMM matmul_fp8_block": (
        "gemm_fp8_nt_groupwise/e4m3xe4m3-bf16/128x128:128x128/m=129,n=64,k=256/family=randn/seed=1", "sm90.rescaled128",
        "414e3d7000a643aa1e07dac3d3f7d9fd9791db9292d1b1c2a41180eb9bc7f66e", "sm90.promote128",
    ),
    "FlagGems cutlass_scaled_mm, SGLang triton_scaled_mm": (
        f"{MM}/1x128:128x128/m=33,n=128,k=128/bias=bf16/family=randn/seed=1", "sm90.chain.row_then_col.bias_after_cast",
        "e3a23d4907faa87d784965c420e7d50a7306f733f5feb01c7060f1a90d41dd0a", "sm90.chain.row_then_col",
    ),
    "sglang-kernel fp8_scaled_mm": (
        f"{MM}/tensor:channel/m=9,n=128,k=128/family=small/seed=0", "sm90.chain.flushed",
        "2241f57c9ef36b8d8ec13a53dbf59ca868882d848eea2861fe35771067ffc64a", "sm90.chain",
    ),
}  # fmt: skip  # a table, one row a line


def predicted(case: str, name: str) -> torch.Tensor:
    parsed = cases.parse(case)
    made = get(parsed.contract).predict(parsed.inputs(), numerics=name, **parsed.call_options())
    assert isinstance(made, torch.Tensor)
    return made


def digest(out: torch.Tensor) -> str:
    return hashlib.sha256(out.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("kernel", SEEN)
def test_every_bit(kernel: str) -> None:
    case, name, due, other = SEEN[kernel]
    assert digest(predicted(case, name)) == due
    assert digest(predicted(case, other)) != due


@pytest.mark.parametrize("name", ["row_then_col.fma", "col_then_row.fma"])
def test_both_engines_join_scales_by_one_fma(name: str) -> None:
    pytest.importorskip("numba")
    case = cases.parse(BLOCKS.format("f32", 130, 300, "randn/seed=4"))
    a, b, a_scale, b_scale = (case.inputs()[x] for x in ("a", "b", "a_scale", "b_scale"))
    product = ScaledProduct(a[:5], b, a_scale[:5], b_scale, 128, 128)
    for base in ("sm90.promote128", "sm90.mma_f16.promote128"):
        made = [predict_product(product, f"{base}.{name}", out_dtype=torch.float32, engine=e) for e in ("cpu", "torch")]
        assert torch.equal(*made)
        assert not torch.equal(made[0], predict_product(product, base, out_dtype=torch.float32))


def test_an_output_is_named_by_what_its_contract_refuses() -> None:
    """A rescaled sum fails, and has a name, which cannot be declared; with one other bit, anywhere, it has none."""
    case = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=160,n=256,k=256/family=randn/seed=1"
    out, parsed = predicted(case, "sm90.rescaled128"), cases.parse(case)
    call = parsed.contract, parsed.inputs(), parsed.call_options()
    assert every_bit(*call, out, "sm90") == "sm90.rescaled128"
    assert judge(parsed.contract, parsed.inputs(), out, arch="sm90", explain="off").status is Status.FAILED
    with pytest.raises(NumericsError, match="is a known fault .*never promoted.*not declared"):
        judge(parsed.contract, parsed.inputs(), out, arch="sm90", numerics="sm90.rescaled128")
    for i, j in ((0, 0), (159, 255)):  # looked at, and beyond the sample
        changed = out.clone()
        changed[i, j] += 1.0
        assert every_bit(*call, changed, "sm90") == ""
    assert every_bit(*call, out[1:], "sm90") == every_bit(*call, out, "cpu") == ""


def test_a_zero_scale_makes_a_rescaled_sum_nan() -> None:
    """0 times the reciprocal of 0, or the sum times a ratio to 0; a promoted sum skips the block."""
    a = torch.ones(2, 256).to(torch.float8_e4m3fn)
    for scales in ([0.0, 1.0], [1.0, 0.0]):
        product = ScaledProduct(a, a, torch.tensor([scales]).expand(2, 2), torch.ones(1, 2), 128, 128)
        made = predict_product(product, "sm90.rescaled128", out_dtype=torch.bfloat16)
        assert bool((torch.isnan(made) | torch.isinf(made)).all())
        right = predict_product(product, "sm90.promote128", out_dtype=torch.bfloat16)
        assert right.tolist() == [[128.0] * 2] * 2


def test_a_number_in_the_name_of_a_promotion() -> None:
    made = schedule("sm90.promote96.scale_after")
    assert (made.interval, made.name) == (96, "sm90.promote96.scale_after")
    assert made not in schedules()
    for wrong in ("sm90.promote0", "sm90.promote096", "sm90.promote64.fast", "sm90.chain64"):
        with pytest.raises(NumericsError, match="no schedule"):
            schedule(wrong)


def test_a_bias_that_is_not_there_cannot_be_added_late() -> None:
    a = torch.ones(1, 32).to(torch.float8_e4m3fn)
    product = ScaledProduct(a, a, torch.ones(1, 1), torch.ones(1, 1), 32, 1)
    with pytest.raises(NumericsError, match="adds a bias to the stored output, and there is none"):
        predict_product(product, "sm90.chain.row_then_col.bias_after_cast", out_dtype=torch.bfloat16)
