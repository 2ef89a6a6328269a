"""FlagGems: Triton products and quantisers of block-scaled FP8, vLLM's product and its KV cache once more."""

from __future__ import annotations

from typing import Any

import torch

from oracle.bindings.binding import Binding, bind

E4M3, BF16, HALVES = torch.float8_e4m3fn, torch.bfloat16, (torch.bfloat16, torch.float16)
OPERANDS = {"a": E4M3, "b": E4M3}
GROUPS = "per_token_group_quant_fp8"
ROWS = {"column_major_scales": False, "tma_aligned_scales": False, "use_ue8m0": False}


def _own(place: str, contract: str, pattern: str, signature: str, **stated: Any) -> Binding:
    target = f"flag_gems.{place}:{place.rpartition('.')[2]}"
    return bind(stated.pop("target", target), contract, pattern, signature, release="flag-gems 5.0.2", **stated)


BINDINGS = (
    _own(
        "ops.w8a8_block_fp8_matmul",
        "fp8_gemm_nt",
        "(a, b, a_scale, b_scale, [128, 128], out_dtype)",
        "(A, B, As, Bs, block_size, output_dtype=torch.bfloat16)",
        takes=OPERANDS | {"c": None},
        dense=("*",),
    ),
    _own(
        "ops.fp8_matmul",
        "fp8_gemm_nt",
        "(a, a_scale, b, b_scale)",
        "(a, a_s, b, b_s, scale_dtype=torch.float32)",
        takes=OPERANDS | {"c": None, "out_dtype": BF16},
        domain="n % 128 == 0, k % 128 == 0",
        dense=("*",),
    ),
    _own(
        "ops.per_token_group_quant_fp8",
        GROUPS,
        "(x, group_size, eps, torch.float8_e4m3fn)",
        "(x, group_size, eps=1e-10, dtype=None, column_major_scales=False, scale_ue8m0=False)",
        takes=ROWS,
        where="x.dim() == 2",
        dense=("*",),
    ),
    _own(
        "ops.act_quant",
        GROUPS,
        "(x, group_size)",
        "(x, block_size=128, scale_fmt=None)",
        target="flag_gems.ops.act_quant:act_quant_triton",
        takes=ROWS | {"eps": 1e-10},
        where="x.dim() == 2",
        numerics="flaggems_act_quant",
        dense=("*",),
    ),
    _own(
        "fused.cutlass_scaled_mm",
        "cutlass_scaled_mm",
        "(out, a, b.t(), a_scale, b_scale, bias)",
        "(c, a, b, a_scale, b_scale, bias=None)",
        takes=OPERANDS | {"out_dtype": HALVES},
        where="a_scale.numel() in (1, a.shape[0]) and b_scale.numel() in (1, b.shape[0]) "
        "and (b_scale.dim() < 2 or b_scale.numel() > 1 or max(b.shape) > 128) "
        "and (bias is None or bias.dtype == out_dtype)",
        domain="n % 16 == 0, k % 16 == 0",
        dense=("*",),
    ),
    _own(
        "fused.concat_and_cache_mla",
        "concat_and_cache_mla",
        "(kv_c, k_pe, kv_cache.view(torch.uint8), slot_mapping, 'fp8', scale)",
        "(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)",
        takes={"slot_mapping": torch.int64},
        numerics="vllm_static",
        dense=("*",),
    ),
)
