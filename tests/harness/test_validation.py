"""The harness: right kernels conform, broken ones are caught, each for its own reason."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

import oracle
from oracle.errors import CaseError, OptionError, SubjectError
from oracle.fixtures.call_file import read
from oracle.harness import validation
from oracle.harness.memory import GUARD, Poisoning, guarded, is_poison, placed
from oracle.harness.report import LOAD, NUMBERS
from oracle.harness.soak import HEIGHTS, drawn
from oracle.harness.validation import validate
from oracle.harness.watches import SMALLER
from oracle.routines import cases, profiles
from oracle.verdict.compare import Status
from tests.support.commandline import Cli
from tests.support.in_process import InProcess
from tests.support.subjects import broken, right

GEMM = "fp8_gemm_nt"
FEW = [
    f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=33,n=192,k=384/family=randn/seed=1",
    f"{GEMM}/e4m3xe4m3-f32/1x128:128x128/m=5,n=128,k=256/family=randn/seed=2",
]


@pytest.mark.turns(4)
class TestRightKernels:
    """A right kernel conforms, in every calling convention, whatever it prints and forks."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(
        ("kernel", "adapter"),
        [
            ("right:gemm", None),
            ("right:gemm_out", None),
            ("right:gemm_pair", "tests.support.subjects.right:adapt_pair"),
            ("right:dequantising", None),
            ("broken:chatty", None),
            ("broken:forks", None),
            ("broken:forks_slowly", None),  # its child comes back from the call during the calls that follow
        ],
    )
    def test_conforms(self, kernel: str, adapter: str | None) -> None:
        """Exit 0, one worker, every watch met."""
        report = validate(f"tests.support.subjects.{kernel}", GEMM, adapter=adapter, case=FEW, limit=60)
        assert [f.verdict.summary for f in report.failures] == []
        assert report.exit_code == 0 and report.workers == 1 and report.judged == 2
        assert {"guard zones", "stale state", "every element written", "scale doubled"} <= set(report.watches())
        assert len(report.printed) <= 2000

    @pytest.mark.usefixtures("in_process")
    def test_a_function_is_as_good_as_its_name(self) -> None:
        """``validate`` takes the function itself, and is a verb of the package."""
        assert oracle.validate(right.gemm, GEMM, case=FEW[:1], limit=60).conforms

    @pytest.mark.repeats("TestRightKernels")
    @pytest.mark.usefixtures("in_process")
    @pytest.mark.parametrize("kernel", ["right:gemm", "wrong:rows_swapped"])
    def test_processes_that_judge_find_the_same(self, kernel: str) -> None:
        """With ``jobs`` the findings are those of one job, in their order, but for the time."""
        one, two = (
            validate(f"tests.support.subjects.{kernel}", GEMM, case=[*FEW, *FEW[::-1]], limit=60, jobs=jobs)
            for jobs in (1, 2)
        )
        same = [replace(found, seconds=0.0) for found in one.findings], one.notes, one.coverage
        assert ([replace(found, seconds=0.0) for found in two.findings], two.notes, two.coverage) == same

    @pytest.mark.repeats("TestRightKernels::test_conforms")
    def test_the_quick_profile(self) -> None:
        """Every case of the profile."""
        report = validate("tests.support.subjects.right:gemm", GEMM)
        assert report.conforms and report.judged >= 25


