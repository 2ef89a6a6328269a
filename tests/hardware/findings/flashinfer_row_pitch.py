"""FlashInfer 0.6.18.post1, fp8_blockscale_gemm_sm90: rows of a slice are read as if they were packed.

Every row but the first is wrong when the input is a slice of a wider tensor.
"""

from oracle.bindings.binding import bind
from oracle.harness.finding_scripts import again

again(
    bind(
        "flashinfer.gemm:fp8_blockscale_gemm_sm90",
        "fp8_blockscale_gemm_sm90",
        "(input, weight, input_scale.t().contiguous(), weight_scale, out_dtype=out_dtype)",
        "(input, weight, input_scale=None, weight_scale=None, out=None, out_dtype=None)",
    ),
    "fp8_blockscale_gemm_sm90/e4m3xe4m3-bf16/1x128:128x128/m=16,n=256,k=512/input:pitch/family=randn/seed=1",
    "read as if its memory were packed",
)
