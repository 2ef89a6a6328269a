"""Rows of the recipes for MX and NVFP4: what each library computes for blocks of 32 and 16.

*MX* (OCP Microscaling Formats 1.0): blocks of 32 elements, a scale ``2^(byte - 127)``. With ``amax = 2^k S``,
``1 <= S < 2``, the scale is ``2^(k - emax)`` or one binade more. The published roundings differ in where they step:

    FLOOR   never; elements saturate where S > max / 2^emax          OCP 6.3, torchao
    RCEIL   S > max / 2^emax, so that nothing saturates              NVIDIA's recipe: all device kernels
    CEIL    S > 1                                                    torchao
    EVEN    S >= 2 - 2^-(f + 1), f fraction bits of the element      torchao

*NVFP4*: blocks of 16 codes of E2M1, an E4M3 scale, and a float32 scale of the tensor, given as
:class:`oracle.numbers.recipes.GlobalOrder` says.

Sources are named by row; FlashInfer is fb28d7242, torchao 36027d8, TransformerEngine d0067d0, modelopt 0ad6e5f, vLLM
07c13c7, DeepGEMM 54e2261. Where a kernel multiplies by ``rcp.approx`` the row says DEVICE_RECIPROCAL or
``approximate``: the sets of :mod:`oracle.bounds.quantiser` hold what an ulp of it can move. The random Hadamard
transform is no recipe but what precedes one (:mod:`oracle.truth.hadamard`). Not covered: error sums of 4over6 in half
precision bit for bit.
"""

from __future__ import annotations

from typing import Final

from oracle.numbers import recipes as R
from oracle.numbers.formats import E2M1, E2M3, E3M2, E4M3FN, E5M2, MXINT8, Format
from oracle.numbers.scaling import GROUP_16, GROUP_32, GROUP_128, Block, ScaleFormat, Scaling

NVFP4: Final = Scaling(E2M1, GROUP_16, ScaleFormat.E4M3, global_scale=True)
NVFP4_2D: Final = Scaling(E2M1, Block(16, 16), ScaleFormat.E4M3, global_scale=True)
ELEMENTS: Final = {
    "mxfp8_e4m3": E4M3FN,
    "mxfp8_e5m2": E5M2,
    "mxfp6_e3m2": E3M2,
    "mxfp6_e2m3": E2M3,
    "mxfp4": E2M1,
    "mxint8": MXINT8,
}
"""The element formats of OCP MX, by the names of rows."""
MODES: Final = {
    "floor": (R.ScaleFormula.DIVIDE, R.PowerOfTwo.AMAX_FLOOR),
    "rceil": (R.ScaleFormula.MULTIPLY, R.PowerOfTwo.CEIL),
    "ceil": (R.ScaleFormula.DIVIDE, R.PowerOfTwo.AMAX_CEIL),
    "even": (R.ScaleFormula.DIVIDE, R.PowerOfTwo.AMAX_EVEN),
}
"""The published roundings of a shared scale."""


def mx(element: Format) -> Scaling:
    """The scaling of an MX format."""
    return Scaling(element, GROUP_32, ScaleFormat.UE8M0)


def _nan(element: Format) -> R.NanCode:
    return R.NanCode.NAN if element.has_nan else R.NanCode.POSITIVE_MAX


