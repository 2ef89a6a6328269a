"""Which quantiser outputs are right: an interval of scales, and codes conditional on the published scale.

Let ``a`` be the exact, floored amax of a block, ``max`` the largest value of the element format, ``u = 2^-24``.

* *Scale.* Each float32 formula in use is ``a/max`` times at most two factors ``1 + d``, ``|d| <= u`` (a
  rounded operation or the rounded constant 1/max), so ``s`` lies within ``a/max (1 +- 4u)`` with room to spare; with
  approximate division within ``1 +- 2^-21``. A global scale widens the interval by ``u``. Below 2^-126
  an operation errs by up to 2^-150 instead. A scale in the input's dtype has one value, ``RN(a/max)``; a UE8M0 scale
  has one value per mode, two inside the window of a mode that goes through a rounded logarithm. A scale in another
  format has the roundings of the ends of the float32 interval: rounding is monotone, and the interval holds at most
  one midpoint.
* *Code.* The published ``s`` (times the global scale) fixes ``v = x/s``. A code comes from ``v`` times at most four
  factors ``1 + d`` (for ``s = a fl(1/max)`` and ``x fl(max/a)``), so it lies in ``[RNE(v (1-e)), RNE(v (1+e))]``, ``e =
  (1+u)^4 - 1``, or ``2^-21`` with approximate division: one code, or two beside a midpoint. A power of two
  divides exactly: one code; so do the two scales of NVFP4 where both are powers of two.
* *Stochastic rounding.* Any random bits are right: both neighbours of ``v (1 -+ e)``, so a ``v`` that is a value of the
  format admits itself where ``e = 0``. Declared bits leave one code, or two where ``t = |v| + u step`` lies within
  ``e`` of a value.
* *Two candidates* (four over six). The error of a block under a scale is a sum of 16 terms of at most six float32
  operations on values below ``|x|`` and ``|x'|``; where the two errors lie further apart than both can be off
  (:func:`_undecided`), one candidate is right, else either.
* *Special blocks.* What a zero or non-finite block gives is the declared recipe's own bits; a published
  scale of 0 admits any finite code, since the product is 0. NaN codes are one value whatever their sign.
* The exact bits of the declared recipe are admissible too, unless the record says that it is faulty.
* *Values known up to an interval* (``Prepared.ends``: what a kernel computes and quantises at once: an activation, a
  norm, a Hadamard transform, a dequantisation). amax lies between the largest of the least magnitudes and the largest
  of all, and every formula above is monotone in it: ``s`` lies between the sets of both, on the grid of its format.
  Each code is monotone in its value at the published ``s``: it lies between the sets of the value's two ends. A block
  with a value of which nothing is known admits any scale, that value any code. The sets are hulls: that all values of
  a block share one amax is not used.

So a wrong scale fails as a scale, and a wrong code fails whatever the scale: the two are told apart.
Sources: IEEE 754; the formulas of :mod:`oracle.numbers.recipes`. Not covered: verdicts
(:mod:`oracle.routines.quantisers.contract`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from oracle.numbers import ue8m0
from oracle.numbers.formats import FP32, Format, codes_of, decode, is_nan, of_dtype
from oracle.numbers.quantize import Band, Ends, Prepared, Steps, quotients, suits, to_codes, to_scale_format
from oracle.numbers.recipe_table import of_element, recipes
from oracle.numbers.recipes import (
    Candidates,
    CodeFormula,
    CodeRounding,
    NanCode,
    PowerOfTwo,
    Recipe,
    ScaleFormula,
    ZeroSign,
)
from oracle.numbers.rounding import Overflow, Rounding, encode, f32, round_to
from oracle.numbers.scaling import Block, ScaleFormat

U = 2.0**-24
SCALE_WIDTH = 4 * U
CODE_WIDTH = 4 * U + 7 * U * U
APPROXIMATE_WIDTH = 2.0**-21
TINY = 2.0**-126


@dataclass(frozen=True)
class ScaleSet:
    """Admissible scales per block, float64 of the logical scale shape; NaN in ``expected`` asks for NaN.

    With ``ends_only`` (a scale format coarser than float32) nothing between ``low`` and ``high`` is admitted; with
    ``grid`` the values of that format alone are. ``other``: a second set, NaN where there is none.
    """

    low: Tensor
    high: Tensor
    expected: Tensor
    ends_only: bool = False
    open: Tensor | None = None
    other: tuple[Tensor, Tensor] | None = None
    grid: Format | None = None

    def admits(self, scale: Tensor) -> Tensor:
        """Bool of the logical scale shape: which ``scale``, decoded to float64 and of that shape, is admissible. NaN
        fails where a number is due. ``open`` blocks admit any."""
        inside = (self.low <= scale) & (scale <= self.high)
        if self.ends_only:  # values between ends more than a factor 2 apart may be admissible as well
            inside = inside & ((scale == self.low) | (scale == self.high) | (self.high > 2 * self.low))
        if self.grid is not None:
            inside = inside & ((scale == self.low) | (scale == self.high) | _is_value(scale, self.grid))
        if self.other is not None:
            inside = inside | (scale == self.other[0]) | (scale == self.other[1])
        admitted = torch.where(torch.isnan(self.expected), torch.isnan(scale), inside)
        return admitted if self.open is None else admitted | self.open


@dataclass(frozen=True)
class CodeSet:
    """Admissible codes of ``fmt`` per element, as ordinals (:func:`ordinal`).

    ``expected`` is the rounding of the exact quotient; ``nan`` marks elements that must be NaN, ``free`` those
    that admit any finite code.
    """

    low: Tensor
    high: Tensor
    expected: Tensor
    nan: Tensor
    free: Tensor
    fmt: Format
    open: Tensor | None = None

    def admits(self, codes: Tensor) -> Tensor:
        """Bool of the shape of ``codes``: which integer codes are admissible. -0 and +0 are different codes, all NaN
        codes are one."""
        rank, nan = ordinal(codes, self.fmt), is_nan(codes, self.fmt)
        inside = (self.low <= rank) & (rank <= self.high)
        finite = self.free & ((codes & self.fmt.magnitude_mask) <= self.fmt.max_code)
        admitted = torch.where(self.nan, nan, (inside | finite) & ~nan)
        return admitted if self.open is None else admitted | self.open

    def two(self) -> Tensor:
        """Bool of the shape of the codes: elements that admit more than one because a midpoint lies within the width;
        none of them must be NaN."""
        return (self.high > self.low) & ~self.nan & ~self.free


@dataclass(frozen=True)
class Judged:
    """One output against one recipe; ``exact`` says that every bit is the recipe's own.

    Sets are not stored: :attr:`scales` computes those of the scales at its first use, and :func:`code_bands` those of
    the codes, some rows at a time.
    """

    x: Prepared
    recipe: Recipe
    bad_scales: Tensor
    bad_codes: Tensor
    exact: bool

    @cached_property
    def scales(self) -> ScaleSet:
        """The admissible scales."""
        return scale_set(self.x, self.recipe)

    @cached_property
    def outside(self) -> int:
        return int(torch.count_nonzero(self.bad_scales)) + int(torch.count_nonzero(self.bad_codes))


def judge_recipe(x: Prepared, q: Tensor, scale: Tensor, recipe: Recipe) -> Judged:
    """Judge an output by a recipe: codes ``q`` of the element format, of the shape of ``x``, and ``scale``, any float
    dtype, of the logical shape of the blocks. NaN codes are one value, NaN scales too."""
    fmt = recipe.element
    published = decode(scale)
    own_scale = _same(published, x.scale(recipe).reshape(published.shape))
    exact = bool(own_scale.all())
    sound = exact and recipe.fault is None  # the recipe's own bits are admissible
    bad_scales = ~own_scale if sound else ~scale_set(x, recipe).admits(published)
    bad_codes = torch.zeros(q.shape, dtype=torch.bool, device=q.device)
    raw, bad = codes_of(q, fmt).reshape(-1, q.shape[-1]), bad_codes.view(-1, q.shape[-1])
    for band in x.bands(recipe.block):
        result, reproduced = _bad_codes(x, band, raw[band.rows], published, own_scale, recipe)
        exact = exact and reproduced
        if result is not None:
            bad[band.rows] = result
    return Judged(x, recipe, bad_scales, bad_codes, exact)


def nearness(x: Prepared, q: Tensor, scale: Tensor, recipe: Recipe) -> tuple[int, int, int]:
    """How many codes ``q`` (of the element format, of the shape of ``x``) and how many ``scale`` (any float dtype, of
    the logical shape of the blocks) are those that ``recipe`` gives, and by how many codes the farthest lies off.

    NaN codes are one value, one step beyond the largest; NaN scales are equal too."""
    published, fmt, equal, farthest = decode(scale), recipe.element, 0, 0
    same_scales = int(torch.count_nonzero(_same(published, x.scale(recipe).reshape(published.shape))))
    raw = codes_of(q, fmt).reshape(-1, q.shape[-1])
    for band in x.bands(recipe.block):
        rows = raw[band.rows]
        due = band.x.codes(recipe).view(rows.shape)
        same = _same_code(rows, due, fmt)
        equal += int(torch.count_nonzero(same))
        off = (ordinal(rows, fmt) - ordinal(due, fmt)).abs().masked_fill(same, 0)
        farthest = max(farthest, int(off.max()))
    return equal, same_scales, farthest


def _bad_codes(
    x: Prepared, band: Band, rows: Tensor, published: Tensor, own_scale: Tensor, recipe: Recipe
) -> tuple[Tensor | None, bool]:
    """Which codes ``rows`` of a band are inadmissible, None where none is, and whether each is the recipe's own."""
    fmt, cells = recipe.element, band.x.grid(recipe.block)
    scaled, due = of_band(own_scale, band, x, recipe), band.x.codes(recipe).view(rows.shape)
    if recipe.fault is None and bool(scaled.all()) and same_bytes(rows, due):
        return None, True
    reproduced = _same_code(rows, due, fmt)
    exact = bool(reproduced.all())
    if recipe.fault is None:
        reproduced = reproduced & cells.spread(scaled.to(torch.float64)).to(torch.bool).view(rows.shape)
        if bool(reproduced.all()):
            return None, exact  # the recipe's own bits are admissible
    sets = code_set(band.x, recipe, of_band(published, band, x, recipe))
    admitted = sets.admits(rows.reshape(sets.low.shape)).view(rows.shape)
    return ~admitted if recipe.fault is not None else ~admitted & ~reproduced, exact


