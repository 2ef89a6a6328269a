"""vLLM 0.20.2, silu_and_mul_quant: rows of a slice are read as if they were packed.

Every row but the first is quantised from other numbers when the input is a slice of a wider tensor.
"""

from oracle.harness.finding_scripts import again

again(
    "torch:ops._C.silu_and_mul_quant",
    "silu_and_mul_quant/bf16-e4m3/tensor/m=4,i=256/x:pitch/family=randn/seed=1",
    "inadmissible",
)
