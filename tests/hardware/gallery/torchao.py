"""torchao: MX and NVFP4 casts as torch operations, and its Triton kernels for layouts of scales."""

from __future__ import annotations

from oracle.harness.gallery import Project

from ._named import rows

CASTS = (
    "mxfp8_quantize", "mxfp4_quantize", "mxfp6_quantize", "mxfp8_dequantize", "mxfp4_dequantize", "mxfp6_dequantize",
    "nvfp4_quantize", "nvfp4_dequantize", "from_blocked",
)  # fmt: skip
LAYOUTS = ("mxfp8_dequantize", "to_blocked", "swizzle_scale", "swizzle_scale_experts", "to_blocked_k_groups")
PROJECT = Project(
    name="torchao",
    distributions=("torchao",),
    carried="its wheel",
    kernels=(
        *rows("mx_libraries", "torchao", CASTS),
        *rows("mx_libraries", "torchao_torch", ("to_blocked",), apart=" (torch)"),
        *rows("mx_libraries", "torchao_triton", LAYOUTS, apart=" (Triton)"),
    ),
    devices=("cpu", "cuda"),
)
