"""Strategies: valid calls of any contract within a domain, which shrink."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

import oracle
from oracle import strategies
from oracle.errors import CaseError, OptionError
from oracle.routines import cases
from oracle.routines.base import Call
from oracle.routines.cases import Case
from oracle.routines.edges import valid
from tests.support.subjects import limited, right

GEMM = "fp8_gemm_nt"
FEW = settings(database=None, derandomize=True, max_examples=20)


class TestCalls:
    """Every drawn call is one that the contract takes."""

    @FEW
    @given(strategies.cases("cutlass_scaled_mm", domain="n % 16 == 0, k % 16 == 0", families=["randn", "codes"]))
    def test_within_what_was_asked(self, case: Case) -> None:
        assert valid(case) and cases.parse(str(case)) == case
        assert case["n"] % 16 == case["k"] % 16 == 0 and case.family in ("randn", "codes")

    @settings(FEW, max_examples=9)
    @given(st.sampled_from(["m_grouped_fp8_gemm_nt_contiguous", "moe_routing", "get_num_sms"]), st.data())
    def test_other_contracts(self, contract: str, draw: st.DataObject) -> None:
        call = draw.draw(strategies.calls(contract))
        assert isinstance(call, Call) and call.contract is oracle.contracts()[contract] and call.checked()

    def test_it_shrinks(self) -> None:
        """To the smallest wrong call: one row, one column, the first K that is wrong; the usual dtype and seed 0."""

        def wrong(case: Case) -> bool:
            inputs, options = case.inputs(), case.call_options()
            return not torch.equal(limited.lost_vectors(**inputs, **options), right.gemm(**inputs, **options))

        drawn = strategies.cases(GEMM, families=["randn"], domain="k >= 16", largest=40)
        assert str(find(drawn, wrong, settings=settings(FEW, max_examples=50))) == (
            f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=1,n=1,k=17/family=randn/seed=0"
        )


class TestWrongQuestions:
    """Each names what there is, before anything is drawn."""

    @pytest.mark.parametrize(
        ("asked", "error", "named"),
        [
            ({"contract": "fp9"}, CaseError, "no contract with cases is named 'fp9'"),
            ({"contract": GEMM, "families": ["gauss"]}, CaseError, "'gauss' is no family of fp8_gemm_nt"),
            ({"contract": GEMM, "dtypes": ["int8"]}, CaseError, "'int8' is no dtypes"),
            ({"contract": GEMM, "domain": "g == 1"}, OptionError, "'g' is no extent"),
            ({"contract": GEMM, "domain": "m > 1000"}, OptionError, "leaves no m up to 300"),
        ],
    )
    def test_refused(self, asked: dict[str, object], error: type[Exception], named: str) -> None:
        with pytest.raises(error, match=named):
            strategies.calls(**asked)  # type: ignore[arg-type]

    def test_without_hypothesis(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "hypothesis", None)
        with pytest.raises(OptionError, match="pip install hypothesis"):
            strategies.cases(GEMM)
