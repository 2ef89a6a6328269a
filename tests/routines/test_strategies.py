"""Strategies: valid calls of any contract within a domain, which shrink."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.vendor.pretty import pretty

import oracle
from oracle import strategies
from oracle.errors import CaseError, OptionError
from oracle.routines import cases, profiles
from oracle.routines.base import Call
from oracle.routines.cases import Case
from oracle.routines.edges import valid
from tests.support.subjects import limited, right

GEMM = "fp8_gemm_nt"
FEW = settings(database=None, derandomize=True, max_examples=20)
FOUND = settings(FEW, phases=(Phase.generate, Phase.shrink))  # explaining what was found takes four times as long


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

    def test_what_is_shown_of_an_example(self) -> None:
        """The id of a case, the shapes of a call; no tables of the grammar."""
        case = cases.parse(f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=1,n=2,k=3/family=exact/seed=0")
        assert pretty(case) == f"cases.parse({str(case)!r})"
        shown = pretty(Call(oracle.contracts()[GEMM], case.inputs(), case.call_options()))
        assert shown.startswith(f"Call of {GEMM}: a (1, 3) torch.float8_e4m3fn, ") and shown.endswith("torch.bfloat16")

    def test_it_shrinks(self) -> None:
        """To the smallest wrong call: one row, one column, the first K that is wrong; the usual dtype and seed 0."""

        def wrong(case: Case) -> bool:
            inputs, options = case.inputs(), case.call_options()
            return not torch.equal(limited.lost_vectors(**inputs, **options), right.gemm(**inputs, **options))

        drawn = strategies.cases(GEMM, families=["randn"], domain="k >= 16", largest=40)
        assert str(find(drawn, wrong, settings=settings(FOUND, max_examples=50))) == (
            f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=1,n=1,k=17/family=randn/seed=0"
        )


GRAMMARS = {(grammar.extents, grammar.fixed): contract for contract, grammar in reversed(cases.grammars().items())}


class TestShrinking:
    """A kernel that is wrong beyond one extent is found, and shrinks to the smallest shape that it is wrong at."""

    def test_two_thresholds(self) -> None:
        """Of a kernel that forgets all of K behind its first block, for 33 rows and more."""

        def wrong(call: Call) -> bool:
            a, b, scale = (call.inputs[name] for name in ("a", "b", "a_scale"))
            if a.shape[0] < 33 or a.shape[1] <= 128:
                return False
            out = (a[:, :128].float() * scale[:, :1]) @ (b[:, :128].float() * call.inputs["b_scale"][:1, :1]).T
            made = out.to(call.options["out_dtype"])  # type: ignore[arg-type]
            return oracle.judge(GEMM, call.inputs, made, arch="cpu", explain="off", **call.options).status.is_failure

        drawn = strategies.calls(GEMM, families=["exact"], dtypes=["e4m3xe4m3-bf16"], domain="n <= 128")
        found = find(drawn, wrong, settings=settings(FOUND, max_examples=60)).inputs
        assert (tuple(found["a"].shape), tuple(found["b"].shape)) == ((33, 129), (1, 129))

    @pytest.mark.parametrize("contract", GRAMMARS.values())
    def test_every_shape_of_grammar(self, contract: str) -> None:
        """One contract for each set of extents: the threshold of each extent, and the least of all others."""
        grammar = cases.grammars()[contract]
        drawn = strategies.cases(contract)
        # conditions that few of 40 draws meet are what is asked here; a check of health would call them filtered
        few = settings(FOUND, max_examples=40, suppress_health_check=list(HealthCheck))
        least = dict(find(drawn, lambda case: True, settings=few).extents)
        for name in () if grammar.fixed else grammar.free[-1:] or grammar.extents[-1:]:
            drawn = strategies.cases(contract, largest=max(300, 2 * least[name]))
            found = dict(find(drawn, lambda case, name=name: case[name] > least[name], settings=few).extents)  # type: ignore[misc]
            assert found.pop(name) > least[name]
            assert found == {other: value for other, value in least.items() if other != name}
        if grammar.fixed:
            listed = [sum(extent for _, extent in case.extents) for case in profiles.cases(contract, "quick")]
            assert sum(least.values()) == min(listed)


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
