"""TransformerEngine: its reference of NVFP4 in torch, of which three files are loaded by themselves."""

from __future__ import annotations

from oracle.harness.gallery import Project

from ._named import rows

CASTS = ("hadamard_transform", "nvfp4_quantize", "nvfp4_quantize_2d", "nvfp4_quantize_4over6", "nvfp4_quantize_rht")
NO_NAN = {"data of nan": "E2M1 has no NaN, and its reference documents no rule for one"}
PROJECT = Project(
    name="transformer_engine",
    distributions=("transformer-engine",),
    carried="its wheel",
    kernels=(
        *rows("mx_libraries", "transformer_engine", CASTS[:1]),
        *rows("mx_libraries", "transformer_engine", CASTS[1:], exempt=NO_NAN),
    ),
    devices=("cpu", "cuda"),
)
