"""LMDeploy 0.18: Triton and Gluon products of blocks, group quantisers, fused and grouped kernels; no engine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.harness.gallery import Kernel, Project

from ._products import (
    BF16,
    FP8,
    HALVES,
    Inputs,
    Options,
    Pair,
    act_quant,
    blocks,
    groups,
    lanes,
    masked_silu,
    offered,
    one_config,
)

CUDA = "hardware.alone:lmdeploy.pytorch.kernels.cuda"
GROUPS = "per_token_group_quant_fp8"
RECIPE = "lmdeploy_1x128"
EXPERTS = "fused_moe_blocked_fp8"


def blocked(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """``(A, A_scale, B [K, N], B_scale [K/128, N/128], dtype)``; the two autotuned kernels held to one tile."""
    a, b, a_scale, b_scale = blocks(inputs, options, *HALVES, whole=True)
    one_config(kernel.__globals__, "_gemm_fp8_tma_kernel", "_gemm_fp8_kernel")
    return kernel(a, a_scale, b.t(), b_scale.t(), options["out_dtype"])


def gluon(kernel: Callable[..., None], inputs: Inputs, options: Options) -> Tensor:
    """``((a, sa), (b, sb), out, None)``: bf16, scales of ``a`` at strides of ``align(M, 4)``."""
    a, b, a_scale, b_scale = blocks(inputs, options, BF16)
    offered(a.shape[1] % 128 == 0 and b.shape[0] % 64 == 0, "K % 128 == 0, N % 64 == 0")
    out = torch.empty(a.shape[0], b.shape[0], dtype=BF16, device=a.device)
    kernel((a, lanes(a_scale, 4)), (b, b_scale.contiguous()), out, None)
    return out


def transposed_groups(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    """``quant_fp8``: row-major scales, or columns at strides of ``align(M, 4)``."""
    offered(bool(options.get("tma_aligned_scales")) == bool(options.get("column_major_scales")), "columns are aligned")
    groups(inputs, {**options, "column_major_scales": False})
    return kernel(inputs["x"], options.get("group_size", 128), trans_scale=bool(options.get("column_major_scales")))


def rows(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    """``per_token_quant_int8(x, eps, dtype)``, which has a form for FP8."""
    offered(options.get("use_per_token_if_dynamic") and not {"scale", "scale_ub"} & set(inputs), "rows, no bound")
    offered(inputs["x"].is_contiguous() and not options.get("num_token_padding"), "dense, not padded")
    return kernel(inputs["x"], 1e-7, FP8)


def experts(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """``fused_moe_blocked_fp8`` of an input that its ``quant_fp8`` quantised; bf16. It has no id for "none", whose rows
    it would leave unwritten: such a slot takes expert 0 with weight 0."""
    offered(not options.get("first_expert") and "expert_map" not in inputs, "every expert")
    offered(not options.get("apply_router_weight_on_input") and not options.get("combine"), "weights on the output")
    offered(inputs["x"].dtype == BF16, "bf16")
    q, scale = kernel.__globals__["quant_fp8"](inputs["x"].contiguous(), 128)
    weights = (inputs[name].contiguous() for name in ("w13", "w13_scale", "w2", "w2_scale"))
    none = inputs["topk_ids"] < 0
    ids, of = inputs["topk_ids"].masked_fill(none, 0), inputs["topk_weights"].masked_fill(none, 0.0)
    return kernel(q, scale, *weights, of, ids, ids.shape[1], out_dtype=BF16)


PROJECT = Project(
    name="lmdeploy",
    distributions=("lmdeploy",),
    carried="of its wheel: the Python files (hardware.alone imports each module without the engine)",
    kernels=(
        Kernel(
            "fp8_gemm_nt", f"{CUDA}.blocked_gemm_fp8.blocked_gemm_fp8", blocked, "blocked_gemm_fp8",
            pinned="128x128 with TMA, else 64x128",
        ),
        Kernel("fp8_gemm_nt", f"{CUDA}.blocked_fp8_gemm_gluon.fp8_gemm_nt", gluon, "fp8_gemm_nt (Gluon)"),
        Kernel(GROUPS, f"{CUDA}.blocked_gemm_fp8.quant_fp8", transposed_groups, "quant_fp8", RECIPE),
        Kernel(GROUPS, f"{CUDA}.blocked_gemm_fp8.per_token_group_quant_fp8", act_quant, GROUPS, RECIPE),
        Kernel(
            "scaled_fp8_quant", f"{CUDA}.w8a8_triton_kernels.per_token_quant_int8", rows, "per_token_quant",
            "lmdeploy_token",
        ),
        Kernel(
            "silu_and_mul_masked_post_quant", f"{CUDA}.activation.silu_and_mul_masked_post_quant_fwd", masked_silu,
            "silu_and_mul_masked_post_quant_fwd", RECIPE,
        ),
        Kernel("fused_experts_block", f"{CUDA}.moe.blocked_fp8.{EXPERTS}", experts, EXPERTS),
    ),
)  # fmt: skip  # a table, one row a line
