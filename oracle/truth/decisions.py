"""Decisions of the suite about a machine: pure functions of an architecture, versions and switches.

``arch`` is the compute capability of an NVIDIA machine as one integer (90, 100), 0 for any other machine; ``cuda`` a
version as a tuple. Versions compare as tuples of integers, never as strings.

    DeepGEMM          sm90 or sm100, its package, VLLM_USE_DEEP_GEMM, not VLLM_USE_FLASHINFER_MOE_FP8
    DeepGEMM, UE8M0   that, and VLLM_USE_DEEP_GEMM_E8M0 on sm100, VLLM_USE_DEEP_GEMM_E8M0_HOPPER on sm90
    FP8 linear        DeepGEMM, bfloat16 out, N and K multiples of 128
    CUTLASS           least CUDA by architecture (:data:`CUTLASS`)
    multiprocessors   what the driver reports; of a described product its FP32 cores / those of one multiprocessor

Sources: vLLM utils/deep_gemm.py, csrc cutlass_scaled_mm entry, quantization/utils/flashinfer_utils.py, w8a8_utils.py;
NVIDIA's data sheets (cores of a product), CUDA C++ Programming Guide (cores of a multiprocessor, by compute
capability). Not covered: reading a machine or an environment; slices of a GPU, whose count only a driver knows.

What an engine hands to FlashInfer's CUTLASS MoE: the experts' record and the prepare/finalize record.

With a configuration the experts write its input dtype and stand at its ranks; alone they stand at rank 0 of 1 and
write the dtype that the caller names, which must then be named. Both records carry the block-scale flag, so that the
input is not quantised per tensor where the kernel reads block scales. Tokens travel only when data-parallel ranks are
several.

Dtypes are numbers (:data:`DTYPES`), so that a record is a row of integers. Source: vLLM
quantization/utils/flashinfer_utils.py (select_cutlass_fp8_gemm_impl,
build_flashinfer_fp8_cutlass_moe_prepare_finalize). Not covered: the kernels themselves, FP4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from oracle.errors import InputError

DTYPES = ("none", "bfloat16", "float16", "float32")
ALONE = (0, 1)


class ExpertsRecord(NamedTuple):
    """Fields of the experts' record; ``accepted`` 0 and -1 everywhere else when there is none."""

    accepted: int
    out_dtype: int
    quant_config: int
    ep_rank: int
    ep_size: int
    tp_rank: int
    tp_size: int
    use_deepseek_fp8_block_scale: int


def experts_record(
    config: bool, in_dtype: int, ep: tuple[int, int], tp: tuple[int, int], out_dtype: int, quant_config: int, block: int
) -> ExpertsRecord:
    """The experts' record; ``ep`` and ``tp`` are (rank, size) of the configuration, read only when there is one.

    Raises
    ------
    InputError
        A dtype has no number, or a configuration has no input dtype.
    """
    for name, number in (("in_dtype", in_dtype), ("out_dtype", out_dtype)):
        if not 0 <= number < len(DTYPES):
            raise InputError(f"{name}={number}; dtypes are numbered {dict(enumerate(DTYPES))}")
    if config and not in_dtype:
        raise InputError("in_dtype=0: a configuration has an input dtype, 1 to 3")
    written = in_dtype if config else out_dtype
    if DTYPES[written] == "none":
        return ExpertsRecord(0, *(-1,) * 7)
    (ep_rank, ep_size), (tp_rank, tp_size) = (ep, tp) if config else (ALONE, ALONE)
    return ExpertsRecord(1, written, quant_config, ep_rank, ep_size, tp_rank, tp_size, block)


def prepare_finalize_record(config: bool, dp_size: int, block: int) -> tuple[int, int]:
    """(data-parallel, block-scale flag)."""
    return int(config and dp_size >= 2), block


