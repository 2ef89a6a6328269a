"""SGLang 0.5.23, triton_scaled_mm: the bias is added after the sum was rounded to the output."""

import sys

import torch
from sglang.kernels.ops.gemm.fp8_kernel import triton_scaled_mm

a, b = (torch.full((16, 32), x, device="cuda").to(torch.float8_e4m3fn) for x in (1.0, 8.0))
scale = torch.full((1, 1), 257 / 256, device="cuda")
bias = torch.full((16,), -257.0, device="cuda", dtype=torch.bfloat16)
got = triton_scaled_mm(a, b[:16].t(), scale, torch.ones(1, 1, device="cuda"), torch.bfloat16, bias)
right = a.double() @ b[:16].double().t() * 257 / 256 + bias.double()
print(f"got {float(got[0, 0])}, right {float(right[0, 0])}")
sys.exit(bool((got.double() - right).abs().max() > 2**-8 * right.abs().max()))
