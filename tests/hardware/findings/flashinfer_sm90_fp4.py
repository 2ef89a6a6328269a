"""FlashInfer 0.6.18.post1, fp4_quantize on sm90: nothing is written and nothing is raised.

The result is whatever the memory held.
"""

import sys

import torch
from flashinfer import fp4_quantize

x = torch.ones(128, 512, device="cuda", dtype=torch.bfloat16)
seen = set()
for byte in (0x77, 0x11):
    poison = [torch.full((n,), byte, dtype=torch.uint8, device="cuda") for n in (32768, 4096) for _ in range(8)]
    del poison
    q, _ = fp4_quantize(x, torch.full((1,), 448.0, device="cuda"), 16, False, False)
    seen.add(int(q.view(torch.uint8)[0, 0]))
print(f"codes {[hex(code) for code in seen]} of the same ones; 0x77 alone is right")
sys.exit(seen != {0x77})
