"""Contracts of the routines that bring a checkpoint's weights and scales to the form a kernel takes.

    convert_to_channelwise      exact bits: scales are only repeated
    requantize_with_max_scale   the scale is exact; a code is right when some admitted dequantisation (float16, after
                                one or two roundings) and some static recipe admit it
    normalize_e4m3fn_to_e4m3fnuz, all_close_1d, make_fp8_moe_alpha_scales_for_fi,
    register_scales_for_trtllm_fp8_per_tensor_moe, make_nvfp4_global_scale

``logical_widths`` comes as an integer tensor. Sources: vLLM quantization/utils/w8a8_utils.py and flashinfer_utils.py.
Not covered: in-place mutation of the given weight.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.quantiser import code_set
from oracle.errors import ShapeError
from oracle.numbers.formats import codes_of, decode
from oracle.numbers.quantize import WIDE, f32, prepare
from oracle.numbers.recipes import TORCH_STATIC, VLLM_STATIC
from oracle.routines.base import E4M3, F32, Call, Contract, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.layouts.contract import INTEGERS, LayoutContract
from oracle.routines.traits import Kind
from oracle.truth import shards
from oracle.verdict.compare import Admissible, Comparison, Status, Verdict, Worst, verdict
from oracle.verdict.sets import Elements, Found, Property, Sets, judge_bits, rounded_to, worst_of

SCALES = TensorSpec("weight_scale", Kind.SCALES, F32, ("S",), "one scale for each shard")
WIDTHS = TensorSpec("logical_widths", Kind.COUNTS, INTEGERS, ("S",), "rows of each shard")


@register
class ConvertToChannelwise(LayoutContract):
    name = "convert_to_channelwise"
    shapes = {"out": "[sum of logical_widths, 1]"}
    section = "Quantisation"
    summary = "each shard's scale repeated over its rows"
    source = "vLLM w8a8_utils.convert_to_channelwise"
    inputs = (SCALES, WIDTHS)

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {"out": shards.convert_to_channelwise(inputs["weight_scale"], inputs["logical_widths"].tolist())}


@register
class NormalizeFnuz(LayoutContract):
    name = "normalize_e4m3fn_to_e4m3fnuz"
    section = "Quantisation"
    summary = "the same bits read as E4M3FNUZ: -0 becomes 0, scales double"
    source = "vLLM w8a8_utils.normalize_e4m3fn_to_e4m3fnuz"
    inputs = (
        TensorSpec("weight", Kind.CODES, E4M3, None, "codes, any shape"),
        TensorSpec("weight_scale", Kind.SCALES, F32, None, "any shape"),
        TensorSpec("input_scale", Kind.SCALES, F32, None, "any shape", optional=True),
    )
    returns = ("weight", "weight_scale", "input_scale")
    function = staticmethod(shards.normalize_e4m3fn_to_e4m3fnuz)


@register
class RequantizeWithMaxScale(Contract):
    """Outputs ``max_scale`` (one value) and ``weight``, of the static recipes torch_static and vllm_static either."""

    name = "requantize_with_max_scale"
    section = "Quantisation"
    summary = "fused shards brought to the largest of their scales"
    source = "vLLM w8a8_utils.requantize_with_max_scale"
    inputs = (TensorSpec("weight", Kind.CODES, E4M3, ("N", "K"), "codes of all shards"), SCALES, WIDTHS)
    returns = ("max_scale", "weight")

    def reference(self, inputs: Inputs, **options: object) -> dict[str, Tensor]:
        self.check(inputs, options)
        widths = inputs["logical_widths"].tolist()
        outputs = shards.requantize_with_max_scale(inputs["weight"], inputs["weight_scale"], widths)
        return dict(zip(self.returns, outputs, strict=True))

    def outputs(self, call: Call) -> dict[str, Out]:
        return {"max_scale": Out(None, F32), "weight": Out(tuple(call.inputs["weight"].shape), E4M3)}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [Property(lambda outputs: self._judge(call, outputs))]

    def _judge(self, call: Call, outputs: Found) -> Verdict:
        expected, weight, largest = call.truth, call.inputs["weight"], outputs["max_scale"]
        if largest.numel() != 1:
            raise ShapeError(f"max_scale has shape {list(largest.shape)}; the shards have one scale in the end")
        scale = judge_bits(largest.reshape(()), expected["max_scale"], output="max_scale")
        if torch.equal(codes_of(expected["weight"]), codes_of(weight)) or scale.status is Status.FAILED:
            return worst_of([scale, judge_bits(outputs["weight"], expected["weight"], output="weight")])
        ok = self._admitted(call.inputs, outputs["weight"], expected["max_scale"])
        return worst_of([_judge_codes(outputs["weight"], expected["weight"], ok), scale])

    def _admitted(self, inputs: Inputs, codes: Tensor, largest: Tensor) -> Tensor:
        """Bool ``[N, K]``; rows past the last shard must be untouched."""
        weight, ok = inputs["weight"], codes_of(codes) == codes_of(inputs["weight"])
        start = 0
        for width, scale in zip(inputs["logical_widths"].tolist(), inputs["weight_scale"], strict=True):
            rows = slice(start, start + width)
            start += width
            if width:
                product = decode(weight[rows]) * decode(scale)
                readings = (rounded_to(f32(product), torch.float16), rounded_to(product, torch.float16))
                ok[rows] = torch.stack([self._codes(x, codes[rows], largest) for x in readings]).any(dim=0)
        return ok

    def _codes(self, wide: Tensor, codes: Tensor, largest: Tensor) -> Tensor:
        prepared = prepare(wide, scale=largest)
        sets = [code_set(prepared, recipe, decode(largest).reshape(1)) for recipe in (TORCH_STATIC, VLLM_STATIC)]
        return torch.stack([s.admits(codes_of(codes)) for s in sets]).any(dim=0)


@register
class AllClose1d(Contract):
    """Where an entry lies within four float32 ulps of the tolerance's edge either answer is admissible."""

    name = "all_close_1d"
    section = "Quantisation"
    summary = "whether every entry is close to the first"
    source = "vLLM w8a8_utils.all_close_1d; torch.allclose"
    inputs = (TensorSpec("x", Kind.SCALES, F32, ("S",), "scales of shards"),)

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        self.check(inputs, options)
        return torch.tensor(shards.all_close_1d(inputs["x"]), dtype=torch.bool, device=inputs["x"].device)

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [Property(lambda outputs: self._judge(call, outputs["out"]))]

    def _judge(self, call: Call, out: Tensor) -> Verdict:
        value = decode(call.inputs["x"])
        distance, allowed = (value - value[:1]).abs(), 1e-8 + 1e-5 * value.abs()
        spread = 2.0**-22 * (value.abs() + value[:1].abs())
        if bool(((distance - allowed).abs() <= spread * 1e-5 + 2.0**-22 * distance).any()):
            text = "an entry lies at the edge of the tolerance, where float32 decides"
            return Verdict(Status.PASSED, f"either answer is admissible: {text}", 0, 1, unconstrained=1)
        return judge_bits(out.to(torch.int32), call.truth["out"].to(torch.int32), output="out")


