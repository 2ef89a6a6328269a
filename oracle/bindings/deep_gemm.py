"""DeepGEMM, as the distributions deep_gemm and sgl-deep-gemm install it; casts to powers of two are off.

``expected_m`` and ``compiled_dims`` choose a configuration, ``disable_ue8m0_cast`` acts on sm100 alone.
"""

from __future__ import annotations

import torch

from oracle.bindings.binding import Binding, bind

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
RELEASE = "sgl-deep-gemm 0.1.4"
CHOSEN = ("compiled_dims", "disable_ue8m0_cast", "expected_m")
TAKES = {"a": E4M3, "b": E4M3, "out_dtype": BF16}
MATH, LAYOUT = "deep_gemm.utils.math", "deep_gemm"


def _product(name: str, *, contract: str = "", index: str = "", expected: str = "", domain: str = "") -> Binding:
    middle = "".join(f", {part}" for part in (index, expected) if part)
    parameters = f"(a, b, d{f', {index}' if index else ', c=None'}{', expected_m' if expected else ''}"
    return bind(
        f"deep_gemm:{name}",
        contract or name,
        f"((a, a_scale), (b, b_scale), out{middle}, disable_ue8m0_cast=True)",
        f"{parameters}, recipe=None, compiled_dims='nk', disable_ue8m0_cast=False)",
        takes=TAKES | ({index: torch.int32} if index else {}),
        ignores=CHOSEN,
        domain=domain or "n % 64 == 0, k % 128 == 0",
        release=RELEASE,
    )


BINDINGS = (
    *map(_product, ("fp8_gemm_nt", "fp8_gemm_nn", "fp8_gemm_tn", "fp8_gemm_tt")),
    *(_product(f"m_grouped_fp8_gemm_{form}_contiguous", index="m_indices") for form in ("nt", "nn")),
    _product(
        "fp8_m_grouped_gemm_nt_masked",
        index="masked_m",
        expected="a.shape[1]",
        domain="m % 128 == 0, n % 64 == 0, k % 128 == 0",  # a tile of rows is stored whole
    ),
    bind(
        "deep_gemm:fp8_mqa_logits",
        "fp8_mqa_logits",
        "(q, (k, k_scale), weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits)",
        "(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True)",
        release=RELEASE,
    ),
    *(
        bind(f"{LAYOUT}:{name}", name, "(scale)", "(sf)", release=RELEASE)
        for name in ("get_col_major_tma_aligned_tensor", "get_mn_major_tma_aligned_packed_ue8m0_tensor")
    ),
    *(
        bind(f"{MATH}:{name}", name, "(x, use_ue8m0)", "(x, use_ue8m0)", release=RELEASE)
        for name in ("per_token_cast_to_fp8", "per_channel_cast_to_fp8", "per_block_cast_to_fp8")
    ),
    bind(f"{MATH}:ceil_div", "ceil_div", "(x, y)", "(x, y)", release=RELEASE),
    bind(f"{MATH}:align", "align", "(x, y)", "(x, y)", release=RELEASE),
    bind(f"{MATH}:ceil_to_ue8m0", "ceil_to_ue8m0", "(x)", "(x)", release=RELEASE),
    bind("deep_gemm.testing:calc_diff", "calc_diff", "(x, y)", "(x, y)", release=RELEASE),
)
