"""Cases of decisions, and of the records that constructors give: tables whose rows are drawn from the values on both
sides of every limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from oracle.routines import data
from oracle.routines.case import TABLE_ROWS, Case, Grammar, no_options
from oracle.routines.decisions.contract import SelectExperts
from oracle.truth.decisions import GPUS

FLAG = (0, 1)
ARCHES = (0, 80, 86, 89, 90, 100, 103, 120)
CUDA = {"cuda_major": (11, 12, 13), "cuda_minor": (0, 1, 2, 3, 4, 7, 8, 9, 10)}
SWITCHES = {"package": (0, 1, 1), "use_deep_gemm": (0, 1, 1), "use_flashinfer_moe_fp8": (0, 0, 1)}
DEEP_GEMM = {"arch": (0, 89, 90, 90, 100, 100, 103, 120), **SWITCHES}
E8M0 = {"use_deep_gemm_e8m0": FLAG, "use_deep_gemm_e8m0_hopper": FLAG}
EXTENTS = (1, 64, 127, 128, 129, 256, 7168)
CAPABILITY = {"capability_major": (9, 10), "capability_minor": (0, 3, 4, 5)}
# Every product of the family "integers" and none; no driver asked (half of the rows), none left, slices and salvaged
# parts, two common counts.
SMS = {"product": tuple(range(11)), "reported": (-1, -1, -1, -1, -1, -1, 0, 1, 16, 78, 114, 132)}
SIZES = (1, 1, 2, 3, 4, 8)
DTYPE_NUMBERS = {"in_dtype": (1, 1, 2, 3), "out_dtype": (0, 0, 1, 2, 3)}
# What came after the cases of the family "integers" were published: the family "recent" draws it for every second row.
RECENT = {"arch": (121,), "product": tuple(range(11, len(GPUS) + 1))}
TORCH = {"torch_major": (1, 2, 3), "torch_minor": (0, 6, 7, 10, 11)}


def _table(columns: Mapping[str, tuple[int, ...]]) -> Grammar:
    families = ("integers", "recent") if RECENT.keys() & columns.keys() else ("integers",)
    return _rows(lambda case: _drawn(case, columns), families)


def _rows(build: Callable[[Case], dict[str, Tensor]], families: tuple[str, ...] = ("integers",)) -> Grammar:
    return Grammar(("r",), ("i64",), ("-",), families, build, no_options, shapes=TABLE_ROWS)


def _drawn(case: Case, columns: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    rows = (case["r"],)
    if case.family == "recent":
        columns = {name: (*values, *RECENT.get(name, ()) * len(values)) for name, values in columns.items()}
    return {
        name: torch.tensor(values, dtype=torch.int64, device="cpu")[
            torch.from_numpy(case.stream(name).integers(0, len(values), rows))
        ]
        for name, values in columns.items()
    }


def _experts_records(case: Case) -> dict[str, Tensor]:
    """Ranks below their sizes; ``quant_config`` is a number of its own in every row."""
    sizes = _drawn(case, {"dp_size": SIZES, "ep_size": SIZES, "tp_size": SIZES})
    anywhere = _drawn(case, {"ep_rank": tuple(range(8)), "tp_rank": tuple(range(8))})
    ranks = {name: rank % sizes[name.replace("rank", "size")] for name, rank in anywhere.items()}
    other = _drawn(case, {"config": (0, 1, 1), **DTYPE_NUMBERS, "use_deepseek_fp8_block_scale": FLAG})
    columns = {**sizes, **ranks, **other, "quant_config": torch.arange(1, case["r"] + 1, device="cpu") * 100}
    return {spec.name: columns[spec.name] for spec in SelectExperts.inputs}


def _anything(case: Case) -> dict[str, Tensor]:
    (dtype,) = case.operand_dtypes
    return {"x": data.activations(case.label("x"), case.family, case["m"], case["k"], dtype=dtype)}


_CUTLASS = _table({"arch": ARCHES, **CUDA})
GRAMMARS: Mapping[str, Grammar] = {
    "is_deep_gemm_supported": _table(DEEP_GEMM),
    "is_deep_gemm_e8m0_used": _table({**DEEP_GEMM, **E8M0}),
    "should_use_deepgemm_for_fp8_linear": _table(
        {**DEEP_GEMM, "bfloat16_out": (0, 1, 1), "n": EXTENTS, "k": (128, *EXTENTS)}
    ),
    "cutlass_fp8_supported": _CUTLASS,
    "cutlass_block_fp8_supported": _CUTLASS,
    "cutlass_group_gemm_supported": _CUTLASS,
    "sparse_cutlass_supported": _CUTLASS,
    "use_rowwise_torch_scaled_mm": _table({"rocm": FLAG, **CAPABILITY, **TORCH}),
    "get_flashinfer_moe_backend": _table({"arch": ARCHES, "choice": (0, 1, 2, 3)}),
    "is_flashinfer_supporting_global_sf": _table({"backend": (0, 1, 2, 3)}),
    "get_num_sms": _table(SMS),
    "select_cutlass_fp8_gemm_impl": _rows(_experts_records),
    "build_flashinfer_fp8_cutlass_moe_prepare_finalize": _table(
        {
            "config": (0, 1, 1),
            "dp_size": SIZES,
            "ep_size": SIZES,
            "tp_size": SIZES,
            "use_deepseek_fp8_block_scale": FLAG,
        }
    ),
    "maybe_create_device_identity": Grammar(
        ("m", "k"),
        ("bf16", "f32"),
        ("-",),
        ("randn",),
        _anything,
        no_options,
        shapes=("m=1,k=1", "m=3,k=32"),
        fixed=True,
    ),
}
