"""A failing output as bounded data that a report can draw: how far each region lies outside its intervals, and bits.

Inside its admissible interval an element has a *ratio*, ``|actual - expected|`` over the distance from ``expected`` to
the edge (:class:`oracle.verdict.compare.Worst`); outside, *steps*, the number of representable values of the output's
dtype from the interval to it. Both map to a *level*, one hexadecimal digit:

====== ================================== ====== ======================================
``0``  the expected value itself          ``5``  outside by one step
``1``  inside, ratio up to 1/4            ``6``  up to 4
``2``  up to 1/2                          ``7``  up to 16
``3``  up to 3/4                          ``8``  up to 64
``4``  up to 1, the edge                  ``9``  up to 1024
``.``  left open                          ``a``  more steps
\\                                        ``b``  NaN or infinite, or bits without an order
====== ================================== ====== ======================================

The output is a matrix here (leading axes folded into rows), cut into at most ``GRID x GRID`` cells; the level of a cell
is the worst of its elements. Not covered: judging (no verdict depends on a level) and drawing (:mod:`oracle.report`).

NaN is outside every interval but that of a NaN which is due, and has the level ``b``.
Source: derived in this file; nothing but a picture depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oracle.bounds.interval import Admissible
from oracle.errors import DtypeError
from oracle.numbers.formats import Format, codes_of, decode, in_blocks, of_dtype
from oracle.numbers.rounding import Overflow, Rounding, encode, encode_scalar
from oracle.verdict.pattern import places

TILE = (128, 128)  # spacing of grid lines where the caller names none: the tile of a product
GRID = 64  # cells along each axis of the picture, at most
LISTED = 8  # elements listed with their bits
BAND = 1 << 20  # elements looked at together
SAMPLED = 4096  # failing elements whose bits are compared with the expected ones
LEVELS = "0123456789ab"
OPEN = "."
RATIOS = (0.0, 0.25, 0.5, 0.75)
STEPS = (1, 4, 16, 64, 1024)
FIRST_OUTSIDE = 5
NO_NUMBER = 11

# One colour for each level (inside: blue, outside: yellow to dark red), then the one of what is left open.
COLOURS = (
    *("#edf4f8", "#d5e7f0", "#b5d5e6", "#8fbfd9", "#5f9fc6"),
    *("#ffe08a", "#ffbf47", "#fa8f36", "#e4572e", "#c81d25", "#8f1220", "#4d1150"),
    "#a3a8ad",
)
DARK = {COLOURS[i]: colour for i, colour in enumerate(("#1b2a34", "#20394a", "#254b63", "#2c6183", "#3579a5"))} | {
    COLOURS[NO_NUMBER]: "#d583e0"
}
"""What replaces a colour on a dark page: dark blues, and a NaN that is seen."""
MEANINGS = (
    "the expected value itself",
    *(f"inside, up to {part} of the way to the edge" for part in ("a quarter", "half", "three quarters")),
    "inside, up to the edge of the interval",
    "outside by one representable value",
    *(f"outside by up to {n} representable values" for n in STEPS[1:]),
    "outside by more",
    "NaN or infinite; or other bits where bits alone count",
    "left open by the contract",
)
SHORT = (
    *("expected", "≤ ¼ inside", "≤ ½", "≤ ¾", "to the edge"),
    *("1 step outside", *(f"≤ {n} steps" for n in STEPS[1:]), "more", "no number"),
)


@dataclass(frozen=True)
class Element:
    """One failing element. ``bits`` and ``expected_bits`` are hexadecimal; ``steps`` counts the representable values
    from the admissible interval to the actual one (None where either is no number)."""

    index: tuple[int, ...]
    actual: float
    low: float
    high: float
    expected: float
    ratio: float
    bits: str
    expected_bits: str
    steps: int | None


@dataclass(frozen=True)
class Evidence:
    """A failing output in at most ``GRID x GRID`` levels, a histogram, and its worst elements.

    ``fields`` are the widths of sign, exponent and fraction; ``cell`` the elements that one level stands for;
    ``tile`` the spacing of grid lines in elements (tiles of a product, scale blocks of a quantiser) and ``bands`` rows
    at which an expert begins; ``flips`` the fraction of (at most ``SAMPLED``) failing elements in which each bit,
    highest first, differs from the expected value's.
    """

    output: str
    dtype: str
    shape: tuple[int, ...]
    fields: tuple[int, int, int]
    cell: tuple[int, int]
    tile: tuple[int, int]
    levels: tuple[str, ...]
    histogram: tuple[int, ...]
    elements: tuple[Element, ...]
    flips: tuple[float, ...] = ()
    bands: tuple[int, ...] = ()

    @property
    def failing(self) -> int:
        """How many elements are not admissible."""
        return sum(self.histogram[FIRST_OUTSIDE:])

    def to_json(self) -> dict[str, object]:
        """A JSON-ready dict; non-finite numbers become strings."""
        record: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        record["elements"] = [
            {k: list(v) if isinstance(v, tuple) else _word(v) for k, v in e.items()} for e in record["elements"]
        ]
        return record


@dataclass(frozen=True)
class Piece:
    """Some rows of an output seen as a matrix, ``[R, C]`` each: what was found, its intervals, ratios and failures.

    ``ratio`` is float64, negative where an element is unspecified or not constrained; ``bad`` are the failing elements,
    which alone get a level outside.
    """

    actual: Tensor
    admissible: Admissible
    ratio: Tensor
    bad: Tensor


def gather(
    actual: Tensor, admissible: Admissible, ratio: Tensor, bad: Tensor, *, output: str, tile: tuple[int, int] = TILE
) -> Evidence:
    """The evidence of a comparison that failed: ``actual`` (any float dtype), ``ratio`` and ``bad`` of one shape, as of
    :class:`Piece`, of any rank."""
    sets = [matrix(t) for t in (actual, admissible.low, admissible.high, admissible.expected, ratio, bad)]
    step = max(1, BAND // max(1, sets[0].shape[1]))

    def pieces() -> Iterator[Piece]:
        for start in range(0, sets[0].shape[0], step):
            seen, low, high, expected, ratios, failing = (t[start : start + step] for t in sets)
            yield Piece(seen, Admissible(low, high, expected), ratios, failing)

    return gather_pieces(pieces(), actual, output=output, tile=tile)


def gather_pieces(
    pieces: Iterable[Piece], like: Tensor, *, output: str, tile: tuple[int, int] = TILE, fmt: Format | None = None
) -> Evidence:
    """The evidence of consecutive pieces, which together are an output of the shape of ``like`` and its dtype; ``fmt``
    says what codes are held in integers."""
    fmt, columns = of_dtype(like.dtype) if fmt is None else fmt, matrix(like).shape[1]
    levels, bits, due = list[Tensor](), list[Tensor](), list[Tensor]()
    worst, row = list[tuple[float, Element]](), 0
    for piece in pieces:
        level, steps, beyond = levels_of(piece, fmt)
        levels.append(level)
        failing = places(piece.bad)
        for i in _largest(beyond):
            at = int(failing[i])
            result = _element_of(piece, at, _index(row * columns + at, like), int(steps[i]), fmt)
            worst.append((-float(beyond[i]), result))
        left = failing[: max(0, SAMPLED - sum(len(b) for b in bits))]
        bits.append(_raw(piece.actual, fmt)[left])
        due.append(_encoded(piece.admissible.expected.flatten()[left], fmt))
        row += len(piece.actual)
    elements = [e for _, e in sorted(worst, key=lambda pair: pair[0])[:LISTED]]
    return _evidence(
        like,
        torch.cat(levels),
        output=output,
        tile=tile,
        elements=tuple(elements),
        fields=_fields(fmt),
        flips=_flips(torch.cat(bits), torch.cat(due), fmt.bits),
    )


def levels_of(piece: Piece, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Levels ``[R, C]`` (int8), and of every failing element its steps and how far it lies beyond its interval."""
    value, ratio = decode(piece.actual, fmt).flatten(), piece.ratio.flatten()
    low, high = piece.admissible.low.flatten(), piece.admissible.high.flatten()
    edges = torch.tensor(RATIOS, dtype=torch.float64, device=ratio.device)
    level = torch.bucketize(ratio, edges).to(torch.int8).masked_fill(ratio < 0, -1)
    failing = places(piece.bad)
    value, low, high = value[failing], low[failing], high[failing]
    steps = _steps(_raw(piece.actual, fmt)[failing], value, low, high, fmt)
    outside = FIRST_OUTSIDE + torch.bucketize(steps, torch.tensor(STEPS, dtype=torch.int64, device=steps.device))
    level[failing] = torch.where(steps < 0, NO_NUMBER, outside).to(torch.int8)
    return level.view(piece.actual.shape), steps, overshoot(value, low, high)


