"""Faults of the fused quantisers: those of the quantiser inside, and those of the value that it quantises.

Source: the threads that each declaration names (``seen``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oracle.numbers.formats import FP32, decode, of_dtype
from oracle.routines.base import Call
from oracle.routines.fault import ARITHMETIC, CAST, INDEX, MOVEMENT, VALUE, Faults, both, entry, given, need, ones, way
from oracle.routines.fused.contract import FusedContract, Inner, matrix_of
from oracle.routines.fused.kernels import (
    BOUNDS_SCALE,
    NORMALISES,
    WORDS,
    FusedInvRopeFp8Quant,
    GatedContract,
    NormContract,
    RopeQuantizeFp8,
)
from oracle.routines.fused.norms import LayernormQuant
from oracle.routines.ideas import halves_swapped, option, through_bf16
from oracle.routines.quantisers import faults as quantisers
from oracle.routines.quantisers.contract import FAST_MATH, QUANTISER_INSIDE, Amax
from oracle.routines.quantisers.inside import Inside, asked_inside
from oracle.routines.traits import Trait, of_class, returns, takes
from oracle.truth.moe import nearest
from oracle.truth.routing import sigmoid
from oracle.verdict.sets import rounded_to

FUSED = of_class(FusedContract)
COMPUTED, GATED, NORMED = FUSED & returns("scale"), of_class(GatedContract), NORMALISES
GIVEN, BOUNDED = FUSED & takes("scale"), FUSED & takes("scale_ub")
SUM_ROUNDED = NORMED & Trait("rounds its sum", lambda contract: getattr(contract, "sum_in_dtype", False))
STEPWISE = NORMED & Trait("rounds its norm", lambda contract: getattr(contract, "rounding", "none") != "none")
PREFIX = "fused: "
OfTensor = Callable[[Tensor], Tensor]
Change = Callable[..., Any]
MINE = "no public thread: "
# A fault is a row: what is wrong and where it was met; the change; when it shows.


# --- the quantiser's own, on the value ----------------------------------------------------------------------


INSIDE = Inside(PREFIX, QUANTISER_INSIDE, returns("scale"))


several_groups = asked_inside(quantisers.several_across)
float32_scale, powers = asked_inside(quantisers.float32_scale), asked_inside(quantisers.ue8m0)
QUANTISER = Faults(COMPUTED)
fault = QUANTISER.declare

fault(
    "scale of the first K group for every group of the row",
    INDEX,
    seen="sglang PR 20819",
    amax=lambda amax: amax.right[:, :, :1].expand_as(amax.right),
    needs=several_groups,
    same_if="all groups have equal amax",
)
fault(
    "scale for 224 instead of 448",
    VALUE,
    seen="sglang PR 30900",
    amax=lambda amax: amax.right * 2,
    same_if="amax lies below half of the floor",
)
fault(
    "published scale below 1e-8 flushed to 0",
    VALUE,
    seen="flashinfer 2595, vllm 31394",
    scale=lambda scale: torch.where(scale < 1e-8, scale * 0.0, scale),
    same_if="no scale lies below 1e-8",
)
fault(
    "multiplier of a power-of-two scale overflows in float16",
    VALUE,
    seen="sglang PR 33533",
    quotient=lambda values: values.altered(
        quotient=torch.where(
            (values.steps.scale < 2.0**-16) & (values.quotient != 0), values.quotient * torch.inf, values.quotient
        )
    ),
    needs=both(powers, need(lambda call: next(iter(call.inputs.values())).dtype == torch.float16, "x is not float16")),
    same_if="no scale lies below 2^-16",
)


@fault(
    "amax of the value before it is rounded",
    VALUE,
    seen=MINE + "the scan reads the registers, the cast the stored value",
    on=GATED & COMPUTED,
    needs=need(lambda call: call.resolved.get("rounding") != "none", "the value is not rounded"),
    admissible_if="a power-of-two scale seldom changes with it",
    same_if="the largest values are bfloat16 values",
)
def amax_before_rounding(call: Call, amax: Amax) -> Tensor:
    contract = call.contract
    assert isinstance(contract, Inner)
    outer, fused = contract.outer, contract.outer.contract
    assert isinstance(fused, FusedContract)
    wide = _gated(outer.inputs["x"], lambda gate: gate * sigmoid(gate))
    cells = amax.x.grid(amax.recipe.block)
    blocks = cells.split(matrix_of(wide, fused.rows(outer.inputs)).double())
    right = blocks.nan_to_num(nan=0.0).abs().amax(dim=(1, 3), keepdim=True)
    return torch.where(torch.isfinite(amax.right), right, amax.right)


# --- the value: silu(gate) * up -----------------------------------------------------------------------------


def _gated(x: Tensor, active: OfTensor) -> Tensor:
    """``active(gate) * up`` in float32."""
    gate, up = decode(x).chunk(2, dim=-1)
    return rounded_to(nearest(active(gate) * up, FP32), torch.float32)


def _instead(active: OfTensor) -> Change:
    """Another activation, rounded once to the dtype of the value."""

    def store(call: Call, value: Tensor) -> Tensor:
        return rounded_to(_gated(call.inputs["x"], active).double(), value.dtype)

    return store


def _up_moved(x: Tensor, by: int) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.cat([gate, torch.roll(up, by, dims=-1)], dim=-1)


VALUES = Faults(GATED)
fault = VALUES.declare
rounded = need(lambda call: call.resolved.get("rounding") != "none", "the value is not rounded")
twice = need(lambda call: call.resolved.get("rounding", "each") == "each", "silu is not rounded by itself")
unrounded = need(lambda call: call.resolved.get("rounding") == "none", "the value is rounded already")
narrow = need(lambda call: next(iter(call.inputs.values())).dtype != torch.float32, "x is float32")

fault(
    "gate and up taken from neighbouring columns in the fused activation",
    INDEX,
    seen="vllm PR 22951, aiter 5760",
    read=entry("x", lambda x: torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)),
    same_if="the columns are equal",
)
fault("gate and up exchanged in the fused activation", INDEX, seen="sglang PR 11081", read=entry("x", halves_swapped()))
fault(
    "up half read one column off",
    INDEX,
    seen="flashinfer 2907, padded halves",
    read=entry("x", lambda x: _up_moved(x, -1)),
)
fault(
    "{}",
    ARITHMETIC,
    over=(
        way("fused activation without silu", lambda gate: gate, seen=MINE + "the activation argument ignored"),
        way("sigmoid in place of silu in the fused activation", sigmoid, seen="sglang PR 39920"),
        way(
            "gelu in place of silu in the fused activation",
            lambda gate: gate * 0.5 * (1 + torch.erf(gate / 2.0**0.5)),
            seen=MINE + "the activation argument ignored",
        ),
    ),
    store=_instead,
)
fault(
    "up half left out of the fused activation",
    MOVEMENT,
    seen=MINE + "a gated kernel on an ungated weight",
    read=entry("x", lambda x: torch.cat([x.chunk(2, -1)[0], ones(x.chunk(2, -1)[1])], -1)),
)

fault(
    "value kept in float32 where its dtype is promised",
    CAST,
    seen="TensorRT-LLM PR 14464",
    on=GATED & takes("rounding"),
    options=option(rounding="none"),
    needs=both(rounded, narrow),
    same_if="every product is a value of its dtype",
)
fault(
    "silu not rounded before the product",
    CAST,
    seen="vLLM csrc/activation_kernels.cu beside flashinfer 5128",
    on=GATED & takes("rounding"),
    options=option(rounding="product"),
    needs=both(twice, narrow),
    same_if="every silu is a value of its dtype",
)
fault(
    "value rounded to bfloat16 where float32 is promised",
    CAST,
    seen="TensorRT-LLM PR 14464",
    on=GATED & takes("rounding"),
    store=lambda value: nearest_bf16(value),
    needs=unrounded,
    same_if="every value is a bfloat16 value",
)


with_alpha = need(lambda call: call.resolved.get("gemm1_alpha") is not None, "silu is plain")
fault(
    "{}",
    ARITHMETIC,
    on=GATED & takes("gemm1_alpha"),
    needs=with_alpha,
    over=(
        way("gemm1_alpha ignored", {"gemm1_alpha": 1.0}, seen="vllm PR 45738, sglang PR 39939"),
        way("plain silu for one with an alpha and 1 + up", {"gemm1_alpha": None}, seen="sglang PR 39920"),
        way(
            "limit of the fused activation ignored",
            {"gemm1_clamp_limit": None},
            seen="TensorRT-LLM PR 13767",
            needs=both(
                with_alpha, need(lambda call: call.resolved["gemm1_clamp_limit"] is not None, "there is no limit")
            ),
            same_if="no operand reaches the limit",
        ),
    ),
    options=lambda change: option(**change),
)


def nearest_bf16(value: Tensor) -> Tensor:
    """``value``, of any shape and float dtype, rounded to bfloat16, in the same shape and dtype.

    Beyond the range infinity; NaN and infinity stay.
    """
    return rounded_to(rounded_to(value.double(), torch.bfloat16).double(), value.dtype)


# --- scales that are given, bounds, rows in use -------------------------------------------------------------

fault(
    "{}",
    VALUE,
    on=GIVEN,
    same_if="the scale is 1",
    over=(
        way("given scale multiplies the value", lambda scale: 1.0 / scale, seen="vllm PR 36297"),
        way("given scale ignored", ones, seen="pytorch 190449, flashinfer 4979"),
    ),
    read=lambda change: entry("scale", change),
)

bounded = need(lambda call: "scale_ub" in call.inputs, "no bound is given")
fault(
    "upper bound of the fused quantiser ignored",
    VALUE,
    seen=MINE + "an optional argument not passed on",
    on=BOUNDED,
    needs=bounded,
    read=lambda inputs: {name: t for name, t in inputs.items() if name != "scale_ub"},
    same_if="no scale reaches it",
)
fault(
    "upper bound applied to amax instead of the scale",
    VALUE,
    seen="vllm PR 32996 beside PR 33255",
    on=BOUNDED & BOUNDS_SCALE,
    needs=bounded,
    recipe=lambda recipe: replace(recipe, bounds_scale=False),
    same_if="no amax reaches it",
)
fault(
    "upper bound applied to the scale instead of amax",
    VALUE,
    seen="vllm PR 33255 beside PR 32996",
    on=BOUNDED - BOUNDS_SCALE,
    needs=bounded,
    recipe=lambda recipe: replace(recipe, bounds_scale=True),
    same_if="no scale reaches it",
)
fault(
    "floor 1e-10 on the scale in place of 1/(448 * 512)",
    VALUE,
    seen="vllm PR 32996, its first body",
    on=BOUNDED,
    recipe=lambda recipe: replace(recipe, scale_floor=1e-10),
    same_if="no scale lies below 1/(448 * 512)",
)
IN_USE = FUSED & takes("masked_m")
several_experts = need(lambda call: call.inputs["masked_m"].numel() > 1, "there is one expert")
fault(
    "rows in use of the previous expert",
    INDEX,
    seen="flashinfer 3547",
    on=IN_USE,
    needs=several_experts,
    read=entry("masked_m", lambda rows: rows.roll(1)),
    same_if="all counts are equal",
)
fault(
    "last row in use of every expert left out",
    MOVEMENT,
    seen="DeepGEMM 34",
    on=IN_USE,
    read=entry("masked_m", lambda rows: (rows - 1).clamp(min=0)),
    needs=need(lambda call: int(call.inputs["masked_m"].max()) > 1, "no expert has two rows"),
)


@fault("rows of the next expert quantised", INDEX, seen="DeepGEMM PR 343", on=IN_USE, needs=several_experts)
def read_next_expert(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return inputs | {"x": inputs["x"].roll(-1, dims=0)}


@fault(
    "packed scales in the opposite order of bytes",
    INDEX,
    seen="sglang PR 25733, TransformerEngine PR 2589",
    on=WORDS,
    same_if="the scales of every word are equal",
)
def write_bytes_backwards(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return outputs | {"scale": _bytes_of(outputs["scale"], lambda byte: byte.flip(-1))}


@fault(
    "packed scales shifted by one mantissa bit",
    VALUE,
    seen="sglang PR 25733",
    on=WORDS,
)
def write_bytes_shifted(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return outputs | {"scale": _bytes_of(outputs["scale"], lambda byte: byte >> 1)}


fault(
    "packed scales row-major",
    INDEX,
    seen="flashinfer 2147",
    on=WORDS,
    needs=need(lambda call: min(call.contract.outputs(call)["scale"].shape or (1,)) > 1, "one row or word"),
    write=lambda outputs: outputs | {"scale": _lanes(outputs["scale"].reshape(outputs["scale"].shape[::-1]).t())},
    same_if="all words are equal",
)


def _bytes_of(words: Tensor, change: OfTensor) -> Tensor:
    """Words whose bytes are changed, in the same memory layout."""
    byte = words.clone(memory_format=torch.contiguous_format).view(torch.uint8).reshape(*words.shape, 4)
    return _lanes(change(byte).contiguous().view(torch.int32).squeeze(-1))


def _lanes(words: Tensor) -> Tensor:
    rows = words.shape[0]
    lanes = torch.zeros(words.shape[1], rows + -rows % 4, dtype=words.dtype, device=words.device)
    lanes[:, :rows] = words.t()
    return lanes[:, :rows].t()


# --- the value: an RMS norm ---------------------------------------------------------------------------------

NORMS = Faults(NORMED)
fault = NORMS.declare


def _normed(
    call: Call,
    value: Tensor,
    *,
    root: Callable[[Call, Tensor], Tensor] | None = None,
    weight: OfTensor = lambda w: w,
    centre: bool = False,
    later: bool = False,
) -> Tensor:
    """The norm with another root of the mean square, weight, centre or place of the residual, in the value's dtype."""
    x, w = decode(call.inputs["x"]), decode(call.inputs["weight"]) + float(str(call.resolved.get("weight_bias", 0.0)))
    beside = decode(call.inputs["residual"]) if "residual" in call.inputs else torch.zeros_like(x)
    z = x if later else x + beside
    if centre:
        z = z - z.mean(dim=1, keepdim=True)
    fmt = of_dtype(value.dtype)
    values = nearest(z * (_root(call, z) if root is None else root(call, z)), fmt) * weight(w)
    if isinstance(call.contract, NormContract):  # another is the norm alone
        values = nearest(call.contract.finished(values, values, values, call.inputs)[2], fmt)
    return rounded_to(nearest(values + beside, fmt) if later else values, value.dtype)


