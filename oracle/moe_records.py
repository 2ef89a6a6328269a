"""What an engine hands to FlashInfer's CUTLASS MoE: the experts' record and the prepare/finalize record.

With a configuration the experts write its input dtype and stand at its ranks; alone they stand at rank 0 of 1 and
write the dtype that the caller names, which must then be named. Both records carry the block-scale flag, so that the
input is not quantised per tensor where the kernel reads block scales. Tokens travel only when data-parallel ranks are
several.

Dtypes are numbers (:data:`DTYPES`), so that a record is a row of integers. Source: vLLM
quantization/utils/flashinfer_utils.py (select_cutlass_fp8_gemm_impl,
build_flashinfer_fp8_cutlass_moe_prepare_finalize). Not covered: the kernels themselves, FP4.
"""

from __future__ import annotations

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
