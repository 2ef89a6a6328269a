"""Triton libraries that descend from DeepSeek-V3's inference code: unsloth, COAT, LMDeploy, FBGEMM GenAI, gemlite.

Products of block-scaled FP8 and their quantisers. An autotuned kernel chooses its tile by timing, so that two runs may
differ in bits.
"""

from __future__ import annotations

import torch

from oracle.bindings.binding import bind
from oracle.bindings.forms import LANES

E4M3, BF16, HALVES = torch.float8_e4m3fn, torch.bfloat16, (torch.bfloat16, torch.float16)
FBGEMM, LMDEPLOY, UNSLOTH, COAT = "fbgemm-gpu-genai 1.9.0", "lmdeploy 0.18.0", "unsloth 2026.10.9", "fp8-coat 1.0.11"
GEMLITE = "gemlite 0.6.0.post2"
GEMM, CUDA = "fbgemm_gpu.experimental.gemm.triton_gemm", "lmdeploy.pytorch.kernels.cuda"
GROUPS, CAST, RECIPE = "per_token_group_quant_fp8", "per_block_cast_to_fp8", "lmdeploy_1x128"
OPERANDS = {"a": E4M3, "b": E4M3, "c": None}
ROWS = {"column_major_scales": False, "tma_aligned_scales": False, "use_ue8m0": False, "eps": 1e-10}
TOKENS = {"scale": None, "num_token_padding": None, "use_per_token_if_dynamic": True}
SQUARE = "block_size[0] == block_size[1] == 128 and x.shape[0] % 128 == 0 and x.shape[1] % 128 == 0"
DEEPSEEK = "(A, B, As, Bs, block_size, output_dtype={})"
"""Parameters of the product that SGLang wrote and others took."""
_LMDEPLOY = {"dense": ("*",), "release": LMDEPLOY}
_FBGEMM = {"dense": ("*",), "release": FBGEMM, "project": "fbgemm"}

