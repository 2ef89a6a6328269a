"""A large failure costs about what a right output does, and is the failure that every interval would give.

What is large is made small here, so that both ways judge the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import oracle
from oracle.bounds import of_schedule, residue_bound, steps
from oracle.bounds import outer as outer_bound
from oracle.bounds import product as product_bound
from oracle.bounds.engines import exact
from oracle.diagnosis import explain, sampled
from oracle.diagnosis.level import explaining
from oracle.errors import OptionError
from oracle.numbers.formats import same_bits
from oracle.routines import cases, get
from oracle.routines.catalogue import Call, Fault, run
from oracle.routines.catalogue import get as get_fault
from oracle.routines.mutants import accumulated
from oracle.tensorcore.instructions import Sum
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Schedule
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth import gemm
from oracle.truth.gemm import ScaledProduct
from oracle.verdict import heatmap, parts, products
from oracle.verdict import large as large_
from oracle.verdict.compare import Status, Verdict
from tests.support.products import block_scaled

GEMM = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=24,n=192,k=384/family=randn/seed=5"
CONTIGUOUS = "m_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-bf16/1x128:128x128/m=384,n=128,k=384,g=3/family=randn/seed=2"
PROMOTED = "sm90.promote128"
SCALE = "A scale of the previous K block"
BF16 = torch.bfloat16
Spoil = Callable[[Tensor], Tensor]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is large, to the verdict and to its explanation."""
    monkeypatch.setattr(products, "LARGE", 0)
    monkeypatch.setattr(explain, "CHEAP", 0)


def called(text: str) -> tuple[Call, Tensor]:
    case = cases.parse(text)
    call = Call(get(case.contract), case.inputs(), case.call_options(), get_schedule(PROMOTED), case.out_dtype)
    out = run(call)
    assert isinstance(out, Tensor)
    return call, out


def judged(call: Call, out: Tensor, **options: str) -> Verdict:
    return oracle.judge(call.contract.name, call.inputs, out, **options, **call.options)  # type: ignore[arg-type]


