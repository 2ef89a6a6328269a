"""PyTorch 2.11.0, _scaled_mm: a bias whose elements lie apart is read as if it were packed.

Every column but the first gets another column's bias, or what lies between them, when the bias is a strided view.
"""

import sys

import torch

m, n, k = 32, 64, 128
a, b = (torch.zeros(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
one, wide = torch.ones((), device="cuda"), torch.arange(2 * n, device="cuda").to(torch.bfloat16)
got = torch._scaled_mm(a, b.t(), one, one, bias=wide[::2], out_dtype=torch.bfloat16)
print(f"the sum of zeros and the bias {wide[::2][:4].tolist()} begins {got[0, :4].tolist()}")
sys.exit(not torch.equal(got[0], wide[::2]))
