"""The tables of the HTML report: routine by arch and subject, margins, reasons, every case, legend, provenance."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from oracle.report import picture
from oracle.report.markup import KNOWN, SIGNS, TONES, badge, count, cut, scrolling, section, status_badge, table, tone
from oracle.report.outcome import Group, Outcome, Report
from oracle.verdict.compare import Status

MEANINGS: Mapping[str, str] = {
    "PASSED": "every bit is that of a declared or identified arithmetic, or every element lies in its proved interval",
    "FAILED": "at least one element is not what the contract admits",
    "CRASHED": "the routine raised an error, or its output cannot be judged at all",
    "UNTESTED": "nothing exercises the routine; counts as a failure",
    "MISTRUSTED": "passed, but these inputs could not have shown a fault",
    "UNSUPPORTED": "the routine refuses this call, and says why",
    "SKIPPED": "cannot run on this machine, and says why",
    KNOWN: "wrong, for a documented reason, exactly as wrong as documented; does not fail the run",
}
_LEGEND = (
    "Every element of an output has an <em>admissible interval</em>: what the declared arithmetic can produce, proved "
    "from the formats and the accumulator, not tuned. A red cell holds an element outside it: no rounding that the "
    "contract admits explains that value. The colour says how far, counted in values that the output format can "
    "represent."
)


def sections(report: Report) -> list[str]:
    """Every section below the failures."""
    return [_matrix(report), _margins(report), _reasons(report), _cases(report), _legend(), _provenance(report)]


def extent(o: Outcome) -> str:
    """How much of an output fails, in words; empty without a comparison."""
    return f"{o.verdict.outside} of {o.verdict.total} elements outside" if o.verdict.total else ""


def _matrix(report: Report) -> str:
    groups = list(enumerate(report.groups()))
    arches = list(dict.fromkeys(g.arch for _, g in groups if g.arch != "-"))
    rows = []
    for name in dict.fromkeys(g.contract for _, g in groups):
        mine = [(n, g) for n, g in groups if g.contract == name]
        if bare := [_chip(n, g) for n, g in mine if g.arch == "-"]:
            cells = f'<td colspan="{max(1, len(arches))}"><div class="chips">{"".join(bare)}</div></td>'
        else:
            cells = "".join(_cell(arch, [_chip(n, g) for n, g in mine if g.arch == arch]) for arch in arches)
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    said = '<p class="soft">A number counts judged cases; follow one to its cases.</p>'
    matrix = scrolling(table(["routine", *arches], rows, kind="matrix"), "routines by arch and subject")
    return section("overview", "Overview: routine by arch and subject", said + matrix)


def _cell(arch: str, chips: list[str]) -> str:
    inside = f'<div class="chips">{"".join(chips)}</div>' if chips else ""
    return f'<td data-arch="{escape(arch)}">{inside}</td>'


def _chip(number: int, group: Group) -> str:
    known = _known(group)
    word = KNOWN if known else str(group.status)
    name = group.subject if group.subject != "-" else "not exercised"
    said = "" if group.status is Status.UNTESTED else _counted(group)
    colour = "known" if known else TONES[group.status]
    text = f"{SIGNS[word]} {escape(name)} <b>{said}</b>"
    return f'<a class="chip {colour}" href="#g{number}" title="{word}">{text}</a>'


def _counted(group: Group) -> str:
    failing = sum(o.fails for o in group.outcomes)
    doubtful = sum(o.status is Status.MISTRUSTED for o in group.outcomes)
    if failing:
        return f"{failing} of {len(group.outcomes)} fail"
    if group.known:
        return f"{group.known} known"
    return f"{group.judged}, {doubtful} mistrusted" if doubtful else str(group.judged or "")


def _margins(report: Report) -> str:
    passing = [o for o in report.outcomes if o.status in (Status.PASSED, Status.MISTRUSTED)]
    if not passing:
        return ""
    margins = [o.verdict.margin for o in passing if o.verdict.matches is None]
    parts = ("the expected value", "up to ¼ of the way to the edge", "up to ½", "up to ¾", "up to the edge")
    counts = [sum(m == 0 for m in margins), *(sum(i - 1 < 4 * m <= i for m in margins) for i in range(1, 5))]
    rows = [("bits as predicted", len(passing) - len(margins), "#3f9a6b")]
    rows += zip(parts, counts, picture.COLOURS, strict=False)
    said = "How near the worst element of each passing case comes to the edge of its admissible interval."
    bars = picture.bars(rows, "passing cases by margin")
    return section("margins", "Margins of what passes", f'<p class="soft">{said}</p><div class="narrow">{bars}</div>')


def _reasons(report: Report) -> str:
    """Everything that passed by proving little, was refused, or could not run, with its reason."""
    parts = []
    for status in (Status.MISTRUSTED, Status.UNSUPPORTED, Status.SKIPPED):
        reasons: dict[tuple[str, str], int] = {}
        for o in report.outcomes:
            if o.status is status:
                where = (f"{o.contract} [{o.subject}]", o.verdict.reason or "")
                reasons[where] = reasons.get(where, 0) + 1
        if reasons:
            rows = (
                f"<tr><td>{escape(where)}</td><td class=n>{n}</td><td>{cut(why, 400)}</td></tr>"
                for (where, why), n in reasons.items()
            )
            said = f"{count(sum(reasons.values()), 'case')}: {escape(MEANINGS[str(status)])}"
            listed = table(("routine [subject]", "cases#", "reason"), rows)
            mark = badge(str(status), TONES[status])
            parts.append(f'<details><summary>{mark} {said}</summary><div class="case">{listed}</div></details>')
    content = f'<article class="card">{"".join(parts)}</article>'
    return section("reasons", "Not judged, or proving little", content) if parts else ""


def _cases(report: Report) -> str:
    groups = "".join(_group(number, group) for number, group in enumerate(report.groups()))
    asked = (
        "<label hidden>Filter by words of the id, subject, status or numerics "
        '<input id="filter" type="search" autocomplete="off"></label> '
        '<span id="filtered" class="soft" role="status"></span>'
    )
    return section("cases", "Every case", asked + groups)


def _group(number: int, group: Group) -> str:
    arch = "" if group.arch == "-" else f", {group.arch}"
    name = f"{group.contract} [{group.subject}{arch}]"
    head = ("status", "case", "margin#", "proof", "s#")
    return (
        f'<details id="g{number}"><summary>{status_badge(group.status, known=_known(group))} {escape(name)} '
        f'<span class="soft">{count(len(group.outcomes), "case")}</span></summary>'
        f"{table(head, (_case(o) for o in group.outcomes))}</details>"
    )


def _case(o: Outcome) -> str:
    v = o.verdict
    judged = v.status in (Status.PASSED, Status.FAILED, Status.MISTRUSTED)
    proof = f"bits of {v.matches}" if v.matches else v.basis if v.status is Status.PASSED else v.reason or extent(o)
    cells = (
        f"<td>{status_badge(v.status, known=o.known is not None)}</td>",
        f"<td><code>{escape(o.id.removeprefix(f'{o.contract}/'))}</code></td>",
        f"<td class=n>{f'{v.margin:.3g}' if judged else ''}</td>",
        f"<td>{cut(proof, 160)}</td><td class=n>{o.seconds:.2f}</td>",
    )
    return f"<tr>{''.join(cells)}</tr>"


def _legend() -> str:
    words = "".join(f"<dt>{badge(name, tone(name))}</dt><dd>{escape(text)}</dd>" for name, text in MEANINGS.items())
    scale = f'<ul class="scale">{picture.scale()}</ul>'
    return section("legend", "How to read this", f'<p class="lead">{_LEGEND}</p>{scale}<dl class="facts">{words}</dl>')


def _provenance(report: Report) -> str:
    facts = {**report.machine, **report.versions, "started": report.started or "not recorded"}
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in sorted(facts.items()))
    return section("provenance", "Machine and versions", f'<dl class="facts">{rows}</dl>')


def _known(group: Group) -> bool:
    return group.known == len(group.outcomes)
