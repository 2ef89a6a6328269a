"""SGLang 0.5.10, decode_attention_fwd over an E4M3 cache: P is cast to E4M3 without a lift, where heads share keys.

Keys that lie 7 nats below the largest are lost, however many they are: of equal values the output is half of them.
"""

import torch

from oracle.harness.finding_scripts import again

case = "decode_attention_fwd/bf16xe4m3-bf16/tensor/b=1,n=1000,h=4,g=1,d=64,v=64/family=randn/seed=1"
q, k, v = torch.zeros(1, 4, 64), torch.zeros(1000, 1, 64), torch.ones(1000, 1, 64)
q[..., 0], k[0, 0, 0] = 1.0, 160.0  # the first of 1000 keys scores 7.4, the others 0; every value is 1
cache = {"k_buffer": k.to(torch.float8_e4m3fn), "v_buffer": v.to(torch.float8_e4m3fn)}
cache |= {"kv_indptr": torch.tensor([0, 1000], dtype=torch.int32), "kv_indices": torch.arange(1000)}
routine = "sglang.srt.layers.attention.triton_ops.decode_attention:decode_attention_fwd"
again(routine, case, "outside the bound", q=q.to(torch.bfloat16), **cache)
