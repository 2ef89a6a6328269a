"""Faults at the border of a quantiser's group: the scale of another group, a scan one short, a scale rounded down."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.faults.base import Family, Fault, Stage
from oracle.faults.quantiser_engine import Amax
from oracle.faults.quantiser_scale import (
    amax_changed,
    own_scale,
    power_beside,
    published,
    quantiser_fault,
    several_scales,
    ue8m0,
)
from oracle.quantize import f32


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


def faults() -> list[Fault]:
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
