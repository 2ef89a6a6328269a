"""MX and NVFP4 recipes: worked blocks, edges, and every bfloat16 amax against the published formulas in numpy.

The witness shares no code with the oracle: exponents by shifts of float32 bits, float32 operations of numpy, casts of
``ml_dtypes``. Each recipe is compared on a million values: one block for every finite bfloat16 amax, filled with
midpoints of the element format, values and zeros of both signs.
"""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from mx_witnesses import Reals, cast, cast_by, errors_of_libraries, every_amax, nvfp4_witness
from numpy.typing import NDArray
from torch import Tensor

from oracle.bounds.quantiser import Judged, code_set, identify, judge_recipe
from oracle.numbers import mx_recipes as M
from oracle.numbers import recipe_table
from oracle.numbers import recipes as R
from oracle.numbers.formats import E2M1, E2M3, E3M2, E4M3FN, E5M2, Format, codes_of, decode, from_codes
from oracle.numbers.quantize import Prepared, prepare, quantize
from oracle.numbers.scaling import ScaleFormat

OLD = [row for key, row in M.TORCHAO_0_18.items() if key not in ((E4M3FN, "even"), (E2M1, "rceil"))]  # like those two
MX = [
    r
    for r in recipe_table.recipes().values()
    if r.block.columns == 32 and r.scale_format is ScaleFormat.UE8M0 and r not in OLD
]
TWO_LEVELS = [
    r for r in recipe_table.recipes().values() if r.scaling.global_scale and r.block.rows == 1 and not r.rounding.random
]


def byte_of(amax: Reals, recipe: R.Recipe) -> NDArray[np.int64]:
    """The scale byte: FLOOR, EVEN and CEIL from the bits of amax, RCEIL from those of amax times 1/max."""
    fmt = recipe.element
    bits = amax.view(np.uint32).astype(np.int64)
    if recipe.power_of_two is R.PowerOfTwo.EXP2_CEIL_LOG2:
        t = np.maximum(amax / np.float32(fmt.max_finite), np.float32(2.0**-127)).astype(np.float64)
        return np.ceil(np.log2(t).astype(np.float32)).astype(np.int64) + 127
    if recipe.power_of_two is R.PowerOfTwo.CEIL:
        t = (amax * (np.float32(1) / np.float32(fmt.max_finite))).view(np.uint32).astype(np.int64)
        return np.where(t >> 23 > 0, (t >> 23) + (t & 0x7FFFFF != 0), (t > 1 << 22).astype(np.int64))
    if recipe.power_of_two is R.PowerOfTwo.AMAX_EVEN:
        bits = bits + (1 << (22 - fmt.fraction_bits))
    step = (bits & 0x7FFFFF != 0) & (recipe.power_of_two is R.PowerOfTwo.AMAX_CEIL)
    byte = np.clip((bits >> 23) + step - fmt.emax, 0, 254)
    if recipe.divides_by_bits:
        return byte
    # EVEN rounds a finite amax of the last binade to infinity: NaN, but where the recipe clamps the byte of an infinity
    return np.where(bits >= 0x7F800000, recipe.inf_byte, byte)


def mx_witness(x: Tensor, recipe: R.Recipe) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    wide = x.float().numpy()
    byte = byte_of(np.abs(wide).max(axis=1), recipe)
    power = np.where(byte == 255, 0, 127 - byte)[:, None]
    if recipe.zero_codes:
        wide = np.where(byte[:, None] == 0, wide * 0, wide)
    if recipe.unit_at_byte_0:
        power = np.where(byte[:, None] == 0, 0, power)
    if recipe.divides_by_bits:
        power = np.where(byte[:, None] == 0, 126, power)
    if recipe.inverse_flushed:
        wide = np.where(byte[:, None] == 254, wide * 0, wide)
    codes = cast_by(np.ldexp(wide.astype(np.float64), power).astype(np.float32), recipe)
    return byte, np.where(byte[:, None] == 255, np.uint8(recipe.code_of_nan), codes)