# kernel, the watch that catches it, words of the summary
IN_PROCESS = (
    ("raises", NUMBERS, "unsupported M"),
    ("quits", NUMBERS, "exit(4)"),
    ("out_of_memory", NUMBERS, "out of memory"),
    ("nan", NUMBERS, "only element (0, 0)"),
    ("out_of_bounds", "guard zones", "2 bytes behind its end"),
    ("overwrites_input", "inputs unchanged", "a_scale"),
    ("unwritten_tail", "every element written", "columns 189..191"),
    ("unwritten_own", "every element written", "columns 189..191"),
    ("random", "rerun determinism", "other bits on rerun"),
    ("stale", "stale state", "depends on the previous call"),
    ("ignores_strides", "non-contiguous inputs", "outside the bound"),
    ("float32_out", NUMBERS, "expected torch.bfloat16"),
    ("fewer_rows", NUMBERS, "out has shape [32, 192]; these inputs give [33, 192]"),
    ("transposed_shape", NUMBERS, "out has shape [192, 33]"),
    ("empty", NUMBERS, "out has shape [0]"),
    ("flat", NUMBERS, "out has shape [6336]"),
    ("complex_out", NUMBERS, "out has dtype torch.complex64"),
    ("boolean", NUMBERS, "out has dtype torch.bool"),
    ("transposed_memory", "row-major output", "strides [1, 33]"),
    ("forgets_row_of_small_batch", SMALLER, "the first 16 of 33 rows as a batch: 192 of 3072 elements outside"),
    ("refuses_small_batch", SMALLER, "the first 4 of 33 rows as a batch: CRASHED: raised: RuntimeError: no tile"),
    ("nothing", "every element written", "every element"),
    ("nothing", NUMBERS, "nothing was written: every specified element holds what was there before"),
    ("row_major_scale", NUMBERS, "outside the bound"),
    ("wrong_names", LOAD, "pass an adapter"),
)
# these end the worker, or stop it from loading
IN_WORKER = (
    ("dies", NUMBERS, "SIGSEGV"),
    ("killed", NUMBERS, "SIGKILL"),
    ("aborts", NUMBERS, "the worker died by SIGABRT: CUDA error: misaligned address"),
    ("exits", NUMBERS, "status 3"),
    ("not_callable", LOAD, "not callable"),
    ("absent", LOAD, "has no 'absent'"),
)
CAUGHT = (*IN_PROCESS, *IN_WORKER)


