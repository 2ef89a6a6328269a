"""The command line: exit status, one line for a user's mistake, reports, and the ledger."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import Tensor

import oracle
from oracle.cli import parser
from oracle.fixtures import files as fixtures
from oracle.numbers import recipe_table
from oracle.numbers.quantize import quantize
from oracle.report import ledger, outcome
from oracle.report.files import to_junit
from oracle.report.outcome import Outcome, Report
from oracle.routines import cases, get, registered
from oracle.verdict.compare import Status, Verdict
from tests.support.commandline import CASE, Cli, only_case, provide

ROW_MAJOR = "captures/h200_dense_m16_n128_k512/out.flashinfer.w8a8_rowmajor_scale"
DEEP_GEMM = "captures/h200_dense_m16_n128_k512/out.deep_gemm.fp8_gemm_nt"


# --- judge --------------------------------------------------------------------------------------------------


@pytest.fixture
def call() -> dict[str, Tensor]:
    """A right call of fp8_gemm_nt with its output."""
    inputs = cases.parse(CASE).inputs()
    return inputs | {"out": oracle.predict("fp8_gemm_nt", inputs, numerics="sm90.promote128")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "call.safetensors"


@pytest.mark.turns(4)
@pytest.mark.replay_sm90
class TestJudge:
    """Recorded outputs: 0 admissible, 1 not, 2 the file cannot be judged."""

    def test_right(self, call: dict[str, Tensor], file: Path, cli: Cli) -> None:
        fixtures.write_tensors(file, call)
        ran = cli("judge", file, "--contract", "fp8_gemm_nt")
        assert (ran.status, ran.err) == (0, "")
        assert "PASSED out: all 1280 elements equal the bits of sm90.promote128" in ran.out

    def test_wrong(self, call: dict[str, Tensor], file: Path, cli: Cli) -> None:
        """Row 3 alone has negative codes of A, and the kernel lost them: the first hypotheses name that fault."""
        positive = (call["a"].view(torch.uint8) & 0x7F).view(call["a"].dtype)
        inputs = {name: tensor for name, tensor in call.items() if name != "out"}
        inputs["a"] = torch.cat([positive[:3], call["a"][3:4], positive[4:]])
        right = oracle.predict("fp8_gemm_nt", inputs, numerics="sm90.promote128")
        mine = oracle.predict("fp8_gemm_nt", inputs | {"a": positive}, numerics="sm90.promote128")
        assert isinstance(right, Tensor) and isinstance(mine, Tensor)
        fixtures.write_tensors(file, inputs | {"out": right, "out.mine": mine})
        ran = cli("judge", file, "--contract", "fp8_gemm_nt", "--json", "-")
        record = json.loads(ran.out)
        assert ran.status == 1
        assert record["schema"] == "fp8-oracle.judgement/1"
        assert record["ok"] is False
        assert {name: v["status"] for name, v in record["outputs"].items()} == {"out": "PASSED", "out.mine": "FAILED"}
        assert "the rectangle of row 3 and columns" in record["outputs"]["out.mine"]["summary"]
        assert record["outputs"]["out.mine"]["explained_by"] == ["sign of A lost"]
        assert cli("judge", file, "--contract", "fp8_gemm_nt", "--output", "out").status == 0

    def test_a_declared_recipe(self, file: Path, cli: Cli) -> None:
        """Another library's recipe is named with the option that declares it, and is right by its own."""
        x = torch.zeros(2, 256, dtype=torch.bfloat16)
        x[0, :5], x[1] = 3.0, torch.arange(256) / 7
        made = quantize(x, recipe_table.get("lmdeploy_1x128"))
        fixtures.write_tensors(file, {"x": x, "out.q": made.codes, "out.scale": made.scale})
        asked = ("judge", file, "--contract", "per_token_group_quant_fp8")
        undeclared = cli(*asked)
        assert undeclared.status == 1 and "--recipe lmdeploy_1x128" in undeclared.out
        assert cli(*asked, "--recipe", "lmdeploy_1x128").status == 0
        for wrong, said in (
            (("--recipe", "lmdeploy"), "no recipe 'lmdeploy'"),
            (("--recipe", "lmdeploy_1x128", "--numerics", "vllm_group"), "a quantiser declares one of them"),
            (("--recipe", "vllm_tensor"), "recipe vllm_tensor has MxK"),
        ):
            ran = cli(*asked, *wrong)
            assert ran.status == 2 and said in ran.err and ran.err.count("\n") == 1
        ran = cli("judge", file, "--contract", "moe_fp8", "--recipe", "vllm_group")
        assert ran.status == 2

    def test_a_recipe_of_a_product(self, call: dict[str, Tensor], file: Path, cli: Cli) -> None:
        fixtures.write_tensors(file, call)
        ran = cli("judge", file, "--contract", "fp8_gemm_nt", "--recipe", "vllm_group")
        assert ran.status == 2 and "fp8_gemm_nt publishes no codes and scale" in ran.err

    def test_other_names(self, call: dict[str, Tensor], file: Path, cli: Cli) -> None:
        fixtures.write_tensors(file, {"x": call.pop("a"), "y": call.pop("b").view(torch.uint8).T.contiguous(), **call})
        ran = cli("judge", file, "--contract", "fp8_gemm_nt")
        assert ran.status == 2
        assert "--input a=TENSOR" in ran.err
        fixtures.write_tensors(file, fixtures.read_tensors(file) | {"y": cases.parse(CASE).inputs()["b"]})
        assert cli("judge", file, "--contract", "fp8_gemm_nt", "--input", "a=x", "--input", "b=y").status == 0

    def test_reports_of_one_file(self, call: dict[str, Tensor], file: Path, cli: Cli, tmp_path: Path) -> None:
        """Every report and a record, with a command that repeats the wrong output alone; the right one beside it."""
        fixtures.write_tensors(file, {"x": call.pop("a"), **call, "out.zero": call["out"] * 0})
        asked = ("judge", file, "--contract", "fp8_gemm_nt", "--arch", "sm90", "--input", "a=x")
        forms = ("html", "junit", "markdown", "sarif", "annotations", "record")
        words = [word for form in forms for word in (f"--{form}", tmp_path / form)]
        assert cli(*asked, *words).status == 1
        assert all((tmp_path / form).stat().st_size for form in forms)
        said = (tmp_path / "junit").read_text()
        assert (
            "--contract fp8_gemm_nt --arch sm90 --output out.zero --input a=x" in said and said.count("<failure") == 1
        )
        assert cli(*asked, "--output", "out", "--html", tmp_path / "right").status == 0
        assert "out.zero" not in (tmp_path / "right").read_text()

    def test_transposed_weight(self, file: Path, cli: Cli, fixtures_folder: Path) -> None:
        ran = cli(
            "judge",
            fixtures_folder / "captures" / "h200_dense_m16_n128_k512.safetensors",
            *("--contract", "torch_per_tensor_w8a8_scaled_mm", "--output", "out.torch*unit_fast_*"),
            *("--input", "qinput=a", "--input", "weight=b.T", "--input", "scale_a=unit_scale"),
            *("--input", "scale_b=unit_scale", "--numerics", "sm90.chain"),
        )
        assert ran.status == 0, ran.err
        assert ran.out.count("PASSED") == 3

    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (lambda t: {"a": t["a"].to(torch.float32)}, "a has dtype torch.float32"),
            (lambda t: {"a_scale": t["a_scale"].to(torch.float64)}, "a_scale has dtype torch.float64"),
            (lambda t: {"a": t["a"].reshape(-1)}, "a has rank 1"),
            (lambda t: {"a": t["a"][:, :128]}, "K=256 in axis 1, but K=128"),
            (lambda t: {"a": t["a"][:0]}, "a is empty (shape [0, 256])"),
            (lambda t: {"a_scale": t["a_scale"][:, :1]}, "a_scale has extent 1"),
            (lambda t: {"a_scale": t["a_scale"].T}, "a_scale"),
            (lambda t: {"b_scale": t["b_scale"][:1]}, "b_scale has extent 1 in axis 0"),
            (lambda t: {"out": t["out"][:, :-1]}, "out has shape [5, 255]"),
            (lambda t: {"out": t["out"].to(torch.float64)}, "out has dtype torch.float64"),
            (lambda t: {"out": t["out"][:0]}, "out has shape [0, 256]"),
        ],
    )
    def test_a_wrong_call_is_one_line(
        self, call: dict[str, Tensor], file: Path, cli: Cli, spoil: object, said: str
    ) -> None:
        assert callable(spoil)
        fixtures.write_tensors(file, call | spoil(call))
        ran = cli("judge", file, "--contract", "fp8_gemm_nt")
        assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert said in ran.err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--contract", "fp9"], "no contract 'fp9'"),
            (["--contract", "fp8_gemm_nt", "--numerics", "sm90.magic"], "sm90.magic"),
            (["--contract", "fp8_gemm_nt", "--arch", "sm42"], "sm42"),
            (["--contract", "fp8_gemm_nt", "--option", "out_dtype=int4"], "int4"),
            (["--contract", "fp8_gemm_nt", "--option", "speed=9"], "no option 'speed'"),
            (["--contract", "fp8_gemm_nt", "--option", "out_dtype"], "not of the form"),
            (["--contract", "fp8_gemm_nt", "--option", "out_dtype=float32"], "expected torch.float32"),
            (["--contract", "fp8_gemm_nt", "--input", "q=a"], "--input q="),
            (["--contract", "fp8_gemm_nt", "--input", "a=nothing"], "no tensor 'nothing'"),
            (["--contract", "fp8_gemm_nt", "--output", "out.theirs"], "no output matches"),
        ],
    )
    def test_a_wrong_question_is_one_line(
        self, call: dict[str, Tensor], file: Path, cli: Cli, arguments: list[str], said: str
    ) -> None:
        fixtures.write_tensors(file, call)
        ran = cli("judge", file, *arguments)
        assert (ran.status, ran.err.count("\n")) == (2, 1)
        assert said in ran.err

    def test_a_pickle(self, call: dict[str, Tensor], file: Path, cli: Cli) -> None:
        torch.save(call, file)
        ran = cli("judge", file, "--contract", "fp8_gemm_nt")
        assert (ran.status, ran.err.count("\n")) == (2, 1)
        assert "zip archive" in ran.err

    def test_predict_writes_what_judge_passes(
        self, call: dict[str, Tensor], file: Path, cli: Cli, tmp_path: Path
    ) -> None:
        fixtures.write_tensors(file, call)
        written = tmp_path / "predicted.safetensors"
        named = ("--contract", "fp8_gemm_nt", "--numerics", "sm90.promote128", "--write", written)
        assert cli("predict", file, *named).status == 0
        assert torch.equal(fixtures.read_tensors(written)["out"], call["out"])


