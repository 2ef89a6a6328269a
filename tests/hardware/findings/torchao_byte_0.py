"""torchao 0.18.0, to_mx with RCEIL: values below 2^-118 are not scaled and come back as 0.

Blocks whose values lie below 2^-118 come back as zeros. Needs no GPU.
"""

import sys

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

x = torch.full((1, 32), 2.0**-120)
scale, q = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
back = to_dtype(q, scale, torch.float8_e4m3fn, 32, torch.float32)
print(f"{float(x[0, 0]):.3g} comes back as {float(back[0, 0]):.3g}")
sys.exit(not torch.equal(back, x))
