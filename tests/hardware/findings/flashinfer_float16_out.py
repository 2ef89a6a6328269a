"""FlashInfer 0.6.18.post1 and 0.7.2.post1, fp8_blockscale_gemm_sm90: float16 is accepted, bfloat16 bits are written.

Float16 results are meaningless.
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
got = product(a, b, sa.t().contiguous(), sb, out_dtype=torch.float16)
error = float((got.double() - right).norm() / right.norm())
print(f"got {float(got[1, 1]):.4g}, right {float(right[1, 1]):.4g}; relative error {error:.2g}, 0.002 is rounding")
sys.exit(error > 0.01)
