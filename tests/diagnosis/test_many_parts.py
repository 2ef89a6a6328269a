"""Of a call of many products a few are looked at for what explains a failure; what is named holds on all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oracle
from oracle.diagnosis import explain
from oracle.diagnosis.candidates import FailingOutput
from oracle.routines import cases, get
from oracle.routines.base import Beyond, Call
from oracle.routines.catalogue import catalogue, run

CASE = "bmm_fp8/e4m3xe4m3-bf16/tensor:tensor/m=2,n=8,k=16,g=40/family=randn/seed=1"
FAULT = "A scale applied twice"
pytestmark = pytest.mark.turns(4)


def call() -> Call:
    case = cases.parse(CASE)
    return Call(get(case.contract), case.inputs(), case.call_options(), beyond=Beyond.WRAP)


def judged(out: Tensor) -> tuple[str, ...]:
    base = call()
    return oracle.judge("bmm_fp8", base.inputs, out, arch="cpu", **base.options).explained_by


def test_few_products_are_computed_for_each_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most candidates meet few products; only what explains those is computed for all."""
    base, seen = call(), list[int]()
    before = FailingOutput._begin

    def begin(self: FailingOutput, call: Call, *rest: object) -> None:
        seen.append(len(call.parts))
        before(self, call, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(FailingOutput, "_begin", begin)
    right = run(base)
    assert isinstance(right, Tensor)
    right[20:] = right[:20].flip(-1)
    judged(right)
    assert explain.FEW_PARTS in seen and seen.count(40) <= 2
    assert len(base.with_only((3, 5)).parts) == 2 and len(base.parts) == 40


def test_what_explains_a_few_is_named_where_it_explains_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name that a call of few products gets; none where one product more is wrong otherwise."""
    out = run(call(), catalogue()[FAULT])
    assert isinstance(out, Tensor)
    names = judged(out)
    monkeypatch.setattr(explain, "MANY", 64)
    whole = judged(out)
    assert FAULT in names and set(names) <= set(whole)
    monkeypatch.setattr(explain, "MANY", 32)
    torn = out.clone()
    torn[17] = torch.randn(torn[17].shape).to(torn.dtype)
    assert not judged(torn)
