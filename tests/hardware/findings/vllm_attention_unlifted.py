"""vLLM 0.20.2, unified_attention with E4M3 queries: P is cast to E4M3 without a lift, the row sum is of P before it.

Keys that lie 7 nats below the largest are lost, however many they are: of equal values the output is half of them.
"""

import torch

from oracle.harness.finding_scripts import again

case = "unified_attention/e4m3xe4m3-bf16/tensor/b=1,m=1,n=1008,h=1,g=1,d=64/family=randn/seed=1"
q, k, v = torch.zeros(1, 1, 64), torch.zeros(63, 16, 1, 64), torch.ones(63, 16, 1, 64)
q[..., 0], k[0, 0, 0, 0] = 1.0, 56.0  # the first of 1008 keys scores 7, the others 0; every value is 1
given = {name: x.to(torch.float8_e4m3fn) for name, x in (("q", q), ("k", k), ("v", v))}
given |= {name: torch.ones(1) for name in ("k_descale", "v_descale")}
given |= {"cu_seqlens_q": torch.tensor([0, 1]).int(), "seqused_k": torch.tensor([1008]).int()}
given |= {"block_table": torch.arange(63).int()[None]}
again("vllm.v1.attention.ops.triton_unified_attention:unified_attention", case, "outside the bound", **given)
