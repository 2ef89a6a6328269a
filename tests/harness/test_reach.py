"""A kernel that refuses is counted: its cases move into its domain, and below the least that must be reached it is
UNTESTED."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from oracle.errors import OptionError
from oracle.harness.reach import Coverage, Reach
from oracle.harness.report import BATCH, COVERAGE, NUMBERS
from oracle.harness.validation import _cases, validate
from oracle.harness.watches import SMALLER
from oracle.routines import profiles
from oracle.routines.cases import Case
from oracle.routines.domain import parse
from oracle.routines.edges import edge_cases
from tests.support.commandline import Cli

pytestmark = pytest.mark.turns(4)

GEMM, CUTLASS = "fp8_gemm_nt", "cutlass_scaled_mm"
LIMITED = "tests.support.subjects.limited"
MNK = ("m", "n", "k")


def reached(
    admits: Callable[[Case], bool],
    *,
    contract: str = GEMM,
    domain: str | None = None,
    move: bool = True,
    chosen: Iterable[Case] | None = None,
) -> tuple[Coverage, list[Case], int]:
    """What a kernel that admits these calls reaches of a profile: coverage, the calls taken, the questions asked."""
    asked = []

    def ask(case: Case) -> str | None:
        asked.append(case)
        return None if admits(case) else "no"

    reach = Reach(contract, None if domain is None else parse(domain, MNK), ask, move=move)
    taken = []
    for case in reach.cases(profiles.cases(contract, "quick") if chosen is None else chosen):
        reach.saw(case, None if admits(case) else "no")
        taken += [case] if admits(case) else []
    return reach.coverage(), taken, len(asked)


class TestMoved:
    """Refused cases become calls that the kernel takes, with data and kind as they were where that is possible."""

    def test_nothing_is_refused(self) -> None:
        """No question is asked and no case changes."""
        coverage, taken, asked = reached(lambda case: True)
        assert taken == profiles.cases(GEMM, "quick") and asked == 0
        assert not coverage.complaints and not coverage.refused and coverage.domain == ""

    def test_a_domain_is_learned(self) -> None:
        """M % 4 and N % 128, as vLLM's CUTLASS takes them: the domain by name, every family, five dozen questions."""
        coverage, taken, asked = reached(lambda case: case["m"] % 4 == 0 and case["n"] % 128 == 0)
        assert coverage.domain == "m % 4 == 0, n % 128 == 0" and not coverage.complaints and asked < 150
        assert len(coverage.judged["family"]) == len(coverage.asked["family"])
        assert len(taken) == len(set(taken)) >= 40 and coverage.moved >= 30
        ((count, _, reason),) = coverage.refused
        assert reason == "no" and count >= coverage.moved

    def test_each_kind_has_its_own(self) -> None:
        """Block scales in whole tiles of N, the other schemes in multiples of 8 rows; one dtype only."""

        def admits(case: Case) -> bool:
            taken = case["n"] % 128 == 0 if "128" in case.scheme else case["m"] % 8 == 0
            return taken and case.dtypes == "e4m3xe4m3-bf16"

        coverage, _, _ = reached(admits, contract=CUTLASS)
        assert set(coverage.domain.split("; or ")) == {"m % 8 == 0", "n % 128 == 0"}
        assert not coverage.complaints and coverage.judged["dtypes"] == ("e4m3xe4m3-bf16",)
        assert len(coverage.judged["scheme"]) == 5 and len(coverage.asked["dtypes"]) > 1

    def test_the_shapes_of_a_refused_kind_are_judged_in_another(self) -> None:
        """Float16 alone meets this shape and this family."""
        listed = profiles.cases(GEMM, "quick")
        half = replace(listed[0], dtypes="e4m3xe4m3-f16", family="spike", extents=(("m", 11), ("n", 96), ("k", 40)))
        coverage, taken, _ = reached(lambda case: case.dtypes.endswith("bf16"), chosen=[*listed[:9], half])
        assert replace(half, dtypes="e4m3xe4m3-bf16") in taken and not coverage.complaints

    def test_data_asked_for_in_a_refused_kind_alone_are_judged_in_another(self) -> None:
        """What a case changes may be refused; its data are asked for elsewhere, unless the kernel takes none."""
        plain, *_ = profiles.cases(GEMM, "quick")
        other = replace(plain, family="zeros", changes=(("a", "pitch"),))
        for admits, missing in ((lambda c: not c.changes, False), (lambda c: c.family != "zeros", True)):
            coverage, taken, _ = reached(admits, chosen=[plain, other])
            assert any(case.family == "zeros" for case in taken) is not missing
            assert any("data of zeros" in said for said in coverage.complaints) is missing

    def test_a_stated_domain(self) -> None:
        """No call outside of it is made, and its one value of M is enough: it was stated."""
        calls: list[Case] = []
        coverage, taken, asked = reached(lambda case: not calls.append(case), domain="m == 1, n % 64 == 0")  # type: ignore[func-returns-value]
        assert {case["m"] for case in calls} == {1} and {case["n"] % 64 for case in calls} == {0} and asked == 0
        assert not coverage.complaints and len({case["k"] for case in taken}) > 5 and coverage.stated

    def test_given_cases_stay_what_they_are(self) -> None:
        listed = profiles.cases(GEMM, "quick")[:4]
        coverage, taken, asked = reached(lambda case: case["m"] > 1, chosen=listed, move=False)
        assert taken == [case for case in listed if case["m"] > 1] and asked == 0 and len(coverage.refused) == 1


