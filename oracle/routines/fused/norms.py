"""Contracts of FlashInfer's other norms in FP8: after an all-reduce, of Triton, before silu, and LayerNorm.

    allreduce_fusion            z = T(x + residual), T((z r) (weight + weight_bias)), quantised with a given scale
    allreduce_fusion_dynamic    the same, one scale a row
    rms_norm_scaled             (z r) weight times out_scale, of z = x in_scale; Triton
    rms_norm_add_residual_scaled    the root is of the float32 sum with the residual, the norm of the rounded one
    fused_rmsnorm_silu          silu((z r) weight), cast as it is
    layernorm_quant             T((x - mean) r gamma + beta), quantised with a given scale

``r = 1 / sqrt(mean(z^2) + epsilon)``; T is the dtype of ``x``. An all-reduce is that of one rank: ``x`` is what the
ranks' sum is, rounded to T.

Sources: FlashInfer 0.6.18.post1 include/flashinfer/comm/trtllm_allreduce_fusion.cuh,
triton/kernels/norm.py, norm/ln_fwd_silu_kernel.cuh, norm.cuh generalLayerNorm. Not covered: groups of packed scales
after an all-reduce, E5M2, silu to NVFP4 or bfloat16.

NaN of the value is quantised as the recipe has it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.activation import curve_span
from oracle.bounds.interval import Admissible
from oracle.bounds.norm import FLUSHED, U, layer_norm
from oracle.errors import InputError, OptionError
from oracle.numbers import recipes
from oracle.numbers.formats import BF16, decode
from oracle.numbers.recipes import Recipe
from oracle.numbers.rounding import f32
from oracle.routines.base import F32, Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.fused.contract import SCALE, FusedContract, Value
from oracle.routines.fused.kernels import EPSILON, RESIDUAL, WEIGHT, NormContract, RmsnormQuant, X
from oracle.routines.traits import Kind
from oracle.truth.activation import SWIGLU, curved
from oracle.truth.moe import nearest
from oracle.truth.routing import Span

NARROW = (torch.bfloat16,)
BIAS = OptionSpec("weight_bias", 0.0, None, "added to every weight: 1 for Gemma's norm")


class _Reduced(NormContract):
    """``norm`` is what is quantised, in the dtype of ``x``; ``residual`` the rounded sum. A kernel adds ``weight_bias``
    in float32."""

    rounding = "product"
    sum_in_dtype = True
    dispatched = False
    options = (EPSILON, BIAS)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        bias = options["weight_bias"]
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= 2.0**10:
            raise OptionError(f"weight_bias={bias!r} is no number within 1024 of 0")

    def steps(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, float]:
        z, w, epsilon = super().steps(inputs, options)
        bias = f32(torch.tensor(float(str(options["weight_bias"])), dtype=torch.float64, device=w.device))
        return z, f32(w + bias), epsilon

    def others(self, inputs: Inputs, options: Options) -> dict[str, Admissible]:
        return super().others(inputs, options) | {"norm": self.value(inputs, options).sets}


@register
class AllreduceFusion(_Reduced):
    name = "allreduce_fusion"
    summary = "after an all-reduce: the rounded sum with a residual, its RMS norm, and that quantised"
    source = "FlashInfer allreduce_fusion, kARResidualRMSNormOutFP8Quant"
    inputs = (X, RESIDUAL, WEIGHT, SCALE)
    returns = ("q", "residual", "norm")

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_STATIC, recipes.FLASHINFER_CVT


@register
class AllreduceFusionDynamic(_Reduced):
    """``scale = max(amax/448, 1/(448 * 512))``."""

    shapes: ClassVar[dict[str, str]] = {"scale": "[M, 1]"}
    name = "allreduce_fusion_dynamic"
    summary = "after an all-reduce: the rounded sum with a residual, its RMS norm, quantised with a scale of each row"
    source = "FlashInfer allreduce_fusion, kARResidualRMSNormOutDynamicFP8Quant"
    inputs = (X, RESIDUAL, WEIGHT)
    returns = ("q", "scale", "residual", "norm")

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_TOKEN, recipes.FLASHINFER_TOKEN


# --- Triton -------------------------------------------------------------------------------------------------


def _factor(name: str, doc: str) -> TensorSpec:
    return TensorSpec(name, Kind.ALPHA, F32, ("1",), f"{doc}; positive", optional=True)


@register
class RmsNormScaled(RmsnormQuant):
    """``out_scale`` multiplies the norm before the cast: it is the inverse of the scale that dequantises."""

    name = "rms_norm_scaled"
    summary = "RMS norm of a row times a factor, in float32, times another, in E4M3"
    source = "FlashInfer flashinfer.triton.norm.rms_norm"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        X,
        WEIGHT,
        _factor("in_scale", "multiplies x"),
        _factor("out_scale", "multiplies the norm"),
    )
    dispatched = False

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name in {"in_scale", "out_scale"} & {*inputs}:
            if not bool(((inputs[name] > 2.0**-100) & (inputs[name] < 2.0**100)).all()):
                raise InputError(f"{name} is {inputs[name].tolist()}; pass a positive factor within 2^-100 and 2^100")

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_STATIC, recipes.VLLM_STATIC

    def given(self, inputs: Inputs) -> dict[str, Tensor]:
        return {"scale": torch.ones(1, dtype=torch.float32, device=inputs["x"].device)}

    def steps(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, float]:
        z, w, epsilon = super().steps(inputs, options)
        return (f32(z * decode(inputs["in_scale"])) if "in_scale" in inputs else z), w, epsilon

    def finished(self, low: Tensor, high: Tensor, due: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        if "out_scale" not in inputs:
            return low, high, due
        factor = decode(inputs["out_scale"])
        return f32(f32(low) * factor), f32(f32(high) * factor), f32(f32(due) * factor)


@register
class RmsNormAddResidualScaled(RmsNormScaled):
    """The kernel reads the sum back from where it stored it: the root is of the float32 sum, what it multiplies is the
    rounded one."""

    name = "rms_norm_add_residual_scaled"
    summary = "RMS norm of the rounded sum with a residual by the root of the float32 sum, times a factor, in E4M3"
    source = "FlashInfer flashinfer.triton.norm.rms_norm_add_residual"
    inputs = (X, RESIDUAL, WEIGHT, _factor("out_scale", "multiplies the norm"))
    returns = ("q", "residual")
    sum_in_dtype = True

    def squared(self, inputs: Inputs, z: Tensor) -> Tensor:
        return self.summed(inputs, rounded=False)


# --- silu, LayerNorm ----------------------------------------------------------------------------------------


@register
class FusedRmsnormSilu(RmsNormScaled):
    """``silu(v) = v / (1 + exp(-v))`` in float32; nothing scales it."""

    name = "fused_rmsnorm_silu"
    summary = "silu of the RMS norm of a row times its weight, in float32, cast to E4M3"
    source = "FlashInfer flashinfer.norm.fused_rmsnorm_silu with an output of float8_e4m3fn"
    inputs = (
        TensorSpec("x", Kind.VALUES, NARROW, ("M", "H"), "activations"),
        TensorSpec("weight", Kind.WEIGHTS, NARROW, ("H",), "of the norm"),
    )

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_STATIC, recipes.FLASHINFER_CVT

    def finished(self, low: Tensor, high: Tensor, due: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        special = ~(torch.isfinite(low) & torch.isfinite(high) & torch.isfinite(due))
        span = curve_span(Span(low.masked_fill(special, 0.0), high.masked_fill(special, 0.0)), SWIGLU)
        due = curved(due, SWIGLU)
        return torch.where(special, due, span.low), torch.where(special, due, span.high), due


@register
class LayernormQuant(FusedContract):
    """``value = T((x - mean) r gamma + beta)``, ``r = 1 / sqrt(mean((x - mean)^2) + epsilon)``: two passes over a row
    in float32, sums in any order, then one rounding to T, bfloat16. A NaN or an infinity makes its row NaN."""

    name = "layernorm_quant"
    summary = "LayerNorm of a row, rounded to its dtype, quantised with a given scale"
    source = "FlashInfer flashinfer.norm.layernorm_quant"
    inputs = (
        TensorSpec("x", Kind.VALUES, NARROW, ("M", "H"), "activations"),
        TensorSpec("gamma", Kind.WEIGHTS, F32, ("H",), "multiplies"),
        TensorSpec("beta", Kind.BIAS, F32, ("H",), "is added"),
        SCALE,
    )
    options = (EPSILON,)
    returns = ("q",)
    dispatched = False

    def refuse(self, inputs: Inputs, options: Options) -> None:
        epsilon = options["epsilon"]
        if not isinstance(epsilon, float) or not 0 < epsilon < 1:
            raise OptionError(f"epsilon={epsilon!r} is no float between 0 and 1")

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_STATIC, recipes.FLASHINFER_CVT

    def value(self, inputs: Inputs, options: Options) -> Value:
        x, gamma, beta = (decode(inputs[name]) for name in ("x", "gamma", "beta"))
        epsilon = f32(torch.tensor(options["epsilon"], dtype=torch.float64, device=x.device))
        centred, error, norm = layer_norm(x, float(epsilon))
        ends = [(centred + s * error) * r * gamma for s in (-1, 1) for r in (norm.low, norm.high)]
        low, high = torch.stack(ends).amin(dim=0), torch.stack(ends).amax(dim=0)
        # two roundings of the product; the sum is rounded once, fused or not
        low, high = (e + s * (4 * U * e.abs() + FLUSHED) + beta for e, s in ((low, -1), (high, 1)))
        due = f32(f32(f32(f32(centred) * f32(norm.exact)) * gamma) + beta)
        low, high, due = (nearest(f32(end), BF16) for end in (low, high, due))
        low, high = torch.fmin(low, due), torch.fmax(high, due)
        return Value(Admissible(low, high, due, open=norm.open.expand(x.shape)), inputs["x"].dtype)
