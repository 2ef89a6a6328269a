"""DeepGEMM once more, as vLLM 0.20.2 distributes it (``vllm.third_party.deep_gemm``, the official 2.5.0)."""

from __future__ import annotations

from typing import Any

from hardware.adapters import by_contract
from hardware.libraries import SECOND

from kernels.backends import deep_gemm
from oracle.harness.gallery import Project

from ._named import rows
from .deep_gemm import FORMS, LAYOUTS

BARE = "vllm_third_party_deep_gemm_bare"
PRODUCTS = ("fp8_gemm_nt", "fp8_m_grouped_gemm_nt_masked")


def second(kernel: Any, inputs: Any, options: Any) -> Any:
    """The layer's call on the second distribution, from the first call of a process on."""
    if deep_gemm.IMPORT_NAMES != (SECOND,):
        deep_gemm.IMPORT_NAMES = (SECOND,)
        for cache in (deep_gemm.library, deep_gemm.symbol, deep_gemm.takes_2d_lens):
            cache.cache_clear()
    return by_contract(kernel, inputs, options)


PROJECT = Project(
    name="deep_gemm_vllm",
    distributions=("vllm",),
    carried="of vLLM's wheel: vllm/third_party/deep_gemm, an empty vllm/__init__.py, and the folder dist-info",
    kernels=(
        *rows(
            "libraries",
            "deep_gemm",
            (*PRODUCTS, *FORMS),
            apart=" (through this package)",
            space="LAYER",
            adapter=second,
        ),
        *rows("libraries", BARE, ("fp8_gemm_nt", *LAYOUTS)),
    ),
    compiles=300.0,
)