def _root(call: Call, z: Tensor) -> Tensor:
    return torch.rsqrt(z.square().mean(dim=1, keepdim=True) + call.resolved["epsilon"])


def _with_root(root: Callable[[Call, Tensor], Tensor]) -> Change:
    return lambda call, value: _normed(call, value, root=root)


def _of_mean(change: OfTensor) -> Change:
    """The reciprocal root of a changed mean square."""
    return _with_root(lambda call, z: (change(z) + call.resolved["epsilon"]).rsqrt())


def _padded(z: Tensor) -> Tensor:
    width = 1 << (z.shape[1] - 1).bit_length()
    return z.square().sum(dim=1, keepdim=True) / width


def _in_bf16(z: Tensor) -> Tensor:
    """Terms of 32 columns at a time, each partial sum rounded to bfloat16."""
    total = torch.zeros(z.shape[0], 1, dtype=torch.float64, device=z.device)
    for part in torch.split(z.square(), 32, dim=1):
        total = rounded_to(total + part.sum(dim=1, keepdim=True), torch.bfloat16).double()
    return total / z.shape[1]


several_rows = need(lambda call: call.inputs["x"].shape[0] > 1, "there is one row")
with_residual = need(lambda call: "residual" in call.inputs, "there is no residual")
padded = need(lambda call: call.inputs["x"].shape[1] & (call.inputs["x"].shape[1] - 1), "H is a power of two")
SAME_ROWS, LARGE = "all rows have one mean square", "the mean square is far above epsilon"

