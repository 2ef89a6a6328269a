"""torchao 0.18.0, triton_fp8_per_group_colwise_scales: of a group larger than the mean the last rows are left out.

Their codes are not written, and the scale is that of the first rows alone; tokens of experts are never equally many.
"""

import sys

import torch
from torchao.prototype.moe_training.kernels import jagged_float8_scales as kernels

sizes = torch.tensor([96, 912, 16], device="cuda")
x = torch.randn(1024, 64, device="cuda", dtype=torch.bfloat16)
x[900:1008] *= 64  # the last rows of the largest group
ends = sizes.cumsum(0).int()
_, scales = kernels.triton_fp8_per_group_colwise_scales(x, ends, torch.float8_e4m3fn, True)
_, due, _, _ = kernels.triton_fp8_per_group_colwise_scales_dual(x, x, ends, torch.float8_e4m3fn, True)
wrong = int((scales != due).sum())
print(f"{wrong} of {due.numel()} scales are not those of the same cast of two tensors; 0 is right")
sys.exit(wrong > 0)
