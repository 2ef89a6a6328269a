"""A few failing rows refuse only faults that the whole output refuses too, and the share of a pair is not guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.diagnosis import candidates, explain
from oracle.diagnosis.candidates import LISTED, PAIR_SAMPLE, FailingOutput, FailingRows, Sample
from oracle.routines import cases, get
from oracle.routines.base import Beyond
from oracle.routines.catalogue import Call, Fault, Stage, faults_of
from oracle.truth.gemm import ScaledProduct
from tests.support.mutants import mutant

CALL = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=40,n=64,k=384/family=randn/seed=5"
PREVIOUS = "A scale of the previous row"


def one(right: Tensor, wrong: Tensor) -> Tensor:
    out = right.clone()
    out[3, 5] *= 2
    return out


def a_row(right: Tensor, wrong: Tensor) -> Tensor:
    out = right.clone()
    out[17] = wrong[17]
    return out


def whole(right: Tensor, wrong: Tensor) -> Tensor:
    return wrong.clone()


def failing(make: Callable[[Tensor, Tensor], Tensor], *, exact: bool) -> FailingOutput:
    """An output made of the right one and that of a fault, compared with its schedule or with exact sums."""
    call, wrong = mutant(CALL, PREVIOUS)
    assert isinstance(wrong, Tensor)
    right = call.contract.kernel(call, ())["out"]
    call = replace(call, beyond=Beyond.UNKNOWN, schedule=None if exact else call.schedule)
    out = make(right, wrong)
    return FailingOutput(call, out, out != right)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("make", [one, a_row, whole])
def test_explanations_are_those_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Tensor, Tensor], Tensor], exact: bool
) -> None:
    """Most faults are refused on the rows; asked on the whole output, none of them is an explanation."""
    failure, faults = failing(make, exact=exact), faults_of("fp8_gemm_nt")
    applied = [fault for fault in faults if fault.applies(failure.call) is None]
    kept = list(FailingRows(failure).kept(applied))
    refused = [fault for fault in applied if fault not in kept]
    assert len(refused) > 30 and [fault for fault in applied if fault in kept] == kept
    monkeypatch.setattr(FailingRows, "kept", lambda self, faults: iter(faults))
    assert explain._single_faults(explain._Asked.of(failure, refused)) == ()


def test_a_row_explained_by_everything_is_refused_by_nothing_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault itself is kept; a bound that nothing meets refuses it, and the whole output would not."""
    failure = failing(whole, exact=False)
    (fault,) = (fault for fault in faults_of("fp8_gemm_nt") if fault.name == PREVIOUS)
    assert list(FailingRows(failure).kept([fault])) == [fault]
    assert [e.name for e in explain._single_faults(explain._Asked.of(failure, [fault]))] == [PREVIOUS]
    monkeypatch.setattr(candidates, "HOPELESS", 1.0)
    assert explain._single_faults(explain._Asked.of(failure, [fault])) == ()
    assert not list(FailingRows(failure).kept([fault]))


def test_what_predicts_nan_is_asked_on_the_whole() -> None:
    """Scales from beyond a buffer leave elements unknown, which a few rows do not count as the whole output does."""
    failure = failing(whole, exact=False)
    faults = [fault for fault in faults_of("fp8_gemm_nt") if fault.applies(failure.call) is None]
    unknown = [f for f in faults if bool(torch.isnan(failure.predict((f,)).value).any(dim=1).all())]
    assert unknown and list(FailingRows(failure).kept(unknown)) == unknown


def disagreeing(self: Sample, product: ScaledProduct, output: Tensor, *, near: bool) -> tuple[Tensor, Tensor]:
    """No element agrees."""
    return torch.zeros_like(output), torch.zeros_like(output, dtype=torch.bool)


