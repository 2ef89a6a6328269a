"""Boxes of codes: what a quantiser may make of values that are known up to an interval.

amax of a group lies between ``max(min |x|)`` and ``max(max |x|)``. That interval is cut into pieces (single values of
the input's dtype when it holds few of them). Each piece gives an interval of scales and, for values clipped to that
amax, one of codes: with ``x`` in ``[x1, x2]`` and ``s`` in ``[s1, s2]``

    code in [RNE(min x/s (1 -+ e)), RNE(max x/s (1 +- e))]

as rounding is monotone. ``e`` and the width of the scales cover every float32 formula in use; they are derived in
:mod:`oracle.bounds.quantiser`. A right quantiser's codes and scale lie in one of the boxes, group by group.
Where every operation is a correctly rounded bfloat16 one, each is monotone, so scale and code lie between those of the
two ends, with no width.
Covered: given scales, one scale for the tensor, for a row, or for a group of a row; float32 scales, powers of two by
CEIL or of the rounded amax, E4M3 scales under a given one, and bfloat16 operations throughout. Not covered: other
powers of two, other scales in the input's dtype, an amax below 2^-100 without a floor.
NaN and infinity are not covered either: the caller claims nothing of their rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.bounds.boxed import Box
from oracle.bounds.quantiser import APPROXIMATE_WIDTH, CODE_WIDTH, SCALE_WIDTH
from oracle.errors import InputError, NumericsError
from oracle.numbers import ue8m0
from oracle.numbers.formats import BF16, E4M3FN, FP32, Format, codes_of, decode, from_codes
from oracle.numbers.quantize import bf16
from oracle.numbers.recipes import CodeFormula, PowerOfTwo, Recipe, ScaleFormula, Special
from oracle.numbers.rounding import Overflow, Rounding, round_to, to_dtype
from oracle.numbers.scaling import ScaleFormat
from oracle.truth.routing import Span

PIECES = 4
STEPS = (PowerOfTwo.CEIL, PowerOfTwo.AMAX_EVEN)
GLOBAL_WIDTH = 2 * APPROXIMATE_WIDTH
"""Two approximate reciprocals and two products before the scale; as many before a code."""
SMALLEST = 2.0**-149


def code_boxes(
    x: Span,
    recipe: Recipe,
    fmt: Format,
    static_scale: Tensor | None,
    scale_ub: Tensor | None = None,
    *,
    global_scale: Tensor | None = None,
) -> tuple[list[Box], int]:
    """The boxes of quantised values, and how many codes the first leaves uncertain.

    Parameters
    ----------
    x : bounds ``[R, K]`` (float64) of the values, on the grid of ``fmt``.
    static_scale : the scale, a float32 scalar or any shape of one value, for recipes that take one.
    global_scale : what multiplies a value before its block's scale divides it, a float32 scalar or any shape of one
        value, for recipes that encode by one.
    scale_ub : bound of amax, a float32 scalar or any shape of one value, for recipes that take one.

    Raises NumericsError: the recipe's blocks or powers of two are not covered; InputError: a recipe of a given scale
    has none.
    """
    if recipe.formula is ScaleFormula.GIVEN:
        if static_scale is None:
            raise InputError(f"recipe {recipe.name} needs a given scale")
        scale = decode(static_scale).reshape(1, 1).expand(x.low.shape[0], 1)
        box = _box(x.low, x.high, scale, scale, recipe, group=x.low.shape[1])
        return [box], int((box.low != box.high).sum())
    group = x.low.shape[1] if recipe.block.columns is None else recipe.block.columns
    if recipe.block.rows not in (None, 1) or recipe.fault is not None:
        raise NumericsError(f"recipe {recipe.name} has blocks of {recipe.block}; no interval is derived for its codes")
    if recipe.scaling.global_scale:
        return _under_global(x, recipe, group, global_scale)
    formats = (ScaleFormat.FLOAT32, ScaleFormat.UE8M0, *((ScaleFormat.INPUT,) if _narrow(recipe) else ()))
    covered = recipe.scale_format in formats and not recipe.scaling.global_scale
    if recipe.power_of_two not in (None, *STEPS) or not covered:
        raise NumericsError(f"no interval is derived for the scales of {recipe.name}; take a CEIL or float32 recipe")
    boxes = [
        _box(_clipped(x.low, most, group), _clipped(x.high, most, group), s1, s2, recipe, group=group)
        for most, s1, s2 in _pieces(x, recipe, fmt, group, scale_ub)
    ]
    return boxes, int((boxes[0].low != boxes[0].high).sum())


def _pieces(
    x: Span, recipe: Recipe, fmt: Format, group: int, scale_ub: Tensor | None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Largest amax, smallest and largest scale ``[R, B]`` of each piece of the groups' amax intervals."""
    least = torch.where((x.low <= 0) & (x.high >= 0), 0.0, torch.minimum(x.low.abs(), x.high.abs()))
    a1, a2 = (_grouped(m, group).amax(dim=2) for m in (least, torch.maximum(x.low.abs(), x.high.abs())))
    if recipe.block.rows is None:  # one scale for the tensor
        a1, a2 = (a.amax().expand(a.shape) for a in (a1, a2))
    if scale_ub is not None:
        bound = decode(scale_ub).reshape(1, 1).expand(a1.shape)
        pieces = _pieces(x, recipe, fmt, group, None)
        inside = (_scale(bound, recipe).low, _scale(bound, recipe).high)
        return [(m, torch.minimum(s1, inside[0]), torch.minimum(s2, inside[1])) for m, s1, s2 in pieces]
    if recipe.power_of_two in STEPS:
        s1, s2 = _scale(a1, recipe).low, _scale(a2, recipe).high
        count = int(torch.frexp(s2 / s1)[1].max())
        return [(a2, s, s) for s in (torch.minimum(s1 * 2.0**j, s2) for j in range(count))]
    c1, c2 = (codes_of(_stored(a, fmt)).to(torch.int64) for a in (a1, a2))
    pieces = []
    for j in range(min(PIECES, int((c2 - c1).max()) + 1)):
        few = c2 - c1 < PIECES
        first = torch.where(few, torch.minimum(c1 + j, c2), c1 + (c2 - c1 + 1) * j // PIECES)
        last = torch.where(few, first, c1 + (c2 - c1 + 1) * (j + 1) // PIECES - 1)
        m1, m2 = (decode(from_codes(c.to(fmt.storage), fmt)) for c in (first, last))
        pieces.append((m2, _scale(m1, recipe).low, _scale(m2, recipe).high))
    return pieces


def _scale(amax: Tensor, recipe: Recipe) -> Span:
    """Bounds of the published scale of an amax (float64), every float32 formula in use."""
    if _narrow(recipe):
        floored, factor = (bf16(torch.full_like(amax, x)) for x in (recipe.amax_floor, 1 / recipe.element.max_finite))
        scale = bf16(torch.maximum(amax, floored) * factor).clamp(min=BF16.min_subnormal)
        return Span(scale, scale)
    if recipe.power_of_two is PowerOfTwo.AMAX_EVEN:
        power = ue8m0.round_scale(amax, amax, amax, recipe, FP32).clamp(min=2.0**-127)
        return Span(power, power)
    a = amax.clamp(min=recipe.amax_floor) if recipe.amax_floor else amax
    a = a + recipe.amax_added
    width = APPROXIMATE_WIDTH if recipe.approximate else SCALE_WIDTH
    ideal = a / torch.full_like(a, recipe.element.max_finite)
    low, high = (ideal * (1 - width)).clamp(min=recipe.scale_floor), (ideal * (1 + width)).clamp(min=recipe.scale_floor)
    if Special.ZERO in recipe.unit_when:
        low, high = (torch.where(a == 0, torch.ones_like(x), x) for x in (low, high))
    low, high = low.clamp(min=SMALLEST), high.clamp(min=SMALLEST)
    if recipe.power_of_two is PowerOfTwo.CEIL:
        # no formula in use rounds an exact power up, so the upper end needs no width
        powers = (
            ue8m0.ceil_power(x, byte_low=recipe.byte_low, inf_byte=recipe.inf_byte, nan_byte=recipe.nan_byte)
            for x in (low, ideal.clamp(min=SMALLEST))
        )
        return Span(*powers)
    return Span(low, high)


def _under_global(x: Span, recipe: Recipe, group: int, given: Tensor | None) -> tuple[list[Box], int]:
    """Boxes under E4M3 scales: ``s = E4M3(amax g / 6)`` within the errors of two approximate reciprocals, each E4M3
    value between those of the ends a box of its own, and codes of ``x g / s``. Under a scale of 0 any code is 0."""
    if given is None or not recipe.encodes:
        raise NumericsError(
            f"recipe {recipe.name} is not one under a given encoding scale; no interval is derived for it"
        )
    g = decode(given).reshape(1, 1)
    least = torch.where((x.low <= 0) & (x.high >= 0), 0.0, torch.minimum(x.low.abs(), x.high.abs()))
    a1, a2 = (_grouped(m, group).amax(dim=2) for m in (least, torch.maximum(x.low.abs(), x.high.abs())))
    stored = E4M3FN.torch_dtype
    assert stored is not None
    ends = [a * g / recipe.element.max_finite * (1 + w) for a, w in ((a1, -GLOBAL_WIDTH), (a2, GLOBAL_WIDTH))]
    c1, c2 = (
        codes_of(to_dtype(e, stored, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE)).to(torch.int64)
        for e in ends
    )
    boxes = []
    for j in range(int((c2 - c1).max()) + 1):
        s = decode(from_codes(torch.minimum(c1 + j, c2).to(E4M3FN.storage), E4M3FN))
        over = torch.where(s > 0, s / g, 1.0)
        box = _box(x.low, x.high, over * (1 - GLOBAL_WIDTH), over * (1 + GLOBAL_WIDTH), recipe, group=group)
        none = (s == 0).repeat_interleave(group, dim=1)[:, : x.low.shape[1]]
        boxes.append(Box(box.low.masked_fill(none, 0.0), box.high.masked_fill(none, 0.0), s, s, recipe.element))
    return boxes, int((boxes[0].low != boxes[0].high).sum())


def _box(low: Tensor, high: Tensor, s1: Tensor, s2: Tensor, recipe: Recipe, *, group: int) -> Box:
    """Codes of values in ``[low, high]`` for scales in ``[s1, s2]`` (``[R, B]``, positive)."""
    width = 0.0 if recipe.scale_format is ScaleFormat.UE8M0 else APPROXIMATE_WIDTH if recipe.approximate else CODE_WIDTH
    spread = [s.repeat_interleave(group, dim=1)[:, : low.shape[1]] for s in (s1, s2)]
    if _narrow(recipe):
        spread = [bf16(1 / s) for s in spread]
        v1, v2 = (bf16(pick(x * spread[0], x * spread[1])) for pick, x in ((torch.minimum, low), (torch.maximum, high)))
        width = 0.0
    else:
        v1 = torch.minimum(low / spread[0], low / spread[1])
        v2 = torch.maximum(high / spread[0], high / spread[1])
    c1, c2 = (
        round_to(v, recipe.element, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE)
        for v in (v1 - width * v1.abs(), v2 + width * v2.abs())
    )
    if recipe.zero_codes and recipe.scale_format is ScaleFormat.UE8M0:  # every code is 0 under the byte 0
        c1, c2 = (
            torch.where(s1.repeat_interleave(group, dim=1)[:, : low.shape[1]] <= 2.0**-127, 0.0, c) for c in (c1, c2)
        )
    return Box(c1, c2, s1, s2, recipe.element)


def _narrow(recipe: Recipe) -> bool:
    """Whether every operation is a bfloat16 one."""
    return recipe.code is CodeFormula.BF16


def _clipped(x: Tensor, most: Tensor, group: int) -> Tensor:
    """Values limited to the amax of their group."""
    limit = most.repeat_interleave(group, dim=1)[:, : x.shape[1]]
    return torch.minimum(torch.maximum(x, -limit), limit)


def _grouped(x: Tensor, group: int) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % group))
    return padded.reshape(x.shape[0], -1, group)


def _stored(x: Tensor, fmt: Format) -> Tensor:
    dtype = fmt.torch_dtype
    assert dtype is not None
    return to_dtype(x, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
