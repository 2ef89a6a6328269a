"""sglang-kernel 0.4.4, fp8_scaled_mm: products of the scales are flushed to zero below 2^-126."""

import sys

import torch
from sgl_kernel import fp8_scaled_mm

a, b = (torch.ones(16, 32, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
scale = torch.full((16, 1), 2.0**-66, device="cuda")
got = fp8_scaled_mm(a, b.t(), scale, scale, torch.bfloat16, None)
print(f"got {float(got[0, 0])}, right {2.0**-127}, which bfloat16 holds")
sys.exit(float(got[0, 0]) != 2.0**-127)
