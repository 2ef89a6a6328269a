"""Small calls of oracle.truth whose answer is computed by hand, in fractions, or published by a vendor."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from itertools import product as product_of
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.errors import ExactnessError, OptionError, ShapeError
from oracle.numbers.formats import E2M1, E4M3FN
from oracle.numbers.recipes import VLLM_TOKEN
from oracle.truth import decisions, gemm, hadamard, layout, linear, logits, moe, routing, shards
from oracle.truth.gemm import (
    LONG,
    Decoded,
    Exact,
    ScaledProduct,
    _bands,
    _check_device_product,
    accumulate,
    block_sums,
    exact,
    finished,
    nearest,
    quantum_of,
    rational,
    take_rows,
    zero_nonfinite,
)
from tests.support.edges import codes, grid, scales, small

pytestmark = pytest.mark.whole("each instance is another condition, of some ms")

MULTIPROCESSORS = {
    # product: compute capability, streaming multiprocessors (NVIDIA's architecture whitepapers and product briefs)
    "A100 SXM4": (80, 108),
    "A40": (86, 84),
    "L40S": (89, 142),
    "RTX 4090": (89, 128),
    "H100 SXM5": (90, 132),
    "H100 PCIe": (90, 114),
    "H200": (90, 132),
    "B200": (100, 148),
    "RTX 5090": (120, 170),
    "RTX PRO 6000 Blackwell": (120, 188),
    "GB10": (121, 48),
}


def test_multiprocessors_of_each_product() -> None:
    found = {name: (capability, cores / decisions.CORES[capability]) for name, capability, cores in decisions.GPUS}
    assert found == MULTIPROCESSORS


class TestLayout:
    """Memory of another shape is refused before it is read."""

    @pytest.mark.parametrize("shape", [(516,), (2, 516), (1, 1, 512)])
    def test_memory_of_a_swizzle(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ShapeError):
            layout.unswizzle_scale(torch.zeros(shape, dtype=torch.uint8), 128, 4)

    @pytest.mark.parametrize("shape", [(2, 3, 2, 8), (2, 3, 1, 4), (2, 3, 8)])
    def test_a_cache(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ShapeError):
            layout.unpack_kv_cache(torch.zeros(shape, dtype=torch.uint8))

    def test_padding_of_a_part(self) -> None:
        """Of a matrix that begins within its memory, and of memory that ends one element too early."""
        memory = torch.arange(30.0)
        x = memory.as_strided((3, 2), (1, 4), 5)
        assert layout.pad_lanes(x).tolist() == [[8.0, 12.0]]
        for elements, held in ((8, True), (7, False)):
            assert layout.has_pad_lanes(torch.zeros(elements).as_strided((3, 2), (1, 4))) is held

    def test_a_vector_has_no_halves(self) -> None:
        with pytest.raises(ShapeError):
            layout.swap_w13_to_w31(torch.zeros(8))

    @pytest.mark.parametrize(
        ("w13", "w2"),
        [
            ((2, 8, 6), (2, 6, 5)),  # 8 rows are no two halves of 5
            ((2, 8, 6), (2, 5, 4)),  # 6 columns, 5 rows
            ((2, 8, 6), (3, 6, 4)),
            ((8, 6), (2, 6, 4)),
            ((2, 8, 6), (6, 4)),
        ],
    )
    def test_weights_that_disagree(self, w13: tuple[int, ...], w2: tuple[int, ...]) -> None:
        with pytest.raises(ShapeError):
            layout.align_fp8_moe_weights_for_fi(torch.zeros(w13), torch.zeros(w2), True)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
    def test_padded_experts(self, dtype: torch.dtype) -> None:
        """3 columns and 2 times 3 rows to 4."""
        w13, w2 = torch.arange(12.0).reshape(1, 6, 2), torch.arange(6.0).reshape(1, 2, 3)
        found13, found2, size = layout.align_fp8_moe_weights_for_fi(w13.to(dtype), w2.to(dtype), True, min_alignment=4)
        zero = torch.zeros(1, 1, 2)
        assert size == 4 and torch.equal(found13.float(), torch.cat([w13[:, :3], zero, w13[:, 3:], zero], dim=1))
        assert torch.equal(found2.float(), torch.cat([w2, zero.mT], dim=2))

    def test_no_row_order_unless_said(self) -> None:
        """That of TensorRT-LLM's kernel is asked for."""
        w13, w2, one = torch.arange(64.0).expand(1, 32, 64).mT, torch.zeros(1, 32, 32), torch.ones(1)
        plain, right, turned = (
            layout.prepare_fp8_moe_layer_for_fi(w13, w2, one, one, block_quant=False, **more)[0]
            for more in ({}, {"is_trtllm": False}, {"is_trtllm": True})
        )
        assert torch.equal(plain, right) and not torch.equal(plain, turned)


class TestShards:
    def test_the_sentinel_is_the_least_number_of_the_format(self) -> None:
        """vLLM fills the scale of a shard with ``torch.finfo(torch.float8_e4m3fn).min``."""
        assert torch.finfo(torch.float8_e4m3fn).min == shards.UNLOADED

    def test_rows_are_counted_not_columns(self) -> None:
        weight = torch.zeros(8, 16).to(torch.float8_e4m3fn)
        with pytest.raises(ShapeError):
            shards.requantize_with_max_scale(weight, torch.ones(2), [4, 8])


class TestLinear:
    def test_no_rocm_unless_said(self) -> None:
        """vLLM asks for ROCm's routine on ROCm alone."""
        flags = (False, True, True, False)
        assert linear.dispatch_w8a8_scaled_mm(*flags) == linear.dispatch_w8a8_scaled_mm(*flags, rocm=False)
        assert linear.dispatch_w8a8_scaled_mm(*flags) != linear.dispatch_w8a8_scaled_mm(*flags, rocm=True)

    def test_infinities_of_both_signs_on_one_side(self) -> None:
        two = torch.tensor([math.inf, -math.inf])
        assert math.isnan(linear.calc_diff(two, torch.ones(2)))
        assert math.isnan(linear.calc_diff(torch.ones(2), two))


