"""vLLM 0.20.2, indexer_k_quant_and_cache: rows of a slice are read as if they were packed.

Every key but the first is quantised from other numbers when the keys are a slice of a wider tensor.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

for library in Path(find_spec("vllm").submodule_search_locations[0]).glob("_C*.so"):
    torch.ops.load_library(library)

k = torch.randn(4, 144, dtype=torch.bfloat16, device="cuda")[:, :128]
slots, found = torch.arange(4, device="cuda"), []
for given in (k, k.contiguous()):
    cache = torch.zeros(1, 64, 132, dtype=torch.uint8, device="cuda")
    torch.ops._C_cache_ops.indexer_k_quant_and_cache(given, cache, slots, 128, "")
    found.append(cache.flatten()[: 4 * 128].view(4, 128))
wrong = int((found[0] != found[1]).any(-1).sum())
print(f"{wrong} of 4 keys differ from those of the same numbers copied; 0 is right")
sys.exit(wrong > 0)
