"""The layer's decisions as functions of integers: one call is one row of a conformance tool's table.

Conditions are 0 and 1; ``arch`` is the compute capability as in ``sm90``, 0 for no NVIDIA GPU; versions are two
integers, dtypes their number in :data:`DTYPES`. Each function describes a machine or a configuration, calls the layer,
and numbers the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import linear, moe, platform
from .errors import ConfigError, DeviceError, OptionError
from .records import MOE_BACKENDS, Config

ROUTINES = (
    "cutlass_w8a8_scaled_mm",
    "rocm_per_tensor_w8a8_scaled_mm",
    "torch_per_tensor_w8a8_scaled_mm",
    "torch_per_token_w8a8_scaled_mm",
    "torch_channelwise_w8a8_scaled_mm",
)
"""The answers of ``dispatch_w8a8_scaled_mm``, numbered as its contract numbers them."""
DTYPES = (None, torch.bfloat16, torch.float16, torch.float32)
"""Dtypes in the tables of records, by number."""


def _dispatched(
    cutlass_fp8_supported: int,
    per_tensor_weights: int,
    per_tensor_activations: int,
    use_per_token_if_dynamic: int,
    rocm: int,
    rowwise: int,
) -> int:
    """The number of the routine in :data:`ROUTINES` on a machine that the last two flags describe."""
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


def _config(**switches: int) -> Config:
    values: dict[str, Any] = {name: bool(value) for name, value in switches.items()}
    return Config(**values)


def _deep_gemm(arch: int, package: int, **switches: int) -> int:
    return int(platform.is_deep_gemm_supported(_machine(arch, package), _config(**switches)))


def _deep_gemm_e8m0(arch: int, package: int, **switches: int) -> int:
    return int(platform.is_deep_gemm_e8m0_used(_machine(arch, package), _config(**switches)))


def _deep_gemm_linear(arch: int, package: int, bfloat16_out: int, n: int, k: int, **switches: int) -> int:
    dtype, machine = torch.bfloat16 if bfloat16_out else torch.float16, _machine(arch, package)
    return int(platform.should_use_deepgemm_for_fp8_linear(dtype, (n, k), machine, _config(**switches)))


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


def _num_sms(product: int, reported: int) -> int:
    """Product 0 is a machine without a GPU; a ``reported`` count of 0 or more replaces the product's own."""
    sms = None if reported < 0 else reported
    name = (None, *platform.PRODUCTS)[product]
    machine = platform.Machine.described("cpu", sms=sms) if name is None else platform.Machine.of_product(name, sms=sms)
    try:
        return platform.get_num_sms(machine=machine)
    except DeviceError:
        return 0  # refused


def _experts_record(
    config: int, out_dtype: int, quant_config: int, use_deepseek_fp8_block_scale: int, **moe_config: int
) -> tuple[int, ...]:
    """Whether there is a record, and its fields; -1 in every field when there is none."""
    try:
        record = moe.select_cutlass_fp8_gemm_impl(
            _moe_config(**moe_config) if config else None,
            quant_config,
            DTYPES[out_dtype],
            bool(use_deepseek_fp8_block_scale),
        )
    except OptionError:
        return 0, *(len(EXPERTS_FIELDS) - 1) * (-1,)
    quant = int(record.quant_config) if isinstance(record.quant_config, int) else -1
    ranks = (record.ep_rank, record.ep_size, record.tp_rank, record.tp_size)
    return 1, DTYPES.index(record.out_dtype), quant, *ranks, int(record.use_deepseek_fp8_block_scale)


def _prepare_finalize(
    config: int, dp_size: int, ep_size: int, tp_size: int, use_deepseek_fp8_block_scale: int
) -> tuple[int, ...]:
    described = _moe_config(1, dp_size=dp_size, ep_size=ep_size, tp_size=tp_size) if config else None
    record = moe.build_flashinfer_fp8_cutlass_moe_prepare_finalize(described, bool(use_deepseek_fp8_block_scale))
    return int(record.use_dp), int(record.use_deepseek_fp8_block_scale)


def _moe_config(in_dtype: int, **ranks: int) -> moe.MoeConfig:
    dtype = DTYPES[in_dtype]
    if dtype is None:
        raise OptionError("a moe config has an input dtype; number it 1, 2 or 3")
    return moe.MoeConfig(in_dtype=dtype, **ranks)


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
    "get_num_sms": _num_sms,
}
"""By the name of the contract."""

EXPERTS_FIELDS = (
    "accepted",
    "out_dtype",
    "quant_config",
    "ep_rank",
    "ep_size",
    "tp_rank",
    "tp_size",
    "use_deepseek_fp8_block_scale",
)
RECORDS: dict[str, tuple[Callable[..., tuple[int, ...]], tuple[str, ...]]] = {
    "select_cutlass_fp8_gemm_impl": (_experts_record, EXPERTS_FIELDS),
    "build_flashinfer_fp8_cutlass_moe_prepare_finalize": (
        _prepare_finalize,
        ("use_dp", "use_deepseek_fp8_block_scale"),
    ),
}
"""Decisions that are records, by the name of the contract: the function, and the names of its fields in order."""
