"""SGLang 0.5.10, extend_attention_fwd behind an E4M3 cache: P of the cached keys is cast to E4M3 without a lift.

Cached keys that lie 7 nats below the largest are lost, however many they are: of equal values the output is half.
"""

import sys

import torch
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

E4M3, CUDA = torch.float8_e4m3fn, {"device": "cuda"}
q, k, v = torch.zeros(1, 4, 64, **CUDA), torch.zeros(1000, 1, 64, **CUDA), torch.ones(1000, 1, 64, **CUDA)
q[..., 0], k[0, 0, 0] = 1.0, 7.0  # the first of 1000 cached keys scores 7, the others and the new one 0; values are 1
q, k, v = q.to(torch.bfloat16), k.to(E4M3), v.to(E4M3)
new, out = k[1:2].to(torch.bfloat16), torch.empty_like(q)
ends, cached = (torch.tensor([0, n], dtype=torch.int32, **CUDA) for n in (1, 1000))
slots = torch.arange(1000, **CUDA)
of_new = (q, new, torch.ones_like(new), out)
extend_attention_fwd(*of_new, k, v, ends, cached, slots, None, True, None, 1, 1.0, 1.0, sm_scale=1.0)
print(f"the output is {float(out[0, 0, 0])}; 1 is right")
sys.exit(not 0.9 < float(out[0, 0, 0]) < 1.1)