_TO_MX = {mode: getattr(R, f"TORCHAO_MX_{mode.upper()}") for mode in MODES}  # the rows of E4M3
TORCHAO: Final = {(E4M3FN, mode): row for mode, row in _TO_MX.items()} | {
    (element, mode): R.like(_TO_MX[mode], f"torchao_{name}_{mode}", scaling=mx(element), nan_code=_nan(element))
    for name, element in ELEMENTS.items()
    for mode in MODES
    if element not in (E4M3FN, MXINT8)
}
"""torchao's ``to_mx`` by element and rounding. What it codes under a NaN scale in a format without NaN is undefined."""
TORCHAO_0_18: Final = {
    (element, mode): R.like(
        row,
        row.name.replace("torchao_", "torchao_0_18_"),
        f"{row.source}, release 0.18.0",
        **(
            dict(formula=R.ScaleFormula.DIVIDE, inf_byte=254, unit_at_byte_0=True)
            if mode == "rceil"
            else dict(inf_byte=255 - element.emax, divides_by_bits=True)
        ),
    )
    for (element, mode), row in TORCHAO.items()
}
"""The release 0.18.0: under the byte 0 RCEIL codes ``x`` itself, which loses most blocks of so small an amax, the
others half of ``x / 2^-127``; an infinite amax gives a number. RCEIL goes through ``log2``, which for a float32 amax
just above a power of two may give the lower byte."""
OCP_MXINT8 = R.Recipe(
    "ocp_mxint8_floor",
    "OCP Microscaling Formats 1.0, 6.3; negative codes stop at -127",
    mx(MXINT8),
    R.ScaleFormula.DIVIDE,
    R.CodeFormula.RECIPROCAL,
    power_of_two=R.PowerOfTwo.AMAX_FLOOR,
    nan_amax=R.NanAmax.PROPAGATED,
    nan_code=R.NanCode.POSITIVE_MAX,
)

ROUNDS: Final = {
    "nearest": R.CodeRounding.NEAREST_AWAY,
    "even": R.CodeRounding.NEAREST_EVEN,
    "floor": R.CodeRounding.TRUNCATED,
}
_MICROXCALING = "microsoft/microxcaling @7bc4195 mx/mx_ops.py _quantize_mx of a float32 tensor, round="
MICROXCALING: Final = {
    (element, word): R.like(
        OCP_MXINT8 if element is MXINT8 else _TO_MX["floor"],
        f"microxcaling_{name}_{word}",
        f"{_MICROXCALING}{word!r}",
        scaling=mx(element),
        nan_code=_nan(element),
        inf_byte=255,
        rounding=rounding,
        zero_sign=R.ZeroSign.SMALL,
    )
    for name, element in ELEMENTS.items()
    for word, rounding in ROUNDS.items()
}
"""microxcaling's values (it gives no codes and no bytes). Ties of its default go away from zero, "floor" truncates
magnitudes, -0 becomes 0. It goes through a float32 ``log2``, which rounds up just below a power of two: the scale of a
block whose amax lies within 2^-22 of the next power is one binade higher there, as no row has it."""
_MODELOPT = "Model-Optimizer 0.47 modelopt/torch/quantization/qtensor"
MODELOPT_MXFP8 = R.Recipe(
    "modelopt_mxfp8",
    f"{_MODELOPT}/mxfp8_tensor.py; finite values (a block with a NaN has the byte 0 there)",
    mx(E4M3FN),
    R.ScaleFormula.DIVIDE,
    R.CodeFormula.RECIPROCAL,
    power_of_two=R.PowerOfTwo.EXP2_CEIL_LOG2,
    scale_floor=2.0**-127,
    nan_amax=R.NanAmax.PROPAGATED,
)
MODELOPT_MXFP4 = R.Recipe(
    "modelopt_mxfp4",
    f"{_MODELOPT}/mxfp4_tensor.py; finite values. Ties go toward zero, a zero has the code 8",
    mx(E2M1),
    R.ScaleFormula.DIVIDE,
    R.CodeFormula.DIVIDE,
    power_of_two=R.PowerOfTwo.EXP2_CEIL_LOG2,
    scale_floor=2.0**-127,
    nan_amax=R.NanAmax.PROPAGATED,
    nan_code=R.NanCode.POSITIVE_MAX,
    rounding=R.CodeRounding.NEAREST_ZERO,
    zero_sign=R.ZeroSign.ZEROS,
)
COMPRESSED_TENSORS_MXFP4 = R.like(
    TORCHAO[E2M1, "even"],
    "compressed_tensors_mxfp4",
    "compressed-tensors 0.20 quantization/utils/mxfp_utils.py generate_mx_scales, pack_fp4_to_uint8; finite values",
    zero_sign=R.ZeroSign.SMALL,
)

