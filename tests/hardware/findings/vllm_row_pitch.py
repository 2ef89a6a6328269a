"""vLLM 0.20.2, cutlass_scaled_mm: rows of a slice are read as if they were packed."""

import sys

import torch
from vllm._custom_ops import cutlass_scaled_mm

torch.manual_seed(0)
m, n, k = 16, 256, 512
a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
one = torch.ones(1, device="cuda")
right = a.double() @ b.double().t()
sliced = torch.cat([a.view(torch.uint8), a.view(torch.uint8)[:, :16]], 1)[:, :k].view(a.dtype)
got = cutlass_scaled_mm(sliced, b.t(), one, one, torch.bfloat16)
error = float((got.double() - right).norm() / right.norm())
print(f"got {float(got[1, 1]):.4g}, right {float(right[1, 1]):.4g}; relative error {error:.2g}, 0.002 is rounding")
sys.exit(error > 0.01)
