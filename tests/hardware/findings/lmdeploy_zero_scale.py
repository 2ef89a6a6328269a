"""LMDeploy 0.18.0, blocked_gemm_fp8: a block of weights whose scale is 0 makes every sum of its columns NaN.

A block of zeros whose scale is 0, which quantisers without a floor write, turns whole columns into NaN.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from unittest.mock import MagicMock

import torch

sys.modules["lmdeploy.utils"], sys.modules["cuda"] = MagicMock(), ModuleType("cuda")  # a logger alone of the engine
sys.modules["cuda"].__path__ = [find_spec("lmdeploy").submodule_search_locations[0] + "/pytorch/kernels/cuda"]
product = import_module("cuda.blocked_gemm_fp8").blocked_gemm_fp8

m, n, k = 64, 128, 256
a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
b[:, :128] = 0  # as the first block of a weight may be
sa, sb = torch.ones(m, k // 128, device="cuda"), torch.tensor([[0.0, 1.0]], device="cuda")
right = a[:, 128:].double() @ b[:, 128:].double().t()
got = product(a, sa, b.t(), sb.t(), torch.bfloat16)
print(f"got {float(got[0, 0]):.4g}, right {float(right[0, 0]):.4g}; {int(got.isnan().sum())} of {got.numel()} are NaN")
sys.exit(bool(got.isnan().any()))
