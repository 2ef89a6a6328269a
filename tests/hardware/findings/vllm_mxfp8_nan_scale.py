"""vLLM 0.20.2, dequant_mxfp8_to_bf16: a scale byte of 255, which is NaN, is read as infinity.

A block that a quantiser marked as NaN comes back as infinities. It needs no GPU.
"""

import torch

from oracle.bindings.binding import bind
from oracle.harness.finding_scripts import again

again(
    bind(
        "vllm.model_executor.layers.quantization.utils.mxfp8_utils:dequant_mxfp8_to_bf16",
        "mxfp8_dequantize",
        "(q, scale) -> wide(out)",
        "(x, scales)",
        takes={"q": torch.float8_e4m3fn, "layout": "linear"},
        functions={"wide": (torch.Tensor.bfloat16, torch.Tensor.float)},
    ),
    "mxfp8_dequantize/e4m3-f32/1x32/m=1,k=32/layout=linear/family=randn/seed=1",
    "actual inf",
    device="cpu",
    scale=torch.full((1, 1), 255, dtype=torch.uint8),
)
