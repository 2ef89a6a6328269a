"""A history for eyes: a table with sparklines on the console, and one self-contained HTML file with plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oracle.report.history import Point
from oracle.report.markup import badge, scrolling, table
from oracle.report.page import page, theme_button

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"
WIDTH, HEIGHT = 480.0, 120.0
_SERIES = (
    ("passed", "cases that pass"),
    ("failing", "cases that fail"),
    ("known", "known failures"),
    ("margin", "largest margin of what passes"),
    ("seconds", "seconds"),
)


def print_history(points: Sequence[Point], console: Console) -> None:
    """One row for each run, then one sparkline for each count."""
    table = Table(title="history", title_justify="left", header_style="bold")
    for name in ("run", "started", "label", "fp8-oracle"):
        table.add_column(name, overflow="fold")
    for name in ("passed", "failing", "known", "margin", "s"):
        table.add_column(name, justify="right")
    for p in points:
        style = "green" if p.ok else "bold red"
        margin = "" if p.margin is None else f"{p.margin:.3g}"
        numbers = (str(p.passed), str(p.failing), str(p.known), margin, f"{p.seconds:.1f}")
        table.add_row(Text(str(p.number), style=style), p.started, p.label, p.version, *numbers)
    console.print(table)
    blocks = BLOCKS if console.encoding.startswith("utf") else ASCII
    for name, said in _SERIES:
        values = [getattr(p, name) for p in points]
        if shown := sparkline(values, blocks):
            console.print(Text(f"{said:<30} {shown}  {_range(values)}"))


def sparkline(values: Sequence[float | None], blocks: str = BLOCKS) -> str:
    """One character for each value between the smallest and the largest; a blank for None, ``!`` for no number."""
    numbers = [v for v in values if v is not None and math.isfinite(v)]
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    span = high - low
    return "".join(
        " " if v is None else "!" if not math.isfinite(v) else
        blocks[round((v - low) / span * (len(blocks) - 1)) if span else 0]
        for v in values
    )  # fmt: skip


def to_html(points: Sequence[Point], title: str) -> str:
    """The history as one HTML document: a plot for each count, then the table."""
    plots = "".join(_plot(points, name, said) for name, said in _SERIES)
    rows = [
        f"<tr><td class=n>{p.number}</td><td>{escape(p.started)}</td><td>{escape(p.label)}</td>"
        f"<td>{escape(p.version)}</td><td>{badge('PASSED', 'good') if p.ok else badge('FAILED', 'bad')}</td>"
        f"<td class=n>{p.passed}</td><td class=n>{p.failing}</td><td class=n>{p.known}</td>"
        f"<td class=n>{'' if p.margin is None else f'{p.margin:.3g}'}</td><td class=n>{p.seconds:.1f}</td></tr>"
        for p in reversed(points)
    ]
    names = ("run#", "started", "label", "fp8-oracle", "verdict", "passed#", "failing#", "known#", "margin#", "s#")
    body = (
        f'<header><div class="top"><h1>fp8-oracle history</h1>{theme_button()}</div>'
        f'<p class="verdict">{escape(title)}</p></header><main>{plots}<h2>Runs, newest first</h2>'
        f"{scrolling(table(names, rows, kind='runs'), 'runs')}</main>"
    )
    return page("fp8-oracle: history", body)


def _plot(points: Sequence[Point], name: str, said: str) -> str:
    values = [getattr(p, name) for p in points]
    numbers = [(i, float(v)) for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    if not numbers:
        return ""
    low, high = min(0.0, *(v for _, v in numbers)), max(v for _, v in numbers)
    left, span = 54.0, (high - low) or 1.0
    step = (WIDTH - left - 20) / max(1, len(values) - 1)
    at = [(left + i * step, HEIGHT - 24 - (v - low) / span * (HEIGHT - 44), i, v) for i, v in numbers]
    line = "".join(f"{'L' if n else 'M'}{x:.4g} {y:.4g}" for n, (x, y, _, _) in enumerate(at))
    dots = "".join(
        f'<circle class="dot{"" if points[i].ok else " bad"}" cx="{x:.4g}" cy="{y:.4g}" r="4"><title>'
        f"run {points[i].number}, {escape(points[i].label or points[i].started)}: {v:.6g}</title></circle>"
        for x, y, i, v in at
    )
    return (
        f'<h2>{escape(said)}</h2><svg class="plot" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" '
        f'aria-label="{escape(said)}: {escape(_range(values))}">'
        f'<path class="axis" d="M{left:g} 12V{HEIGHT - 24:g}H{WIDTH:g}" fill="none"/>'
        f'<text x="{left - 6:g}" y="24" text-anchor="end">{high:.4g}</text>'
        f'<text x="{left - 6:g}" y="{HEIGHT - 22:g}" text-anchor="end">{low:.4g}</text>'
        f'<text x="{left:g}" y="{HEIGHT - 6:g}">run {points[0].number}</text>'
        f'<text x="{WIDTH - 4:g}" y="{HEIGHT - 6:g}" text-anchor="end">run {points[-1].number}</text>'
        f'<path class="line" d="{line}"/>{dots}</svg>'
    )


def _range(values: Sequence[float | None]) -> str:
    numbers = [v for v in values if v is not None]
    return f"{values[0] if values[0] is not None else '-'} ... {values[-1] if values[-1] is not None else '-'}" + (
        f" (least {min(numbers):.4g}, most {max(numbers):.4g})" if numbers else ""
    )
