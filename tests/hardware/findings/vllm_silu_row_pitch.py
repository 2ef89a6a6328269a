"""vLLM 0.20.2, silu_and_mul_quant: rows of a slice are read as if they were packed.

Every row but the first is quantised from other numbers when the input is a slice of a wider tensor.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

for library in Path(find_spec("vllm").submodule_search_locations[0]).glob("_C*.so"):
    torch.ops.load_library(library)

x = torch.randn(4, 528, dtype=torch.bfloat16, device="cuda")[:, :512]
one, found = torch.ones(1, device="cuda"), []
for given in (x, x.contiguous()):
    q = torch.empty(4, 256, dtype=torch.float8_e4m3fn, device="cuda")
    torch.ops._C.silu_and_mul_quant(q, given, one)
    found.append(q.view(torch.uint8))
wrong = int((found[0] != found[1]).any(-1).sum())
print(f"{wrong} of 4 rows differ from those of the same numbers copied; 0 is right")
sys.exit(wrong > 0)
