"""Contracts of the element-wise companions of the quantisers: dequantisation through float16, and rounding
to UE8M0.

    per_tensor_dequantize   out = float16(value(q) * inv_scale)
    ceil_to_ue8m0           out = smallest power of two >= |x| within the UE8M0 range

The product of :func:`per_tensor_dequantize` has 28 significant bits; a kernel may round it to float32 on
its way or not, and both results are admissible. Sources: vLLM quantization/utils/w8a8_utils.py; DeepGEMM
deep_gemm/utils/math.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.errors import ShapeError
from oracle.numbers.formats import FP16, decode
from oracle.numbers.quantize import per_tensor_dequantize
from oracle.numbers.rounding import Overflow, Rounding, round_to
from oracle.numbers.ue8m0 import ceil_power, ceil_to_ue8m0
from oracle.routines.base import Call, Contract, Out, TensorSpec, register
from oracle.verdict.compare import Admissible, Verdict, compare, verdict
from oracle.verdict.sets import Elements, Found, Range, Sets, ranged


@register
class PerTensorDequantize(Contract):
    """Products that round above 65504 are infinite and those up to 2^-25 are zero: part of the contract."""

    name = "per_tensor_dequantize"
    section = "Quantisation"
    summary = "float16(value(q) * inv_scale), one scale for the tensor"
    source = "vLLM w8a8_utils.per_tensor_dequantize"
    inputs = (
        TensorSpec("q", (torch.float8_e4m3fn,), None, "codes, any shape"),
        TensorSpec("inv_scale", (torch.float32,), None, "one value; it multiplies"),
    )

    def check(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, object]:
        resolved = super().check(inputs, options)
        if inputs["inv_scale"].numel() != 1:
            raise ShapeError(f"inv_scale has shape {list(inputs['inv_scale'].shape)}; it must hold one value")
        return resolved

    def reference(self, inputs: Mapping[str, Tensor], **options: object) -> Tensor:
        self.check(inputs, options)
        return per_tensor_dequantize(inputs["q"], inputs["inv_scale"])

    def outputs(self, call: Call) -> dict[str, Out]:
        return {"out": Out(tuple(call.inputs["q"].shape), (torch.float16,))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [Elements(lambda: ({"out": self._set(call)}, "float16 of the exact or float32 product"))]

    def _set(self, call: Call) -> Admissible:
        twice = decode(call.truth["out"])
        product = decode(call.inputs["q"]) * decode(call.inputs["inv_scale"]).reshape(())
        once = round_to(product, FP16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
        return Admissible(torch.minimum(once, twice), torch.maximum(once, twice), twice)


@register
class CeilToUe8m0(Contract):
    """Where implementations differ at the ends of the range, both are admissible.

    Up to 2^-127: 2^-127 (a float32 subnormal) and 2^-126 (DeepGEMM's smallest). Above 2^127 and for infinity: 2^127
    and infinity. For NaN: anything.
    """

    name = "ceil_to_ue8m0"
    section = "Quantisation"
    summary = "the smallest power of two that is not below |x|"
    source = "DeepGEMM deep_gemm/utils/math.py ceil_to_ue8m0"
    inputs = (TensorSpec("x", (torch.float32,), None, "any shape"),)

    def reference(self, inputs: Mapping[str, Tensor], **options: object) -> Tensor:
        self.check(inputs, options)
        return ceil_to_ue8m0(inputs["x"])

    def outputs(self, call: Call) -> dict[str, Out]:
        return {"out": Out(tuple(call.inputs["x"].shape), (torch.float32,))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        magnitude, due = decode(call.inputs["x"]).abs(), decode(call.truth["out"])
        low = ceil_power(magnitude, byte_low=0, inf_byte=254, nan_byte=254)
        high = torch.where(magnitude > 2.0**127, torch.inf, due)
        return [PowersOfTwo(Admissible(low, high, due, open=torch.isnan(magnitude)))]


@dataclass(frozen=True)
class PowersOfTwo(Sets):
    """Both ends of ``sets``, and nothing between them: that is no power of two."""

    sets: Admissible

    def judge(self, found: Found) -> Verdict:
        value = decode(found["out"])
        due = torch.where((value == self.sets.low) | (value == self.sets.high), value, self.sets.expected)
        admitted = Admissible(due, due, due, open=self.sets.open)
        return verdict(compare(found["out"], admitted), basis="smallest power of two not below |x|")

    def ranges(self, expected: Found) -> dict[str, Range]:
        return {"out": ranged(self.sets, torch.float32)}
