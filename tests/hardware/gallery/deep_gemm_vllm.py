"""DeepGEMM once more, as vLLM 0.20.2 distributes it (``vllm.third_party.deep_gemm``, the official 2.5.0)."""

from __future__ import annotations

from oracle.harness.gallery import Project

from ._named import rows
from .deep_gemm import FORMS, LAYOUTS

LIBRARY = "vllm_third_party_deep_gemm"
PRODUCTS = ("fp8_gemm_nt", "fp8_m_grouped_gemm_nt_masked")
PROJECT = Project(
    name="deep_gemm_vllm",
    distributions=("vllm",),
    carried="of vLLM's wheel: vllm/third_party/deep_gemm, an empty vllm/__init__.py, and the folder dist-info",
    kernels=(
        *rows("libraries", LIBRARY, (*PRODUCTS, *FORMS), apart=" (padded and transposed by this package)"),
        *rows("libraries", f"{LIBRARY}_bare", ("fp8_gemm_nt", *LAYOUTS)),
    ),
)
