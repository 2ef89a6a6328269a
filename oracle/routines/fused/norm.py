"""Contracts of RMS norms with a quantiser, with and without a residual.

    z = x [+ residual]        r = 1 / sqrt(mean(z^2) + epsilon)
    value = T(T(z r) weight)   vLLM, T the dtype of x (rounding each)
            T((z r) weight)    vLLM 0.20.2's static kernels on an H200 (product)
            (z r) weight       FlashInfer, float32 (none)

vLLM's static kernels store a product of two numbers of T in a float32 variable, and what 0.20.2 computes has no
rounding in between: with ``rounding="product"`` every code that its kernels gave for 42 cases is admissible, with
``each`` 1.5 % of those of bfloat16 inputs are not. Later releases keep the variable in T ("to match rms_norm_kernel").

The sum with a residual is rounded to T before the norm (vLLM's static kernel) or stays float32 (its dynamic ones and
FlashInfer's): two contracts, as their codes differ. Either way ``residual`` is returned as T(x + residual); where it is
optional and not given, as x. The
interval of ``r`` is that of :mod:`oracle.bounds.norm`, float32 sums in any order; a kernel's sum of a row is one number
for all its columns, which is not used.

Sources: vLLM csrc/layernorm_quant_kernels.cu @2fb35bb, libtorch_stable/layernorm_quant_kernels.cu @0e1d935,
quantization/fused_kernels/layernorm_utils.cuh @1051220;
FlashInfer include/flashinfer/norm.cuh (0.6.18.post1), which multiplies by an approximate reciprocal of the scale. Not
covered: LayerNorm, Gemma's weight of 1 + w, E5M2.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.interval import Admissible
from oracle.bounds.norm import FLUSHED, U, reciprocal_norm
from oracle.errors import DtypeError, OptionError, ShapeError
from oracle.numbers import recipes
from oracle.numbers.formats import FP32, decode, of_dtype
from oracle.numbers.quantize import WIDE
from oracle.numbers.recipes import Recipe
from oracle.numbers.rounding import f32
from oracle.numbers.scaling import Block
from oracle.routines.base import Inputs, Options, OptionSpec, TensorSpec, positive, register
from oracle.routines.fused.contract import COLUMNS, SCALE, SCALE_UB, FusedContract, Value
from oracle.truth.moe import nearest

X = TensorSpec("x", WIDE, ("M", "H"), "activations")
WEIGHT = TensorSpec("weight", WIDE, ("H",), "of the dtype of x")
RESIDUAL = TensorSpec("residual", WIDE, ("M", "H"), "added to x first; of its dtype")
OPTIONAL = TensorSpec("residual", WIDE, ("M", "H"), "added to x first; of its dtype", optional=True)
EPSILON = OptionSpec("epsilon", 1e-6, None, "added to the mean square")
ROUNDING = OptionSpec("rounding", "each", ("each", "product"), "where (z r) weight is rounded to the dtype of x")


class _Norm(FusedContract):
    """``sum_in_dtype``: a sum with a residual is rounded before the norm; ``rounding``: which roundings come after."""

    sum_in_dtype: ClassVar[bool] = False
    rounding: ClassVar[str] = "each"

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name in ("weight", "residual"):
            if name in inputs and inputs[name].dtype != inputs["x"].dtype:
                raise DtypeError(f"{name} has dtype {inputs[name].dtype}, x {inputs['x'].dtype}; pass one dtype")
        epsilon = options["epsilon"]
        if not isinstance(epsilon, float) or not 0 < epsilon < 1:
            raise OptionError(f"epsilon={epsilon!r} is no float between 0 and 1")

    def summed(self, inputs: Inputs, *, rounded: bool) -> Tensor:
        """``x [+ residual]`` as the norm takes it, float64."""
        x = decode(inputs["x"])
        if "residual" not in inputs:
            return x
        total = f32(x + decode(inputs["residual"]))
        return nearest(total, of_dtype(inputs["x"].dtype)) if rounded else total

    def others(self, inputs: Inputs, options: Options) -> dict[str, Admissible]:
        if "residual" not in self.returns:
            return {}
        total = self.summed(inputs, rounded=True)
        return {"residual": Admissible(total, total, total)}

    def value(self, inputs: Inputs, options: Options) -> Value:
        rounded = bool(options.get("sum_in_dtype", self.sum_in_dtype))
        z, w = self.summed(inputs, rounded=rounded), decode(inputs["weight"])
        norm = reciprocal_norm(z, float(f32(torch.tensor(options["epsilon"], dtype=torch.float64, device=z.device))))
        rounding, dtype = options.get("rounding", self.rounding), inputs["x"].dtype
        held = torch.float32 if rounding == "none" else dtype
        last, first = of_dtype(held), of_dtype(dtype) if rounding == "each" else FP32
        flushed = 2 * FLUSHED if rounding == "none" else 0.0  # fast math takes a subnormal term, or the sum, as 0
        ends = [e * r for e in (z - flushed, z + flushed) for r in (norm.low, norm.high)]
        low, high = torch.stack(ends).amin(dim=0), torch.stack(ends).amax(dim=0)
        # one rounding to float32, or none where a kernel rounds the product to T at once
        low, high = (nearest(e * (1 + s * 2 * U), first) for e, s in ((low, -low.sign()), (high, high.sign())))
        ends = [low * w, high * w]
        low, high = torch.minimum(*ends), torch.maximum(*ends)
        expected = nearest(f32(nearest(f32(z * f32(norm.exact)), first) * w), last)
        low, high = (nearest(f32(end), last) for end in (low, high))
        low, high = torch.fmin(low, expected), torch.fmax(high, expected)
        unknown = norm.open.expand(z.shape)
        return Value(Admissible(low, high, expected, open=unknown), held)


class _Static(_Norm):
    returns: ClassVar[tuple[str, ...]] = ("q",)
    options: ClassVar[tuple[OptionSpec, ...]] = (EPSILON, ROUNDING)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_STATIC, recipes.VLLM_STATIC


@register
class RmsNormStaticFp8Quant(_Static):
    name = "rms_norm_static_fp8_quant"
    summary = "RMS norm of a row, rounded to its dtype, quantised with a given scale"
    source = "vLLM csrc/layernorm_quant_kernels.cu rms_norm_static_fp8_quant"
    inputs = (X, WEIGHT, SCALE)


@register
class FusedAddRmsNormStaticFp8Quant(_Static):
    name = "fused_add_rms_norm_static_fp8_quant"
    summary = "RMS norm of the rounded sum with a residual, quantised with a given scale; the sum is returned"
    source = "vLLM csrc/layernorm_quant_kernels.cu fused_add_rms_norm_static_fp8_quant"
    inputs = (X, RESIDUAL, WEIGHT, SCALE)
    returns = ("q", "residual")
    sum_in_dtype = True


@register
class RmsnormQuant(_Static):
    name = "rmsnorm_quant"
    summary = "RMS norm of a row in float32, quantised with a given scale"
    source = "FlashInfer flashinfer.norm.rmsnorm_quant"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (X, WEIGHT, SCALE)
    options = (EPSILON,)
    rounding = "none"

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_STATIC, recipes.FLASHINFER_STATIC, recipes.FLASHINFER_CVT


@register
class FusedAddRmsnormQuant(RmsnormQuant):
    name = "fused_add_rmsnorm_quant"
    summary = "RMS norm of the float32 sum with a residual, quantised with a given scale; the sum is returned"
    source = "FlashInfer flashinfer.norm.fused_add_rmsnorm_quant"
    inputs = (X, RESIDUAL, WEIGHT, SCALE)
    returns = ("q", "residual")


@register
class RmsNormDynamicPerTokenQuant(_Norm):
    """``scale_ub`` bounds amax: ``scale = max(min(amax, scale_ub)/448, 1/(448 * 512))``."""

    name = "rms_norm_dynamic_per_token_quant"
    summary = "RMS norm of a row [+ residual, in float32], rounded twice, one scale a row"
    source = "vLLM csrc/quantization/fused_kernels/fused_layernorm_dynamic_per_token_quant.cu"
    inputs = (X, WEIGHT, OPTIONAL, SCALE_UB)
    returns = ("q", "scale", "residual")
    options = (EPSILON,)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_TOKEN, recipes.VLLM_TOKEN


@register
class RmsNormPerBlockQuant(_Norm):
    """As per token, with an amax for each group of a row."""

    name = "rms_norm_per_block_quant"
    summary = "RMS norm of a row [+ residual, in float32], rounded twice, one scale for each group of a row"
    source = "vLLM csrc/quantization/fused_kernels/fused_layernorm_dynamic_per_token_quant.cu"
    inputs = (X, WEIGHT, OPTIONAL, SCALE_UB)
    returns = ("q", "scale", "residual")
    options = (
        EPSILON, OptionSpec("group_size", 128, None, "elements that share a scale; H is a multiple of it"), COLUMNS,
    )  # fmt: skip

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (width := inputs["x"].shape[1]) % (group := positive(options, "group_size")):
            raise ShapeError(f"H={width} is not a multiple of the group of {group}; choose another group_size")

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        block = Block(1, positive(options, "group_size"))
        return tuple(r.with_block(block) for r in (recipes.TORCH_BLOCK, recipes.VLLM_BLOCK))
