"""sgl-deep-gemm 0.1.4.post1, fp8_gemm_nt with recipe (1, 1, 128): rows of a slice are read as if they were packed.

Every row but the first is wrong when an operand is a slice of a wider tensor; the recipe (1, 128, 128) reads the pitch.
"""

import sys

import torch
from deep_gemm import fp8_gemm_nt

torch.manual_seed(0)
m, n, k = 64, 128, 256
a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
sa, sb, got = (torch.ones(m, 2, device="cuda"), torch.ones(n, 2, device="cuda"), torch.zeros(m, n, device="cuda"))
right = a.double() @ b.double().t()
sliced = torch.cat([a.view(torch.uint8), a.view(torch.uint8)[:, :16]], 1)[:, :k].view(a.dtype)
fp8_gemm_nt((sliced, sa), (b, sb), got, c=got, recipe=(1, 1, 128), disable_ue8m0_cast=True)
error = float((got.double() - right).norm() / right.norm())
print(f"got {float(got[1, 1]):.4g}, right {float(right[1, 1]):.4g}; relative error {error:.2g}, 0.0001 is rounding")
sys.exit(error > 0.01)
