"""The exact product against rational arithmetic, a second derivation that shares no code with it."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.errors import ShapeError
from oracle.numbers.formats import FORMATS, decode, from_codes, of_dtype
from oracle.numbers.rounding import Overflow, Rounding, encode_scalar
from oracle.truth.gemm import Exact, ScaledProduct, block_sums, exact, nearest, rational, rounded
from tests.support.products import KINDS, block_scaled, operand, row_scaled

OUT = (torch.bfloat16, torch.float16, torch.float32)


def wrong_elements(product: ScaledProduct, value: Exact) -> int:
    """Elements of ``value`` that are farther from the rational result than their own slack."""
    count = 0
    for m in range(product.M):
        for n in range(product.N):
            error = Fraction(float(value.hi[m, n])) + Fraction(float(value.lo[m, n])) - rational(product, m, n)
            count += abs(error) > Fraction(float(value.slack[m, n]))
    return count


@pytest.mark.turns(4)
class TestExact:
    """hi + lo is the exact value within slack; block sums are exact in float64."""

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("fmt", ["float8_e4m3fn", "float8_e5m2"])
    def test_against_rationals(self, kind: str, fmt: str) -> None:
        product = block_scaled(kind, 3, 130, 384, seed=3, fmt=fmt)
        assert wrong_elements(product, exact(product)) == 0

    def test_bias_and_row_scales(self) -> None:
        product = row_scaled("randn", 4, 5, 300, seed=4)
        assert wrong_elements(product, exact(product)) == 0

    def test_sabotaged_low_word_is_noticed(self) -> None:
        product = block_scaled("randn", 3, 5, 384, seed=3)
        value = exact(product)
        sabotaged = Exact(value.hi, torch.zeros_like(value.lo), value.slack)
        assert wrong_elements(product, sabotaged) > 0

    def test_wide_exponents_are_banded(self) -> None:
        """bfloat16 operands over 200 binades: one float64 product is not exact, the bands are."""
        g = torch.Generator().manual_seed(5)
        exponents = torch.randint(-100, 100, (4, 40), generator=g)
        x = (torch.randn(4, 40, generator=g) * 2.0**exponents).to(torch.bfloat16)
        product = ScaledProduct(x[:2], x[2:], torch.ones(1, 1), torch.ones(1, 1), block=40, b_rows=2)
        assert wrong_elements(product, exact(product)) == 0
        values = decode(x)
        assert len(list(block_sums(values[:2], values[2:]))) > 1

    def test_long_k_is_halved(self) -> None:
        a = torch.full((1, 300_000), 448.0).to(torch.float8_e4m3fn)
        b = a.clone().view(torch.uint8)
        b[0, -1] = 1  # 2**-9, lost by a float64 sum of 300,000 products of 448 * 448
        product = ScaledProduct(a, b.view(torch.float8_e4m3fn), torch.ones(1, 1), torch.ones(1, 1), 300_000, 1)
        value = exact(product)
        assert Fraction(float(value.hi)) + Fraction(float(value.lo)) == 299_999 * 448**2 + Fraction(448, 512)

    def test_nan_and_infinity_follow_ieee(self) -> None:
        a = torch.tensor([[1.0, torch.inf], [torch.nan, 1.0], [1.0, 1.0]]).to(torch.float8_e5m2)
        b = torch.tensor([[1.0, 1.0], [1.0, 0.0]]).to(torch.float8_e5m2)
        hi = exact(ScaledProduct(a, b, torch.ones(1, 1), torch.ones(1, 1), 2, 2)).hi
        expected = torch.tensor([[torch.inf, torch.nan], [torch.nan, torch.nan], [2.0, 1.0]], dtype=torch.float64)
        assert torch.equal(torch.nan_to_num(hi, 7.0), torch.nan_to_num(expected, 7.0))

    def test_infinite_scale(self) -> None:
        a = torch.tensor([[1.0], [0.0]]).to(torch.float8_e4m3fn)
        product = ScaledProduct(a, a[:1], torch.tensor([[torch.inf]]), torch.ones(1, 1), 1, 1)
        hi = exact(product).hi
        assert hi[0, 0] == torch.inf and torch.isnan(hi[1, 0])


class TestRounded:
    """The expected value is the rational result rounded once, to nearest even."""

    @pytest.mark.parametrize("dtype", OUT, ids=str)
    @pytest.mark.parametrize("kind", KINDS)
    def test_correct_rounding(self, kind: str, dtype: torch.dtype) -> None:
        product = block_scaled(kind, 3, 4, 256, seed=11)
        got = rounded(product, exact(product), dtype)
        fmt = of_dtype(dtype)
        for m in range(3):
            for n in range(4):
                code = encode_scalar(
                    rational(product, m, n), fmt, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF
                )
                assert torch.equal(got[m, n], from_codes(torch.tensor(code), fmt))

    def test_slack_is_settled_by_integers(self) -> None:
        """An undecided element is recomputed; without the recomputation the midpoint would round to even."""
        one, half_ulp = 1.0, 2.0**-9
        a = torch.tensor([[one, half_ulp, 2.0**-9]]).to(torch.float8_e4m3fn)
        scale = torch.tensor([[1.0, 2.0, 2.0**-120]])
        product = ScaledProduct(a, torch.ones(1, 3).to(torch.float8_e4m3fn), scale, torch.ones(1, 3), 1, 1)
        value = exact(product)
        blurred = Exact(value.hi, torch.zeros_like(value.lo), torch.full_like(value.lo, 2.0**-100))
        truth = rounded(product, value, torch.bfloat16)
        assert torch.equal(rounded(product, blurred, torch.bfloat16), truth)
        undecided = Exact(value.hi, torch.zeros_like(value.lo), torch.zeros_like(value.lo))
        assert not torch.equal(rounded(product, undecided, torch.bfloat16), truth)

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 10_000), st.sampled_from(OUT), st.integers(1, 3))
    def test_power_of_two_scaling_is_equivariant(self, seed: int, dtype: torch.dtype, shift: int) -> None:
        product = block_scaled("randn", 2, 3, 128, seed=seed)
        scaled = ScaledProduct(product.a, product.b, product.a_scale * 2.0**shift, product.b_scale, 128, 128)
        one, two = (rounded(p, exact(p), dtype) for p in (product, scaled))
        assert torch.equal(decode(two), decode(one) * 2.0**shift)

    def test_rows_are_independent(self) -> None:
        product = block_scaled("codes", 6, 5, 256, seed=2)
        whole = exact(product).hi
        assert all(torch.equal(exact(product.rows(i, i + 1)).hi[0], whole[i]) for i in range(6))


class TestNearest:
    """The float64 reference is the float64 nearest to the exact value, also where a tiny addend breaks a tie."""

    @pytest.mark.parametrize("bias", [-1.0, 0.0, 1.0])
    @pytest.mark.parametrize("sign", [-1.0, 1.0])
    def test_a_tie_that_only_the_bias_breaks(self, bias: float, sign: float) -> None:
        """129 (2**46 + 2**24 + 1) has 54 bits, of which the last is set: half an ulp."""
        x = torch.tensor([[8.0, 8.0, 1.0]]).to(torch.float8_e4m3fn)
        scale = torch.tensor([[1 + 2.0**-23]])
        product = ScaledProduct(
            x, x, sign * scale * 2.0**50, scale * 2.0**60, block=3, b_rows=1, bias=torch.tensor([bias])
        )
        value = exact(product)
        assert float(nearest(product, value)) == float(rational(product, 0, 0))
        if bias * sign > 0:  # away from the even neighbour, to which the pair alone rounds
            assert float(value.hi + value.lo) != float(rational(product, 0, 0))


class TestShapes:
    """A product that cannot be is refused with the shape it should have."""

    def test_messages(self) -> None:
        a, b = operand("randn", 4, 256, seed=0), operand("randn", 8, 256, seed=1)
        with pytest.raises(ShapeError, match=r"take \[4, 2\] or \[1, 2\]"):
            ScaledProduct(a, b, torch.ones(4, 3), torch.ones(1, 2), 128, 128)
        with pytest.raises(ShapeError, match=r"take \[1, 2\]"):
            ScaledProduct(a, b, torch.ones(4, 2), torch.ones(2, 2), 128, 128)
        with pytest.raises(ShapeError, match="K=128"):
            ScaledProduct(a, b[:, :128], torch.ones(4, 2), torch.ones(1, 2), 128, 128)
        with pytest.raises(ShapeError, match="N=8"):
            ScaledProduct(a, b, torch.ones(4, 2), torch.ones(1, 2), 128, 128, torch.ones(4))


def test_every_float_format_has_a_quantum() -> None:
    """The static exactness test multiplies smallest subnormals; a format without one would make it vacuous."""
    assert all(fmt.min_subnormal > 0 for name, fmt in FORMATS.items() if name != "float8_e8m0fnu")
