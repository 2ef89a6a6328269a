"""vLLM 0.20.2, unified_attention with E4M3 queries: k_descale and v_descale are not read.

A cache whose scales are not 1 gives the attention of other keys, times one over the scale of the values.
"""

from oracle.harness.finding_scripts import again

case = "unified_attention/e4m3xe4m3-bf16/tensor/b=2,m=5,n=130,h=6,g=2,d=64/family=ones/seed=1"
again("vllm.v1.attention.ops.triton_unified_attention:unified_attention", case, "outside the bound")
