"""FlagGems 5.0: Triton products and quantisers, each module imported by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.harness.gallery import Kernel, Project

from ._products import (
    FP8,
    HALVES,
    Inputs,
    Options,
    Pair,
    act_quant,
    block_pairs,
    block_product,
    blocks,
    groups,
    offered,
    one_config,
    rows_and_channels,
)

TOP = "hardware.alone:flag_gems"
GROUPS, PRODUCT = "per_token_group_quant_fp8", "w8a8_block_fp8_matmul"
MLA = "concat_and_cache_mla"


def group_quantiser(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    """``(x, group_size, eps)``, row-major float32 scales."""
    return kernel(groups(inputs, options), options.get("group_size", 128), options.get("eps", 1e-10), FP8)


def scaled_mm(kernel: Callable[..., None], inputs: Inputs, options: Options) -> Tensor:
    """``(c, a, b [K, N], a_scale, b_scale, bias)``: a scale each, of rows and channels, or of blocks; one tile each."""
    a, b, bias, dtype = inputs["a"], inputs["b"], inputs.get("bias"), options["out_dtype"]
    offered(dtype in HALVES and (bias is None or bias.dtype == dtype), "bf16 or f16 out, a bias of the same dtype")
    offered(a.shape[1] % 16 == 0 and b.shape[0] % 16 == 0, "K % 16 == 0, N % 16 == 0")
    one_config(kernel.__globals__, "_block_wise_smm_kernel", "_pertensor_or_pertoken_smm_kernel")
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    of_blocks = inputs["b_scale"].dim() == 2 and inputs["b_scale"].shape[0] not in (1, b.shape[0])
    if of_blocks:
        blocks(inputs, options, whole=True)
        offered(bias is None, "blocks without a bias")
        a_scale, b_scale = inputs["a_scale"].contiguous(), inputs["b_scale"].t()
    else:
        rows_and_channels(inputs, options)
        a_scale, b_scale = inputs["a_scale"].contiguous(), inputs["b_scale"].contiguous()
    kernel(out, a, b.t(), a_scale, b_scale, bias)
    return out


def mla(kernel: Callable[..., None], inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """``(kv_c, k_pe, cache, slots, "fp8", scale)`` into a copy of the cache, whose bytes it takes."""
    cache = inputs["kv_cache"].clone()
    offered(cache.is_cuda and cache.dtype in (FP8, torch.uint8), "a cache of E4M3 codes on a GPU")
    slots = inputs["slot_mapping"].long()
    kernel(inputs["kv_c"], inputs["k_pe"], cache.view(torch.uint8), slots, "fp8", inputs["scale"])
    return {"kv_cache": cache}


PROJECT = Project(
    name="flag_gems",
    distributions=("flag-gems",),
    carried="its wheel",
    kernels=(
        Kernel("fp8_gemm_nt", f"{TOP}.ops.{PRODUCT}.{PRODUCT}", block_product, PRODUCT),
        Kernel("fp8_gemm_nt", f"{TOP}.ops.fp8_matmul.fp8_matmul", block_pairs, "fp8_matmul"),
        Kernel(GROUPS, f"{TOP}.ops.{GROUPS}.{GROUPS}", group_quantiser, GROUPS),
        Kernel(GROUPS, f"{TOP}.ops.act_quant.act_quant_triton", act_quant, "act_quant_triton", "flaggems_act_quant"),
        Kernel(
            "cutlass_scaled_mm",
            f"{TOP}.fused.cutlass_scaled_mm.cutlass_scaled_mm",
            scaled_mm,
            "cutlass_scaled_mm",
            pinned="the first tile of its lists",
        ),
        Kernel("concat_and_cache_mla", f"{TOP}.fused.{MLA}.{MLA}", mla, MLA, "vllm_static"),
    ),
    devices=("cpu", "cuda"),
)