@pytest.mark.parametrize("exact", [False, True])
def test_a_pair_is_covered_where_its_share_is(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    """The short way and the counts agree, for pairs that explain all, some and nothing; no first of a covered pair is
    far from what fails, most others are."""
    failure = failing(whole, exact=exact)
    few = Sample.half_failing(failure, PAIR_SAMPLE)
    faults = [fault for fault in faults_of("fp8_gemm_nt") if fault.applies(failure.call) is None]
    stores = [fault for fault in faults if set(fault.changes) == {Stage.STORE}]
    answers, far = set(), few.far(faults)
    assert len(far) > 20 and all(candidates.rounds(failure.call, store) for store in stores)
    for first in (fault for fault in faults if fault.name.startswith("A scale")):
        pieces = few.sums((first,))
        for second in stores:
            found = few.weigh((first, second), pieces)
            covered = found is not None and found.share > LISTED
            assert few.covers((first, second), pieces) == covered
            assert not (covered and first.name in far)
            answers.add(covered)
    assert answers == {True, False}
    monkeypatch.setattr(candidates, "around", lambda value, *given, **named: torch.zeros_like(value, dtype=torch.bool))
    another = Sample.half_failing(failing(whole, exact=exact), PAIR_SAMPLE)  # this one has counted
    assert PREVIOUS not in far and PREVIOUS in another.far(faults) and few.far(faults) == far


def test_arithmetics_of_one_call_count_together_what_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another arithmetic nothing is computed again; of another output all is."""
    failure = failing(whole, exact=False)
    faults = [fault for fault in faults_of("fp8_gemm_nt") if fault.applies(failure.call) is None]
    asked, counted = list[int](), Sample._at_most

    def at_most(self: Sample, some: Sequence[Fault], *, near: bool) -> dict[str, tuple[int, int]]:
        asked.append(len(some))
        return counted(self, some, near=near)

    monkeypatch.setattr(Sample, "_at_most", at_most)
    output, mutated, found = failure.output, failure.mutated, []
    for out in (output, output, output.flip(0)):
        other = FailingOutput(failure.call.with_schedule(None), out, failure.bad, mutated)
        sample = Sample(other, [torch.arange(8)], torch.arange(16))
        found.append(sample.at_most(faults, near=True))
    assert asked == [len(faults), 0, len(faults)] and found[0] == found[1] != found[2]


def test_a_store_that_takes_other_bits_rounds_nothing() -> None:
    case = cases.parse(CALL.replace("bf16", "f16"))
    call = Call(get(case.contract), case.inputs(), case.call_options(), None, case.out_dtype)
    stores = [f for f in faults_of("fp8_gemm_nt") if set(f.changes) == {Stage.STORE} and f.applies(call) is None]
    others = [store.name for store in stores if not candidates.rounds(call, store)]
    assert others == ["bfloat16 bits in a float16 buffer"] and len(stores) > 5


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("make", [one, a_row, whole])
def test_faults_that_are_refused_together_explain_too_little(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Tensor, Tensor], Tensor], exact: bool
) -> None:
    """By bits, or by all that float32 in any order may give."""
    failure = failing(make, exact=exact)
    faults = [fault for fault in faults_of("fp8_gemm_nt") if fault.applies(failure.call) is None]
    sample = Sample.half_failing(failure, (8, 16))
    likely = list(sample.likely(faults))
    assert [fault for fault in faults if fault in likely] == likely and len(likely) < len(faults)
    for fault in faults:
        found = sample.attempt((fault,))
        if found is not None and (found.complete or found.local or found.share >= LISTED):
            assert fault in likely

    monkeypatch.setattr(Sample, "_agreeing", disagreeing)
    assert PREVIOUS not in [fault.name for fault in sample.likely(faults)]


def test_nothing_is_likely_where_nothing_fails() -> None:
    failure = failing(one, exact=False)
    rows, columns = torch.tensor([1, 2]), torch.tensor([5, 6])
    assert list(Sample(failure, [rows], columns).likely(faults_of("fp8_gemm_nt"))) == []