def _largest(values: Tensor) -> list[int]:
    """The places of the ``LISTED`` largest values, largest first, the first ones among equals."""
    if not len(values):
        return []
    least = torch.topk(values, min(LISTED, len(values))).values[-1]
    above, level = (places(mask)[:LISTED] for mask in (values > least, values == least))
    order = torch.sort(values[above], descending=True, stable=True).indices
    return torch.cat([above[order], level])[:LISTED].tolist()


def _raw(actual: Tensor, fmt: Format) -> Tensor:
    return codes_of(actual, fmt).flatten().to(torch.int64) & _mask(fmt.bits)


def of_bits(actual: Tensor, expected: Tensor, bad: Tensor, *, output: str, tile: tuple[int, int] = TILE) -> Evidence:
    """The evidence where one value alone is admissible: ``actual`` must have the bits of ``expected``, and ``bad``
    (bool) says where it has not; all of any one shape and dtype, NaN as any other bits."""
    plain = (x.to(torch.uint8) if x.dtype is torch.bool else x for x in (actual, expected))
    bits, due = (codes_of(x) if x.is_floating_point() else x for x in plain)
    width = 8 * bits.element_size()
    bits, due = bits.flatten(), due.to(bits.dtype).flatten()
    failing = torch.nonzero(bad.flatten())[:SAMPLED, 0]
    elements = []
    for flat in failing[:LISTED].tolist():
        value, right = _number(actual, flat), _number(expected, flat)
        codes = [f"{int(x[flat]) & _mask(width):0{width // 4}x}" for x in (bits, due)]
        elements.append(Element(_index(flat, actual), value, right, right, right, math.inf, codes[0], codes[1], None))
    level = torch.where(bad, NO_NUMBER, 0).flatten()
    try:
        fields = _fields(of_dtype(actual.dtype))
    except DtypeError:  # an integer tensor: all bits are one field
        fields = (0, 0, width)
    flips = _flips(bits[failing], due[failing], width)
    return _evidence(actual, level, output=output, tile=tile, elements=tuple(elements), fields=fields, flips=flips)