def every_interval(call: Call, out: Tensor) -> Verdict:
    """The verdict without the short way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "LARGE", 1 << 62)
        return call.contract.judge(call.inputs, out, **call.options)


def one_element(out: Tensor) -> Tensor:
    out[3, 5] = 2 * out[3, 5] + 1
    return out


def moved_row(out: Tensor) -> Tensor:
    out[7] = out[8].clone()
    return out


def two_faults(out: Tensor) -> Tensor:
    out[:, 3] = 0
    return moved_row(out)


def garbage(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)


def nothing_but_nan(out: Tensor) -> Tensor:
    return torch.full_like(out, torch.nan)


def next_value(out: Tensor) -> Tensor:
    """One unit in the last place everywhere: inside every outer interval."""
    return (out.view(torch.int16) + 1).view(out.dtype)


SPOILT = (one_element, moved_row, two_faults, garbage, nothing_but_nan, next_value)


@pytest.mark.usefixtures("large")
class TestTheSameFailure:
    """Status, worst element and what surely fails are those of every interval; what is counted less is said."""

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize(
        ("text", "spoil"), [*((GEMM, spoil) for spoil in SPOILT), *((CONTIGUOUS, spoil) for spoil in SPOILT[1:4])]
    )
    def test_judged(self, text: str, spoil: Spoil) -> None:
        call, out = called(text)
        wrong = spoil(out)
        short, full = call.contract.judge(call.inputs, wrong, **call.options), every_interval(call, wrong)
        assert short.status is full.status is Status.FAILED and short.failing is not None and full.failing is None
        assert 0 < short.outside <= full.outside and short.total == full.total
        assert "undecided" in short.basis or (short.outside, short.pattern) == (full.outside, full.pattern)
        said = [word for word in short.basis.split() if word.isdigit()]
        assert full.outside <= short.outside + sum(map(int, said))
        if spoil is not next_value:
            assert short.worst is not None and full.worst is not None
            assert (short.worst.low, short.worst.high) == (full.worst.low, full.worst.high)
            assert short.worst.index == full.worst.index
        assert short.evidence is not None and short.evidence.elements[0].index == short.worst.index

    @pytest.mark.parametrize("text", [GEMM, CONTIGUOUS])
    def test_right_outputs_pass(self, text: str) -> None:
        call, out = called(text)
        assert judged(call, out).matches == PROMOTED
        truth = call.contract.reference(call.inputs, **(call.options | {"out_dtype": torch.bfloat16}))
        assert isinstance(truth, Tensor)
        verdict = judged(call, truth.masked_fill(torch.isnan(truth), 0.0))
        assert verdict.status is Status.PASSED and verdict.failing is None

    def test_what_refuses_one_schedule_is_asked_of_the_next(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Five schedules are admitted; one of them is computed on the whole."""
        call, out = called(GEMM)
        wrong, whole, predict = one_element(out), [], parts.predict_product

        def counted(product: ScaledProduct, *args: object, **options: object) -> Tensor:
            whole.append(out.numel() == product.M * product.N)
            return predict(product, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(parts, "predict_product", counted)
        assert call.contract.judge(call.inputs, wrong).status is Status.FAILED
        assert sum(whole) == 1 and len(whole) > 5


@pytest.mark.usefixtures("large")
class TestExplained:
    """The first explanation that holds for the whole is named; where none holds, none is."""

    @pytest.mark.parametrize(
        ("spoil", "name"),
        [
            (moved_row, "one row duplicated (row 7 holds row 8)"),
            (two_faults, None),
            (garbage, None),
            (nothing_but_nan, None),
            (one_element, None),
        ],
    )
    def test_places(self, spoil: Spoil, name: str | None) -> None:
        call, out = called(GEMM)
        found = judged(call, spoil(out))
        assert found.explained_by == (() if name is None else (name,)) and found.failing is None

    @pytest.mark.parametrize("name", [SCALE, "store truncates"])
    @pytest.mark.parametrize("text", [GEMM, CONTIGUOUS])
    def test_faults(self, text: str, name: str) -> None:
        call, _ = called(text)
        out = run(call, get_fault(name))
        assert isinstance(out, Tensor) and judged(call, out).explained_by == (name,)

    def test_a_fault_of_some_rows_is_not_called_one_of_all(self) -> None:
        """The sabotage: half of the rows are right, and the whole refuses what a few rows agree with."""
        call, out = called(GEMM)
        wrong = run(call, get_fault(SCALE))
        assert isinstance(wrong, Tensor)
        out[10:] = wrong[10:]
        (named,) = judged(call, out).explained_by
        assert named == f"{SCALE} (in the failing elements only, all of which it reproduces)"

    def test_arithmetics_that_cannot_agree_are_not_computed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A scale of another block moves every element; where that is not seen, all arithmetics are computed."""
        call, _ = called(GEMM)
        out, computed = run(call, get_fault(SCALE)), list[object]()
        assert isinstance(out, Tensor)

        def counted(call: Call, product: ScaledProduct, schedule: Schedule | None, faults: tuple[Fault, ...]) -> Tensor:
            computed.append(schedule)
            return accumulated(call, product, schedule, faults)

        monkeypatch.setattr(sampled, "accumulated", counted)
        assert judged(call, out).explained_by == (SCALE,) and len(set(computed)) <= 1
        monkeypatch.setattr(sampled, "APART", torch.inf)
        assert judged(call, out).explained_by == (SCALE,) and len(set(computed)) > 5

    def test_levels(self) -> None:
        call, out = called(GEMM)
        wrong = run(call, get_fault(SCALE))
        assert isinstance(wrong, Tensor)
        assert judged(call, wrong, explain="off").explained_by == ()
        with explaining("off"):
            assert judged(call, wrong).explained_by == ()
            assert judged(call, wrong, explain="quick").explained_by == (SCALE,)
        with pytest.raises(OptionError, match="'some' is no level; there are: off, quick, full"):
            judged(call, out, explain="some")


class TestOuter:
    """The outer interval holds the residue bound and the exact value; a thousandth of it does not."""

    @pytest.mark.parametrize("kind", ["randn", "codes", "positive", "one large among tiny", "one huge among tiny"])
    @pytest.mark.parametrize("schedule", [PROMOTED, "sm89.promote128", "sm90.chain"])
    def test_holds(self, kind: str, schedule: str) -> None:
        acc, p = of_schedule(get_schedule(schedule)), block_scaled(kind, 5, 130, 384, seed=4)
        if acc.promotion is None:
            p = replace(p, a_scale=p.a_scale[:, :1], b_scale=p.b_scale[:, :1], block=384)
        assert outer_bound.why_not(p, acc) is None
        _, *parts = zip(*outer_bound.outer_bands(p, acc), strict=True)
        y, width = (torch.cat(part, dim=1) for part in parts)
        value, bound = exact(p), residue_bound(p, acc)

        def holds(width: Tensor) -> bool:
            inside = (y - width <= value.hi + bound.lo) & (value.hi + bound.hi <= y + width)
            return bool((inside & ((y - value.hi).abs() <= width)).all())

        assert holds(width) and not holds(width / 1000)

    def test_refused(self) -> None:
        p, acc = block_scaled("randn", 2, 8, 256, seed=1), of_schedule(get_schedule(PROMOTED))
        nan = replace(p, a_scale=torch.full_like(p.a_scale, torch.nan))
        far = replace(p, a_scale=torch.full_like(p.a_scale, 1e35))
        odd = ScaledProduct(p.a[:, :200], p.b[:, :200], p.a_scale, p.b_scale, 128, 128)
        reasons = [outer_bound.why_not(x, acc) or "" for x in (nan, far, odd)]
        assert [word in why for word, why in zip(("no number", "exceed", "whole"), reasons, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("bound", "schedule"),
    [
        (bound, schedule)
        for bound in (product_bound.residue_bound, product_bound.split_bound, product_bound.any_order_bound)
        for schedule in (PROMOTED, "sm90.mma_sync.promote128", "sm90.mma_f16.promote128", "sm89.promote128")
        if bound is not product_bound.any_order_bound or of_schedule(get_schedule(schedule)).kind is Sum.FUSED
    ],
)
def test_chains_together_have_the_bits_of_chains_apart(
    schedule: str, bound: Callable[..., product_bound.Interval], monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, p = of_schedule(get_schedule(schedule)), block_scaled("codes", 1, 4, 512, seed=9)
    together = bound(p, acc)
    monkeypatch.setattr(product_bound, "CUBE", 1)
    monkeypatch.setattr(steps, "TOGETHER", 0)
    apart = bound(replace(p), acc)  # which has kept no chains
    for name in ("lo", "hi", "open"):
        assert torch.equal(getattr(together, name), getattr(apart, name))


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_the_largest_come_as_from_a_stable_sort(levels: int) -> None:
    values = torch.randint(0, levels, (300,), generator=torch.Generator().manual_seed(levels)).double()
    values[values == 1] = torch.inf
    due = torch.sort(values, descending=True, stable=True).indices[: heatmap.LISTED].tolist()
    assert heatmap._largest(values) == due


def test_full_rows_are_looked_at_apart_from_the_others() -> None:
    """A row and a column that fail are two narrow grids; scattered elements and a full tile are one."""
    wanted = torch.zeros((40, 60), dtype=torch.bool)
    wanted[7], wanted[:, 3] = True, True

    def covered(grids: list[tuple[Tensor, Tensor]]) -> Tensor:
        found = torch.zeros_like(wanted)
        for rows, columns in grids:
            found[rows[:, None], columns[None, :]] = True
        return found

    grids = large_._grids(wanted)
    assert [(len(rows), len(columns)) for rows, columns in grids] == [(1, 60), (39, 1)]
    assert torch.equal(covered(grids), wanted) and not torch.equal(covered(grids[:1]), wanted)
    tile = torch.zeros_like(wanted)
    tile[4:9, 10:20] = True
    for mask in (tile, torch.eye(40, 60, dtype=torch.bool)):
        ((rows, columns),) = large_._grids(mask)
        assert (len(rows), len(columns)) == (int(mask.any(dim=1).sum()), int(mask.any(dim=0).sum()))
    assert large_._grids(torch.zeros_like(wanted)) == []


def test_more_of_a_large_output_refuses_a_schedule_before_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong element that the first rows and columns miss."""
    p = block_scaled("randn", 48, 512, 256, seed=4)
    schedule = get_schedule("sm90.promote128")
    out = predict_product(p, schedule, out_dtype=torch.bfloat16)
    out[3, 1] = 2 * out[3, 1] + 1

    def whole(bands: parts.Bands) -> Iterator[tuple[int, torch.Tensor, int, ScaledProduct]]:
        raise AssertionError("the whole is computed")

    monkeypatch.setattr(parts.Bands, "_all", whole)
    monkeypatch.setattr(parts, "MORE", (16, 512))
    monkeypatch.setattr(parts, "LARGER", 2)
    assert not parts.Bands([parts.Part(p)], out).reproduced(schedule)
    monkeypatch.setattr(parts, "LARGER", 3)
    with pytest.raises(AssertionError, match="the whole is computed"):
        parts.Bands([parts.Part(p)], out).reproduced(schedule)


def nearly(p: ScaledProduct, others: int) -> Tensor:
    """The exact values rounded, but in so many places what the tensor cores give instead, in bf16."""
    out, other = gemm.rounded(p, exact(p), torch.bfloat16), predict_product(p, get_schedule(PROMOTED), out_dtype=BF16)
    at = torch.nonzero((out != other).flatten())[:others, 0]
    assert len(at) == others
    out.view(-1)[at] = other.view(-1)[at]
    return out


@pytest.mark.usefixtures("large")
class TestNearlyExact:
    """An output that is the exact value rounded in most places is judged by the intervals of the other elements."""

    CASE = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=24,n=192,k=4224/family=randn/seed=5"

    def product(self) -> tuple[Call, ScaledProduct]:
        call, _ = called(self.CASE)
        return call, ScaledProduct(**call.inputs, block=128, b_rows=128)

    @pytest.mark.parametrize("others", [0, 1, 40])
    def test_the_verdict_is_that_of_every_interval(self, others: int) -> None:
        call, p = self.product()
        out, part = nearly(p, others), parts.Part(p)
        held = large_.nearly_exact(parts.Bands([part], out), PROMOTED)
        full = products._judge_interval([part], out, PROMOTED, (), None)
        assert held is not None and (held[0].worst, held[1]) == (full.worst, full.basis)
        assert call.contract.judge(call.inputs, out).to_json() == every_interval(call, out).to_json()

    def test_one_beyond_its_interval(self) -> None:
        """One element of many thousand: every interval is computed, and it fails."""
        call, p = self.product()
        out = nearly(p, 3)
        out[5, 7] *= 1.5
        assert large_.nearly_exact(parts.Bands([parts.Part(p)], out), PROMOTED) is None
        verdict = call.contract.judge(call.inputs, out, **call.options)
        assert verdict.status is Status.FAILED and verdict.worst is not None and verdict.worst.index == (5, 7)

    @pytest.mark.parametrize(("spoil", "first"), [(next_value, ["held", "failure"]), (one_element, ["failure"])])
    def test_what_is_asked_first(self, spoil: Spoil, first: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """An output with the bits of the schedule in a few rows and columns fails elsewhere, if it does."""
        call, out = called(self.CASE)
        asked = []
        for name, function in (("held", large_.nearly_exact), ("failure", large_.failure)):
            monkeypatch.setattr(large_, function.__name__, lambda *a, n=name, f=function: asked.append(n) or f(*a))
        verdict = call.contract.judge(call.inputs, spoil(out), **call.options)
        assert verdict.status is Status.FAILED and asked == first

    @pytest.mark.parametrize(("moved", "near"), [(1, True), (8, False)])
    def test_what_is_near_the_bits(self, moved: int, near: bool) -> None:
        """Elements beside those of the schedule, which no sample has, are another right arithmetic's; it is asked first
        whether their intervals hold them."""
        _, p = self.product()
        schedule, out = get_schedule(PROMOTED), predict_product(p, get_schedule(PROMOTED), out_dtype=BF16)
        out.view(torch.int16)[5, 7] += moved
        bits = parts.Bands([parts.Part(p)], out)
        assert bits.alike(schedule) == 1.0 and not bits.close(schedule)  # nothing has refused it yet
        assert not bits.reproduced(schedule) and bits.close(schedule) is near

    def test_what_may_overflow(self) -> None:
        """Where an intermediate may leave float32 the interval says nothing, which must be counted."""
        _, p = self.product()
        acc = of_schedule(get_schedule(PROMOTED))
        assert large_._never_open(p, acc)
        for scale in (2.0**110, float("inf"), float("nan")):
            a_scale = p.a_scale.clone()
            a_scale[0, 0] = scale
            assert not large_._never_open(replace(p, a_scale=a_scale), acc)

    def test_an_open_element_is_never_overlooked(self) -> None:
        """Of scales up to the limit none is open below it."""
        p = block_scaled("randn", 4, 128, 512, seed=3)
        acc = of_schedule(get_schedule(PROMOTED))
        opened = []
        for exponent in range(60, 128, 4):
            some = replace(p, a_scale=torch.full_like(p.a_scale, 2.0**exponent))
            interval = residue_bound(some, acc)
            assert interval.open is not None
            opened.append(bool(interval.open.any()))
            assert not (opened[-1] and large_._never_open(some, acc)), exponent
        assert any(opened) and not all(opened)


class TestNearMidpoints:
    """After the first schedule, elements near a midpoint refuse one that differs in a few places of many."""

    def test_they_refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        p = block_scaled("randn", 64, 384, 512, seed=4)
        finer, coarser = get_schedule("sm90.mma_sync.promote128"), get_schedule(PROMOTED)
        out, other = (predict_product(p, s, out_dtype=torch.bfloat16) for s in (finer, coarser))
        out = gemm.rounded(p, exact(p), torch.bfloat16)
        differ = ~same_bits(out, predict_product(p, finer, out_dtype=torch.bfloat16))
        assert 0 < int(differ.sum()) < 16  # not seen in few rows and columns
        asked = []
        real = parts.Bands._all
        monkeypatch.setattr(parts.Bands, "_all", lambda bands: asked.append(1) or real(bands))
        for large, whole in ((0, 0), (1 << 62, 1)):
            monkeypatch.setattr(parts, "LARGE", large)
            bands = parts.Bands([parts.Part(p)], out)
            assert not bands.reproduced(coarser)
            asked.clear()
            assert not bands.reproduced(finer)
            assert len(asked) == whole
        assert not bool(same_bits(out, other).all())

    def test_the_right_schedule_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parts, "LARGE", 0)
        p = block_scaled("randn", 64, 384, 512, seed=4)
        finer = get_schedule("sm90.mma_sync.promote128")
        bands = parts.Bands([parts.Part(p)], predict_product(p, finer, out_dtype=torch.bfloat16))
        assert not bands.reproduced(get_schedule(PROMOTED)) and bands.reproduced(finer)
