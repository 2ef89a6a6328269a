"""Conditions of oracle.bounds at equality: what is open, exact, or refused on either side of one number.

Each limit is met exactly, and missed by one float64 or one unit, so a wrong comparison, constant or term moves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.bounds import chain, code_boxes, cpu_kernels, cuda_residue, engines, product, steps
from oracle.bounds.boxed import Box, boxed_product
from oracle.bounds.chain import Operand
from oracle.bounds.ieee32 import ieee32_bound
from oracle.bounds.interval import Interval
from oracle.bounds.product import (
    FLOAT32_MAX,
    REACH,
    Promotion,
    any_order_bound,
    check_fit,
    residue_bound,
    scaled_at_the_end,
    split_bound,
    stored_before,
    unrounded,
    with_summand,
)
from oracle.bounds.quantiser import (
    CodeSet,
    ScaleSet,
    _candidates,
    _unless_exceptional,
    admitting,
    identify,
    judge_recipe,
    same_bytes,
    same_kind,
    scale_set,
)
from oracle.errors import NumericsError
from oracle.numbers import formats
from oracle.numbers.formats import E4M3FN
from oracle.numbers.quantize import prepare
from oracle.numbers.recipe_table import of_element, recipes
from oracle.numbers.recipes import DEEPGEMM_1X128_UE8M0, TORCH_TENSOR, VLLM_GROUP, CodeFormula, PowerOfTwo
from oracle.tensorcore.instructions import Order, Sum
from oracle.truth import gemm
from oracle.truth.gemm import Exact, ScaledProduct
from oracle.truth.routing import Span
from tests.support.edges import accumulator, grid, scales, small

pytestmark = pytest.mark.whole("each instance is another condition, of some ms")

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


def one(x: float) -> Tensor:
    """A result of one element, float64."""
    return torch.full((1, 1), x, dtype=torch.float64)


def below(x: float) -> float:
    """The float64 before it."""
    return math.nextafter(x, 0.0)


def test_numbers_of_float32_and_bfloat16() -> None:
    assert torch.finfo(torch.float32).max == FLOAT32_MAX == chain.OVERFLOW
    assert torch.finfo(BF16).max == product.BF16_MAX
    assert REACH == FLOAT32_MAX - 2.0**-20 * FLOAT32_MAX == cpu_kernels.REACH
    assert (chain.EMIN32, chain.LEAST, chain.TILES, chain.MOST_STRIDE) == (-126, 2.0**-126, (32, 64, 128, 256), 16)


@pytest.mark.turns(4)
class TestFloat32:
    """An element is open from ``REACH`` on, wherever an intermediate may have that magnitude."""

    def promoted(self, a_scale: float, b_scale: float, *x: float, ordered: bool = True) -> Interval:
        made = Promotion(one(0.0), ordered=ordered)
        shape, zero = (len(x), 1, 1), torch.zeros((len(x), 1, 1), dtype=torch.float64)
        sa, sb = (torch.full(shape, s, dtype=torch.float64) for s in (a_scale, b_scale))
        made.add(sa, sb, torch.tensor(x, dtype=torch.float64).reshape(shape), zero, zero)
        return made.interval(name="", alpha=None)

    def one_chain(self, x: float) -> Interval:
        made = Promotion(one(0.0))
        made.only(one(x), one(0.0), one(0.0))
        return made.interval(name="", alpha=None)

    def summed(self, x: float, alpha: float | None, *summands: float, unordered: int | None = None) -> Interval:
        sums = [one(x), *(one(0.0) for _ in range(3)), one(x), one(0.0), one(0.0)]
        made = Promotion.from_sums(sums[: 4 if unordered is None else 7], one(0.0) != 0, unordered)
        return made.interval(*((one(s), 0.0) for s in summands), name="", alpha=alpha)

    def at_the_end(self, x: float) -> Interval:
        """The second row and column have scales below 1; the first ones would open it."""
        a_scale, b_scale = torch.tensor([[1.0], [0.125]]), torch.tensor([[2.0**118], [0.03125]])
        heavy = replace(small(1, n=2), a_scale=a_scale, b_scale=b_scale, block=32)
        zero = torch.zeros(2, 2, dtype=torch.float64)
        value = Exact(torch.full_like(zero, 0.75 * x), zero, torch.full_like(zero, 0.25 * x))
        width = Interval(zero, zero, "", open=torch.zeros(2, 2, dtype=torch.bool))
        found = scaled_at_the_end(heavy, accumulator(promotion=8), width, lambda _: (value, width))
        assert found.open is not None and bool(found.open[0, 0]) == (x > 2)
        return replace(found, open=found.open[1:, 1:])

    def after(self, x: float) -> Interval:
        parts = Interval(one(-x / 2), one(x / 4), "")
        return with_summand(Exact(one(x / 4), one(0.0), one(x / 2)), parts, one(0.0).float())

    @pytest.mark.parametrize(
        "bound",
        [
            lambda self, x: self.one_chain(x),
            lambda self, x: self.one_chain(-x),
            lambda self, x: self.promoted(x, 1.0, 0.0),  # the scales alone
            lambda self, x: self.promoted(1.0, x, 0.0),
            lambda self, x: self.promoted(x, 1.0, 0.0, ordered=False),
            # unordered, two halves of one size may stand beside each other in a partial sum
            lambda self, x: self.promoted(1.0, 1.0, x / 2, -x / 2, ordered=False),
            lambda self, x: self.promoted(0.25, 1.0, x / 2, -x / 2, ordered=False),
            lambda self, x: self.promoted(0.25, 2.0, x / 4, -x / 4, ordered=False),
            lambda self, x: self.summed(x, 1.0),
            lambda self, x: self.summed(x, 0.5),  # before alpha
            lambda self, x: self.summed(x / 4, -4.0),
            lambda self, x: self.summed(0.0, None, x),
            lambda self, x: self.summed(x / 2, None, x / 2),
            lambda self, x: self.summed(x / 2, None, x / 2, -x),
            lambda self, x: self.at_the_end(x),
            lambda self, x: self.after(x),
        ],
    )
    def test_open_from_there_on(self, bound: Callable[[TestFloat32, float], Interval]) -> None:
        for x, due in ((REACH, True), (below(REACH), False), (1.0, False)):
            found = bound(self, x).open
            assert found is not None and found.tolist() == [[due]], x

    def test_no_number_may_be_anything(self) -> None:
        assert product.may_overflow(torch.tensor([math.nan, math.inf, 1.0])).tolist() == [True, True, False]

    def test_a_scale_beside_a_chain(self) -> None:
        """Either scale meets the accumulator first."""
        for a, b in ((2.0**64, 2.0**-64), (2.0**-64, 2.0**64)):
            assert self.promoted(a, b, below(REACH) * 2.0**-65).open.tolist() == [[False]]  # type: ignore[union-attr]
            assert self.promoted(a, b, REACH * 2.0**-64).open.tolist() == [[True]]  # type: ignore[union-attr]

    def test_stored_as_bfloat16(self) -> None:
        limit = product.BF16_MAX * (1 - 2.0**-8)
        for x, due in ((limit, True), (below(limit), False)):
            parts = Interval(one(-x / 4), one(x / 8), "", open=one(0.0) != 0)
            found = stored_before(Exact(one(-x / 2), one(0.0), one(x / 4)), parts, one(0.0).float())
            assert found.open is not None and found.open.tolist() == [[due]]

    @pytest.mark.parametrize("after", [with_summand, stored_before])
    def test_what_is_open_stays_open(self, after: Callable[..., Interval]) -> None:
        """A summand opens no element and closes none; NaN and infinity have the width of a zero."""
        value = Exact(*(torch.tensor([[1.0, math.nan, math.inf, 1.0]], dtype=torch.float64) * f for f in (1, 0, 0)))
        value = replace(value, lo=torch.zeros(1, 4), slack=torch.zeros(1, 4))
        zero = torch.zeros(1, 4, dtype=torch.float64)
        opened = torch.tensor([[True, False, True, False]])
        found = after(value, Interval(zero, zero, "", open=opened), zero.float())
        assert found.open is not None and torch.equal(found.open, opened)
        least = 3 * 2.0**-126 if after is with_summand else 2.0**-134
        assert found.hi[0, 1:3].tolist() == [least * (1 + 2.0**-20)] * 2

    def test_which_bounds_are_weak(self) -> None:
        acc, given = accumulator(promotion=8), small(1)
        assert any_order_bound(given, acc).weak is True
        assert residue_bound(given, acc).weak is split_bound(given, acc).weak is False
        assert engines.compiled_residue(given, acc)[1].weak is False


ROW = [15.0] * 8 + [7.0]  # odd, 127


def settled(
    a: list[float],
    b: list[float],
    acc: Any = None,
    *,
    dtype: torch.dtype = torch.float8_e5m2,
    sa: float = 1.0,
    sb: float = 1.0,
    **more: Any,
) -> bool:
    """Whether the one element of a product is exact in every admitted arithmetic."""
    sides = [torch.tensor([x]).to(dtype) for x in (a, b)]
    found = unrounded(
        ScaledProduct(*sides, torch.full((1, 1), sa), torch.full((1, 1), sb), block=len(a), b_rows=1, **more), acc
    )
    return found is not None and bool(found)


def ones(n: int) -> list[float]:
    return [1.0] * n


FUSED, EXACT, TREE = ({"kind": kind} for kind in (Sum.FUSED, Sum.EXACT, Sum.TREE_FLUSH))
X = 2.0**12


@pytest.mark.parametrize(
    ("due", "a", "b", "acc", "more"),
    [
        # float32 holds multiples of 1 below 2^24
        (False, [X, 0.0, 1.0], [X, 1.0, 0.0], None, {}),
        (True, [1.75 * X, 0.0, 1.0], [X / 2, 1.0, 0.0], None, {}),
        (False, [X, 0.0, 1.0], [X, 1.0, 0.0], EXACT, {}),
        (True, [1.75 * X, 0.0, 1.0], [X / 2, 1.0, 0.0], EXACT, {}),
        (False, [X / 2, X / 2, 0.0, 1.0], [X, -X, 1.0, 0.0], None, {}),  # magnitudes count
        # an aligner of t bits and a result of to
        (True, ROW, ones(9), FUSED | {"align": 6, "out": 7}, {"dtype": FP8}),
        (False, [*ROW, 1.0], ones(10), FUSED | {"align": 6, "out": 7}, {"dtype": FP8}),
        (True, ROW, ones(9), FUSED | {"align": 7, "out": 6}, {"dtype": FP8}),
        (False, [*ROW, 1.0], ones(10), FUSED | {"align": 7, "out": 6}, {"dtype": FP8}),
        (True, [*ROW, 1.0], ones(10), EXACT | {"align": 6, "out": 6}, {"dtype": FP8}),
        (True, [15.0], [1.0], FUSED | {"align": 3, "out": 9}, {"dtype": FP8}),
        (False, [15.0], [1.0], FUSED | {"align": 2, "out": 9}, {"dtype": FP8}),
        (True, [15.0], [2.0], FUSED | {"align": 3, "out": 9}, {"dtype": FP8}),
        (False, [15.0], [2.0], FUSED | {"align": 2, "out": 9}, {"dtype": FP8}),
        (True, [2.0], [15.0], FUSED | {"align": 3, "out": 9}, {"dtype": FP8}),
        (False, [2.0], [15.0], FUSED | {"align": 2, "out": 9}, {"dtype": FP8}),
        (True, [0.0], [15.0], FUSED | {"align": 3, "out": 9}, {"dtype": FP8}),
        (False, [0.0], [15.0], FUSED | {"align": 2, "out": 9}, {"dtype": FP8}),
        # the exponent of a subnormal is the least
        (True, [2.0**-9], [1.0], FUSED | {"align": 3, "out": 9}, {"dtype": FP8}),
        (False, [2.0**-9], [1.0], FUSED | {"align": 2, "out": 9}, {"dtype": FP8}),
        # one chain is held, the sum of two is not a chain's
        (True, [15.0, 15.0], [1.0, 1.0], FUSED | {"align": 3, "out": 3, "promotion": 1}, {"dtype": FP8}),
        (False, [15.0, 15.0], [1.0, 1.0], FUSED | {"align": 3, "out": 3, "promotion": 2}, {"dtype": FP8}),
        # where subnormals are flushed
        (True, [2.0**-60], [2.0**-66], TREE, {"dtype": BF16, "sa": 2.0**10, "sb": 2.0**10}),
        (False, [2.0**-60], [2.0**-67], TREE, {"dtype": BF16, "sa": 2.0**10, "sb": 2.0**10}),
        (True, [2.0**-60], [2.0**-67], EXACT, {"dtype": BF16, "sa": 2.0**10, "sb": 2.0**10}),
        (True, [2.0**-126], [X], TREE, {"dtype": BF16, "sa": 2.0**10}),
        (False, [2.0**-127], [X], TREE, {"dtype": BF16, "sa": 2.0**10}),
        (True, [2.0**-127], [X], EXACT, {"dtype": BF16, "sa": 2.0**10}),
        (False, [X], [2.0**-127], TREE, {"dtype": BF16, "sa": 2.0**10}),
        # products with scales stay normal
        (True, [1.0], [1.0], None, {"sa": 2.0**-60, "sb": 2.0**-66}),
        (False, [1.0], [1.0], None, {"sa": 2.0**-60, "sb": 2.0**-67}),
        (False, [X], [X], None, {"sa": 2.0**-60, "sb": 2.0**-67}),
        (False, [0.5], [1.0], None, {"sa": 2.0**-60, "sb": 2.0**-66}),
        (True, [1.0], [1.0], None, {"sa": 2.0**-126, "sb": 2.0**20}),
        (False, [1.0], [1.0], None, {"sa": 2.0**-127, "sb": 2.0**20}),
        (False, [1.0], [1.0], None, {"sa": 2.0**20, "sb": 2.0**-127}),
        (False, [0.5], [1.0], None, {"sa": 2.0**-126, "sb": 2.0**20}),
        (False, [1.0], [0.5], None, {"sa": 2.0**20, "sb": 2.0**-126}),
        # and below 2^127, each scale alone too
        (True, [1.0], [1.0], None, {"sa": 2.0**63}),
        (False, [2.0], [1.0], None, {"sa": 2.0**63}),
        (True, [1.0], [1.0], None, {"sb": 2.0**63}),
        (False, [2.0], [1.0], None, {"sb": 2.0**63}),
        (True, [2.0**60], [2.0**66], None, {"dtype": BF16, "sa": 2.0**-100}),
        (False, [2.0**60], [2.0**67], None, {"dtype": BF16, "sa": 2.0**-100}),
        # scales are powers of two
        (False, [1.0], [1.0], None, {"sa": 3.0}),
        (False, [1.0], [1.0], None, {"sb": -2.0}),
        (False, [1.0], [1.0], None, {"sb": 0.0}),
        (False, [1.0], [1.0], None, {"sa": math.inf}),
        # summands have a quantum too
        (True, [1.0], [1.0], None, {"bias": torch.tensor([2.0**-22])}),
        (False, [1.0], [1.0], None, {"bias": torch.tensor([2.0**-24])}),
        (False, [1.0], [1.0], None, {"bias": torch.tensor([2.0**24])}),
        (False, [2.0**-120], [1.0], None, {"dtype": BF16, "bias": torch.tensor([2.0**-127])}),
        (True, [2.0**-120], [1.0], None, {"dtype": BF16, "bias": torch.tensor([2.0**-126])}),
        (False, [1.0], [1.0], None, {"bias": torch.tensor([math.inf])}),
        (False, [1.0], [1.0], None, {"c": torch.tensor([[-(2.0**24)]])}),
        (True, [1.0], [1.0], None, {"c": torch.tensor([[-(2.0**22)]])}),
        # alpha is a power of two, before the scales and after them; a bias is added after it
        (True, [1.0], [1.0], None, {"alpha": torch.tensor([0.5])}),
        (True, [1.0], [1.0], None, {"alpha": torch.tensor([2.0, 4.0])}),
        (False, [1.0], [1.0], None, {"alpha": torch.tensor([3.0])}),
        (False, [1.0], [1.0], None, {"alpha": torch.tensor([-0.5])}),
        (False, [1.0], [1.0], None, {"alpha": torch.tensor([0.0])}),
        (False, [1.0], [1.0], None, {"alpha": torch.tensor([0.5]), "bias": torch.tensor([2.0**-25])}),
        (False, [1.0], [1.0], None, {"sa": 2.0**-100, "alpha": torch.tensor([2.0**-40])}),
        (False, [1.0], [1.0], None, {"sa": 2.0**-100, "sb": 2.0**-60, "alpha": torch.tensor([2.0**60])}),
        # scales inside an instruction are not covered
        (False, [1.0], [1.0], {"scales_inside": True}, {}),
    ],
)
def test_what_nothing_rounds(due: bool, a: list[float], b: list[float], acc: Any, more: dict[str, Any]) -> None:
    assert settled(a, b, None if acc is None else accumulator(**acc), **more) is due


class TestFit:
    """An accumulator that cannot compute a product is refused, and no other."""

    @pytest.mark.parametrize(
        ("changes", "a_scale", "b_scale", "block", "fits"),
        [
            ({"scales_inside": True}, [2.0, 0.5], [4.0, math.nan], 16, True),
            ({"scales_inside": True}, [3.0, 0.5], [4.0, 1.0], 16, False),
            ({"scales_inside": True}, [2.0, 0.5], [4.0, 6.0], 16, False),
            ({"scales_inside": True}, [-2.0, 0.5], [4.0, 1.0], 16, False),
            ({"scales_inside": True, "scale_format": "float8_e4m3fn"}, [0.0, 448.0], [1.25, math.nan], 16, True),
            ({"scales_inside": True, "scale_format": "float8_e4m3fn"}, [-1.0, 448.0], [1.25, 1.0], 16, False),
            ({"scales_inside": True, "scale_format": "float8_e4m3fn"}, [1.0, 1.0], [1 + 2.0**-9, 1.0], 16, False),
            ({"promotion": None}, [3.0, 0.5], [4.0, 1.0], 16, False),
            ({"promotion": None}, [3.0], [4.0], 32, True),
            ({"promotion": 8}, [3.0, 0.5], [4.0, 1.0], 16, True),
            ({"promotion": 12}, [3.0, 0.5], [4.0, 1.0], 16, False),
            ({"promotion": 12}, [3.0], [4.0], 32, True),
        ],
    )
    def test_of_scales_and_blocks(
        self, changes: dict[str, Any], a_scale: list[float], b_scale: list[float], block: int, fits: bool
    ) -> None:
        x = torch.ones(1, 32).to(FP8)
        given = ScaledProduct(x, x, torch.tensor([a_scale]), torch.tensor([b_scale]), block=block, b_rows=1)
        if fits:
            check_fit(given, accumulator(**changes))
        else:
            with pytest.raises(NumericsError):
                check_fit(given, accumulator(**changes))


class TestConverted:
    """What an instruction makes of its operands moves the bound by the difference of the exact sums."""

    def test_float32_to_tf32(self) -> None:
        """13 bits less; nothing else is lost, but for ``2^-51 K`` of what float64 sums."""
        low, high = 1 + 2.0**-10, (1 + 2.0**-10) + 2.0**-11 + 2.0**-23
        a, b, scale = torch.tensor([[high, 0.0, 2.0, 0.0]]), torch.tensor([[-1.0, 1.0, 0.5, 0.0]]), torch.ones(1, 1)
        acc = accumulator(truncates=True, align=20, out=20, promotion=4)
        given = ScaledProduct(a, b, scale, scale, block=4, b_rows=1)
        x, moved, drift = 1.0 - high, high - low, 4 * 2.0**-51 * (1.0 + high)
        seen: list[tuple[Tensor, ...]] = []

        class Spy(Promotion):
            def add(self, a_scale: Tensor, b_scale: Tensor, *parts: Tensor) -> None:
                seen.append(parts)

        for name in ("left", "right"):
            assert getattr(given, name).fmt.name == "float32"
        sides = [product._Side.of(side, 1, given, acc) for side in (given.left, given.right)]
        exactly = lambda p, q, _: (p.value @ q.value.mT, *(2 * [torch.zeros(1, 1, 1, dtype=torch.float64)]))  # noqa: E731
        product._tile(given, *sides, acc, exactly, Spy(one(0.0)), 4)  # type: ignore[arg-type]  # a chain that loses nothing
        assert [float(t) for t in seen[0]] == [x, moved - drift, moved + drift]

    def test_subnormals_to_zero(self) -> None:
        value = torch.tensor([[2.0**-126, 2.0**-127, -(2.0**-133), 1.0]]).bfloat16()
        given = ScaledProduct(value, value, torch.ones(1, 1), torch.ones(1, 1), block=4, b_rows=1)
        side = product._Side.of(given.left, 1, given, accumulator(flushes=True))
        assert side.converted is not None and side.converted.value.tolist() == [[2.0**-126, 0.0, 0.0, 1.0]]
        assert product._Side.of(given.left, 1, given, accumulator()).converted is None


def largest(sums: list[float]) -> float:
    """The largest magnitude of a sum of consecutive ones."""
    return max((abs(sum(sums[i:j])) for i in range(len(sums)) for j in range(i, len(sums) + 1)), default=0.0)


class TestChain:
    def test_powers_of_two(self) -> None:
        given = torch.tensor([chain.NONE, -1023, -1022, 0, 1023, 5000])
        assert chain.power(given).tolist() == [0.0, 0.0, 2.0**-1022, 1.0, 2.0**1023, 2.0**1023]
        x = torch.tensor([0.0, 2.0**-140, 2.0**-126, 3.0, below(4.0)], dtype=torch.float64)
        assert chain.exponent_floor(x).tolist() == [chain.NONE, -126, -126, 1, 1]
        assert chain.floor_power(-x).tolist() == [0.0, 2.0**-140, 2.0**-126, 2.0, 2.0]

    @pytest.mark.parametrize(("more", "lost"), [(0.0, 0.0), (2.0**104, math.inf)])
    def test_a_sum_of_the_largest_float32(self, more: float, lost: float) -> None:
        half = 2.0**126
        p = torch.tensor([[[chain.OVERFLOW - half + more, half]]], dtype=torch.float64)
        acc = accumulator(align=30, out=30)
        _, low, high = chain.residue_step(*(one(0.0) for _ in range(4)), p, torch.full((1, 1), 127), acc)
        assert (float(low), float(high)) == (-lost, lost)

    @pytest.mark.parametrize("group", [8, 32, 64])
    def test_tiles_that_are_dealt_out(self, group: int) -> None:
        """Against all of them, where consecutive steps have a lesser sum."""
        tile = max(1, 32 // group)
        for stride in (2, 3, 5, 9):
            sums = [1.0 if step // tile % stride == 1 else -1.0 / (stride - 1) for step in range(17 * tile)]
            chains = [
                [x for step, x in enumerate(sums) if step // max(1, products // group) % n == first]
                for products in (32, 64, 128, 256)
                for n in range(1, 17)
                for first in range(n)
            ]
            due = max(largest(some) for some in chains)
            assert chain.reach(torch.tensor([sums], dtype=torch.float64), group).tolist() == [due]
            assert due > largest(sums)

    @pytest.mark.parametrize(
        ("x", "low", "high", "over"),
        [(0.75, 0.0, 0.5, True), (0.75, -0.5, 0.0, False), (-0.75, -0.5, 0.0, True), (-0.75, 0.0, 0.5, False)],
    )
    def test_an_end_beyond_float32(self, x: float, low: float, high: float, over: bool) -> None:
        p = torch.ones(1, 1, 1, dtype=torch.float64)
        given = [one(part * chain.OVERFLOW) for part in (x, low, high, 0.0)]
        found = chain.residue_step(*given, p, torch.zeros((1, 1), dtype=torch.int64), accumulator(align=60, out=60))
        assert bool(torch.isinf(found[1])) is bool(torch.isinf(found[2])) is over

    def test_zeros_that_may_align_nothing(self) -> None:
        """The sum is then the accumulator's own, and is not cut."""
        x, zero = one(1 + 2.0**-10), torch.zeros(1, 1, 2, dtype=torch.float64)
        top = torch.zeros((1, 1), dtype=torch.int64)
        for least, cut in ((torch.full_like(top, chain.NONE), 0.0), (top, 2.0**-3)):
            _, low, high = chain.residue_step(
                x, one(0.0), one(0.0), one(0.0), zero, top, accumulator(out=3, align=6), least
            )
            assert (float(low), float(high)) == (-cut, 0.0)

    @pytest.mark.parametrize("absent", [chain.NONE - 6, chain.NONE + 3, 2 * chain.NONE])
    def test_a_step_of_zeros_changes_nothing(self, absent: int) -> None:
        """Of whatever exponent one operand has where the other is zero; also around an accumulator near 0."""
        low, high, zero = one(-(2.0**-140)), one(2.0**-139), torch.zeros(1, 1, 2, dtype=torch.float64)
        found = chain.residue_step(one(0.0), low, high, one(0.0), zero, torch.full((1, 1), absent), accumulator())
        assert [float(x) for x in found] == [0.0, -(2.0**-140), 2.0**-139]

    @pytest.mark.parametrize("bound", [chain.residue, chain.any_order, chain.split])
    def test_a_row_of_zeros_is_exact(self, bound: Callable[..., tuple[Tensor, ...]]) -> None:
        rows = torch.tensor([[0.0] * 24, [1.5] * 24], dtype=torch.float64)
        a, b = chain.operand(rows, E4M3FN), chain.operand(rows[1:], E4M3FN)
        found = bound(a, b, accumulator(promotion=8))
        assert [x[0, 0].item() for x in found] == [0.0] * 3 and float(found[1][1, 0]) < 0

    @pytest.mark.parametrize("order", [Order.SEQUENTIAL, Order.INTERLEAVED])
    @pytest.mark.parametrize("bound", [chain.residue, chain.any_order, chain.split])
    def test_chains_together(self, bound: Callable[..., tuple[Tensor, ...]], order: Order) -> None:
        """As alone: a batch of chains in front of both dimensions."""
        a, b = (chain.operand(grid(seed, rows, 24), E4M3FN) for seed, rows in ((1, 2), (2, 3)))
        spans, acc = [(0, 12), (12, 24)], accumulator(order=order)
        found = bound(a.together(spans), b.together(spans), acc)
        for i, span in enumerate(spans):
            alone = bound(a.steps(*span), b.steps(*span), acc)
            assert all(torch.equal(x[i], y) for x, y in zip(found, alone, strict=True))

    def test_an_error_that_does_not_end(self) -> None:
        """It doubles until nothing is claimed; beside it another stays."""

        def once(error: Tensor) -> tuple[Tensor, Tensor]:
            grown = torch.where(torch.tensor([True, False]), 2 * error + 1, torch.full_like(error, 0.25))
            return -grown / 2, grown

        low, high = chain.fixed_point(once, torch.tensor([1.0, 3.0], dtype=torch.float64))
        assert (low.tolist(), high.tolist()) == ([-math.inf, -0.125], [math.inf, 0.25])

    @pytest.mark.parametrize(("error", "held"), [(0.0, chain.OVERFLOW), (2.0**100, chain.OVERFLOW - 2.0**100)])
    def test_an_error_up_to_the_largest_float32(self, error: float, held: float) -> None:
        for more, due in ((0.0, error), (2.0**76, math.inf)):
            _, high = chain.fixed_point(lambda _: (one(-error), one(error)), one(held + more))
            assert float(high) == due


