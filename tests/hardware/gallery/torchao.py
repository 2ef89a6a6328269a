"""torchao: block-scaled FP8 in Triton, for inference and training; MX and NVFP4 casts; layouts of scales."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from oracle.harness.gallery import Kernel, Project

from ._named import rows
from ._products import (
    Inputs,
    Options,
    Pair,
    act_quant,
    block_pairs,
    blocks,
    groups,
    lanes,
    launched,
    offered,
    one_config,
    weight_quant,
)

BLOCKS = "torchao.kernel.blockwise_quantization"
TRAINING = "torchao.prototype.blockwise_fp8_training.kernels"
CAST = "per_block_cast_to_fp8"
WHOLE = "m % 128 == 0, k % 128 == 0"
GROUPS, FIRST = "per_token_group_quant_fp8", "the first configuration of its list"

CASTS = ("mxfp8_quantize", "mxfp8_dequantize", "mxfp4_dequantize", "mxfp6_dequantize", "nvfp4_dequantize")
NARROW = ("mxfp4_quantize", "mxfp6_quantize", "nvfp4_quantize")
NO_NAN = {"data of nan": "its casts to fewer than 8 bits document that NaN and infinity are not supported"}
LAYOUTS = ("mxfp8_dequantize", "to_blocked", "swizzle_scale", "swizzle_scale_experts", "to_blocked_k_groups")


def inference(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """``blockwise_fp8_gemm(a, a_s, b, b_s)``; its autotuned kernel, which a closure holds, keeps one tile."""
    launched(inputs["a"])
    made = kernel.__globals__["_get_triton_impls"]()
    function = getattr(made.gemm, "_init_fn", made.gemm)
    one_config(dict(zip(function.__code__.co_freevars, _cells(function), strict=True)), "blockwise_fp8_gemm_kernel")
    return block_pairs(kernel, inputs, options)


def _cells(function: Callable[..., Any]) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def training(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """``(a, b [K, N], a_s column-major, b_s [K/128, N/128] column-major, 128, dtype)``."""
    launched(inputs["a"])
    a, b, a_scale, b_scale = blocks(inputs, options, whole=True)
    one_config(vars(importlib.import_module(TRAINING)), "triton_fp8_gemm_1x128_128x128_kernel")
    return kernel(a, b.t(), lanes(a_scale), lanes(b_scale.t()), 128, options["out_dtype"])


def training_lhs(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    """Scales in columns, without padding."""
    groups(inputs, {**options, "column_major_scales": False}, floor=1e-10, group=128)
    offered(options.get("column_major_scales") and not options.get("tma_aligned_scales"), "scales in columns")
    one_config(vars(importlib.import_module(TRAINING)), "triton_fp8_blockwise_act_quant_lhs_kernel")
    return kernel(inputs["x"], 128)


def training_weight(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    """The transposed weight: codes ``[K, N]`` in columns and scales ``[K/128, N/128]``, given back as ``[N, K]``."""
    launched(inputs["x"])
    one_config(vars(importlib.import_module(TRAINING)), "triton_fp8_blockwise_weight_quant_transposed_rhs_kernel")
    q, scale = weight_quant(kernel, inputs, options)
    return q.t(), scale.t().contiguous()


PROJECT = Project(
    name="torchao",
    distributions=("torchao",),
    carried="its wheel",
    kernels=(
        Kernel("fp8_gemm_nt", f"{BLOCKS}:blockwise_fp8_gemm", inference, "blockwise_fp8_gemm", pinned=FIRST),
        Kernel(GROUPS, f"{BLOCKS}:fp8_blockwise_act_quant", act_quant, numerics="deepseek_v3_1x128"),
        Kernel(
            CAST, f"{BLOCKS}:fp8_blockwise_weight_quant", weight_quant, numerics="deepseek_v3_128x128", domain=WHOLE
        ),
        Kernel("fp8_gemm_nt", f"{TRAINING}:triton_fp8_gemm_1x128_128x128", training, pinned=FIRST),
        Kernel(
            GROUPS, f"{TRAINING}:triton_fp8_blockwise_act_quant_lhs", training_lhs, numerics="torchao_training_1x128",
            pinned=FIRST,
        ),
        Kernel(
            CAST, f"{TRAINING}:triton_fp8_blockwise_weight_quant_transposed_rhs", training_weight,
            numerics="torchao_training_128x128", domain=WHOLE, pinned=FIRST,
        ),
        *rows("mx_libraries", "torchao", CASTS),
        *rows("mx_libraries", "torchao", NARROW, exempt=NO_NAN),
        *rows("mx_libraries", "torchao", ("from_blocked",), domain="g == 1"),
        *rows("mx_libraries", "torchao_torch", ("to_blocked",), apart=" (torch)", domain="g == 1"),
        *rows("mx_libraries", "torchao_triton", LAYOUTS, apart=" (Triton)"),
    ),
    devices=("cpu", "cuda"),
)  # fmt: skip  # a table, one row a line
