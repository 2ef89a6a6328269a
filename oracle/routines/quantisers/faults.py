"""Faults of quantisers: a wrong amax, a wrong scale made of it or published, a wrong cast, codes in a wrong place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from oracle.numbers import fast_math
from oracle.numbers.formats import E4M3FN
from oracle.numbers.quantize import f32
from oracle.numbers.recipes import AmaxScan, Arithmetic, NanAmax, NanCode, PowerOfTwo, ScaleFormula
from oracle.numbers.rounding import Rounding, power_of_two
from oracle.numbers.scaling import ScaleFormat
from oracle.routines.fault import CAST, INDEX, MOVEMENT, VALUE, Call, Faults, WhyNot, both, need, way
from oracle.routines.ideas import (
    CUTLASS,
    FLUSHED,
    HALF_AWAY,
    OVERFLOW_NAN,
    SATURATED,
    THROUGH_BF16,
    TIRX,
    TRUNCATED,
    UNSIGNED,
    bf16_of,
    fields,
    inverted,
    itself,
    rolled,
)
from oracle.routines.quantisers.contract import (
    BLOCK_BYTES,
    FAST_MATH,
    FOUR_BITS,
    Amax,
    QuantiserContract,
    Values,
    prepared,
    values_of,
)
from oracle.routines.traits import of_class

QUANTISERS = of_class(QuantiserContract) - BLOCK_BYTES - FOUR_BITS
"""Contracts that publish E4M3 codes and their scale, one scale for each block."""
# A fault is a row: what is wrong and where it was met; the change; when it shows.
FAULTS = Faults(QUANTISERS)
fault = FAULTS.declare

EXACT_POWERS = "every scale is a power of two"
EQUAL_AMAX = "neighbours have equal amax"
NO_FLOOR = "no amax lies below the floor"
MISSED_ROWS = "the missed rows hold no largest magnitude"
SCAN = "FlashInfer 0.6.18 scale_128x128_kernel"
IN_RANGE = "every amax is 0 or within [448 * 2^-126, 2^126]"
NARROW = "within that range the scale is off by 2 ulp at most, which is admissible"
MET_IN = "FlashInfer 0.6.18.post1 scale_1x128_kernel under -use_fast_math, on an H200"


# --- what a call must have ----------------------------------------------------------------------------------

own_scale = need(lambda call: call.recipe.formula is not ScaleFormula.GIVEN, "the scale is given")
ue8m0 = need(lambda call: call.recipe.scale_format is ScaleFormat.UE8M0, "the scale is no power of two")
float32_scale = both(
    own_scale, need(lambda call: call.recipe.scale_format is not ScaleFormat.UE8M0, "the scale is a power of two")
)
has_floor = need(lambda call: call.recipe.amax_floor > 0, "the recipe has no amax floor")
tall_blocks = both(
    own_scale,
    need(
        lambda c: c.recipe.block.rows is not None and c.recipe.block.rows > 4,
        "a block has one row, or is the whole tensor",
    ),
)


def _blocks(call: Call) -> tuple[int, int]:
    """Blocks down and across."""
    down, across = prepared(call).grid(call.recipe.block).count
    return down, across


several_down = both(own_scale, need(lambda call: _blocks(call)[0] > 1, "one block down"))
several_across = both(own_scale, need(lambda call: _blocks(call)[1] > 1, "one block across"))
square = both(
    own_scale,
    need(
        lambda call: _blocks(call)[0] == _blocks(call)[1] > 1,
        lambda call: "the scales are {} x {}, not square".format(*_blocks(call)),
    ),
)


def holds(mask: Callable[[Tensor], Tensor], missing: str) -> WhyNot:
    """The input has at least one value of this kind."""
    return need(lambda call: bool(mask(prepared(call).values).any()), missing)


has_nan = holds(torch.isnan, "no value is NaN")
has_negative = holds(lambda x: x < 0, "no value is negative")  # -0 and NaN are none
# 448 x / amax of two values of four bits is a midpoint of E4M3, or more than 2^-9 of itself away from each
finer = holds(
    lambda x: (bits := torch.frexp(x.nan_to_num(nan=0.0))[0] * 16) != torch.trunc(bits),
    "every value has four significant bits",
)


# --- the amax, the scale made of it, and the scale published ------------------------------------------------


def _scan(part: Callable[[Tensor], Tensor]) -> Callable[[Amax], Tensor]:
    """The amax of a part of the blocks ``[down, r, across, c]``."""
    return lambda amax: part(amax.blocks).nan_to_num(nan=0.0).abs().amax(dim=(1, 3), keepdim=True)


def signed_amax(amax: Amax) -> Tensor:
    """The largest value of every block, float64 ``[down, 1, across, 1]``; 0 where all are negative, NaN left out.

    Derived in TransformerEngine 3550, whose kernel has no absolute value.
    """
    return amax.blocks.nan_to_num(nan=0.0).amax(dim=(1, 3), keepdim=True).clamp(min=0.0)


def _power_beside(scale: Tensor, *, up: bool) -> Tensor:
    """The nearest power of two at or above (``up``), or at or below; 0, infinities and NaN as they are."""
    mantissa, exponent = torch.frexp(scale)
    down = power_of_two(exponent.to(torch.int64) - 1)
    power = torch.where((mantissa != 0.5) & up, down * 2, down)
    return torch.where((scale > 0) & torch.isfinite(scale), power, scale)


fault(
    "{}",
    INDEX,
    same_if=EQUAL_AMAX,
    over=(
        way("amax of the previous row block", rolled(1, 0), seen=CUTLASS, needs=several_down),
        way("amax of the previous K group", rolled(1, 2), seen=TIRX, needs=several_across),
        way(
            "one amax for all K groups of a row",
            lambda right: right.amax(dim=2, keepdim=True).expand_as(right),
            seen="NVIDIA/cutlass 2154",
            needs=several_across,
            same_if="all groups have equal amax",
        ),
    ),
    amax=lambda change: lambda amax: change(amax.right),
)
fault(
    "published scale {}",
    INDEX,
    over=(
        way(
            "transposed where it is square",
            lambda scale: scale.t().contiguous(),
            seen="pytorch 195751",
            needs=square,
            same_if="the matrix is symmetric",
        ),
        way(
            "column-major behind a row-major shape",
            lambda scale: scale.t().contiguous().reshape(scale.shape),
            seen="flashinfer 2147",
            needs=both(several_down, several_across),
            same_if="all scales are equal",
        ),
    ),
    scale=itself,
)
fault(
    "{}",
    VALUE,
    needs=float32_scale,
    over=(
        way(
            "mantissa of the published scale truncated",
            seen="DeepGEMM PR 112",
            scale=lambda scale: _power_beside(scale, up=False),
            same_if=EXACT_POWERS,
        ),
        way(
            "published scale rounded up after the payload was quantised",
            seen="sglang PR 28418",
            scale=lambda scale: _power_beside(scale, up=True),
            same_if=EXACT_POWERS,
        ),
        way(
            "scale rounded down to a power of two",
            seen="vllm PR 22399",
            recipe=fields(power_of_two=PowerOfTwo.AMAX_FLOOR),
            same_if=EXACT_POWERS,
            needs=need(
                lambda c: c.recipe.power_of_two is PowerOfTwo.CEIL, "the scale is not rounded up to a power of two"
            ),
        ),
        way(
            "published scale one ulp high",
            seen="sglang PR 32616",
            scale=lambda scale: f32(scale * (1 + 2.0**-23)),
            admissible_if="a scale within 4 * 2^-24 of amax/448 is admissible: right formulas differ by as much",
        ),
        way(
            "inverse of the scale published",
            seen="vllm PR 36297",
            scale=lambda scale: f32(inverted(scale)),
            needs=own_scale,
            same_if="every scale is 1",
        ),
    ),
)
fault(
    "{}",
    VALUE,
    needs=has_floor,
    same_if=NO_FLOOR,
    over=(
        way(
            "floor applied to the scale instead of to amax",
            lambda recipe: replace(recipe, amax_floor=0.0, scale_floor=recipe.amax_floor),
            seen="vllm 53339",
        ),
        way("amax floor missing", fields(amax_floor=0.0), seen="pytorch/ao 4713, TransformerEngine PR 786"),
    ),
    recipe=itself,
)


def _of_zeros(call: Call) -> Tensor:
    """Which blocks are zeros alone, bool ``[down, across]``."""
    return prepared(call).amax(call.recipe)[:, 0, :, 0] == 0


fault(
    "amax floor missing, scale of zeros 0",
    VALUE,
    seen="no public thread: a guard of the division alone",
    needs=both(own_scale, has_floor, need(lambda call: bool(_of_zeros(call).any()), "no block is zeros")),
    scale=lambda call, scale: scale.masked_fill(_of_zeros(call).reshape(scale.shape), 0.0),
)


fault(
    "{}",
    VALUE,
    needs=own_scale,
    over=(
        way(
            "amax rounded to bfloat16",
            seen="pytorch/ao PR 4725",
            amax=lambda amax: bf16_of(amax.right),
            same_if="every amax is a bfloat16 value",
        ),
        way(
            "amax of signed values",
            seen="TransformerEngine 3550",
            amax=signed_amax,
            needs=both(own_scale, has_negative),
            same_if="the largest magnitude of every block is positive",
        ),
        way(
            "amax scan leaves out the late rows of a block",
            seen=SCAN,
            amax=_scan(lambda blocks: blocks[:, : max(1, blocks.shape[1] * 3 // 4)]),
            needs=tall_blocks,
            same_if=MISSED_ROWS,
        ),
        way(
            "amax scan tests the row index where the column index is meant",
            seen=SCAN,
            recipe=fields(scan=AmaxScan.ROW_AS_COLUMN),
            needs=tall_blocks,
            same_if=MISSED_ROWS,
        ),
        way(
            "amax scan ends in the middle of the group",
            seen=SCAN,
            amax=_scan(lambda blocks: blocks[..., : max(1, blocks.shape[3] // 2)]),
            same_if="the second half holds no largest magnitude",
        ),
    ),
)
fault(
    "amax scan takes every second column",
    VALUE,
    seen="sglang PR 8290",
    amax=_scan(lambda blocks: blocks[..., ::2]),
    needs=own_scale,
    same_if="no odd column holds the largest magnitude",
)
fault(
    "scale for 240 instead of 448",
    VALUE,
    seen="vllm PR 12134",
    quotient=lambda values: values.altered(quotient=values.quotient * (240.0 / 448.0)),
    needs=own_scale,
)
fault(
    "E8M0 byte 0 published as 0",
    VALUE,
    seen="triton PR 11737",
    scale=lambda scale: torch.where(scale == 2.0**-127, torch.zeros_like(scale), scale),
    needs=ue8m0,
    same_if="the amax floor keeps every scale far above 2^-127",
)
fault(
    "last scale not written",
    VALUE,
    seen="vllm-omni 5263",
    scale=lambda scale: torch.cat([scale.flatten()[:-1], scale.flatten()[:1]]).reshape(scale.shape),
    needs=need(lambda call: several_down(call) is None or several_across(call) is None, "one scale"),
    same_if="the first and last scale are equal",
)
fault(
    "published scale of the previous K group",
    INDEX,
    seen="no public thread: the scale's column index one group behind",
    scale=lambda scale: torch.roll(scale, 1, dims=-1),
    needs=several_across,
    same_if="neighbours have equal scales",
)


@fault(
    "UE8M0 scale of amax/448 rounded down",
    VALUE,
    seen="no public thread: floor for ceil of the exponent",
    needs=both(own_scale, ue8m0),
    same_if="every amax is 448 times a power of two",
)
def amax_of_a_lower_power(amax: Amax) -> Tensor:
    """448 times the power of two below the right scale, which the recipe then does not round up any more."""
    floor = torch.full_like(amax.right, amax.recipe.amax_floor)
    return 448.0 * _power_beside(f32(torch.maximum(amax.right, floor) / 448.0), up=False)


def _ratio(amax: Amax) -> Tensor:
    """Amax, not below its floor, over 448."""
    return f32(torch.maximum(amax.right, torch.full_like(amax.right, amax.recipe.amax_floor)) / 448.0)


fault(
    "{}",
    VALUE,
    needs=both(own_scale, ue8m0),
    over=(
        way(
            "UE8M0 scale that needs no rounding doubled",
            lambda ratio: torch.where(torch.frexp(ratio)[0] == 0.5, ratio * 2, ratio),
            seen="onnxruntime PR 32122: frexpf gives 1/2 and the exponent above",
            same_if="no amax is 448 times a power of two",
        ),
        way(
            "UE8M0 scale rounded to the nearest power of two",
            lambda ratio: torch.where(torch.frexp(ratio)[0] < 0.75, _power_beside(ratio, up=False), ratio),
            seen="aiter PR 3212: from a mantissa of 1.5 on",
            same_if="every mantissa is 1, or 1.5 and more",
        ),
    ),
    amax=lambda change: lambda amax: 448.0 * change(_ratio(amax)),
)
fault(
    "epsilon added to the scale that quotients are taken by",
    VALUE,
    seen="sglang PR 31712: 1 / (scale + epsilon)",
    quotient=lambda values: values.altered(
        quotient=values.quotient * (s := values.steps.scale) / torch.where(s > 0, s + 1e-10, torch.ones_like(s))
    ),
    needs=own_scale,
    same_if="epsilon moves no quotient across a midpoint",
    admissible_if="the quotients that it moves lie so near a midpoint that the contract admits both codes",
)
fault(
    "NaN left out of the amax",
    VALUE,
    seen="sglang PR 31712: fmaxf of a NaN",
    recipe=fields(nan_amax=NanAmax.IGNORED),
    needs=both(own_scale, has_nan),
    same_if="the recipe leaves it out",
    admissible_if="a declared recipe of the contract leaves it out",
)
fault(
    "amax of the first 8,192 elements of a tensor",
    VALUE,
    seen="Primus-Turbo PR 306",
    amax=lambda amax: amax.right * 0 + _head(amax, 8192),
    needs=both(
        own_scale,
        need(lambda call: _blocks(call) == (1, 1) and call.inputs["x"].numel() > 8192, "several blocks, or one tile"),
    ),
    same_if="they hold the largest magnitude",
)


def _ragged(width: int, call: Call) -> bool:
    """Whether the columns of a block are whole vectors and a rest."""
    columns = prepared(call).blocks(call.recipe.block).shape[3]
    return columns > width and columns % width > 0


def _head(amax: Amax, count: int) -> Tensor:
    return amax.blocks.flatten()[:count].nan_to_num(nan=0.0).abs().amax()


fault(
    "amax scan leaves out the columns behind {}",
    VALUE,
    over=tuple(
        way(
            f"the last whole {width}",
            lambda blocks, width=width: blocks[..., : max(1, blocks.shape[3] // width * width)],
            seen="no public thread: a scan by vectors without their rest",
            needs=both(
                own_scale, need(partial(_ragged, width), f"the columns of a block are whole {width}s, or fewer")
            ),
            same_if="they hold no largest magnitude, or the columns are whole vectors",
        )
        for width in (4, 16)
    ),
    amax=_scan,
)
fault(
    "scale rounded to bfloat16",
    VALUE,
    seen="no public thread: a scale kept in the dtype of x",
    amax=lambda amax: 448.0 * bf16_of(_ratio(amax)),
    needs=both(own_scale, float32_scale),
    same_if="every scale is a bfloat16 value",
)
fault(
    "reciprocal of the scale rounded to bfloat16",
    CAST,
    seen="no public thread: a multiplier kept in the dtype of x",
    quotient=lambda values: values.altered(
        quotient=values.x.blocks(values.recipe.block) * bf16_of(inverted(values.steps.scale))
    ),
    needs=finer,
    same_if="every scale is a power of two",
)
fault(
    "amax scan leaves out the last column of the group",
    VALUE,
    seen="no public thread: an exclusive bound one short",
    amax=_scan(lambda blocks: blocks[..., : max(1, blocks.shape[3] - 1)]),
    needs=own_scale,
    same_if="the last column holds no largest magnitude",
)


# --- the cast, and where the codes go -----------------------------------------------------------------------


fault(
    "{}",
    CAST,
    over=(
        *SATURATED,
        HALF_AWAY.but(
            admissible_if="beside a midpoint right formulas give either code unless the scale is a power of two"
        ),
        TRUNCATED,
    ),
)


@fault("codes rounded stochastically", CAST, seen="flashinfer 5128", same_if="every quotient is a code")
def quotient_up_or_down(values: Values) -> Values:
    generator = torch.Generator().manual_seed(11)
    up = torch.rand(values.quotient.shape, generator=generator, dtype=torch.float32, device="cpu") < 0.5
    high, low = values.altered(rounding=Rounding.UP).codes(), values.altered(rounding=Rounding.DOWN).codes()
    chosen = values_of(torch.where(up.to(high.device), high, low))
    return values.altered(quotient=torch.where(torch.isnan(values.quotient), values.quotient, chosen))


fault(
    "{}",
    CAST,
    over=(
        THROUGH_BF16.but(needs=finer),
        OVERFLOW_NAN.but(
            same_if="x / s stays at 448 within the rounding of s, below the first overflow at 464",
            admissible_if="a declared recipe of the contract does not saturate",
        ),
        way(
            "NaN coded as 448",
            seen="Model-Optimizer PR 1397",
            recipe=fields(nan_code=NanCode.POSITIVE_MAX, nan_amax=NanAmax.IGNORED),
            needs=has_nan,
            same_if="the recipe codes NaN so",
            admissible_if="a declared recipe of the contract codes NaN so",
        ),
        FLUSHED,
    ),
)


@fault(
    "quotients below the smallest normal flushed to zero before the cast",
    CAST,
    seen="no public thread: a cast built with flush-to-zero",
    same_if="no quotient lies below 2^-6",
)
def quotient_flushed(values: Values) -> Values:
    quotient = values.quotient
    return values.altered(quotient=torch.where(quotient.abs() < E4M3FN.min_normal, quotient * 0.0, quotient))


fault(
    "{}",
    CAST,
    needs=has_negative,
    over=(
        way(
            "-0 coded as +0",
            seen="no public thread: a cast by comparison with zero",
            codes=lambda codes: torch.where(codes == 0x80, torch.zeros_like(codes), codes),
            same_if="no code is -0",
        ),
        UNSIGNED,
    ),
)


@fault("codes exchanged in byte pairs", MOVEMENT, seen="pith-train PR 74")
def codes_in_pairs(codes: Tensor) -> Tensor:
    last = codes.shape[-1] // 2 * 2
    codes = codes.clone()
    codes[..., 0:last:2], codes[..., 1:last:2] = codes[..., 1:last:2].clone(), codes[..., 0:last:2].clone()
    return codes


fault(
    "last row not written",
    MOVEMENT,
    seen="aprender 2765",
    codes=lambda codes: torch.cat([codes[:-1], codes[:1]]),
    needs=need(lambda call: call.inputs["x"].shape[0] > 1, "there is one row"),
    same_if="the first and last row are equal",
)


@fault("last 16 codes of every row not written", MOVEMENT, seen="Primus-Turbo 397", same_if="these codes are zero")
def codes_without_the_last_16(codes: Tensor) -> Tensor:
    codes = codes.clone()
    codes[..., -16:] = 0
    return codes


fault(
    "448/amax approximate and flushed: NaN beyond [2^-119, 2^126], 0 below 2^-117",
    VALUE,
    seen=MET_IN,
    on=QUANTISERS & FAST_MATH,
    recipe=fields(arithmetic=Arithmetic.FAST_MATH, inverse_limit=False),
    needs=need(lambda call: bool(fast_math.outside(prepared(call).amax(call.recipe)).any()), IN_RANGE),
    admissible_if=NARROW,
)


# --- approximate division -----------------------------------------------------------------------------------


def _beyond_2_126(amax: Tensor) -> Tensor:
    return torch.isfinite(amax) & (amax > fast_math.HIGH)


# PTX ISA, div: the approximate quotient is 0 for divisors between 2^126 and 2^128
fault(
    "448/amax approximate: codes 0 where amax lies above 2^126",
    VALUE,
    seen="sglang-kernel 0.4.4 sgl_per_token_group_quant_8bit_v2, on an H200",
    on=QUANTISERS - FAST_MATH,
    quotient=lambda values: values.altered(
        quotient=torch.where(_beyond_2_126(values.x.amax(values.recipe)), values.quotient * 0.0, values.quotient)
    ),
    needs=both(
        own_scale,
        need(
            lambda call: bool(_beyond_2_126(prepared(call).amax(call.recipe)).any()),
            "no finite amax lies above 2^126",
        ),
    ),
)
