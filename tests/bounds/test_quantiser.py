"""The admissible set: every right formula is inside, every fault is outside, and each is counted exactly."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import slow_quantiser as slow
import torch

from oracle.bounds.quantiser import (
    CODE_WIDTH,
    SCALE_WIDTH,
    U,
    admitting,
    code_bands,
    code_of_ordinal,
    code_set,
    identify,
    judge_recipe,
    nearness,
    ordinal,
    same_bytes,
    scale_set,
)
from oracle.numbers import quantize as numbers
from oracle.numbers import recipe_table
from oracle.numbers import recipes as R
from oracle.numbers import scaling as S
from oracle.numbers.formats import E4M3FN, decode
from oracle.numbers.quantize import Ends, Prepared, Quantized, prepare, quantize, suits
from oracle.routines.quantisers.verdict import judge_quantised
from oracle.verdict.compare import Status

IEEE_GROUP = [
    R.VLLM_GROUP,
    R.DEEPGEMM_1X128,
    R.SGLANG_GROUP,
    R.TRTLLM_1X128,
    R.TE_BLOCKWISE_1X128,
    R.TORCHAO_1X128,
    R.TORCH_GROUP,
    replace(R.VLLM_TRITON_GROUP, approximate=False),
]
E4M3 = torch.float8_e4m3fn


def bits(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


def normals(rows: int = 64, columns: int = 512, dtype: torch.dtype = torch.bfloat16, seed: int = 11) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    gain = 1 + rng.integers(0, 1024, (rows, -(-columns // 128))).repeat(128, axis=1)[:, :columns] / 128
    return torch.from_numpy(rng.standard_normal((rows, columns)) * gain).to(torch.float32).to(dtype)


def tied(rows: int = 64, seed: int = 5) -> torch.Tensor:
    """bfloat16 groups whose amax has the significands with many exact midpoints, float32 formulas' hardest data."""
    rng = np.random.default_rng(seed)
    top = 1 + rng.choice([12, 26, 40, 54, 68, 82, 96, 124], (rows, 1)) / 128
    values = top * rng.integers(-128, 129, (rows, 128)) / 128
    values[:, 0] = top[:, 0]
    return torch.from_numpy(values).to(torch.float32).bfloat16()


class TestOrdinal:
    """Ordinals put codes in the order of their values, -0 below +0, and can be inverted."""

    def test_order_and_inverse(self):
        codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
        rank = ordinal(codes, E4M3FN)
        values = decode(codes[rank.argsort()].view(E4M3))
        assert bool((values[1:] >= values[:-1]).all()) and rank.unique().numel() == 254
        assert torch.equal(code_of_ordinal(rank, E4M3FN), codes)


