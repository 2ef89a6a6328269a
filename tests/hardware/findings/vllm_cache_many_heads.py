"""vLLM 0.20.2, reshape_and_cache: of each token no more than 512 pieces of 16 elements are written.

The cache keeps what it held before in all heads behind the 64th, where a head has 128 elements: no GPU holds as many.
"""

from oracle.harness.finding_scripts import again

case = "reshape_and_cache/bf16-e4m3/tensor/t=16,h=256,d=256,p=4/family=randn/seed=0"
again("torch:ops._C_cache_ops.reshape_and_cache", case, "outside the bound")