BINDINGS = (
    bind(
        "gemlite.quant_utils:scale_activations_per_block",
        GROUPS,
        "(x, torch.float8_e4m3fn)",
        "(tensor, w_dtype, block_size=BLOCK_QUANT_SIZE)",
        takes=ROWS | {"group_size": 128},
        where="x.dim() == 2",
        numerics="gemlite_1x128",
        dense=("*",),
        release=GEMLITE,
    ),
    bind(
        "gemlite.quant_utils:scale_activations_per_token",
        "scaled_fp8_quant",
        "(x, torch.float8_e4m3fn)",
        "(tensor, w_dtype, fp32_scale=True)",
        takes=TOKENS | {"scale_ub": None},
        numerics="gemlite_token",
        dense=("*",),
        release=GEMLITE,
    ),
    bind(
        f"{CUDA}.blocked_fp8_gemm_gluon:fp8_gemm_nt",
        "fp8_gemm_nt",
        "((a, lanes(a_scale)), (b, b_scale), out, None)",
        "(a, b, d, c, *, num_sms=None)",
        takes=OPERANDS | {"out_dtype": BF16},
        functions=LANES,
        ignores=("num_sms",),
        domain="n % 64 == 0, k % 128 == 0",
        **_LMDEPLOY,
    ),
    bind(
        f"{GEMM}.grouped_gemm:grouped_gemm_fp8_rowwise",
        "scaled_grouped_mm",
        "(a, stacked(b, offsets), sizes(offsets), scale_a.squeeze(1), flat(scale_b, offsets))",
        "(x, w, m_sizes, x_scale, w_scale, use_fast_accum=True, *, _use_warp_specialization=True, "
        "_output_tensor=None, _scatter_add_indices=None)",
        takes={"a": E4M3, "b": E4M3, "out_dtype": BF16, "offsets": torch.int32},
        functions={
            "sizes": (lambda ends: ends.diff(prepend=ends.new_zeros(1)), lambda sizes: sizes.cumsum(0).to(torch.int32)),
            "stacked": (lambda b, _: b.flatten(0, 1), lambda b, ends: b.unflatten(0, (len(ends), -1))),
            "flat": (lambda scale, _: scale.flatten(), lambda scale, ends: scale.view(len(ends), -1)),
        },
        ignores=("use_fast_accum", "_use_warp_specialization"),
        domain="k % 64 == 0, n % 8 == 0",
        **_FBGEMM,
    ),
    bind(
        "unsloth.kernels.fp8:w8a8_block_fp8_matmul_triton",
        "fp8_gemm_nt",
        "(a, b, a_scale, b_scale, [128, 128], out_dtype)",
        DEEPSEEK.format("torch.float32"),
        takes=OPERANDS,
        dense=("*",),
        release=UNSLOTH,
    ),
    bind(
        "unsloth.kernels.fp8:act_quant",
        GROUPS,
        "(x, group_size)",
        "(x, block_size=128)",
        takes=ROWS,
        numerics="unsloth_1x128",
        dense=("*",),
        release=UNSLOTH,
    ),
    bind(
        "coat.activation.real_quantization._quantize:fp8_quantize",
        GROUPS,
        "(x, group_size, 'E4M3', torch.float32)",
        "(x, QB, fp8type, scale_dtype=torch.bfloat16)",
        takes=ROWS | {"group_size": (16, 32, 64, 128)},
        where="x.dim() == 2 and x.shape[0] % group_size == 0",  # loads and stores have no mask
        domain="m % 128 == 0",
        numerics="coat_1x128",
        dense=("*",),
        release=COAT,
    ),
    bind(
        "coat.activation.real_quantization._quantize_perblock:fp8_quantize_perblock",
        CAST,
        "(x, 128, 'E4M3', torch.float32)",
        "(x, QB, fp8type, scale_dtype=torch.bfloat16)",
        takes={"use_ue8m0": False},
        where=SQUARE,
        domain="m % 128 == 0, k % 128 == 0",
        numerics="coat_128x128",
        dense=("*",),
        release=COAT,
    ),
    bind(
        f"{CUDA}.blocked_gemm_fp8:blocked_gemm_fp8",
        "fp8_gemm_nt",
        "(a, a_scale, b.t(), b_scale.t(), out_dtype)",
        "(A, A_scale, B, B_scale, out_dtype=torch.float16)",
        takes=OPERANDS | {"out_dtype": HALVES},
        domain="n % 128 == 0, k % 128 == 0",
        **_LMDEPLOY,
    ),
    *(
        bind(
            f"{CUDA}.blocked_gemm_fp8:{name}",
            GROUPS,
            "(x, group_size)",
            f"(A, group_size, dtype=torch.float8_e4m3fn, {more}scale_fmt=None, launch_pdl=False)",
            takes=ROWS,
            ignores=("launch_pdl",),
            numerics=RECIPE,
            **_LMDEPLOY,
        )
        for name, more in (("quant_fp8", "trans_scale=False, "), ("per_token_group_quant_fp8", ""))
    ),
    bind(
        f"{CUDA}.w8a8_triton_kernels:per_token_quant_int8",
        "scaled_fp8_quant",
        "(x, 1e-07, torch.float8_e4m3fn)",
        "(x, eps, quant_dtype=torch.int8)",
        takes=TOKENS | {"scale_ub": None},
        numerics="lmdeploy_token",
        **_LMDEPLOY,
    ),
    bind(
        f"{CUDA}.activation:silu_and_mul_masked_post_quant_fwd",
        "silu_and_mul_masked_post_quant",
        "(x, q, scale, group_size, masked_m)",
        "(input, output, output_scale, quant_group_size, masked_m)",
        takes={
            "x": HALVES,
            "masked_m": torch.int32,
            "rounding": "each",
            "use_ue8m0": False,
            "gemm1_alpha": None,
            "gemm1_clamp_limit": None,
        },
        numerics=RECIPE,
        **_LMDEPLOY,
    ),
    bind(
        f"{GEMM}.fp8_gemm:matmul_fp8_row",
        "cutlass_scaled_mm",
        "(a, b, a_scale.squeeze(1), b_scale.squeeze(0), bias)",
        "(a, b, a_scale, b_scale, bias=None, dot_out_dtype=None, allow_tf32=True, fp8_fast_accum=True, "
        "imprecise_acc=False, tma_persistent=True, no_use_persistent=None, use_persistent=None, "
        "use_warp_specialization=False)",
        takes={"a": E4M3, "b": E4M3, "out_dtype": BF16},
        where="a_scale.shape == (a.shape[0], 1) and b_scale.shape == (1, b.shape[0]) "
        "and (bias is None or bias.dtype == torch.float32)",
        ignores=("fp8_fast_accum", "tma_persistent", "no_use_persistent", "use_persistent", "use_warp_specialization"),
        **_FBGEMM,
    ),
    bind(
        f"{GEMM}.fp8_gemm:matmul_fp8_block",
        "gemm_fp8_nt_groupwise",
        "(a, b, a_scale, b_scale, 128, 128, 128)",
        "(a, b, a_scale, b_scale, scale_block_m=256, scale_block_n=256, scale_block_k=256, dot_out_dtype=None, "
        "allow_tf32=True, fp8_fast_accum=True)",
        takes={"a": E4M3, "b": E4M3, "out_dtype": BF16},
        where="a_scale.shape[0] == -(-a.shape[0] // 128) and a.shape[0] != 1",
        ignores=("fp8_fast_accum",),
        **_FBGEMM,
    ),
    bind(
        f"{GEMM}.fp8_gemm:triton_quantize_fp8_row",
        "scaled_fp8_quant",
        "(x, scale_ub) -> q, scale.squeeze(1)",
        "(a, scale_ub=None, zero_start_index_M=None, align_rows_to=None)",
        takes=TOKENS,
        numerics="fbgemm_row",
        **_FBGEMM,
    ),
    bind(
        f"{GEMM}.fp8_gemm:triton_quantize_fp8_group",
        GROUPS,
        "(x, group_size)",
        "(x, group_size=128, scale_ub=None, m_sizes=None, k_major=True)",
        takes=ROWS,
        where="x.dim() == 2",
        numerics="fbgemm_group",
        **_FBGEMM,
    ),
    bind(
        f"{GEMM}.fp8_gemm:triton_quantize_fp8_block",
        CAST,
        "(x, block_size[0], block_size[1])",
        "(x, block_m=256, block_k=256, scale_ub=None, k_major=True)",
        takes={"use_ue8m0": False},
        numerics="fbgemm_block",
        **_FBGEMM,
    ),
)
