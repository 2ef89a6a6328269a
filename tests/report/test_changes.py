"""What changed between two runs, and many runs in one file."""

from __future__ import annotations

import json
import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from reports import every_status, many, outcome

from oracle.errors import FixtureError
from oracle.report import changes, history
from oracle.report.changes import Kind
from oracle.report.files import to_json
from oracle.report.history import sparkline
from oracle.report.history import to_html as history_page
from oracle.report.outcome import Outcome, Report
from oracle.verdict.compare import Status
from tests.support.commandline import Cli


def kinds(old: list[Outcome], new: list[Outcome]) -> list[Kind]:
    return [change.kind for change in changes.between(Report(tuple(old)), Report(tuple(new))).changes]


GOOD, BAD = outcome(), outcome(status=Status.FAILED)
KNOWN = outcome(status=Status.FAILED, known="documented")


class TestKinds:
    """Each pair is one kind of change, and only what broke makes the comparison fail."""

    @pytest.mark.parametrize(
        ("old", "new", "kind"),
        [
            (GOOD, GOOD, None),
            (GOOD, BAD, Kind.BROKE),
            (KNOWN, BAD, Kind.BROKE),
            (GOOD, outcome(status=Status.CRASHED), Kind.BROKE),
            (BAD, GOOD, Kind.HEALED),
            (KNOWN, GOOD, Kind.HEALED),
            (BAD, BAD, None),
            (BAD, KNOWN, Kind.FAILS_DIFFERENTLY),
            (BAD, outcome(status=Status.FAILED, outside=8), Kind.FAILS_DIFFERENTLY),
            (GOOD, outcome(status=Status.SKIPPED), Kind.LOST),
            (outcome(status=Status.UNSUPPORTED), GOOD, Kind.GAINED),
            (GOOD, outcome(matches="sm90.promote128"), Kind.NUMERICS),
            (GOOD, outcome(margin=0.5), Kind.MARGIN),
            (GOOD, outcome(status=Status.MISTRUSTED), Kind.STATUS),
            (outcome(status=Status.SKIPPED), outcome(status=Status.UNSUPPORTED), Kind.STATUS),
        ],
    )
    def test_one(self, old: Outcome, new: Outcome, kind: Kind | None) -> None:
        assert kinds([old], [new]) == ([] if kind is None else [kind])
        found = changes.between(Report((old,)), Report((new,)))
        assert found.ok == (kind is not Kind.BROKE)
        assert found.same == (kind is None)

    def test_in_one_run_only(self) -> None:
        assert kinds([GOOD], []) == [Kind.GONE]
        assert kinds([], [GOOD]) == [Kind.NEW]
        assert kinds([], [BAD]) == [Kind.NEW_FAILURE]
        assert not changes.between(Report(()), Report((BAD,))).ok

    def test_two_machines(self) -> None:
        """Outcomes of another arch meet by id and subject, but only when none of the same arch is there."""
        cpu, gpu = outcome(arch="cpu"), outcome(arch="sm90", margin=0.5)
        assert kinds([cpu], [gpu]) == [Kind.MARGIN]
        assert kinds([cpu, gpu], [gpu, cpu]) == []

    def test_two_backends(self) -> None:
        eager, fast = outcome(subject="eager"), outcome(subject="fast", margin=0.5)
        both = Report((eager, fast))
        found = changes.between(both, both, renamed={"eager": "fast"})
        assert [(c.kind, c.words) for c in found.changes] == [(Kind.MARGIN, "margin 0.25 -> 0.5")]

    def test_a_new_complaint_breaks(self) -> None:
        old, new = Report((GOOD,), ("old one",)), Report((GOOD,), ("old one", "rots"))
        assert changes.between(old, new).complaints == ("rots",)
        assert not changes.between(old, new).ok
        assert changes.between(old, old).ok

    def test_margins_largest_move_first(self) -> None:
        old = [outcome(f"c/{i}", margin=0.1) for i in range(3)]
        new = [outcome(f"c/{i}", margin=m) for i, m in enumerate((0.2, 0.9, 0.0))]
        found = changes.between(Report(tuple(old)), Report(tuple(new))).of(Kind.MARGIN)
        assert [c.outcome.id for c in found] == ["c/1", "c/0", "c/2"]

    def test_nothing_is_lost(self) -> None:
        """Every outcome of either run is counted once."""
        old, new = many(60, failing=False), every_status()
        found = changes.between(old, new)
        sides = sum(c.old is not None for c in found.changes), sum(c.new is not None for c in found.changes)
        assert (sides[0] + found.same, sides[1] + found.same) == (len(old.outcomes), len(new.outcomes))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """An old run, and one in which a case broke, one healed, and the library is newer."""
    names = [f"c/{i}/seed={i}" for i in range(4)]
    old = [outcome(names[0]), outcome(names[1], Status.FAILED), outcome(names[2]), outcome(names[3], margin=0.5)]
    new = [outcome(names[0], Status.FAILED, explained_by=("promotion at twice the interval",)), outcome(names[1])]
    new += [outcome(names[2], matches="sm90.chain"), outcome(names[3], margin=0.75)]
    for name, found, version in (("old", old, "1"), ("new", new, "2")):
        report = Report(tuple(found), versions={"lib": version}, started=f"2026-01-0{version}T00:00:00+00:00")
        (tmp_path / f"{name}.json").write_text(to_json(report))
    return tmp_path / "old.json", tmp_path / "new.json"


