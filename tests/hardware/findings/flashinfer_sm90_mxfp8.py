"""FlashInfer 0.6.18.post1, mxfp8_quantize on sm90: nothing is written and nothing is raised.

The result is whatever the memory held.
"""

import sys

import torch
from flashinfer import mxfp8_quantize

x = torch.randn(128, 512, device="cuda").bfloat16()
for byte in (0x77, 0x11):
    poison = [torch.full((n,), byte, dtype=torch.uint8, device="cuda") for n in (65536, 2048) for _ in range(8)]
    del poison
    q, scale = mxfp8_quantize(x, False)
    back = q.double() * torch.exp2(scale.view(torch.uint8).reshape(128, 16).double() - 127).repeat_interleave(32, 1)
    error = float((back - x.double()).norm() / x.double().norm())
    print(f"memory held {byte:#x}: code {int(q.view(torch.uint8)[0, 0]):#x}, relative error {error:.2g}; 0.03 is right")
sys.exit(not error < 0.1)
