"""One operand on its way through a judgement is decoded from its codes once, and large ones are not kept."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import oracle
from oracle.bounds.ieee32 import ieee32_bound
from oracle.bounds.product import unrounded
from oracle.numbers import formats
from oracle.routines import get
from oracle.truth import gemm
from oracle.truth.gemm import ScaledProduct, exact
from oracle.verdict.compare import Status
from tests.support.products import block_scaled

Inputs = dict[str, Tensor]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the float8 tensors that ``decode`` is given from here on, whichever module calls it."""
    shapes: list[tuple[int, ...]] = []
    real = formats.decode

    def counting(codes: Tensor, fmt: formats.Format | None = None) -> Tensor:
        if codes.dtype == torch.float8_e4m3fn:
            shapes.append(tuple(codes.shape))
        return real(codes, fmt)

    for name, module in list(sys.modules.items()):
        if name.startswith("oracle.") and getattr(module, "decode", None) is real:
            monkeypatch.setattr(module, "decode", counting)
    return shapes


def inputs() -> Inputs:
    """A product whose scales are powers of two, so that every bound looks at the operands."""
    p = block_scaled("randn", 40, 130, 256, seed=3, powers=True)
    return {"a": p.a, "a_scale": p.a_scale, "b": p.b, "b_scale": p.b_scale}


def wrong(given: Inputs) -> Tensor:
    out = oracle.predict("fp8_gemm_nt", given)
    assert isinstance(out, Tensor)
    out[3:9, 5] *= 2
    return out


class TestOneJudgement:
    """An operand is decoded at most once, however many bounds, schedules and samples look at it."""

    def test_right(self, decoded: list[tuple[int, ...]]) -> None:
        """Equal bits are found from the codes alone."""
        given = inputs()
        out = oracle.predict("fp8_gemm_nt", given)
        assert get("fp8_gemm_nt").judge(given, out, arch="sm90", numerics=None).status is Status.PASSED
        assert decoded == []

    def test_wrong(self, decoded: list[tuple[int, ...]]) -> None:
        given = inputs()
        assert get("fp8_gemm_nt").judge(given, wrong(given), arch="sm90", numerics=None).status is Status.FAILED
        sides = [shape for shape in decoded if shape != (256,)]  # but the table of all codes, which a process keeps
        assert sides == [(1, 256)] * 4  # of a failing row and column, for the screen and for an interval; codes else

    def test_wrong_where_nothing_is_rounded(self, decoded: list[tuple[int, ...]]) -> None:
        """Small integers: every bound looks at the whole operands."""
        given = inputs()
        given |= {name: given[name].float().sign().to(torch.float8_e4m3fn) for name in ("a", "b")}
        assert get("fp8_gemm_nt").judge(given, wrong(given), arch="sm90", numerics=None).status is Status.FAILED
        assert sorted(decoded) == [(40, 256), (130, 256)]

    def test_the_count_notices_a_record_that_forgets(
        self, decoded: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gemm, "KEPT", 0)
        given = inputs()
        assert get("fp8_gemm_nt").judge(given, wrong(given), arch="sm90", numerics=None).status is Status.FAILED
        assert len(decoded) > 4


