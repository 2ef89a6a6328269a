"""FlashInfer 0.6.18.post1, bmm_fp8: a B in row-major order is accepted and read as column-major.

Every sum is wrong when B is contiguous.
"""

import sys

import torch
from flashinfer.gemm import bmm_fp8

torch.manual_seed(0)
a = torch.randn(2, 16, 512, device="cuda").to(torch.float8_e4m3fn)
b = torch.randn(2, 512, 256, device="cuda").to(torch.float8_e4m3fn)
one = torch.ones(1, device="cuda")
right = a.double() @ b.double()
got = bmm_fp8(a, b, one, one, torch.bfloat16)
print(f"got {float(got[0, 0, 0]):.4g}, right {float(right[0, 0, 0]):.4g}")
sys.exit(bool((got.double() - right).norm() / right.norm() > 0.01))
