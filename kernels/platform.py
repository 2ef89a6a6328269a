"""The machine of this process, and the published support predicates, as pure functions of a machine.

The thresholds are rows of :mod:`kernels.support`.

NaN and infinity: no value is read.
Source: CUDA and ROCm device properties, as torch reports them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from . import context
from .config import current_config
from .errors import DeviceError
from .records import ARCHES, PACKAGES, PRODUCTS, Config, Machine, Problem, version
from .support import (
    BLOCK,
    CUTLASS,
    DEEP_GEMM_SM,
    DENSE,
    E4M3_GFX,
    E8M0_SWITCH,
    ROWWISE_ROCM,
    UE8M0_FAMILIES,
    built,
    why_not,
)
from .verbs import verb

__all__ = [
    "ARCHES",
    "Machine",
    "PACKAGES",
    "PRODUCTS",
    "current_machine",
    "cutlass_block_fp8_supported",
    "cutlass_fp8_supported",
    "cutlass_group_gemm_supported",
    "get_num_sms",
    "is_deep_gemm_e8m0_used",
    "is_deep_gemm_supported",
    "should_use_deepgemm_for_fp8_linear",
    "sparse_cutlass_supported",
    "use_machine",
    "use_rowwise_torch_scaled_mm",
    "version",
]


@context.constant
def current_machine() -> Machine:
    """This machine, detected at first use, or that of the block around the caller; a compiled graph keeps it."""
    once = context.current().machine
    return once.value or once.get(lambda: Machine.detect(current_config()))


@contextmanager
def use_machine(machine: Machine | None) -> Iterator[None]:
    """Replace the current machine within the block (None: detect it again)."""
    with context.use(machine=context.Once(machine)):
        yield


def packs_ue8m0(machine: Machine | None = None) -> bool:
    """Whether DeepGEMM's kernels of this machine read packed UE8M0 scales, and no float32 ones."""
    return (machine or current_machine()).sm // 10 in UE8M0_FAMILIES


def quantises_to_ue8m0(machine: Machine | None = None, config: Config | None = None) -> bool:
    """Whether a layer takes UE8M0 scales by default: where DeepGEMM multiplies, and by the switch of its family."""
    machine, config = machine or current_machine(), config or current_config()
    if why_not("deep_gemm", Problem(DENSE), machine, config) is not None:
        return False
    return config.use_deep_gemm_e8m0 if packs_ue8m0(machine) else config.use_deep_gemm_e8m0_hopper


# --- support predicates, under the names that engines use ------------------------------------------------------


@verb()
def is_deep_gemm_supported(machine: Machine | None = None, config: Config | None = None) -> bool:
    """sm90 or sm100, the package usable, ``VLLM_USE_DEEP_GEMM`` on and ``VLLM_USE_FLASHINFER_MOE_FP8`` off.

    As its contract has it, after a release of vLLM that knew no others; a plan takes DeepGEMM on sm103 and sm120 too.
    """
    machine, config = machine or current_machine(), config or current_config()
    usable = machine.package("deep_gemm").why_not is None
    return machine.sm in DEEP_GEMM_SM and usable and config.use_deep_gemm and not config.use_flashinfer_moe_fp8


@verb()
def is_deep_gemm_e8m0_used(machine: Machine | None = None, config: Config | None = None) -> bool:
    """DeepGEMM supported, and ``VLLM_USE_DEEP_GEMM_E8M0`` on sm100 or ``VLLM_USE_DEEP_GEMM_E8M0_HOPPER`` on sm90."""
    machine, config = machine or current_machine(), config or current_config()
    return is_deep_gemm_supported(machine, config) and bool(getattr(config, E8M0_SWITCH[machine.sm]))


@verb()
def should_use_deepgemm_for_fp8_linear(
    output_dtype: torch.dtype,
    weight: torch.Tensor | tuple[int, int],
    machine: Machine | None = None,
    config: Config | None = None,
) -> bool:
    """DeepGEMM supported, bf16 out, and ``N`` and ``K`` of the weight ``[N, K]`` multiples of 128.

    ``weight`` ``[N, K]``, or its extents.
    """
    n, k = weight if isinstance(weight, tuple) else (weight.shape[0], weight.shape[1])
    whole = n % BLOCK == 0 and k % BLOCK == 0
    return is_deep_gemm_supported(machine, config) and output_dtype == torch.bfloat16 and whole


@verb()
def cutlass_fp8_supported(machine: Machine | None = None) -> bool:
    """sm89 with CUDA >= 12.4, sm90 and above with CUDA >= 12.0."""
    return _compiled("cutlass_fp8_supported", machine)


@verb()
def cutlass_block_fp8_supported(machine: Machine | None = None) -> bool:
    """sm90 with CUDA >= 12.0, sm100 and above with CUDA >= 12.8."""
    return _compiled("cutlass_block_fp8_supported", machine)


@verb()
def cutlass_group_gemm_supported(machine: Machine | None = None) -> bool:
    """sm90 with CUDA >= 12.3, sm100 and above with CUDA >= 12.8.

    As its contract has it; vLLM 0.33 says so below sm120 only, and a plan takes that product below sm110.
    """
    return _compiled("cutlass_group_gemm_supported", machine)


@verb()
def sparse_cutlass_supported(machine: Machine | None = None) -> bool:
    """sm90 (not above: the kernels are Hopper's) with CUDA >= 12.2."""
    return _compiled("sparse_cutlass_supported", machine)


@verb()
def use_rowwise_torch_scaled_mm(machine: Machine | None = None) -> bool:
    """ROCm with torch >= 2.7 and capability >= 9.4 (gfx942, gfx950); vLLM's ``USE_ROWWISE_TORCH_SCALED_MM``."""
    machine = machine or current_machine()
    modern = machine.torch >= ROWWISE_ROCM and (machine.capability or (0, 0)) >= E4M3_GFX
    return machine.vendor == "amd" and modern


@verb()
def get_num_sms(device: torch.device | int | None = None, *, machine: Machine | None = None) -> int:
    """Multiprocessors of a machine, from which a persistent kernel's grid and schedule follow.

    For a live CUDA device the driver's count of enabled multiprocessors, which an architecture does not determine (an
    H100 has 132 or 114, a slice of it fewer). For a described machine the count in its description.

    Parameters
    ----------
    device
        A CUDA device; default: the current one.
    machine
        A described machine, instead of any device.

    Raises
    ------
    DeviceError
        There is no CUDA device, or the machine has no multiprocessors or does not say how many.
    """
    if machine is None and torch.cuda.is_available():
        chosen = torch.cuda.current_device() if device is None else device
        count = int(torch.cuda.get_device_properties(chosen).multi_processor_count)
    else:
        count = (machine or current_machine()).sms
    if count < 1:
        raise DeviceError(
            f"get_num_sms needs a CUDA device with multiprocessors, found {count}; pass num_sms explicitly on a CPU, "
            "or sms= when describing a machine"
        )
    return count


def __getattr__(name: str) -> bool:
    """``USE_ROWWISE_TORCH_SCALED_MM``: the published constant, evaluated for this machine when asked for."""
    if name == "USE_ROWWISE_TORCH_SCALED_MM":
        return use_rowwise_torch_scaled_mm()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _compiled(routine: str, machine: Machine | None) -> bool:
    machine = machine or current_machine()
    return built(CUTLASS[routine], machine.sm, machine.cuda)
