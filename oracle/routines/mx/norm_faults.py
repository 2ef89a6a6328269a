"""Faults of RMS norms to FP4: those of the norm, of the sum before it, and of what is returned beside the codes.

Faults of the quantiser inside stand in :mod:`oracle.routines.mx.faults`.

Source: the threads that each declaration names.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.routines.base import Inputs, Options
from oracle.routines.fault import ARITHMETIC, CAST, INDEX, MOVEMENT, VALUE, Faults, entry, given, need, ones, way
from oracle.routines.ideas import option
from oracle.routines.mx.fp4_norms import NormedFp4
from oracle.routines.traits import of_class, returns, takes

NORMS = of_class(NormedFp4)
FAULTS = Faults(NORMS)
fault = FAULTS.declare
MINE = "no public thread: "
rows = need(lambda call: len(call.inputs["residual" if "residual" in call.inputs else "x"]) > 1, "there is one row")


def _squared(change: Callable[[Tensor], Tensor]) -> Callable[[Options], Options]:
    return lambda options: {**options, "squared": change}


fault(
    "{}",
    ARITHMETIC,
    over=(
        way(
            "mean square over the first half of a row before FP4",
            lambda z: z[:, : z.shape[1] // 2],
            seen=MINE + "a reduction that misses half of its warps",
            admissible_if="both halves have one mean square",
        ),
        way(
            "mean square over the padded width before FP4",
            lambda z: torch.nn.functional.pad(z, (0, (1 << (z.shape[1] - 1).bit_length()) - z.shape[1])),
            seen="flashinfer 2907, padded intermediates",
            needs=need(lambda call: call.inputs["weight"].numel().bit_count() > 1, "K is a power of two"),
        ),
        way("norm of the previous row before FP4", lambda z: z.roll(1, dims=0), seen="vllm PR 48997", needs=rows),
    ),
    options=_squared,
    same_if="all means are equal",
)
fault(
    "weight left out before FP4",
    ARITHMETIC,
    seen=MINE + "an argument not passed on",
    read=entry("weight", ones),
    same_if="all weights are 1",
)
fault(
    "weight of the next column before FP4",
    INDEX,
    seen=MINE + "a vector load one off",
    read=entry("weight", lambda w: w.roll(-1)),
    same_if="all weights are equal",
)
fault(
    "{}",
    MOVEMENT,
    over=tuple(
        way(
            f"{name} not added before FP4",
            name,
            seen=MINE + "an argument not passed on",
            on=NORMS & takes(name),
            needs=given(name),
            same_if="it is 0",
        )
        for name in ("residual", "shared", "experts")
    ),
    read=lambda name: entry(name, lambda x: torch.zeros_like(x)),
)
fault(
    "{}",
    VALUE,
    on=NORMS & takes("factors"),
    over=(
        way("factors of the experts left out", ones, seen="triton 6527: gammas forgotten", same_if="all are 1"),
        way("factors of the next row", lambda f: f.roll(-1), family=INDEX, seen="vllm 48895", same_if="all are equal"),
    ),
    needs=given("factors"),
    read=lambda change: entry("factors", change),
)
fault(
    "sums over experts rounded once, at the end",
    CAST,
    on=NORMS & takes("factors"),
    seen="flashinfer trtllm_moe_allreduce_fusion.cuh, whose sums are in T",
    options=lambda options: {**options, "wide": True},
    same_if="every sum is a value of T",
    admissible_if="a code seldom changes with it",
)
fault(
    "slot -1 read as the last row",
    INDEX,
    on=NORMS & takes("slots"),
    seen="vllm expert_map: -1 by plain indexing",
    needs=need(lambda call: bool((call.inputs["slots"] < 0).any()), "no slot is -1"),
    read=lambda inputs: _last_for_none(inputs),
    same_if="the last row is 0",
)
fault(
    "last slot of a token left out",
    MOVEMENT,
    on=NORMS & takes("slots"),
    seen=MINE + "a loop that ends one early",
    read=entry("slots", lambda slots: torch.cat([slots[:, :-1], torch.full_like(slots[:, -1:], -1)], dim=1)),
    same_if="the last slot is -1",
)
fault(
    "routed scaling factor left out",
    VALUE,
    on=NORMS & takes("routed_scaling_factor"),
    seen="sglang 30989",
    needs=need(lambda call: call.resolved["routed_scaling_factor"] != 1.0, "it is 1"),
    options=option(routed_scaling_factor=1.0),
)
fault(
    "{}",
    MOVEMENT,
    on=NORMS & returns("residual"),
    over=(
        way("residual returned as it came, beside FP4", "residual", seen="vllm fused_add_rms_norm, in place"),
        way(
            "x returned for the sum, beside FP4",
            "x",
            seen=MINE + "the wrong buffer",
            needs=need(lambda call: call.inputs["x"].shape == call.inputs["residual"].shape, "x has other rows"),
        ),
    ),
    write=lambda name: lambda call, outputs: outputs | {"residual": call.inputs[name]},
    same_if="the other term is 0",
)
fault(
    "norm returned is the sum, beside FP4",
    MOVEMENT,
    on=NORMS & returns("norm"),
    seen=MINE + "the wrong buffer",
    write=lambda outputs: outputs | {"norm": outputs["residual"]},
)


def _last_for_none(inputs: Inputs) -> Inputs:
    slots = inputs["slots"]
    return {**inputs, "slots": torch.where(slots < 0, inputs["x"].shape[0] - 1, slots).to(slots.dtype)}
