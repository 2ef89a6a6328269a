"""vLLM 0.20.2, FlashAttention-3 (_vllm_fa3_C.fwd) with FP8: NaN bytes in slots that no key uses make the output NaN.

A page of the KV cache that held NaN before gives a whole head NaN: its values are multiplied by a P of 0.
"""

from oracle.harness.finding_scripts import again

case = "mha_fwd/e4m3xe4m3-bf16/head/b=2,s=12,n=150,h=6,g=2,d=64,v=64/used=1/family=randn/seed=1"
again("torch:ops._vllm_fa3_C.fwd", case, "actual nan")