class TestLeast:
    """What a kernel may not refuse."""

    @pytest.mark.sampled(6)
    @pytest.mark.parametrize(
        ("admits", "domain", "said"),
        [
            (lambda c: c["m"] == 33, None, "m is judged at 33 only"),
            (lambda c: c["m"] in (32, 33), None, "m is judged at 32 and 33 only"),
            (lambda c: dict(c.extents) == {"m": 33, "n": 256, "k": 384}, None, "1 shape is judged (at least 3)"),
            (lambda c: True, "m == 33, n == 256, k == 384", "1 shape is judged (at least 3)"),
            (lambda c: False, None, "every call is refused: no"),
            (lambda c: False, "m % 4 == 0", "every call is refused: no"),
            (lambda c: True, "m < 0", "every call is refused: no shape near it lies in the stated domain"),
            (lambda c: c.family != "nan", None, "no call with data of nan is taken"),
            (lambda c: c.family != "nan" or c.dtypes != "e4m3xe4m3-bf16", None, "no call with data of nan is taken"),
            (lambda c: c["m"] * c["k"] <= 1 << 14, None, "state what the kernel takes with --domain"),
            (lambda c: c["m"] % 8 == 0, "m % 4 == 0", "is refused inside the domain m % 4 == 0"),
        ],
    )
    def test_untested(self, admits: Callable[[Case], bool], domain: str | None, said: str) -> None:
        coverage, _, _ = reached(admits, domain=domain)
        assert said in "; ".join(coverage.complaints)

    @pytest.mark.parametrize(
        ("admits", "domain"),
        [
            (lambda c: c["m"] <= 64, None),
            (lambda c: c["k"] >= 256 and c["k"] % 128 == 0, None),
            (lambda c: c.dtypes == "e4m3xe4m3-bf16", None),
            (lambda c: c["m"] * c["k"] <= 1 << 14, "m * k <= 2**14"),
        ],
    )
    def test_enough(self, admits: Callable[[Case], bool], domain: str | None) -> None:
        """The twins: what a domain of single extents says, dtypes that are not offered, a condition that is stated."""
        assert not reached(admits, domain=domain)[0].complaints


FEW = profiles.cases(GEMM, "quick")[:8:2] + profiles.cases(GEMM, "quick")[14:18:2]