class TestSoundness:
    """Every IEEE formula lies inside the set of every other; the sets are one code wide but at midpoints."""

    @pytest.mark.parametrize("made_by", IEEE_GROUP, ids=lambda r: r.name)
    @pytest.mark.parametrize("x", [normals(), tied(), normals(dtype=torch.float32)], ids=["normal", "tied", "float32"])
    def test_all_formulas_admit_each_other(self, made_by, x):
        made, prepared = quantize(x, made_by), prepare(x)
        for judged_by in IEEE_GROUP:
            assert judge_recipe(prepared, made.codes, made.scale, judged_by).outside == 0

    def test_at_most_two_codes_and_mostly_one(self):
        for x, low, high in ((normals(), 2e-3, 8e-3), (normals(dtype=torch.float32), 0.0, 2e-5)):
            prepared = prepare(x)
            sets = code_set(prepared, R.VLLM_GROUP, decode(quantize(x, R.VLLM_GROUP).scale))
            assert int((sets.high - sets.low).max()) <= 1
            assert low <= float(sets.two().double().mean()) <= high

    def test_power_of_two_scales_leave_one_code(self):
        x = tied()
        made = quantize(x, R.DEEPGEMM_1X128_UE8M0)
        sets = code_set(prepare(x), R.DEEPGEMM_1X128_UE8M0, decode(made.scale))
        assert torch.equal(sets.low, sets.high) and torch.equal(code_of_ordinal(sets.low, E4M3FN), bits(made.codes))
        assert int(sets.two().sum()) == 0

    def test_width_is_needed(self):
        """A right code 2.99 u beside its midpoint: s = a fl(1/448), code of x fl(448/a); 2.9 u would refuse it."""
        a, x = float.fromhex("0x1.d93dc8p+0"), float.fromhex("0x1.4120c6p-1")
        group = torch.tensor([[a, x] + [0.0] * 126], dtype=torch.float32)
        made = quantize(group, R.SGLANG_GROUP)
        v = Fraction(x) / Fraction(float(made.scale))
        distance = float((152 - v) / v) / U
        assert 2.98 < distance < 3.0 < CODE_WIDTH / U
        assert int(bits(made.codes)[0, 1]) == slow.code_of(Fraction(152), False) != slow.code_of(v, False)
        assert judge_recipe(prepare(group), made.codes, made.scale, R.VLLM_GROUP).outside == 0

    def test_scale_interval_is_the_formula(self):
        x = normals(8)
        sets = scale_set(prepare(x), R.VLLM_GROUP)
        for row in range(8):
            a = max(abs(Fraction(v)) for v in decode(x)[row, :128].tolist())
            low, high = float(sets.low[row, 0]), float(sets.high[row, 0])
            assert Fraction(low) <= a / 448 * (1 - 2 * Fraction(U)) and a / 448 * (1 + 2 * Fraction(U)) <= Fraction(
                high
            )
            assert high / low - 1 < 2.01 * SCALE_WIDTH

    def test_scale_widths_by_format(self):
        x = normals(8)
        for recipe in (R.TORCHAO_INFERENCE_1X128, R.DEEPGEMM_1X128_UE8M0, R.VLLM_GROUP_UE8M0):
            sets = scale_set(prepare(x), recipe)
            assert torch.equal(sets.low, sets.high)
        wide, narrow = scale_set(prepare(x), R.FLASHINFER_1X128), scale_set(prepare(x), R.TRTLLM_1X128)
        assert bool((wide.low < narrow.low).all()) and bool((wide.high > narrow.high).all())

    def test_a_log_mode_admits_both_powers_just_above_one(self):
        above = 448 * (1 + 2.0**-22)
        x = torch.tensor([[above * 2.0**-20] + [0.0] * 127], dtype=torch.float32)
        recipe = R.VLLM_GROUP_UE8M0
        codes = quantize(x, replace(recipe, power_of_two=R.PowerOfTwo.CEIL))
        assert float(codes.scale) == 2 * float(quantize(x, recipe).scale)
        for made in (codes, quantize(x, recipe)):
            assert judge_recipe(prepare(x), made.codes, made.scale, recipe).outside == 0
            between = judge_recipe(prepare(x), made.codes, codes.scale * 0.75, recipe)
            assert int(between.bad_scales.sum()) == 1, "1.5 * 2^k lies between the two powers, but is none"
            strict = judge_recipe(prepare(x), made.codes, made.scale, R.VLLM_GROUP_UE8M0_BITS)
            assert strict.outside == (0 if made is codes else 1 + int(strict.bad_codes.sum()))

    def test_specials_are_the_declared_recipe_s(self):
        x = normals(8)
        x[0, 5], x[1, 5], x[2, 5] = math.nan, math.inf, -math.inf
        x[3], x[4] = 0.0, x[4] * 2.0**-126
        for recipe in recipe_table.of_element(E4M3FN):
            if recipe.formula is R.ScaleFormula.GIVEN or recipe.fault:
                continue
            made = quantize(x, recipe)
            judged = judge_recipe(prepare(x), made.codes, made.scale, recipe)
            assert judged.exact and judged.outside == 0, recipe.name
        nan = quantize(x, R.TORCH_GROUP)
        judged = judge_recipe(prepare(x), nan.codes, nan.scale, R.VLLM_GROUP)
        assert int(judged.bad_scales.sum()) == 1 and judged.bad_codes.any()

    def test_a_zero_scale_admits_any_finite_code(self):
        x = torch.zeros(2, 128)
        for code, bad in ((0x00, 0), (0x7E, 0), (0x80, 0), (0x7F, 256)):
            q = torch.full((2, 128), code, dtype=torch.uint8).view(E4M3)
            assert judge_recipe(prepare(x), q, torch.zeros(2, 1), R.TORCH_TOKEN.with_floor(0.0)).outside >= bad
        tensor = replace(R.TORCH_TENSOR, zero_codes=True)
        free = torch.full((2, 128), 0x7E, dtype=torch.uint8).view(E4M3)
        assert judge_recipe(prepare(x), free, torch.zeros(1), tensor).outside == 0
        nan = torch.full((2, 128), 0x7F, dtype=torch.uint8).view(E4M3)
        assert judge_recipe(prepare(x), nan, torch.zeros(1), tensor).outside == 256


