"""Contracts of what an engine fuses with a quantiser: silu-and-mul, RMS norms, groups of rows, rotary embeddings.

Each family's class states its formulas, sources and what is not covered.

NaN of the value is quantised as the recipe has it; a NaN that is moved stays.
Sources: those of each class below.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds import rotary
from oracle.bounds.interval import Admissible
from oracle.bounds.norm import FLUSHED, Norm, U, reciprocal_norm
from oracle.errors import DtypeError, LayoutError, OptionError, ShapeError
from oracle.numbers import cuda_math, mufu, recipes
from oracle.numbers.formats import FP32, Format, decode, of_dtype
from oracle.numbers.quantize import WIDE
from oracle.numbers.recipes import Recipe
from oracle.numbers.rounding import Overflow, Rounding, f32, to_dtype
from oracle.numbers.scaling import Block
from oracle.routines.base import (
    E4M3,
    F32,
    INTEGERS,
    Call,
    Inputs,
    Options,
    OptionSpec,
    Out,
    TensorSpec,
    positive,
    register,
)
from oracle.routines.fused.contract import COLUMNS, MASKED, SCALE, SCALE_UB, FusedContract, Value
from oracle.routines.moe.activations import interval_of
from oracle.routines.quantisers.contract import FAST_MATH
from oracle.routines.traits import Kind, Trait
from oracle.truth.activation import SWIGLU, Formula
from oracle.truth.moe import Activation, Steps, nearest
from oracle.verdict.sets import Found, rounded_to

NARROW = (torch.bfloat16, torch.float16)
ROUNDINGS = ("each", "product", "none")
GATED = "gate, then up"
BOUNDS_SCALE = Trait("its upper bound is of the scale, not of amax")
WORDS = Trait("packs the bytes of four scales in a word")


def rounding_option(default: str) -> OptionSpec:
    """Where ``silu(gate) * up`` is rounded to the dtype of ``x``."""
    return OptionSpec("rounding", default, ROUNDINGS, "where silu(gate) * up is rounded to the dtype of x")


def gated(x: Tensor, rounding: str, *, formula: Formula = SWIGLU, limit: float | None = None) -> Value:
    """``silu(gate) * up``, or another formula, of ``x`` ``[..., 2 I]`` (float32, bfloat16 or float16) with its
    roundings and the interval of a device's silu."""
    held = (
        x
        if rounding != "none"
        else to_dtype(x.double(), torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
    )
    each = Activation.EACH if rounding == "each" else Activation.PRODUCT
    steps = Steps(store=held.dtype, activation=each, formula=formula, limit=limit)
    return Value(interval_of(held, steps), held.dtype)


class GatedContract(FusedContract):
    """The value is ``silu(gate) * up`` of ``x [..., 2 I]``: ``gate = x[..., :I]``, ``up = x[..., I:]``, ``silu(x) = x /
    (1 + exp(-x))``. ``rounding`` says where it is rounded to the dtype of ``x`` before it is quantised: ``each`` (silu,
    then the product), ``product``, or ``none`` (float32 throughout). NaN in gate or up gives NaN, a gate of +inf an
    infinity of the sign of up, a gate of -inf NaN or 0 (nothing is claimed), an infinite up an infinity of the sign of
    silu where that cannot be flushed to 0; 0 times infinity is NaN.

    Sources: vLLM csrc/quantization/activation_kernels.cu @bcf9083 (two roundings) and @1a84e5b (none),
    fused_kernels/fused_silu_mul_block_quant.cu @0dd8492 and @09a2bf0; SGLang layers/moe/ep_moe/kernels.py
    ``silu_and_mul_masked_post_quant_fwd`` and sgl-kernel per_token_group_quant_8bit_v2.cu @037cd6e
    (``fuse_silu_and_mul``). Not covered: GELU, interleaved halves, int8, scales packed into words.
    """

    grouped: ClassVar[bool] = True

    def refuse(self, inputs: Inputs, options: Options) -> None:
        width = inputs["x"].shape[-1]
        if width % 2:
            raise ShapeError(f"x has {width} columns; they hold gate and up, [..., 2 I]")
        if self.grouped and (width // 2) % (group := self.group(options)):
            raise ShapeError(f"I={width // 2} is not a multiple of the group of {group}; pad I")

    def group(self, options: Options) -> int:
        """Elements that share a scale."""
        return positive(options, "group_size")

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        return *inputs["x"].shape[:-1], inputs["x"].shape[-1] // 2

    def value(self, inputs: Inputs, options: Options) -> Value:
        return gated(inputs["x"], str(options.get("rounding", "each")))

    def modelled(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        rounding, x = str(options.get("rounding", "each")), inputs["x"]
        gate, up = decode(x).chunk(2, dim=-1)
        held, values = torch.float32 if rounding == "none" else x.dtype, {}
        for name, silu in (("CUDA's expf", cuda_math.silu), ("Triton's exp", cuda_math.triton_silu)):
            s = decode(rounded_to(silu(gate), x.dtype)) if rounding == "each" else silu(gate)
            values[f"a SiLU by {name}"] = rounded_to(f32(s * up), held)
        return values


@register
class SiluAndMulQuant(GatedContract):
    name = "silu_and_mul_quant"
    summary = "silu(gate) * up, quantised with a given scale"
    source = "vLLM csrc/quantization/activation_kernels.cu silu_and_mul_quant"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, ("M", "C"), GATED), SCALE)
    options = (rounding_option("each"),)
    returns = ("q",)
    grouped = False

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_STATIC, recipes.VLLM_STATIC


@register
class SiluAndMulPerBlockQuant(GatedContract):
    """``scale_ub`` bounds the scale, not amax: ``scale = max(min(amax/448, scale_ub), 1/(448 * 512))``."""

    shapes = {"scale": "[M, I / group_size]"}

    traits = frozenset({BOUNDS_SCALE})

    name = "silu_and_mul_per_block_quant"
    summary = "silu(gate) * up in float32, quantised in groups of a row, scale max(min(amax/448, ub), 1/(448*512))"
    source = "vLLM csrc/quantization/fused_kernels/fused_silu_mul_block_quant.cu"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, ("M", "C"), GATED), SCALE_UB)
    options = (
        OptionSpec("group_size", 128, None, "elements that share a scale; I is a multiple of it"),
        COLUMNS,
        rounding_option("none"),
    )

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        block = Block(1, self.group(options))
        return tuple(r.with_block(block) for r in (recipes.TORCH_SILU_BLOCK, recipes.VLLM_SILU_BLOCK))


