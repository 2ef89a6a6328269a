"""torchao 0.18.0, triton_fp8_per_group_rowwise_scales: rows overwrite each other, as a row is one element further.

The codes of nearly all elements are those of another row.
"""

import sys

import torch
from torchao.prototype.moe_training.kernels.jagged_float8_scales import triton_fp8_per_group_rowwise_scales as cast

x, ends = torch.randn(64, 48, device="cuda", dtype=torch.bfloat16), [16, 48]
q, scales = cast(x, torch.tensor(ends, dtype=torch.int32, device="cuda"), torch.float8_e4m3fn, True)
given = scales.view(2, 64).repeat_interleave(torch.tensor([16, 32], device="cuda"), dim=0).t()
wrong = int(((q.float() - x.float() * given).abs() > 32).sum())  # half a step of E4M3 at most is 16
print(f"{wrong} of {x.numel()} codes are not those of their element; 0 is right")
sys.exit(wrong > 0)
