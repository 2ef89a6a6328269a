"""Pictures of one failing output, from its :class:`~oracle.verdict.heatmap.Evidence` alone: heat map, histogram, bits;
and a series of figures as a line.

The heat map is a palette PNG with one pixel for each cell, inside an SVG that adds lines
between tiles or scale blocks, dashed lines where an expert begins, a ring around the worst element.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from html import escape
from itertools import groupby
from math import prod

from oracle.verdict.heatmap import COLOURS, DARK, LEVELS, MEANINGS, OPEN, SHORT, Element, Evidence

WIDTH = 640.0  # units of the drawing
PLOT = (400.0, 130.0)  # of a series
ENDS = 20  # characters of the texts under it
CLOSEST = 6.0  # least distance of two lines, in units; closer ones would hide the picture


def heat_map(seen: Evidence) -> str:
    """The heat map as an inline SVG with a description for screen readers."""
    rows, columns = _extent(seen)
    height = WIDTH / min(4.0, max(0.6, columns / rows))
    lines = [f"M0 {y:.4g}H{WIDTH:g}" for y in _lines(rows, seen.tile[0], height)]
    lines += [f"M{x:.4g} 0V{height:.4g}" for x in _lines(columns, seen.tile[1], WIDTH)]
    bands = [f"M0 {row / rows * height:.4g}H{WIDTH:g}" for row in seen.bands if row]
    paths = "".join(
        f'<path class="{name}" d="{"".join(path)}"/>' for name, path in (("tile", lines), ("band", bands)) if path
    )
    if seen.elements:
        index, r = seen.elements[0].index, 0
        for i, n in list(zip(index, seen.shape, strict=True))[:-1]:
            r = r * n + i
        c = index[-1] if index else 0
        x, y = (c + 0.5) / columns * WIDTH, (r + 0.5) / rows * height
        paths += f'<circle class="worst" cx="{x:.4g}" cy="{y:.4g}" r="9"/>'
    text = f"Heat map of {seen.output} {list(seen.shape)}: red cells lie outside the admissible interval"
    return (
        f'<svg class="heat" viewBox="-10 -10 {WIDTH + 20:g} {height + 20:.4g}" role="img" aria-label="{escape(text)}">'
        f"{_image(seen.levels, height, dark=False)}{_image(seen.levels, height, dark=True)}{paths}</svg>"
    )


def caption(seen: Evidence) -> str:
    """What the lines and cells of the heat map are, as HTML."""
    rows, columns = _extent(seen)
    lines = [f"{escape(seen.output)} {list(seen.shape)} {escape(seen.dtype)}; rows run down, columns to the right"]
    if max(seen.cell) > 1:
        lines.append(f"a cell is the worst of {seen.cell[0]}&times;{seen.cell[1]} elements")
    spaced = [
        f"{spacing} {what}"
        for spacing, extent, what in zip(seen.tile, (rows, columns), ("rows", "columns"), strict=True)
        if _lines(extent, spacing, WIDTH)
    ]
    if spaced:
        lines.append(f"a line every {' and every '.join(spaced)}")
    if seen.bands:
        lines.append("dashed lines where an expert begins")
    return "; ".join([*lines, "ring: the worst element"])


def histogram(seen: Evidence) -> str:
    """How many elements have each level, as bars; empty levels at both ends are left out."""
    filled = [i for i, n in enumerate(seen.histogram) if n]
    if not filled:
        return ""
    rows = [(SHORT[i], seen.histogram[i], COLOURS[i]) for i in range(filled[0], filled[-1] + 1)]
    return bars(rows, "elements by distance from the expected value")


def bars(rows: Sequence[tuple[str, int, str]], aria_label: str) -> str:
    """A list of label, count and colour as horizontal bars."""
    most = max(1, *(n for _, n, _ in rows))
    widths = [max(0.5, 100 * n / most) if n else 0 for _, n, _ in rows]
    lines = "".join(
        f'<li><span>{escape(label)}</span><span class="bar">'
        f'<i style="width:{width:.3g}%;background:{_themed(colour)}"></i></span><b>{n}</b></li>'
        for (label, n, colour), width in zip(rows, widths, strict=True)
    )
    return f'<ol class="bars" aria-label="{escape(aria_label)}">{lines}</ol>'


def series(
    title: str,
    values: Sequence[float | None],
    labels: Sequence[str],
    good: Sequence[bool],
    ends: tuple[str, str],
    *,
    counts: bool,
    said: str = "",
) -> str:
    """A line of values from 0 to the largest, at least to 1, as a figure; "" without a finite value.

    ``labels`` say what each value is of; one that is not ``good`` is a diamond. ``ends`` stand under the first and the
    last. ``counts``: only levels that are integers are written. ``said`` are the values in words, for screen readers.
    """
    numbers = [(i, float(v)) for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    if not numbers:
        return ""
    high = max(1.0, *(v for _, v in numbers))
    left, right, top, bottom = 54.0, PLOT[0] - 48, 18.0, PLOT[1] - 24
    step = (right - left) / max(1, len(values) - 1)
    at = [(left + i * step, bottom - max(0.0, v) / high * (bottom - top), i, v) for i, v in numbers]
    line = "".join(f"{'L' if n else 'M'}{x:.4g} {y:.4g}" for n, (x, y, _, _) in enumerate(at))
    dots = "".join(f"{_dot(good[i], x, y)}<title>{escape(labels[i])}: {v:.6g}</title></path>" for x, y, i, v in at)
    levels = "".join(
        f'<path class="axis" d="M{left:g} {y:g}H{right:g}"/>'
        f'<text x="{left - 8:g}" y="{y + 4:g}" text-anchor="end">{_short(v)}</text>'
        for y, v in ((top, high), ((top + bottom) / 2, high / 2), (bottom, 0.0))
        if not counts or v == int(v)
    )
    x, y, _, last = at[-1]
    first, final = (end if len(end) <= ENDS else f"…{end[1 - ENDS :]}" for end in ends)
    below = f'<text x="{left:g}" y="{PLOT[1] - 6:g}">{escape(first)}</text>' + (
        f'<text x="{right:g}" y="{PLOT[1] - 6:g}" text-anchor="end">{escape(final)}</text>' if len(values) > 1 else ""
    )
    spoken = f"{title}: {said}" if said else title
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg class="plot" viewBox="0 0 {PLOT[0]:g} {PLOT[1]:g}" '
        f'role="img" aria-label="{escape(spoken)}">{levels}{below}'
        f'<path class="line" d="{line}"/>{dots}<text class="last" x="{x + 8:.4g}" y="{y + 4:.4g}">{_short(last)}</text>'
        "</svg></figure>"
    )


def _short(value: float) -> str:
    """A number in at most seven characters."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.2g}"


