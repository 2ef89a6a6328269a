"""Contract of FlashInfer's block-scaled GEMM for Hopper, its internal quantisers included.

Three pairs of dtypes: FP8 times FP8 (both scales given), bfloat16 times FP8, bfloat16 times bfloat16. A bfloat16
operand is quantised inside the kernel with approximate divisions, so its codes and scales are known up to a set
(:mod:`oracle.bounds.quantiser`). The order of judgement is the suite's: first the bits that the nominal recipe and
the schedule give; then, as a theorem, the interval that every admissible quantisation allows:

    activations   boxes of codes and scales, group by group (:mod:`oracle.bounds.code_boxes`)
    weights       an interval of codes around the nominal scale, whose width joins that of the activations' scales

``reference`` is the exact product of the nominally quantised operands. Where the bits are those of the quantisers as
shipped (:mod:`oracle.numbers.fast_math`; a weight's faulty amax scan included) the verdict says so: as ``matches`` of
a pass, as the explanation of a failure. A failure inside the interval of the faulty scan is explained by that. NaN and
infinity in a bfloat16 operand are not covered.

Routines around it with a bfloat16 input are judged by the same sets:

    flashinfer_fp8_blockscale_gemm               FlashInfer quantises inside
    dynamic_flashinfer_deepgemm_blockscale_gemm  that below 32 rows; else a group quantiser and DeepGEMM
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel  the layer object around the latter

The set of admissible codes and scales allows every factor ``1 + d``, ``|d| <= 2^-21``, and so holds those of the exact
group quantiser too (a group whose amax is below that quantiser's floor of 1e-10 excepted). Not covered: UE8M0 scales.

NaN codes and scales stay NaN, and make NaN of every sum that they enter; placing them reads no value.
Source: FlashInfer fp8_blockscale_gemm_sm90; TensorRT-LLM fp8_blockscale_gemm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds import of_schedule
from oracle.bounds.boxed import boxed_product
from oracle.bounds.code_boxes import code_boxes
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.bounds.quantiser import APPROXIMATE_WIDTH
from oracle.errors import DtypeError, InputError, NumericsError, ShapeError
from oracle.numbers import fast_math
from oracle.numbers.formats import BF16, E4M3FN, decode, same_bits
from oracle.numbers.quantize import prepare, quantize
from oracle.numbers.recipes import (
    FLASHINFER_1X128,
    FLASHINFER_1X128_FAST_MATH,
    FLASHINFER_128X128,
    FLASHINFER_128X128_AMAX_FAULT,
    Recipe,
)
from oracle.numbers.rounding import Overflow, Rounding, round_to
from oracle.numbers.scaling import grid
from oracle.routines.base import F32, FP8, Call, Inputs, Options, TensorSpec, register
from oracle.routines.products.contract import BLOCK_NUMERICS, BLOCKS, ProductContract, block_scaled, scale_input
from oracle.routines.traits import Kind
from oracle.tensorcore.schedules import get as get_schedule
from oracle.tensorcore.schedules import is_class
from oracle.truth.routing import Span
from oracle.verdict.compare import Admissible, Status, Verdict, compare, verdict
from oracle.verdict.products import Part, predict_parts, truth, why_mistrust
from oracle.verdict.sets import Found, Property, Sets, judge_alternatives, rounded_to, verdict_of_equality, with_float32

WIDE = torch.bfloat16
OPERAND = (*FP8, WIDE)


@dataclass(frozen=True)
class Weight:
    """A weight as the kernel multiplies it: nominal codes and scale, the bounds of the codes that may flip (None: the
    codes are known), and the relative width of the scale."""

    codes: Tensor
    scale: Tensor
    ends: tuple[Tensor, Tensor] | None
    width: float


@register
class Fp8BlockscaleGemmSm90(ProductContract):
    """FP8 times FP8 with both scales, bfloat16 input times FP8 weight with ``weight_scale``, or bfloat16 times
    bfloat16.

    A bfloat16 operand is quantised inside, the input in groups of 1x128 (flashinfer_1x128), the weight in blocks of
    128x128 (flashinfer_128x128), with approximate divisions: any code and scale that these admit may enter the product.
    K is then a multiple of 128, and NaN and infinity in a bfloat16 operand are refused.
    """

    name = "fp8_blockscale_gemm_sm90"
    probed: ClassVar[tuple[int | None, int] | None] = (128, 128)
    summary = "FlashInfer's block-scaled GEMM for Hopper: FP8 x FP8, or bfloat16 operands quantised inside"
    source = "flashinfer.gemm.fp8_blockscale_gemm_sm90; TensorRT-LLM fp8_blockscale_gemm"
    numerics = {"sm90": BLOCK_NUMERICS["sm90"], "cpu": BLOCK_NUMERICS["cpu"]}
    roles: ClassVar[Mapping[str, str]] = {
        "a": "input",
        "b": "weight",
        "a_scale": "input_scale",
        "b_scale": "weight_scale",
    }
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("input", Kind.VALUES, OPERAND, ("M", "K"), "activation codes, or bfloat16 values"),
        TensorSpec("weight", Kind.CODES, OPERAND, ("N", "K"), "weight codes, or bfloat16 values"),
        scale_input("input_scale", BLOCKS[0], "M", "K", doc="logical 1x128 scales of FP8 input", optional=True),
        TensorSpec(
            "weight_scale",
            Kind.SCALES,
            F32,
            ("N/128|N", "K/128"),
            "128x128 or 1x128 scales of FP8 weight",
            optional=True,
            contiguous=True,
        ),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        bound = self.extents(inputs)
        wide = {name: inputs[name].dtype == WIDE for name in ("input", "weight")}
        if wide["weight"] and not wide["input"]:
            raise DtypeError("FP8 input with bfloat16 weight is not a pair of this routine; quantise the weight")
        for name, is_wide in wide.items():
            if is_wide == (f"{name}_scale" in inputs):
                what = "is bfloat16 and takes no" if is_wide else f"is {inputs[name].dtype} and needs its"
                raise InputError(f"{name} {what} {name}_scale")
        group = FLASHINFER_1X128.block.columns or 1
        if any(wide.values()) and bound["K"] % group:
            raise ShapeError(f"K={bound['K']} is not a multiple of {group}, which the kernel's quantisers need")
        for name in (name for name, is_wide in wide.items() if is_wide):
            if not bool(torch.isfinite(decode(inputs[name])).all()):
                raise InputError(f"{name} holds NaN or infinity; how the kernel quantises them is not covered")

    def parts(self, inputs: Inputs) -> list[Part]:
        a, a_scale = _nominal(inputs, "input", FLASHINFER_1X128)
        b, b_scale = _nominal(inputs, "weight", FLASHINFER_128X128)
        return [Part(block_scaled(a, b, a_scale, b_scale))]

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        return inputs["input"].shape[0], inputs["weight"].shape[0]

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        if call.inputs["input"].dtype != WIDE:
            return super().admissible(call, numerics)
        return [QuantisedInside(call, self.arithmetics(call, numerics), numerics is not None)]


class WideInput(Fp8BlockscaleGemmSm90):
    """bfloat16 input ``[M, K]``, FP8 weight ``[N, K]`` with 128x128 scales."""

    roles = {}
    probed = None
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("input", Kind.VALUES, (torch.bfloat16,), ("M", "K"), "activations"),
        TensorSpec("weight", Kind.CODES, (torch.float8_e4m3fn,), ("N", "K"), "weight codes"),
        scale_input("weight_scale", BLOCKS[1], "N", "K", doc="128x128 scales"),
    )


@register
class FlashinferBlockscale(WideInput):
    name = "flashinfer_fp8_blockscale_gemm"
    summary = "FlashInfer's block-scaled GEMM with a bfloat16 input and an FP8 weight"
    source = "vLLM utils/flashinfer.flashinfer_fp8_blockscale_gemm"


@register
class DynamicBlockscale(WideInput):
    name = "dynamic_flashinfer_deepgemm_blockscale_gemm"
    summary = "FlashInfer below 32 rows, else quantised in groups and multiplied by DeepGEMM"
    source = "vLLM scaled_mm/flashinfer.py"


@register
class DynamicBlockscaleLayer(WideInput):
    name = "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
    summary = "a layer whose weight is processed after loading and multiplied by the switching routine"
    source = "vLLM scaled_mm/flashinfer.py"


@dataclass(frozen=True)
class QuantisedInside(Sets):
    """The right products of whatever codes and scales the kernel's own quantisers may give."""

    call: Call
    names: Sequence[str]
    declared: bool

    def judge(self, outputs: Found) -> Verdict:
        call, tensor = self.call, outputs["out"]
        mistrust = why_mistrust(call.parts, tensor)
        if self.names[0] == IEEE32:
            return self._judge_range(tensor, IEEE32, mistrust)
        for name in self.names:
            predicted = predict_parts(call.parts, call.rows, get_schedule(name), tensor.dtype)
            if bool(same_bits(predicted, tensor).all()):
                names = f"{FLASHINFER_1X128.name} and {name}"
                return verdict_of_equality(f"bits of {names}", names, tensor.numel(), mistrust)
        ranges = with_float32(
            lambda name, wider: Property(lambda _: self._judge_range(tensor, name, mistrust), wider=wider),
            self.names[0],
            declared=self.declared,
        )
        return self._as_shipped(judge_alternatives(ranges, outputs), tensor)

    def _as_shipped(self, judged: Verdict, tensor: Tensor) -> Verdict:
        """``judged``, with the name of the quantisers as shipped where their bits are the output's."""
        inputs = self.call.inputs
        (part,) = as_shipped(inputs)
        for name in self.names:
            schedule = get_schedule(name)
            if schedule.why_not(part.product, out_dtype=tensor.dtype) is not None:
                continue
            if bool(same_bits(predict_parts([part], tensor.shape[0], schedule, tensor.dtype), tensor).all()):
                wide = inputs["weight"].dtype == WIDE
                names = [FLASHINFER_1X128_FAST_MATH.name, *([FLASHINFER_128X128_AMAX_FAULT.name] if wide else []), name]
                bits = " and ".join(names)
                if judged.status is not Status.FAILED:
                    return replace(judged, matches=bits, summary=f"{judged.summary}; bits of {bits}")
                causes = [names[0]] if out_of_range(inputs["input"]) else []
                causes += [names[1]] if wide and rows_left_out(inputs["weight"]) else []
                summary = f"{judged.summary}; every bit is that of {bits}"
                return replace(judged, explained_by=tuple(causes), summary=summary)
        return judged

    def _judge_range(self, tensor: Tensor, numerics: str, mistrust: str | None) -> Verdict:
        judged = _verdict(self.call, tensor, numerics, FLASHINFER_128X128, mistrust)
        if judged.status is not Status.FAILED or self.call.inputs["weight"].dtype != WIDE:
            return judged
        fault = FLASHINFER_128X128_AMAX_FAULT
        if _verdict(self.call, tensor, numerics, fault, None).outside == 0:
            summary = f"{judged.summary}; explained by {fault.name}: every element is admissible under it"
            return replace(judged, explained_by=(fault.name,), summary=summary)
        return judged


