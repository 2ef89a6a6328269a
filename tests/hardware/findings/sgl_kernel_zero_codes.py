"""sglang-kernel 0.4.4, sgl_per_token_group_quant_8bit_v2: codes of 0 where a group's largest value is above 2^126.

A group with a value above 8.5e37 comes back as zeros.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

torch.ops.load_library(Path(find_spec("sgl_kernel").submodule_search_locations[0]) / "sm90/common_ops.abi3.so")

x = torch.full((1, 128), 1.7e38, dtype=torch.bfloat16, device="cuda")
q = torch.empty(1, 128, dtype=torch.float8_e4m3fn, device="cuda")
scale = torch.empty(1, 1, device="cuda")
torch.ops.sgl_kernel.sgl_per_token_group_quant_8bit_v2(x, q, scale, 128, 1e-10, -448.0, 448.0, False, False, None)
back = float(q[0, 0]) * float(scale)
print(f"{float(x[0, 0]):.3g} comes back as {back:.3g}")
sys.exit(not back > 1e38)
