"""PyTorch: scaled, block-scaled and grouped products: cuBLASLt and CUTLASS on a GPU, oneDNN on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hardware.adapters import torch_scaled_mm
from torch import Tensor

from oracle.harness.gallery import Kernel, Project

from ._products import BF16, Inputs, Options, blocks, offered


def _lanes(scale: Tensor) -> Tensor:
    """``[R, C]`` in columns at strides of ``align(R, 4)``, the padding ones."""
    lead = scale.shape[0] + -scale.shape[0] % 4
    whole = torch.ones(scale.shape[1], lead, device=scale.device)
    whole[:, : scale.shape[0]] = scale.t()
    return whole.t()


def blockwise(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """1x128 and 128x128 scales, both in padded columns; M padded to a multiple of 4 with rows of zero."""
    a, b, a_scale, b_scale = blocks(inputs, options, BF16, whole=True)
    offered(a.device.type == "cuda", "a GPU: block scales have no CPU kernel")
    left = a.view(torch.uint8).new_zeros(a.shape[0] + -a.shape[0] % 4, a.shape[1])
    left[: a.shape[0]] = a.view(torch.uint8)
    of = torch.nn.functional.ScalingType
    out = kernel(
        left.view(a.dtype),
        b.t(),
        _lanes(a_scale),
        of.BlockWise1x128,
        _lanes(b_scale.t()),
        of.BlockWise128x128,
        output_dtype=BF16,
    )
    return out[: a.shape[0]]


def grouped(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """``_scaled_grouped_mm(a, b [G, K, N], scale_a, scale_b, offs)``, promotion every 128."""
    a, b, ends = inputs["a"], inputs["b"], inputs["offsets"].to(torch.int32)
    offered(options["out_dtype"] == BF16 and a.device.type == "cuda", "bf16 out, on a GPU")
    offered(a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0, "K % 16 == 0, N % 16 == 0")
    scales = inputs["scale_a"].reshape(-1).contiguous(), inputs["scale_b"].contiguous()
    return kernel(a.contiguous(), b.contiguous().transpose(1, 2), *scales, offs=ends, out_dtype=BF16)


PROJECT = Project(
    name="torch",
    distributions=("torch",),
    carried="every machine of this project has it",
    kernels=(
        Kernel("torch_per_tensor_w8a8_scaled_mm", "torch:_scaled_mm", torch_scaled_mm),
        Kernel("torch_per_token_w8a8_scaled_mm", "torch:_scaled_mm", torch_scaled_mm),
        Kernel("fp8_gemm_nt", "torch.nn.functional:scaled_mm", blockwise),
        Kernel("scaled_grouped_mm", "torch:_scaled_grouped_mm", grouped),
    ),
    devices=("cpu", "cuda"),
)
