"""Model-Optimizer: its tensors of MXFP8, MXFP4 and NVFP4 in torch."""

from __future__ import annotations

from oracle.harness.gallery import Project

from ._named import references

PROJECT = Project(
    name="modelopt",
    distributions=("nvidia-modelopt",),
    carried="its wheel",
    kernels=references("modelopt", "its pages document no rule for either"),
    devices=("cpu",),
)