@register
class SiluAndMulMaskedPostQuant(GatedContract):
    """A power-of-two scale is float32, of ``max(amax, 1e-10)/448`` rounded up.

    With ``gemm1_alpha``, which goes with ``rounding="none"`` alone, the value is ``g / (1 + exp(-gemm1_alpha g)) * (u +
    1)`` of ``g = min(gate, gemm1_clamp_limit)`` and ``u = min(max(up, -gemm1_clamp_limit), gemm1_clamp_limit)`` in
    float32; of NaN nothing is claimed where there is a limit."""

    shapes = {"scale": "[E, T, I / group_size]"}

    name = "silu_and_mul_masked_post_quant"
    summary = "silu(gate) * up of the rows in use of every expert, quantised in groups, floor 1e-10"
    source = "SGLang layers/moe/ep_moe/kernels.py silu_and_mul_masked_post_quant_fwd"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, ("E", "T", "C"), GATED), MASKED)
    options = (
        OptionSpec("group_size", 128, None, "elements that share a scale; I is a multiple of it"),
        OptionSpec("use_ue8m0", False, (False, True), "round the scale up to a power of two"),
        rounding_option("each"),
        OptionSpec("gemm1_alpha", None, None, "factor of gate within its sigmoid; 1 is added to up"),
        OptionSpec("gemm1_clamp_limit", None, None, "clamp of gate (above) and up (both sides)"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name in ("gemm1_alpha", "gemm1_clamp_limit"):
            value = options[name]
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise OptionError(f"{name}={value!r}; pass a number, or None")
            if value is not None and not 2.0**-10 <= value <= 2.0**10:
                raise OptionError(f"{name}={value!r}; pass a number within 2^-10 and 2^10")
        if options["gemm1_clamp_limit"] is not None and options["gemm1_alpha"] is None:
            raise OptionError("gemm1_clamp_limit goes with gemm1_alpha; pass both")
        if options["gemm1_alpha"] is not None and options["rounding"] != "none":
            raise OptionError(f"gemm1_alpha goes with rounding='none', not {options['rounding']!r}")

    def value(self, inputs: Inputs, options: Options) -> Value:
        alpha, limit = options["gemm1_alpha"], options["gemm1_clamp_limit"]
        if alpha is None:
            return super().value(inputs, options)
        factor, above = f32(torch.tensor([alpha, limit or 1.0], dtype=torch.float64, device="cpu")).tolist()
        formula = Formula(alpha=factor, beta=1.0)
        return gated(inputs["x"], "none", formula=formula, limit=None if limit is None else above)

    def modelled(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {} if options["gemm1_alpha"] is not None else super().modelled(inputs, options)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        plain = (recipes.TORCH_GROUP, recipes.SGLANG_TRITON_COLUMN, recipes.SGLANG_GROUP)
        powers = (recipes.TORCH_GROUP_UE8M0, recipes.SGLANG_GROUP_UE8M0, recipes.SGLANG_GROUP_V2_UE8M0)
        block = Block(1, self.group(options))
        return tuple(r.with_block(block) for r in (powers if options["use_ue8m0"] else plain))


@register
class PersistentMaskedMSiluMulQuant(GatedContract):
    """amax, scale, its inverse and the quotient are bfloat16 operations; the stored scale is the float32 image of the
    bfloat16 one, 0.2 % low, so the largest element of a group often saturates. silu is rounded to bfloat16, then its
    product with up."""

    shapes = {"scale": "[E, T, ceil(I / 128)]"}

    name = "persistent_masked_m_silu_mul_quant"
    summary = "silu(gate) * up of the rows in use, every step of the quantiser in bfloat16, groups of 128"
    source = "vLLM csrc/quantization/activation_kernels.cu persistent_masked_m_silu_mul_quant"
    inputs = (TensorSpec("x", Kind.VALUES, (torch.bfloat16,), ("E", "T", "C"), GATED), MASKED)

    def group(self, options: Options) -> int:
        return recipes.VLLM_SILU_MASKED.block.columns or 0

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_SILU_MASKED, recipes.VLLM_SILU_MASKED


# --- RMS norms ----------------------------------------------------------------------------------------------


X = TensorSpec("x", Kind.VALUES, WIDE, ("M", "H"), "activations")
WEIGHT = TensorSpec("weight", Kind.WEIGHTS, WIDE, ("H",), "of the dtype of x")
RESIDUAL = TensorSpec("residual", Kind.VALUES, WIDE, ("M", "H"), "added to x first; of its dtype")
OPTIONAL = TensorSpec("residual", Kind.VALUES, WIDE, ("M", "H"), "added to x first; of its dtype", optional=True)
EPSILON = OptionSpec("epsilon", 1e-6, None, "added to the mean square")
ROUNDING = OptionSpec("rounding", "each", ("each", "product"), "where (z r) weight is rounded to the dtype of x")


NORMALISES = Trait("is of the RMS norm of a row")


class NormContract(FusedContract):
    """The value is the RMS norm of a row, T the dtype of ``x``, each operation rounded to float32:

        z = x [+ residual]        r = 1 / sqrt(mean(z^2) + epsilon)
        value = T(T(z r) weight)   vLLM (rounding each)
                T((z r) weight)    vLLM 0.20.2's static kernels on an H200 (product)
                (z r) weight       FlashInfer, float32 (none)

    ``mean`` is a float32 sum in any order. The sum with a residual is rounded to T before the norm (vLLM's static
    kernel) or stays float32 (its dynamic ones and FlashInfer's), as the summary says. Either way ``residual`` is
    returned as ``T(x + residual)``; where it is optional and not given, as ``x`` or not at all. A NaN makes its row
    NaN; an infinity makes its row 0, and itself NaN.

    vLLM's static kernels store a product of two numbers of T in a float32 variable, and what 0.20.2 computes has no
    rounding in between: with ``rounding="product"`` every code that its kernels gave for 42 cases is admissible, with
    ``each`` 1.5 % of those of bfloat16 inputs are not. Later releases keep the variable in T.

    Sources: vLLM csrc/layernorm_quant_kernels.cu @2fb35bb, libtorch_stable/layernorm_quant_kernels.cu @0e1d935,
    quantization/fused_kernels/layernorm_utils.cuh @1051220; FlashInfer include/flashinfer/norm.cuh (0.6.18.post1),
    which multiplies by an approximate reciprocal of the scale. Not covered: LayerNorm, Gemma's weight of 1 + w, E5M2.

    Subclasses
    ----------
    ``sum_in_dtype``: a sum with a residual is rounded before the norm; ``rounding``: which roundings come after. That a
    kernel's sum of a row is one number for all its columns is not used (:mod:`oracle.bounds.norm`).
    """

    traits = frozenset({NORMALISES})
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

    def steps(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, float]:
        """What is normed ``[M, H]``, the weight ``[H]`` and epsilon, float64."""
        z = self.summed(inputs, rounded=bool(options.get("sum_in_dtype", self.sum_in_dtype)))
        epsilon = f32(torch.tensor(options["epsilon"], dtype=torch.float64, device=z.device))
        return z, decode(inputs["weight"]), float(epsilon)

    def held(self, inputs: Inputs, options: Options) -> tuple[torch.dtype, Format]:
        """The dtype that the value is held in, and the format of the norm before the weight."""
        rounding, dtype = options.get("rounding", self.rounding), inputs["x"].dtype
        return torch.float32 if rounding == "none" else dtype, of_dtype(dtype) if rounding == "each" else FP32

    def modelled(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        z, w, epsilon = self.steps(inputs, options)
        held, first = self.held(inputs, options)
        (rows, width), vector = z.shape, 16 // inputs["x"].element_size()
        threads = min(-(-width // vector), 1024 if rows < 256 else 256)
        mean = f32(f32(cuda_math.sum_of_squares(z, vector, threads) / width) + epsilon)
        norm = nearest(f32(z * cuda_math.reciprocal_root(mean)), first)
        return {"a norm by vLLM's sum and rsqrt.approx": rounded_to(f32(norm * w), held)}

    def value(self, inputs: Inputs, options: Options) -> Value:
        z, w, epsilon = self.steps(inputs, options)
        held, first = self.held(inputs, options)
        norm = reciprocal_norm(self.squared(inputs, z), epsilon)
        flushed = 2 * FLUSHED if options.get("rounding", self.rounding) == "none" else 0.0  # by fast math
        low, high, expected = self.finished(*normed(z, w, norm, first, flushed=flushed), inputs)
        low, high, expected = (nearest(f32(end), of_dtype(held)) for end in (low, high, expected))
        low, high = torch.fmin(low, expected), torch.fmax(high, expected)
        return Value(Admissible(low, high, expected, open=norm.open.expand(z.shape)), held)

    def squared(self, inputs: Inputs, z: Tensor) -> Tensor:
        """What the mean square is of, float64 ``[M, H]``; by default what is normed, ``z`` ``[M, H]``."""
        return z

    def finished(self, low: Tensor, high: Tensor, due: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """What becomes of the norm times its weight before it is quantised: the ends ``low`` and ``high`` and what is
        ``due``, float64 ``[M, H]``; by default nothing."""
        return low, high, due


def normed(z: Tensor, w: Tensor, norm: Norm, first: Format, *, flushed: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """The least, the largest and the usual value of ``(z r) w``, float64 ``[M, H]``, of float64 ``z [M, H]``, ``w [H]``
    and the bounds of ``r``; ``z r`` is rounded to the format ``first``. What lies below ``flushed`` may be taken as 0.
    NaN stays. Source: derived in :mod:`oracle.bounds.norm`.
    """
    ends = [e * r for e in (z - flushed, z + flushed) for r in (norm.low, norm.high)]
    low, high = torch.stack(ends).amin(dim=0), torch.stack(ends).amax(dim=0)
    # one rounding to float32, or none where a kernel rounds the product to T at once
    low, high = (nearest(e * (1 + s * 2 * U), first) for e, s in ((low, -low.sign()), (high, high.sign())))
    ends = [low * w, high * w]
    return torch.minimum(*ends), torch.maximum(*ends), f32(nearest(f32(z * f32(norm.exact)), first) * w)


class _Static(NormContract):
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
    traits = frozenset({FAST_MATH})
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
class RmsNormDynamicPerTokenQuant(NormContract):
    """The value is rounded twice, ``T(T(z r) weight)``; the sum with a residual stays float32. ``scale_ub``, ``[1]``,
    bounds amax: ``scale = max(min(amax, scale_ub)/448, 1/(448 * 512))``."""

    shapes = {"scale": "[M, 1]"}

    name = "rms_norm_dynamic_per_token_quant"
    summary = "RMS norm of a row [+ residual, in float32], rounded twice, one scale a row"
    source = "vLLM csrc/quantization/fused_kernels/fused_layernorm_dynamic_per_token_quant.cu"
    inputs = (X, WEIGHT, OPTIONAL, SCALE_UB)
    returns = ("q", "scale", "residual")
    options = (EPSILON,)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_TOKEN, recipes.VLLM_TOKEN


@register
class RmsNormPerBlockQuant(NormContract):
    """The value is rounded twice, ``T(T(z r) weight)``; the sum with a residual stays float32. ``scale_ub``, ``[1]``,
    bounds amax: ``scale = max(min(amax, scale_ub)/448, 1/(448 * 512))``, with an amax for each group."""

    shapes = {"scale": "[M, H / group_size]"}

    name = "rms_norm_per_block_quant"
    summary = "RMS norm of a row [+ residual, in float32], rounded twice, one scale for each group of a row"
    source = "vLLM csrc/quantization/fused_kernels/fused_layernorm_dynamic_per_token_quant.cu"
    inputs = (X, WEIGHT, OPTIONAL, SCALE_UB)
    returns = ("q", "scale", "residual")
    options = (
        EPSILON,
        OptionSpec("group_size", 128, None, "elements that share a scale; H is a multiple of it"),
        COLUMNS,
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (width := inputs["x"].shape[1]) % (group := positive(options, "group_size")):
            raise ShapeError(f"H={width} is not a multiple of the group of {group}; choose another group_size")

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        block = Block(1, positive(options, "group_size"))
        return tuple(r.with_block(block) for r in (recipes.TORCH_BLOCK, recipes.VLLM_BLOCK))


# --- groups of rows in use, scales in words -----------------------------------------------------------------


GROUP = OptionSpec("group_size", 128, None, "elements that share a scale; K is a multiple of it")
EPS = OptionSpec("eps", 1e-10, None, "floor of amax")
WORD = 4


class GroupContract(FusedContract):
    """The value is ``x``; groups along K have any size that divides K (engines have kernels for 16 to 256).

    Sources: vLLM csrc per_token_group_quant.cu ``per_token_group_fp8_quant_packed``; sgl-kernel
    per_token_group_quant_8bit_v2.cu @037cd6e (masked and packed).
    """

    section = "Quantisation"

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (width := inputs["x"].shape[-1]) % (group := positive(options, "group_size")):
            raise ShapeError(f"K={width} is not a multiple of the group of {group}; pad K")
        eps = options["eps"]
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise OptionError(f"eps={eps!r} is no float between 0 and 1")

    def value(self, inputs: Inputs, options: Options) -> Value:
        x = decode(inputs["x"])
        return Value(Admissible(x, x, x), inputs["x"].dtype)

    def families(self, options: Options, *, powers: bool) -> tuple[Recipe, ...]:
        """The recipes of the group quantiser, over these groups and with this floor."""
        plain = (recipes.TORCH_GROUP, recipes.VLLM_GROUP, recipes.SGLANG_GROUP)
        rounded = (
            recipes.TORCH_GROUP_UE8M0,
            recipes.VLLM_GROUP_UE8M0_BITS,
            recipes.SGLANG_GROUP_UE8M0,
            recipes.SGLANG_GROUP_V2_UE8M0,
        )
        block = Block(1, positive(options, "group_size"))
        return tuple(r.with_block(block).with_floor(options["eps"]) for r in (rounded if powers else plain))


@register
class PerTokenGroupQuantFp8Masked(GroupContract):
    shapes = {"scale": "[E, T, K / group_size]"}
    name = "per_token_group_quant_fp8_masked"
    summary = "groups along K of the rows in use of every expert, scale max(amax, eps)/448"
    source = "sgl-kernel per_token_group_quant_8bit_v2.cu, masked_m"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, ("E", "T", "K"), "values to quantise"), MASKED)
    options = (GROUP, EPS, OptionSpec("use_ue8m0", False, (False, True), "round the scale up to a power of two"))

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return self.families(options, powers=bool(options["use_ue8m0"]))


class PackedScales(FusedContract):
    """``scale`` is int32 ``[M, ceil(G/4)]``, G the groups of a row, with strides ``(1, align(M, 4))``: the exponent
    bytes of four groups, the first in the lowest byte. Bytes past the last group are 0; byte 255 is NaN, or infinity
    where amax is infinite. The lanes of rows M to ``align(M, 4) - 1`` may hold anything."""

    shapes: ClassVar[dict[str, str]] = {"scale": "[M, ceil(ceil(K / group_size) / 4)]"}
    traits = frozenset({WORDS})
    interval = False

    def _words(self, inputs: Inputs, options: Options) -> tuple[int, int]:
        rows, width = self.shape(inputs)
        return rows, -(-(width // positive(options, "group_size")) // WORD)

    def outputs(self, call: Call) -> dict[str, Out]:
        return super().outputs(call) | {"scale": Out(self._words(call.inputs, call.resolved), (torch.int32,))}

    def publish(self, scale: Tensor, options: Options) -> Tensor:
        """Powers of two ``scale`` ``[M, G]``, float32, as words: int32 ``[M, ceil(G/4)]`` in columns."""
        rows, groups = scale.shape
        byte = scale.contiguous().view(torch.int32) >> 23 & 0xFF
        byte = torch.nn.functional.pad(byte, (0, -groups % WORD)).to(torch.uint8)
        words = byte.view(torch.int32)
        lanes = torch.zeros(words.shape[1], rows + -rows % WORD, dtype=torch.int32, device=scale.device)
        lanes[:, :rows] = words.t()
        return lanes[:, :rows].t()

    def split(self, outputs: Found, call: Call) -> dict[str, Tensor]:
        """Byte 255 is read as the infinity that an infinite amax gives, else as NaN."""
        packed, (rows, words) = outputs["scale"], self._words(call.inputs, call.resolved)
        lead = rows + -rows % WORD
        for extent, stride, due in zip(packed.shape, packed.stride(), (1, lead), strict=True):
            if extent > 1 and stride != due:
                raise LayoutError(f"scale has strides {packed.stride()}; packed scales of {rows} rows have (1, {lead})")
        x = call.cached("value", lambda: self.value(call.inputs, call.resolved)).sets.expected
        groups = x.reshape(rows, -1, positive(call.resolved, "group_size"))
        infinite = torch.isinf(groups).any(dim=-1) & ~torch.isnan(groups).any(dim=-1)
        byte = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8).reshape(rows, words * WORD)
        byte = byte[:, : groups.shape[1]].to(torch.int32)
        scale = (byte << 23).view(torch.float32)
        scale = torch.where((byte == 255) & ~infinite, torch.nan, torch.where(byte == 0, 2.0**-127, scale))
        return {"q": outputs["q"], "scale": scale}

    def zeros(self, outputs: Found, call: Call) -> Tensor:
        groups = self.shape(call.inputs)[1] // positive(call.resolved, "group_size")
        byte = outputs["scale"].clone(memory_format=torch.contiguous_format).view(torch.uint8)
        return byte[:, groups:]

    def refused(self, call: Call, outputs: Found, right: Found) -> dict[str, Tensor] | None:
        """A word is refused where one of its bytes is, of its scales or behind the last one."""
        inner = self.inner(call)
        bad = inner.contract.refused(inner, self.split(outputs, call), self.split(right, call))
        assert bad is not None
        rows, words = self._words(call.inputs, call.resolved)
        scale = torch.cat([bad["scale"], self.zeros(outputs, call) != 0], dim=1)
        return {"q": bad["q"], "scale": scale.reshape(rows, words, WORD).any(dim=-1)}


@register
class PerTokenGroupQuantFp8Packed(PackedScales, GroupContract):
    name = "per_token_group_quant_fp8_packed"
    summary = "groups along K, power-of-two scales packed four to an int32, as DeepGEMM takes them on sm100"
    source = "vLLM per_token_group_fp8_quant_packed; sgl-kernel per_token_group_quant_8bit_v2.cu"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "values to quantise"),)
    options = (GROUP, EPS)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return self.families(options, powers=True)


@register
class SiluMulQuantPacked(PackedScales, GatedContract):
    """``gate`` is clamped from above, ``up`` on both sides, where ``clamp_limit`` is given; the value is rounded to
    bfloat16 once. The scale is ``max(amax / 448, 1e-10)`` rounded up to a power of two."""

    name = "silu_mul_quant_fp8_packed_triton"
    dispatched = False
    summary = "silu(gate) * up, quantised in groups, power-of-two scales packed four to an int32"
    source = "vLLM 0.20.2 quantization/utils/fp8_utils.py silu_mul_quant_fp8_packed_triton"
    inputs = (TensorSpec("x", Kind.VALUES, NARROW[:1], ("M", "C"), GATED),)
    options = (GROUP, OptionSpec("clamp_limit", None, None, "clamp of gate (above) and up (both sides)"))

    def refuse(self, inputs: Inputs, options: Options) -> None:
        limit = options["clamp_limit"]
        if limit is not None and not (isinstance(limit, int | float) and 2.0**-10 <= limit <= 2.0**10):
            raise OptionError(f"clamp_limit={limit!r}; pass a number within 2^-10 and 2^10, or None")

    def value(self, inputs: Inputs, options: Options) -> Value:
        limit = options["clamp_limit"]
        above = None if limit is None else float(f32(torch.tensor(limit, dtype=torch.float64, device="cpu")))
        return gated(inputs["x"], "product", limit=above)

    def modelled(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {} if options["clamp_limit"] is not None else super().modelled(inputs, {"rounding": "product"})

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        block = Block(1, self.group(options))
        rows = recipes.VLLM_GROUP_UE8M0.with_floor(0.0), recipes.VLLM_SILU_PACKED, recipes.VLLM_SILU_PACKED_POSITIVE
        return tuple(row.with_block(block) for row in rows)


@register
class FusedInvRopeFp8Quant(FusedContract):
    """The last ``rope_dim`` columns of each head are rotated back, ``x cos + x' sin`` of neighbours, in float32 and not
    rounded; heads side by side are quantised in groups of 128 columns with powers of two of
    ``max(amax, 1e-10) * (1 / 448)``. Row ``positions[t]`` of ``cos_sin_cache`` has cosines, then sines."""

    name = "fused_inv_rope_fp8_quant"
    dispatched = False
    gpu = False
    summary = "attention outputs rotated back and quantised in groups, power-of-two scales"
    source = "vLLM 0.20.2 v1/attention/ops/deepseek_v4_ops/fused_inv_rope_fp8_quant.py, scales in float32"
    inputs = (
        TensorSpec("o", Kind.VALUES, NARROW[:1], ("T", "H", "D"), "outputs of heads"),
        TensorSpec("positions", Kind.POSITIONS, INTEGERS, ("T",), "position of each token"),
        TensorSpec("cos_sin_cache", Kind.WEIGHTS, F32, ("S", "R"), "cosines, then sines, of each position"),
    )
    shapes: ClassVar[dict[str, str]] = {"q": "[T, H D]", "scale": "[T, H D / 128], float32"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        _, heads, depth = inputs["o"].shape
        rope, known, at = inputs["cos_sin_cache"].shape[1], len(inputs["cos_sin_cache"]), inputs["positions"]
        if depth % 128 or rope % 2 or rope > 128:
            raise ShapeError(f"{heads} heads of {depth}, {rope} of them rotated: whole 128s, an even number up to 128")
        if bool((at < 0).any()) or bool((at >= known).any()):
            raise OptionError(f"positions reach from {int(at.min())} to {int(at.max())}; there are {known}")

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.VLLM_INVERSE_ROPE, recipes.VLLM_INVERSE_ROPE_POSITIVE

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        tokens, heads, depth = inputs["o"].shape
        return tokens, heads * depth

    def value(self, inputs: Inputs, options: Options) -> Value:
        x, rope = decode(inputs["o"]), inputs["cos_sin_cache"].shape[1]
        cache = decode(inputs["cos_sin_cache"])[inputs["positions"].long()][:, None]
        cos, sin = (t.repeat_interleave(2, dim=-1) for t in torch.split(cache, rope // 2, dim=-1))
        turned = x[..., -rope:]
        beside = torch.stack([-turned[..., 1::2], turned[..., ::2]], dim=-1).flatten(-2)
        ends = rotary.rotated(turned, beside, cos, sin, 1.0)
        low, high, usual = (torch.cat([x[..., :-rope], end], dim=-1).flatten(1) for end in ends)
        return Value(Admissible(low, high, usual), torch.float32)


# --- rotary embeddings --------------------------------------------------------------------------------------


NAMES = ("q_rope", "k_rope", "q_nope", "k_nope")


def _factor(name: str, of: str) -> OptionSpec:
    return OptionSpec(name, 1.0, None, f"multiplies {of} before the cast")


@register
class RopeQuantizeFp8(FusedContract):
    """``rope: code((x cos - x' sin) * quant_scale)``, ``nope: code(x * quant_scale)``, every operation in float32, a
    multiply and an add fused or not; subnormals may be flushed.

    ``x'`` is the partner of ``x``: of neox style the element half a head away, else its neighbour; for the second
    element of a pair the sign of ``x' sin`` is plus. ``quant_scale`` multiplies, rounded to float32: it is the inverse
    of the scale that dequantises, and positive. The recipe below says what becomes of the product alone, under a scale
    of 1. Row ``pos_ids[t]`` of ``cos_sin_cache`` has D/2 cosines, then D/2 sines; positions are below S, D is even.

    Source: FlashInfer flashinfer/rope.py, include/flashinfer/pos_enc.cuh RopeQuantizeKernel (0.6.18.post1). Not
    covered: E5M2, a head dim that is rotated in part, appending to a paged cache.
    """

    name = "rope_quantize_fp8"
    summary = "rotary embedding of query and key, and their other columns, in E4M3"
    source = "FlashInfer flashinfer.rope.rope_quantize_fp8"
    parts: ClassVar[tuple[str, ...]] = NAMES
    returns = NAMES
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("q_rope", Kind.VALUES, NARROW, ("T", "H", "D"), "columns of the query that are rotated"),
        TensorSpec("k_rope", Kind.VALUES, NARROW, ("T", "G", "D"), "columns of the key that are rotated"),
        TensorSpec("q_nope", Kind.VALUES, NARROW, ("T", "H", "N"), "the other columns of the query"),
        TensorSpec("k_nope", Kind.VALUES, NARROW, ("T", "G", "N"), "the other columns of the key"),
        TensorSpec("cos_sin_cache", Kind.WEIGHTS, F32, ("S", "D"), "cosines, then sines, of each position"),
        TensorSpec("pos_ids", Kind.POSITIONS, INTEGERS, ("T",), "position of each token"),
    )
    options: ClassVar[tuple[OptionSpec, ...]] = (
        OptionSpec("is_neox", True, (False, True), "partners half a head apart, else neighbours"),
        _factor("quant_scale_q", "the query"),
        _factor("quant_scale_kv", "the key"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (depth := inputs["q_rope"].shape[-1]) % 2:
            raise ShapeError(f"D={depth} is odd; rotated columns come in pairs")
        for name in ("quant_scale_q", "quant_scale_kv"):
            value = options[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2.0**100:
                raise OptionError(f"{name}={value!r} is no positive number")
        positions, known = inputs["pos_ids"], inputs["cos_sin_cache"].shape[0]
        if bool((positions < 0).any()) or bool((positions >= known).any()):
            raise OptionError(f"pos_ids reach from {int(positions.min())} to {int(positions.max())}; there are {known}")

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_STATIC, recipes.FLASHINFER_CVT

    def given(self, inputs: Inputs) -> dict[str, Tensor]:
        return {"scale": torch.ones(1, dtype=torch.float32, device=inputs["q_rope"].device)}

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        return 1, sum(inputs[name].numel() for name in self.parts)

    def value(self, inputs: Inputs, options: Options) -> Value:
        """All tensors in one row."""
        parts = [self._part(name, inputs, options) for name in self.parts]
        low, high, usual = (torch.cat([part[i].flatten() for part in parts])[None] for i in range(3))
        return Value(Admissible(low, high, usual), torch.float32)

    def modelled(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        values = torch.cat([self._part(name, inputs, options, flushed=True)[2].flatten() for name in self.parts])[None]
        return {"a rotation that flushes subnormals": rounded_to(values, torch.float32)}

    def _part(
        self, name: str, inputs: Inputs, options: Options, *, flushed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, factor = decode(inputs[name]), options["quant_scale_q" if name.startswith("q") else "quant_scale_kv"]
        times = float(f32(torch.tensor(float(factor), dtype=torch.float64, device=x.device)))
        if name.endswith("nope"):
            plain = mufu.flush(f32(mufu.flush(x) * times)) if flushed else f32(x * times)
            return f32(plain - rotary.FLUSHED * (1 + times)), f32(plain + rotary.FLUSHED * (1 + times)), plain
        half = x.shape[-1] // 2
        cache = decode(inputs["cos_sin_cache"])[inputs["pos_ids"].long()]
        cos, sin = torch.split(cache, half, dim=-1)
        if options["is_neox"]:
            beside = torch.cat([x[..., half:], -x[..., :half]], dim=-1)
            cos, sin = (torch.cat([t, t], dim=-1) for t in (cos, sin))
        else:
            beside = torch.stack([x[..., 1::2], -x[..., ::2]], dim=-1).flatten(-2)
            cos, sin = (t.repeat_interleave(2, dim=-1) for t in (cos, sin))
        if x.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        if flushed:  # as FlashInfer's -use_fast_math has it
            x, beside, cos, sin = (mufu.flush(t) for t in (x, beside, cos, sin))
            turned = mufu.flush(f32(mufu.flush(f32(x * cos)) - mufu.flush(f32(beside * sin))))
            return (mufu.flush(f32(turned * times)),) * 3
        return rotary.rotated(x, beside, cos, sin, times)

    def outputs(self, call: Call) -> dict[str, Out]:
        return {name: Out(tuple(call.inputs[name].shape), E4M3) for name in NAMES}

    def split(self, outputs: Found, call: Call) -> dict[str, Tensor]:
        flat = torch.cat([outputs[name].reshape(-1).view(torch.uint8) for name in NAMES])
        return {"q": flat[None].view(outputs[NAMES[0]].dtype), "scale": self.given(call.inputs)["scale"]}

    def codes(self, matrix: Tensor, inputs: Inputs, fill: float) -> dict[str, Tensor]:
        """Of one row ``matrix`` ``[1, n]``, uint8, the four outputs in their shapes; nothing is filled."""
        sizes = [inputs[name].numel() for name in NAMES]
        return {
            name: part.reshape(inputs[name].shape).contiguous()
            for name, part in zip(NAMES, torch.split(matrix.flatten(), sizes), strict=True)
        }


@register
class MlaRopeQuantizeFp8(RopeQuantizeFp8):
    name = "mla_rope_quantize_fp8"
    summary = "rotary embedding in E4M3 for MLA: one key head, without an axis of its own"
    source = "FlashInfer flashinfer.rope.mla_rope_quantize_fp8"
    inputs = tuple(replace(s, dims=tuple(d for d in s.dims or () if d != "G")) for s in RopeQuantizeFp8.inputs)
