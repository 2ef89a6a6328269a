"""Every answer that a watch is given is judged, and every crash, hang, raise and refusal in a watch is a finding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from oracle.harness import concurrency, offsets, validation, watches
from oracle.harness.report import IN_PLACE, LARGE, NUMBERS, THREADS, Finding
from oracle.harness.session import Answer, Session, _has_gaps
from oracle.harness.validation import validate
from oracle.harness.watches import DIRTY, DOUBLED, FLIPPED, MIXED, OTHER, PERMUTED, PITCHED, RERUN, SMALLER, STALE
from oracle.routines.cases import Case, parse
from oracle.verdict.compare import Status
from tests.support.in_process import InProcess
from tests.support.subjects import broken, later

GEMM = "fp8_gemm_nt"
CASE = [f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=33,n=64,k=256/family=randn/seed=1"]
LATER = "tests.support.subjects.later:"

# kernel, the watch that finds it, words of the summary
LOST = (
    ("dies_when_a_scale_doubles", DOUBLED, "CRASHED: crashed: the worker died by SIGSEGV"),
    ("exits_on_padded_rows", PITCHED, "CRASHED: crashed: the kernel ended the process with status 0"),
)
FOUND = (
    ("zeros_after_the_first", RERUN, "called again: 2112 of 2112 elements outside the bound"),
    ("zeros_for_other_data", STALE, "other data of these shapes: 2112 of 2112 elements outside the bound"),
    ("raises_on_rerun", RERUN, "called again: CRASHED: raised: RuntimeError: no such plan"),
    ("raises_when_a_scale_doubles", DOUBLED, "CRASHED: raised: RuntimeError: no such plan"),
    ("refuses_when_a_scale_doubles", DOUBLED, "refused, though other data of these shapes were taken"),
    ("raises_on_permuted_rows", PERMUTED, "rows in reverse order: CRASHED: raised: RuntimeError: no such plan"),
    ("refuses_permuted_rows", PERMUTED, "refused, though other data of these shapes were taken"),
    ("raises_on_negated", FLIPPED, "CRASHED: raised: RuntimeError: no such plan"),
    ("raises_on_padded_rows", PITCHED, "CRASHED: raised: RuntimeError: no such plan"),
    ("writes_beyond_on_permuted_rows", "guard zones", "2 bytes behind its end"),
    ("scales_in_place_when_doubled", "inputs unchanged", "a_scale"),
)


@pytest.fixture
def in_process(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker process, and threads for a tenth of the time."""
    monkeypatch.setattr(concurrency, "SECONDS", 0.05)
    monkeypatch.setattr(InProcess, "stop", lambda _: later.forget())
    later.forget()


def _found(kernel: str, watch: str, words: str) -> None:
    report = validate(LATER + kernel, GEMM, case=CASE, limit=60)
    assert report.exit_code == 1 and report.judged == 1
    said = [f.verdict.summary for f in report.failures if f.watch == watch]
    views = 2 if watch == PITCHED else 1
    assert len(said) <= views and said and all(words in s for s in said), [
        (f.watch, f.verdict.summary) for f in report.failures
    ]


