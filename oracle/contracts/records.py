"""Contracts of small constructors: the records of FlashInfer's CUTLASS MoE, field by field, and the unit scale.

A record is a row of integers in one output for each field, so that two exchanged fields cannot make up for each other;
a refusal is an answer. Right or wrong, as in :mod:`oracle.contracts.layout`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oracle import moe_records
from oracle.contracts.base import FP8, TensorSpec, register
from oracle.contracts.layout import INTEGERS, LayoutContract, TableContract
from oracle.quantize import WIDE

_DTYPES = ", ".join(f"{number} {name}" for number, name in enumerate(moe_records.DTYPES))
_NOTES = {
    "config": "0 none, 1 given",
    "in_dtype": _DTYPES,
    "out_dtype": _DTYPES,
    "quant_config": "any number; it must come back",
    "use_deepseek_fp8_block_scale": "0 or 1",
}


def _columns(*names: str) -> tuple[TensorSpec, ...]:
    plain = "one value for each row of the table; read only with a configuration"
    return tuple(TensorSpec(name, INTEGERS, ("R",), _NOTES.get(name, plain)) for name in names)


@register
class SelectExperts(TableContract):
    """``config``: 0 none, 1 given (the next six columns). Dtypes are numbers: 0 none, 1 bfloat16, 2 float16, 3 float32.
    ``quant_config`` is any number, which must come back. ``accepted`` 0: refused, and every other field is -1."""

    name = "select_cutlass_fp8_gemm_impl"
    summary = "the experts' record: dtype and ranks of the configuration, or the caller's dtype at rank 0 of 1"
    source = "vLLM flashinfer_utils.select_cutlass_fp8_gemm_impl"
    inputs = _columns(
        "config", "in_dtype", "dp_size", "ep_rank", "ep_size", "tp_rank", "tp_size", "out_dtype", "quant_config",
        "use_deepseek_fp8_block_scale",
    )  # fmt: skip
    outputs = moe_records.ExpertsRecord._fields

    def row(self, *arguments: int) -> tuple[int, ...]:
        config, in_dtype, _, ep_rank, ep_size, tp_rank, tp_size, out_dtype, quant_config, block = arguments
        ep, tp = (ep_rank, ep_size), (tp_rank, tp_size)
        return tuple(moe_records.experts_record(bool(config), in_dtype, ep, tp, out_dtype, quant_config, block))


@register
class BuildPrepareFinalize(TableContract):
    """``config``: 0 none, 1 given (the next three columns, of which only ``dp_size`` decides)."""

    name = "build_flashinfer_fp8_cutlass_moe_prepare_finalize"
    summary = "the prepare/finalize record: data-parallel when several ranks are, and the block-scale flag"
    source = "vLLM flashinfer_utils.build_flashinfer_fp8_cutlass_moe_prepare_finalize"
    inputs = _columns("config", "dp_size", "ep_size", "tp_size", "use_deepseek_fp8_block_scale")
    outputs = ("use_dp", "use_deepseek_fp8_block_scale")

    def row(self, *arguments: int) -> tuple[int, ...]:
        config, dp_size, _, _, block = arguments
        return moe_records.prepare_finalize_record(bool(config), dp_size, block)


@register
class DeviceIdentity(LayoutContract):
    """Shape ``[1]`` and not ``[]``: kernels read it through a pointer, as one scale for a tensor."""

    name = "maybe_create_device_identity"
    summary = "the float32 [1] one on the device of the input, the scale of a product without scales"
    source = "vLLM w8a8_utils.maybe_create_device_identity"
    inputs = (TensorSpec("x", (*WIDE, *FP8), None, "whatever lies on the device; its values are not read"),)

    def made(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, Tensor]:
        return {"out": torch.ones(1, dtype=torch.float32, device=inputs["x"].device)}

    def why_mistrust(self, inputs: Mapping[str, Tensor]) -> str | None:
        """Never: there is one right answer whatever the input holds."""
        return None
