"""Faults of the quantisers inside FlashInfer's block-scaled GEMM, in the quantisers and in the products around them.

A product's mutant multiplies what the shipped quantisers make of its bfloat16 operands, bit for bit
(:mod:`oracle.numbers.fast_math`), so an output tells by itself which of the two spoiled it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers import fast_math
from oracle.numbers.quantize import prepare
from oracle.numbers.recipes import Arithmetic
from oracle.routines.fault import Call, Family, Fault, Stage, WhyNot
from oracle.routines.products.flashinfer import WIDE, as_shipped, out_of_range, rows_left_out
from oracle.routines.products.roles import FLASHINFER
from oracle.routines.quantisers.faults.quantiser_scale import recipe_changed
from oracle.truth.gemm import ScaledProduct, take_rows

QUANTISERS = frozenset({"flashinfer_quantize_1x128", "flashinfer_quantize_128x128"})
PRODUCTS = frozenset(
    {
        FLASHINFER,
        "flashinfer_fp8_blockscale_gemm",
        "dynamic_flashinfer_deepgemm_blockscale_gemm",
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
    }
)
IN_RANGE = "every amax is 0 or within [448 * 2^-126, 2^126]"
SCANNED = "the scan's largest magnitudes are the blocks'"
NARROW = "within that range the scale is off by 2 ulp at most, which is admissible"
MET_IN = "FlashInfer 0.6.18.post1 scale_1x128_kernel under -use_fast_math, on an H200"


def _given(call: Call) -> Mapping[str, Tensor]:
    return call.inputs if call.given is None else call.given


def _wide(name: str) -> WhyNot:
    def why_not(call: Call) -> str | None:
        return None if _given(call)[name].dtype == WIDE else f"{name} is not quantised inside"

    return why_not


def _range(call: Call) -> str | None:
    return _wide("input")(call) or (None if out_of_range(_given(call)["input"]) else IN_RANGE)


def _scan(call: Call) -> str | None:
    return _wide("weight")(call) or (None if rows_left_out(_given(call)["weight"]) else SCANNED)


def _quantiser_range(call: Call) -> str | None:
    amax = prepare(call.inputs["x"]).amax(call.recipe)
    return None if bool(fast_math.outside(amax).any()) else IN_RANGE


def _activations(call: Call, right: ScaledProduct) -> ScaledProduct:
    (part,) = as_shipped(_given(call))
    return replace(right, a=part.product.a, a_scale=part.product.a_scale)


def _both(call: Call, right: ScaledProduct) -> ScaledProduct:
    (part,) = as_shipped(_given(call))
    return part.product


def _several_rows(call: Call) -> str | None:
    given = _given(call)["input"]
    return _wide("input")(call) or (None if given.shape[0] > 1 else "one row is the same in reverse order")


def _another_call(call: Call, right: ScaledProduct) -> ScaledProduct:
    """Another call's rows in the workspace; the rows of this one in reverse order stand for them."""
    (part,) = as_shipped(_given(call))
    order = torch.arange(part.product.a.shape[0] - 1, -1, -1, device=part.product.a.device)
    return replace(right, a=take_rows(part.product.a, order), a_scale=part.product.a_scale[order])


def faults() -> list[Fault]:
    """The faults of this file."""
    value = Family.SCALE_VALUE
    fast = recipe_changed(arithmetic=Arithmetic.FAST_MATH, inverse_limit=False)
    return [
        Fault(
            "448/amax approximate and flushed: NaN beyond [2^-119, 2^126], 0 below 2^-117",
            value,
            MET_IN,
            {Stage.RECIPE: fast},
            QUANTISERS,
            _quantiser_range,
            "",
            NARROW,
        ),
        Fault(
            "activations quantised inside with 448/amax approximate and flushed: NaN beyond [2^-119, 2^126]",
            value,
            MET_IN,
            {Stage.PRODUCT: _activations},
            PRODUCTS,
            _range,
            "",
            NARROW,
        ),
        Fault(
            "weight quantised inside by an amax scan that leaves rows out",
            value,
            "FlashInfer 0.6.18 scale_128x128_kernel",
            {Stage.PRODUCT: _both},
            frozenset({FLASHINFER}),
            _scan,
            SCANNED,
        ),
        Fault(
            "activations of another call in the workspace that threads share",
            Family.MOVEMENT,
            "FlashInfer 0.6.18.post1 called from four threads, on an H200",
            {Stage.PRODUCT: _another_call},
            PRODUCTS,
            _several_rows,
            "rows may be the same in reverse order",
            race=True,
        ),
    ]