class TestSteps:
    KINDS = (Sum.EXACT, Sum.TREE_FLUSH, Sum.LATE_FLOOR, Sum.LATE_FLOOR_ODD_EVEN, Sum.FUSED_THEN_ADD)

    def operand(self, *x: float) -> Operand:
        return chain.operand(torch.tensor([x], dtype=torch.float64), E4M3FN)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_step_of_zeros_changes_nothing(self, kind: Sum) -> None:
        """Of either operand, and beside one; a step of ones is none."""
        acc = accumulator(kind=kind, length=4)
        some, zeros, plain = (1.5, -1.0, 0.25, 3.0), (0.0,) * 4, (1.0,) * 4
        alone = steps.stepwise(self.operand(*some), self.operand(*some), acc)
        for a, b in ((some, zeros), (zeros, some), (plain, zeros), (zeros, plain), ((1.0, 0.0) * 2, (0.0, 1.0) * 2)):
            found = steps.stepwise(self.operand(*some, *a), self.operand(*some, *b), acc)
            assert all(torch.equal(x, y) for x, y in zip(found, alone, strict=True))
        both = steps.stepwise(self.operand(*some, *plain), self.operand(*some, *plain), acc)
        assert float(both[0] - alone[0]) == 4 and float(both[2] - both[1]) > float(alone[2] - alone[1])

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("bound", [steps.stepwise, steps.split])
    def test_chains_together(self, bound: Callable[..., tuple[Tensor, ...]], kind: Sum) -> None:
        """As alone: a batch of chains in front of both dimensions."""
        a, b = (chain.operand(grid(seed, rows, 24), E4M3FN) for seed, rows in ((1, 2), (2, 3)))
        spans, acc = [(0, 12), (12, 24)], accumulator(kind=kind, length=4)
        found = bound(a.together(spans), b.together(spans), acc)
        for i, span in enumerate(spans):
            alone = bound(a.steps(*span), b.steps(*span), acc)
            assert all(torch.equal(x[i], y) for x, y in zip(found, alone, strict=True))

    @pytest.mark.parametrize(("held", "lost"), [(0.25, 0.125), (0.5, 0.0), (0.75, 0.0), (-0.5, 0.0), (-0.25, 0.125)])
    def test_two_binades_below_the_products(self, held: float, lost: float) -> None:
        """An accumulator of at least half of their power of two loses no unit of 3 bits."""
        p, e = torch.ones(1, 1, 1, dtype=torch.float64), torch.zeros((1, 1, 1), dtype=torch.int64)
        acc = accumulator(kind=Sum.LATE_FLOOR, align=3, wide=9)
        low, high = steps._late_floor(p, e, (one(held), one(held)), acc)
        assert (float(low), float(high)) == (-lost, 0.0)

    @pytest.mark.parametrize(("power", "dropped"), [(-25, 0.0), (-26, 2.0**-26)])
    def test_an_accumulator_that_may_be_dropped(self, power: int, dropped: float) -> None:
        """25 binades below the products."""
        p, e = torch.ones(1, 1, 1, dtype=torch.float64), torch.zeros((1, 1, 1), dtype=torch.int64)
        held = one(-(2.0**power)), one(-(2.0**power))
        _, high = steps._late_floor(p, e, held, accumulator(kind=Sum.LATE_FLOOR_ODD_EVEN, align=3, wide=9))
        assert float(high) == dropped

    def test_a_sum_that_may_reach_a_power_of_two(self) -> None:
        """``2^-40`` below it the rounding is that of the power."""
        for less, power in ((2.0**-41, 1.0), (2.0**-39, 0.5)):
            found = float(steps._tree(torch.tensor([[0.5, 0.5 - less]], dtype=torch.float64)))
            assert math.isclose(found, 2.0**-24 * power, rel_tol=2.0**-30)

    def test_a_sum_of_zero_is_not_rounded(self) -> None:
        acc = accumulator(kind=Sum.EXACT)
        found = steps.stepwise(self.operand(1.0, -1.0), self.operand(1.0, 1.0), acc)
        assert [float(x) for x in found] == [0.0, 0.0, 0.0]

    def test_a_sum_that_rounds_to_infinity(self) -> None:
        """From half a unit beyond the largest float32 on."""
        acc = accumulator(kind=Sum.EXACT)
        last = chain.OVERFLOW - 2.0**103  # and what the rounding may add
        for x, due in ((last, 2.0**103), (math.nextafter(last, math.inf), math.inf)):
            value = torch.tensor([[x]], dtype=torch.float64)
            wide = Operand(value, torch.tensor([[127]]))
            assert float(steps.stepwise(wide, self.operand(1.0), acc)[2]) == due

    def test_a_term_of_the_largest_float32(self) -> None:
        found = [float(steps._tree(one(x))) for x in (chain.OVERFLOW, math.nextafter(chain.OVERFLOW, math.inf))]
        assert found == [2.0**-126 * (1 + 2.0**-40), math.inf]


