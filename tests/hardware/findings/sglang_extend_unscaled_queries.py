"""SGLang 0.5.10, extend_attention_fwd behind an E4M3 cache: queries are cast to E4M3 without a scale.

A query of 1000 becomes 448, or NaN, so that scores of the cache and of the new tokens have other scales.
"""

import torch

from oracle.harness.finding_scripts import again

case = "extend_attention_fwd/bf16xe4m3-bf16/tensor/b=1,m=1,n=1,h=4,g=1,d=64,v=64/family=randn/seed=1"
q, k, one = torch.zeros(1, 4, 64), torch.zeros(1, 1, 64), torch.ones(1, 1, 64).to(torch.float8_e4m3fn)
q[..., 0], k[0, 0, 0] = 1000.0, 0.125  # the cached key scores 5.8; of a query of 448 it is 2.6
cache = {"k_buffer": k.to(torch.float8_e4m3fn), "v_buffer": one}
cache |= {"kv_indptr": torch.tensor([0, 1], dtype=torch.int32), "kv_indices": torch.arange(1)}
new = {name: torch.zeros(1, 1, 64, dtype=torch.bfloat16) for name in ("k_extend", "v_extend")}
new |= {"qo_indptr": torch.tensor([0, 1], dtype=torch.int32)}
routine = "sglang.srt.layers.attention.triton_ops.extend_attention:extend_attention_fwd"
again(routine, case, "outside the bound", q=q.to(torch.bfloat16), **cache, **new)
