"""sglang-kernel 0.4.4, sgl_per_token_quant_fp8: a row below 2^-117 gets the scale 0 and is lost.

A row whose values all lie below 6e-36 comes back as zeros: none that a model has.
"""

import torch

from oracle.harness.finding_scripts import again

case = "scaled_fp8_quant/bf16-e4m3/token/m=1,k=128/family=randn/seed=1"
x = torch.full((1, 128), 2.0**-120, dtype=torch.bfloat16)
again("torch:ops.sgl_kernel.sgl_per_token_quant_fp8", case, "inadmissible", x=x)