class TestHadamard:
    def test_the_error_of_sixteen_terms(self) -> None:
        """16 terms and the rounding of the result, ``2^-23`` of the sum of magnitudes each."""
        x = torch.tensor([[1.0, 2.0**-40, *[0.0] * 14]])
        _, error = hadamard.transform(x)
        assert torch.unique(error).tolist() == [17 * 2.0**-23 * (1 + 2.0**-40) / 4]

    def test_no_error_of_few_multiples(self) -> None:
        """Zeros have no quantum of their own; one is not a zero."""
        zeros, ones = torch.tensor([[4.0, *[0.0] * 15]]), torch.tensor([[2.0**23, 2.0**23, *[1.0] * 14]])
        assert not bool(hadamard.transform(zeros.bfloat16())[1].any())
        assert bool(hadamard.transform(ones)[1].all())

    def test_no_error_of_a_sum_that_float32_holds(self) -> None:
        """``2^23`` quanta of bfloat16, ``2^-7`` each here; one more of ``2^-7`` is too much."""
        x = torch.tensor([[2.0**15, 2.0**15 - 2.0**8, 2.0**8 - 1, 1.0, *[0.0] * 12]])
        assert float(x.sum()) == 2.0**16 and torch.equal(x.bfloat16().float(), x)
        assert not bool(hadamard.transform(x.bfloat16())[1].any())
        x[0, 4] = 1.0
        assert bool(hadamard.transform(x.bfloat16())[1].all())

    def test_words_of_a_matrix_of_counters(self) -> None:
        """The words of a counter are the last axis, wherever it lies."""
        flat = hadamard.philox(torch.arange(6), 7)
        assert torch.equal(hadamard.philox(torch.arange(6).reshape(2, 3), 7), flat.reshape(2, 3, 4))

    def test_the_least_and_the_largest_seed_and_signs(self) -> None:
        for seed in (0, (1 << 64) - 1):
            assert hadamard.random_bytes((4,), seed).shape == (4,)
        for signs in (0, 0xFFFF):
            assert hadamard.matrix(signs)[:, 0].tolist() == [0.25 if signs == 0 else -0.25] * 16
        for signs in (-1, 1 << 16):
            with pytest.raises(OptionError):
                hadamard.matrix(signs)

    def test_the_ends_of_a_transform(self) -> None:
        """The transform itself comes first, then what a kernel may give on both sides."""
        x = torch.tensor([[1.0, 2.0**-30, *[0.0] * 14]])
        exact, error = hadamard.transform(x)
        found = hadamard.transform_ends(x, torch.float32)
        for end, due in zip(found, (exact, exact - error, exact + error), strict=True):
            assert torch.equal(end, due.float())
        assert bool((found[1] < found[0]).all()) and bool((found[0] < found[2]).all())

    @pytest.mark.parametrize("seed", [-1, 1 << 64, True, 0.0])
    def test_a_seed_is_no_such_number(self, seed: int) -> None:
        with pytest.raises(OptionError):
            hadamard.random_bytes((4,), seed)


