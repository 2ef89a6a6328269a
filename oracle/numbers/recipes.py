"""Scale recipes: every choice that changes a bit of a quantiser's output, as records by name.

A recipe says which elements share a scale, how the scale is computed and in which format it is published, the floors,
what an all-zero or non-finite block gives, and how the code is computed. All formulas are float32 operations unless the
record says otherwise; ``s`` is the scale (it *multiplies* on dequantisation), ``q = 1/s`` its inverse, ``a`` the amax
of the block, ``max`` the largest value of the element format (448 for E4M3). The table below has one row for each
quantiser in use, with its source (library, file, commit where known); MX and NVFP4 have theirs in
:mod:`oracle.numbers.mx_recipes`. :mod:`oracle.numbers.quantize` evaluates a recipe bit for bit;
:mod:`oracle.bounds.quantiser` says which other outputs a right implementation of it may give.

Not covered: delayed scaling; approximate device division bit for bit except where a recipe says FAST_MATH or DIV_FULL
(``approximate`` widens the admissible set instead); recipes that differ from a row only by a power-of-two identity,
such as ``x/s`` and ``x * (1/s)`` for UE8M0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from typing import Any

from oracle.numbers.formats import E4M3FN, Format
from oracle.numbers.scaling import (
    E4M3_1X32_UE8M0,
    E4M3_1X128,
    E4M3_1X128_UE8M0,
    E4M3_128X1,
    E4M3_128X1_UE8M0,
    E4M3_128X128,
    E4M3_128X128_UE8M0,
    E4M3_TENSOR,
    E4M3_TOKEN,
    Block,
    ScaleFormat,
    Scaling,
)


class ScaleFormula(StrEnum):
    """How the scale comes out of amax, before any rounding to a power of two."""

    DIVIDE = "a / max"
    MULTIPLY = "a * fl(1/max)"
    DEVICE_RECIPROCAL = "a * R(max), R the device's reciprocal within an ulp"
    INVERSE = "1 / fl(max / a)"
    INVERSE_FLOAT64 = "1 / fl32(max / double(a))"
    INPUT_DTYPE = "a / max in the dtype of x"
    BF16_MULTIPLY = "RN(a * RN(1/max)), bfloat16 operations"
    GIVEN = "given by the caller"


class CodeFormula(StrEnum):
    """What is rounded to a code. QUOTIENT is ``x*q`` with the ``q`` of the scale formula, or max/a."""

    DIVIDE = "x / s"
    RECIPROCAL = "x * fl(1/s)"
    QUOTIENT = "x * q"
    SPLIT = "x * fl(fl(1/g) / s)"
    BF16 = "RN(x * RN(1/s)), bfloat16 operations"


class GlobalOrder(StrEnum):
    """What a global scale is, and when it meets the scale of a block: the value ``t`` that is rounded to the published
    scale. ``g`` multiplies on dequantisation; ``e`` divides there (about 2688/amax of the tensor for NVFP4).

    In codes ``s`` stands for both scales: ``fl(s g)``, or ``fl(s fl(1/e))``.
    """

    AFTER = "t = fl(s / g)"
    TOP = "t = fl(a / fl(max g))"
    ENCODE_AFTER = "t = fl(s e)"
    ENCODE_FIRST = "t = fl(a fl(e fl(1/max)))"


class PowerOfTwo(StrEnum):
    """How a scale becomes a power of two; ``emax`` is the exponent of max, ``f`` the fraction bits of its format."""

    CEIL = "smallest power of two >= s, by exponent bits"
    AMAX_FLOOR = "2^(floor(log2 a) - emax), OCP MX"
    AMAX_CEIL = "2^(ceil(log2 a) - emax)"
    AMAX_EVEN = "2^(floor(log2 of a rounded to f fraction bits) - emax)"
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
    """Code of a NaN quotient: NaN, the end of the range that the order of fminf and fmaxf leaves of it, or 0."""

    NAN = "NaN"
    ZERO = "0"
    POSITIVE_MAX = "max"
    NEGATIVE_MAX = "-max"


class CodeRounding(StrEnum):
    """How a quotient ``v`` becomes a code.

    STOCHASTIC and SEEDED add ``u step(|v|)`` to ``|v|``, ``u`` of [0, 1) in eighths of a byte, and truncate. Any bits
    make a right STOCHASTIC code, so both neighbours of ``v`` are right; the bits of SEEDED are declared, so one code
    is.
    """

    NEAREST_EVEN = "nearest, ties to even"
    NEAREST_ZERO = "nearest, ties toward zero"
    NEAREST_AWAY = "nearest, ties away from zero"
    TRUNCATED = "toward zero"
    STOCHASTIC = "random bits of the kernel's own"
    SEEDED = "random bits that the call declares"

    @property
    def random(self) -> bool:
        """Whether random bits enter."""
        return self in (CodeRounding.STOCHASTIC, CodeRounding.SEEDED)


class ZeroSign(StrEnum):
    """Which codes may be -0."""

    KEPT = "of -0 and of what rounds to it"
    SMALL = "of negative values that round to zero, not of -0"
    ZEROS = "of negative values that round to zero, and of zeros of either sign"
    DROPPED = "none"


class Candidates(StrEnum):
    """How one of two scales of a block is chosen: its own ``s`` and ``1.5 s``, under which 4 stands where 6 did.

    ``1.5 s`` is taken where the error of the values it gives is smaller; on equality ``s``.
    """

    MAE = "sum of |error|"
    MSE = "sum of error^2"


class Arithmetic(StrEnum):
    """How the quantiser divides and multiplies: the approximate ones as :mod:`oracle.numbers.fast_math` has them."""

    IEEE = "correctly rounded, subnormals kept"
    FAST_MATH = "div.approx.ftz, rcp.approx.ftz, mul.ftz of sm90"
    DIV_FULL = "div.full of sm90, subnormals kept"


class AmaxScan(StrEnum):
    """Which elements of a block enter amax. Only ALL is right."""

    ALL = "all"
    ROW_AS_COLUMN = "row r of column block kb skipped where 128 kb + 32 r + (column mod 32) >= K"
    FLOAT16_BITS = "all, the bits of float16 values read as unsigned integers"


@dataclass(frozen=True)
class Recipe:
    """Every choice of one quantiser.

    Attributes
    ----------
    name, source : registry name; library, file and commit where the formula was read.
    scaling : which elements share a scale, and the formats of elements and scales.
    formula, code : how ``s`` and the codes are computed.
    power_of_two : how ``s`` becomes a power of two (UE8M0 recipes), else None.
    byte_low : UE8M0 only: smallest byte.
    inf_byte : UE8M0 only: the byte of an infinite amax (255 is NaN; None leaves the scale infinite in float32).
    nan_byte : UE8M0 only: the byte of a NaN amax (255 is NaN).
    amax_floor, scale_floor
        ``a = max(a, amax_floor)``; ``s = max(s, scale_floor)`` before rounding to a power of two. 0: none.
    amax_added : ``a = a + amax_added``, which keeps a scale from 0 as a floor does, and changes small ones.
    unit_when : kinds of amax for which ``q = s = 1`` is used instead of the formula.
    inverse_limit
        An infinite inverse becomes the largest finite value: ``max / a`` that of the dtype of ``x``, ``1/s`` that of
        float32.
    inverse_flushed : ``1/s`` below 2^-126 is 0 (a scale of 2^127), so that infinity times it is NaN.
    inf_wraps : the inverse of an infinite scale is minus infinity, as exponent bits beyond their range give.
    unit_at_byte_0 : under a scale of 2^-127 codes are those of ``x`` itself.
    divides_by_bits
        UE8M0 only: codes are ``x`` over the byte as exponent bits of a float32, at least 2^-126; byte 255 is infinity.
    zero_codes : where the float32 image of the scale is 0, every code is a (signed) zero instead of ``x * inf``.
    global_order : how a global scale is given, and where it enters.
    zero_blocks : a block of zeros has the scale 0 before it is rounded, and zero codes, whatever the global scale.
    published_zero, published_floor : what is put for a scale of 0 before it is rounded to its format, then the least.
    nan_amax : what a NaN element does to amax.
    nan_code : the code of a NaN quotient (max and -max: the ends of the range, 0: zero).
    saturates : a quotient beyond the range becomes the largest code of its sign, otherwise NaN.
    rounding : how a quotient becomes a code.
    zero_sign : which codes are -0.
    candidates
        How one of two scales is chosen (NVFP4 "four over six"), None for one scale: ``t`` rounded to its format, or
        ``fl(1.5 t)`` rounded to it, where the codes under that have the smaller error; on equality the first. An error
        is ``|fl(fl(value(code) * s) - x)|``, or its square rounded to float32, added in float32 in the order of K.
    muted_below : the scale before it is rounded for which codes are 0: below it a kernel flushes it to 0.
    takes_scale_ub : amax is clamped to ``scale_ub`` when one is given; with ``bounds_scale`` the scale is instead.
    zero_amax : what stands for an amax of 0 (0: nothing does).
    approximate
        The device may compile division to an approximate instruction (2 ulp, flushing): the admissible set is wide.
    arithmetic : the device's own, where its bits are known.
    scan : which elements enter amax.
    fault : why this recipe is *not* admissible although some library computes it; None for a sound one.
    """

    name: str
    source: str
    scaling: Scaling
    formula: ScaleFormula
    code: CodeFormula
    _: KW_ONLY
    power_of_two: PowerOfTwo | None = None
    byte_low: int = 0
    inf_byte: int | None = 254
    nan_byte: int = 255
    amax_floor: float = 0.0
    amax_added: float = 0.0
    scale_floor: float = 0.0
    unit_when: frozenset[Special] = frozenset()
    inverse_limit: bool = False
    inverse_flushed: bool = False
    inf_wraps: bool = False
    unit_at_byte_0: bool = False
    divides_by_bits: bool = False
    zero_codes: bool = False
    global_order: GlobalOrder = GlobalOrder.AFTER
    zero_blocks: bool = False
    published_floor: float = 0.0
    published_zero: float = 0.0
    nan_amax: NanAmax = NanAmax.IGNORED
    nan_code: NanCode = NanCode.NAN
    saturates: bool = True
    rounding: CodeRounding = CodeRounding.NEAREST_EVEN
    zero_sign: ZeroSign = ZeroSign.KEPT
    candidates: Candidates | None = None
    muted_below: float = 0.0
    takes_scale_ub: bool = False
    bounds_scale: bool = False
    zero_amax: float = 0.0
    approximate: bool = False
    arithmetic: Arithmetic = Arithmetic.IEEE
    scan: AmaxScan = AmaxScan.ALL
    fault: str | None = None

    def __post_init__(self) -> None:
        if (self.scale_format is ScaleFormat.UE8M0) != (self.power_of_two is not None):
            raise ValueError(f"{self.name}: power_of_two is given exactly when the scale format is UE8M0")
        computed = self.power_of_two is None and self.formula is not ScaleFormula.GIVEN
        if self.scaling.global_scale and not computed:
            raise ValueError(f"{self.name}: under a global scale neither given scales nor powers of two are defined")
        if self.nan_code is NanCode.NAN and not self.element.has_nan:
            raise ValueError(f"{self.name}: {self.element} has no NaN; choose POSITIVE_MAX or NEGATIVE_MAX as nan_code")
        if not self.saturates and not self.element.has_nan:
            raise ValueError(f"{self.name}: {self.element} has no NaN; a cast to it saturates")
        if self.candidates is not None and not self.scaling.global_scale:
            raise ValueError(f"{self.name}: a choice of two scales is known under a global scale alone")
        inverse = self.formula is ScaleFormula.INVERSE and self.code is CodeFormula.QUOTIENT
        multiply = self.formula is ScaleFormula.MULTIPLY and self.code in (CodeFormula.DIVIDE, CodeFormula.QUOTIENT)
        static = self.formula is ScaleFormula.GIVEN and self.code is CodeFormula.DIVIDE
        covered = (inverse or multiply or static) and self.power_of_two is None and self.element == E4M3FN
        if self.arithmetic is not Arithmetic.IEEE and not covered:
            raise ValueError(
                f"{self.name}: approximate division is known for s = 1/(448/a) and x*q, a*fl(1/448) and x/s or x*q, "
                "or a given s and x/s, of E4M3 and without powers of two"
            )

    @property
    def element(self) -> Format:
        """Format of the codes."""
        return self.scaling.element

    @property
    def block(self) -> Block:
        """The elements that share a scale."""
        return self.scaling.block

    @property
    def scale_format(self) -> ScaleFormat:
        """Format of the published scale."""
        return self.scaling.scale_format

    @property
    def encodes(self) -> bool:
        """Whether the global scale is given as the one that multiplies ``x`` (its inverse multiplies the codes)."""
        return self.global_order in (GlobalOrder.ENCODE_AFTER, GlobalOrder.ENCODE_FIRST)

    @property
    def code_of_nan(self) -> int:
        """The code of a NaN quotient in the element format."""
        if self.nan_code is NanCode.NAN:
            assert self.element.nan_code is not None, "__post_init__ has refused this"
            return self.element.nan_code
        if self.nan_code is NanCode.ZERO:
            return 0
        return self.element.max_code | (self.element.sign_mask if self.nan_code is NanCode.NEGATIVE_MAX else 0)

    def with_block(self, block: Block) -> Recipe:
        """The same recipe over other blocks (the name is kept)."""
        return replace(self, scaling=replace(self.scaling, block=block))

    def with_floor(self, amax_floor: float) -> Recipe:
        """The same recipe with another amax floor (``eps``)."""
        return replace(self, amax_floor=amax_floor)


def like(base: Recipe, name: str, source: str | None = None, **differs: Any) -> Recipe:
    """A row that differs from another in the fields given."""
    return replace(base, name=name, source=base.source if source is None else source, **differs)


# A row: name, source, scaling, scale formula, code formula, and what differs from the defaults of Recipe.
_DIVIDE, _MULTIPLY, _GIVEN = ScaleFormula.DIVIDE, ScaleFormula.MULTIPLY, ScaleFormula.GIVEN
_X_OVER_S, _X_RECIPROCAL, _XQ = CodeFormula.DIVIDE, CodeFormula.RECIPROCAL, CodeFormula.QUOTIENT
_CEIL, _PROPAGATED = PowerOfTwo.CEIL, NanAmax.PROPAGATED

# DeepGEMM: torch code, so amax propagates NaN; the cast saturates in torch 2.13 and gives NaN before (seen with 2.11 on
# an H200). A non-finite amax ends in byte 254 because the exponent field is clamped to 1..254 whatever it was.
_DEEPGEMM = "DeepGEMM deep_gemm/utils/math.py @54e2261"
DEEPGEMM_1X128 = Recipe(
    "deepgemm_1x128",
    f"{_DEEPGEMM}, per_token_cast_to_fp8",
    E4M3_1X128,
    _DIVIDE,
    _X_RECIPROCAL,
    amax_floor=1e-4,
    nan_amax=_PROPAGATED,
)
DEEPGEMM_128X128 = like(DEEPGEMM_1X128, "deepgemm_128x128", f"{_DEEPGEMM}, per_block_cast_to_fp8", scaling=E4M3_128X128)
DEEPGEMM_128X1 = like(DEEPGEMM_1X128, "deepgemm_128x1", f"{_DEEPGEMM}, per_channel_cast_to_fp8", scaling=E4M3_128X1)
_DEEPGEMM_POWERS: Mapping[str, Any] = dict(power_of_two=_CEIL, byte_low=1, inf_byte=254, nan_byte=254)
DEEPGEMM_1X128_UE8M0 = like(DEEPGEMM_1X128, "deepgemm_1x128_ue8m0", scaling=E4M3_1X128_UE8M0, **_DEEPGEMM_POWERS)
DEEPGEMM_128X128_UE8M0 = like(
    DEEPGEMM_128X128, "deepgemm_128x128_ue8m0", scaling=E4M3_128X128_UE8M0, **_DEEPGEMM_POWERS
)
DEEPGEMM_128X1_UE8M0 = like(DEEPGEMM_128X1, "deepgemm_128x1_ue8m0", scaling=E4M3_128X1_UE8M0, **_DEEPGEMM_POWERS)
_BEFORE_213 = f"{_DEEPGEMM}, over the cast of torch before 2.13: an infinite element has the code NaN"
DEEPGEMM_1X128_UE8M0_OPEN, DEEPGEMM_128X128_UE8M0_OPEN, DEEPGEMM_128X1_UE8M0_OPEN = (
    like(recipe, f"{recipe.name}_unsaturated", _BEFORE_213, saturates=False)
    for recipe in (DEEPGEMM_1X128_UE8M0, DEEPGEMM_128X128_UE8M0, DEEPGEMM_128X1_UE8M0)
)
DEEPGEMM_DEVICE_1X32_UE8M0 = Recipe(
    "deepgemm_device_1x32_ue8m0",
    "DeepGEMM common/math.cuh get_e4m3_sf_and_sf_inv (sm100 mega-MoE)",
    E4M3_1X32_UE8M0,
    _MULTIPLY,
    _X_RECIPROCAL,
    power_of_two=_CEIL,
)

# FlashInfer's test helpers always round the scale to a power of two, through log2 and pow.
_FLASHINFER_TESTING = "FlashInfer flashinfer/testing/utils.py"
FLASHINFER_TESTING_1X128_UE8M0 = like(
    DEEPGEMM_1X128,
    "flashinfer_testing_1x128_ue8m0",
    f"{_FLASHINFER_TESTING} per_token_cast_to_fp8",
    scaling=E4M3_1X128_UE8M0,
    power_of_two=PowerOfTwo.EXP2_CEIL_LOG2,
    inf_byte=None,
)
FLASHINFER_TESTING_128X128_UE8M0 = like(
    FLASHINFER_TESTING_1X128_UE8M0,
    "flashinfer_testing_128x128_ue8m0",
    f"{_FLASHINFER_TESTING} per_block_cast_to_fp8",
    scaling=E4M3_128X128_UE8M0,
)

# TensorRT-LLM's kernel and FlashInfer's copy of it. Both take bfloat16; FlashInfer compiles with fast math. Neither
# guards 448/a against overflow, which makes NaN of zeros (0 * inf); the recipes without a fault keep finite values
# finite instead, by TransformerEngine's policy (the largest finite multiplier).
_TRTLLM = "TensorRT-LLM fp8_blockscale_gemm_kernel.cuh @0249976"
_BLOCKSCALE = "FlashInfer fp8_blockscale_gemm_sm90"
TRTLLM_1X128 = Recipe(
    "trtllm_1x128",
    f"{_TRTLLM}, scale_1x128_kernel",
    E4M3_1X128,
    ScaleFormula.INVERSE,
    _XQ,
    unit_when=frozenset({Special.ZERO}),
)
TRTLLM_1X128_UE8M0 = like(
    TRTLLM_1X128,
    "trtllm_1x128_ue8m0",
    f"{_TRTLLM}, scale_1x128_kernel with USE_UE8M0",
    scaling=E4M3_1X128_UE8M0,
    code=_X_RECIPROCAL,
    power_of_two=_CEIL,
)
TRTLLM_128X128 = like(
    TRTLLM_1X128,
    "trtllm_128x128",
    f"{_TRTLLM}, scale_128x128_kernel as intended: amax over the whole block",
    scaling=E4M3_128X128,
)
FLASHINFER_1X128 = like(
    TRTLLM_1X128,
    "flashinfer_1x128",
    f"{_BLOCKSCALE}, scale_1x128_kernel as intended: finite values stay finite",
    approximate=True,
    inverse_limit=True,
)
FLASHINFER_1X128_FAST_MATH = like(
    FLASHINFER_1X128,
    "flashinfer_1x128_fast_math",
    "FlashInfer 0.6.18.post1 fp8_blockscale_gemm_sm90, scale_1x128_kernel under -use_fast_math, on an H200",
    inverse_limit=False,
    arithmetic=Arithmetic.FAST_MATH,
    fault="448/amax is approximate and flushed: finite values become NaN where amax lies above 2^126 or below 2^-119, "
    "and 0 where it lies below 2^-117",
)
FLASHINFER_128X128 = like(
    FLASHINFER_1X128,
    "flashinfer_128x128",
    f"{_BLOCKSCALE}, scale_128x128_kernel as intended: amax over the whole block",
    scaling=E4M3_128X128,
)
FLASHINFER_128X128_AMAX_FAULT = like(
    FLASHINFER_128X128,
    "flashinfer_128x128_amax_fault",
    f"{_BLOCKSCALE} and {_TRTLLM}, scale_128x128_kernel as shipped",
    inverse_limit=False,
    arithmetic=Arithmetic.FAST_MATH,
    scan=AmaxScan.ROW_AS_COLUMN,
    fault="the amax scan tests the row index where the column index is meant, so it leaves rows out and the "
    "scale comes out too small",
)
TRTLLM_GEN_1X128 = Recipe(
    "trtllm_gen_1x128",
    "FlashInfer csrc/trtllm_fused_moe_dev_kernel.cu activationDeepSeekKernel",
    E4M3_1X128,
    _DIVIDE,
    _X_OVER_S,
    scale_floor=2.0**-126,
)
FLASHINFER_MXFP8_1X32 = Recipe(
    "flashinfer_mxfp8_1x32",
    "FlashInfer quantization_utils.cuh cvt_warp_fp16_to_mxfp8 (rcp.approx: a power of two is exact)",
    E4M3_1X32_UE8M0,
    ScaleFormula.DEVICE_RECIPROCAL,
    _X_RECIPROCAL,
    power_of_two=_CEIL,
    zero_codes=True,
    inverse_flushed=True,
    nan_code=NanCode.POSITIVE_MAX,
)

# vLLM. Measured on an H200: scale and every finite code of the group kernel equal this record's bits.
_VLLM_GROUP = "vLLM csrc per_token_group_quant.cu @0f5257e"
VLLM_GROUP = Recipe(
    "vllm_group", _VLLM_GROUP, E4M3_1X128, _DIVIDE, _X_OVER_S, amax_floor=1e-10, nan_code=NanCode.NEGATIVE_MAX
)
VLLM_GROUP_UE8M0_BITS = like(
    VLLM_GROUP,
    "vllm_group_ue8m0_bits",
    f"{_VLLM_GROUP}, exponent-bit form",
    scaling=E4M3_1X128_UE8M0,
    power_of_two=_CEIL,
)
VLLM_GROUP_UE8M0 = like(
    VLLM_GROUP_UE8M0_BITS,
    "vllm_group_ue8m0",
    f"{_VLLM_GROUP}, exp2f(ceilf(log2f(fmaxf(s, 1e-10f)))): a second floor, on the scale",
    power_of_two=PowerOfTwo.EXP2_CEIL_LOG2,
    inf_byte=None,
    scale_floor=1e-10,
)
_PACKED = "vLLM fp8_utils.py _silu_mul_quant_fp8_packed_kernel (0.20.2, Triton): max(a/448, 1e-10) rounded up"
VLLM_SILU_PACKED = like(
    VLLM_GROUP_UE8M0, "vllm_silu_packed", _PACKED, amax_floor=0.0, nan_code=NanCode.NEGATIVE_MAX, approximate=True
)
VLLM_SILU_PACKED_POSITIVE = like(VLLM_SILU_PACKED, "vllm_silu_packed_positive", nan_code=NanCode.POSITIVE_MAX)
_INVERSE = "vLLM deepseek_v4_ops/fused_inv_rope_fp8_quant.py (0.20.2, Triton): max(a, 1e-10) * (1/448) rounded up"
VLLM_INVERSE_ROPE = like(
    VLLM_SILU_PACKED, "vllm_inverse_rope", _INVERSE, formula=_MULTIPLY, amax_floor=1e-10, scale_floor=0.0
)
VLLM_INVERSE_ROPE_POSITIVE = like(VLLM_INVERSE_ROPE, "vllm_inverse_rope_positive", nan_code=NanCode.POSITIVE_MAX)
VLLM_TRITON_GROUP = like(
    VLLM_GROUP,
    "vllm_triton_group",
    "vLLM fp8_utils.py _per_token_group_quant_fp8 (Triton): a * (1/448), div.full",
    formula=_MULTIPLY,
    approximate=True,
)
_VLLM_COMMON = "vLLM csrc w8a8/fp8/common.cu @096d3dc"
VLLM_TENSOR = Recipe(
    "vllm_tensor",
    f"{_VLLM_COMMON}, dynamic_scaled_fp8_quant",
    E4M3_TENSOR,
    _DIVIDE,
    _X_RECIPROCAL,
    nan_code=NanCode.POSITIVE_MAX,
)
VLLM_TOKEN = Recipe(
    "vllm_token",
    f"{_VLLM_COMMON}, dynamic_per_token_scaled_fp8_quant",
    E4M3_TOKEN,
    _DIVIDE,
    _X_OVER_S,
    scale_floor=1.0 / (448.0 * 512.0),
    nan_code=NanCode.POSITIVE_MAX,
    takes_scale_ub=True,
)
VLLM_STATIC = like(
    VLLM_TENSOR,
    "vllm_static",
    f"{_VLLM_COMMON}, static_scaled_fp8_quant: multiplies by the reciprocal of the given scale",
    formula=_GIVEN,
)
_VLLM_FUSED = "vLLM csrc quantization/fused_kernels @0dd8492, as in 0.20.2"
VLLM_BLOCK = like(VLLM_TOKEN, "vllm_block", f"{_VLLM_FUSED}, rms_norm_per_block_quant", scaling=E4M3_1X128)
VLLM_SILU_BLOCK = like(
    VLLM_BLOCK,
    "vllm_silu_block",
    f"{_VLLM_FUSED}, silu_and_mul_per_block_quant: scale_ub bounds the scale",
    bounds_scale=True,
)
VLLM_SILU_MASKED = Recipe(
    "vllm_silu_masked",
    "vLLM csrc quantization/activation_kernels.cu @bcf9083, persistent_masked_m_silu_mul_quant",
    E4M3_1X128.with_scales(ScaleFormat.INPUT),
    ScaleFormula.BF16_MULTIPLY,
    CodeFormula.BF16,
    amax_floor=1e-10,
    nan_code=NanCode.NEGATIVE_MAX,
)

# The same contracts in plain torch operations: amax, clamp and cast all let NaN through, 0/0 is coded 0.
_TORCH = "the published formula in plain torch operations, NaN propagated, division by a zero scale coded 0"
TORCH_GROUP = like(VLLM_GROUP, "torch_group", _TORCH, nan_amax=_PROPAGATED, nan_code=NanCode.NAN, zero_codes=True)
TORCH_GROUP_UE8M0 = like(TORCH_GROUP, "torch_group_ue8m0", scaling=E4M3_1X128_UE8M0, power_of_two=_CEIL, inf_byte=None)
TORCH_TENSOR = like(TORCH_GROUP, "torch_tensor", scaling=E4M3_TENSOR, amax_floor=0.0)
TORCH_TOKEN = like(
    TORCH_TENSOR, "torch_token", scaling=E4M3_TOKEN, scale_floor=VLLM_TOKEN.scale_floor, takes_scale_ub=True
)
TORCH_STATIC = like(TORCH_TENSOR, "torch_static", formula=_GIVEN)
TORCH_BLOCK = like(TORCH_TOKEN, "torch_block", scaling=E4M3_1X128)
TORCH_SILU_BLOCK = like(TORCH_BLOCK, "torch_silu_block", bounds_scale=True)
TORCH_SILU_MASKED = like(VLLM_SILU_MASKED, "torch_silu_masked", _TORCH, nan_amax=_PROPAGATED, nan_code=NanCode.NAN)
TORCH_CAST_1X128_UE8M0 = like(
    DEEPGEMM_1X128_UE8M0, "torch_cast_1x128_ue8m0", _TORCH, byte_low=0, inf_byte=None, nan_byte=255
)
TORCH_CAST_128X128_UE8M0 = like(TORCH_CAST_1X128_UE8M0, "torch_cast_128x128_ue8m0", scaling=E4M3_128X128_UE8M0)
TORCH_CAST_128X1_UE8M0 = like(TORCH_CAST_1X128_UE8M0, "torch_cast_128x1_ue8m0", scaling=E4M3_128X1_UE8M0)

# SGLang.
_SGLANG_GROUP = "SGLang per_token_group_quant_8bit_v2.cu @037cd6e"
_SGLANG_TOKEN = "SGLang per_token_quant_fp8.cu @0490047"
SGLANG_GROUP = Recipe("sglang_group", _SGLANG_GROUP, E4M3_1X128, _MULTIPLY, _XQ, amax_floor=1e-10)
SGLANG_GROUP_V2 = like(
    SGLANG_GROUP, "sglang_group_v2", f"{_SGLANG_GROUP}, clamped before the cast", nan_code=NanCode.NEGATIVE_MAX
)
SGLANG_GROUP_UE8M0 = like(
    SGLANG_GROUP,
    "sglang_group_ue8m0",
    f"{_SGLANG_GROUP}, UE8M0, column major",
    scaling=E4M3_1X128_UE8M0,
    code=_X_RECIPROCAL,
    power_of_two=_CEIL,
)
SGLANG_GROUP_ROW_MAJOR_UE8M0 = like(
    SGLANG_GROUP_UE8M0,
    "sglang_group_row_major_ue8m0",
    f"{_SGLANG_GROUP}, UE8M0, row major",
    code=_XQ,
    fault="publishes the scale rounded up to a power of two, but computes the codes with the exact 448/amax",
)
SGLANG_GROUP_V2_UE8M0 = like(
    SGLANG_GROUP_UE8M0,
    "sglang_group_v2_ue8m0",
    f"{_SGLANG_GROUP}, UE8M0, clamped before the cast (sglang-kernel 0.4.4 on an H200)",
    nan_code=NanCode.NEGATIVE_MAX,
)
SGLANG_GROUP_V2_UE8M0_WRAPPED = like(
    SGLANG_GROUP_V2_UE8M0,
    "sglang_group_v2_ue8m0_wrapped",
    f"{_SGLANG_GROUP}, fast_pow2(128) and fast_pow2(-128); copies in DeepEP and elsewhere too",
    inf_byte=None,
    inf_wraps=True,
    fault="the exponent of an infinite amax leaves its range: the scale is infinite and the multiplier minus infinity, "
    "so that every value but 0 gets the largest code of the other sign",
)
SGLANG_TOKEN = Recipe(
    "sglang_token",
    f"{_SGLANG_TOKEN}, warp kernel",
    E4M3_TOKEN,
    _DIVIDE,
    _X_RECIPROCAL,
    zero_codes=True,
    nan_code=NanCode.POSITIVE_MAX,
)
SGLANG_TOKEN_SMALL = like(
    SGLANG_TOKEN,
    "sglang_token_small",
    f"{_SGLANG_TOKEN}, small-batch kernel: 0 * inf in an all-zero row",
    zero_codes=False,
)
SGLANG_TRITON_ROW = like(
    VLLM_GROUP,
    "sglang_triton_row",
    "SGLang fp8_kernel.py (Triton), row-major scales",
    code=_X_RECIPROCAL,
    approximate=True,
)
SGLANG_TRITON_COLUMN = like(
    SGLANG_TRITON_ROW, "sglang_triton_column", "SGLang fp8_kernel.py (Triton), column-major scales", code=_X_OVER_S
)
SGLANG_STATIC = like(
    VLLM_STATIC,
    "sglang_static",
    "SGLang fp8_kernel.py static_quant_fp8 (Triton): limits at run time, maximum first",
    nan_code=NanCode.NEGATIVE_MAX,
    approximate=True,
)
SGLANG_TRITON_UE8M0 = like(
    SGLANG_TRITON_COLUMN,
    "sglang_triton_ue8m0",
    "SGLang fp8_kernel.py (Triton), exp2(ceil(log2(s)))",
    scaling=E4M3_1X128_UE8M0,
    power_of_two=PowerOfTwo.EXP2_CEIL_LOG2,
    inf_byte=None,
)

# LMDeploy. Triton: maximum promotes bfloat16, so the floor is a float32; / is approximate; a clamp between constants
# gives a NaN the upper one (an H200).
_LMDEPLOY = "LMDeploy lmdeploy/pytorch/kernels/cuda/blocked_gemm_fp8.py @00aa02f, _quant_fp8_kernel (Triton)"
LMDEPLOY_1X128 = Recipe(
    "lmdeploy_1x128",
    _LMDEPLOY,
    E4M3_1X128,
    _MULTIPLY,
    _XQ,
    amax_floor=1e-6,
    nan_code=NanCode.POSITIVE_MAX,
    approximate=True,
)
LMDEPLOY_1X128_UE8M0 = like(
    LMDEPLOY_1X128,
    "lmdeploy_1x128_ue8m0",
    f"{_LMDEPLOY} with ROUND_SCALE",
    scaling=E4M3_1X128_UE8M0,
    code=_X_RECIPROCAL,
    power_of_two=_CEIL,
)
LMDEPLOY_TOKEN = Recipe(
    "lmdeploy_token",
    "LMDeploy lmdeploy/pytorch/kernels/cuda/w8a8_triton_kernels.py (0.18), per_token_quant_int8 in "
    "FP8 (Triton): x/s without a clamp, floor 1e-7 as its callers give it",
    E4M3_TOKEN,
    _DIVIDE,
    _X_OVER_S,
    amax_floor=1e-7,
    approximate=True,
)

# TransformerEngine: explicit __fdiv_rn, so the same bits with and without fast math.
_TE = "TransformerEngine recipe_common.cuh @d0067d0"
TE_BLOCKWISE_1X128 = Recipe(
    "te_blockwise_1x128",
    f"{_TE}, compute_scale_from_amax",
    E4M3_1X128,
    ScaleFormula.INVERSE,
    _XQ,
    unit_when=frozenset({Special.ZERO, Special.INF, Special.NAN}),
    inverse_limit=True,
)
TE_BLOCKWISE_128X128 = like(TE_BLOCKWISE_1X128, "te_blockwise_128x128", scaling=E4M3_128X128)
TE_BLOCKWISE_1X128_POW2 = like(
    TE_BLOCKWISE_1X128,
    "te_blockwise_1x128_pow2",
    f"{_TE}, force_pow_2_scales",
    scaling=E4M3_1X128_UE8M0,
    power_of_two=PowerOfTwo.INVERSE_FLOOR,
)
TE_BLOCKWISE_128X128_POW2 = like(TE_BLOCKWISE_1X128_POW2, "te_blockwise_128x128_pow2", scaling=E4M3_128X128_UE8M0)
TE_MXFP8_1X32 = Recipe(
    "te_mxfp8_1x32",
    "TransformerEngine MXFP8 cast, ptx::float_to_e8m0(a * fl(1/448)) and exp2f_rcp",
    E4M3_1X32_UE8M0,
    _MULTIPLY,
    _X_RECIPROCAL,
    power_of_two=_CEIL,
)

# torchao. Torch code: amax propagates NaN and clamp keeps it.
_TORCHAO = "torchao float8_utils.py @36027d8, amax_to_scale"
TORCHAO_TENSOR = Recipe(
    "torchao_tensor",
    f"{_TORCHAO}, tensor-wise",
    E4M3_TENSOR,
    ScaleFormula.INVERSE_FLOAT64,
    _XQ,
    amax_floor=1e-12,
    nan_amax=_PROPAGATED,
)
TORCHAO_ROW = like(TORCHAO_TENSOR, "torchao_row", f"{_TORCHAO}, row-wise", scaling=E4M3_TOKEN)
TORCHAO_1X128 = like(TORCHAO_TENSOR, "torchao_1x128", f"{_TORCHAO}, 1x128", scaling=E4M3_1X128)
TORCHAO_ROW_POW2 = like(
    TORCHAO_ROW,
    "torchao_row_pow2",
    f"{_TORCHAO} with round_scales_to_power_of_2",
    scaling=E4M3_TOKEN.with_scales(ScaleFormat.UE8M0),
    power_of_two=PowerOfTwo.INVERSE_FLOOR,
)
# Triton: a clamp between constants is min.xorsign.abs on sm90, which gives a NaN the limit with its sign.
TORCHAO_TRAINING_1X128 = like(
    TORCHAO_1X128,
    "torchao_training_1x128",
    "torchao prototype/blockwise_fp8_training/kernels.py, act_quant (Triton)",
    nan_amax=NanAmax.IGNORED,
    nan_code=NanCode.POSITIVE_MAX,
)
TORCHAO_TRAINING_128X128 = like(
    TORCHAO_TRAINING_1X128,
    "torchao_training_128x128",
    "torchao prototype/blockwise_fp8_training/kernels.py, weight_quant (Triton)",
    scaling=E4M3_128X128,
)
_TORCHAO_PRIMITIVES = "torchao quant_primitives.py _choose_scale_float8"
TORCHAO_INFERENCE_1X128 = Recipe(
    "torchao_inference_1x128",
    f"{_TORCHAO_PRIMITIVES}: amax / 448 in the input dtype",
    E4M3_1X128.with_scales(ScaleFormat.INPUT),
    ScaleFormula.INPUT_DTYPE,
    _X_OVER_S,
    nan_amax=_PROPAGATED,
)
TORCHAO_INFERENCE_ROW = like(
    TORCHAO_INFERENCE_1X128, "torchao_inference_row", scaling=E4M3_TOKEN.with_scales(ScaleFormat.INPUT)
)
TORCHAO_INFERENCE_128X128 = like(
    TORCHAO_INFERENCE_1X128, "torchao_inference_128x128", scaling=E4M3_128X128.with_scales(ScaleFormat.INPUT)
)
TORCHAO_INFERENCE_1X128_E8M0 = like(
    TORCHAO_INFERENCE_1X128,
    "torchao_inference_1x128_e8m0",
    f"{_TORCHAO_PRIMITIVES}: exp2(round(log2 s)) in the input dtype; clips up to 29 % off the top",
    scaling=E4M3_1X128_UE8M0,
    power_of_two=PowerOfTwo.EXP2_ROUND_LOG2,
    inf_byte=None,
)
_TORCHAO_MX = "torchao prototype/mx_formats/mx_tensor.py to_mx, ScaleCalculationMode"
TORCHAO_MX_FLOOR = Recipe(
    "torchao_mx_floor",
    f"{_TORCHAO_MX}.FLOOR (OCP MX 1.0, 6.3)",
    E4M3_1X32_UE8M0,
    _DIVIDE,
    _X_RECIPROCAL,
    power_of_two=PowerOfTwo.AMAX_FLOOR,
    inf_byte=255,
    nan_amax=_PROPAGATED,
)
TORCHAO_MX_CEIL = like(TORCHAO_MX_FLOOR, "torchao_mx_ceil", f"{_TORCHAO_MX}.CEIL", power_of_two=PowerOfTwo.AMAX_CEIL)
TORCHAO_MX_EVEN = like(TORCHAO_MX_FLOOR, "torchao_mx_even", f"{_TORCHAO_MX}.EVEN", power_of_two=PowerOfTwo.AMAX_EVEN)
TORCHAO_MX_RCEIL = like(
    TORCHAO_MX_FLOOR, "torchao_mx_rceil", f"{_TORCHAO_MX}.RCEIL", formula=_MULTIPLY, power_of_two=_CEIL
)

DEEPSEEK_V3_1X128 = Recipe(
    "deepseek_v3_1x128",
    "DeepSeek-V3 inference/kernel.py act_quant (Triton): no floor, so an all-zero group is 0/0",
    E4M3_1X128,
    _DIVIDE,
    _X_OVER_S,
    approximate=True,
)
DEEPSEEK_V3_128X128 = like(
    DEEPSEEK_V3_1X128,
    "deepseek_v3_128x128",
    "torchao kernel/blockwise_quantization.py fp8_blockwise_weight_quant",
    scaling=E4M3_128X128,
)

# Group quantisers of other engines and trainers; Triton's / is approximate.
FLAGGEMS_GROUP = like(  # its clamp takes limits at run time: max.f32, then min.f32, so that NaN becomes the lower one
    SGLANG_TRITON_COLUMN, "flaggems_group", "FlagGems ops/per_token_group_quant_fp8.py @f017974 (Triton)"
)
FLAGGEMS_GROUP_UE8M0 = like(
    SGLANG_TRITON_UE8M0,
    "flaggems_group_ue8m0",
    "FlagGems per_token_group_quant_fp8 (Triton), exp2(ceil(log2(max(s, 1e-10)))): a second floor, on the scale",
    scale_floor=1e-10,
)
TILE_KERNELS_1X128 = Recipe(
    "tile_kernels_1x128", "DeepSeek tile-kernels per_token_cast (TileLang)", E4M3_1X128, _DIVIDE, _XQ, amax_floor=1e-4
)
TILE_KERNELS_1X128_UE8M0 = like(
    TILE_KERNELS_1X128, "tile_kernels_1x128_ue8m0", scaling=E4M3_1X128_UE8M0, code=_X_RECIPROCAL, power_of_two=_CEIL
)
DEEPEP_1X128 = like(
    TILE_KERNELS_1X128,
    "deepep_1x128",
    "DeepEP csrc/kernels/utils.cuh calculate_fp8_scales (low-latency dispatch)",
    formula=_MULTIPLY,
)
DEEPEP_1X128_UE8M0 = like(
    DEEPEP_1X128,
    "deepep_1x128_ue8m0",
    f"{DEEPEP_1X128.source}, round_scale",
    scaling=E4M3_1X128_UE8M0,
    code=_X_RECIPROCAL,
    power_of_two=_CEIL,
)
UNSLOTH_1X128 = like(
    DEEPSEEK_V3_1X128,
    "unsloth_1x128",
    "unsloth kernels/fp8.py act_quant (Triton): a zero scale becomes 1",
    unit_when=frozenset({Special.ZERO}),
)
TRANSFORMERS_128X128 = Recipe(
    "transformers_128x128",
    "transformers integrations/finegrained_fp8.py: amax 0 counts as 1",
    E4M3_128X128,
    ScaleFormula.INVERSE,
    _XQ,
    zero_amax=1.0,
    nan_amax=_PROPAGATED,
)
GEMLITE_1X128 = Recipe(
    "gemlite_1x128",
    "gemlite quant_utils.py (0.6.0), scale_activations_per_block (Triton): times 1/s, clamped",
    E4M3_1X128,
    _DIVIDE,
    _X_RECIPROCAL,
    scale_floor=1e-6,
    nan_code=NanCode.POSITIVE_MAX,
    approximate=True,
)
GEMLITE_TOKEN = like(
    GEMLITE_1X128,
    "gemlite_token",
    "gemlite quant_utils.py (0.6.0), scale_activations_per_token (Triton)",
    scaling=E4M3_TOKEN,
    code=_X_OVER_S,
)
_COAT = "COAT coat/activation/real_quantization (1.0.11)"
COAT_1X128 = Recipe(
    "coat_1x128",
    f"{_COAT} _quantize.py, fp8_quantize (Triton): 1e-10 is added to amax",
    E4M3_1X128,
    _DIVIDE,
    _X_OVER_S,
    amax_added=1e-10,
    approximate=True,
)
COAT_128X128 = like(
    COAT_1X128, "coat_128x128", f"{_COAT} _quantize_perblock.py, fp8_quantize_perblock (Triton)", scaling=E4M3_128X128
)
_FBGEMM = "FBGEMM experimental/gemm/triton_gemm/fp8_gemm.py"
FBGEMM_ROW = Recipe(
    "fbgemm_row",
    f"{_FBGEMM} triton_quantize_fp8_row",
    E4M3_TOKEN,
    ScaleFormula.INVERSE,
    _XQ,
    amax_floor=1e-12,
    takes_scale_ub=True,
    approximate=True,
    nan_code=NanCode.POSITIVE_MAX,
)
FBGEMM_GROUP = like(FBGEMM_ROW, "fbgemm_group", f"{_FBGEMM} triton_quantize_fp8_group", scaling=E4M3_1X128)
FBGEMM_BLOCK = like(FBGEMM_ROW, "fbgemm_block", f"{_FBGEMM} triton_quantize_fp8_block", scaling=E4M3_128X128)
SGLANG_ACT_QUANT = like(
    DEEPEP_1X128,
    "sglang_act_quant",
    "SGLang attention/nsa/tilelang_kernel.py act_quant (TileLang, no fast math)",
    code=_X_OVER_S,
)
FLAGGEMS_ACT_QUANT = like(
    SGLANG_ACT_QUANT,
    "flaggems_act_quant",
    "FlagGems ops/act_quant.py act_quant_triton (5.0, Triton): clamped",
    nan_code=NanCode.POSITIVE_MAX,
    approximate=True,
)
SGLANG_ACT_QUANT_TRITON = like(
    SGLANG_ACT_QUANT,
    "sglang_act_quant_triton",
    "SGLang kernels/ops/quantization/act_quant_triton.py (0.5.23): maximum, then minimum: NaN becomes the lower",
    nan_code=NanCode.NEGATIVE_MAX,
    approximate=True,
)
FLASHINFER_STATIC = like(
    VLLM_STATIC,
    "flashinfer_static",
    "FlashInfer include/flashinfer/norm.cuh RMSNormQuantKernel: times rcp.approx of the given scale, clamped",
    approximate=True,
)
FLASHINFER_CVT = like(
    FLASHINFER_STATIC,
    "flashinfer_cvt",
    "FlashInfer norm/kernels/rmsnorm.py (CuTe DSL), pos_enc.cuh: converted as is",
    nan_code=NanCode.NAN,
)
FLASHINFER_TOKEN = like(
    VLLM_TOKEN,
    "flashinfer_token",
    "FlashInfer include/flashinfer/comm/trtllm_allreduce_fusion.cuh dynamic_token_fp8_scale (0.6.18.post1)",
    approximate=True,
    nan_code=NanCode.NEGATIVE_MAX,
    takes_scale_ub=False,
)


def triton_on_sm90(*bases: Recipe) -> tuple[Recipe, ...]:
    """The bits of Triton kernels on sm90: ``/`` is div.full, and by a constant a product by its rounded reciprocal.

    Compared with an H200's outputs, every bit (Triton 3.6).
    """
    return tuple(
        like(
            base,
            f"{base.name}_sm90",
            f"{base.source}; div.full of sm90",
            arithmetic=Arithmetic.DIV_FULL,
            formula=_MULTIPLY if base.formula is _DIVIDE else base.formula,
            code=_XQ if base.code is _XQ else _X_OVER_S,
        )
        for base in bases
    )


TRITON = triton_on_sm90(
    VLLM_TRITON_GROUP,
    SGLANG_TRITON_COLUMN,
    SGLANG_STATIC,
    SGLANG_ACT_QUANT_TRITON,
    LMDEPLOY_1X128,
    LMDEPLOY_TOKEN,
    DEEPSEEK_V3_1X128,
    DEEPSEEK_V3_128X128,
    UNSLOTH_1X128,
    FLAGGEMS_GROUP,
    FLAGGEMS_ACT_QUANT,
    FBGEMM_ROW,
    FBGEMM_GROUP,
    FBGEMM_BLOCK,
)

# sglang-kernel 0.4.4, the machine code for sm90: -use_fast_math; s = ftz(a fl(1/448)), a product by rcp.approx.
_SGL = "sglang-kernel 0.4.4 on sm90, -use_fast_math"
_SMALL = "finite values are lost: the scale is flushed to 0 where amax lies below 2^-117"
SGLANG_GROUP_V1_SM90 = like(
    SGLANG_GROUP,
    "sglang_group_v1_sm90",
    f"{_SGL}: sgl_per_token_group_quant_8bit",
    code=_X_OVER_S,
    nan_code=NanCode.NEGATIVE_MAX,
    arithmetic=Arithmetic.FAST_MATH,
)
SGLANG_GROUP_V2_SM90 = like(
    SGLANG_GROUP_V2,
    "sglang_group_v2_sm90",
    f"{_SGL}: sgl_per_token_group_quant_8bit_v2, 448/amax times x",
    arithmetic=Arithmetic.FAST_MATH,
    fault="448/amax is approximate and flushed: every code is 0 where amax lies above 2^126",
)
SGLANG_TOKEN_SM90 = like(
    SGLANG_TOKEN,
    "sglang_token_sm90",
    f"{_SGL}: sgl_per_token_quant_fp8, a warp for each row",
    formula=_MULTIPLY,
    code=_X_OVER_S,
    arithmetic=Arithmetic.FAST_MATH,
    fault=_SMALL,
)
SGLANG_TOKEN_SMALL_SM90 = like(
    SGLANG_TOKEN_SM90,
    "sglang_token_small_sm90",
    f"{_SGL}: sgl_per_token_quant_fp8, a block for each row",
    zero_codes=False,
)
