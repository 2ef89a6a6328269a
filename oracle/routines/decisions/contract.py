"""Contracts of the decisions about a machine, as tables: one row is one machine with its switches.

Columns are integers: 0 and 1 for conditions, the compute capability as in ``sm90`` (0 for no NVIDIA GPU), versions as
two columns. Answers are 0 and 1, or a number that the contract explains. Each row is right or wrong.

The records of FlashInfer's CUTLASS MoE are rows of integers, one output for each field, so that two exchanged fields
cannot cancel; a refusal is an answer. The unit scale is a contract here too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.numbers.quantize import WIDE
from oracle.routines.base import FP8, Inputs, Options, TensorSpec, register
from oracle.routines.layouts.contract import INTEGERS, LayoutContract, TableContract, columns
from oracle.routines.traits import Kind
from oracle.truth import decisions

_DTYPES = ", ".join(f"{number} {name}" for number, name in enumerate(decisions.DTYPES))
_NOTES = {
    "config": "0 none, 1 given",
    "in_dtype": _DTYPES,
    "out_dtype": _DTYPES,
    "quant_config": "any number; it must come back",
    "use_deepseek_fp8_block_scale": "0 or 1",
}


def _record_columns(*names: str) -> tuple[TensorSpec, ...]:
    plain = "one value for each row of the table; read only with a configuration"
    return tuple(TensorSpec(name, Kind.PARAMETERS, INTEGERS, ("R",), _NOTES.get(name, plain)) for name in names)


@register
class SelectExperts(TableContract):
    """``config``: 0 none, 1 given (the next six columns). Dtypes are numbers: 0 none, 1 bfloat16, 2 float16, 3 float32.
    ``quant_config`` is any number, which must come back. ``accepted`` 0: refused, and every other field is -1."""

    name = "select_cutlass_fp8_gemm_impl"
    section = "MoE"
    summary = "the experts' record: dtype and ranks of the configuration, or the caller's dtype at rank 0 of 1"
    source = "vLLM flashinfer_utils.select_cutlass_fp8_gemm_impl"
    inputs = _record_columns(
        "config",
        "in_dtype",
        "dp_size",
        "ep_rank",
        "ep_size",
        "tp_rank",
        "tp_size",
        "out_dtype",
        "quant_config",
        "use_deepseek_fp8_block_scale",
    )
    returns = decisions.ExpertsRecord._fields

    def row(self, *arguments: int) -> tuple[int, ...]:
        config, in_dtype, _, ep_rank, ep_size, tp_rank, tp_size, out_dtype, quant_config, block = arguments
        ep, tp = (ep_rank, ep_size), (tp_rank, tp_size)
        return tuple(decisions.experts_record(bool(config), in_dtype, ep, tp, out_dtype, quant_config, block))


@register
class BuildPrepareFinalize(TableContract):
    """``config``: 0 none, 1 given (the next three columns, of which only ``dp_size`` decides)."""

    name = "build_flashinfer_fp8_cutlass_moe_prepare_finalize"
    section = "MoE"
    summary = "the prepare/finalize record: data-parallel when several ranks are, and the block-scale flag"
    source = "vLLM flashinfer_utils.build_flashinfer_fp8_cutlass_moe_prepare_finalize"
    inputs = _record_columns("config", "dp_size", "ep_size", "tp_size", "use_deepseek_fp8_block_scale")
    returns = ("use_dp", "use_deepseek_fp8_block_scale")

    def row(self, *arguments: int) -> tuple[int, ...]:
        config, dp_size, _, _, block = arguments
        return decisions.prepare_finalize_record(bool(config), dp_size, block)


@register
class DeviceIdentity(LayoutContract):
    """Shape ``[1]`` and not ``[]``: kernels read it through a pointer, as one scale for a tensor."""

    name = "maybe_create_device_identity"
    shapes = {"out": "[1]"}
    section = "GEMM"
    summary = "the float32 [1] one on the device of the input, the scale of a product without scales"
    source = "vLLM w8a8_utils.maybe_create_device_identity"
    inputs = (
        TensorSpec("x", Kind.VALUES, (*WIDE, *FP8), None, "whatever lies on the device; its values are not read"),
    )

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {"out": torch.ones(1, dtype=torch.float32, device=inputs["x"].device)}

    def why_mistrust(self, inputs: Inputs) -> str | None:
        """Never: there is one right answer whatever the input holds."""
        return None


class Decision(TableContract):
    """One row is one machine with its switches: 0 and 1 for conditions, the compute capability as in ``sm90``: 90 (0
    for no NVIDIA GPU), versions as two columns. The answer is 0 or 1 where nothing else is said."""

    section = "Platform decisions"

    def row(self, *arguments: int) -> int:
        names = (spec.name for spec in self.inputs)
        return decisions.decide(self.name, **dict(zip(names, arguments, strict=True)))


_ENTRY = "vLLM csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu"
_DEEP_GEMM = "vLLM utils/deep_gemm."
_SWITCHES = ("arch", "package", "use_deep_gemm", "use_flashinfer_moe_fp8")
_CUDA = ("arch", "cuda_major", "cuda_minor")
# Name, section ("" for that of decisions), what decides, source, columns.
for _name, _section, _summary, _source, _names in (
    (
        "is_deep_gemm_supported",
        "",
        "sm90 or sm100, the package there, the switch on, FlashInfer's MoE off",
        f"{_DEEP_GEMM}is_deep_gemm_supported",
        _SWITCHES,
    ),
    (
        "is_deep_gemm_e8m0_used",
        "",
        "DeepGEMM supported, and the UE8M0 switch of the architecture on",
        f"{_DEEP_GEMM}is_deep_gemm_e8m0_used",
        (*_SWITCHES, "use_deep_gemm_e8m0", "use_deep_gemm_e8m0_hopper"),
    ),
    (
        "should_use_deepgemm_for_fp8_linear",
        "",
        "DeepGEMM supported, bfloat16 out, N and K multiples of 128",
        f"{_DEEP_GEMM}should_use_deepgemm_for_fp8_linear",
        (*_SWITCHES, "bfloat16_out", "n", "k"),
    ),
    ("cutlass_fp8_supported", "", "sm89 with CUDA 12.4, sm90 and above with CUDA 12.0", _ENTRY, _CUDA),
    ("cutlass_block_fp8_supported", "", "sm90 with CUDA 12.0, sm100 and above with CUDA 12.8", _ENTRY, _CUDA),
    ("cutlass_group_gemm_supported", "", "sm90 with CUDA 12.3, sm100 and above with CUDA 12.8", _ENTRY, _CUDA),
    ("sparse_cutlass_supported", "", "sm90 with CUDA 12.2", _ENTRY, _CUDA),
    (
        "use_rowwise_torch_scaled_mm",
        "",
        "ROCm, torch 2.7 and capability 9.4, compared as versions",
        "vLLM w8a8_utils.USE_ROWWISE_TORCH_SCALED_MM",
        ("rocm", "capability_major", "capability_minor", "torch_major", "torch_minor"),
    ),
    (
        "get_flashinfer_moe_backend",
        "MoE",
        "the kernel family for VLLM_FLASHINFER_MOE_BACKEND: choice 0 unset, 1 throughput, 2 latency, 3 masked_gemm; "
        "answer 0 refused, 1 CUTLASS, 2 TensorRT-LLM, 3 CUTEDSL",
        "vLLM flashinfer_utils.get_flashinfer_moe_backend",
        ("arch", "choice"),
    ),
    (
        "is_flashinfer_supporting_global_sf",
        "MoE",
        "whether a MoE backend (0 none, 1 CUTLASS, 2 TensorRT-LLM, 3 CUTEDSL) takes one scale for all experts",
        "vLLM flashinfer_utils.is_flashinfer_supporting_global_sf",
        ("backend",),
    ),
):
    _fields = {"name": _name, "summary": _summary, "source": _source, "inputs": columns(*_names)}
    register(type(_name, (Decision,), _fields | ({"section": _section} if _section else {})))


@register
class NumSms(TableContract):
    """``product``: 0 no GPU, else its number in :data:`oracle.truth.decisions.GPUS`; ``reported``: the count of a
    driver, -1 when the machine is described by its product alone. Answer: multiprocessors, 0 where the question is
    refused."""

    name = "get_num_sms"
    section = "GEMM"
    summary = "multiprocessors of a device as its driver reports them, of a described product by its cores"
    source = "vLLM utils/deep_gemm.get_num_sms; NVIDIA data sheets; CUDA C++ Programming Guide, compute capabilities"
    _numbered = ", ".join(f"{number} {gpu[0]}" for number, gpu in enumerate(decisions.GPUS, start=1))
    inputs = (
        TensorSpec("product", Kind.PARAMETERS, INTEGERS, ("R",), f"0 no GPU, {_numbered}"),
        TensorSpec("reported", Kind.PARAMETERS, INTEGERS, ("R",), "count of a driver, -1: none was asked"),
    )
    function = staticmethod(decisions.multiprocessors)
