"""vLLM 0.20.2, cutlass_encode_and_reorder_int4b: runs on the legacy default stream, whatever the caller's stream is.

Weights that another stream is still writing are encoded from what was there before; vLLM's own loader waits first.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

for library in Path(find_spec("vllm").submodule_search_locations[0]).glob("_C*.so"):
    torch.ops.load_library(library)

weights = torch.randint(-(1 << 31), (1 << 31) - 1, (64, 32), dtype=torch.int32, device="cuda")  # [N, K / 8]
late, stream = torch.zeros_like(weights), torch.cuda.Stream()
right = torch.ops._C.cutlass_encode_and_reorder_int4b(weights.t())
torch.cuda.synchronize()
with torch.cuda.stream(stream):
    torch.cuda._sleep(1_000_000_000)  # half a second, in which the caller's stream does nothing else
    late.copy_(weights)
    got = torch.ops._C.cutlass_encode_and_reorder_int4b(late.t())
wrong = int((got != right).sum())  # the operator has waited for the device
print(f"{wrong} of {right.numel()} words are not those of the weights; 0 is right")
sys.exit(wrong > 0)
