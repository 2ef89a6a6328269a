"""What a user mistypes, or mistakes for another file, is one line that says what was probably meant."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from oracle.errors import among, counted
from oracle.fixtures import files as fixtures
from oracle.fixtures.call_file import CallFile, write
from oracle.report import record
from oracle.report.outcome import Outcome, Report
from oracle.report.record import Run
from oracle.routines import cases
from oracle.verdict.compare import Status, Verdict
from tests.support.commandline import CASE, Cli, provide

GEMM = "fp8_gemm_nt"
KERNEL = "tests.support.subjects.right:gemm"


class TestNames:
    """``did you mean``, wherever a name is taken; a name that is like none gets no guess."""

    @pytest.mark.parametrize(
        ("arguments", "meant"),
        [
            (("validate", KERNEL, "--contract", "fp8_gem_nt"), GEMM),
            (("validate", KERNEL, "--contract", GEMM, "--case", CASE.replace("randn", "rand")), "randn"),
            (("validate", KERNEL, "--contract", GEMM, "--case", CASE.replace(GEMM, "fp8_gem_nt")), GEMM),
            (("validate", KERNEL, "--contract", GEMM, "--require", "thread"), "threads"),
            (("validate", KERNEL, "--contract", GEMM, "--profile", "quik"), "quick"),
            (("judge", "none", "--contract", "fp8_mqa_logit"), "fp8_mqa_logits"),
            (("verify", "--subject", "rihgt"), "right"),
            (("verify", "--arch", "sm9"), "sm90"),
            (("verify", "--provider", "example_subjects:rigth", "--list"), "right"),
            (("mutate", "--contract", GEMM, "--fault", "sign of A los"), "sign of A lost"),
            (("valdate", KERNEL), "validate"),
            (("list", "contrats"), "contracts"),
        ],
    )
    def test_meant(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], meant: str) -> None:
        provide(monkeypatch, "right")
        ran = cli(*arguments)
        assert ran.status == 2 and ran.out == ""
        assert "did you mean" in ran.err and f"'{meant}'" in ran.err.partition("did you mean")[2]

    @pytest.mark.parametrize(
        ("flag", "name", "meant"),
        [("--numerics", "sm90.promot128", "sm90.promote128"), ("--recipe", "lmdeploy_1x12", "lmdeploy_1x128")],
    )
    def test_numerics(self, cli: Cli, tmp_path: Path, flag: str, name: str, meant: str) -> None:
        case = cases.parse(CASE)
        fixtures.write_tensors(tmp_path / "x.safetensors", {**case.inputs(), "out": torch.zeros(5, 256).bfloat16()})
        ran = cli("judge", tmp_path / "x.safetensors", "--contract", GEMM, flag, name)
        assert ran.status == 2 and f"did you mean '{meant}'" in ran.err

    @pytest.mark.usefixtures("in_process")
    def test_a_kernel(self, cli: Cli) -> None:
        ran = cli("validate", "tests.support.subjects.right:gem", "--contract", GEMM, "--case", CASE)
        assert ran.status == 2 and "has no 'gem'; did you mean 'gemm'" in ran.out
        ran = cli("validate", "tests/support/right.py:gemm", "--contract", GEMM, "--case", CASE)
        assert ran.status == 2 and "is a file; name the module: tests.support.right:gemm" in ran.err

    def test_words(self) -> None:
        assert among("gem", ["gemm", "gemv"]) == "did you mean 'gemv' or 'gemm'? There are: gemm, gemv"
        assert among("x", ["gemm"]) == "there is: gemm" and among("x", []) == "there is none"
        many = [f"gemm{i:03}" for i in range(100)]
        assert among("x", many, see="list") == "there are 100: `list` prints them"
        assert among("gemm00", many).endswith("? There are 100")
        assert (counted(1, "case"), counted(0, "case"), counted(2, "stretch", "stretches")) == (
            "1 case",
            "0 cases",
            "2 stretches",
        )


@pytest.mark.turns(4)
class TestFiles:
    """A command that gets another file of ours says what it is and what reads it."""

    @pytest.fixture
    def ours(self, tmp_path: Path) -> dict[str, Path]:
        """A file of every kind, by a word of what it is said to be."""
        case = cases.parse(CASE)
        right = torch.zeros(5, 256, dtype=torch.bfloat16)
        failing = CallFile(GEMM, case.inputs(), right, case.call_options(), "cpu", None, KERNEL)
        outcome = Outcome(CASE, GEMM, "mine", "cpu", Verdict(Status.PASSED, "as it must be"))
        found = {name: tmp_path / name for name in ("a case", "a tensors", "a record", "a report", "a soak")}
        write(found["a case"], failing)
        fixtures.write_tensors(found["a tensors"], {"x": right})
        run = Run("2026-01-01T00:00:00+00:00", {}, {}, {}, 1)
        recorder = record.start(found["a record"], run, resume=False)
        recorder.append(record.key_of(CASE, "mine", "cpu", "", run), outcome)
        recorder.end((), 1.0, 0)
        found["a report"].write_text(json.dumps(Report((outcome,)).to_json(), indent=2))
        found["a soak"].write_text('{"kind":"soak","schema":"fp8-oracle.soak/1","kernel":"a:b"}\n')
        return found

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("judge", "a record"), "is the record of a run; `fp8-oracle report`"),
            (("judge", "a report"), "is the JSON report of a run"),
            (("explain", "a soak"), "is the record of a soak"),
            (("report", "a case"), "is a saved call; `fp8-oracle judge`"),
            (("report", "a soak"), "is the record of a soak"),
            (("compare", "a record", "a tensors"), "is a safetensors file; `fp8-oracle judge"),
            (("merge", "a case"), "is a saved call"),
            (("history", "add", "a record", "--db", "a case"), "a history is an SQLite file; name another file"),
            (("lint", "a record"), "is a file; pass the folder"),
            (("explain", "a tensors"), "does not say what was called"),
        ],
    )
    def test_said(self, cli: Cli, ours: dict[str, Path], arguments: tuple[str, ...], said: str) -> None:
        ran = cli(*(ours.get(word, word) for word in arguments))
        assert ran.status == 2 and ran.err.count("\n") == 1 and said in ran.err

    def test_what_is_damaged_is_said_to_be(self, cli: Cli, ours: dict[str, Path]) -> None:
        """A record of a later version, and a file of nobody, are no other kind of ours (the twins)."""
        ours["a record"].write_text(ours["a record"].read_text().replace("record/1", "record/2"))
        assert "schema is 'fp8-oracle.record/2'" in cli("report", ours["a record"]).err
        ours["a soak"].write_text("something else\n")
        assert "no line of a record; the file is damaged or is something else" in cli("report", ours["a soak"]).err

    def test_a_saved_case_names_its_contract(self, cli: Cli, ours: dict[str, Path]) -> None:
        """`judge` and `explain` need nothing beside the file; flags that name another call are refused."""
        judged, explained = cli("judge", ours["a case"]), cli("explain", ours["a case"])
        assert (judged.status, explained.status) == (1, 1) and "any-order float32 bound" in judged.out
        assert "--option: " in cli("judge", ours["a case"], "--option", "out_dtype=float32").err
        assert cli("judge", ours["a case"], "--arch", "sm90").out.count("residue bound of sm90") == 1

    def test_one_file_has_reports_as_a_folder_has(self, cli: Cli, ours: dict[str, Path], tmp_path: Path) -> None:
        """With every output that the file holds, and the faults that explain one."""
        page, table = tmp_path / "page.html", tmp_path / "table.xml"
        assert cli("judge", ours["a case"], "--html", page, "--junit", table).status == 1
        shown = page.read_text()
        assert "1 open problem" in shown and GEMM in shown and "outside the bound" in shown
        assert 'tests="1" failures="1"' in re.sub(r' time="[^"]*"', "", table.read_text())
