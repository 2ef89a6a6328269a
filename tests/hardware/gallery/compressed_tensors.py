"""compressed-tensors: the quantisers of its compressors in torch."""

from __future__ import annotations

from oracle.harness.gallery import Project

from ._named import references

PROJECT = Project(
    name="compressed_tensors",
    distributions=("compressed-tensors",),
    carried="its wheel",
    kernels=references("compressed_tensors", "its pages document no rule for either"),
    devices=("cpu",),
)