def _dot(good: bool, x: float, y: float) -> str:
    """A disc, or a diamond for what is not good; the element is left open for its title."""
    if good:
        return f'<path class="dot" d="M{x - 4:.4g} {y:.4g}a4 4 0 1 0 8 0a4 4 0 1 0-8 0z">'
    return f'<path class="dot bad" d="M{x:.4g} {y - 6:.4g}l6 6-6 6-6-6z">'


def bits(element: Element, fields: tuple[int, int, int]) -> str:
    """The bits of the actual and the expected value, sign, exponent and fraction apart, differing ones marked."""
    width = sum(fields)
    actual, due = (f"{int(code, 16):0{width}b}" for code in (element.bits, element.expected_bits))
    return f'<code class="bits">{_row(actual, due, fields)}<br>{_row(due, actual, fields)}</code>'


def flips(seen: Evidence) -> str:
    """In which share of the failing elements each bit is wrong, highest bit first."""
    if not seen.flips:
        return ""
    ends = (seen.fields[0], seen.fields[0] + seen.fields[1])
    names = ["sign" if i < ends[0] else "exponent" if i < ends[1] else "fraction" for i in range(len(seen.flips))]
    if seen.fields[:2] == (0, 0):
        names = ["bit"] * len(names)
    last = len(seen.flips) - 1
    shown = "".join(
        f'<i class="{name}" style="--h:{100 * share:.3g}%" '
        f'title="bit {last - i} ({name}): wrong in {100 * share:.3g}%"></i>'
        for i, (share, name) in enumerate(zip(seen.flips, names, strict=True))
    )
    text = "share of failing elements in which each bit differs"
    return f'<div class="flips" role="img" aria-label="{text}">{shown}</div>'


def scale() -> str:
    """The legend of the colours, as HTML list items."""
    pairs = zip(COLOURS, MEANINGS, strict=True)
    return "".join(f'<li><i style="background:{_themed(colour)}"></i>{escape(label)}</li>' for colour, label in pairs)


def _themed(colour: str) -> str:
    """A colour of CSS, another one on dark paper where it needs one."""
    return f"light-dark({colour},{DARK[colour]})" if colour in DARK else colour


def _image(levels: Sequence[str], height: float, *, dark: bool) -> str:
    """The cells; page.css shows those in the colours of dark paper there, over the others."""
    theme = ' class="dark"' if dark else ""
    palette = [DARK.get(colour, colour) if dark else colour for colour in COLOURS]
    return (
        f'<image{theme} width="{WIDTH:g}" height="{height:.4g}" preserveAspectRatio="none" '
        f'href="{_png(levels, palette)}"/>'
    )


def _png(levels: Sequence[str], colours: Sequence[str]) -> str:
    """A palette PNG, one pixel for each level, as a data URI."""
    index = {digit: i for i, digit in enumerate(LEVELS + OPEN)}
    data = b"".join(b"\0" + bytes(index[digit] for digit in row) for row in levels)
    palette = b"".join(bytes.fromhex(colour[1:]) for colour in colours)
    head = struct.pack(">IIBBBBB", len(levels[0]), len(levels), 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"PLTE", palette), (b"IDAT", zlib.compress(data, 9)), (b"IEND", b""))
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _extent(seen: Evidence) -> tuple[int, int]:
    """Rows and columns of the output seen as a matrix."""
    columns = max(1, (1, *seen.shape)[-1])
    return max(1, prod(seen.shape) // columns), columns


def _lines(extent: int, spacing: int, size: float) -> list[float]:
    if spacing <= 0 or spacing / extent * size < CLOSEST:
        return []
    return [at / extent * size for at in range(spacing, extent, spacing)]


def _row(shown: str, other: str, fields: tuple[int, int, int]) -> str:
    starts = (0, fields[0], fields[0] + fields[1])
    names = ["s" if i < starts[1] else "e" if i < starts[2] else "f" for i in range(len(shown))]
    parts = []
    for name, of_field in groupby(zip(names, shown, other, strict=True), key=lambda bit: bit[0]):
        runs = [
            "".join(("<u>%s</u>" if differs else "%s") % "".join(b[1] for b in run))
            for differs, run in groupby(of_field, key=lambda bit: bit[1] != bit[2])
        ]
        parts.append(f'<span class="{name}">{"".join(runs)}</span>')
    return "".join(parts)
