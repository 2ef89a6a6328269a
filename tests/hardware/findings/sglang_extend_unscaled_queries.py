"""SGLang 0.5.10, extend_attention_fwd behind an E4M3 cache: queries are cast to E4M3 without a scale.

A query of 1000 becomes 448, or NaN, so that scores of the cache and of the new tokens have other scales.
"""

import sys

import torch
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

E4M3, CUDA = torch.float8_e4m3fn, {"device": "cuda"}
q, k, v = torch.zeros(1, 4, 64, **CUDA), torch.zeros(1, 1, 64, **CUDA), torch.ones(1, 1, 64, **CUDA)
q[..., 0], k[0, 0, 0] = 1000.0, 1.0  # the cached key and the new one are alike; their values are 1 and 0
q, k, v = q.to(torch.bfloat16), k.to(E4M3), v.to(E4M3)
new, out = k.to(torch.bfloat16), torch.empty_like(q)
ends, slots = torch.tensor([0, 1], dtype=torch.int32, **CUDA), torch.zeros(1, dtype=torch.int64, **CUDA)
of_new = (q, new, torch.zeros_like(new), out)
extend_attention_fwd(*of_new, k, v, ends, ends, slots, None, True, None, 1, 1.0, 1.0, sm_scale=0.01)
print(f"the output is {float(out[0, 0, 0])}; 0.5 is right")
sys.exit(not 0.4 < float(out[0, 0, 0]) < 0.6)
