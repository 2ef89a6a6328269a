"""TransformerEngine: its reference of NVFP4 in torch, of which three files are loaded by themselves."""

from __future__ import annotations

from oracle.harness.gallery import Project

from ._named import rows

CASTS = ("hadamard_transform", "nvfp4_quantize", "nvfp4_quantize_2d", "nvfp4_quantize_4over6", "nvfp4_quantize_rht")
PROJECT = Project(
    name="transformer_engine",
    distributions=("transformer-engine",),
    carried="its wheel",
    kernels=tuple(rows("mx_libraries", "transformer_engine", CASTS)),
    devices=("cpu", "cuda"),
)
