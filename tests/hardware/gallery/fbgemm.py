"""FBGEMM GenAI 1.9: Triton products by rows, blocks and groups of rows, and their quantisers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hardware import alone
from torch import Tensor

from oracle.harness.gallery import Kernel, Project

from ._products import BF16, Inputs, Options, Pair, blocks, groups, offered, one_config, rows_and_channels

PLACE = "fbgemm_gpu.experimental.gemm.triton_gemm"
FILE, GROUPED = f"hardware.alone:{PLACE}.fp8_gemm", f"hardware.alone:{PLACE}.grouped_gemm"
FIRST = "the first configuration of its list"
SMALL = "the first configuration of its list whose tile is smaller than a block of scales: 64x32x32"


def _row(kernel: Callable[..., Tensor], inputs: Inputs, options: Options, fast: bool) -> Tensor:
    a, b, a_scale, b_scale, bias = rows_and_channels(inputs, options)
    assert a is not None and b is not None and a_scale is not None and b_scale is not None
    offered(options["out_dtype"] == BF16, "bf16 out")
    offered(bias is None or bias.dtype == torch.float32, "a bias in float32")
    scales = (scale.reshape(-1).expand(x.shape[0]).contiguous() for scale, x in ((a_scale, a), (b_scale, b)))
    one_config(vars(alone.module(f"{PLACE}.fp8_gemm")), "_kernel_matmul_fp8_row", "_kernel_matmul_fp8_row_no_fast_acc")
    return kernel(a, b, *scales, bias, fp8_fast_accum=fast, tma_persistent=False)


def row_fast(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    return _row(kernel, inputs, options, True)


def row_slow(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    return _row(kernel, inputs, options, False)


def block(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """Blocks of 128x128 on both. The kernel asserts that a tile is smaller than a block, yet its list has larger ones,
    which it may choose, and ``scale_block_m=1`` is taken: both are answered wrongly (docs/findings.md)."""
    a, b = inputs["a"], inputs["b"]
    offered(inputs["a_scale"].shape[0] == -(-a.shape[0] // 128), "128x128 scales on a")
    blocks(inputs, options, BF16)
    one_config(vars(alone.module(f"{PLACE}.fp8_gemm")), "_kernel_matmul_fp8_block_fastacc", most=64)
    return kernel(a, b, inputs["a_scale"].contiguous(), inputs["b_scale"].contiguous(), 128, 128, 128)


def quantise_row(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    offered(options.get("use_per_token_if_dynamic") and "scale" not in inputs, "rows")
    offered(not options.get("num_token_padding"), "not padded")
    q, scale = kernel(inputs["x"], inputs.get("scale_ub"))
    return q, scale.reshape(-1, 1)


def quantise_group(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    return kernel(groups(inputs, options, floor=1e-10), options.get("group_size", 128))


def quantise_block(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    offered(not options.get("use_ue8m0"), "float32 scales")
    return kernel(inputs["x"], *options.get("block_size", (128, 128)))


def grouped(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """``(x [M, K], w [G N, K], sizes, x_scale [M], w_scale [G N])``; one configuration of its list."""
    offered(options["out_dtype"] == BF16, "bf16 out")
    offered(inputs["a"].shape[1] % 64 == 0 and inputs["b"].shape[1] % 8 == 0, "K % 64 == 0 (its tile), N % 8 == 0")
    b, ends = inputs["b"], inputs["offsets"].to(torch.int32)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    one_config(kernel.__globals__, "_fbgemm_grouped_gemm_fp8_rowwise")
    weights, scale = b.reshape(-1, b.shape[2]).contiguous(), inputs["scale_b"].reshape(-1).contiguous()
    a, scale_a = inputs["a"].contiguous(), inputs["scale_a"].reshape(-1).contiguous()
    return kernel(a, weights, sizes, scale_a, scale, _use_warp_specialization=False)


PROJECT = Project(
    name="fbgemm",
    distributions=("fbgemm-gpu-genai",),
    carried="of its wheel: fbgemm_gpu/experimental/gemm and the folder dist-info",
    kernels=(
        Kernel("cutlass_scaled_mm", f"{FILE}.matmul_fp8_row", row_fast, "matmul_fp8_row fast", pinned=FIRST),
        Kernel("cutlass_scaled_mm", f"{FILE}.matmul_fp8_row", row_slow, "matmul_fp8_row slow", pinned=FIRST),
        Kernel("gemm_fp8_nt_groupwise", f"{FILE}.matmul_fp8_block", block, "matmul_fp8_block", pinned=SMALL),
        Kernel("scaled_fp8_quant", f"{FILE}.triton_quantize_fp8_row", quantise_row, "quantize_fp8_row", "fbgemm_row"),
        Kernel(
            "per_token_group_quant_fp8", f"{FILE}.triton_quantize_fp8_group", quantise_group, "quantize_fp8_group",
            "fbgemm_group",
        ),
        Kernel(
            "per_block_cast_to_fp8", f"{FILE}.triton_quantize_fp8_block", quantise_block, "quantize_fp8_block",
            "fbgemm_block",
        ),
        Kernel(
            "scaled_grouped_mm", f"{GROUPED}.grouped_gemm_fp8_rowwise", grouped, "grouped_gemm_fp8_rowwise",
            pinned=FIRST,
        ),
    ),
)  # fmt: skip  # a table, one row a line