# FlashInfer, MX. Kernels leave NaN out of the amax. Those in CUDA clamp a NaN element to the largest value; those of
# CuTe-DSL take the constant 1/max, round by exponent bits (infinity: 254) and multiply by 0 under the bytes 0 and 254.
_QUANTIZATION = "FlashInfer flashinfer/quantization"
FLASHINFER_CUTE_MXFP8 = R.like(
    R.FLASHINFER_MXFP8_1X32,
    "flashinfer_cute_mxfp8",
    f"{_QUANTIZATION} mxfp8_quantize, CuTe-DSL",
    formula=R.ScaleFormula.MULTIPLY,
    nan_byte=254,
    nan_code=R.NanCode.NAN,
)
FLASHINFER_HOST_MXFP8 = R.like(
    R.FLASHINFER_MXFP8_1X32,
    "flashinfer_host_mxfp8",
    f"{_QUANTIZATION} mxfp8_quantize of a CPU tensor",
    formula=R.ScaleFormula.MULTIPLY,
    inf_byte=255,
    nan_code=R.NanCode.NAN,
    zero_codes=False,
    unit_at_byte_0=True,
    inverse_flushed=False,
)
TE_MXFP8_E5M2 = R.like(R.TE_MXFP8_1X32, "te_mxfp8_e5m2_1x32", scaling=mx(E5M2))
FLASHINFER_MXFP4 = R.Recipe(
    "flashinfer_mxfp4",
    "FlashInfer quantization_utils.cuh cvt_warp_fp16_to_fp4 with UE8M0 scales",
    mx(E2M1),
    R.ScaleFormula.DEVICE_RECIPROCAL,
    R.CodeFormula.RECIPROCAL,
    power_of_two=R.PowerOfTwo.CEIL,
    unit_at_byte_0=True,
    inverse_flushed=True,
    nan_code=R.NanCode.POSITIVE_MAX,
)
FLASHINFER_CUTE_MXFP4 = R.like(
    FLASHINFER_MXFP4,
    "flashinfer_cute_mxfp4",
    f"{_QUANTIZATION} mxfp4_quantize, CuTe-DSL",
    formula=R.ScaleFormula.MULTIPLY,
    nan_byte=254,
    unit_at_byte_0=False,
    zero_codes=True,
)
VLLM_MXFP4_EXPERTS = R.like(
    TORCHAO[E2M1, "even"],
    "vllm_mxfp4_experts",
    "vLLM csrc/libtorch_stable/quantization/fp4/mxfp4_experts_quant.cu: codes 0 under byte 0",
    nan_amax=R.NanAmax.IGNORED,
    inf_byte=254,
    zero_codes=True,
)

FLASHINFER_CUTILE_MXFP8 = R.like(
    FLASHINFER_HOST_MXFP8,
    "flashinfer_cutile_mxfp8",
    f"{_QUANTIZATION} mxfp8_grouped_quantize, cuTile: through log2",
    formula=R.ScaleFormula.DIVIDE,
    power_of_two=R.PowerOfTwo.EXP2_CEIL_LOG2,
    inf_byte=254,
    unit_at_byte_0=False,
    scale_floor=2.0**-127,
)

# NVFP4, global scale given as e = 2688 / amax. rcp.approx three times: of 6, of e, and of the product of the scales.
FLASHINFER_NVFP4 = R.Recipe(
    "flashinfer_nvfp4",
    "FlashInfer quantization_utils.cuh cvt_warp_fp16_to_fp4; TensorRT-LLM",
    NVFP4,
    R.ScaleFormula.DEVICE_RECIPROCAL,
    R.CodeFormula.RECIPROCAL,
    global_order=R.GlobalOrder.ENCODE_AFTER,
    zero_blocks=True,
    nan_code=R.NanCode.POSITIVE_MAX,
    approximate=True,
)
FLASHINFER_CUTE_NVFP4 = R.like(
    FLASHINFER_NVFP4,
    "flashinfer_cute_nvfp4",
    f"{_QUANTIZATION} nvfp4_quantize, CuTe-DSL: codes 0 under a scale of 0",
    zero_codes=True,
)
VLLM_NVFP4 = R.like(FLASHINFER_CUTE_NVFP4, "vllm_nvfp4", "vLLM csrc nvfp4_utils.cuh cvt_warp_fp16_to_fp4")
FLASHINFER_NVFP4_EXACT = R.like(
    FLASHINFER_NVFP4,
    "flashinfer_nvfp4_exact",
    "FlashInfer cvt_warp_fp16_to_fp4 under FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
    formula=R.ScaleFormula.MULTIPLY,
    global_order=R.GlobalOrder.ENCODE_FIRST,
    inverse_limit=True,
    approximate=False,
)
TRTLLM_NVFP4 = R.like(
    FLASHINFER_NVFP4,
    "trtllm_nvfp4",
    "TensorRT-LLM quantization.cuh @0193dbd: codes 0 where the scale flushes to 0",
    muted_below=2.0**-126,
)
TE_NVFP4 = R.like(FLASHINFER_NVFP4_EXACT, "te_nvfp4", "TransformerEngine core_nvfp4.cuh, quantize_transpose_nvfp4.cuh")