NEVER = (1 << 30, 0)
Cuda = tuple[int, int]
# Least CUDA version for Ada (89), Hopper (90 to 99) and Blackwell (100 and above).
CUTLASS: Mapping[str, tuple[Cuda, Cuda, Cuda]] = {
    "cutlass_fp8_supported": ((12, 4), (12, 0), (12, 0)),
    "cutlass_block_fp8_supported": (NEVER, (12, 0), (12, 8)),
    "cutlass_group_gemm_supported": (NEVER, (12, 3), (12, 8)),
    "sparse_cutlass_supported": (NEVER, (12, 2), NEVER),
}
GPUS: tuple[tuple[str, int, int], ...] = (
    # product, compute capability, FP32 cores; numbered from 1
    ("A100 SXM4", 80, 6912),
    ("A40", 86, 10752),
    ("L40S", 89, 18176),
    ("RTX 4090", 89, 16384),
    ("H100 SXM5", 90, 16896),
    ("H100 PCIe", 90, 14592),
    ("H200", 90, 16896),
    ("B200", 100, 18944),
    ("RTX 5090", 120, 21760),
    ("RTX PRO 6000 Blackwell", 120, 24064),
)
CORES: Mapping[int, int] = {80: 64, 86: 128, 89: 128, 90: 128, 100: 128, 120: 128}
"""FP32 cores of one multiprocessor."""
UNSET, THROUGHPUT, LATENCY, MASKED_GEMM = range(4)
NONE, CUTLASS_MOE, TENSORRT_LLM, CUTEDSL = range(4)
"""Answers of :func:`moe_backend`; NONE: refused with the choices listed."""


def cutlass_supported(routine: str, arch: int, cuda: Cuda) -> bool:
    """Whether a CUTLASS kernel family is compiled for this architecture with this CUDA."""
    ada, hopper, blackwell = CUTLASS[routine]
    if arch >= 100:
        return cuda >= blackwell
    if arch >= 90:
        return cuda >= hopper
    return arch == 89 and cuda >= ada


def deep_gemm_supported(arch: int, package: bool, wanted: bool, flashinfer_moe: bool) -> bool:
    """Whether DeepGEMM is used at all."""
    if flashinfer_moe or not wanted:
        return False
    return package and arch in (90, 100)


def deep_gemm_e8m0(
    arch: int, package: bool, wanted: bool, flashinfer_moe: bool, e8m0: bool, e8m0_hopper: bool
) -> bool:
    """Whether DeepGEMM gets UE8M0 scales."""
    switch = e8m0_hopper if arch == 90 else e8m0
    return switch and deep_gemm_supported(arch, package, wanted, flashinfer_moe)


def deep_gemm_linear(supported: bool, bfloat16_out: bool, n: int, k: int) -> bool:
    """Whether a linear layer with weight ``[N, K]`` goes to DeepGEMM."""
    return supported and bfloat16_out and not (n % 128 or k % 128)


def rowwise_torch(rocm: bool, capability: tuple[int, int], torch: tuple[int, int]) -> bool:
    """Whether torch has a row-wise FP8 product: ROCm, torch 2.7, gfx942 and later."""
    return rocm and torch >= (2, 7) and capability >= (9, 4)


def moe_backend(arch: int, choice: int) -> int:
    """FlashInfer's MoE backend for a value of ``VLLM_FLASHINFER_MOE_BACKEND``."""
    if choice == MASKED_GEMM:
        return CUTEDSL
    if choice == LATENCY:
        return TENSORRT_LLM if 100 <= arch < 110 else CUTLASS_MOE
    if choice == THROUGHPUT or 90 <= arch < 100:
        return CUTLASS_MOE
    return NONE


def supports_global_scale(backend: int) -> bool:
    """Whether a MoE backend takes one scale for all experts: every backend does, none does not."""
    return backend != NONE


def multiprocessors(product: int, reported: int) -> int:
    """Multiprocessors of a product (0: no GPU, else its number in :data:`GPUS`), 0 where the question is refused.

    ``reported`` is the count of a driver, -1 when none was asked; it stands above the product's.

    Raises
    ------
    InputError
        There is no such product.
    """
    if not 0 <= product <= len(GPUS):
        raise InputError(f"product={product}; products are numbered 1..{len(GPUS)}, 0 is no GPU")
    if product == 0:
        return 0
    if reported >= 0:
        return reported
    _, capability, cores = GPUS[product - 1]
    return cores // CORES[capability]
