"""SGLang 0.5.10, extend_attention_fwd behind an E4M3 cache: P of the cached keys is cast to E4M3 without a lift.

Cached keys that lie 7 nats below the largest are lost, however many they are: of equal values the output is half.
"""

import torch

from oracle.harness.finding_scripts import again

case = "extend_attention_fwd/bf16xe4m3-bf16/tensor/b=1,m=1,n=1000,h=4,g=1,d=64,v=64/family=randn/seed=1"
q, k, v = torch.zeros(1, 4, 64), torch.zeros(1000, 1, 64), torch.ones(1000, 1, 64)
q[..., 0], k[0, 0, 0] = 1.0, 160.0  # the first of 1000 cached keys scores 7.4, the others and the new one 0
cache = {"k_buffer": k.to(torch.float8_e4m3fn), "v_buffer": v.to(torch.float8_e4m3fn)}
cache |= {"kv_indptr": torch.tensor([0, 1000], dtype=torch.int32), "kv_indices": torch.arange(1000)}
new = {name: torch.full((1, 1, 64), x, dtype=torch.bfloat16) for name, x in (("k_extend", 0.0), ("v_extend", 1.0))}
new |= {"qo_indptr": torch.tensor([0, 1], dtype=torch.int32)}
routine = "sglang.srt.layers.attention.triton_ops.extend_attention:extend_attention_fwd"
again(routine, case, "outside the bound", q=q.to(torch.bfloat16), **cache, **new)