@pytest.mark.turns(4)
def test_the_compiled_pass_opens_the_same_elements() -> None:
    """Some rows and columns near the largest float32, of more than one panel; one product of scales is ``REACH``."""
    given = small(1, m=5, n=131)
    a_scale, b_scale = given.a_scale.clone(), given.b_scale.clone()
    a_scale[3, 1], b_scale[129, 1], b_scale[2, 0] = 2.0**90, 2.0**40, 2.0**125
    a_scale[1], b_scale[7] = (2.0**24 - 1) * 2.0**52, (2.0**20 - 1) * 2.0**32
    b = given.b.clone()
    b[7] = 0.0
    for bias in (None, scales(3, 131)):
        x = replace(given, a_scale=a_scale, b_scale=b_scale, b=b, bias=bias)
        acc = accumulator(promotion=8, align=13, out=10)
        due, found = residue_bound(x, acc), engines.compiled_residue(x, acc)[1]
        assert due.open is not None and found.open is not None and torch.equal(due.open, found.open)
        assert 0 < int(due.open.sum()) < due.open.numel() and bool(due.open[1, 7]) and not bool(due.open[0, 7])
        assert torch.equal(due.lo[~due.open], found.lo[~due.open]) and torch.equal(
            due.hi[~due.open], found.hi[~due.open]
        )