@pytest.mark.turns(4)
class TestBrokenKernels:
    """Each is caught for its own reason, and the run survives."""

    @pytest.mark.sampled(12)
    @pytest.mark.parametrize(("kernel", "watch", "words"), CAUGHT, ids=[c[0] for c in CAUGHT])
    @pytest.mark.usefixtures("unexplained", "forked_workers")
    def test_caught(self, monkeypatch: pytest.MonkeyPatch, kernel: str, watch: str, words: str) -> None:
        """The watch, and what it says."""
        if (kernel, watch, words) in IN_PROCESS:
            monkeypatch.setattr(validation, "Worker", InProcess)
        which = FEW[1:] if kernel == "random" else FEW[:1]  # bfloat16 hides most of what another order changes
        report = validate(f"tests.support.subjects.broken:{kernel}", GEMM, case=which, limit=60)
        caught = [f for f in report.failures if f.watch == watch]
        assert any(words in f.verdict.summary for f in caught), [(f.watch, f.verdict.summary) for f in report.failures]
        assert report.exit_code == (2 if watch == LOAD else 1)

    @pytest.mark.repeats("TestBrokenKernels::test_caught")
    @pytest.mark.usefixtures("in_process")
    def test_only_its_own_watch(self) -> None:
        """Wrong memory with right numbers fails no numbers."""
        for kernel in ("out_of_bounds", "overwrites_input", "transposed_memory", "refuses_small_batch"):
            report = validate(f"tests.support.subjects.broken:{kernel}", GEMM, case=FEW[:1], limit=60)
            assert {f.watch for f in report.failures} == {dict((c[0], c[1]) for c in CAUGHT)[kernel]}

    @pytest.mark.usefixtures("in_process")
    def test_a_wrong_shape_does_not_end_the_run(self) -> None:
        """The next case is judged as well, by the same worker, and nothing else is said of the first."""
        report = validate("tests.support.subjects.broken:fewer_rows", GEMM, case=FEW, limit=60)
        assert [f.watch for f in report.failures] == [NUMBERS] * 2 and report.workers == 1

    @pytest.mark.usefixtures("in_process")
    def test_rows_with_space_between_them(self) -> None:
        """A note: code that asks for strides reads them. Dense rows have none (the twin)."""
        padded = validate("tests.support.subjects.broken:padded_rows", GEMM, case=FEW[:1], limit=60)
        assert padded.conforms and any("row-major output: rows with space" in note for note in padded.notes)
        assert not any("row-major" in note for note in validate(right.gemm, GEMM, case=FEW[:1], limit=60).notes)

    @pytest.mark.usefixtures("forked_workers")
    def test_a_hang_ends_at_the_limit(self) -> None:
        """The worker is killed, a fresh one takes the next case."""
        report = validate("tests.support.subjects.broken:hangs", GEMM, case=FEW, limit=1)
        assert [f.verdict.status for f in report.findings] == [Status.CRASHED] * 2
        assert "no answer within 1 s" in report.findings[0].verdict.summary and report.workers == 2

    @pytest.mark.usefixtures("in_process")
    def test_a_missing_module(self) -> None:
        """Named, status 2."""
        report = validate("no_such_module:kernel", GEMM, case=FEW)
        said = report.failures[0].verdict.summary
        assert report.exit_code == 2 and "No module named" in said and "run where " in said

    @pytest.mark.repeats("TestBrokenKernels::test_caught")  # tests/journeys/vendor.sh reads what is saved
    @pytest.mark.usefixtures("in_process")
    def test_the_fault_is_named_and_minimised(self, tmp_path: Path) -> None:
        """From the output alone; the saved file explains itself and is still the same fault."""
        path, case = tmp_path / "case.safetensors", FEW[0].replace("m=33,n=192,k=384", "m=3,n=16,k=256")
        report = validate("tests.support.subjects.broken:row_major_scale", GEMM, case=case, limit=60, save=path)
        (wrong,) = [f for f in report.failures if f.watch == NUMBERS]
        assert wrong.verdict.explained_by == ("row-major A scale read as [K/128, align(M, 4)]",)
        assert report.saved == str(path) and path.stat().st_size < 40_000
        saved = read(path)
        verdict = oracle.judge(saved.contract, saved.inputs, saved.output, arch=saved.arch, **saved.options)
        assert verdict.explained_by == wrong.verdict.explained_by

    @pytest.mark.usefixtures("in_process")
    def test_batch_invariance_can_be_required(self) -> None:
        """A note by default, a failure when required."""
        case = FEW[0].replace("bf16", "f32")
        plain = validate("tests.support.subjects.broken:varies_with_m", GEMM, case=case, limit=60)
        assert plain.conforms and any("batch invariance" in note for note in plain.notes)
        strict = validate(
            "tests.support.subjects.broken:varies_with_m", GEMM, case=case, limit=60, require=("batch invariance",)
        )
        assert [f.watch for f in strict.failures] == ["batch invariance"]

    @pytest.mark.sampled(1)
    @pytest.mark.usefixtures("in_process")
    @pytest.mark.parametrize(
        ("kernel", "words"),
        [
            ("shares_scratch", "called from several threads at once: "),
            (
                "unsupported_among_threads",
                "at once: the kernel does not offer this call: NotImplementedError: one thread",
            ),
            ("writes_beyond_among_threads", "at once: written out of bounds: out: 2 bytes behind its end"),
        ],
    )
    def test_threads_can_be_required(self, kernel: str, words: str) -> None:
        """A note by default, a failure when required; a kernel that keeps nothing passes (the twin)."""
        plain = validate(f"tests.support.subjects.broken:{kernel}", GEMM, case=FEW[:1], limit=60)
        assert plain.conforms and any(words in note for note in plain.notes)
        strict = validate(f"tests.support.subjects.broken:{kernel}", GEMM, case=FEW[:1], limit=60, require=("threads",))
        assert [f.watch for f in strict.failures] == ["threads"] and words in strict.failures[0].verdict.summary
        assert "--require threads" in strict.command(strict.failures[0])
        right_one = validate(right.gemm, GEMM, case=FEW[:1], limit=60, require=("threads",))
        assert right_one.conforms and "threads" in right_one.watches()
        assert not any("threads" in note for note in right_one.notes)

    @pytest.mark.usefixtures("in_process")
    def test_a_raise_in_another_thread_fails(self) -> None:
        """Whether the watch is required or not."""
        report = validate("tests.support.subjects.broken:refuses_other_threads", GEMM, case=FEW[:1], limit=60)
        (only,) = report.failures
        words = "several threads at once: CRASHED: raised: RuntimeError: the handle is in use"
        assert only.watch == "threads" and words in only.verdict.summary

    @pytest.mark.usefixtures("in_process")
    def test_what_is_required_is_tried(self) -> None:
        """No case that the watch takes: a failure that says so; without the demand nothing."""
        exact = FEW[0].replace("randn", "exact")
        for watch in ("threads", "batch invariance"):
            report = validate(right.gemm, GEMM, case=exact, limit=60, require=(watch,))
            assert [f.verdict.status for f in report.failures] == [Status.UNTESTED] and report.exit_code == 1
            assert report.failures[0].watch == watch and "not tried" in report.failures[0].verdict.summary
        assert validate(right.gemm, GEMM, case=exact, limit=60).conforms

    @pytest.mark.usefixtures("in_process")
    def test_a_slow_kernel_is_not_called_from_threads(self) -> None:
        """Four calls at once may take four times as long: that is no hang."""
        strict = validate("tests.support.subjects.right:slow", GEMM, case=FEW[:1], limit=0.5, require=("threads",))
        (only,) = strict.failures
        assert only.verdict.status is Status.UNTESTED and "raise the limit" in only.verdict.summary
        plain = validate("tests.support.subjects.right:slow", GEMM, case=FEW[:1], limit=0.5)
        assert plain.conforms and any("threads: not tried: a call takes" in note for note in plain.notes)

    @pytest.mark.usefixtures("in_process", "unexplained")
    @pytest.mark.parametrize("kernel", ["row_major_scale", "random"])
    def test_a_kernel_that_fails_alone_is_not_reported_for_threads(self, kernel: str) -> None:
        """Numbers that are wrong alone say nothing of threads; other bits that are right are a note at most."""
        report = validate(f"tests.support.subjects.broken:{kernel}", GEMM, case=FEW[1:], limit=60)
        assert "threads" not in {f.watch for f in report.failures}
        noted = [note for note in report.notes if "threads" in note]
        assert all("other bits when called" in note for note in noted) and bool(noted) is (kernel == "random")