class ProductsOfScales(Contract):
    """Scales that are one float32 operation of others: the correctly rounded value, or its neighbours by one ulp.

    A quotient compiled to an approximate division may err by 2 ulp (PTX ISA, div.full), a product by none: outputs
    named in ``quotients`` get that much, the others must be exact.
    """

    quotients: tuple[str, ...] = ()

    def formula(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        """The values in float64, before the rounding to float32."""
        raise NotImplementedError

    def reference(self, inputs: Inputs, **options: object) -> Tensor | dict[str, Tensor]:
        values = self.formula(inputs, self.check(inputs, options))
        rounded = {name: rounded_to(value, torch.float32) for name, value in values.items()}
        return rounded if tuple(rounded) != ("out",) else rounded["out"]

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [Elements(lambda: (self._sets(call), "one float32 operation"))]

    def _sets(self, call: Call) -> dict[str, Admissible]:
        sets = {}
        for name, value in self.formula(call.inputs, call.resolved).items():
            width = 2.0**-22 * value.abs() if name in self.quotients else torch.zeros_like(value)
            low, high, due = (decode(rounded_to(x, torch.float32)) for x in (value - width, value + width, value))
            sets[name] = Admissible(low, high, due)
        return sets


@register
class AlphaScales(ProductsOfScales):
    name = "make_fp8_moe_alpha_scales_for_fi"
    section = "MoE"
    summary = "g1 = w13_scale * w13_input_scale, g2 = w2_scale * w2_input_scale"
    source = "vLLM flashinfer_utils.make_fp8_moe_alpha_scales_for_fi"
    inputs = (
        TensorSpec("w13_scale", Kind.SCALES, F32, ("E",), "weight scale of each expert"),
        TensorSpec("w13_input_scale", Kind.SCALES, F32, None, "one value"),
        TensorSpec("w2_scale", Kind.SCALES, F32, ("E",), "weight scale of each expert"),
        TensorSpec("w2_input_scale", Kind.SCALES, F32, None, "one value"),
    )
    returns: ClassVar[tuple[str, ...]] = ("g1_alphas", "g2_alphas")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        """The scale of an input is one value, in any shape."""
        for name in ("w13_input_scale", "w2_input_scale"):
            if inputs[name].numel() != 1:
                raise ShapeError(f"{name} has shape {list(inputs[name].shape)}; it is one value, such as [1]")

    def formula(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        x = {name: decode(tensor) for name, tensor in inputs.items()}
        return {
            "g1_alphas": x["w13_scale"] * x["w13_input_scale"].reshape(-1),
            "g2_alphas": x["w2_scale"] * x["w2_input_scale"].reshape(-1),
        }


@register
class RegisterScales(AlphaScales):
    """``output1_scales`` divides the *rounded* product ``g1``: two operations."""

    name = "register_scales_for_trtllm_fp8_per_tensor_moe"
    section = "MoE"
    summary = "output1_scales_gate = g1, output1_scales = g1 / w2_input_scale, output2_scales = g2"
    source = "vLLM flashinfer_utils.register_scales_for_trtllm_fp8_per_tensor_moe"
    returns = ("output1_scales_gate_scalar", "output1_scales_scalar", "output2_scales_scalar")
    quotients = ("output1_scales_scalar",)

    def formula(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        products = super().formula(inputs, options)
        g1, g2 = f32(products["g1_alphas"]), products["g2_alphas"]
        quotient = g1 / decode(inputs["w2_input_scale"]).reshape(-1)
        return dict(zip(self.returns, (products["g1_alphas"], quotient, g2), strict=True))


@register
class NvFp4GlobalScale(ProductsOfScales):
    """``448 * 6 / amax`` of all elements, the scale that is multiplied before the cast to NVFP4, or ``256 * 6`` where
    four over six leaves room; the largest finite float32 for zeros, NaN where an element is NaN, 0 for infinity."""

    name = "make_nvfp4_global_scale"
    section = "Quantisation"
    summary = "the global scale of NVFP4 from the largest magnitude"
    source = "FlashInfer flashinfer/quantization/nvfp4_quantization_utils.py make_nvfp4_global_scale (0.6.18.post1)"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, None, "what is to be quantised"),)
    options: ClassVar[tuple[OptionSpec, ...]] = (OptionSpec("e4m3_max", 448, (448, 256), "largest scale of a block"),)
    shapes: ClassVar[dict[str, str]] = {"out": "[1], float32"}
    quotients = ("out",)
    dispatched = False

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if not inputs["x"].numel():
            raise ShapeError("x is empty, so that it has no largest magnitude; pass one element or more")

    def formula(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        amax = decode(inputs["x"]).abs().max().reshape(1)
        most = torch.finfo(torch.float32).max
        return {"out": torch.where(amax == 0, most, int(str(options["e4m3_max"])) * 6.0 / amax)}


def _judge_codes(codes: Tensor, expected: Tensor, ok: Tensor) -> Verdict:
    bad = ~ok
    worst = None
    if bool(bad.any()):
        index = tuple(torch.nonzero(bad)[0].tolist())
        right = float(decode(expected)[index])
        worst = Worst(index, float(decode(codes)[index]), right, right, right, math.inf, "weight")
    exact = bool((codes_of(codes) == codes_of(expected)).all())
    comparison = Comparison(int(bad.sum()), bad.numel(), 0, math.inf if worst else 0.0, worst, bad)
    judged = verdict(comparison, basis="float16 dequantisation, then a static recipe with the largest scale")
    return replace(judged, matches=TORCH_STATIC.name) if exact else judged
