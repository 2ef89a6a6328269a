"""The mutated products that candidates share are those that a kernel with the fault computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oracle.diagnosis.mutated import Mutated
from oracle.numbers.formats import codes_of
from oracle.routines import cases, get
from oracle.routines.catalogue import Beyond, Call, Fault, Stage, faults_of
from oracle.routines.mutants import mutated_parts, products
from oracle.tensorcore.schedules import get as get_schedule
from oracle.verdict.products import Part

CASES = (
    "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=9,n=136,k=256/family=randn/seed=1",
    "m_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-bf16/1x128:128x128/m=384,n=128,k=256,g=3/family=randn/seed=2",
)


def called(text: str, schedule: str | None) -> tuple[Call, list[Fault]]:
    case = cases.parse(text)
    known = None if schedule is None else get_schedule(schedule)
    call = Call(get(case.contract), case.inputs(), case.call_options(), known, case.out_dtype, Beyond.UNKNOWN)
    return call, [fault for fault in faults_of(case.contract) if fault.applies(call) is None]


def alike(x: Part, y: Part) -> bool:
    pairs = [(getattr(x.product, name), getattr(y.product, name)) for name in ("a", "b", "a_scale", "b_scale")]
    return all(p.shape == q.shape and bool((codes_of(p) == codes_of(q)).all()) for p, q in pairs)


@pytest.mark.parametrize("text", CASES)
class TestProducts:
    """Shared by all arithmetics of a call, and what each of them would compute alone."""

    def test_are_those_of_the_fault(self, text: str) -> None:
        call, faults = called(text, "sm90.promote128")
        shared = Mutated(call.with_schedule(None))
        for fault in faults:
            due, made = products(call, (fault,)), shared.computed(call, (fault,))
            assert [s for _, s in made] == [s for _, s in due]
            assert all(alike(x, y) for (x, _), (y, _) in zip(made, due, strict=True)), fault.name

    def test_do_not_depend_on_the_schedule(self, text: str) -> None:
        """The promise of ``Mutated``, of the whole catalogue."""
        (call, faults), (other, _) = called(text, "sm90.promote128"), called(text, None)
        early = [fault for fault in faults if set(fault.changes) & {Stage.READ, Stage.PRODUCT}]
        assert len(early) > 20
        for fault in early:
            pairs = zip(mutated_parts(call, (fault,)), mutated_parts(other, (fault,)), strict=True)
            assert all(alike(x, y) for x, y in pairs), fault.name

    def test_another_fault_has_others(self, text: str) -> None:
        """The negative test: what an early fault changes is seen."""
        call, faults = called(text, None)
        shared, (own, *_) = Mutated(call), call.parts
        early = [fault for fault in faults if set(fault.changes) <= {Stage.READ, Stage.PRODUCT}]
        assert any(not alike(shared.products((fault,)).parts[0], own) for fault in early)

    def test_are_kept_while_there_is_room(self, text: str) -> None:
        call, faults = called(text, None)
        fault = next(fault for fault in faults if set(fault.changes) <= {Stage.READ, Stage.PRODUCT})
        full, shared = Mutated(call), Mutated(replace(call))
        full.room = 0
        assert shared.products((fault,)) is shared.products((fault,))
        assert full.products((fault,)) is not full.products((fault,))
        assert alike(full.products((fault,)).parts[0], shared.products((fault,)).parts[0])