class TestSample:
    """What of a device's result is compared."""

    def test_every_tile_is_reached(self) -> None:
        for size, tile in ((13, 5), (10, 5), (3, 5)):
            seen = {
                x
                for seed in range(80)
                for x in engines._of_each_place(size, tile, torch.Generator().manual_seed(seed)).tolist()
            }
            last = size - 1  # alone of its place
            assert seen == {x for x in range(size) if x % tile != last % tile or x == last}


class TestSets:
    """What an interval, its ends, a grid, a second set or an open block admit."""

    def admitted(self, scale: list[float], **changes: Any) -> list[bool]:
        edge = [
            torch.tensor([x] * len(scale), dtype=torch.float64)
            for x in (changes.pop("low", 1.0), changes.pop("high", 2.5))
        ]
        given = {"expected": torch.ones(len(scale), dtype=torch.float64)} | changes
        found: list[bool] = ScaleSet(*edge, **given).admits(torch.tensor(scale, dtype=torch.float64)).tolist()
        return found

    def test_scales(self) -> None:
        some = [math.nextafter(1.0, 0.0), 1.0, 1.5, 2.5, math.nextafter(2.5, 3.0), math.nan]
        assert self.admitted(some) == [False, True, True, True, False, False]
        nan = torch.tensor([math.nan], dtype=torch.float64)
        assert self.admitted(some, expected=nan.expand(6)) == [False] * 5 + [True]
        opened = torch.tensor([True, False] * 3)
        assert self.admitted(some, open=opened) == [True, True, True, True, True, False]
        # between ends of a factor 2 nothing is admitted, beyond it anything
        assert self.admitted(some, ends_only=True) == [False, True, True, True, False, False]
        assert self.admitted([1.0, 1.5, 2.0], high=2.0, ends_only=True) == [True, False, True]
        assert self.admitted([4.0, 6.0, 7.0], low=4.0, high=7.0, ends_only=True) == [True, False, True]
        assert self.admitted([0.25, 0.5, 0.75], low=0.25, high=0.75, ends_only=True) == [True] * 3
        # values of the format, and the ends
        edge = {"low": 1.03, "high": 1.2, "grid": E4M3FN}
        assert self.admitted([1.0, 1.03, 1.1, 1.125, 1.2, 1.25], **edge) == [False, True, False, True, True, False]
        other = tuple(torch.full((6,), x, dtype=torch.float64) for x in (7.0, 9.0))
        assert self.admitted([1.0, 3.0, 7.0, 8.0, 9.0, math.nan], other=other) == [
            True,
            False,
            True,
            False,
            True,
            False,
        ]

    def test_codes(self) -> None:
        """Of E4M3: 0x38 is 1, 0x80 is -0, NaN 0x7F and 0xFF."""
        given = torch.tensor([0x37, 0x38, 0x39, 0x3A, 0x7E, 0x7F, 0xFF, 0x80, 0x00], dtype=torch.uint8)
        shape, no = given.shape, torch.zeros(given.shape, dtype=torch.bool)
        low, high = (torch.full(shape, x, dtype=torch.int16) for x in (0x38, 0x39))
        plain = CodeSet(low, high, low, no, no, E4M3FN)
        one_of_two = [False, True, True, False, False, False, False, False, False]
        assert plain.admits(given).tolist() == one_of_two and plain.two().all()
        assert replace(plain, nan=~no).admits(given).tolist() == [False] * 5 + [True] * 2 + [False] * 2
        assert replace(plain, free=~no).admits(given).tolist() == [True] * 5 + [False] * 2 + [True] * 2
        assert replace(plain, open=~no).admits(given).all()
        assert replace(plain, open=no).admits(given).tolist() == one_of_two
        zero = replace(plain, low=torch.full_like(low, -1), high=torch.full_like(low, -1))
        assert zero.admits(given).tolist() == [False] * 7 + [True, False]
        for changes in ({"nan": ~no}, {"free": ~no}, {"high": low}):
            assert not replace(plain, **changes).two().any()

    def test_bytes_of_every_length_and_place(self) -> None:
        for length in (*range(1, 10), 14, 16, 18, 24):
            for start in range(9):
                x = torch.arange(40, dtype=torch.uint8)
                y = x.clone()
                y[start + length] += 1  # the next one
                assert same_bytes(x[start : start + length], y[start : start + length])
                y[start + length - 1] += 1
                assert not same_bytes(x[start : start + length], y[start : start + length])

    def test_an_interval_that_holds_what_is_expected(self) -> None:
        """Of a zero block, a special one, or where the recipe's own scale lies outside, that scale alone."""
        expected = torch.tensor([1.0, 2.0, 3.0, 0.0, -1.0, math.inf], dtype=torch.float64)
        low, high = (
            torch.tensor(x, dtype=torch.float64)
            for x in ([1.0, 1.0, 1.0, -1.0, -2.0, 1.0], [2.0, 2.0, 2.0, 1.0, 2.0, 2.0])
        )
        found = _unless_exceptional(low, high, expected)
        assert found.low.tolist() == [1.0, 1.0, 3.0, 0.0, -1.0, math.inf]
        assert found.high.tolist() == [2.0, 2.0, 3.0, 0.0, -1.0, math.inf]
        assert found.ends_only is False


