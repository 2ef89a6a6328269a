"""The expert layer that quantises its own input, judged by the contract on the cases of its kind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from torch import Tensor

from kernels import moe_layer
from kernels.subjects import BY_CONTRACT
from oracle.errors import CaseError
from oracle.harness.soak import drawn
from oracle.routines import cases, get, profiles
from oracle.routines.cases import Case
from oracle.verdict.compare import Status, Verdict

CONTRACT = "moe_fp8"
QUICK = [c for c in profiles.cases(CONTRACT, "quick") if c.dtypes == "bf16xe4m3-bf16"]
SERVED = [c for c in QUICK if c.granularity[0] == "1x128" and not c.changes]  # a changed call has a float32 output
GOOD = (Status.PASSED, Status.MISTRUSTED)
Quantised = tuple[Tensor, Tensor]


def judged(case: Case) -> Verdict:
    inputs, options = case.inputs(), case.call_options()
    out = BY_CONTRACT.moe_fp8(**inputs, **options)
    return get(CONTRACT).judge(inputs, out, arch="cpu", numerics="ieee32.any", **options)


def next_group(x: Tensor) -> Quantised:
    q, scale = right(x)
    return q, scale.roll(-1, dims=1)


def one_scale(x: Tensor) -> Quantised:
    scale = (x.float().abs().amax(dim=1, keepdim=True) / 448).clamp(min=1e-10)
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale.expand(-1, x.shape[1] // 128)


def small_codes(x: Tensor) -> Quantised:
    """Codes that end at 240, as those of E4M3FNUZ do, with the scales that belong to them."""
    scale = x.float().unflatten(1, (-1, 128)).abs().amax(dim=2).clamp(min=1e-10) / 240
    q = (x.float() / scale.repeat_interleave(128, dim=1)).clamp(-240, 240).to(torch.float8_e4m3fn)
    return q, scale


right = moe_layer._quantise_groups


class TestCases:
    """What an id says becomes the call; impossible calls are refused by name."""

    def test_every_option_and_family_is_listed(self) -> None:
        grammar = cases.grammars()[CONTRACT]
        assert {c.family for c in SERVED} == set(grammar.families)
        assert {key for c in SERVED for key, _ in c.options} == set(grammar.options)

    def test_options(self) -> None:
        text = f"{CONTRACT}/bf16xe4m3-bf16/1x128:128x128/t=9,e=3,h=128,i=128,k=1/"
        case = cases.parse(text + "rounding=PRODUCT,limit=0.5,first=2,on_input=1/family=randn/seed=1")
        assert case.call_options() == {
            "out_dtype": torch.bfloat16,
            "activation_rounding": "PRODUCT",
            "limit": 0.5,
            "first_expert": 2,
            "apply_router_weight_on_input": True,
        }
        inputs = case.inputs()
        assert inputs["x"].dtype == torch.bfloat16 and not {"a", "a_scale", "a2_scale"} & set(inputs)
        assert set(inputs["topk_ids"].flatten().tolist()) <= {-1, 0, 1, 2, 3, 4, 5}
        assert inputs["topk_ids"][0, 0] == 2

    def test_other_ranks_and_absent_experts_occur(self) -> None:
        case = next(c for c in SERVED if c.option("first"))
        ids = case.inputs()["topk_ids"]
        assert {-1, 0, 1, 2 + case["e"]} <= set(ids.flatten().tolist())
        assert all(len(set(row)) == len(row) for row in ids.where(ids >= 0, -1 - torch.arange(case["k"])).tolist())

    def test_experts_with_one_row_and_with_none_occur(self) -> None:
        ids = next(c for c in SERVED if c["e"] == 7).inputs()["topk_ids"]
        assert {0, 1} <= set(torch.bincount(ids[ids >= 0].long(), minlength=7).tolist())

    def test_a_given_scale_stands_beside_the_input(self) -> None:
        case = next(c for c in QUICK if c.scheme == "tensor:tensor")
        inputs = case.inputs()
        assert inputs["x"].dtype == torch.bfloat16 and inputs["a_scale"].shape == inputs["a2_scale"].shape == (1,)
        with pytest.raises(NotImplementedError, match="quantises x itself"):
            judged(case)

    def test_impossible_cases(self) -> None:
        head = f"{CONTRACT}/bf16xe4m3-bf16/1x128:128x128/t=2,e=3,h=128,i=128"
        with pytest.raises(CaseError, match="k=2"):
            cases.parse(f"{head},k=2/on_input=1/family=randn/seed=1").inputs()
        with pytest.raises(CaseError, match="family=amax"):
            cases.parse(f"{head},k=2/family=amax/seed=1".replace("bf16x", "e4m3x", 1)).inputs()


@pytest.mark.turns(4)
class TestJudged:
    """The right layer passes; one that quantises wrongly does not."""

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("case", SERVED, ids=str)
    def test_quick(self, case: Case) -> None:
        verdict = judged(case)
        assert verdict.status in GOOD, verdict.summary

    @pytest.mark.repeats("TestJudged")
    def test_random(self) -> None:
        found = (c for c in drawn(CONTRACT, 5) if c.dtypes == "bf16xe4m3-bf16" and c.granularity[0] == "1x128")
        served = (c for c in found if c.option("rounding") != "NONE" and not c.changes)
        assert {verdict.status for verdict in map(judged, islice(served, 25))} <= set(GOOD)

    @pytest.mark.parametrize("wrong", [next_group, one_scale, small_codes], ids=lambda f: f.__name__)
    def test_a_wrong_quantisation_fails(
        self, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Tensor], Quantised]
    ) -> None:
        """The negative test: the input alone is quantised wrongly, the intermediate rightly."""
        made: list[Quantised] = []

        def first_wrong(x: Tensor) -> Quantised:
            made.append(wrong(x) if not made else right(x))
            return made[-1]

        monkeypatch.setattr(moe_layer, "_quantise_groups", first_wrong)
        for family in ("randn", "codes", "amax"):
            made.clear()
            case = next(c for c in SERVED if c.family == family and c["h"] == 256 and not c.options)
            assert judged(case).status is Status.FAILED, family
            assert len(made) == 2

    @pytest.mark.parametrize("options", ["rounding=PRODUCT", "limit=7", "first=2", "on_input=1"])
    def test_an_ignored_option_fails(self, options: str) -> None:
        case = next(c for c in SERVED if f"/{options}/" in str(c))
        inputs, call = case.inputs(), case.call_options()
        out = BY_CONTRACT.moe_fp8(**inputs, out_dtype=torch.bfloat16)
        assert get(CONTRACT).judge(inputs, out, arch="cpu", numerics=None, **call).status is Status.FAILED

    def test_a_weight_multiplied_in_float32_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The weight enters the input in the input's dtype."""

        def spread(x: Tensor, weights: Tensor, target: Tensor, rows: int, on_input: bool) -> Tensor:
            assert on_input
            return plain((x.float() * weights).to(x.dtype), weights, target, rows, False)

        plain = moe_layer._spread
        case = next(c for c in SERVED if "/on_input=1/" in str(c))
        assert judged(case).status is Status.PASSED
        monkeypatch.setattr(moe_layer, "_spread", spread)
        assert judged(case).status is Status.FAILED
