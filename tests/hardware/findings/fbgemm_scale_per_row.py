"""FBGEMM GenAI 1.9.0, matmul_fp8_block: scale_block_m=1 is accepted, one scale a tile is read.

All rows of a tile get the scale of its first one when a scale for each row is asked for.
"""

import sys

import torch
from fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm import matmul_fp8_block

torch.manual_seed(0)
m, n, k = 64, 256, 512
a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
sa, sb = torch.rand(m, k // 128, device="cuda") + 0.5, torch.rand(n // 128, k // 128, device="cuda") + 0.5
wide = sb.repeat_interleave(128, 0).repeat_interleave(128, 1).double()
right = (a.double() * sa.repeat_interleave(128, 1)) @ (b.double() * wide).t()
got = matmul_fp8_block(a, b, sa, sb, 1, 128, 128)
error = float((got.double() - right).norm() / right.norm())
print(f"got {float(got[1, 1]):.4g}, right {float(right[1, 1]):.4g}; relative error {error:.2g}, 0.002 is rounding")
sys.exit(error > 0.01)
