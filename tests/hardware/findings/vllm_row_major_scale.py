"""vLLM 0.20.2, cutlass_scaled_mm with block scales: contiguous scales are read transposed.

Every sum is wrong, by 18 to 21 percent as a whole, when the activation scale is contiguous.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

for library in Path(find_spec("vllm").submodule_search_locations[0]).glob("_C*.so"):
    torch.ops.load_library(library)

torch.manual_seed(0)
m, n, k = 16, 256, 512
a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
sa, sb = torch.rand(m, k // 128, device="cuda") + 0.5, torch.rand(n // 128, k // 128, device="cuda") + 0.5
wide = sb.repeat_interleave(128, 0).repeat_interleave(128, 1).double()
right = (a.double() * sa.repeat_interleave(128, 1)) @ (b.double() * wide).t()
got = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
torch.ops._C.cutlass_scaled_mm(got, a, b.t(), sa, sb.t(), None)
error = float((got.double() - right).norm() / right.norm())
print(f"got {float(got[1, 1]):.4g}, right {float(right[1, 1]):.4g}; relative error {error:.2g}, 0.002 is rounding")
sys.exit(error > 0.01)
