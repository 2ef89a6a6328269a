"""FlashInfer's Python functions: batched products, quantised RoPE, paged KV caches."""

from __future__ import annotations

import torch

from oracle.bindings.binding import bind

E4M3, HALVES = torch.float8_e4m3fn, (torch.bfloat16, torch.float16)
RELEASE = "flashinfer-python 0.6.18.post1"
ROPE = (
    "(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox=True, quantize_dtype=None, quant_scale_q=1.0, "
    "quant_scale_kv=1.0, q_rope_out=None, k_rope_out=None, q_nope_out=None, k_nope_out=None, enable_pdl=False"
)
"""The parameters that both have."""

BINDINGS = (
    bind(
        "flashinfer.gemm:bmm_fp8",
        "bmm_fp8",
        "(A, B, A_scale, B_scale, out_dtype)",
        "(A, B, A_scale, B_scale, dtype, out=None, backend='cublas')",
        takes={"out_dtype": HALVES},
        ignores=("backend",),
        release=RELEASE,
    ),
    *(
        bind(
            f"flashinfer.rope:{name}",
            name,
            "(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, torch.float8_e4m3fn, quant_scale_q, "
            "quant_scale_kv) -> q_rope, k_rope, q_nope, k_nope",
            f"{ROPE}{more})",
            ignores=("enable_pdl", "backend"),
            release=RELEASE,
        )
        for name, more in (("rope_quantize_fp8", ", backend='cuda'"), ("mla_rope_quantize_fp8", ""))
    ),
    bind(
        "flashinfer.page:append_paged_kv_cache",
        "append_paged_kv_cache",
        "(append_key, append_value, batch_indices, positions, (k_cache, v_cache), kv_indices, kv_indptr, "
        "kv_last_page_len, kv_layout)",
        "(append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, "
        "kv_last_page_len, kv_layout='NHD')",
        release=RELEASE,
    ),
    bind(
        "flashinfer.page:append_paged_mla_kv_cache",
        "append_paged_mla_kv_cache",
        "(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, "
        "kv_last_page_len)",
        "(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, "
        "kv_last_page_len)",
        release=RELEASE,
    ),
)