def out_of_range(x: Tensor) -> bool:
    """Whether the shipped activation quantiser loses a finite group of ``x`` ``[M, K]``, bfloat16
    (:func:`fast_math.outside`)."""
    return bool(fast_math.outside(prepare(x).amax(FLASHINFER_1X128)).any())


def rows_left_out(weight: Tensor) -> bool:
    """Whether the shipped scan misses the largest magnitude of a block of ``weight`` ``[N, K]``, bfloat16."""
    x = prepare(weight)
    return bool((x.amax(FLASHINFER_128X128) != x.amax(FLASHINFER_128X128_AMAX_FAULT)).any())


def as_shipped(inputs: Inputs) -> list[Part]:
    """The product of what the shipped quantisers make of bfloat16 operands."""
    a, a_scale = _nominal(inputs, "input", FLASHINFER_1X128_FAST_MATH)
    b, b_scale = _nominal(inputs, "weight", FLASHINFER_128X128_AMAX_FAULT)
    return [Part(block_scaled(a, b, a_scale, b_scale))]


def _verdict(call: Call, tensor: Tensor, numerics: str, recipe: Recipe, mistrust: str | None) -> Verdict:
    """The interval test of an output with a bfloat16 input, weights quantised by ``recipe``."""
    asked = (call.inputs, tensor.shape[0], tensor.dtype, numerics, recipe)
    key = f"within {recipe.name} by {numerics} in {tensor.dtype}"
    admitted, basis = call.cached(key, lambda: _admitted(*asked))
    return verdict(compare(tensor, admitted), basis=f"{basis}; {recipe.name}", mistrust=mistrust)