class TestCompare:
    """The command: what broke first, with its command; 1 when something broke."""

    def test_words(self, cli: Cli, two: tuple[Path, Path]) -> None:
        ran = cli("compare", *two)
        assert ran.status == 1
        for words in (
            *("lib: 1 -> 2", "broke (1)", "healed (1)", "a bound -> bits of sm90.chain", "margin 0.5 -> 0.75"),
            *("explained by: promotion at twice the interval", "repro: fp8-oracle verify --case 'c/0/seed=0'"),
        ):
            assert words in ran.out, words
        assert ran.out.index("broke") < ran.out.index("healed") < ran.out.index("margin")
        assert ran.out.splitlines()[-1].startswith("NOT OK  1 broke, 1 healed")

    def test_the_other_way_and_nothing(self, cli: Cli, two: tuple[Path, Path]) -> None:
        assert cli("compare", two[0], two[0]).out == "OK  4 the same\n"
        assert cli("compare", two[1], two[0]).status == 1

    def test_json(self, cli: Cli, two: tuple[Path, Path]) -> None:
        found = json.loads(cli("compare", *two, "--json", "-").out)
        assert (found["schema"], found["ok"]) == ("fp8-oracle.changes/1", False)
        assert found["counts"]["broke"] == 1
        assert found["versions"] == [{"name": "lib", "old": "1", "new": "2"}]
        assert [c["kind"] for c in found["changes"]] == ["broke", "healed", "other numerics", "margin moved"]

    def test_quiet(self, cli: Cli, two: tuple[Path, Path]) -> None:
        assert "healed (1)" not in cli("compare", *two, "-q").out

    def test_a_subject_that_is_not_there(self, cli: Cli, two: tuple[Path, Path]) -> None:
        ran = cli("compare", *two, "--pair", "s=other")
        assert (ran.status, ran.err.count("\n")) == (2, 1)
        assert "no subject 'other'" in ran.err


