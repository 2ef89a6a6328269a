"""The mutation score: every fault noticed or argued away, every legal variant accepted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from oracle.bounds import of_schedule
from oracle.bounds.product import unrounded
from oracle.diagnosis.baselines import calc_diff, own_data, rules
from oracle.diagnosis.mutation import (
    Fate,
    contracts_with_cases,
    mutate,
    mutate_own_data,
    poisoned,
    right_variants,
    trials,
)
from oracle.errors import OptionError
from oracle.routines import cases, get, registered
from oracle.routines.catalogue import Call, Family, Fault, Stage, faults_of
from oracle.routines.catalogue import get as get_fault
from oracle.routines.fault import named
from oracle.routines.products.contract import block_scaled
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.gemm import quantum_of
from oracle.verdict.products import interval_of
from tests.support import legal
from tests.support.commandline import Cli

FAST = (
    "fp8_gemm_nt",
    "fp8_m_grouped_gemm_nt_masked",
    "fp8_mqa_logits",
    "align_fp8_moe_weights_for_fi",
    "moe_routing",
    "apply_fi_trtllm_fp8_per_tensor_moe",
    "silu_and_mul",
    "scaled_grouped_mm",
    "get_num_sms",
    "moe_fp8",
    "requantize_with_max_scale",
    "normalize_e4m3fn_to_e4m3fnuz",
    "shuffle_matrix_a",
)


@pytest.mark.turns(4)
class TestScore:
    """No fault of the catalogue survives the quick profile; what is not killed has an argument."""

    @pytest.mark.sampled(1)
    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("contract", FAST)
    def test_every_fault_is_killed_or_argued(self, contract: str, full: bool) -> None:
        """Twelve faults of a contract, all of them with ``--full``; other contracts: ``fp8-oracle mutate``."""
        faults = faults_of(contract)
        score = mutate(contract, faults=faults if full else faults[:: -(-len(faults) // 12)], with_rules=False)
        assert [m.fault for m in score.mutants if m.fate is Fate.SURVIVED] == []
        assert score.ratio == 1.0 and score.count(Fate.KILLED) > 0
        assert all(m.why for m in score.mutants if m.fate is not Fate.KILLED)

    def test_a_fault_that_does_nothing_survives(self) -> None:
        """The negative test: without an argument, equal bits are no equivalence."""
        nothing = Fault("nothing", Family.MOVEMENT, "-", {Stage.WRITE: lambda call, out: out}, named({"fp8_gemm_nt"}))
        (mutant,) = mutate("fp8_gemm_nt", faults=[nothing], with_rules=False).mutants
        assert mutant.fate is Fate.SURVIVED
        (argued,) = mutate(
            "fp8_gemm_nt", faults=[replace(nothing, same_if="it is the identity")], with_rules=False
        ).mutants
        assert argued.fate is Fate.EQUIVALENT

    def test_every_contract_with_faults_has_cases(self) -> None:
        """What can be mutated is mutated."""
        assert len(contracts_with_cases()) >= 25

    def test_unspecified_rows_are_poisoned(self) -> None:
        """Padding holds NaN, so that nothing of it may reach a result."""
        text = "m_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-bf16/1x128:128x128/m=128,n=64,k=128,g=2/family=randn/seed=1"
        inputs = poisoned(Call(get("m_grouped_fp8_gemm_nt_contiguous"), cases.parse(text).inputs()))
        padding = inputs["m_indices"] < 0
        assert bool(torch.isnan(inputs["a_scale"][padding]).all())
        assert not bool(torch.isnan(inputs["a_scale"][~padding]).any())


@pytest.mark.turns(4)
class TestRules:
    """Other projects' rules, on the same data and on their own."""

    def test_on_the_same_data(self) -> None:
        """A scale one ulp high is noticed by the oracle, not by a cosine; a dropped block by both."""
        faults = [get_fault("A scale one ulp high"), get_fault("last K block dropped")]
        score = mutate("torch_per_tensor_w8a8_scaled_mm", faults=faults)
        by_name = {m.fault: m for m in score.mutants}
        assert all(m.fate is Fate.KILLED for m in score.mutants)
        assert not by_name["A scale one ulp high"].noticed["FlashInfer cosine"]
        assert by_name["last K block dropped"].noticed["FlashInfer cosine"]

    def test_on_its_own_data(self) -> None:
        """DeepGEMM's rule passes truncating stores and one row's scale off by 2^-7 on its own data."""
        rule = rules()[0]
        faults = [
            get_fault(n)
            for n in ("store truncates", "A scale of one row 2^-7 too large", "A scale of the previous row")
        ]
        said = mutate_own_data(rule, faults=faults)
        assert said == {
            "store truncates": False,
            "A scale of one row 2^-7 too large": False,
            "A scale of the previous row": True,
        }

    @pytest.mark.parametrize("rule", rules(), ids=lambda r: r.name)
    def test_nan_never_passes(self, rule: object) -> None:
        """The passing condition is stated, so NaN fails."""
        made = own_data(rule, m=4, n=16, k=128, seed=1)  # type: ignore[arg-type]
        good = made.reference.flatten()
        bad = good.clone()
        bad[0] = torch.nan
        assert rule.passes(good, good, torch.bfloat16)  # type: ignore[attr-defined]
        assert not rule.passes(bad, good, torch.bfloat16)  # type: ignore[attr-defined]

    def test_calc_diff_of_zeros(self) -> None:
        """Zero against zero is no difference."""
        assert calc_diff(torch.zeros(3), torch.zeros(3)) == 0.0


