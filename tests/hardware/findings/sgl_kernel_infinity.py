"""sglang-kernel 0.4.4, sgl_per_token_group_quant_8bit: NaN and infinity are stored as -448."""

import sys

import torch
from sgl_kernel import sgl_per_token_group_quant_8bit as quantise

x = torch.ones(2, 128, dtype=torch.bfloat16, device="cuda")
x[0, 3], x[1, 3] = float("nan"), float("inf")
q = torch.empty(2, 128, dtype=torch.float8_e4m3fn, device="cuda")
scale = torch.empty(2, 1, device="cuda")
quantise(x, q, scale, 128, 1e-10, -448.0, 448.0, enable_v2=False)
print(f"NaN is stored as {float(q[0, 3])}, +inf as {float(q[1, 3])}; NaN and a positive code are right")
sys.exit(not q[0, 3].float().isnan() or float(q[1, 3]) < 0)