class TestHistory:
    """One SQLite file; a run is added once."""

    def test_add_and_show(self, cli: Cli, two: tuple[Path, Path], tmp_path: Path) -> None:
        base, page = tmp_path / "runs.sqlite", tmp_path / "runs.html"
        assert cli("history", "add", two[0], "--db", base, "--label", "before").out.endswith("added as run 1\n")
        assert cli("history", "add", two[1], "--db", base, "--label", "after").out.endswith("added as run 2\n")
        assert cli("history", "add", two[0], "--db", base).out.endswith("is already run 1\n")
        ran = cli("history", "show", "--db", base, "--html", page)
        assert ran.status == 0
        assert "before" in ran.out
        assert "largest margin of what passes" in ran.out
        assert "▁█" in ran.out
        assert page.read_text().count("<svg") == 5
        assert "https://" not in page.read_text()
        assert cli("history", "show", "--db", base, "--last", 1).out.count("before") == 0

    def test_counts(self, tmp_path: Path) -> None:
        history.add(tmp_path / "h", every_status())
        (all_of_it,) = history.points(tmp_path / "h")
        assert (all_of_it.passed, all_of_it.failing, all_of_it.known, all_of_it.ok) == (3, 5, 2, False)
        (some,) = history.points(tmp_path / "h", contract="e", subject="s")
        assert (some.passed, some.failing, some.margin) == (1, 0, 0.0)
        (none,) = history.points(tmp_path / "h", contract="nothing")
        assert (none.passed, none.margin) == (0, None)

    def test_every_outcome_is_kept(self, tmp_path: Path) -> None:
        history.add(tmp_path / "h", many(300, failing=True))
        with sqlite3.connect(tmp_path / "h") as base:
            assert base.execute("SELECT COUNT(*), SUM(outside) FROM outcomes").fetchone() == (300, 2100)

    @pytest.mark.parametrize("content", [b"not a database at all, but long enough to be read as one" * 20, None])
    def test_another_file_is_refused(self, cli: Cli, tmp_path: Path, content: bytes | None) -> None:
        base = tmp_path / "x"
        if content is None:
            with sqlite3.connect(base) as other:
                other.execute("CREATE TABLE theirs (a)")
        else:
            base.write_bytes(content)
        before = base.read_bytes()
        with pytest.raises(FixtureError):
            history.add(base, every_status())
        assert base.read_bytes() == before
        assert cli("history", "show", "--db", base).status == 2
        assert cli("history", "show", "--db", tmp_path / "none").status == 2

    @pytest.mark.parametrize("at", [16409, 16531, 19764, 32635])
    def test_bytes_of_zero(self, tmp_path: Path, at: int) -> None:
        """200 of them where SQLite itself reads on: rows would lack counts, or whole runs their outcomes."""
        base = tmp_path / "h"
        history.add(base, every_status())
        history.add(base, many(60, failing=True))
        assert len(history.points(base)) == 2
        content = base.read_bytes()
        base.write_bytes(content[:at] + bytes(200) + content[at + 200 :])
        for act in (lambda: history.points(base), lambda: history.add(base, Report((outcome(),)))):
            with pytest.raises(FixtureError, match="is damaged|cannot be used as a history"):
                act()

    def test_sparkline(self) -> None:
        assert sparkline([0, 1, None, float("inf"), 0.5]) == "▁█ !▅"
        assert sparkline([3, 3]) == "▁▁"
        assert sparkline([None]) == ""

    def test_the_axis_of_zeros(self, tmp_path: Path) -> None:
        """Counts that are all 0 lie on the line of 0, below one of 1; a margin has the edge of its bound."""
        history.add(tmp_path / "h", Report((outcome(),)))
        figures = history_page(history.points(tmp_path / "h"), "all").split("<figure>")[1:]
        labels = {re.findall("<figcaption>(.*?)<", f)[0]: re.findall('text-anchor="end">(.*?)<', f) for f in figures}
        assert labels["verdicts that fail"] == ["1", "0"]
        assert labels["largest margin of what passes"] == ["1", "0.5", "0"]
        (failing,) = [f for f in figures if "verdicts that fail" in f]
        zero, dot = (
            re.findall('<path class="axis" d="M54 (.*?)H', failing)[-1],
            re.findall('class="dot" d="M50 (.*?)a', failing),
        )
        assert dot == [zero]

    def test_a_failed_run_has_a_mark_of_its_own(self, tmp_path: Path) -> None:
        """By its form too, not by its colour alone."""
        history.add(tmp_path / "h", Report((outcome(),)))
        assert 'class="dot bad"' not in history_page(history.points(tmp_path / "h"), "all")
        history.add(tmp_path / "h", every_status())
        page = history_page(history.points(tmp_path / "h"), "all")
        assert page.count('class="dot bad"') == 5 and "✗ Not all as it must be in run 2" in page

    def test_one_run_can_be_plotted(self, tmp_path: Path) -> None:
        history.add(tmp_path / "h", Report((outcome(),)))
        assert "<svg" in history_page(history.points(tmp_path / "h"), "all")


