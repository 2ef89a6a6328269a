"""vLLM 0.20.2, cutlass_pack_scale_fp8: runs on the legacy default stream, whatever the caller's stream is.

Scales that another stream still writes are packed from what was there before; a CUDA graph does not hold the kernel.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

for library in Path(find_spec("vllm").submodule_search_locations[0]).glob("_C*.so"):
    torch.ops.load_library(library)

scales = torch.randn(64, 32, device="cuda").to(torch.float8_e4m3fn)
late, stream = torch.zeros_like(scales), torch.cuda.Stream()
right = torch.ops._C.cutlass_pack_scale_fp8(scales).view(torch.uint8)
torch.cuda.synchronize()
with torch.cuda.stream(stream):
    torch.cuda._sleep(1_000_000_000)  # half a second, in which the caller's stream does nothing else
    late.copy_(scales)
    got = torch.ops._C.cutlass_pack_scale_fp8(late).view(torch.uint8)  # the operator has waited for the device
print(f"{int((got != right).sum())} of {right.numel()} bytes are not those of the scales; 0 is right")
sys.exit(bool((got != right).any()))
