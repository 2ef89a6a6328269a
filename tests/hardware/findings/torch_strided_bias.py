"""PyTorch 2.11.0, _scaled_mm: a bias whose elements lie apart is read as if it were packed.

Every column but the first gets another column's bias, or what lies between them, when the bias is a strided view.
"""

import torch

from oracle.harness.finding_scripts import again

case = "torch_per_tensor_w8a8_scaled_mm/e4m3xe4m3-bf16/tensor:tensor/m=32,n=64,k=128/bias=bf16/family=randn/seed=1"
bias = (2.0 ** torch.arange(128).remainder(9)).to(torch.bfloat16)[::2]
again("torch:_scaled_mm", case, "outside the bound", bias=bias)
