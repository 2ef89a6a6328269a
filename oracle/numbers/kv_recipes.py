"""Scale recipes of KV caches: tiles of 128 in MLA rows and index keys, blocks of 16 in NVFP4 pages.

NaN elements do not enter an amax here (``fmaxf``). Not covered: scales that the caller gives; their codes are one
division (:mod:`oracle.routines.kv_cache`).
"""

from __future__ import annotations

from typing import Final

from oracle.numbers.formats import E4M3FN
from oracle.numbers.mx_recipes import NVFP4
from oracle.numbers.recipes import (
    VLLM_GROUP,
    AmaxScan,
    CodeFormula,
    GlobalOrder,
    NanCode,
    PowerOfTwo,
    Recipe,
    ScaleFormula,
    like,
    triton_on_sm90,
)
from oracle.numbers.scaling import E4M3_1X128_UE8M0, E4M3_TOKEN, Block, ScaleFormat, Scaling

FLT_MIN: Final = 2.0**-126
_VLLM = "vLLM csrc/libtorch_stable/cache_kernels.cu @00eb0c8, as in 0.20.2"
_FLASHINFER = "FlashInfer include/flashinfer/page.cuh nvfp4_append_quantize_block (0.6.18.post1)"
VLLM_DS_MLA = like(
    VLLM_GROUP,
    "vllm_ds_mla",
    f"{_VLLM}, concat_and_cache_ds_mla_kernel",
    amax_floor=0.0,
    scale_floor=FLT_MIN,
    nan_code=NanCode.NAN,
)
VLLM_DS_MLA_UE8M0 = like(
    VLLM_DS_MLA,
    "vllm_ds_mla_ue8m0",
    "vLLM PR 49435: readers shorten the scale to bfloat16 or E8M0",
    scaling=E4M3_1X128_UE8M0,
    power_of_two=PowerOfTwo.EXP2_CEIL_LOG2,
    inf_byte=None,
    scale_floor=1e-4,
)
VLLM_INDEXER = like(
    VLLM_DS_MLA, "vllm_indexer", f"{_VLLM}, indexer_k_quant_and_cache_kernel", amax_floor=1e-4, scale_floor=0.0
)
VLLM_INDEXER_UE8M0 = like(
    VLLM_INDEXER, "vllm_indexer_ue8m0", scaling=E4M3_1X128_UE8M0, power_of_two=PowerOfTwo.EXP2_CEIL_LOG2, inf_byte=None
)

_BITS = "the kernel for 16-bit values takes the bits of float16 ones as numbers: a scale of up to 141, most codes lost"
VLLM_DS_MLA_FLOAT16 = like(VLLM_DS_MLA, "vllm_ds_mla_float16", scan=AmaxScan.FLOAT16_BITS, fault=_BITS)
VLLM_INDEXER_FLOAT16 = like(VLLM_INDEXER, "vllm_indexer_float16", scan=AmaxScan.FLOAT16_BITS, fault=_BITS)
VLLM_INDEXER_UE8M0_FLOAT16 = like(
    VLLM_INDEXER_UE8M0, "vllm_indexer_ue8m0_float16", scan=AmaxScan.FLOAT16_BITS, fault=_BITS
)

# Without a floor: a tile of zeros has the scale 0, under which any code stands for 0. Triton's clamp makes a number of
# NaN; which one is not measured, so both ends are rows.
TORCH_K_CACHE = like(
    VLLM_DS_MLA,
    "torch_k_cache",
    "SGLang's formula in IEEE operations, codes 0 under a scale of 0",
    scale_floor=0.0,
    code=CodeFormula.RECIPROCAL,
    zero_codes=True,
)
_SGLANG = "SGLang kernels/ops/quantization/dsa_quant_k_cache.py (0.5.23, Triton)"
SGLANG_K_CACHE = like(
    TORCH_K_CACHE, "sglang_k_cache", _SGLANG, zero_codes=False, nan_code=NanCode.NEGATIVE_MAX, approximate=True
)
SGLANG_K_CACHE_POSITIVE = like(SGLANG_K_CACHE, "sglang_k_cache_positive", nan_code=NanCode.POSITIVE_MAX)
(SGLANG_K_CACHE_SM90,) = triton_on_sm90(SGLANG_K_CACHE_POSITIVE)

# Triton: a scale for each token and head. NaN as of SGLang's.
TORCH_TOKEN_HEAD = like(
    TORCH_K_CACHE,
    "torch_token_head",
    "vLLM's formula of the row below in IEEE operations",
    scaling=E4M3_TOKEN,
    scale_floor=1e-6,
    zero_codes=False,
)
_TOKEN_HEAD = "vLLM v1/attention/ops/triton_reshape_and_cache_flash.py _reshape_cache_per_token_head (0.20.2)"
VLLM_TOKEN_HEAD = like(
    TORCH_TOKEN_HEAD, "vllm_token_head", _TOKEN_HEAD, nan_code=NanCode.NEGATIVE_MAX, approximate=True
)
VLLM_TOKEN_HEAD_POSITIVE = like(VLLM_TOKEN_HEAD, "vllm_token_head_positive", nan_code=NanCode.POSITIVE_MAX)
TORCH_V4_CACHE = like(
    VLLM_INDEXER_UE8M0,
    "torch_v4_cache",
    "vLLM's formula of the row below in IEEE operations",
    scaling=Scaling(E4M3FN, Block(1, 64), ScaleFormat.UE8M0),
)
_V4 = "vLLM v1/attention/ops/deepseek_v4_ops/cache_utils.py quantize_and_insert_k_kernel (0.20.2)"
VLLM_V4_CACHE = like(TORCH_V4_CACHE, "vllm_v4_cache", _V4, nan_code=NanCode.NEGATIVE_MAX, approximate=True)
VLLM_V4_CACHE_POSITIVE = like(VLLM_V4_CACHE, "vllm_v4_cache_positive", nan_code=NanCode.POSITIVE_MAX)

# Under the global scale g, which multiplies: block scale E4M3(a / (6 g)), codes of x * (1 / (scale * g)).
TORCH_NVFP4_CACHE = Recipe(
    "torch_nvfp4_cache",
    f"{_FLASHINFER}, IEEE divisions",
    NVFP4,
    ScaleFormula.DIVIDE,
    CodeFormula.RECIPROCAL,
    global_order=GlobalOrder.TOP,
    zero_codes=True,
    nan_code=NanCode.ZERO,
)
FLASHINFER_NVFP4_CACHE = like(
    TORCH_NVFP4_CACHE, "flashinfer_nvfp4_cache", f"{_FLASHINFER} under -use_fast_math", approximate=True
)

ROWS: Final = tuple(value for value in globals().values() if isinstance(value, Recipe) and value is not VLLM_GROUP)