# kernels that are wrong on one kind of shape or dtype only
SELDOM = ("whole_tiles", "many_rows", "long_k", "wide", "tail", "reads_e5m2_as_e4m3", "no_float16")


@pytest.mark.turns(4)
class TestExempt:
    """What a kernel's documentation excludes is not tried, and said."""

    @pytest.mark.usefixtures("in_process", "unexplained")
    def test_not_tried(self) -> None:
        """Of kernels that fail by that alone."""
        name = "tests.support.subjects.broken:"
        exempt = {"non-contiguous inputs": "dense rows alone"}
        report = validate(f"{name}ignores_strides", GEMM, case=FEW[:1], exempt=exempt)
        assert report.conforms and "non-contiguous inputs: not tried: dense rows alone" in report.notes
        assert report.to_json()["exempt"] == exempt and "non-contiguous inputs" not in report.watches()
        assert not validate(f"{name}ignores_strides", GEMM, case=FEW[:1], exempt={"threads": "one"}).conforms
        report = validate(f"{name}nan", GEMM, case=FEW[:1], exempt={"data of randn": "no ordinary numbers"})
        assert not report.findings and not report.conforms

    @pytest.mark.parametrize("name", ["numbers", "stale state", "data of nothing"])
    def test_what_no_documentation_excludes(self, name: str) -> None:
        with pytest.raises(OptionError, match="may not be excluded"):
            validate("a:b", GEMM, exempt={name: "no"})
        with pytest.raises(OptionError, match="required and exempt"):
            validate("a:b", GEMM, exempt={"threads": "no"}, require=("threads",))


