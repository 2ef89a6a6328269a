"""FBGEMM GenAI 1.9.0, matmul_fp8_block: scale_block_m=1 is accepted, one scale a tile is read.

All rows of a tile get the scale of its first one when a scale for each row is asked for.
"""

from oracle.bindings.binding import bind
from oracle.harness.finding_scripts import again

again(
    bind(
        "fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm:matmul_fp8_block",
        "fp8_gemm_nt",
        "(a, b, a_scale, b_scale, 1, 128, 128)",
        "(a, b, a_scale, b_scale, scale_block_m=256, scale_block_n=256, scale_block_k=256)",
        dense=("*",),
    ),
    "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=64,n=256,k=512/family=randn/seed=1",
    "outside the bound",
)