TE_NVFP4_REFERENCE = R.like(
    TE_NVFP4,
    "te_nvfp4_reference",
    "TransformerEngine custom_recipes/reference_nvfp4.py, torch: -0 is coded 0",
    nan_amax=R.NanAmax.PROPAGATED,
    nan_code=R.NanCode.ZERO,
    zero_sign=R.ZeroSign.SMALL,
)
TE_NVFP4_2D_REFERENCE = R.like(
    TE_NVFP4_REFERENCE, "te_nvfp4_2d_reference", f"{TE_NVFP4_REFERENCE.source}; one scale for 16x16", scaling=NVFP4_2D
)
TE_NVFP4_2D = R.like(TE_NVFP4, "te_nvfp4_2d", f"{TE_NVFP4.source}: weights, one scale for 16x16", scaling=NVFP4_2D)
TE_NVFP4_STOCHASTIC = R.like(
    TE_NVFP4,
    "te_nvfp4_stochastic",
    "TransformerEngine util/ptx.cuh mul_cvt_*_with_stochastic_rounding",
    rounding=R.CodeRounding.STOCHASTIC,
)
NVFP4_SEEDED = R.like(
    TE_NVFP4_STOCHASTIC,
    "nvfp4_seeded",
    "stochastic_round_fp4_e2m1 of util/ptx.cuh with Philox4x32-10 bytes in the order of the elements",
    rounding=R.CodeRounding.SEEDED,
)
_FOUR_OVER_SIX = "nvfp4 4over6: the scale or 1.5 of it, by the smaller"
FLASHINFER_4OVER6: Final = {
    error: R.like(
        FLASHINFER_NVFP4_EXACT,
        f"flashinfer_nvfp4_4over6_{error.name.lower()}",
        f"FlashInfer cvt_warp_fp16_to_fp4, exact; TransformerEngine quantize_4over6: {_FOUR_OVER_SIX} {error}",
        formula=R.ScaleFormula.DIVIDE,
        global_order=R.GlobalOrder.ENCODE_AFTER,
        candidates=error,
    )
    for error in R.Candidates
}
TE_4OVER6_REFERENCE: Final = {
    error: R.like(
        row,
        row.name.replace("flashinfer", "te") + "_reference",
        f"{TE_NVFP4_REFERENCE.source}; {_FOUR_OVER_SIX} {error}",
        nan_amax=R.NanAmax.PROPAGATED,
        nan_code=R.NanCode.ZERO,
        zero_sign=R.ZeroSign.SMALL,
    )
    for error, row in FLASHINFER_4OVER6.items()
}
FLASHINFER_4OVER6_FAST: Final = {
    error: R.like(
        FLASHINFER_NVFP4,
        f"flashinfer_nvfp4_4over6_{error.name.lower()}_fast",
        f"FlashInfer cvt_warp_fp16_to_fp4, {_FOUR_OVER_SIX} {error}",
        candidates=error,
    )
    for error in R.Candidates
}

# NVFP4 of FP8: x is dequantised to float16 first; codes multiply by e R(scale).
FLASHINFER_NVFP4_OF_FP8 = R.like(
    FLASHINFER_NVFP4,
    "flashinfer_nvfp4_of_fp8",
    "FlashInfer quantization_utils.cuh cvt_warp_fp8_to_fp4",
    muted_below=2.0**-126,
)