@pytest.mark.turns(4)
class TestScales:
    """Scales of a quantiser whose set follows from one threshold."""

    @pytest.mark.parametrize(("power", "near"), [(-126, True), (-125, False)])
    def test_a_scale_near_the_least_normal_number(self, power: int, near: bool) -> None:
        """Below twice of it an operation may be subnormal, and errs by ``2^-149``; an approximate one is flushed."""
        x = torch.full((1, 128), 448.0 * 2.0**power)
        for approximate, width, lost in ((False, 2.0**-22, 2.0**-149), (True, 2.0**-21, 2.0**-126)):
            found = scale_set(prepare(x), replace(TORCH_TENSOR, amax_floor=0.0, approximate=approximate))
            assert float(found.high) == 2.0**power * (1 + width) + lost * near
            assert float(found.low) == 2.0**power * (1 - width) - lost * near

    def test_each_recipe_is_tried(self) -> None:
        """Whatever the ones before it gave: those that are refused for shape, fault or block do not end the search."""
        x = prepare(grid(1, 1, 128).float())
        due = x.quantized(VLLM_GROUP)
        given = x, due.codes, due.scale
        candidates = [row for row in recipes().values() if _candidates(*given, [row])]
        assert _candidates(*given, None) == candidates
        assert 0 < len(identify(*given)) == sum(len(identify(*given, among=[row])) for row in candidates)
        names = [
            row.name
            for row in of_element(VLLM_GROUP.element)
            if row.fault is None and same_kind(row.block, VLLM_GROUP.block)
            if _candidates(*given, [taken := row.with_block(VLLM_GROUP.block)])
            if judge_recipe(*given, taken).outside == 0
        ]
        assert admitting(*given, VLLM_GROUP) == tuple(names) and len(names) > 40


