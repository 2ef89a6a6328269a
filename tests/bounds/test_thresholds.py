"""Small calls of oracle.bounds whose answer follows from one threshold."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from oracle.bounds import boxed, chain, triton_sums
from oracle.bounds.accumulator import Accumulator
from oracle.bounds.boxed import Box, boxed_product
from oracle.bounds.cuda_residue import STEP, _source
from oracle.bounds.engines import _equal_at, _of_each_place, _packed_chains, _unfit
from oracle.bounds.ieee32 import _range
from oracle.bounds.interval import Interval, admissible
from oracle.bounds.outer import _Side, why_not
from oracle.bounds.product import FLOAT32_MAX, Promotion
from oracle.bounds.quantiser import CODE_WIDTH, U, _either_of_two, _undecided, code_set, kin, scale_set, why_mistrust
from oracle.bounds.steps import _late_floor
from oracle.numbers.formats import E4M3FN
from oracle.numbers.quantize import Prepared, prepare
from oracle.numbers.recipe_table import get, recipes
from oracle.numbers.recipes import VLLM_GROUP, Candidates, Recipe
from oracle.numbers.scaling import Block
from oracle.tensorcore.instructions import Sum
from oracle.tensorcore.packing import TILE
from oracle.truth.gemm import Decoded, Exact, ScaledProduct
from tests.support.edges import accumulator, codes, grid, small


def one(x: float) -> torch.Tensor:
    """A result of one element, float64."""
    return torch.full((1, 1), x, dtype=torch.float64)


class TestAdmissible:
    """The ends are rounded once, from value, low word, error and slack together."""

    def test_the_slack_of_the_value_widens(self) -> None:
        value = Exact(one(1.0), one(0.0), one(2.0**-6))
        found = admissible(value, one(1.0).float(), Interval(one(-(2.0**-7)), one(2.0**-5), "given"))
        assert float(found.low) == 1 - 2.0**-7 - 2.0**-6 and float(found.high) == 1 + 2.0**-5 + 2.0**-6

    @pytest.mark.parametrize(
        ("lo", "offset", "due"),
        [
            (0.0, 2.0**-24, 1.0),  # a tie of float32, to even
            (2.0**-70, 2.0**-24, 1 + 2.0**-23),  # the low word decides it
            (0.0, 2.0**-24 + 2.0**-70, 1 + 2.0**-23),  # what float64 drops of the sum decides it
            (-(2.0**-70), 2.0**-24, 1.0),
        ],
    )
    def test_a_tie(self, lo: float, offset: float, due: float) -> None:
        found = admissible(Exact(one(1.0), one(lo), one(0.0)), one(1.0).float(), Interval(one(0.0), one(offset), ""))
        assert float(found.high) == due


def test_a_bound_is_not_weak_unless_it_says_so() -> None:
    assert Interval(one(0.0), one(0.0), "").weak is False


@pytest.mark.parametrize(
    ("x", "low", "high", "opened"),
    [(0.7, -0.2, 0.2, False), (0.7, -0.2, 0.4, True), (-0.7, -0.4, 0.2, True), (-0.7, -0.2, 0.2, False)],
)
def test_the_one_chain_that_may_overflow(x: float, low: float, high: float, opened: bool) -> None:
    """Of a kernel that scales inside: where one end of its interval exceeds float32."""
    promotion = Promotion(one(0.0))
    promotion.only(*(one(part * FLOAT32_MAX) for part in (x, low, high)))
    assert promotion.interval(name="", alpha=None).open.tolist() == [[opened]]  # type: ignore[union-attr]  # bounds are


@pytest.mark.parametrize(
    ("scale", "due"),
    [
        ([0.0, -2.0, 0.5], (2.0, 0.5)),
        ([math.nan, math.inf, 3.0], (3.0, 3.0)),
        ([0.0, math.nan], (0.0, math.inf)),
        ([2.0**-149], (2.0**-149, 2.0**-149)),
    ],
)
def test_the_range_of_scales(scale: list[float], due: tuple[float, float]) -> None:
    assert _range(torch.tensor(scale)) == due


@pytest.mark.parametrize("group", [8, 32, 64])
def test_every_chain_of_consecutive_or_distributed_tiles(group: int) -> None:
    """Against all of them; a step longer than a tile is a tile."""
    sums = [float(x) for x in grid(group, 20, unit=1.0).tolist()]
    chains = {
        tuple(x for step, x in enumerate(sums) if step // max(1, tile // group) % stride == first)
        for tile in chain.TILES
        for stride in range(1, chain.MOST_STRIDE + 1)
        for first in range(stride)
    }
    due = max(abs(sum(some[i:j])) for some in chains for i in range(len(some)) for j in range(i, len(some) + 1))
    assert chain.reach(torch.tensor(sums, dtype=torch.float64), group) == due


def test_a_sum_below_the_least_exponent_is_cut() -> None:
    """Of products aligned at 2^-126 to 6 bits: 2^-132 is below the last bit of a result of 3, which is 2^-129."""
    p = torch.full((1, 1, 1), 1.5 * 2.0**-129, dtype=torch.float64)
    top = torch.full((1, 1), -126)
    found = chain.residue_step(*(one(0.0) for _ in range(4)), p, top, accumulator(align=6, out=3))
    assert [float(x) for x in found] == [1.5 * 2.0**-129, -(2.0**-129), 0.0]


def test_two_products_are_two_halves() -> None:
    """1 and 1/4, aligned apart: the lesser half has a unit of its own and loses one of the other's."""
    p, e = torch.tensor([[[1.0, 0.25]]], dtype=torch.float64), torch.tensor([[[0, -2]]])
    for kind, due in ((Sum.LATE_FLOOR_ODD_EVEN, -0.5), (Sum.LATE_FLOOR, -0.25)):
        low, high = _late_floor(p, e, (one(0.0), one(0.0)), accumulator(kind=kind, align=1))
        assert (float(low), float(high)) == (due, 0.0)