def differences(x: Tensor, recipe: R.Recipe, byte: NDArray[np.int64], codes: NDArray[np.uint8]) -> tuple[int, int]:
    """Bytes and codes that differ from the oracle's."""
    made = quantize(x, recipe)
    scale = made.scale.double().numpy()[:, 0]
    ours = np.where(np.isnan(scale), 255, np.frexp(np.nan_to_num(scale))[1] + 126)
    return int((ours != byte).sum()), int((codes_of(made.codes, recipe.element).numpy() != codes).sum())


class TestEveryAmax:
    """A million values a recipe, one block for each bfloat16 amax."""

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("recipe", MX, ids=lambda r: r.name)
    def test_mx(self, recipe: R.Recipe) -> None:
        x = every_amax(recipe.element, 32)
        assert x.numel() > 10**6
        assert differences(x, recipe, *mx_witness(x, recipe)) == (0, 0)

    @pytest.mark.parametrize("mode", M.MODES)
    def test_another_rounding_is_seen(self, mode: str) -> None:
        """The negative test, for each pair of roundings."""
        x = every_amax(E2M1, 32)[::7]
        byte, codes = mx_witness(x, M.TORCHAO[E2M1, mode])
        for other in M.MODES:
            bytes_, _ = differences(x, M.TORCHAO[E2M1, other], byte, codes)
            assert (bytes_ == 0) == (mode == other)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("recipe", TWO_LEVELS, ids=lambda r: r.name)
    def test_nvfp4(self, recipe: R.Recipe) -> None:
        seen = 0
        for amax in (6.5, 3.0e4):
            x = every_amax(E2M1, 16)
            g = np.float32(2688) / np.float32(amax) if recipe.encodes else np.float32(amax) / np.float32(2688)
            scale, codes = nvfp4_witness(x.float().numpy(), recipe, g)
            made = quantize(x, recipe, global_scale=torch.tensor([g]))
            stored = made.scale[:, 0].to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            assert int((stored != scale).sum()) == 0
            live = scale != 0  # under a scale of 0 every code is free
            assert int((made.codes.numpy()[live] != codes[live]).sum()) == 0
            seen += x.numel()
        assert seen > 10**6

    def test_a_dropped_global_scale_is_seen(self) -> None:
        x = every_amax(E2M1, 16)[::11]
        made = quantize(x, M.TE_NVFP4, global_scale=torch.tensor([2.0]))
        scale, _ = nvfp4_witness(x.float().numpy(), M.TE_NVFP4, np.float32(1))
        assert int((made.scale[:, 0].to(torch.float8_e4m3fn).view(torch.uint8).numpy() != scale).sum()) > 100


class TestFourOverSix:
    """Errors in either domain, summed in either order, under either largest scale: 1.6 million values a recipe."""

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("measure", ["mae", "mse"])
    @pytest.mark.parametrize("top", [448.0, 256.0])
    @pytest.mark.parametrize("domain", ["input", "scaled", "halves"])
    def test_readings_of_libraries_are_admitted(self, measure: str, top: float, domain: str) -> None:
        """Not, in the negative test, the errors of values over 6 times the other largest scale."""
        amax, recipe = np.float32(6.5), M.FLASHINFER_4OVER6[R.Candidates[measure.upper()]]
        x = every_amax(E2M1, 16, seed=5)[:0x40D0]  # to the amax of the tensor
        given = prepare(x, global_scale=torch.tensor([np.float32(6 * top) / amax]))
        scale, codes = errors_of_libraries(x.float().numpy(), amax, top, measure, domain)
        assert self.outside(given, scale, codes, recipe) == 0
        if domain != "scaled":
            made = errors_of_libraries(x.float().numpy(), amax, top, measure, domain, measured=704 - top)
            assert self.outside(given, *made, recipe) > 0

    def test_errors_beyond_float32(self) -> None:
        """Squares of values of 2^80 overflow; in units of the scale they do not, and either choice is admitted."""
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).mul(2.0**80).reshape(-1, 16)
        amax, recipe = np.float32(float(x.abs().max())), M.FLASHINFER_4OVER6[R.Candidates.MSE]
        given = prepare(x, global_scale=torch.tensor([np.float32(2688) / amax]))
        scale, codes = errors_of_libraries(x.numpy(), amax, 448.0, "mse", "scaled")
        own = given.scale(recipe).flatten().to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        assert 0 < int((scale != own).sum()) < len(own) and self.outside(given, scale, codes, recipe) == 0
        assert self.outside(given, scale + np.uint8(1), codes, recipe) > len(own)

    def test_a_quotient_that_underflows_may_be_minus_zero(self) -> None:
        """-0 has the code 0 in TransformerEngine's reference, a negative value that rounds to zero the code 8."""
        x = torch.tensor([[6.0, -(2.0**-140), -(2.0**-10), *([1.0] * 13)]]) * 2.0**-8
        top = torch.full((1, 1), 448.0, dtype=torch.float64)
        sets = code_set(prepare(x, global_scale=torch.ones(1)), M.TE_NVFP4_REFERENCE, top)
        assert (sets.low[0, 1:3].tolist(), sets.high[0, 1:3].tolist()) == ([-1, -1], [0, -1])

    @staticmethod
    def outside(given: Prepared, scale: NDArray[np.uint8], codes: NDArray[np.uint8], recipe: R.Recipe) -> int:
        stored = torch.from_numpy(scale).view(torch.float8_e4m3fn).float()[:, None]
        return judge_recipe(given, torch.from_numpy(codes), stored, recipe).outside


