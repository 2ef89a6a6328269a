"""FlashInfer: block-scaled products and their quantiser, fused norms and rotary embeddings, KV caches, row orders."""

from __future__ import annotations

from hardware.adapters import by_contract, flashinfer_fp4_quantize, flashinfer_gemm, flashinfer_mxfp8_quantize
from hardware.fused_libraries import ROTARY
from hardware.kv_caches import FLASHINFER_ROUTINES

from oracle.harness.gallery import Kernel, Project

from ._named import rows

PROJECT = Project(
    name="flashinfer",
    distributions=("flashinfer-python",),
    carried="its wheel; it compiles at first use (95 s for the block-scaled product)",
    kernels=(
        Kernel("fp8_blockscale_gemm_sm90", "flashinfer.gemm:fp8_blockscale_gemm_sm90", flashinfer_gemm),
        *rows("libraries", "flashinfer_internal", ("flashinfer_quantize_1x128",)),
        *rows("libraries", "flashinfer_helpers", ("reorder_rows_for_gated_act_gemm", "shuffle_matrix_a")),
        *rows("fused_libraries", "flashinfer", ("rmsnorm_quant", "fused_add_rmsnorm_quant", *ROTARY)),
        *rows("mx_libraries", "flashinfer_interleave", ("to_blocked", "swizzle_scale", "shuffle_matrix_sf_a")),
        *(Kernel(name, f"hardware.kv_caches:FLASHINFER.{name}", by_contract, name) for name in FLASHINFER_ROUTINES),
        Kernel("mxfp8_quantize", "flashinfer:mxfp8_quantize", flashinfer_mxfp8_quantize),
        Kernel("nvfp4_quantize", "flashinfer:fp4_quantize", flashinfer_fp4_quantize),
    ),
    compiles=300.0,
)
