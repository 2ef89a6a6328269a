"""Faults of a quantiser's scales: a wrong amax, a wrong scale made of it, a wrong scale published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import BF16
from oracle.numbers.quantize import f32, prepare
from oracle.numbers.recipes import AmaxScan, PowerOfTwo, Recipe, ScaleFormula
from oracle.numbers.rounding import Overflow, Rounding, power_of_two, round_to
from oracle.numbers.scaling import ScaleFormat
from oracle.routines.base import registered
from oracle.routines.fault import Call, Change, Family, Fault, Stage, WhyNot, always
from oracle.routines.quantisers.faults.quantiser_engine import Amax, Values

QUANTISERS = frozenset(name for name, contract in registered().items() if "x" in contract.roles)
EXACT_POWERS = "every scale is a power of two"


def quantiser_fault(
    name: str,
    family: Family,
    met_in: str,
    stage: Stage,
    change: Change,
    why_not: WhyNot = always,
    equivalent: str = "",
    tolerated: str = "",
) -> Fault:
    """A fault of every quantiser, with one change."""
    return Fault(name, family, met_in, {stage: change}, QUANTISERS, why_not, equivalent, tolerated)


# --- what a call must have ----------------------------------------------------------------------------------


def own_scale(call: Call) -> str | None:
    """The call computes its scale."""
    return "the scale is given" if call.recipe.formula is ScaleFormula.GIVEN else None


def several_scales(axis: int) -> WhyNot:
    """There are several blocks down (0) or across (1)."""

    def why_not(call: Call) -> str | None:
        if (reason := own_scale(call)) is not None:
            return reason
        counts = prepare(call.inputs["x"]).grid(call.recipe.block).count
        return None if counts[axis] > 1 else f"one block {'down' if axis == 0 else 'across'}"

    return why_not


def _square(call: Call) -> str | None:
    if (reason := own_scale(call)) is not None:
        return reason
    down, across = prepare(call.inputs["x"]).grid(call.recipe.block).count
    return None if down == across > 1 else f"the scales are {down} x {across}, not square"


def _float32_scale(call: Call) -> str | None:
    if (reason := own_scale(call)) is not None:
        return reason
    return "the scale is a power of two" if call.recipe.scale_format is ScaleFormat.UE8M0 else None


def ue8m0(call: Call) -> str | None:
    """The scale is a power of two."""
    return None if call.recipe.scale_format is ScaleFormat.UE8M0 else "the scale is no power of two"


def _ceiling(call: Call) -> str | None:
    return None if call.recipe.power_of_two is PowerOfTwo.CEIL else "the scale is not rounded up to a power of two"


def holds(found: Callable[[Tensor], Tensor], missing: str) -> WhyNot:
    """The input has at least one value of this kind."""

    def why_not(call: Call) -> str | None:
        return None if bool(found(call.inputs["x"].to(torch.float64)).any()) else missing

    return why_not


def _tall_blocks(call: Call) -> str | None:
    rows = call.recipe.block.rows
    return None if rows is not None and rows > 4 else "a block has one row, or is the whole tensor"


def _has_floor(call: Call) -> str | None:
    return None if call.recipe.amax_floor > 0 else "the recipe has no amax floor"


def negative(x: Tensor) -> Tensor:
    """Values below zero; -0 and NaN are none."""
    return x < 0


# --- changes ------------------------------------------------------------------------------------------------


def recipe_changed(**fields: object) -> Change:
    """A RECIPE change: fields of the record replaced."""

    def change(call: Call, recipe: Recipe) -> Recipe:
        return replace(recipe, **fields)  # type: ignore[arg-type]

    return change


def _floor_on_scale(call: Call, recipe: Recipe) -> Recipe:
    return replace(recipe, amax_floor=0.0, scale_floor=recipe.amax_floor)


def amax_changed(change: Callable[[Amax], Tensor]) -> Change:
    """An AMAX change."""

    def apply(call: Call, amax: Amax) -> Tensor:
        return change(amax)

    return apply


def _signed(amax: Amax) -> Tensor:
    return amax.blocks.nan_to_num(nan=0.0).amax(dim=(1, 3), keepdim=True).clamp(min=0.0)


def _bf16(amax: Amax) -> Tensor:
    return round_to(amax.right, BF16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def _first_half(amax: Amax) -> Tensor:
    """The scan ends in the middle of the block's columns."""
    blocks = amax.blocks[..., : max(1, amax.blocks.shape[3] // 2)]
    return blocks.nan_to_num(nan=0.0).abs().amax(dim=(1, 3), keepdim=True)


def _late_rows_missed(amax: Amax) -> Tensor:
    """Rows from three quarters of the block on do not enter."""
    rows = amax.blocks.shape[1]
    blocks = amax.blocks[:, : max(1, rows * 3 // 4)]
    return blocks.nan_to_num(nan=0.0).abs().amax(dim=(1, 3), keepdim=True)


def _neighbour(axis: int) -> Callable[[Amax], Tensor]:
    return lambda amax: torch.roll(amax.right, 1, dims=axis)


def _whole_row(amax: Amax) -> Tensor:
    return amax.right.amax(dim=2, keepdim=True).expand_as(amax.right)


def published(change: Callable[[Tensor], Tensor]) -> Change:
    """A SCALE change."""

    def apply(call: Call, scale: Tensor) -> Tensor:
        return change(scale)

    return apply


def _truncate(scale: Tensor) -> Tensor:
    return power_beside(scale, up=False)


def _round_up(scale: Tensor) -> Tensor:
    return power_beside(scale, up=True)


def power_beside(scale: Tensor, *, up: bool) -> Tensor:
    """The nearest power of two at or above (``up``), or at or below; 0, infinities and NaN as they are."""
    mantissa, exponent = torch.frexp(scale)
    down = power_of_two(exponent.to(torch.int64) - 1)
    power = torch.where((mantissa != 0.5) & up, down * 2, down)
    return torch.where((scale > 0) & torch.isfinite(scale), power, scale)


def _ulp_up(scale: Tensor) -> Tensor:
    return f32(scale * (1 + 2.0**-23))


def _inverse(scale: Tensor) -> Tensor:
    return f32(torch.ones_like(scale) / scale)


def _transpose(scale: Tensor) -> Tensor:
    return scale.t().contiguous()


def _column_major_bytes(scale: Tensor) -> Tensor:
    """Stored transposed behind the same logical shape."""
    return scale.t().contiguous().reshape(scale.shape)


def _zero_byte(scale: Tensor) -> Tensor:
    return torch.where(scale == 2.0**-127, torch.zeros_like(scale), scale)


def _last_unwritten(scale: Tensor) -> Tensor:
    scale = scale.clone().flatten()
    scale[-1] = scale[0]
    return scale


def _keep_shape(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda call, scale: change(scale).reshape(scale.shape)


def _by_inverse_of_240(call: Call, values: Values) -> Values:
    return values.altered(quotient=values.quotient * (240.0 / 448.0))


def faults() -> list[Fault]:
    """The faults of scale index and scale value."""
    index, value = Family.SCALE_INDEX, Family.SCALE_VALUE
    return [
        quantiser_fault(
            "amax of the previous row block",
            index,
            "NVIDIA/cutlass 2087",
            Stage.AMAX,
            amax_changed(_neighbour(0)),
            several_scales(0),
            "neighbours have equal amax",
        ),
        quantiser_fault(
            "amax of the previous K group",
            index,
            "mlc-ai/TIRx-kernels PR 5",
            Stage.AMAX,
            amax_changed(_neighbour(2)),
            several_scales(1),
            "neighbours have equal amax",
        ),
        quantiser_fault(
            "one amax for all K groups of a row",
            index,
            "NVIDIA/cutlass 2154",
            Stage.AMAX,
            amax_changed(_whole_row),
            several_scales(1),
            "all groups have equal amax",
        ),
        quantiser_fault(
            "published scale transposed where it is square",
            index,
            "pytorch 195751",
            Stage.SCALE,
            published(_transpose),
            _square,
            "the matrix is symmetric",
        ),
        quantiser_fault(
            "published scale column-major behind a row-major shape",
            index,
            "flashinfer 2147",
            Stage.SCALE,
            published(_column_major_bytes),
            lambda c: several_scales(0)(c) or several_scales(1)(c),
            "all scales are equal",
        ),
        quantiser_fault(
            "mantissa of the published scale truncated",
            value,
            "DeepGEMM PR 112",
            Stage.SCALE,
            published(_truncate),
            _float32_scale,
            EXACT_POWERS,
        ),
        quantiser_fault(
            "published scale rounded up after the payload was quantised",
            value,
            "sglang PR 28418",
            Stage.SCALE,
            published(_round_up),
            _float32_scale,
            EXACT_POWERS,
        ),
        quantiser_fault(
            "scale rounded down to a power of two",
            value,
            "vllm PR 22399",
            Stage.RECIPE,
            recipe_changed(power_of_two=PowerOfTwo.AMAX_FLOOR),
            _ceiling,
            EXACT_POWERS,
        ),
        quantiser_fault(
            "published scale one ulp high",
            value,
            "sglang PR 32616",
            Stage.SCALE,
            published(_ulp_up),
            _float32_scale,
            "",
            "a scale within 4 * 2^-24 of amax/448 is admissible: right formulas differ by as much",
        ),
        quantiser_fault(
            "inverse of the scale published",
            value,
            "vllm PR 36297",
            Stage.SCALE,
            published(_inverse),
            own_scale,
            "every scale is 1",
        ),
        quantiser_fault(
            "floor applied to the scale instead of to amax",
            value,
            "vllm 53339",
            Stage.RECIPE,
            _floor_on_scale,
            _has_floor,
            "no amax lies below the floor",
        ),
        quantiser_fault(
            "amax floor missing",
            value,
            "pytorch/ao 4713, TransformerEngine PR 786",
            Stage.RECIPE,
            recipe_changed(amax_floor=0.0),
            _has_floor,
            "no amax lies below the floor",
        ),
        quantiser_fault(
            "amax rounded to bfloat16",
            value,
            "pytorch/ao PR 4725",
            Stage.AMAX,
            amax_changed(_bf16),
            own_scale,
            "every amax is a bfloat16 value",
        ),
        quantiser_fault(
            "amax of signed values",
            value,
            "TransformerEngine 3550",
            Stage.AMAX,
            amax_changed(_signed),
            lambda c: own_scale(c) or holds(negative, "no value is negative")(c),
            "the largest magnitude of every block is positive",
        ),
        quantiser_fault(
            "amax scan leaves out the late rows of a block",
            value,
            "FlashInfer 0.6.18 scale_128x128_kernel",
            Stage.AMAX,
            amax_changed(_late_rows_missed),
            lambda c: own_scale(c) or _tall_blocks(c),
            "the missed rows hold no largest magnitude",
        ),
        quantiser_fault(
            "amax scan tests the row index where the column index is meant",
            value,
            "FlashInfer 0.6.18 scale_128x128_kernel",
            Stage.RECIPE,
            recipe_changed(scan=AmaxScan.ROW_AS_COLUMN),
            lambda c: own_scale(c) or _tall_blocks(c),
            "the missed rows hold no largest magnitude",
        ),
        quantiser_fault(
            "amax scan ends in the middle of the group",
            value,
            "FlashInfer 0.6.18 scale_128x128_kernel",
            Stage.AMAX,
            amax_changed(_first_half),
            own_scale,
            "the second half holds no largest magnitude",
        ),
        quantiser_fault(
            "scale for 240 instead of 448", value, "vllm PR 12134", Stage.QUOTIENT, _by_inverse_of_240, own_scale
        ),
        quantiser_fault(
            "E8M0 byte 0 published as 0",
            value,
            "triton PR 11737",
            Stage.SCALE,
            published(_zero_byte),
            ue8m0,
            "the amax floor keeps every scale far above 2^-127",
        ),
        quantiser_fault(
            "last scale not written",
            value,
            "vllm-omni 5263",
            Stage.SCALE,
            _keep_shape(_last_unwritten),
            lambda c: None if several_scales(0)(c) is None or several_scales(1)(c) is None else "one scale",
            "the first and last scale are equal",
        ),
    ]
