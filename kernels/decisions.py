"""Decisions about a machine as functions of integers: one call is one row of a conformance tool's table.

Conditions are 0 and 1; ``arch`` is the compute capability as in ``sm90``, 0 for no NVIDIA GPU; versions are two
integers. Nothing is decided here: each function describes a machine, asks the layer, and numbers the answer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels import linear, moe, platform
from kernels.config import MOE_BACKENDS, Config
from kernels.errors import ConfigError, OptionError

ROUTINES = (
    "cutlass_w8a8_scaled_mm",
    "rocm_per_tensor_w8a8_scaled_mm",
    "torch_per_tensor_w8a8_scaled_mm",
    "torch_per_token_w8a8_scaled_mm",
    "torch_channelwise_w8a8_scaled_mm",
)
"""The answers of ``dispatch_w8a8_scaled_mm``, numbered as its contract numbers them."""


def _dispatched(
    cutlass_fp8_supported: int,
    per_tensor_weights: int,
    per_tensor_activations: int,
    use_per_token_if_dynamic: int,
    rocm: int,
    rowwise: int,
) -> int:
    """The routine's place in the contract's table, on a machine of which the last two flags are true."""
    if rowwise and not rocm:
        raise OptionError("only ROCm has a row-wise torch kernel among the machines of this layer")
    machine = platform.Machine.described("gfx942" if rowwise else "gfx90a" if rocm else "sm90")
    chosen = linear.dispatch_w8a8_scaled_mm(
        bool(cutlass_fp8_supported),
        bool(per_tensor_weights),
        bool(per_tensor_activations),
        bool(use_per_token_if_dynamic),
        machine,
    )
    return ROUTINES.index(chosen.__name__)


def _machine(arch: int, package: int = 1, cuda: str = "13.0") -> platform.Machine:
    described = platform.Machine.described(f"sm{arch}" if arch else "cpu", cuda=cuda)
    return described if package else described.with_package("deep_gemm", "not installed")


def _deep_gemm(arch: int, package: int, use_deep_gemm: int, use_flashinfer_moe_fp8: int) -> int:
    config = Config(use_deep_gemm=bool(use_deep_gemm), use_flashinfer_moe_fp8=bool(use_flashinfer_moe_fp8))
    return int(platform.is_deep_gemm_supported(_machine(arch, package), config))


def _deep_gemm_e8m0(
    arch: int,
    package: int,
    use_deep_gemm: int,
    use_flashinfer_moe_fp8: int,
    use_deep_gemm_e8m0: int,
    use_deep_gemm_e8m0_hopper: int,
) -> int:
    config = Config(
        use_deep_gemm=bool(use_deep_gemm),
        use_flashinfer_moe_fp8=bool(use_flashinfer_moe_fp8),
        use_deep_gemm_e8m0=bool(use_deep_gemm_e8m0),
        use_deep_gemm_e8m0_hopper=bool(use_deep_gemm_e8m0_hopper),
    )
    return int(platform.is_deep_gemm_e8m0_used(_machine(arch, package), config))


def _deep_gemm_linear(
    arch: int, package: int, use_deep_gemm: int, use_flashinfer_moe_fp8: int, bfloat16_out: int, n: int, k: int
) -> int:
    config = Config(use_deep_gemm=bool(use_deep_gemm), use_flashinfer_moe_fp8=bool(use_flashinfer_moe_fp8))
    dtype = torch.bfloat16 if bfloat16_out else torch.float16
    return int(platform.should_use_deepgemm_for_fp8_linear(dtype, (n, k), _machine(arch, package), config))


def _cutlass_support(question: Callable[[platform.Machine], bool]) -> Callable[..., int]:
    def ask(arch: int, cuda_major: int, cuda_minor: int) -> int:
        return int(question(_machine(arch, cuda=f"{cuda_major}.{cuda_minor}")))

    return ask


def _rowwise_torch(rocm: int, capability_major: int, capability_minor: int, torch_major: int, torch_minor: int) -> int:
    arch = f"gfx{capability_major}{capability_minor}0" if rocm else f"sm{capability_major}{capability_minor}"
    machine = platform.Machine.described(arch, torch_version=f"{torch_major}.{torch_minor}.0")
    return int(platform.use_rowwise_torch_scaled_mm(machine))


def _moe_backend(arch: int, choice: int) -> int:
    config = Config(flashinfer_moe_backend=(None, *MOE_BACKENDS)[choice])
    try:
        backend = moe.get_flashinfer_moe_backend(_machine(arch), config)
    except ConfigError:
        return 0  # refused with the choices
    return 1 + list(moe.FlashinferMoeBackend).index(backend)


def _global_scale(backend: int) -> int:
    return int(moe.is_flashinfer_supporting_global_sf((None, *moe.FlashinferMoeBackend)[backend]))


DECISIONS: dict[str, Callable[..., int]] = {
    "is_deep_gemm_supported": _deep_gemm,
    "is_deep_gemm_e8m0_used": _deep_gemm_e8m0,
    "should_use_deepgemm_for_fp8_linear": _deep_gemm_linear,
    "cutlass_fp8_supported": _cutlass_support(platform.cutlass_fp8_supported),
    "cutlass_block_fp8_supported": _cutlass_support(platform.cutlass_block_fp8_supported),
    "cutlass_group_gemm_supported": _cutlass_support(platform.cutlass_group_gemm_supported),
    "sparse_cutlass_supported": _cutlass_support(platform.sparse_cutlass_supported),
    "use_rowwise_torch_scaled_mm": _rowwise_torch,
    "get_flashinfer_moe_backend": _moe_backend,
    "is_flashinfer_supporting_global_sf": _global_scale,
    "dispatch_w8a8_scaled_mm": _dispatched,
}
"""By the name of the contract."""