def code_bands(x: Prepared, recipe: Recipe, published: Tensor) -> Iterator[tuple[slice, CodeSet]]:
    """:func:`code_set` of consecutive rows of ``x`` seen as a matrix; argument and NaN as of :func:`code_set`."""
    for band in x.bands(recipe.block):
        sets = code_set(band.x, recipe, of_band(published, band, x, recipe))
        tensors = (sets.low, sets.high, sets.expected, sets.nan, sets.free)
        low, high, expected, nan, free = (t.view(-1, t.shape[-1]) for t in tensors)
        unknown = None if sets.open is None else sets.open.view(-1, low.shape[-1])
        yield band.rows, CodeSet(low, high, expected, nan, free, sets.fmt, unknown)


def of_band(scale: Tensor, band: Band, x: Prepared, recipe: Recipe) -> Tensor:
    """The blocks of a band, in its own logical shape, moved unchanged out of ``scale``, any dtype and the whole input's
    logical shape."""
    if band.x is x:
        return scale
    down, _ = x.grid(recipe.block).count
    return scale.reshape(down, -1)[band.blocks].reshape(band.x.grid(recipe.block).scale_shape)


def scale_set(x: Prepared, recipe: Recipe) -> ScaleSet:
    """The scales that a right implementation of ``recipe`` may publish for ``x``."""
    if x.ends is not None:
        return _scales_between(x, x.ends, recipe)
    if recipe.candidates is not None:
        return _either(x, recipe)
    return _of_steps(x, recipe, x.steps(recipe))


