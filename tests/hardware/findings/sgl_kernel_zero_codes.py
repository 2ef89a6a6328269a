"""sglang-kernel 0.4.4, sgl_per_token_group_quant_8bit: codes of 0 where a group's largest value is above 2^126."""

import sys

import torch
from sgl_kernel import sgl_per_token_group_quant_8bit as quantise

x = torch.full((1, 128), 1.7e38, dtype=torch.bfloat16, device="cuda")
q = torch.empty(1, 128, dtype=torch.float8_e4m3fn, device="cuda")
scale = torch.empty(1, 1, device="cuda")
quantise(x, q, scale, 128, 1e-10, -448.0, 448.0, enable_v2=True)
back = float(q[0, 0]) * float(scale)
print(f"{float(x[0, 0]):.3g} comes back as {back:.3g}")
sys.exit(not back > 1e38)
