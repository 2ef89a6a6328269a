"""sglang-kernel 0.4.4, fp8_scaled_mm: products of the scales are flushed to zero below 2^-126.

Outputs below 1.2e-38 are 0: none that a model has.
"""

import torch

from oracle.harness.finding_scripts import again

case = "cutlass_scaled_mm/e4m3xe4m3-bf16/token:channel/m=16,n=16,k=32/family=exact/seed=1"
ones, scale = torch.ones(16, 32).to(torch.float8_e4m3fn), torch.full((16, 1), 2.0**-66)
changed = {
    "a": ones,
    "b": ones.clone(),
    "a_scale": scale,
    "b_scale": scale.t().contiguous(),
}  # 2^-127, which bf16 holds
again("torch:ops.sgl_kernel.fp8_scaled_mm", case, "actual 0", **changed)