def _either(x: Prepared, recipe: Recipe) -> ScaleSet:
    """The scales of the candidate with the smaller error; of both where the errors are too near to tell."""
    own, wide = x.candidates(recipe, x.own_steps(recipe))
    sets = [_of_steps(x, recipe, steps, factor) for steps, factor in ((own, 1.0), (wide, 1.5))]
    shape = sets[0].low.shape
    errors = x.error(recipe, own), x.error(recipe, wide)
    near = _undecided(x, recipe, (own, wide), errors).reshape(shape)
    near = near | (sets[0].low != sets[0].high) | (sets[1].low != sets[1].high)
    first = ~(errors[1] < errors[0]).reshape(shape)  # a NaN error leaves a block its own scale
    low, high = (torch.where(first, a, b) for a, b in ((sets[0].low, sets[1].low), (sets[0].high, sets[1].high)))
    others = ((sets[1].low, sets[0].low), (sets[1].high, sets[0].high))
    least, most = (torch.where(near, torch.where(first, a, b), torch.nan) for a, b in others)
    return ScaleSet(low, high, x.steps(recipe).scale.reshape(shape), ends_only=True, other=(least, most))


def _undecided(x: Prepared, recipe: Recipe, candidates: tuple[Steps, Steps], errors: tuple[Tensor, Tensor]) -> Tensor:
    """Where right implementations may find either of two errors the smaller.

    A value ``x'`` of a code is off by at most ``4u |x'|`` (its product by two scales), or where a quotient lies within
    the width of a midpoint by the distance of both neighbours from it, ``2 e |x|``; a sum of 16 terms in any order by
    ``16u`` of itself. A squared term ``d^2`` is off by ``2 |d| + delta`` times what ``d`` is. Twice that is taken.
    Sums that overflow float32 are finite where errors are measured in units of the scale: such blocks are undecided.
    """
    width = APPROXIMATE_WIDTH if recipe.approximate else CODE_WIDTH
    blocks = x.blocks(recipe.block)
    slack = 17 * U * (errors[0] + errors[1])
    for steps in candidates:
        values = (6.0 * steps.total).expand_as(blocks)  # no code is larger
        delta = 2 * width * blocks.abs() + 4 * U * values
        if recipe.candidates is Candidates.MSE:
            delta = delta * (2 * (values + blocks.abs()) + delta)
        slack = slack + delta.sum(dim=3, keepdim=True)
    assert x.global_scale is not None
    exact = _is_power(x.global_scale) & (errors[0] == 0) & (errors[1] == 0)  # no operation of any implementation rounds
    too_large = torch.isnan(errors[0] - errors[1]) & torch.isfinite(blocks).all(dim=3, keepdim=True)
    return too_large | ((errors[0] - errors[1]).abs() <= 2 * slack) & ~exact


