"""DeepGEMM, as the distributions deep_gemm and sgl-deep-gemm install it, and as vLLM carries it; casts to powers of two
are off.

``expected_m`` and ``compiled_dims`` choose a configuration, ``disable_ue8m0_cast`` acts on sm100 alone. Parameters of
vLLM's are those of the first, less ``ensure_zero_padding``, which its library does not name.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from oracle.bindings.binding import Binding, bind
from oracle.bindings.forms import LANES
from oracle.routines import get

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
RELEASE, OF_VLLM = "sgl-deep-gemm 0.1.4.post1", "vllm 0.20.2"
CHOSEN = ("compiled_dims", "disable_ue8m0_cast", "expected_m")
TAKES = {"a": E4M3, "b": E4M3, "out_dtype": BF16}
CAST = "recipe=None, recipe_a=None, recipe_b=None, compiled_dims={dims!r}, disable_ue8m0_cast=False"
WHOLE = "n % 64 == 0, k % 128 == 0"
ALONG_K = {"nn": {"b"}, "tn": {"a", "b"}, "tt": {"a"}}
"""By the form of a product the operands whose last axis is not K: on sm90 K is nevertheless what lies without gaps."""


def _schedule(lens: Tensor) -> Tensor:
    """What the library's ``get_paged_mqa_logits_metadata`` gives: the part of the keys of each processor, int32."""
    cuda = lens.is_cuda
    count = torch.cuda.get_device_properties(lens.device).multi_processor_count if cuda else 132
    parts = get("get_paged_mqa_logits_metadata").reference({"context_lens": lens.cpu()}, num_sms=count)
    assert isinstance(parts, Tensor), "its one output"
    return parts.to(lens.device)


def _seen(lens: Tensor, q: Tensor) -> Tensor:
    """Of each request how many keys each of its tokens sees, ``[B, T]``, the last one all."""
    return lens[:, None] - torch.arange(q.shape[1] - 1, -1, -1, dtype=lens.dtype, device=lens.device)


