"""The figures, drawn in SVG from numbers that are computed here or were measured; text takes the colour of the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape

import torch

from oracle.bounds import admissible
from oracle.bounds.engines import exact
from oracle.fixtures import files as fixtures
from oracle.routines import cases, get
from oracle.routines.products.contract import ProductContract
from oracle.tensorcore.instructions import instruction
from oracle.truth.gemm import rounded
from oracle.verdict.products import interval_of

CASE = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=33,n=256,k=384/family=randn/seed=1"
BLUE, RED, GREEN, AMBER = "#2a7de1", "#d64545", "#2e9e5b", "#c98a00"  # each readable on white and on near-black


def figure(name: str) -> str:
    """The figure of this name, with its caption."""
    drawing, caption = _FIGURES[name]()
    kind = "drawing chart" if name in _HISTORIES or name == "products" else "drawing"
    return f'<figure class="{kind}">\n{drawing}\n<figcaption>{caption}</figcaption>\n</figure>'


def _interval() -> tuple[str, str]:
    """One element of a real case: exact value, error interval, and the grid values that it admits."""
    contract = get("fp8_gemm_nt")
    assert isinstance(contract, ProductContract)
    product = contract.parts(cases.parse(CASE).inputs())[0].product
    interval, value = interval_of(product, "sm90.promote128.any"), exact(product)
    found = admissible(value, rounded(product, value, torch.bfloat16), interval)
    grid = torch.nextafter(found.high.bfloat16(), torch.tensor(torch.inf).bfloat16()).double()
    step = (grid - found.high).abs()
    counts = torch.where(found.expected != 0, (found.high - found.low) / step, torch.zeros_like(step))
    at = int((counts - 3).abs().argmin())
    row, column = divmod(at, product.N)
    low, high, gap = (float(t[row, column]) for t in (found.low, found.high, step))
    x = float(value.hi[row, column] + value.lo[row, column])
    lo, hi = float(interval.lo[row, column]), float(interval.hi[row, column])
    ticks = [low + gap * i for i in range(-3, round((high - low) / gap) + 4)]
    left, right = ticks[0] - gap, ticks[-1] + gap

    def px(v: float) -> float:
        return 30 + 660 * (v - left) / (right - left)

    parts = [_line(30, 110, 690, 110)]
    for tick in ticks:
        inside = low <= tick <= high
        parts += [_line(px(tick), 102, px(tick), 118), _dot(px(tick), 110, GREEN if inside else RED)]
        parts.append(_text(px(tick), 136, f"{tick:g}", size=11))
    parts += [_rect(px(x + lo), 62, px(x + hi) - px(x + lo), 14, BLUE, 0.35), _line(px(x), 54, px(x), 110, BLUE)]
    parts += [_text(px(x), 46, f"exact {x:.6g}"), _text(px(x + hi) + 8, 73, "exact + [lo, hi]", anchor="start")]
    for edge, to in ((x + lo, low), (x + hi, high)):
        parts.append(_line(px(edge), 76, px(to), 104, BLUE, dash=True))
    parts += [_dot(250, 160, GREEN), _text(262, 164, "admissible", anchor="start")]
    parts += [_dot(380, 160, RED), _text(392, 164, "not admissible", anchor="start")]
    caption = (
        f"Element ({row}, {column}) of <code>{CASE}</code> under <code>sm90.promote128.any</code>, the weakest bound "
        "that is used: the ticks are bfloat16 values. Both ends of the error "
        "interval are rounded once to the grid; every grid value between them is admissible, no other is."
    )
    return _svg(720, 180, "Error interval and admissible values", parts), caption


def _widths() -> tuple[str, str]:
    """Half-widths of the intervals of one real case under several numerics."""
    contract = get("fp8_gemm_nt")
    assert isinstance(contract, ProductContract)
    product = contract.parts(cases.parse(CASE).inputs())[0].product
    value = exact(product)
    half = value.hi.abs().median() * 2.0**-9  # half a unit in the last place of a bfloat16 of that size, at most
    rows = []
    for name in ("ieee32.any", "sm90.promote128", "sm90.promote128.any"):
        interval = interval_of(product, name)
        rows.append((name, float(((interval.hi - interval.lo) / 2).median()), interval.name))
    rows.append(("bfloat16 store", float(half), "half a unit in the last place"))
    lows = [torch.tensor(width).log2().item() for _, width, _ in rows]
    start, end = int(min(lows)) - 2, int(max(lows)) + 1
    parts = []
    for i, ((name, width, said), log) in enumerate(zip(rows, lows, strict=True)):
        y, length = 18 + 36 * i, 400 * (log - start) / (end - start)
        colour = GREEN if name == "bfloat16 store" else BLUE
        parts += [_text(186, y + 15, name, anchor="end"), _rect(196, y, length, 22, colour, 0.6)]
        parts.append(_text(202 + length, y + 15, f"{width:.2g}", anchor="start"))
        parts.append(f"<title>{escape(said)}</title>")
    caption = (
        f"Median half-width of the interval over the elements of <code>{CASE}</code> (logarithmic), beside half a unit "
        "in the last place of the output for the median magnitude. A narrower interval sees smaller faults."
    )
    return _svg(720, 18 + 36 * len(rows), "Widths of intervals", parts), caption


def _fused() -> tuple[str, str]:
    """Alignment of one fused step: which bits of each addend survive."""
    t = instruction("sm90.wgmma.fp8").align_bits
    assert t is not None
    products = ((3, 0b1101001), (0, 0b1111111), (-4, 0b1011011), (-9, 0b1110111), (-13, 0b1100101))
    top = max(exponent for exponent, _ in products)
    cell, left, parts = 22, 150, []
    for row, (exponent, significand) in enumerate(products):
        y = 34 + 30 * row
        parts.append(_text(left - 12, y + 15, f"product of exponent {exponent}", anchor="end", size=12))
        for bit, digit in enumerate(f"{significand:07b}"):
            place = top - exponent + bit
            kept = place <= t
            if place > t + 6:
                continue
            x = left + cell * place
            parts += [_rect(x, y, cell - 2, 20, BLUE if kept else RED, 0.55 if kept else 0.25)]
            parts.append(_text(x + cell / 2 - 1, y + 15, digit, size=12))
    edge = left + cell * (t + 1) - 1
    parts += [_line(edge, 14, edge, 40 + 30 * len(products), RED, dash=True)]
    parts.append(_text(edge - 6, 24, f"last kept bit: 2^({top}-{t})", anchor="end", size=12))
    parts.append(_text(edge + 6, 24, "lost, toward zero", anchor="start", size=12))
    caption = (
        f"One fused step of <code>sm90.wgmma.fp8</code>: every addend is shifted to the largest exponent and cut "
        f"{t} bits below its leading place, then the sum is exact. The last product is lost as a whole."
    )
    return _svg(left + cell * (t + 8), 44 + 30 * len(products), "Alignment of a fused step", parts), caption


def _schedule() -> tuple[str, str]:
    """A promoted schedule along K."""
    parts, step, left = [], 13.5, 70
    for block in range(3):
        x0 = left + block * (13 + 4 * step * 3.2)
        for chain in range(4):
            parts.append(_rect(x0 + chain * step * 3.2, 30, step * 3.2 - 4, 28, BLUE, 0.3 + 0.15 * chain))
            parts.append(_text(x0 + chain * step * 3.2 + 19, 49, "32", size=12))
        middle = x0 + 4 * step * 1.6
        parts += [_text(middle, 20, f"chain of block {block}, from c = 0", size=12), _arrow(middle, 62, middle, 96)]
        parts.append(_text(middle + 8, 83, f"× s_a[m,{block}] s_b[n,{block}]", anchor="start", size=12))
        parts += [_rect(x0, 100, 4 * step * 3.2 - 4, 26, GREEN, 0.3)]
        parts.append(_text(middle, 118, f"sum = fma(s_a s_b, c, {'sum' if block else '0'})", size=11))
    parts += [_text(left - 10, y, words, anchor="end", size=12) for y, words in ((49, "14 bits"), (118, "float32"))]
    parts += [_arrow(645, 113, 672, 113), _text(676, 118, "store", anchor="start", size=12)]
    caption = (
        "<code>sm90.promote128</code> over K = 384: four instructions of 32 products form a chain in the narrow "
        "accumulator; each finished chain joins a float32 sum with its scales; one rounding stores the result."
    )
    return _svg(720, 140, "Promotion every 128", parts), caption


def _judgement() -> tuple[str, str]:
    """The order of judgement."""
    steps = (
        ("bits equal an admitted schedule's?", "PASSED: proved right", GREEN),
        ("bits equal a known wrong accumulation's?", "FAILED: proved wrong", RED),
        ("every element inside its interval?", "PASSED: admissible", GREEN),
    )
    parts = []
    for i, (question, answer, colour) in enumerate(steps):
        y = 12 + 58 * i
        parts += [_rect(20, y, 320, 36, BLUE, 0.18), _text(180, y + 23, question, size=13)]
        parts += [_arrow(340, y + 18, 440, y + 18), _text(390, y + 12, "yes", size=12)]
        parts += [_rect(444, y, 230, 36, colour, 0.25), _text(559, y + 23, answer, size=13)]
        parts += [_arrow(180, y + 36, 180, y + 56), _text(194, y + 51, "no", anchor="start", size=12)]
    parts += [_rect(20, 186, 320, 36, RED, 0.25), _rect(444, 186, 230, 36, AMBER, 0.25)]
    parts.append(_text(180, 209, "FAILED, with the worst element and the pattern", size=13))
    parts.append(_text(559, 201, "a pass on inputs that show nothing", size=12))
    parts += [_text(559, 216, "becomes MISTRUSTED", size=12), _arrow(559, 164, 559, 184)]
    caption = "The order of judgement for an output made of scaled products."
    return _svg(720, 232, "The order of judgement", parts), caption


MEASURED = "measurements"


def base(timings: Mapping[str, float]) -> float | None:
    """The time that ratios are to: of the bare library calls, or of a copy of the same bytes."""
    return next((us for name, us in reversed(timings.items()) if name.startswith(("bare", "copy"))), None)


def runs() -> list[dict[str, object]]:
    """The records of all runs of ``tests/hardware/measure.py`` that are kept, oldest first."""
    return [json.loads(path.read_text()) for path in sorted((fixtures.folder() / MEASURED / "history").glob("*.json"))]


def _history(title: str, lines: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Ratios of some candidates, ``label: (group of timings, candidate)``, in every run that has them."""
    found = runs()
    series = {}
    for label, (group, name) in lines.items():
        timings = [run["timings"].get(group, {}) for run in found]  # type: ignore[attr-defined]
        series[label] = [(i, t[name] / base(t)) for i, t in enumerate(timings) if name in t and base(t)]
    ticks = [(float(i), f"run {i + 1}") for i in range(len(found))]
    return _ratios(title, series, ticks), f"{title}."


