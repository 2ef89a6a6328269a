"""The quantisers' contracts: layouts, options, declared recipes, verdicts, and one typed error for every bad call."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from oracle.errors import DeviceError, DtypeError, InputError, LayoutError, NumericsError, OptionError, ShapeError
from oracle.numbers import recipe_table
from oracle.numbers import recipes as R
from oracle.numbers.formats import E4M3FN, decode
from oracle.numbers.quantize import quantize
from oracle.routines import get, registered
from oracle.routines.base import Call, Contract
from oracle.routines.quantisers import contract as quantisers
from oracle.routines.quantisers.contract import QuantiserContract
from oracle.verdict.compare import Status
from tests.support.paths import SHARED

CAPTURE = SHARED / "captures" / "h200_vllm_group_quant.safetensors"
E4M3 = torch.float8_e4m3fn


def alone(contract: Contract) -> bool:
    """Whether it quantises a bfloat16 matrix to E4M3 and needs nothing beside it."""
    if not (isinstance(contract, QuantiserContract) and contract.returns == ("q", "scale")):
        return False
    (first, *more), x = contract.inputs, torch.zeros(128, 384, dtype=torch.bfloat16)
    if not all(spec.optional for spec in more) or x.dtype not in first.dtypes or len(first.dims or "MK") != 2:
        return False
    call = Call(contract, {"x": x}).checked()
    return call.operands.recipes[0].element == E4M3FN and contract.shape_of_codes(call) == tuple(x.shape)


NAMES = [name for name, contract in registered().items() if alone(contract)]


def matrix(rows: int = 128, columns: int = 384, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    rng = np.random.default_rng(rows * columns)
    gain = 1 + rng.integers(0, 512, (rows, -(-columns // 128))).repeat(128, axis=1)[:, :columns] / 64
    return torch.from_numpy(rng.standard_normal((rows, columns)) * gain).to(torch.float32).to(dtype)


def judge(name: str, inputs: dict[str, torch.Tensor], output, numerics: str | None = None, **options):
    return get(name).judge(inputs, output, arch="sm90", numerics=numerics, **options)


class TestReference:
    """Each contract passes its own reference, names the recipe, and fails one flipped code."""

    @pytest.mark.parametrize("name", NAMES)
    def test_passes_itself_and_fails_a_flip(self, name):
        x = matrix()
        contract = get(name)
        assert isinstance(contract, QuantiserContract) and contract.returns == ("q", "scale")
        made = contract.reference({"x": x})
        verdict = judge(name, {"x": x}, made)
        assert verdict.status is Status.PASSED and verdict.matches in recipe_table.recipes() and verdict.outside == 0
        assert verdict.total == x.numel() + verdict.total - x.numel() > x.numel()
        raw = made["q"].view(torch.uint8).clone()
        raw[77, 100] ^= 1
        verdict = judge(name, {"x": x}, {"q": raw.view(E4M3), "scale": made["scale"]})
        assert verdict.status is Status.FAILED and verdict.outside == 1 and verdict.worst.index == (77, 100)
        assert json.dumps(verdict.to_json())

    @pytest.mark.parametrize(
        "name",
        [
            "per_token_group_quant_fp8",
            "per_block_cast_to_fp8",
            "per_token_cast_to_fp8",
            "per_channel_cast_to_fp8",
        ],
    )
    def test_ue8m0(self, name):
        x = matrix()
        made = get(name).reference({"x": x}, use_ue8m0=True)
        verdict = judge(name, {"x": x}, made, use_ue8m0=True)
        assert verdict.status in (Status.PASSED, Status.MISTRUSTED) and "ue8m0" in str(verdict.matches)
        exponents = decode(made["scale"]).log2()
        assert torch.equal(exponents, exponents.round())
        packed = {"q": made["q"], "scale": (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)}
        assert judge(name, {"x": x}, packed, use_ue8m0=True).outside == 0
        wrong = judge(name, {"x": x}, get(name).reference({"x": x}), use_ue8m0=True)
        assert wrong.status is Status.FAILED

    @pytest.mark.needs_shared(f"captures/{CAPTURE.name}")
    def test_recorded_hardware_output(self):
        t = load_file(CAPTURE)
        inputs, out = {"x": t["x_bf16"]}, {"q": t["out.q"], "scale": t["out.scale"]}
        verdict = judge("per_token_group_quant_fp8", inputs, out)
        assert verdict.status is Status.PASSED and verdict.matches == "vllm_group"
        assert judge("per_token_group_quant_fp8", inputs, out, eps=1e-6).status is Status.FAILED
        assert judge("per_token_cast_to_fp8", inputs, out).explained_by == (
            "vllm_group",
            "sglang_triton_column",
            "flaggems_group",
        )


class TestDeclared:
    """One recipe of the contract is followed as a whole; another may be declared by name."""

    def test_nan_policies_are_not_mixed(self):
        x = matrix(4, 256)
        x[0, 3] = math.nan
        for recipe in (R.VLLM_GROUP, R.TORCH_GROUP, R.SGLANG_GROUP):
            made = quantize(x, recipe)
            assert (
                judge("per_token_group_quant_fp8", {"x": x}, {"q": made.codes, "scale": made.scale}).matches
                == recipe.name
            )
        mixed = quantize(x, R.TORCH_GROUP).codes.view(torch.uint8).clone()
        mixed[0, 3] = 0xFE
        scale = quantize(x, R.TORCH_GROUP).scale
        assert (
            judge("per_token_group_quant_fp8", {"x": x}, {"q": mixed.view(E4M3), "scale": scale}).status
            is Status.FAILED
        )

    def test_another_recipe_must_be_declared(self):
        x = matrix(4, 256) * 2.0**-40
        made = quantize(x, R.VLLM_GROUP_UE8M0)
        out = {"q": made.codes, "scale": made.scale}
        verdict = judge("per_token_group_quant_fp8", {"x": x}, out, use_ue8m0=True)
        assert verdict.status is Status.FAILED and "vllm_group_ue8m0" in verdict.explained_by
        declared = judge("per_token_group_quant_fp8", {"x": x}, out, numerics="vllm_group_ue8m0", use_ue8m0=True)
        assert not declared.status.is_failure and declared.matches == "vllm_group_ue8m0"

    def test_bad_declarations(self):
        x = matrix(4, 256)
        out = get("per_token_group_quant_fp8").reference({"x": x})
        for numerics, words in (
            ("nonsense", "no recipe"),
            ("sglang_group_row_major_ue8m0", "known fault"),
            ("vllm_token", "blocks of 1x128"),
            ("vllm_static", "blocks of 1x128"),
        ):
            with pytest.raises(NumericsError, match=words):
                judge("per_token_group_quant_fp8", {"x": x}, out, numerics=numerics)

    def test_approximate_division_is_wider_only_when_declared(self):
        x = matrix(4, 256)
        made = get("flashinfer_quantize_1x128").reference({"x": x})
        off = {"q": made["q"], "scale": (made["scale"].view(torch.int32) + 3).view(torch.float32)}
        assert judge("flashinfer_quantize_1x128", {"x": x}, off).status is Status.PASSED
        assert judge("flashinfer_quantize_1x128", {"x": x}, off, numerics="trtllm_1x128").status is Status.FAILED

    def test_weight_amax_fault_is_named(self):
        x = matrix(256, 384)
        x[200, 300] = 90.0
        made = quantize(x, R.FLASHINFER_128X128_AMAX_FAULT)
        verdict = judge("flashinfer_quantize_128x128", {"x": x}, {"q": made.codes, "scale": made.scale})
        assert verdict.status is Status.FAILED and verdict.explained_by == ("flashinfer_128x128_amax_fault",)


class TestScaledFp8Quant:
    """Static, per tensor, per token; padding rows are unspecified."""

    def test_static(self):
        x, s = matrix(7, 64), torch.tensor([0.013])
        made = get("scaled_fp8_quant").reference({"x": x, "scale": s})
        assert torch.equal(made["scale"], s)
        assert judge("scaled_fp8_quant", {"x": x, "scale": s}, made).status is Status.PASSED
        other = {"q": made["q"], "scale": s * 1.001}
        assert judge("scaled_fp8_quant", {"x": x, "scale": s}, other).status is Status.FAILED
        for recipe in (R.VLLM_STATIC, R.TORCH_STATIC):
            q = quantize(x, recipe, scale=s).codes
            assert judge("scaled_fp8_quant", {"x": x, "scale": s}, {"q": q, "scale": s}).outside == 0

    def test_per_token_with_bound(self):
        x = matrix(7, 64)
        inputs = {"x": x, "scale_ub": torch.tensor(2.0)}
        made = get("scaled_fp8_quant").reference(inputs, use_per_token_if_dynamic=True)
        assert made["scale"].shape == (7, 1) and float(made["scale"].max()) <= 2.0 / 448 * (1 + 1e-7)
        assert judge("scaled_fp8_quant", inputs, made, use_per_token_if_dynamic=True).outside == 0
        unbound = get("scaled_fp8_quant").reference({"x": x}, use_per_token_if_dynamic=True)
        assert judge("scaled_fp8_quant", inputs, unbound, use_per_token_if_dynamic=True).status is Status.FAILED

    @pytest.mark.parametrize("per_token", [False, True])
    def test_padding_rows_are_free_and_never_matter(self, per_token):
        x = matrix(7, 64)
        options = {"num_token_padding": 17, "use_per_token_if_dynamic": per_token}
        made = get("scaled_fp8_quant").reference({"x": x}, **options)
        assert made["q"].shape == (17, 64)
        poisoned = made["q"].view(torch.uint8).clone()
        poisoned[7:] = 0x7F
        assert (
            judge("scaled_fp8_quant", {"x": x}, {"q": poisoned.view(E4M3), "scale": made["scale"]}, **options).outside
            == 0
        )
        poisoned[6, 0] ^= 1
        assert (
            judge("scaled_fp8_quant", {"x": x}, {"q": poisoned.view(E4M3), "scale": made["scale"]}, **options).outside
            == 1
        )
        with pytest.raises(ShapeError, match="these inputs give"):
            judge("scaled_fp8_quant", {"x": x}, {"q": made["q"][:7], "scale": made["scale"][:7]}, **options)
        if per_token:
            assert (
                judge("scaled_fp8_quant", {"x": x}, {"q": made["q"], "scale": made["scale"][:7]}, **options).outside
                == 0
            )


class TestLayouts:
    """Logical shapes are judged; the strides that an option promises are checked."""

    @pytest.mark.parametrize(("tma", "lead"), [(False, 7), (True, 8)])
    def test_column_major(self, tma, lead):
        x = matrix(7, 384)
        options = {"column_major_scales": True, "tma_aligned_scales": tma}
        made = get("per_token_group_quant_fp8").reference({"x": x}, **options)
        assert made["scale"].shape == (7, 3) and made["scale"].stride() == (1, lead)
        assert judge("per_token_group_quant_fp8", {"x": x}, made, **options).outside == 0
        recorded = {"q": made["q"], "scale": made["scale"].contiguous()}
        assert judge("per_token_group_quant_fp8", {"x": x}, recorded).outside == 0
        with pytest.raises(LayoutError, match="strides"):
            judge("per_token_group_quant_fp8", {"x": x}, recorded, **options)

    def test_flashinfer_stores_the_transpose(self):
        x = matrix(7, 384)
        made = get("flashinfer_quantize_1x128").reference({"x": x})
        assert made["scale"].shape == (3, 8) and made["scale"].is_contiguous()
        garbage = made["scale"].clone()
        garbage[:, 7] = math.nan
        assert judge("flashinfer_quantize_1x128", {"x": x}, {"q": made["q"], "scale": garbage}).outside == 0
        with pytest.raises(ShapeError, match=r"\[3, 8\]"):
            judge("flashinfer_quantize_1x128", {"x": x}, {"q": made["q"], "scale": made["scale"][:, :7].t()})

    def test_ragged_and_other_blocks(self):
        x = matrix(130, 200)
        made = get("per_block_cast_to_fp8").reference({"x": x})
        assert made["scale"].shape == (2, 2) and judge("per_block_cast_to_fp8", {"x": x}, made).outside == 0
        made = get("per_block_cast_to_fp8").reference({"x": x}, block_size="(64, 32)")
        assert made["scale"].shape == (3, 7)
        made = get("per_token_cast_to_fp8").reference({"x": x}, group=64)
        assert made["scale"].shape == (130, 4)
        made = get("per_token_group_quant_fp8").reference({"x": matrix(12, 384).reshape(3, 4, 384)}, group_size=64)
        assert made["scale"].shape == (3, 4, 6)


class TestCastOfInfinity:
    """The cast of torch before 2.13 gives an infinite element NaN, that of 2.13 the largest code."""

    RECIPES = (R.DEEPGEMM_1X128_UE8M0, R.DEEPGEMM_1X128_UE8M0_OPEN)

    def test_both_are_right_and_not_mixed(self):
        x = torch.arange(1.0, 385.0)[:, None].repeat(1, 128).reshape(3, -1).contiguous()  # rows of 128 equal scales
        x[0, 0] = x[1, 5] = math.inf
        made = [quantize(x, recipe) for recipe in self.RECIPES]
        for one in made:
            right = {"q": one.codes, "scale": one.scale}
            assert judge("per_token_cast_to_fp8", {"x": x}, right, use_ue8m0=True).status is Status.PASSED
        codes = torch.stack([made[0].codes[0], *made[1].codes[1:]])
        mixed = {"q": codes, "scale": made[0].scale}
        assert judge("per_token_cast_to_fp8", {"x": x}, mixed, use_ue8m0=True).status is Status.FAILED

    def test_nan_of_a_finite_element_is_wrong(self):
        x = torch.ones(2, 128)
        x[0, 0] = math.inf
        one = quantize(x, self.RECIPES[1])
        codes = one.codes.clone()
        codes[1, 3] = math.nan
        out = {"q": codes, "scale": one.scale}
        assert judge("per_token_cast_to_fp8", {"x": x}, out, use_ue8m0=True).status is Status.FAILED


class TestScaleCasts:
    """per_tensor_dequantize and ceil_to_ue8m0: reference, admissible neighbours, twins that fail."""

    ALL = torch.arange(256, dtype=torch.uint8).view(E4M3)

    def test_dequantize(self):
        inputs = {"q": self.ALL, "inv_scale": torch.tensor([0.3])}
        right = get("per_tensor_dequantize").reference(inputs)
        assert right.dtype is torch.float16
        assert judge("per_tensor_dequantize", inputs, right).outside == 0
        wrong = right.clone()
        wrong[100] = wrong[100] * 2
        assert judge("per_tensor_dequantize", inputs, wrong).outside == 1
        half_scale = (self.ALL.to(torch.float16) * torch.tensor(0.3, dtype=torch.float16)).to(torch.float16)
        assert judge("per_tensor_dequantize", inputs, half_scale).status is Status.FAILED
        with pytest.raises(ShapeError, match="one value"):
            get("per_tensor_dequantize").reference({"q": self.ALL, "inv_scale": torch.ones(3)})

    def test_ceil(self):
        x = torch.tensor([0.0, 2.0**-149, 2.0**-127, 1.0, 1.5, -3.0, 2.0**127, 1.5 * 2.0**127, math.inf, math.nan])
        right = get("ceil_to_ue8m0").reference({"x": x})
        assert right.tolist() == [2.0**-126] * 3 + [1.0, 2.0, 4.0] + [2.0**127] * 4
        assert judge("ceil_to_ue8m0", {"x": x}, right).outside == 0
        other = torch.tensor([2.0**-127] * 3 + [1.0, 2.0, 4.0, 2.0**127, math.inf, math.inf, math.nan])
        assert judge("ceil_to_ue8m0", {"x": x}, other).outside == 0
        floored = torch.tensor([2.0**-127] * 3 + [1.0, 1.0, 2.0, 2.0**127, 2.0**127, math.inf, math.nan])
        assert judge("ceil_to_ue8m0", {"x": x}, floored).outside == 2
        between = other.clone()
        between[:2] = 1.5 * 2.0**-127
        assert judge("ceil_to_ue8m0", {"x": x}, between).outside == 2

    def test_a_wrong_reference_does_not_hide_itself(self, monkeypatch):
        """The contract judges by its reference, so only literal values can tell that the reference is wrong."""
        monkeypatch.setattr(quantisers, "ceil_to_ue8m0", lambda x: torch.full_like(x, 7.0))
        sevens = get("ceil_to_ue8m0").reference({"x": torch.tensor([1.0, 1.5])})
        assert judge("ceil_to_ue8m0", {"x": torch.tensor([1.0, 1.5])}, sevens).outside == 0
        with pytest.raises(AssertionError):
            self.test_ceil()


class TestBadCalls:
    """One typed error each, naming the value and the way out."""

    @pytest.mark.parametrize("name", NAMES)
    def test_common(self, name):
        x = matrix()
        good = get(name).reference({"x": x})
        cases = [
            (DtypeError, {"x": x.double()}, good, {}),
            (DtypeError, {"x": x.to(E4M3)}, good, {}),
            (ShapeError, {"x": x[:0]}, good, {}),
            (InputError, {}, good, {}),
            (InputError, {"x": x, "y": x}, good, {}),
            (InputError, {"x": x}, good["q"], {}),
            (InputError, {"x": x}, {"q": good["q"]}, {}),
            (DtypeError, {"x": x}, {"q": good["q"].view(torch.uint8), "scale": good["scale"]}, {}),
            (ShapeError, {"x": x}, {"q": good["q"][1:], "scale": good["scale"]}, {}),
            (DtypeError, {"x": x}, {"q": good["q"], "scale": good["scale"].double()}, {}),
            (
                ShapeError,
                {"x": x},
                {"q": good["q"], "scale": good["scale"].repeat(2, *[1] * (good["scale"].dim() - 1))},
                {},
            ),
            (DeviceError, {"x": x}, {"q": good["q"].to("meta"), "scale": good["scale"]}, {}),
            (OptionError, {"x": x}, good, {"nonsense": 1}),
        ]
        for error, inputs, output, options in cases:
            with pytest.raises(error):
                judge(name, inputs, output, **options)

    @pytest.mark.parametrize(
        ("name", "shape", "options", "error", "words"),
        [
            (
                "per_token_group_quant_fp8",
                (4, 200),
                {},
                ShapeError,
                "K=200 is not a multiple of group_size=128",
            ),
            ("per_token_group_quant_fp8", (4, 256), {"group_size": 0}, OptionError, "positive integer"),
            ("per_token_group_quant_fp8", (4, 256), {"group_size": True}, OptionError, "positive integer"),
            ("per_token_group_quant_fp8", (4, 256), {"eps": -1.0}, OptionError, "eps"),
            ("per_token_group_quant_fp8", (4, 256), {"eps": math.nan}, OptionError, "eps"),
            (
                "per_token_group_quant_fp8",
                (4, 256),
                {"tma_aligned_scales": True},
                OptionError,
                "column_major_scales",
            ),
            ("per_token_group_quant_fp8", (256,), {"column_major_scales": True}, ShapeError, "two axes"),
            ("per_token_group_quant_fp8", (), {}, ShapeError, "scalar"),
            ("per_token_group_quant_fp8", (4, 256), {"use_ue8m0": 3}, OptionError, "use_ue8m0"),
            ("per_block_cast_to_fp8", (4, 4, 4), {}, ShapeError, "rank"),
            ("per_block_cast_to_fp8", (4, 4), {"block_size": (128,)}, OptionError, "two positive"),
            ("per_block_cast_to_fp8", (4, 4), {"block_size": (128, -1)}, OptionError, "two positive"),
            ("per_token_cast_to_fp8", (4, 4), {"group": -2}, OptionError, "group"),
            ("per_channel_cast_to_fp8", (130, 4), {}, ShapeError, "M=130"),
            ("flashinfer_quantize_1x128", (4, 200), {}, ShapeError, "K=200"),
            ("scaled_fp8_quant", (4, 4), {"num_token_padding": 0}, OptionError, "num_token_padding"),
            ("scaled_fp8_quant", (4, 4, 4), {}, ShapeError, "rank"),
        ],
    )
    def test_shapes_and_options(self, name, shape, options, error, words):
        with pytest.raises(error, match=words):
            get(name).reference({"x": torch.ones(shape, dtype=torch.bfloat16)}, **options)

    def test_flashinfer_takes_bfloat16_only(self):
        with pytest.raises(DtypeError, match="bfloat16"):
            get("flashinfer_quantize_1x128").reference({"x": torch.ones(4, 128)})

    def test_static_scale(self):
        x = torch.ones(4, 4)
        with pytest.raises(ShapeError, match="one value"):
            get("scaled_fp8_quant").reference({"x": x, "scale": torch.ones(2)})
        with pytest.raises(OptionError, match="scale_ub"):
            get("scaled_fp8_quant").reference({"x": x, "scale_ub": torch.ones(1)})
        with pytest.raises(DtypeError, match="scale"):
            get("scaled_fp8_quant").reference({"x": x, "scale": torch.ones(1, dtype=torch.float64)})
        with pytest.raises((DeviceError, LayoutError)):
            get("scaled_fp8_quant").reference({"x": x, "scale": torch.ones(1, device="meta")})
