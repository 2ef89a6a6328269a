"""The pytest plugin as another project uses it (``tests/support/example_project``); negative tests of each promise."""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import oracle.cli.pytest_outcome

# Everything that a run inside this process loads must be loaded before it: pytester forgets what is new.
import oracle.diagnosis.explain
import oracle.report.console
from oracle import NonconformanceError, pytest_plugin
from oracle.errors import ContractError, InputError
from oracle.pytest_plugin import MistrustedWarning
from oracle.report import record
from oracle.routines import cases, get, profiles
from tests.support.commandline import Cli

pytest_plugins = ["pytester"]

pytestmark = pytest.mark.turns(4)

ID = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=5,n=192,k=384/family=randn/seed=1"
HEAD = """
import pytest, torch
from example_kernels import block_gemm

def run(case):
    return block_gemm(**case.inputs(), **case.call_options())
"""
HEAD_OF_IDS = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128"
TAKES = "(oracle_case, assert_conforms):"
JUDGE = "    assert_conforms(run(oracle_case), oracle_case, arch='cpu')"
ONE_CASE = f"@pytest.mark.oracle_cases('fp8_gemm_nt', cases=['{ID}'])"
SABOTAGE = {"b_scale[rows, block]": "b_scale[rows, (block + 1) % b_scale.shape[1]]"}  # scale of the next K block


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What numba imports when it first compiles something, before pytester looks at what is loaded."""
    inputs = cases.parse(ID).inputs()
    assert not oracle.judge("fp8_gemm_nt", inputs, torch.ones(5, 192).bfloat16(), arch="cpu")


@pytest.fixture
def project(pytester: pytest.Pytester, root: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """The example project in a folder of its own; PYTEST_ADDOPTS of the outer run does not reach it.

    A run in this process cannot rewrite the plugins that are imported already, and warns of it: that is no finding."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-W ignore::pytest.PytestAssertRewriteWarning")
    shutil.copytree(root / "tests" / "support" / "example_project", pytester.path, dirs_exist_ok=True)
    return pytester


def sabotage(project: pytest.Pytester) -> None:
    """Break the example project's kernel."""
    file = project.path / "example_kernels.py"
    text = file.read_text()
    for right, wrong in SABOTAGE.items():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    file.write_text(text)


def with_tests(project: pytest.Pytester, *tests: str) -> None:
    """Replace the example project's tests."""
    (project.path / "tests" / "test_block_gemm.py").write_text("\n".join([HEAD, *tests]) + "\n")


def lines(file: Path) -> list[dict[str, Any]]:
    """The outcomes in a record as they stand there; the file is a sound record from its first line to its last."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["kind"] for line in found] == ["run", *["outcome"] * (len(found) - 2), "end"]
    assert len(record.read(file).outcomes) == len(found) - 2, "no two outcomes have one key"
    return [line["outcome"] for line in found[1:-1]]


def mistrusted(outcomes: list[dict[str, Any]]) -> int:
    return sum(outcome["verdict"]["status"] == "MISTRUSTED" for outcome in outcomes)


def collected(project: pytest.Pytester, *options: str) -> list[str]:
    result = project.runpytest_inprocess("--collect-only", "-q", *options)
    return [line for line in result.outlines if "::test_it[" in line]


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no test ran, so that a verdict which must be bad is not counted as this suite's."""
    monkeypatch.setattr(pytest_plugin, "_running", [])


