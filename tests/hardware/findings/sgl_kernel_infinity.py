"""sglang-kernel 0.4.4, sgl_per_token_group_quant_8bit: NaN and infinity are stored as -448.

A NaN or an infinity becomes a finite number, of the other sign for +inf: an overflow goes unnoticed.
"""

import torch

from oracle.harness.finding_scripts import again

case = "per_token_group_quant_fp8/bf16-e4m3/1x128/m=2,k=128/family=randn/seed=1"
x = torch.ones(2, 128, dtype=torch.bfloat16)
x[0, 3], x[1, 3] = float("nan"), float("inf")
again("torch:ops.sgl_kernel.sgl_per_token_group_quant_8bit", case, "inadmissible", x=x)
