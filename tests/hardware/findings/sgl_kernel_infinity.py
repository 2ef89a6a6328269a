"""sglang-kernel 0.4.4, sgl_per_token_group_quant_8bit: NaN and infinity are stored as -448.

A NaN or an infinity becomes a finite number, of the other sign for +inf: an overflow goes unnoticed.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

torch.ops.load_library(Path(find_spec("sgl_kernel").submodule_search_locations[0]) / "sm90/common_ops.abi3.so")

x = torch.ones(2, 128, dtype=torch.bfloat16, device="cuda")
x[0, 3], x[1, 3] = float("nan"), float("inf")
q = torch.empty(2, 128, dtype=torch.float8_e4m3fn, device="cuda")
scale = torch.empty(2, 1, device="cuda")
torch.ops.sgl_kernel.sgl_per_token_group_quant_8bit(x, q, scale, 128, 1e-10, -448.0, 448.0, False)
print(f"NaN is stored as {float(q[0, 3])}, +inf as {float(q[1, 3])}; NaN and a positive code are right")
sys.exit(not q[0, 3].float().isnan() or float(q[1, 3]) < 0)
