"""The page of the whole matrix: what differs between cells, every cell, then routine by arch, mode, Python and torch.

Each form is a pure function of :class:`tests.support.matrix.Matrix`. Differences come first, each with the cells, what
they say, what the others say, and the cause as far as versions show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from oracle.errors import counted
from oracle.report.files import one_line, within
from oracle.report.markup import badge, cut, page, scrolling, section, table, theme_button
from oracle.report.outcome import counts_of
from tests.support.matrix import CELLS, MODES, CellRecord, Difference, Matrix

SHOWN = 100  # failing tests of a cell, and differences in Markdown, that are written out
OPEN = 3  # differences of the same cells that are in sight
STYLE = """<style>
.marks td.odd { background: var(--bad-bg); color: var(--bad); font-weight: 700; }
.marks th, .marks td { white-space: nowrap; } .marks tbody th { font-weight: 400; }
.marks thead th { text-align: left; } .cells td { min-width: 8em; }
</style>"""


def to_text(matrix: Matrix) -> str:
    """What is wrong, a line each, and a closing line."""
    lines = [f"ERROR {text}" for text in matrix.problems]
    lines += [f"{one.kind.upper()} {one}" for one in matrix.wrong]
    lines += [f"FAILED {record.cell}: {what}: {why}" for record in matrix.records for what, why in failures(record)]
    lines += [f"ADMITTED {one}" for one in matrix.admitted]
    return "\n".join([*lines, f"{'OK' if matrix.ok else 'NOT OK'}  {summary(matrix)}"])


def summary(matrix: Matrix) -> str:
    """The cells by what became of them, and how many differences."""
    words = [record.word for record in matrix.records]
    cells = [f"{words.count(word)} {word.lower()}" for word in ("PASSED", "FAILED", "UNSUPPORTED") if word in words]
    admitted = f", {len(matrix.admitted)} admitted" if matrix.admitted else ""
    return f"{counted(len(words), 'cell')}: {', '.join(cells)}; {counted(len(matrix.wrong), 'difference')}{admitted}"


def failures(record: CellRecord) -> Iterator[tuple[str, str]]:
    """What fails in a cell: outcomes of the sample, then tests, each with its reason."""
    yield from ((f"{o.id} [{o.subject}, {o.arch}]", o.verdict.summary) for o in record.failing)
    yield from record.broken.items()


def counts(record: CellRecord) -> list[str]:
    """How many tests and how many outcomes of the sample ended how."""
    tests = {name: len(record.tests.get(name, {})) for name in ("failed", "error", "skipped", "xfailed")}
    tests = {"passed": sum(record.tests.get("passed", {}).values())} | tests
    judged = counts_of(record.outcomes.values())
    said = (("tests", tests), ("cases", {name.lower(): number for name, number in judged.items()}))
    lines = [f"{what}: {', '.join(f'{n} {name}' for name, n in of.items() if n) or 'none'}" for what, of in said]
    lines += [] if record.most is None else [f"at most {record.most} instances of a test"]
    lines += [] if record.part == "0/1" else [f"files of part {record.part}"]
    return lines + ([f"ran {', '.join(record.steps)}"] if record.steps else [])


# --- HTML ---------------------------------------------------------------------------------------------------------


def to_html(matrix: Matrix) -> str:
    """One self-contained HTML document."""
    sections = [
        section("differences", "What is wrong, and what differs between cells", _wrong(matrix)),
        section("cells", "Every cell", _overview(matrix)),
        section("failures", "What fails, cell by cell", _failures(matrix)),
        *(section(mode, f"Routines in the mode {mode}", _routines(matrix, mode)) for mode in MODES),
        section("admitted", "Other values, and every one of them admitted", _listed(matrix.admitted)),
    ]
    named = ("differences", "cells", "failures", *MODES, "admitted")
    links = "".join(f'<a href="#{name}">{name}</a>' for name in named)
    sign, tone = ("✓", "good") if matrix.ok else ("✗", "bad")
    head = (
        f'<header><div class="top"><h1>fp8-oracle: the matrix of Python, torch and mode</h1>{theme_button()}</div>'
        f'<p class="verdict {tone}">{sign} {summary(matrix)}</p></header>'
    )
    body = "\n".join((STYLE, head, f'<nav aria-label="sections">{links}</nav><main>', *sections, "</main>"))
    return page(f"fp8-oracle matrix: {summary(matrix)}", body)


def _wrong(matrix: Matrix) -> str:
    same: dict[str, list[str]] = {}
    for text in matrix.problems:
        cell, _, why = text.partition(": ")
        same.setdefault(why, []).append(cell)
    said = (f"<p><b>{escape(', '.join(cells))}</b>: {cut(why, 600)}</p>" for why, cells in same.items())
    errors = "".join(_row(badge("ERROR"), text) for text in said)
    return (f'<ul class="glance">{errors}</ul>' if errors else "") + _listed(matrix.wrong)


def _listed(differences: Sequence[Difference]) -> str:
    """Differences of one kind between the same cells together, the first of them in sight."""
    groups: dict[tuple[object, ...], list[Difference]] = {}
    for one in differences:
        groups.setdefault((one.kind, one.cells, one.cause), []).append(one)
    rows = []
    for first, *rest in groups.values():
        said = "".join(map(_difference, [first, *rest[: OPEN - 1]]))
        if hidden := rest[OPEN - 1 :]:
            more = "".join(map(_difference, hidden))
            title = f"and {counted(len(hidden), 'more routine')}"
            said += f"<li><details><summary>{title}</summary><ul>{more}</ul></details></li>"
        where = f"<p><b>{escape(first.where)}</b>. {escape(first.cause)}</p>"
        mark = (
            f'<span class="badge known">~ {first.kind.upper()}</span>' if first.admitted else badge(first.kind.upper())
        )
        rows.append(_row(mark, f"{where}<ul>{said}</ul>"))
    return f'<ul class="glance">{"".join(rows)}</ul>' if rows else "<p>No cell differs from the others.</p>"


def _difference(one: Difference) -> str:
    more = f" (and {counted(len(one.cases) - 1, 'more case')})" if len(one.cases) > 1 else ""
    return f"<li><b>{escape(one.what)}</b>: {cut(one.words, 500)}{more}</li>"


def _row(mark: str, content: str) -> str:
    return f"<li><span>{mark}</span><div>{content}</div></li>"


def _overview(matrix: Matrix) -> str:
    """A row for each Python and torch, a column for each mode."""
    by_cell = {record.cell: record for record in matrix.records}
    rows = []
    for name in dict.fromkeys(cell.environment for cell in CELLS):
        mine = [by_cell[cell] for cell in CELLS if cell.environment == name and cell in by_cell]
        cells = "".join(_cell(record, sum(record.cell in one.cells for one in matrix.wrong)) for record in mine)
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    return scrolling(table(["Python and torch", *MODES], rows, kind="cells"), "cells by mode")


def _cell(record: CellRecord, odd: int) -> str:
    """What became of a cell, and in how many differences it is an odd one."""
    said = [record.unsupported] if record.unsupported else [*record.problems[:2], *counts(record)]
    said += [f"{record.seconds:.0f} s"] if record.seconds else []
    said += [f"differs from other cells: {odd}"] if odd else []
    return f"<td>{badge(record.word)}<br>{'<br>'.join(cut(text, 160) for text in said)}</td>"


def _failures(matrix: Matrix) -> str:
    parts = []
    for record in matrix.records:
        if found := [*failures(record)]:
            rows = [f"<tr><td><code>{escape(what)}</code></td><td>{cut(why, 300)}</td></tr>" for what, why in found]
            left = f"<p>and {len(rows) - SHOWN} more</p>" if len(rows) > SHOWN else ""
            listed = table(("test or case", "why"), rows[:SHOWN])
            parts.append(f"<details><summary>{record.cell}: {len(found)}</summary>{listed}{left}</details>")
    return "".join(parts) or "<p>Nothing.</p>"


def _routines(matrix: Matrix, mode: str) -> str:
    """A row for each routine and arch, a column for each Python and torch; red where the cell is an odd one."""
    records = [record for record in matrix.records if record.cell.mode == mode and record.outcomes]
    if not records:
        return "<p>No record.</p>"
    odd = {(f"{one.what.partition(' [')[0]}", cell) for one in matrix.wrong if one.mode == mode for cell in one.cells}
    found: dict[tuple[str, str], dict[object, list[object]]] = {}
    for record in records:
        for (contract, arch, _, _), outcome in record.outcomes.items():
            found.setdefault((contract, arch), {}).setdefault(record.cell, []).append(outcome)
    rows = []
    for (contract, arch), by_cell in sorted(found.items()):
        cells = ""
        for record in records:
            kind = ' class="odd"' if (f"{contract} on {arch}", record.cell) in odd else ""
            cells += f"<td{kind}>{_marks(by_cell.get(record.cell, []))}</td>"
        rows.append(f'<tr><th scope="row">{escape(contract)}</th><td>{escape(arch)}</td>{cells}</tr>')
    legend = "passed ✓, failed ✗, known failures ~, not judged –; red where a cell says otherwise than most"
    said = f"{counted(len(rows), 'row')}: {legend}"
    listed = scrolling(table(["routine", "arch", *(r.cell.environment for r in records)], rows, kind="marks"), mode)
    return f"<details><summary>{said}</summary>{listed}</details>"


def _marks(outcomes: Sequence[object]) -> str:
    """``12 ✓ 1 ✗`` of the outcomes of one routine."""
    found = counts_of(outcomes)  # type: ignore[arg-type]
    groups: Mapping[str, int] = {
        "✓": found["PASSED"] + found["MISTRUSTED"],
        "✗": found["FAILED"] + found["CRASHED"] + found["UNTESTED"],
        "~": found["KNOWN"],
        "–": found["UNSUPPORTED"] + found["SKIPPED"],
    }
    return " ".join(f"{number} {sign}" for sign, number in groups.items() if number) or "none"


# --- Markdown -----------------------------------------------------------------------------------------------------


def to_markdown(matrix: Matrix) -> str:
    """The summary of a job: what is wrong, and a table of the cells."""
    lines = [f"### {'✅' if matrix.ok else '❌'} fp8-oracle matrix: {summary(matrix)}", ""]
    lines += [f"- **error** {one_line(text)}" for text in matrix.problems]
    lines += [_line(one) for one in matrix.wrong[:SHOWN]]
    lines += ["", f"| Python and torch | {' | '.join(MODES)} |", f"|---|{'---|' * len(MODES)}"]
    by_cell = {record.cell: record for record in matrix.records}
    for name in dict.fromkeys(cell.environment for cell in CELLS):
        mine = [by_cell[cell] for cell in CELLS if cell.environment == name and cell in by_cell]
        said = (
            f"**{r.word}** {one_line(r.unsupported or '; '.join([*r.problems[:1], *counts(r)]), 160)}" for r in mine
        )
        lines.append(f"| {name} | {' | '.join(said)} |")
    return within([*lines, ""])


def _line(one: Difference) -> str:
    more = f" (and {len(one.cases) - 1} more)" if len(one.cases) > 1 else ""
    where, what, words, cause = map(one_line, (one.where, one.what, one.words, one.cause))
    return f"- **{one.kind}** {where}: {what}: {words}{more}. {cause}"
