"""Powers of two by exponent bits: exact ceil, and the step of every mode that goes through a rounded logarithm."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import slow_quantiser as slow
import torch

from oracle.errors import DtypeError
from oracle.numbers import recipes as R
from oracle.numbers.formats import BF16, FP16, FP32, Format
from oracle.numbers.ue8m0 import ceil_to_ue8m0, log2_window, round_scale


def through(mode: R.PowerOfTwo, s: list[float], fmt=FP32) -> list[float]:
    recipe = replace(R.FLASHINFER_TESTING_1X128_UE8M0, power_of_two=mode)
    t = torch.tensor(s, dtype=torch.float64)
    return round_scale(t, t, t, recipe, fmt).tolist()


class TestCeil:
    """Smallest power of two not below |x|; bytes 1..254."""

    def test_around_every_power(self):
        powers = [2.0**k for k in range(-126, 128)]
        exact = torch.tensor(powers, dtype=torch.float32)
        assert torch.equal(ceil_to_ue8m0(exact), exact)
        assert torch.equal(ceil_to_ue8m0(-exact), exact)
        above = torch.tensor(np.nextafter(np.float32(powers[:-1]), np.float32(np.inf)))
        assert torch.equal(ceil_to_ue8m0(above), exact[1:])
        below = torch.tensor(np.nextafter(np.float32(powers[1:]), np.float32(0)))
        assert torch.equal(ceil_to_ue8m0(below), exact[1:])

    def test_ends(self):
        x = torch.tensor([0.0, -0.0, 2.0**-149, 2.0**-127, 1.5 * 2.0**127, float("inf"), float("nan")])
        assert ceil_to_ue8m0(x).tolist() == [2.0**-126] * 4 + [2.0**127] * 3

    def test_wrong_dtype(self):
        with pytest.raises(DtypeError, match="float32"):
            ceil_to_ue8m0(torch.ones(1, dtype=torch.float64))

    X = torch.tensor([0.7, 1.0, 1.5, 2.0, 3.0, -5.0, 2.0**-126, 3.0 * 2.0**-100])
    EXACT = [float(slow.power_ceil(abs(Fraction(v)))) for v in X.tolist()]

    def test_values_are_those_of_exact_rationals(self):
        assert ceil_to_ue8m0(self.X).tolist() == self.EXACT

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda x: torch.full_like(x, 7.0),
            lambda x: torch.tensor([float(slow.power_floor(abs(Fraction(v)))) for v in x.tolist()]),
            lambda x: ceil_to_ue8m0(x) * 2,
        ],
        ids=["seven", "floor", "the next power"],
    )
    def test_the_comparison_refuses_wrong_values(self, wrong):
        """The negative tests: every one of them differs, though never in all elements by the same rule."""
        assert wrong(self.X).tolist() != self.EXACT


def rounded_log2(s: float, precision: int) -> Fraction:
    """log2 of a float, correctly rounded, by 60-digit decimals."""
    with localcontext() as context:
        context.prec = 60
        exact = Fraction(Decimal(s).ln() / Decimal(2).ln())
    if Fraction(s) == slow.power_ceil(Fraction(s)):
        exact = Fraction(round(exact))
    return slow.rne(exact, {24: "float32", 8: "bfloat16", 11: "float16"}[precision])


def ceil_of(x: Fraction) -> int:
    return -((-x.numerator) // x.denominator)


class TestRoundedLogarithm:
    """exp2(ceil(log2 s)) is one binade low just above a power of two, because the logarithm rounds down to it."""

    @pytest.mark.parametrize("k", [-126, -100, -64, -33, -9, -8, -1, 0, 1, 2, 7, 8, 63, 64, 126])
    def test_ceil_steps_where_the_rounded_logarithm_does(self, k):
        s = [(1 + j * 2.0**-23) * 2.0**k for j in (0, 1, 2, 3, 5, 8, 11, 12, 22, 23, 24, 45, 100, 2**22)]
        expected = [2.0 ** ceil_of(rounded_log2(v, 24)) for v in s]
        assert through(R.PowerOfTwo.EXP2_CEIL_LOG2, s) == expected

    @pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=str)
    @pytest.mark.parametrize("k", [-14, -9, -3, -1, 0, 1, 6, 13])
    def test_round_steps_near_the_square_root_of_two(self, k, fmt):
        around = int(2**23 * 2**0.5)
        s = [
            j * 2.0 ** (k - 23)
            for j in (
                2**23,
                2**23 + 9,
                around - 2**18,
                around - 3,
                around,
                around + 1,
                around + 2**18,
                2**24 - 1,
            )
        ]
        expected = [2.0 ** round(rounded_log2(v, fmt.precision)) for v in s]
        assert through(R.PowerOfTwo.EXP2_ROUND_LOG2, s, fmt) == expected

    def test_specials_pass_through(self):
        assert through(R.PowerOfTwo.EXP2_CEIL_LOG2, [0.0, float("inf")]) == [0.0, float("inf")]

    def test_window_holds_both_powers_near_the_step_and_one_elsewhere(self):
        recipe = R.FLASHINFER_TESTING_1X128_UE8M0
        s = torch.tensor([2.0**-20, 2.0**-20 * (1 + 2.0**-20), 2.0**-20 * 1.01], dtype=torch.float64)
        low, high = log2_window(s, recipe, FP32)
        assert low.tolist() == [2.0**-20, 2.0**-20, 2.0**-19]
        assert high.tolist() == [2.0**-20, 2.0**-19, 2.0**-19]
        with pytest.raises(ValueError, match="logarithm"):
            log2_window(s, R.DEEPGEMM_1X128_UE8M0, FP32)

    @pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
    @pytest.mark.parametrize("k", [-14, -3, 1, 5, 13])
    @pytest.mark.parametrize("mode", [R.PowerOfTwo.EXP2_CEIL_LOG2, R.PowerOfTwo.EXP2_ROUND_LOG2], ids=lambda m: m.name)
    def test_window_of_a_logarithm_that_is_off_by_an_ulp(self, mode: R.PowerOfTwo, k: int, fmt: Format) -> None:
        """Of a float16 or bfloat16 logarithm, where the ulp is more than the error of ``lg2.approx``: the window holds
        what the neighbours of the rounded logarithm lead to, and is one power two ulps from the step."""
        recipe = replace(R.FLASHINFER_TESTING_1X128_UE8M0, power_of_two=mode)
        ceil = mode is R.PowerOfTwo.EXP2_CEIL_LOG2
        ulp = Fraction(2) ** (abs(k).bit_length() - fmt.precision)
        step = k if ceil else k + 0.5
        # Where the exact logarithm is a power of two's, every library's is exact: the ceiling is asked above it only.
        away = [j / 8 for j in range(1 if ceil else -20, 21)]
        s = [float(np.float32(2.0 ** (step + d * float(ulp)))) for d in away]
        low, high = log2_window(torch.tensor(s, dtype=torch.float64), recipe, fmt)
        for d, v, least, most in zip(away, s, low.tolist(), high.tolist(), strict=True):
            near = rounded_log2(v, fmt.precision)
            led = [2.0 ** (ceil_of(x) if ceil else round(x)) for x in (near - ulp, near, near + ulp)]
            assert least <= min(led) and max(led) <= most, d
            assert abs(d) < 2.2 or least == most, d