class TestSets:
    """What a set of codes holds beside its ends."""

    @pytest.mark.parametrize("recipe", [R.VLLM_GROUP, R.DEEPGEMM_1X128_UE8M0, recipe_table.get("torchao_nvfp4")])
    def test_expected_are_the_recipe_s_codes(self, recipe: R.Recipe) -> None:
        """And each lies between the ends."""
        x = prepare(normals(4), global_scale=torch.tensor([0.25]) if recipe.scaling.global_scale else None)
        made = x.quantized(recipe)
        found = code_set(x, recipe, decode(made.scale))
        due = ordinal(x.codes(recipe).view(found.low.shape), recipe.element)
        assert bool(((found.low <= found.expected) & (found.expected <= found.high)).all())
        assert int((found.expected != due).sum()) <= int((found.low != found.high).sum())

    def test_two_powers_of_two_are_exact_and_one_is_not(self) -> None:
        """A value at a midpoint of the codes: under a global scale of 1/4 the scale 1 leaves one code, 1.5 both."""
        recipe = recipe_table.get("torchao_nvfp4")
        for scale, codes in ((1.0, 1), (1.5, 2)):
            x = torch.full((1, 16), 1.25 * scale * 0.25)
            found = code_set(prepare(x, global_scale=torch.tensor([0.25])), recipe, torch.full((1, 1), scale).double())
            assert (found.high - found.low + 1).unique().tolist() == [codes]

    def test_a_product_of_scales_that_is_subnormal(self) -> None:
        """One of 2^-140 may err by 2^-149, which is 2^-9 of it: nearer to a midpoint both codes are admitted."""
        recipe, scale = recipe_table.get("torchao_nvfp4"), 2.0**-140
        for steps, codes in ((638, 1), (639, 2), (640, 2), (641, 2), (642, 1)):
            x = torch.full((1, 16), steps * 2.0**-149)  # of 640 the quotient is 1.25
            found = code_set(prepare(x, global_scale=torch.tensor([scale])), recipe, torch.ones(1, 1).double())
            assert (found.high - found.low + 1).unique().tolist() == [codes], steps

    @pytest.mark.parametrize("name", ["torchao_nvfp4", "te_nvfp4_stochastic"])
    def test_nan_in_a_format_without_it(self, name: str) -> None:
        """A NaN has the recipe's code for it; beside it nothing changes."""
        recipe, x = recipe_table.get(name), torch.ones(1, 16)
        x[0, 3] = math.nan
        found = code_set(prepare(x, global_scale=torch.tensor([1.0])), recipe, torch.ones(1, 1).double())
        assert found.low.flatten()[3] == found.high.flatten()[3] and len(found.low.unique()) == 2

    @pytest.mark.parametrize("together", [2, 1 << 20], ids=["two rows", "all"])
    def test_rows_of_more_than_two_dimensions(self, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A band at a time; all are one of a small input."""
        monkeypatch.setattr(numbers, "BAND", together * 512)
        x = prepare(normals(6).view(2, 3, 512))
        whole = code_set(x, R.VLLM_GROUP, decode(x.quantized(R.VLLM_GROUP).scale))
        for rows, found in code_bands(x, R.VLLM_GROUP, decode(x.quantized(R.VLLM_GROUP).scale)):
            for name in ("low", "high", "expected", "nan", "free"):
                assert torch.equal(getattr(found, name), getattr(whole, name).view(6, 512)[rows])

    @pytest.mark.parametrize("together", [1, 1 << 20], ids=["a row", "all"])
    def test_how_near_an_output_is(self, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Equal codes and scales, and how far the farthest is; a band at a time."""
        monkeypatch.setattr(numbers, "BAND", together * 512)
        x = prepare(normals(3))
        made = x.quantized(R.VLLM_GROUP)
        count, scales = made.codes.numel(), made.scale.numel()
        assert nearness(x, made.codes, made.scale, R.VLLM_GROUP) == (count, scales, 0)
        moved = made.codes.clone()
        bits(moved)[2, 5] ^= 2
        assert nearness(x, moved, made.scale * torch.tensor([2.0, 1.0, 1.0, 1.0]), R.VLLM_GROUP) == (
            count - 1,
            scales - 3,
            2,
        )

    def test_equal_bytes_wherever_they_lie(self) -> None:
        """Of any two addresses and lengths, and one byte is enough to differ."""
        stores = [torch.zeros(72, dtype=torch.uint8) for _ in range(2)]
        for starts in itertools.product(range(57), range(57)):
            assert same_bytes(*(store[start : start + 8] for store, start in zip(stores, starts, strict=True)))
        for length in (8, 9):
            part = stores[0][:length].clone()
            part[-1] = 1
            assert not same_bytes(part, stores[1][:length])


class TestIdentify:
    """Every recipe finds itself; those with the same bits are the documented twins."""

    @staticmethod
    def hard(recipe: R.Recipe) -> torch.Tensor:
        x = torch.cat([tied(16).repeat(1, 3), normals(16, 384)])
        x = torch.cat([x, x[:8].clone()])
        x[20, 3], x[21, 3] = math.nan, math.inf
        x[18, 5] = -0.0
        x[22], x[23], x[24] = 0.0, x[23] * 2.0**-34, x[24] * 2.0**-128
        x[26, :128] = 2.0**-16  # 448 * 2^-16 lies between two codes: an approximate division takes the other one
        x[26, 0] = 1.0
        return x if suits(recipe, x.dtype) else x.half()

    TWINS = (
        {"vllm_group", "sglang_triton_column", "flaggems_group"},
        {"vllm_group_ue8m0", "flaggems_group_ue8m0", "vllm_silu_packed"},
        {"sglang_triton_ue8m0", "vllm_inverse_rope"},
        {"tile_kernels_1x128_ue8m0", "deepep_1x128_ue8m0"},
        {"torchao_training_1x128", "fbgemm_group"},  # but where a scale_ub is given
        {"trtllm_1x128", "flashinfer_1x128"},
        {"trtllm_128x128", "flashinfer_128x128"},
        # the last by a logarithm, which differs just above a power of two
        {"deepgemm_device_1x32_ue8m0", "te_mxfp8_1x32", "flashinfer_cutile_mxfp8"},
        {"flashinfer_testing_1x128_ue8m0", "torch_cast_1x128_ue8m0"},
        {"vllm_block", "vllm_silu_block"},  # but where a scale_ub is given
        {"torch_block", "torch_silu_block"},
        {"vllm_ds_mla", "trtllm_gen_1x128"},
        # under a floor of 1e-10 no divisor is where fast math flushes
        {"vllm_triton_group_sm90", "sglang_triton_column_sm90", "flaggems_group_sm90", "sglang_group_v1_sm90"},
        {"vllm_group_ue8m0_bits", "sglang_group_v2_ue8m0"},  # on every input: both formulas leave 1 at the same amax
    )

    @pytest.mark.parametrize(
        "name", [r.name for r in recipe_table.of_element(E4M3FN) if r.formula is not R.ScaleFormula.GIVEN]
    )
    def test_each_recipe_finds_itself_and_its_twins_only(self, name):
        recipe = recipe_table.get(name)
        x = self.hard(recipe)
        if recipe.block.rows not in (None, 1):
            x = torch.cat([x] * 8)[:256].contiguous()
            x[torch.isnan(x) | torch.isinf(x)] = 0.5
            x[200, 300] = 77.0
        if recipe.block == S.TENSOR:
            x = normals(4, 384) if not name.startswith("torchao") else tied(4)
        made = quantize(x, recipe)
        found = set(identify(prepare(x), made.codes, made.scale))
        allowed = next((twins for twins in self.TWINS if name in twins), {name})
        if recipe.block == S.TENSOR or recipe.block.rows not in (None, 1):
            assert name in found
        else:
            assert name in found and found <= allowed

    def test_a_logarithm_shows_just_above_a_power_of_two(self):
        """bfloat16 amax can never be there, so only float32 data tell these twins apart."""
        x = torch.tensor([[448 * (1 + 2.0**-22) * 2.0**-10] + [0.0] * 127], dtype=torch.float32)
        made = quantize(x, R.FLASHINFER_TESTING_1X128_UE8M0)
        found = identify(prepare(x), made.codes, made.scale)
        assert "flashinfer_testing_1x128_ue8m0" in found and "torch_cast_1x128_ue8m0" not in found

    @pytest.mark.parametrize(
        "block, silu", [(R.VLLM_BLOCK, R.VLLM_SILU_BLOCK), (R.TORCH_BLOCK, R.TORCH_SILU_BLOCK)], ids=lambda r: r.name
    )
    def test_a_bound_tells_the_silu_block_from_the_block(self, block, silu):
        """2 bounds an amax of 1344 to 2 and its scale of 3 to 2."""
        x, bound = torch.tensor([[1344.0] + [0.5] * 127]), torch.tensor([2.0])
        for recipe, other in ((block, silu), (silu, block)):
            made = quantize(x, recipe, scale_ub=bound)
            found = identify(prepare(x, scale_ub=bound), made.codes, made.scale)
            assert recipe.name in found and other.name not in found

    def test_a_quotient_and_a_product_by_the_constant_leave_a_power_of_two_together(self):
        """Why vLLM's bits and SGLang's are one: both are monotone, 1 at an amax of 448 and above it one ulp later."""
        top = torch.tensor([448.0]).view(torch.int32)
        for ulps, expected in ((-1, 1.0), (0, 1.0), (1, 2.0)):
            x = torch.zeros(61, 128)
            powers = torch.exp2(torch.arange(-30, 31).to(torch.float64)).float()
            x[:, 0] = (top + ulps).view(torch.float32) * powers
            for recipe in (R.VLLM_GROUP_UE8M0_BITS, R.SGLANG_GROUP_V2_UE8M0):
                assert torch.equal(quantize(x, recipe).scale[:, 0], expected * powers)

    def test_rows_of_more_than_two_dimensions(self):
        """Blocks within a row are found in any number of dimensions, blocks of rows in a matrix alone."""
        made = quantize(normals(6), R.VLLM_GROUP)
        x = prepare(normals(6).view(2, 3, 512))
        found = identify(x, made.codes.view(2, 3, 512), made.scale.view(2, 3, 4))
        assert R.VLLM_GROUP.name in found

    def test_a_given_scale_is_matched_with_given_recipes_only(self):
        x, s = normals(8), torch.tensor([0.37])
        made = quantize(x, R.VLLM_STATIC, scale=s)
        assert "vllm_static" in identify(prepare(x, scale=s), made.codes, s)
        assert identify(prepare(x), made.codes, s) == ()


def verdict_on(x: torch.Tensor, made: Quantized | tuple[torch.Tensor, torch.Tensor], recipe: R.Recipe):
    codes, scale = (made.codes, made.scale) if isinstance(made, Quantized) else made
    return judge_quantised(prepare(x), codes, scale, (recipe,))


def of_bits(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.uint8).view(E4M3)


@pytest.mark.turns(4)
class TestSabotage:
    """Each check's twin: a mutant fails, with the number of elements that it changed."""

    X = normals(64, 512, torch.float32)

    def right(self, recipe: R.Recipe = R.VLLM_GROUP) -> tuple[Prepared, Quantized]:
        prepared = prepare(self.X)
        made = quantize(self.X, recipe)
        assert verdict_on(self.X, made, recipe).status is Status.PASSED
        return prepared, made

    def count(self, mutant: Quantized | tuple[torch.Tensor, torch.Tensor], recipe: R.Recipe = R.VLLM_GROUP):
        verdict = verdict_on(self.X, mutant, recipe)
        assert verdict.status is Status.FAILED and verdict.worst is not None and verdict.matches is None
        return verdict

    def test_codes_with_the_scale_of_the_next_block(self):
        _, made = self.right()
        wrong = made.scale.roll(-1, dims=1)
        spread = S.grid(self.X.shape, S.GROUP_128).spread(decode(wrong)).to(torch.float32)
        codes = bits((self.X / spread).clamp(-448, 448).to(E4M3))
        changed = int((codes != bits(made.codes)).sum())
        verdict = self.count((of_bits(codes), made.scale))
        assert changed - 3 <= verdict.outside <= changed and verdict.worst.output == "q"
        assert "every scale is right" in verdict.summary

    def test_published_scale_of_the_next_block(self):
        _, made = self.right()
        rolled = made.scale.roll(-1, dims=1).contiguous()
        judged = judge_recipe(prepare(self.X), made.codes, rolled, R.VLLM_GROUP)
        assert int(judged.bad_scales.sum()) == int((rolled != made.scale).sum()) > 250
        assert self.count((made.codes, rolled)).worst.output == "scale"

    def test_two_scales_swapped(self):
        _, made = self.right()
        swapped = made.scale.clone()
        swapped[3, 1], swapped[9, 2] = made.scale[9, 2], made.scale[3, 1]
        judged = judge_recipe(prepare(self.X), made.codes, swapped, R.VLLM_GROUP)
        assert judged.bad_scales.nonzero().tolist() == [[3, 1], [9, 2]]

    def test_amax_ignores_the_last_element(self):
        x = self.X.clone()
        late = torch.arange(0, 64, 5)
        x[late, 127] = 5000.0
        blind = x.clone()
        blind[:, 127::128] = 0.0
        scale = quantize(blind, R.VLLM_GROUP).scale
        right = quantize(x, R.VLLM_GROUP).scale
        changed = int((scale != right).sum())
        spread = S.grid(x.shape, S.GROUP_128).spread(decode(scale)).to(torch.float32)
        codes = (x / spread).clamp(-448, 448).to(E4M3)
        verdict = verdict_on(x, (codes, scale), R.VLLM_GROUP)
        assert verdict.status is Status.FAILED and verdict.outside == changed >= len(late)
        assert "codes are right for the scales published" in verdict.summary

    def test_saturates_at_256(self):
        _, made = self.right()
        raw = bits(made.codes)
        clipped = torch.where((raw & 0x7F) > 0x78, (raw & 0x80) | 0x78, raw)
        verdict = self.count((of_bits(clipped), made.scale))
        assert verdict.outside == int(((raw & 0x7F) > 0x78).sum()) > 256
        assert abs(verdict.worst.actual) == 256.0

    def test_half_up_on_the_tie_lattice(self):
        middles = torch.tensor([float(a + b) / 2 for a, b in zip(slow.E4M3, slow.E4M3[1:], strict=False)])
        x = torch.cat([middles, -middles, torch.tensor([448.0] * 4)]).reshape(1, -1)
        recipe = R.VLLM_GROUP_UE8M0_BITS.with_block(S.Block(1, 256))
        made = quantize(x, recipe)
        up = torch.cat([torch.arange(1, 127), 0x80 + torch.arange(1, 127), bits(made.codes)[0, 252:]]).reshape(1, -1)
        verdict = verdict_on(x, (of_bits(up), made.scale), recipe)
        assert verdict.status is Status.FAILED and verdict.outside == 126

    def test_floor_on_the_scale_instead_of_the_amax(self):
        x = self.X.clone()
        x[:7] *= 2.0**-60
        right = quantize(x, R.VLLM_GROUP)
        wrong = replace(R.VLLM_GROUP, amax_floor=0.0, scale_floor=1e-10)
        mutant = quantize(x, wrong)
        verdict = verdict_on(x, mutant, R.VLLM_GROUP)
        assert verdict.status is Status.FAILED
        assert verdict.outside == int((mutant.scale != right.scale).sum()) == 28
        assert verdict.pattern.startswith("scale: rows 0..6 only")

    def test_a_number_added_to_the_amax(self):
        """COAT adds 1e-10, of which the scale of small groups is made; without it they have another one."""
        x = self.X.clone()
        x[:7] *= 2.0**-40
        made = quantize(x, R.COAT_1X128)
        assert verdict_on(x, made, R.COAT_1X128).status is Status.PASSED
        verdict = verdict_on(x, quantize(x, replace(R.COAT_1X128, amax_added=0.0)), R.COAT_1X128)
        assert verdict.status is Status.FAILED and verdict.pattern.startswith("scale: rows 0..6 only")

    def test_one_code_off(self):
        _, made = self.right()
        raw = bits(made.codes).clone()
        raw[17, 300] ^= 1
        verdict = self.count((of_bits(raw), made.scale))
        assert verdict.outside == 1 and verdict.worst.index == (17, 300) and "(17, 300)" in verdict.pattern

    def test_power_of_two_floor_instead_of_ceil(self):
        prepared, made = self.right(R.DEEPGEMM_1X128_UE8M0)
        floored = replace(R.DEEPGEMM_1X128, name="floored")
        exact = prepared.scale(floored).reshape(made.scale.shape)
        low = torch.where(exact == decode(made.scale), made.scale, made.scale / 2)
        spread = S.grid(self.X.shape, S.GROUP_128).spread(decode(low)).to(torch.float32)
        mutant = ((self.X / spread).clamp(-448, 448).to(E4M3), low)
        verdict = self.count(mutant, R.DEEPGEMM_1X128_UE8M0)
        assert verdict.outside == int((low != made.scale).sum()) > 200

    def test_scale_rounded_up_after_the_payload(self):
        _, made = self.right(R.SGLANG_GROUP_UE8M0)
        mutant = quantize(self.X, R.SGLANG_GROUP_ROW_MAJOR_UE8M0)
        verdict = self.count(mutant, R.SGLANG_GROUP_UE8M0)
        assert verdict.outside == int((bits(mutant.codes) != bits(made.codes)).sum()) > 10_000
        assert verdict.explained_by == ("sglang_group_row_major_ue8m0",)

    def test_amax_that_leaves_rows_out(self):
        x = normals(256, 384)
        mutant, right = quantize(x, R.FLASHINFER_128X128_AMAX_FAULT), quantize(x, R.FLASHINFER_128X128)
        verdict = verdict_on(x, mutant, R.FLASHINFER_128X128)
        assert verdict.status is Status.FAILED
        assert verdict.outside == int((mutant.scale < right.scale * (1 - 2.0**-20)).sum()) > 0
        assert verdict.explained_by == ("flashinfer_128x128_amax_fault",)

    @pytest.mark.parametrize(
        ("code", "name"), [(0x7F, "NaN"), (0x00, "zeroed"), (0x7E, "saturated")], ids=lambda p: str(p)
    )
    def test_one_element_replaced(self, code, name):
        _, made = self.right()
        raw = bits(made.codes).clone()
        assert int(raw[5, 6]) not in (0, 0x7E, 0x80)
        raw[5, 6] = code
        assert self.count((of_bits(raw), made.scale)).outside == 1, name

    def test_one_row_zeroed(self):
        _, made = self.right()
        raw = bits(made.codes).clone()
        raw[5] = 0
        changed = int((bits(made.codes)[5] != 0).sum())
        verdict = self.count((of_bits(raw), made.scale))
        assert verdict.outside == changed and "row" in verdict.pattern

    def test_sign_of_zero_lost(self):
        x = self.X.clone()
        x[4, :9] = -0.0
        made = quantize(x, R.VLLM_GROUP)
        raw = bits(made.codes)
        mutant = torch.where(raw == 0x80, torch.zeros_like(raw), raw)
        verdict = verdict_on(x, (of_bits(mutant), made.scale), R.VLLM_GROUP)
        assert verdict.status is Status.FAILED and verdict.outside == int((raw == 0x80).sum()) >= 9

    def test_inverse_published_instead_of_the_scale(self):
        _, made = self.right()
        judged = judge_recipe(prepare(self.X), made.codes, 1 / made.scale, R.VLLM_GROUP)
        assert int(judged.bad_scales.sum()) == made.scale.numel()

    def test_scale_rounded_to_bfloat16(self):
        _, made = self.right()
        mutant = made.scale.bfloat16().float()
        judged = judge_recipe(prepare(self.X), made.codes, mutant, R.VLLM_GROUP)
        assert int(judged.bad_scales.sum()) == int(((mutant / made.scale - 1).abs() > SCALE_WIDTH).sum()) > 240

    def test_nan_scale_never_passes(self):
        _, made = self.right()
        scale = made.scale.clone()
        scale[2, 2] = math.nan
        verdict = self.count((made.codes, scale))
        assert verdict.outside >= 1 and verdict.worst.output == "scale" and verdict.margin == math.inf


class TestMistrust:
    """A pass that could not have failed is not called a pass."""

    def test_reasons(self):
        same = torch.ones(4, 256)
        for x, reason in (
            (torch.zeros(4, 256), "every block is zero"),
            (same, "all scales are equal"),
            (torch.full((4, 256), math.nan), "no scale is a positive number"),
        ):
            verdict = verdict_on(x, quantize(x, R.TORCH_GROUP), R.TORCH_GROUP)
            assert verdict.status is Status.MISTRUSTED and reason in str(verdict.reason)


class TestEnds:
    """Values known up to an interval: what any value in it gives is right, on the grid of the scales."""

    X = normals(rows=5)
    BETWEEN = prepare(X, ends=Ends(torch.minimum(X / 2, X * 2), torch.maximum(X / 2, X * 2)))

    @pytest.mark.parametrize("recipe", [R.TORCH_GROUP, R.TORCH_GROUP_UE8M0, R.TORCH_SILU_MASKED, R.DEEPGEMM_128X128])
    def test_ends_and_what_lies_between(self, recipe: R.Recipe):
        for times in (0.5, 0.875, 1.0, 2.0):
            made = quantize((self.X * times).bfloat16(), recipe)
            assert judge_recipe(self.BETWEEN, made.codes, made.scale, recipe).outside == 0
        far = quantize(self.X * 4, recipe)
        assert judge_recipe(self.BETWEEN, far.codes, far.scale, recipe).bad_scales.all()

    @pytest.mark.parametrize("recipe", [R.TORCH_GROUP_UE8M0, R.TORCH_SILU_MASKED])
    def test_a_scale_off_its_grid_fails(self, recipe: R.Recipe):
        made = quantize(self.X, recipe)
        scale = made.scale * (1 + 2.0**-9)
        assert judge_recipe(self.BETWEEN, made.codes, scale, recipe).bad_scales.all()

    def test_of_an_unknown_value_nothing_is_asked(self):
        unknown = torch.zeros(self.X.shape, dtype=torch.bool)
        unknown[2, 130] = True
        made = quantize(self.X, R.TORCH_GROUP)
        scale, codes = made.scale.clone(), bits(made.codes).clone()
        scale[2, 1] *= 64
        codes[2, 130] ^= 0x78
        for opened, wrong in ((unknown, 0), (None, 1)):
            x = prepare(self.X, ends=Ends(self.X, self.X, opened))
            assert int(scale_set(x, R.TORCH_GROUP).admits(decode(scale)).logical_not().sum()) == wrong
            judged = judge_recipe(x, codes.view(E4M3), made.scale, R.TORCH_GROUP)
            assert int(judged.bad_codes.sum()) == wrong


@pytest.mark.turns(4)
@pytest.mark.parametrize(("recipe", "height"), [(R.VLLM_GROUP, 6), (R.DEEPGEMM_128X128, 256)])
def test_what_admits_does_not_depend_on_the_row_that_is_looked_at_first(recipe: R.Recipe, height: int) -> None:
    """Also where that row is right and one code of another is not."""
    x = normals(height, 256)
    made, prepared = quantize(x, recipe), prepare(x)
    rows = range(0, height, max(1, height // 6))
    found = {admitting(prepared, made.codes, made.scale, recipe, row=row) for row in rows}
    assert len(found) == 1 and recipe.name in next(iter(found))
    wrong = made.codes.clone()
    bits(wrong)[rows[-1], 3] ^= 0x80
    assert {admitting(prepared, wrong, made.scale, recipe, row=row) for row in rows} == {()}