def _of_steps(x: Prepared, recipe: Recipe, steps: Steps, factor: float = 1.0) -> ScaleSet:
    """The scales around ``factor`` times what a recipe gives for every block."""
    shape = x.grid(recipe.block).scale_shape
    expected = steps.scale.reshape(shape)
    single = recipe.formula is ScaleFormula.GIVEN or recipe.scale_format is ScaleFormat.INPUT or recipe.fault
    rounded_up = recipe.power_of_two is PowerOfTwo.CEIL and recipe.formula is ScaleFormula.DEVICE_RECIPROCAL
    if single or (recipe.power_of_two is not None and recipe.power_of_two not in ue8m0.LOG2_MODES and not rounded_up):
        return ScaleSet(expected, expected, expected)
    if rounded_up:
        ideal = steps.amax.reshape(shape) / torch.full_like(expected, recipe.element.max_finite)
        ends = (ideal * (1 - APPROXIMATE_WIDTH), ideal * (1 + APPROXIMATE_WIDTH))
        low, high = (
            ue8m0.ceil_power(e, byte_low=recipe.byte_low, inf_byte=recipe.inf_byte, nan_byte=recipe.nan_byte)
            for e in ends
        )
        return _unless_exceptional(low, high, expected, ends_only=True)
    if recipe.power_of_two in ue8m0.LOG2_MODES:
        in_input = recipe.formula is ScaleFormula.INPUT_DTYPE
        low, high = ue8m0.log2_window(steps.unrounded, recipe, of_dtype(x.dtype) if in_input else FP32)
        return _unless_exceptional(low.reshape(shape), high.reshape(shape), expected, ends_only=True)
    width = APPROXIMATE_WIDTH if recipe.approximate else SCALE_WIDTH
    ideal = steps.amax.reshape(shape) / torch.full_like(expected, recipe.element.max_finite)
    flush = TINY if recipe.approximate else 2.0**-149
    slack = torch.where(ideal < 2 * TINY, torch.full_like(ideal, flush), torch.zeros_like(ideal))
    low, high = ideal * (1 - width) - slack, ideal * (1 + width) + slack
    if x.scale_ub is not None and recipe.bounds_scale:
        low, high = (torch.minimum(e, x.scale_ub.expand_as(e)) for e in (low, high))
    if recipe.scale_floor:
        floor = f32(torch.full_like(expected, recipe.scale_floor))
        low, high = torch.maximum(low, floor), torch.maximum(high, floor)
    if x.global_scale is not None:
        g = x.global_scale.reshape(-1, *(1,) * (len(shape) - 1))
        low, high = (factor * (e * g if recipe.encodes else e / g) for e in (low, high))
        low, high = low * (1 - U), high * (1 + U)
    if recipe.published_floor:
        low, high = (e.clamp(min=recipe.published_floor) for e in (low, high))
    sets = _unless_exceptional(low, high, steps.unrounded.reshape(shape))
    if recipe.scale_format is ScaleFormat.FLOAT32:
        return sets
    low, high = (to_scale_format(edge.clamp(min=0.0), recipe, of_dtype(x.dtype)) for edge in (sets.low, sets.high))
    return ScaleSet(low, high, expected, grid=recipe.scale_format.number_format(of_dtype(x.dtype)))


