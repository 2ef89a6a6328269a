"""sglang-kernel: group quantisers, with silu-and-mul and masked rows too, and the router."""

from __future__ import annotations

from oracle.harness.gallery import Project

from ._named import rows

QUANTISERS = ("per_token_group_quant_fp8", "per_token_group_quant_fp8_packed", "silu_and_mul_masked_post_quant")
PROJECT = Project(
    name="sgl_kernel",
    distributions=("sglang-kernel",),
    carried="of its wheel: common_ops.abi3.so for sm90, which FP8_KERNELS_SGL_OPS names, and the folder dist-info",
    kernels=(*rows("fused_libraries", "sgl", QUANTISERS), *rows("experts", "sgl", ("moe_routing",))),
)
