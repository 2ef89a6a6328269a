"""The exact bits of every recipe: against recorded hardware output, exact rationals, and the properties
they must have.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from operator import attrgetter

import numpy as np
import pytest
import slow_quantiser as slow
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from oracle.errors import DtypeError, OptionError, ShapeError
from oracle.numbers import mx_recipes as M
from oracle.numbers import recipe_table
from oracle.numbers import recipes as R
from oracle.numbers import scaling as S
from oracle.numbers.formats import E2M3, E3M2, E4M3FN, decode
from oracle.numbers.quantize import (
    f32,
    per_tensor_dequantize,
    prepare,
    quantize,
    seen_by_row_as_column,
    suits,
    to_codes,
)
from oracle.truth.gemm import take_rows
from tests.support.paths import SHARED

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CAPTURE = SHARED / "captures" / "h200_vllm_group_quant.safetensors"
ROWS = [  # fast math has its own tests, against the device's own bits; MX and NVFP4 stand in test_mx_recipes.py
    r
    for r in recipe_table.of_element(E4M3FN)
    if r.block.rows == 1
    and r.formula is not R.ScaleFormula.GIVEN
    and r.arithmetic is R.Arithmetic.IEEE
    and r.scan is not R.AmaxScan.FLOAT16_BITS
]
NO_LOG = [  # the rationals take no steps in bfloat16, round to nearest even and keep the sign of zeros
    r
    for r in ROWS
    if (r.power_of_two is None or not r.power_of_two.name.startswith("EXP2"))
    and suits(r, torch.float32)
    and (r.rounding, r.zero_sign) == (R.CodeRounding.NEAREST_EVEN, R.ZeroSign.KEPT)
]


def bits(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def dequantized(codes: torch.Tensor, scale: torch.Tensor, scaling: S.Scaling) -> torch.Tensor:
    """``scale * value(codes)``, exactly: float64."""
    return decode(codes, scaling.element) * scaling.grid(codes.shape).spread(decode(scale))


def mixed(rows: int, columns: int, dtype: torch.dtype, seed: int = 3) -> torch.Tensor:
    """Normal values with a magnitude of their own per row, sprinkled with +-0."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns)) * np.exp2(rng.integers(-12, 12, (rows, 1)))
    values[rng.random((rows, columns)) < 0.05] = 0.0
    values[rng.random((rows, columns)) < 0.02] = -0.0
    return torch.from_numpy(values).to(torch.float32).to(dtype)


@pytest.mark.needs_shared(f"captures/{CAPTURE.name}")
class TestCapture:
    """vLLM's per_token_group_fp8_quant on an H200: scale = RN(max(amax, 1e-10)/448), code = E4M3(x / scale)."""

    @pytest.fixture
    def tensors(self):
        return load_file(CAPTURE)

    def test_every_bit_is_predicted(self, tensors):
        made = quantize(tensors["x_bf16"], R.VLLM_GROUP)
        assert same(made.scale, tensors["out.scale"])
        assert same(made.codes, tensors["out.q"])

    def test_nan_and_inf_become_minus_448(self, tensors):
        x = tensors["x_bf16"]
        undefined = torch.isnan(x) | torch.isinf(x)
        assert int(undefined.sum()) == 2
        assert bits(tensors["out.q"])[undefined].tolist() == [0xFE, 0xFE]

    def test_the_reciprocal_flips_eight_codes(self, tensors):
        """Multiplying by the rounded reciprocal instead of dividing: the twin that must differ."""
        other = quantize(tensors["x_bf16"], R.SGLANG_TRITON_ROW)
        assert same(other.scale, tensors["out.scale"])
        assert int((bits(other.codes) != bits(tensors["out.q"])).sum()) == 8