def code_set(x: Prepared, recipe: Recipe, published: Tensor) -> CodeSet:
    """The codes that ``recipe`` may give once it has ``published`` these scales (float64, logical shape of the blocks).
    Where a quotient is NaN, or infinite under a recipe that does not saturate, they are its code of NaN; under a scale
    of 0, or NaN in a format without NaN, any finite code."""
    if x.ends is not None:
        return _codes_between(x, x.ends, recipe, published)
    cells = x.grid(recipe.block)
    fmt, blocks, s = recipe.element, x.blocks(recipe.block), cells.over(published)
    if recipe.code is CodeFormula.BF16:  # correctly rounded operations: one code
        v = quotients(blocks, s, s, recipe)
    elif x.global_scale is None:
        v = blocks / s
    else:  # a tie stays one: the product of an element and a float32 value is exact
        v = blocks * x.global_scale / s if recipe.encodes else blocks / (s * x.global_scale)
    undefined = torch.isnan(v) if recipe.saturates else ~torch.isfinite(v)
    if not fmt.has_nan:
        v.masked_fill_(undefined, 0.0)  # any code: ``fixed`` replaces it below
    exact = recipe.scale_format is ScaleFormat.UE8M0 or recipe.code is CodeFormula.BF16
    width = 0.0 if exact else APPROXIMATE_WIDTH if recipe.approximate else CODE_WIDTH
    # 1/s is subnormal above 2^126 and loses bits; no amax leads there, a scale that the caller gives may.
    flushed = 0.0 if recipe.code is CodeFormula.BF16 else max(width, APPROXIMATE_WIDTH)
    widths = torch.where(s > 2.0**126, torch.full_like(s, flushed), torch.full_like(s, width))
    if x.global_scale is not None:  # where the product of the scales, or 1/e, is subnormal it errs by up to 2^-149
        least = torch.minimum(x.both(s, recipe), x.both(torch.ones_like(s), recipe))
        widths = widths + torch.where(least < TINY, (2.0**-149 / least).clamp(max=1.0), torch.zeros_like(s))
        # under two powers of two every formula is exact, rcp.approx of one too
        widths = widths.masked_fill(_is_power(x.global_scale) & _is_power(s) & (least >= TINY), 0.0)
    near, middle, far = _codes_around(v, widths, x, recipe)
    policy = torch.tensor(recipe.code_of_nan, dtype=fmt.storage, device="cpu")
    fixed = torch.full_like(near, int(ordinal(policy, fmt)))
    low = torch.where(undefined, fixed, torch.minimum(near, far))
    high = torch.where(undefined, fixed, torch.maximum(near, far))
    free = (s == 0).expand_as(v) & ~torch.isnan(blocks)
    if not fmt.has_nan:  # whatever is coded under a NaN scale is NaN
        free = free | torch.isnan(s)
    if recipe.zero_sign is ZeroSign.SMALL:  # a float32 quotient below 2^-149 may be -0, which has no code of its own
        high = torch.where((v < 0) & (v.abs() < 2.0**-149), high.clamp(min=0), high)
    expected, nan = torch.where(undefined, fixed, middle), undefined & ~free & (recipe.nan_code is NanCode.NAN)
    low, high, expected, nan, free = (cells.join(t) for t in (low, high, expected, nan, free))
    return CodeSet(low, high, expected, nan, free, fmt)


