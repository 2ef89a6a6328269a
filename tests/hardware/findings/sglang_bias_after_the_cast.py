"""SGLang 0.5.23, triton_scaled_mm: the bias is added after the sum was rounded to the output.

A bias that nearly cancels the sum leaves few right digits, or none. FlagGems 5.0.2 has the same kernel.
"""

import torch

from oracle.harness.finding_scripts import again

case = "cutlass_scaled_mm/e4m3xe4m3-bf16/token:channel/m=16,n=16,k=32/bias=bf16/family=exact/seed=1"
a, b = (torch.full((16, 32), x).to(torch.float8_e4m3fn) for x in (1.0, 8.0))
scales = {"a_scale": torch.full((16, 1), 257 / 256), "b_scale": torch.ones(1, 16)}
bias = torch.full((16,), -256.0, dtype=torch.bfloat16)  # the sum is 257, which rounds to 256
again("sglang.kernels.ops.gemm.fp8_kernel:triton_scaled_mm", case, "actual 0", a=a, b=b, bias=bias, **scales)
