"""Faults of the quantisers inside FlashInfer's block-scaled GEMM, seen in the products around them.

A mutant multiplies what the shipped quantisers make of its bfloat16 operands, bit for bit
(:mod:`oracle.numbers.fast_math`), so the output alone identifies the quantiser that is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from oracle.routines.fault import MOVEMENT, VALUE, Call, Faults, WhyNot, both, need
from oracle.routines.products.flashinfer import (
    WIDE,
    Fp8BlockscaleGemmSm90,
    WideInput,
    as_shipped,
    out_of_range,
    rows_left_out,
)
from oracle.routines.quantisers.faults import IN_RANGE, MET_IN, NARROW
from oracle.routines.traits import of_class
from oracle.truth.gemm import ScaledProduct, take_rows

# A fault is a row: what is wrong and where it was met; the change; when it shows.
FAULTS = Faults(of_class(Fp8BlockscaleGemmSm90))
fault = FAULTS.declare

SCANNED = "the scan's largest magnitudes are the blocks'"


def _given(call: Call) -> Mapping[str, Tensor]:
    return call.inputs if call.given is None else call.given


def _wide(name: str) -> WhyNot:
    return need(lambda call: _given(call)[name].dtype == WIDE, f"{name} is not quantised inside")


@fault(
    "activations quantised inside with 448/amax approximate and flushed: NaN beyond [2^-119, 2^126]",
    VALUE,
    seen=MET_IN,
    needs=both(_wide("input"), need(lambda call: out_of_range(_given(call)["input"]), IN_RANGE)),
    admissible_if=NARROW,
)
def product_of_shipped_activations(call: Call, right: ScaledProduct) -> ScaledProduct:
    (part,) = as_shipped(_given(call))
    return replace(right, a=part.product.a, a_scale=part.product.a_scale)


@fault(
    "weight quantised inside by an amax scan that leaves rows out",
    VALUE,
    seen="FlashInfer 0.6.18 scale_128x128_kernel",
    on=FAULTS.on - of_class(WideInput),
    needs=both(_wide("weight"), need(lambda call: rows_left_out(_given(call)["weight"]), SCANNED)),
    same_if=SCANNED,
)
def product_of_shipped_operands(call: Call, right: ScaledProduct) -> ScaledProduct:
    (part,) = as_shipped(_given(call))
    return part.product


@fault(
    "activations of another call in the workspace that threads share",
    MOVEMENT,
    seen="FlashInfer 0.6.18.post1 called from four threads, on an H200",
    needs=both(
        _wide("input"), need(lambda call: _given(call)["input"].shape[0] > 1, "one row is the same in reverse order")
    ),
    same_if="rows may be the same in reverse order",
    race=True,
)
def product_of_another_call(call: Call, right: ScaledProduct) -> ScaledProduct:
    """Rows of another call in a shared workspace; those of this call in reverse order stand for them."""
    (part,) = as_shipped(_given(call))
    order = torch.arange(part.product.a.shape[0] - 1, -1, -1, device=part.product.a.device)
    return replace(right, a=take_rows(part.product.a, order), a_scale=part.product.a_scale[order])