class TestFloat32Emulation:
    """A float32 operation is the float64 operation rounded once: 53 >= 2*24 + 2 (Figueroa 1995)."""

    @given(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
    def test_product_and_quotient_equal_the_rounded_rational(self, a, b):
        x, y = torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)
        expected = slow.rne(Fraction(a) * Fraction(b))
        got = float(f32(x * y))
        assert math.isinf(got) if expected == slow.INF else Fraction(got) == expected
        if b:
            expected = slow.rne(Fraction(a) / Fraction(b))
            got = float(f32(x / y))
            assert math.isinf(got) if expected == slow.INF else Fraction(got) == expected

    def test_the_constant_is_the_rounded_reciprocal(self):
        one = torch.ones(1, 128, dtype=torch.bfloat16)
        assert Fraction(float(quantize(one, R.VLLM_TRITON_GROUP).scale)) == slow.rne(Fraction(1, 448))


class TestAgainstRationals:
    """Every recipe without a logarithm, derived a second time in exact rationals."""

    @pytest.mark.parametrize("recipe", NO_LOG, ids=lambda r: r.name)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_scale_and_codes(self, recipe, dtype):
        width = recipe.block.columns or 24
        x = mixed(6, width, DTYPES[dtype], seed=len(recipe.name))
        x[0, 0] = 448.0 if recipe.name.startswith("torchao_mx") else 3.5
        made = quantize(x, recipe)
        for row in range(x.shape[0]):
            values = decode(x)[row].tolist()
            scale, codes = slow.quantise_group(values, dtype, recipe)
            assert Fraction(float(made.scale[row, 0])) == scale
            assert bits(made.codes)[row].tolist() == codes

    @pytest.mark.parametrize(
        "recipe", [R.DEEPGEMM_128X128, R.TE_BLOCKWISE_128X128, R.DEEPGEMM_128X1_UE8M0], ids=lambda r: r.name
    )
    def test_blocks_of_rows(self, recipe):
        small = recipe.with_block(S.Block(3, recipe.block.columns if recipe.block.columns == 1 else 4))
        x = mixed(7, 10, torch.bfloat16)
        made, values = quantize(x, small), decode(x)
        r, c = small.block.rows, small.block.columns
        for i in range(-(-7 // r)):
            for j in range(-(-10 // c)):
                part = values[i * r : (i + 1) * r, j * c : (j + 1) * c]
                scale, codes = slow.quantise_group(part.flatten().tolist(), "bfloat16", small)
                assert Fraction(float(made.scale[i, j])) == scale
                assert bits(made.codes)[i * r : (i + 1) * r, j * c : (j + 1) * c].flatten().tolist() == codes


class TestUnsaturated:
    """torch's cast gave NaN beyond the range before 2.13: an infinite element beside finite ones."""

    @pytest.mark.parametrize("recipe", [R.DEEPGEMM_1X128_UE8M0, R.DEEPGEMM_1X128_UE8M0_OPEN], ids=lambda r: r.name)
    def test_an_infinite_element(self, recipe):
        x = torch.tensor([[math.inf, -math.inf, 3.0, 0.0] * 32], dtype=torch.float32)
        ends = [448.0, -448.0] if recipe.saturates else [math.nan, math.nan]
        codes = quantize(x, recipe).codes
        assert decode(codes)[0, :4].tolist() == pytest.approx([*ends, 0.0, 0.0], abs=0, nan_ok=True)

    def test_a_finite_quotient_stays(self):
        """Of a declared recipe that does not saturate every finite code is that of the one that does."""
        x = mixed(6, 256, torch.bfloat16, seed=3).nan_to_num(0.0, 0.0, 0.0)
        kept, open_ = (quantize(x, r).codes for r in (R.DEEPGEMM_1X128_UE8M0, R.DEEPGEMM_1X128_UE8M0_OPEN))
        assert torch.equal(bits(kept), bits(open_))

    def test_a_format_without_nan_saturates(self):
        with pytest.raises(ValueError, match="saturates"):
            R.like(recipe_table.get("modelopt_mxfp4"), "open", saturates=False)


class TestTieLattice:
    """amax = 448 s: every midpoint of two codes, times s, is an exact tie and goes to the even code."""

    @pytest.mark.parametrize("exponent", [-120, -40, -7, 0, 13, 100])
    @pytest.mark.parametrize(
        "recipe",
        [R.VLLM_GROUP, R.DEEPGEMM_1X128, R.TRTLLM_1X128, R.VLLM_GROUP_UE8M0_BITS],
        ids=lambda r: r.name,
    )
    def test_all_midpoints_and_codes(self, recipe, exponent):
        values = [float(v) for v in slow.E4M3]
        middles = [(a + b) / 2 for a, b in zip(values, values[1:], strict=False)]
        lattice = [sign * v for v in values + middles for sign in (1.0, -1.0)]
        expected = [slow.code_of(Fraction(v), math.copysign(1.0, v) < 0) for v in lattice]
        group = torch.tensor(lattice + [448.0] * (512 - len(lattice)), dtype=torch.float64)
        x = (group * 2.0**exponent).to(torch.float32).reshape(1, -1)
        assert torch.equal(x.to(torch.float64), group.reshape(1, -1) * 2.0**exponent), "the lattice is exact in float32"
        made = quantize(x, recipe.with_block(S.Block(1, 512)).with_floor(0.0))
        assert float(made.scale) == 2.0**exponent
        assert bits(made.codes)[0, : len(lattice)].tolist() == expected

    def test_half_up_would_show(self):
        """The negative test: of the 126 midpoints half lie above an even code."""
        values = [float(v) for v in slow.E4M3]
        middles = torch.tensor([[(a + b) / 2 for a, b in zip(values, values[1:], strict=False)] + [448.0, 448.0]])
        codes = bits(quantize(middles, R.VLLM_GROUP.with_floor(0.0)).codes)[0, :126].int()
        half_up = torch.arange(1, 127)
        assert int((codes != half_up).sum()) == 63


class TestSpecials:
    """Zero groups, -0, subnormals, NaN and infinity do what each record says."""

    def group(self, *values: float, fill: float = 1.0) -> torch.Tensor:
        return torch.tensor([[*values, *([fill] * (128 - len(values)))]], dtype=torch.float32)

    @pytest.mark.parametrize(
        ("recipe", "scale", "code"),
        [
            (R.DEEPGEMM_1X128, float(np.float32(1e-4) / np.float32(448)), 0),
            (R.VLLM_GROUP, float(np.float32(1e-10) / np.float32(448)), 0),
            (R.VLLM_GROUP_UE8M0, 2.0**-33, 0),
            (R.VLLM_GROUP_UE8M0_BITS, 2.0**-42, 0),
            (R.VLLM_TOKEN, float(np.float32(1 / (448 * 512))), 0),
            (R.VLLM_TENSOR, 0.0, 0x7E),
            (R.SGLANG_TOKEN, 0.0, 0),
            (R.SGLANG_TOKEN_SMALL, 0.0, 0x7E),
            (R.TRTLLM_1X128, 1.0, 0),
            (R.TRTLLM_1X128_UE8M0, 1.0, 0),
            (R.TE_BLOCKWISE_1X128, 1.0, 0),
            (R.TE_MXFP8_1X32, 2.0**-127, 0),
            (R.TORCHAO_MX_FLOOR, 2.0**-127, 0),
            (R.DEEPSEEK_V3_1X128, 0.0, 0x7F),
        ],
        ids=lambda p: p.name if isinstance(p, R.Recipe) else "",
    )
    def test_zero_group(self, recipe, scale, code):
        made = quantize(self.group(fill=0.0), recipe)
        assert float(made.scale.flatten()[0]) == scale
        assert set(bits(made.codes).flatten().tolist()) == {code}

    @pytest.mark.parametrize(
        "recipe", [R.VLLM_GROUP, R.DEEPGEMM_1X128, R.TRTLLM_1X128, R.TE_BLOCKWISE_1X128], ids=lambda r: r.name
    )
    def test_signs_of_zero_and_of_underflow_stay(self, recipe):
        made = quantize(self.group(0.0, -0.0, 1e-30, -1e-30, -1.0), recipe)
        assert bits(made.codes)[0, :5].tolist() == [0x00, 0x80, 0x00, 0x80, 0xFE]

    def test_subnormal_codes_are_kept(self):
        x = self.group(*[m * 2.0**-9 for m in range(1, 8)], 448.0)
        assert bits(quantize(x, R.VLLM_GROUP).codes)[0, :7].tolist() == [1, 2, 3, 4, 5, 6, 7]

    @pytest.mark.parametrize(
        ("recipe", "finite_scale", "code"),
        [
            (R.VLLM_GROUP, True, 0xFE),
            (R.VLLM_TOKEN, True, 0x7E),
            (R.TRTLLM_1X128, True, 0x7F),
            (R.FLASHINFER_MXFP8_1X32, True, 0x7E),
            (R.DEEPGEMM_1X128, False, 0x7F),
            (R.TORCHAO_ROW, False, 0x7F),
        ],
        ids=lambda p: p.name if isinstance(p, R.Recipe) else "",
    )
    def test_nan(self, recipe, finite_scale, code):
        made = quantize(self.group(float("nan"), -1.0), recipe)
        assert math.isfinite(float(made.scale[0, 0])) is finite_scale
        assert int(bits(made.codes)[0, 0]) == code
        poisoned = not finite_scale
        assert (int(bits(made.codes)[0, 1]) == 0x7F) is poisoned

    def test_nan_amax_ends_in_byte_254_of_deepgemm(self):
        made = quantize(self.group(float("nan"), -1.0), R.DEEPGEMM_1X128_UE8M0)
        assert float(made.scale) == 2.0**127
        assert bits(made.codes)[0, :3].tolist() == [0x7F, 0x80, 0x00]

    @pytest.mark.parametrize(
        ("recipe", "scale", "codes"),
        [
            (R.VLLM_GROUP, math.inf, [0xFE, 0x80]),
            (R.TRTLLM_1X128, math.inf, [0x7F, 0x80]),
            (R.TE_BLOCKWISE_1X128, 1.0, [0x7E, 0xB8]),
            (R.DEEPGEMM_1X128_UE8M0, 2.0**127, [0x7E, 0x80]),
            (R.TORCH_GROUP, math.inf, [0x7F, 0x80]),
        ],
        ids=lambda p: p.name if isinstance(p, R.Recipe) else "",
    )
    def test_infinity(self, recipe, scale, codes):
        made = quantize(self.group(math.inf, -1.0), recipe)
        assert float(made.scale) == scale
        assert bits(made.codes)[0, :2].tolist() == codes

    def test_te_clamps_an_infinite_inverse(self):
        x = self.group(1e-37, fill=0.0)
        made = quantize(x, R.TE_BLOCKWISE_1X128)
        assert float(made.scale) == float(np.float32(1) / np.finfo(np.float32).max)
        assert float(quantize(x.bfloat16(), R.TE_BLOCKWISE_1X128_POW2).scale) == 2.0**-127

    def test_scale_ub_bounds_amax_and_saturates(self):
        x = self.group(100.0, -50.0, fill=1.0)
        made = quantize(x, R.VLLM_TOKEN, scale_ub=torch.tensor(10.0))
        assert float(made.scale) == float(np.float32(10) / np.float32(448))
        assert bits(made.codes)[0, :2].tolist() == [0x7E, 0xFE]


class TestProperties:
    """Metamorphic rules that hold for every bit."""

    PLAIN = (
        R.VLLM_GROUP,
        R.DEEPGEMM_1X128,
        R.SGLANG_GROUP,
        R.TRTLLM_1X128,
        R.TORCHAO_1X128,
        R.TORCHAO_INFERENCE_1X128,
    )

    @given(st.integers(-20, 20), st.integers(0, 5))
    def test_scaling_by_a_power_of_two_scales_only_the_scale(self, k, index):
        recipe = self.PLAIN[index].with_floor(0.0)
        x = mixed(3, 128, torch.float32)
        first, second = quantize(x, recipe), quantize(x * 2.0**k, recipe)
        assert same(first.codes, second.codes)
        assert torch.equal(first.scale * 2.0**k, second.scale)

    @given(st.permutations(range(5)))
    def test_rows_are_independent(self, order):
        x = mixed(5, 256, torch.bfloat16)
        for recipe in (R.VLLM_GROUP, R.VLLM_TOKEN, R.DEEPGEMM_1X128_UE8M0):
            whole, shuffled = quantize(x, recipe), quantize(x[list(order)], recipe)
            assert same(take_rows(whole.codes, torch.tensor(order)), shuffled.codes)
            assert same(whole.scale[list(order)].contiguous(), shuffled.scale)

    @given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=127, max_size=127))
    def test_codes_are_monotone_within_a_group(self, values):
        x = torch.tensor([sorted([*values, 1e4])], dtype=torch.float32)
        for recipe in self.PLAIN:
            made = decode(quantize(x, recipe).codes)[0]
            assert bool((made[1:] >= made[:-1]).all())

    def test_negation_flips_signs_only(self):
        for recipe in ROWS:  # those of bfloat16 steps take bfloat16 alone
            x = mixed(4, 256, torch.float16 if suits(recipe, torch.float16) else torch.bfloat16)
            first, second = quantize(x, recipe), quantize(-x, recipe)
            assert same(first.scale, second.scale)
            kept = bits(first.codes) & 0x7F != 0 if recipe.zero_sign is not R.ZeroSign.KEPT else slice(None)
            assert torch.equal((bits(first.codes) ^ 0x80)[kept], bits(second.codes)[kept])

    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
    def test_dequantised_error_is_at_most_half_a_code(self, dtype):
        x = mixed(8, 256, dtype)
        made = quantize(x, R.VLLM_GROUP)
        back, wide = dequantized(made.codes, made.scale, S.E4M3_1X128), decode(x)
        step = torch.maximum(wide.abs() * 2.0**-4, S.grid(x.shape, S.GROUP_128).spread(decode(made.scale)) * 2.0**-10)
        assert bool(((back - wide).abs() <= step * (1 + 2.0**-20)).all())


class TestShapes:
    """Scales have the logical shape of their blocks; ragged edges change no code."""

    def test_scale_shapes(self):
        x = mixed(6, 300, torch.bfloat16)
        shapes = {
            R.VLLM_GROUP: (6, 3),
            R.VLLM_TOKEN: (6, 1),
            R.VLLM_TENSOR: (1,),
            R.DEEPGEMM_128X128: (1, 3),
            R.DEEPGEMM_128X1: (1, 300),
        }
        for recipe, shape in shapes.items():
            made = quantize(x, recipe)
            assert tuple(made.scale.shape) == shape and made.codes.shape == x.shape
            assert made.scale.dtype is torch.float32 and made.codes.is_contiguous()
            assert dequantized(made.codes, made.scale, recipe.scaling).shape == x.shape

    def test_ragged_blocks_equal_their_padded_selves(self):
        x = mixed(130, 200, torch.float32)
        padded = torch.nn.functional.pad(x, (0, 56, 0, 126))
        for recipe in (R.DEEPGEMM_128X128, R.DEEPGEMM_1X128, R.DEEPGEMM_128X1):
            made, whole = quantize(x, recipe), quantize(padded, recipe)
            rows, columns = made.scale.shape
            assert same(made.codes, whole.codes[:130, :200].contiguous())
            assert same(made.scale, whole.scale[:rows, :columns].contiguous())

    def test_leading_axes(self):
        x = mixed(12, 256, torch.bfloat16)
        made, flat = quantize(x.reshape(3, 4, 256), R.VLLM_GROUP), quantize(x, R.VLLM_GROUP)
        assert tuple(made.scale.shape) == (3, 4, 2)
        assert same(made.codes.reshape(12, 256), flat.codes)
        with pytest.raises(ShapeError, match="need a matrix"):
            quantize(x.reshape(3, 4, 256), R.DEEPGEMM_128X128)

    def test_strided_input(self):
        x = mixed(128, 64, torch.bfloat16)
        assert same(quantize(x.t(), R.VLLM_TOKEN).codes, quantize(x.t().contiguous(), R.VLLM_TOKEN).codes)

    def test_bad_calls(self):
        x = mixed(2, 128, torch.bfloat16)
        with pytest.raises(DtypeError, match="float64"):
            quantize(x.double(), R.VLLM_GROUP)
        with pytest.raises(ShapeError, match="no elements"):
            quantize(x[:0], R.VLLM_GROUP)
        with pytest.raises(OptionError, match="needs a scale"):
            quantize(x, R.VLLM_STATIC)
        with pytest.raises(OptionError, match="computes its own"):
            quantize(x, R.VLLM_GROUP, scale=torch.ones(1))
        with pytest.raises(OptionError, match="no scale_ub"):
            quantize(x, R.VLLM_GROUP, scale_ub=torch.ones(1))
        with pytest.raises(ShapeError, match="one value"):
            quantize(x, R.VLLM_STATIC, scale=torch.ones(2))


class TestPerTensorDequantize:
    """float16(float32(value * scale)): infinite from 65520 on, zero up to 2^-25."""

    ALL = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)

    @pytest.mark.parametrize("scale", [1.0, 0.1, 3.3e-5, 1e-8, 200.0, 146.2, 1e-30])
    def test_all_codes(self, scale):
        s = torch.tensor([scale], dtype=torch.float32)
        got = decode(per_tensor_dequantize(self.ALL, s)).tolist()
        for code, value in enumerate(got):
            exact = decode(self.ALL)[code].item()
            if math.isnan(exact):
                assert math.isnan(value)
                continue
            once = slow.rne(Fraction(exact) * Fraction(float(s)))
            expected = once if once == slow.INF else slow.rne(once, "float16")
            if expected == slow.INF:
                assert math.isinf(value) and (value < 0) == (exact < 0)
            else:
                assert Fraction(value) == expected and math.copysign(1, value) == math.copysign(1, exact)

    def test_range_is_lost(self):
        assert torch.isinf(per_tensor_dequantize(self.ALL[0x7E], torch.tensor(147.0)))
        assert float(per_tensor_dequantize(self.ALL[0x08], torch.tensor(2.0**-19))) == 0.0

    def test_bad_calls(self):
        with pytest.raises(DtypeError, match="float8_e4m3fn"):
            per_tensor_dequantize(self.ALL.view(torch.float8_e5m2), torch.ones(1))
        with pytest.raises(ShapeError, match="one value"):
            per_tensor_dequantize(self.ALL, torch.ones(2))


class TestAmaxFault:
    """FlashInfer's 128x128 scan guards the column 128 kb + 32 j + lane with the row index i in place of j."""

    @pytest.mark.parametrize("k", [128, 384, 4224, 4480])
    def test_seen_elements_are_those_of_the_loop(self, k):
        seen = seen_by_row_as_column((1, 128, k // 128, 128), k)
        for kb in range(k // 128):
            for i in (0, 1, 3, 4, 30, 31, 32, 127):
                for lane in (0, 17, 31):
                    for j in range(4):
                        assert bool(seen[0, i, kb, 32 * j + lane]) is (kb * 128 + i * 32 + lane < k)

    def test_the_last_block_sees_four_rows(self):
        seen = seen_by_row_as_column((1, 128, 3, 128), 384)
        assert seen[0].all(dim=2).sum(dim=0).tolist() == [12, 8, 4]

    def test_an_outlier_in_an_unseen_row_is_clipped(self):
        x = mixed(128, 256, torch.bfloat16).clamp(-2, 2)
        x[100, 200] = 1000.0
        right, wrong = quantize(x, R.FLASHINFER_128X128), quantize(x, R.FLASHINFER_128X128_AMAX_FAULT)
        assert float(right.scale[0, 1]) > 100 * float(wrong.scale[0, 1])
        assert float(decode(wrong.codes)[100, 200]) == 448.0
        assert float(dequantized(wrong.codes, wrong.scale, S.E4M3_128X128)[100, 200]) < 10.0

    def test_long_k_is_right_where_every_row_is_seen(self):
        x = mixed(2, 4352, torch.bfloat16).repeat(64, 1)
        fault = R.FLASHINFER_128X128_AMAX_FAULT
        right, wrong = quantize(x, replace(fault, scan=R.AmaxScan.ALL)), quantize(x, fault)
        assert same(right.scale[:, :2].contiguous(), wrong.scale[:, :2].contiguous())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestDevices:
    """The same bits on every device."""

    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
    def test_cuda_equals_cpu(self, dtype):
        x = mixed(16, 512, dtype)
        x[0, 3], x[1, 3], x[2] = math.nan, math.inf, 0.0
        for recipe in ROWS:
            here, there = quantize(x, recipe), quantize(x.cuda(), recipe)
            scale = there.scale.cpu()
            assert same(here.codes, there.codes.cpu()), recipe.name
            assert torch.equal(torch.isnan(here.scale), torch.isnan(scale)), recipe.name
            assert torch.equal(here.scale.nan_to_num(nan=-1.0), scale.nan_to_num(nan=-1.0)), recipe.name


class TestCodeTable:
    """A code by the high half of a quotient's bits and whether the low half is zero: what the definition gives."""

    LOW = torch.tensor([0, 1, 0x7FFF, 0x8000, 0xFFFF])
    QUOTIENTS = ((torch.arange(-1 << 15, 1 << 15) << 16)[:, None] + LOW).to(torch.int32).view(torch.float32)

    @pytest.mark.parametrize(
        "recipe",
        [
            R.VLLM_GROUP,
            M.TE_MXFP8_E5M2,
            M.TORCHAO[E3M2, "floor"],
            M.TORCHAO[E2M3, "even"],
            M.FLASHINFER_NVFP4,
            M.TE_NVFP4_REFERENCE,
            M.DEEPGEMM_FP4,
            M.MODELOPT_NVFP4,
        ],
        ids=attrgetter("name"),
    )
    def test_every_high_half(self, recipe: R.Recipe):
        due = to_codes(self.QUOTIENTS.double(), recipe, None)
        assert torch.equal(to_codes(self.QUOTIENTS, recipe, None), due)
        cut = (self.QUOTIENTS.view(torch.int32) & -0x10000).view(torch.float32)  # without the bit for what was lost
        assert not torch.equal(to_codes(cut, recipe, None), due)

    def test_codes_of_many_equal_codes_of_few(self):
        x, g = mixed(64, 2048, torch.float32), torch.tensor([0.37])
        for recipe in (R.VLLM_GROUP, R.TORCH_SILU_MASKED, M.OCP_MXINT8, M.FLASHINFER_NVFP4_EXACT, M.VLLM_NVFP4):
            taken = x.bfloat16() if recipe is R.TORCH_SILU_MASKED else x
            given = g if recipe.scaling.global_scale else None
            few = torch.cat([quantize(row, recipe, global_scale=given).codes for row in taken.split(16)])
            assert torch.equal(bits(quantize(taken, recipe, global_scale=given).codes), bits(few))


class TestSharing:
    """Many recipes of one input share its amax; the shared value never leaks between policies."""

    def test_prepared_equals_fresh(self):
        x = mixed(4, 256, torch.bfloat16)
        x[1, 3], x[2, 7] = math.nan, math.inf
        prepared = prepare(x)
        for recipe in ROWS:
            assert torch.equal(prepared.codes(recipe), bits(quantize(x, recipe).codes))

    def test_codes_are_e4m3(self):
        assert E4M3FN.max_finite == 448.0
