"""Contracts of int8: quantisers by three rules of rounding, zero points, and the product that takes them out again.

``scaled_int8_quant``            a given scale, or one for each row; with a zero point or without; ties to even
``per_token_quant_int8``         one scale for each row; ties away from zero
``per_token_group_quant_int8``   one scale for each group of a row; toward zero
``cutlass_scaled_mm_azp``        int8 times int8, the zero point of ``a`` taken out in int32, scales, bias

Codes are right where they lie between the codes of the float32 formulas in use (``x / s``, ``x * (1 / s)``,
``x * (127 / amax)``); scales and zero points are one float32 or int32 each. The product is exact in int32, then rounded
as it says.

NaN and infinities: those of each class.
Source: the source of each class; :mod:`oracle.truth.int8`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, OptionError, ShapeError
from oracle.numbers.formats import decode
from oracle.numbers.quantize import WIDE
from oracle.numbers.rounding import f32
from oracle.routines.base import F32, Call, Contract, Inputs, Options, OptionSpec, Out, TensorSpec, positive, register
from oracle.routines.fault import Fault, Stage, fold
from oracle.routines.traits import Kind
from oracle.truth.int8 import LOW, TOP, Rule, integers, quotients, saturated, scaled, wrapped
from oracle.verdict.compare import Admissible, Comparison, Verdict, Worst, verdict
from oracle.verdict.ranges import values_of
from oracle.verdict.sets import Elements, Found, Range, Sets, rounded_to, worst_of

INT8, INT32 = (torch.int8,), (torch.int32,)
FAR = 2.0**30
"""Beyond it a zero point is added to an int32 that may have saturated."""
X = TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "values to quantise")


@dataclass(frozen=True)
class Steps:
    """What a right quantiser does with each group; faults change a field.

    Attributes
    ----------
    rule : of rounding.
    top : the code of the largest value without a zero point.
    floor : below which amax does not fall.
    levels : codes between the least and the largest value with a zero point.
    """

    rule: Rule = Rule.EVEN
    top: float = TOP
    floor: float = 0.0
    levels: float = 255.0


@dataclass(frozen=True)
class Quantised:
    """Codes between ``low`` and ``high`` (``expected`` by the first formula), scales, zero points; float64. ``open``:
    elements of which nothing is claimed. ``other``: the scales by a second formula that kernels use. ``unscaled``:
    scales of which nothing is claimed, in their shape; None: those of the groups whose elements are all open."""

    low: Tensor
    high: Tensor
    expected: Tensor
    open: Tensor
    scale: Tensor | None = None
    azp: Tensor | None = None
    other: Tensor | None = None
    unscaled: Tensor | None = None


class Int8Quantiser(Contract):
    """Codes int8 of the shape of ``x``, scales float32 and zero points int32, one for each group. Everything is
    computed in float32, one operation after the other. No rows give no codes. Rows may have any strides."""

    section = "Quantisation"
    dispatched = False

    def steps(self, options: Options) -> Steps:
        """What a right kernel does."""
        raise NotImplementedError

    def computed(self, inputs: Inputs, options: Options, steps: Steps) -> Quantised:
        """Codes, scales and zero points of a checked call."""
        raise NotImplementedError

    def named(self, found: Quantised, inputs: Inputs) -> dict[str, Tensor]:
        """The outputs by name, of their dtypes; 0 where nothing is claimed."""
        outputs = {"q": found.expected.masked_fill(found.open, 0.0).to(torch.int8)}
        if found.scale is not None:
            outputs["scale"] = rounded_to(found.scale, torch.float32)
        if found.azp is not None:
            outputs["azp"] = torch.nan_to_num(found.azp, 0.0, 0.0, 0.0).to(torch.int32)
        return outputs

    def reference(self, inputs: Inputs, **options: object) -> dict[str, Tensor]:
        """The codes of the first formula, with scale and zero point where the call computes them."""
        resolved = self.check(inputs, options)
        return self.named(self.computed(inputs, resolved, self.steps(resolved)), inputs)

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        steps = fold(call, faults, Stage.RECIPE, self.steps(options))
        result = fold(call, faults, Stage.STORE, self.computed(inputs, options, steps))
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, self.named(result, inputs))
        return outputs

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [CodeSets(self.computed(call.inputs, call.resolved, self.steps(call.resolved)), self, call)]

    def symmetric(self, x: Tensor, amax: Tensor, steps: Steps) -> tuple[list[Tensor], Tensor]:
        """Quotients of ``x`` ``[..., G]`` and the scale, under ``amax`` ``[..., 1]``: float64 in and out, in
        the shapes of both; NaN stays NaN, and a group without an amax gives zeros."""
        a = amax.clamp(min=float(f32(torch.tensor(steps.floor, dtype=torch.float64, device="cpu"))))
        scale = f32(a / steps.top)
        inverse = torch.where(a > 0, f32(steps.top / a), 0.0)
        by = [torch.where(a > 0, one, 0.0) for one in quotients(x, scale, inverse)]
        return by, scale

    def between(self, codes: list[Tensor], first: int, unknown: Tensor) -> Quantised:
        """The codes between those of several formulas, of which one is expected; ``codes`` and bool ``unknown``
        ``[M, K]``."""
        stacked = torch.stack(codes)
        return Quantised(stacked.amin(dim=0), stacked.amax(dim=0), codes[first], unknown)


@dataclass(frozen=True)
class CodeSets(Sets):
    """Codes between two ends; scales and zero points by their bits."""

    found: Quantised
    contract: Int8Quantiser
    call: Call
    numerics = ""
    wider = False

    def judge(self, outputs: Found) -> Verdict:
        due = self.contract.named(self.found, self.call.inputs)
        ends = {"q": (self.found.low, self.found.high, self.found.open)}
        for name in ("scale", "azp"):
            if name in due:
                low, high = (values_of(x) for x in self._ends(name, due[name]))
                ends[name] = (low, high, ~self._known(due[name]))
        return worst_of([_within(outputs[name], *limits, output=name) for name, limits in ends.items()])

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        """The ends of every output; what is not claimed is free."""
        ends = {"q": Range(self._codes(self.found.low), self._codes(self.found.high), self.found.open.to(torch.uint8))}
        for name in ("scale", "azp"):
            if name in expected:
                limits = self._ends(name, expected[name])
                ends[name] = Range(*limits, (~self._known(expected[name])).to(torch.uint8))
        return ends

    def _ends(self, name: str, due: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest scale, or zero point, in use."""
        if name != "scale" or self.found.other is None:
            return due, due
        other = rounded_to(self.found.other, torch.float32)
        return torch.minimum(due, other), torch.maximum(due, other)

    def _codes(self, end: Tensor) -> Tensor:
        return end.masked_fill(self.found.open, 0.0).to(torch.int8)

    def _known(self, scale: Tensor) -> Tensor:
        """Scales and zero points of groups with an element of which something is claimed."""
        if self.found.unscaled is not None:
            return ~self.found.unscaled
        groups = self.found.open.reshape(*scale.shape, -1) if scale.shape[-1] > 1 else self.found.open
        return ~groups.all(dim=-1).reshape(scale.shape)