@pytest.mark.parametrize(
    ("dtype", "k", "largest", "fits"),
    [
        (torch.float8_e4m3fn, 171196, 448.0, True),
        (torch.float8_e4m3fn, 171197, 448.0, False),
        (torch.float16, 32, 1.0, True),  # 2^53 times 2^-48
        (torch.float16, 33, 1.0, False),
    ],
)
def test_sums_that_the_compiled_pass_holds(dtype: torch.dtype, k: int, largest: float, fits: bool) -> None:
    x, scale = torch.full((1, k), largest).to(dtype), torch.ones(1, 1)
    assert (_unfit(ScaledProduct(x, x, scale, scale, block=k, b_rows=1), None) is None) == fits


class TestBoxed:
    """Which of two recursions is taken, and the rows in which two boxes differ."""

    def box(self, **changes: torch.Tensor) -> Box:
        value, scale = torch.full((2, 32), 0.125, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
        given = {"low": value, "high": value, "scale_low": scale, "scale_high": scale} | changes
        return Box(**given, fmt=E4M3FN)

    @pytest.mark.parametrize("count", [1, 2])
    def test_so_many_products_are_bounded_one_by_one(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        for most, name in ((count * 2 * 3 * 32, "residue"), (count * 2 * 3 * 32 - 1, "rank-1")):
            monkeypatch.setattr(boxed, "MOST", most)
            given = codes(1, 3, 32), torch.ones(3, 1)
            made = boxed_product([self.box()] * count, *given, block=32, b_rows=1, acc=accumulator(promotion=8))
            assert made.name.startswith(f"{name} bound")

    @pytest.mark.parametrize("name", ["low", "high", "scale_low", "scale_high"])
    def test_any_bound_makes_a_difference(self, name: str) -> None:
        other = getattr(self.box(), name).clone()
        other[1, 0] *= 2
        boxes = [self.box(), self.box(**{name: other})]
        assert boxed._differing(boxes, 0, slice(0, 8), 0).tolist() == [0, 1]
        assert boxed._differing(boxes, 1, slice(0, 8), 0).tolist() == [1]


def test_the_power_of_a_subnormal_is_that_of_the_least_normal() -> None:
    """2^-9 beside zeros in a step, and a step of zeros."""
    code = torch.tensor([[2.0**-9, *[0.0] * 7]]).to(torch.float8_e4m3fn)
    side = _Side(Decoded(code, torch.full((1, 1), 3.0)), 8, 8, accumulator())
    assert side._terms[0].tolist() == [[3 * 2.0**-6, 0.0]]


class TestQuantiser:
    """Sets of codes and recipes whose answer follows from one threshold."""

    @pytest.mark.parametrize(("power", "codes_of_it"), [(126, 1), (127, 2)])
    def test_above_which_scale_an_inverse_is_subnormal(self, power: int, codes_of_it: int) -> None:
        """``17/16 (1 + 1.4 2^-22)`` lies beyond ``CODE_WIDTH`` of a midpoint, but within ``2^-21``."""
        x = torch.full((1, 128), (17 / 16 + 3 * 2.0**-23) * 2.0**power)
        found = code_set(prepare(x), VLLM_GROUP, one(2.0**power))
        assert torch.unique(found.high - found.low).tolist() == [codes_of_it - 1]

    @pytest.mark.parametrize(("power", "high"), [(16, -1), (17, 0)])
    def test_a_negative_quotient_that_float32_loses(self, power: int, high: int) -> None:
        """``-2^-149`` is a float32 number and coded as -0; half of it may be 0 before its sign is asked for."""
        x = torch.full((1, 32), -(2.0**-133)).bfloat16()
        found = code_set(prepare(x), get("microxcaling_mxfp8_e4m3_nearest"), one(2.0**power))
        assert torch.unique(found.low).tolist() == [-1] and torch.unique(found.high).tolist() == [high]

    def test_zero_is_no_positive_scale(self) -> None:
        some = torch.tensor([False, True])
        assert why_mistrust(torch.zeros(2), some) == "no scale is a positive number"
        assert why_mistrust(torch.tensor([math.inf, math.nan]), some) == "no scale is a positive number"
        assert why_mistrust(torch.tensor([0.0, 1.0]), some) is None

    def test_the_kin_of_another_floor_and_block(self) -> None:
        """A row with the usual floor (block) gets the declared one; others keep theirs."""
        declared = VLLM_GROUP.with_floor(0.5).with_block(Block(1, 64))
        found = {row.name: row for row in kin(declared)}
        assert found[declared.name] == declared and next(iter(found)).startswith(declared.name)
        for name, row in found.items():
            usual = recipes()[name]
            assert row.amax_floor == (0.5 if usual.amax_floor == VLLM_GROUP.amax_floor else usual.amax_floor)
            assert row.block == (declared.block if usual.block == VLLM_GROUP.block else usual.block)


class TestConfirmation:
    """What a device computed is compared at some rows and columns."""

    @pytest.mark.parametrize(
        ("actual", "due", "same"),
        [
            (1.0, 1.0, True),
            (math.nan, math.nan, True),
            (1.0, math.nan, False),
            (math.nan, 1.0, False),
            (1.0, 2.0, False),
        ],
    )
    def test_nan_is_equal_to_nan_alone(self, actual: float, due: float, same: bool) -> None:
        at = torch.zeros(1, dtype=torch.int64)
        assert _equal_at(one(actual), one(due), at, at) is same

    @pytest.mark.parametrize(("size", "tile"), [(10, 4), (4, 4), (3, 4), (13, 5), (1, 4)])
    def test_each_place_of_a_tile_and_the_last_row(self, size: int, tile: int) -> None:
        for seed in range(5):
            index = _of_each_place(size, tile, torch.Generator().manual_seed(seed))
            assert (index % tile).tolist() == list(range(min(size, tile)))
            assert size - 1 in index.tolist() and bool((index < size).all())


@pytest.mark.parametrize(
    ("step", "chain", "wide"),
    # units of a step and of a chain as powers of two: float32 holds 2^23, float64 2^52, a counter of 32 bits 2^32
    [(23, 32, 0), (24, 32, 1), (23, 33, 1), (22, 32, 0), (52, 53, 1), (53, 53, None)],
)
def test_which_sums_hold_a_step(step: int, chain: int, wide: int | None) -> None:
    align = step - 2 - (STEP.bit_length() - 1)
    acc = Accumulator("given", 32, align, 23, None)
    made = _source(acc, 1 << (chain - align - 2))
    assert (None if made is None else dict(made.definitions)["WIDE"]) == wide


@pytest.mark.parametrize("group", [1, 4, 8, 12, 32, 100, 128])
def test_no_tile_is_longer_than_a_kernel_unpacks(group: int) -> None:
    """Of 1024 products; steps are padded to whole passes."""
    begin, end, *_ = _packed_chains(((0, 0, 1024),), (1024,), group, 1, 2).tiles.unbind(dim=1)
    assert int((end - begin).max()) <= TILE and torch.equal(begin[1:], end[:-1])


@pytest.mark.parametrize(
    ("changes", "k", "reason"),
    [
        ({}, 32, None),
        ({"scales_inside": True}, 32, "scales"),
        ({"flushes": True}, 32, "changes its operands"),
        ({"truncates": True}, 32, "changes its operands"),
        ({"group": 3}, 32, "whole steps"),  # 8 is no multiple of 3
        ({}, 28, "whole steps"),  # nor 28 of 8, nor of a block
        ({"promotion": 4}, 28, "whole steps"),  # 28 is one of 4, not of a block
    ],
)
def test_what_has_an_outer_interval(changes: dict[str, int], k: int, reason: str | None) -> None:
    found = why_not(small(1, k=k), accumulator(**{"promotion": 8, **changes}))
    assert found is None if reason is None else found is not None and reason in found


class TestTriton:
    """Which products the kernel of a GPU takes; here none is launched."""

    @pytest.mark.parametrize(("env", "installed"), [("1", False), (None, True), ("0", True)])
    def test_the_interpreter_is_asked_for_and_there(
        self, env: str | None, installed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where it is not, triton is not even imported."""
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.setattr("importlib.util.find_spec", lambda _: object() if installed else None)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        if env is not None:
            monkeypatch.setenv("TRITON_INTERPRET", env)
        assert triton_sums._interpreted() is False

    @pytest.mark.parametrize(
        ("dtype", "k", "largest", "reason"),
        [
            (torch.bfloat16, 16, 1.0, None),
            (torch.float32, 16, 1.0, "wider than 16 bits"),
            # 448^2 K over 2^-18 exceeds 2^53 from K = 171197 on
            (torch.float8_e4m3fn, 171196, 448.0, None),
            (torch.float8_e4m3fn, 171197, 448.0, "leave float64"),
        ],
    )
    def test_sums_that_float64_holds(
        self, dtype: torch.dtype, k: int, largest: float, reason: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(triton_sums, "_interpreted", lambda: True)
        monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
        x = torch.full((1, k), largest)
        x[0, 0] = 2.0**-9
        x = x.to(dtype)
        found = triton_sums.why_not(ScaledProduct(x, x, torch.ones(1, 1), torch.ones(1, 1), block=k, b_rows=1))
        assert found is None if reason is None else found is not None and reason in found


class TestFourOverSix:
    """One of two scales of a block: its own and 1.5 of it."""

    def given(self, x: torch.Tensor) -> tuple[Prepared, Recipe]:
        return prepare(x.bfloat16(), global_scale=torch.tensor([0.125])), get("flashinfer_nvfp4_4over6_mse")

    def test_a_block_of_zeros_is_decided(self) -> None:
        """Both errors are 0 and no operation rounds where the global scale is a power of two: there is one."""
        x, recipe = self.given(torch.zeros(1, 16))
        other = scale_set(x, recipe).other
        assert other is not None and bool(torch.isnan(other[0]).all())

    def test_the_better_scale_alone_or_both(self) -> None:
        """1 is a value beside 6 and 4.5 beside 4; seven of 1 err as much as seven of 3/4 do under the other scale."""
        rows = [[6.0, *[1.0] * 15], [6.0, *[4.5] * 15], [6.0, *[1.0] * 7, *[0.75] * 7, 0.0]]
        x, recipe = self.given(torch.tensor(rows).reshape(1, 48))
        own, wide = (part.scale.flatten().tolist() for part in x.candidates(recipe, x.own_steps(recipe)))
        found = scale_set(x, recipe)
        assert found.other is not None
        assert found.low.flatten().tolist() == found.high.flatten().tolist() == [own[0], wide[1], own[2]]
        for other in found.other:
            assert torch.isnan(other).flatten().tolist() == [True, True, False]
            assert float(other.flatten()[2]) == wide[2]

    @pytest.mark.parametrize("name", ["flashinfer_nvfp4_4over6_mae", "flashinfer_nvfp4_4over6_mse"])
    def test_errors_that_are_too_near_to_tell(self, name: str) -> None:
        """Twice what both may be off by: ``sum 2 e |x| + 4 u x'``, of squares their derivative, ``17 u`` of both."""
        values, recipe = [6.0, *[0.7 * i for i in range(15)]], get(name)
        x = prepare(torch.tensor([values]), global_scale=torch.tensor([0.3]))
        candidates, off = x.candidates(recipe, x.own_steps(recipe)), 0.0
        for total in (float(steps.total) for steps in candidates):
            for v in x.x.flatten().tolist():
                delta = 2 * CODE_WIDTH * v + 4 * U * 6 * total
                off += delta * (2 * (6 * total + v) + delta) if recipe.candidates is Candidates.MSE else delta
        sides = ((4.0, 1 - 2.0**-28, True), (4.0, 1 + 2.0**-28, False), (2.0**24, 0.99, True), (2.0**24, 1.01, False))
        for share, factor, undecided in sides:
            least = share * off
            apart = (2 * off + 68 * U * least) / (1 - 34 * U)
            for errors in ((least + factor * apart, least), (least, least + factor * apart)):
                pair = tuple(one(e).reshape(1, 1, 1, 1) for e in errors)
                assert _undecided(x, recipe, candidates, pair).tolist() == [[[[undecided]]]]  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("every", "errors", "undecided"),
        [
            (0.125, (0.0, 0.0), False),
            (0.3, (0.0, 0.0), True),  # an operation may round
            (0.125, (0.0, 2.0**-40), True),
            (0.125, (2.0**-40, 0.0), True),
            (0.125, (math.inf, math.inf), True),  # finite in other units
            (0.125, (1.0, math.inf), True),
            (0.125, (0.0, 1.0), False),
        ],
    )
    def test_errors_of_zero_and_infinity(self, every: float, errors: tuple[float, float], undecided: bool) -> None:
        x, recipe = prepare(torch.ones(1, 16), global_scale=torch.tensor([every])), self.given(torch.ones(1, 16))[1]
        pair = tuple(one(e).reshape(1, 1, 1, 1) for e in errors)
        found = _undecided(x, recipe, x.candidates(recipe, x.own_steps(recipe)), pair)  # type: ignore[arg-type]
        assert found.tolist() == [[[[undecided]]]]

    def test_each_block_may_have_either(self) -> None:
        x, recipe = self.given(torch.arange(32.0).reshape(1, 32))
        own, wide = (part.scale.reshape(1, 2) for part in x.candidates(recipe, x.own_steps(recipe)))
        mixed = torch.stack([own[:, 0], wide[:, 1]], dim=1)
        assert not torch.equal(own, wide)
        assert all(_either_of_two(x, published, recipe) for published in (own, wide, mixed))
        assert not _either_of_two(x, 3 * own, recipe)
