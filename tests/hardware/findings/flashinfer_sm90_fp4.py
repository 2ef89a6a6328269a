"""FlashInfer 0.6.18.post1, fp4_quantize on sm90: nothing is written and nothing is raised.

The result is whatever the memory held.
"""

from oracle.harness.finding_scripts import again

case = "nvfp4_quantize/bf16/1x16/m=128,k=512/family=randn/seed=1"
again("flashinfer:fp4_quantize", case, "inadmissible")
