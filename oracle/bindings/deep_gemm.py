"""DeepGEMM, as the distributions deep_gemm and sgl-deep-gemm install it; casts to powers of two are off.

``expected_m`` and ``compiled_dims`` choose a configuration, ``disable_ue8m0_cast`` acts on sm100 alone.
"""

from __future__ import annotations

import torch

from oracle.bindings.binding import Binding, bind

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
RELEASE = "sgl-deep-gemm 0.1.4.post1"
CHOSEN = ("compiled_dims", "disable_ue8m0_cast", "expected_m")
TAKES = {"a": E4M3, "b": E4M3, "out_dtype": BF16}
MATH, LAYOUT = "deep_gemm.utils.math", "deep_gemm.utils.layout"


CAST = "recipe=None, recipe_a=None, recipe_b=None, compiled_dims={dims!r}, disable_ue8m0_cast=False"
GROUPED = f"{CAST.format(dims='nk')}, use_psum_layout=False, ensure_zero_padding=True"


ALONG_K = {"nn": {"b"}, "tn": {"a", "b"}, "tt": {"a"}}
"""By the form of a product the operands whose last axis is not K: on sm90 K is nevertheless what lies without gaps."""


def _product(name: str, parameters: str, *more: str, domain: str = "n % 64 == 0, k % 128 == 0") -> Binding:
    """A product of FP8 operands; ``more``: what stands in its call behind the output."""
    along = next((operands for form, operands in ALONG_K.items() if f"_{form}" in name), ())
    a, b = (f"({x}{'.mT().contiguous().mT()' if x in along else ''}, {x}_scale)" for x in "ab")
    return bind(
        f"deep_gemm:{name}",
        name,
        f"({', '.join((a, b, 'out', *more))}, disable_ue8m0_cast=True)",
        f"(a, b, d, {parameters})",
        takes=TAKES | dict.fromkeys({"m_indices", "masked_m"} & {*more}, torch.int32),
        ignores=CHOSEN,
        dense=("*",),
        domain=domain,
        release=RELEASE,
    )


BINDINGS = (
    *(_product(f"fp8_gemm_{form}", f"c=None, {CAST.format(dims='')}") for form in ("nt", "nn", "tn", "tt")),
    _product(
        "m_grouped_fp8_gemm_nt_contiguous", f"grouped_layout, {GROUPED}, expected_m_for_psum_layout=None", "m_indices"
    ),
    _product("m_grouped_fp8_gemm_nn_contiguous", f"grouped_layout, {GROUPED}", "m_indices"),
    _product(
        "fp8_m_grouped_gemm_nt_masked",
        f"masked_m, expected_m, {CAST.format(dims='nk')}",
        "masked_m",
        "a.shape[1]",
        domain="m % 128 == 0, n % 64 == 0, k % 128 == 0",  # a tile of rows is stored whole
    ),
    bind(
        "deep_gemm:fp8_mqa_logits",
        "fp8_mqa_logits",
        "(q, (k, k_scale), weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits)",
        "(q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0)",
        where="q.shape[1] in (32, 64) and q.shape[2] in (32, 64, 128)",
        domain="h <= 64, d <= 128",
        dense=("*",),
        takes={"cu_seqlen_ks": torch.int32, "cu_seqlen_ke": torch.int32},
        release=RELEASE,
    ),
    *(
        bind(f"{LAYOUT}:{name}", contract, "(scale)", "(sf)", dense=("scale",), domain=domain, release=RELEASE)
        for name, contract, domain in (
            ("get_mn_major_tma_aligned_tensor", "get_col_major_tma_aligned_tensor", ""),
            # 48 rows of scales lie in the shared memory of a block, which has 227 KiB
            (*2 * ("get_mn_major_tma_aligned_packed_ue8m0_tensor",), "c <= 1210"),
        )
    ),
    *(
        bind(f"{MATH}:{name}", name, "(x, use_ue8m0)", f"(x, use_ue8m0, gran_k=128{more})", release=RELEASE)
        for name, more in (
            ("per_token_cast_to_fp8", ", use_packed_ue8m0=False"),
            ("per_channel_cast_to_fp8", ""),
            ("per_block_cast_to_fp8", ""),
        )
    ),
    *(
        bind(f"{MATH}:{name}", name, "(x, y)", "(x, y)", takes=dict.fromkeys("xy", torch.int64), release=RELEASE)
        for name in ("ceil_div", "align")
    ),
    bind(f"{MATH}:ceil_to_ue8m0", "ceil_to_ue8m0", "(x)", "(x)", release=RELEASE),
    bind("deep_gemm.testing.numeric:calc_diff", "calc_diff", "(x, y)", "(x, y)", release=RELEASE),
    bind(f"{MATH}:pack_ue8m0_to_int", "pack_ue8m0_to_int", "(x)", "(x)", dense=("*",), release=RELEASE),
    bind(
        f"{MATH}:unpack_ue8m0_from_int",
        "unpack_ue8m0_from_int",
        "(packed_sf)",
        "(packed_sf)",
        dense=("*",),
        release=RELEASE,
    ),
    *(
        bind(
            f"{module}:{name}",
            name,
            "((l1, l1_sf), (l2, l2_sf)) -> (l1, l1_sf), (l2, l2_sf)",
            f"(l1_weights, l2_weights{more})",
            dense=("*",),
            release=RELEASE,
        )
        for module, name, more in (
            ("deep_gemm.mega", "transform_weights_for_mega_moe", ", activation='swiglu'"),
            ("deep_gemm", "transform_weights_for_mega_moe_sm90", ""),
        )
    ),
)
