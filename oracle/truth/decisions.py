"""Decisions of an inference engine about a machine, as tables: pure functions of integers.

A decision in :data:`DECISIONS` is a list of rows. A row holds conditions on columns and an answer; the first row whose
conditions all hold decides, and without one the answer is 0. ``arch`` is the compute capability of an NVIDIA machine as
one integer (90, 100), 0 for any other machine; a version in two columns (``cuda_major``, ``cuda_minor``) is compared as
a tuple of integers, never as a string. Flags are 0 and not 0.

The records that an engine passes to FlashInfer's CUTLASS MoE are functions: with a configuration the experts write its
input dtype and have its ranks; without one they write the dtype that the caller names and are rank 0 of 1. Both records
carry the block-scale flag, so that the input is not quantised per tensor where the kernel reads block scales. Tokens
are exchanged only between several data-parallel ranks. Dtypes are numbers (:data:`DTYPES`).

Sources: vLLM utils/deep_gemm.py, csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu, quantization/utils/w8a8_utils.py
and flashinfer_utils.py; NVIDIA's data sheets (cores of a product), CUDA C++ Programming Guide (cores of a
multiprocessor, by compute capability). Not covered: reading a machine or an environment; slices of a GPU, whose count
only a driver knows; FP4.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from oracle.errors import InputError

Condition = Callable[[Any], bool]
Row = tuple[Mapping[str, Condition], int]
yes: Condition = bool
no: Condition = operator.not_


def one_of(*values: object) -> Condition:
    """The value is one of these."""
    return lambda value: value in values


def at_least(least: object) -> Condition:
    """``value >= least``."""
    return lambda value: value >= least


def _deep_gemm(*arches: int, **more: Condition) -> Row:
    """DeepGEMM is used at all: these architectures, its package, its switch, not FlashInfer's MoE; and ``more``."""
    switches = {"package": yes, "use_deep_gemm": yes, "use_flashinfer_moe_fp8": no}
    return {"arch": one_of(*arches), **switches, **more}, 1


ADA, HOPPER, BLACKWELL = one_of(89), one_of(*range(90, 100)), at_least(100)
BLOCKS: Condition = lambda extent: extent % 128 == 0  # noqa: E731  # a condition among conditions
UNSET, THROUGHPUT, LATENCY, MASKED_GEMM = range(4)
"""Values of ``VLLM_FLASHINFER_MOE_BACKEND``."""
NONE, CUTLASS_MOE, TENSORRT_LLM, CUTEDSL = range(4)
"""MoE backends; NONE: refused with the choices listed."""
DECISIONS: Mapping[str, tuple[Row, ...]] = {
    "is_deep_gemm_supported": (_deep_gemm(90, 100),),
    "is_deep_gemm_e8m0_used": (_deep_gemm(90, use_deep_gemm_e8m0_hopper=yes), _deep_gemm(100, use_deep_gemm_e8m0=yes)),
    "should_use_deepgemm_for_fp8_linear": (_deep_gemm(90, 100, bfloat16_out=yes, n=BLOCKS, k=BLOCKS),),
    "cutlass_fp8_supported": (
        ({"arch": ADA, "cuda": at_least((12, 4))}, 1),
        ({"arch": HOPPER, "cuda": at_least((12, 0))}, 1),
        ({"arch": BLACKWELL, "cuda": at_least((12, 0))}, 1),
    ),
    "cutlass_block_fp8_supported": (
        ({"arch": HOPPER, "cuda": at_least((12, 0))}, 1),
        ({"arch": BLACKWELL, "cuda": at_least((12, 8))}, 1),
    ),
    "cutlass_group_gemm_supported": (
        ({"arch": HOPPER, "cuda": at_least((12, 3))}, 1),
        ({"arch": BLACKWELL, "cuda": at_least((12, 8))}, 1),
    ),
    "sparse_cutlass_supported": (({"arch": HOPPER, "cuda": at_least((12, 2))}, 1),),
    # torch has a row-wise FP8 product: ROCm, torch 2.7, gfx942 and later
    "use_rowwise_torch_scaled_mm": (({"rocm": yes, "torch": at_least((2, 7)), "capability": at_least((9, 4))}, 1),),
    "get_flashinfer_moe_backend": (
        ({"choice": one_of(MASKED_GEMM)}, CUTEDSL),
        ({"choice": one_of(LATENCY), "arch": one_of(*range(100, 110))}, TENSORRT_LLM),
        ({"choice": one_of(LATENCY)}, CUTLASS_MOE),
        ({"choice": one_of(THROUGHPUT)}, CUTLASS_MOE),
        ({"arch": HOPPER}, CUTLASS_MOE),
        ({}, NONE),
    ),
    # every MoE backend takes one scale for all experts
    "is_flashinfer_supporting_global_sf": (({"backend": yes}, 1),),
    # positions in oracle.truth.linear.ROUTINES
    "dispatch_w8a8_scaled_mm": (
        ({"cutlass_fp8_supported": yes}, 0),
        ({"per_tensor_weights": yes, "per_tensor_activations": yes, "rocm": yes}, 1),
        ({"per_tensor_weights": yes, "per_tensor_activations": yes}, 2),
        ({"rowwise": yes, "use_per_token_if_dynamic": yes, "per_tensor_weights": no, "per_tensor_activations": no}, 3),
        ({}, 4),
    ),
}
"""By the name of the routine."""