fault(
    "mean square over the padded width of a row",
    ARITHMETIC,
    seen="flashinfer 2907, padded intermediates",
    needs=padded,
    store=_of_mean(_padded),
)
fault(
    "mean square over the first half of a row",
    ARITHMETIC,
    seen=MINE + "a reduction that misses half of its warps",
    store=_of_mean(lambda z: z[:, : z.shape[1] // 2].square().mean(dim=1, keepdim=True)),
    same_if=SAME_ROWS,
)
fault(
    "sum of squares kept in bfloat16",
    ARITHMETIC,
    seen="vllm 15045, a bfloat16 sum",
    store=_of_mean(_in_bf16),
    same_if="all partial sums are bfloat16 values",
    admissible_if="the error stays below a code",
)
fault(
    "mean square of the row times the weight",
    ARITHMETIC,
    seen="vllm-project/tpu-inference PR 3040: scaled first, normalised last",
    store=lambda call, value: _normed(call, value, root=lambda call, z: _root(call, z * decode(call.inputs["weight"]))),
    same_if="every weight is 1",
)
fault(
    "epsilon below 1e-4 taken for 1e-4",
    VALUE,
    seen="nntrainer PR 4318: a floor that float16 holds",
    store=_with_root(lambda call, z: (z.square().mean(dim=1, keepdim=True) + 1e-4).rsqrt()),
    needs=need(lambda call: call.resolved["epsilon"] < 1e-4, "epsilon is 1e-4 or more"),
    same_if=LARGE,
    admissible_if=LARGE,
)
fault(
    "norm of the previous row",
    INDEX,
    seen="vllm PR 48997, shared memory of a norm",
    needs=several_rows,
    store=_with_root(lambda call, z: _root(call, z).roll(1, dims=0)),
    same_if=SAME_ROWS,
)
fault(
    "epsilon left out of the norm",
    ARITHMETIC,
    seen=MINE + "an argument not passed on",
    store=_with_root(lambda call, z: z.square().mean(dim=1, keepdim=True).clamp(min=1e-300).rsqrt()),
    same_if=LARGE,
)
fault(
    "epsilon 1e-5 whatever was asked for",
    ARITHMETIC,
    seen="flashinfer include/flashinfer/norm.cuh, a default of 1e-5",
    options=option(epsilon=1e-5),
    needs=need(lambda call: call.resolved["epsilon"] != 1e-5, "epsilon is 1e-5"),
    same_if=LARGE,
)
fault(
    "epsilon added to the root",
    ARITHMETIC,
    seen=MINE + "sqrt(mean) + epsilon for sqrt(mean + epsilon)",
    store=_with_root(lambda call, z: 1 / (z.square().mean(dim=1, keepdim=True).sqrt() + call.resolved["epsilon"])),
    same_if=LARGE,
)
fault(
    "mean subtracted before the norm",
    ARITHMETIC,
    seen=MINE + "LayerNorm for RMS norm",
    store=lambda call, value: _normed(call, value, centre=True),
    same_if="all means are 0",
)
fault(
    "{}",
    ARITHMETIC,
    over=(
        way("weight left out of the norm", ones, seen=MINE + "an argument not passed on", same_if="all weights are 1"),
        way(
            "weight of the next column",
            lambda w: w.roll(-1),
            family=INDEX,
            seen=MINE + "a vector load one off",
            same_if="all weights are equal",
        ),
    ),
    read=lambda change: entry("weight", change),
)
fault(
    "weight taken as 1 + w",
    VALUE,
    seen="flashinfer norm.cuh weight_bias, Gemma's norm",
    store=lambda call, value: _normed(call, value, weight=lambda w: 1 + w),
)


def _as_halves(weight: Tensor) -> Tensor:
    """The memory of float32 weights read as bfloat16."""
    return weight.contiguous().view(torch.bfloat16)[: len(weight)].float()


fault(
    "float32 weight read as bfloat16",
    VALUE,
    seen="vllm 48324",
    needs=need(lambda call: call.inputs["weight"].dtype == torch.float32, "the weight is no float32"),
    read=entry("weight", _as_halves),
)
fault(
    "residual not added",
    MOVEMENT,
    seen=MINE + "an argument not passed on",
    needs=with_residual,
    read=lambda inputs: inputs | {"residual": torch.zeros_like(inputs["residual"])},
    same_if="the residual is 0",
)
fault(
    "residual added after the norm",
    ARITHMETIC,
    seen=MINE + "post-norm for pre-norm",
    needs=with_residual,
    store=lambda call, value: _normed(call, value, later=True),
    same_if="the residual is 0",
)
fault(
    "residual returned as it came",
    MOVEMENT,
    seen="vllm fused_add_rms_norm, which writes in place",
    needs=with_residual,
    write=lambda call, outputs: outputs | {"residual": call.inputs["residual"]},
    same_if="x is 0",
)
fault(
    "x returned for the residual",
    MOVEMENT,
    seen=MINE + "the wrong buffer",
    needs=with_residual,
    write=lambda call, outputs: outputs | {"residual": call.inputs["x"]},
    same_if="the residual is 0",
)


def _flushed_sum(call: Call) -> Tensor:
    """``x + residual`` by an addition that takes subnormal terms, and gives subnormal sums, as 0."""

    def flushed(x: Tensor) -> Tensor:
        return torch.where(x.abs() < 2.0**-126, x * 0.0, x)

    total = flushed(decode(call.inputs["x"])) + flushed(decode(call.inputs["residual"]))
    return rounded_to(flushed(nearest(total, FP32)), call.inputs["x"].dtype)


fault(
    "sum with a residual flushed below 2^-126",
    VALUE,
    on=NORMED & FAST_MATH & takes("residual"),
    seen="FlashInfer 0.6.18.post1 fused_add_rmsnorm_quant on an H200, built with fast math",
    write=lambda call, outputs: outputs | {"residual": _flushed_sum(call)},
    needs=need(lambda call: call.inputs["x"].dtype != torch.float16, "sums of float16 are no subnormal float32"),
    same_if="no sum lies below 2^-126",
)
fault(
    "norm of the float32 sum where the rounded one is promised",
    CAST,
    seen="vLLM's static beside its dynamic kernel",
    on=SUM_ROUNDED,
    needs=narrow,
    options=option(sum_in_dtype=False),
    same_if="all sums are values of the dtype",
)
fault(
    "norm of the rounded sum where the float32 one is promised",
    CAST,
    seen="vLLM's dynamic beside its static kernel",
    on=NORMED & takes("residual") - SUM_ROUNDED,
    needs=both(with_residual, narrow),
    options=option(sum_in_dtype=True),
    same_if="all sums are values of the dtype",
)
fault(
    "norm kept in float32 where its dtype is promised",
    CAST,
    seen="FlashInfer's norm beside vLLM's",
    on=STEPWISE,
    needs=narrow,
    options=option(rounding="none"),
    same_if="all products are values of the dtype",
)


def _rounding(call: Call) -> object:
    """Which roundings come after a norm."""
    return call.resolved.get("rounding", getattr(call.contract, "rounding", "each"))


stepwise = need(lambda call: _rounding(call) == "each", "the norm is not rounded by itself")
once = need(lambda call: _rounding(call) == "product", "the norm is rounded by itself")
fault(
    "norm not rounded before its product with the weight",
    CAST,
    seen="vLLM 0.20.2's static norms on an H200",
    on=STEPWISE,
    needs=both(stepwise, narrow),
    options=option(rounding="product"),
    same_if="all norms are values of the dtype",
)
fault(
    "norm rounded before its product with the weight",
    CAST,
    seen="vLLM PR 37838, later static norms",
    on=STEPWISE,
    needs=both(once, narrow),
    options=option(rounding="each"),
    same_if="all norms are values of the dtype",
)
fault(
    "norm times its weight rounded before it is quantised",
    CAST,
    seen=MINE + "the norm stored in the dtype of x between two kernels",
    on=NORMED - STEPWISE,
    needs=narrow,
    store=lambda call, value: rounded_to(rounded_to(value.double(), call.inputs["x"].dtype).double(), value.dtype),
    same_if="all products are values of the dtype",
)
fault(
    "norm rounded where float32 is promised",
    CAST,
    seen="vLLM's norm beside FlashInfer's",
    on=NORMED - STEPWISE,
    needs=narrow,
    options=option(rounding="each"),
    same_if="all products are values of the dtype",
)


fault(
    "bias of the weight left out",
    VALUE,
    on=takes("weight_bias"),  # of norms alone, those to FP4 too
    seen=MINE + "an argument not passed on",
    needs=need(lambda call: float(str(call.resolved["weight_bias"])) != 0.0, "it is 0"),
    options=option(weight_bias=0.0),
)
fault(
    "{}",
    VALUE,
    over=tuple(
        way(
            f"{name} left out",
            name,
            seen=MINE + "an argument not passed on",
            on=NORMED & takes(name),
            needs=given(name),
            same_if="it is 1",
        )
        for name in ("in_scale", "out_scale")
    ),
    read=lambda name: lambda inputs: {key: x for key, x in inputs.items() if key != name},
)
fault(
    "out_scale divides",
    VALUE,
    on=NORMED & takes("out_scale"),
    seen="xpu-kernels PR 475",
    needs=given("out_scale"),
    read=entry("out_scale", lambda scale: 1 / scale),
    same_if="it is 1",
)
fault(
    "norm returned is the sum",
    MOVEMENT,
    on=NORMED & returns("norm"),
    seen=MINE + "the wrong buffer",
    write=lambda outputs: outputs | {"norm": outputs["residual"]},
    same_if="the norm of a row is the row",
)
fault(
    "root of the rounded sum where that of the float32 one is promised",
    CAST,
    on=NORMED & Trait("takes the root of another sum", lambda contract: "rms_norm_add" in contract.name),
    seen=MINE + "both passes over what was stored",
    needs=narrow,
    store=lambda call, value: _normed(
        call, value, root=lambda call, z: _root(call, rounded_to(z, call.inputs["x"].dtype).double())
    ),
    same_if="all sums are values of the dtype",
    admissible_if="the mean square of rounded sums is close to that of the sums",
)


# --- the value: LayerNorm -----------------------------------------------------------------------------------

LAYER_NORM = Faults(of_class(LayernormQuant))
fault = LAYER_NORM.declare


def _layer_norm(
    call: Call, value: Tensor, *, centre: bool = True, width: int = 0, epsilon: float | None = None, beta: bool = True
) -> Tensor:
    x, gamma = decode(call.inputs["x"]), decode(call.inputs["gamma"])
    deviations = x - x.mean(dim=1, keepdim=True)
    centred = deviations if centre else x
    total = centred.square().sum(dim=1, keepdim=True) / (x.shape[1] + width)
    added = float(str(call.resolved["epsilon"])) if epsilon is None else epsilon
    values = centred * (total + added).clamp(min=1e-300).rsqrt() * gamma
    return rounded_to(values + decode(call.inputs["beta"]) if beta else values, value.dtype)


fault(
    "{}",
    ARITHMETIC,
    over=(
        way("mean not subtracted", {"centre": False}, seen=MINE + "RMS norm for LayerNorm", same_if="all means are 0"),
        way(
            "variance over H - 1",
            {"width": -1},
            seen=MINE + "torch.var without correction=0",
            needs=need(lambda call: call.inputs["x"].shape[1] > 1, "H is 1"),
            admissible_if="H is large",
        ),
        way(
            "epsilon left out of LayerNorm",
            {"epsilon": 0.0},
            seen=MINE + "an argument not passed on",
            same_if="the variance is far above epsilon",
            admissible_if="the variance is far above epsilon",
        ),
        way("beta left out", {"beta": False}, seen=MINE + "an optional argument", same_if="all beta are 0"),
    ),
    store=lambda change: lambda call, value: _layer_norm(call, value, **change),
)
fault(
    "{}",
    VALUE,
    over=tuple(
        way(f"{word} of {name}", (name, change), seen=MINE + text, same_if=f"all {name} are equal")
        for name in ("gamma", "beta")
        for word, change, text in (
            ("next column", lambda x: x.roll(-1), "a vector load one off"),
            ("bfloat16 image", lambda x: through_bf16(x).to(x.dtype), "parameters in the dtype of x"),
        )
    ),
    read=lambda change: entry(*change),
    admissible_if="it moves few codes",
)
fault(
    "NaN of the value clamped to the largest code",
    VALUE,
    seen="FlashInfer 0.6.18.post1 norm.cuh generalLayerNorm: a clamp of bfloat16 values drops NaN",
    write=lambda outputs: outputs | {"q": _no_nan(outputs["q"])},
    needs=need(lambda call: not bool(torch.isfinite(call.inputs["x"]).all()), "no row is NaN"),
)
fault(
    "epsilon 1e-5 whatever LayerNorm was asked for",
    ARITHMETIC,
    seen="FlashInfer norm.cuh, a default of 1e-5",
    options=option(epsilon=1e-5),
    needs=need(lambda call: call.resolved["epsilon"] != 1e-5, "epsilon is 1e-5"),
    same_if=LARGE,
)


def _no_nan(codes: Tensor) -> Tensor:
    raw = codes.view(torch.uint8)
    return torch.where(raw & 0x7F == 0x7F, 0x7E, raw).to(torch.uint8).view(codes.dtype)


# --- the value: a rotary embedding --------------------------------------------------------------------------

ROTARY = Faults(of_class(RopeQuantizeFp8))
fault = ROTARY.declare


def _cache(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Change:
    """A change of cosines and sines."""
    return entry("cos_sin_cache", lambda cache: torch.cat(change(*cache.chunk(2, dim=-1)), dim=-1))


fault(
    "rotary pairs of the other style",
    INDEX,
    seen=MINE + "is_neox read the other way round",
    options=lambda options: options | {"is_neox": not options["is_neox"]},
)
fault(
    "rotation backwards",
    ARITHMETIC,
    seen=MINE + "the sign of the sine",
    read=_cache(lambda cos, sin: (cos, -sin)),
    same_if="all positions are 0",
)
fault("cosines and sines exchanged", INDEX, seen=MINE + "halves of the cache", read=_cache(lambda cos, sin: (sin, cos)))
fault(
    "cosines and sines of the next frequency",
    INDEX,
    seen=MINE + "a vector load one off",
    read=_cache(lambda cos, sin: (cos.roll(-1, -1), sin.roll(-1, -1))),
)
fault(
    "cosines and sines rounded to bfloat16",
    CAST,
    seen="sglang PR 33117",
    read=_cache(lambda cos, sin: (through_bf16(cos).to(cos.dtype), through_bf16(sin).to(sin.dtype))),
    same_if="all are bfloat16 values",
    admissible_if="it moves few codes",
)
fault(
    "rotary position ignored",
    INDEX,
    seen=MINE + "position of the token in the batch",
    read=entry("pos_ids", lambda ids: torch.arange(ids.numel(), dtype=ids.dtype, device=ids.device)),
    same_if="positions are those of the batch",
)
fault(
    "rotary position one too large",
    INDEX,
    seen=MINE + "positions counted from 1",
    read=entry("pos_ids", lambda ids: (ids + 1).clamp(max=ids.numel() + 2)),
)
fault(
    "rotation left out",
    ARITHMETIC,
    seen=MINE + "an early return",
    read=_cache(lambda cos, sin: (torch.ones_like(cos), torch.zeros_like(sin))),
    same_if="all positions are 0",
)
fault(
    "factor of the query left out",
    VALUE,
    seen="sglang 18818, PR 20705",
    options=option(quant_scale_q=1.0),
    same_if="it is 1",
    needs=need(lambda call: call.resolved["quant_scale_q"] != 1.0, "it is 1"),
)
fault(
    "factor of the key left out",
    VALUE,
    seen="flashinfer 4979",
    options=option(quant_scale_kv=1.0),
    same_if="it is 1",
    needs=need(lambda call: call.resolved["quant_scale_kv"] != 1.0, "it is 1"),
)
fault(
    "factor of the key used for the query",
    VALUE,
    seen="vllm PR 37054",
    options=lambda options: options | {"quant_scale_q": options["quant_scale_kv"]},
    needs=need(lambda call: call.resolved["quant_scale_q"] != call.resolved["quant_scale_kv"], "they are equal"),
)
fault(
    "factor divides",
    VALUE,
    seen="xpu-kernels PR 475",
    options=lambda options: options | {"quant_scale_q": 1 / options["quant_scale_q"]},
    needs=need(lambda call: call.resolved["quant_scale_q"] != 1.0, "it is 1"),
)
fault(
    "rotated value rounded to bfloat16 before the cast",
    CAST,
    seen="TensorRT-LLM PR 14464",
    store=nearest_bf16,
    same_if="every value is a bfloat16 value",
)
fault(
    "other columns of the key taken from the query",
    INDEX,
    seen="vllm 42956",
    read=lambda inputs: (
        inputs | {"k_nope": inputs["q_nope"].reshape(-1)[: inputs["k_nope"].numel()].reshape(inputs["k_nope"].shape)}
    ),
)


fault(
    "inverse rotation: {}",
    ARITHMETIC,
    on=of_class(FusedInvRopeFp8Quant),
    over=(
        way(
            "by the forward angle", ("cos_sin_cache", lambda table: _with_sines(table, -1.0)), seen=MINE + "RoPE again"
        ),
        way("left out", ("cos_sin_cache", lambda table: _plain_table(table)), seen="vllm 50084"),
        way("angle of the next position", ("positions", lambda at: at.roll(-1)), seen="vllm 50084", family=INDEX),
        way(
            "sines before cosines",
            ("cos_sin_cache", lambda table: table.roll(table.shape[1] // 2, 1)),
            seen=MINE + "two halves exchanged",
            family=INDEX,
        ),
        way("columns of the next head", ("o", lambda x: x.roll(-1, 1)), seen="vllm 48895", family=INDEX),
    ),
    read=lambda change: entry(change[0], lambda x: change[1](x).contiguous()),
    same_if="it changes nothing",
    admissible_if="the codes of both lie within their intervals",
)


def _with_sines(table: Tensor, factor: float) -> Tensor:
    cosines, sines = table.chunk(2, dim=1)
    return torch.cat([cosines, sines * factor], dim=1)


def _plain_table(table: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(table[:, ::2]), torch.zeros_like(table[:, ::2])], dim=1)