class TestParts:
    """A part of a product shares what the whole has decoded, and equals the part made afresh."""

    PARTS: tuple[Callable[[ScaledProduct], ScaledProduct], ...] = (
        lambda p: p.rows(2, 5),
        lambda p: p.columns(1, 131),
        lambda p: p.take(torch.tensor([4, 0])),
        lambda p: p.take_columns(torch.tensor([129, 3, 3])),
    )

    @pytest.mark.parametrize("part", PARTS)
    def test_equal(self, part: Callable[[ScaledProduct], ScaledProduct], decoded: list[tuple[int, ...]]) -> None:
        whole = block_scaled("codes", 6, 132, 300, seed=5)
        for side in (whole.left, whole.right):
            side.value(), side.exponent(), side.scales, side.finite_rows  # kept from here on
        taken = part(whole)
        before = len(decoded)
        fresh = ScaledProduct(taken.a, taken.b, taken.a_scale, taken.b_scale, taken.block, taken.b_rows)
        for x, y in ((taken.left, fresh.left), (taken.right, fresh.right)):
            assert torch.equal(x.value(), y.value()) and torch.equal(x.exponent(), y.exponent())
            assert torch.equal(x.scales, y.scales) and torch.equal(x.finite_rows, y.finite_rows)
            assert x.facts == y.facts
        assert len(decoded) - before <= 2  # of `fresh`

    def test_rows_are_views(self) -> None:
        whole = block_scaled("codes", 6, 132, 300, seed=5)
        address = whole.left.value().data_ptr()
        assert whole.rows(0, 3).left.value().data_ptr() == address
        assert whole.rows(0, 3).right is whole.right

    @pytest.mark.parametrize("start", range(3))
    def test_rows_to_the_end(self, start: int) -> None:
        """All rows are the product itself; those from a later one on are not."""
        whole = block_scaled("codes", 6, 132, 300, seed=5)
        part = whole.rows(start, 6)
        assert (part is whole) == (start == 0)
        assert torch.equal(formats.codes_of(part.a), formats.codes_of(whole.a)[start:])


class TestFacts:
    """Counting codes gives the range that the values have."""

    @pytest.mark.parametrize("fmt", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
    def test_against_values(self, fmt: str) -> None:
        side = block_scaled("codes", 7, 5, 40, seed=1, fmt=fmt).left
        value = formats.decode(side.codes)
        size = value.abs()
        assert side.facts.largest == float(size.max()) and side.facts.least == float(size[size > 0].min())
        assert side.facts.quantum == gemm.quantum_of(value)

    def test_specials_are_no_numbers(self) -> None:
        codes = torch.tensor([[0x7F, 0x38], [0x08, 0x00]], dtype=torch.uint8).view(torch.float8_e4m3fn)
        side = ScaledProduct(codes, codes, torch.ones(1, 1), torch.ones(1, 1), 2, 2).left
        assert side.finite_rows.tolist() == [False, True] and not side.finite
        assert side.facts == gemm.Facts(1.0, 2.0**-6, 2.0**-6)
        assert torch.equal(side.number(), torch.tensor([[0.0, 1.0], [2.0**-6, 0.0]], dtype=torch.float64))


class TestLearned:
    """A record takes over what another has kept of the same tensors, and of no others."""

    @pytest.mark.parametrize("same", [True, False])
    def test_facts(self, same: bool) -> None:
        product = block_scaled("codes", 3, 4, 256, seed=5)
        whole = product.left
        kept = whole.facts, whole.finite, whole.scales
        other = product.a if same else product.a.clone()
        part = gemm.Decoded(other, product.a_scale * 2)
        part.learn(whole)
        assert ("facts" in vars(part), "finite" in vars(part), "scales" in vars(part)) == (same, same, False)
        assert (part.facts, part.finite) == kept[:2]
        assert torch.equal(part.scales, 2 * kept[2])


class TestLarge:
    """Values of an operand above ``KEPT`` elements are dropped after each use, and the results are the same."""

    def test_nothing_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        small = block_scaled("codes", 9, 131, 300, seed=2, powers=True)
        kept = exact(small), ieee32_bound(small), unrounded(small, None)
        monkeypatch.setattr(gemm, "KEPT", 0)
        monkeypatch.setattr(gemm, "BAND", 700)
        large = block_scaled("codes", 9, 131, 300, seed=2, powers=True)
        again = exact(large), ieee32_bound(large), unrounded(large, None)
        assert torch.equal(kept[0].hi, again[0].hi) and torch.equal(kept[0].lo, again[0].lo)
        assert torch.equal(kept[1].lo, again[1].lo)
        assert (kept[2] is None) == (again[2] is None)
        for side in (large.left, large.right):
            assert not {"_value", "_exponent"} & set(vars(side))
