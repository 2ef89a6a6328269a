"""FlashInfer 0.6.18.post1, bmm_fp8: rows of a slice are read as if they were packed.

Every row but the first is wrong when the input is a slice of a wider tensor.
"""

from oracle.harness.finding_scripts import again

case = "bmm_fp8/e4m3xe4m3-bf16/tensor:tensor/m=16,n=256,k=512,g=1/A:pitch/family=randn/seed=1"
again("flashinfer.gemm:bmm_fp8", case, "read as if its memory were packed")
