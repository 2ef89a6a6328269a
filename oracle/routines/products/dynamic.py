"""Contracts of the block-scaled linear routines with a bfloat16 input: FlashInfer's, the switching one, the layer's.

    flashinfer_fp8_blockscale_gemm               FlashInfer quantises inside
    dynamic_flashinfer_deepgemm_blockscale_gemm  that below 32 rows; else a group quantiser and DeepGEMM
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel  the layer object around the latter

All are judged as :class:`oracle.routines.products.flashinfer.Fp8BlockscaleGemmSm90` with FP8 weights: its set of admissible
codes and scales allows every factor ``1 + d``, ``|d| <= 2^-21``, and so holds those of the exact group quantiser too
(a group whose amax is below that quantiser's floor of 1e-10 excepted). Not covered: UE8M0 scales.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from oracle.routines.base import TensorSpec, register
from oracle.routines.products.flashinfer import Fp8BlockscaleGemmSm90


class WideInput(Fp8BlockscaleGemmSm90):
    """bfloat16 input ``[M, K]``, FP8 weight ``[N, K]`` with 128x128 scales."""

    roles = {}
    probed = None
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("input", (torch.bfloat16,), ("M", "K"), "activations"),
        TensorSpec("weight", (torch.float8_e4m3fn,), ("N", "K"), "weight codes"),
        TensorSpec("weight_scale", (torch.float32,), ("N/128", "K/128"), "128x128 scales", contiguous=True),
    )


@register
class FlashinferBlockscale(WideInput):
    name = "flashinfer_fp8_blockscale_gemm"
    gpu = True
    summary = "FlashInfer's block-scaled GEMM with a bfloat16 input and an FP8 weight"
    source = "vLLM utils/flashinfer.flashinfer_fp8_blockscale_gemm"


@register
class DynamicBlockscale(WideInput):
    name = "dynamic_flashinfer_deepgemm_blockscale_gemm"
    gpu = True
    summary = "FlashInfer below 32 rows, else quantised in groups and multiplied by DeepGEMM"
    source = "vLLM scaled_mm/flashinfer.py"


@register
class DynamicBlockscaleLayer(WideInput):
    name = "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
    summary = "a layer whose weight is processed after loading and multiplied by the switching routine"
    source = "vLLM scaled_mm/flashinfer.py"
