"""sgl-deep-gemm 0.1.4.post1, fp8_m_grouped_gemm_nt_masked: a group's last tile overwrites the next group.

Rows of other experts are overwritten when M fills no tile.
"""

import sys

import torch
from deep_gemm import fp8_m_grouped_gemm_nt_masked as product

groups, m, n, k = 4, 17, 128, 256
a = torch.ones(groups, m, k, device="cuda").to(torch.float8_e4m3fn)
b = torch.ones(groups, n, k, device="cuda").to(torch.float8_e4m3fn)
sa, sb = torch.ones(groups, m, k // 128, device="cuda"), torch.ones(groups, 1, k // 128, device="cuda")
out = torch.full((groups, m, n), 7.0, dtype=torch.bfloat16, device="cuda")
busy = torch.tensor([m, 0, 0, 0], dtype=torch.int32, device="cuda")
product((a, sa), (b, sb), out, busy, m, disable_ue8m0_cast=True)
touched = int((out[1:] != 7).any(-1).sum())
print(f"{touched} rows of groups without rows were written; 0 is right")
sys.exit(touched > 0)
