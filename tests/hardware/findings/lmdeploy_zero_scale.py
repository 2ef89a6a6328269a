"""LMDeploy 0.18.0, blocked_gemm_fp8: a block of weights whose scale is 0 makes every sum of its columns NaN.

A block of zeros whose scale is 0, which quantisers without a floor write, turns whole columns into NaN.
"""

import torch

from oracle.harness.finding_scripts import again

case = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=64,n=128,k=256/family=randn/seed=1"
scale = torch.tensor([[0.0, 1.0]])  # as the first block of a weight may have, whose codes are zeros
again("lmdeploy.pytorch.kernels.cuda.blocked_gemm_fp8:blocked_gemm_fp8", case, "actual nan", b_scale=scale)
