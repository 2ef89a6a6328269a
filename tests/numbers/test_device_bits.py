"""Approximate arithmetic of kernels on sm90: codes and scales that an H200 gave, which the published formulas miss."""

from __future__ import annotations

import pytest
import torch

from oracle.bounds.quantiser import identify, kin
from oracle.errors import DtypeError
from oracle.numbers import cuda_math, recipe_table
from oracle.numbers import recipes as R
from oracle.numbers.quantize import prepare, quantize
from oracle.numbers.rounding import f32
from oracle.numbers.scaling import Block

# amax of the group, an element, and the code that the H200 gave, of a randn input in bfloat16
CODES = {
    "deepseek_v3_1x128": ((2.40625, -1.6328125, 249), (2.625, -1.078125, 243), (2.625, -0.22265625, 225)),
    "lmdeploy_1x128": ((3.9375, -1.1953125, 241), (3.9375, -0.73828125, 235), (3.9375, 0.1845703125, 91)),
    "lmdeploy_token": ((19.25, -7.90625, 243), (19.25, -0.2041015625, 201), (19.25, 0.408203125, 81)),
    "fbgemm_row": ((23.0, -8.625, 243), (23.0, -2.15625, 227), (23.0, -1.078125, 219)),
    "sglang_group_v2": ((3.9375, -1.1953125, 241), (3.9375, -0.59765625, 233)),
    "sglang_token": ((19.25, -7.90625, 243), (19.25, -3.265625, 233)),
}
SCALES = {
    "deepseek_v3_1x128": ((1.6171875, "0x1.d92494p-9"), (1.875, "0x1.124926p-8"), (2.046875, "0x1.2b6db8p-8")),
    "lmdeploy_token": ((10.125, "0x1.724926p-6"), (11.875, "0x1.b24926p-6")),
    "fbgemm_row": ((11.875, "0x1.b24922p-6"), (14.8125, "0x1.0edb6cp-5"), (16.5, "0x1.2db6dcp-5")),
    "sglang_token": ((10.3125, "0x1.792494p-6"),),
}
SILU = (  # gate, up, and the scale of a group whose amax is silu(gate) * up: vLLM silu_and_mul_per_block_quant
    (6.3125, -5.8125, "0x1.4edb64p-4"),
    (11.0625, -18.5, "0x1.d3c74p-2"),
    (12.125, -11.375, "0x1.3b3f92p-2"),
    (2.953125, -2.859375, "0x1.257fb2p-6"),
    (8.625, 2.890625, "0x1.c7cfap-5"),
)


def group(amax: float, element: float = 0.0) -> torch.Tensor:
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = amax, element
    return x


class TestDivision:
    """Each recipe with the suffix gives what the H200 gave; the one that it is made of gives another code or scale."""

    @pytest.mark.parametrize("name", CODES)
    def test_codes(self, name: str) -> None:
        for amax, element, code in CODES[name]:
            made = [
                int(quantize(group(amax, element), recipe_table.get(n)).codes.view(torch.uint8)[0, 1])
                for n in (f"{name}_sm90", name)
            ]
            assert made[0] == code != made[1]

    @pytest.mark.parametrize("name", SCALES)
    def test_scales(self, name: str) -> None:
        for amax, scale in SCALES[name]:
            made = [float(quantize(group(amax), recipe_table.get(n)).scale) for n in (f"{name}_sm90", name)]
            assert made[0] == float.fromhex(scale) != made[1]

    def test_a_flushed_scale(self) -> None:
        """Under fast math a row of 2^-120 gets the scale 0; Triton keeps the subnormal one."""
        x = group(2.0**-120)
        assert float(quantize(x, recipe_table.get("sglang_token_sm90")).scale) == 0
        assert float(quantize(x, recipe_table.get("deepseek_v3_1x128_sm90")).scale) > 0


class TestNames:
    """Names are looked for over the blocks and with the floor of the call; a wrong bit has no name."""

    def test_other_blocks(self) -> None:
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
        declared = R.DEEPSEEK_V3_1X128.with_block(Block(1, 32))
        made = quantize(x, recipe_table.get("deepseek_v3_1x128_sm90").with_block(Block(1, 32)))
        assert identify(prepare(x), made.codes, made.scale, among=kin(declared))[0] == "deepseek_v3_1x128_sm90"
        made.codes.view(torch.uint8)[3, 5] ^= 1
        assert not identify(prepare(x), made.codes, made.scale, among=kin(declared))

    def test_another_floor(self) -> None:
        x, floored = group(1e-6), R.VLLM_GROUP.with_floor(1e-4)
        made = quantize(x, floored)
        assert identify(prepare(x), made.codes, made.scale, among=kin(floored))[0] == "vllm_group"
        assert "vllm_group" not in identify(prepare(x), made.codes, made.scale)


class TestExponential:
    """``silu`` as vLLM computes it, against scales of an H200; a correctly rounded SiLU gives others."""

    def test_scales(self) -> None:
        for gate, up, scale in SILU:
            g = torch.tensor([gate], dtype=torch.float64)
            made = [f32(f32(s * up).abs() / 448.0) for s in (cuda_math.silu(g), f32(g * torch.sigmoid(g)))]
            assert float(made[0]) == float.fromhex(scale) != float(made[1])

    def test_ends(self) -> None:
        x = torch.tensor([-torch.inf, -1e4, -0.0, 0.0, 1e4, torch.inf, torch.nan], dtype=torch.float64)
        made = cuda_math.silu(x)
        assert made[1:6].tolist() == [0.0, 0.0, 0.0, 1e4, torch.inf] and bool(torch.isnan(made[[0, 6]]).all())

    def test_within_a_device_error(self) -> None:
        """Four float32 steps from the true value at most; without the second fused step it is another function."""
        x = torch.linspace(-20, 20, 4001, dtype=torch.float64).to(torch.float32).double()
        made, true = cuda_math.silu(x), x * torch.sigmoid(x)
        assert float(((made - true) / true.abs().clamp(min=2.0**-100)).abs().max()) < 4 * 2.0**-23
        t = f32(-x * cuda_math.LOG2_E)
        n = torch.floor(t)
        split = f32(x * f32(1 / f32(f32(torch.exp2(t - n)) * torch.exp2(n) + 1)))
        assert int((split != made).sum()) > 100


class TestBits:
    """vLLM's kernels for 16-bit values: an H200 gave float16 keys whose largest bits are 51012 the scale of that."""

    def test_float16(self) -> None:
        x = torch.zeros(1, 128, dtype=torch.float16)
        x[0, 5] = -7.265625  # 51012 = 0xC744
        made = quantize(x, recipe_table.get("vllm_indexer_float16"))
        assert float(made.scale) == float(torch.tensor(51012.0) / 448.0) == 113.86607360839844
        assert float(quantize(x, recipe_table.get("vllm_indexer")).scale) < 0.02

    def test_other_dtypes_are_refused(self) -> None:
        with pytest.raises(DtypeError, match="float16 input alone"):
            quantize(group(1.0), recipe_table.get("vllm_ds_mla_float16"))
