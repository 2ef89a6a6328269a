"""sgl-deep-gemm 0.1.4.post1, fp8_gemm_nt with recipe (1, 1, 128): rows of a slice are read as if they were packed.

Every row but the first is wrong when an operand is a slice of a wider tensor; the recipe (1, 128, 128) reads the pitch.
"""

from oracle.harness.finding_scripts import again

case = "fp8_gemm_nt_1d1d/e4m3xe4m3-f32/1x128:1x128/m=64,n=128,k=256/a:pitch/family=randn/seed=1"
again("deep_gemm:fp8_gemm_nt", case, "read as if its memory were packed")
