"""sglang-kernel 0.4.4, sgl_per_token_quant_fp8: a row below 2^-117 gets the scale 0 and is lost."""

import sys

import torch
from sgl_kernel import sgl_per_token_quant_fp8

x = torch.full((1, 128), 2.0**-120, dtype=torch.bfloat16, device="cuda")
q = torch.empty(1, 128, dtype=torch.float8_e4m3fn, device="cuda")
scale = torch.empty(1, 1, device="cuda")
sgl_per_token_quant_fp8(x, q, scale)
back = float(q[0, 0]) * float(scale)
print(f"{float(x[0, 0]):.3g} comes back as {back:.3g}")
sys.exit(not back > 2.0**-121)