@pytest.mark.parametrize(
    ("due", "a", "sa", "b", "sb", "alpha"),
    [
        # (1 element a) sa alone, whatever alpha makes of the sum
        (False, 2.0**127, 0.5, 2.0**-100, 1.0, 2.0**-10),
        (True, 2.0**127, 2.0, 2.0**-100, 1.0, 2.0**-10),
        (True, 2.0**64, 2.0**64, 2.0**-100, 1.0, 1.0),
        (True, 2.0**-100, 1.0, 2.0**64, 2.0**64, 1.0),
        (False, 2.0**62, 2.0**62, 2.0**-100, 1.0, 1.0),
        # the sum with both scales, before alpha and after it
        (True, 2.0**24, 2.0**40, 2.0**23, 2.0**40, 2.0),
        (False, 2.0**23, 2.0**40, 2.0**23, 2.0**40, 2.0),
        (True, 2.0**24, 2.0**40, 2.0**24, 2.0**40, 0.5),
        (False, 2.0**23, 2.0**40, 2.0**24, 2.0**40, 0.5),
        # the sum with one scale, where the other makes it small
        (True, 2.0**64, 2.0**40, 2.0**24, 2.0**-100, 1.0),
        (False, 2.0**63, 2.0**40, 2.0**24, 2.0**-100, 1.0),
        (True, 2.0**24, 2.0**-100, 2.0**64, 2.0**40, 1.0),
        # the product of the scales
        (True, 2.0**-100, 2.0**64, 2.0**-100, 2.0**64, 1.0),
        (False, 2.0**-100, 2.0**63, 2.0**-100, 2.0**63, 1.0),
    ],
)
def test_what_any_order_may_reach(due: bool, a: float, sa: float, b: float, sb: float, alpha: float) -> None:
    x, y = (torch.tensor([[v, 0.0]]).bfloat16() for v in (a, b))
    scales_of = torch.full((1, 1), sa), torch.full((1, 1), sb)
    more = {} if alpha == 1.0 else {"alpha": torch.tensor([alpha])}
    found = ieee32_bound(ScaledProduct(x, y, *scales_of, block=2, b_rows=1, **more)).open
    assert found is not None and found.tolist() == [[due]]