def decide(routine: str, **columns: int) -> int:
    """The answer of the first row of ``DECISIONS[routine]`` whose conditions hold for these columns, else 0."""
    values: dict[str, object] = dict(columns)
    for name in columns:
        if name.endswith("_major"):
            version = name.removesuffix("_major")
            values[version] = (columns[name], columns[f"{version}_minor"])
    rows = DECISIONS[routine]
    return next((answer for when, answer in rows if all(holds(values[name]) for name, holds in when.items())), 0)


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
    ("GB10", 121, 6144),
)
CORES: Mapping[int, int] = {80: 64, 86: 128, 89: 128, 90: 128, 100: 128, 120: 128, 121: 128}
"""FP32 cores of one multiprocessor."""
DTYPES = ("none", "bfloat16", "float16", "float32")


def multiprocessors(product: int, reported: int) -> int:
    """Multiprocessors of a product (0: no GPU, else its number in :data:`GPUS`), 0 where the question is refused.

    ``reported`` is a driver's count, -1 without one; it takes precedence over the product's.

    Raises InputError: there is no such product.
    """
    if not 0 <= product <= len(GPUS):
        raise InputError(f"product={product}; products are numbered 1..{len(GPUS)}, 0 is no GPU")
    if product == 0:
        return 0
    if reported >= 0:
        return reported
    _, capability, cores = GPUS[product - 1]
    return cores // CORES[capability]


class ExpertsRecord(NamedTuple):
    """Fields of the experts' record; without one ``accepted`` is 0 and every other field -1."""

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

    Raises InputError: a dtype has no number, or a configuration has no input dtype.
    """
    for name, number in (("in_dtype", in_dtype), ("out_dtype", out_dtype)):
        if not 0 <= number < len(DTYPES):
            raise InputError(f"{name}={number}; dtypes are numbered {dict(enumerate(DTYPES))}")
    if config and not in_dtype:
        raise InputError("in_dtype=0: a configuration has an input dtype, 1 to 3")
    written = in_dtype if config else out_dtype
    if DTYPES[written] == "none":
        return ExpertsRecord(0, *(-1,) * 7)
    (ep_rank, ep_size), (tp_rank, tp_size) = (ep, tp) if config else ((0, 1), (0, 1))
    return ExpertsRecord(1, written, quant_config, ep_rank, ep_size, tp_rank, tp_size, block)


def prepare_finalize_record(config: bool, dp_size: int, block: int) -> tuple[int, int]:
    """(data-parallel, block-scale flag)."""
    return int(config and dp_size >= 2), block