class TestReach:
    """The quick profile and a soak meet what kernels switch on."""

    @pytest.mark.sampled(1)
    @pytest.mark.usefixtures("in_process", "unexplained")
    @pytest.mark.parametrize("kernel", SELDOM)
    def test_quick_meets_it(self, kernel: str) -> None:
        """On few cases of many: the rest of the kernel is right."""
        listed = [case for case in profiles.cases(GEMM, "quick") if case.family == "randn"]
        apart = []
        for case in listed:
            inputs, options = case.inputs(), case.call_options()
            wanted = right.gemm(**inputs, **options)
            getattr(broken, kernel)(**inputs, out=(out := torch.empty_like(wanted)))
            apart += [] if torch.equal(out, wanted) else [(inputs, options, out)]
        verdicts = [oracle.judge(GEMM, inputs, out, arch="cpu", **options) for inputs, options, out in apart[:1]]
        assert [v.status for v in verdicts] == [Status.FAILED] and len(apart) < len(listed) / 2

    @pytest.mark.parametrize("contract", sorted(cases.grammars()))
    def test_a_soak_draws_valid_calls(self, contract: str) -> None:
        """The same ones for the same seed, others for another; each parses back."""
        first = list(islice(drawn(contract, 3), 2))
        assert first == list(islice(drawn(contract, 3), 2)) != list(islice(drawn(contract, 4), 2))
        assert all(cases.parse(str(case)) == case for case in first)

    @pytest.mark.repeats("TestReach::test_a_soak_draws_valid")
    def test_a_soak_draws_everything(self) -> None:
        """Heights at thresholds and others, K tails, all dtypes and families; no listed shape is needed."""
        found = list(islice(drawn(GEMM, 0), 300))
        heights = {case["m"] for case in found}
        assert heights > set(HEIGHTS) and heights - set(HEIGHTS)
        assert {case["k"] % 128 == 0 for case in found} == {True, False}
        grammar = cases.grammars()[GEMM]
        assert {c.dtypes for c in found} == set(grammar.dtypes) and {c.family for c in found} == set(grammar.families)
        listed = {case.extents for case in profiles.cases(GEMM, "full")}
        assert len({case.extents for case in found} - listed) > 250

    @pytest.mark.repeats("TestReach::test_a_soak_draws_valid")
    def test_a_soak_ends(self) -> None:
        """Not before its time; a kernel that is broken on few shapes is caught by what a soak draws."""
        report = validate("tests.support.subjects.right:gemm", GEMM, profile="soak", seconds=2, limit=60)
        assert report.conforms and report.seconds >= 2 and report.judged >= 1
        tails = [str(case) for case in islice(drawn(GEMM, 0), 60) if case["k"] % 128][:3]
        report = validate("tests.support.subjects.broken:tail", GEMM, case=tails, limit=60)
        assert any(f.watch == NUMBERS and "of" in f.verdict.summary for f in report.failures)


GROUP = "per_token_group_quant_fp8/bf16-e4m3/1x128/m=5,k=384/columns=tma/family=randn/seed=1"
COLUMNS = "get_col_major_tma_aligned_tensor/f32/-/m=31,c=7,g=3/family=randn/seed=1"


