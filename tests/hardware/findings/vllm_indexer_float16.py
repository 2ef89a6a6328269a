"""vLLM 0.20.2, indexer_k_quant_and_cache: float16 keys get the scale of a bit pattern.

Index keys of a float16 model are stored with scales that are wrong by a factor of about 2,000.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

for library in Path(find_spec("vllm").submodule_search_locations[0]).glob("_C*.so"):
    torch.ops.load_library(library)

k = torch.full((1, 128), 26.0, dtype=torch.float16, device="cuda")
cache = torch.zeros(1, 64, 132, dtype=torch.uint8, device="cuda")
slots = torch.zeros(1, dtype=torch.int64, device="cuda")
torch.ops._C_cache_ops.indexer_k_quant_and_cache(k, cache, slots, 128, "")
scale = float(cache.flatten()[64 * 128 : 64 * 128 + 4].view(torch.float32))
print(f"scale {scale:.3g}, right {26 / 448:.3g}")
sys.exit(abs(scale * 448 / 26 - 1) > 0.01)
