"""Scale recipes by name: how each library turns a block of numbers into E4M3 codes and one scale.

:mod:`oracle.numbers.recipe_record` defines what a recipe says; :mod:`oracle.numbers.quantize` evaluates one bit for bit;
:mod:`oracle.bounds.quantiser` says which other outputs a right implementation of it may give. Sources are named
per record (library, file, commit where known).

Not covered: approximate device division bit for bit except where a recipe says FAST_MATH (``approximate`` widens the
admissible set instead); recipes that differ from one listed here only by a power-of-two identity, such as ``x/s`` and
``x * (1/s)`` for UE8M0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from oracle.errors import NumericsError
from oracle.numbers.recipe_record import (
    COLUMN_128,
    GROUP_32,
    GROUP_128,
    TENSOR,
    TILE_128,
    TOKEN,
    AmaxScan,
    Arithmetic,
    Block,
    CodeFormula,
    NanAmax,
    NanCode,
    PowerOfTwo,
    Recipe,
    ScaleFormat,
    ScaleFormula,
    Special,
)

__all__ = [
    "COLUMN_128",
    "GROUP_128",
    "GROUP_32",
    "TENSOR",
    "TILE_128",
    "TOKEN",
    "AmaxScan",
    "Arithmetic",
    "Block",
    "CodeFormula",
    "NanAmax",
    "NanCode",
    "PowerOfTwo",
    "Recipe",
    "ScaleFormat",
    "ScaleFormula",
    "Special",
    "get",
    "recipes",
]


def recipes() -> Mapping[str, Recipe]:
    """Every named recipe, by name; the faulty ones (``fault`` is not None) included."""
    return _REGISTRY


def get(name: str) -> Recipe:
    """The recipe of this name.

    Raises
    ------
    NumericsError
        No recipe has this name; the message lists those that exist.
    """
    if name not in _REGISTRY:
        raise NumericsError(f"no recipe {name!r}; there are: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]


_UE8M0 = ScaleFormat.UE8M0

# DeepGEMM: torch code, so amax propagates NaN; the cast saturates (torch >= 2.13). A non-finite amax ends in
# byte 254 because the exponent field is clamped to 1..254 whatever it was.
_DEEPGEMM = "DeepGEMM deep_gemm/utils/math.py @54e2261"
DEEPGEMM_1X128 = Recipe(
    name="deepgemm_1x128",
    source=f"{_DEEPGEMM}, per_token_cast_to_fp8",
    block=GROUP_128,
    formula=ScaleFormula.DIVIDE,
    code=CodeFormula.RECIPROCAL,
    amax_floor=1e-4,
    nan_amax=NanAmax.PROPAGATED,
)
DEEPGEMM_128X128 = replace(
    DEEPGEMM_1X128, name="deepgemm_128x128", source=f"{_DEEPGEMM}, per_block_cast_to_fp8", block=TILE_128
)
DEEPGEMM_128X1 = replace(
    DEEPGEMM_1X128, name="deepgemm_128x1", source=f"{_DEEPGEMM}, per_channel_cast_to_fp8", block=COLUMN_128
)
DEEPGEMM_1X128_UE8M0 = replace(
    DEEPGEMM_1X128,
    name="deepgemm_1x128_ue8m0",
    scale_format=_UE8M0,
    power_of_two=PowerOfTwo.CEIL,
    byte_low=1,
    inf_byte=254,
    nan_byte=254,
)
DEEPGEMM_128X128_UE8M0 = replace(
    DEEPGEMM_1X128_UE8M0, name="deepgemm_128x128_ue8m0", source=DEEPGEMM_128X128.source, block=TILE_128
)
DEEPGEMM_128X1_UE8M0 = replace(
    DEEPGEMM_1X128_UE8M0, name="deepgemm_128x1_ue8m0", source=DEEPGEMM_128X1.source, block=COLUMN_128
)
DEEPGEMM_DEVICE_1X32_UE8M0 = Recipe(
    name="deepgemm_device_1x32_ue8m0",
    source="DeepGEMM common/math.cuh get_e4m3_sf_and_sf_inv (sm100 mega-MoE)",
    block=GROUP_32,
    formula=ScaleFormula.MULTIPLY,
    code=CodeFormula.RECIPROCAL,
    scale_format=_UE8M0,
    power_of_two=PowerOfTwo.CEIL,
)

# FlashInfer's test helpers always round the scale to a power of two, through log2 and pow.
FLASHINFER_TESTING_1X128_UE8M0 = replace(
    DEEPGEMM_1X128,
    name="flashinfer_testing_1x128_ue8m0",
    source="FlashInfer flashinfer/testing/utils.py per_token_cast_to_fp8",
    scale_format=_UE8M0,
    power_of_two=PowerOfTwo.EXP2_CEIL_LOG2,
)
FLASHINFER_TESTING_128X128_UE8M0 = replace(
    FLASHINFER_TESTING_1X128_UE8M0,
    name="flashinfer_testing_128x128_ue8m0",
    source="FlashInfer flashinfer/testing/utils.py per_block_cast_to_fp8",
    block=TILE_128,
)

# TensorRT-LLM's kernel and FlashInfer's copy of it. Both take bfloat16; FlashInfer compiles with fast math. Neither
# guards 448/a against overflow, which makes NaN of zeros (0 * inf); the recipes without a fault keep finite values
# finite instead, by TransformerEngine's policy (the largest finite multiplier).
_TRTLLM = "TensorRT-LLM fp8_blockscale_gemm_kernel.cuh @0249976"
TRTLLM_1X128 = Recipe(
    name="trtllm_1x128",
    source=f"{_TRTLLM}, scale_1x128_kernel",
    block=GROUP_128,
    formula=ScaleFormula.INVERSE,
    code=CodeFormula.QUOTIENT,
    unit_when=frozenset({Special.ZERO}),
)
TRTLLM_1X128_UE8M0 = replace(
    TRTLLM_1X128,
    name="trtllm_1x128_ue8m0",
    source=f"{_TRTLLM}, scale_1x128_kernel with USE_UE8M0",
    code=CodeFormula.RECIPROCAL,
    scale_format=_UE8M0,
    power_of_two=PowerOfTwo.CEIL,
)
TRTLLM_128X128 = replace(
    TRTLLM_1X128,
    name="trtllm_128x128",
    source=f"{_TRTLLM}, scale_128x128_kernel as intended: amax over the whole block",
    block=TILE_128,
)
FLASHINFER_1X128 = replace(
    TRTLLM_1X128,
    name="flashinfer_1x128",
    source="FlashInfer fp8_blockscale_gemm_sm90, scale_1x128_kernel as intended: finite values stay finite",
    approximate=True,
    inverse_limit=True,
)
FLASHINFER_1X128_FAST_MATH = replace(
    FLASHINFER_1X128,
    name="flashinfer_1x128_fast_math",
    source="FlashInfer 0.6.18.post1 fp8_blockscale_gemm_sm90, scale_1x128_kernel under -use_fast_math, on an H200",
    inverse_limit=False,
    arithmetic=Arithmetic.FAST_MATH,
    fault="448/amax is approximate and flushed: finite values become NaN where amax lies above 2^126 or below 2^-119, "
    "and 0 where it lies below 2^-117",
)
FLASHINFER_128X128 = replace(
    FLASHINFER_1X128,
    name="flashinfer_128x128",
    source="FlashInfer fp8_blockscale_gemm_sm90, scale_128x128_kernel as intended: amax over the whole block",
    block=TILE_128,
)
FLASHINFER_128X128_AMAX_FAULT = replace(
    FLASHINFER_128X128,
    name="flashinfer_128x128_amax_fault",
    inverse_limit=False,
    arithmetic=Arithmetic.FAST_MATH,
    source=f"FlashInfer fp8_blockscale_gemm_sm90 and {_TRTLLM}, scale_128x128_kernel as shipped",
    scan=AmaxScan.ROW_AS_COLUMN,
    fault="the amax scan tests the row index where the column index is meant, so it leaves rows out and the "
    "scale comes out too small",
)
FLASHINFER_MXFP8_1X32 = Recipe(
    name="flashinfer_mxfp8_1x32",
    source="FlashInfer quantization_utils.cuh cvt_warp_fp16_to_mxfp8 (rcp.approx: a power of two is exact)",
    block=GROUP_32,
    formula=ScaleFormula.MULTIPLY,
    code=CodeFormula.RECIPROCAL,
    scale_format=_UE8M0,
    power_of_two=PowerOfTwo.CEIL,
    zero_codes=True,
    nan_code=NanCode.POSITIVE_MAX,
)

# vLLM. Measured on an H200: scale and every finite code of the group kernel equal this record's bits.
_VLLM_GROUP = "vLLM csrc per_token_group_quant.cu @0f5257e"
VLLM_GROUP = Recipe(
    name="vllm_group",
    source=_VLLM_GROUP,
    block=GROUP_128,
    formula=ScaleFormula.DIVIDE,
    code=CodeFormula.DIVIDE,
    amax_floor=1e-10,
    nan_code=NanCode.NEGATIVE_MAX,
)
VLLM_GROUP_UE8M0_BITS = replace(
    VLLM_GROUP,
    name="vllm_group_ue8m0_bits",
    source=f"{_VLLM_GROUP}, exponent-bit form",
    scale_format=_UE8M0,
    power_of_two=PowerOfTwo.CEIL,
)
VLLM_GROUP_UE8M0 = replace(
    VLLM_GROUP_UE8M0_BITS,
    name="vllm_group_ue8m0",
    source=f"{_VLLM_GROUP}, exp2f(ceilf(log2f(fmaxf(s, 1e-10f)))): a second floor, on the scale",
    power_of_two=PowerOfTwo.EXP2_CEIL_LOG2,
    scale_floor=1e-10,
)
VLLM_TRITON_GROUP = replace(
    VLLM_GROUP,
    name="vllm_triton_group",
    source="vLLM fp8_utils.py _per_token_group_quant_fp8 (Triton): a * (1/448), div.full",
    formula=ScaleFormula.MULTIPLY,
    approximate=True,
)
_VLLM_COMMON = "vLLM csrc w8a8/fp8/common.cu @096d3dc"
VLLM_TENSOR = Recipe(
    name="vllm_tensor",
    source=f"{_VLLM_COMMON}, dynamic_scaled_fp8_quant",
    block=TENSOR,
    formula=ScaleFormula.DIVIDE,
    code=CodeFormula.RECIPROCAL,
    nan_code=NanCode.POSITIVE_MAX,
)
VLLM_TOKEN = Recipe(
    name="vllm_token",
    source=f"{_VLLM_COMMON}, dynamic_per_token_scaled_fp8_quant",
    block=TOKEN,
    formula=ScaleFormula.DIVIDE,
    code=CodeFormula.DIVIDE,
    scale_floor=1.0 / (448.0 * 512.0),
    nan_code=NanCode.POSITIVE_MAX,
    takes_scale_ub=True,
)

VLLM_STATIC = Recipe(
    name="vllm_static",
    source=f"{_VLLM_COMMON}, static_scaled_fp8_quant: multiplies by the reciprocal of the given scale",
    block=TENSOR,
    formula=ScaleFormula.GIVEN,
    code=CodeFormula.RECIPROCAL,
    nan_code=NanCode.POSITIVE_MAX,
)

# The same contracts in plain torch operations: amax, clamp and cast all let NaN through, 0/0 is coded 0.
_TORCH = "the published formula in plain torch operations, NaN propagated, division by a zero scale coded 0"
TORCH_GROUP = replace(
    VLLM_GROUP,
    name="torch_group",
    source=_TORCH,
    nan_amax=NanAmax.PROPAGATED,
    nan_code=NanCode.NAN,
    zero_codes=True,
)
TORCH_GROUP_UE8M0 = replace(
    TORCH_GROUP,
    name="torch_group_ue8m0",
    scale_format=_UE8M0,
    power_of_two=PowerOfTwo.CEIL,
    inf_byte=None,
)
TORCH_TENSOR = replace(TORCH_GROUP, name="torch_tensor", block=TENSOR, amax_floor=0.0)
TORCH_TOKEN = replace(
    TORCH_TENSOR, name="torch_token", block=TOKEN, scale_floor=VLLM_TOKEN.scale_floor, takes_scale_ub=True
)
TORCH_STATIC = replace(TORCH_TENSOR, name="torch_static", formula=ScaleFormula.GIVEN)
TORCH_CAST_1X128_UE8M0 = replace(
    DEEPGEMM_1X128_UE8M0, name="torch_cast_1x128_ue8m0", source=_TORCH, byte_low=0, inf_byte=None, nan_byte=255
)
TORCH_CAST_128X128_UE8M0 = replace(TORCH_CAST_1X128_UE8M0, name="torch_cast_128x128_ue8m0", block=TILE_128)
TORCH_CAST_128X1_UE8M0 = replace(TORCH_CAST_1X128_UE8M0, name="torch_cast_128x1_ue8m0", block=COLUMN_128)

# SGLang.
_SGLANG_GROUP = "SGLang per_token_group_quant_8bit_v2.cu @037cd6e"
SGLANG_GROUP = Recipe(
    name="sglang_group",
    source=_SGLANG_GROUP,
    block=GROUP_128,
    formula=ScaleFormula.MULTIPLY,
    code=CodeFormula.QUOTIENT,
    amax_floor=1e-10,
)
SGLANG_GROUP_UE8M0 = replace(
    SGLANG_GROUP,
    name="sglang_group_ue8m0",
    source=f"{_SGLANG_GROUP}, UE8M0, column major",
    code=CodeFormula.RECIPROCAL,
    scale_format=_UE8M0,
    power_of_two=PowerOfTwo.CEIL,
)
SGLANG_GROUP_ROW_MAJOR_UE8M0 = replace(
    SGLANG_GROUP_UE8M0,
    name="sglang_group_row_major_ue8m0",
    source=f"{_SGLANG_GROUP}, UE8M0, row major",
    code=CodeFormula.QUOTIENT,
    fault="publishes the scale rounded up to a power of two, but computes the codes with the exact 448/amax",
)
SGLANG_TOKEN = Recipe(
    name="sglang_token",
    source="SGLang per_token_quant_fp8.cu @0490047, warp kernel",
    block=TOKEN,
    formula=ScaleFormula.DIVIDE,
    code=CodeFormula.RECIPROCAL,
    zero_codes=True,
    nan_code=NanCode.POSITIVE_MAX,
)
SGLANG_TOKEN_SMALL = replace(
    SGLANG_TOKEN,
    name="sglang_token_small",
    source="SGLang per_token_quant_fp8.cu @0490047, small-batch kernel: 0 * inf in an all-zero row",
    zero_codes=False,
)
SGLANG_TRITON_ROW = replace(
    VLLM_GROUP,
    name="sglang_triton_row",
    source="SGLang fp8_kernel.py (Triton), row-major scales",
    code=CodeFormula.RECIPROCAL,
    approximate=True,
)
SGLANG_TRITON_COLUMN = replace(
    SGLANG_TRITON_ROW,
    name="sglang_triton_column",
    source="SGLang fp8_kernel.py (Triton), column-major scales",
    code=CodeFormula.DIVIDE,
)

# TransformerEngine: explicit __fdiv_rn, so the same bits with and without fast math.
_TE = "TransformerEngine recipe_common.cuh @d0067d0"
TE_BLOCKWISE_1X128 = Recipe(
    name="te_blockwise_1x128",
    source=f"{_TE}, compute_scale_from_amax",
    block=GROUP_128,
    formula=ScaleFormula.INVERSE,
    code=CodeFormula.QUOTIENT,
    unit_when=frozenset({Special.ZERO, Special.INF, Special.NAN}),
    inverse_limit=True,
)
TE_BLOCKWISE_128X128 = replace(TE_BLOCKWISE_1X128, name="te_blockwise_128x128", block=TILE_128)
TE_BLOCKWISE_1X128_POW2 = replace(
    TE_BLOCKWISE_1X128,
    name="te_blockwise_1x128_pow2",
    source=f"{_TE}, force_pow_2_scales",
    scale_format=_UE8M0,
    power_of_two=PowerOfTwo.INVERSE_FLOOR,
)
TE_BLOCKWISE_128X128_POW2 = replace(TE_BLOCKWISE_1X128_POW2, name="te_blockwise_128x128_pow2", block=TILE_128)
TE_MXFP8_1X32 = Recipe(
    name="te_mxfp8_1x32",
    source="TransformerEngine MXFP8 cast, ptx::float_to_e8m0(a * fl(1/448)) and exp2f_rcp",
    block=GROUP_32,
    formula=ScaleFormula.MULTIPLY,
    code=CodeFormula.RECIPROCAL,
    scale_format=_UE8M0,
    power_of_two=PowerOfTwo.CEIL,
)

# torchao. Torch code: amax propagates NaN and clamp keeps it.
_TORCHAO = "torchao float8_utils.py @36027d8"
TORCHAO_TENSOR = Recipe(
    name="torchao_tensor",
    source=f"{_TORCHAO}, amax_to_scale, tensor-wise",
    block=TENSOR,
    formula=ScaleFormula.INVERSE_FLOAT64,
    code=CodeFormula.QUOTIENT,
    amax_floor=1e-12,
    nan_amax=NanAmax.PROPAGATED,
)
TORCHAO_ROW = replace(TORCHAO_TENSOR, name="torchao_row", source=f"{_TORCHAO}, amax_to_scale, row-wise", block=TOKEN)
TORCHAO_1X128 = replace(
    TORCHAO_TENSOR, name="torchao_1x128", source=f"{_TORCHAO}, amax_to_scale, 1x128", block=GROUP_128
)
TORCHAO_ROW_POW2 = replace(
    TORCHAO_ROW,
    name="torchao_row_pow2",
    source=f"{_TORCHAO}, amax_to_scale with round_scales_to_power_of_2",
    scale_format=_UE8M0,
    power_of_two=PowerOfTwo.INVERSE_FLOOR,
)
_TORCHAO_PRIMITIVES = "torchao quant_primitives.py _choose_scale_float8"
TORCHAO_INFERENCE_1X128 = Recipe(
    name="torchao_inference_1x128",
    source=f"{_TORCHAO_PRIMITIVES}: amax / 448 in the input dtype",
    block=GROUP_128,
    formula=ScaleFormula.INPUT_DTYPE,
    code=CodeFormula.DIVIDE,
    scale_format=ScaleFormat.INPUT,
    nan_amax=NanAmax.PROPAGATED,
)
TORCHAO_INFERENCE_ROW = replace(TORCHAO_INFERENCE_1X128, name="torchao_inference_row", block=TOKEN)
TORCHAO_INFERENCE_128X128 = replace(TORCHAO_INFERENCE_1X128, name="torchao_inference_128x128", block=TILE_128)
TORCHAO_INFERENCE_1X128_E8M0 = replace(
    TORCHAO_INFERENCE_1X128,
    name="torchao_inference_1x128_e8m0",
    source=f"{_TORCHAO_PRIMITIVES}: exp2(round(log2 s)) in the input dtype; clips up to 29 % off the top",
    scale_format=_UE8M0,
    power_of_two=PowerOfTwo.EXP2_ROUND_LOG2,
)
_TORCHAO_MX = "torchao prototype/mx_formats/mx_tensor.py to_mx"
TORCHAO_MX_FLOOR = Recipe(
    name="torchao_mx_floor",
    source=f"{_TORCHAO_MX}, ScaleCalculationMode.FLOOR (OCP MX 1.0, 6.3)",
    block=GROUP_32,
    formula=ScaleFormula.DIVIDE,
    code=CodeFormula.RECIPROCAL,
    scale_format=_UE8M0,
    power_of_two=PowerOfTwo.AMAX_FLOOR,
    inf_byte=255,
    nan_amax=NanAmax.PROPAGATED,
)
TORCHAO_MX_CEIL = replace(
    TORCHAO_MX_FLOOR,
    name="torchao_mx_ceil",
    source=f"{_TORCHAO_MX}, ScaleCalculationMode.CEIL",
    power_of_two=PowerOfTwo.AMAX_CEIL,
)
TORCHAO_MX_EVEN = replace(
    TORCHAO_MX_FLOOR,
    name="torchao_mx_even",
    source=f"{_TORCHAO_MX}, ScaleCalculationMode.EVEN",
    power_of_two=PowerOfTwo.AMAX_EVEN,
)
TORCHAO_MX_RCEIL = replace(
    TORCHAO_MX_FLOOR,
    name="torchao_mx_rceil",
    source=f"{_TORCHAO_MX}, ScaleCalculationMode.RCEIL",
    formula=ScaleFormula.MULTIPLY,
    power_of_two=PowerOfTwo.CEIL,
)

DEEPSEEK_V3_1X128 = Recipe(
    name="deepseek_v3_1x128",
    source="DeepSeek-V3 inference/kernel.py act_quant (Triton): no floor, so an all-zero group is 0/0",
    block=GROUP_128,
    formula=ScaleFormula.DIVIDE,
    code=CodeFormula.DIVIDE,
    approximate=True,
)

_REGISTRY: Final[Mapping[str, Recipe]] = MappingProxyType(
    {value.name: value for value in list(globals().values()) if isinstance(value, Recipe)}
)
