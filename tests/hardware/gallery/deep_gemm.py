"""DeepGEMM, as sgl-deep-gemm distributes it: products of every form, layouts of scales, casts to FP4."""

from __future__ import annotations

from hardware.adapters import deep_gemm, deep_gemm_masked

from oracle.harness.gallery import Kernel, Project

from ._named import rows

FORMS = (
    "fp8_gemm_nn",
    "fp8_gemm_tn",
    "fp8_gemm_tt",
    "fp8_gemm_nt_1d1d",
    "fp8_gemm_nt_skip_head_mid",
    "fp8_einsum",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nn_contiguous",
    "k_grouped_fp8_gemm_nt_contiguous",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
)
LAYOUTS = ("get_col_major_tma_aligned_tensor", "get_mn_major_tma_aligned_packed_ue8m0_tensor")
PROJECT = Project(
    name="deep_gemm",
    distributions=("sgl-deep-gemm",),
    carried="its wheel and apache-tvm-ffi; it compiles at first use (2.5 s a kernel)",
    kernels=(
        Kernel("fp8_gemm_nt", "deep_gemm:fp8_gemm_nt", deep_gemm),
        Kernel(
            "fp8_m_grouped_gemm_nt_masked",
            "deep_gemm:fp8_m_grouped_gemm_nt_masked",
            deep_gemm_masked,
            domain="m % 128 == 0, n % 64 == 0, k % 128 == 0",
        ),
        *rows("libraries", "deep_gemm", FORMS, apart=" (through this package)", space="LAYER"),
        *rows("libraries", "deep_gemm_bare", LAYOUTS),
        *rows("mx_libraries", "deep_gemm_bare", ("get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",)),
        *rows("mx_libraries", "deep_gemm_math", ("per_token_cast_to_fp4", "cast_back_from_fp4")),
    ),
    compiles=300.0,
)
