"""FBGEMM GenAI 1.9.0, matmul_fp8_block: a tile of its list that is wider than a block of scales reads one for all.

Half of the columns get the scale of their neighbours when the tuner chooses a wide tile for blocks of 128.
"""

import sys

import torch
from fbgemm_gpu.experimental.gemm.triton_gemm import fp8_gemm

torch.manual_seed(0)
m, n, k = 128, 256, 512
a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
sa, sb = (torch.rand(rows // 128, k // 128, device="cuda") + 0.5 for rows in (m, n))
wide = [s.repeat_interleave(128, 0).repeat_interleave(128, 1).double() for s in (sa, sb)]
right = (a.double() * wide[0]) @ (b.double() * wide[1]).t()
tuner = fp8_gemm._kernel_matmul_fp8_block_fastacc  # what its tuner may choose for blocks of 128: the list, for BLOCK_K
listed, errors = list(tuner.configs), []
for tile in ({"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 32}, {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 32}):
    tuner.configs = [c for c in listed if tile.items() <= c.kwargs.items()][:1]
    got = fp8_gemm.matmul_fp8_block(a, b, sa, sb, 128, 128, 128)
    errors.append(float((got.double() - right).norm() / right.norm()))
    print(f"{tile}: relative error {errors[-1]:.2g}, 0.002 is rounding")
sys.exit(max(errors) > 0.01)
