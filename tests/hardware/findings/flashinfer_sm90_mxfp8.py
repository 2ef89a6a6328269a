"""FlashInfer 0.6.18.post1, mxfp8_quantize on sm90: nothing is written and nothing is raised.

The result is whatever the memory held.
"""

from oracle.harness.finding_scripts import again

case = "mxfp8_quantize/bf16-e4m3/1x32/m=128,k=512/family=randn/seed=1"
again("flashinfer:mxfp8_quantize", case, "inadmissible")