@pytest.mark.turns(2)
@pytest.mark.usefixtures("forked_workers")
class TestLaterCalls:
    """The first answer is right; the default settings find what comes after."""

    @pytest.mark.parametrize(("kernel", "watch", "words"), LOST, ids=[f[0] for f in LOST])
    def test_lost(self, kernel: str, watch: str, words: str) -> None:
        _found(kernel, watch, words)

    @pytest.mark.sampled(12)
    @pytest.mark.usefixtures("in_process")
    @pytest.mark.parametrize(("kernel", "watch", "words"), FOUND, ids=[f[0] for f in FOUND])
    def test_found(self, kernel: str, watch: str, words: str) -> None:
        _found(kernel, watch, words)

    @pytest.mark.parametrize(("kernel", "watch"), [("hangs_on_rerun", RERUN), ("hangs_in_another_thread", THREADS)])
    def test_a_hang_is_waited_for_once(self, kernel: str, watch: str) -> None:
        """It is found, and no other watch waits for the limit again."""
        report = validate(LATER + kernel, GEMM, case=CASE, limit=2.5)
        assert [f.watch for f in report.failures] == [watch] and report.workers == 1
        assert "no answer within 2.5 s" in report.failures[0].verdict.summary

    @pytest.mark.usefixtures("in_process")
    @pytest.mark.parametrize("kernel", ["wrong_above_a_scale", "zeros_for_other_data"])
    def test_wrong_numbers_of_other_data_are_no_memory(self, kernel: str) -> None:
        """A kernel that is wrong for them in a new process too has no stale state; one that is right there has."""
        report = validate(LATER + kernel, GEMM, case=CASE, limit=60)
        said = {f.watch: f.verdict.summary for f in report.failures}
        assert ({STALE, MIXED} & set(said) == set()) == (OTHER in said) == (kernel == "wrong_above_a_scale")
        assert OTHER not in said or said[OTHER].startswith(("other data of these shapes: ", "the last half"))

    @pytest.mark.usefixtures("in_process", "unexplained")
    def test_a_cache_that_is_written_in_place(self) -> None:
        """Both reports say the way out, and by it the same kernel conforms."""
        of = "tests.support.subjects.references:"
        case = ["indexer_k_quant_and_cache/bf16-u8/1x128/t=3,d=256,p=1/family=randn/seed=1"]
        report = validate(f"{of}cache_in_place", "indexer_k_quant_and_cache", case=case, limit=60)
        said = {f.watch: f.verdict.summary for f in report.failures if IN_PLACE in f.verdict.summary}
        assert said["inputs unchanged"].startswith("the kernel wrote to its inputs: kv_cache; a kernel")
        assert said[NUMBERS].startswith("no output was written, but the inputs of their names (kv_cache)")
        assert "nothing was written" not in said[NUMBERS]
        right = validate(
            f"{of}cache_in_place", "indexer_k_quant_and_cache", adapter=f"{of}on_a_clone", case=case, limit=60
        )
        assert right.conforms, [(f.watch, f.verdict.summary) for f in right.failures]

    @pytest.mark.usefixtures("in_process")
    def test_a_refusal_of_padded_rows_is_said(self) -> None:
        """Findings that do not fail, and notes: of all inputs and of the one refused; the other is judged alone."""
        report = validate(LATER + "refuses_padded_rows", GEMM, case=CASE, limit=60)
        refused = [f for f in report.findings if f.verdict.status is Status.UNSUPPORTED]
        assert report.conforms and {f.watch for f in refused} == {PITCHED}
        assert all("not this one" in f.verdict.summary for f in refused)
        said = [(how, of) for how in ("padded rows of", "elements apart in") for of in ("a, b", "a")]
        for how, of in said:
            assert any(f"refused with {how} {of}: " in note for note in report.notes)
        assert len(refused) == len(said) and any(f.watch == PITCHED and f not in refused for f in report.findings)

    @pytest.mark.usefixtures("in_process")
    def test_elements_that_are_apart(self) -> None:
        """A kernel that reads them side by side passes with padded rows, and fails here alone."""
        report = validate("tests.support.subjects.broken:ignores_steps", GEMM, case=CASE, limit=60)
        (only,) = report.failures
        assert only.watch == PITCHED and only.verdict.summary.startswith("elements apart in a, b:")

    @pytest.mark.usefixtures("in_process")
    def test_nothing_written_is_no_name_of_a_view(self) -> None:
        """A NaN that is computed from what lies between elements has the bits of memory that is not written."""
        report = validate("tests.support.subjects.broken:leaves_views", GEMM, case=CASE, limit=60)
        (only,) = report.failures
        assert not only.verdict.explained_by and "or was not written" in only.verdict.summary
        assert not any(map(_has_gaps, parse(CASE[0]).inputs().values()))
        assert _has_gaps(torch.empty(2, 4)[:, ::2]) and not _has_gaps(torch.empty(2, 4).T)

    @pytest.mark.usefixtures("in_process")
    def test_a_right_kernel(self) -> None:
        """Every watch has a finding, and none fails (the twin)."""
        report = validate("tests.support.subjects.right:gemm_out", GEMM, case=CASE, limit=60)
        assert report.conforms and {RERUN, STALE, DIRTY, DOUBLED, FLIPPED, PERMUTED, PITCHED} <= set(report.watches())
        assert all(f.verdict.status is Status.PASSED for f in report.findings)