def of_values(
    actual: Tensor, due: Tensor, bad: Tensor, elements: Sequence[Element], *, output: str, tile: tuple[int, int] = TILE
) -> Evidence:
    """The evidence where the interval of every element of ``actual`` is taken to be one value, that of ``due`` (of the
    same dtype and the same shape, as ``bad``); the ``elements`` listed are given."""
    fmt = of_dtype(actual.dtype)
    failing, wide = places(bad), torch.int32 if fmt.bits <= 16 else torch.int64
    codes, right = (codes_of(x).flatten().index_select(0, failing) for x in (actual, due))

    def outside(codes: Tensor, right: Tensor) -> Tensor:
        codes, right = codes.to(wide), right.to(wide)
        steps = (_ordinal(codes, fmt) - _ordinal(right, fmt)).abs_()
        result = torch.full(steps.shape, FIRST_OUTSIDE, dtype=torch.int8, device=steps.device)
        for most in STEPS:
            result += steps > most
        numbers = (codes & fmt.magnitude_mask <= fmt.max_code) & (right & fmt.magnitude_mask <= fmt.max_code)
        return result.masked_fill_(~numbers, NO_NUMBER)

    level = torch.zeros(actual.numel(), dtype=torch.int8, device=codes.device)
    level.scatter_(0, failing, in_blocks(outside, codes, right, dtype=torch.int8))
    flips = _flips(codes[:SAMPLED], right[:SAMPLED], fmt.bits)
    return _evidence(
        actual, level, output=output, tile=tile, elements=tuple(elements), fields=_fields(fmt), flips=flips
    )


def ratio_of(value: Tensor, admissible: Admissible) -> Tensor:
    """The ratio of every element of ``value`` (float64, any shape), in its shape; inf for NaN, and where an interval is
    a single value."""
    low, high, expected = admissible.low, admissible.high, admissible.expected
    distance = (value - expected).abs()
    width = torch.where(value > expected, high - expected, expected - low)
    same = (value == expected) | (torch.isnan(expected) & torch.isnan(value))
    ratio = torch.where(same, torch.zeros_like(distance), distance / width)
    return torch.nan_to_num(ratio, nan=math.inf, posinf=math.inf)


