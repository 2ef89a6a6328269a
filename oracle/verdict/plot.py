"""Pictures of outputs, drawn with matplotlib (the extra ``plot``), which is loaded when the first one is asked for.

Of an output beside its admissible values (:class:`Picture`):

    heat map    rows x columns, at most ``GRID`` cells a side; a cell has the level of its worst element, as in
                :mod:`oracle.verdict.heatmap`
    histogram   elements by their error in ulps, ``|actual - expected|`` over the unit in the last place of the output's
                dtype at ``expected``, the right value correctly rounded; beside it the largest error that the interval
                of each element admits

NaN and infinities where a number is due, and elements of which nothing is said, are drawn as categories of their own.
Of a diagnosis (:class:`Place`): where elements fail, and by which factor each K block enters each row.

Colours run from blue (admissible) over yellow to dark red (not), which readers with any colour vision tell apart.
Not covered: judging; no picture decides anything.

Source: derived in this file.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from oracle.bounds.interval import Admissible
from oracle.errors import DtypeError, OptionError
from oracle.numbers.formats import Format, of_dtype
from oracle.numbers.rounding import power_of_two
from oracle.verdict import heatmap
from oracle.verdict.heatmap import (
    BAND,
    COLOURS,
    DARK,
    FIRST_OUTSIDE,
    LEVELS,
    NO_NUMBER,
    OPEN,
    SHORT,
    Evidence,
    Piece,
    matrix,
)
from oracle.verdict.ranges import Range, values_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRID = 512  # cells along each axis of a heat map, at most
ULPS = (0.0, *(2.0**k for k in range(25)))  # upper ends of the bins of the histogram; the last bin is what lies beyond
LINES = 40  # tiles along an axis above which their borders are not drawn
RINGED = 16  # failing cells, at most, that are ringed, since a single one is too small to be seen
BARS = 6  # explanations shown
FORMATS = ("png", "svg")
NEEDED = "a picture needs matplotlib, which is not installed: pip install 'fp8-oracle[plot]'"

INK, PAPER, FAINT = "#1a1d20", "#ffffff", "#d5dbdf"
DARK_INK, DARK_PAPER, DARK_FAINT = "#e7eaec", "#14171a", "#363e45"
INSIDE, OUTSIDE = "#3f86b5", "#d1372b"
LOST, RIGHT, DOUBLED = "#b35806", "#f7f7f7", "#542788"  # the factor of a K block: 0, 1, 2 and more


@dataclass(frozen=True, eq=False)
class Picture:
    """One output beside its admissible values.

    ``levels`` int8 ``[R, C]``, -1 where nothing is said, each for ``cell`` elements; ``counts`` the elements of every
    level, those of which nothing is said first. By the bins of ``ULPS``, int64: ``inside`` and ``outside`` the elements
    with such an error, ``admitted`` those that may have it; None of outputs that have no ulp (integers), and where the
    values are gone. ``tile``: the spacing of lines in elements, 0 for none.
    """

    output: str
    dtype: str
    shape: tuple[int, ...]
    cell: tuple[int, int]
    levels: np.ndarray
    counts: tuple[int, ...]
    inside: np.ndarray | None = None
    outside: np.ndarray | None = None
    admitted: np.ndarray | None = None
    tile: tuple[int, int] = (0, 0)

    @property
    def failing(self) -> int:
        """How many elements are not admissible."""
        return sum(self.counts[1 + FIRST_OUTSIDE :])


@dataclass(frozen=True, eq=False)
class Place:
    """Where one output fails: ``share`` ``[R, C]``, the part of the elements of each cell that do."""

    output: str
    shape: tuple[int, ...]
    cell: tuple[int, int]
    share: np.ndarray
    tile: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class Blocks:
    """The factor ``[R, B]`` by which each K block of ``length`` products enters rows of an output (1 where it is right,
    NaN where it is not determined); a row of it stands for ``rows`` rows, by the factor farthest from 1."""

    factor: np.ndarray
    rows: int
    length: int


# --- counting -----------------------------------------------------------------------------------------------


def picture(actual: Tensor, due: Range, expected: Tensor, *, output: str) -> Picture:
    """``actual`` beside its admissible values ``due`` and its ``expected`` values (its shape and dtype; on the CPU)."""
    try:
        fmt = of_dtype(actual.dtype)
    except DtypeError:
        fmt = None
    free = due.free.to(torch.bool).expand(due.low.shape)
    whole = [matrix(x) for x in (actual, due.low, due.high, free, expected)]
    levels, bins = list[Tensor](), torch.zeros((3, len(ULPS) + 1), dtype=torch.int64, device="cpu")
    step = max(1, BAND // max(1, whole[0].shape[1]))
    for start in range(0, max(1, whole[0].shape[0]), step):
        own, low, high, hidden, middle = (x[start : start + step] for x in whole)
        value, low, high, middle = (values_of(x) for x in (own, low, high, middle))
        nan_due = torch.isnan(low) & torch.isnan(high)
        good = torch.where(nan_due, torch.isnan(value), (low <= value) & (value <= high)) | hidden
        if fmt is None:
            level = torch.where(good, 0, NO_NUMBER).to(torch.int8).masked_fill(hidden, -1)
        else:
            sets = Admissible(low, high, middle)
            ratio = heatmap.ratio_of(value, sets).clamp(max=1.0).masked_fill(hidden, -1.0)
            level = heatmap.levels_of(Piece(own, sets, ratio, ~good), fmt)[0]
            _count(bins, value, sets, level, fmt)
        levels.append(level)
    level = torch.cat(levels)
    counts = torch.bincount((level + 1).flatten(), minlength=len(LEVELS) + 1).tolist()
    cell, worst = heatmap.cells(level, GRID)
    known = (None, None, None) if fmt is None else tuple(bins.numpy())
    dtype = str(actual.dtype).removeprefix("torch.")
    return Picture(output, dtype, tuple(actual.shape), cell, worst.numpy(), tuple(counts), *known)


def _count(bins: Tensor, value: Tensor, sets: Admissible, level: Tensor, fmt: Format) -> None:
    """Add the errors of a few rows to the bins ``[inside, outside, admitted]``."""
    low, high, middle = sets.low, sets.high, sets.expected
    finite = torch.where(torch.isfinite(middle), middle, 0.0)
    exponent = torch.where(finite == 0, fmt.emin, (torch.frexp(finite)[1] - 1).clamp(min=fmt.emin))
    per_ulp = power_of_two(fmt.fraction_bits - exponent)
    error = torch.where(value == middle, 0.0, (value - middle).abs() * per_ulp)
    room = torch.maximum(high - middle, middle - low) * per_ulp
    edges = torch.tensor(ULPS, dtype=torch.float64, device="cpu")
    numbers = ~torch.isnan(middle)
    groups = (
        (error, numbers & (level >= 0) & (level < FIRST_OUTSIDE)),
        (error, numbers & (level >= FIRST_OUTSIDE) & (level != NO_NUMBER)),
        (torch.nan_to_num(room, nan=0.0, posinf=torch.inf), numbers & (level >= 0)),
    )
    for i, (measured, which) in enumerate(groups):
        bins[i] += torch.bincount(torch.bucketize(measured[which], edges), minlength=len(ULPS) + 1)


def of_evidence(seen: Evidence) -> Picture:
    """What is left of a failure when its tensors are gone."""
    index = {digit: i - 1 for i, digit in enumerate(OPEN + LEVELS)}
    levels = np.array([[index[digit] for digit in row] for row in seen.levels], dtype=np.int8)
    total = int(np.prod(seen.shape, dtype=np.int64))
    counts = (total - sum(seen.histogram), *seen.histogram)
    return Picture(seen.output, seen.dtype, seen.shape, seen.cell, levels, counts, tile=seen.tile)


def place(bad: Tensor, *, output: str, tile: tuple[int, int] = (0, 0)) -> Place:
    """Where the elements of ``bad`` (bool, any rank) are."""
    whole = matrix(bad).to(torch.float32)
    (height, width), _ = heatmap.cells(whole, GRID)
    share = torch.nn.functional.avg_pool2d(whole[None, None], (height, width), ceil_mode=True)[0, 0]
    return Place(output, tuple(bad.shape), (height, width), share.cpu().numpy(), tile)


def blocks(factor: Tensor, length: int) -> Blocks:
    """The ``factor [M, B]`` (float64) of the rows of an output, NaN where none is known."""
    rows = max(1, -(-len(factor) // GRID))
    cut = [factor[i : i + rows] for i in range(0, len(factor), rows)]
    away = [torch.nan_to_num((part - 1).abs(), nan=-1.0).argmax(dim=0, keepdim=True) for part in cut]
    farthest = torch.cat([part.gather(0, at) for part, at in zip(cut, away, strict=True)])
    return Blocks(farthest.cpu().numpy(), rows, length)


# --- drawing ------------------------------------------------------------------------------------------------


def draw(pictures: Sequence[Picture], heading: str, *, path: str | os.PathLike[str] | None, dark: bool) -> Figure:
    """A heat map and a histogram of every picture, under ``heading``."""
    with _figure(heading, 3.9 * len(pictures), path, dark) as figure:
        grid = figure.subplots(len(pictures), 2, squeeze=False, width_ratios=(1, 1))
        for row, seen in zip(grid, pictures, strict=True):
            _heat_map(row[0], seen, dark)
            _histogram(row[1], seen, dark)
    return figure


def draw_diagnosis(
    places: Sequence[Place],
    factors: Blocks | None,
    bars: Sequence[tuple[str, float, str]],
    findings: Sequence[str],
    heading: str,
    *,
    path: str | os.PathLike[str] | None,
    dark: bool,
) -> Figure:
    """Where an output fails, by which factors its K blocks enter, and how much each explanation reproduces.

    bars : each explanation, the part of the failing elements that it reproduces, and what is said of that.
    """
    wide = len(places) + (factors is not None)
    wrapped = [line for text in findings for line in textwrap.wrap(f"• {text}", 165, subsequent_indent="  ")]
    with _figure(heading, 4.2 + 0.42 * max(1, min(BARS, len(bars))) + 0.17 * len(wrapped), path, dark) as figure:
        ratios = (3.4, 0.5 + 0.42 * max(1, min(BARS, len(bars))))
        top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=ratios)[:, 0]
        axes = top.subplots(1, max(1, wide), squeeze=False)[0]
        for own, seen in zip(axes, places, strict=False):
            _failing(own, seen, dark)
        if factors is not None:
            _factors(axes[-1], factors, dark)
        if not wide:
            axes[0].set_axis_off()
        _bars(bottom.subplots(), bars, dark)
        if wrapped:
            figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=8, parse_math=False)
    return figure


@contextmanager
def _figure(heading: str, height: float, path: str | os.PathLike[str] | None, dark: bool) -> Iterator[Figure]:
    """A figure to draw in, titled ``heading``; it belongs to no window, and is written to ``path`` at the end.

    Raises
    ------
    OptionError
        matplotlib is not installed, or ``path`` is none of ``FORMATS`` or cannot be written.
    """
    if not isinstance(path, (str, os.PathLike, type(None))):
        raise OptionError(f"path is of type {type(path).__name__}; pass a str or a Path, or leave it out")
    target = None if path is None else Path(path)
    if target is not None and target.suffix[1:].lower() not in FORMATS:
        raise OptionError(f"path={str(target)!r} ends in neither .png nor .svg; these are the formats of a picture")
    if target is not None and not target.parent.is_dir():
        raise OptionError(f"path={str(target)!r}: the folder {str(target.parent)!r} does not exist; create it first")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError(NEEDED) from None
    ink, paper = _ink(dark), DARK_PAPER if dark else PAPER
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    look: dict[Any, Any] = {
        **dict.fromkeys(inked, ink),
        **dict.fromkeys(papers, paper),
        "font.family": "sans-serif",
        "font.size": 9.0,
        "text.usetex": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "fp8-oracle",
    }

    class Shown(Figure):
        """A figure that a notebook shows by itself."""

        def _repr_svg_(self) -> str:
            with matplotlib.rc_context(look):
                return _written(self, "svg").decode()

    with matplotlib.rc_context(look):
        figure = Shown(figsize=(11.0, height + 0.6), dpi=150, layout="constrained")
        title = textwrap.wrap(heading, 150, max_lines=3, placeholder=" ...")
        figure.suptitle("\n".join(title), x=0.01, ha="left", fontsize=9, parse_math=False)
        yield figure
        if target is not None:
            content = _written(figure, target.suffix[1:].lower())
            try:
                target.write_bytes(content)
            except OSError as error:
                raise OptionError(f"path={str(target)!r} cannot be written: {error.strerror}") from None


def _written(figure: Figure, form: str) -> bytes:
    """The bytes of a file of this format, the same for the same picture."""
    content = io.BytesIO()
    figure.savefig(content, format=form, metadata={"Date": None} if form == "svg" else None)
    return content.getvalue()


def _rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    columns = shape[-1] if shape else 1
    return int(np.prod(shape[:-1], dtype=np.int64)), columns


def _grid(axes: Axes, seen: Picture | Place, dark: bool) -> dict[str, Any]:
    """Axes in elements, lines between tiles, and how ``imshow`` lays an array of cells over them."""
    rows, columns = _rows_and_columns(seen.shape)
    (height, width), (down, across) = seen.cell, (seen.share if isinstance(seen, Place) else seen.levels).shape
    binned = "" if seen.cell == (1, 1) else f"; a cell is {height} x {width} elements, by "
    by = "the share that fails" if isinstance(seen, Place) else "the worst"
    axes.set_title(f"{seen.output} {list(seen.shape)}{binned + by if binned else ''}", fontsize=9, parse_math=False)
    axes.set_xlabel("column (element)")
    axes.set_ylabel("row (element)" if len(seen.shape) < 3 else "row (element; leading axes folded)")
    for lines, extent, spacing in ((axes.axhline, rows, seen.tile[0]), (axes.axvline, columns, seen.tile[1])):
        if spacing and extent // spacing <= LINES:
            for at in range(spacing, extent, spacing):
                lines(at - 0.5, color=DARK_FAINT if dark else FAINT, linewidth=0.6)
    if len(seen.shape) < 2:
        axes.set_yticks([])
        axes.set_xlabel("element")
        axes.set_ylabel("")
    ends = (-0.5, across * width - 0.5, down * height - 0.5, -0.5)
    axes.locator_params(integer=True, nbins=6) if len(seen.shape) > 1 else axes.locator_params("x", integer=True)
    return {"extent": ends, "aspect": "auto", "interpolation": "none"}


def _limit(axes: Axes, seen: Picture | Place) -> None:
    """The extent of the output: the last cells may reach beyond it."""
    rows, columns = _rows_and_columns(seen.shape)
    axes.set_xlim(-0.5, max(columns, 1) - 0.5)
    axes.set_ylim(max(rows, 1) - 0.5, -0.5)


def _ring(axes: Axes, cell: tuple[int, int], failing: np.ndarray, colours: Sequence[str], dark: bool) -> None:
    """Rings around failing cells with a dot of their colour, where they are few; ``failing`` holds the number of the
    colour, 0 for none."""
    at = np.argwhere(failing)
    if 0 < len(at) <= RINGED:
        y, x = (at * cell + (np.array(cell) - 1) / 2).T
        dots = [colours[int(i)] for i in failing[failing > 0]]
        axes.scatter(x, y, s=14, c=dots, marker="s", zorder=3, clip_on=False)
        axes.scatter(x, y, s=120, facecolors="none", edgecolors=_ink(dark), linewidths=1.2, zorder=3, clip_on=False)


def _heat_map(axes: Axes, seen: Picture, dark: bool) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = [_on(colour, dark) for colour in (COLOURS[-1], *COLOURS[:-1])]
    layout = _grid(axes, seen, dark)
    if seen.levels.size:
        axes.imshow(seen.levels + 1, cmap=ListedColormap(colours), vmin=0, vmax=len(colours) - 1, **layout)
    _limit(axes, seen)
    _ring(axes, seen.cell, np.where(seen.levels >= FIRST_OUTSIDE, seen.levels + 1, 0), colours, dark)
    names = ("unspecified", *SHORT[:-1], "NaN, inf, other bits")
    legend = [
        Patch(facecolor=colour, edgecolor=_ink(dark), linewidth=0.4, label=f"{name}: {count:,}")
        for colour, name, count in zip(colours, names, seen.counts, strict=True)
        if count
    ]
    axes.legend(
        handles=legend,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.14),
        ncols=4,
        fontsize=7.5,
        frameon=False,
        title="elements by level (step: the next representable value beyond the interval)",
        title_fontsize=7.5,
    )


def _ink(dark: bool) -> str:
    return DARK_INK if dark else INK


def _on(colour: str, dark: bool) -> str:
    return DARK.get(colour, colour) if dark else colour


def _histogram(axes: Axes, seen: Picture, dark: bool) -> None:
    axes.set_ylabel("elements")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.spines[["top", "right"]].set_visible(False)
    if seen.inside is None or seen.outside is None or seen.admitted is None:
        axes.set_title(f"{seen.output}: elements by level", fontsize=9, parse_math=False)
        results = [(n, c, colour) for n, c, colour in zip(SHORT, seen.counts[1:], COLOURS, strict=False) if c]
        axes.bar(
            range(len(results)),
            [c for _, c, _ in results],
            color=[_on(x, dark) for *_, x in results],
            edgecolor=_ink(dark),
            linewidth=0.5,
        )
        axes.set_xticks(range(len(results)), [n for n, *_ in results], rotation=30, ha="right")
        axes.set_xlabel("level (steps: representable values beyond the interval)")
        return
    axes.set_title(f"{seen.output}: error beside what is admitted", fontsize=9, parse_math=False)
    used = max([2, *(int(np.flatnonzero(x).max()) + 1 for x in (seen.inside, seen.outside, seen.admitted) if x.any())])
    at = np.arange(used)
    edges, line = np.arange(used + 1) - 0.5, _ink(dark)
    axes.stairs(seen.admitted[:used], edges, color=line, linewidth=1.3, label="admitted error")
    sides = ((seen.inside, -0.21, INSIDE, "inside"), (seen.outside, 0.21, OUTSIDE, "outside"))
    for counts, side, colour, name in sides:
        if counts.any():
            axes.bar(at + side, counts[:used], 0.42, color=colour, label=f"error, {name}")
    extra = [
        (name, count, colour)
        for name, count, colour in (
            ("NaN,\ninf", seen.counts[1 + NO_NUMBER], _on(COLOURS[NO_NUMBER], dark)),
            ("unspe-\ncified", seen.counts[0], COLOURS[-1]),
        )
        if count
    ]
    places = [used + 0.5 + i * max(1.0, used / 9) for i in range(len(extra))]
    for where, (_, count, colour) in zip(places, extra, strict=True):
        axes.bar(where, count, 0.7, color=colour, hatch="///", edgecolor=_ink(dark))
    units = ((1 << 20, "Mi"), (1 << 10, "Ki"), (1, ""))
    ends = [next((f"{end / size:g}{unit}" for size, unit in units if end >= size), "0") for end in ULPS] + ["more"]
    shown = [end if used <= 12 or i % 2 == 0 else "" for i, end in enumerate(ends[:used])]
    axes.set_xticks([*at, *places], [*shown, *(name for name, *_ in extra)], fontsize=7.5, parse_math=False)
    axes.set_xlabel(f"error in ulps of {seen.dtype}, up to")
    below = (0.5, -0.24 if extra else -0.16)
    axes.legend(fontsize=7.5, frameon=False, loc="upper center", bbox_to_anchor=below, ncols=3)


def _failing(axes: Axes, seen: Place, dark: bool) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    steps = [_on(COLOURS[1], dark), *COLOURS[FIRST_OUTSIDE + 1 : NO_NUMBER]]
    layout = _grid(axes, seen, dark)
    if seen.share.size:
        shown = axes.imshow(
            seen.share, cmap=LinearSegmentedColormap.from_list("failing", steps), vmin=0, vmax=1, **layout
        )
        axes.figure.colorbar(shown, ax=axes, label="share of the elements that fails", shrink=0.9)
    _limit(axes, seen)
    _ring(axes, seen.cell, (seen.share > 0).astype(np.int8), ["none", OUTSIDE], dark)


def _factors(axes: Axes, seen: Blocks, dark: bool) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    three = [LOST, "#3a4148" if dark else RIGHT, DOUBLED]
    colours = LinearSegmentedColormap.from_list("factor", three).with_extremes(bad=COLOURS[-1])
    rows, count = seen.factor.shape
    shown = axes.imshow(
        seen.factor,
        cmap=colours,
        vmin=0,
        vmax=2,
        aspect="auto",
        interpolation="none",
        extent=(-0.5, count - 0.5, rows * seen.rows - 0.5, -0.5),
    )
    axes.figure.colorbar(shown, ax=axes, label="factor: 0 lost, 1 right, 2 and more", extend="both", shrink=0.9)
    axes.set_title("by which factor each K block enters (grey: not known)", fontsize=9)
    axes.set_xlabel(f"K block ({seen.length} products)")
    axes.set_ylabel("row (element)")
    axes.locator_params(integer=True, nbins=8)


def _bars(axes: Axes, bars: Sequence[tuple[str, float, str]], dark: bool) -> None:
    shown = bars[:BARS]
    if not shown:
        axes.set_axis_off()
        axes.text(0, 0.5, "no fault of the catalogue reproduces half of the failing elements", va="center")
        return
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the failing elements that the explanation reproduces (%)")
    names = ["\n".join(textwrap.wrap(name, 60, max_lines=2, placeholder=" ...")) for name, *_ in shown]
    axes.barh(range(len(shown)), [100 * share for _, share, _ in shown], color=INSIDE, height=0.6)
    for i, (_, share, text) in enumerate(shown):
        inside = share > 0.5
        axes.text(
            100 * share + (-1 if inside else 1),
            i,
            text,
            va="center",
            ha="right" if inside else "left",
            color="#ffffff" if inside else (_ink(dark)),
            fontsize=8,
        )
    axes.set_yticks(range(len(shown)), names, parse_math=False)
    axes.invert_yaxis()
