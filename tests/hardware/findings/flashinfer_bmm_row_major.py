"""FlashInfer 0.6.18.post1, bmm_fp8: a B in row-major order is accepted and read as column-major.

Every sum is wrong when B is contiguous.
"""

from oracle.bindings.binding import bind
from oracle.harness.finding_scripts import again

again(
    bind(
        "flashinfer.gemm:bmm_fp8",
        "bmm_fp8",
        "(A, B.contiguous(), A_scale, B_scale, out_dtype)",
        "(A, B, A_scale, B_scale, dtype, out=None, backend='cublas')",
    ),
    "bmm_fp8/e4m3xe4m3-bf16/tensor:tensor/m=16,n=256,k=512,g=2/family=randn/seed=1",
    "outside the bound",
)
