"""Contracts of silu-and-mul with a quantiser: static, per group, and per group of the rows that experts use.

    value = silu(gate) * up        gate = x[..., :I], up = x[..., I:]

``rounding`` says where the value is rounded to the dtype of ``x`` before it is quantised: ``each`` (silu, then the
product), ``product``, or ``none`` (float32 throughout). A kernel's silu errs as the contract ``silu_and_mul`` states.

Sources: vLLM csrc/quantization/activation_kernels.cu @bcf9083 (two roundings) and @1a84e5b (none),
fused_kernels/fused_silu_mul_block_quant.cu @0dd8492 and @09a2bf0; SGLang layers/moe/ep_moe/kernels.py
``silu_and_mul_masked_post_quant_fwd`` and sgl-kernel per_token_group_quant_8bit_v2.cu @037cd6e (``fuse_silu_and_mul``).
Not covered: GELU, interleaved halves, int8, scales packed into words.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import ShapeError
from oracle.numbers import cuda_math, recipes
from oracle.numbers.formats import decode
from oracle.numbers.quantize import WIDE
from oracle.numbers.recipes import Recipe
from oracle.numbers.rounding import Overflow, Rounding, f32, to_dtype
from oracle.numbers.scaling import Block
from oracle.routines.base import Call, Inputs, Options, OptionSpec, TensorSpec, positive, register
from oracle.routines.fused.contract import COLUMNS, MASKED, SCALE, SCALE_UB, FusedContract, Value
from oracle.routines.moe.contract import SiluAndMul
from oracle.verdict.sets import rounded_to

ROUNDINGS = ("each", "product", "none")
GATED = "gate, then up"


def rounding_option(default: str) -> OptionSpec:
    """Where ``silu(gate) * up`` is rounded to the dtype of ``x``."""
    return OptionSpec("rounding", default, ROUNDINGS, "where silu(gate) * up is rounded to the dtype of x")


def gated(x: Tensor, rounding: str) -> Value:
    """``silu(gate) * up`` with its roundings and the interval of a device's silu."""
    held = x if rounding != "none" else to_dtype(x.double(), torch.float32, rounding=Rounding.NEAREST_EVEN,
                                                 overflow=Overflow.INF)  # fmt: skip
    call = Call(SiluAndMul(), {"x": held}, {"round_silu": rounding == "each"})
    return Value(SiluAndMul().interval(call.checked()), held.dtype)


class _Gated(FusedContract):
    """``x [..., 2 I]``."""

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

    def modelled(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, Tensor]:
        rounding, x = str(options.get("rounding", "each")), inputs["x"]
        gate, up = decode(x).chunk(2, dim=-1)
        s = cuda_math.silu(gate)
        if rounding == "each":
            s = decode(rounded_to(s, x.dtype))
        product = f32(s * up)
        return {"a SiLU by CUDA's expf": rounded_to(product, torch.float32 if rounding == "none" else x.dtype)}


@register
class SiluAndMulQuant(_Gated):
    name = "silu_and_mul_quant"
    summary = "silu(gate) * up, quantised with a given scale"
    source = "vLLM csrc/quantization/activation_kernels.cu silu_and_mul_quant"
    inputs = (TensorSpec("x", WIDE, ("M", "C"), GATED), SCALE)
    options = (rounding_option("each"),)
    returns = ("q",)
    grouped = False

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_STATIC, recipes.VLLM_STATIC


@register
class SiluAndMulPerBlockQuant(_Gated):
    """``scale_ub`` bounds the scale, not amax: ``scale = max(min(amax/448, scale_ub), 1/(448 * 512))``."""

    name = "silu_and_mul_per_block_quant"
    summary = "silu(gate) * up in float32, quantised in groups of a row, scale max(min(amax/448, ub), 1/(448*512))"
    source = "vLLM csrc/quantization/fused_kernels/fused_silu_mul_block_quant.cu"
    inputs = (TensorSpec("x", WIDE, ("M", "C"), GATED), SCALE_UB)
    options = (
        OptionSpec("group_size", 128, None, "elements that share a scale; I is a multiple of it"), COLUMNS,
        rounding_option("none"),
    )  # fmt: skip

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        block = Block(1, self.group(options))
        return tuple(r.with_block(block) for r in (recipes.TORCH_SILU_BLOCK, recipes.VLLM_SILU_BLOCK))


@register
class SiluAndMulMaskedPostQuant(_Gated):
    """Rows of an expert from ``masked_m[e]`` on are not specified. A power-of-two scale is float32, of ``max(amax,
    1e-10)/448`` rounded up."""

    name = "silu_and_mul_masked_post_quant"
    summary = "silu(gate) * up of the rows in use of every expert, quantised in groups, floor 1e-10"
    source = "SGLang layers/moe/ep_moe/kernels.py silu_and_mul_masked_post_quant_fwd"
    inputs = (TensorSpec("x", WIDE, ("E", "T", "C"), GATED), MASKED)
    options = (
        OptionSpec("group_size", 128, None, "elements that share a scale; I is a multiple of it"),
        OptionSpec("use_ue8m0", False, (False, True), "round the scale up to a power of two"),
        rounding_option("each"),
    )

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        plain = (recipes.TORCH_GROUP, recipes.SGLANG_TRITON_COLUMN, recipes.SGLANG_GROUP)
        powers = (recipes.TORCH_GROUP_UE8M0, recipes.SGLANG_GROUP_UE8M0, recipes.SGLANG_GROUP_V2_UE8M0)
        block = Block(1, self.group(options))
        return tuple(r.with_block(block) for r in (powers if options["use_ue8m0"] else plain))


@register
class PersistentMaskedMSiluMulQuant(_Gated):
    """amax, scale, its inverse and the quotient are bfloat16 operations; the stored scale is the float32 image of the
    bfloat16 one, 0.2 % low, so the largest element of a group often saturates."""

    name = "persistent_masked_m_silu_mul_quant"
    summary = "silu(gate) * up of the rows in use, every step of the quantiser in bfloat16, groups of 128"
    source = "vLLM csrc/quantization/activation_kernels.cu persistent_masked_m_silu_mul_quant"
    inputs = (TensorSpec("x", (torch.bfloat16,), ("E", "T", "C"), GATED), MASKED)

    def group(self, options: Options) -> int:
        return recipes.VLLM_SILU_MASKED.block.columns or 0

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_SILU_MASKED, recipes.VLLM_SILU_MASKED
