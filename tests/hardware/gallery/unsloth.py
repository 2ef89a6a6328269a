"""unsloth: block-scaled product, activation quantiser and dequantiser in Triton, of one file."""

from __future__ import annotations

from oracle.harness.gallery import Kernel, Project

from ._products import act_quant, block_product

FILE = "hardware.alone:unsloth.kernels.fp8"
PRODUCT = "w8a8_block_fp8_matmul_triton"


PROJECT = Project(
    name="unsloth",
    distributions=("unsloth",),
    carried="of its wheel: unsloth/kernels and the folder dist-info",
    kernels=(
        Kernel("fp8_gemm_nt", f"{FILE}.{PRODUCT}", block_product, PRODUCT),
        Kernel("per_token_group_quant_fp8", f"{FILE}.act_quant", act_quant, "act_quant", "unsloth_1x128"),
    ),
    devices=("cpu", "cuda"),
)
