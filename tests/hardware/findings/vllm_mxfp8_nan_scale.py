"""vLLM 0.20.2, dequant_mxfp8_to_bf16: a scale byte of 255, which is NaN, is read as infinity.

A block that a quantiser marked as NaN comes back as infinities. It needs no GPU.
"""

import sys

import torch
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16

codes = torch.ones(1, 32).to(torch.float8_e4m3fn)
got = dequant_mxfp8_to_bf16(codes, torch.full((1, 1), 255, dtype=torch.uint8))
print(f"1 under the scale byte 255 comes back as {got[0, 0].item()}; nan is right")
sys.exit(not bool(torch.isnan(got).all()))
