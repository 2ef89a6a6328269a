"""Scaling records: names, shapes and layouts; and a new format needs a record only, no code."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import slow_quantiser as slow
import torch

from oracle.bounds.quantiser import code_of_ordinal, identify, judge_recipe, ordinal, scale_set
from oracle.errors import OptionError, ShapeError
from oracle.numbers import recipes as R
from oracle.numbers import scaling as S
from oracle.numbers.formats import E2M1, E4M3FN, E5M2, FORMATS, codes_of, decode, is_nan
from oracle.numbers.quantize import Quantized, prepare, quantize
from oracle.numbers.scaling import Block, Layout, ScaleFormat, Scaling

CHANNEL = Scaling(E4M3FN, S.TOKEN, layout=Layout.TRANSPOSED)


class TestScaling:
    """A scheme has a name, and says the shape of its scales and which elements each one covers."""

    @pytest.mark.parametrize(
        ("name", "scaling"),
        [
            ("tensor", S.E4M3_TENSOR),
            ("token", S.E4M3_TOKEN),
            ("channel", CHANNEL),
            ("1x128", S.E4M3_1X128),
            ("128x128", S.E4M3_128X128),
            ("128x1", S.E4M3_128X1),
            ("1x32", S.E4M3_1X32_UE8M0),
            ("Mx1", Scaling(E2M1, Block(None, 1))),
        ],
    )
    def test_names_can_be_read_back(self, name, scaling):
        assert scaling.name == name
        assert replace(scaling, block=S.TENSOR, layout=Layout.ROW_MAJOR).named(name) == scaling

    @pytest.mark.parametrize("name", ["", "128", "0x128", "1x0", "1x128x1", "row", "-1x4"])
    def test_other_names_are_refused(self, name):
        with pytest.raises(OptionError, match="tensor, token, channel"):
            S.E4M3_TENSOR.named(name)

    @pytest.mark.parametrize(
        ("name", "shape"),
        [("tensor", (1,)), ("token", (6, 1)), ("channel", (1, 6)), ("1x4", (6, 3)), ("4x4", (2, 3)), ("4x1", (2, 10))],
    )
    def test_shapes_and_elements(self, name, shape):
        scaling = S.E4M3_TENSOR.named(name)
        assert scaling.scale_shape((6, 10)) == shape
        scale = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        spread = scaling.expand(scale, (6, 10))
        rows, columns = scaling.block.rows or 6, scaling.block.columns or 10
        for i in range(6):
            for j in range(10):
                at = (i // rows, j // columns)
                index = (0,) if name == "tensor" else at[::-1] if name == "channel" else at
                assert spread[i, j] == scale[index]

    def test_a_scale_of_another_shape_is_refused(self):
        with pytest.raises(ShapeError, match=r"channel scales of a tensor \[6, 10\] have shape \[1, 6\]"):
            CHANNEL.expand(torch.ones(6, 1), (6, 10))

    def test_the_scale_format_of_an_input(self):
        made = {f: f.number_format(FORMATS["bfloat16"]).name for f in ScaleFormat}
        assert list(made.values()) == ["float32", "bfloat16", "float8_e8m0fnu", "float8_e4m3fn"]


def recipe(name: str, scaling: Scaling, **differs: object) -> R.Recipe:
    return R.Recipe(name, "declared in this test", scaling, R.ScaleFormula.DIVIDE, R.CodeFormula.RECIPROCAL, **differs)


POWERS = {"power_of_two": R.PowerOfTwo.AMAX_FLOOR}
MAX = {"nan_code": R.NanCode.POSITIVE_MAX}
E2M1_1X16_E4M3 = Scaling(E2M1, Block(1, 16), ScaleFormat.E4M3, global_scale=True)
MXFP8 = recipe("mxfp8", S.E4M3_1X32_UE8M0, **POWERS)
MXFP8_E5M2 = recipe("mxfp8_e5m2", Scaling(E5M2, S.GROUP_32, ScaleFormat.UE8M0), **POWERS)
MXFP4 = recipe("mxfp4", Scaling(E2M1, S.GROUP_32, ScaleFormat.UE8M0), **POWERS, **MAX)
MXFP4_EVEN = replace(MXFP4, name="mxfp4_even", power_of_two=R.PowerOfTwo.AMAX_EVEN)
MXFP4_CEIL = replace(MXFP4, name="mxfp4_ceil", power_of_two=R.PowerOfTwo.CEIL)
NVFP4 = recipe("nvfp4", E2M1_1X16_E4M3, **MAX)
NVFP4_MULTIPLY = replace(NVFP4, name="nvfp4_multiply", formula=R.ScaleFormula.MULTIPLY, code=R.CodeFormula.DIVIDE)
NVFP4_ONE_LEVEL = replace(NVFP4, name="nvfp4_one_level", scaling=replace(E2M1_1X16_E4M3, global_scale=False))
E5M2_1X128 = recipe("e5m2_1x128", Scaling(E5M2, S.GROUP_128))
DECLARED = (
    *(MXFP8, MXFP8_E5M2, MXFP4, MXFP4_EVEN, MXFP4_CEIL, NVFP4, NVFP4_MULTIPLY, NVFP4_ONE_LEVEL, E5M2_1X128),
    replace(R.TE_BLOCKWISE_1X128, name="inverse_e5m2", scaling=E5M2_1X128.scaling),
)
EACH = pytest.mark.parametrize("declared", DECLARED, ids=lambda r: r.name)


def data(dtype: torch.dtype = torch.bfloat16, rows: int = 5, columns: int = 70) -> torch.Tensor:
    """Normal values, a magnitude of its own for each row, every midpoint of two E2M1 codes, zeros of both signs."""
    rng = np.random.default_rng(4)
    values = rng.standard_normal((rows, columns)) * np.exp2(rng.integers(-3, 4, (rows, 1)))
    values[0, :17] = [0.0, -0.0, 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0, 4.0, 6.0, -6.0, 0.5, 1.5, 3.0, -0.25, 6.0]
    return torch.from_numpy(values).to(dtype)


def two_levels(x: torch.Tensor, declared: R.Recipe) -> dict[str, torch.Tensor]:
    """The global scale that gives the largest block the largest E4M3 scale."""
    if not declared.scaling.global_scale:
        return {}
    return {"global_scale": (x.float().abs().amax() / (448 * 6)).reshape(1)}


def exact(x: torch.Tensor, declared: R.Recipe, **given: torch.Tensor) -> tuple[list[Fraction], list[list[int]]]:
    """Scales in the order of the blocks and codes of the rows, from exact rationals."""
    dtype, width, g = str(x.dtype).removeprefix("torch."), declared.block.columns, given.get("global_scale")
    scales, codes = [], []
    for row in decode(x).tolist():
        codes.append([])
        for start in range(0, len(row), width):
            part = row[start : start + width]
            s, found = slow.quantise_group(part, dtype, declared, None if g is None else float(g))
            scales.append(s)
            codes[-1] += found
    return scales, codes


class TestDeclaredFormats:
    """MX and NV formats as records alone: the same code quantises, judges and identifies them."""

    @EACH
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_bits_are_those_of_exact_rationals(self, declared, dtype):
        x = data(dtype)
        given = two_levels(x, declared)
        made = quantize(x, declared, **given)
        scales, codes = exact(x, declared, **given)
        assert [Fraction(s) for s in made.scale.flatten().tolist()] == scales
        assert codes_of(made.codes, declared.element).tolist() == codes
        assert made.codes.dtype == declared.element.tensor_dtype and made.codes.shape == x.shape
        assert made.scale.shape == declared.scaling.scale_shape(x.shape)

    @pytest.mark.parametrize(
        ("right", "wrong"),
        [
            (MXFP8, replace(MXFP8, scaling=replace(MXFP8.scaling, element=E5M2))),
            (MXFP4, MXFP4_CEIL),
            (MXFP4, MXFP4_EVEN),
            (NVFP4_ONE_LEVEL, replace(NVFP4_ONE_LEVEL, scaling=Scaling(E2M1, Block(1, 16)))),
            (NVFP4_ONE_LEVEL, replace(NVFP4_ONE_LEVEL, scaling=replace(NVFP4_ONE_LEVEL.scaling, block=S.GROUP_32))),
        ],
        ids=["element", "ceil", "even", "scale format", "block"],
    )
    def test_another_record_gives_other_bits(self, right, wrong):
        """The negative tests of the comparison above."""
        x = data()
        made = quantize(x, wrong)
        scales, codes = exact(x, right)
        ours = [Fraction(s) for s in made.scale.flatten().tolist()]
        assert (ours, codes_of(made.codes, wrong.element).tolist()) != (scales, codes)

    @EACH
    def test_values_come_back_within_a_step(self, declared):
        """|x - g s value(code)| is at most half the widest spacing times the scale, or what the scale clips."""
        x = data()
        given = two_levels(x, declared)
        made = quantize(x, declared, **given)
        g = decode(given["global_scale"]) if given else 1.0
        step = declared.scaling.expand(decode(made.scale), x.shape) * g
        back = decode(made.codes, declared.element) * step
        widest = declared.element.max_finite - decode(torch.tensor(declared.element.max_code - 1), declared.element)
        clipped = back.abs() == step * declared.element.max_finite
        assert bool((((back - decode(x)).abs() <= step * widest / 2 * (1 + 2.0**-20)) | clipped).all())

    @EACH
    def test_own_bits_are_admissible_and_wrong_neighbours_are_not(self, declared):
        x = data()
        given, fmt = two_levels(x, declared), declared.element
        prepared, made = prepare(x, **given), quantize(x, declared, **given)
        own = judge_recipe(prepared, made.codes, made.scale, declared)
        assert own.exact and own.outside == 0
        raw = codes_of(made.codes, fmt)
        rank = ordinal(raw, fmt)
        moved = code_of_ordinal(torch.where(rank > 0, rank - 1, rank + 1), fmt)
        at = torch.zeros_like(raw, dtype=torch.bool)
        at[1, 3] = at[2, 40] = at[4, 69] = True
        wrong = torch.where(at, moved, raw).view(made.codes.dtype)
        judged = judge_recipe(prepared, wrong, made.scale, declared)
        assert torch.equal(judged.bad_codes, at) and not judged.bad_scales.any()
        signs = torch.where(at, raw ^ fmt.sign_mask, raw).view(made.codes.dtype)
        assert torch.equal(judge_recipe(prepared, signs, made.scale, declared).bad_codes, at)
        for factor in (0.5, 1.125, 2.0):
            scale = made.scale.clone()
            scale[3, 0] *= factor
            judged = judge_recipe(prepared, made.codes, scale, declared)
            assert judged.bad_scales.nonzero().tolist() == [[3, 0]]

    @pytest.mark.parametrize("declared", [NVFP4_ONE_LEVEL, NVFP4], ids=lambda r: r.name)
    def test_beside_a_midpoint_of_scales_both_neighbours_are_admitted(self, declared):
        """amax = 6 * 1.0625: the scale 1.0625 lies between 1.0 and 1.125, and formulas differ by an ulp."""
        x = torch.full((1, 16), 6 * 1.0625)
        given = {"global_scale": torch.ones(1)} if declared.scaling.global_scale else {}
        sets = scale_set(prepare(x, **given), declared)
        assert (float(sets.low), float(sets.high)) == (1.0, 1.125)
        admitted = sets.admits(torch.tensor([[1.0], [1.0625], [1.125], [1.25]], dtype=torch.float64))
        assert admitted.flatten().tolist() == [True, False, True, False]
        for scale in (1.0, 1.125):
            made = Quantized(quantize(x, declared, **given).codes, torch.tensor([[scale]]), declared)
            assert not judge_recipe(prepare(x, **given), made.codes, made.scale, declared).bad_scales.any()

    def test_formulas_admit_each_other(self):
        x = data()
        given = two_levels(x, NVFP4)
        for made_by, judged_by in ((NVFP4, NVFP4_MULTIPLY), (NVFP4_MULTIPLY, NVFP4)):
            made = quantize(x, made_by, **given)
            assert judge_recipe(prepare(x, **given), made.codes, made.scale, judged_by).outside == 0

    @EACH
    def test_each_is_identified_among_all(self, declared):
        x = data(torch.float32)
        given = two_levels(x, declared)
        made = quantize(x, declared, **given)
        found = identify(prepare(x, **given), made.codes, made.scale, among=DECLARED)
        assert declared.name in found
        assert {d.element for d in DECLARED if d.name in found} == {declared.element}

    def test_nan_where_the_format_has_none(self):
        x = data(torch.float32)
        x[1, 2], x[2, 3] = math.nan, -math.inf
        for policy, code in ((R.NanCode.POSITIVE_MAX, 0x7), (R.NanCode.NEGATIVE_MAX, 0xF)):
            declared = replace(NVFP4_ONE_LEVEL, nan_code=policy)
            made = quantize(x, declared)
            assert int(made.codes[1, 2]) == code and judge_recipe(prepare(x), made.codes, made.scale, declared).exact
        e5m2 = quantize(x, E5M2_1X128).codes
        assert int(codes_of(e5m2)[1, 2]) == E5M2.nan_code

    def test_a_free_element_admits_no_infinity(self):
        """A scale of 0 admits every finite code; 0 times infinity is NaN."""
        x = torch.zeros(1, 128)
        judged = {
            code: judge_recipe(
                prepare(x),
                torch.full((1, 128), code, dtype=torch.uint8).view(torch.float8_e5m2),
                torch.zeros(1, 1),
                replace(E5M2_1X128, zero_codes=True),
            ).outside
            for code in (0x00, 0x7B, 0xFB, 0x7C, 0x7F)
        }
        assert judged == {0x00: 0, 0x7B: 0, 0xFB: 0, 0x7C: 128, 0x7F: 128}

    def test_records_refuse_what_is_not_defined(self):
        with pytest.raises(ValueError, match="no NaN"):
            replace(MXFP4, nan_code=R.NanCode.NAN)
        with pytest.raises(ValueError, match="global scale"):
            replace(MXFP4, scaling=replace(MXFP4.scaling, global_scale=True))
        with pytest.raises(ValueError, match="approximate division is known"):
            replace(R.FLASHINFER_1X128_FAST_MATH, scaling=E5M2_1X128.scaling)
        with pytest.raises(OptionError, match="needs a global scale"):
            quantize(data(), NVFP4)
        with pytest.raises(OptionError, match="has no global scale"):
            quantize(data(), MXFP8, global_scale=torch.ones(1))


class TestCodes:
    """Ordinals and NaN codes of every format of at most 8 bits."""

    @pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.bits <= 8 and f.signed], ids=str)
    def test_ordinals_follow_the_values(self, fmt):
        codes = torch.arange(1 << fmt.bits, dtype=torch.uint8)
        assert torch.equal(is_nan(codes, fmt), torch.isnan(decode(codes, fmt)))
        codes = codes[~is_nan(codes, fmt)]
        rank = ordinal(codes, fmt)
        values = decode(codes[rank.argsort()], fmt)
        assert bool((values[1:] >= values[:-1]).all())
        assert torch.equal(code_of_ordinal(rank, fmt), codes)

    def test_codes_of_takes_integers_of_the_format(self):
        codes = torch.arange(16, dtype=torch.int64)
        assert codes_of(codes, E2M1).dtype is torch.uint8
        assert torch.equal(codes_of(codes.to(torch.uint8).view(torch.float8_e4m3fn), E4M3FN).long(), codes)