def _codes_around(v: Tensor, widths: Tensor, x: Prepared, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """Ordinals of the codes of ``v (1 - w)``, ``v`` and ``v (1 + w)``; their ends where any random bits are right."""
    fmt, ends = recipe.element, [v * edge for edge in (1 - widths, 1.0, 1 + widths)]
    if recipe.rounding is CodeRounding.STOCHASTIC:
        low, high = torch.minimum(ends[0], ends[2]), torch.maximum(ends[0], ends[2])
        ways = ((low, Rounding.DOWN), (v, Rounding.NEAREST_EVEN), (high, Rounding.UP))
        codes = [encode(edge, fmt, rounding=way, overflow=Overflow.SATURATE) for edge, way in ways]
    else:
        codes = [to_codes(edge, recipe, x.random_blocks(recipe)) for edge in ends]
    first, middle, last = (ordinal(code, fmt) for code in codes)
    return first, middle, last


def _scales_between(x: Prepared, ends: Ends, recipe: Recipe) -> ScaleSet:
    """The hull of the sets of the expected, the least and the largest amax."""
    expected, *others = (scale_set(x.with_values(values), recipe) for values in (x.x, *ends.magnitudes()))
    if recipe.formula is ScaleFormula.GIVEN:
        return expected
    low, high = expected.low, expected.high
    for sets in others:
        low, high = torch.fmin(low, sets.low), torch.fmax(high, sets.high)
    unknown = ends.open
    if unknown is not None:
        unknown = x.grid(recipe.block).split(unknown.to(torch.uint8)).amax(dim=(1, 3)).reshape(low.shape) != 0
    fmt = recipe.scale_format.number_format(of_dtype(x.dtype))
    return ScaleSet(low, high, expected.expected, open=unknown, grid=None if fmt == FP32 else fmt)


def _codes_between(x: Prepared, ends: Ends, recipe: Recipe, published: Tensor) -> CodeSet:
    """The hull of the sets of the expected value and of both ends."""
    expected, *others = (code_set(x.with_values(values), recipe, published) for values in (x.x, ends.low, ends.high))
    low, high = expected.low, expected.high
    for sets in others:
        low, high = torch.minimum(low, sets.low), torch.maximum(high, sets.high)
    return replace(expected, low=low, high=high, open=ends.open)


def identify(x: Prepared, q: Tensor, scale: Tensor, *, among: Iterable[Recipe] | None = None) -> tuple[str, ...]:
    """Names of every recipe that reproduces the output bit for bit (NaN codes and NaN scales count as equal).

    ``q``: codes of the shape of ``x``, of the element's ``tensor_dtype``; ``scale``: any float dtype, of the logical
    shape of the blocks. Recipes with a given scale are tried only when ``x`` was prepared with one. The faulty ones are
    included.
    """
    published, candidates = decode(scale), _candidates(x, q, scale, among)
    candidates = [r for r in candidates if _either_of_two(x, published, r)]
    alive = [r for r in candidates if bool(_same(published, x.scale(r).reshape(scale.shape)).all())]
    for block in dict.fromkeys(recipe.block for recipe in alive):
        for band in x.bands(block):
            alive = [r for r in alive if r.block != block or bool(_reproduced(band, q, r).all())]
    return tuple(recipe.name for recipe in alive)


def kin(declared: Recipe) -> tuple[Recipe, ...]:
    """The named recipes of the declared one's element, those whose names begin with its name first.

    A recipe with the block (the amax floor) of the row that the declared one is named after gets the declared block
    (floor)."""
    usual, rows = recipes().get(declared.name, declared), []
    for recipe in of_element(declared.element):
        row = recipe.with_block(declared.block) if recipe.block == usual.block else recipe
        if recipe.amax_floor == usual.amax_floor:
            row = row.with_floor(declared.amax_floor)
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: not row.name.startswith(declared.name)))


