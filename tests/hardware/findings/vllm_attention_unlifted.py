"""vLLM 0.20.2, unified_attention with E4M3 queries: P is cast to E4M3 without a lift, the row sum is of P before it.

Keys that lie 7 nats below the largest are lost, however many they are: of equal values the output is half of them.
"""

import sys

import torch
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.kv_cache_interface import KVQuantMode

E4M3, CUDA = torch.float8_e4m3fn, {"device": "cuda"}
q, k, v = torch.zeros(1, 1, 64, **CUDA), torch.zeros(63, 16, 1, 64, **CUDA), torch.ones(63, 16, 1, 64, **CUDA)
q[..., 0], k[0, 0, 0, 0] = 1.0, 7.0  # the first of 1008 keys scores 7, the others 0; every value is 1
out = torch.empty(1, 1, 64, dtype=torch.bfloat16, **CUDA)
ends, used = torch.tensor([0, 1], dtype=torch.int32, **CUDA), torch.tensor([1008], dtype=torch.int32, **CUDA)
pages, one = torch.arange(63, dtype=torch.int32, **CUDA)[None], torch.ones(1, **CUDA)
q, k, v = q.to(E4M3), k.to(E4M3), v.to(E4M3)
tail = (ends, 1, used, 1008, 1.0, True, (-1, -1), pages, 0.0, None, one, one)
unified_attention(q, k, v, out, *tail, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
print(f"the output is {float(out[0, 0, 0])}; 1 is right")
sys.exit(not 0.9 < float(out[0, 0, 0]) < 1.1)
