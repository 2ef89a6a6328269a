"""Reports for readers: one HTML file, Markdown, causes. Each is a pure function of the report."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reports import HOSTILE, every_status, evidence, many, outcome
from rich.console import Console

from oracle.report import console, files, html, picture
from oracle.report.changes import between
from oracle.report.changes import to_markdown as to_comment
from oracle.report.files import to_json, to_junit
from oracle.report.outcome import Outcome, Report, causes
from oracle.report.part import part_of
from oracle.report.record import report_from_json
from oracle.routines import profiles
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.heatmap import LEVELS, OPEN
from tests.support.commandline import Cli

MIB = 2**20


class Document(HTMLParser):
    """Checks that elements are closed in order, and collects what a test asks about."""

    VOID = frozenset({"meta", "br", "wbr", "input", "image", "path", "circle"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: dict[str, int] = {}
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        found = dict(attrs)
        self.links += [value for name in ("href", "src") if (value := found.get(name)) is not None]
        self.ids += [value for name, value in found.items() if name == "id" and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


@pytest.mark.turns(4)
class TestHtml:
    """One file that needs no network, quotes nothing as markup, and names what fails first."""

    def test_self_contained(self) -> None:
        text = html.to_html(every_status())
        page = Document(text)
        assert "link" not in page.tags
        assert "iframe" not in page.tags
        assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
        assert "default-src 'none'" in text
        assert not re.search(r"url\(|@import|https?://", text)

    def test_every_link_has_its_target_once(self) -> None:
        page = Document(html.to_html(every_status()))
        assert len(page.ids) == len(set(page.ids))
        assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)

    def test_hostile_text_stays_text(self) -> None:
        text = html.to_html(every_status())
        assert "<script>alert" not in text
        assert "\x00" not in text
        assert Document(text).text.count("<script>alert('x')</script>") >= 3
        assert Document(text).tags["script"] == 1

    def test_what_is_said(self) -> None:
        page = Document(html.to_html(every_status()))
        for words in (
            *("scale of the previous row", "documented", "an entry rots", "row 3 only", "4 cases not run", "--resume"),
            *("fp8-oracle verify --case 'c/red/seed=2' --subject 's'", "bits of sm90.promote128", "x86_64"),
            *("2 known failures", "1 problem of the run itself", "how often each bit differs".capitalize()),
        ):
            assert words in page.text, words
        assert page.text.index("What fails, and why") < page.text.index("Overview")
        assert page.text.index("scale of the previous row") < page.text.index("documented")

    @pytest.mark.parametrize(
        ("others", "tone", "said"),
        [((Status.PASSED,), "good", "2, 1 mistrusted"), ((Status.FAILED,), "bad", "1 of 2 fail"), ((), "known", "1")],
    )
    def test_a_mistrusted_case_colours_no_right_subject(self, others: tuple[Status, ...], tone: str, said: str) -> None:
        """A pass beside it makes the subject green, a failure red; alone it says that little was shown."""
        statuses = (Status.MISTRUSTED, *others)
        report = Report(tuple(outcome(f"c/{i}", status) for i, status in enumerate(statuses)))
        text = html.to_html(report)
        assert re.findall(r'<a class="chip (\w+)" href="#g0">.*?<b>(.*?)</b>', text)[0][0] == tone
        assert f"<b>{said}" in text
        assert f'<details id="g0"><summary><span class="badge {tone}">' in text

    def test_repeated_rows_are_folded(self) -> None:
        """One row for each reason: causes that share a known reason, and reasons that differ in numbers alone."""
        known = [outcome(f"c{i}/case", Status.FAILED, known="documented") for i in range(3)]
        few = [
            Outcome(f"d/{i}", "d", "s", "cpu", Verdict(Status.MISTRUSTED, "", reason=f"{i}% are 0")) for i in range(4)
        ]
        page = html.to_html(Report((*known, *few, outcome("d/e4", Status.UNSUPPORTED))))
        glance, reasons = page.split('id="problems"')[1].split("</section>")[0], page.split('id="reasons"')[1]
        assert (glance.count("documented"), glance.count("<b>s</b>")) == (1, 3)
        assert "<summary>and 2 more</summary>" in glance
        assert reasons.split("</section>")[0].count("% are 0") == 1
        assert "<td>0% are 0 <span" in reasons and "<td class=n>4</td>" in reasons

    def test_further_cases_of_a_cause_are_folded(self) -> None:
        """The first stands open; the others, with and without pictures, behind one line that counts them."""
        page = html.to_html(Report(tuple(outcome(f"c/{i}", Status.FAILED, seen=evidence()) for i in range(30))))
        (card,) = re.findall("<article.*?</article>", page)
        assert card.count("<details open>") == 1
        assert card.partition("29 more cases of this cause")[0].count("<svg") == 1
        assert card.count("<svg") == html.PER_CAUSE

    def test_a_good_report_says_so(self) -> None:
        page = Document(html.to_html(Report((outcome(),))))
        assert "✓ All as it must be" in page.text
        assert "Nothing was judged" in Document(html.to_html(Report(()))).text

    def test_the_same_report_gives_the_same_page(self) -> None:
        assert html.to_html(every_status()) == html.to_html(every_status())

    @pytest.mark.parametrize("failing", [False, True])
    def test_five_thousand_cases(self, failing: bool, benchmark: pytest.FixtureRequest) -> None:
        """The page of 5,000 cases, all right or all wrong, stays below 15 MiB; the benchmark has the seconds."""
        report = many(5000, failing=failing)
        text = benchmark(html.to_html, report)  # type: ignore[operator]
        assert len(text.encode()) < 15 * MIB
        assert text.count("<tr><td>") >= 5000
        assert text.count("<svg") == (html.DETAILED if failing else 0)


class TestPicture:
    """The PNG has one pixel for each level; bits and bars say what the evidence says."""

    @pytest.mark.parametrize("dark", [False, True])
    def test_pixels(self, dark: bool) -> None:
        seen = evidence(3, rows=5, columns=7)
        images = re.findall(r'<image( class="dark")? .*?href="data:image/png;base64,([^"]+)"', picture.heat_map(seen))
        assert [bool(theme) for theme, _ in images] == [False, True]
        content = base64.b64decode(images[dark][1])
        chunks, at = {}, 8
        while at < len(content):
            (length,) = struct.unpack(">I", content[at : at + 4])
            name, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
            assert struct.unpack(">I", content[at + 8 + length : at + 12 + length]) == (zlib.crc32(name + body),)
            chunks[name], at = body, at + 12 + length
        assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (7, 5)
        rows = zlib.decompress(chunks[b"IDAT"])
        digits = LEVELS + OPEN
        assert tuple("".join(digits[p] for p in rows[r * 8 + 1 : r * 8 + 8]) for r in range(5)) == seen.levels
        assert len(chunks[b"PLTE"]) == 3 * len(digits) == 3 * len(picture.MEANINGS) == 3 * len(picture.COLOURS)
        assert len(picture.SHORT) == len(LEVELS)
        assert (sum(chunks[b"PLTE"][:3]) < 3 * 64) == dark, "the expected value has the tone of the paper"

    def test_differing_bits(self) -> None:
        """-2.5 is 1 10000000 0100000 in bfloat16, 1.125 is 0 01111111 0010000."""
        assert picture.bits(evidence().elements[0], (1, 8, 7)) == (
            '<code class="bits"><span class="s"><u>1</u></span><span class="e"><u>10000000</u></span>'
            '<span class="f">0<u>10</u>0000</span><br><span class="s"><u>0</u></span>'
            '<span class="e"><u>01111111</u></span><span class="f">0<u>01</u>0000</span></code>'
        )

    def test_lines_that_would_hide_the_picture_are_left_out(self) -> None:
        assert 'class="tile"' in picture.heat_map(evidence())
        dense = evidence()
        assert 'class="tile"' not in picture.heat_map(type(dense)(**{**dense.__dict__, "tile": (1, 1)}))
        assert 'class="band"' in picture.heat_map(dense)


class TestCauses:
    """Failures together where the cause is one; open ones first."""

    def test_order_and_grouping(self) -> None:
        found = causes(every_status())
        assert [c.word for c in found] == ["FAILED", "FAILED", "CRASHED", "UNTESTED", "KNOWN FAILURE"]
        known = found[-1]
        assert (known.title, known.where, known.why) == ("lib", "c on sm90: 2 of 2 outputs wrong", "documented")
        assert sum(len(c.outcomes) for c in found) == sum(o.status.is_failure for o in every_status().outcomes)

    def test_the_same_subject_with_two_reasons(self) -> None:
        outcomes = [outcome(f"c/{i}", Status.FAILED, known=f"reason {i}") for i in range(2)]
        assert len(causes(Report(tuple(outcomes)))) == 2


class TestMarkdown:
    """A summary for a pull request: short, and nothing quoted is markup."""

    def test_what_is_said(self) -> None:
        text = files.to_markdown(every_status())
        assert text.startswith("### ❌ fp8-oracle")
        assert text.index("What fails") < text.index("Known failures") < text.index("<details>")
        assert "reproduced by" not in text.split("Known failures")[0]
        assert "`fp8-oracle verify --case 'c/FAILED/seed=1' --subject 's'`" in text
        assert "\x00" not in text
        assert "<script>" not in re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", text.replace("\\<", ""))
        assert files.to_markdown(Report((outcome(),))).startswith("### ✅ fp8-oracle")

    def test_nobody_is_notified(self) -> None:
        """A name behind an @ stays readable and is no mention; in code it stays as it is."""
        broken = outcome(status=Status.FAILED, subject="@team/gpu", said="written by @octocat")
        for text in (
            files.to_markdown(Report((broken,))),
            to_comment(between(Report((outcome(),)), Report((broken,)))),
        ):
            assert "@&#8203;team/gpu" in text
            assert not re.search(r"@\w", re.sub(r"`[^`]*`", "", text))
        assert files.code("@octocat") == "`@octocat`"

    @pytest.mark.parametrize("failing", [False, True])
    def test_long_reports_are_cut(self, failing: bool) -> None:
        text = files.to_markdown(many(5000, failing=failing))
        assert len(text) <= files.LIMIT
        assert text.count("<details>") == text.count("</details>")


def test_every_form_shows_where_a_kernel_raised() -> None:
    """The frames of a crash, and a failure of another subject without them."""
    crashed = outcome("c/m=1/seed=1", Status.CRASHED)
    raised = replace(crashed, verdict=replace(crashed.verdict, frames=("k.py:3 in gemm: a @ a",)))
    for outcomes, shown in (((raised,), True), ((crashed,), False)):
        report = Report(outcomes, (), {}, 0.0, {}, "")
        for form in (html.to_html, files.to_markdown, to_junit):
            assert ("k.py:3 in gemm: a @ a" in form(report)) == shown, form


def test_one_cause_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """On the console: cases of one subject under the first of them, another subject by itself."""
    failing = [outcome(f"c/m={i}/seed=1", Status.FAILED, subject="lib") for i in range(3)]
    failing.append(outcome("c/m=9/seed=1", Status.FAILED, subject="other"))
    console.print_report(Report(tuple(failing), (), {}, 0.0, {}, ""), Console(), quiet=True)
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith(("FAILED", "  2 more"))] == [
        "FAILED c/m=0/seed=1 [lib]",
        "  2 more cases fail; --verbose names each",
        "FAILED c/m=9/seed=1 [other]",
    ]


class TestScreen:
    """A run of many subjects is one row for each family, until the whole is asked for; failures are always shown."""

    MANY = tuple(
        outcome(f"{name}/case/seed=1", status, subject=f"s{i}", known="documented" if status is Status.FAILED else None)
        for i in range(console.SCREEN)
        for name, status in (
            ("fp8_gemm_nt", Status.PASSED),
            ("nowhere", Status.MISTRUSTED),
            ("rms_norm", Status.FAILED),
        )
    )

    def said(self, report: Report, capsys: pytest.CaptureFixture[str], **how: bool) -> str:
        console.print_report(report, Console(width=120), **how)
        return capsys.readouterr().out

    def test_many_subjects(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Counts and the worst margin; what is counted is explained by --verbose."""
        text = self.said(Report(self.MANY), capsys)
        assert len(text.splitlines()) < console.SCREEN
        (row,) = [line.split("│") for line in text.splitlines() if "GEMM" in line]
        assert [cell.strip() for cell in row[1:-1]] == ["GEMM", "1", "30", "30", "", "", "0.25"]
        assert "30 mistrusted, 30 known: --verbose and --html say why" in text and "because of this" not in text
        whole = self.said(Report(self.MANY), capsys, verbose=True)
        assert whole.count("because of this") == whole.count("known failure: documented") == 30
        assert "verdicts by family" not in whole and len(whole.splitlines()) > 200

    def test_few_subjects(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The negative test: what fits on a screen is shown whole."""
        text = self.said(Report(self.MANY[: console.SCREEN]), capsys)
        assert "verdicts by family" not in text and text.count("because of this") == 10

    def test_failures_are_shown_whole(self, capsys: pytest.CaptureFixture[str]) -> None:
        failing = outcome("fp8_gemm_nt/m=1/seed=1", Status.FAILED, subject="lib")
        text = self.said(Report((*self.MANY, failing)), capsys)
        assert "FAILED fp8_gemm_nt/m=1/seed=1 [lib]\n" in text and "repro: fp8-oracle verify --case" in text
        assert "FAILED fp8" not in self.said(Report(self.MANY), capsys)

    @pytest.mark.parametrize("quiet", [False, True])
    def test_a_part_is_said_to_be_one(self, quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
        """How many cases of how many, and how the rest is judged: on the console, in JSON, HTML and the record."""
        chosen = [outcome(str(case)) for case in profiles.cases("fp8_gemm_nt", "brief")]
        part = part_of("brief", [*chosen, outcome("captures/x/out")])
        quick, full = (profiles.count("fp8_gemm_nt", name) for name in ("quick", "full"))
        assert f"{len(chosen)} of {quick} cases" in part and "and 1 capture;" in part and str(full) in part
        report = Report(tuple(chosen), part=part)
        assert part in self.said(report, capsys, quiet=quiet) and escape(part) in html.to_html(report)
        assert report_from_json(json.loads(to_json(report))).part == part
        assert part_of("quick", chosen) == part_of(None, chosen) == part_of("brief", [outcome("captures/x/out")]) == ""
        assert "part" not in json.loads(to_json(Report(tuple(chosen))))


class TestCommand:
    """`report` makes every form from a record or a JSON report, and exits as the run did."""

    def test_every_form(self, cli: Cli, tmp_path: Path) -> None:
        source = tmp_path / "run.json"
        source.write_text(to_json(every_status()))
        forms = {name: tmp_path / f"out.{name}" for name in ("json", "junit", "markdown", "html")}
        ran = cli("report", source, *(word for name, path in forms.items() for word in (f"--{name}", path)))
        assert ran.status == 1
        assert "interrupted, 4 not run" in ran.out
        assert forms["json"].read_text() == source.read_text()
        assert forms["junit"].read_text() == to_junit(every_status())
        assert forms["markdown"].read_text() == files.to_markdown(every_status())
        assert forms["html"].read_text() == html.to_html(every_status())

    def test_selection(self, cli: Cli, tmp_path: Path) -> None:
        source = tmp_path / "run.json"
        source.write_text(to_json(every_status()))
        ran = cli("report", source, "--contract", "e", "--json", "-")
        assert (ran.status, ran.out.count('"id"')) == (1, 1)
        ran = cli("report", source, "--subject", "li?", "--markdown", "-")
        assert "documented" in ran.out
        ran = cli("report", source, "--contract", "nothing")
        assert (ran.status, ran.err.count("\n")) == (2, 1)

    def test_volume(self, cli: Cli, tmp_path: Path) -> None:
        source = tmp_path / "run.json"
        source.write_text(to_json(Report((outcome(), outcome("c/k", Status.FAILED, known="documented")))))
        usual, quiet, verbose = (cli("report", source, *flag).out for flag in ([], ["-q"], ["-v"]))
        assert "verdicts" in usual
        assert quiet.splitlines() == ["OK  1 passed, 1 known; 0.0 s"]
        assert len(verbose.splitlines()) == len(usual.splitlines()) + 2
        assert cli("report", source, "-q", "-v").status == 2

    @pytest.mark.parametrize(
        "content", ["", "{}", '{"schema": "fp8-oracle.report/1"}', "not json", '{"kind": "end"}\n']
    )
    def test_a_file_that_is_no_record(self, cli: Cli, tmp_path: Path, content: str) -> None:
        (tmp_path / "x").write_text(content)
        ran = cli("report", tmp_path / "x")
        assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)

    def test_a_missing_file(self, cli: Cli, tmp_path: Path) -> None:
        assert "no such file" in cli("report", tmp_path / "none").err


def test_hostile_text_is_hostile() -> None:
    """The twin of the escaping tests: the text would be markup if it were not escaped."""
    assert Document(f"<p>{HOSTILE}</p>").tags["script"] == 1


def test_watches_are_counted_apart_from_cases_everywhere() -> None:
    failing = [outcome(f"d/case{i}", Status.FAILED) for i in range(2)]
    watches = [replace(outcome(f"d/watch{i}", Status.PASSED), watch="guard zones") for i in range(3)]
    report = Report((*failing, outcome("d/case2", Status.PASSED), *watches))
    page, text = html.to_html(report), files.to_markdown(report)
    assert "2 of 3 outputs wrong" in page and "<b>2 of 3 fail</b>" in page and "(2 of 3 fail)" in text
    assert "3 cases, 3 watches" in page and "2 of 6" not in page + text


def test_what_a_failure_shows_stands_in_every_form() -> None:
    """Where no known fault explains it; a failure that one explains names that alone."""
    shown, plain = "no known fault explains it: 3 times the right value", outcome("d/case", Status.FAILED)
    failing = replace(plain, verdict=replace(plain.verdict, observed=("3 times the right value",)))
    forms = (html.to_html, files.to_markdown, to_junit, lambda report: str(console.sentence(report.outcomes[0])))
    for form in forms:
        assert shown in form(Report((failing,))).replace("No known", "no known")
        assert "no known fault" not in form(Report((outcome("d/case", Status.FAILED, explained_by=("f",)),))).lower()