class TestValidate:
    """Through the server of a worker, on some of the cases that a run takes by default."""

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Six listed cases, edges of four residues, and every limit of bfloat16; ``edge_cases`` draws as ever. What
        is drawn of options and dtypes and at sizes of real models is left out."""

        def some(contract: str, seed: int) -> list[Case]:
            made = edge_cases(contract, seed)
            return [c for c in made if c.family != "randn" and c.dtypes.endswith("bf16")] + made[:8:2]

        monkeypatch.setattr("oracle.routines.drawn.edge_cases", some)
        monkeypatch.setattr("oracle.routines.drawn.drawn_cases", lambda contract, seed: [])
        monkeypatch.setattr("oracle.routines.drawn.real_cases", lambda contract, seed, budget: [])
        monkeypatch.setattr("oracle.harness.validation.WATCHED", {"quick": 0})
        monkeypatch.setattr("oracle.routines.profiles.cases", lambda contract, profile: FEW)

    @pytest.mark.usefixtures("in_process")
    def test_a_kernel_with_a_domain_conforms(self, cli: Cli, tmp_path: Path) -> None:
        """It says what was covered, what was refused and why, and the seed."""
        path = tmp_path / "report.json"
        ran = cli("validate", f"{LIMITED}:cutlass", "--contract", GEMM, "--json", path)
        assert ran.status == 0 and "CONFORMS" in ran.out and "DOES NOT" not in ran.out
        assert "domain m % 4 == 0, n % 128 == 0 (learned from refusals)" in ran.out
        assert "another shape, dtype or data" in ran.out and re.search(r"family (\d+) of \1,", ran.out)
        made = json.loads(path.read_text())
        assert made["judged"] >= 12 and f"--seed {made['seed']}" in ran.out
        assert f"--seed {made['seed']}" in made["provenance"]["command"]
        assert made["coverage"]["domain"] == "m % 4 == 0, n % 128 == 0" and made["coverage"]["moved"] > 5

    @pytest.mark.usefixtures("in_process")
    def test_a_kernel_that_takes_one_m_is_untested(self, cli: Cli) -> None:
        ran = cli("validate", f"{LIMITED}:only_m33", "--contract", GEMM, "--seed", 5)
        assert ran.status == 1 and ran.out.splitlines()[-1].startswith("UNTESTED")
        assert "m is judged at 33 only" in ran.out
        assert f"repro: fp8-oracle validate {LIMITED}:only_m33" in ran.out and "--seed 5" in ran.out

    @pytest.mark.usefixtures("in_process")
    def test_an_error_outside_the_domain_is_not_met(self) -> None:
        """It is no refusal (inside a domain it is a failure): no call is made outside of what was stated."""
        report = validate(f"{LIMITED}:raises_for_m", GEMM, domain="m % 4 == 0", limit=60)
        assert report.conforms and report.coverage is not None and report.coverage.stated

    @pytest.mark.usefixtures("in_process")
    def test_a_refused_case_that_was_asked_for(self) -> None:
        """It is not moved, and does not conform."""
        case = f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=5,n=128,k=128/seed=1"
        report = validate(f"{LIMITED}:cutlass", GEMM, case=case, limit=60)
        assert [f.watch for f in report.failures] == [COVERAGE] and report.exit_code == 1 and report.untested

    @pytest.mark.usefixtures("in_process")
    @pytest.mark.parametrize("kernel", ["saturates_bf16", "flushes_bf16"])
    def test_a_limit_is_met(self, kernel: str) -> None:
        """One case of all sees it, whatever the seed."""
        report = validate(f"{LIMITED}:{kernel}", GEMM, limit=60)
        wrong = [f for f in report.failures if f.watch == NUMBERS]
        assert report.exit_code == 1 and len(wrong) == 1

    @pytest.mark.usefixtures("in_process")
    def test_a_smaller_batch_stays_in_the_domain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The watch that cuts a batch makes no call outside of a stated domain; without one it does (the twin)."""
        monkeypatch.setattr("oracle.harness.validation.WATCHED", {"quick": 1})
        case = f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=8,n=128,k=128/seed=1"
        asked = (f"{LIMITED}:raises_for_m", GEMM)
        assert validate(*asked, case=case, domain="m % 4 == 0", limit=60).conforms
        assert [f.watch for f in validate(*asked, case=case, limit=60).failures] == [SMALLER]

    @pytest.mark.usefixtures("in_process")
    def test_fewer_rows_of_any_contract_stay_in_the_domain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of 8 rows 4 are asked, of 4 none is left, which is said; without a domain one row is asked (the twin)."""
        monkeypatch.setattr("oracle.harness.validation.WATCHED", {"quick": 1})
        asked = (f"{LIMITED}:casts_for_m", "per_token_cast_to_fp8")
        eight, four = (f"per_token_cast_to_fp8/bf16-e4m3/1x128/m={m},k=256/family=randn/seed=1" for m in (8, 4))
        tried = validate(*asked, case=eight, domain="m % 4 == 0", limit=60)
        assert tried.conforms and BATCH in tried.watches() and not any(SMALLER in note for note in tried.notes)
        left = validate(*asked, case=four, domain="m % 4 == 0", limit=60)
        assert left.conforms and BATCH not in left.watches()
        assert any(f"{SMALLER}: not tried: none lies in the domain m % 4 == 0" in note for note in left.notes)
        assert [f.watch for f in validate(*asked, case=eight, limit=60).failures] == [SMALLER]


class TestDrawn:
    """Data differ from run to run by default; a seed fixes them, and 0 gives the published cases."""

    @pytest.mark.usefixtures("in_process")
    def test_seeds(self) -> None:
        """Of runs that end when the kernel cannot be loaded."""
        first, second = (validate("no_such:thing", GEMM) for _ in range(2))
        assert first.seed != second.seed and first.profile == "quick"

    def test_cases(self) -> None:
        found = [{str(case) for case in _cases(GEMM, "quick", seed, None)} for seed in (0, 10, 20)]
        assert found[0] >= {str(case) for case in profiles.cases(GEMM, "quick")}
        assert not found[0] & found[1] and not found[1] & found[2]

    def test_a_wrong_domain_is_a_wrong_question(self, cli: Cli) -> None:
        with pytest.raises(OptionError, match="'x' is no extent"):
            validate("a:b", GEMM, domain="x > 1")
        ran = cli("validate", "a:b", "--contract", GEMM, "--domain", "m")
        assert ran.status == 2 and "'m' is no comparison" in ran.err