def _products() -> tuple[str, str]:
    """Block-scaled products by their rows, as ratios to DeepGEMM."""
    timings = json.loads((fixtures.folder() / MEASURED / "h200_products.json").read_text())["timings"]
    groups = {int(name.split("M=")[1].split()[0]): t for name, t in timings.items() if ".product M=" in name}
    names = {
        "layer's Triton": "this layer",
        "SGLang Triton, its default tile, row-major": "SGLang, default tile",
        "SGLang Triton, tiles tuned for N=4608, row-major": "SGLang, tuned tile",
    }
    places = {m: i for i, m in enumerate(sorted(groups))}
    series = {said: [(places[m], t[name] / base(t)) for m, t in groups.items()] for name, said in names.items()}
    title = "Triton products of 4096 columns and K = 7168 on an H200, time as a ratio to DeepGEMM's, by rows"
    ticks = [(float(i), str(m)) for m, i in places.items()]
    return _ratios(title, series, ticks), f"{title}. Each line is one kernel; 1 is DeepGEMM."


def _ratios(title: str, series: Mapping[str, list[tuple[int, float]]], ticks: Sequence[tuple[float, str]]) -> str:
    """Lines of ratios over places, from 0; the line of 1 is drawn through, and each line is named at its end."""
    left, right, top, bottom = 34.0, 268.0, 14.0, 190.0
    most = max(1.5, *(value for points in series.values() for _, value in points))

    def at(place: float, value: float) -> tuple[float, float]:
        return left + (right - left) * place / max(1.0, ticks[-1][0]), bottom - (bottom - top) * value / most

    parts = []
    for value in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        if value <= most:
            y = at(0, value)[1]
            faint = "" if value in (0.0, 1.0) else ' stroke-opacity="0.25"'
            parts.append(f'<path d="M{left:g} {y:.1f}H{right:g}" stroke="currentColor"{faint}/>')
            parts.append(_text(left - 6, y + 4, f"{value:g}", anchor="end", size=12))
    parts += [_text(at(place, 0)[0], bottom + 18, said, size=12) for place, said in ticks]
    ends = sorted((at(*points[-1])[1], label) for label, points in series.items() if points)
    free, placed = -1.0, {}
    for y, label in ends:  # names that would lie on each other move down
        placed[label] = free = max(y, free + 15)
    over = max(0.0, free - bottom)
    for (label, points), (colour, dash) in zip(series.items(), _PENS, strict=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        look = f'fill="none" stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")
        parts.append(f'<polyline points="{path}" {look}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in (at(*p) for p in points)]
        said = f"{label} {points[-1][1]:.2f}"
        parts.append(_text(right + 10, placed[label] - over + 4, said, anchor="start", size=12))
        x, y = at(*points[-1])
        parts.append(f'<path d="M{x:.1f} {y:.1f}L{right + 8:.1f} {placed[label] - over:.1f}" stroke="{colour}"/>')
    return _svg(420, 216, title, parts)


_PENS = ((BLUE, ""), (RED, "7 3"), (GREEN, "2 3"), (AMBER, "9 3 2 3"), ("#8a63d2", "4 4"))
"""A colour and a dash for each line of a chart, so that colour alone tells nothing."""
_ROWS = (16, 64, 512, 4096)
_SHAPE = "N=4096 K=7168"
_LINEAR = "Linear layer, bf16 to bf16, 4096 columns, K = 7168"
_HISTORIES = {
    "eager": (f"{_LINEAR}, called eagerly, by rows",
              {f"{m} rows": (f"device_us.linear M={m} {_SHAPE}", "layer") for m in _ROWS}),
    "graph": (f"{_LINEAR}, replayed from a CUDA graph, by rows",
              {f"{m} rows": (f"graph_us.linear M={m} {_SHAPE}", "layer") for m in _ROWS}),
    "host": ("Host time of a call",
             {"product": ("host_us.fp8_gemm_nt", "layer"), "16 rows": ("host_us.switch M=16", "layer"),
              "64 rows": ("host_us.switch M=64", "layer")}),
    "quantiser": ("Quantisers of 4096 x 7168, device time as a ratio to a copy of the same bytes",
                  {name: ("device_us.quantiser 4096x7168", f"layer {name}")
                   for name in ("row-major", "TMA-aligned", "packed", "per token", "per tensor")}),
}  # fmt: skip  # a table, one row a line

_FIGURES: dict[str, Callable[[], tuple[str, str]]] = {
    "interval": _interval,
    "widths": _widths,
    "fused": _fused,
    "schedule": _schedule,
    "judgement": _judgement,
    "products": _products,
    **{name: partial(_history, *of) for name, of in _HISTORIES.items()},
}


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {width:g} {height:g}"'
    head = f'<svg {box} role="img" aria-label="{escape(label)}" xmlns="http://www.w3.org/2000/svg">'
    return "\n".join([head, *parts, "</svg>"])


def _text(x: float, y: float, words: str, *, anchor: str = "middle", size: int = 13) -> str:
    look = f'text-anchor="{anchor}" font-size="{size}" fill="currentColor"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "currentColor", *, dash: bool = False) -> str:
    look = f'stroke="{colour}" stroke-width="1.4"' + (' stroke-dasharray="4 3"' if dash else "")
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {look}/>'


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Down or to the right."""
    sides = ((x2 - 4, y2 - 7), (x2 + 4, y2 - 7)) if y2 > y1 else ((x2 - 7, y2 - 4), (x2 - 7, y2 + 4))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in ((x2, y2), *sides))
    return _line(x1, y1, x2, y2) + f'<polygon points="{points}" fill="currentColor"/>'


def _rect(x: float, y: float, width: float, height: float, colour: str, opacity: float) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" rx="3"'
    return f'<rect {place} fill="{colour}" fill-opacity="{opacity:.2f}" stroke="{colour}"/>'


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>'
