"""FlashInfer 0.6.18.post1 and 0.7.2.post1, fp8_blockscale_gemm_sm90: M not a multiple of 4 reads past the scales.

Sums are wrong by 14 percent to a factor of 459, and vary with what lies behind the scales, when M is no multiple of 4.
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
    "fp8_blockscale_gemm_sm90/e4m3xe4m3-bf16/1x128:128x128/m=7,n=256,k=512/family=randn/seed=1",
    "outside the bound",
)
