"""FlashInfer 0.6.18.post1, rope_quantize_fp8: heads with 16 rotated columns get a wrong second half.

Half of the rotated columns are wrong in models with 16 rotated columns.
"""

import sys

import torch
from flashinfer.rope import rope_quantize_fp8

torch.manual_seed(0)
tokens, heads, rot, plain = 4, 8, 16, 64
q, k = (torch.randn(tokens, h, rot, device="cuda").bfloat16() for h in (heads, 1))
qn, kn = (torch.randn(tokens, h, plain, device="cuda").bfloat16() for h in (heads, 1))
angle = torch.rand(tokens, rot // 2, device="cuda")
cache = torch.cat([angle.cos(), angle.sin()], 1)
made = rope_quantize_fp8(q, k, qn, kn, cache, torch.arange(tokens, device="cuda"), is_neox=True)[0].double()
x, y = q.double().chunk(2, -1)
cos, sin = angle.double().cos()[:, None], angle.double().sin()[:, None]
right = torch.cat([x * cos - y * sin, y * cos + x * sin], -1)
error = ((made - right).norm(dim=(0, 1)) / right.norm(dim=(0, 1))).tolist()
print(f"relative error by column: {[round(e, 3) for e in error]}; 0.03 is quantisation")
sys.exit(max(error) > 0.2)