def _within(actual: Tensor, low: Tensor, high: Tensor, free: Tensor, *, output: str) -> Verdict:
    """The verdict on integers or scales that lie between two float64 ends where they are not free."""
    value = values_of(actual).cpu()
    bad = ~free & ~((low <= value) & (value <= high))
    worst, outside = None, int(bad.sum())
    if outside:
        at = tuple(torch.nonzero(bad)[0].tolist())
        least, most = float(low[at]), float(high[at])
        worst = Worst(at, float(value[at]), least, most, least, math.inf, output)
    margin = math.inf if outside else 0.0
    result = Comparison(outside, int((~free).sum()), int(free.sum()), margin, worst, bad)
    return verdict(result, basis="the float32 formulas in use")


@register
class ScaledInt8Quant(Int8Quantiser):
    """``scale`` given: one for all, and ``azp`` with it unless ``symmetric``. Else one for each row.

        symmetric       s = amax / 127,  q = sat(rne(x / s)), all 0 where amax is 0
        else, given     q = sat(rne(x / s) + azp)
        else            s = (max - min) / 255,  azp = rne(-128 - min / s),  q = sat(rne(x / s) + azp)

    ``x / s`` may be ``x * (1 / s)`` or ``x * (127 / amax)``. A NaN has the code 0 (symmetric) and is left out of amax;
    an infinite amax gives codes 0 and the scale infinity. With a zero point nothing is claimed of an element with
    ``|x / s|`` above 2^30, where an int32 may saturate before the zero point is added, nor of a row with NaN, infinity
    or one value alone, whose scale is 0. Zero points are between -2^20 and 2^20."""

    name = "scaled_int8_quant"
    summary = "int8 codes by ties to even; a given scale or one for each row, with a zero point or without"
    source = "vLLM csrc/quantization/w8a8/int8/scaled_quant.cu scaled_int8_quant"
    inputs = (
        X,
        TensorSpec("scale", Kind.SCALES, F32, ("1",), "static: it multiplies on dequantisation", optional=True),
        TensorSpec("azp", Kind.COUNTS, INT32, ("1",), "static: is added to every code", optional=True),
    )
    options = (OptionSpec("symmetric", True, (True, False), "without a zero point"),)
    returns = ("q", "scale", "azp")
    shapes = {"scale": "[M, 1]", "azp": "[M, 1]"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if "scale" in inputs and not 0 < float(inputs["scale"]) < float("inf"):
            raise InputError(f"scale is {float(inputs['scale'])}; a static scale is positive and finite")
        if ("azp" in inputs) != ("scale" in inputs and not options["symmetric"]):
            raise OptionError("azp goes with a given scale and symmetric=False; pass all of them, or none")
        if "azp" in inputs and abs(int(inputs["azp"])) > 1 << 20:
            raise InputError(f"azp is {int(inputs['azp'])}; pass one within 2^20 of 0")

    def steps(self, options: Options) -> Steps:
        return Steps()

    def outputs(self, call: Call) -> dict[str, Out]:
        m, k = call.inputs["x"].shape
        outs = {"q": Out((m, k), INT8)}
        if "scale" in call.inputs:
            return outs
        outs["scale"] = Out((m, 1), F32)
        return outs if call.resolved["symmetric"] else outs | {"azp": Out((m, 1), INT32)}

    def computed(self, inputs: Inputs, options: Options, steps: Steps) -> Quantised:
        x = decode(inputs["x"])
        nothing = torch.zeros_like(x, dtype=torch.bool)
        if "scale" in inputs:
            s = decode(inputs["scale"])
            by = quotients(x, s, f32(1.0 / s))
            if options["symmetric"]:
                return self.between([saturated(integers(q, steps.rule)) for q in by], 0, nothing)
            supplied, far = int(inputs["azp"]), ~(by[0].abs() < FAR)
            return self.between([saturated(integers(q, steps.rule) + supplied) for q in by], 1, far)
        known = x.masked_fill(torch.isnan(x), 0.0)
        if options["symmetric"]:
            by, scale = self.symmetric(x, known.abs().amax(dim=1, keepdim=True), steps)
            result = self.between([saturated(integers(q, steps.rule)) for q in by], 2, nothing)
            return Quantised(result.low, result.high, result.expected, nothing, scale)
        least, most = (pick(x, dim=1, keepdim=True) for pick in (torch.amin, torch.amax))
        scale = f32(f32(most - least) / steps.levels)
        unknown = (~(scale > 0) | ~torch.isfinite(scale) | ~torch.isfinite(x).all(dim=1, keepdim=True)).expand(x.shape)
        azp = integers(f32(LOW - f32(least / scale)), Rule.EVEN)
        codes = [saturated(integers(q, steps.rule) + azp) for q in quotients(x, scale, f32(1.0 / scale))]
        codes = [torch.nan_to_num(c, 0.0, 0.0, 0.0) for c in codes]
        result = self.between(codes, 0, unknown | ~(f32(x / scale).abs() < FAR))
        return Quantised(result.low, result.high, result.expected, result.open, scale, azp)


class FlooredQuantiser(Int8Quantiser):
    """``s = max(amax, floor) / 127`` and a quotient by one formula or another. Nothing is claimed of a group with NaN
    or infinity."""

    returns: ClassVar[tuple[str, ...]] = ("q", "scale")

    def grouped(self, inputs: Inputs, options: Options) -> Tensor:
        """The values of each group, float64 ``[M, groups, G]``."""
        raise NotImplementedError

    def outputs(self, call: Call) -> dict[str, Out]:
        groups = self.grouped(call.inputs, call.resolved).shape[:2]
        return {"q": Out(tuple(call.inputs["x"].shape), INT8), "scale": Out(tuple(groups), F32)}

    def computed(self, inputs: Inputs, options: Options, steps: Steps) -> Quantised:
        x = self.grouped(inputs, options)
        unknown = (~torch.isfinite(x)).any(dim=2, keepdim=True)
        known = x.masked_fill(unknown, 0.0)
        by, scale = self.symmetric(known, known.abs().amax(dim=2, keepdim=True), steps)
        result = self.between([integers(saturated(q), steps.rule) for q in by], 0, unknown.expand(x.shape))
        low, high, expected, open_ = (t.flatten(1) for t in (result.low, result.high, result.expected, result.open))
        return Quantised(low, high, expected, open_, scale.squeeze(2))


@register
class PerTokenQuantInt8(FlooredQuantiser):
    """One scale for each row: ``s = max(amax, 1e-10) / 127``, ``q = round(x / s)``, ties away from zero, or of
    ``x * (127 / amax)``, the quotient rounded once (in torch ``torch.div(127, amax)``: its ``127 / amax`` is
    ``127 * (1 / amax)``)."""

    name = "per_token_quant_int8"
    summary = "int8 codes by ties away from zero, one scale for each row"
    source = "vLLM int8_utils.py per_token_quant_int8; SGLang int8_kernel.py"
    inputs = (X,)
    shapes = {"scale": "[M, 1]"}

    def steps(self, options: Options) -> Steps:
        return Steps(rule=Rule.AWAY, floor=1e-10)

    def grouped(self, inputs: Inputs, options: Options) -> Tensor:
        """As of :meth:`FlooredQuantiser.grouped`, with one group: float64 ``[M, 1, K]``; NaN stays NaN."""
        return decode(inputs["x"])[:, None, :]


@register
class PerTokenGroupQuantInt8(FlooredQuantiser):
    """One scale for each group of ``group_size`` columns: ``s = max(amax, 1e-10) / 127``, ``q = trunc(min(max(x / s,
    -128), 127))``: a plain cast, toward zero."""

    name = "per_token_group_quant_int8"
    summary = "int8 codes by truncation, one scale for each group of a row"
    source = "vLLM per_token_group_quant_int8, CUDA and Triton"
    inputs = (X,)
    options = (OptionSpec("group_size", 128, None, "columns that share a scale; K is a multiple of it"),)
    shapes = {"scale": "[M, K / group_size]"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (k := inputs["x"].shape[1]) % (group := positive(options, "group_size")):
            raise ShapeError(f"K={k} is not a multiple of the group of {group}; pad K")

    def steps(self, options: Options) -> Steps:
        return Steps(rule=Rule.ZERO, floor=1e-10)

    def grouped(self, inputs: Inputs, options: Options) -> Tensor:
        """As of :meth:`FlooredQuantiser.grouped`, float64 ``[M, K / G, G]``; NaN stays NaN.

        Raises OptionError: the group is no positive number."""
        m = inputs["x"].shape[0]
        return decode(inputs["x"]).reshape(m, -1, positive(options, "group_size"))


@register
class CutlassScaledMmAzp(Contract):
    """``t = a @ b - azp[m] * azp_adj[n]`` in int32 (without ``azp``: ``t = a @ b - azp_adj[n]``, so that ``azp_adj``
    holds the zero point times the sums of columns), exact as long as it stays within int32, else wrapped; then ``y =
    fma(a_scale, f32(f32(t) * b_scale), bias)``, or the product and the sum rounded apart, rounded once to
    ``out_dtype``. ``f32(t)`` rounds above 2^24. Scales are numbers of any sign; NaN and infinity of them as IEEE
    arithmetic has them. ``b`` is taken ``[K, N]`` in any strides, ``bias`` in ``out_dtype``. Infinite beyond the range
    of the output."""

    name = "cutlass_scaled_mm_azp"
    section = "GEMM"
    dispatched = False
    summary = "int8 product whose zero point is taken out in int32, then scales and bias"
    source = "vLLM cutlass_scaled_mm_azp, csrc/cutlass_extensions/epilogue/scaled_mm_epilogues_c3x.hpp"
    inputs = (
        TensorSpec("a", Kind.CODES, INT8, ("M", "K"), "codes"),
        TensorSpec("b", Kind.CODES, INT8, ("K", "N"), "codes of the weight"),
        TensorSpec("scale_a", Kind.SCALES, F32, ("M|1", "1"), "one, or one for each row"),
        TensorSpec("scale_b", Kind.SCALES, F32, ("1", "N|1"), "one, or one for each column"),
        TensorSpec("azp_adj", Kind.COUNTS, INT32, ("N",), "sums of the columns of b, times a zero point of all"),
        TensorSpec("azp", Kind.COUNTS, INT32, ("M",), "zero point of each row", optional=True),
        TensorSpec("bias", Kind.BIAS, (torch.bfloat16, torch.float16), ("N",), "of the dtype of out", optional=True),
    )
    options = (OptionSpec("out_dtype", torch.bfloat16, (torch.bfloat16, torch.float16), "dtype of out"),)
    shapes: ClassVar[Mapping[str, str]] = {"out": "[M, N]"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if "bias" in inputs and inputs["bias"].dtype != options["out_dtype"]:
            raise OptionError(f"bias is {inputs['bias'].dtype}; it has the dtype of out, {options['out_dtype']}")

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        resolved = self.check(inputs, options)
        return rounded_to(self.ends(inputs)[0], resolved["out_dtype"])

    def ends(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The float32 result with a fused last operation, and without: float64 ``[M, N]``."""
        total = inputs["a"].to(torch.float64) @ inputs["b"].to(torch.float64)
        adjusted = inputs["azp_adj"].to(torch.float64)[None, :]
        if "azp" in inputs:
            adjusted = inputs["azp"].to(torch.float64)[:, None] * adjusted
        bias = None if "bias" not in inputs else decode(inputs["bias"])[None, :]
        return scaled(wrapped(total - adjusted), decode(inputs["scale_a"]), decode(inputs["scale_b"]), bias)

    def outputs(self, call: Call) -> dict[str, Out]:
        return {"out": Out((call.inputs["a"].shape[0], call.inputs["b"].shape[1]), (call.resolved["out_dtype"],))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        def make() -> tuple[dict[str, Admissible], str]:
            fused, apart = (decode(rounded_to(end, call.resolved["out_dtype"])) for end in self.ends(call.inputs))
            return {
                "out": Admissible(torch.minimum(fused, apart), torch.maximum(fused, apart), fused)
            }, "int32, then float32"

        return [Elements(make)]
