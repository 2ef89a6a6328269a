"""vLLM 0.20.2, cutlass_scaled_mm: rows of a slice are read as if they were packed.

Every row but the first is wrong when the input is a slice of a wider tensor.
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
one, got = torch.ones(1, device="cuda"), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
right = a.double() @ b.double().t()
sliced = torch.cat([a.view(torch.uint8), a.view(torch.uint8)[:, :16]], 1)[:, :k].view(a.dtype)
torch.ops._C.cutlass_scaled_mm(got, sliced, b.t(), one, one, None)
error = float((got.double() - right).norm() / right.norm())
print(f"got {float(got[1, 1]):.4g}, right {float(right[1, 1]):.4g}; relative error {error:.2g}, 0.002 is rounding")
sys.exit(error > 0.01)
