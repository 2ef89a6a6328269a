"""FlashInfer 0.6.18.post1 and 0.7.2.post1, fp8_blockscale_gemm_sm90: the weight quantiser leaves rows out.

Large values in some rows of a bf16 weight are cut off.
"""

import torch

from oracle.bindings.binding import bind
from oracle.harness.finding_scripts import again

weight = torch.randn(128, 128, 128, generator=torch.Generator().manual_seed(0))
weight[range(128), range(128)] *= 1000  # in each block of 128 rows another one, which the scale of its block must cover
again(
    bind(
        "flashinfer.gemm:fp8_blockscale_gemm_sm90",
        "fp8_blockscale_gemm_sm90",
        "(input, weight, None, None, out_dtype=out_dtype)",
        "(input, weight, input_scale=None, weight_scale=None, out=None, out_dtype=None)",
    ),
    "fp8_blockscale_gemm_sm90/bf16xbf16-bf16/1x128:128x128/m=1,n=16384,k=128/family=randn/seed=1",
    "outside the bound",
    weight=weight.flatten(0, 1).bfloat16(),
)