def overshoot(value: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """How far each element of ``value`` lies beyond its interval from ``low`` to ``high`` (float64, any one shape).

    Returns float64 of that shape: inf for NaN, negative inside."""
    return torch.nan_to_num(torch.maximum(low - value, value - high), nan=math.inf, posinf=math.inf)


def from_json(record: dict[str, Any]) -> Evidence:
    """The inverse of :meth:`Evidence.to_json`."""
    numbers = ("actual", "low", "high", "expected", "ratio")
    elements = tuple(
        Element(**{**e, "index": tuple(e["index"]), **{name: float(e[name]) for name in numbers}})
        for e in record["elements"]
    )
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
    return Evidence(**{**plain, "elements": elements})


def _evidence(actual: Tensor, level: Tensor, **facts: Any) -> Evidence:
    """The evidence with these levels; ``facts`` are its other fields."""
    level = matrix(level.view(actual.shape))
    counts = torch.bincount((level + 1).flatten(), minlength=len(LEVELS) + 1)[1:].tolist()
    cell, worst = cells(level, GRID)
    levels = tuple("".join((OPEN + LEVELS)[i + 1] for i in row) for row in worst.tolist())
    dtype, shape = str(actual.dtype).removeprefix("torch."), tuple(actual.shape)
    return Evidence(dtype=dtype, shape=shape, cell=cell, levels=levels, histogram=tuple(counts), **facts)


def cells(level: Tensor, most: int) -> tuple[tuple[int, int], Tensor]:
    """The rows and columns of one cell of the matrix ``level`` (int8, ``[R, C]``), which has at most ``most`` cells a
    side, and the largest level of every cell, int8 in the shape of the cells."""
    rows, columns = level.shape
    cell = (max(1, -(-rows // most)), max(1, -(-columns // most)))
    padded = torch.nn.functional.pad(level, (0, -columns % cell[1], 0, -rows % cell[0]), value=-1)
    return cell, padded.view(-1, cell[0], padded.shape[1] // cell[1], cell[1]).amax(dim=(1, 3))


def matrix(x: Tensor) -> Tensor:
    """A tensor ``x`` of any shape and dtype as rows of its last axis; one row where it has fewer than two axes.

    Returns a view ``[R, C]`` of its dtype where its strides allow one."""
    return x.reshape(1, -1) if x.dim() < 2 else x.reshape(-1, x.shape[-1])


def _index(flat: int, like: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, like.shape))


def _element_of(piece: Piece, at: int, index: tuple[int, ...], steps: int, fmt: Format) -> Element:
    sets = piece.admissible
    low, high, expected, ratio = (float(t.flatten()[at]) for t in (sets.low, sets.high, sets.expected, piece.ratio))
    one = piece.actual.flatten()[at : at + 1]
    actual, bits, digits = float(decode(one, fmt)), int(_raw(one, fmt)), -(-fmt.bits // 4)
    due = encode_scalar(expected, fmt, rounding=Rounding.NEAREST_EVEN, overflow=_overflow(fmt))
    counted = None if steps < 0 else steps
    return Element(index, actual, low, high, expected, ratio, f"{bits:0{digits}x}", f"{due:0{digits}x}", counted)


def _steps(codes: Tensor, value: Tensor, low: Tensor, high: Tensor, fmt: Format) -> Tensor:
    """Representable values from the interval to each failing element (int64); -1 where one of them is no number."""
    edge = torch.where(value > high, high, low)
    numbers = torch.isfinite(value) & torch.isfinite(edge)
    nearest = _encoded(torch.where(numbers, edge, torch.zeros_like(edge)), fmt)
    return torch.where(numbers, (_ordinal(codes, fmt) - _ordinal(nearest, fmt)).abs(), -1)


def _encoded(x: Tensor, fmt: Format) -> Tensor:
    codes = encode(x, fmt, rounding=Rounding.NEAREST_EVEN, overflow=_overflow(fmt))
    return codes.to(torch.int64) & _mask(fmt.bits)


def _ordinal(codes: Tensor, fmt: Format) -> Tensor:
    """Codes in the order of their values; both zeros are 0."""
    if not fmt.signed:
        return codes
    return (codes & fmt.magnitude_mask) * (1 - 2 * ((codes & fmt.sign_mask) != 0).to(codes.dtype))


def _flips(bits: Tensor, due: Tensor, width: int) -> tuple[float, ...]:
    differ = bits.to(torch.int64) ^ due.to(torch.int64)
    each = [((differ >> i) & 1).to(torch.float64) for i in reversed(range(width))]
    return tuple(round(float(x.mean()), 4) if x.numel() else 0.0 for x in each)


def _fields(fmt: Format) -> tuple[int, int, int]:
    return int(fmt.signed), fmt.exponent_bits, fmt.fraction_bits


def _overflow(fmt: Format) -> Overflow:
    return Overflow.INF if fmt.has_inf else Overflow.SATURATE


def _mask(width: int) -> int:
    return (1 << width) - 1


def _number(x: Tensor, flat: int) -> float:
    return float(decode(x.flatten()[flat])) if x.is_floating_point() else float(x.flatten()[flat])


def _word(value: object) -> object:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