class TestAnotherProject:
    """The example project as it is, and with a kernel that takes the scale of the next K block."""

    def test_right(self, project: pytest.Pytester) -> None:
        result = project.runpytest_inprocess("--oracle-report=verdicts.jsonl", "-k", "randn or zeros or our_shape")
        found = lines(project.path / "verdicts.jsonl")
        result.assert_outcomes(passed=len(found), warnings=mistrusted(found))
        assert len(found) > 8
        assert mistrusted(found) < 3
        assert not any(line["fails"] for line in found)
        result.stdout.fnmatch_lines([f"fp8-oracle: {len(found)} verdicts: *passed; verdicts.jsonl"])

    @pytest.mark.repeats("TestAnotherProject::test_the_words")
    def test_sabotaged(self, project: pytest.Pytester) -> None:
        sabotage(project)
        result = project.runpytest_inprocess("--oracle-report=verdicts.jsonl", "-k", "randn or our_shape")
        failed = [line for line in lines(project.path / "verdicts.jsonl") if line["fails"]]
        # K = 128 is one block: there is no next one, and the kernel is right.
        result.assert_outcomes(failed=len(failed), passed=1)
        assert len(failed) >= 8
        for line in failed:
            assert line["verdict"]["status"] == "FAILED"
            assert line["verdict"]["outside"] > 0
            assert shlex.split(line["repro"]) == ["pytest", line["test"]]
            assert line["test"].startswith(line["subject"].partition("[")[0])

    def test_the_words_of_a_failure(self, project: pytest.Pytester) -> None:
        sabotage(project)
        with_tests(project, ONE_CASE, f"def test_it{TAKES}", JUDGE)
        result = project.runpytest_inprocess()
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "E *NonconformanceError: FAILED fp8_gemm_nt/e4m3xe4m3-bf16/*/seed=1 ?*.py::test_it?",
                "E * of 960 elements outside the bound (any-order float32 bound); worst out?*, admissible ?*",
                "E *repro: pytest 'tests/test_block_gemm.py::test_it?fp8_gemm_nt/*'",
                "fp8-oracle: 1 verdict: 1 failed",
            ]
        )
        text = result.stdout.str()
        assert "pytest_plugin.py" not in text.partition("short test summary")[0], "our own frames are hidden"

    @pytest.mark.usefixtures("outside")
    def test_the_words_are_those_of_the_command_line(self, cli: Cli, tmp_path: Path) -> None:
        inputs = cases.parse(ID).inputs()
        wrong = torch.zeros(5, 192, dtype=torch.bfloat16)
        with pytest.raises(NonconformanceError) as failure:
            pytest_plugin.assert_conforms(wrong, "fp8_gemm_nt", inputs, arch="cpu")
        save_file({**inputs, "out": wrong}, tmp_path / "x.safetensors")
        ran = cli("judge", tmp_path / "x.safetensors", "--contract", "fp8_gemm_nt", "--arch", "cpu")
        assert ran.status == 1
        assert failure.value.verdict.summary in ran.out
        assert failure.value.verdict.summary in str(failure.value)


