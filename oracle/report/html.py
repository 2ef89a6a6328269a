"""A report as one self-contained HTML file: what fails and why, pictures of it, every case, and where it was run.

A pure function of the report. At most ``DETAILED`` failures are drawn, so that a run in which everything fails still
gives a page that opens; what is left out is counted. Below the failures come tables: routine by arch and subject,
margins, reasons, every case, legend, provenance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

from oracle.report import outcome, picture
from oracle.report.markup import SIGNS, TONES, badge, count, cut, page, scrolling, section, table, theme_button
from oracle.verdict.compare import Status
from oracle.verdict.heatmap import COLOURS

DETAILED = 300  # failures with pictures and bits in one page
PER_CAUSE = 24  # failures of one cause with pictures and bits
LISTED = 400  # further failures of one cause in words
MEANINGS: Mapping[str, str] = {
    "PASSED": "every bit is that of a declared or identified arithmetic, or every element lies in its proved interval",
    "FAILED": "at least one element is not what the contract admits",
    "CRASHED": "the routine raised an error, or its output cannot be judged at all",
    "UNTESTED": "nothing exercises the routine; counts as a failure",
    "MISTRUSTED": "passed, but these inputs could not have shown a fault",
    "UNSUPPORTED": "the routine refuses this call, and says why",
    "SKIPPED": "cannot run on this machine, and says why",
    outcome.KNOWN: "wrong, for a documented reason, exactly as wrong as documented; does not fail the run",
}
_SECTION = re.compile(r'<section id="(\w+)"><h2>(.*?)</h2>')
_NUMBER = re.compile(r"(?<![\w.])\d+(\.\d+)?(?![\w.])")
_LEGEND = (
    "Every element of an output has an <em>admissible interval</em>: what the declared arithmetic can produce, proved "
    "from the formats and the accumulator, not tuned. A red cell holds an element outside it: no rounding that the "
    "contract admits explains that value. The colour says how far, counted in values that the output format can "
    "represent."
)


def to_html(report: outcome.Report) -> str:
    """The report as one HTML document."""
    reasons = outcome.causes(report)
    failures = (_problems(report, reasons), _cards(reasons))
    meanings = "".join(f"<dt>{badge(name)}</dt><dd>{escape(text)}</dd>" for name, text in MEANINGS.items())
    legend = f'<p class="lead">{_LEGEND}</p><ul class="scale">{picture.scale()}</ul><dl class="facts">{meanings}</dl>'
    facts = {**report.machine, **report.versions, "started": report.started or "not recorded"}
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in sorted(facts.items()))
    tables = (
        *(_matrix(report), _margins(report), _losses(report), _reasons(report), _cases(report)),
        section("legend", "How to read this", legend),
        section("provenance", "Machine and versions", f'<dl class="facts">{listed}</dl>'),
    )
    content = "\n".join((*failures, *tables))
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in _SECTION.findall(content))
    parts = (_head(report, reasons), f'<nav aria-label="sections">{links}</nav><main>', content, "</main>")
    title = f"fp8-oracle: {'all as it must be' if report.ok else count(len(report.failures), 'failure')}"
    return page(title, "\n".join(parts))


def _head(report: outcome.Report, causes: list[outcome.Cause]) -> str:
    chips = "".join(
        f'<li><span class="chip {TONES[name]}">{kind}{escape(name.lower())} <b>{number}</b></span></li>'
        for kind, counts in zip(("", "watches "), report.parts, strict=True)
        for name, number in counts.items()
        if number
    )
    known, other = report.counts()["KNOWN"], len(report.problems)
    broken = sum(cause.known is None for cause in causes)
    words = [count(broken, "open problem")] if broken else []
    words += [f"{count(other, 'problem')} of the run itself"] if other else []
    words += [f"{count(report.unfinished, 'case')} not run"] if report.unfinished else []
    sign, text = "✓" if report.ok else "✗", " and ".join(words) or "Nothing was judged"
    text = ("All as it must be" if report.ok else text) + (f"; {count(known, 'known failure')}" if known else "")
    where = ", ".join(f"{k} {v}" for k, v in report.machine.items() if k in ("gpu", "machine", "torch"))
    when = f"{report.started}, " if report.started else ""
    ran = f"{when}{outcome.extent(report.outcomes)} in {report.seconds:.1f} s; {where}"
    part = f'<p class="soft">{escape(report.part)}</p>' if report.part else ""
    return (
        '<a class="skip" href="#problems">Skip to what fails</a>\n<header>'
        f'<div class="top"><h1>fp8-oracle report</h1>{theme_button()}</div>'
        f'<p class="verdict {"good" if report.ok else "bad"}">{sign} {text}</p>'
        f'<ul class="chips" aria-label="outcomes by status">{chips}</ul><p class="soft">{escape(ran)}</p>{part}'
        "</header>"
    )


def _problems(report: outcome.Report, causes: list[outcome.Cause]) -> str:
    """One row for each reason; causes that share a reason stand in it together."""
    same: dict[tuple[str, str], list[str]] = {}
    for number, cause in enumerate(causes):
        link = f'<a href="#c{number}"><b>{escape(cause.title)}</b></a> <span class="soft">{escape(cause.where)}</span>'
        same.setdefault((cause.word, cause.why), []).append(link)
    rows = [_row(badge(word), f"{_folded(links)}<p>{cut(why, 400)}</p>") for (word, why), links in same.items()]
    rows += [_row(badge("PROBLEM"), f"<p>{cut(problem)}</p>") for problem in report.problems]
    if report.unfinished:
        text = f"the run was interrupted; {count(report.unfinished, 'case')} did not run, --resume runs them"
        rows.append(_row(badge("UNFINISHED"), f"<p>{text}</p>"))
    listed = f'<ul class="glance">{"".join(rows)}</ul>' if rows else "<p>Nothing.</p>"
    return section("problems", "What fails, and why", listed)


def _folded(links: list[str]) -> str:
    """The first in sight; all others, where there are several, behind a line that counts them."""
    first, *rest = links
    if not rest:
        return f"<p>{first}</p>"
    listed = "".join(f"<li>{link}</li>" for link in rest)
    return f"<p>{first}</p><details><summary>and {len(rest)} more</summary><ul>{listed}</ul></details>"


def _row(mark: str, content: str) -> str:
    return f"<li><span>{mark}</span><div>{content}</div></li>"


def _cards(causes: list[outcome.Cause]) -> str:
    """Causes with outputs first, then untested routines; the numbers are those of the list above."""
    parts, missing, budget = [], [], DETAILED
    for number, cause in enumerate(causes):
        if cause.missing:
            names = "".join(f"<li><code>{escape(o.contract)}</code></li>" for o in cause.outcomes)
            missing.append(_card(number, cause, "", f'<div class="case"><ul class="chips">{names}</ul></div>'))
            continue
        few = min(PER_CAUSE, budget, len(cause.outcomes))
        budget -= few
        parts.append(_card(number, cause, _why(cause), _outputs(cause, few)))
    return section("details", "Failures in detail", "".join(parts + missing)) if causes else ""


def _card(number: int, cause: outcome.Cause, why: str, content: str) -> str:
    return (
        f'<article class="card {TONES[cause.word]}" id="c{number}"><header>'
        f"<h3>{badge(cause.word)} {escape(cause.title)}</h3>"
        f"<p>{escape(cause.where)}</p>{why}</header>{content}</article>"
    )


def _why(cause: outcome.Cause) -> str:
    facts = [("known reason", cause.known)] if cause.known is not None else []
    if cause.explained_by:
        facts.append(("reproduced by", "; or ".join(cause.explained_by)))
    if not facts:
        facts.append(("seen", cause.why))
    listed = "".join(f"<dt>{name}</dt><dd>{cut(text)}</dd>" for name, text in facts)
    return f'<dl class="why">{listed}</dl>'


def _outputs(cause: outcome.Cause, few: int) -> str:
    """The first output in sight, the others folded: ``few`` outputs with pictures, then words."""
    every = set(cause.explained_by)
    shown = [
        output_card(o, opened=i == 0, explained=set(o.verdict.explained_by) != every)
        for i, o in enumerate(cause.outcomes[:few])
    ]
    rest = cause.outcomes[few:]
    words = "".join(f"<p>{_id(o.id)}<br>{cut(o.verdict.summary, 300)}</p>" for o in rest[:LISTED])
    if len(rest) > LISTED:
        words += f"<p>and {len(rest) - LISTED} more, which stand in the list of every case</p>"
    more = "".join(shown[1:]) + (f'<div class="case">{words}</div>' if words else "")
    if not more:
        return shown[0]
    text = f"{count(len(cause.outcomes) - min(few, 1), 'more case')} of this cause"
    return f'{"".join(shown[:1])}<details class="more"><summary>{text}</summary>{more}</details>'


def output_card(o: outcome.Outcome, *, opened: bool = True, explained: bool = True) -> str:
    """One failing output: what was seen, its faults unless they stand elsewhere, pictures, and how it is repeated."""
    verdict, seen = o.verdict, o.verdict.evidence
    parts = [f"<p>{cut(verdict.summary)}</p>"]
    parts += [f"<p>at <code>{escape(frame)}</code></p>" for frame in verdict.frames]
    if verdict.explained_by and explained:
        parts.append(f"<p>Reproduced by: <b>{cut('; or by: '.join(verdict.explained_by))}</b></p>")
    if not verdict.explained_by:
        parts += [f"<p>{cut(why[0].upper() + why[1:])}</p>" for why in verdict.because]
    if o.also:
        parts.append(f"<p>Only because of that: {escape(', '.join(o.also))}</p>")
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
        f"<details{' open' if opened else ''}><summary>{_id(o.id)} "
        f'<span class="soft">{_extent(o)}</span></summary><div class="case">{"".join(parts)}</div></details>'
    )


def _elements(o: outcome.Outcome) -> str:
    seen = o.verdict.evidence
    assert seen is not None
    head = ("worst elements", "actual#", "admissible#", "steps outside#", "bits: actual above, expected below")
    rows = (
        f"<tr><td>{escape(seen.output)}{list(e.index)}</td><td class=n>{e.actual:.7g}</td>"
        f"<td class=n>[{e.low:.7g}, {e.high:.7g}]</td><td class=n>{'-' if e.steps is None else e.steps}</td>"
        f"<td>{picture.bits(e, seen.fields)}</td></tr>"
        for e in seen.elements
    )
    return scrolling(table(head, rows, kind="elements"), "worst elements")


def _id(text: str) -> str:
    """The id of a case, which may be broken behind each of its parts."""
    return f'<code class="id">{escape(text).replace("/", "/<wbr>")}</code>'


# --- tables -------------------------------------------------------------------------------------------------


def _extent(o: outcome.Outcome) -> str:
    """How many elements of an output fail; empty without a comparison."""
    return f"{o.verdict.outside} of {count(o.verdict.total, 'element')} outside" if o.verdict.total else ""


def _matrix(report: outcome.Report) -> str:
    groups = list(enumerate(report.groups()))
    arches = list(dict.fromkeys(g.arch for _, g in groups if g.arch != "-"))
    rows = []
    for name in dict.fromkeys(g.contract for _, g in groups):
        mine = [(n, g) for n, g in groups if g.contract == name]
        if bare := [_chip(n, g) for n, g in mine if g.arch == "-"]:
            cells = f'<td colspan="{max(1, len(arches))}"><div class="chips">{"".join(bare)}</div></td>'
        else:
            chips = {arch: "".join(_chip(n, g) for n, g in mine if g.arch == arch) for arch in arches}
            inside = {arch: f'<div class="chips">{chip}</div>' if chip else "" for arch, chip in chips.items()}
            cells = "".join(f'<td data-arch="{escape(arch)}">{chip}</td>' for arch, chip in inside.items())
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    text = '<p class="soft">A number counts judged cases; follow one to its cases.</p>'
    matrix = scrolling(table(["routine", *arches], rows, kind="matrix"), "routines by arch and subject")
    return section("overview", "Overview: routine by arch and subject", text + matrix)


def _chip(number: int, group: outcome.Group) -> str:
    name = group.subject if group.subject != "-" else "not exercised"
    text = group.failing or str(group.judged or "")
    text = "" if group.word in (Status.UNTESTED, outcome.KNOWN) else text
    text = ", ".join(filter(None, (text, group.others)))
    sign = f'<span aria-hidden="true">{SIGNS[group.word]}</span><span class="hear">{group.word}</span>'
    return f'<a class="chip {TONES[group.word]}" href="#g{number}">{sign} {escape(name)} <b>{text}</b></a>'


def _margins(report: outcome.Report) -> str:
    passing = [o for o in report.outcomes if o.status in outcome.PASSING and not o.watch]
    if not passing:
        return ""
    margins = [o.verdict.margin for o in passing if o.verdict.matches is None]
    parts = ("the expected value", "up to ¼ of the way to the edge", "up to ½", "up to ¾", "up to the edge")
    counts = [sum(m == 0 for m in margins), *(sum(i - 1 < 4 * m <= i for m in margins) for i in range(1, 5))]
    rows = [("bits as predicted", len(passing) - len(margins), "#3f9a6b")]
    rows += zip(parts, counts, COLOURS, strict=False)
    text = "How near the worst element of each passing case comes to the edge of its admissible interval."
    bars = picture.bars(rows, "passing cases by margin")
    return section("margins", "Margins of what passes", f'<p class="soft">{text}</p><div class="narrow">{bars}</div>')


def _losses(report: outcome.Report) -> str:
    """What the recipes of quantisers lose."""
    rows = [
        f'<tr><th scope="row">{escape(cells[0])}</th><td>{escape(cells[1])}</td><td>{escape(cells[2])}</td>'
        + "".join(f"<td class=n>{escape(cell)}</td>" for cell in cells[3:])
        + "</tr>"
        for cells in outcome.losses(report)
    ]
    if not rows:
        return ""
    text = f'<p class="soft">{escape(outcome.LOSS)}: a kernel can be right and its recipe bad.</p>'
    listed = table([*outcome.LOSS_COLUMNS[:3], *(f"{name}#" for name in outcome.LOSS_COLUMNS[3:])], rows)
    return section("loss", "What the recipes lose", text + scrolling(listed, "loss of quantisers"))


def _reasons(report: outcome.Report) -> str:
    """MISTRUSTED, UNSUPPORTED and SKIPPED outcomes by reason; reasons that differ in numbers alone are one."""
    parts = []
    for status in (Status.MISTRUSTED, Status.UNSUPPORTED, Status.SKIPPED):
        groups: dict[str, list[outcome.Outcome]] = {}
        for o in report.outcomes:
            if o.status is status:
                groups.setdefault(_NUMBER.sub("0", o.verdict.reason or ""), []).append(o)
        if groups:
            listed = table(("reason", "cases#", "routine [subject]"), map(_reason, groups.values()), kind="reasons")
            text = f"{count(sum(map(len, groups.values())), 'case')}: {escape(MEANINGS[str(status)])}"
            parts.append(
                f'<details><summary>{badge(str(status))} {text}</summary><div class="case">{listed}</div></details>'
            )
    content = f'<article class="card">{"".join(parts)}</article>'
    return section("reasons", "Not judged, or proving little", content) if parts else ""


def _reason(same: list[outcome.Outcome]) -> str:
    reasons = list(dict.fromkeys(o.verdict.reason or "" for o in same))
    others = ' <span class="soft">(the same with other numbers)</span>' if len(reasons) > 1 else ""
    where = _folded(list(dict.fromkeys(escape(f"{o.contract} [{o.subject}]") for o in same)))
    return f"<tr><td>{cut(reasons[0], 400)}{others}</td><td class=n>{len(same)}</td><td>{where}</td></tr>"


def _cases(report: outcome.Report) -> str:
    groups = "".join(_group(number, group) for number, group in enumerate(report.groups()))
    asked = (
        '<div class="filter" hidden><label for="filter">Filter the cases</label>'
        '<input id="filter" type="search" autocomplete="off" aria-describedby="filters">'
        '<span id="filters" class="soft">words of the id, subject, status or numerics; all of them must occur</span>'
        '<span id="filtered" class="soft" role="status"></span></div>'
    )
    return section("cases", "Every case", asked + groups)


def _group(number: int, group: outcome.Group) -> str:
    arch = "" if group.arch == "-" else f", {group.arch}"
    name = f"{group.contract} [{group.subject}{arch}]"
    listed = table(("status", "case", "margin#", "proof", "s#"), map(_case, group.outcomes))
    counted = f'<span class="soft">{group.size}</span>'
    return f'<details id="g{number}"><summary>{badge(group.word)} {escape(name)} {counted}</summary>{listed}</details>'


def _case(o: outcome.Outcome) -> str:
    v = o.verdict
    judged = v.status in outcome.JUDGED
    proof = f"bits of {v.matches}" if v.matches else v.basis if v.status is Status.PASSED else v.reason or _extent(o)
    cells = (
        f"<td>{badge(o.word)}</td>",
        f"<td>{_id(o.id.removeprefix(f'{o.contract}/'))}</td>",
        f"<td class=n>{f'{v.margin:.3g}' if judged else ''}</td>",
        f"<td>{cut(proof, 160)}</td><td class=n>{o.seconds:.2f}</td>",
    )
    return f"<tr>{''.join(cells)}</tr>"
