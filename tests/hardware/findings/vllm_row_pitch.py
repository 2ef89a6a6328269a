"""vLLM 0.20.2, cutlass_scaled_mm: rows of a slice are read as if they were packed.

Every row but the first is wrong when the input is a slice of a wider tensor.
"""

from oracle.harness.finding_scripts import again

case = "cutlass_scaled_mm/e4m3xe4m3-bf16/tensor:tensor/m=16,n=256,k=512/a:pitch/family=randn/seed=1"
again("torch:ops._C.cutlass_scaled_mm", case, "read as if its memory were packed")