# NVFP4, global scale given as g = amax / 2688.
FLASHINFER_NVFP4_INVERSED = R.like(
    FLASHINFER_NVFP4,
    "flashinfer_nvfp4_inversed",
    "FlashInfer fp4_quantize with is_global_scale_inversed",
    global_order=R.GlobalOrder.AFTER,
)
TORCHAO_NVFP4 = R.Recipe(
    "torchao_nvfp4",
    "torchao nvfp4_tensor.py nvfp4_quantize, two levels",
    NVFP4,
    R.ScaleFormula.DIVIDE,
    R.CodeFormula.SPLIT,
    published_floor=2.0**-6,
    nan_amax=R.NanAmax.PROPAGATED,
    nan_code=R.NanCode.POSITIVE_MAX,
)
TORCHAO_NVFP4_ONE_LEVEL = R.like(
    TORCHAO_NVFP4,
    "torchao_nvfp4_one_level",
    "torchao nvfp4_tensor.py nvfp4_quantize, one level",
    scaling=Scaling(E2M1, GROUP_16, ScaleFormat.E4M3),
    code=R.CodeFormula.RECIPROCAL,
)
MODELOPT_NVFP4 = R.Recipe(
    "modelopt_nvfp4",
    "Model-Optimizer nvfp4_tensor.py; a scale of 0 becomes 1 before its cast (the library codes -0 as 0, the row -0)",
    NVFP4,
    R.ScaleFormula.DIVIDE,
    R.CodeFormula.DIVIDE,
    global_order=R.GlobalOrder.TOP,
    published_zero=1.0,
    nan_amax=R.NanAmax.PROPAGATED,
    nan_code=R.NanCode.POSITIVE_MAX,
)
MODELOPT_0_47_NVFP4 = R.like(
    MODELOPT_NVFP4,
    "modelopt_0_47_nvfp4",
    f"{_MODELOPT}/nvfp4_tensor.py: a scale of 0 becomes 1, the least is 2^-9",
    published_floor=2.0**-9,
    zero_sign=R.ZeroSign.SMALL,
)

# DeepGEMM: codes of E2M1 under a float32 scale or a power of two. Ties go toward zero, no code is -0. A NaN quotient,
# which an infinite element under an infinite scale has too, is coded 0; by the release of April 2026 it is coded 6.
DEEPGEMM_FP4 = R.Recipe(
    "deepgemm_fp4",
    "DeepGEMM deep_gemm/utils/math.py per_token_cast_to_fp4",
    Scaling(E2M1, GROUP_128),
    R.ScaleFormula.DIVIDE,
    R.CodeFormula.RECIPROCAL,
    amax_floor=1e-4,
    nan_amax=R.NanAmax.PROPAGATED,
    nan_code=R.NanCode.ZERO,
    rounding=R.CodeRounding.NEAREST_ZERO,
    zero_sign=R.ZeroSign.DROPPED,
)
DEEPGEMM_FP4_UE8M0 = R.like(
    DEEPGEMM_FP4,
    "deepgemm_fp4_ue8m0",
    scaling=Scaling(E2M1, GROUP_128, ScaleFormat.UE8M0),
    power_of_two=R.PowerOfTwo.CEIL,
    byte_low=1,
    inf_byte=254,
    nan_byte=254,
)
_BUCKETS = "DeepGEMM @7f2a703 (26/04), deep_gemm/utils/math.py: torch.bucketize puts NaN behind the last boundary"
DEEPGEMM_2604_FP4 = R.like(DEEPGEMM_FP4, "deepgemm_2604_fp4", _BUCKETS, nan_code=R.NanCode.POSITIVE_MAX)
DEEPGEMM_2604_FP4_UE8M0 = R.like(
    DEEPGEMM_FP4_UE8M0, "deepgemm_2604_fp4_ue8m0", _BUCKETS, nan_code=R.NanCode.POSITIVE_MAX
)

ROWS: Final = tuple(
    row
    for row in (
        *TORCHAO.values(),
        *TORCHAO_0_18.values(),
        *MICROXCALING.values(),
        *FLASHINFER_4OVER6.values(),
        *FLASHINFER_4OVER6_FAST.values(),
        *TE_4OVER6_REFERENCE.values(),
        *(value for value in list(globals().values()) if isinstance(value, R.Recipe)),
    )
    if row.name not in {known.name for known in _TO_MX.values()}
)