def admitting(x: Prepared, q: Tensor, scale: Tensor, declared: Recipe, *, row: int = 0) -> tuple[str, ...]:
    """Names of the sound recipes of the declared one's element that admit every code and scale of an output, over its
    block where theirs is of its kind.

    Arguments and NaN as of :func:`identify`. Scales are looked at first: most recipes admit none of another's. Then the
    codes of the blocks of one ``row`` of the input seen as a matrix: what another recipe refuses there ends its trial.
    """
    names, published, raw = [], decode(scale), codes_of(q, declared.element).reshape(-1, q.shape[-1])
    for recipe in of_element(declared.element):
        if recipe.fault is not None or not same_kind(recipe.block, declared.block):
            continue
        taken = recipe.with_block(declared.block)
        if not _candidates(x, q, scale, (taken,)) or not _either_of_two(x, published, taken):
            continue
        if not bool(scale_set(x, taken).admits(published).all()):
            continue
        band, own_scale = x.band_of(taken.block, row), _same(published, x.scale(taken).reshape(published.shape))
        bad, _ = _bad_codes(x, band, raw[band.rows], published, own_scale, taken)
        if (bad is None or not bool(bad.any())) and judge_recipe(x, q, scale, taken).outside == 0:
            names.append(recipe.name)
    return tuple(names)


def _either_of_two(x: Prepared, published: Tensor, recipe: Recipe) -> bool:
    """Whether every scale is that of one of a recipe's candidates or beside it; checked before errors are computed."""
    if recipe.candidates is None:
        return True
    parts = zip(x.candidates(recipe, x.own_steps(recipe)), (1.0, 1.5), strict=True)
    own, wide = (_of_steps(x, recipe, part, factor).admits(published) for part, factor in parts)
    return bool((own | wide).all())


def same_kind(block: Block, other: Block) -> bool:
    """Whether a recipe of one block can be taken over the other: the same rows, groups of columns in both or none."""
    return block.rows == other.rows and (block.columns is None) == (other.columns is None)


def agreement(
    x: Prepared, q: Tensor, scale: Tensor, *, among: Iterable[Recipe] | None = None
) -> Iterator[tuple[str, float]]:
    """Every recipe that could have produced this shape, with the fraction of codes and scales that it reproduces;
    arguments and NaN as of :func:`identify`."""
    published, candidates = decode(scale), _candidates(x, q, scale, among)
    equal = {r.name: int(_same(published, x.scale(r).reshape(scale.shape)).sum()) for r in candidates}
    for block in dict.fromkeys(recipe.block for recipe in candidates):
        for band in x.bands(block):
            for recipe in candidates:
                if recipe.block == block:
                    equal[recipe.name] += int(_reproduced(band, q, recipe).sum())
    for recipe in candidates:
        yield recipe.name, equal[recipe.name] / (scale.numel() + q.numel())


