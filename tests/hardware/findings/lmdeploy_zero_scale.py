"""LMDeploy 0.18, blocked_gemm_fp8: a block of weights whose scale is 0 makes every sum of its columns NaN."""

import sys

import torch
from lmdeploy.pytorch.kernels.cuda.blocked_gemm_fp8 import blocked_gemm_fp8

torch.manual_seed(0)
m, n, k = 64, 128, 256
a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
b[:, :128] = 0  # as the first block of a weight may be
sa, sb = torch.ones(m, k // 128, device="cuda"), torch.tensor([[0.0, 1.0]], device="cuda")
right = a[:, 128:].double() @ b[:, 128:].double().t()
got = blocked_gemm_fp8(a, sa, b.t(), sb.t(), torch.bfloat16)
print(f"got {float(got[0, 0]):.4g}, right {float(right[0, 0]):.4g}; {int(got.isnan().sum())} of {got.numel()} are NaN")
sys.exit(bool(got.isnan().any()))
