"""The record of a scale recipe: every choice that changes a bit of a quantiser's output.

Which elements share a scale, how the scale is computed and in which format it is published, the floors, what an
all-zero or non-finite block does, and how the code is computed. All formulas are float32 operations unless the
record says otherwise; ``s`` is the published scale (it *multiplies* on dequantisation), ``q = 1/s`` its inverse,
``a`` the amax of the block, 448 the largest E4M3 value. The named recipes, with their sources, are in
:mod:`oracle.numbers.recipes`. Not covered: E5M2 or FNUZ codes, stochastic rounding, delayed scaling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final


@dataclass(frozen=True)
class Block:
    """Extent of the elements that share a scale; None means the whole extent of that axis."""

    rows: int | None
    columns: int | None

    def __str__(self) -> str:
        return f"{self.rows or 'M'}x{self.columns or 'K'}"


TENSOR: Final = Block(None, None)
TOKEN: Final = Block(1, None)
GROUP_128: Final = Block(1, 128)
GROUP_32: Final = Block(1, 32)
TILE_128: Final = Block(128, 128)
COLUMN_128: Final = Block(128, 1)


class ScaleFormat(StrEnum):
    """Format of the published scale. INPUT is the dtype of ``x`` (bfloat16 for a bfloat16 input)."""

    FLOAT32 = "float32"
    INPUT = "input"
    UE8M0 = "ue8m0"


class ScaleFormula(StrEnum):
    """How the scale comes out of amax, before any rounding to a power of two."""

    DIVIDE = "a / 448"
    MULTIPLY = "a * fl(1/448)"
    INVERSE = "1 / fl(448 / a)"
    INVERSE_FLOAT64 = "1 / fl32(448 / double(a))"
    INPUT_DTYPE = "a / 448 in the dtype of x"
    GIVEN = "given by the caller"


class CodeFormula(StrEnum):
    """What is rounded to E4M3. QUOTIENT is ``x*q`` with the ``q`` of the scale formula, or 448/a."""

    DIVIDE = "x / s"
    RECIPROCAL = "x * fl(1/s)"
    QUOTIENT = "x * q"


class PowerOfTwo(StrEnum):
    """How a scale becomes a power of two."""

    CEIL = "smallest power of two >= s, by exponent bits"
    AMAX_FLOOR = "2^(floor(log2 a) - 8), OCP MX"
    AMAX_CEIL = "2^(ceil(log2 a) - 8)"
    AMAX_EVEN = "2^(floor(log2 of a rounded to 3 fraction bits) - 8)"
    EXP2_CEIL_LOG2 = "exp2(ceil(fl(log2 s)))"
    EXP2_ROUND_LOG2 = "exp2(round(fl(log2 s)))"
    INVERSE_FLOOR = "1 / (q with its fraction cleared)"


class Special(StrEnum):
    """Kinds of amax that a recipe may treat apart."""

    ZERO = "zero"
    INF = "inf"
    NAN = "nan"


class NanAmax(StrEnum):
    """IGNORED: a NaN element does not enter amax (fmaxf). PROPAGATED: it makes amax NaN (torch.amax)."""

    IGNORED = "ignored"
    PROPAGATED = "propagated"


class NanCode(StrEnum):
    """Code of a NaN quotient: NaN (0x7F), or what the order of fminf and fmaxf leaves of it."""

    NAN = "0x7f"
    POSITIVE_MAX = "0x7e"
    NEGATIVE_MAX = "0xfe"

    @property
    def code(self) -> int:
        return int(self.value, 16)


class Arithmetic(StrEnum):
    """How the quantiser divides and multiplies in float32; :mod:`oracle.numbers.fast_math` for a bfloat16 input only."""

    IEEE = "correctly rounded, subnormals kept"
    FAST_MATH = "div.approx.ftz, rcp.approx.ftz, mul.ftz of sm90"


class AmaxScan(StrEnum):
    """Which elements of a block enter amax. Only ALL is right."""

    ALL = "all"
    ROW_AS_COLUMN = "row r of column block kb skipped where 128 kb + 32 r + (column mod 32) >= K"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every choice of one quantiser.

    Attributes
    ----------
    name, source
        Registry name; library, file and commit where the formula was read.
    block, scale_format, formula, code
        Which elements share a scale; the format of ``s``; how ``s`` and the codes are computed.
    power_of_two
        How ``s`` becomes a power of two (UE8M0 recipes), else None.
    byte_low, inf_byte, nan_byte
        UE8M0 only: smallest byte, and the bytes of an infinite and of a NaN input (255 is NaN;
        ``inf_byte=None`` leaves an infinite scale infinite in float32).
    amax_floor, scale_floor
        ``a = max(a, amax_floor)``; ``s = max(s, scale_floor)`` before rounding to a power of two. 0: none.
    unit_when
        Kinds of amax for which ``q = s = 1`` is used instead of the formula.
    inverse_limit
        An infinite ``q`` becomes the largest finite value of the dtype of ``x``.
    zero_codes
        Where the float32 image of the scale is 0, every code is a (signed) zero instead of ``x * inf``.
    nan_amax, nan_code
        What a NaN element does to amax, and the code of a NaN quotient.
    takes_scale_ub
        amax is clamped to ``scale_ub`` when one is given.
    approximate
        The device may compile division to an approximate instruction (2 ulp, flushing): the admissible set is wide.
    arithmetic
        The device's own, where its bits are known.
    scan
        Which elements enter amax.
    fault
        Why this recipe is *not* admissible although some library computes it; None for a sound one.
    """

    name: str
    source: str
    block: Block
    formula: ScaleFormula
    code: CodeFormula
    scale_format: ScaleFormat = ScaleFormat.FLOAT32
    power_of_two: PowerOfTwo | None = None
    byte_low: int = 0
    inf_byte: int | None = 254
    nan_byte: int = 255
    amax_floor: float = 0.0
    scale_floor: float = 0.0
    unit_when: frozenset[Special] = frozenset()
    inverse_limit: bool = False
    zero_codes: bool = False
    nan_amax: NanAmax = NanAmax.IGNORED
    nan_code: NanCode = NanCode.NAN
    takes_scale_ub: bool = False
    approximate: bool = False
    arithmetic: Arithmetic = Arithmetic.IEEE
    scan: AmaxScan = AmaxScan.ALL
    fault: str | None = None

    def __post_init__(self) -> None:
        if (self.scale_format is ScaleFormat.UE8M0) != (self.power_of_two is not None):
            raise ValueError(f"{self.name}: power_of_two is given exactly when the scale format is UE8M0")
        known = self.formula is ScaleFormula.INVERSE and self.code is CodeFormula.QUOTIENT and not self.amax_floor
        if self.arithmetic is Arithmetic.FAST_MATH and not known:
            raise ValueError(f"{self.name}: fast math is known for q = 448/a, s = 1/q, x*q without a floor alone")

    def with_block(self, block: Block) -> Recipe:
        """The same recipe over other blocks (the name is kept)."""
        return replace(self, block=block)

    def with_floor(self, amax_floor: float) -> Recipe:
        """The same recipe with another amax floor (``eps``)."""
        return replace(self, amax_floor=amax_floor)