@pytest.mark.turns(4)
@pytest.mark.usefixtures("in_process")
class TestEveryKindOfOutput:
    """A scalar, integers, padded columns, float64: the reference of the contract conforms to it."""

    @pytest.mark.parametrize(
        "case",
        [
            GROUP,
            COLUMNS,
            COLUMNS.replace("m=31,c=7,g=3", "m=1,c=1,g=1"),
            "get_mn_major_tma_aligned_packed_ue8m0_tensor/f32/-/m=31,c=7,g=1/family=randn/seed=1",
            "calc_diff/f32/-/m=128,k=128/family=randn/seed=1",
            "requantize_with_max_scale/e4m3/-/s=3,n=96,k=128/family=randn/seed=1",
            "moe_routing/f32/-/t=4,e=8,k=2/family=randn/seed=1",
        ],
    )
    def test_conforms(self, case: str) -> None:
        contract = case.partition("/")[0]
        report = validate(f"tests.support.subjects.references:{contract}", contract, case=case, limit=60)
        assert [f.verdict.summary for f in report.failures] == [] and report.exit_code == 0
        assert {"every element written", "rerun determinism"} <= set(report.watches())

    def test_a_product_that_quantises_by_itself(self) -> None:
        """It has no exact relations; the rest is watched."""
        contract = "dynamic_flashinfer_deepgemm_blockscale_gemm"
        case = f"{contract}/bf16xe4m3-bf16/1x128:128x128/m=3,n=128,k=256/family=randn/seed=1"
        report = validate(
            "kernels.blockscaled:dynamic_flashinfer_deepgemm_blockscale_gemm",
            contract,
            case=case,
            limit=60,
        )
        assert [f.verdict.summary for f in report.failures] == [] and report.exit_code == 0
        assert "scale doubled" not in report.watches() and "stale state" in report.watches()

    def test_another_layout_of_the_right_numbers(self) -> None:
        """Strides travel from the worker to the verdict; so does what stands in the padding."""
        name = "per_token_group_quant_fp8"
        report = validate("tests.support.subjects.broken:row_major_scales", name, case=GROUP, limit=60)
        assert any("strides (3, 1)" in f.verdict.summary for f in report.failures) and report.exit_code == 1
        report = validate(
            "tests.support.subjects.broken:unpadded_lanes", "get_col_major_tma_aligned_tensor", case=COLUMNS, limit=60
        )
        assert any("worst padding" in f.verdict.summary for f in report.failures) and report.exit_code == 1


# kernel, the fault that its output must be explained by
INTERPRETED = (
    ("drops_odd_tile", "last K block dropped"),
    ("scale_of_previous_row", "A scale of the previous row"),
    ("scale_of_next_block", "A scale of the next K block"),
)