@pytest.mark.turns(4)
class TestLegalVariants:
    """Whatever a right kernel may do passes: schedules, epilogues, orders, recipes."""

    def test_a_seeded_sample_raises_no_alarm(self) -> None:
        """The long run is ``fp8-oracle mutate --legal 10000``."""
        variants = list(right_variants(120, seed=20))
        assert [v for v in variants if v.false_alarm] == []
        assert any(v.declared is not None for v in variants) and len({v.computed_by for v in variants}) > 5

    def test_an_open_output_dtype_is_not_a_variant(self) -> None:
        """A result in another dtype is right only for a call that names it: machete_mm calls its option out_type."""
        counted = legal.count("machete_mm", "sm90", 12, seed=30)
        assert counted.variants == 12 and not counted.alarms

    def test_extents_that_suit_no_call_are_the_listed_ones(self) -> None:
        """An m of mxfp8_quantize_3d is a multiple of 32: with this seed 200 cases in a row were refused."""
        assert legal.count("mxfp8_quantize_3d", "sm90", 12, seed=30).variants == 12

    def test_of_every_contract_and_arch(self) -> None:
        """What ``python -m tests.support.legal`` counts: every contract with cases, on every arch that it names."""
        asked = list(legal.wanted())
        assert {name for name, _, _ in asked} == set(registered()) & set(cases.grammars())
        assert ("fp8_gemm_nt", "sm100", 40) in asked and ("moe_fp8", "sm89", 12) in asked
        assert sum(variants for *_, variants in asked) >= legal.TOTAL
        for name, arch in (("silu_and_mul", "sm90"), ("fp8_mqa_logits", "sm90"), ("get_num_sms", "sm90")):
            assert (counted := legal.count(name, arch, 3, seed=1)).variants == 3 and not counted.alarms

    def test_a_wrong_output_is_an_alarm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The negative test: a definition that negates its output."""
        right = type(get("silu_and_mul")).kernel
        wrong = lambda *given: {name: -x for name, x in right(*given).items()}  # noqa: E731
        monkeypatch.setattr(type(get("silu_and_mul")), "kernel", wrong)
        assert len(legal.count("silu_and_mul", "sm90", 3, seed=1).alarms) == 3

    def test_no_case_fits(self) -> None:
        with pytest.raises(OptionError, match="no case fits any numerics of sm70"):
            list(right_variants(1, seed=1, contracts=["fp8_gemm_nt"], arch="sm70"))


class TestNothingRounds:
    """Where no admitted arithmetic rounds before the store, the interval is one value."""

    @pytest.mark.parametrize("family", ["exact", "ties"])
    def test_exact_cases_have_no_width(self, family: str) -> None:
        """Small integers and powers of two."""
        inputs = cases.parse(f"fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=9,n=64,k=384/family={family}/seed=1").inputs()
        product = block_scaled(inputs["a"], inputs["b"], inputs["a_scale"], inputs["b_scale"])
        for name in ("sm90.promote128", "sm100.promote128", "sm89.promote128", "ieee32.any"):
            found = interval_of(product, name)
            assert bool((found.lo == 0).all()) and bool((found.hi == 0).all())

    def test_one_more_bit_of_data_and_the_width_is_back(self) -> None:
        """The negative test: scales that are no powers of two, sums that exceed the accumulator."""
        inputs = cases.parse("fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=9,n=64,k=384/family=exact/seed=1").inputs()
        wide = block_scaled(inputs["a"], inputs["b"], inputs["a_scale"] * 1.5, inputs["b_scale"])
        assert unrounded(wide, of_schedule(get_schedule("sm90.promote128"))) is None
        large = inputs["a"].clone()
        large.view(torch.uint8)[:, ::2] = 0x7E  # 448
        product = block_scaled(large, inputs["b"], inputs["a_scale"], inputs["b_scale"])
        mask = unrounded(product, of_schedule(get_schedule("sm90.promote128")))
        assert mask is None or not bool(mask.all())

    def test_quantum(self) -> None:
        """The largest power of two that divides every element."""
        assert quantum_of(torch.tensor([0.75, -3.0, 0.0], dtype=torch.float64)) == 0.25
        assert quantum_of(torch.zeros(2, dtype=torch.float64)) == 1.0


class TestCommand:
    """``fp8-oracle mutate``."""

    def test_scores_and_exit_status(self, cli: Cli) -> None:
        """A table, and 0 when nothing survives."""
        ran = cli("mutate", "--contract", "swap_w13_to_w31")
        assert ran.status == 0 and "100.0%" in ran.out

    def test_json(self, cli: Cli) -> None:
        """The record names every mutant and its fate."""
        ran = cli("mutate", "--contract", "fp8_gemm_nt", "--fault", "*previous row*", "--json", "-")
        record = json.loads(ran.out)
        (mutant,) = record["scores"][0]["mutants"]
        assert ran.status == 0 and mutant["fate"] == "KILLED" and mutant["by"].startswith("fp8_gemm_nt/")

    def test_list(self, cli: Cli) -> None:
        """Every fault with its thread."""
        ran = cli("mutate", "--list", "--contract", "fp8_gemm_nt")
        assert len(ran.out.splitlines()) == len(faults_of("fp8_gemm_nt"))

    def test_list_faults(self, cli: Cli) -> None:
        """Name, family, where it was seen, what it touches and where it applies, one line each."""
        lines = cli("list", "faults", "--contract", "fp8_gemm_nt").out.splitlines()
        assert [line.split("\t")[0] for line in lines] == [fault.name for fault in faults_of("fp8_gemm_nt")]
        (one,) = [line.split("\t") for line in lines if line.startswith("A scale of the next K block\t")]
        assert one[1:4] == [
            "scale index and layout",
            "seen: mlc-ai/TIRx-kernels PR 5",
            "on: has scales of blocks along K",
        ]
        assert {"fp8_gemm_nt", "bmm_fp8"} & set(one[4].split(",")) == {"fp8_gemm_nt"}
        assert cli("list", "faults", "--contract", "no_such_routine").status == 2

    def test_an_unknown_fault(self, cli: Cli) -> None:
        """One line, status 2."""
        ran = cli("mutate", "--contract", "fp8_gemm_nt", "--fault", "no such thing")
        assert ran.status == 2 and "no such thing" in ran.err


def test_trials_come_smallest_first() -> None:
    """Most mutants die on the first case."""
    sizes = [sum(t.numel() for t in trial.call.inputs.values()) for trial in trials("fp8_gemm_nt", "quick")]
    assert sizes == sorted(sizes) and get("fp8_gemm_nt").name == "fp8_gemm_nt"
