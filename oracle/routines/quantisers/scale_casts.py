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

import torch
from torch import Tensor

from oracle.errors import InputError, NumericsError, ShapeError
from oracle.numbers.formats import FP16, decode
from oracle.numbers.quantize import per_tensor_dequantize
from oracle.numbers.rounding import Overflow, Rounding, round_to
from oracle.numbers.ue8m0 import ceil_power, ceil_to_ue8m0
from oracle.routines.base import Contract, Output, TensorSpec, check_output, register
from oracle.verdict.compare import Admissible, Verdict, compare, verdict


@register
class PerTensorDequantize(Contract):
    """Products that round above 65504 are infinite and those up to 2^-25 are zero: part of the contract."""

    name = "per_tensor_dequantize"
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

    def judge(
        self, inputs: Mapping[str, Tensor], output: Output, *, arch: str, numerics: str | None, **options: object
    ) -> Verdict:
        expected = decode(self.reference(inputs, **options))
        out = _only(self.name, output, numerics)
        q = inputs["q"]
        check_output(out, name="out", shape=tuple(q.shape), dtypes=(torch.float16,), device=q.device)
        product = decode(q) * decode(inputs["inv_scale"]).reshape(())
        once = round_to(product, FP16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
        low, high = torch.minimum(once, expected), torch.maximum(once, expected)
        return verdict(compare(out, Admissible(low, high, expected)), basis="float16 of the exact or float32 product")


@register
class CeilToUe8m0(Contract):
    """Where implementations differ at the ends of the range, both are admissible.

    Up to 2^-127: 2^-127 (a float32 subnormal) and 2^-126 (DeepGEMM's smallest). Above 2^127 and for infinity: 2^127
    and infinity. For NaN: anything.
    """

    name = "ceil_to_ue8m0"
    summary = "the smallest power of two that is not below |x|"
    source = "DeepGEMM deep_gemm/utils/math.py ceil_to_ue8m0"
    inputs = (TensorSpec("x", (torch.float32,), None, "any shape"),)

    def reference(self, inputs: Mapping[str, Tensor], **options: object) -> Tensor:
        self.check(inputs, options)
        return ceil_to_ue8m0(inputs["x"])

    def judge(
        self, inputs: Mapping[str, Tensor], output: Output, *, arch: str, numerics: str | None, **options: object
    ) -> Verdict:
        expected = decode(self.reference(inputs, **options))
        out = _only(self.name, output, numerics)
        x = inputs["x"]
        check_output(out, name="out", shape=tuple(x.shape), dtypes=(torch.float32,), device=x.device)
        magnitude = decode(x).abs()
        low = ceil_power(magnitude, byte_low=0, inf_byte=254, nan_byte=254)
        high = torch.where(magnitude > 2.0**127, torch.full_like(expected, torch.inf), expected)
        # Both ends of the set are powers of two; what lies between them is none and must fail.
        value = decode(out)
        admitted = (value == low) | (value == high)
        due = torch.where(admitted, value, expected)
        sets = Admissible(due, due, due, open=torch.isnan(magnitude))
        return verdict(compare(out, sets), basis="smallest power of two not below |x|")


def _only(contract: str, output: Output, numerics: str | None) -> Tensor:
    if numerics is not None:
        raise NumericsError(f"{contract} has one numerics; pass none, not {numerics!r}")
    if isinstance(output, Tensor):
        return output
    if set(output) != {"out"}:
        raise InputError(f"{contract} returns one tensor; the output holds {', '.join(sorted(output)) or 'nothing'}")
    return output["out"]