def _library(root: str, release: str, project: str) -> Iterator[Binding]:
    """The products of one distribution, under its name."""
    zeros = "" if root != "deep_gemm" else ", ensure_zero_padding=True"
    grouped = f"grouped_layout, {CAST.format(dims='nk')}, use_psum_layout=False{zeros}"

    def product(name: str, parameters: str, *more: str, domain: str = WHOLE) -> Binding:
        """A product of FP8 operands; ``more``: what stands in its call behind the output."""
        along = next((operands for form, operands in ALONG_K.items() if f"_{form}" in name), ())
        a, b = (f"({x}{'.mT().contiguous().mT()' if x in along else ''}, {x}_scale)" for x in "ab")
        pattern = f"({', '.join((a, b, 'out', *more))}, disable_ue8m0_cast=True)"
        takes = TAKES | dict.fromkeys({"m_indices", "masked_m"} & {*more}, torch.int32)
        return plain(name, name, pattern, f"(a, b, d, {parameters})", takes=takes, ignores=CHOSEN, domain=domain)

    def plain(name: str, contract: str, pattern: str, signature: str, **stated: object) -> Binding:
        shared = {"dense": ("*",), "release": release, "project": project}
        return bind(f"{root}:{name}", contract, pattern, signature, **shared | stated)

    for form in ("nt", "nn", "tn", "tt"):
        yield product(f"fp8_gemm_{form}", f"c=None, {CAST.format(dims='')}")
    more = ", expected_m_for_psum_layout=None"
    yield product("m_grouped_fp8_gemm_nt_contiguous", grouped + more, "m_indices")
    yield product("m_grouped_fp8_gemm_nn_contiguous", grouped, "m_indices")
    tiles = f"m % 128 == 0, {WHOLE}"  # a tile of rows is stored whole
    masked = f"masked_m, expected_m, {CAST.format(dims='nk')}"
    yield product("fp8_m_grouped_gemm_nt_masked", masked, "masked_m", "a.shape[1]", domain=tiles)
    yield plain(
        "fp8_gemm_nt",
        "fp8_gemm_nt_1d1d",
        "((a, a_scale), (b, b_scale), out, c, (1, 1, 128), disable_ue8m0_cast=True)",
        f"(a, b, d, c=None, {CAST.format(dims='')})",
        takes={"a": E4M3, "b": E4M3},
        absent={"c": "torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)"},
        ignores=CHOSEN,
        domain=WHOLE,
    )
    yield plain(
        "fp8_gemm_nt_skip_head_mid",
        "fp8_gemm_nt_skip_head_mid",
        "((a, a_scale), (b, b_scale), out, (left, mid, right), (1, 128, 128), disable_ue8m0_cast=True)",
        "(a, b, d, head_splits, recipe=None, compiled_dims='nk', disable_ue8m0_cast=False)",
        takes=TAKES,
        ignores=CHOSEN,
        where="left % 64 == mid % 64 == right % 64 == 0",  # it stores 64 columns at once
        domain=WHOLE,
    )
    yield plain(
        "fp8_einsum",
        "fp8_einsum",
        "('bhr,hdr->bhd', (a, a_scale), (b, b_scale), out)",
        "(expr, a, b, d, c=None, recipe=(1, 128, 128))",
        takes=TAKES,
        domain=WHOLE,
    )
    sizes = ", use_psum_layout=False" if root == "deep_gemm" else ""
    yield plain(
        "k_grouped_fp8_gemm_nt_contiguous",
        "k_grouped_fp8_gemm_nt_contiguous",
        "((a, lanes(a_scale)), (b, lanes(b_scale)), out, ks.tolist(), ks, c)",
        f"(a, b, d, ks, {'grouped_layout' if sizes else 'ks_tensor'}, c=None, recipe=(1, 1, 128), "
        f"compiled_dims='mn'{sizes})",
        takes={"a": E4M3, "b": E4M3, "ks": torch.int32},
        functions=LANES,
        ignores=CHOSEN,
    )
    yield plain(
        "fp8_mqa_logits",
        "fp8_mqa_logits",
        "(q, (k, k_scale), weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits)",
        "(q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0)",
        where="q.shape[1] in (32, 64) and q.shape[2] in (32, 64, 128)",
        domain="h <= 64, d <= 128",
        takes={"cu_seqlen_ks": torch.int32, "cu_seqlen_ke": torch.int32},
    )
    yield plain(
        "fp8_paged_mqa_logits",
        "fp8_paged_mqa_logits",
        "(q, kv_cache, weights, seen(context_lens, q), block_tables, schedule(seen(context_lens, q)), max_model_len, "
        "clean_logits)",
        "(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False, "
        "indices=None)",
        takes={"context_lens": torch.int32, "block_tables": torch.int32, "clean_logits": False},
        where="context_lens.dim() == 1 and kv_cache.shape[1] == 64",
        absent={"max_model_len": "block_tables.shape[1] * 64"},
        functions={"seen": (_seen, lambda lens, q: lens[:, -1]), "schedule": (_schedule, _schedule)},
        ignores=("schedule_meta",),
    )
    for name, contract, domain in (
        ("get_mn_major_tma_aligned_tensor", "get_col_major_tma_aligned_tensor", ""),
        # 48 rows of scales lie in the shared memory of a block, which has 227 KiB
        (*2 * ("get_mn_major_tma_aligned_packed_ue8m0_tensor",), "c <= 1210"),
    ):
        layouts = f"{root}.utils.layout"
        shared = {"release": release, "project": project}
        yield bind(f"{layouts}:{name}", contract, "(scale)", "(sf)", dense=("scale",), domain=domain, **shared)


MATH, LAYOUT = "deep_gemm.utils.math", "deep_gemm.utils.layout"

BINDINGS = (
    *_library("deep_gemm", RELEASE, "deep_gemm"),
    *_library("vllm.third_party.deep_gemm", OF_VLLM, "deep_gemm_vllm"),
    bind(
        f"{LAYOUT}:get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
        "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
        "(scale, ks, ks.tolist(), gran_k)",
        "(sf, grouped_layout, ks, gran_k, k_alignment=None, use_psum_layout=False)",
        takes={"ks": torch.int32},
        where="scale.shape[1] % 4 == 0",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        "deep_gemm:transform_sf_into_required_layout",
        "transform_sf_into_required_layout",
        "(scale, mn, k, (1, 128, 128), scale.shape[0] if scale.dim() == 3 else None, gran_mn == 1)",
        "(sf, mn, k, recipe, num_groups=None, is_sfa=None, disable_ue8m0_cast=False)",
        takes={"target": "sm90", "gran_k": 128, "gran_mn": 1},
        release=RELEASE,
    ),
    bind(
        f"{MATH}:per_token_cast_to_fp4",
        "per_token_cast_to_fp4",
        "(x, use_ue8m0, gran_k, use_packed_ue8m0) -> q.view(torch.int8), scale",
        "(x, use_ue8m0, gran_k=128, use_packed_ue8m0=False)",
        takes={"q": torch.uint8},
        release=RELEASE,
    ),
    bind(
        f"{MATH}:cast_back_from_fp4",
        "cast_back_from_fp4",
        "(q, scale, gran_k)",
        "(packed, sf, gran_k=128, use_packed_ue8m0=False)",
        takes={"q": torch.int8},
        release=RELEASE,
    ),
    bind(
        f"{MATH}:transpose_packed_fp4", "transpose_packed_fp4", "(q)", "(a)", takes={"q": torch.int8}, release=RELEASE
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