@pytest.mark.turns(4)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
class TestInterpretedKernels:
    """A Triton kernel through Triton's interpreter: the right one conforms, each twin is caught and named."""

    SMALL = f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=5,n=64,k=384/family=randn/seed=1"
    RIGHT = (
        SMALL,
        f"{GEMM}/e4m3xe4m3-f32/1x128:128x128/m=33,n=192,k=256/family=subnormal/seed=2",
        f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=17,n=192,k=384/family=nan/seed=1",
    )

    @pytest.fixture(autouse=True)
    def interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The worker inherits it, and imports Triton after it is set."""
        monkeypatch.setenv("TRITON_INTERPRET", "1")

    def test_conforms(self) -> None:
        """Every watch met, both output dtypes, NaN codes and subnormals as well."""
        report = validate("tests.support.subjects.interpreted:gemm", GEMM, case=self.RIGHT, limit=60)
        assert [f.verdict.summary for f in report.failures] == []
        assert report.exit_code == 0 and report.judged == 3
        assert {"guard zones", "stale state", "every element written", "scale doubled"} <= set(report.watches())

    @pytest.mark.parametrize(("kernel", "fault"), INTERPRETED, ids=[c[0] for c in INTERPRETED])
    def test_caught_and_named(self, kernel: str, fault: str) -> None:
        """By its numbers, with the name of what was put in."""
        report = validate(f"tests.support.subjects.interpreted:{kernel}", GEMM, case=self.SMALL, limit=60)
        (wrong,) = [f for f in report.failures if f.watch == NUMBERS]
        assert report.exit_code == 1 and wrong.verdict.explained_by == (fault,)


class TestWrongQuestions:
    """Errors of the question are raised, not reported."""

    def test_profile_watch_and_name(self) -> None:
        """Each names what there is."""
        with pytest.raises(CaseError, match="quick, full, soak"):
            validate("a:b", GEMM, profile="slow")
        with pytest.raises(OptionError, match="batch invariance"):
            validate("a:b", GEMM, require=("speed",))
        with pytest.raises(CaseError, match="is a case of fp8_mqa_logits, and the kernel is judged as fp8_gemm_nt"):
            validate("a:b", GEMM, case=[FEW[0], str(profiles.cases("fp8_mqa_logits", "quick")[0])])
        with pytest.raises(SubjectError, match="MODULE:CALLABLE"):
            validate("not-a-name", GEMM)
        with pytest.raises(SubjectError, match="cannot be imported"):
            validate(lambda a: a, GEMM)


class TestMemory:
    """Guard zones and poison."""

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32])
    @pytest.mark.parametrize("poison", [0, 1])
    def test_poison_is_nan_and_recognised(self, dtype: torch.dtype, poison: int) -> None:
        """In every float format; the other poison is not taken for it."""
        x = guarded("x", (3, 5), dtype, "cpu", poison=poison).tensor
        assert bool(is_poison(x, poison).all()) and not bool(is_poison(x, 1 - poison).any())
        if dtype.is_floating_point:
            assert bool(torch.isnan(x.to(torch.float32)).all())

    def test_a_write_outside_is_seen_a_write_inside_is_not(self) -> None:
        """One byte before, one behind, and the whole inside."""
        for offset, words in ((GUARD - 1, "1 bytes before its start"), (-GUARD, "1 bytes behind its end")):
            x = guarded("x", (3, 5), torch.bfloat16, "cpu", poison=0)
            x.tensor.zero_()
            assert x.damage() is None
            x.buffer[offset] = 0
            assert words in (x.damage() or "")

    def test_row_padding(self) -> None:
        """A copy with padded rows has the values, and poison between them."""
        source = torch.arange(12, dtype=torch.float32).reshape(3, 4)
        x = placed("x", source, "cpu", poison=0, lead=2)
        assert torch.equal(x.tensor, source) and x.tensor.stride() == (6, 1)
        assert bool(torch.isnan(x.tensor.as_strided((3, 6), (6, 1))[:2, 4:]).all())

    def test_transposed_inputs_stay_transposed(self) -> None:
        """A column-major weight keeps its strides."""
        source = torch.arange(12, dtype=torch.float32).reshape(3, 4).t()
        assert placed("x", source, "cpu", poison=0).tensor.stride() == source.stride()

    def test_what_python_leaves_empty_is_poisoned(self) -> None:
        """torch.empty inside the mode; torch.zeros stays zero."""
        with Poisoning(0) as mode:
            x, y = torch.empty(4, 4), torch.zeros(4)
        assert bool(torch.isnan(x).all()) and bool((y == 0).all()) and len(mode.made) == 1


@pytest.mark.turns(4)
class TestCommand:
    """``fp8-oracle validate``."""

    @pytest.mark.usefixtures("in_process")
    def test_a_right_kernel(self, cli: Cli) -> None:
        """Status 0 and the word."""
        ran = cli("validate", "tests.support.subjects.right:gemm", "--contract", GEMM, "--case", FEW[0])
        assert ran.status == 0 and "CONFORMS" in ran.out

    @pytest.mark.usefixtures("in_process")
    def test_a_wrong_one(self, cli: Cli, tmp_path: Path) -> None:
        """Status 1, the failure, its explanation and its command; the report as JSON."""
        path = tmp_path / "report.json"
        ran = cli(
            *("validate", "tests.support.subjects.broken:drops_last_k"),
            *("--contract", GEMM, "--case", FEW[0], "--json", path),
        )
        assert (
            ran.status == 1 and "explained by: last element of K dropped" in ran.out and "repro: fp8-oracle" in ran.out
        )
        record = json.loads(path.read_text())
        assert record["schema"] == "fp8-oracle.validation/1" and not record["conforms"]

    @pytest.mark.usefixtures("in_process")
    def test_what_cannot_be_judged(self, cli: Cli) -> None:
        """Status 2."""
        assert cli("validate", "no_such:thing", "--contract", GEMM, "--case", FEW[0]).status == 2