# --- verify -------------------------------------------------------------------------------------------------


@pytest.mark.turns(4)
class TestVerify:
    """Every subject over the cases: 0 as it must be, 1 not, 2 the question could not be asked."""

    def run(self, cli: Cli, *arguments: object) -> tuple[int, str]:
        ran = cli("verify", "--contract", "fp8_gemm_nt", "--fixtures", "none", *arguments)
        return ran.status, ran.out + ran.err

    @pytest.mark.parametrize(
        ("subject", "status", "said"),
        [
            ("right", 0, "PASSED"),
            ("writes_its_inputs", 0, "PASSED"),
            ("refuses", 0, "UNSUPPORTED fp8_gemm_nt [refuses]: only K=256 here"),
            ("absent", 0, "SKIPPED fp8_gemm_nt [absent]: no such GPU here"),
            ("zero_row", 1, "row 0 only"),
            ("raises", 1, "CRASHED: RuntimeError: CUDA error: an illegal memory access"),
            ("wrong_shape", 1, "CRASHED: the output cannot be judged: out has shape [1, 1]"),
        ],
    )
    def test_one_subject(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, subject: str, status: int, said: str) -> None:
        provide(monkeypatch, subject)
        only_case(monkeypatch)
        found, text = self.run(cli)
        assert found == status, text
        assert said in text

    def test_a_contract_that_the_oracle_lacks_is_listed(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        provide(monkeypatch, "unknown_contract")
        only_case(monkeypatch)
        ran = cli("verify", "--fixtures", "none", "--subject", "strange")
        assert "no contract 'fp9_gemm'" in ran.out
        assert ran.status == 1, "nothing was judged"

    def test_a_provider_that_cannot_be_loaded(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        provide(monkeypatch, "broken", "right")
        only_case(monkeypatch)
        ran = cli("verify", "--fixtures", "none")
        assert ran.status == 1
        assert "half installed" in ran.out
        assert "NOT OK  1 passed" in ran.out

    def test_a_contract_that_nothing_exercises_is_untested(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        provide(monkeypatch)
        found, text = self.run(cli)
        assert found == 1
        assert "UNTESTED" in text

    def test_a_contract_outside_of_the_layer_is_skipped(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        """With its reason; alone it is no green run. The negative test: one that is dispatched is UNTESTED."""
        assert not get("merge_state").dispatched
        ran = cli("verify", "--fixtures", "none", "--contract", "merge_state")
        assert ran.status == 1 and "SKIPPED merge_state [-]: the layer does not dispatch it" in ran.out
        monkeypatch.setattr(type(get("merge_state")), "dispatched", True)
        assert "UNTESTED merge_state" in cli("verify", "--fixtures", "none", "--contract", "merge_state").out

    def test_a_skipped_subject_leaves_its_contract_untested(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        """A skip is not a pass."""
        monkeypatch.setattr("example_subjects.right", lambda: __import__("example_subjects").absent()[1:])
        provide(monkeypatch, "right")
        found, text = self.run(cli)
        assert found == 1
        assert "SKIPPED" in text
        assert "UNTESTED" in text

    def test_the_failing_row_prints_its_own_command(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """--case ID of a failing row runs that case alone, and it fails in the same words."""
        provide(monkeypatch, "zero_row", "right")
        only_case(monkeypatch)
        report = tmp_path / "report.json"
        assert self.run(cli, "--json", report)[0] == 1
        (failed,) = [o for o in json.loads(report.read_text())["outcomes"] if o["fails"]]
        assert failed["repro"] == f"fp8-oracle verify --case '{CASE}' --subject 'zero_row'"
        monkeypatch.setattr("oracle.routines.profiles.cases", lambda *_: pytest.fail("a case run needs no profile"))
        ran = cli("verify", "--case", CASE, "--subject", "zero_row", "--json", tmp_path / "again.json")
        (again,) = json.loads((tmp_path / "again.json").read_text())["outcomes"]
        assert ran.status == 1
        assert {**again, "seconds": 0} == {**failed, "seconds": 0}
        assert cli("verify", "--case", CASE, "--subject", "right").status == 0

    def test_list(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        provide(monkeypatch, "raises")
        only_case(monkeypatch)
        ran = cli("verify", "--list")
        assert ran.status == 0
        assert f"{CASE}\traises" in ran.out.splitlines()
        assert any(line.startswith(ROW_MAJOR) for line in ran.out.splitlines())

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--case", "fp8_gemm_nt/nonsense"], "2 parts"),
            (["--case", "captures/none/out"], "no capture 'captures/none/out'"),
            (["--case", CASE.replace("k=256", "k=256,q=1")], "'q'"),
            (["--contract", "fp9"], "no contract 'fp9'"),
            (["--subject", "nobody"], "no subject 'nobody'"),
            (["--fixtures", "not/there"], "no such fixtures folder"),
            (["--threads", "0"], "--threads 0"),
        ],
    )
    def test_a_wrong_question_is_one_line(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
    ) -> None:
        provide(monkeypatch, "right")
        ran = cli("verify", *arguments)
        assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert said in ran.err

    def test_argparse_mistakes_are_two_as_well(self, cli: Cli) -> None:
        assert cli("verify", "--profile", "huge").status == 2
        assert cli("frobnicate").status == 2

    def test_interrupt(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("oracle.harness.subjects.points", interrupted)
        ran = cli("verify", "--jobs", "1")
        assert (ran.status, ran.err) == (130, "fp8-oracle: interrupted\n")


# --- captures and the ledger --------------------------------------------------------------------------------


WEAK = {"captures/sm90_torch-fused_experts_channel/out.torch.fused_experts_channel-168f0ecc"}
"""Captures whose intermediate may overflow in most elements, so that a pass proves little."""


@pytest.fixture
def copy(tmp_path: Path, fixtures_folder: Path) -> Path:
    folder = tmp_path / "fixtures"
    shutil.copytree(fixtures_folder, folder)
    return folder


def entry(**change: object) -> dict[str, object]:
    known = {"id": ROW_MAJOR, "status": "FAILED", "outside": 2022, "reason": "row-major", "source": "seen"}
    return known | change


def write_ledger(folder: Path, *entries: dict[str, object]) -> None:
    fixtures.write_json(folder / ledger.FILE, {"schema": ledger.SCHEMA, "entries": list(entries)})


@pytest.mark.turns(4)
@pytest.mark.replay_sm90
class TestCapturesAndLedger:
    """Right captures pass; wrong ones stand in the ledger with their count, and the ledger cannot rot."""

    @pytest.mark.repeats("TestCapturesAndLedger::test_known")
    def test_all_captures(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Without naming the faults of the wrong ones, which doubles the time; test_diagnose.py does that."""
        provide(monkeypatch)
        monkeypatch.setattr("oracle.harness.runner.explain_verdict", lambda verdict, *_, **__: verdict)
        cli("verify", "--jobs", "1", "--json", tmp_path / "report.json")  # here, where the two lines above hold
        record = json.loads((tmp_path / "report.json").read_text())
        replayed = {o["id"]: o for o in record["outcomes"] if o["id"].startswith("captures/")}
        assert record["complaints"] == []
        assert not [name for name, o in replayed.items() if o["fails"]]
        wrong = {name: o["verdict"]["outside"] for name, o in replayed.items() if o["known_failure"]}
        wrong = {name: outside for name, outside in wrong.items() if "h200_dense" in name}
        assert set(wrong) == {name for name in replayed if name.endswith(("rowmajor_scale", "fp16_out", "bf16_bf16"))}
        for library in (
            "deep_gemm.fp8_gemm",
            "flashinfer.w8a8_colmajor",
            "flashinfer.bf16_fp8",
            "torch.",
            "vllm.cutlass",
            "deep_gemm.m_grouped",
        ):
            named = [name for name in replayed if f"/out.{library}" in name and name not in WEAK]
            assert {replayed[name]["verdict"]["status"] for name in named} == {"PASSED"}, library
        assert {replayed[name]["verdict"]["status"] for name in WEAK} == {"MISTRUSTED"}

    def test_known(self, cli: Cli) -> None:
        ran = cli("verify", "--case", ROW_MAJOR)
        assert ran.status == 0
        assert "KNOWN" in ran.out
        assert "2022 of 2048 elements outside" in ran.out

    def test_without_its_entry_it_fails(self, cli: Cli, copy: Path) -> None:
        write_ledger(copy)
        assert cli("verify", "--case", ROW_MAJOR, "--fixtures", copy).status == 1

    @pytest.mark.parametrize(
        ("change", "case", "said"),
        [
            ({"outside": 2021}, ROW_MAJOR, "has 2022 elements outside now, not 2021"),
            ({"id": DEEP_GEMM}, DEEP_GEMM, "is PASSED now, not FAILED"),
            ({"status": "CRASHED"}, ROW_MAJOR, "is FAILED now, not CRASHED"),
        ],
    )
    def test_an_entry_that_is_not_true(
        self, cli: Cli, copy: Path, change: dict[str, object], case: str, said: str
    ) -> None:
        write_ledger(copy, entry(**change))
        ran = cli("verify", "--case", case, "--fixtures", copy)
        assert ran.status == 1
        assert f"PROBLEM known failure '{entry(**change)['id']}'" in ran.out
        assert said in ran.out

    def test_an_entry_that_matches_nothing(self) -> None:
        found = Outcome(DEEP_GEMM, "fp8_gemm_nt", "deep_gemm", "sm90", Verdict(Status.PASSED, "said"))
        stale = ledger.Entry("captures/gone/*", Status.FAILED, 3, "why", "where")
        assert ledger.apply([found], [stale], whole=True)[1] == (
            "known failure 'captures/gone/*' matches nothing that was run; remove it or correct its id",
        )
        assert ledger.apply([found], [stale], whole=False)[1] == ()

    def test_a_pattern_covers_several(self) -> None:
        verdict = Verdict(Status.FAILED, "said", outside=3, total=9)
        outcomes = [Outcome(f"captures/x/out.{i}", "c", "s", "sm90", verdict) for i in range(2)]
        marked, complaints = ledger.apply(
            outcomes, [ledger.Entry("captures/x/*", Status.FAILED, 3, "why", "where")], whole=True
        )
        assert [o.known for o in marked] == ["why", "why"]
        assert complaints == ()

    @pytest.mark.parametrize(
        "change",
        [{"outside": "many"}, {"reason": ""}, {"status": "PASSED"}, {"status": "ODD"}, {"extra": 1}, {"outside": True}],
    )
    def test_a_malformed_entry(self, cli: Cli, copy: Path, change: dict[str, object]) -> None:
        write_ledger(copy, entry(**change))
        ran = cli("verify", "--case", ROW_MAJOR, "--fixtures", copy)
        assert (ran.status, ran.err.count("\n")) == (2, 1)
        assert "entry 0" in ran.err


# --- reports ------------------------------------------------------------------------------------------------


def example_report() -> Report:
    def one(name: str, status: Status, known: str | None = None) -> Outcome:
        reason = "because <&> \x00 of this" if status.needs_reason else None
        verdict = Verdict(status, f"said {status}", outside=int(status is Status.FAILED), total=9, reason=reason)
        return Outcome(f"c/{name}", "c", "s", "sm90", verdict, 0.25, known)

    outcomes = [one(str(status), status) for status in Status] + [one("known", Status.FAILED, "documented")]
    return Report(tuple(outcomes), ("an entry rots",), {"python": "3"}, 2.0)


@pytest.mark.turns(4)
class TestReports:
    """JSON and JUnit are pure functions of the report and carry every outcome."""

    def test_json(self) -> None:
        record = json.loads(json.dumps(example_report().to_json(), allow_nan=False))
        assert record["schema"] == "fp8-oracle.report/1"
        assert record["ok"] is False
        assert record["counts"] == {str(status): 1 for status in Status} | {"KNOWN": 1}
        assert set(record["outcomes"][0]) == {
            *("id", "contract", "subject", "arch", "seconds", "known_failure", "fails", "repro", "source", "verdict")
        }
        assert {o["verdict"]["status"] for o in record["outcomes"] if o["fails"]} == {"FAILED", "UNTESTED", "CRASHED"}

    def test_junit(self) -> None:
        suites = ET.fromstring(to_junit(example_report()))
        assert {key: suites.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
            **{"tests": "9", "failures": "2", "errors": "2", "skipped": "3"}
        }
        kinds = {case.get("name"): [child.tag for child in case] for case in suites.iter("testcase")}
        assert kinds["c/FAILED"] == ["failure"]
        assert kinds["c/CRASHED"] == kinds["c/UNTESTED"] == ["error"]
        assert kinds["c/SKIPPED"] == kinds["c/UNSUPPORTED"] == kinds["c/known"] == ["skipped"]
        assert kinds["c/PASSED"] == kinds["c/MISTRUSTED"] == ["system-out"]
        assert kinds["entry 0"] == ["failure"]

    def test_written_files(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        provide(monkeypatch, "right")
        only_case(monkeypatch)
        junit = tmp_path / "report.xml"
        ran = cli("verify", "--contract", "fp8_gemm_nt", "--json", "-", "--junit", junit)
        record = json.loads(ran.out)
        assert ran.status == 0
        assert record["machine"]["torch"] == torch.__version__
        assert int(ET.parse(junit).getroot().get("tests", "0")) == len(record["outcomes"])
        assert "verdicts" in ran.err, "the table goes to the standard error when JSON takes the standard output"

    def test_nothing_judged_is_not_ok(self) -> None:
        assert not Report(()).ok

    def test_severity_names_every_status(self) -> None:
        assert set(outcome.SEVERITY) == set(Status)


@pytest.mark.turns(4)
class TestOtherCommands:
    """list, doctor, plan, conformance, help."""

    @pytest.mark.parametrize("what", ["contracts", "cases", "subjects", "captures", "numerics"])
    def test_list(self, cli: Cli, what: str) -> None:
        ran = cli("list", what)
        assert ran.status == 0
        assert ran.out

    @pytest.mark.turns(4)
    def test_list_of_what_is_not_reached(self, cli: Cli) -> None:
        """An exemption is printed with its reason; without one the status is 1."""
        assert cli("list", "--reach", "--contract", "mxint8_quantize").out.splitlines() == ["0 gaps, 0 of them exempt"]
        exempt = cli("list", "--reach", "--contract", "fp8_gemm_nt_skip_head_mid")
        assert (
            exempt.status == 0 and "left=not 128 (exempt: " in exempt.out and "2 gaps, 2 of them exempt" in exempt.out
        )
        assert cli("list", "--reach", "--coverage").status == 2

    def test_list_of_a_gap(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("oracle.routines.reached.EXEMPT", {})
        assert cli("list", "--reach", "--contract", "fp8_gemm_nt_skip_head_mid").status == 1

    @pytest.mark.parametrize(
        ("what", "said"),
        [
            ("contracts", "  input a_scale [M, ceil(K/128)] scales, float32 (contiguous): logical 1x128 scales"),
            ("cases", "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=1,n=128,k=128/family=randn/seed=1"),
            ("subjects", "fp8_gemm_nt [eager, cpu] declares ieee32.any"),
            ("captures", "captures/h200_dense_m16_n128_k512/out.deep_gemm.fp8_gemm_nt\tfp8_gemm_nt\tsm90"),
        ],
    )
    def test_list_of_one_contract(self, cli: Cli, what: str, said: str) -> None:
        """And nothing of another one."""
        lines = cli("list", what, "--contract", "fp8_gemm_nt").out.splitlines()
        assert said in lines and "scaled_fp8_quant" not in str(lines)
        assert all("fp8_gemm_nt" in line for line in lines) or what == "contracts"

    @pytest.mark.parametrize("words", [("numerics",), ("--coverage",), ("contracts",)])
    def test_what_has_no_contract_is_refused(self, cli: Cli, words: tuple[str, ...]) -> None:
        ran = cli("list", *words, "--contract", "fp8_gem_nt" if words == ("contracts",) else "fp8_gemm_nt")
        assert ran.status == 2 and ("leave out --contract" in ran.err or "did you mean" in ran.err)

    def test_list_names_every_contract(self, cli: Cli) -> None:
        assert set(registered()) <= set(cli("list").out.split())

    def test_plan(self, cli: Cli) -> None:
        ran = cli("plan", "--op", "fp8_gemm_nt", "--arch", "sm90", "--m", 31, "--n", 4096, "--k", 4096)
        assert ran.status == 0, ran.err
        assert "deep_gemm" in ran.out

    def test_plan_without_a_backend(self, cli: Cli) -> None:
        ran = cli("plan", "--op", "fp8_gemm_nt", "--arch", "gfx950", "--n", 4096, "--k", 4096)
        assert (ran.status, "no backend" in ran.out, "rejected" in ran.out) == (1, True, True)

    def test_plan_of_every_routine(self, cli: Cli, tmp_path: Path) -> None:
        """A table; as JSON each backend with its reason, of a machine that a file describes, from the record back."""
        ran = cli("plan", "--arch", "sm120")
        assert ran.status == 0 and "flashinfer_b12x" in ran.out and "sm120.chain_nvf4" in ran.out
        described = tmp_path / "machine.json"
        described.write_text(json.dumps({"arch": "sm120", "torch": "2.9.0", "packages": {"triton": "3.6.0"}}))
        ran = cli("plan", "--machine", described, "--json", "-")
        record = json.loads(ran.out)
        assert ran.status == 0 and record["schema"] == "fp8-oracle.plan/1"
        taken = {row["routine"]: row for row in record["decisions"]}
        reasons = {b["name"]: b["why_not"] for b in taken["mm_mxfp8"]["backends"]}
        assert taken["mm_mxfp8"]["backend"] == "triton_mx" and "flashinfer-python" in reasons["flashinfer_cutlass"]
        described.write_text(json.dumps(record["machine"]))
        assert json.loads(cli("plan", "--machine", described, "--json", "-").out) == record

    def test_plan_of_one_problem_of_a_described_machine(self, cli: Cli, tmp_path: Path) -> None:
        described = tmp_path / "machine.json"
        described.write_text(json.dumps({"product": "GB10"}))
        ran = cli("plan", "--op", "mm_fp4", "--machine", described, "--n", 4096)
        assert ran.status == 0 and "cutlass_scaled_fp4_mm" in ran.out and "stands behind" in ran.out

    @pytest.mark.parametrize(
        "wrong",
        [
            ["--m", "3"],
            ["--arch", "sm42"],
            ["--machine", "absent.json"],
            ["--machine", "absent.json", "--arch", "sm90"],
            ["--op", "fp8_gemm_nt", "--arch", "sm90", "--json", "-"],
        ],
    )
    def test_plan_of_no_machine_is_one_line(self, cli: Cli, wrong: list[str]) -> None:
        ran = cli("plan", *wrong)
        assert (ran.status, ran.err.count("\n")) == (2, 1)

    @pytest.mark.parametrize("wrong", [["--op", "frobnicate"], ["--op", "fp8_gemm_nt", "--option", "speed=9"]])
    def test_plan_refuses_in_one_line(self, cli: Cli, wrong: list[str]) -> None:
        ran = cli("plan", *wrong)
        assert (ran.status, ran.err.count("\n")) == (2, 1)

    def test_identify(self, cli: Cli, fixtures_folder: Path) -> None:
        file = fixtures_folder / "captures" / "h200_dense_m16_n128_k512.safetensors"
        ran = cli("identify", file, "--contract", "fp8_gemm_nt", "--output", "out.deep*", "--arch", "sm90", "--top", 1)
        assert ran.status == 0, ran.err
        assert ran.out.split() == [
            "out.deep_gemm.fp8_gemm_nt",
            "100.0000%",
            "of",
            "2048",
            "elements",
            "sm90.promote128",
        ]

    @pytest.mark.usefixtures("in_process")
    def test_fingerprint(self, cli: Cli) -> None:
        ran = cli("fingerprint", "example_subjects:promoting", "--contract", "fp8_gemm_nt", "--out-dtype", "float32")
        assert ran.status == 0, ran.err
        assert "group size: 32" in ran.out
        assert "promotion every 128" in ran.out
        assert "sm90.promote128" in ran.out

    @pytest.mark.usefixtures("in_process")
    def test_fingerprint_calls_by_name(self, cli: Cli) -> None:
        """As ``validate`` does: the order of the parameters does not matter, ``out_dtype`` need not be there."""
        ran = cli("fingerprint", "example_subjects:by_name_only", "--contract", "fp8_gemm_nt", "--k", 256)
        assert ran.status == 0, ran.err
        assert "schedules that reproduce every bit: sm90.promote128\n" in ran.out

    @pytest.mark.usefixtures("in_process")
    @pytest.mark.parametrize(
        ("target", "said"),
        [
            ("nonsense", "not of the form"),
            ("no_such_module:f", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
            ("example_subjects:nothing", "has no 'nothing'"),
            ("example_subjects:throws", "raised: RuntimeError: out of order"),
            ("example_subjects:returns_none", "returned nothing"),
            ("example_subjects:other_names", "has another signature: the kernel cannot be called with"),
            ("example_subjects:constant", "the probes do not answer: element (0, 0) is 0"),
            ("example_subjects:transposed_answer", "the probes do not answer"),
        ],
    )
    def test_a_kernel_that_cannot_be_probed(self, cli: Cli, target: str, said: str) -> None:
        ran = cli("fingerprint", target, "--contract", "fp8_gemm_nt")
        assert (ran.status, ran.err.count("\n")) == (2, 1)
        assert said in ran.err

    def test_conformance_without_vectors(self, cli: Cli, tmp_path: Path) -> None:
        ran = cli("conformance", "--vectors", tmp_path)
        assert (ran.status, ran.err.count("\n")) == (2, 1)

    def test_help_of_every_command(self, cli: Cli) -> None:
        assert parser().format_help()
        commands = ("verify", "judge", "predict", "identify", "fingerprint", "doctor", "list", "fixtures")
        for command in (*commands, "conformance", "plan"):
            ran = cli(command, "--help")
            assert (ran.status, ran.err) == (0, "")
            assert "usage: fp8-oracle" in ran.out
