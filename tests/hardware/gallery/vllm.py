"""vLLM 0.20.2: compiled operators for FP8, W4A8, fused quantisers, and KV caches."""

from __future__ import annotations

from hardware.adapters import by_contract, vllm_cutlass
from hardware.fused_libraries import GATED, MIXED, NORMS
from hardware.kv_caches import VLLM_ROUTINES

from oracle.harness.gallery import Kernel, Project

from ._named import rows

REORDER = "cutlass_encode_and_reorder_int4b"
WEIGHTS = tuple(
    f"{REORDER}/i4/-/n={n},k={k}/family=codes/seed={seed}"
    for n, k in ((16, 256), (64, 256), (48, 512), (128, 1024))
    for seed in (1, 2)
)
"""K in multiples of 256: for others it writes out of bounds, so that none is tried."""

PROJECT = Project(
    name="vllm",
    distributions=("vllm",),
    carried="of its wheel: _C.abi3.so and _C_stable_libtorch.abi3.so, which FP8_KERNELS_VLLM_C and "
    "FP8_KERNELS_VLLM_STABLE name, and the folder dist-info",
    kernels=(
        Kernel("cutlass_scaled_mm", "kernels.backends.cutlass:operators", vllm_cutlass, "cutlass_scaled_mm"),
        *rows("libraries", "vllm_ops", ("scaled_fp8_quant",)),
        *rows("fused_libraries", "vllm", (*GATED, *NORMS)),
        *rows("fused_libraries", "vllm", ("per_token_group_quant_fp8_packed",), numerics="vllm_group_ue8m0"),
        *rows("fused_libraries", "vllm", [name for name in MIXED if name != REORDER]),
        *rows("fused_libraries", "vllm", (REORDER,), case=WEIGHTS),
        *(Kernel(name, f"hardware.kv_caches:VLLM.{name}", by_contract, name) for name in VLLM_ROUTINES),
        *rows("experts", "vllm", ("cutlass_moe_fp8", "cutlass_moe_fp8_channel"), numerics="sm90.chain"),
    ),
)
