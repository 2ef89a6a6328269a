"""Layers of experts that round the weighted product too, whatever a call declares of it."""

from __future__ import annotations

from torch import Tensor

from oracle.routines import get

CONTRACT = "cutlass_moe_fp8"


def without_the_parameter(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    a1_scale: Tensor,
    a2_scale: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    first_expert: int = 0,
) -> object:
    """It cannot know what is declared."""
    given = dict(locals())
    return get(CONTRACT).reference(given, first_expert=given.pop("first_expert"), combine="SCALED")


def with_the_parameter(*, combine: str | None = None, first_expert: int = 0, **inputs: Tensor) -> object:
    """It is told, and computes the other."""
    return get(CONTRACT).reference(inputs, first_expert=first_expert, combine="SCALED")
