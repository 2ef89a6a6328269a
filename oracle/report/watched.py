"""What was seen of a model's calls (:mod:`oracle.harness.watching`): a table by kernel and layer, JSON and one page.

A row is one kernel in one layer. The first inadmissible call is the first in program order; what stands behind it in
the model was computed from a wrong value. ``SQNR`` is, of a quantiser, what its recipe loses of the values, and of
anything else the error of its output beside the exact one; no verdict depends on it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oracle.errors import counted
from oracle.report import console as words
from oracle.report.html import output_card
from oracle.report.markup import badge, page, scrolling, section, table, theme_button
from oracle.report.outcome import JUDGED, SEVERITY, Outcome
from oracle.report.picture import series
from oracle.verdict.compare import Status
from oracle.verdict.loss import share

SCHEMA = "fp8-oracle.watch/1"
WIDTH = 140  # columns of a text
HEAD = ("layer", "kernel", "calls", "judged", "verdict", "SQNR dB", "saturated", "ulps")
LEGEND = (
    "calls: those that were seen; judged: one in so many. SQNR: of a quantiser what its recipe loses (the least of the "
    "calls), of anything else the error of its output; saturated: the largest share of elements that are cut to the "
    "largest code; ulps: the largest error."
)


@dataclass(frozen=True)
class Row:
    """One kernel in one layer.

    ``counts`` are the judged calls by status; ``sqnr``, ``saturated`` and ``ulps`` the worst of them, None where none
    was measured; ``matches`` the numerics that has all bits of the last one; ``why`` says what is wrong with the first
    inadmissible one; ``unread`` counts the calls that could not be judged, by reason.
    """

    layer: str
    kernel: str
    contract: str
    calls: int
    counts: Mapping[str, int] = field(default_factory=dict)
    sqnr: float | None = None
    saturated: float | None = None
    ulps: float | None = None
    matches: str | None = None
    why: str = ""
    unread: Mapping[str, int] = field(default_factory=dict)
    quantises: bool = False

    @property
    def judged(self) -> int:
        """Calls with a comparison behind their verdict."""
        return sum(self.counts.get(str(status), 0) for status in JUDGED)

    @property
    def verdict(self) -> str:
        """The worst status; "" where no call was judged."""
        present = [status for status in SEVERITY if self.counts.get(str(status))]
        return (
            str(Status.PASSED if Status.PASSED in present and present[0] is Status.MISTRUSTED else present[0])
            if (present)
            else ""
        )

    @property
    def fails(self) -> bool:
        return any(n and Status(name).is_failure for name, n in self.counts.items())

    def cells(self) -> tuple[str, ...]:
        """The texts of :data:`HEAD`."""
        figures = (
            "" if self.sqnr is None else f"{self.sqnr:.1f}",
            "" if self.saturated is None else share(self.saturated),
            "" if self.ulps is None else f"{self.ulps:.3g}",
        )
        return self.layer, self.kernel, str(self.calls), str(self.judged), self.verdict or "not judged", *figures


@dataclass(frozen=True)
class First:
    """The first inadmissible call: its place in program order (from 0), its layer, and its outcome; ``file`` holds the
    call, "" where it was not written."""

    number: int
    layer: str
    outcome: Outcome
    file: str = ""


@dataclass(frozen=True)
class Watched:
    """A whole watch: rows in the order in which they first ran; ``notes`` say what could not be seen."""

    rows: tuple[Row, ...]
    first: First | None
    notes: tuple[str, ...]
    machine: Mapping[str, str]
    seconds: float

    @property
    def judged(self) -> int:
        return sum(row.judged for row in self.rows)

    @property
    def ok(self) -> bool:
        """Something was judged, and nothing that was judged is inadmissible."""
        return self.judged > 0 and not any(row.fails for row in self.rows)

    @property
    def summary(self) -> str:
        """What was seen, in one line."""
        calls, layers = sum(row.calls for row in self.rows), len({row.layer for row in self.rows})
        failing = sum(row.fails for row in self.rows)
        kernels = counted(len({row.kernel for row in self.rows}), "kernel")
        where = f"{counted(calls, 'call')} of {kernels} in {counted(layers, 'layer')}"
        wrong = f"; inadmissible in {counted(failing, 'row')}" if failing else ""
        return f"{where}, {self.judged} judged{wrong}; {self.seconds:.1f} s"

    def lines(self) -> Iterator[str]:
        """What no table says: calls that could not be judged, and what could not be seen."""
        reasons: dict[tuple[str, str], int] = {}
        for row in self.rows:
            for reason, n in row.unread.items():
                reasons[row.kernel, reason] = reasons.get((row.kernel, reason), 0) + n
        for (kernel, reason), n in reasons.items():
            yield f"not judged: {counted(n, 'call')} of {kernel}: {reason}"
        for note in self.notes:
            yield f"not seen: {note}"


def print_watched(report: Watched, screen: Console, *, quiet: bool = False) -> None:
    """The table (of what fails alone where ``quiet``), the first inadmissible call, what was not seen, a last line."""
    shown = [row for row in report.rows if row.fails or not quiet]
    if shown:
        listed = Table(title="calls by layer and kernel", title_justify="left")
        for name in HEAD:
            listed.add_column(
                name, overflow="fold", justify="left" if name in ("layer", "kernel", "verdict") else "right"
            )
        for row in shown:
            style = words.STYLES[Status(row.verdict)] if row.verdict else "dim"
            cells = row.cells()
            listed.add_row(*cells[:4], Text(cells[4], style=style), *cells[5:])
        screen.print(listed)
        screen.print(LEGEND, style="dim", soft_wrap=True)
    for row in report.rows:
        if row.fails:
            screen.print(Text.assemble((row.verdict, words.STYLES[Status(row.verdict)]), f" {row.layer}: {row.why}"))
    if report.first is not None:
        screen.print(_first(report.first), soft_wrap=True)
    for line in report.lines():
        screen.print(line, soft_wrap=True)
    word = ("OK", "bold green") if report.ok else ("NOT OK", "bold red")
    screen.print(Text.assemble(word, f"  {report.summary}"), soft_wrap=True)


def to_text(report: Watched) -> str:
    """What :func:`print_watched` prints, without colours."""
    target = io.StringIO()
    print_watched(report, Console(file=target, width=WIDTH, highlight=False, markup=False, emoji=False))
    return target.getvalue()


def _first(first: First) -> Text:
    text = Text(f"the first inadmissible call, number {first.number}, in {first.layer}:\n")
    return text.append(words.sentence(first.outcome))


def to_json(report: Watched) -> dict[str, object]:
    """A JSON-ready dict; infinite figures become the strings ``"inf"`` and ``"-inf"``."""
    first = report.first
    rows = [
        {name: _plain(value) for name, value in vars(row).items()}
        | {"verdict": row.verdict, "judged": row.judged, "fails": row.fails}
        for row in report.rows
    ]
    return {
        "schema": SCHEMA,
        "ok": report.ok,
        "summary": report.summary,
        "first": None
        if first is None
        else {"number": first.number, "layer": first.layer, "file": first.file, "outcome": first.outcome.to_json()},
        "rows": rows,
        "notes": list(report.notes),
        "machine": dict(report.machine),
        "seconds": round(report.seconds, 3),
    }


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return dict(value) if isinstance(value, Mapping) else value


def to_html(report: Watched) -> str:
    """One self-contained page: the first inadmissible call in pictures, loss by layer, all rows, what was not seen."""
    sign, tone = ("✓", "good") if report.ok else ("✗", "bad")
    sentence = "Not all as it must be" if report.judged else "Nothing was judged"
    sentence = "All as it must be" if report.ok else sentence
    parts = []
    if (first := report.first) is not None:
        named = f"in <b>{escape(first.layer)}</b>, by <b>{escape(first.outcome.subject)}</b>"
        card = f"<p>Call number {first.number}, {named}.</p>{output_card(first.outcome)}"
        parts.append(("first", "The first inadmissible call", card))
    if plots := "".join(_plots(report)):
        parts.append(("loss", "Loss by layer", f'<div class="plots">{plots}</div>'))
    rows = (
        f'<tr><th scope="row">{escape(c[0])}</th><td>{escape(c[1])}</td><td class=n>{c[2]}</td><td class=n>{c[3]}</td>'
        f"<td>{badge(row.verdict) if row.verdict else 'not judged'}</td>"
        + "".join(f"<td class=n>{escape(cell)}</td>" for cell in c[5:])
        + "</tr>"
        for row in report.rows
        for c in (row.cells(),)
    )
    numbers = ("calls", "judged", "SQNR dB", "saturated", "ulps")
    head = [f"{name}#" if name in numbers else name for name in HEAD]
    text = f'<p class="soft">{escape(LEGEND)}</p>'
    parts.append(
        ("rows", "Calls by layer and kernel", text + scrolling(table(head, rows), "calls by layer and kernel"))
    )
    if unseen := "".join(f"<li><span></span><div><p>{escape(line)}</p></div></li>" for line in report.lines()):
        parts.append(("unseen", "Not judged, and not seen", f'<ul class="glance">{unseen}</ul>'))
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in sorted(report.machine.items()))
    parts.append(("provenance", "Machine", f'<dl class="facts">{facts}</dl>'))
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in parts)
    header = (
        f'<a class="skip" href="#rows">Skip to the table</a>\n<header><div class="top"><h1>fp8-oracle watch</h1>'
        f'{theme_button()}</div><p class="verdict {tone}">{sign} {sentence}</p>'
        f'<p class="soft">{escape(report.summary)}</p>'
        "</header>"
    )
    content = "\n".join(section(*part) for part in parts)
    return page(
        f"fp8-oracle: {sentence.lower()}",
        f'{header}\n<nav aria-label="sections">{links}</nav><main>\n{content}\n</main>',
    )


def _plots(report: Watched) -> Iterator[str]:
    """SQNR and saturated share of quantisers by layer, then the errors of everything else."""
    figures = (
        ("sqnr", True, "SQNR of quantisers, dB"),
        ("saturated", True, "saturated share of quantisers"),
        ("sqnr", False, "SQNR of other outputs, dB"),
        ("ulps", False, "largest error of other outputs, ulps"),
    )
    for name, quantises, title in figures:
        rows = [row for row in report.rows if row.quantises is quantises and row.judged]
        values = [getattr(row, name) for row in rows]
        if any(value is not None for value in values):
            labels = [f"{row.layer} {row.kernel}" for row in rows]
            ends = (rows[0].layer, rows[-1].layer)
            yield series(title, values, labels, [not row.fails for row in rows], ends, counts=False)
