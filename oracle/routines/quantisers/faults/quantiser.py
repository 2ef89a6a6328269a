"""Faults of quantisers: those of their scales, then a wrong cast and codes in a wrong place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.numbers.formats import BF16, E4M3FN
from oracle.numbers.quantize import f32
from oracle.numbers.recipes import NanAmax, NanCode
from oracle.numbers.rounding import Overflow, Rounding, round_to
from oracle.routines.fault import Call, Change, Family, Fault, Stage, always
from oracle.routines.quantisers.faults import quantiser_scale
from oracle.routines.quantisers.faults.quantiser_engine import Amax, Values, values_of
from oracle.routines.quantisers.faults.quantiser_scale import (
    amax_changed,
    holds,
    negative,
    own_scale,
    power_beside,
    published,
    quantiser_fault,
    recipe_changed,
    several_scales,
    ue8m0,
)


def _last_column_missed(amax: Amax) -> Tensor:
    """The scan ends one column early."""
    columns = amax.blocks.shape[3]
    return amax.blocks[..., : max(1, columns - 1)].nan_to_num(nan=0.0).abs().amax(dim=(1, 3), keepdim=True)


def _floored(amax: Amax) -> Tensor:
    """The amax whose 448th is the power of two below the right scale; what the recipe then rounds up is that power."""
    floor = torch.full_like(amax.right, amax.recipe.amax_floor)
    return 448.0 * power_beside(f32(torch.maximum(amax.right, floor) / 448.0), up=False)


def _previous_group(scale: Tensor) -> Tensor:
    return torch.roll(scale, 1, dims=-1)


def border_faults() -> list[Fault]:
    """The faults of this file; none has a public thread."""
    index, value = Family.SCALE_INDEX, Family.SCALE_VALUE
    return [
        quantiser_fault(
            "published scale of the previous K group",
            index,
            "no public thread: the scale's column index one group behind",
            Stage.SCALE,
            published(_previous_group),
            several_scales(1),
            "neighbours have equal scales",
        ),
        quantiser_fault(
            "UE8M0 scale of amax/448 rounded down",
            value,
            "no public thread: floor for ceil of the exponent",
            Stage.AMAX,
            amax_changed(_floored),
            lambda c: own_scale(c) or ue8m0(c),
            "every amax is 448 times a power of two",
        ),
        quantiser_fault(
            "amax scan leaves out the last column of the group",
            value,
            "no public thread: an exclusive bound one short",
            Stage.AMAX,
            amax_changed(_last_column_missed),
            own_scale,
            "the last column holds no largest magnitude",
        ),
    ]


def _limit(top: float) -> Change:
    def change(call: Call, values: Values) -> Values:
        return values.altered(quotient=values.quotient.clamp(-top, top))

    return change


def _rounding(rounding: Rounding, overflow: Overflow = Overflow.SATURATE) -> Change:
    return lambda call, values: values.altered(rounding=rounding, overflow=overflow)


def _stochastic(call: Call, values: Values) -> Values:
    generator = torch.Generator().manual_seed(11)
    up = torch.rand(values.quotient.shape, generator=generator, dtype=torch.float32, device="cpu") < 0.5
    high, low = values.altered(rounding=Rounding.UP).codes(), values.altered(rounding=Rounding.DOWN).codes()
    chosen = values_of(torch.where(up.to(high.device), high, low))
    return values.altered(quotient=torch.where(torch.isnan(values.quotient), values.quotient, chosen))


def _through_bf16(call: Call, values: Values) -> Values:
    once = round_to(values.quotient, BF16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
    return values.altered(quotient=once)


def _flushed(call: Call, values: Values) -> Values:
    quotient = values.quotient
    return values.altered(quotient=torch.where(quotient.abs() < E4M3FN.min_normal, quotient * 0.0, quotient))


def _codes(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda call, codes: change(codes)


def _subnormal(codes: Tensor) -> Tensor:
    return ((codes & 0x78) == 0) & ((codes & 0x07) != 0)


def _pairs(codes: Tensor) -> Tensor:
    last = codes.shape[-1] // 2 * 2
    codes = codes.clone()
    codes[..., 0:last:2], codes[..., 1:last:2] = codes[..., 1:last:2].clone(), codes[..., 0:last:2].clone()
    return codes


def _last_row_stale(codes: Tensor) -> Tensor:
    codes = codes.clone()
    codes[-1] = codes[0]
    return codes


def _tail_unwritten(codes: Tensor) -> Tensor:
    codes = codes.clone()
    codes[..., -16:] = 0
    return codes


def faults() -> list[Fault]:
    """The faults of quantisers, by family."""
    cast, move = Family.CAST, Family.MOVEMENT
    half_even = "no quotient is a tie"
    return [
        *quantiser_scale.faults(),
        *border_faults(),
        quantiser_fault(
            "codes saturate at 256",
            cast,
            "sglang PR 40581",
            Stage.QUOTIENT,
            _limit(256.0),
            always,
            "no quotient exceeds 256",
        ),
        quantiser_fault(
            "codes saturate at 240",
            cast,
            "vllm PR 12134",
            Stage.QUOTIENT,
            _limit(240.0),
            always,
            "no quotient exceeds 240",
        ),
        quantiser_fault(
            "codes rounded half away from zero",
            cast,
            "flashinfer 5128",
            Stage.QUOTIENT,
            _rounding(Rounding.NEAREST_AWAY),
            always,
            half_even,
            "beside a midpoint right formulas give either code unless the scale is a power of two",
        ),
        quantiser_fault(
            "codes rounded toward zero",
            cast,
            "flashinfer 5128",
            Stage.QUOTIENT,
            _rounding(Rounding.TOWARD_ZERO),
            always,
            "every quotient is a code",
        ),
        quantiser_fault(
            "codes rounded stochastically",
            cast,
            "flashinfer 5128",
            Stage.QUOTIENT,
            _stochastic,
            always,
            "every quotient is a code",
        ),
        quantiser_fault(
            "quotient rounded to bfloat16 first",
            cast,
            "TensorRT-LLM PR 14464",
            Stage.QUOTIENT,
            _through_bf16,
            always,
            "every quotient is a bfloat16 value",
        ),
        quantiser_fault(
            "overflow coded as NaN",
            cast,
            "ml_dtypes 400",
            Stage.QUOTIENT,
            _rounding(Rounding.NEAREST_EVEN, Overflow.NAN),
            always,
            "x / s stays at 448 within the rounding of s, below the first overflow at 464",
        ),
        quantiser_fault(
            "NaN coded as 448",
            cast,
            "Model-Optimizer PR 1397",
            Stage.RECIPE,
            recipe_changed(nan_code=NanCode.POSITIVE_MAX, nan_amax=NanAmax.IGNORED),
            holds(torch.isnan, "no value is NaN"),
            "the recipe codes NaN so",
            "a declared recipe of the contract codes NaN so",
        ),
        quantiser_fault(
            "subnormal codes flushed to zero",
            cast,
            "flashinfer PR 3932",
            Stage.CODES,
            _codes(lambda c: torch.where(_subnormal(c), c & 0x80, c)),
            always,
            "no code is subnormal",
        ),
        quantiser_fault(
            "quotients below the smallest normal flushed to zero before the cast",
            cast,
            "no public thread: a cast built with flush-to-zero",
            Stage.QUOTIENT,
            _flushed,
            always,
            "no quotient lies below 2^-6",
        ),
        quantiser_fault(
            "-0 coded as +0",
            cast,
            "no public thread: a cast by comparison with zero",
            Stage.CODES,
            _codes(lambda c: torch.where(c == 0x80, torch.zeros_like(c), c)),
            holds(negative, "no value is negative"),
            "no code is -0",
        ),
        quantiser_fault(
            "sign lost",
            cast,
            "flashinfer PR 3932",
            Stage.CODES,
            _codes(lambda c: c & 0x7F),
            holds(negative, "no value is negative"),
        ),
        quantiser_fault("codes exchanged in byte pairs", move, "pith-train PR 74", Stage.CODES, _codes(_pairs)),
        quantiser_fault(
            "last row not written",
            move,
            "aprender 2765",
            Stage.CODES,
            _codes(_last_row_stale),
            lambda c: None if c.inputs["x"].shape[0] > 1 else "there is one row",
            "the first and last row are equal",
        ),
        quantiser_fault(
            "last 16 codes of every row not written",
            move,
            "Primus-Turbo 397",
            Stage.CODES,
            _codes(_tail_unwritten),
            always,
            "these codes are zero",
        ),
    ]
