"""sglang-kernel 0.4.4, sgl_per_token_group_quant_8bit_v2: codes of 0 where a group's largest value is above 2^126.

A group with a value above 8.5e37 comes back as zeros.
"""

import torch

from oracle.harness.finding_scripts import again

case = "per_token_group_quant_fp8/bf16-e4m3/1x128/m=1,k=128/family=randn/seed=1"
x = torch.full((1, 128), 1.7e38, dtype=torch.bfloat16)
again("torch:ops.sgl_kernel.sgl_per_token_group_quant_8bit_v2", case, "inadmissible", x=x)
