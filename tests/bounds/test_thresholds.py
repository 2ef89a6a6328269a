"""Small calls of oracle.bounds whose answer follows from one threshold."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from oracle.bounds import triton_sums
from oracle.bounds.accumulator import Accumulator
from oracle.bounds.cuda_residue import STEP, _source
from oracle.bounds.engines import _equal_at, _of_each_place, _packed_chains
from oracle.bounds.interval import Interval, admissible
from oracle.bounds.outer import why_not
from oracle.bounds.quantiser import _either_of_two, scale_set
from oracle.numbers.quantize import Prepared, prepare
from oracle.numbers.recipe_table import get
from oracle.numbers.recipes import Recipe
from oracle.tensorcore.packing import TILE
from oracle.truth.gemm import Exact, ScaledProduct
from tests.support.edges import accumulator, small


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

    def test_each_block_may_have_either(self) -> None:
        x, recipe = self.given(torch.arange(32.0).reshape(1, 32))
        own, wide = (part.scale.reshape(1, 2) for part in x.candidates(recipe, x.own_steps(recipe)))
        mixed = torch.stack([own[:, 0], wide[:, 1]], dim=1)
        assert not torch.equal(own, wide)
        assert all(_either_of_two(x, published, recipe) for published in (own, wide, mixed))
        assert not _either_of_two(x, 3 * own, recipe)
