"""Quantisation exactly as a recipe says, and back.

    a = max |x| over the block;  s, q = scale and inverse by the recipe;  code = RNE(sat(x / s)) in the element format

Every step that the library takes in float32 is one correctly rounded float32 operation here: of a scale in
float64 on float32 values, then one rounding, of an element in float32 itself. For products the first is exact (48
bits fit 53); for quotients the double rounding is innocuous because 53 >= 2*24 + 2 (Figueroa, "When is double
rounding innocuous?", SIGNUM 1995), also where the result is subnormal, which only makes the target shorter. No
cast to a narrow format decides a bit, divisors are tensors (torch turns division by a number into a multiplication on
CUDA), and powers of two come from exponent bits; so codes and scales are the same on every device.

The code of a quotient ``v`` is looked up: ``v`` rounded to odd in bfloat16 lies on the same side of every midpoint of
a format of at most 6 significant bits, and on it where ``v`` does (Boldo and Melquiond, as in
:mod:`oracle.numbers.rounding`), so the 65536 codes of bfloat16 have the codes of all quotients.

Sources: :mod:`oracle.numbers.recipes`, one per record. Recipes in FAST_MATH and DIV_FULL take
:mod:`oracle.numbers.fast_math` instead. Not covered: which *other* outputs are right (:mod:`oracle.bounds.quantiser`),
memory layouts of scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from oracle.errors import DeviceError, DtypeError, OptionError, ShapeError
from oracle.numbers import fast_math, mufu, ue8m0
from oracle.numbers.formats import BF16, FP32, Format, codes_of, decode, is_nan, of_dtype
from oracle.numbers.recipes import (
    AmaxScan,
    Arithmetic,
    Candidates,
    CodeFormula,
    CodeRounding,
    GlobalOrder,
    NanAmax,
    PowerOfTwo,
    Recipe,
    ScaleFormula,
    Special,
    ZeroSign,
)
from oracle.numbers.rounding import Overflow, Rounding, encode, exponent_of, power_of_two, round_to, to_dtype
from oracle.numbers.rounding import f32 as f32
from oracle.numbers.scaling import TENSOR, Block, Grid, ScaleFormat, grid

BAND = 1 << 21  # elements of a band: 16 MiB for each float64 temporary
TABLE = 1 << 16  # codes of bfloat16
WIDE = (torch.bfloat16, torch.float16, torch.float32)
PLAIN_ROUNDINGS = {CodeRounding.NEAREST_AWAY: Rounding.NEAREST_AWAY, CodeRounding.TRUNCATED: Rounding.TOWARD_ZERO}


@dataclass(frozen=True)
class Quantized:
    """Codes and scale of one tensor: ``x ~= scale * value(codes)``, times the global scale where the recipe has one.

    ``codes`` has the shape of ``x`` and the element format's ``tensor_dtype`` (uint8 for E2M1, one code each).
    ``scale`` is float32, whatever its published format, in the logical shape of the recipe's block
    (:func:`oracle.numbers.scaling.grid`).
    """

    codes: Tensor
    scale: Tensor
    recipe: Recipe


def quantize(
    x: Tensor,
    recipe: Recipe,
    *,
    scale: Tensor | None = None,
    scale_ub: Tensor | None = None,
    global_scale: Tensor | None = None,
) -> Quantized:
    """The exact bits that a recipe gives.

    Parameters
    ----------
    x : Tensor ``[..., K]``, bfloat16, float16 or float32
        Blocks of several rows need a matrix. Ragged blocks are filled with zeros for the amax; the codes are
        those of ``x`` alone.
    scale : Tensor, float32, a scalar or any shape of one value; exactly for recipes whose scale is given.
    scale_ub : Tensor, float32, a scalar or any shape of one value; only for recipes that take it.
    global_scale : Tensor, float32, a scalar or any shape of one value; exactly for recipes whose scaling has one.
        It multiplies on dequantisation, or divides there where the recipe ``encodes``; codes are those of ``x``
        over both scales.

    Returns Quantized: NaN, infinity, -0 and zero blocks as the record says; NaN codes are written as the format's
    ``nan_code``.
    Raises DtypeError, ShapeError, DeviceError, OptionError.
    """
    return prepare(x, scale=scale, scale_ub=scale_ub, global_scale=global_scale).quantized(recipe)


def prepare(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    scale_ub: Tensor | None = None,
    global_scale: Tensor | None = None,
    random: Tensor | None = None,
    ends: Ends | None = None,
) -> Prepared:
    """An input decoded once, for any number of recipes; arguments, NaN and errors as of :func:`quantize`.

    ``global_scale`` may hold a value for each row of a matrix, ``[R]`` or ``[R, 1]``. ``random``: uint8 of the shape of
    ``x``, the bits of recipes that round stochastically. ``ends``: where a kernel computes what it quantises, what may
    stand there; ``x`` is what is expected.
    """
    if x.dtype not in WIDE:
        raise DtypeError(f"x has dtype {x.dtype}; quantise bfloat16, float16 or float32")
    grid(x.shape, TENSOR)
    static, bound = _one_value("scale", scale, x), _one_value("scale_ub", scale_ub, x)
    return Prepared(x.detach(), static, bound, _per_row("global_scale", global_scale, x), random=random, ends=ends)


@dataclass(frozen=True)
class Steps:
    """The scale of every block, step by step: float64 ``[down, 1, across, 1]``, all values of float32.

    ``amax`` after the floor and the bound; ``unrounded`` the scale before it is rounded to the scale format;
    ``scale`` as published; ``inverse`` what QUOTIENT and SPLIT codes multiply by; ``total`` the published scale times
    the global one, in float32.
    """

    amax: Tensor
    unrounded: Tensor
    scale: Tensor
    inverse: Tensor
    total: Tensor

    def rows(self, down: slice) -> Steps:
        """Of some rows of blocks; a scale that all share stays."""
        tensors = (self.amax, self.unrounded, self.scale, self.inverse, self.total)
        return Steps(*(t if t.shape[0] == 1 else t[down] for t in tensors))


@dataclass(frozen=True)
class Ends:
    """The least and the largest value that may stand where a computed input has one, of its shape and dtype.

    A NaN of the input stands in both. ``open`` (bool): nothing is known of these values, whatever the ends say.
    """

    low: Tensor
    high: Tensor
    open: Tensor | None = None

    def each(self, of: Callable[[Tensor], Tensor]) -> Ends:
        """The same of another form of the input, such as some of its rows."""
        return Ends(of(self.low), of(self.high), None if self.open is None else of(self.open))

    def magnitudes(self) -> tuple[Tensor, Tensor]:
        """The least and the largest magnitude between the ends, of their shape and dtype; NaN where an end is NaN."""
        low, high = self.low.abs(), self.high.abs()
        least = torch.minimum(low, high).masked_fill((self.low <= 0) & (self.high >= 0), 0.0)
        return least, torch.maximum(low, high)


class Prepared:
    """One input with everything that recipes share computed once; what is per element is made in bands of rows.

    ``whole`` is the input of which this one is a band. ``global_scale`` is a scalar or ``[rows, 1, 1, 1]``. Blocks are
    seen as ``[down, r, across, c]`` (:class:`oracle.numbers.scaling.Grid`).
    NaN and infinities are those of the input; the record of a recipe says how it treats them.
    """

    def __init__(
        self,
        x: Tensor,
        static_scale: Tensor | None,
        scale_ub: Tensor | None,
        global_scale: Tensor | None,
        *,
        whole: Prepared | None = None,
        random: Tensor | None = None,
        ends: Ends | None = None,
    ) -> None:
        self.x, self.dtype, self.given, self.scale_ub, self.global_scale = (
            x,
            x.dtype,
            static_scale,
            scale_ub,
            global_scale,
        )
        self.random, self.ends = random, ends
        self._whole = whole
        self._blocks: dict[Block, Tensor] = {}
        self._amax: dict[tuple[Block, NanAmax, AmaxScan], Tensor] = {}
        self._steps: dict[Recipe, Steps] = {}

    @cached_property
    def values(self) -> Tensor:
        """The input in float64, of the shape of ``x``."""
        return decode(self.x)

    def grid(self, block: Block) -> Grid:
        """The blocks of this input."""
        return grid(self.x.shape, block)

    def bands(self, block: Block) -> Iterator[Band]:
        """Consecutive rows, as many whole blocks of them as have about ``BAND`` elements; all of a small input."""
        cells, unit = self.grid(block), self._unit(block)
        height = unit * max(1, BAND // (unit * cells.columns))
        for start in range(0, max(1, cells.rows), height):
            yield self._band(block, start, height)

    def band_of(self, block: Block, row: int) -> Band:
        """The rows that share blocks with a row of this input seen as a matrix."""
        unit = self._unit(block)
        return self._band(block, row // unit * unit, unit)

    def _unit(self, block: Block) -> int:
        """How many rows cannot be parted: those of a block, one where a block has all of them."""
        return 1 if block.rows is None else self.grid(block).block_rows

    def _band(self, block: Block, start: int, height: int) -> Band:
        cells, unit = self.grid(block), self._unit(block)
        if height >= cells.rows:
            return Band(self, slice(None), slice(None))
        rows = slice(start, min(cells.rows, start + height))
        down = slice(None) if block.rows is None else slice(start // unit, -(-rows.stop // unit))
        part = self._rows(rows, (cells.rows, cells.columns))
        part._amax = {key: amax[down] for key, amax in self._amax.items() if key[0] == block}
        part._steps = {r: steps.rows(down) for r, steps in self._steps.items() if r.block == block}
        return Band(part, rows, down)

    def _rows(self, rows: slice, shape: tuple[int, ...]) -> Prepared:
        """Some rows of this input seen as a matrix of that shape."""

        def cut(t: Tensor) -> Tensor:
            return t.reshape(shape)[rows]

        g = self.global_scale
        return Prepared(
            cut(self.x),
            self.given,
            self.scale_ub,
            g if g is None or g.dim() == 0 else g[rows],
            whole=self,
            random=None if self.random is None else cut(self.random),
            ends=None if self.ends is None else self.ends.each(cut),
        )

    def with_values(self, x: Tensor) -> Prepared:
        """Other values ``x``, of the dtype and the shape of this input's, exactly known, under the same scales and
        random bits."""
        return Prepared(x, self.given, self.scale_ub, self.global_scale, random=self.random)

    def blocks(self, block: Block) -> Tensor:
        """The values, float64 ``[down, r, across, c]``, ragged blocks filled with zeros."""
        if block not in self._blocks:
            self._blocks[block] = self.grid(block).split(self.values)
        return self._blocks[block]

    def amax(self, recipe: Recipe) -> Tensor:
        """Exact amax per block, float64 ``[down, 1, across, 1]``, by the recipe's NaN policy and scan, before any
        floor."""
        key = (recipe.block, recipe.nan_amax, recipe.scan)
        if key not in self._amax:
            if recipe.block.rows is None and self._whole is not None:
                return self._whole.amax(recipe)
            columns = self.x.shape[-1]
            bands = self.bands(recipe.block)
            parts = [block_amax(band.x.grid(recipe.block).split(band.x.x), recipe, columns=columns) for band in bands]
            self._amax[key] = torch.stack(parts).amax(dim=0) if recipe.block.rows is None else torch.cat(parts)
        return self._amax[key]

    def steps(self, recipe: Recipe) -> Steps:
        """The scale of every block, step by step."""
        if recipe not in self._steps:
            self._steps[recipe] = self._made(recipe)
        return self._steps[recipe]

    def _made(self, recipe: Recipe) -> Steps:
        if (self.given is not None) != (recipe.formula is ScaleFormula.GIVEN):
            need = "needs a scale" if self.given is None else "computes its own scale; pass none"
            raise OptionError(f"recipe {recipe.name} {need}")
        if self.scale_ub is not None and not recipe.takes_scale_ub:
            raise OptionError(f"recipe {recipe.name} takes no scale_ub; pass None")
        if (self.global_scale is not None) != recipe.scaling.global_scale:
            need = "needs a global scale" if self.global_scale is None else "has no global scale; pass None"
            raise OptionError(f"recipe {recipe.name} {need}")
        if not suits(recipe, self.dtype):
            own = "float16" if recipe.scan is AmaxScan.FLOAT16_BITS else "bfloat16"
            raise DtypeError(f"recipe {recipe.name} is known for a {own} input alone, not for {self.dtype}")
        if self.given is not None:
            s = self.given.reshape(1, 1, 1, 1)
            return Steps(s, s, s, f32(torch.ones_like(s) / s), s)
        if recipe.candidates is not None:
            return self.chosen(recipe, self.own_steps(recipe))
        fmt, factors = of_dtype(self.dtype), {"scale_ub": self.scale_ub, "global_scale": self.global_scale}
        return scale_steps(self.amax(recipe), recipe, fmt, **factors)

    def own_steps(self, recipe: Recipe) -> Steps:
        """The steps of every block's own scale, whichever candidate is chosen."""
        return self.steps(replace(recipe, candidates=None))

    def candidates(self, recipe: Recipe, steps: Steps) -> tuple[Steps, Steps]:
        """The steps of a block's own scale, and of 1.5 times it."""
        wide = f32(steps.unrounded * 1.5)
        rounded = to_scale_format(wide, recipe, of_dtype(self.dtype))
        assert self.global_scale is not None
        return steps, replace(steps, unrounded=wide, scale=rounded, total=_total(rounded, self.global_scale, recipe))

    def chosen(self, recipe: Recipe, steps: Steps) -> Steps:
        """The steps of the candidate whose error is smaller; ``steps`` are those of a block's own scale."""
        own, wide = self.candidates(recipe, steps)
        other = self.error(recipe, wide) < self.error(recipe, own)
        pairs = ((getattr(wide, name), getattr(own, name)) for name in ("unrounded", "scale", "inverse", "total"))
        return Steps(own.amax, *(torch.where(other, a, b) for a, b in pairs))

    def error(self, recipe: Recipe, steps: Steps) -> Tensor:
        """The error of every block under a scale, float64 ``[down, 1, across, 1]``: each operation rounded to float32,
        summed in the order of K. NaN where the block, or its scale, is NaN."""
        blocks = self.blocks(recipe.block)
        codes = to_codes(quotients(blocks, steps.total, steps.inverse, recipe), recipe, None)
        difference = f32(f32(decode(codes, recipe.element) * steps.total) - blocks).abs()
        terms = f32(difference * difference) if recipe.candidates is Candidates.MSE else difference
        first, *rest = terms.to(torch.float32).unbind(dim=3)  # values of float32, added in float32
        for term in rest:
            first = first + term
        return first.unsqueeze(3).to(torch.float64)

    def quantized(self, recipe: Recipe) -> Quantized:
        """Codes and scale; see :func:`quantize`."""
        published = self.scale(recipe).reshape(self.grid(recipe.block).scale_shape)
        stored = to_dtype(published, torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
        return Quantized(self.codes(recipe).view(recipe.element.tensor_dtype), stored, recipe)

    def scale(self, recipe: Recipe) -> Tensor:
        """The published scale, float64 ``[down, 1, across, 1]``."""
        return self.steps(recipe).scale

    def both(self, scale: Tensor, recipe: Recipe) -> Tensor:
        """Published ``scale``, float64 and any shape that broadcasts against the global one's, times that one where the
        recipe has one; float64 of that shape."""
        if self.global_scale is None:
            return scale
        g = self.global_scale
        if g.dim() and scale.dim() != g.dim():  # a matrix whose rows have scales of their own
            g = g.reshape(-1, 1)
        return scale / g if recipe.encodes else scale * g

    def codes(self, recipe: Recipe) -> Tensor:
        """The codes, ``storage`` of the element format, of the shape of ``x``."""
        element = recipe.element
        out = torch.empty(self.x.shape, dtype=element.storage, device=self.x.device)
        matrix = out.view(-1, out.shape[-1])
        for band in self.bands(recipe.block):
            steps, cells = band.x.steps(recipe), band.x.grid(recipe.block)
            blocks = cells.split(band.x.x.to(torch.float32))  # which holds them all
            quotient = quotients(blocks, steps.total, steps.inverse, recipe)
            joined = cells.join(to_codes(quotient, recipe, band.x.random_blocks(recipe)))
            matrix[band.rows] = joined.view(-1, joined.shape[-1])
        return out

    def random_blocks(self, recipe: Recipe) -> Tensor | None:
        """The random bits, uint8 ``[down, r, across, c]``; None where the recipe takes none.

        Raises OptionError: it takes them, and there are none.
        """
        if not recipe.rounding.random:
            return None
        if self.random is None:
            raise OptionError(f"recipe {recipe.name} rounds stochastically: pass random bits")
        return self.grid(recipe.block).split(self.random)


def to_codes(quotient: Tensor, recipe: Recipe, random: Tensor | None) -> Tensor:
    """The codes of float64 or float32 ``quotient`` of any shape: of the same shape, ``storage`` of the element format.

    ``random`` is uint8 of the same shape, for stochastic rounding. A NaN quotient gives the recipe's ``code_of_nan``,
    an infinite one the largest code of its sign, or NaN under a recipe that does not saturate.
    """
    few, narrow = quotient.numel() < TABLE, recipe.element.fraction_bits <= BF16.fraction_bits - 2
    if few or recipe.rounding.random or not narrow or quotient.dtype is torch.float64:
        return _codes(quotient.to(torch.float64), recipe, random)
    bits = quotient.view(torch.int32)
    odd = ((bits & 0xFFFF).add_(0xFFFF).bitwise_or_(bits) >> 16).add_(TABLE // 2)  # bit 0 says whether any was lost
    return torch.index_select(_code_table(recipe, quotient.device), 0, odd.flatten()).view(quotient.shape)


def _codes(quotient: Tensor, recipe: Recipe, random: Tensor | None) -> Tensor:
    """:func:`to_codes` of float64 quotients."""
    element, undefined = recipe.element, torch.isnan(quotient)
    numbers = quotient.masked_fill(undefined, 0.0)  # any code: the recipe's own replaces it below
    rounding = PLAIN_ROUNDINGS.get(recipe.rounding, Rounding.NEAREST_EVEN)
    if recipe.rounding is CodeRounding.NEAREST_ZERO:
        numbers = numbers * (1 - 2.0**-40)  # no float32 value but a tie lies so near above a midpoint
    elif recipe.rounding.random:
        assert random is not None
        numbers, rounding = jittered(numbers, element, random), Rounding.TOWARD_ZERO
    codes = encode(
        numbers, element, rounding=rounding, overflow=Overflow.SATURATE if recipe.saturates else Overflow.NAN
    )
    if recipe.zero_sign is ZeroSign.ZEROS:
        codes = codes.masked_fill(quotient == 0, element.sign_mask)
    elif recipe.zero_sign is not ZeroSign.KEPT:
        zero = codes == element.sign_mask
        codes = codes.masked_fill(zero if recipe.zero_sign is ZeroSign.DROPPED else zero & (quotient == 0), 0)
    return codes.masked_fill_(undefined, recipe.code_of_nan)


@lru_cache(maxsize=64)
def _code_table(recipe: Recipe, device: torch.device) -> Tensor:
    """The codes of all bfloat16 quotients, by their bits as signed numbers from -32768 on."""
    bits = torch.arange(-TABLE // 2, TABLE // 2, device=device).to(torch.int16)
    return _codes(decode(bits, BF16), recipe, None)


def jittered(v: Tensor, element: Format, random: Tensor) -> Tensor:
    """``v`` moved away from zero by ``u step(|v|)``, one float32 fma: ``u = random / 256``, ``step`` the spacing of the
    format at ``|v|``, of its last binade above. What is truncated then is the value that was, plus up to a step.

    ``v`` is float64 of any shape, ``random`` uint8 of the same shape; returns float64 of that shape. NaN and infinities
    stay.
    Source: TransformerEngine util/ptx.cuh ``stochastic_round_fp4_e2m1``.
    """
    magnitude = v.abs()
    exponent = exponent_of(magnitude).clamp(element.emin, element.emax) - element.fraction_bits
    return torch.copysign(f32(magnitude + random.to(torch.float64) / 256.0 * power_of_two(exponent)), v)


@dataclass(frozen=True)
class Band:
    """Some rows of an input seen as a matrix: ``x`` itself, and where its rows and its blocks of scales lie in it."""

    x: Prepared
    rows: slice
    blocks: slice


def per_tensor_dequantize(q: Tensor, inv_scale: Tensor) -> Tensor:
    """``RN_float16(RN_float32(value(q) * inv_scale))``, as vLLM dequantises a whole tensor.

    Parameters
    ----------
    q : Tensor, float8_e4m3fn, any shape
    inv_scale : Tensor, float32, a scalar or any shape of one value (it multiplies, whatever its name says)

    Notes
    -----
    E4M3 values are exact in float16. torch multiplies a float16 tensor by a zero-dimensional float32 tensor
    in float32 and rounds the product once more: two roundings, which this function repeats.
    Source: vLLM quantization/utils/w8a8_utils.py ``per_tensor_dequantize``.

    Returns float16 of the same shape. Magnitudes that round above 65504 are infinite, those up to 2^-25 are zero; NaN
    codes give NaN.
    Raises DtypeError: ``q`` or ``inv_scale`` has another dtype; ShapeError, DeviceError: ``inv_scale`` is not one value
    there; OptionError: it is None.
    """
    if q.dtype is not torch.float8_e4m3fn:
        raise DtypeError(f"q has dtype {q.dtype}; per_tensor_dequantize takes torch.float8_e4m3fn")
    factor = _one_value("inv_scale", inv_scale, q)
    if factor is None:
        raise OptionError("per_tensor_dequantize needs inv_scale, one float32 value")
    return to_dtype(f32(decode(q) * factor), torch.float16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def block_amax(blocks: Tensor, recipe: Recipe, *, columns: int) -> Tensor:
    """Amax of ``blocks`` ``[down, r, across, c]`` of an input in its dtype, as float64 ``[down, 1, across, 1]``.

    NaN elements are ignored or propagated as the recipe says. ``columns`` is the unpadded K, which the faulty scan of
    :class:`oracle.numbers.recipes.AmaxScan` looks at. Magnitudes are compared as the integers that their codes are,
    which have the same order.
    """
    fmt = of_dtype(blocks.dtype)
    if recipe.scan is AmaxScan.FLOAT16_BITS:
        return (codes_of(blocks).to(torch.float64) % 2.0**16).amax(dim=(1, 3), keepdim=True)
    magnitude = codes_of(blocks) & fmt.magnitude_mask
    if recipe.scan is AmaxScan.ROW_AS_COLUMN:
        magnitude = magnitude * seen_by_row_as_column(blocks.shape, columns).to(blocks.device)
    amax = magnitude.amax(dim=(1, 3), keepdim=True)
    if recipe.nan_amax is NanAmax.IGNORED and bool(is_nan(amax, fmt).any()):
        amax = magnitude.masked_fill_(is_nan(magnitude, fmt), 0).amax(dim=(1, 3), keepdim=True)
    return decode(amax, fmt)


def seen_by_row_as_column(shape: tuple[int, ...] | torch.Size, columns: int) -> Tensor:
    """Which elements of blocks FlashInfer's 128x128 amax scan looks at, bool ``[1, r, across, c]``.

    The kernel guards the column ``c kb + 32 j + lane`` of its inner loop with the index ``i`` of the row
    instead of ``j``: an element of row ``i`` and lane ``column mod 32`` is skipped where ``c kb + 32 i +
    lane >= K``. Of the last block of any K only 4 rows are seen.
    """
    _, r, across, c = shape
    row = torch.arange(r, device="cpu").reshape(1, r, 1, 1)
    block = torch.arange(across, device="cpu").reshape(1, 1, across, 1)
    lane = torch.arange(c, device="cpu").reshape(1, 1, 1, c) % 32
    return block * c + row * 32 + lane < columns


def scale_steps(
    amax: Tensor, recipe: Recipe, fmt: Format, *, scale_ub: Tensor | None = None, global_scale: Tensor | None = None
) -> Steps:
    """From ``amax``, float64 values of float32 ``[down, 1, across, 1]``, to a recipe's scale; ``fmt`` is the format of
    ``x``.

    ``scale_ub`` and ``global_scale`` are float64 values of float32, scalars or of a shape that broadcasts against
    ``amax``. NaN, infinity and zero of an amax as the record says.
    """
    a = amax
    if recipe.zero_amax:
        a = torch.where(a == 0, torch.full_like(a, recipe.zero_amax), a)
    if scale_ub is not None and not recipe.bounds_scale:
        a = torch.minimum(a, scale_ub.expand_as(a))
    if recipe.amax_floor:
        floor = torch.full_like(a, recipe.amax_floor)
        wide = recipe.formula is ScaleFormula.INVERSE_FLOAT64
        a = torch.maximum(a, floor if wide else bf16(floor) if recipe.code is CodeFormula.BF16 else f32(floor))
    if recipe.amax_added:
        a = f32(a + f32(torch.full_like(a, recipe.amax_added)))
    s, inverse = _scale_and_inverse(a, recipe, fmt)
    for kind in recipe.unit_when:
        unit = {Special.ZERO: a == 0, Special.INF: torch.isinf(a), Special.NAN: torch.isnan(a)}[kind]
        s, inverse = (torch.where(unit, torch.ones_like(t), t) for t in (s, inverse))
    if scale_ub is not None and recipe.bounds_scale:
        s = torch.minimum(s, scale_ub.expand_as(s))
    if recipe.scale_floor:
        s = torch.maximum(s, f32(torch.full_like(s, recipe.scale_floor)))
    if global_scale is not None:
        s = _under(global_scale, s, a, recipe)
    if recipe.zero_blocks:
        s = torch.where(a == 0, torch.zeros_like(s), s)
    if recipe.muted_below:
        s = torch.where(s < recipe.muted_below, torch.zeros_like(s), s)
    if recipe.published_zero:
        s = torch.where(s == 0, torch.full_like(s, recipe.published_zero), s)
    if recipe.published_floor:
        s = torch.maximum(s, torch.full_like(s, recipe.published_floor))
    if recipe.power_of_two is None:
        rounded = to_scale_format(s, recipe, fmt)
    else:
        log_format = fmt if recipe.formula is ScaleFormula.INPUT_DTYPE else FP32
        rounded = ue8m0.round_scale(s, a, inverse, recipe, log_format)
    if recipe.power_of_two is PowerOfTwo.INVERSE_FLOOR:
        inverse = torch.ones_like(rounded) / rounded
    if global_scale is None:
        return Steps(a, s, rounded, inverse, rounded)
    one = torch.ones_like(rounded)
    if recipe.code is CodeFormula.SPLIT:
        inverse = f32(f32(one / global_scale) / rounded)
    total = _total(rounded, global_scale, recipe)
    if recipe.muted_below:
        total = torch.where(s == 0, torch.full_like(total, torch.inf), total)
    return Steps(a, s, rounded, inverse, total)


def _total(scale: Tensor, global_scale: Tensor, recipe: Recipe) -> Tensor:
    """The published scale times the global one, in float32."""
    return f32(scale * (f32(torch.ones_like(global_scale) / global_scale) if recipe.encodes else global_scale))


def _under(global_scale: Tensor, s: Tensor, a: Tensor, recipe: Recipe) -> Tensor:
    """The scale of a block under a global one, before it is rounded to its format (:class:`GlobalOrder`)."""
    top = a.new_tensor(recipe.element.max_finite)
    match recipe.global_order:
        case GlobalOrder.AFTER:
            return f32(s / global_scale)
        case GlobalOrder.TOP:
            return f32(a / f32(top * global_scale))
        case GlobalOrder.ENCODE_AFTER:
            return f32(s * global_scale)
        case GlobalOrder.ENCODE_FIRST:
            return f32(a * f32(global_scale * f32(torch.ones_like(top) / top)))


def to_scale_format(s: Tensor, recipe: Recipe, fmt: Format) -> Tensor:
    """Float64 scales ``s`` of any shape rounded to the nearest of the recipe's scale format; float64 of the same shape.
    A format without infinity saturates; NaN stays NaN."""
    target = recipe.scale_format.number_format(fmt)
    if target == FP32:  # every scale is a float32 value already
        return s
    overflow = Overflow.INF if target.has_inf else Overflow.SATURATE
    return round_to(s, target, rounding=Rounding.NEAREST_EVEN, overflow=overflow)


def suits(recipe: Recipe, dtype: torch.dtype) -> bool:
    """Whether a recipe is of inputs of this dtype: bf16 steps of bfloat16, float16 bits of float16."""
    if recipe.scan is AmaxScan.FLOAT16_BITS:
        return dtype == torch.float16
    return dtype == torch.bfloat16 or recipe.code is not CodeFormula.BF16


def quotients(blocks: Tensor, s: Tensor, inverse: Tensor, recipe: Recipe) -> Tensor:
    """What is rounded to codes: ``blocks`` ``[down, r, across, c]`` over a scale ``s``, float64 and of a shape that
    broadcasts against them, or times ``inverse``, of the same shape and dtype as ``s``.

    Returns float32 values in the shape and the dtype of ``blocks``: float64, or float32, which is faster. NaN where the
    block or the scale is NaN, and for 0 over 0; what a recipe does for zero and infinite scales stands in its record.
    """
    dtype = blocks.dtype
    if recipe.divides_by_bits:
        s = s.masked_fill(torch.isnan(s), torch.inf).clamp(min=FP32.min_normal)

    def once(result: Tensor) -> Tensor:
        return f32(result) if dtype is torch.float64 else result

    match recipe.code:
        case CodeFormula.DIVIDE if recipe.arithmetic is not Arithmetic.IEEE:
            quotient = _divided(blocks.to(torch.float64), s, recipe).to(dtype)
        case CodeFormula.DIVIDE:
            quotient = once(blocks / s.to(dtype))
        case CodeFormula.RECIPROCAL:
            quotient = once(blocks * _reciprocal(s, recipe).to(dtype))
        case CodeFormula.QUOTIENT | CodeFormula.SPLIT if recipe.arithmetic is Arithmetic.FAST_MATH:
            quotient = fast_math.product(blocks.to(torch.float64), inverse).to(dtype)
        case CodeFormula.QUOTIENT | CodeFormula.SPLIT:
            quotient = once(blocks * inverse.to(dtype))
        case CodeFormula.BF16:
            quotient = bf16(blocks.to(torch.float64) * bf16(torch.ones_like(s) / s)).to(dtype)
    if recipe.zero_blocks and not bool(((s >= FP32.min_normal) & torch.isfinite(s)).all()):  # else 0 over s is 0
        empty = (blocks == 0).all(dim=3, keepdim=True).all(dim=1, keepdim=True)
        quotient = torch.where(empty, blocks, quotient)
    if recipe.zero_codes:
        muted = s == 0
        if recipe.scale_format is ScaleFormat.UE8M0:
            muted = muted | (s == 2.0**-127)  # byte 0 shifted into a float32 exponent reads as 0.0
        if bool(muted.any()):
            quotient = torch.where(muted, blocks * 0.0, quotient)
    return quotient


def _divided(x: Tensor, y: Tensor, recipe: Recipe) -> Tensor:
    """The device's approximate ``x / y``."""
    return fast_math.divide(x, y, flushed=recipe.arithmetic is Arithmetic.FAST_MATH)


def _reciprocal(s: Tensor, recipe: Recipe) -> Tensor:
    """``fl(1/s)``, with the recipe's policy at the ends of the range."""
    inverse = f32(torch.ones_like(s) / s)
    if recipe.inverse_limit:
        inverse = torch.where(torch.isinf(inverse), torch.full_like(inverse, FP32.max_finite), inverse)
    if recipe.inf_wraps:
        inverse = torch.where(torch.isinf(s), torch.full_like(inverse, -torch.inf), inverse)
    if recipe.inverse_flushed:
        inverse = torch.where(inverse < FP32.min_normal, inverse * 0.0, inverse)
    if recipe.unit_at_byte_0:
        inverse = torch.where(s == 2.0**-127, torch.ones_like(inverse), inverse)
    return inverse


def _scale_and_inverse(a: Tensor, recipe: Recipe, fmt: Format) -> tuple[Tensor, Tensor]:
    top = a.new_tensor(recipe.element.max_finite)
    if recipe.arithmetic is not Arithmetic.IEEE:
        inverse = _divided(top.expand_as(a), a, recipe)
        if recipe.formula is ScaleFormula.INVERSE:
            return _divided(torch.ones_like(a), inverse, recipe), inverse
        s = f32(a * f32(torch.ones_like(top) / top))
        return (mufu.flush(s) if recipe.arithmetic is Arithmetic.FAST_MATH else s), inverse
    inverse = f32(top / a)
    if recipe.inverse_limit:
        inverse = torch.where(torch.isinf(inverse), torch.full_like(inverse, fmt.max_finite), inverse)
    match recipe.formula:
        case ScaleFormula.DIVIDE:
            return f32(a / top), inverse
        case ScaleFormula.MULTIPLY | ScaleFormula.DEVICE_RECIPROCAL:
            return f32(a * f32(torch.ones_like(top) / top)), inverse
        case ScaleFormula.INPUT_DTYPE:
            quotient = f32(a / top)
            return round_to(quotient, fmt, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF), inverse
        case ScaleFormula.BF16_MULTIPLY:
            return bf16(a * bf16(torch.ones_like(top) / top)), inverse
        case _:
            return f32(torch.ones_like(inverse) / inverse), inverse


def _per_row(name: str, value: Tensor | None, x: Tensor) -> Tensor | None:
    """A float32 tensor of one value, or of one for each row of a matrix: decoded, ``[rows, 1, 1, 1]``."""
    if value is None or value.numel() == 1 or x.dim() != 2 or value.numel() != x.shape[0]:
        return _one_value(name, value, x)
    return _scales(name, value, x).reshape(-1, 1, 1, 1)


def bf16(x: Tensor) -> Tensor:
    """Float64 ``x`` of any shape (products of bfloat16 values are exact) rounded once to bfloat16; float64 of the same
    shape. Infinite beyond the largest; NaN stays NaN."""
    return round_to(x, BF16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def _one_value(name: str, value: Tensor | None, x: Tensor) -> Tensor | None:
    """A float32 tensor of one value, decoded; None stays None."""
    if value is None:
        return None
    if value.dtype is torch.float32 and value.numel() != 1:
        raise ShapeError(f"{name} has shape {list(value.shape)}; it must hold one value")
    return _scales(name, value, x).reshape(())


def _scales(name: str, value: Tensor, x: Tensor) -> Tensor:
    """Float32 values on the device of ``x``, decoded."""
    if value.dtype is not torch.float32:
        raise DtypeError(f"{name} has dtype {value.dtype}; pass torch.float32 values")
    if value.device != x.device:
        raise DeviceError(f"{name} lies on {value.device}, x on {x.device}; move one with .to(device)")
    return decode(value)