class TestComment:
    """The comment of a pull request: short, what broke first, the rest folded, found again by its first line."""

    def test_words(self, cli: Cli, two: tuple[Path, Path], tmp_path: Path) -> None:
        ran = cli("compare", *two, "--markdown", "-", "--title", "gemm (cpu)")
        lines = ran.out.splitlines()
        assert ran.status == 1 and "NOT OK" in ran.err
        assert lines[0] == "<!-- fp8-oracle compare: gemm (cpu) -->"
        assert lines[1] == "### ❌ gemm (cpu): 1 broke, 1 healed, 1 other numerics, 1 margin moved, 0 the same"
        opened = ran.out.partition("<details>")[0]
        for words in ("**s** broke: c on sm90, 1 case", "promotion at twice the interval", "`fp8-oracle verify --case"):
            assert words in opened, words
        folds = [line for line in lines if line.startswith("<details>")]
        assert [fold[18:-10] for fold in folds] == [
            "broke (1)",
            "healed (1)",
            "other numerics (1)",
            "margin moved (1)",
            "versions (1)",
        ]
        assert "| c/3/seed=3 | s | sm90 | margin 0.5 -\\> 0.75 |" in lines
        assert cli("compare", *two, "--markdown", tmp_path / "x.md", "--title", "gemm (cpu)").status == 1
        assert (tmp_path / "x.md").read_text() == ran.out

    def test_nothing_changed(self) -> None:
        found = changes.between(Report((GOOD,)), Report((GOOD,)))
        said = changes.to_markdown(found)
        assert said == "<!-- fp8-oracle compare: fp8-oracle -->\n### ✅ fp8-oracle: 1 the same\n\n"

    def test_one_entry_for_a_kernel(self) -> None:
        """However many of its cases broke."""
        old = [outcome(f"c/{i}") for i in range(300)]
        new = [replace(outcome(f"c/{i}", Status.FAILED), source="src/k.py:7") for i in range(300)]
        said = changes.to_markdown(changes.between(Report(tuple(old)), Report(tuple(new))))
        opened, _, folded = said.partition("<details>")
        assert opened.count("\n- ") == 1 and "300 cases" in opened and "at `src/k.py:7`" in opened
        assert folded.count("\n| c/") == changes.ROWS and "and 250 more" in folded

    @pytest.mark.parametrize("failing", [False, True])
    def test_however_much_changed(self, failing: bool) -> None:
        said = changes.to_markdown(changes.between(Report(()), many(5000, failing=failing)))
        assert len(said) < 65_536
        assert said.count("<details>") == said.count("</details>") > 0

    def test_hostile_text_stays_text(self) -> None:
        said = changes.to_markdown(changes.between(Report(()), every_status()))
        code = re.compile("(`+)[^`].*?[^`]\\1(?!`)")
        assert "<script>" not in code.sub("", said) and "\\<script\\>" in said and "\x00" not in said
        assert "problem**: an entry rots" in said and "4 cases did not run" in said

    @pytest.mark.parametrize("title", ["", "a --> b", "two\nlines", "x" * 101, "<b>"])
    def test_a_title_that_breaks_the_marker(self, cli: Cli, two: tuple[Path, Path], title: str) -> None:
        written = two[0].with_name("x.md")
        ran = cli("compare", *two, "--markdown", written, "--title", title)
        assert (ran.status, ran.err.count("\n")) == (2, 1)
        assert not written.exists()