def test_many_products_reach_what_one_does_not() -> None:
    """Four products of 2^126 under the scale of ``a``, which that of ``b`` makes small."""
    a, b = (torch.full((1, 4), 2.0**e).bfloat16() for e in (62, 24))
    for sa, due in ((2.0**40, True), (2.0**39, False)):
        given = ScaledProduct(a, b, torch.full((1, 1), sa), torch.full((1, 1), 2.0**-100), block=4, b_rows=1)
        found = ieee32_bound(given).open
        assert found is not None and found.tolist() == [[due]]


def test_a_code_times_its_scale_is_the_largest_float32() -> None:
    """One product alone: what spares its evaluation is below the limit by the factor that it may miss."""
    a, sa = torch.full((1, 1), 2.0**64).bfloat16(), torch.full((1, 1), (2 - 2.0**-22) * 2.0**63)
    given = ScaledProduct(a, torch.full((1, 1), 2.0**-100).bfloat16(), sa, torch.ones(1, 1), block=1, b_rows=1)
    found = ieee32_bound(given).open
    assert found is not None and found.tolist() == [[True]]


class TestBoxed:
    """Products of a left operand known up to a box."""

    def made(self, low: float, high: float, scale: float, beside: float, acc: Any, b_scale: float = 1.0) -> Any:
        """Two rows: 16 zeros, then values between ``low`` and ``high``; and zeros under the scale ``beside``."""
        ends = [torch.tensor([[0.0] * 16 + [x] * 16, [0.0] * 32], dtype=torch.float64) for x in (low, high)]
        both = torch.tensor([[scale] * 2, [beside] * 2], dtype=torch.float64)
        right = torch.ones(1, 32).to(FP8), torch.full((1, 2), b_scale)
        return boxed_product([Box(*ends, both, both, E4M3FN)], *right, block=16, b_rows=1, acc=acc)

    @pytest.mark.parametrize(
        ("low", "high", "size"), [(-0.25, -0.125, 8.0), (0.125, 0.25, 8.0), (2.0**-9, 2.0**-9, 1.0)]
    )
    def test_the_largest_end_under_the_scale_of_its_row(self, low: float, high: float, size: float) -> None:
        """Twice a sum, which is one of blocks and of one; below 1 it counts as 1: the scale alone must be a number. The
        scale of another row opens nothing."""
        under = below(REACH) if size == 1 else REACH / size * (1 - 2.0**-20)  # a sum is rounded
        for scale, due in ((REACH / size, True), (under, False)):
            assert self.made(low, high, scale, 2.0**-20, None).open[0].tolist() == [due]
            assert self.made(low, high, 2.0**-20, scale, None).open[0].tolist() == [False]

    def test_zeros(self) -> None:
        """Blocks of zeros cost nothing, but for what any order of float32 operations may underflow."""
        for scale, by in ((0.5, 1.0), (4.0, 4.0)):
            found = self.made(0.0, 0.0, scale, scale, None, 0.25)
            assert found.high.tolist() == (-found.low).tolist() == [[2.0**-149 * 36 * 448 * 448 * by]] * 2
        found = self.made(0.0, 0.0, 0.5, 0.5, accumulator(promotion=8))
        assert found.high.tolist() == found.low.tolist() == [[0.0], [0.0]]

    def test_chains_of_one_block_may_be_summed_before_their_scales(self) -> None:
        """Two chains of 8 and 24: 32 times the scale of ``b`` must be a number, although that of ``a`` is small."""
        values = torch.tensor([[1.0] * 8 + [3.0] * 8], dtype=torch.float64)
        limit = REACH / 32 / (1 + 2 * product.U * 16)
        for low, high in ((values, values), (-values, -values), (-values, 0 * values), (0 * values, values)):
            for sb, due in ((limit * (1 + 2.0**-23), True), (limit * (1 - 2.0**-23), False)):
                box = Box(low, high, one(2.0**-20), one(2.0**-20), E4M3FN)
                right = torch.ones(1, 16).to(FP8), torch.full((1, 1), sb)
                acc = accumulator(promotion=8, align=25, out=23)
                assert boxed_product([box], *right, block=16, b_rows=1, acc=acc).open.tolist() == [[due]]

    @pytest.mark.parametrize(
        ("low", "high", "due"),
        [(3.0, 5.0, (1.5, 5.0)), (-5.0, -3.0, (-5.0, -1.5)), (-3.0, 5.0, (-3.0, 5.0))],
    )
    def test_codes_between_two_scales(self, low: float, high: float, due: tuple[float, float]) -> None:
        """Under scales from 1 to 2, of operations in float32 and of those in bfloat16."""
        recipes_of = [VLLM_GROUP, next(row for row in recipes().values() if row.code is CodeFormula.BF16)]
        for recipe in recipes_of:
            ends = [torch.full((1, 32), x, dtype=torch.float64) for x in (low, high)]
            box = code_boxes._box(*ends, one(1.0), one(2.0), recipe, group=32)
            assert (float(box.low[0, 0]), float(box.high[0, 0])) == due

    def test_a_product_of_scales_that_is_subnormal(self) -> None:
        """Float32 may have 0 for it, or the least number."""
        values = torch.tensor([[1.0] + [0.0] * 15], dtype=torch.float64)
        box = Box(values, values, one(2.0**-75), one(2.0**-75), E4M3FN)
        right = torch.ones(1, 16).to(FP8), torch.full((1, 1), 2.0**-75)
        for acc in (accumulator(promotion=16), None):
            found = boxed_product([box], *right, block=16, b_rows=1, acc=acc)
            assert float(found.low) <= 0.0 and float(found.high) >= 2.0**-149

    def test_a_group_that_may_be_zero(self) -> None:
        """Its least scale is that of the recipe's floor."""
        ends = (torch.full((1, 128), x, dtype=torch.float64) for x in (-0.5, 0.5))
        made, _ = code_boxes.code_boxes(Span(*ends), VLLM_GROUP, formats.BF16, None)
        assert min(float(box.scale_low) for box in made) < 1e-9 < max(float(box.scale_high) for box in made) < 0.002

    def test_the_last_group_of_a_row_is_short(self) -> None:
        found = code_boxes._grouped(torch.ones(2, 200), 128)
        assert found.shape == (2, 2, 128) and found.sum(dim=2).tolist() == [[128.0, 72.0]] * 2

    def test_which_recipes_have_boxes(self) -> None:
        """Powers of two by another rule have none, nor have scales beside a global one."""
        x = Span(*(torch.ones(1, 128, dtype=torch.float64) for _ in range(2)))
        other = next(kind for kind in PowerOfTwo if kind is not PowerOfTwo.CEIL)
        beside = next(row for row in recipes().values() if row.scaling.global_scale and row.power_of_two is None)
        for recipe in (replace(DEEPGEMM_1X128_UE8M0, power_of_two=other), beside):
            with pytest.raises(NumericsError):
                code_boxes.code_boxes(x, recipe, formats.BF16, None)

    def test_scales_of_an_amax(self) -> None:
        """What a recipe adds to it; the powers of two between its ends."""
        added = code_boxes._scale(one(1.0), replace(VLLM_GROUP, amax_floor=0.0, amax_added=0.75))
        assert float(added.low) < 1.75 / 448 < float(added.high) < 1.76 / 448
        x = Span(torch.full((1, 128), 448.0, dtype=torch.float64), torch.full((1, 128), 8 * 448.0, dtype=torch.float64))
        made, _ = code_boxes.code_boxes(x, DEEPGEMM_1X128_UE8M0, formats.BF16, None)
        assert [float(box.scale_low) for box in made] == [float(box.scale_high) for box in made] == [1.0, 2.0, 4.0, 8.0]