@pytest.mark.turns(4)
def test_what_was_judged_is_not_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some thirty answers to one case the contract judges those with other inputs or bits than before, six here."""
    monkeypatch.setattr(validation, "Worker", InProcess)
    judged: list[Answer] = []
    asked: list[Answer] = []
    judge, call = Session.judge, Session.call

    def judging(self: Session, inputs: Any, options: Any, answer: Answer) -> Any:
        judged.append(answer)
        return judge(self, inputs, options, answer)

    def calling(self: Session, *given: Any, **how: Any) -> Answer:
        asked.append(call(self, *given, **how))
        return asked[-1]

    monkeypatch.setattr(Session, "judge", judging)
    monkeypatch.setattr(Session, "call", calling)
    assert validate("tests.support.subjects.right:gemm_out", GEMM, case=CASE, limit=60).conforms
    assert len(judged) <= 6 < 25 <= len(asked)


@pytest.mark.usefixtures("in_process")
def test_operands_are_those_of_the_options() -> None:
    """Scales of 32, where the default is 128: what a call specifies is read with its options."""
    name = "k_grouped_fp8_gemm_tn_contiguous"
    case = f"{name}/e4m3xe4m3-f32/1x32:1x32/m=4,n=4,k=96,g=3/family=randn/seed=1"
    assert validate(f"kernels.subjects:BY_CONTRACT.{name}", name, case=case, limit=60).conforms


@pytest.mark.usefixtures("in_process")
def test_a_call_that_asks_for_the_domain_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does wrong there is a finding, though the case is not among those that are judged."""

    def asking(self: validation.Reach, chosen: Iterator[Case]) -> Iterator[Case]:
        assert self.ask(parse(CASE[0])) is None
        yield from chosen

    monkeypatch.setattr(validation.Reach, "cases", asking)
    few = CASE[0].replace("m=33", "m=5")
    report = validate("tests.support.subjects.broken:raises", GEMM, case=few, limit=60)
    assert [(f.case, f.verdict.status) for f in report.failures] == [(CASE[0], Status.CRASHED)]
    assert validate("tests.support.subjects.right:gemm", GEMM, case=few, limit=60).conforms


@pytest.mark.usefixtures("in_process")
def test_other_inputs_have_the_shapes_of_these() -> None:
    """Where other data have other shapes, as steps of K by group, the own ones are turned, and stay what they are."""
    mine = {"a": torch.arange(6.0).to(torch.float8_e4m3fn), "ks": torch.tensor([4, 2])}
    same, longer = {name: x + 0 if name == "ks" else x for name, x in mine.items()}, {**mine, "a": mine["a"][:4]}
    assert watches.alike(mine, same) is same
    turned = watches.alike(mine, longer)
    assert turned["a"].float().tolist() == [5, 4, 3, 2, 1, 0] and turned["ks"] is mine["ks"]


@pytest.mark.turns(4)
@pytest.mark.usefixtures("forked_workers")
class TestThreads:
    """Every answer of every thread counts, the farthest one is judged."""

    @pytest.mark.parametrize("kernel", ["disturbs_the_others", "nudges"])
    def test_the_other_threads_and_the_farthest_answer(self, kernel: str) -> None:
        case = CASE[0].replace("bf16", "f32").replace("k=256", "k=384")
        report = validate(LATER + kernel, GEMM, case=case, limit=60, require=(THREADS,))
        (only,) = report.failures
        assert only.watch == THREADS and "elements outside the bound" in only.verdict.summary


@pytest.mark.usefixtures("in_process")
class TestLargeCalls:
    """Rows anywhere in a call beyond the limit of elements."""

    @pytest.fixture(autouse=True)
    def small_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(offsets, "LIMIT", broken.OFFSET_LIMIT << 2)

    def _failures(self, kernel: str) -> list[Finding]:
        report = validate(kernel, GEMM, case=CASE, limit=60, require=(LARGE,))
        assert LARGE in report.watches()
        return list(report.failures)

    def test_a_row_far_from_every_multiple(self) -> None:
        (only,) = self._failures(LATER + "forgets_a_row_of_many")
        assert only.watch == LARGE and "64 of" in only.verdict.summary

    def test_no_rows_outside_a_stated_domain(self) -> None:
        """Neither few nor many: the kernel raises for them; without the statement it fails."""
        wanted = {"limit": 60, "require": (LARGE,), "case": CASE[0].replace("m=33", "m=36")}
        kernel = "tests.support.subjects.limited:raises_for_m"
        report = validate(kernel, GEMM, domain="m % 4 == 0", **wanted)  # type: ignore[arg-type]
        assert {f.verdict.summary for f in report.failures} == set() and LARGE in report.watches()
        report = validate(kernel, GEMM, **wanted)  # type: ignore[arg-type]
        assert {f.watch for f in report.failures} >= {SMALLER}

    def test_a_crash(self) -> None:
        (only,) = self._failures(LATER + "raises_on_many_rows")
        assert only.watch == LARGE and only.verdict.status is Status.CRASHED

    def test_right(self) -> None:
        assert self._failures("tests.support.subjects.right:gemm_out") == []