def _admitted(inputs: Inputs, m: int, dtype: torch.dtype, numerics: str, recipe: Recipe) -> tuple[Admissible, str]:
    """What the interval admits of ``m`` rows in an output dtype, and its name."""
    if is_class(numerics) and numerics != IEEE32:
        raise NumericsError(f"no interval through the quantiser is derived for {numerics}; declare the schedule itself")
    acc = None if numerics == IEEE32 else of_schedule(get_schedule(numerics))
    weight = _weight(inputs, recipe)
    boxes, _ = code_boxes(Span(*[decode(inputs["input"])] * 2), FLASHINFER_1X128, BF16, None)
    less, more = 1 - weight.width, 1 + weight.width
    widened = [replace(box, scale_low=box.scale_low * less, scale_high=box.scale_high * more) for box in boxes]
    codes, scale = _nominal(inputs, "input", FLASHINFER_1X128)
    part = Part(block_scaled(codes, weight.codes, scale, weight.scale))
    block, rows = part.product.block, part.product.b_rows
    interval = boxed_product(widened, weight.codes, weight.scale, block=block, b_rows=rows, acc=acc, b_ends=weight.ends)
    expected = decode(truth([part], m, dtype))
    low, high = (decode(rounded_to(x, dtype)) for x in (interval.low, interval.high))
    return Admissible(low, high, expected, open=interval.open), interval.name


def _nominal(inputs: Inputs, name: str, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Codes and scale of an operand: given, or by its recipe."""
    x = inputs[name]
    if x.dtype != WIDE:
        return x, inputs[f"{name}_scale"]
    quantised = quantize(x, recipe)
    return quantised.codes, quantised.scale


def _weight(inputs: Inputs, recipe: Recipe) -> Weight:
    codes, scale = _nominal(inputs, "weight", recipe)
    if inputs["weight"].dtype != WIDE:
        return Weight(codes, scale, None, 0.0)
    v = decode(inputs["weight"]) / grid(codes.shape, recipe.block).spread(decode(scale))
    width = 3 * APPROXIMATE_WIDTH  # the published scale, the multiplier and the division: each within one width
    down, up = (v - width * v.abs(), v + width * v.abs())
    ends = [round_to(x, E4M3FN, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE) for x in (down, up)]
    return Weight(codes, scale, (ends[0], ends[1]), width)