class TestCasesByMarker:
    """``oracle_cases`` gives cases by profile, by id and by predicate; every mistake is one sentence, none a skip."""

    def test_profile_and_where(self, project: pytest.Pytester) -> None:
        body = f"def test_it{TAKES}\n{JUDGE}"
        marker = "@pytest.mark.oracle_cases('fp8_gemm_nt', {}where=lambda case: case.family == 'zeros')"
        with_tests(project, marker.format(""), body)
        quick, full = collected(project), collected(project, "--oracle-profile=full")
        with_tests(project, marker.format("profile='quick', "), body)
        assert quick
        assert set(quick) < set(full)
        assert collected(project, "--oracle-profile=full") == quick, "a profile that a marker names is not overruled"

    def test_markers_add_up_without_repeating(self, project: pytest.Pytester) -> None:
        other = ID.replace("seed=1", "seed=2")
        with_tests(
            project,
            ONE_CASE,
            f"@pytest.mark.oracle_cases('fp8_gemm_nt', cases=['{other}', '{ID}'])",
            f"def test_it{TAKES}",
            JUDGE,
        )
        project.runpytest_inprocess().assert_outcomes(passed=2)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize(
        ("marker", "said"),
        [
            ("@pytest.mark.oracle_cases('fp9_gemm')", "no contract 'fp9_gemm'"),
            ("@pytest.mark.oracle_cases('fp8_gemm_nt', profile='huge')", "no profile 'huge'"),
            ("@pytest.mark.oracle_cases('fp8_gemm_nt', cases=['nonsense'])", "'nonsense' has 1 part;"),
            ("@pytest.mark.oracle_cases('cutlass_scaled_mm', cases=['" + ID + "'])", "is no case of cutlass_scaled_mm"),
            ("@pytest.mark.oracle_cases('fp8_gemm_nt', where=lambda case: False)", "`where` is true for none of the"),
            ("@pytest.mark.oracle_cases('fp8_gemm_nt', size=3)", "unexpected keyword argument 'size'"),
            ("@pytest.mark.oracle_cases()", "missing 1 required positional argument: 'contract'"),
        ],
    )
    def test_a_wrong_marker_stops_the_collection(self, project: pytest.Pytester, marker: str, said: str) -> None:
        with_tests(project, marker, "def test_it(oracle_case): pass")
        result = project.runpytest_inprocess("-q")
        result.assert_outcomes(errors=1)
        assert said in result.stdout.str()
        assert "Traceback" not in result.stdout.str()

    def test_a_marked_test_must_take_the_case(self, project: pytest.Pytester) -> None:
        with_tests(project, ONE_CASE, "def test_it(): pass")
        result = project.runpytest_inprocess("-q")
        result.assert_outcomes(errors=1)
        assert "test_it is marked oracle_cases but takes no oracle_case" in result.stdout.str()

    def test_the_case_needs_a_marker(self, project: pytest.Pytester) -> None:
        with_tests(project, "def test_it(oracle_case): pass")
        result = project.runpytest_inprocess("-q")
        result.assert_outcomes(errors=1)
        assert "add @pytest.mark.oracle_cases(" in result.stdout.str()

    def test_a_test_that_judges_nothing_fails(self, project: pytest.Pytester) -> None:
        """An untried case is no pass; a test that skips itself or is expected to fail keeps that outcome."""
        with_tests(
            project,
            ONE_CASE,
            "def test_forgot(oracle_case): run(oracle_case)",
            ONE_CASE,
            "def test_skips(oracle_case): pytest.skip('no device')",
        )
        result = project.runpytest_inprocess("-q")
        result.assert_outcomes(failed=1, skipped=1)
        assert "UNTESTED: test_forgot" in result.stdout.str()

    def test_an_unknown_profile_is_a_usage_error(self, project: pytest.Pytester) -> None:
        result = project.runpytest_inprocess("--oracle-profile=huge")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "--oracle-profile huge: there are: brief, quick, full" in result.stderr.str()

    def test_documented(self, project: pytest.Pytester) -> None:
        assert "@pytest.mark.oracle_cases(contract, *," in project.runpytest_inprocess("--markers").stdout.str()
        listed = project.runpytest_inprocess("--fixtures", "tests").stdout.str()
        assert "judge one output" in listed
        assert "One case of the contract" in listed


