"""A report as one self-contained HTML file: what fails and why, pictures of it, every case, and where it was run.

A pure function of the report. At most ``DETAILED`` failures are drawn, so that a run in which everything fails still
gives a page that opens; what is left out says so. Tables stand in :mod:`oracle.report.tables`.
"""

from __future__ import annotations

from html import escape

from oracle.report import picture, tables
from oracle.report.causes import Cause, causes
from oracle.report.markup import badge, count, cut, scrolling, section, table, tone
from oracle.report.outcome import Outcome, Report
from oracle.report.page import page, theme_button
from oracle.verdict.compare import Status

DETAILED = 300  # failures with pictures and bits in one page
PER_CAUSE = 24  # failures of one cause with pictures and bits
LISTED = 400  # further failures of one cause in words


def to_html(report: Report) -> str:
    """The report as one HTML document."""
    found = causes(report)
    sections = (_problems(report, found), _cards(found), *tables.sections(report))
    parts = (_head(report, found), "<main>", *sections, "</main>")
    title = f"fp8-oracle: {'all as it must be' if report.ok else count(len(report.failures), 'failure')}"
    return page(title, "\n".join(parts))


def _head(report: Report, found: list[Cause]) -> str:
    chips = "".join(
        f'<li><span class="chip {tone(name)}">{escape(name.lower())} <b>{number}</b></span></li>'
        for name, number in report.counts().items()
        if number
    )
    where = ", ".join(f"{k} {v}" for k, v in report.machine.items() if k in ("gpu", "machine", "torch"))
    when = f"{report.started}, " if report.started else ""
    ran = f"{when}{count(len(report.outcomes), 'outcome')} in {report.seconds:.1f} s; {where}"
    return (
        '<a class="skip" href="#problems">Skip to what fails</a>\n<header>'
        f'<div class="top"><h1>fp8-oracle report</h1>{theme_button()}</div>'
        f'<p class="verdict {"good" if report.ok else "bad"}">{_verdict(report, found)}</p>'
        f'<ul class="chips" aria-label="outcomes by status">{chips}</ul><p class="soft">{escape(ran)}</p></header>'
    )


def _verdict(report: Report, found: list[Cause]) -> str:
    known = sum(cause.known is not None for cause in found)
    broken, false = len(found) - known, len(report.complaints)
    words = [count(broken, "open problem")] if broken else []
    words += [f"{count(false, 'false entry', 'false entries')} in the ledger"] if false else []
    words += [f"{count(report.unfinished, 'case')} not run"] if report.unfinished else []
    said = "All as it must be" if report.ok else " and ".join(words) or "Nothing was judged"
    return f"{'✓' if report.ok else '✗'} {said}" + (f"; {count(known, 'known failure')}" if known else "")


def _problems(report: Report, found: list[Cause]) -> str:
    rows = [
        _row(badge(cause.word, _tone(cause)), f'<p><a href="#c{number}"><b>{escape(cause.title)}</b></a> '
             f'<span class="soft">{escape(cause.where)}</span></p><p>{cut(cause.why, 400)}</p>')
        for number, cause in enumerate(found)
    ]  # fmt: skip
    rows += [_row(badge("LEDGER", "bad"), f"<p>{cut(complaint)}</p>") for complaint in report.complaints]
    if report.unfinished:
        said = f"the run was interrupted; {count(report.unfinished, 'case')} did not run, --resume runs them"
        rows.append(_row(badge("UNFINISHED", "bad"), f"<p>{said}</p>"))
    listed = f'<ul class="glance">{"".join(rows)}</ul>' if rows else "<p>Nothing.</p>"
    return section("problems", "What fails, and why", listed)


def _row(mark: str, content: str) -> str:
    return f"<li><span>{mark}</span><div>{content}</div></li>"