def _candidates(x: Prepared, q: Tensor, scale: Tensor, among: Iterable[Recipe] | None) -> list[Recipe]:
    """Recipes that could have produced outputs of these shapes."""
    candidates = []
    for recipe in recipes().values() if among is None else among:
        if (recipe.formula is ScaleFormula.GIVEN) != (x.given is not None) or q.dtype != recipe.element.tensor_dtype:
            continue
        if recipe.scaling.global_scale != (x.global_scale is not None):
            continue
        if recipe.block.rows not in (None, 1) and q.dim() != 2:
            continue
        if recipe.rounding.random and x.random is None:
            continue
        if x.scale_ub is not None and not recipe.takes_scale_ub or not suits(recipe, x.dtype):
            continue
        if x.grid(recipe.block).scale_shape == tuple(scale.shape):
            candidates.append(recipe)
    return candidates


def ordinal(codes: Tensor, fmt: Format) -> Tensor:
    """Integer ``codes`` of at most 8 bits, any shape, as int16 of the same shape in the order of their values, -0 just
    below +0; NaN beyond the largest."""
    if fmt.complement:
        return ((codes.to(torch.int16) ^ fmt.sign_mask) - fmt.sign_mask).to(torch.int16)
    magnitude = (codes & fmt.magnitude_mask).to(torch.int16)
    return torch.where((codes & fmt.sign_mask) != 0, -1 - magnitude, magnitude)


def code_of_ordinal(rank: Tensor, fmt: Format) -> Tensor:
    """The inverse of :func:`ordinal`: int16 ``rank`` of any shape as codes of the same shape, in ``fmt.storage``; NaN
    codes too."""
    if fmt.complement:
        return (rank & fmt.code_mask).to(fmt.storage)
    return torch.where(rank < 0, fmt.sign_mask + (-1 - rank), rank).to(fmt.storage)


def why_mistrust(scales: Tensor, amax_is_zero: Tensor) -> str | None:
    """Reason for which a pass on these inputs would prove little, or None: ``scales`` float of any shape,
    ``amax_is_zero`` bool of any shape. NaN and infinite scales are no positive numbers."""
    if bool(amax_is_zero.all()):
        return "every block is zero"
    if not bool((torch.isfinite(scales) & (scales > 0)).any()):
        return "no scale is a positive number"
    if scales.numel() > 1 and bool((scales == scales.flatten()[0]).all()):
        return "all scales are equal, so a wrong scale index changes nothing"
    return None


def _unless_exceptional(low: Tensor, high: Tensor, expected: Tensor, *, ends_only: bool = False) -> ScaleSet:
    """The interval; or the recipe's own value where that lies outside, as for zero and non-finite blocks."""
    regular = (low <= expected) & (expected <= high) & (expected > 0)
    low, high = (torch.where(regular, edge, expected) for edge in (low, high))
    return ScaleSet(low, high, expected, ends_only)


def _is_value(x: Tensor, fmt: Format) -> Tensor:
    """Numbers that a format holds."""
    number = torch.isfinite(x)
    finite = torch.where(number, x, torch.ones_like(x))
    return number & (round_to(finite, fmt, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE) == finite)


def _is_power(x: Tensor) -> Tensor:
    """Positive powers of two: no other number has the significand 1/2, nor have NaN and infinity."""
    return torch.frexp(x)[0] == 0.5


def _same(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | (torch.isnan(x) & torch.isnan(y))


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Whether ``x`` and ``y``, of one shape and any one dtype, hold the same bytes, in words of 8 where they can be
    read so. NaN equals NaN of the same bits alone."""
    flat = [t.reshape(-1).view(torch.uint8) for t in (x, y)]
    wide = all(t.numel() % 8 == 0 and t.data_ptr() % 8 == 0 for t in flat)
    return torch.equal(*(t.view(torch.int64) if wide else t for t in flat))


def _same_code(x: Tensor, y: Tensor, fmt: Format) -> Tensor:
    return (x == y) | (is_nan(x, fmt) & is_nan(y, fmt))


def _reproduced(band: Band, q: Tensor, recipe: Recipe) -> Tensor:
    """The codes of a band's rows that a recipe gives bit for bit."""
    rows = codes_of(q, recipe.element).reshape(-1, q.shape[-1])[band.rows]
    return _same_code(rows, band.x.codes(recipe).view(rows.shape), recipe.element)
