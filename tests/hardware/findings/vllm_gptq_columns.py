"""vLLM 0.20.2, gptq_gemm: threads beyond N add to memory of other columns and behind the output.

With 4 or 8 bits, up to 8 rows and N no multiple of 128 every row but the first is overwritten; nothing refuses N.
"""

from oracle.harness.finding_scripts import again

again("torch:ops._C.gptq_gemm", "gptq_gemm/f16/32/m=5,n=32,k=64/family=randn/seed=1", "outside the bound")