def beside(value: Reals, ulps: int) -> Reals:
    """A float32 some ulps away, as an approximate reciprocal gives it."""
    return (np.asarray(value, dtype=np.float32).view(np.int32) + ulps).view(np.float32)


@pytest.mark.turns(4)
class TestApproximateReciprocals:
    """Outputs of the device's formula, each of its reciprocals an ulp off either way, are admissible."""

    @pytest.mark.parametrize(("first", "second", "third"), [(1, 1, 1), (-1, -1, -1), (1, -1, 1), (-1, 1, -1)])
    def test_nvfp4(self, first: int, second: int, third: int) -> None:
        x = every_amax(E2M1, 16, seed=9)[0x3800:0x4800]
        g, wide = np.float32(448), x.float().numpy()
        scale, codes = self.device(wide, g, first, second, third)
        exact, plain = nvfp4_witness(wide, M.FLASHINFER_NVFP4, g)
        assert 0 < int((scale != exact).sum()) + int((codes != plain).sum()) < 0.1 * codes.size, "an ulp moves a few"
        assert self.judged(x, g, scale, codes).outside == 0

    def test_more_than_an_ulp_is_seen(self) -> None:
        """The negative test: reciprocals off by 2^-9, as much as a bfloat16 is."""
        x = every_amax(E2M1, 16, seed=9)[0x3800:0x4800]
        g = np.float32(448)
        judged = self.judged(x, g, *self.device(x.float().numpy(), g, 1 << 14, 1 << 14, 1 << 14))
        assert judged.outside > 10

    @pytest.mark.parametrize("recipe", [M.FLASHINFER_MXFP4, R.FLASHINFER_MXFP8_1X32], ids=lambda r: r.name)
    @pytest.mark.parametrize("ulps", [-1, 1])
    def test_mx(self, recipe: R.Recipe, ulps: int) -> None:
        """A reciprocal of max an ulp high gives another byte where amax is max times a power of two, and only there."""
        x = every_amax(recipe.element, 32)[0x0800:0x7800]
        amax = x.float().abs().amax(dim=1).numpy()
        inverse = beside(np.float32(1) / np.float32(recipe.element.max_finite), ulps)
        t = (amax * inverse).view(np.int32)
        byte = (t >> 23) + (t & 0x7FFFFF != 0)
        exact, _ = mx_witness(x, recipe)
        moved = byte != exact
        ratio = np.frexp(amax / np.float32(recipe.element.max_finite))[0]
        assert bool((moved == ((ratio == 0.5) & (ulps > 0))).all())
        scale = torch.from_numpy(np.ldexp(1.0, byte - 127).astype(np.float32))[:, None]
        scaled = np.ldexp(x.double().numpy(), 127 - byte[:, None]).astype(np.float32)
        codes = cast(scaled, recipe.element)
        q = torch.from_numpy(codes).view(recipe.element.tensor_dtype)
        assert judge_recipe(prepare(x), q, scale, recipe).outside == 0

    def device(
        self, x: Reals, g: np.float32, first: int, second: int, third: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """FlashInfer's fast path: ``sf = E4(gs (am R(6)))``, codes of ``x R(sf R(gs))``."""
        one = np.float32(1)
        with np.errstate(all="ignore"):
            t = g * (np.abs(x).max(axis=1) * beside(one / np.float32(6), first))
            stored = np.minimum(t, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
            sf = stored.astype(np.float32)[:, None]
            o = beside(one / (sf * beside(one / g, second)), third)
            quotient = np.where(sf > 0, x * o, np.float32(0))
        return stored.view(np.uint8), cast(quotient.astype(np.float32), E2M1)

    def judged(self, x: Tensor, g: np.float32, scale: NDArray[np.uint8], codes: NDArray[np.uint8]) -> Judged:
        """Against the recipe of the fast path."""
        published = decode(torch.from_numpy(scale).view(torch.float8_e4m3fn)).float()[:, None]
        given = prepare(x, global_scale=torch.tensor([g]))
        return judge_recipe(given, torch.from_numpy(codes), published, M.FLASHINFER_NVFP4)


# --- worked blocks ------------------------------------------------------------------------------------------------

FIRST = (6, -5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.75, -0.25, 0, -0.0, 0.1, 4, 3, 1.5)
SECOND = (
    0.75,
    -1.5,
    2.25,
    3,
    -0.1875,
    0.375,
    0.5625,
    1.125,
    -2.625,
    0,
    -0.0,
    0.046875,
    1.875,
    -0.9375,
    0.65625,
    2,
)
FLASHINFER = (M.FLASHINFER_NVFP4, M.FLASHINFER_NVFP4_EXACT, M.FLASHINFER_CUTE_NVFP4, M.VLLM_NVFP4, M.TE_NVFP4)


def nvfp4(values: tuple[float, ...], amax: float, recipe: R.Recipe) -> str:
    """``scale byte: codes`` in hex, the global scale computed in float32 as the recipe takes it."""
    wide, top = np.float32(amax), np.float32(2688)
    g = torch.tensor([top / wide if recipe.encodes else wide / top])
    made = quantize(torch.tensor([values]), recipe, global_scale=g)
    byte = int(made.scale.to(torch.float8_e4m3fn).view(torch.uint8))
    return f"{byte:02X}: " + "".join(f"{code:X}" for code in made.codes[0].tolist())


class TestWorkedBlocks:
    """Blocks worked by hand from the published formulas, in hex."""

    @pytest.mark.parametrize(
        ("values", "amax", "common", "torchao"),
        [
            (FIRST, 6.0, "7E: 7E644220A8080653", "7E: 7E54321098080653"),
            (SECOND, 3.0, "7E: 3D679224F0806C36", "7E: 3D679124F0806C36"),
            (SECOND, 7.25, "74: 3D679124F0806C36", "74: 3D679124F0806C36"),
            (SECOND, 2688.0, "30: 3D679224F0806C36", "30: 3D679224F0806C36"),
        ],
    )
    def test_nvfp4(self, values: tuple[float, ...], amax: float, common: str, torchao: str) -> None:
        for recipe in (*FLASHINFER, M.MODELOPT_NVFP4):
            assert nvfp4(values, amax, recipe) == common, recipe.name
        assert nvfp4(values, amax, M.TORCHAO_NVFP4) == torchao

    @pytest.mark.parametrize(
        ("mode", "e4m3", "e2m1"),
        [
            ("floor", "77: 7E EA 44 00", "7D: 07 0D 04 01"),
            ("even", "77: 7E EA 44 00", "7E: 06 0B 02 00"),
            ("rceil", "78: 76 E2 3C 00", "7E: 06 0B 02 00"),
            ("ceil", "78: 76 E2 3C 00", "7E: 06 0B 02 00"),
        ],
    )
    def test_mx(self, mode: str, e4m3: str, e2m1: str) -> None:
        """amax = 1.8125 lies between 1.75, where RCEIL steps, and 1.9375, where EVEN does for E4M3."""
        assert mx((1.8125, -0.30078125, 0.01171875, 0), M.TORCHAO[E4M3FN, mode]) == e4m3
        assert mx((1.8125, -0.75, 0.4375, 0.1), M.TORCHAO[E2M1, mode]) == e2m1

    @pytest.mark.parametrize(
        ("fmt", "amax", "floor_ceil_even_rceil"),
        [
            (E4M3FN, 1.25, "77 78 77 77"),
            (E4M3FN, 1.953125, "77 78 78 78"),
            (E5M2, 1.8125, "70 71 70 71"),
            (E3M2, 1.8125, "7B 7C 7B 7C"),
            (E2M3, 1.8125, "7D 7E 7D 7D"),
            (E2M3, 1.953125, "7D 7E 7E 7E"),
            (E2M1, 1.5, "7D 7E 7D 7D"),
            (E2M1, 1.53125, "7D 7E 7D 7E"),
        ],
    )
    def test_bytes(self, fmt: Format, amax: float, floor_ceil_even_rceil: str) -> None:
        made = [mx((amax,), M.TORCHAO[fmt, mode])[:2] for mode in ("floor", "ceil", "even", "rceil")]
        assert " ".join(made) == floor_ceil_even_rceil


def mx(values: tuple[float, ...], recipe: R.Recipe) -> str:
    """``byte: codes`` of a block that begins so and goes on with zeros."""
    block = torch.zeros(1, 32)
    block[0, : len(values)] = torch.tensor(values)
    made = quantize(block, recipe)
    scale = float(made.scale)
    byte = 255 if math.isnan(scale) else int(math.frexp(scale)[1]) + 126
    codes = codes_of(made.codes, recipe.element)[0, : len(values)].tolist()
    return f"{byte:02X}: " + " ".join(f"{code:02X}" for code in codes)


def counterpart(recipe: R.Recipe) -> R.Recipe:
    """Another library's recipe that chooses a scale as this one does."""
    if recipe.candidates is None:
        return M.TE_NVFP4
    rows = M.FLASHINFER_4OVER6_FAST, M.FLASHINFER_4OVER6
    exact = recipe == M.FLASHINFER_4OVER6[recipe.candidates]
    return rows[0 if exact else 1][recipe.candidates]


INF, NAN, LEAST = math.inf, math.nan, 2.0**-133


class TestEdges:
    """Zero, tiny, infinite and NaN blocks as each library's source has them."""

    @pytest.mark.parametrize(
        ("recipe", "zero", "tiny", "inf", "nan"),
        [
            (M.TORCHAO[E4M3FN, "floor"], "00: 00 80", "00: 08 00", "FF: 7F 7F", "FF: 7F 7F"),
            (M.TORCHAO[E4M3FN, "rceil"], "00: 00 80", "00: 08 00", "FF: 7F 7F", "FF: 7F 7F"),
            (M.TORCHAO_0_18[E4M3FN, "floor"], "00: 00 80", "00: 04 00", "F7: 7E FE", "FF: 7F 00"),
            (M.TORCHAO_0_18[E4M3FN, "rceil"], "00: 00 80", "00: 00 00", "FE: 7E FE", "FF: 7F 7F"),
            (R.TE_MXFP8_1X32, "00: 00 80", "00: 08 00", "FE: 7E FE", "77: 7F 78"),
            (R.FLASHINFER_MXFP8_1X32, "00: 00 80", "00: 00 00", "FE: 7E 7E", "77: 7E 78"),
            (M.FLASHINFER_CUTE_MXFP8, "00: 00 80", "00: 00 00", "FE: 7F 7F", "77: 7F 78"),
            (M.FLASHINFER_HOST_MXFP8, "00: 00 80", "00: 00 00", "FF: 7F 7F", "77: 7F 78"),
            (M.FLASHINFER_MXFP4, "00: 00 08", "00: 00 00", "FE: 07 07", "7D: 07 06"),
            (M.FLASHINFER_CUTE_MXFP4, "00: 00 08", "00: 00 00", "FE: 07 07", "7D: 07 06"),
        ],
        ids=lambda p: p.name if isinstance(p, R.Recipe) else "",
    )
    def test_mx(self, recipe: R.Recipe, zero: str, tiny: str, inf: str, nan: str) -> None:
        assert mx((0.0, -0.0), recipe) == zero
        assert mx((LEAST, 0.0), recipe) == tiny
        assert mx((INF, -INF), recipe) == inf
        assert mx((NAN, 1.0), recipe) == nan

    @pytest.mark.parametrize(
        ("recipe", "zero", "tiny"),
        [
            (M.TE_NVFP4, "00: 0", "00: 7"),
            (M.FLASHINFER_CUTE_NVFP4, "00: 0", "00: 0"),
            (M.FLASHINFER_NVFP4, "00: 0", "00: 7"),
            (M.TORCHAO_NVFP4, "08: 0", "08: 0"),
            (M.MODELOPT_NVFP4, "38: 0", "00: 7"),
        ],
        ids=lambda p: p.name if isinstance(p, R.Recipe) else "",
    )
    def test_nvfp4(self, recipe: R.Recipe, zero: str, tiny: str) -> None:
        assert nvfp4((0.0,) * 16, 2688.0, recipe)[:5] == zero
        assert nvfp4((2.0**-9,) * 16, 2688.0, recipe)[:5] == tiny

    def test_a_block_of_zeros_under_an_infinite_global_scale(self) -> None:
        """2688/amax of a tensor of zeros: 0 * inf is NaN in the shipped fast path, and 0 as intended."""
        made = quantize(torch.zeros(2, 16), M.FLASHINFER_NVFP4, global_scale=torch.tensor([INF]))
        assert made.scale.tolist() == [[0.0], [0.0]] and not made.codes.any()


class TestSets:
    """What an ulp of a device's reciprocal can move is admitted, and nothing else."""

    def test_a_byte_at_a_power_of_two_times_max(self) -> None:
        """amax = 6 * 2^j: a reciprocal of 6 one ulp high gives the next byte; the exact formula does not."""
        x, codes = torch.zeros(3, 32), torch.zeros(3, 32, dtype=torch.uint8)
        x[:, 0], codes[:, 0] = torch.tensor([6.0, 6.0625, 5.9375]), torch.tensor([5, 3, 5], dtype=torch.uint8)
        up = quantize(x, M.FLASHINFER_MXFP4).scale * 2
        for recipe, bad in ((M.FLASHINFER_MXFP4, [1, 2]), (M.FLASHINFER_CUTE_MXFP4, [0, 1, 2])):
            judged = judge_recipe(prepare(x), codes, up, recipe)
            assert judged.bad_scales.nonzero()[:, 0].tolist() == bad and not judged.bad_codes.any()

    @pytest.mark.parametrize("recipe", TWO_LEVELS, ids=lambda r: r.name)
    def test_libraries_admit_each_other(self, recipe: R.Recipe) -> None:
        """Ties that an inexact formula moves lie within the sets of the others; two codes up do not.

        A choice of two scales is compared with the other formula that chooses by the same error, since a library
        without a choice publishes another scale. The reference codes -0 as 0: there alone it admits nobody else's code.
        """
        x = every_amax(E2M1, 16, seed=3)[0x3A00:0x4300:3]
        e, g = torch.tensor([2688 / 100.0]), torch.tensor([100.0 / 2688])
        made = quantize(x, counterpart(recipe), global_scale=e)
        given = prepare(x, global_scale=e if recipe.encodes else g)
        judged = judge_recipe(given, made.codes, made.scale, recipe)
        small = made.scale < 2.0**-6  # torchao has no such scales, modelopt none that are 0
        negative_zero = (x == 0) & torch.signbit(x) & (recipe.zero_sign is R.ZeroSign.SMALL)
        assert not (judged.bad_scales & ~small).any()
        assert torch.equal(judged.bad_codes & ~small, negative_zero & ~small)
        moved = torch.where(made.codes & 7 < 6, made.codes + 2, made.codes - 2)
        wrong = judge_recipe(given, moved, made.scale, recipe).bad_codes
        assert bool((wrong | (made.scale == 0)).all())

    @pytest.mark.parametrize("recipe", [r for r in TWO_LEVELS if r.candidates], ids=lambda r: r.name)
    def test_a_block_s_own_scale_is_refused_where_the_other_is_better(self, recipe: R.Recipe) -> None:
        """And nowhere else. Errors nearer than rounding can move them are left to either, and blocks of which a scale
        lies within ``2^-20`` of a midpoint.

        With ``t`` the own scale times the global one, ``|x| <= 6 t (1 + 2^-4)`` and ``w = 2^-21`` the wider width, a
        value is off by ``2 w |x| + 4u 9t < 9e-6 t``: sums of 16 by ``2 * 2 * 16 * 9e-6 t < 6e-4 t``, and of squares by
        ``2 (9 + 6.4) t`` times that, ``< 2e-2 t^2``; sums round by less than ``1e-5`` of themselves.
        """
        x = every_amax(E2M1, 16, seed=3)[0x3A00:0x4300:3]
        e = torch.tensor([2688 / 100.0])
        own = quantize(x, replace(recipe, candidates=None), global_scale=e)
        chosen = quantize(x, recipe, global_scale=e)
        live = own.scale[:, 0] >= 2.0**-6
        refused = judge_recipe(prepare(x, global_scale=e), own.codes, own.scale, recipe).bad_scales[:, 0]
        other = (chosen.scale != own.scale)[:, 0]
        assert not (refused & ~other).any()
        squared = recipe.candidates is R.Candidates.MSE
        t = own.scale[:, 0].double() / float(e)
        errors = []
        for made in (own, chosen):
            back = decode(made.codes, E2M1) * made.scale.double() / float(e)
            errors.append((back - x.double()).abs().pow(2 if squared else 1).sum(dim=1))
        clear = errors[0] - errors[1] > (2e-2 * t**2 if squared else 6e-4 * t) + 1e-5 * errors[0]
        for factor in (1, 1.5):
            scale = x.double().abs().amax(dim=1) / 6 * float(e) * factor
            ends = ((scale * (1 + d)).clamp(max=448) for d in (-(2.0**-20), 2.0**-20))
            low, high = (end.to(torch.float8_e4m3fn).float() for end in ends)
            clear &= low == high
        assert bool(refused[live & other & clear].all()) and int((live & other & clear).sum()) > 100

    @pytest.mark.parametrize("recipe", [r for r in MX if r.element is not E4M3FN], ids=lambda r: r.name)
    def test_own_bits_and_wrong_ones(self, recipe: R.Recipe) -> None:
        x = every_amax(recipe.element, 32, seed=5)[:: 0x7F80 // 400]
        made = quantize(x, recipe)
        assert judge_recipe(prepare(x), made.codes, made.scale, recipe).exact
        assert recipe.name in identify(
            prepare(x), made.codes, made.scale, among=recipe_table.of_element(recipe.element)
        )
        wrong = judge_recipe(prepare(x), made.codes, made.scale * 4, recipe)
        assert bool(wrong.bad_scales[10:-20].all())

    def test_codes_under_a_nan_scale_are_free_where_no_code_is_nan(self) -> None:
        x = torch.full((1, 32), NAN)
        row = M.TORCHAO[E2M1, "floor"]
        made = quantize(x, row)
        assert math.isnan(float(made.scale))
        other = torch.full_like(made.codes, 3)
        assert judge_recipe(prepare(x), other, made.scale, row).outside == 0
        eight = M.TORCHAO[E4M3FN, "floor"]
        finite = from_codes(torch.full((1, 32), 3, dtype=torch.uint8), E4M3FN)
        assert judge_recipe(prepare(x), finite, made.scale, eight).outside == 32

    def test_a_declared_element_decides_how_bytes_are_read(self) -> None:
        """E2M1 and E3M2 codes are both stored as uint8."""
        x = torch.full((1, 32), 6.0)
        made = quantize(x, M.TORCHAO[E2M1, "rceil"])
        found = identify(prepare(x), made.codes, made.scale, among=recipe_table.of_element(E2M1))
        assert found and all(recipe_table.get(name).element is E2M1 for name in found)
        assert replace(made.recipe, name="x").element is E2M1
