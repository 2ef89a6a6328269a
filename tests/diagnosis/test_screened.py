"""What is refused for all arithmetics at once, and what is not: the search names no less than one that asks each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from oracle.bounds import engines
from oracle.diagnosis import explain, other_calls
from oracle.diagnosis.candidates import FailingOutput, FailingRows, about, about_at, spread
from oracle.diagnosis.mutated import Mutated
from oracle.routines import cases, get
from oracle.routines.base import Beyond
from oracle.routines.catalogue import Call, faults_of, run
from oracle.routines.catalogue import get as get_fault
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.gemm import ScaledProduct, exact

CALL = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=40,n=64,k=384/family=randn/seed=5"
LARGER = CALL.replace("n=64,k=384", "n=256,k=2048")
FIRST, SECOND, THIRD = "sm90.promote128", "sm90.promote128.muladd", "sm90.mma_sync.promote128"
PREVIOUS = "A scale of the previous K block"


def called(schedule: str | None = FIRST, text: str = CALL) -> Call:
    case = cases.parse(text)
    known = None if schedule is None else get_schedule(schedule)
    return Call(get(case.contract), case.inputs(), {}, known, torch.bfloat16, Beyond.UNKNOWN)


def tensor(made: Tensor | dict[str, Tensor]) -> Tensor:
    assert isinstance(made, Tensor)
    return made


def noise(like: Tensor) -> Tensor:
    size = like.float().std()
    return (size * torch.randn(like.shape, generator=torch.Generator().manual_seed(1))).to(like.dtype)


def asked(call: Call, out: Tensor) -> explain._Asked:
    failure = FailingOutput(call, out, out != tensor(run(call)))
    return explain._Asked.of(failure, faults_of(call.contract.name))


class TestSettled:
    """One arithmetic speaks for the others only where nothing that it gives is near to what fails."""

    OTHERS = (get_schedule(SECOND), None)

    def test_noise(self) -> None:
        call = called(text=LARGER)
        assert asked(call, noise(tensor(run(call)))).settles(faults_of(call.contract.name), self.OTHERS)

    @pytest.mark.parametrize("name", [PREVIOUS, "store truncates", "products aligned to two bits less"])
    def test_a_fault_in_another_arithmetic_is_asked_of_that(self, name: str) -> None:
        """The negative test."""
        call, other = called(), called(SECOND)
        out = tensor(run(other, get_fault(name)))
        assert not asked(call, out).settles(faults_of(call.contract.name), self.OTHERS)
        assert oracle.judge(call.contract.name, call.inputs, out).explained_by[:1] in ((name,), ())

    def test_another_accumulator_has_others(self) -> None:
        call = called(text=LARGER)
        out = noise(tensor(run(call)))
        others = (get_schedule(THIRD),)
        assert not asked(call, out).settles(faults_of(call.contract.name), others)


class TestClosest:
    """The arithmetic of the elements that do not fail."""

    @pytest.mark.parametrize("schedule", [FIRST, THIRD])
    def test_is_found_where_a_row_fails(self, schedule: str) -> None:
        call = called()
        right, first = (tensor(run(called(name))) for name in (schedule, FIRST))
        assert schedule == FIRST or bool((right != first).any())
        right[7] = right[8]
        outside = torch.zeros_like(right, dtype=torch.bool)
        outside[7] = True
        mutated = Mutated(call)
        schedules = [get_schedule(FIRST), get_schedule(THIRD), None]
        found = explain._closest(
            lambda s: FailingOutput(call.with_schedule(s), right, outside, mutated), outside, schedules
        )
        assert found is not None and found.name == schedule

    def test_nothing_resembles_noise(self) -> None:
        call = called()
        out = noise(tensor(run(call)))
        schedules = [get_schedule(FIRST), get_schedule(SECOND), None]
        found = explain._closest(lambda s: FailingOutput(call.with_schedule(s), out, out != 0), out != 0, schedules)
        assert found is schedules[0]


class TestUnknown:
    """A fault that reads beyond a buffer is asked where it is known; what it explains there keeps it."""

    def test_of_what_it_knows(self) -> None:
        call, name = called(), "A scale not swizzled into 128x4 tiles"
        fault, right = get_fault(name), tensor(run(called()))
        wrong = tensor(run(call, fault))
        known = ~torch.isnan(wrong)
        assert bool(known.any()) and not bool(known.all())
        rows = FailingRows(FailingOutput(call, (out := noise(right)), out != right))
        assert rows.far([fault]) == {name}
        out = torch.where(known, wrong, noise(right))
        rows = FailingRows(FailingOutput(call, out, out != right))
        assert name not in rows.far([fault])


class TestElements:
    """Some elements of a product, as all of it."""

    def test_are_about_the_value_where_the_whole_is(self) -> None:
        product = called().parts[0].product
        out = exact(product).hi.bfloat16()
        out[::2] = -out[::2]
        whole = about(product, out, 2.0**-9)[1]
        at = spread(torch.arange(out.numel()), 24)
        rows, columns = at // product.N, at % product.N
        some = about_at(product, rows, columns, out[rows, columns], 2.0**-9)
        assert torch.equal(some, whole[rows, columns]) and bool(some.any()) and not bool(some.all())

    @pytest.mark.parametrize("n", [0, 1, 23, 24, 72, 73, 5000])
    def test_are_different_ones(self, n: int) -> None:
        found = spread(torch.arange(n), 24)
        assert len(torch.unique(found)) == len(found) == min(len(found), 24) and len(found) >= min(n, 12)


class TestSame:
    """Whether a changed input has the values of its own."""

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32])
    def test_a_late_difference_is_seen(self, dtype: torch.dtype) -> None:
        own = torch.ones(3, other_calls.COMPARED).to(dtype)
        made = own.clone()
        assert other_calls._same(made, own)
        made[2, -1] = 2.0
        assert not other_calls._same(made, own)
        zeros = torch.zeros_like(own)
        assert other_calls._same(-zeros.float(), zeros.float())

    def test_of_another_dtype(self) -> None:
        own = torch.full((8,), 1.5).to(torch.float8_e4m3fn)
        assert not other_calls._same(own.view(torch.float8_e5m2), own)
        assert other_calls._same(own.float().to(torch.float8_e5m2), own)

    def test_codes_of_zero(self) -> None:
        own = torch.tensor([1.0, -2.0, torch.nan]).to(torch.float8_e4m3fn)
        made = other_calls.zeroed(own, torch.tensor([False, True, False]))
        assert made.float()[:2].tolist() == [1.0, 0.0] and bool(torch.isnan(made.float()[2]))


def test_the_explanation_goes_on_from_the_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed of the whole call is computed once; another record of the call computes it again."""
    call, made = called(), list[object]()
    out = noise(tensor(run(call)))

    def counted(passed: Callable[..., Any]) -> Callable[..., Any]:
        def counting(product: ScaledProduct, *given: object, **named: object) -> Any:
            own = all(getattr(product, name).data_ptr() == x.data_ptr() for name, x in call.inputs.items())
            made.extend([product] if own and out.shape == (product.M, product.N) else [])
            return passed(product, *given, **named)

        return counting

    for name in ("_pass", "_compiled"):  # of exact values, and of bounds
        monkeypatch.setattr(engines, name, counted(getattr(engines, name)))
    assert oracle.judge(call.contract.name, call.inputs, out).observed
    once = len(made)
    first = call.contract.asked(call.inputs, out)
    verdict = call.contract.judged(first, out)
    made.clear()
    explain.explain_verdict(verdict, first, out, numerics=None)
    shared = len(made)
    explain.explain_verdict(verdict, replace(first), out, numerics=None)
    assert once > 0 and shared < len(made) - shared