class TestGemm:
    def test_a_negative_zero_that_is_nan(self) -> None:
        """In FNUZ formats the code of -0 is NaN; no other code is."""
        codes = torch.tensor([[0x80, 0x01], [0x7F, 0x01]], dtype=torch.uint8).view(torch.float8_e4m3fnuz)
        assert Decoded(codes, torch.ones(1, 1)).finite_rows.tolist() == [False, True]

    def test_what_the_low_word_cannot_hold(self) -> None:
        """``2^60 + (1 + 2^-52) + 2^-60``: the last term is lost when the two small ones are added."""
        given = (2.0**60, 0.0, 0.0, 1 + 2.0**-52, 2.0**-60)
        hi, lo, slack = (float(t) for t in accumulate(*(torch.tensor(x, dtype=torch.float64) for x in given)))
        lost = Fraction(given[0]) + Fraction(given[3]) + Fraction(given[4]) - Fraction(hi) - Fraction(lo)
        assert lost == Fraction(2) ** -60 and slack == 2.0**-60 * (1 + 2.0**-50)

    @pytest.mark.parametrize(
        ("wrong", "largest", "noticed"), [(0, 1.0, False), (1, 1.0, True), (1, 2.0**24, True), (1, 2.0**25, False)]
    )
    def test_a_product_of_a_device(self, wrong: int, largest: float, noticed: bool) -> None:
        """Row sums are compared where float64 holds them: two columns of eight products up to ``2 largest^2``."""
        a, b = (torch.full((n, 8), x, dtype=torch.float64) for n, x in ((1, 2 * largest), (2, largest / 2)))
        b[1] *= 2
        x = a @ b.T
        x[0, 1] += wrong
        elsewhere: Any = SimpleNamespace(device=torch.device("cuda"), shape=x.shape, sum=x.sum)
        with pytest.raises(ExactnessError) if noticed else nullcontext():
            _check_device_product(elsewhere, a, b, 1.0)

    @pytest.mark.parametrize(("last", "parts"), [(2.0**52, 1), (2.0**52 + 1, 2)])
    @pytest.mark.parametrize("quantum", [None, 1.0, 0.5])
    def test_one_sum_as_long_as_float64_holds_it(self, last: float, parts: int, quantum: float | None) -> None:
        """Two products up to ``2^52`` may reach ``2^53``; of larger ones the sum may be odd beyond it."""
        a = torch.tensor([[last, last - 1]], dtype=torch.float64)
        found = list(block_sums(a, torch.ones(1, 2, dtype=torch.float64), quantum=quantum))
        assert len(found) == parts and sum(Fraction(float(x)) for x in found) == 2 * int(last) - 1

    @pytest.mark.parametrize(
        ("x", "due"),
        [
            ([0.0, 0.0], 1.0),
            ([0.0, 4.0], 4.0),
            ([1.0], 1.0),
            ([-1.0, 8.0], 1.0),
            ([6.0], 2.0),
            ([3.0, 1 + 2.0**-52], 2.0**-52),
            ([2.0**1000, -(2.0**-1022)], 2.0**-1022),
        ],
    )
    def test_the_quantum(self, x: list[float], due: float) -> None:
        assert quantum_of(torch.tensor(x, dtype=torch.float64)) == due

    def test_bands_meet_in_the_middle(self) -> None:
        """41 bits are 21 low and 20 high ones; a single bit has no halves."""
        x = torch.tensor([2.0**40 + 2.0**21 + 2.0**20, 1.0], dtype=torch.float64)
        assert [band.tolist() for band in _bands(x)] == [[2.0**40 + 2.0**21, 0.0], [2.0**20, 1.0]]
        for single in (1.0, 2.0**7):
            with pytest.raises(ExactnessError):
                _bands(torch.tensor([single, 0.0], dtype=torch.float64))

    def test_what_is_no_number_is_zero(self) -> None:
        x = torch.tensor([math.nan, math.inf, -math.inf, -2.0])
        assert zero_nonfinite(x).tolist() == [0.0, 0.0, 0.0, -2.0]

    def test_element_by_element_in_rationals(self) -> None:
        """A scale for each row and one for all; bias and ``c``; ``b_rows`` of two."""
        a, b = (torch.tensor(x).to(torch.float8_e4m3fn) for x in ([[1.0, 2.0], [3.0, -0.5]], [[0.5, 1.0], [2.0, 4.0]]))
        more = {"bias": torch.tensor([0.25, -1.0]), "c": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
        sums = [[2.5, 10.0], [1.0, 4.0]]
        for given in ([[2.0], [8.0]], [[2.0]]):
            product = ScaledProduct(a, b, torch.tensor(given), torch.tensor([[3.0]]), block=2, b_rows=2, **more)
            due = [
                [(given * 2)[i][0] * 3 * sums[i][j] + float(more["bias"][j] + more["c"][i, j]) for j in range(2)]
                for i in range(2)
            ]
            assert [[rational(product, i, j) for j in range(2)] for i in range(2)] == due
            assert exact(product).hi.tolist() == due

    @pytest.mark.parametrize("alpha", [None, -0.5, math.inf])
    @pytest.mark.parametrize("where", ["a", "a_scale", "bias", "c"])
    def test_what_is_no_number_follows_ieee(self, where: str, alpha: float | None) -> None:
        """Two blocks of one product each, one of which is infinite times 0; finite elements stay exact."""
        b = torch.tensor([[1.0, 1.0], [0.0, 2.0], [-2.0, 1.0]])
        b_scale = torch.tensor([[1.0, 2.0], [4.0, 1.0], [0.0, -1.0]])
        for what in (math.nan, math.inf, -math.inf):
            x: dict[str, Tensor] = {
                "a": torch.tensor([[1.0, 2.0], [2.0, -1.0]]),
                "a_scale": torch.tensor([[2.0, 1.0], [1.0, 4.0]]),
                "bias": torch.tensor([1.0, 0.0, -3.0]),
                "c": torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]]),
            }
            x[where][..., 0] = what
            sides = x["a"].to(torch.float8_e5m2), b.to(torch.float8_e5m2), x["a_scale"], b_scale
            more = {"bias": x["bias"], "c": x["c"], "alpha": None if alpha is None else torch.tensor([alpha])}
            found = exact(ScaledProduct(*sides, block=1, b_rows=1, **more))
            for i, j in product_of(range(2), range(3)):
                due = sum(
                    float(x["a_scale"][i, k]) * float(b_scale[j, k]) * (float(x["a"][i, k]) * float(b[j, k]))
                    for k in range(2)
                )
                due = due * (1.0 if alpha is None else alpha) + float(x["bias"][j]) + float(x["c"][i, j])
                assert float(found.hi[i, j]) == due or math.isnan(due) and math.isnan(found.hi[i, j])
                assert float(found.lo[i, j]) == float(found.slack[i, j]) == 0.0

    @pytest.mark.parametrize("alpha", [3.0, -0.5, 1 + 2.0**-23])
    def test_both_words_times_an_alpha(self, alpha: float) -> None:
        one, words = torch.ones(1, 1), (1 + 2.0**-52, 2.0**-70, 0.0)
        x = one.to(torch.float8_e4m3fn)
        product = ScaledProduct(x, x, one, one, block=1, b_rows=1, alpha=torch.tensor([alpha]))
        found = finished(product, Exact(*(torch.full((1, 1), w, dtype=torch.float64) for w in words)))
        due = Fraction(alpha) * (Fraction(words[0]) + Fraction(words[1]))
        assert Fraction(float(found.hi)) + Fraction(float(found.lo)) == due

    def test_the_slack_of_an_alpha(self) -> None:
        """``2^-53`` of the low word's product and of the sum into the low word, and what was missing before."""
        one = torch.ones(1, 1).to(torch.float8_e4m3fn)
        scale = torch.ones(1, 1)

        def slack(alpha: float, *words: float) -> float:
            product = ScaledProduct(one, one, scale, scale, block=1, b_rows=1, alpha=torch.tensor([alpha]))
            return float(finished(product, Exact(*(torch.full((1, 1), x, dtype=torch.float64) for x in words))).slack)

        assert slack(-3.0, 1.0, 0.0, 2.0**-80) == 3 * 2.0**-80 * (1 + 2.0**-50)
        # (1 + 2^-52) (1 + 2^-23) misses 2^-75; the sum with the low word is exact
        e, low = 2.0**-75, 2.0**-70 * (1 + 2.0**-23)
        assert slack(1 + 2.0**-23, 1 + 2.0**-52, 2.0**-70, 0.0) == (low + (e + low)) * 2.0**-53 * (1 + 2.0**-50)

    @pytest.mark.parametrize(
        ("lo", "least"), [(2.0**-53, 2.0**-61), (2.0**-53, -(2.0**-61)), (-(2.0**-54), -(2.0**-61))]
    )
    def test_a_tie_that_slack_leaves_open(self, lo: float, least: float) -> None:
        """Of float64: ``1 + lo`` is a tie, and what ``slack`` allows for decides it."""
        a = torch.tensor([[1.0, lo, least]])
        one = torch.ones(1, 1)
        product = ScaledProduct(a, torch.ones(1, 3), one, one, block=3, b_rows=1)
        value = Exact(*(torch.full((1, 1), x, dtype=torch.float64) for x in (1.0, lo, 2.0**-60)))
        assert float(nearest(product, value)) == float(1 + Fraction(lo) + Fraction(least))

    def test_tiles_of_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two rows at a time, the last one alone; as many columns as one tile holds in two rows."""
        product = small(1, m=5, n=3)
        whole = exact(product)
        monkeypatch.setattr(gemm, "TILE", 2 * 3)
        assert [(rows.start, rows.stop, tile.M) for rows, tile in product.tiles()] == [(0, 2, 2), (2, 4, 2), (4, 5, 1)]
        assert torch.equal(exact(product).hi, whole.hi) and torch.equal(exact(product).lo, whole.lo)

    def test_bands_of_codes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two rows of three codes at a time: what is counted, and which rows are finite."""
        monkeypatch.setattr(gemm, "BAND", 6)
        for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
            x = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, math.nan], [0.5, 1, 2], [16, 1, 1]]).to(dtype)
            side = Decoded(x, torch.ones(1, 1))
            assert side.finite_rows.tolist() == [True, True, False, True, True]
            assert side.facts == gemm.Facts(16.0, 0.5, 0.5)
        assert Decoded(torch.zeros(2, 3).to(torch.float8_e4m3fn), torch.ones(1, 1)).facts == gemm.Facts(
            0.0, math.inf, 1.0
        )

    def test_infinity_is_no_number(self) -> None:
        for dtype in (torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32):
            x = torch.tensor([[1.0, -math.inf], [torch.finfo(dtype).max, torch.finfo(dtype).min], [math.nan, 0.0]])
            assert Decoded(x.to(dtype), torch.ones(1, 1)).finite_rows.tolist() == [False, True, False]

    def test_codes_times_their_scales(self) -> None:
        """In bfloat16 where it holds them; in E4M3 where it holds the codes."""
        a, b = torch.tensor([[1.0, 2.0], [0.5, 3.0]]), torch.tensor([[1.0, 1.0], [2.0, -1.0], [4.0, 1.5]])
        a_scale, b_scale = torch.tensor([[2.0, 1.0], [4.0, 8.0]]), torch.tensor([[1.0, 0.5], [2.0, 16.0]])
        fp8 = torch.float8_e5m2
        product = ScaledProduct(a.to(fp8), b.to(fp8), a_scale, b_scale, block=1, b_rows=2)
        made = product.dequantised(torch.bfloat16)
        assert made is not None and made.a.dtype is torch.bfloat16
        assert torch.equal(made.a.float(), a * a_scale) and torch.equal(made.b.float(), b * b_scale[[0, 0, 1]])
        assert (made.a_scale.tolist(), made.b_scale.tolist(), made.block, made.b_rows) == ([[1.0]], [[1.0]], 2, 3)
        assert replace(product, a_scale=a_scale * (1 + 2.0**-20)).dequantised(torch.bfloat16) is None
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            wide = product.widened(dtype)
            assert wide is not None and wide.a.dtype is wide.b.dtype is dtype and wide.a_scale is a_scale
            assert torch.equal(wide.a.float(), a) and torch.equal(wide.b.float(), b)
            assert product.widens(dtype) is (dtype is torch.bfloat16)  # whatever the codes are
        large = ScaledProduct((a * 2.0**14).to(fp8), b.to(fp8), a_scale, b_scale, block=1, b_rows=2)
        assert large.widened(torch.float8_e4m3fn) is None
        nan = ScaledProduct(torch.full((2, 2), math.nan).to(fp8), b.to(fp8), a_scale, b_scale, block=1, b_rows=2)
        widened, dequantised = nan.widened(torch.float8_e4m3fn), nan.dequantised(torch.bfloat16)
        assert widened is not None and dequantised is not None
        assert bool(widened.a.float().isnan().all()) and bool(dequantised.a.isnan().all())

    def test_which_operand_is_in_other_memory(self) -> None:
        product = small(1, alpha=torch.tensor([2.0]), bias=scales(5, 3))
        same = replace(product)
        assert product.operands_changed(same) == (False, False)
        for name, due in (
            ("a", (True, False)),
            ("a_scale", (True, False)),
            ("b", (False, True)),
            ("b_scale", (False, True)),
        ):
            assert product.operands_changed(replace(product, **{name: getattr(product, name).clone()})) == due
        both = replace(product, a=product.a.clone(), b=product.b.clone())
        assert product.operands_changed(both) == (True, True)
        assert product.operands_changed(replace(product, alpha=torch.tensor([2.0]))) is None
        assert product.operands_changed(product.rows(0, 1)) is None

    def test_rows_of_sixteen_bits(self) -> None:
        assert take_rows(torch.arange(4.0).bfloat16(), torch.tensor([2, 0])).tolist() == [2.0, 0.0]

    @pytest.mark.parametrize(
        ("large", "small", "k"),
        # large K fits float64 in halves; large over small does not for any K, which bands mend; K is not halved for it
        [(2.0**41, 1.0, 2 * LONG), (2.0**30, 2.0**-30, 2 * LONG), (2.0**42, 1.0, LONG)],
    )
    def test_two_sums_where_one_would_round(self, large: float, small: float, k: int) -> None:
        a = torch.tensor([large, small], dtype=torch.float64).repeat(1, k // 2)
        a[0, -1] = 0.0
        parts = list(block_sums(a, torch.ones(1, k, dtype=torch.float64)))
        exact = k // 2 * Fraction(large) + (k // 2 - 1) * Fraction(small)
        assert len(parts) == 2 and sum(Fraction(float(part)) for part in parts) == exact

    def test_rows_of_one_dimension(self) -> None:
        assert take_rows(torch.arange(4.0), torch.tensor([2, 0])).tolist() == [2.0, 0.0]

    def test_ranges_of_k(self) -> None:
        """Blocks of 16 keep their scales; a range that cuts one is refused, of two blocks too."""
        one = torch.ones(1, 48).to(torch.float8_e4m3fn)
        scale = torch.tensor([[1.0, 2.0, 4.0]])
        product = ScaledProduct(one, one, scale, scale, block=16, b_rows=1)
        part = product.over([(32, 48), (0, 16)])
        assert (part.K, part.block, part.a_scale.tolist()) == (32, 16, [[4.0, 1.0]])
        two = ScaledProduct(one[:, :32], one[:, :32], scale[:, :2], scale[:, :2], block=16, b_rows=1)
        with pytest.raises(ShapeError):
            two.over([(8, 32)])


def one_logit(q: Tensor, weights: Tensor, blocks: Tensor | None = None, k_scale: float = 1.0) -> logits.Logits:
    """``q [1, H, D]`` against ones."""
    k = torch.full((1, q.shape[2]), 2, dtype=torch.uint8) if blocks is not None else torch.ones(1, q.shape[2])
    k_blocks = None if blocks is None else torch.ones(1, blocks.shape[2]).to(torch.float8_e8m0fnu)
    k = k if blocks is not None else k.to(q.dtype)
    ends = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    scale = torch.tensor([k_scale])
    return logits.Logits(q, k, scale, weights, *ends, q_blocks=blocks, k_blocks=k_blocks)


class TestLogits:
    def test_dot_products_of_codes_need_no_quantum_of_the_data(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the formats say suffices: looking for it in the data took as long as the products."""
        monkeypatch.setattr(gemm, "quantum_of", lambda x: pytest.fail("the data were searched"))
        q = torch.full((1, 2, 32), 2.0**-9).to(torch.float8_e4m3fn)
        problem = one_logit(q, torch.ones(1, 2))
        assert float(problem.dots.hi[0, 0, 0]) == 32 * 2.0**-9
        assert gemm.quantum_of_codes(E4M3FN, E4M3FN) == 2.0**-18 and gemm.quantum_of_codes(E4M3FN, E2M1) == 2.0**-10

    def test_a_problem_of_one_tile_computes_its_dot_products_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        problem = one_logit(torch.ones(1, 1, 32).to(torch.float8_e4m3fn), torch.ones(1, 1))
        assert next(problem.tiles()).dots is problem.dots
        monkeypatch.setattr(logits, "TILE", 0)
        rows = replace(
            problem, q=problem.q.expand(2, 1, 32), weights=torch.ones(2, 1), start=torch.zeros(2), stop=torch.ones(2)
        )
        assert [len(tile.q) for tile in rows.tiles()] == [1, 1]

    def test_an_infinite_weight_times_a_relu_of_zero(self) -> None:
        q = torch.full((1, 1, 32), -1.0).to(torch.float8_e4m3fn)
        assert math.isnan(float(logits.exact(one_logit(q, torch.tensor([[math.inf]]))).hi))

    def test_a_dot_product_of_two_words(self) -> None:
        """``(1 + 2^-70) w s``: the low word counts, and the slack is that of the roundings that it meets."""
        q = torch.zeros(1, 1, 64, dtype=torch.uint8)
        q[0, 0, 0] = q[0, 0, 32] = 2  # E2M1: 1.0
        blocks = torch.tensor([[[1.0, 2.0**-70]]]).to(torch.float8_e8m0fnu)
        weight, scale = 1 + 2.0**-23, 1 + 2.0**-20
        value = logits.exact(one_logit(q, torch.tensor([[weight]]), blocks, scale))
        due = (1 + Fraction(2) ** -70) * Fraction(weight) * Fraction(scale)
        assert abs(Fraction(float(value.hi)) + Fraction(float(value.lo)) - due) <= Fraction(float(value.slack))
        low = 2.0**-70 * weight  # beside it the product of weight and scale is exact: it has 45 bits
        slack = 2.0**-51 * 2 * low * (1 + 2.0**-40) * scale + 2.0**-51 * 2 * low * scale
        assert math.isclose(float(value.slack), slack, rel_tol=2.0**-44)

    def test_the_slack_of_one_head(self) -> None:
        """``2^-51`` of the low word and of its product with the scale."""
        q = torch.zeros(1, 1, 4)
        q[0, 0, 0], q[0, 0, 1] = 448.0, 2.0**-9
        problem = one_logit(q.to(torch.float8_e4m3fn), torch.tensor([[1 + 2.0**-23]]))
        assert float(logits.exact(problem).slack) == 0.0  # 41 bits
        wide = replace(problem, k=(448 * torch.ones(1, 4)).to(torch.float8_e4m3fn))
        wide.k[0, 1] = 2.0**-9
        value = (Fraction(448) ** 2 + Fraction(2) ** -18) * (1 + Fraction(2) ** -23)
        low = abs(value - Fraction(float(value)))
        assert low > 0 and float(logits.exact(wide).slack) == 2.0**-51 * 2 * float(low)

    @pytest.mark.parametrize("fp4", [False, True])
    def test_tiles_of_rows(self, fp4: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two rows at a time, the last one alone."""
        q, k, blocks = codes(1, 5, 2, 32), codes(2, 4, 32), {}
        if fp4:
            q, k = (x.view(torch.uint8) & 0xF for x in (q, k))
            shapes = {"q_blocks": (5, 2, 1), "k_blocks": (4, 1)}
            blocks = {name: (2.0 ** grid(3, *of, most=4, unit=1.0)).to(logits.E8M0) for name, of in shapes.items()}
        ends = torch.zeros(5, dtype=torch.int64), torch.full((5,), 4)
        problem = logits.Logits(q, k, scales(1, 4), grid(3, 5, 2).float(), *ends, **blocks)
        whole = logits.exact(problem)
        monkeypatch.setattr(logits, "TILE", 2 * 2 * 4)
        assert [tile.q.shape[0] for tile in problem.tiles()] == [2, 2, 1]
        assert torch.equal(logits.exact(problem).hi, whole.hi) and torch.equal(logits.exact(problem).lo, whole.lo)

    @pytest.mark.parametrize("powers", [(60, 0, 0), (0, -70, 0), (0, -60, -120)])
    def test_dot_products_of_two_and_three_words(self, powers: tuple[int, ...]) -> None:
        """The low word ``2^p`` counts twice, in its product and in the sum of both; what is below it is slack."""
        q = torch.zeros(1, 1, 96, dtype=torch.uint8)
        q[0, 0, ::32] = 2  # E2M1: 1.0
        if powers[2] == 0:
            q[0, 0, 64] = 0
        blocks = (2.0 ** torch.tensor([[powers]], dtype=torch.float64)).float().to(torch.float8_e8m0fnu)
        problem = one_logit(q, torch.ones(1, 1), blocks)
        dot = problem.dots
        low, lost = float(dot.lo), float(dot.slack)
        assert low == 2.0 ** min(powers[:2]) and (lost > 0) == (powers[2] != 0)
        due = (2.0**-51 * 2 * low + lost) * (1 + 2.0**-40) + 2.0**-51 * 2 * low
        assert math.isclose(float(logits.exact(problem).slack), due, rel_tol=2.0**-45)

    @pytest.mark.parametrize(
        ("table", "due"),
        [
            ([[0, 0], [2, 1], [3, 0]], [2, 1]),
            ([[0, 0], [1, 0], [3, 0]], [1, 2]),  # the second request has no segment
            ([[0, 0], [1, 1], [3, 0]], "row 1 is (1, 1)"),
            ([[0, 0], [2, -1], [3, 0]], "row 1 is (2, -1)"),
            ([[0, 0], [2, 2], [3, 0]], "row 1 is (2, 2)"),
            ([[0, 0], [-1, 0], [3, 0]], "row 1 is (-1, 0)"),
            ([[0, 0], [3, 1], [3, 0]], "row 1 is (3, 1)"),
            ([[2, 0], [2, 1], [3, 0]], "from segment 1 to 3"),
            ([[0, 0], [2, 1], [2, 1]], "from segment 0 to 2"),
            ([[0, 0], [2, 1], [2, 0], [3, 0]], "processor 1 ends before it starts"),
            ([[0, 0], [2, 1], [2, 1], [3, 0]], [2, 0, 1]),
        ],
    )
    def test_shares_of_a_table(self, table: list[list[int]], due: list[int] | str) -> None:
        """Requests of one, no and two segments."""
        found = logits.shares(torch.tensor(table), torch.tensor([3, 0, 8]), 1)
        assert due in found if isinstance(due, str) else found == due

    def test_segments(self) -> None:
        """A request without keys has no segment; a negative length counts as 0."""
        assert logits.segments(torch.tensor([-5, 0, 1, 4, 5]), 1) == [0, 0, 1, 4, 5]
        assert logits.segments(torch.tensor([[1, 4], [2, 9]]), 4) == [1, 3]


class TestMoe:
    def test_what_is_rounded_where(self) -> None:
        """vLLM's first CUTLASS layer stores the products and the weights in the output's dtype and adds in float32."""
        scaled = moe.Combine.SCALED.value
        assert (scaled.stored, scaled.weight, scaled.term) == (True, True, True)
        assert scaled.addition is moe.Addition.FLOAT32
        assert moe.stored_as(moe.Steps(combine=moe.Combine.SCALED)) is torch.bfloat16

    def test_one_scale_of_a_row_holds_for_every_block(self) -> None:
        fp8 = torch.float8_e4m3fn
        experts = moe.Experts(
            torch.ones(1, 256, 256).to(fp8), torch.ones(1, 2, 2), torch.ones(1, 256, 128).to(fp8), torch.ones(1, 2, 1)
        )
        scale = torch.tensor([[2.0], [3.0]])
        product = experts.product("w13", 0, torch.ones(2, 256).to(fp8), scale)
        assert product.a_scale.tolist() == [[2.0, 2.0], [3.0, 3.0]]

    def test_a_hidden_quantiser_of_rows(self) -> None:
        """448 and a half of it are codes under the scale of their row; what is read back is what was stored."""
        h = torch.tensor([[448.0, 224.0, -56.0], [4.48, 0.0, 2.24]], dtype=torch.float32)
        read = moe.read_back(h, moe.Steps(hidden=VLLM_TOKEN))
        assert torch.allclose(read, h.double(), rtol=2.0**-22, atol=0.0)


class TestRouting:
    def softmax(self, **changes: object) -> routing.Router:
        given: dict[str, object] = {"scoring": routing.Scoring.SOFTMAX, "top_k": 1} | changes
        return routing.Router(**given)  # type: ignore[arg-type]  # each test gives fields of the record

    def test_the_width_of_a_softmax(self) -> None:
        """Two exponentials (of the logit and in the sum), ``E`` additions and roundings, a quotient, a product."""
        x = torch.tensor([[2.0, -1.0, 0.5]])
        scored = routing.scores(x, self.softmax())
        depth = torch.tensor([[0.0, 3.0, 1.5]], dtype=torch.float64)
        relative = 2 * (2.0**-20 + 2.0**-22 * depth) + (3 + 2) * 2.0**-24 + 2.0**-48
        for end, sign in ((scored.score_span.low, -1), (scored.score_span.high, 1)):
            found = (end - sign * 2.0**-126) / scored.score - 1
            assert torch.allclose(found, sign * relative, rtol=0.0, atol=2.0**-51)
        same = scored.choice_span
        assert torch.equal(same.low, scored.score_span.low) and torch.equal(same.high, scored.score_span.high)

    def test_the_width_of_a_sigmoid(self) -> None:
        """``2^-20 + 2^-22 |x|`` of ``ex2.approx`` and ``rcp.approx``, and of float64; a logit has none."""
        x = torch.tensor([[2.0, -1.0, 0.0]])
        scored = routing.scores(x, self.softmax(scoring=routing.Scoring.SIGMOID))
        relative = 2.0**-20 + 2.0**-22 * x.abs().double() + 2.0**-48
        for end, sign in ((scored.score_span.low, -1), (scored.score_span.high, 1)):
            found = (end - sign * 2.0**-126) / scored.score - 1
            assert torch.allclose(found, sign * relative, rtol=0.0, atol=2.0**-51)
        plain = routing.scores(x, self.softmax(scoring=routing.Scoring.LOGIT))
        for span in (plain.score_span, plain.choice_span):
            assert torch.equal(span.low, x.double()) and torch.equal(span.high, x.double())

    @pytest.mark.parametrize(("biased", "due"), [(False, [4.0, -1.0]), (True, [6.0, -3.0])])
    def test_the_width_of_a_group(self, biased: bool, due: list[float]) -> None:
        """Its two largest choices with a bias, one without; the float32 sum of both ends errs by ``2^-23`` of each."""
        x = torch.tensor([[1.0, 4.0, 2.0, -1.0, -2.0, -8.0]])
        router = self.softmax(scoring=routing.Scoring.LOGIT, groups=2)
        scored = routing.scores(x, router)
        wide = replace(scored, choice_span=routing.Span(x.double() - 0.5, x.double()))
        low, high = (end.flatten().tolist() for end in routing.group_spans(wide, router, biased))
        for i, value in enumerate(due):
            least = value - (1.0 if biased else 0.5)
            slack = 2.0**-23 * (abs(least) + abs(value))
            assert (low[i], high[i]) == (least - slack, value + slack)

    @pytest.mark.whole("each is another condition")
    @pytest.mark.parametrize(
        ("x", "ids", "wrong"),
        [
            # three groups of two of which two remain; the largest of a group counts
            ([4.0, 3.0, 2.0, 1.0, 0.0, -1.0], [0, 2], True),  # 1 is in a kept group and larger
            ([4.0, 3.0, 2.0, 1.0, 0.0, -1.0], [0, 1], False),
            ([4.0, 1.0, 2.0, 1.5, 0.0, -1.0], [0, 2], False),
            ([4.0, 1.0, 2.0, 1.5, 0.0, -1.0], [0, 4], True),  # of a group that is not among the best
            ([4.0, 1.0, 2.0, 1.5, 2.0, -1.0], [0, 4], False),  # two groups are equal
            ([4.0, 1.0, 2.0, 1.5, 2.0, -1.0], [0, 2], False),
            ([4.0, 1.0, 2.0, 2.0, -1.0, -1.0], [0, 3], False),  # two experts are
            ([4.0, 1.0, 2.0, 2.0, -1.0, -1.0], [3, 0], False),
            ([4.0, 1.0, 2.0, 2.0, -1.0, -1.0], [2, 3], True),  # the largest is left out
            ([4.0, 4.0, 4.0, 4.0, 4.0, 4.0], [0, 5], False),
            ([4.0, 4.0, 4.0, 4.0, 4.0, 4.0], [2, 3], False),
            ([4.0, 3.5, 4.0, 3.0, 4.0, 3.0], [1, 2], True),  # of a group that is chosen from, 0 is larger
            ([4.0, 3.5, 4.0, 3.0, 4.0, 3.0], [0, 2], False),
        ],
    )
    def test_experts_of_groups(self, x: list[float], ids: list[int], wrong: bool) -> None:
        router = self.softmax(top_k=2, scoring=routing.Scoring.LOGIT, groups=3, top_groups=2)
        scored = routing.scores(torch.tensor([x]), router)
        assert routing.misrouted(torch.tensor([ids]), scored, router, biased=False).tolist() == [wrong]

    @pytest.mark.parametrize(
        ("x", "lost"), [([4.0, 1.0, 2.0, 1.5, 2.0, -1.0], True), ([4.0, 1.0, 3.0, 1.5, 2.0, -1.0], False)]
    )
    def test_groups_that_may_change_places(self, x: list[float], lost: bool) -> None:
        router = self.softmax(top_k=2, scoring=routing.Scoring.LOGIT, groups=3, top_groups=2)
        scored = routing.scores(torch.tensor([x]), router)
        ways, gone = routing.alternatives(scored, router, torch.tensor([[0, 2]]), biased=False)
        assert gone.tolist() == [lost] and len(ways) == 1

    def test_an_equal_expert_may_be_chosen(self) -> None:
        router = self.softmax(scoring=routing.Scoring.LOGIT)
        scored = routing.scores(torch.tensor([[1.0, 1.0, 0.0]]), router)
        assert routing.misrouted(torch.tensor([[1]]), scored, router, biased=False).tolist() == [False]

    @pytest.mark.parametrize("renormalise", [False, True])
    def test_the_width_of_a_weight(self, renormalise: bool) -> None:
        """``k + 4`` roundings around the score, or around its share of the scores, and a flush."""
        changes = {"scoring": routing.Scoring.SIGMOID, "renormalise": renormalise, "scaling": 2.5, "epsilon": 0.25}
        router, ids = self.softmax(top_k=2, **changes), torch.tensor([[0, 2]])
        scored = routing.scores(torch.tensor([[1.0, -2.0, 0.5]]), router)
        found = routing.weight_span(scored, ids, router)
        low, high = ([float(end[0, i]) for i in (0, 2)] for end in (scored.score_span.low, scored.score_span.high))
        if renormalise:
            low, high = (
                [low[i] / (low[i] + high[1 - i] + 0.25) for i in (0, 1)],
                [high[i] / (high[i] + low[1 - i]) for i in (0, 1)],
            )
        for end, ends, sign in ((found.low, low, -1), (found.high, high, 1)):
            due = torch.tensor([[x * (1 + sign * 6 * 2.0**-24) * 2.5 for x in ends]], dtype=torch.float64)
            assert torch.allclose(end, due, rtol=2.0**-48, atol=0.0)

    @pytest.mark.parametrize(
        ("changes", "fits"),
        [
            ({"top_k": 8}, True),
            ({"top_k": 0}, False),
            ({"top_k": 9}, False),
            ({"groups": 3}, False),
            ({"groups": 4, "top_groups": 0}, False),
            ({"groups": 4, "top_groups": 4}, True),
            ({"groups": 4, "top_groups": 5}, False),
            ({"groups": 4, "top_groups": 1, "top_k": 2}, True),
            ({"groups": 4, "top_groups": 1, "top_k": 3}, False),
        ],
    )
    def test_what_fits_eight_experts(self, changes: dict[str, int], fits: bool) -> None:
        with nullcontext() if fits else pytest.raises(OptionError):
            routing.check(self.softmax(**changes), 8)

    @pytest.mark.parametrize(
        ("ids", "wrong"), [([0, 1], False), ([0, 4], True), ([0, -1], True), ([0, 0], True), ([0, 2], True)]
    )
    def test_experts_that_are_none_or_chosen_twice(self, ids: list[int], wrong: bool) -> None:
        router = self.softmax(top_k=2, scoring=routing.Scoring.LOGIT)
        scored = routing.scores(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), router)
        assert routing.misrouted(torch.tensor([ids]), scored, router, biased=False).tolist() == [wrong]

    def test_a_score_below_float32(self) -> None:
        """It may be flushed: its interval reaches ``2^-126``."""
        scored = routing.scores(torch.tensor([[0.0, -800.0]]), self.softmax(scoring=routing.Scoring.SIGMOID))
        assert float(scored.score_span.high[0, 1]) == 2.0**-126

    def test_the_sum_with_a_bias_is_rounded(self) -> None:
        x, bias = torch.tensor([[1.0, -2.0]]), torch.tensor([0.25, 0.5])
        scored = routing.scores(x, self.softmax(scoring=routing.Scoring.SIGMOID), bias)
        width = scored.score_span.high - scored.score_span.low
        rounded = 2.0**-24 * (scored.choice.abs() + width)
        assert torch.allclose(
            scored.choice_span.high - scored.choice_span.low - width, 2 * rounded, rtol=2.0**-20, atol=0.0
        )

    @pytest.mark.parametrize(("tied", "lost"), [(2, False), (12, False), (13, True)])
    def test_so_many_choices_are_tried(self, tied: int, lost: bool) -> None:
        """One of ``tied`` equal experts: so many choices less the kernel's own."""
        x = torch.cat([torch.ones(1, tied), torch.zeros(1, 3)], dim=1)
        router = self.softmax(scoring=routing.Scoring.LOGIT)
        ways, gone = routing.alternatives(routing.scores(x, router), router, torch.tensor([[0]]), biased=False)
        assert gone.tolist() == [lost] and len(ways) == (1 if lost else tied)

    def test_few_choices_of_many_sets(self) -> None:
        """One expert is certain, one of seven equal ones is not: 7 choices of 28 sets."""
        x = torch.tensor([[2.0, *[0.5] * 7]])
        router = self.softmax(top_k=2, scoring=routing.Scoring.LOGIT)
        ways, gone = routing.alternatives(routing.scores(x, router), router, torch.tensor([[0, 3]]), biased=False)
        assert gone.tolist() == [False]
        assert sorted(way[0].tolist()[1] for way in ways) == list(range(1, 8))

    def test_one_expert_a_group(self) -> None:
        """With a bias too its one choice is all that a group has."""
        x = torch.tensor([[1.0, 3.0, 2.0, 4.0]])
        router = self.softmax(top_k=2, scoring=routing.Scoring.LOGIT, groups=4, top_groups=2)
        assert routing.route(x, router, torch.zeros(4))[1].tolist() == [[3, 1]]

    def test_weights_over_their_sum(self) -> None:
        router = self.softmax(top_k=2, renormalise=True, epsilon=0.5, scaling=3.0)
        score = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64)
        assert routing.weights_of(score, torch.tensor([[1, 2]]), router).tolist() == [[2.0, 0.5]]

    def test_the_router_of_llama(self) -> None:
        router = routing.llama4()
        assert (router.top_k, router.choose_by_logit, router.on_input, router.groups) == (1, True, True, 1)

    def test_sets_that_are_not_all_tried(self) -> None:
        """Six of eight experts are certain, two of five are not: 10 choices of 165 sets, more than are tried."""
        x = torch.tensor([[*[2.0] * 6, *[0.5] * 5, -1.0]])
        router = self.softmax(top_k=8, scoring=routing.Scoring.SIGMOID)
        scored = routing.scores(x, router)
        ids = torch.arange(8)[None, :]
        _, gone = routing.alternatives(scored, router, ids, biased=False)
        assert gone.tolist() == [True]

    def test_a_token_that_is_lost_has_no_choices(self) -> None:
        """Three equal experts are three choices; beside an infinite logit nothing is tried."""
        x = torch.tensor([[math.inf, 1.0, 1.0, 1.0]])
        router = self.softmax(top_k=2, scoring=routing.Scoring.LOGIT)
        ways, gone = routing.alternatives(routing.scores(x, router), router, torch.tensor([[0, 1]]), biased=False)
        assert gone.tolist() == [True] and len(ways) == 1
