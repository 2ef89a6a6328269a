"""FlashInfer 0.6.18.post1, fp8_blockscale_gemm_sm90: rows of a slice are read as if they were packed.

Every row but the first is wrong when the input is a slice of a wider tensor.
"""

import sys

import torch
from flashinfer.gemm import fp8_blockscale_gemm_sm90 as product

torch.manual_seed(0)
m, n, k = 16, 256, 512
a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
sa, sb = torch.rand(m, k // 128, device="cuda") + 0.5, torch.rand(n // 128, k // 128, device="cuda") + 0.5
wide = sb.repeat_interleave(128, 0).repeat_interleave(128, 1).double()
right = (a.double() * sa.repeat_interleave(128, 1)) @ (b.double() * wide).t()
sliced = torch.cat([a.view(torch.uint8), a.view(torch.uint8)[:, :16]], 1)[:, :k].view(a.dtype)
got = product(sliced, b, sa.t().contiguous(), sb)
error = float((got.double() - right).norm() / right.norm())
print(f"got {float(got[1, 1]):.4g}, right {float(right[1, 1]):.4g}; relative error {error:.2g}, 0.002 is rounding")
sys.exit(error > 0.01)