class TestEngines:
    """Which products the compiled pass takes, and what it does with the others."""

    def test_what_it_takes(self) -> None:
        for dtype, taken in ((FP8, True), (torch.float16, True), (torch.float32, False)):
            x, y = torch.ones(1, 4).to(dtype), torch.ones(1, 4).to(FP8)
            for sides in ((x, y), (y, x)):
                given = ScaledProduct(*sides, torch.ones(1, 1), torch.ones(1, 1), block=4, b_rows=1)
                assert (engines.why_not(given) is None) is taken
        plain = accumulator(promotion=8)
        assert engines._unfit(small(1), plain) is None
        for changes in ({"kind": Sum.EXACT}, {"order": Order.INTERLEAVED}, {"flushes": True}, {"truncates": True}):
            assert engines._unfit(small(1), replace(plain, **changes)) is not None

    def test_a_bias_that_is_no_number(self) -> None:
        """Its columns are the definition's, in every word."""
        bias = torch.tensor([math.inf, 1.0, math.nan, -math.inf])
        given = small(1, n=4, bias=bias)
        found, due = engines.compiled_exact(given), gemm.exact(given)
        for name in ("hi", "lo", "slack"):
            assert torch.equal(getattr(found, name).nan_to_num(nan=77.0), getattr(due, name).nan_to_num(nan=77.0))
        c = scales(6, 2, 4)
        found, due = engines.exact(replace(given, c=c)), gemm.exact(replace(given, c=c))
        assert torch.equal(found.hi.nan_to_num(nan=77.0), due.hi.nan_to_num(nan=77.0))

    def test_nothing_to_confirm(self) -> None:
        """No element decides: the sample is empty."""
        zero = torch.zeros(2, 3, dtype=torch.float64)
        interval = Interval(zero, zero, "", open=zero != 0)
        for deciding in (None, lambda: zero != 0):
            assert engines._agrees(interval, small(1), accumulator(promotion=8), residue_bound, deciding) is True

    def test_all_elements_that_decide(self) -> None:
        """As many as are looked at are all looked at, in their order; of more, so many."""
        for size in (4, 5):
            given, seen = small(1, m=size, n=engines.DECIDING // 4), []

            def defined(part: ScaledProduct, acc: Any) -> Interval:
                seen.append(part)  # noqa: B023
                return residue_bound(part, acc)

            acc, all_of_them = accumulator(promotion=8), torch.ones(given.M, given.N, dtype=torch.bool)
            assert engines._agrees(residue_bound(given, acc), given, acc, defined, lambda: all_of_them)  # noqa: B023
            assert [part.M for part in seen] == [engines.DECIDING]
            rows = given.a.repeat_interleave(given.N, dim=0)[: engines.DECIDING]
            assert torch.equal(seen[0].a.view(torch.uint8), rows.view(torch.uint8)) is (size == 4)

    @pytest.mark.parametrize(("room", "taken"), [(0, True), (-1, False), (None, False)])
    def test_shared_memory_of_a_block(self, room: int | None, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        found = {} if room is None else {"shared_memory_per_block_optin": cuda_residue.MEMORY + room}
        monkeypatch.setattr(cuda_residue.cuda_source, "why_not", lambda _: None)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(**found))
        assert (cuda_residue.why_not(small(1), accumulator(promotion=8)) is None) is taken


class TestProduct:
    def test_chains_of_one_length_at_a_time(self) -> None:
        spans = [(0, 0, 8), (0, 8, 16), (1, 16, 24), (1, 24, 28), (2, 28, 32)]
        assert list(product._alike(spans, 2)) == [spans[:2], spans[2:3], spans[3:]]

    def test_scales_inside_an_instruction(self) -> None:
        """They move the exponents too, of zeros that are counted from the least one on."""
        code = torch.tensor([[1.5, 0.0, -(2.0**-9), 0.0]]).to(FP8)
        given = ScaledProduct(
            code, code, torch.tensor([[4.0, 0.5]]), torch.tensor([[1.0, math.nan]]), block=2, b_rows=1
        )
        side = product._Side.of(given.left, 1, given, accumulator(scales_inside=True)).stored
        assert side.value.tolist() == [[6.0, 0.0, -(2.0**-10), 0.0]]
        assert side.counted is not None and side.counted.tolist() == [[2, -124, -7, -127]]
        assert (side.exponent[0, 0], side.exponent[0, 2]) == (2, -7) and bool((side.exponent[0, 1::2] < -1000).all())

    def test_a_column_that_only_a_bias_rounds(self) -> None:
        """Under an alpha both ways of applying it must be exact, element by element."""
        a, b = torch.tensor([[X, 1.0]]), torch.tensor([[X / 2, 1.0], [1.0, 1.0]])
        more = {"bias": torch.full((2,), 2.0**23 + 1), "alpha": torch.tensor([2.0])}
        sides = a.to(torch.float8_e5m2), b.to(torch.float8_e5m2), torch.ones(1, 1), torch.ones(2, 1)
        given = ScaledProduct(*sides, block=2, b_rows=1, **more)
        found = unrounded(given, None)
        assert found is not None and found.tolist() == [[False, True]]

    def test_a_sum_of_chains_that_one_scale_meets(self) -> None:
        """448^2 32 times 1.5 2^105 is no float32 number; times both scales it is."""
        x = torch.full((1, 32), 448.0).to(FP8)
        for sb, due in ((1.5 * 2.0**105, True), (1.25 * 2.0**105, False)):
            for scales_of in ((2.0**-20, sb), (sb, 2.0**-20)):
                sa, other = (torch.full((1, 1), s) for s in scales_of)
                given = ScaledProduct(x, x, sa, other, block=32, b_rows=1)
                found = residue_bound(given, accumulator(promotion=8, align=25, out=23)).open
                assert found is not None and found.tolist() == [[due]]

    def test_the_roundings_count(self) -> None:
        """``4 u`` of a sum that alone is below ``REACH``: of one chain in order, of two in any."""
        for share, due in ((1 - 2.0**-22 + 2.0**-26, True), (1 - 2.0**-22, False)):
            x = REACH * share
            for found in (
                TestFloat32().promoted(1.0, 1.0, x),
                TestFloat32().promoted(1.0, 1.0, x / 2, x / 2, ordered=False),
            ):
                assert found.open is not None and found.open.tolist() == [[due]]

    def test_an_alpha_that_is_subnormal(self) -> None:
        """The product of its factors errs by up to ``2^-149``, and that of the sum by so much of it."""
        size = 2.0**20
        found = TestFloat32().summed(size, 2.0**-149)
        due = (2.0**-149 * 2 * product.U * (1 + product.U) * size + 2.0**-149 * (2 + size)) * (1 + 2.0**-20)
        assert float(found.hi) == -float(found.lo) == due > 2.0**-130