def _cards(found: list[Cause]) -> str:
    """Causes with outputs first, then what nothing exercises; the numbers are those of the list above."""
    parts, missing, budget = [], [], DETAILED
    for number, cause in enumerate(found):
        if cause.status is Status.UNTESTED:
            names = "".join(f"<li><code>{escape(o.contract)}</code></li>" for o in cause.outcomes)
            missing.append(_card(number, cause, "", f'<div class="case"><ul class="chips">{names}</ul></div>'))
            continue
        few = min(PER_CAUSE, budget, len(cause.outcomes))
        budget -= few
        parts.append(_card(number, cause, _why(cause), _outputs(cause, few)))
    return section("details", "Failures in detail", "".join(parts + missing)) if found else ""


def _card(number: int, cause: Cause, why: str, content: str) -> str:
    return (
        f'<article class="card {_tone(cause)}" id="c{number}"><header>'
        f"<h3>{badge(cause.word, _tone(cause))} {escape(cause.title)}</h3>"
        f"<p>{escape(cause.where)}</p>{why}</header>{content}</article>"
    )


def _why(cause: Cause) -> str:
    facts = [("known reason", cause.known)] if cause.known is not None else []
    if cause.explained_by:
        facts.append(("reproduced by", "; or ".join(cause.explained_by)))
    if not facts:
        facts.append(("seen", cause.why))
    listed = "".join(f"<dt>{name}</dt><dd>{cut(text)}</dd>" for name, text in facts)
    return f'<dl class="why">{listed}</dl>'


def _outputs(cause: Cause, few: int) -> str:
    several = len(cause.explained_by) > 1
    shown = "".join(_output(o, opened=i == 0, explained=several) for i, o in enumerate(cause.outcomes[:few]))
    rest = cause.outcomes[few:]
    if not rest:
        return shown
    words = "".join(f"<p><code>{escape(o.id)}</code><br>{cut(o.verdict.summary, 300)}</p>" for o in rest[:LISTED])
    if len(rest) > LISTED:
        words += f"<p>and {len(rest) - LISTED} more, which stand in the list of every case</p>"
    return (
        f"{shown}<details><summary>{count(len(rest), 'more case')} of this cause, in words only</summary>"
        f'<div class="case">{words}</div></details>'
    )


def _output(o: Outcome, *, opened: bool, explained: bool) -> str:
    verdict, seen = o.verdict, o.verdict.evidence
    parts = [f"<p>{cut(verdict.summary)}</p>"]
    if verdict.explained_by and explained:
        parts.append(f"<p>Reproduced by: <b>{cut('; or by: '.join(verdict.explained_by))}</b></p>")
    if seen is not None:
        parts.append(
            f'<div class="pictures"><figure>{picture.heat_map(seen)}<figcaption>{picture.caption(seen)}</figcaption>'
            f"</figure><div><h4>Elements by distance from the expected value</h4>{picture.histogram(seen)}"
            f"<h4>How often each bit differs (sign, exponent, fraction)</h4>{picture.flips(seen)}</div></div>"
        )
        parts.append(_elements(o))
    if o.repro:
        copy = '<button type="button" class="copy" hidden>Copy</button>'
        parts.append(f'<div class="repro"><code>{escape(o.repro)}</code>{copy}</div>')
    return (
        f'<details{" open" if opened else ""}><summary><span class="id">{escape(o.id)}</span> '
        f'<span class="soft">{tables.extent(o)}</span></summary><div class="case">{"".join(parts)}</div></details>'
    )


def _elements(o: Outcome) -> str:
    seen = o.verdict.evidence
    assert seen is not None
    head = ("worst elements", "actual#", "admissible#", "steps outside#", "bits: actual above, expected below")
    rows = (
        f"<tr><td>{escape(seen.output)}{list(e.index)}</td><td class=n>{e.actual:.7g}</td>"
        f"<td class=n>[{e.low:.7g}, {e.high:.7g}]</td><td class=n>{'' if e.steps is None else e.steps}</td>"
        f"<td>{picture.bits(e, seen.fields)}</td></tr>"
        for e in seen.elements
    )
    return scrolling(table(head, rows, kind="elements"), "worst elements")


def _tone(cause: Cause) -> str:
    return "known" if cause.known is not None else "bad"
