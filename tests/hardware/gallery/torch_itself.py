"""PyTorch: scaled products of cuBLASLt and CUTLASS on a GPU, of oneDNN on a CPU."""

from __future__ import annotations

from hardware.adapters import torch_scaled_mm

from oracle.harness.gallery import Kernel, Project

PROJECT = Project(
    name="torch",
    distributions=("torch",),
    carried="every machine of this project has it",
    kernels=(
        Kernel("torch_per_tensor_w8a8_scaled_mm", "torch:_scaled_mm", torch_scaled_mm),
        Kernel("torch_per_token_w8a8_scaled_mm", "torch:_scaled_mm", torch_scaled_mm),
    ),
    devices=("cpu", "cuda"),
)