class TestParameters:
    """A case and the other parameters of a test are told apart."""

    TESTS = (
        "@pytest.mark.parametrize('backend', ['eager', 'fast-er'])",
        ONE_CASE,
        f"def test_it{TAKES[:-2]}, backend):",
        "    out = run(oracle_case)",
        "    assert_conforms(out * 2 if backend == 'eager' else out, oracle_case, arch='cpu')",
        "@pytest.mark.parametrize('backend', ['eager', 'fast-er'])",
        "@pytest.mark.parametrize('m', [3, 4])",
        "def test_plain(assert_conforms, m, backend):",
        "    from oracle.routines import cases",
        f"    case = cases.parse('{ID}'.replace('m=5', f'm={{m}}'))",
        "    assert_conforms(run(case), 'fp8_gemm_nt', case.inputs(), arch='cpu')",
    )

    def test_subjects_and_pairs(self, project: pytest.Pytester, cli: Cli) -> None:
        """A row of the table for each subject, and `compare --pair` puts two of them beside each other."""
        with_tests(project, *self.TESTS)
        project.runpytest_inprocess("--oracle-report=v.jsonl").assert_outcomes(passed=5, failed=1)
        path, test = project.path / "v.jsonl", "tests/test_block_gemm.py::test_"
        plain = [f"{test}plain[{m}-{backend}]" for m in (3, 4) for backend in ("eager", "fast-er")]
        assert [line["subject"] for line in lines(path)] == [f"{test}it[eager]", f"{test}it[fast-er]", *plain]
        shown = cli("report", path).out
        assert all(subject in shown for subject in plain)
        pairs = [f"{test}it[{a}]={test}it[{b}]" for a, b in (("eager", "fast-er"), ("fast-er", "eager"))]
        for pair, said in zip(pairs, ("healed (1)", "broke (1)"), strict=True):
            assert said in cli("compare", path, path, "--pair", pair).out
        same = cli("compare", path, path, "--pair", f"{plain[0]}={plain[2]}")
        assert same.out.splitlines()[-1] == "OK  1 the same"

    def test_k_takes_the_ids(self, project: pytest.Pytester) -> None:
        """As a whole and in parts."""
        with_tests(project, ONE_CASE, f"def test_it{TAKES}", JUDGE)
        (found,) = collected(project, "-k", ID.translate(str.maketrans("=,", ":-")))
        assert found.endswith(f"::test_it[{HEAD_OF_IDS}/m:5-n:192-k:384/family:randn/seed:1]")
        assert collected(project, "-k", "m:5-n:192 and family:randn and not seed:2") == [found]
        assert collected(project, "-k", "family:ties") == []

    def test_every_id(self) -> None:
        """Of every contract: no two alike, and `-k` parses each."""
        for contract in cases.grammars():
            found = profiles.cases(contract, "quick")
            ids = {pytest_plugin._id(case) for case in found}
            assert len(ids) == len({*map(str, found)})
            assert all(re.fullmatch(r"(:?\w|:|\+|-|\.|\[|\]|\\|/)+", name) for name in ids)

    def test_the_command_runs_the_test(self, project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        """From the folder where pytest was started, with the profile that has the case."""
        with_tests(
            project,
            "@pytest.mark.oracle_cases('fp8_gemm_nt', where=lambda case: case['m'] == 16 and "
            "case['n'] == 64 and case.family == 'randn')",
            f"def test_it{TAKES}",
            "    assert_conforms(run(oracle_case) * 1.5, oracle_case, arch='cpu')",
        )
        monkeypatch.chdir(project.path / "tests")
        asked = ("--oracle-profile=full", "--oracle-explain=off")
        project.runpytest_inprocess("--oracle-report=v.jsonl", *asked, "--rootdir=..")
        (first, *_) = lines(project.path / "tests" / "v.jsonl")
        words = shlex.split(first["repro"])
        assert words[1].startswith("test_block_gemm.py::test_it[") and words[2] == "--oracle-profile=full"
        again = project.runpytest_inprocess(*words[1:], "--oracle-report=w.jsonl", asked[1], "--rootdir=..")
        again.assert_outcomes(failed=1)
        (repeated,) = lines(project.path / "tests" / "w.jsonl")
        assert {**repeated, "seconds": 0} == {**first, "seconds": 0}


class TestVerdicts:
    """What assert_conforms makes of each status."""

    MISTRUSTED = """
def test_it(assert_conforms):
    inputs = {"a": torch.ones(4, 256).to(torch.float8_e4m3fn), "b": torch.ones(128, 256).to(torch.float8_e4m3fn)}
    inputs |= {"a_scale": torch.ones(4, 2), "b_scale": torch.ones(1, 2)}
    out = block_gemm(**inputs, out_dtype=torch.bfloat16)
    assert assert_conforms(out, "fp8_gemm_nt", inputs, arch="cpu").status == "MISTRUSTED"
"""

    def test_mistrusted_warns(self, project: pytest.Pytester) -> None:
        with_tests(project, self.MISTRUSTED)
        result = project.runpytest_inprocess("--oracle-report=v.jsonl")
        result.assert_outcomes(passed=1, warnings=1)
        result.stdout.fnmatch_lines(
            [
                "*test_block_gemm.py:*: MistrustedWarning: MISTRUSTED fp8_gemm_nt *",
                "*but this proves little: all values of a_scale are equal, so a wrong scale index changes nothing",
                "fp8-oracle: 1 verdict: 1 mistrusted; v.jsonl",
            ]
        )
        (line,) = lines(project.path / "v.jsonl")
        assert line["verdict"]["status"] == "MISTRUSTED"

    def test_mistrusted_as_a_failure(self, project: pytest.Pytester) -> None:
        with_tests(project, self.MISTRUSTED)
        result = project.runpytest_inprocess("-W", "error::oracle.pytest_plugin.MistrustedWarning")
        result.assert_outcomes(failed=1)

    def test_an_expected_failure_is_named(self, project: pytest.Pytester) -> None:
        """xfail with ``raises`` accepts a wrong output only; an error in the question stays an error."""
        with_tests(
            project,
            "from oracle import NonconformanceError",
            "known = pytest.mark.xfail(raises=NonconformanceError, strict=True, reason='one too much')",
            ONE_CASE,
            "@known",
            f"def test_wrong{TAKES}",
            "    assert_conforms(run(oracle_case) + 1, oracle_case, arch='cpu')",
            ONE_CASE,
            "@known",
            f"def test_right{TAKES}",
            JUDGE,
            ONE_CASE,
            "@known",
            f"def test_no_such_option{TAKES}",
            "    assert_conforms(run(oracle_case), oracle_case, arch='cpu', speed=9)",
        )
        result = project.runpytest_inprocess("-q", "--oracle-report=v.jsonl")
        result.assert_outcomes(xfailed=1, failed=2)
        assert "fp8_gemm_nt has no option 'speed'" in result.stdout.str()
        result.stdout.fnmatch_lines(["fp8-oracle: 2 verdicts: 1 known, 1 passed; v.jsonl"])
        wrong, right = lines(project.path / "v.jsonl")
        assert (wrong["known_failure"], wrong["fails"], wrong["verdict"]["status"]) == ("one too much", False, "FAILED")
        assert right["known_failure"] is None

    @pytest.mark.usefixtures("outside")
    def test_an_output_that_cannot_be_judged_fails(self) -> None:
        case = cases.parse(ID)
        with pytest.raises(NonconformanceError, match="CRASHED: the output cannot be judged: out has shape"):
            pytest_plugin.assert_conforms(torch.zeros(4, 192, dtype=torch.bfloat16), case, arch="cpu")

    @pytest.mark.usefixtures("outside")
    def test_nan_fails(self) -> None:
        case = cases.parse(ID)
        with pytest.raises(NonconformanceError, match="960 of 960 elements outside"):
            pytest_plugin.assert_conforms(torch.full((5, 192), torch.nan, dtype=torch.bfloat16), case, arch="cpu")

    @pytest.mark.usefixtures("outside")
    def test_a_kernel_that_overwrites_its_operands_is_judged_by_what_it_was_given(self) -> None:
        case = cases.parse(ID)
        inputs = case.inputs()
        inputs["a_scale"].mul_(2)
        doubled = oracle.reference("fp8_gemm_nt", inputs, out_dtype=torch.bfloat16)
        assert isinstance(doubled, torch.Tensor)
        pytest_plugin.assert_conforms(doubled, case, inputs, arch="cpu")
        with pytest.raises(NonconformanceError):
            pytest_plugin.assert_conforms(doubled, case, arch="cpu")

    @pytest.mark.usefixtures("outside")
    def test_several_outputs(self) -> None:
        case = cases.parse("per_token_cast_to_fp8/bf16-e4m3/1x128/m=3,k=384/family=randn/seed=1")
        made = oracle.reference(case.contract, case.inputs(), **case.call_options())
        assert isinstance(made, dict)
        pytest_plugin.assert_conforms(made, case, arch="cpu")
        with pytest.raises(NonconformanceError):
            pytest_plugin.assert_conforms({**made, "scale": made["scale"] * 2}, case, arch="cpu")

    def test_a_wrong_question_is_an_error(self) -> None:
        out = torch.zeros(5, 192, dtype=torch.bfloat16)
        with pytest.raises(ContractError, match="no contract 'fp9'"):
            pytest_plugin.assert_conforms(out, "fp9", {}, arch="cpu")
        with pytest.raises(InputError, match="pass a mapping with a, a_scale, b, b_scale"):
            pytest_plugin.assert_conforms(out, "fp8_gemm_nt", arch="cpu")

    @pytest.mark.usefixtures("outside")
    def test_outside_a_test(self) -> None:
        """The same words and the same warning in a script; nothing to repeat is promised."""
        case = cases.parse(ID)
        right = oracle.reference(case.contract, case.inputs(), out_dtype=torch.bfloat16)
        assert isinstance(right, torch.Tensor)
        assert pytest_plugin.assert_conforms(right, case, arch="cpu").status == "PASSED"
        with pytest.raises(NonconformanceError) as failure:
            pytest_plugin.assert_conforms(right + 1, case, arch="cpu")
        assert "repro" not in str(failure.value)
        with pytest.warns(MistrustedWarning):
            pytest_plugin.assert_conforms(
                torch.full((1, 1), 256.0, dtype=torch.bfloat16),
                "fp8_gemm_nt",
                {
                    "a": torch.ones(1, 256).to(torch.float8_e4m3fn),
                    "a_scale": torch.ones(1, 2),
                    "b": torch.ones(1, 256).to(torch.float8_e4m3fn),
                    "b_scale": torch.ones(1, 2),
                },
                arch="cpu",
            )


class TestReport:
    """One line for each verdict, written as tests end, by one process."""

    TWO = (
        ONE_CASE,
        f"def test_right{TAKES}",
        JUDGE,
        ONE_CASE,
        f"def test_wrong{TAKES}",
        "    assert_conforms(run(oracle_case) * 1.5, oracle_case, arch='cpu')",
    )

    @pytest.mark.repeats("TestReport")
    def test_xdist(self, project: pytest.Pytester) -> None:
        """Workers send, the controller writes: the lines are those of a run in one process."""
        with_tests(project, *self.TWO)
        one = project.runpytest_inprocess("--oracle-report=one.jsonl")
        two = project.runpytest_subprocess("--oracle-report=two.jsonl", "-n2")
        for result in (one, two):
            result.assert_outcomes(passed=1, failed=1)
            result.stdout.fnmatch_lines(["fp8-oracle: 2 verdicts: 1 failed, 1 passed; *.jsonl"])
        found = [lines(project.path / name) for name in ("one.jsonl", "two.jsonl")]
        for line in (line for run in found for line in run):
            line.pop("seconds")
        assert sorted(found[0], key=str) == sorted(found[1], key=str)

    def test_a_test_that_ends_its_worker(self, project: pytest.Pytester) -> None:
        """Its verdict is lost with the process: the record says so, and is not OK."""
        with_tests(project, "import os", ONE_CASE, f"def test_right{TAKES}", JUDGE, "def test_dies(): os._exit(3)")
        project.runpytest_subprocess("--oracle-report=v.jsonl", "-n1").assert_outcomes(passed=1, failed=1)
        report, _ = record.read_report(project.path / "v.jsonl")
        assert not report.ok and not report.failures
        assert "test_dies ended the process that ran it" in report.problems[0]

    def test_several_verdicts_of_one_test(self, project: pytest.Pytester) -> None:
        """Each is an outcome of its own, and its repro command, read back, is the test's."""
        with_tests(project, ONE_CASE, f"def test_it{TAKES}", JUDGE, JUDGE)
        project.runpytest_inprocess("--oracle-report=v.jsonl").assert_outcomes(passed=1)
        first, second = lines(project.path / "v.jsonl")
        assert second["id"] == first["id"] + "#2"
        report, notes = record.read_report(project.path / "v.jsonl")
        assert [shlex.split(outcome.repro) for outcome in report.outcomes] == 2 * [["pytest", first["test"]]]
        assert report.ok
        assert not notes

    def test_a_run_that_is_interrupted_keeps_what_it_had(self, project: pytest.Pytester) -> None:
        with_tests(project, *self.TWO[:3], "def test_stop(): raise KeyboardInterrupt", *self.TWO[3:])
        project.runpytest_inprocess("--oracle-report=v.jsonl", no_reraise_ctrlc=True)
        assert [line["fails"] for line in lines(project.path / "v.jsonl")] == [False]

    def test_a_file_that_cannot_be_written(self, project: pytest.Pytester) -> None:
        result = project.runpytest_inprocess("--oracle-report=no/such/folder/v.jsonl")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "--oracle-report no/such/folder/v.jsonl: cannot be written" in result.stderr.str()

    def test_a_full_disk(self, project: pytest.Pytester) -> None:
        """One sentence, and no pass: what was asked for is not there."""
        with_tests(project, ONE_CASE, f"def test_right{TAKES}", JUDGE)
        result = project.runpytest_inprocess("--oracle-report=/dev/full")
        result.assert_outcomes(passed=1)
        said = "fp8-oracle: --oracle-report /dev/full cannot be written (No space left on device); /dev/full lacks *"
        result.stdout.fnmatch_lines(["fp8-oracle: 1 verdict: 1 passed", said])
        assert result.ret == pytest.ExitCode.TESTS_FAILED and "INTERNALERROR" not in result.stdout.str()

    def test_two_runs_do_not_share_a_file(self, project: pytest.Pytester) -> None:
        with open(project.path / "v.jsonl", "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            held.write("its first line\n")
            result = project.runpytest_inprocess("--oracle-report=v.jsonl")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "--oracle-report v.jsonl: another run is writing it" in result.stderr.str()
        assert (project.path / "v.jsonl").read_text() == "its first line\n"

    def test_sigterm(self, project: pytest.Pytester) -> None:
        """Ends the run as an interrupt: the closing line, and a whole record that says what did not run."""
        stop = "def test_stop(): os.kill(os.getpid(), signal.SIGTERM)"
        with_tests(project, "import os, signal", *self.TWO[:3], stop, *self.TWO[3:])
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            result = project.runpytest_inprocess("--oracle-report=v.jsonl", no_reraise_ctrlc=True)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert result.ret == pytest.ExitCode.INTERRUPTED
        result.stdout.fnmatch_lines(["fp8-oracle: 1 verdict: 1 passed; v.jsonl"])
        assert [line["fails"] for line in lines(project.path / "v.jsonl")] == [False]
        found = record.read(project.path / "v.jsonl").report()
        assert found.unfinished == 1 and not found.ok

    def test_silent_where_nothing_is_judged(self, project: pytest.Pytester) -> None:
        with_tests(project, "def test_other(): pass")
        result = project.runpytest_inprocess()
        result.assert_outcomes(passed=1)
        assert "verdicts" not in result.stdout.str()


class TestStartUp:
    """Every project that has the package installed imports the plugin; most of them never judge anything."""

    def test_the_plugin_is_registered_and_loads_nothing_heavy(self, tmp_path: Path) -> None:
        (tmp_path / "test_a.py").write_text(
            "import sys\n\ndef test_a(pytestconfig):\n"
            "    assert pytestconfig.pluginmanager.hasplugin('fp8_oracle')\n"
            "    heavy = [m for m in ('torch', 'numpy', 'numba', 'rich', 'oracle.api') if m in sys.modules]\n"
            "    assert not heavy\n"
        )
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_a.py"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout

    def test_the_package_offers_its_names_all_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in oracle.__all__:
            if name in oracle._HOME:
                monkeypatch.delattr(oracle, name, raising=False)
            assert getattr(oracle, name) is vars(oracle)[name]
        assert oracle.contracts()["fp8_gemm_nt"] is get("fp8_gemm_nt")
        assert oracle.contracts is oracle.api.contracts
        with pytest.raises(AttributeError, match="module 'oracle' has no attribute 'nothing'"):
            _ = oracle.nothing


class TestWhatIsMeant:
    """A call that leaves out an option, or has its arguments in the other order, is told what is meant."""

    CASE = cases.parse("fp8_gemm_nt/e4m3xe4m3-f32/1x128:128x128/m=3,n=24,k=272/family=codes/seed=5")

    @staticmethod
    def kernel(*, out_dtype: torch.dtype = torch.bfloat16, **inputs: torch.Tensor) -> torch.Tensor:
        out = oracle.reference("fp8_gemm_nt", inputs, out_dtype=out_dtype)
        assert isinstance(out, torch.Tensor)
        return out.to(out_dtype)

    def test_a_case_calls_the_kernel_with_every_option(self) -> None:
        assert pytest_plugin.assert_conforms(self.CASE.call(self.kernel), self.CASE, arch="cpu")

    def test_an_option_left_out_is_named(self) -> None:
        with pytest.raises(NonconformanceError, match=r"out_dtype=float32: oracle_case\.call\(kernel\)"):
            pytest_plugin.assert_conforms(self.kernel(**self.CASE.inputs()), self.CASE, arch="cpu")

    def test_the_other_order(self) -> None:
        inputs = self.CASE.inputs()
        out: Any = self.kernel(**inputs)
        with pytest.raises(InputError, match="takes the output first"):
            pytest_plugin.assert_conforms("fp8_gemm_nt", inputs, out, arch="cpu")  # type: ignore[arg-type]
        with pytest.raises(InputError, match="takes the contract first"):
            oracle.assert_conforms(out, "fp8_gemm_nt", inputs, arch="cpu")  # type: ignore[arg-type]

    def test_a_name_that_does_not_exist(self) -> None:
        assert callable(oracle.diagnose)
        with pytest.raises(AttributeError, match="did you mean 'judge'"):
            _ = oracle.judg  # type: ignore[attr-defined]
