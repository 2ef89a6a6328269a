"""SGLang 0.5.23, triton_scaled_mm: the bias is added after the sum was rounded to the output.

A bias that nearly cancels the sum leaves few right digits, or none. FlagGems 5.0.2 has the same kernel.
"""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from unittest.mock import MagicMock

import torch

for part in ("layers", "runtime_context", "utils", "utils.custom_op"):  # of the engine; this kernel uses none of it
    sys.modules[f"sglang.srt.{part}"] = MagicMock()
place = Path(find_spec("sglang").submodule_search_locations[0]) / "kernels/ops/gemm/fp8_kernel.py"
spec = spec_from_file_location("fp8_kernel", place)
spec.loader.exec_module(kernels := module_from_spec(spec))
a, b = (torch.full((16, 32), x, device="cuda").to(torch.float8_e4m3fn) for x in (1.0, 8.0))
scale, one = torch.full((1, 1), 257 / 256, device="cuda"), torch.ones(1, 1, device="cuda")
bias = torch.full((16,), -257.0, device="cuda", dtype=torch.bfloat16)
got = kernels.triton_scaled_mm(a, b.t(), scale, one, torch.bfloat16, bias)
right = a.double() @ b.double().t() * 257 / 256 + bias.double()
print(f"got {float(got[0, 0])}, right {float(right[0, 0])}")
sys.exit(bool((got.double() - right).abs().max() > 2**-8 * right.abs().max()))
