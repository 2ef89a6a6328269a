"""sglang-kernel 0.4.4, fp8_scaled_mm: products of the scales are flushed to zero below 2^-126.

Outputs below 1.2e-38 are 0: none that a model has.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

torch.ops.load_library(Path(find_spec("sgl_kernel").submodule_search_locations[0]) / "sm90/common_ops.abi3.so")

a, b = (torch.ones(16, 32, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
scale = torch.full((16, 1), 2.0**-66, device="cuda")
got = torch.ops.sgl_kernel.fp8_scaled_mm(a, b.t(), scale, scale, torch.bfloat16, None)
print(f"got {float(got[0, 0])}, right {2.0**-127}, which bfloat16 holds")
sys.exit(float(got[0, 0]) != 2.0**-127)
