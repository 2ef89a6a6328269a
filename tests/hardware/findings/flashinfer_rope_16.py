"""FlashInfer 0.6.18.post1, rope_quantize_fp8: heads with 16 rotated columns get a wrong second half.

Half of the rotated columns are wrong in models with 16 rotated columns.
"""

from oracle.harness.finding_scripts import again

case = "rope_quantize_fp8/bf16-e4m3/tensor/t=4,h=8,d=16,n=64/family=randn/seed=1"
again("flashinfer.rope:rope_quantize_fp8", case, "inadmissible")
