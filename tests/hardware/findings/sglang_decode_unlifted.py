"""SGLang 0.5.10, decode_attention_fwd over an E4M3 cache: P is cast to E4M3 without a lift, where heads share keys.

Keys that lie 7 nats below the largest are lost, however many they are: of equal values the output is half of them.
"""

import sys

import torch
from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd

E4M3, CUDA = torch.float8_e4m3fn, {"device": "cuda"}
q, k, v = torch.zeros(1, 4, 64, **CUDA), torch.zeros(1000, 1, 64, **CUDA), torch.ones(1000, 1, 64, **CUDA)
q[..., 0], k[0, 0, 0] = 1.0, 7.0  # the first of 1000 keys scores 7, the others 0; every value is 1
q, k, v = q.to(torch.bfloat16), k.to(E4M3), v.to(E4M3)
out, partial, lse = torch.empty_like(q), torch.zeros(1, 4, 1, 64, **CUDA), torch.zeros(1, 4, 1, **CUDA)
ends, slots = torch.tensor([0, 1000], dtype=torch.int32, **CUDA), torch.arange(1000, **CUDA)
splits = torch.ones(1, dtype=torch.int32, **CUDA)
decode_attention_fwd(q, k, v, out, ends, slots, partial, lse, splits, 1, 1.0, 1.0, 1.0)
print(f"the output is {float(out[0, 0, 0])}; 1 is right")
sys.exit(not 0.9 < float(out[0, 0, 0]) < 1.1)
